"""The harness as a program: its commands and help, which name it as it was started."""

from collections.abc import Sequence
from functools import partial

from cdpsim.cli.parser import Command, command, help_text, serve_command
from cdpsim.errors import RequestError
from cdpsim.request.options import OPTIONS, flag_of

from . import PROGRAM


def harness_text(name: str) -> str:
    """Return a text that help shows."""
    text = help_text(name, __package__)
    return text.replace("python -m validation", PROGRAM).replace("-m validation", f"-m {__package__}")


harness_command = partial(command, texts=harness_text)


def serve_harness(commands: Sequence[Command], arguments: Sequence[str]) -> int:
    """Let the command that arguments name serve them, and return its exit code.

    A replay says of options that it does not have, but a simulation, that they are not replayed.
    """
    try:
        return serve_command(PROGRAM, harness_text, commands, arguments)
    except RequestError as error:
        is_unknown = error.problem.startswith("unknown option")
        if is_unknown and arguments[0] == "replay" and error.subject in map(flag_of, OPTIONS):
            raise RequestError(error.subject, "is not replayed, only simulated; leave it out") from None
        raise

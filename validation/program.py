"""The harness as a program: its commands and help, which name it as it was started."""

from collections.abc import Sequence
from functools import partial

from cdpsim.cli.parser import Command, command, help_text, serve_command

from . import PROGRAM


def harness_text(name: str) -> str:
    """Return a text that help shows."""
    text = help_text(name, __package__)
    return text.replace("python -m validation", PROGRAM).replace("-m validation", f"-m {__package__}")


harness_command = partial(command, texts=harness_text)


def serve_harness(commands: Sequence[Command], arguments: Sequence[str]) -> int:
    """Let the command that arguments name serve them, and return its exit code."""
    return serve_command(PROGRAM, harness_text, commands, arguments)

"""The command that prints a script by which a shell completes command lines."""

import argparse
from collections.abc import Iterator
from importlib.resources import files
from shlex import quote

from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import Parser, argument, command
from cdpsim.errors import choose

_SHELLS = ("bash", "zsh")


@command("completion", argument("shell", metavar="SHELL", choices=_SHELLS, help="bash or zsh"))
def completion_command(args: argparse.Namespace) -> int:
    """Print a script for tab completion in a shell."""
    shell = choose("shell", args.shell, _SHELLS)
    places: dict[str, list[str]] = {}  # of all commands, by what may stand there
    for name, parser in args.parsers.items():
        for place, known in _known_words(parser):
            places.setdefault(known, []).append(quote(f"{name} {place}"))
    lines = "".join(f"        {'|'.join(alike)}) {known} ;;\n" for known, alike in places.items())
    common, own = ((files("cdpsim.cli") / "completion" / f"{part}.sh").read_text("utf-8") for part in ("places", shell))
    write_stdout(common.replace("PLACES\n", lines) + own)
    return 0


def _known_words(parser: Parser) -> Iterator[tuple[str, str]]:
    """Yield the places of a command line, and for each the assignments of the names and files that may stand there."""
    yield "-", f"known={quote(' '.join(parser._option_string_actions))}"
    arguments = [action for action in parser._actions if not action.option_strings]
    for action in parser._actions:
        metavar = str(action.metavar)
        kind = "-f" if "FILE" in metavar else "-d" if "DIR" in metavar else ""
        known = f"known={quote(' '.join(action.choices or ()))} files={kind}"
        if action in arguments:
            yield "+" if action.nargs in ("*", "+") else str(arguments.index(action)), known
        elif action.nargs != 0:
            yield from ((flag, known) for flag in action.option_strings)

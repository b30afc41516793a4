"""Command lines with several commands: parsed by argparse, refused in the form of all other refusals."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from operator import methodcaller
from typing import Any, NoReturn

from cdpsim.cli.console import write_stdout
from cdpsim.errors import RequestError, suggestion
from cdpsim.version import __version__

Argument = Callable[[Any], object]  # adds something to the parser of a command, or to a group of it
Serve = Callable[[argparse.Namespace], int]
argument: Callable[..., Argument] = partial(methodcaller, "add_argument")


class Parser(argparse.ArgumentParser):
    """A parser that refuses a mistake in one line, as a `RequestError`; help ends with the text that `more` returns."""

    def __init__(self, *, more: Callable[[], str] = str, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        self._more = more

    def format_help(self) -> str:
        """Return the help; only now is its text read."""
        self.epilog = self._more()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Refuse what argparse could not read."""
        subject, _, problem = message.partition(": ")
        if subject == "the following arguments are required":
            subject, problem = problem, "is missing" if ", " not in problem else "are missing"
        elif not problem:
            subject, problem = "arguments", message
        raise RequestError(subject.removeprefix("argument "), f"{problem}; see {self.prog} --help")

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Refuse words that no option or argument has taken."""
        for word in words:
            name, see = word.partition("=")[0][:80], f"see {self.prog} --help"
            if name.startswith("-"):
                meant = suggestion(name.lower(), self._option_string_actions)
                raise RequestError(name, f"unknown option; {meant}; {see}")
            raise RequestError(repr(name), f"is one argument too many; {see}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Up to Python 3.12, `--x=--` loses its value, which stands behind the option and ends nothing.
        if action.option_strings and "--" in arg_strings:
            values = [self._get_value(action, word) for word in arg_strings]
            return values if action.nargs else values[0]
        return super()._get_values(action, arg_strings)

    def _print_message(self, message: str, file: object = None) -> None:
        write_stdout(message)


@dataclass(frozen=True)
class Command:
    """A command of a command line: its name, a line and a text about it, its arguments, and the function it calls.

    The function gets the options that were given and returns an exit code.
    """

    name: str
    about: str
    more: Callable[[], str]
    arguments: tuple[Argument, ...]
    serve: Serve

    def add_to(self, commands: Any) -> None:
        """Add a parser for this command to those of other commands."""
        about = f"{self.about[0].upper()}{self.about[1:]}."
        parser = commands.add_parser(self.name, help=self.about, description=about, more=self.more)
        parser.set_defaults(serve=self.serve)
        for add in self.arguments:
            add(parser)


def argument_group(title: str, *arguments: Argument) -> Argument:
    """Return arguments that help shows under a title."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(title)
        for add_argument in arguments:
            add_argument(group)

    return add


def help_text(name: str, package: str = "cdpsim.cli") -> str:
    """Return a text that help shows, by the name of its file in a package."""
    return (files(package) / "help" / name).read_text("utf-8")


def command(name: str, *arguments: Argument, package: str = "cdpsim.cli") -> Callable[[Serve], Command]:
    """Make a function a command: its docstring is the line about it, and help/NAME.txt in a package the text."""

    def make(serve: Serve) -> Command:
        about = (serve.__doc__ or name).removesuffix(".")
        more = partial(help_text, f"{name}.txt", package)
        return Command(name, f"{about[0].lower()}{about[1:]}", more, arguments, serve)

    return make


def serve_command(program: str, package: str, commands: Sequence[Command], arguments: Sequence[str]) -> int:
    """Let the command that arguments name serve them, and return its exit code.

    A package has the texts of the program's help: help/PROGRAM.txt and help/examples.txt.
    """
    more = partial(help_text, "examples.txt", package)
    parser = Parser(prog=program, description=help_text(f"{package.split('.')[0]}.txt", package), more=more)
    parser.add_argument("--version", action="version", version=f"cdpsim {__version__}")
    parsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True, parser_class=Parser)
    for command in commands:
        command.add_to(parsers)
    first = arguments[0] if arguments else ""
    if arguments and not first.startswith("-") and first not in parsers.choices:
        raise RequestError("command", f"unknown command {first[:80]!r}; {suggestion(first, parsers.choices)}")
    try:
        options, unknown = parser.parse_known_args(arguments)
    except SystemExit:  # --help and --version have been served
        return 0
    parsers.choices[options.command].refuse_unknown(unknown)
    code: int = options.serve(options)
    return code

"""Command lines with several commands: parsed by argparse, refused in the form of all other refusals."""

import argparse
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from operator import methodcaller
from shlex import quote
from time import perf_counter
from typing import Any, NoReturn

from cdpsim.cli.console import write_stdout
from cdpsim.errors import RequestError, choose, nearest, suggestion
from cdpsim.files.notes import DETAILS, NOTES, QUIET, detail, verbosity
from cdpsim.request.options import ELSEWHERE, flag_of, refuse_renamed
from cdpsim.version import __version__

Argument = Callable[[Any], object]  # adds something to the parser of a command, or to a group of it
Serve = Callable[[argparse.Namespace], int]
Texts = Callable[[str], str]  # gives a text that help shows, by the name of its file
argument: Callable[..., Argument] = partial(methodcaller, "add_argument")

_DETAILS_BELOW = "\n----\n"  # in a text of help: what is above this line is short help


class _ShowHelp(argparse.Action):
    """An option that prints help, all of it where `const` says so."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        write_stdout(parser.help_text(everything=bool(self.const)))
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser that refuses a mistake in one line, as a `RequestError`.

    Help fits a screen: it has the text that `more` returns up to a line of dashes, and the arguments outside titled
    groups, which are what most users of a command want. --help-all prints everything.
    """

    def __init__(self, *, more: Callable[[], str] = str, **settings: Any) -> None:
        settings |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, "add_help": False}
        super().__init__(**settings)
        self._more = more
        self._positionals.title = "arguments"
        for flags, everything, about in (
            (("-h", "--help"), False, "print what most users of a command want to know"),
            (("--help-all",), True, "print all options and all details"),
        ):
            self.add_argument(*flags, nargs=0, action=_ShowHelp, const=everything, help=about)

    def help_text(self, *, everything: bool) -> str:
        """Return the help; only now is its text read."""
        brief, _, details = self._more().partition(_DETAILS_BELOW)
        formatter = self._get_formatter()
        formatter.add_usage(f"%(prog)s {self._synopsis()}", (), ())
        for text in (self.description, brief):
            formatter.add_text(text)
        groups = self._action_groups if everything else [self._positionals, self._optionals]
        for group in groups:
            formatter.start_section(group.title)
            shown = [each for each in group._group_actions if everything or not isinstance(each, _ShowHelp)]
            formatter.add_arguments(shown)
            formatter.end_section()
        hidden = [] if everything else [action for group in self._action_groups[2:] for action in group._group_actions]
        flags = [min(action.option_strings[:2], key=lambda flag: flag[:2]) for action in hidden]
        if flags:
            names = textwrap.fill(" ".join(flags), 98, break_on_hyphens=False)
            details = f"more options, which --help-all explains:\n{textwrap.indent(names, '  ')}"
        elif not everything:
            details = "--help-all explains more"
        formatter.add_text(details)
        return formatter.format_help()

    def _synopsis(self) -> str:
        """Return what a command line has at least."""
        positional, required = [], []
        for action in self._actions:
            value = str(action.metavar or action.dest.upper())
            if action.option_strings:
                required += [f"{action.option_strings[0]} {value}"] * action.required
            else:
                several = f"{value} ..." if action.nargs in ("*", "+") else value
                positional.append(f"[{several}]" if action.nargs in ("*", "?") else several)
        return " ".join([*positional, *required, "[options]"])

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
            name, see = word.partition("=")[0][:80], f"see {self.prog} --help-all"
            if name.startswith("-"):
                refuse_renamed(name)
                wanted = ELSEWHERE.get(name.removeprefix("--").replace("-", "_"))
                meant = nearest(flag_of(wanted) if wanted else name.lower(), self._option_string_actions)
                hint = f"did you mean {' or '.join(map(repr, meant))}? " if meant else ""
                raise RequestError(name, f"unknown option; {hint}{see}")
            raise RequestError(repr(name), f"is one argument too many; {see}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # The choices of an argument are for tab completion; the request refuses a value, and may take a file or a list.
        if isinstance(action, argparse._SubParsersAction):
            super()._check_value(action, value)

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
        for add in (*self.arguments, _COMMON_OPTIONS):
            add(parser)


def argument_group(title: str, *arguments: Argument) -> Argument:
    """Return arguments that help shows under a title."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(title)
        for add_argument in arguments:
            add_argument(group)

    return add


def _verbosity_options(group: argparse._ArgumentGroup) -> None:
    either = group.add_mutually_exclusive_group()
    settings: dict[str, Any] = {"dest": "verbosity", "action": "store_const", "default": NOTES}
    either.add_argument("-q", "--quiet", const=QUIET, help="print no notes on stderr, only errors", **settings)
    about = "print on stderr also what is read, made, chosen and written"
    either.add_argument("-v", "--verbose", const=DETAILS, help=about, **settings)


_COMMON_OPTIONS = argument_group("common options", _verbosity_options)


def help_text(name: str, package: str = "cdpsim.cli") -> str:
    """Return a text that help shows, by the name of its file in a package."""
    return (files(package) / "help" / name).read_text("utf-8")


def command(name: str, *arguments: Argument, texts: Texts = help_text) -> Callable[[Serve], Command]:
    """Make a function a command: its docstring is the line about it, and the file NAME.txt has the text."""

    def make(serve: Serve) -> Command:
        about = (serve.__doc__ or name).removesuffix(".")
        return Command(name, f"{about[0].lower()}{about[1:]}", partial(texts, f"{name}.txt"), arguments, serve)

    return make


def serve_command(program: str, texts: Texts, commands: Sequence[Command], arguments: Sequence[str]) -> int:
    """Let the command that arguments name serve them, and return its exit code.

    Help of the program itself is in the files about.txt and examples.txt.
    """
    parser = Parser(prog=program, description=texts("about.txt"), more=partial(texts, "examples.txt"))
    parser.add_argument("--version", action="version", version=f"cdpsim {__version__}", help="print the version")
    parser._positionals.title = "commands"
    parsers = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=Parser)
    for command in commands:
        command.add_to(parsers)
    parser.set_defaults(parsers={"": parser, **parsers.choices})
    first = arguments[0] if arguments else "--help"
    if not first.startswith("-") and first not in parsers.choices:
        hint = suggestion(first, parsers.choices)
        joint = " " if hint.endswith("?") else "; "
        raise RequestError("command", f"unknown command {first[:80]!r}; {hint}{joint}see {program} --help")
    begun = perf_counter()
    try:
        options, unknown = parser.parse_known_args(arguments or [first])
    except SystemExit:  # --help and --version have been served
        return 0
    parsers.choices.get(options.command, parser).refuse_unknown(unknown)
    if options.command is None:
        parser.error("COMMAND: is missing")
    with verbosity(options.verbosity):
        code: int = options.serve(options)
        detail(f"{options.command}: {perf_counter() - begun:.3f} s, exit code {code}")
    return code


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

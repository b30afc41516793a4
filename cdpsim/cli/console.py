"""What our command lines have in common: data to stdout, all else to stderr, one line and exit 2 for what cannot be."""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NoReturn

from cdpsim.errors import RequestError, Stalled, one_line, suggestion
from cdpsim.version import __version__


class Parser(argparse.ArgumentParser):
    """Reports a mistake as every other refusal: one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse what argparse could not read, in our form."""
        subject, _, problem = message.partition(": ")
        if subject == "the following arguments are required":
            subject, problem = problem, "is missing" if ", " not in problem else "are missing"
        elif not problem:
            subject, problem = "arguments", message
        raise RequestError(subject.removeprefix("argument "), f"{problem}; see {self.prog} --help")

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Refuse what no option or argument has taken."""
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
        write(message)


def run(serve: Callable[[list[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return its exit code."""
    try:
        with _ending_signals():
            return serve(list(sys.argv[1:] if arguments is None else arguments))
    except RequestError as error:
        problem = str(error)
    except Stalled as answer:
        say(str(answer))
        return 1
    except MemoryError:
        problem = "memory: there is not enough of it; take fewer stages or steps"
    except OSError as error:
        problem = str(RequestError(str(error.filename or "system"), f"{error.strerror or error}; mend that, try again"))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except _Ended as ended:
        say("terminated")
        return 128 + ended.number
    say(f"error: {problem}")
    return 2


class _Ended(BaseException):
    """A signal asks the process to end; what is open is closed on the way out, as on Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _ending_signals() -> Iterator[None]:
    """Raise an exception on SIGTERM and SIGHUP, where they would end the process at once and leave its temporaries."""
    names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, _end)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one does not disturb the clearing up
    raise _Ended(number)


def parser_of(program: str, about: str, examples: str) -> tuple[Parser, Any]:
    """Make a parser, and what commands are added to."""
    parser = Parser(
        prog=program,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cdpsim {__version__}")
    return parser, parser.add_subparsers(metavar="COMMAND", dest="command", required=True, parser_class=Parser)


def add_command(
    commands: Any, name: str, serve: Callable[[argparse.Namespace], int], about: str, more: str
) -> argparse.ArgumentParser:
    """Add a command, which `serve` serves."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(serve=serve)
    return parser


def dispatch(parser: Parser, commands: Any, arguments: list[str]) -> int:
    """Let the command that is asked for serve."""
    known: dict[str, Parser] = commands.choices
    first = arguments[0] if arguments else ""
    if arguments and not first.startswith("-") and first not in known:
        raise RequestError("command", f"unknown command {first[:80]!r}; {suggestion(first, known)}")
    try:
        options, unknown = parser.parse_known_args(arguments)
    except SystemExit:  # --help and --version have been served
        return 0
    known[options.command].refuse_unknown(unknown)
    code: int = options.serve(options)
    return code


def write(text: str) -> None:
    """Write data to stdout, the same bytes everywhere, and at once: later nobody could report a failure."""
    if sys.stdout is None:
        raise RequestError("standard output", "is closed; open it, or redirect it into a file")
    try:
        sys.stdout.flush()
        if hasattr(sys.stdout, "buffer"):  # else it takes text only, as io.StringIO does
            sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, `head` perhaps, has seen enough
        _silence(sys.stdout)
    except OSError as error:
        _silence(sys.stdout)
        raise RequestError("standard output", f"{error.strerror or error}; redirect it to where it fits") from None


def say(line: str) -> None:
    """Write one line to stderr, if anybody listens."""
    if sys.stderr is None:
        return
    try:
        print(f"cdpsim: {one_line(line)}", file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def _silence(stream: IO[str]) -> None:
    """Let what a stream still holds go nowhere: Python writes it as it exits, and would fail again."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)

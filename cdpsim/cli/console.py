"""The streams and exit codes of our command lines: data to stdout, all else to stderr, a refusal in one line."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from cdpsim.errors import RequestError, Stalled
from cdpsim.files.notes import explain, silence
from cdpsim.interrupts import serve_interrupts


def exit_code_of(serve: Callable[[list[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Serve arguments, by default those of this process, and return the exit code; print why it is not 0."""
    try:
        serve_interrupts()
        with _ending_signals():
            return serve(list(sys.argv[1:] if arguments is None else arguments))
    except RequestError as error:
        problem = str(error)
    except Stalled as answer:
        explain(str(answer))
        return 1
    except MemoryError:
        problem = "memory: there is not enough of it; take fewer stages or steps"
    except OSError as error:
        problem = str(RequestError(str(error.filename or "system"), f"{error.strerror or error}; mend that, try again"))
    except KeyboardInterrupt:
        explain("interrupted")
        return 130
    except _Ended as ended:
        explain("terminated")
        return 128 + ended.number
    explain(f"error: {problem}")
    return 2


class _Ended(BaseException):
    """A signal asks the process to end; open files are closed on the way out, as on Ctrl-C."""

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
    signal.signal(number, signal.SIG_IGN)  # a second signal does not disturb the clearing up
    raise _Ended(number)


def write_stdout(text: str) -> None:
    """Write data to stdout, the same bytes everywhere, and at once, while a failure can still be reported."""
    if sys.stdout is None:
        raise RequestError("standard output", "is closed; open it, or redirect it into a file")
    try:
        sys.stdout.flush()
        if hasattr(sys.stdout, "buffer"):  # a stream such as io.StringIO takes text only
            sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        silence(sys.stdout)
    except OSError as error:
        silence(sys.stdout)
        raise RequestError("standard output", f"{error.strerror or error}; redirect it to where it fits") from None

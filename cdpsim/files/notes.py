"""Lines on stderr: why an exit code is not 0; notes, unless a process is quiet; and details, if it is verbose.

A progress bar is on stderr, on a terminal only, after two seconds.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from cdpsim.errors import one_line

QUIET, NOTES, DETAILS = range(3)  # how much is said beside the data
_VERBOSITY: ContextVar[int] = ContextVar("verbosity", default=NOTES)


@contextlib.contextmanager
def verbosity(level: int) -> Iterator[None]:
    """Set the level of notes inside the block."""
    token = _VERBOSITY.set(level)
    try:
        yield
    finally:
        _VERBOSITY.reset(token)


def is_quiet() -> bool:
    """Return whether nothing but errors is to be said."""
    return _VERBOSITY.get() == QUIET


def explain(line: str) -> None:
    """Write to stderr, if it is open, why the exit code is not 0."""
    if sys.stderr is None:
        return
    try:
        # One write, even where nothing is buffered: lines of several processes do not mix.
        print(f"cdpsim: {one_line(line)}\n", end="", file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def say(line: str) -> None:
    """Write a note to stderr, unless the process is quiet."""
    if not is_quiet():
        explain(line)


def detail(line: str) -> None:
    """Write to stderr what was read, made or chosen on the way, if the process is verbose."""
    if _VERBOSITY.get() == DETAILS:
        explain(line)


def silence(stream: IO[str]) -> None:
    """Discard the buffer of a stream: Python flushes it at exit, and would fail again."""
    with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


Item = TypeVar("Item", covariant=True)


class _Finite(Sized, Iterable[Item], Protocol[Item]): ...


def progress_bar(about: str, **settings: Any) -> Any:
    """Return a progress bar where stderr is a terminal, and notes are wanted, else None."""
    if is_quiet() or sys.stderr is None or sys.stderr.closed or not sys.stderr.isatty():
        return None
    from tqdm import tqdm  # its import takes 40 ms, which only a terminal needs

    return tqdm(**settings, desc=about, file=sys.stderr, delay=2, leave=False)


def progress(items: _Finite[Item], about: str) -> Iterable[Item]:
    """Return items, which move a progress bar as they are used."""
    bar: Iterable[Item] | None = progress_bar(about, iterable=items)
    return items if bar is None else bar


def ticker(total: int, about: str) -> Callable[[int], object]:
    """Return a function that advances a progress bar towards a total, and ends it at 0."""
    bar = progress_bar(about, total=total)
    if bar is None:
        return lambda added: None
    return lambda added: bar.update(added) if added else bar.close()

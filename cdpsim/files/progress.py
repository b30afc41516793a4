"""A progress bar for what takes over two seconds: to stderr, and only on a terminal."""

import sys
from collections.abc import Callable, Iterable, Sized
from typing import Any, Protocol, TypeVar

from cdpsim.files.notes import is_quiet

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
    """Return a function that moves a progress bar by what has been added to reach a total, and ends it with 0."""
    bar = progress_bar(about, total=total)
    if bar is None:
        return lambda added: None
    return lambda added: bar.update(added) if added else bar.close()

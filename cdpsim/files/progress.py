"""A progress bar for what takes over two seconds: to stderr, and only on a terminal."""

import sys
from collections.abc import Callable, Iterable, Sized
from typing import Protocol, TypeVar

Item = TypeVar("Item", covariant=True)


class _Finite(Sized, Iterable[Item], Protocol[Item]): ...


def _on_a_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def progress(items: _Finite[Item], about: str) -> Iterable[Item]:
    """Go through items and show how far that is."""
    if not _on_a_terminal():
        return items
    from tqdm import tqdm  # 40 ms that only a terminal needs

    bar: Iterable[Item] = tqdm(items, desc=about, file=sys.stderr, delay=2, leave=False)
    return bar


def ticker(total: int, about: str) -> Callable[[int], object]:
    """Show how much of a total is done: call what is returned with what has been added, and with 0 at the end."""
    if not _on_a_terminal():
        return lambda added: None
    from tqdm import tqdm

    bar = tqdm(total=total, desc=about, file=sys.stderr, delay=2, leave=False)

    def tick(added: int) -> None:
        bar.update(added) if added else bar.close()

    return tick

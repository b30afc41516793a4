"""A progress bar for what takes over two seconds: to stderr, and only on a terminal."""

import sys
from collections.abc import Iterable, Sized
from typing import Protocol, TypeVar

Item = TypeVar("Item", covariant=True)


class _Finite(Sized, Iterable[Item], Protocol[Item]): ...


def progress(items: _Finite[Item], about: str) -> Iterable[Item]:
    """Go through items and show how far that is."""
    if sys.stderr is None or not sys.stderr.isatty():  # None: it is closed
        return items
    from tqdm import tqdm  # 40 ms that only a terminal needs

    bar: Iterable[Item] = tqdm(items, desc=about, file=sys.stderr, delay=2, leave=False)
    return bar

"""Textbook collectives: how many rounds they take, how long those last, how much each member sends.

All-reduce by ring, binomial tree (reduce, then broadcast) or recursive doubling; broadcast and reduce by binomial tree.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cdpsim.columns import Ints
from cdpsim.program import Op


@dataclass(frozen=True)
class Algorithm:
    """A way to run a collective over k members, as the rounds it takes and what each of them carries."""

    rounds: Callable[[int], int]
    parts: Callable[[int], int]  # a round carries one of so many equal parts of the payload
    sends: Callable[[int], Ints]  # parts that each member sends in all, the root first


def _log2_floor(k: int) -> int:
    return k.bit_length() - 1


def _log2_ceil(k: int) -> int:
    return (k - 1).bit_length()


def _children(k: int) -> Ints:
    """How many members each member of a binomial tree hands the payload on to."""
    rank = np.arange(k)
    sends = np.zeros(k, dtype=np.int64)
    for bit in range(_log2_ceil(k)):
        sends += (rank < 1 << bit) & (rank + (1 << bit) < k)
    return sends


def _to_parent(k: int) -> Ints:
    return (np.arange(k) > 0).astype(np.int64)


def _doubling_rounds(k: int) -> int:
    return _log2_floor(k) + (0 if k == 1 << _log2_floor(k) else 2)


def _doubling_sends(k: int) -> Ints:
    """Members beyond the largest power of two hand their part to a partner first and get the result back last."""
    core = 1 << _log2_floor(k)
    rank = np.arange(k)
    return np.where(rank < core, _log2_floor(k) + (rank < k - core), 1)


BROADCAST = Algorithm(_log2_ceil, lambda k: 1, _children)
REDUCE = Algorithm(_log2_ceil, lambda k: 1, _to_parent)
ALL_REDUCE: dict[str, Algorithm] = {
    "recursive-doubling": Algorithm(_doubling_rounds, lambda k: 1, _doubling_sends),
    "ring": Algorithm(lambda k: 2 * (k - 1), lambda k: k, lambda k: np.full(k, 2 * (k - 1))),
    "tree": Algorithm(lambda k: 2 * _log2_ceil(k), lambda k: 1, lambda k: _children(k) + _to_parent(k)),
}


def algorithm(op: Op, all_reduce: str) -> Algorithm:
    """The algorithm of a collective, where all-reduces use the named one."""
    return {Op.BROADCAST: BROADCAST, Op.REDUCE: REDUCE, Op.ALL_REDUCE: ALL_REDUCE[all_reduce]}[op]

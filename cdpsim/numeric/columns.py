"""Columns: rows of integers sorted, grouped and found; times that rounding sets apart made equal.

`Kept` is an LRU cache bounded by total size.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.signedinteger[Any]]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Times = NDArray[Any]  # slots (integers) or seconds (floats)
Columns = Mapping[str, NDArray[Any]]  # of one table, by name


def sort_by(*columns: Ints) -> Ints:
    """Return the permutation that sorts rows by columns, the first one most significant; equal rows stay in order."""
    key, rows = _key(columns), len(columns[0])
    if key is None:
        return np.lexsort(columns[::-1]).astype(np.int32)
    if (key[1:] >= key[:-1]).all():
        return np.arange(rows, dtype=np.int32)
    if not _number_rows(key):
        return np.argsort(key, kind="stable").astype(np.int32)
    key.sort()
    key &= 2 ** rows.bit_length() - 1
    return key.astype(np.int32)


def sort_and_group(*columns: Ints) -> tuple[Ints, Ints]:
    """Return the permutation that sorts rows by their columns, and where each group of equal rows begins then."""
    key, bits = _key(columns), len(columns[0]).bit_length()
    if key is None or not _number_rows(key):
        order = sort_by(*columns)
        return order, group_starts(*(column[order] for column in columns))
    key.sort()
    return (key & (2**bits - 1)).astype(np.int32), group_starts(key >> bits)


def _key(columns: Sequence[Ints]) -> Ints | None:
    """Return one number for each row, ordered as rows are by their columns; None where these are too wide."""
    spans = [int(column.max(initial=0)) + 1 for column in columns]
    if prod(spans) >= 2**62:
        return None
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column, span in zip(columns, spans, strict=True):
        key *= span
        key += column
    return key


def _number_rows(key: Ints) -> bool:
    """Append the row's number to each key, unless too wide: numbers are sorted ten times as fast as their places."""
    bits = len(key).bit_length()
    if int(key.max(initial=0)) + 1 << bits >= 2**62:
        return False
    key <<= bits
    key |= np.arange(len(key))
    return True


def concatenate_columns(parts: Sequence[NDArray[Any]], kind: np.dtype[Any]) -> NDArray[Any]:
    """Return a column of parts; a column of one number throughout is a view that takes no memory."""
    parts = [part for part in parts if len(part)]
    if parts and all(part.strides == (0,) and part[0] == parts[0][0] for part in parts):
        return np.broadcast_to(parts[0][0].astype(kind), sum(map(len, parts)))
    return np.concatenate(parts).astype(kind, copy=False) if parts else np.empty(0, dtype=kind)


def take_rows(column: NDArray[Any], rows: Ints) -> NDArray[Any]:
    """Return some rows of a column; a column of one number throughout stays a view that takes no memory."""
    uniform = column.strides == (0,) and len(column)
    return np.broadcast_to(column[0], len(rows)) if uniform else column[rows]


def dense_ranks(column: NDArray[Any]) -> Ints:
    """Return each row's place among the column's different values: integers are sorted faster than times."""
    order = np.argsort(column)
    rank = np.empty(len(column), dtype=np.int64)
    rank[order] = np.cumsum(np.diff(column[order], prepend=column[order[:1]]) > 0)
    return rank


def slice_rows(first: Ints, count: Ints) -> Ints:
    """Return the rows of slices, one after another: those from `first[k]` on, `count[k]` of them.

    >>> slice_rows(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    rows: Ints = np.arange(count.sum()) + np.repeat(first - np.cumsum(count) + count, count)
    return rows


def group_starts(*columns: Ints) -> Ints:
    """Return the first row of each group of equal rows that follow each other."""
    changed = np.zeros(len(columns[0]), dtype=bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changed).astype(np.int32)


def group_numbers(first: Ints, rows: int) -> Ints:
    """Return the group of each of `rows` rows; groups begin at `first`."""
    return np.repeat(np.arange(len(first), dtype=np.int32), np.diff(np.append(first, rows)))


def expand_ranges(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """List all numbers from each `low` up to its `high`: the range that each is of, and the number.

    >>> range_, number = expand_ranges(np.array([3, 7]), np.array([6, 8]))
    >>> range_.tolist(), number.tolist()
    ([0, 0, 0, 1], [3, 4, 5, 7])
    """
    return np.repeat(np.arange(len(low)), high - low), slice_rows(low, high - low)


def row_numbers(columns: Sequence[Ints]) -> Ints:
    """Number rows so that equal rows have equal numbers, and no others."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        least = int(column.min(initial=0))
        number *= int(column.max(initial=0)) - least + 1
        number += column
        number -= least
    return number


def matching_pairs(rows: Sequence[Ints], wanted: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return all pairs of a row and a wanted row that have equal columns: (row, wanted), in the order of the wanted."""
    have, want = _common_numbers(rows, wanted)
    order = sort_by(have)
    low, high = (np.searchsorted(have[order], want, side=side) for side in ("left", "right"))
    which, place = expand_ranges(low, high)
    return order[place], which


def find_rows(rows: Sequence[Ints], wanted: Sequence[Ints]) -> Ints:
    """Return the first row that has the columns of each wanted row; -1 where there is none."""
    have, want = _common_numbers(rows, wanted)
    order = np.append(sort_by(have), -1)
    found: Ints = order[np.searchsorted(have[order[:-1]], want)].astype(np.int64)
    found[np.append(have, -1)[found] != want] = -1
    return found


def _common_numbers(rows: Sequence[Ints], wanted: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Number the rows of two tables so that equal ones, of either, have equal numbers."""
    number = row_numbers([np.concatenate(pair) for pair in zip(rows, wanted, strict=True)])
    return number[: len(rows[0])], number[len(rows[0]) :]


CLOSE_TIMES = 1e-9  # relative to the run: real times that are closer together count as equal


def merge_close_times(time: NDArray[Any], end: float) -> NDArray[Any]:
    """Return the times of a run until `end`, real ones that differ by rounding alone made equal; integers as they are.

    So a buffer that one device frees, and another takes at the same time, is not counted twice.
    """
    if time.dtype.kind == "i" or not time.size:
        return time
    distinct, place = np.unique(time, return_inverse=True)
    first = np.diff(distinct, prepend=-np.inf) > CLOSE_TIMES * end
    merged: NDArray[Any] = distinct[first][np.cumsum(first)[place] - 1].reshape(time.shape)
    return merged


Value = TypeVar("Value")


class Kept(Generic[Value]):
    """LRU cache bounded by total size; a least number of values always stays."""

    def __init__(self, most: int, least: int = 1) -> None:
        self.most, self.least = most, least
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._size = 0

    def __iter__(self) -> Iterator[Value]:
        return (value for value, _ in self._values.values())

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __getitem__(self, key: Hashable) -> Value:
        self._values.move_to_end(key)
        return self._values[key][0]

    def keep(self, key: Hashable, value: Value, size: int) -> None:
        """Keep a value, and let others go."""
        self._values[key] = value, size
        self._size += size
        while self._size > self.most and len(self._values) > self.least:
            self._size -= self._values.popitem(last=False)[1][1]

    def forget(self) -> None:
        """Let all values go."""
        self._values.clear()
        self._size = 0

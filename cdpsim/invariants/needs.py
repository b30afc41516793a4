"""Who has to wait for whom: pairs of nodes, found by equal columns of tasks and messages."""

from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints, sort_by

Columns = tuple[Ints, ...]


class Needs(NamedTuple):
    """Node `after[k]` starts no earlier than node `before[k]` has ended."""

    before: Ints
    after: Ints


def joined(*needs: Needs) -> Needs:
    """All of several needs."""
    before, after = (np.concatenate(ends).astype(np.int64) for ends in zip(*needs, strict=True))
    return Needs(before, after)


def matches(rows: Columns, wanted: Columns) -> tuple[Ints, Ints]:
    """All pairs of a row and a wanted row with equal columns: (row, wanted)."""
    have, want = _keys(rows, wanted)
    order = sort_by(have)
    low, high = (np.searchsorted(have[order], want, side=side) for side in ("left", "right"))
    count = high - low
    which = np.repeat(np.arange(len(want)), count)
    place = np.arange(len(which)) - np.repeat(np.cumsum(count) - count - low, count)
    return order[place], which


def find(rows: Columns, wanted: Columns) -> Ints:
    """The first row with the columns of each wanted one; -1 where there is none."""
    have, want = _keys(rows, wanted)
    order = sort_by(have)
    place = np.searchsorted(have[order], want)
    found: Ints = np.append(order, -1)[place].astype(np.int64)
    found[np.append(have, -1)[found] != want] = -1
    return found


def _keys(rows: Columns, wanted: Columns) -> tuple[Ints, Ints]:
    """Numbers that are equal where all columns are."""
    have, want = (np.zeros(len(columns[0]), dtype=np.int64) for columns in (rows, wanted))
    for left, right in zip(rows, wanted, strict=True):
        least = min(left.min(initial=-1), right.min(initial=-1))
        span = int(max(left.max(initial=0), right.max(initial=0)) - least) + 1
        have, want = have * span + (left - least), want * span + (right - least)
    return have, want

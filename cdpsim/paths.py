"""Longest paths through a graph without cycles."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdpsim.columns import Ints

Numbers = NDArray[Any]  # integers or floats
COMPILED_FROM = 200_000  # edges: below, importing numba takes longer than it saves


_NOTHING = np.empty(0, dtype=np.int32)


def longest(
    before: Ints,
    after: Ints,
    duration: Numbers,
    earliest: Numbers,
    lane_tasks: Ints = _NOTHING,
    lane_start: Ints = _NOTHING,
) -> tuple[Numbers, Numbers, int]:
    """Start every node at the latest of its `earliest` and the ends of the nodes that it waits for.

    An edge says that node `after` waits for node `before`; the tasks of a lane, side by side in `lane_tasks` from
    one of `lane_start` to the next, wait one for another. Returns starts (in the array `earliest`, perhaps), ends,
    and how many nodes were reached: fewer than all if there is a cycle. Large graphs are swept by compiled code, if
    numba is there; the rest, and everything without it, a whole front of nodes at a time.
    """
    swift = compiled() if len(before) >= COMPILED_FROM else None
    if swift:
        start, end, done = swift.longest(before, after, lane_tasks, lane_start, duration, earliest)
        return start, end, done
    inner = in_lanes(lane_tasks, lane_start)
    before, after = (np.concatenate(ends) for ends in zip((before, after), inner, strict=True))
    return longest_by_fronts(before, after, duration, earliest)


@cache
def compiled() -> Any:
    """The module of compiled loops; None where numba is not installed, or has nowhere to keep what it compiles."""
    try:
        from cdpsim import compiled  # 0.3 s
    except (ImportError, RuntimeError):
        return None
    return compiled


def in_lanes(lane_tasks: Ints, lane_start: Ints) -> tuple[Ints, Ints]:
    """The edges that lanes are: (before, after)."""
    inner = np.ones(len(lane_tasks), dtype=bool)
    inner[lane_start[:-1]] = False
    at = np.flatnonzero(inner)
    return lane_tasks[at - 1], lane_tasks[at]


def longest_by_fronts(before: Ints, after: Ints, duration: Numbers, earliest: Numbers) -> tuple[Numbers, Numbers, int]:
    """Do what `longest` does in numpy: every node whose last predecessor has ended belongs to the next front."""
    waits_for, first, reach = successors(before, after, len(duration))
    start, end = earliest.copy(), earliest + duration
    front = np.flatnonzero(waits_for == 0)
    done = 0
    while len(front):
        done += len(front)
        end[front] = start[front] + duration[front]
        count = first[front + 1] - first[front]
        steps = np.arange(count.sum()) + np.repeat(first[front] - np.cumsum(count) + count, count)
        reached = reach[steps]
        np.maximum.at(start, reached, np.repeat(end[front], count))
        np.subtract.at(waits_for, reached, 1)
        front = np.unique(reached[waits_for[reached] == 0])
    return start, end, done


def successors(before: Ints, after: Ints, nodes: int) -> tuple[Ints, Ints, Ints]:
    """How many nodes each one waits for, and who waits for it: `reach[first[node]:first[node + 1]]`."""
    waits_for = np.bincount(after, minlength=nodes)
    first = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=nodes))])
    return waits_for, first, after[np.argsort(before, kind="stable")]

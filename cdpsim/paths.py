"""Longest paths through a graph without cycles, a whole front of nodes at a time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdpsim.columns import Ints

Numbers = NDArray[Any]  # integers or floats


def longest(successors: tuple[Ints, Ints, Ints], duration: Numbers, earliest: Numbers) -> tuple[Numbers, Numbers, int]:
    """Start every node at the latest of its `earliest` and the ends of the nodes that it waits for.

    Returns starts, ends, and how many nodes were reached: fewer than all if there is a cycle.
    """
    waits_for, first, after = successors
    waits_for, start = waits_for.copy(), earliest.copy()
    end = start + duration
    front = np.flatnonzero(waits_for == 0)
    done = 0
    while len(front):
        done += len(front)
        end[front] = start[front] + duration[front]
        count = first[front + 1] - first[front]
        steps = np.arange(count.sum()) + np.repeat(first[front] - np.cumsum(count) + count, count)
        reached = after[steps]
        np.maximum.at(start, reached, np.repeat(end[front], count))
        np.subtract.at(waits_for, reached, 1)
        front = np.unique(reached[waits_for[reached] == 0])
    return start, end, done


def by_predecessor(before: Ints, after: Ints, nodes: int) -> tuple[Ints, Ints, Ints]:
    """How many nodes each one waits for, and who waits for it: `after[first[node]:first[node + 1]]`."""
    waits_for = np.bincount(after, minlength=nodes)
    first = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=nodes))])
    return waits_for, first, after[np.argsort(before, kind="stable")]

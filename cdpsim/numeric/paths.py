"""Longest paths through a graph without cycles."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cdpsim.numeric.columns import Ints, Times, sort_by
from cdpsim.numeric.disturbances import Calendar

FEW_ROWS = 2_000  # of fewer, Python is done before compiled code has begun
LOAD_NUMBA_FROM_ROWS = 1_300_000  # rows that Python sweeps in the time that it takes to load numba

_swept_rows = 0  # so far, by this process, without numba
_MANY_RUNS = ContextVar("many runs", default=False)  # whether runs are many enough for compiled loops in all of them


def longest_paths(
    before: Ints, after: Ints, duration: Times, earliest: Times, calendar: Calendar | None = None
) -> tuple[Times, Times, int]:
    """Start every node at the latest of its `earliest` and the ends of the nodes that it waits for.

    An edge says that node `after` waits for node `before`. By a `calendar`, nodes begin later, and pause. Returns
    starts (perhaps in the array `earliest`, which is overwritten), ends, and how many nodes were reached: fewer than
    all if there is a cycle.

    Nodes are swept one after another: by compiled code where graphs are large, or else by Python. A calendar is looked
    up for all nodes of a level together.
    """
    if not len(before) and calendar is None:
        return earliest, earliest + duration, len(duration)
    if calendar is not None:
        return _paths_by_levels(before, after, duration, earliest, calendar)
    loops = compiled_loops_for(len(before) + len(duration))
    if not loops:
        return longest_paths_by_nodes(before, after, duration, earliest)
    # Always of one type: for each other one, the loop would be compiled again.
    graph = (np.ascontiguousarray(column, np.int32) for column in (before, after))
    nodes = len(duration)
    room = (np.zeros(nodes, np.int32), np.zeros(nodes + 1, np.int32), np.empty(len(before), np.int32))
    done = loops.sweep_nodes(*graph, duration, earliest, *room)
    return earliest, earliest + duration, done


def compiled_loops_for(rows: int) -> Any:
    """Return the module of compiled loops for work on this number of rows; None where numpy is faster.

    As long as numba is not loaded, this counts the work done without it. Once that has taken as long as loading takes,
    more of it is expected, and numba is loaded.
    """
    global _swept_rows
    if _MANY_RUNS.get():
        return compiled_loops()
    if rows < FEW_ROWS:
        return None
    if "numba" not in sys.modules:
        _swept_rows += rows
        if _swept_rows < LOAD_NUMBA_FROM_ROWS:
            return None
    return compiled_loops()


@contextmanager
def expect_many_runs(expected: bool = True) -> Iterator[None]:
    """Within this context, use compiled code for work of any size: where many runs come, all are faster by it."""
    before = _MANY_RUNS.set(_MANY_RUNS.get() or expected)
    try:
        yield
    finally:
        _MANY_RUNS.reset(before)


@cache
def compiled_loops() -> Any:
    """Return the module of compiled loops; None where numba is missing, or has nowhere to keep what it compiles."""
    try:
        from cdpsim.numeric import compiled  # 0.3 s
    except (ImportError, RuntimeError):
        return None
    return compiled


def lane_edges(lane_tasks: Ints, lane_start: Ints) -> tuple[Ints, Ints]:
    """Return the edges (before, after) of lanes, in which each task waits for the one before it."""
    inner = np.ones(len(lane_tasks), dtype=bool)
    inner[lane_start[:-1]] = False
    at = np.flatnonzero(inner)
    return lane_tasks[at - 1], lane_tasks[at]


def longest_paths_by_nodes(before: Ints, after: Ints, duration: Times, earliest: Times) -> tuple[Times, Times, int]:
    """Do what `longest_paths` does in Python, one node after another."""
    graph = successors(before, after, len(duration))
    start, end = earliest.copy(), earliest + duration
    ready = np.flatnonzero(graph[0] == 0).tolist()
    waits_for, first, reach = (column.tolist() for column in graph)
    takes, starts, ends = duration.tolist(), start.tolist(), end.tolist()
    for node in ready:
        ends[node] = ended = starts[node] + takes[node]
        for follower in reach[first[node] : first[node + 1]]:
            if ended > starts[follower]:
                starts[follower] = ended
            waits_for[follower] -= 1
            if not waits_for[follower]:
                ready.append(follower)
    start[:], end[:] = starts, ends
    return start, end, len(ready)


def _paths_by_levels(
    before: Ints, after: Ints, duration: Times, earliest: Times, calendar: Calendar
) -> tuple[Times, Times, int]:
    """Do what `longest_paths` does by a calendar."""
    nodes, ones = len(duration), np.ones(len(duration), dtype=np.int64)
    reached = longest_paths(before, after, ones, ones - 1)[2]
    if reached < nodes:
        return earliest, earliest + duration, reached
    levels = sort_into_levels(before, after, nodes)
    end, ready = np.empty_like(duration), earliest.copy()
    end[levels.order] = levels.sweep(duration[levels.order, None], earliest[levels.order, None], calendar)[:, 0]
    np.maximum.at(ready, after, end[before])
    return *calendar.worked(np.arange(nodes), ready, duration), reached


@dataclass(frozen=True, eq=False)
class Levels:
    """A graph laid out for sweeping many runs at once: nodes by level, each of which waits for lower ones only.

    The nodes of a level are in descending order of how many nodes they wait for. `waits[k]` of the level has the places
    of the k-th of these, for the first of the level's nodes: for all that wait for more than k.
    """

    order: Ints  # nodes by their places
    first: Ints  # places at which levels begin, and the end
    waits: tuple[tuple[Ints, ...], ...]

    def sweep(self, duration: Times, earliest: Times, calendar: Calendar | None = None) -> Times:
        """Return the ends of all nodes, by their places: a column for each run, as `duration` has.

        `earliest` has one for each, or one for all.

        Each run's ends are those of `longest_paths` to the last bit: the same sums and the same maxima.
        """
        end = np.empty_like(duration)
        for low, high, waits in zip(self.first[:-1].tolist(), self.first[1:].tolist(), self.waits, strict=True):
            start = np.zeros_like(end[low:high]) if not waits else end[waits[0]]
            for more in waits[1:]:
                part = start[: len(more)]
                np.maximum(part, end[more], out=part)
            late = np.flatnonzero(earliest[low:high].any(axis=1))
            if len(late):
                start[late] = np.maximum(start[late], earliest[low + late])
            if calendar is None:
                np.add(start, duration[low:high], out=end[low:high])
            else:
                _, end[low:high] = calendar.worked(self.order[low:high], start, duration[low:high])
        return end


def sort_into_levels(before: Ints, after: Ints, nodes: int) -> Levels:
    """Lay out a graph without cycles; a node's level is the length of the longest way to it."""
    ones = np.ones(nodes, dtype=np.int64)
    level, _, _ = longest_paths(before, after, ones, ones - 1)
    count = np.bincount(after, minlength=nodes)
    order = np.lexsort((np.arange(nodes), -count, level))
    place = np.empty(nodes, dtype=np.int64)
    place[order] = np.arange(nodes)
    first = np.searchsorted(level[order], np.arange(level.max(initial=-1) + 2))
    by_place = np.lexsort((place[before], place[after]))
    sources, offset = place[before[by_place]], np.concatenate([[0], np.cumsum(count[order])])
    waits = []
    for low, high in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        waits_for = count[order[low:high]]
        columns = [offset[low : low + int((waits_for > k).sum())] + k for k in range(int(waits_for.max()))]
        waits.append(tuple(sources[column] for column in columns))
    return Levels(order, first, tuple(waits))


def successors(before: Ints, after: Ints, nodes: int) -> tuple[Ints, Ints, Ints]:
    """Return how many nodes each one waits for, and which wait for it: `reach[first[node]:first[node + 1]]`."""
    waits_for = np.bincount(after, minlength=nodes)
    first = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=nodes))])
    return waits_for, first, after[sort_by(before)]


def find_cycle(before: Ints, after: Ints, nodes: int) -> list[int]:
    """Return a cycle of nodes, each waiting for the one before it, beginning with its lowest; empty if none is.

    Where a node waits for several, the first edge to it counts.
    """
    waits_for, first, reach = (column.tolist() for column in successors(before, after, nodes))
    ready = [node for node, count in enumerate(waits_for) if not count]
    for node in ready:
        for follower in reach[first[node] : first[node + 1]]:
            waits_for[follower] -= 1
            if not waits_for[follower]:
                ready.append(follower)
    # A node that is not reached waits for such a node: walking back long enough enters a cycle.
    edges = zip(before[::-1].tolist(), after[::-1].tolist(), strict=True)
    waited_for = {late: early for early, late in edges if waits_for[early] and waits_for[late]}
    if not waited_for:
        return []
    path = [min(waited_for)]
    while path[-1] not in path[:-1]:
        path.append(waited_for[path[-1]])
    cycle = path[path.index(path[-1]) + 1 :][::-1]
    lowest = cycle.index(min(cycle))
    return cycle[lowest:] + cycle[:lowest]


def cycle_text(names: Sequence[str]) -> str:
    """Return a cycle of names, cut after the first eight.

    >>> cycle_text(["a", "b"])
    'a -> b -> a'
    """
    more = [f"... {len(names) - 8} more"] if len(names) > 8 else []
    return " -> ".join([*names[:8], *more, names[0]])

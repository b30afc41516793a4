"""Longest paths through a graph without cycles."""

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cdpsim.numeric.columns import Ints, Times, sort_by
from cdpsim.numeric.stops import Calendar

COMPILED_FROM = 2_000  # rows: of fewer, numpy is done before compiled code is called
LOADED_FROM = 2_000_000  # rows that numpy sweeps in the time that it takes to load numba
NARROW = 16  # nodes in a front: of fewer, Python itself is done before numpy has begun
PATIENCE = 256  # fronts that must be narrow, taken together, before the rest is swept one node at a time


_NOTHING = np.empty(0, dtype=np.int32)
_swept = 0  # rows so far, by this process, without numba


def longest(
    before: Ints,
    after: Ints,
    duration: Times,
    earliest: Times,
    lane_tasks: Ints = _NOTHING,
    lane_start: Ints = _NOTHING,
    calendar: Calendar | None = None,
) -> tuple[Times, Times, int]:
    """Start every node at the latest of its `earliest` and the ends of the nodes that it waits for.

    An edge says that node `after` waits for node `before`; the tasks of a lane, side by side in `lane_tasks` from
    one of `lane_start` to the next, wait one for another. Returns starts (in the array `earliest`, perhaps), ends,
    and how many nodes were reached: fewer than all if there is a cycle. Large graphs are swept by compiled code, if
    numba is there; the rest, and everything without it, a whole front of nodes at a time, or, where a lane is so long
    that fronts must be narrow, or where they turn out so, one node at a time. By a `calendar` nodes begin later, and
    pause.
    """
    if not len(before) and not len(lane_tasks) and calendar is None:
        return earliest, earliest + duration, len(duration)
    swift = compiled_for(len(before) + len(duration)) if calendar is None else None
    if swift:
        # Of one type whoever asks: for each other one, the loop would be compiled again.
        graph = (np.ascontiguousarray(column, np.int32) for column in (before, after, lane_tasks, lane_start))
        nodes, edges = len(duration), len(before) + len(lane_tasks)
        room = (np.zeros(nodes, np.int32), np.zeros(nodes + 1, np.int32), np.empty(edges, np.int32))
        done = swift.longest(*graph, duration, earliest, *room)
        return earliest, earliest + duration, done
    inner = in_lanes(lane_tasks, lane_start)
    before, after = (np.concatenate(ends) for ends in zip((before, after), inner, strict=True))
    in_a_row = int(np.diff(lane_start).max(initial=0))
    if in_a_row * NARROW >= len(duration) and calendar is None:
        return longest_by_nodes(before, after, duration, earliest)
    return longest_by_fronts(before, after, duration, earliest, calendar)


def compiled_for(rows: int) -> Any:
    """The module of compiled loops, for work on so many rows; None where numpy is done before.

    As long as numba is not loaded, this counts what is done without it. Once that has taken as long as loading takes,
    more of it is expected, and numba is loaded.
    """
    global _swept
    if rows < COMPILED_FROM:
        return None
    if "numba" not in sys.modules:
        _swept += rows
        if _swept < LOADED_FROM:
            return None
    return compiled()


@cache
def compiled() -> Any:
    """The module of compiled loops; None where numba is not installed, or has nowhere to keep what it compiles."""
    try:
        from cdpsim.numeric import compiled  # 0.3 s
    except (ImportError, RuntimeError):
        return None
    return compiled


def in_lanes(lane_tasks: Ints, lane_start: Ints) -> tuple[Ints, Ints]:
    """The edges that lanes are: (before, after)."""
    inner = np.ones(len(lane_tasks), dtype=bool)
    inner[lane_start[:-1]] = False
    at = np.flatnonzero(inner)
    return lane_tasks[at - 1], lane_tasks[at]


def longest_by_fronts(
    before: Ints, after: Ints, duration: Times, earliest: Times, calendar: Calendar | None = None
) -> tuple[Times, Times, int]:
    """Do what `longest` does in numpy: every node whose last predecessor has ended belongs to the next front.

    Where so many fronts in a row were narrow, the rest is swept by `_one_by_one`.
    """
    graph = waits_for, first, reach = successors(before, after, len(duration))
    start, end = earliest.copy(), earliest + duration
    place = np.empty(len(duration), dtype=np.int64)
    front = np.flatnonzero(waits_for == 0)
    done = fronts = wide_until = 0
    while len(front):
        if fronts == PATIENCE:
            if done - wide_until < NARROW * PATIENCE and calendar is None:
                return start, end, done + _one_by_one(graph, front, duration, start, end)
            fronts, wide_until = 0, done
        fronts += 1
        done += len(front)
        if calendar is None:
            end[front] = start[front] + duration[front]
        else:
            start[front], end[front] = calendar.worked(front, start[front], duration[front])
        count = first[front + 1] - first[front]
        steps = np.arange(count.sum()) + np.repeat(first[front] - np.cumsum(count) + count, count)
        reached = reach[steps]
        np.maximum.at(start, reached, np.repeat(end[front], count))
        np.subtract.at(waits_for, reached, 1)
        front = reached[waits_for[reached] == 0]
        place[front] = np.arange(len(front))
        front = front[place[front] == np.arange(len(front))]  # each once, which np.unique does in twice the time
    return start, end, done


def longest_by_nodes(before: Ints, after: Ints, duration: Times, earliest: Times) -> tuple[Times, Times, int]:
    """Do what `longest` does in Python, one node after another."""
    graph = successors(before, after, len(duration))
    start, end = earliest.copy(), earliest + duration
    return start, end, _one_by_one(graph, np.flatnonzero(graph[0] == 0), duration, start, end)


def _one_by_one(graph: tuple[Ints, Ints, Ints], front: Ints, duration: Times, start: Times, end: Times) -> int:
    """Sweep what is left from a front on, in the arrays themselves, and count it."""
    waits_for, first, reach = (column.tolist() for column in graph)
    takes, starts, ends, ready = duration.tolist(), start.tolist(), end.tolist(), front.tolist()
    for node in ready:
        ends[node] = ended = starts[node] + takes[node]
        for follower in reach[first[node] : first[node + 1]]:
            if ended > starts[follower]:
                starts[follower] = ended
            waits_for[follower] -= 1
            if not waits_for[follower]:
                ready.append(follower)
    start[:], end[:] = starts, ends
    return len(ready)


@dataclass(frozen=True, eq=False)
class Levels:
    """A graph laid out for sweeping many runs at once: nodes by level, each of which waits for lower ones only.

    Of a level's nodes, those that wait for most come first; `waits[k]` of the level are the places of what each of so
    many of them waits for as its k-th.
    """

    order: Ints  # nodes by their places
    first: Ints  # places at which levels begin, and the end
    waits: tuple[tuple[Ints, ...], ...]

    def sweep(self, duration: Times, earliest: Times, calendar: Calendar | None = None) -> Times:
        """Give the ends of all nodes, by their places: a column for each run, as `duration` has.

        `earliest` has as many, or one for all.

        To the last bit what `longest` gives for each run alone: ends are the same sums, and starts the same maxima.
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


def levels(before: Ints, after: Ints, nodes: int) -> Levels:
    """Lay out a graph without cycles."""
    ones = np.ones(nodes, dtype=np.int64)
    level, _, _ = longest_by_fronts(before, after, ones, ones - 1)
    count = np.bincount(after, minlength=nodes)
    order = np.lexsort((np.arange(nodes), -count, level))
    place = np.empty(nodes, dtype=np.int64)
    place[order] = np.arange(nodes)
    first = np.searchsorted(level[order], np.arange(level.max(initial=-1) + 2))
    by_place = np.lexsort((place[before], place[after]))
    sources, offset = place[before[by_place]], np.concatenate([[0], np.cumsum(count[order])])
    waits = []
    for low, high in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        own = count[order[low:high]]
        columns = [offset[low : low + int((own > k).sum())] + k for k in range(int(own.max()))]
        waits.append(tuple(sources[column] for column in columns))
    return Levels(order, first, tuple(waits))


def successors(before: Ints, after: Ints, nodes: int) -> tuple[Ints, Ints, Ints]:
    """How many nodes each one waits for, and who waits for it: `reach[first[node]:first[node + 1]]`."""
    waits_for = np.bincount(after, minlength=nodes)
    first = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=nodes))])
    return waits_for, first, after[sort_by(before)]

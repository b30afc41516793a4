"""Nodes of runs that differ in micro-batches alone, and how much later each comes with each further unit of these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Flags, Ints, Times, dense_ranks, group_starts, row_numbers, sort_by
from cdpsim.program import Program, once_a_program
from cdpsim.runs import Run
from cdpsim.trace.metrics.steady import PRECISION


@dataclass(frozen=True, eq=False)
class NodesByClass:
    """The nodes of a program, in classes that differ in micro-batch alone, each in the order of their starts."""

    classes: Ints  # what distinguishes each class, a row for it
    order: Ints  # the nodes, class after class
    first: Ints  # where each class begins, and the end

    @classmethod
    def of(cls, run: Run) -> "NodesByClass":
        """Return the nodes of a run's program."""
        program = run.program
        classes, number = classes_of_nodes(program)
        order = sort_by(number, dense_ranks(run.start))
        return cls(classes, order, np.append(group_starts(number[order]), len(order)))


def classify(columns: Ints) -> tuple[Ints, Ints]:
    """Return what distinguishes each class of rows with equal columns, and the class of each row."""
    _, first, number = np.unique(row_numbers([*columns]), return_index=True, return_inverse=True)
    return columns[:, first], number


@once_a_program
def classes_of_nodes(program: Program) -> tuple[Ints, Ints]:
    """Return what distinguishes nodes beside their micro-batch, their step first, and the class of each node."""
    tasks, messages, parts = program.tasks, program.messages, program.parts
    none = np.zeros(len(parts), dtype=np.int64)
    rows = (
        (tasks.step, messages.step, parts.step),
        (0 * tasks.kind, 1 + messages.op, 9 + parts.sends),
        (tasks.kind, messages.content, none),
        (tasks.stage, messages.stage, none),
        (tasks.device, messages.src, parts.device),
        (tasks.lane, messages.dst, none),
        (0 * tasks.kind, messages.stream, none),
    )
    return classify(np.array([np.concatenate(row, dtype=np.int64) for row in rows]))


class Matches(NamedTuple):
    """Rows of runs, a unit apart, that match, by their places in the order of classes."""

    rows: list[Ints]  # of each run
    group: Ints  # the class of each match
    part: Ints  # ALL of a class that does not grow, else which half of it
    grows: Flags

    @classmethod
    def of(cls, first: Sequence[Ints]) -> "Matches | None":
        """Return the matches of classes that begin at `first`; None if they do not grow by as many each time."""
        counts = [np.diff(each) for each in first]
        if len({len(each) for each in counts}) > 1:
            return None
        least, more = counts[0], np.diff(counts, axis=0)
        if (more != more[0]).any() or (more[0] < 0).any():
            return None
        group = np.repeat(np.arange(len(least)), least)
        place = np.arange(least.sum()) - np.repeat(np.cumsum(least) - least, least)
        grows = (counts[1] > least)[group]
        late = grows & (2 * place >= least[group])
        rows = [
            each[:-1][group] + place + late * (count - least)[group] for each, count in zip(first, counts, strict=True)
        ]
        return cls(rows, group, np.where(grows, np.where(late, BACK, FRONT), ALL), grows)


MIDDLE, ALL, FRONT, BACK = range(4)


class FurtherTimes(NamedTuple):
    """When the nodes of a run would start and end with more units; NaN of those in the middle."""

    start: Times
    end: Times
    part: Ints  # of each node


class GrowingTimes(NamedTuple):
    """When the nodes of a run start and end, and how much later with each further unit; NaN of those in the middle."""

    start: Times
    end: Times
    start_grows: Times
    end_grows: Times
    part: Ints  # of each node
    room: float  # by which times that count as equal may differ

    def after(self, units: int) -> FurtherTimes:
        """Return the times so many units later."""
        return FurtherTimes(self.start + units * self.start_grows, self.end + units * self.end_grows, self.part)


class _MatchingNodes(NamedTuple):
    """Nodes of runs, a unit apart, that match."""

    nodes: list[Ints]  # of each run
    part: Ints
    grows: Flags
    kind: Ints  # of each match: those of one kind and one half are to be as much later as each other
    room: float  # by which times that count as equal may differ

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "_MatchingNodes | None":
        """Return the nodes that match; None where the runs do not differ in their middle alone."""
        nodes = [NodesByClass.of(run) for run in runs]
        if any(not np.array_equal(nodes[0].classes, each.classes) for each in nodes[1:]):
            return None
        matches = Matches.of([each.first for each in nodes])
        if matches is None:
            return None
        kind = row_numbers([*nodes[0].classes[:3, matches.group], matches.part])  # step, operation, content; and half
        room = 0.0 if runs[0].in_slots else PRECISION * float(runs[-1].end.max(initial=0))
        of_runs = [each.order[row] for each, row in zip(nodes, matches.rows, strict=True)]
        return cls(of_runs, matches.part, matches.grows, kind, room)

    def times(self, columns: Sequence[Times]) -> list[Times]:
        """Return those of each run's nodes that match."""
        return [column[node] for column, node in zip(columns, self.nodes, strict=True)]

    def grow_alike(self, later: Times, room: float) -> bool:
        """Return whether all nodes of a kind and a half are as much later as each other."""
        return _all_equal(self.kind[self.grows], later[self.grows], room)


def may_grow(runs: Sequence[Run]) -> bool:
    """Return whether a third run might show with two others how nodes come later with each unit."""
    matching = _MatchingNodes.of(runs)
    if matching is None:
        return False
    for columns in ([run.start for run in runs], [run.end for run in runs]):
        first, second = matching.times(columns)
        if not matching.grow_alike(second - first, 2 * matching.room):
            return False
    return True


def growing_times(runs: Sequence[Run]) -> GrowingTimes | None:
    """Return how much later each node of the last of three runs starts and ends with each unit.

    Return None where the runs do not differ in their middle alone, by units that repeat each other.
    """
    matching = _MatchingNodes.of(runs)
    if matching is None:
        return None
    program, node, room = runs[2].program, matching.nodes[2], matching.room
    found: list[Times] = []
    for columns in ([run.start for run in runs], [run.end for run in runs]):
        times = matching.times(columns)
        later, again = times[1] - times[0], times[2] - times[1]
        if (np.abs(again - later) > room).any() or not matching.grow_alike(again, room):
            return None
        for column in (times[2], again):
            found.append(np.full(program.nodes, np.nan))
            found[-1][node] = column
    part = np.full(program.nodes, MIDDLE)
    part[node] = matching.part
    return GrowingTimes(found[0], found[2], found[1], found[3], part, room)


def most_units(program: Program, times: GrowingTimes) -> float:
    """Return the units up to which nodes start when those for which they wait have ended.

    Waits from half to half are left out.
    """
    before, after = program.waits()
    part = times.part
    known = (part[before] != MIDDLE) & (part[after] != MIDDLE)
    known &= (part[before] == part[after]) | (part[before] == ALL) | (part[after] == ALL)
    before, after = before[known], after[known]
    left = times.start[after] - times.end[before] + times.room
    less = times.end_grows[before] - times.start_grows[after] - times.room  # with each unit
    rows = np.flatnonzero(less > 0)
    return float((left[rows] / less[rows]).min(initial=np.inf))


def _all_equal(group: Ints, value: Times, room: float) -> bool:
    """Return whether all values of a group are equal."""
    if not len(group):
        return True
    order = sort_by(group)
    first = group_starts(group[order])
    highest, lowest = (each.reduceat(value[order], first) for each in (np.maximum, np.minimum))
    return bool((highest - lowest <= 2 * room).all())

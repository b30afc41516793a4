"""Folding from one run: cuts of its program before and behind a unit of micro-batches, after which all is as it was.

Let each node before the first cut for which others behind it wait end so much earlier than the same one a unit later.
Then what follows the second cut is what follows the first one, so much later; and so it is with each further unit
between them. One run shows this, if programs of one unit more have the same before the second cut and behind the first.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cdpsim.numeric.columns import Flags, Ints, Times, dense_ranks, group_starts, row_numbers, sort_by
from cdpsim.numeric.paths import longest_paths
from cdpsim.program import Program, once_a_program
from cdpsim.studies.folding.matches import ByClass, nodes_by_class

UnitPairs = tuple[Ints, Ints]  # nodes, and the same ones of a unit later


class Cut(NamedTuple):
    """A cut of a program, and the unit of micro-batches behind it."""

    ends: UnitPairs  # those before it for which others behind it wait
    before: UnitPairs  # all before it that grow in number
    behind: UnitPairs  # all behind it that have one of a unit later
    first: Ints  # nodes of the first unit
    last: Ints  # and of the last one
    fixed: tuple[Ints, Ints]  # nodes before the cut, and behind it, that do not grow in number
    unit: Ints  # its nodes


class Repetition(NamedTuple):
    """A part of a run between two times: whatever starts or ends in it does so again, later by one amount."""

    later: Any
    since: Any
    until: Any


def find_repetition(cut: Cut, start: Times, end: Times) -> Repetition | None:
    """Return what a run repeats around a cut; None where it has not settled there.

    A run of a unit more is the same as this one for `later` beyond `until`; then it does what this one does from
    `until` on. For that, each node that is not repeated is on one side: before the cut it has ended by `since`; behind
    it, it does not start before `until`, and the same node of the next unit not before `later` beyond that.
    """
    one, again = cut.ends
    growth = end[again] - end[one]
    later = growth[0].item()
    if later <= 0 or (growth != later).any():
        return None
    (front, again), (back, once_more) = (_unrepeated(pairs, start, later) for pairs in (cut.before, cut.behind))
    (early, late), first, last = cut.fixed, cut.first, cut.last
    since = np.concatenate([end[front], end[again] - later, end[first] - later, end[early]]).max().item()
    until = np.concatenate([start[back], start[once_more] - later, start[last], start[late] - later]).min().item()
    return Repetition(later, since, until) if since < until else None


def _unrepeated(pairs: UnitPairs, start: Times, later: Any) -> UnitPairs:
    """Return the pairs of which one does not start so much later than the other; nor does it end so much later."""
    one, again = pairs
    rows = np.flatnonzero(start[again] - start[one] != later)
    return one[rows], again[rows]


@once_a_program
def find_cut(program: Program, longer: Program) -> Cut | None:
    """Return the cut in the middle of a step; None where a program of a unit more is not the same on both sides of it.

    What is held is the same on both sides, too, and ends wherever it begins; so devices hold as much behind the unit as
    before it.
    """
    has_several_ends = len(program.buffers.kept) or len(longer.buffers.kept)
    if program.steps > 1 or has_several_ends or len(program.releases) or len(program.parts):
        return None
    nodes, others = nodes_by_class(program), nodes_by_class(longer)
    if not np.array_equal(nodes.classes, others.classes):
        return None
    early, size, more = _is_early(program), np.diff(nodes.first), np.diff(others.first) - np.diff(nodes.first)
    count = np.bincount(nodes.number[early], minlength=len(size))
    if not more.any() or (more < 0).any() or (count + more > size).any() or not _are_alike(program, nodes, more > 0):
        return None
    here = _Sides.of(nodes, nodes.first, count, more, np.zeros_like(more))
    there = _Sides.of(others, nodes.first, count, more, more)
    if (early == here.is_tail[:-1]).any() or not here.are_closed(program):
        return None
    cut = _cut_of(program, nodes, more, here)
    sides = zip(here.facts(program), there.facts(longer), strict=True)
    return cut if all(_are_same(one, other) for one, other in sides) else None


@once_a_program
def _waits(program: Program) -> tuple[Ints, Ints]:
    """Return who waits for whom, but where a node waits for many tasks that a lane makes one after another.

    Of such tasks of a class, as an update waits for in all micro-batches, it waits for the last one.
    """
    (before, after), nodes, place = program.waits(), nodes_by_class(program), np.empty(program.nodes, dtype=np.int64)
    place[nodes.order] = np.arange(program.nodes)
    made = place[program.lane_tasks]
    number = nodes.number[program.lane_tasks]
    by_class = sort_by(number)
    late = number[by_class][1:][(np.diff(made[by_class]) < 0) & (np.diff(number[by_class]) == 0)]
    ordered = np.zeros(len(nodes.first), dtype=bool)
    ordered[np.setdiff1d(number, late)] = True
    single = np.diff(nodes.first) == 1
    many = np.flatnonzero(ordered[nodes.number[before]] & single[nodes.number[after]])
    order = many[sort_by(nodes.number[before[many]], after[many], place[before[many]])]
    others = np.setdiff1d(np.arange(len(order)), group_starts(nodes.number[before[order]], after[order]))
    kept = np.ones(len(before), dtype=bool)
    kept[order[others - 1]] = False  # each has one behind it in its group
    return before[kept], after[kept]


def _are_alike(program: Program, nodes: ByClass, grows: Flags) -> bool:
    """Return whether messages of classes that grow in number are of one size in each class, and take one time."""
    size = np.zeros(program.nodes, dtype=np.int64)
    size[program.message_nodes] = program.messages.size
    size, number = size[nodes.order], nodes.number[nodes.order]
    changes = np.flatnonzero((size[1:] != size[:-1]) & (number[1:] == number[:-1]))
    return not grows[number[changes]].any()


def _is_early(program: Program) -> Flags:
    """Return whether each node starts in the first half of a run in which each task takes one slot."""
    duration = np.zeros(program.nodes, dtype=np.int64)
    duration[: program.compute] = 1
    start, end, _ = longest_paths(*program.waits(), duration, np.zeros_like(duration))
    early: Flags = 2 * start < end.max(initial=0)
    return early


class _Sides(NamedTuple):
    """The nodes up to the second cut, and those from the first cut on, by their places in the shorter program.

    The last of each column is for the start of the run.
    """

    is_head: Flags
    is_tail: Flags
    head: Ints  # places of the head; -1 of others
    tail: Ints  # places of the tail, and of what is before it; -1 of what has no place, and does not move with it

    @classmethod
    def of(cls, nodes: ByClass, first: Ints, count: Ints, more: Ints, moved: Ints) -> "_Sides":
        """Return the sides of a program whose tail is moved: of each class so many are before the cut."""
        number, place = nodes.number, np.empty(len(nodes.order), dtype=np.int64)
        place[nodes.order] = np.arange(len(place))
        index = place - nodes.first[number]
        back = index - moved[number]
        is_head, is_tail = index < (count + more)[number], back >= count[number]
        head = np.where(is_head, first[number] + index, -1)
        tail = np.where((back >= 0) & (is_tail | (more[number] > 0)), first[number] + back, -1)
        return cls(np.append(is_head, True), np.append(is_tail, False), np.append(head, first[-1]), np.append(tail, -1))

    def are_closed(self, program: Program) -> bool:
        """Return whether heads wait for heads alone, and tails for what moves with them; all of these for something."""
        before, after = _waits(program)
        alone = np.bincount(after, minlength=program.nodes) == 0
        alone &= self.is_tail[:-1]
        closed = (self.head[before] >= 0) | ~self.is_head[after]
        closed &= (self.tail[before] >= 0) | ~self.is_tail[after]
        return bool(closed.all()) and not alone.any()

    def facts(self, program: Program) -> Iterator[list[Ints]]:
        """Yield the columns of what is to be the same in both programs: who waits for whom, and what is sent and held.

        Last of all come the ends of lanes, which are in the tail.
        """
        (before, after), buffers, messages = _waits(program), program.buffers, program.message_nodes
        held = buffers.device, buffers.category, buffers.stage, buffers.size
        for there, place in ((self.is_head, self.head), (self.is_tail, self.tail)):
            rows = np.flatnonzero(there[after])
            yield [place[before[rows]], place[after[rows]]]
            rows = np.flatnonzero(there[messages])
            yield [place[messages][rows], program.messages.size[rows]]
            for moment in (buffers.begin, buffers.end):
                rows = np.flatnonzero(there[moment >> 1])
                yield [place[moment[rows] >> 1], moment[rows] & 1, *(column[rows] for column in held)]
        yield [self.tail[program.lane_tasks[program.lane_start[1:] - 1]]]


def _cut_of(program: Program, nodes: ByClass, more: Ints, sides: _Sides) -> Cut:
    """Return the cut between the sides of a program."""
    place, grows, is_tail = np.arange(program.nodes), more[nodes.number] > 0, sides.is_tail[:-1]
    number = nodes.number[nodes.order]
    index, left = place - nodes.first[number], nodes.first[number + 1] - place
    again, first, last = (np.empty(program.nodes, dtype=np.int64) for _ in range(3))
    again[nodes.order] = nodes.order[np.where(left > more[number], place + more[number], place)]
    first[nodes.order], last[nodes.order] = index < more[number], left <= more[number]
    waited, waiting = _waits(program)
    ends = np.unique(waited[~is_tail[waited] & is_tail[waiting]])
    before, behind = np.flatnonzero(grows & ~is_tail), np.flatnonzero(grows & is_tail & (last == 0))
    return Cut(
        (ends, again[ends]),
        (before, again[before]),
        (behind, again[behind]),
        np.flatnonzero(first),
        np.flatnonzero(last),
        (np.flatnonzero(~grows & ~is_tail), np.flatnonzero(~grows & is_tail)),
        np.flatnonzero(sides.is_head[:-1] & is_tail),
    )


def _are_same(one: Sequence[Ints], other: Sequence[Ints]) -> bool:
    """Return whether two tables have the same rows, in any order."""
    if all(map(np.array_equal, one, other)):
        return True
    columns = (np.append(*pair) for pair in zip(one, other, strict=True))
    number = row_numbers([dense_ranks(column) if column.max(initial=0) >= 2**20 else column for column in columns])
    return np.array_equal(np.sort(number[: len(one[0])]), np.sort(number[len(one[0]) :]))

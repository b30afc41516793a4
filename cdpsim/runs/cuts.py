"""Folding from one run: cuts of its program before and behind a unit of micro-batches, after which all is as it was.

Let each node before the first cut for which others behind it wait end so much earlier than the same one a unit later.
Then what follows the second cut is what follows the first one, so much later; and so it is with each further unit
between them. One run shows this, if programs of one unit more have the same before the second cut and behind the first.
A program of several steps is cut in the middle of each.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cdpsim.numeric.columns import Flags, Ints, Times, dense_ranks, group_starts, row_numbers, sort_by
from cdpsim.numeric.paths import longest_paths
from cdpsim.program import Program, once_a_program
from cdpsim.trace.metrics.steady import steps_of_nodes

UnitPairs = tuple[Ints, Ints]  # nodes, and the same ones of a unit later


class ByClass(NamedTuple):
    """Nodes in classes that differ in micro-batch alone, each in the order of these."""

    classes: Ints  # what distinguishes each class, a column for it
    order: Ints
    first: Ints  # where each class begins in the order, and the end
    number: Ints  # the class of each node


@once_a_program
def nodes_by_class(program: Program) -> ByClass:
    """Sort the nodes of a program, those of one step, operation and content together."""
    tasks, messages, parts = program.tasks, program.messages, program.parts
    of_part = program.first_messages - len(tasks)
    rows = (
        np.split(steps_of_nodes(program), [len(tasks), program.message_nodes.stop]),
        (tasks.step, messages.step, parts.step),
        (0 * tasks.kind, 1 + messages.op, 9 + parts.sends),
        (tasks.kind, messages.content, messages.content[of_part]),
        (tasks.stage, messages.stage, messages.stage[of_part]),
        (tasks.device, messages.src, parts.device),
        (tasks.lane, messages.dst, messages.dst[of_part]),
        (0 * tasks.kind, messages.stream, messages.stream[of_part]),
    )
    columns: Ints = np.array([np.concatenate(row, dtype=np.int64) for row in rows])
    micro_batch = np.concatenate([tasks.micro_batch, messages.micro_batch, messages.micro_batch[of_part]])
    _, first, number = np.unique(row_numbers([*columns]), return_index=True, return_inverse=True)
    number = number.astype(np.int32)
    order = sort_by(number, micro_batch.astype(np.int64) + 1)
    return ByClass(columns[:, first], order, np.append(group_starts(number[order]), len(order)), number)


class Cut(NamedTuple):
    """A cut of a program, and the unit of micro-batches behind it."""

    ends: UnitPairs  # those before it for which others behind it wait
    before: UnitPairs  # all before it that grow in number
    behind: UnitPairs  # all behind it that have one of a unit later
    first: Ints  # nodes of the first unit
    last: Ints  # and of the last one
    fixed: tuple[Ints, Ints]  # nodes before the cut, and behind it, that do not grow in number
    unit: Ints  # its nodes
    early: UnitPairs  # nodes that wait for others from before the cut before, which are to end sooner than that decides


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
    if (end[cut.early[0]] >= start[cut.early[1]]).any():
        return None
    growth = end[again] - end[one]
    later = growth[0].item()
    if later <= 0 or (growth != later).any():
        return None
    (earlier, again), (back, once_more) = (_unrepeated(pairs, start, later) for pairs in (cut.before, cut.behind))
    (early, late), first, last = cut.fixed, cut.first, cut.last
    since = np.concatenate([end[earlier], end[again] - later, end[first] - later, end[early]]).max().item()
    until = np.concatenate([start[back], start[once_more] - later, start[last], start[late] - later]).min().item()
    return Repetition(later, since, until) if since < until else None


def _unrepeated(pairs: UnitPairs, start: Times, later: Any) -> UnitPairs:
    """Return the pairs of which one does not start so much later than the other; nor does it end so much later."""
    one, again = pairs
    rows = np.flatnonzero(start[again] - start[one] != later)
    return one[rows], again[rows]


@once_a_program
def find_cuts(program: Program, longer: Program) -> list[Cut]:
    """Return cuts in the middle of each step; none where a program of a unit more is not the same between them.

    What is held is the same on both sides, too, and ends wherever it begins; so devices hold as much behind the unit as
    before it.
    """
    has_several_ends = len(program.buffers.kept) or len(longer.buffers.kept)
    if has_several_ends or len(program.releases) or len(program.parts) or program.fill:
        return []
    nodes, others = nodes_by_class(program), nodes_by_class(longer)
    if not np.array_equal(nodes.classes, others.classes):
        return []
    early, size, more = _is_early(program), np.diff(nodes.first), np.diff(others.first) - np.diff(nodes.first)
    count = np.bincount(nodes.number[early], minlength=len(size))
    if not more.any() or (more < 0).any() or (count + more > size).any() or not _are_alike(program, nodes, more > 0):
        return []
    here = _Sides.of(program, nodes.first, count, more, np.zeros_like(more))
    there = _Sides.of(longer, nodes.first, count, more, more)
    if (early == here.is_tail[:-1]).any() or not here.move_alike(program):
        return []
    sides = zip(here.facts(program), there.facts(longer), strict=True)
    if not all(_are_same(one, other) for one, other in sides):
        return []
    return [_cut_of(program, more, here, step) for step in range(program.steps)]


@once_a_program
def _waits(program: Program) -> tuple[Ints, Ints]:
    """Return who waits for whom, without what follows from the order in which a lane makes the tasks of a class.

    A node that waits for many of them, as an update for all micro-batches, waits for the last one; of many that wait
    for one node, as for the update of the step before, the first one does.
    """
    (before, after), nodes, place = program.waits(), nodes_by_class(program), np.empty(program.nodes, dtype=np.int64)
    place[nodes.order] = np.arange(program.nodes)
    made = place[program.lane_tasks]
    number = nodes.number[program.lane_tasks]
    by_class = sort_by(number)
    late = number[by_class][1:][(np.diff(made[by_class]) < 0) & (np.diff(number[by_class]) == 0)]
    ordered = np.zeros(len(nodes.first), dtype=bool)
    ordered[np.setdiff1d(number, late)] = True
    ordered, single = ordered[nodes.number], (np.diff(nodes.first) == 1)[nodes.number]
    kept = np.ones(len(before), dtype=bool)
    for many, one, least in ((before, after, 1), (after, before, 0)):
        rows = np.flatnonzero(ordered[many] & single[one])
        rows = rows[sort_by(nodes.number[many[rows]], one[rows], place[many[rows]])]
        first = group_starts(nodes.number[many[rows]], one[rows])
        others = np.setdiff1d(np.arange(len(rows)), first)
        kept[rows[others - least]] = False  # each has one in its group behind it, or else before it
    return before[kept], after[kept]


def _are_alike(program: Program, nodes: ByClass, grows: Flags) -> bool:
    """Return whether messages of classes that grow in number are of one size in each class, and take one time."""
    size = np.zeros(program.nodes, dtype=np.int64)
    size[program.message_nodes] = program.messages.size
    size, number = size[nodes.order], nodes.number[nodes.order]
    changes = np.flatnonzero((size[1:] != size[:-1]) & (number[1:] == number[:-1]))
    return not grows[number[changes]].any()


def _is_early(program: Program) -> Flags:
    """Return whether each node starts in the first half of its step in a run in which each task takes one slot."""
    duration = np.zeros(program.nodes, dtype=np.int64)
    duration[: program.compute] = 1
    start, end, _ = longest_paths(*program.waits(), duration, np.zeros_like(duration))
    step = steps_of_nodes(program)
    begun, ended = np.full(program.steps, end.max(initial=0)), np.zeros(program.steps, dtype=np.int64)
    np.minimum.at(begun, step[: program.compute], start[: program.compute])
    np.maximum.at(ended, step[: program.compute], end[: program.compute])
    early: Flags = 2 * start < (begun + ended)[step]
    return early


class _Sides(NamedTuple):
    """Nodes by their step and side of its cuts, and their places in the shorter program.

    The last of each column is for the start of the run.
    """

    step: Ints
    is_head: Flags  # up to the second cut of its step
    is_tail: Flags  # from the first cut on
    head: Ints  # places of the head; -1 of others
    tail: Ints  # places of the tail, and of what is before it; -1 of what has no place, and does not move with it
    unmoved: Ints  # places of the head, and of what does not grow in number

    @classmethod
    def of(cls, program: Program, first: Ints, count: Ints, more: Ints, moved: Ints) -> "_Sides":
        """Return the sides of a program whose tails are moved: of each class so many are before the cut."""
        nodes = nodes_by_class(program)
        number, place = nodes.number, np.empty(len(nodes.order), dtype=np.int64)
        place[nodes.order] = np.arange(len(place))
        index = place - nodes.first[number]
        back = index - moved[number]
        is_head, is_tail = index < (count + more)[number], back >= count[number]
        head = np.where(is_head, first[number] + index, -1)
        tail = np.where((back >= 0) & (is_tail | (more[number] > 0)), first[number] + back, -1)
        unmoved = np.where(is_head | (more[number] == 0), first[number] + index, -1)
        columns = (steps_of_nodes(program), is_head, is_tail, head, tail, unmoved)
        of_start = (0, True, False, first[-1], -1, first[-1])
        return cls(*(np.append(*pair) for pair in zip(columns, of_start, strict=True)))

    def parts(self) -> Iterator[tuple[Flags, Ints]]:
        """Yield which nodes are between the cuts of a step and those of the next, with both units; and their places."""
        for step in range(int(self.step.max()) + 2):
            there = ((self.step == step) & self.is_head) | ((self.step == step - 1) & self.is_tail)
            yield there, np.where(self.step >= step, self.head, np.where(self.step == step - 1, self.tail, -1))

    def waits(self, program: Program) -> tuple[Ints, Ints, Flags]:
        """Return who waits for whom, and whether for a node that does not move with it, as from before other cuts."""
        before, after = _waits(program)
        is_early = np.zeros(len(before), dtype=np.bool_)
        for there, place in self.parts():
            is_early |= there[after] & (place[before] < 0)
        return before, after, is_early

    def move_alike(self, program: Program) -> bool:
        """Return whether all behind a cut waits for what moves with it, and else for what stays where it is."""
        before, after, is_early = self.waits(program)
        alone = np.bincount(after[~is_early], minlength=program.nodes) == 0
        alone &= (self.is_tail | (self.step > 0))[:-1]
        return bool((self.unmoved[before[is_early]] >= 0).all()) and not alone.any()

    def facts(self, program: Program) -> Iterator[list[Ints]]:
        """Yield the columns of what is to be the same in both programs: who waits for whom, and what is sent and held.

        Last of all come the ends of lanes, which are in the last tail.
        """
        (before, after, is_early), buffers, messages = self.waits(program), program.buffers, program.message_nodes
        held = buffers.device, buffers.category, buffers.stage, buffers.size
        for there, place in self.parts():
            for source, kind in ((place, ~is_early), (self.unmoved, is_early)):
                rows = np.flatnonzero(there[after] & kind)
                yield [source[before[rows]], place[after[rows]]]
            rows = np.flatnonzero(there[messages])
            yield [place[messages][rows], program.messages.size[rows]]
            for moment in (buffers.begin, buffers.end):
                rows = np.flatnonzero(there[moment >> 1])
                yield [place[moment[rows] >> 1], moment[rows] & 1, *(column[rows] for column in held)]
        yield [self.tail[program.lane_tasks[program.lane_start[1:] - 1]]]


def _cut_of(program: Program, more: Ints, sides: _Sides, step: int) -> Cut:
    nodes = nodes_by_class(program)
    place, number = np.arange(program.nodes), nodes.number[nodes.order]
    own, is_tail, grows = sides.step[:-1] == step, sides.is_tail[:-1], more[nodes.number] > 0
    is_behind = (sides.step[:-1] > step) | (own & is_tail)
    index, left = place - nodes.first[number], nodes.first[number + 1] - place
    again, first, last = (np.empty(program.nodes, dtype=np.int64) for _ in range(3))
    again[nodes.order] = nodes.order[np.where(left > more[number], place + more[number], place)]
    first[nodes.order], last[nodes.order] = index < more[number], left <= more[number]
    waited, waiting, is_early = sides.waits(program)
    early = waited[is_early], waiting[is_early]
    waited, waiting = waited[~is_early], waiting[~is_early]
    ends = np.unique(waited[~is_behind[waited] & is_behind[waiting]])
    before, behind = (np.flatnonzero(own & grows & side) for side in (~is_tail, is_tail & (last == 0)))
    fixed = ~(own & grows)
    return Cut(
        (ends, again[ends]),
        (before, again[before]),
        (behind, again[behind]),
        np.flatnonzero(own & (first == 1)),
        np.flatnonzero(own & (last == 1) & grows),
        (np.flatnonzero(fixed & ~is_behind), np.flatnonzero(fixed & is_behind)),
        np.flatnonzero(own & sides.is_head[:-1] & is_tail),
        early,
    )


def _are_same(one: Sequence[Ints], other: Sequence[Ints]) -> bool:
    """Return whether two tables have the same rows, in any order."""
    if all(map(np.array_equal, one, other)):
        return True
    columns = (np.append(*pair) for pair in zip(one, other, strict=True))
    number = row_numbers([dense_ranks(column) if column.max(initial=0) >= 2**20 else column for column in columns])
    return np.array_equal(np.sort(number[: len(one[0])]), np.sort(number[len(one[0]) :]))

"""Rows of programs that differ in micro-batches alone, matched: from the front in the first half, else from the back.

What matches depends on programs alone, and is found once for each of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Flags, Ints, Times, expand_ranges, group_numbers, group_starts, row_numbers, sort_by
from cdpsim.program import Program, once_a_program


class ByClass(NamedTuple):
    """Rows in classes that differ in micro-batch alone, each in the order of these."""

    classes: Ints  # what distinguishes each class, a column for it
    order: Ints
    first: Ints  # where each class begins in the order, and the end
    number: Ints  # the class of each row

    @classmethod
    def of(cls, columns: Ints, micro_batch: Ints) -> "ByClass":
        """Sort rows with equal columns into classes."""
        _, first, number = np.unique(row_numbers([*columns]), return_index=True, return_inverse=True)
        number = number.astype(np.int32)
        order = sort_by(number, micro_batch + 1)
        return cls(columns[:, first], order, np.append(group_starts(number[order]), len(order)), number)


@once_a_program
def nodes_by_class(program: Program) -> ByClass:
    """Sort the nodes of a program, those of one step, operation and content together."""
    tasks, messages, parts = program.tasks, program.messages, program.parts
    of_part = program.first_messages - len(tasks)
    rows = (
        (tasks.step, messages.step, parts.step),
        (0 * tasks.kind, 1 + messages.op, 9 + parts.sends),
        (tasks.kind, messages.content, messages.content[of_part]),
        (tasks.stage, messages.stage, messages.stage[of_part]),
        (tasks.device, messages.src, parts.device),
        (tasks.lane, messages.dst, messages.dst[of_part]),
        (0 * tasks.kind, messages.stream, messages.stream[of_part]),
    )
    micro_batch = np.concatenate([tasks.micro_batch, messages.micro_batch, messages.micro_batch[of_part]])
    return ByClass.of(np.array([np.concatenate(row, dtype=np.int64) for row in rows]), micro_batch.astype(np.int64))


@once_a_program
def _buffers_by_class(program: Program) -> ByClass:
    """Sort the buffers of a program, which are those of one device after another, and begin with nodes of one class."""
    buffers, nodes = program.buffers, nodes_by_class(program)
    place = np.empty(len(nodes.order), dtype=np.int64)
    place[nodes.order] = np.arange(len(place))
    begins = np.where(buffers.begin < 0, -1, 2 * nodes.number[buffers.begin >> 1] + (buffers.begin & 1))
    columns = (buffers.category, buffers.device, buffers.stage, buffers.version, buffers.size, begins)
    of_devices, order = np.concatenate(buffers.of_devices), np.where(buffers.begin < 0, -1, place[buffers.begin >> 1])
    return ByClass.of(np.array(columns, dtype=np.int64)[:, of_devices], order[of_devices])


MIDDLE, ALL, FRONT, BACK = range(4)


class Middle(NamedTuple):
    """Rows between the halves: those of one unit in the first program, which the second one has twice.

    Once they are a part of the front, and once of the back; there they are to grow as the match beside them does.
    """

    rows: Ints
    again: tuple[Ints, Ints]  # the same in the second program
    match: tuple[Ints, Ints]  # numbers of the last match of the front, and of the first of the back

    def grows_alike(self, before: Times, now: Times, later: Times) -> bool:
        """Return whether columns of the two programs grow in the middle as much as matches do."""
        pairs, here = zip(self.again, self.match, strict=True), before[..., self.rows]
        return all(bool((now[..., again] - here == later[..., match]).all()) for again, match in pairs)


class Matches(NamedTuple):
    """Rows of two programs, a unit apart, that match."""

    before: Ints  # of the one with fewer micro-batches
    now: Ints
    group: Ints  # the class of each match
    part: Ints  # ALL of a class that does not grow, else which half of it
    middle: Middle

    @classmethod
    def of(cls, before: ByClass, now: ByClass) -> "Matches | None":
        """Return what matches; None if classes are others, or so small that no halves are left beside a unit."""
        if not np.array_equal(before.classes, now.classes):
            return None
        count, more = np.diff(before.first), np.diff(now.first) - np.diff(before.first)
        least = count - more
        if (more < 0).any() or (least[more > 0] < 2).any():
            return None
        group, first = np.repeat(np.arange(len(least)), least), np.cumsum(least) - least
        place, half = np.arange(len(group)) - first[group], (least + 1) // 2  # rows of the front
        late = (more[group] > 0) & (place >= half[group])
        earlier = before.order[before.first[:-1][group] + place + late * more[group]]
        later = now.order[now.first[:-1][group] + place + late * 2 * more[group]]
        part = np.where(more[group] > 0, np.where(late, BACK, FRONT), ALL).astype(np.int8)
        return cls(earlier, later, group, part, _middle(before, now, first, half))


def _middle(before: ByClass, now: ByClass, first: Ints, half: Ints) -> Middle:
    """Return the middle of classes, whose matches begin at these numbers, with so many of the front."""
    more = np.diff(now.first) - np.diff(before.first)
    group = np.repeat(np.arange(len(more)), more)
    place = half[group] + np.arange(len(group)) - np.repeat(np.cumsum(more) - more, more)
    again = now.first[:-1][group] + place
    return Middle(
        before.order[before.first[:-1][group] + place],
        (now.order[again], now.order[again + more[group]]),
        ((first + half)[group] - 1, (first + half)[group]),
    )


@dataclass(frozen=True, eq=False)
class NodeMatches:
    """Nodes of two programs, a unit apart, that match."""

    before: Ints
    now: Ints
    middle: Middle
    part: Ints  # of each node of the second program: MIDDLE if it has no match
    alike: tuple[Ints, Ints]  # matches that are to be as much later as others: of one kind and half, as its first one
    waits: tuple[Ints, Ints]  # edges of the second program between nodes that match, but for those from half to half


@once_a_program
def match_nodes(program: Program, before: Program) -> NodeMatches | None:
    """Match the nodes of a program with those of one with fewer micro-batches."""
    nodes = nodes_by_class(program)
    matches = Matches.of(nodes_by_class(before), nodes)
    if matches is None:
        return None
    kind = row_numbers([*nodes.classes[:3, matches.group], matches.part])  # step, operation, content; and half
    growing = np.flatnonzero(matches.part != ALL).astype(np.int32)
    order = growing[sort_by(kind[growing])]
    first = group_starts(kind[order])
    leader = order[first][group_numbers(first, len(order))]
    part = np.full(program.nodes, MIDDLE, dtype=np.int8)
    part[matches.now] = matches.part
    earlier, later = program.waits()
    since, until = part[earlier], part[later]
    known = (since != MIDDLE) & (until != MIDDLE)
    rows = np.flatnonzero(known & ((since == until) | (since == ALL) | (until == ALL)))
    waits = earlier[rows], later[rows]
    return NodeMatches(matches.before, matches.now, matches.middle, part, (order, leader), waits)


@once_a_program
def match_buffers(program: Program, before: Program) -> Matches | None:
    """Match the buffers of a program, those of one device after another, with one with fewer micro-batches."""
    return Matches.of(_buffers_by_class(before), _buffers_by_class(program))


@dataclass(frozen=True, eq=False)
class Moments:
    """Beginnings of buffers, and then their ends, whose nodes match; in groups that are to grow alike."""

    row: Ints
    first: Ints  # where groups begin
    number: Ints  # the group of each row
    opposite: tuple[Ints, Ints]  # pairs of a group that begins and one that ends something on a device, of one half


@once_a_program
def moments_of(program: Program, before: Program) -> Moments:
    """Group the moments of a program's buffers, by the halves of those nodes which match."""
    nodes, buffers, number = match_nodes(program, before), program.buffers, nodes_by_class(program).number
    assert nodes is not None
    part = np.append(nodes.part, np.int8(ALL))  # of the start of the run, which is moment -1
    begins, ends, kept = part[buffers.begin >> 1], part[buffers.end >> 1], part[buffers.kept_until >> 1]
    known = np.append(begins != MIDDLE, ends != MIDDLE) & np.tile(buffers.size > 0, 2)
    known[len(buffers) + buffers.kept[kept == MIDDLE]] = False
    np.maximum.at(ends, buffers.kept, kept)
    row = np.flatnonzero(known)
    parts, at = np.append(begins, ends)[row], np.append(buffers.begin, buffers.end)[row]
    columns: list[Ints] = [
        np.tile(buffers.device, 2)[row],
        parts,
        (row >= len(buffers)).astype(np.int64),
        np.append(number, -1)[at >> 1] + 1,
        np.tile(buffers.category, 2)[row],
        np.where(parts == ALL, 1 + np.arange(len(row)), 0),  # what does not grow in number is a group of its own
    ]
    order = sort_by(*columns)
    first = group_starts(*(column[order] for column in columns))
    device, half, kind = (column[order[first]] for column in columns[:3])
    return Moments(row[order], first, group_numbers(first, len(order)), _pairs_of_opposites(device, half, kind > 0))


def _pairs_of_opposites(device: Ints, part: Ints, ends: Flags) -> tuple[Ints, Ints]:
    """Return all pairs of a group that begins and one that ends something on a device; but for front and back."""
    begins, others = np.flatnonzero(~ends), np.flatnonzero(ends)
    low, high = (np.searchsorted(device[others], device[begins], side=side) for side in ("left", "right"))
    which, other = expand_ranges(low, high)
    one, other = begins[which], others[other]
    halves = (part[one] == part[other]) | (part[one] == ALL) | (part[other] == ALL)
    return one[halves].astype(np.int32), other[halves].astype(np.int32)

"""Collectives that run as the messages of their algorithm: which messages belong to which, and in which round."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cdpsim.invariants.needs import Needs
from cdpsim.numeric.columns import Ints, Times, find_rows, group_numbers, group_starts, sort_by
from cdpsim.program import Content, Messages, Op, Program
from cdpsim.program.collectives import Algorithm
from cdpsim.schedules.state import Home


class Whole(NamedTuple):
    """A run in which every collective is one node; those that ran as several messages are the last nodes."""

    program: Program  # without edges of its own
    part_of: Ints  # of each node of the run, the node here that it is or is a part of
    start: Times
    end: Times
    arrived: Times  # of each of those collectives and each device: when it has ended there

    def until(self, needs: Needs) -> Times:
        """When the first node of each need has ended for the device of the second one."""
        until: Times = self.end[needs.before]
        first, tasks = len(self.start) - len(self.arrived), self.program.tasks
        rows = np.flatnonzero((needs.before >= first) & (needs.after < len(tasks)))
        until[rows] = self.arrived[needs.before[rows] - first, tasks.device[needs.after[rows]]]
        return until


def members(program: Program, rows: Ints) -> tuple[Ints, Ints]:
    """Rows of collectives with each of their members: (row, device)."""
    group = program.messages.dst[rows]
    size = np.array([len(devices) for devices in program.groups], dtype=np.int64)
    devices, first = np.concatenate([*program.groups, rows[:0]]).astype(np.int64), np.cumsum(size) - size
    count = size[group]
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(rows, count), devices[np.repeat(first[group], count) + within]


def put_together(program: Program, pieces: Ints, start: Times, end: Times) -> Whole:
    """Make one node of the messages of each collective; `pieces` are their rows.

    A collective is all that has one content, stage and step; owned parameters go twice, for forwards and for backwards,
    in equally many messages. It starts with its first message. It ends for each member with the last message that
    reaches it, or that it sends where none does.
    """
    count, messages = len(program.tasks), program.messages
    number = _numbers(messages, pieces, twice=program.state.parameters is Home.OWNED)
    kept = np.setdiff1d(np.arange(len(messages)), pieces)
    part_of = np.arange(program.message_nodes.stop)
    part_of[count + kept] = count + np.arange(len(kept))
    part_of[count + pieces] = count + len(kept) + number
    many = int(number.max()) + 1
    of = np.concatenate([np.arange(count), count + kept])
    begin, until = start[of], end[of]
    first, last = (np.full(many, fill, dtype=end.dtype) for fill in (end.max(), start.min()))
    np.minimum.at(first, number, start[count + pieces])
    np.maximum.at(last, number, end[count + pieces])
    return Whole(
        _program(program, pieces, number, kept),
        part_of,
        np.concatenate([begin, first]),
        np.concatenate([until, last]),
        _arrived(program, pieces, number, end[count + pieces]),
    )


def _numbers(messages: Messages, pieces: Ints, *, twice: bool) -> Ints:
    """The number of each piece's collective, in the order of their first pieces."""
    of = tuple(getattr(messages, name)[pieces] for name in ("content", "stage", "step"))
    order = sort_by(*(column - column.min() for column in of))
    group = group_numbers(first := group_starts(*(column[order] for column in of)), len(order))
    size = np.diff(np.append(first, len(order)))[group]
    again = (of[0][order] == Content.PARAMETERS) & twice
    half = np.where(again, 2 * (np.arange(len(order)) - first[group]) // size, 0)
    begins = group_starts(group, half)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.argsort(np.argsort(pieces[order[begins]]))[group_numbers(begins, len(order))]
    return number


def _arrived(program: Program, pieces: Ints, number: Ints, end: Times) -> Times:
    """When each collective (a row) has ended for each device (a column)."""
    never = end.dtype.type(-1)
    received, sent = (np.full((int(number.max()) + 1, program.devices), never) for _ in range(2))
    np.maximum.at(received, (number, program.messages.dst[pieces]), end)
    np.maximum.at(sent, (number, program.messages.src[pieces]), end)
    return np.where(received == never, sent, received)


def _program(program: Program, pieces: Ints, number: Ints, kept: Ints) -> Program:
    messages, tasks = program.messages, program.tasks
    first = pieces[np.unique(number, return_index=True)[1]]
    columns = {name: getattr(messages, name)[first].copy() for name in Messages.__dataclass_fields__}
    update = np.arange(program.compute, len(tasks))
    made = find_rows((tasks.stage[update],), (columns["stage"],))
    gradient = columns["content"] == Content.GRADIENT
    of_stage = columns["stage"] >= 0  # else it sums the gradient of a tied tensor
    alone = of_stage & (np.bincount(tasks.stage[update], minlength=program.n)[columns["stage"]] == program.steps)
    columns["src"] = np.where(alone, tasks.device[update[made]], -1)
    columns["op"] = np.where(gradient, np.where(alone, Op.REDUCE, Op.ALL_REDUCE), Op.BROADCAST)
    columns["dst"] = len(program.groups) + np.arange(len(first))
    joined = {name: np.concatenate([getattr(messages, name)[kept], column]) for name, column in columns.items()}
    devices = np.stack([np.tile(number, 2), np.concatenate([messages.src[pieces], messages.dst[pieces]])], axis=1)
    members = np.unique(devices, axis=0)
    groups = np.split(members[:, 1], np.flatnonzero(np.diff(members[:, 0])) + 1)
    return replace(program, messages=Messages(**joined), groups=(*program.groups, *groups))


def rounds_of(src: Ints, dst: Ints, members: Ints, algorithms: list[Algorithm]) -> tuple[Ints, Ints] | None:
    """The round and the channel of each message of a collective, by the first algorithm whose messages these are."""
    place = np.full(int(max(members.max(), src.max(), dst.max())) + 1, -1)
    place[members] = np.arange(len(members))
    for how in algorithms:
        senders, receivers, *where = _laid_out(how, len(members))
        if np.array_equal(senders, place[src]) and np.array_equal(receivers, place[dst]):
            return where[0], where[1]
    return None


@lru_cache(maxsize=64)
def _laid_out(how: Algorithm, k: int) -> tuple[Ints, Ints, Ints, Ints]:
    """The sender, the receiver, the round and the channel of each message."""
    rounds = how.schedule(k)
    src, dst, first, _ = (np.concatenate(column) for column in zip(*rounds, strict=True))
    return src, dst, np.repeat(np.arange(len(rounds)), [len(one.src) for one in rounds]), how.channel(k, first)

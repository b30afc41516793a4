"""Runs in which every collective is one node, also where it ran as the messages of its algorithm."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cdpsim.invariants.needs import Needs
from cdpsim.numeric.columns import Ints, Times, find_rows, group_numbers, group_starts, row_numbers, sort_by
from cdpsim.program import Content, Messages, Op, Program
from cdpsim.program.collectives import Algorithm
from cdpsim.schedules.state import Home


class Collapsed(NamedTuple):
    """A run in which every collective is one node; those that ran as several messages are the last nodes."""

    program: Program  # without edges of its own
    part_of: Ints  # of each node of the run, the node here that it is or is a part of
    start: Times
    end: Times
    arrived: Times  # of each of those collectives and each device: when it has ended there

    def until(self, needs: Needs) -> Times:
        """Return when the first node of each need has ended for the device of the second one."""
        until: Times = self.end[needs.before]
        first, tasks = len(self.start) - len(self.arrived), self.program.tasks
        rows = np.flatnonzero((needs.before >= first) & (needs.after < len(tasks)))
        until[rows] = self.arrived[needs.before[rows] - first, tasks.device[needs.after[rows]]]
        return until


def members(program: Program, rows: Ints) -> tuple[Ints, Ints]:
    """Return rows of collectives with each of their members: (row, device)."""
    groups = [program.groups[group] for group in program.messages.dst[rows].tolist()]
    sizes = np.array([len(group) for group in groups], dtype=np.int64)
    return np.repeat(rows, sizes), np.concatenate([rows[:0], *groups]).astype(np.int64)


def receivers(program: Program, rows: Ints) -> tuple[Ints, Ints]:
    """Return rows of messages with each of their receivers: (row, device); of a collective all members but its root."""
    messages, is_single = program.messages, program.messages.op[rows] == Op.P2P
    single = rows[is_single]
    together, device = members(program, rows[~is_single])
    other = device != messages.src[together]
    return np.concatenate([single, together[other]]), np.concatenate([messages.dst[single], device[other]])


def collapse(program: Program, pieces: Ints, start: Times, end: Times) -> Collapsed:
    """Make one node of the messages of each collective; `pieces` are their rows, in ascending order.

    A collective is all messages of one content, stage and step; owned parameters go twice, for forwards and for
    backwards, in equally many messages. It starts with its first message. It ends for each member with the last message
    that reaches it, or that it sends where none does.
    """
    count, messages = len(program.tasks), program.messages
    number = _collective_numbers(messages, pieces, twice=program.state.parameters is Home.OWNED)
    kept = np.setdiff1d(np.arange(len(messages)), pieces)
    part_of = np.arange(program.message_nodes.stop)
    part_of[count + kept] = count + np.arange(len(kept))
    part_of[count + pieces] = count + len(kept) + number
    collectives, nodes = int(number.max()) + 1, np.concatenate([np.arange(count), count + kept])
    first, last = np.full(collectives, end.max(), dtype=end.dtype), np.full(collectives, start.min(), dtype=end.dtype)
    np.minimum.at(first, number, start[count + pieces])
    np.maximum.at(last, number, end[count + pieces])
    arrived = _arrivals(program, pieces, number, end[count + pieces])
    times = np.concatenate([start[nodes], first]), np.concatenate([end[nodes], last])
    return Collapsed(_collapsed_program(program, pieces, number, kept), part_of, *times, arrived)


def _collective_numbers(messages: Messages, pieces: Ints, *, twice: bool) -> Ints:
    """Return the number of each piece's collective, in the order of their first pieces."""
    key = row_numbers([getattr(messages, name)[pieces] for name in ("content", "stage", "step")])
    order = sort_by(key)
    first = group_starts(key[order])
    group = group_numbers(first, len(order))
    middle = (first + np.append(first[1:], len(order))) / 2
    second = twice & (messages.content[pieces[order]] == Content.PARAMETERS) & (np.arange(len(order)) >= middle[group])
    key[order] = 2 * group + second
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _arrivals(program: Program, pieces: Ints, number: Ints, end: Times) -> Times:
    """Return when each collective (a row) has ended for each device (a column)."""
    never = end.dtype.type(-1)
    received, sent = (np.full((int(number.max()) + 1, program.devices), never) for _ in range(2))
    np.maximum.at(received, (number, program.messages.dst[pieces]), end)
    np.maximum.at(sent, (number, program.messages.src[pieces]), end)
    return np.where(received == never, sent, received)


def _collapsed_program(program: Program, pieces: Ints, number: Ints, kept: Ints) -> Program:
    """Return the program with the kept messages, and one more for each collective of the pieces."""
    messages, tasks = program.messages, program.tasks
    first = pieces[np.unique(number, return_index=True)[1]]
    columns = {name: getattr(messages, name)[first].copy() for name in Messages.__dataclass_fields__}
    update = np.arange(program.compute, len(tasks))
    made = find_rows((tasks.stage[update],), (columns["stage"],))
    of_stage = columns["stage"] >= 0  # else it sums the gradient of a tied tensor
    alone = of_stage & (np.bincount(tasks.stage[update], minlength=program.n)[columns["stage"]] == program.steps)
    columns["src"] = np.where(alone, tasks.device[update[made]], -1)
    summed = np.where(alone, Op.REDUCE, Op.ALL_REDUCE)
    columns["op"] = np.where(columns["content"] == Content.GRADIENT, summed, Op.BROADCAST)
    columns["dst"] = len(program.groups) + np.arange(len(first))
    joined = {name: np.concatenate([getattr(messages, name)[kept], column]) for name, column in columns.items()}
    devices = np.stack([np.tile(number, 2), np.concatenate([messages.src[pieces], messages.dst[pieces]])], axis=1)
    members_of = np.unique(devices, axis=0)
    groups = np.split(members_of[:, 1], np.flatnonzero(np.diff(members_of[:, 0])) + 1)
    return replace(program, messages=Messages(**joined), groups=(*program.groups, *groups))


def round_and_channel(src: Ints, dst: Ints, members: Ints, algorithms: list[Algorithm]) -> tuple[Ints, Ints] | None:
    """Return the round and the channel of each message of a collective, by the first algorithm that sends these.

    It is None if no algorithm does.
    """
    place = np.full(int(max(members.max(), src.max(), dst.max())) + 1, -1)
    place[members] = np.arange(len(members))
    for how in algorithms:
        senders, receivers, rounds, channels = _messages_of(how, len(members))
        if np.array_equal(senders, place[src]) and np.array_equal(receivers, place[dst]):
            return rounds, channels
    return None


@lru_cache(maxsize=64)
def _messages_of(how: Algorithm, k: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the sender, the receiver, the round and the channel of each message of an algorithm for k members."""
    rounds = how.schedule(k)
    src, dst, first, _ = (np.concatenate(column) for column in zip(*rounds, strict=True))
    return src, dst, np.repeat(np.arange(len(rounds)), [len(one.src) for one in rounds]), how.channel(k, first)

"""Recount of a run: facts that several laws derive from it, each derived once, without the program's edges.

A law is a list of needs. They follow from tasks, messages and the request, and their nodes are those of the run in
which every collective is one node, also where it ran as the messages of its algorithm.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cdpsim.model import Tie
from cdpsim.numeric.columns import Flags, Ints, Times, expand_ranges, find_rows, group_numbers, group_starts, sort_by
from cdpsim.program import Content, Kind, Messages, Op, Program
from cdpsim.runs import Run
from cdpsim.schedules.state import Home

Key = tuple[Ints, ...]  # columns of rows


class Needs(NamedTuple):
    """Node `after[k]` starts no earlier than node `before[k]` has ended; -1 stands for a missing node."""

    before: Ints
    after: Ints


NO_NEEDS = Needs(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def combine(*needs: Needs) -> Needs:
    """Return all of several needs."""
    before, after = (np.concatenate(ends).astype(np.int64) for ends in zip(NO_NEEDS, *needs, strict=True))
    return Needs(before, after)


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
    columns = messages.content[pieces], messages.stage[pieces], messages.step[pieces]
    order = sort_by(*(column - column.min() for column in columns))
    first = group_starts(*(column[order] for column in columns))
    group = group_numbers(first, len(order))
    middle = (first + np.append(first[1:], len(order))) / 2
    second = twice & (columns[0][order] == Content.PARAMETERS) & (np.arange(len(order)) >= middle[group])
    key = np.empty(len(order), dtype=np.int64)
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


class LaneOrder(NamedTuple):
    """The compute tasks, lane after lane, each in its order."""

    order: Ints
    place: Ints  # of each compute task in `order`
    head: Ints  # of each place, the place at which its lane begins


class Recount:
    """A run, and the facts that laws derive from it."""

    def __init__(self, run: Run) -> None:
        program, state = run.program, run.program.state
        self.program, self.costs, self.request = program, run.costs, run.request
        self.start, self.end = run.start, run.end
        self.replicas = run.request.shape.replicas
        self.together = program.together or self.replicas > 1  # collectives sum gradients and hand parameters out
        self.travels = state.travels  # the state of a stage goes from user to user
        self.owned = state.parameters is Home.OWNED  # parameters are in one place between their uses
        self.handed_out = self.owned and not self.travels  # their owners send them for each use
        self.givers = program.gradient_tasks.ravel()  # the tasks that give gradients
        self.updates = np.arange(program.compute, len(program.tasks))

    def report(self, nodes: Ints, problem: str) -> Iterator[str]:
        """Yield a problem of each of these nodes."""
        for node in nodes.tolist():
            yield f"{self.program.describe(node)} {problem}"

    def report_unmet(self, needs: Needs, problem: str, lack: str = "") -> Iterator[str]:
        """Yield a problem of each need whose second node starts too early; it is `lack` where the first is missing."""
        run = self.collapsed
        for row in np.flatnonzero((needs.before < 0) | (run.start[needs.after] < run.until(needs))).tolist():
            before, after = (int(ends[row]) for ends in needs)
            early = f"starts before {run.program.describe(before)} {problem}"
            yield f"{run.program.describe(after)} {lack if before < 0 else early}"

    def starts_early(self, key: Ints, turn: Ints, node: Ints, blocks: Flags) -> Flags:
        """Flag rows whose node starts before a blocking node of the same key and a lower turn has ended."""
        order = sort_by(key, turn)
        key, turn, row = key[order], turn[order], node[order]
        times, rank = np.unique(self.end[row], return_inverse=True)
        floor = group_numbers(group_starts(key), len(row)).astype(np.int64) * (len(times) + 1)
        latest = np.append(-1, np.maximum.accumulate(floor + np.where(blocks[order], rank + 1, 0)))
        batch = group_starts(key, turn)
        until = latest[batch[group_numbers(batch, len(row))]] - floor  # from 1 on: the latest end of lower turns
        early = np.zeros(len(row), dtype=np.bool_)
        early[order] = (until > 0) & (self.start[row] < times[np.maximum(until, 1) - 1])
        return early

    @cached_property
    def collapsed(self) -> Collapsed:
        """The run in which every collective is one node."""
        program, messages = self.program, self.program.messages
        if self.together and self.request.expands:
            of_collectives = np.isin(messages.content, (Content.GRADIENT, Content.PARAMETERS))
            pieces = np.flatnonzero((messages.op == Op.P2P) & of_collectives)
            if len(pieces):
                return collapse(program, pieces, self.start, self.end)
        return Collapsed(program, np.arange(program.message_nodes.stop), self.start, self.end, self.end[:0, None])

    @cached_property
    def counts(self) -> Ints:
        """The number of micro-batches of each replica (columns) in each step (rows)."""
        shape = self.request.shape
        given = self.request.counts or [[shape.m] * shape.replicas] * self.program.steps
        return np.array(given, dtype=np.int64)

    @cached_property
    def number_in_replica(self) -> Ints:
        """The number of each pass among those of its replica in its step."""
        counts = self.counts.ravel()
        return expand_ranges(np.zeros_like(counts), counts)[1]

    @cached_property
    def shared(self) -> list[Tie]:
        """The tied tensors that several devices have for different stages; sharded states' owners always have."""
        program, copies = self.program, self.owned or self.program.state.optimizer is Home.COPIED
        ties = self.request.model.tied if program.together and copies else ()
        device = program.tasks.device[program.tasks_of_kind(Kind.F)]
        return [t for t in ties if self.owned or (device[:, t.stages] != device[:, t.stages[:1]]).any()]

    @cached_property
    def lanes(self) -> LaneOrder:
        """The lanes without the updates that have a place in them."""
        program = self.program
        compute = program.lane_tasks < program.compute
        order = program.lane_tasks[compute]
        lane = group_numbers(program.lane_start[:-1], len(program.lane_tasks))[compute]
        place = np.empty(program.compute, dtype=np.int64)
        place[order] = np.arange(len(order))
        return LaneOrder(order, place, np.searchsorted(lane, lane))

    @cached_property
    def position(self) -> Ints | None:
        """The position of each compute task in the order that its schedule declares; None if it declares lists."""
        schedule, program = self.request.schedule, self.program
        if schedule.order.lists:
            return None
        t, i, phase = program.pass_step[:, None], self.number_in_replica[:, None], np.arange(program.phases)
        position = schedule.order.position(t, i, phase, self.request.shape)
        return np.broadcast_to(position, (program.passes, program.phases)).ravel()

    @cached_property
    def barriers(self) -> Ints:
        """For each update, the task with which the last micro-batch's pass ends in its step and replica."""
        program, updates = self.program, self.updates
        replica = program.tasks.device[updates] // (program.devices // self.replicas)
        until, step = np.cumsum(self.counts, axis=1), program.tasks.step[updates]
        last = until[step, np.minimum(replica, self.replicas - 1)] - 1
        task: Ints = program.gradient_tasks[program.find_pass(step, last), 0]
        return task

    @cached_property
    def anchors(self) -> Ints:
        """For each update, the last task that gives a gradient to it; where all update together, on its device."""
        program, tasks, updates, giver = self.program, self.program.tasks, self.updates, self.givers
        if not self.together:
            last = program.gradient_tasks[program.first_pass[1:] - 1]
            task: Ints = last[tasks.step[updates], tasks.stage[updates]]
            return task
        giver = giver[np.argsort(-self.lanes.place[giver], kind="stable")]
        rows, wanted = ((tasks.step[nodes], tasks.stage[nodes], tasks.device[nodes]) for nodes in (giver, updates))
        return giver[find_rows(rows, wanted)]

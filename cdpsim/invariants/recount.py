"""Recount of a run: facts that several laws derive from it, each derived once, without the program's edges.

A law is a list of needs. They follow from tasks, messages and the request, and their nodes are those of the run in
which every collective is one node, also where it ran as the messages of its algorithm.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from cdpsim.model import Model, Tie
from cdpsim.numeric.columns import Flags, Ints, Times, expand_ranges, find_rows, group_numbers, group_starts, sort_by
from cdpsim.program import Content, Kind, Messages, Op, Program, Stream
from cdpsim.program.collectives import DEFAULT, Algorithm, candidates, payload_factor
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.schedules.state import Placed

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
    """A run in which every collective is one node, also where it ran as several messages."""

    program: Program  # without edges of its own
    part_of: Ints  # of each node of the run, the node here that it is or is a part of
    start: Times
    end: Times
    number: Ints  # of each node here, the row in `arrived`; -1 where it ran in one piece
    arrived: Times  # of each collective in several messages and each device: when it has ended there, -1 elsewhere
    turn: Ints  # of each message of the run, its round in its collective; -1 where it fits in none
    channel: Ints

    def until(self, needs: Needs) -> Times:
        """Return when the first node of each need has ended for the devices of the second one."""
        until: Times = self.end[needs.before]
        tasks, before, after = self.program.tasks, self.number[needs.before], self.number[needs.after]
        rows = (before >= 0) & (needs.after < len(tasks))
        until[rows] = self.arrived[before[rows], tasks.device[needs.after[rows]]]
        both = (before >= 0) & (after >= 0)
        if both.any():
            there, others = self.arrived[before[both]], self.arrived[after[both]]
            until[both] = np.where(others >= 0, there, -1).max(axis=1)
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


def stages_of(messages: Messages, rows: Ints) -> tuple[Ints, Ints]:
    """Return the stages of which messages carry something: (place in `rows`, stage)."""
    return expand_ranges(messages.stage[rows], messages.stage[rows] + messages.stages[rows])


def collapse(program: Program, request: Request, start: Times, end: Times) -> Collapsed:
    """Make one node of the messages of each collective.

    They follow one another in the order of collectives. A collective starts with its first message. It ends for each
    member with the last message that reaches it, or that it sends where none does.
    """
    count, messages = len(program.tasks), program.messages
    whole = program.unexpanded
    several = np.zeros(0, dtype=np.bool_)
    if whole is not None:
        several = whole.messages.op != Op.P2P
        several[several] = np.array([len(group) for group in whole.groups])[whole.messages.dst[several]] > 1
    if whole is None or not several.any():
        same, none = np.arange(program.message_nodes.stop), np.full(len(messages), -1)
        return Collapsed(program, same, start, end, np.full(len(same), -1), end[:0, None], none, none)
    collective, kept = np.flatnonzero(several), np.flatnonzero(~several)
    piece_of, turn, channel = _find_pieces(whole, messages, request, collective, len(kept))
    columns = {name: getattr(whole.messages, name).copy() for name in Messages.__dataclass_fields__}
    for name, values in columns.items():
        values[kept] = getattr(messages, name)[: len(kept)]
    part_of = np.concatenate([np.arange(count), count + kept, count + collective[piece_of]])
    nodes = count + len(whole.messages)
    piece = np.arange(count + len(kept), count + len(messages))
    number = np.full(nodes, -1)
    number[count + collective] = np.arange(len(collective))
    starts, ends = np.full(nodes, end.max(), dtype=start.dtype), np.full(nodes, start.min(), dtype=end.dtype)
    np.minimum.at(starts, part_of, start[: len(part_of)])
    np.maximum.at(ends, part_of, end[: len(part_of)])
    arrived = _arrivals(program, piece - count, piece_of, len(collective), end[piece])
    collapsed = replace(program, messages=Messages(**columns), groups=whole.groups)
    return Collapsed(collapsed, part_of, starts, ends, number, arrived, turn, channel)


def _find_pieces(
    whole: Program, messages: Messages, request: Request, collectives: Ints, first: int
) -> tuple[Ints, Ints, Ints]:
    """Return the collective of each message from the first on, by its place; and each message's round and channel.

    Rounds are those of the algorithm that the collective may go by and that sends these messages: of several, the one
    that sends most. Where bytes are few, the messages of one may begin those of another.
    """
    at, piece_of = int(first), np.zeros(len(messages) - first, dtype=np.int64)
    turn, channel = (np.full(len(messages), -1) for _ in range(2))
    for place, row in enumerate(collectives.tolist()):
        members, root = request.cluster.in_order(whole.groups[whole.messages.dst[row]]), whole.messages.src[row]
        if root >= 0:
            members = np.roll(members, -int(np.flatnonzero(members == root)[0]))
        op, k = Op(int(whole.messages.op[row])), len(members)
        ways = candidates(op, request.collective or DEFAULT, k, request.cluster.cards(members))
        fits = [_messages_of(how, k) for how in ways if _goes_by(how, whole.messages, row, members, messages, at)]
        rounds = max(fits, key=lambda sent: len(sent.src), default=_messages_of(ways[0], k))
        pieces = slice(at, at + len(rounds.src))
        piece_of[at - first : pieces.stop - first] = place
        if fits:
            turn[pieces], channel[pieces] = rounds.turn[: len(turn[pieces])], rounds.channel[: len(turn[pieces])]
        at = pieces.stop
    return piece_of, turn, channel


class _Messages(NamedTuple):
    """The messages of an algorithm: their ends as numbers of members, rounds, channels and parts."""

    src: Ints
    dst: Ints
    turn: Ints
    channel: Ints
    parts: int


_OF_COLLECTIVE = ("content", "stage", "micro_batch", "step", "stages", "stream")


def _goes_by(how: Algorithm, whole: Messages, row: int, members: Ints, messages: Messages, at: int) -> bool:
    """Return whether the messages from `at` on are an algorithm's messages for a collective."""
    rounds = _messages_of(how, len(members))
    pieces = slice(at, at + len(rounds.src))
    if pieces.stop > len(messages):
        return False
    same = all((getattr(messages, name)[pieces] == getattr(whole, name)[row]).all() for name in _OF_COLLECTIVE)
    ends = np.array_equal(members[rounds.src], messages.src[pieces])
    size = whole.size[row] * payload_factor(Op(int(whole.op[row])), len(members))
    sent = abs(int(messages.size[pieces].sum()) * how.parts(len(members)) - rounds.parts * int(size))
    rounding = len(rounds.src) * how.parts(len(members))
    return same and ends and np.array_equal(members[rounds.dst], messages.dst[pieces]) and sent <= rounding


@lru_cache(maxsize=64)
def _messages_of(how: Algorithm, k: int) -> _Messages:
    rounds = how.schedule(k)
    src, dst, first, parts = (np.concatenate(column) for column in zip(*rounds, strict=True))
    turn = np.repeat(np.arange(len(rounds)), [len(each.src) for each in rounds])
    return _Messages(src, dst, turn, how.channel(k, first), int(parts.sum()))


def _arrivals(program: Program, pieces: Ints, number: Ints, count: int, end: Times) -> Times:
    """Return when each collective (a row) has ended for each device (a column)."""
    never = end.dtype.type(-1)
    received, sent = (np.full((count, program.devices), never) for _ in range(2))
    np.maximum.at(received, (number, program.messages.dst[pieces]), end)
    np.maximum.at(sent, (number, program.messages.src[pieces]), end)
    return np.where(received == never, sent, received)


class LaneOrder(NamedTuple):
    """The compute tasks, lane after lane, each in its order."""

    order: Ints
    place: Ints  # of each compute task in `order`
    head: Ints  # of each place, the place at which its lane begins


class StagePart(NamedTuple):
    """The ranks that exchange the same part of stages: what experts have, or all else."""

    experts: bool
    apart: int  # every how many-th data rank has a copy
    copies: int  # ranks of each of their devices that do
    ranks: int  # that share values
    sums: int  # that sum gradients in a group


class Recount:
    """A run, and the facts that laws derive from it."""

    def __init__(self, run: Run) -> None:
        program, state = run.program, run.program.state
        self.program, self.costs, self.request = program, run.costs, run.request
        self.start, self.end = run.start, run.end
        self.replicas = run.request.shape.replicas // program.fold  # present in the program
        self.together = (
            program.together or run.request.shape.replicas > 1
        )  # collectives sum gradients and hand parameters out
        self.travels = state.travels  # the state of a stage goes from user to user
        self.owned = state.parameters is Placed.OWNED  # parameters are in one place between their uses
        self.handed_out = self.owned and not self.travels  # their owners send them for each use
        self.run = run.request.shape.shard if state.splits else 1  # the data ranks of a sharding group
        self.shard = run.request.shape.sharers if state.splits else 1  # all its ranks
        self.model = self._sized_model()
        self.gathers = state.parameters is Placed.SPLIT and self.shard > 1  # parameters come together for each use
        # The tasks that give gradients to updates.
        self.producers = program.gradient_tasks[: program.first_pass[program.updated]].ravel()
        self.updates = np.arange(program.compute, len(program.tasks))

    def _sized_model(self) -> Model:
        """Return the model with the sizes that are exchanged: tied tensors once where one device has them; padded."""
        model, padding = self.request.model, self.program.state.padding
        model = model.with_ties_counted_once(self.once) if self.once else model
        return model if padding is None or self.shard == 1 else model.padded(self.shard, padding)

    @cached_property
    def parts(self) -> tuple[StagePart, ...]:
        """The parts of stages that ranks exchange."""
        shape, mesh, shares = self.request.shape, self.request.model.mesh, self.shard > 1
        copies = shape.copies if self.program.state.streams else 1
        ranks = self.run if self.program.state.splits else shape.replicas
        parts = [StagePart(False, 1, copies, self.shard, ranks * copies)]
        if any(stage.expert_parameters for stage in self.model.stages) and mesh.expert != mesh.tensor:
            apart, each = max(1, mesh.expert // mesh.team), max(1, mesh.team // mesh.expert)
            many = ranks * mesh.team // mesh.expert
            part = StagePart(True, apart, each, many if shares else 1, many)
            if shares and many == 1:  # then only ranks of other sharding groups have copies
                part = StagePart(True, self.run, 1, 1, shape.replicas // self.run)
            parts.append(part)
        return tuple(parts)

    def part_of(self, rows: Ints) -> Ints:
        """Return the number of the part that messages of groups carry, by their ranks; those of smaller groups too."""
        program, sums = self.collapsed.program, [part.sums for part in self.parts]
        if len(sums) == 1:
            return np.zeros(len(rows), dtype=np.int64)
        if self.shard > 1 and self.parts[1].ranks == 1:
            message = program.messages
            whole = (message.op[rows] == Op.ALL_REDUCE) & (message.stream[rows] == Stream.REDUCE)
            gradients: Ints = (whole & (message.content[rows] == Content.GRADIENT)).astype(np.int64)
            return gradients
        many = program.sizes_of_groups[program.messages.dst[rows]].tolist()
        return np.array([sums.index(each) if each in sums else 0 for each in many], dtype=np.int64)

    def part_size(self, kind: str, part: StagePart, size: Ints, stage: Ints) -> Ints:
        """Return what of stages' bytes of a kind a part has."""
        if len(self.parts) == 1:
            return size
        of_experts = np.array([each.of_experts(kind) for each in self.model.stages], dtype=np.int64)[stage]
        return of_experts if part.experts else size - of_experts

    def shares_in_group(self, kind: str, size: Ints, stage: Ints) -> Ints:
        """Return the bytes that the ranks of a sharding group have of stages whose bytes these are."""
        parts = [self.part_size(kind, part, size, stage) * self.shard // part.ranks for part in self.parts]
        whole: Ints = np.sum(parts, axis=0)
        return whole

    @cached_property
    def once(self) -> tuple[Tie, ...]:
        """The tied tensors whose stages are all on one device: the first of these has them for all."""
        program = self.program
        device = program.tasks.device[program.tasks_of_kind(Kind.F)]
        apart = self.request.schedule.placement.exclusive or program.versions_differ or self.owned
        ties = () if apart else self.request.model.tied
        return tuple(tie for tie in ties if (device[:, tie.stages] == device[:, tie.stages[:1]]).all())

    def stages_with_copies(self, tie: Tie, device: int) -> list[int]:
        """Return the stages of a device that share a tensor with an earlier one there, which counts it for them."""
        tasks = self.program.tasks
        mine = np.unique(tasks.stage[self.producers[tasks.device[self.producers] == device]])
        stages: list[int] = mine[np.isin(mine, tie.stages)][1:].tolist()
        return stages

    def sizes_on(self, kind: str, device: Ints, stage: Ints) -> Ints:
        """Return the whole bytes of stages on devices; a device has a tensor that its stages share once."""
        size = self.model.size(kind)[stage]
        for tie in self.shared:
            less = {"parameters": tie.parameters, "gradients": tie.gradient_bytes, "optimizer": tie.optimizer}[kind]
            for each in np.unique(device).tolist():
                size[(device == each) & np.isin(stage, self.stages_with_copies(tie, each))] -= less
        return size

    def key_of(self, nodes: Ints) -> Key:
        """Return the step, the stage and the device of tasks."""
        tasks = self.program.tasks
        return tasks.step[nodes], tasks.stage[nodes], tasks.device[nodes]

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
        return collapse(self.program, self.request, self.start, self.end)

    @cached_property
    def gradients_of_updates(self) -> tuple[Ints, Key]:
        """Each update once for every step whose gradients it takes: its row, and (step, stage, device)."""
        step, stage, device = self.key_of(self.updates)
        row, given = expand_ranges(self.program.first_step, step + 1)
        return row, (given, stage[row], device[row])

    @cached_property
    def last_versions(self) -> Ints:
        """The last version that each step makes; steps that make none have 0."""
        tasks, last = self.program.tasks, np.zeros(self.program.steps, dtype=np.int64)
        np.maximum.at(last, tasks.step[self.updates], tasks.version[self.updates])
        return last

    def versions_of(self, step: Ints) -> Ints:
        """Return the versions that messages of parameters bring: the last of their step; of none, theta_0."""
        made: Ints = np.append(0, self.last_versions)[step + 1] if self.program.thrown_away else step + 1
        return made

    @cached_property
    def counts(self) -> Ints:
        """The number of micro-batches of each replica (columns) in each step (rows)."""
        shape = self.request.shape
        given = self.request.counts or [[shape.m] * self.replicas] * self.program.steps
        return np.array(given, dtype=np.int64)

    @cached_property
    def number_in_replica(self) -> Ints:
        """The number of each pass among those of its replica in its step."""
        counts = self.counts.ravel()
        return expand_ranges(np.zeros_like(counts), counts)[1]

    @property
    def in_factors(self) -> bool:
        """Whether gradients go as factors, so that sums of the same stages follow each other."""
        return str(self.request.given["compress"]).startswith("powersgd:")

    @cached_property
    def shared(self) -> list[Tie]:
        """The tied tensors that several devices have for different stages; sharded states' owners always have."""
        program, copies = self.program, self.owned or self.program.state.optimizer is not Placed.OWNED
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
        program, tasks, updates, producer = self.program, self.program.tasks, self.updates, self.producers
        if not self.together:
            last = program.gradient_tasks[program.first_pass[1:] - 1]
            task: Ints = last[tasks.step[updates], tasks.stage[updates]]
            return task
        producer = producer[np.argsort(-self.lanes.place[producer], kind="stable")]
        rows, wanted = ((tasks.step[nodes], tasks.stage[nodes], tasks.device[nodes]) for nodes in (producer, updates))
        return producer[find_rows(rows, wanted)]

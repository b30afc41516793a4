"""Updates: which device makes theta_{t+1} of a stage, and after which of its tasks.

Messages carry sums of gradients over data ranks whole, or compressed (`cdpsim.schedules.buckets`).

Where ranks send different numbers no message can sum them: each rank gathers those of all others, and adds them up.
Of matrices that go in two factors, the second one is made of the sum of the first.

Tied tensors: counted once where a device has all their stages, else copies whose gradients are summed.

Where every micro-batch passes all tied stages on one device, the tensor belongs to the first of them. The others read
the version that their micro-batch read there, and their part of the gradient goes where the first stage's goes.

Where steps are flushed and the stages are on several devices, each of these has one copy, and one all-reduce a step
sums the tensor's gradient over all of them. Megatron-LM (`finalize_model_grads`) and DeepSpeed (`ReduceTiedGrads`) do
so over the first and the last stage of each pipeline; they sum over replicas by another message, after or before that,
where here one message sums over all. Of sharded states each owner of a tied stage has a copy: every device passes all
stages, and sends to each owner its sum of the tensor's whole gradient.

Everywhere else a copy of one stage would be updated with gradients that the other one has yet to make: such stages are
not tied.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from cdpsim.model import Model
from cdpsim.model.stage import Stage, Tie
from cdpsim.numeric.columns import Ints, group_numbers, group_starts, row_numbers, sort_by
from cdpsim.program import Category, Content, EdgeKind, Op
from cdpsim.program.assembly.build import Builder, end, start, without_root
from cdpsim.program.assembly.task_tables import DeviceLanes, Passes, Tables, check_counts
from cdpsim.schedules import Schedule
from cdpsim.schedules.buckets import Compression
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import Rule
from cdpsim.schedules.state import Placed, When


@dataclass(frozen=True, eq=False)
class Updates:
    """A row for each update, in the order of their nodes.

    Where copies are together and have optimizer states of their own, there is one for every device that makes the new
    version, else one for each (step, stage), in that order. It follows the compute task `after` on its device: the
    last that gives it a gradient, or the last of its device's step where steps end for all devices. Where the rule has
    a barrier, it follows the task `barrier` anywhere, too.
    """

    tables: Tables
    step: Ints
    stage: Ints
    device: Ints
    after: Ints
    barrier: Ints | None = None
    in_lanes: bool = False  # they take their devices' time
    made: Ints | None = None  # the version that each makes; None: the one after its step's number

    def __len__(self) -> int:
        return len(self.step)

    @property
    def version(self) -> Ints:
        """The version that each makes."""
        return self.step + 1 if self.made is None else self.made

    @property
    def in_step(self) -> int:
        """The number of updates that make a version."""
        return len(self) // (self.tables.passes.steps if self.made is None else int(self.made[-1]))

    @cached_property
    def node(self) -> Ints:
        """The node of each update."""
        first = self.tables.passes.tasks
        return np.arange(first, first + len(self), dtype=np.int32)

    @property
    def lane_place(self) -> Ints:
        """The place in the lanes of the task that each update comes behind: `after`, or the last until the barrier."""
        lanes = self.tables.lanes
        place = lanes.rank[self.after]
        if self.barrier is None:
            return place
        return np.maximum(place, lanes.last_until(place, self.order_position))

    @property
    def lane(self) -> Ints:
        """The lane of each update on its device, -1 where it takes none."""
        lanes = self.tables.lanes
        return lanes.lane[lanes.tasks[self.lane_place]] if self.in_lanes else np.full(len(self), -1)

    @cached_property
    def of_devices(self) -> "OfDevices":
        """The updates that each device makes in a step."""
        rows, lanes, copies = np.arange(len(self)), self.tables.lanes, self.tables.copies
        made_by = rows if len(copies) == len(self) else copies.owners
        turn = rows if self.in_lanes else lanes.rank[copies.last_task[made_by]]
        of = row_numbers((self.step, self.device))
        order = sort_by(of, turn)
        first = group_starts(of[order])
        return OfDevices(of, order[first], order[np.append(first[1:], len(order)) - 1])

    @property
    def order_position(self) -> Ints:
        """The position, in the schedule's order, of the task that each update comes behind."""
        return self.tables.passes.position[self.after if self.barrier is None else self.barrier]


class OfDevices(NamedTuple):
    """The group of each update, those of a device and a step; and of each group the first and the last.

    In lanes they come in the order of stages, else as the last tasks that give them gradients.
    """

    group: Ints
    first: Ints
    last: Ints


def place_updates(tables: Tables, *, in_lanes: bool = False) -> Updates:
    """Place updates on the devices with optimizer states, behind all of a stage's gradients."""
    passes, state = tables.passes, tables.passes.schedule.state
    if not passes.schedule.order.waits:
        return _place_version_by_version(tables, in_lanes=in_lanes)
    if passes.together:
        copies = tables.copies
        rows = copies.owners if state.optimizer is Placed.OWNED else slice(None)
        step, stage, device, after = (c[rows] for c in (copies.step, copies.stage, copies.device, copies.last_task))
        if passes.schedule.order.together:
            after = tables.lanes.step_ends[step, device]
    else:
        step, stage = (index.ravel() for index in np.indices((passes.steps, passes.n), dtype=np.int32))
        after = passes.last[passes.first[1:] - 1].ravel()
        if passes.listing:  # which may end a step with another micro-batch than its last
            after = tables.copies.last_task[tables.copies.owners]
        device = passes.task_device[after]
    barrier = None
    if passes.rule.barrier:
        in_replicas = np.cumsum(passes.counts, axis=1)[step, device // passes.replica_devices]
        barrier = passes.last[passes.first[step] + in_replicas - 1, 0]  # the end of the last pass of the step there
        if state.travels:  # by the time of the barrier the state is with another user, who applies the optimizer
            after = _last_use_until(passes, stage, passes.position[barrier])
            device = passes.task_device[after]
    return Updates(tables, step, stage, device, after, barrier, in_lanes)


def _place_version_by_version(tables: Tables, *, in_lanes: bool) -> Updates:
    """Let all copies make each version of a run in its step; those of local steps at the end of it."""
    copies, step = tables.copies, tables.passes.made.step
    row = (step[:, None] * copies.in_step + np.arange(copies.in_step)).ravel()
    made = np.repeat(np.arange(1, len(step) + 1, dtype=np.int32), copies.in_step)
    step, stage, device, after = (c[row] for c in (copies.step, copies.stage, copies.device, copies.last_task))
    if tables.passes.schedule.order.local:
        after = tables.lanes.step_ends[step, device]
    return Updates(tables, step, stage, device, after, in_lanes=in_lanes, made=made)


def pull(lanes: DeviceLanes, build: Builder, message: Ints, place: Ints, ahead: Ints | int) -> None:
    """Let messages wait for the tasks that come so far ahead of a place in the lane, where there are any."""
    rows, task = lanes.before(place, ahead)
    build.link(task, message[rows], EdgeKind.ROOM)


def lanes_with(updates: Updates) -> tuple[Ints, Ints]:
    """Return all lanes' tasks, among them the updates that take their devices' time, and where each lane begins.

    As Algorithm 1 of the CDP paper has it: a worker updates a stage between that stage's backward and its next task,
    and waits for the partial sum that it adds to if that is late. Several at one place come in their stages' order.
    """
    lanes = updates.tables.lanes
    first = np.append(lanes.heads, len(lanes.tasks))
    if not updates.in_lanes:
        return lanes.tasks, first
    place = updates.lane_place
    order = np.argsort(place, kind="stable")
    return np.insert(lanes.tasks, place[order] + 1, updates.node[order]), first + np.searchsorted(place[order], first)


def take_turns(updates: Updates, build: Builder, shared: Iterable[tuple[Ints, Ints]]) -> None:
    """Let the host of each device make its updates one after another, in the order of the tasks that they follow.

    Where sums do not wait for the end of a step, that is the last task that gives each a gradient. Of `shared` tensors
    some updates (the first rows of each pair) come after the updates that make these (the second rows).
    """
    passes, copies, turn = updates.tables.passes, updates.tables.copies, updates.order_position
    at_once = passes.schedule.order.local or passes.schedule.state.reduce is When.END
    if passes.together and not at_once and len(copies) == len(updates):
        turn = passes.position[copies.last_task]
        for again, counted in shared:
            turn[again] = np.maximum(turn[again], turn[counted])
    order = sort_by(updates.device, turn, updates.version, updates.stage)
    same = updates.device[order[:-1]] == updates.device[order[1:]]
    build.link(updates.node[order[:-1][same]], updates.node[order[1:][same]], EdgeKind.ROOM)


def base_is_still_needed(updates: Updates) -> Ints:
    """Return 1 for each update whose old version is still needed on its device, else 0.

    A backward after it may need what it starts from, or a later update. Otherwise the new version is written where the
    old one is.
    """
    tables, passes, steps = updates.tables, updates.tables.passes, updates.tables.passes.steps
    replaces = np.full(steps + 1, -1)  # of each version, the last step whose update starts from it
    np.maximum.at(replaces, passes.base, np.arange(steps))
    result = np.repeat((replaces[passes.base] > np.arange(steps)).astype(np.int64), updates.in_step)
    replacing = replaces[passes.backward_version]
    each = passes.together and passes.schedule.state.optimizer is Placed.COPIED  # each copy updates for itself
    row = tables.copies.row % updates.in_step if each else passes.tij[2]
    replaced_by = replacing * updates.in_step + row
    late = (replacing >= 0) & (passes.device == updates.device[replaced_by])
    late &= passes.position[passes.last] > updates.order_position[replaced_by]
    result[replaced_by[late]] = 1
    return result


def uses(passes: Passes) -> tuple[Ints, Ints]:
    """Return all compute tasks by stage, in the schedule's order, and where each stage begins among them."""
    stage = passes.by_task(passes.tij[2])
    order = sort_by(stage, passes.position)
    return order, group_starts(stage[order])


def _last_use_until(passes: Passes, stage: Ints, position: Ints) -> Ints:
    order, first = uses(passes)
    span = int(passes.position.max()) + 1
    key = group_numbers(first, len(order)).astype(np.int64) * span + passes.position[order]
    return order[np.searchsorted(key, stage.astype(np.int64) * span + position, side="right") - 1]


class Carried(NamedTuple):
    """The operation of sums, the bytes of each, and the bytes that each member has encoded meanwhile."""

    op: Op
    size: Ints
    held: Ints


def carry(compress: Compression | None, op: Op, size: Ints, members: Ints | int) -> Carried:
    """Return how gradients of these bytes are summed by an operation over its members."""
    part = -(-size // members) if op == Op.REDUCE_SCATTER else size
    if compress is None:
        return Carried(op, part, np.zeros_like(part))
    if compress.rank:  # units are factors already, of which all ranks need the whole sums
        return Carried(Op.ALL_REDUCE, size, np.zeros_like(size))
    if compress.is_sparse:
        gathered = members * compress.encode(size)
        return Carried(Op.ALL_GATHER, gathered, gathered)
    sent = compress.encode(part)
    whole = sent * members if op == Op.REDUCE_SCATTER else sent
    return Carried(op, sent, np.where(sent < part, whole, 0))


def split_tensors(compress: Compression, stage: Stage) -> list[tuple[int, ...]]:
    """Return the bytes of the gradient of each tensor of a stage: all, those sent as they are, and two factors'."""
    rows = []
    for shape in stage.tensors:
        whole, factors = prod(shape), compress.factor(shape)
        numbers = whole, 0 if any(factors) else whole, *factors
        rows.append(tuple(stage.gradient_bytes * each // stage.numbers for each in numbers))
    return rows or [(stage.gradient_bytes, stage.gradient_bytes, 0, 0)]


def hold_encoded(tables: Tables, build: Builder, copy: Ints, given: Ints, message: Ints, held: Ints) -> None:
    """Hold what devices have encoded, from the last of the nodes that have `given` gradients to it until it is summed.

    A row stands for each copy of a stage in each message.
    """
    if not held.any():
        return
    copy, given, message, held = (column.ravel() for column in np.broadcast_arrays(copy, given, message, held))
    where, rank = tables.copies.where.take(copy), tables.lanes.rank
    turn = rank[np.minimum(given, len(rank) - 1)]  # of a message there is one
    order = sort_by(where.device, message, turn)
    first = group_starts(where.device[order], message[order])
    last = order[np.append(first[1:], len(order))[: len(first)] - 1]
    build.hold(Category.COMMUNICATION, where.take(last), held[last], end(given[last]), end(message[last]))


def counted_once(schedule: Schedule, shape: Shape, rule: Rule, model: Model) -> tuple[Model, tuple[Tie, ...]]:
    """Count tied tensors in their first stages where passes have all their stages on one device.

    Return the model with these counted once, and their ties.
    """
    apart = schedule.placement.exclusive or schedule.state.parameters is Placed.OWNED or rule.backward is not None
    if apart or not model.tied:
        return model, ()
    passes = Passes(schedule, rule, shape, check_counts(None, shape, 1))
    device = passes.device
    ties = tuple(tie for tie in model.tied if (device[:, tie.stages] == device[:, tie.stages[:1]]).all())
    return model.with_ties_counted_once(ties, joined=passes.stay) if ties else model, ties


class _SharedCopies(NamedTuple):
    """The rows of copies that have a tied tensor, and of each the row that counts it on that device."""

    row: Ints
    counted: Ints
    earliest: Ints  # the first of the device's tasks that give it a gradient

    @property
    def again(self) -> tuple[Ints, Ints]:
        """Rows that another one counts, and that one."""
        others = self.row != self.counted
        return self.row[others], self.counted[others]


def _find_copies(tables: Tables, tie: Tie) -> _SharedCopies:
    """Return the copies of a tied tensor; of the stages that one device has, the first counts it."""
    copies = tables.copies
    row = np.flatnonzero(np.isin(copies.stage, tie.stages))
    row = row[sort_by(copies.step[row], copies.device[row], copies.stage[row])]
    first = group_starts(copies.step[row], copies.device[row])
    of = group_numbers(first, len(row))
    gives = copies.first_task[row]
    earliest = gives[sort_by(of, tables.passes.position[gives])][first]
    return _SharedCopies(row, row[first][of], earliest[of])


def hold_from_the_first(tables: Tables, ties: Iterable[Tie], build: Builder) -> None:
    """Hold the gradient of a tied tensor from the first backward that adds to it, if the stage that counts it is later.

    From its first backward on that stage holds it.
    """
    copies, position = tables.copies, tables.passes.position
    for tie in ties:
        row, counted, earliest = _find_copies(tables, tie)
        later = (row == counted) & (position[earliest] < position[copies.first_task[row]])
        row = row[later]
        size, until = np.full(len(row), tie.gradient_bytes), start(copies.first_task[row])
        build.hold(Category.GRADIENTS, copies.where.take(row), size, start(earliest[later]), until)


def can_share_tensors(schedule: Schedule) -> bool:
    """Return whether stages on several devices can have a tensor in common.

    They can where steps end, and each copy or owner has a copy.
    """
    state = schedule.state
    return schedule.order.together and (state.parameters is Placed.OWNED or state.optimizer is not Placed.OWNED)


class CopySizes(NamedTuple):
    """Bytes of its stage on each copy, by rows of copies."""

    parameters: Ints
    gradients: Ints
    optimizer: Ints


def copy_sizes(tables: Tables, model: Model) -> CopySizes:
    """Return the bytes of each copy: of owned values each owner has its own, of copied ones a device has one copy."""
    sizes = CopySizes(*(model.size(kind)[tables.copies.stage] for kind in CopySizes._fields))
    owned = tables.passes.schedule.state.parameters is Placed.OWNED
    for tie in () if owned else _shared_ties(tables, model):
        again, _ = _find_copies(tables, tie).again
        for column, less in zip(sizes, (tie.parameters, tie.gradient_bytes, tie.optimizer), strict=True):
            column[again] -= less
    return sizes


def unshared_gradients(tables: Tables, model: Model) -> Ints:
    """Return the bytes of the gradients that each stage has for itself: all but those of tensors that it shares."""
    gradients = model.size("gradients")
    for tie in _shared_ties(tables, model):
        gradients[list(tie.stages)] -= tie.gradient_bytes
    return gradients


def unshared_stages(tables: Tables, model: Model) -> list[Stage]:
    """Return the stages without the tensors that they share."""
    return model.without_ties(_shared_ties(tables, model))


def _shared_ties(tables: Tables, model: Model) -> tuple[Tie, ...]:
    return model.tied if can_share_tensors(tables.passes.schedule) else ()


def shared_rows(tables: Tables, model: Model) -> Iterator[tuple[Ints, Ints]]:
    """Yield, of each shared tensor, the copies whose device has it for another stage, too, and the copies of that."""
    for tie in _shared_ties(tables, model):
        yield _find_copies(tables, tie).again


def sum_shared(
    updates: Updates, model: Model, build: Builder, *, wait: bool, stream: int = -1
) -> list[tuple[Ints, Ints]]:
    """Sum the gradient of each shared tensor over all devices that have it, before they update its stages.

    One message a step follows all backwards of the tied stages and, if it is to `wait`, the step's end on each device.
    Return these messages, and the devices, of each tensor.
    """
    tables, copies, sums = updates.tables, updates.tables.copies, []
    for number, tie in enumerate(_shared_ties(tables, model)):
        shared, steps = _find_copies(tables, tie), np.arange(tables.passes.steps)
        devices = np.unique(copies.device[shared.row])
        group = build.group(devices, tables.passes.alike_ranks(devices), tables.passes.copies)
        of = without_root(np.full(len(steps), -1 - number), steps)
        ranks = copies.count[list(tie.stages)] * tables.passes.fold * tables.passes.copies
        copied = (ranks > 1).any()  # else one data rank sums
        compress = tables.passes.schedule.state.compress if copied else None
        op, size, held = carry(compress, Op.ALL_REDUCE, np.array([tie.gradient_bytes]), build.ranks[group].shape[1])
        message = build.send(op, Content.GRADIENT, of, group, size, stream=stream)
        hold_encoded(tables, build, shared.row, copies.last_task[shared.row], message[copies.step[shared.row]], held)
        _give_gradients(tables, tie.stages, message[tables.passes.step], build)
        step = copies.step[shared.row]
        if wait:
            build.link(tables.lanes.step_ends[step, copies.device[shared.row]], message[step], EdgeKind.BARRIER)
        build.link(message[step], updates.node[shared.row])
        again, counted = shared.again
        build.link(updates.node[counted], updates.node[again])  # which makes the tensor for both
        hold_from_the_first(tables, [tie], build)
        sums.append((message, devices))
    return sums


def _give_gradients(tables: Tables, stages: Sequence[int], consumer: Ints, build: Builder) -> None:
    """Let the consumer of each pass wait for its gradients of these stages."""
    gives = tables.passes.last[:, list(stages)]
    build.link(gives.ravel(), np.repeat(consumer, gives.shape[1]))


def give_shared(tables: Tables, model: Model, consumer: Ints, summed: Ints, build: Builder) -> None:
    """Let each owner of a tied stage have all of the shared gradient, of which every device holds one sum.

    `consumer` is what takes gradients, by step and stage; `summed` the moment at which each copy's are taken.
    """
    passes, copies = tables.passes, tables.copies
    for tie in _shared_ties(tables, model):
        for stage in tie.stages:
            others = [other for other in tie.stages if other != stage]
            _give_gradients(tables, others, consumer.reshape(passes.steps, passes.n)[passes.step, stage], build)
        row, counted, earliest = _find_copies(tables, tie)
        first = row == counted
        mine, size = row[first], np.full(np.count_nonzero(first), tie.gradient_bytes)
        number = np.zeros(len(copies), dtype=np.int64)
        number[mine] = build.hold(
            Category.GRADIENTS, copies.where.take(mine), size, start(earliest[first]), summed[mine]
        )
        build.keep(number[counted], summed[row])

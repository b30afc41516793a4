"""Tied tensors: counted once where a device has all their stages, else copies whose gradients are summed.

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

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cdpsim.model import Model
from cdpsim.model.stage import Stage, Tie
from cdpsim.numeric.columns import Ints, group_numbers, group_starts, sort_by
from cdpsim.program import Category, Content, EdgeKind, Op
from cdpsim.program.assembly.build import Builder, start, without_root
from cdpsim.program.assembly.task_tables import Passes, Tables, check_counts
from cdpsim.program.assembly.updates import Updates, carry, hold_encoded
from cdpsim.schedules import Schedule
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import Rule
from cdpsim.schedules.state import Placed


def counted_once(schedule: Schedule, shape: Shape, rule: Rule, model: Model) -> tuple[Model, tuple[Tie, ...]]:
    """Count tied tensors in their first stages where passes have all their stages on one device.

    Return the model with these counted once, and their ties.
    """
    apart = schedule.placement.exclusive or schedule.state.parameters is Placed.OWNED or rule.backward is not None
    if apart or not model.tied:
        return model, ()
    device = Passes(schedule, rule, shape, check_counts(None, shape, 1)).device
    ties = tuple(tie for tie in model.tied if (device[:, tie.stages] == device[:, tie.stages[:1]]).all())
    return model.with_ties_counted_once(ties) if ties else model, ties


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


def hold_from_the_first(tables: Tables, ties: Sequence[Tie], build: Builder) -> None:
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
        group = build.group(devices, tables.passes.alike_ranks(devices))
        of = without_root(np.full(len(steps), -1 - number), steps)
        copied = (copies.count[list(tie.stages)] * tables.passes.fold > 1).any()  # else one data rank sums
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

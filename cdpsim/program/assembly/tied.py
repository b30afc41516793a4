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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cdpsim.model import Model
from cdpsim.model.stage import Tie
from cdpsim.numeric.columns import Ints, group_numbers, group_starts, sort_by
from cdpsim.program import Category, Content, EdgeKind, Op
from cdpsim.program.assembly.build import Builder, start
from cdpsim.program.assembly.tables import Passes, Tables, check_counts
from cdpsim.program.assembly.update import Updates
from cdpsim.schedules import Schedule
from cdpsim.schedules.rule import Rule
from cdpsim.schedules.shape import Shape
from cdpsim.schedules.state import Home


def counted_once(schedule: Schedule, shape: Shape, rule: Rule, model: Model) -> tuple[Model, tuple[Tie, ...]]:
    """Count tied tensors in their first stages where passes have all their stages on one device, and say which."""
    apart = schedule.placement.exclusive or schedule.state.parameters is Home.OWNED or rule.backward is not None
    if apart or not model.tied:
        return model, ()
    device = Passes(schedule, rule, shape, check_counts(None, shape, 1)).device
    ties = tuple(tie for tie in model.tied if (device[:, tie.stages] == device[:, tie.stages[:1]]).all())
    return model.with_ties_counted_once(ties) if ties else model, ties


class _Copies(NamedTuple):
    """The rows of holders that have a tied tensor, and of each the row that counts it on that device."""

    row: Ints
    counted: Ints
    earliest: Ints  # the first of the device's tasks that give it a gradient

    @property
    def again(self) -> tuple[Ints, Ints]:
        """Rows that another one counts, and that one."""
        some = self.row != self.counted
        return self.row[some], self.counted[some]


def _copies(tables: Tables, tie: Tie) -> _Copies:
    """Find them, once for all that ask."""
    if tie not in tables.known:
        tables.known[tie] = _found(tables, tie)
    copies: _Copies = tables.known[tie]
    return copies


def _found(tables: Tables, tie: Tie) -> _Copies:
    holders = tables.holders
    row = np.flatnonzero(np.isin(holders.stage, tie.stages))
    row = row[sort_by(holders.step[row], holders.device[row], holders.stage[row])]
    first = group_starts(holders.step[row], holders.device[row])
    of = group_numbers(first, len(row))
    gives = holders.first_task[row]
    earliest = gives[sort_by(of, tables.passes.position[gives])][first]
    return _Copies(row, row[first][of], earliest[of])


def hold_from_the_first(tables: Tables, ties: Sequence[Tie], build: Builder) -> None:
    """Hold the gradient of a tied tensor from the first backward that adds to it, if the stage that counts it is later.

    From its first backward on that stage holds it.
    """
    holders = tables.holders
    for tie in ties:
        row, counted, earliest = _copies(tables, tie)
        some = np.flatnonzero(
            (row == counted) & (tables.passes.position[earliest] < tables.passes.position[holders.first_task[row]])
        )
        row = row[some]
        of = {"device": holders.device[row], "stage": holders.stage[row], "version": holders.step[row]}
        begin, until = start(earliest[some]), start(holders.first_task[row])
        build.hold(Category.GRADIENTS, size=np.full(len(row), tie.gradient_bytes), begin=begin, end=until, **of)


def shares(schedule: Schedule) -> bool:
    """Whether stages on several devices can have a tensor in common: steps end, and each holder or owner has a copy."""
    state = schedule.state
    return schedule.order.together and (state.parameters is Home.OWNED or state.optimizer is Home.COPIED)


class Sizes(NamedTuple):
    """Bytes of its stage on each holder, by rows of holders."""

    parameters: Ints
    gradients: Ints
    optimizer: Ints


def sizes_of(tables: Tables, model: Model) -> Sizes:
    """Weigh what holders have; of a tensor that tied stages share a device has one copy."""
    stage = tables.holders.stage
    sizes = Sizes(*(model.size(kind)[stage] for kind in ("parameters", "gradients", "optimizer")))
    for tie in _shared(tables, model):
        again, _ = _copies(tables, tie).again
        for column, less in zip(sizes, (tie.parameters, tie.gradient_bytes, tie.optimizer), strict=True):
            column[again] -= less
    return sizes


def own_gradients(tables: Tables, model: Model) -> Ints:
    """Weigh the gradients that each stage has for itself: all but those of tensors that it shares."""
    gradients = model.size("gradients")
    for tie in _shared(tables, model):
        gradients[list(tie.stages)] -= tie.gradient_bytes
    return gradients


def _shared(tables: Tables, model: Model) -> tuple[Tie, ...]:
    return model.tied if shares(tables.passes.schedule) else ()


def sum_shared(tables: Tables, updates: Updates, model: Model, build: Builder, *, wait: bool) -> None:
    """Sum the gradient of each shared tensor over all devices that have it, before they update its stages."""
    for k, tie in enumerate(_shared(tables, model)):
        copies = _copies(tables, tie)
        message = _all_reduce(tables, k, tie, copies, build, wait=wait)
        build.link(message[updates.step[copies.row]], updates.node[copies.row])
        again, counted = copies.again
        build.link(updates.node[counted], updates.node[again])  # which makes the tensor for both
        hold_from_the_first(tables, [tie], build)


def _all_reduce(tables: Tables, number: int, tie: Tie, copies: _Copies, build: Builder, *, wait: bool) -> Ints:
    """One message a step, after all backwards of the tied stages; if it is to `wait`, after the step."""
    holders, steps = tables.holders, np.arange(tables.passes.steps)
    group = build.group(np.unique(holders.device[copies.row]))
    columns = {"stage": -1 - number + 0 * steps, "dst": group + 0 * steps, "size": tie.gradient_bytes + 0 * steps}
    message = build.send(Op.ALL_REDUCE, Content.GRADIENT, step=steps, src=-1, **columns)
    gives = tables.passes.last[:, list(tie.stages)]
    build.link(gives.ravel(), np.repeat(message[tables.passes.step], gives.shape[1]))
    if wait:
        step = holders.step[copies.row]
        build.link(tables.lanes.last_in_step(holders.device[copies.row], step), message[step], EdgeKind.BARRIER)
    return message


def give_shared(tables: Tables, model: Model, taker: Ints, summed: Ints, build: Builder) -> None:
    """Let each owner of a tied stage have all of the shared gradient, of which every device holds one sum.

    `taker` is what takes gradients, by step and stage; `summed` the moment at which each holder's are taken.
    """
    by_step = taker.reshape(tables.passes.steps, tables.passes.n)
    for tie in _shared(tables, model):
        for stage in tie.stages:
            gives = tables.passes.last[:, [other for other in tie.stages if other != stage]]
            build.link(gives.ravel(), np.repeat(by_step[tables.passes.step, stage], gives.shape[1]))
        row, counted, earliest = _copies(tables, tie)
        first = np.flatnonzero(row == counted)
        of = {name: getattr(tables.holders, name)[row[first]] for name in ("device", "stage")}
        of |= {"version": tables.holders.step[row[first]], "size": np.full(len(first), tie.gradient_bytes)}
        sums = build.hold(Category.GRADIENTS, begin=start(earliest[first]), end=summed[row[first]], **of)
        number = np.zeros(len(tables.holders), dtype=np.int64)
        number[row[first]] = sums
        build.keep(number[counted], summed[row])

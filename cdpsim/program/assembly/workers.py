"""Workers that do not wait: for the communication of a round, or for each other between means of their parameters.

In rounds a communication is a reduce-scatter, updates of shares and an all-gather, one after another in each device's
stream. It takes what a worker has handed over, from a buffer of its own that is there always. New parameters come into
the same buffer; when the worker goes on with them, they go where the old ones were. A worker adds up gradients until it
has handed over all that an update which is kept takes: those for an estimate stay where they are.

In local steps a worker updates by its own gradients, and after several of them by the mean of all workers' parameters.
"""

import numpy as np

from cdpsim.numeric.columns import Ints, group_starts
from cdpsim.program import Category, Content, EdgeKind
from cdpsim.program.assembly.axis import DataAxis
from cdpsim.program.assembly.build import Location, end, start
from cdpsim.program.assembly.in_streams import (
    gather_updated,
    plan_messages,
    plan_parameters,
    send_sums,
    sum_units,
    units_of,
)
from cdpsim.program.assembly.runtime_buffers import gradients_at_first, hold_gradients
from cdpsim.program.assembly.updates import unshared_gradients


def overlap_rounds(axis: DataAxis) -> None:
    """Let workers go on with a round while the gradients of the last one are summed and applied."""
    maker = _find_makers(axis)
    _sum_at_ends(axis, np.arange(axis.passes.updated))
    producer = _bring_versions(axis, maker)
    _start_from_bases(axis, maker)
    _hold_sums_of_rounds(axis)
    _hold_communication(axis, producer)
    _hold_read_versions(axis)
    _hold_states(axis, maker, axis.stored.optimizer)
    _hold_bases(axis, maker)
    _hold_beside_states(axis, maker)


def take_local_steps(axis: DataAxis) -> None:
    """Let workers make steps of their own, and take the mean of their parameters after several."""
    passes, made, maker, in_step = axis.passes, axis.passes.made, _find_makers(axis), axis.copies.in_step
    is_own = made.own[group_starts(made.step)] > 0
    _sum_at_ends(axis, np.flatnonzero(~is_own))
    _take_alone(axis, np.flatnonzero(is_own), np.arange(in_step))
    _take_means(axis, maker)
    newest = maker[passes.version.ravel(), axis.copies.row.ravel() % in_step]
    axis.build.link(newest[newest >= 0], passes.forward.ravel()[newest >= 0])
    _start_from_bases(axis, maker)
    copies, first_size = axis.copies, gradients_at_first(axis.model, axis.behaviours, passes)[axis.copies.stage]
    hold_gradients(axis.build, copies.where, axis.whole.gradients, first_size, copies.first_task, end(axis.update))
    version, until = np.arange(len(maker) - 1)[:, None], end(maker[1:])  # until the next one is written in its place
    _hold(axis, Category.PARAMETERS, version, axis.stored.parameters, end(maker[:-1]), until)
    local = passes.schedule.order.local
    assert local is not None
    outer = local.outer_copies * axis.stored.parameters  # for outer updates, such as the last common parameters
    _hold_states(axis, maker, axis.stored.optimizer + outer)


def _find_makers(axis: DataAxis) -> Ints:
    """Return the update that makes each version, from theta_0 on, of each copy in a step; nothing makes theta_0."""
    in_step = axis.copies.in_step
    return np.append(np.full(in_step, -1), axis.updates.node).reshape(-1, in_step)


# Messages and dependencies


def _sum_at_ends(axis: DataAxis, steps: Ints) -> None:
    """Sum what workers have at the end of each of some steps before the step's updates."""
    plan = plan_messages(axis, units_of(axis, unshared_gradients(axis.tables, axis.model), axis.state.buckets))
    given = axis.copies.last_task.reshape(axis.passes.steps, 1, -1)
    sum_units(axis, plan, steps, given)
    _take_alone(axis, steps, np.setdiff1d(np.arange(axis.copies.in_step), plan.row))


def _take_alone(axis: DataAxis, steps: Ints, rows: Ints) -> None:
    """Let some copies in a step update by their own gradients, at the end of each of some steps."""
    ends = axis.tables.lanes.step_ends[steps][:, axis.device[rows]]
    axis.build.link(ends, axis.update.reshape(axis.passes.steps, -1)[steps][:, rows])


def _take_means(axis: DataAxis, maker: Ints) -> None:
    """Take the mean of the parameters that all workers have at the end of each round, in place."""
    made, (plan, _) = axis.passes.made, plan_parameters(axis)
    outer = np.flatnonzero(made.averaged >= 0)
    averaged = made.averaged[outer]
    if len(plan.unit) and len(outer):
        message = send_sums(axis, plan, made.step[averaged - 1], 1, Content.PARAMETERS)[:, 0, plan.message]
        axis.build.link(maker[averaged][:, plan.row], message)
        axis.build.link(message, maker[1 + outer][:, plan.row])


def _bring_versions(axis: DataAxis, maker: Ints) -> Ints:
    """Bring the versions that tasks read, and those of the last communication, to all copies, and so to readers.

    Of several of the last ones, the worker goes on with the one made last, which comes first. It goes on with all
    stages at once; alone, when the last of them is updated. Return what brings that version to each copy.
    """
    passes, step, build, in_step = axis.passes, axis.passes.made.step, axis.build, axis.copies.in_step
    (plan, _), producer = plan_parameters(axis), maker.copy()
    final = np.flatnonzero(step == passes.updated - 1) + 1
    version = np.union1d(passes.version[passes.version > 0], final)
    if axis.state.splits and len(plan.unit):
        each, number = (index.ravel() for index in np.indices((len(version), len(plan.unit))))
        message = gather_updated(axis, plan, step[version[each] - 1], number).reshape(len(version), -1)
        build.link(maker[version][:, plan.row], message[:, plan.message])
        producer[version[:, None], plan.row] = message[:, plan.message]
        for earlier in final[:-1].tolist():
            first, last = (message[np.searchsorted(version, v)] for v in (earlier, final[-1]))
            build.link(last, first, EdgeKind.STREAM)
    brought = producer[passes.version.ravel(), axis.copies.row.ravel() % in_step]
    build.link(brought[brought >= 0], passes.forward.ravel()[brought >= 0])
    alone = np.setdiff1d(np.arange(in_step), plan.row)
    taken = maker[passes.version[passes.first[:-1], 0]][:, alone]
    build.link(taken[taken >= 0], axis.tables.lanes.step_begins[:, axis.device[alone]][taken >= 0])
    brings_last: Ints = producer[final[0]]
    return brings_last


def _start_from_bases(axis: DataAxis, maker: Ints) -> None:
    """Let each update wait for the one that makes the version from which it starts."""
    base = axis.passes.made.base
    later = np.flatnonzero(base > 0)
    axis.build.link(maker[base[later]], maker[1 + later])


# Memory


def _at_the_end(axis: DataAxis) -> Ints:
    """Return the moment at which the device of each copy in a step has done all its tasks."""
    return end(axis.tables.lanes.step_ends[-1, axis.device])


def _hold(axis: DataAxis, category: Category, version: Ints | int, size: Ints, begin: Ints | int, until: Ints) -> Ints:
    """Hold something of each copy in a step, or in a row for each of several versions; return the buffers."""
    shape = np.broadcast_shapes(until.shape, axis.stage.shape)
    columns = axis.device, axis.stage, version, size[: axis.copies.in_step], begin, until
    device, stage, version, size, begin, until = (np.broadcast_to(column, shape).ravel() for column in columns)
    return axis.build.hold(category, Location(device, stage, version), size, begin, until)


def _hold_sums_of_rounds(axis: DataAxis) -> None:
    """Hold gradients from the first one of what a kept update takes until the last of it is handed over."""
    passes, made, copies, kept = axis.passes, axis.passes.made, axis.copies, ~axis.passes.made.estimate
    first, last = np.append(made.first[kept], passes.updated), np.append(made.step[kept], passes.steps - 1)
    rows = (first[:, None] * copies.in_step + np.arange(copies.in_step)).ravel()
    until = end(axis.tables.lanes.step_ends[last][:, axis.device].ravel())
    first_size = gradients_at_first(axis.model, axis.behaviours, passes)[copies.stage[rows]]
    size = axis.whole.gradients[rows]
    hold_gradients(axis.build, copies.where.take(rows), size, first_size, copies.first_task[rows], until)


def _hold_communication(axis: DataAxis, last: Ints) -> None:
    """Hold a buffer always for what is on its way: what was handed over, then the parameters that come.

    A worker alone needs it, too: its tasks add to the sums while an update takes what was handed over. It is there
    until the last message has ended: that is the node `last` of each copy, which may end after all tasks.
    """
    size = np.maximum(axis.whole.gradients, axis.whole.parameters)
    held = _hold(axis, Category.COMMUNICATION, 0, size, -1, end(last))
    axis.build.keep(held, _at_the_end(axis))


def _hold_read_versions(axis: DataAxis) -> None:
    """Hold the parameters with which a worker goes on, until it goes on with others."""
    read = axis.passes.version[axis.passes.first[:-1], 0]
    change = group_starts(read)
    begin = start(axis.tables.lanes.step_begins[change][:, axis.device])
    begin[0] = -1
    until = np.append(begin[1:], _at_the_end(axis)[None], axis=0)
    _hold(axis, Category.PARAMETERS, read[change][:, None], axis.stored.parameters, begin, until)


def _hold_states(axis: DataAxis, maker: Ints, size: Ints) -> None:
    """Hold states always."""
    held = _hold(axis, Category.OPTIMIZER, axis.passes.updated - 1, size, -1, end(maker[-1]))
    axis.build.keep(held, _at_the_end(axis))


def _base_sizes(axis: DataAxis) -> Ints:
    """Return the bytes of parameters that updates start from; 0 where the optimizer's state has a master copy."""
    size: Ints = np.maximum(axis.model.size("restored") - axis.model.size("optimizer"), 0)
    return size


def _hold_bases(axis: DataAxis, maker: Ints) -> None:
    """Hold a share of the parameters from which an estimate starts until the next update has started from it.

    Meanwhile the worker goes on with the estimate, in their place.
    """
    made = axis.passes.made
    estimate, kept = np.flatnonzero(made.estimate), np.flatnonzero(~made.estimate)
    after = np.searchsorted(made.base[kept], made.base[estimate])  # the kept version of the same base
    until = np.append(end(maker[1 + kept]), _at_the_end(axis)[None], axis=0)[after]
    size = axis.share(_base_sizes(axis))[axis.stage]
    _hold(axis, Category.PARAMETERS, made.base[estimate][:, None], size, start(maker[1 + estimate]), until)


def _hold_beside_states(axis: DataAxis, maker: Ints) -> None:
    """Hold what implementations cannot do without: gradients of shares in fp32, and what estimates change."""
    if axis.behaviours.wide_shares:
        wide = axis.share(axis.model.size("wide_gradients"))[axis.stage]
        _hold(axis, Category.GRADIENTS, axis.passes.steps, wide, -1, _at_the_end(axis))
    if axis.behaviours.saved_states:
        version = 1 + np.flatnonzero(axis.passes.made.estimate)
        restored, optimizer = map(axis.model.size, ("restored", "optimizer"))
        size = axis.share(np.where(restored > 0, restored - _base_sizes(axis), optimizer))[axis.stage]
        begin, until = (maker[version][:, row] for row in _ends_of_devices(axis))
        number = version[:, None] + axis.passes.updated - 1  # the state itself has `updated - 1`
        _hold(axis, Category.OPTIMIZER, number, size, start(begin), end(until))


def _ends_of_devices(axis: DataAxis) -> tuple[Ints, Ints]:
    """Return the first and the last copy, by its row in a step, on the device of each."""
    row = np.arange(axis.copies.in_step)
    first, last = (np.zeros(axis.passes.devices, dtype=np.int64) for _ in range(2))
    first[axis.device[::-1]], last[axis.device] = row[::-1], row
    return first[axis.device], last[axis.device]

"""Buffers of the data axis: gradients, versions of parameters, optimizer states."""

import numpy as np

from cdpsim.numeric.columns import Flags, Ints
from cdpsim.program import Category
from cdpsim.program.assembly.axis import Brought, DataAxis, Sums, earlier_sums, readers
from cdpsim.program.assembly.build import Location, end, start
from cdpsim.program.assembly.gathered import Gathered, hold_given, hold_reduced
from cdpsim.program.assembly.runtime_buffers import gradients_at_first, hold_gradients
from cdpsim.program.assembly.updates import (
    base_is_still_needed,
    give_shared,
    split_tensors,
    unshared_gradients,
    unshared_stages,
)
from cdpsim.schedules.buckets import Compression
from cdpsim.schedules.state import Placed, When


def hold_sums(axis: DataAxis, sums: Sums, brought: Brought, gathered: Gathered | None) -> None:
    """Hold the sums of gradients: whole ones, or until they have gone to shares, and these until they are applied."""
    if axis.state.gradients is Placed.SPLIT and axis.groups.members.max() > 1:
        _hold_sums_and_shares(axis, sums, gathered)
    else:
        _hold_whole_sums(axis, sums.consumer, brought.producer)


def _hold_sums_and_shares(axis: DataAxis, sums: Sums, gathered: Gathered | None) -> None:
    copies, build, size = axis.copies, axis.build, axis.whole.gradients
    first_size = gradients_at_first(axis.model, axis.behaviours, axis.passes)[copies.stage]
    firsts = sums.given if axis.state.reduce is When.EACH else copies.first_task[None]
    held = [
        hold_gradients(build, copies.where, size, first_size, first, end(message))
        for first, message in zip(firsts, sums.taken, strict=True)
    ]
    hold_given(axis, gathered, sums, np.stack(held))
    begin = end(sums.taken[0])
    if axis.behaviours.gradients == "kept":
        begin = np.append(np.full(copies.in_step, -1), end(axis.update[: -copies.in_step]))
    build.hold(Category.GRADIENTS, copies.where, axis.share(size), begin, end(axis.update))


def _hold_whole_sums(axis: DataAxis, consumer: Ints, producer: Ints) -> None:
    """Hold each sum until it is applied; elsewhere, if copied, until the update comes, else until it has left."""
    copies, build, in_step = axis.copies, axis.build, axis.copies.in_step
    until = end(axis.update)
    if axis.owned:
        comes = (producer != axis.update) & (axis.state.gradients is Placed.COPIED)
        until = np.where(axis.at_owner, until, end(np.where(comes, producer, consumer)))
    shares = axis.state.parameters is Placed.OWNED
    size = unshared_gradients(axis.tables, axis.model)[copies.stage] if shares else axis.stored.gradients
    viewed, apart = _find_views(axis)
    until, size = np.where(apart, end(copies.last_task), until), np.where(viewed & ~apart, 0, size)
    if axis.behaviours.gradients == "kept" and copies.stay:  # a step's begin where those of the step before end
        begin = np.append(np.full(in_step, -1), until[:-in_step])
        held = build.hold(Category.GRADIENTS, copies.where, size, begin, until)
    else:
        first_size = gradients_at_first(axis.model, axis.behaviours, axis.passes)[copies.stage]
        held = hold_gradients(build, copies.where, size, first_size, copies.first_task, until)
    held = np.where(viewed, -1, held)  # what waits for updates is in buckets
    if _has_buckets(axis):
        _hold_buckets(axis)
    if axis.behaviours.joint_updates:
        last_tasks = axis.tables.lanes.step_ends[copies.step, copies.device]
        longer = np.flatnonzero(axis.at_owner & (last_tasks != copies.last_task))
        build.keep(held[longer], end(last_tasks[longer]))
    for given, into in earlier_sums(axis):
        rows = np.arange(in_step)
        build.keep(held[given * in_step + rows], end(axis.update[into * in_step + rows]))
    if shares:
        hold_reduced(axis, held, size, consumer)
        give_shared(axis.tables, axis.model, consumer[copies.first], until, build)


def _has_buckets(axis: DataAxis) -> bool:
    """Return whether a runtime has gradients in buckets: copies that several devices sum."""
    return axis.behaviours.gradient_buckets != "none" and axis.state.parameters is Placed.COPIED and not axis.owned


def _find_views(axis: DataAxis) -> tuple[Flags, Flags]:
    """Return whose gradients are in buckets, and who adds them up outside, until they come there with the last pass."""
    several: Flags = axis.several[axis.copies.of]
    viewed = several & (_has_buckets(axis) and axis.behaviours.gradient_buckets == "views")
    apart = axis.behaviours.gradients != "kept" and axis.state.reduce is not When.EACH
    return viewed, viewed & apart & (axis.copies.first_task != axis.copies.last_task)


def _hold_buckets(axis: DataAxis) -> None:
    """Hold buckets always: the gradients themselves, or copies of them."""
    copies, in_step = axis.copies, axis.copies.in_step
    rows = np.flatnonzero(axis.several[copies.of[:in_step]])
    category = Category.GRADIENTS if axis.behaviours.gradient_buckets == "views" else Category.COMMUNICATION
    until = end(axis.update[rows + (copies.steps - 1) * in_step])
    axis.build.hold(category, copies.where.take(rows), axis.stored.gradients[rows], -1, until)


def hold_parameters(axis: DataAxis, sums: Sums, brought: Brought) -> None:
    """Hold versions where they live, from when they are made or have come until the next is, and until they are read.

    What is gathered in place is on its way until then.
    """
    copies, in_step, state, producer = axis.copies, axis.copies.in_step, axis.state, brought.producer
    if state.streams and state.optimizer is not Placed.COPIED:
        made = np.append(np.full(in_step, -1), end(producer[:-in_step]))
        until = np.where(producer == axis.update, end(axis.update), start(producer))
        held = axis.build.hold(Category.PARAMETERS, copies.where, axis.stored.parameters, made, until)
    else:
        held = _hold_made_or_sent(axis, sums.consumer, producer)
    for _, last_use, row in readers(axis) if axis.stays and axis.passes.lagging else ():
        axis.build.keep(held[row], end(last_use))


def _hold_made_or_sent(axis: DataAxis, consumer: Ints, producer: Ints) -> Ints:
    """Hold versions that each copy makes, or that owners send, and return the buffers."""
    passes, copies, in_step, steps = axis.passes, axis.copies, axis.copies.in_step, axis.passes.steps
    old, size, update = slice(-in_step), axis.stored.parameters, axis.update
    made, until = np.full(len(copies), -1), end(update)
    made[in_step:] = end(update[old])
    if axis.model.updates_take_time:
        needed = base_is_still_needed(axis.updates)
        made[in_step:] -= (needed[copies.of] if axis.owned else needed)[old]
    if passes.sources:  # to the last update that starts from it; where none does, it is there to be read
        last = np.arange(-1, steps - 1)
        np.maximum.at(last, passes.base, np.arange(steps))
        until = end(np.where(last[:, None] < 0, -1, update.reshape(steps, -1)[last]).ravel())
    if axis.owned:  # others write what comes in its place; a version that none of them reads does not come
        comes, at_owner = producer != update, axis.at_owner
        made[in_step:] = np.where(at_owner[old], made[in_step:], end(producer[old]))
        until = np.where(at_owner, until, np.where(comes, start(producer), end(consumer)))
        arrives = np.append(np.ones(in_step, dtype=bool), comes[old])
        size = np.where(at_owner | (arrives & (axis.state.parameters is Placed.COPIED)), size, 0)
    return axis.build.hold(Category.PARAMETERS, copies.where, size, made, until)


def hold_optimizers(axis: DataAxis) -> None:
    """Hold optimizer states where updates are made, always."""
    updates, last = axis.updates, slice(-axis.updates.in_step, None)
    size = axis.model.size("optimizer")[updates.stage] if axis.owned else axis.stored.optimizer
    where = Location(updates.device[last], updates.stage[last], updates.step[last])
    axis.build.hold(Category.OPTIMIZER, where, size[last], -1, end(updates.node[last]))


def hold_residuals(axis: DataAxis, compress: Compression) -> None:
    """Hold what is left of gradients always: each rank adds it to its next ones. Next factors start from the last."""
    size = axis.whole.gradients.copy()
    if compress.rank:
        stages = [split_tensors(compress, stage) for stage in unshared_stages(axis.tables, axis.model)]
        size += np.array([sum(sum(factors) for _, _, *factors in stage) for stage in stages])[axis.copies.stage]
    rows = np.flatnonzero(axis.several[axis.copies.of[: axis.copies.in_step]])
    where = axis.copies.where.take(rows)
    until = end(axis.tables.lanes.step_ends[-1, where.device])
    held = axis.build.hold(Category.COMMUNICATION, where, size[rows], -1, until)
    axis.keeping.keep_for_good(held, where.device)

"""The data axis: copies of a stage on several devices sum gradients, and bring new parameters to their readers.

Sums and gathers of a stage in a step. A line is a placement of (parameters, gradients, optimizer states); the right
side of an arrow waits for the left side. F, B, U: forward, backward, update of the stage; [ ]: with several groups.

    copied, copied, copied       F B > all-reduce gradients > U of each copy > F of the next step
    copied, copied/owned, owned  F B > reduce gradients > U of the owner > broadcast parameters > F of the next step
    copied, copied/split, split  F B > reduce-scatter [> all-reduce shares] > U of each share > all-gather > F
    split, split, split          all-gather > F, all-gather > B > reduce-scatter [> all-reduce shares] > U of each share
    owned, owned, owned          broadcast > F, broadcast > B > reduce gradients > U of the owner
    rounds                       F B F B > reduce-scatter > U of each share > all-gather > F of a later round
                                           F B F B of the next round meanwhile
    local steps                  F B > U of each copy, by itself; after several > all-reduce parameters > U of each > F

In the code, each function takes what those before it return:

    find_axis          DataAxis: copies, their bytes, and the groups in which they exchange something
    gather_for_uses    Gathered: parameters come before each use, and go after it, where no copy stays
    sum_in_streams     Sums: which message takes the gradients of each copy; or sum_by_stage
    gather_versions    Brought: the node that brings the next version to each copy; or broadcast_versions
    hold_...           buffers, from all of these

Buffers of the data axis: gradients, versions of parameters, optimizer states.

Exchanges in one message for each stage: all-reduces; or sums at owners of states, and broadcasts from there.
"""

from itertools import pairwise

import numpy as np

from cdpsim.model import Model
from cdpsim.model.runtime import Behaviours
from cdpsim.model.stage import Tie
from cdpsim.numeric.columns import Flags, Ints
from cdpsim.program import Category, Content, EdgeKind, Op
from cdpsim.program.assembly.axis import Brought, DataAxis, Sums, earlier_sums, find_axis, order_updates, readers
from cdpsim.program.assembly.build import Builder, Location, end, start, without_root
from cdpsim.program.assembly.gathered import Gathered, Uses, gather_for_uses, hold_gathered, hold_given, hold_reduced
from cdpsim.program.assembly.in_streams import gather_versions, sum_in_streams, sum_norms
from cdpsim.program.assembly.in_turn import in_turn
from cdpsim.program.assembly.runtime_buffers import gradients_at_first, hold_gradients
from cdpsim.program.assembly.updates import (
    Updates,
    base_is_still_needed,
    carry,
    give_shared,
    hold_encoded,
    pull,
    split_tensors,
    sum_shared,
    unshared_gradients,
    unshared_stages,
)
from cdpsim.program.assembly.workers import overlap_rounds, take_local_steps
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
    shares = axis.shares_of("gradients", size, copies.stage)
    axis.keep_for_updates(build.hold(Category.GRADIENTS, copies.where, shares, begin, end(axis.update)))


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
    axis.keep_for_updates(held)
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
    """Return copies whose gradients are in buckets, and copies that add up outside of these until the last pass."""
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
    where = copies.where.take(rows)
    held = axis.build.hold(category, where, axis.stored.gradients[rows], -1, until)
    axis.keeping.keep_for_good(held, where.device)


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
    axis.keep_for_updates(held[-in_step:], slice(-in_step, None))
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
    held = axis.build.hold(Category.OPTIMIZER, where, size[last], -1, end(updates.node[last]))
    axis.keep_for_updates(held, last)


def hold_made(axis: DataAxis) -> None:
    """Hold what updates make while they run; one step of an optimizer makes it for all stages of a device together.

    Where that takes no time, it is behind the last gradient of the step there.
    """
    updates, how = axis.updates, axis.behaviours.updates
    if how == "fused":
        return
    kind = f"update_{how}"
    size, row = axis.model.size(kind)[updates.stage], np.arange(len(updates))
    if axis.state.optimizer is Placed.SPLIT:
        size = axis.shares_of(kind, size, updates.stage)
    if axis.updates_together:
        group, _, last = updates.of_devices
        together = np.zeros(len(last), dtype=np.int64)
        (np.add if how == "foreach" else np.maximum).at(together, group, size)
        size, row = together[group], row if updates.in_lanes else last
    where = Location(updates.device, updates.stage, updates.step).take(row)
    axis.build.hold(Category.OPTIMIZER, where, size[row], start(updates.node[row]), end(updates.node[row]))


def hold_residuals(axis: DataAxis, compress: Compression) -> None:
    """Hold the residuals of gradients always, which ranks add to the next ones. Factors start from the last ones."""
    size = axis.whole.gradients.copy()
    if compress.rank:
        stages = [split_tensors(compress, stage) for stage in unshared_stages(axis.tables, axis.model)]
        size += np.array([sum(sum(factors) for _, _, *factors in stage) for stage in stages])[axis.copies.stage]
    rows = np.flatnonzero(axis.several[axis.copies.of[: axis.copies.in_step]])
    where = axis.copies.where.take(rows)
    until = end(axis.tables.lanes.step_ends[-1, where.device])
    held = axis.build.hold(Category.COMMUNICATION, where, size[rows], -1, until)
    axis.keeping.keep_for_good(held, where.device)


def _exchange(
    axis: DataAxis, op: Op, content: Content, chosen: Flags, size: Ints, versions: int = 0
) -> tuple[Ints, Ints, Ints]:
    """Send a message for each chosen step and stage.

    Return the numbers of these, the rows of their copies, and the message of each copy, or its update if it has none.
    """
    copies = axis.copies
    at, rows = np.flatnonzero(chosen), np.flatnonzero(chosen[copies.of])
    _, stage, step = copies.where.take(copies.first[at])
    of = Location(axis.updates.device[at], stage, step) if axis.owned else without_root(stage, step)
    message = axis.build.send(op, content, of, axis.groups.number[stage], size[stage], versions=versions)
    carrier = axis.update.copy()
    carrier[rows] = np.repeat(message, copies.count[at])
    return at, rows, carrier


def sum_by_stage(axis: DataAxis) -> Sums:
    """Sum gradients over the copies of each stage."""
    copies, build, update = axis.copies, axis.build, axis.update
    size = axis.model.size("gradients") if axis.owned else unshared_gradients(axis.tables, axis.model)
    op, held = Op.REDUCE if axis.owned else Op.ALL_REDUCE, None
    if axis.state.compress is not None:
        op, size, held = carry(axis.state.compress, op, size, axis.groups.members[axis.groups.first])
    at, rows, consumer = _exchange(axis, op, Content.GRADIENT, axis.several, size)
    if held is not None:
        hold_encoded(axis.tables, build, rows, copies.last_task[rows], consumer[rows], held[copies.stage[rows]])
    if axis.waits_for_end:
        ends = axis.tables.lanes.step_ends[copies.step[rows], copies.device[rows]]
        build.link(ends, consumer[rows], EdgeKind.BARRIER)
    makers = copies.owners[at] if axis.owned else rows
    build.link(consumer[makers], update[makers])
    build.link(axis.passes.last, consumer[copies.row])
    for given, into in earlier_sums(axis):
        _take_earlier(axis, consumer, given, into)
    if not axis.owned:
        sum_shared(axis.updates, axis.model, build, wait=axis.waits_for_end)
    return Sums(copies.last_task[None], consumer[None], [])


def _take_earlier(axis: DataAxis, consumer: Ints, given: int, into: int) -> None:
    """Let the updates of step `into` wait for the gradients of step `given`: for messages, or for tasks."""
    copies, in_step = axis.copies, axis.copies.in_step
    of_step = slice(given * in_step, (given + 1) * in_step)
    summed = np.flatnonzero(consumer[of_step] != axis.update[of_step])
    passes = slice(*axis.passes.first[given : given + 2].tolist())
    row, task = copies.row[passes].ravel() % in_step, axis.passes.last[passes].ravel()
    alone = ~np.isin(row, summed)
    before = np.concatenate([consumer[of_step][summed], task[alone]])
    axis.build.link(before, axis.update[into * in_step + np.concatenate([summed, row[alone]])])


def broadcast_versions(axis: DataAxis) -> Brought:
    """Send new versions from owners to all copies.

    A version that only its maker reads is not sent. The maker takes part until all have it, too.
    """
    copies, at_owner, read = axis.copies, axis.at_owner, np.zeros(len(axis.copies.first), dtype=bool)
    for _, _, row in readers(axis):
        made = row[row >= copies.in_step] - copies.in_step
        read[copies.of[made[~at_owner[made]]]] = True
    size = axis.model.size("parameters")
    at, rows, producer = _exchange(axis, Op.BROADCAST, Content.PARAMETERS, read, size, versions=1)
    axis.build.link(axis.updates.node[at], producer[copies.first[at]])
    rows = rows[~at_owner[rows]]
    where = Location(copies.device[rows], copies.stage[rows], copies.step[rows] + 1)
    axis.build.land(producer[rows], where, size[where.stage])
    return Brought(producer)


def broadcast_for_uses(axis: DataAxis, prefetch: int) -> Gathered:
    """Broadcast owned parameters before each use, which all micro-batches of a step share; drop them after it."""
    passes, lanes, build, n = axis.passes, axis.tables.lanes, axis.build, axis.passes.n
    step, phase = (index.ravel() for index in np.indices((passes.steps, passes.phases), dtype=np.int32))
    stage = passes.stage_of(phase)
    of, size = step * n + stage, axis.model.size("parameters")[stage]
    root, group = axis.updates.device[of], axis.groups.number[stage]
    message = build.send(Op.BROADCAST, Content.PARAMETERS, Location(root, stage, step - 1), group, size, versions=1)
    later = step > 0
    build.link(axis.updates.node[of[later] - n], message[later])
    tasks = np.arange(passes.tasks, dtype=np.int32).reshape(-1, passes.phases)
    reader = np.concatenate([tasks[low:high].T.ravel() for low, high in pairwise(passes.first.tolist())])
    each = np.repeat(np.arange(len(message)), np.repeat(np.diff(passes.first), passes.phases))
    build.link(message[each], reader)
    pull(lanes, build, message[each], lanes.rank[reader], 1 + prefetch)
    if axis.behaviours.gathers == "missing":  # what the owner has needs no copy
        missing = np.flatnonzero(passes.task_device[reader] != root[each])
        each, reader = each[missing], reader[missing]
    where = Location(passes.task_device[reader], stage[each], step[each])
    return hold_gathered(axis, Uses(message[each], reader, reader, where, size[each]), early=prefetch > 0)


def exchange_values(
    updates: Updates, model: Model, behaviours: Behaviours, build: Builder, prefetch: int, once: tuple[Tie, ...]
) -> None:
    """Sum gradients where updates are made, and bring new versions to their readers.

    `once` are tied tensors that the model counts in their first stages alone.
    """
    if not updates.tables.passes.together:
        in_turn(updates, model, behaviours, build, prefetch)
        return
    axis, order = find_axis(updates, model, behaviours, build), updates.tables.passes.schedule.order
    if not order.waits:
        (take_local_steps if order.local else overlap_rounds)(axis)
        return
    streams, gathered, brought = axis.state.streams, None, Brought(axis.update)
    if not axis.stays:
        gathered = gather_for_uses(axis, prefetch, once) if streams else broadcast_for_uses(axis, prefetch)
    sums = sum_in_streams(axis) if streams else sum_by_stage(axis)
    if streams and axis.state.clips:
        sum_norms(axis, sums)
    if axis.state.parameters is Placed.COPIED and axis.state.optimizer is not Placed.COPIED:
        brought = gather_versions(axis) if streams else broadcast_versions(axis)
    order_updates(axis, brought)
    hold_sums(axis, sums, brought, gathered)
    hold_parameters(axis, sums, brought)
    hold_optimizers(axis)
    hold_made(axis)
    if axis.state.compress is not None and axis.state.compress.leaves_some:
        hold_residuals(axis, axis.state.compress)

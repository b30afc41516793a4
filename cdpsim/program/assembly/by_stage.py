"""Exchanges in one message for each stage: all-reduces; or sums at owners of states, and broadcasts from there."""

from itertools import pairwise

import numpy as np

from cdpsim.numeric.columns import Flags, Ints
from cdpsim.program import Content, EdgeKind, Op
from cdpsim.program.assembly.axis import Brought, DataAxis, Sums, earlier_sums, readers
from cdpsim.program.assembly.build import Location, without_root
from cdpsim.program.assembly.gathered import Gathered, Uses, hold_gathered
from cdpsim.program.assembly.updates import carry, hold_encoded, pull, sum_shared, unshared_gradients


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

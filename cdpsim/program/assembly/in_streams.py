"""Exchanges in streams, one message after another: of buckets, and of values that ranks of a group have shares of.

A *sharding group* is the ranks that share split values: of each stage, `shard` data ranks in a row. A reduce-scatter in
each group sums gradients to shares, and an all-reduce of equal shares across the groups goes on with them. An
all-gather in each group brings new parameters, or the parameters of a task. Where nothing is split, all copies of a
stage are one group, and an all-reduce sums for all.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.model import gradient_tensors
from cdpsim.numeric.columns import Ints, expand_ranges, group_numbers, group_starts, matching_pairs, sort_by
from cdpsim.program import Content, EdgeKind, Op, Stream
from cdpsim.program.assembly.axis import Brought, DataAxis, Ends, Sums, readers
from cdpsim.program.assembly.build import Location, without_root
from cdpsim.program.assembly.updates import (
    Carried,
    carry,
    hold_encoded,
    split_tensors,
    sum_shared,
    unshared_gradients,
    unshared_stages,
)
from cdpsim.schedules.buckets import Buckets, Units
from cdpsim.schedules.state import Placed, When

_NORM_BYTES = 4  # a number in fp32
_IN_ONE = Buckets((2**62,))  # one for all gradients


class UnitPlan(NamedTuple):
    """The messages of one step inside groups: one for each unit and group; and which copies take part in which."""

    units: Units
    unit: Ints  # of each message
    group: Ints  # of each message, its number among the program's
    row: Ints  # of each copy's part in a message, the copy
    message: Ints  # and the message


def plan_messages(axis: DataAxis, units: Units) -> UnitPlan:
    """Number the messages of a step in which these units go inside groups of several members."""
    groups = axis.groups
    sent = (groups.members[groups.first[units.first]] > 1) & ((units.size > 0) | (axis.of_experts is not True))
    units = Units(*(column[sent] for column in units))
    unit, group, first = groups.messages_of(units)
    of, covered = expand_ranges(units.first, units.last + 1)
    pair, row = matching_pairs((covered,), (axis.stage,))
    return UnitPlan(units, unit, groups.number[group], row, first[of[pair]] + groups.place[groups.of[row]])


def units_of(
    axis: DataAxis, sizes: Ints, buckets: Buckets | None, tensors: list[list[tuple[int, ...]]] | None = None
) -> Units:
    """Return what goes in one message: a stage with all its bytes or, with buckets, several tensors; or their parts."""
    if buckets is None and not axis.state.in_factors:
        stage = np.arange(len(sizes), dtype=np.int32)
        return Units(stage, stage, sizes, *np.zeros((2, len(sizes)), dtype=np.int64))
    first = np.append(axis.copies.first[: axis.passes.n], axis.copies.in_step).tolist()
    devices = [axis.device[low:high].tobytes() for low, high in pairwise(first)]
    ends = [j for j in range(1, len(devices) + 1) if devices[j - 1 : j] != devices[j : j + 1]]  # of equal devices
    if buckets is None:
        ends, buckets = [*range(1, len(devices) + 1)], _IN_ONE
    return Units.of_buckets(tensors or [[(size,)] for size in sizes.tolist()], ends, buckets)


def _eras(axis: DataAxis) -> Iterator[tuple[Ints, Buckets | None]]:
    """Yield steps with their buckets: in the first step torch may have one for all."""
    buckets, steps = axis.state.buckets, np.arange(axis.passes.steps)
    if buckets is not None and buckets.whole_first_step:
        yield steps[:1], _IN_ONE
        steps = steps[1:]
    yield steps, buckets


def _giving(axis: DataAxis) -> Ints:
    """Return the tasks that give gradients to sums: by step, by pass if each is summed for itself, and by copy."""
    copies, passes = axis.copies, axis.passes
    if axis.state.reduce is not When.EACH:
        return np.reshape(copies.last_task, (passes.steps, 1, copies.in_step))
    row, task = copies.row.ravel(), passes.last.ravel()
    order = sort_by(row, axis.tables.lanes.rank[task])
    count = np.bincount(row)
    if (count != count[0]).any():
        problem = "sums after each pass, and some devices have more passes of a stage than others"
        raise RequestError("reduce", f"{problem}; take end or last")
    given: Ints = task[order].reshape(passes.steps, copies.in_step, -1).transpose(0, 2, 1)
    return given


def sum_in_streams(axis: DataAxis) -> Sums:
    """Sum gradients to where updates are made."""
    copies, build, steps = axis.copies, axis.build, axis.passes.steps
    given, ends, tables = _giving(axis), [], []
    shared = axis.model.size("gradients") - unshared_gradients(axis.tables, axis.model)
    for t, buckets in _eras(axis):
        paced: list[tuple[Ints, ...]] = []
        for part in axis.parts:  # of which the last takes the gradients of all copies that exchange any
            sizes = part.part.gradients - (shared if part is axis else 0)
            units = units_of(part, sizes, buckets, _list_tensors(part, sizes))
            table, last = sum_units(part, plan_messages(part, units), t, given, paced)
            ends += last
        tables.append(table)
        if paced:
            _pace_tasks(axis, *(np.concatenate(column) for column in zip(*paced, strict=True)))
    taken = np.concatenate(tables)
    for message, devices in sum_shared(axis.updates, axis.model, build, wait=axis.waits_for_end, stream=Stream.REDUCE):
        rows = np.flatnonzero(np.isin(copies.device, devices))
        if axis.state.one_step:
            build.link(message[copies.step[rows]], axis.update[rows])
        step = np.repeat(np.arange(steps), len(devices))
        ends.append(Ends(message[step], step, np.tile(devices, steps)))
    alone = np.flatnonzero(taken[:, -1].ravel() == axis.update)
    build.link(copies.last_task[alone], axis.update[alone])
    ends.append(Ends(copies.last_task[alone], copies.step[alone], copies.device[alone]))
    given, taken = (column.transpose(1, 0, 2).reshape(column.shape[1], -1) for column in (given, taken))
    return Sums(given, taken, ends)


def _list_tensors(axis: DataAxis, sizes: Ints) -> list[list[tuple[int, ...]]]:
    """Return the bytes of the tensors of each stage, each with its parts, if any go by themselves."""
    if axis.state.compress is not None and axis.state.in_factors:
        return [split_tensors(axis.state.compress, stage) for stage in unshared_stages(axis.tables, axis.model)]
    own = gradient_tensors(axis.model, of_experts=axis.of_experts)
    each = zip(own, sizes.tolist(), strict=True)
    return [[(part,) for part in own] if sum(own) == size else [(size,)] for own, size in each]  # some share others


def sum_units(
    axis: DataAxis, plan: UnitPlan, t: Ints, given: Ints, paced: list[tuple[Ints, ...]] | None = None
) -> tuple[Ints, list[Ends]]:
    """Send the sums of a plan in steps t, of what tasks have `given`: a table by step, round and copy.

    Return what takes them, as such a table of steps t, and the last messages. Sums go to `paced`, if given.
    """
    build, row = axis.build, plan.row
    across = _plan_across(axis, plan)
    rounds, device, update = given.shape[1], axis.device[row], axis.update.reshape(axis.passes.steps, 1, -1)[t]
    taken = np.repeat(update, rounds, axis=1)
    if not (len(t) and len(row)):
        return taken, []
    inside = send_sums(axis, plan, t, rounds)
    later = np.flatnonzero(plan.units.follows[plan.unit])
    many = axis.groups.many[plan.units.first[plan.unit[later]]]  # messages of a unit
    build.link(inside[:, :, later + many], inside[:, :, later])
    mine = final = inside[:, :, plan.message]
    if (across.message >= 0).any():
        far = send_sums(axis, across, t, rounds, across=True)
        pairs = np.unique(np.stack([plan.message, across.message])[:, across.message >= 0], axis=1)
        build.link(inside[:, :, pairs[0]], far[:, :, pairs[1]])
        final = np.where(across.message >= 0, far[:, :, across.message], mine)
    given = given[t][:, :, row]
    build.link(given, mine)
    if axis.waits_for_end:
        build.link(axis.tables.lanes.step_ends[t][:, None, device], mine, EdgeKind.BARRIER)
    build.link(final, update[:, :, row])
    if paced is not None:
        columns = np.broadcast_arrays(device, given, mine, final)
        paced.append(tuple(column.ravel() for column in columns))
    _hold_encoded(axis, plan, across, t, (given, mine, final))
    if axis.state.one_step:
        _join_updates(axis, plan, across, final[:, -1], update[:, 0])
    order = sort_by(row, plan.unit[plan.message])
    last = order[group_starts(row[order])]  # of several units of a copy, the lowest goes last
    taken[:, :, row[last]] = mine[:, :, last]
    return taken, [Ends(final[:, -1].ravel(), np.repeat(t, len(row)), np.tile(device, len(t)))]


def _plan_across(axis: DataAxis, plan: UnitPlan) -> UnitPlan:
    """Number the messages of a step that sum shares across groups; -1 where a group is alone."""
    row = plan.row
    if not axis.state.splits:
        return plan._replace(message=np.full(len(row), -1))
    across = axis.group_copies("place", axis.run)
    unit, group, first = across.messages_of(plan.units)
    several = across.members[group] > 1
    number = np.where(several, np.cumsum(several) - 1, -1)
    message = number[first[plan.unit[plan.message]] + across.place[across.of[row]]]
    return UnitPlan(plan.units, unit[several], across.number[group[several]], row, message)


def send_sums(
    axis: DataAxis, plan: UnitPlan, t: Ints, rounds: int, content: Content = Content.GRADIENT, *, across: bool = False
) -> Ints:
    """Send sums in each group, or of shares across groups; return the messages: by step, by round, by number."""
    shape = len(t), rounds, len(plan.unit)
    step, _, number = (index.ravel() for index in np.indices(shape, dtype=np.int32))
    op, size, _ = _carry_units(axis, plan.units, across=across)
    stream = Stream.ACROSS if across else Stream.REDUCE
    return _send_units(axis, op, content, plan, t[step], number, size, stream).reshape(shape)


def _carry_units(axis: DataAxis, units: Units, *, across: bool) -> Carried:
    """Return how each unit is summed in a group, or its shares across groups."""
    op = Op.REDUCE_SCATTER if axis.state.splits and not across else Op.ALL_REDUCE
    size, members = axis.share(units.size) if across else units.size, axis.groups.members[axis.groups.first]
    carried = carry(axis.state.compress, op, size, members[units.first])
    return carried._replace(held=carried.held + units.held)


def _send_units(
    axis: DataAxis, op: Op, content: Content, plan: UnitPlan, t: Ints, number: Ints, size: Ints, stream: Stream
) -> Ints:
    """Send the messages of these numbers in steps t; `size` is that of each unit."""
    units, unit = plan.units, plan.unit[number]
    of, stages, group = without_root(units.first[unit], t), units.last - units.first + 1, plan.group[number]
    versions = int(op == Op.ALL_GATHER and content == Content.PARAMETERS)
    return axis.build.send(op, content, of, group, size[unit], versions=versions, stages=stages[unit], stream=stream)


def _hold_encoded(axis: DataAxis, plan: UnitPlan, across: UnitPlan, t: Ints, nodes: tuple[Ints, Ints, Ints]) -> None:
    """Hold encoded gradients of steps t: of tasks until sums inside groups, and of these until those across."""
    if axis.state.compress is None:
        return
    (given, inside, final), unit = nodes, plan.unit[plan.message]
    copy, far = t[:, None, None] * axis.copies.in_step + plan.row, across.message >= 0
    held = _carry_units(axis, plan.units, across=False).held[unit]
    hold_encoded(axis.tables, axis.build, copy, given, inside, held)
    held = _carry_units(axis, plan.units, across=True).held[unit]
    hold_encoded(axis.tables, axis.build, copy[..., far], inside[..., far], final[..., far], held[far])


def _pace_tasks(axis: DataAxis, device: Ints, given: Ints, inside: Ints, final: Ints) -> None:
    """Let tasks wait for sums.

    After each pass, the next pass waits for its sums. A rank that splits gradients has one buffer for sums: when a
    task has given its gradients, the next one waits for the sums of the tasks before.
    """
    build, lanes, rank = axis.build, axis.tables.lanes, axis.tables.lanes.rank
    columns = device, given, inside, final
    order = sort_by(device, inside, rank[given])
    last = np.append(group_starts(columns[0][order], columns[2][order])[1:], len(order)) - 1  # gradient of each sum
    order = order[last]
    order = order[sort_by(columns[0][order], rank[columns[1][order]], columns[2][order])]
    device, given, inside, final = (column[order] for column in columns)
    place = np.minimum(rank[given] + 1, len(lanes.tasks) - 1)
    after = lanes.tasks[place]  # the next task in the lane
    has_next = (lanes.number[place] == lanes.number[rank[given]]) & (place != rank[given])
    if axis.state.gradients is Placed.SPLIT and not axis.waits_for_end:
        first = group_starts(device, given)
        later = np.append(first[1:], 0)[group_numbers(first, len(device))]  # a sum of the task that gives next
        rows = np.flatnonzero((device[later] == device) & (later > 0) & has_next[later])
        build.link(inside[rows], after[later[rows]], EdgeKind.ROOM)
    if axis.state.reduce is When.EACH:
        first = group_starts(device, given // axis.passes.phases)
        ends = np.append(first[1:], len(device)) - 1
        rows = ends[group_numbers(first, len(device))]
        waits = np.flatnonzero(has_next[rows])
        build.link(final[waits], after[rows[waits]], EdgeKind.ROOM)


def _join_updates(axis: DataAxis, plan: UnitPlan, across: UnitPlan, final: Ints, update: Ints) -> None:
    """Let all updates of a device wait for all its sums of the last round, whose passes wait for those before."""
    device = axis.device[plan.row]
    order = sort_by(device, across.message, plan.message)
    once = order[group_starts(device[order], across.message[order], plan.message[order])]
    summed, row = matching_pairs((device[once],), (axis.device,))
    axis.build.link(final[:, once[summed]], update[:, row])


def sum_norms(axis: DataAxis, sums: Sums) -> None:
    """Sum the norm of all gradients over the devices that have some of them, before any of these updates."""
    copies, build, passes, steps = axis.copies, axis.build, axis.passes, axis.passes.steps
    places, none = passes.replica_devices, np.full(steps, -1)
    rank, each = np.arange(passes.devices, dtype=np.int32) // places // axis.run, passes.copies
    groups = np.split(np.arange(len(rank), dtype=np.int32), np.flatnonzero(np.diff(rank)) + 1)
    node, step, device = (np.concatenate(column) for column in zip(*sums.ends, strict=True))
    for members in groups if places * axis.run * each > 1 else ():
        of = without_root(none, np.arange(steps))
        group = build.group(members, passes.alike_ranks(members, axis.run), each)
        message = build.send(Op.ALL_REDUCE, Content.NORM, of, group, _NORM_BYTES, stream=Stream.REDUCE)
        mine = np.isin(device, members)
        build.link(*np.unique(np.stack([node[mine], message[step[mine]]]), axis=1))
        rows = np.flatnonzero(np.isin(copies.device, members))
        build.link(message[copies.step[rows]], axis.update[rows])


def plan_parameters(axis: DataAxis) -> tuple[UnitPlan, Ints]:
    """Plan the messages in which the parameters of all stages go, and return the bytes of each stage, too."""
    size = np.zeros(axis.passes.n, dtype=np.int64)
    np.maximum.at(size, axis.copies.stage, axis.whole.parameters)  # a device has a tied tensor once
    size -= axis.model.size("parameters") - axis.part.parameters
    return plan_messages(axis, units_of(axis, size, axis.state.buckets)), size


def gather_updated(axis: DataAxis, plan: UnitPlan, t: Ints, number: Ints) -> Ints:
    """Gather the parameters that updates of steps t have made, those of a number in the plan for each."""
    size = axis.shard * axis.share(plan.units.size)
    return _send_units(axis, Op.ALL_GATHER, Content.PARAMETERS, plan, t, number, size, Stream.GATHER)


def gather_versions(axis: DataAxis) -> Brought:
    """Bring new versions that tasks read from shares to all copies."""
    experts = axis.experts
    of_experts = None if experts is None or experts.shard == 1 else _gather_versions_of(experts).producer
    return _gather_versions_of(axis)._replace(of_experts=of_experts)


def _gather_versions_of(axis: DataAxis) -> Brought:
    """Bring new versions of what goes among the same ranks."""
    copies, build, in_step, steps = axis.copies, axis.build, axis.copies.in_step, axis.passes.steps
    producer, (plan, size) = axis.update.copy(), plan_parameters(axis)
    read = np.zeros((steps + 1) * in_step, dtype=bool)
    for _, _, row in readers(axis):
        read[row] = True
    wanted = np.zeros((len(plan.unit), steps), dtype=bool)
    np.logical_or.at(wanted, plan.message, read.reshape(-1, in_step)[1:, plan.row].T)
    t, number = np.nonzero(wanted.T)
    message = np.full((steps, len(plan.unit)), -1)
    message[t, number] = gather_updated(axis, plan, t, number)
    t, member = np.nonzero(wanted[plan.message].T)
    if not len(t):
        return Brought(producer)
    brought, row = message[t, plan.message[member]], plan.row[member]
    producer[t * in_step + row] = brought
    where = Location(copies.device[row], copies.stage[row], (t + 1).astype(np.int32))
    build.land(brought, where, size[where.stage])
    if axis.state.gather == "early":
        build.link(axis.update[t * in_step + row], brought)
    else:  # no gather begins before its devices have made all their updates of the step
        once, t_once, device = np.unique(np.stack([brought, t, where.device]), axis=1)
        made, each = matching_pairs((copies.step, copies.device), (t_once, device))
        build.link(axis.update[made], once[each])
    if axis.state.gather == "step":  # no forward of a device begins before all new parameters are there
        later = np.flatnonzero(t < steps - 1)
        build.link(brought[later], axis.tables.lanes.step_begins[t[later] + 1, where.device[later]])
    return Brought(producer)

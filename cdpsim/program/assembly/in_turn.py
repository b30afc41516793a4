"""Exchanges where devices come to a stage one after another: point-to-point messages from each to the next.

F, B, U: forward, backward, update of one stage; > is a message. Either each value goes its own way:

    sum of gradients    B on device 0 > B on device 1 > B on device 2, U     each adds its own to the sum
    optimizer state     U of a step on device 2 > U of the next step on the device that is last there
    new version         U > F that reads it first > F on the next device > ...  a device receives a version once

or the whole state of a stage goes from user to user: parameters in all versions needed, the sum, the optimizer state.

    F on device 0 > F on device 1 > ... > B on device 1 > B on device 2, U > F of the next step on device 0
"""

from typing import NamedTuple

import numpy as np

from cdpsim.model import Model
from cdpsim.model.runtime import Behaviours
from cdpsim.numeric.columns import Flags, Ints, expand_ranges, group_numbers, group_starts, sort_by
from cdpsim.program import Category, Content, EdgeKind, Op
from cdpsim.program.assembly.build import Builder, Location, end, start
from cdpsim.program.assembly.runtime_buffers import gradients_at_first, hold_gradients
from cdpsim.program.assembly.task_tables import Passes
from cdpsim.program.assembly.updates import Updates, base_is_still_needed, carry, pull, uses


def in_turn(updates: Updates, model: Model, behaviours: Behaviours, build: Builder, prefetch: int) -> None:
    """Pass sums, optimizer states and new versions along, or carry all of a stage from user to user."""
    if updates.barrier is not None:
        build.link(updates.barrier, updates.node, EdgeKind.BARRIER)
    first_sizes = gradients_at_first(model, behaviours, updates.tables.passes)
    if updates.tables.passes.schedule.state.travels:
        _carry(updates, model, build, prefetch, first_sizes)
        return
    _sum_gradients(updates, model, build, first_sizes)
    _move_optimizer(updates, model, build, prefetch)
    _hand_on_parameters(updates, model, build, prefetch)


def _sum_gradients(updates: Updates, model: Model, build: Builder, first_sizes: Ints) -> None:
    """Let each copy sum its own micro-batches, add what it received, and pass the sum on in micro-batch order."""
    passes, copies = updates.tables.passes, updates.tables.copies
    order = sort_by(copies.step, copies.stage, copies.last)
    where = copies.where.take(order)
    device, stage, step = where
    final = np.append(group_starts(step, stage)[1:], len(order)) - 1
    sends = np.delete(np.arange(len(order)), final)
    size = model.size("gradients")[stage]
    sent = carry(passes.schedule.state.compress, Op.P2P, size[sends], 1).size
    message = build.send(Op.P2P, Content.GRADIENT, where.take(sends), device[sends + 1], sent)
    consumer = np.empty(len(order), dtype=np.int32)
    consumer[sends] = message
    consumer[final] = updates.node[step[final] * passes.n + stage[final]]
    build.link(message, consumer[sends + 1])
    consumer_of_row = np.empty_like(consumer)
    consumer_of_row[order] = consumer
    build.link(passes.last.ravel(), consumer_of_row[copies.row.ravel()])
    hold_gradients(build, where, size, first_sizes[stage], copies.first_task[order], end(consumer))
    arriving = where.take(sends)._replace(device=device[sends + 1])
    build.land(message, arriving, sent, start(consumer[sends + 1]))


def _move_optimizer(updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """Let the optimizer state follow the updates of its stage from device to device."""
    n, node, where = updates.in_step, updates.node, Location(updates.device, updates.stage, updates.step)
    moved, size = model.optimizer_as_message[where.stage], model.size("optimizer")[where.stage]
    now = np.arange(len(updates) - n)
    travels = (where.device[now] != where.device[now + n]) & (moved[now] > 0)
    stays, goes = now[~travels], now[travels]
    there = where.take(goes)._replace(device=where.device[goes + n])
    message = build.send(Op.P2P, Content.STATE, where.take(goes), there.device, moved[goes])
    build.link(node[goes], message)
    build.link(message, node[goes + n])
    pull(updates.tables.lanes, build, message, updates.lane_place[goes + n], prefetch)
    # A state is on its device from its arrival, or from where it was before, until it leaves or is last used.
    arrival, leaving = np.full(len(updates), -1), end(node)
    arrival[stays + n] = end(node[stays])
    arrival[goes + n] = leaving[goes] = end(message)
    build.hold(Category.OPTIMIZER, where, size, arrival, leaving)
    build.land(message, there, size[goes])


class _Uses(NamedTuple):
    """Uses of versions: of each (version, stage) in the order in which devices hand it on.

    A forward reads for its backward too, unless the rule has another version for that; an update reads what it
    replaces; a maker holds what it makes, read or not. Version 2 of stage 1 of `multi-cdp` with n = 3:

        device 0            device 1            device 2
                                                U(t=1,j=1)       makes it
                            F(t=2,i=1,j=1)  <---'                first reader: from the maker
                                                F(t=2,i=2,j=1)   has it
        F(t=3,i=0,j=1)  <-----------------------'                next reader: from the device of the one before
                                                U(t=2,j=1)       replaces it

    Both updates stand behind all readers, wherever they are in the order: their device has the version anyway, and so
    its place in the chain is that of its first reader.
    """

    version: Ints
    stage: Ints
    device: Ints
    turn: Ints  # where it stands among the uses of its version
    node: Ints  # that uses it
    until: Ints  # the moment until which the version is needed
    place: Ints  # in the lanes, of the task that reads, or that the update follows
    waits: Flags  # whether the node waits for the version: all but its maker do
    ahead: Ints  # how many tasks before that place there is room for the version


def _uses(updates: Updates) -> _Uses:
    """Gather readers, updates that replace versions, and makers."""
    passes, n, rank = updates.tables.passes, updates.in_step, updates.tables.lanes.rank
    position, behind = passes.position, 2 * int(passes.position.max()) + 2
    stage, device = passes.stage, passes.device.ravel()
    # An update that replaces what its device has made does so behind all readers, wherever they stand.
    made_here = np.append(np.zeros(n, dtype=bool), updates.device[n:] == updates.device[:-n])
    replaces = np.where(made_here, behind, 2 * updates.order_position + 1)
    place, made = updates.lane_place, slice(len(updates) - n)

    def readers(version: Ints, task: Ints, last_use: Ints) -> tuple[Ints, ...]:
        """Return the first seven columns of the tasks that read a version, until their last use of it."""
        reader = task.ravel()
        return version.ravel(), stage, device, 2 * position[reader], reader, end(last_use.ravel()), rank[reader]

    if passes.rule.backward is None:
        parts = [readers(passes.version, passes.forward, passes.last)]
    else:
        parts = [readers(passes.version, passes.forward, passes.forward)]
        parts += [readers(passes.backward_version, passes.backward, passes.last)]
    count = len(parts) * len(stage), len(updates), len(updates) - n
    replacing = (updates.step, updates.stage, updates.device, replaces, updates.node, end(updates.node), place)
    making = [column[made] for column in replacing]
    making[0], making[3] = making[0] + 1, np.full(count[2], behind)
    columns = [np.concatenate(column) for column in zip(*parts, replacing, making, strict=True)]
    columns += [np.repeat([True, True, False], count), np.repeat([1, 0, 0], count)]
    order = sort_by(*columns[:4])
    return _Uses(*(column[order] for column in columns))


def _hand_on_parameters(updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """Send a new version from its maker to the first reader and from reader to reader; a device reads it once."""
    n, use = updates.in_step, _uses(updates)
    first = group_starts(use.version, use.stage, use.device)  # the first use of each copy of a version on a device
    copy_of = group_numbers(first, len(use.version))
    v, j, d = use.version[first], use.stage[first], use.device[first]
    made_by = np.maximum(v - 1, 0) * n + j  # the number of the update
    is_made = (v > 0) & (d == updates.device[made_by])
    producer = np.where(is_made, updates.node[made_by], -1)

    chain = sort_by(v, j, use.turn[first])
    follows = np.zeros(len(chain), dtype=bool)  # in the chain, comes after another reader of its version
    follows[1:] = (v[chain][1:] == v[chain][:-1]) & (j[chain][1:] == j[chain][:-1])
    maker = np.full(len(updates) + n, -1, dtype=np.int32)
    maker[v[is_made] * n + j[is_made]] = np.flatnonzero(is_made)
    source = np.where(follows, np.roll(chain, 1), maker[v[chain] * n + j[chain]])
    needs = (v[chain] > 0) & ~is_made[chain]
    receiver, sender = chain[needs], source[needs]

    where, size = Location(d, j, v), model.size("parameters")[j]
    arriving = where.take(receiver)
    of = Location(d[sender], arriving.stage, arriving.version - 1)
    message = build.send(Op.P2P, Content.PARAMETERS, of, arriving.device, size[receiver], versions=1)
    producer[receiver] = message
    build.link(producer[sender], message)
    reader = first[receiver]
    pull(updates.tables.lanes, build, message, use.place[reader], use.ahead[reader] + prefetch)
    reads = np.flatnonzero(use.waits & (producer[copy_of] >= 0))
    build.link(producer[copy_of[reads]], use.node[reads])

    begin = end(producer)
    if model.updates_take_time:  # what is written beside the old version is there from the start of the update
        begin[is_made] -= base_is_still_needed(updates)[made_by[is_made]]
    copies = build.hold(Category.PARAMETERS, where, size, begin, use.until[first])
    others = np.flatnonzero(np.diff(copy_of, prepend=-1) == 0)
    build.keep(copies[copy_of[others]], use.until[others])
    build.keep(copies[sender], end(message))
    build.land(message, arriving, size[receiver])


def _carry(updates: Updates, model: Model, build: Builder, prefetch: int, first_sizes: Ints) -> None:
    """Move a stage's state, point to point, from the device that used it last to the one that uses it next."""
    route = _find_route(updates.tables.passes)
    carried = _find_carried(updates, route)
    leave = _move(updates, model, build, prefetch, route, carried)
    _hold_carried(updates, model, build, route, carried, leave, first_sizes)


class _Route(NamedTuple):
    """The uses of all stages in one row, stage after stage, each stage's first preceded by where its state starts."""

    user: Ints  # the task, -1 at a start
    stage: Ints
    device: Ints
    at: Ints  # of each compute task, its place in this row
    starts: Ints  # of each stage, its start
    lasts: Ints  # of each stage, its last use


def _find_route(passes: Passes) -> _Route:
    """Return the uses of all stages in the schedule's order."""
    task, first = uses(passes)
    user = np.insert(task, first, -1)
    starts = first + np.arange(passes.n)
    lasts = np.append(starts[1:], len(user)) - 1
    stage = np.repeat(np.arange(passes.n), lasts - starts + 1)
    device = np.where(user >= 0, passes.task_device[user], stage % passes.devices)
    at = np.empty(len(task), dtype=np.int64)
    at[task] = np.flatnonzero(user >= 0)
    return _Route(user, stage, device, at, starts, lasts)


class _Span(NamedTuple):
    """From which use to which something belongs to its stage's state; a row a step, a column a stage."""

    first: Ints
    last: Ints

    def leaving(self, count: int) -> Ints:
        """Return how many go on with the state after each of `count` uses."""
        change = np.zeros(count, dtype=np.int64)
        np.add.at(change, self.first.ravel(), 1)
        np.add.at(change, self.last.ravel(), -1)
        return np.cumsum(change)


class _Carried(NamedTuple):
    """The content of states: versions from the update that makes them to their last reader, and partial sums."""

    versions: _Span
    sums: _Span
    updated_at: Ints  # the use that each update follows


def _find_carried(updates: Updates, route: _Route) -> _Carried:
    """Find the first and the last use of each version and sum."""
    passes, updated_at = updates.tables.passes, route.at[updates.after]
    by_update = updated_at.reshape(passes.steps, passes.n)
    last_reader = by_update.copy()  # an update reads what it replaces
    for version, reader in ((passes.version, passes.forward), (passes.backward_version, passes.backward)):
        np.maximum.at(last_reader, (version.ravel(), passes.stage), route.at[reader.ravel()])
    versions = _Span(np.vstack([route.starts, by_update[:-1]]), last_reader)
    return _Carried(versions, _Span(route.at[passes.backward[passes.first[:-1]]], by_update), updated_at)


def _move(updates: Updates, model: Model, build: Builder, prefetch: int, route: _Route, carried: _Carried) -> Ints:
    """Send states on, link uses and updates to what comes next, and return the moment at which each use is left."""
    passes, lanes, user, count = updates.tables.passes, updates.tables.lanes, route.user, len(route.user)
    now = np.delete(np.arange(count), route.lasts)
    moves = now[route.device[now] != route.device[now + 1]]
    stage, src, dst, reader = route.stage[moves], route.device[moves], route.device[moves + 1], user[moves + 1]
    versions, sums = (span.leaving(count)[moves] for span in (carried.versions, carried.sums))
    parameters, gradients, optimizer = (model.size(kind)[stage] for kind in ("parameters", "gradients", "optimizer"))
    size = np.ones_like(versions) if model.is_unit else versions * parameters + sums * gradients + optimizer
    step = np.where(user[moves] >= 0, passes.step[user[moves] // passes.phases], -1)
    message = build.send(Op.P2P, Content.STATE, Location(src, stage, step), dst, size, versions=versions)
    build.land(message, Location(dst, stage, np.maximum(step, 0)), size)
    build.link(message, reader)
    pull(lanes, build, message, lanes.rank[reader], 1 + prefetch)

    # The message that takes the state on waits for a use, or the next use does.
    consumer = np.full(count, -1, dtype=np.int32)
    consumer[now] = user[now + 1]
    consumer[moves] = message
    waits = (consumer >= 0) & (user >= 0) & (consumer != user + 1)  # from phase to phase a task is waited for anyway
    build.link(user[waits], consumer[waits])
    build.link(user[carried.updated_at], updates.node)
    onward = np.flatnonzero(consumer[carried.updated_at] >= 0)
    build.link(updates.node[onward], consumer[carried.updated_at[onward]])
    leave = end(user)
    leave[carried.updated_at] = end(updates.node)
    leave[moves] = end(message)
    return leave


def _hold_carried(
    updates: Updates, model: Model, build: Builder, route: _Route, carried: _Carried, leave: Ints, first_sizes: Ints
) -> None:
    """Hold versions, partial sums and optimizer states where their state is: from use to use, until they end."""
    n, user, versions, sums = updates.in_step, route.user, carried.versions, carried.sums
    arrive = np.append(-1, leave[:-1])  # of a start it is never asked
    node = end(updates.node).reshape(-1, n)
    always = _Span(route.starts[None], route.lasts[None])
    initially = np.full((1, n), -1)
    others_read = versions.last != sums.last
    read = np.where(others_read, end(user[versions.last]), node)
    # Beside the old version, if that has readers left, the new one is there from the start of its update.
    written = node - (others_read & model.updates_take_time)
    made = start(user[sums.first])
    if not np.array_equal(first_sizes, model.size("gradients")):  # the task that makes them ends with all of them
        task = user[sums.first].ravel()
        where = Location(route.device[sums.first.ravel()], route.stage[sums.first.ravel()], np.arange(len(task)) // n)
        build.hold(Category.GRADIENTS, where, first_sizes[where.stage], start(task), end(task))
        made = end(user[sums.first])
    for category, kind, span, begin, finish in (
        (Category.PARAMETERS, "parameters", versions, np.vstack([initially, written[:-1]]), read),
        (Category.GRADIENTS, "gradients", sums, made, node),
        (Category.OPTIMIZER, "optimizer", always, initially, leave[always.last]),
    ):
        first, last = span.first.ravel(), span.last.ravel()
        of, use = expand_ranges(first, last + 1)
        begin_at = np.where(use == first[of], begin.ravel()[of], arrive[use])
        end_at = np.where(use == last[of], finish.ravel()[of], leave[use])
        rows = np.flatnonzero(begin_at != end_at)  # a state may start where it is first used
        use, of = use[rows], of[rows]
        where = Location(route.device[use], route.stage[use], of // n)
        build.hold(category, where, model.size(kind)[where.stage], begin_at[rows], end_at[rows])

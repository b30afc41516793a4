"""Sharded states: a stage's parameters and optimizer state are in one place and come to their users."""

from typing import NamedTuple

import numpy as np

from cdpsim.assembly.build import Builder, end, start
from cdpsim.assembly.tables import Passes, Tables
from cdpsim.assembly.tied import give_shared, own_gradients
from cdpsim.assembly.update import Updates, owner, uses
from cdpsim.columns import Ints
from cdpsim.model import Model
from cdpsim.program import Category, Content, Edge, Op


def broadcast_for_use(tables: Tables, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """Before every use an owner broadcasts its stage, after it the copies are dropped; gradients are reduced to it."""
    members = [np.unique(devices) for devices in tables.passes.device[: tables.passes.first[1]].T]
    alone = all(len(devices) == 1 for devices in members)
    groups = np.array([build.group(devices) for devices in members if not alone])
    if alone:
        _wait_at_home(tables.passes, updates, build)
    else:
        _broadcast(tables, updates, groups, model.size("parameters"), build, prefetch)
    _reduce(tables, updates, groups, model, alone, build)
    _hold_owned(tables, updates, model, build)


def _wait_at_home(passes: Passes, updates: Updates, build: Builder) -> None:
    """Forwards wait for the update that made their version, where every stage has one device."""
    makers = np.repeat(updates.node[: -passes.n], np.repeat(np.diff(passes.first[1:]), passes.n))
    build.link(makers, passes.by_columns(passes.forward)[passes.first[1] * passes.n :])


def _broadcast(tables: Tables, updates: Updates, groups: Ints, parameters: Ints, build: Builder, prefetch: int) -> None:
    """One broadcast a phase of a step, which all micro-batches read."""
    passes, lanes = tables.passes, tables.lanes
    step, phase = (index.ravel() for index in np.indices((passes.steps, passes.phases), dtype=np.int32))
    stage = np.where(phase < passes.n, phase, passes.phases - 1 - phase)
    update = step * passes.n + stage
    root = updates.device[update]
    columns = {"stage": stage, "size": parameters[stage]}
    message = build.send(
        Op.BROADCAST, Content.PARAMETERS, step=step - 1, src=root, dst=groups[stage], versions=1, **columns
    )
    later = step > 0
    build.link(updates.node[update[later] - passes.n], message[later])
    reader = passes.by_columns(np.arange(passes.tasks, dtype=np.int32).reshape(-1, passes.phases))
    each = np.repeat(np.arange(len(message)), np.repeat(np.diff(passes.first), passes.phases))
    build.link(message[each], reader)
    some, task = lanes.before(lanes.rank[reader], 1 + prefetch)
    build.link(task, message[each[some]], Edge.ROOM)
    # Every device but the owner holds a copy from its arrival to the end of its use.
    copies = np.flatnonzero(passes.task_device[reader] != root[each])
    each, reader = each[copies], reader[copies]
    of = {"device": passes.task_device[reader], "version": step[each]} | {k: c[each] for k, c in columns.items()}
    build.hold(Category.PARAMETERS, begin=end(message[each]), end=end(reader), **of)
    build.land(message[each], **of)


def _reduce(tables: Tables, updates: Updates, groups: Ints, model: Model, alone: bool, build: Builder) -> None:
    """One reduction to the owner a stage and step, as soon as all its backwards are done."""
    t, j, node = updates.step, updates.stage, updates.node
    taker, gradients, own = node, model.size("gradients"), own_gradients(tables, model)
    if not alone:
        size = gradients[j]
        taker = build.send(Op.REDUCE, Content.GRADIENT, stage=j, step=t, src=updates.device, dst=groups[j], size=size)
        build.link(taker, node)
    passes, holders = tables.passes, tables.holders
    givers = np.repeat(np.diff(passes.first), passes.n)
    build.link(passes.by_columns(passes.backward), np.repeat(taker, givers))
    row = holders.step * passes.n + holders.stage
    of = {"device": holders.device, "stage": holders.stage, "version": holders.step, "size": own[holders.stage]}
    summed = np.where(holders.device == updates.device[row], end(node[row]), end(taker[row]))
    build.hold(Category.GRADIENTS, begin=start(holders.first_task), end=summed, **of)
    give_shared(tables, model, taker, summed, build)


def _hold_owned(tables: Tables, updates: Updates, model: Model, build: Builder) -> None:
    """An owner holds each version until it replaces it, and its optimizer state always."""
    t, j, node, n = updates.step, updates.stage, updates.node, tables.passes.n
    made = np.where(t > 0, end(node - n), -1)
    parameters = model.size("parameters")[j]
    of = {"device": updates.device, "stage": j, "version": t}
    build.hold(Category.PARAMETERS, size=parameters, begin=made, end=end(node), **of)
    last = {name: column[-n:] for name, column in of.items()}
    always = np.full(n, -1)
    build.hold(Category.OPTIMIZER, size=model.size("optimizer"), begin=always, end=end(node[-n:]), **last)


def carry_state(tables: Tables, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """A stage's state moves, point to point, from the device that used it last to the one that uses it next."""
    way = _way(tables.passes)
    carried = _carried(tables.passes, updates, way)
    leave = _move(tables, updates, model, build, prefetch, way, carried)
    _hold_carried(tables, updates, model, build, way, carried, leave)


class _Way(NamedTuple):
    """The uses of all stages in one row, stage after stage, each stage's first preceded by where its state starts."""

    user: Ints  # the task, -1 at a start
    stage: Ints
    device: Ints
    at: Ints  # of each compute task, its place in this row
    starts: Ints  # of each stage, its start
    lasts: Ints  # of each stage, its last use


def _way(passes: Passes) -> _Way:
    task, first = uses(passes)
    user = np.insert(task, first, -1)
    starts = first + np.arange(passes.n)
    lasts = np.append(starts[1:], len(user)) - 1
    stage = np.repeat(np.arange(passes.n), lasts - starts + 1)
    device = np.where(user >= 0, passes.task_device[user], owner(passes, stage))
    at = np.empty(len(task), dtype=np.int64)
    at[task] = np.flatnonzero(user >= 0)
    return _Way(user, stage, device, at, starts, lasts)


class _Span(NamedTuple):
    """From which use to which something belongs to its stage's state; a row a step, a column a stage."""

    first: Ints
    last: Ints

    def leaving(self, count: int) -> Ints:
        """How many go on with the state after each use."""
        change = np.zeros(count + 1, dtype=np.int64)
        np.add.at(change, self.first.ravel(), 1)
        np.add.at(change, self.last.ravel(), -1)
        return np.cumsum(change)[:-1]


class _Carried(NamedTuple):
    """What a state carries: versions from the update that makes them to their last reader, and partial sums."""

    versions: _Span
    sums: _Span
    updated_at: Ints  # the use that each update follows


def _carried(passes: Passes, updates: Updates, way: _Way) -> _Carried:
    assert updates.anchor is not None
    updated_at = way.at[updates.anchor]
    by_update = updated_at.reshape(passes.steps, passes.n)
    last_reader = by_update.copy()  # an update reads what it replaces
    stage = np.broadcast_to(passes.tij[2], passes.device.shape).ravel()
    for version, reader in ((passes.version, passes.forward), (passes.backward_version, passes.backward)):
        np.maximum.at(last_reader, (version.ravel(), stage), way.at[reader.ravel()])
    versions = _Span(np.vstack([way.starts, by_update[:-1]]), last_reader)
    return _Carried(versions, _Span(way.at[passes.backward[passes.first[:-1]]], by_update), updated_at)


def _move(
    tables: Tables, updates: Updates, model: Model, build: Builder, prefetch: int, way: _Way, carried: _Carried
) -> Ints:
    """Send states on, link uses and updates to what comes next, and return the moment at which each use is left."""
    passes, lanes, user, count = tables.passes, tables.lanes, way.user, len(way.user)
    goes_on = np.ones(count, dtype=bool)
    goes_on[way.lasts] = False
    now = np.flatnonzero(goes_on)
    moves = now[way.device[now] != way.device[now + 1]]
    versions, sums = (span.leaving(count)[moves] for span in (carried.versions, carried.sums))
    parameters, gradients, optimizer = (
        model.size(k)[way.stage[moves]] for k in ("parameters", "gradients", "optimizer")
    )
    size = np.ones_like(versions) if model.is_unit else versions * parameters + sums * gradients + optimizer
    step = np.where(user[moves] >= 0, passes.step[user[moves] // passes.phases], -1)
    columns = {"stage": way.stage[moves], "size": size}
    src, dst = way.device[moves], way.device[moves + 1]
    message = build.send(Op.P2P, Content.STATE, step=step, src=src, dst=dst, versions=versions, **columns)
    build.land(message, device=dst, version=np.maximum(step, 0), **columns)
    build.link(message, user[moves + 1])
    some, before = lanes.before(lanes.rank[user[moves + 1]], 1 + prefetch)
    build.link(before, message[some], Edge.ROOM)

    taker = np.full(
        count, -1, dtype=np.int32
    )  # what waits for a use: the message that takes the state on, or the next use
    taker[now] = user[now + 1]
    taker[moves] = message
    waits = (taker >= 0) & (user >= 0) & (taker != user + 1)  # from phase to phase a task is waited for anyway
    build.link(user[waits], taker[waits])
    build.link(user[carried.updated_at], updates.node)
    onward = np.flatnonzero(taker[carried.updated_at] >= 0)
    build.link(updates.node[onward], taker[carried.updated_at[onward]])
    if updates.barrier is not None:
        build.link(updates.barrier, updates.node, Edge.BARRIER)
    leave = end(user)
    leave[carried.updated_at] = end(updates.node)
    leave[moves] = end(message)
    return leave


def _hold_carried(
    tables: Tables, updates: Updates, model: Model, build: Builder, way: _Way, carried: _Carried, leave: Ints
) -> None:
    """Hold versions, partial sums and optimizer states where their state is: from use to use, until they end."""
    n, user = tables.passes.n, way.user
    arrive = np.append(-1, leave[:-1])  # of a start it is never asked
    node = end(updates.node).reshape(tables.passes.steps, n)
    versions, sums = carried.versions, carried.sums
    always = _Span(way.starts[None], way.lasts[None])
    initially = np.full((1, n), -1)
    read = np.where(versions.last == sums.last, node, end(user[versions.last]))
    written = node
    if model.updates_take_time:  # beside the old version, if that has readers left: there from the start of the update
        written = node - (versions.last != sums.last)
    for category, kind, span, begin, finish in (
        (Category.PARAMETERS, "parameters", versions, np.vstack([initially, written[:-1]]), read),
        (Category.GRADIENTS, "gradients", sums, start(user[sums.first]), node),
        (Category.OPTIMIZER, "optimizer", always, initially, leave[always.last]),
    ):
        first, last = span.first.ravel(), span.last.ravel()
        count = last - first + 1
        of = np.repeat(np.arange(len(count)), count)
        use = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - first, count)
        begin_at = np.where(use == first[of], begin.ravel()[of], arrive[use])
        end_at = np.where(use == last[of], finish.ravel()[of], leave[use])
        some = np.flatnonzero(begin_at != end_at)  # a state may start where it is first used
        use, of = use[some], of[some]
        columns = {"device": way.device[use], "stage": way.stage[use], "size": model.size(kind)[way.stage[use]]}
        build.hold(category, version=of // n, begin=begin_at[some], end=end_at[some], **columns)

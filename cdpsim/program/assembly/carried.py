"""A stage's whole state on its way from user to user: parameters in all versions needed, sums, optimizer state."""

from typing import NamedTuple

import numpy as np

from cdpsim.model import Model
from cdpsim.numeric.columns import Ints
from cdpsim.program import Category, Content, Op
from cdpsim.program.assembly.build import Builder, end, start
from cdpsim.program.assembly.tables import Passes, Tables
from cdpsim.program.assembly.update import Updates, pull, uses


def carry(tables: Tables, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
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
    device = np.where(user >= 0, passes.task_device[user], stage % passes.devices)
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
    pull(lanes, build, message, lanes.rank[user[moves + 1]], 1 + prefetch)

    # What waits for a use: the message that takes the state on, or the next use.
    taker = np.full(count, -1, dtype=np.int32)
    taker[now] = user[now + 1]
    taker[moves] = message
    waits = (taker >= 0) & (user >= 0) & (taker != user + 1)  # from phase to phase a task is waited for anyway
    build.link(user[waits], taker[waits])
    build.link(user[carried.updated_at], updates.node)
    onward = np.flatnonzero(taker[carried.updated_at] >= 0)
    build.link(updates.node[onward], taker[carried.updated_at[onward]])
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

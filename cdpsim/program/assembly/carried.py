"""A stage's whole state on its way from user to user: parameters in all versions needed, sums, optimizer state."""

from typing import NamedTuple

import numpy as np

from cdpsim.model import Model
from cdpsim.numeric.columns import Ints, expand_ranges
from cdpsim.program import Category, Content, Op
from cdpsim.program.assembly.build import Builder, Location, end, start
from cdpsim.program.assembly.tables import Passes
from cdpsim.program.assembly.update import Updates, pull, uses


def carry(updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """Move a stage's state, point to point, from the device that used it last to the one that uses it next."""
    route = _find_route(updates.tables.passes)
    carried = _find_carried(updates, route)
    leave = _move(updates, model, build, prefetch, route, carried)
    _hold_carried(updates, model, build, route, carried, leave)


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
    message = build.send(Op.P2P, Content.STATE, stage=stage, step=step, src=src, dst=dst, size=size, versions=versions)
    build.land(message, Location(dst, stage, np.maximum(step, 0)), size)
    build.link(message, reader)
    pull(lanes, build, message, lanes.rank[reader], 1 + prefetch)

    # The message that takes the state on waits for a use, or the next use does.
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
    updates: Updates, model: Model, build: Builder, route: _Route, carried: _Carried, leave: Ints
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
    for category, kind, span, begin, finish in (
        (Category.PARAMETERS, "parameters", versions, np.vstack([initially, written[:-1]]), read),
        (Category.GRADIENTS, "gradients", sums, start(user[sums.first]), node),
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

"""Replicated states: gradients are summed over the devices that hold a stage, new parameters go to those that read."""

import numpy as np

from cdpsim.assembly.build import Builder, end, start
from cdpsim.assembly.tables import Tables
from cdpsim.assembly.tied import own_gradients, sizes_of, sum_shared
from cdpsim.assembly.update import Updates, beside_old
from cdpsim.columns import Ints, heads, runs, sort_by
from cdpsim.model import Model
from cdpsim.program import Category, Content, Edge, Op


def all_reduce(tables: Tables, updates: Updates, model: Model, build: Builder, at_once: bool) -> None:
    """Sum each stage's gradients over its holders, of which every one updates its replica.

    Where steps flush, it waits for their last tasks of the step, or goes `at_once`, as soon as it can.
    """
    holders, node = tables.holders, updates.node
    in_step = holders.in_step
    sizes = sizes_of(tables, model)
    taker = _all_reduces(tables, updates, own_gradients(tables, model), build, at_once)
    build.link(tables.passes.last.ravel(), taker[holders.row.ravel()])
    sum_shared(tables, updates, model, build, at_once)
    if (
        not tables.passes.schedule.order.flush
    ):  # an update needs what it replaces; with a flush the next step's tasks see to it
        build.link(node[:-in_step], node[in_step:])
    if updates.barrier is not None:
        build.link(updates.barrier, node, Edge.BARRIER)
    of = {"device": holders.device, "stage": holders.stage, "version": holders.step}
    build.hold(Category.GRADIENTS, size=sizes.gradients, begin=start(holders.first_task), end=end(node), **of)
    made = np.append(np.full(in_step, -1), end(node[:-in_step]))
    if model.updates_take_time and not tables.passes.schedule.order.flush:
        made[in_step:] -= beside_old(tables, updates)[:-in_step]
    copies = build.hold(Category.PARAMETERS, size=sizes.parameters, begin=made, end=end(node), **of)
    _read(tables, updates, copies, build)
    last = {name: column[-in_step:] for name, column in of.items()}
    final, always = node[-in_step:], np.full(in_step, -1)
    build.hold(Category.OPTIMIZER, size=sizes.optimizer[-in_step:], begin=always, end=end(final), **last)


def _read(tables: Tables, updates: Updates, copies: Ints, build: Builder) -> None:
    """Let forwards wait for what they read, which the device itself has made, and hold that until it is read."""
    passes, in_step = tables.passes, tables.holders.in_step
    row = tables.holders.row % in_step
    forward, backward = passes.forward, passes.backward
    readers = [(forward, backward, passes.version)]
    if passes.rule.backward is not None:
        readers = [(forward, forward, passes.version), (backward, backward, passes.backward_version)]
    for reader, last_use, version in readers:
        update = (row + version * in_step).ravel()
        made = update >= in_step
        build.link(updates.node[update[made] - in_step], reader.ravel()[made])
        if not tables.passes.schedule.order.flush:
            build.keep(copies[update], end(last_use.ravel()))


def _all_reduces(tables: Tables, updates: Updates, gradients: Ints, build: Builder, at_once: bool) -> Ints:
    """What takes the gradients of each holder: an all-reduce where there are several, else its update itself."""
    holders, taker = tables.holders, updates.node.copy()
    first = heads(holders.step, holders.stage)
    count = np.diff(np.append(first, len(holders)))
    first, rows = first[count > 1], np.flatnonzero(np.repeat(count > 1, count))
    count = count[count > 1]
    groups = [build.group(holders.device[a : a + k]) for a, k in zip(first, count, strict=True)]
    step, stage = holders.step[first], holders.stage[first]
    message = build.send(
        Op.ALL_REDUCE,
        Content.GRADIENT,
        stage=stage,
        step=step,
        src=-1,
        dst=np.array(groups, dtype=np.int32),
        size=gradients[stage],
    )
    taker[rows] = np.repeat(message, count)
    if tables.passes.schedule.order.flush and not at_once:
        build.link(tables.lanes.last_in_step(holders.device[rows], holders.step[rows]), taker[rows], Edge.BARRIER)
    build.link(taker[rows], updates.node[rows])
    return taker


def pass_along(tables: Tables, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """Partial sums go from holder to holder, the last one updates, and the new parameters go from reader to reader."""
    _sum_gradients(tables, updates, model, build)
    _move_optimizer(tables, updates, model, build, prefetch)
    _hand_on_parameters(tables, updates, model, build, prefetch)


def _sum_gradients(tables: Tables, updates: Updates, model: Model, build: Builder) -> None:
    """Each holder sums its own micro-batches, adds what it received, and passes the sum on in micro-batch order."""
    holders, n = tables.holders, tables.passes.n
    order = sort_by(holders.step, holders.stage, holders.last)
    step, stage, device = holders.step[order], holders.stage[order], holders.device[order]
    final = np.append(heads(step, stage)[1:], len(order)) - 1
    sends = np.ones(len(order), dtype=bool)
    sends[final] = False
    sends = np.flatnonzero(sends)
    size = model.size("gradients")[stage]
    message = build.send(
        Op.P2P,
        Content.GRADIENT,
        stage=stage[sends],
        step=step[sends],
        src=device[sends],
        dst=device[sends + 1],
        size=size[sends],
    )
    taker = np.empty(len(order), dtype=np.int32)
    taker[sends] = message
    taker[final] = updates.node[step[final] * n + stage[final]]
    build.link(message, taker[sends + 1])
    taker_of_row = np.empty_like(taker)
    taker_of_row[order] = taker
    build.link(tables.passes.last.ravel(), taker_of_row[holders.row.ravel()])
    if updates.barrier is not None:
        build.link(updates.barrier, updates.node, Edge.BARRIER)
    columns = {"device": device, "stage": stage, "version": step, "size": size}
    build.hold(Category.GRADIENTS, begin=start(holders.first_task[order]), end=end(taker), **columns)
    arriving = {name: column[sends + (name == "device")] for name, column in columns.items()}
    build.land(message, until=start(taker[sends + 1]), **arriving)


def _move_optimizer(tables: Tables, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """The optimizer state follows the updates of its stage from device to device."""
    n, node = tables.passes.n, updates.node
    moved, size = model.moved_optimizer[updates.stage], model.size("optimizer")[updates.stage]
    now = np.arange(len(updates) - n)
    travels = (updates.device[now] != updates.device[now + n]) & (moved[now] > 0)
    stays, goes = now[~travels], now[travels]
    message = build.send(
        Op.P2P,
        Content.STATE,
        stage=updates.stage[goes],
        step=updates.step[goes],
        src=updates.device[goes],
        dst=updates.device[goes + n],
        size=moved[goes],
    )
    build.link(node[goes], message)
    build.link(message, node[goes + n])
    some, task = tables.lanes.before(updates.place(tables)[goes + n], prefetch)
    build.link(task, message[some], Edge.ROOM)
    # A state is on its device from its arrival, or from where it was before, until it leaves or is last used.
    arrival, leaving = np.full(len(updates), -1), end(node)
    arrival[stays + n] = end(node[stays])
    arrival[goes + n] = end(message)
    leaving[goes] = end(message)
    columns = {"stage": updates.stage, "version": updates.step}
    build.hold(Category.OPTIMIZER, device=updates.device, size=size, begin=arrival, end=leaving, **columns)
    arriving = {name: column[goes] for name, column in columns.items()}
    build.land(message, device=updates.device[goes + n], size=size[goes], **arriving)


def _readers(tables: Tables, updates: Updates) -> tuple[Ints, ...]:
    """Who needs a version where: rows of version, stage, device, order, node, last use, place, tasks ahead.

    A forward reads for its backward too, unless the rule has another version for that; an update reads what it
    replaces; a maker holds what it makes, read or not. The order is that in which readers hand the version on. `place`
    is in the lanes, of the reader or of the task that an update follows, and `ahead` says how many tasks before that
    the version is pulled.
    """
    assert updates.anchor is not None
    table = tables.passes
    n, position = table.n, table.position
    never = 2 * int(position.max()) + 2
    j = np.broadcast_to(table.tij[2], table.device.shape).ravel()
    forward, backward = table.forward.ravel(), table.backward.ravel()
    follows = updates.anchor if updates.barrier is None else updates.barrier
    # The maker has the version: that it updates it later does not change where in the chain it reads.
    made_here = np.append(np.zeros(n, dtype=bool), updates.device[n:] == updates.device[:-n])
    update_order = np.where(made_here, never, 2 * position[follows] + 1)
    make = np.arange(len(updates) - n)
    nobody = np.full(len(make), -1, dtype=np.int32)
    apart = table.rule.backward is not None
    passes = [(table.version.ravel(), forward, forward if apart else backward)]
    passes += [(table.backward_version.ravel(), backward, backward)] * apart
    version, reader, last_use = (np.concatenate(column) for column in zip(*passes, strict=True))
    j, device = (np.tile(column, len(passes)) for column in (j, table.device.ravel()))
    rows = (
        (version, updates.step, updates.step[make] + 1),
        (j, updates.stage, updates.stage[make]),
        (device, updates.device, updates.device[make]),
        (2 * position[reader], update_order, np.full_like(nobody, never)),
        (reader, updates.node, nobody),
        (end(last_use), end(updates.node), end(updates.node[make])),
        (tables.lanes.rank[reader], updates.place(tables), nobody),
        (np.ones_like(reader), np.zeros_like(updates.step), nobody),
    )
    columns = [np.concatenate(parts) for parts in rows]
    order = sort_by(*columns[:4])
    return tuple(column[order] for column in columns)


def _hand_on_parameters(tables: Tables, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """A new version goes from its maker to the first reader and from reader to reader; a device reads it once."""
    n = tables.passes.n
    version, stage, device, order, node, last_use, place, ahead = _readers(tables, updates)
    copy_head = heads(version, stage, device)  # a copy: one version of one stage on one device
    copy_of = runs(copy_head, len(version))
    v, j, d = version[copy_head], stage[copy_head], device[copy_head]
    maker_node = updates.node[np.maximum(v - 1, 0) * n + j]
    is_made = (v > 0) & (d == updates.device[maker_node - updates.first_node])
    provider = np.where(is_made, maker_node, -1)

    chain = sort_by(v, j, order[copy_head])
    follows = np.zeros(len(chain), dtype=bool)  # in the chain, comes after another reader of its version
    follows[1:] = (v[chain][1:] == v[chain][:-1]) & (j[chain][1:] == j[chain][:-1])
    maker = np.full((tables.passes.steps + 1) * n, -1, dtype=np.int32)
    maker[v[is_made] * n + j[is_made]] = np.flatnonzero(is_made)
    source = np.where(follows, np.roll(chain, 1), maker[v[chain] * n + j[chain]])
    needs = (v[chain] > 0) & ~is_made[chain]
    receiver, sender = chain[needs], source[needs]

    size = model.size("parameters")[j]
    arriving = {"stage": j[receiver], "version": v[receiver], "size": size[receiver]}
    of = {"stage": arriving["stage"], "step": arriving["version"] - 1, "size": arriving["size"]}
    message = build.send(Op.P2P, Content.PARAMETERS, src=d[sender], dst=d[receiver], versions=1, **of)
    provider[receiver] = message
    build.link(provider[sender], message)
    first = copy_head[receiver]
    some, task = tables.lanes.before(place[first], ahead[first] + prefetch)
    build.link(task, message[some], Edge.ROOM)
    reads = np.flatnonzero((node >= 0) & (provider[copy_of] >= 0))
    build.link(provider[copy_of[reads]], node[reads])

    begin = end(provider)
    if model.updates_take_time:  # what is written beside the old version is there from the start of the update
        begin[is_made] -= beside_old(tables, updates)[provider[is_made] - updates.first_node]
    columns = {"device": d, "stage": j, "version": v, "size": size}
    copies = build.hold(Category.PARAMETERS, begin=begin, end=last_use[copy_head], **columns)
    others = np.flatnonzero(np.diff(copy_of, prepend=-1) == 0)
    build.keep(copies[copy_of[others]], last_use[others])
    build.keep(copies[sender], end(message))
    build.land(message, device=d[receiver], **arriving)

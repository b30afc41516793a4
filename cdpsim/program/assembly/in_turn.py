"""Exchanges between holders that come to a stage one after another: messages from one to the next."""

from typing import NamedTuple

import numpy as np

from cdpsim.model import Model
from cdpsim.numeric.columns import Flags, Ints, group_numbers, group_starts, sort_by
from cdpsim.program import Category, Content, EdgeKind, Op
from cdpsim.program.assembly.build import Builder, Location, end, start
from cdpsim.program.assembly.carried import carry
from cdpsim.program.assembly.update import Updates, base_is_still_needed, pull


def in_turn(updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """Pass sums, optimizer states and new versions along, or carry all of a stage from user to user."""
    if updates.barrier is not None:
        build.link(updates.barrier, updates.node, EdgeKind.BARRIER)
    if updates.tables.passes.schedule.state.travels:
        carry(updates, model, build, prefetch)
        return
    _sum_gradients(updates, model, build)
    _move_optimizer(updates, model, build, prefetch)
    _hand_on_parameters(updates, model, build, prefetch)


def _sum_gradients(updates: Updates, model: Model, build: Builder) -> None:
    """Let each holder sum its own micro-batches, add what it received, and pass the sum on in micro-batch order."""
    passes, holders = updates.tables.passes, updates.tables.holders
    order = sort_by(holders.step, holders.stage, holders.last)
    where = holders.where.take(order)
    device, stage, step = where
    final = np.append(group_starts(step, stage)[1:], len(order)) - 1
    sends = np.delete(np.arange(len(order)), final)
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
    taker[final] = updates.node[step[final] * passes.n + stage[final]]
    build.link(message, taker[sends + 1])
    taker_of_row = np.empty_like(taker)
    taker_of_row[order] = taker
    build.link(passes.last.ravel(), taker_of_row[holders.row.ravel()])
    build.hold(Category.GRADIENTS, where, size, start(holders.first_task[order]), end(taker))
    arriving = where.take(sends)._replace(device=device[sends + 1])
    build.land(message, arriving, size[sends], start(taker[sends + 1]))


def _move_optimizer(updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """Let the optimizer state follow the updates of its stage from device to device."""
    n, node, where = updates.in_step, updates.node, Location(updates.device, updates.stage, updates.step)
    moved, size = model.optimizer_as_message[where.stage], model.size("optimizer")[where.stage]
    now = np.arange(len(updates) - n)
    travels = (where.device[now] != where.device[now + n]) & (moved[now] > 0)
    stays, goes = now[~travels], now[travels]
    device, stage, step = where.take(goes)
    receiver = where.device[goes + n]
    message = build.send(Op.P2P, Content.STATE, stage=stage, step=step, src=device, dst=receiver, size=moved[goes])
    build.link(node[goes], message)
    build.link(message, node[goes + n])
    pull(updates.tables.lanes, build, message, updates.lane_place[goes + n], prefetch)
    # A state is on its device from its arrival, or from where it was before, until it leaves or is last used.
    arrival, leaving = np.full(len(updates), -1), end(node)
    arrival[stays + n] = end(node[stays])
    arrival[goes + n] = leaving[goes] = end(message)
    build.hold(Category.OPTIMIZER, where, size, arrival, leaving)
    build.land(message, Location(receiver, stage, step), size[goes])


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
    provider = np.where(is_made, updates.node[made_by], -1)

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
    of = {"stage": arriving.stage, "step": arriving.version - 1, "size": size[receiver]}
    message = build.send(Op.P2P, Content.PARAMETERS, src=d[sender], dst=arriving.device, versions=1, **of)
    provider[receiver] = message
    build.link(provider[sender], message)
    reader = first[receiver]
    pull(updates.tables.lanes, build, message, use.place[reader], use.ahead[reader] + prefetch)
    reads = np.flatnonzero(use.waits & (provider[copy_of] >= 0))
    build.link(provider[copy_of[reads]], use.node[reads])

    begin = end(provider)
    if model.updates_take_time:  # what is written beside the old version is there from the start of the update
        begin[is_made] -= base_is_still_needed(updates)[made_by[is_made]]
    copies = build.hold(Category.PARAMETERS, where, size, begin, use.until[first])
    others = np.flatnonzero(np.diff(copy_of, prepend=-1) == 0)
    build.keep(copies[copy_of[others]], use.until[others])
    build.keep(copies[sender], end(message))
    build.land(message, arriving, size[receiver])

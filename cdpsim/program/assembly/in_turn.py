"""What the holders of a stage exchange where they come to it one after another: messages from one to the next."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdpsim.model import Model
from cdpsim.numeric.columns import Ints, group_numbers, group_starts, sort_by
from cdpsim.program import Category, Content, EdgeKind, Op
from cdpsim.program.assembly.build import Builder, end, start
from cdpsim.program.assembly.carried import carry
from cdpsim.program.assembly.tables import Tables
from cdpsim.program.assembly.update import Updates, beside_old, pull


def in_turn(tables: Tables, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """Pass sums, optimizer states and new versions along, or carry all of a stage from user to user."""
    if updates.barrier is not None:
        build.link(updates.barrier, updates.node, EdgeKind.BARRIER)
    if tables.passes.schedule.state.travels:
        carry(tables, updates, model, build, prefetch)
        return
    _sum_gradients(tables, updates, model, build)
    _move_optimizer(tables, updates, model, build, prefetch)
    _hand_on_parameters(tables, updates, model, build, prefetch)


def _sum_gradients(tables: Tables, updates: Updates, model: Model, build: Builder) -> None:
    """Each holder sums its own micro-batches, adds what it received, and passes the sum on in micro-batch order."""
    holders, n = tables.holders, tables.passes.n
    order = sort_by(holders.step, holders.stage, holders.last)
    step, stage, device = holders.step[order], holders.stage[order], holders.device[order]
    final = np.append(group_starts(step, stage)[1:], len(order)) - 1
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
    columns = {"device": device, "stage": stage, "version": step, "size": size}
    build.hold(Category.GRADIENTS, begin=start(holders.first_task[order]), end=end(taker), **columns)
    arriving = {name: column[sends + (name == "device")] for name, column in columns.items()}
    build.land(message, until=start(taker[sends + 1]), **arriving)


def _move_optimizer(tables: Tables, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """The optimizer state follows the updates of its stage from device to device."""
    n, node = tables.passes.n, updates.node
    moved, size = model.optimizer_as_message[updates.stage], model.size("optimizer")[updates.stage]
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
    pull(tables.lanes, build, message, updates.place(tables)[goes + n], prefetch)
    # A state is on its device from its arrival, or from where it was before, until it leaves or is last used.
    arrival, leaving = np.full(len(updates), -1), end(node)
    arrival[stays + n] = end(node[stays])
    arrival[goes + n] = end(message)
    leaving[goes] = end(message)
    columns = {"stage": updates.stage, "version": updates.step}
    build.hold(Category.OPTIMIZER, device=updates.device, size=size, begin=arrival, end=leaving, **columns)
    arriving = {name: column[goes] for name, column in columns.items()}
    build.land(message, device=updates.device[goes + n], size=size[goes], **arriving)


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
    waits: NDArray[np.bool_]  # whether the node waits for the version: all but its maker do
    until: Ints  # the moment until which the version is needed
    place: Ints  # in the lanes, of the task that reads, or that the update follows
    ahead: Ints  # how many tasks before that place there is room for the version

    def first_of_copies(self) -> Ints:
        """The first row of each copy: of a version of a stage on a device."""
        return group_starts(self.version, self.stage, self.device)


def _uses(tables: Tables, updates: Updates) -> _Uses:
    """Gather readers, updates that replace versions, and makers."""
    passes, n, position = tables.passes, tables.passes.n, tables.passes.position
    behind = 2 * int(position.max()) + 2
    forward, backward, last = (task.ravel() for task in (passes.forward, passes.backward, passes.last))
    apart = passes.rule.backward is not None
    kinds = [(passes.version.ravel(), forward, forward if apart else last)]
    kinds += [(passes.backward_version.ravel(), backward, last)] * apart
    version, reader, last_use = (np.concatenate(column) for column in zip(*kinds, strict=True))
    stage = np.broadcast_to(passes.tij[2], passes.device.shape).ravel()
    # Who replaces what it has made itself does so behind all readers, wherever they stand.
    made_here = np.append(np.zeros(n, dtype=bool), updates.device[n:] == updates.device[:-n])
    replaces = np.where(made_here, behind, 2 * updates.position(tables) + 1)
    made, place = slice(len(updates) - n), updates.place(tables)
    count = len(reader), len(updates), len(updates) - n
    rows = (
        (version, updates.step, updates.step[made] + 1),
        (np.tile(stage, len(kinds)), updates.stage, updates.stage[made]),
        (np.tile(passes.device.ravel(), len(kinds)), updates.device, updates.device[made]),
        (2 * position[reader], replaces, np.full(count[2], behind)),
        (reader, updates.node, updates.node[made]),
        (end(last_use), end(updates.node), end(updates.node[made])),
        (tables.lanes.rank[reader], place, place[made]),
    )
    columns = [np.concatenate(parts) for parts in rows]
    columns.insert(5, np.repeat([True, True, False], count))
    columns.append(np.repeat([1, 0, 0], count))
    order = sort_by(*columns[:4])
    return _Uses(*(column[order] for column in columns))


def _hand_on_parameters(tables: Tables, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """A new version goes from its maker to the first reader and from reader to reader; a device reads it once."""
    n, use = tables.passes.n, _uses(tables, updates)
    first = use.first_of_copies()
    copy_of = group_numbers(first, len(use.version))
    v, j, d = use.version[first], use.stage[first], use.device[first]
    maker_node = updates.node[np.maximum(v - 1, 0) * n + j]
    is_made = (v > 0) & (d == updates.device[maker_node - updates.first_node])
    provider = np.where(is_made, maker_node, -1)

    chain = sort_by(v, j, use.turn[first])
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
    reader = first[receiver]
    pull(tables.lanes, build, message, use.place[reader], use.ahead[reader] + prefetch)
    reads = np.flatnonzero(use.waits & (provider[copy_of] >= 0))
    build.link(provider[copy_of[reads]], use.node[reads])

    begin = end(provider)
    if model.updates_take_time:  # what is written beside the old version is there from the start of the update
        begin[is_made] -= beside_old(tables, updates)[provider[is_made] - updates.first_node]
    columns = {"device": d, "stage": j, "version": v, "size": size}
    copies = build.hold(Category.PARAMETERS, begin=begin, end=use.until[first], **columns)
    others = np.flatnonzero(np.diff(copy_of, prepend=-1) == 0)
    build.keep(copies[copy_of[others]], use.until[others])
    build.keep(copies[sender], end(message))
    build.land(message, device=d[receiver], **arriving)

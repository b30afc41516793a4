"""Parts and queues: the time that messages take of their devices, and the order in which data ranks send them.

A *part* is the time of one device in one message. With overlap "full" there are none. With "none" a part stands in the
device's lane, between tasks. With "stream" it stands beside the lane: what is sent in one row, what is received in
another, each in the lane's order.

    end of the message     where its part stands               how long
    sender                 behind the task that made it        the message's time
    receiver               before the task that reads it       the same, and not over before the message is there
    member of a collective as a sender's if it gives something, else as a receiver's

Neither end waits for the other. A message begins no earlier than its sender's part; what stands behind a receiver's
part waits for that part and for the message. So new edges close no cycle: a sender's part waits for nothing later than
the task that it stands behind, and a receiver's for nothing that its reader does not wait for. Messages that take no
time slow no run. The overlap "none" has every edge that "stream" has.

A *queue* is the messages of data ranks on one link, one after another under any overlap: each waits for the one before.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cdpsim.cluster.topology import FULL, NONE
from cdpsim.numeric.columns import Flags, Ints, expand_ranges, group_starts, matching_pairs, sort_by
from cdpsim.numeric.paths import lane_edges, longest_paths, successors
from cdpsim.program import EdgeKind, Op, Parts, Program, Stream

_AT_HEAD, _RECEIVES, _TASK, _SENDS = range(4)  # the nodes at one place of a lane, in this order

Pairs = tuple[Ints, Ints]  # nodes: (before, after)


def queue_in_streams(program: Program) -> Program:
    """Let messages of a queue go one after another.

    Gathers and reductions share a queue; sums across groups of ranks, hosts and disks have their own. All ranks have
    the same order: by the last task before a message; after one task, sums before gathers; gathers by their first
    readers. Updates may stand among them. What hosts send takes no time of devices.
    """
    node, device, stream = _queued(program)
    if not len(node):
        return program
    link = _LINKS[stream]
    order = sort_by(device, link, _queue_places(program)[node])
    node, device, link = node[order], device[order], link[order]
    follows = np.flatnonzero((device[1:] == device[:-1]) & (link[1:] == link[:-1]))
    pairs = np.unique(node[follows].astype(np.int64) * program.nodes + node[follows + 1])
    return program.with_edges(*np.divmod(pairs, program.nodes), EdgeKind.STREAM)


_LINKS = np.array([0, 0, 1, 2, 3])  # of each stream


def _queued(program: Program) -> tuple[Ints, Ints, Ints]:
    """Return the nodes that go in streams, each with each of its devices and its stream there."""
    messages, first = program.messages, len(program.tasks)
    single = np.flatnonzero(messages.stream >= Stream.HOST)
    together = np.flatnonzero((messages.stream >= 0) & (messages.stream < Stream.HOST))
    members = [program.groups[group] for group in messages.dst[together].tolist()]
    row = np.append(single, np.repeat(together, np.array([*map(len, members)], dtype=np.int64)))
    device = np.concatenate([messages.src[single], *members])
    node, stream = first + row, messages.stream[row]
    if program.state.updates_in_stream:
        updates = np.arange(program.compute, first)
        node, device = np.append(node, updates), np.append(device, program.tasks.device[updates])
        stream = np.append(stream, np.full(len(updates), Stream.REDUCE))
    return node, device, stream


def _queue_places(program: Program) -> Ints:
    """Return the place of each node in the one order that all queues follow."""
    (turn, read), (gathers, across) = _turns(program), np.zeros((2, program.nodes), dtype=np.int8)
    for flags, stream in ((gathers, Stream.GATHER), (across, Stream.ACROSS)):
        flags[len(program.tasks) :] = program.messages.stream == stream
    places = np.empty(program.nodes, dtype=np.int64)
    # A sum across groups comes after the same task as those inside, and so before a gather after that.
    places[sort_by(turn - across, gathers, across, read)] = np.arange(program.nodes)
    return places


def _turns(program: Program) -> tuple[Ints, Ints]:
    """Return when each node begins, and its first reader, if tasks take equally long, and far longer than other nodes.

    So no node has an earlier turn than what it waits for, on any device.
    """
    duration = np.ones(program.nodes, dtype=np.int64)
    duration[: program.compute] = _AFTER
    turn, _, _ = longest_paths(*program.waits(), duration, np.zeros_like(duration))
    read, before, after = np.full_like(turn, _NEVER), program.edges.before, program.edges.after
    to_tasks = after < program.compute
    np.minimum.at(read, before[to_tasks], turn[after[to_tasks]])
    return turn, read


_AFTER, _NEVER = 2**20, 2**62


class Endpoints(NamedTuple):
    """Messages, as nodes, with each of their devices, and whether that gives something to the message."""

    message: Ints
    device: Ints
    sends: Flags


class PartOrder(NamedTuple):
    """Parts in the order of lanes: places are those of `lane_tasks`, or what comes before the first of a lane."""

    ends: Endpoints
    place: Ints
    at: Ints  # whether it stands at the head of the lane, before the task of its place, or behind it


def occupy_streams(program: Program, overlaps: Sequence[str], whole: Program, origin: Ints, channel: Ints) -> Program:
    """Let messages take the lanes and streams of their devices; `overlaps` has a word for each device.

    `whole` is the program without queues and with each collective in one piece, `origin` the node there of each node,
    and `channel` that of each message in its collective.
    """
    shared, alone = np.array(overlaps) != FULL, np.array(overlaps) == NONE
    if not shared.any():
        return program
    order, first = order_parts(whole, find_endpoints(whole, shared)), program.nodes
    rows = _in_lanes(whole, order, first, alone), *_in_streams(whole, order, first, ~alone)
    before, after = (np.concatenate(ends) for ends in zip(*rows, strict=True))
    pieces = find_endpoints(program, shared)
    row, part = matching_pairs((origin[pieces.message], pieces.device), (order.ends.message, order.ends.device))
    message, sends = pieces.message[row], pieces.sends[row]
    gives = order.ends.sends
    waits = _with_messages(before - first, after - first, gives, part, message)
    arrived = _with_messages(after - first, before - first, ~gives, part[~sends], message[~sends])
    linked = program.with_edges(
        np.concatenate([before, first + waits[0], arrived[1]]),
        np.concatenate([after, waits[1], first + arrived[0]]),
        EdgeKind.STREAM,
    )
    return replace(linked, parts=_make_parts(whole, order, part, message - len(program.tasks), sends, channel))


def find_endpoints(program: Program, chosen: Flags) -> Endpoints:
    """Return all messages with those of their devices that are chosen."""
    messages, first = program.messages, len(program.tasks)
    between = messages.stream < Stream.HOST
    single, together = np.flatnonzero((messages.op == Op.P2P) & between), np.flatnonzero(messages.op != Op.P2P)
    members = [program.groups[group] for group in messages.dst[together].tolist()]
    message = np.concatenate([single, single, np.repeat(together, np.array([*map(len, members)], dtype=np.int64))])
    device = np.concatenate([messages.src[single], messages.dst[single], *members]).astype(np.int64)
    to_all = ~np.isin(messages.op[message], (Op.P2P, Op.BROADCAST))
    rows = chosen[device]
    return Endpoints(first + message[rows], device[rows], (to_all | (messages.src[message] == device))[rows])


def order_parts(program: Program, ends: Endpoints) -> PartOrder:
    """Place each part behind the task that made its message, or before the one that reads it, and sort parts.

    A device that passes a message on has its part behind the nearest task before. Parts behind one task keep the order
    of queues. A message that no later task of a device needs, since the run ends, has no part there. The `program` has
    no queues, whose edges tell nothing of what made a message.
    """
    forth = program.edges.before, program.edges.after
    place, away = (np.zeros(len(ends.message), dtype=np.int64) for _ in range(2))
    for rows, edges, last in ((ends.sends, forth[::-1], True), (~ends.sends, forth, False)):
        place[rows], away[rows] = _nearest(program, edges, ends.message[rows], ends.device[rows], last=last)
    at = np.where(ends.sends, _SENDS, _RECEIVES)
    new = ends.sends & (place < 0)  # what was there at the start
    lanes, head = program.lane_start[:-1][::-1], np.zeros(program.devices, dtype=np.int64)
    head[program.tasks.device[program.lane_tasks[lanes]]] = lanes  # the place at which each device's first lane begins
    place[new], at[new] = head[ends.device[new]], _AT_HEAD
    away[~ends.sends] *= -1  # what others hand on comes before what is read as it came
    row, queued = ends.message - len(program.tasks), np.zeros(len(ends.message), dtype=np.int64)
    together, in_queue = program.messages.op[row] != Op.P2P, program.messages.stream[row] >= 0
    if in_queue.any():
        away[in_queue], queued[in_queue] = 1, _queue_places(program)[ends.message[in_queue]]
    order = sort_by(place + 1, at, away - away.min(initial=0), together, queued, ends.message)
    order = order[place[order] >= 0]
    return PartOrder(Endpoints(ends.message[order], ends.device[order], ends.sends[order]), place[order], at[order])


def _nearest(program: Program, edges: Pairs, message: Ints, device: Ints, *, last: bool) -> Pairs:
    """Find the nearest tasks of those devices that edges lead to, through nodes that are no compute tasks.

    Return their places, of several as near the last or the first, -1 where there is none; and how many edges lead
    there.
    """
    _, first, reach = successors(*edges, program.nodes)
    place, runs_on = (np.full(program.nodes, -1, dtype=np.int64) for _ in range(2))
    place[program.lane_tasks] = np.arange(len(program.lane_tasks))
    runs_on[program.lane_tasks] = program.tasks.device[program.lane_tasks]
    sign = 1 if last else -1
    unknown = np.iinfo(np.int64).min
    nearest, away = np.full(len(message), unknown), np.zeros(len(message), dtype=np.int64)
    row, node = np.arange(len(message)), message
    for steps in range(1, program.nodes + 1):
        which, at = expand_ranges(first[node], first[node + 1])
        row, node = row[which], reach[at]
        mine = runs_on[node] == device[row]
        np.maximum.at(nearest, row[mine], sign * place[node[mine]])
        away[row[mine]] = steps
        on = (node >= program.compute) & (nearest[row] == unknown)
        reached = np.sort(row[on] * np.int64(program.nodes) + node[on])
        row, node = np.divmod(reached[group_starts(reached)], program.nodes)
        if not len(row):
            break
    return np.where(nearest == unknown, -1, sign * nearest), away


def _in_lanes(program: Program, order: PartOrder, first: int, alone: Flags) -> Pairs:
    """Link parts and tasks to the next ones in lanes of devices without overlap; parts are nodes from `first` on."""
    task = program.lane_tasks
    here, place = np.flatnonzero(alone[order.ends.device]), np.flatnonzero(alone[program.tasks.device[task]])
    rows = merge_with_tasks(order, here, place)
    node = np.concatenate([first + here, task[place]])[rows]
    lane = program.lane_numbers[np.concatenate([order.place[here], place])[rows]]
    before, after = lane_edges(node, np.append(group_starts(lane), len(lane)))
    new = (before >= first) | (after >= first)
    return before[new], after[new]


def merge_with_tasks(order: PartOrder, parts: Ints, places: Ints) -> Ints:
    """Sort some parts, and tasks at some places, by the order of lanes; parts are the first rows, tasks the others."""
    key = np.concatenate([4 * order.place[parts] + order.at[parts], 4 * places + _TASK])
    return np.argsort(key, kind="stable")


def _in_streams(program: Program, order: PartOrder, first: int, beside: Flags) -> list[Pairs]:
    """Link parts to the next ones in streams of devices, and to the tasks before or behind them."""
    lane, task, pairs = program.lane_numbers[order.place], program.lane_tasks[order.place], []
    for sends in (True, False):
        rows = np.flatnonzero(beside[order.ends.device] & (order.ends.sends == sends))
        pairs.append(lane_edges(first + rows, np.append(group_starts(lane[rows]), len(rows))))
        rows = rows[order.at[rows] != _AT_HEAD]
        pairs.append((task[rows], first + rows) if sends else (first + rows, task[rows]))
    return pairs


def _with_messages(parts: Ints, others: Ints, chosen: Flags, part: Ints, message: Ints) -> Pairs:
    """Return the first part of each pair of chosen ones with the messages of the other; -1 and below are no parts."""
    both = np.flatnonzero((parts >= 0) & (others >= 0))
    both = both[chosen[parts[both]] & chosen[others[both]]]
    row, which = matching_pairs((part,), (others[both],))
    return parts[both[which]], message[row]


def _make_parts(program: Program, order: PartOrder, part: Ints, message: Ints, sends: Flags, channel: Ints) -> Parts:
    """Let each part take the time of what its device receives, or of what it sends where that is more."""
    sent, received = (np.bincount(part[rows], minlength=len(order.place)) for rows in (sends, ~sends))
    mine = sends == (sent > received)[part]
    step = program.tasks.step[program.lane_tasks[order.place]]
    ends = (column.astype(np.int32) for column in (part[mine], message[mine], channel[message[mine]]))
    return Parts(order.ends.device.astype(np.int32), step, order.ends.sends, *ends)

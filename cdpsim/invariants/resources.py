"""Laws of resources: room for a message, the stream of a device, the host of a device.

They follow from the request: how early messages are pulled, whether both ends of messages meet, and overlap. The
definitions of streams and of rendezvous (`cdpsim.program.streams`) say in which order messages take a lane or a stream.
That order is found here, too, but from the needs that are recounted, in place of the program's own dependencies.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdpsim.cluster.topology import FULL, NONE
from cdpsim.errors import RequestError
from cdpsim.invariants import exchanges, gradients, round_laws, task_laws
from cdpsim.invariants.recount import NO_NEEDS, Needs, Recount, combine
from cdpsim.numeric.columns import Flags, Ints, Times, group_numbers, group_starts, matching_pairs, row_numbers
from cdpsim.numeric.disturbances import never
from cdpsim.program import NO_PARTS, Content, EdgeKind, Edges, Kind, Op, Program
from cdpsim.program.streams import (
    PartOrder,
    find_endpoints,
    merge_with_tasks,
    order_parts,
    posting_turns,
    queue_in_streams,
)
from cdpsim.schedules.state import Placed, When

_TIME_ERROR = 1e-9  # of times, after many sums


def _room_ahead(run: Recount, message: Ints, place: Ints, lane: Ints) -> Needs:
    """Return the needs of messages for the task that is one prefetch before a place; `lane` is a place in its lane."""
    task = place - 1 - min(run.request.prefetch, run.program.compute)
    waits = np.flatnonzero(task >= run.lanes.head[lane])
    return Needs(run.lanes.order[task[waits]], message[waits])


def _followed_places(run: Recount) -> Ints:
    """Return, for each update, the place in its lane of the task that it follows."""
    program, lanes = run.program, run.lanes
    if len(program.lane_tasks) > program.compute:
        inner = program.lane_tasks < program.compute
        follows = np.empty(len(program.tasks), dtype=np.int64)
        follows[program.lane_tasks] = np.cumsum(inner) - 1
        return follows[run.updates]
    place = lanes.place[run.anchors]
    if not program.barrier or run.position is None:
        return place
    span = np.int64(run.position.max()) + 1
    key = np.maximum.accumulate(lanes.head * span + run.position[lanes.order])
    return np.searchsorted(key, lanes.head[place] * span + run.position[run.barriers], side="right") - 1


def _pull_needs(run: Recount) -> Needs:
    """Return the needs of versions and optimizer states, pulled for their first reader, which may be an update."""
    program, tasks, updates, lanes = run.collapsed.program, run.program.tasks, run.updates, run.lanes
    messages = program.messages
    task = np.arange(program.compute) if program.versions_differ else program.tasks_of_kind(Kind.F).ravel()
    follows, reader = _followed_places(run), np.concatenate([task, updates])
    place, lane = (np.concatenate([lanes.place[task], last]) for last in (follows + 1, follows))
    reads = np.concatenate([tasks.version[task], program.base])
    updated = np.concatenate([np.full(len(task), -1), tasks.step[updates]])  # tasks read no optimizer state
    needs = []
    for content, version in ((Content.PARAMETERS, reads), (Content.STATE, updated)):
        rows = np.flatnonzero((messages.content == content) & (messages.op == Op.P2P))
        brought = messages.stage[rows], messages.step[rows] + 1, messages.dst[rows]
        which, row = matching_pairs((tasks.stage[reader], version, tasks.device[reader]), brought)
        earliest = np.full(len(rows), len(lanes.order) + 1)
        np.minimum.at(earliest, row, place[which])
        in_lane = np.zeros(len(rows), dtype=np.int64)
        in_lane[row] = lane[which]
        read = np.unique(row)
        needs.append(_room_ahead(run, len(tasks) + rows[read], earliest[read], in_lane[read]))
    return combine(*needs)


def _deferred_needs(run: Recount) -> Needs:
    """Return the needs of boundaries in Megatron's rendezvous: a receive comes after the task before its reader."""
    message, reader = task_laws.boundary_readers(run.collapsed.program)
    earlier, later = run.program.lane_edges
    before, row = matching_pairs((later,), (reader,))
    return Needs(earlier[before], message[row])


def room_needs(run: Recount) -> Needs:
    """Return the needs of messages for room at their receivers."""
    deferred = _deferred_needs(run) if run.request.meeting(run.program.devices) == "megatron" else NO_NEEDS
    if run.travels:
        path = task_laws.state_path(run)
        rows = np.flatnonzero(path.message >= 0)
        pulled = Needs(path.message[rows], path.use[rows])
    elif run.handed_out:
        pulled = task_laws.broadcast_needs(run)
    elif run.gathers:
        return combine(deferred, exchanges.needs_of_early_gathers(run), exchanges.pace_needs(run))
    else:
        return combine(deferred, exchanges.pace_needs(run)) if run.together else combine(deferred, _pull_needs(run))
    place = run.lanes.place[pulled.after]  # messages are pulled for the tasks that need them
    return combine(deferred, _room_ahead(run, pulled.before, place, place))


def host_needs(run: Recount) -> Needs:
    """Return the needs of hosts' updates for each other, in the order of steps or of the tasks that they follow.

    Where sums do not wait for the end of a step, these are the last that give each update a gradient. The stage that
    counts a shared tensor comes before the others that a device has of it.
    """
    program, tasks, updates = run.program, run.program.tasks, run.updates
    elsewhere = program.state.updates_in_stream or len(program.lane_tasks) > program.compute
    if elsewhere or not run.costs.duration[updates].any():
        return NO_NEEDS
    made = program.state.reduce is not When.END and program.state.optimizer is not Placed.OWNED and run.together
    if program.averaged is not None or ((program.together or program.barrier) and not made):
        follows = tasks.step[updates]
    else:  # of several lanes, places tell no order; a list has one
        follows = (run.lanes.place if run.position is None else run.position)[run.anchors]
    for tie in run.shared if made else ():
        rows = np.flatnonzero(np.isin(tasks.stage[updates], tie.stages))
        rows = rows[np.lexsort((tasks.stage[updates[rows]], tasks.device[updates[rows]], tasks.step[updates[rows]]))]
        first = group_starts(tasks.step[updates[rows]], tasks.device[updates[rows]])
        counted = rows[first][group_numbers(first, len(rows))]
        follows[rows] = np.maximum(follows[rows], follows[counted])
    order = updates[np.lexsort((tasks.stage[updates], tasks.version[updates], follows, tasks.device[updates]))]
    same = tasks.device[order[1:]] == tasks.device[order[:-1]]
    return Needs(order[:-1][same], order[1:][same])


def _value_needs(run: Recount) -> Needs:
    """Return all needs but for those of streams and of the rounds of collectives."""
    of_gradients = gradients.sum_needs, gradients.update_needs, gradients.barrier_needs
    of_values = task_laws.pass_needs, *of_gradients, round_laws.average_needs, exchanges.needs_of_new_gathers
    of_states = task_laws.reader_needs, task_laws.base_needs, task_laws.sender_needs, task_laws.state_needs
    needs = combine(*(recounted(run) for recounted in (*of_values, *of_states, room_needs, host_needs, last_needs)))
    there = needs.before >= 0
    return Needs(needs.before[there], needs.after[there])


def last_needs(run: Recount) -> Needs:
    """Return the needs of what a last communication brings after that with which workers would go on, made last."""
    messages, first = run.collapsed.program.messages, len(run.program.tasks)
    ends = (messages.content == Content.PARAMETERS) & (messages.op == Op.ALL_GATHER)
    ends &= messages.step == run.program.updated - 1
    rows = np.flatnonzero(ends) if run.program.thrown_away else np.empty(0, dtype=np.int64)
    earlier, later = (rows[: len(rows) // 2], rows[len(rows) // 2 :])
    return Needs(first + later, first + earlier) if len(earlier) == len(later) else NO_NEEDS


def _program_of(run: Recount, needs: Needs) -> Program:
    """Return the program, with collectives in one piece, that has these needs in place of its own dependencies."""
    edges = Edges(needs.before, needs.after, np.full(len(needs.before), EdgeKind.DATA))
    return replace(run.collapsed.program, edges=edges, parts=NO_PARTS)


def queue_needs(run: Recount, needs: Needs) -> Needs:
    """Return the needs of messages in streams of data ranks for earlier messages, given all other needs."""
    if not run.program.state.streams:
        return NO_NEEDS
    queued = queue_in_streams(_program_of(run, needs)).edges
    return Needs(queued.before[len(needs.before) :], queued.after[len(needs.before) :])


def all_needs(run: Recount) -> Needs:
    """Return all needs but for those of messages that take their devices' time, and of the rounds of collectives."""
    needs = _value_needs(run)
    return combine(needs, queue_needs(run, needs))


def nothing_waits_without_cause(run: Recount) -> Iterator[str]:
    """Each node starts at the end of the last of its needs and of the nodes before it.

    Its needs are recounted. Before it come the task of its lane, in a stream all that its devices do, and of a
    collective the messages that its ends have sent or received.
    """
    program, whole, first = run.program, run.collapsed, len(run.program.tasks)
    cause = np.zeros_like(run.start)
    for (task, _), release in zip(program.releases, run.costs.release, strict=True):
        cause[task] = release
    needs, (before, after) = all_needs(run), program.lane_edges
    np.maximum.at(cause, after, run.end[before])
    until, of_task = whole.until(needs), needs.after < first
    np.maximum.at(cause, needs.after[of_task], until[of_task])
    message, need = matching_pairs((whole.part_of,), (needs.after[~of_task],))
    np.maximum.at(cause, message, until[~of_task][need])
    parts = program.parts
    np.maximum.at(cause, program.message_nodes.stop + parts.part, run.start[first + parts.message])
    if run.costs.calendar is not None:
        cause, _ = run.costs.calendar.worked(np.arange(program.nodes), cause, run.costs.duration)
    late = np.flatnonzero(run.start > cause)
    yield from run.report(late[~_follow_on_their_devices(run, late)] if len(late) else late, "waits for nothing")


def _follow_on_their_devices(run: Recount, late: Ints) -> Flags:
    """Flag nodes that start when another ends on one of their devices: of the same collective, or of one stream."""
    program, whole, first, count = run.program, run.collapsed, len(run.program.tasks), run.program.message_nodes.stop
    ends = find_endpoints(program, np.ones(program.devices, dtype=np.bool_))
    node = np.concatenate([np.arange(first), ends.message, np.arange(count, program.nodes)])
    device = np.concatenate([program.tasks.device, ends.device, program.parts.device])
    in_streams = (np.array(run.request.cluster.overlaps(program.devices)) != FULL)[device]
    in_pieces = np.flatnonzero(node < count)
    in_pieces = in_pieces[whole.number[whole.part_of[node[in_pieces]]] >= 0]
    collective = whole.part_of[node[in_pieces]]
    follows = np.zeros(program.nodes, dtype=np.bool_)
    for own, key in ((node[in_pieces], (collective, device[in_pieces])), (node[in_streams], (device[in_streams],))):
        before = _last_end_before(run.end[own], run.start[own], row_numbers(key))
        if run.costs.calendar is not None:  # by which a device goes on later
            before, _ = run.costs.calendar.worked(own, before, run.costs.duration[own])
        follows[own[before == run.start[own]]] = True
    return follows[late]


def _last_end_before(end: Times, start: Times, group: Ints) -> Times:
    """Return the last end in the group of each row until the row starts; never where there is none."""
    _, rank = np.unique(np.concatenate([end, start]), return_inverse=True)
    ended, began = (group * len(rank) + half for half in np.split(rank, 2))
    order = np.argsort(ended)
    place = np.searchsorted(ended[order], began, side="right") - 1
    found = order[np.maximum(place, 0)]
    return np.where((place >= 0) & (group[found] == group), end[found], never(end.dtype))


def pulled_messages_find_room(run: Recount) -> Iterator[str]:
    """No message is pulled before the task after which there is room for it."""
    yield from run.report_unmet(room_needs(run), "has made room for it")


def hosts_make_one_update_at_a_time(run: Recount) -> Iterator[str]:
    """A host starts an update when the one before it has ended, in the order of the tasks that they follow."""
    yield from run.report_unmet(host_needs(run), "has left the host of their device")


def streams_keep_their_order(run: Recount) -> Iterator[str]:
    """No node starts before the nodes ahead of it in its device's stream."""
    needs = _value_needs(run)
    queue, start = queue_needs(run, needs), run.collapsed.start
    for row in np.flatnonzero(start[queue.after] < start[queue.before]).tolist():
        before, after = (run.collapsed.program.describe(int(ends[row])) for ends in queue)
        yield f"{after} starts before {before}, which the stream has first"
    overlap = np.array(run.request.cluster.overlaps(run.program.devices))
    if (overlap == FULL).all():
        return
    if run.request.meeting(run.program.devices):
        yield from _break_rendezvous(run, _program_of(run, combine(needs, queue)), overlap)
    else:
        yield from _break_streams(run, _program_of(run, needs), overlap)


def _break_streams(run: Recount, program: Program, overlap: NDArray[np.str_]) -> Iterator[str]:
    """Report nodes that start before their lane or stream has had the time for the parts in messages before them."""
    order = order_parts(program, find_endpoints(program, overlap != FULL))
    parts, ends = run.program.parts, order.ends
    if not (np.array_equal(parts.device, ends.device) and np.array_equal(parts.sends, ends.sends)):
        yield "messages do not take the lanes and streams of their devices"
        return
    times, end = _part_times(run, order, overlap != FULL), run.collapsed.end[ends.message]
    longer = np.flatnonzero(times.takes > end - run.collapsed.start[ends.message] + _TIME_ERROR * end)
    yield from run.report(run.program.message_nodes.stop + longer, "takes longer than its message")
    for low, high in pairwise(program.lane_start.tolist()):
        rows, places = np.flatnonzero((order.place >= low) & (order.place < high)), np.arange(low, high)
        sends, alone = ends.sends[rows], overlap[program.tasks.device[program.lane_tasks[low]]] == NONE
        for stream in filter(len, [rows] if alone else [rows[sends], rows[~sends]]):
            node = _first_too_early(run, order, stream, places, times, alone=alone)
            yield from run.report(node, "starts before its device has had the time for the messages before it")


class _PartTimes(NamedTuple):
    """Times of devices' parts in messages: when they or their messages begin, when all has come, and their length."""

    begin: Times
    came: Times
    takes: Times


def _part_times(run: Recount, order: PartOrder, flags: Flags) -> _PartTimes:
    """Recount the times of parts from messages; a device is busy with what it receives, or with what it sends."""
    pieces, many = find_endpoints(run.program, flags), len(order.place)
    collapsed = run.collapsed.part_of[pieces.message], pieces.device
    part, row = matching_pairs((order.ends.message, order.ends.device), collapsed)
    message, sends, gives = pieces.message[row], pieces.sends[row], order.ends.sends[part]
    begin, came = run.start[run.program.message_nodes.stop :].copy(), np.zeros(many, dtype=run.start.dtype)
    np.minimum.at(begin, part[gives], run.start[message[gives]])
    comes = ~gives & ~sends  # and not what a device hands on of it
    np.maximum.at(came, part[comes], run.end[message[comes]])
    parts, channel = run.program.parts, np.zeros(len(run.program.messages), dtype=np.int64)
    channel[parts.message] = parts.channel
    count = np.zeros((2, many), dtype=np.int64)
    takes = np.zeros((2, many, int(channel.max(initial=0)) + 1), dtype=run.start.dtype)
    np.add.at(count, (sends.astype(np.int64), part), 1)
    where = sends.astype(np.int64), part, channel[message - len(run.program.tasks)]
    np.add.at(takes, where, run.costs.duration[message])
    received, sent = takes.max(axis=2)
    return _PartTimes(begin, came, np.where(count[1] > count[0], sent, received))


def _first_too_early(
    run: Recount, order: PartOrder, rows: Ints, places: Ints, times: _PartTimes, *, alone: bool
) -> Ints:
    """Follow a lane, or the stream beside it in which its device sends or receives; return the first node too early."""
    task, sends = run.program.lane_tasks[places], order.ends.sends[rows]
    begin, end, nothing = run.start[task], run.end[task], np.zeros_like(run.end[task])
    if sends.all() and not alone:  # beside the tasks, which do not wait for it
        begin = np.maximum(begin, run.end.max(initial=0) + times.takes[rows].sum())
    in_turn = merge_with_tasks(order, rows, places)
    node = np.concatenate([run.program.message_nodes.stop + rows, task])[in_turn]
    begins = np.concatenate([times.begin[rows], begin])[in_turn].tolist()
    takes = np.concatenate([times.takes[rows], nothing])[in_turn].tolist()
    until = np.concatenate([times.came[rows], end if sends.any() or alone else nothing])[in_turn].tolist()
    free = 0
    for row, at in enumerate(begins):
        if at < free:
            return node[row : row + 1]
        free = max(free + takes[row], until[row])
    return node[:0]


def _break_rendezvous(run: Recount, program: Program, overlap: NDArray[np.str_]) -> Iterator[str]:
    """Report nodes that start before others that come first in their device's stream, at both ends of messages."""
    try:
        turn = posting_turns(program)[run.collapsed.part_of]
    except RequestError:
        yield "tasks and messages wait for each other in a cycle"
        return
    message, device, _ = find_endpoints(run.program, overlap != FULL)
    early = run.starts_early(device, turn[message], message, np.ones(len(message), dtype=np.bool_))
    yield from run.report(message[early], "starts before its device's stream has come to it")
    # Where nothing overlaps, messages wait for tasks of lower turns, and tasks for messages.
    task = run.program.lane_tasks
    node, where = np.concatenate([task, message]), np.concatenate([run.program.tasks.device[task], device])
    alone = np.flatnonzero((overlap == NONE)[where])
    node, where = node[alone], where[alone]
    is_message = node >= len(run.program.tasks)  # and has no turn that a task has
    early = run.starts_early(where, turn[node], node, ~is_message) & is_message
    early |= run.starts_early(where, turn[node], node, is_message) & ~is_message
    yield from run.report(node[early], "starts while its device does what comes before it")

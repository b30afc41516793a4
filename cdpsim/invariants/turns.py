"""Turns: when there is room for a message, a device's stream has come to it, or a host to an update.

They follow from the request: how early messages are pulled, whether both ends of messages meet, and what overlaps. In
which order messages take a lane or a stream is the definition of a stream (`program/streams.py`), or of a rendezvous
(`cdpsim.program.rendezvous`): that order is asked of these, of the dependencies that are recounted here instead of the
program's own.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdpsim.cluster.devices import FULL, NONE
from cdpsim.errors import RequestError
from cdpsim.invariants import gradients, passes, states, versions
from cdpsim.invariants.needs import Key, Needs, combine
from cdpsim.invariants.pieces import members
from cdpsim.invariants.recount import Recount
from cdpsim.numeric.columns import Ints, Times, matching_pairs
from cdpsim.program import NO_PARTS, Content, EdgeKind, Edges, Kind, Op, Program
from cdpsim.program.rendezvous import posting_turns
from cdpsim.program.streams import PartOrder, find_endpoints, merge_with_tasks, order_parts

_ROUNDING = 1e-9  # of times, after many sums
Words = NDArray[np.str_]


def _ahead(run: Recount, message: Ints, place: Ints, lane: Ints) -> Needs:
    """Messages and the tasks as far ahead of a place in a lane as the request says; `lane` is a place in that lane."""
    task = place - 1 - min(run.request.prefetch, run.program.compute)
    some = np.flatnonzero(task >= run.lanes.head[lane])
    return Needs(run.lanes.order[task[some]], message[some])


def _follows(run: Recount) -> Ints:
    """Of each update, the place in its lane of the task that it follows."""
    program, lanes = run.program, run.lanes
    if len(program.lane_tasks) > program.compute:
        inner = program.lane_tasks < program.compute
        follows = np.empty(len(program.tasks), dtype=np.int64)
        follows[program.lane_tasks] = np.cumsum(inner) - 1
        return follows[run.updates]
    place = lanes.rank[run.anchors]
    if not program.barrier or run.position is None:
        return place
    span = np.int64(run.position.max()) + 1
    key = np.maximum.accumulate(lanes.head * span + run.position[lanes.order])
    return np.searchsorted(key, lanes.head[place] * span + run.position[run.barriers], side="right") - 1


def _pulled(run: Recount) -> Needs:
    """Versions and optimizer states are pulled for their first reader, which may be an update."""
    program, tasks, updates, lanes = run.whole.program, run.program.tasks, run.updates, run.lanes
    messages, first = program.messages, len(tasks)
    reader = program.tasks_of_kind(Kind.F).ravel()
    if program.versions_differ:
        reader = np.arange(program.compute)
    place = np.concatenate([lanes.rank[reader], _follows(run) + 1])
    lane = np.concatenate([lanes.rank[reader], place[len(reader) :] - 1])

    def columns(version: Ints) -> Key:
        both = np.concatenate([reader, updates])
        return tasks.stage[both], np.concatenate([tasks.version[reader], version]), tasks.device[both]

    needs = []
    for content, version in ((Content.PARAMETERS, program.base), (Content.STATE, tasks.step[updates])):
        rows = np.flatnonzero((messages.content == content) & (messages.op == Op.P2P))
        which, row = matching_pairs(
            columns(version), (messages.stage[rows], messages.step[rows] + 1, messages.dst[rows])
        )
        if content == Content.STATE:
            which, row = which[which >= len(reader)], row[which >= len(reader)]
        earliest = np.full(len(rows), len(lanes.order) + 1)
        np.minimum.at(earliest, row, place[which])
        head = np.zeros(len(rows), dtype=np.int64)
        head[row] = lane[which]
        some = np.unique(row)
        needs.append(_ahead(run, first + rows[some], earliest[some], head[some]))
    return combine(*needs)


def _for_tasks(run: Recount, needs: Needs) -> Needs:
    """Messages are pulled for the tasks that need them."""
    place = run.lanes.rank[needs.after]
    return _ahead(run, needs.before, place, place)


def _deferred(run: Recount) -> Needs:
    """With Megatron's rendezvous receives of boundaries are posted when the task before their reader has ended."""
    program = run.whole.program
    message, reader = passes.boundaries(program)
    earlier, later = program.lane_edges
    before, row = matching_pairs((later,), (reader,))
    return Needs(earlier[before], message[row])


def rooms(run: Recount) -> Needs:
    """All messages that wait for room."""
    found = []
    if run.travels:
        way = states.way(run)
        some = np.flatnonzero(way.message >= 0)
        found.append(_for_tasks(run, Needs(way.message[some], way.use[some])))
    elif run.handed_out:
        found.append(_for_tasks(run, versions.broadcasts(run)))
    elif not run.together:
        found.append(_pulled(run))
    if run.request.rendezvous == "megatron":
        found.append(_deferred(run))
    return combine(*found, Needs(run.updates[:0], run.updates[:0]))


def hosts(run: Recount) -> Needs:
    """Hosts make one update after another: in the order of steps, or of the tasks that they follow."""
    program, tasks, updates = run.program, run.program.tasks, run.updates
    if len(program.lane_tasks) > program.compute or not run.costs.duration[updates].any():
        return Needs(updates[:0], updates[:0])
    by_step = program.together or program.barrier
    if by_step:
        follows = tasks.step[updates]
    else:  # of several lanes, places tell no order; a list has one
        follows = (run.lanes.rank if run.position is None else run.position)[run.anchors]
    order = updates[np.lexsort((tasks.stage[updates], follows, tasks.device[updates]))]
    same = tasks.device[order[1:]] == tasks.device[order[:-1]]
    return Needs(order[:-1][same], order[1:][same])


def needs(run: Recount) -> Needs:
    """All that waits for something, but for streams and the rounds of collectives."""
    return combine(
        passes.needs(run),
        gradients.sums(run),
        gradients.updates(run),
        gradients.steps_end(run),
        versions.needs(run),
        states.needs(run),
        rooms(run),
        hosts(run),
    )


def pulled_messages_find_room(run: Recount) -> Iterator[str]:
    """Nothing is pulled before the task after which there is room for it."""
    yield from run.unmet(rooms(run), "has made room for it")


def hosts_make_one_update_at_a_time(run: Recount) -> Iterator[str]:
    """In the order of what they follow."""
    yield from run.unmet(hosts(run), "has left the host of their device")


def streams_keep_their_order(run: Recount) -> Iterator[str]:
    """Nothing starts before what its device's stream has before it."""
    overlap = np.array(run.cluster.overlaps(run.program.devices))
    if (overlap == FULL).all():
        return
    found = needs(run)
    edges = Edges(found.before, found.after, np.full(len(found.before), EdgeKind.DATA))
    program = replace(run.whole.program, edges=edges, parts=NO_PARTS)
    yield from (_met if run.request.rendezvous else _taken)(run, program, overlap)


def _taken(run: Recount, program: Program, overlap: Words) -> Iterator[str]:
    """Nothing starts before its lane, or its stream, has had the time for the parts in messages that come before it."""
    own = overlap != FULL
    line = order_parts(program, find_endpoints(program, own))
    parts = run.program.parts
    if not all(np.array_equal(*pair) for pair in ((parts.device, line.ends.device), (parts.sends, line.ends.sends))):
        yield "messages do not take the lanes and streams of their devices"
        return
    times, whole = _parts(run, line, own), line.ends.message
    end = run.whole.end[whole]
    longer = np.flatnonzero(times.takes > end - run.whole.start[whole] + _ROUNDING * end)
    yield from run.names(run.program.message_nodes.stop + longer, "takes longer than its message")
    for low, high in pairwise(program.lane_start.tolist()):
        rows, places = np.flatnonzero((line.place >= low) & (line.place < high)), np.arange(low, high)
        sends, alone = line.ends.sends[rows], overlap[program.tasks.device[program.lane_tasks[low]]] == NONE
        for mine in filter(len, [rows] if alone else [rows[sends], rows[~sends]]):
            node = _too_early(run, line, mine, places, times)
            yield from run.names(node, "starts before its device has had the time for the messages before it")


class _PartTimes(NamedTuple):
    """Of devices' parts in messages: when they or their messages begin, when all has come, and how long they take."""

    begin: Times
    came: Times
    takes: Times


def _parts(run: Recount, line: PartOrder, own: NDArray[np.bool_]) -> _PartTimes:
    """Recount the times of parts from messages; a device is busy with what it receives, or with what it sends."""
    pieces, many = find_endpoints(run.program, own), len(line.place)
    part, row = matching_pairs(line.ends[:2], (run.whole.part_of[pieces.message], pieces.device))
    message, sends = pieces.message[row], pieces.sends[row]
    begin, came = run.start[run.program.message_nodes.stop :].copy(), np.zeros(many, dtype=run.start.dtype)
    gives = line.ends.sends[part]
    np.minimum.at(begin, part[gives], run.start[message[gives]])
    comes = ~gives & ~sends  # and not what a device hands on of it
    np.maximum.at(came, part[comes], run.end[message[comes]])
    parts, channel = run.program.parts, np.zeros(len(run.program.messages), dtype=np.int64)
    channel[parts.message] = parts.channel
    count = np.zeros((2, many), dtype=np.int64)
    takes = np.zeros((2, many, int(channel.max(initial=0)) + 1), dtype=run.start.dtype)
    for sent in (0, 1):
        some = sends == bool(sent)
        np.add.at(count[sent], part[some], 1)
        where = part[some], channel[message[some] - len(run.program.tasks)]
        np.add.at(takes[sent], where, run.costs.duration[message[some]])
    takes = takes.max(axis=2)
    return _PartTimes(begin, came, np.where(count[1] > count[0], takes[1], takes[0]))


def _too_early(run: Recount, line: PartOrder, rows: Ints, places: Ints, times: _PartTimes) -> Ints:
    """Follow a lane, or what its device sends or receives beside it, and give the first node that is too early."""
    task, sends = run.program.lane_tasks[places], line.ends.sends[rows]
    begin, end, nothing = run.start[task], run.end[task], np.zeros_like(run.end[task])
    if sends.all():  # beside the tasks, which do not wait for it
        begin = np.maximum(begin, run.end.max(initial=0) + times.takes[rows].sum())
    order = merge_with_tasks(line, rows, places)
    node = np.concatenate([run.program.message_nodes.stop + rows, task])[order]
    begin = np.concatenate([times.begin[rows], begin])[order]
    takes = np.concatenate([times.takes[rows], nothing])[order]
    until = np.concatenate([times.came[rows], end if sends.any() else nothing])[order]
    free = 0
    for row, (begins, add, least) in enumerate(zip(begin.tolist(), takes.tolist(), until.tolist(), strict=True)):
        if begins < free:
            return node[row : row + 1]
        free = max(free + add, least)
    return node[:0]


def _met(run: Recount, program: Program, overlap: Words) -> Iterator[str]:
    """Nothing starts before what its device's stream has before it, whose order both ends of a message keep."""
    try:
        turn = posting_turns(program)[run.whole.part_of]
    except RequestError:
        yield "tasks and messages wait for each other in a circle"
        return
    message, device = _ends(run)
    some = np.flatnonzero(overlap[device] != FULL)
    message, device = message[some], device[some]
    early = run.early(device, turn[message], message, np.ones(len(message), dtype=np.bool_))
    yield from run.names(message[early], "starts before its device's stream has come to it")
    yield from _alone(run, overlap == NONE, turn, message, device)


def _alone(run: Recount, alone: np.ndarray, turn: Ints, message: Ints, device: Ints) -> Iterator[str]:
    """Where nothing overlaps, messages wait for tasks of lower turns, and tasks for messages."""
    task = run.program.lane_tasks
    node, where = np.concatenate([task, message]), np.concatenate([run.program.tasks.device[task], device])
    is_message = np.repeat([False, True], [len(task), len(message)])
    some = np.flatnonzero(alone[where])
    node, where, is_message = node[some], where[some], is_message[some]
    turns = 2 * turn[node] + is_message
    early = run.early(where, turns, node, ~is_message) & is_message
    early |= run.early(where, turns, node, is_message) & ~is_message
    yield from run.names(node[early], "starts while its device does what comes before it")


def _ends(run: Recount) -> tuple[Ints, Ints]:
    """All messages with each device that sends or receives them, or is a member: (node, device)."""
    messages, first = run.program.messages, len(run.program.tasks)
    single, rows = np.flatnonzero(messages.op == Op.P2P), np.flatnonzero(messages.op != Op.P2P)
    together, member = members(run.program, rows)
    device = np.concatenate([messages.src[single], messages.dst[single], member]).astype(np.int64)
    return first + np.concatenate([single, single, together]), device

"""Streams: what messages take of their devices, where compute and communication do not overlap fully.

A message takes its sender for its time when the sender's own order comes to it: after the task that made it. It takes
its receiver for as long directly before the task that reads it, though not before its bytes begin to arrive. A member
that gives something to a collective takes part as a sender does, one that only receives as a receiver does. These are
the *parts* of devices in messages. Where a device's overlap is "none", parts stand in its lane, between its tasks;
where it is "stream", beside its tasks: what it sends in one row, what it receives in another, each in the lane's order.

Neither end waits for the other. A sender's part waits for its row alone, and its message begins no earlier. A
receiver's part is over when its row has had the time for it and the message is there; what comes next waits for both.
So new edges close no circle, and messages that take no time slow no run. Whatever a sender's part waits for is no later
than the task that it stands behind, for which its message waits anyway; and whatever a receiver's part waits for comes
before its reader anyway. All that "stream" lets a node wait for, "none" does, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cdpsim.cluster.devices import FULL, NONE
from cdpsim.numeric.columns import Flags, Ints, expand_ranges, group_numbers, group_starts, matching_pairs, sort_by
from cdpsim.numeric.paths import lane_edges, successors
from cdpsim.program import EdgeKind, Op, Parts, Program

_AT_HEAD, _RECEIVES, _TASK, _SENDS = range(4)  # what stands at one place of a lane, in this order

Pairs = tuple[Ints, Ints]  # nodes: (before, after)


class Endpoints(NamedTuple):
    """Messages, as nodes, with each of their devices, and whether that gives something to the message."""

    message: Ints
    device: Ints
    sends: Flags


class PartOrder(NamedTuple):
    """Parts in the order of lanes: places are those of `lane_tasks`, or what comes before the first of a lane."""

    ends: Endpoints
    place: Ints
    at: Ints  # what it is at its place


def occupy_streams(program: Program, overlaps: Sequence[str], whole: Program, origin: Ints, channel: Ints) -> Program:
    """Let messages take the lanes and streams of their devices; `overlaps` has a word for each device.

    `whole` is the program with each collective in one piece, `origin` the node there of each node, and `channel` that
    of each message in its collective.
    """
    own = np.array([word != FULL for word in overlaps])
    if not own.any():
        return program
    line, first = order_parts(whole, find_endpoints(whole, own)), program.nodes
    rows = _in_lanes(whole, line, first, overlaps), *_in_streams(whole, line, first, overlaps)
    before, after = (np.concatenate(ends) for ends in zip(*rows, strict=True))
    part, message, sends = _pieces(program, origin, line.ends, own)
    waits = _with_messages(before - first, after - first, line.ends.sends, part, message)
    arrived = _with_messages(after - first, before - first, ~line.ends.sends, part[~sends], message[~sends])
    linked = program.with_edges(
        np.concatenate([before, first + waits[0], arrived[1]]),
        np.concatenate([after, waits[1], first + arrived[0]]),
        EdgeKind.STREAM,
    )
    return replace(linked, parts=_parts(whole, line, part, message - len(program.tasks), sends, channel))


def find_endpoints(program: Program, own: Flags) -> Endpoints:
    """All messages with those of their devices that have no full overlap."""
    messages, first = program.messages, len(program.tasks)
    single, together = np.flatnonzero(messages.op == Op.P2P), np.flatnonzero(messages.op != Op.P2P)
    size = np.array([*map(len, program.groups)], dtype=np.int64)[messages.dst[together]]
    members = [program.groups[group] for group in messages.dst[together].tolist()]
    message = np.concatenate([single, single, np.repeat(together, size)])
    device = np.concatenate([messages.src[single], messages.dst[single], *members]).astype(np.int64)
    sends = np.where(np.isin(messages.op[message], (Op.P2P, Op.BROADCAST)), messages.src[message] == device, True)
    some = own[device]
    return Endpoints(first + message[some], device[some], sends[some])


def order_parts(program: Program, ends: Endpoints) -> PartOrder:
    """Give each part its place: behind the task that made its message, or before the one that reads it.

    What a device passes on comes behind its nearest task before that in the program. What no later task of its device
    needs, as the run ends before, takes no part of it.
    """
    forth = program.edges.before, program.edges.after
    place, away = (np.zeros(len(ends.message), dtype=np.int64) for _ in range(2))
    for rows, edges, last in ((ends.sends, forth[::-1], True), (~ends.sends, forth, False)):
        place[rows], away[rows] = _nearest(program, edges, ends.message[rows], ends.device[rows], last=last)
    at = np.where(ends.sends, _SENDS, _RECEIVES)
    new = ends.sends & (place < 0)  # what was there at the start
    place[new], at[new] = _first_places(program)[ends.device[new]], _AT_HEAD
    away[~ends.sends] *= -1  # what others hand on comes before what is read as it came
    together = program.messages.op[ends.message - len(program.tasks)] != Op.P2P
    order = sort_by(place + 1, at, away - away.min(initial=0), together, ends.message)
    order = order[place[order] >= 0]
    return PartOrder(Endpoints(ends.message[order], ends.device[order], ends.sends[order]), place[order], at[order])


def _first_places(program: Program) -> Ints:
    """The place at which the first lane of each device begins."""
    lanes = program.lane_start[:-1][::-1]
    place = np.zeros(program.devices, dtype=np.int64)
    place[program.tasks.device[program.lane_tasks[lanes]]] = lanes
    return place


def _nearest(program: Program, edges: Pairs, message: Ints, device: Ints, *, last: bool) -> Pairs:
    """The places of the nearest tasks of those devices that edges lead to, through what is no compute task.

    Of several as near, the last or the first; -1 where there is none. Also how many edges lead there.
    """
    _, first, reach = successors(*edges, program.nodes)
    place, home = (np.full(program.nodes, -1, dtype=np.int64) for _ in range(2))
    place[program.lane_tasks] = np.arange(len(program.lane_tasks))
    home[program.lane_tasks] = program.tasks.device[program.lane_tasks]
    sign = 1 if last else -1
    unknown = np.iinfo(np.int64).min
    found, away = np.full(len(message), unknown), np.zeros(len(message), dtype=np.int64)
    row, node = np.arange(len(message)), message
    for steps in range(1, program.nodes + 1):
        which, at = expand_ranges(first[node], first[node + 1])
        row, node = row[which], reach[at]
        mine = home[node] == device[row]
        np.maximum.at(found, row[mine], sign * place[node[mine]])
        away[row[mine]] = steps
        on = (node >= program.compute) & (found[row] == unknown)
        reached = np.sort(row[on] * np.int64(program.nodes) + node[on])
        row, node = np.divmod(reached[group_starts(reached)], program.nodes)
        if not len(row):
            break
    return np.where(found == unknown, -1, sign * found), away


def _in_lanes(program: Program, line: PartOrder, first: int, overlaps: Sequence[str]) -> Pairs:
    """Which part or task comes behind which in lanes of devices without overlap; parts are nodes from `first` on."""
    alone = np.array([word == NONE for word in overlaps])
    task = program.lane_tasks
    here, place = np.flatnonzero(alone[line.ends.device]), np.flatnonzero(alone[program.tasks.device[task]])
    order = merge_with_tasks(line, here, place)
    node = np.concatenate([first + here, task[place]])[order]
    lane = group_numbers(program.lane_start[:-1], len(task))[np.concatenate([line.place[here], place])[order]]
    before, after = lane_edges(node, np.append(group_starts(lane), len(lane)))
    new = (before >= first) | (after >= first)
    return before[new], after[new]


def merge_with_tasks(line: PartOrder, parts: Ints, places: Ints) -> Ints:
    """Sort some parts, and tasks at some places, by the order of lanes; parts are the first rows, tasks the others."""
    key = np.concatenate([4 * line.place[parts] + line.at[parts], 4 * places + _TASK])
    return np.argsort(key, kind="stable")


def _in_streams(program: Program, line: PartOrder, first: int, overlaps: Sequence[str]) -> list[Pairs]:
    """Which part comes behind which in the streams of devices, and which task before or behind it."""
    beside = np.array([word != NONE for word in overlaps])[line.ends.device]
    lane = group_numbers(program.lane_start[:-1], len(program.lane_tasks))[line.place]
    task, found = program.lane_tasks[line.place], []
    for sends in (True, False):
        rows = np.flatnonzero(beside & (line.ends.sends == sends))
        found.append(lane_edges(first + rows, np.append(group_starts(lane[rows]), len(rows))))
        rows = rows[line.at[rows] != _AT_HEAD]
        found.append((task[rows], first + rows) if sends else (first + rows, task[rows]))
    return found


def _pieces(program: Program, origin: Ints, ends: Endpoints, own: Flags) -> tuple[Ints, Ints, Flags]:
    """The messages of each part, as nodes of the program that runs, and whether its device sends them."""
    pieces = find_endpoints(program, own)
    row, part = matching_pairs((origin[pieces.message], pieces.device), (ends.message, ends.device))
    return part, pieces.message[row], pieces.sends[row]


def _with_messages(one: Ints, other: Ints, chosen: Flags, part: Ints, message: Ints) -> Pairs:
    """Give each one of a pair of chosen parts with the messages of the other one."""
    some = np.flatnonzero((one >= 0) & (other >= 0))
    some = some[chosen[one[some]] & chosen[other[some]]]
    row, which = matching_pairs((part,), (other[some],))
    return one[some[which]], message[row]


def _parts(program: Program, line: PartOrder, part: Ints, message: Ints, sends: Flags, channel: Ints) -> Parts:
    """Let each part take the time of what its device receives, or of what it sends where that is more."""
    many = [np.bincount(part[some], minlength=len(line.place)) for some in (sends, ~sends)]
    mine = sends == (many[0] > many[1])[part]
    step = program.tasks.step[program.lane_tasks[line.place]]
    ends = (column.astype(np.int32) for column in (part[mine], message[mine], channel[message[mine]]))
    return Parts(line.ends.device.astype(np.int32), step, line.ends.sends, *ends)

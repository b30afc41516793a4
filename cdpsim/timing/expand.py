"""Program -> program in which every collective is the messages of its algorithm, round by round.

A collective begins when all of its members are ready, as it does in one piece. Then every message waits for what its
sender has to have received for it, and for its two ends to be done with their round before in its channel. A member
goes on when the last round that reaches it is over, which may be before the collective's last one.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, Times, concatenate_columns, take_rows
from cdpsim.program import Buffers, Category, EdgeKind, Edges, Messages, Op, Program
from cdpsim.program.collectives import Algorithm, payload_factor
from cdpsim.timing.collective_times import durations
from cdpsim.timing.costs import Costs, in_order


@dataclass(frozen=True, eq=False)
class Unrolled:
    """A collective's messages in the order of their rounds, and who of them waits for whom."""

    src: Ints
    dst: Ints
    first: Ints
    parts: Ints
    channel: Ints
    data: tuple[Ints, Ints]  # (before, after): after sends on, or adds to, what before has brought
    room: tuple[Ints, Ints]  # an end of after was busy with before in the last of its channel's rounds until then
    begins: Ints  # those that wait for no other
    own: Ints  # those with nothing in them but what their sender has
    receives: tuple[Ints, ...]  # of each member, all that it receives, the last one last
    takes_part: tuple[Ints, ...]  # of each member, all that it sends and receives


@lru_cache(maxsize=64)
def unroll(how: Algorithm, k: int) -> Unrolled:
    """Lay out an algorithm's messages for k members."""
    rounds = how.schedule(k)
    src, dst, first, parts = (np.concatenate(column) for column in zip(*rounds, strict=True))
    number = np.repeat(np.arange(len(rounds)), [len(one.src) for one in rounds])
    brought: dict[tuple[int, int], list[int]] = defaultdict(list)  # by member and part
    channel = how.channel(k, first)
    busy: dict[tuple[int, int], list[int]] = defaultdict(list)  # by member and channel
    receives: list[list[int]] = [[] for _ in range(k)]
    data, room = set(), set()
    low = 0
    for high in [*(np.flatnonzero(np.diff(number)) + 1).tolist(), len(src)]:
        now = range(low, high)
        carries = {at: (first[at] + np.arange(parts[at])) % how.parts(k) for at in now}
        for at in now:
            sender, receiver = int(src[at]), int(dst[at])
            data |= {(before, at) for part in carries[at].tolist() for before in brought[sender, part]}
            room |= {(before, at) for end in (sender, receiver) for before in busy[end, int(channel[at])]}
        busy |= _at_either_end(now, src, dst, channel)
        for at in now:
            receives[dst[at]].append(at)
            for part in carries[at].tolist():
                brought[int(dst[at]), part].append(at)
        low = high
    every = np.arange(len(src))
    waits = {after for _, after in room | data}
    return Unrolled(
        src,
        dst,
        first,
        parts,
        channel,
        data=_columns(data),
        room=_columns(room - data),
        begins=np.array([at for at in every.tolist() if at not in waits], dtype=np.int64),
        own=np.setdiff1d(every, _columns(data)[1]),
        receives=tuple(np.array(some, dtype=np.int64) for some in receives),
        takes_part=tuple(np.flatnonzero((src == member) | (dst == member)) for member in range(k)),
    )


def _at_either_end(messages: range, src: Ints, dst: Ints, channel: Ints) -> dict[tuple[int, int], list[int]]:
    """What each member sends or receives of these messages in each channel."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at in messages:
        for end in (src, dst):
            found[int(end[at]), int(channel[at])].append(at)
    return found


def _columns(pairs: set[tuple[int, int]]) -> tuple[Ints, Ints]:
    before, after = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2).T
    return before, after


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a collective stood in its program, and where its messages stand."""

    node: int  # of the collective, in the program that has it
    first: int  # the node of its first message, in the program that has these
    members: Ints  # the root first
    layout: Unrolled
    op: Op

    def at(self, device: int) -> int:
        """The member that a device is."""
        return int(np.flatnonzero(self.members == device)[0])


def expand(program: Program, costs: Costs) -> Program:
    """Replace each collective by the messages of the algorithm that it was costed with."""
    count, several = len(program.tasks), is_unrolled(program)
    if not several.any():
        return program
    kept = np.flatnonzero(~several)
    number = np.full(program.nodes, -1, dtype=np.int64)
    number[:count] = np.arange(count)
    number[count + kept] = count + np.arange(len(kept))
    places = _places(program, costs, several)
    located = _locate(program)
    return replace(
        program,
        messages=_messages(program, costs, kept, places),
        edges=_edges(program, number, places, located),
        buffers=_buffers(program, number, places),
    )


def piece_times(program: Program, costs: Costs, cluster: Cluster) -> Times:
    """Give what the messages of expanded collectives take, in their order: as long as in their collective alone.

    So a collective takes as long in messages as in one piece, although they share links with each other.
    """
    cluster, none = cluster.sized(program.devices), np.zeros(0, costs.duration.dtype)
    parts = [none]
    for place in _places(program, costs, is_unrolled(program)):
        row = place.node - len(program.tasks)
        size = int(program.messages.size[row]) * payload_factor(place.op, len(place.members))
        parts.append(durations(costs.algorithms[costs.runs_by[row]], cluster, place.members, size).astype(none.dtype))
    return np.concatenate(parts)


class Origins(NamedTuple):
    """Where the nodes of an expanded program come from."""

    node: Ints  # that each of them was, or was part of, before
    channel: Ints  # of its collective in which each message goes; 0 where it is of none


def origins(program: Program, costs: Costs) -> Origins:
    """Say where the nodes of the expanded program come from."""
    count, several = len(program.tasks), is_unrolled(program)
    places, kept = _places(program, costs, several), np.flatnonzero(~several)
    parts = [np.full(len(place.layout.src), place.node) for place in places]
    return Origins(
        np.concatenate([np.arange(count), count + kept, *parts]),
        np.concatenate([np.zeros(len(kept), dtype=np.int64), *(place.layout.channel for place in places)]),
    )


def unexpanded(program: Program) -> Origins:
    """Say it of a program that stays as it is."""
    return Origins(np.arange(program.nodes), np.zeros(len(program.messages), dtype=np.int64))


def is_unrolled(program: Program) -> np.ndarray:
    """Which messages are collectives of several devices: over one device one is free, and stays."""
    size = np.array([len(members) for members in program.groups], dtype=np.int64)
    several: np.ndarray = program.messages.op != Op.P2P
    several[several] = size[program.messages.dst[several]] > 1
    return several


def _places(program: Program, costs: Costs, several: np.ndarray) -> list[_Place]:
    """Where collectives stand, and where their messages will."""
    count, messages = len(program.tasks), program.messages
    places, first = [], count + int((~several).sum())
    for row in np.flatnonzero(several).tolist():
        members = in_order(program, row)
        layout = unroll(costs.algorithms[costs.runs_by[row]], len(members))
        places.append(_Place(count + row, first, members, layout, Op(int(messages.op[row]))))
        first += len(layout.src)
    return places


def _locate(program: Program) -> Ints:
    """The device that a node ends on: of a task its own, of a message its receiver."""
    return np.concatenate([program.tasks.device, program.messages.dst])


def _messages(program: Program, costs: Costs, kept: Ints, places: list[_Place]) -> Messages:
    """Messages that stay, then those of the collectives."""
    messages, count = program.messages, len(program.tasks)
    columns = {name: [take_rows(getattr(messages, name), kept)] for name in Messages.__dataclass_fields__}
    for place in places:
        row, layout, k = place.node - count, place.layout, len(place.members)
        how = costs.algorithms[costs.runs_by[row]]
        whole, parts = int(messages.size[row]) * payload_factor(place.op, k), how.parts(k)
        if costs.duration.dtype.kind == "i" and whole % parts:
            problem = (
                f"cuts a stage's worth into {parts} parts, which the slot model cannot weigh; give a model, or tree"
            )
            raise RequestError("expand-collectives", problem)
        cut = np.arange(2 * parts + 1)
        edge = cut * (whole // parts) + cut * (whole % parts) // parts  # of parts as even as whole bytes can be
        new = {name: np.broadcast_to(getattr(messages, name)[row], len(layout.src)) for name in columns}
        new["op"] = np.broadcast_to(np.int8(Op.P2P), len(layout.src))
        new["src"], new["dst"] = place.members[layout.src], place.members[layout.dst]
        new["size"] = edge[layout.first + layout.parts] - edge[layout.first]
        for name, column in new.items():
            columns[name].append(column)
    return Messages(**{name: concatenate_columns(parts, parts[0].dtype) for name, parts in columns.items()})


def _edges(program: Program, number: Ints, places: list[_Place], located: Ints) -> Edges:
    """Dependencies of the rest, those inside collectives, and those from the one to the other."""
    edges = program.edges
    stay = (number[edges.before] >= 0) & (number[edges.after] >= 0)
    parts = [(number[edges.before[stay]], number[edges.after[stay]], edges.kind[stay])]
    assert (number[edges.before] >= 0)[number[edges.after] < 0].all(), "no collective waits for another one"
    into, out_of = _by_collective(edges.after, number), _by_collective(edges.before, number)
    for place in places:
        layout, first = place.layout, place.first
        for pairs, kind in ((layout.data, EdgeKind.DATA), (layout.room, EdgeKind.ROOM)):
            parts.append((first + pairs[0], first + pairs[1], np.full(len(pairs[0]), kind)))
        for row in into.get(place.node, []):
            before, kind = edges.before[row], edges.kind[row]
            own = layout.own
            if kind == EdgeKind.DATA:
                mine = own[layout.src[own] == place.at(located[before])]
                parts.append(_fan(number[before], first + mine, kind))
            others = layout.begins if kind != EdgeKind.DATA else np.setdiff1d(layout.begins, mine)
            parts.append(_fan(number[before], first + others, kind if kind != EdgeKind.DATA else EdgeKind.BARRIER))
        for row in out_of.get(place.node, []):
            after, kind = edges.after[row], edges.kind[row]
            member = place.at(located[after])
            last = layout.receives[member] if len(layout.receives[member]) else layout.takes_part[member]
            parts.append((first + last, *_fan(number[after], last, kind)[::2]))
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Edges(*(column.astype(kind) for column, kind in zip(columns, (np.int32, np.int32, np.int8), strict=True)))


def _fan(before: int, after: Ints, kind: int) -> tuple[Ints, Ints, Ints]:
    return np.full(len(after), before), after, np.full(len(after), kind)


def _by_collective(ends: Ints, number: Ints) -> dict[int, list[int]]:
    """The rows of edges that touch a collective at this end, by its node."""
    found: dict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero(number[ends] < 0).tolist():
        found[int(ends[row])].append(row)
    return found


def _buffers(program: Program, number: Ints, places: list[_Place]) -> Buffers:
    """Buffers, whose moments of collectives become those of the messages at their device."""
    buffers, where = program.buffers, {place.node: place for place in places}
    begin, end, until = (_renumbered(moment, number) for moment in (buffers.begin, buffers.end, buffers.kept_until))
    kept, more = [buffers.kept], [until]

    def at_device(moment: int, buffer: int) -> tuple[Ints, Ints]:
        """What the buffer's device receives of the collective, and all that it has to do with."""
        place = where[moment >> 1]
        member = place.at(int(buffers.device[buffer]))
        part, arrive = place.layout.takes_part[member], place.layout.receives[member]
        return place.first + (arrive if len(arrive) else part), place.first + part

    def keep(buffer: int, messages: Ints) -> None:
        kept.append(np.full(len(messages), buffer))
        more.append(2 * messages + 1)

    for buffer in np.flatnonzero(_gone(buffers.begin, number)).tolist():
        moment = int(buffers.begin[buffer])
        arrive, part = at_device(moment, buffer)
        begin[buffer] = 2 * arrive[-1] + 1 if moment & 1 else 2 * arrive[0]
        if moment & 1:  # what a device has to hand on, it keeps as long
            keep(buffer, part)
    for column, owner in ((end, np.arange(len(end))), (until, buffers.kept)):
        source = buffers.end if column is end else buffers.kept_until
        for row in np.flatnonzero(_gone(source, number)).tolist():
            buffer = int(owner[row])
            arrive, part = at_device(int(source[row]), buffer)
            if source[row] & 1 == 0:  # what arrives is written over it
                column[row] = 2 * arrive[0]
                continue
            last = arrive if buffers.category[buffer] == Category.COMMUNICATION else part
            column[row] = 2 * last[-1] + 1
            keep(buffer, last[:-1])
    moments = {"begin": begin, "end": end, "kept": np.concatenate(kept), "kept_until": np.concatenate(more)}
    return replace(buffers, **{name: column.astype(np.int32) for name, column in moments.items()})


def _gone(moment: Ints, number: Ints) -> np.ndarray:
    gone: np.ndarray = (moment >= 0) & (number[moment >> 1] < 0)
    return gone


def _renumbered(moment: Ints, number: Ints) -> Ints:
    """Moments of nodes that stay, by their new numbers; the others are replaced afterwards."""
    new = 2 * number[moment >> 1] + (moment & 1)
    return np.where(moment < 0, moment, new)

"""Program -> program in which every collective is the messages of its algorithm, round by round.

A collective begins when all of its members are ready, as it does in one piece. Then every message waits for what its
sender has to have received for it, and for its two ends to be done with their round before in its channel. A member
goes on when the last round that reaches it is over, which may be before the collective's last one.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Flags, Ints, concatenate_columns, slice_rows, sort_by, take_rows
from cdpsim.program import Buffers, Category, EdgeKind, Edges, Messages, Op, Program, once_a_program
from cdpsim.program.collectives import Algorithm, payload_factor
from cdpsim.timing.collective_times import Rounds, alike_group, lay_out_rounds, message_durations
from cdpsim.timing.costs import Costs, root_first


@dataclass(frozen=True, eq=False)
class Unrolled:
    """A collective's messages in the order of their rounds, and which of them wait for which."""

    rounds: Rounds
    data: tuple[Ints, Ints]  # (before, after): after sends on, or adds to, the parts that before has brought
    room: tuple[Ints, Ints]  # an end of after was busy with before in the last of its channel's rounds until then

    @cached_property
    def begins(self) -> Ints:
        """The messages that wait for no other."""
        return np.setdiff1d(np.arange(len(self.rounds.src)), np.concatenate([self.data[1], self.room[1]]))

    @cached_property
    def original(self) -> Ints:
        """The messages that carry only parts which their sender had at the start."""
        return np.setdiff1d(np.arange(len(self.rounds.src)), self.data[1])

    def gives(self, member: int) -> Ints:
        """Return the messages that carry only what a member had at the start, or, if none does, all that it sends.

        So the root of a tree adds its own to what has reached it.
        """
        own = self.original[self.rounds.src[self.original] == member]
        return own if len(own) else np.flatnonzero(self.rounds.src == member)

    @cached_property
    def last(self) -> list[Ints]:
        """The last message of each member in each channel, and messages without dependents."""
        channel, last = self.rounds.channel, []
        ends = np.setdiff1d(np.arange(len(channel)), np.concatenate([self.data[0], self.room[0]]))
        for received, carried in zip(self.received, self.carried, strict=True):
            at = received if len(received) else carried
            final = at[::-1][np.unique(channel[at[::-1]], return_index=True)[1]]
            last.append(np.union1d(final, np.intersect1d(at, ends)))
        return last

    @cached_property
    def received(self) -> list[Ints]:
        """The messages that each member receives, the last one last."""
        return _by_member(self.rounds.dst, np.arange(len(self.rounds.dst)), self.rounds.members)

    @cached_property
    def carried(self) -> list[Ints]:
        """The messages that each member sends and receives."""
        ends = np.concatenate([self.rounds.src, self.rounds.dst])
        return _by_member(ends, np.tile(np.arange(len(self.rounds.src)), 2), self.rounds.members)


def _by_member(member: Ints, message: Ints, members: int) -> list[Ints]:
    order = sort_by(member, message)
    return np.split(message[order], np.searchsorted(member[order], np.arange(1, members)))


@lru_cache(maxsize=64)
def unroll(how: Algorithm, k: int) -> Unrolled:
    """Lay out an algorithm's messages for k members."""
    rounds = lay_out_rounds(how, k)
    count = len(rounds.src)
    message = np.repeat(np.arange(count), rounds.parts)
    part = slice_rows(rounds.first, rounds.parts) % rounds.all_parts
    # Of each member and part the messages that bring it, in their order; each sender has those of earlier rounds.
    brought = (rounds.dst[message] * rounds.all_parts + part) * count + message
    order = np.argsort(brought)
    needed = (rounds.src[message] * rounds.all_parts + part) * count
    round_begins = rounds.begin[rounds.number[message]]
    low, high = (np.searchsorted(brought[order], needed + until) for until in (0, round_begins))
    data = np.unique(message[order][slice_rows(low, high - low)] * count + np.repeat(message, high - low))
    before, after = rounds.waits
    room = np.setdiff1d(before * count + after, data)
    return Unrolled(rounds, np.divmod(data, count), np.divmod(room, count))


@dataclass(frozen=True, eq=False)
class _Placed:
    """A collective: where it stood in its program, and where its messages stand."""

    node: int  # of the collective, in the program that has it
    first: int  # the node of its first message, in the program that has these
    members: Ints  # the root first
    unrolled: Unrolled
    op: Op

    def member(self, device: int) -> int:
        """Return the member that a device is."""
        return int(np.flatnonzero(self.members == device)[0])

    def messages_at(self, device: int) -> tuple[Ints, Ints]:
        """Return the nodes of the messages that a device receives (all of its messages if none), and of all of them."""
        member = self.member(device)
        received, carried = (self.first + each[member] for each in (self.unrolled.received, self.unrolled.carried))
        return received if len(received) else carried, carried


class Origins(NamedTuple):
    """The origin of each node of an expanded program."""

    node: Ints  # that each of them was, or was part of, before
    channel: Ints  # of its collective in which each message goes; 0 where it is of none


def unchanged_origins(program: Program) -> Origins:
    """Return the origins of nodes in a program that is not expanded: themselves."""
    return Origins(np.arange(program.nodes), np.zeros(len(program.messages), dtype=np.int64))


def expand(program: Program, costs: Costs, cluster: Cluster) -> tuple[Program, Origins]:
    """Replace each collective by the messages of the algorithm that it was costed with on a cluster.

    Return the new program, and where its nodes come from.
    """
    count, several = len(program.tasks), is_unrolled(program)
    if not several.any():
        return program, unchanged_origins(program)
    kept, collectives = np.flatnonzero(~several), _place_collectives(program, costs, several, cluster)
    channels = [np.zeros(len(kept), dtype=np.int64), *(each.unrolled.rounds.channel for each in collectives)]
    parts = [np.full(len(each.unrolled.rounds.src), each.node) for each in collectives]
    number = np.full(program.nodes, -1, dtype=np.int64)
    number[:count] = np.arange(count)
    number[count + kept] = count + np.arange(len(kept))
    expanded = replace(
        program,
        messages=_expand_messages(program, costs, kept, collectives),
        edges=_expand_edges(program, number, collectives),
        buffers=_expand_buffers(program, number, collectives),
    )
    return expanded, Origins(np.concatenate([np.arange(count), count + kept, *parts]), np.concatenate(channels))


def with_piece_times(program: Program, costs: Costs, whole: Program, collapsed: Costs, cluster: Cluster) -> Costs:
    """Return costs of an expanded program in which each message takes as long as in its collective alone.

    So a collective takes as long in messages as in one piece, although they share links with each other. `collapsed`
    are the costs of the `whole` program, whose collectives are in one piece.
    """
    cluster, nodes, duration = cluster.sized(whole.devices), program.message_nodes, costs.duration.copy()
    for each in _place_collectives(whole, collapsed, is_unrolled(whole), cluster):
        row = each.node - len(whole.tasks)
        how = collapsed.algorithms[collapsed.runs_by[row]]
        size = int(whole.messages.size[row]) * payload_factor(each.op, len(each.members))
        times = message_durations(how, cluster, alike_group(cluster, each.members), size)
        duration[each.first : each.first + len(times)] = times
    duration[nodes.stop :] = program.parts.times(duration[nodes])
    return replace(costs, duration=duration)


@once_a_program
def is_unrolled(program: Program) -> Flags:
    """Return which messages are collectives of several devices: over one device one is free, and stays."""
    several: Flags = program.messages.op != Op.P2P
    several[several] = program.sizes_of_groups[program.messages.dst[several]] > 1
    return several


def _place_collectives(program: Program, costs: Costs, several: Flags, cluster: Cluster) -> list[_Placed]:
    """Return the collectives with the places of their messages, behind the messages that stay."""
    count, messages = len(program.tasks), program.messages
    collectives, first = [], count + int((~several).sum())
    for row in np.flatnonzero(several).tolist():
        members = root_first(program, row, cluster)
        unrolled = unroll(costs.algorithms[costs.runs_by[row]], len(members))
        collectives.append(_Placed(count + row, first, members, unrolled, Op(int(messages.op[row]))))
        first += len(unrolled.rounds.src)
    return collectives


def _expand_messages(program: Program, costs: Costs, kept: Ints, collectives: list[_Placed]) -> Messages:
    messages, count = program.messages, len(program.tasks)
    columns = {name: [take_rows(getattr(messages, name), kept)] for name in Messages.__dataclass_fields__}
    for each in collectives:
        row, rounds = each.node - count, each.unrolled.rounds
        size, parts = int(messages.size[row]) * payload_factor(each.op, rounds.members), rounds.all_parts
        if costs.duration.dtype.kind == "i" and size % parts:
            problem = f"cuts a stage's worth into {parts} parts, which the slot model cannot weigh"
            raise RequestError("expand-collectives", f"{problem}; give a model, or tree")
        cut = np.arange(2 * parts + 1)
        edge = cut * (size // parts) + cut * (size % parts) // parts  # of parts as even as whole bytes can be
        new = {name: np.broadcast_to(getattr(messages, name)[row], len(rounds.src)) for name in columns}
        new["op"] = np.broadcast_to(np.int8(Op.P2P), len(rounds.src))
        new["src"], new["dst"] = each.members[rounds.src], each.members[rounds.dst]
        new["size"] = edge[rounds.first + rounds.parts] - edge[rounds.first]
        for name, column in new.items():
            columns[name].append(column)
    return Messages(**{name: concatenate_columns(parts, parts[0].dtype) for name, parts in columns.items()})


def _expand_edges(program: Program, number: Ints, collectives: list[_Placed]) -> Edges:
    """Return the edges outside collectives, those inside, and those from the one to the other."""
    edges = program.edges
    device = np.concatenate([program.tasks.device, program.messages.dst])  # on which each node ends
    stay = (number[edges.before] >= 0) & (number[edges.after] >= 0)
    parts: list[tuple[Ints, ...]] = [(number[edges.before[stay]], number[edges.after[stay]], edges.kind[stay])]
    placed = {each.node: each for each in collectives}
    into, out_of = _rows_by_collective(edges.after, number), _rows_by_collective(edges.before, number)
    for each in collectives:
        unrolled, first = each.unrolled, each.first
        for (before, after), kind in ((unrolled.data, EdgeKind.DATA), (unrolled.room, EdgeKind.ROOM)):
            parts.append(np.broadcast_arrays(first + before, first + after, kind))
        for row in into[each.node]:
            node, kind, begins = edges.before[row], edges.kind[row], unrolled.begins
            if number[node] < 0:
                parts += _between_collectives(placed[int(node)], each, kind)
                continue
            if kind == EdgeKind.DATA:
                begins = unrolled.original[unrolled.rounds.src[unrolled.original] == each.member(device[node])]
                rest = np.setdiff1d(unrolled.begins, begins)
                parts.append(np.broadcast_arrays(number[node], first + rest, EdgeKind.BARRIER))
            parts.append(np.broadcast_arrays(number[node], first + begins, kind))
        for row in out_of[each.node]:
            if number[edges.after[row]] < 0:
                continue
            received, _ = each.messages_at(device[edges.after[row]])
            parts.append(np.broadcast_arrays(received, number[edges.after[row]], edges.kind[row]))
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Edges(*(column.astype(kind) for column, kind in zip(columns, (np.int32, np.int32, np.int8), strict=True)))


def _between_collectives(before: _Placed, after: _Placed, kind: int) -> Iterator[tuple[Ints, ...]]:
    """Yield edges of a collective that begins when another one has ended at all members that both have."""
    for device in np.intersect1d(before.members, after.members).tolist():
        last, begins = before.first + before.unrolled.last[before.member(device)], after.first + after.unrolled.begins
        if kind == EdgeKind.DATA:
            received, _ = before.messages_at(device)
            given = after.first + after.unrolled.gives(after.member(device))
            yield _all_pairs(received, given, kind)
            begins = np.setdiff1d(begins, given)
        yield _all_pairs(last, begins, EdgeKind.BARRIER if kind == EdgeKind.DATA else kind)


def _all_pairs(before: Ints, after: Ints, kind: int) -> tuple[Ints, ...]:
    return np.broadcast_arrays(np.repeat(before, len(after)), np.tile(after, len(before)), np.int64(kind))


def _rows_by_collective(ends: Ints, number: Ints) -> dict[int, list[int]]:
    """Return the rows of edges that touch a collective at this end, by its node."""
    rows: dict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero(number[ends] < 0).tolist():
        rows[int(ends[row])].append(row)
    return rows


def _expand_buffers(program: Program, number: Ints, collectives: list[_Placed]) -> Buffers:
    """Return the buffers; moments of collectives become those of the messages at their device."""
    buffers, by_node = program.buffers, {each.node: each for each in collectives}
    begin, end, until = (  # those of collectives are replaced below
        np.where(moment < 0, moment, 2 * number[moment >> 1] + (moment & 1))
        for moment in (buffers.begin, buffers.end, buffers.kept_until)
    )
    kept, kept_until = [buffers.kept], [until]

    def messages_at(moment: int, buffer: int) -> tuple[Ints, Ints]:
        return by_node[moment >> 1].messages_at(int(buffers.device[buffer]))

    def keep(buffer: int, messages: Ints) -> None:
        kept.append(np.full(len(messages), buffer))
        kept_until.append(2 * messages + 1)

    for buffer in np.flatnonzero(_is_of_collective(buffers.begin, number)).tolist():
        moment = int(buffers.begin[buffer])
        received, carried = messages_at(moment, buffer)
        begin[buffer] = 2 * received[-1] + 1 if moment & 1 else 2 * received[0]
        if moment & 1:  # what a device has to hand on, it keeps as long
            keep(buffer, carried)
    held_by = (end, buffers.end, np.arange(len(end))), (until, buffers.kept_until, buffers.kept)
    for column, source, owner in held_by:
        for row in np.flatnonzero(_is_of_collective(source, number)).tolist():
            buffer = int(owner[row])
            received, carried = messages_at(int(source[row]), buffer)
            if source[row] & 1 == 0:  # what arrives is written over it
                column[row] = 2 * received[0]
                continue
            arrives = (
                buffers.category[buffer] == Category.COMMUNICATION and buffers.begin[buffer] >> 1 == source[row] >> 1
            )
            last = received if arrives else carried
            column[row] = 2 * last[-1] + 1
            keep(buffer, last[:-1])
    moments = {"begin": begin, "end": end, "kept": np.concatenate(kept), "kept_until": np.concatenate(kept_until)}
    return replace(buffers, **{name: column.astype(np.int32) for name, column in moments.items()})


def _is_of_collective(moment: Ints, number: Ints) -> Flags:
    replaced: Flags = (moment >= 0) & (number[moment >> 1] < 0)
    return replaced

"""The time of a collective alone: its messages share links max-min fairly with each other, and with no others.

A message waits for its two ends to be done with their round before (in its channel), for its latency, and for its
bytes, whose rate is fair on the edges that it shares. Messages that never have to share end as on the longest path
through the rounds; only others are played. Neither way uses an engine: tests compare both with one.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.numeric.columns import Flags, Floats, Ints, group_numbers, group_starts, slice_rows, sort_by
from cdpsim.numeric.paths import successors
from cdpsim.program import Op
from cdpsim.program.collectives import Algorithm, Round, candidates

_EQUAL = 1e-12  # times and rates that differ by less, relatively, are equal


@dataclass(frozen=True, eq=False)
class Rounds:
    """An algorithm's messages over some members, round by round."""

    begin: Ints  # round r has the messages begin[r]:begin[r + 1] ...
    times: Ints  # ... and happens so often
    src: Ints  # the member that a message leaves
    dst: Ints
    channel: Ints
    first: Ints  # the first of the parts that a message carries
    parts: Ints
    members: int
    channels: int
    all_parts: int  # of the payload

    @cached_property
    def number(self) -> Ints:
        """The round of each message."""
        return np.repeat(np.arange(len(self.times)), np.diff(self.begin))

    @cached_property
    def sender(self) -> Ints:
        """The port that each message leaves: a member and a channel, as one number."""
        return self.src * self.channels + self.channel

    @cached_property
    def receiver(self) -> Ints:
        """The port at which each message arrives."""
        return self.dst * self.channels + self.channel

    @cached_property
    def steps(self) -> list[tuple[slice, Ints, int]]:
        """The messages of each round, the ports that they move, and how often it happens."""
        rows = [slice(low, high) for low, high in pairwise(self.begin.tolist())]
        moved = [np.unique(np.concatenate([self.sender[each], self.receiver[each]])) for each in rows]
        return list(zip(rows, moved, self.times.tolist(), strict=True))

    @property
    def ports(self) -> int:
        """The number of members times channels."""
        return self.members * self.channels

    @cached_property
    def pairs(self) -> tuple[Ints, Ints, Ints]:
        """The pairs of members (src, dst) that have messages, and the pair of each message."""
        pairs, pair = np.unique(self.src * self.members + self.dst, return_inverse=True)
        return pairs // self.members, pairs % self.members, pair

    @property
    def pair(self) -> Ints:
        """The pair of each message."""
        return self.pairs[2]

    @cached_property
    def share(self) -> Floats:
        """The share of the payload that each message carries."""
        return self.parts / self.all_parts

    @cached_property
    def waits(self) -> tuple[Ints, Ints]:
        """(before, after): a message waits for those of the round before at its ports; some pairs are there twice."""
        message = np.tile(np.arange(len(self.src)), 2)
        port, number = np.concatenate([self.sender, self.receiver]), np.tile(self.number, 2)
        order = sort_by(port, number)
        message, port, number = message[order], port[order], number[order]
        start = group_starts(port, number)  # of the messages of one port in one round
        goes_on = np.append(port[start[1:]] == port[start[:-1]], False)
        count = np.where(goes_on, np.diff(np.append(start[1:], [len(order), len(order)])), 0)
        group = group_numbers(start, len(order))
        after = message[slice_rows(np.append(start[1:], 0)[group], count[group])]
        return np.repeat(message, count[group]), after


@lru_cache(maxsize=128)
def lay_out_rounds(how: Algorithm, members: int, *, merged: bool = False) -> Rounds:
    """Lay out an algorithm's rounds; equal rounds that follow each other are there once if they are merged."""
    rounds: list[Round] = []
    times: list[int] = []
    for each in how.schedule(members):
        columns = (each.src, each.dst, each.parts)
        if merged and rounds and all(map(np.array_equal, columns, (rounds[-1].src, rounds[-1].dst, rounds[-1].parts))):
            times[-1] += 1
        else:
            rounds.append(each)
            times.append(1)
    src, dst, first, parts = (np.concatenate(column) for column in zip(*rounds, strict=True))
    begin = np.cumsum([0, *(len(each.src) for each in rounds)])
    channel = how.channel(members, first)
    sizes = members, how.channels, how.parts(members)
    return Rounds(begin, np.array(times), src, dst, channel, first, parts, *sizes)


@dataclass(frozen=True, eq=False)
class EdgesTaken:
    """The edges that a collective's messages take, without their costs."""

    rounds: Rounds  # merged
    edges: Ints  # that a pair's messages take, a row each; -1 fills rows up

    @property
    def count(self) -> int:
        """The number of edges."""
        return int(self.edges.max(initial=-1)) + 1

    @cached_property
    def carried(self) -> Floats:
        """The share of the payload that each edge carries in all."""
        rounds = self.rounds
        pair, hop = np.nonzero(self.edges >= 0)
        shares = np.bincount(rounds.pair, rounds.times[rounds.number] * rounds.share, len(self.edges))
        return np.bincount(self.edges[pair, hop], shares[pair], self.count).astype(np.float64)

    @cached_property
    def lines(self) -> tuple[Ints, Ints, Flags]:
        """The pair and the edge of each line from port to port, and which edges have several ports at both ends."""
        rounds, count = self.rounds, self.count
        lines = np.unique(np.stack([rounds.pair, rounds.sender, rounds.receiver]), axis=1)
        row, hop = np.nonzero(self.edges[lines[0]] >= 0)
        pair, edge = lines[0][row], self.edges[lines[0][row], hop]
        ends = [np.unique(edge * rounds.ports + end[row]) // rounds.ports for end in lines[1:]]
        alone = [np.bincount(end, minlength=count) == 1 for end in ends]
        return pair, edge, ~alone[0] & ~alone[1]


@dataclass(frozen=True, eq=False)
class CollectiveOnLinks:
    """A collective's messages on the links between its members."""

    how: Algorithm
    taken: EdgesTaken
    latency: Floats  # of each pair
    fastest: Floats  # the rate that a pair's message reaches alone
    bandwidth: Floats  # of each edge
    rates: dict[tuple[bytes, bytes], Floats] = field(default_factory=dict)  # of pairs and their flows, once known

    @property
    def rounds(self) -> Rounds:
        """The rounds of messages, merged."""
        return self.taken.rounds

    def seconds(self, size: float, most: float = inf) -> float:
        """Return its time; inf if even the contention-free time exceeds `most`."""
        unshared = self.unshared(size)
        if unshared > most * (1 + _EQUAL):
            return inf
        return float(self.times(size)[1].max()) if self._crowded.any() else unshared

    def unshared(self, size: float) -> float:
        """Return its time if no message slowed another down: the longest path."""
        rounds, duration, ready = self.rounds, self._durations(self.rounds, size), np.zeros(self.rounds.ports)
        for rows, moved, left in rounds.steps:
            while left:
                before, left = ready[moved], left - 1
                self._advance(rounds, rows, duration, ready)
                if left:
                    step = ready[moved] - before
                    if np.ptp(step) <= _EQUAL * step[0]:  # and so do all further rounds of the kind
                        ready[moved] += left * step
                        left = 0
        return float(ready.max())

    def times(self, size: float) -> tuple[Floats, Floats]:
        """Return when each message starts and ends, round by round."""
        rounds = lay_out_rounds(self.how, self.rounds.members)
        start, duration = np.zeros(len(rounds.src)), self._durations(rounds, size)
        ready = np.zeros(rounds.ports)
        for low, high in pairwise(rounds.begin.tolist()):
            start[low:high] = self._advance(rounds, slice(low, high), duration, ready)
        end = start + duration
        if self._is_shared(rounds, start, end):
            return _SharedPlayback(self, rounds, size).run()
        return start, end

    @staticmethod
    def _advance(rounds: Rounds, rows: slice, duration: Floats, ready: Floats) -> Floats:
        """Let a round go as soon as its ports are ready; return when its messages start."""
        sender, receiver = rounds.sender[rows], rounds.receiver[rows]
        start = np.maximum(ready[sender], ready[receiver])
        end = start + duration[rows]
        ready[sender] = np.maximum(ready[sender], end)
        ready[receiver] = np.maximum(ready[receiver], end)
        return start

    def _durations(self, rounds: Rounds, size: float) -> Floats:
        """Return the time of each message if it shares nothing."""
        return self.latency[rounds.pair] + rounds.share * size / self.fastest[rounds.pair]

    @cached_property
    def least(self) -> tuple[Floats, Floats]:
        """The time (fixed, by byte) of every port's messages one after another, and of each edge's bytes."""
        rounds, pair = self.rounds, self.rounds.pair
        weight = rounds.times[rounds.number]
        fixed, by_byte = weight * self.latency[pair], weight * rounds.share / self.fastest[pair]
        ports = [np.bincount(end, each) for each in (fixed, by_byte) for end in (rounds.sender, rounds.receiver)]
        edges = self.taken.carried / self.bandwidth
        return np.concatenate([*ports[:2], np.zeros(len(edges))]), np.concatenate([*ports[2:], edges])

    @cached_property
    def _crowded(self) -> Flags:
        """Edges on which messages of different senders, and of different receivers, might be more than fits at once."""
        pair, edge, mixed = self.taken.lines
        load = np.bincount(edge, self.fastest[pair], len(mixed))
        crowded: Flags = mixed & (load > self.bandwidth * (1 + _EQUAL))
        return crowded

    def _is_shared(self, rounds: Rounds, start: Floats, end: Floats) -> bool:
        """Whether, if messages went like that, an edge would have more of them at once than fit."""
        if not self._crowded.any():
            return False
        edges, pair = self.taken.edges, rounds.pair
        message, hop = np.nonzero((edges >= 0)[pair] & self._crowded[edges][pair])
        pair = pair[message]
        edge, rate, late = edges[pair, hop], self.fastest[pair], _EQUAL * end.max()
        begin, until = start[message] + self.latency[pair], end[message] - late
        flows = begin < until
        time = np.concatenate([begin[flows], until[flows]])
        edge, rate = np.tile(edge[flows], 2), np.concatenate([rate[flows], -rate[flows]])
        order = np.lexsort((time, edge))
        edge, load = edge[order], np.cumsum(rate[order])  # an edge's flows come to nothing before the next one's begin
        return bool((load > self.bandwidth[edge] * (1 + 1e-9)).any())


class _SharedPlayback:
    """A run of a collective whose messages share edges: from one time at which any begins or ends to the next."""

    def __init__(self, alone: CollectiveOnLinks, rounds: Rounds, size: float) -> None:
        self.alone, self.rounds = alone, rounds
        waits_for, self.first, self.reach = successors(*rounds.waits, len(rounds.src))
        self.waits_for = waits_for
        self.size = rounds.share * size
        self.flows = (alone.taken.edges[rounds.pair, 0] >= 0) & (self.size > 0)
        self.start, self.end = np.zeros(len(waits_for)), np.zeros(len(waits_for))

    def run(self) -> tuple[Floats, Floats]:
        """Return when each message starts and ends."""
        latency = self.alone.latency[self.rounds.pair]
        now, waiting = 0.0, np.flatnonzero(self.waits_for == 0)
        joins, active, left = latency[waiting], waiting[:0], latency[:0]
        while len(waiting) or len(active):
            rate = self._rates(active)
            with np.errstate(divide="ignore"):
                due = now + left / rate
            then = float(min(joins.min(initial=inf), due.min(initial=inf)))
            soon = then * (1 + _EQUAL)
            left, now = left - rate * (then - now), then
            come = waiting[joins <= soon]
            waiting, joins = waiting[joins > soon], joins[joins > soon]
            over = np.concatenate([active[due <= soon], come[~self.flows[come]]])
            come = come[self.flows[come]]
            active, left = np.append(active[due > soon], come), np.append(left[due > soon], self.size[come])
            self.end[over] = now
            ready = self._freed(over)
            self.start[ready] = now
            waiting, joins = np.append(waiting, ready), np.append(joins, now + latency[ready])
        return self.start, self.end

    def _freed(self, over: Ints) -> Ints:
        """Return the messages that wait for no other now that these are over."""
        count = self.first[over + 1] - self.first[over]
        after, many = np.unique(self.reach[slice_rows(self.first[over], count)], return_counts=True)
        self.waits_for[after] -= many
        freed: Ints = after[self.waits_for[after] == 0]
        return freed

    def _rates(self, active: Ints) -> Floats:
        """Return the fair rate of each message that is on its way."""
        pair, which, flows = np.unique(self.rounds.pair[active], return_inverse=True, return_counts=True)
        key, known = (pair.tobytes(), flows.tobytes()), self.alone.rates
        if key not in known:
            known[key] = fair_rates(self.alone.taken.edges[pair], flows, self.alone.bandwidth)
        rates: Floats = known[key][which]
        return rates


def fair_rates(edges: Ints, flows: Ints, bandwidth: Floats) -> Floats:
    """Return max-min fair rates of bundles of flows, by progressive filling (Bertsekas and Gallager 1992, 6.5.2).

    All rates grow alike until an edge is full; its flows keep their rates, and the others grow on.
    """
    bundle, hop = np.nonzero(edges >= 0)
    edge, many, room = edges[bundle, hop], flows[bundle].astype(float), bandwidth.copy()
    rate, grows = np.zeros(len(edges)), np.ones(len(edges), np.bool_)
    while len(bundle):
        load = np.bincount(edge, many, len(room))
        share = room[edge] / load[edge]
        level = share.min()
        stopped = bundle[share <= level * (1 + _EQUAL)]
        rate[stopped], grows[stopped] = level, False
        left = grows[bundle]
        room -= level * (load - np.bincount(edge[left], many[left], len(room)))
        bundle, edge, many = bundle[left], edge[left], many[left]
    return rate


class AlikeGroup(NamedTuple):
    """The members of a collective; groups of the same size are equal if their ways are."""

    ways: bytes
    members: tuple[int, ...]

    def __hash__(self) -> int:
        return hash((self.ways, len(self.members)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AlikeGroup) and (self.ways, len(self.members)) == (other.ways, len(other.members))


def alike_group(cluster: Cluster, members: Ints) -> AlikeGroup:
    """Return a group of members, equal to others that have the same ways."""
    return AlikeGroup(cluster.ways_between(members), tuple(members.tolist()))


@lru_cache(maxsize=256)
def collective_on_links(how: Algorithm, cluster: Cluster, group: AlikeGroup) -> CollectiveOnLinks:
    """Lay out an algorithm's messages on the links between the members of a group."""
    pairs, members = lay_out_rounds(how, len(group.members), merged=True).pairs, np.array(group.members)
    src, dst = members[pairs[0]], members[pairs[1]]
    edges, bandwidth = cluster.shared_edges(src, dst)
    taken = _edges_taken(how, len(group.members), edges.shape, edges.tobytes())
    return CollectiveOnLinks(how, taken, *cluster.link_costs(src, dst), bandwidth)


@lru_cache(maxsize=256)  # clusters that differ in what edges cost have the same ones
def _edges_taken(how: Algorithm, members: int, shape: tuple[int, ...], edges: bytes) -> EdgesTaken:
    return EdgesTaken(lay_out_rounds(how, members, merged=True), np.frombuffer(edges, np.int64).reshape(shape))


def fastest_algorithm(op: Op, name: str, cluster: Cluster, members: Ints, size: int) -> tuple[Algorithm, float]:
    """Return the fastest algorithm that `name` allows for a payload, of equals the first, and its time."""
    return fastest_in_group(op, name, cluster, alike_group(cluster, members), size)


def are_alike(cluster: Cluster, groups: Ints) -> bool:
    """Return whether collectives take the same time in each of some groups, a row for each."""
    return len({alike_group(cluster, members) for members in groups}) == 1


@lru_cache(maxsize=4096)
def fastest_in_group(
    op: Op, name: str, cluster: Cluster, group: AlikeGroup, size: int, *, between: Fraction = Fraction(1)
) -> tuple[Algorithm, float]:
    """Return what `fastest_algorithm` returns for a group of members; `between` is a share as in `candidates`."""
    allowed = _allowed(op, name, cluster, group, between)
    if len(group.members) == 1 or cluster.is_free:
        return allowed[0], 0.0
    laid_out, (fixed, by_byte) = _choices(op, name, cluster, group, between)
    bounds, least, best = (fixed + size * by_byte).max(axis=1), inf, 0
    for k in np.argsort(bounds, kind="stable").tolist():
        if bounds[k] > least * (1 + _EQUAL):
            break
        least, best = min((least, best), (laid_out[k].seconds(size, most=least), k))
    return allowed[best], least


def _allowed(op: Op, name: str, cluster: Cluster, group: AlikeGroup, between: Fraction) -> list[Algorithm]:
    return candidates(op, name, len(group.members), cluster.cards(np.array(group.members)), between)


@lru_cache(maxsize=256)
def _choices(
    op: Op, name: str, cluster: Cluster, group: AlikeGroup, between: Fraction
) -> tuple[list[CollectiveOnLinks], tuple[Floats, Floats]]:
    """Return the allowed algorithms on their links, and their bounds: a row for each, filled up by zeros."""
    found = [collective_on_links(how, cluster, group) for how in _allowed(op, name, cluster, group, between)]
    bounds = np.zeros((2, len(found), max(len(each.least[0]) for each in found)))
    for k, each in enumerate(found):
        bounds[:, k, : len(each.least[0])] = each.least
    return found, (bounds[0], bounds[1])


@lru_cache(maxsize=32)
def message_durations(how: Algorithm, cluster: Cluster, group: AlikeGroup, size: int) -> Floats:
    """Return the time of each message, in the order of rounds."""
    start, end = collective_on_links(how, cluster, group).times(size)
    return end - start

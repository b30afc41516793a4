"""The time of a collective alone: its messages share links max-min fairly with each other, and with no others.

A message waits for its two ends to be done with their round before (in its channel), for its latency, and for its
bytes, whose rate is fair on the edges that it shares. Messages that never have to share end as on the longest path
through the rounds; only others are played out. Neither knows of an engine: tests hold both against one.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.program import Op
from cdpsim.program.collectives import Algorithm, candidates

_SAME = 1e-12  # times and rates that differ by less, relatively, are one
_FEW = 8  # rounds, of which a look shows soon whether there is anything to share


@dataclass(frozen=True, eq=False)
class Rounds:
    """An algorithm's messages over k members, round by round; equal rounds that follow each other are there once."""

    first: Ints  # round r has the messages first[r]:first[r + 1] ...
    times: Ints  # ... and happens so often
    sender: Ints  # the member that a message leaves, and its channel, as one number; likewise
    receiver: Ints
    pair: Ints  # which of the pairs (src, dst)
    share: Floats  # of the payload
    src: Ints
    dst: Ints

    @cached_property
    def weight(self) -> Ints:
        """How often each message goes."""
        return np.repeat(self.times, np.diff(self.first))

    @cached_property
    def ports(self) -> int:
        """The number of members times channels."""
        return int(max(self.sender.max(), self.receiver.max())) + 1

    @cached_property
    def written_out(self) -> "Rounds":
        """All of it with every round for itself."""
        rows = [np.arange(low, high) for low, high in zip(self.first[:-1], self.first[1:], strict=True)]
        every = np.concatenate([row for row, times in zip(rows, self.times, strict=True) for _ in range(times)])
        length = np.repeat(np.diff(self.first), self.times)
        columns = {name: getattr(self, name)[every] for name in ("sender", "receiver", "pair", "share")}
        first = np.concatenate([[0], np.cumsum(length)])
        return replace(self, first=first, times=np.ones(len(length), np.int64), **columns)

    @cached_property
    def followers(self) -> tuple[Ints, Ints, Ints]:
        """(begin, after, waits): message m lets after[begin[m]:begin[m + 1]] go, each of which waits for so many."""
        number = np.repeat(np.arange(len(self.times)), np.diff(self.first))
        message = np.tile(np.arange(len(number)), 2)
        port, turn = np.concatenate([self.sender, self.receiver]), np.tile(number, 2)
        order = np.lexsort((turn, port))
        message, port, turn = message[order], port[order], turn[order]
        new = np.append(True, (np.diff(port) != 0) | (np.diff(turn) != 0))
        group = np.cumsum(new) - 1  # of the messages of one port in one round: one or two
        held = np.full((group[-1] + 1, 2), -1)
        held[group, 1 - new] = message
        linked = np.flatnonzero(np.diff(port[new]) == 0)
        before = np.repeat(held[linked], 2, axis=1).ravel()
        after = np.tile(held[linked + 1], 2).ravel()
        real = (before >= 0) & (after >= 0)
        before, after = before[real], after[real]
        order = np.argsort(before, kind="stable")
        waits = np.bincount(after, minlength=len(number))
        return np.searchsorted(before[order], np.arange(len(number) + 1)), after[order], waits


@lru_cache(maxsize=64)
def rounds_of(how: Algorithm, k: int) -> Rounds:
    """Lay out an algorithm's rounds for k members."""
    schedule, parts = how.schedule(k), how.parts(k)
    kept, times = [schedule[0]], [1]
    for one in schedule[1:]:
        last = kept[-1]
        if all(np.array_equal(getattr(one, name), getattr(last, name)) for name in ("src", "dst", "parts")):
            times[-1] += 1
        else:
            kept.append(one)
            times.append(1)
    src, dst, first, count = (np.concatenate(column) for column in zip(*kept, strict=True))
    channel = how.channel(k, first)
    pairs, pair = np.unique(src * k + dst, return_inverse=True)
    begin = np.concatenate([[0], np.cumsum([len(one.src) for one in kept])])
    sender, receiver = (end * how.channels + channel for end in (src, dst))
    return Rounds(begin, np.array(times), sender, receiver, pair, count / parts, pairs // k, pairs % k)


@dataclass(frozen=True, eq=False)
class Alone:
    """A collective's messages on the links between its members."""

    rounds: Rounds
    latency: Floats  # of each pair
    fastest: Floats  # what a pair's message reaches alone
    edges: Ints  # that a pair's messages take, a row each; -1 fills rows up
    bandwidth: Floats  # of each edge
    rates: dict[tuple[bytes, bytes], Floats] = field(default_factory=dict)  # of pairs with so many flows, once known

    def bound(self, size: float) -> float:
        """Give a lower bound of its time: that of its slowest edge or member by itself."""
        fixed, by_byte = self._least
        return float((fixed + size * by_byte).max())

    def seconds(self, size: float) -> float:
        """Give its time."""
        if not self._crowded.any():
            return self.unshared(size)
        return float(self.times(size)[1].max())

    def unshared(self, size: float) -> float:
        """Give its time if no message slowed another down: the longest path."""
        rounds, duration, ready = self.rounds, self._durations(self.rounds, size), np.zeros(self.rounds.ports)
        first = rounds.first.tolist()
        for (low, high), left in zip(pairwise(first), rounds.times.tolist(), strict=True):
            while left:
                before, left = ready.copy(), left - 1
                self._advance(rounds, slice(low, high), duration, ready)
                if left:
                    moved = np.unique(np.concatenate([rounds.sender[low:high], rounds.receiver[low:high]]))
                    step = ready[moved] - before[moved]
                    if np.ptp(step) <= _SAME * step[0]:  # and so do all further rounds of the kind
                        ready[moved] += left * step
                        left = 0
        return float(ready.max())

    def times(self, size: float) -> tuple[Floats, Floats]:
        """When each message starts and ends."""
        rounds = self.rounds.written_out
        start, duration = np.zeros(len(rounds.pair)), self._durations(rounds, size)
        ready, first = np.zeros(rounds.ports), rounds.first.tolist()
        for low, high in pairwise(first):
            start[low:high] = self._advance(rounds, slice(low, high), duration, ready)
        end = start + duration
        few = rounds.first[min(_FEW, len(rounds.times))]
        if self._is_shared(rounds, start[:few], end[:few]) or self._is_shared(rounds, start, end):
            return _Played(self, rounds, size).run()
        return start, end

    @staticmethod
    def _advance(rounds: Rounds, rows: slice, duration: Floats, ready: Floats) -> Floats:
        """Let a round go as soon as its ends are ready, and say when its messages start."""
        sender, receiver = rounds.sender[rows], rounds.receiver[rows]
        start = np.maximum(ready[sender], ready[receiver])
        end = start + duration[rows]
        ready[sender] = np.maximum(ready[sender], end)
        ready[receiver] = np.maximum(ready[receiver], end)
        return start

    def _durations(self, rounds: Rounds, size: float) -> Floats:
        """Give the time of each message if it shares nothing."""
        return self.latency[rounds.pair] + rounds.share * size / self.fastest[rounds.pair]

    @cached_property
    def _least(self) -> tuple[Floats, Floats]:
        """(fixed, by byte) of every member's messages one after another, and of what every edge carries."""
        rounds, weight, pair = self.rounds, self.rounds.weight, self.rounds.pair
        fixed, by_byte = weight * self.latency[pair], weight * rounds.share / self.fastest[pair]
        ports = [np.bincount(end, each) for each in (fixed, by_byte) for end in (rounds.sender, rounds.receiver)]
        taken, edge = self._taken
        carried = np.bincount(pair, weight * rounds.share, len(self.latency))
        edges = np.bincount(edge, carried[taken], len(self.bandwidth)) / self.bandwidth
        return np.concatenate([*ports[:2], np.zeros(len(edges))]), np.concatenate([*ports[2:], edges])

    @cached_property
    def _taken(self) -> tuple[Ints, Ints]:
        """(pair, edge): who takes which."""
        pair, hop = np.nonzero(self.edges >= 0)
        return pair, self.edges[pair, hop]

    @cached_property
    def _crowded(self) -> Flags:
        """Edges on which messages of different senders, and of different receivers, might be more than fits at once."""
        rounds = self.rounds
        lines = np.unique(np.stack([rounds.pair, rounds.sender, rounds.receiver]), axis=1)
        row, hop = np.nonzero(self.edges[lines[0]] >= 0)
        edge, count = self.edges[lines[0][row], hop], len(self.bandwidth)
        load = np.bincount(edge, self.fastest[lines[0][row]], count)
        ends = [np.unique(edge * rounds.ports + end[row]) // rounds.ports for end in lines[1:]]
        alone = [np.bincount(end, minlength=count) == 1 for end in ends]
        crowded: Flags = (load > self.bandwidth * (1 + _SAME)) & ~alone[0] & ~alone[1]
        return crowded

    def _is_shared(self, rounds: Rounds, start: Floats, end: Floats) -> bool:
        """Whether, if the first messages went like that, an edge would have more of them at once than it can take."""
        if not self._crowded.any():
            return False
        rows = rounds.pair[: len(start)]
        message, hop = np.nonzero((self.edges >= 0)[rows] & self._crowded[self.edges][rows])
        if not len(message):
            return False
        pair = rows[message]
        edge, rate, late = self.edges[pair, hop], self.fastest[pair], _SAME * end.max()
        begin, until = start[message] + self.latency[pair], end[message] - late
        flows = begin < until
        time = np.concatenate([begin[flows], until[flows]])
        edge, rate = np.tile(edge[flows], 2), np.concatenate([rate[flows], -rate[flows]])
        order = np.lexsort((time, edge))
        edge, load = edge[order], np.cumsum(rate[order])  # an edge's flows come to nothing before the next one's begin
        return bool((load > self.bandwidth[edge] * (1 + 1e-9)).any())


class _Played:
    """The run of a collective whose messages share edges: from one time at which any begins or ends to the next."""

    def __init__(self, alone: Alone, rounds: Rounds, size: float) -> None:
        self.alone, self.rounds = alone, rounds
        self.begin, self.after, waits = rounds.followers
        self.waits = waits.copy()
        self.size = rounds.share * size
        self.flows = (alone.edges[rounds.pair, 0] >= 0) & (self.size > 0)
        self.start, self.end = np.zeros(len(waits)), np.zeros(len(waits))

    def run(self) -> tuple[Floats, Floats]:
        """When each message starts and ends."""
        latency = self.alone.latency[self.rounds.pair]
        now, waiting = 0.0, np.flatnonzero(self.waits == 0)
        joins, active, left = latency[waiting], waiting[:0], latency[:0]
        while len(waiting) or len(active):
            rate = self._rates(active)
            with np.errstate(divide="ignore"):
                due = now + left / rate
            then = float(min(joins.min(initial=inf), due.min(initial=inf)))
            soon = then * (1 + _SAME)
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
        """Those that wait for nothing now that these are over."""
        count = self.begin[over + 1] - self.begin[over]
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        after, many = np.unique(self.after[np.repeat(self.begin[over], count) + offset], return_counts=True)
        self.waits[after] -= many
        freed: Ints = after[self.waits[after] == 0]
        return freed

    def _rates(self, active: Ints) -> Floats:
        """The fair rate of each message that is on its way."""
        pair, which, flows = np.unique(self.rounds.pair[active], return_inverse=True, return_counts=True)
        key, known = (pair.tobytes(), flows.tobytes()), self.alone.rates
        if key not in known:
            known[key] = fair(self.alone.edges[pair], flows, self.alone.bandwidth)
        return known[key][which]


def fair(edges: Ints, flows: Ints, bandwidth: Floats) -> Floats:
    """Give max-min fair rates of bundles of so many flows, by progressive filling (Bertsekas and Gallager 1992, 6.5.2).

    All rates grow alike until an edge is full; its flows keep theirs, and the others go on.
    """
    bundle, hop = np.nonzero(edges >= 0)
    edge, many, room = edges[bundle, hop], flows[bundle].astype(float), bandwidth.copy()
    rate, grows = np.zeros(len(edges)), np.ones(len(edges), np.bool_)
    while len(bundle):
        load = np.bincount(edge, many, len(room))
        share = room[edge] / load[edge]
        level = share.min()
        held = bundle[share <= level * (1 + _SAME)]
        rate[held], grows[held] = level, False
        left = grows[bundle]
        room -= level * (load - np.bincount(edge[left], many[left], len(room)))
        bundle, edge, many = bundle[left], edge[left], many[left]
    return rate


class _Group(NamedTuple):
    """The members of a collective; groups are equal if their ways are."""

    place: bytes
    members: tuple[int, ...]

    def __hash__(self) -> int:
        return hash((self.place, len(self.members)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Group) and (self.place, len(self.members)) == (other.place, len(other.members))


def _group(cluster: Cluster, members: Ints) -> _Group:
    return _Group(cluster.ways_between(members), tuple(members.tolist()))


@lru_cache(maxsize=256)
def _laid_out(how: Algorithm, cluster: Cluster, group: _Group) -> Alone:
    rounds, devices = rounds_of(how, len(group.members)), np.array(group.members)
    src, dst = devices[rounds.src], devices[rounds.dst]
    latency, fastest_rate = cluster.link_costs(src, dst)
    return Alone(rounds, latency, fastest_rate, *cluster.shared_edges(src, dst))


def fastest(op: Op, name: str, cluster: Cluster, members: Ints, size: int) -> tuple[Algorithm, float]:
    """Give the fastest algorithm that `name` allows for a payload, of equals the first, and what it takes."""
    return _fastest(op, name, cluster, _group(cluster, members), size)


def durations(how: Algorithm, cluster: Cluster, members: Ints, size: int) -> Floats:
    """Give what each message takes, in the order of rounds."""
    return _durations(how, cluster, _group(cluster, members), size)


def laid_out(how: Algorithm, cluster: Cluster, members: Ints) -> Alone:
    """Lay out an algorithm's messages between the members of a group."""
    return _laid_out(how, cluster, _group(cluster, members))


@lru_cache(maxsize=4096)
def _fastest(op: Op, name: str, cluster: Cluster, group: _Group, size: int) -> tuple[Algorithm, float]:
    members = np.array(group.members)
    allowed = candidates(op, name, len(members), cluster.cards(members))
    if len(members) == 1 or cluster.is_free:
        return allowed[0], 0.0
    alone = [_laid_out(how, cluster, group) for how in allowed]
    bounds, best, found = [one.bound(size) for one in alone], inf, 0
    for at in np.argsort(bounds, kind="stable").tolist():
        if bounds[at] > best * (1 + _SAME):
            break
        if len(allowed) > 1 and alone[at].unshared(size) > best * (1 + _SAME):
            continue
        seconds = alone[at].seconds(size)
        if (seconds, at) < (best, found):
            best, found = seconds, at
    return allowed[found], best


@lru_cache(maxsize=32)
def _durations(how: Algorithm, cluster: Cluster, group: _Group, size: int) -> Floats:
    start, end = _laid_out(how, cluster, group).times(size)
    return end - start

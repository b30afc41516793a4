"""Textbook collectives: how many rounds they take, how much each member sends, and to whom.

With latency a and bandwidth b of all links, a payload of s bytes takes rounds * a + carried / parts * s / b (Thakur,
Rabenseifner & Gropp 2005, section 3; nothing is charged for adding up). An algorithm's counts are taken from its
rounds. Rings and rails, which have as many rounds as members, state theirs in closed form.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from cdpsim.cluster import Cards
from cdpsim.numeric.columns import Ints
from cdpsim.program import Op
from cdpsim.program import collectives as by_rounds
from cdpsim.program.collectives import (
    BLOCKS,
    MOST_MEMBERS,
    RoundList,
    double_tree_rounds,
    largest_power_of_two,
    reverse_rounds,
)

Nodes = tuple[tuple[int, ...], ...]  # the members of a group in each of its nodes, as their numbers in the group


class Counts(NamedTuple):
    """The cost of an algorithm over a group of one size."""

    rounds: int
    carried: int  # parts in the largest message of a round, summed over all rounds
    sends: Ints  # parts that each member sends in all, the root first


@dataclass(frozen=True)
class Algorithm:
    """A way to run a collective over k members, as the messages of its rounds; equality holds across processes."""

    layout: Callable[[Any], RoundList]  # makes the rounds for k members, or for these `members`
    cut: int | Callable[[int], int] | None = None  # into how many equal parts the payload is cut; None: into k
    closed_form: Callable[[int], Counts] | None = field(default=None, compare=False)  # None: the rounds are counted
    members: Nodes = ()  # in nodes, or in the order of each channel, where that matters
    channels: int = 1  # that run side by side, each with an equal run of the parts
    reverse: bool = False  # whether rounds and messages go in the opposite direction

    def schedule(self, k: int) -> RoundList:
        """Return its rounds."""
        rounds = self.layout(self.members or k)
        return reverse_rounds(rounds) if self.reverse else rounds

    def parts(self, k: int) -> int:
        """Return into how many equal parts the payload is cut."""
        if self.cut is None:
            return k
        return self.cut if isinstance(self.cut, int) else self.cut(k)

    def rounds(self, k: int) -> int:
        """Return how many rounds it takes."""
        return self._counts(k).rounds

    def carried(self, k: int) -> int:
        """Return the parts in the largest message of each round, summed over all rounds."""
        return self._counts(k).carried

    def sends(self, k: int) -> Ints:
        """Return the parts that each member sends in all, the root first."""
        return self._counts(k).sends

    def _counts(self, k: int) -> Counts:
        return self.closed_form(k) if self.closed_form else _count_rounds(self, k)

    def channel(self, k: int, first: Ints) -> Ints:
        """Return the channel of each message, given its first part."""
        return first * self.channels // self.parts(k)


@lru_cache(maxsize=256)
def _count_rounds(how: Algorithm, k: int) -> Counts:
    """Count the messages of an algorithm's rounds over k members."""
    rounds, sends = how.schedule(k), np.zeros(k, dtype=np.int64)
    for each in rounds:
        np.add.at(sends, each.src, each.parts)
    return Counts(len(rounds), sum(int(each.parts.max()) for each in rounds), sends)


def _ring_counts(times: int, channels: int, k: int) -> Counts:
    """Count messages of one part in every round and channel, from each member to the next."""
    rounds = times * (k - 1)
    return Counts(rounds, rounds, np.full(k, channels * rounds))


def _rails_counts(inside: int, across: int, k: int) -> Counts:
    """Count the messages of rings inside nodes, there and back, and of a ring along each rail between."""
    rounds, carried = 2 * (inside - 1) + 2 * (across - 1), 2 * (inside - 1) * across + 2 * (across - 1)
    return Counts(rounds, carried, np.full(k, 2 * (inside * across - 1)))


@lru_cache(maxsize=64)
def hierarchical_all_reduce(nodes: Nodes) -> Algorithm:
    """Make the all-reduce for members in these nodes; the group must be theirs."""
    return Algorithm(by_rounds.hierarchical_rounds, len(nodes), members=nodes)


@lru_cache(maxsize=64)
def rails_all_reduce(nodes: Nodes) -> Algorithm:
    """Make the all-reduce by rails for members in these nodes; uneven nodes are cut into equal parts of nodes."""
    inside = gcd(*map(len, nodes))
    rows = tuple(node[low : low + inside] for node in nodes for low in range(0, len(node), inside))
    counts = partial(_rails_counts, inside, len(rows))
    return Algorithm(by_rounds.rails_rounds, inside * len(rows), counts, rows)


@lru_cache(maxsize=64)
def ring_of_cards(op: Op, cards: Cards) -> Algorithm:
    """Make the ring for members that use these cards of their nodes: one channel for each card that all nodes have.

    Channel c goes round each node from the first member at card c, and leaves by the last one at the card before. So
    every card carries as much, in either direction.
    """
    channels, (alone, layout, times) = min(map(len, cards)), _RINGS[op]
    if channels == 1 or len(cards) == 1:
        return alone
    orders = tuple(
        tuple(member for node in cards for card in (*node[c:], *node[:c]) for member in card) for c in range(channels)
    )
    return replace(
        alone,
        layout=layout,
        cut=channels * len(orders[0]),
        closed_form=partial(_ring_counts, times, channels),
        members=orders,
        channels=channels,
    )


BROADCAST = Algorithm(by_rounds.binomial_broadcast, 1)
REDUCE = replace(BROADCAST, reverse=True)
SCATTER_ALL_GATHER = Algorithm(by_rounds.scatter_all_gather)
REDUCE_SCATTER_GATHER = replace(SCATTER_ALL_GATHER, reverse=True)
ALL_REDUCE = {
    "recursive-doubling": Algorithm(by_rounds.recursive_doubling, 1),
    "ring": Algorithm(by_rounds.ring, closed_form=partial(_ring_counts, 2, 1)),
    "tree": Algorithm(by_rounds.tree, 1),
    "halving-doubling": Algorithm(by_rounds.halving_doubling, largest_power_of_two),
    "double-tree": Algorithm(double_tree_rounds, 2 * BLOCKS),
}
BY_NODE = {"hierarchical": hierarchical_all_reduce, "hierarchical-rails": rails_all_reduce}
COLLECTIVES = (*ALL_REDUCE, *BY_NODE, "best")
DEFAULT = "recursive-doubling"

ALL_GATHER = {
    "recursive-doubling": Algorithm(by_rounds.doubling_all_gather),
    "ring": Algorithm(by_rounds.ring_all_gather, closed_form=partial(_ring_counts, 1, 1)),
}
# A ring's closed form holds in both directions: all members send as much as they receive.
REDUCE_SCATTER = {
    "recursive-halving": replace(ALL_GATHER["recursive-doubling"], reverse=True),
    "ring": replace(ALL_GATHER["ring"], reverse=True),
}

# Of each operation by rings: a ring, its rounds in channels, and how many times it goes around.
_RINGS = {
    Op.ALL_REDUCE: (ALL_REDUCE["ring"], by_rounds.ring_channels, 2),
    Op.ALL_GATHER: (ALL_GATHER["ring"], by_rounds.gather_channels, 1),
    Op.REDUCE_SCATTER: (REDUCE_SCATTER["ring"], by_rounds.gather_channels, 1),
}
# Of each other operation: its algorithm, and those that it has beside certain all-reduces.
_OTHER_ALGORITHMS: dict[Op, tuple[Algorithm, dict[str, Algorithm]]] = {
    Op.BROADCAST: (BROADCAST, {"halving-doubling": SCATTER_ALL_GATHER}),
    Op.REDUCE: (REDUCE, {"halving-doubling": REDUCE_SCATTER_GATHER}),
    Op.ALL_GATHER: (ALL_GATHER["recursive-doubling"], {"ring": ALL_GATHER["ring"]}),
    Op.REDUCE_SCATTER: (REDUCE_SCATTER["recursive-halving"], {"ring": REDUCE_SCATTER["ring"]}),
}


def algorithm(op: Op, name: str) -> Algorithm:
    """Return the algorithm of a collective, where all-reduces use the named one and the others what goes with it.

    Broadcasts and reductions are binomial trees, but in parts with halving-doubling; gathering and scattering goes by
    doubling and halving, but around a ring with ring.
    """
    if op == Op.ALL_REDUCE:
        return ALL_REDUCE[name]
    usual, beside = _OTHER_ALGORITHMS[op]
    return beside.get(name, usual)


def payload_factor(op: Op, k: int) -> int:
    """Return the whole payload over what a member ends with: k after a reduce-scatter, which leaves one of k parts."""
    return k if op == Op.REDUCE_SCATTER else 1


def candidates(op: Op, name: str, k: int, cards: Cards) -> list[Algorithm]:
    """Return every algorithm that `name` allows for k members at these cards of nodes; `best` allows all of them."""
    if op != Op.ALL_REDUCE:
        names = ALL_REDUCE if name == "best" else [name]
        found = dict.fromkeys(algorithm(op, each) for each in names)
        return [ring_of_cards(op, cards) if op in _RINGS and how == _RINGS[op][0] else how for how in found]
    if name != "best":
        return [_named_all_reduce(name, cards)]
    names = [each for each in ALL_REDUCE if each != "double-tree" or k <= MOST_MEMBERS]
    names += BY_NODE if 1 < len(cards) < k else ()
    return [_named_all_reduce(each, cards) for each in names]


def _named_all_reduce(name: str, cards: Cards) -> Algorithm:
    """Return the named all-reduce, for members at these cards of nodes."""
    if name in BY_NODE:
        return BY_NODE[name](tuple(tuple(chain.from_iterable(node)) for node in cards))
    return ring_of_cards(Op.ALL_REDUCE, cards) if name == "ring" else ALL_REDUCE[name]

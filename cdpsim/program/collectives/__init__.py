"""Textbook collectives: how many rounds they take, how long those last, how much each member sends, and to whom.

Counts are closed forms where groups may be large, and equal what the rounds themselves say. With latency a and
bandwidth b, a payload of s bytes takes rounds * a + carried / parts * s / b (Thakur, Rabenseifner & Gropp 2005,
section 3; nothing is charged for adding up).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import gcd
from typing import Any

import numpy as np

from cdpsim.cluster import Cards
from cdpsim.numeric.columns import Ints
from cdpsim.program import Op
from cdpsim.program.collectives import double_tree as two_trees
from cdpsim.program.collectives import rounds as by_rounds
from cdpsim.program.collectives.rounds import Rounds, ceil_log2, floor_log2, largest_power_of_two, reverse_rounds

Nodes = tuple[tuple[int, ...], ...]  # the members of a group in each of its nodes, as their numbers in the group


@dataclass(frozen=True)
class Algorithm:
    """A way to run a collective over k members, as the rounds it takes and what each of them carries."""

    rounds: Callable[[int], int]
    parts: Callable[[int], int]  # into how many equal parts the payload is cut
    carried: Callable[[int], int]  # parts in the largest message of a round, summed over all rounds
    sends: Callable[[int], Ints]  # parts that each member sends in all, the root first
    schedule: Callable[[int], Rounds] = field(repr=False)
    nodes: Nodes = ()  # of a hierarchical one, whose messages go inside nodes and between them
    channels: int = 1  # that run side by side, each with an equal run of the parts

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells it from all others, in another process, too."""
        return _identity(self.schedule), self.channels

    def channel(self, k: int, first: Ints) -> Ints:
        """Say in which channel messages go whose first parts these are."""
        return first * self.channels // self.parts(k)

    def seconds(self, k: int, size: int, latency: float, bandwidth: float) -> float:
        """Say how long it takes where all links are alike."""
        return self.rounds(k) * latency + self.carried(k) * size / self.parts(k) / bandwidth


def _identity(value: Any) -> Any:
    """Name a function, with what it is given if it is a part of one."""
    if isinstance(value, partial):
        return _identity(value.func), tuple(map(_identity, value.args)), tuple(sorted(value.keywords.items()))
    return getattr(value, "__qualname__", value)


def _one(k: int) -> int:
    return 1


def _others(k: int) -> int:
    return k - 1


def _of_all(k: int) -> int:
    return k


def _constant(value: int, k: int) -> int:
    return value


def _others_twice(k: int) -> int:
    return 2 * (k - 1)


def _there_and_back(k: int) -> int:
    return 2 * ceil_log2(k)


def _children(k: int) -> Ints:
    """How many members each member of a binomial tree hands the payload on to."""
    rank = np.arange(k)
    sends = np.zeros(k, dtype=np.int64)
    for bit in range(ceil_log2(k)):
        sends += (rank < 1 << bit) & (rank + (1 << bit) < k)
    return sends


def _to_parent(k: int) -> Ints:
    return (np.arange(k) > 0).astype(np.int64)


def _counted(schedule: Callable[[int], Rounds], k: int) -> Ints:
    """Parts that each member sends, added up over the rounds."""
    sends = np.zeros(k, dtype=np.int64)
    for one in schedule(k):
        np.add.at(sends, one.src, one.parts)
    return sends


def _around(k: int) -> Ints:
    return np.full(k, 2 * (k - 1))


def _both_tree_ways(k: int) -> Ints:
    return _children(k) + _to_parent(k)


def _doubled(k: int) -> Ints:
    return _folded(k, floor_log2(k), 1)


def _halved_and_doubled(k: int) -> Ints:
    return _folded(k, 2 * (largest_power_of_two(k) - 1), largest_power_of_two(k))


def _folded(k: int, sends: int, whole: int) -> Ints:
    """What core members send, and, where k is no power of two, a whole payload from some to others and back."""
    rank = np.arange(k)
    return np.where(rank < largest_power_of_two(k), sends + whole * (rank < k - largest_power_of_two(k)), whole)


def _fold(k: int) -> int:
    """How many rounds go to members beyond the largest power of two."""
    return 0 if k == largest_power_of_two(k) else 2


def _doubling_rounds(k: int) -> int:
    return floor_log2(k) + _fold(k)


def _halving_rounds(k: int) -> int:
    return 2 * floor_log2(k) + _fold(k)


def _halving_carried(k: int) -> int:
    return 2 * (largest_power_of_two(k) - 1) + _fold(k) * largest_power_of_two(k)


def _reversed(schedule: Callable[[int], Rounds], k: int) -> Rounds:
    return reverse_rounds(schedule(k))


def _declared(
    schedule: Callable[[int], Rounds], rounds: Callable[[int], int], carried: Callable[[int], int]
) -> Algorithm:
    """Of a payload in k parts; what each member sends is counted."""
    return Algorithm(rounds, _of_all, carried, partial(_counted, schedule), schedule)


def _dual(how: Algorithm) -> Algorithm:
    """What takes the same rounds in the opposite direction."""
    return _declared(partial(_reversed, how.schedule), how.rounds, how.carried)


def _double_tree(blocks: int) -> Algorithm:
    """Each half of the payload in so many blocks, so that every round carries one of them."""
    rounds = partial(_double_tree_rounds, blocks)
    return Algorithm(
        rounds=rounds,
        parts=partial(_constant, 2 * blocks),
        carried=rounds,
        sends=partial(_double_tree_sends, blocks),
        schedule=partial(two_trees.double_tree, blocks=blocks),
    )


def _double_tree_rounds(blocks: int, k: int) -> int:
    return len(two_trees.double_tree(k, blocks))


def _double_tree_sends(blocks: int, k: int) -> Ints:
    return two_trees.sends(k) * blocks


@lru_cache(maxsize=64)
def hierarchical_all_reduce(nodes: Nodes) -> Algorithm:
    """Make the all-reduce for members in these nodes; the group must be theirs."""
    parts, inside = len(nodes), ceil_log2(max(map(len, nodes)))
    schedule = partial(_hierarchical_rounds, nodes)
    return Algorithm(
        rounds=partial(_constant, 2 * inside + 2 * (parts - 1)),
        parts=partial(_constant, parts),
        carried=partial(_constant, 2 * inside * parts + 2 * (parts - 1)),
        sends=partial(_counted, schedule),
        schedule=schedule,
        nodes=nodes,
    )


def _hierarchical_rounds(nodes: Nodes, k: int) -> Rounds:
    return by_rounds.hierarchical_rounds(nodes)


@lru_cache(maxsize=64)
def rails_all_reduce(nodes: Nodes) -> Algorithm:
    """Make the all-reduce by rails for members in these nodes; uneven nodes are cut into equal parts of nodes."""
    inside = gcd(*map(len, nodes))
    rows = tuple(node[low : low + inside] for node in nodes for low in range(0, len(node), inside))
    across = len(rows)
    schedule = partial(_rails_rounds, rows)
    return Algorithm(
        rounds=partial(_constant, 2 * (inside - 1) + 2 * (across - 1)),
        parts=partial(_constant, inside * across),
        carried=partial(_constant, 2 * (inside - 1) * across + 2 * (across - 1)),
        sends=partial(_constants, 2 * (inside * across - 1)),
        schedule=schedule,
        nodes=rows,
    )


def _rails_rounds(nodes: Nodes, k: int) -> Rounds:
    return by_rounds.rails_rounds(nodes)


@lru_cache(maxsize=64)
def ring_all_reduce(cards: Cards) -> Algorithm:
    """Make the ring for members that use these cards of their nodes: one channel for each card that all nodes have.

    Channel c goes round each node from the first member at card c, and leaves by the last one at the card before. So
    every card carries as much, in either direction.
    """
    channels = min(map(len, cards))
    if channels == 1 or len(cards) == 1:
        return ALL_REDUCE["ring"]
    orders = tuple(
        tuple(member for node in cards for card in (*node[c:], *node[:c]) for member in card) for c in range(channels)
    )
    k = len(orders[0])
    return Algorithm(
        rounds=_others_twice,
        parts=partial(_constant, channels * k),
        carried=_others_twice,
        sends=partial(_constants, channels * 2 * (k - 1)),
        schedule=partial(_ring_channels, orders),
        channels=channels,
    )


def _ring_channels(orders: tuple[tuple[int, ...], ...], k: int) -> Rounds:
    return by_rounds.ring_channels(orders)


def _constants(value: int, k: int) -> Ints:
    return np.full(k, value)


BROADCAST = Algorithm(ceil_log2, _one, ceil_log2, _children, by_rounds.binomial_broadcast)
REDUCE = Algorithm(ceil_log2, _one, ceil_log2, _to_parent, partial(_reversed, by_rounds.binomial_broadcast))
SCATTER_ALL_GATHER = _declared(by_rounds.scatter_all_gather, _there_and_back, _others_twice)
REDUCE_SCATTER_GATHER = _dual(SCATTER_ALL_GATHER)
ALL_REDUCE: dict[str, Algorithm] = {
    "recursive-doubling": Algorithm(
        rounds=_doubling_rounds,
        parts=_one,
        carried=_doubling_rounds,
        sends=_doubled,
        schedule=by_rounds.recursive_doubling,
    ),
    "ring": Algorithm(
        rounds=_others_twice,
        parts=_of_all,
        carried=_others_twice,
        sends=_around,
        schedule=by_rounds.ring,
    ),
    "tree": Algorithm(
        rounds=_there_and_back,
        parts=_one,
        carried=_there_and_back,
        sends=_both_tree_ways,
        schedule=by_rounds.tree,
    ),
    "halving-doubling": Algorithm(
        rounds=_halving_rounds,
        parts=largest_power_of_two,
        carried=_halving_carried,
        sends=_halved_and_doubled,
        schedule=by_rounds.halving_doubling,
    ),
    "double-tree": _double_tree(16),
}
OTHER_DOUBLE_TREES = [_double_tree(blocks) for blocks in (2, 4, 64)]
BY_NODE = {"hierarchical": hierarchical_all_reduce, "hierarchical-rails": rails_all_reduce}
COLLECTIVES = (*ALL_REDUCE, *BY_NODE, "best")
DEFAULT = "recursive-doubling"

ALL_GATHER: dict[str, Algorithm] = {
    "recursive-doubling": _declared(by_rounds.doubling_all_gather, ceil_log2, _others),
    "ring": _declared(by_rounds.ring_all_gather, _others, _others),
}
REDUCE_SCATTER = {
    "recursive-halving": _dual(ALL_GATHER["recursive-doubling"]),
    "ring": _dual(ALL_GATHER["ring"]),
}
PAIRWISE_EXCHANGE = _declared(by_rounds.pairwise_exchange, _others, _others)


def algorithm(op: Op, name: str) -> Algorithm:
    """The algorithm of a collective, where all-reduces use the named one and the others what goes with it.

    Broadcasts and reductions are binomial trees, but in parts with halving-doubling; gathering and scattering goes by
    doubling and halving, but around a ring with ring.
    """
    if op == Op.ALL_REDUCE:
        return ALL_REDUCE[name]
    large, ring = name == "halving-doubling", name == "ring"
    return {
        Op.BROADCAST: SCATTER_ALL_GATHER if large else BROADCAST,
        Op.REDUCE: REDUCE_SCATTER_GATHER if large else REDUCE,
        Op.ALL_GATHER: ALL_GATHER["ring" if ring else "recursive-doubling"],
        Op.REDUCE_SCATTER: REDUCE_SCATTER["ring" if ring else "recursive-halving"],
    }[op]


def differs_from_default(op: Op, name: str) -> bool:
    """Whether a collective runs by another algorithm under that name than by default."""
    return op == Op.ALL_REDUCE or name == "best" or _of_other(op, name) != algorithm(op, DEFAULT)


def _of_other(op: Op, name: str) -> Algorithm:
    """The algorithm of what is no all-reduce, where all-reduces may go by levels."""
    return algorithm(op, "tree" if name in BY_NODE else name)


def payload_factor(op: Op, k: int) -> int:
    """How many times what a member ends with the whole payload is: after a reduce-scatter each has one of k parts."""
    return k if op == Op.REDUCE_SCATTER else 1


def candidates(op: Op, name: str, k: int, cards: Cards) -> list[Algorithm]:
    """Every algorithm that `name` allows for k members at these cards of nodes; `best` allows all of them."""
    if op != Op.ALL_REDUCE:
        if name == "best":
            return list(dict.fromkeys(algorithm(op, each) for each in ALL_REDUCE))
        return [_of_other(op, name)]
    nodes = tuple(tuple(member for card in node for member in card) for node in cards)
    if name in BY_NODE:
        return [BY_NODE[name](nodes)]
    if name != "best":
        return [ring_all_reduce(cards) if name == "ring" else algorithm(op, name)]
    by_node = [make(nodes) for make in BY_NODE.values()] if 1 < len(nodes) < k else []
    simple = [
        ring_all_reduce(cards) if each == "ring" else how for each, how in ALL_REDUCE.items() if each != "double-tree"
    ]
    trees = [ALL_REDUCE["double-tree"], *OTHER_DOUBLE_TREES] if k <= two_trees.MOST_MEMBERS else []
    return [*simple, *trees, *by_node]

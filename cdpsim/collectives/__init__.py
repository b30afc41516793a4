"""Textbook collectives: how many rounds they take, how long those last, how much each member sends, and to whom.

Counts are closed forms where groups may be large, and equal what the rounds themselves say. With latency a and
bandwidth b, a payload of s bytes takes rounds * a + carried / parts * s / b (Thakur, Rabenseifner & Gropp 2005,
section 3; nothing is charged for adding up).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from cdpsim.collectives import double_tree as two_trees
from cdpsim.collectives import rounds as by_rounds
from cdpsim.collectives.rounds import Schedule, backwards, ceil_log2, core, floor_log2
from cdpsim.columns import Ints
from cdpsim.program import Op

Nodes = tuple[tuple[int, ...], ...]  # the members of a group in each of its nodes, as their numbers in the group


@dataclass(frozen=True)
class Algorithm:
    """A way to run a collective over k members, as the rounds it takes and what each of them carries."""

    rounds: Callable[[int], int]
    parts: Callable[[int], int]  # into how many equal parts the payload is cut
    carried: Callable[[int], int]  # parts in the largest message of a round, summed over all rounds
    sends: Callable[[int], Ints]  # parts that each member sends in all, the root first
    schedule: Callable[[int], Schedule] = field(repr=False)
    nodes: Nodes = ()  # of a hierarchical one, whose messages go inside nodes and between them

    def seconds(self, k: int, size: int, latency: float, bandwidth: float) -> float:
        """Say how long it takes where all links are alike."""
        return self.rounds(k) * latency + self.carried(k) * size / self.parts(k) / bandwidth


def _one(k: int) -> int:
    return 1


def _others(k: int) -> int:
    return k - 1


def _of_all(k: int) -> int:
    return k


def _children(k: int) -> Ints:
    """How many members each member of a binomial tree hands the payload on to."""
    rank = np.arange(k)
    sends = np.zeros(k, dtype=np.int64)
    for bit in range(ceil_log2(k)):
        sends += (rank < 1 << bit) & (rank + (1 << bit) < k)
    return sends


def _to_parent(k: int) -> Ints:
    return (np.arange(k) > 0).astype(np.int64)


def _counted(schedule: Callable[[int], Schedule], k: int) -> Ints:
    """Parts that each member sends, added up over the rounds."""
    sends = np.zeros(k, dtype=np.int64)
    for one in schedule(k):
        np.add.at(sends, one.src, one.parts)
    return sends


def _folded(k: int, sends: int, whole: int) -> Ints:
    """What core members send, and, where k is no power of two, a whole payload from some to others and back."""
    rank = np.arange(k)
    return np.where(rank < core(k), sends + whole * (rank < k - core(k)), whole)


def _fold(k: int) -> int:
    """How many rounds go to members beyond the largest power of two."""
    return 0 if k == core(k) else 2


def _declared(
    schedule: Callable[[int], Schedule], rounds: Callable[[int], int], carried: Callable[[int], int]
) -> Algorithm:
    """Of a payload in k parts; what each member sends is counted."""
    return Algorithm(rounds, _of_all, carried, partial(_counted, schedule), schedule)


def _dual(how: Algorithm) -> Algorithm:
    """What takes the same rounds in the opposite direction."""
    return _declared(lambda k: backwards(how.schedule(k)), how.rounds, how.carried)


def _double_tree(blocks: int) -> Algorithm:
    """Each half of the payload in so many blocks, so that every round carries one of them."""

    def rounds(k: int) -> int:
        return len(two_trees.double_tree(k, blocks))

    return Algorithm(
        rounds=rounds,
        parts=lambda k: 2 * blocks,
        carried=rounds,
        sends=lambda k: two_trees.sends(k) * blocks,
        schedule=lambda k: two_trees.double_tree(k, blocks),
    )


def hierarchical(nodes: Nodes) -> Algorithm:
    """Make the all-reduce for members in these nodes; the group must be theirs."""
    parts, inside = len(nodes), ceil_log2(max(map(len, nodes)))

    def schedule(k: int) -> Schedule:
        return by_rounds.hierarchical(nodes)

    return Algorithm(
        rounds=lambda k: 2 * inside + 2 * (parts - 1),
        parts=lambda k: parts,
        carried=lambda k: 2 * inside * parts + 2 * (parts - 1),
        sends=partial(_counted, schedule),
        schedule=schedule,
        nodes=nodes,
    )


BROADCAST = Algorithm(ceil_log2, _one, ceil_log2, _children, by_rounds.binomial_broadcast)
REDUCE = Algorithm(ceil_log2, _one, ceil_log2, _to_parent, lambda k: backwards(by_rounds.binomial_broadcast(k)))
SCATTER_ALL_GATHER = _declared(by_rounds.scatter_all_gather, lambda k: 2 * ceil_log2(k), lambda k: 2 * (k - 1))
REDUCE_SCATTER_GATHER = _dual(SCATTER_ALL_GATHER)
ALL_REDUCE: dict[str, Algorithm] = {
    "recursive-doubling": Algorithm(
        rounds=lambda k: floor_log2(k) + _fold(k),
        parts=_one,
        carried=lambda k: floor_log2(k) + _fold(k),
        sends=lambda k: _folded(k, floor_log2(k), 1),
        schedule=by_rounds.recursive_doubling,
    ),
    "ring": Algorithm(
        rounds=lambda k: 2 * (k - 1),
        parts=_of_all,
        carried=lambda k: 2 * (k - 1),
        sends=lambda k: np.full(k, 2 * (k - 1)),
        schedule=by_rounds.ring,
    ),
    "tree": Algorithm(
        rounds=lambda k: 2 * ceil_log2(k),
        parts=_one,
        carried=lambda k: 2 * ceil_log2(k),
        sends=lambda k: _children(k) + _to_parent(k),
        schedule=by_rounds.tree,
    ),
    "halving-doubling": Algorithm(
        rounds=lambda k: 2 * floor_log2(k) + _fold(k),
        parts=core,
        carried=lambda k: 2 * (core(k) - 1) + _fold(k) * core(k),
        sends=lambda k: _folded(k, 2 * (core(k) - 1), core(k)),
        schedule=by_rounds.halving_doubling,
    ),
    "double-tree": _double_tree(16),
}
OTHER_DOUBLE_TREES = [_double_tree(blocks) for blocks in (2, 4, 64)]
COLLECTIVES = (*ALL_REDUCE, "hierarchical", "best")

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


def payload(op: Op, k: int) -> int:
    """How many times what a member ends with the whole payload is: after a reduce-scatter each has one of k parts."""
    return k if op == Op.REDUCE_SCATTER else 1


def candidates(op: Op, name: str, k: int, nodes: Nodes) -> list[Algorithm]:
    """Every algorithm that `name` allows for k members in these nodes; `best` allows all of them."""
    if name == "hierarchical":
        return [hierarchical(nodes) if op == Op.ALL_REDUCE else algorithm(op, "tree")]
    if name != "best":
        return [algorithm(op, name)]
    if op != Op.ALL_REDUCE:
        return list(dict.fromkeys(algorithm(op, each) for each in ALL_REDUCE))
    layered = [hierarchical(nodes)] if 1 < len(nodes) < k else []
    simple = [how for each, how in ALL_REDUCE.items() if each != "double-tree"]
    trees = [ALL_REDUCE["double-tree"], *OTHER_DOUBLE_TREES] if k <= two_trees.MOST_MEMBERS else []
    return [*simple, *trees, *layered]

"""Textbook collectives: how many rounds they take, how much each member sends, and to whom.

With latency a and bandwidth b of all links, a payload of s bytes takes rounds * a + carried / parts * s / b (Thakur,
Rabenseifner & Gropp 2005, section 3; nothing is charged for adding up). An algorithm's counts are taken from its
rounds. Rings and rails, with one round for each member, state theirs in closed form.

A round says which member sends which parts of the payload to which other one. Members are numbered from 0, which is the
root where there is one. In a round a member sends at most one message and receives at most one, in each of the
algorithm's channels. Where parts are summed, what arrives is added to what the receiver has.

The double tree is an all-reduce along two binary trees at once, each for half of the payload (Sanders, Speck & Träff
2009). Each inner member of one tree is a leaf of the other, so that members send and receive equal amounts. A half goes
in blocks, one after another up its tree and down again. A colouring of the edges keeps a member's two children, and its
two parents, from being served in the same round (their section 3: steps of colour 0 and of colour 1 alternate).

In an all-to-all each of k members has a k-th of the payload, and a k-th of that for each member. This goes to it in one
of k-1 rounds, or first to its node. A limit of nodes for each token (DeepSeek-V3, section 2.1.2) leaves a share of what
goes `between` nodes: one copy goes there for all members of a node, and inside it each gets its own.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from cdpsim.cluster import Cards
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, group_starts, sort_by
from cdpsim.program import Op


class Round(NamedTuple):
    """Messages that go at once. Each carries `parts` parts from `first` on, after the last part the first again."""

    src: Ints
    dst: Ints
    first: Ints
    parts: Ints


RoundList = list[Round]


def floor_log2(k: int) -> int:
    """Return the largest e with 2**e <= k."""
    return k.bit_length() - 1


def ceil_log2(k: int) -> int:
    """Return the smallest e with 2**e >= k."""
    return (k - 1).bit_length()


def largest_power_of_two(k: int) -> int:
    """Return the largest power of two that is k or less."""
    return 1 << floor_log2(k)


def make_round(src: Ints, dst: Ints, first: Ints | int, parts: Ints | int) -> Round:
    """Make a round; a number stands for all of its messages."""
    first, parts = (np.broadcast_to(np.asarray(column, dtype=np.int64), src.shape) for column in (first, parts))
    return Round(src, dst, first, parts)


def reverse_rounds(schedule: RoundList) -> RoundList:
    """Turn handing out into summing up: rounds in the opposite order, messages in the opposite direction.

    If every member gets every part of another once, then backwards every part is summed along the same ways to where
    it came from (Chan et al. 2007, section 3: reduction is the dual of broadcast, reduce-scatter of all-gather).
    """
    return [each._replace(src=each.dst, dst=each.src) for each in reversed(schedule)]


def binomial_broadcast(k: int) -> RoundList:
    """Let each member that has the payload send it to one that has not (Chan et al. 2007, section 4.1)."""
    halves = [np.arange(min(1 << bit, k - (1 << bit))) for bit in range(ceil_log2(k))]
    return [make_round(src, src + (1 << bit), 0, 1) for bit, src in enumerate(halves)]


def scatter(k: int) -> RoundList:
    """Send each part down a binomial tree to the member that it is for (Chan et al. 2007, section 4.1)."""
    rounds = []
    for bit in reversed(range(ceil_log2(k))):
        dst = np.arange(1 << bit, k, 2 << bit)
        rounds.append(make_round(dst - (1 << bit), dst, dst, np.minimum(1 << bit, k - dst)))
    return rounds


def ring_all_gather(k: int) -> RoundList:
    """Send each part once around, in k-1 rounds (Chan et al. 2007, section 4.2; Patarasuk & Yuan 2009)."""
    member = np.arange(k)
    return [make_round(member, (member + 1) % k, (member - step) % k, 1) for step in range(k - 1)]


def doubling_all_gather(k: int) -> RoundList:
    """Let members exchange all that they have, with a partner twice as far away each time (Thakur et al. 2005, 4.1).

    For powers of two this is recursive doubling. For other k it is Bruck's variant, in which members send what they
    have down the ring, in the same rounds, rounded up, and the same bytes.
    """
    member, rounds, have = np.arange(k), [], 1
    while have < k:
        give = min(have, k - have)
        if largest_power_of_two(k) == k:
            rounds.append(make_round(member, member ^ have, member // have * have, have))
        else:
            rounds.append(make_round(member, (member - have) % k, member, give))
        have += give
    return rounds


def pairwise_exchange(k: int) -> RoundList:
    """Exchange parts with another partner in each of k-1 rounds (Thakur et al. 2005, section 4.3).

    For powers of two partners give each other theirs; for other k each gives to one and takes from another. The part
    for member i from member j is number k i + j.
    """
    member, paired = np.arange(k), largest_power_of_two(k) == k
    partners = [member ^ step if paired else (member + step) % k for step in range(1, k)]
    return [make_round(member, partner, k * partner + member, 1) for partner in partners]


def with_all_members(k: int, parts: int, schedule: RoundList) -> RoundList:
    """Let the members beyond the largest power of two send their payload first and receive the result last.

    This is the variant of Thakur et al. 2005, section 4.5, for all k that are not powers of two.
    """
    extra = np.arange(largest_power_of_two(k), k)
    if not len(extra):
        return schedule
    partner = extra - largest_power_of_two(k)
    return [make_round(extra, partner, 0, parts), *schedule, make_round(partner, extra, 0, parts)]


def recursive_doubling(k: int) -> RoundList:
    """Exchange sums with a partner twice as far away each time (Thakur et al. 2005, section 4.5)."""
    member = np.arange(largest_power_of_two(k))
    return with_all_members(k, 1, [make_round(member, member ^ (1 << bit), 0, 1) for bit in range(floor_log2(k))])


def halving_doubling(k: int) -> RoundList:
    """Reduce-scatter by halving, then all-gather by doubling: Rabenseifner's all-reduce (Thakur et al. 2005, 4.5)."""
    gather = doubling_all_gather(largest_power_of_two(k))
    return with_all_members(k, largest_power_of_two(k), [*reverse_rounds(gather), *gather])


def ring(k: int) -> RoundList:
    """Reduce-scatter, then all-gather around a ring (Patarasuk & Yuan 2009, section 4)."""
    gather = ring_all_gather(k)
    return [*reverse_rounds(gather), *gather]


def ring_channels(orders: tuple[tuple[int, ...], ...]) -> RoundList:
    """Run a ring in each of several orders of the members at once, each for an equal share of the payload."""
    return _side_by_side(ring(len(orders[0])), orders, len(orders[0]))


def gather_channels(orders: tuple[tuple[int, ...], ...]) -> RoundList:
    """Gather around a ring in each of several orders of the members at once, as `ring_channels` does."""
    return _side_by_side(ring_all_gather(len(orders[0])), orders, len(orders[0]))


def rails_rounds(nodes: tuple[tuple[int, ...], ...]) -> RoundList:
    """Reduce-scatter inside every node, all-reduce each part along its rail, all-gather inside every node.

    Rail r has the r-th member of each node, and is a ring; so are the members of a node. Nodes have equally many.
    """
    across = len(nodes)
    shards = [
        each._replace(first=each.first * across, parts=each.parts * across) for each in ring_all_gather(len(nodes[0]))
    ]
    gather = _side_by_side(shards, nodes, 0)
    return [*reverse_rounds(gather), *_side_by_side(ring(across), np.transpose(nodes), across), *gather]


def _side_by_side(rounds: RoundList, groups: Sequence[Sequence[int]] | Ints, parts: int) -> RoundList:
    """Let several groups of members do the same rounds at once, each with its own run of parts."""
    members = np.array(groups)
    first = parts * np.arange(len(members))[:, None]
    return [
        Round(
            members[:, each.src].ravel(),
            members[:, each.dst].ravel(),
            (first + each.first).ravel(),
            np.tile(each.parts, len(members)),
        )
        for each in rounds
    ]


def at_once(rounds: list[Round]) -> Round:
    """Join the messages of several rounds into one round."""
    return Round(*map(np.concatenate, zip(*rounds, strict=True)))


def tree(k: int) -> RoundList:
    """Reduce, then broadcast by binomial trees (Chan et al. 2007, section 5)."""
    broadcast = binomial_broadcast(k)
    return [*reverse_rounds(broadcast), *broadcast]


def scatter_all_gather(k: int) -> RoundList:
    """Broadcast a large payload: scatter, then gather everywhere (van de Geijn; Chan et al. 2007, section 7)."""
    return [*scatter(k), *doubling_all_gather(k)]


def hierarchical_rounds(nodes: tuple[tuple[int, ...], ...]) -> RoundList:
    """Reduce inside every node, all-reduce around a ring of the nodes' first members, broadcast inside every node.

    These are the three stages of Thakur et al. 2005 for clusters of multi-processor nodes; `nodes` are the members in
    each. Small nodes end their broadcast before the others.
    """
    parts = len(nodes)
    down: list[list[Round]] = [[] for _ in range(ceil_log2(max(map(len, nodes))))]
    for node in map(np.array, nodes):
        for rounds, each in zip(down, binomial_broadcast(len(node)), strict=False):
            rounds.append(make_round(node[each.src], node[each.dst], 0, parts))
    inside = [at_once(rounds) for rounds in down]
    between = _side_by_side(ring(parts), [[node[0] for node in nodes]], 0)
    return [*reverse_rounds(inside), *between, *inside]


@dataclass(frozen=True)
class ExchangeByNodes:
    """Exchange between nodes, each member with those at its place in others; then inside (DeepSeek-V3, section 3.2.2).

    The first level carries for each node what its members get, or only this share of it. Every member has a run of
    numbers for the parts that pass through it, and puts them in another order there.
    """

    between: Fraction

    def __call__(self, nodes: tuple[tuple[int, ...], ...]) -> RoundList:
        """Return the rounds for members in these nodes, of which each has equally many."""
        (across, inside), (share, whole) = np.shape(nodes), self.between.as_integer_ratio()
        run = across * inside * whole
        first = _side_by_side(pairwise_exchange(across), np.transpose(nodes), 0)
        second = _side_by_side(pairwise_exchange(inside), nodes, 0)
        return [
            *(make_round(each.src, each.dst, each.dst * run, inside * share) for each in first),
            *(make_round(each.src, each.dst, each.src * run, across * whole) for each in second),
        ]


BLOCKS = 16  # of each half of the payload: every round carries one of them
MOST_MEMBERS = 1 << 12  # beyond, laying out all blocks takes longer than it is worth


def parents(k: int) -> tuple[Ints, Ints]:
    """Return each member's parent in either tree, -1 for a root.

    In the first tree odd members are leaves, and a member that 2**e divides has its children 2**(e-1) away; the second
    is its mirror image for even k, and for odd k the same tree turned by one member.
    """
    member = np.arange(k)
    bit = member & -member
    above = (member ^ bit) | (bit << 1)
    first = np.where(above < k, above, member ^ bit)
    first[0] = -1
    if k % 2 == 0:
        second = k - 1 - first[::-1]
        second[-1] = -1
        return first, second
    second = np.roll(np.where(first < 0, -1, (first + 1) % k), 1)
    return first, second


def colours(trees: tuple[Ints, Ints]) -> Ints:
    """Return colour 0 or 1 of the edge above each member in either tree, -1 for a root.

    Edges to one member have different colours, and edges from one member: paths and even rings of conflicts.
    """
    edges = [(tree, child) for tree, parent in enumerate(trees) for child in np.flatnonzero(parent >= 0).tolist()]
    meeting = defaultdict(list)  # edges to a member, and edges from one
    for tree, child in edges:
        meeting["to", child].append((tree, child))
        meeting["from", int(trees[tree][child])].append((tree, child))
    colour = np.full((2, len(trees[0])), -1)
    for edge in edges:
        waiting = [(edge, 0)]
        while waiting:
            (tree, child), new = waiting.pop()
            if colour[tree, child] < 0:
                colour[tree, child] = new
                others = meeting["to", child] + meeting["from", int(trees[tree][child])]
                waiting += [(other, 1 - new) for other in others]
    return colour


def _depths(parent: Ints) -> Ints:
    """Return how many edges lead from each member to its root."""
    depth, at = np.zeros(len(parent), dtype=np.int64), parent
    while (at >= 0).any():
        depth += at >= 0
        at = np.where(at >= 0, parent[at], -1)
    return depth


def _group_rounds(numbers: list[Ints], rounds: list[Round]) -> RoundList:
    """Join messages of equal numbers into rounds, in the order of the numbers."""
    number, messages = np.concatenate(numbers), at_once(rounds)
    order = sort_by(number)
    rows = np.split(order, group_starts(number[order])[1:])
    return [Round(*(column[row] for column in messages)) for row in rows]


def _broadcast(k: int) -> RoundList:
    """Send both trees' blocks from their roots down.

    Block b crosses an edge of colour c below depth d in step 2(d+b)+c.
    """
    trees, steps, rounds = parents(k), [], []
    for tree, (parent, colour) in enumerate(zip(trees, colours(trees), strict=True)):
        child = np.flatnonzero(parent >= 0)
        step = 2 * (_depths(parent) - 1) + colour
        for block in reversed(range(BLOCKS)):
            steps.append(step[child] + 2 * block)
            rounds.append(make_round(parent[child], child, tree * BLOCKS + block, 1))
    return _group_rounds(steps, rounds)


@lru_cache(maxsize=32)
def double_tree_rounds(k: int) -> RoundList:
    """All-reduce: up both trees and down again, every message in the first round in which its ends are free for it."""
    if k > MOST_MEMBERS:
        problem = f"is laid out for at most {MOST_MEMBERS} members, not {k}; take ring or halving-doubling"
        raise RequestError("collective double-tree", problem)
    if k == 1:
        return []
    down = _broadcast(k)
    rounds, numbers = [*reverse_rounds(down), *down], []
    free = np.zeros(k, dtype=np.int64)  # the first round that each member has not been in
    for each in rounds:
        numbers.append(np.maximum(free[each.src], free[each.dst]))
        np.maximum.at(free, each.src, numbers[-1] + 1)
        np.maximum.at(free, each.dst, numbers[-1] + 1)
    return _group_rounds(numbers, rounds)


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
    """Count messages of one part in every round and channel, from each member to another."""
    rounds = times * (k - 1)
    return Counts(rounds, rounds, np.full(k, channels * rounds))


def _rails_counts(inside: int, across: int, k: int) -> Counts:
    """Count the messages of rings inside nodes, there and back, and of a ring along each rail between."""
    rounds, carried = 2 * (inside - 1) + 2 * (across - 1), 2 * (inside - 1) * across + 2 * (across - 1)
    return Counts(rounds, carried, np.full(k, 2 * (inside * across - 1)))


@lru_cache(maxsize=64)
def hierarchical_all_reduce(nodes: Nodes) -> Algorithm:
    """Make the all-reduce for members in these nodes; the group must be theirs."""
    return Algorithm(hierarchical_rounds, len(nodes), members=nodes)


@lru_cache(maxsize=64)
def rails_all_reduce(nodes: Nodes) -> Algorithm:
    """Make the all-reduce by rails for members in these nodes; uneven nodes are cut into equal parts of nodes."""
    inside = gcd(*map(len, nodes))
    rows = tuple(node[low : low + inside] for node in nodes for low in range(0, len(node), inside))
    counts = partial(_rails_counts, inside, len(rows))
    return Algorithm(rails_rounds, inside * len(rows), counts, rows)


@lru_cache(maxsize=64)
def all_to_all_by_nodes(nodes: Nodes, between: Fraction) -> Algorithm:
    """Make the all-to-all of two levels for members in these nodes, of which each has equally many."""
    return Algorithm(ExchangeByNodes(between), _squared(sum(map(len, nodes))) * between.denominator, members=nodes)


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


def _squared(k: int) -> int:
    """Return the number of parts where each of k members has one for each."""
    return k * k


BROADCAST = Algorithm(binomial_broadcast, 1)
REDUCE = replace(BROADCAST, reverse=True)
SCATTER_ALL_GATHER = Algorithm(scatter_all_gather)
REDUCE_SCATTER_GATHER = replace(SCATTER_ALL_GATHER, reverse=True)
PAIRWISE = Algorithm(pairwise_exchange, _squared, partial(_ring_counts, 1, 1))
ALL_REDUCE = {
    "recursive-doubling": Algorithm(recursive_doubling, 1),
    "ring": Algorithm(ring, closed_form=partial(_ring_counts, 2, 1)),
    "tree": Algorithm(tree, 1),
    "halving-doubling": Algorithm(halving_doubling, largest_power_of_two),
    "double-tree": Algorithm(double_tree_rounds, 2 * BLOCKS),
}
BY_NODE = {"hierarchical": hierarchical_all_reduce, "hierarchical-rails": rails_all_reduce}
COLLECTIVES = (*ALL_REDUCE, *BY_NODE, "best")
DEFAULT = "recursive-doubling"

ALL_GATHER = {
    "recursive-doubling": Algorithm(doubling_all_gather),
    "ring": Algorithm(ring_all_gather, closed_form=partial(_ring_counts, 1, 1)),
}
# A ring's closed form holds in both directions: members send and receive equal amounts.
REDUCE_SCATTER = {
    "recursive-halving": replace(ALL_GATHER["recursive-doubling"], reverse=True),
    "ring": replace(ALL_GATHER["ring"], reverse=True),
}

# Of each operation by rings: a ring, its rounds in channels, and how many times it goes around.
_RINGS = {
    Op.ALL_REDUCE: (ALL_REDUCE["ring"], ring_channels, 2),
    Op.ALL_GATHER: (ALL_GATHER["ring"], gather_channels, 1),
    Op.REDUCE_SCATTER: (REDUCE_SCATTER["ring"], gather_channels, 1),
}
# Of each other operation: its algorithm, and the algorithms that it has beside certain all-reduces.
_OTHER_ALGORITHMS: dict[Op, tuple[Algorithm, dict[str, Algorithm]]] = {
    Op.BROADCAST: (BROADCAST, {"halving-doubling": SCATTER_ALL_GATHER}),
    Op.REDUCE: (REDUCE, {"halving-doubling": REDUCE_SCATTER_GATHER}),
    Op.ALL_GATHER: (ALL_GATHER["recursive-doubling"], {"ring": ALL_GATHER["ring"]}),
    Op.REDUCE_SCATTER: (REDUCE_SCATTER["recursive-halving"], {"ring": REDUCE_SCATTER["ring"]}),
    Op.ALL_TO_ALL: (PAIRWISE, {}),
}


def algorithm(op: Op, name: str) -> Algorithm:
    """Return the algorithm of a collective, where all-reduces use the named one and the others what goes with it.

    Broadcasts and reductions are binomial trees, but in parts with halving-doubling; gathering and scattering goes by
    doubling and halving, but around a ring with ring. All-to-alls go pairwise.
    """
    if op == Op.ALL_REDUCE:
        return ALL_REDUCE[name]
    usual, beside = _OTHER_ALGORITHMS[op]
    return beside.get(name, usual)


def payload_factor(op: Op, k: int) -> int:
    """Return the whole payload over what a member ends with: k where that is one of k parts."""
    return k if op in (Op.REDUCE_SCATTER, Op.ALL_TO_ALL) else 1


def candidates(op: Op, name: str, k: int, cards: Cards, between: Fraction = Fraction(1)) -> list[Algorithm]:
    """Return every algorithm that `name` allows for k members at these cards of nodes; `best` allows all of them.

    `between` is the share of an all-to-all that has to go between nodes.
    """
    if op == Op.ALL_TO_ALL:
        return _all_to_alls(name, _members_by_node(cards), between)
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
        return BY_NODE[name](_members_by_node(cards))
    return ring_of_cards(Op.ALL_REDUCE, cards) if name == "ring" else ALL_REDUCE[name]


def _all_to_alls(name: str, nodes: Nodes, between: Fraction) -> list[Algorithm]:
    """Return the allowed all-to-alls; where only a share goes between nodes, none but that of two levels says how."""
    has_levels = len(nodes) > 1 and len({*map(len, nodes)}) == 1 < len(nodes[0])
    by_nodes = [all_to_all_by_nodes(nodes, between)] if has_levels else []
    if between < 1:
        return by_nodes or [PAIRWISE]
    return [PAIRWISE, *by_nodes] if name == "best" else [PAIRWISE]


def _members_by_node(cards: Cards) -> Nodes:
    """Return the members in each node."""
    return tuple(tuple(chain.from_iterable(node)) for node in cards)

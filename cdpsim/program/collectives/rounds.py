"""Textbook collectives as their rounds: who sends which parts of the payload to whom.

Members are numbered from 0, which is the root where there is one. In a round a member sends at most one message and
receives at most one, in each of the algorithm's channels. Where parts are summed, what arrives is added to what the
receiver has.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints


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
    have down the ring: as many rounds, rounded up, and as many bytes.
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
    """Let several groups of members do the same rounds at once, each with its own run of so many parts."""
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

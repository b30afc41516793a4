"""Collectives against the literature's formulas and against playing them out, for every group size to 64."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import ceil, floor, log2

import numpy as np
import pytest

from cdpsim import RequestError
from cdpsim.cluster import Cards, Cluster, Link
from cdpsim.program import Op
from cdpsim.program import collectives as two_trees
from cdpsim.program.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    COLLECTIVES,
    PAIRWISE,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_GATHER,
    SCATTER_ALL_GATHER,
    Algorithm,
    Nodes,
    algorithm,
    all_to_all_by_nodes,
    candidates,
    hierarchical_all_reduce,
    payload_factor,
    rails_all_reduce,
    ring_of_cards,
)
from cdpsim.timing.collective_times import alike_group, collective_on_links, fastest_algorithm
from cdpsim.timing.expand import unroll

SIZES = range(1, 65)
NODES = [
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0,), (1,), (2,), (3,), (4,)),
    ((0, 1, 2, 3, 4),),
    ((0, 3, 6), (1,), (2, 4, 5, 7, 8), (9, 10)),
    tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(8)),
]
Held = list[list[int]]  # by member and part: a number whose digit of weight 256**m says how often it has m's share


def played(how: Algorithm, k: int, held: Held, sums: Callable[[int], bool]) -> Held:
    """Run the rounds with contributions written down; in the rounds that `sums` says, what arrives is added."""
    parts = how.parts(k)
    for number, one in enumerate(how.schedule(k)):
        before = [list(member) for member in held]
        for src, dst, first, count in zip(*(column.tolist() for column in one), strict=True):
            assert src != dst
            for part in (np.arange(first, first + count) % parts).tolist():
                arriving = before[src][part]
                assert arriving, f"of {k}: {src} has nothing of part {part} to send in round {number}"
                held[dst][part] = arriving + (held[dst][part] if sums(number) else 0)
    return held


def own(k: int, parts: int) -> Held:
    """Everyone has its own contribution to every part."""
    return [[share(member)] * parts for member in range(k)]


def share(member: int) -> int:
    """Return the data of one member."""
    return int(256**member)


def everything(k: int) -> int:
    """The contribution of each member, once."""
    return sum(map(share, range(k)))


def sums_first(how: Algorithm, k: int) -> Callable[[int], bool]:
    """Reduce-scatter before all-gather, reduction before broadcast: the first half of the rounds adds up."""
    half = how.rounds(k) // 2
    return lambda number: number < half


def played_all_reduce(name: str, how: Algorithm, k: int) -> Held:
    held = own(k, how.parts(k))
    if name == "recursive-doubling":
        last = how.rounds(k) - 1
        return played(how, k, held, lambda number: k == 2 ** floor(log2(k)) or number < last)
    if name != "double-tree":
        return played(how, k, held, sums_first(how, k))
    # Each edge of either tree carries each of its blocks twice: up to add, down to replace.
    trees = [tree.tolist() for tree in two_trees.parents(k)]
    blocks = how.parts(k) // 2
    for one in how.schedule(k):
        before = [list(member) for member in held]
        for src, dst, part, count in zip(*(column.tolist() for column in one), strict=True):
            assert count == 1
            tree = trees[part // blocks]
            if tree[src] == dst:
                held[dst][part] += before[src][part]
            else:
                assert tree[dst] == src
                held[dst][part] = before[src][part]
    return held


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_an_all_reduce_leaves_everyone_with_the_sum_of_all(name: str) -> None:
    """Every member's contribution exactly once, in every part, at every member, in every size."""
    how = ALL_REDUCE[name]
    for k in SIZES:
        held = played_all_reduce(name, how, k)
        assert all(part == everything(k) for member in held for part in member), f"{name} of {k}"


@pytest.mark.parametrize("nodes", NODES, ids=len)
def test_a_hierarchical_all_reduce_leaves_everyone_with_the_sum_of_all(nodes: tuple[tuple[int, ...], ...]) -> None:
    """Equal nodes, uneven ones, one node, nodes of one."""
    k, how = sum(map(len, nodes)), hierarchical_all_reduce(nodes)
    held = played(how, k, own(k, how.parts(k)), sums_first(how, k))
    assert all(part == everything(k) for member in held for part in member)


@pytest.mark.parametrize("nodes", NODES, ids=len)
def test_rails_leave_everyone_with_the_sum_of_all(nodes: Nodes) -> None:
    """Uneven nodes are cut into equal ones; each member sends what is least, 2 (k-1)/k of the payload."""
    k, how = sum(map(len, nodes)), rails_all_reduce(nodes)
    held = played(how, k, own(k, how.parts(k)), sums_first(how, k))
    assert all(part == everything(k) for member in held for part in member)
    assert np.array_equal(how.sends(k) * k, np.full(k, 2 * (k - 1) * how.parts(k)))
    check_counts(how, k)


@pytest.mark.parametrize("cards", [1, 2, 3])
def test_rings_in_channels_leave_everyone_with_the_sum_of_all(cards: int) -> None:
    """Three nodes of two members a card, and one with a card more: as many channels as all nodes have cards."""
    k, nodes = three_nodes(cards)
    how = ring_of_cards(Op.ALL_REDUCE, nodes)
    held = played(how, k, own(k, how.parts(k)), sums_first(how, k))
    assert all(part == everything(k) for member in held for part in member)
    assert how.channels == cards
    assert how.rounds(k) == len(how.schedule(k)) == how.carried(k) == 2 * (k - 1)


def three_nodes(cards: int) -> tuple[int, Cards]:
    """Return how many members three nodes have, two a card, and their numbers; one node has a card more."""
    first, nodes = 0, []
    for many in (cards, cards + 1, cards):
        nodes.append(tuple((first + 2 * card, first + 2 * card + 1) for card in range(many)))
        first += 2 * many
    return first, tuple(nodes)


@pytest.mark.parametrize("cards", [1, 2, 3])
def test_rings_in_channels_gather_and_scatter_shares(cards: int) -> None:
    """A member has one part in each channel: before an all-gather, and after a reduce-scatter, with the sum of all."""
    k, nodes = three_nodes(cards)
    gather, scatter = (ring_of_cards(op, nodes) for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER))
    orders = gather.members or (tuple(range(k)),)
    has = [[member == order[part] for order in orders for part in range(k)] for member in range(k)]
    held = [[share(member) if mine else 0 for mine in row] for member, row in enumerate(has)]
    done = played(gather, k, held, lambda number: False)
    assert done == [[share(order[part]) for order in orders for part in range(k)]] * k
    summed = played(scatter, k, own(k, scatter.parts(k)), lambda number: True)
    assert all(
        part == everything(k)
        for member, row in zip(summed, has, strict=True)
        for part, mine in zip(member, row, strict=True)
        if mine
    )
    for how in (gather, scatter):
        assert how.channels == len(orders) == cards
        assert how.rounds(k) == len(how.schedule(k)) == how.carried(k) == k - 1
        assert np.array_equal(how.sends(k) * k, np.full(k, (k - 1) * how.parts(k)))


@pytest.mark.parametrize("how", [BROADCAST, SCATTER_ALL_GATHER], ids=["whole", "in parts"])
def test_broadcasts_bring_the_root_s_payload_to_all(how: Algorithm) -> None:
    """As a whole, or scattered and gathered, in every size."""
    for k in SIZES:
        held: Held = [[0 if member else share(0)] * how.parts(k) for member in range(k)]
        done = played(how, k, held, lambda number: False)
        assert all(part == share(0) for member in done for part in member), f"of {k}"


def test_reductions_bring_the_sum_to_the_root() -> None:
    """As a whole, or reduced and scattered, and gathered at the root: there what comes back replaces a partial sum.

    In every size.
    """
    for k in SIZES:
        whole = played(REDUCE, k, own(k, 1), lambda number: True)
        assert whole[0] == [everything(k)], f"of {k}"
        in_parts = played(REDUCE_SCATTER_GATHER, k, own(k, k), sums_first(REDUCE_SCATTER_GATHER, k))
        assert all(part == everything(k) for part in in_parts[0]), f"of {k}, in parts"


@pytest.mark.parametrize("name", REDUCE_SCATTER)
def test_a_reduce_scatter_leaves_each_its_part_of_the_sum(name: str) -> None:
    """In every size."""
    for k in SIZES:
        held = played(REDUCE_SCATTER[name], k, own(k, k), lambda number: True)
        assert all(held[member][member] == everything(k) for member in range(k)), f"{name} of {k}"


@pytest.mark.parametrize("name", ALL_GATHER)
def test_an_all_gather_brings_every_part_to_all(name: str) -> None:
    """In every size."""
    for k in SIZES:
        held: Held = [[share(part) if part == member else 0 for part in range(k)] for member in range(k)]
        done = played(ALL_GATHER[name], k, held, lambda number: False)
        assert all(member == list(map(share, range(k))) for member in done), f"{name} of {k}"


Pairs = set[tuple[int, int]]  # what goes from a member to one


def exchanged(how: Algorithm, k: int, carried: Callable[[Pairs, int, int, int], Pairs]) -> list[Pairs]:
    """Run the rounds of an all-to-all; `carried` says what a message takes of what its sender has before the round."""
    held = [{(member, to) for to in range(k)} for member in range(k)]
    for one in how.schedule(k):
        rows = list(zip(*(column.tolist() for column in one), strict=True))
        taken = [carried(held[src], src, dst, first) for src, dst, first, _ in rows]
        assert [len(each) for each in taken] == [parts for *_, parts in rows]
        for each, (src, dst, *_) in zip(taken, rows, strict=True):
            held[src] -= each
            held[dst] |= each
    return held


def numbered(k: int, has: Pairs, src: int, dst: int, first: int) -> Pairs:
    """Part k i + j is for member i from member j."""
    return has & {(first % k, first // k)}


def test_a_pairwise_exchange_brings_each_what_is_for_it() -> None:
    """In every size to 9, every part goes once (Thakur et al. 2005, section 4.3)."""
    for k in range(1, 10):
        done = exchanged(PAIRWISE, k, partial(numbered, k))
        assert done == [{(member, to) for member in range(k)} for to in range(k)], f"of {k}"
        assert np.array_equal(PAIRWISE.sends(k) * k * k, np.full(k, (k - 1) * PAIRWISE.parts(k)))


def even_nodes(across: int, inside: int) -> Nodes:
    """Nodes whose members are not neighbours."""
    return tuple(tuple(range(node, across * inside, across)) for node in range(across))


EVEN = [(2, 2), (2, 4), (2, 8), (3, 2), (3, 5), (4, 4), (5, 1)]


@pytest.mark.parametrize(("across", "inside"), EVEN)
def test_an_exchange_by_nodes_brings_each_what_is_for_it(across: int, inside: int) -> None:
    """Between nodes a message takes what is for the receiver's node, and inside one what is for the receiver."""
    k, nodes = across * inside, even_nodes(across, inside)
    how = all_to_all_by_nodes(nodes, Fraction(1))

    def carried(has: Pairs, src: int, dst: int, first: int) -> Pairs:
        through, alike = first // k, src % across == dst % across
        assert through == (src if alike else dst)
        return {(member, to) for member, to in has if (to == dst if alike else to in nodes[dst % across])}

    assert exchanged(how, k, carried) == [{(member, to) for member in range(k)} for to in range(k)]
    check_counts(how, k)


@pytest.mark.parametrize("between", [Fraction(1), Fraction(1, 2), Fraction(3, 8)])
@pytest.mark.parametrize(("across", "inside"), EVEN)
def test_an_exchange_by_nodes_sends_a_share_between_them(across: int, inside: int, between: Fraction) -> None:
    """(n-1)/n of a member's k-th of the payload goes to other nodes, or a share of that, and (g-1)/g of it inside.

    What is passed on inside a node waits for all that comes there from others.
    """
    k, nodes = across * inside, even_nodes(across, inside)
    how = all_to_all_by_nodes(nodes, between)
    sent = np.zeros((2, k), dtype=np.int64)
    for one in how.schedule(k):
        np.add.at(sent, ((one.src % across == one.dst % across).astype(np.int64), one.src), one.parts)
    for parts, share in zip(
        sent.tolist(), (between * Fraction(across - 1, across), Fraction(inside - 1, inside)), strict=True
    ):
        assert [Fraction(each, how.parts(k)) for each in parts] == [share / k] * k
    layout = unroll(how, k)
    first, count = k * (across - 1), k * (across + inside - 2)
    needs = {(a, b) for a in range(first) for b in range(first, count) if layout.rounds.dst[a] == layout.rounds.src[b]}
    assert set(zip(*map(np.ndarray.tolist, layout.data), strict=True)) == needs
    assert how.rounds(k) == across + inside - 2


def two(k: int) -> int:
    """The largest power of two up to k."""
    return 1 << floor(log2(k))


def extra(k: int) -> int:
    """1 where k is no power of two."""
    return int(k != two(k))


# (what, rounds, bytes in payloads): time = rounds * latency + bytes / bandwidth.
TEXTBOOK: dict[str, tuple[Algorithm, Callable[[int], int], Callable[[int], Fraction]]] = {
    # Chan et al. 2007, section 4.1 (minimum-spanning-tree broadcast, its dual): ceil(log2 p) (a + n b).
    "broadcast": (BROADCAST, lambda k: ceil(log2(k)), lambda k: Fraction(ceil(log2(k)))),
    "reduce": (REDUCE, lambda k: ceil(log2(k)), lambda k: Fraction(ceil(log2(k)))),
    # Chan et al. 2007, section 7: scatter then all-gather, 2 ceil(log2 p) a + 2 (p-1)/p n b.
    "broadcast in parts": (SCATTER_ALL_GATHER, lambda k: 2 * ceil(log2(k)), lambda k: Fraction(2 * (k - 1), k)),
    "reduce in parts": (REDUCE_SCATTER_GATHER, lambda k: 2 * ceil(log2(k)), lambda k: Fraction(2 * (k - 1), k)),
    # Thakur et al. 2005, section 4.1: ring (p-1) a + (p-1)/p n b; doubling and Bruck ceil(log2 p) a + (p-1)/p n b.
    "all-gather ring": (ALL_GATHER["ring"], lambda k: k - 1, lambda k: Fraction(k - 1, k)),
    "all-gather": (ALL_GATHER["recursive-doubling"], lambda k: ceil(log2(k)), lambda k: Fraction(k - 1, k)),
    "reduce-scatter ring": (REDUCE_SCATTER["ring"], lambda k: k - 1, lambda k: Fraction(k - 1, k)),
    "reduce-scatter": (REDUCE_SCATTER["recursive-halving"], lambda k: ceil(log2(k)), lambda k: Fraction(k - 1, k)),
    # Thakur et al. 2005, section 4.3: (p-1) a + n b, of the (p-1)/p n that a member of all with n/p sends to others.
    "all-to-all": (PAIRWISE, lambda k: k - 1, lambda k: Fraction(k - 1, k * k)),
    # Thakur et al. 2005, section 4.5: log2 p (a + n b); two more rounds of all where p is no power of two.
    "recursive-doubling": (
        ALL_REDUCE["recursive-doubling"],
        lambda k: floor(log2(k)) + 2 * extra(k),
        lambda k: Fraction(floor(log2(k)) + 2 * extra(k)),
    ),
    # The same, Rabenseifner's: 2 log2 p a + 2 (p-1)/p n b; two more rounds of all where p is no power of two.
    "halving-doubling": (
        ALL_REDUCE["halving-doubling"],
        lambda k: 2 * floor(log2(k)) + 2 * extra(k),
        lambda k: Fraction(2 * (two(k) - 1), two(k)) + 2 * extra(k),
    ),
    # Patarasuk & Yuan 2009, section 4: 2 (p-1) rounds of a p-th, the least that can be sent.
    "ring": (ALL_REDUCE["ring"], lambda k: 2 * (k - 1), lambda k: Fraction(2 * (k - 1), k)),
    # Chan et al. 2007, section 5: reduction and broadcast.
    "tree": (ALL_REDUCE["tree"], lambda k: 2 * ceil(log2(k)), lambda k: Fraction(2 * ceil(log2(k)))),
}


def check_counts(how: Algorithm, k: int) -> None:
    """Check that counts in closed form are those of the rounds."""
    schedule = how.schedule(k)
    sends = np.zeros(k, dtype=np.int64)
    for one in schedule:
        np.add.at(sends, one.src, one.parts)
        assert all(len({*ends.tolist()}) == len(ends) for ends in (one.src, one.dst)), f"of {k}: {one}"
    assert how.rounds(k) == len(schedule), f"of {k}"
    assert how.carried(k) == sum(int(one.parts.max()) for one in schedule), f"of {k}"
    assert how.sends(k).tolist() == sends.tolist(), f"of {k}"


@pytest.mark.every_case
@pytest.mark.parametrize("name", TEXTBOOK)
def test_rounds_and_times_are_the_textbook_s(name: str) -> None:
    """Counted from the rounds, stated in closed form, and written here from the papers: three times the same.

    In every size; and so long they take where all links are alike.
    """
    how, rounds, carried = TEXTBOOK[name]
    latency, bandwidth, size = 3e-6, 7e9, 5_000_000
    for k in SIZES:
        assert how.rounds(k) == rounds(k), f"{name} of {k}"
        assert Fraction(how.carried(k), how.parts(k)) == carried(k), f"{name} of {k}"
        check_counts(how, k)
        expected = rounds(k) * latency + float(carried(k)) * size / bandwidth
        links = Cluster(link=Link(latency=latency, bandwidth=bandwidth))
        price = collective_on_links(how, links, alike_group(links, np.arange(k))).seconds(size) if k > 1 else 0.0
        assert np.isclose(price, expected, rtol=1e-12, atol=0), f"{name} of {k}"


def test_two_trees_take_two_steps_for_each_edge_and_block() -> None:
    """A broadcast of b blocks in each tree of depth h is 2 (h + b - 1) steps (Sanders, Speck & Träff 2009, section 3).

    An all-reduce is a reduction and a broadcast, which meet two rounds closer than one after the other, but for one
    member more than a power of two; with two members both trees are one edge, and nobody waits for a colour.
    """
    how = ALL_REDUCE["double-tree"]
    blocks = how.parts(2) // 2
    for k in SIZES[2:]:
        steps = 2 * (ceil(log2(k)) + blocks - 1)
        just_above = k > 3 and log2(k - 1).is_integer()
        assert how.rounds(k) == 2 * steps - (0 if just_above else 2)
        check_counts(how, k)
    assert (how.rounds(1), how.rounds(2)) == (0, 2 * blocks)


def test_two_trees_share_the_work() -> None:
    """A member with children in one tree has none in the other; its edges have different colours: in every size."""
    for k in SIZES[1:]:
        check_two_trees(k)


def check_two_trees(k: int) -> None:
    """Of that many members."""
    trees = two_trees.parents(k)
    colour = two_trees.colours(trees)
    children = [[np.flatnonzero(tree == member).tolist() for member in range(k)] for tree in trees]
    for member in range(k):
        given = [(tree, child) for tree in (0, 1) for child in children[tree][member]]
        taken = [(tree, member) for tree in (0, 1) if trees[tree][member] >= 0]
        for edges in (given, taken):
            assert len(edges) == len({int(colour[edge]) for edge in edges}) <= 2, f"of {k}: {member}"
        # The one exception: of an odd number, member 0 is the first tree's root and may have a child in the second.
        assert not (children[0][member] and children[1][member]) or (k % 2 and member == 0), f"of {k}"
    for tree in trees:
        depth = max(len(path_to_root(tree.tolist(), member)) for member in range(k))
        assert depth == ceil(log2(k)), f"of {k}"


def path_to_root(parent: list[int], member: int) -> list[int]:
    """The members above a member."""
    above = []
    while parent[member] >= 0:
        member = parent[member]
        above.append(member)
    return above


@pytest.mark.parametrize("nodes", NODES, ids=len)
def test_a_hierarchical_all_reduce_counts_its_three_stages(nodes: tuple[tuple[int, ...], ...]) -> None:
    """Trees inside the largest node, up and down, and a ring between the nodes."""
    how, k, inside = hierarchical_all_reduce(nodes), sum(map(len, nodes)), ceil(log2(max(map(len, nodes))))
    assert how.rounds(k) == 2 * inside + 2 * (len(nodes) - 1)
    assert Fraction(how.carried(k), how.parts(k)) == 2 * inside + Fraction(2 * (len(nodes) - 1), len(nodes))
    check_counts(how, k)


def test_too_many_members_for_two_trees_are_refused() -> None:
    """With the remedy; the best does without."""
    with pytest.raises(RequestError, match="at most 4096 members, not 5000; take ring or halving-doubling"):
        ALL_REDUCE["double-tree"].rounds(5000)
    assert all(how.rounds(5000) for how in candidates(Op.ALL_REDUCE, "best", 5000, (((*range(5000),),),)))


def one_card_each(nodes: Nodes) -> Cards:
    """Nodes with a single network card."""
    return tuple((node,) for node in nodes)


def test_each_name_stands_for_algorithms_that_fit_the_operation() -> None:
    """Trees for zero-dp's collectives with the names of Table 1; parts with halving-doubling; both for the best."""
    for op, whole, in_parts in (
        (Op.BROADCAST, BROADCAST, SCATTER_ALL_GATHER),
        (Op.REDUCE, REDUCE, REDUCE_SCATTER_GATHER),
    ):
        assert all(algorithm(op, name) is whole for name in ("recursive-doubling", "ring", "tree", "double-tree"))
        assert algorithm(op, "halving-doubling") is in_parts
        assert candidates(op, "best", 8, (((*range(8),),),)) == [whole, in_parts]
        assert candidates(op, "hierarchical", 8, one_card_each(NODES[0])) == [whole]
        assert candidates(op, "hierarchical-rails", 8, one_card_each(NODES[0])) == [whole]
    assert algorithm(Op.ALL_GATHER, "ring") is ALL_GATHER["ring"]
    assert algorithm(Op.REDUCE_SCATTER, "tree") is REDUCE_SCATTER["recursive-halving"]
    assert set(ALL_REDUCE) < set(COLLECTIVES)
    in_nodes = candidates(Op.ALL_REDUCE, "best", 8, one_card_each(NODES[0]))
    assert in_nodes[-2:] == [hierarchical_all_reduce(NODES[0]), rails_all_reduce(NODES[0])]
    assert not any(how.members for how in candidates(Op.ALL_REDUCE, "best", 5, one_card_each(NODES[1])))


def test_all_to_alls_have_two_levels_on_even_nodes() -> None:
    """For the best; for every name where only a share goes between the nodes. Elsewhere they go pairwise."""
    even = one_card_each(NODES[0])
    levels, shared = (all_to_all_by_nodes(NODES[0], between) for between in (Fraction(1), Fraction(1, 2)))
    assert shared != levels
    assert candidates(Op.ALL_TO_ALL, "best", 8, even) == [PAIRWISE, levels]
    for name in COLLECTIVES:
        assert name == "best" or candidates(Op.ALL_TO_ALL, name, 8, even) == [PAIRWISE]
        assert candidates(Op.ALL_TO_ALL, name, 8, even, Fraction(1, 2)) == [shared]
        for nodes in NODES[1:4]:  # of one member, one node, uneven ones
            assert candidates(Op.ALL_TO_ALL, name, 5, one_card_each(nodes), Fraction(1, 2)) == [PAIRWISE]


def test_after_a_reduce_scatter_or_an_all_to_all_each_has_one_of_k_parts() -> None:
    """So the payload is k times what a member ends with, and elsewhere what it ends with."""
    ops = (Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.ALL_GATHER, Op.ALL_REDUCE, Op.BROADCAST)
    assert [payload_factor(op, 6) for op in ops] == [6, 6, 1, 1, 1]


@pytest.mark.parametrize("name", ["recursive-doubling", "ring", "tree", "halving-doubling", "double-tree"])
def test_a_collective_over_one_device_is_free(name: str) -> None:
    """No rounds, no bytes, no seconds."""
    for op in (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL):
        how = algorithm(op, name)
        assert (how.rounds(1), how.carried(1), how.sends(1).tolist(), how.schedule(1)) == (0, 0, [0], [])
        links = Cluster(link=Link(latency=1.0, bandwidth=1.0))
        assert fastest_algorithm(op, name, links, np.arange(1), 10**9)[1] == 0

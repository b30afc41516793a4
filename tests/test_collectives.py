"""Collectives against the literature's formulas and against playing them out, for every group size to 64."""

from math import ceil, floor, log2

import numpy as np
import pytest

from cdpsim.collectives import ALL_REDUCE, BROADCAST, REDUCE, algorithm
from cdpsim.program import Op

SIZES = range(1, 65)


def played_broadcast(k: int) -> tuple[int, list[int]]:
    """Hand a payload on in rounds, everyone who has it to one who has not: rounds, and sends by member."""
    has, sends, rounds = {0}, [0] * k, 0
    while len(has) < k:
        for giver in sorted(has):
            receiver = giver + 2**rounds
            if receiver < k:
                sends[giver] += 1
                has.add(receiver)
        rounds += 1
    return rounds, sends


@pytest.mark.parametrize("k", SIZES)
def test_binomial_broadcast_is_what_playing_it_gives(k: int) -> None:
    """ceil(log2 k) rounds, k-1 copies."""
    rounds, sends = played_broadcast(k)
    assert BROADCAST.rounds(k) == rounds == ceil(log2(k))
    assert BROADCAST.sends(k).tolist() == sends
    assert sum(sends) == k - 1


@pytest.mark.parametrize("k", SIZES)
def test_a_reduction_is_a_broadcast_backwards(k: int) -> None:
    """As many rounds; every member but the root hands its sum on once."""
    assert REDUCE.rounds(k) == BROADCAST.rounds(k)
    assert REDUCE.sends(k).tolist() == [0] + [1] * (k - 1)


def played_doubling(k: int) -> tuple[int, list[int]]:
    """Play recursive doubling with sets of contributions: rounds, and sends by member."""
    core = 2 ** floor(log2(k))
    known = [{member} for member in range(k)]
    sends, rounds = [0] * k, 0
    if core < k:
        for extra in range(core, k):
            known[extra - core] |= known[extra]
            sends[extra] += 1
        rounds += 1
    for bit in range(floor(log2(k))):
        before = [set(mine) for mine in known]
        for member in range(core):
            known[member] |= before[member ^ 2**bit]
            sends[member] += 1
        rounds += 1
    if core < k:
        for extra in range(core, k):
            known[extra] = known[extra - core]
            sends[extra - core] += 1
        rounds += 1
    assert all(mine == set(range(k)) for mine in known)
    return rounds, sends


@pytest.mark.parametrize("k", SIZES)
def test_recursive_doubling_is_what_playing_it_gives(k: int) -> None:
    """log2 k rounds for powers of two, floor(log2 k) + 2 otherwise (Thakur et al. 2005)."""
    rounds, sends = played_doubling(k)
    how = ALL_REDUCE["recursive-doubling"]
    assert how.rounds(k) == rounds
    assert how.sends(k).tolist() == sends


@pytest.mark.parametrize("k", SIZES)
def test_a_ring_sends_the_least_that_an_all_reduce_can(k: int) -> None:
    """2(k-1) rounds of a k-th each: 2(k-1)/k of the payload by every member (Patarasuk & Yuan 2009)."""
    ring = ALL_REDUCE["ring"]
    assert ring.rounds(k) == 2 * (k - 1)
    assert np.allclose(ring.sends(k) / ring.parts(k), 2 * (k - 1) / k)


@pytest.mark.parametrize("k", SIZES)
def test_a_tree_is_a_reduction_and_a_broadcast(k: int) -> None:
    """2 ceil(log2 k) rounds."""
    tree = ALL_REDUCE["tree"]
    assert tree.rounds(k) == 2 * ceil(log2(k))
    assert (tree.sends(k) == REDUCE.sends(k) + BROADCAST.sends(k)).all()


@pytest.mark.parametrize(("op", "expected"), [(Op.BROADCAST, BROADCAST), (Op.REDUCE, REDUCE)])
def test_only_all_reduces_have_a_choice(op: Op, expected: object) -> None:
    """zero-dp's collectives are binomial trees whatever is asked for."""
    assert all(algorithm(op, name) is expected for name in ALL_REDUCE)

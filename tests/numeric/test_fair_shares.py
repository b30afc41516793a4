"""Max-min fair rates: by hand, against the definition, and compiled to the same bits."""

from fractions import Fraction
from itertools import permutations
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cdpsim.numeric.fair_shares import FairRates, share
from cdpsim.timing.engine import discrete
from tests.helpers.traffic import arrivals
from tests.helpers.traffic_patterns import patterns

Routes = list[list[int]]
Moments = list[dict[int, int]]  # what changes: routes, and how many flows each of them has from then on
Case = tuple[Routes, list[float], Moments]


def test_shares_by_hand() -> None:
    """A flow that is held up at 10 leaves 90 to two others; the third finds 55 left of its own 100."""
    routes, capacity = [[0, 1], [1], [1, 2], [2]], [10.0, 100.0, 100.0]
    for flows, rates in (
        ({0: 1, 1: 1, 2: 1, 3: 1}, {0: 10.0, 1: 45.0, 2: 45.0, 3: 55.0}),
        ({0: 1, 1: 1, 2: 1}, {0: 10.0, 1: 45.0, 2: 45.0}),
        ({0: 2, 3: 3}, {0: 5.0, 3: 100 / 3}),
    ):
        assert FairRates(routes, capacity).share(flows) == rates


def test_flows_that_leave_give_their_share_back() -> None:
    """The other route of their link is rated anew; the third one shares nothing with them, and is not."""
    rates = FairRates([[0], [0], [1]], [100.0, 7.0])
    assert rates.share({0: 1, 1: 1, 2: 1}) == {0: 50.0, 1: 50.0, 2: 7.0}
    assert rates.share({0: 0}) == {1: 100.0}
    assert rates.share({0: 3}) == {0: 25.0, 1: 25.0}
    assert rates.share({0: 0, 1: 0, 2: 0}) == {}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_flows_leave_one_link_in_any_order(order: tuple[int, ...]) -> None:
    """Those that are still there have equal parts of it, also after all have come once more."""
    rates = FairRates([[0], [0], [0]], [12.0])
    for _ in range(2):
        there = set[int]()
        for route in range(3):
            there.add(route)
            assert rates.share({route: 1}) == dict.fromkeys(there, 12 / len(there))
        for route in order:
            there.remove(route)
            assert rates.share({route: 0}) == {other: 12 / len(there) for other in there}


def test_a_region_grows_by_those_for_whom_it_is_unfair() -> None:
    """Three links of 10, 12 and 100 in a row: a second flow on the first link gives the flows on the others more.

    Alone, the flow across all links has 10/2 of the first; with another flow there it has 10/3. So the flow beside it
    on the second link, whose bottleneck that was, goes from 7 to 12 - 10/3. A flow elsewhere is not looked at.
    """
    rates = FairRates([[0, 1], [0], [1], [2]], [10.0, 12.0, 100.0])
    assert rates.share({0: 1, 1: 1, 2: 1, 3: 1}) == {0: 5.0, 1: 5.0, 2: 7.0, 3: 100.0}
    assert rates.share({1: 2}) == pytest.approx({0: 10 / 3, 1: 10 / 3, 2: 12 - 10 / 3})


def test_a_full_link_is_no_bottleneck_of_a_flow_slower_than_others() -> None:
    """On a link of 12, one of three flows falls from 4 to 1; what it leaves is not for the slowest one alone.

    Flows on a link of 8 slow the first one down, others hold the third one at 3 by a link of 9. More of the former join
    as the latter leave: 11 are left to two flows, which had 5 and 3.
    """
    rates = FairRates([[0], [0, 1], [0, 2], [1], [2]], [12.0, 8.0, 9.0])
    assert rates.share({0: 1, 1: 1, 2: 1, 3: 1, 4: 2}) == {0: 5.0, 1: 4.0, 2: 3.0, 3: 4.0, 4: 3.0}
    assert rates.share({3: 7, 4: 0}) == {0: 5.5, 1: 1.0, 2: 5.5, 3: 1.0}


def test_flows_join_where_all_links_are_full() -> None:
    """Three share the 6 of one link; one of them leaves 8 of the other link's 10 to the flow that had all of it."""
    rates = FairRates([[0], [1], [0, 1], [1]], [10.0, 6.0])
    assert rates.share({0: 1, 1: 1}) == {0: 10.0, 1: 6.0}
    assert rates.share({2: 1, 3: 1}) == {0: 8.0, 1: 2.0, 2: 2.0, 3: 2.0}


def test_a_flow_that_is_no_faster_than_others_stays_as_it_is() -> None:
    """A link of 5 holds a flow up, so 5 of 10 are left to the next one beside it: no more than the first one has."""
    rates = FairRates([[0, 1], [1]], [5.0, 10.0])
    assert rates.share({0: 1}) == {0: 5.0}
    assert rates.share({1: 1}) == {1: 5.0}


def test_a_rate_that_stays_keeps_its_bits() -> None:
    """Five flows share each link; one leaves the first, and its two neighbours' fifths are only computed otherwise."""
    rates = FairRates([[0], [0, 1], [1]], [1.0, 1.0])
    before = rates.share({0: 2, 1: 3, 2: 2})
    assert before == pytest.approx(dict.fromkeys(range(3), 0.2))
    after = rates.share({0: 1})
    assert 1 in after
    assert before | after == {0: pytest.approx(1 - 3 / 5), 1: before[1], 2: before[2]}


def test_only_flows_that_stay_keep_their_bits() -> None:
    """A flow so slow that it is lost in rounding slows no other; but one that joins later is rated as it is."""
    little = 2.0**-45
    rates = FairRates([[0], [0, 1]], [1.0, little])
    assert rates.share({0: 1}) == {0: 1.0}
    assert rates.share({1: 1}) == {0: 1.0, 1: little}
    assert rates.share({0: 0}) == {}
    assert rates.share({0: 1}) == {0: 1 - little}
    rates = FairRates([[0]], [1 + little])
    for _ in range(2):
        assert rates.share({0: 1}) == {0: 1 + little}
        assert rates.share({0: 0}) == {}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Routes through a few links, and flows that join and leave some of them at one moment after another."""
    capacity = st.integers(1, 20).map(float) | st.integers(1, 20).map(lambda of: of / 7) | st.floats(1e-3, 1e12)
    limit = draw(st.lists(capacity, min_size=1, max_size=6))
    link = st.integers(0, len(limit) - 1)
    routes = draw(st.lists(st.lists(link, min_size=1, max_size=4, unique=True), min_size=1, max_size=8))
    changes = st.dictionaries(st.integers(0, len(routes) - 1), st.integers(0, 3), max_size=len(routes))
    return routes, limit, draw(st.lists(changes, min_size=1, max_size=12))


@given(cases())
def test_every_flow_has_a_bottleneck(case: Case) -> None:
    """A full link on which no other is faster: with it, and within all limits, rates are fair, whatever came before."""
    routes, capacity, moments = case
    shared = FairRates(routes, capacity)
    flows, rate, nearly = dict[int, int](), dict[int, Fraction](), Fraction(1, 10**9)
    for changes in moments:
        flows |= changes
        rate |= {route: Fraction(one) for route, one in shared.share(changes).items()}
        there = [route for route, count in flows.items() if count]
        load = [sum(rate[r] * flows[r] for r in there if link in routes[r]) for link in range(len(capacity))]
        top = [max((rate[r] for r in there if link in routes[r]), default=Fraction(0)) for link in range(len(capacity))]
        assert all(sent <= limit * (1 + nearly) for sent, limit in zip(load, map(Fraction, capacity), strict=True))
        for route in there:
            full = [link for link in routes[route] if load[link] >= Fraction(capacity[link]) * (1 - nearly)]
            assert any(rate[route] >= top[link] * (1 - nearly) for link in full)


def crowd(seed: int) -> Case:
    """Many routes through a few links, of which few change at a time: regions that grow, and ties."""
    random = Random(seed)
    capacity = [random.choice([random.uniform(0.01, 10), random.randint(1, 9), random.randint(1, 20) / 7])] * 3
    capacity += [random.choice([random.uniform(0.01, 10), random.randint(1, 9), 1e9]) for _ in range(9)]
    capacity = [float(limit) for limit in random.sample(capacity, random.randint(3, 12))]
    links = range(len(capacity))
    routes = [random.sample(links, random.randint(1, min(len(links), 5))) for _ in range(random.randint(5, 40))]
    numbers = range(len(routes))
    changes = [{route: random.randint(0, 3) for route in random.sample(numbers, 3)} for _ in range(40)]
    return routes, capacity, changes


# Three routes with a bottleneck each: the order in which their rates are taken from a link decides on its last bits.
THIRDS: Case = ([[0, 3], [1, 3], [2, 3], [3]], [0.1, 0.7, 1.3, 1e3], [dict.fromkeys(range(4), 3), {3: 1}, {0: 2, 2: 0}])


@given(cases() | st.integers(0).map(crowd))
@example(THIRDS)
@settings(max_examples=300, deadline=None)
def test_compiled_rates_have_the_same_bits(compiled: Any, case: Case) -> None:
    """On lists, on arrays and compiled: the same routes, in the same order, to the last bit."""
    routes, capacity, moments = case
    plain, arrays = FairRates(routes, capacity), FairRates(routes, capacity, share)
    fast = compiled.CompiledFairRates(routes, capacity)
    for changes in moments:
        expected = list(plain.share(changes).items())
        assert expected == list(arrays.share(changes).items()) == list(fast.share(changes).items())


@pytest.mark.every_case
@pytest.mark.parametrize("number", range(0, len(patterns()), 5))
def test_compiled_shares_have_the_same_bits(number: int, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of whole patterns of traffic, with numba and without."""
    _, cluster, traffic = patterns()[number]
    assert len(traffic) < discrete.COMPILED_FROM_MESSAGES
    plain = arrivals(traffic, cluster)
    monkeypatch.setattr(discrete, "COMPILED_FROM_MESSAGES", 0)
    assert np.array_equal(arrivals(traffic, cluster), plain)

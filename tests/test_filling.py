"""Progressive filling: by hand, against the definition, and compiled to the same bits."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import filling
from cdpsim.engine import sharing
from cdpsim.paths import compiled
from tests.conftest import need
from tests.patterns import patterns
from tests.traffic import arrivals

Case = tuple[list[list[int]], list[float], list[list[int]]]


def rated(paths: list[list[int]], limit: list[float], counts: list[int], own: Any = None) -> list[float]:
    """The rate of each bundle, if they have so many flows; after what has been shared before."""
    most = [min(limit[edge] for edge in path) for path in paths]
    own = filling.bundles(paths, limit, most, arrays=False) if own is None else own
    filling.share(own, list(range(len(paths))), counts)
    return list(own.rate)


def test_shares_by_hand() -> None:
    """Who is held up at 10 leaves 90 to two others; the third finds 55 left of its own 100."""
    paths = [[0, 1], [1], [1, 2], [2]]
    assert rated(paths, [10.0, 100.0, 100.0], [1, 1, 1, 1]) == [10.0, 45.0, 45.0, 55.0]
    assert rated(paths, [10.0, 100.0, 100.0], [1, 1, 1, 0]) == [10.0, 45.0, 45.0, 0.0]
    assert rated(paths, [10.0, 100.0, 100.0], [2, 0, 0, 3]) == [5.0, 0.0, 0.0, 100 / 3]


def test_who_goes_gives_his_share_back() -> None:
    """Others are rated anew, and only they: the last bundle keeps what it has, and is not looked at."""
    paths = [[0], [0], [1]]
    own = filling.bundles(paths, [100.0, 7.0], [100.0, 100.0, 7.0], arrays=False)
    assert rated(paths, [100.0, 7.0], [1, 1, 1], own) == [50.0, 50.0, 7.0]
    assert filling.share(own, [0], [0]) == 1
    assert own.rate == [0.0, 100.0, 7.0]
    assert filling.share(own, [0], [3]) == 2
    assert own.rate == [25.0, 25.0, 7.0]


def test_a_rate_that_stays_keeps_its_bits() -> None:
    """Five flows share each edge; one leaves the first, and its two neighbours' fifths are only computed otherwise."""
    paths, limit = [[0], [0, 1], [1]], [1.0, 1.0]
    own = filling.bundles(paths, limit, [*limit, 1.0], arrays=False)
    before = rated(paths, limit, [2, 3, 2], own)
    assert before == pytest.approx([0.2, 0.2, 0.2])
    assert filling.share(own, [0], [1]) > 1
    assert own.rate[0] == pytest.approx(1 - 3 / 5)
    assert own.rate[1:] == before[1:]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Paths through a few edges, and how many flows go along them at one moment and the next."""
    limit = draw(st.lists(st.integers(1, 20).map(float), min_size=1, max_size=6))
    edge = st.integers(0, len(limit) - 1)
    paths = draw(st.lists(st.lists(edge, min_size=1, max_size=4, unique=True), min_size=1, max_size=8))
    counts = st.lists(st.integers(0, 3), min_size=len(paths), max_size=len(paths))
    return paths, limit, draw(st.lists(counts, min_size=1, max_size=5))


@given(cases())
def test_every_flow_has_a_bottleneck(case: Case) -> None:
    """A full edge on which no other has more: with it, and within all limits, rates are fair, whatever came before."""
    paths, limit, moments = case
    own = filling.bundles(paths, limit, [min(limit[edge] for edge in path) for path in paths], arrays=False)
    for counts in moments:
        rate = [Fraction(one) for one in rated(paths, limit, counts, own)]
        there = [bundle for bundle, count in enumerate(counts) if count]
        load = [sum(rate[b] * counts[b] for b in there if edge in paths[b]) for edge in range(len(limit))]
        top = [max((rate[b] for b in there if edge in paths[b]), default=Fraction(0)) for edge in range(len(limit))]
        nearly = Fraction(1, 10**9)
        assert all(sent <= most * (1 + nearly) for sent, most in zip(load, limit, strict=True))
        for bundle in there:
            full = [edge for edge in paths[bundle] if load[edge] >= limit[edge] * (1 - nearly)]
            assert any(rate[bundle] >= top[edge] * (1 - nearly) for edge in full)


@pytest.mark.parametrize("number", range(0, len(patterns()), 5))
def test_compiled_shares_have_the_same_bits(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of whole patterns of traffic, with numba and without."""
    need(compiled(), "numba")
    _, cluster, traffic = patterns()[number]
    assert len(traffic) < sharing.COMPILED_FROM
    plain = arrivals(traffic, cluster)
    monkeypatch.setattr(sharing, "COMPILED_FROM", 0)
    assert np.array_equal(arrivals(traffic, cluster), plain)

"""Random factors: held against the standard library's functions, closed forms of moments, and known bits."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from cdpsim.numeric.disturbances import DISTRIBUTIONS, exp, log, normal, uniforms
from hypothesis import given
from hypothesis import strategies as st

HALF = 0.5


@given(st.floats(-200, 200))
def test_exponentials_are_those_of_the_library(x: float) -> None:
    """To a few units in the last place; the library's own differ in the last one from machine to machine."""
    assert exp(np.array([x]))[0] == pytest.approx(math.exp(x), rel=4 * 2**-52)


@given(st.floats(1e-300, 1e300))
def test_logarithms_are_those_of_the_library(x: float) -> None:
    assert log(np.array([x]))[0] == pytest.approx(math.log(x), rel=4 * 2**-52, abs=4 * 2**-52)


@given(st.integers(0, 2**52 - 1))
def test_normal_quantiles_are_those_of_the_library(k: int) -> None:
    """Which implements the same algorithm of Wichura's, with its own logarithm; and they are symmetric."""
    u = np.array([(k + 0.5) * 2.0**-52])
    assert normal(u)[0] == pytest.approx(NormalDist().inv_cdf(u[0]), rel=1e-14, abs=1e-15)
    assert normal(1 - u)[0] == -normal(u)[0]


def test_far_tails_are_normal_too() -> None:
    """Probabilities by the complementary error function: beyond 5 and 8 standard deviations."""
    for u in (2.0**-53, 1e-12, 3e-7, 0.01, 0.0749, 0.0751):
        z = normal(np.array([u]))[0]
        assert math.erfc(-z / math.sqrt(2)) / 2 == pytest.approx(u, rel=1e-12)


def test_uniform_numbers_are_the_bits_of_the_generator() -> None:
    """The first 52 bits of each number, in the middle of their 2^52-th of [0, 1); no 0, no 1."""
    bits = np.random.PCG64(np.random.SeedSequence(7, spawn_key=(3, 1))).random_raw(1000)
    assert uniforms(7, 3, 1, 1000).tolist() == [(int(raw) // 2**12 + HALF) / 2**52 for raw in bits]
    assert uniforms(7, 3, 1, 10).tolist() == uniforms(7, 3, 1, 1000)[:10].tolist()


def test_seeds_runs_and_streams_differ() -> None:
    """Their draws are independent: over 20,000 pairs the correlation is within four standard errors of 0."""
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    drawn = np.stack([uniforms(*key, 20_000) for key in keys])
    between = np.asarray(np.corrcoef(drawn))[np.triu_indices(len(keys), 1)]
    assert (np.abs(between) < 4 / math.sqrt(20_000)).all()


@pytest.mark.every_case
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_factors_have_mean_one_and_the_variation_asked_for(name: str, share: float) -> None:
    """Integrated over the quantile function by the midpoint rule, which is exact for none of them but near for all."""
    quantile, most = DISTRIBUTIONS[name]
    variation = share * min(most, 1.0)
    u = (np.arange(500_000) + 0.5) / 500_000
    drawn = quantile(u, variation)
    assert drawn.min() > 0
    assert drawn.mean() == pytest.approx(1, abs=2e-4)
    assert drawn.std() == pytest.approx(variation, rel=5e-3)
    assert (np.diff(drawn) >= 0).all()


def test_quantiles_by_hand() -> None:
    """At u = 3/4: 1 + c √3 / 2; 1 - c + c ln 4; exp(0.6745 s - s²/2) with s² = ln 1.25 at c = 1/2."""
    u, half = np.array([0.75]), 0.5
    found = {name: quantile(u, half)[0] for name, (quantile, _) in DISTRIBUTIONS.items()}
    assert found["uniform"] == pytest.approx(1 + half * math.sqrt(3) / 2)
    assert found["exponential"] == pytest.approx(half + half * math.log(4))
    s = math.sqrt(math.log(1.25))
    assert found["lognormal"] == pytest.approx(math.exp(s * 0.6744897501960817 - s * s / 2))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_largest_variation_gives_no_negative_time(name: str) -> None:
    quantile, most = DISTRIBUTIONS[name]
    ends = quantile(np.array([2.0**-53, 1 - 2.0**-53]), most)
    assert (ends > 0).all()
    assert np.isfinite(ends).all()

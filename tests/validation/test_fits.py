"""Fits of latency, bandwidth and speed: known values are found again, in spite of a few outliers."""

from math import inf, isclose

import numpy as np
import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from cdpsim import SCHEDULES
from cdpsim.cluster import Cluster, Devices, Link
from cdpsim.model import Model, Stage
from cdpsim.program import Op
from cdpsim.program.assembly import derive
from cdpsim.program.collectives import ALL_REDUCE
from cdpsim.timing.costs import node_costs
from validation.profile.fits import (
    Sample,
    algorithms,
    errors_of,
    fit_collective,
    fit_line,
    fit_speed,
    predict_collective,
)

SIZES = [8 * 4**k for k in range(12)]
latencies = st.floats(1e-6, 1e-3)
bandwidths = st.floats(1e8, 1e11)
seeds = st.integers(0, 2**32 - 1)
collectives = st.sampled_from(
    [(op, name) for op in (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE) for name in algorithms(op)]
)


def noisy(times: list[float], seed: int, spread: float = 0.02) -> list[float]:
    return [float(t) for t in times * np.exp(spread * np.random.default_rng(seed).standard_normal(len(times)))]


@given(latencies, bandwidths)
def test_exact_times_give_back_what_they_were_made_of(latency: float, bandwidth: float) -> None:
    line = fit_line(SIZES, [latency + size / bandwidth for size in SIZES])
    assert isclose(line.latency, latency, rel_tol=1e-9)
    assert isclose(line.bandwidth, bandwidth, rel_tol=1e-9)
    assert max(map(abs, line.errors)) < 1e-9


@given(latencies, st.floats(1e8, 1e10), seeds)
def test_noise_moves_a_fit_little(latency: float, bandwidth: float, seed: int) -> None:
    line = fit_line(SIZES, noisy([latency + size / bandwidth for size in SIZES], seed))
    assert isclose(line.latency, latency, rel_tol=0.1)
    assert isclose(line.bandwidth, bandwidth, rel_tol=0.1)


@given(latencies, st.floats(1e8, 1e10), seeds, st.integers(1, 10), st.floats(3, 30))
def test_one_point_that_somebody_disturbed_moves_it_little(
    latency: float, bandwidth: float, seed: int, which: int, times: float
) -> None:
    seconds = noisy([latency + size / bandwidth for size in SIZES], seed)
    seconds[which] *= times
    line = fit_line(SIZES, seconds)
    assert isclose(line.latency, latency, rel_tol=0.2)
    assert isclose(line.bandwidth, bandwidth, rel_tol=0.2)


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-7, 10)), min_size=1, max_size=12))
def test_whatever_was_measured_gives_links_that_can_be(points: list[tuple[int, float]]) -> None:
    sizes, seconds = zip(*points, strict=True)
    line = fit_line(sizes, seconds)
    assert 0 <= line.latency < inf
    assert line.bandwidth > 0
    assert line == fit_line(sizes, seconds)


def test_times_that_do_not_grow_are_all_latency() -> None:
    line = fit_line(SIZES, [1e-3 - 1e-12 * size for size in SIZES])
    assert line.bandwidth == inf
    assert isclose(line.latency, 1e-3, rel_tol=0.01)


@given(collectives, latencies, bandwidths)
def test_a_collective_gives_back_the_links_that_it_ran_on(
    how: tuple[Op, str], latency: float, bandwidth: float
) -> None:
    samples = [
        Sample(k, size, predict_collective(*how, k, size, latency, bandwidth)) for k in (2, 3, 4) for size in SIZES
    ]
    line = fit_collective(*how, samples)
    assert isclose(line.latency, latency, rel_tol=1e-6)
    assert isclose(line.bandwidth, bandwidth, rel_tol=1e-6)
    assert max(map(abs, errors_of(line.latency, line.bandwidth, *how, samples))) < 1e-6


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
@pytest.mark.parametrize("schedule", ["multi-dp", "zero-dp"])
def test_what_is_fitted_is_what_a_simulation_will_charge(schedule: str, algorithm: str) -> None:
    n, latency, bandwidth = 4, 1e-4, 1e9
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=10**6),) * n)
    program = derive(SCHEDULES[schedule], model, 2)
    cluster = Cluster(devices=(Devices(),), link=Link(latency=latency, bandwidth=bandwidth))
    charged = node_costs(program, model, cluster, algorithm).duration[len(program.tasks) :]
    assert len(charged)
    for op, group, size, seconds in zip(
        *(c.tolist() for c in (program.messages.op, program.messages.dst, program.messages.size, charged)), strict=True
    ):
        assert isclose(
            predict_collective(Op(op), algorithm, len(program.groups[group]), size, latency, bandwidth), seconds
        )


@given(st.floats(1e6, 1e15), st.lists(st.integers(1, 10**12), min_size=1))
def test_a_speed_is_found_again(speed: float, work: list[int]) -> None:
    assert isclose(fit_speed(work, [w / speed for w in work]), speed, rel_tol=1e-9)


@given(st.lists(st.tuples(st.floats(1e3, 1e12), st.floats(1e-6, 10)), min_size=1, max_size=8), st.floats(0.5, 2))
def test_no_other_speed_is_nearer(points: list[tuple[float, float]], other: float) -> None:
    def off(speed: float) -> float:
        return sum((work / speed / seconds - 1) ** 2 for work, seconds in points)

    speed = fit_speed(*zip(*points, strict=True))
    assert off(speed) <= off(speed * other) * (1 + 1e-9) + 1e-12

"""Latency, bandwidth and speed fitted to measured times, deterministically.

Fits minimise logarithms of predicted over measured times: half is as wrong as twice, from microseconds to seconds.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cdpsim.cluster import Cluster, Link
from cdpsim.numeric.columns import Floats
from cdpsim.program import Op
from cdpsim.program.collectives import ALL_REDUCE, algorithm
from cdpsim.timing.collective_times import fastest_algorithm

_FAR = 0.2  # of logarithms: an error above about a fifth counts by its size, not its square
_ITERATIONS = 100
_LEAST_SLOPE = 1e-18  # seconds for a byte: no cluster file takes a larger bandwidth


class Line(NamedTuple):
    """Time = rounds × latency + bytes carried / bandwidth, with the relative error at each measured point."""

    latency: float
    bandwidth: float
    errors: tuple[float, ...]


class Sample(NamedTuple):
    """One collective's measured time."""

    ranks: int
    size: int
    seconds: float


def fit_line(carried: ArrayLike, seconds: ArrayLike, rounds: ArrayLike = 1.0) -> Line:
    """Return the latency and the bandwidth that explain the times of transfers best."""
    time = np.asarray(seconds, dtype=np.float64)
    columns = np.stack(np.broadcast_arrays(rounds, carried), axis=1).astype(np.float64) / time[:, None]
    solution = _solve(columns, np.ones(len(time)))
    for _ in range(_ITERATIONS):
        ratio = columns @ solution
        off = np.log(ratio)
        # With these weights squared differences have the slope of squared logarithms.
        near = np.abs(ratio - 1) < 1e-6
        weight = np.where(near, 1.0, off / np.where(near, 1.0, ratio * (ratio - 1)))
        weight *= _FAR / np.maximum(np.abs(off), _FAR)
        previous, solution = solution, _solve(columns, weight)
        if np.allclose(solution, previous, rtol=1e-12, atol=0):
            break
    latency, slope = solution.tolist()
    return Line(latency, 1 / slope if slope > _LEAST_SLOPE else inf, tuple((columns @ solution - 1).tolist()))


def _solve(columns: Floats, weight: Floats) -> Floats:
    """Return the two numbers, neither below zero, for which the weighted columns add up closest to one."""
    root = np.sqrt(weight)
    scale = columns.max(axis=0)
    scaled = columns / scale * root[:, None]
    both: Floats = np.linalg.lstsq(scaled, root, rcond=None)[0]
    if (both >= 0).all():
        return both / scale
    # If one of them is negative, the best fit has a zero: it is one of these two.
    edges = [np.eye(2)[k] * (scaled[:, k] @ root / (scaled[:, k] @ scaled[:, k])) for k in range(2)]
    best = min(edges, key=lambda one: float(((scaled @ one - root) ** 2).sum()))
    return best / scale


def predict_collective(op: Op, all_reduce: str, ranks: int, size: int, latency: float, bandwidth: float) -> float:
    """Return the seconds that a collective takes in cdpsim, on links of that latency and bandwidth."""
    links = Cluster(link=Link(latency=latency, bandwidth=bandwidth))
    return fastest_algorithm(op, all_reduce, links, np.arange(ranks), size)[1]


def errors_of(
    latency: float, bandwidth: float, op: Op, all_reduce: str, samples: Sequence[Sample]
) -> tuple[float, ...]:
    """Say how far that is off at each sample."""
    return tuple(
        predict_collective(op, all_reduce, k, size, latency, bandwidth) / seconds - 1 for k, size, seconds in samples
    )


def fit_collective(op: Op, all_reduce: str, samples: Sequence[Sample]) -> Line:
    """Return the links on which a textbook algorithm takes times closest to the measured ones."""
    how = algorithm(op, all_reduce)
    rounds = [how.rounds(k) for k, _, _ in samples]
    # The bytes of a link in all rounds, which are one after another.
    carried = [how.carried(k) * size / how.parts(k) for k, size, _ in samples]
    return fit_line(carried, [seconds for _, _, seconds in samples], rounds)


def algorithms(op: Op) -> list[str]:
    """Return the names of cdpsim's algorithms for a collective."""
    return list(ALL_REDUCE) if op == Op.ALL_REDUCE else ["tree"]


def fit_speed(work: ArrayLike, seconds: ArrayLike) -> float:
    """Return the FLOP/s at which predicted times have the least squared relative errors."""
    achieved = np.asarray(work, dtype=np.float64) / np.asarray(seconds, dtype=np.float64)
    return float((achieved**2).sum() / achieved.sum())

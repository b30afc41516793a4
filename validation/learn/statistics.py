"""Statistics of paired runs: intervals by Student's t, tests of equivalence and of difference, and verdicts.

Student's distribution is that of whole degrees of freedom, a finite sum (Abramowitz and Stegun, 26.7.3, 26.7.4). Runs
that differ in their seed alone are paired.
"""

from collections.abc import Sequence
from math import atan, cos, nan, pi, sin, sqrt
from typing import NamedTuple

import numpy as np

LEVEL = 0.05
EQUIVALENT, BETTER, WORSE, OPEN = VERDICTS = ("equivalent", "better", "worse", "open")


class Interval(NamedTuple):
    """A mean and half the width of its interval of 95 %; a single number has none."""

    mean: float
    half: float | None


class Comparison(NamedTuple):
    """Paired differences, and what may be said of them; of a single pair nothing."""

    difference: Interval
    p_different: float | None  # of a mean difference of nothing, both sides
    p_apart: float | None  # of a mean difference beyond the margin, the larger of both sides


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of numbers and its interval."""
    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return Interval(mean, None)
    spread = float(np.std(values, ddof=1))
    return Interval(mean, quantile(1 - LEVEL / 2, count - 1) * spread / sqrt(count))


def compare(values: Sequence[float], others: Sequence[float], margin: float) -> Comparison:
    """Return the differences of numbers from others, pair by pair, and the tests of both questions."""
    pairs = np.asarray(values, dtype=float) - np.asarray(others, dtype=float)
    count, found = len(pairs), interval(pairs.tolist())
    if count < 2:
        return Comparison(found, None, None)
    error, free = float(np.std(pairs, ddof=1)) / sqrt(count), count - 1

    def above(bound: float) -> float:
        """Return how probable such a mean or a larger one is, if the true one is the bound."""
        if error == 0:
            return 1.0 if found.mean <= bound else 0.0
        return 1 - cumulative((found.mean - bound) / error, free)

    different = 2 * min(above(0.0), 1 - above(0.0)) if error else float(found.mean == 0)
    return Comparison(found, different, max(above(-margin), 1 - above(margin)))


def verdicts(comparisons: Sequence[Comparison], margin: float) -> list[str]:
    """Return what may be said of each comparison at a level of 5 % for all of them together (Holm 1979)."""
    apart, different = (holm([getattr(each, p) for each in comparisons]) for p in ("p_apart", "p_different"))
    found = []
    for each, close, far in zip(comparisons, apart, different, strict=True):
        if close < LEVEL:
            found.append(EQUIVALENT)
        elif far < LEVEL:
            found.append(BETTER if each.difference.mean > 0 else WORSE)
        else:
            found.append(OPEN)
    return found


def holm(values: Sequence[float | None]) -> list[float]:
    """Return p-values of several tests, each as large as if it were the only one; nan where a test says nothing.

    >>> [round(value, 4) for value in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted, highest = [nan] * len(values), 0.0
    order = sorted((value, k) for k, value in enumerate(values) if value is not None)
    for place, (value, k) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - place) * value))
        adjusted[k] = highest
    return adjusted


def cumulative(t: float, free: int) -> float:
    """Return the probability of at most t by Student's distribution with `free` degrees of freedom.

    >>> round(cumulative(2.2621571628, 9), 6)
    0.975
    """
    angle, odd = atan(t / sqrt(free)), free % 2
    total, term = 0.0, cos(angle) if odd else 1.0
    for k in range(1 + odd, free, 2):
        total += term
        term *= k / (k + 1) * cos(angle) ** 2
    within = sin(angle) * total  # of both sides
    return (1 + (2 / pi * (angle + within) if odd else within)) / 2


def quantile(probability: float, free: int) -> float:
    """Return the value that is exceeded with one less a probability of a half or more."""
    low, high = 0.0, 1.0
    while cumulative(high, free) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if cumulative(middle, free) < probability else (low, middle)
    return high

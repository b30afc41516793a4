"""Calendars: a task begins when its device is at work, pauses while the device stands still, and goes on after.

So a task ends when its device has been at work, from its start on, for as long as it takes: a piecewise linear function
of its start that never falls.

Random factors of mean 1, the same to the last bit on every machine.

A factor is the quantile function of its distribution at a number drawn uniformly between 0 and 1; c is its coefficient
of variation, the standard deviation over the mean, which is 1:

    uniform      1 + c √3 (2u - 1)                    between 1 - c √3 and 1 + c √3, so c is at most 1/√3
    exponential  1 - c - c ln(1 - u)                  1 - c, and c times an exponential, so c is at most 1: shifted
                                                      exponentials model stragglers (Lee et al. 2018, IEEE Trans. Inf.
                                                      Theory 64(3))
    lognormal    exp(s z - s²/2), s² = ln(1 + c²)     z normal (Johnson, Kotz & Balakrishnan 1994, chapter 14)

numpy promises the same bits of a bit generator for ever, but not the same variates from one version to the next (NEP
19), and its exp and log differ in the last bit between processors. So uniform numbers are made of raw bits, and all
else of additions, multiplications, divisions and square roots, which IEEE 754 rounds alike everywhere.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdpsim.numeric.columns import Floats, Ints, Times

FOREVER = 2**61  # in slots; twice that is still a number of 64 bits


def never(kind: np.dtype[Any]) -> Any:
    """Return a time later than all others, in numbers of that type."""
    return kind.type(FOREVER if kind.kind == "i" else np.inf)


@dataclass(frozen=True, eq=False)
class Calendar:
    """The stops of each device, a row for each: from `at` until `until`, in order and apart; unused places at the end.

    The last row is that of nodes that no stop concerns.
    """

    row: Ints  # of each node
    at: Times
    until: Times

    @property
    def never(self) -> Any:
        """A time later than all others."""
        return never(self.at.dtype)

    def worked(self, nodes: Any, ready: Times, duration: Times) -> tuple[Times, Times]:
        """Return when nodes that are ready then start and end; times may have a column for each of several runs."""
        row = self.row[nodes]
        where = row if ready.ndim == 1 else row[:, None]
        start, now, left = ready, ready, duration
        with np.errstate(invalid="ignore"):  # from one time that never comes to another
            for k in range(self.at.shape[1]):
                at, until = self.at[where, k], self.until[where, k]
                waits = (at <= now) & (now < until)
                start = np.where(waits, until, start)
                pauses = (now < at) & (now + left > at)
                left = np.where(pauses, np.maximum(left - (at - now), 0), left)
                now = np.where(waits | pauses, until, now)
            return start, np.minimum(now + left, self.never)

    def pauses(self, nodes: Ints, start: Times, end: Times) -> tuple[Times, Times]:
        """Return from when until when devices stood still while nodes were under way on them."""
        row = self.row[nodes]
        begin, until = np.maximum(self.at[row], start[:, None]), np.minimum(self.until[row], end[:, None])
        paused = begin < until
        return begin[paused], until[paused]


def merge_stops(stops: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the stops (at, until) of one device in order, joined where they touch, without empty ones."""
    result: list[tuple[Any, Any]] = []
    for at, until in sorted(stops):
        if at == until:
            continue
        if result and at <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], until))
        else:
            result.append((at, until))
    return result


_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10  # the first has trailing zeros
_EXP_TERMS = [1.0]
for _k in range(1, 15):
    _EXP_TERMS.append(_EXP_TERMS[-1] / _k)


# Wichura 1988, algorithm AS 241 (Applied Statistics 37(3), pages 477-484), PPND16: relative error about 1e-16.
def _coefficients(*polynomials: str) -> list[list[float]]:
    return [[float(number) for number in text.split()] for text in polynomials]


_CENTRE = _coefficients(
    "2509.0809287301226727 33430.575583588128105 67265.770927008700853 45921.953931549871457 "
    "13731.693765509461125 1971.5909503065514427 133.14166789178437745 3.387132872796366608",
    "5226.495278852854561 28729.085735721942674 39307.89580009271061 21213.794301586595867 "
    "5394.1960214247511077 687.1870074920579083 42.313330701600911252 1.0",
)
_NEAR = _coefficients(
    "7.7454501427834140764e-4 0.0227238449892691845833 0.24178072517745061177 1.27045825245236838258 "
    "3.64784832476320460504 5.7694972214606914055 4.6303378461565452959 1.42343711074968357734",
    "1.05075007164441684324e-9 5.475938084995344946e-4 0.0151986665636164571966 0.14810397642748007459 "
    "0.68976733498510000455 1.6763848301838038494 2.05319162663775882187 1.0",
)
_FAR = _coefficients(
    "2.01033439929228813265e-7 2.71155556874348757815e-5 0.0012426609473880784386 0.026532189526576123093 "
    "0.29656057182850489123 1.7848265399172913358 5.4637849111641143699 6.6579046435011037772",
    "2.04426310338993978564e-15 1.4215117583164458887e-7 1.8463183175100546818e-5 7.868691311456132591e-4 "
    "0.0148753612908506148525 0.13692988092273580531 0.59983220655588793769 1.0",
)


def uniforms(seed: int, run: int, stream: int, count: int, *part: int) -> Floats:
    """Draw numbers between 0 and 1, neither of them included; runs, streams and their parts are independent."""
    sequence = np.random.SeedSequence(seed, spawn_key=(run, stream, *part))
    bits = np.random.PCG64(sequence).random_raw(count)
    return np.asarray((bits >> np.uint64(12)) + 0.5) * 2.0**-52


def exp(x: Floats) -> Floats:
    """Return the exponential of moderate numbers: a power of two, and a Taylor polynomial for less than ln(2)/2."""
    power = np.rint(x / _LN2_HIGH)
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    power_of_two: Floats = np.ldexp(_horner(_EXP_TERMS[::-1], rest), power.astype(np.int32))
    return power_of_two


def log(x: Floats) -> Floats:
    """Return the logarithm of positive numbers: ln((1 + f) / (1 - f)) = 2 (f + f³/3 + f⁵/5 + ...), for |f| < 0.172."""
    part, power = np.frexp(x)
    small = part < np.sqrt(0.5)
    part, power = np.where(small, 2 * part, part), power - small
    f = (part - 1) / (part + 1)
    series = f * _horner([2 / (2 * k + 1) for k in range(12, -1, -1)], f * f)
    result: Floats = power * _LN2_HIGH + (series + power * _LN2_LOW)
    return result


def normal(u: Floats) -> Floats:
    """Return the quantiles of the standard normal distribution at u."""
    q = u - 0.5
    result = q * _ratio(_CENTRE, 0.180625 - q * q)
    tail = np.flatnonzero(np.abs(q) > 0.425)
    r = np.sqrt(-log(np.minimum(u[tail], 1 - u[tail])))
    far = r > 5
    size = np.where(far, _ratio(_FAR, r - 5), _ratio(_NEAR, r - 1.6))
    result[tail] = np.where(q[tail] < 0, -size, size)
    return result


def _horner(terms: list[float], x: Floats) -> Floats:
    """Return a polynomial of x, given its highest term first."""
    value = np.full_like(x, terms[0])
    for term in terms[1:]:
        value *= x
        value += term
    return value


def _ratio(polynomials: list[list[float]], x: Floats) -> Floats:
    above, below = polynomials
    return _horner(above, x) / _horner(below, x)


def _uniform(u: Floats, variation: float) -> Floats:
    width = min(float(np.sqrt(3.0)) * variation, 1.0)
    return 1 + width * (2 * u - 1)


def _exponential(u: Floats, variation: float) -> Floats:
    result: Floats = (1 - variation) - variation * log(1 - u)
    return result


def _lognormal(u: Floats, variation: float) -> Floats:
    square = log(np.array([1 + variation * variation]))
    return exp(np.sqrt(square) * normal(u) - square / 2)


# Of each distribution: its quantile function for a coefficient of variation, and the largest of these.
DISTRIBUTIONS: dict[str, tuple[Callable[[Floats, float], Floats], float]] = {
    "uniform": (_uniform, 0.577),
    "exponential": (_exponential, 1.0),
    "lognormal": (_lognormal, 10.0),
}

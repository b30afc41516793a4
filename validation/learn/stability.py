"""Stability by lags: the largest rate at which gradient descent on a quadratic of curvature 1 does not grow.

Of such a quadratic, everything that a period of versions makes is linear in what the period starts from: parameters and
velocity (the momentum of an optimizer state) of some versions, and gradients that no version has taken yet. The matrix
of that map is the companion matrix of the recurrence where each step makes the next version. A training does not grow
if the matrix has no eigenvalue above 1 in modulus. Weight decay, and lags of backwards, are not in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.schedules.rule import Versions
from cdpsim.trace.metrics.memory import Lags

_EXACT = 1e-9  # how close, relatively, both ends of a theoretical limit are
_RATES = 512  # of a grid
_WIDEST = 4  # grids until one has a limit


@dataclass(frozen=True)
class Recurrence:
    """Updates of one direction whose curvature is 1, by the lags at which its gradients are taken.

    Each version is made a step after the one before it, or in the same step (`steps`), starts from the version so far
    back (`back`), and takes the mean of so many steps' gradients (`sums`): columns over a period of versions.
    """

    lags: Ints
    steps: tuple[int, ...] = (1,)
    back: tuple[int, ...] = (1,)
    sums: tuple[int, ...] = (1,)
    momentum: float = 0.0
    nesterov: bool = False

    def growth(self, rates: Floats) -> Floats:
        """Return for each rate by how much a period multiplies what grows most."""
        radii: Floats = np.abs(np.linalg.eigvals(self.period_matrix(rates))).max(axis=-1)
        return radii

    def period_matrix(self, rates: Floats) -> Floats:
        """Return for each rate the matrix that maps the state at a period's start to that at its end.

        A state has the parameters of some versions, their velocities, and the gradients that are not taken yet.

        >>> Recurrence(np.array([0])).period_matrix(np.array([0.5]))[0].tolist()
        [[0.5, 0.0], [1.0, 0.0]]
        """
        versions, untaken = max(int(self.lags.max()) + 1, *self.back), max(self.sums) - 1
        size = 2 * versions + untaken
        rows = [np.tile(np.eye(size)[k], (len(rates), 1)) for k in range(size)]  # in terms of the state at the start
        theta, velocity, gradients = rows[:versions], rows[versions : 2 * versions], rows[2 * versions :]
        for steps, back, sums in zip(self.steps, self.back, self.sums, strict=True):
            if steps:
                gradients.append(_mean_row([theta[-1 - lag] for lag in self.lags.tolist()]))
            gradient = _mean_row(gradients[-sums:])
            velocity.append(self.momentum * velocity[-back] + gradient)
            moved = gradient + self.momentum * velocity[-1] if self.nesterov else velocity[-1]
            theta.append(theta[-back] - rates[:, None] * moved)
        return np.stack(theta[-versions:] + velocity[-versions:] + gradients[len(gradients) - untaken :], axis=1)


def limit_of(
    lags: Lags,
    versions: Versions = Versions(),  # noqa: B008 - it is frozen
    momentum: float = 0.0,
    *,
    nesterov: bool = False,
    shared: bool,
) -> float:
    """Return the rate times the curvature up to which a training does not grow.

    Either each stage has a curvature of its own, and the least limit of a stage counts; or there is one direction,
    which all stages share. Beyond the limit there may be larger rates at which it does not grow.

    >>> late = np.array([[1, 0], [0, 0]])
    >>> [round(limit_of(Lags(late, late), shared=shared), 6) for shared in (False, True)]
    [2.0, 4.0]
    """
    rows = lags.forward.reshape(1, -1) if shared else np.unique(np.sort(lags.forward.T, axis=1), axis=0)
    period = {name: tuple(column) for name, column in versions.record().items()}
    steps = period.pop("steps", (1,) * len(period.get("back", (1,))))
    return min(_first_exit(Recurrence(row, steps, **period, momentum=momentum, nesterov=nesterov)) for row in rows)


def _first_exit(recurrence: Recurrence) -> float:
    return first_failing(lambda rates: recurrence.growth(rates) <= 1, (1e-3, 8.0), _RATES, _EXACT)[0]


def _mean_row(rows: Sequence[Floats]) -> Floats:
    mean: Floats = np.mean(rows, axis=0)
    return mean


def first_failing(
    passes: Callable[[Floats], Flags], ends: tuple[float, float], count: int, tolerance: float
) -> tuple[float, float]:
    """Return neighbouring rates, the first that fails behind one that passes, no further apart than a tolerance.

    `passes` is asked for some rates at once: for a geometric grid between the ends, which moves until its first rate
    passes and another one fails, and then for finer and finer grids between the first that fails and the one before it.

    >>> first_failing(lambda rates: rates < 5, (1, 4), 3, 0.01)
    (4.9944..., 5.0079...)
    """
    rates = np.geomspace(*ends, count)
    for _ in range(_WIDEST):
        failing = np.flatnonzero(~passes(rates))
        if len(failing) and failing[0]:
            break
        rates = rates * (ends[0] / ends[1] if len(failing) else ends[1] / ends[0])
    else:
        problem = f"{_WIDEST} grids of rates, at first from {ends[0]:.3g} to {ends[1]:.3g}, have no limit"
        raise RequestError("lr", f"{problem}: {'none' if len(failing) else 'all'} of them will do; give more epochs")
    lower, upper = rates[failing[0] - 1 : failing[0] + 1].tolist()
    while upper > lower * (1 + tolerance):
        rates = np.geomspace(lower, upper, count + 2)
        failing = np.flatnonzero(~passes(rates[1:-1]))
        first = int(failing[0]) if len(failing) else count
        lower, upper = rates[first : first + 2].tolist()
    return lower, upper

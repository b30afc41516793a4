"""Limits of the rate: the largest at which trainings by a schedule's lags end below their start, beside the theory.

The theory is that of a quadratic whose curvature is the sharpness of the loss where trainings start. Either each
direction of the parameters lies in one stage, or all stages share the sharpest one; in a network it is something
between these. Everything that a period of versions makes is linear in what it starts from: parameters and velocity (the
momentum of an optimizer state) of some versions, and gradients that no version has taken yet. The matrix of that map is
the companion matrix of the recurrence where each step makes the next version. A training does not grow if it has no
eigenvalue above 1 in modulus. Weight decay, and lags of backwards, are not in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Flags, Floats, Ints
from cdpsim.schedules.rule import Versions
from cdpsim.trace.metrics.memory import Lags

from ..training.forms import flatten
from ..training.passes import one_thread
from ..training.stages import pieces
from .data import Data, batches
from .lags import Learner
from .training import Course, starting_stages, train_all, typed
from .updates import Update

BELOW = 0.8  # the share of seeds that must end below their start
_WITH_THEORY = ("sgd", "momentum", "nesterov")
_AROUND = 4.0  # the first rates tried go from the least limit by the theory over this to the largest one times this
MOST_LABELS = 1024  # drawn, always the same, of data that have more: a sequence has one at each place
_SETTLED, _MOST_PRODUCTS = 1e-4, 200


class Limit(msgspec.Struct, frozen=True):
    """The largest rate of a schedule, and that of both theories; ratios are to the first schedule's."""

    schedule: str
    lag: float
    lower: float  # the largest rate tried at which enough seeds end below their start, as at all lower ones tried
    upper: float  # the next one tried
    own: float  # by the theory, if each stage has a curvature of its own
    shared: float  # by the theory, if all stages share one direction
    ratio: float
    own_ratio: float
    shared_ratio: float
    sharpness: float  # the mean over seeds
    spread: float  # their standard deviation


class FoundLimits(msgspec.Struct, frozen=True):
    """All that `learn --limits` has found."""

    request: dict[str, object]
    environment: dict[str, object]
    data: str
    limits: list[Limit]


def find_limits(
    learners: Sequence[Learner],
    course: Course,
    data: Data,
    micro_batches: int,
    done: Callable[[int], object] = int,
    *,
    count: int = 8,
    tolerance: float = 0.01,
) -> list[Limit]:
    """Return the limit of each schedule, to a relative tolerance; `count` rates are trained at once.

    The rates of the course do not matter. Weight decay and drops are part of the trainings, and not of the theory.
    """
    numbers = [theoretical_limits(learner, course.update) for learner in learners]
    with one_thread():
        sharpness, starts = sharpness_of(course, data), _starting_losses(course, data)
    limits: list[Limit] = []
    for learner, number in zip(learners, numbers, strict=True):

        def are_below(rates: Floats, learner: Learner = learner) -> Flags:
            """Return for each rate whether enough seeds end below their start."""
            curves = train_all([learner], replace(course, rates=tuple(rates.tolist())), data, micro_batches)
            ends = np.array([None if curve.diverged else curve.loss[-1] for curve in curves], dtype=float)
            below: Flags = (ends.reshape(len(rates), -1) < starts).mean(axis=1) >= BELOW
            return below

        theory = [each / float(sharpness.mean()) for each in number]
        bracket = first_failing(are_below, (min(theory) / _AROUND, max(theory) * _AROUND), count, tolerance)
        limits.append(_beside_first(learner, bracket, theory, sharpness, limits))
        done(1)
    return limits


def theoretical_limits(learner: Learner, update: Update) -> tuple[float, float]:
    """Return the limit of the rate times the curvature: of each stage by itself, and of one direction of all stages."""
    if update.kind not in _WITH_THEORY:
        known = f"{', '.join(_WITH_THEORY[:-1])} or {_WITH_THEORY[-1]}"
        raise RequestError("optimizer", f"{update.kind} has no limit on a quadratic to compare with; take {known}")
    if learner.workers > 1:
        raise RequestError(learner.name, "has local steps, whose limit on a quadratic is not known; leave it out")
    momentum, nesterov = 0.0 if update.kind == "sgd" else update.momentum, update.kind == "nesterov"
    own, shared = (
        limit_of(learner.lags, learner.versions, momentum, nesterov=nesterov, shared=shared) for shared in (False, True)
    )
    return own, shared


def sharpness_of(course: Course, data: Data) -> Floats:
    """Return the sharpness of the mean loss of at most 1,024 labels, where the training of each seed starts."""
    of_sample = data.train.take(torch.zeros(1, dtype=torch.int64))[1].numel()
    drawn = torch.tensor(np.random.default_rng(0).permutation(data.samples)[: max(MOST_LABELS // of_sample, 1)])
    inputs, labels = typed(data.train.take(drawn), course)
    models = starting_models(course, data)
    products, start = hessian_products(models, lambda scores: data.loss(scores, labels), inputs)
    return np.array(largest_eigenvalues(products, start).tolist())


def starting_models(course: Course, data: Data) -> list[nn.Sequential]:
    """Return the network of each seed before it is trained."""
    return [nn.Sequential(*stages) for stages in starting_stages(course, data, range(course.seeds))]


def hessian_products(
    models: Sequence[nn.Module], loss: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return the map of vectors, a row for each model, to their products with the Hessians; and vectors to start with.

    Models differ in their parameters alone.
    """
    thetas = torch.stack([flatten(model.parameters()) for model in models])

    def loss_at(theta: Tensor) -> Tensor:
        return loss(functional_call(models[0], pieces(models[0], theta), (x,)))

    def product(theta: Tensor, vector: Tensor) -> Tensor:
        moved: Tensor
        (moved,) = vjp(grad(loss_at), theta)[1](vector)  # a Hessian is symmetric
        return moved

    drawn = torch.randn(thetas.shape, generator=torch.Generator().manual_seed(0), dtype=thetas.dtype)
    return lambda vectors: vmap(product)(thetas, vectors), drawn.to(thetas.device)


def largest_eigenvalues(product: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return the largest eigenvalue of each of some symmetric matrices, which map rows of vectors.

    A power iteration finds the eigenvalue of the largest modulus. Where that is negative, the modulus is added to all
    eigenvalues, so that none is, and the iteration starts again.
    """
    values, moduli = _iterate(product, start, start.new_zeros(len(start)))
    shift = moduli - values
    return values if bool((shift <= _SETTLED * moduli).all()) else _iterate(product, start, shift)[0]


def _iterate(product: Callable[[Tensor], Tensor], vectors: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return each matrix's settled Rayleigh quotient, and the length of its product with a unit vector.

    A multiple of the vector is added to each product.
    """
    values = vectors.new_zeros(len(vectors))
    for _ in range(_MOST_PRODUCTS):
        vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)
        moved, before = product(vectors), values
        values, moduli = (vectors * moved).sum(dim=1), moved.norm(dim=1)
        if bool(((values - before).abs() <= _SETTLED * moduli).all()):
            break
        vectors = moved + shift[:, None] * vectors
    return values, moduli


def _starting_losses(course: Course, data: Data) -> Floats:
    losses = []
    for seed, model in enumerate(starting_models(course, data)):
        x, y = typed(data.train.take(next(batches(data, seed, 0, course.batch)), (seed, 0)), course)
        with torch.no_grad():
            losses.append(data.loss(model(x), y).item())
    return np.array(losses)


def _beside_first(
    learner: Learner, bracket: tuple[float, float], theory: Sequence[float], sharpness: Floats, before: Sequence[Limit]
) -> Limit:
    """Return the limit of a schedule, with its ratios to the first limit before it."""
    own, shared = theory
    rates = (bracket[0], own, shared)
    first = (before[0].lower, before[0].own, before[0].shared) if before else rates
    ratio, own_ratio, shared_ratio = (rate / other for rate, other in zip(rates, first, strict=True))
    of_loss = float(sharpness.mean()), float(sharpness.std())
    return Limit(learner.name, learner.mean, *bracket, own, shared, ratio, own_ratio, shared_ratio, *of_loss)


LIMITS_HEADER = (
    *("schedule", "lag", "largest rate", "theory, own", "theory, shared"),
    *("to the first", "theory, own", "theory, shared", "sharpness"),
)


def limit_row(limit: Limit) -> tuple[str, ...]:
    """Return the cells of a limit, for people."""
    rates = (limit.lower, limit.own, limit.shared)
    ratios = (limit.ratio, limit.own_ratio, limit.shared_ratio)
    return (
        limit.schedule,
        *(f"{value:.4g}" for value in (limit.lag, *rates)),
        *(f"{value:.3f}" for value in ratios),
        f"{limit.sharpness:.3g} ± {limit.spread:.2g}",
    )


# The theory

_EXACT = 1e-9  # how close, relatively, both ends of a theoretical limit are
_RATES, _FIRST_ENDS = 512, (1e-3, 8.0)  # of a grid
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

    def is_stable(self, rates: Floats) -> Flags:
        """Return for each rate whether nothing grows."""
        return self.growth(rates) <= 1

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
    of_rows = (Recurrence(row, steps, **period, momentum=momentum, nesterov=nesterov) for row in rows)
    return min(first_failing(of.is_stable, _FIRST_ENDS, _RATES, _EXACT)[0] for of in of_rows)


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

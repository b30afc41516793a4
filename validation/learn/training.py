"""Trainings of schedules, all runs of one at once: the same starts, the same data in the same order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor
from torch.func import vmap

from cdpsim.errors import RequestError

from ..training.passes import one_thread
from .data import Data, batches
from .lags import Learner
from .networks import Sizes, make_stages, right
from .results import TENTH, LearningCurve
from .stacked import Stack, is_finite
from .updates import Update


@dataclass(frozen=True)
class Course:
    """How every run is trained."""

    network: str
    sizes: Sizes
    stages: int
    update: Update = field(default_factory=Update)
    rates: tuple[float, ...] = (0.05,)
    seeds: int = 10
    epochs: int = 20
    batch: int = 64
    drops: tuple[float, ...] = ()  # the shares of a training after which rates are lower
    drop_by: float = 0.2
    dtype: torch.dtype = torch.float32
    one_by_one: bool = False

    def rate(self, done: float) -> float:
        """Return by how much rates are multiplied when a share of the training is done."""
        return self.drop_by ** sum(done >= drop for drop in self.drops)


def check_course(course: Course, learners: Sequence[Learner], data: Data) -> int:
    """Return the micro-batches of a batch; refuse a batch that these do not divide, or of which there is none."""
    most = max(learner.micro_batches for learner in learners)
    for learner in learners:
        if most % learner.micro_batches:
            problem = f"has {learner.micro_batches} micro-batches, which do not divide the {most} of another schedule"
            raise RequestError(learner.name, f"{problem}; give an -m that fits both")
    if course.batch % most:
        least = course.batch // most * most
        near = f"{least} or {least + most}" if least else most
        raise RequestError("batch", f"{course.batch} samples are not divided by {most} micro-batches; give {near}")
    if course.batch > data.samples:
        raise RequestError("batch", f"{data.name} has {data.samples} samples to learn from; give a smaller one")
    return most


def train_all(
    learner: Learner, course: Course, data: Data, micro_batches: int, done: Callable[[int], object] = int
) -> list[LearningCurve]:
    """Train all runs of a schedule: every seed with every rate, in batches of so many micro-batches."""
    with one_thread():
        return [*_Trained(learner, course, data, micro_batches).curves(done)]


class _Trained:
    """All runs of a schedule; those of one rate come one after another, by their seeds."""

    def __init__(self, learner: Learner, course: Course, data: Data, micro_batches: int) -> None:
        self._learner, self._course, self._data = learner, course, data
        self._steps = micro_batches // learner.micro_batches  # of a batch
        forward, backward = learner.lags
        twice = bool((forward != backward).any())
        starts = [
            make_stages(course.network, data, course.sizes, course.stages, seed, course.dtype, twice=twice)
            for seed in range(course.seeds)
        ]
        self._runs = [(rate, seed) for rate in course.rates for seed in range(course.seeds)]
        self._stack = Stack(
            [starts[seed] for _, seed in self._runs],
            learner.lags,
            course.update,
            data.loss,
            one_by_one=course.one_by_one,
        )
        self._rates = torch.tensor([rate for rate, _ in self._runs], dtype=course.dtype)

    def curves(self, done: Callable[[int], object]) -> Iterator[LearningCurve]:
        """Train, and yield each run's curve."""
        course, per_epoch = self._course, self._data.samples // self._course.batch
        losses: list[Tensor] = []
        tests: list[tuple[Tensor, Tensor]] = []
        for epoch in range(course.epochs):
            rows = zip(*(batches(self._data, seed, epoch, course.batch) for seed in range(course.seeds)), strict=True)
            for numbers in rows:
                factor = course.rate(len(losses) / (course.epochs * per_epoch))
                losses.append(self._step(numbers, epoch, factor * self._rates))
            tests.append(self._test())
            done(1)
        loss = torch.stack(losses).to(torch.float64)
        low, high = (int(share * len(loss)) for share in TENTH)
        finite = is_finite(self._stack.newest) & loss[-1].isfinite()
        for r, (rate, seed) in enumerate(self._runs):
            means = loss[:, r].reshape(course.epochs, per_epoch).mean(dim=1)
            yield LearningCurve(
                schedule=self._learner.name,
                rate=rate,
                seed=seed,
                loss=_or_none(means),
                test_loss=_or_none(torch.stack([test[r] for test, _ in tests])),
                accuracy=[float(accuracy[r]) for _, accuracy in tests],
                loss_at_a_tenth=_or_none(loss[low : max(high, low + 1), r].mean()[None])[0],
                diverged=not bool(finite[r]),
            )

    def _step(self, numbers: Sequence[Tensor], epoch: int, rates: Tensor) -> Tensor:
        """Let all runs learn from a batch, of which each seed has its own; return their losses.

        A schedule with fewer micro-batches in a step makes more steps of it.
        """
        m = self._learner.micro_batches
        taken = [self._data.train.take(own, (seed, epoch)) for seed, own in enumerate(numbers)]
        x, y = (self._for_runs(torch.stack(own)) for own in zip(*taken, strict=True))
        x, y = (values.unflatten(1, (self._steps, m, -1)) for values in (x, y))
        losses = [self._stack.step(x[:, part], y[:, part], rates) for part in range(self._steps)]
        return torch.stack(losses).mean(dim=0)

    def _for_runs(self, of_seeds: Tensor) -> Tensor:
        """Return the data of each run, in the type of its parameters."""
        values = of_seeds.to(self._course.dtype) if of_seeds.is_floating_point() else of_seeds
        return values.repeat(len(self._course.rates), *[1] * (values.dim() - 1))

    def _test(self) -> tuple[Tensor, Tensor]:
        """Return each run's loss and accuracy in the test."""
        x, y = self._data.test.take(torch.arange(len(self._data.test)))
        x = x.to(self._course.dtype) if x.is_floating_point() else x
        with torch.no_grad():
            scores = vmap(lambda parameters: self._stack.scores(parameters, x))(self._stack.newest)
        hits, of = zip(*(right(own, y) for own in scores), strict=True)
        return torch.stack([self._data.loss(own, y) for own in scores]).to(torch.float64), torch.stack(
            hits
        ) / torch.stack(of)


def _or_none(values: Tensor) -> list[float | None]:
    return [value if isfinite(value) else None for value in values.tolist()]

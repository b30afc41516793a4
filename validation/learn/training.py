"""Trainings of schedules, many runs of one at once: the same starts, the same data in the same order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vmap

from cdpsim.errors import RequestError

from ..training.passes import one_thread
from .data import Data, batches
from .lags import Learner
from .layers import Statistics, collecting, using
from .networks import Sizes, make_stages, right
from .results import TENTH, LearningCurve
from .stacked import RowParameters, Stack, is_finite, step_together
from .unfinished import Unfinished
from .updates import Update

_TESTED_AT_ONCE = 512  # samples, or those of a batch if these are more


@dataclass(frozen=True)
class Course:
    """How every run is trained."""

    network: str
    sizes: Sizes
    stages: int
    cut: str = "layers"
    batch_norm: bool = False
    update: Update = field(default_factory=Update)
    rates: tuple[float, ...] = (0.05,)
    seeds: int = 10
    epochs: int = 20
    batch: int = 64
    drops: tuple[float, ...] = ()  # the shares of a training after which rates are lower
    drop_by: float = 0.2
    warm_up: int = 0  # batches over which rates rise from nothing
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    one_by_one: bool = False
    most_bytes: int = 4 * 2**30  # of all runs that are trained at once

    def rate(self, batch: int, of: int) -> float:
        """Return by how much rates are multiplied for a batch of all."""
        return self.drop_by ** sum(batch / of >= drop for drop in self.drops) * min(1, (batch + 1) / (self.warm_up + 1))


def check_course(course: Course, learners: Sequence[Learner], data: Data) -> int:
    """Return the micro-batches of a batch; refuse a batch that they do not divide, or that the data do not fill."""
    most = max(learner.micro_batches for learner in learners)
    for learner in learners:
        if most % learner.micro_batches:
            problem = f"has {learner.micro_batches} micro-batches, which do not divide the {most} of another schedule"
            raise RequestError(learner.name, f"{problem}; give an -m that fits both")
    parts = lcm(*(most * learner.steps_per_update for learner in learners))
    if course.batch % parts:
        least = course.batch // parts * parts
        near = f"{least} or {least + parts}" if least else parts
        raise RequestError("batch", f"{course.batch} samples are not divided by {parts} micro-batches; give {near}")
    if course.batch > data.samples:
        raise RequestError("batch", f"{data.name} has {data.samples} samples to learn from; give a smaller one")
    all_batches = course.epochs * (data.samples // course.batch)
    if course.warm_up >= all_batches:
        problem = f"{course.warm_up} batches are all of a training, which has {all_batches}; give fewer"
        raise RequestError("warm-up", problem)
    return most


def train_all(
    learners: Sequence[Learner],
    course: Course,
    data: Data,
    micro_batches: int,
    done: Callable[[int], object] = int,
    unfinished: Unfinished | None = None,
) -> list[LearningCurve]:
    """Train every seed with every rate of every schedule.

    The course's bytes limit the runs that are trained at once. `done` is called with the runs that have seen an epoch.
    """
    with one_thread():
        runs = [(rate, seed) for rate in course.rates for seed in range(course.seeds)]
        each = [_bytes_of_run(learner, course, data, micro_batches) for learner in learners]
        at_once = max(course.most_bytes // sum(each), 1)
        blocks = [runs[first : first + at_once] for first in range(0, len(runs), at_once)]
        found = [
            Trained(learners, course, data, micro_batches, block).curves(done, unfinished, str(k))
            for k, block in enumerate(blocks)
        ]
    return [curve for k in range(len(learners)) for block in found for curve in block[k]]


def _steps_of(learner: Learner, micro_batches: int) -> int:
    return micro_batches // learner.micro_batches * learner.steps_per_update


def _bytes_of_run(learner: Learner, course: Course, data: Data, micro_batches: int) -> int:
    """Return about how many bytes a run takes: versions, states, gradients, and what autograd keeps of one step."""
    stages, kept = starting_stages(course, data, [0], twice=learner.goes_back_otherwise)[0], [0]

    def count(tensor: Tensor) -> Tensor:
        kept[0] += tensor.numel() * tensor.element_size()
        return tensor

    x, y = typed(data.train.take(torch.zeros(1, dtype=torch.int64)), course)
    with saved_tensors_hooks(count, lambda tensor: tensor):
        data.loss(nn.Sequential(*stages)(x), y)
    parameters = sum(own.numel() * own.element_size() for stage in stages for own in stage.parameters())
    copies = int(learner.lags.forward.max()) + course.update.copies + 5
    return parameters * copies * learner.workers + kept[0] * (course.batch // _steps_of(learner, micro_batches))


class Trained:
    """Some runs of all schedules, trained at once."""

    def __init__(
        self,
        learners: Sequence[Learner],
        course: Course,
        data: Data,
        micro_batches: int,
        runs: Sequence[tuple[float, int]],
    ) -> None:
        self._learners, self._course, self._data, self._runs = learners, course, data, runs
        self._steps = [_steps_of(learner, micro_batches) for learner in learners]
        self._seeds = [*dict.fromkeys(seed for _, seed in runs)]
        self._places = torch.tensor([self._seeds.index(seed) for _, seed in runs])  # of each run's seed
        self._per_epoch = data.samples // course.batch
        self.stacks = [self._stack(*own) for own in zip(learners, self._steps, strict=True)]
        self._rates = torch.tensor([rate for rate, _ in runs], dtype=course.dtype, device=course.device)
        self._losses: list[Tensor] = []  # of each batch: of each schedule and run
        self._tests: list[Tensor] = []  # of each epoch: losses and accuracies of each schedule's runs

    def _stack(self, learner: Learner, steps: int) -> Stack:
        course = self._course
        stages = starting_stages(course, self._data, self._seeds, twice=learner.goes_back_otherwise)
        starts = [stages[place] for place in self._places.tolist()]
        all_steps = course.epochs * self._per_epoch * steps
        return Stack(starts, learner, course.update, all_steps, self._data.loss, one_by_one=course.one_by_one)

    def curves(
        self, done: Callable[[int], object], unfinished: Unfinished | None, name: str
    ) -> list[list[LearningCurve]]:
        """Train from where an unfinished training has been, and return the curves of each schedule's runs."""
        if unfinished and (state := unfinished.load(name)):
            try:
                self._losses, self._tests = [*state["losses"]], [*state["tests"]]
                for stack, own in zip(self.stacks, state["stacks"], strict=True):
                    stack.go_on_from(own, self._course.device)
            except (LookupError, TypeError, ValueError) as error:
                raise unfinished.is_none(name, error) from None
        runs = len(self._runs) * len(self._learners)
        done(runs * len(self._tests))
        for epoch in range(len(self._tests), self._course.epochs):
            self._train(epoch)
            self._tests.append(
                torch.stack([self._test(*own) for own in zip(self.stacks, self._learners, self._steps, strict=True)])
            )
            if unfinished:
                told = {"losses": torch.stack(self._losses), "tests": torch.stack(self._tests)}
                unfinished.save(name, told | {"stacks": [stack.state for stack in self.stacks]})
            done(runs)
        return [[*self._found(k)] for k in range(len(self._learners))]

    def _train(self, epoch: int) -> None:
        course = self._course
        rows = zip(*(batches(self._data, seed, epoch, course.batch) for seed in self._seeds), strict=True)
        for numbers in rows:
            factor = course.rate(len(self._losses), course.epochs * self._per_epoch)
            self._losses.append(self._step(numbers, epoch, factor * self._rates).cpu())

    def _found(self, k: int) -> Iterator[LearningCurve]:
        loss, tests = torch.stack(self._losses)[:, k].to(torch.float64), torch.stack(self._tests)[:, k]
        low, high = (int(share * len(loss)) for share in TENTH)
        finite = is_finite(self.stacks[k].kept).cpu() & loss[-1].isfinite()
        for r, (rate, seed) in enumerate(self._runs):
            yield LearningCurve(
                schedule=self._learners[k].name,
                rate=rate,
                seed=seed,
                loss=_or_none(loss[:, r].reshape(self._course.epochs, -1).mean(dim=1)),
                test_loss=_or_none(tests[:, 0, r]),
                accuracy=tests[:, 1, r].tolist(),
                loss_at_a_tenth=_or_none(loss[low : max(high, low + 1), r].mean()[None])[0],
                diverged=not bool(finite[r]),
            )

    def _step(self, numbers: Sequence[Tensor], epoch: int, rates: Tensor) -> Tensor:
        taken = [self._data.train.take(own, (seed, epoch)) for seed, own in zip(self._seeds, numbers, strict=True)]
        pair = typed(tuple(torch.stack(own) for own in zip(*taken, strict=True)), self._course)
        x, y = (own[self._places] for own in pair)
        losses: list[list[Tensor]] = [[] for _ in self._learners]
        for steps in dict.fromkeys(self._steps):
            places = [k for k, own in enumerate(self._steps) if own == steps]
            stacks = [self.stacks[k] for k in places]
            for inputs, labels in zip(x.chunk(steps, dim=1), y.chunk(steps, dim=1), strict=True):
                for k, loss in zip(places, step_together(stacks, inputs, labels, rates), strict=True):
                    losses[k].append(loss)
        return torch.stack([torch.stack(own).mean(dim=0) for own in losses])

    def _test(self, stack: Stack, learner: Learner, steps: int) -> Tensor:
        kept, totals = stack.kept, torch.zeros(3, len(self._runs), dtype=torch.float64)
        size = self._course.batch // steps // learner.micro_batches
        statistics = self._statistics(stack, size) if self._course.batch_norm else []
        for numbers in torch.arange(len(self._data.test)).split(max(self._course.batch, _TESTED_AT_ONCE)):
            x, y = typed(self._data.test.take(numbers), self._course)
            for r, own in enumerate(_scores(stack, kept, x, statistics)):
                hits, of = right(own, y)
                totals[:, r] += torch.stack([self._data.loss(own, y) * of, hits, of]).to("cpu", torch.float64)
        return totals[:2] / totals[2]

    def _statistics(self, stack: Stack, size: int) -> Statistics:
        """Return the statistics of each run's batch norms: means over parts of all samples to learn from."""

        def collect(parameters: RowParameters, x: Tensor) -> Statistics:
            with collecting() as found:
                stack.scores(parameters, x)
            return found

        found = []
        for numbers in torch.arange(self._data.samples // size * size).split(size):
            x, _ = typed(self._data.train.take(numbers), self._course)
            with torch.no_grad():
                found.append(vmap(collect, in_dims=(0, None))(stack.kept, x))
        pairs = (zip(*of_norm, strict=True) for of_norm in zip(*found, strict=True))
        return [(torch.stack(means).mean(dim=0), torch.stack(variances).mean(dim=0)) for means, variances in pairs]


def _scores(stack: Stack, kept: RowParameters, x: Tensor, statistics: Statistics) -> Tensor:
    """Return each run's scores of inputs; batch norms use statistics."""

    def scores(parameters: RowParameters, own: Statistics) -> Tensor:
        with using(own):
            return stack.scores(parameters, x)

    with torch.no_grad():
        return vmap(scores)(kept, statistics)


def starting_stages(
    course: Course, data: Data, seeds: Sequence[int], *, twice: bool = False
) -> list[list[nn.Sequential]]:
    """Return the first stages of each seed, on the device."""
    given: dict[str, Any] = {"dtype": course.dtype, "twice": twice, "cut": course.cut, "batch_norm": course.batch_norm}
    make = partial(make_stages, course.network, data, course.sizes, course.stages, **given)
    return [[stage.to(course.device) for stage in make(seed=seed)] for seed in seeds]


def typed(pair: tuple[Tensor, ...], course: Course) -> tuple[Tensor, Tensor]:
    """Return inputs and labels where parameters are, and inputs that are numbers in their type."""
    x, y = (own.to(course.device) for own in pair)
    return x.to(course.dtype) if x.is_floating_point() else x, y


def _or_none(values: Tensor) -> list[float | None]:
    return [value if isfinite(value) else None for value in values.tolist()]

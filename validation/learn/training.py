"""Trainings of schedules, many runs of one at once: the same starts, the same data in the same order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite, lcm

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vmap

from cdpsim.errors import RequestError

from ..training.passes import one_thread
from .convolutions import Statistics, collecting, using
from .data import Data, batches
from .lags import Learner
from .networks import Sizes, make_stages, right
from .results import TENTH, LearningCurve
from .stacked import RowParameters, Stack, is_finite
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
    """Return the micro-batches of a batch; refuse a batch that these do not divide, or of which there is none."""
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
        raise RequestError(
            "warm-up", f"{course.warm_up} batches are all of a training, which has {all_batches}; give fewer"
        )
    return most


def train_all(
    learner: Learner,
    course: Course,
    data: Data,
    micro_batches: int,
    done: Callable[[int], object] = int,
    unfinished: Unfinished | None = None,
) -> list[LearningCurve]:
    """Train all runs of a schedule: every seed with every rate, in batches of so many micro-batches.

    As many are trained at once as fit into the course's bytes. `done` is called with the runs that have seen an epoch.
    """
    steps = micro_batches // learner.micro_batches * learner.steps_per_update
    with one_thread():
        runs = [(rate, seed) for rate in course.rates for seed in range(course.seeds)]
        own, of_sample = _bytes_of_run(learner, course, data)
        at_once = max(course.most_bytes // (own + of_sample * (course.batch // steps)), 1)
        blocks = [runs[first : first + at_once] for first in range(0, len(runs), at_once)]
        return [
            curve
            for k, block in enumerate(blocks)
            for curve in Trained(learner, course, data, steps, block).curves(done, unfinished, f"{learner.name}-{k}")
        ]


def _bytes_of_run(learner: Learner, course: Course, data: Data) -> tuple[int, int]:
    """Return about how many bytes a run takes: versions, states and gradients; and what autograd keeps of a sample."""
    stages, kept = starting_stages(course, data, [0], twice=learner.goes_back_otherwise)[0], [0]

    def count(tensor: Tensor) -> Tensor:
        kept[0] += tensor.numel() * tensor.element_size()
        return tensor

    x, y = typed(data.train.take(torch.zeros(1, dtype=torch.int64)), course)
    with saved_tensors_hooks(count, lambda tensor: tensor):
        data.loss(nn.Sequential(*stages)(x), y)
    parameters = sum(own.numel() * own.element_size() for stage in stages for own in stage.parameters())
    copies = int(learner.lags.forward.max()) + course.update.copies + 5
    return parameters * copies * learner.workers, kept[0]


class Trained:
    """Some runs of a schedule, trained at once; a batch is so many of its steps."""

    def __init__(
        self, learner: Learner, course: Course, data: Data, steps: int, runs: Sequence[tuple[float, int]]
    ) -> None:
        self._learner, self._course, self._data, self._steps, self._runs = learner, course, data, steps, runs
        self._seeds = [*dict.fromkeys(seed for _, seed in runs)]
        self._places = torch.tensor([self._seeds.index(seed) for _, seed in runs])  # of each run's seed
        starts = dict(
            zip(self._seeds, starting_stages(course, data, self._seeds, twice=learner.goes_back_otherwise), strict=True)
        )
        self._per_epoch = data.samples // course.batch
        self._stack = Stack(
            [starts[seed] for _, seed in runs],
            learner,
            course.update,
            course.epochs * self._per_epoch * steps,
            data.loss,
            one_by_one=course.one_by_one,
        )
        self._rates = torch.tensor([rate for rate, _ in runs], dtype=course.dtype, device=course.device)
        self._losses: list[Tensor] = []  # of each batch and run
        self._tests: list[Tensor] = []  # of each epoch: losses and accuracies of runs

    def curves(
        self, done: Callable[[int], object], unfinished: Unfinished | None, name: str
    ) -> Iterator[LearningCurve]:
        """Train from where an unfinished training has been, and yield each run's curve."""
        if unfinished and (state := unfinished.load(name)):
            try:
                self._losses, self._tests = [*state["losses"]], [*state["tests"]]
                self._stack.go_on_from(state["stack"], self._course.device)
            except (KeyError, TypeError, RuntimeError) as error:
                raise unfinished.is_none(name, error) from None
        done(len(self._runs) * len(self._tests))
        for epoch in range(len(self._tests), self._course.epochs):
            self._train(epoch)
            self._tests.append(self._test())
            if unfinished:
                told = {"losses": torch.stack(self._losses), "tests": torch.stack(self._tests)}
                unfinished.save(name, told | {"stack": self._stack.state})
            done(len(self._runs))
        yield from self._found()

    @property
    def kept(self) -> RowParameters:
        """Each run's newest parameters."""
        return self._stack.kept

    def _train(self, epoch: int) -> None:
        """Let all runs see all samples once."""
        course = self._course
        rows = zip(*(batches(self._data, seed, epoch, course.batch) for seed in self._seeds), strict=True)
        for numbers in rows:
            factor = course.rate(len(self._losses), course.epochs * self._per_epoch)
            self._losses.append(self._step(numbers, epoch, factor * self._rates).cpu())

    def _found(self) -> Iterator[LearningCurve]:
        loss, tests = torch.stack(self._losses).to(torch.float64), torch.stack(self._tests)
        low, high = (int(share * len(loss)) for share in TENTH)
        finite = is_finite(self._stack.kept).cpu() & loss[-1].isfinite()
        for r, (rate, seed) in enumerate(self._runs):
            yield LearningCurve(
                schedule=self._learner.name,
                rate=rate,
                seed=seed,
                loss=_or_none(loss[:, r].reshape(self._course.epochs, -1).mean(dim=1)),
                test_loss=_or_none(tests[:, 0, r]),
                accuracy=tests[:, 1, r].tolist(),
                loss_at_a_tenth=_or_none(loss[low : max(high, low + 1), r].mean()[None])[0],
                diverged=not bool(finite[r]),
            )

    def _step(self, numbers: Sequence[Tensor], epoch: int, rates: Tensor) -> Tensor:
        """Let all runs learn from a batch, of which each seed has its own; return their losses."""
        m = self._learner.micro_batches
        taken = [self._data.train.take(own, (seed, epoch)) for seed, own in zip(self._seeds, numbers, strict=True)]
        pair = typed(tuple(torch.stack(own) for own in zip(*taken, strict=True)), self._course)
        x, y = (own[self._places].unflatten(1, (self._steps, m, -1)) for own in pair)
        losses = [self._stack.step(x[:, part], y[:, part], rates) for part in range(self._steps)]
        return torch.stack(losses).mean(dim=0)

    def _test(self) -> Tensor:
        """Return each run's loss and accuracy in the test."""
        kept, totals = self._stack.kept, torch.zeros(3, len(self._runs), dtype=torch.float64)
        statistics = self._statistics(kept) if self._course.batch_norm else []
        for numbers in torch.arange(len(self._data.test)).split(max(self._course.batch, _TESTED_AT_ONCE)):
            x, y = typed(self._data.test.take(numbers), self._course)
            for r, own in enumerate(self._scores(kept, x, statistics)):
                hits, of = right(own, y)
                totals[:, r] += torch.stack([self._data.loss(own, y) * of, hits, of]).to("cpu", torch.float64)
        return totals[:2] / totals[2]

    def _scores(self, kept: RowParameters, x: Tensor, statistics: Statistics) -> Tensor:
        """Return what each run's network says of inputs; batch norms use statistics."""

        def scores(parameters: RowParameters, own: Statistics) -> Tensor:
            if not own:
                return self._stack.scores(parameters, x)
            with using(own):
                return self._stack.scores(parameters, x)

        with torch.no_grad():
            return vmap(scores)(kept, statistics)

    def _statistics(self, kept: RowParameters) -> Statistics:
        """Return the statistics of each run's batch norms: means over micro-batches of all samples to learn from."""

        def collect(parameters: RowParameters, x: Tensor) -> Statistics:
            with collecting() as found:
                self._stack.scores(parameters, x)
            return found

        size = self._course.batch // self._steps // self._learner.micro_batches
        parts = [part for part in torch.arange(self._data.samples).split(size) if len(part) == size]
        found = []
        for numbers in parts:
            x, _ = typed(self._data.train.take(numbers), self._course)
            with torch.no_grad():
                found.append(vmap(collect, in_dims=(0, None))(kept, x))
        pairs = (zip(*of_norm, strict=True) for of_norm in zip(*found, strict=True))
        return [(torch.stack(means).mean(dim=0), torch.stack(variances).mean(dim=0)) for means, variances in pairs]


def starting_stages(
    course: Course, data: Data, seeds: Sequence[int], *, twice: bool = False
) -> list[list[nn.Sequential]]:
    """Return the first stages of each seed, on the device."""

    def make(seed: int) -> list[nn.Sequential]:
        given = course.network, data, course.sizes, course.stages, seed, course.dtype
        return make_stages(*given, twice=twice, cut=course.cut, batch_norm=course.batch_norm)

    return [[stage.to(course.device) for stage in make(seed)] for seed in seeds]


def typed(pair: tuple[Tensor, ...], course: Course) -> tuple[Tensor, Tensor]:
    """Return inputs and labels where parameters are, and inputs that are numbers in their type."""
    x, y = (own.to(course.device) for own in pair)
    return x.to(course.dtype) if x.is_floating_point() else x, y


def _or_none(values: Tensor) -> list[float | None]:
    return [value if isfinite(value) else None for value in values.tolist()]

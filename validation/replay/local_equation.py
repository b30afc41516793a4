"""The update equation of local steps, evaluated worker by worker in one process.

Every worker has parameters and an optimizer of its own, and updates by its own gradients; in a warm-up all update by
the same. At the end of a round all take the mean of their parameters, or what an outer optimizer makes of it.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from cdpsim.program import Program
from cdpsim.schedules.order import LocalSteps

from ..training.forms import flatten
from ..training.optimizer import Optimizer
from ..training.stages import Training
from .equation import StageParameters, gradients_of, snapshot

Gradients = list[list[Tensor]]  # of each stage and parameter


def evaluate_local(
    training: Training, optimizer: Optimizer, program: Program, local: LocalSteps, *, together: bool = False
) -> list[Tensor]:
    """Return each stage's common parameters at the end of a run as one vector; of steps made `together` no means."""
    workers, means = [_Worker(training, optimizer) for _ in range(program.devices)], dict[int, StageParameters]()
    outer = _outer_of(workers[0].read, local)
    tasks, compute = program.tasks, program.compute
    device, first = tasks.device[: compute : program.phases], program.first_pass
    for t in range(program.steps):
        mine = [np.flatnonzero(device[first[t] : first[t + 1]] == d).tolist() for d in range(program.devices)]
        versions = np.unique(tasks.version[compute:][tasks.step[compute:] == t])
        own = bool(program.is_own(versions).any()) and not together
        parts = len(mine[0]) if own else sum(map(len, mine))
        sums = [worker.add_up(t, numbers, parts) for worker, numbers in zip(workers, mine, strict=True)]
        total = [[reduce(add, each) for each in zip(*stage, strict=True)] for stage in zip(*sums, strict=True)]
        for worker, each in zip(workers, sums, strict=True):
            worker.update(each if own else total)
        for version in [] if together else versions.tolist():
            if program.averaged is not None and version in program.averaged:
                means[version] = _mean([worker.read for worker in workers])
            if (averaged := int(program.average_of(np.array(version)))) >= 0:
                common = outer(means.pop(averaged))
                for worker in workers:
                    worker.take(common)
    return [flatten(own.values()) for own in workers[0].read]


def _mean(of: list[StageParameters]) -> StageParameters:
    """Return the mean of all workers' parameters."""
    return [
        {name: reduce(add, [own[j][name] for own in of]).detach() / len(of) for name in stage}
        for j, stage in enumerate(of[0])
    ]


def _outer_of(start: StageParameters, local: LocalSteps) -> Callable[[StageParameters], StageParameters]:
    """Return the function from means to common parameters, which keeps those and their optimizer."""
    if local.outer is None:
        return lambda mean: mean
    common = deepcopy([{name: own.detach() for name, own in stage.items()} for stage in start])
    weights = [torch.nn.Parameter(own) for stage in common for own in stage.values()]
    rate, momentum = local.outer.rate, local.outer.momentum
    optimizer = torch.optim.SGD(weights, lr=rate, momentum=momentum, nesterov=local.outer.kind == "nesterov")

    def update(mean: StageParameters) -> StageParameters:
        given = [own for stage in mean for own in stage.values()]
        for weight, own in zip(weights, given, strict=True):
            weight.grad = weight.detach() - own
        optimizer.step()
        after = iter(weights)
        return [{name: next(after).detach().clone() for name in stage} for stage in mean]

    return update


class _Worker:
    """A worker's parameters, as it updates them and as it reads them."""

    def __init__(self, training: Training, optimizer: Optimizer) -> None:
        self._training, self._dtype = training, training.parameters(0).dtype
        self._stages = deepcopy(training.stages)
        for stage in self._stages:
            stage.to(training.device, optimizer.dtype(self._dtype))
        self._optimizers = [optimizer.over(list(stage.parameters())) for stage in self._stages]
        self.read = snapshot(self._stages, self._dtype)

    def add_up(self, step: int, micro_batches: list[int], parts: int) -> Gradients:
        """Return the sum of the gradients of micro-batches, each divided by a number of parts."""
        found = [gradients_of(self._training, self.read, self.read, step, i, parts) for i in micro_batches]
        names = [list(stage) for stage in self.read]
        return [[reduce(add, [own[j][name] for own in found]) for name in each] for j, each in enumerate(names)]

    def update(self, gradients: Gradients) -> None:
        """Make a step."""
        for stage, optimizer, own in zip(self._stages, self._optimizers, gradients, strict=True):
            for parameter, gradient in zip(stage.parameters(), own, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
        self.read = snapshot(self._stages, self._dtype)

    def take(self, common: StageParameters) -> None:
        """Go on with common parameters."""
        for stage, own in zip(self._stages, common, strict=True):
            with torch.no_grad():
                for name, parameter in stage.named_parameters():
                    parameter.copy_(own[name])
        self.read = snapshot(self._stages, self._dtype)

"""A device's part in local steps: updates by its own gradients, and by the mean of all workers' parameters.

A mean is made in the place of the parameters that it is of; one that is late is made of a copy, while the worker goes
on. Without an outer optimizer the mean is the new version. Else that one takes, as the gradient of the last common
parameters, these less the mean.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cdpsim.program import Category, Content
from cdpsim.schedules.order import LocalSteps, Outer

from .contents import Holding, Message
from .interpreter import Device
from .policy import last_own_version, optimizer_state, parameters


class OuterState:
    """A worker's copies of a stage for outer updates: the last common parameters, and their momentum.

    Of late means it has two: one that has come, and one on its way.
    """

    def __init__(self, outer: Outer, theta: Tensor, *, late: bool = False) -> None:
        self._outer = outer
        self._common = theta.clone()
        self._momentum = torch.zeros_like(theta) if outer.momentum else None
        self.means = [torch.zeros_like(theta) for _ in range(2 * late)]

    @property
    def vectors(self) -> list[Tensor]:
        """All vectors."""
        return [self._common, *([] if self._momentum is None else [self._momentum]), *self.means]

    def update(self, mean: Tensor) -> Tensor:
        """Return the next common parameters by torch's optimizer, whose first update is as with a momentum of zeros."""
        outer, theta = self._outer, nn.Parameter(self._common)
        named: dict[str, Any] = {"momentum": outer.momentum, "nesterov": outer.kind == "nesterov", "foreach": False}
        optimizer = torch.optim.SGD([theta], lr=outer.rate, **named)
        theta.grad = self._common - mean
        if self._momentum is not None:
            optimizer.state[theta]["momentum_buffer"] = self._momentum
        optimizer.step()
        return self._common.clone()


def update_by_mean(total: Tensor, workers: int, outer: OuterState | None) -> Tensor:
    """Return the next common parameters, by the sum of all workers' parameters."""
    mean = total / workers
    return mean if outer is None else outer.update(mean)


class LocalDevice(Device):
    """A device that makes steps alone, and takes means."""

    def __init__(self, *given: Any, local: LocalSteps, **named: Any) -> None:
        self._local, self._outer = local, dict[int, OuterState]()
        super().__init__(*given, **named)
        updates, compute = self._program.tasks.step[self._program.compute :], self._program.compute
        self._own_steps = set(updates[self._program.is_own(self._program.tasks.version[compute:])].tolist())

    def _keep(self, holding: Holding, value: Any) -> None:
        super()._keep(holding, value)
        if holding.category == Category.OPTIMIZER and self._local.outer is not None:
            theta = self._first(parameters(holding.stage, 0))
            assert isinstance(theta, Tensor), "parameters are a vector"
            state = self._outer[holding.stage] = OuterState(self._local.outer, theta, late=self._local.late)
            for vector in state.vectors:
                self._watch.holds(vector, Category.OPTIMIZER)

    def _end(self, node: int) -> None:
        super()._end(node)
        for holding in self._part.ends.get(node, ()):
            if holding.category == Category.OPTIMIZER:
                self._outer.pop(holding.stage, None)

    def _parts(self, step: int) -> int:
        """Return by how much a loss is divided: a worker's own micro-batches, or in a warm-up those of all."""
        count = int(self._program.counts[step])
        return count // self._program.devices if step in self._own_steps else count

    def _update(self, node: int) -> None:
        version, stage = int(self._program.tasks.version[node]), int(self._program.tasks.stage[node])
        if not self._plan.is_mean(version):
            super()._update(node)
            if self._local.late and self._program.averaged is not None and version in self._program.averaged:
                self._mean_of(stage, version).copy_(self._parameters.get(parameters(stage, version)))
            return
        total = self._mean_of(stage, int(self._program.average_of(self._program.tasks.version[node])))
        theta = update_by_mean(total, self._program.devices, self._outer.get(stage))
        if self._optimizer.has_master:
            self._states.get(optimizer_state(stage))["master"].copy_(theta)
        self._keep(parameters(stage, version), theta)
        self._made(stage, version, theta)

    def _mean_of(self, stage: int, version: int) -> Tensor:
        if self._local.late and (averaged := self._program.averaged) is not None:
            return self._outer[stage].means[int(np.searchsorted(averaged[averaged >= 0], version)) % 2]
        return self._parameters.get(parameters(stage, version))

    def _sum_of(self, message: Message, stage: int) -> Tensor:
        if message.content == Content.GRADIENT:
            return super()._sum_of(message, stage)
        return self._mean_of(stage, last_own_version(self._program, message.step))

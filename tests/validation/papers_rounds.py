"""Overlapped methods by their papers' equations, in few lines of torch, from the numbers of micro-batches.

ACCO (Nabli et al. 2024), equations (1) and (2); DPU and WP as that paper has them. A state is a model with torch's
optimizer of it, which is copied before each update: so what an update starts from stays as it was.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from validation.training.forms import flatten
from validation.training.optimizer import Optimizer
from validation.training.stages import Training

State = tuple[nn.Sequential, torch.optim.Optimizer]
Path = list[Tensor]  # theta_0, theta_1, ...


class Papers:
    """A model, its data, an optimizer, and the number of micro-batches in the seed and in each interval behind it."""

    def __init__(self, training: Training, optimizer: Optimizer, counts: Sequence[int]) -> None:
        model = nn.Sequential(*deepcopy(training.stages))
        self._start: State = model, optimizer.over(list(model.parameters()))
        self._training, self._counts = training, counts
        self.estimates: Path = [flatten(model.parameters())]

    def _sum(self, state: State, round_: int) -> list[Tensor]:
        """Return the sum of the gradients of all micro-batches of a round, each at this state."""
        model, _ = deepcopy(state)
        for i in range(self._counts[round_]):
            x, target = self._training.data(round_, i)
            torch.autograd.backward(self._training.loss(model(x), target, 1))
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    def _next(self, state: State, sums: list[Tensor], many: int) -> State:
        model, optimizer = deepcopy(state)
        for parameter, summed in zip(model.parameters(), sums, strict=True):
            parameter.grad = summed / many
        optimizer.step()
        return model, optimizer

    def data_parallel(self, steps: int) -> Path:
        """Return the path of ordinary training."""
        state, path = self._start, [flatten(self._start[0].parameters())]
        for t in range(steps):
            state = self._next(state, self._sum(state, t), self._counts[t])
            path.append(flatten(state[0].parameters()))
        return path

    def acco(self, updates: int) -> Path:
        """Return the path of ACCO: the first half of a mini-batch at the estimate that the half before it has made."""
        theta, path = self._start, [flatten(self._start[0].parameters())]
        first, many = self._sum(theta, 0), self._counts[0]
        for t in range(updates):
            estimate = self._next(theta, first, many)
            second = self._sum(theta, 2 * t + 1)
            both = [a + b for a, b in zip(first, second, strict=True)]
            theta = self._next(theta, both, many + self._counts[2 * t + 1])
            self.estimates.append(flatten(estimate[0].parameters()))
            path.append(flatten(theta[0].parameters()))
            if t < updates - 1:
                first, many = self._sum(estimate, 2 * t + 2), self._counts[2 * t + 2]
        return path

    def dpu(self, updates: int, warm_up: int = 0) -> Path:
        """Return the path of delayed updates: gradients at the version before the one to which they are applied."""
        states, path = [self._start], [flatten(self._start[0].parameters())]
        for t in range(updates):
            read = states[t if t <= warm_up else t - 1]
            states.append(self._next(states[t], self._sum(read, t), self._counts[t]))
            path.append(flatten(states[-1][0].parameters()))
        return path

    def wp(self, updates: int) -> Path:
        """Return the path of weight prediction: gradients at what the gradients before them make of the newest version.

        The paper leaves open what the first interval reads: theta_0, as the seed.
        """
        theta, read, path = self._start, self._start, [flatten(self._start[0].parameters())]
        sums, many = self._sum(theta, 0), self._counts[0]
        for t in range(updates):
            theta = self._next(theta, sums, many)
            path.append(flatten(theta[0].parameters()))
            predicted = self._next(theta, sums, many)
            self.estimates.append(flatten(predicted[0].parameters()))
            if t < updates - 1:
                sums, many = self._sum(read, t + 1), self._counts[t + 1]
            read = predicted
        return path

"""Local methods by their papers' equations, in few lines of torch: one model and one optimizer for each worker.

SlowMo (Wang et al. 2019) and DiLoCo (Douillard et al. 2023) with the equations written out; CO2 as its published code
has it: the momentum takes the last common parameters less the mean of the round before.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from validation.training.forms import flatten
from validation.training.optimizer import Optimizer
from validation.training.stages import Training

Outer = Callable[[Tensor, Tensor], Tensor]  # of the last common parameters and the mean


def slow_momentum(beta: float, alpha: float = 1.0) -> Outer:
    """u = beta u + (x - mean); x = x - alpha u: SlowMo's with gamma u for its u."""
    u: list[Tensor] = []

    def outer(x: Tensor, mean: Tensor) -> Tensor:
        u[:] = [beta * (u[0] if u else torch.zeros_like(x)) + (x - mean)]
        return x - alpha * u[0]

    return outer


def nesterov(rate: float, beta: float) -> Outer:
    """Nesterov momentum of the pseudo-gradient x - mean."""
    u: list[Tensor] = []

    def outer(x: Tensor, mean: Tensor) -> Tensor:
        u[:] = [beta * (u[0] if u else torch.zeros_like(x)) + (x - mean)]
        return x - rate * ((x - mean) + beta * u[0])

    return outer


OUTER: dict[str, Callable[[], Outer]] = {
    "local-sgd": lambda: lambda x, mean: mean,
    "post-local-sgd": lambda: lambda x, mean: mean,
    "slowmo": lambda: slow_momentum(0.5),
    "diloco": lambda: nesterov(0.7, 0.9),
    "co2": lambda: slow_momentum(0.5),
}


class LocalPapers:
    """Workers that begin alike, with m micro-batches of their own in each step."""

    def __init__(self, training: Training, optimizer: Optimizer, workers: int, m: int) -> None:
        self._training, self._m = training, m
        models = [nn.Sequential(*deepcopy(training.stages)) for _ in range(workers)]
        self._workers = [(model, optimizer.over(list(model.parameters()))) for model in models]
        self._step = 0

    @property
    def vectors(self) -> list[Tensor]:
        """Each worker's parameters."""
        return [flatten(model.parameters()).clone() for model, _ in self._workers]

    def step(self, *, together: bool = False) -> None:
        """Let each worker make a step by the mean of its own gradients, or all by that of all."""
        found = []
        for worker, (model, _) in enumerate(self._workers):
            model.zero_grad()
            for i in range(worker * self._m, (worker + 1) * self._m):
                x, target = self._training.data(self._step, i)
                torch.autograd.backward(self._training.loss(model(x), target, self._m))
            found.append([parameter.grad for parameter in model.parameters()])
        mean = [sum(each) / len(found) for each in zip(*found, strict=True)]
        for (model, optimizer), own in zip(self._workers, found, strict=True):
            for parameter, gradient in zip(model.parameters(), mean if together else own, strict=True):
                parameter.grad = gradient
            optimizer.step()
        self._step += 1

    def set(self, vector: Tensor) -> None:
        """Give all workers the same parameters."""
        for model, _ in self._workers:
            nn.utils.vector_to_parameters(vector.clone(), model.parameters())

    def train(self, schedule: str, local_steps: int, rounds: int, warm_up: int = 0) -> Tensor:
        """Return the common parameters at the end."""
        for _ in range(warm_up):
            self.step(together=True)
        common, outer = self.vectors[0], OUTER[schedule]()
        means: list[Tensor] = []
        for r in range(rounds + (schedule == "co2")):
            for _ in range(local_steps):
                self.step()
            means.append(torch.stack(self.vectors).mean(dim=0))
            if schedule == "co2" and r == 0:
                continue
            common = outer(common, means[r - (schedule == "co2")])
            self.set(common)
        return common

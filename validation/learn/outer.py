"""Outer updates of local steps: what the mean of all workers' parameters makes of the last common ones."""

import torch
from torch import Tensor

from cdpsim.schedules.order import Outer

from .updates import Parameters


class OuterUpdates:
    """The last common parameters of all runs, and their momentum; each stage has its own."""

    def __init__(self, outer: Outer | None, start: list[Parameters]) -> None:
        self._outer = outer
        start = [] if outer is None else start
        self.common = start
        self.momentum = [{name: torch.zeros_like(own) for name, own in stage.items()} for stage in start]

    def step(self, mean: list[Parameters]) -> list[Parameters]:
        """Return the next common parameters: the mean, or what torch's SGD makes of its difference as a gradient."""
        if self._outer is None:
            return mean
        rows = zip(self.common, mean, self.momentum, strict=True)
        self.common = [
            {name: self._next(stage[name], own[name], kept, name) for name in stage} for stage, own, kept in rows
        ]
        return self.common

    def _next(self, theta: Tensor, mean: Tensor, momentum: Parameters, name: str) -> Tensor:
        assert self._outer is not None, "without an outer optimizer the mean is taken"
        kind, rate, mu = self._outer
        gradient = theta - mean
        momentum[name] = mu * momentum[name] + gradient
        return theta - rate * (gradient + mu * momentum[name] if kind == "nesterov" else momentum[name])

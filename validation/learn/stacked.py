"""Training of many runs of one schedule at once: each parameter of all runs is one tensor, whose rows are the runs.

A micro-batch takes its gradient at the versions that the schedule's lags say, of each stage by itself. Micro-batches
with the same lags go through the network together.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from cdpsim.trace.metrics.staleness import Lags

from .data import cross_entropy
from .networks import BACK, Doubled
from .updates import Update

RunParameters = list[dict[str, Tensor]]  # of each stage, by name; rows are runs


class Stack:
    """Runs of one schedule that differ in their start, their data or their rate."""

    def __init__(
        self,
        starts: Sequence[Sequence[nn.Module]],
        lags: Lags,
        update: Update,
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        *,
        one_by_one: bool = False,
    ) -> None:
        self._stages, self._lags, self._of, self._one_by_one = starts[0], lags, loss, one_by_one
        first = [
            {name: torch.stack([dict(run[j].named_parameters())[name].detach() for run in starts]) for name in own}
            for j, own in enumerate(dict(stage.named_parameters()) for stage in starts[0])
        ]
        self._versions: deque[RunParameters] = deque([first], maxlen=1 + int(max(map(np.max, lags))))
        self._states = [update.starting() for _ in self._stages]
        self._twice = [_doubled(stage) for stage in self._stages]
        rows = np.concatenate([lags.forward, lags.backward], axis=1)
        self._groups = [np.flatnonzero((rows == row).all(axis=1)) for row in np.unique(rows, axis=0)]

    @property
    def newest(self) -> RunParameters:
        """The parameters of the newest version."""
        return self._versions[-1]

    def step(self, inputs: Tensor, labels: Tensor, rates: Tensor) -> Tensor:
        """Make a training step of all runs, and return their losses; data are (run, micro-batch, sample, ...)."""
        total: RunParameters = [{name: torch.zeros_like(own) for name, own in stage.items()} for stage in self.newest]
        losses = torch.zeros(len(inputs), dtype=next(iter(self.newest[0].values())).dtype)
        for group in self._groups:
            share = len(group) / len(self._lags.forward)
            x, y = (values[:, group].flatten(1, 2) for values in (inputs, labels))
            gradients, loss = self._gradients(int(group[0]), x, y)
            losses = losses + share * loss
            for own, more in zip(total, gradients, strict=True):
                for name in own:
                    own[name] += share * more[name]
        self._versions.append(
            [
                state.step(theta, gradient, rates)
                for state, theta, gradient in zip(self._states, self.newest, total, strict=True)
            ]
        )
        return losses

    def _gradients(self, micro_batch: int, x: Tensor, y: Tensor) -> tuple[RunParameters, Tensor]:
        """Return the gradients and the losses of all runs at the versions that a micro-batch reads."""
        forward, backward = (
            [self._read(lag, j) for j, lag in enumerate(own[micro_batch].tolist())] for own in self._lags
        )
        back = [
            {f"{name}.{BACK}": own[f"{name}.weight"] for name in names}
            for names, own in zip(self._twice, backward, strict=True)
        ]
        gradient = grad_and_value(self._loss)
        if not self._one_by_one:
            found: tuple[RunParameters, Tensor] = vmap(gradient)(forward, back, x, y)
            return found
        runs = [gradient(_of_run(forward, r), _of_run(back, r), x[r], y[r]) for r in range(len(x))]
        gradients = [
            {name: torch.stack([each[j][name] for each, _ in runs]) for name in own} for j, own in enumerate(forward)
        ]
        return gradients, torch.stack([loss for _, loss in runs])

    def _read(self, lag: int, stage: int) -> dict[str, Tensor]:
        """Return the parameters of a version; of steps before there was such a one, the first."""
        return self._versions[max(len(self._versions) - 1 - lag, 0)][stage]

    def _loss(self, parameters: RunParameters, back: RunParameters, x: Tensor, y: Tensor) -> Tensor:
        return self._of(self.scores(parameters, x, back), y)

    def scores(self, parameters: RunParameters, x: Tensor, back: RunParameters | None = None) -> Tensor:
        """Return what the network says of inputs with one run's parameters."""
        for j, stage in enumerate(self._stages):
            others = back[j] if back else {f"{name}.{BACK}": parameters[j][f"{name}.weight"] for name in self._twice[j]}
            x = functional_call(stage, parameters[j] | others, (x,))
        return x


def _doubled(stage: nn.Module) -> list[str]:
    """Return the names of the modules of a stage that have the weights of backwards, too."""
    return [name for name, module in stage.named_modules() if isinstance(module, Doubled) and module.is_double]


def _of_run(parameters: RunParameters, run: int) -> RunParameters:
    return [{name: own[run] for name, own in stage.items()} for stage in parameters]


def is_finite(parameters: RunParameters) -> Tensor:
    """Return of each run whether all of its parameters are finite."""
    tensors = chain.from_iterable(stage.values() for stage in parameters)
    return torch.stack([own.flatten(1).isfinite().all(dim=1) for own in tensors]).all(dim=0)

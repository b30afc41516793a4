"""Updates of many rows of parameters at once: torch's formulas, with a rate for each row, and outer updates."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from cdpsim.errors import RequestError, choose
from cdpsim.schedules.order import Outer

KINDS = ("sgd", "momentum", "nesterov", "adamw", "muon")
_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_NEWTON_SCHULZ, _LEAST_NORM, _ITERATIONS = (3.4445, -4.7750, 2.0315), 1e-7, 5


@dataclass(frozen=True)
class Update:
    """An optimizer: sgd with or without momentum, AdamW, or Muon, which takes matrices and leaves the rest to AdamW."""

    kind: str = "momentum"
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        choose("optimizer", self.kind, KINDS)
        if not 0 <= self.momentum < 1:
            raise RequestError("momentum", f"{self.momentum:g} must be at least 0 and below 1")
        if not 0 <= self.weight_decay < float("inf"):
            raise RequestError("weight-decay", f"{self.weight_decay:g} must be at least 0")

    @property
    def copies(self) -> int:
        """The tensors as large as parameters that it keeps."""
        return {"sgd": 0, "adamw": 2, "muon": 2}.get(self.kind, 1)


Parameters = dict[str, Tensor]  # by name; the first dimension of each tensor is of rows


@dataclass(frozen=True)
class States:
    """The state that updates keep of each parameter, by its name; it is never changed, so versions may share one."""

    update: Update
    count: int
    kept: dict[str, dict[str, Tensor]]

    def step(self, theta: Parameters, gradients: Parameters, rate: Tensor) -> tuple[Parameters, "States"]:
        """Return the next parameters, where each row has a rate of its own, and the next state."""
        after = States(self.update, self.count + 1, {name: dict(self.kept.get(name, {})) for name in theta})
        found = {
            name: after._next(own, gradients[name], rate.reshape(-1, *[1] * (own.dim() - 1)), after.kept[name])
            for name, own in theta.items()
        }
        return found, after

    def _next(self, theta: Tensor, gradient: Tensor, rate: Tensor, state: dict[str, Tensor]) -> Tensor:
        if self.update.kind == "muon" and theta.dim() == 3:
            return self._muon(theta, gradient, rate, state)
        if self.update.kind in ("adamw", "muon"):
            return self._adamw(theta, gradient, rate, state)
        return self._sgd(theta, gradient, rate, state)

    def _sgd(self, theta: Tensor, gradient: Tensor, rate: Tensor, state: dict[str, Tensor]) -> Tensor:
        gradient = gradient + self.update.weight_decay * theta
        if self.update.kind == "sgd":
            return theta - rate * gradient
        before = state.get("momentum")
        state["momentum"] = gradient if before is None else self.update.momentum * before + gradient
        nesterov = self.update.kind == "nesterov"
        return theta - rate * (gradient + self.update.momentum * state["momentum"] if nesterov else state["momentum"])

    def _adamw(self, theta: Tensor, gradient: Tensor, rate: Tensor, state: dict[str, Tensor]) -> Tensor:
        theta = theta * (1 - rate * self.update.weight_decay)
        zero = torch.zeros_like(gradient)
        for name, beta, value in (("first", _BETAS[0], gradient), ("second", _BETAS[1], gradient**2)):
            state[name] = beta * state.get(name, zero) + (1 - beta) * value
        first, second = (1 - beta**self.count for beta in _BETAS)
        return theta - rate / first * state["first"] / ((state["second"] / second).sqrt() + _EPSILON)

    def _muon(self, theta: Tensor, gradient: Tensor, rate: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Orthogonalize the momentum by five Newton-Schulz steps (Jordan 2024)."""
        theta = theta * (1 - rate * self.update.weight_decay)
        mu, zero = self.update.momentum, torch.zeros_like(gradient)
        state["momentum"] = mu * state.get("momentum", zero) + (1 - mu) * gradient
        x = (1 - mu) * gradient + mu * state["momentum"]
        rows, columns = x.shape[-2:]
        x = x.mT if rows > columns else x
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
        a, b, c = _NEWTON_SCHULZ
        for _ in range(_ITERATIONS):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.mT if rows > columns else x
        return theta - rate * max(1, rows / columns) ** 0.5 * x


class OuterUpdates:
    """The last common parameters of all runs, and their momentum: what local steps make of the workers' mean."""

    def __init__(self, outer: Outer | None, start: list[Parameters]) -> None:
        self._outer = outer
        self.common: list[Parameters] = [] if outer is None else start
        self.momentum: list[Parameters] = tree_map(torch.zeros_like, self.common)

    def step(self, mean: list[Parameters]) -> list[Parameters]:
        """Return the next common parameters: the mean, or what torch's SGD makes of its difference as a gradient."""
        if self._outer is None:
            return mean
        kind, rate, mu = self._outer
        gradients = tree_map(torch.sub, self.common, mean)
        self.momentum = tree_map(lambda own, gradient: mu * own + gradient, self.momentum, gradients)
        moved = self.momentum
        if kind == "nesterov":
            moved = tree_map(lambda gradient, own: gradient + mu * own, gradients, self.momentum)
        self.common = tree_map(lambda theta, own: theta - rate * own, self.common, moved)
        return self.common

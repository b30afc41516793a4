"""Optimizers as functions: parameters, gradient and state in, new parameters out."""

from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from cdpsim.errors import choose
from validation.training.forms import Form, zeros

OptimizerState = dict[str, Tensor]

_KINDS = MappingProxyType({"sgd": torch.optim.SGD, "adam": torch.optim.Adam})


@dataclass(frozen=True)
class Optimizer:
    """One of torch's optimizers and its options."""

    kind: str = "sgd"
    options: dict[str, float] = field(default_factory=lambda: {"lr": 0.1})

    def __post_init__(self) -> None:
        choose("optimizer", self.kind, _KINDS)

    def over(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's optimizer of parameters."""
        return _KINDS[self.kind](parameters, **self.options)

    def forms(self, vector: Form) -> dict[str, Form]:
        """Return the forms of the state of a vector of parameters."""
        moments = dict.fromkeys(self._moments(), vector)
        return {"step": Form((), torch.float32)} | moments if self.kind == "adam" else moments

    def state(self, vector: Form, device: torch.device | None = None) -> OptimizerState:
        """Return the state before the first update: zeros, with which torch's first update is as without a state.

        The count of steps is on the device, too, as the state travels as one tensor.
        """
        return {name: zeros(form, device or torch.device("cpu")) for name, form in self.forms(vector).items()}

    def nbytes(self, vector: Form) -> int:
        """Return the bytes of a state."""
        return sum(form.nbytes for form in self.forms(vector).values())

    def update(self, theta: Tensor, gradient: Tensor, state: OptimizerState) -> Tensor:
        """Return the next parameters; the state is changed in place."""
        parameter = nn.Parameter(theta.clone())
        parameter.grad = gradient
        optimizer = self.over([parameter])
        optimizer.state[parameter] = dict(state)  # torch has None there where it keeps nothing
        optimizer.step()
        return parameter.detach()

    def _moments(self) -> tuple[str, ...]:
        if self.kind == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.options.get("momentum") else ()


OPTIMIZERS = MappingProxyType(
    {
        "sgd": Optimizer("sgd", {"lr": 0.1}),
        "momentum": Optimizer("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        "adam": Optimizer("adam", {"lr": 0.01}),
    }
)

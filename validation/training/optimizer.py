"""Optimizers as functions: parameters, gradient and state in, new parameters out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from cdpsim.errors import choose

from .forms import Form, view_parts, zeros

OptimizerState = dict[str, Tensor]

_KINDS = MappingProxyType(
    {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}
)
_STEP, _MASTER = "step", "master"


@dataclass(frozen=True)
class Optimizer:
    """One of torch's optimizers and its options.

    In mixed precision it keeps a master copy of the parameters in float32, which it updates, and its state in float32.
    So it does, in their own type, where updates start from other parameters than passes read (`keeps_base`).
    Parameters are one vector; its `parts` are the forms of the tensors in it, whose rows and columns Adafactor sums.
    """

    kind: str = "sgd"
    options: dict[str, float] = field(default_factory=lambda: {"lr": 0.1})
    mixed_precision: bool = False
    keeps_base: bool = False
    on_host: bool = False  # whether its state is there, and updates are made there

    def __post_init__(self) -> None:
        choose("optimizer", self.kind, _KINDS)

    @property
    def name(self) -> str:
        """Its name among `OPTIMIZERS`."""
        return "momentum" if self.kind == "sgd" and self.options.get("momentum") else self.kind

    @property
    def has_master(self) -> bool:
        """Whether what it updates is a copy of the parameters in its state."""
        return self.mixed_precision or self.keeps_base

    def over(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's optimizer of parameters."""
        return _KINDS[self.kind](parameters, **self.options)

    def dtype(self, parameters: torch.dtype) -> torch.dtype:
        """Return the type in which parameters of a type are updated."""
        return torch.float32 if self.mixed_precision else parameters

    def forms(self, parts: Sequence[Form]) -> dict[str, Form]:
        """Return the forms of the state that a device has of a vector of parameters."""
        return {} if self.on_host else self._state_forms(parts)

    def _state_forms(self, parts: Sequence[Form]) -> dict[str, Form]:
        wide = [Form(part.shape, self.dtype(part.dtype)) for part in parts]
        vector = Form((sum(part.numel for part in parts),), wide[0].dtype)
        forms = {} if self.kind == "sgd" else {_STEP: Form((), torch.float32)}
        if self.has_master:
            forms[_MASTER] = vector
        if self.kind == "adafactor":
            factors = [(f"{k}.{name}", form) for k, part in enumerate(wide) for name, form in _factors(part).items()]
            return forms | dict(factors)
        moments = ["exp_avg", "exp_avg_sq"]
        if self.kind == "sgd":
            moments = ["momentum_buffer"] * bool(self.options.get("momentum"))
        return forms | dict.fromkeys(moments, vector)

    def state(
        self, theta: Tensor, parts: Sequence[Form], make: Callable[[Form, torch.device], Tensor] = zeros
    ) -> OptimizerState:
        """Return the state before the first update: zeros, with which torch's first update is as without a state.

        The count of steps is on the device, too, as the state travels as one tensor.
        """
        state = {name: make(form, theta.device) for name, form in self._state_forms(parts).items()}
        if self.has_master:
            state[_MASTER].copy_(theta)
        return state

    def nbytes(self, parts: Sequence[Form]) -> int:
        """Return the bytes of a state on a device."""
        return sum(form.nbytes for form in self.forms(parts).values())

    def update(self, theta: Tensor, gradient: Tensor, state: OptimizerState, parts: Sequence[Form]) -> Tensor:
        """Return the next parameters; the state is changed in place.

        Adafactor has to know the tensors in the vector. In types of two bytes torch rounds the last numbers of a tensor
        otherwise than those before, which its kernels take several at a time: so there each tensor is by itself, too.
        """
        vector = state[_MASTER] if self.has_master else theta.clone()
        gradient = gradient.to(vector.dtype)
        kept = {name: tensor for name, tensor in state.items() if name != _MASTER}
        if self.kind == "adafactor" or vector.dtype.itemsize < torch.float32.itemsize:
            self._step(view_parts(vector, parts), view_parts(gradient, parts), _by_part(kept, parts))
            if _STEP in kept:
                kept[_STEP].add_(1)
        else:
            self._step([vector], [gradient], [kept])
        return vector.to(theta.dtype)

    def _step(self, values: list[Tensor], gradients: list[Tensor], states: list[OptimizerState]) -> None:
        parameters = [nn.Parameter(value) for value in values]
        optimizer = self.over(parameters)
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            parameter.grad = gradient
            optimizer.state[parameter] = dict(state)  # torch has None there where it keeps nothing
        optimizer.step()


def _factors(part: Form) -> dict[str, Form]:
    """Return what Adafactor keeps of a tensor: sums over rows and columns of matrices, of a vector all of it."""
    shape, dtype = part
    if len(shape) < 2:
        return {"variance": part}
    return {"row_var": Form((*shape[:-1], 1), dtype), "col_var": Form((*shape[:-2], 1, shape[-1]), dtype)}


def _by_part(state: OptimizerState, parts: Sequence[Form]) -> list[OptimizerState]:
    """Return the state of each part of a vector; each counts the steps by itself, as torch changes the count."""
    found: list[OptimizerState] = [{} for _ in parts]
    for name, tensor in state.items():
        number, dot, factor = name.partition(".")
        if dot:
            found[int(number)][factor] = tensor
            continue
        of_parts = [tensor.clone() for _ in parts] if name == _STEP else view_parts(tensor, parts)
        for own, part in zip(found, of_parts, strict=True):
            own[name] = part
    return found


OPTIMIZERS = MappingProxyType(
    {
        "sgd": Optimizer("sgd", {"lr": 0.1}),
        "momentum": Optimizer("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        "adam": Optimizer("adam", {"lr": 0.01}),
        "adamw": Optimizer("adamw", {"lr": 0.01, "weight_decay": 0.1}),
        "adafactor": Optimizer("adafactor", {"lr": 0.01}),
    }
)

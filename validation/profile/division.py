"""The division of stages' backwards into two parts, found by running both on zeros, fake ones or real.

The weights' part has the gradients that take products of matrices. All others, such as those of norms, take less than
it would take to keep what they need: the input's part makes them.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..training.fakes import Fakes
from ..training.forms import Form, zeros
from ..training.parts import Parts
from ..training.passes import Rest, backward_for_input, backward_for_weights, forward
from ..training.stages import Training, imitate
from .tracker import address_of, tensors_in


class Inputs(NamedTuple):
    """The tensors that a stage's tasks read, of zeros, which are tokens and labels too."""

    theta: Tensor
    gradient: Tensor
    x: Tensor
    target: Tensor | None


def zero_inputs(training: Training, stage: int) -> Inputs:
    """Return zeros for a stage."""
    parameters, last = training.parameters(stage), stage == training.n - 1
    return Inputs(
        zeros(parameters, training.device),
        zeros(parameters, training.device),
        zeros(input_form(training, stage), training.device),
        zeros(training.targets.form, training.device) if last else None,
    )


def input_form(training: Training, stage: int) -> Form:
    """Return the form of a stage's input."""
    return training.boundary(stage - 1) if stage else training.inputs.form


def zero_above(training: Training, stage: int) -> Tensor | None:
    """Return a gradient of a stage's output, of zeros."""
    return None if stage == training.n - 1 else zeros(training.boundary(stage), training.device)


def divide(training: Training, key: Callable[[Training, int], Hashable]) -> dict[int, Parts]:
    """Return the parts of the backwards of all stages but the first; stages of one key have the same."""
    keys = {stage: key(training, stage) for stage in range(1, training.n)}
    found: dict[Hashable, Parts] = {}
    with Fakes():
        imitation = imitate(training)
        for stage, own in keys.items():
            if own not in found:
                found[own] = find_parts(imitation, stage)
    return {stage: found[own] for stage, own in keys.items()}


def find_parts(training: Training, stage: int) -> Parts:
    """Run a stage forth and back, its second part group by group, and return the best parts of its backward."""
    theta, gradient, x, target = zero_inputs(training, stage)
    _, kept = forward(training, stage, theta, x, target, 1)
    _, rest = backward_for_input(kept, theta, zero_above(training, stage), whole_parts(kept.lent.forms))
    assert isinstance(rest, Rest), "only a first stage's backward is not divided"
    early: set[int] = set()
    needed: set[int] = set()
    while rest.late:
        parameters, saved = rest.late[0][0].parameters, rest.lent.values()  # which an address belongs to while it lives
        with _Uses() as uses:
            backward_for_weights(training, rest._replace(late=[rest.late.pop(0)]), theta, gradient)
        if uses.products:
            needed |= {k for k, tensor in saved.items() if address_of(tensor) in uses.storages}
        else:
            early |= parameters
    return Parts(frozenset(early), frozenset(needed), tuple(rest.lent.forms))


def whole_parts(saved: list[Form]) -> Parts:
    """Return the parts of torch's own pipelines: the first keeps all that was saved, and makes no gradient early."""
    return Parts(frozenset(), frozenset(range(len(saved))), tuple(saved))


class _Uses(TorchDispatchMode):
    """A record of the storages whose values operations use while it is entered, and of products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation; one that returns a view of a tensor does not use its values."""
        result = func(*args, **(kwargs or {}))
        self.products += func._overloadpacket in flop_registry
        used, made = ({*map(address_of, tensors_in(values))} for values in ((args, kwargs), result))
        self.storages |= used if func._schema.is_mutable else used - made
        return result

"""The forward and the backward of one stage, as a replay does them and as a profile measures them.

Parameters are leaves that view one vector, and their gradients views of another, into which autograd adds. A backward
is done as a whole, or in two parts: first for the stage's input, then for its weights. The second part goes through the
stage once more, by the graph and from the gradient that the first has kept.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from cdpsim.errors import RequestError
from validation.training.stages import Training, leaves, pieces


class Pass(NamedTuple):
    """What a forward keeps for its backward; of its output only where it is in the graph, not its values."""

    stage: int
    output: GradientEdge
    x: Tensor
    parameters: Sequence[Tensor]  # leaves, which have no values between the two
    lent: "_Lent"
    above: Tensor | None = None  # the gradient of what was sent on, between the two parts of a backward


class _Lent:
    """What a graph reads in a vector of parameters, and keeps as places in it instead of values.

    So a device may drop a version between a forward and its backward, and have it again from elsewhere.
    """

    def __init__(self, theta: Tensor) -> None:
        self.theta: Tensor | None = theta

    def pack(self, tensor: Tensor) -> object:
        """Keep a place in the vector, or a tensor that has other values."""
        assert self.theta is not None
        if tensor.untyped_storage()._cdata != self.theta.untyped_storage()._cdata:
            # An output kept as it is would keep its own graph.
            return tensor.detach() if tensor.requires_grad else tensor
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, kept: object) -> Tensor:
        """Give what was kept."""
        if isinstance(kept, Tensor):
            return kept
        assert self.theta is not None and isinstance(kept, tuple), "a backward has its version"
        return self.theta.as_strided(*kept)


def forward(
    training: Training, stage: int, theta: Tensor, x: Tensor, target: Tensor | None, micro_batches: int
) -> tuple[Tensor | None, Pass]:
    """Run a stage at some parameters; give what it sends on, if it is not the last, and what its backward needs."""
    parameters, lent = leaves(training.stages[stage], theta), _Lent(theta)
    if stage > 0:
        x = x.detach().requires_grad_()
    with saved_tensors_hooks(lent.pack, lent.unpack):
        y = training.apply(stage, parameters, x)
        if stage == training.n - 1:
            assert target is not None, "only the last stage has a loss"
            y = training.loss(y, target, micro_batches)
        else:
            y = on_its_own(y)
    kept = Pass(stage, get_gradient_edge(y), x, list(parameters.values()), lent)
    _return(kept)
    return (None if stage == training.n - 1 else y.detach()), kept


def backward(training: Training, kept: Pass, theta: Tensor, above: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Add a pass's gradient to the stage's vector, in place; give that of its input, if a stage is before it.

    `theta` are the parameters that it reads, `above` the gradient of what the forward sent on. A parameter that had no
    part in it keeps the gradient that it has.
    """
    _lend(training, kept, theta, gradient)
    torch.autograd.backward(kept.output, above)
    _return(kept)
    if kept.stage == 0:
        return None
    below, kept.x.grad = kept.x.grad, None
    return _handed_back(kept, below)


def backward_for_input(kept: Pass, theta: Tensor, above: Tensor | None) -> tuple[Tensor | None, Pass]:
    """Give the gradient of a pass's input, if a stage is before it, and what is left to do for the weights."""
    left = kept._replace(above=above)
    if kept.stage == 0:
        return None, left
    kept.lent.theta = theta
    (below,) = torch.autograd.grad(kept.output, [kept.x], above, retain_graph=True, allow_unused=True)
    _return(kept)
    return _handed_back(kept, below), left


def backward_for_weights(training: Training, kept: Pass, theta: Tensor, gradient: Tensor) -> None:
    """Add a pass's gradient to the stage's vector, in place: the same bits that a whole backward adds."""
    _lend(training, kept, theta, gradient)
    torch.autograd.backward(kept.output, kept.above, inputs=kept.parameters)
    _return(kept)


def _handed_back(kept: Pass, below: Tensor | None) -> Tensor:
    if below is None:
        raise RequestError(f"stage {kept.stage}", "does not depend on its input; cut the model elsewhere")
    return on_its_own(below)


def _lend(training: Training, kept: Pass, theta: Tensor, gradient: Tensor) -> None:
    """Give parameters and gradients to leaves and graph until `_return`."""
    kept.lent.theta = theta
    values, gradients = (pieces(training.stages[kept.stage], vector).values() for vector in (theta, gradient))
    for parameter, value, piece in zip(kept.parameters, values, gradients, strict=True):
        parameter.data, parameter.grad = value, piece


def _return(kept: Pass) -> None:
    """Leave parameters and gradients to who holds them."""
    kept.lent.theta = None
    for parameter in kept.parameters:
        parameter.data, parameter.grad = parameter.new_empty(0), None


def on_its_own(tensor: Tensor) -> Tensor:
    """Give a tensor that fills its storage in the order of its indices: it is to travel, and not to keep more alive."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: how many there are decides the order of additions inside an operation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

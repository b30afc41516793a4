"""The forward and the backward of one stage, which a replay runs and a profile measures.

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
    """The stash of a forward for its backward; of the output only its place in the graph, not its values."""

    stage: int
    output: GradientEdge
    x: Tensor
    parameters: Sequence[Tensor]  # leaves, without values between forward and backward
    lent: "_Lent"
    above: Tensor | None = None  # the gradient of the output, between the two parts of a backward


class _Lent:
    """Parameters that a graph reads, which it keeps as places in a vector instead of values.

    So a device may free a version between a forward and its backward, and receive it again.
    """

    def __init__(self, theta: Tensor) -> None:
        self.theta: Tensor | None = theta

    def pack(self, tensor: Tensor) -> object:
        """Return a place in the vector, or a tensor that has other values."""
        assert self.theta is not None
        if tensor.untyped_storage()._cdata != self.theta.untyped_storage()._cdata:
            # The output itself would keep its own graph.
            return tensor.detach() if tensor.requires_grad else tensor
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, kept: object) -> Tensor:
        """Return the tensor of a place."""
        if isinstance(kept, Tensor):
            return kept
        assert self.theta is not None and isinstance(kept, tuple), "a backward has its version"
        return self.theta.as_strided(*kept)


def forward(
    training: Training, stage: int, theta: Tensor, x: Tensor, target: Tensor | None, micro_batches: int
) -> tuple[Tensor | None, Pass]:
    """Run a stage at given parameters; return its output, unless it is the last, and its stash."""
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
    """Add a pass's gradient to the stage's vector, in place; return that of its input, if a stage is before it.

    `theta` are the parameters that it reads, `above` is the gradient of the forward's output. A parameter without a
    part in the pass keeps its gradient.
    """
    _lend(training, kept, theta, gradient)
    torch.autograd.backward(kept.output, above)
    _return(kept)
    if kept.stage == 0:
        return None
    below, kept.x.grad = kept.x.grad, None
    return _handed_back(kept, below)


def backward_for_input(kept: Pass, theta: Tensor, above: Tensor | None) -> tuple[Tensor | None, Pass]:
    """Return the gradient of a pass's input, if a stage is before it, and the rest of the pass, for the weights."""
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
    """Lend parameters and gradients to leaves and graph until `_return`."""
    kept.lent.theta = theta
    values, gradients = (pieces(training.stages[kept.stage], vector).values() for vector in (theta, gradient))
    for parameter, value, piece in zip(kept.parameters, values, gradients, strict=True):
        parameter.data, parameter.grad = value, piece


def _return(kept: Pass) -> None:
    """Take parameters and gradients back from leaves and graph."""
    kept.lent.theta = None
    for parameter in kept.parameters:
        parameter.data, parameter.grad = parameter.new_empty(0), None


def on_its_own(tensor: Tensor) -> Tensor:
    """Return a tensor that fills its storage in the order of its indices: it can travel, and keeps no more alive."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: the number of threads decides the order of additions inside an operation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

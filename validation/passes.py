"""The forward and the backward of one stage, as a replay does them and as a profile measures them.

Parameters are leaves that view one vector, and their gradients views of another, into which autograd adds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cdpsim.errors import RequestError
from validation.training import Training, leaves, pieces


class Pass(NamedTuple):
    """What a forward keeps for its backward; of its output only where it is in the graph, not its values."""

    stage: int
    output: GradientEdge
    x: Tensor
    parameters: Sequence[Tensor]


def forward(
    training: Training, stage: int, theta: Tensor, x: Tensor, target: Tensor | None, micro_batches: int
) -> tuple[Tensor | None, Pass]:
    """Run a stage at some parameters; give what it sends on, if it is not the last, and what its backward needs."""
    parameters = leaves(training.stages[stage], theta)
    if stage > 0:
        x = x.detach().requires_grad_()
    y = training.apply(stage, parameters, x)
    if stage == training.n - 1:
        assert target is not None, "only the last stage has a loss"
        loss = training.loss(y, target, micro_batches)
        return None, Pass(stage, get_gradient_edge(loss), x, list(parameters.values()))
    y = _on_its_own(y)
    return y.detach(), Pass(stage, get_gradient_edge(y), x, list(parameters.values()))


def backward(training: Training, kept: Pass, above: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Add a pass's gradient to the stage's vector, in place; give that of its input, if a stage is before it.

    `above` is the gradient of what the forward sent on. What a parameter has no part in leaves its gradient as it is.
    """
    for parameter, piece in zip(kept.parameters, pieces(training.stages[kept.stage], gradient).values(), strict=True):
        parameter.grad = piece
    torch.autograd.backward(kept.output, above)
    for parameter in kept.parameters:
        parameter.grad = None
    if kept.stage == 0:
        return None
    below, kept.x.grad = kept.x.grad, None
    if below is None:
        raise RequestError(f"stage {kept.stage}", "does not depend on its input; cut the model elsewhere")
    return _on_its_own(below)


def _on_its_own(tensor: Tensor) -> Tensor:
    """Give a tensor that fills its storage in the order of its indices: it is to travel, and not to keep more alive."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

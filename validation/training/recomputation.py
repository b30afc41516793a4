"""Passes that a recipe changes: they keep their segments' inputs and compute the rest again, or keep it on the host."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .forms import storage_key
from .offload import OnHost
from .passes import Pass, Saved, backward, forward, infer
from .stages import Training


class CheckpointedLayer(nn.Module):
    """A layer that torch.utils.checkpoint computes again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        y: Tensor = checkpoint(self.layer, x, use_reentrant=False, preserve_rng_state=False)
        return y


class Checkpoints(NamedTuple):
    """The stash of a forward: the inputs of a stage's segments, and what the last stage's loss compares with."""

    stage: int
    inputs: list[Tensor]
    target: Tensor | None
    micro_batches: int


class Hosted(NamedTuple):
    """A stash whose tensors are on the host: the ones that its graph has saved, then the others."""

    kept: Pass | Checkpoints
    saved: list[Saved]
    tensors: OnHost

    def come_back(self) -> Pass | Checkpoints:
        """Return the stash, on the device again."""
        back = self.tensors.come_back()
        for tensor in reversed(_others(self.kept)):
            tensor.data = back.pop()
        while self.saved:
            self.saved.pop().value = back.pop()
        return self.kept


Stash = Pass | Checkpoints | Hosted


def run_forward(
    training: Training, stage: int, theta: Tensor, x: Tensor, target: Tensor | None, micro_batches: int
) -> tuple[Tensor | None, Stash]:
    """Run a stage at given parameters; return its output, unless it is the last, and its stash."""
    segments, y = training.segments, x
    if segments is None:
        result, kept = forward(training, stage, theta, x, target, micro_batches)
        return result, _send_away(training, kept) if training.offloads else kept
    inputs = []
    for part, values in zip(segments.of_stage(stage), segments.split(stage, theta), strict=True):
        inputs.append(y)
        y = infer(segments.training, part, values, y, target, micro_batches)
    again = Checkpoints(stage, inputs, target, micro_batches)
    return (None if stage == training.n - 1 else y), _send_away(training, again) if training.offloads else again


def _send_away(training: Training, kept: Pass | Checkpoints) -> Hosted:
    """Send a stash to the host, without the stage's buffers, which are on the device for good."""
    buffers = {storage_key(buffer) for buffer in training.buffers[kept.stage].values()}
    values = kept.lent.saved() if isinstance(kept, Pass) else {}
    values = {saved: value for saved, value in values.items() if storage_key(value) not in buffers}
    hosted = Hosted(kept, list(values), OnHost([*values.values(), *_others(kept)]))
    for saved in values:
        saved.let_go()
    for tensor in _others(kept):
        tensor.data = tensor.new_empty(0)
    return hosted


def _others(kept: Pass | Checkpoints) -> list[Tensor]:
    """Return the tensors of a stash that no graph has saved."""
    tensors = kept.inputs if isinstance(kept, Checkpoints) else [kept.x]
    return tensors if kept.target is None else [*tensors, kept.target]


def run_backward(
    training: Training, kept: Stash, theta: Tensor, above: Tensor | None, gradient: Tensor
) -> Tensor | None:
    """Do as `passes.backward`; compute what a stage has not kept again, its last segment first."""
    if isinstance(kept, Hosted):
        kept = kept.come_back()
    if isinstance(kept, Pass):
        return backward(training, kept, theta, above, gradient)
    segments = training.segments
    assert segments is not None, "only a stage of segments keeps their inputs"
    parts = segments.of_stage(kept.stage)
    values, gradients = (segments.split(kept.stage, vector) for vector in (theta, gradient))
    for part, value, piece in zip(reversed(parts), reversed(values), reversed(gradients), strict=True):
        again = forward(segments.training, part, value, kept.inputs.pop(), kept.target, kept.micro_batches)[1]
        above = backward(segments.training, again, value, above, piece)
        del again
    return above

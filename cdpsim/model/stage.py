"""A stage: the time and memory that one micro-batch takes in it; and consecutive stages merged into one."""

from collections.abc import Sequence
from math import fsum
from typing import Any

from msgspec.structs import replace

from cdpsim.errors import RequestError
from cdpsim.files import config
from cdpsim.files.config import Cost, Seconds, Size
from cdpsim.files.units import Work

STAGE_SIZES = (
    "activation",
    "kept_output",
    "forward_transient",
    "backward_transient",
    "input_transient",
    "weight_transient",
    "boundary",
    "parameters",
    "gradients",
    "optimizer",
)


class Stage(config.ConfigTable, frozen=True, kw_only=True):
    """The costs of one micro-batch in one stage: seconds or `Work`, and bytes."""

    forward: Cost
    backward: Cost
    weight_backward: Cost | None = None  # the weights' part of the backward; all of it where no gradient is sent back
    activation: Size = 0  # the stash: held from forward to backward, the stage's input included
    kept_output: Size = 0  # the part of it that is the stage's output, which the next stage has as its input
    forward_transient: Size = 0  # what a forward needs beyond the activation while it runs
    backward_transient: Size = 0  # what a backward needs beyond the activation and its output's gradient
    input_transient: Size | None = None  # the same of a split backward's input part; None: as the whole
    weight_transient: Size | None = None  # the same of its weights' part; None: as the whole
    boundary: Size = 0  # what its forward sends to the next stage, and its backward gets from there
    parameters: Size = 0
    gradients: Size | None = None  # None: as parameters
    optimizer: Size = 0
    update: Cost | None = None  # the optimizer's step, in a lane of its device; None: no time
    # Offloading, to the host of the device (`offload` gives the sizes and times of transfers between them):
    offloaded: Size = 0  # what leaves the device during the forward and comes back during the backward
    transfer: Seconds = 0.0  # the time for that, each way; 0: derived from the cluster's link
    host_optimizer: Size = 0  # optimizer state; then gradients go to the host for an update, parameters come back
    host_update: Seconds = 0.0  # the time of the optimizer's step on the host
    # Facts that only the grouping of layers and recipes use:
    data: Size = 0  # the part of the activation that a micro-batch brings: the first input, the targets
    unused_input: Size = 0  # the part of it that is its input, where no backward reads that: freed between layers
    inference: Size | None = None  # peak memory of a forward that keeps nothing; None: as of one that keeps
    factored: Size = 0  # the bytes of the row and column sums of its matrices, in the type of its parameters

    def _check(self) -> None:
        if self.kept_output > min(self.activation, self.boundary):
            raise RequestError("kept_output", "must be at most activation and boundary, of both of which it is a part")
        for name in ("data", "unused_input"):
            if getattr(self, name) > self.activation:
                raise RequestError(name, "must be at most activation, of which it is a part")
        if self.updated_on_host and (self.optimizer or self.update):
            problem = "is on the device, but host_optimizer says that updates are made on its host; keep one"
            raise RequestError("optimizer" if self.optimizer else "update", problem)
        part, whole = self.weight_backward, self.backward
        if part is None:
            return
        if isinstance(part, Work) != isinstance(whole, Work):
            raise RequestError("weight_backward", "must be a time where backward is one, and work where it is work")
        if not part <= whole:
            raise RequestError("weight_backward", "must be at most backward, of which it is a part")

    @property
    def updated_on_host(self) -> bool:
        """Whether the host of its device computes its updates."""
        return bool(self.host_optimizer)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of its gradients."""
        return self.parameters if self.gradients is None else self.gradients

    @property
    def has_input_part(self) -> bool:
        """Whether its backward has a part for its input; the backward of a model's first stage has none."""
        return self.weight_backward is None or self.weight_backward < self.backward

    @property
    def inference_bytes(self) -> int:
        """The peak memory of a forward that keeps nothing for a backward, its input included."""
        return self.activation + self.forward_transient if self.inference is None else self.inference


class Tie(config.ConfigTable, frozen=True, kw_only=True):
    """A tensor that several stages share as a part of their parameters, and its bytes in each of them."""

    stages: tuple[int, ...]
    parameters: Size
    gradients: Size | None = None  # None: as parameters
    optimizer: Size = 0
    host_optimizer: Size = 0
    factored: Size = 0

    @property
    def gradient_bytes(self) -> int:
        """The bytes of its gradient."""
        return self.parameters if self.gradients is None else self.gradients


def without_tied(stage: Stage, tie: Tie) -> Stage:
    """Return a stage without a tied tensor, because another stage counts it."""
    alike = stage.gradients is None and tie.gradients is None
    kinds = ("parameters", "optimizer", "host_optimizer", "factored")
    less = {kind: getattr(stage, kind) - getattr(tie, kind) for kind in kinds}
    return replace(stage, gradients=None if alike else stage.gradient_bytes - tie.gradient_bytes, **less)


def merge_stages(layers: Sequence[Stage], given: int) -> Stage:
    """Return one stage of consecutive ones, as one device runs it; `given` is what the stage before sends it.

    Memory that layers keep adds up, except an output that its layer keeps and that the next layer has as its input. A
    transient is the highest moment of all layers, less the memory that the stage holds then in any case: all that it
    keeps, and the gradient of its output while its backward runs.
    """
    if len(layers) == 1:
        return layers[0]
    first, last = layers[0], layers[-1]
    weights = [layer.weight_backward for layer in layers if layer.weight_backward is not None]
    backward = add_costs([layer.backward for layer in layers])
    updates = [layer.update for layer in layers if layer.update is not None]
    added = ("parameters", "optimizer", "offloaded", "host_optimizer", "data", "factored")
    return Stage(
        forward=add_costs([layer.forward for layer in layers]),
        backward=backward,
        weight_backward=None if not weights else add_costs(weights) if first.has_input_part else backward,
        kept_output=last.kept_output,
        boundary=last.boundary,
        gradients=None if all(layer.gradients is None for layer in layers) else _sum(layers, "gradient_bytes"),
        update=add_costs(updates) if updates else None,
        transfer=fsum(layer.transfer for layer in layers),
        host_update=fsum(layer.host_update for layer in layers),
        unused_input=first.unused_input,
        inference=_inference(layers, given),
        **{kind: _sum(layers, kind) for kind in added},
        **_merged_memory(layers),
    )


def _sum(layers: Sequence[Stage], kind: str) -> int:
    return sum(getattr(layer, kind) for layer in layers)


def _merged_memory(layers: Sequence[Stage]) -> dict[str, Any]:
    """Return the activation of a stage of these layers, and its transients.

    The data of all layers are there from the beginning, and until their layer's backward. An input that its layer does
    not read again is there while its forward runs, and longer only if the layer before keeps it. Of a split backward
    the input's part frees nothing; the weights' part holds what a whole one does, but for the stage's own input.
    """
    activation = forward = backward = for_input = for_weights = 0
    data = _sum(layers, "data")  # of the layers to come
    for k, layer in enumerate(layers):
        shared = layers[k - 1].kept_output if k else 0
        let_go = layer.unused_input if k and not shared else 0
        activation += layer.activation - shared - let_go
        data -= layer.data
        forward = max(forward, activation + let_go + data + layer.forward_transient)
        peak = activation + (layer.boundary if k < len(layers) - 1 else 0) + layer.backward_transient
        backward = max(backward, peak)
        for_input = max(for_input, peak - activation + _beyond_whole(layer, layer.input_transient))
        for_weights = max(for_weights, peak + (0 if k else _beyond_whole(layer, layer.weight_transient)))
    split = any(layer.input_transient is not None or layer.weight_transient is not None for layer in layers)
    return {
        "activation": activation,
        "forward_transient": forward - activation,
        "backward_transient": backward - activation,
        "input_transient": for_input * layers[0].has_input_part if split else None,
        "weight_transient": for_weights - activation if split else None,
    }


def _beyond_whole(layer: Stage, transient: int | None) -> int:
    """Return the bytes by which a part of a backward exceeds the whole backward."""
    return 0 if transient is None else transient - layer.backward_transient


def _inference(layers: Sequence[Stage], given: int) -> int:
    """Return the most that a forward holds which keeps only the first layer's input and the data."""
    data = _sum(layers, "data")
    levels = [data - layer.data + layer.inference_bytes for layer in layers]
    return max(levels[0], *(given + level for level in levels[1:]))


def add_costs(costs: Sequence[Cost]) -> Cost:
    """Return the sum of times, or of work; refuse to add a time to work."""
    kinds = {isinstance(cost, Work) for cost in costs}
    if len(kinds) > 1:
        raise RequestError("stages", "some cost work and some time, which cannot be added; give all in one of them")
    return Work(fsum(costs)) if True in kinds else fsum(costs)

"""One micro-batch through one stage: what it takes and what it holds; and stages merged into one."""

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
    """One micro-batch through one stage: seconds or `Work`, and bytes."""

    forward: Cost
    backward: Cost
    weight_backward: Cost | None = None  # the weights' part of the backward; all of it: no gradient is handed back
    activation: Size = 0  # held from forward to backward, the stage's input included
    kept_output: Size = 0  # the part of it that is the stage's output, which the next stage has as its input
    forward_transient: Size = 0  # what a forward needs beyond that while it runs
    backward_transient: Size = 0  # what a backward needs beyond that and its output's gradient
    input_transient: Size | None = None  # what the input's part of a split backward needs so; None: as the whole
    weight_transient: Size | None = None  # what the weights' part needs so; None: as the whole
    boundary: Size = 0
    parameters: Size = 0
    gradients: Size | None = None  # None: as parameters
    optimizer: Size = 0
    update: Cost | None = None  # the optimizer's step on its device, which does nothing else meanwhile; None: no time
    # Offloading, to the host of the device (`offload` gives the sizes and times of transfers between them):
    offloaded: Size = 0  # what leaves during the forward and comes back during the backward
    transfer: Seconds = 0.0  # what that takes, each way; 0: what the cluster's link makes of it
    host_optimizer: Size = 0  # optimizer state; then gradients go to the host for an update, parameters come back
    host_update: Seconds = 0.0  # what the optimizer's step takes if it is made there
    # Facts for grouping layers and for recipes alone:
    data: Size = 0  # the part of the activation that a micro-batch brings: the first input, the targets
    unused_input: Size = 0  # the part of it that is its input where no backward reads that: between layers it is let go
    inference: Size | None = None  # all that a forward which keeps nothing holds at most; None: as one that keeps
    factored: Size = 0  # what sums over its matrices' rows and columns weigh, in the type of its parameters

    def __post_init__(self) -> None:
        config.ConfigTable.__post_init__(self)
        if self.kept_output > min(self.activation, self.boundary):
            raise RequestError("kept_output", "must be at most activation and boundary, of both of which it is a part")
        if self.data > self.activation:
            raise RequestError("data", "must be at most activation, of which it is a part")
        if self.unused_input > self.activation:
            raise RequestError("unused_input", "must be at most activation, of which it is a part")
        if self.on_host and (self.optimizer or self.update):
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
    def on_host(self) -> bool:
        """Whether its updates are computed by its device's host."""
        return bool(self.host_optimizer)

    @property
    def summed(self) -> int:
        """Say what its gradients weigh."""
        return self.parameters if self.gradients is None else self.gradients

    @property
    def hands_back(self) -> bool:
        """Whether its backward has a part for its input: that of a model's first stage has none."""
        return self.weight_backward is None or self.weight_backward < self.backward

    @property
    def passing(self) -> int:
        """Say what a forward that keeps nothing for a backward holds at most, its input included."""
        return self.activation + self.forward_transient if self.inference is None else self.inference


class Tie(config.ConfigTable, frozen=True, kw_only=True):
    """One tensor that several stages have as a part of their parameters, and what it weighs in each of them."""

    stages: tuple[int, ...]
    parameters: Size
    gradients: Size | None = None  # None: as parameters
    optimizer: Size = 0
    host_optimizer: Size = 0
    factored: Size = 0

    @property
    def summed(self) -> int:
        """Say what its gradient weighs."""
        return self.parameters if self.gradients is None else self.gradients


def without_tied(stage: Stage, tie: Tie) -> Stage:
    """Take a tied tensor off a stage, because another stage counts it."""
    alike = stage.gradients is None and tie.gradients is None
    kinds = ("parameters", "optimizer", "host_optimizer", "factored")
    less = {kind: getattr(stage, kind) - getattr(tie, kind) for kind in kinds}
    return replace(stage, gradients=None if alike else stage.summed - tie.summed, **less)


def merge_stages(layers: Sequence[Stage], given: int) -> Stage:
    """Make one stage of consecutive ones, as one device runs it; `given` is what the stage before sends it.

    What layers keep adds up, but for an output that its layer keeps and that the next one has as its input. A transient
    is the highest moment of all layers less what the stage holds then in any case: all that it keeps, and while its
    backward runs, the gradient of its output.
    """
    if len(layers) == 1:
        return layers[0]
    weights = [layer.weight_backward for layer in layers if layer.weight_backward is not None]
    backward = add_costs([layer.backward for layer in layers])
    updates = [layer.update for layer in layers if layer.update is not None]
    return Stage(
        forward=add_costs([layer.forward for layer in layers]),
        backward=backward,
        weight_backward=None if not weights else add_costs(weights) if layers[0].hands_back else backward,
        kept_output=layers[-1].kept_output,
        boundary=layers[-1].boundary,
        parameters=sum(layer.parameters for layer in layers),
        gradients=None if all(layer.gradients is None for layer in layers) else sum(layer.summed for layer in layers),
        optimizer=sum(layer.optimizer for layer in layers),
        update=add_costs(updates) if updates else None,
        offloaded=sum(layer.offloaded for layer in layers),
        transfer=fsum(layer.transfer for layer in layers),
        host_optimizer=sum(layer.host_optimizer for layer in layers),
        host_update=fsum(layer.host_update for layer in layers),
        data=sum(layer.data for layer in layers),
        unused_input=layers[0].unused_input,
        inference=_inference(layers, given),
        factored=sum(layer.factored for layer in layers),
        **_held(layers),
    )


def _held(layers: Sequence[Stage]) -> dict[str, Any]:
    """What a stage of these layers keeps, and what it needs beyond that at its worst moments.

    The data of all layers are there from the beginning, and until their layer's backward. An input that its layer does
    not read again is there while its forward runs, and longer only if the layer before keeps it. Of a split backward
    the input's part lets nothing go; the weights' part does what a whole one does, but for the stage's own input.
    """
    held = forward = backward = for_input = for_weights = 0
    data = sum(layer.data for layer in layers)  # of the layers to come
    for k, layer in enumerate(layers):
        shared = layers[k - 1].kept_output if k else 0
        passing = layer.unused_input if k and not shared else 0
        held += layer.activation - shared - passing
        data -= layer.data
        forward = max(forward, held + passing + data + layer.forward_transient)
        whole = held + (layer.boundary if k < len(layers) - 1 else 0) + layer.backward_transient
        backward = max(backward, whole)
        for_input = max(for_input, whole - held + _beyond(layer, layer.input_transient))
        for_weights = max(for_weights, whole + (0 if k else _beyond(layer, layer.weight_transient)))
    split = any(layer.input_transient is not None or layer.weight_transient is not None for layer in layers)
    return {
        "activation": held,
        "forward_transient": forward - held,
        "backward_transient": backward - held,
        "input_transient": for_input * layers[0].hands_back if split else None,
        "weight_transient": for_weights - held if split else None,
    }


def _beyond(layer: Stage, transient: int | None) -> int:
    """How much more a part of a backward needs than the whole."""
    return 0 if transient is None else transient - layer.backward_transient


def _inference(layers: Sequence[Stage], given: int) -> int:
    """What a forward holds at most that keeps only what is given: the first layer's input, and the data."""
    data = sum(layer.data for layer in layers)
    levels = [data - layer.data + layer.passing for layer in layers]
    return max(levels[0], *(given + level for level in levels[1:]))


def add_costs(costs: Sequence[Cost]) -> Cost:
    """Add times, or work; one cannot be added to the other."""
    work = {isinstance(cost, Work) for cost in costs}
    if len(work) > 1:
        raise RequestError("stages", "some cost work and some time, which cannot be added; give all in one of them")
    return Work(fsum(costs)) if True in work else fsum(costs)

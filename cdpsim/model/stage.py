"""A stage: the time and memory that one micro-batch takes in it; and consecutive stages merged into one."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, chain
from math import fsum, lcm, prod
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from cdpsim.errors import RequestError
from cdpsim.files import config
from cdpsim.files.config import Cost, Name, Seconds, Size
from cdpsim.files.units import Work
from cdpsim.model.curve import OptionalCurve
from cdpsim.model.layers import Operations

# Bytes of a number; a TF32 product takes numbers in FP32 (NVIDIA A100 Tensor Core GPU Architecture, 2020).
PRECISIONS = MappingProxyType({"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1})

STAGE_SIZES = (
    "activation",
    "kept_output",
    "forward_transient",
    "backward_transient",
    "weight_activation",
    "weight_input",
    "weight_output",
    "input_transient",
    "weight_transient",
    "boundary",
    "sent",
    "parameters",
    "gradients",
    "first_gradients",
    "freed_output",
    "loss_forward",
    "loss_gradient",
    "optimizer",
    "update_loop",
    "update_foreach",
    "data",
    "unused_input",
)

# Sizes that a stage may leave out, and the size that each is then; the other ones are its whole backward_transient.
SIZE_DEFAULTS = MappingProxyType(
    {
        "gradients": "parameters",
        "first_gradients": "gradient_bytes",
        "freed_output": "kept_output",
        "weight_activation": "activation",
        "sent": "boundary",
    }
)

# Facts of a stage of which nothing says what the core of attention keeps and costs.
NO_CORE: Mapping[str, Any] = MappingProxyType({"attention_activation": 0, "attention_forward": None})


TensorShape = tuple[Annotated[int, msgspec.Meta(ge=1)], ...]


class Stage(config.ConfigTable, frozen=True, kw_only=True):
    """The costs of one micro-batch in one stage: seconds or `Work`, and bytes."""

    name: Name = ""
    forward: Cost
    backward: Cost
    weight_backward: Cost | None = None  # the weights' part of the backward; all of it where no gradient is sent back
    activation: Size = 0  # the stash: held from forward to backward, the stage's input included
    kept_output: Size = 0  # the part of it that is the stage's output, which the next stage has as its input
    forward_transient: Size = 0  # what a forward needs beyond the activation while it runs
    backward_transient: Size = 0  # what a backward needs beyond the activation and its output's gradient
    # Bytes between the parts of a split backward, with the output's gradient; None: the activation and that gradient.
    weight_activation: Size | None = None
    weight_input: Size = 0  # the part of it that is the stage's input
    weight_output: Size = 0  # the part of it that is the gradient of the stage's output
    input_transient: Size | None = None  # temporary memory of the input's part; None: as the whole
    weight_transient: Size | None = None  # the same of the weights' part; None: as the whole
    # Where the input's part lets go of nothing (torch's own pipelines):
    retained_gradients: Size | None = None  # gradients inside the stage that it leaves for the weights' part
    retained_input_transient: Size | None = None  # temporary memory
    retained_weight_transient: Size | None = None  # the same of the weights' part
    loss_activation: Size = 0  # the part of the activation that the loss keeps, which goes with the input's part
    boundary: Size = 0  # what its forward sends to the next stage, and its backward gets from there; the last's output
    sent: Size | None = None  # the bytes of that message; None: all of them
    parameters: Size = 0
    gradients: Size | None = None  # None: as parameters
    first_gradients: Size | None = None  # what they add to the peak of the backward that makes them; None: all of them
    freed_output: Size | None = None  # the part of kept_output that is free by the peak of a backward; None: all of it
    freed_gradient: Size = 0  # the part of its output's gradient that is free by then, where autograd alone has it
    # By how much the loss raises the peaks of a forward and of the first backward. FSDP2 has no parameters then.
    loss_forward: Size = 0
    loss_gradient: Size = 0
    optimizer: Size = 0
    wide_gradients: Size = 0  # its gradient in fp32, for an update that takes a narrower one so; no part of gradients
    restored: Size = 0  # what an update changes, and an estimate's is to set back; 0: the optimizer's state
    recomputes: bool = True  # whether ways to recompute single layers include it
    recomputed: Cost | None = None  # the part of the backward that computes the forward again, which MFU leaves out
    update: Cost | None = None  # the optimizer's step, in a lane of its device; None: no time
    update_bytes: Size = 0  # what that step reads and writes, in the time of its device's memory bandwidth
    update_loop: Size = 0  # what that step makes while it runs, where it goes through tensors one by one
    update_foreach: Size = 0  # the same where it goes through all at once
    outer_update: Cost | None = None  # an update by the mean of parameters, behind local steps; None: no time
    expert_parameters: Size = 0  # the part of its parameters that experts have
    partial: Size = 0  # the part of the parameters whose gradients are summed over a tensor group once a step
    group_sum: Seconds = 0.0  # the time for that; 0: derived from the cluster's links
    # Offloading, to the host of the device (`offload` gives the sizes and times of transfers between them):
    offloaded: Size = 0  # what leaves the device during the forward and comes back during the backward
    transfer: Seconds = 0.0  # the time for that, each way; 0: derived from the cluster's link
    host_optimizer: Size = 0  # optimizer state; then gradients go to the host for an update, parameters come back
    host_update: Seconds = 0.0  # the time of the optimizer's step on the host
    host_parameters: Size = 0  # the part of the parameters that the host has between their uses
    nvme: bool = False  # whether the host has its part of parameters and optimizer state on disks
    # Facts that only the grouping of layers and recipes use:
    data: Size = 0  # the part of the activation that a micro-batch brings: the first input, the targets
    unused_input: Size = 0  # the part of it that is its input, where no backward reads that: freed between layers
    inference: Size | None = None  # peak memory of a forward that keeps nothing; None: as of one that keeps
    factored: Size = 0  # the bytes of the row and column sums of its matrices, in the type of its parameters
    attention_activation: Size = 0  # the part of the activation that the core of attention keeps, but for its output
    attention_forward: Cost | None = None  # the part of the forward that is this core
    # The shapes of its parameters, in the order of the forward: for buckets, and for shares that are padded.
    tensors: tuple[TensorShape, ...] = ()
    expert_tensors: tuple[TensorShape, ...] = ()  # those of experts, which other ranks have copies of than of the rest
    # Used by superposition alone:
    curve: OptionalCurve = None  # its memory, operator by operator

    def _check(self) -> None:
        if self.kept_output > min(self.activation, self.boundary):
            raise RequestError("kept_output", "must be at most activation and boundary, of both of which it is a part")
        for name in ("data", "unused_input"):
            if getattr(self, name) > self.activation:
                raise RequestError(name, "must be at most activation, of which it is a part")
        self._check_attention()
        parts = ("first_gradients", "gradient_bytes"), ("freed_output", "kept_output"), ("freed_gradient", "boundary")
        for name, limit in (*parts, ("loss_activation", "activation")):
            if (getattr(self, name) or 0) > getattr(self, limit):
                raise RequestError(name, f"must be at most {limit.removesuffix('_bytes')}, of which it is a part")
        for name in ("host_parameters", "partial", "expert_parameters"):
            if getattr(self, name) > self.parameters:
                raise RequestError(name, "must be at most parameters, of which it is a part")
        if (self.sent or 0) > self.boundary:
            raise RequestError("sent", "must be at most boundary, of which it is a share")
        if self.updated_on_host:
            for name in ("optimizer", "update", "update_bytes"):
                if getattr(self, name):
                    problem = "is on the device, but host_optimizer says that updates are made on its host; keep one"
                    raise RequestError(name, problem)
        if self.tensors and self.parameters % self.numbers:
            problem = f"have {self.numbers} numbers in all, which do not weigh {self.parameters} bytes alike"
            raise RequestError("tensors", f"{problem}; correct either")
        self._check_parts_of_backward()
        self._check_left()
        self._check_retained()

    def _check_attention(self) -> None:
        """Refuse a core of attention that is no part of the stage."""
        core, again = self.attention_activation, self.attention_forward
        if bool(core) != (again is not None):
            missing, given = ("attention_forward", "attention_activation")[:: 1 if core else -1]
            raise RequestError(missing, f"is missing beside {given}: what the core of attention costs, and keeps")
        if core > self.activation - max(self.kept_output, self.data, self.unused_input):
            problem = "must be at most activation less kept_output, data and unused_input, which are other parts of it"
            raise RequestError("attention_activation", problem)
        if again is not None and isinstance(again, Work) != isinstance(self.forward, Work):
            raise RequestError("attention_forward", "must be a time where forward is one, and work where it is work")
        if again is not None and not again <= self.forward:
            raise RequestError("attention_forward", "must be at most forward, of which it is a part")

    def _check_left(self) -> None:
        """Refuse to leave more between the parts of a split backward than was there in the first one."""
        left = self.weight_activation or 0
        if self.weight_activation is not None and not self.has_input_part:
            problem = "is what a backward's input part leaves, but weight_backward is all of backward; leave one out"
            raise RequestError("weight_activation", problem)
        for name in ("weight_input", "weight_output"):
            if getattr(self, name) > left:
                raise RequestError(name, "must be at most weight_activation, of which it is a part")
        if self.weight_input + self.weight_output > left:
            raise RequestError(
                "weight_activation", "must be at least weight_input and weight_output together, its parts"
            )
        if self.weight_output > self.boundary:
            raise RequestError("weight_output", "must be at most boundary, the bytes of the output and of its gradient")
        transient = "backward_transient" if self.input_transient is None else "input_transient"
        if left > self.activation + self.boundary + getattr(self, transient):
            problem = f"must be at most activation, boundary and {transient} together, which were there before"
            raise RequestError("weight_activation", problem)

    def _check_retained(self) -> None:
        """Refuse retained gradients beyond what their part needs, and parts that are of no backward which retains."""
        if self.retained_gradients is None:
            for name in ("retained_input_transient", "retained_weight_transient"):
                if getattr(self, name) is not None:
                    raise RequestError(name, "is of a backward that retains gradients; give retained_gradients, too")
        elif self.retained_gradients > self.size("retained_input_transient"):
            transient = "backward" if self.retained_input_transient is None else "retained_input"
            raise RequestError("retained_gradients", f"must be at most {transient}_transient, of which it is a part")

    def _check_parts_of_backward(self) -> None:
        for name in ("weight_backward", "recomputed"):
            part = getattr(self, name)
            if part is None:
                continue
            if isinstance(part, Work) != isinstance(self.backward, Work):
                raise RequestError(name, "must be a time where backward is one, and work where it is work")
            if not part <= self.backward:
                raise RequestError(name, "must be at most backward, of which it is a part")

    def size(self, kind: str) -> int:
        """Return one of its sizes, or the size that it is where it is left out."""
        given: int | None = getattr(self, kind)
        return getattr(self, SIZE_DEFAULTS.get(kind, "backward_transient")) if given is None else given

    @property
    def mixtures(self) -> int:
        """The number of its layers with experts, each of which has two products of them."""
        return len(self.expert_tensors) // 2

    def of_experts(self, kind: str) -> int:
        """Return the part of one of its sizes, of one number for each parameter, that experts have."""
        return self.size(kind) * self.expert_parameters // max(self.parameters, 1)

    @property
    def flop(self) -> float | None:
        """The FLOP of a forward and a backward, without recomputation; None where they are times."""
        if not (isinstance(self.forward, Work) and isinstance(self.backward, Work)):
            return None
        return self.forward + self.backward - (self.recomputed or 0.0)

    @property
    def updated_on_host(self) -> bool:
        """Whether the host of its device computes its updates."""
        return bool(self.host_optimizer or self.host_parameters)

    @property
    def numbers(self) -> int:
        """The number of its parameters, where it has their shapes; else 0."""
        return sum(map(prod, self.tensors))

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
    wide_gradients: Size = 0
    restored: Size = 0
    update_bytes: Size = 0
    update_foreach: Size = 0
    host_optimizer: Size = 0
    factored: Size = 0

    @property
    def gradient_bytes(self) -> int:
        """The bytes of its gradient."""
        return self.parameters if self.gradients is None else self.gradients


# Sizes of one number for each parameter.
_OF_UPDATE = ("optimizer", "wide_gradients", "restored", "update_bytes", "update_foreach")


def without_tied(stage: Stage, tie: Tie, *, joined: bool = True) -> Stage:
    """Return a stage without a tied tensor, because another stage counts it, or it does so itself.

    Where their backwards are `joined`, what the tensor's gradient adds to the peak of the one that makes it stays, as
    working memory.
    """
    alike = stage.gradients is None and tie.gradients is None
    kinds = ("parameters", *_OF_UPDATE, "host_optimizer", "factored")
    less = {kind: getattr(stage, kind) - getattr(tie, kind) for kind in kinds}
    less["host_parameters"] = max(stage.host_parameters - tie.parameters, 0)
    gradients = stage.gradient_bytes - tie.gradient_bytes
    first = None if stage.first_gradients is None else min(stage.first_gradients, gradients)
    less["backward_transient"] = stage.backward_transient + joined * ((stage.first_gradients or 0) - (first or 0))
    tensors = _without_tensor(stage, tie.parameters)
    return replace(stage, gradients=None if alike else gradients, first_gradients=first, tensors=tensors, **less)


def count_once(stages: list[Stage], tie: Tie, own: Sequence[int], *, joined: bool = True) -> None:
    """Count a tied tensor in the first of its own stages alone.

    Where a backward goes through all of them at once, autograd keeps the gradient of the later use until it has that of
    the earlier one, and adds both up in a third.
    """
    waits = tie.gradient_bytes * (joined and knows_gradients(stages, own))
    for j in range(own[0], own[-1]):
        more = waits * (2 if j in own else 1)
        stages[j] = replace(stages[j], backward_transient=stages[j].backward_transient + more)
    for j in own[1:]:
        stages[j] = without_tied(stages[j], tie, joined=joined)


def knows_gradients(stages: Sequence[Stage], of: Sequence[int]) -> bool:
    """Return whether these stages say what their gradients add to the peaks of their backwards."""
    return all(stages[j].first_gradients is not None for j in of)


def _without_tensor(stage: Stage, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a stage's tensors without the last one of these bytes."""
    places = [k for k, shape in enumerate(stage.tensors) if prod(shape) * stage.parameters == size * stage.numbers]
    return stage.tensors[: places[-1]] + stage.tensors[places[-1] + 1 :] if places else ()


def pad_stage(stage: Stage, ranks: int, of_experts: int, padding: str) -> Stage:
    """Return a stage with its parameters padded, those of experts among other ranks, as `Model.padded` says."""
    if not stage.parameters:
        return stage
    if not stage.tensors:
        problem = f"depends on the shapes of parameters, and a tied tensor is none of the `tensors` of {stage.name!r}"
        raise RequestError("padding", f"{problem}; add it to these, or leave padding out")
    apart = stage.expert_tensors if of_experts != ranks else ()
    rest = [shape for shape in stage.tensors if shape not in apart]
    experts = _padded_numbers(apart, of_experts, padding)
    numbers = _padded_numbers(rest, ranks, padding) + experts
    sizes = {kind: getattr(stage, kind) * numbers // stage.numbers for kind in ("parameters", *_OF_UPDATE)}
    gradients = None if stage.gradients is None else stage.gradients * numbers // stage.numbers
    sizes["expert_parameters"] = stage.parameters * experts // stage.numbers
    return replace(stage, gradients=gradients, tensors=(), expert_tensors=(), **sizes)


def _padded_numbers(tensors: Sequence[TensorShape], ranks: int, padding: str) -> int:
    if padding == "rows":
        return sum(ranks * -(-shape[0] // ranks) * prod(shape[1:]) for shape in tensors)
    end = lcm(ranks, _MEGATRON_END)
    begins = sum(-(-prod(shape) // _MEGATRON_BEGIN) * _MEGATRON_BEGIN for shape in tensors)
    return -(-begins // end) * end


_MEGATRON_BEGIN, _MEGATRON_END = 64, 128  # numbers of whose multiples a tensor begins, and a bucket ends


def joined(stage: Stage) -> Stage:
    """Return a stage whose backward follows another one in autograd, which lets go of the gradient between them."""
    if not stage.freed_gradient:
        return stage
    transient = max(0, stage.backward_transient - stage.freed_gradient)
    return replace(stage, backward_transient=transient, freed_gradient=0)


def retaining(stage: Stage) -> Stage:
    """Return a stage whose first part of a split backward lets go of its loss alone, if it says what is then there.

    The working memory of the first part is then counted without the gradients that it leaves.
    """
    if stage.retained_gradients is None:
        return stage
    left = max(0, stage.retained_gradients - stage.loss_activation)
    return replace(
        stage,
        retained_gradients=left,
        weight_activation=None,
        weight_input=0,
        weight_output=0,
        input_transient=stage.size("retained_input_transient") - left,
        weight_transient=stage.retained_weight_transient,
    )


# Sizes that add up over layers.
_ADDED = (
    "parameters",
    *_OF_UPDATE,
    "offloaded",
    "host_optimizer",
    "host_parameters",
    "data",
    "factored",
    "partial",
    "expert_parameters",
)


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
    return Stage(
        name=span_name([layer.name for layer in layers]),
        forward=add_costs([layer.forward for layer in layers]),
        backward=backward,
        weight_backward=None if not weights else add_costs(weights) if first.has_input_part else backward,
        kept_output=last.kept_output,
        boundary=last.boundary,
        sent=last.sent,
        gradients=None if all(layer.gradients is None for layer in layers) else _sum(layers, "gradient_bytes"),
        transfer=fsum(layer.transfer for layer in layers),
        host_update=fsum(layer.host_update for layer in layers),
        unused_input=first.unused_input,
        attention_activation=_sum(layers, "attention_activation"),
        inference=_inference(layers, given),
        tensors=_merged_tensors(layers),
        expert_tensors=(*chain.from_iterable(layer.expert_tensors for layer in layers),),
        nvme=any(layer.nvme for layer in layers),
        recomputes=any(layer.recomputes for layer in layers),
        **{kind: _sum(layers, kind) for kind in _ADDED},
        recomputed=_added(layers, "recomputed"),
        attention_forward=_added(layers, "attention_forward"),
        update=_added(layers, "update"),
        update_loop=max(layer.update_loop for layer in layers),
        outer_update=_added(layers, "outer_update"),
        **_merged_memory(layers),
    )


def _added(layers: Sequence[Stage], kind: str) -> Cost | None:
    costs = [cost for layer in layers if (cost := getattr(layer, kind)) is not None]
    return add_costs(costs) if costs else None


def _merged_tensors(layers: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of all layers' parameters; none where a layer does not say its own, or they weigh unlike."""
    weights = {Fraction(layer.parameters, layer.numbers or 1) for layer in layers if layer.parameters}
    if len(weights) > 1 or any(layer.parameters and not layer.tensors for layer in layers):
        return ()
    return tuple(chain.from_iterable(layer.tensors for layer in layers))


def span_name(names: Sequence[str]) -> str:
    """Return the name of several layers: of the first and the last; none if either has none.

    >>> span_name(["embedding", "block", "block"]), span_name(["block", "block"]), span_name(["", "head"])
    ('embedding – block', 'block', '')
    """
    return " – ".join(dict.fromkeys([names[0], names[-1]])) if names[0] and names[-1] else ""


def _sum(layers: Sequence[Stage], kind: str) -> int:
    return sum(getattr(layer, kind) for layer in layers)


def _merged_memory(layers: Sequence[Stage]) -> dict[str, Any]:
    """Return the activation of a stage of these layers, and its transients.

    The data of all layers are there from the beginning to the end. An input that its layer does not read again is there
    while its forward runs, and longer only if the layer before keeps it.
    """
    levels = _levels(layers)
    later = [0, *accumulate(layer.data for layer in reversed(layers))][-2::-1]  # of each layer, of those behind
    forwards = [levels[k] + _lets_go(layers, k) + later[k] + layer.forward_transient for k, layer in enumerate(layers)]
    free = [layer.freed_gradient * (k < len(layers) - 1) for k, layer in enumerate(layers)]
    peaks = [
        levels[k] + _inner_boundary(layers, k) - free[k] + later[k] + layer.backward_transient
        for k, layer in enumerate(layers)
    ]
    let_go = [peak - layers[-1].boundary for peak in peaks[:-1]] + [peaks[-1] - layers[-1].freed_gradient]
    frees = layers[0].has_input_part and all(layer.weight_activation is not None for layer in layers)
    return {
        "activation": levels[-1],
        "forward_transient": max(forwards) - levels[-1],
        "backward_transient": max(peaks) - levels[-1],
        "first_gradients": first_gradients(layers, peaks),
        "freed_output": _freed_output(layers, peaks),
        "loss_forward": max(forwards) - max([*forwards[:-1], forwards[-1] - layers[-1].loss_forward]),
        "loss_gradient": _loss_gradient(layers, peaks),
        "freed_gradient": max(peaks) - max(let_go) if any(layer.freed_gradient for layer in layers) else 0,
        **(_merged_parts(layers, levels, later) if frees else _merged_whole_parts(layers, levels, peaks)),
    }


def first_gradients(layers: Sequence[Stage], peaks: Sequence[int]) -> int | None:
    """Return what the gradients of these layers add to the highest of the peaks of their first backwards.

    The last layer's backward is the first, and its gradients are there from then on.
    """
    if all(layer.first_gradients is None for layer in layers):
        return None
    highest = complete = 0
    for layer, peak in zip(reversed(layers), reversed(peaks), strict=True):
        highest = max(highest, peak + complete + layer.size("first_gradients"))
        complete += layer.gradient_bytes
    return highest - max(peaks)


def _loss_gradient(layers: Sequence[Stage], peaks: Sequence[int]) -> int:
    """Return what the last layer's loss adds to the highest of the peaks of these layers' first backwards."""
    behind = [*peaks[:-1], peaks[-1] - layers[-1].loss_gradient]
    highest, rest = (max(each) + (first_gradients(layers, each) or 0) for each in (peaks, behind))
    return highest - rest


def _freed_output(layers: Sequence[Stage], peaks: Sequence[int]) -> int | None:
    """Return how much of the output that these layers keep is free by the highest of the peaks of their backwards."""
    last = layers[-1]
    if last.freed_output is None:
        return None
    held = [peak + last.kept_output for peak in peaks[:-1]] + [peaks[-1] + last.freed_output]
    return max(held) - max(peaks)


def _levels(layers: Sequence[Stage]) -> list[int]:
    """Return what each layer and those before it keep together."""
    shared = (0, *(layer.kept_output for layer in layers))
    own = (layer.activation - shared[k] - _lets_go(layers, k) for k, layer in enumerate(layers))
    return list(accumulate(own))


def _lets_go(layers: Sequence[Stage], k: int) -> int:
    """Return the bytes of a layer's input that are there in its forward alone."""
    return layers[k].unused_input if k and not layers[k - 1].kept_output else 0


def _inner_boundary(layers: Sequence[Stage], k: int) -> int:
    """Return the bytes of the gradient of a layer's output; 0 of the last layer, whose output is the stage's."""
    return layers[k].boundary if k < len(layers) - 1 else 0


def _merged_parts(layers: Sequence[Stage], levels: Sequence[int], later: Sequence[int]) -> dict[str, Any]:
    """Return the memory of a split backward whose input's part lets go of what only it needs, layer by layer.

    The input of a layer that waits for its weights' part counts once while the layer before keeps it, too. The gradient
    of the stage's output is there in any case while the input's part runs, and so are the data of all layers.
    """
    total = sum(layer.weight_activation or 0 for layer in layers)
    for_input = total - layers[-1].weight_output  # at the end, when all that is left is there
    for_weights = retained = left = 0
    gradients = 0  # that torch's own pipelines keep, of the layers behind
    for k, layer in reversed(list(enumerate(layers))):
        behind = left
        if k < len(layers) - 1:
            behind -= layers[-1].weight_output + min(layer.kept_output, layers[k + 1].weight_input)
        boundary, own = _inner_boundary(layers, k), layer.weight_activation or 0
        level = levels[k] + later[k] + behind + boundary
        for_input = max(for_input, level + layer.size("input_transient"))
        for_weights = max(for_weights, total - left + layer.size("weight_transient"))
        retained = max(retained, gradients + boundary + layer.size("retained_input_transient"))
        left += own
        gradients += (layer.retained_gradients or 0) + (layer.weight_output if boundary else 0)
    by_torch = {
        "retained_gradients": gradients,
        "retained_input_transient": retained,
        "retained_weight_transient": max(layer.size("retained_weight_transient") for layer in layers),
        "loss_activation": min(layers[-1].loss_activation, levels[-1]),
    }
    return {
        "weight_activation": total,
        "weight_input": layers[0].weight_input,
        "weight_output": layers[-1].weight_output,
        "input_transient": for_input - levels[-1],
        "weight_transient": for_weights - total,
        **(by_torch if all(layer.retained_gradients is not None for layer in layers) else {}),
    }


def _merged_whole_parts(layers: Sequence[Stage], levels: Sequence[int], peaks: Sequence[int]) -> dict[str, Any]:
    """Return the transients of a split backward whose input's part frees nothing; whole ones have these peaks.

    The weights' part holds what a whole backward does, but for the stage's own input.
    """
    for_input = for_weights = 0
    for k, layer in enumerate(layers):
        for_input = max(for_input, _inner_boundary(layers, k) + layer.size("input_transient"))
        beyond_whole = 0 if k else layer.size("weight_transient") - layer.backward_transient
        for_weights = max(for_weights, peaks[k] + beyond_whole)
    split = any(layer.input_transient is not None or layer.weight_transient is not None for layer in layers)
    return {
        "input_transient": for_input * layers[0].has_input_part if split else None,
        "weight_transient": for_weights - levels[-1] if split else None,
    }


def _inference(layers: Sequence[Stage], given: int) -> int:
    """Return the most that a forward holds which keeps only the first layer's input and the data."""
    data = _sum(layers, "data")
    levels = [data - layer.data + layer.inference_bytes for layer in layers]
    return max(levels[0], *(given + level for level in levels[1:]))


def add_costs(costs: Sequence[Cost]) -> Cost:
    """Return the sum of times, or of work; refuse to add a time to work."""
    if all(isinstance(cost, Operations) for cost in costs):
        return Operations(each for cost in costs if isinstance(cost, Operations) for each in cost.counted)
    kinds = {isinstance(cost, Work) for cost in costs}
    if len(kinds) > 1:
        raise RequestError("stages", "some cost work and some time, which cannot be added; give all in one of them")
    return Work(fsum(costs)) if True in kinds else fsum(costs)

"""The bytes and operations of stages for one micro-batch, found without computing.

Each stage runs the forward and the backward of a replay, with fake tensors and a tracker.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cdpsim.files.notes import progress
from cdpsim.files.units import Work
from cdpsim.model import Model, Stage
from cdpsim.model.recipe import with_activations_on_host, with_optimizer_on_host
from cdpsim.model.recomputation import recompute_stage
from cdpsim.model.stage import NO_CORE

from ..training.fakes import Fakes
from ..training.forms import zeros
from ..training.optimizer import Optimizer
from ..training.passes import (
    Pass,
    Rest,
    Split,
    backward,
    backward_for_input,
    backward_for_weights,
    forward,
    infer,
    take_groups_one_by_one,
)
from ..training.stages import Training, imitate, leaves
from .attention import noting_cores
from .division import find_parts, input_form, whole_parts, zero_above, zero_inputs
from .flops import Flops
from .tracker import Reference, Tracker, is_alive, storage_of

_EVERY_MODULES = frozenset(vars(nn.Module()))


class Footprint(NamedTuple):
    """The bytes and FLOP of one micro-batch's forward and backward in a stage, as in `cdpsim.model.Stage`."""

    activation: int
    kept_output: int
    forward_transient: int
    backward_transient: int
    parts: "PartsFootprint"
    forward_flops: int
    backward_flops: int
    output: int
    first_gradients: int
    freed_output: int
    data: int
    unused_input: int
    inference: int
    attention_activation: int
    attention_flops: int
    fused_scores_flops: int  # of it, what a backward computes again

    @property
    def weight_flops(self) -> int:
        """The FLOP of the weights' part of a split backward, which goes through nothing twice."""
        return self.backward_flops - self.parts.input_flops


class PartsFootprint(NamedTuple):
    """The bytes of both parts of a split backward, and the FLOP of its input's part."""

    weight_activation: int | None  # None: the input's part frees nothing
    weight_input: int
    weight_output: int
    input_transient: int
    weight_transient: int
    retained_gradients: int | None  # of torch's own pipelines
    retained_input_transient: int | None
    retained_weight_transient: int | None
    input_flops: int


def profile_stages(training: Training, optimizer: Optimizer, split: Split = "once") -> Model:
    """Return stages as a model of cdpsim.

    Stages that are computed again or kept on the host are made by cdpsim's recipe, of plain ones and their segments.
    `split` says how often the parts of a split backward go through a stage.
    """
    whole = _profile_plain(training, replace(optimizer, on_host=False), split)
    stages, segments = list(whole.stages), training.segments
    if segments is not None:
        parts = _profile_plain(segments.training, optimizer, split).stages
        for j, stage in enumerate(whole.stages):
            own, given = segments.of_stage(j), whole.stages[j - 1].boundary if j else 0
            stages[j] = recompute_stage(stage, parts[own.start : own.stop], given, j)
    if training.offloads:
        stages = list(map(with_activations_on_host, stages))
    if optimizer.on_host:
        stages = list(map(with_optimizer_on_host, stages))
    return msgspec.structs.replace(whole, stages=tuple(stages))


def _profile_plain(training: Training, optimizer: Optimizer, split: Split) -> Model:
    keys = [likeness_key(training, stage) for stage in range(training.n)]
    found: dict[Hashable, Footprint] = {}
    with Fakes():
        imitation = imitate(training)
        for stage, key in progress(list(enumerate(keys)), "profile"):
            if key not in found:  # most stages equal others, and each takes a while
                found[key] = measure_stage(imitation, stage, split)
    return Model(stages=_model_stages(training, optimizer, [found[key] for key in keys]))


def likeness_key(training: Training, stage: int) -> Hashable:
    """Return all that a footprint depends on: stages of one key have the same."""
    return _likeness(training.stages[stage]), input_form(training, stage), stage == 0, stage == training.n - 1


def _likeness(module: nn.Module) -> Hashable:
    """Return a value that equal modules share, whatever their tensors' values; incomparable modules share none."""
    attributes = tuple(
        (name, _comparable(value))
        for name, value in vars(module).items()
        if name == "training" or name not in _EVERY_MODULES
    )
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    forms = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
    return type(module), attributes, forms, tuple((name, _likeness(child)) for name, child in module.named_children())


def _comparable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def with_unit_times(model: Model, *, split: bool = False, tensors: bool = False) -> Model:
    """Return a model with a second for each task: its seconds are slots, in which a replay's clock counts.

    Without its `tensors`, a stage's are one vector, as in a replay, and buckets are of whole stages.
    """
    unit: dict[str, Any] = {"forward": 1.0, "backward": 1.0 + split, "weight_backward": 1.0 if split else None}
    unit |= NO_CORE if tensors else {**NO_CORE, "tensors": ()}
    return msgspec.structs.replace(
        model, stages=tuple(msgspec.structs.replace(stage, recomputed=None, **unit) for stage in model.stages)
    )


def measure_stage(training: Training, stage: int, split: Split = "once") -> Footprint:
    """Run a stage's forward and backward, on tensors of a fake mode or real ones, and return their footprint."""
    tracker, flops = Tracker(), Flops()
    with flops, noting_cores(training.stages[stage], flops):
        ahead = _go_ahead(training, stage, tracker)
    forward_peak, forward_flops = tracker.peak, flops.count
    assert ahead.output is not None, "a forward has run"
    output, made = ahead.output.nbytes, storage_of(ahead.output)
    ahead = ahead._replace(output=None)
    activation = tracker.level
    data = sum(_storage_size(storage) for storage in ahead.brought)
    kept_by_cores = _kept_by_cores(flops)
    kept_output = output if is_alive(made) else 0
    above = _above(training, stage, tracker)
    tracker.reset_peak()
    before = tracker.level
    with tracker, flops:
        backward(training, ahead.kept, ahead.theta, above, ahead.gradient)
    backward_flops = flops.count - forward_flops
    backward_transient = tracker.peak - before
    return Footprint(
        activation,
        kept_output,
        forward_peak - activation,
        backward_transient,
        _measure_parts(training, stage, split),
        forward_flops,
        backward_flops,
        output,
        _runtime_transient(training, stage, is_fresh=True) - backward_transient,
        min(kept_output, _runtime_transient(training, stage, is_fresh=False) - backward_transient),
        data,
        0 if stage == 0 or _reads_input(training, stage) else training.boundary(stage - 1).nbytes,
        _inference(training, stage),
        kept_by_cores,
        flops.attention,
        flops.fused_scores,
    )


def _measure_parts(training: Training, stage: int, split: Split) -> PartsFootprint:
    """Run both parts of a split backward, and those of torch's own pipelines, and return their footprint."""
    retained = _measure_retained(training, stage) if split == "once" and stage else None
    parts = find_parts(training, stage) if retained else None
    tracker, flops = Tracker(), Flops()
    kept, theta, gradient = _go_ahead(training, stage, tracker)[1:4]
    above = _above(training, stage, tracker)
    ends = [(storage_of(tensor), tensor.nbytes) for tensor in (kept.x, above) if tensor is not None]
    tracker.reset_peak()
    before = tracker.level
    with tracker, flops:
        below, rest = backward_for_input(kept, theta, above, parts)
    input_transient = tracker.peak - before
    del below, above, kept
    left = tracker.level if retained else before
    given, back, *_ = *(nbytes * is_alive(storage) for storage, nbytes in ends), 0
    tracker.reset_peak()
    with tracker:
        backward_for_weights(training, rest, theta, gradient)
    transients = input_transient, tracker.peak - left
    if retained is None:
        return PartsFootprint(None, 0, 0, *transients, None, None, None, flops.count)
    return PartsFootprint(left, given, back, *transients, *retained, flops.count)


class _Retained(NamedTuple):
    """The memory of a backward in two parts as in torch's own pipelines, whose first part lets go of nothing."""

    gradients: int  # that the first part leaves, beside all that the forward has kept and the output's gradient
    input_transient: int  # what it needs beside these two
    weight_transient: int  # what the second part needs beside all three


def _measure_retained(training: Training, stage: int) -> _Retained:
    """Run both parts of a backward as torch's own pipelines do, which have input, output and target until the end."""
    tracker = Tracker()
    output, kept, theta, gradient, _ = _go_ahead(training, stage, tracker)
    above = _above(training, stage, tracker)
    tracker.reset_peak()
    before, saved = tracker.level, kept.lent.values()
    held = output, kept.x.detach(), kept.target
    with tracker:
        below, rest = backward_for_input(kept, theta, above, whole_parts(kept.lent.forms))
    assert isinstance(rest, Rest), "only a first stage's backward is not divided"
    del below
    gradients, input_transient = tracker.level - before, tracker.peak - before
    del kept, saved
    tracker.reset_peak()
    with tracker:
        take_groups_one_by_one(training, rest, theta, gradient)
    del held
    return _Retained(gradients, input_transient, max(0, tracker.peak - before - gradients))


def _runtime_transient(training: Training, stage: int, *, is_fresh: bool) -> int:
    """Return the transient of a backward whose gradients autograd makes; or beside which the stage's output is held."""
    tracker = Tracker()
    ahead = _go_ahead(training, stage, tracker)
    if is_fresh:
        ahead = ahead._replace(output=None)
    above = _above(training, stage, tracker)
    tracker.reset_peak()
    before = tracker.level
    with tracker:
        backward(training, ahead.kept, ahead.theta, above, None if is_fresh else ahead.gradient)
    return tracker.peak - before


class _Ahead(NamedTuple):
    """A forward that has run, and the inputs of its backward."""

    output: Tensor | None  # of the stage: of the last one, that of the model
    kept: Pass
    theta: Tensor
    gradient: Tensor
    brought: list[Reference]  # data of the micro-batch


def _go_ahead(training: Training, stage: int, tracker: Tracker) -> _Ahead:
    """Run a stage's forward on zeros."""
    theta, gradient, x, target = zero_inputs(training, stage)
    tracker.ignore([theta, gradient, *training.buffers[stage].values()])
    tracker.see([x] if target is None else [x, target])
    outputs: list[Tensor] = []

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        outputs.append(output.detach())
        return training.criterion(output, target)

    with tracker:
        y, kept = forward(replace(training, criterion=criterion), stage, theta, x, target, 1)
    brought = [storage_of(tensor) for tensor in (None if stage else x, target) if tensor is not None]
    return _Ahead(outputs[0] if y is None else y, kept, theta, gradient, brought)


def _above(training: Training, stage: int, tracker: Tracker) -> Tensor | None:
    """Return a gradient of a stage's output, of zeros."""
    above = zero_above(training, stage)
    tracker.see([] if above is None else [above])
    return above


def _storage_size(storage: Reference) -> int:
    """Return the bytes of a storage, as a tracker counts them; 0 of one that is freed."""
    alive = storage()
    return 0 if alive is None else alive.nbytes()


def _kept_by_cores(flops: Flops) -> int:
    """Return the bytes that cores of attention keep, less those that are kept instead if they are computed again."""
    kept = sum(_storage_size(storage) for storage in flops.kept_by_cores)
    again = sum(nbytes for storage, nbytes in flops.given_to_cores if not is_alive(storage))
    return max(0, kept - again)


def _inference(training: Training, stage: int) -> int:
    """Run a stage's forward without a backward, and return its peak memory."""
    tracker = Tracker()
    theta, _, x, target = zero_inputs(training, stage)
    tracker.ignore([theta, *training.buffers[stage].values()])
    tracker.see([x] if target is None else [x, target])
    with tracker:
        infer(training, stage, theta, x, target, 1)
    return tracker.peak


def _reads_input(training: Training, stage: int) -> bool:
    """Return whether a stage's backward reads its input: whether autograd saves it."""
    x = zeros(training.boundary(stage - 1), training.device).requires_grad_()
    storages: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        storages.add(tensor.untyped_storage()._cdata)
        return tensor.detach()

    theta = zeros(training.parameters(stage), training.device)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = training.apply(stage, leaves(training.stages[stage], theta), x)
    del y
    return x.untyped_storage()._cdata in storages


def factored(stage: nn.Module) -> int:
    """Return the bytes of sums over rows and columns of a stage's parameters, a vector counting as it is.

    Of a tensor of more than two dimensions the last two are rows and columns, as in torch.optim.Adafactor.
    """
    return sum(map(factored_size, stage.parameters()))


def factored_size(parameter: nn.Parameter) -> int:
    """Return the bytes of sums over rows and columns of one parameter."""
    return parameter.element_size() * (parameter.numel() if parameter.dim() < 2 else _sums(parameter))


def _sums(parameter: nn.Parameter) -> int:
    *_, rows, columns = parameter.shape
    return parameter.numel() // max(1, columns) + parameter.numel() // max(1, rows)


def _model_stages(training: Training, optimizer: Optimizer, footprints: Sequence[Footprint]) -> tuple[Stage, ...]:
    stages = []
    for j, footprint in enumerate(footprints):
        parameters = training.parameters(j)
        parts = 1 + (j > 0)  # of a backward: the first stage has no part for its input
        stages.append(
            Stage(
                forward=Work(max(1, footprint.forward_flops)),  # no task takes no time
                backward=Work(max(parts, footprint.backward_flops)),
                recomputed=Work(footprint.fused_scores_flops) if footprint.fused_scores_flops else None,
                weight_backward=Work(max(1, min(footprint.weight_flops, footprint.backward_flops + 1 - parts))),
                activation=footprint.activation,
                kept_output=footprint.kept_output,
                forward_transient=footprint.forward_transient,
                backward_transient=footprint.backward_transient,
                weight_activation=footprint.parts.weight_activation,
                weight_input=footprint.parts.weight_input,
                weight_output=footprint.parts.weight_output,
                input_transient=footprint.parts.input_transient,
                weight_transient=footprint.parts.weight_transient,
                retained_gradients=footprint.parts.retained_gradients,
                retained_input_transient=footprint.parts.retained_input_transient,
                retained_weight_transient=footprint.parts.retained_weight_transient,
                boundary=footprint.output,
                parameters=parameters.nbytes,
                first_gradients=footprint.first_gradients,
                freed_output=footprint.freed_output if footprint.kept_output else None,
                optimizer=optimizer.nbytes(training.parts(j)),
                data=footprint.data,
                unused_input=footprint.unused_input,
                inference=footprint.inference,
                factored=factored(training.stages[j]),
                tensors=tuple(tuple(own.shape) for own in training.stages[j].parameters() if own.shape),
                attention_activation=footprint.attention_activation,
                attention_forward=Work(footprint.attention_flops) if footprint.attention_activation else None,
            )
        )
    return tuple(stages)

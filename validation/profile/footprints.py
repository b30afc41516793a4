"""The bytes and operations of stages for one micro-batch, found without computing.

Each stage runs the forward and the backward of a replay, with fake tensors and a tracker.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from cdpsim.files.progress import progress
from cdpsim.files.units import Work
from cdpsim.model import Model, Stage
from validation.profile.flops import Flops
from validation.profile.tracker import Reference, Tracker, is_alive, storage_of
from validation.training.forms import zeros
from validation.training.optimizer import Optimizer
from validation.training.passes import (
    Pass,
    backward,
    backward_for_input,
    backward_for_weights,
    forward,
    on_its_own,
)
from validation.training.stages import Training, imitate, leaves

_EVERY_MODULES = frozenset(vars(nn.Module()))


class Footprint(NamedTuple):
    """The bytes and FLOP of one micro-batch's forward and backward in a stage, as in `cdpsim.model.Stage`."""

    activation: int
    kept_output: int
    forward_transient: int
    backward_transient: int
    input_transient: int
    weight_transient: int
    forward_flops: int
    backward_flops: int
    weight_flops: int
    data: int
    unused_input: int
    inference: int


def profile_stages(training: Training, optimizer: Optimizer, granularity: int = 1) -> Model:
    """Return stages as a model of cdpsim; each storage in memory counts a multiple of `granularity` bytes."""
    keys = [_key(training, stage) for stage in range(training.n)]
    found: dict[Hashable, Footprint] = {}
    with FakeTensorMode():
        imitation = imitate(training)
        for stage, key in progress(list(enumerate(keys)), "profile"):
            if key not in found:  # most stages equal others, and each takes a while
                found[key] = measure_stage(imitation, stage, granularity)
    return Model(stages=_model_stages(training, optimizer, [found[key] for key in keys]))


def _key(training: Training, stage: int) -> Hashable:
    """Return all that a footprint depends on: stages of one key have the same."""
    given = training.boundary(stage - 1) if stage else training.inputs.form
    return _likeness(training.stages[stage]), given, stage == 0, stage == training.n - 1


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


def with_unit_times(model: Model, *, split: bool = False) -> Model:
    """Return a model with a second for each task: its seconds are slots, in which a replay's clock counts."""
    unit = {"forward": 1.0, "backward": 1.0 + split, "weight_backward": 1.0 if split else None}
    return msgspec.structs.replace(
        model, stages=tuple(msgspec.structs.replace(stage, **unit) for stage in model.stages)
    )


def measure_stage(training: Training, stage: int, granularity: int = 1) -> Footprint:
    """Run a stage's forward and backward once, on tensors of a fake mode or real ones, and return their footprint.

    All values are zeros, which are tokens and labels too.
    """
    tracker, flops = Tracker(granularity), Flops()
    with flops:
        ahead = _go_ahead(training, stage, tracker)
    forward_peak, forward_flops = tracker.peak, flops.count
    sent = None if ahead.sent is None else storage_of(ahead.sent)
    ahead = ahead._replace(sent=None)
    activation = tracker.level
    data = sum(_storage_size(storage, granularity) for storage in ahead.brought)
    kept_output = training.boundary(stage).nbytes if sent is not None and is_alive(sent) else 0
    above = _above(training, stage, tracker)
    tracker.reset_peak()
    before = tracker.level
    with tracker, flops:
        backward(training, ahead.kept, ahead.theta, above, ahead.gradient)
    backward_flops = flops.count - forward_flops
    input_transient, weight_transient, input_flops = _measure_parts(training, stage, granularity)
    return Footprint(
        activation,
        kept_output,
        forward_peak - activation,
        tracker.peak - before,
        input_transient,
        weight_transient,
        forward_flops,
        backward_flops,
        backward_flops - input_flops,
        data,
        0
        if stage == 0 or _reads_input(training, stage)
        else _granular(training.boundary(stage - 1).nbytes, granularity),
        _inference(training, stage, granularity),
    )


def _measure_parts(training: Training, stage: int, granularity: int) -> tuple[int, int, int]:
    """Run both parts of a split backward; return the transients of each, and the FLOP of the input's part."""
    tracker, flops = Tracker(granularity), Flops()
    _, kept, theta, gradient, _ = _go_ahead(training, stage, tracker)
    above = _above(training, stage, tracker)
    tracker.reset_peak()
    before = tracker.level
    with tracker, flops:
        below, kept = backward_for_input(kept, theta, above)
    input_transient = tracker.peak - before
    del below, above
    tracker.reset_peak()
    with tracker:
        backward_for_weights(training, kept, theta, gradient)
    return input_transient, tracker.peak - before, flops.count


class _Ahead(NamedTuple):
    """A forward that has run, and the inputs of its backward."""

    sent: Tensor | None
    kept: Pass
    theta: Tensor
    gradient: Tensor
    brought: list[Reference]  # data of the micro-batch


def _go_ahead(training: Training, stage: int, tracker: Tracker) -> _Ahead:
    """Run a stage's forward on zeros."""
    parameters, last = training.parameters(stage), training.n - 1
    theta, gradient = zeros(parameters, training.device), zeros(parameters, training.device)
    tracker.ignore([theta, gradient, *training.buffers[stage].values()])
    x = zeros(training.boundary(stage - 1) if stage else training.inputs.form, training.device)
    target = zeros(training.targets.form, training.device) if stage == last else None
    tracker.see([x] if target is None else [x, target])
    with tracker:
        y, kept = forward(training, stage, theta, x, target, 1)
    brought = [storage_of(tensor) for tensor in (None if stage else x, target) if tensor is not None]
    return _Ahead(y, kept, theta, gradient, brought)


def _above(training: Training, stage: int, tracker: Tracker) -> Tensor | None:
    """Return a gradient of a stage's output, of zeros."""
    if stage == training.n - 1:
        return None
    above = zeros(training.boundary(stage), training.device)
    tracker.see([above])
    return above


def _storage_size(storage: Reference, granularity: int) -> int:
    """Return the bytes of a storage, as a tracker counts them; 0 of one that is freed."""
    alive = storage()
    return 0 if alive is None else _granular(alive.nbytes(), granularity)


def _granular(nbytes: int, granularity: int) -> int:
    return -(-nbytes // granularity) * granularity


def _inference(training: Training, stage: int, granularity: int) -> int:
    """Run a stage's forward without a backward, and return its peak memory."""
    tracker, last = Tracker(granularity), training.n - 1
    theta = zeros(training.parameters(stage), training.device)
    tracker.ignore([theta, *training.buffers[stage].values()])
    x = zeros(training.boundary(stage - 1) if stage else training.inputs.form, training.device)
    target = zeros(training.targets.form, training.device) if stage == last else None
    tracker.see([x] if target is None else [x, target])
    with torch.no_grad(), tracker:
        y = training.apply(stage, leaves(training.stages[stage], theta), x)
        y = on_its_own(y) if target is None else training.loss(y, target, 1)
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
                weight_backward=Work(max(1, min(footprint.weight_flops, footprint.backward_flops + 1 - parts))),
                activation=footprint.activation,
                kept_output=footprint.kept_output,
                forward_transient=footprint.forward_transient,
                backward_transient=footprint.backward_transient,
                input_transient=footprint.input_transient,
                weight_transient=footprint.weight_transient,
                boundary=training.boundary(j).nbytes if j < training.n - 1 else 0,
                parameters=parameters.nbytes,
                optimizer=optimizer.nbytes(parameters),
                data=footprint.data,
                unused_input=footprint.unused_input,
                inference=footprint.inference,
                factored=factored(training.stages[j]),
            )
        )
    return tuple(stages)

"""The bytes and operations of stages for one micro-batch, and of a whole model, found without computing.

Each stage runs the forward and the backward of a replay, with fake tensors and a tracker.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cdpsim.files.notes import progress
from cdpsim.files.units import Work
from cdpsim.model import Model, Stage
from cdpsim.model.recipe import rows_and_columns, with_activations_on_host, with_optimizer_on_host
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
from .division import find_parts, input_form, whole_parts, zero_above, zero_inputs
from .flops import Flops, noting_cores
from .tracker import Reference, Tracker, address_of, is_alive, storage_of

_EVERY_MODULES = frozenset(vars(nn.Module()))


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
    found: dict[Hashable, Stage] = {}
    with Fakes():
        imitation = imitate(training)
        for stage, key in progress(list(enumerate(keys)), "profile"):
            if key not in found:  # most stages equal others, and each takes a while
                found[key] = measure_stage(imitation, stage, optimizer, split)
    return Model(stages=tuple(found[key] for key in keys))


def likeness_key(training: Training, stage: int) -> Hashable:
    """Return all that a footprint depends on: stages of one key have the same."""
    return _likeness(training.stages[stage]), input_form(training, stage), stage == 0, stage == training.n - 1


def is_block(training: Training, stages: Sequence[Stage], k: int) -> bool:
    """Return whether a layer is no embedding of tokens and no head: a last one without attention, unlike the others."""
    alike = k > 0 and _likeness(training.stages[k]) == _likeness(training.stages[k - 1])
    is_end = (k == 0 and training.inputs.classes) or k == training.n - 1 > 0
    return bool(stages[k].attention_activation or alike or not is_end)


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


def measure_stage(training: Training, stage: int, optimizer: Optimizer, split: Split = "once") -> Stage:
    """Run a stage's forward and backward, on tensors of a fake mode or real ones, and return their bytes and FLOP."""
    tracker, flops = Tracker(), Flops()
    with flops, noting_cores(training.stages[stage], flops):
        ahead = _go_ahead(training, stage, tracker)
    forward_peak, forward_flops = tracker.peak, flops.count
    assert ahead.output is not None, "a forward has run"
    boundary, made = ahead.output.nbytes, storage_of(ahead.output)
    ahead = ahead._replace(output=None)
    activation = tracker.level
    data = sum(_storage_size(storage) for storage in ahead.brought)
    # Cores of attention that are computed again keep their inputs instead.
    again = sum(nbytes for storage, nbytes in flops.given_to_cores if not is_alive(storage))
    kept_by_cores = max(0, sum(map(_storage_size, flops.kept_by_cores)) - again)
    kept_output = boundary if is_alive(made) else 0
    above, before = _above(training, stage, tracker)
    with tracker, flops:
        backward(training, ahead.kept, ahead.theta, above, ahead.gradient)
    backward_flops, transient = flops.count - forward_flops, tracker.peak - before
    parts, input_flops = _measure_parts(training, stage, split)
    both = 1 + (stage > 0)  # parts of a backward: the first stage has none for its input
    held = _transients_as_in_torch(training, stage, holds_output=True)[0]
    fresh, behind = _transients_as_in_torch(training, stage, is_fresh=True)
    together = transient
    if above is not None:
        together = _transients_as_in_torch(training, stage, joined=True)[0] - boundary
    freed = min(kept_output, held - transient)
    return Stage(
        forward=Work(max(1, forward_flops)),  # no task takes no time
        backward=Work(max(both, backward_flops)),
        recomputed=Work(flops.fused_scores) if flops.fused_scores else None,
        weight_backward=Work(max(1, min(backward_flops - input_flops, backward_flops + 1 - both))),
        activation=activation,
        kept_output=kept_output,
        forward_transient=forward_peak - activation,
        backward_transient=transient,
        boundary=boundary,
        parameters=training.parameters(stage).nbytes,
        first_gradients=fresh - transient,
        loss_forward=forward_peak - (ahead.before_loss or forward_peak),
        loss_gradient=fresh - behind,
        freed_output=freed if kept_output else None,
        freed_gradient=max(0, transient - together),
        optimizer=optimizer.nbytes(training.parts(stage)),
        data=data,
        unused_input=0 if stage == 0 or _reads_input(training, stage) else training.boundary(stage - 1).nbytes,
        inference=_inference(training, stage),
        factored=sum(map(factored_size, training.stages[stage].parameters())),
        tensors=tuple(tuple(own.shape) for own in training.stages[stage].parameters() if own.shape),
        attention_activation=kept_by_cores,
        attention_forward=Work(flops.attention) if kept_by_cores else None,
        **parts,
    )


def _measure_parts(training: Training, stage: int, split: Split) -> tuple[dict[str, Any], int]:
    """Run both parts of a split backward, and those of torch's own pipelines.

    Return their bytes, by the names of a stage's fields, and the FLOP of the input's part.
    """
    retained = _measure_retained(training, stage) if split == "once" and stage else {}
    parts = find_parts(training, stage) if retained else None
    tracker, flops = Tracker(), Flops()
    kept, theta, gradient = _go_ahead(training, stage, tracker)[1:4]
    above, before = _above(training, stage, tracker)
    ends = [(storage_of(tensor), tensor.nbytes) for tensor in (kept.x, above) if tensor is not None]
    with tracker, flops:
        below, rest = backward_for_input(kept, theta, above, parts)
    input_transient = tracker.peak - before
    del below, above, kept
    left = tracker.level if retained else before
    given, back, *_ = *(nbytes * is_alive(storage) for storage, nbytes in ends), 0
    tracker.reset_peak()
    with tracker:
        backward_for_weights(training, rest, theta, gradient)
    found: dict[str, Any] = {"input_transient": input_transient, "weight_transient": tracker.peak - left, **retained}
    if retained:  # else the input's part frees nothing
        found |= {"weight_activation": left, "weight_input": given, "weight_output": back}
    return found, flops.count


def _measure_retained(training: Training, stage: int) -> dict[str, Any]:
    """Run both parts of a backward as torch's own pipelines do, which have input, output and target until the end.

    Return their bytes, by the names of a stage's fields.
    """
    tracker = Tracker()
    output, kept, theta, gradient, *_ = _go_ahead(training, stage, tracker)
    above, before = _above(training, stage, tracker)
    saved, held = kept.lent.values(), (output, kept.x.detach(), kept.target)
    with tracker:
        below, rest = backward_for_input(kept, theta, above, whole_parts(kept.lent.forms))
    assert isinstance(rest, Rest), "only a first stage's backward is not divided"
    del below
    gradients, input_transient = tracker.level - before, tracker.peak - before
    del kept, saved  # torch takes the loss off its graph, of which what is behind the last parameter ends
    left = tracker.level - before
    tracker.reset_peak()
    with tracker:
        take_groups_one_by_one(training, rest, theta, gradient)
    del held
    return {
        "retained_gradients": gradients,
        "retained_input_transient": input_transient,
        "retained_weight_transient": max(0, tracker.peak - before - left),
        "loss_activation": gradients - left,
    }


def _transients_as_in_torch(
    training: Training, stage: int, *, is_fresh: bool = False, holds_output: bool = False, joined: bool = False
) -> tuple[int, int]:
    """Return the transient of a backward: one whose gradients autograd makes, or beside which the output is held.

    And the part of it that comes behind the loss, when the gradient has reached the stage's output. Where the backward
    is joined to the next stage's, the gradient of the output counts: a copy, which autograd alone has.
    """
    tracker, peaks = Tracker(), list[int]()

    def reached(gradient: Tensor) -> None:
        peaks.append(tracker.peak)
        tracker.reset_peak()

    ahead = _go_ahead(training, stage, tracker, reached)
    if not holds_output:
        ahead = ahead._replace(output=None)
    above, before = _above(training, stage, tracker)
    edge = ahead.kept.output
    if joined:
        edge.node.register_prehook(
            lambda given: tuple(own.clone() if k == edge.output_nr else own for k, own in enumerate(given))
        )
    with tracker:
        backward(training, ahead.kept, ahead.theta, above, None if is_fresh else ahead.gradient)
    return max([tracker.peak, *peaks]) - before, tracker.peak - before


class _Ahead(NamedTuple):
    """A forward that has run, and the inputs of its backward."""

    output: Tensor | None  # of the stage: of the last one, that of the model
    kept: Pass
    theta: Tensor
    gradient: Tensor
    brought: list[Reference]  # data of the micro-batch
    before_loss: int = 0  # the highest level of the last stage's forward until its loss is made


def _go_ahead(
    training: Training, stage: int, tracker: Tracker, reached: Callable[[Tensor], None] | None = None
) -> _Ahead:
    """Run a stage's forward; `reached` is called in the backward when the gradient has reached the model's output."""
    theta, gradient, x, target = zero_inputs(training, stage)
    tracker.ignore([theta, gradient, *training.buffers[stage].values()])
    tracker.see([x] if target is None else [x, target])
    made: list[Any] = [None, 0]

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        made[:] = output.detach(), tracker.peak
        if reached is not None:
            output.register_hook(reached)
        return training.criterion(output, target)

    with tracker:
        y, kept = forward(replace(training, criterion=criterion), stage, theta, x, target, 1)
    brought = [storage_of(tensor) for tensor in (None if stage else x, target) if tensor is not None]
    return _Ahead(made[0] if y is None else y, kept, theta, gradient, brought, made[1])


def _above(training: Training, stage: int, tracker: Tracker) -> tuple[Tensor | None, int]:
    """Return the gradient of a stage's output, and the level with it, where new peaks start."""
    above = zero_above(training, stage)
    tracker.see([] if above is None else [above])
    return above, tracker.reset_peak()


def _storage_size(storage: Reference) -> int:
    alive = storage()
    return 0 if alive is None else alive.nbytes()


def _inference(training: Training, stage: int) -> int:
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
        storages.add(address_of(tensor))
        return tensor.detach()

    theta = zeros(training.parameters(stage), training.device)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = training.apply(stage, leaves(training.stages[stage], theta), x)
    del y
    return address_of(x) in storages


def factored_size(parameter: nn.Parameter) -> int:
    """Return the bytes of sums over rows and columns of a parameter, as in torch.optim.Adafactor."""
    return parameter.element_size() * rows_and_columns(tuple(parameter.shape))

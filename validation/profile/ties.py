"""Tensors that several layers of a model share: separated to be profiled, counted once in the profile."""

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy

from torch import nn

from cdpsim.model import Model, Tie
from cdpsim.model.stage import without_tied

from ..training.forms import Form
from ..training.optimizer import Optimizer
from ..training.stages import Architecture, Training
from .footprints import factored_size


def separate_layers(architecture: Architecture) -> Architecture:
    """Return layers with parameters of their own, and which of these are one tensor in the model."""
    seen: dict[int, list[nn.Parameter]] = {}
    layers = []
    for layer in architecture.layers:
        given = list(layer.parameters())
        own = deepcopy(layer) if any(id(parameter) in seen for parameter in given) else layer
        for parameter, copy in zip(given, own.parameters(), strict=True):
            seen.setdefault(id(parameter), []).append(copy)
        layers.append(own)
    shared = [group for group in seen.values() if len(group) > 1]
    return architecture._replace(layers=layers, tied=[*architecture.tied, *shared])


def tie_stages(model: Model, training: Training, tied: Sequence[Sequence[nn.Parameter]], optimizer: Optimizer) -> Model:
    """Return a profile with its stages tied; tensors tied within one stage count once there."""
    stage_of = {id(parameter): j for j, stage in enumerate(training.stages) for parameter in stage.parameters()}
    stages, ties = list(model.stages), defaultdict[tuple[int, ...], list[Tie]](list)
    for group in tied:
        places = [stage_of[id(parameter)] for parameter in group]
        tie = _weighed(group[0], optimizer)
        for k, j in enumerate(places):
            stages[j] = without_tied(stages[j], tie) if j in places[:k] else stages[j]
        ties[tuple(sorted(set(places)))].append(tie)
    across = []
    for of, parts in sorted(ties.items()):
        sums = {kind: sum(getattr(tie, kind) for tie in parts) for kind in ("parameters", "optimizer", "factored")}
        across += [Tie(stages=of, **sums)] * (len(of) > 1)
    return Model(name=model.name, stages=tuple(stages), tied=tuple(across))


def _weighed(parameter: nn.Parameter, optimizer: Optimizer) -> Tie:
    """Return the bytes of one tensor and of its state, without the count of steps, which belongs to the stage."""
    state = optimizer.nbytes([Form(tuple(parameter.shape), parameter.dtype)])
    return Tie(
        stages=(),
        parameters=parameter.nbytes,
        optimizer=state - optimizer.nbytes([Form((0,), parameter.dtype)]),
        factored=factored_size(parameter),
    )

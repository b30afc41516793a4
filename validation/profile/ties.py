"""Tensors that several layers of a model share: counted once in its profile."""

from collections import defaultdict

from torch import nn

from cdpsim.model import Model, Tie
from cdpsim.model.stage import without_tied

from ..training.forms import Form
from ..training.optimizer import Optimizer
from ..training.stages import Training
from .footprints import factored_size


def tie_stages(model: Model, training: Training, optimizer: Optimizer) -> Model:
    """Return a profile with its stages tied; tensors tied within one stage count once there."""
    stages, ties = list(model.stages), defaultdict[tuple[int, ...], list[Tie]](list)
    for (first, number), *others in training.tied:
        places = [first, *(j for j, _ in others)]
        tie = _weighed([*training.stages[first].parameters()][number], optimizer)
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

"""What optimizers of torch make while they update, measured by the allocator, against what recipes say."""

from math import prod

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from cdpsim.model import Model, Recipe, Stage
from cdpsim.model.recipe import apply_recipe
from validation.profile.allocations import allocation_windows, without_collections
from validation.training.optimizer import OPTIMIZERS

SHAPES = ((64, 48), (48,), (300, 40), (290, 40), (7,), (100, 90), (90,))
OF_SCALARS = 64  # bytes of numbers of Python that torch makes tensors of
SQUARES = 4 * 48  # of the last vector's gradient, to which a variable of adafactor's loop still refers


def made_by_torch(kind: str, *, foreach: bool) -> int:
    """The most that the second update makes beside parameters, gradients and state."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = OPTIMIZERS[kind].over(parameters)
    optimizer.param_groups[0]["foreach"] = foreach
    windows = allocation_windows(torch.device("cpu"))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with without_collections(), windows:
        windows.mark()
        optimizer.step()
        windows.mark()
    return windows.peaks[0]


@pytest.mark.parametrize("how", ["loop", "foreach"])
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "adafactor"])
def test_updates_make_what_torchs_do(kind: str, how: str) -> None:
    weights = 4 * sum(map(prod, SHAPES))
    stage = Stage(forward=1.0, backward=2.0, parameters=weights, tensors=SHAPES)
    (trained,) = apply_recipe(Model(stages=(stage,), precision="fp32"), Recipe(optimizer=kind)).stages
    beside = SQUARES if (kind, how) == ("adafactor", "loop") else 0
    made = made_by_torch(kind, foreach=how == "foreach") - beside
    assert 0 <= made - trained.size(f"update_{how}") <= OF_SCALARS

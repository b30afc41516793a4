"""Rates of a run in its steady state: in all, of each rank, and of what the ranks could compute at their peak."""

from functools import lru_cache
from typing import Any

from cdpsim.model import Model
from cdpsim.model.layers import Layers
from cdpsim.request import Request


def rates_of_run(request: Request, rate: float, devices: int) -> dict[str, Any]:
    """Return all rates of a run with this rate of micro-batches, and what share of the devices' peak they take.

    Where a group of ranks is a device, its FLOP and its peak are those of one of them.
    """
    model = request.model
    samples = rate * model.samples if model.samples else None
    tokens = samples * model.tokens if samples and model.tokens else None
    peak, useful, computed = request.cluster.peak_flops(devices, model.precision), _useful(model), model.computed_flop
    return {
        "micro_batch_rate": rate,
        "sample_rate": samples,
        "sample_time": 1 / samples if samples else None,
        "token_rate": tokens,
        "per_device": (tokens or samples or rate) / (devices * model.mesh.tensor),
        "mfu": useful * rate / peak if useful and peak else None,
        "hfu": computed * rate / peak if computed and peak else None,
        "flops": computed * rate / devices if computed else None,
    }


def _useful(model: Model) -> float | None:
    """Return the FLOP of a micro-batch that one rank has to compute; copies and padding in a group are left out."""
    if model.layers is None or model.mesh.tensor == 1:
        return model.flop
    return _whole_flop(model.layers, model.samples or 1, model.precision) / model.mesh.tensor


@lru_cache(maxsize=64)
def _whole_flop(layers: Layers, samples: int, precision: str) -> float:
    """Return the FLOP of a model of layers on one rank."""
    flop = Model.of_layers(layers, samples=samples, precision=precision).flop
    assert flop is not None, "layers are of operations"
    return flop

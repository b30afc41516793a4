"""Cuts of a model's layers into stages: by FLOP, bytes or time, or at given layers."""

from time import perf_counter_ns, thread_time_ns

import torch
from torch import Tensor

from cdpsim.errors import RequestError
from cdpsim.model import Cuts, Stage, balanced, check_stages

from ..training.forms import Form, zeros
from ..training.optimizer import Optimizer
from ..training.passes import backward, forward, one_thread
from ..training.stages import Architecture, Training, cut
from .division import Inputs
from .footprints import profile_stages
from .partition import PARTITIONS, authors, read_cuts

TIMED_PASSES = 3  # of a layer that is timed, after one to warm up


def find_cuts(
    architecture: Architecture, n: int | None, partition: str, optimizer: Optimizer, device: str = "cpu"
) -> Cuts:
    """Return the cuts of a model's layers into n stages by one of `PARTITIONS`, or in a text such as "3,7,12".

    The memory of a stage is that of its layers; an output that its layer keeps counts once where both that layer and
    the next are in the stage.
    """
    count = len(architecture.layers)
    if partition not in PARTITIONS:
        cuts = read_cuts(partition, count)
        if n not in (None, len(cuts) + 1):
            problem = f"{partition!r} makes {len(cuts) + 1} stages; leave -n out, or give other cuts"
            raise RequestError(f"n={n}", problem)
        return cuts
    if n is None:
        raise RequestError("partition", f"{partition} makes as many stages as one asks for; give -n too")
    check_stages(n, count)
    layers = cut(architecture, range(1, count), device=device)
    if partition == "time":
        return balanced(layer_times(layers), n)
    rows = profile_stages(layers, optimizer).stages
    if partition == "memory":
        kept = [row.kept_output for row in rows]
        return balanced([_layer_weight(row) - row.kept_output for row in rows], n, closing=kept)
    if partition == "authors":
        return authors([int(row.forward) for row in rows], n)
    return balanced([int(row.forward) + int(row.backward) for row in rows], n)


def _layer_weight(stage: Stage) -> int:
    """Return the bytes of a stage for one micro-batch and for good: gradients are as large as parameters."""
    return stage.activation + 2 * stage.parameters + stage.optimizer


def layer_times(layers: Training) -> list[int]:
    """Return forward and backward times of each layer by itself, in nanoseconds of one thread, on random values."""
    with one_thread():
        return [_layer_time(layers, j) for j in range(layers.n)]


def _layer_time(layers: Training, j: int) -> int:
    (theta, gradient, x, target), above = usual_values(layers, j)
    times = []
    for _ in range(1 + TIMED_PASSES):
        begin = device_clock(layers.device)
        _, kept = forward(layers, j, theta, x, target, 1)
        backward(layers, kept, theta, above, gradient)
        times.append(device_clock(layers.device) - begin)
    return min(times[1:])


def usual_values(layers: Training, j: int) -> tuple[Inputs, Tensor | None]:
    """Return random values for a layer's tasks, and for the gradient of its output; the last layer has none."""
    last = j == layers.n - 1
    inputs = Inputs(
        theta=_noise(layers.parameters(j), layers.device),
        gradient=zeros(layers.parameters(j), layers.device),
        x=_noise(layers.boundary(j - 1), layers.device) if j else layers.input(0, 0),
        target=layers.target(0, 0) if last else None,
    )
    return inputs, None if last else _noise(layers.boundary(j), layers.device)


def _noise(form: Form, device: torch.device) -> Tensor:
    """Return values of a usual size: a processor may take longer for very small numbers and nan."""
    return zeros(form, device).normal_(std=0.02)


def device_clock(device: torch.device) -> int:
    """Return a time without that of other programs: of this thread; on a GPU of the wall, when its work is done."""
    if device.type == "cpu":
        return thread_time_ns()
    torch.cuda.synchronize(device)
    return perf_counter_ns()

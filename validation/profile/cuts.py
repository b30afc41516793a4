"""Cuts of a model's layers into stages: by FLOP, bytes or time, or at given layers."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from time import perf_counter_ns, thread_time_ns

import torch
from torch import Tensor

from cdpsim.errors import RequestError, choose
from cdpsim.model import Cuts, balanced, check_stages

from ..training.forms import Form, zeros
from ..training.optimizer import Optimizer
from ..training.passes import backward, forward, one_thread
from ..training.stages import Architecture, Training, cut
from .division import Inputs
from .footprints import profile_stages

PARTITIONS = ("flops", "authors", "time", "memory")
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
        weights = [row.activation + 2 * row.parameters + row.optimizer for row in rows]  # gradients are as parameters
        return balanced([weight - own for weight, own in zip(weights, kept, strict=True)], n, closing=kept)
    if partition == "authors":
        return authors([int(row.forward) for row in rows], n)
    return balanced([int(row.forward) + int(row.backward) for row in rows], n)


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


def authors(flops: Sequence[int], n: int) -> Cuts:
    """Return the cuts of the paper's authors: a stage ends before the layer with which the sum reaches its share.

    Their code (`equisum_partition`) has an entry for each parameter tensor, a bias counting as the square root of its
    module's FLOP; here an entry is a layer. It can leave a stage empty, which is refused.

    >>> authors([1, 1, 1, 1, 4], 2)
    (3,)
    """
    check_stages(n, len(flops))
    sums = list(accumulate(flops))
    share = sums[-1] // n
    cuts = tuple(bisect_left(sums, k * share) for k in range(1, n))
    for stage, (begin, end) in enumerate(pairwise((0, *cuts, len(flops)))):
        if begin == end:
            problem = f"the authors' heuristic leaves stage {stage} of {n} without a layer; take flops, or other cuts"
            raise RequestError("partition", problem)
    return cuts


def read_cuts(text: str, layers: int) -> Cuts:
    """Return the cuts in an option's value, such as "3,7,12".

    >>> read_cuts("3,7,12", 14)
    (3, 7, 12)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        choose("partition", text, (*PARTITIONS, "3,7,12"))  # which refuses it
    cuts = tuple(map(int, words))
    if any(begin >= end for begin, end in pairwise((0, *cuts, layers))):
        problem = f"cuts must increase from 1 at least to {layers - 1} at most: there are {layers} layers"
        raise RequestError(f"partition {text!r}", problem)
    return cuts

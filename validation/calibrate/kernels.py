"""Times of a layer's operations, and the shares of a device's peaks that explain them; a whole layer beside these.

Operations are those of `cdpsim.model.layers`, each alone: forwards, and backwards that compute something. They are of
layers half and twice as wide as the one that is timed whole, to which nothing is fitted; passes are also of few tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn import functional as F

from cdpsim.cluster import Cluster, Devices
from cdpsim.cluster.topology import Kernels
from cdpsim.model import Model
from cdpsim.model.layers import CORE, PASS, PRODUCT, Kernel, Layers, Operation, layer
from cdpsim.model.splitting import NO_MESH, Sizes, sizes_on, split
from cdpsim.timing.costs import machine_of, with_operation_times

from ..profile.command import PRECISIONS, TYPES
from ..profile.fits import fit_line, fit_speed
from ..ranks.member import Member
from ..report.schema import Collective, KernelFit, OperationTime, OverlapTimes
from .summaries import round_measured
from .timings import WARM_UP, begin_all_reduce, time_call, wait_for_all

# The layer that is timed whole. On a GPU, operations of a small one wait for their launches.
LAYERS = {
    "cpu": Layers(layers=1, width=384, heads=6, length=256, vocabulary=1),
    "cuda": Layers(layers=1, width=2048, heads=16, length=2048, vocabulary=1),
}
SAMPLES = 4
COPY, WHOLE = "copy", "layer"  # kinds beside those of operations
_COPIED = {"cpu": 2**26, "cuda": 2**28}  # bytes: more than caches hold
_REPETITIONS, _LEAST, _MOST_IN_A_ROW = 5, 2e-3, 64

Make = Callable[..., Tensor]  # a tensor of a size


def time_kernels(member: Member, shape: Layers, dtype: str, busy: int) -> list[OperationTime]:
    """Time operations, a large copy and a whole layer in the first `busy` ranks at once, while the others wait."""
    members = tuple(range(busy))
    member.transport.make_groups([members])
    if member.rank >= busy:
        return []
    wait_for_all(member, members)
    make: Make = partial(torch.randn, dtype=TYPES[dtype], device=member.device, requires_grad=True)
    half, double = (structs.replace(shape, width=k * shape.width // 2, heads=k * shape.heads // 2) for k in (1, 4))
    found = [each for own in (half, double) for each in _operations(own, make)]
    found += [each for each in _operations(structs.replace(half, length=1), make) if each.kind == PASS]
    size = _COPIED[member.device.type]
    there, here = (torch.zeros(size, dtype=torch.uint8, device=member.device) for _ in range(2))
    found += _times_of(Kernel(COPY, moved=2.0 * size), 1, shape, "large copy", partial(there.copy_, here), [])
    return [*found, *_times_of(Kernel(WHOLE), 1, shape, WHOLE, *_whole_layer(shape, make))]


def time_overlap(member: Member, shape: Layers, dtype: str, ranks: int, size: int) -> OverlapTimes:
    """Time a product of a layer half as wide, an all-reduce of a size, and both together, in all ranks at once."""
    members = tuple(range(ranks))
    member.transport.make_groups([members])
    begin = begin_all_reduce(member, members, size)
    make: Make = partial(torch.randn, dtype=TYPES[dtype], device=member.device)
    product = partial(F.linear, make(SAMPLES * shape.length, shape.width // 2), make(2 * shape.width, shape.width // 2))

    def both() -> None:
        pending = begin()
        product()
        pending.wait()

    actions: tuple[Callable[[], object], ...] = (product, lambda: begin().wait(), both)
    found: list[list[float]] = []
    for _ in range(WARM_UP + 2 * _REPETITIONS):
        found.append([])
        for action in actions:
            wait_for_all(member, members)
            found[-1].append(time_call(member.device, action)[1].seconds)
    return OverlapTimes(size, *np.median(found[WARM_UP:], 0).tolist())


def size_beside(operations: Sequence[OperationTime], all_reduce: Collective) -> int:
    """Return the bytes of an all-reduce of all ranks that takes longer than the widest product of the narrow layer."""
    narrow = min(each.width for each in operations)
    product = max(each.seconds for each in operations if each.kind == PRODUCT and each.width == narrow)
    most = max(point.ranks for point in all_reduce.points)
    sizes = {point.size: point.seconds for point in all_reduce.points if point.ranks == most}
    return min((size for size, seconds in sizes.items() if seconds > 2 * product), default=max(sizes))


def hidden_share(times: OverlapTimes) -> float:
    """Return the share of a product's time in which an exchange beside it is hidden."""
    return min(1.0, max(0.0, (times.product + times.exchange - times.both) / times.product))


def _operations(shape: Layers, make: Make) -> Iterator[OperationTime]:
    """Time each operation of a layer."""
    sizes = sizes_on(shape, SAMPLES, NO_MESH)
    for each in layer(shape, make(1).element_size()):
        ((row, _),) = split([each], sizes, NO_MESH).forward
        assert isinstance(row, Kernel), "one rank exchanges nothing"
        yield from _times_of(row, 2.0 if each.kind == PRODUCT else each.again, shape, *_in_torch(each, sizes, make))


def _in_torch(each: Operation, sizes: Sizes, make: Make) -> tuple[str, Callable[[], Tensor], list[Tensor]]:
    """Return an operation's name, its forward, and the tensors that its backward finds gradients of, if any."""
    given = [make(sizes.shape(value.dims)) for value in each.inputs]
    weights: list[Any] = [make(sizes.shape(dims)) for dims in each.weights]
    if each.kind == PRODUCT:
        return "product", partial(F.linear, given[0], *weights), [*given, *weights]
    if each.kind == CORE:
        q, k, v = (make(sizes.shape("bnsd")) for _ in range(3))
        return "core", partial(F.scaled_dot_product_attention, q, k, v, is_causal=True), [q, k, v]
    # The backwards of a copy and of a sum only hand gradients on.
    if each.output in each.inputs:
        return "copy", given[0].unflatten(-1, (3, *sizes.shape("nd"))).permute(2, 0, 3, 1, 4).contiguous, []
    if len(given) > 1:
        return "sum", partial(torch.add, *given), []
    if weights:
        return "norm", partial(F.layer_norm, given[0], sizes.shape("h"), *weights), [*given, *weights]
    return "gelu", partial(F.gelu, given[0]), given


def _whole_layer(shape: Layers, make: Make) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return the forward of torch's own layer, and the tensors that its backward finds gradients of."""
    x, sizes = make((SAMPLES, shape.length, shape.width)), (shape.width, shape.heads, shape.sizes["f"])
    kind: dict[str, Any] = {"device": x.device, "dtype": x.dtype}
    whole = nn.TransformerEncoderLayer(*sizes, 0.0, F.gelu, batch_first=True, norm_first=True, **kind)
    mask = nn.Transformer.generate_square_subsequent_mask(shape.length, **kind)
    return partial(whole, x, mask, is_causal=True), [x, *whole.parameters()]


def _times_of(
    row: Kernel, again: float, shape: Layers, name: str, forward: Callable[[], Tensor], given: list[Tensor]
) -> Iterator[OperationTime]:
    """Time a forward, and a backward, which is `again` such operations."""
    output, facts = forward(), (row.kind, shape.width, SAMPLES * shape.length)
    costs, device = (row.done * row.flop, row.moved), output.device
    yield OperationTime(name, *facts, 1, *costs, _seconds_of(device, forward))
    if given:
        back = partial(torch.autograd.grad, output, given, torch.randn_like(output), retain_graph=True)
        yield OperationTime(f"{name} backward", *facts, again, *costs, _seconds_of(device, back))


def _seconds_of(device: torch.device, action: Callable[[], object]) -> float:
    """Return the seconds of a call, as one of so many in a row that the clock sees them."""
    action()
    count = max(1, min(_MOST_IN_A_ROW, int(_LEAST / time_call(device, action)[1].seconds)))

    def in_a_row() -> None:
        for _ in range(count):
            action()

    return float(np.median([time_call(device, in_a_row)[1].seconds for _ in range(_REPETITIONS)])) / count


def fit_kernels(
    ranks: Sequence[list[OperationTime]], reached: float, meeting: float, overlaps: Sequence[OverlapTimes]
) -> KernelFit:
    """Return the peaks, and the shares of these that explain operations best.

    The peaks are those of the fastest product and of a large copy, or what stages and passes reach if that is more.
    """
    pooled = [(own[0], float(np.median([each.seconds for each in own]))) for own in zip(*ranks, strict=True)]
    timed = [structs.replace(each, seconds=seconds) for each, seconds in pooled]
    done: dict[str, list[tuple[float, float, float]]] = {each.kind: [] for each in timed}
    for each in timed:
        work = each.flop if each.kind in (PRODUCT, CORE) else each.moved_bytes
        done[each.kind].append((each.times * work, each.seconds, each.times))
    line, (copied, took, _) = fit_line(*zip(*done[PASS], strict=True)), done[COPY][0]
    products, core = (fit_speed(*list(zip(*done[kind], strict=True))[:2]) for kind in (PRODUCT, CORE))
    peak = max(reached, *(flop / seconds for flop, seconds, _ in done[PRODUCT]))
    memory = max(copied / took, line.bandwidth if isfinite(line.bandwidth) else 0.0)
    shares = min(1.0, products / peak), min(1.0, core / peak), min(1.0, line.bandwidth / memory)
    overlap = OverlapTimes(*np.median([structs.astuple(each) for each in overlaps], 0).tolist())
    overlap = structs.replace(overlap, size=overlaps[0].size)
    return KernelFit(timed, peak, memory, *shares, line.latency, meeting, hidden_share(overlap), overlap)


def meeting_time(all_reduce: Collective) -> float:
    """Return what the smallest messages take beyond the fastest algorithm on the link; 0 if that explains all."""
    errors = map(min, zip(*(fit.relative_errors for fit in all_reduce.on_link.values()), strict=True))
    points = all_reduce.points
    beyond = [-p.seconds * error for p, error in zip(points, errors, strict=True) if p.size == points[0].size]
    return max(0.0, float(np.median(beyond)))


def devices_of(reached: float, fit: KernelFit | None) -> Devices:
    """Return the devices of a cluster file; what stages reach is `achieved` of the peak."""
    reached = round_measured(reached)
    if fit is None:
        return Devices(speed=reached)
    peak, memory = max(reached, round_measured(fit.speed)), round_measured(fit.memory_bandwidth)
    names = ("products", "core", "passes", "launch", "meet", "beside")
    kernels = Kernels(**{name: round_measured(getattr(fit, name)) for name in names})
    return Devices(speed=peak, achieved=reached / peak, memory_bandwidth=memory, kernels=kernels)


def held_against(fit: KernelFit, devices: Devices, shape: Layers, dtype: str) -> KernelFit:
    """Return a fit with the error of what cdpsim predicts for such devices, of the whole layer there and back."""
    model = Model.of_layers(shape, samples=SAMPLES, precision=PRECISIONS[dtype])
    machine = machine_of(model, Cluster(devices=(devices,)), "best", 1)
    assert machine is not None, "the devices have a speed"
    stage = with_operation_times(model, machine, splits=False).stages[1]
    took = sum(each.seconds for each in fit.operations if each.kind == WHOLE)
    return structs.replace(fit, layer_relative_error=float(stage.forward + stage.backward) / took - 1)

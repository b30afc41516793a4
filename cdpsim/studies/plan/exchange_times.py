"""The least times in which data ranks exchange what a device has: gradients before updates, parameters behind them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Floats, Ints
from cdpsim.program import Op, Program
from cdpsim.program.collectives import DEFAULT
from cdpsim.request import Request
from cdpsim.request.sharing import usual_reduce
from cdpsim.timing.collective_times import fastest_algorithm


class ExchangeTimes(NamedTuple):
    """Seconds that a step takes at least beyond its tasks, by device of those that are looked at; -inf: not known."""

    behind_end: Floats  # behind the device's last task, until it begins the next step
    behind_sums: Floats  # behind the start of the first task that completes gradients of a stage
    once: float  # of the busiest device's streams in a step
    each: float  # and for each micro-batch


class DeviceSizes(NamedTuple):
    """The bytes that each of some devices exchanges, and the time of its updates."""

    device: Ints
    stages: Ints  # how many it has
    gradients: Ints
    parameters: Ints
    least_gradients: Ints  # of its smallest stage, as the next column
    least_parameters: Ints
    update: Floats


def sizes_of_devices(
    request: Request, program: Program, duration: Floats, devices: Ints, *, beside: bool
) -> DeviceSizes:
    """Return what some devices of a program exchange; tensors that stages share go apart.

    Where updates stand `beside` the tasks of their devices, a step may begin after the first of them.
    """
    model, tasks = request.timed_model, program.tasks
    gradients = np.array([stage.gradient_bytes for stage in model.stages], dtype=np.int64)
    parameters = np.array([stage.parameters for stage in model.stages], dtype=np.int64)
    for tie in model.tied:
        for stage in tie.stages:
            gradients[stage] -= tie.gradient_bytes
    updates = np.arange(program.compute, len(tasks))
    rows = []
    for device in devices.tolist():
        stages = np.unique(tasks.stage[: program.compute][tasks.device[: program.compute] == device])
        mine = updates[(tasks.device[updates] == device) & (tasks.step[updates] == 1)]
        takes = duration[mine]
        in_lane = not beside and (tasks.lane[mine] >= 0).all()
        update = takes.sum() if in_lane else takes.min(initial=np.inf)
        sums, kept = np.maximum(gradients[stages], 0), parameters[stages]
        sizes = sums.sum(), kept.sum(), sums.min(), kept.min()
        rows.append((device, len(stages), *sizes, update if len(mine) else 0.0))
    columns = list(zip(*rows, strict=True))
    return DeviceSizes(*map(np.array, columns))


def exchange_times(
    request: Request, sizes: DeviceSizes, places: int, copies: Sequence[int], ranks: tuple[int, int, int]
) -> ExchangeTimes:
    """Return the least exchanges of a case on (replicas, shard, zero) data ranks of so many devices each.

    `copies` are the devices of a rank on which a stage is beside the one that is looked at: then more take part, and
    nothing is known of devices.
    """
    replicas, shard, zero = ranks
    none = np.full(len(sizes.device), -np.inf)
    if replicas * shard == 1 or request.in_slots or copies:
        return ExchangeTimes(none, none, 0.0, 0.0)
    one_place, given = request.schedule.order.one_place, request.given
    whole_stages = zero < 3 and not (one_place or given.get("buckets") or given.get("by_layer"))
    stream, chain, last, gathered = _collectives(request, sizes, places, ranks)
    when = _when(request, zero)
    if when == "each":
        return ExchangeTimes(none, none, 0.0, float(stream.max()))
    once = float((stream + gathered[0]).max())
    if any(stage.updated_on_host for stage in request.timed_model.stages):
        return ExchangeTimes(none, none, once, 0.0)
    anew = update = sizes.update / (shard if zero else 1)
    if whole_stages:  # of several stages, one may be gathered early, while others are updated; cases do not say how
        anew = np.where(sizes.stages == 1, update + gathered[1], np.maximum(update, gathered[1]))
    behind = (chain if whole_stages else stream) + anew
    if when == "end":
        return ExchangeTimes(behind, none, once, 0.0)
    # The last task of a device gives the last gradients of a stage, whose sum all its updates wait for.
    return ExchangeTimes(last + anew if whole_stages else none, behind, once, 0.0)


def _when(request: Request, zero: int) -> str:
    """Return when gradients are summed; what is asked for is left out where a stage of ZeRO does not go with it."""
    asked = request.given["reduce"]
    if asked == "each" and zero == 1:  # whose sums are shares of whole gradients
        asked = None
    return str(asked or usual_reduce(request.schedule, zero))


def _collectives(
    request: Request, sizes: DeviceSizes, places: int, ranks: tuple[int, int, int]
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the times of each device's sums of gradients, and of its gathers: of all, and of the smallest stage.

    Sums take a stream so long, and their chain: where shares are summed again, the last ones wait for the first sums.
    Then comes the time of the sums of the smallest stage alone.
    """
    replicas, shard, zero = ranks
    found = []
    for device, _, whole, parameters, least, least_parameters, _ in zip(*map(np.ndarray.tolist, sizes), strict=True):
        way = request, device, places
        if not (shard > 1 and zero):
            together, last = (
                _collective_time(*way, Op.ALL_REDUCE, replicas * shard, 1, size) for size in (whole, least)
            )
            found.append((together, together, last, 0.0, 0.0))
            continue
        inside, first = (_collective_time(*way, Op.REDUCE_SCATTER, shard, 1, size) for size in (whole, least))
        across, last = (
            _collective_time(*way, Op.ALL_REDUCE, replicas, shard, size // shard) for size in (whole, least)
        )
        every, one = (_collective_time(*way, Op.ALL_GATHER, shard, 1, size) for size in (parameters, least_parameters))
        found.append((max(inside, across), max(inside + last, across + first), first + last, every, one))
    stream, chain, alone, *gathered = np.array(found).reshape(-1, 5).T
    return stream, chain, alone, np.array(gathered)


def _collective_time(request: Request, device: int, places: int, op: Op, members: int, apart: int, size: int) -> float:
    """Return the time of a collective of so many bytes, of data ranks that are so far apart."""
    if members == 1 or not size:
        return 0.0
    ranks = device + places * apart * np.arange(members)
    cluster = request.cluster.sized(int(ranks[-1]) + 1)
    name = request.collective or ("best" if cluster.is_joined and not cluster.is_free else DEFAULT)
    return fastest_algorithm(op, name, cluster, ranks, size)[1]

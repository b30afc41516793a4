"""The times of a model's stages on a device: work over its speed, bytes over a bandwidth.

Times that stages state stand. They are seconds, or int64 slots in the slot model.

Activations (Rhu et al. 2016, vDNN, section III) leave while their stage computes, and come back while its backward
does. A task takes the longer of computing and `latency + bytes / bandwidth`: vDNN waits for both streams at the end of
a layer.

An update on the host (Ren et al. 2021, ZeRO-Offload, section 4) takes `latency + gradients / bandwidth + step + latency
+ parameters / bandwidth`, 2 + 2 bytes of each parameter in mixed precision, while its device computes on. ZeRO-Offload
hides a part of the first behind the backward that makes the gradients; here they leave once whole. Parameters that stay
on the host do not come back. Of what is on disks, the optimizer state comes to the host first and goes back, over the
`nvme` link, and new parameters go there. Of what is split among ranks, each rank's links carry its share.

Every device has a link and a share of its host of its own, on which updates are made one after another. What crosses
for tasks and what crosses for updates do not slow each other down, nor do those of several lanes.
"""

from fractions import Fraction
from functools import lru_cache
from math import fsum

import numpy as np
from msgspec.structs import replace

from cdpsim.cluster import Cluster
from cdpsim.cluster.topology import Link
from cdpsim.errors import RequestError
from cdpsim.files.units import MOST_SECONDS, Work
from cdpsim.model import Model
from cdpsim.model.stage import Stage
from cdpsim.numeric.columns import Times
from cdpsim.schedules.placement import Widths, pyramid_widths


def reached(cluster: Cluster, count: int, model: Model) -> list[float | None]:
    """Return the speed of each of the first `count` devices in the model's precision; a model of times needs none."""
    return cluster.speeds(count, model.precision if _has_work(model) else None)


@lru_cache(maxsize=64)
def _has_work(model: Model) -> bool:
    """Return whether any time of a model is given as work, which a device's speed turns into time."""
    return any(
        isinstance(cost, Work)
        for stage in model.stages
        for cost in (stage.forward, stage.backward, stage.update, stage.outer_update)
    )


@lru_cache(maxsize=256)
def times_of_stages(model: Model, speed: float | None, bandwidth: float | None, splits: bool, shard: int) -> Times:
    """Return the times of stages on a device, whose memory has that bandwidth, a row for each kind of task.

    A forward or backward takes at least as long as a transfer to or from the host meanwhile. Ranks share an update.
    """
    weights, backward = _times(model, "weight_backward", speed), pass_times(model, "backward", speed)
    update = _update_times(model, speed, bandwidth)
    if shard > 1:
        update = update / shard
    forward, outer = pass_times(model, "forward", speed), _times(model, "outer_update", speed)
    return np.stack([update, forward, backward - weights if splits else backward, weights, outer])


def pass_times(model: Model, kind: str, speed: float | None) -> Times:
    """Return the times of each stage's forward, or of its whole backward."""
    times, transfers = _times(model, kind, speed), [stage.transfer for stage in model.stages]
    return np.maximum(times, transfers) if any(transfers) else times


def pyramid_of(model: Model, m: int, speed: float | None) -> Widths:
    """Return how many devices each stage needs where a device ends one pass before the next."""
    times = zip(*(pass_times(model, kind, speed).tolist() for kind in ("forward", "backward")), strict=True)
    return pyramid_widths(m, [Fraction(forward) + Fraction(backward) for forward, backward in times])


def roofline_time(work: float, moved: float, speed: float, bandwidth: float) -> float:
    """Return the time of operations, or of the bytes that they move if that is longer."""
    return max(work / speed, moved / bandwidth)


def _update_times(model: Model, speed: float | None, bandwidth: float | None) -> Times:
    """Return the time of each stage's update, on its device or on the host; 0 where it is not given."""
    times = _times(model, "update", speed)
    if model.moves_bytes:
        assert bandwidth is not None, "the cluster has been asked for it"
        times = times + np.array([stage.update_bytes for stage in model.stages]) / bandwidth
    hosts = [stage.host_update if stage.updated_on_host else 0.0 for stage in model.stages]
    return times + hosts if any(hosts) else times


def _times(model: Model, field: str, speed: float | None) -> Times:
    """Return the time of one of the stages' costs; 0 where it is not given."""
    costs = [getattr(stage, field) or 0 for stage in model.stages]
    if model.is_unit:
        return np.array(costs, np.int64)
    times = np.array(costs, np.float64)
    work = np.fromiter((isinstance(cost, Work) for cost in costs), np.bool_, model.n)
    if speed is None and work.any():
        problem = f"{field} is work; give --cluster with a speed, or times"
        raise RequestError(f"stage {work.argmax()}", problem)
    if speed is not None:
        times[work] /= speed
    if (slow := times > MOST_SECONDS).any():
        problem = f"{field} takes more than {MOST_SECONDS:g} s at {speed:g} FLOP/s; check both"
        raise RequestError(f"stage {slow.argmax()}", problem)
    return times


def with_transfer_times(model: Model, host: Link | None, nvme: Link | None = None, ranks: int = 1) -> Model:
    """Return the model with the times of what its stages offload, over the link between a device and its host.

    Times that stages give themselves stand: a `transfer` in place of the link's; without a link, a `host_update` is the
    whole time of an update. Of an update that so many `ranks` share, each takes that part of its time.
    """
    if not any(stage.offloaded or stage.updated_on_host for stage in model.stages):
        return model
    stages = (_with_times(stage, host, nvme, ranks, j) for j, stage in enumerate(model.stages))
    return replace(model, stages=tuple(stages))


def _with_times(stage: Stage, host: Link | None, nvme: Link | None, ranks: int, j: int) -> Stage:
    """Return stage j with the times of its transfers."""
    if stage.nvme and nvme is None:
        problem = "has something on disks, and nothing says how long that takes to read"
        raise RequestError(f"stage {j}", f"{problem}; give a --cluster with an [nvme] link")
    if stage.host_parameters and host is None:
        problem = "has its parameters on its host, and nothing says how long they take to cross"
        raise RequestError(f"stage {j}", f"{problem}; give a --cluster with a [host] link")
    needs_transfer = bool(stage.offloaded and not stage.transfer)
    if host is None:
        if needs_transfer or (stage.updated_on_host and not stage.host_update):
            problem = "has something on its host, and nothing says how long that takes to cross"
            remedy = "give a --cluster with a [host] link, or times in the model's file"
            raise RequestError(f"stage {j}", f"{problem}; {remedy}")
        return stage
    if needs_transfer:
        stage = replace(stage, transfer=host.latency + stage.offloaded / host.reached)
    if stage.updated_on_host:
        moved = [(host, stage.gradient_bytes), (host, stage.parameters - stage.host_parameters)]
        if nvme is not None and stage.nvme:
            moved += [(nvme, stage.host_optimizer)] * 2 + [(nvme, stage.host_parameters)]
        moves = [ranks * link.latency + size / link.reached for link, size in moved if size]
        stage = replace(stage, host_update=fsum([stage.host_update, *moves]))
    return stage

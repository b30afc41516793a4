"""Transfers between a device and its host, and the time that they take.

Activations (Rhu et al. 2016, vDNN, section III) leave while their stage computes, and come back while its backward
does. A forward is over when both are, as vDNN waits for both streams at the end of a layer; so is a backward,
which fetches what its next layer needs while one computes. A task takes the longer of computing and `latency + bytes /
bandwidth`, the forward towards the host, the backward from it.

Updates on the host (Ren et al. 2021, ZeRO-Offload, section 4): gradients go there, new parameters come back, 2 + 2
bytes of each parameter in mixed precision. An update takes both ways and the host's own step between them, one after
another, while its device computes on: `latency + gradients / bandwidth + step + latency + parameters / bandwidth`.
ZeRO-Offload hides a part of the first behind the backward that makes the gradients; here they leave once whole.

Parameters on a host stay there after its update, and are fetched for each use, one task earlier than they are
gathered. What is on disks comes to the host first, over the `nvme` link of each device's share of them: parameters for
each use, and for an update the optimizer state, which goes back there with the new parameters. Of what is split among
ranks, each rank's links carry its share.

Every device has a link and a share of its host of its own, on which updates are made one after another. What crosses
for tasks and what crosses for updates do not slow each other down, nor do those of several lanes. Hosts reach each
other's memory: where a stage is updated by one device after another, its optimizer state is there for all of them.
"""

from math import fsum

from msgspec.structs import replace

from cdpsim.cluster.topology import Link
from cdpsim.errors import RequestError
from cdpsim.model import Model
from cdpsim.model.stage import Stage


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

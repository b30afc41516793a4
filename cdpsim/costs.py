"""The only place that turns a task or a message into time."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdpsim.cluster import Cluster
from cdpsim.collectives import algorithm
from cdpsim.columns import Ints
from cdpsim.model import Model
from cdpsim.program import Kind, Op, Program
from cdpsim.units import Work

Times = NDArray[Any]  # integers or floats


@dataclass(frozen=True, eq=False)
class Costs:
    """What a program's nodes and releases take: slots (integers) under unit costs, else seconds."""

    duration: Times  # of each node
    rounds: Ints  # of each message
    release: Times  # of the program's releases, in their order


def price(program: Program, model: Model, cluster: Cluster, collective: str) -> Costs:
    """Cost every node of a program; all-reduces use the algorithm named `collective`."""
    cluster = cluster.sized(program.devices)
    exact = model.is_unit and cluster.is_free
    tasks = program.tasks
    compute = len(program.lane_tasks)
    duration = np.zeros(program.nodes, dtype=np.int64 if exact else np.float64)
    duration[:compute] = _compute_times(program, model, cluster)
    carry, rounds = _message_times(program, cluster, collective)
    if not exact:
        duration[len(tasks) :] = carry
    release = np.empty(len(program.releases), dtype=duration.dtype)
    for k, (task, share) in enumerate(program.releases):
        own_pass = duration[task : task + program.phases].sum()
        whole = own_pass * share.numerator
        release[k] = whole // share.denominator if exact else whole / share.denominator
    return Costs(duration, rounds, release)


def reached(cluster: Cluster, count: int, model: Model) -> list[float | None]:
    """Give the speed of each of the first `count` devices in the model's precision; a model of times needs none."""
    works = any(isinstance(stage.forward, Work) or isinstance(stage.backward, Work) for stage in model.stages)
    return cluster.speeds(count, getattr(model, "precision", "") if works else None)


def _compute_times(program: Program, model: Model, cluster: Cluster) -> Times:
    """Forward and backward times of all compute tasks; a device's speed turns work into time."""
    compute = len(program.lane_tasks)
    stage, device = program.tasks.stage[:compute], program.tasks.device[:compute]
    forward = program.tasks.kind[:compute] == Kind.F
    speeds = reached(cluster, program.devices, model)
    duration = np.empty(compute, dtype=np.int64 if model.is_unit else np.float64)
    for speed in dict.fromkeys(speeds):
        rows: slice | Ints = slice(None)
        if len(set(speeds)) > 1:
            rows = np.flatnonzero(np.array([s == speed for s in speeds])[device])
        times = np.stack([model.backward_time(speed), model.forward_time(speed)])
        duration[rows] = times[forward[rows].astype(np.int8), stage[rows]]
    return duration


def _message_times(program: Program, cluster: Cluster, collective: str) -> tuple[Times, Ints]:
    """Latency and size over bandwidth for each message; for a collective, of each of its rounds."""
    messages = program.messages
    rounds = np.ones(len(messages), dtype=np.int32)
    times = np.zeros(len(messages))
    single = np.flatnonzero(messages.op == Op.P2P)
    latency, bandwidth = cluster.link_costs(messages.src[single], messages.dst[single])
    times[single] = latency + messages.size[single] / bandwidth
    together = np.flatnonzero(messages.op != Op.P2P)
    links = [cluster.group_link(members) for members in program.groups]
    for op in np.unique(messages.op[together]).tolist():
        how = algorithm(Op(op), collective)
        rows = together[messages.op[together] == op]
        for group in np.unique(messages.dst[rows]).tolist():
            mine = rows[messages.dst[rows] == group]
            k = len(program.groups[group])
            slowest, narrowest = links[group]
            rounds[mine] = how.rounds(k)
            times[mine] = how.rounds(k) * (slowest + messages.size[mine] / how.parts(k) / narrowest)
    return times, rounds

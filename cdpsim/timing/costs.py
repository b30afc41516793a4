"""The only place that turns a task or a message into time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.files.units import Work
from cdpsim.model import Model
from cdpsim.numeric.calendars import Calendar
from cdpsim.numeric.columns import Ints, Times
from cdpsim.program import Op, Program
from cdpsim.program.collectives import Algorithm, payload_factor
from cdpsim.timing.collective_times import fastest_algorithm

CONTENTION = ("none", "fair", "queue")


@dataclass(frozen=True, eq=False)
class Wires:
    """What messages share: the directed edges of their routes, but for those of no limit, which nobody shares."""

    contention: str  # fair or queue
    latency: Times  # of each message
    size: Times  # the bytes of each message
    first: Ints  # message k takes edge[first[k]:first[k + 1]]; none if it takes nothing there
    edge: Ints
    bandwidth: Times  # of each edge

    def routes(self) -> list[tuple[int, ...]]:
        """The edges of each message."""
        edge, first = self.edge.tolist(), self.first.tolist()
        return [tuple(edge[low:high]) for low, high in pairwise(first)]

    def stretched(self, factor: Times) -> "Wires":
        """Let each message wait and flow so many times as long, which is as if it were so much larger."""
        return replace(self, latency=self.latency * factor, size=self.size * factor)


@dataclass(frozen=True, eq=False)
class Costs:
    """What a program's nodes and releases take: slots (integers) under unit costs, else seconds.

    With contention a message takes at least its duration, which is what it takes alone.
    """

    duration: Times  # of each node
    rounds: Ints  # of each message
    release: Times  # of the program's releases, in their order
    algorithms: tuple[Algorithm, ...] = ()  # those that collectives run by
    runs_by: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))  # each message's; -1 for point to point
    calendar: Calendar | None = None  # when devices do nothing
    wires: Wires | None = None  # with contention
    request: Mapping[str, Any] | None = None  # of whose model and cluster these are
    undisturbed: "Costs | None" = None  # what it would cost if nothing disturbed it; None: nothing does


def node_costs(program: Program, model: Model, cluster: Cluster, collective: str, contention: str = "none") -> Costs:
    """Cost every node of a program; collectives run by the algorithm named `collective`, or by the best."""
    cluster = cluster.sized(program.devices)
    exact = model.is_unit
    tasks = program.tasks
    duration = np.zeros(program.nodes, dtype=np.int64 if exact else np.float64)
    duration[: len(tasks)] = _task_times(program, model, cluster)
    carry, rounds, algorithms, runs_by = _collective_times(program, cluster, collective)
    if not exact:  # in slots messages take no time
        duration[program.message_nodes] = carry + _single_times(program, cluster)
    duration[program.message_nodes.stop :] = program.parts.times(duration[program.message_nodes])
    release = np.empty(len(program.releases), dtype=duration.dtype)
    for k, (task, share) in enumerate(program.releases):
        own_pass = duration[task : task + program.phases].sum()
        whole = own_pass * share.numerator
        release[k] = whole // share.denominator if exact else whole / share.denominator
    wires = None if contention == "none" else lay_out(program, cluster, contention)
    return Costs(duration, rounds, release, algorithms, runs_by, wires=wires)


def reached(cluster: Cluster, count: int, model: Model) -> list[float | None]:
    """Give the speed of each of the first `count` devices in the model's precision; a model of times needs none."""
    works = any(
        isinstance(cost, Work) for stage in model.stages for cost in (stage.forward, stage.backward, stage.update)
    )
    return cluster.speeds(count, model.precision if works else None)


def _task_times(program: Program, model: Model, cluster: Cluster) -> Times:
    """Times of all compute tasks and updates; a device's speed turns work into time."""
    tasks = program.tasks
    stage, device = tasks.stage, tasks.device
    splits = program.splits
    speeds = reached(cluster, program.devices, model)
    duration = np.empty(len(tasks), dtype=np.int64 if model.is_unit else np.float64)
    for speed in dict.fromkeys(speeds):
        rows: slice | Ints = slice(None)
        if len(set(speeds)) > 1:
            rows = np.flatnonzero(np.array([s == speed for s in speeds])[device])
        weights = model.weight_backward_time(speed)
        backward = model.backward_time(speed) - weights if splits else model.backward_time(speed)
        times = np.stack([model.update_time(speed), model.forward_time(speed), backward, weights])  # by `Kind`
        duration[rows] = times[tasks.kind[rows], stage[rows]]
    return duration


def _single_times(program: Program, cluster: Cluster) -> Times:
    """Latency and size over bandwidth for each message point to point."""
    messages, times = program.messages, np.zeros(len(program.messages))
    single = np.flatnonzero(messages.op == Op.P2P)
    latency, bandwidth = cluster.link_costs(messages.src[single], messages.dst[single])
    times[single] = latency + messages.size[single] / bandwidth
    return times


def _collective_times(
    program: Program, cluster: Cluster, collective: str
) -> tuple[Times, Ints, tuple[Algorithm, ...], Ints]:
    """What each collective's messages take alone, their rounds, and what they run by."""
    messages = program.messages
    rounds = np.ones(len(messages), dtype=np.int32)
    times = np.zeros(len(messages))
    runs_by = np.full(len(messages), -1, dtype=np.int32)
    together = np.flatnonzero(messages.op != Op.P2P)
    numbers: dict[Algorithm, int] = {}
    alike: dict[tuple[int, ...], list[int]] = {}
    columns = (messages.op, messages.dst, messages.src, messages.size)
    for row, key in zip(
        together.tolist(), zip(*(column[together].tolist() for column in columns), strict=True), strict=True
    ):
        alike.setdefault(key, []).append(row)
    for (kind, _, _, size), rows in alike.items():
        op, members = Op(kind), root_first(program, rows[0])
        how, times[rows] = fastest_algorithm(op, collective, cluster, members, payload_factor(op, len(members)) * size)
        rounds[rows], runs_by[rows] = how.rounds(len(members)), numbers.setdefault(how, len(numbers))
    return times, rounds, tuple(numbers), runs_by


def root_first(program: Program, row: int) -> Ints:
    """Give the members of a collective, its root first."""
    members, root = program.ranks_of(program.messages.dst[row]), program.messages.src[row]
    return members if root < 0 else np.roll(members, -int(np.flatnonzero(members == root)[0]))


def lay_out(program: Program, cluster: Cluster, contention: str) -> Wires:
    """Lay messages between two devices on the edges of their routes; without a topology each pair has its own."""
    messages = program.messages
    moves = (messages.op == Op.P2P) & (messages.size > 0)
    pair = np.where(moves, messages.src.astype(np.int64) * program.devices + messages.dst, -1)
    pairs, which = np.unique(pair, return_inverse=True)
    latency, edges = np.zeros(len(pairs)), np.full((len(pairs), 1), -1)
    some = slice(np.searchsorted(pairs, 0), None)  # empty messages, and collectives, take nothing
    src, dst = np.divmod(pairs[some], program.devices)
    latency[some] = cluster.link_costs(src, dst)[0]
    shared, bandwidth = cluster.shared_edges(src, dst)
    edges = np.concatenate([np.full((len(pairs) - len(shared), shared.shape[1]), -1), shared])[which]
    first = np.append(0, np.cumsum((edges >= 0).sum(axis=1)))
    return Wires(contention, latency[which], messages.size.astype(np.float64), first, edges[edges >= 0], bandwidth)

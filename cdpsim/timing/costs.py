"""Costs: the time of each node of a program. Seconds are made in this room and nowhere else.

stage_times        a task or an update: work over speed, bytes over memory bandwidth, transfers of hosts
costs              a message between two devices: latency + bytes / bandwidth; a release: a share of a pass
collective_times   a collective alone, by the fastest allowed algorithm, and each of its messages
expand             collectives as messages, each as long as in its collective
disturbed_costs    all of these in slow or random runs
quanta              rounded to times that add up exactly
engine             start and end of each node: longest paths, also of many runs; shared links by events
rounds             of these times, the micro-batches that workers compute beside a communication
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.files.units import counted
from cdpsim.model import Model
from cdpsim.numeric.columns import Ints, Times
from cdpsim.numeric.disturbances import Calendar
from cdpsim.program import Kind, Op, Program, Stream, once_a_program
from cdpsim.program.collectives import Algorithm, payload_factor
from cdpsim.timing.collective_times import AlikeGroup, alike_group, fastest_in_group
from cdpsim.timing.costs import reached, times_of_stages

CONTENTION = ("none", "fair", "queue")


@dataclass(frozen=True, eq=False)
class Wires:
    """The directed edges that messages share: those of their routes that have a bandwidth limit."""

    contention: str  # fair or queue
    latency: Times  # of each message
    size: Times  # the bytes of each message
    first: Ints  # message k takes edge[first[k]:first[k + 1]]; none if it shares nothing
    edge: Ints
    bandwidth: Times  # of each edge

    def routes(self) -> list[tuple[int, ...]]:
        """Return the edges of each message."""
        edge, first = self.edge.tolist(), self.first.tolist()
        return [tuple(edge[low:high]) for low, high in pairwise(first)]


@dataclass(frozen=True, eq=False)
class Costs:
    """The times of a program's nodes and releases: slots (integers) under unit costs, else seconds.

    With contention a message takes at least its duration, its time alone.
    """

    duration: Times  # of each node
    rounds: Ints  # of each message
    release: Times  # of the program's releases, in their order
    algorithms: tuple[Algorithm, ...] = ()  # those that collectives run by
    runs_by: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))  # each message's; -1 for point to point
    calendar: Calendar | None = None  # when devices do nothing
    wires: Wires | None = None  # with contention
    request: Mapping[str, Any] | None = None  # with the model and the cluster of these costs
    quantum: float = 0.0  # of which times are to be whole numbers; 0: of one that suits the run
    undisturbed: "Costs | None" = None  # the costs without disorder; None: there is none

    def __repr__(self) -> str:
        unit = "slots" if self.duration.dtype.kind == "i" else "s"
        facts = f"{counted(len(self.duration), 'node')} of at most {self.duration.max(initial=0):.4g} {unit}"
        return f"Costs({facts} of {self.request!r})" if self.request else f"Costs({facts})"


def node_costs(program: Program, model: Model, cluster: Cluster, collective: str, contention: str = "none") -> Costs:
    """Return the costs of a program; collectives run by the algorithm named `collective`, or by the best."""
    cluster, exact = cluster.sized(program.all_devices), model.is_unit
    duration = np.zeros(program.nodes, dtype=np.int64 if exact else np.float64)
    duration[: len(program.tasks)] = _task_times(program, model, cluster)
    collective_times, rounds, algorithms, runs_by = _collective_times(program, cluster, collective)
    if not exact:  # in slots messages take no time
        duration[program.message_nodes] = collective_times + _point_to_point_times(program, cluster)
    duration[program.message_nodes.stop :] = program.parts.times(duration[program.message_nodes])
    release = np.empty(len(program.releases), dtype=duration.dtype)
    for k, (task, share) in enumerate(program.releases):
        scaled = duration[task : task + program.phases].sum() * share.numerator  # of the task's own pass
        release[k] = scaled // share.denominator if exact else scaled / share.denominator
    wires = None if contention == "none" else lay_out(program, cluster, contention)
    return Costs(duration, rounds, release, algorithms, runs_by, wires=wires)


def _task_times(program: Program, model: Model, cluster: Cluster) -> Times:
    """Return the times of all compute tasks and updates; a device's speed turns work into time."""
    tasks, splits = program.tasks, program.splits
    speeds = reached(cluster, program.devices, model)
    bandwidths: list[float | None] = [None] * len(speeds)
    if model.moves_bytes:
        bandwidths = cluster.memory_bandwidths(program.devices)
    paces = list(zip(speeds, bandwidths, strict=True))
    duration = np.empty(len(tasks), dtype=np.int64 if model.is_unit else np.float64)
    kind, all_paces = _kinds_of_times(program), dict.fromkeys(paces)
    for pace in all_paces:
        speed, bandwidth = pace
        rows: slice | Ints = slice(None)
        if len(all_paces) > 1:
            rows = np.flatnonzero(np.array([p == pace for p in paces])[tasks.device])
        times = times_of_stages(model, speed, bandwidth, splits, program.shard)
        duration[rows] = times[kind[rows], tasks.stage[rows]]
    return duration


_OUTER = len(Kind)  # the row of updates by means, behind those by `Kind`


@once_a_program
def _kinds_of_times(program: Program) -> Ints:
    """Return the row of `times_of_stages` that has the time of each task."""
    kind, means = program.tasks.kind, program.average_of(program.tasks.version) >= 0
    kinds: Ints = np.where(means & (kind == Kind.U), _OUTER, kind)
    return kinds


def _point_to_point_times(program: Program, cluster: Cluster) -> Times:
    """Return latency and size over bandwidth of each message point to point; 0 of others."""
    messages, times = program.messages, np.zeros(len(program.messages))
    src, dst, single, way = messages.ways
    latency, bandwidth = cluster.link_costs(src, dst)
    times[single] = latency[way] + messages.size[single] / bandwidth[way]
    for stream, link in ((Stream.HOST, cluster.host), (Stream.NVME, cluster.nvme)):
        rows = np.flatnonzero(messages.stream == stream)
        if len(rows) and link is not None:
            times[rows] = link.latency + messages.size[rows] / link.reached
    return times


def _collective_times(
    program: Program, cluster: Cluster, collective: str
) -> tuple[Times, Ints, tuple[Algorithm, ...], Ints]:
    """Return the time of each collective alone, its rounds, all algorithms, and the one that each runs by."""
    messages = program.messages
    rounds, times = np.ones(len(messages), dtype=np.int32), np.zeros(len(messages))
    runs_by = np.full(len(messages), -1, dtype=np.int32)
    numbers: dict[Algorithm, int] = {}
    for op, group, size, rows in _collectives_alike(program, cluster.laid_out):
        members = len(group.members)
        how, times[rows] = fastest_in_group(op, collective, cluster, group, payload_factor(op, members) * size)
        rounds[rows], runs_by[rows] = how.rounds(members), numbers.setdefault(how, len(numbers))
    return times, rounds, tuple(numbers), runs_by


@once_a_program
def _collectives_alike(program: Program, cluster: Cluster) -> list[tuple[Op, AlikeGroup, int, list[int]]]:
    """Return the operation, the members, its root first, the size and the rows of collectives that are alike."""
    messages = program.messages
    together = np.flatnonzero(messages.op != Op.P2P)
    columns = (column[together].tolist() for column in (messages.op, messages.dst, messages.src, messages.size))
    equal: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, *key in zip(together.tolist(), *columns, strict=True):
        equal[tuple(key)].append(row)
    alike: dict[tuple[Op, AlikeGroup, int], list[int]] = defaultdict(list)
    for (op, _, _, size), rows in equal.items():
        alike[Op(op), alike_group(cluster, root_first(program, rows[0])), size] += rows
    return [(*key, rows) for key, rows in alike.items()]


def root_first(program: Program, row: int) -> Ints:
    """Return the members of a collective, its root first."""
    members, root = program.ranks_of(program.messages.dst[row]), program.messages.src[row]
    return members if root < 0 else np.roll(members, -int(np.flatnonzero(members == root)[0]))


def lay_out(program: Program, cluster: Cluster, contention: str) -> Wires:
    """Return the edges that messages between two devices share, on their routes or on the link of their pair."""
    messages = program.messages
    moves = (messages.op == Op.P2P) & (messages.size > 0) & (messages.stream < Stream.HOST)
    pair = np.where(moves, messages.src.astype(np.int64) * program.devices + messages.dst, -1)
    pairs, which = np.unique(pair, return_inverse=True)
    latency = np.zeros(len(pairs))
    moving = slice(np.searchsorted(pairs, 0), None)  # empty messages, and collectives, share nothing
    src, dst = np.divmod(pairs[moving], program.devices)
    latency[moving] = cluster.link_costs(src, dst)[0]
    shared, bandwidth = cluster.shared_edges(src, dst)
    edges = np.concatenate([np.full((len(pairs) - len(shared), shared.shape[1]), -1), shared])[which]
    first = np.append(0, np.cumsum((edges >= 0).sum(axis=1)))
    return Wires(contention, latency[which], messages.size.astype(np.float64), first, edges[edges >= 0], bandwidth)

"""Costs: the time of each node of a program. Seconds are made in this room and nowhere else.

costs              a task or an update: work over speed, bytes over memory bandwidth, transfers of hosts; a message of
                   two devices: latency + bytes / bandwidth; a release: a share of a pass; all of them if slow or random
collective_times   a collective alone, by the fastest allowed algorithm, and each of its messages
expand             collectives as messages, each as long as in its collective
engine             start and end of each node, in quanta that add up exactly: longest paths, also of many runs; events
round_times        of these times, the micro-batches that workers compute beside a communication

Times that stages state stand. They are seconds, or int64 slots in the slot model.

Activations (Rhu et al. 2016, vDNN, section III) leave while their stage computes, and come back while its backward
does. A task takes the longer of computing and `latency + bytes / bandwidth`: vDNN waits for both streams at the end of
a layer.

An update on the host (Ren et al. 2021, ZeRO-Offload, section 4) takes `latency + gradients / bandwidth + step + latency
+ parameters / bandwidth`, 2 + 2 bytes of each parameter in mixed precision, while its device computes on. ZeRO-Offload
hides a part of the first behind the backward that makes the gradients; here they leave once whole. Parameters that stay
on the host do not come back. From disks, the optimizer state comes to the host first and goes back, over the `nvme`
link, and new parameters go there. Of split values, each rank's links carry its share.

Every device has a link and a share of its host of its own, on which updates are made one after another. Transfers of
tasks and of updates do not slow each other down, nor do those of several lanes.

Under disorder slow devices and jitter make durations longer or shorter, stops make a calendar. Releases stay as they
are: a schedule states them beforehand. Links go on while a device stands still: a message that is
ready leaves, and one under way arrives.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import fsum
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from cdpsim.cluster import Cluster
from cdpsim.cluster.disorder import Disorder, read_jitter
from cdpsim.cluster.topology import Devices, Kernels, Link
from cdpsim.errors import RequestError
from cdpsim.files.units import LEAST_SECONDS, MOST_SECONDS, Work, counted
from cdpsim.model import Model
from cdpsim.model.layers import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    CONTEXT,
    EXPERT,
    GROUPED,
    PASS,
    PRODUCT,
    RING,
    TENSOR,
    Exchange,
    Kernel,
    Operations,
)
from cdpsim.model.splitting import Mesh
from cdpsim.model.stage import Stage
from cdpsim.numeric.columns import Floats, Ints, Times, group_numbers, group_starts, sort_by
from cdpsim.numeric.disturbances import DISTRIBUTIONS, Calendar, merge_stops, never, uniforms
from cdpsim.program import Content, Kind, Op, Program, Stream, once_a_program
from cdpsim.program.collectives import Algorithm, payload_factor
from cdpsim.schedules.placement import Widths, pyramid_widths
from cdpsim.timing.collective_times import AlikeGroup, alike_group, fastest_in_group


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
        update = update * _shares_updated(model, shard)
    if model.updates_in_lanes:
        update = update + [stage.group_sum for stage in model.stages]
    forward, outer = pass_times(model, "forward", speed), _times(model, "outer_update", speed)
    return np.stack([update, forward, backward - weights if splits else backward, weights, outer])


def _shares_updated(model: Model, shard: int) -> Floats:
    """Return the share of each stage that one of so many ranks updates; of experts other ranks have copies."""
    of_experts = np.array([stage.expert_parameters / (stage.parameters or 1) for stage in model.stages])
    mesh = model.mesh
    return (1 - of_experts) / shard + of_experts * min(1.0, mesh.expert / (shard * mesh.tensor))


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


@dataclass(frozen=True)
class Machine:
    """The device and the links of the ranks that do a model's operations together."""

    device: Devices
    precision: str
    cluster: Cluster  # whose first ranks are those of each axis' group, as any others
    mesh: Mesh
    places: int  # groups of ranks from one data rank to the next
    collective: str
    factor: float = 1.0  # as slow as this are its devices; its links are not
    sums_context: bool = False  # whether the ranks of a group sum gradients of weights, and not data ranks

    def seconds(self, work: Operations, *, whole: bool = True) -> float:
        """Return the time of operations and of what exchanges add; a backward in two parts hides no exchange."""
        computed = fsum(times * self.row_seconds(row) for row, times in work.rows)
        return computed + fsum(times * self.exposed(each, whole=whole) for each, times in work.exchanges)

    def row_seconds(self, row: Kernel) -> float:
        """Return the time of an operation, by its kind where the device says what each kind reaches."""
        peak, kernels, bandwidth = (
            self.device.peak_in(self.precision),
            self.device.kernels,
            self.device.memory_bandwidth,
        )
        assert peak is not None, "the cluster has been asked for it"
        factor = self.factor * (self.mesh.imbalance if row.kind == GROUPED else 1.0)
        if kernels is None:
            return factor * row.flop / (peak * (self.device.achieved or 1.0))
        assert bandwidth is not None, "kernels need it"
        moved = row.moved / (bandwidth * kernels.passes)
        if row.kind in (PRODUCT, GROUPED):
            reached = kernels.products if row.kind == PRODUCT else kernels.grouped
            return factor * max(row.flop / (peak * reached), moved)
        core = row.done * row.flop / (peak * kernels.core)
        return factor * (kernels.launch + moved if row.kind == PASS else core)

    def exchange_seconds(self, exchange: Exchange) -> float:
        """Return the time of an exchange alone: until its ranks have met, and of its messages."""
        kernels, size, (cluster, members) = self.device.kernels or Kernels(), exchange.size, self._group(exchange.axis)
        if exchange.op == ALL_TO_ALL:
            size = int(size / kernels.all_to_all)
        collective = "ring" if exchange.op == RING else self.collective
        between = self.mesh.between if exchange.axis == EXPERT else Fraction(1)
        return kernels.meet + _group_seconds(cluster, members, exchange.op, size, collective, between)

    def _group(self, axis: str) -> tuple[Cluster, tuple[int, ...]]:
        """Return the members of a group, on the cluster as they see it: ranks between them send at once."""
        ranks, team, topology = self.mesh.ranks(axis), self.mesh.team, self.cluster.topology
        if axis == CONTEXT:
            return self.cluster.team(self.mesh.tensor), tuple(range(ranks))
        if axis == TENSOR or ranks <= team or self.places == 1:
            return self.cluster, tuple(range(ranks))
        node = topology.per_node if topology else None
        beside = min(self.places, max(1, node // team)) if node else 1  # other places' groups in a node
        apart = self.places * team // beside
        return self.cluster.team(beside), tuple(k * apart + x for k in range(ranks // team) for x in range(team))

    def exposed(self, exchange: Exchange, *, whole: bool = True) -> float:
        """Return what an exchange adds to its task, beside the product that may hide it."""
        alone = self.exchange_seconds(exchange)
        if exchange.beside is None or not whole:
            return alone
        beside = self.device.kernels.beside if self.device.kernels else 1.0
        if exchange.op == RING:  # the last block is computed when nothing is on its way
            beside *= 1 - 1 / self.mesh.context
        return max(0.0, alone - beside * self.row_seconds(exchange.beside))


@lru_cache(maxsize=4096)
def _group_seconds(
    cluster: Cluster, members: tuple[int, ...], op: str, size: int, collective: str, between: Fraction
) -> float:
    """Return the time of a collective of some ranks of a cluster."""
    cluster = cluster.sized(members[-1] + 1)
    group = alike_group(cluster, np.array(members))
    return fastest_in_group(_EXCHANGES[op], collective, cluster, group, size, between=between)[1]


_EXCHANGES = {op.name.lower().replace("_", "-"): op for op in Op} | {RING: Op.ALL_GATHER}


def machine_of(model: Model, cluster: Cluster, collective: str, places: int) -> Machine | None:
    """Return the machine of a model of operations; None where nothing says a speed.

    Refuse devices of several kinds: the ranks of a group do the same at the same time.
    """
    groups = {structs.replace(group, count=None) for group in cluster.devices}
    if len(groups) > 1:
        problem = f"has {len(groups)} kinds of devices, and operations of layers take their times on one"
        raise RequestError("cluster", f"{problem}; give equal devices, and slow ones by --slow")
    cluster.speeds(1, model.precision)
    (device,) = groups
    peak = device.peak_in(model.precision)
    return None if peak is None else Machine(device, model.precision, cluster, model.mesh, places, collective)


def with_operation_times(model: Model, machine: Machine, *, splits: bool) -> Model:
    """Return the model with the times of its stages' operations, on a machine; parts of a backward hide no exchange."""
    timed = {stage: _with_seconds(stage, machine, splits=splits) for stage in dict.fromkeys(model.stages)}
    return structs.replace(model, stages=tuple(timed[stage] for stage in model.stages))


def _with_seconds(stage: Stage, machine: Machine, *, splits: bool) -> Stage:
    """Return a stage with its costs in seconds, and with the time of the sum of partial gradients."""
    costs: dict[str, Any] = {
        name: machine.seconds(cost)
        for name in ("forward", "recomputed", "attention_forward")
        if isinstance(cost := getattr(stage, name), Operations)
    }
    backward = stage.backward
    assert isinstance(backward, Operations)
    whole = stage.weight_backward == backward  # of a first stage, which sends no gradient
    parts = [machine.seconds(part, whole=whole) for part in parts_of_backward(stage)]
    costs |= {"backward": sum(parts) if splits else machine.seconds(backward), "weight_backward": parts[1]}
    if not splits:
        costs["weight_backward"] = min(parts[1], costs["backward"])
    costs = {name: max(seconds, LEAST_SECONDS) for name, seconds in costs.items()}  # passes may take no time
    if sums := sums_of_step(stage, machine):
        costs["group_sum"] = fsum(map(machine.exchange_seconds, sums))
    return structs.replace(stage, **costs)


def parts_of_backward(stage: Stage) -> tuple[Operations, Operations]:
    """Return the input's and the weights' part of a backward of operations."""
    weights, backward = stage.weight_backward, stage.backward
    assert isinstance(weights, Operations) and isinstance(backward, Operations)
    return Operations([*backward.counted, *((each, -times) for each, times in weights.counted)]), weights


def sums_of_step(stage: Stage, machine: Machine) -> list[Exchange]:
    """Return the exchanges that sum a stage's gradients in a group of ranks, once a step."""
    partial = stage.gradient_bytes * stage.partial // max(stage.parameters, 1)
    sums = [Exchange(TENSOR, ALL_REDUCE, partial)] * bool(partial)
    return sums + [Exchange(CONTEXT, ALL_REDUCE, stage.gradient_bytes)] * (
        machine.sums_context and stage.parameters > 0
    )


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
    """Return the model with the times of its stages' transfers over the link between a device and its host.

    Times that stages give themselves stand: a `transfer` in place of the link's; without a link, a `host_update` is the
    whole time of an update. An update that `ranks` ranks share takes each of them its part of the time.
    """
    if not any(stage.offloaded or stage.updated_on_host for stage in model.stages):
        return model
    stages = (_with_times(stage, host, nvme, ranks, j) for j, stage in enumerate(model.stages))
    return structs.replace(model, stages=tuple(stages))


def _with_times(stage: Stage, host: Link | None, nvme: Link | None, ranks: int, j: int) -> Stage:
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
        stage = structs.replace(stage, transfer=host.latency + stage.offloaded / host.reached)
    if stage.updated_on_host:
        moved = [(host, stage.gradient_bytes), (host, stage.parameters - stage.host_parameters)]
        if nvme is not None and stage.nvme:
            moved += [(nvme, stage.host_optimizer)] * 2 + [(nvme, stage.host_parameters)]
        moves = [ranks * link.latency + size / link.reached for link, size in moved if size]
        stage = structs.replace(stage, host_update=fsum([stage.host_update, *moves]))
    return stage


class Loads(NamedTuple):
    """How long the products of experts are in tasks. All wait for the busiest of the ranks that share the experts."""

    seconds: Times  # of each task, in all layers of its stage
    layers: Ints  # with experts, of each stage
    ranks: int
    data: int  # data ranks among which they share them
    places: int  # devices of a data rank


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
    algorithms: tuple[Algorithm, ...] = ()  # the algorithms of collectives
    runs_by: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))  # each message's; -1 for point to point
    calendar: Calendar | None = None  # when devices do nothing
    wires: Wires | None = None  # with contention
    request: Mapping[str, Any] | None = None  # with the model and the cluster of these costs
    slowed: Mapping[float, Times] = field(default_factory=dict)  # of each task, by its device's factor; {}: all of it
    quantum: float = 0.0  # of which times are to be whole numbers; 0: of one that suits the run
    undisturbed: "Costs | None" = None  # the costs without disorder; None: there is none
    loads: "Loads | None" = None  # of experts, where these are drawn

    def __repr__(self) -> str:
        unit = "slots" if self.duration.dtype.kind == "i" else "s"
        facts = f"{counted(len(self.duration), 'node')} of at most {self.duration.max(initial=0):.4g} {unit}"
        return f"Costs({facts} of {self.request!r})" if self.request else f"Costs({facts})"


def node_costs(
    program: Program,
    model: Model,
    cluster: Cluster,
    collective: str,
    contention: str = "none",
    machine: Machine | None = None,
) -> Costs:
    """Return the costs of a program; collectives run by the algorithm named `collective`, or by the best.

    Tasks gather the shares of boundaries that a group of ranks gets, by a `machine`.
    """
    cluster, exact = cluster.sized(program.all_devices), model.is_unit
    duration = np.zeros(program.nodes, dtype=np.int64 if exact else np.float64)
    duration[: len(program.tasks)] = _task_times(program, model, cluster)
    if machine is not None and model.mesh.gathers_boundaries:
        message, reader = gathering_tasks(program)
        sent = program.messages.size[message]
        whole = {size: machine.exchange_seconds(gather_of(size, model.mesh)) for size in set(sent.tolist())}
        np.add.at(duration, reader, [whole[size] for size in sent.tolist()])
    collective_times, rounds, algorithms, runs_by = _collective_times(program, cluster, collective, machine)
    if not exact:  # in slots messages take no time
        duration[program.message_nodes] = collective_times + _point_to_point_times(program, cluster)
    duration[program.message_nodes.stop :] = program.parts.times(duration[program.message_nodes])
    release = np.empty(len(program.releases), dtype=duration.dtype)
    for k, (task, share) in enumerate(program.releases):
        scaled = duration[task : task + program.phases].sum() * share.numerator  # of the task's own pass
        release[k] = scaled // share.denominator if exact else scaled / share.denominator
    wires = None if contention == "none" else lay_out(program, cluster, contention)
    return Costs(duration, rounds, release, algorithms, runs_by, wires=wires)


def gather_of(sent: int, mesh: Mesh) -> Exchange:
    """Return the exchange by which a group of ranks makes a boundary whole, of which each got a share."""
    return Exchange(TENSOR, ALL_GATHER, sent * mesh.tensor)


@once_a_program
def gathering_tasks(program: Program) -> tuple[Ints, Ints]:
    """Return the messages of boundaries, and the task that gathers each."""
    first, edges = program.message_nodes.start, program.edges
    message = edges.before - first
    of_task = (message >= 0) & (message < len(program.messages)) & (edges.after < len(program.tasks))
    message, reader = message[of_task], edges.after[of_task]
    content = program.messages.content[message]
    read = (program.messages.op[message] == Op.P2P) & (content <= Content.ACTIVATION_GRADIENT)
    return message[read], reader[read]


def _task_times(program: Program, model: Model, cluster: Cluster) -> Times:
    """Return the times of all compute tasks and updates; a device's speed turns work into time."""
    tasks, splits = program.tasks, program.splits
    speeds = reached(cluster, program.devices, model)
    bandwidths: list[float | None] = [None] * len(speeds)
    if model.moves_bytes:
        bandwidths = cluster.memory_bandwidths(program.devices, reached=model.layers is not None)
    paces = list(zip(speeds, bandwidths, strict=True))
    duration = np.empty(len(tasks), dtype=np.int64 if model.is_unit else np.float64)
    kind, all_paces = kinds_of_times(program), dict.fromkeys(paces)
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
def kinds_of_times(program: Program) -> Ints:
    """Return the row of `times_of_stages` that has the time of each task."""
    kind, means = program.tasks.kind, program.average_of(program.tasks.version) >= 0
    kinds: Ints = np.where(means & (kind == Kind.U), _OUTER, kind)
    return kinds


def _point_to_point_times(program: Program, cluster: Cluster) -> Times:
    """Return latency and size over bandwidth of each message point to point; 0 for collectives."""
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
    program: Program, cluster: Cluster, collective: str, machine: Machine | None
) -> tuple[Times, Ints, tuple[Algorithm, ...], Ints]:
    """Return the time of each collective alone, its rounds, all algorithms, and the one that each runs by."""
    messages = program.messages
    rounds, times = np.ones(len(messages), dtype=np.int32), np.zeros(len(messages))
    runs_by = np.full(len(messages), -1, dtype=np.int32)
    numbers: dict[Algorithm, int] = {}
    for op, copies, group, size, rows in _collectives_alike(program, cluster.laid_out, machine):
        members, seen = len(group.members), seen_by_ranks(program, cluster, machine, copies)
        how, times[rows] = fastest_in_group(op, collective, seen, group, payload_factor(op, members) * size)
        rounds[rows], runs_by[rows] = how.rounds(members), numbers.setdefault(how, len(numbers))
    return times, rounds, tuple(numbers), runs_by


def seen_by_ranks(program: Program, cluster: Cluster, machine: Machine | None, copies: int) -> Cluster:
    """Return the cluster as so many ranks of each device see it, which take part in one collective."""
    if copies == 1 or machine is None:
        return cluster
    teams = machine.cluster.team(machine.mesh.team // copies).numbered(*cluster.grid[:2], copies)
    return teams.sized(program.all_devices * copies)


@once_a_program
def _collectives_alike(
    program: Program, cluster: Cluster, machine: Machine | None
) -> list[tuple[Op, int, AlikeGroup, int, list[int]]]:
    """Return the operation, the ranks of a device, the members, its root first, the size and the rows of alike ones."""
    messages = program.messages
    together = np.flatnonzero(messages.op != Op.P2P)
    columns = (column[together].tolist() for column in (messages.op, messages.dst, messages.src, messages.size))
    equal: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, *key in zip(together.tolist(), *columns, strict=True):
        equal[tuple(key)].append(row)
    alike: dict[tuple[Op, int, AlikeGroup, int], list[int]] = defaultdict(list)
    for (op, group, _, size), rows in equal.items():
        copies = program.copies_of(group)
        seen = cluster if copies == 1 else seen_by_ranks(program, cluster, machine, copies).laid_out
        alike[Op(op), copies, alike_group(seen, root_first(program, rows[0], seen)), size] += rows
    return [(*key, rows) for key, rows in alike.items()]


def root_first(program: Program, row: int, cluster: Cluster) -> Ints:
    """Return the members of a collective in their order on a cluster, its root first."""
    members, root = cluster.in_order(program.ranks_of(program.messages.dst[row])), program.messages.src[row]
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


_TASK_STREAM, _MESSAGE_STREAM, _UPDATE_STREAM, _LOAD_STREAM = range(4)  # of random numbers
_DRAWN_AT_ONCE = 2**15  # numbers that stay in a processor's cache while they are made into factors


def disturbed_costs(program: Program, costs: Costs, disorder: Disorder, seed: int, run: int) -> Costs:
    """Return the costs of a program in one run, which the seed and its number decide."""
    if disorder == Disorder():
        return costs
    steady = steady_costs(program, costs, disorder)
    if not disorder.is_random:
        return steady
    duration, wires = jittered_durations(program, steady, disorder, seed, range(run, run + 1))[0], steady.wires
    if wires is not None:
        now, alone = duration[program.message_nodes], steady.duration[program.message_nodes]
        factor = np.divide(now, alone, out=np.ones_like(alone), where=alone > 0)  # of wait and size
        wires = replace(wires, latency=wires.latency * factor, size=wires.size * factor)
    return replace(steady, duration=duration, wires=wires)


def steady_costs(program: Program, costs: Costs, disorder: Disorder) -> Costs:
    """Return the costs of a program with the disorder that is the same in every run: slow devices and stops."""
    duration, loads = costs.duration.copy(), costs.loads and costs.loads._replace(seconds=costs.loads.seconds.copy())
    if duration.dtype.kind == "i":
        _refuse_parts_of_slots(disorder)
    for slow in disorder.slow:
        tasks = np.flatnonzero(program.tasks.device == slow.device)
        slowed = costs.slowed.get(slow.factor)
        if slowed is None:
            duration[tasks] *= duration.dtype.type(slow.factor)
        else:
            duration[tasks] = slowed[tasks]
        if loads is not None:
            loads.seconds[tasks] *= slow.factor
    return replace(costs, duration=duration, loads=loads, calendar=_calendar(program, disorder, duration.dtype))


def slowed_times(program: Program, duration: Times, model: Model, slowed: Model, factor: float) -> Times:
    """Return the times of tasks on slow devices, of a model with its times on others and on those.

    Exchanges take as long as before.
    """
    tasks, rows = program.tasks, len(program.tasks)
    passes, slow = (times_of_passes(each, program.splits) for each in (model, slowed))
    sums = np.array([stage.group_sum for stage in model.stages])[tasks.stage]
    more = np.where(
        tasks.kind == Kind.U, (factor - 1) * (duration[:rows] - sums), (slow - passes)[tasks.kind, tasks.stage]
    )
    return duration[:rows] + more


def times_of_passes(model: Model, splits: bool) -> Times:
    """Return the times of stages in seconds, a row for each kind of task, and none of updates."""
    weights, backward = _times(model, "weight_backward", None), pass_times(model, "backward", None)
    forward = pass_times(model, "forward", None)
    return np.stack([0 * forward, forward, backward - weights if splits else backward, weights])


def jittered_durations(program: Program, costs: Costs, disorder: Disorder, seed: int, runs: range) -> Floats:
    """Return the durations of several runs, a row for each: a node's duration times its own factor of mean 1.

    Tasks are drawn in the order of their numbers, by training step, micro-batch and phase, and messages from another
    stream: so a task's factor depends on no schedule, link or other run. Where steps have
    unlike numbers of micro-batches, factors are drawn as if each had the most, so that no step changes those of others.
    Where the number of a round's is found in the run, each device has a stream of its own.
    """
    result = np.tile(costs.duration, (len(runs), 1))
    sent = program.message_nodes
    if costs.loads is not None:
        for row, run in enumerate(runs):
            result[row, : program.compute] += _drawn_loads(program, costs.loads, disorder.imbalance, seed, run)
    for text, stream, nodes in (
        (disorder.jitter, _TASK_STREAM, slice(sent.start)),
        (disorder.link_jitter, _MESSAGE_STREAM, sent),
    ):
        width, count, rows = result[0, nodes].size, *_drawn_rows(program, stream)
        if not (text and width):
            continue
        name, variation = read_jitter("jitter", text)
        step = max(1, _DRAWN_AT_ONCE // width)
        for low in range(0, len(runs), step):
            if program.thrown_away and stream == _TASK_STREAM:
                drawn = np.concatenate([_drawn_by_device(program, seed, run) for run in runs[low : low + step]])
            else:
                drawn = np.concatenate([uniforms(seed, run, stream, count)[rows] for run in runs[low : low + step]])
            result[low : low + step, nodes] *= DISTRIBUTIONS[name][0](drawn, variation).reshape(-1, width)
    if disorder.link_jitter:
        result[:, sent.stop :] = program.parts.times(result[:, sent].T).T
    return result


def _drawn_loads(program: Program, loads: Loads, text: str, seed: int, run: int) -> Floats:
    """Draw how much longer tasks take than with even loads: by training step, micro-batch and layer of each group."""
    name, variation = read_jitter("imbalance", text)
    tasks = program.tasks
    rank = tasks.device[np.arange(program.passes) * program.phases] // loads.places
    order = sort_by(program.pass_step, rank, program.pass_micro_batch)
    head = group_starts(program.pass_step[order], rank[order])
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order)) - head[group_numbers(head, len(order))]  # of a micro-batch of its data rank
    key = np.stack([program.pass_step, number, rank // loads.data])
    keys, which = np.unique(key, axis=1, return_inverse=True)
    drawn = uniforms(seed, run, _LOAD_STREAM, keys.shape[1] * int(loads.layers.sum()) * loads.ranks)
    load = DISTRIBUTIONS[name][0](drawn, variation).reshape(keys.shape[1], -1, loads.ranks).max(axis=2)
    ends = np.cumsum(loads.layers)
    sums = np.concatenate([np.zeros((len(load), 1)), np.cumsum(load, axis=1)], axis=1)
    more = (sums[:, ends] - sums[:, ends - loads.layers]) / np.maximum(loads.layers, 1) - (loads.layers > 0)
    each = np.arange(program.compute)
    longer: Floats = loads.seconds[: program.compute] * more[which.ravel()[each // program.phases], tasks.stage[each]]
    return longer


def _drawn_by_device(program: Program, seed: int, run: int) -> Floats:
    """Draw a number for each task and update, in their devices' order: none depends on what another device does."""
    drawn = np.empty(len(program.tasks))
    for stream, first, after in (
        (_TASK_STREAM, 0, program.compute),
        (_UPDATE_STREAM, program.compute, len(program.tasks)),
    ):
        device = program.tasks.device[first:after]
        for number in range(program.devices):
            rows = first + np.flatnonzero(device == number)
            drawn[rows] = uniforms(seed, run, stream, len(rows), number)
    return drawn


def _drawn_rows(program: Program, stream: int) -> tuple[int, slice | Ints]:
    """Return how many factors are drawn for tasks or messages, and which of them these take, in order."""
    if stream == _MESSAGE_STREAM or program.m is not None:
        return len(program.tasks if stream == _TASK_STREAM else program.messages), slice(None)
    most, updates = int(program.counts.max()), len(program.tasks) - program.compute
    row = program.pass_step * most + program.pass_micro_batch
    task = row[:, None] * program.phases + np.arange(program.phases)
    count = program.steps * most * program.phases
    return count + updates, np.append(task, count + np.arange(updates))


def _refuse_parts_of_slots(disorder: Disorder) -> None:
    remedy = "give a --model, whose times are seconds"
    for option, text in (("jitter", disorder.jitter), ("link-jitter", disorder.link_jitter)):
        if text:
            raise RequestError(option, f"{text!r} makes parts of slots; {remedy}")
    for slow in disorder.slow:
        if slow.factor != int(slow.factor):
            raise RequestError("slow", f"{slow.factor:g} times makes parts of slots; take a whole factor, or {remedy}")


def _calendar(program: Program, disorder: Disorder, kind: np.dtype[Any]) -> Calendar | None:
    """Return when devices do nothing: a row for each that stops, and one for everything else."""
    stops = defaultdict(list)
    for stop in disorder.stop:
        at = kind.type(stop.at)
        stops[stop.device].append((at, never(kind) if stop.lasts is None else at + kind.type(stop.lasts)))
    rows = {device: merge_stops(pairs) for device, pairs in sorted(stops.items())}
    if not rows:
        return None
    at, until = (np.full((len(rows) + 1, max(map(len, rows.values()))), never(kind)) for _ in range(2))
    row = np.full(program.nodes, len(rows), dtype=np.int32)
    for k, (device, pairs) in enumerate(rows.items()):
        row[: len(program.tasks)][program.tasks.device == device] = k
        at[k, : len(pairs)], until[k, : len(pairs)] = zip(*pairs, strict=True)
    return Calendar(row, at, until)

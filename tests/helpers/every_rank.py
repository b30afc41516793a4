"""A player of every rank of groups that share tasks, each with a clock of its own: teams must come to its times.

It is written from the rules alone. Ranks T k to T k + T - 1 are those of group k of the machine: of device k of a
program, or of the place k // D of data rank k % D where the D data ranks of a place are neighbours. Each of them does
the device's tasks and sends its own messages, on the links of the whole cluster. Members of a collective wait for each
other: those of a group at the end of each task and where they gather a boundary, those of data ranks in each sum.
Tensor ranks are neighbours, then those of context; experts are split over neighbours of one place, data ranks last.
A slow rank computes slowly, and its links do not. The time of an operation, of a message and of a ring is worked out
here from the cluster's numbers. `message_turn_player` says what a device does in which order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdpsim.cluster import Cluster
from cdpsim.model.layers import Exchange, Kernel, Operations
from cdpsim.program import Content, Kind, Op
from cdpsim.runs import Run
from tests.helpers.message_turn_player import TurnPlayer

Clocks = NDArray[np.float64]


class Wires:
    """The links of a cluster of nodes, or of one switch, and what several messages at once take on them."""

    def __init__(self, cluster: Cluster) -> None:
        topology = cluster.topology
        assert topology is not None
        self.inside, self.network = topology.link, topology.network
        self.size, self.cards = topology.per_node or 10**6, topology.nics

    def node(self, rank: int) -> int:
        return rank // self.size

    def card(self, rank: int) -> tuple[int, int]:
        return self.node(rank), rank % self.size * self.cards // self.size

    def times(self, ways: Sequence[tuple[int, int]], size: float) -> list[float]:
        """Return the times of messages of equal size that start at once; those that have a card in common share it."""
        crossing = [(a, b) for a, b in ways if self.node(a) != self.node(b)]
        leave, enter = Counter(self.card(a) for a, _ in crossing), Counter(self.card(b) for _, b in crossing)
        found = []
        for a, b in ways:
            cable = self.inside if self.node(a) == self.node(b) else self.network
            sharing = 1 if cable is self.inside else max(leave[self.card(a)], enter[self.card(b)])
            found.append(2 * cable.latency + size * sharing / (cable.bandwidth * cable.achieved))
        return found

    def ring(self, op: Op, groups: Sequence[Sequence[int]], size: float) -> float:
        """Return the time of rings of equal groups that start at once, each in a channel for each card of a node."""
        members = len(groups[0])
        if members == 1:
            return 0.0
        ways: list[tuple[int, int]] = []
        channels = 1
        for group in groups:
            nodes: dict[int, dict[tuple[int, int], list[int]]] = {}
            for rank in group:
                nodes.setdefault(self.node(rank), {}).setdefault(self.card(rank), []).append(rank)
            by_card = [list(cards.values()) for cards in nodes.values()]
            channels = min(map(len, by_card)) if len(by_card) > 1 else 1
            for c in range(channels):
                order = [rank for cards in by_card for card in cards[c:] + cards[:c] for rank in card]
                ways += pairwise([*order, order[0]])
        rounds = (2 if op == Op.ALL_REDUCE else 1) * (members - 1)
        return rounds * max(self.times(ways, size / members / channels))


class Machine:
    """The times of operations and exchanges on the ranks of a request, some of them slow."""

    def __init__(self, run: Run, slow: Mapping[int, float]) -> None:
        request = run.request
        mesh = request.model.mesh
        self.wires, self.tensor, self.context, self.expert = (
            Wires(request.machine),
            mesh.tensor,
            mesh.context,
            mesh.expert,
        )
        self.team = self.tensor * self.context
        self.devices, self.model = run.program.devices, request.model
        data = request.shape.replicas
        order = request.get("ranks") or ("tp-cp-dp-pp" if max(self.team, self.expert) > 1 else "tp-cp-pp-dp")
        digits = [(rank, place) for rank in range(data) for place in range(self.devices // data)]
        self.groups = [place * data + rank if order == "tp-cp-dp-pp" else k for k, (rank, place) in enumerate(digits)]
        self.places = self.devices // data
        (self.device,) = request.machine.devices
        self.factors = [[slow.get(rank, 1.0) for rank in self.ranks(k)] for k in range(self.devices)]

    def ranks(self, device: int) -> list[int]:
        """Return the ranks of the machine that are a device of the program."""
        return [self.groups[device] * self.team + x for x in range(self.team)]

    def row(self, row: Kernel) -> float:
        kernels, peak = self.device.kernels, self.device.speed
        assert peak is not None
        if kernels is None:
            return row.flop / (peak * (self.device.achieved or 1))
        assert self.device.memory_bandwidth is not None
        moved = row.moved / self.device.memory_bandwidth / kernels.passes
        if row.kind == "core":
            return row.flop * row.done / peak / kernels.core
        reached = kernels.grouped if row.kind == "grouped" else kernels.products
        return kernels.launch + moved if row.kind == "pass" else max(row.flop / peak / reached, moved)

    def groups_of(self, axis: str) -> list[list[int]]:
        """Return the ranks of all groups of an axis."""
        t, c = self.tensor, self.context
        if axis == "expert":
            data = range(self.devices // self.places)
            rows = [[r for d in data for r in self.ranks(d * self.places + place)] for place in range(self.places)]
            return [row[k : k + self.expert] for row in rows for k in range(0, len(row), self.expert)]
        first = [k * self.team for k in range(self.devices)]
        if axis == "tensor":
            return [[low + j * t + x for x in range(t)] for low in first for j in range(c)]
        return [[low + j * t + x for j in range(c)] for low in first for x in range(t)]

    @cache  # noqa: B019 - of one run
    def exchange(self, axis: str, op: str, size: float) -> float:
        """Return the time of a collective of one group, which all groups of the machine do at once."""
        meet, groups = self.device.kernels.meet if self.device.kernels else 0.0, self.groups_of(axis)
        if op != "all-to-all":
            return meet + self.wires.ring(
                Op.ALL_GATHER if op == "ring" else Op[op.upper().replace("-", "_")], groups, size
            )
        members = len(groups[0])  # a power of two: in round r member i and member i xor r exchange
        rounds = [[(group[i], group[i ^ r]) for group in groups for i in range(members)] for r in range(1, members)]
        return meet + fsum(max(self.wires.times(ways, size / members**2)) for ways in rounds)

    def exposed(self, exchange: Exchange, factor: float) -> float:
        alone, hidden = self.exchange(exchange.axis, exchange.op, exchange.size), 0.0
        if exchange.beside is not None:
            hidden = (self.device.kernels.beside if self.device.kernels else 1.0) * self.row(exchange.beside) * factor
        if exchange.op == "ring":  # in rounds, each beside a block, and the last block beside none
            hidden *= (self.context - 1) / self.context
        return max(0.0, alone - hidden)

    @cache  # noqa: B019 - of one run
    def of_rank(self, work: Operations, factor: float) -> float:
        """Return what a rank takes for operations that it begins with its group."""
        computed = fsum(times * self.row(row) for row, times in work.rows) * factor
        return computed + fsum(times * self.exposed(each, factor) for each, times in work.exchanges)


class EveryRank(TurnPlayer):
    """Clocks of the ranks of each device, a column for each of them."""

    def __init__(self, run: Run, overlaps: Sequence[str], slow: Mapping[int, float]) -> None:
        self.machine = Machine(run, slow)
        self.zero: Clocks = np.zeros(self.machine.team)
        super().__init__(run, overlaps)
        self.duration = [self._message(node) for node in range(self.program.nodes)]
        self.release = {
            task: float(share) * sum(self._alone(each) for each in range(task, task + self.program.phases))
            for task, share in self.program.releases
        }

    @staticmethod
    def latest(*times: Any) -> Any:
        return np.maximum.reduce(times)

    def _gathers(self, node: int) -> list[float]:
        """Return the times of the gathers of what a task has got in shares, of which all ranks need the whole."""
        mesh, messages = self.machine.model.mesh, self.program.messages
        if mesh.sequence or mesh.whole_boundaries or self.machine.tensor == 1:
            return []
        rows = [before - self.count for before in self.needs[node] if before >= self.count]
        device = self.program.tasks.device[node]
        rows = [r for r in rows if messages.op[r] == Op.P2P and messages.dst[r] == device]
        rows = [r for r in rows if messages.content[r] in (Content.ACTIVATION, Content.ACTIVATION_GRADIENT)]
        return [
            self.machine.exchange("tensor", "all-gather", int(messages.size[r]) * self.machine.tensor) for r in rows
        ]

    def _work(self, node: int, factor: float) -> float:
        """Return what a rank takes for a task without gathers of boundaries."""
        tasks, stages = self.program.tasks, self.machine.model.stages
        stage, kind = stages[int(tasks.stage[node])], tasks.kind[node]
        if kind == Kind.U:
            sums = [("tensor", stage.partial)]
            if self.machine.context > 1 and not self.program.state.streams:  # else data ranks sum these, too
                sums.append(("context", stage.gradient_bytes))
            return fsum(self.machine.exchange(axis, "all-reduce", size) for axis, size in sums if size)
        work = stage.forward if kind == Kind.F else stage.backward
        assert isinstance(work, Operations)
        return self.machine.of_rank(work, factor)

    def _alone(self, node: int) -> float:
        return sum(self._gathers(node)) + self._work(node, 1.0)

    def _message(self, node: int) -> Clocks:
        """Return the time of each rank's message, or of its collective of data ranks; 0 for tasks."""
        if node < self.count:
            return self.zero
        messages, row, ranks = self.program.messages, node - self.count, self.machine.ranks
        size, dst = int(messages.size[row]), int(messages.dst[row])
        if messages.op[row] == Op.P2P:
            ways = list(zip(ranks(int(messages.src[row])), ranks(dst), strict=True))
            return np.array(self.machine.wires.times(ways, size))
        apart = self.machine.team // self.program.copies_of(dst)  # ranks of a device that have the same weights
        members = [ranks(int(device)) for device in self.program.groups[dst]]
        groups = [sorted(rank for each in members for rank in each[x::apart]) for x in range(apart)]
        return np.full(self.machine.team, self.machine.wires.ring(Op(messages.op[row]), groups, size))

    def _time(self, node: int, earliest: Clocks) -> None:
        ready = np.maximum.reduce([self.zero + earliest, *(self.end[before] for before in self.needs[node])])
        self.start[node] = ready
        if node >= self.count:
            self.end[node] = ready + self.duration[node]
            return
        for gather in self._gathers(node):
            ready = self.zero + ready.max() + gather
        factors = self.machine.factors[int(self.program.tasks.device[node])]
        ends = [begun + self._work(node, factor) for begun, factor in zip(ready, factors, strict=True)]
        self.end[node] = self.zero + max(ends)  # with an exchange in which its group waits for all


def play_ranks(run: Run, overlap: str, slow: Mapping[int, float]) -> list[float]:
    """Return when the last rank of each node ends; of the run, in which all overlaps, only the program is read."""
    ends = EveryRank(run, [overlap] * run.program.devices, slow).times()[1]
    return [float(ends[node].max()) for node in range(run.program.nodes)]

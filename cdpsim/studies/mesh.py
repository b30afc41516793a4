"""The groups of ranks of each axis, their links, what a rank sends over them, and its share of weights and tokens.

Ranks are those of the cluster. A link is as a rank sees it whose neighbours send at once, over the same cards.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from cdpsim.api import simulate
from cdpsim.cluster import Cluster
from cdpsim.files.tables import Column, PrintedTable
from cdpsim.files.units import short_text
from cdpsim.numeric.columns import Ints
from cdpsim.program import Content, Op
from cdpsim.request import Request, describe_request
from cdpsim.request.reading import places_and_data, undisturbed, usual_numbering
from cdpsim.runs import Run
from cdpsim.schedules.state import MOST_SPLIT
from cdpsim.timing.collective_times import alike_group
from cdpsim.trace.metrics.communication import bytes_sent

# The words of torchtitan (`parallel_dims.py`) and of Megatron-LM (`arguments.py`) for each axis.
WORDS = {
    "tensor": ("tp", "--tensor-model-parallel-size"),
    "context": ("cp", "--context-parallel-size"),
    "expert": ("ep", "--expert-model-parallel-size"),
    "expert copies": ("efsdp", None),
    "shard": ("dp_shard", "--use-distributed-optimizer"),
    "replicas": ("dp_replicate", "--num-distributed-optimizer-instances"),
    "place": ("pp", "--pipeline-model-parallel-size"),
}


class RankAxis(NamedTuple):
    """An axis: its groups of ranks, a row for each, and its slowest link; what a rank sends in a step, if known."""

    axis: str
    degree: int
    groups: Ints
    crosses: bool = False  # whether a group has ranks of several nodes
    latency: float | None = None
    bandwidth: float | None = None
    sent: float | None = None


class RankMesh(NamedTuple):
    """The ranks of a request: their axes, and by what is shared the number of the share that each rank has."""

    request: Request
    axes: list[RankAxis]
    shares: Mapping[str, Ints]

    def __repr__(self) -> str:
        return str(self.table)

    @property
    def heading(self) -> str:
        """The number of ranks, and the order of their axes."""
        order = self.request.given["ranks"] or usual_numbering(self.request.model.mesh)
        return f"{self.axes[0].groups.size} ranks, numbered {order}"

    @property
    def table(self) -> PrintedTable:
        """A row for each axis; people see the first of its groups."""
        flags = [flag for each in self.axes if each.degree > 1 and (flag := WORDS[each.axis][1])]
        notes = [f"Megatron-LM: {', '.join(flags)}"] * bool(flags) + [", ".join(describe_request(self.request))]
        record = [
            each._asdict()
            | {"groups": len(each.groups), "ranks": each.groups.tolist(), "torchtitan": word, "megatron": flag}
            for each in self.axes
            for word, flag in [WORDS[each.axis]]
        ]
        return PrintedTable(_MESH_COLUMNS, self.axes, record, [self.heading], list(filter(None, notes)))


def _group_words(axis: RankAxis) -> str | None:
    """Return the first group, in which ranks in a row are a range, and dots for others."""
    group, many = axis.groups[0].tolist(), axis.degree
    few = [*group[:2], "…", group[-1]] if many > 4 else group
    in_row = many > 2 and group == [*range(group[0], group[0] + many)]
    words = f"{group[0]}-{group[-1]}" if in_row else " ".join(map(str, few))
    return words + ", …" * (len(axis.groups) > 1) if many > 1 else None


def _link_words(axis: RankAxis) -> str | None:
    if axis.latency is None or axis.bandwidth is None or (axis.latency, axis.bandwidth) == (0.0, inf):
        return None
    where = "across nodes" if axis.crosses else "in a node"
    return f"{where}, {short_text(axis.bandwidth, 'B/s')}, {short_text(axis.latency, 's')}"


_MESH_COLUMNS = (
    *map(Column, ("axis", "degree")),
    Column("groups", lambda axis: len(axis.groups)),
    Column("ranks", lambda axis: axis.groups.tolist(), words=_group_words),
    *(Column(name, heading="") for name in ("crosses", "latency", "bandwidth")),
    Column("", heading="slowest link", words=_link_words),
    Column("sent", unit="B"),
    Column("torchtitan", lambda axis: WORDS[axis.axis][0], rank=1),
    Column("megatron", lambda axis: WORDS[axis.axis][1], heading=""),
)


def mesh(request: Request) -> RankMesh:
    """Return the groups of ranks of each axis; what a rank sends is that of a run, and unknown in slots.

    >>> found = mesh(Request("1f1b", 2, replicas=2, tensor=2, model="llama2-13b", cluster="a100-nodes"))
    >>> {each.axis: each.groups.tolist()[0] for each in found.axes if each.degree > 1}
    {'tensor': [0, 1], 'replicas': [0, 2], 'place': [0, 4]}
    """
    places, data = places_and_data(request.schedule, replace(request.shape, widths=request.widths))
    sizes, shard = request.model.mesh, request.shape.shard if request.zero else 1
    program = np.arange(data * places).reshape(data // shard, shard, places)
    teams = np.moveaxis(request.cluster.at(program), -1, 0)
    own = np.arange(sizes.team).reshape(sizes.context, sizes.tensor)
    ranks: Ints = teams[..., None, None] * sizes.team + own
    sharing = (shard if request.zero else data) * sizes.team // sizes.expert  # that have the same experts
    blocks = ranks.reshape(places, -1, sharing, sizes.expert)
    found = {  # the axis last, and how many neighbours send at once
        "tensor": (ranks, 1),
        "context": (np.moveaxis(ranks, 3, -1), sizes.tensor),
        "expert": (blocks, 1),
        "expert copies": (np.swapaxes(blocks, 2, 3), min(sizes.expert, sizes.team)),
        "shard": (np.moveaxis(ranks, 2, -1), sizes.team),
        "replicas": (np.moveaxis(ranks, 1, -1), sizes.team),
        "place": (np.moveaxis(ranks, 0, -1), sizes.team),
    }
    run = None if request.in_slots else simulate(request.with_steps(request.steps, ignore_memory=True))
    sent, machine = _sent_by_rank(run, places) if run else {}, undisturbed(request.machine)
    axes = [
        _axis(name, groups.reshape(-1, groups.shape[-1]), side, machine)._replace(sent=sent.get(name))
        for name, (groups, side) in found.items()
        if sizes.expert > 1 or not name.startswith("expert")
    ]
    return RankMesh(request, axes, _shares(request, ranks))


def _axis(name: str, groups: Ints, side: int, machine: Cluster) -> RankAxis:
    """Return an axis with its slowest link, as one of `side` ranks sees it, which send at once."""
    axis = RankAxis(name, groups.shape[1], groups)
    if axis.degree == 1:
        return axis
    seen, nodes = machine.team(side).sized(groups.size // side), machine.nodes(groups)
    alike = {alike_group(seen, group) for group in np.sort(groups // side)}
    latency, bandwidth = zip(*(seen.group_link(np.array(group.members)) for group in alike), strict=True)
    crosses = bool((nodes != nodes[:, :1]).any())
    return axis._replace(crosses=crosses, latency=max(latency), bandwidth=min(bandwidth))


def _shares(request: Request, ranks: Ints) -> dict[str, Ints]:
    """Return which share of weights and of tokens each rank has, of the experts and of all else.

    A rank of a group of experts may get tokens of all its ranks.
    """
    place, replica, shard, context, tensor = np.indices(ranks.shape)
    sizes, split = request.model.mesh, request.zero == MOST_SPLIT
    group, own = np.divmod(np.broadcast_to(np.arange(ranks[0].size).reshape(ranks[0].shape), ranks.shape), sizes.expert)
    within = group % max(1, ranks[0, 0].size // sizes.expert)
    digits = {
        "weights": [place, tensor] + [shard, context] * split,
        "tokens": [replica, shard, context] + [tensor] * sizes.sequence,
        "weights of experts": [place, own] + [within] * split,
        "tokens for experts": [group],
    }
    found = {}
    for what in digits if sizes.expert > 1 else ("weights", "tokens"):
        columns = np.stack([each.ravel() for each in digits[what]])[:, np.argsort(ranks.ravel())]
        _, first, share = np.unique(columns, axis=1, return_index=True, return_inverse=True)
        found[what] = np.argsort(np.argsort(first))[share.ravel()]  # numbered as they come
    return found


def _sent_by_rank(run: Run, places: int) -> dict[str, float]:
    """Return the bytes that a rank sends in a step over each axis, on the device that sends most.

    A message goes along the axis in which its members differ; sums of experts may be among the same ranks as others.
    """
    program, tasks, messages = run.program, run.program.tasks, run.program.messages
    sizes, shard = run.request.model.mesh, run.request.shape.shard
    of_experts = max(1, sizes.team // sizes.expert), max(1, sizes.expert // sizes.team)
    sent: dict[str, Any] = {name: np.zeros(program.devices) for name in WORDS}
    for row in run.exchanges or ():
        devices = np.unique(tasks.device[tasks.stage == row.stage])
        sent[row.axis][devices] += float(row.sent * row.times) / (len(devices) * program.fold)
    of_message = np.where(messages.content <= Content.ACTIVATION_GRADIENT, "place", "replicas").astype(object)
    for group in range(len(program.groups)):
        copies = program.copies_of(group)
        rank = program.ranks_of(group) // copies // places
        apart = int(np.append(np.diff(np.unique(rank)), of_experts[1])[0])
        digits = {"expert copies": (copies, apart) == of_experts not in ((sizes.context, 1), (sizes.context, shard))}
        digits |= {"replicas": bool(np.ptp(rank // shard)), "shard": bool(np.ptp(rank)), "context": copies > 1}
        axis = next((name for name, differ in digits.items() if differ), "place")
        of_message[(messages.op != Op.P2P) & (messages.dst == group)] = axis
    for name in WORDS:
        each = bytes_sent(program, run.costs, np.flatnonzero(of_message == name))[: program.devices]
        sent[name] += np.array([float(size) for size in each]) / program.steps
    return {name: float(size.max()) for name, size in sent.items() if size.any()}

"""Points and edges: the graph that a topology is, for so many devices."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cdpsim.cluster.topology import MOST_JOINED, PORTS, Cable, Edge, Topology
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Floats, Ints

MOST_MESHED = 2_000  # devices of one full mesh, each of which has an edge to every other


@dataclass(frozen=True, eq=False)
class Graph:
    """Points and directed edges, ascending by tail, then head; points are devices by number, then switches."""

    devices: int
    switches: tuple[str, ...]
    tail: Ints
    head: Ints
    latency: Floats
    bandwidth: Floats
    cards: Ints | None = None  # the number of each device's network card; None: devices have none

    @property
    def forwards(self) -> bool:
        """Whether devices pass on what is for others."""
        return self.cards is None

    @property
    def points(self) -> int:
        """The number of devices and switches."""
        return self.devices + len(self.switches)

    @cached_property
    def _pairs(self) -> Ints:
        return self.tail * self.points + self.head

    def edge(self, tail: Ints, head: Ints) -> Ints:
        """Give the number of the edge from point to point; -1 where there is none."""
        if not len(self._pairs):
            return np.full(len(tail), -1)
        wanted = tail * self.points + head
        place = np.searchsorted(self._pairs, wanted).clip(max=len(self._pairs) - 1)
        return np.where(self._pairs[place] == wanted, place, -1)

    def name(self, point: int) -> str:
        """What a point is called: a device by its number."""
        return str(point) if point < self.devices else self.switches[point - self.devices]


@dataclass
class _Draft:
    """A graph in the making: who has an edge to whom, in blocks that share a cable."""

    devices: int
    switches: list[str] = field(default_factory=list)
    tail: list[Ints] = field(default_factory=list)
    head: list[Ints] = field(default_factory=list)
    latency: list[Floats] = field(default_factory=list)
    bandwidth: list[Floats] = field(default_factory=list)

    def switch(self, name: str) -> int:
        self.switches.append(name)
        return self.devices + len(self.switches) - 1

    def one_way(self, tail: Ints, head: Ints, latency: float, bandwidth: float) -> None:
        self.tail.append(tail)
        self.head.append(head)
        self.latency.append(np.full(len(tail), latency))
        self.bandwidth.append(np.full(len(tail), bandwidth))

    def join(self, low: Ints, high: Ints, cable: Cable, back: Ints | None = None) -> None:
        self.one_way(low, high, *cable.there)
        self.one_way(high, low if back is None else back, *cable.back)


def draw(topology: Topology | None, edges: tuple[Edge, ...], count: int) -> Graph:
    """Make the graph of that many devices."""
    check(topology, count)
    draft = _Draft(count)
    if topology is not None:
        _DRAWERS[topology.kind](draft, np.arange(count), topology)
    _draw_edges(draft, edges)
    return _finished(draft, _cards(topology, np.arange(count)))


def _cards(topology: Topology | None, device: Ints) -> Ints | None:
    """Number the cards of all nodes through, for each device."""
    if topology is None or topology.kind != "nodes":
        return None
    return node_of(topology, device) * topology.nics + card_of(topology, device)


def check(topology: Topology | None, count: int) -> None:
    """Refuse what a topology of that many devices cannot be."""
    if count > MOST_JOINED:
        raise RequestError("topology", f"{count} devices are too many; at most {MOST_JOINED}, or [link] for all pairs")
    if topology is not None and topology.kind == "mesh":
        _meshed(count)
    if topology is not None and topology.ports is not None:
        size = topology.per_node or 1
        whole, rest = divmod(count, size)
        cards = whole * topology.nics + ((rest - 1) * topology.nics // size + 1 if rest else 0)
        _fewest_ports(cards, topology.ports)


def mesh(count: int) -> tuple[Ints, Ints]:
    """Give all ordered pairs of different devices."""
    tail, head = np.nonzero(~np.eye(_meshed(count), dtype=np.bool_))
    return tail.astype(np.int64), head.astype(np.int64)


def draw_mesh(count: int, latency: Floats, bandwidth: Floats) -> Graph:
    """Make the graph in which each pair of `mesh` has an edge of its own, with these costs in that order."""
    return Graph(count, (), *mesh(count), latency, bandwidth)


def node_of(topology: Topology | None, device: npt.NDArray[Any]) -> Ints:
    """Say in which node each device is: all in one where nobody says more."""
    size = None if topology is None else topology.per_node
    return np.zeros(len(device), np.int64) if size is None else device.astype(np.int64) // size


def card_of(topology: Topology | None, device: npt.NDArray[Any]) -> Ints:
    """Say which of its node's network cards each device sends by: 0 where nobody says that there are several."""
    if topology is None or topology.per_node is None:
        return np.zeros(len(device), np.int64)
    return device.astype(np.int64) % topology.per_node * topology.nics // topology.per_node


def _draw_ring(draft: _Draft, points: Ints, topology: Topology) -> None:
    if len(points) > 1:
        around = slice(None) if len(points) > 2 else slice(1)
        draft.join(points[around], np.roll(points, -1)[around], topology.link)


def _draw_mesh(draft: _Draft, points: Ints, topology: Topology) -> None:
    low, high = np.triu_indices(_meshed(len(points)), 1)
    draft.join(points[low], points[high], topology.link)


def _draw_switch(draft: _Draft, points: Ints, topology: Topology, name: str = "switch") -> None:
    draft.join(points, np.full(len(points), draft.switch(name)), topology.link)


def _draw_nodes(draft: _Draft, points: Ints, topology: Topology) -> None:
    """Nodes of devices in a row; card c of a node has an equal run of its devices, the network all cards.

    A card is two points, one for each direction: no message turns back in it.
    """
    size = topology.per_node or 1
    cards: list[tuple[Ints, Ints]] = []
    for node, begin in enumerate(range(0, len(points), size)):
        own = points[begin : begin + size]
        if topology.inside == "switch":
            _draw_switch(draft, own, topology, f"node {node}")
        else:
            _draw_mesh(draft, own, topology)
        share = card_of(topology, own)
        names = [f"nic {node}.{c}" for c in range(int(share[-1]) + 1)]
        out, into = (np.array([draft.switch(f"{name} {way}") for name in names]) for way in ("out", "in"))
        draft.one_way(own, out[share], *topology.host.there)
        draft.one_way(into[share], own, *topology.host.back)
        cards.append((out, into))
    out, into = (np.concatenate(ends) for ends in zip(*cards, strict=True))
    if topology.across == "fat-tree":
        _draw_tree(draft, out, into, topology.network, topology.ports)
    else:
        draft.join(out, np.full(len(out), draft.switch("network")), topology.network, into)


def _draw_fat_tree(draft: _Draft, points: Ints, topology: Topology) -> None:
    _draw_tree(draft, points, points, topology.link, topology.ports)


def _draw_tree(draft: _Draft, hosts: Ints, into: Ints, cable: Cable, ports: int | None) -> None:
    """The k-ary fat tree of Al-Fares, Loukissas and Vahdat (SIGCOMM 2008, section 3), as far as hosts fill its pods.

    Of switches with k ports: k pods, in each k/2 edge and k/2 aggregation switches; (k/2)² cores; k³/4 hosts.
    """
    half = _fewest_ports(len(hosts), ports) // 2
    cores = np.array([draft.switch(f"core {c}") for c in range(half * half)])
    for pod, first in enumerate(range(0, len(hosts), half * half)):
        own = np.arange(first, min(first + half * half, len(hosts)))
        middle = np.array([draft.switch(f"aggregation {pod}.{a}") for a in range(half)])
        lowest = np.array([draft.switch(f"edge {pod}.{e}") for e in range(-(-len(own) // half))])
        draft.join(hosts[own], lowest[(own - first) // half], cable, into[own])
        draft.join(np.repeat(lowest, half), np.tile(middle, len(lowest)), cable)
        draft.join(np.repeat(middle, half), cores, cable)


def _fewest_ports(hosts: int, ports: int | None) -> int:
    if ports is not None and ports**3 // 4 < hosts:
        raise RequestError("ports", f"{ports} ports serve {ports**3 // 4} hosts, not {hosts}; take more ports")
    return ports or next(k for k in range(2, PORTS, 2) if k**3 // 4 >= hosts)


def _draw_nothing(draft: _Draft, points: Ints, topology: Topology) -> None:
    """Edges alone."""


_DRAWERS: dict[str, Callable[[_Draft, Ints, Topology], None]] = {
    "ring": _draw_ring,
    "mesh": _draw_mesh,
    "switch": _draw_switch,
    "nodes": _draw_nodes,
    "fat-tree": _draw_fat_tree,
    "edges": _draw_nothing,
}


def _draw_edges(draft: _Draft, edges: tuple[Edge, ...]) -> None:
    numbers = {name: draft.devices + k for k, name in enumerate(draft.switches)}
    for edge in edges:
        for end in edge.between:
            if isinstance(end, str) and end not in numbers:
                numbers[end] = draft.switch(end)
        for ends in edge.directions:
            tail, head = (np.array([end if isinstance(end, int) else numbers[end]]) for end in ends)
            draft.one_way(tail, head, edge.latency, edge.reached)


def _meshed(count: int) -> int:
    if count > MOST_MESHED:
        raise RequestError("mesh", f"{count} devices are too many; at most {MOST_MESHED}, or [link] for all pairs")
    return count


def _finished(draft: _Draft, cards: Ints | None) -> Graph:
    empty = np.zeros(0, np.int64)
    tail, head = (np.concatenate([empty, *ends]) for ends in (draft.tail, draft.head))
    latency, bandwidth = (np.concatenate([np.zeros(0), *costs]) for costs in (draft.latency, draft.bandwidth))
    order = np.lexsort((head, tail))
    graph = Graph(
        draft.devices, tuple(draft.switches), tail[order], head[order], latency[order], bandwidth[order], cards
    )
    again = (np.diff(graph.tail) == 0) & (np.diff(graph.head) == 0)
    if again.any():
        k = int(again.argmax())
        shown = f"between [{graph.name(int(graph.tail[k]))!r}, {graph.name(int(graph.head[k]))!r}]"
        raise RequestError("edges", f"{shown} twice; keep one, or make both one_way")
    return graph

"""Points and edges: the graph that a topology is, for so many devices."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cdpsim.cluster.topology import MOST_DEVICES, MOST_JOINED, PORTS, Cable, Edge, Layout, Topology
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
        """Whether devices pass on messages for others."""
        return self.cards is None

    @property
    def points(self) -> int:
        """The number of devices and switches."""
        return self.devices + len(self.switches)

    @cached_property
    def by_head(self) -> tuple[Ints, Ints]:
        """The edges, ascending by head, and where those to each point begin among them."""
        order = np.argsort(self.head, kind="stable")
        return order, np.searchsorted(self.head[order], np.arange(self.points + 1))

    @cached_property
    def _pairs(self) -> Ints:
        """Each edge's tail and head as one number, ascending."""
        return self.tail * self.points + self.head

    def edge(self, tail: Ints, head: Ints) -> Ints:
        """Return the number of the edge from each tail to each head; -1 where there is none."""
        if not len(self._pairs):
            return np.full(len(tail), -1)
        wanted = tail * self.points + head
        place = np.searchsorted(self._pairs, wanted).clip(max=len(self._pairs) - 1)
        return np.where(self._pairs[place] == wanted, place, -1)

    def name(self, point: int) -> str:
        """Return what users call a point: a device is called by its number."""
        return str(point) if point < self.devices else self.switches[point - self.devices]


@dataclass
class _Draft:
    """A graph in the making: switches by name, and blocks of edges that share a cable."""

    devices: int
    switches: list[str] = field(default_factory=list)
    blocks: list[tuple[Ints, Ints, Floats, Floats]] = field(default_factory=list)  # as in `Graph`

    def switch(self, name: str) -> int:
        """Add a switch; return its point."""
        self.switches.append(name)
        return self.devices + len(self.switches) - 1

    def one_way(self, tail: Ints, head: Ints, latency: float, bandwidth: float) -> None:
        """Add edges from each tail to its head."""
        self.blocks.append((tail, head, np.full(len(tail), latency), np.full(len(tail), bandwidth)))

    def join(self, low: Ints, high: Ints, cable: Cable, back: Ints | None = None) -> None:
        """Add a cable from each low point to its high one, and back to it, or to its point in `back`."""
        self.one_way(low, high, *cable.there)
        self.one_way(high, low if back is None else back, *cable.back)

    def finished(self, cards: Ints | None) -> Graph:
        """Return the graph; refuse two edges between the same points."""
        tail, head, latency, bandwidth = (np.concatenate(column) for column in zip(*self.blocks, strict=True))
        order = np.lexsort((head, tail))
        ends, costs = (tail[order], head[order]), (latency[order], bandwidth[order])
        graph = Graph(self.devices, tuple(self.switches), *ends, *costs, cards)
        again = np.flatnonzero((np.diff(graph.tail) == 0) & (np.diff(graph.head) == 0))
        if len(again):
            between = [graph.name(int(column[again[0]])) for column in (graph.tail, graph.head)]
            raise RequestError("edges", f"between {between} twice; keep one, or make both one_way")
        return graph


def draw_graph(topology: Topology | None, edges: tuple[Edge, ...], count: int) -> Graph:
    """Return the graph of that many devices."""
    check_topology(topology, count)
    draft, points = _Draft(count), np.arange(count)
    draft.one_way(points[:0], points[:0], 0.0, 0.0)  # one block at least
    cards = None
    if topology is not None:
        _DRAWERS[topology.kind](draft, points, topology)
        if topology.kind == "nodes":
            cards = card_of(topology, points)
    _draw_edges(draft, edges)
    return draft.finished(cards)


def check_topology(topology: Topology | None, count: int) -> None:
    """Refuse a topology that cannot have that many devices."""
    if count > MOST_JOINED:
        raise RequestError("topology", f"{count} devices are too many; at most {MOST_JOINED}, or [link] for all pairs")
    if topology is None:
        return
    if topology.kind == "mesh":
        _check_mesh(count)
    if topology.ports is not None:
        size = topology.per_node or 1
        whole_nodes, rest = divmod(count, size)
        cards = whole_nodes * topology.nics + ((rest - 1) * topology.nics // size + 1 if rest else 0)
        _fewest_ports(cards, topology.ports)


def node_of(topology: Topology | Layout | None, device: Ints) -> Ints:
    """Return the node of each device: all are in one where the topology does not say how many a node has."""
    return np.asarray(device, np.int64) // (MOST_DEVICES if topology is None else topology.per_node or MOST_DEVICES)


def card_of(topology: Topology | Layout | None, device: Ints) -> Ints:
    """Return the network card by which each device sends, numbered through all nodes; each has one or more."""
    if topology is None or topology.per_node is None:
        return node_of(topology, device)
    size = topology.per_node
    return node_of(topology, device) * topology.nics + np.asarray(device, np.int64) % size * topology.nics // size


def _draw_ring(draft: _Draft, points: Ints, topology: Topology) -> None:
    if len(points) > 1:
        around = slice(None) if len(points) > 2 else slice(1)
        draft.join(points[around], np.roll(points, -1)[around], topology.link)


def _draw_mesh(draft: _Draft, points: Ints, topology: Topology) -> None:
    low, high = np.triu_indices(_check_mesh(len(points)), 1)
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
        devices = points[begin : begin + size]
        if topology.inside == "switch":
            _draw_switch(draft, devices, topology, f"node {node}")
        else:
            _draw_mesh(draft, devices, topology)
        card = card_of(topology, devices) - node * topology.nics
        names = [f"nic {node}.{c}" for c in range(int(card[-1]) + 1)]
        out, into = (np.array([draft.switch(f"{name} {way}") for name in names]) for way in ("out", "in"))
        draft.one_way(devices, out[card], *topology.host.there)
        draft.one_way(into[card], devices, *topology.host.back)
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
        pod_hosts = np.arange(first, min(first + half * half, len(hosts)))
        middle = np.array([draft.switch(f"aggregation {pod}.{a}") for a in range(half)])
        lowest = np.array([draft.switch(f"edge {pod}.{e}") for e in range(-(-len(pod_hosts) // half))])
        draft.join(hosts[pod_hosts], lowest[(pod_hosts - first) // half], cable, into[pod_hosts])
        draft.join(np.repeat(lowest, half), np.tile(middle, len(lowest)), cable)
        draft.join(np.repeat(middle, half), cores, cable)


def _fewest_ports(hosts: int, ports: int | None) -> int:
    if ports is not None and ports**3 // 4 < hosts:
        raise RequestError("ports", f"{ports} ports serve {ports**3 // 4} hosts, not {hosts}; take more ports")
    return ports or next(k for k in range(2, PORTS, 2) if k**3 // 4 >= hosts)


_DRAWERS: dict[str, Callable[[_Draft, Ints, Topology], None]] = {
    "ring": _draw_ring,
    "mesh": _draw_mesh,
    "switch": _draw_switch,
    "nodes": _draw_nodes,
    "fat-tree": _draw_fat_tree,
    "edges": lambda *_: None,
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


def _check_mesh(count: int) -> int:
    """Return the number of devices of a full mesh; refuse too many."""
    if count > MOST_MESHED:
        raise RequestError("mesh", f"{count} devices are too many; at most {MOST_MESHED}, or [link] for all pairs")
    return count

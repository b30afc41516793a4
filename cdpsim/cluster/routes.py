"""The route of a message through a graph: fewest edges, then least latency, then by turns.

The graph has points and edges: a topology written out for a number of devices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf

import numpy as np

from cdpsim.cluster.topology import MOST_DEVICES, MOST_JOINED, PORTS, Cable, Edge, Layout, Topology
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Floats, Ints, group_starts, slice_rows

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
        _fewest_ports(cards * topology.apart, topology.ports)


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
        _draw_tree(draft, out, into, topology.network, topology.ports, topology.apart)
    else:
        draft.join(out, np.full(len(out), draft.switch("network")), topology.network, into)


def _draw_fat_tree(draft: _Draft, points: Ints, topology: Topology) -> None:
    _draw_tree(draft, points, points, topology.link, topology.ports)


def _draw_tree(draft: _Draft, hosts: Ints, into: Ints, cable: Cable, ports: int | None, apart: int = 1) -> None:
    """The k-ary fat tree of Al-Fares, Loukissas and Vahdat (SIGCOMM 2008, section 3), as far as hosts fill its pods.

    Of switches with k ports: k pods, in each k/2 edge and k/2 aggregation switches; (k/2)² cores; k³/4 hosts.
    """
    half = _fewest_ports(len(hosts) * apart, ports) // 2
    place = np.arange(len(hosts)) * apart  # among all hosts of the tree, of which the others are not drawn
    cores = np.array([draft.switch(f"core {c}") for c in range(half * half)])
    for pod in range(int(place[-1]) // (half * half) + 1):
        pod_hosts = np.flatnonzero(place // (half * half) == pod)
        middle = np.array([draft.switch(f"aggregation {pod}.{a}") for a in range(half)])
        edges, edge = np.unique(place[pod_hosts] // half, return_inverse=True)
        lowest = np.array([draft.switch(f"edge {pod}.{e % half}") for e in edges.tolist()])
        draft.join(hosts[pod_hosts], lowest[edge], cable, into[pod_hosts])
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


_QUANTA_PER_SECOND = 1e15  # routes that differ by less than a femtosecond are equally fast
_MOST_KEPT = 2**25  # the size of the cache, in points times destinations
_SWEPT_AT_ONCE = 2**21  # likewise


@dataclass(frozen=True, eq=False)
class _RoutesTo:
    """Every point's best route to one device."""

    first_edge: Ints  # of the route, from each point; -1 where there is none
    latency: Floats  # of the whole route, from each device
    bandwidth: Floats  # the smallest on it


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes of a graph, found when they are asked for.

    Where c routes are equally good at a point, destinations take turns, so that not all of them crowd one core switch
    of a fat tree. The last digit, or the last but one, of the destination's number (or of its network card's) in base c
    picks the route, as in InfiniBand's D-mod-k routing (Zahavi, Johnson, Kerbyson and Lang 2010).
    """

    graph: Graph
    known: dict[int, _RoutesTo] = field(default_factory=dict)

    def costs(self, src: Ints, dst: Ints) -> tuple[Floats, Floats]:
        """Return latency (summed over a route's edges) and bandwidth (the smallest of them) from devices to devices."""
        latency, bandwidth = np.zeros(len(src)), np.full(len(src), inf)
        edge = self.graph.edge(src, dst)
        direct = edge >= 0
        latency[direct], bandwidth[direct] = self.graph.latency[edge[direct]], self.graph.bandwidth[edge[direct]]
        for rows, routes in self._by_destination(src, dst, np.flatnonzero(~direct & (src != dst))):
            latency[rows], bandwidth[rows] = routes.latency[src[rows]], routes.bandwidth[src[rows]]
        return latency, bandwidth

    def edges(self, src: Ints, dst: Ints) -> Ints:
        """Return the numbers of the edges from devices to other devices, a row each, in order; -1 fills rows up."""
        columns = [self.graph.edge(src, dst)]
        for far, routes in self._by_destination(src, dst, np.flatnonzero(columns[0] < 0)):
            rows, at, hop = far, src[far], 0
            while len(rows):
                if hop == len(columns):
                    columns.append(np.full(len(src), -1))
                columns[hop][rows] = edge = routes.first_edge[at]
                at, hop = self.graph.head[edge], hop + 1
                moving = at != dst[rows]
                rows, at = rows[moving], at[moving]
        return np.stack(columns, axis=1)

    def _by_destination(self, src: Ints, dst: Ints, rows: Ints) -> Iterator[tuple[Ints, _RoutesTo]]:
        """Yield, for each destination, its rows and the routes to it; refuse a row without a route."""
        rows = rows[np.argsort(dst[rows], kind="stable")]
        starts = group_starts(dst[rows])
        ends, of_end = dst[rows][starts], np.split(rows, starts[1:])
        step = max(1, _SWEPT_AT_ONCE // self.graph.points)
        for k in range(0, len(ends), step):
            self._find(ends[k : k + step])
            for end, these in zip(ends[k : k + step].tolist(), of_end[k : k + step], strict=True):
                routes = self.known[end]
                if (lost := routes.first_edge[src[these]] < 0).any():
                    problem = f"no route from device {src[these][lost.argmax()]} to device {end}; add an edge"
                    raise RequestError("topology", problem)
                yield these, routes

    def _find(self, devices: Ints) -> None:
        """Find the routes to devices; forget others if they are too many."""
        wanted = np.array([device for device in devices.tolist() if device not in self.known], np.int64)
        if (len(self.known) + len(wanted)) * self.graph.points > _MOST_KEPT:
            self.known.clear()
            wanted = devices
        if len(wanted):
            self.known.update(zip(wanted.tolist(), _sweep(self.graph, wanted), strict=True))


@dataclass(frozen=True, eq=False)
class TwoNodes:
    """Routes of two nodes round one switch; they stand for the routes of any number of equal nodes.

    Points are the devices of both nodes, then what else is in the first one and in the second one, then the switch.
    """

    topology: Topology

    @property
    def _size(self) -> int:
        return self.topology.per_node or 1

    @cached_property
    def layout(self) -> Layout:
        """The layout: how they are joined, without costs of cables."""
        return self.topology.layout

    @cached_property
    def _bandwidths(self) -> Floats:
        return np.array(self.topology.bandwidths)

    def shared_edges(self, src: Ints, dst: Ints) -> tuple[Ints, Floats]:
        """Return the numbers of the edges with a limit between devices of any nodes, as `number_edges`, and limits."""
        edges, cable = _edges_of_layout(self.layout, *(np.asarray(end, np.int64).tobytes() for end in (src, dst)))
        return edges, self._bandwidths[cable]

    @cached_property
    def _routes(self) -> Routes:
        return Routes(draw_graph(self.topology, (), 2 * self._size))

    def costs(self, src: Ints, dst: Ints) -> tuple[Floats, Floats]:
        """Return latency and bandwidth between devices of any nodes."""
        latency, bandwidth = self._costs_of_ways
        way = np.where(src // self._size == dst // self._size, 1 + np.sign(src - dst), 3)
        return latency[way], bandwidth[way]

    @cached_property
    def _costs_of_ways(self) -> tuple[Floats, Floats]:
        """Latency and bandwidth of each way, summed from its end as a route's are."""
        ways = self.topology.cables_of_ways
        latency = [sum(cable[0] for cable in reversed(cables)) for cables in ways]
        return np.array(latency), np.array([min((cable[1] for cable in cables), default=inf) for cables in ways])

    def edges(self, src: Ints, dst: Ints) -> tuple[Ints, Floats]:
        """Return a number for each edge between devices of any nodes, -1 where rows are filled up, and bandwidths."""
        graph, size = self._routes.graph, self._size
        points = (graph.points - 1) // 2  # of a node
        devices, others = np.arange(size), np.arange(size, points)
        place = np.concatenate([devices, devices, others, others, [0]])  # of each point in its node, and its node:
        which = np.repeat([0, 1, 0, 1, 2], [size, size, points - size, points - size, 1])
        nodes = np.stack([src // size, dst // size, np.full(len(src), -1)])
        edge = self._routes.edges(*self._ends(src, dst))
        row = np.arange(len(src))[:, None]
        tail, head = (nodes[which[end[edge]], row] * points + place[end[edge]] for end in (graph.tail, graph.head))
        return np.where(edge < 0, -1, (tail + points << 32) + head + points), graph.bandwidth[edge]

    def _ends(self, src: Ints, dst: Ints) -> tuple[Ints, Ints]:
        """Return equivalent pairs of devices: the source in the first node, the destination in either one."""
        size = self._size
        return src % size, dst % size + size * (src // size != dst // size)


@lru_cache(maxsize=256)  # clusters that differ in what cables cost have the same edges
def _edges_of_layout(layout: Layout, src: bytes, dst: bytes) -> tuple[Ints, Ints]:
    """Return the edges between devices of a layout, and the number of the cable that each of them is."""
    ends = (np.frombuffer(end, np.int64) for end in (src, dst))
    edges, numbers = number_edges(*_nodes_of(layout).edges(*ends))
    return edges, numbers.astype(np.int64) - 1


@lru_cache(maxsize=16)
def _nodes_of(layout: Layout) -> TwoNodes:
    return TwoNodes(layout.topology)


def number_edges(edge: Ints, limit: Floats) -> tuple[Ints, Floats]:
    """Number the edges with a limit, a row of them for each way, which -1 fills up; return their limits, too."""
    limited = (edge >= 0) & np.isfinite(limit)
    _, row, number = np.unique(edge[limited], return_index=True, return_inverse=True)
    edge = np.full(edge.shape, -1)
    edge[limited] = number
    return np.take_along_axis(edge, np.argsort(edge < 0, axis=1, kind="stable"), axis=1), limit[limited][row]


def _sweep(graph: Graph, devices: Ints) -> list[_RoutesTo]:
    """Go back from all devices at once, an edge at a time; return the routes to each.

    A cell is a point's route to one of the devices: point * devices + place of the device.
    """
    width = len(devices)
    host = devices if graph.cards is None else graph.cards[devices]  # of a tree, which starts one hop behind cards
    edge_quanta = np.rint(graph.latency * _QUANTA_PER_SECOND)
    quanta = np.full(graph.points * width, inf)
    latency, bandwidth = np.full(len(quanta), inf), np.full(len(quanta), inf)
    first_edge = np.full(len(quanta), -1, np.int32)
    frontier = devices * width + np.arange(width)
    quanta[frontier] = latency[frontier] = 0
    hops = 0
    while len(frontier):
        if hops and not graph.forwards:
            frontier = frontier[frontier // width >= graph.devices]
        hops += 1
        edge, reached = _edges_into(graph, frontier, width)
        cell = graph.tail[edge] * width + reached % width
        new = np.isinf(quanta[cell])
        edge, reached, cell = edge[new], reached[new], cell[new]
        cost = quanta[reached] + edge_quanta[edge]
        np.minimum.at(quanta, cell, cost)
        best = np.flatnonzero(cost == quanta[cell])
        best = best[np.lexsort((edge[best], cell[best]))]
        frontier, start, routes = np.unique(cell[best], return_index=True, return_counts=True)
        turn = host[frontier % width] // routes ** ((hops + graph.forwards) % 2) % routes
        chosen = best[start + turn]
        first_edge[frontier] = edge[chosen]
        latency[frontier] = graph.latency[edge[chosen]] + latency[reached[chosen]]
        bandwidth[frontier] = np.minimum(graph.bandwidth[edge[chosen]], bandwidth[reached[chosen]])
    tables = first_edge, latency[: graph.devices * width], bandwidth[: graph.devices * width]
    by_device = (np.ascontiguousarray(table.reshape(-1, width).T) for table in tables)
    return [_RoutesTo(*columns) for columns in zip(*by_device, strict=True)]


def _edges_into(graph: Graph, frontier: Ints, width: int) -> tuple[Ints, Ints]:
    """Return the edges that lead to the points of a frontier's cells, and the cell that each of them reaches."""
    order, begin = graph.by_head
    point = frontier // width
    degree = begin[point + 1] - begin[point]
    return order[slice_rows(begin[point], degree)], np.repeat(frontier, degree)

"""The route of a message through a graph: fewest edges, then least latency, then by turns."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf

import numpy as np

from cdpsim.cluster.routes import Graph, draw_graph
from cdpsim.cluster.topology import Layout, Topology
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Floats, Ints, group_starts, slice_rows

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
        """The way in which they are joined, whatever their cables cost."""
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

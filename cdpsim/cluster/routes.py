"""The way of a message through a graph: fewest edges, then least latency, then by turns."""

from dataclasses import dataclass, field
from math import inf

import numpy as np

from cdpsim.cluster.graph import Graph
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Floats, Ints

_TICKS = 1e15  # a second: ways that differ by less than a femtosecond are equally fast
_MOST_KEPT = 2**25  # what is remembered, in points times destinations
_AT_ONCE = 2**21


@dataclass(frozen=True, eq=False)
class _Towards:
    """Every point's best way to one device."""

    first: Ints  # its first edge from each point; -1 where there is none
    latency: Floats  # of the whole way, from each device
    bandwidth: Floats  # the smallest on it


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes of a graph, found when they are asked for.

    Where several ways are equally good at a point, destinations take turns, so that not all of them crowd one core of a
    fat tree: of c ways, the one that the destination's number, or that of its network card, has as its last digit in
    base c, or last but one, as InfiniBand's D-mod-k routing does (Zahavi, Johnson, Kerbyson and Lang 2010).
    """

    graph: Graph
    known: dict[int, _Towards] = field(default_factory=dict)

    def costs(self, src: Ints, dst: Ints) -> tuple[Floats, Floats]:
        """Give latency (summed over a route's edges) and bandwidth (the smallest of them) from devices to devices."""
        latency, bandwidth = np.zeros(len(src)), np.full(len(src), inf)
        edge = self.graph.edge(src, dst)
        direct = edge >= 0
        latency[direct], bandwidth[direct] = self.graph.latency[edge[direct]], self.graph.bandwidth[edge[direct]]
        rest = np.flatnonzero(~direct & (src != dst))
        rest = rest[np.argsort(dst[rest], kind="stable")]
        ends, starts = np.unique(dst[rest], return_index=True)
        own = np.split(rest, starts[1:])
        step = max(1, _AT_ONCE // self.graph.points)
        for k in range(0, len(ends), step):
            self._find(ends[k : k + step])
            for end, rows in zip(ends[k : k + step].tolist(), own[k : k + step], strict=True):
                towards = self.known[end]
                self._require(towards, src[rows], end)
                latency[rows], bandwidth[rows] = towards.latency[src[rows]], towards.bandwidth[src[rows]]
        return latency, bandwidth

    def worst(self, members: Ints) -> tuple[float, float]:
        """Give the largest latency and the smallest bandwidth over all ordered pairs of several devices."""
        step = max(1, _AT_ONCE // len(members))
        latency, bandwidth = 0.0, inf
        for k in range(0, len(members), step):
            ends = members[k : k + step]
            own = self.costs(np.tile(members, len(ends)), np.repeat(ends, len(members)))
            latency, bandwidth = max(latency, float(own[0].max())), min(bandwidth, float(own[1].min()))
        return latency, bandwidth

    def ways(self, src: Ints, dst: Ints) -> tuple[Ints, Floats]:
        """Give the edges from devices to other devices, a row each, and their bandwidths; -1 fills rows up."""
        steps = [self.graph.edge(src, dst)]
        far = np.flatnonzero(steps[0] < 0)
        for end in np.unique(dst[far]).tolist():
            rows, hop = far[dst[far] == end], 0
            self._find(np.array([end]))
            self._require(self.known[end], at := src[rows], end)
            while len(rows):
                if hop == len(steps):
                    steps.append(np.full(len(src), -1))
                steps[hop][rows] = edge = self.known[end].first[at]
                at, hop = self.graph.head[edge], hop + 1
                rows, at = rows[at != end], at[at != end]
        found = np.stack(steps, axis=1)
        return found, self.graph.bandwidth[found]

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """Give the numbers of the edges from device to device, in their order."""
        if src == dst:
            return ()
        direct = int(self.graph.edge(np.array([src]), np.array([dst]))[0])
        if direct >= 0:
            return (direct,)
        self._find(np.array([dst]))
        towards = self.known[dst]
        self._require(towards, np.array([src]), dst)
        edges = []
        while src != dst:
            edges.append(int(towards.first[src]))
            src = int(self.graph.head[edges[-1]])
        return tuple(edges)

    def _require(self, towards: _Towards, src: Ints, dst: int) -> None:
        if (lost := towards.first[src] < 0).any():
            raise RequestError("topology", f"no route from device {src[lost.argmax()]} to device {dst}; add an edge")

    def _find(self, devices: Ints) -> None:
        wanted = np.array([device for device in devices.tolist() if device not in self.known], np.int64)
        if (len(self.known) + len(wanted)) * self.graph.points > _MOST_KEPT:
            self.known.clear()
            wanted = devices
        if len(wanted):
            self.known.update(zip(wanted.tolist(), _sweep(self.graph, wanted), strict=True))


def _sweep(graph: Graph, devices: Ints) -> list[_Towards]:
    """Go back from all devices at once, an edge at a time; a cell is a point's way to one of them."""
    width = len(devices)
    host = devices if graph.cards is None else graph.cards[devices]  # of a tree, which starts one hop behind cards
    own = np.rint(graph.latency * _TICKS)
    into, begin = (
        np.argsort(graph.head, kind="stable"),
        np.searchsorted(np.sort(graph.head), np.arange(graph.points + 1)),
    )
    ticks = np.full(graph.points * width, inf)
    latency, bandwidth = np.full(len(ticks), inf), np.full(len(ticks), inf)
    first = np.full(len(ticks), -1, np.int32)
    front = devices * width + np.arange(width)
    ticks[front] = latency[front] = 0
    hops = 0
    while len(front):
        if hops and not graph.forwards:
            front = front[front // width >= graph.devices]
        hops += 1
        point = front // width
        degree = begin[point + 1] - begin[point]
        offset = np.arange(degree.sum()) - np.repeat(np.cumsum(degree) - degree, degree)
        edge = into[np.repeat(begin[point], degree) + offset]
        reached = np.repeat(front, degree)
        cell = graph.tail[edge] * width + reached % width
        new = np.isinf(ticks[cell])
        edge, reached, cell = edge[new], reached[new], cell[new]
        cost = ticks[reached] + own[edge]
        np.minimum.at(ticks, cell, cost)
        best = np.flatnonzero(cost == ticks[cell])
        best = best[np.lexsort((edge[best], cell[best]))]
        front, start, ways = np.unique(cell[best], return_index=True, return_counts=True)
        turn = host[front % width] // ways ** ((hops + graph.forwards) % 2) % ways
        chosen = best[start + turn]
        first[front] = edge[chosen]
        latency[front] = graph.latency[edge[chosen]] + latency[reached[chosen]]
        bandwidth[front] = np.minimum(graph.bandwidth[edge[chosen]], bandwidth[reached[chosen]])
    shape = graph.points, width
    rows = slice(graph.devices)
    return [
        _Towards(*columns)
        for columns in zip(
            np.ascontiguousarray(first.reshape(shape).T),
            np.ascontiguousarray(latency.reshape(shape)[rows].T),
            np.ascontiguousarray(bandwidth.reshape(shape)[rows].T),
            strict=True,
        )
    ]

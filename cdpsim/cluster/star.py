"""What messages pay between nodes round one switch: told at once, where routes would look for each way."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from cdpsim.cluster.graph import card_of, node_of
from cdpsim.cluster.topology import Edge, Topology
from cdpsim.numeric.columns import Floats, Ints


class _Way(NamedTuple):
    """The latency of all edges of a way, and the smallest bandwidth."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Star:
    """Ways that depend on no more than whether two devices are in one node; `Routes` would find the same."""

    topology: Topology

    def costs(self, src: Ints, dst: Ints) -> tuple[Floats, Floats]:
        """Give latency and bandwidth from devices to devices."""
        far, (up, down) = self._far, self._near
        inside = node_of(self.topology, src) == node_of(self.topology, dst)
        latency, bandwidth = np.full(len(src), far.latency), np.full(len(src), far.bandwidth)
        for rows, way in ((inside & (src < dst), up), (inside & (src > dst), down), (src == dst, _Way(0.0, inf))):
            latency[rows], bandwidth[rows] = way
        return latency, bandwidth

    def ways(self, src: Ints, dst: Ints) -> tuple[Ints, Floats]:
        """Give the edges from devices to other devices, a row each, and their bandwidths; -1 fills rows up.

        Of each device there are six: out of and into its host's link, its card, and its link within the node.
        """
        topology = self.topology
        host, network, link = topology.host, topology.network, topology.link
        points = int(max(src.max(), dst.max())) + 1  # of which a card has the number of a device, too
        cards = [node_of(topology, end) * topology.nics + card_of(topology, end) for end in (src, dst)]
        edge = np.stack([src, *cards, dst], axis=1) + points * np.arange(4)
        bandwidth = np.tile([host.there[1], network.there[1], network.back[1], host.back[1]], (len(src), 1))
        inside = node_of(topology, src) == node_of(topology, dst)
        edge[inside, 2:] = -1
        if topology.inside == "switch":
            edge[inside, :2] = (np.stack([src, dst], axis=1) + points * np.array([4, 5]))[inside]
            bandwidth[inside, :2] = link.there[1], link.back[1]
        else:
            edge[inside, 0], edge[inside, 1] = (points * (6 + src) + dst)[inside], -1
            bandwidth[inside, 0] = np.where(src < dst, link.there[1], link.back[1])[inside]
        return edge, bandwidth

    def place(self, members: Ints) -> bytes:
        """Give what the ways between members depend on: their nodes and cards, numbered as they come."""
        if self.topology.inside == "mesh" and self.topology.link.there != self.topology.link.back:
            return members.tobytes()
        node = node_of(self.topology, members)
        return _as_they_come(node) + _as_they_come(node * self.topology.nics + card_of(self.topology, members))

    def worst(self, members: Ints) -> tuple[float, float]:
        """Give the largest latency and the smallest bandwidth over all ordered pairs of several devices."""
        per_node = np.unique(node_of(self.topology, members), return_counts=True)[1]
        ways = [*(self._near if per_node.max() > 1 else ()), *([self._far] if len(per_node) > 1 else [])]
        return max(way.latency for way in ways), min(way.bandwidth for way in ways)

    @property
    def _near(self) -> tuple[_Way, _Way]:
        """Within a node, to a device of a higher and of a lower number."""
        link = self.topology.link
        there, back = link.there, link.back
        if self.topology.inside == "switch":
            return _way(there, back), _way(there, back)
        return _way(there), _way(back)

    @property
    def _far(self) -> _Way:
        host, network = self.topology.host, self.topology.network
        return _way(host.there, network.there, network.back, host.back)


def star(topology: Topology | None, edges: tuple[Edge, ...]) -> Star | None:
    """Give the star that a topology is, if it is one."""
    plain = topology is not None and topology.kind == "nodes" and topology.across == "switch" and not edges
    return Star(topology) if plain and topology is not None else None


def _way(*edges: tuple[float, float]) -> _Way:
    """Add latencies up from the end, to the last bit as routes do, which go back from where messages go."""
    latency = 0.0
    for own, _ in reversed(edges):
        latency = own + latency
    return _Way(latency, min(bandwidth for _, bandwidth in edges))


def _as_they_come(label: Ints) -> bytes:
    """Number labels by their first places."""
    _, first, number = np.unique(label, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number].tobytes()

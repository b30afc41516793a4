"""Clusters: devices, and a link for every pair of them or a topology that joins them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from math import fsum, inf, prod
from pathlib import Path
from typing import Annotated, Self

import msgspec
import numpy as np

from cdpsim.cluster import routes
from cdpsim.cluster.disorder import Disorder, Slow, Stop
from cdpsim.cluster.routes import Graph, Routes, TwoNodes, card_of, node_of, number_edges
from cdpsim.cluster.topology import (
    MOST_DEVICES,
    UNLIMITED_LANES,
    Cable,
    Devices,
    Edge,
    Kernels,
    Layout,
    Link,
    MeasuredWith,
    PairLink,
    Speeds,
    Topology,
    Workspace,
    turned,
)
from cdpsim.errors import RequestError, neighbours, one_line, short_repr
from cdpsim.files import config
from cdpsim.files.config import Name, read_preset
from cdpsim.files.tables import record_html
from cdpsim.files.units import counted, short_text
from cdpsim.numeric.columns import Floats, Ints

_PAIRS_AT_ONCE = 2**21
_LEAST_MEMORY = 10**6  # bytes of a device that a file may give as a number without a unit
_MOST_COMPARED = 128  # members of a group whose edges are compared with those of others
_LARGEST_NODE = 512  # in devices, of nodes of which two stand for all; larger ones are drawn, and refused if too large
Cards = tuple[tuple[tuple[int, ...], ...], ...]  # of each node, of each card there, the members of a group

__all__ = ["Cable", "Cluster", "Devices", "Edge", "Link", "MeasuredWith", "PairLink", "Speeds", "Topology", "Workspace"]


class _ClusterFile(config.ConfigTable, frozen=True, kw_only=True):
    name: Name = ""
    devices: Devices | tuple[Devices, ...] = Devices()
    link: Link = Link()
    links: tuple[PairLink, ...] = ()
    topology: Topology | None = None
    edges: tuple[Edge, ...] = ()
    disorder: Disorder = Disorder()
    host: Link | None = None  # between each device and its host
    nvme: Link | None = None  # between each device's part of its host's memory and of the disks behind it
    measured_with: MeasuredWith | None = None  # where a calibration has measured it


class Cluster(_ClusterFile, frozen=True, kw_only=True):
    """Groups of devices, numbered from 0 through all of them, and the links or the topology that join them."""

    devices: Annotated[tuple[Devices, ...], msgspec.Meta(min_length=1)] = (Devices(),)
    grid: tuple[int, int, int] = (1, 1, 1)  # of the program whose devices are asked for: `numbered`

    def _check(self) -> None:
        if len(self.devices) > 1 and any(group.count is None for group in self.devices):
            raise RequestError("devices", "every one of several groups needs its count")
        count = self.count
        if count is not None and count > MOST_DEVICES:
            raise RequestError("devices", f"{count} devices are too many; at most {MOST_DEVICES}")
        _check_pairs("links", self.links, count)
        if self.is_joined:
            if self.link != Link() or self.links:
                raise RequestError("topology", "and link both say what a message pays; keep one")
            if self.edges and count is None:
                raise RequestError("edges", "need `count` in [devices], to tell how many there are; give it")
            _check_pairs("edges", self.edges, count)
            if count is not None:
                routes.check_topology(self.topology, count)

    def __repr__(self) -> str:
        words = [short_repr(self.name)] * bool(self.name)
        words += [counted(self.count, "device") if self.count else "any number of devices"]
        words += [self.topology.kind] if self.topology else []
        words += [f"{self.topology.per_node} a node"] if self.topology and self.topology.per_node else []
        group = self.devices[0]
        words += [] if group.speeds is None else [f"speeds in {', '.join(group.speeds.known)}"]
        words += [short_text(group.speed, "FLOPS")] if group.speed else []
        words += [f"{short_text(group.memory, 'B')} each"] if group.memory else []
        return one_line(f"{type(self).__name__}({', '.join(words)})")

    def _repr_html_(self) -> str:
        return record_html(self._table(), repr(self))

    @classmethod
    @cache
    def unit(cls) -> Self:
        """Return the slot model's cluster: a device has room for everything, and messages are free."""
        return cls(name="unit", devices=(Devices(lanes=UNLIMITED_LANES),))

    @property
    def is_unit(self) -> bool:
        """Whether this is the slot model's cluster."""
        return self.numbered(1, 1) == Cluster.unit()

    @property
    def is_free(self) -> bool:
        """Whether every message takes no time at all."""
        if self.is_joined:
            free = [(edge.latency, edge.bandwidth) == (0.0, inf) for edge in self.edges]
            return all(free) and (self.topology is None or self.topology.is_free)
        listed = [value for pair in self.links for value in (pair.latency or 0.0, 1 / (pair.bandwidth or inf))]
        return not any([self.link.latency, 1 / self.link.bandwidth, *listed])

    @property
    def is_measured(self) -> bool:
        """Whether anything of it is in seconds, bytes or FLOP/s: then it cannot run the slot model."""
        groups = any(group.is_measured for group in self.devices)
        return groups or not self.is_free or self.host is not None or self.nvme is not None or bool(self.disorder.stop)

    @property
    def is_joined(self) -> bool:
        """Whether messages take routes through a graph, instead of a link for every pair."""
        return self.topology is not None or bool(self.edges)

    @property
    def count(self) -> int | None:
        """The number of devices; None: the number that a schedule needs."""
        counts = [group.count for group in self.devices if group.count is not None]
        return sum(counts) if counts else None

    def require(self, count: int, schedule: str = "the schedule") -> None:
        """Refuse a schedule that needs more devices than the cluster has."""
        if self.count is not None and count > self.count:
            remedy = "raise `count` in [devices], ask for fewer stages or ranks, or take another schedule"
            problem = f"has {self.count} devices, but {schedule} needs {count}; {remedy}"
            raise RequestError(self._subject, problem)

    def has_room(self, ranks: int) -> bool:
        """Whether groups of `ranks` neighbours fill its nodes evenly: several a node, or several nodes each."""
        node = self.topology.per_node if self.topology else None
        if self.count is not None and self.count % ranks:
            return False
        return not node or node % ranks == 0 or ranks % node == 0

    def team(self, ranks: int) -> "Cluster":
        """Return the cluster of groups of `ranks` neighbours, as one rank of each sees it; refuse uneven groups."""
        return self if ranks == 1 else self._team(ranks)  # itself, and no equal one

    @lru_cache(maxsize=64)  # noqa: B019 - clusters are values, and few
    def _team(self, ranks: int) -> "Cluster":
        topology, unlike = self.topology, len({msgspec.structs.replace(each, count=None) for each in self.devices}) > 1
        if self.edges or self.links or unlike or (topology and topology.kind in ("ring", "fat-tree", "edges")):
            kind = (
                "unlike devices"
                if unlike
                else "edges or links of pairs"
                if self.edges or self.links
                else "a ring or tree"
            )
            problem = f"a group of {ranks} ranks has no place of its own on {self._subject}, which has {kind}"
            raise RequestError("tensor", f"{problem}; take a cluster of nodes, or of one switch")
        self.require(ranks, f"a group of {ranks} ranks")
        if not self.has_room(ranks):
            size = topology.per_node if topology and topology.per_node else self.count
            fits = [t for t in range(1, self.count or ranks + (size or 0)) if self.has_room(t)]
            problem = f"groups of {ranks} ranks do not fill nodes of {size} devices evenly"
            raise RequestError("tensor", f"{problem}; {neighbours(ranks, fits)}")
        size = topology.per_node if topology else None
        if topology and size and ranks < size and not topology.shares_cards(ranks):
            fits = [t for t in range(1, size + 1) if size % t == 0 and topology.shares_cards(t)]
            problem = f"groups of {ranks} ranks do not share the {topology.nics} cards of {size} devices evenly"
            raise RequestError("tensor", f"{problem}; {neighbours(ranks, fits)}")
        count = None if self.count is None else self.count // ranks
        devices = (msgspec.structs.replace(self.devices[0], count=count),)
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return _Teams(**fields | {"devices": devices, "topology": topology and topology.of_teams(ranks)})

    def numbered(self, places: int, data: int, ranks: int = 1) -> "Cluster":
        """Return the cluster on which the `data` ranks of each of a program's places are neighbours.

        Its methods then take the program's numbers of devices: place by place within a data rank, or `ranks` of each.
        """
        return self if (places, data, ranks) == self.grid else _renumbered(self, (places, data, ranks))

    def at(self, devices: Ints) -> Ints:
        """Return the devices of the cluster that are these ones of the program."""
        return devices if self.grid[:2] == (1, 1) else turned(np.asarray(devices, np.int64), *self.grid)

    def in_order(self, members: Ints) -> Ints:
        """Return the devices of a group in the order in which the cluster has them, where that is another one."""
        return members if self.grid[:2] == (1, 1) else members[np.argsort(self.at(members))]

    def sized(self, count: int) -> "Cluster":
        """Return this cluster with at least `count` devices if its file leaves the number open; nodes are complete."""
        self.require(count)
        return self if self.count is not None else _grown(self, max(count, prod(self.grid)))

    def speeds(self, count: int, precision: str | None = None) -> list[float | None]:
        """Return the FLOP/s of each of the first `count` devices in a precision; None where the cluster has no speeds.

        Without a precision, as for a model of times, devices with speeds by precision have none.
        """
        speeds = []
        groups = self._groups(count)
        for group in self.devices[: groups.max(initial=-1) + 1]:
            try:
                speeds.append(group.speed_in(precision))
            except KeyError:
                raise RequestError(self._subject, _without_speed(group, precision)) from None
        return [speeds[group] for group in groups.tolist()]

    def peak_flops(self, count: int, precision: str) -> float | None:
        """Return the peak FLOP/s of the first `count` devices together; None where one has no such speed."""
        try:
            many = np.bincount(self._groups(count)).tolist()
            peaks = [group.peak_in(precision or None) for group in self.devices[: len(many)]]
        except KeyError:
            return None
        return (
            None if None in peaks else fsum(k * peak for k, peak in zip(many, peaks, strict=True) if peak is not None)
        )

    def memory_bytes(self, count: int) -> Floats:
        """Return the memory of each of the first `count` devices; inf where it has no limit."""
        sizes = [inf if group.memory is None else group.memory for group in self.devices]
        return np.array(sizes, np.float64)[self._groups(count)]

    def memory_bandwidths(self, count: int, *, reached: bool = False) -> list[float | None]:
        """Return the bandwidth of the memory of each of the first `count` devices, or the one that passes reach.

        Refuse a device without one.
        """
        groups = self._groups(count)
        found = [
            group.reached_bandwidth if reached else group.memory_bandwidth
            for group in self.devices[: groups.max(initial=-1) + 1]
        ]
        if None in found:
            problem = "devices have no memory_bandwidth, of which updates take their time; add it to [devices]"
            raise RequestError(self._subject, f"{problem}, or leave update_time out")
        return [found[group] for group in groups]

    def lanes(self, count: int) -> Ints:
        """Return how many tasks each of the first `count` devices runs side by side."""
        return np.array([group.lanes for group in self.devices], np.int64)[self._groups(count)]

    def overlaps(self, count: int) -> list[str]:
        """Return how the messages of each of the first `count` devices overlap with its tasks: full, stream or none."""
        return [self.devices[group].overlap for group in self._groups(count)]

    @property
    def workspace_bytes(self) -> int:
        """The most that kernels take of any of its devices beside tensors."""
        return max(group.workspace.most for group in self.devices)

    def workspaces(self, count: int) -> list[Workspace]:
        """Return what kernels take on each of the first `count` devices."""
        return [self.devices[group].workspace for group in self._groups(count)]

    def link_costs(self, src: Ints, dst: Ints) -> tuple[Floats, Floats]:
        """Return latency and bandwidth of each message between two different devices."""
        src, dst = self.at(src), self.at(dst)
        if self.is_joined:
            return self._costs_by_routes(src, dst)
        latency = np.full(np.shape(src), self.link.latency)
        bandwidth = np.full(np.shape(src), self.link.reached)
        if self.links:
            pairs, *costs = _costs_of_pairs(self.link, self.links)
            wanted = np.asarray(src, np.int64) * MOST_DEVICES + dst  # too large for int32
            row = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
            listed = pairs[row] == wanted
            latency[listed], bandwidth[listed] = (cost[row[listed]] for cost in costs)
        return latency, bandwidth

    def group_link(self, members: Ints) -> tuple[float, float]:
        """Return the largest latency and the smallest bandwidth over all ordered pairs of `members`."""
        latency, bandwidth = 0.0, inf
        for latencies, bandwidths in self._costs_between(np.unique(members)):
            latency, bandwidth = max(latency, float(latencies.max())), min(bandwidth, float(bandwidths.min()))
        return latency, bandwidth

    def has_alike_devices(self, count: int) -> bool:
        """Whether the first `count` devices are all alike."""
        numbers = set(self._groups(count).tolist())
        groups = (
            {msgspec.structs.replace(self.devices[k], count=None) for k in numbers} if len(numbers) > 1 else numbers
        )
        return len(groups) == 1

    def is_alike(self, count: int) -> bool:
        """Whether the first `count` devices are all alike, and so are the ways between any two of them."""
        seen: set[tuple[float, float]] = set()
        for latency, bandwidth in self._costs_between(np.arange(count)):
            seen.update(zip(latency.tolist(), bandwidth.tolist(), strict=True))
            if len(seen) > 1:
                return False
        return self.has_alike_devices(count)

    def shared_edges(self, src: Ints, dst: Ints) -> tuple[Ints, Floats]:
        """Return the edges that messages between different devices share with others, and each edge's bandwidth.

        A message has a row of edges, in their order; -1 fills it up. Edges without a limit are left out. Without a
        topology, each ordered pair of devices has an edge.
        """
        if not self.is_joined:
            edge = (src.astype(np.int64) * MOST_DEVICES + dst).reshape(-1, 1)
            limit = self.link_costs(src, dst)[1].reshape(-1, 1)
        elif self._two_nodes is not None:
            return self._two_nodes.shared_edges(self.at(src), self.at(dst))
        else:
            edge = self._routes.edges(self.at(src), self.at(dst))
            limit = self._routes.graph.bandwidth[edge]
        return number_edges(edge, limit)

    def ways_between(self, members: Ints) -> bytes:
        """Return a key of a group of devices; groups of equal size whose members have equal routes have equal keys."""
        if not self.is_joined and not self.links:
            return b""
        if self._two_nodes is None or (self.topology is not None and not self.topology.is_alike_inside):
            few = 1 < len(members) <= _MOST_COMPARED
            return _ways_by_edges(self, tuple(members.tolist())) if few else self.at(members).tobytes()
        members = self.at(members)
        return _ways_in_layout(self._two_nodes.layout, tuple(members.tolist()))

    @property
    def layout(self) -> Layout | None:
        """The way in which its nodes are joined, if all are alike, and so are the ways between any two of them."""
        return None if self._two_nodes is None else self._two_nodes.layout

    @property
    def laid_out(self) -> "Cluster":
        """Itself, or its layout of alike nodes without costs of cables: groups alike there are alike here."""
        return self if self.layout is None else _cluster_of_layout(self.layout, self.count).numbered(*self.grid)

    def cards(self, members: Ints) -> Cards:
        """Return the members of a group, numbered within it, by node and, within a node, by network card."""
        return _cards_of(self.layout or self.topology, tuple(self.at(members).tolist()))

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """Return the edges of `graph` that a message from one device to another takes, in their order."""
        ends = self.at(np.array([[src], [dst]]))
        edges = self._routes.edges(*ends)[0] if src != dst else np.zeros(0, np.int64)
        return tuple(edges[edges >= 0].tolist())

    @property
    def graph(self) -> Graph:
        """The points of a topology, and the directed edges with their latency and bandwidth."""
        return self._routes.graph

    def nodes(self, members: Ints) -> Ints:
        """Return the node of each device; all are in one where the cluster does not say how many a node has."""
        return node_of(self.topology, self.at(members))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the cluster of a file, .toml or .json, or of a name in the package.

        >>> Cluster.load("a100-nodes").nodes(np.arange(16)).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
        """
        return cls.from_builtins(*read_preset("cluster", path))

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write a cluster file; loading it gives an equal cluster."""
        config.write_config(path, self._table(), force=force)

    def to_builtins(self) -> str | dict[str, object]:
        """Return the content of this cluster's file, or "unit"."""
        return "unit" if self.is_unit else self._table()

    @classmethod
    def from_builtins(cls, content: object, subject: str) -> Self:
        """Make a cluster of a file's content, or of "unit"; errors begin with `subject`."""
        if content == "unit":
            return cls.unit()
        _refuse_bare_memory(content, subject)
        form = config.decode(content, _ClusterFile, subject, _TABLES)
        groups = (form.devices,) if isinstance(form.devices, Devices) else form.devices
        try:
            return cls(**{name: getattr(form, name) for name in form.__struct_fields__} | {"devices": groups})
        except RequestError as error:
            raise RequestError(subject, f"$.{error}") from None

    def _table(self) -> dict[str, object]:
        """Return the tables of its file; [devices] is always there: an empty file was not written to its end."""
        groups = [config.encode(group) for group in self.devices]
        name: dict[str, object] = {"name": self.name} if self.name else {}
        devices: dict[str, object] = {"devices": groups[0] if len(groups) == 1 else groups}
        return name | devices | config.encode(self.numbered(1, 1)) | devices

    @property
    def _subject(self) -> str:
        return f"cluster {self.name!r}" if self.name else "cluster"

    @property
    def _routes(self) -> Routes:
        if self.count is None:
            raise RequestError(self._subject, "leaves its number of devices open; say how many first: cluster.sized(8)")
        return _routes(self.topology, self.edges, self.count)

    @property
    def _two_nodes(self) -> TwoNodes | None:
        """The routes between two nodes, if all nodes are alike, and so are the ways from each to each other one."""
        topology = self.topology
        if topology is None or not topology.has_alike_nodes or self.edges or (topology.per_node or 0) > _LARGEST_NODE:
            return None
        return _two_nodes(topology)

    def _costs_by_routes(self, src: Ints, dst: Ints) -> tuple[Floats, Floats]:
        src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
        if self._two_nodes is not None:
            return self._two_nodes.costs(src, dst)
        latency, bandwidth = self._routes.costs(src.ravel(), dst.ravel())
        return latency.reshape(src.shape), bandwidth.reshape(src.shape)

    def _costs_between(self, members: Ints) -> Iterator[tuple[Floats, Floats]]:
        """Yield latencies and bandwidths of all ordered pairs of different members, or of one if all have one link."""
        if not self.is_joined and not self.links:
            members = members[:2]
        step = max(1, _PAIRS_AT_ONCE // max(1, len(members)))
        for k in range(0, len(members), step):
            ends = members[k : k + step]
            src, dst = np.tile(members, len(ends)), np.repeat(ends, len(members))
            apart = src != dst
            if apart.any():
                yield self.link_costs(src[apart], dst[apart])

    def _groups(self, count: int) -> Ints:
        numbers = self.at(np.arange(count))
        self.require(int(numbers.max(initial=-1)) + 1)
        if len(self.devices) == 1:
            return np.zeros(count, np.int64)
        ends = np.cumsum([group.count or count for group in self.devices])
        return np.searchsorted(ends, numbers, side="right")


class _Teams(Cluster, frozen=True, kw_only=True):
    """A cluster as one rank of each group sees it."""

    def team(self, ranks: int) -> Cluster:
        """Refuse to make groups of groups."""
        if ranks == 1:
            return self
        problem = f"is of groups of ranks, of which no groups of {ranks} are made"
        raise RequestError("cluster", f"{problem}; give that of the ranks, the request's `machine`")


@lru_cache(maxsize=64)
def _renumbered(cluster: Cluster, grid: tuple[int, int, int]) -> Cluster:
    return msgspec.structs.replace(cluster, grid=grid)


@lru_cache(maxsize=64)  # asked for at every price
def _grown(cluster: Cluster, count: int) -> Cluster:
    count = max(1, count, *(max(pair.between) + 1 for pair in cluster.links))
    if cluster.topology is not None:
        count = cluster.topology.complete_nodes(count)
    group = msgspec.structs.replace(cluster.devices[0], count=count)
    return msgspec.structs.replace(cluster, devices=(group,))


_TABLES = (
    _ClusterFile,
    Devices,
    Kernels,
    Workspace,
    Speeds,
    MeasuredWith,
    Link,
    PairLink,
    Topology,
    Cable,
    Edge,
    Disorder,
    Slow,
    Stop,
)


def _without_speed(group: Devices, precision: str | None) -> str:
    known = list(group.speeds.known) if group.speeds is not None else []
    if precision:
        return (
            f"has no speed for a model in {precision!r}, only for {', '.join(known)}; take another cluster or precision"
        )
    example = "fp32" if "fp32" in known else known[0]
    remedy = f"write precision = {example!r}, say, into its file"
    return f"has speeds for {', '.join(known)}, but the model does not say which it computes in; {remedy}"


@lru_cache(maxsize=8)
def _routes(topology: Topology | None, edges: tuple[Edge, ...], count: int) -> Routes:
    return Routes(routes.draw_graph(topology, edges, count))


@lru_cache(maxsize=64)  # asked for at every price
def _two_nodes(topology: Topology) -> TwoNodes:
    return TwoNodes(topology)


@lru_cache(maxsize=64)
def _cluster_of_layout(layout: Layout, count: int | None) -> Cluster:
    return Cluster(devices=(Devices(count=count),), topology=layout.topology)


@lru_cache(maxsize=4096)  # clusters that differ in what cables cost have the same groups
def _ways_in_layout(layout: Layout, members: tuple[int, ...]) -> bytes:
    """Return a key of the nodes and cards of a group's members."""
    devices = np.array(members)
    return _as_they_come(node_of(layout, devices)) + _as_they_come(card_of(layout, devices))


@lru_cache(maxsize=4096)
def _ways_by_edges(cluster: Cluster, members: tuple[int, ...]) -> bytes:
    """Return a key of the edges between all members of a group, as they come, and of what these cost."""
    src, dst = (each.ravel() for each in np.meshgrid(members, members, indexing="ij"))
    src, dst = src[src != dst], dst[src != dst]
    edges, limits = cluster.shared_edges(src, dst)
    costs = np.stack(cluster.link_costs(src, dst))
    cards = str(cluster.cards(np.array(members))).encode()
    return _as_they_come(edges.ravel()) + np.append(limits, 0.0)[edges].tobytes() + costs.tobytes() + cards


@lru_cache(maxsize=4096)
def _cards_of(topology: Topology | Layout | None, members: tuple[int, ...]) -> Cards:
    """Return the members of a group, numbered within it, by node and, within a node, by network card."""
    devices = np.array(members)
    node, card = node_of(topology, devices), card_of(topology, devices)
    return tuple(
        tuple(tuple(np.flatnonzero(card == each).tolist()) for each in np.unique(card[node == number]))
        for number in np.unique(node)
    )


@lru_cache(maxsize=8)  # asked for at every price
def _costs_of_pairs(link: Link, links: tuple[PairLink, ...]) -> tuple[Ints, Floats, Floats]:
    """Return the pairs of devices that have a link of their own, ascending, with its latency and bandwidth."""
    rows = sorted(
        (src * MOST_DEVICES + dst, listed.latency, listed.reached)
        for listed, directions in ((pair.over(link), pair.directions) for pair in links)
        for src, dst in directions
    )
    pairs, latency, bandwidth = np.array(rows, np.float64).T
    return pairs.astype(np.int64), latency, bandwidth


def _check_pairs(option: str, pairs: Sequence[PairLink | Edge], count: int | None) -> None:
    """Refuse two links or edges in one direction, and those of devices beyond the first `count`."""
    seen: set[tuple[object, object]] = set()
    for pair in pairs:
        shown = f"between {list(pair.between)}"
        if count is not None and any(isinstance(end, int) and end >= count for end in pair.between):
            raise RequestError(option, f"{shown}, but the last device is {count - 1}")
        if not seen.isdisjoint(pair.directions):
            raise RequestError(option, f"{shown} twice; keep one, or make both one_way")
        seen.update(pair.directions)


def _as_they_come(label: Ints) -> bytes:
    """Renumber labels in the order in which they first occur."""
    _, first, number = np.unique(label, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number].tobytes()


def _refuse_bare_memory(content: object, subject: str) -> None:
    """Refuse a file's memory of a device that is a number of few bytes: its unit was forgotten."""
    devices = content.get("devices") if isinstance(content, Mapping) else None
    for group in devices if isinstance(devices, Sequence) else [devices]:
        memory = group.get("memory") if isinstance(group, Mapping) else None
        if isinstance(memory, int | float) and not isinstance(memory, bool) and 0 <= memory < _LEAST_MEMORY:
            problem = f'{memory} means {memory} bytes; give its unit, as in "{memory} GB" or "{memory} B"'
            raise RequestError(f"{subject}: $.devices.memory", problem)

"""What a schedule runs on: devices, and what joins them: a link for every pair, or a topology."""

from functools import cache, lru_cache
from math import inf
from pathlib import Path
from typing import Annotated, Self

import msgspec
import numpy as np

from cdpsim.cluster import graph
from cdpsim.cluster.devices import UNLIMITED_LANES, Devices, Speeds
from cdpsim.cluster.disorder import Disorder, Slow, Stop
from cdpsim.cluster.graph import Graph
from cdpsim.cluster.routes import Routes
from cdpsim.cluster.star import Star, star
from cdpsim.cluster.topology import MOST_DEVICES, Cable, Edge, Link, PairLink, Topology
from cdpsim.errors import RequestError
from cdpsim.files import config
from cdpsim.files.config import Name
from cdpsim.numeric.columns import Floats, Ints

Cards = tuple[tuple[tuple[int, ...], ...], ...]  # of each node, of each card there, the members of a group

__all__ = ["Cable", "Cluster", "Devices", "Edge", "Link", "PairLink", "Speeds", "Topology"]


class Cluster(config.ConfigTable, frozen=True, kw_only=True):
    """Groups of devices, numbered from 0 through all of them, and what joins them."""

    name: Name = ""
    devices: Annotated[tuple[Devices, ...], msgspec.Meta(min_length=1)] = (Devices(),)
    link: Link = Link()
    links: tuple[PairLink, ...] = ()
    topology: Topology | None = None
    edges: tuple[Edge, ...] = ()
    disorder: Disorder = Disorder()
    host: Link | None = None  # between each device and its host

    def __post_init__(self) -> None:
        config.ConfigTable.__post_init__(self)
        if len(self.devices) > 1 and any(group.count is None for group in self.devices):
            raise RequestError("devices", "every one of several groups needs its count")
        count = self.count
        if count is not None and count > MOST_DEVICES:
            raise RequestError("devices", f"{count} devices are too many; at most {MOST_DEVICES}")
        seen: set[tuple[int, int]] = set()
        for pair in self.links:
            shown = f"between {list(pair.between)}"
            if count is not None and max(pair.between) >= count:
                raise RequestError("links", f"{shown}, but the last device is {count - 1}")
            if not seen.isdisjoint(pair.directions):
                raise RequestError("links", f"{shown} twice; keep one, or make both one_way")
            seen.update(pair.directions)
        if self.is_joined:
            self._check_joined()

    @classmethod
    @cache
    def unit(cls) -> Self:
        """Make what the slot model runs on: a device has room for everything, and messages are free."""
        return cls(name="unit", devices=(Devices(lanes=UNLIMITED_LANES),))

    @property
    def is_unit(self) -> bool:
        """Whether this is the slot model's cluster."""
        return self == Cluster.unit()

    @property
    def is_free(self) -> bool:
        """Whether every message takes no time at all."""
        if self.is_joined:
            free = [(edge.latency, edge.bandwidth) == (0.0, inf) for edge in self.edges]
            return all(free) and (self.topology is None or self.topology.is_free)
        own = [value for pair in self.links for value in (pair.latency or 0.0, 1 / (pair.bandwidth or inf))]
        return not any([self.link.latency, 1 / self.link.bandwidth, *own])

    @property
    def is_measured(self) -> bool:
        """Whether it says anything in seconds, bytes or FLOP/s: then slots have no place on it."""
        groups = any(group.is_measured for group in self.devices)
        return groups or not self.is_free or self.host is not None or bool(self.disorder.stop)

    @property
    def is_joined(self) -> bool:
        """Whether messages take routes through a graph, instead of a link for every pair."""
        return self.topology is not None or bool(self.edges)

    @property
    def count(self) -> int | None:
        """The number of devices; None for as many as it takes."""
        counts = [group.count for group in self.devices if group.count is not None]
        return sum(counts) if counts else None

    def require(self, count: int, schedule: str = "the schedule") -> None:
        """Refuse a schedule that needs more devices than there are."""
        if self.count is not None and count > self.count:
            remedy = "raise `count` in [devices], ask for fewer stages, or take another schedule"
            problem = f"has {self.count} devices, but {schedule} needs {count}; {remedy}"
            raise RequestError(self._subject, problem)

    def sized(self, count: int) -> "Cluster":
        """Give this cluster with at least `count` devices, where it may have as many as it takes; nodes come whole."""
        self.require(count)
        return self if self.count is not None else _grown(self, count)

    def speeds(self, count: int, precision: str | None = None) -> list[float | None]:
        """Give the FLOP/s of each of the first `count` devices in a precision; None where the cluster does not say.

        Without a precision, as for a model of times, devices with speeds by precision have none.
        """
        own = []
        groups = self._groups(count)
        for group in self.devices[: groups.max(initial=-1) + 1]:
            try:
                own.append(group.speed_in(precision))
            except KeyError:
                raise RequestError(self._subject, _without_speed(group, precision)) from None
        return [own[group] for group in groups]

    def memory_bytes(self, count: int) -> Floats:
        """Give the memory of each of the first `count` devices; inf where it has no limit."""
        sizes = [inf if group.memory is None else group.memory for group in self.devices]
        return np.array(sizes, np.float64)[self._groups(count)]

    def lanes(self, count: int) -> Ints:
        """Give how many tasks each of the first `count` devices runs side by side."""
        return np.array([group.lanes for group in self.devices], np.int64)[self._groups(count)]

    def overlaps(self, count: int) -> list[str]:
        """Give what of its messages each of the first `count` devices does beside its tasks: full, stream or none."""
        return [self.devices[group].overlap for group in self._groups(count)]

    def link_costs(self, src: Ints, dst: Ints) -> tuple[Floats, Floats]:
        """Give latency and bandwidth of each message between two different devices."""
        if self.is_joined:
            ends = (np.asarray(end, np.int64).ravel() for end in (src, dst))
            found = self._joined.costs(*ends)
            return found[0].reshape(np.shape(src)), found[1].reshape(np.shape(src))
        latency = np.full(np.shape(src), self.link.latency)
        bandwidth = np.full(np.shape(src), self.link.reached)
        if self.links:
            pairs, own_latency, own_bandwidth = _own_links(self.link, self.links)
            wanted = src.astype(np.int64) * MOST_DEVICES + dst  # too large for int32
            place = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
            own = pairs[place] == wanted
            latency[own] = own_latency[place[own]]
            bandwidth[own] = own_bandwidth[place[own]]
        return latency, bandwidth

    def group_link(self, members: Ints) -> tuple[float, float]:
        """Give the largest latency and the smallest bandwidth over all ordered pairs of `members`."""
        members = np.unique(members)
        pairs = len(members) * (len(members) - 1)
        if not pairs:
            return 0.0, inf
        if self.is_joined:
            return self._joined.worst(members.astype(np.int64))
        latencies, bandwidths = np.array([self.link.latency]), np.array([self.link.reached])
        if self.links:
            own, own_latency, own_bandwidth = _own_links(self.link, self.links)
            inside = np.isin(own // MOST_DEVICES, members) & np.isin(own % MOST_DEVICES, members)
            if inside.sum() == pairs:  # none goes by the common link
                latencies, bandwidths = latencies[:0], bandwidths[:0]
            latencies = np.append(latencies, own_latency[inside])
            bandwidths = np.append(bandwidths, own_bandwidth[inside])
        return float(latencies.max()), float(bandwidths.min())

    def is_alike(self, count: int) -> bool:
        """Whether the first `count` devices are all alike, and so are the ways between any two of them."""
        groups = {
            msgspec.structs.replace(self.devices[group], count=None) for group in set(self._groups(count).tolist())
        }
        if len(groups) > 1:
            return False
        members = np.arange(count)
        seen: set[tuple[float, float]] = set()
        for src in members if self.is_joined or self.links else ():
            others = np.delete(members, src)
            latency, bandwidth = self.link_costs(np.full_like(others, src), others)
            seen.update(zip(latency.tolist(), bandwidth.tolist(), strict=True))
            if len(seen) > 1:
                return False
        return True

    def ways(self, src: Ints, dst: Ints) -> tuple[Ints, Floats]:
        """Give the edges of messages between different devices, a row each, and their bandwidths; -1 fills rows up.

        Edges have other numbers here than in `graph`.
        """
        if self.is_joined:
            return self._joined.ways(src, dst)
        edge = np.unique(np.stack([src, dst]), axis=1, return_inverse=True)[1]
        return edge.reshape(-1, 1), self.link_costs(src, dst)[1].reshape(-1, 1)

    def place(self, members: Ints) -> bytes:
        """Give what is equal for groups of so many devices whose ways between each other are alike."""
        if not self.is_joined and not self.links:
            return b""
        found = star(self.topology, self.edges)
        return found.place(members) if found else members.tobytes()

    def cards(self, members: Ints) -> Cards:
        """Give the members, as their numbers in the group, by their nodes and, there, by the cards that they use."""
        node, card = self.nodes(members), graph.card_of(self.topology, members)
        return tuple(
            tuple(
                tuple(np.flatnonzero((node == one) & (card == each)).tolist()) for each in np.unique(card[node == one])
            )
            for one in np.unique(node)
        )

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """Give the edges of `graph` that a message from one device to another takes, in their order."""
        return self._routes.route(src, dst)

    @property
    def graph(self) -> Graph:
        """The points, and the directed edges with their latency and bandwidth; without a topology one for each pair."""
        return self._routes.graph

    def nodes(self, members: Ints) -> Ints:
        """Say in which node each of some devices is; all are in one where nothing says how many a node has."""
        return graph.node_of(self.topology, members)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a cluster file, .toml or .json."""
        return cls.from_builtins(config.read_config(path), str(path))

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write a cluster file; loading it gives an equal cluster."""
        config.write_config(path, self._table(), force=force)

    def to_builtins(self) -> str | dict[str, object]:
        """Give what a file says of this cluster, or "unit"."""
        return "unit" if self.is_unit else self._table()

    @classmethod
    def from_builtins(cls, content: object, subject: str) -> Self:
        """Make a cluster of a file's content, or of "unit"; errors begin with `subject`."""
        if content == "unit":
            return cls.unit()
        form = config.decode(content, _ClusterFile, subject, _TABLES)
        groups = (form.devices,) if isinstance(form.devices, Devices) else form.devices
        try:
            return cls(**{name: getattr(form, name) for name in form.__struct_fields__} | {"devices": groups})
        except RequestError as error:
            raise RequestError(subject, f"$.{error}") from None

    def _table(self) -> dict[str, object]:
        groups = [config.encode(group) for group in self.devices]
        table: dict[str, object] = {
            "name": self.name,
            "devices": groups[0] if len(groups) == 1 else groups,
            "link": config.encode(self.link),
            "links": [config.encode(pair) for pair in self.links],
            "topology": config.encode(self.topology) if self.topology is not None else {},
            "edges": [config.encode(edge) for edge in self.edges],
            "disorder": config.encode(self.disorder),
        }
        host = {} if self.host is None else {"host": config.encode(self.host)}  # may be empty: free
        # Never all of them: an empty file is one that was not written to its end.
        return {key: value for key, value in table.items() if value or key == "devices"} | host

    @property
    def _subject(self) -> str:
        return f"cluster {self.name!r}" if self.name else "cluster"

    @property
    def _joined(self) -> Star | Routes:
        """What knows the ways of a topology."""
        return star(self.topology, self.edges) or self._routes

    @property
    def _routes(self) -> Routes:
        if self.count is None:
            raise RequestError(self._subject, "has as many devices as it takes; say how many first: cluster.sized(8)")
        if self.is_joined:
            return _routes(self.topology, self.edges, self.count)
        return _links_as_edges(self)

    def _check_joined(self) -> None:
        """Refuse two answers to one question, and edges to devices that there are not."""
        if self.link != Link() or self.links:
            raise RequestError("topology", "and link both say what a message pays; keep one")
        if self.edges and self.count is None:
            raise RequestError("edges", "need `count` in [devices], to tell how many there are; give it")
        seen: set[tuple[object, object]] = set()
        for edge in self.edges:
            shown = f"between {list(edge.between)}"
            if any(isinstance(end, int) and end >= (self.count or 0) for end in edge.between):
                raise RequestError("edges", f"{shown}, but the last device is {(self.count or 0) - 1}")
            if not seen.isdisjoint(edge.directions):
                raise RequestError("edges", f"{shown} twice; keep one, or make both one_way")
            seen.update(edge.directions)
        if self.count is not None:
            graph.check(self.topology, self.count)

    def _groups(self, count: int) -> Ints:
        """Say to which group each of the first `count` devices belongs."""
        self.require(count)
        ends = np.cumsum([group.count or count for group in self.devices])
        return np.searchsorted(ends, np.arange(count), side="right")


@lru_cache(maxsize=64)  # asked for at every price
def _grown(cluster: Cluster, count: int) -> Cluster:
    count = max(1, count, *(max(pair.between) + 1 for pair in cluster.links))
    whole = cluster.topology.whole(count) if cluster.topology is not None else count
    group = msgspec.structs.replace(cluster.devices[0], count=whole)
    return msgspec.structs.replace(cluster, devices=(group,))


class _ClusterFile(config.ConfigTable, frozen=True, kw_only=True):
    name: Name = ""
    devices: Devices | tuple[Devices, ...] = Devices()
    link: Link = Link()
    links: tuple[PairLink, ...] = ()
    topology: Topology | None = None
    edges: tuple[Edge, ...] = ()
    disorder: Disorder = Disorder()
    host: Link | None = None


_TABLES = (_ClusterFile, Devices, Speeds, Link, PairLink, Topology, Cable, Edge, Disorder, Slow, Stop)


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
    return Routes(graph.draw(topology, edges, count))


@lru_cache(maxsize=8)
def _links_as_edges(cluster: Cluster) -> Routes:
    """A link for every pair is a full mesh whose edges cost what the links do."""
    count = cluster.count or 0
    return Routes(graph.draw_mesh(count, *cluster.link_costs(*graph.mesh(count))))


@lru_cache(maxsize=8)  # asked for every group of devices
def _own_links(link: Link, links: tuple[PairLink, ...]) -> tuple[Ints, Floats, Floats]:
    """Give the pairs that have a link of their own, ascending, with its latency and bandwidth."""
    rows = sorted(
        (src * MOST_DEVICES + dst, own.latency, own.reached)
        for pair, own in ((pair, pair.over(link)) for pair in links)
        for src, dst in pair.directions
    )
    pairs, latency, bandwidth = np.array(rows, np.float64).T
    return pairs.astype(np.int64), latency, bandwidth

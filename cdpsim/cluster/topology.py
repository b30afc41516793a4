"""The links between devices as files describe them: one for every pair, or a topology of cables and switches.

Groups of equal devices, their speeds by precision, and their memory.
"""

from math import inf, isfinite
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from cdpsim.errors import RequestError, choose
from cdpsim.files import config
from cdpsim.files.config import Bandwidth, Name, Seconds, Share, Size, Sizes, Speed
from cdpsim.numeric.columns import Ints

MOST_DEVICES = 10_000_000
MOST_JOINED = 20_000  # devices of a topology: it knows each of its edges
PORTS = 65_536

DeviceNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MOST_DEVICES)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MOST_JOINED)]
PointName: TypeAlias = DeviceNumber | Annotated[str, msgspec.Meta(min_length=1, max_length=100)]

# The fields of each kind of topology, beside its kind.
TOPOLOGY_FIELDS = {
    "ring": ("link",),
    "mesh": ("link",),
    "switch": ("link",),
    "nodes": ("link", "per_node", "inside", "nics", "host", "network", "across", "ports", "apart"),
    "fat-tree": ("link", "ports"),
    "edges": ("per_node",),
}


def _require_bandwidth(achieved: float, *bandwidths: float | None) -> None:
    if achieved != 1 and not any(bandwidth not in (None, inf) for bandwidth in bandwidths):
        raise RequestError("achieved", "is a share of the bandwidth; give one")


class Link(config.ConfigTable, frozen=True, kw_only=True):
    """The cost of a message between two devices: latency + size / (achieved * bandwidth)."""

    latency: Seconds = 0.0
    bandwidth: Bandwidth = inf
    achieved: Share = 1.0  # the share of the bandwidth that messages reach

    def _check(self) -> None:
        _require_bandwidth(self.achieved, self.bandwidth)

    @property
    def reached(self) -> float:
        """The bandwidth that messages reach."""
        return self.bandwidth * self.achieved


class PairLink(config.ConfigTable, frozen=True, kw_only=True):
    """The link of one pair of devices, in both directions or from the first to the second only."""

    between: tuple[DeviceNumber, DeviceNumber]
    latency: Seconds | None = None  # None: as for every pair
    bandwidth: Bandwidth | None = None
    achieved: Share | None = None
    one_way: bool = False

    def _check(self) -> None:
        if self.between[0] == self.between[1]:
            raise RequestError("between", f"{list(self.between)} is one device; name two")

    @property
    def directions(self) -> list[tuple[int, int]]:
        """The pairs (source, destination) that have this link."""
        a, b = self.between
        return [(a, b)] if self.one_way else [(a, b), (b, a)]

    def over(self, common: Link) -> Link:
        """Return this pair's link; a field that the pair leaves open is as for every pair."""
        fields = {name: getattr(self, name) for name in common.__struct_fields__}
        return msgspec.structs.replace(common, **{name: value for name, value in fields.items() if value is not None})


class Cable(Link, frozen=True, kw_only=True):
    """The cost of a message from one point to the next, and back: from a switch, or to the lower-numbered device."""

    latency_back: Seconds | None = None  # None: as the other way
    bandwidth_back: Bandwidth | None = None

    def _check(self) -> None:
        _require_bandwidth(self.achieved, self.bandwidth, self.bandwidth_back)

    @property
    def there(self) -> tuple[float, float]:
        """Latency and the bandwidth that messages reach."""
        return self.latency, self.reached

    @property
    def back(self) -> tuple[float, float]:
        """Latency and the bandwidth that messages reach the other way."""
        latency = self.latency if self.latency_back is None else self.latency_back
        bandwidth = self.bandwidth if self.bandwidth_back is None else self.bandwidth_back
        return latency, bandwidth * self.achieved

    @property
    def is_free(self) -> bool:
        """Whether nothing takes time on it."""
        return self.there == self.back == (0.0, inf)


class Edge(config.ConfigTable, frozen=True, kw_only=True):
    """One cable between two points: devices by number, and switches by any other name."""

    between: tuple[PointName, PointName]
    latency: Seconds = 0.0
    bandwidth: Bandwidth = inf
    achieved: Share = 1.0
    one_way: bool = False

    def _check(self) -> None:
        ends = tuple(int(end) if str(end).isascii() and str(end).isdigit() else end for end in self.between)
        if ends[0] == ends[1]:
            raise RequestError("between", f"{list(ends)} is one point; name two")
        if beyond := next((end for end in ends if isinstance(end, int) and end >= MOST_DEVICES), None):
            raise RequestError("between", f"device {str(beyond)[:20]} is beyond any cluster; name another")
        msgspec.structs.force_setattr(self, "between", ends)
        _require_bandwidth(self.achieved, self.bandwidth)

    @property
    def reached(self) -> float:
        """The bandwidth that messages reach."""
        return self.bandwidth * self.achieved

    @property
    def directions(self) -> list[tuple[PointName, PointName]]:
        """The ordered pairs of points that it leads from and to."""
        a, b = self.between
        return [(a, b)] if self.one_way else [(a, b), (b, a)]


class Topology(config.ConfigTable, frozen=True, kw_only=True):
    """The way in which devices are joined: a kind, and the fields that `TOPOLOGY_FIELDS` lists for it."""

    kind: str
    link: Cable = Cable()  # between neighbours; from device to switch; in a fat tree between switches, too
    per_node: Count | None = None
    inside: str = "switch"  # of a node: switch or mesh
    nics: Count = 1  # network cards of a node, each for an equal share of its devices
    host: Cable = Cable()  # from a device to its card
    network: Cable = Cable()  # from a card to the network
    across: str = "switch"  # the network: one switch, or a fat tree
    ports: Annotated[int, msgspec.Meta(ge=2, le=PORTS)] | None = None  # of a fat tree's switches; None: what is needed
    apart: Count = 1  # every how many-th card of a fat tree is one of these nodes; the others are not drawn

    def _check(self) -> None:
        taken = TOPOLOGY_FIELDS[choose("kind", self.kind, TOPOLOGY_FIELDS)]
        choose("inside", self.inside, ("switch", "mesh"))
        choose("across", self.across, ("switch", "fat-tree"))
        for word in msgspec.structs.fields(Topology)[1:]:
            if word.name not in taken and getattr(self, word.name) != word.default:
                raise RequestError(
                    word.name, f"is nothing that {self.kind!r} has (it has {', '.join(taken)}); remove it"
                )
        if self.kind == "nodes" and self.per_node is None:
            raise RequestError("per_node", "is missing; say how many devices a node has")
        if self.nics > (self.per_node or 1):
            raise RequestError("nics", f"{self.nics} are more than the {self.per_node} devices of a node; lower it")
        if self.ports is not None and (self.ports % 2 or (self.across, self.kind) == ("switch", "nodes")):
            raise RequestError("ports", "must be even, and are those of a fat tree's switches; mend that")
        if self.apart > 1 and self.across == "switch":
            raise RequestError("apart", 'is of the cards of a fat tree; set across = "fat-tree", or leave it out')

    @property
    def is_free(self) -> bool:
        """Whether every message takes no time at all."""
        return self.link.is_free and self.host.is_free and self.network.is_free

    @property
    def has_alike_nodes(self) -> bool:
        """Whether it has nodes round one switch: then all of them are alike, and the ways between any two."""
        return self.kind == "nodes" and self.across == "switch"

    @property
    def cables_of_ways(self) -> tuple[list[tuple[float, float]], ...]:
        """Latency and bandwidth of each cable, of alike nodes: up a node, to itself, down, and to any other node."""
        up, down = self.link.there, self.link.back
        there, back = ([up, down], [up, down]) if self.inside == "switch" else ([up], [down])
        return there, [], back, [self.host.there, self.network.there, self.network.back, self.host.back]

    @property
    def layout(self) -> "Layout":
        """The layout of alike nodes, without costs of cables."""
        return Layout(self.per_node or 1, self.inside, self.nics, tuple(map(isfinite, self.bandwidths)))

    @property
    def bandwidths(self) -> tuple[float, ...]:
        """The bandwidths of all kinds of cables of alike nodes, each there and back."""
        return tuple(way[1] for cable in (self.link, self.host, self.network) for way in (cable.there, cable.back))

    @property
    def is_alike_inside(self) -> bool:
        """Whether ways within a node are alike both ways."""
        return self.inside == "switch" or self.link.there == self.link.back

    def shares_cards(self, ranks: int) -> bool:
        """Whether each of `ranks` neighbours has a like share of a node's cards, in every such group."""
        size, rest = divmod(self.per_node or 1, self.nics)
        return (
            self.nics == 1 or ranks >= (self.per_node or 1) or (not rest and (size % ranks == 0 or ranks % size == 0))
        )

    def of_teams(self, ranks: int) -> "Topology":
        """Return the topology that one of `ranks` neighbours sees, which send at once, by its share of cards."""
        if self.kind != "nodes":
            return self
        size, teams = self.per_node or 1, max(1, (self.per_node or 1) // ranks)
        sharing = min(ranks, -(-size // self.nics))  # that send by one card
        nics = min(self.nics, teams)
        network = {
            name: value / sharing for name in ("bandwidth", "bandwidth_back") if (value := getattr(self.network, name))
        }
        apart = self.apart * self.nics * max(1, ranks // size) // nics if self.across == "fat-tree" else 1
        return replace(self, per_node=teams, nics=nics, network=replace(self.network, **network), apart=apart)

    def complete_nodes(self, count: int) -> int:
        """Return how many devices there are where at least `count` are needed: nodes are complete."""
        size = self.per_node or 1
        return -(-count // size) * size


class Layout(NamedTuple):
    """The way in which alike nodes are joined by cables, some of which have a limit: there and back, of each kind."""

    per_node: int
    inside: str
    nics: int
    limited: tuple[bool, ...]

    @property
    def topology(self) -> Topology:
        """A topology whose ways are alike where they take cables of the same kinds.

        Bandwidths are the numbers of kinds, from 1 on, where these have a limit, and latencies are powers of two.
        """
        limits = [number if limited else inf for number, limited in enumerate(self.limited, start=1)]
        link, host, network = (
            Cable(latency=2.0**k, bandwidth=limits[k], latency_back=2.0 ** (k + 1), bandwidth_back=limits[k + 1])
            for k in (0, 2, 4)
        )
        joined = Topology(kind="nodes", per_node=self.per_node, inside=self.inside, nics=self.nics)
        return msgspec.structs.replace(joined, link=link, host=host, network=network)


def turned(numbers: Ints, places: int, data: int, each: int = 1) -> Ints:
    """Return the numbers by columns of runs of `each`, numbered by rows of `places`; behind `data` rows, all stay."""
    (row, place), own = np.divmod(numbers // each, places), numbers % each
    found: Ints = np.where(row < data, (place * data + row) * each + own, numbers)
    return found


UNLIMITED_LANES = 1_000_000_000
# How a device's messages overlap: all of them with everything; with its tasks, in a stream of their own one after
# another; or with nothing, in one stream with its tasks.
OVERLAPS = FULL, STREAM, NONE = "full", "stream", "none"


class Speeds(config.ConfigTable, frozen=True, kw_only=True):
    """Peak FLOP/s by the precision of the factors; None where a device cannot multiply these."""

    fp64: Speed | None = None
    fp32: Speed | None = None
    tf32: Speed | None = None
    bf16: Speed | None = None
    fp16: Speed | None = None
    fp8: Speed | None = None

    def _check(self) -> None:
        if not self.known:
            raise RequestError("speeds", f"has none; give at least one of {', '.join(self.__struct_fields__)}")

    @property
    def known(self) -> dict[str, float]:
        """The known speeds by precision."""
        speeds = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: speed for name, speed in speeds.items() if speed is not None}


class MeasuredWith(config.ConfigTable, frozen=True, kw_only=True):
    """The training of which the passes were timed whose speed is that of the devices."""

    samples: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None  # of a micro-batch
    precision: str = ""  # a field of `Speeds`
    optimizer: Name = ""

    def _check(self) -> None:
        if self.precision:
            choose("precision", self.precision, Speeds.__struct_fields__)


class Kernels(config.ConfigTable, frozen=True, kw_only=True):
    """The shares of a device's peak and of its memory bandwidth that operations reach, and what they wait for."""

    products: Share = 1.0  # of the peak
    core: Share = 1.0  # of the peak, by a fused core of attention
    grouped: Share = 1.0  # of the peak, by products of experts
    passes: Share = 1.0  # of the memory bandwidth
    all_to_all: Share = 1.0  # of what links reach, by exchanges all to all
    launch: Seconds = 0.0  # before each pass
    meet: Seconds = 0.0  # before each exchange
    beside: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # the share of a product that hides an exchange beside it


class Workspace(config.ConfigTable, frozen=True, kw_only=True):
    """What kernels of libraries take of a device's memory beside all tensors.

    What they take during a task is one size for all stages, or a list for a run in as many; another has its largest.
    """

    kept: Size = 0  # from before the first task on, for good
    forward: Sizes = ()  # during a forward; (): nothing
    backward: Sizes = ()  # during a backward
    input_backward: Sizes | None = None  # during the input's part of a split backward; None: as the whole
    weight_backward: Sizes | None = None  # the same of the weights' part; None: as the whole

    @property
    def most(self) -> int:
        """The most that kernels take at once."""
        during = self.forward, self.backward, self.input_backward or (), self.weight_backward or ()
        return self.kept + max((0, *sum(during, ())))

    def during(self, n: int, *, split: bool) -> list[list[int]]:
        """Return what forwards, backwards and weights' parts of n stages take, where backwards are split or not."""
        whole = self.backward
        parts = (self.input_backward or whole, self.weight_backward or whole) if split else (whole, ())
        return [[*(size if len(size) == n else [max(size, default=0)] * n)] for size in (self.forward, *parts)]


class Devices(config.ConfigTable, frozen=True, kw_only=True):
    """A group of equal devices."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_DEVICES)] | None = None  # None: the number that a schedule needs
    speed: Speed | None = None  # in any precision
    speeds: Speeds | None = None
    achieved: Share | None = None  # the share of either that is reached; None: all
    kernels: Kernels | None = None  # for models of layers; None: their FLOP over the speed that is reached
    memory: Size | None = None  # None: unlimited
    memory_bandwidth: Bandwidth | None = None  # of reads and writes: for updates by their bytes, and rooflines
    workspace: Workspace = Workspace()
    lanes: Annotated[int, msgspec.Meta(ge=1, le=UNLIMITED_LANES)] = 1  # tasks side by side on one device
    overlap: str = FULL  # of its messages with its tasks and with each other: one of OVERLAPS

    def _check(self) -> None:
        if self.speed is not None and self.speeds is not None:
            raise RequestError("speed", "and speeds both say how fast it is; keep one")
        if self.achieved is not None and self.speed is None and self.speeds is None:
            raise RequestError("achieved", "is a share of speed or speeds; give one")
        if self.kernels is not None and self.memory_bandwidth is None:
            raise RequestError("kernels", "say which share of memory_bandwidth is reached; give that, too")
        choose("overlap", self.overlap, OVERLAPS)

    @property
    def is_measured(self) -> bool:
        """Whether anything of it is in bytes or FLOP/s."""
        values = self.speed, self.speeds, self.memory, self.memory_bandwidth
        return any(value is not None for value in values) or self.workspace != Workspace()

    @property
    def reached_bandwidth(self) -> float | None:
        """The bandwidth of its memory that passes reach; None where it is not known."""
        reached = self.kernels.passes if self.kernels else 1.0
        return None if self.memory_bandwidth is None else self.memory_bandwidth * reached

    def peak_in(self, precision: str | None) -> float | None:
        """Return the peak FLOP/s in a precision or, for None, in any; None where there is no speed.

        Raises KeyError for a precision without a speed.
        """
        return self.speed if self.speeds is None or precision is None else self.speeds.known[precision]

    def speed_in(self, precision: str | None) -> float | None:
        """Return the FLOP/s that are reached, as `peak_in` returns the peak."""
        peak = self.peak_in(precision)
        return peak if peak is None or self.achieved is None else peak * self.achieved

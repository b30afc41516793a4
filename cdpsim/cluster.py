"""What a schedule runs on: devices, and the links between each pair of them."""

from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from cdpsim import fileform
from cdpsim.errors import RequestError
from cdpsim.fileform import Bandwidth, Name, Seconds, Size, Speed

MOST_DEVICES = 10_000_000
UNLIMITED_LANES = 1_000_000_000

Indices = npt.NDArray[np.integer[Any]]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Device: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MOST_DEVICES)]


class Devices(fileform.Table, frozen=True, kw_only=True):
    """A group of equal devices."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_DEVICES)] | None = None  # None: as many as it takes
    speed: Speed | None = None
    memory: Size | None = None  # None: unlimited
    lanes: Annotated[int, msgspec.Meta(ge=1, le=UNLIMITED_LANES)] = 1  # tasks side by side on one device


class Link(fileform.Table, frozen=True, kw_only=True):
    """The cost of a message between two devices: latency + size / bandwidth."""

    latency: Seconds = 0.0
    bandwidth: Bandwidth = inf


class PairLink(fileform.Table, frozen=True, kw_only=True):
    """What differs for one pair of devices, in both directions or from the first to the second only."""

    between: tuple[Device, Device]
    latency: Seconds | None = None  # None: as for every pair
    bandwidth: Bandwidth | None = None
    one_way: bool = False

    def __post_init__(self) -> None:
        fileform.Table.__post_init__(self)
        if self.between[0] == self.between[1]:
            raise RequestError("between", f"{list(self.between)} is one device; name two")

    @property
    def directions(self) -> list[tuple[int, int]]:
        """The pairs (source, destination) that this is about."""
        a, b = self.between
        return [(a, b)] if self.one_way else [(a, b), (b, a)]


class Cluster(fileform.Table, frozen=True, kw_only=True):
    """Groups of devices, numbered from 0 through all of them, and the links between them."""

    name: Name = ""
    devices: Annotated[tuple[Devices, ...], msgspec.Meta(min_length=1)] = (Devices(),)
    link: Link = Link()
    links: tuple[PairLink, ...] = ()

    def __post_init__(self) -> None:
        fileform.Table.__post_init__(self)
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

    @classmethod
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
        own = [value for pair in self.links for value in (pair.latency or 0.0, 1 / (pair.bandwidth or inf))]
        return not any([self.link.latency, 1 / self.link.bandwidth, *own])

    @property
    def count(self) -> int | None:
        """The number of devices; None for as many as it takes."""
        counts = [group.count for group in self.devices if group.count is not None]
        return sum(counts) if counts else None

    def require(self, count: int) -> None:
        """Refuse a schedule that needs more devices than there are."""
        if self.count is not None and count > self.count:
            remedy = "raise `count` in [devices], or ask for fewer stages"
            problem = f"has {self.count} devices, but the schedule needs {count}; {remedy}"
            raise RequestError(f"cluster {self.name!r}" if self.name else "cluster", problem)

    def speeds(self, count: int) -> list[float | None]:
        """Give the FLOP/s of each of the first `count` devices; None where the cluster does not say."""
        return [self.devices[group].speed for group in self._groups(count)]

    def memory_bytes(self, count: int) -> Floats:
        """Give the memory of each of the first `count` devices; inf where it has no limit."""
        sizes = [inf if group.memory is None else group.memory for group in self.devices]
        return np.array(sizes, np.float64)[self._groups(count)]

    def lanes(self, count: int) -> Ints:
        """Give how many tasks each of the first `count` devices runs side by side."""
        return np.array([group.lanes for group in self.devices], np.int64)[self._groups(count)]

    def link_costs(self, src: Indices, dst: Indices) -> tuple[Floats, Floats]:
        """Give latency and bandwidth of each message between two different devices."""
        latency = np.full(np.shape(src), self.link.latency)
        bandwidth = np.full(np.shape(src), self.link.bandwidth)
        if self.links:
            pairs, own_latency, own_bandwidth = _own_links(self.link, self.links)
            wanted = src.astype(np.int64) * MOST_DEVICES + dst  # too large for int32
            place = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
            own = pairs[place] == wanted
            latency[own] = own_latency[place[own]]
            bandwidth[own] = own_bandwidth[place[own]]
        return latency, bandwidth

    def group_link(self, members: Indices) -> tuple[float, float]:
        """Give the largest latency and the smallest bandwidth over all ordered pairs of `members`."""
        members = np.unique(members)
        pairs = len(members) * (len(members) - 1)
        if not pairs:
            return 0.0, inf
        latencies, bandwidths = np.array([self.link.latency]), np.array([self.link.bandwidth])
        if self.links:
            own, own_latency, own_bandwidth = _own_links(self.link, self.links)
            inside = np.isin(own // MOST_DEVICES, members) & np.isin(own % MOST_DEVICES, members)
            if inside.sum() == pairs:  # none goes by the common link
                latencies, bandwidths = latencies[:0], bandwidths[:0]
            latencies = np.append(latencies, own_latency[inside])
            bandwidths = np.append(bandwidths, own_bandwidth[inside])
        return float(latencies.max()), float(bandwidths.min())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a cluster file, .toml or .json."""
        return cls.from_builtins(fileform.load(path), str(path))

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write a cluster file; loading it gives an equal cluster."""
        fileform.save(path, self._table(), force=force)

    def to_builtins(self) -> str | dict[str, object]:
        """Give what a file says of this cluster, or "unit"."""
        return "unit" if self.is_unit else self._table()

    @classmethod
    def from_builtins(cls, content: object, subject: str) -> Self:
        """Make a cluster of a file's content, or of "unit"; errors begin with `subject`."""
        if content == "unit":
            return cls.unit()
        form = fileform.decode(content, _ClusterFile, subject, (_ClusterFile, Devices, PairLink))
        groups = (form.devices,) if isinstance(form.devices, Devices) else form.devices
        try:
            return cls(name=form.name, devices=groups, link=form.link, links=form.links)
        except RequestError as error:
            raise RequestError(subject, f"$.{error}") from None

    def _table(self) -> dict[str, object]:
        groups = [fileform.encode(group) for group in self.devices]
        table = {
            "name": self.name,
            "devices": groups[0] if len(groups) == 1 else groups,
            "link": fileform.encode(self.link),
            "links": [fileform.encode(pair) for pair in self.links],
        }
        # Never all of them: an empty file is one that was not written to its end.
        return {key: value for key, value in table.items() if value or key == "devices"}

    def _groups(self, count: int) -> Ints:
        """Say to which group each of the first `count` devices belongs."""
        self.require(count)
        ends = np.cumsum([group.count or count for group in self.devices])
        return np.searchsorted(ends, np.arange(count), side="right")


class _ClusterFile(fileform.Table, frozen=True, kw_only=True):
    name: Name = ""
    devices: Devices | tuple[Devices, ...] = Devices()
    link: Link = Link()
    links: tuple[PairLink, ...] = ()


@lru_cache(maxsize=8)  # asked for every group of devices
def _own_links(link: Link, links: tuple[PairLink, ...]) -> tuple[Ints, Floats, Floats]:
    """Give the pairs that have a link of their own, ascending, with its latency and bandwidth."""
    rows = sorted(
        (
            src * MOST_DEVICES + dst,
            link.latency if pair.latency is None else pair.latency,
            link.bandwidth if pair.bandwidth is None else pair.bandwidth,
        )
        for pair in links
        for src, dst in pair.directions
    )
    pairs, latency, bandwidth = np.array(rows, np.float64).T
    return pairs.astype(np.int64), latency, bandwidth

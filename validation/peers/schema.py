"""The schema of a report on foreign runtimes: these types are written to files, and read from them."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec

from cdpsim.errors import RequestError
from cdpsim.files import writing as files

from ..report.schema import Count, Seconds
from .calls import Call

Bytes = dict[str, int]  # by name

_CATEGORIES = {
    "parameters": "parameters",
    "gathered parameters": "parameters",
    "gradients": "gradients",
    "buckets": "communication",
    "receive buffers of activations": "communication",
    "receive buffers of gradients": "communication",
    "sent gradients": "communication",
    "optimizer": "optimizer",
}


def category_of(kind: str) -> str:
    """Return the simulator's category of what torch keeps; all else are activations."""
    return _CATEGORIES.get(kind, "activations")


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a report without other fields than these."""


class SimulatedMemory(_Part, frozen=True, kw_only=True):
    """A device's simulated peak above its parameters, its difference to torch's, the categories, and task by task."""

    bytes: int
    relative_error: float
    categories: Bytes
    tasks: list[int | None]


class DevicePeak(_Part, frozen=True, kw_only=True):
    """A rank's memory: torch's peak above the parameters that lie there, and each simulation of it.

    `contents` are all live storages at torch's peak. `in_no_storage` are bytes of the allocator beyond them, and
    `unseen` those that a thread freed which the profiler does not see, some of them perhaps before the peak.
    """

    device: Count
    parameters: Count
    bytes: Count
    contents: Bytes
    in_no_storage: int
    unseen: int
    tasks: list[str]
    task_bytes: list[int]
    simulated: dict[str, SimulatedMemory] = {}
    remainder: Bytes = {}  # of this rank alone: what torch has more, by name, than any simulation

    def difference(self, simulation: str) -> Bytes:
        """Return the bytes by category that torch has at its peak beyond a simulation at its own; they add up."""
        sums: Counter[str] = Counter()
        for kind, size in self.contents.items():
            sums[category_of(kind)] += size
        sums["no storage"] += self.in_no_storage
        sums.subtract(self.simulated[simulation].categories)
        return {category: size for category, size in sorted(sums.items()) if size}


class Messages(_Part, frozen=True, kw_only=True):
    """The messages of a step by rank, as torch makes them: sends and collectives, in their order.

    `first_difference` is that of the simulation; None: there is none.
    """

    torch: list[list[Call]]
    simulated: Count = 0
    bytes_torch: Count = 0
    bytes_simulated: Count = 0
    first_difference: str | None = None

    @property
    def same(self) -> bool:
        """Whether the simulation sends the same."""
        return self.first_difference is None


class PeerTime(_Part, frozen=True, kw_only=True):
    """The time of a step's passes; not judged, as other programs on the machine change it."""

    torch_seconds: Seconds
    simulated_seconds: Seconds
    relative_error: float


class PeerRequest(_Part, frozen=True, kw_only=True):
    """The case that was run and simulated."""

    n: Annotated[int, msgspec.Meta(ge=1)]
    m: Annotated[int, msgspec.Meta(ge=1)]
    chunks: Annotated[int, msgspec.Meta(ge=1)]
    model: str
    sizes: dict[str, int]
    batch: Annotated[int, msgspec.Meta(ge=1)]
    dtype: str
    optimizer: str
    recompute: str | None
    device: str
    backend: str


class PeerReport(_Part, frozen=True, kw_only=True):
    """One runtime, compared with its simulation."""

    name: str
    about: str
    schedule: str
    ranks: Annotated[int, msgspec.Meta(ge=1)]
    request: PeerRequest
    judged: bool
    devices: Annotated[list[DevicePeak], msgspec.Meta(min_length=1)]
    messages: Messages
    remainder: Bytes = {}  # of each rank: what torch has, by name, and no simulation
    max_abs_difference: float | None  # of parameters in float64; None: not a number
    time: PeerTime | None
    ok: bool

    def __post_init__(self) -> None:
        numbers = [device.device for device in self.devices]
        if numbers != list(range(self.ranks)) or len(self.messages.torch) != self.ranks:
            raise ValueError("`devices` and `messages` have not one entry for each of `ranks`")
        if any(len(device.tasks) != len(device.task_bytes) for device in self.devices):
            raise ValueError("`tasks` and `task_bytes` differ in length")


class PeersReport(_Part, frozen=True, kw_only=True):
    """All runtimes that were run on one machine."""

    environment: dict[str, object]
    tolerance: float
    peers: Annotated[list[PeerReport], msgspec.Meta(min_length=1)]


def write_peers(path: str | Path, report: PeersReport, *, force: bool = False) -> None:
    """Write a report into a file that appears whole or not at all."""
    files.write_file(path, [msgspec.json.encode(report) + b"\n"], force=force)


def read_peers(path: str | Path, *, rewritten: bool = False) -> PeersReport:
    """Return the report in a file, which may be `rewritten` by the command; refuse any other file in one line."""
    try:
        return msgspec.json.decode(files.read_text(path, rewritten=rewritten), type=PeersReport)
    except msgspec.DecodeError as error:
        problem = f"is no report of peers ({str(error)[:1].lower()}{str(error)[1:]}); write one with `peers -o`"
        raise RequestError(str(path), problem) from None

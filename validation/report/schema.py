"""The schema of reports: of replays, calibrations and foreign runtimes. These types are written, and read again."""

from collections import Counter
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from cdpsim.errors import RequestError
from cdpsim.files import writing as files
from cdpsim.request.options import RENAMED, with_new_names

Kept = TypeVar("Kept")  # what a file keeps
Scalar: TypeAlias = str | int | float | bool | None
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
TrialState: TypeAlias = Literal["ok", "not within tolerance", "failed", "left out"]
FailureKind: TypeAlias = Literal["out of memory", "killed", "timeout", "refused", "import", "error"]
Method: TypeAlias = Literal["storages", "allocator"]  # the latter in older files
AccountMethod: TypeAlias = Literal["profiler", "memory_stats"]
# "law" says that a message, or a missing one, breaks a law; older files have the four words before it instead.
MessageFault: TypeAlias = Literal["superfluous", "missing", "doubled", "wrong version", "law", "too large", "too small"]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


# Suffixes in names of trials, for options that have another name today.
_RENAMED_WORDS = {name.replace("_", "-"): f"{now}={value}" for name, (now, value) in RENAMED.items()}
MEASURED = ("ok", "not within tolerance")
CALIBRATION = "calibration"  # the name of the trial that is no replay


class _Form(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a report without other fields than these."""


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a replay: only the fields for tables and figures; `Report.request` may have more."""

    schedule: str
    n: Annotated[int, msgspec.Meta(ge=1)]
    model: str
    rule: str | None = None
    steps: int = 0
    device: str = ""
    backend: str | None = None  # None: all devices in one process, or unknown
    single_process: bool = False


class NearestRule(_Form, frozen=True, kw_only=True):
    """The rule that ends nearest to the one that was replayed, and the largest difference between their parameters."""

    rule: str
    distance: float


class ParameterComparison(_Form, frozen=True, kw_only=True):
    """The final parameters, compared with the update equation."""

    max_abs_difference: Annotated[float, msgspec.Meta(ge=0)] | None  # None: not a number, in JSON
    bit_equal: bool
    tolerance: float
    nearest: NearestRule | None = None  # None in older files, or where a run is too short for another rule to differ
    stage: int | None = None  # the one whose parameters differ most; None where none differs
    other_rule: str | None = None  # the rule whose parameters these are instead


class Amount(_Form, frozen=True, kw_only=True):
    """The peak of one category, and the largest difference in any slot."""

    simulated_bytes: Count
    measured_bytes: Count
    largest_difference: Count = 0


class Divergence(_Form, frozen=True, kw_only=True):
    """The first slot in which simulation and measurement differ."""

    task: str
    slot: int
    simulated_bytes: Count
    measured_bytes: Count
    category: str = "activations"


class DeviceMemory(_Form, frozen=True, kw_only=True):
    """One device's peak of the category activations, and its peaks of all categories."""

    device: Count
    simulated_bytes: Count
    measured_bytes: Count
    relative_error: float
    categories: dict[str, Amount]
    parts_at: Divergence | None


class Total(_Form, frozen=True, kw_only=True):
    """The peak of what all devices hold at one time."""

    simulated_bytes: Count
    measured_bytes: Count
    relative_error: float


class Curve(_Form, frozen=True, kw_only=True):
    """Memory of all devices together, by slot."""

    slot: list[int]
    simulated_bytes: list[Count]
    measured_bytes: list[Count]

    def __post_init__(self) -> None:
        if not len(self.slot) == len(self.simulated_bytes) == len(self.measured_bytes):
            raise ValueError("`slot`, `simulated_bytes` and `measured_bytes` differ in length")


class Memory(_Form, frozen=True, kw_only=True):
    """Memory, simulated and measured by storages."""

    devices: Annotated[list[DeviceMemory], msgspec.Meta(min_length=1)]
    max_relative_error: float
    total: Total
    curve: Curve
    tolerance: float
    method: Method
    together: Total | None = None  # of all categories; None in files from before it was compared


class LifeDifference(_Form, frozen=True, kw_only=True):
    """A content that a device holds longer or shorter in the simulation than its tasks and messages need it.

    Moments are the nodes of the program that begin and end it; None where it is not held, or not needed, at all.
    """

    device: Count
    content: str
    held_from: str | None
    held_until: str | None
    needed_from: str | None
    last_needed: str | None
    size: Count

    def __str__(self) -> str:
        device, what = f"device {self.device}", f"{self.content} ({self.size:,} B)"
        if self.held_until is None:
            return f"{device} does not hold {what}, last needed at {self.last_needed}"
        if self.last_needed is None:
            return f"{device} holds {what} until {self.held_until}, and does not need it"
        if self.held_until == self.last_needed:
            return f"{device} holds {what} from {self.held_from}, needed from {self.needed_from}"
        return f"{device} holds {what} until {self.held_until}, last needed at {self.last_needed}"


class Remainder(_Form, frozen=True, kw_only=True):
    """The bytes that a process needs beside the simulated ones, by their name."""

    name: str
    size: Count


class Account(_Form, frozen=True, kw_only=True):
    """The allocator's account of a process: its peak against the simulated bytes and the remainders at that point."""

    device: Count | None  # None: all devices are in the process
    simulated_bytes: Count
    remainders: list[Remainder]
    measured_bytes: Count
    peak_at: str
    largest_difference: Count  # of all events
    differs_at: str | None
    differs_by: int = 0  # measured less explained, there

    @property
    def explained_bytes(self) -> int:
        """The simulated bytes and the remainders."""
        return self.simulated_bytes + sum(each.size for each in self.remainders)


class AllocatorComparison(_Form, frozen=True, kw_only=True):
    """The allocator's accounts of all processes; the tolerance of a difference is bytes and a share of the peak."""

    processes: Annotated[list[Account], msgspec.Meta(min_length=1)]
    tolerance_bytes: Count
    tolerance: float
    method: AccountMethod


class MessageDifference(_Form, frozen=True, kw_only=True):
    """A message of the program that its tasks do not need as it is, or one that they need and it lacks."""

    kind: MessageFault
    text: str
    size: Count  # the bytes that are too many or too few; 0 where there is no message

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class MessageCount(_Form, frozen=True, kw_only=True):
    """Messages and their bytes; `agree` also says that kinds, peers and sizes are the same one by one."""

    simulated: Count
    measured: Count
    bytes_simulated: Count
    bytes_measured: Count
    agree: bool
    differences: list[MessageDifference] | None = None  # None in files from before needs were compared


class DeviceTime(_Form, frozen=True, kw_only=True):
    """The busy time of one device."""

    device: Count
    simulated_busy_seconds: Seconds
    measured_busy_seconds: Seconds
    relative_error: float


class Time(_Form, frozen=True, kw_only=True):
    """The makespan and each device's busy time, simulated with a calibration before they were measured."""

    simulated_seconds: Seconds
    measured_seconds: Seconds
    relative_error: float
    devices: list[DeviceTime]
    calibration: str


class Report(_Form, frozen=True, kw_only=True):
    """One replay, compared with its simulation."""

    request: dict[str, Scalar]
    environment: dict[str, object]
    parameters: ParameterComparison
    memory: Memory
    messages: MessageCount
    time: Time | None
    ok: bool
    lives: list[LifeDifference] | None = None  # None in files from before they were compared
    allocator: AllocatorComparison | None = None  # likewise
    # Those asked for: "replayed", or why not or only in part; None in older files.
    options: dict[str, str] | None = None

    @property
    def asked(self) -> ReplayRequest:
        """The request, with types."""
        return msgspec.convert(self.request, ReplayRequest)

    @property
    def options_text(self) -> str:
        """The options that are not the usual ones, in words, each with its state if it was not replayed."""
        states = {name: state.partition(",")[0] for name, state in (self.options or {}).items() if "," in state}
        words = option_words(self.request).items()
        return " ".join(f"{word} ({states[name]})" if name in states else word for name, word in words)

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "request", with_new_names(self.request))
        msgspec.convert(self.request, ReplayRequest)  # refused when a report is read, not when it is drawn


class LiveRound(_Form, frozen=True, kw_only=True):
    """The micro-batches that each rank had in a round."""

    micro_batches: list[Count]


class LiveReport(_Form, frozen=True, kw_only=True):
    """A run of rounds whose lengths ranks found, compared with the equation for them."""

    request: dict[str, Scalar]
    environment: dict[str, object]
    rounds: list[LiveRound]
    parameters: ParameterComparison
    ok: bool

    def __str__(self) -> str:
        counts = [count for each in self.rounds for count in each.micro_batches]
        many = f"{min(counts, default=0)} to {max(counts, default=0)} micro-batches of a rank in {len(self.rounds)}"
        apart = "bit-equal" if self.parameters.bit_equal else f"{self.parameters.max_abs_difference} apart"
        result = "ok" if self.ok else "not within tolerance"
        return f"{self.request['schedule']}, live: {many} rounds; parameters {apart}; {result}"


class TrialResult(_Form, frozen=True, kw_only=True):
    """One trial of a battery: how it ended, and why if it failed."""

    name: str
    state: TrialState
    seconds: Seconds = 0.0
    failure: FailureKind | None = None
    reason: str | None = None  # one line

    def __post_init__(self) -> None:
        words = [_RENAMED_WORDS.get(word, word) for word in self.name.split("+")]
        msgspec.structs.force_setattr(self, "name", "+".join(words))


class Battery(_Form, frozen=True, kw_only=True):
    """Many replays on one machine, its calibration, and by hash the models that simulations read.

    `reports` are those of the trials that were measured, in the order of the trials; the calibration is a trial without
    one. Files from before trials had names have no `trials`.
    """

    environment: dict[str, object]
    seconds: float
    calibration: dict[str, object] | None  # as `calibrate` writes it
    models: dict[str, dict[str, object]]
    reports: list[Report]
    trials: list[TrialResult] = []

    def __post_init__(self) -> None:
        if self.trials and len(self.by_name) != len(self.reports):
            raise ValueError("`trials` has not one entry for each of `reports`")

    @property
    def by_name(self) -> dict[str, Report]:
        """The reports by the names of their trials."""
        measured = [trial.name for trial in self.trials if trial.state in MEASURED and trial.name != CALIBRATION]
        return dict(zip(measured, self.reports, strict=False))

    @property
    def unmeasured(self) -> list[TrialResult]:
        """The trials that failed or were left out."""
        return [trial for trial in self.trials if trial.state not in MEASURED]


# Calibrations


class Point(msgspec.Struct, frozen=True):
    """The median time of one size, and the quartiles around it, in the series in which the median was lowest.

    `fastest` is of all series: where it is much less, other programs were using the machine.
    """

    ranks: int
    size: int
    seconds: float
    faster: float
    slower: float
    fastest: float
    repetitions: int


class Errors(msgspec.Struct, frozen=True):
    """The errors of times by latency and bandwidth, at each point as a share of the measured time."""

    latency_seconds: float
    bandwidth_bytes_per_second: float | None  # None: infinite, for which JSON has no number
    median_relative_error: float
    max_relative_error: float
    relative_errors: list[float]

    @property
    def bandwidth(self) -> float:
        """The bandwidth as a number, which may be infinite."""
        return inf if self.bandwidth_bytes_per_second is None else self.bandwidth_bytes_per_second


class Transfers(msgspec.Struct, frozen=True):
    """Messages from one rank to another, and the line through their times."""

    points: list[Point]
    fit: Errors


class Collective(msgspec.Struct, frozen=True):
    """One collective: for each textbook algorithm, the links that explain its times best, and its times on the link.

    `best_fit` is the algorithm whose fit is nearest, None where a single size of group cannot tell them apart; `best`
    is the one whose times on the point-to-point link are nearest: the one for a simulation.
    """

    name: str
    points: list[Point]
    fits: dict[str, Errors]
    on_link: dict[str, Errors]
    best_fit: str | None
    best: str


class Task(msgspec.Struct, frozen=True):
    """One stage's forward, backward, update, or part of a backward; of the latter operations are not counted."""

    stage: int
    kind: str
    seconds: float
    faster: float
    slower: float
    thread_seconds: float
    repetitions: int
    flop: float | None = None
    flop_per_second: float | None = None


class Compute(msgspec.Struct, frozen=True):
    """The stages' tasks, and the speed that explains passes best; other ranks make passes `slowdown` times as long."""

    tasks: list[Task]
    speed_flop_per_second: float
    relative_errors: list[float]  # of times at that speed, for each pass in the order of tasks
    median_relative_error: float
    slowdown: float
    alone: bool


class OperationTime(msgspec.Struct, frozen=True):
    """An operation, or a backward that counts as `times` operations of so many FLOP and bytes; or a whole layer."""

    name: str
    kind: str
    width: int
    tokens: int
    times: float
    flop: float
    moved_bytes: float
    seconds: float


class OverlapTimes(msgspec.Struct, frozen=True):
    """Medians of the times of a product, of an all-reduce of a size, and of both together."""

    size: int
    product: float
    exchange: float
    both: float


class KernelFit(msgspec.Struct, frozen=True):
    """Times of operations, and what explains them: fields of the cluster file. Nothing is fitted to the whole layer."""

    operations: list[OperationTime]
    speed: float
    memory_bandwidth: float
    products: float
    core: float
    passes: float
    launch: float
    meet: float
    beside: float
    overlap: OverlapTimes
    layer_relative_error: float | None = None  # of a forward and a backward


class Calibration(msgspec.Struct, frozen=True):
    """All results of a calibration, with its request and environment."""

    request: dict[str, Any]
    environment: dict[str, object]
    one_way: Transfers
    both_ways: Transfers
    collectives: list[Collective]
    compute: Compute
    kernels: KernelFit | None = None  # None in older files
    workspace: dict[str, Any] = {}  # `[devices.workspace]`


# Foreign runtimes

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
    """Return the simulator's category of a kind of torch's storages; all others are activations."""
    return _CATEGORIES.get(kind, "activations")


class Call(NamedTuple):
    """A call by which a runtime communicates: how, to which rank (-1: to all), its bytes, and the task they are of."""

    call: str
    peer: int
    nbytes: int
    label: str = ""


class SimulatedMemory(_Form, frozen=True, kw_only=True):
    """A device's simulated peak above its parameters, its difference to torch's, the categories, and task by task."""

    bytes: int
    relative_error: float
    categories: Bytes
    tasks: list[int | None]


class DevicePeak(_Form, frozen=True, kw_only=True):
    """A rank's memory: torch's peak above the parameters that lie there, and each simulation of it.

    `contents` are all live storages at torch's peak. `in_no_storage` are bytes of the allocator beyond them, and
    `unseen` are bytes freed by a thread that the profiler does not see, some of them perhaps before the peak.
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


class Messages(_Form, frozen=True, kw_only=True):
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


class PeerTime(_Form, frozen=True, kw_only=True):
    """The time of a step's passes; not judged, as other programs on the machine change it."""

    torch_seconds: Seconds
    simulated_seconds: Seconds
    relative_error: float


class PeerRequest(_Form, frozen=True, kw_only=True):
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


class PeerReport(_Form, frozen=True, kw_only=True):
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


class PeersReport(_Form, frozen=True, kw_only=True):
    """All runtimes that were run on one machine."""

    environment: dict[str, object]
    tolerance: float
    peers: Annotated[list[PeerReport], msgspec.Meta(min_length=1)]


# The options of a request that a table names, and their usual values, which it does not name; nor those that are off.
_NAMED = (
    *("slot_order", "replicas", "shard", "zero", "buckets", "whole_first_step", "reduce", "reshard"),
    *("gather", "layers", "warm_up", "local_steps", "outer", "slow", "split", "recompute", "offload"),
    *("prefetch", "dtype", "mixed_precision", "autocast", "optimizer"),
)
_NOT_NAMED: dict[str, tuple[Scalar, ...]] = {
    "replicas": (1,),
    "split": ("once",),
    "recompute": ("none",),
    "offload": ("none",),
    "dtype": ("float32", "float64"),
    "optimizer": ("sgd",),
}
_BARE = ("slot_order", "dtype", "optimizer")  # whose values need no name


def option_words(request: Mapping[str, Scalar]) -> dict[str, str]:
    """Return the options of a request that are not the usual ones, each in a word."""
    words = {}
    for option in _NAMED:
        value, name = request.get(option), option.replace("_", "-")
        if value and value not in _NOT_NAMED.get(option, ()):
            words[option] = name if value is True else str(value) if option in _BARE else f"{name}={value}"
    return words


def compared(simulated: float, measured: float, what: str) -> dict[str, Any]:
    """Return the fields of a simulated value, of the measured one, and of the error."""
    both = {f"simulated_{what}": simulated, f"measured_{what}": measured}
    return both | {"relative_error": relative_error(simulated, measured)}


def relative_error(simulated: float, measured: float) -> float:
    """Return the error of a simulated value, as a share of the measured one; positive where it is too large."""
    if simulated == measured:
        return 0.0
    return (simulated - measured) / measured if measured else 1.0


Written: TypeAlias = Report | Battery | LiveReport | PeersReport


def write_report(path: str | Path, report: Written, *, force: bool = False) -> None:
    """Write a report or a battery into a file that appears whole or not at all."""
    files.write_file(path, [encode_report(report)], force=force)


def encode_report(report: Written) -> bytes:
    """Return the bytes of a report's file."""
    if isinstance(report, Battery | PeersReport):  # programs are its readers
        return msgspec.json.encode(report) + b"\n"
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def load_report(path: str | Path, *, rewritten: bool = False) -> Report | Battery | LiveReport:
    """Return a report or a battery; a file that is `rewritten` is also the output of the command."""
    return decode_report(files.read_text(path, rewritten=rewritten), str(path))


def decode_report(text: str, subject: str) -> Report | Battery | LiveReport:
    """Return the report or battery in a text; a refusal begins with `subject`."""
    words = "report of a replay", "move it elsewhere, or replay again"
    names = decode_as(dict[str, msgspec.Raw], text, subject, *words).keys()
    kind: Any = Battery if "reports" in names else LiveReport if "rounds" in names else Report
    found: Report | Battery | LiveReport = decode_as(kind, text, subject, *words)
    return found


def read_peers(path: str | Path, *, rewritten: bool = False) -> PeersReport:
    """Return the report on runtimes in a file; a file that is `rewritten` is also the output of the command."""
    return read_as(PeersReport, path, "report of peers", "write one with `peers -o`", rewritten=rewritten)


def read_as(kind: type[Kept], path: str | Path, name: str, remedy: str, *, rewritten: bool = False) -> Kept:
    """Return the content of a JSON file, whose kind has a name; refuse any other file in one line."""
    return decode_as(kind, files.read_text(path, rewritten=rewritten), str(path), name, remedy)


def decode_as(kind: type[Kept], text: str, subject: str, name: str, remedy: str) -> Kept:
    """Return the content of a text in JSON, whose kind has a name; a refusal begins with `subject`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        problem = str(error)
        problem = f"is no {name} ({problem[:1].lower()}{problem[1:]}); {remedy}"
        raise RequestError(subject, problem) from None

"""A run as Chrome's JSON, which Perfetto, chrome://tracing and readers of PyTorch's profiles open."""

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from cdpsim.draw.views import KIND_WORDS, Views, plain_title
from cdpsim.export.tracks import SLOT, Counters, Tracks, lay_out_tracks, memory_counters
from cdpsim.files.progress import progress
from cdpsim.numeric.columns import Ints
from cdpsim.trace import Trace

_EVENTS_AT_ONCE = 1 << 14

Micros = int | float  # JSON's unit of time; a float where a run has fractions of a microsecond


class TaskArguments(Struct, gc=False):
    """The numbers of a task, shown when it is selected; an update has no micro-batch."""

    stale: int
    micro_batch: int | UnsetType
    stage: int | UnsetType
    step: int
    version: int


class MessageArguments(Struct, gc=False):
    """The numbers of a message, shown when it is selected; one that belongs to no single stage has no stage."""

    op: str
    content: str
    micro_batch: int | UnsetType
    stage: int | UnsetType
    dst: int | str
    step: int
    src: int | None
    size: int
    rounds: int


class Slice(Struct, tag_field="ph", tag="X", gc=False):
    """A task or a message."""

    pid: int
    tid: int
    ts: Micros
    dur: Micros
    name: str
    cat: str
    args: TaskArguments | MessageArguments


class ArrowEnd(Struct, gc=False):
    """One end of an arrow: the start (`ph` is "s"), bound to the slice that runs on its thread at its time, or the end.

    The end (`ph` is "f") is bound to the slice that encloses it (`bp` is "e").
    """

    ph: str
    bp: str | UnsetType
    id: int
    cat: str
    name: str
    pid: int
    tid: int
    ts: Micros


class Counter(Struct, tag_field="ph", tag="C", gc=False):
    """A change of what a device holds of a category."""

    name: str
    pid: int
    ts: Micros
    args: dict[str, int]


def chrome(trace: Trace) -> Iterator[bytes]:
    """Return a trace as the content of a .json file, some events at a time."""
    views = Views(trace)
    return _encode_trace(views, lay_out_tracks(views), memory_counters(views))


def _encode_trace(views: Views, tracks: Tracks, counters: Counters) -> Iterator[bytes]:
    yield _file_head(views, tracks)
    encoder = msgspec.json.Encoder()
    for events in chain(_counter_events(views, counters), _slices_and_arrows(views, tracks)):
        # JSON escapes line breaks within texts, so that all that are left stand between events.
        yield b",\n"
        yield encoder.encode_lines(events)[:-1].replace(b"\n", b",\n")
    yield b"\n]}\n"


def _file_head(views: Views, tracks: Tracks) -> bytes:
    """Return the file's beginning, as Kineto writes it, with the names of processes and threads.

    One file has all devices, so it is rank 0's of as many ranks.
    """
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "distributedInfo": {"backend": "cdpsim", "rank": 0, "world_size": views.devices},
        "otherData": {"title": plain_title(views.trace), "request": dict(views.trace.request)},
    }
    # Readers look for `"rank": 0` with its space. A page may quote all this, and a model may have any name.
    text = msgspec.json.format(msgspec.json.encode(head), indent=1).replace(b"</", rb"<\/").removesuffix(b"\n}")
    processes = [(k, 0, name) for k, name in enumerate(tracks.processes)]
    threads = [(thread.process, _tid(tracks, k), thread.name) for k, thread in enumerate(tracks.threads)]
    names = map(msgspec.json.encode, [*_name_events("process", processes), *_name_events("thread", threads)])
    return text + b',\n "traceEvents": [\n' + b",\n".join(names)


def _name_events(what: str, rows: list[tuple[int, int, str]]) -> Iterator[dict[str, object]]:
    """Return the events that give processes or threads their names and their order."""
    for rank, (pid, tid, name) in enumerate(rows):
        where = {"ph": "M", "pid": pid, "tid": tid}
        yield where | {"name": f"{what}_name", "args": {"name": name}}
        yield where | {"name": f"{what}_sort_index", "args": {"sort_index": rank}}


def _tid(tracks: Tracks, thread: Any) -> Any:
    """Return the number of a thread in the file: that of a process would make it that process's main thread."""
    return len(tracks.processes) + thread


def _microseconds(nanoseconds: Ints) -> np.ndarray:
    """Convert times to integers if all are multiples, else to floats, whose shortest text has the exact nanoseconds."""
    return nanoseconds / SLOT if (nanoseconds % SLOT).any() else nanoseconds // SLOT


def _counter_events(views: Views, counters: Counters) -> Iterator[list[Any]]:
    unit = "stages' worth" if views.in_slots else "bytes"
    category, device, time = np.array(counters.category, dtype=object), counters.device, _microseconds(counters.time)
    for low in progress(range(0, len(time), _EVENTS_AT_ONCE), "write"):
        rows = slice(low, low + _EVENTS_AT_ONCE)
        curve = counters.curve[rows]
        columns = (column.tolist() for column in (category[curve], device[curve], time[rows]))
        yield list(map(Counter, *columns, ({unit: size} for size in counters.size[rows].tolist())))


def _slices_and_arrows(views: Views, tracks: Tracks) -> Iterator[list[Any]]:
    """Return slices by their start, each followed by the ends of its arrows: viewers bind those to the slice before."""
    count, rank = len(tracks.order), np.empty(len(tracks.order), dtype=np.int64)
    rank[tracks.order] = np.arange(count)
    begins = np.zeros(count, dtype=bool)
    begins[tracks.source] = True
    sources = np.flatnonzero(begins)
    events = _EventMaker(views, tracks)
    kinds = (
        (events.tasks, np.arange(len(views.kind))),
        (events.messages, np.arange(len(views.kind), count)),
        (events.starts, sources),
        (events.ends, np.arange(len(tracks.target))),
    )
    first = np.cumsum([0, *(len(rows) for _, rows in kinds)])
    order = np.argsort(np.concatenate([rank, rank[sources], rank[tracks.target]]), kind="stable")
    for low in progress(range(0, len(order), _EVENTS_AT_ONCE), "write"):
        numbers = order[low : low + _EVENTS_AT_ONCE]
        part = np.empty(len(numbers), dtype=object)
        for (make, rows), begin, end in zip(kinds, first[:-1], first[1:], strict=True):
            mine = np.flatnonzero((numbers >= begin) & (numbers < end))
            part[mine] = make(rows[numbers[mine] - begin])
        yield part.tolist()


class _EventMaker:
    """Make the events of slices and arrows from their numbers."""

    def __init__(self, views: Views, tracks: Tracks) -> None:
        self.views, self.tracks = views, tracks
        process = np.array([thread.process for thread in tracks.threads])
        self.pid, self.tid = process[tracks.thread], _tid(tracks, tracks.thread)
        times = _microseconds(np.concatenate([tracks.start, tracks.end]))
        self.start = times[: len(tracks.start)]
        self.duration = _microseconds(tracks.end - tracks.start)
        self.dst = np.array(tracks.dst, dtype=object)

    def tasks(self, rows: Ints) -> list[Slice]:
        """Return tasks under the names of timetables: `F1.0` for micro-batch 1 on stage 0, with `/` if it is stale."""
        tasks = {name: column[rows].tolist() for name, column in self.views.tasks.items()}
        where = zip(tasks["kind"], tasks["micro_batch"], tasks["stage"], tasks["stale"], strict=True)
        names = [f"{kind}{i}.{j}{'/' * stale}" if i >= 0 else f"{kind} {place(i, j)}" for kind, i, j, stale in where]
        indices = (_present(tasks[name], UNSET) for name in ("micro_batch", "stage"))
        arguments = map(TaskArguments, tasks["stale"], *indices, tasks["step"], tasks["version"])
        return self._slices(rows, names, map(KIND_WORDS.__getitem__, tasks["kind"]), arguments)

    def messages(self, slices: Ints) -> list[Slice]:
        """Return messages under the names of their contents: `activation 1.0`, `all_reduce gradient of stage 2`."""
        rows = slices - len(self.views.kind)
        columns = {name: column[rows].tolist() for name, column in self.views.messages.items()}
        op, content = columns["op"], columns["content"]
        where = zip(op, content, columns["micro_batch"], columns["stage"], strict=True)
        names = [f"{'' if o == 'p2p' else f'{o} '}{c} {place(i, j)}" for o, c, i, j in where]
        indices = (_present(columns[name], UNSET) for name in ("micro_batch", "stage"))
        dst, src = self.dst[self.tracks.link[rows]].tolist(), _present(columns["src"], None)
        others = (columns["step"], src, columns["size"], columns["rounds"])
        return self._slices(slices, names, content, map(MessageArguments, op, content, *indices, dst, *others))

    def starts(self, slices: Ints) -> list[ArrowEnd]:
        """Return one start for all arrows that come from a slice."""
        return self._arrow_ends("s", UNSET, slices, slices)

    def ends(self, arrows: Ints) -> list[ArrowEnd]:
        """Return the end of each arrow, under the number of its start."""
        return self._arrow_ends("f", "e", self.tracks.source[arrows], self.tracks.target[arrows])

    def _slices(self, slices: Ints, names: Any, categories: Any, arguments: Any) -> list[Slice]:
        columns = (column[slices].tolist() for column in (self.pid, self.tid, self.start, self.duration))
        return list(map(Slice, *columns, names, categories, arguments))

    def _arrow_ends(self, phase: str, binding: str | UnsetType, number: Ints, slices: Ints) -> list[ArrowEnd]:
        columns = (column[slices].tolist() for column in (self.pid, self.tid, self.start))
        fixed = repeat(phase), repeat(binding), number.tolist(), repeat("flow"), repeat("flow")
        return list(map(ArrowEnd, *fixed, *columns))


def place(micro_batch: int, stage: int) -> str:
    """Name a micro-batch and a stage, either of which may be -1, for none.

    >>> place(1, 0), place(-1, 2), place(3, -1), place(-1, -1)
    ('1.0', 'of stage 2', 'of micro-batch 3', 'of all')
    """
    if micro_batch >= 0:
        return f"{micro_batch}.{stage}" if stage >= 0 else f"of micro-batch {micro_batch}"
    return f"of stage {stage}" if stage >= 0 else "of all"


def _present(numbers: list[int], missing: Any) -> list[Any]:
    """Replace -1, which stands for none."""
    return [missing if number < 0 else number for number in numbers]

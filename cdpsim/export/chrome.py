"""A run as Chrome's JSON, which Perfetto, chrome://tracing and readers of PyTorch's profiles open.

A *slice* is a task or a message. A process is a device, the last one all links; a thread is a lane of a device, its
updates, a link, or a group of collectives. Arrows go between slices: the arrows of a micro-batch make one chain, from
its first forward to its last backward. Counters are the memory of devices.
"""

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType, defstruct

from cdpsim.draw.views import KIND_WORDS, Views, lane_counts, lanes, plain_title
from cdpsim.errors import RequestError
from cdpsim.files.notes import progress
from cdpsim.numeric.columns import Ints, Times, group_starts, sort_by
from cdpsim.numeric.paths import longest_paths
from cdpsim.program import EdgeKind, Kind
from cdpsim.trace import Trace

SLOT = 1000  # nanoseconds that stand for a slot
SLICE_CATEGORIES = {**KIND_WORDS, "W": "weight backward"}  # by which readers of these files filter
_MAKERS = {"activation": "F", "activation_gradient": "B"}  # the kinds of tasks that make these contents
_EXACT = 2**43 * SLOT  # viewers read microseconds as floats, which have no thousandths beyond
_LONGEST_RUN = 2**62
_EVENTS_AT_ONCE = 1 << 14

# Absent fields are UNSET. Tasks and messages are slices; an arrow has one start and one end for each of its targets.
_TaskArguments = defstruct("_TaskArguments", ["stale", "micro_batch", "stage", "step", "version"], gc=False)
_MessageArguments = defstruct(
    "_MessageArguments", ["op", "content", "micro_batch", "stage", "dst", "step", "src", "size", "rounds"], gc=False
)
_Slice = defstruct("_Slice", ["pid", "tid", "ts", "dur", "name", "cat", "args"], tag_field="ph", tag="X", gc=False)
_ArrowEnd = defstruct("_ArrowEnd", ["ph", "bp", "id", "cat", "name", "pid", "tid", "ts"], gc=False)
_Counter = defstruct("_Counter", ["name", "pid", "ts", "args"], tag_field="ph", tag="C", gc=False)


class _Tracks(NamedTuple):
    """The places of slices, which are the rows of `trace.tasks`, then of `trace.messages`; and the arrows."""

    views: Views
    names: list[dict[str, Any]]  # of processes and threads
    dst: np.ndarray  # of each message: a device, or the name of a group
    process: Ints  # of each slice
    thread: Ints
    start: np.ndarray  # in microseconds
    duration: np.ndarray
    order: Ints  # slices by start; the source of an arrow stands before its target
    source: Ints  # arrows, each from one slice ...
    target: Ints  # ... to another

    def tasks(self, rows: Ints) -> list[Any]:
        """Return tasks under torch's names: `1F3` for stage 1 and micro-batch 3, with `/` if it is stale; `1U`."""
        tasks = {name: column[rows].tolist() for name, column in self.views.tasks.items()}
        where = zip(tasks["stage"], tasks["kind"], tasks["micro_batch"], tasks["stale"], strict=True)
        names = [f"{j}{kind}{i if i >= 0 else ''}{'/' * stale}" for j, kind, i, stale in where]
        indices = (_present(tasks[name], UNSET) for name in ("micro_batch", "stage"))
        arguments = map(_TaskArguments, tasks["stale"], *indices, tasks["step"], tasks["version"])
        return self._slices(rows, names, map(SLICE_CATEGORIES.__getitem__, tasks["kind"]), arguments)

    def messages(self, slices: Ints) -> list[Any]:
        """Return messages under the names of their contents: `activation 1F3`, `all_reduce gradient of stage 2`."""
        rows = slices - len(self.views.kind)
        columns = {name: column[rows].tolist() for name, column in self.views.messages.items()}
        op, content = columns["op"], columns["content"]
        where = zip(op, content, columns["micro_batch"], columns["stage"], strict=True)
        names = [f"{'' if o == 'p2p' else f'{o} '}{c} {place(c, i, j)}" for o, c, i, j in where]
        indices = (_present(columns[name], UNSET) for name in ("micro_batch", "stage"))
        dst, src = self.dst[rows].tolist(), _present(columns["src"], None)
        others = (columns["step"], src, columns["size"], columns["rounds"])
        return self._slices(slices, names, content, map(_MessageArguments, op, content, *indices, dst, *others))

    def starts(self, slices: Ints) -> list[Any]:
        """Return one start for all arrows that come from a slice."""
        return self._arrow_ends("s", UNSET, slices, slices)

    def ends(self, arrows: Ints) -> list[Any]:
        """Return the end of each arrow, under the number of its start."""
        return self._arrow_ends("f", "e", self.source[arrows], self.target[arrows])

    def _slices(self, slices: Ints, names: Any, categories: Any, arguments: Any) -> list[Any]:
        return list(map(_Slice, *self._places(slices), self.duration[slices].tolist(), names, categories, arguments))

    def _arrow_ends(self, phase: str, binding: str | UnsetType, number: Ints, slices: Ints) -> list[Any]:
        fixed = repeat(phase), repeat(binding), number.tolist(), repeat("flow"), repeat("flow")
        return list(map(_ArrowEnd, *fixed, *self._places(slices)))

    def _places(self, slices: Ints) -> tuple[list[Any], ...]:
        """Return the process, thread and start of slices."""
        return self.process[slices].tolist(), self.thread[slices].tolist(), self.start[slices].tolist()


def _present(numbers: list[int], missing: Any) -> list[Any]:
    """Replace -1, which stands for a missing number."""
    return [missing if number < 0 else number for number in numbers]


def chrome(trace: Trace) -> Iterator[bytes]:
    """Return a trace as the content of a .json file, some events at a time."""
    return _encode_trace(_lay_out_tracks(Views(trace)))


def _encode_trace(tracks: _Tracks) -> Iterator[bytes]:
    yield _file_head(tracks)
    encoder = msgspec.json.Encoder()
    for events in chain(_counter_events(tracks.views), _slices_and_arrows(tracks)):
        # JSON escapes line breaks within texts, so that all that are left stand between events.
        yield b",\n"
        yield encoder.encode_lines(events)[:-1].replace(b"\n", b",\n")
    yield b"\n]}\n"


def _file_head(tracks: _Tracks) -> bytes:
    """Return the file's beginning, as Kineto writes it, with the names of processes and threads.

    One file has all devices: readers see it as the file of rank 0.
    """
    views = tracks.views
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "distributedInfo": {"backend": "cdpsim", "rank": 0, "world_size": views.devices},
        "otherData": {"title": plain_title(views.trace), "request": dict(views.trace.request)},
    }
    # Readers look for `"rank": 0` with its space. A page may quote all this, and a model may have any name.
    text = msgspec.json.format(msgspec.json.encode(head), indent=1).replace(b"</", rb"<\/").removesuffix(b"\n}")
    return text + b',\n "traceEvents": [\n' + b",\n".join(map(msgspec.json.encode, tracks.names))


def _name_events(what: str, rows: list[tuple[int, int, str]]) -> list[dict[str, Any]]:
    """Return the events that give processes or threads their names and their order."""
    return [
        {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_{name}", "args": {name: value}}
        for rank, (pid, tid, own) in enumerate(rows)
        for name, value in (("name", own), ("sort_index", rank))
    ]


def _microseconds(nanoseconds: Ints) -> np.ndarray:
    """Convert times to integers if all are multiples, else to floats, whose shortest text has the exact nanoseconds."""
    return nanoseconds / SLOT if (nanoseconds % SLOT).any() else nanoseconds // SLOT


def _counter_events(views: Views) -> Iterator[list[Any]]:
    """Return the changes of memory; of several of one device and category at one time, the last."""
    columns, unit = views.memory, "stage-activations" if views.in_slots else "bytes"
    time = nanoseconds(views, columns["time"])
    first = group_starts(columns["device"], views.category, time)
    rows = np.append(first[1:], len(time))[: len(time)] - 1  # the last ones; of no changes none
    moments = _microseconds(time[rows])
    for low in progress(range(0, len(rows), _EVENTS_AT_ONCE), "write"):
        part = slice(low, low + _EVENTS_AT_ONCE)
        names, devices, sizes = (columns[name][rows[part]].tolist() for name in ("category", "device", "size"))
        yield list(map(_Counter, names, devices, moments[part].tolist(), ({unit: size} for size in sizes)))


def _slices_and_arrows(tracks: _Tracks) -> Iterator[list[Any]]:
    """Return slices by their start, each followed by the ends of its arrows: viewers bind those to the slice before."""
    tasks, count = len(tracks.views.kind), len(tracks.order)
    rank = np.empty(count, dtype=np.int64)
    rank[tracks.order] = np.arange(count)
    begins = np.zeros(count, dtype=bool)
    begins[tracks.source] = True
    sources = np.flatnonzero(begins)
    kinds = (
        (tracks.tasks, np.arange(tasks)),
        (tracks.messages, np.arange(tasks, count)),
        (tracks.starts, sources),
        (tracks.ends, np.arange(len(tracks.target))),
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


def place(content: str, micro_batch: int, stage: int) -> str:
    """Name where a message's content is from: a task, or a stage or micro-batch, either of which may be -1, for none.

    >>> place("activation", 3, 1), place("gradient", -1, 2), place("gradient", 3, -1), place("gradient", -1, -1)
    ('1F3', 'of stage 2', 'of micro-batch 3', 'of all')
    """
    if content in _MAKERS and micro_batch >= 0 and stage >= 0:
        return f"{stage}{_MAKERS[content]}{micro_batch}"
    named = [f"{what} {k}" for what, k in (("stage", stage), ("micro-batch", micro_batch)) if k >= 0]
    return f"of {', '.join(named) or 'all'}"


def _lay_out_tracks(views: Views) -> _Tracks:
    """Lay out all tasks and messages of a trace."""
    start, end = nanoseconds(views, views.start), nanoseconds(views, views.end)
    links, receivers, link = views.tracks
    update = views.kind == Kind.U
    key = np.append(2 * views.tasks["device"].astype(np.int64) + update, 2 * views.devices + link)
    owner = np.append(np.where(update, -1, views.tasks["micro_batch"]), np.full(len(link), -1))
    until = np.maximum(end, start + 1)  # a slice without length is hidden by one that begins with it
    free = np.flatnonzero(update)  # but updates stand in one row where none takes time
    until[free] = until[free] if (end > start)[free].any() else end[free]
    lane = lanes(key, start, until, owner)
    rows = [(device, name) for device in range(views.devices) for name in ("tasks", "updates")]
    rows += [(views.devices, name) for name in links]
    counts = lane_counts(key, lane, len(rows))
    each = zip(rows, counts.tolist(), strict=True)
    threads = [(pid, name if many == 1 else f"{name} ({k + 1})") for (pid, name), many in each for k in range(many)]
    thread = (np.cumsum(counts) - counts)[key] + lane
    processes = [*(f"device {device}" for device in range(views.devices)), *["links"] * bool(links)]
    # The number of a thread is not that of a process, which would make it that process's main thread.
    names = _name_events("process", [(k, 0, name) for k, name in enumerate(processes)])
    names += _name_events("thread", [(pid, len(processes) + k, name) for k, (pid, name) in enumerate(threads)])
    source, target = _arrows(views, start)
    return _Tracks(
        views,
        names,
        dst=np.array(receivers, dtype=object)[link],
        process=np.minimum(key // 2, views.devices),
        thread=len(processes) + thread,
        start=_microseconds(np.concatenate([start, end]))[: len(start)],
        duration=_microseconds(end - start),
        order=_sort_slices(start, source, target),
        source=source,
        target=target,
    )


def nanoseconds(views: Views, times: Times) -> Ints:
    """Convert times to whole nanoseconds, a slot to a microsecond; runs of over 101 days have whole microseconds.

    Starts and ends are rounded each by itself, so that slices that touch still do, and none overlap.
    """
    latest = max(column.max(initial=0).item() for column in (views.end, views.memory["time"]))  # whose product fits
    length = latest * (SLOT if views.in_slots else 1e9)
    if length >= _LONGEST_RUN:
        raise RequestError("trace", "is longer than 146 years, which no nanoseconds hold; give fewer --steps")
    if views.in_slots:
        return times * np.int64(SLOT)
    if length >= _EXACT:
        return np.rint(times * 1e6).astype(np.int64) * 1000
    return np.rint(times * 1e9).astype(np.int64)


def _arrows(views: Views, start: Ints) -> tuple[Ints, Ints]:
    """Return the arrows from tasks to messages, from messages to tasks, and between the tasks of a micro-batch.

    Viewers draw every arrow from the slice that starts first. A sum may come after the backward whose gradient is added
    to it has begun, and parameters may be passed on before the task that they came for begins; there the arrow goes
    from message to message.
    """
    made, used = views.message_tasks
    count = len(views.kind)
    source = np.concatenate([made.task, used.message + count])
    target = np.concatenate([made.message + count, used.task])
    late = start[source] > start[target]
    if views.run is None:  # only a run has arrows
        return source, target
    edges, compute = views.run.program.edges, views.run.program.compute
    data = edges.kind == EdgeKind.DATA
    on_one_device = data & (edges.before < compute) & (edges.after < compute)
    between = data & (edges.before >= count) & (edges.after >= count)
    first, second = views.row[edges.before[between]], views.row[edges.after[between]]
    instead = np.isin(first, source[late]) | np.isin(second, target[late])
    sources = source[~late], first[instead], views.row[edges.before[on_one_device]]
    targets = target[~late], second[instead], views.row[edges.after[on_one_device]]
    return np.concatenate(sources), np.concatenate(targets)


def _sort_slices(start: Ints, source: Ints, target: Ints) -> Ints:
    """Return all slices by their start; where several start together, sources of arrows before their targets."""
    together = start[source] == start[target]
    rank = longest_paths(source[together], target[together], np.ones_like(start), np.zeros_like(start))[0]
    return sort_by(start, rank)

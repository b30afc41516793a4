"""A run as Chrome's JSON, which Perfetto, chrome://tracing and readers of PyTorch's profiles open.

Text is made in columns, many rows at once: a row of characters per event, numbers as wide as the largest one.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cdpsim.draw.scene import plain_title
from cdpsim.export.labels import Labels, message_labels, place, said, task_labels
from cdpsim.export.tracks import SLOT, Counters, Tracks, counters, in_order, tracks
from cdpsim.files.progress import progress
from cdpsim.numeric.columns import Ints
from cdpsim.trace import Trace

Text = NDArray[np.uint8]  # a row of characters for each event
_ROWS_AT_ONCE = 1 << 13


def chrome(trace: Trace) -> Iterator[bytes]:
    """Give a trace as the content of a .json file, some events at a time."""
    shown, held = tracks(trace), counters(trace)
    return _written(trace, shown, held)


def _written(trace: Trace, shown: Tracks, held: Counters) -> Iterator[bytes]:
    whole = not any((times % SLOT).any() for times in (shown.start, shown.end, held.time))
    yield _head(trace, shown)
    yield from _counters(trace, held, whole)
    yield from _slices(trace, shown, whole)
    yield b"\n]}\n"


def _head(trace: Trace, shown: Tracks) -> bytes:
    """What comes before the events, as Kineto writes it, and the names of processes and threads.

    One file has all devices, so it is rank 0's of as many ranks.
    """
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "distributedInfo": {"backend": "cdpsim", "rank": 0, "world_size": shown.devices},
        "otherData": {"title": plain_title(trace), "request": dict(trace.request)},
    }
    # Readers look for `"rank": 0` with its space. And a page may quote all this, whatever somebody called a model.
    text = msgspec.json.format(msgspec.json.encode(head), indent=1).replace(b"</", rb"<\/").removesuffix(b"\n}")
    names = map(msgspec.json.encode, [*_named("process", shown), *_named("thread", shown)])
    return text + b',\n "traceEvents": [\n' + b",\n".join(names)


def _named(what: str, shown: Tracks) -> Iterator[dict[str, object]]:
    """Events that give names and places to processes or threads."""
    rows = [(k, 0, name) for k, name in enumerate(shown.processes)]
    if what == "thread":
        rows = [(thread.process, _tid(shown, k), thread.name) for k, thread in enumerate(shown.threads)]
    for rank, (pid, tid, name) in enumerate(rows):
        where = {"ph": "M", "pid": pid, "tid": tid}
        yield where | {"name": f"{what}_name", "args": {"name": name}}
        yield where | {"name": f"{what}_sort_index", "args": {"sort_index": rank}}


def _tid(shown: Tracks, thread: int) -> int:
    """The number of a thread: no process has it, or it would be taken for that one's main thread."""
    return len(shown.processes) + thread


def _counters(trace: Trace, held: Counters, whole: bool) -> Iterator[bytes]:
    unit = "stages' worth" if trace.in_slots else "bytes"
    heads = _table(
        f',\n{{"ph":"C","name":"{category}","pid":{device},"ts":'
        for device, category in zip(held.device.tolist(), held.category, strict=True)
    )
    wide, wide_size = _digits(held.time, whole), _digits(held.size)
    for low in progress(range(0, len(held.time), _ROWS_AT_ONCE), "write"):
        rows = slice(low, low + _ROWS_AT_ONCE)
        time, size = _times(held.time[rows], wide, whole), _numbers(held.size[rows], wide_size)
        yield _rows(heads.take(held.curve[rows], axis=0), time, f',"args":{{"{unit}":'.encode(), size, b"}}").tobytes()


def _slices(trace: Trace, shown: Tracks, whole: bool) -> Iterator[bytes]:
    """Slices in time, each with the ends of arrows that are bound to it by standing behind it."""
    count = len(trace.tasks["start"])
    threads = _table(f'"pid":{thread.process},"tid":{_tid(shown, k)},"ts":' for k, thread in enumerate(shown.threads))
    to = _table(f',"dst":{_json(link.dst)}' for link in shown.links)
    task = _slice_text(shown, task_labels(trace), threads, whole)
    message = _slice_text(shown, message_labels(trace), threads, whole, (to, shown.link))
    flows = _flows(shown)
    flow = _flow_text(shown, flows, threads, whole)
    for low in progress(range(0, len(shown.order), _ROWS_AT_ONCE), "write"):
        rows = shown.order[low : low + _ROWS_AT_ONCE]
        first, last = np.searchsorted(flows.behind, [low, low + _ROWS_AT_ONCE]).tolist()
        behind = flows.behind[first:last] - low
        at, is_task = np.arange(len(rows)) + np.searchsorted(behind, np.arange(len(rows))), rows < count
        pieces = np.empty(len(rows) + len(behind), dtype=object)
        pieces[at[is_task]] = task(rows[is_task], rows[is_task])
        pieces[at[~is_task]] = message(rows[~is_task], rows[~is_task] - count)
        pieces[np.arange(len(behind)) + behind + 1] = flow(slice(first, last))
        yield b"".join(pieces.tolist())


class _Flows(NamedTuple):
    """Ends of arrows: first the slices that arrows come from, then the arrows by their numbers."""

    sources: Ints
    behind: Ints  # in which place the slice stands that comes before this end
    order: Ints


def _flows(shown: Tracks) -> _Flows:
    """Where arrows begin and end; both are bound to the slice that is there on their thread at their time."""
    rank = np.empty(len(shown.order), dtype=np.int64)
    rank[shown.order] = np.arange(len(rank))
    begins = np.zeros(len(rank), dtype=bool)
    begins[shown.source] = True
    sources = np.flatnonzero(begins)
    order, behind = in_order(np.concatenate([rank[sources], rank[shown.target]]))
    return _Flows(sources, behind, order)


def _slice_text(
    shown: Tracks, labels: Labels, threads: Text, whole: bool, *more: tuple[Text, Ints]
) -> Callable[[Ints, Ints], list[bytes]]:
    """What gives the text of slices, from their numbers and their rows among tasks or messages.

    Beside labels and their numbers they have `more` arguments: texts, and which one each row has.
    """
    texts = _table(_labelled(labels))
    wide, wide_duration = _digits(shown.end, whole), _digits(shown.end - shown.start, whole)
    widths = {name: _digits(column) for name, column in labels.numbers.items()}

    def text(slices: Ints, rows: Ints) -> list[bytes]:
        start, duration = shown.start[slices], shown.end[slices] - shown.start[slices]
        parts: list[bytes | Text] = [
            b',\n{"ph":"X",',
            threads.take(shown.thread[slices], axis=0),
            _times(start, wide, whole),
        ]
        parts += [b',"dur":', _times(duration, wide_duration, whole), texts.take(labels.which[rows], axis=0)]
        parts += [words.take(which[rows], axis=0) for words, which in more]
        for name, column in labels.numbers.items():
            parts += [f',"{name}":'.encode(), _numbers(column[rows], widths[name], b"null" if name == "src" else b"-1")]
        return _pieces(_rows(*parts, b"}}"))

    return text


def _flow_text(shown: Tracks, flows: _Flows, threads: Text, whole: bool) -> Callable[[slice], list[bytes]]:
    """What gives the text of ends of arrows."""
    heads = _table([',\n{"ph":"s","id":', ',\n{"ph":"f","bp":"e","id":'])
    wide, wide_id, count = _digits(shown.end, whole), len(str(len(shown.start))), len(flows.sources)

    def text(rows: slice) -> list[bytes]:
        order = flows.order[rows]
        ends = order >= count
        source, at = np.empty_like(order), np.empty_like(order)
        source[~ends] = at[~ends] = flows.sources[order[~ends]]
        source[ends], at[ends] = shown.source[order[ends] - count], shown.target[order[ends] - count]
        time = _times(shown.start[at], wide, whole)
        parts = (heads.take(ends, axis=0), _numbers(source, wide_id), b',"cat":"flow","name":"flow",')
        return _pieces(_rows(*parts, threads.take(shown.thread[at], axis=0), time, b"}"))

    return text


def _labelled(labels: Labels) -> Iterator[str]:
    """The name, the category and the first arguments of slices, without an end."""
    ends = []
    for sort in labels.sorts:
        arguments = ",".join(f'"{name}":{_json(value)}' for name, value in sort.arguments.items())
        ends.append((f',"name":"{sort.before}', f'{sort.after}","cat":"{sort.category}","args":{{{arguments}'))
    for sort_number, i, j in labels.different:
        before, after = ends[sort_number]
        if i >= 0 and j >= 0:  # there may be as many as tasks
            yield f'{before}{i}.{j}{after},"micro_batch":{i},"stage":{j}'
        else:
            numbers = "".join(f',"{name}":{number}' for name, number in said(i, j))
            yield f"{before}{place(i, j)}{after}{numbers}"


def _json(value: int | str) -> str:
    """A number, or a word of our own, without anything that must be escaped."""
    return f'"{value}"' if isinstance(value, str) else str(value)


def _table(texts: Iterable[str]) -> Text:
    """Texts as rows of one width."""
    encoded = [text.encode() for text in texts]
    width = max(map(len, encoded), default=0)
    return np.frombuffer(b"".join(text.ljust(width) for text in encoded), dtype=np.uint8).reshape(len(encoded), width)


def _rows(*parts: bytes | Text) -> Text:
    """Put parts side by side; bytes are the same in every row."""
    columns = [np.frombuffer(part, dtype=np.uint8) if isinstance(part, bytes) else part for part in parts]
    count = next(len(column) for column in columns if column.ndim > 1)
    edges = np.cumsum([0, *(column.shape[-1] for column in columns)]).tolist()
    text = np.empty((count, edges[-1]), dtype=np.uint8)
    for low, high, column in zip(edges, edges[1:], columns, strict=False):
        text[:, low:high] = column
    return text


def _pieces(text: Text) -> list[bytes]:
    """Rows of characters, each by itself."""
    rows: list[bytes] = text.view(f"S{text.shape[1]}")[:, 0].tolist()
    return rows


def _digits(numbers: Ints, whole: bool = False) -> int:
    """How wide the largest number is; of times in nanoseconds, if all are whole microseconds."""
    most = int(numbers.max(initial=0)) // (SLOT if whole else 1)
    return max(len(str(most)), 4 if (numbers < 0).any() else 1)


def _numbers(numbers: Ints, width: int, below: bytes = b"") -> Text:
    """Whole numbers, with spaces before them; `below` stands for those below zero."""
    text = np.empty((width, len(numbers)), dtype=np.uint8)
    rest: NDArray[Any] = np.maximum(numbers, 0).astype(np.uint32 if width < 10 else np.uint64)
    for column in reversed(range(width)):
        shorter = rest // 10
        text[column] = rest - shorter * 10 + ord("0")
        if column < width - 1:
            text[column][rest == 0] = ord(" ")
        rest = shorter
    if below and (numbers < 0).any():
        text[:, numbers < 0] = np.frombuffer(below.rjust(width), dtype=np.uint8)[:, None]
    return text.T


def _times(times: Ints, width: int, whole: bool) -> Text:
    """Nanoseconds as microseconds."""
    if whole:
        return _numbers(times // SLOT, width)
    before, after = np.divmod(times, SLOT)
    return _rows(_numbers(before, max(width - 3, 1)), b".", _numbers(after + SLOT, 4)[:, 1:])

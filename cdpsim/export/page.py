"""One HTML file in which a run can be explored: opens from disk, asks nobody for anything.

The columns of a trace become small integers (times and sizes are numbers in tables of those that occur; a bar's start is
told from the end of the one before it), squeezed into one inert element. `page.js` draws them.
"""

import hashlib
import re
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cdpsim.columns import Ints, heads, sort_by
from cdpsim.draw import palette, scene
from cdpsim.draw.canvas import line
from cdpsim.errors import RequestError
from cdpsim.program import Category, Content, Kind, Op
from cdpsim.trace import Columns, Trace

MOST_BARS = 4_000_000
KINDS = (Kind.F, Kind.B, Kind.W, Kind.U)
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_SQUEEZE = 6
SCRIPTS = ("page_run.js", "page_tracks.js", "page_draw.js", "page.js")


class _Rows(NamedTuple):
    """What stands in one row of the page, row after row and sorted by start in each: rows of a table of the trace."""

    order: Ints
    first: Ints  # where each row begins, and where the last one ends
    owner: Ints  # of each row: a device, or a link
    lane: Ints  # of each row; of a device, 0 is for what takes no time


def page(trace: Trace) -> Iterator[bytes]:
    """Give an HTML file that shows a run, some bytes at a time."""
    scene.refuse_empty(trace)
    bars = trace.run.program.nodes if trace.run else len(trace.tasks["start"]) + len(trace.messages["start"])
    if bars > MOST_BARS:
        raise RequestError(
            "page", f"{bars:,} tasks and messages are more than the {MOST_BARS:,} that a browser can hold; take fewer steps"
        )
    return _written(trace)


def _written(trace: Trace) -> Iterator[bytes]:
    columns, facts = _columns(trace)
    script, style = "\n".join(map(_text, SCRIPTS)), _text("page.css")
    title = ", ".join(map(line, scene.names(trace)))
    facts |= {"title": title, "columns": [[name, c.dtype.name, len(c)] for name, c in columns.items()]}
    parts = {
        "policy": f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'",
        "title": title.replace("&", "&amp;").replace("<", "&lt;"),
        "style": style,
        "script": script,
        # In JSON a < stands only within strings: escaped, nothing can end the element or begin a comment.
        "facts": msgspec.json.encode(facts).decode().replace("<", "\\u003c"),
    }
    for k, part in enumerate(_PLACE.split(_text("page.html"))):
        if k % 2 and part == "columns":
            yield from _squeezed(columns)
        else:
            yield (parts[part] if k % 2 else part).encode()


def _text(name: str) -> str:
    return files("cdpsim.export").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _squeezed(columns: Columns) -> Iterator[bytes]:
    """All columns as one zlib stream in base64; each begins at a multiple of eight bytes."""
    squeeze, waiting = zlib.compressobj(_SQUEEZE), b""
    for column in columns.values():
        waiting += squeeze.compress(column.tobytes() + bytes(-column.nbytes % 8))
        whole = len(waiting) // 3 * 3
        yield b64encode(waiting[:whole])
        waiting = waiting[whole:]
    yield b64encode(waiting + squeeze.flush())


def _columns(trace: Trace) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The columns that the page reads, in the smallest types that hold them, and what else it is told."""
    tasks, messages = trace.tasks, trace.messages
    devices = 1 + max(int(table["device"].max(initial=0)) for table in (tasks, trace.memory))
    links, link_columns, groups = _links(messages)
    of_tasks = _device_rows(tasks, devices)
    of_messages = _rows(links, scene.lanes(links, messages["start"], messages["end"]), messages, np.unique(links))
    times = np.unique(np.concatenate([tasks["start"], tasks["end"], messages["start"], messages["end"]]))
    held, held_times = _held(trace.memory, devices)
    times = np.union1d(times, held_times)
    size_table, size = np.unique(messages["size"], return_inverse=True)
    columns = _bars(of_tasks, of_messages, tasks, messages, times)
    columns |= {"times": times, "sizes": size_table, "size": size[of_messages.order]}
    columns |= {"rounds": messages["rounds"][of_messages.order], **link_columns, **held}
    columns["held_time"] = _differences(np.searchsorted(times, held_times), held["held_first"])
    columns["waits"] = _waits(trace, of_tasks.order, of_messages.order)
    columns |= {
        "row_first": np.concatenate([of_tasks.first, len(of_tasks.order) + of_messages.first[1:]]),
        "row_owner": np.concatenate([of_tasks.owner, of_messages.owner]),
        "row_lane": np.concatenate([of_tasks.lane, of_messages.lane]),
    }
    facts = {"slots": trace.in_slots, "devices": devices, "deviceRows": len(of_tasks.owner), "groups": groups}
    return {name: _narrow(column) for name, column in columns.items()}, facts | _summed(trace) | _drawn()


def _narrow(column: np.ndarray) -> np.ndarray:
    """The same numbers in the smallest type that the page can read, least significant byte first."""
    if column.dtype.kind in "iub":
        low, high = int(column.min(initial=0)), int(column.max(initial=0))
        for size in (1, 2, 4):
            most = 2 ** (8 * size - (low < 0))
            if -most <= low and high < most:
                return column.astype(f"<{'i' if low < 0 else 'u'}{size}")
    return column.astype("<f8")


def _rows(owner: Ints, lane: Ints, table: Columns, owners: Ints, least: int = 0) -> _Rows:
    """Sort a table into rows, one for each owner and lane; every owner has its lane `least`, be it empty."""
    lanes = int(lane.max(initial=least)) + 1
    row = owner * np.int64(lanes) + lane
    order = np.lexsort((table["end"], table["start"], row))
    keys = np.union1d(row, owners * np.int64(lanes) + least)
    first = np.append(np.searchsorted(row[order], keys), len(row))
    return _Rows(order, first, keys // lanes, keys % lanes)


def _device_rows(tasks: Columns, devices: int) -> _Rows:
    """What takes no time, such as an update, has the first lane of its device; the others are for the rest."""
    device, start, end = tasks["device"], tasks["start"], tasks["end"]
    lane = np.zeros(len(device), dtype=np.int64)
    lasts = np.flatnonzero(end > start)
    lane[lasts] = 1 + scene.lanes(device[lasts], start[lasts], end[lasts], tasks["micro_batch"][lasts])
    return _rows(device, lane, tasks, np.arange(devices), least=1)


def _links(messages: Columns) -> tuple[Ints, dict[str, np.ndarray], list[list[int]]]:
    """The link of each message, what the links are, and the members of groups: pairs first, then op by op."""
    op = np.array([Op[word.upper()] for word in np.unique(messages["op"]).tolist()], dtype=np.int64)
    op = op[np.unique(messages["op"], return_inverse=True)[1]] if len(op) else op
    op = np.where(op == Op.P2P, 0, op + 1)
    texts = messages["dst"].tolist()
    groups = dict.fromkeys(text for text, together in zip(texts, (op > 0).tolist(), strict=True) if together)
    place = {text: k for k, text in enumerate(groups)}
    dst = np.array([place[t] if o else int(t) for t, o in zip(texts, op.tolist(), strict=True)], dtype=np.int64)
    src = messages["src"].astype(np.int64) + 1
    order = sort_by(op, src, dst)
    first = heads(op[order], src[order], dst[order])
    link = np.empty(len(op), dtype=np.int64)
    link[order] = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(op))))
    chosen = order[first]
    columns = {"link_op": op[chosen], "link_src": src[chosen] - 1, "link_dst": dst[chosen]}
    return link, columns, [[int(member) for member in str(text).split("|")] for text in groups]


def _bars(of_tasks: _Rows, of_messages: _Rows, tasks: Columns, messages: Columns, times: Any) -> dict[str, np.ndarray]:
    """What tasks and messages have in common, tasks first; and what only tasks have."""
    both = {name: _both(of_tasks, of_messages, tasks[name], messages[name]) for name in ("start", "end")}
    start, end = (np.searchsorted(times, both[name]) for name in ("start", "end"))
    before = np.concatenate([[0], end[:-1]])
    first = np.concatenate([of_tasks.first[:-1], len(of_tasks.order) + of_messages.first[:-1]])
    before[first[first < len(before)]] = 0
    kind = _numbers(tasks["kind"], [kind.name for kind in KINDS])
    content = _numbers(messages["content"], [content.name.lower() for content in Content])
    columns = {"gap": start - before, "length": end - start}
    columns["kind"] = _both(of_tasks, of_messages, kind, content + len(KINDS))
    for name in ("stage", "micro_batch", "step"):
        columns[name] = _both(of_tasks, of_messages, tasks[name], messages[name])
    order = of_tasks.order
    return columns | {"version": tasks["version"][order], "stale": tasks["stale"][order].astype(np.uint8)}


def _both(of_tasks: _Rows, of_messages: _Rows, task: np.ndarray, message: np.ndarray) -> np.ndarray:
    return np.concatenate([task[of_tasks.order], message[of_messages.order]])


def _numbers(words: np.ndarray, known: list[str]) -> Ints:
    """The place of each word among the known ones."""
    number = np.zeros(len(words), dtype=np.int64)
    for k, word in enumerate(known):
        number[words == word] = k
    return number


def _differences(values: Ints, first: Ints) -> Ints:
    """Each value less the one before it; the first of each run as it is."""
    change = np.diff(values, prepend=0)
    inside = first[first < len(values)]
    change[inside] = values[inside]
    return change


def _held(memory: Columns, devices: int) -> tuple[dict[str, np.ndarray], Any]:
    """What each device holds of each category, then all devices together: sizes, their table, where each begins."""
    kinds = len(Category)
    category = _numbers(memory["category"], [category.name.lower() for category in Category])
    curve = memory["device"].astype(np.int64) * kinds + category
    order = np.lexsort((memory["time"], curve))
    curve, category, time, size = curve[order], category[order], memory["time"][order], memory["size"][order]
    change = _differences(size, heads(curve))
    by_time = np.lexsort((time, category))
    first = heads(category[by_time], time[by_time]) if len(time) else np.zeros(0, dtype=np.int64)
    moment = by_time[first]
    sums = np.add.reduceat(change[by_time], first) if len(first) else change
    total = np.cumsum(sums)  # a category ends at nothing, or nearly: what it keeps is taken from the next
    total -= _runs_before(total, category[moment])
    curves = np.concatenate([curve, devices * kinds + category[moment]])
    sizes, place = np.unique(np.concatenate([size, total]), return_inverse=True)
    begins = np.searchsorted(curves, np.arange((devices + 1) * kinds + 1))
    times = np.concatenate([time, time[moment]])
    return {"held_first": begins, "held_size": place, "held_sizes": sizes}, times


def _runs_before(total: np.ndarray, run: Ints) -> np.ndarray:
    """The running total at the end of the run before each row's own."""
    first = heads(run) if len(run) else np.zeros(0, dtype=np.int64)
    ends = np.concatenate([[0], total])[first].astype(total.dtype)
    return np.repeat(ends, np.diff(np.append(first, len(run))))


def _waits(trace: Trace, tasks: Ints, messages: Ints) -> np.ndarray:
    """For each bar, the one that it waited for last, as so many bars away; 0 where nothing ended as it began."""
    if trace.run is None:
        return np.zeros(0, dtype=np.int64)
    program, start, end = trace.run.program, trace.run.start, trace.run.end
    nodes = np.concatenate([trace.task_nodes[tasks], trace.message_nodes[messages]])
    bar = np.empty(len(nodes), dtype=np.int64)
    bar[nodes] = np.arange(len(nodes))
    away = np.zeros(len(nodes), dtype=np.int64)
    before, after = program.waits()
    last = np.flatnonzero(end[before] == start[after])[::-1]  # dependencies come first, and so have the last word
    away[bar[after[last]]] = bar[before[last]] - bar[after[last]]
    return away


def _summed(trace: Trace) -> dict[str, Any]:
    """A line of figures, as far as the summary has them."""
    summary: Mapping[str, Any] = trace.summary()
    kept = {name: summary.get(name) for name in ("makespan", "period", "bubble", "mean_staleness")}
    return {"summary": {name: value for name, value in kept.items() if isinstance(value, int | float)}}


def _drawn() -> dict[str, Any]:
    """Words and colours, so that the script has none of its own."""
    place = palette.COLOURS.index
    contents, categories = list(Content), list(Category)
    return {
        "kinds": [kind.name for kind in KINDS] + [content.name.lower().replace("_", " ") for content in contents],
        "ops": ["p2p", *(op.name.lower() for op in Op)],
        "categories": [category.name.lower() for category in categories],
        "colours": palette.COLOURS,
        "inks": [palette.ink_on(colour) for colour in palette.COLOURS],
        "kindColours": [place(palette.KINDS[k]) for k in KINDS] + [place(palette.CONTENTS[c]) for c in contents],
        "categoryColours": [place(palette.CATEGORIES[c]) for c in categories],
    }

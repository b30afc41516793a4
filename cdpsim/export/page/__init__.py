"""One HTML file in which a run can be explored: opens from disk, asks nobody for anything.

The columns of a trace become small integers (times and sizes are numbers in tables of those that occur; where a bar
starts is told from the end of the one before it), squeezed into one inert element. The scripts draw them.
"""

import hashlib
import re
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from fractions import Fraction
from importlib.resources import files
from math import isfinite, nan
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cdpsim.draw import palette, scene
from cdpsim.errors import RequestError
from cdpsim.files.progress import ticker
from cdpsim.numeric.columns import Columns, Ints, group_starts, sort_by
from cdpsim.program import Category, Content, Kind, Op
from cdpsim.runs import Run
from cdpsim.trace import Trace

MOST = 4_000_000  # a browser needs about 50 bytes for each
KINDS = (Kind.F, Kind.B, Kind.W, Kind.U)
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_SQUEEZE = 4  # of 9: beyond, it takes three times as long for a tenth less
SCRIPTS = ("run.js", "tracks.js", "draw.js", "find.js", "controls.js")


class _Rows(NamedTuple):
    """What stands in one row of the page, row after row and sorted by start in each: rows of a table of the trace."""

    order: Ints
    first: Ints  # where each row begins, and where the last one ends
    owner: Ints  # of each row: a device, or a link
    lane: Ints  # of each row; of a device, 0 is for what takes no time


def page(trace: Trace) -> Iterator[bytes]:
    """Give an HTML file that shows a run, some bytes at a time."""
    scene.refuse_empty(trace)
    bars = trace.program.nodes if isinstance(trace, Run) else len(trace.tasks["start"]) + len(trace.messages["start"])
    for many, what in ((bars, "tasks and messages"), (_devices(trace), "devices")):
        if many > MOST:
            raise RequestError("page", f"{many:,} {what} are more than the {MOST:,} that it can hold; take fewer steps")
    return _written(trace)


def _devices(trace: Trace) -> int:
    return 1 + max(int(table["device"].max(initial=0)) for table in (trace.tasks, trace.memory))


def _written(trace: Trace) -> Iterator[bytes]:
    done = ticker(2, "write")
    columns, facts = _columns(trace)
    done(1)
    script, style = "\n".join(map(_text, SCRIPTS)), _text("page.css")
    title = scene.plain_title(trace)
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
    done(0)


def _text(name: str) -> str:
    return files("cdpsim.export.page").joinpath(name).read_text("utf-8")


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
    tasks, messages, memory = trace.tasks, trace.messages, trace.memory
    devices = _devices(trace)
    links, link_columns, groups = _links(messages)
    upper = _device_rows(tasks, devices)
    lower = _rows(links, scene.lanes(links, messages["start"], messages["end"]), messages, np.unique(links))
    start, end = (_joined(upper, lower, tasks[name], messages[name]) for name in ("start", "end"))
    times, (start, end, moment) = _table(start, end, memory["time"])
    sizes, size = np.unique(messages["size"], return_inverse=True)
    columns = _bars(upper, lower, tasks, messages) | _spans(start, end, upper, lower)
    columns |= {"times": times, "sizes": sizes, "size": size[lower.order], "rounds": messages["rounds"][lower.order]}
    columns |= link_columns | _held(memory, moment, devices)
    columns |= {
        "waits": _waits(trace, upper.order, lower.order),
        "row_first": np.concatenate([upper.first, len(upper.order) + lower.first[1:]]),
        "row_owner": np.concatenate([upper.owner, lower.owner]),
        "row_lane": np.concatenate([upper.lane, lower.lane]),
    }
    facts = {"slots": trace.in_slots, "devices": devices, "deviceRows": len(upper.owner), "groups": groups}
    return {name: _narrow(column) for name, column in columns.items()}, facts | _summed(trace) | _drawn()


def _table(*columns: np.ndarray) -> tuple[np.ndarray, list[Ints]]:
    """All times that occur, in order, and each column as places among them.

    Seconds that differ by less than 1e-12 of the run, as roundings do, are one time.
    """
    every = np.unique(np.concatenate(columns))
    apart = np.diff(every, prepend=-1) > (every[-1] * 1e-12 if every.dtype.kind == "f" else 0)
    place = np.cumsum(apart) - 1
    return every[apart], [place[np.searchsorted(every, column)] for column in columns]


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
    first = group_starts(op[order], src[order], dst[order])
    link = np.empty(len(op), dtype=np.int64)
    link[order] = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(op))))
    chosen = order[first]
    columns = {"link_op": op[chosen], "link_src": src[chosen] - 1, "link_dst": dst[chosen]}
    return link, columns, [[int(member) for member in str(text).split("|")] for text in groups]


def _bars(upper: _Rows, lower: _Rows, tasks: Columns, messages: Columns) -> dict[str, np.ndarray]:
    """What tasks and messages have in common, tasks first; and what only tasks have."""
    kind = _numbers(tasks["kind"], [kind.name for kind in KINDS])
    content = _numbers(messages["content"], [content.name.lower() for content in Content])
    columns = {"kind": _joined(upper, lower, kind, content + len(KINDS))}
    for name in ("stage", "micro_batch", "step"):
        columns[name] = _joined(upper, lower, tasks[name], messages[name])
    order = upper.order
    return columns | {"version": tasks["version"][order], "stale": tasks["stale"][order].astype(np.uint8)}


def _joined(upper: _Rows, lower: _Rows, task: np.ndarray, message: np.ndarray) -> np.ndarray:
    """Columns of both tables as the rows of the page have them."""
    return np.concatenate([task[upper.order], message[lower.order]])


def _spans(start: Ints, end: Ints, upper: _Rows, lower: _Rows) -> dict[str, Ints]:
    """How long each bar comes after the one before it in its row, and how long it is: mostly the same few numbers."""
    before = np.concatenate([[0], end[:-1]])
    first = np.concatenate([upper.first, len(upper.order) + lower.first])
    before[first[first < len(before)]] = 0
    return {"gap": start - before, "length": end - start}


def _numbers(words: np.ndarray, known: list[str]) -> Ints:
    """The place of each word among the known ones."""
    number = np.zeros(len(words), dtype=np.int64)
    for k, word in enumerate(known):
        number[words == word] = k
    return number


def _held(memory: Columns, moment: Ints, devices: int) -> dict[str, np.ndarray]:
    """What each device holds of each category, then all devices together; curve after curve, where each begins."""
    kinds, spread = len(Category), int(moment.max(initial=0)) + 1
    category = _numbers(memory["category"], [category.name.lower() for category in Category])
    curve = memory["device"].astype(np.int64) * kinds + category
    order = np.argsort(curve * spread + moment, kind="stable")
    curve, category, moment, size = curve[order], category[order], moment[order], memory["size"][order]
    change = _differences(size, group_starts(curve))
    by_time = np.argsort(category * spread + moment, kind="stable")
    first = group_starts(category[by_time], moment[by_time])
    total = np.cumsum(np.add.reduceat(change[by_time], first) if len(first) else change)
    together = by_time[first]
    total -= _runs_before(total, category[together])
    curve = np.concatenate([curve, devices * kinds + category[together]])
    moment = np.concatenate([moment, moment[together]])
    sizes, place = np.unique(np.concatenate([size, total]), return_inverse=True)
    begins = np.searchsorted(curve, np.arange((devices + 1) * kinds + 1))
    times = _differences(moment, begins)
    return {"held_first": begins, "held_time": times, "held_size": place, "held_sizes": sizes}


def _differences(values: np.ndarray, first: Ints) -> np.ndarray:
    """Each value less the one before it; the first of each run as it is."""
    change = np.diff(values, prepend=0)
    inside = first[first < len(values)]
    change[inside] = values[inside]
    return change


def _runs_before(total: np.ndarray, run: Ints) -> np.ndarray:
    """The running total at the end of the run before each row's own."""
    first = group_starts(run)
    ends = np.concatenate([[0], total])[first].astype(total.dtype)
    return np.repeat(ends, np.diff(np.append(first, len(run))))


def _waits(trace: Trace, tasks: Ints, messages: Ints) -> np.ndarray:
    """For each bar, the one that it waited for last, as so many bars away; 0 where nothing ended as it began."""
    if not isinstance(trace, Run):
        return np.zeros(0, dtype=np.int64)
    program, start, end = trace.program, trace.start, trace.end
    nodes = np.concatenate([trace.task_nodes[tasks], trace.message_nodes[messages]])
    bar = np.empty(program.nodes, dtype=np.int64)
    bar[nodes] = np.arange(len(nodes))
    bar[len(nodes) :] = bar[program.first_messages]  # a device's part in a message has none of its own
    away = np.zeros(len(nodes), dtype=np.int64)
    before, after = program.waits()
    last = np.flatnonzero((end[before] == start[after]) & (after < len(nodes)))[
        ::-1
    ]  # dependencies come first, and so have the last word
    away[bar[after[last]]] = bar[before[last]] - bar[after[last]]
    return away


def _summed(trace: Trace) -> dict[str, Any]:
    """A line of figures, as far as the summary has them."""
    summary: Mapping[str, Any] = trace.summary()
    kept = {name: _number(summary.get(name)) for name in ("makespan", "period", "bubble", "mean_staleness")}
    return {"summary": {name: value for name, value in kept.items() if isfinite(value)}}


def _number(said: object) -> float:
    """What a summary says as a number or a fraction; no number of anything else."""
    try:
        return float(Fraction(said)) if isinstance(said, int | float | str) else nan
    except (ValueError, ZeroDivisionError, OverflowError):
        return nan


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

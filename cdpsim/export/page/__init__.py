"""One HTML file in which a run can be explored: it opens from disk and needs no network.

The columns of a trace become small integers (times and sizes are numbers in tables of those that occur; the start of a
bar is given by its distance from the end of the one before it), squeezed into one inert element. The scripts draw them.
"""

import hashlib
import re
import zlib
from base64 import b64encode
from collections.abc import Iterator
from fractions import Fraction
from importlib.resources import files
from math import isfinite, nan
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cdpsim.draw import palette
from cdpsim.draw.views import KIND_WORDS, Channel, Views, lanes, plain_title, previous_in_run, word_of
from cdpsim.errors import RequestError
from cdpsim.files.progress import ticker
from cdpsim.numeric.columns import Columns, Ints, group_numbers, group_starts
from cdpsim.program import Category, Content, Kind, Op
from cdpsim.trace import Trace

MOST_PAGE_BARS = 4_000_000  # a browser needs about 50 bytes for each
_HOLE = re.compile(r"\{\{(\w+)\}\}")
_COMPRESSION = 4  # of 9: beyond, it takes three times as long for a tenth less
SCRIPTS = ("run.js", "tracks.js", "draw.js", "find.js", "controls.js")


class PageRows(NamedTuple):
    """The rows of the page: the rows of a table of the trace, page row after page row, sorted by start in each."""

    order: Ints
    first: Ints  # where each page row begins, and where the last one ends
    owner: Ints  # of each page row: a device, or a link
    lane: Ints  # of each page row; of a device, 0 is for tasks that take no time


def page(trace: Trace) -> Iterator[bytes]:
    """Return an HTML file that shows a run, some bytes at a time."""
    views = Views(trace)
    bars = views.run.program.nodes if views.run else len(views.start)
    for many, what in ((bars, "tasks and messages"), (views.devices, "devices")):
        if many > MOST_PAGE_BARS:
            problem = f"{many:,} {what} are more than the {MOST_PAGE_BARS:,} that it can hold; take fewer steps"
            raise RequestError("page", problem)
    return _page_parts(views)


def _page_parts(views: Views) -> Iterator[bytes]:
    done = ticker(2, "write")
    columns, facts = _page_columns(views)
    done(1)
    script, style, title = "\n".join(map(_read_part, SCRIPTS)), _read_part("page.css"), plain_title(views.trace)
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
    for k, part in enumerate(_HOLE.split(_read_part("page.html"))):
        if k % 2 and part == "columns":
            yield from _squeezed(columns)
        else:
            yield (parts[part] if k % 2 else part).encode()
    done(0)


def _read_part(name: str) -> str:
    return files("cdpsim.export.page").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _squeezed(columns: Columns) -> Iterator[bytes]:
    """Return all columns as one zlib stream in base64; each begins at a multiple of eight bytes."""
    squeeze, waiting = zlib.compressobj(_COMPRESSION), b""
    for column in columns.values():
        waiting += squeeze.compress(column.tobytes() + bytes(-column.nbytes % 8))
        complete = len(waiting) // 3 * 3  # bytes that base64 needs no padding for
        yield b64encode(waiting[:complete])
        waiting = waiting[complete:]
    yield b64encode(waiting + squeeze.flush())


def _page_columns(views: Views) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the columns that the page reads, in the smallest types that hold them, and its other facts."""
    tasks, messages = views.tasks, views.messages
    links, link, groups = _links(views)
    upper = _device_rows(views)
    lower = _sort_rows(link, lanes(link, messages["start"], messages["end"]), messages, np.arange(len(links)))
    count = len(views.kind)
    order = np.concatenate([upper.order, count + lower.order])  # of all bars, among tasks and then messages
    times, (start, end, moment) = _time_table(views.start, views.end, views.memory["time"])
    sizes, size = np.unique(messages["size"], return_inverse=True)
    kind = np.concatenate([_kind_numbers()[views.kind], views.content + len(KIND_WORDS)])
    columns = {"kind": kind[order]}
    for name in ("stage", "micro_batch", "step"):
        columns[name] = np.concatenate([tasks[name], messages[name]])[order]
    columns |= {"version": tasks["version"][upper.order], "stale": tasks["stale"][upper.order].astype(np.uint8)}
    row_first = np.concatenate([upper.first, count + lower.first[1:]])
    start, end = start[order], end[order]
    columns |= {"gap": start - previous_in_run(end, row_first), "length": end - start}  # mostly the same few numbers
    columns |= {"times": times, "sizes": sizes, "size": size[lower.order], "rounds": messages["rounds"][lower.order]}
    columns |= dict(zip(("link_op", "link_src", "link_dst"), links.T, strict=True))
    columns |= _memory_columns(views, moment)
    columns |= {
        "waits": _waits_of_bars(views, order),
        "row_first": row_first,
        "row_owner": np.concatenate([upper.owner, lower.owner]),
        "row_lane": np.concatenate([upper.lane, lower.lane]),
    }
    facts = {"slots": views.in_slots, "devices": views.devices, "deviceRows": len(upper.owner)}
    facts |= {"groups": groups} | _summary_facts(views.trace) | _words_and_colours()
    return {name: _narrow(column) for name, column in columns.items()}, facts


def _links(views: Views) -> tuple[Ints, Ints, list[list[int]]]:
    """Return a row for each link (operation, source, destination or group), each message's link, and all groups.

    Pairs of devices come first, under operation 0, then groups, operation by operation.
    """
    groups = list(dict.fromkeys(channel.members for channel in views.channels if not channel.is_pair))
    number = {members: k for k, members in enumerate(groups)}

    def key(channel: Channel) -> tuple[int, int, int]:
        op, dst = (0, channel.members[0]) if channel.is_pair else (channel.op + 1, number[channel.members])
        return op, channel.src, dst

    links, link = views.links(key)
    return np.array(links, dtype=np.int64).reshape(-1, 3), link, list(map(list, groups))


def _time_table(*columns: np.ndarray) -> tuple[np.ndarray, list[Ints]]:
    """Return all times that occur, in order, and each column as places among them.

    Seconds that differ by less than 1e-12 of the run, as roundings do, are one time.
    """
    every = np.unique(np.concatenate(columns))
    apart = np.diff(every, prepend=-1) > (every[-1] * 1e-12 if every.dtype.kind == "f" else 0)
    place = np.cumsum(apart) - 1
    return every[apart], [place[np.searchsorted(every, column)] for column in columns]


def _narrow(column: np.ndarray) -> np.ndarray:
    """Return the same numbers in the smallest type that the page can read, least significant byte first."""
    if column.dtype.kind in "iub":
        low, high = int(column.min(initial=0)), int(column.max(initial=0))
        for size in (1, 2, 4):
            most = 2 ** (8 * size - (low < 0))
            if -most <= low and high < most:
                return column.astype(f"<{'i' if low < 0 else 'u'}{size}")
    return column.astype("<f8")


def _sort_rows(owner: Ints, lane: Ints, table: Columns, owners: Ints, least: int = 0) -> PageRows:
    """Sort a table into rows, one for each owner and lane; every owner has its lane `least`, be it empty."""
    many = int(lane.max(initial=least)) + 1
    row = owner * np.int64(many) + lane
    order = np.lexsort((table["end"], table["start"], row))
    keys = np.union1d(row, owners * np.int64(many) + least)
    first = np.append(np.searchsorted(row[order], keys), len(row))
    return PageRows(order, first, keys // many, keys % many)


def _device_rows(views: Views) -> PageRows:
    """Return the rows of devices: the first lane is for tasks that take no time, such as updates."""
    names = ("device", "start", "end", "micro_batch")
    device, start, end, micro_batch = (views.tasks[name] for name in names)
    lane = np.zeros(len(device), dtype=np.int64)
    lasts = np.flatnonzero(end > start)
    lane[lasts] = 1 + lanes(device[lasts], start[lasts], end[lasts], micro_batch[lasts])
    return _sort_rows(device, lane, views.tasks, np.arange(views.devices), least=1)


def _kind_numbers() -> Ints:
    """Return the page's number of each `Kind`."""
    return np.array([list(KIND_WORDS).index(kind.name) for kind in Kind])


def _memory_columns(views: Views, moment: Ints) -> dict[str, np.ndarray]:
    """Return what each device holds of each category, then all devices together, curve after curve."""
    kinds, spread = len(Category), int(moment.max(initial=0)) + 1
    category, size, change = views.category, views.memory["size"], views.memory_change
    curve = views.memory["device"].astype(np.int64) * kinds + category
    by_time = np.argsort(category * spread + moment, kind="stable")
    first = group_starts(category[by_time], moment[by_time])
    total = np.cumsum(np.add.reduceat(change[by_time], first) if len(first) else change)
    together = by_time[first]
    starts = group_starts(category[together])
    before = np.append(0, total)[starts].astype(total.dtype)  # the sum of the categories before
    total -= before[group_numbers(starts, len(together))]
    curve = np.concatenate([curve, views.devices * kinds + category[together]])
    moment = np.concatenate([moment, moment[together]])
    sizes, place = np.unique(np.concatenate([size, total]), return_inverse=True)
    begins = np.searchsorted(curve, np.arange((views.devices + 1) * kinds + 1))
    return {
        "held_first": begins,
        "held_time": moment - previous_in_run(moment, begins),
        "held_size": place,
        "held_sizes": sizes,
    }


def _waits_of_bars(views: Views, order: Ints) -> np.ndarray:
    """Return the distance, in bars, from each bar to the one whose end it waited for; 0 where no bar ended then."""
    if views.run is None:
        return np.zeros(0, dtype=np.int64)
    program, start, end = views.run.program, views.run.start, views.run.end
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    bar = place[np.append(views.row, views.row[program.first_messages])]  # a device's part in a message has no bar
    away = np.zeros(len(order), dtype=np.int64)
    before, after = program.waits()
    last = np.flatnonzero((end[before] == start[after]) & (after < len(order)))[::-1]
    # Dependencies come before lane orders; in reverse, the first edge of several is assigned last and remains.
    away[bar[after[last]]] = bar[before[last]] - bar[after[last]]
    return away


def _summary_facts(trace: Trace) -> dict[str, Any]:
    """Return the numbers of the summary that the page's headline shows."""
    summary = trace.summary()
    numbers = {name: _number(summary.get(name)) for name in ("makespan", "period", "bubble", "mean_staleness")}
    return {"summary": {name: value for name, value in numbers.items() if isfinite(value)}}


def _number(recorded: object) -> float:
    """Return a number or a fraction of a summary, which in a loaded trace may be anything; nan for anything else."""
    try:
        return float(Fraction(recorded)) if isinstance(recorded, int | float | str) else nan
    except (ValueError, ZeroDivisionError, OverflowError):
        return nan


def _words_and_colours() -> dict[str, Any]:
    """Return the words and colours of the page, so that the scripts define none."""
    place = palette.COLOURS.index
    kinds = [palette.KIND_COLOURS[Kind[name]] for name in KIND_WORDS]
    return {
        "kinds": [*KIND_WORDS, *map(word_of, Content)],
        "ops": ["p2p", *(op.name.lower() for op in Op)],
        "categories": list(map(word_of, Category)),
        "colours": palette.COLOURS,
        "inks": [palette.ink_on(colour) for colour in palette.COLOURS],
        "kindColours": list(map(place, [*kinds, *(palette.CONTENT_COLOURS[content] for content in Content)])),
        "categoryColours": [place(palette.CATEGORY_COLOURS[category]) for category in Category],
    }

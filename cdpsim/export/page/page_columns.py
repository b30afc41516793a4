"""The columns of a page: the bars of one run or of two, row by row; their waits, memory and messages."""

from fractions import Fraction
from math import isfinite, nan
from typing import Any, NamedTuple

import numpy as np

from cdpsim.draw import palette
from cdpsim.draw.views import (
    KIND_WORDS,
    LONGEST_TITLE_WORD,
    STREAM_NAMES,
    Channel,
    Views,
    held_in_steady_state,
    lanes,
    previous_in_run,
    title_words,
    word_of,
)
from cdpsim.errors import one_line
from cdpsim.numeric.columns import Columns, Ints, Times, group_numbers, group_starts
from cdpsim.program import Category, Content, Kind, Op
from cdpsim.runs import Run
from cdpsim.trace.metrics.waiting import IdleReason, idle_spans, last_waits


class PageRows(NamedTuple):
    """The rows of the page: the rows of a table of the runs, page row after page row, sorted by start in each."""

    order: Ints
    first: Ints  # where each page row begins, and where the last one ends
    owner: Ints  # of each page row: a device, or a link
    lane: Ints  # of each page row; of a device, 0 is for tasks that take no time


class PageRuns:
    """The tables of all runs, one behind another, in which devices are numbered on from each run to the next."""

    def __init__(self, views: list[Views]) -> None:
        self.views = views
        self.first_device = np.cumsum([0, *(each.devices for each in views)])
        self.devices = int(self.first_device[-1])
        self.tasks = self._joined("tasks", ("stage", "micro_batch", "step", "version", "stale", "start", "end"))
        self.messages = self._joined("messages", ("stage", "micro_batch", "step", "size", "rounds", "start", "end"))
        self.memory = self._joined("memory", ("time", "size"))
        for table, name in ((self.tasks, "tasks"), (self.memory, "memory")):
            shifted = [getattr(each, name)["device"] + at for each, at in zip(views, self.first_device, strict=False)]
            table["device"] = np.concatenate(shifted)

    def _joined(self, table: str, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        return {name: np.concatenate([getattr(each, table)[name] for each in self.views]) for name in names}

    def of_views(self, name: str) -> np.ndarray:
        """Return a column that views derive, one run's behind another's."""
        return np.concatenate([getattr(each, name) for each in self.views])


def page_columns(views: list[Views]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the columns that the page reads, in the smallest types that hold them, and its other facts."""
    runs = PageRuns(views)
    tasks, messages = runs.tasks, runs.messages
    links, link, groups = _links_of_runs(runs)
    upper = _device_rows(runs)
    lower = _sort_rows(link, lanes(link, messages["start"], messages["end"]), messages, np.arange(len(links)))
    count = len(tasks["start"])
    order = np.concatenate([upper.order, count + lower.order])  # of all bars, among tasks and then messages
    idle = [_idle_spans(each) for each in views]
    bars = [np.concatenate([tasks[name], messages[name]]) for name in ("start", "end")]
    spans = [np.concatenate(column) for column in list(zip(*idle, strict=True))[1:3]]
    times, (start, end, moment, begin, until) = _time_table(*bars, runs.memory["time"], *spans)
    sizes, size = np.unique(messages["size"], return_inverse=True)
    kinds = np.array([list(KIND_WORDS).index(kind.name) for kind in Kind])  # the page's number of each
    kind = np.concatenate([kinds[runs.of_views("kind")], runs.of_views("content") + len(KIND_WORDS)])
    columns = {"kind": kind[order]}
    for name in ("stage", "micro_batch", "step"):
        columns[name] = np.concatenate([tasks[name], messages[name]])[order]
    columns |= {"version": tasks["version"][upper.order], "stale": tasks["stale"][upper.order].astype(np.uint8)}
    row_first = np.concatenate([upper.first, count + lower.first[1:]])
    start, end = start[order], end[order]
    columns |= {"gap": start - previous_in_run(end, row_first), "length": end - start}  # mostly the same few numbers
    columns |= {"times": times, "sizes": sizes, "size": size[lower.order], "rounds": messages["rounds"][lower.order]}
    columns |= dict(zip(("link_op", "link_src", "link_dst", "link_stream"), links.T, strict=True))
    columns |= _memory_columns(runs, moment) | _idle_columns(runs, idle, begin, until) | _waits_of_bars(runs, order)
    columns |= {
        "row_first": row_first,
        "row_owner": np.concatenate([upper.owner, lower.owner]),
        "row_lane": np.concatenate([upper.lane, lower.lane]),
    }
    facts = {"slots": views[0].in_slots, "devices": runs.devices, "deviceRows": len(upper.owner), "groups": groups}
    facts |= {"runs": _runs_facts(views)} | _words_and_colours()
    return {name: _narrow(column) for name, column in columns.items()}, facts


def _links_of_runs(runs: PageRuns) -> tuple[Ints, Ints, list[list[int]]]:
    """Return a row for each link (operation, source, receiver or group, stream), each message's link, and all groups.

    In each run pairs of devices come first, under operation 0, then groups, operation by operation. A stream is -1 on a
    link that is none.
    """
    links: list[tuple[int, ...]] = []
    numbers, groups = [], list[list[int]]()
    for views, at in zip(runs.views, runs.first_device.tolist(), strict=False):
        own = list(dict.fromkeys(channel.members for channel in views.channels if not channel.is_pair))
        number = {members: len(groups) + k for k, members in enumerate(own)}

        def key(channel: Channel, at: int = at, number: dict[tuple[int, ...], int] = number) -> tuple[int, ...]:
            op, to = (0, at + channel.members[0]) if channel.is_pair else (channel.op + 1, number[channel.members])
            return op, channel.src + at * (channel.src >= 0), to, channel.stream

        keys, link = views.links(key)
        numbers.append(link + len(links))
        links += keys
        groups += [[at + device for device in members] for members in own]
    return np.array(links, dtype=np.int64).reshape(-1, 4), np.concatenate(numbers), groups


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


def _device_rows(runs: PageRuns) -> PageRows:
    """Return the rows of devices: the first lane is for tasks that take no time, such as updates."""
    device, start, end, micro_batch = (runs.tasks[name] for name in ("device", "start", "end", "micro_batch"))
    lane = np.zeros(len(device), dtype=np.int64)
    lasts = np.flatnonzero(end > start)
    lane[lasts] = 1 + lanes(device[lasts], start[lasts], end[lasts], micro_batch[lasts])
    return _sort_rows(device, lane, runs.tasks, np.arange(runs.devices), least=1)


def _memory_columns(runs: PageRuns, moment: Ints) -> dict[str, np.ndarray]:
    """Return the memory of each device by category, then of all devices of each run together, curve after curve."""
    kinds, spread = len(Category), int(moment.max(initial=0)) + 1
    device, category, size = runs.memory["device"].astype(np.int64), runs.of_views("category"), runs.memory["size"]
    change = runs.of_views("memory_change")
    whole = kinds * (np.searchsorted(runs.first_device, device, side="right") - 1) + category  # the curve of its run
    by_time = np.argsort(whole * spread + moment, kind="stable")
    first = group_starts(whole[by_time], moment[by_time])
    total = np.cumsum(np.add.reduceat(change[by_time], first) if len(first) else change)
    together = by_time[first]
    starts = group_starts(whole[together])
    before = np.append(0, total)[starts].astype(total.dtype)  # the sum of the curves before
    total -= before[group_numbers(starts, len(together))]
    curve = np.concatenate([device * kinds + category, runs.devices * kinds + whole[together]])
    moment = np.concatenate([moment, moment[together]])
    sizes, place = np.unique(np.concatenate([size, total]), return_inverse=True)
    begins = np.searchsorted(curve, np.arange((runs.devices + len(runs.views)) * kinds + 1))
    return {
        "held_first": begins,
        "held_time": moment - previous_in_run(moment, begins),
        "held_size": place,
        "held_sizes": sizes,
    }


def _idle_spans(views: Views) -> tuple[Ints, Times, Times, Ints]:
    """Return the times in which lanes wait for a message, a stream or a dependency: device, begin, end, reason.

    A trace without its program has none.
    """
    if views.run is None:
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, nothing, nothing
    spans = idle_spans(views.run.program, views.run.start, views.run.end)
    rows = np.flatnonzero(spans["reason"] != IdleReason.NOTHING)
    rows = rows[np.argsort(spans["device"][rows], kind="stable")]
    return spans["device"][rows], spans["begin"][rows], spans["end"][rows], spans["reason"][rows]


def _idle_columns(
    runs: PageRuns, spans: list[tuple[Ints, Times, Times, Ints]], begin: Ints, until: Ints
) -> dict[str, np.ndarray]:
    """Return the times in which lanes wait, device by device."""
    device = np.concatenate([each[0] + at for each, at in zip(spans, runs.first_device, strict=False)])
    first = np.searchsorted(device, np.arange(runs.devices + 1))
    return {
        "idle_first": first,
        "idle_gap": begin - previous_in_run(until, first),
        "idle_length": until - begin,
        "idle_reason": np.concatenate([each[3] for each in spans]),
    }


def _waits_of_bars(runs: PageRuns, order: Ints) -> dict[str, np.ndarray]:
    """Return the distance, in bars, from each bar to the one that ended last of all that it waited for; 0 if none.

    And the bar with which each run ends, whose critical path is that of the run; -1 for a trace without its program.
    """
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    away = np.zeros(len(order), dtype=np.int64)
    tasks, messages, ends = 0, len(runs.tasks["start"]), np.full(len(runs.views), -1)
    for run, each in enumerate(runs.views):
        count, sent = len(each.tasks["start"]), len(each.messages["start"])
        rows = np.concatenate([tasks + np.arange(count), messages + np.arange(sent)])
        tasks, messages = tasks + count, messages + sent
        if each.run is not None:
            node, last = _last_waits(each, each.run)
            away[place[rows[node]]] = place[rows[last]] - place[rows[node]]
            ends[run] = place[rows[each.row[each.run.end[: len(rows)].argmax()]]]
    return {"waits": away if (ends >= 0).any() else away[:0], "run_ends": ends}


def _last_waits(views: Views, run: Run) -> tuple[Ints, Ints]:
    """Return the rows of tasks and messages that waited, and of the last one to end that each waited for.

    A device's part in a message has no bar. Its message stands for it if that has ended by then, else the last
    dependency of the part itself.
    """
    program, start, end = run.program, run.start, run.end
    critical = last_waits(program, end)
    bars = program.message_nodes.stop
    last = critical[:bars].copy()
    while len(node := np.flatnonzero(last >= bars)):
        message = program.first_messages[last[node] - bars]
        ended = (message != node) & (end[message] <= start[node])
        last[node] = np.where(ended, message, critical[last[node]])
    node = np.flatnonzero(last >= 0)
    return views.row[node], views.row[last[node]]


def _runs_facts(views: list[Views]) -> list[dict[str, Any]]:
    """Return each run's short name, number of devices, and the numbers of its summary that the page's head shows."""
    facts = []
    for name, each in zip(_short_names([title_words(each.trace) for each in views]), views, strict=True):
        summary = each.trace.summary()
        numbers = {key: _number(summary.get(key)) for key in ("makespan", "period", "bubble", "mean_staleness")}
        numbers["held_in_steady_state"] = _number(held_in_steady_state(each.trace))
        known = {key: value for key, value in numbers.items() if isfinite(value)}
        facts.append({"name": name, "devices": each.devices, "summary": known})
    return facts


def _short_names(words: list[list[str]]) -> list[str]:
    """Return, for each run, those words of its title by which it differs from the other; of equal ones, its number.

    >>> _short_names([["1f1b", "n = 4"], ["gpipe", "n = 4"]]), _short_names([["1f1b", "n = 4"], ["1f1b", "n = 4"]])
    (['1f1b', 'gpipe'], ['run 0', 'run 1'])
    """
    common = set(words[0]).intersection(*words[1:])
    names = [", ".join(word for word in each if word not in common) for each in words]
    return [one_line(name, LONGEST_TITLE_WORD) or f"run {k}" for k, name in enumerate(names)]


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
        "reasons": [reason.name.lower() for reason in IdleReason],
        "ops": ["p2p", *(op.name.lower() for op in Op)],
        "streams": [*STREAM_NAMES.values()],
        "categories": list(map(word_of, Category)),
        "colours": palette.COLOURS,
        "inks": [palette.ink_on(colour) for colour in palette.COLOURS],
        "kindColours": list(map(place, [*kinds, *(palette.CONTENT_COLOURS[content] for content in Content)])),
        "categoryColours": [place(palette.CATEGORY_COLOURS[category]) for category in Category],
    }

"""The paper's Fig. 1: stage over time step, a mark for each task; of any run whose tasks take one slot."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdpsim.api import simulate
from cdpsim.draw import palette, sheet
from cdpsim.draw.canvas import AS_DRAWN, GREY, INK, PALE, TITLE, Look, label
from cdpsim.draw.gantt import gantt
from cdpsim.draw.plots import timeline_style
from cdpsim.draw.sheet import SMALL, Box, KeyEntry, SheetPoint, write_words
from cdpsim.draw.views import KIND_WORDS, MessageTasks, Views, colour_meanings, title
from cdpsim.errors import RequestError, whole_number
from cdpsim.numeric.columns import Ints, group_numbers, group_starts, sort_by
from cdpsim.program import Content, Kind, Op
from cdpsim.trace import Trace

FIGURE_1 = (("DP", "multi-dp", None), ("CDP-v1", "multi-cdp", "cdp-v1"), ("CDP-v2", "multi-cdp", "cdp-v2"))

# All in points. A column of the paper is 3.35 inches wide; with the paper's 16 time steps a cell has 13.5 points of it.
_COLUMN, _NARROWEST, _WIDEST, _HIGHEST = 241.0, 120.0, 936.0, 1080.0
_LEFT, _RIGHT = 20.0, 5.0
_CELL_WIDTH, _WIDE_CELL = 13.5, 22.0
_LEAST_IN_CELL = 3.6
_LEAST_MARK = 3.2  # narrower marks are noise
_LEAST_FOR_ARROWS = 6.25  # of a cell
_MOST_SIDE_BY_SIDE = 4  # marks of one cell, before a second line begins
_PAD = 1.3  # on both sides of a cell: a double bar has room between two
_LINE, _SMALL_LINE = 11.0, 8.5
_TITLE, _KEY_LINE, _AXIS = 12.0, 11.0, 21.0
_MOST_TASKS = 10_000
_ANOTHER_WAY = "use timeline --style gantt, an .html file, or fewer --steps"
_WIDE = 6.0  # wider marks have room for the white edge of a slash
_DIGIT = 3.9  # the width of a digit at the smallest size


class _Timeline(NamedTuple):
    """One run, as it will be drawn: the boxes of its tasks in points, from the left and from below its own foot."""

    views: Views
    title: str
    prefix: str
    boxes: dict[int, Box]  # of the tasks, by their rows
    synchronised: dict[int, float]
    passed: list[tuple[int, int, int]]
    stages: int
    pitch: float  # from stage to stage
    gap: float  # between the marks of two
    first: int  # the number of the first stage and micro-batch


def figure_1(n: int = 3, steps: int = 2, *, look: Look = AS_DRAWN) -> Figure:
    """Draw the paper's Fig. 1 for any n: DP, CDP-v1 and CDP-v2."""
    n, steps = whole_number("n", n, at_least=1), whole_number("steps", steps, at_least=1)
    _pace(2 * n * steps + 2 * (n - 1), _marks_in_a_line(n), _widest(look))
    runs = [simulate(name, n, steps=steps, rule=rule) for _, name, rule in FIGURE_1]
    return paper(runs, [words for words, _, _ in FIGURE_1], first=1, look=look)


def timelines(
    traces: Sequence[Trace],
    *,
    style: str | None = None,
    colour: str | None = None,
    links: bool | None = None,
    dependencies: bool = False,
    steps: int | None = None,
    look: Look,
) -> Figure:
    """Draw runs in a style, by default the paper's where it can draw them and nothing of a gantt is asked for."""
    if (style or timeline_style(traces, gantt=bool(colour or links or dependencies or steps))) == "paper":
        return paper(traces, look=look)
    return gantt(traces, colour=colour or "kind", links=links, dependencies=dependencies, steps=steps, look=look)


def paper(
    traces: Sequence[Trace], titles: Sequence[str] | None = None, *, first: int = 0, look: Look = AS_DRAWN
) -> Figure:
    """Draw runs as the paper's Fig. 1 does, one under the other on one time axis.

    Time steps are counted from 0; `first` is the number of the first stage and micro-batch, which is 1 there.
    """
    runs = list(map(Views, traces))
    _refuse_undrawable(runs)
    names = list(map(label, titles)) if titles else list(map(title, traces))
    heading = label(look.title or "", 300)
    if look.title is not None and len(names) == 1:
        names, heading = [heading], ""
    cells = list(map(_places_in_cells, runs))
    span = max(int(views.tasks["end"].max()) for views in runs)
    pace = _pace(span, max(_marks_in_a_line(int(cell.max()) + 1) for cell in cells), _widest(look))
    each = enumerate(zip(runs, names, cells, strict=True))
    timelines = [_timeline(pace, *one, k, len(runs), first) for k, one in each]
    end = _LEFT + span * pace
    width = max(min(_COLUMN, _widest(look)), end + _RIGHT)
    key = sheet.key_rows(_key_entries(timelines) if look.legend else [], width - 2 * _RIGHT)
    height = sum(_TITLE + timeline.stages * timeline.pitch for timeline in timelines) + _AXIS + len(key) * _KEY_LINE + 5
    heading = sheet.wrapped(heading, width - 8, SMALL + 2)
    height += (_TITLE + sheet.height_below_first(heading, SMALL + 2)) * bool(heading)
    headings = [sheet.wrapped(timeline.title, width - 8, SMALL + 1) for timeline in timelines]
    height += sum(sheet.height_below_first(words, SMALL + 1) for words in headings)
    if height > _HIGHEST:
        raise RequestError("timeline", f"has more stages than {_HIGHEST / 72:g} inches have room for; {_ANOTHER_WAY}")
    figure, axes = sheet.new_sheet(width, height)
    top = height
    if heading:
        write_words(axes, 3, top - _TITLE / 2, heading, SMALL + 2, gid=TITLE)
        top -= _TITLE + sheet.height_below_first(heading, SMALL + 2)
    for timeline, words in zip(timelines, headings, strict=True):
        write_words(axes, 3, top - _TITLE / 2 - 1, words, SMALL + 1, gid=TITLE if len(timelines) == 1 else None)
        top -= _TITLE + sheet.height_below_first(words, SMALL + 1) + timeline.stages * timeline.pitch
        _draw_timeline(axes, timeline, pace, end, top)
    _write_times(axes, span, pace, top)
    sheet.draw_key(axes, _RIGHT, top - _AXIS, key, _KEY_LINE)
    return sheet.scale_sheet(figure, look)


def _refuse_undrawable(runs: Sequence[Views]) -> None:
    """Refuse runs that this style cannot draw."""
    if not all(views.in_cells for views in runs):
        raise RequestError("style", "paper is of runs in which every task takes one slot; use --style gantt")
    tasks = sum(len(views.kind) for views in runs)
    if tasks > _MOST_TASKS:
        problem = f"has {tasks} tasks, of which the paper's style draws {_MOST_TASKS}; {_ANOTHER_WAY}"
        raise RequestError("timeline", problem)


def _places_in_cells(views: Views) -> Ints:
    """Return the place of each task but updates among those of its stage and slot, in the order of micro-batches."""
    row = np.flatnonzero(views.kind != Kind.U)
    stage, start, micro_batch = (views.tasks[name][row] for name in ("stage", "start", "micro_batch"))
    order = sort_by(stage, start, micro_batch, np.arange(len(row)))
    first = group_starts(stage[order], start[order])
    place = np.empty(len(row), dtype=np.int64)
    place[order] = np.arange(len(row)) - first[group_numbers(first, len(row))]
    return place


def _marks_in_a_line(marks: int) -> int:
    """Return the number of marks side by side in a cell, whose lines are of nearly equal length."""
    return -(-marks // -(-marks // _MOST_SIDE_BY_SIDE))


def _widest(look: Look) -> float:
    """Return the points that a sheet may be wide before it is enlarged for its letters."""
    if look.inches_wide is None:
        return _WIDEST
    return min(max(look.inches_wide * 72 / max(look.enlargement(SMALL), 1.0), _NARROWEST), _WIDEST)


def _pace(slots: int, columns: int, widest: float) -> float:
    """Return the points of a slot on a sheet as wide as `widest` at most; refuse too few for marks side by side."""
    wanted = slots * max(_CELL_WIDTH, _LEAST_IN_CELL * columns + 2 * _PAD)
    room, most = min(min(_COLUMN, widest) - _LEFT - _RIGHT, slots * _WIDE_CELL), widest - _LEFT - _RIGHT
    width = min(max(wanted, room), most)
    if 0.8 * width / slots / columns < _LEAST_MARK:
        beside = f", {columns} of them side by side" if columns > 1 else ""
        longest = int(0.8 * most / _LEAST_MARK / columns)
        problem = f"is as long as {slots} tasks{beside}; the paper's style has room for {longest}"
        raise RequestError("timeline", f"{problem}; {_ANOTHER_WAY}")
    return width / slots


def _timeline(pace: float, views: Views, name: str, place: Ints, number: int, of: int, first: int) -> _Timeline:
    synchronised = synchronisations(views.trace)
    passed = _messages_passed_on(views, synchronised) if pace >= _LEAST_FOR_ARROWS else []
    letter = chr(ord("a") + number) if number < 26 else str(number)
    name, prefix = (f"({letter}) {name}", f"{letter}-") if of > 1 else (name, "")
    columns = _marks_in_a_line(int(place.max()) + 1)
    stages, lines = int(views.tasks["stage"].max()) + 1, int(place.max()) // columns + 1
    line, gap = _LINE if lines == 1 else _SMALL_LINE, 10.5 if passed or stages == 1 else 4.5
    pitch = lines * line + gap
    row = np.flatnonzero(views.kind != Kind.U)
    upper = (views.tasks["stage"][row] + 1) * pitch - gap / 2 - place // columns * line
    pad = min(_PAD, 0.1 * pace)
    mark = (pace - 2 * pad) / columns
    left = _LEFT + views.tasks["start"][row] * pace + pad + place % columns * mark
    edges = zip(*(edge.tolist() for edge in (left, left + mark, upper - line, upper)), strict=True)
    boxes = dict(zip(row.tolist(), edges, strict=True))
    return _Timeline(views, name, prefix, boxes, synchronised, passed, stages, pitch, gap, first)


def _draw_timeline(axes: Axes, timeline: _Timeline, pace: float, end: float, bottom: float) -> None:
    height = timeline.stages * timeline.pitch
    for j in range(timeline.stages):
        y = bottom + j * timeline.pitch
        write_words(axes, _LEFT - 3.5, bottom + (j + 0.5) * timeline.pitch, str(j + timeline.first), ha="right")
        sheet.draw_lines(axes, [(_LEFT, y), (end, y)], edgecolor=PALE, lw=0.4)
    write_words(axes, 5, bottom + height / 2, "stage", ha="center", va="center", rotation=90)
    boxes = {row: (x, to, bottom + low, bottom + high) for row, (x, to, low, high) in timeline.boxes.items()}
    tasks = timeline.views.tasks
    digits = len(str(tasks["micro_batch"].max() + timeline.first))
    for row, box in boxes.items():
        kind, t, i, j, stale = (tasks[name][row].item() for name in ("kind", "step", "micro_batch", "stage", "stale"))
        number, name = str(i + timeline.first).rjust(digits), f"{timeline.prefix}{kind}-t{t}-i{i}-j{j}"
        _draw_task(axes, kind, palette.colour(i), number, box, stale=bool(stale), name=name)
    for k, maker, user in timeline.passed:
        arrival = _LEFT + timeline.views.messages["end"][k] * pace
        _draw_message(axes, timeline, k, arrival, boxes[maker], boxes[user])
    for step, moment in timeline.synchronised.items():
        name = f"{timeline.prefix}synchronisation-t{step}"
        _double_bar(axes, _LEFT + moment * pace, bottom + 0.5, bottom + height - 0.5, name)


def _draw_message(axes: Axes, timeline: _Timeline, number: int, arrival: float, maker: Box, user: Box) -> None:
    """Draw an arrow from a message's maker to its user: of gradients above the marks, else below."""
    names = ("content", "step", "stage", "src", "dst")
    content, t, j, src, dst = (timeline.views.messages[name][number] for name in names)
    side, edge = (1, 3) if content == "gradient" else (-1, 2)
    start, end = (maker[0] + maker[1]) / 2, (user[0] + user[1]) / 2
    if end < start + 3:  # a sum may come when the task that adds to it is over
        end = max(arrival, user[1])
    y, rise = (maker[edge] + user[edge]) / 2, side * timeline.gap * 0.75
    name = f"{timeline.prefix}{content}-t{t}-j{j}-{src}-{dst}-{number}"
    ends = (start + 1, maker[edge] + side * 0.6), (end - 1, user[edge] + side * 0.6)
    bend = (start + end) / 2, y + rise
    sheet.draw_arc(axes, ends[0], bend, ends[1], 2.2, name=name, edgecolor=GREY, lw=0.5, zorder=0.5)


def _write_times(axes: Axes, span: int, pace: float, top: float) -> None:
    """Write time steps and the name of their axis below a timeline."""
    end = _LEFT + span * pace
    sheet.draw_lines(axes, [(_LEFT, top), (end, top)], edgecolor=GREY, lw=0.5)
    wide = 4.2 * len(str(span)) + 5
    every = next(k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k * pace >= wide * (1 - 1e-9))
    for k in range(0, span, every):
        write_words(axes, _LEFT + (k + 0.5) * pace, top - 6.5, str(k), ha="center")
    write_words(axes, (_LEFT + end) / 2, top - 15.5, "time step", ha="center")


def _draw_task(axes: Axes, kind: str, fill: str, number: str, box: Box, *, stale: bool, name: str) -> None:
    """Draw a task's block arrow, struck through if stale; with its number, as wide as the widest, where that fits."""
    left, right, lower, upper = box
    gap = min(0.4, 0.1 * (right - left))
    box = (left + gap, right - gap, lower + 0.3, upper - 0.3)
    sheet.fill_polygon(axes, _block_arrow(kind, box), fill, name=name)
    if stale:
        _slash(axes, box, f"{name}-slash")
    if right - left >= _DIGIT * len(number) + 1:
        digits, (left, right, lower, upper) = number.strip(), box
        x = (left + right) / 2
        y = (lower + upper) / 2 + {"F": -0.1, "B": 0.1, "W": -0.05}.get(kind, 0.0) * (upper - lower)
        if stale:  # with room around it, as a slash goes through
            half = _DIGIT / 2 * len(digits) + 0.25
            sheet.fill_polygon(axes, sheet.corners_of((x - half, x + half, y - 2.4, y + 2.7)), fill, zorder=3)
        write_words(axes, x, y, digits, 6, ha="center", color=palette.ink_on(fill), zorder=4)


def _block_arrow(kind: str, box: Box) -> list[SheetPoint]:
    """Return the outline of a task's mark: a forward points up, a backward down; a backward of weights is a chevron."""
    left, right, lower, upper = box
    middle, tip = (left + right) / 2, min(0.36 * (upper - lower), 0.7 * (right - left))
    if kind == "F":
        return [(left, lower), (right, lower), (right, upper - tip), (middle, upper), (left, upper - tip)]
    down = [(left, lower + tip), (middle, lower), (right, lower + tip), (right, upper)]
    return [*down, (middle, upper - tip / 2), (left, upper)] if kind == "W" else [*down, (left, upper)]


def _slash(axes: Axes, box: Box, name: str = "") -> None:
    """Strike a mark through."""
    left, right, lower, upper = box
    wide = right - left > _WIDE
    beyond = 1.3 if wide else 0.4
    ends = [(left - beyond, lower - 1.3), (right + beyond, upper + 1.3)]
    if wide:
        sheet.draw_lines(axes, ends, edgecolor="white", lw=2.0, zorder=3)
    sheet.draw_lines(axes, ends, name=name, lw=0.9 if wide else 0.6, zorder=3)


def _double_bar(axes: Axes, x: float, lower: float, upper: float, name: str = "") -> None:
    bars = ([(x + side, lower), (x + side, upper)] for side in (-0.85, 0.85))
    sheet.draw_lines(axes, *bars, name=name, lw=0.7, zorder=4)


def _key_entries(timelines: Sequence[_Timeline]) -> list[KeyEntry]:
    """Return the entries of the marks that are there."""
    drawn = [(timeline.views, list(timeline.boxes)) for timeline in timelines]
    kinds, numbers, stale = (
        np.unique(np.concatenate([views.tasks[name][row] for views, row in drawn])).tolist()
        for name in ("kind", "micro_batch", "stale")
    )
    shades = colour_meanings(numbers, "micro-batch", timelines[0].first)
    entries = [KeyEntry(partial(_draw_shade, shade), 6, words) for shade, words in shades]
    entries += [KeyEntry(partial(_draw_kind, kind), 7, word) for kind, word in KIND_WORDS.items() if kind in kinds]

    def bars(axes: Axes, x: float, y: float) -> None:
        _double_bar(axes, x, y - 4, y + 4)

    def curve(axes: Axes, x: float, y: float) -> None:
        sheet.draw_arc(axes, (x - 7, y - 2), (x, y + 5), (x + 7, y - 2), 2.4, edgecolor=GREY, lw=0.6)

    others = (
        (KeyEntry(_draw_stale, 8, "reads an older version"), any(stale)),
        (KeyEntry(bars, 3, "synchronisation"), any(timeline.synchronised for timeline in timelines)),
        (KeyEntry(curve, 16, "message"), any(timeline.passed for timeline in timelines)),
    )
    return entries + [entry for entry, there in others if there]


# Marks of the key, drawn around a point.


def _draw_shade(shade: str, axes: Axes, x: float, y: float) -> None:
    sheet.fill_polygon(axes, sheet.corners_of((x - 3, x + 3, y - 3, y + 3)), shade)


def _draw_kind(kind: str, axes: Axes, x: float, y: float) -> None:
    outline = _block_arrow(kind, (x - 3.5, x + 3.5, y - 4, y + 4))
    sheet.fill_polygon(axes, outline, "white", edgecolor=INK, lw=0.6)


def _draw_stale(axes: Axes, x: float, y: float) -> None:
    box = (x - 3.5, x + 3.5, y - 4, y + 4)
    sheet.fill_polygon(axes, _block_arrow("F", box), PALE)
    _slash(axes, box)


# When steps are synchronised, and messages between them.


def synchronisations(trace: Trace) -> dict[int, float]:
    """Return the time of the last update of each training step that is synchronised, by its step.

    A step is synchronised if no task that reads a part of its version starts before all updates that make the version
    have happened, and these happen at one time, or between its tasks and the tasks of the next step. A version that no
    task reads follows the one before it; without one, its updates must all happen at one time.
    """
    tasks = trace.tasks
    update = tasks["kind"] == "U"
    made, happened = tasks["version"][update], tasks["end"][update]
    read, begun, ended, step = (tasks[name][~update] for name in ("version", "start", "end", "step"))
    result, synchronised = {}, None
    for version in np.unique(made).tolist():
        times, readers = happened[made == version], begun[read == version]
        at_once = bool(times.min() == times.max())
        if len(readers):
            apart = begun[step >= version].min() >= times.max() >= ended[step < version].max()
            synchronised = bool(readers.min() >= times.max() and (at_once or apart))
        elif synchronised is None:
            synchronised = at_once
        if synchronised:
            result[version - 1] = times.max().item()
    return result


def _messages_passed_on(views: Views, synchronised: dict[int, float]) -> list[tuple[int, int, int]]:
    """Return messages of gradients, parameters and states between steps: (message, from task, for task).

    Those are point to point, of steps that are not synchronised. An update is shown by the task that it follows.
    """
    wanted = (views.op == Op.P2P) & np.isin(views.content, (Content.GRADIENT, Content.PARAMETERS, Content.STATE))
    wanted &= ~np.isin(views.messages["step"], list(synchronised))
    made, used = views.message_tasks
    maker, user = _first(made, -views.tasks["end"]), _first(used, views.tasks["start"])
    before: dict[int, int] = {}  # of each update, the last task of its stage on its device that had ended by then
    last: dict[tuple[int, int], int] = {}
    places = zip(*(views.tasks[name].tolist() for name in ("kind", "stage", "device")), strict=True)
    for row, (kind, *place) in enumerate(places):  # tasks that start with an update come behind it
        if kind == "U":
            before[row] = last.get(tuple(place), -1)
        else:
            last[tuple(place)] = row
    ends = [(k, maker[k], user[k]) for k in np.flatnonzero(wanted).tolist() if k in maker and k in user]
    drawn = [(k, before.get(a, a), before.get(b, b)) for k, a, b in ends]
    return [(k, a, b) for k, a, b in drawn if -1 not in (a, b) and a != b]


def _first(pairs: MessageTasks, by: np.ndarray) -> dict[int, int]:
    """Return the one of each message's tasks that comes first."""
    order = np.lexsort((by[pairs.task], pairs.message))
    message, task = pairs.message[order], pairs.task[order]
    first = group_starts(message)
    return dict(zip(message[first].tolist(), task[first].tolist(), strict=True))

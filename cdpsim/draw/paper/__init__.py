"""The paper's Fig. 1: stage over time step, a mark for each task; of any run, in a column of a paper."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdpsim.api import simulate
from cdpsim.draw import palette, sheet
from cdpsim.draw.canvas import GREY, INK, PALE, TITLE, label
from cdpsim.draw.look import AS_DRAWN, Look
from cdpsim.draw.paper.content import Spots, in_cells, passed_on, side_by_side, spots, synchronisations
from cdpsim.draw.sheet import SMALL, Box, KeyEntry, SheetPoint, write_words
from cdpsim.draw.views import KIND_WORDS, Views, title
from cdpsim.errors import RequestError, whole_number
from cdpsim.trace import Trace

FIGURE_1 = (("DP", "multi-dp", None), ("CDP-v1", "multi-cdp", "cdp-v1"), ("CDP-v2", "multi-cdp", "cdp-v2"))

# All in points. A column of the paper is 3.35 inches wide; with the paper's 16 time steps a cell has 13.5 points of it.
_COLUMN, _NARROWEST = 241.0, 120.0
_WIDEST = 936.0
_HIGHEST = 1080.0
_LEFT, _RIGHT = 20.0, 5.0
_CELL_WIDTH = 13.5
_WIDE_CELL = 22.0
_LEAST_IN_CELL = 3.6
_LEAST_MARK = 3.2  # narrower marks are noise
_LEAST_FOR_ARROWS = 5.0
_PAD = 1.3  # on both sides of a cell: a double bar has room between two
_LINE_HEIGHT = 11.0
_SMALL_LINE = 8.5
_TITLE = 12.0
_KEY_LINE = 11.0
_AXIS = 21.0
_MOST_TASKS = 10_000
_ANOTHER_WAY = "use timeline --style gantt, an .html file, or fewer --steps"
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_WIDE = 6.0  # points: wider marks have room for the white edge of a slash
_DIGIT = 3.9  # points: the width of a digit at the smallest size


class _TimeAxis(NamedTuple):
    """The places of times on the sheet."""

    cells: bool
    in_slots: bool
    span: float
    pace: float  # points for each unit of time
    room: float  # points for a task that takes as long as most

    def at(self, time: float) -> float:
        return _LEFT + time * self.pace

    @property
    def pad(self) -> float:
        return min(_PAD, 0.1 * self.pace)


class _Timeline(NamedTuple):
    """One run, as it will be drawn."""

    views: Views
    title: str
    prefix: str
    spots: Spots
    synchronised: dict[int, float]
    passed: list[tuple[int, int, int]]
    stages: int
    line: float
    gap: float
    first: int  # the number of the first stage and micro-batch

    @property
    def pitch(self) -> float:
        return self.spots.lines * self.line + self.gap

    @property
    def height(self) -> float:
        return self.stages * self.pitch


def figure_1(n: int = 3, steps: int = 2, *, look: Look = AS_DRAWN) -> Figure:
    """Draw the paper's Fig. 1 for any n: DP, CDP-v1 and CDP-v2."""
    n, steps = whole_number("n", n, at_least=1), whole_number("steps", steps, at_least=1)
    _pace(2 * n * steps + 2 * (n - 1), 1.0, side_by_side(n), _widest(look))
    runs = [simulate(name, n, steps=steps, rule=rule) for _, name, rule in FIGURE_1]
    return paper(runs, [words for words, _, _ in FIGURE_1], first=1, look=look)


def paper(
    traces: Sequence[Trace], titles: Sequence[str] | None = None, *, first: int = 0, look: Look = AS_DRAWN
) -> Figure:
    """Draw runs as the paper's Fig. 1 does, one under the other on one time axis.

    Time steps are counted from 0; `first` is the number of the first stage and micro-batch, which is 1 there.
    """
    runs = list(map(Views, traces))
    _refuse_undrawable(runs)
    cells = all(map(in_cells, runs))
    places = [spots(views, cells) for views in runs]
    time = _time_axis(runs, places, cells, _widest(look))
    names = list(map(label, titles)) if titles else list(map(title, traces))
    heading = label(look.title or "", 300)
    if look.title is not None and len(names) == 1:
        names, heading = [heading], ""
    each = enumerate(zip(runs, names, places, strict=True))
    timelines = [_timeline(time, *one, k, len(runs), first) for k, one in each]
    width = max(min(_COLUMN, _widest(look)), time.at(time.span) + _RIGHT)
    key = sheet.key_rows(_key_entries(timelines) if look.legend else [], width - 2 * _RIGHT)
    height = sum(_TITLE + timeline.height for timeline in timelines) + _AXIS + len(key) * _KEY_LINE + 5
    height += _TITLE * bool(heading)
    if height > _HIGHEST:
        raise RequestError("timeline", f"has more stages than {_HIGHEST / 72:g} inches have room for; {_ANOTHER_WAY}")
    figure, axes = sheet.new_sheet(width, height)
    top = height
    for words in [heading] * bool(heading):
        top -= _TITLE
        write_words(axes, 3, top + _TITLE / 2, sheet.fitted(words, width - 8, SMALL + 2), SMALL + 2, gid=TITLE)
    for timeline in timelines:
        top -= _TITLE
        words, own = sheet.fitted(timeline.title, width - 8, SMALL + 1), {"gid": TITLE} if len(timelines) == 1 else {}
        write_words(axes, 3, top + _TITLE / 2 - 1, words, SMALL + 1, **own)
        _draw_timeline(axes, timeline, time, top)
        top -= timeline.height
    _write_times(axes, time, top)
    sheet.draw_key(axes, _RIGHT, top - _AXIS, key, _KEY_LINE)
    return sheet.scale_sheet(figure, look)


def _refuse_undrawable(runs: Sequence[Views]) -> None:
    """Refuse runs that this style cannot draw."""
    if any(not (views.tasks["end"] > views.tasks["start"]).any() for views in runs):
        raise RequestError("trace", "has no task that takes time; give one of a run that did something")
    tasks = sum(len(views.kind) for views in runs)
    if tasks > _MOST_TASKS:
        problem = f"has {tasks} tasks, of which the paper's style draws {_MOST_TASKS}; {_ANOTHER_WAY}"
        raise RequestError("timeline", problem)
    if len({views.in_slots for views in runs}) != 1:
        raise RequestError("traces", "need one unit of time, slots or seconds; draw them apart")


def _time_axis(runs: Sequence[Views], places: Sequence[Spots], cells: bool, widest: float) -> _TimeAxis:
    span = max(float(views.tasks["end"].max()) for views in runs)
    durations = np.concatenate([place.until - place.begin for place in places])
    typical = 1.0 if cells else float(np.median(durations[durations > 0]))
    pace = _pace(span, typical, max(place.columns for place in places), widest)
    return _TimeAxis(cells, runs[0].in_slots, span, pace, 0.8 * typical * pace)


def _widest(look: Look) -> float:
    """Return the points that a sheet may be wide before it is enlarged for its letters."""
    if look.inches_wide is None:
        return _WIDEST
    return min(max(look.inches_wide * 72 / max((look.letters or SMALL) / SMALL, 1.0), _NARROWEST), _WIDEST)


def _pace(span: float, typical: float, columns: int, widest: float) -> float:
    """Return the points of a unit of time on a sheet as wide as `widest` at most.

    Refuse what would have too few for tasks that typically take so long.
    """
    cells = span / typical
    wanted = cells * max(_CELL_WIDTH, _LEAST_IN_CELL * columns + 2 * _PAD)
    room, most = min(min(_COLUMN, widest) - _LEFT - _RIGHT, cells * _WIDE_CELL), widest - _LEFT - _RIGHT
    width = min(max(wanted, room), most)
    if 0.8 * width / cells / columns < _LEAST_MARK:
        beside = f", {columns} of them side by side" if columns > 1 else ""
        longest = int(0.8 * most / _LEAST_MARK / columns)
        problem = f"is as long as {cells:.0f} tasks{beside}; the paper's style has room for {longest}"
        raise RequestError("timeline", f"{problem}; {_ANOTHER_WAY}")
    return width / span


def _timeline(time: _TimeAxis, views: Views, name: str, place: Spots, number: int, of: int, first: int) -> _Timeline:
    synchronised = synchronisations(views.trace)
    passed = passed_on(views, synchronised) if time.room >= _LEAST_FOR_ARROWS else []
    letter = chr(ord("a") + number) if number < 26 else str(number)
    name, prefix = (f"({letter}) {name}", f"{letter}-") if of > 1 else (name, "")
    stages = int(views.tasks["stage"].max()) + 1
    size, gap = _LINE_HEIGHT if place.lines == 1 else _SMALL_LINE, 10.5 if passed or stages == 1 else 4.5
    return _Timeline(views, name, prefix, place, synchronised, passed, stages, size, gap, first)


def _draw_timeline(axes: Axes, timeline: _Timeline, time: _TimeAxis, top: float) -> None:
    bottom = top - timeline.height
    for j in range(timeline.stages):
        y = bottom + j * timeline.pitch
        write_words(axes, _LEFT - 3.5, bottom + (j + 0.5) * timeline.pitch, str(j + timeline.first), ha="right")
        sheet.draw_lines(axes, [(_LEFT, y), (time.at(time.span), y)], edgecolor=PALE, lw=0.4)
    write_words(axes, 5, (top + bottom) / 2, "stage", ha="center", va="center", rotation=90)
    boxes = _boxes(timeline, time, bottom)
    _draw_marks(axes, timeline, time, boxes)
    for k, maker, user in timeline.passed:
        _draw_message(axes, timeline, k, time.at(timeline.views.messages["end"][k]), boxes[maker], boxes[user])
    for step, moment in timeline.synchronised.items():
        _double_bar(axes, time.at(moment), bottom + 0.5, top - 0.5, f"{timeline.prefix}synchronisation-t{step}")


def _boxes(timeline: _Timeline, time: _TimeAxis, bottom: float) -> dict[int, Box]:
    """Return the place of each task that is drawn, by its row."""
    place, stage = timeline.spots, timeline.views.tasks["stage"][timeline.spots.row]
    upper = bottom + (stage + 1) * timeline.pitch - timeline.gap / 2 - place.line * timeline.line
    lower = upper - timeline.line
    if time.cells:
        mark = (time.pace - 2 * time.pad) / place.columns
        left = time.at(0) + place.begin * time.pace + time.pad + place.column * mark
        right = left + mark
    else:
        left, right = (time.at(0) + moment * time.pace for moment in (place.begin, place.until))
    edges = (left, right, lower, upper)
    return dict(zip(place.row.tolist(), zip(*(edge.tolist() for edge in edges), strict=True), strict=True))


def _draw_marks(axes: Axes, timeline: _Timeline, time: _TimeAxis, boxes: dict[int, Box]) -> None:
    tasks = timeline.views.tasks
    names = ("kind", "step", "micro_batch", "stage", "stale")
    digits = len(str(tasks["micro_batch"].max() + timeline.first))
    for row, box in boxes.items():
        kind, t, i, j, stale = (tasks[name][row].item() for name in names)
        name = f"{timeline.prefix}{kind}-t{t}-i{i}-j{j}"
        if not time.cells:
            left, right, lower, upper = box
            bar = sheet.corners_of((left, right, lower + 1, upper - 1))
            sheet.fill_polygon(axes, bar, palette.colour(i), name=f"{name}-bar", alpha=0.35)
            middle, half = (left + right) / 2, min((right - left) / 2, _LINE_HEIGHT / 2.2)
            box = (middle - half, middle + half, lower, upper)
        number = str(i + timeline.first).rjust(digits)
        _draw_task(axes, kind, palette.colour(i), number, box, stale=bool(stale), name=name)


def _draw_message(axes: Axes, timeline: _Timeline, number: int, arrival: float, maker: Box, user: Box) -> None:
    """Draw an arrow from a message's maker to its user: of gradients above the marks, else below."""
    names = ("content", "step", "stage", "src", "dst")
    content, t, j, src, dst = (timeline.views.messages[name][number] for name in names)
    side, edge = (1, 3) if content == "gradient" else (-1, 2)
    start, end = (maker[0] + maker[1]) / 2, (user[0] + user[1]) / 2
    if end < start + 3:  # a sum may come while the task that adds to it runs already, or is over
        end = max(arrival, user[1])
    y, rise = (maker[edge] + user[edge]) / 2, side * timeline.gap * 0.75
    name = f"{timeline.prefix}{content}-t{t}-j{j}-{src}-{dst}-{number}"
    ends = (start + 1, maker[edge] + side * 0.6), (end - 1, user[edge] + side * 0.6)
    sheet.draw_arc(
        axes, ends[0], ((start + end) / 2, y + rise), ends[1], 2.2, name=name, edgecolor=GREY, lw=0.5, zorder=0.5
    )


def _write_times(axes: Axes, time: _TimeAxis, top: float) -> None:
    """Write tick labels and the name of the time axis below a timeline."""
    sheet.draw_lines(axes, [(_LEFT, top), (time.at(time.span), top)], edgecolor=GREY, lw=0.5)
    scale, unit = (
        next((pair for pair in _TIME_UNITS if time.span >= pair[0]), _TIME_UNITS[-1]) if not time.in_slots else (1, "")
    )
    digits = 4.2 * len(f"{time.span / scale:.0f}") + 5
    every = _nice(digits / time.pace / scale, time.in_slots) * scale
    for k in range(int(time.span / every + 1e-9) + 1):
        moment = k * every
        if time.cells and moment >= time.span:
            continue
        x = time.at(moment + (0.5 if time.cells else 0))
        if not time.cells:
            sheet.draw_lines(axes, [(x, top), (x, top - 2)], edgecolor=GREY, lw=0.5)
        write_words(axes, x, top - 6.5, f"{moment / scale:.10g}", ha="center")
    words = "time step" if time.in_slots else f"time ({unit})"
    write_words(axes, (_LEFT + time.at(time.span)) / 2, top - 15.5, words, ha="center")


def _nice(least: float, integer: bool) -> float:
    """Return the smallest of 1, 2, 5, 10, 20 ... that is no smaller than that; of tenths too, unless `integer`."""
    power = 10.0 ** np.floor(np.log10(least))
    if integer:
        power = max(power, 1.0)
    return float(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9)))


def _draw_task(axes: Axes, kind: str, fill: str, number: str, box: Box, *, stale: bool, name: str) -> None:
    """Draw a task's block arrow, struck through if stale; with its number, as wide as the widest, where that fits."""
    left, right, lower, upper = box
    gap = min(0.4, 0.1 * (right - left))
    box = (left + gap, right - gap, lower + 0.3, upper - 0.3)
    sheet.fill_polygon(axes, _block_arrow(kind, box), fill, name=name)
    if stale:
        _slash(axes, box, f"{name}-slash")
    if right - left >= _DIGIT * len(number) + 1:
        _write_number(axes, kind, number.strip(), box, fill, clear=stale)


def _block_arrow(kind: str, box: Box) -> list[SheetPoint]:
    """Return the outline of a task's mark: a forward points up, a backward down; a backward of weights is a chevron."""
    left, right, lower, upper = box
    middle, tip = (left + right) / 2, min(0.36 * (upper - lower), 0.7 * (right - left))
    if kind == "F":
        return [(left, lower), (right, lower), (right, upper - tip), (middle, upper), (left, upper - tip)]
    down = [(left, lower + tip), (middle, lower), (right, lower + tip), (right, upper)]
    return [*down, (middle, upper - tip / 2), (left, upper)] if kind == "W" else [*down, (left, upper)]


def _write_number(axes: Axes, kind: str, digits: str, box: Box, fill: str, *, clear: bool) -> None:
    """Write a number into a mark; if a slash goes through it, with room around it."""
    left, right, lower, upper = box
    x = (left + right) / 2
    y = (lower + upper) / 2 + {"F": -0.1, "B": 0.1, "W": -0.05}.get(kind, 0.0) * (upper - lower)
    if clear:
        half = _DIGIT / 2 * len(digits) + 0.25
        sheet.fill_polygon(axes, sheet.corners_of((x - half, x + half, y - 2.4, y + 2.7)), fill, zorder=3)
    write_words(axes, x, y, digits, 6, ha="center", color=palette.ink_on(fill), zorder=4)


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
    """Draw two bars side by side."""
    sheet.draw_lines(
        axes, *([(x + side, lower), (x + side, upper)] for side in (-0.85, 0.85)), name=name, lw=0.7, zorder=4
    )


def _key_entries(timelines: Sequence[_Timeline]) -> list[KeyEntry]:
    """Return the entries of the marks that are there."""
    drawn = [(timeline.views, timeline.spots.row) for timeline in timelines]
    kinds, numbers, stale = (
        np.unique(np.concatenate([views.tasks[name][row] for views, row in drawn])).tolist()
        for name in ("kind", "micro_batch", "stale")
    )
    entries: list[KeyEntry] = []
    for shade in sorted({i % len(palette.COLOURS) for i in numbers}):
        sharing = [str(i + timelines[0].first) for i in numbers if i % len(palette.COLOURS) == shade]
        words = ", ".join(sharing[:2]) + (", …" if len(sharing) > 2 else "")
        entries.append(KeyEntry(partial(_draw_shade, shade), 6, words if entries else f"micro-batch {words}"))
    entries += [KeyEntry(partial(_draw_kind, kind), 7, word) for kind, word in KIND_WORDS.items() if kind in kinds]
    others = (
        (KeyEntry(_draw_stale, 8, "reads an older version"), any(stale)),
        (KeyEntry(_draw_synchronisation, 3, "synchronisation"), any(timeline.synchronised for timeline in timelines)),
        (KeyEntry(_draw_curve, 16, "message"), any(timeline.passed for timeline in timelines)),
    )
    return entries + [entry for entry, there in others if there]


# Marks of the key, drawn around a point.


def _draw_shade(shade: int, axes: Axes, x: float, y: float) -> None:
    sheet.fill_polygon(axes, sheet.corners_of((x - 3, x + 3, y - 3, y + 3)), palette.colour(shade))


def _draw_kind(kind: str, axes: Axes, x: float, y: float) -> None:
    outline = _block_arrow(kind, (x - 3.5, x + 3.5, y - 4, y + 4))
    sheet.fill_polygon(axes, outline, "white", edgecolor=INK, lw=0.6)


def _draw_stale(axes: Axes, x: float, y: float) -> None:
    box = (x - 3.5, x + 3.5, y - 4, y + 4)
    sheet.fill_polygon(axes, _block_arrow("F", box), PALE)
    _slash(axes, box)


def _draw_synchronisation(axes: Axes, x: float, y: float) -> None:
    _double_bar(axes, x, y - 4, y + 4)


def _draw_curve(axes: Axes, x: float, y: float) -> None:
    sheet.draw_arc(axes, (x - 7, y - 2), (x, y + 5), (x + 7, y - 2), 2.4, edgecolor=GREY, lw=0.6)

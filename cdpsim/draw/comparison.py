"""Comparisons of schedules: bars of every measure, and points of the idle time over the memory that they need."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdpsim.draw.canvas import GREY, INK, TITLE, label, one_unit, plain
from cdpsim.draw.fit import ORDINARY
from cdpsim.draw.look import AS_DRAWN, Look
from cdpsim.draw.palette import COLOURS
from cdpsim.draw.sheet import Box, enlarge, width_of
from cdpsim.errors import RequestError
from cdpsim.files.units import short_text
from cdpsim.studies.compare import Measured, rate_column
from cdpsim.studies.comparison_columns import SPLIT_NOTE, Comparison

_RATES = {"tokens": "tokens per second", "samples": "samples per second", "rate": "micro-batches per second"}
_HEAD, _NOTE = 10.5, 7.0  # points: the sizes of the title and of the notes
_BOLD = 1.15  # how much wider bold letters are
_NAMES, _PANEL = 1.6, 1.1  # inches: what the names of bars take, and the least that a panel of bars does
_LABEL, _LETTER = 7.5, 9.0  # points: the size of a point's name, and the height of its line
_WIDE, _HIGH = 8.4, 5.2  # inches: a picture of points
_LEFT, _RIGHT, _LOWER, _UPPER = 0.8, 0.3, 0.55, 0.42  # inches around its axes
# Where the name of a point may stand, from its middle, in points: beside it first, then further and further away.
_PLACES = [
    (across * reach, up * reach)
    for reach in (6, 12, 18, 26, 36, 48, 62, 80, 100, 120)
    for across, up in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1), (1, 2), (1, -2), (0, 2))
]
_ROOM = 1.3  # how far beyond the memory of runs that fit those that do not are drawn where they are


def comparison_bars(comparison: Comparison, look: Look = AS_DRAWN) -> Figure:
    """Draw the figures of runs as bars; of the idle time, the part that waits for messages is darker.

    Of many runs there are bars of the median step, with a line from the 5 % quantile to that of 95 %. Where panels have
    no room side by side, they are in several rows.
    """
    measured, slots = comparison.measured, comparison.slots
    measures = _measures(measured, slots=slots)
    wide = _width(look, _NAMES + 1.6 * len(measures))
    across = min(len(measures), max(1, int((wide - _NAMES) / _PANEL)))
    down = -(-len(measures) // across)
    figure = Figure(figsize=(wide, 1.0 + 0.28 * len(measured) * down + 0.5 * (down - 1)), layout="constrained")
    dark = ["dark: waiting for a message"] * any(one.exposed for one in measured)
    dark += ["bars: the median of the runs; lines: from their 5 % to their 95 % quantile"] * any(
        one.steps for one in measured
    )
    excess = ", too much" if down == 1 else " !"
    dark += ["!: more than a device has"] * (down > 1 and not all(one.fits for one in measured))
    _write_title_and_notes(figure, comparison, [*dark, *comparison.notes], look)
    panels = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes, (column, heading, unit) in zip(panels.flat, measures, strict=False):
        plain(axes, "\n".join(_wrapped(heading, 72 * (wide - _NAMES) / across, 9)), size=9)
        _draw_column(axes, measured, column, "" if slots and unit != "%" else unit, excess)
        axes.set_xlim(0, (axes.dataLim.x1 or 1) / max(0.2, 1 - 0.6 / min(1.6, (wide - _NAMES) / across)))
    for axes in panels.flat[len(measures) :]:
        axes.axis("off")
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(measured)), _row_labels(comparison), fontsize=8.5)
    panels[0, 0].set_ylim(len(measured) - 0.4, -0.6)
    return _enlarged(figure, look)


def _factor(look: Look) -> float:
    """Return by how much letters are larger than those of the picture itself."""
    return max((look.letters or ORDINARY) / ORDINARY, look.least_letters / _NOTE)


def _width(look: Look, natural: float) -> float:
    """Return the width in inches of a picture whose letters have their own size."""
    return (look.inches_wide or natural) / _factor(look)


def _enlarged(figure: Figure, look: Look) -> Figure:
    """Return a figure whose letters have their own size with those that were asked for, and as high as asked for."""
    factor = _factor(look)
    wide, high = figure.get_size_inches()
    figure.set_size_inches(wide, look.high(high * factor) / factor)
    return enlarge(figure, factor)


def _measures(measured: Sequence[Measured], *, slots: bool) -> list[tuple[str, str, str]]:
    """Return what is drawn: columns with their headings and units; times of a step where all steps are alike."""
    rate = rate_column(measured)
    heading = "micro-batches per slot" if slots else _RATES[rate]
    found = [(rate, heading, "number")]
    alike = len({(one.micro_batches, one.batch) for one in measured}) == 1
    if alike or any(one.steps for one in measured):
        found.append(("step", "training step", "s"))
    if any(one.mfu for one in measured):
        found.append(("mfu", "MFU", "%"))
    found += [("bubble", "bubble", "%"), ("memory", "memory, fullest device", "B")]
    found += [("sent", "sent for a step", "B")] * alike
    if len({one.devices for one in measured}) > 1:
        found.append(("devices", "devices", ""))
    return found


def _write_title_and_notes(figure: Figure, comparison: Comparison, notes: Iterable[str], look: Look) -> tuple[int, int]:
    """Write the title of a comparison above, and its notes below the panels; return the lines of both."""
    measured = comparison.measured
    common = [f"{name} = {getattr(measured[0], name)}" for name in ("n", "m") if _alike(measured, name)]
    heads = [head for head in comparison.heads if head != SPLIT_NOTE] or [", ".join(common)] * bool(common)
    words, notes = ["Schedules side by side", *heads], [*[SPLIT_NOTE] * comparison.split, *notes]
    room = 72 * figure.get_figwidth() - 20
    title = _wrapped(label("; ".join(words) if look.title is None else look.title, 300), room / _BOLD, _HEAD)
    if title != [""]:
        figure.suptitle("\n".join(title), x=0.012, ha="left", fontsize=_HEAD, fontweight="bold", color=INK, gid=TITLE)
    lines = [part for text in notes for part in _wrapped(label(text, 1000), room, _NOTE)]
    if lines:
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + 0.14 * len(lines))
        figure.supxlabel("\n".join(lines), x=0.012, ha="left", fontsize=_NOTE, color=GREY)
    return len(title), len(lines)


def _alike(measured: Sequence[Measured], name: str) -> bool:
    return len({getattr(one, name) for one in measured}) == 1


def _wrapped(text: str, width: float, size: float) -> list[str]:
    """Return a text in lines that are at most so wide in letters of that size, both in points."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        lines = [*lines, word] if lines[-1] and width_of(longer, size) > width else [*lines[:-1], longer]
    return lines


def _draw_column(axes: Axes, measured: Sequence[Measured], column: str, unit: str, excess: str) -> None:
    """Draw the bars of a column, with their numbers, and what is added to memory that no device has."""
    values = [one.value("50%" if column == "step" and one.steps else column) for one in measured]
    _draw_bars(axes, values, COLOURS[4] if column == "bubble" else COLOURS[0], column)
    if column == "bubble":
        _draw_bars(axes, [one.exposed for one in measured], COLOURS[0], "exposed")
    for row, (one, value) in enumerate(zip(measured, values, strict=True)):
        words, ink, right = _bar_text(value, unit), INK, value or 0
        if column == "step" and one.steps:
            right = _draw_quantiles(axes, row, one.steps)
        if column == "memory" and not one.fits:
            words, ink = words + excess, COLOURS[5]
        place = (right, row), (3, 0)
        axes.annotate(words, *place, textcoords="offset points", va="center", fontsize=7.5, color=ink)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False)


def _draw_bars(axes: Axes, values: Sequence[float | None], colour: str, gid: str) -> None:
    widths = [value or 0 for value in values]
    for row, bar in enumerate(axes.barh(range(len(widths)), widths, height=0.62, color=colour)):
        bar.set_gid(f"{gid}-{row}")


def _draw_quantiles(axes: Axes, row: int, steps: dict[str, float]) -> float:
    """Draw a line from the 5 % to the 95 % quantile, and return its right end."""
    low, median, high = (steps[name] for name in ("5%", "50%", "95%"))
    error = [[median - low], [high - median]]
    line = axes.errorbar(median, row, xerr=error, color=INK, linewidth=1.0, capsize=2.5)
    for part in line.lines[2]:
        part.set_gid(f"step-{row}-from-5-to-95")
    return high


def _row_labels(comparison: Comparison) -> list[str]:
    """Return the schedule of each row with its mark; with its rule and options where another row has the same."""
    measured, labels = comparison.measured, []
    for one in measured:
        alike = [other for other in measured if other.schedule == one.schedule]
        words = [one.schedule + comparison.mark(one), *(f"{name} {value}" for name, value in one.asked.items())]
        labels.append(label(", ".join(words + [one.rule] * (len({other.rule for other in alike}) > 1))))
    return labels


def _bar_text(value: float | None, unit: str) -> str:
    """Return the number at the end of a bar; `-` for None."""
    if value is None:
        return "-"
    if unit in ("", "number"):
        return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"
    return short_text(value, unit, 4 if unit == "%" else 3)


class _Point(NamedTuple):
    """Runs that have the same memory and the same bubble."""

    memory: int
    bubble: float
    runs: tuple[Measured, ...]

    @property
    def fits(self) -> bool:
        """Whether all of them fit."""
        return all(one.fits for one in self.runs)


def bubble_over_memory(comparison: Comparison, look: Look = AS_DRAWN) -> Figure:
    """Draw bubble over memory as named points; a line joins the Pareto front of runs on equally many devices."""
    at: dict[tuple[int, float], list[Measured]] = defaultdict(list)
    for one in comparison.measured:
        at[one.memory, one.bubble].append(one)
    points = [_Point(memory, bubble, tuple(runs)) for (memory, bubble), runs in sorted(at.items())]
    wide = _width(look, _WIDE)
    figure = Figure(figsize=(wide, _HIGH * max(1.0, wide / _WIDE) ** 0.5))
    counts_differ = not _alike(comparison.measured, "devices")
    notes = ["in brackets: devices; a line joins the best of those on equally many"] * counts_differ
    notes += ["red: more than a device has"] * (not all(point.fits for point in points))
    titles, lines = _write_title_and_notes(figure, comparison, [*notes, *comparison.notes], look)
    high = look.high(figure.get_figheight() * _factor(look)) / _factor(look)
    figure.set_size_inches(wide, high)
    lower, upper = _LOWER + 0.14 * lines, _UPPER + 0.17 * (titles - 1)
    if high < lower + upper + 1:
        raise RequestError("height", "has no room for the points and the notes below them; give more")
    size = (wide - _LEFT - _RIGHT) / wide, (high - lower - upper) / high
    axes = figure.add_axes((_LEFT / wide, lower / high, *size))
    _set_up_axes(axes, points, slots=comparison.slots)
    fronts = _draw_fronts(axes, comparison.measured)
    tight = next((name for name in ("for", "width", "height", "font-size") if name in look.given), "")
    _draw_points(axes, points, fronts, counts_differ=counts_differ, tight=tight)
    return _enlarged(figure, look)


def _set_up_axes(axes: Axes, points: Sequence[_Point], *, slots: bool) -> None:
    """Set up axes from 0, with room for names at the right and above."""
    plain(axes, "")
    most = _most_drawn(points)
    axes.set(xlim=(0, 1.15 * most or 1), ylim=(-0.02, 1.12 * max(point.bubble for point in points) or 1))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    unit = "stages' worth" if slots else one_unit(axes.xaxis, "B", most)
    axes.set_xlabel(f"memory of the fullest device, {unit}")
    heading = "bubble: share of the devices' time that is idle"
    high = axes.get_window_extent().height / axes.figure.dpi * 72
    axes.set_ylabel(heading if width_of(heading, 10) < high + 40 else "bubble")


def _most_drawn(points: Sequence[_Point]) -> float:
    """Return the end of the axis of memory: near that of the fullest run that fits, or of all if none does."""
    most = max(point.memory for point in points)
    return min(most, _ROOM * max((point.memory for point in points if point.fits), default=most)) or 1


def _draw_fronts(axes: Axes, measured: Sequence[Measured]) -> set[tuple[int, float]]:
    """Draw a Pareto front for each number of devices on which several runs are; return the points of all fronts."""
    best: set[tuple[int, float]] = set()
    by_devices = sorted(measured, key=lambda one: (one.devices, one.memory, one.bubble))
    for devices, runs in groupby(by_devices, key=lambda one: one.devices):
        front = _pareto_front([(one.memory, one.bubble) for one in runs])
        best |= set(front)
        style: dict[str, Any] = {"color": GREY, "linewidth": 0.8, "drawstyle": "steps-post", "zorder": 1}
        axes.plot(*zip(*front, strict=True), gid=f"best-of-{devices}", **style)
    return best


def _draw_points(
    axes: Axes, points: Sequence[_Point], best: set[tuple[int, float]], *, counts_differ: bool, tight: str
) -> None:
    """Draw points with the names of their runs, none on another; a line leads to a name that stands further away.

    Where a setting makes axes so `tight` that a name has no room, it is refused.
    """
    end = axes.get_xlim()[1]
    places = [(min(point.memory, end), point.bubble) for point in points]
    spots = [tuple(axes.transData.transform(place) / axes.figure.dpi * 72) for place in places]
    frame = axes.get_window_extent()
    bounds = tuple(edge / axes.figure.dpi * 72 for edge in (frame.x0, frame.x1, frame.y0, frame.y1))
    taken = [(x - 3.5, x + 3.5, y - 3.5, y + 3.5) for x, y in spots]
    numbered = enumerate(zip(points, places, spots, strict=True))
    for k, (point, at, spot) in sorted(numbered, key=lambda one: one[1][0].memory <= end):  # those at the edge first
        ink = COLOURS[5] if not point.fits else COLOURS[0] if point[:2] in best else INK
        mark = "o" if point.memory <= end else ">"
        axes.scatter(*at, s=26, color=ink, marker=mark, gid=f"point-{k}", clip_on=False, zorder=3)
        lines = _names(point, counts_differ=counts_differ, beyond=mark == ">")
        width, height = max(width_of(line, _LABEL) for line in lines), _LETTER * len(lines)
        place, box = _place(spot, (width, height), taken, bounds, tight)
        taken.append(box)
        side, line = (
            {1: "left", -1: "right", 0: "center"},
            {"color": GREY, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3},
        )
        axes.annotate(
            "\n".join(lines),
            at,
            place,
            textcoords="offset points",
            ha=side[(place[0] > 0) - (place[0] < 0)],
            va="center" if not place[1] else "bottom" if place[1] > 0 else "top",
            fontsize=_LABEL,
            color=ink,
            linespacing=_LETTER / _LABEL / 1.2,
            arrowprops={"arrowstyle": "-", **line} if max(map(abs, place)) > 8 else None,
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.4},
            gid=f"name-{k}",
        )


def _place(
    spot: tuple[float, ...], size: tuple[float, float], taken: Iterable[Box], bounds: tuple[float, ...], tight: str
) -> tuple[tuple[float, float], Box]:
    """Return the nearest free place of a name from its spot, and its box; beside the spot if there is none."""
    boxes = [(place, _label_box(spot, place, *size)) for place in _PLACES]
    free = ((place, box) for place, box in boxes if _is_free(box, taken, bounds))
    found = next(free, None)
    if found is None and tight:
        raise RequestError(tight, "leaves no room for the names of points; compare fewer, or draw a larger picture")
    return found or boxes[0]


def _names(point: _Point, *, counts_differ: bool, beyond: bool) -> list[str]:
    """Return the lines of a point's label: its schedules, at most three in a line; and memory beyond the axis."""
    names = [f"{one.schedule} ({one.devices})" if counts_differ else one.schedule for one in point.runs]
    names = list(dict.fromkeys(names))
    lines = [", ".join(names[k : k + 3]) + "," * (k + 3 < len(names)) for k in range(0, len(names), 3)]
    return [*map(label, lines[:-1]), label(lines[-1] + f": {short_text(point.memory, 'B', 3)}" * beyond)]


def _label_box(spot: tuple[float, ...], place: tuple[float, float], width: float, height: float) -> Box:
    """Return the box of a label of that size at a place beside a spot."""
    x, y = spot[0] + place[0], spot[1] + place[1]
    left = x - width * (0.5 - 0.5 * ((place[0] > 0) - (place[0] < 0)))
    low = y - height * (0.5 - 0.5 * ((place[1] > 0) - (place[1] < 0)))
    return left, left + width, low, low + height


def _is_free(box: Box, taken: Iterable[Box], bounds: tuple[float, ...]) -> bool:
    """Return whether a box lies inside of bounds and on no other box."""
    left, right, low, high = box
    inside = bounds[0] <= left and right <= bounds[1] + 12 and bounds[2] <= low and high <= bounds[3] + 8
    return inside and all(right <= a or b <= left or high <= c or d <= low for a, b, c, d in taken)


def _pareto_front(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the sorted points without those that have another one below and to the left."""
    front: list[tuple[int, float]] = []
    for point in points:
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front

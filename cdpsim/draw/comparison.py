"""Comparisons of schedules: bars of every measure, and points of the idle time over the memory that they need."""

from collections import defaultdict
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from cdpsim.draw.canvas import GREY, INK, caption, label, plain
from cdpsim.draw.palette import COLOURS
from cdpsim.files.units import short_text
from cdpsim.studies.compare import Measured, rate_column, table_notes

_MEASURES = (  # the column, its title and its unit with real costs
    ("step", "training step", "s"),
    ("rate", "micro-batches", "/s"),
    ("samples", "samples", "/s"),
    ("bubble", "share of time idle", "%"),
    ("memory", "memory, fullest device", "B"),
    ("sent", "sent for a step", "B"),
    ("devices", "devices", ""),
)


def comparison_bars(measured: Sequence[Measured], *, in_slots: bool) -> Figure:
    """Draw the figures of runs as bars; of the idle time, the part that waits for messages is darker.

    Of many runs the bar is the median step, with a line from the 5 % quantile to that of 95 %.
    """
    left_out = {"rate", "samples"} - {rate_column(measured)}
    measures = [measure for measure in _MEASURES if measure[0] not in left_out]
    figure = Figure(figsize=(12.5, 0.9 + 0.28 * len(measured)), layout="constrained")
    caption(figure, table_notes(measured))
    panels = figure.subplots(1, len(measures), sharey=True)
    for axes, (column, title, unit) in zip(panels, measures, strict=True):
        plain(axes, title, size=9)
        _draw_column(axes, measured, column, "" if in_slots and unit != "%" else unit)
    panels[0].set_yticks(range(len(measured)), [_row_label(one, measured) for one in measured], fontsize=8.5)
    panels[0].set_ylim(len(measured) - 0.4, -0.6)
    dark = ["dark: waiting for a message"] * any(one.exposed for one in measured)
    if any(one.steps for one in measured):
        words = "; ".join(["time of a step: the median of the runs, and from their 5 % to their 95 % quantile", *dark])
        figure.supxlabel(words, x=0.99, ha="right", fontsize=7.5, color=GREY)
    elif dark:
        figure.text(0.99, 0.005, dark[0], ha="right", fontsize=7.5, color=GREY)
    return figure


def _draw_column(axes: Axes, measured: Sequence[Measured], column: str, unit: str) -> None:
    """Draw the bars of a column, with their numbers."""
    values = [one.value("50%" if column == "step" and one.steps else column) for one in measured]
    _draw_bars(axes, values, COLOURS[4] if column == "bubble" else COLOURS[0], column)
    if column == "bubble":
        _draw_bars(axes, [one.exposed for one in measured], COLOURS[0], "exposed")
    for row, (one, value) in enumerate(zip(measured, values, strict=True)):
        words, ink, right = _bar_text(value, unit), INK, value or 0
        if column == "step" and one.steps:
            right = _draw_quantiles(axes, row, one.steps)
        if column == "memory" and not one.fits:
            words, ink = f"{words}, too much", COLOURS[5]
        place = (right, row), (3, 0)
        axes.annotate(words, *place, textcoords="offset points", va="center", fontsize=7.5, color=ink)
    axes.set_xlim(0, 1.45 * max(value or 0 for value in values) or 1)
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


def _row_label(one: Measured, measured: Sequence[Measured]) -> str:
    """Return the schedule of a row, with its rule if another row has the same schedule."""
    alike = [other for other in measured if other.schedule == one.schedule]
    return label(one.schedule if len(alike) == 1 else f"{one.schedule}, {one.rule}")


def _bar_text(value: float | None, unit: str) -> str:
    """Return the number at the end of a bar; `-` for None."""
    if value is None:
        return "-"
    if unit:
        return short_text(value, unit, 3)
    return f"{value:.10g}" if value == int(value) else f"{value:.4g}"


def bubble_over_memory(measured: Sequence[Measured], *, in_slots: bool) -> Figure:
    """Draw bubble over memory as numbered points; a line joins the Pareto front."""
    runs_at: dict[tuple[int, float], list[Measured]] = defaultdict(list)
    for one in measured:
        runs_at[one.memory, one.bubble].append(one)
    points = sorted(runs_at)
    front = _pareto_front(points)
    counts_differ = len({one.devices for one in measured}) > 1
    figure = Figure(figsize=(9.0, max(4.2, 0.8 + 0.19 * len(points))), layout="constrained")
    caption(figure, table_notes(measured))
    axes = figure.subplots()
    plain(axes, "share of time idle, over the memory of the fullest device", size=10)
    axes.set_xscale("log")
    axes.plot(*zip(*front, strict=True), color=GREY, linewidth=0.8, drawstyle="steps-post", gid="best", zorder=1)
    for k, point in enumerate(points):
        fits = all(one.fits for one in runs_at[point])
        ink = COLOURS[5] if not fits else COLOURS[0] if point in front else INK
        axes.scatter(*point, s=28, color=ink, gid=f"point-{k}", clip_on=False, zorder=2)
        axes.annotate(str(k + 1), point, xytext=(0, 5), textcoords="offset points", ha="center", fontsize=7, color=ink)
        names = [f"{one.schedule} ({one.devices})" if counts_differ else one.schedule for one in runs_at[point]]
        words = f"{k + 1}  {', '.join(names)}" + ("" if fits else ", too much")
        height = 1.0 - k / max(len(points), 18)
        axes.annotate(label(words), (1.03, height), xycoords="axes fraction", va="top", fontsize=7.5, color=ink)
    _set_up_axes(axes, max(one.bubble for one in measured), in_slots=in_slots)
    if counts_differ:
        figure.text(0.99, 0.005, "in brackets: devices", ha="right", fontsize=7.5, color=GREY)
    return figure


def _set_up_axes(axes: Axes, largest: float, *, in_slots: bool) -> None:
    axes.set_ylim(0, 1.12 * largest or 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(unit="" if in_slots else "B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("stages' worth" if in_slots else "memory", fontsize=8.5)


def _pareto_front(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the sorted points without those that have another one below and to the left."""
    front: list[tuple[int, float]] = []
    for point in points:
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front

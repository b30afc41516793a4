"""Bubble over memory: the idle time of schedules over the memory that they need, a point for each."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdpsim.draw.canvas import GREY, INK, caption, label, plain
from cdpsim.draw.palette import COLOURS
from cdpsim.studies.compare import Measured, table_notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def bubble_over_memory(measured: Sequence[Measured], *, in_slots: bool) -> "Figure":
    """Draw bubble over memory as numbered points; a line joins the Pareto front."""
    from matplotlib.figure import Figure

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


def _set_up_axes(axes: "Axes", largest: float, *, in_slots: bool) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

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

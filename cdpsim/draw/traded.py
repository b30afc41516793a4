"""What idle time is bought with: the bubble of schedules over the memory that they need, a point for each."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdpsim.draw.canvas import GREY, INK, caption, label, plain
from cdpsim.draw.palette import COLOURS
from cdpsim.studies.compare import Measured, table_notes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def traded(measured: Sequence[Measured], *, in_slots: bool) -> "Figure":
    """Draw bubble over memory, numbered; a line joins those that nothing beats in both."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    at: dict[tuple[int, float], list[Measured]] = defaultdict(list)
    for one in measured:
        at[one.memory, one.bubble].append(one)
    points = sorted(at)
    best = _best(points)
    figure = Figure(figsize=(9.0, max(4.2, 0.8 + 0.19 * len(points))), layout="constrained")
    caption(figure, table_notes(measured))
    axes = figure.subplots()
    plain(axes, "share of time idle, over the memory of the fullest device", size=10)
    axes.set_xscale("log")
    axes.plot(*zip(*best, strict=True), color=GREY, linewidth=0.8, drawstyle="steps-post", gid="best", zorder=1)
    for k, (point, here) in enumerate((point, at[point]) for point in points):
        fits = all(one.fits for one in here)
        ink = COLOURS[5] if not fits else COLOURS[0] if point in best else INK
        axes.scatter(*point, s=28, color=ink, gid=f"point-{k}", clip_on=False, zorder=2)
        axes.annotate(str(k + 1), point, xytext=(0, 5), textcoords="offset points", ha="center", fontsize=7, color=ink)
        words = f"{k + 1}  {', '.join(_name(one, measured) for one in here)}" + ("" if fits else ", too much")
        height = 1.0 - k / max(len(points), 18)
        axes.annotate(label(words), (1.03, height), xycoords="axes fraction", va="top", fontsize=7.5, color=ink)
    axes.set_ylim(0, 1.12 * max(one.bubble for one in measured) or 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(unit="" if in_slots else "B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("stages' worth" if in_slots else "memory", fontsize=8.5)
    if len({one.devices for one in measured}) > 1:
        figure.text(0.99, 0.005, "in brackets: devices", ha="right", fontsize=7.5, color=GREY)
    return figure


def _best(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points that no other one is below and to the left of."""
    best: list[tuple[int, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _name(one: Measured, measured: Sequence[Measured]) -> str:
    """A schedule, with its devices where not all have as many."""
    alike = len({other.devices for other in measured}) == 1
    return one.schedule if alike else f"{one.schedule} ({one.devices})"

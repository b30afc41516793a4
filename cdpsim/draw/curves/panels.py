"""The panels of curves over time: axes with units, steps and draw_boxes, marked peaks, legends, titles, refusals."""

from collections.abc import Sequence
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure, SubFigure
from matplotlib.markers import CARETDOWN
from matplotlib.patches import StepPatch
from matplotlib.ticker import EngFormatter, MaxNLocator

from cdpsim.draw import views
from cdpsim.draw.canvas import INK, amount_text, label, plain
from cdpsim.draw.curves.step_functions import Series, end_of_run
from cdpsim.errors import RequestError
from cdpsim.numeric.close_times import CLOSE_TIMES
from cdpsim.trace import Trace

PAGE_WIDTH = 7.2  # inches: a page's text
MOST_CURVES = 16  # on one pair of axes
_TITLE, _NAME = 80, 40  # letters for which there is room; a title may have two lines


class Scale(NamedTuple):
    """The scale that all panels of a figure share: its end, its units, and whether values are of single moments."""

    end: float
    in_slots: bool
    unit: str = "B"
    at_once: bool = False

    def amount(self, value: float, unit: str = "") -> str:
        """Write a number with its unit, by default that of the scale: `36`, or `1.5 GB`."""
        return amount_text(value, "" if self.in_slots else unit or self.unit)

    def moment(self, time: float) -> str:
        """Write a time: `slot 7`, or `12.5 ms`."""
        return f"slot {time:,}" if self.in_slots else amount_text(time, "s")

    def peak(self, series: Series) -> str:
        """Write a peak and its time."""
        time, value = peak(series)
        return f"peak {self.amount(value)} at {self.moment(time)}"


def scale_of(traces: Sequence[Trace], unit: str = "B", *, at_once: bool = False) -> Scale:
    """Return the scale of one figure of several traces."""
    return Scale(max(map(end_of_run, traces)), traces[0].in_slots, unit, at_once)


def refuse_undrawable(traces: Sequence[Trace]) -> None:
    """Refuse traces that cannot stand in one figure."""
    if not traces:
        raise RequestError("traces", "there are none; give at least one")
    for trace in traces:
        views.refuse_empty(trace)
    if len({trace.in_slots for trace in traces}) > 1:
        raise RequestError("traces", "some are in slots and some in seconds; give all the same model and cluster")
    if len(traces) > MOST_CURVES:
        raise RequestError("traces", f"{len(traces)} curves cannot be told apart; give at most {MOST_CURVES}")


def titles(traces: Sequence[Trace]) -> tuple[str, list[str]]:
    """Return a title that all traces have in common, and a name for each of them, shortened to the room."""
    words = list(map(views.title_words, traces))
    common = [word for word in words[0] if all(word in others for others in words)]
    names = [", ".join(word for word in each if word not in common) or each[0] for each in words]
    return label(", ".join(common), 2 * _TITLE), [label(text, _NAME) for text in names]


def peak(series: Series) -> tuple[float, float]:
    """Return (time, value) of the first largest total; totals that differ by rounding alone are equal."""
    if not len(series.time):
        return 0, 0
    total = series.total
    most = total.max()
    at = int((total >= most - (CLOSE_TIMES * most if total.dtype.kind == "f" else 0)).argmax())
    return series.time[at].item(), most.item()


def panel(axes: Axes, heading: str, scale: Scale, most: float, ylabel: str = "", room: float = 1.2) -> None:
    """Set up axes from 0 to the end of the run, and to `room` times the most, so that a peak's label has room."""
    small = room < 1.2
    plain(axes, heading, 8 if small else 9.5)
    axes.tick_params(labelsize=6.5 if small else 7.5)
    axes.set(xlim=(0, scale.end), ylim=(0, room * most if most else 1), ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(4 if small else 9, integer=scale.in_slots))
    axes.yaxis.set_major_locator(MaxNLocator(3 if small else 5, integer=scale.in_slots))
    if not scale.in_slots:
        axes.xaxis.set_major_formatter(EngFormatter("s"))
        axes.yaxis.set_major_formatter(EngFormatter(scale.unit))
    if not small:
        axes.set_xlabel("time, slots" if scale.in_slots else "time")


def steps(
    axes: Axes, time: np.ndarray, value: np.ndarray, end: float, gid: str, baseline: Any = None, **style: Any
) -> StepPatch:
    """Draw a step function until `end`, as a line, or as an area from its baseline; the limits of the axes stay."""
    patch = StepPatch(value, np.append(time, end), baseline=baseline, fill=baseline is not None, gid=gid, **style)
    axes.add_artist(patch)
    return patch


def draw_boxes(axes: Axes, left: Any, right: Any, low: Any, high: Any, **style: Any) -> PolyCollection:
    """Draw boxes as one collection; the limits of the axes stay."""
    corners = [np.stack(corner, axis=-1) for corner in ((left, low), (left, high), (right, high), (right, low))]
    collection = PolyCollection(list(np.stack(corners, axis=1)), **style)
    axes.add_collection(collection, autolim=False)
    return collection


def mark_peak(axes: Axes, at: tuple[float, float], text: str, gid: str) -> None:
    """Mark a peak, with its label on the side where there is room."""
    low, high = axes.get_xlim()
    share = (at[0] - low) / (high - low)
    side, shift = ("left", -3) if share < 0.33 else ("right", 3) if share > 0.67 else ("center", 0)
    (spot,) = axes.plot([at[0]], [at[1]], marker=CARETDOWN, markersize=5, color=INK, markeredgecolor="white")
    spot.set(gid=gid, zorder=5, markeredgewidth=0.5, clip_on=False)
    if text:
        words = axes.annotate(text, at, (shift, 6), textcoords="offset points", ha=side, fontsize=8, color=INK)
        words.set_zorder(6)
        words.set_bbox({"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.8})


def level(axes: Axes, value: float, text: str, gid: str) -> None:
    """Draw a line across the panel at a value, named at the right edge."""
    axes.axhline(value, color=INK, linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=2.5, gid=gid)
    write_beside(axes, value, text, 4)


def write_beside(axes: Axes, value: float, text: str, shift: float) -> None:
    """Write a text right of the axes at the height of a value."""
    frame: Any = ("axes fraction", "data")
    axes.annotate(text, (1, value), (shift, 0), frame, "offset points", va="center", fontsize=7.5)


def figure_of(heading: str, heights: Sequence[float]) -> tuple[Figure, list[SubFigure]]:
    """Return a figure of a page's width with a title, and its parts below each other."""
    lines = wrap(heading, _TITLE)
    figure = Figure(figsize=(PAGE_WIDTH, sum(heights) + 0.4 + 0.2 * len(lines)), layout="constrained")
    figure.suptitle("\n".join(lines), x=0.012, ha="left", fontsize=10.5, fontweight="bold", color=INK)
    return figure, list(figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat)


def legend(figure: Figure, handles: Sequence[Artist], columns: int = 5) -> None:
    """Add a legend below the panels, if there is anything to name."""
    if handles:
        columns = min(columns, len(handles))
        figure.legend(handles=list(handles), loc="outside lower left", ncols=columns, fontsize=8, frameon=False)

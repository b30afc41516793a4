"""What curves over time have in common: axes with units, marked peaks, legends, a title, what cannot be drawn."""

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cdpsim.draw import views
from cdpsim.draw.canvas import INK, label, plain
from cdpsim.draw.curves.series import SAME, Series, span
from cdpsim.errors import RequestError
from cdpsim.trace import Trace

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.patches import StepPatch

WIDTH = 7.2  # inches: a page's text
CURVES = 16  # on one pair of axes
TITLE, NAME = 80, 40  # letters for which there is room; a title may have two lines


class Frame(NamedTuple):
    """What all panels of a figure share: until when, in which units, and whether values are of single moments."""

    end: float
    in_slots: bool
    unit: str = "B"
    at_once: bool = False

    def amount(self, value: float) -> str:
        """A number in words: `36`, or with its unit `1.5 GB`."""
        return _engineering(value, "" if self.in_slots else self.unit)

    def moment(self, time: float) -> str:
        """A time in words: `slot 7`, or `12.5 ms`."""
        return f"slot {time:,}" if self.in_slots else _engineering(time, "s")

    def peak(self, series: Series) -> str:
        """A peak and its time in words."""
        time, value = peak(series)
        return f"peak {self.amount(value)} at {self.moment(time)}"


def _engineering(value: float, unit: str) -> str:
    from matplotlib.ticker import EngFormatter

    if not unit:
        return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"
    return str(EngFormatter(unit)(float(f"{value:.3g}")))


def frame(traces: Sequence[Trace], unit: str = "B", *, at_once: bool = False) -> Frame:
    """The frame of one picture of several traces."""
    return Frame(max(map(span, traces)), traces[0].in_slots, unit, at_once)


def check(traces: Sequence[Trace]) -> None:
    """Refuse what cannot stand in one picture."""
    if not traces:
        raise RequestError("traces", "there are none; give at least one")
    for trace in traces:
        views.refuse_empty(trace)
    if len({trace.in_slots for trace in traces}) > 1:
        raise RequestError("traces", "some are in slots and some in seconds; give all the same model and cluster")
    if len(traces) > CURVES:
        raise RequestError("traces", f"{len(traces)} curves cannot be told apart; give at most {CURVES}")


def names(traces: Sequence[Trace]) -> tuple[str, list[str]]:
    """What all traces have in common, and what each has of its own, neither longer than there is room."""
    words = list(map(views.title_words, traces))
    common = [word for word in words[0] if all(word in others for others in words)]
    own = [", ".join(word for word in some if word not in common) or some[0] for some in words]
    return label(", ".join(common), 2 * TITLE), [label(text, NAME) for text in own]


def peak(series: Series) -> tuple[float, float]:
    """When the total is largest for the first time, not counting what rounding adds, and how large it is."""
    if not len(series.time):
        return 0, 0
    total = series.total
    most = total.max()
    at = int((total >= most - (SAME * most if total.dtype.kind == "f" else 0)).argmax())
    return series.time[at].item(), most.item()


def panel(axes: "Axes", heading: str, shared: Frame, most: float, room: float = 1.2) -> None:
    """Axes from 0 to the end of the run and to somewhat more than the most, so that a peak's label has room."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    small = room < 1.2
    plain(axes, heading, 8 if small else 9.5)
    axes.tick_params(labelsize=6.5 if small else 7.5)
    axes.set(xlim=(0, shared.end), ylim=(0, room * most if most else 1))
    axes.xaxis.set_major_locator(MaxNLocator(4 if small else 9, integer=shared.in_slots))
    axes.yaxis.set_major_locator(MaxNLocator(3 if small else 5, integer=shared.in_slots))
    if not shared.in_slots:
        axes.xaxis.set_major_formatter(EngFormatter("s"))
        axes.yaxis.set_major_formatter(EngFormatter(shared.unit))
    if not small:
        axes.set_xlabel("time, slots" if shared.in_slots else "time")


def steps(axes: "Axes", value: np.ndarray, edges: np.ndarray, gid: str, baseline: Any = None) -> "StepPatch":
    """A step function as a line, or as an area from its baseline; the limits of the axes stay as they are."""
    from matplotlib.patches import StepPatch

    patch = StepPatch(value, edges, baseline=baseline, fill=baseline is not None, gid=gid)
    axes.add_artist(patch)
    return patch


def mark(axes: "Axes", at: tuple[float, float], text: str, gid: str, shade: str = INK) -> None:
    """Mark a peak, its label on the side where there is room."""
    from matplotlib.markers import CARETDOWN

    low, high = axes.get_xlim()
    share = (at[0] - low) / (high - low)
    side, shift = ("left", -3) if share < 0.33 else ("right", 3) if share > 0.67 else ("center", 0)
    (spot,) = axes.plot([at[0]], [at[1]], marker=CARETDOWN, markersize=5, color=shade, markeredgecolor="white")
    spot.set(gid=gid, zorder=5, markeredgewidth=0.5, clip_on=False)
    if text:
        words = axes.annotate(text, at, (shift, 6), textcoords="offset points", ha=side, fontsize=8, color=INK)
        words.set_zorder(6)
        words.set_bbox({"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.8})


def level(axes: "Axes", value: float, text: str, gid: str) -> None:
    """A line at a value of the paper, named at the right edge."""
    line = axes.axhline(value, color=INK, linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=2.5)
    line.set_gid(gid)
    axes.annotate(text, (1, value), (4, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=7.5)


def figure_of(heading: str, heights: Sequence[float]) -> tuple["Figure", list["SubFigure"]]:
    """A figure of a page's width with a title, and parts below each other."""
    from matplotlib.figure import Figure

    lines = wrap(heading, TITLE)
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.4 + 0.2 * len(lines)), layout="constrained")
    figure.suptitle("\n".join(lines), x=0.012, ha="left", fontsize=10.5, fontweight="bold", color=INK)
    return figure, list(figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat)


def note(part: "SubFigure", text: str) -> None:
    """A heading over small panels."""
    part.suptitle(text, x=0.012, ha="left", fontsize=9.5, color=INK)


def legend(part: "Figure | SubFigure", handles: Sequence["Artist"], columns: int = 5) -> None:
    """Name what is drawn, below the panels."""
    if handles:
        columns = min(columns, len(handles))
        part.legend(handles=list(handles), loc="outside lower left", ncols=columns, fontsize=8, frameon=False)

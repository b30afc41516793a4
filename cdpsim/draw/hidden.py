"""What stays exposed of a training step over bandwidth, and from which bandwidth on all is hidden, over N."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cdpsim.draw.canvas import GREY, label, plain
from cdpsim.draw.palette import COLOURS, colour
from cdpsim.errors import RequestError
from cdpsim.studies.breakeven import BreakEven, StepCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_HEIGHT, _WIDTH = 3.6, 6.4  # inches, of a panel
_LINE = 0.19  # inches, of a legend
_MARKERS = "osD^vPXp"


def hidden(
    found: Sequence[BreakEven], factors: Sequence[float], curves: Sequence[StepCurve], *, share: float
) -> "Figure":
    """Draw a curve of steps for each schedule, and where there are several N a panel of break-evens over N.

    `factors` are the bandwidths of the curves' points as multiples of the cluster's own.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(_name(one, found) for one in found))
    if len(names) > len(COLOURS):
        raise RequestError("schedules", f"{len(names)} curves cannot be told apart; name at most {len(COLOURS)}")
    several = len({one.n for one in found}) > 1
    beside = 2 if several else 1
    legend = _LINE * (2 + -(-len(curves) // beside))
    figure = Figure(figsize=((1.9 if several else 1) * _WIDTH, _HEIGHT + legend), layout="constrained")
    panels = figure.subplots(1, beside, squeeze=False)[0]
    lines = _over_bandwidth(panels[0], factors, curves, names, found, share)
    if several:
        _over_n(panels[1], found, names)
    look: dict[str, Any] = {"fontsize": 8, "title_fontsize": 8, "frameon": False, "alignment": "left", "ncols": beside}
    figure.legend(handles=lines, loc="outside lower left", title=_title(share, curves[0][0].n), **look)
    return figure


def _over_bandwidth(
    axes: "Axes",
    factors: Sequence[float],
    curves: Sequence[StepCurve],
    names: Sequence[str],
    found: Sequence[BreakEven],
    share: float,
) -> list["Line2D"]:
    """Draw the curves; gives what a legend shows of them."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    scale, lines = _common([one for one, _ in curves]), []
    plain(axes, f"share of a training step that waits, N = {curves[0][0].n}")
    for one, steps in curves:
        place = names.index(_name(one, found))
        exposed = [max(0.0, 1 - one.free / step) for step in steps]
        x = [factor * scale for factor in factors]
        (line,) = axes.plot(x, exposed, color=colour(place), linewidth=1.6)
        line.set_gid(f"exposed-{place}")
        look: dict[str, Any] = {"color": colour(place), "marker": _MARKERS[place], "linewidth": 1.6, "markersize": 5}
        lines.append(Line2D([], [], label=_said(one, label(names[place], 40)), **look))
        if one.factor:
            level = share / (1 + share)  # of a step that is longer by that share
            _mark(axes, one.factor * scale, level, place, f"break-even-{place}")
    axes.set_xscale("log")
    axes.set(xlim=(factors[0] * scale, factors[-1] * scale), ylim=(0, None), ylabel="exposed")
    axes.set_ylim(-0.02 * axes.get_ylim()[1], axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _cluster(axes, scale, across=True)
    _name_bandwidths(axes, "x", scale)
    return lines


def _over_n(axes: "Axes", found: Sequence[BreakEven], names: Sequence[str]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    scale = _common(found)
    plain(axes, "bandwidth from which on messages are hidden")
    for place, name in enumerate(names):
        own = [one for one in found if _name(one, found) == name and one.factor]
        x, y = [one.n for one in own], [(one.factor or 0) * scale for one in own]
        look: dict[str, Any] = {"color": colour(place), "marker": _MARKERS[place], "markersize": 5, "linewidth": 1.6}
        (line,) = axes.plot(x, y, **look)
        line.set_gid(f"over-n-{place}")
    numbers = sorted({one.n for one in found})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.xaxis.set_minor_locator(NullLocator())
    values = [scale, *(one.factor * scale for one in found if one.factor)]
    low, high = min(values) / 1.6, max(values) * 1.6
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="N", xlim=(numbers[0] / 1.15, numbers[-1] * 1.15), ylim=(low, high))
    _cluster(axes, scale, across=False)
    _name_bandwidths(axes, "y", scale)


def _cluster(axes: "Axes", scale: float, *, across: bool) -> None:
    """Draw where the cluster itself is: across the axis of bandwidths, or along it."""
    line = axes.axvline if across else axes.axhline
    line(scale, color=GREY, linewidth=1, linestyle=(0, (4, 3))).set_gid("own" if across else "own-over-n")
    place: tuple[float, float] = (scale, 0.985) if across else (1, scale)
    frame: Any = ("data", "axes fraction") if across else ("axes fraction", "data")
    look: dict[str, Any] = {"color": GREY, "fontsize": 8, "ha": "left", "va": "top" if across else "center"}
    axes.annotate("this cluster", place, xycoords=frame, xytext=(4, 0), textcoords="offset points", **look)


def _mark(axes: "Axes", x: float, y: float, place: int, gid: str) -> None:
    look: dict[str, Any] = {
        "color": colour(place),
        "markersize": 6,
        "markeredgecolor": "white",
        "zorder": 3,
        "clip_on": False,
    }
    (mark,) = axes.plot([x], [y], _MARKERS[place], **look)
    mark.set_gid(gid)


def _common(found: Sequence[BreakEven]) -> float:
    """The bandwidth that all start from; 1 where they differ, as then only multiples can be compared."""
    own = {one.bandwidth for one in found if one.bandwidth is not None}
    return own.pop() if len(own) == 1 else 1.0


def _name_bandwidths(axes: "Axes", which: str, scale: float) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_minor_formatter(NullFormatter())
    if scale == 1.0:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_label_text("bandwidths, as multiples of this cluster's")
    else:
        axis.set_major_formatter(EngFormatter("B/s"))
        axis.set_label_text("narrowest bandwidth between two devices")


def _name(one: BreakEven, found: Sequence[BreakEven]) -> str:
    """A schedule, with its rule where another run of it has another."""
    rules = {other.rule for other in found if other.schedule == one.schedule}
    return one.schedule if len(rules) == 1 else f"{one.schedule}, {one.rule}"


def _said(one: BreakEven, name: str) -> str:
    """What a legend says of a curve."""
    if one.break_even is None:
        return f"{name}: never; latency alone costs {100 * one.latency:.2g} %"
    if not one.break_even:
        return f"{name}: any bandwidth"
    from quantiphy import Quantity

    amount = Quantity(one.break_even, "B/s").render(prec=2)
    return f"{name}: {amount}, {one.factor:.3g} times this cluster's"


def _title(share: float, n: int) -> str:
    return f"hidden at N = {n}, but for {100 * share:g} % of the step, from"

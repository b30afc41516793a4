"""Break-even: the exposed share of a training step over bandwidth, and over N the bandwidth that hides messages."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, PercentFormatter

from cdpsim.draw.canvas import GREY, label, one_unit, plain
from cdpsim.draw.look import AS_DRAWN, Look
from cdpsim.draw.palette import COLOURS, colour
from cdpsim.draw.sheet import finish, new_page
from cdpsim.errors import RequestError
from cdpsim.files.units import short_text
from cdpsim.studies.breakeven import BreakEven, StepCurve

_HEIGHT, _WIDTH = 3.6, 6.4  # inches, of a panel
_LEAST_OF_TWO = 8.0  # inches: less has no room for two panels side by side
_MARKERS = "osD^vPXp"
_OWN: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": (0, (4, 3))}
_NAME: dict[str, Any] = {"textcoords": "offset points", "color": GREY, "fontsize": 8}


def break_even_curves(
    found: Sequence[BreakEven],
    factors: Sequence[float],
    curves: Sequence[StepCurve],
    *,
    share: float,
    look: Look = AS_DRAWN,
) -> Figure:
    """Draw the step times of each schedule over bandwidth, and a panel of break-evens over N if there are several N.

    `factors` are the bandwidths of the curves' points as multiples of the cluster's own.
    """
    names = list(dict.fromkeys(_curve_name(one, found) for one in found))
    if len(names) > len(COLOURS):
        raise RequestError("schedules", f"{len(names)} curves cannot be told apart; name at most {len(COLOURS)}")
    panels = 1 + (len({one.n for one in found}) > 1)
    down = panels if look.inches_wide and look.inches_wide < _LEAST_OF_TWO else 1
    figure = new_page("", _HEIGHT * down, look, _WIDTH if down == panels else 1.9 * _WIDTH)
    axes, *over_n = figure.subplots(down, panels // down, squeeze=False).flat
    numbers = [names.index(_curve_name(one, found)) for one, _ in curves]
    _over_bandwidth(axes, factors, curves, numbers, share)
    for each in over_n:
        _over_n(each, found, names)
    entries = [_entry(one, names[k], k) for (one, _), k in zip(curves, numbers, strict=True)]
    words = f"hidden at N = {curves[0][0].n}, but for {100 * share:g} % of the step, from"
    return finish(figure, look, {figure: entries}, columns=panels, title=words)


def _style(number: int) -> dict[str, Any]:
    return {"color": colour(number), "marker": _MARKERS[number], "linewidth": 1.6, "markersize": 5}


def _over_bandwidth(
    axes: Axes, factors: Sequence[float], curves: Sequence[StepCurve], numbers: Sequence[int], share: float
) -> None:
    """Draw the exposed share of steps over bandwidth, with the break-evens marked."""
    scale = _common_bandwidth([one for one, _ in curves])
    bandwidths = [factor * scale for factor in factors]
    plain(axes, f"share of a training step that waits, N = {curves[0][0].n}")
    for (one, steps), k in zip(curves, numbers, strict=True):
        exposed = [max(0.0, 1 - one.free / step) for step in steps]
        axes.plot(bandwidths, exposed, color=colour(k), linewidth=1.6, gid=f"exposed-{k}")
        if one.factor:
            level = share / (1 + share)  # of a step that is longer by that share
            look: dict[str, Any] = {"color": colour(k), "markersize": 6, "markeredgecolor": "white", "zorder": 3}
            axes.plot([one.factor * scale], [level], _MARKERS[k], **look, clip_on=False, gid=f"break-even-{k}")
    axes.set(xscale="log", xlim=(bandwidths[0], bandwidths[-1]), ylabel="exposed")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.axvline(scale, gid="own", **_OWN)
    axes.annotate("this cluster", (scale, 0.985), (4, 0), ("data", "axes fraction"), va="top", **_NAME)
    _name_bandwidths(axes.xaxis, scale)


def _over_n(axes: Axes, found: Sequence[BreakEven], names: Sequence[str]) -> None:
    scale = _common_bandwidth(found)
    plain(axes, "bandwidth from which on messages are hidden")
    for k, name in enumerate(names):
        points = [(one.n, one.factor * scale) for one in found if _curve_name(one, found) == name and one.factor]
        n, bandwidth = zip(*points, strict=True) if points else ((), ())
        axes.plot(n, bandwidth, **_style(k), gid=f"over-n-{k}")
    numbers = sorted({one.n for one in found})
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axhline(scale, gid="own-over-n", **_OWN)
    axes.margins(0.1)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("N")
    axes.annotate("this cluster", (1, scale), (4, 0), ("axes fraction", "data"), va="center", **_NAME)
    _name_bandwidths(axes.yaxis, scale)


def _common_bandwidth(found: Sequence[BreakEven]) -> float:
    """Return the bandwidth that all have in common; 1 if they differ, as then only multiples can be compared."""
    bandwidths = {one.bandwidth for one in found if one.bandwidth is not None}
    return bandwidths.pop() if len(bandwidths) == 1 else 1.0


def _name_bandwidths(axis: Any, scale: float) -> None:
    """Label an axis with bandwidths in the unit of the cluster's, or with multiples of it."""
    axis.set_minor_formatter(NullFormatter())
    if scale == 1.0:
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_label_text("bandwidths, as multiples of this cluster's")
    else:
        axis.set_label_text(f"narrowest bandwidth between two devices, {one_unit(axis, 'B/s', scale)}")


def _curve_name(one: BreakEven, found: Sequence[BreakEven]) -> str:
    """Return the schedule of a curve, with its rule if another curve of the schedule has another."""
    rules = {other.rule for other in found if other.schedule == one.schedule}
    return one.schedule if len(rules) == 1 else f"{one.schedule}, {one.rule}"


def _entry(one: BreakEven, name: str, number: int) -> Line2D:
    words = "any bandwidth"
    if one.break_even is None:
        words = f"never; latency alone costs {100 * one.latency:.2g} %"
    elif one.break_even:
        bandwidth = short_text(one.break_even, "B/s", 3)
        words = f"{bandwidth}, {one.factor:.3g} times this cluster's"
    return Line2D([], [], label=f"{label(name, 40)}: {words}", **_style(number))

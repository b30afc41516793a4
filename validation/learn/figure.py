"""Pictures of what was learnt, a row for each rate, and of limits of the rate, a row for each schedule."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cdpsim.draw.canvas import GREY, INK, label, plain
from cdpsim.numeric.columns import Floats

from ..report.figure import hue, number_ratios
from .limits import Limit
from .results import Learned, LearningCurve, RateAnswer
from .statistics import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SERIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("measured", {"marker": "o", "color": INK, "zorder": 3}),
    ("theory, each stage its own curvature", {"marker": "<", "color": "#2171b5"}),
    ("theory, one direction of all stages", {"marker": ">", "color": "#d94701"}),
)


def draw_learned(learned: Learned, margin: float) -> "Figure":
    """Return the figure: means over seeds, and bands of 95 %."""
    from matplotlib.figure import Figure

    rates = [*dict.fromkeys(answer.rate for answer in learned.answers)]
    hues = {name: hue(k) for k, name in enumerate(learned.lags)}
    figure = Figure(figsize=(14, 0.7 + 3.1 * len(rates)), layout="constrained")
    rows = figure.subplots(len(rates), 4, squeeze=False)
    for row, rate in zip(rows, rates, strict=True):
        curves = [curve for curve in learned.curves if curve.rate == rate]
        losses = _by_name(curves, hues, "loss")  # one of 0 has no logarithm, as one that is not finite
        loss = {name: np.log(np.where(own > 0, own, np.nan)) for name, own in losses.items()}
        _draw_curves(row[0], f"training loss (geometric mean), rate {rate:g}", loss, hues, drawn=np.exp)
        if any(np.isfinite(own).any() for own in loss.values()):
            row[0].set_yscale("log")
        row[0].tick_params(which="both", labelsize=8)
        accuracy = _by_name(curves, hues, "accuracy")
        _draw_curves(row[1], "test accuracy, %", {name: 100 * own for name, own in accuracy.items()}, hues)
        first = next(iter(accuracy))
        apart = {name: 100 * (own - accuracy[first]) for name, own in accuracy.items() if name != first}
        row[2].axhspan(-margin, margin, color=GREY, alpha=0.15, linewidth=0)
        _draw_curves(row[2], f"difference from {first}, points", apart, hues)
        _draw_over_lag(row[3], [answer for answer in learned.answers if answer.rate == rate], hues)
    for axes in rows[-1][:3]:
        axes.set_xlabel("epoch")
    rows[-1][3].set_xlabel("mean lag, steps")
    handles = [line for line in rows[0][0].get_lines() if line.get_label() in hues]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False, fontsize=8)
    return figure


def _by_name(curves: Sequence[LearningCurve], names: dict[str, str], what: str) -> dict[str, Floats]:
    return {
        name: np.array([getattr(curve, what) for curve in curves if curve.schedule == name], dtype=float)
        for name in names
    }


def _draw_curves(
    axes: "Axes",
    title: str,
    values: dict[str, Floats],
    hues: dict[str, str],
    drawn: Callable[[Floats], Floats] = np.asarray,
) -> None:
    from matplotlib.ticker import MaxNLocator

    plain(axes, title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for k, (name, own) in enumerate(values.items()):
        epochs = np.arange(1, own.shape[1] + 1)
        found = [interval(column[np.isfinite(column)].tolist() or [np.nan]) for column in own.T]
        mean = np.array([each.mean for each in found])
        half = np.array([each.half or 0 for each in found])
        if len(epochs) == 1:  # beside each other
            ends = np.abs(drawn(mean) - np.stack([drawn(mean - half), drawn(mean + half)]))
            axes.errorbar(1 + 0.05 * k, drawn(mean), ends, fmt="o", color=hues[name], markersize=4.5, capsize=2)
            axes.set(xlim=(0.8, 1.2 + 0.05 * len(values)), xticks=[1])
        axes.plot(epochs, drawn(mean), color=hues[name], linewidth=1.3, label=name)
        axes.fill_between(epochs, drawn(mean - half), drawn(mean + half), color=hues[name], alpha=0.2, linewidth=0)


def _draw_over_lag(axes: "Axes", answers: Sequence[RateAnswer], hues: dict[str, str]) -> None:
    plain(axes, "test accuracy at the end, %")
    for answer in answers:
        mean, half = answer.accuracy
        bar = None if half is None else 100 * half
        axes.errorbar(answer.lag, 100 * mean, bar, fmt="o", color=hues[answer.schedule], markersize=4.5, capsize=2)


def draw_limits(limits: Sequence[Limit]) -> "Figure":
    """Return the figure: a row for each schedule, with a line between both theories."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 1.5 + 0.36 * len(limits)), layout="constrained")
    rates, ratios = figure.subplots(1, 2, sharey=True)
    _draw_rows(rates, "largest rate", [(each.lower, each.own, each.shared) for each in limits])
    first = label(limits[0].schedule)
    _draw_rows(ratios, f"ratio to {first}", [(each.ratio, each.own_ratio, each.shared_ratio) for each in limits])
    rates.set_yticks(range(len(limits)), [label(each.schedule) for each in limits])
    rates.invert_yaxis()
    figure.legend(handles=rates.get_lines(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _draw_rows(axes: "Axes", title: str, rows: Sequence[tuple[float, float, float]]) -> None:
    plain(axes, title)
    axes.set_xscale("log")
    number_ratios(axes.xaxis)
    places = range(len(rows))
    axes.hlines(places, [min(row[1:]) for row in rows], [max(row[1:]) for row in rows], color=GREY, linewidth=0.8)
    for (name, look), values in zip(_SERIES, zip(*rows, strict=True), strict=True):
        axes.plot(values, places, linestyle="none", markersize=6, label=name, **look)
    axes.margins(x=0.08, y=0.12)

"""The picture of limits of the rate: what was measured beside both theories, as rates and as ratios to the first."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cdpsim.draw.canvas import GREY, INK, label, plain

from .limits import Limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SERIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("measured", {"marker": "o", "color": INK, "zorder": 3}),
    ("theory, each stage its own curvature", {"marker": "<", "color": "#2171b5"}),
    ("theory, one direction of all stages", {"marker": ">", "color": "#d94701"}),
)


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
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plain(axes, title)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    places = range(len(rows))
    axes.hlines(places, [min(row[1:]) for row in rows], [max(row[1:]) for row in rows], color=GREY, linewidth=0.8)
    for (name, look), values in zip(_SERIES, zip(*rows, strict=True), strict=True):
        axes.plot(values, places, linestyle="none", markersize=6, label=name, **look)
    axes.margins(x=0.08, y=0.12)

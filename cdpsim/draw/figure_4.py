"""The paper's Fig. 4: memory per worker over one forward and backward, simultaneous (DP) and cyclic (CDP)."""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from cdpsim.draw.canvas import AS_DRAWN, Look, label, one_unit, plain
from cdpsim.draw.curves import Series, steps, thinned
from cdpsim.draw.palette import COLOURS, colour
from cdpsim.draw.sheet import PAGE_WIDTH, finish, new_page
from cdpsim.errors import RequestError
from cdpsim.files.units import short_text
from cdpsim.model import Model
from cdpsim.numeric.columns import Floats, group_starts
from cdpsim.studies.superpose import PAPER_CLAIMS, WorkerCurve, bytes_text, sum_workers, superpose, worker_curve

PAPER_N = (4, 8, 32)
MOST_CURVE_STEPS = 100_000  # a hundred for each column of pixels
_NAMES = MappingProxyType({"resnet50": "ResNet-50", "vit-b16": "ViT-B/16"})
_HEIGHT = 4.6  # inches
_NARROW = 5.0  # inches: less has no room for two models side by side


def figure_4(
    n: Sequence[int] = PAPER_N,
    models: Sequence[str | Path | Model] = tuple(PAPER_CLAIMS),
    *,
    axis: str = "flops",
    contents: str = "activations",
    by_layer: bool = False,
    look: Look = AS_DRAWN,
) -> Figure:
    """Draw a panel for each model: one worker's memory (DP), the mean of a worker under CDP, half of DP's peak.

    Where the picture is to be narrow, models stand below each other. `axis`, `contents` and `by_layer` are those of
    `cdpsim.studies.superpose.superpose`.
    """
    if not 1 <= len(n) < len(COLOURS):
        raise RequestError("n", f"{len(n)} curves cannot be told apart; give one to {len(COLOURS) - 1}")
    if len(set(n)) < len(n):
        raise RequestError("n", "has one number twice; give each once")
    down = len(models) if look.inches_wide and look.inches_wide < _NARROW else 1
    kind, _, device = axis.partition(":")
    measure = {"flops": "FLOP", "roofline": f"the roofline of {label(device, 34)}"}.get(kind, "measured times")
    words = f"Memory per worker over one forward and backward: {contents}, by {measure}"
    figure = new_page(words, _HEIGHT * down, look, PAGE_WIDTH / down)
    parts = figure.subfigures(down, -(-len(models) // down), squeeze=False).flat
    options: dict[str, Any] = {"axis": axis, "contents": contents, "by_layer": by_layer}
    places = enumerate(zip(models, parts, strict=True))
    keys = {part: _model_panel(part, number, model, n, options) for number, (model, part) in places}
    return finish(figure, look, keys, columns=1)


def _model_panel(
    part: SubFigure, number: int, model: str | Path | Model, n: Sequence[int], options: dict[str, Any]
) -> list[Line2D]:
    """Draw the curves of a model: DP, CDP for each N, and the optimum, half of DP's peak; return their entries."""
    curve = worker_curve(model, **options)
    results = [superpose(model, workers, **options) for workers in n]
    most = int(curve.size.max())
    axes, enlarged = part.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    name = str(model) if not isinstance(model, Model) else model.name or "model"
    plain(axes, f"{label(_NAMES.get(name, name), 34)}, by {results[0].resolution}")
    plain(enlarged, "CDP alone, enlarged", 8.5)
    look: dict[str, Any] = {"color": colour(3), "linewidth": 1.2}
    entries = [_draw(axes, *_mean_over_pass(curve, 1), f"dp-{number}", f"DP: {bytes_text(most)}", **look)]
    for k, result in enumerate(results):
        words = f"CDP, N = {result.n}: {bytes_text(result.cdp)}, {short_text(float(result.reduction), '%')} less"
        look, drawn = {"color": colour(k if k < 3 else k + 1), "linewidth": 1.0}, _mean_over_pass(curve, result.n)
        entries.append(_draw(axes, *drawn, f"cdp-{result.n}-{number}", words, **look))
        _draw(enlarged, *drawn, f"enlarged-{result.n}-{number}", words, **look)
    words, look = f"half of DP's peak: {bytes_text(most / 2)}", {"color": "black", "linewidth": 1.1}
    entries.append(_draw(axes, np.zeros(1), np.array([most / 2]), f"optimal-{number}", words, **look))
    for each in (axes, enlarged):
        each.margins(x=0, y=0.05)
        each.set_ylabel(f"memory per worker, {one_unit(each.yaxis, 'B', 1.08 * most)}", fontsize=8)
    axes.set_ylim(0, 1.08 * most or 1)
    enlarged.set_xlabel("share of the pass")
    enlarged.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    if name in PAPER_CLAIMS:
        entries.append(Line2D([], [], linestyle="", label=f"paper: {PAPER_CLAIMS[name]}"))
    return entries


def _draw(axes: Axes, begins: Any, values: Any, gid: str, words: str, **look: Any) -> Line2D:
    """Draw a step function, and return its legend entry."""
    value: Any = np.asarray(values, dtype=np.float64)
    first = group_starts(value)  # where it does not change there is no step
    begin = np.asarray(begins, np.float64)[first]
    steps(axes, begin, value[first], 1.0, gid, edgecolor=look["color"], linewidth=look["linewidth"])
    return Line2D([], [], label=words, **look)


def _mean_over_pass(curve: WorkerCurve, n: int) -> tuple[Floats, Floats]:
    """Return the steps of the mean memory of n workers over a whole pass: where each begins, and its value.

    A step without width is a moment at which operators that take no time hold more.
    """
    position, total, moment = sum_workers(curve, n)
    higher = np.flatnonzero(moment > total)
    position, total = np.insert(position, higher, position[higher]), np.insert(total, higher, moment[higher])
    if len(position) * n > MOST_CURVE_STEPS:
        most = MOST_CURVE_STEPS // len(position)
        problem = f"n={n} makes more steps than can be seen"
        raise RequestError("n", f"{problem}; give at most {most} here, `cdpsim superpose` takes any")
    share = np.asarray(position / curve.duration.sum(), dtype=np.float64)
    begins = (np.arange(n)[:, None] + share) / n
    series = thinned(Series(begins.ravel(), np.tile(np.asarray(total / n, dtype=np.float64), n)[None]), 1.0)
    return series.time, series.total

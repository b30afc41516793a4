"""The paper's Fig. 4: memory per worker over one forward and backward, simultaneous (DP) and cyclic (CDP)."""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, PercentFormatter

from cdpsim.draw.canvas import INK, label, plain
from cdpsim.draw.curves.panels import steps
from cdpsim.draw.palette import COLOURS, colour
from cdpsim.errors import RequestError
from cdpsim.files.units import short_text
from cdpsim.model import Model
from cdpsim.numeric.columns import Floats, group_starts
from cdpsim.studies.superpose import PAPER_CLAIMS, WorkerCurve, bytes_text, fold, superpose, worker_curve

PAPER_N = (4, 8, 32)
MOST_CURVE_STEPS = 20_000  # thirty for each point of a curve's width
_NAMES = MappingProxyType({"resnet50": "ResNet-50", "vit-b16": "ViT-B/16"})
_WIDTH, _HEIGHT = 7.2, 3.3  # inches
_LEGEND_LINE = 0.17  # inches
_DASH, _GAP = 3.2, 1.2  # line widths
_SLOPE = 0.9  # height over width of a panel, about


def figure_4(n: Sequence[int] = PAPER_N, *, axis: str = "flops", contents: str = "activations") -> Figure:
    """Draw the paper's two models."""
    return memory_per_worker(tuple(PAPER_CLAIMS), n, axis=axis, contents=contents)


def memory_per_worker(
    models: Sequence[str | Path | Model], n: Sequence[int], *, axis: str = "flops", contents: str = "activations"
) -> Figure:
    """Draw a panel for each model: one worker's memory (DP), the mean of a worker under CDP, half of DP's peak.

    `axis` and `contents` are those of `cdpsim.studies.superpose.superpose`.
    """
    if not 1 <= len(n) < len(COLOURS):
        raise RequestError("n", f"{len(n)} curves cannot be told apart; give one to {len(COLOURS) - 1}")
    if len(set(n)) < len(n):
        raise RequestError("n", "has one number twice; give each once")
    figure = Figure(figsize=(_WIDTH, _HEIGHT + _LEGEND_LINE * (3 + len(n))), layout="constrained")
    words = f"Memory per worker over one pass: {contents}, axis {axis}"
    figure.suptitle(words, x=0.012, ha="left", fontsize=10.5, fontweight="bold", color=INK)
    parts = figure.subfigures(1, len(models), squeeze=False).flat
    for number, (model, part) in enumerate(zip(models, parts, strict=True)):
        _model_panel(part, number, model, n, axis, contents)
    return figure


def _model_panel(
    part: SubFigure, number: int, model: str | Path | Model, n: Sequence[int], axis: str, contents: str
) -> None:
    """Draw the curves of a model: DP, CDP for each N, and the optimum, half of DP's peak."""
    curve = worker_curve(model, axis=axis, contents=contents)
    most = int(curve.size.max())
    axes = part.subplots()
    name = str(model) if not isinstance(model, Model) else model.name or "model"
    plain(axes, label(_NAMES.get(name, name), 40))
    axes.set(xlim=(0, 1), ylim=(0, 1.08 * most or 1), xlabel="share of the pass", ylabel="memory per worker")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    ends = np.cumsum(curve.duration)
    begins = (ends - curve.duration) / ends[-1]
    entries = [
        _draw(axes, begins, curve.size, f"dp-{number}", f"DP: {bytes_text(most)}", color=colour(3), linewidth=1.5)
    ]
    for k, workers in enumerate(n):
        result = superpose(model, workers, axis=axis, contents=contents)
        words = f"CDP, N = {workers}: {bytes_text(result.cdp)}, {short_text(float(result.reduction), '%')} less"
        look = {"color": colour(k if k < 3 else k + 1), "linewidth": 1.1, "linestyle": (0, (_DASH, _GAP))}
        entries.append(_draw(axes, *_mean_over_pass(curve, workers), f"cdp-{workers}-{number}", words, **look))
    words, look = f"optimal: {bytes_text(most / 2)}", {"color": "black", "linewidth": 1.1}
    entries.append(_draw(axes, np.zeros(1), np.array([most / 2]), f"optimal-{number}", words, **look))
    if name in PAPER_CLAIMS:
        entries.append(Line2D([], [], linestyle="", label=f"the paper: {PAPER_CLAIMS[name]}"))
    part.legend(handles=entries, loc="outside lower left", fontsize=8, frameon=False)


def _draw(axes: Axes, begins: Any, values: Any, gid: str, words: str, **look: Any) -> Line2D:
    """Draw a step function, and return its legend entry."""
    value: Any = np.asarray(values, dtype=np.float64)
    first = group_starts(value)  # where it does not change there is no step
    entry = Line2D([], [], label=words, **look)
    if "linestyle" in look:  # dashes follow the line up and down; as long as they are seen from the side
        stretch = 1 + _SLOPE * np.abs(np.diff(value)).sum() / axes.get_ylim()[1]
        look["linestyle"] = (0, (_DASH * stretch, _GAP * stretch))
    steps(axes, np.asarray(begins, np.float64)[first], value[first], 1.0, gid, edgecolor=look.pop("color"), **look)
    return entry


def _mean_over_pass(curve: WorkerCurve, n: int) -> tuple[Floats, Floats]:
    """Return the steps of the mean memory of n workers over a whole pass: where each begins, and its value."""
    position, total = fold(curve, n)
    if len(position) * n > MOST_CURVE_STEPS:
        most = MOST_CURVE_STEPS // len(position)
        raise RequestError(
            "n", f"n={n} makes more steps than can be seen; give at most {most} here, `cdpsim superpose` takes any"
        )
    share = np.asarray(position / curve.duration.sum(), dtype=np.float64)
    begins = (np.arange(n)[:, None] + share) / n
    return begins.ravel(), np.tile(np.asarray(total / n, dtype=np.float64), n)

"""The paper's Fig. 4: memory per worker over one forward and backward, simultaneous and cyclic."""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from cdpsim.draw.canvas import INK, label, plain
from cdpsim.draw.curves.panels import steps
from cdpsim.draw.palette import COLOURS, colour
from cdpsim.errors import RequestError
from cdpsim.model import Model
from cdpsim.numeric.columns import group_starts
from cdpsim.studies.superpose import PAPER_CLAIMS, WorkerCurve, bytes_text, fold, percent_text, superpose, worker_curve

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure, SubFigure

PAPER_N = (4, 8, 32)
MOST_STEPS = 20_000  # of a curve: thirty for each point of its width
_NAMES = MappingProxyType({"resnet50": "ResNet-50", "vit-b16": "ViT-B/16"})
_WIDTH, _HEIGHT = 7.2, 3.3  # inches
_LINE = 0.17  # inches, of a legend
_DASH, _GAP = 3.2, 1.2  # line widths
_SLOPE = 0.9  # height over width of a panel, about


def figure_4(n: Sequence[int] = PAPER_N, *, axis: str = "flops", contents: str = "activations") -> "Figure":
    """Draw the paper's two models."""
    return superposed(tuple(PAPER_CLAIMS), n, axis=axis, contents=contents)


def superposed(
    models: Sequence[str | Path | Model], n: Sequence[int], *, axis: str = "flops", contents: str = "activations"
) -> "Figure":
    """Draw a panel for each model: one worker's memory (DP), what a worker has on average under CDP, half of DP's peak.

    `axis` and `contents` are those of `cdpsim.studies.superpose.superpose`.
    """
    from matplotlib.figure import Figure

    if not 1 <= len(n) < len(COLOURS):
        raise RequestError("n", f"{len(n)} curves cannot be told apart; give one to {len(COLOURS) - 1}")
    if len(set(n)) < len(n):
        raise RequestError("n", "has one number twice; give each once")
    figure = Figure(figsize=(_WIDTH, _HEIGHT + _LINE * (3 + len(n))), layout="constrained")
    words = f"Memory per worker over one pass: {contents}, axis {axis}"
    figure.suptitle(words, x=0.012, ha="left", fontsize=10.5, fontweight="bold", color=INK)
    parts = figure.subfigures(1, len(models), squeeze=False).flat
    for place, (model, part) in enumerate(zip(models, parts, strict=True)):
        _panel(part, place, model, n, axis, contents)
    return figure


def _panel(
    part: "SubFigure", place: int, model: str | Path | Model, n: Sequence[int], axis: str, contents: str
) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter

    curve = worker_curve(model, axis=axis, contents=contents)
    most = int(curve.size.max())
    axes = part.subplots()
    name = str(model) if not isinstance(model, Model) else model.name or "model"
    plain(axes, label(_NAMES.get(name, name), 40))
    axes.set(xlim=(0, 1), ylim=(0, 1.08 * most or 1), xlabel="share of the pass", ylabel="memory per worker")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    edges = np.append(0, np.cumsum(curve.duration)) / curve.duration.sum()
    entries = [_draw(axes, curve.size, edges, f"dp-{place}", f"DP: {bytes_text(most)}", color=colour(3), linewidth=1.5)]
    for k, number in enumerate(n):
        found = superpose(model, number, axis=axis, contents=contents)
        words = f"CDP, N = {number}: {bytes_text(found.cdp)}, {percent_text(found.reduction)} less"
        look = {"color": colour(k if k < 3 else k + 1), "linewidth": 1.1, "linestyle": (0, (_DASH, _GAP))}
        entries.append(_draw(axes, *_repeated(curve, number), f"cdp-{number}-{place}", words, **look))
    half, black = np.array([most / 2]), {"color": "black", "linewidth": 1.1}
    entries.append(
        _draw(axes, half, np.array([0.0, 1.0]), f"optimal-{place}", f"optimal: {bytes_text(most / 2)}", **black)
    )
    if name in PAPER_CLAIMS:
        from matplotlib.lines import Line2D

        entries.append(Line2D([], [], linestyle="", label=f"the paper: {PAPER_CLAIMS[name]}"))
    part.legend(handles=entries, loc="outside lower left", fontsize=8, frameon=False)


def _draw(axes: Any, value: Any, edges: Any, gid: str, words: str, **look: Any) -> "Artist":
    """Draw a step function, and give what a legend shows of it."""
    from matplotlib.lines import Line2D

    value = np.asarray(value, dtype=np.float64)
    first = group_starts(value)  # where it does not change there is no step
    patch = steps(axes, value[first], np.append(np.asarray(edges, np.float64)[first], 1.0), gid)
    line = Line2D([], [], label=words, **look)
    if "linestyle" in look:  # dashes follow the line up and down; as long as they are seen from the side
        stretch = 1 + _SLOPE * np.abs(np.diff(value)).sum() / axes.get_ylim()[1]
        look["linestyle"] = (0, (_DASH * stretch, _GAP * stretch))
    patch.set(edgecolor=look.pop("color"), **look)
    return line


def _repeated(curve: WorkerCurve, n: int) -> tuple[Any, Any]:
    """What a worker of n has on average over a whole pass, and where each step of that begins, and the end."""
    position, total = fold(curve, n)
    if len(position) * n > MOST_STEPS:
        most = MOST_STEPS // len(position)
        raise RequestError(
            "n", f"n={n} makes more steps than can be seen; give at most {most} here, `cdpsim superpose` takes any"
        )
    share = np.asarray(position / curve.duration.sum(), dtype=np.float64)
    begins = (np.arange(n)[:, None] + share) / n
    mean = np.asarray(total / n, dtype=np.float64)
    return np.tile(mean, n), np.append(begins.ravel(), 1.0)

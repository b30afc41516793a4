"""The picture of a calibration: measured times, the lines through them, and the errors of these."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cdpsim.draw.canvas import GREY, plain
from cdpsim.program import Op

from ..profile.fits import predict_collective
from ..report.figure import hue, number_ratios
from .results import NAMES, Calibration, Collective, Compute, Errors, Point, Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Series(NamedTuple):
    """Measured times of messages, and the line that says how long messages of any size take."""

    name: str
    points: Sequence[Point]
    seconds: Callable[[int], float]
    errors: Sequence[float]


def draw_calibration(found: Calibration) -> "Figure":
    """Return a figure with a column for each kind of message and one for the stages; below each, its errors."""
    from matplotlib.figure import Figure

    both = (("one way", found.one_way), ("both ways at once", found.both_ways))
    transfers = [Series(name, each.points, each.fit.seconds, each.fit.relative_errors) for name, each in both]
    messages = [(f"point to point\n{_caption(found.one_way.fit)}", transfers)]
    messages += [(f"{each.name}\n{each.best} on that link", list(_by_ranks(each))) for each in found.collectives]
    columns = 1 + len(messages)
    figure = Figure(figsize=(3.5 * columns, 6.4), layout="constrained")
    above, below = figure.subplots(2, columns, height_ratios=(1.7, 1), squeeze=False)
    for k, (title, series) in enumerate(messages):
        _draw_messages(above[k], below[k], title, series)
    _draw_compute(above[-1], below[-1], found.compute)
    for row in (above, below):
        ends = [end for axes in row[:-1] for end in axes.get_ylim()]
        for axes in row[:-1]:
            axes.set_ylim(min(ends), max(ends))
    above[0].set_ylabel("time")
    below[0].set_ylabel("line / measured")
    return figure


def _by_ranks(collective: Collective) -> Iterator[Series]:
    """Yield the times of each size of group, and those of the nearest algorithm on the point-to-point link."""
    fit, op = collective.on_link[collective.best], next(op for op, name in NAMES.items() if name == collective.name)
    for ranks in sorted({point.ranks for point in collective.points}):
        rows = [row for row, point in enumerate(collective.points) if point.ranks == ranks]
        how = partial(predict_collective, Op(op), collective.best, ranks)
        seconds = partial(how, latency=fit.latency_seconds, bandwidth=fit.bandwidth)
        points, errors = [collective.points[row] for row in rows], [fit.relative_errors[row] for row in rows]
        yield Series(f"{ranks} ranks", points, seconds, errors)


def _draw_messages(above: "Axes", below: "Axes", title: str, series: Sequence[Series]) -> None:
    """Draw medians, the lines through them, and the errors of these."""
    plain(above, title)
    plain(below, "")
    for k, (name, points, line, errors) in enumerate(series):
        colour, sizes = hue(k), [point.size for point in points]
        how: dict[str, Any] = {"color": colour, "markersize": 4}
        _draw_medians(above, sizes, points, label=name, **how)
        dense = np.geomspace(min(sizes), max(sizes), 60)
        above.plot(dense, [line(int(size)) for size in dense], color=colour, linewidth=1.1)
        below.plot(sizes, [1 + error for error in errors], "o-", linewidth=0.6, **how)
    _finish(above, below)


def _draw_medians(axes: "Axes", places: list[int], times: Sequence[Point | Task], **how: Any) -> None:
    """Draw medians, with bars from the faster to the slower quartile."""
    spread = [[each.seconds - each.faster for each in times], [each.slower - each.seconds for each in times]]
    axes.errorbar(places, [each.seconds for each in times], spread, fmt="o", linewidth=1, **how)


def _draw_compute(above: "Axes", below: "Axes", compute: Compute) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    speed = EngFormatter("FLOP/s", places=1)(compute.speed_flop_per_second)
    plain(above, f"passes of stages\n{speed}")
    plain(below, "")
    passes = [task for task in compute.tasks if task.flop is not None]
    for k, kind in enumerate(("forward", "backward")):
        rows = [row for row, task in enumerate(passes) if task.kind == kind]
        own, colour = [passes[row] for row in rows], hue(k)
        stages = [task.stage for task in own]
        _draw_medians(above, stages, own, color=colour, markersize=4.5, label=kind)
        said = [(task.flop or 0.0) / compute.speed_flop_per_second for task in own]
        above.plot(stages, said, marker="_", markersize=13, markeredgewidth=1.3, linestyle="", color=colour)
        ratios = [1 + compute.relative_errors[row] for row in rows]
        below.plot(stages, ratios, marker="o", markersize=4, linestyle="", color=colour)
    above.set_ylim(0, 1.25 * max(task.slower for task in passes))
    above.yaxis.set_major_formatter(EngFormatter("s"))
    above.legend(fontsize=8, frameon=False, loc="upper right", ncols=2)
    below.axhline(1, color=GREY, linewidth=0.9)
    below.set(xlabel="stage", ylabel="speed / measured")
    for axes in (above, below):
        axes.set_xlim(-0.5, max(task.stage for task in passes) + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _finish(above: "Axes", below: "Axes") -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, NullLocator

    above.set(xscale="log", yscale="log")
    above.yaxis.set_major_formatter(EngFormatter("s"))
    above.legend(fontsize=8, frameon=False, loc="upper left")
    below.set(xscale="log", yscale="log", xlabel="size")
    number_ratios(below.yaxis)
    below.axhline(1, color=GREY, linewidth=0.9)
    low, high = below.get_ylim()
    most = max(1.5, high, 1 / low)
    below.set_ylim(1 / most, most)
    for axes in (above, below):
        axes.xaxis.set_major_locator(LogLocator(base=100, numticks=10))
        axes.xaxis.set_major_formatter(EngFormatter("B"))
        axes.xaxis.set_minor_locator(NullLocator())
    above.yaxis.set_minor_formatter(NullFormatter())


def _caption(fit: Errors) -> str:
    from matplotlib.ticker import EngFormatter

    latency = EngFormatter("s", places=1)(fit.latency_seconds)
    if fit.bandwidth_bytes_per_second is None:
        return f"{latency}, of any size"
    return f"{latency} + size / {EngFormatter('B/s', places=1)(fit.bandwidth)}"

"""Versions of parameters over time: how many of each stage each device keeps, and how old what is read is."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cdpsim.draw.canvas import GREY, INK
from cdpsim.draw.curves.panels import Frame, check, figure_of, frame, legend, names, panel, steps
from cdpsim.draw.curves.series import COLUMNS, Series, merged, span, summed, thinned
from cdpsim.draw.palette import COLOURS, colour, ink_on
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, Times, group_starts
from cdpsim.runs import Run
from cdpsim.trace import Trace
from cdpsim.trace.metrics import memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = 128  # more would be thinner than can be told apart
NAMED = 32  # rows that have their own name beside them
CLOSE = 500  # spans, beyond which they have no white edges
SPANS = 5_000  # of constant numbers, that are all drawn
_WHITE = np.array([255, 255, 255])


class Spans(NamedTuple):
    """From when until when each row keeps how many versions; nothing where it keeps none."""

    row: Ints
    begin: Times
    end: Times
    versions: Ints


def versions(traces: Sequence[Trace]) -> "Figure":
    """Draw how many versions of parameters live.

    Of one trace those of each stage on each device, and the mean age of what is read; of several the most that a
    device keeps of a stage.
    """
    check(traces)
    runs = [trace for trace in traces if isinstance(trace, Run)]
    if len(runs) < len(traces):
        raise RequestError("versions", "a saved trace does not say which versions live; simulate the schedule again")
    return _one(runs[0]) if len(runs) == 1 else _several(runs)


def kept(run: Run) -> tuple[Spans, Ints, Ints]:
    """The versions of each stage on each device, a row for each pair; and the device and stage of each row."""
    live = memory.live_versions(run.program, run.start, run.end)
    if not len(live["time"]):
        raise RequestError("versions", "no device holds parameters; give a model whose stages have some")
    first = group_starts(live["device"], live["stage"])
    row = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(live["time"]))))
    until = np.append(live["time"][1:], 0)
    until[np.append(first[1:], len(until)) - 1] = span(run)
    some = (live["versions"] > 0) & (until > live["time"])
    found = Spans(*(column[some] for column in (row, live["time"], until, live["versions"])))
    return found, live["device"][first], live["stage"][first]


def most(found: Spans, group: Ints, grid: float = 0) -> Spans:
    """The most that any row of a group keeps; `group` gives the group of each row.

    Times widen to multiples of `grid`, where there is one.
    """
    begin, end, parts = found.begin, found.end, []
    if grid:
        begin, end = np.floor(begin / grid) * grid, np.ceil(end / grid) * grid
    for count in range(1, int(found.versions.max(initial=0)) + 1):
        some = found.versions >= count
        one = np.ones(int(some.sum()), dtype=np.int64)
        parts.append(_positive(*memory.step_function(group[found.row[some]], begin[some], end[some], one)))
    row, begin, end = (np.concatenate(column) for column in list(zip(*parts, strict=True))[:3])
    return _positive(*memory.step_function(row, begin, end, np.ones(len(row), dtype=np.int64)))


def _positive(key: Ints, time: Times, value: Ints) -> Spans:
    """The spans of a step function in which it is not 0."""
    some = np.flatnonzero(value > 0)
    return Spans(key[some], time[some], time[some + 1], value[some])


def ages(trace: Trace) -> Series:
    """The mean age of what the tasks that run are reading, in training steps; nan where none runs."""
    tasks = trace.tasks
    some = tasks["kind"] != "U"
    age = (tasks["step"] - tasks["version"])[some].astype(np.int64)
    time = merged(np.concatenate([tasks["start"][some], tasks["end"][some]]), span(trace))
    key = np.repeat([0, 1, 0, 1], len(age))
    one = np.ones_like(age)
    half = len(age)
    time = np.concatenate([time[:half], time[:half], time[half:], time[half:]])
    series = summed(key, time, np.concatenate([age, one, -age, -one]), 2)
    total, tasks_running = series.value
    mean = np.divide(total, tasks_running, out=np.full(len(total), np.nan), where=tasks_running > 0)
    return Series(series.time, mean[None])


def _one(trace: Run) -> "Figure":
    found, device, stage = kept(trace)
    shared = frame([trace])
    labels = {row: f"device {d}, stage {j}" for row, (d, j) in enumerate(zip(device, stage, strict=True))}
    heading = "Versions kept of each stage on each device"
    if len(labels) > ROWS:
        found, labels = most(found, stage), {j: f"stage {j}" for j in range(int(stage.max()) + 1)}
        heading = "Versions kept of each stage: the most on any device"
    if len(labels) > ROWS:
        problem = f"{len(labels)} stages are more than the {ROWS} rows of a picture; give fewer stages (-n)"
        raise RequestError("versions", problem)
    heights = 0.9 + len(labels) * _height(len(labels)), 1.3
    figure, (part,) = figure_of(names([trace])[0], [sum(heights)])
    above, below = part.subplots(2, 1, sharex=True, height_ratios=heights)
    _rows(above, heading, found, labels, shared)
    above.set_xlabel("")
    _ages(below, trace, shared)
    _legend(figure, found)
    return figure


def _height(rows: int) -> float:
    """How high a row is, in inches."""
    return max(0.055, min(0.24, 6.4 / rows))


def _several(traces: Sequence[Run]) -> "Figure":
    heading, own = names(traces)
    parts = []
    for k, trace in enumerate(traces):
        one = most(kept(trace)[0], np.zeros(len(kept(trace)[1]), dtype=np.int64))
        parts.append(one._replace(row=one.row + k))
    found = Spans(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    figure, (part,) = figure_of(heading, [1.0 + 0.26 * len(traces)])
    axes = part.subplots()
    _rows(axes, "Versions kept: the most of a stage on a device", found, dict(enumerate(own)), frame(traces))
    for k, trace in enumerate(traces):
        mean = trace.summary()["mean_staleness"]
        if mean is not None:  # as a summary that is not ours may have it
            beside = (1, k), (5, 0), ("axes fraction", "data"), "offset points"
            axes.annotate(f"mean age read {mean:.3g}", *beside, va="center", fontsize=7.5)
    _legend(figure, found)
    return figure


def _rows(axes: "Axes", heading: str, found: Spans, labels: Mapping[int, str], shared: Frame) -> None:
    """A strip for each row: the more versions, the higher and darker; their number stands where there is room."""
    from matplotlib.collections import PolyCollection

    if len(found.row) > SPANS:
        found = most(found, np.arange(len(labels)), shared.end / COLUMNS)
    panel(axes, heading, shared, 1)
    axes.grid(visible=False)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    named = list(labels) if len(labels) <= NAMED else _first_of_devices(labels)
    axes.set_yticks(named, [labels[row] for row in named], fontsize=7)
    axes.tick_params(axis="y", length=0)
    largest = int(found.versions.max(initial=0))
    for count in range(1, largest + 1):
        some = found.versions == count
        left, right, row = found.begin[some], found.end[some], found.row[some]
        half = 0.42 * count / max(2, largest)
        low, high = row + half, row - half
        corners = [(left, low), (left, high), (right, high), (right, low)]
        boxes = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
        own = shade(count, largest)
        edge = "white" if len(found.row) <= CLOSE else own  # which would take all of what is narrow
        part = PolyCollection(list(boxes), facecolor=own, edgecolor=edge, linewidth=0.4)
        part.set_gid(f"versions-{count}")
        axes.add_collection(part, autolim=False)
    if len(labels) <= NAMED:
        _numbers(axes, found, shared)


def _first_of_devices(labels: Mapping[int, str]) -> list[int]:
    """The rows where another device begins, and not more than have room."""
    device = [label.partition(",")[0] for label in labels.values()]
    rows = [row for row in labels if not row or device[row] != device[row - 1]]
    return rows[:: -(-len(rows) // NAMED)]


def _numbers(axes: "Axes", found: Spans, shared: Frame) -> None:
    largest = int(found.versions.max(initial=0))
    for row, begin, end, count in zip(*(column.tolist() for column in found), strict=True):
        if end - begin >= shared.end / 40:
            ink = ink_on(shade(count, largest))
            axes.text((begin + end) / 2, row, str(count), ha="center", va="center_baseline", fontsize=6, color=ink)


def shade(count: int, largest: int) -> str:
    """The colour of a number of versions: the more, the darker."""
    share = 0.18 + 0.82 * (count - 1) / max(3, largest - 1)
    dark = np.array([int(COLOURS[6][k : k + 2], 16) for k in (1, 3, 5)])
    return "#" + "".join(f"{round(part):02x}" for part in (_WHITE + share * (dark - _WHITE)).tolist())


def _ages(axes: "Axes", trace: Run, shared: Frame) -> None:
    """The mean age of what is read, over time and in all."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    series = ages(trace)
    oldest = np.nan_to_num(series.total).max()
    panel(axes, "Mean age of the parameters that running tasks read, in training steps", shared, max(1.0, oldest))
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    few = thinned(series, shared.end)
    line = steps(axes, few.total, np.append(few.time, shared.end), "age")
    line.set(edgecolor=colour(0), linewidth=1.4)
    mean = trace.summary()["mean_staleness"]
    if mean is not None:
        axes.axhline(mean, color=INK, linewidth=0.9, linestyle=(0, (1, 1.5)), gid="mean-age")
        text = f"mean at\nrest: {mean:.3g}"
        axes.annotate(text, (1, mean), (4, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=7.5)


def _legend(figure: "Figure", found: Spans) -> None:
    from matplotlib.patches import Patch

    largest = int(found.versions.max(initial=0))
    words = ["1 version", *(f"{count} versions" for count in range(2, largest + 1))]
    handles = [Patch(facecolor=shade(count, largest), label=word) for count, word in enumerate(words, start=1)]
    legend(figure, [Patch(facecolor="none", edgecolor=GREY, linewidth=0.6, label="none"), *handles], 6)

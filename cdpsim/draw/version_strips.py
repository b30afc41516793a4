"""Versions of parameters over time: their number for each stage on each device, and the age of the ones in use."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from cdpsim.draw.canvas import AS_DRAWN, GREY, Look
from cdpsim.draw.curves import (
    Scale,
    Series,
    end_of_run,
    level,
    panel,
    scale_of,
    steps,
    sum_spans,
    thinned,
    write_beside,
)
from cdpsim.draw.palette import COLOURS, colour, ink_on, tint
from cdpsim.draw.sheet import finish, new_page, titles
from cdpsim.errors import RequestError
from cdpsim.files.units import counted
from cdpsim.numeric.columns import Ints, Times, group_numbers, group_starts
from cdpsim.runs import Run
from cdpsim.trace import Trace
from cdpsim.trace.metrics.memory import live_versions, step_function

MOST_VERSION_ROWS = 128  # more would be thinner than can be told apart
MOST_SPANS = 20_000
_LABELLED_ROWS = 32  # that have their names beside them
_EDGED_SPANS = 500  # the most that have white edges


class Spans(NamedTuple):
    """The spans of time in which rows keep constant numbers of versions above 0."""

    row: Ints
    begin: Times
    end: Times
    versions: Ints


def versions_over_time(traces: Sequence[Trace], *, look: Look = AS_DRAWN) -> Figure:
    """Draw how many versions of parameters devices keep.

    One trace has a row for each stage on each device, and below them the mean age of the versions that tasks read.
    Several traces have a row each: the most versions that a device keeps of a stage.
    """
    scale, (title, names) = scale_of(traces), titles(traces)
    runs = [_as_run(trace) for trace in traces]
    if len(runs) == 1:
        heading, spans, labels = _rows_of_one(runs[0])
        heights = 0.9 + len(labels) * max(0.055, min(0.24, 6.4 / len(labels))), 1.3
        figure = new_page(title, sum(heights) + 0.4, look)
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=heights)
        _draw_ages(below, runs[0], scale)
    else:
        parts = [version_spans(run) for run in runs]
        most = [most_versions(spans, np.full(len(device), k)) for k, (spans, device, _) in enumerate(parts)]
        spans, labels = Spans(*map(np.concatenate, zip(*most, strict=True))), names
        heading = "Versions kept: the most of a stage on a device"
        figure = new_page(title, 1.4 + 0.26 * len(runs), look)
        axes = figure.subplots()
    _strips(axes, heading, spans, labels, scale)
    for k, run in enumerate(runs if len(runs) > 1 else ()):
        later = _later(run, int(spans.versions[spans.row == k].max(initial=0)))
        write_beside(axes, k, f"mean age read {run.steady_state.staleness:.3g}{later}")
    if len(runs) == 1:
        axes.set_xlabel("")
    largest = _largest(spans)
    entries = [Patch(facecolor="none", edgecolor=GREY, linewidth=0.6, label="none")]
    for count in range(1, largest + 1):
        entries.append(Patch(facecolor=shade(count, largest), label=counted(count, "version")))
    return finish(figure, look, {figure: entries}, columns=6)


def _as_run(trace: Trace) -> Run:
    if not isinstance(trace, Run):
        raise RequestError("versions", "a saved trace does not say which versions live; simulate the schedule again")
    return trace


def draw_strips(trace: Trace, axes: Axes) -> None:
    """Draw the versions of each stage on each device in axes of another figure, without their ages and a legend."""
    _strips(axes, *_rows_of_one(_as_run(trace)), scale_of([trace]))


def version_spans(run: Run) -> tuple[Spans, Ints, Ints]:
    """Return the spans of each stage on each device, a row for each pair; and the device and stage of each row."""
    run = run.whole
    device, stage, time, versions = live_versions(run.program, run.start, run.end).values()
    if not len(time):
        raise RequestError("versions", "no device holds parameters; give a model whose stages have some")
    first = group_starts(device, stage)
    end = np.append(time[1:], 0)
    end[np.append(first[1:], len(time)) - 1] = end_of_run(run)
    kept = (versions > 0) & (end > time)
    columns = group_numbers(first, len(time)), time, end, versions
    return Spans(*(column[kept] for column in columns)), device[first], stage[first]


def most_versions(spans: Spans, group: Ints) -> Spans:
    """Return the most versions that any row of a group keeps; `group` gives the group of each row."""
    parts = []
    for count in range(1, _largest(spans) + 1):  # the times at which any row of a group keeps this number or more
        rows = spans.versions >= count
        parts.append(_sum_spans_by_row(group[spans.row[rows]], spans.begin[rows], spans.end[rows])[:3])
    return _sum_spans_by_row(*map(np.concatenate, zip(*parts, strict=True)))


def _sum_spans_by_row(row: Ints, begin: Times, end: Times) -> Spans:
    """Return how many spans of each row there are at each time."""
    key, time, count = step_function(row, begin, end, np.ones(len(row), dtype=np.int64))
    rows = np.flatnonzero(count > 0)
    return Spans(key[rows], time[rows], time[rows + 1], count[rows])


def _largest(spans: Spans) -> int:
    return int(spans.versions.max(initial=0))


def mean_age(trace: Trace) -> Series:
    """Return the mean age of the parameters that running tasks read, in training steps; nan where none runs."""
    tasks = trace.tasks
    reads = tasks["kind"] != "U"
    start, end = (np.tile(tasks[name][reads], 2) for name in ("start", "end"))
    age = (tasks["step"] - tasks["version"])[reads].astype(np.int64)
    key, size = np.repeat([0, 1], len(age)), np.concatenate([age, np.ones_like(age)])
    time, (total, running) = sum_spans(key, start, end, size, 2, end_of_run(trace))
    mean = np.divide(total, running, out=np.full(len(total), np.nan), where=running > 0)
    return Series(time, mean[None])


def _rows_of_one(run: Run) -> tuple[str, Spans, list[str]]:
    """Return the heading, the spans and the names of the rows of one run's picture."""
    spans, device, stage = version_spans(run)
    labels = [f"device {d}, stage {j}" for d, j in zip(device, stage, strict=True)]
    heading, later = "Versions kept of each stage on each device", _later(run, _largest(spans))
    if len(labels) > MOST_VERSION_ROWS:
        spans, labels = most_versions(spans, stage), [f"stage {j}" for j in range(int(stage.max()) + 1)]
        heading = "Versions kept of each stage: the most on any device"
    if len(labels) > MOST_VERSION_ROWS:
        problem = f"{len(labels)} stages are more than the {MOST_VERSION_ROWS} rows of a picture"
        raise RequestError("versions", f"{problem}; give fewer stages (-n)")
    return heading + later, spans, labels


def _later(run: Run, most: int) -> str:
    """Return words for the most versions kept of a stage in steady state, if the run's own steps keep fewer."""
    if run.reaches_steady_state:
        return ""
    rest = run.steady_state.run
    later = int(live_versions(rest.program, rest.start, rest.end)["versions"].max(initial=0))
    return f"; in steady state up to {later}" if later > most else ""


def _strips(axes: Axes, heading: str, spans: Spans, labels: Sequence[str], scale: Scale) -> None:
    """Draw a strip for each row: the more versions, the higher and darker; their number stands where there is room."""
    if len(spans.row) > MOST_SPANS:
        raise RequestError("versions", f"change {len(spans.row):,} times, too often to be seen; simulate fewer --steps")
    panel(axes, heading, scale, 1)
    axes.grid(visible=False)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    named = range(0, len(labels), -(-len(labels) // _LABELLED_ROWS))
    axes.set_yticks(named, [labels[row] for row in named], fontsize=7)
    axes.tick_params(axis="y", length=0)
    largest = _largest(spans)
    for count in range(1, largest + 1):
        row, left, right = (column[spans.versions == count] for column in spans[:3])
        half, fill = 0.16 + 0.26 * count / max(2, largest), shade(count, largest)
        corners = [(left, row - half), (left, row + half), (right, row + half), (right, row - half)]
        boxes = list(np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1))
        edge = "white" if len(spans.row) <= _EDGED_SPANS else fill  # a white edge would cover narrow spans
        look: dict[str, Any] = {"facecolor": fill, "edgecolor": edge, "linewidth": 0.4, "gid": f"versions-{count}"}
        axes.add_collection(PolyCollection(boxes, **look), autolim=False)
    for row, begin, end, count in zip(*spans, strict=True) if len(labels) <= _LABELLED_ROWS else ():
        if end - begin >= scale.end / 40:
            ink = ink_on(shade(count, largest))
            axes.text((begin + end) / 2, row, str(count), ha="center", va="center_baseline", fontsize=6, color=ink)


def shade(count: int, largest: int) -> str:
    """Return the colour of a number of versions: the more, the darker."""
    return tint(COLOURS[6], 0.7 * (1 - (count - 1) / max(3, largest - 1)))


def _draw_ages(axes: Axes, run: Run, scale: Scale) -> None:
    """Draw the mean age of the versions that tasks read over time, and its mean in steady state."""
    series = mean_age(run)
    oldest = np.nan_to_num(series.total).max()
    panel(axes, "Mean age of the parameters that running tasks read, in training steps", scale, max(1.0, oldest))
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    few = thinned(series, scale.end)
    steps(axes, few.time, few.total, scale.end, "age", edgecolor=colour(0), linewidth=1.4)
    mean = run.steady_state.staleness
    level(axes, mean, f"steady\nmean: {mean:.3g}", "mean-age")

"""Times of training steps: of one run a line, of many runs the bands between their quantiles."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from cdpsim.draw.canvas import AS_DRAWN, GREY, INK, Look, one_unit, plain
from cdpsim.draw.curves import scale_of, steps
from cdpsim.draw.palette import COLOURS, tint
from cdpsim.draw.sheet import finish, new_page, titles
from cdpsim.draw.views import plain_title
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Floats
from cdpsim.studies.montecarlo import QUANTILE_SHARES, SampledRuns, sample_runs
from cdpsim.trace import Trace

MOST_PANELS = 8  # schedules below each other
_BINS = 20
_SIDE: dict[str, Any] = {"width_ratios": (5, 1)}
_BANDS = (("5%", "95%", tint(COLOURS[0], 0.85)), ("25%", "75%", tint(COLOURS[0], 0.55)))
_MEDIAN: dict[str, Any] = {"linewidth": 1.4}
_STEADY: dict[str, Any] = {"linewidth": 0.9, "linestyle": (0, (2, 1.5))}


def step_durations(traces: Sequence[Trace], *, runs: int | None = None, look: Look = AS_DRAWN) -> Figure:
    """Draw the time of each training step, from the end of one to the end of the next.

    With `runs`, draw this many runs of each trace's request: the median, the bands from 25 % to 75 % and from 5 % to
    95 %, the times if nothing were random; and beside them a histogram of the mean time of a step in each run.
    """
    scale, (title, names) = scale_of(traces, "s"), titles(traces)
    if len(traces) > MOST_PANELS:
        raise RequestError("traces", f"{len(traces)} are more than the {MOST_PANELS} panels of a picture; give fewer")
    samples = [None if runs is None else sample_runs(trace, runs) for trace in traces]
    figure = new_page(title, (1.8 if runs else 1.5) * len(traces) + 0.4, look)
    grid = figure.subplots(len(traces), 2 if runs else 1, squeeze=False, sharey=True, **_SIDE if runs else {})
    for k, ((axes, *side), trace, sample) in enumerate(zip(grid, traces, samples, strict=True)):
        words = [names[k]] * (len(traces) > 1)
        if sample is not None:
            values = np.quantile(sample.period, [QUANTILE_SHARES[name] for name in ("5%", "50%", "95%")]).tolist()
            low, median, high, steady = map(scale.amount, [*values, sample.steady_period])
            words.append(f"{median} a step ({low} to {high}), without chance {steady}")
        plain(axes, "; ".join(words), 8.5)
        if sample is None:
            _steps(axes, durations_of_steps(trace), f"step-times-{k}", edgecolor=COLOURS[0], zorder=3, **_MEDIAN)
        else:
            _bands(axes, sample, k)
            _histogram(side[0], sample, k)
        axes.margins(x=0, y=0.05)
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(4))
    most = grid[0, 0].get_ylim()[1]
    for axes in grid[:, 0]:
        axes.set_ylabel("slots" if scale.in_slots else f"time of a step, {one_unit(axes.yaxis, 's', most)}")
    grid[-1, 0].set_xlabel("training step")
    return finish(figure, look, {figure: _band_entries(runs) if runs else []}, columns=4)


def durations_of_steps(trace: Trace) -> Floats:
    """Return the time of each step, between the ends of all tasks and updates of two steps."""
    tasks = trace.tasks
    ends = np.zeros(int(tasks["step"].max()) + 1)
    np.maximum.at(ends, tasks["step"], tasks["end"])
    return _between(ends[:-1] if trace.rounds else ends)  # the last round of those is thrown away


def _between(ends: Floats) -> Floats:
    """Return the times of steps from their ends; several runs are rows."""
    return np.diff(ends, axis=-1, prepend=0)


def _steps(axes: Axes, value: Floats, gid: str, baseline: Floats | None = None, **style: Any) -> None:
    """Draw a value for each step, around its number."""
    steps(axes, np.arange(len(value)) - 0.5, value, len(value) - 0.5, gid, baseline, **style)


def _bands(axes: Axes, sample: SampledRuns, k: int) -> None:
    """Draw the bands, the median and the times if nothing were random."""
    taken = _between(sample.ends)
    for low, high, shade in _BANDS:
        least, most = np.quantile(taken, [QUANTILE_SHARES[low], QUANTILE_SHARES[high]], axis=0)
        _steps(axes, most, f"band-{k}-{low[:-1]}-{high[:-1]}", least, facecolor=shade, linewidth=0, zorder=2)
    median = np.quantile(taken, QUANTILE_SHARES["50%"], axis=0)
    _steps(axes, median, f"median-{k}", edgecolor=COLOURS[0], zorder=3, **_MEDIAN)
    _steps(axes, _between(sample.steady), f"steady-{k}", edgecolor=INK, zorder=3, **_STEADY)


def _histogram(axes: Axes, sample: SampledRuns, k: int) -> None:
    """Draw how many runs have which mean time of a step, beside the axis of times."""
    plain(axes, "")
    axes.set_xlabel("mean of each run", fontsize=7.5, color=GREY)
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.spines[["bottom"]].set_visible(False)
    axes.tick_params(left=False, labelleft=False)
    drawn: Any = axes.hist(sample.period, _BINS, orientation="horizontal", color=COLOURS[0])
    for row, bar in enumerate(drawn[2]):
        bar.set_gid(f"runs-{k}-{row}")


def _band_entries(runs: int) -> list[Artist]:
    outer, inner = (Patch(facecolor=shade, label=f"{low[:-1]} % to {high[:-1]} %") for low, high, shade in _BANDS)
    median = Line2D([], [], color=COLOURS[0], label=f"median of {runs:,} runs", **_MEDIAN)
    return [median, inner, outer, Line2D([], [], color=INK, label="if nothing were random", **_STEADY)]


def steps_line(trace: Trace, axes: Axes, **style: Any) -> None:
    """Draw the time of each training step into axes of another figure."""
    durations = durations_of_steps(trace)
    own = {"label": plain_title(trace), "drawstyle": "steps-mid"}
    axes.plot(np.arange(len(durations)), durations, **own | style)
    axes.set_xlabel("training step")
    most = axes.get_ylim()[1]
    axes.set_ylabel("slots" if trace.in_slots else f"time of a step, {one_unit(axes.yaxis, 's', most)}")

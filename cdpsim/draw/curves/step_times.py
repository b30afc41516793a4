"""How long each training step takes: of one run a line, of many the bands between their quantiles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cdpsim.draw.canvas import GREY, INK, plain
from cdpsim.draw.curves.panels import Frame, check, figure_of, frame, legend, names, steps
from cdpsim.draw.palette import COLOURS
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Floats
from cdpsim.studies.montecarlo import QUANTILE_SHARES, SampledRuns, sample_runs
from cdpsim.trace import Trace

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = 8  # schedules below each other
BINS = 20
BANDS = (("5%", "95%", "#d6dcfb"), ("25%", "75%", "#94a6f6"))  # tints of COLOURS[0]


def step_times(traces: Sequence[Trace], runs: int | None = None) -> "Figure":
    """Draw how long each training step takes, from the end of one to the end of the next.

    Of so many runs of each trace's request: the median, the bands from 25 % to 75 % and from 5 % to 95 %, what there
    would be if nothing were random; and beside them, in how many runs a step takes how long on average.
    """
    check(traces)
    if len(traces) > ROWS:
        raise RequestError("traces", f"{len(traces)} are more than the {ROWS} panels of a picture; give fewer")
    spreads = [None if runs is None else sample_runs(trace, runs) for trace in traces]
    heading, own = names(traces)
    shared = frame(traces, "s")
    figure, parts = figure_of(heading, [1.8 if runs else 1.5] * len(traces))
    limits = _limits(traces, spreads)
    for k, (part, trace, several) in enumerate(zip(parts, traces, spreads, strict=True)):
        words = [own[k]] * (len(traces) > 1)
        if several is None:
            axes = part.subplots()
            _line(axes, lengths(step_ends(trace)), f"step-times-{k}")
        else:
            axes, beside = part.subplots(1, 2, sharey=True, width_ratios=(5, 1))
            words += _said(several, shared)
            _bands(axes, several, k)
            _histogram(beside, several, k)
        _finish(axes, "; ".join(words), shared, limits, last=k == len(traces) - 1)
    if runs is not None:
        legend(figure, _entries(runs), 4)
    return figure


def step_ends(trace: Trace) -> Floats:
    """When all tasks and updates of each step have ended, from the columns of tasks.csv."""
    tasks = trace.tasks
    ends = np.zeros(int(tasks["step"].max()) + 1)
    np.maximum.at(ends, tasks["step"], tasks["end"])
    return ends


def lengths(ends: Floats) -> Floats:
    """How long each step takes, of its end; several runs in rows."""
    return np.diff(ends, axis=-1, prepend=0)


def _limits(traces: Sequence[Trace], spreads: Sequence[SampledRuns | None]) -> tuple[float, float]:
    """The least and the most that is drawn, and some room."""
    found = [lengths(step_ends(trace)) for trace in traces]
    for several in spreads:
        if several is not None:
            shares = np.quantile(lengths(several.ends), [QUANTILE_SHARES["5%"], QUANTILE_SHARES["95%"]], axis=0)
            found += [shares.ravel(), lengths(several.steady), np.quantile(several.period, [0.005, 0.995])]
    some = np.concatenate(found if spreads[0] is None else found[len(traces) :])
    low, high = some.min().item(), some.max().item()
    room = 0.08 * (high - low) or 0.5 * high
    return max(0.0, low - room), high + room


def _said(several: SampledRuns, shared: Frame) -> list[str]:
    """The median and the quantiles of a step, and what it takes without chance."""
    low, median, high = np.quantile(several.period, [QUANTILE_SHARES[name] for name in ("5%", "50%", "95%")]).tolist()
    against = f"without chance {shared.amount(several.steady_period)}"
    return [f"{shared.amount(median)} a step ({shared.amount(low)} to {shared.amount(high)}), {against}"]


def _line(axes: "Axes", value: Floats, gid: str, **style: object) -> None:
    line = steps(axes, value, _edges(value), gid)
    line.set(**{"edgecolor": COLOURS[0], "linewidth": 1.4, "zorder": 3} | style)


def _edges(value: Floats) -> Floats:
    """Each step stands around its number."""
    return np.arange(value.shape[-1] + 1) - 0.5


def _bands(axes: "Axes", several: SampledRuns, k: int) -> None:
    taken = lengths(several.ends)
    for low, high, shade in BANDS:
        least, most = np.quantile(taken, [QUANTILE_SHARES[low], QUANTILE_SHARES[high]], axis=0)
        area = steps(axes, most, _edges(most), f"band-{k}-{low[:-1]}-{high[:-1]}", least)
        area.set(facecolor=shade, linewidth=0, zorder=2)
    _line(axes, np.quantile(taken, QUANTILE_SHARES["50%"], axis=0), f"median-{k}")
    _line(axes, lengths(several.steady), f"steady-{k}", edgecolor=INK, linewidth=0.9, linestyle=(0, (2, 1.5)))


def _histogram(axes: "Axes", several: SampledRuns, k: int) -> None:
    """How many runs have which mean time of a step, beside the axis of times."""
    plain(axes, "")
    axes.set_xlabel("mean of each run", fontsize=7.5, color=GREY)
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.spines[["bottom"]].set_visible(False)
    axes.tick_params(left=False, labelleft=False)
    count, edges = np.histogram(several.period, BINS)
    for row, bar in enumerate(axes.barh(edges[:-1], count, np.diff(edges), align="edge", color=COLOURS[0])):
        bar.set_gid(f"runs-{k}-{row}")
    axes.set_xlim(0, 1.05 * max(count.max(), 1))


def _finish(axes: "Axes", words: str, shared: Frame, limits: tuple[float, float], *, last: bool) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    plain(axes, words, 8.5)
    axes.autoscale(enable=False)
    count = max(len(patch.get_data().edges) for patch in axes.patches if hasattr(patch, "get_data")) - 1
    axes.set(xlim=(-0.5, count - 0.5), ylim=limits)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if not shared.in_slots:
        axes.yaxis.set_major_formatter(EngFormatter("s"))
    axes.set_ylabel("slots" if shared.in_slots else "time of a step")
    if last:
        axes.set_xlabel("training step")


def _entries(runs: int) -> list["Artist"]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Line2D([], [], color=COLOURS[0], linewidth=1.4, label=f"median of {runs:,} runs"),
        Patch(facecolor=BANDS[1][2], label="25 % to 75 %"),
        Patch(facecolor=BANDS[0][2], label="5 % to 95 %"),
        Line2D([], [], color=INK, linewidth=0.9, linestyle=(0, (2, 1.5)), label="if nothing were random"),
    ]

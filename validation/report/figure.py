"""The figures of many replays and of a calibration: measured values, predicted ones, and the errors of these."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from cdpsim.draw.canvas import GREY, PALE, amount_text, defaults, plain
from cdpsim.draw.palette import COLOURS, colour, tint
from cdpsim.schedules import SCHEDULES

from .schema import Calibration, Point, Report, Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

CURVES = 40  # the most that fit
BAND = 0.01
_KEY_COLUMNS = 9
_MARKS = "osD^vP*Xhp"


Pairs: TypeAlias = list[tuple[float, float]]  # a measured value, and a simulated one or its error


class _Key(NamedTuple):
    """A colour for each schedule, and a mark for each model."""

    colours: dict[str, str]
    marks: dict[str, str]

    def draw(self, axes: "Axes", report: Report, pairs: Pairs, *, hollow: bool = False) -> None:
        """Draw dots of a report."""
        shade = self.colours[report.asked.schedule]
        measured, shown = np.reshape(pairs, (-1, 2)).T
        look: dict[str, Any] = {"s": 34, "marker": self.marks[report.asked.model], "linewidth": 0.6, "zorder": 3}
        look |= {"facecolor": "none", "edgecolor": shade} if hollow else {"facecolor": shade, "edgecolor": "white"}
        axes.scatter(measured, shown, clip_on=False, **look)

    def place(self, figure: "Figure") -> None:
        """Draw the key below a figure."""
        from matplotlib.lines import Line2D

        shown = [Line2D([], [], color=own, marker="s", linestyle="", label=name) for name, own in self.colours.items()]
        shown += [Line2D([], [], color=GREY, marker=own, linestyle="", label=name) for name, own in self.marks.items()]
        columns = -(-len(shown) // -(-len(shown) // _KEY_COLUMNS))
        figure.legend(handles=shown, loc="outside lower center", ncols=columns, fontsize=8.5, frameon=False)


@defaults()
def draw_reports(reports: list[Report]) -> "Figure":
    """Return a figure: memory and its errors on the left, errors of times below them if known, curves on the right."""
    from matplotlib.figure import Figure

    # Nothing measured is drawn at one byte or nanosecond, which a logarithmic axis can show.
    of_devices = [[(max(1.0, d.measured_bytes), 100 * d.relative_error) for d in own.memory.devices] for own in reports]
    memory, taken = list(zip(reports, of_devices, strict=True)), [(own, own.time) for own in reports if own.time]
    times = [(own, [(max(1e-9, time.measured_seconds), 100 * time.relative_error)]) for own, time in taken]
    chosen, key, rows = _chosen(reports), _shared_key(reports), 3 if times else 2
    columns = 2 if len(chosen) <= 4 else 3 if len(chosen) <= 9 else 4
    figure = Figure(figsize=(13, max(5.2 + rows, 1.3 + 1.75 * -(-len(chosen) // columns))), layout="constrained")
    widths = (1, 1.35 if len(chosen) <= 9 else 1.8)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=widths, wspace=0.03).flat
    panels = left.subplots(rows, 1, height_ratios=(2.6, 1, 1)[:rows])
    _scatter(panels[0], reports, key)
    _errors(panels[1], f"Its error, and a band of ±{BAND:.0%}", "B", memory, key, 150 * BAND)
    panels[1].axhspan(-100 * BAND, 100 * BAND, color=PALE, alpha=0.6, linewidth=0)
    if times:
        _errors(panels[2], "Error of the predicted time of a run", "s", times, key, 5)
    _curves(right, chosen, len(reports), columns, key)
    key.place(figure)
    return figure


def hue(number: int) -> str:
    """Return one of many colours: after each eight they are paler."""
    return tint(colour(number), 1 - 0.8 ** (number // len(COLOURS)))


def number_ratios(axis: "Axis") -> None:
    """Number a logarithmic axis by plain numbers: at 1, 2 and 5, or more closely where it is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)) if high < 3 * low else LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _shared_key(reports: list[Report]) -> _Key:
    """Return the key of reports; schedules of a family have one colour, which is paler for the simultaneous one."""
    names, models = ({getattr(own.asked, what) for own in reports} for what in ("schedule", "model"))
    order = list(dict.fromkeys([*SCHEDULES, *sorted(names)]))
    family = {name: name.removesuffix("-cdp").removesuffix("-dp") for name in order}
    families = list(dict.fromkeys(family.values()))
    hues = {name: hue(families.index(family[name])) for name in order if name in names}
    colours = {name: tint(own, 0.45) if name.endswith("-dp") else own for name, own in hues.items()}
    return _Key(colours, {model: _MARKS[k % len(_MARKS)] for k, model in enumerate(sorted(models))})


def _scatter(axes: "Axes", reports: list[Report], key: _Key) -> None:
    allocated = "; hollow: all of a process, by its allocator" if any(own.allocator for own in reports) else ""
    plain(axes, f"Peak activations of each device{allocated}")
    axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="simulated")
    for report in reports:
        accounts = report.allocator.processes if report.allocator else []
        pairs = [(own.measured_bytes, own.simulated_bytes) for own in report.memory.devices]
        hollow = [(own.measured_bytes, own.explained_bytes) for own in accounts]
        for sides in (pairs, hollow):
            key.draw(axes, report, [(max(1, x), max(1, y)) for x, y in sides], hollow=sides is hollow)
    ends = (min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1]))
    axes.plot(ends, ends, color=GREY, linewidth=0.9, zorder=1)
    axes.set(xlim=ends, ylim=ends)
    _decades(axes.xaxis, "B")
    _decades(axes.yaxis, "B")


def _errors(axes: "Axes", title: str, unit: str, dots: list[tuple[Report, Pairs]], key: _Key, least: float) -> None:
    """Draw errors in per cent over what was measured, on an axis whose middle is 0."""
    plain(axes, title)
    for report, pairs in dots:
        key.draw(axes, report, pairs)
    axes.set(xscale="log", xlabel="measured", ylabel="error, %")
    _centre(axes, 0, least)
    _decades(axes.xaxis, unit)


def _centre(axes: "Axes", exact: float, least: float) -> None:
    """Draw the line of what is exact, in the middle of an axis: 0 of differences, 1 of ratios on a logarithmic one."""
    axes.axhline(exact, color=GREY, linewidth=0.9)
    low, high = axes.get_ylim()
    most = max(least, high, 1 / low) if exact else max(least, -1.1 * low, 1.1 * high)
    axes.set_ylim(1 / most if exact else -most, most)


def _decades(axis: "Axis", unit: str, base: int = 10) -> None:
    """Number a logarithmic axis, more closely where it is short."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, NullLocator

    low, high = axis.get_view_interval()
    middle, half = (low * high) ** 0.5, max(10**0.3, (high / low) ** 0.5)
    axis.set_view_interval(middle / half, middle * half, ignore=True)
    subs = (1, 2, 3, 4, 6, 8) if half < 3 else (1, 2, 5) if half < 15 else (1,)
    axis.set_major_locator(LogLocator(base, subs))
    axis.set_major_formatter(EngFormatter(unit))
    axis.set_minor_formatter(NullFormatter())
    if base > 10:
        axis.set_minor_locator(NullLocator())


def _chosen(reports: list[Report]) -> list[Report]:
    """Return of each schedule the run with the most stages, without options if there is one."""
    best: dict[str, Report] = {}
    for report in sorted(reports, key=lambda each: (not each.options_text, each.asked.n), reverse=True):
        if report.memory.curve.slot:
            best.setdefault(report.asked.schedule, report)
    order = [*SCHEDULES, *sorted(best)]
    return [best[name] for name in sorted(best, key=order.index)][:CURVES]


def _curves(panel: "SubFigure", chosen: list[Report], count: int, columns: int, key: _Key) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    rows = min(columns, 3) if len(chosen) <= 9 else -(-len(chosen) // columns)
    grid = list(panel.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[len(chosen) :]:
        axes.set_visible(False)
    for axes, report in zip(grid, chosen, strict=False):
        asked, curve = report.asked, report.memory.curve
        after = ", " if columns < 4 else "\n"
        plain(axes, f"{asked.schedule}{after}n = {asked.n}, {asked.model}", size=8.5)
        axes.step(curve.slot, curve.simulated_bytes, where="mid", color=key.colours[asked.schedule], linewidth=1.6)
        size = 9 if len(curve.slot) < 50 else 4 if len(curve.slot) < 150 else 0.6
        axes.scatter(curve.slot, curve.measured_bytes, s=size, color="#222222", linewidth=0, zorder=3)
        axes.tick_params(labelsize=7.5)
        axes.set_ylim(0, 1.12 * max(1, *curve.simulated_bytes, *curve.measured_bytes))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(EngFormatter("B"))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    rest = f", {len(chosen)} of {count} runs" if len(chosen) < count else ""
    panel.suptitle(f"Activations of all devices over time: simulated (line), measured (dots){rest}", fontsize=9.5)
    panel.supxlabel("slot", fontsize=9)


Timed: TypeAlias = Sequence[tuple[Point | Task, float]]  # each with the relative error of its prediction


@defaults()
def draw_calibration(found: Calibration) -> "Figure":
    """Return a figure with a column for each kind of message and one for the stages; below each, its errors."""
    from matplotlib.figure import Figure

    link, both = found.one_way.fit, {"one way": found.one_way, "both ways at once": found.both_ways}
    bandwidth = link.bandwidth_bytes_per_second
    costs = ", of any size" if bandwidth is None else f" + size / {amount_text(bandwidth, 'B/s')}"
    transfers = {name: list(zip(own.points, own.fit.relative_errors, strict=True)) for name, own in both.items()}
    words = f"point to point\n{amount_text(link.latency_seconds, 's')}{costs}"
    panels: dict[str, Mapping[str, Timed]] = {words: transfers}
    for each in found.collectives:
        panels[f"{each.name}\n{each.best} on that link"] = _apart(each.points, each.on_link[each.best].relative_errors)
    passes = [task for task in found.compute.tasks if task.flop is not None]
    speed = amount_text(found.compute.speed_flop_per_second, "FLOP/s")
    panels[f"passes of stages\n{speed}"] = _apart(passes, found.compute.relative_errors)
    figure = Figure(figsize=(3.5 * len(panels), 6.4), layout="constrained")
    rows = figure.subplots(2, len(panels), height_ratios=(1.7, 1), sharex="col")
    for first, *others, _ in rows:
        for axes in others:
            axes.sharey(first)
    for (above, below), (title, series) in zip(rows.T, panels.items(), strict=True):
        _draw_times(above, below, title, series)
    for axes in rows[1]:
        _centre(axes, 1, 1.2)
        number_ratios(axes.yaxis)
    rows[0, 0].set_ylabel("time")
    rows[1, 0].set_ylabel("predicted / measured")
    return figure


def _apart(times: Sequence[Point | Task], errors: Sequence[float]) -> dict[str, Timed]:
    """Return times with their errors, by the size of group or the kind of task."""
    names = [time.kind if isinstance(time, Task) else f"{time.ranks} ranks" for time in times]
    rows = list(zip(names, times, errors, strict=True))
    return {name: [(time, error) for own, time, error in rows if own == name] for name in dict.fromkeys(names)}


def _draw_times(above: "Axes", below: "Axes", title: str, series: Mapping[str, Timed]) -> None:
    """Draw medians with bars from the faster to the slower quartile, the predictions, and the ratios of both."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    plain(above, title)
    plain(below, "")
    below.set_yscale("log")
    by_stage = isinstance(next(iter(series.values()))[0][0], Task)
    if not by_stage:
        above.set(xscale="log", yscale="log")
    for k, (name, own) in enumerate(series.items()):
        colour = hue(k)
        places = [time.stage if isinstance(time, Task) else time.size for time, _ in own]
        seconds, faster, slower = np.array([(time.seconds, time.faster, time.slower) for time, _ in own]).T
        ratios = np.array([1 + error for _, error in own])
        spread = seconds - faster, slower - seconds
        above.errorbar(places, seconds, spread, fmt="o", linewidth=1, markersize=4, color=colour, label=name)
        # The time of a message is linear in its size.
        dense = places if by_stage else np.geomspace(places[0], places[-1], 60)
        line: dict[str, Any] = {"marker": "_", "markersize": 13, "linewidth": 0} if by_stage else {"linewidth": 1.1}
        above.plot(dense, np.interp(dense, places, seconds * ratios), color=colour, **line)
        below.plot(places, ratios, "o-", linewidth=0 if by_stage else 0.6, markersize=4, color=colour)
    above.legend(fontsize=8, frameon=False, loc="upper left")
    below.set_xlabel("stage" if by_stage else "size")
    if by_stage:
        above.set(xlim=(-0.5, max(places) + 0.5), ylim=(0, 1.25 * above.get_ylim()[1]))
        above.yaxis.set_major_formatter(EngFormatter("s"))
        above.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    else:
        _decades(above.yaxis, "s")
        _decades(below.xaxis, "B", base=100)

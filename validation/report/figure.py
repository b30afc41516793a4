"""The figure of many replays: simulated against measured, their errors, and curves over time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cdpsim.draw.canvas import GREY, PALE, plain
from cdpsim.draw.palette import COLOURS, colour, tint
from cdpsim.schedules import SCHEDULES

from .schema import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

CURVES = 40  # the most that fit
BAND = 0.01
_KEY_COLUMNS = 9
_MARKS = "osD^vP*Xhp"


class _Dots(NamedTuple):
    """Measured and simulated values of a report's devices or processes."""

    report: Report
    measured: Sequence[float]
    simulated: Sequence[float]
    hollow: bool = False


class _Key(NamedTuple):
    """A colour for each schedule, and a mark for each model."""

    colours: dict[str, str]
    marks: dict[str, str]

    def draw(self, axes: "Axes", dots: _Dots) -> None:
        """Draw dots; those at 0 are at 1, which a logarithmic axis can show."""
        asked = dots.report.asked
        shade = self.colours[asked.schedule]
        axes.scatter(
            dots.measured,
            dots.simulated,
            s=34,
            marker=self.marks[asked.model],
            facecolor="none" if dots.hollow else shade,
            edgecolor=shade if dots.hollow else "white",
            linewidth=0.6,
            clip_on=False,
            zorder=3,
        )

    def place(self, figure: "Figure") -> None:
        """Draw the key below a figure."""
        from matplotlib.lines import Line2D

        shown = [Line2D([], [], color=own, marker="s", linestyle="", label=name) for name, own in self.colours.items()]
        shown += [Line2D([], [], color=GREY, marker=own, linestyle="", label=name) for name, own in self.marks.items()]
        columns = -(-len(shown) // -(-len(shown) // _KEY_COLUMNS))
        figure.legend(handles=shown, loc="outside lower center", ncols=columns, fontsize=8.5, frameon=False)


def draw_reports(reports: list[Report]) -> "Figure":
    """Return a figure: memory and its errors on the left, errors of times below them if known, curves on the right."""
    from matplotlib.figure import Figure

    devices, times = [(own, own.memory.devices) for own in reports], [own for own in reports if own.time]
    chosen, key, rows = _chosen(reports), _shared_key(reports), 3 if times else 2
    columns = 2 if len(chosen) <= 4 else 3 if len(chosen) <= 9 else 4
    figure = Figure(figsize=(13, max(5.2 + rows, 1.3 + 1.75 * -(-len(chosen) // columns))), layout="constrained")
    widths = (1, 1.35 if len(chosen) <= 9 else 1.8)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=widths, wspace=0.03).flat
    panels = left.subplots(rows, 1, height_ratios=(2.6, 1, 1)[:rows])
    _scatter(panels[0], reports, key)
    memory = [
        _Dots(own, [max(1, d.measured_bytes) for d in of], [100 * d.relative_error for d in of]) for own, of in devices
    ]
    _errors(panels[1], f"Its error, and a band of ±{BAND:.0%}", "B", memory, key, 150 * BAND)
    panels[1].axhspan(-100 * BAND, 100 * BAND, color=PALE, alpha=0.6, linewidth=0)
    if times:
        seconds = [
            _Dots(own, [max(1e-9, own.time.measured_seconds)], [100 * own.time.relative_error])
            for own in times
            if own.time
        ]
        _errors(panels[2], "Error of the predicted time of a run", "s", seconds, key, 5)
    _curves(right, chosen, len(reports), columns, key)
    key.place(figure)
    return figure


def hue(number: int) -> str:
    """Return one of many colours: after each eight they are paler."""
    return tint(colour(number), 1 - 0.8 ** (number // len(COLOURS)))


def number_ratios(axis: "Axis") -> None:
    """Number a logarithmic axis by plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _shared_key(reports: list[Report]) -> _Key:
    """Return the key of reports; schedules of a family have one colour, which is paler for the simultaneous one."""
    names, models = ({getattr(own.asked, what) for own in reports} for what in ("schedule", "model"))
    order = list(dict.fromkeys([*SCHEDULES, *sorted(names)]))
    families = list(dict.fromkeys(name.removesuffix("-cdp").removesuffix("-dp") for name in order))
    colours = {
        name: tint(hue(k), 0.45) if name.endswith("-dp") else hue(k)
        for name in order
        for k in [families.index(name.removesuffix("-cdp").removesuffix("-dp"))]
        if name in names
    }
    return _Key(colours, {model: _MARKS[k % len(_MARKS)] for k, model in enumerate(sorted(models))})


def _scatter(axes: "Axes", reports: list[Report], key: _Key) -> None:
    allocated = "; hollow: all of a process, by its allocator" if any(own.allocator for own in reports) else ""
    plain(axes, f"Peak activations of each device{allocated}")
    axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="simulated")
    for report in reports:
        devices, accounts = report.memory.devices, report.allocator.processes if report.allocator else []
        pairs = [(own.measured_bytes, own.simulated_bytes) for own in devices]
        hollow = [(own.measured_bytes, own.explained_bytes) for own in accounts]
        for sides, is_hollow in ((pairs, False), (hollow, True)):
            measured, simulated = ([max(1, pair[k]) for pair in sides] for k in (0, 1))
            key.draw(axes, _Dots(report, measured, simulated, is_hollow))
    ends = (min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1]))
    axes.plot(ends, ends, color=GREY, linewidth=0.9, zorder=1)
    axes.set(xlim=ends, ylim=ends)
    _decades(axes.xaxis, "B")
    _decades(axes.yaxis, "B")


def _errors(axes: "Axes", title: str, unit: str, dots: list[_Dots], key: _Key, least: float) -> None:
    """Draw errors in per cent over what was measured, on an axis whose middle is 0."""
    plain(axes, title)
    for own in dots:
        key.draw(axes, own)
    axes.axhline(0, color=GREY, linewidth=0.9)
    most = max(least, *(1.1 * abs(end) for end in axes.get_ylim()))
    axes.set(xscale="log", xlabel="measured", ylabel="error, %", ylim=(-most, most))
    _decades(axes.xaxis, unit)


def _decades(axis: "Axis", unit: str) -> None:
    """Number a logarithmic axis, more closely where it is short."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    middle, half = (low * high) ** 0.5, max(10**0.3, (high / low) ** 0.5)
    axis.set_view_interval(middle / half, middle * half, ignore=True)
    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6, 8) if half < 3 else (1, 2, 5) if half < 15 else (1,)))
    axis.set_major_formatter(EngFormatter(unit))
    axis.set_minor_formatter(NullFormatter())


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

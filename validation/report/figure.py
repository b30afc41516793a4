"""The figure of many replays: simulated against measured, their errors, and curves over time."""

from collections.abc import Iterator, Sequence
from colorsys import hsv_to_rgb
from itertools import count
from typing import TYPE_CHECKING

from cdpsim.draw.canvas import GREY, PALE, plain
from cdpsim.schedules import SCHEDULES

from .schema import Account, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

CURVES = 40  # as many as fit
_KEY_COLUMNS = 9
BAND = 0.01
# A hue for each family of the paper's schedules: pale for the simultaneous one, full for the cyclic one.
_FAMILY_HUES = {
    "single": ("#9ecae1", "#2171b5"),
    "multi": ("#fdbe85", "#d94701"),
    "mp": ("#a1d99b", "#238b45"),
    "pp": ("#c9a78f", "#7a4a2b"),
    "zero": ("#bcbddc", "#6a51a3"),
    "": ("#969696", "#969696"),  # of dp itself
}
_OTHERS = (
    *("#e7298a", "#1b9e9e", "#b8860b", "#525252", "#8c2d04", "#3f007d", "#ff9da7", "#17becf"),
    *("#66a61e", "#a6761d", "#f781bf", "#08306b", "#bcbd22", "#99000d", "#80b1d3", "#00441b", "#fed976", "#ef3b2c"),
    *("#4daf4a", "#6a3d9a", "#d95f02", "#fb8072", "#5e3c99"),
)
_GOLDEN = 0.618034  # of a turn: every further hue falls into the widest gap between those before
_MARKS = "osD^vP*Xhp"


def draw_reports(reports: list[Report]) -> "Figure":
    """Return a figure: memory and its errors on the left, errors of times below them if known, curves on the right."""
    from matplotlib.figure import Figure

    times = [report for report in reports if report.time]
    chosen = _chosen(reports)
    height = max(8.2 if times else 7.2, 1.3 + 1.75 * -(-len(chosen) // _columns(chosen)))
    figure = Figure(figsize=(13, height), layout="constrained")
    left, right = figure.subfigures(
        1, 2, squeeze=False, width_ratios=(1, 1.35 if len(chosen) <= 9 else 1.8), wspace=0.03
    ).flat
    panels = left.subplots(3 if times else 2, 1, height_ratios=(2.6, 1, 1)[: 3 if times else 2])
    colours, marks = _colours(reports), _marks(reports)
    _scatter(panels[0], reports, colours, marks)
    _memory_errors(panels[1], reports, colours, marks)
    if times:
        _time_errors(panels[2], times, colours, marks)
    _curves(right, chosen, len(reports), colours)
    _legend(figure, colours, marks)
    return figure


def _colours(reports: list[Report]) -> dict[str, str]:
    """Return a colour for each schedule, always the same for the paper's."""
    names = {report.asked.schedule for report in reports}
    known = [name for name in SCHEDULES if name in names]
    colours, others = {}, _other_colours()
    for name in known + sorted(names - set(known)):
        family, _, timing = name.rpartition("-")
        colours[name] = (
            _FAMILY_HUES[family][timing == "cdp"]
            if family in _FAMILY_HUES and timing in ("dp", "cdp")
            else next(others)
        )
    return colours


def _other_colours() -> Iterator[str]:
    """Yield colours of schedules that have no family: those that were chosen, then further hues."""
    yield from _OTHERS
    for k in count():
        red, green, blue = (round(255 * share) for share in hsv_to_rgb(k * _GOLDEN % 1, 0.7, 0.85))
        yield f"#{red:02x}{green:02x}{blue:02x}"


def _marks(reports: list[Report]) -> dict[str, str]:
    """Return a mark for each model."""
    models = sorted({report.asked.model for report in reports})
    return {model: _MARKS[k % len(_MARKS)] for k, model in enumerate(models)}


def _draw_dots(
    axes: "Axes",
    x: list[float],
    y: list[float],
    report: Report,
    colours: dict[str, str],
    marks: dict[str, str],
    *,
    hollow: bool = False,
) -> None:
    asked = report.asked
    colour = colours[asked.schedule]
    axes.scatter(
        x,
        y,
        s=34,
        marker=marks[asked.model],
        facecolor="none" if hollow else colour,
        edgecolor=colour if hollow else "white",
        linewidth=0.6,
        clip_on=False,
        zorder=3,
    )


def _measured(report: Report) -> list[float]:
    """Return each device's peaks above 0, which a logarithmic axis can show."""
    return [max(1.0, device.measured_bytes) for device in report.memory.devices]


def _sides(accounts: Sequence[Account]) -> tuple[list[int], list[int]]:
    """Return the measured bytes of accounts, and the simulated ones with all remainders."""
    return [each.measured_bytes for each in accounts], [each.explained_bytes for each in accounts]


def _scatter(axes: "Axes", reports: list[Report], colours: dict[str, str], marks: dict[str, str]) -> None:
    """Draw each device's simulated against its measured peak, and the same of each process by its allocator."""
    allocated = any(report.allocator for report in reports)
    plain(
        axes, "Peak activations of each device" + ("; hollow: all of a process, by its allocator" if allocated else "")
    )
    axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="simulated")
    for report in reports:
        devices = report.memory.devices
        _draw_dots(axes, _measured(report), [max(1.0, d.simulated_bytes) for d in devices], report, colours, marks)
        accounts = report.allocator.processes if report.allocator else []
        x, y = ([max(1.0, each) for each in own] for own in _sides(accounts))
        _draw_dots(axes, x, y, report, colours, marks, hollow=True)
    ends = (min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1]))
    axes.plot(ends, ends, color=GREY, linewidth=0.9, zorder=1)
    axes.set(xlim=ends, ylim=ends)
    _decades(axes.xaxis, "B")
    _decades(axes.yaxis, "B")


def _memory_errors(axes: "Axes", reports: list[Report], colours: dict[str, str], marks: dict[str, str]) -> None:
    """Draw the error of each device's peak, beside a band of one per cent."""
    plain(axes, f"Its error, and a band of ±{BAND:.0%}")
    for report in reports:
        errors = [100 * d.relative_error for d in report.memory.devices]
        _draw_dots(axes, _measured(report), errors, report, colours, marks)
    axes.axhspan(-100 * BAND, 100 * BAND, color=PALE, alpha=0.6, linewidth=0)
    axes.axhline(0, color=GREY, linewidth=0.9)
    _centre(axes, 150 * BAND)
    axes.set(xscale="log", xlabel="measured", ylabel="error, %")
    _decades(axes.xaxis, "B")


def _time_errors(axes: "Axes", reports: list[Report], colours: dict[str, str], marks: dict[str, str]) -> None:
    """Draw the error of the time of each run."""
    plain(axes, "Error of the predicted time of a run")
    for report in reports:
        assert report.time is not None
        x, y = [max(1e-9, report.time.measured_seconds)], [100 * report.time.relative_error]
        _draw_dots(axes, x, y, report, colours, marks)
    axes.axhline(0, color=GREY, linewidth=0.9)
    _centre(axes, 5)
    axes.set(xscale="log", xlabel="measured", ylabel="error, %")
    _decades(axes.xaxis, "s")


def _decades(axis: "Axis", unit: str) -> None:
    """Number a logarithmic axis, more closely where it is short."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    middle, half = (low * high) ** 0.5, max(10**0.3, (high / low) ** 0.5)
    axis.set_view_interval(middle / half, middle * half, ignore=True)
    digits = (1, 2, 3, 4, 6, 8) if half < 3 else (1, 2, 5) if half < 15 else (1,)
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(EngFormatter(unit))
    axis.set_minor_formatter(NullFormatter())


def _centre(axes: "Axes", least: float) -> None:
    """Centre an axis on an error of 0."""
    most = max(least, *(1.1 * abs(end) for end in axes.get_ylim()))
    axes.set_ylim(-most, most)


def _columns(chosen: list[Report]) -> int:
    """Return the number of columns of curves."""
    return 2 if len(chosen) <= 4 else 3 if len(chosen) <= 9 else 4


def _curves(panel: "SubFigure", chosen: list[Report], count: int, colours: dict[str, str]) -> None:
    """Draw the memory of all devices over time in the chosen runs."""
    columns = _columns(chosen)
    rows = min(columns, 3) if len(chosen) <= 9 else -(-len(chosen) // columns)
    for k, axes in enumerate(panel.subplots(rows, columns, squeeze=False).flat):
        axes.set_visible(k < len(chosen))
        if k < len(chosen):
            _curve(axes, chosen[k], colours[chosen[k].asked.schedule], ", " if columns < 4 else "\n")
    rest = f", {len(chosen)} of {count} runs" if len(chosen) < count else ""
    panel.suptitle(f"Activations of all devices over time: simulated (line), measured (dots){rest}", fontsize=9.5)
    panel.supxlabel("slot", fontsize=9)


def _chosen(reports: list[Report]) -> list[Report]:
    """Return of each schedule the run with the most stages, without options if there is one."""
    best: dict[str, Report] = {}
    for report in sorted(reports, key=lambda each: (not each.options_text, each.asked.n), reverse=True):
        if report.memory.curve.slot:
            best.setdefault(report.asked.schedule, report)
    order = [*SCHEDULES, *sorted(best)]
    return [best[name] for name in sorted(best, key=order.index)][:CURVES]


def _curve(axes: "Axes", report: Report, colour: str, after: str) -> None:
    """Draw one run; `after` comes in its title after the schedule."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    asked, curve = report.asked, report.memory.curve
    plain(axes, f"{asked.schedule}{after}n = {asked.n}, {asked.model}", size=8.5)
    axes.step(curve.slot, curve.simulated_bytes, where="mid", color=colour, linewidth=1.6)
    size = 9 if len(curve.slot) < 50 else 4 if len(curve.slot) < 150 else 0.6
    axes.scatter(curve.slot, curve.measured_bytes, s=size, color="#222222", linewidth=0, zorder=3)
    axes.tick_params(labelsize=7.5)
    axes.set_ylim(0, 1.12 * max(1, *curve.simulated_bytes, *curve.measured_bytes))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _legend(figure: "Figure", colours: dict[str, str], marks: dict[str, str]) -> None:
    """Draw the key: colours are schedules, marks are models."""
    from matplotlib.lines import Line2D

    shown = [Line2D([], [], color=colour, marker="s", linestyle="", label=name) for name, colour in colours.items()]
    shown += [Line2D([], [], color=GREY, marker=mark, linestyle="", label=name) for name, mark in marks.items()]
    columns = -(-len(shown) // -(-len(shown) // _KEY_COLUMNS))
    figure.legend(handles=shown, loc="outside lower center", ncols=columns, fontsize=8.5, frameon=False)

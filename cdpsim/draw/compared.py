"""Comparisons of schedules as bars: a panel for each measure, a bar for each run."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdpsim.draw.canvas import INK, label, plain
from cdpsim.draw.look import AS_DRAWN, Look
from cdpsim.draw.palette import COLOURS
from cdpsim.draw.sheet import ORDINARY, finish, lines_of, new_page
from cdpsim.files.units import short_text
from cdpsim.studies.compare import Measured, rate_column
from cdpsim.studies.comparison_columns import SPLIT_NOTE, Comparison

_RATES = {"tokens": "tokens per second", "samples": "samples per second", "rate": "micro-batches per second"}
_NAMES, _PANEL = 1.6, 1.1  # inches: the width of the names of bars, and the least width of a panel


def comparison_bars(comparison: Comparison, look: Look = AS_DRAWN) -> Figure:
    """Draw the figures of runs as bars; of the idle time, the part that waits for messages is darker.

    Of many runs there are bars of the median step, with a line from the 5 % quantile to that of 95 %. Where panels have
    no room side by side, they are in several rows.
    """
    measured, slots = comparison.measured, comparison.slots
    measures = _measures(measured, slots=slots)
    wide = look.inches_wide or _NAMES + 1.6 * len(measures)
    room = wide / ((look.letters or ORDINARY) / ORDINARY) - _NAMES  # inches, in letters of an ordinary size
    across = min(len(measures), max(1, int(room / _PANEL)))
    down = -(-len(measures) // across)
    figure = new_page(heading_of(comparison), 0.4 + down * (0.28 * len(measured) + 0.5), look, wide)
    panels = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes, (column, heading, unit) in zip(panels.flat, measures, strict=False):
        plain(axes, "\n".join(lines_of(heading, 72 * room / across, 9)), size=9)
        _draw_column(axes, measured, column, "" if slots and unit != "%" else unit)
    for axes in panels.flat[len(measures) :]:
        axes.axis("off")
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(measured)), _row_labels(comparison), fontsize=8.5)
    panels[0, 0].set_ylim(len(measured) - 0.4, -0.6)
    notes = ["dark: waiting for a message"] * any(one.exposed for one in measured)
    if any(one.steps for one in measured):
        notes.append("bars: the median of the runs; lines: from their 5 % to their 95 % quantile")
    notes += ["!: more than a device has"] * (not all(one.fits for one in measured))
    return finish(figure, look, {figure: []}, title=notes_of(comparison, notes))


def heading_of(comparison: Comparison) -> str:
    """Return the title of a picture of a comparison."""
    measured, heads = comparison.measured, [head for head in comparison.heads if head != SPLIT_NOTE]
    if not heads:
        alike = [name for name in ("n", "m") if len({getattr(one, name) for one in measured}) == 1]
        heads = [", ".join(f"{name} = {getattr(measured[0], name)}" for name in alike)] * bool(alike)
    return label("; ".join(["Schedules side by side", *heads]), 300)


def notes_of(comparison: Comparison, notes: Sequence[str]) -> str:
    """Return the lines that belong below a picture of a comparison."""
    return "\n".join(label(text, 1000) for text in (*[SPLIT_NOTE] * comparison.split, *notes, *comparison.notes))


def _measures(measured: Sequence[Measured], *, slots: bool) -> list[tuple[str, str, str]]:
    """Return the columns with their headings and units; times of a step only where all steps are alike."""
    rate = rate_column(measured)
    heading = "micro-batches per slot" if slots else _RATES[rate]
    found = [(rate, heading, "number")]
    alike = len({(one.micro_batches, one.batch) for one in measured}) == 1
    if alike or any(one.steps for one in measured):
        found.append(("step", "training step", "s"))
    if any(one.mfu for one in measured):
        found.append(("mfu", "MFU", "%"))
    found += [("bubble", "bubble", "%"), ("memory", "memory, fullest device", "B")]
    found += [("sent", "sent for a step", "B")] * alike
    if len({one.devices for one in measured}) > 1:
        found.append(("devices", "devices", ""))
    return found


def _draw_column(axes: Axes, measured: Sequence[Measured], column: str, unit: str) -> None:
    """Draw the bars of a column, with their numbers; a line from the 5 % to the 95 % quantile of many runs."""
    for row, one in enumerate(measured):
        quantiles = one.steps if column == "step" else None
        value = one.value("50%" if quantiles else column)
        look: dict[str, Any] = {"height": 0.62, "color": COLOURS[4] if column == "bubble" else COLOURS[0]}
        if quantiles:
            low, median, high = (quantiles[name] for name in ("5%", "50%", "95%"))
            look |= {"xerr": [[median - low], [high - median]], "ecolor": INK, "capsize": 2.5}
        bars = axes.barh(row, value or 0, **look)
        bars[0].set_gid(f"{column}-{row}")
        for part in bars.errorbar.lines[2] if bars.errorbar else ():
            part.set_gid(f"step-{row}-from-5-to-95")
        if column == "bubble":
            axes.barh(row, one.exposed, height=0.62, color=COLOURS[0], gid=f"exposed-{row}")
        excess = column == "memory" and not one.fits
        ink = COLOURS[5] if excess else INK
        axes.bar_label(bars, [_bar_text(value, unit) + " !" * excess], padding=3, fontsize=7.5, color=ink)
    axes.set_xlim(0, axes.dataLim.x1 or 1)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False)


def _row_labels(comparison: Comparison) -> list[str]:
    """Return the schedule of each row with its mark; with its rule and options where another row has the same."""
    measured, labels = comparison.measured, []
    for one in measured:
        rules = {other.rule for other in measured if other.schedule == one.schedule}
        words = [one.schedule + comparison.mark(one), *(f"{name} {value}" for name, value in one.asked.items())]
        labels.append(label(", ".join(words + [one.rule] * (len(rules) > 1))))
    return labels


def _bar_text(value: float | None, unit: str) -> str:
    """Return the number at the end of a bar; `-` for None."""
    if value is None:
        return "-"
    if unit in ("", "number"):
        return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"
    return short_text(value, unit, 4 if unit == "%" else 3)

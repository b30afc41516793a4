"""Schedules side by side: a row for each, a panel for each thing that is measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdpsim.draw.canvas import GREY, INK, caption, label, plain
from cdpsim.draw.palette import COLOURS
from cdpsim.studies.compare import Measured, rate_column, table_notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (
    ("step", "training step", "s"),
    ("rate", "micro-batches", "/s"),
    ("samples", "samples", "/s"),
    ("bubble", "share of time idle", "%"),
    ("memory", "memory, fullest device", "B"),
    ("sent", "sent for a step", "B"),
    ("devices", "devices", ""),
)


def compared(measured: Sequence[Measured], *, in_slots: bool) -> "Figure":
    """Draw what runs come to; of the idle time, the part that waits for messages is darker.

    Of many runs the median step is drawn, and a line from the 5 % quantile to that of 95 %.
    """
    from matplotlib.figure import Figure

    shown = [panel for panel in PANELS if panel[0] not in {"rate", "samples"} - {rate_column(measured)}]
    figure = Figure(figsize=(12.5, 0.9 + 0.28 * len(measured)), layout="constrained")
    caption(figure, table_notes(measured))
    panels = figure.subplots(1, len(shown), sharey=True)
    for k, (axes, (field, title, unit)) in enumerate(zip(panels, shown, strict=True)):
        plain(axes, title, size=9)
        values = [_drawn(one, field) or 0 for one in measured]
        _bars(axes, values, COLOURS[4] if field == "bubble" else COLOURS[0], field)
        if field == "bubble":
            _bars(axes, [one.exposed for one in measured], COLOURS[0], "exposed")
        for row, one in enumerate(measured):
            words, fits = _said(_drawn(one, field), "" if in_slots and unit != "%" else unit), True
            beyond = values[row]
            if field == "step" and one.steps is not None:
                beyond = _spread(axes, row, one.steps)
            if field == "memory" and not one.fits:
                words, fits = f"{words}, too much", False
            style = {"va": "center", "fontsize": 7.5, "color": INK if fits else COLOURS[5]}
            axes.annotate(words, (beyond, row), xytext=(3, 0), textcoords="offset points", **style)
        axes.set_xlim(0, 1.45 * max(values) or 1)
        axes.set_xticks([])
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(left=False)
        if k == 0:
            axes.set_yticks(range(len(measured)), [_name(one, measured) for one in measured], fontsize=8.5)
            axes.set_ylim(len(measured) - 0.4, -0.6)
    dark = ["dark: waiting for a message"] * any(one.exposed for one in measured)
    if any(one.steps for one in measured):
        words = "; ".join(["time of a step: the median of the runs, and from their 5 % to their 95 % quantile", *dark])
        figure.supxlabel(words, x=0.99, ha="right", fontsize=7.5, color=GREY)
    elif dark:
        figure.text(0.99, 0.005, dark[0], ha="right", fontsize=7.5, color=GREY)
    return figure


def _drawn(one: Measured, field: str) -> float | None:
    value: float | None = one.value("50%" if field == "step" and one.steps is not None else field)
    return value


def _spread(axes: "Axes", row: int, steps: dict[str, float]) -> float:
    """A line from the 5 % to the 95 % quantile; where it ends."""
    line = axes.errorbar(
        steps["50%"],
        row,
        xerr=[[steps["50%"] - steps["5%"]], [steps["95%"] - steps["50%"]]],
        color=INK,
        linewidth=1.0,
        capsize=2.5,
    )
    for part in line.lines[2]:
        part.set_gid(f"step-{row}-from-5-to-95")
    return steps["95%"]


def _bars(axes: "Axes", values: Sequence[float], colour: str, field: str) -> None:
    for row, bar in enumerate(axes.barh(range(len(values)), values, height=0.62, color=colour)):
        bar.set_gid(f"{field}-{row}")


def _name(one: Measured, measured: Sequence[Measured]) -> str:
    """A schedule, with its rule where another run of it is there too."""
    alike = [other for other in measured if other.schedule == one.schedule]
    return label(one.schedule if len(alike) == 1 else f"{one.schedule}, {one.rule}")


def _said(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "%":
        return f"{100 * value:.0f} %"
    if not unit:
        return f"{value:.10g}" if value == int(value) else f"{value:.4g}"
    if unit == "/s":
        return f"{value:.3g} /s"  # a thousandth of it looks like metres
    from quantiphy import Quantity

    return str(Quantity(value, unit).render(prec=2))

"""Traffic over time: what is sent at single moments, or the rate at which it travels where messages take time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cdpsim.draw.canvas import GREY, label
from cdpsim.draw.curves.panels import Frame, check, figure_of, frame, legend, mark, names, panel, peak
from cdpsim.draw.curves.piles import Look, by_device, curve, curve_entry, entries, height_of, pile
from cdpsim.draw.curves.series import SAME, Series, devices, moments, rates, span
from cdpsim.draw.palette import CONTENT_COLOURS
from cdpsim.numeric.columns import Ints
from cdpsim.program import Content
from cdpsim.runs import Run
from cdpsim.trace import Trace
from cdpsim.trace.metrics.traffic import copied_bytes, sent_shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_HATCHES = {
    Content.PARAMETERS: "///",
    Content.GRADIENT: "....",
    Content.STATE: "xxx",
    Content.ACTIVATION: "",
    Content.ACTIVATION_GRADIENT: "\\\\\\",
}
LOOKS = {
    int(part): Look(part.name.lower().replace("_", " "), CONTENT_COLOURS[part], hatch)
    for part, hatch in _HATCHES.items()
}


def traffic(traces: Sequence[Trace]) -> "Figure":
    """Draw what is sent over time: at single moments where messages take no time, else the rate at which it travels.

    Of one trace the total by content, and what each device sends; of several the totals.
    """
    check(traces)
    at_once = not any(_timed(trace).any() for trace in traces)
    shared = frame(traces, "B" if at_once else "B/s", at_once=at_once)
    return _one(traces[0], shared) if len(traces) == 1 else _several(traces, shared)


def _timed(trace: Trace) -> np.ndarray:
    """Which messages take time."""
    timed: np.ndarray = trace.messages["end"] - trace.messages["start"] > SAME * span(trace)
    return timed


def _over_time(trace: Trace, message: Ints, size: np.ndarray, shared: Frame) -> Series:
    """So much of some rows of messages, over time and by content."""
    messages = trace.messages
    some = (size > 0) & (shared.at_once | _timed(trace)[message])
    message, size = message[some], size[some]
    content = np.zeros(len(message), dtype=np.int64)
    for member in Content:
        content[messages["content"][message] == member.name.lower()] = member
    start, end = messages["start"][message], messages["end"][message]
    if shared.at_once:
        return moments(content, start, size, len(Content), shared.end)
    return rates(content, start, end, size, len(Content), shared.end)


def by_content(trace: Trace, shared: Frame) -> Series:
    """What must leave a device, whatever algorithm carries it, by content."""
    every = np.arange(len(trace.messages["size"]))
    return _over_time(trace, every, copied_bytes(trace.messages), shared)


def by_sender(trace: Trace, shared: Frame) -> dict[int, Series]:
    """What each device sends by content; collectives as their algorithms have it."""
    message, device, size = sent_shares(
        trace.messages, _collective(trace), trace.algorithms if isinstance(trace, Run) else None
    )
    found = {}
    for number in np.union1d(devices(trace), device).tolist():
        rows = np.flatnonzero(device == number)
        found[number] = _over_time(trace, message[rows], size[rows], shared)
    return found


def _collective(trace: Trace) -> str:
    return str(trace.request.get("collective"))


def _one(trace: Trace, shared: Frame) -> "Figure":
    total, found = by_content(trace, shared), by_sender(trace, shared)
    many = len(total.time) > 0 and len(found) > 1
    figure, parts = figure_of(names([trace])[0], [2.7, *[height_of(len(found))] * many])
    axes = _axes(parts[0], [trace], [total], shared)
    pile(axes, total, LOOKS, shared, "sent")
    if len(total.time):
        mark(axes, peak(total), f"{shared.peak(total)}, {_mean(trace, shared)}", "peak")
    if many:
        by_device(parts[1], found, LOOKS, shared, "sent", _algorithm(trace))
    legend(figure, entries(LOOKS, total))
    return figure


def _several(traces: Sequence[Trace], shared: Frame) -> "Figure":
    heading, own = names(traces)
    totals = [by_content(trace, shared) for trace in traces]
    figure, parts = figure_of(heading, [2.9 + 0.18 * len(traces)])
    axes = _axes(parts[0], traces, totals, shared)
    lines = []
    for k, (trace, series) in enumerate(zip(traces, totals, strict=True)):
        text = f"{own[k]}: nothing is sent"
        if len(series.time):
            curve(axes, series, shared, k, len(traces), f"sent-{k}")
            text = f"{own[k]}: {shared.peak(series)}, {_mean(trace, shared)}"
        lines.append(curve_entry(shared, k, text))
    legend(figure, lines, 1)
    return figure


def _axes(part: "SubFigure", traces: Sequence[Trace], totals: Sequence[Series], shared: Frame) -> "Axes":
    """The panel of what all devices send together, with a word on how it is counted."""
    axes = part.subplots()
    heading = "Sent by all devices together"
    if _collectives(traces):
        heading += "; a collective of k counts k − 1 copies, an all-reduce 2(k − 1)"
    panel(axes, heading, shared, max(peak(each)[1] for each in totals))
    axes.set_ylabel("stages' worth at a moment" if shared.in_slots else "at a moment" if shared.at_once else "rate")
    if not any(len(each.time) for each in totals):
        axes.text(0.5, 0.5, "nothing is sent", transform=axes.transAxes, ha="center", color=GREY, fontsize=9)
    rest = 0 if shared.at_once else sum(int(copied_bytes(each.messages)[~_timed(each)].sum()) for each in traces)
    if rest:
        text = f"without {shared._replace(unit='B').amount(rest)} that take no time"
        axes.annotate(text, (1, 1), (0, -9), "axes fraction", "offset points", ha="right", fontsize=7.5, color=GREY)
    return axes


def _collectives(traces: Sequence[Trace]) -> bool:
    return any((trace.messages["op"] != "p2p").any() for trace in traces)


def _algorithm(trace: Trace) -> str:
    """How collectives are done, where there are some: the rest by binomial trees, as everywhere."""
    if (trace.messages["op"] == "all_reduce").any():
        return f", all-reduces by {label(_collective(trace))}"
    if not _collectives([trace]):
        return ""
    in_parts = _collective(trace) in ("halving-doubling", "best")
    return f", collectives by {label(_collective(trace))}" if in_parts else ", collectives by binomial trees"


def _mean(trace: Trace, shared: Frame) -> str:
    """All that a trace sends, and that over its own time."""
    total = int(copied_bytes(trace.messages).sum())
    mean = shared._replace(unit="B/s").amount(total / span(trace))
    return f"{shared._replace(unit='B').amount(total)} in all, mean {mean}{' per slot' if shared.in_slots else ''}"

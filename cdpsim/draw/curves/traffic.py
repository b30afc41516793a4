"""Traffic over time: the bytes sent at single moments, or the rate at which they travel where messages take time."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdpsim.draw.canvas import GREY, INK, label
from cdpsim.draw.curves import panels
from cdpsim.draw.curves.panels import Scale
from cdpsim.draw.curves.step_functions import Series, end_of_run, rates, sum_at_times, used_devices
from cdpsim.draw.palette import CONTENT_COLOURS
from cdpsim.draw.views import codes
from cdpsim.numeric.columns import CLOSE_TIMES, Ints, Times, merge_close_times
from cdpsim.program import Content
from cdpsim.runs import Run
from cdpsim.trace import Trace
from cdpsim.trace.metrics.communication import copied_bytes, sent_shares

_SUM_HEIGHT = 1.6  # inches
_TRAFFIC_LAYERS = panels.layers_of(
    (
        Content.PARAMETERS,
        Content.GRADIENT,
        Content.STATE,
        Content.NORM,
        Content.FETCHED,
        Content.ACTIVATION,
        Content.ACTIVATION_GRADIENT,
    ),
    CONTENT_COLOURS,
)


def traffic_over_time(traces: Sequence[Trace]) -> Figure:
    """Draw the bytes sent over time: at single moments if no message takes time, else the rate at which they travel.

    Of one trace the total by content, and the bytes that each device sends; of several the totals.
    """
    panels.refuse_undrawable(traces)
    at_once = not any(take_time(trace).any() for trace in traces)
    scale = panels.scale_of(traces, "B" if at_once else "B/s", at_once=at_once)
    return _traffic_of_one(traces[0], scale) if len(traces) == 1 else _traffic_of_several(traces, scale)


def take_time(trace: Trace) -> np.ndarray:
    """Return whether each message takes time."""
    takes_time: np.ndarray = trace.messages["end"] - trace.messages["start"] > CLOSE_TIMES * end_of_run(trace)
    return takes_time


def _sizes_over_time(trace: Trace, message: Ints, size: np.ndarray, scale: Scale) -> Series:
    """Return sizes, each of a row of messages, over time and by content."""
    messages = trace.messages
    drawn = (size > 0) & (scale.at_once | take_time(trace)[message])
    message, size = message[drawn], size[drawn]
    content = codes(messages["content"][message], Content)
    start, end = messages["start"][message], messages["end"][message]
    if scale.at_once:
        return sum_at_times(content, merge_close_times(start, scale.end), size, len(Content))
    return rates(content, start, end, size, len(Content), scale.end)


def traffic_by_content(trace: Trace, scale: Scale) -> Series:
    """Return the bytes that must leave devices over time by content; they do not depend on algorithms."""
    every = np.arange(len(trace.messages["size"]))
    return _sizes_over_time(trace, every, copied_bytes(trace.messages), scale)


def traffic_by_sender(trace: Trace, scale: Scale) -> dict[int, Series]:
    """Return the bytes that each device sends over time by content; collectives run by their algorithms."""
    algorithms = trace.algorithms if isinstance(trace, Run) else None
    message, device, size = sent_shares(trace.messages, _collective(trace), algorithms)
    rows = {number: np.flatnonzero(device == number) for number in np.union1d(used_devices(trace), device).tolist()}
    return {number: _sizes_over_time(trace, message[own], size[own], scale) for number, own in rows.items()}


def _collective(trace: Trace) -> str:
    """Return the name of the algorithm of collectives that was requested."""
    return str(trace.request.get("collective"))


def _traffic_of_one(trace: Trace, scale: Scale) -> Figure:
    """Draw the total by content, and the bytes that each device sends."""
    total = traffic_by_content(trace, scale)
    each = traffic_by_sender(trace, scale) if len(total.time) else {}
    title, how = panels.titles([trace])[0], _algorithm_note(trace)
    figure, (axes, *below) = panels.stacked_figure(
        title, scale, total, each, _TRAFFIC_LAYERS, "sent", how, more=[_SUM_HEIGHT] * bool(each)
    )
    _traffic_panel(axes, [trace], [total], scale)
    for sums in below:
        axes.set_xlabel("")
        _draw_sums(sums, [trace], [total], scale)
    if len(total.time):
        panels.mark_peak(axes, panels.peak(total), f"{scale.peak(total)}, {_sum_and_mean(trace, scale)}", "peak")
    return figure


def _traffic_of_several(traces: Sequence[Trace], scale: Scale) -> Figure:
    """Draw a curve for each trace; the legend says of which traces nothing is sent."""
    title, names = panels.titles(traces)
    totals = [traffic_by_content(trace, scale) for trace in traces]
    figure, parts = panels.figure_of(title, [2.9 + _SUM_HEIGHT + 0.18 * len(traces)])
    axes, below = parts[0].subplots(2, 1, sharex=True, height_ratios=[2.9, _SUM_HEIGHT])
    _traffic_panel(axes, traces, totals, scale)
    axes.set_xlabel("")
    panels.draw_curves(axes, totals, scale, "sent", list(map(end_of_run, traces)))
    _draw_sums(below, traces, totals, scale)
    texts = [
        f"{name}: {f'{scale.peak(total)}, {_sum_and_mean(trace, scale)}' if len(total.time) else 'nothing is sent'}"
        for name, trace, total in zip(names, traces, totals, strict=True)
    ]
    panels.curve_legend(figure, scale, texts)
    return figure


def sent_so_far(total: Series, end: float, *, at_once: bool) -> tuple[Times, np.ndarray]:
    """Return the sum of all that is sent until each time: it jumps if messages take no time, else it grows evenly."""
    time = np.concatenate([[0], total.time, [end]])
    if at_once:
        return time, np.concatenate([[0], total.total.cumsum(), [total.total.sum()]])
    rate = np.concatenate([[0], total.total])
    return time, np.concatenate([[0], (rate * np.diff(time)).cumsum()])


def _draw_sums(axes: Axes, traces: Sequence[Trace], totals: Sequence[Series], scale: Scale) -> None:
    """Draw what has been sent so far, a line for each trace: level while nothing is sent."""
    ends = list(map(end_of_run, traces))
    lines = [sent_so_far(total, end, at_once=scale.at_once) for total, end in zip(totals, ends, strict=True)]
    unit = "stages' worth" if scale.in_slots else "sent"
    panels.panel(axes, "Sent so far", scale._replace(unit="B"), max(line[1][-1] for line in lines), unit)
    for k, (time, value) in enumerate(lines):
        look = panels.look_of_curve(k, len(lines)) if len(lines) > 1 else {"color": INK, "linewidth": 1.2}
        drawstyle = "steps-post" if scale.at_once else "default"
        axes.plot(time, value, drawstyle=drawstyle, gid=f"sum-{k}", solid_joinstyle="miter", **look)


def _traffic_panel(axes: Axes, traces: Sequence[Trace], totals: Sequence[Series], scale: Scale) -> None:
    """Set up the axes of the traffic of all devices together, with notes on how it is counted."""
    heading = "Sent by all devices together"
    if any(map(_has_collectives, traces)):
        heading += "; a collective of k counts k − 1 copies, an all-reduce 2(k − 1)"
    unit = "stages' worth at a moment" if scale.in_slots else "at a moment" if scale.at_once else "rate"
    panels.panel(axes, heading, scale, max(panels.peak(total)[1] for total in totals), unit)
    if not any(len(total.time) for total in totals):
        axes.text(0.5, 0.5, "nothing is sent", transform=axes.transAxes, ha="center", color=GREY, fontsize=9)
    instant = 0 if scale.at_once else sum(int(copied_bytes(each.messages)[~take_time(each)].sum()) for each in traces)
    if instant:
        text = f"without {scale.amount(instant, 'B')} that take no time"
        axes.annotate(text, (1, 1), (0, -9), "axes fraction", "offset points", ha="right", fontsize=7.5, color=GREY)


def _has_collectives(trace: Trace) -> bool:
    return bool((trace.messages["op"] != "p2p").any())


def _algorithm_note(trace: Trace) -> str:
    """Return by which algorithms collectives run, if there are any; but for all-reduces, binomial trees by default."""
    name = label(_collective(trace))
    if (trace.messages["op"] == "all_reduce").any():
        return f", all-reduces by {name}"
    if not _has_collectives(trace):
        return ""
    return f", collectives by {name if name in ('halving-doubling', 'best') else 'binomial trees'}"


def _sum_and_mean(trace: Trace, scale: Scale) -> str:
    """Return the sum of the bytes that a trace sends, and their mean over its own time."""
    total = int(copied_bytes(trace.messages).sum())
    mean = scale.amount(total / end_of_run(trace), "B/s")
    return f"{scale.amount(total, 'B')} in all, mean {mean}{' per slot' if scale.in_slots else ''}"

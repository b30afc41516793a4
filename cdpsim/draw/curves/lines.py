"""Curves in axes of a figure of one's own: a line for each run, in the colours and with the labels of that figure."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from cdpsim.draw import views
from cdpsim.draw.canvas import one_unit
from cdpsim.draw.curves import panels
from cdpsim.draw.curves.memory import holder_of
from cdpsim.draw.curves.step_times import durations_of_steps
from cdpsim.draw.curves.traffic import sent_so_far, take_time, traffic_by_content
from cdpsim.draw.curves.versions import draw_strips
from cdpsim.trace import Trace


def memory_line(trace: Trace, axes: Axes, *, sums: bool = False, **style: Any) -> None:
    """Draw what the fullest device holds over time, or with `sums` all devices together."""
    series, end, _ = holder_of(trace, sums=sums)
    time, total = np.append(series.time, end), np.append(series.total, series.total[-1:])
    axes.plot(time, total, drawstyle="steps-post", **_labelled(trace, style))
    _name_axes(axes, trace, "memory")


def traffic_line(trace: Trace, axes: Axes, **style: Any) -> None:
    """Draw what all devices together have sent until each time."""
    at_once = not take_time(trace).any()
    scale = panels.scale_of([trace], "B" if at_once else "B/s", at_once=at_once)
    time, sent = sent_so_far(traffic_by_content(trace, scale), scale.end, at_once=at_once)
    axes.plot(time, sent, drawstyle="steps-post" if at_once else "default", **_labelled(trace, style))
    _name_axes(axes, trace, "sent so far")


def steps_line(trace: Trace, axes: Axes, **style: Any) -> None:
    """Draw how long each training step takes."""
    durations = durations_of_steps(trace)
    axes.plot(np.arange(len(durations)), durations, drawstyle="steps-mid", **_labelled(trace, style))
    axes.set_xlabel("training step")
    most = axes.get_ylim()[1]
    axes.set_ylabel("slots" if trace.in_slots else f"time of a step, {one_unit(axes.yaxis, 's', most)}")


def versions_strips(trace: Trace, axes: Axes) -> None:
    """Draw how many versions of parameters each device keeps of each stage."""
    draw_strips(trace, axes)


def _labelled(trace: Trace, style: dict[str, Any]) -> dict[str, Any]:
    """Return the style of a line with a label: the one that was given, or the trace's own."""
    return {"label": views.plain_title(trace)} | style


def _name_axes(axes: Axes, trace: Trace, what: str) -> None:
    """Name both axes, with the unit of the largest number on each."""
    if trace.in_slots:
        axes.set(xlabel="time, slots", ylabel=f"{what}, stages' worth")
        return
    axes.set_xlabel(f"time, {one_unit(axes.xaxis, 's', axes.get_xlim()[1])}")
    axes.set_ylabel(f"{what}, {one_unit(axes.yaxis, 'B', axes.get_ylim()[1])}")

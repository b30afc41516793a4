"""Points over memory: the bubble of runs that are compared, the steps of a plan's candidates; the best are joined."""

from collections import defaultdict
from collections.abc import Iterable
from textwrap import wrap
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cdpsim.draw.canvas import GREY, INK, label, one_unit, plain
from cdpsim.draw.compared import heading_of, notes_of
from cdpsim.draw.look import AS_DRAWN, Look
from cdpsim.draw.palette import colour
from cdpsim.draw.sheet import MARKERS, distinct, finish, new_page
from cdpsim.errors import RequestError
from cdpsim.files.units import short_text
from cdpsim.studies.compare import Measured
from cdpsim.studies.comparison_columns import Comparison
from cdpsim.studies.plan import Plan

_WIDE, _HIGH = 8.0, 4.9  # inches
_BEYOND = 1.3  # times the largest memory that fits, and the slowest or the largest of a front: more is not drawn there
_SIZE, _LARGE, _RING = 3.5, 6.5, 3.0  # points, of which a ring adds some
_EDGE = 0.04  # of the axes, around their points
_RING_LOOK: dict[str, Any] = {
    "marker": "o",
    "markersize": _LARGE + _RING,
    "markerfacecolor": "none",
    "markeredgecolor": INK,
    "markeredgewidth": 0.7,
    "linestyle": "none",
    "clip_on": False,
}
_JOINED: dict[str, Any] = {"color": GREY, "linewidth": 0.9}


def bubble_over_memory(comparison: Comparison, look: Look = AS_DRAWN) -> Figure:
    """Draw bubble over memory: a point for all runs that have the same; a line joins the best on equally many devices.

    What has more than a device is hollow, and with far more it stands at the edge.
    """
    measured, at = comparison.measured, defaultdict[tuple[int, float], list[Measured]](list)
    for one in sorted(measured, key=lambda one: (one.memory, one.bubble)):
        at[one.memory, one.bubble].append(one)
    largest = max(one.memory for one in measured)
    end = min(largest, _BEYOND * max((one.memory for one in measured if one.fits), default=largest)) or 1
    figure = new_page(heading_of(comparison), _HIGH, look, _WIDE)
    axes = figure.subplots()
    plain(axes, "")
    counts = sorted({one.devices for one in measured})
    counts_differ = len(counts) > 1
    for devices in counts:
        _join(axes, [(one.memory, one.bubble) for one in measured if one.devices == devices], f"best-of-{devices}")
    entries: list[Artist] = []
    for number, ((memory, bubble), runs) in enumerate(at.items()):
        style = _mark_of(number, hollow=not all(one.fits for one in runs))
        style |= {"marker": ">"} if memory > end else {}
        axes.plot([min(memory, end)], [bubble], gid=f"point-{number}", **style)
        names = dict.fromkeys(f"{one.schedule} ({one.devices})" if counts_differ else one.schedule for one in runs)
        far = f": {short_text(memory, 'B', 3)}" if memory > end else ""
        words = "\n".join(wrap(label(", ".join(names), 300) + far, 40))
        entries.append(Line2D([], [], label=words, **style))
    axes.set(xlim=(0, (1 + _EDGE) * end), ylim=(-0.02, 1.12 * max(one.bubble for one in measured) or 1))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    unit = "stages' worth" if comparison.slots else one_unit(axes.xaxis, "B", end)
    axes.set(xlabel=f"memory of the fullest device, {unit}", ylabel="bubble: share of the time that is idle")
    notes = ["in brackets: devices; a line joins the best of those on equally many"] * counts_differ
    notes += ["hollow: more than a device has"] * (not all(one.fits for one in measured))
    return finish(figure, look, {figure: entries}, columns=4, title=notes_of(comparison, notes))


def plan_picture(plan: Plan, look: Look = AS_DRAWN) -> Figure:
    """Draw all candidates that were simulated and fit: a point for each, whose colour and shape are its schedule's.

    Those of the plan's front are larger; a line joins the least times over memory, and a ring has staleness.
    Candidates that are much slower or larger than all of the front are counted instead.
    """
    front, batch = [row.measured for row in plan.front], plan.wanted.batch
    slowest, largest = (max((float(getattr(one, name)) for one in front), default=0.0) for name in ("step", "memory"))
    shown = [one for one in plan.fitting if one.step <= _BEYOND * slowest and one.memory <= _BEYOND * largest]
    if not shown:
        raise RequestError("output", "has nothing to show: no candidate that fits has been simulated; leave it out")
    best = set(map(id, front))
    shown.sort(key=lambda one: (id(one) in best, one.memory, one.step))
    names = list(dict.fromkeys(one.schedule for one in sorted(shown, key=lambda one: one.step)))
    figure = new_page(_title(plan), _HIGH, look, _WIDE)
    axes = figure.add_subplot()
    plain(axes, "")
    _join(axes, [(float(one.memory), float(one.step) / batch) for one in shown], "front")
    for number, one in enumerate(shown):
        place, style = ([float(one.memory)], [float(one.step) / batch]), _mark_of(names.index(one.schedule))
        style |= {} if id(one) in best else {"markersize": _SIZE, "zorder": 2, "alpha": 0.55}
        axes.plot(*place, gid=f"candidate-{number}", **style)
        if one.staleness:
            axes.plot(*place, gid=f"ring-{number}", **_RING_LOOK | {"markersize": style["markersize"] + _RING})
    _name_axes_of_plan(axes, plan)
    entries = [Line2D([], [], label=label(name, 30), **_mark_of(k)) for k, name in enumerate(names)]
    if any(one.staleness for one in shown):
        entries.append(Line2D([], [], label="ring: stale parameters", **_RING_LOOK))
    entries.append(Line2D([], [], label="least time over memory", **_JOINED))
    outside = len(plan.fitting) - len(shown)
    words = f"{outside:,} slower or larger ones are outside" if outside else ""
    return finish(figure, look, {figure: entries}, columns=4, title=words)


def _title(plan: Plan) -> str:
    """Return the devices, the batch and the proof of a plan in words."""
    wanted, options = plan.wanted, plan.wanted.variants[0].options
    names = [str(getattr(options[name], "name", options[name])) for name in ("model", "cluster") if name in options]
    of = "" if plan.in_slots else f"{' on '.join(names)}, "
    return label(f"{of}{wanted.devices} devices, batch {wanted.batch}: {plan.status.partition(':')[0]}", 200)


def _name_axes_of_plan(axes: Axes, plan: Plan) -> None:
    """Name the axes of drawn points, with a line at the memory that a device may hold."""
    if plan.wanted.memory is not None:
        axes.axvline(plan.wanted.memory, color=GREY, linewidth=1, linestyle=(0, (4, 3)), gid="limit")
    axes.margins(_EDGE)
    unit = "stage-activations" if plan.in_slots else one_unit(axes.xaxis, "B", axes.get_xlim()[1])
    time = "" if plan.in_slots else f"step for each sample, {one_unit(axes.yaxis, 's', axes.get_ylim()[1])}"
    axes.set(xlabel=f"memory of the fullest device, {unit}", ylabel=time or "slots for each micro-batch")


def _join(axes: Axes, points: Iterable[tuple[float, float]], gid: str) -> None:
    """Join the points that have no other one below and to the left."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    axes.plot(*zip(*best, strict=True), gid=gid, drawstyle="steps-post", zorder=1, **_JOINED)


def _mark_of(number: int, *, hollow: bool = False) -> dict[str, Any]:
    """Return the mark of a point by the number of its colour and shape."""
    style: dict[str, Any] = {"color": colour(number), "marker": distinct(MARKERS, number), "linestyle": "none"}
    style |= {"markerfacecolor": "white"} if hollow else {"markeredgecolor": INK, "markeredgewidth": 0.4}
    return style | {"markersize": _LARGE, "zorder": 3, "clip_on": False}

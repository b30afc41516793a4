"""Points over memory: the bubble of runs that are compared, the steps of a plan's candidates; the best are joined."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

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
_RING_LOOK: dict[str, Any] = {"marker": "o", "markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 0.7}
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


class _Spot(NamedTuple):
    """A candidate in the picture."""

    memory: float
    time: float
    schedule: str
    stale: bool
    on_front: bool


def plan_picture(plan: Plan, look: Look = AS_DRAWN) -> Figure:
    """Draw all candidates that were simulated and fit: a point for each, whose colour and shape are its schedule's.

    Those of the plan's front are larger; a line joins the least times over memory, and a ring has staleness.
    Candidates that are much slower or larger than all of the front are counted instead.
    """
    front, batch = {id(row.measured) for row in plan.front}, plan.wanted.batch
    every = [
        _Spot(float(one.memory), float(one.step) / batch, one.schedule, one.staleness > 0, id(one) in front)
        for one in plan.fitting
    ]
    front_spots = [spot for spot in every if spot.on_front]
    time = max((spot.time for spot in front_spots), default=0.0)
    memory = max((spot.memory for spot in front_spots), default=0.0)
    near = [spot for spot in every if spot.time <= _BEYOND * time and spot.memory <= _BEYOND * memory]
    spots = sorted(near, key=lambda spot: (spot.on_front, spot.memory, spot.time))
    if not spots:
        raise RequestError("output", "has nothing to show: no candidate that fits has been simulated; leave it out")
    names = list(dict.fromkeys(spot.schedule for spot in sorted(spots, key=lambda spot: spot.time)))
    figure = new_page(_title(plan), _HIGH, look, _WIDE)
    axes = figure.add_subplot()
    _scale_axes(axes, plan, spots)
    _join(axes, [spot[:2] for spot in spots], "front")
    for number, spot in enumerate(spots):
        style = _mark_of(names.index(spot.schedule), large=spot.on_front)
        axes.plot([spot.memory], [spot.time], gid=f"candidate-{number}", **style)
        if spot.stale:
            size = style["markersize"] + _RING
            axes.plot([spot.memory], [spot.time], gid=f"ring-{number}", markersize=size, clip_on=False, **_RING_LOOK)
    entries = [Line2D([], [], label=label(name, 30), **_mark_of(k)) for k, name in enumerate(names)]
    if any(spot.stale for spot in spots):
        ring = {"markersize": _LARGE + _RING, "linestyle": "none"}
        entries.append(Line2D([], [], label="ring: stale parameters", **_RING_LOOK | ring))
    entries.append(Line2D([], [], label="least time over memory", **_JOINED))
    outside = len(every) - len(spots)
    words = f"{outside:,} slower or larger ones are outside" if outside else ""
    return finish(figure, look, {figure: entries}, columns=4, title=words)


def _title(plan: Plan) -> str:
    """Return what was planned, in words, and whether it is proved."""
    wanted, options = plan.wanted, plan.wanted.variants[0].options
    names = [str(getattr(options[name], "name", options[name])) for name in ("model", "cluster") if name in options]
    of = "" if plan.in_slots else f"{' on '.join(names)}, "
    return label(f"{of}{wanted.devices} devices, batch {wanted.batch}: {plan.status.partition(':')[0]}", 200)


def _scale_axes(axes: Axes, plan: Plan, spots: Sequence[_Spot]) -> None:
    """Set up the axes, with a line at the memory that a device may hold."""
    plain(axes, "")
    limit = plan.wanted.memory
    for name, values, most in (
        ("xlim", [spot.memory for spot in spots], limit or 0),
        ("ylim", [spot.time for spot in spots], 0),
    ):
        low, high = min(values), max(*values, most)
        room = _EDGE * (high - low) or 0.1 * high or 1
        axes.set(**{name: (max(0.0, low - room), high + room)})
    unit = "stage-activations" if plan.in_slots else one_unit(axes.xaxis, "B", axes.get_xlim()[1])
    axes.set_xlabel(f"memory of the fullest device, {unit}")
    time = "" if plan.in_slots else f"step for each sample, {one_unit(axes.yaxis, 's', axes.get_ylim()[1])}"
    axes.set_ylabel(time or "slots for each micro-batch")
    if limit is not None:
        axes.axvline(limit, color=GREY, linewidth=1, linestyle=(0, (4, 3)), gid="limit")


def _join(axes: Axes, points: Iterable[tuple[float, float]], gid: str) -> None:
    """Join the points that have no other one below and to the left."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    axes.plot(*zip(*best, strict=True), gid=gid, drawstyle="steps-post", zorder=1, **_JOINED)


def _mark_of(number: int, *, large: bool = True, hollow: bool = False) -> dict[str, Any]:
    """Return the mark of a point by the number of its colour and shape."""
    face = {"markerfacecolor": "white"} if hollow else {"markeredgecolor": INK, "markeredgewidth": 0.4}
    style: dict[str, Any] = {"color": colour(number), "marker": distinct(MARKERS, number), "linestyle": "none"}
    style |= face | (
        {"markersize": _LARGE, "zorder": 3} if large else {"markersize": _SIZE, "zorder": 2, "alpha": 0.55}
    )
    return style | {"clip_on": False}

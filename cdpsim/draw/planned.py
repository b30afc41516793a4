"""A picture of a plan: the step for each sample over memory, with the front of both joined."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cdpsim.draw.canvas import GREY, INK, TITLE, label, one_unit, plain
from cdpsim.draw.palette import COLOURS, colour
from cdpsim.errors import RequestError
from cdpsim.studies.plan import Plan

_WIDE, _HIGH, _KEY_ROW = 8.0, 4.6, 0.2  # inches
_KEY_COLUMNS = 4
_BEYOND = 1.3  # times the slowest or the largest of the front: candidates beyond are not drawn
_SHAPES = "osD^vP"  # of schedules that have the same colour
_SIZE, _FRONT_SIZE, _RING = 3.5, 6.5, 3.0  # points, of which a ring adds some
_EDGE = 0.04  # of the axes, around their points


class _Spot(NamedTuple):
    """A candidate in the picture."""

    schedule: str
    memory: float
    time: float
    stale: bool
    on_front: bool


def plan_picture(plan: Plan) -> Figure:
    """Draw all candidates that were simulated and fit: a point for each, whose colour and shape are its schedule's.

    Those of the plan's front are larger; a line joins the least times over memory, and a ring has staleness.
    """
    every = [*_spots(plan)]
    spots = sorted(_near_front(every), key=lambda spot: (spot.on_front, spot.memory, spot.time))
    if not spots:
        raise RequestError("output", "has nothing to show: no candidate that fits has been simulated; leave it out")
    names = list(dict.fromkeys(spot.schedule for spot in sorted(spots, key=lambda spot: spot.time)))
    stale = any(spot.stale for spot in spots)
    rows = -(-(len(names) + 2 + stale) // _KEY_COLUMNS)
    figure = Figure(figsize=(_WIDE, _HIGH + _KEY_ROW * rows), layout="constrained")
    axes = figure.add_subplot()
    _scale_axes(axes, plan, spots)
    _join(axes, spots)
    for number, spot in enumerate(spots):
        style = _style_of(names.index(spot.schedule), spot)
        axes.plot([spot.memory], [spot.time], linestyle="none", gid=f"candidate-{number}", **style)
        if spot.stale:
            axes.plot([spot.memory], [spot.time], linestyle="none", gid=f"ring-{number}", **_stale_ring(spot))
    handles = [*_legend_entries(names, stale=stale, outside=len(every) - len(spots))]
    look: dict[str, Any] = {"fontsize": 8, "frameon": False, "ncols": _KEY_COLUMNS}
    figure.legend(handles=handles, loc="outside lower left", **look)
    figure.suptitle(
        label(_title(plan), 200), x=0.012, ha="left", fontsize=10.5, fontweight="bold", color=INK, gid=TITLE
    )
    return figure


def _spots(plan: Plan) -> Iterator[_Spot]:
    """Yield the candidates that are drawn."""
    front = {id(row.measured) for row in plan.front}
    for one in plan.fitting:
        time = float(one.step) / plan.wanted.batch
        yield _Spot(one.schedule, float(one.memory), time, one.staleness > 0, id(one) in front)


def _near_front(spots: Sequence[_Spot]) -> list[_Spot]:
    """Return the candidates that are not much slower or larger than all of the front."""
    front = [spot for spot in spots if spot.on_front]
    time, memory = (max((getattr(spot, name) for spot in front), default=0.0) for name in ("time", "memory"))
    return [spot for spot in spots if spot.time <= _BEYOND * time and spot.memory <= _BEYOND * memory]


def _title(plan: Plan) -> str:
    """Return what was planned, in words, and whether it is proved."""
    wanted, options = plan.wanted, plan.wanted.variants[0].options
    names = [str(getattr(options[name], "name", options[name])) for name in ("model", "cluster") if name in options]
    of = "" if plan.in_slots else f"{' on '.join(names)}, "
    return f"{of}{wanted.devices} devices, batch {wanted.batch}: {plan.status.partition(':')[0]}"


def _scale_axes(axes: Axes, plan: Plan, spots: Sequence[_Spot]) -> None:
    """Set up the axes, with a line at the memory that a device may hold."""
    plain(axes, "")
    for axis, values in (("x", [spot.memory for spot in spots]), ("y", [spot.time for spot in spots])):
        low, high = min(values), max(values)
        most = max(high, plan.wanted.memory or 0) if axis == "x" else high
        room = _EDGE * (most - low) or 0.1 * most or 1
        axes.set(**{f"{axis}lim": (max(0.0, low - room), most + room)})
    ends = axes.get_xlim()[1], axes.get_ylim()[1]
    unit = "stage-activations" if plan.in_slots else one_unit(axes.xaxis, "B", ends[0])
    axes.set_xlabel(f"memory of the fullest device, {unit}")
    what = (
        "slots for each micro-batch" if plan.in_slots else f"step for each sample, {one_unit(axes.yaxis, 's', ends[1])}"
    )
    axes.set_ylabel(what)
    if plan.wanted.memory is not None:
        axes.axvline(plan.wanted.memory, color=GREY, linewidth=1, linestyle=(0, (4, 3)), gid="limit")


def _join(axes: Axes, spots: Sequence[_Spot]) -> None:
    """Join the points for which none is both as fast and as small."""
    best: list[tuple[float, float]] = []
    for spot in sorted(spots, key=lambda spot: (spot.memory, spot.time)):
        if not best or spot.time < best[-1][1]:
            best.append((spot.memory, spot.time))
    style: dict[str, Any] = {"color": GREY, "linewidth": 0.9, "drawstyle": "steps-post", "zorder": 1}
    axes.plot(*zip(*best, strict=True), gid="front", **style)


def _style_of(number: int, spot: _Spot | None = None) -> dict[str, Any]:
    """Return the mark of a schedule; of a candidate that is not on the front a smaller and paler one."""
    front = spot is None or spot.on_front
    shape = _SHAPES[number // len(COLOURS) % len(_SHAPES)]
    style: dict[str, Any] = {"color": colour(number), "marker": shape, "markersize": _FRONT_SIZE if front else _SIZE}
    return style | {
        "alpha": 1.0 if front else 0.55,
        "markeredgewidth": 0,
        "clip_on": False,
        "zorder": 3 if front else 2,
    }


def _stale_ring(spot: _Spot | None = None) -> dict[str, Any]:
    """Return the mark around a candidate with staleness."""
    return {
        "marker": "o",
        "markersize": _FRONT_SIZE + _RING if spot is None or spot.on_front else _SIZE + _RING,
        "markerfacecolor": "none",
        "markeredgecolor": INK,
        "markeredgewidth": 0.7,
        "clip_on": False,
        "zorder": 2,
    }


def _legend_entries(names: Sequence[str], *, stale: bool, outside: int) -> Iterator[Line2D]:
    """Yield the entries of the legend: schedules, rings and the line."""
    for number, name in enumerate(names):
        yield Line2D([], [], linestyle="none", label=label(name, 30), **_style_of(number))
    if stale:
        yield Line2D([], [], linestyle="none", label="ring: stale parameters", **_stale_ring())
    yield Line2D([], [], color=GREY, linewidth=0.9, label="least time over memory")
    if outside:
        yield Line2D([], [], linestyle="none", label=f"{outside:,} slower or larger ones are outside")

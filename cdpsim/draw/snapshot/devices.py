"""Devices on a sheet: where each stands, and what is drawn of it at a moment."""

from collections.abc import Mapping
from itertools import pairwise
from math import cos, hypot, pi, sin
from typing import TYPE_CHECKING, Any, NamedTuple

from cdpsim.draw import palette
from cdpsim.draw.canvas import GREY, INK, PALE
from cdpsim.draw.sheet import Point, area, put, write
from cdpsim.draw.snapshot.moment import Moment, Place

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEVICE = "#f3f3f3"
_BELOW_DISKS = 0.8  # arrows, so that one that passes a disk leaves its number legible


class Arrangement(NamedTuple):
    """Where everything stands, in columns from the left and rows from below."""

    column: dict[int, float]  # of each device
    row: dict[Place, int]  # of each stage on each device
    span: dict[int, tuple[int, int]]  # of each device, its first and last row
    by_stage: bool  # whether a row is a stage
    columns: int
    rows: int


class Form(NamedTuple):
    """Sizes in points, and what is written."""

    pitch: float  # from column to column
    rise: float  # from row to row
    disk: float  # the radius of a disk
    ring: float  # how thick a ring is for each stage-activation
    first: int  # from what micro-batches and stages are counted
    strip: float = 0.0  # room for words at the foot of a device


def arrange(served: dict[int, list[int]]) -> Arrangement:
    """Find each device a place, from the stages that it serves.

    A row is a stage where every device serves successive ones, else a device's stages stand one above the other.
    Devices of different stages stand above each other in one column, those of the same stage side by side; rows of
    devices with one stage each are centred.
    """
    by_stage = all(stages[-1] - stages[0] < len(stages) for stages in served.values() if stages)
    row = {(d, j): j if by_stage else k for d, stages in served.items() for k, j in enumerate(stages)}
    spans = {d: (row[d, stages[0]], row[d, stages[-1]]) if stages else (0, 0) for d, stages in served.items()}
    taken: list[set[int]] = []
    column = {}
    for device, (low, high) in spans.items():
        rows = set(range(low, high + 1))
        at = next((k for k, used in enumerate(taken) if not used & rows), len(taken))
        if at == len(taken):
            taken.append(set())
        taken[at] |= rows
        column[device] = float(at)
    if all(low == high for low, high in spans.values()):
        beside = {at: sum(span[0] == at for span in spans.values()) for at, _ in spans.values()}
        column = {device: at + (len(taken) - beside[spans[device][0]]) / 2 for device, at in column.items()}
    return Arrangement(column, row, spans, by_stage, len(taken), max(high for _, high in spans.values()) + 1)


class _Board(NamedTuple):
    """A moment's arrangement at a place on the sheet."""

    axes: "Axes"
    arrangement: Arrangement
    form: Form
    left: float
    bottom: float
    prefix: str

    def x(self, device: int) -> float:
        return self.left + (self.arrangement.column[device] + 0.5) * self.form.pitch

    def y(self, row: float) -> float:
        return self.bottom + self.form.strip + (row + 0.5) * self.form.rise

    def at(self, place: Place) -> Point:
        """Where a stage of a device stands; the middle of the device for a stage that it does not serve."""
        low, high = self.arrangement.span[place[0]]
        return self.x(place[0]), self.y(self.arrangement.row.get(place, (low + high) / 2))


def draw_devices(
    axes: "Axes",
    moment: Moment,
    arrangement: Arrangement,
    form: Form,
    left: float,
    bottom: float,
    *,
    prefix: str = "",
    feet: Mapping[int, str] | None = None,
) -> None:
    """Draw the devices of a moment from a point of the sheet on.

    `prefix` goes before the ids of all that is drawn, `feet` is what stands at the foot of each device.
    """
    board = _Board(axes, arrangement, form, left, bottom, prefix)
    for device in moment.served:
        _draw_device(board, device, (feet or {}).get(device, ""))
    for device, stages in moment.served.items():
        for stage in stages:
            _draw_place(board, moment, (device, stage))
    _draw_messages(board, moment)


def _draw_device(board: _Board, device: int, foot: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    low, high = board.arrangement.span[device]
    half, strip = 0.43 * board.form.pitch, board.form.strip
    lower, upper = board.y(low) - half - strip, board.y(high) + half
    corner = (board.x(device) - half, lower)
    box = FancyBboxPatch(
        corner,
        2 * half,
        upper - lower,
        boxstyle="round,pad=0,rounding_size=3",
        facecolor=DEVICE,
        edgecolor=GREY,
        linewidth=0.6,
        zorder=0.5,
    )
    put(board.axes, box, f"{board.prefix}device-d{device}")
    if foot:  # at the left, so that arrows to a device below pass by; before those that do not
        backing = {"facecolor": DEVICE, "edgecolor": "none", "pad": 0.3}
        write(board.axes, corner[0] + 2.5, lower + strip / 2 + 1, foot, 6, color=GREY, zorder=5, bbox=backing)


def _draw_place(board: _Board, moment: Moment, place: Place) -> None:
    """A disk for a stage's state, in the colours of the micro-batches it computes; a ring for activations."""
    from matplotlib.patches import Circle, Wedge

    (x, y), radius = board.at(place), board.form.disk
    name = f"{board.prefix}{{}}-d{place[0]}-j{place[1]}"
    held, running = moment.activations.get(place, 0), moment.running.get(place, [])
    state = moment.states is not None and place in moment.states
    if held:
        ring = Circle((x, y), radius + held * board.form.ring, facecolor=INK, edgecolor="none")
        put(board.axes, ring, name.format("ring"))
    if not running:
        kind = "state" if state else "ring-inside" if held else "place"
        disk = Circle((x, y), radius, facecolor={"state": PALE, "ring-inside": "white"}.get(kind, "none"))
        disk.set(edgecolor="none" if held else GREY, linewidth=0.5)
        if kind == "place":
            disk.set_linestyle((0, (1, 2)))
        put(board.axes, disk, name.format(kind))
    share = 360 / max(len(running), 1)
    for k, i in enumerate(running):
        part = Wedge(
            (x, y), radius, 90 - (k + 1) * share, 90 - k * share, facecolor=palette.colour(i), edgecolor="none"
        )
        put(board.axes, part, f"{name.format('disk')}-i{i}")
    _write_numbers(board, x, y, running)
    if not board.arrangement.by_stage:
        words = str(place[1] + board.form.first)
        write(board.axes, x - 0.4 * board.form.pitch, y - radius - 1, words, 6, color=GREY)


def _write_numbers(board: _Board, x: float, y: float, running: list[int]) -> None:
    if len(running) > 3:
        return  # their order, clockwise from the top, has to do
    away = 0.55 * board.form.disk if len(running) > 1 else 0
    for k, i in enumerate(running):
        angle = pi / 2 - (k + 0.5) * 2 * pi / len(running)
        ink = palette.ink_on(palette.colour(i))
        to = x + away * cos(angle), y + away * sin(angle)
        write(board.axes, *to, str(i + board.form.first), 6 if away else 7, ha="center", color=ink, zorder=4)


def _draw_messages(board: _Board, moment: Moment) -> None:
    radius = {place: _radius(board, moment, place) for place in board.arrangement.row}

    def called(kind: str, *places: Place) -> str:
        return f"{board.prefix}{kind}-" + "-".join(f"d{d}-j{j}" for d, j in places)

    def draw(a: Place, b: Place, **style: Any) -> None:
        arrow(board.axes, board.at(a), board.at(b), radius.get(a, 0.0), radius.get(b, 0.0), **style)

    for a, b in moment.inner:
        draw(a, b, bend=_bend(board, a, b), name=called("inner", a, b))
    for a, b in moment.sent:
        if a[0] in moment.served and b[0] in moment.served:
            draw(a, b, bend=_bend(board, a, b), thick=True, name=called("message", a, b))
    together: dict[tuple[Place, Place], bool] = {}
    for stage, members, now in moment.collectives:
        places = [(device, stage) for device in members if device in moment.served]
        for pair in pairwise(sorted(places, key=board.at)):
            together[pair] = now or together.get(pair, False)
    for (a, b), now in together.items():
        kind = "collective" if now else "another-collective"
        bend = _bend(board, a, b, least=0)
        draw(a, b, thick=True, both=True, dotted=not now, bend=bend, name=called(kind, a, b))


def _radius(board: _Board, moment: Moment, place: Place) -> float:
    return board.form.disk + moment.activations.get(place, 0) * board.form.ring


def _bend(board: _Board, a: Place, b: Place, least: float = 0.15) -> float:
    """How much an arrow bends: a little, so that those there and back part; more where others stand in its way."""
    (x, y), (to_x, to_y) = board.at(a), board.at(b)
    columns, rows = abs(to_x - x) / board.form.pitch, abs(to_y - y) / board.form.rise
    far = max(columns, rows)
    straight = min(columns, rows) in (0, far)
    return 1 / far if straight and far > 1.5 else least


def arrow(
    axes: "Axes",
    start: Point,
    end: Point,
    from_radius: float,
    to_radius: float,
    *,
    thick: bool = False,
    both: bool = False,
    dotted: bool = False,
    bend: float = 0.0,
    name: str = "",
) -> None:
    """Draw an arrow between two disks: thin inside a device, thick between devices, with two heads for collectives."""
    from matplotlib.patches import FancyArrowPatch

    if dotted:
        _dotted(axes, start, end, from_radius + 1, to_radius + 1, bend, name)
        return
    style: dict[str, Any] = {"arrowstyle": "<|-|>" if both else "-|>", "mutation_scale": 6.5 if thick else 4}
    style |= {"shrinkA": from_radius + 1, "shrinkB": to_radius + 1, "connectionstyle": f"arc3,rad={bend}"}
    style |= {"linewidth": 1.6 if thick else 0.6, "joinstyle": "miter", "capstyle": "butt", "color": INK}
    put(axes, FancyArrowPatch(start, end, zorder=_BELOW_DISKS, **style), name)


def _dotted(
    axes: "Axes", start: Point, end: Point, from_radius: float, to_radius: float, bend: float, name: str
) -> None:
    """A dotted line, bent as other arrows are, with whole heads at both ends."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    (x, y), (to_x, to_y) = start, end
    control = (x + to_x) / 2 + bend * (to_y - y), (y + to_y) / 2 - bend * (to_x - x)
    heads = [_head(start, control, from_radius), _head(end, control, to_radius)]
    curve = Path([heads[0][0], control, heads[1][0]], [Path.MOVETO, Path.CURVE3, Path.CURVE3])
    style: dict[str, Any] = {"edgecolor": GREY, "linewidth": 1.6, "linestyle": (0, (0.8, 0.8)), "capstyle": "butt"}
    put(axes, PathPatch(curve, fill=False, zorder=_BELOW_DISKS, **style), name)
    for _, corners in heads:
        area(axes, corners, GREY, zorder=_BELOW_DISKS)


def _head(end: Point, towards: Point, radius: float) -> tuple[Point, list[Point]]:
    """The foot of a head that points at an end from that far away, and its corners."""
    length = max(hypot(towards[0] - end[0], towards[1] - end[1]), 1e-9)
    along, across = (towards[0] - end[0]) / length, (towards[1] - end[1]) / length

    def at(distance: float, aside: float = 0.0) -> Point:
        return end[0] + along * distance - across * aside, end[1] + across * distance + along * aside

    foot = radius + 3.2
    return at(foot), [at(radius), at(foot, 1.9), at(foot, -1.9)]

"""The paper's Fig. 2: the devices at one time step, what they compute, hold and send; of any run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import cos, hypot, pi, sin
from types import MappingProxyType
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, PathPatch, Wedge
from matplotlib.path import Path

from cdpsim.api import simulate
from cdpsim.draw import palette, sheet
from cdpsim.draw.canvas import AS_DRAWN, GREY, INK, PALE, TITLE, Look, amount_text, label
from cdpsim.draw.sheet import SMALL, KeyEntry, SheetPoint, fill_polygon, put_patch, write_words
from cdpsim.draw.views import Moment, Place, Views, moment_at, read_moment, title
from cdpsim.errors import RequestError, whole_number
from cdpsim.trace import Trace

# The groups of the paper's Fig. 2, each without and with CDP.
FIGURE_2 = (
    ("Single-GPU", "single-dp", "single-cdp"),
    ("Multi-GPU", "multi-dp", "multi-cdp"),
    ("DP with MP", "mp-dp", "mp-cdp"),
    ("PP", None, "pp-cdp"),
    ("ZeRO-DP", "zero-dp", "zero-cdp"),
)
_STEPS = 3  # of which the one in the middle is steady
_MOST_N = 8
_MOST_BESIDE = 24  # columns, and rows
_SMALLER = "use a smaller n, or an .html file of timeline"

# All in points.
_THICKEST_RING = 4.0
_LEAST_WIDTH = 241.0
_MARGIN = 5.0
_STAGES = 24.0  # for the numbers of stages, left of the devices
_GROUP_GAP = 15.0
_HEAD = 15.0
_KEY_PITCH = 13.0
_DISK = 4.0
_DISK_PITCH = 2 * _DISK + 1.5
DEVICE_FILL = "#f3f3f3"
_BELOW_DISKS = 0.8  # arrows, so that one that passes a disk leaves its number legible
# The heads, their size and the width of each kind of arrow; "another-collective", of another time step, is dotted.
_ARROWS = {"inner": ("-|>", 4.0, 0.6), "message": ("-|>", 6.5, 1.6), "collective": ("<|-|>", 6.5, 1.6)}
_MOST_COLOURS = 8
_MOST_LABELS = 2  # of a disk
_LABEL = 6.0  # the height of one
_BEFORE_ARROWS: dict[str, Any] = {"zorder": 0.9, "bbox": {"facecolor": DEVICE_FILL, "edgecolor": "none", "pad": 0.3}}


class Arrangement(NamedTuple):
    """The places of devices, in columns from the left and rows from below."""

    column: dict[int, float]  # of each device
    row: dict[Place, int]  # of each stage on each device
    span: dict[int, tuple[int, int]]  # of each device, its first and last row
    by_stage: bool  # whether a row is a stage
    columns: int
    rows: int


class Form(NamedTuple):
    """Sizes in points, and the numbering."""

    pitch: float  # from column to column
    rise: float  # from row to row
    disk: float  # the radius of a disk
    ring: float  # the thickness of a ring for each stage-activation
    first: int  # the number of the first micro-batch and stage
    strip: float = 0.0  # room for words at the foot of a device


def arrange(stages_of: dict[int, list[int]]) -> Arrangement:
    """Return a place for each device, from the stages that it serves.

    A row is a stage where every device serves successive ones, else a device's stages stand one above the other.
    Devices of different stages stand above each other in one column, devices of one stage side by side. Rows of
    devices with one stage each are centred.
    """
    by_stage = all(stages[-1] - stages[0] < len(stages) for stages in stages_of.values() if stages)
    row = {(d, j): j if by_stage else k for d, stages in stages_of.items() for k, j in enumerate(stages)}
    spans = {d: (row[d, stages[0]], row[d, stages[-1]]) if stages else (0, 0) for d, stages in stages_of.items()}
    used_rows: list[set[int]] = []  # of each column
    column = {}
    for device, (low, high) in spans.items():
        rows = set(range(low, high + 1))
        at = next((k for k, used in enumerate(used_rows) if not used & rows), len(used_rows))
        if at == len(used_rows):
            used_rows.append(set())
        used_rows[at] |= rows
        column[device] = float(at)
    if all(low == high for low, high in spans.values()):
        beside = Counter(low for low, _ in spans.values())
        column = {device: at + (len(used_rows) - beside[spans[device][0]]) / 2 for device, at in column.items()}
    return Arrangement(column, row, spans, by_stage, len(used_rows), max(high for _, high in spans.values()) + 1)


class Board(NamedTuple):
    """The arrangement of one run at its moment, and its place on a sheet; `prefix` begins the ids of all marks."""

    prefix: str
    moment: Moment
    arrangement: Arrangement
    form: Form
    feet: Mapping[int, str] = MappingProxyType({})  # the words at the foot of each device
    axes: Any = None
    left: float = 0.0
    bottom: float = 0.0

    def x(self, device: int) -> float:
        """Return the middle of a device's column."""
        return self.left + (self.arrangement.column[device] + 0.5) * self.form.pitch

    def y(self, row: float) -> float:
        """Return the middle of a row."""
        return self.bottom + self.form.strip + (row + 0.5) * self.form.rise

    def at(self, place: Place) -> SheetPoint:
        """Return the middle of a stage of a device; the middle of the device for a stage that it does not serve."""
        low, high = self.arrangement.span[place[0]]
        return self.x(place[0]), self.y(self.arrangement.row.get(place, (low + high) / 2))

    def radius(self, place: Place) -> float:
        """Return the radius of a disk with its ring; 0 of a stage that its device does not serve."""
        if place not in self.arrangement.row:
            return 0.0
        return self.form.disk + self.moment.activations.get(place, 0) * self.form.ring

    def task(self, place: Place) -> str:
        """Return the words above a disk."""
        return " ".join(self.moment.labels.get(place, ())[:_MOST_LABELS]) if self.form.first == 0 else ""

    def clearance(self, place: Place, other: Place) -> float:
        """Return the room between the middle of a place and the end of an arrow that leads to another one."""
        above = self.at(other)[1] > self.at(place)[1]
        return self.radius(place) + (_LABEL if above and self.task(place) else 0.0)


def snapshot(
    trace: Trace, slot: float | str | None = None, *, look: Look = AS_DRAWN, axes: Axes | None = None
) -> Figure:
    """Draw the devices at one slot, or at one moment in seconds: what they compute, hold and send.

    By default it is the one at which most activations are held.
    Micro-batches, stages and devices are counted from 0, as in the files of a trace.
    """
    views = Views(trace)
    now = read_moment(views, slot)
    moment = moment_at(views, now)
    arrangement = _arranged(moment)
    stacked = len(set(arrangement.column.values())) < len(arrangement.column)
    rise = 54.0 if stacked else 46.0 if moment.inside else 36.0
    form = Form(46.0, rise, 9.5, _ring([moment]), first=0, strip=9.0)
    stashes = {device: moment.stash.get(device, 0) for device in moment.stages}
    feet = {d: f"{d}: {stash if trace.in_slots else amount_text(stash, 'B')}" for d, stash in stashes.items()}
    when = f", time step {now}" if trace.in_slots else f", {amount_text(now, 's')}"
    own = title(trace) if look.title is None else label(look.title, 300)
    entries = _moment_entries([moment], form, in_slots=trace.in_slots)
    words = {"1F3": "task: stage, kind, micro-batch"}
    words["0: 1" if trace.in_slots else "0: 1 GB"] = "device, and the activations that it holds"
    words |= {} if arrangement.by_stage else {"0": "stage, beside its disk"}
    for example, meaning in words.items():
        write = partial(write_words, words=example, size=6, ha="center", color=GREY)
        entries.append(KeyEntry(write, 3.6 * len(example), meaning))
    groups = [("", [Board("", moment, arrangement, form, feet)])]
    return _draw_groups(groups, [""], form, entries, (own + when).removeprefix(", "), look, axes)


def only_snapshot(traces: Sequence[Trace], *, slot: float | str | None = None, look: Look) -> Figure:
    """Draw the devices of the one run that is given."""
    if len(traces) != 1:
        raise RequestError("snapshot", f"is of one run, not of {len(traces)}; draw each")
    return snapshot(traces[0], slot, look=look)


def figure_2(n: int = 3, slot: int | None = None, *, look: Look = AS_DRAWN) -> Figure:
    """Draw the paper's Fig. 2 for any n: implementations side by side, without CDP above and with it below.

    Each is shown at the same slot of its second training step, by default at one at which most activations are held.
    Stages and micro-batches are counted from 1, as in the paper.
    """
    n = whole_number("n", n, at_least=1)
    if n > _MOST_N:
        problem = f"n={n}, but figure 2 has room for {_MOST_N} at most; use `cdpsim snapshot NAME` for one"
        raise RequestError("n", problem)
    letters = [f"({chr(ord('a') + k)}) {words}" for k, (words, *_) in enumerate(FIGURE_2)]
    views = {name: Views(simulate(name, n, steps=_STEPS)) for _, *names in FIGURE_2 for name in names if name}
    moments = {name: moment_at(own, read_moment(own, slot)) for name, own in views.items()}
    form = Form(34.0, 34.0, 7.5, _ring(list(moments.values())), first=1)
    boards = {name: Board(f"{name}-", moment, arrange(moment.stages), form) for name, moment in moments.items()}
    parts = [[boards[name] if name else None for name in names[::-1]] for _, *names in FIGURE_2]
    groups, entries = list(zip(letters, parts, strict=True)), _moment_entries([*moments.values()], form, in_slots=True)
    return _draw_groups(groups, ["with CDP", "without CDP"], form, entries, label(look.title or "", 300), look)


def _draw_groups(
    groups: Sequence[tuple[str, Sequence[Board | None]]],
    rows: Sequence[str],
    form: Form,
    entries: Sequence[KeyEntry],
    heading: str,
    look: Look,
    axes: Axes | None = None,
) -> Figure:
    """Draw groups side by side, in rows from below, and the key."""
    parts = [part for _, each in groups for part in each if part]
    columns = [max(part.arrangement.columns for part in each if part) for _, each in groups]
    widths = [max(sheet.width_of(name), k * form.pitch) for (name, _), k in zip(groups, columns, strict=True)]
    high = max(part.arrangement.rows for part in parts) * form.rise + form.strip
    left = (1 + any(rows)) * _MARGIN + _STAGES
    content = left + sum(widths) + _GROUP_GAP * (len(groups) - 1) + _MARGIN
    width = max(_LEAST_WIDTH, content)
    left += (width - content) / 2
    key = sheet.key_rows(entries if look.legend else [], width - 2 * _MARGIN)
    bottom = len(key) * _KEY_PITCH + 2 * _MARGIN
    feet = [bottom + k * (high + _GROUP_GAP) for k in range(len(rows))]
    height = feet[-1] + high + _HEAD * any(name for name, _ in groups) + _MARGIN
    heading = sheet.wrapped(heading, width - 2 * _MARGIN, SMALL + 2)
    size = width, height + _HEAD * bool(heading) + sheet.height_below_first(heading, SMALL + 2)
    figure, page = sheet.new_sheet(*size) if axes is None else sheet.sheet_in(axes, *size)
    write_words(page, _MARGIN, size[1] - _HEAD / 2 - 1, heading, SMALL + 2, gid=TITLE)
    by_stage = all(part.arrangement.by_stage for part in parts)
    for words, foot in zip(rows, feet, strict=True):
        write_words(page, _MARGIN + 3, foot + high / 2, words, SMALL + 1, ha="center", va="center", rotation=90)
        if by_stage:
            _write_stages(page, high, form, left, foot)
    for (name, each), room in zip(groups, widths, strict=True):
        write_words(page, left + room / 2, height - _MARGIN - _HEAD / 2, name, SMALL + 1, ha="center")
        for part, foot in ((part, foot) for part, foot in zip(each, feet, strict=True) if part):
            x = left + (room - part.arrangement.columns * form.pitch) / 2
            _draw_board(part._replace(axes=page, left=x, bottom=foot))
        left += room + _GROUP_GAP
    sheet.draw_key(page, _MARGIN, bottom - _MARGIN, key, _KEY_PITCH)
    return sheet.scale_sheet(figure, look) if axes is None else sheet.scale_in(axes)


def _arranged(moment: Moment) -> Arrangement:
    """Return a place for every device, side by side where all would stand in one column; refuse more than fit."""
    most = _MOST_BESIDE**2
    if len(moment.stages) > most:
        raise RequestError("snapshot", f"has {len(moment.stages)} devices, of which {most} can be drawn; {_SMALLER}")
    arrangement = arrange(moment.stages)
    if arrangement.columns == 1 and arrangement.rows == len(moment.stages):  # each device has a row of its own
        column = {device: float(low) for device, (low, _) in arrangement.span.items()}
        row, span = dict.fromkeys(arrangement.row, 0), dict.fromkeys(arrangement.span, (0, 0))
        arrangement = Arrangement(column, row, span, False, arrangement.rows, 1)
    if max(arrangement.columns, arrangement.rows) > _MOST_BESIDE:
        raise RequestError(
            "snapshot",
            f"has {arrangement.columns} devices side by side and {arrangement.rows} rows of stages, of which "
            f"{_MOST_BESIDE} and {_MOST_BESIDE} can be drawn; {_SMALLER}",
        )
    return arrangement


def _ring(moments: Sequence[Moment]) -> float:
    """Return the thickness of a ring for each activation, so that the thickest has room."""
    most = max((count for moment in moments for count in moment.activations.values()), default=1)
    return min(_THICKEST_RING / 3, _THICKEST_RING / most)


def _write_stages(axes: Axes, high: float, form: Form, left: float, foot: float) -> None:
    """Number the rows, left of their devices, where they are stages."""
    for row in range(round((high - form.strip) / form.rise)):
        y = foot + form.strip + (row + 0.5) * form.rise
        write_words(axes, left - 5, y, str(row + form.first), ha="right", color=GREY)
    y = foot + (high + form.strip) / 2
    write_words(axes, left - 16, y, "stage", ha="center", va="center", rotation=90, color=GREY)


def _draw_board(board: Board) -> None:
    for device in board.moment.stages:
        _draw_device(board, device, board.feet.get(device, ""))
    for device, stages in board.moment.stages.items():
        for stage in stages:
            _draw_place(board, (device, stage))
    _draw_arrows(board)


def _draw_device(board: Board, device: int, foot: str) -> None:
    low, high = board.arrangement.span[device]
    half, strip = 0.43 * board.form.pitch, board.form.strip
    lower, upper = board.y(low) - half - strip, board.y(high) + half
    corner = (board.x(device) - half, lower)
    style: dict[str, Any] = {"facecolor": DEVICE_FILL, "edgecolor": GREY, "linewidth": 0.6, "zorder": 0.5}
    box = FancyBboxPatch(corner, 2 * half, upper - lower, boxstyle="round,pad=0,rounding_size=3", **style)
    put_patch(board.axes, box, f"{board.prefix}device-d{device}")
    if foot:  # at the left, so that arrows to a device below pass by
        write_words(board.axes, corner[0] + 2.5, lower + strip / 2 + 1, foot, 6, color=GREY, **_BEFORE_ARROWS)


def _draw_place(board: Board, place: Place) -> None:
    """Draw a disk for a stage's state, in the colours of the micro-batches it computes; a ring for activations."""
    (x, y), radius, moment = board.at(place), board.form.disk, board.moment
    name = f"{board.prefix}{{}}-d{place[0]}-j{place[1]}"
    activations, running = moment.activations.get(place, 0), moment.running.get(place, [])
    if activations:
        ring = Circle((x, y), board.radius(place), facecolor=INK, edgecolor="none")
        put_patch(board.axes, ring, name.format("ring"))
    if not running:
        kind = "state" if place in (moment.states or ()) else "ring-inside" if activations else "place"
        disk = Circle((x, y), radius, facecolor={"state": PALE, "ring-inside": "white"}.get(kind, "none"))
        disk.set(edgecolor="none" if activations else GREY, linewidth=0.5)
        if kind == "place":
            disk.set_linestyle((0, (1, 2)))
        put_patch(board.axes, disk, name.format(kind))
    share = 360 / max(len(running), 1)
    for k, i in enumerate(running):
        fill = palette.colour(i)
        part = Wedge((x, y), radius, 90 - (k + 1) * share, 90 - k * share, facecolor=fill, edgecolor="none")
        put_patch(board.axes, part, f"{name.format('disk')}-i{i}")
    _write_numbers(board, x, y, running)
    if words := board.task(place):
        write_words(board.axes, x, y + board.radius(place) + 3.2, words, 6, ha="center", **_BEFORE_ARROWS)
    if not board.arrangement.by_stage:
        words = str(place[1] + board.form.first)
        write_words(board.axes, x - 0.4 * board.form.pitch, y - radius - 1, words, 6, color=GREY, **_BEFORE_ARROWS)


def _write_numbers(board: Board, x: float, y: float, running: list[int]) -> None:
    if len(running) > 3:
        return  # no room: the order of colours, clockwise from the top, has to do
    away = 0.55 * board.form.disk if len(running) > 1 else 0
    for k, i in enumerate(running):
        angle = pi / 2 - (k + 0.5) * 2 * pi / len(running)
        ink = palette.ink_on(palette.colour(i))
        to = x + away * cos(angle), y + away * sin(angle)
        write_words(board.axes, *to, str(i + board.form.first), 6 if away else 7, ha="center", color=ink, zorder=4)


def _draw_arrows(board: Board) -> None:
    moment = board.moment
    for a, b in moment.inside:
        _draw_arrow(board, "inner", a, b)
    for a, b in moment.messages:
        if a[0] in moment.stages and b[0] in moment.stages:
            _draw_arrow(board, "message", a, b)
    together: dict[tuple[Place, Place], bool] = {}
    for stage, members, now in moment.collectives:
        places = [(device, stage) for device in members if device in moment.stages]
        for pair in pairwise(sorted(places, key=board.at)):
            together[pair] = now or together.get(pair, False)
    for (a, b), now in together.items():
        _draw_arrow(board, "collective" if now else "another-collective", a, b)


def _draw_arrow(board: Board, kind: str, a: Place, b: Place) -> None:
    """Draw an arrow from a place to another, bent more where others stand in its way.

    Arrows of messages bend a little, so that the two directions part.
    """
    (x, y), (to_x, to_y) = start, end = board.at(a), board.at(b)
    columns, rows = abs(to_x - x) / board.form.pitch, abs(to_y - y) / board.form.rise
    far = max(columns, rows)
    straight = min(columns, rows) in (0, far)
    bend = 1 / far if straight and far > 1.5 else 0.0 if "collective" in kind else 0.15
    name = f"{board.prefix}{kind}-d{a[0]}-j{a[1]}-d{b[0]}-j{b[1]}"
    _arrow(board.axes, kind, start, end, (board.clearance(a, b), board.clearance(b, a)), bend, name)


def _arrow(
    axes: Axes,
    kind: str,
    start: SheetPoint,
    end: SheetPoint,
    radii: tuple[float, float] = (0.0, 0.0),
    bend: float = 0.0,
    name: str = "",
) -> None:
    """Draw an arrow of a kind between two disks of these radii."""
    if kind == "another-collective":
        _dotted(axes, start, end, radii, bend, name)
        return
    heads, size, width = _ARROWS[kind]
    style: dict[str, Any] = {"arrowstyle": heads, "mutation_scale": size, "connectionstyle": f"arc3,rad={bend}"}
    style |= {"shrinkA": radii[0] + 1, "shrinkB": radii[1] + 1, "zorder": _BELOW_DISKS}
    style |= {"linewidth": width, "joinstyle": "miter", "capstyle": "butt", "color": INK}
    put_patch(axes, FancyArrowPatch(start, end, **style), name)


def _dotted(axes: Axes, start: SheetPoint, end: SheetPoint, radii: tuple[float, float], bend: float, name: str) -> None:
    """Draw a dotted line, bent as other arrows are, with solid heads at both ends."""
    (x, y), (to_x, to_y) = start, end
    control = (x + to_x) / 2 + bend * (to_y - y), (y + to_y) / 2 - bend * (to_x - x)
    heads = [_arrow_head(point, control, radius + 1) for point, radius in zip((start, end), radii, strict=True)]
    curve = Path([heads[0][0], control, heads[1][0]], [Path.MOVETO, Path.CURVE3, Path.CURVE3])
    style: dict[str, Any] = {"edgecolor": GREY, "linewidth": 1.6, "linestyle": (0, (0.8, 0.8)), "capstyle": "butt"}
    put_patch(axes, PathPatch(curve, fill=False, zorder=_BELOW_DISKS, **style), name)
    for _, corners in heads:
        fill_polygon(axes, corners, GREY, zorder=_BELOW_DISKS)


def _arrow_head(end: SheetPoint, towards: SheetPoint, radius: float) -> tuple[SheetPoint, list[SheetPoint]]:
    """Return the foot of a head that points at an end from that far away, and its corners."""
    length = max(hypot(towards[0] - end[0], towards[1] - end[1]), 1e-9)
    along, across = (towards[0] - end[0]) / length, (towards[1] - end[1]) / length

    def at(distance: float, aside: float = 0.0) -> SheetPoint:
        return end[0] + along * distance - across * aside, end[1] + across * distance + along * aside

    foot = radius + 3.2
    return at(foot), [at(radius), at(foot, 1.9), at(foot, -1.9)]


def _moment_entries(moments: Sequence[Moment], form: Form, *, in_slots: bool) -> list[KeyEntry]:
    numbers = sorted({i for moment in moments for several in moment.running.values() for i in several})
    counts = [count for moment in moments for count in moment.activations.values()]
    idle = any(moment.states - set(moment.running) for moment in moments if moment.states is not None)
    result = []
    if numbers:
        few, more = numbers[:_MOST_COLOURS], ", …" if len(numbers) > _MOST_COLOURS else ""
        draw = partial(_disks, few, form.first)
        result.append(KeyEntry(draw, _DISK_PITCH * len(few), f"micro-batch computed{more}"))
    result += [_circles_entry([(0.0, PALE)], "parameters, not in use")] if idle else []
    if counts:
        rings = [(count * form.ring, "white") for count in sorted({1, max(counts)})]
        more = f", of {max(counts)}" if max(counts) > 1 else ""
        result.append(_circles_entry(rings, f"activations held: of 1{more}"))
    if any(_has_empty_place(moment) for moment in moments):
        result.append(KeyEntry(_empty_place, 2 * _DISK, "nothing held"))
    is_now = [group.now for moment in moments for group in moment.collectives]
    another = f"collective of this training step at another {'time step' if in_slots else 'moment'}"
    arrows = (
        ("inner", 7, any(moment.inside for moment in moments), "inside a device"),
        ("message", 9, any(moment.messages for moment in moments), "between devices"),
        ("collective", 9, any(is_now), "collective"),
        ("another-collective", 9, not all(is_now), another),
    )
    shown = ((kind, half, words) for kind, half, there, words in arrows if there)
    return result + [KeyEntry(partial(_level_arrow, kind, half), 2 * half, words) for kind, half, words in shown]


def _has_empty_place(moment: Moment) -> bool:
    """Return whether a device holds nothing of a stage that it serves, as far as that is known."""
    places = {(device, stage) for device, stages in moment.stages.items() for stage in stages}
    return moment.states is not None and bool(places - moment.states - set(moment.activations) - set(moment.running))


# Marks of the key, drawn around a point.


def _empty_place(axes: Axes, x: float, y: float) -> None:
    style = {"facecolor": "none", "edgecolor": GREY, "linestyle": (0, (1, 2))}
    put_patch(axes, Circle((x, y), _DISK - 0.5, linewidth=0.5, **style))


def _disks(numbers: list[int], first: int, axes: Axes, x: float, y: float) -> None:
    for k, i in enumerate(numbers):
        at = x + (k - (len(numbers) - 1) / 2) * _DISK_PITCH
        fill = palette.colour(i)
        put_patch(axes, Circle((at, y), _DISK, facecolor=fill, edgecolor="none"))
        write_words(axes, at, y, str(i + first), 6, ha="center", color=palette.ink_on(fill))


def _circles_entry(circles: list[tuple[float, str]], meaning: str) -> KeyEntry:
    """Return an entry of disks with rings: the thickness of each ring, and the fill inside it."""
    pitch = 2 * (_DISK - 0.5) + 2 * max(ring for ring, _ in circles) + 2
    return KeyEntry(partial(_circles, circles, pitch), pitch * len(circles), meaning)


def _circles(circles: list[tuple[float, str]], pitch: float, axes: Axes, x: float, y: float) -> None:
    for k, (ring, fill) in enumerate(circles):
        at, radius = x + (k - (len(circles) - 1) / 2) * pitch, _DISK - 0.5
        put_patch(axes, Circle((at, y), radius + ring, facecolor=INK, edgecolor="none"))
        edge = "none" if ring else GREY
        put_patch(axes, Circle((at, y), radius, facecolor=fill, edgecolor=edge, linewidth=0.5))


def _level_arrow(kind: str, half: float, axes: Axes, x: float, y: float) -> None:
    _arrow(axes, kind, (x - half, y), (x + half, y))

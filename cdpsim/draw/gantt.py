"""Runs in real time: the tasks of every device, the bubbles between them, and the messages of links."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cdpsim.draw import sheet
from cdpsim.draw.canvas import AS_DRAWN, GREY, INK, PALE, TITLE, Look, figure_with, label, plain
from cdpsim.draw.gantt_rows import LANE, LINK, PALEST, Panel
from cdpsim.draw.palette import KIND_COLOURS, ink_on, tint
from cdpsim.draw.views import KIND_WORDS, Views, colour_meanings, title, word_of
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Floats, Ints
from cdpsim.program import Content, EdgeKind, Kind, Op
from cdpsim.trace import Trace
from cdpsim.trace.metrics.waiting import IdleReason, waits_for

MOST_BARS = 20_000
MOST_SCHEDULES = 12
NARROW, WIDE, TASK = 6.0, 18.0, 0.32  # inches: all time at least and at most, a short task
THIN = 1.0  # points: narrower bars cannot be seen
LEAST_ROW = 0.4  # of a row's own height
LETTERS = 7.5  # points: of ordinary words
SLASH = 4.5  # points: the width of the slash through a stale task
PAPER = "#ffffff"
MARKS = dict(zip(Content, "^vXoPsD", strict=True))
# Messages are grey: colours are of tasks.
MESSAGE_GREYS = dict(
    zip(Content, ("#4d4d4d", "#a3a3a3", "#5a5a5a", "#6b6b6b", "#b3b3b3", "#c4c4c4", "#868686"), strict=True)
)
# The part of a lane that a bar takes, from the top, where colours are not of kinds.
LANE_SHARES = {Kind.F: (0.0, 1.0), Kind.B: (0.0, 0.7), Kind.W: (0.3, 1.0), Kind.U: (0.0, 1.0)}
IDLE = {
    IdleReason.MESSAGE: ("waiting for a message", "xxxx"),
    IdleReason.STREAM: ("waiting for a stream", "-----"),
    IdleReason.DEPENDENCY: ("waiting for a dependency", ""),
    IdleReason.NOTHING: ("nothing to do", ""),
}
BUBBLE, IDLE_INK, NOTHING_FILL, _NEUTRAL = "#d4d4d4", "#9a9a9a", "#efefef", "#c8c8c8"
_TITLE_ROW, _NAME_ROW, _AXIS_ROW, _RIGHT = 0.3, 0.2, 0.42, 0.2  # inches
_KEY_ROW, _HALF, _HIGH = 12.0, 6.0, 3.6  # points: a row of the key, and half a sample


class Marks(NamedTuple):
    """Marks of one look: boxes, lines or points between two x and two y, and a sample of them for the key.

    A sample lies between two x and two y, too, from -1 to 1 and downwards; all samples of one meaning are one entry.
    """

    gid: str
    form: str  # "box", "line", or a marker of matplotlib
    x: tuple[Any, Any]
    y: tuple[Any, Any]
    style: dict[str, Any]
    words: str = ""
    sample: tuple[float, float, float, float] = (-1, 1, -1, 1)
    fill: str = ""  # of the sample, where marks have several colours

    def draw(self, axes: Axes, prefix: str = "") -> None:
        """Draw all marks as one artist."""
        style: dict[str, Any] = {"gid": prefix + self.gid if self.gid else None} | self.style
        if not len(self.x[0]):
            return
        if self.form == "box":
            (left, right), (top, bottom) = self.x, self.y
            corners = np.array([[left, left, right, right], [top, bottom, bottom, top]]).T
            with mpl.rc_context({"hatch.linewidth": 0.7}):
                axes.add_collection(PolyCollection(list(corners), **{"linewidth": 0} | style), autolim=False)
        elif self.form == "line":
            axes.add_collection(LineCollection(list(np.array([self.x, self.y]).T), **style), autolim=False)
        else:
            style = {"linewidths": 0, "zorder": 3, "clip_on": False} | style
            axes.scatter(self.x[0], self.y[0], marker=self.form, **style)


def _ground(words: str, fill: str = _NEUTRAL) -> Marks:
    """Return no marks, and a box in the key below other samples of a meaning."""
    return Marks("", "box", ((), ()), ((), ()), {"facecolor": fill}, words)


def _task_layers(panel: Panel, scale: float) -> Iterator[Marks]:
    """Yield the bars of tasks, and the slashes of stale ones."""
    gap = np.minimum(0.4 / scale, 0.04 * panel.took)  # so that bars side by side do not touch
    left, right = panel.tasks["start"] + gap, panel.tasks["end"] - gap
    by_kind, slashes = panel.colouring == "kind", []
    for name, words in KIND_WORDS.items():
        kind = Kind[name]
        rows = np.flatnonzero((panel.kind == kind) & ~((kind == Kind.U) & panel.estimate))
        share = (0.0, 1.0) if by_kind else LANE_SHARES[kind]
        top, bottom = (panel.top[rows] + 0.01 + each * (LANE - 0.02) for each in share)
        meaning = "backward of inputs" if kind == Kind.B and (panel.kind == Kind.W).any() else words
        fill = INK if kind == Kind.U else KIND_COLOURS[kind] if by_kind else _NEUTRAL
        sample = (-1, 1, 2 * share[0] - 1, 2 * share[1] - 1)
        gid, shades = words.replace(" ", "-"), panel.colours[rows]
        yield Marks(gid, "box", (left[rows], right[rows]), (top, bottom), {"facecolor": shades}, meaning, sample, fill)
        old = panel.tasks["stale"][rows] > 0
        ends = right[rows][old]
        foot = ends - np.minimum(SLASH / scale, 0.5 * (ends - left[rows][old]))
        inks = [INK if shade[7:] else ink_on(shade) for shade in shades[old].tolist()]
        style = {"colors": inks, "linewidths": _fineness(panel, scale)}
        slash = Marks(f"{gid}-stale", "line", (foot, ends), (bottom[old], top[old]), style, "reads an older version")
        slashes.append(slash._replace(sample=(0.3, 1, 1, -1), fill=INK))
    yield from (_ground("reads an older version"), *slashes)


_MAKES, _READS = "makes an estimate", "reads an estimate"


def _update_layers(panel: Panel, scale: float) -> Iterator[Marks]:
    """Yield marks of updates that take no time, of estimates, and of the moments at which devices hand over."""
    views, fine, began, ended = panel.views, _fineness(panel, scale), panel.tasks["start"], panel.tasks["end"]
    makes, reads = (np.flatnonzero(panel.estimate & ((panel.kind == Kind.U) == made)) for made in (True, False))
    line = np.clip(0.25 * panel.took[makes] * scale, 0.3, 1.0)  # points
    gap, high = line / 2 / scale, panel.top[makes] + 0.015
    frame = {"facecolor": PAPER, "edgecolor": INK, "linewidth": line}
    yield Marks("estimate", "box", (began[makes] + gap, ended[makes] - gap), (high, high + LANE - 0.03), frame, _MAKES)
    high = panel.top[reads] + 0.01
    yield _ground(_READS)
    strip = (began[reads], ended[reads]), (high, high + 0.04)
    yield Marks("reads-estimate", "box", *strip, {"facecolor": INK}, _READS, (-1, 1, -1, -0.6))
    begin, end = panel.rows.device_spans(streams=False)
    last = panel.rows.device_spans(streams=True)[1]
    if views.has_rounds:
        rounds: Any = views.trace.rounds
        chosen = (rounds["ended"] >= 0) & (rounds["posted"] <= panel.until)
        device, time = rounds["device"][chosen], rounds["posted"][chosen]
        style = {"colors": INK, "linewidths": 0.8 * fine, "linestyles": (0, (1.5, 1.5)), "zorder": 2}
        at = (time, time), (begin[device], last[device])
        yield Marks("hands-over", "line", *at, style, "hands over, goes on", (0, 0, -1, 1))
        begin, end = np.where(last > end, end + 0.03, begin), last  # updates are in the stream
    free = np.setdiff1d(np.flatnonzero(views.tasks["start"] <= panel.until), views.bars)
    pairs = [views.tasks[name][free] for name in ("device", "start")]
    (device, time), of = np.unique(pairs, axis=1, return_inverse=True)
    kept = np.bincount(of.ravel(), weights=~views.estimate[free], minlength=len(time)) > 0
    for gid, words, rows, fill in (("update", "update", kept, INK), ("estimate", _MAKES, ~kept, PAPER)):
        own = device[rows].astype(np.int64)
        at = (time[rows], time[rows]), (begin[own] - 0.02, end[own])
        style = {"colors": INK, "linewidths": fine, "clip_on": False}
        yield Marks(f"{gid}-free", "line", *at, style, words, (0, 0, -1, 1))
        style = {"facecolor": fill, "edgecolor": INK, "linewidths": 0.6 * fine * (fill != INK), "s": 9 * fine**2}
        yield Marks(f"{gid}-mark", "v", *at, style, words, (0, 0, -1, -1))


def _idle_layers(panel: Panel, scale: float) -> Iterator[Marks]:
    """Yield the bubbles: grey, paler where there is nothing to do, textured where a message or stream is waited for."""
    idle = panel.idle()
    for reason, (words, texture) in IDLE.items():
        rows = np.flatnonzero(idle["reason"] == reason)
        top = panel.rows.lane_top[idle["lane"][rows]] + 0.01
        fill = NOTHING_FILL if reason is IdleReason.NOTHING else BUBBLE
        style = {"facecolor": fill, "edgecolor": IDLE_INK, "hatch": texture, "zorder": 0.8}
        at = (idle["begin"][rows], idle["end"][rows]), (top, top + LANE - 0.02)
        words = f"bubble: {words}" if panel.views.run else "bubble"
        yield Marks(f"idle-{reason.name.lower()}", "box", *at, style, words)


def _message_layers(panel: Panel, scale: float) -> Iterator[Marks]:
    """Yield bars with the marks of their contents, none too narrow to be seen; a message without length is a mark."""
    views, rows, fine = panel.views, panel.rows, _fineness(panel, scale)
    start, end = (views.messages[name][panel.message] for name in ("start", "end"))
    middle = rows.lane_top[panel.message_lane] + rows.lane_high[panel.message_lane] / 2
    lines = np.unique(middle)
    at = (np.zeros(len(lines)), np.full(len(lines), panel.until)), (lines, lines)
    yield Marks("", "line", *at, {"colors": PALE, "linewidths": 0.5, "zorder": 0.5})
    for content in Content:
        of = (views.content[panel.message] == content) & (start <= panel.until)
        fill, words, gid = MESSAGE_GREYS[content], word_of(content), f"message-{content.name.lower()}"
        long, wide, free = of & (end > start), of & ((end - start) * scale > 5), of & (end == start)
        at = start[long], np.maximum(end, start + 0.8 / scale)[long]
        high = middle[long] - LINK / 2 + 0.01, middle[long] + LINK / 2 - 0.01
        yield Marks(gid, "box", at, high, {"facecolor": fill}, words)
        centre = (start + end)[wide] / 2
        style: dict[str, Any] = {"color": ink_on(fill), "s": 12}
        yield Marks(f"{gid}-mark", MARKS[content], (centre, centre), (middle[wide],) * 2, style, words, (0, 0, 0, 0))
        style = {"facecolor": fill, "edgecolor": GREY, "linewidths": 0.4 * fine, "s": 16 * fine**2}
        at = start[free], end[free]
        yield Marks(f"{gid}-free", MARKS[content], at, (middle[free],) * 2, style, words, (0, 0, 0, 0))


def _wait_layers(panel: Panel, scale: float) -> Iterator[Marks]:
    """Yield a line from each dependency to the task that waited for it, thicker where a lane idled for it."""
    run = panel.views.run
    assert run is not None, "gantt refuses the dependencies of a trace without its program"
    program, edges, waited = run.program, run.program.edges, waits_for(run.program, run.start, run.end)
    waiter = np.flatnonzero(waited >= 0)
    waiter = waiter[run.start[waiter] < panel.until]
    device, y = _places_of_nodes(panel)
    # Nodes on one row need no line, nor does an update, which is drawn on all rows of its device.
    seen = (y[edges.before] != y[edges.after]) & np.isin(edges.kind, (EdgeKind.DATA, EdgeKind.BARRIER))
    update = np.append(program.tasks.kind == Kind.U, np.zeros(program.nodes - len(program.tasks), dtype=bool))
    seen &= ~(update[edges.before] | update[edges.after]) | (device[edges.before] != device[edges.after])
    seen &= run.start[edges.after] < panel.until
    for gid, words, width, size, before, after in (
        ("waited", "idle until its end", 1.2, 6, waited[waiter], waiter),
        ("needed", "needed", 0.4, 1.5, edges.before[seen], edges.after[seen]),
    ):
        edge = np.sign(y[after] - y[before]) * (LINK / 2 - 0.01)
        style: dict[str, Any] = {"colors": INK, "alpha": 0.6, "zorder": 0.9, "linewidths": width}
        times, heights = (run.end[before], run.start[after]), (y[before] + edge, y[after] - edge)
        yield Marks(gid, "line", times, heights, style, words, (-1, 1, 0, 0))
        at = (times[1],) * 2, (heights[1],) * 2
        yield Marks(f"{gid}-mark", "o", *at, {"color": INK, "s": size}, words, (1, 1, 0, 0))


def _places_of_nodes(panel: Panel) -> tuple[Ints, Floats]:
    """Return each node's device (-1: none), and the middle of its row."""
    views, run, rows = panel.views, panel.views.run, panel.rows
    assert run is not None
    device, y = np.full(run.program.nodes, -1), np.zeros(run.program.nodes)
    middle = np.add(*rows.device_spans(streams=False)) / 2
    device[run.task_nodes] = views.tasks["device"]
    y[run.task_nodes] = middle[views.tasks["device"]]
    centres = rows.lane_top + rows.lane_high / 2
    y[run.task_nodes[views.bars]] = centres[panel.task_lane]
    y[run.message_nodes[panel.message[::-1]]] = centres[panel.message_lane[::-1]]  # on the first of several devices
    # A message that takes no time stands with its sender: lines to its mark and back would be one line.
    free = np.flatnonzero((views.messages["end"] == views.messages["start"]) & (views.op == Op.P2P))
    device[run.message_nodes[free]] = views.messages["src"][free]
    y[run.message_nodes[free]] = middle[views.messages["src"][free]]
    return device, y


def _fineness(panel: Panel, scale: float) -> float:
    """Return the fineness of lines: 1, or less where tasks are narrow."""
    return float(min(max(panel.short * scale / 8, 0.35), 1.0))


def _fitted_names(panel: Panel, scale: float, least: float) -> tuple[list[str], float]:
    """Return the name of each block, "" where there is no room for it, and the size of all.

    It is stage, kind and micro-batch if nine in ten blocks have room for that, else the micro-batch's number if half of
    them have room for that, else nothing.
    """
    update = panel.kind == Kind.U
    stale = SLASH * ((panel.tasks["stale"] > 0) & ~update)
    inside = (panel.tasks["end"] <= panel.until * (1 + 1e-9)) & ~panel.later
    room = np.where(inside, panel.took * scale - stale - 0.8, 0.0)
    numbers = [str(number) if number >= 0 else "" for number in panel.number.tolist()]
    columns = panel.tasks["stage"].tolist(), panel.tasks["kind"].tolist(), numbers
    full = ["".join(map(str, each)) for each in zip(*columns, strict=True)]
    for names, share in [(full, 0.9)] * panel.full + [(numbers, 0.5)]:
        for size in (8.0, least):
            fits = np.array([0.64 * len(name) + 0.35 * name.count("W") for name in names]) * size <= room
            counting = fits[~panel.later & ~update]
            if len(counting) and counting.mean() >= (share if size == least else 0.9):
                return [name if each else "" for name, each in zip(names, fits, strict=True)], size
    return [""] * len(room), least


def _write_names(axes: Axes, panel: Panel, names: list[str], size: float, scale: float, prefix: str) -> None:
    middle = panel.tasks["end"] - SLASH / scale * panel.tasks["stale"] * (panel.kind != Kind.U)
    middle = (panel.tasks["start"] + middle) / 2
    columns = (panel.tasks[name].tolist() for name in ("kind", "step", "micro_batch", "stage"))
    for k, (kind, t, i, j) in enumerate(zip(*columns, strict=True)):
        if names[k]:
            share = 0.5 if panel.colouring == "kind" else sum(LANE_SHARES[Kind[kind]]) / 2
            ink, gid = ink_on(panel.colours[k]), f"{prefix}{kind}-t{t}-{f'i{i}-' if i >= 0 else ''}j{j}"
            text = axes.text(middle[k], panel.top[k] + share * LANE, names[k], fontsize=size, color=ink, ha="center")
            text.set(va="center_baseline", gid=gid, clip_on=True)


class _Clock(NamedTuple):
    """The time that all panels show, the inches of it, and those left of it."""

    span: float
    width: float
    left: float
    in_slots: bool

    @property
    def scale(self) -> float:
        """The points of a unit of time."""
        return self.width * 72 / self.span


def gantt(
    traces: Trace | Sequence[Trace],
    *,
    colour: str = "kind",
    links: bool | None = None,
    dependencies: bool = False,
    steps: int | None = None,
    look: Look = AS_DRAWN,
    axes: Axes | None = None,
) -> Figure:
    """Draw a row for each lane of a device; several runs one below the other, with one clock.

    A run is drawn for `steps` training steps, by default for one if every task reads what the step before it made, else
    for all. Blocks have the `colour` of their kind, micro-batch or stage. `links` adds rows for messages; by default
    where these take time and the links are few. `dependencies` adds them, and lines of dependencies. With
    `axes`, one run is drawn into them.
    """
    several = [traces] if isinstance(traces, Trace) else list(traces)
    _refuse_apart(several, dependencies=dependencies, axes=axes)
    panels = [Panel(Views(trace), colour, steps, True if dependencies else links) for trace in several]
    if links and not any(len(panel.message) for panel in panels):
        raise RequestError("links", "have no rows, as nothing is sent; leave them out")
    clock = _clock_of(panels, look, axes)
    _refuse_too_much(panels, clock)
    kinds = [_task_layers, _update_layers, _idle_layers, _message_layers, *[_wait_layers] * dependencies]
    drawings = [(panel, [layer for each in kinds for layer in each(panel, clock.scale)]) for panel in panels]
    if axes is not None:
        return _draw_into(axes, *drawings[0], clock)
    return _new_figure(drawings, clock, look)


def _refuse_apart(traces: Sequence[Trace], *, dependencies: bool, axes: Axes | None) -> None:
    if not 0 < len(traces) <= MOST_SCHEDULES:
        raise RequestError("gantt", f"has {len(traces)} schedules; a picture shows 1 to {MOST_SCHEDULES}")
    if axes is not None and len(traces) > 1:
        raise RequestError("axes", f"have room for one schedule, not for {len(traces)}; draw each into its own")
    if len({trace.in_slots for trace in traces}) > 1:
        raise RequestError("traces", "need one unit of time, slots or seconds; draw them apart")
    if dependencies and any(Views(trace).run is None for trace in traces):
        raise RequestError("dependencies", "are not in a trace's files; draw the run itself")


def _clock_of(panels: Sequence[Panel], look: Look, axes: Axes | None) -> _Clock:
    """Return the clock of a picture that is as wide as asked, or as its short tasks need."""
    span, short = max(panel.until for panel in panels), min(panel.short for panel in panels)
    left = 0.15 + 0.062 * max(len(name) for panel in panels for name in panel.names.values())
    width = min(max(span / short * TASK, NARROW), WIDE)
    if axes is not None:
        width = axes.get_position().width * figure_with(axes).get_figwidth()
    elif look.inches_wide:
        width = max(1.0, look.inches_wide / look.enlargement(LETTERS) - left - _RIGHT)
    return _Clock(span, width, left, panels[0].views.in_slots)


def _refuse_too_much(panels: Sequence[Panel], clock: _Clock) -> None:
    count = sum(len(panel.kind) + len(panel.views.op) * bool(panel.link_names) for panel in panels)
    if count > MOST_BARS:
        problem = f"has {count:,} tasks and messages; a picture shows at most {MOST_BARS:,}, an .html file any number"
        raise RequestError("gantt", f"{problem}; or take fewer --steps")
    if min(panel.half for panel in panels) * clock.scale < THIN:
        problem = f"would show most tasks less than {THIN:g} point wide; take fewer --steps, or an .html file"
        raise RequestError("gantt", problem)


_Drawing = tuple[Panel, list[Marks]]


def _new_figure(drawings: Sequence[_Drawing], clock: _Clock, look: Look) -> Figure:
    """Draw panels below each other, and the key below all."""
    traces, several = [panel.views.trace for panel, _ in drawings], len(drawings) > 1
    words, names = sheet.titles(traces) if several else (title(traces[0]), [""])
    words = words if look.title is None else label(look.title, 300)
    factor, wide = look.enlargement(LETTERS), clock.left + clock.width + _RIGHT
    least = max(6.0, look.least_letters / factor)
    fitted = [_fitted_names(panel, clock.scale, least) for panel, _ in drawings]
    key = sheet.key_rows(_gantt_key(drawings, fitted) if look.legend else [], (wide - 0.2) * 72, LETTERS)
    gap = _NAME_ROW if several else 0.02
    words = sheet.wrapped(words, (wide - 0.45) * 72, LETTERS + 1.5)
    heading = (_TITLE_ROW + sheet.height_below_first(words, LETTERS + 1.5) / 72) * bool(words)
    fixed = heading + _AXIS_ROW + len(key) * _KEY_ROW / 72 + 0.05 + len(drawings) * gap
    rows = sum(panel.rows.height for panel, _ in drawings)
    room = look.high((fixed + rows) * factor) / factor - fixed
    if room < LEAST_ROW * rows:
        missing = f"{LEAST_ROW * rows - room:.1f} inches more"
        raise RequestError("height", f"leaves no room for the rows; give at least {missing}")
    stretch = room / rows  # of each row
    high = fixed + rows * stretch
    figure, page = sheet.new_sheet(wide * 72, high * 72)
    page.set_zorder(-1)
    top = high - heading
    sheet.write_words(page, 6, (high - _TITLE_ROW + 0.12) * 72, words, LETTERS + 1.5, gid=TITLE)
    for number, ((panel, layers), name, inside) in enumerate(zip(drawings, names, fitted, strict=True)):
        top -= gap
        if several:
            sheet.write_words(page, clock.left * 72, (top + 0.06) * 72, name, LETTERS + 0.5, gid=f"name-{number}")
        top -= panel.rows.height * stretch
        axes = figure.add_axes((clock.left / wide, top / high, clock.width / wide, panel.rows.height * stretch / high))
        prefix = f"{chr(97 + number)}-" * several
        _draw_panel(axes, panel, layers, inside, clock, prefix, is_last=number == len(drawings) - 1)
    sheet.draw_key(page, 0.1 * 72, (top - _AXIS_ROW) * 72, key, _KEY_ROW, LETTERS)
    return sheet.enlarge(figure, factor)


def _draw_panel(
    axes: Axes,
    panel: Panel,
    layers: Sequence[Marks],
    names: tuple[list[str], float],
    clock: _Clock,
    prefix: str = "",
    *,
    is_last: bool = True,
) -> None:
    plain(axes, "")
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_visible(is_last)
    axes.set_ylim(panel.rows.height, 0)
    axes.set_yticks([*panel.names], [*panel.names.values()])
    axes.tick_params(axis="y", length=0, labelsize=LETTERS)
    axes.tick_params(axis="x", labelsize=LETTERS, labelbottom=is_last, bottom=is_last, length=3, pad=2)
    sheet.clock(axes, clock.span, in_slots=clock.in_slots, ticks=max(2, int(clock.width / 0.5)))
    axes.set_xlabel(axes.get_xlabel() if is_last else "", fontsize=LETTERS, labelpad=1)
    for layer in layers:
        layer.draw(axes, prefix)
    _write_names(axes, panel, *names, clock.scale, prefix)
    axes.patch.set_gid(f"{prefix}frame")


def _gantt_key(drawings: Sequence[_Drawing], names: Sequence[tuple[list[str], float]]) -> list[sheet.KeyEntry]:
    """Return an entry for each meaning of the marks drawn, then entries of colours and names."""
    panels = [panel for panel, _ in drawings]
    found: dict[str, dict[str, Marks]] = {}
    for layer in chain(*zip_longest(*(layers for _, layers in drawings))):  # in the order of a run's marks
        if layer and layer.words and (len(layer.x[0]) or not layer.gid):
            found.setdefault(layer.words, {}).setdefault(layer.gid, layer)
    if "backward" in found:  # of another run
        found.pop("backward of inputs", None)
    samples = [(words, list(each.values())) for words, each in found.items() if any(each)]
    samples += _colour_samples(panels)
    entries = [sheet.KeyEntry(partial(_draw_samples, each), 2 * _HALF, words) for words, each in samples]
    inside = [name for each, _ in names for name in each if name]
    if inside:
        full = any(not name.isdigit() for name in inside)
        example, meaning = ("1F3", "stage 1, forward, micro-batch 3") if full else ("3", "micro-batch 3")
        meaning += ", counted through the steps" * any(panel.counted for panel in panels)
        write = partial(sheet.write_words, words=example, size=7, ha="center", weight="bold")
        entries.append(sheet.KeyEntry(write, 5 * len(example) - 1, meaning))
    return entries


def _draw_samples(layers: Sequence[Marks], axes: Axes, x: float, y: float) -> None:
    """Draw the samples of marks around a point of a sheet."""
    for layer in layers:
        style = {name: each[0] if isinstance(each, np.ndarray) else each for name, each in layer.style.items()}
        if layer.fill:
            style["colors" if layer.form == "line" else "facecolor"] = layer.fill
        left, right, top, bottom = (np.array([each]) for each in layer.sample)
        at = (x + _HALF * left, x + _HALF * right), (y - _HIGH * top, y - _HIGH * bottom)
        layer._replace(gid="", x=at[0], y=at[1], style=style).draw(axes)


def _colour_samples(panels: Sequence[Panel]) -> list[tuple[str, list[Marks]]]:
    """Return samples of colours that are not of kinds, each with its first two numbers, and of the paler ones."""
    samples, numbers, colouring = [], set[int](), panels[0].colouring
    if any(panel.tints for panel in panels):
        first, last = KIND_COLOURS[Kind.F], tint(KIND_COLOURS[Kind.F], PALEST)
        pair = [_ground("", first), _ground("", last)._replace(sample=(0, 1, -1, 1))]
        samples.append(("a device's first and last stage", pair))
    for panel in panels if colouring != "kind" else ():
        column = panel.number if colouring == "micro-batch" else panel.tasks["stage"]
        numbers |= set(column[panel.kind != Kind.U].tolist())
    shades = colour_meanings(sorted(numbers), colouring)
    samples += [(words, [_ground("", shade)]) for shade, words in shades]
    if any(panel.later.any() for panel in panels):
        words = "next step, or in no update" if all(panel.views.has_rounds for panel in panels) else "next step"
        samples.append((words, [_ground("", tint(_NEUTRAL, 0.6))]))
    return samples


def _draw_into(axes: Axes, panel: Panel, layers: Sequence[Marks], clock: _Clock) -> Figure:
    """Draw a run into axes of another figure, with a legend of its colours below them."""
    _draw_panel(axes, panel, layers, _fitted_names(panel, clock.scale, 6.0), clock)
    samples = [(words, each[0]) for words, each in _colour_samples([panel])]
    samples += [(layer.words, layer) for layer in layers if layer.words and layer.form == "box" and len(layer.x[0])]
    looks = {words: (layer.fill or layer.style["facecolor"], layer.style.get("hatch")) for words, layer in samples}
    handles = [
        Patch(facecolor=fill, hatch=hatch, lw=0, label=f"{panel.colouring} {words}" if words[0].isdigit() else words)
        for words, (fill, hatch) in looks.items()
        if fill != _NEUTRAL
    ]
    style: dict[str, Any] = {"frameon": False, "fontsize": LETTERS, "borderaxespad": 0}
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=5, **style)
    return figure_with(axes)

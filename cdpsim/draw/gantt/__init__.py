"""A run in real time: what every device and every link does when, and why devices are idle."""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from cdpsim.draw import scene
from cdpsim.draw.canvas import GREY, INK, PALE, plain
from cdpsim.draw.gantt import bars
from cdpsim.draw.gantt.bars import IDLE, KINDS, Sheet
from cdpsim.draw.gantt.rows import LANE, LINK, Rows, arrange, idle
from cdpsim.draw.palette import COLOURS
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Columns, Floats, Ints
from cdpsim.program import Content, EdgeKind, Kind
from cdpsim.runs import Run
from cdpsim.trace import Trace
from cdpsim.trace.metrics import waiting
from cdpsim.trace.metrics.waiting import IdleReason

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Entry = tuple[Callable[[Sheet, Floats, Floats], None], str]  # draws itself at x and y, and what it means

MOST_BARS = 20_000
NARROW, WIDE, TASK, MARK = 6.0, 18.0, 0.32, 0.09  # inches: all time at least and at most, a short task, a mark
THIN = 1.0  # points: what nobody sees any more
LEGEND_ROWS = 5  # entries below each other
NEUTRAL = "#c8c8c8"


def gantt(trace: Trace, dependencies: bool = False) -> "Figure":
    """Draw a row for each lane of a device and for each link; with `dependencies`, lines from what was waited for."""
    from matplotlib.figure import Figure

    scene.refuse_empty(trace)
    _refuse_large(trace)
    if dependencies and not isinstance(trace, Run):
        raise RequestError("dependencies", "are not in a trace's files; draw the run itself")
    span, width, fine = _measure(trace)
    rows = arrange(trace, span * MARK * fine / width)
    parts = idle(trace, rows, span)
    legend = _legend(trace, parts[3], dependencies)
    left = 0.3 + 0.07 * max(len(name) for _, name in rows.names)
    right = max(width, sum(_group_width(*group) for group in legend.items())) - width + 0.3
    below = 0.3 + 0.19 * min(max(map(len, legend.values())), LEGEND_ROWS)
    size = left + width + right, rows.height + 0.95 + below
    figure = Figure(figsize=size)
    axes = figure.add_axes((left / size[0], (below + 0.55) / size[1], width / size[0], rows.height / size[1]))
    sheet = Sheet(axes, width * 72 / span, fine)
    _draw_axes(axes, trace, rows, span, width)
    for which in IdleReason:
        lane, begin, end, _ = (column[parts[3] == which] for column in parts)
        bars.idle_boxes(axes, which, rows.lane_top[lane], begin, end)
    _draw_tasks(sheet, trace, rows)
    _draw_messages(sheet, trace, rows)
    if dependencies and isinstance(trace, Run):
        _draw_waits(axes, trace, rows)
    foot = figure.add_axes((0, 0, 1, below / size[1]))
    foot.set(xlim=(0, size[0]), ylim=(below, 0))
    foot.axis("off")
    _draw_legend(Sheet(foot, 72, fine), left, legend)
    return figure


def _refuse_large(trace: Trace) -> None:
    count = len(trace.tasks["start"]) + len(trace.messages["start"])
    if count > MOST_BARS:
        problem = f"has {count:,} tasks and messages; a picture shows at most {MOST_BARS:,}, an .html file any number"
        raise RequestError("gantt", f"{problem}; or take fewer --steps")


def _measure(trace: Trace) -> tuple[float, float, float]:
    """How long the run is, how wide its picture in inches, and how fine what is in it must be."""
    span = float(max(trace.tasks["end"].max(), trace.messages["end"].max(initial=0))) or 1.0
    took = trace.tasks["end"] - trace.tasks["start"]
    short, half = np.quantile(took[took > 0], [0.25, 0.5]).tolist() if took.any() else (span, span)
    width = min(max(span / short * TASK, NARROW), WIDE)
    scale = width * 72 / span
    if half * scale < THIN:
        problem = f"would show most tasks less than {THIN:g} point wide; take fewer --steps, or an .html file"
        raise RequestError("gantt", problem)
    return span, width, min(max(short * scale / 8, 0.35), 1.0)


def _draw_axes(axes: "Axes", trace: Trace, rows: Rows, span: float, width: float) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    title = scene.title(trace)
    plain(axes, title, size=min(9.5, width * 72 / (0.65 * len(title))))
    axes.grid(visible=False, axis="y")
    links = np.unique(rows.message_top) + LINK / 2
    axes.hlines(links, 0, span, color=PALE, linewidth=0.5, zorder=0.5)
    axes.set(xlim=(0, span), ylim=(rows.height, 0))
    axes.spines["left"].set_visible(False)
    axes.set_yticks([middle for middle, _ in rows.names], [name for _, name in rows.names])
    axes.tick_params(axis="y", length=0)
    axes.patch.set_gid("frame")
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 4, 5, 10], integer=trace.in_slots))
    if not trace.in_slots:
        axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.set_xlabel("time step (slot)" if trace.in_slots else "time")


def _draw_tasks(sheet: Sheet, trace: Trace, rows: Rows) -> None:
    tasks = {name: column[rows.bars] for name, column in trace.tasks.items()}
    top, colours = rows.lane_top[rows.lane], np.array([*COLOURS, INK])[_colour(tasks)]
    for kind in KINDS:
        some = tasks["kind"] == kind
        columns = tasks["start"][some], tasks["end"][some], colours[some], tasks["stale"][some]
        bars.task_bars(sheet, kind, top[some], *columns)
    bars.names(sheet, tasks, top, bars.inks_on(colours))
    update = (trace.tasks["kind"] == "U") & (trace.tasks["end"] == trace.tasks["start"])
    once = np.unique(np.stack([trace.tasks["device"][update], trace.tasks["start"][update]], axis=1), axis=0)
    device, time = once[:, 0].astype(int), once[:, 1]
    first, last = rows.device_lane[device], rows.device_lane[device + 1] - 1
    bars.update_marks(sheet, time, rows.lane_top[first], rows.lane_top[last] + LANE)


def _colour(tasks: Columns) -> Ints:
    """The number of each bar's colour: of its micro-batch, or the ink of an update."""
    return np.where(tasks["kind"] == "U", len(COLOURS), tasks["micro_batch"] % len(COLOURS))


def _draw_messages(sheet: Sheet, trace: Trace, rows: Rows) -> None:
    start, end = trace.messages["start"], trace.messages["end"]
    for content in Content:
        some = trace.messages["content"] == content.name.lower()
        bars.message_bars(sheet, content, rows.message_top[some], start[some], end[some])


def _draw_waits(axes: "Axes", trace: Run, rows: Rows) -> None:
    """Draw a line from the end of what was waited for to the start of what waited, thicker where it was idle for it."""
    program, start, end = trace.program, trace.start, trace.end
    edges, waited = program.edges, waiting.waits_for(program, start, end)
    waiter = np.flatnonzero(waited >= 0)
    device, y = _places(trace, rows)
    # What happens on one row needs no line, nor does an update, which stands on all rows of its device.
    seen = (y[edges.before] != y[edges.after]) & np.isin(edges.kind, (EdgeKind.DATA, EdgeKind.BARRIER))
    update = np.append(program.tasks.kind == Kind.U, np.zeros(program.nodes - len(program.tasks), dtype=bool))
    seen &= ~(update[edges.before] | update[edges.after]) | (device[edges.before] != device[edges.after])
    for gid, width, size, before, after in (
        ("needed", 0.4, 1.5, edges.before[seen], edges.after[seen]),
        ("waited", 1.2, 6, waited[waiter], waiter),
    ):
        edge = np.sign(y[after] - y[before]) * (LINK / 2 - 0.01)
        style = {"colors": INK, "alpha": 0.6, "zorder": 0.9, "linewidths": width}
        bars.lines(axes, end[before], start[after], y[before] + edge, y[after] - edge, gid, **style)
        bars.marks(axes, "o", start[after], y[after] - edge, f"{gid}-mark", color=INK, s=size)


def _places(trace: Run, rows: Rows) -> tuple[Ints, Floats]:
    """Where each node of the program stands: its device (-1: none), and the middle of its row."""
    device, y = np.full(trace.program.nodes, -1), np.zeros(trace.program.nodes)
    first, last = rows.device_lane[:-1], rows.device_lane[1:] - 1
    middle = (rows.lane_top[first] + rows.lane_top[last] + LANE) / 2
    device[trace.task_nodes] = trace.tasks["device"]
    y[trace.task_nodes] = middle[trace.tasks["device"]]
    y[trace.task_nodes[rows.bars]] = rows.lane_top[rows.lane] + LANE / 2
    y[trace.message_nodes] = rows.message_top + LINK / 2
    # What takes no time stands with its sender: lines to its mark and back would be one line.
    free = np.flatnonzero((trace.messages["end"] == trace.messages["start"]) & (trace.messages["op"] == "p2p"))
    device[trace.message_nodes[free]] = trace.messages["src"][free]
    y[trace.message_nodes[free]] = middle[trace.messages["src"][free]]
    return device, y


def _legend(trace: Trace, reasons: Ints, dependencies: bool) -> dict[str, list[Entry]]:
    """What the picture's colours, textures and marks mean: of all there are, those that are in it."""
    tasks, told = trace.tasks, isinstance(trace, Run)
    number, several = int(tasks["micro_batch"].max()) + 1, len(COLOURS)
    kinds: list[Entry] = [
        (partial(_bar, kind, NEUTRAL, 0), name) for kind, name in KINDS.items() if kind != "U" and kind in tasks["kind"]
    ]
    kinds += [(partial(_bar, "F", NEUTRAL, 1), "not the newest version")] if tasks["stale"].any() else []
    long = (tasks["end"] > tasks["start"])[tasks["kind"] == "U"]
    kinds += [(partial(_bar, "U", INK, 0), "update")] if long.any() else []
    kinds += [(_update, "update that takes no time" if long.any() else "update")] if not long.all() else []
    contents: list[Entry] = []
    for content in Content:
        mine = trace.messages["content"] == content.name.lower()
        long = bool((trace.messages["end"] > trace.messages["start"])[mine].any())
        contents += [(partial(_message, content, long), content.name.lower().replace("_", " "))] if mine.any() else []
    idle = [which for which in IdleReason if which in reasons]
    waits: list[Entry] = [(partial(_line, 1.2), "idle until its end"), (partial(_line, 0.4), "needed")]
    return {
        "micro-batch": [
            (partial(_bar, "F", COLOURS[i], 0), f"{i}, {i + several}, …" if i + several < number else str(i))
            for i in range(min(number, several))
        ],
        "task": kinds,
        "message": contents,
        "idle" if told else "device": [(partial(_idle, which), IDLE[which][0] if told else "idle") for which in idle],
        "dependency": waits if dependencies else [],
    }


def _bar(kind: str, colour: str, stale: int, sheet: Sheet, left: Floats, top: Floats) -> None:
    bars.task_bars(sheet, kind, top, left, left + 0.24, np.array([colour]), np.array([stale]), 0.16)


def _update(sheet: Sheet, left: Floats, top: Floats) -> None:
    bars.update_marks(sheet, left + 0.12, top + 0.04, top + 0.16)


def _message(content: Content, long: bool, sheet: Sheet, left: Floats, top: Floats) -> None:
    bars.message_bars(sheet, content, top, *((left, left + 0.24) if long else (left + 0.12, left + 0.12)))


def _idle(reason: IdleReason, sheet: Sheet, left: Floats, top: Floats) -> None:
    bars.idle_boxes(sheet.axes, reason, top - 0.01, left, left + 0.24, 0.18)


def _line(width: float, sheet: Sheet, left: Floats, top: Floats) -> None:
    bars.lines(sheet.axes, left, left + 0.24, top + 0.08, top + 0.08, "line", colors=INK, alpha=0.6, linewidths=width)


def _draw_legend(sheet: Sheet, x: float, groups: dict[str, list[Entry]]) -> None:
    for heading, entries in groups.items():
        if entries:
            sheet.axes.text(x, 0.08, heading, fontsize=8, color=GREY, va="center")
        for k, (draw, words) in enumerate(entries):
            left, top = x + _column_width(entries) * (k // LEGEND_ROWS), 0.2 + 0.19 * (k % LEGEND_ROWS)
            draw(sheet, np.array([left]), np.array([top]))
            sheet.axes.text(left + 0.32, top + 0.08, words, fontsize=8, color=INK, va="center")
        x += _group_width(heading, entries)
    for drawn in sheet.axes.collections:
        drawn.set_gid(None)  # which are names of what is in the picture itself


def _column_width(entries: list[Entry]) -> float:
    return 0.42 + 0.058 * max(len(words) for _, words in entries)


def _group_width(heading: str, entries: list[Entry]) -> float:
    if not entries:
        return 0.0
    return max(_column_width(entries) * ceil(len(entries) / LEGEND_ROWS), 0.06 * len(heading)) + 0.15

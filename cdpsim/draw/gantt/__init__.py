"""A run in real time: the tasks of every device, the messages of every link, and why devices are idle."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from cdpsim.draw.canvas import INK, PALE, plain
from cdpsim.draw.gantt import bars
from cdpsim.draw.gantt.bars import Drawing, draw_legend, group_width, legend_entries, legend_height
from cdpsim.draw.gantt.rows import LANE, LINK, Rows, arrange_rows, idle_times
from cdpsim.draw.palette import COLOURS
from cdpsim.draw.views import KIND_WORDS, Views, title
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Floats, Ints
from cdpsim.program import Content, EdgeKind, Kind, Op
from cdpsim.runs import Run
from cdpsim.trace import Trace
from cdpsim.trace.metrics import waiting
from cdpsim.trace.metrics.waiting import IdleReason

MOST_BARS = 20_000
NARROW, WIDE, TASK, MARK = 6.0, 18.0, 0.32, 0.09  # inches: all time at least and at most, a short task, a mark
THIN = 1.0  # points: narrower bars cannot be seen


def gantt(trace: Trace, dependencies: bool = False) -> Figure:
    """Draw a row for each lane of a device and for each link; with `dependencies`, lines from what was waited for."""
    views = Views(trace)
    _refuse_large(len(views.start))
    if dependencies and views.run is None:
        raise RequestError("dependencies", "are not in a trace's files; draw the run itself")
    span, width, fine = _measure_picture(views)
    rows = arrange_rows(views, span * MARK * fine / width)
    idle = idle_times(views, rows, span)
    legend = legend_entries(views, idle.reason, dependencies)
    left = 0.3 + 0.07 * max(len(name) for _, name in rows.names)
    right = max(width, sum(group_width(*group) for group in legend.items())) - width + 0.3
    below = legend_height(legend)
    size = left + width + right, rows.height + 0.95 + below
    figure = Figure(figsize=size)
    axes = figure.add_axes((left / size[0], (below + 0.55) / size[1], width / size[0], rows.height / size[1]))
    drawing = Drawing(axes, width * 72 / span, fine)
    _draw_axes(axes, trace, rows, span, width)
    for reason in IdleReason:
        chosen = idle.reason == reason
        bars.idle_boxes(axes, reason, rows.lane_top[idle.lane[chosen]], idle.begin[chosen], idle.end[chosen])
    _draw_tasks(drawing, views, rows)
    for content in Content:
        chosen = views.content == content
        times = (views.messages[name][chosen] for name in ("start", "end"))
        bars.message_bars(drawing, content, rows.message_top[chosen], *times)
    if dependencies and views.run:
        _draw_waits(axes, views, views.run, rows)
    foot = figure.add_axes((0, 0, 1, below / size[1]))
    foot.set(xlim=(0, size[0]), ylim=(below, 0))
    foot.axis("off")
    draw_legend(Drawing(foot, 72, fine), left, legend)
    return figure


def _refuse_large(count: int) -> None:
    if count > MOST_BARS:
        problem = f"has {count:,} tasks and messages; a picture shows at most {MOST_BARS:,}, an .html file any number"
        raise RequestError("gantt", f"{problem}; or take fewer --steps")


def _measure_picture(views: Views) -> tuple[float, float, float]:
    """Return the length of the run, the width of its picture in inches, and the fineness of lines in it, up to 1."""
    span = float(views.end.max()) or 1.0
    took = views.tasks["end"] - views.tasks["start"]
    short, half = np.quantile(took[took > 0], [0.25, 0.5]).tolist() if took.any() else (span, span)
    width = min(max(span / short * TASK, NARROW), WIDE)
    scale = width * 72 / span
    if half * scale < THIN:
        problem = f"would show most tasks less than {THIN:g} point wide; take fewer --steps, or an .html file"
        raise RequestError("gantt", problem)
    return span, width, min(max(short * scale / 8, 0.35), 1.0)


def _draw_axes(axes: Axes, trace: Trace, rows: Rows, span: float, width: float) -> None:
    words = title(trace)
    plain(axes, words, size=min(9.5, width * 72 / (0.65 * len(words))))
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


def _draw_tasks(drawing: Drawing, views: Views, rows: Rows) -> None:
    """Draw a bar for each task in the colour of its micro-batch, and a mark where updates take no time."""
    tasks = {name: column[views.bars] for name, column in views.tasks.items()}
    shade = np.where(tasks["kind"] == "U", len(COLOURS), tasks["micro_batch"] % len(COLOURS))
    top, colours = rows.lane_top[rows.lane], np.array([*COLOURS, INK])[shade]
    for kind in KIND_WORDS:
        chosen = tasks["kind"] == kind
        columns = tasks["start"][chosen], tasks["end"][chosen], colours[chosen], tasks["stale"][chosen]
        bars.task_bars(drawing, kind, top[chosen], *columns)
    bars.write_names(drawing, tasks, top, bars.inks_on(colours))
    free = np.setdiff1d(np.arange(len(views.kind)), views.bars)
    device, time = np.unique(np.stack([views.tasks[name][free] for name in ("device", "start")]), axis=1)
    first, last = (rows.device_lane[device.astype(int) + k] - k for k in (0, 1))
    bars.update_marks(drawing, time, rows.lane_top[first], rows.lane_top[last] + LANE)


def _draw_waits(axes: Axes, views: Views, run: Run, rows: Rows) -> None:
    """Draw a line from the end of what was waited for to the start of what waited, thicker if that idled for it."""
    program, edges, waited = run.program, run.program.edges, waiting.waits_for(run.program, run.start, run.end)
    waiter = np.flatnonzero(waited >= 0)
    device, y = _places_of_nodes(views, run, rows)
    # Nodes on one row need no line, nor does an update, which is drawn on all rows of its device.
    seen = (y[edges.before] != y[edges.after]) & np.isin(edges.kind, (EdgeKind.DATA, EdgeKind.BARRIER))
    update = np.append(program.tasks.kind == Kind.U, np.zeros(program.nodes - len(program.tasks), dtype=bool))
    seen &= ~(update[edges.before] | update[edges.after]) | (device[edges.before] != device[edges.after])
    for gid, width, size, before, after in (
        ("needed", 0.4, 1.5, edges.before[seen], edges.after[seen]),
        ("waited", 1.2, 6, waited[waiter], waiter),
    ):
        edge = np.sign(y[after] - y[before]) * (LINK / 2 - 0.01)
        style = {"colors": INK, "alpha": 0.6, "zorder": 0.9, "linewidths": width}
        bars.straight_lines(
            axes, (run.end[before], run.start[after]), (y[before] + edge, y[after] - edge), gid, **style
        )
        bars.marks(axes, "o", run.start[after], y[after] - edge, f"{gid}-mark", color=INK, s=size)


def _places_of_nodes(views: Views, run: Run, rows: Rows) -> tuple[Ints, Floats]:
    """Return each node's device (-1: none), and the middle of its row."""
    device, y = np.full(run.program.nodes, -1), np.zeros(run.program.nodes)
    first, last = rows.device_lane[:-1], rows.device_lane[1:] - 1
    middle = (rows.lane_top[first] + rows.lane_top[last] + LANE) / 2
    device[run.task_nodes] = views.tasks["device"]
    y[run.task_nodes] = middle[views.tasks["device"]]
    y[run.task_nodes[views.bars]] = rows.lane_top[rows.lane] + LANE / 2
    y[run.message_nodes] = rows.message_top + LINK / 2
    # A message that takes no time stands with its sender: lines to its mark and back would be one line.
    free = np.flatnonzero((views.messages["end"] == views.messages["start"]) & (views.op == Op.P2P))
    device[run.message_nodes[free]] = views.messages["src"][free]
    y[run.message_nodes[free]] = middle[views.messages["src"][free]]
    return device, y

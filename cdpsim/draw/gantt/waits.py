"""Lines of dependencies: each from the end of a task or message to the start of the task that waited for it."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from cdpsim.draw.canvas import INK
from cdpsim.draw.gantt.bars import marks, straight_lines
from cdpsim.draw.gantt.rows import LANE, LINK, Rows
from cdpsim.draw.views import Views
from cdpsim.numeric.columns import Floats, Ints
from cdpsim.program import EdgeKind, Kind, Op
from cdpsim.runs import Run
from cdpsim.trace.metrics import waiting


def draw_waits(axes: Axes, views: Views, run: Run, rows: Rows, until: float, prefix: str) -> None:
    """Draw the waits that end before a time, thicker where a lane idled for them."""
    program, edges, waited = run.program, run.program.edges, waiting.waits_for(run.program, run.start, run.end)
    waiter = np.flatnonzero(waited >= 0)
    waiter = waiter[run.start[waiter] < until]
    device, y = _places_of_nodes(views, run, rows)
    # Nodes on one row need no line, nor does an update, which is drawn on all rows of its device.
    seen = (y[edges.before] != y[edges.after]) & np.isin(edges.kind, (EdgeKind.DATA, EdgeKind.BARRIER))
    update = np.append(program.tasks.kind == Kind.U, np.zeros(program.nodes - len(program.tasks), dtype=bool))
    seen &= ~(update[edges.before] | update[edges.after]) | (device[edges.before] != device[edges.after])
    seen &= run.start[edges.after] < until
    for gid, width, size, before, after in (
        ("needed", 0.4, 1.5, edges.before[seen], edges.after[seen]),
        ("waited", 1.2, 6, waited[waiter], waiter),
    ):
        edge = np.sign(y[after] - y[before]) * (LINK / 2 - 0.01)
        style: dict[str, Any] = {"colors": INK, "alpha": 0.6, "zorder": 0.9, "linewidths": width}
        times, heights = (run.end[before], run.start[after]), (y[before] + edge, y[after] - edge)
        straight_lines(axes, times, heights, prefix + gid, **style)
        marks(axes, "o", run.start[after], y[after] - edge, f"{prefix}{gid}-mark", color=INK, s=size)


def _places_of_nodes(views: Views, run: Run, rows: Rows) -> tuple[Ints, Floats]:
    """Return each node's device (-1: none), and the middle of its row."""
    device, y = np.full(run.program.nodes, -1), np.zeros(run.program.nodes)
    first, last = rows.device_lane[:-1], rows.device_lane[1:] - 1
    middle = (rows.lane_top[first] + rows.lane_top[last] + LANE) / 2
    device[run.task_nodes] = views.tasks["device"]
    y[run.task_nodes] = middle[views.tasks["device"]]
    y[run.task_nodes[views.bars]] = rows.lane_top[rows.lane] + LANE / 2
    y[run.message_nodes[rows.message[::-1]]] = rows.message_top[::-1] + LINK / 2  # on the first of several devices
    # A message that takes no time stands with its sender: lines to its mark and back would be one line.
    free = np.flatnonzero((views.messages["end"] == views.messages["start"]) & (views.op == Op.P2P))
    device[run.message_nodes[free]] = views.messages["src"][free]
    y[run.message_nodes[free]] = middle[views.messages["src"][free]]
    return device, y

"""Parts of a gantt picture: bars of tasks and messages, idle time, marks of updates, and names.

Every function draws many at once; x is time, y is inches downwards.
"""

from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection

from cdpsim.draw.canvas import GREY, INK
from cdpsim.draw.gantt.blocks import Blocks
from cdpsim.draw.gantt.rows import LANE, LINK, Rows
from cdpsim.draw.palette import ink_on
from cdpsim.draw.views import KIND_WORDS, Views
from cdpsim.numeric.columns import Columns, Floats, Ints
from cdpsim.program import Content
from cdpsim.trace.metrics.waiting import IdleReason

HATCHED = {"B": (0.7, 1.0), "W": (0.0, 0.3)}  # the hatched part of a bar's height, where colours are not of kinds
MARKS = dict(zip(Content, "^vXoPsD", strict=True))
# Messages are grey: colours are of tasks.
MESSAGE_GREYS = dict(
    zip(Content, ("#4d4d4d", "#a3a3a3", "#5a5a5a", "#6b6b6b", "#b3b3b3", "#c4c4c4", "#868686"), strict=True)
)
IDLE = {
    IdleReason.MESSAGE: ("waiting for a message", "xxxx"),
    IdleReason.STREAM: ("waiting for a stream", "-----"),
    IdleReason.DEPENDENCY: ("waiting for a dependency", ""),
    IdleReason.NOTHING: ("nothing to do", ""),
}
BUBBLE, IDLE_INK, NOTHING_FILL = "#d4d4d4", "#9a9a9a", "#efefef"
NAME_SIZES = (5.5, 6.0, 6.5, 7.0, 7.5, 8.0)  # of names in bars
SLASH = 4.5  # points: its width
STRIP = 0.04  # inches: along the top of what reads an estimate
PAPER = "#ffffff"
LEAST_SEEN = 0.8  # points: the width of the narrowest message


class Drawing(NamedTuple):
    """Axes, the points of a unit of time on them, the fineness of lines, and what begins all ids."""

    axes: Axes
    scale: float
    fine: float = 1.0  # 1 unless tasks are narrow
    prefix: str = ""
    least: float = NAME_SIZES[0]  # points: names no smaller than these


def draw_bars(drawing: Drawing, views: Views, rows: Rows, blocks: Blocks) -> None:
    """Draw the blocks with their names, and a mark where updates take no time."""
    tasks, lane = blocks.tasks, rows.lane[blocks.chosen]
    top = rows.lane_top[lane]
    estimate = views.estimate[views.bars[blocks.chosen]]
    for kind in KIND_WORDS:
        chosen = (tasks["kind"] == kind) & ~((kind == "U") & estimate)
        columns = tasks["start"][chosen], tasks["end"][chosen], blocks.colours[chosen], tasks["stale"][chosen]
        _task_bars(drawing, kind, top[chosen], *columns, hatched=blocks.colour != "kind")
    _estimate_bars(drawing, tasks, top, estimate)
    _write_names(drawing, blocks, top)
    if views.has_rounds:
        _hand_overs(drawing, views, rows, blocks.until)
    free = np.setdiff1d(np.arange(len(views.kind)), views.bars)
    free = free[views.tasks["start"][free] <= blocks.until]
    places = np.stack([views.tasks[name][free] for name in ("device", "start")])
    (device, time), of = np.unique(places, axis=1, return_inverse=True)
    kept = np.bincount(of.ravel(), weights=~views.estimate[free], minlength=len(time)) > 0
    first, last = (rows.device_lane[device.astype(int) + k] - k for k in (0, 1))
    top, bottom = rows.lane_top[first], rows.lane_top[last] + LANE
    if views.has_rounds and len(rows.message):  # they are in the stream
        top, bottom = bottom + 0.03, bottom + LINK
    for chosen, makes_estimate in ((kept, False), (~kept, True)):
        _update_marks(drawing, time[chosen], top[chosen], bottom[chosen], makes_estimate=makes_estimate)


def draw_messages(drawing: Drawing, views: Views, rows: Rows, until: float) -> None:
    """Draw a bar for each message that starts before a time, with the mark of its content."""
    start, end = (views.messages[name][rows.message] for name in ("start", "end"))
    for content in Content:
        chosen = (views.content[rows.message] == content) & (start <= until)
        times = start[chosen], end[chosen]
        _message_bars(drawing, content, rows.message_top[chosen], *times)


def boxes(axes: Axes, left: Floats, right: Floats, top: Floats, bottom: Floats, gid: str, **style: Any) -> None:
    """Draw rectangles."""
    if len(left):
        corners = np.array([[left, left, right, right], [top, bottom, bottom, top]]).T
        with mpl.rc_context({"hatch.linewidth": 0.7}):
            axes.add_collection(PolyCollection(list(corners), gid=gid, **style), autolim=False)


def straight_lines(axes: Axes, x: tuple[Floats, Floats], y: tuple[Floats, Floats], gid: str, **style: Any) -> None:
    """Draw straight lines, from the first to the second of `x` and `y`."""
    if len(x[0]):
        axes.add_collection(LineCollection(list(np.array([x, y]).T), gid=gid, **style), autolim=False)


def marks(axes: Axes, mark: str, x: Floats, y: Floats, gid: str, **style: Any) -> None:
    """Draw marks, which may extend beyond the axes."""
    if len(x):
        axes.scatter(x, y, marker=mark, gid=gid, clip_on=False, **({"linewidths": 0, "zorder": 3} | style))


def idle_style(reason: IdleReason) -> dict[str, Any]:
    """Return the look of idle time: a grey bubble, with a texture where not another task is waited for."""
    pale = NOTHING_FILL if reason is IdleReason.NOTHING else BUBBLE
    return {"facecolor": pale, "edgecolor": IDLE_INK, "hatch": IDLE[reason][1], "linewidth": 0}


def idle_boxes(drawing: Drawing, reason: IdleReason, top: Floats, begin: Floats, end: Floats) -> None:
    """Draw idle time."""
    gid = f"{drawing.prefix}idle-{reason.name.lower()}"
    boxes(drawing.axes, begin, end, top + 0.01, top + LANE - 0.01, gid, zorder=0.8, **idle_style(reason))


def _task_bars(
    drawing: Drawing,
    kind: str,
    top: Floats,
    start: Floats,
    end: Floats,
    colours: np.ndarray,
    stale: Ints,
    *,
    hatched: bool,
) -> None:
    """Draw bars, those of backwards hatched at top or bottom if asked, those of stale tasks with a slash."""
    axes, name = drawing.axes, drawing.prefix + KIND_WORDS[kind].replace(" ", "-")
    gap = np.minimum(0.4 / drawing.scale, 0.04 * (end - start))  # so that bars side by side do not touch
    left, right, high, low = start + gap, end - gap, top + 0.01, top + LANE - 0.01
    boxes(axes, left, right, high, low, name, facecolor=colours, linewidth=0)
    inks = _inks_on(colours)
    for shade, ink in (("dark", "#000000"), ("light", "#ffffff")) if hatched and kind in HATCHED else ():
        alike = np.flatnonzero(inks == ink)
        above, below = (high[alike] + share * (LANE - 0.02) for share in HATCHED[kind])
        # Narrow bars have no room for a hatch: they are cut short there.
        style = {"facecolor": "none", "hatch": "////////"} if drawing.fine > 0.5 else {"facecolor": "#ffffff"}
        boxes(
            axes, left[alike], right[alike], above, below, f"{name}-hatch-{shade}", edgecolor=ink, linewidth=0, **style
        )
    old = np.flatnonzero(stale)
    foot = right[old] - np.minimum(SLASH / drawing.scale, 0.5 * (right - left)[old])
    straight_lines(
        axes, (foot, right[old]), (low[old], high[old]), f"{name}-stale", colors=inks[old], linewidths=drawing.fine
    )


def _inks_on(colours: np.ndarray) -> np.ndarray:
    """Return black or white for each colour, whichever can be read on it."""
    return np.array(list(map(ink_on, colours.tolist())))


def fitted_names(blocks: Blocks, room: Floats, least: float) -> tuple[list[str], float]:
    """Return the name of each block, "" where there is no room for it, and the size of all.

    It is stage, kind and micro-batch if nine in ten blocks have room for that, else the micro-batch's number if half of
    them have room for that, else nothing.
    """
    sizes = [size for size in NAME_SIZES if size >= least] or [least]
    named = ~blocks.later & (blocks.tasks["kind"] != "U")
    for names, share in ([(blocks.names, 0.9)] if blocks.full else []) + [(blocks.short_names, 0.5)]:
        needs = np.array([0.64 * len(name) + 0.35 * name.count("W") for name in names])  # of the size
        fits = [needs * size <= room for size in sizes]
        if named.any() and fits[0][named].mean() >= share:
            best = max(k for k, each in enumerate(fits) if each[named].mean() >= min(0.9, fits[0][named].mean()))
            return [name if each else "" for name, each in zip(names, fits[best], strict=True)], sizes[best]
    return [""] * len(room), least


def _write_names(drawing: Drawing, blocks: Blocks, top: Floats) -> None:
    tasks = blocks.tasks
    left, right = tasks["start"], tasks["end"] - SLASH / drawing.scale * tasks["stale"] * (tasks["kind"] != "U")
    words, size = fitted_names(blocks, blocks.room(drawing.scale), drawing.least)
    middle = {"F": 0.5, "U": 0.5} | ({"B": 0.36, "W": 0.66} if blocks.colour != "kind" else {})
    columns = (tasks[name].tolist() for name in ("kind", "step", "micro_batch", "stage"))
    inks = _inks_on(blocks.colours)
    for k, (kind, t, i, j) in enumerate(zip(*columns, strict=True)):
        if words[k]:
            y, gid = top[k] + middle.get(kind, 0.5) * LANE, f"{kind}-t{t}-{f'i{i}-' if i >= 0 else ''}j{j}"
            text = drawing.axes.text((left[k] + right[k]) / 2, y, words[k], fontsize=size, color=inks[k], ha="center")
            text.set(va="center_baseline", gid=drawing.prefix + gid, clip_on=True)


def _estimate_bars(drawing: Drawing, tasks: Columns, top: Floats, estimate: np.ndarray) -> None:
    """Draw a frame where a device makes an estimate, and a strip along the top of what reads one."""
    makes, reads = (np.flatnonzero(estimate & ((tasks["kind"] == "U") == made)) for made in (True, False))
    if len(makes):  # the updates of all stages that make one are one frame
        keys = np.stack([tasks[name][makes] for name in ("device", "step", "base")])
        _, first, of = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        begin, end = np.full(len(first), np.inf), np.zeros(len(first))
        np.minimum.at(begin, of.ravel(), tasks["start"][makes])
        np.maximum.at(end, of.ravel(), tasks["end"][makes])
        line = np.clip(0.25 * (end - begin) * drawing.scale, 0.3, 1.0)  # points
        gap, high = line / 2 / drawing.scale, top[makes[first]] + 0.015
        gid, style = f"{drawing.prefix}estimate", {"facecolor": PAPER, "edgecolor": INK, "linewidth": line}
        boxes(drawing.axes, begin + gap, np.maximum(end - gap, begin + gap), high, high + LANE - 0.03, gid, **style)
    high, gid = top[reads] + 0.01, f"{drawing.prefix}reads-estimate"
    columns = tasks["start"][reads], tasks["end"][reads], high, high + STRIP
    boxes(drawing.axes, *columns, gid, facecolor=INK, linewidth=0)


def _hand_overs(drawing: Drawing, views: Views, rows: Rows, until: float) -> None:
    """Draw a dotted line where a device hands over what it has and goes on."""
    rounds: Any = views.trace.rounds
    chosen = (rounds["ended"] >= 0) & (rounds["posted"] <= until)
    device, time = rounds["device"][chosen], rounds["posted"][chosen]
    first, last = rows.device_lane[device], rows.device_lane[device + 1] - 1
    top, bottom = rows.lane_top[first], rows.lane_top[last] + LANE
    bottom += LINK * ((first == last) & (len(rows.message) > 0))
    style: dict[str, Any] = {
        "colors": INK,
        "linewidths": 0.8 * drawing.fine,
        "linestyles": (0, (1.5, 1.5)),
        "zorder": 2,
    }
    straight_lines(drawing.axes, (time, time), (top, bottom), f"{drawing.prefix}hands-over", **style)


def _update_marks(drawing: Drawing, time: Floats, top: Floats, bottom: Floats, *, makes_estimate: bool) -> None:
    """Draw an upright line and a mark on it where a device updates."""
    style: dict[str, Any] = {"colors": INK, "linewidths": drawing.fine, "clip_on": False}
    gid = f"{drawing.prefix}{'estimate' if makes_estimate else 'update'}"
    straight_lines(drawing.axes, (time, time), (top - 0.02, bottom), f"{gid}-free", **style)
    look: dict[str, Any] = {"color": INK}
    if makes_estimate:
        look = {"facecolor": PAPER, "edgecolor": INK, "linewidths": 0.6 * drawing.fine}
    marks(drawing.axes, "v", time, top - 0.02, f"{gid}-mark", s=9 * drawing.fine**2, **look)


def _message_bars(drawing: Drawing, content: Content, top: Floats, start: Floats, end: Floats) -> None:
    """Draw bars with the mark of their content; a message that takes no time is a mark alone.

    No bar is narrower than can be seen.
    """
    axes, colour, mark = drawing.axes, MESSAGE_GREYS[content], MARKS[content]
    gid = f"{drawing.prefix}message-{content.name.lower()}"
    long = end > start
    high, low, middle = top + 0.01, top + LINK - 0.01, top + LINK / 2
    seen = np.maximum(end, start + LEAST_SEEN / drawing.scale)
    boxes(axes, start[long], seen[long], high[long], low[long], gid, facecolor=colour, linewidth=0)
    wide = (end - start) * drawing.scale > 5
    marks(axes, mark, (start + end)[wide] / 2, middle[wide], f"{gid}-mark", color=ink_on(colour), s=12)
    style = {"facecolor": colour, "edgecolor": GREY, "linewidths": 0.4 * drawing.fine, "s": 16 * drawing.fine**2}
    marks(axes, mark, start[~long], middle[~long], f"{gid}-free", **style)

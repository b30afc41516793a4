"""Parts of a gantt picture: bars of tasks and messages, textures of idle time, marks, names, and the legend to them.

Every function draws many at once; x is time, y is inches downwards.
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection

from cdpsim.draw.canvas import GREY, INK
from cdpsim.draw.gantt.rows import LANE, LINK
from cdpsim.draw.palette import COLOURS, CONTENT_COLOURS, ink_on
from cdpsim.draw.views import KIND_WORDS, Views, word_of
from cdpsim.numeric.columns import Columns, Floats, Ints
from cdpsim.program import Content, Kind
from cdpsim.trace.metrics.waiting import IdleReason

HATCHED = {"B": (0.7, 1.0), "W": (0.0, 0.3)}  # the hatched part of a bar's height
NAMED_AT = {"F": 0.5, "B": 0.36, "W": 0.66, "U": 0.5}
MARKS = dict(zip(Content, "^vosD", strict=True))
IDLE = {
    IdleReason.MESSAGE: ("waiting for a message", "....."),
    IdleReason.STREAM: ("waiting for a stream", "-----"),
    IdleReason.DEPENDENCY: ("waiting for a dependency", "\\\\\\\\\\"),
    IdleReason.NOTHING: ("nothing to do", ""),
}
NAME_SIZES = (5.5, 6.0, 6.5, 7.0, 7.5)  # of names in bars
SLASH = 4.5  # points: its width
LEGEND_ROWS = 5  # entries below each other
NEUTRAL = "#c8c8c8"


class Drawing(NamedTuple):
    """Axes, the points of a unit of time on them, and the fineness of lines: 1 unless tasks are narrow."""

    axes: Axes
    scale: float
    fine: float = 1.0


LegendEntry = tuple[Callable[[Drawing, Floats, Floats], None], str]  # draws itself at x and y; its meaning


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


def idle_boxes(axes: Axes, reason: IdleReason, top: Floats, begin: Floats, end: Floats, height: float = LANE) -> None:
    """Draw idle time in the texture of its reason."""
    pale = "#f1f1f1" if reason is IdleReason.NOTHING else "#ffffff"
    style: dict[str, Any] = {"facecolor": pale, "edgecolor": "#b8b8b8", "hatch": IDLE[reason][1], "linewidth": 0}
    boxes(axes, begin, end, top + 0.02, top + height - 0.02, f"idle-{reason.name.lower()}", zorder=0.8, **style)


def task_bars(
    drawing: Drawing,
    kind: str,
    top: Floats,
    start: Floats,
    end: Floats,
    colours: np.ndarray,
    stale: Ints,
    height: float = LANE,
) -> None:
    """Draw bars, those of backwards hatched at top or bottom, those of stale tasks with a slash."""
    axes, name = drawing.axes, KIND_WORDS[kind].replace(" ", "-")
    gap = np.minimum(0.5 / drawing.scale, 0.04 * (end - start))  # so that bars side by side do not touch
    left, right, high, low = start + gap, end - gap, top + 0.01, top + height - 0.01
    boxes(axes, left, right, high, low, name, facecolor=colours, linewidth=0)
    inks = inks_on(colours)
    for shade, ink in (("dark", "#000000"), ("light", "#ffffff")):
        alike = np.flatnonzero(inks == ink)
        if kind in HATCHED:
            above, below = (high[alike] + share * (height - 0.02) for share in HATCHED[kind])
            # Narrow bars have no room for a hatch: they are cut short there.
            style = {"facecolor": "none", "hatch": "////////"} if drawing.fine > 0.5 else {"facecolor": "#ffffff"}
            gid = f"{name}-hatch-{shade}"
            boxes(axes, left[alike], right[alike], above, below, gid, edgecolor=ink, linewidth=0, **style)
    old = np.flatnonzero(stale)
    foot = right[old] - np.minimum(SLASH / drawing.scale, 0.5 * (right - left)[old])
    slash = (foot, right[old]), (low[old], high[old])
    straight_lines(axes, *slash, f"{name}-stale", colors=inks[old], linewidths=drawing.fine)


def inks_on(colours: np.ndarray) -> np.ndarray:
    """Return black or white for each colour, whichever can be read on it."""
    return np.array(list(map(ink_on, colours.tolist())))


def write_names(drawing: Drawing, tasks: Columns, top: Floats, inks: np.ndarray) -> None:
    """Write `F1.0` into the bars that have room for it, all in the largest size for which nine in ten have room."""
    columns = [tasks[name].tolist() for name in ("kind", "step", "micro_batch", "stage")]
    words = [f"{kind}{f'{i}.' if i >= 0 else ''}{j}" for kind, _, i, j in zip(*columns, strict=True)]
    gids = [f"{kind}-t{t}-{f'i{i}-' if i >= 0 else ''}j{j}" for kind, t, i, j in zip(*columns, strict=True)]
    left, right = tasks["start"], tasks["end"] - SLASH / drawing.scale * tasks["stale"]
    room = (right - left) * drawing.scale - 1.5
    needs = np.array([0.6 * len(word) - 0.1 for word in words])
    size = max((size for size in NAME_SIZES if (needs * size <= room).sum() >= 0.9 * len(words)), default=NAME_SIZES[0])
    for k in np.flatnonzero(needs * size <= room).tolist():
        y = top[k] + NAMED_AT[words[k][0]] * LANE
        text = drawing.axes.text((left[k] + right[k]) / 2, y, words[k], fontsize=size, color=inks[k], ha="center")
        text.set(va="center_baseline", gid=gids[k])


def update_marks(drawing: Drawing, time: Floats, top: Floats, bottom: Floats) -> None:
    """Draw an upright line and a mark on it where a device updates."""
    style: dict[str, Any] = {"colors": INK, "linewidths": drawing.fine, "clip_on": False}
    straight_lines(drawing.axes, (time, time), (top - 0.03, bottom), "update-free", **style)
    marks(drawing.axes, "v", time, top - 0.035, "update-mark", color=INK, s=13 * drawing.fine**2)


def message_bars(drawing: Drawing, content: Content, top: Floats, start: Floats, end: Floats) -> None:
    """Draw bars with the mark of their content; a message that takes no time is a mark alone."""
    axes, colour, mark, gid = drawing.axes, CONTENT_COLOURS[content], MARKS[content], f"message-{content.name.lower()}"
    long = end > start
    high, low, middle = top + 0.01, top + LINK - 0.01, top + LINK / 2
    style: dict[str, Any] = {"facecolor": colour, "edgecolor": "#ffffff", "linewidth": 0.4}
    boxes(axes, start[long], end[long], high[long], low[long], gid, **style)
    wide = (end - start) * drawing.scale > 5
    marks(axes, mark, (start + end)[wide] / 2, middle[wide], f"{gid}-mark", color=ink_on(colour), s=12)
    style = {"facecolor": colour, "edgecolor": INK, "linewidths": 0.4 * drawing.fine, "s": 20 * drawing.fine**2}
    marks(axes, mark, start[~long], middle[~long], f"{gid}-free", **style)


def legend_entries(views: Views, reasons: Ints, dependencies: bool) -> dict[str, list[LegendEntry]]:
    """Return the entries of each group, by its heading."""
    tasks, several, number = views.tasks, len(COLOURS), int(views.tasks["micro_batch"].max()) + 1
    kinds: list[LegendEntry] = [
        (partial(_bar, kind, NEUTRAL, 0), word)
        for kind, word in KIND_WORDS.items()
        if kind != "U" and kind in tasks["kind"]
    ]
    kinds += [(partial(_bar, "F", NEUTRAL, 1), "not the newest version")] if tasks["stale"].any() else []
    takes_time = (tasks["end"] > tasks["start"])[views.kind == Kind.U]
    kinds += [(partial(_bar, "U", INK, 0), "update")] if takes_time.any() else []
    free = "update that takes no time" if takes_time.any() else "update"
    kinds += [(_update, free)] if not takes_time.all() else []
    takes_time = views.messages["end"] > views.messages["start"]
    contents: list[LegendEntry] = [
        (partial(_message, content, bool(takes_time[views.content == content].any())), word_of(content))
        for content in Content
        if content in views.content
    ]
    waits: list[LegendEntry] = [
        (partial(_dependency_line, 1.2), "idle until its end"),
        (partial(_dependency_line, 0.4), "needed"),
    ]
    return {
        "micro-batch": [
            (partial(_bar, "F", COLOURS[i], 0), f"{i}, {i + several}, …" if i + several < number else str(i))
            for i in range(min(number, several))
        ],
        "task": kinds,
        "message": contents,
        "idle" if views.run else "device": [
            (partial(_idle, reason), IDLE[reason][0] if views.run else "idle")
            for reason in IdleReason
            if reason in reasons
        ],
        "dependency": waits if dependencies else [],
    }


def _bar(kind: str, colour: str, stale: int, drawing: Drawing, left: Floats, top: Floats) -> None:
    task_bars(drawing, kind, top, left, left + 0.24, np.array([colour]), np.array([stale]), 0.16)


def _update(drawing: Drawing, left: Floats, top: Floats) -> None:
    update_marks(drawing, left + 0.12, top + 0.04, top + 0.16)


def _message(content: Content, takes_time: bool, drawing: Drawing, left: Floats, top: Floats) -> None:
    message_bars(drawing, content, top, *((left, left + 0.24) if takes_time else (left + 0.12, left + 0.12)))


def _idle(reason: IdleReason, drawing: Drawing, left: Floats, top: Floats) -> None:
    idle_boxes(drawing.axes, reason, top - 0.01, left, left + 0.24, 0.18)


def _dependency_line(width: float, drawing: Drawing, left: Floats, top: Floats) -> None:
    style = {"colors": INK, "alpha": 0.6, "linewidths": width}
    straight_lines(drawing.axes, (left, left + 0.24), (top + 0.08, top + 0.08), "line", **style)


def draw_legend(drawing: Drawing, x: float, groups: dict[str, list[LegendEntry]]) -> None:
    """Draw groups of entries side by side from `x` on."""
    for heading, entries in groups.items():
        if entries:
            drawing.axes.text(x, 0.08, heading, fontsize=8, color=GREY, va="center")
        for k, (draw, words) in enumerate(entries):
            left, top = x + _column_width(entries) * (k // LEGEND_ROWS), 0.2 + 0.19 * (k % LEGEND_ROWS)
            draw(drawing, np.array([left]), np.array([top]))
            drawing.axes.text(left + 0.32, top + 0.08, words, fontsize=8, color=INK, va="center")
        x += group_width(heading, entries)
    for collection in drawing.axes.collections:
        collection.set_gid(None)  # ids name only marks of the picture itself


def legend_height(groups: dict[str, list[LegendEntry]]) -> float:
    """Return the inches that the legend takes."""
    return 0.3 + 0.19 * min(max(map(len, groups.values())), LEGEND_ROWS)


def group_width(heading: str, entries: list[LegendEntry]) -> float:
    """Return the inches that a group takes beside others."""
    if not entries:
        return 0.0
    return max(_column_width(entries) * ceil(len(entries) / LEGEND_ROWS), 0.06 * len(heading)) + 0.15


def _column_width(entries: list[LegendEntry]) -> float:
    return 0.42 + 0.058 * max(len(words) for _, words in entries)

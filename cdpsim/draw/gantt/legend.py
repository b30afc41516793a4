"""The legend of a gantt picture: the meaning of its colours, textures and marks, of those that are in it."""

from collections.abc import Callable
from functools import partial
from math import ceil

import numpy as np

from cdpsim.draw.canvas import GREY, INK
from cdpsim.draw.gantt import bars
from cdpsim.draw.gantt.bars import IDLE, Drawing
from cdpsim.draw.palette import COLOURS
from cdpsim.draw.views import KIND_WORDS, Views, word_of
from cdpsim.numeric.columns import Floats, Ints
from cdpsim.program import Content, Kind
from cdpsim.trace.metrics.waiting import IdleReason

LegendEntry = tuple[Callable[[Drawing, Floats, Floats], None], str]  # draws itself at x and y; its meaning

LEGEND_ROWS = 5  # entries below each other
NEUTRAL = "#c8c8c8"


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
    bars.task_bars(drawing, kind, top, left, left + 0.24, np.array([colour]), np.array([stale]), 0.16)


def _update(drawing: Drawing, left: Floats, top: Floats) -> None:
    bars.update_marks(drawing, left + 0.12, top + 0.04, top + 0.16)


def _message(content: Content, takes_time: bool, drawing: Drawing, left: Floats, top: Floats) -> None:
    bars.message_bars(drawing, content, top, *((left, left + 0.24) if takes_time else (left + 0.12, left + 0.12)))


def _idle(reason: IdleReason, drawing: Drawing, left: Floats, top: Floats) -> None:
    bars.idle_boxes(drawing.axes, reason, top - 0.01, left, left + 0.24, 0.18)


def _dependency_line(width: float, drawing: Drawing, left: Floats, top: Floats) -> None:
    style = {"colors": INK, "alpha": 0.6, "linewidths": width}
    bars.straight_lines(drawing.axes, (left, left + 0.24), (top + 0.08, top + 0.08), "line", **style)


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

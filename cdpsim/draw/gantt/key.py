"""The key of a gantt picture: what its colours, marks, textures and names mean."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from cdpsim.draw.canvas import GREY, INK
from cdpsim.draw.gantt.bars import IDLE, MARKS, MESSAGE_GREYS, PAPER, idle_style
from cdpsim.draw.gantt.blocks import Panel
from cdpsim.draw.palette import COLOURS, KIND_COLOURS, ink_on, tint
from cdpsim.draw.sheet import KeyEntry, corners_of, draw_lines, fill_polygon, write_words
from cdpsim.draw.views import KIND_WORDS, word_of
from cdpsim.program import Content, Kind
from cdpsim.trace.metrics.waiting import IdleReason

_HALF, _HIGH = 6.0, 3.6  # points: half a swatch
_INPUTS = "backward of inputs"  # of a backward that is split
_NEUTRAL = "#c8c8c8"


def key_entries(panels: Sequence[Panel], reasons: set[int], example: str, *, dependencies: bool) -> list[KeyEntry]:
    """Return the entries of all that is there; `example` is a name of a block, "1F3" or "3", or "" if none has one."""
    blocks = panels[0].blocks
    colour = blocks.colour
    kinds = [set(panel.blocks.tasks["kind"].tolist()) for panel in panels]
    entries = _kind_entries(
        set().union(*kinds), colour, split=all("W" in each for each in kinds), full=example == "1F3"
    )
    if any(panel.blocks.tints for panel in panels):
        entries.append(KeyEntry(_tints, 2 * _HALF, "a device's first and last stage"))
    if colour != "kind":
        entries += _shade_entries(panels, colour)
    entries += _name_entries(panels, example)
    if any(panel.blocks.tasks["stale"].any() for panel in panels):
        entries.append(KeyEntry(partial(_swatch, _NEUTRAL, stale=True), 2 * _HALF, "reads an older version"))
    entries += _update_entries(panels)
    entries += _idle_entries(reasons, known=any(panel.views.run for panel in panels))
    sent = {content for panel in panels for content in panel.views.content[panel.rows.message].tolist()}
    takes_time = any((panel.views.messages["end"] > panel.views.messages["start"]).any() for panel in panels)
    for content in (content for content in Content if content in sent):
        entries.append(KeyEntry(partial(_message, content, takes_time), 2 * _HALF, word_of(content)))
    waits = {"idle until its end": 1.2, "needed": 0.4} if dependencies else {}
    return entries + [KeyEntry(partial(_wait_line, width), 12, words) for words, width in waits.items()]


def _update_entries(panels: Sequence[Panel]) -> list[KeyEntry]:
    """Return what updates that take no time look like, what is of estimates, and when devices hand over."""
    free, made, read, rounds = False, False, False, False
    for views in (panel.views for panel in panels):
        is_free = np.ones(len(views.kind), dtype=bool)
        is_free[views.bars] = False
        free = free or bool((is_free & ~views.estimate).any())
        made = made or bool(((views.kind == Kind.U) & views.estimate).any())
        read = read or bool(((views.kind != Kind.U) & views.estimate).any())
        rounds = rounds or views.has_rounds
    entries = [KeyEntry(_update, 4, "update")] * free
    if made:
        bars = any((panel.views.estimate & (panel.views.kind == Kind.U))[panel.views.bars].any() for panel in panels)
        entries.append(
            KeyEntry(_estimate_bar, 2 * _HALF, "makes an estimate")
            if bars
            else KeyEntry(partial(_update, fill=PAPER), 4, "makes an estimate")
        )
    entries += [KeyEntry(_strip, 2 * _HALF, "reads an estimate")] * read
    return entries + [KeyEntry(_hand_over_line, 4, "hands over, goes on")] * rounds


def _kind_entries(kinds: set[str], colour: str, *, split: bool, full: bool) -> list[KeyEntry]:
    entries = []
    for kind in (kind for kind in KIND_WORDS if kind in kinds):
        words = _INPUTS if kind == "B" and split else KIND_WORDS[kind]
        fill = INK if kind == "U" else KIND_COLOURS[Kind[kind]] if colour == "kind" else _NEUTRAL
        letter = kind if full else ""
        draw = partial(_swatch, fill, letter=letter, kind=kind if colour != "kind" else "")
        entries.append(KeyEntry(draw, 2 * _HALF, words))
    return entries


def _idle_entries(reasons: set[int], *, known: bool) -> list[KeyEntry]:
    """Return an entry for each reason to be idle, if reasons are known."""
    entries: list[KeyEntry] = []
    for reason in (reason for reason in IdleReason if reason in reasons):
        words = ["bubble"] * (not entries) + [IDLE[reason][0]] * known
        entries.append(KeyEntry(partial(_idle, reason), 2 * _HALF, ": ".join(words)))
    return entries


def _shade_entries(panels: Sequence[Panel], colour: str) -> list[KeyEntry]:
    """Return an entry for each colour, with the first two numbers that have it."""
    numbers: set[int] = set()
    for panel in panels:
        blocks = panel.blocks
        column = blocks.number if colour == "micro-batch" else blocks.tasks["stage"]
        numbers |= {int(number) for number in column[blocks.tasks["kind"] != "U"].tolist()}
    entries: list[KeyEntry] = []
    for shade, fill in enumerate(COLOURS):
        sharing = [str(number) for number in sorted(numbers) if number % len(COLOURS) == shade]
        words = ", ".join(sharing[:2]) + (", …" if len(sharing) > 2 else "")
        if words:
            entries.append(KeyEntry(partial(_swatch, fill), 2 * _HALF, words if entries else f"{colour} {words}"))
    return entries


def _name_entries(panels: Sequence[Panel], example: str) -> list[KeyEntry]:
    """Return what the words in blocks mean."""
    through = ", counted through the steps" if any(panel.blocks.counted for panel in panels) else ""
    meanings = {"1F3": "stage 1, forward, micro-batch 3", "3": "micro-batch 3", "": ""}
    names = [KeyEntry(partial(_example, example), 5 * len(example) - 1, meanings[example] + through)] * bool(example)
    later = any(panel.blocks.later.any() for panel in panels)
    thrown_away = all(panel.views.has_rounds for panel in panels)
    words = "next step, or in no update" if thrown_away else "next step"
    return names + [KeyEntry(partial(_swatch, tint(_NEUTRAL, 0.6)), 2 * _HALF, words)] * later


def _box(x: float, y: float) -> list[tuple[float, float]]:
    return corners_of((x - _HALF, x + _HALF, y - _HIGH, y + _HIGH))


def _swatch(
    fill: str, axes: Axes, x: float, y: float, *, letter: str = "", kind: str = "", stale: bool = False
) -> None:
    fill_polygon(axes, _box(x, y), fill)
    texture: dict[str, Any] = {"edgecolor": INK, "hatch": "////////", "linewidth": 0, "zorder": 2}
    if kind in ("B", "W"):
        low, high = (y - _HIGH, y - 0.4 * _HIGH) if kind == "B" else (y + 0.4 * _HIGH, y + _HIGH)
        fill_polygon(axes, corners_of((x - _HALF, x + _HALF, low, high)), "none", **texture)
    if letter:
        write_words(axes, x, y, letter, 6, ha="center", color=ink_on(fill))
    if stale:
        draw_lines(axes, [(x + _HALF - 4, y - _HIGH), (x + _HALF, y + _HIGH)], lw=0.9, zorder=3)


def _tints(axes: Axes, x: float, y: float) -> None:
    first = KIND_COLOURS[Kind.F]
    fill_polygon(axes, corners_of((x - _HALF, x, y - _HIGH, y + _HIGH)), first)
    fill_polygon(axes, corners_of((x, x + _HALF, y - _HIGH, y + _HIGH)), tint(first, 0.6))


def _example(words: str, axes: Axes, x: float, y: float) -> None:
    write_words(axes, x, y, words, 7, ha="center", weight="bold")


def _update(axes: Axes, x: float, y: float, *, fill: str = INK) -> None:
    draw_lines(axes, [(x, y - _HIGH), (x, y + _HIGH)], lw=1.0)
    axes.scatter([x], [y + _HIGH], marker="v", s=9, facecolor=fill, edgecolor=INK, linewidths=0.6 * (fill != INK))


def _estimate_bar(axes: Axes, x: float, y: float) -> None:
    fill_polygon(axes, _box(x, y), PAPER, edgecolor=INK, linewidth=1.0)


def _strip(axes: Axes, x: float, y: float) -> None:
    fill_polygon(axes, _box(x, y), _NEUTRAL)
    fill_polygon(axes, corners_of((x - _HALF, x + _HALF, y + 0.6 * _HIGH, y + _HIGH)), INK)


def _hand_over_line(axes: Axes, x: float, y: float) -> None:
    draw_lines(axes, [(x, y - _HIGH), (x, y + _HIGH)], lw=0.8, linestyle=(0, (1.5, 1.5)))


def _idle(reason: IdleReason, axes: Axes, x: float, y: float) -> None:
    fill_polygon(axes, _box(x, y), str(idle_style(reason)["facecolor"]), **_texture(reason))


def _texture(reason: IdleReason) -> dict[str, Any]:
    return {name: value for name, value in idle_style(reason).items() if name != "facecolor"}


def _message(content: Content, takes_time: bool, axes: Axes, x: float, y: float) -> None:
    fill = MESSAGE_GREYS[content]
    if not takes_time:
        axes.scatter([x], [y], marker=MARKS[content], s=16, facecolor=fill, edgecolor=GREY, linewidths=0.4)
        return
    fill_polygon(axes, _box(x, y), fill)
    axes.scatter([x], [y], marker=MARKS[content], s=12, color=ink_on(fill), linewidths=0)


def _wait_line(width: float, axes: Axes, x: float, y: float) -> None:
    draw_lines(axes, [(x - _HALF, y), (x + _HALF, y)], lw=width)

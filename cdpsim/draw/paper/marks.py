"""The marks of the paper's Fig. 1: block arrows, slashes, double bars, and the entries of its key."""

from matplotlib.axes import Axes

from cdpsim.draw import palette
from cdpsim.draw.canvas import GREY, INK, PALE
from cdpsim.draw.sheet import Box, KeyEntry, SheetPoint, corners_of, draw_arc, draw_lines, fill_polygon, write_words
from cdpsim.draw.views import KIND_WORDS

_WIDE = 6.0  # points: wider marks have room for the white edge of a slash
_DIGIT = 3.9  # points: the width of a digit at the smallest size


def draw_task(axes: Axes, kind: str, micro_batch: int, box: Box, *, stale: bool, digits: int, name: str) -> None:
    """Draw a task's block arrow, struck through if stale; with its number, from 1, where so many digits fit."""
    left, right, lower, upper = box
    gap = min(0.4, 0.1 * (right - left))
    box = (left + gap, right - gap, lower + 0.3, upper - 0.3)
    fill = palette.colour(micro_batch)
    fill_polygon(axes, block_arrow(kind, box), fill, name=name)
    if stale:
        slash(axes, box, f"{name}-slash")
    if right - left >= _DIGIT * digits + 1:
        _write_number(axes, kind, str(micro_batch + 1), box, fill, clear=stale)


def block_arrow(kind: str, box: Box) -> list[SheetPoint]:
    """Return the outline of a task's mark: a forward points up, a backward down; a backward of weights is a chevron."""
    left, right, lower, upper = box
    middle, tip = (left + right) / 2, min(0.36 * (upper - lower), 0.7 * (right - left))
    if kind == "F":
        return [(left, lower), (right, lower), (right, upper - tip), (middle, upper), (left, upper - tip)]
    down = [(left, lower + tip), (middle, lower), (right, lower + tip), (right, upper)]
    return [*down, (middle, upper - tip / 2), (left, upper)] if kind == "W" else [*down, (left, upper)]


def _write_number(axes: Axes, kind: str, digits: str, box: Box, fill: str, *, clear: bool) -> None:
    """Write a number into a mark; if a slash goes through it, with room around it."""
    left, right, lower, upper = box
    x = (left + right) / 2
    y = (lower + upper) / 2 + {"F": -0.1, "B": 0.1, "W": -0.05}.get(kind, 0.0) * (upper - lower)
    if clear:
        half = _DIGIT / 2 * len(digits) + 0.25
        fill_polygon(axes, corners_of((x - half, x + half, y - 2.4, y + 2.7)), fill, zorder=3)
    write_words(axes, x, y, digits, 6, ha="center", color=palette.ink_on(fill), zorder=4)


def slash(axes: Axes, box: Box, name: str = "") -> None:
    """Strike a mark through."""
    left, right, lower, upper = box
    wide = right - left > _WIDE
    beyond = 1.3 if wide else 0.4
    ends = [(left - beyond, lower - 1.3), (right + beyond, upper + 1.3)]
    if wide:
        draw_lines(axes, ends, edgecolor="white", lw=2.0, zorder=3)
    draw_lines(axes, ends, name=name, lw=0.9 if wide else 0.6, zorder=3)


def double_bar(axes: Axes, x: float, lower: float, upper: float, name: str = "") -> None:
    """Draw two bars side by side."""
    draw_lines(axes, *([(x + side, lower), (x + side, upper)] for side in (-0.85, 0.85)), name=name, lw=0.7, zorder=4)


def micro_batch_entry(shade: int, meaning: str) -> KeyEntry:
    """Return the entry of a colour, by which micro-batches have it."""

    def draw(axes: Axes, x: float, y: float) -> None:
        fill_polygon(axes, corners_of((x - 3, x + 3, y - 3, y + 3)), palette.colour(shade))

    return KeyEntry(draw, 6, meaning)


def kind_entry(kind: str) -> KeyEntry:
    """Return the entry of a kind's mark."""

    def draw(axes: Axes, x: float, y: float) -> None:
        fill_polygon(axes, block_arrow(kind, (x - 3.5, x + 3.5, y - 4, y + 4)), "white", edgecolor=INK, lw=0.6)

    return KeyEntry(draw, 7, KIND_WORDS[kind])


def stale_entry() -> KeyEntry:
    """Return the entry of a slash."""

    def draw(axes: Axes, x: float, y: float) -> None:
        box = (x - 3.5, x + 3.5, y - 4, y + 4)
        fill_polygon(axes, block_arrow("F", box), PALE)
        slash(axes, box)

    return KeyEntry(draw, 8, "reads an older version")


def synchronisation_entry() -> KeyEntry:
    """Return the entry of a double bar."""
    return KeyEntry(lambda axes, x, y: double_bar(axes, x, y - 4, y + 4), 3, "synchronisation")


def message_entry() -> KeyEntry:
    """Return the entry of an arrow."""

    def draw(axes: Axes, x: float, y: float) -> None:
        draw_arc(axes, (x - 7, y - 2), (x, y + 5), (x + 7, y - 2), 2.4, edgecolor=GREY, lw=0.6)

    return KeyEntry(draw, 16, "message")

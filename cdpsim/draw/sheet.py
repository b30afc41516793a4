"""A sheet of paper measured in points, from its lower left corner; marks drawn on it, and a key to them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch, PathPatch, Polygon
from matplotlib.path import Path
from matplotlib.textpath import text_to_path

from cdpsim.draw.canvas import INK

SheetPoint: TypeAlias = tuple[float, float]
Box: TypeAlias = tuple[float, float, float, float]  # left, right, lower, upper
SMALL = 6.5  # points: the size of letters in a column of a paper
_ENTRY_GAP = 9.0
_MARK_GAP = 3.5


class KeyEntry(NamedTuple):
    """One mark of a key: a function that draws it around a point, its width, and its meaning."""

    draw: Callable[[Axes, float, float], object]
    width: float
    meaning: str


def new_sheet(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of that size in points, and axes on it whose unit is the point."""
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def put_patch(axes: Axes, patch: Patch, name: str = "") -> None:
    """Put a patch on the sheet, unclipped; `name` is its id in an SVG."""
    patch.set_clip_on(False)
    if name:
        patch.set_gid(name)
    axes.add_artist(patch)


def fill_polygon(axes: Axes, corners: Sequence[SheetPoint], fill: str, *, name: str = "", **style: Any) -> None:
    """Fill a polygon."""
    put_patch(axes, Polygon(corners, facecolor=fill, **({"edgecolor": "none"} | style)), name)


def corners_of(box: Box) -> list[SheetPoint]:
    """Return the corners of a box."""
    left, right, lower, upper = box
    return [(left, lower), (right, lower), (right, upper), (left, upper)]


def draw_lines(axes: Axes, *lines: Sequence[SheetPoint], name: str = "", **style: Any) -> None:
    """Draw open lines as one mark."""
    codes = [code for points in lines for code in "M" + "L" * (len(points) - 1)]
    _draw_path(axes, [point for points in lines for point in points], codes, name, **({"capstyle": "butt"} | style))


def draw_arc(
    axes: Axes, start: SheetPoint, bend: SheetPoint, end: SheetPoint, head: float, *, name: str = "", **style: Any
) -> None:
    """Draw a curve from a point to another, bent towards a third, with an open arrow head at its end."""
    along, across = end[0] - bend[0], end[1] - bend[1]
    length = max((along**2 + across**2) ** 0.5, 1e-9)
    along, across = along / length * head, across / length * head
    wings = [(end[0] - along - side * across / 2, end[1] - across + side * along / 2) for side in (1, -1)]
    _draw_path(axes, [start, bend, end, wings[0], end, wings[1]], "MCCMLL", name, **({"joinstyle": "miter"} | style))


def _draw_path(axes: Axes, points: Sequence[SheetPoint], codes: Iterable[str], name: str, **style: Any) -> None:
    """Draw a path: M moves to its point, L draws a line to it, and CC a curve."""
    kinds = {"M": Path.MOVETO, "L": Path.LINETO, "C": Path.CURVE3}
    path = Path(points, [kinds[code] for code in codes])
    put_patch(axes, PathPatch(path, fill=False, **({"edgecolor": INK} | style)), name)


def write_words(axes: Axes, x: float, y: float, words: str, size: float = SMALL, **style: Any) -> None:
    """Write words, by default with their left end on a point and their middle at its height."""
    look: dict[str, Any] = {"fontsize": size, "color": INK, "ha": "left", "va": "center_baseline"} | style
    axes.text(x, y, words, **look)


def width_of(words: str, size: float = SMALL) -> float:
    """Return the width of words in points."""
    return float(text_to_path.get_text_width_height_descent(words, FontProperties(size=size), ismath=False)[0])


def fitted(words: str, width: float, size: float = SMALL) -> str:
    """Return words that `canvas.label` made, cut where they would be wider than `width`."""
    if width_of(words, size) <= width:
        return words
    while words and width_of(words + "…", size) > width:
        words = words[:-1].rstrip("\\")
    return words + "…"


def key_rows(entries: Iterable[KeyEntry], width: float) -> list[list[tuple[float, KeyEntry]]]:
    """Return a key's entries in rows that are no wider than `width`: where each begins, and the entry."""
    rows: list[list[tuple[float, KeyEntry]]] = []
    at = width
    for entry in entries:
        needs = entry.width + _MARK_GAP + width_of(entry.meaning)
        if at + needs > width:
            rows.append([])
            at = 0.0
        rows[-1].append((at, entry))
        at += needs + _ENTRY_GAP
    return rows


def draw_key(axes: Axes, left: float, top: float, rows: list[list[tuple[float, KeyEntry]]], pitch: float) -> None:
    """Draw a key, its first row in the middle of the `pitch` below `top`."""
    for number, row in enumerate(rows):
        y = top - (number + 0.5) * pitch
        for at, entry in row:
            entry.draw(axes, left + at + entry.width / 2, y)
            write_words(axes, left + at + entry.width + _MARK_GAP, y, entry.meaning)

"""A sheet of paper measured in points, from its lower left corner; marks drawn on it, and a key to them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection, PathCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, Patch, PathPatch, Polygon
from matplotlib.path import Path
from matplotlib.text import Annotation, Text
from matplotlib.textpath import text_to_path

from cdpsim.draw.canvas import INK, figure_with
from cdpsim.draw.look import Look
from cdpsim.errors import RequestError

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


def sheet_in(axes: Axes, width: float, height: float) -> tuple[Figure, Axes]:
    """Return the figure of some axes, and these axes as a sheet of that size, as large as they have room for."""
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")
    return figure_with(axes), axes


def scale_in(axes: Axes) -> Figure:
    """Return the figure of axes that are a sheet, its letters and lines as much smaller as the sheet is in them."""
    box, (_, width), (_, height) = axes.get_window_extent(), axes.get_xlim(), axes.get_ylim()
    figure = figure_with(axes)
    factor = min(box.width / width, box.height / height) * 72 / figure.dpi
    _enlarge_marks(axes, factor)
    return figure


def scale_sheet(figure: Figure, look: Look) -> Figure:
    """Return a sheet enlarged or made smaller, letters and lines with it, to the width or letters asked for.

    For a place it becomes no wider than that, and no larger than its letters are to be there.
    """
    if look.height is not None:
        raise RequestError("height", "follows from the width, or from --font-size, in this picture; leave it out")
    if look.font_size is not None and look.inches_wide is not None:
        raise RequestError("font-size", "follows from the width in this picture; leave either out")
    wide, high = figure.get_size_inches()
    factor = look.inches_wide / wide if look.inches_wide else (look.letters or SMALL) / SMALL
    if look.place:
        factor = min(factor, (look.letters or SMALL) / SMALL, look.high(high * factor) / high)
    texts: Any = figure.findobj(Text)
    least = factor * min(text.get_fontsize() for text in texts if text.get_text())
    if least < look.least_letters - 0.05:
        problem = f"would have letters of {least:.1f} points, below {look.least_letters:g}"
        raise RequestError("for", f"{look.place} {problem}; draw less, or for a wider place")
    return enlarge(figure, factor)


def enlarge(figure: Figure, factor: float) -> Figure:
    """Return a figure enlarged or made smaller, with its letters, lines and marks."""
    figure.set_size_inches(*(side * factor for side in figure.get_size_inches()))
    if factor != 1:
        _enlarge_marks(figure, factor)
    for axis in (axis for axes in figure.axes if factor != 1 for axis in (axes.xaxis, axes.yaxis)):
        sizes = axis.get_tick_params()
        axis.set_tick_params(
            **{name: sizes[name] * factor for name in ("labelsize", "length", "width", "pad") if name in sizes}
        )
    return figure


def _enlarge_marks(part: Figure | Axes, factor: float) -> None:
    """Make the letters, lines and marks of a part larger by a factor."""
    artists: Any = part.findobj()
    for artist in artists:
        if isinstance(artist, Text):
            artist.set(fontsize=float(artist.get_fontsize()) * factor)
        elif isinstance(artist, Patch):
            artist.set_linewidth(artist.get_linewidth() * factor)
        elif isinstance(artist, Collection):
            artist.set_linewidth([float(width) * factor for width in np.atleast_1d(artist.get_linewidth())])
        if isinstance(artist, Annotation) and artist.anncoords == "offset points":
            artist.xyann = (artist.xyann[0] * factor, artist.xyann[1] * factor)
        if isinstance(artist, FancyArrowPatch):
            artist.set_mutation_scale(artist.get_mutation_scale() * factor)
        if isinstance(artist, PathCollection):
            artist.set_sizes(artist.get_sizes() * factor**2)


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


def key_rows(entries: Iterable[KeyEntry], width: float, size: float = SMALL) -> list[list[tuple[float, KeyEntry]]]:
    """Return a key's entries in rows that are no wider than `width`: where each begins, and the entry."""
    rows: list[list[tuple[float, KeyEntry]]] = []
    at = width
    for entry in entries:
        needs = entry.width + _MARK_GAP + width_of(entry.meaning, size)
        if at + needs > width:
            rows.append([])
            at = 0.0
        rows[-1].append((at, entry))
        at += needs + _ENTRY_GAP
    return rows


def draw_key(
    axes: Axes,
    left: float,
    top: float,
    rows: list[list[tuple[float, KeyEntry]]],
    pitch: float,
    size: float = SMALL,
) -> None:
    """Draw a key, its first row in the middle of the `pitch` below `top`."""
    for number, row in enumerate(rows):
        y = top - (number + 0.5) * pitch
        for at, entry in row:
            entry.draw(axes, left + at + entry.width / 2, y)
            write_words(axes, left + at + entry.width + _MARK_GAP, y, entry.meaning, size)

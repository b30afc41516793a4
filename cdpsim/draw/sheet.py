"""A sheet of paper measured in points, from its lower left corner; what is drawn on it, and a key to that."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from cdpsim.draw.canvas import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

Point: TypeAlias = tuple[float, float]
SMALL = 6.5  # points: the size of what stands in a column of a paper
_GAP = 9.0
_MARK_GAP = 3.5


class Entry(NamedTuple):
    """What a key says of one mark: how it is drawn around a point, how wide that is, and what it means."""

    draw: Callable[["Axes", float, float], object]
    width: float
    meaning: str


def sheet(width: float, height: float) -> tuple["Figure", "Axes"]:
    """Give an empty figure of that size in points, and axes on it whose unit is the point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def put(axes: "Axes", patch: "Patch", name: str = "") -> None:
    """Put something on the sheet, whole; `name` is its id in an SVG."""
    patch.set_clip_on(False)
    if name:
        patch.set_gid(name)
    axes.add_artist(patch)


def area(axes: "Axes", corners: Sequence[Point], fill: str, *, name: str = "", **style: Any) -> None:
    """Fill a polygon."""
    from matplotlib.patches import Polygon

    put(axes, Polygon(corners, facecolor=fill, **({"edgecolor": "none"} | style)), name)


def rectangle(box: tuple[float, float, float, float]) -> list[Point]:
    """The corners of a box that is given as left, right, lower, upper."""
    left, right, lower, upper = box
    return [(left, lower), (right, lower), (right, upper), (left, upper)]


def line(axes: "Axes", *lines: Sequence[Point], name: str = "", **style: Any) -> None:
    """Draw open lines as one mark."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    codes = [Path.MOVETO if not k else Path.LINETO for points in lines for k in range(len(points))]
    path = Path([point for points in lines for point in points], codes)
    put(axes, PathPatch(path, fill=False, **({"edgecolor": INK, "capstyle": "butt"} | style)), name)


def arc(axes: "Axes", start: Point, bend: Point, end: Point, head: float, *, name: str = "", **style: Any) -> None:
    """Draw a curve from a point to another, bent towards a third, with an open arrow head at its end."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    along, across = end[0] - bend[0], end[1] - bend[1]
    length = max((along**2 + across**2) ** 0.5, 1e-9)
    along, across = along / length * head, across / length * head
    wings = [(end[0] - along - side * across / 2, end[1] - across + side * along / 2) for side in (1, -1)]
    codes = [Path.MOVETO, Path.CURVE3, Path.CURVE3, Path.MOVETO, Path.LINETO, Path.LINETO]
    path = Path([start, bend, end, wings[0], end, wings[1]], codes)
    put(axes, PathPatch(path, fill=False, **({"edgecolor": INK, "joinstyle": "miter"} | style)), name)


def write(axes: "Axes", x: float, y: float, words: str, size: float = SMALL, **style: Any) -> None:
    """Write words, by default with their left end on a point and their middle at its height."""
    look: dict[str, Any] = {"fontsize": size, "color": INK, "ha": "left", "va": "center_baseline"} | style
    axes.text(x, y, words, **look)


def width_of(words: str, size: float = SMALL) -> float:
    """How wide words are, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return float(text_to_path.get_text_width_height_descent(words, FontProperties(size=size), ismath=False)[0])


def fitted(words: str, width: float, size: float = SMALL) -> str:
    """Words that have been made fit for a figure, cut where they would be wider than that."""
    if width_of(words, size) <= width:
        return words
    while words and width_of(words + "…", size) > width:
        words = words[:-1].rstrip("\\")
    return words + "…"


def rows_of(entries: Iterable[Entry], width: float) -> list[list[tuple[float, Entry]]]:
    """A key's entries in rows that are no wider than that: where each begins, and the entry."""
    rows: list[list[tuple[float, Entry]]] = []
    at = width
    for entry in entries:
        needs = entry.width + _MARK_GAP + width_of(entry.meaning)
        if at + needs > width:
            rows.append([])
            at = 0.0
        rows[-1].append((at, entry))
        at += needs + _GAP
    return rows


def write_key(axes: "Axes", left: float, top: float, rows: list[list[tuple[float, Entry]]], pitch: float) -> None:
    """Draw a key, its first row in the middle of the `pitch` below `top`."""
    for number, row in enumerate(rows):
        y = top - (number + 0.5) * pitch
        for at, entry in row:
            entry.draw(axes, left + at + entry.width / 2, y)
            write(axes, left + at + entry.width + _MARK_GAP, y, entry.meaning)

"""Figures of all pictures: sheets measured in points, pages of panels that matplotlib lays out; both on black, too."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import Collection, LineCollection, PathCollection
from matplotlib.colors import to_hex, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch, PathPatch, Polygon
from matplotlib.path import Path
from matplotlib.text import Annotation, Text
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from cdpsim.draw.canvas import GREY, INK, PALE, TITLE, Look, figure_with, label, one_unit
from cdpsim.draw.palette import ON_NIGHT, on_night
from cdpsim.draw.views import title_words
from cdpsim.errors import RequestError
from cdpsim.trace import Trace

SheetPoint: TypeAlias = tuple[float, float]
Box: TypeAlias = tuple[float, float, float, float]  # left, right, lower, upper
SMALL = 6.5  # points: the size of letters in a column of a paper
ORDINARY = 8.0  # points: ticks and keys of a page, to which all other letters of it are in proportion
PAGE_WIDTH = 7.2  # inches: a page's text
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
_PURE = ("#000000", "#ffffff")
_TICK_SIZES = ("labelsize", "length", "width", "pad")
_ENTRY_GAP = 9.0
_LEAST_HIGH = 1.5  # inches: panels with a key below them
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
    factor = look.inches_wide / wide if look.inches_wide else look.enlargement(SMALL)
    if look.place:
        factor = min(factor, look.enlargement(SMALL), look.high(high * factor) / high)
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
        sizes = {name: size for name, size in axis.get_tick_params().items() if name in _TICK_SIZES}
        axis.set_tick_params(**{name: size * factor for name, size in sizes.items()})
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
    """Write words, by default with their left end on a point and the middle of their first line at its height."""
    look: dict[str, Any] = {"fontsize": size, "color": INK, "ha": "left", "va": "center_baseline"} | style
    axes.text(x, y - height_below_first(words, size) / 2, words, **look)


def height_below_first(words: str, size: float) -> float:
    """Return the height of the lines of a text below its first one, in points."""
    return 1.35 * size * words.count("\n")


def width_of(words: str, size: float = SMALL) -> float:
    """Return the width of words in points."""
    return float(text_to_path.get_text_width_height_descent(words, FontProperties(size=size), ismath=False)[0])


def wrapped(text: str, width: float, size: float = SMALL) -> str:
    """Return a text that `canvas.label` made in lines that are at most so wide; longer words are cut."""
    lines, width = [""], 0.97 * width  # letters differ by their places
    for word in text.split():
        cut = word
        while cut and width_of(cut + "…" * (cut != word), size) > width:
            cut = cut[:-1].rstrip("\\")
        cut += "…" * (cut != word)
        longer = f"{lines[-1]} {cut}".lstrip()
        lines = [*lines, cut] if lines[-1] and width_of(longer, size) > width else [*lines[:-1], longer]
    return "\n".join(lines)


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
    axes: Axes, left: float, top: float, rows: list[list[tuple[float, KeyEntry]]], pitch: float, size: float = SMALL
) -> None:
    """Draw a key, its first row in the middle of the `pitch` below `top`."""
    for number, row in enumerate(rows):
        y = top - (number + 0.5) * pitch
        for at, entry in row:
            entry.draw(axes, left + at + entry.width / 2, y)
            write_words(axes, left + at + entry.width + _MARK_GAP, y, entry.meaning, size)


def new_page(title: str, height: float, look: Look, width: float = PAGE_WIDTH) -> Figure:
    """Return a figure whose panels matplotlib lays out, with its title and of that size if none other is asked for."""
    wide, factor = look.inches_wide or width, look.enlargement(ORDINARY)
    high = look.high(height * (wide / width * max(1.0, factor)) ** 0.5)
    figure = Figure(figsize=(wide, high), layout="constrained")
    words = title if look.title is None else label(look.title, 300)
    if words:
        style: dict[str, Any] = {"fontsize": 10.5, "fontweight": "bold", "color": INK, "wrap": True}
        figure.suptitle(words, x=0.012, ha="left", gid=TITLE, **style)
    return figure


def clock(axes: Axes, end: float, *, in_slots: bool, ticks: int | Literal["auto"] = "auto") -> None:
    """Let the lower axis show the time of a run until `end`, in slots or in one unit of seconds."""
    axes.set_xlim(0, end)
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 4, 5, 10], integer=in_slots))
    axes.set_xlabel(f"time, {'slots' if in_slots else one_unit(axes.xaxis, 's', end)}")


def finish(
    figure: Figure, look: Look, keys: Mapping[Any, Sequence[Artist]], *, columns: int = 5, title: str = ""
) -> Figure:
    """Return a page that is drawn with letters as large as asked for, and the keys of its parts below their panels."""
    factor = look.enlargement(ORDINARY)
    texts: Any = figure.findobj(Text) if factor != 1 else []
    for text in texts:
        text.set_fontsize(max(text.get_fontsize() * factor, look.least_letters))
    for axis in (axis for axes in figure.axes if factor != 1 for axis in (axes.xaxis, axes.yaxis)):
        size = axis.get_tick_params().get("labelsize", 10.0)
        axis.set_tick_params(which="both", labelsize=max(size * factor, look.least_letters))
    keyed = [(part, handles) for part, handles in keys.items() if look.legend and (handles or title)]
    if keyed:
        key = max(_add_key(part, handles, columns, title, ORDINARY * factor) for part, handles in keyed)
        key *= len({part.bbox.y0 for part, _ in keyed})  # of parts below each other
        natural = figure.get_figheight() + key
        high = look.high(natural)
        if high < min(natural, key + _LEAST_HIGH):
            tight = "height" if look.height else "for"
            raise RequestError(tight, "leaves no room for the panels above the key; draw less, or use --no-legend")
        figure.set_figheight(high)
    return figure


def _add_key(part: Any, handles: Sequence[Artist], columns: int, title: str, size: float) -> float:
    """Add a key below the panels of a part, in `columns` or fewer where these have no room; return its height."""
    dpi = part.figure.dpi
    points = 0.97 * part.bbox.width * 72 / dpi - size  # some are around it
    words = [wrapped(str(handle.get_label()), points - 2.8 * size, size) for handle in handles]
    title = "\n".join(wrapped(text, points, size) for text in title.splitlines())
    look: dict[str, Any] = {"frameon": False, "borderpad": 0, "fontsize": size, "title_fontsize": size}
    place: dict[str, Any] = {"loc": "outside lower left", "alignment": "left"}
    for number in range(max(1, min(columns, len(words))), 0, -1):
        for legend in list(part.legends):
            legend.remove()
        legend = part.legend(handles, words, ncols=number, title=title or None, **place, **look)
        if legend.get_window_extent().width <= points * dpi / 72:
            break
    return float(legend.get_window_extent().height / dpi) + 0.1


def distinct(styles: Sequence[str], number: int) -> str:
    """Return one of the styles of a curve or point, such that colour and style together repeat after 32 or more."""
    return styles[(number + number // 8) % len(styles)]


def titles(traces: Sequence[Trace]) -> tuple[str, list[str]]:
    """Return a title that all traces have in common, and a name for each of them, shortened to the room."""
    words = list(map(title_words, traces))
    common = [word for word in words[0] if all(word in others for others in words)]
    names = [", ".join(word for word in each if word not in common) or each[0] for each in words]
    return label(", ".join(common), 160), [label(text, 40) for text in names]


def darken(figure: Figure) -> None:
    """Make a figure that was drawn on white one on black.

    Black and white stay where they are letters, lines or textures on a colour: `palette.ink_on` chose them for it.
    """
    figure.draw_without_rendering()  # which makes the ticks
    every: list[Any] = figure.findobj()
    for artist in [*every, *(box for text in every if isinstance(text, Text) and (box := text.get_bbox_patch()))]:
        if isinstance(artist, Text):
            if artist.get_color() not in _PURE:
                artist.set_color(on_night(to_hex(artist.get_color())))
        elif isinstance(artist, Line2D):
            colours = artist.get_color(), artist.get_markerfacecolor(), artist.get_markeredgecolor()
            line, face, edge = map(_turned, colours)
            artist.set(color=line[0], markerfacecolor=face[0], markeredgecolor=edge[0])
        elif isinstance(artist, Patch):
            artist.set(facecolor=_turned(artist.get_facecolor())[0], edgecolor=_turned(artist.get_edgecolor())[0])
        elif isinstance(artist, Collection):
            filled = bool(to_rgba_array(artist.get_facecolor())[:, 3].any()) and not isinstance(artist, LineCollection)
            if filled:
                artist.set_facecolor(_turned(artist.get_facecolor()))
            artist.set_edgecolor(_turned(artist.get_edgecolor(), stays=() if filled else _PURE))
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        axis.set_tick_params(which="both", color=ON_NIGHT[GREY], grid_color=ON_NIGHT[PALE])


def _turned(colours: Any, stays: Sequence[str] = ()) -> Any:
    """Return colours of a figure on white as those on black, each with its opacity."""
    rows = [(to_hex(row[:3]), float(row[3])) for row in to_rgba_array(colours)]
    return [(name if name in stays else on_night(name), opacity) for name, opacity in rows] or ["none"]

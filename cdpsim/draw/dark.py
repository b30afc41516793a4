"""Dark figures: the greys turned over, and the colours that would vanish on black made lighter."""

from collections.abc import Callable
from typing import Any

from matplotlib.collections import Collection, LineCollection
from matplotlib.colors import to_hex, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from cdpsim.draw.canvas import GREY, INK, PALE
from cdpsim.draw.palette import COLOURS

NIGHT = "#14161a"
_ON_NIGHT = {INK: "#e8e8e8", GREY: "#a5a5a5", PALE: "#3a3c40"}
# Found by search: each has a contrast of 3 to the night and of 4.5 to white letters, and differs in CIELAB by 27 from
# all others, for normal sight and for each kind of colour blindness.
LIGHTER = {COLOURS[0]: "#3060c0", COLOURS[3]: "#706090", COLOURS[6]: "#a000ff"}
_PURE = ("#000000", "#ffffff")


def darken(figure: Figure) -> None:
    """Make a figure that was drawn on white one on black.

    Black and white stay where they are letters, lines or textures on a colour: `palette.ink_on` chose them for it.
    """
    figure.draw_without_rendering()  # which makes the ticks
    backgrounds = [figure.patch, *(axes.patch for axes in figure.axes)]
    for artist in figure.findobj():
        if artist in backgrounds:
            artist.set_facecolor(NIGHT)
        elif isinstance(artist, Text):
            _turn_text(artist)
        elif isinstance(artist, Line2D):
            colours = artist.get_color(), artist.get_markerfacecolor(), artist.get_markeredgecolor()
            line, face, edge = map(_turned, colours)
            artist.set(color=line, markerfacecolor=face, markeredgecolor=edge)
        elif isinstance(artist, Patch | Collection):
            _turn_shape(artist)
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        axis.set_tick_params(which="both", color=_ON_NIGHT[GREY], grid_color=_ON_NIGHT[PALE])


def _turn_text(text: Text) -> None:
    if to_hex(text.get_color()) not in _PURE or text.get_color() == "black":
        text.set_color(_turned(text.get_color()))
    if (box := text.get_bbox_patch()) is not None:
        _turn_shape(box)


def _turn_shape(shape: Any) -> None:
    """Turn the colours of a patch or a collection; of a collection that is not filled, pure black and white stay."""
    faces, edges = (to_rgba_array(get()) for get in (shape.get_facecolor, shape.get_edgecolor))
    filled = bool((faces[:, 3] > 0).any()) and not isinstance(shape, LineCollection)
    pick = slice(None) if isinstance(shape, Collection) else 0
    if filled:
        shape.set_facecolor([_turned_row(row, _turned) for row in faces][pick])
    turn = _turned if filled or isinstance(shape, Patch) else _turned_ink
    if len(edges):
        shape.set_edgecolor([_turned_row(row, turn) for row in edges][pick])


def _turned_row(row: Any, turn: Callable[[Any], str]) -> tuple[str, float]:
    """Return the colour and the opacity of a row of red, green, blue and opacity."""
    return turn(to_hex(row[:3])), float(row[3])


def _turned_ink(colour: Any) -> str:
    """Return the colour of a line or texture on black."""
    return to_hex(colour) if to_hex(colour) in _PURE else _turned(colour)


def _turned(colour: Any) -> Any:
    """Return a colour of a figure on white as one on black; greys are turned over, from white to the night."""
    if isinstance(colour, str) and colour.lower() in ("none", "auto"):
        return colour
    name = to_hex(colour)
    if name in _ON_NIGHT or name in LIGHTER:
        return (_ON_NIGHT | LIGHTER)[name]
    red, green, blue = (int(name[k : k + 2], 16) for k in (1, 3, 5))
    if max(red, green, blue) - min(red, green, blue) > 3:
        return name
    share = green / 255
    dark = [int(NIGHT[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(part * share + 0xF0 * (1 - share)):02x}" for part in dark)

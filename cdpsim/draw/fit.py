"""Figures that lay themselves out, fitted to the look that was asked for: title, size, letters, legend."""

from textwrap import wrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from cdpsim.draw.canvas import INK, TITLE, label
from cdpsim.draw.look import Look

ORDINARY = 8.0  # points: ticks and legends, to which all other letters are in proportion
_LETTER, _BOLD_LETTER = 0.55, 0.66  # of the size: the mean width of a letter
_MOST_IN_A_ROW = 5
_MARK_LETTERS = 3.5  # letters: the mark of a legend's entry and the space around it


def fit_figure(figure: Figure, look: Look) -> Figure:
    """Return a figure of any kind with the look that was asked for; what was not asked for stays as it is.

    Its title is the text with the id `canvas.TITLE`. Legends are those of figures and axes.
    """
    retitle(figure, look)
    if not look.legend:
        for part in (figure, *figure.subfigs, *figure.axes):
            _remove_legends(part)
    wide, high = figure.get_size_inches()
    width = look.inches_wide or wide
    factor = (look.letters or ORDINARY) / ORDINARY
    figure.set_size_inches(width, look.high(high * (width / wide) ** 0.5 * max(1.0, factor) ** 0.5))
    if factor != 1:
        texts: Any = figure.findobj(Text)
        for text in texts:
            text.set_fontsize(max(text.get_fontsize() * factor, look.least_letters))
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            size = axis.get_tick_params().get("labelsize", 10.0)
            axis.set_tick_params(which="both", labelsize=max(size * factor, look.least_letters))
    if (width, factor) != (wide, 1):
        _wrap_texts(figure)
        for part in (figure, *figure.subfigs):
            _reshape_legends(part, 72 / figure.dpi)
    return figure


def retitle(figure: Figure, look: Look) -> None:
    """Give a figure the title that was asked for; an empty one removes its own."""
    if look.title is None:
        return
    words = label(look.title, 300)
    titles = figure.findobj(lambda artist: artist.get_gid() == TITLE)
    for text in titles:
        text.set_text(words)  # type: ignore[attr-defined]
    if words and not titles:
        figure.suptitle(words, x=0.012, ha="left", fontsize=10.5, fontweight="bold", color=INK, gid=TITLE)


def _remove_legends(part: Any) -> None:
    own = getattr(part, "get_legend", lambda: None)()
    for legend in [*getattr(part, "legends", ()), *([own] if own else [])]:
        legend.remove()


def _wrap_texts(figure: Figure) -> None:
    """Break titles into lines that their panels have room for."""
    for text in figure.findobj(lambda artist: artist.get_gid() == TITLE):
        _wrap(text, figure.get_figwidth() * 72)
    for axes in figure.axes:
        place, heading = axes.get_subplotspec(), axes.get_title(loc="left")
        room = 0.85 * axes.figure.bbox.width / figure.dpi * 72
        for child in axes.get_children():
            if heading and isinstance(child, Text) and child.get_text() == heading:
                _wrap(child, room / (place.get_gridspec().ncols if place else 1))


def _wrap(text: Any, room: float) -> None:
    width = _BOLD_LETTER if text.get_fontweight() == "bold" else _LETTER
    letters = max(12, int(room / (width * text.get_fontsize())))
    if len(text.get_text()) > letters:
        text.set_text("\n".join(wrap(text.get_text().replace("\n", " "), letters)))


def _reshape_legends(part: Any, points: float) -> None:
    """Give each legend below panels as many columns as its letters have room for, with so many points to a dot."""
    for legend in list(part.legends):
        words, size = [text.get_text() for text in legend.get_texts()], legend.get_texts()[0].get_fontsize()
        room = part.bbox.width * points / (1.1 * _LETTER * size)  # in letters
        columns = max(1, min(len(words), _MOST_IN_A_ROW, int(room / (max(map(len, words)) + _MARK_LETTERS))))
        words = ["\n".join(wrap(text, max(12, int(room - _MARK_LETTERS)))) for text in words]
        handles, title = legend.legend_handles, legend.get_title().get_text() or None
        style: dict[str, Any] = {"fontsize": size, "title_fontsize": size, "frameon": False, "alignment": "left"}
        legend.remove()
        part.legend(handles, words, loc="outside lower left", ncols=columns, title=title, **style)

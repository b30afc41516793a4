"""Settings of all pictures: sizes, letters, titles, legends, dark figures, and the forms of files."""

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from cdpsim import RequestError, plot, simulate
from cdpsim.draw import canvas, palette
from cdpsim.draw.canvas import PLACES, Look, as_tex, pgf_text
from cdpsim.draw.curves import memory_over_time
from cdpsim.draw.palette import NIGHT
from cdpsim.draw.paper import figure_1, paper
from cdpsim.draw.sheet import darken
from cdpsim.draw.snapshot import figure_2, snapshot
from tests.conftest import Command
from tests.helpers.colours import SIGHTS, seen
from tests.helpers.command_line import refuse
from tests.helpers.every_row import every_row
from tests.helpers.figures import BOX, marked, model, one, words

PICTURES: dict[str, Callable[[Look], Figure]] = {
    "memory": lambda look: memory_over_time([simulate("multi-cdp", 2)], look=look),
    "paper": lambda look: paper([simulate("multi-cdp", 3)], look=look),
    "snapshot": lambda look: snapshot(simulate("multi-cdp", 2), 4, look=look),
    "figure 1": lambda look: figure_1(2, look=look),
    "figure 2": lambda look: figure_2(2, look=look),
}
every_picture = pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)


def letters(figure: Figure) -> list[float]:
    """The sizes of all letters that are shown."""
    figure.draw_without_rendering()
    texts: Any = figure.findobj(Text)
    return [text.get_fontsize() for text in texts if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize(
    ("given", "inches"), [(7, 7.0), ("7", 7.0), ("7in", 7.0), ("50.8 mm", 2.0), ("5.08cm", 2.0), ("144 pt", 2.0)]
)
def test_lengths_have_units(given: float | str, inches: float) -> None:
    """An inch is 25.4 mm and 72 points."""
    assert Look(width=given).inches_wide == pytest.approx(inches)


@every_picture
@pytest.mark.parametrize("width", [3.0, 9.5])
def test_a_picture_is_as_wide_as_asked(draw: Callable[[Look], Figure], width: float) -> None:
    assert draw(Look(width=width)).get_figwidth() == pytest.approx(width)


@every_picture
@pytest.mark.parametrize("place", PLACES)
def test_a_picture_fits_its_place_with_letters_that_can_be_read(draw: Callable[[Look], Figure], place: str) -> None:
    """Six points and more; what is too wide for its letters is refused."""
    try:
        figure = draw(Look(place=place))
    except RequestError as error:
        assert re.search(r"letters of [1-5]\.\d points", str(error))
        assert place == "column"
        return
    assert figure.get_figwidth() <= PLACES[place].width + 1e-9
    assert figure.get_figheight() <= PLACES[place].most_height + 1e-9
    assert min(letters(figure)) >= 5.95


@pytest.mark.parametrize("place", [None, "column"])
@pytest.mark.parametrize("what", ["memory", "traffic", "versions", "steps"])
@pytest.mark.parametrize("names", [["1f1b"], ["1f1b", "interleaved-1f1b", "pp-cdp"]])
def test_no_word_is_cut_at_the_edge(what: str, names: list[str], place: str | None) -> None:
    """Of titles, headings, notes and keys; numbers along axes are matplotlib's own."""
    runs = [simulate(name, 4, model=model(4, "a model of stages"), cluster=BOX, steps=2) for name in names]
    figure = plot(what, runs, place=place)
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    ticks = {text for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in axis.get_ticklabels()}
    texts: Any = figure.findobj(Text)
    shown = [text for text in texts if text.get_visible() and text.get_text().strip() and text not in ticks]
    assert len(shown) > 2
    for text in shown:
        box = Text.get_window_extent(text)
        assert box.x0 >= -1 and box.x1 <= figure.bbox.width + 1, text.get_text()
        assert box.y0 >= -1 and box.y1 <= figure.bbox.height + 1, text.get_text()


@pytest.mark.parametrize("what", ["timeline", "snapshot"])
@pytest.mark.parametrize("name", ["multi-cdp", "1f1b"])
def test_a_long_title_goes_on_in_further_lines(what: str, name: str) -> None:
    """As it does in the pictures that matplotlib lays out; nothing below it moves into it."""
    said = " ".join(f"word{number}" for number in range(40))
    short, long = (plot(what, simulate(name, 3), title=title) for title in ("short", said))
    tops = []
    for figure, expected in ((short, "short"), (long, said)):
        FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
        title, others = one(figure, canvas.TITLE), [*marked(figure, "device-d0"), *marked(figure, "F-t0-i0-j2")]
        assert title.get_text().replace("\n", " ").startswith(expected)
        box = title.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
        tops.append([figure.bbox.height - other.get_window_extent().y1 for other in others])
        assert others and box.y0 >= max(other.get_window_extent().y1 for other in others)
    assert max(np.subtract(tops[1], tops[0])) > 2 * 8 / 72 * long.dpi


@every_picture
def test_letters_grow_as_asked(draw: Callable[[Look], Figure]) -> None:
    assert max(letters(draw(Look(font_size=13)))) > 1.5 * max(letters(draw(Look())))


def test_a_height_is_given_to_figures_that_lay_themselves_out() -> None:
    assert PICTURES["memory"](Look(height="10 cm")).get_figheight() == pytest.approx(10 / 2.54)
    with pytest.raises(RequestError, match="height: follows from the width"):
        PICTURES["paper"](Look(height=3))
    with pytest.raises(RequestError, match="font-size: follows from the width"):
        PICTURES["paper"](Look(width=3, font_size=9))


@every_picture
def test_a_title_is_replaced_or_left_out(draw: Callable[[Look], Figure]) -> None:
    """A $ is a $, and no formula."""
    own = words(draw(Look()))
    titled = draw(Look(title="100 $ and $x$"))
    (title,) = marked(titled, canvas.TITLE)
    assert title.get_text().startswith(r"100 \$ and \$x\$")
    assert len(words(titled)) - len(own) == (1 if draw in (PICTURES["figure 1"], PICTURES["figure 2"]) else 0)
    assert not any("100" in text for text in words(draw(Look(title=""))))


@every_picture
def test_a_legend_is_left_out(draw: Callable[[Look], Figure]) -> None:
    assert len(words(draw(Look(legend=False)))) < len(words(draw(Look())))


@every_picture
def test_a_dark_picture_has_light_letters_and_no_white(draw: Callable[[Look], Figure]) -> None:
    figure = draw(Look())
    darken(figure)
    assert to_hex(figure.get_facecolor()) == NIGHT
    texts: Any = figure.findobj(Text)
    on_paper = [text for text in texts if len(text.get_text()) > 3]
    assert on_paper
    assert all(palette.luminance(to_hex(text.get_color())) > 0.3 for text in on_paper)
    assert all(to_hex(axes.patch.get_facecolor()) == NIGHT for axes in figure.axes)


def test_numbers_in_marks_keep_the_ink_that_can_be_read_there() -> None:
    figure = PICTURES["paper"](Look())
    numbers: Any = [text for text in figure.findobj(Text) if text.get_zorder() == 4]
    inks = [text.get_color() for text in numbers]
    darken(figure)
    assert inks
    assert [text.get_color() for text in numbers] == inks


def test_lighter_colours_can_be_seen_and_told_apart() -> None:
    """WCAG asks for a contrast of 3 for marks and of 4.5 for letters; any two differ by 27 in CIELAB."""
    colours = list(map(palette.on_night, palette.COLOURS))
    night = palette.luminance(NIGHT)
    for old, colour in zip(palette.COLOURS, colours, strict=True):
        light, ink = palette.luminance(colour), palette.ink_on(old)
        assert (light + 0.05) / (night + 0.05) >= 3
        assert (1.05 / (light + 0.05) if ink == "#ffffff" else (light + 0.05) / 0.05) >= 4.5
    for sight in SIGHTS:
        apart = [np.linalg.norm(seen(a, sight) - seen(b, sight)) for a, b in combinations(colours, 2)]
        assert min(apart) >= 27


def test_an_svg_is_an_image_with_a_title() -> None:
    """As a screen reader asks for."""
    root = ElementTree.fromstring(canvas.rendered(paper([simulate("multi-cdp", 3)]), "x.svg"))
    assert root.attrib["role"] == "img"
    assert root.findtext("{http://www.w3.org/2000/svg}title") == "multi-cdp, n = 3, cdp-v2"
    drawn = canvas.rendered(figure_1(look=Look(title="$ & <")), "x.svg", Look(title="$ & <"))
    assert ElementTree.fromstring(drawn).findtext("{http://www.w3.org/2000/svg}title") == "$ & <"


def test_pgf_needs_no_tex_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are closed; a hostile title is printed, not executed; no font of this machine is named."""
    monkeypatch.setenv("PATH", "")
    figure = paper([simulate("multi-cdp", 3)], look=Look(title=r"\input{/etc/passwd} 5 % #1 $x^2$ a_b & ~"))
    text = pgf_text(figure)
    assert text.count(r"\begin{pgfscope}") == text.count(r"\end{pgfscope}") > 50
    assert r"\textbackslash{}input\{/etc/passwd\} 5 \% \#1 \$x\textasciicircum{}2\$ a\_b \& \textasciitilde{}" in text
    assert text.startswith("%% In a LaTeX document")
    assert not re.search(r"setmainfont|\.ttf", text)
    assert pgf_text(paper([simulate("multi-cdp", 3)])) == pgf_text(paper([simulate("multi-cdp", 3)]))


@pytest.mark.parametrize("character", "\\{}$&#_%~^")
def test_every_special_character_of_tex_is_printed(character: str) -> None:
    assert as_tex(character) != character


@pytest.mark.parametrize(("most", "unit", "text"), [(0.35, "ms", "150"), (2.5, "s", "0.15"), (1e-5, "µs", "150000")])
def test_an_axis_has_one_unit(most: float, unit: str, text: str) -> None:
    axis = Figure().subplots().xaxis
    assert canvas.one_unit(axis, "s", most) == unit
    assert axis.get_major_formatter()(0.15, 0) == text


REFUSALS = {
    "timeline multi-cdp -n 3 --dpi 100 -o x.svg": "dpi: is of .png; .svg has no dots; leave it out",
    "timeline multi-cdp -n 3 --dark -o x.html": "dark: is of .png, .svg, .pdf or .pgf, not of .html; leave it out",
    "timeline 1f1b -n 3 --no-legend -o x.csv": "no-legend: is of .png, .svg, .pdf or .pgf, not of .csv",
    "figure 1 --width wide -o x.svg": "width: 'wide' is no size; give for example 7, or '17.5 cm'",
    "figure 1 --width 100 -o x.svg": "width: '100' is not between 1 and 60 inches; give another",
    "figure 1 --font-size 1 -o x.svg": "font-size: '1' is not between 4 and 72 points",
    "figure 1 --dpi 1e9 -o x.png": "dpi: '1e9' is no size; give for example 300",
    "figure 1 --for colum -o x.svg": "for: unknown for 'colum'; did you mean 'column'?",
    "figure 1 --for column --width 3 -o x.svg": "width: is what --for column says; leave either out",
    "figure 2 -n 6 --for column -o x.svg": "for: column would have letters of",
    "compare multi-dp multi-cdp -n 3 --dark": "dark: is of a picture; give its file with -o, or leave it out",
}


@every_row("line", REFUSALS)
def test_settings_that_change_nothing_are_refused(line: str, command: Command, here: Path) -> None:
    refuse(command, here, line, REFUSALS[line])


def test_the_command_line_has_all_settings(command: Command, here: Path) -> None:
    line = ["figure", "1", "--title", "Ours", "--no-legend", "--dark", "--dpi", "50", "--width", "10 cm"]
    assert command(*line, "-o", "x.png") == (0, "", "")
    png = (here / "x.png").read_bytes()
    assert int.from_bytes(png[16:20], "big") == pytest.approx(50 * 10 / 2.54, abs=1)
    assert b"Title\0Ours" in png
    asked = ["plot", "memory", "multi-cdp", "-n", "2", "--for", "page", "--font-size", "9", "--height", "4"]
    assert command(*asked, "-o", "x.pgf") == (0, "", "")
    assert r"\pgfqpoint{7.000000in}{4.000000in}" in (here / "x.pgf").read_text()

"""Figures, what their reader may choose about them, and their files.

Figures are drawn without a display: the same bytes for the same data, text as text.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from warnings import catch_warnings, filterwarnings

from cdpsim.errors import RequestError, choose, one_line, short_repr
from cdpsim.files.units import short_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

LEAST_FONT = 6.0  # points: printed letters that can be read
_INCHES = {"": 1.0, "in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
_LENGTH = re.compile(r"(\d+\.?\d*|\.\d+) ?([a-z]*)", re.ASCII)
_RANGES = {"width": (1, 60), "height": (0.5, 60), "font-size": (4, 72), "dpi": (20, 1200)}
Length: TypeAlias = float | int | str


class PlaceSize(NamedTuple):
    """A place where a picture is shown: width and greatest height in inches, letters in points, dots per inch."""

    width: float
    most_height: float
    font_size: float
    dpi: int


PLACES = {
    "column": PlaceSize(3.35, 9.0, 7.0, 300),  # of a paper with two
    "page": PlaceSize(7.0, 9.0, 8.0, 300),  # the text of a page
    "slide": PlaceSize(12.0, 6.5, 16.0, 150),  # of 13.33 by 7.5 inches
}


@dataclass(frozen=True, kw_only=True)
class Look:
    """The look of a picture; the picture itself decides on a setting that is None.

    Lengths are in inches, or texts such as "8.5 cm"; `font_size` is that of its ordinary letters, in points. `place` is
    where it will be shown: "column", "page" or "slide". An empty `title` leaves it out.

    >>> Look(width="8.5 cm").inches_wide
    3.3464566929133857
    """

    title: str | None = None
    width: Length | None = None
    height: Length | None = None
    font_size: Length | None = None
    dpi: Length | None = None
    legend: bool = True
    dark: bool = False
    place: str | None = None

    def __post_init__(self) -> None:
        if self.title is not None and not isinstance(self.title, str):
            raise RequestError("title", f"{short_repr(self.title)} is no text; give one")
        for name in ("legend", "dark"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"{short_repr(getattr(self, name))} must be True or False")
        if self.place is not None:
            choose("for", self.place, PLACES)
            if self.width is not None:
                raise RequestError("width", f"is what --for {self.place} says; leave either out")
        for name in ("width", "height", "font_size", "dpi"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _checked(name.replace("_", "-"), value))

    @property
    def given(self) -> list[str]:
        """The names of the settings that differ from a picture's own, as options have them."""
        names = {"legend": "no-legend", "font_size": "font-size", "place": "for"}
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return [names.get(name, name) for name in changed]

    @property
    def inches_wide(self) -> float | None:
        """The width that was asked for."""
        return PLACES[self.place].width if self.place else _as_number(self.width)

    @property
    def letters(self) -> float | None:
        """The size of ordinary letters that was asked for."""
        return _as_number(self.font_size) or (PLACES[self.place].font_size if self.place else None)

    def enlargement(self, ordinary: float) -> float:
        """Return the factor that gives ordinary letters of that size the size that was asked for."""
        return (self.letters or ordinary) / ordinary

    @property
    def least_letters(self) -> float:
        """The least size of letters; 0 if the picture is for no particular place."""
        return LEAST_FONT if self.place else 0.0

    @property
    def dots_per_inch(self) -> int:
        """The resolution of a .png."""
        return int(self.dpi or (PLACES[self.place].dpi if self.place else 150))

    def high(self, natural: float) -> float:
        """Return the height of a picture that by itself would be so high."""
        return _as_number(self.height) or (min(natural, PLACES[self.place].most_height) if self.place else natural)


AS_DRAWN = Look()


def _as_number(size: Length | None) -> float | None:
    """Return a size that was checked."""
    return None if size is None else float(size)


def _checked(name: str, value: Length) -> float:
    """Return a size as a number; refuse one that is none, or that no picture has."""
    units = _INCHES if name in ("width", "height") else {"": 1.0, **({"pt": 1.0} if name == "font-size" else {})}
    least, most = _RANGES[name]
    match = _LENGTH.fullmatch(str(value).strip())
    if not match or match[2] not in units or isinstance(value, bool):
        examples = "7, or '17.5 cm'" if units is _INCHES else f"{10 if name == 'font-size' else 300}"
        raise RequestError(name, f"{short_repr(value)} is no size; give for example {examples}")
    size = float(match[1]) * units[match[2]]
    if not least <= size <= most:
        unit = {"dpi": "", "font-size": " points"}.get(name, " inches")
        raise RequestError(name, f"{short_repr(value)} is not between {least:g} and {most:g}{unit}; give another")
    return int(size) if name == "dpi" else size


# The metadata that would differ from one writing to the next; "Title" is added.
PICTURE_FORMS = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".pgf": {}}
PICTURE_ENDINGS = f"{', '.join([*PICTURE_FORMS][:-1])} or {[*PICTURE_FORMS][-1]}"
TITLE = "title"  # the id of a figure's own title
INK = "#222222"
GREY = "#6b6b6b"
PALE = "#dddddd"


def check_form(path: str | Path, known: Iterable[str] = PICTURE_FORMS) -> str:
    """Return the ending of a picture's name; refuse one that names no known form."""
    ending = Path(path).suffix.lower()
    if ending not in known:
        raise RequestError(str(path), f"its form is unknown; end its name in {', '.join(known)}")
    return ending


@contextmanager
def defaults() -> Iterator[None]:
    """Let matplotlib use its own defaults inside, whatever a user's matplotlibrc or style says."""
    _import_matplotlib()
    import matplotlib as mpl

    with mpl.rc_context(), catch_warnings():
        filterwarnings("ignore", message=r"Glyph .* missing from font")  # a box stands for it; .svg has the letter
        mpl.rcdefaults()
        yield


def _import_matplotlib() -> None:
    """Import matplotlib even if MPLBACKEND names an unknown backend, which only other programs' figures need."""
    backend = None if "matplotlib" in sys.modules else os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib as mpl
    except UnicodeDecodeError as error:
        raise RequestError("matplotlibrc", f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend is not None:
        with suppress(ValueError):
            mpl.rcParams["backend"] = backend


def rendered(figure: "Figure", path: str | Path, look: Look = AS_DRAWN) -> bytes:
    """Return a figure, drawn under `defaults`, as the bytes of a file of that name, as fine as asked."""
    import matplotlib as mpl

    ending, out = check_form(path), BytesIO()
    with defaults(), mpl.rc_context({"svg.hashsalt": "cdpsim", "svg.fonttype": "none", "pdf.fonttype": 42}):
        if ending == ".pgf":
            return pgf_text(figure).encode()
        titles: list[Any] = figure.findobj(lambda artist: artist.get_gid() == TITLE)
        words = " ".join(text.get_text() for text in titles).replace("\n", " ").replace(r"\$", "$")
        metadata = PICTURE_FORMS[ending] | {"Title": look.title or words or "a picture of cdpsim"}
        figure.savefig(out, format=ending[1:], metadata=metadata, dpi=look.dots_per_inch)
    return out.getvalue().replace(b"<svg ", b'<svg role="img" ', 1) if ending == ".svg" else out.getvalue()


def label(name: str, longest: int = 60) -> str:
    """Return a name that a user chose as one line of a figure, in which nothing is set as a formula."""
    return one_line(name, longest).replace("$", r"\$")


def amount_text(value: float, unit: str) -> str:
    """Return an amount for a figure: "12.5 ms", "1.5 GB"; without a unit, as in the slot model, "1,236" or "1.25"."""
    if not unit:
        return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"
    return short_text(value, unit, digits=3).replace("u", "µ")


def figure_with(axes: "Axes") -> "Figure":
    """Return the whole figure of axes, which may lie in a part of it."""
    return axes.figure.figure


def plain(axes: "Axes", title: str, size: float = 9.5) -> None:
    """Give a panel its title, grey axes and a pale grid, without a frame."""
    axes.set_title(title, fontsize=size, loc="left", wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=8, color=GREY)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.grid(visible=True, color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)


def one_unit(axis: "Axis", unit: str, most: float) -> str:
    """Let an axis up to `most` write its numbers in one unit, and return that unit: "ms" for 0.35 of "s"."""
    prefixes = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ", 1e-9: "n"}
    factor = next((factor for factor in prefixes if most >= factor), 1e-9 if most > 0 else 1.0)
    axis.set_major_formatter(lambda value, _: f"{value / factor:.10g}")
    return prefixes[factor] + unit


_OPENING = """%% In a LaTeX document: \\usepackage{{pgf}}, and where the picture stands: \\input{{FILE.pgf}}
\\begingroup
\\makeatletter
\\begin{{pgfpicture}}
\\pgfpathrectangle{{\\pgfpointorigin}}{{\\pgfqpoint{{{:f}in}}{{{:f}in}}}}
\\pgfusepath{{use as bounding box, clip}}
"""
_CLOSING = "\\end{pgfpicture}\n\\makeatother\n\\endgroup\n"
_AS_TEX = {character: f"\\{character}" for character in "{}$&#_%"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "…": r"\ldots{}",
    "–": "--",
    "−": r"\ensuremath{-}",
    "·": r"\ensuremath{\cdot}",
    "×": r"\ensuremath{\times}",
    "→": r"\ensuremath{\rightarrow}",
    "⌈": r"\ensuremath{\lceil}",
    "⌉": r"\ensuremath{\rceil}",
    "µ": r"\ensuremath{\mu}",
    "Ψ": r"\ensuremath{\Psi}",
}


def pgf_text(figure: "Figure") -> str:
    """Return a figure as pgf, for \\input in LaTeX; no TeX is needed, as matplotlib's own fonts measure the texts."""
    from matplotlib.backends.backend_mixed import MixedModeRenderer
    from matplotlib.backends.backend_pgf import RendererPgf
    from matplotlib.textpath import text_to_path

    class PlainText(RendererPgf):
        """Print texts as they are, and measure them without TeX."""

        def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
            points = self.dpi / 72
            width, height, descent = text_to_path.get_text_width_height_descent(s, prop, ismath)
            return width * points, height * points, descent * points

        def draw_text(self, gc: Any, x: float, y: float, s: str, *others: Any, **more: Any) -> None:
            draw: Any = super().draw_text
            draw(gc, x, y, s if more.get("ismath") else as_tex(s), *others, **more)

    out = StringIO()
    width, height = figure.get_size_inches()
    out.write(_OPENING.format(width, height))
    mixed: Any = MixedModeRenderer
    renderer: Any = PlainText
    figure.draw(mixed(figure, width, height, figure.dpi, renderer(figure, out)))
    return out.getvalue() + _CLOSING


def as_tex(words: str) -> str:
    r"""Return words as TeX that prints them, whatever they are.

    >>> as_tex(r"50 % of \input{x}")
    '50 \\% of \\textbackslash{}input\\{x\\}'
    """
    return "".join(_AS_TEX.get(character, character) for character in words)

"""Figures and their files: drawn without a display, the same bytes for the same data, text as text."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, filterwarnings

from cdpsim.draw.look import AS_DRAWN, Look
from cdpsim.errors import RequestError, one_line
from cdpsim.files.units import short_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

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
            from cdpsim.draw.pgf import pgf_text

            return pgf_text(figure).encode()
        titles: list[Any] = figure.findobj(lambda artist: artist.get_gid() == TITLE)
        words = " ".join(text.get_text() for text in titles).replace("\n", " ").replace(r"\$", "$")
        metadata = PICTURE_FORMS[ending] | {"Title": look.title or words or "a picture of cdpsim"}
        figure.savefig(out, format=ending[1:], metadata=metadata, dpi=look.dots_per_inch)
    return out.getvalue().replace(b"<svg ", b'<svg role="img" ', 1) if ending == ".svg" else out.getvalue()


def check_look(path: str | Path, look: Look) -> None:
    """Refuse settings of a picture for a file that takes none of them."""
    ending = Path(path).suffix.lower()
    if look.given and ending not in PICTURE_FORMS:
        raise RequestError(look.given[0], f"is of {PICTURE_ENDINGS}, not of {ending}; leave it out")
    if look.dpi is not None and ending != ".png":
        raise RequestError("dpi", f"is of .png; {ending} has no dots; leave it out")


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

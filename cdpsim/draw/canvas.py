"""Figures and their files: drawn without a display, the same bytes for the same data, text as text."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from cdpsim.errors import RequestError, one_line
from cdpsim.files.units import short_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_FORMS = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
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

    with mpl.rc_context():
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


def rendered(figure: "Figure", path: str | Path) -> bytes:
    """Return a figure, drawn under `defaults`, as the bytes of a file of that name."""
    import matplotlib as mpl

    ending, out = check_form(path), BytesIO()
    with defaults(), mpl.rc_context({"svg.hashsalt": "cdpsim", "svg.fonttype": "none", "pdf.fonttype": 42}):
        figure.savefig(out, format=ending[1:], metadata=PICTURE_FORMS[ending], dpi=150)
    return out.getvalue()


def label(name: str, longest: int = 60) -> str:
    """Return a name that a user chose as one line of a figure, in which nothing is set as a formula."""
    return one_line(name, longest).replace("$", r"\$")


def amount_text(value: float, unit: str) -> str:
    """Return an amount for a figure: "12.5 ms", "1.5 GB"; without a unit, as in the slot model, "1,236" or "1.25"."""
    if not unit:
        return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"
    return short_text(value, unit, digits=3).replace("u", "µ")


def caption(figure: "Figure", lines: Sequence[str]) -> None:
    """Write lines above a figure, which becomes higher by that."""
    width, height = figure.get_size_inches()
    wrapped = [part for text in lines for part in wrap(label(text, 1000), int(15 * width))]
    if wrapped:
        figure.set_size_inches(width, height + 0.14 * len(wrapped))
        figure.suptitle("\n".join(wrapped), x=0.012, ha="left", fontsize=7.5, color=GREY)


def plain(axes: "Axes", title: str, size: float = 9.5) -> None:
    """Give a panel its title, grey axes and a pale grid, without a frame."""
    axes.set_title(title, fontsize=size, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=8, color=GREY)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.grid(visible=True, color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)

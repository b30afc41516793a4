"""Figures as pgf, for \\input in LaTeX; no TeX is needed to write them, as matplotlib's own fonts measure the texts."""

from io import StringIO
from typing import Any

from matplotlib.backends.backend_mixed import MixedModeRenderer
from matplotlib.backends.backend_pgf import RendererPgf
from matplotlib.figure import Figure
from matplotlib.textpath import text_to_path

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


def pgf_text(figure: Figure) -> str:
    """Return a figure as pgf."""
    out = StringIO()
    width, height = figure.get_size_inches()
    out.write(_OPENING.format(width, height))
    mixed: Any = MixedModeRenderer
    renderer: Any = _Renderer
    figure.draw(mixed(figure, width, height, figure.dpi, renderer(figure, out)))
    return out.getvalue() + _CLOSING


def as_tex(words: str) -> str:
    r"""Return words as TeX that prints them, whatever they are.

    >>> as_tex(r"50 % of \input{x}")
    '50 \\% of \\textbackslash{}input\\{x\\}'
    """
    return "".join(_AS_TEX.get(character, character) for character in words)


class _Renderer(RendererPgf):
    """A renderer that prints texts as they are, and measures them without TeX."""

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
        points = self.dpi / 72
        width, height, descent = text_to_path.get_text_width_height_descent(s, prop, ismath)
        return width * points, height * points, descent * points

    def draw_text(self, gc: Any, x: float, y: float, s: str, *others: Any, **more: Any) -> None:
        draw: Any = super().draw_text
        draw(gc, x, y, s if more.get("ismath") else as_tex(s), *others, **more)

"""Tables as text, CSV, Markdown, LaTeX and JSON."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from io import StringIO
from typing import Any

import msgspec

from cdpsim.errors import RequestError, nearest

Row = Sequence[str]

LATEX_NEEDS = "% needs \\usepackage{booktabs}\n"
_NUMBER = re.compile(r"-?[0-9]+([./][0-9]+)?")


def as_text(header: Row, rows: Sequence[Row]) -> str:
    """Align columns for reading: numbers to the right, the rest to the left."""
    table = [header, *rows]
    widths = [max(len(row[c]) for row in table) for c in range(len(header))]
    right = [bool(rows) and all(_NUMBER.fullmatch(row[c]) for row in rows) for c in range(len(header))]

    def line(row: Row) -> str:
        cells = zip(row, widths, right, strict=True)
        return "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in cells).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)]) + "\n"


def as_csv(header: Row, rows: Sequence[Row]) -> str:
    """Write comma-separated values."""
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()


def as_markdown(header: Row, rows: Sequence[Row]) -> str:
    """Write a Markdown table, its columns aligned for whoever reads it as it is."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    widths = [max(3, *(len(row[c]) for row in cells)) for c in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(map(str.ljust, row, widths))} |\n" for row in cells)


def as_latex(header: Row, rows: Sequence[Row]) -> str:
    """Write a LaTeX tabular, its source aligned."""
    return LATEX_NEEDS + latex_tabular(
        "l" * len(header), [[*map(latex_text, header)]], [[*map(latex_text, row)] for row in rows]
    )


def latex_tabular(columns: str, header: Sequence[Row | str], rows: Sequence[Row]) -> str:
    """A tabular of cells that are LaTeX already; of the header, a plain string is a line of its own."""
    cells = [line for line in [*header, *rows] if not isinstance(line, str)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Row | str) -> str:
        return row if isinstance(row, str) else " & ".join(map(str.ljust, row, widths)) + r" \\"

    top = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *map(line, header), r"\midrule"]
    return "\n".join([*top, *map(line, rows), r"\bottomrule", r"\end{tabular}"]) + "\n"


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def latex_text(text: str) -> str:
    """Escape what LaTeX would take for a command."""
    return "".join(_LATEX.get(c, c) for c in text)


def as_json(value: object) -> str:
    """Write JSON; fractions as strings in lowest terms."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=_fraction), indent=1).decode() + "\n"


FORMATS: Mapping[str, Callable[..., str]] = {
    "text": as_text,
    "json": as_json,
    "csv": as_csv,
    "markdown": as_markdown,
    "latex": as_latex,
}


def check_format(name: str) -> str:
    """Refuse a format that there is not."""
    if name not in FORMATS:
        raise RequestError("format", f"unknown format {name!r}; {nearest(name, FORMATS)}")
    return name


def _fraction(value: Any) -> str:
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")

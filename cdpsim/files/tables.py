"""Tables as text, CSV, Markdown, LaTeX and JSON.

Text, Markdown and LaTeX are for people: their cells are words. CSV and JSON are for programs: numbers are numbers, in
SI units, to the last digit.
"""

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from io import StringIO
from numbers import Integral, Real
from typing import Any

import msgspec

from cdpsim.errors import RequestError, one_line, suggestion

Row = Sequence[str]
Data = Sequence[object]  # a row of numbers, texts, truths and None

LATEX_NEEDS = "% needs \\usepackage{booktabs}\n"
LONGEST = 300  # characters of a cell for people
_NUMBER = re.compile(r"-?[0-9]+([./][0-9]+)?")
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")  # what a spreadsheet would compute; also full-width


def as_text(header: Row, rows: Sequence[Row]) -> str:
    """Align columns for reading: numbers to the right, the rest to the left."""
    table = [[one_line(cell, LONGEST) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[c]) for row in table) for c in range(len(header))]
    right = [bool(rows) and all(_NUMBER.fullmatch(row[c]) for row in rows) for c in range(len(header))]

    def line(row: Row) -> str:
        cells = zip(row, widths, right, strict=True)
        return "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in cells).rstrip()

    return "\n".join([line(table[0]), line(["-" * w for w in widths]), *map(line, table[1:])]) + "\n"


def as_csv(header: Row, rows: Sequence[Data]) -> str:
    """Write comma-separated values: numbers to the last digit, true and false, nothing for None."""
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerows([map(_datum, row) for row in [header, *rows]])
    return out.getvalue()


def _datum(value: object) -> str:
    """Write one value; a text that a spreadsheet would compute gets an apostrophe in front."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Real) and not isinstance(value, Fraction):
        return str(int(value)) if isinstance(value, Integral) else repr(float(value))
    text = one_line(str(value))
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def as_markdown(header: Row, rows: Sequence[Row]) -> str:
    """Write a Markdown table, its columns aligned for whoever reads it as it is."""
    cells = [[_markdown_text(one_line(cell, LONGEST)) for cell in row] for row in [header, *rows]]
    widths = [max(3, *(len(row[c]) for row in cells)) for c in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(map(str.ljust, row, widths))} |\n" for row in cells)


_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\|`[]*"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def _markdown_text(text: str) -> str:
    """Escape what Markdown would take for HTML, a link, code, emphasis or the end of a cell."""
    return text.translate(_MARKDOWN)


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
    "[": "{[}",  # the end of the row above would take it for its argument
    "*": "{*}",  # and this, too
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def latex_text(text: str) -> str:
    """Escape what LaTeX would take for a command."""
    return "".join(_LATEX.get(c, c) for c in one_line(text, LONGEST))


def as_json(value: object) -> str:
    """Write JSON; fractions as strings in lowest terms, and what does not print as its number."""
    try:
        text = msgspec.json.format(msgspec.json.encode(value, enc_hook=_fraction), indent=1).decode()
    except UnicodeEncodeError:
        raise RequestError("json", "a name in it is no UTF-8 text; rename that file, or take another form") from None
    lines = text.split("\n")
    return "".join(f"{line if line.isprintable() else _escaped(line)}\n" for line in lines)


def _escaped(line: str) -> str:
    """Write as JSON what does not print, which stands in texts alone."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


FORMATS: Mapping[str, Callable[..., str]] = {
    "text": as_text,
    "json": as_json,
    "csv": as_csv,
    "markdown": as_markdown,
    "latex": as_latex,
}
DATA_FORMATS = ("text", "json", "csv")  # of every table; Markdown and LaTeX are for the tables that go into papers


def noted(table: str, form: str, notes: Sequence[str]) -> str:
    """Add lines to a table for people, in LaTeX as comments; leave a table for programs as it is."""
    lines = [one_line(note) for note in notes]
    if form == "latex":
        return "".join(f"% {line}\n" for line in lines) + table
    if form not in ("text", "markdown") or not lines:
        return table
    ends = "\n" if form == "text" else "\n\n"
    return f"{table}\n{ends.join(lines if form == 'text' else map(_markdown_text, lines))}\n"


def check_format(name: str, known: Sequence[str] = tuple(FORMATS)) -> str:
    """Refuse a format that is none of the `known` ones; return the name of one that is."""
    if name in FORMATS and name not in known:
        raise RequestError("format", f"{name!r} is for table1 and compare only; give {', '.join(known)}")
    if name not in known:
        raise RequestError("format", f"unknown format {name!r}; {suggestion(name, known)}")
    return name


def _fraction(value: Any) -> str:
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")

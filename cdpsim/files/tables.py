"""Tables as text, CSV, Markdown, LaTeX and JSON.

Text, Markdown and LaTeX are for people: their cells are words. CSV and JSON are for programs: numbers are numbers, in
SI units, to the last digit.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from html import escape
from io import StringIO
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import msgspec

from cdpsim.errors import RequestError, one_line, suggestion

if TYPE_CHECKING:
    import pandas as pd

TextRow = Sequence[str]
DataRow = Sequence[object]  # of numbers, texts, truths and None

LATEX_NEEDS = "% needs \\usepackage{booktabs}\n"
LONGEST_CELL = 300  # characters of a cell for people
_NUMERIC = re.compile(r"-?[0-9]+([./][0-9]+)?")
# The beginning of a spreadsheet's formula; also full-width.
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")


def as_text(header: TextRow, rows: Sequence[TextRow]) -> str:
    """Return a table for reading, its columns aligned: numbers to the right, the rest to the left."""
    table = [[one_line(cell, LONGEST_CELL) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[c]) for row in table) for c in range(len(header))]
    right = [bool(rows) and all(_NUMERIC.fullmatch(row[c]) for row in rows) for c in range(len(header))]

    def line(row: TextRow) -> str:
        cells = zip(row, widths, right, strict=True)
        return "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in cells).rstrip()

    return "\n".join([line(table[0]), line(["-" * w for w in widths]), *map(line, table[1:])]) + "\n"


def as_csv(header: TextRow, rows: Sequence[DataRow]) -> str:
    """Return comma-separated values: numbers to the last digit, true and false, nothing for None."""
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerows([map(_datum, row) for row in [header, *rows]])
    return out.getvalue()


def _datum(value: object) -> str:
    """Return the cell of one value; a text that a spreadsheet would compute gets an apostrophe before it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Real) and not isinstance(value, Fraction):
        return str(int(value)) if isinstance(value, Integral) else repr(float(value))
    text = one_line(str(value))
    return f"'{text}" if _FORMULA.match(text) and not _NUMERIC.fullmatch(text) else text


def as_markdown(header: TextRow, rows: Sequence[TextRow]) -> str:
    """Return a Markdown table, the columns of its source aligned."""
    cells = [[_markdown_text(one_line(cell, LONGEST_CELL)) for cell in row] for row in [header, *rows]]
    widths = [max(3, *(len(row[c]) for row in cells)) for c in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(map(str.ljust, row, widths))} |\n" for row in cells)


_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\|`[]*"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def _markdown_text(text: str) -> str:
    """Return a text in which nothing is HTML, a link, code, emphasis or the end of a cell to Markdown."""
    return text.translate(_MARKDOWN)


def as_latex(header: TextRow, rows: Sequence[TextRow]) -> str:
    """Return a LaTeX tabular, its source aligned."""
    top, *body = ([*map(latex_text, row)] for row in [header, *rows])
    return LATEX_NEEDS + latex_tabular("l" * len(header), [top], body)


def latex_tabular(columns: str, header: Sequence[TextRow | str], rows: Sequence[TextRow]) -> str:
    """Return a tabular of cells that are LaTeX already; in the header, a plain string is a line of its own."""
    cells = [line for line in [*header, *rows] if not isinstance(line, str)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: TextRow | str) -> str:
        return row if isinstance(row, str) else " & ".join(map(str.ljust, row, widths)) + r" \\"

    top = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *map(line, header), r"\midrule"]
    return "\n".join([*top, *map(line, rows), r"\bottomrule", r"\end{tabular}"]) + "\n"


def as_html(header: TextRow, rows: Sequence[TextRow], *notes: str) -> str:
    """Return a table of HTML with lines below it, as notebooks show it; any text is shown as it is."""
    head, *body = (
        "".join(f"<{tag}>{escape(one_line(cell, LONGEST_CELL))}</{tag}>" for cell in row)
        for tag, row in [("th", header), *(("td", row) for row in rows)]
    )
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return table + "".join(f"<p>{escape(one_line(note, LONGEST_CELL))}</p>" for note in notes if note)


def record_html(content: Mapping[str, object], note: str = "") -> str:
    """Return nested tables as one of HTML, a row for each value; its name has those of its tables before it."""

    def rows(part: object, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(part, Mapping):
            for key, value in part.items():
                yield from rows(value, f"{name}.{key}" if name else key)
        else:
            yield name, f"{len(part)} of them" if isinstance(part, list) else str(part)

    return as_html(("", ""), list(rows(content, "")), note)


def data_frame(columns: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Return columns, or rows, as a DataFrame of pandas."""
    try:
        import pandas as pd
    except ImportError:
        problem = "is not installed, and a frame is one of its DataFrames; pip install 'cdpsim[pandas]'"
        raise RequestError("pandas", problem) from None
    return pd.DataFrame(columns)


_LATEX_SPECIAL = {
    "[": "{[}",  # the end of the row above would take a bracket for its argument
    "*": "{*}",  # and a star, too
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
_LATEX = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | _LATEX_SPECIAL)


def latex_text(text: str) -> str:
    """Return a text in which nothing is a command to LaTeX."""
    return one_line(text, LONGEST_CELL).translate(_LATEX)


def as_json(value: object) -> str:
    """Return JSON: fractions as strings in lowest terms, and characters that do not print as their numbers."""
    try:
        text = msgspec.json.format(msgspec.json.encode(value, enc_hook=_fraction), indent=1).decode()
    except UnicodeEncodeError:
        raise RequestError("json", "a name in it is no UTF-8 text; rename that file, or take another form") from None
    lines = text.split("\n")
    return "".join(f"{line if line.isprintable() else _escaped(line)}\n" for line in lines)


def _escaped(line: str) -> str:
    """Return a line of JSON in which characters that do not print, which only texts have, are escaped."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


FORMATS: Mapping[str, Callable[..., str]] = {
    "text": as_text,
    "json": as_json,
    "csv": as_csv,
    "markdown": as_markdown,
    "latex": as_latex,
}
DATA_FORMATS = ("text", "json", "csv")  # of every table; Markdown and LaTeX are for tables that go into papers


def format_table(form: str, records: object, header: TextRow, rows: Sequence[DataRow]) -> str:
    """Write a table in one of `FORMATS`: JSON of the records, all others of the rows; for people None is a dash."""
    if form == "json":
        return as_json(records)
    if form != "csv":
        rows = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    return FORMATS[form](header, rows)


def with_notes(table: str, form: str, notes: Sequence[str], heads: Sequence[str] = ()) -> str:
    """Return a table for people with lines above and below it, in LaTeX as comments; one for programs as it is."""
    above, below = ([one_line(line) for line in lines] for lines in (heads, notes))
    if form == "latex":
        return "".join(f"% {line}\n" for line in above + below) + table
    if form == "markdown":
        above, below = ([_markdown_text(line) for line in lines] for lines in (above, below))
    if form not in ("text", "markdown"):
        return table
    ends = "\n" if form == "text" else "\n\n"
    parts = [f"{ends.join(above)}\n"] * bool(above) + [table] + [f"{ends.join(below)}\n"] * bool(below)
    return "\n".join(parts)


def check_format(name: str, known: Sequence[str] = tuple(FORMATS)) -> str:
    """Refuse a format that is none of the `known` ones; return the name of one that is."""
    if name in FORMATS and name not in known:
        tables = "tables" if name in DATA_FORMATS else "table1 and compare"
        raise RequestError("format", f"{name!r} is for {tables} only; give {', '.join(known)}")
    if name not in known:
        raise RequestError("format", f"unknown format {name!r}; {suggestion(name, known)}")
    return name


def _fraction(value: Any) -> str:
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")

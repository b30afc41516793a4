"""The one writer of tables: rows and named columns as text, CSV, JSON, LaTeX, HTML or a DataFrame.

Text, LaTeX and HTML are for people: their cells are words. CSV, JSON and DataFrames are for programs: numbers are
numbers, in SI units, to the last digit.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from io import StringIO
from math import inf
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import msgspec

from cdpsim.errors import RequestError, one_line, suggestion
from cdpsim.files.units import short_text

if TYPE_CHECKING:
    import pandas as pd

TextRow = Sequence[str]
DataRow = Sequence[object]  # of numbers, texts, truths and None

LONGEST_CELL = 300  # characters of a cell for people
LINE = 100  # characters of a line for people, beyond which columns are dropped
BOOKTABS = "% needs \\usepackage{booktabs}\n"  # the first line of LaTeX
_NUMERIC = re.compile(r"-?[0-9]+([./][0-9]+)?")
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")  # how a spreadsheet's begins; also full-width


@dataclass(frozen=True)
class Column:
    """A column of a table.

    `name` is for programs, and `heading` for people; by default they are the same, with spaces for underscores. A
    column without a name is for people alone, one whose heading is "" for programs alone. `value` gives a row's value;
    by default it is the row's item or attribute of that name. `words` gives its words, by default those of the value in
    its `unit`, with `digits`. Where a line is too long, the column of the highest `rank` goes first; rank 0 stays.
    """

    name: str
    value: Callable[[Any], Any] | None = None
    heading: str | None = None
    unit: str = ""
    digits: int = 4
    words: Callable[[Any], str | None] | None = None
    rank: int = 0

    @property
    def title(self) -> str:
        """The heading for people."""
        return self.name.replace("_", " ") if self.heading is None else self.heading

    def value_of(self, row: Any) -> Any:
        """Return a row's value."""
        if self.value is not None:
            return self.value(row)
        return row[self.name] if isinstance(row, Mapping) else getattr(row, self.name)

    def words_of(self, row: Any) -> str | None:
        """Return a row's words; None where it has no value."""
        return self.words(row) if self.words is not None else value_words(self.value_of(row), self.unit, self.digits)


def value_words(value: Any, unit: str = "", digits: int = 4) -> str | None:
    """Return a value in words: yes or no, a number with a unit or with `digits`, or its text; None for None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit:
        return short_text(float(value), unit, digits)
    if isinstance(value, float | Fraction):
        value = float(value)
        return f"{value:.10g}" if value.is_integer() else f"{value:.{digits}g}"
    return str(value)


@dataclass(frozen=True)
class PrintedTable:
    """Rows and columns, in each form: `printed` writes one, `str` is text, and notebooks show HTML.

    `record` is all that JSON says, by default the rows by the names of columns. For people, `heads` are lines above the
    table and `notes` lines below it; a line of text or HTML has at most `width` characters, if enough columns may go.
    In LaTeX, `latex` writes a cell, by default as plain words.
    """

    columns: Sequence[Column]
    rows: Sequence[Any]
    record: object = None
    heads: Sequence[str] = ()
    notes: Sequence[str] = ()
    width: float = LINE
    latex: Callable[[str], str] | None = None

    def __str__(self) -> str:
        return self.printed().rstrip("\n")

    def _repr_html_(self) -> str:
        header, rows, dropped = self._for_people(self.width)
        return as_html(header, rows, *self.heads, *dropped, *self.notes)

    def printed(self, form: str = "text") -> str:
        """Return the table in one of `FORMATS`."""
        if form == "json":
            return as_json(self.records() if self.record is None else self.record)
        if form == "csv":
            return as_csv([*self._for_programs()], [[*record.values()] for record in self.records()])
        header, rows, dropped = self._for_people(inf if form == "latex" else self.width)
        lines = [[one_line(line) for line in each] for each in (self.heads, [*dropped, *self.notes])]
        if form == "latex":
            write = self.latex or latex_text
            above, below = ("".join(f"{write(line)}\\par\n" for line in each) for each in lines)
            return BOOKTABS + above + as_latex(header, rows, write) + below
        above, below = ("".join(f"{line}\n" for line in each) for each in lines)
        return "\n".join(filter(None, (above, as_text(header, rows), below)))

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as programs read them, by the names of columns."""
        columns = self._for_programs()
        return [{name: each.value_of(row) for name, each in columns.items()} for row in self.rows]

    def frame(self) -> "pd.DataFrame":
        """Return the rows as a DataFrame of pandas, by the names of columns."""
        values = {name: [each.value_of(row) for row in self.rows] for name, each in self._for_programs().items()}
        return data_frame({name: [float(v) if isinstance(v, Fraction) else v for v in values[name]] for name in values})

    def _for_programs(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns if column.name}

    def _for_people(self, width: float) -> tuple[list[str], list[list[str]], list[str]]:
        """Return headings, rows of cells, and a line on the columns that were dropped, in this order."""
        shown = [column for column in self.columns if column.heading != ""]
        cells = {
            id(column): [_words_or_dash(column.title), *(_words_or_dash(column.words_of(row)) for row in self.rows)]
            for column in shown
        }
        dropped = []
        for column in sorted(shown, key=lambda column: -column.rank):
            if not column.rank or sum(2 + max(map(len, texts)) for texts in cells.values()) - 2 <= width:
                break
            del cells[id(column)]
            dropped.append(column.name or column.title)
        header, *rows = ([*row] for row in zip(*cells.values(), strict=True))
        words = f"not shown in a line of {width} characters: {', '.join(dropped)} (CSV and JSON have all)"
        return header, rows, [words] * bool(dropped)


def _words_or_dash(words: str | None) -> str:
    return "-" if words is None else one_line(words, LONGEST_CELL)


def with_words(columns: Sequence[Column], rows: Sequence[Any]) -> list[Column]:
    """Return the columns in which any row has words."""
    return [column for column in columns if any(column.words_of(row) is not None for row in rows)]


def as_text(header: TextRow, rows: Sequence[DataRow]) -> str:
    """Return a table for reading, its columns aligned: numbers to the right, the rest to the left."""
    table = [
        [one_line(name, LONGEST_CELL) for name in header],
        *([_words_or_dash(value_words(cell)) for cell in row] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [bool(rows) and all(map(_NUMERIC.fullmatch, column[1:])) for column in zip(*table, strict=True)]

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


def as_latex(header: TextRow, rows: Sequence[TextRow], write: Callable[[str], str]) -> str:
    """Return a LaTeX tabular, its source aligned, of cells that `write` writes."""
    cells = [[*map(write, row)] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    top, *body = (" & ".join(map(str.ljust, row, widths)) + r" \\" for row in cells)
    begin = rf"\begin{{tabular}}{{{'l' * len(header)}}}"
    return "\n".join([begin, r"\toprule", top, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


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
    return one_line(text).translate(_LATEX)


def as_json(value: object) -> str:
    """Return JSON: fractions as strings in lowest terms, and characters that do not print as their numbers."""
    try:
        text = msgspec.json.format(msgspec.json.encode(value, enc_hook=_fraction), indent=1).decode()
    except UnicodeEncodeError:
        raise RequestError("json", "a name in it is no UTF-8 text; rename that file, or take another form") from None
    escaped = (  # only texts have characters that do not print
        line if line.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
        for line in text.split("\n")
    )
    return "".join(f"{line}\n" for line in escaped)


FORMATS = ("text", "json", "csv", "latex")
DATA_FORMATS = FORMATS[:3]  # of every table; LaTeX is for tables that go into papers


def format_table(form: str, records: object, header: TextRow, rows: Sequence[DataRow]) -> str:
    """Write a table in one of `FORMATS`: JSON of the records, all others of the rows; for people None is a dash."""
    if form == "json":
        return as_json(records)
    return as_csv(header, rows) if form == "csv" else as_text(header, rows)


def check_format(name: str, known: Sequence[str] = FORMATS) -> str:
    """Refuse a format that is none of the `known` ones; return the name of one that is."""
    if name in known:
        return name
    if name in FORMATS:
        tables = "tables" if name in DATA_FORMATS else "table1 and compare"
        raise RequestError("format", f"{name!r} is for {tables} only; give {', '.join(known)}")
    raise RequestError("format", f"unknown format {name!r}; {suggestion(name, known)}")


def _fraction(value: Any) -> str:
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")

"""Tables as text, CSV, Markdown, LaTeX and JSON."""

import csv
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from io import StringIO
from typing import Any

import msgspec

from cdpsim.errors import RequestError, nearest

Row = Sequence[str]


def as_text(header: Row, rows: Sequence[Row]) -> str:
    """Align columns for reading: numbers to the right, the rest to the left."""
    table = [header, *rows]
    widths = [max(len(row[c]) for row in table) for c in range(len(header))]
    right = [all(_is_number(row[c]) for row in rows) for c in range(len(header))]

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
    """Write a Markdown table."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in [header, ["---"] * len(header), *rows]]
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)


# Longest first: a symbol must not be cut by a shorter one.
_SYMBOLS = (
    ("Ψint", r"\Psi_A^{\mathrm{int}}"),
    ("ΨA", r"\Psi_A"),
    ("ΨP", r"\Psi_P"),
    ("O(log N)", r"\mathcal{O}(\log N)"),
    ("O(1)", r"\mathcal{O}(1)"),
    ("²", "^2"),
)


def as_latex(header: Row, rows: Sequence[Row]) -> str:
    """Write a LaTeX tabular (booktabs), the paper's symbols as mathematics."""

    def cell(text: str) -> str:
        mathematics = text
        for symbol, command in _SYMBOLS:
            mathematics = mathematics.replace(symbol, command)
        if mathematics != text or "(N+1)" in text:
            return f"${mathematics}$"
        return "".join(f"\\{c}" if c in "&%$#_{}" else c for c in text)

    def line(row: Row) -> str:
        return " & ".join(map(cell, row)) + r" \\"

    middle = [r"\midrule", *map(line, rows), r"\bottomrule", r"\end{tabular}"]
    return "\n".join([rf"\begin{{tabular}}{{{'l' * len(header)}}}", r"\toprule", line(header), *middle]) + "\n"


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


def _is_number(cell: str) -> bool:
    return bool(cell) and cell.replace(".", "").replace("/", "").isdigit()

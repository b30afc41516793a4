"""Table 1 in the forms in which it is printed."""

import re
from collections.abc import Callable, Sequence

from cdpsim.files import tables
from cdpsim.studies.table1 import QUANTITIES, Table, footnote

# Two blocks fit a terminal: what a device holds, and what it exchanges.
_BLOCKS = (
    ("activations", "parameters", "gpus"),
    ("gradient_volume", "parameter_volume", "boundary_volume", "rounds"),
)
_HEADINGS = {
    "activations": "activations/GPU, BΨA",
    "parameters": "parameters/GPU, ΨP",
    "gpus": "GPUs",
    "gradient_volume": "gradient volume, ΨP",
    "parameter_volume": "param. volume, ΨP",
    "boundary_volume": "boundary volume, BΨint",
    "rounds": "rounds",
}
_BESIDE = ("schedule", "versions kept", "states moved", "wire volume, ΨP")
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"

Columns = dict[str, list[str]]  # the paper's, the exact and perhaps the simulated cells of a quantity


def _title(table: Table) -> str:
    return f"Table 1 for N = {table.n}: {' | '.join(['as the paper prints it', *table.values[1:]])}"


def _columns(table: Table) -> tuple[dict[str, Columns], list[str]]:
    """Every quantity's columns, and the footnotes that marks behind exact cells number in reading order.

    The paper's column is left out where the paper prints nothing.
    """
    notes: list[str] = []
    columns: dict[str, Columns] = {}
    for quantity in (quantity for block in _BLOCKS for quantity in block):
        parts: Columns = {value: [] for value in table.values}
        for row in table.rows:
            cell, note = row[quantity], footnote(row, quantity, table.n, table.collective)
            if note and note not in notes:
                notes.append(note)
            parts["paper"].append(cell["paper"])
            parts["exact"].append(f"{cell['exact']}{_mark(notes.index(note) + 1) if note else ''}")
            if table.is_simulated:
                parts["simulated"].append(f"{cell['simulated']}{'' if cell['simulated'] == cell['exact'] else ' ≠'}")
        if not any(parts["paper"]):
            del parts["paper"]
        columns[quantity] = parts
    return columns, notes


def _mark(number: int) -> str:
    return "".join(_SUPERSCRIPTS[int(digit)] for digit in str(number))


def _remarks(table: Table, notes: Sequence[str]) -> list[str]:
    return [
        "volumes are per micro-batch and training step; a stage has 1/N of BΨA and of ΨP",
        f"all-reduce by {table.collective.replace('-', ' ')}; zero-dp broadcasts and reduces by binomial trees",
        *(f"{_mark(number)} {note}" for number, note in enumerate(notes, start=1)),
    ]


def _beside(table: Table) -> tuple[list[list[str]], str]:
    """What the paper's table leaves out, and what its columns mean."""
    rows = [
        [row["schedule"], *(str(row[name]) for name in ("versions", "optimizer_moves", "wire_volume"))]
        for row in table.beside
    ]
    about = "kept: of one stage on one device; moved: optimizer states per training step; wire: what algorithms send"
    return rows, f"beside the table ({about})"


def _agree(table: Table) -> dict[str, list[str]]:
    """The column that says whether exact and simulated values agree, if there are both."""
    return {"agree": ["yes" if row["agree"] else "NO" for row in table.rows]} if table.is_simulated else {}


def _names(table: Table) -> list[str]:
    return [row["schedule"] for row in table.rows]


def _text(table: Table) -> str:
    columns, notes = _columns(table)
    blocks = [_text_block(table, {quantity: columns[quantity] for quantity in block}) for block in _BLOCKS]
    parts = [_title(table), *blocks, "\n".join(_remarks(table, notes))]
    if not table.is_simulated:
        return "\n\n".join(parts) + "\n"
    rows, about = _beside(table)
    return "\n\n".join([*parts, f"{about}\n\n{tables.as_text(_BESIDE, rows)}"])


def _text_block(table: Table, columns: dict[str, Columns]) -> str:
    side_by_side = [_padded(["", "", *_names(table)])]
    for quantity, parts in columns.items():
        cells = [_padded([name, *column]) for name, column in parts.items()]
        side_by_side.append(_padded([_HEADINGS[quantity], *map(" | ".join, zip(*cells, strict=True))]))
    side_by_side += [["", name, *column] for name, column in _agree(table).items()]
    lines = ["   ".join(line).rstrip() for line in zip(*side_by_side, strict=True)]
    return "\n".join([*lines[:2], "-" * max(map(len, lines)), *lines[2:]])


def _padded(cells: Sequence[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) for cell in cells]


def _markdown(table: Table) -> str:
    columns, notes = _columns(table)
    blocks = []
    for block in _BLOCKS:
        header, cells = ["schedule"], [_names(table)]
        for quantity in block:
            first, *more = columns[quantity]
            header += [f"{_HEADINGS[quantity]}: {first}", *more]
            cells += columns[quantity].values()
        agree = _agree(table)
        blocks.append(tables.as_markdown([*header, *agree], list(zip(*cells, *agree.values(), strict=True))))
    remarks = "".join(f"- {remark}\n" for remark in _remarks(table, notes))
    parts = [_title(table), "", *blocks, remarks]
    if table.is_simulated:
        rows, about = _beside(table)
        parts += [about, "", tables.as_markdown(_BESIDE, rows)]
    return "\n".join(parts)


def _latex(table: Table) -> str:
    """Three booktabs tabulars, or two without runs, and the footnotes, as paragraphs."""
    columns, notes = _columns(table)
    blocks = [_latex_block(table, {quantity: columns[quantity] for quantity in block}) for block in _BLOCKS]
    remarks = "".join(f"{_latex_text(remark)}\\par\n" for remark in _remarks(table, notes))
    title = f"{tables.LATEX_NEEDS}{_latex_text(_title(table))}\\par\n"
    parts = [title, *blocks, remarks]
    if table.is_simulated:
        rows, about = _beside(table)
        parts += [f"{_latex_text(about)}\\par\n", tables.latex_tabular("lrrr", [list(map(_latex_text, _BESIDE))], rows)]
    return "\n".join(parts)


def _latex_block(table: Table, columns: dict[str, Columns]) -> str:
    groups, rules, header, cells = [""], [], [""], [_names(table)]
    for quantity, parts in columns.items():
        first, last = len(header) + 1, len(header) + len(parts)
        groups.append(rf"\multicolumn{{{len(parts)}}}{{c}}{{{_latex_text(_HEADINGS[quantity])}}}")
        rules.append(rf"\cmidrule(lr){{{first}-{last}}}")
        header += parts
        for name, column in parts.items():
            cells.append(list(map(_formula if name == "paper" else _latex_text, column)))
    agree = _agree(table)
    top = [" & ".join([*groups, *[""] * len(agree)]) + r" \\", " ".join(rules), [*header, *agree]]
    return tables.latex_tabular("l" * (len(header) + len(agree)), top, list(zip(*cells, *agree.values(), strict=True)))


# Longest first: a symbol must not be cut by a shorter one.
_SYMBOLS = {
    "Ψint": r"\Psi_A^{\mathrm{int}}",
    "ΨA": r"\Psi_A",
    "ΨP": r"\Psi_P",
    "O(log N)": r"\mathcal{O}(\log N)",
    "O(1)": r"\mathcal{O}(1)",
    "²": "^2",
}


def _formula(cell: str) -> str:
    """What the paper prints, as mathematics."""
    for symbol, command in _SYMBOLS.items():
        cell = cell.replace(symbol, command)
    return f"${cell}$" if cell else ""


def _latex_text(text: str) -> str:
    """Words of which only the symbols and marks are mathematics."""
    text = re.sub("B?Ψ(A|P|int)", lambda symbol: _formula(symbol[0]), tables.latex_text(text)).replace("≠", r"$\neq$")
    marks = re.compile(f"[{_SUPERSCRIPTS}]+")
    return marks.sub(lambda mark: "".join(map(_superscript, mark[0])), text)


def _superscript(digit: str) -> str:
    return rf"\textsuperscript{{{_SUPERSCRIPTS.index(digit)}}}"


def _csv(table: Table) -> str:
    """One column for each of a quantity's three values."""
    columns = [(quantity, value) for quantity in QUANTITIES for value in table.values]
    header = ["schedule", "rule", *map("_".join, columns)]
    rows = [
        [row["schedule"], row["rule"], *(str(row[quantity][value]) for quantity, value in columns)]
        for row in table.rows
    ]
    if table.is_simulated:
        header.append("agree")
        for cells, row in zip(rows, table.rows, strict=True):
            cells.append("true" if row["agree"] else "false")
    return tables.as_csv(header, rows)


def _json(table: Table) -> str:
    said = {"n": table.n, "collective": table.collective, "rows": table.rows}
    return tables.as_json(said | ({"beside": table.beside} if table.is_simulated else {}))


FORMS: dict[str, Callable[[Table], str]] = {
    "text": _text,
    "json": _json,
    "csv": _csv,
    "markdown": _markdown,
    "latex": _latex,
}

"""The forms in which Table 1 is printed: text, JSON, CSV, Markdown, LaTeX."""

import re
from collections.abc import Callable
from typing import NamedTuple

from cdpsim.files import tables
from cdpsim.studies.table1 import QUANTITIES, Table1, footnote

# Two blocks fit a terminal: the memory of a device, and its messages.
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
_ABOUT_BESIDE = (
    "beside the table (kept: of one stage on one device; moved: optimizer states per training step; "
    "wire: what algorithms send)"
)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"

Block = dict[str, dict[str, list[str]]]  # by quantity, the paper's, the exact and perhaps the simulated cells


class _Words(NamedTuple):
    """The words of a table for people; its footnotes are numbered in reading order."""

    title: str
    schedules: list[str]
    blocks: list[Block]
    agree: dict[str, list[str]]  # the column that says whether exact and simulated values agree, if there are both
    remarks: list[str]
    beside: list[list[str]]  # nothing where nothing is simulated


def _words(table: Table1) -> _Words:
    """Return the words of a table, which text, Markdown and LaTeX lay out."""
    notes: list[str] = []
    blocks = [{quantity: _quantity_columns(table, quantity, notes) for quantity in block} for block in _BLOCKS]
    remarks = [
        "volumes are per micro-batch and training step; a stage has 1/N of BΨA and of ΨP",
        f"all-reduce by {table.collective.replace('-', ' ')}; zero-dp broadcasts and reduces by binomial trees",
        *(f"{_superscript(number)} {note}" for number, note in enumerate(notes, start=1)),
    ]
    return _Words(
        f"Table 1 for N = {table.n}: {' | '.join(['as the paper prints it', *table.values[1:]])}",
        [row["schedule"] for row in table.rows],
        blocks,
        {"agree": ["yes" if row["agree"] else "NO" for row in table.rows]} if table.is_simulated else {},
        remarks,
        [list(map(str, row.values())) for row in table.beside],
    )


def _quantity_columns(table: Table1, quantity: str, notes: list[str]) -> dict[str, list[str]]:
    """Return a quantity's columns, and add new footnotes to `notes`; the paper's column is left out if it is empty."""
    columns: dict[str, list[str]] = {value: [] for value in table.values}
    for row in table.rows:
        cell, note = row[quantity], footnote(row, quantity, table.n, table.collective)
        if note and note not in notes:
            notes.append(note)
        mark = _superscript(notes.index(note) + 1) if note else ""
        words = {"paper": cell["paper"], "exact": f"{cell['exact']}{mark}"}
        if table.is_simulated:
            words["simulated"] = f"{cell['simulated']}{'' if cell['simulated'] == cell['exact'] else ' ≠'}"
        for value, column in columns.items():
            column.append(words[value])
    return columns if any(columns["paper"]) else {value: columns[value] for value in table.values[1:]}


def _superscript(number: int) -> str:
    """Return the mark of a footnote."""
    return "".join(_SUPERSCRIPTS[int(digit)] for digit in str(number))


def _text(table: Table1) -> str:
    words = _words(table)
    parts = [words.title, *(_text_block(words, block) for block in words.blocks), "\n".join(words.remarks)]
    if words.beside:
        parts += [_ABOUT_BESIDE, tables.as_text(_BESIDE, words.beside)]
    return "\n\n".join(parts).rstrip("\n") + "\n"


def _text_block(words: _Words, block: Block) -> str:
    """Return a block as text: a quantity's values stand side by side, with bars between them."""
    side_by_side = [_padded(["", "", *words.schedules])]
    for quantity, columns in block.items():
        cells = [_padded([value, *column]) for value, column in columns.items()]
        side_by_side.append(_padded([_HEADINGS[quantity], *map(" | ".join, zip(*cells, strict=True))]))
    side_by_side += [["", name, *column] for name, column in words.agree.items()]
    lines = ["   ".join(line).rstrip() for line in zip(*side_by_side, strict=True)]
    return "\n".join([*lines[:2], "-" * max(map(len, lines)), *lines[2:]])


def _padded(cells: list[str]) -> list[str]:
    """Return cells of equal width."""
    width = max(map(len, cells))
    return [cell.ljust(width) for cell in cells]


def _block_rows(words: _Words, block: Block, cell: Callable[[str, str], str]) -> list[tuple[str, ...]]:
    """Return the rows of a block, each value's cells written by `cell`, which takes the value's name and its words."""
    values = [[cell(value, text) for text in texts] for columns in block.values() for value, texts in columns.items()]
    return list(zip(words.schedules, *values, *words.agree.values(), strict=True))


def _flat_block(words: _Words, block: Block) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the header, in one line, and the rows of a block."""
    header = ["schedule"]
    for quantity, (first, *more) in block.items():
        header += [f"{_HEADINGS[quantity]}: {first}", *more]
    return [*header, *words.agree], _block_rows(words, block, lambda value, text: text)


def html_of(table: Table1) -> str:
    """Return a table as notebooks show it: its blocks, each below the one before."""
    words = _words(table)
    *first, last = [_flat_block(words, block) for block in words.blocks]
    return "".join([*(tables.as_html(*block) for block in first), tables.as_html(*last, words.title, *words.remarks)])


def _markdown(table: Table1) -> str:
    words = _words(table)
    parts = [words.title, ""]
    parts += [tables.as_markdown(*_flat_block(words, block)) for block in words.blocks]
    parts.append("".join(f"- {remark}\n" for remark in words.remarks))
    if words.beside:
        parts += [_ABOUT_BESIDE, "", tables.as_markdown(_BESIDE, words.beside)]
    return "\n".join(parts)


def _latex(table: Table1) -> str:
    """Return three booktabs tabulars, or two without runs, and the footnotes, as paragraphs."""
    words = _words(table)
    parts = [f"{tables.LATEX_NEEDS}{_latex_text(words.title)}\\par\n"]
    parts += [_latex_block(words, block) for block in words.blocks]
    parts.append("".join(f"{_latex_text(remark)}\\par\n" for remark in words.remarks))
    if words.beside:
        header = [list(map(_latex_text, _BESIDE))]
        parts += [f"{_latex_text(_ABOUT_BESIDE)}\\par\n", tables.latex_tabular("lrrr", header, words.beside)]
    return "\n".join(parts)


def _latex_block(words: _Words, block: Block) -> str:
    """Return a block as a tabular, whose header has a line of quantities and a line of values."""
    groups, rules, header = [""], [], [""]
    for quantity, columns in block.items():
        first, last = len(header) + 1, len(header) + len(columns)
        groups.append(rf"\multicolumn{{{len(columns)}}}{{c}}{{{_latex_text(_HEADINGS[quantity])}}}")
        rules.append(rf"\cmidrule(lr){{{first}-{last}}}")
        header += columns
    header += words.agree
    top = [" & ".join([*groups, *[""] * len(words.agree)]) + r" \\", " ".join(rules), header]
    rows = _block_rows(words, block, lambda value, text: _formula(text) if value == "paper" else _latex_text(text))
    return tables.latex_tabular("l" * len(header), top, rows)


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
    """Return a cell of the paper as mathematics."""
    for symbol, command in _SYMBOLS.items():
        cell = cell.replace(symbol, command)
    return f"${cell}$" if cell else ""


def _latex_text(text: str) -> str:
    """Return words of which only the symbols and marks are mathematics."""
    text = re.sub("B?Ψ(A|P|int)", lambda symbol: _formula(symbol[0]), tables.latex_text(text)).replace("≠", r"$\neq$")
    return re.sub(f"[{_SUPERSCRIPTS}]", lambda mark: rf"\textsuperscript{{{_SUPERSCRIPTS.index(mark[0])}}}", text)


def _csv(table: Table1) -> str:
    """Return one column for each of a quantity's values."""
    columns = [(quantity, value) for quantity in QUANTITIES for value in table.values]
    agree = ["agree"] * table.is_simulated
    rows = [
        [row["schedule"], row["rule"], *(str(row[quantity][value]) for quantity, value in columns)]
        + [row[name] for name in agree]
        for row in table.rows
    ]
    return tables.as_csv(["schedule", "rule", *map("_".join, columns), *agree], rows)


def _json(table: Table1) -> str:
    words = {"n": table.n, "collective": table.collective, "rows": table.rows}
    return tables.as_json(words | ({"beside": table.beside} if table.is_simulated else {}))


TABLE1_FORMS: dict[str, Callable[[Table1], str]] = {
    "text": _text,
    "json": _json,
    "csv": _csv,
    "markdown": _markdown,
    "latex": _latex,
}

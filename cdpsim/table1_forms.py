"""Table 1 in the forms in which it is printed."""

from collections.abc import Callable, Sequence

from cdpsim import tables
from cdpsim.table1 import QUANTITIES, Table, footnote

_HEADINGS = {
    "activations": "activations/GPU",
    "parameters": "parameters/GPU",
    "gradient_volume": "gradient volume",
    "parameter_volume": "param. volume",
    "boundary_volume": "boundary volume",
    "rounds": "rounds",
    "gpus": "GPUs",
}
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _marked(table: Table) -> tuple[list[dict[str, str]], list[str]]:
    """Each row's marks by quantity, and the footnotes that they number."""
    notes: list[str] = []
    marks = []
    for row in table.rows:
        mark = {}
        for quantity in QUANTITIES:
            note = footnote(row, quantity, table.n, table.collective)
            if note and note not in notes:
                notes.append(note)
            mark[quantity] = str(notes.index(note) + 1).translate(_SUPERSCRIPTS) if note else ""
        marks.append(mark)
    return marks, notes


def _remarks(table: Table, notes: Sequence[str]) -> list[str]:
    lines = [f"{str(k).translate(_SUPERSCRIPTS)} {note}" for k, note in enumerate(notes, start=1)]
    units = "units: BΨA, ΨP, BΨint per micro-batch and training step; a stage has 1/N of each"
    all_reduce = f"all-reduce by {table.collective.replace('-', ' ')}; zero-dp broadcasts and reduces by binomial trees"
    return [units, all_reduce, *lines]


_BLOCKS = (
    ("activations", "parameters", "gpus"),
    ("gradient_volume", "parameter_volume", "boundary_volume", "rounds"),
)


def _text(table: Table) -> str:
    """Two blocks that fit a terminal: what a device holds, and what it exchanges."""
    marks, notes = _marked(table)
    blocks = ["\n".join(_block(table, marks, quantities)) for quantities in _BLOCKS]
    remarks = ["\n".join(_remarks(table, notes)), _beside(table)]
    return "\n\n".join([f"Table 1 for N = {table.n}", *blocks, *remarks])


def _block(table: Table, marks: Sequence[dict[str, str]], quantities: Sequence[str]) -> list[str]:
    """Paper | exact | simulated for each quantity, the first left out where the paper prints nothing."""
    columns = [_padded(["", "", *(row["schedule"] for row in table.rows)])]
    for quantity in quantities:
        cells = [row[quantity] for row in table.rows]
        exact = [f"{cell['exact']}{mark[quantity]}" for cell, mark in zip(cells, marks, strict=True)]
        parts = [["exact", *exact], ["simulated", *(str(cell["simulated"]) for cell in cells)]]
        if any(cell["paper"] for cell in cells):
            parts.insert(0, ["paper", *(cell["paper"] for cell in cells)])
        lines = [" | ".join(line) for line in zip(*map(_padded, parts), strict=True)]
        columns.append(_padded([_HEADINGS[quantity], *lines]))
    columns.append(_padded(["", "agree", *("yes" if row["agree"] else "NO" for row in table.rows)]))
    lines = ["   ".join(line).rstrip() for line in zip(*columns, strict=True)]
    return [*lines[:2], "-" * max(map(len, lines)), *lines[2:]]


def _beside(table: Table) -> str:
    """What the paper's table leaves out."""
    header = ("beside the table", "versions of a stage", "optimizer moves/step", "wire volume")
    names = ("schedule", "versions", "optimizer_moves", "wire_volume")
    return tables.as_text(header, [[str(row[name]) for name in names] for row in table.beside])


def _padded(cells: Sequence[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) for cell in cells]


def _flat(table: Table) -> tuple[list[str], list[list[str]]]:
    """One column for each of a quantity's three values."""
    values = ("paper", "exact", "simulated")
    header = [
        "schedule",
        "rule",
        *(f"{quantity}_{value}" for quantity in QUANTITIES for value in values),
        "agree",
    ]
    rows = [
        [
            row["schedule"],
            row["rule"],
            *(str(row[quantity][value]) for quantity in QUANTITIES for value in values),
            "true" if row["agree"] else "false",
        ]
        for row in table.rows
    ]
    return header, rows


def _compact(table: Table) -> tuple[list[str], list[list[str]], list[str]]:
    """One column a quantity: what the paper prints, then the exact value, then the simulated one."""
    marks, notes = _marked(table)
    header = ["schedule", *(f"{_HEADINGS[q]}: paper, exact, simulated" for q in QUANTITIES), "agree"]
    rows = []
    for row, mark in zip(table.rows, marks, strict=True):
        cells = [
            ", ".join(filter(None, [cell["paper"], f"{cell['exact']}{mark[q]}", str(cell["simulated"])]))
            for q, cell in ((q, row[q]) for q in QUANTITIES)
        ]
        rows.append([row["schedule"], *cells, "yes" if row["agree"] else "NO"])
    return header, rows, _remarks(table, notes)


def _csv(table: Table) -> str:
    return tables.as_csv(*_flat(table))


def _markdown(table: Table) -> str:
    header, rows, remarks = _compact(table)
    return tables.as_markdown(header, rows) + "".join(f"\n{remark}\n" for remark in remarks)


def _latex(table: Table) -> str:
    header, rows = _flat(table)
    kept = [c for c in range(len(header)) if c == 0 or any(row[c] for row in rows)]
    names = [header[c].replace("_", " ") for c in kept]
    return tables.as_latex(names, [[row[c] for c in kept] for row in rows])


def _json(table: Table) -> str:
    return tables.as_json({"n": table.n, "collective": table.collective, "rows": table.rows, "beside": table.beside})


FORMS: dict[str, Callable[[Table], str]] = {
    "text": _text,
    "json": _json,
    "csv": _csv,
    "markdown": _markdown,
    "latex": _latex,
}

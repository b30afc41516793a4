"""Orders in torch's format: a CSV file with a row for each device and a cell for each action."""

import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.files.writing import read_csv, write_file
from cdpsim.schedules.actions import Action, Actions, check_actions

LARGEST_TABLE = 64 * 2**20  # about seven million actions
KINDS = [kind.name for kind in Action]
_KIND_OF_NAME = {kind.name: int(kind) for kind in Action}
_NAME_OF_KIND = {int(kind): kind.name for kind in Action}
_SINGLE = "[0-9]{1,9}[FBIW][0-9]{1,9}"  # stage, kind, micro-batch
_SEVERAL = f"{_SINGLE}(?:;{_SINGLE})+"
# Communication, which is derived here.
_DERIVED = "[0-9]+(?:UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*"
_CELL_PATTERN = re.compile(rf"(?:{_SINGLE}|\({_SEVERAL}\)OVERLAP_F_B|{_DERIVED})?")
_BETWEEN = "\0"  # no text file has it in a cell
_ROW = re.compile(f"{_CELL_PATTERN.pattern}(?:{_BETWEEN}{_CELL_PATTERN.pattern})*")
_ACTION = re.compile("(;?)([0-9]+)([FBIW])([0-9]+)")  # not the end of 0SEND_F1


def read_actions(path: str | Path, *, together: bool = True) -> Actions:
    """Return the actions of a CSV file, written by torch's `_dump_csv` or by hand, with or without communication.

    Row d is device d's; a cell is an action such as `0F1` (stage 0, forward, micro-batch 1), with B for a whole
    backward, I and W for its two parts, or several that overlap, `(0F1;1B0)OVERLAP_F_B`; empty cells mean nothing.
    Devices that are not `together` repeat their rows on their own; these may have a backward before its forward, of the
    step before.
    """
    return parse_actions(_read_cells(path), str(path), together=together)


def parse_actions(rows: Sequence[Sequence[str]], subject: str, *, together: bool = True) -> Actions:
    """Return the actions of the cells of each device, as `read_actions` reads them; errors begin with `subject`."""
    found, first = array("i"), array("i", [0])
    for d, row in enumerate(rows):
        line = _BETWEEN.join(row)
        if not _ROW.fullmatch(line):
            c = next(c for c, cell in enumerate(row) if not _CELL_PATTERN.fullmatch(cell))
            problem = f"{row[c][:40]!r} is no action; write such as 0F1, 1B0 or (0F1;1B0)OVERLAP_F_B, or nothing"
            raise RequestError(subject, f"row {d}, cell {c}: {problem}")
        for joins, stage, kind, i in _ACTION.findall(line):
            found.extend((int(stage), _KIND_OF_NAME[kind], int(i), joins == ";"))
        first.append(len(found) // 4)
    stage, kind, micro_batch, beside = np.array(found, dtype=np.int32).reshape(-1, 4).T.copy()
    actions = Actions(np.array(first), kind, stage, micro_batch, beside > 0 if beside.any() else None)
    checked = actions if together or not len(actions) else actions.repeated()
    check_actions(
        checked, subject, lambda row: _cell_of_action(rows, int(actions.device[row]), int(actions.index[row]))
    )
    return actions


def _read_cells(path: str | Path) -> list[list[str]]:
    rows = [[cell.strip() for cell in row] for row in read_csv(path, largest_bytes=LARGEST_TABLE)]
    while rows and not any(rows[-1]):
        rows.pop()
    return rows


def _cell_of_action(rows: Sequence[Sequence[str]], device: int, action: int) -> str:
    cells = [c for c, cell in enumerate(rows[device]) for _ in _ACTION.findall(cell)]
    return f"row {device}, cell {cells[action]}"


def write_actions(actions: Actions, path: str | Path, force: bool = False) -> None:
    """Write a CSV file that `read_actions` reads, and torch's `_load_csv` if no stage is on several devices."""
    write_file(path, _csv_rows(actions), force=force)


def _csv_rows(actions: Actions) -> Iterator[str]:
    beside = np.zeros(len(actions), dtype=bool) if actions.beside is None else actions.beside
    columns = (beside, actions.stage, actions.kind, actions.micro_batch)
    for low, high in zip(actions.first[:-1].tolist(), actions.first[1:].tolist(), strict=True):
        rows = zip(*(column[low:high].tolist() for column in columns), strict=True)
        line = "".join([f"{';' if joins else ','}{stage}{_NAME_OF_KIND[kind]}{i}" for joins, stage, kind, i in rows])
        yield re.sub(_SEVERAL, r"(\g<0>)OVERLAP_F_B", line[1:]) + "\n"

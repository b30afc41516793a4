"""The columns of a run, and the files that they are saved in and loaded from."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cdpsim.columns import Ints
from cdpsim.costs import Costs, Times
from cdpsim.errors import RequestError
from cdpsim.files import read_text, write_folder
from cdpsim.metrics import communication, memory, staleness, utilisation
from cdpsim.program import Category, Content, Kind, Op, Program
from cdpsim.version import __version__

Columns = Mapping[str, np.ndarray]

TASKS = ("kind", "stage", "micro_batch", "step", "device", "start", "end", "version", "stale")
MESSAGES = (
    *("op", "content", "stage", "micro_batch", "step"),
    *("src", "dst", "size", "start", "end", "rounds"),
)
MEMORY = ("device", "category", "time", "size")
TABLES = {"tasks": TASKS, "messages": MESSAGES, "memory": MEMORY}
FILES = (*(f"{name}.csv" for name in TABLES), "summary.json")
_TEXT = {"kind", "op", "content", "category"}
_ROWS_AT_ONCE = 50_000


@dataclass(frozen=True, eq=False)
class Run:
    """A program, what it cost, and when every node started and ended."""

    program: Program
    costs: Costs
    start: Times
    end: Times
    collective: str
    request: Mapping[str, Any]  # what produced it, without engine and output path


class Trace:
    """What a run shows, under the names of the files' columns; `run` is None for a trace that was loaded."""

    def __init__(self, run: Run | None) -> None:
        self.run = run

    @cached_property
    def tasks(self) -> Columns:
        """One row per task, sorted by start, device, kind (U, F, B, W), step, micro_batch, stage."""
        program, start, end = self._run.program, self._run.start, self._run.end
        tasks, count = program.tasks, len(program.tasks)
        stale = staleness.stale(program, start, end)
        order = np.lexsort((tasks.stage, tasks.micro_batch, tasks.step, tasks.kind, tasks.device, start[:count]))
        columns = {name: getattr(tasks, name)[order] for name in ("stage", "micro_batch", "step", "device")}
        columns["kind"] = _names(Kind)[tasks.kind[order]]
        columns["start"], columns["end"] = start[:count][order], end[:count][order]
        columns["version"], columns["stale"] = tasks.version[order], stale[order]
        return {name: columns[name] for name in TASKS}

    @cached_property
    def messages(self) -> Columns:
        """One row per message, sorted by start, then the other columns from the left.

        `dst` is a column of integers where every message goes point to point, else of text: members joined by `|`.
        """
        program, first = self._run.program, len(self._run.program.tasks)
        messages, start, end = program.messages, self._run.start[first:], self._run.end[first:]
        by = (messages.dst, messages.src, messages.step, messages.micro_batch, messages.stage)
        order = np.lexsort((*by, messages.content, messages.op, start))
        columns = {name: getattr(messages, name)[order] for name in MESSAGES[2:8]}
        columns["op"], columns["content"] = (
            _names(Op)[messages.op[order]],
            _names(Content)[messages.content[order]],
        )
        if program.groups:
            groups = ["|".join(map(str, members.tolist())) for members in program.groups]
            pairs = zip((messages.op[order] == Op.P2P).tolist(), columns["dst"].tolist(), strict=True)
            columns["dst"] = np.array([str(dst) if single else groups[dst] for single, dst in pairs], dtype=object)
        columns["start"], columns["end"] = start[order], end[order]
        columns["rounds"] = self._run.costs.rounds[order]
        return {name: columns[name] for name in MESSAGES}

    @cached_property
    def memory(self) -> Columns:
        """What each device holds of each category from each time on, one row per change."""
        curve = memory.curves(self._run.program, self._run.start, self._run.end)
        return curve | {"category": _names(Category)[curve["category"]]}

    def summary(self) -> dict[str, Any]:
        """Give the content of summary.json."""
        return self._summary

    @cached_property
    def _summary(self) -> dict[str, Any]:
        run, program = self._run, self._run.program
        peaks = memory.peaks(program, run.start, run.end)
        names = [*(category.name.lower() for category in Category), "total"]
        sent = communication.bytes_sent(program, run.collective).tolist()
        return {
            "cdpsim": __version__,
            "request": dict(run.request),
            "devices": program.devices,
            "tasks": len(program.tasks),
            "messages": len(program.messages),
            "makespan": utilisation.makespan(program, run.end),
            "period": utilisation.period(program, run.end),
            "bubble": utilisation.bubble(program, run.start, run.end),
            "mean_staleness": staleness.mean_staleness(program),
            "peak_memory": [
                {"device": device} | dict(zip(names, row, strict=True)) for device, row in enumerate(peaks.tolist())
            ],
            "bytes_sent": [{"device": device, "bytes": size} for device, size in enumerate(sent)],
        }

    @property
    def _run(self) -> Run:
        assert self.run is not None, "a loaded trace has its columns from its files"
        return self.run

    def save(self, directory: str | Path, *, force: bool = False) -> None:
        """Write tasks.csv, messages.csv, memory.csv and summary.json into a folder, whole or not at all."""
        files = {f"{name}.csv": _lines(getattr(self, name)) for name in TABLES}
        write_folder(directory, files | {"summary.json": self._summary_text()}, force=force)

    def _summary_text(self) -> Iterator[str]:
        yield msgspec.json.format(msgspec.json.encode(self.summary()), indent=1).decode() + "\n"


def load(directory: str | Path) -> Trace:
    """Load what `Trace.save` wrote."""
    trace = Trace(None)
    for name, header in TABLES.items():
        trace.__dict__[name] = _read(Path(directory) / f"{name}.csv", header)
    path = Path(directory) / "summary.json"
    try:
        summary = msgspec.json.decode(read_text(path), type=dict)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(str(path), f"not a summary: {error}; write the trace again") from None
    trace.__dict__["_summary"] = summary
    return trace


def _names(kinds: type[Kind] | type[Op] | type[Content] | type[Category]) -> np.ndarray:
    names = [member.name if kinds is Kind else member.name.lower() for member in kinds]
    return np.array(names)


def _lines(columns: Columns) -> Iterator[str]:
    """The text of a CSV file, some rows at a time; -1 stands for "none" in these columns, and is written as nothing."""
    yield ",".join(columns) + "\n"
    rows = len(next(iter(columns.values())))
    row_form = ",".join(["%s"] * len(columns)) + "\n"
    for low in range(0, rows, _ROWS_AT_ONCE):
        part = [_cells(name, column[low : low + _ROWS_AT_ONCE]) for name, column in columns.items()]
        yield "".join(map(row_form.__mod__, zip(*part, strict=True)))


def _cells(name: str, column: Ints) -> list[object]:
    cells: list[object] = column.tolist()
    if name in ("micro_batch", "stage", "src") and (column < 0).any():
        return ["" if cell == -1 else cell for cell in cells]
    return cells


def _read(path: Path, header: tuple[str, ...]) -> Columns:
    rows = csv.reader(StringIO(read_text(path)))
    found = next(rows, [])
    if tuple(found) != header:
        raise RequestError(str(path), f"the header is {','.join(found)[:100]!r}; expected {','.join(header)!r}")
    table = list(rows)
    for number, row in enumerate(table, start=2):
        if len(row) != len(header):
            raise RequestError(str(path), f"line {number} has {len(row)} columns instead of {len(header)}")
    columns = zip(*table, strict=True) if table else ((),) * len(header)
    return {name: _parse(path, name, cells) for name, cells in zip(header, columns, strict=True)}


def _parse(path: Path, name: str, cells: tuple[str, ...]) -> np.ndarray:
    if name in _TEXT or (name == "dst" and any("|" in cell for cell in cells)):
        return np.array(cells, dtype=object if name == "dst" else np.str_)
    try:
        if name in ("start", "end", "time") and any(not cell.isdigit() for cell in cells):
            return np.array(cells, dtype=np.float64)
        return np.array([int(cell) if cell else -1 for cell in cells], dtype=np.int64)
    except ValueError as error:
        raise RequestError(str(path), f"column {name!r}: {error}; write the trace again") from None

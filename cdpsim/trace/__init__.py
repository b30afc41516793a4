"""Traces: the columns of a run, and the files that they are saved in and loaded from."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cdpsim.errors import RequestError, choose, one_line
from cdpsim.files.notes import progress
from cdpsim.files.units import counted
from cdpsim.files.writing import read_text, write_folder
from cdpsim.numeric.columns import Columns
from cdpsim.program import Category, Content, Kind, Op, Stream
from cdpsim.trace.table import (
    EstimatedTaskRow,
    ExchangeRow,
    MemoryRow,
    MessageRow,
    RoundRow,
    StreamedMessageRow,
    Table,
    TaskRow,
    exchange_table,
    message_row,
    task_row,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS: Mapping[str, Any] = {"tasks": TaskRow, "messages": MessageRow, "memory": MemoryRow}
TABLES: dict[str, tuple[str, ...]] = {name: row._fields for name, row in ROWS.items()}
# Of runs with estimates, and of runs with streams.
WIDER_TABLES: dict[str, tuple[str, ...]] = {"tasks": EstimatedTaskRow._fields, "messages": StreamedMessageRow._fields}
ROUNDS = "rounds.csv"  # beside them, of a run with rounds
SEAL = "summary.json"  # is written last: where it is, the other files of its folder are complete
FILES = (*(f"{name}.csv" for name in TABLES), SEAL)
ROUNDS_HEADER = ",".join(RoundRow._fields) + "\n"
EXCHANGES = "exchanges.csv"  # beside them, of a run whose tasks groups of ranks share
EXCHANGES_HEADER = ",".join(ExchangeRow._fields) + "\n"
RUNS, RUNS_HEADER = "runs.csv", "run,makespan,period\n"  # beside them, where there were many runs
_INTEGER = re.compile("[0-9]{1,18}")
_DECIMAL = re.compile(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")
_MEMBERS = re.compile(r"[0-9]+(\|[0-9]+)*")
_WRITE_AGAIN = "write the trace again"
_LARGEST_FILE = 2**34
# -1 in these columns is an empty cell in their files.
_OPTIONAL = {"micro_batch", "stage", "src", "base", "begun", "ended"}
_ROWS_OF_A_CHUNK = 50_000
_TIMES = ("start", "end", "time", "posted", "begun", "ended")
_FLAGS = ("stale", "estimate")
_MOST_MISSING = 100_000  # pictures and exports give a row to each number up to the highest


def names_of(kinds: type[IntEnum]) -> np.ndarray:
    """Return the words of a column, by their numbers."""
    return np.array([member.name if kinds is Kind else member.name.lower() for member in kinds])


STREAM_WORDS = np.array([*names_of(Stream), ""])  # of no stream, -1: none
_KINDS_OF_WORDS = {"kind": Kind, "op": Op, "content": Content, "category": Category}
_WORDS = {name: names_of(kinds) for name, kinds in _KINDS_OF_WORDS.items()} | {"stream": STREAM_WORDS}
_NUMBER_OF_WORD = {name: {word: k for k, word in enumerate(words.tolist())} for name, words in _WORDS.items()}


class Trace:
    """The tasks, the messages and the memory of a run, with their times, under the names of the files' columns.

    >>> from cdpsim import simulate
    >>> trace = simulate("multi-cdp", 2).trace
    >>> trace.tasks["device"][:3].tolist(), trace.summary()["makespan"]
    ([0, 0, 0], 14)
    """

    request: Mapping[
        str, Any
    ]  # the recorded request of the run; of a loaded trace anything that its file has, or nothing

    def __init__(
        self,
        tasks: Columns | Table[TaskRow],
        messages: Columns | Table[MessageRow],
        memory: Columns | Table[MemoryRow],
        summary: Mapping[str, Any] = MappingProxyType({}),
        rounds: Columns | Table[RoundRow] | None = None,
    ) -> None:
        self._tasks, self._messages, self._memory = (
            Table(task_row(tasks.keys()), tasks),
            Table(message_row(messages.keys()), messages),
            Table(MemoryRow, memory),
        )
        self._rounds = None if rounds is None else Table(RoundRow, rounds)
        self._summary = dict(summary)
        request = summary.get("request")
        self.request = request if isinstance(request, Mapping) else {}

    @property
    def tasks(self) -> Table[TaskRow]:
        """One row per task, sorted by start, device, kind (U, F, B, W), step, micro_batch, stage."""
        return self._tasks

    @property
    def messages(self) -> Table[MessageRow]:
        """One row per message, sorted by start, then the other columns from the left.

        `dst` is a column of integers where every message goes point to point, else of text: members joined by `|`.
        """
        return self._messages

    @property
    def memory(self) -> Table[MemoryRow]:
        """Memory of each device by category: the size from each time on, one row per change."""
        return self._memory

    @property
    def rounds(self) -> Table[RoundRow] | None:
        """One row per round and device, of a run whose workers do not wait for updates; else None."""
        return self._rounds

    @property
    def exchanges(self) -> Table[ExchangeRow] | None:
        """One row per exchange of the ranks of a group, stage and kind of task; None where no group shares tasks."""
        rows = self.summary().get("exchanges")
        try:
            return None if rows is None else exchange_table(rows)
        except (TypeError, KeyError):
            raise RequestError("exchanges", f"of this trace's summary are no table; {_WRITE_AGAIN}") from None

    @property
    def in_slots(self) -> bool:
        """Whether times are slots and sizes stage-activations; else they are seconds and bytes."""
        return bool(self.tasks["start"].dtype.kind == "i")

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        return self._summary

    @property
    def devices(self) -> int:
        """The number of devices."""
        return int(self._figure("devices"))

    @property
    def makespan(self) -> Any:
        """The time at which the last task ends: a number of slots, or seconds."""
        return self._figure("makespan")

    @property
    def bubble(self) -> float:
        """The share of the lanes' time in which they are idle, in the steady state."""
        return float(self._figure("bubble"))

    @property
    def peak_memory(self) -> list[dict[str, int]]:
        """The peak memory of each device, by category and in total; the last is not their sum."""
        return list(self._figure("peak_memory"))

    def _figure(self, name: str) -> Any:
        try:
            return self.summary()[name]
        except KeyError:
            raise RequestError(name, "is not in this trace's summary; measure it in its tables") from None

    def frame(self, table: str = "tasks") -> "pd.DataFrame":
        """Return the tasks, the messages or the memory as a DataFrame of pandas, with the columns of their files.

        >>> from cdpsim import simulate
        >>> frame = simulate("gpipe", 2, steps=1).frame("messages")
        >>> frame.groupby("content")["size"].sum().to_dict()
        {'activation': 2, 'activation_gradient': 2}
        """
        found: Table[Any] = getattr(self, choose("table", table, TABLES))
        return found.frame()

    def plot(self, what: str = "timeline", ax: "Axes | None" = None, **settings: Any) -> "Figure":
        """Return a picture: timeline, memory, traffic, versions, steps or snapshot; in the axes `ax`, their figure.

        Settings are those of the picture, such as `colour` of a timeline (kind, micro-batch, stage), `runs` of steps or
        `slot` of a snapshot, and of its look, such as `width` or `dark`. In axes, they are those of matplotlib's lines.
        """
        from cdpsim.draw.plots import draw_traces

        return draw_traces(what, [self], ax, **settings)

    def _repr_html_(self) -> str:
        from cdpsim.draw.text import run_html

        return run_html(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        same = self is other or all(getattr(self, table) == getattr(other, table) for table in TABLES)
        return same and self.summary() == other.summary()

    __hash__ = None  # type: ignore[assignment]  # as of all that is equal by its arrays

    def __repr__(self) -> str:
        name = self.request.get("schedule")
        rows = ", ".join(f"{counted(len(getattr(self, table)), 'row')} of {table}" for table in TABLES)
        return f"{type(self).__name__}({one_line(str(name), 60) + ': ' if name else ''}{rows})"

    def save(
        self,
        directory: str | Path,
        *,
        force: bool = False,
        more: Mapping[str, Iterable[str]] = MappingProxyType({}),
    ) -> None:
        """Write tasks.csv, messages.csv, memory.csv, summary.json, and the files `more`, into a folder: all or none.

        A run of rounds has rounds.csv, too, and one of groups of ranks exchanges.csv. summary.json comes last, and
        `load` refuses a folder without it. The runs.csv, rounds.csv and exchanges.csv of an earlier trace are removed.
        """
        files: dict[str, Iterable[str | bytes]] = {f"{name}.csv": table_text(getattr(self, name)) for name in TABLES}
        files |= {} if self.rounds is None else {ROUNDS: table_text(self.rounds)}
        files |= {} if self.exchanges is None else {EXCHANGES: table_text(self.exchanges)}
        files |= {**more, SEAL: [summary_text(self.summary())]}
        written_before = {RUNS: RUNS_HEADER, ROUNDS: ROUNDS_HEADER, EXCHANGES: EXCHANGES_HEADER}
        obsolete = [
            name
            for name, header in written_before.items()
            if name not in files and _has_header(Path(directory) / name, header)
        ]
        write_folder(directory, files, force=force, obsolete=obsolete)


def summary_text(summary: Mapping[str, Any]) -> str:
    """Return the text of summary.json."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=1).decode() + "\n"


def load(directory: str | Path) -> Trace:
    """Load the trace that `Trace.save` wrote into a folder."""
    folder = Path(directory)
    path = folder / SEAL
    if not path.exists() and any((folder / name).exists() for name in FILES):
        raise RequestError(str(path), f"is missing, so the trace was not written to its end; {_WRITE_AGAIN} (--force)")
    tables = {
        name: _read_table(folder / f"{name}.csv", header, WIDER_TABLES.get(name)) for name, header in TABLES.items()
    }
    if _has_header(folder / ROUNDS, ROUNDS_HEADER):
        tables["rounds"] = _read_table(folder / ROUNDS, RoundRow._fields)
    rows = sum(len(next(iter(table.values()))) for table in tables.values())
    for name, table in tables.items():
        _check(folder / f"{name}.csv", table, rows)
    try:
        summary = msgspec.json.decode(read_text(path, largest_bytes=_LARGEST_FILE), type=dict)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(str(path), f"not a summary: {error}; {_WRITE_AGAIN}") from None
    return Trace(**_by_one_clock(tables), summary=summary)


def load_counts(path: str | Path) -> list[list[int]]:
    """Return the micro-batches in a rounds.csv: a row for each round, a column for each device."""
    table = _read_table(Path(path), RoundRow._fields)
    shape = int(table["round"].max(initial=-1)) + 1, int(table["device"].max(initial=-1)) + 1
    size = len(table["round"])
    numbers = np.indices(shape).reshape(2, -1) if np.prod(shape) == size > 0 else None
    if numbers is None or not np.array_equal(numbers, [table["round"], table["device"]]):
        problem = "has not each device of each round in a row, in their order"
        raise RequestError(str(path), f"{problem}; take the {ROUNDS} of a trace as it is")
    counts: list[list[int]] = table["micro_batches"].reshape(shape).tolist()
    return counts


def _has_header(path: Path, header: str) -> bool:
    """Tell a file that this package wrote from a user's file of that name, by its first line."""
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as opened:
        return opened.readline(len(header)) == header
    return False


def _check(path: Path, table: Columns, rows: int) -> None:
    """Refuse a table that no run has: an end before its start, or numbers far beyond the rows of all tables."""
    for name in ("stage", "micro_batch", "step", "device", "src"):
        most = int(table[name].max(initial=0)) if name in table else 0
        if most > rows + _MOST_MISSING:
            raise RequestError(str(path), f"{name} {most} is far beyond its {rows} rows; number them from 0 on")
    if "start" in table and (table["end"] < table["start"]).any():
        row = int((table["end"] < table["start"]).argmax())
        raise RequestError(str(path), f"line {row + 2} ends before it starts; {_WRITE_AGAIN}")


def _by_one_clock(tables: Mapping[str, Columns]) -> dict[str, Columns]:
    """Return tables whose times are seconds in all columns if any column has seconds; else they are slots."""
    clock = np.result_type(*(table[name].dtype for table in tables.values() for name in _TIMES if name in table))
    return {
        key: {name: column.astype(clock, copy=False) if name in _TIMES else column for name, column in table.items()}
        for key, table in tables.items()
    }


def table_text(table: Table[Any]) -> Iterator[bytes]:
    """Yield the text of a CSV file, some rows at a time.

    Encoding rows as JSON and removing its punctuation is twice as fast as writing cell by cell; no text in these
    columns has punctuation of its own.
    """
    yield (",".join(table.keys()) + "\n").encode()
    encode = msgspec.json.Encoder().encode
    for low in progress(range(0, len(table), _ROWS_OF_A_CHUNK), "write"):
        part = [_cells(name, column[low : low + _ROWS_OF_A_CHUNK]) for name, column in table.items()]
        rows = encode(list(zip(*part, strict=True)))
        yield rows[2:-2].replace(b"],[", b"\n").replace(b'"', b"").replace(b"null", b"") + b"\n"


def _cells(name: str, column: np.ndarray) -> list[object]:
    """Return the cells of a column, None for one that is empty in its file."""
    cells: list[object] = column.tolist()
    if name in _OPTIONAL and (column < 0).any():
        return [None if cell == -1 else cell for cell in cells]
    return cells


def _read_table(path: Path, header: tuple[str, ...], other: tuple[str, ...] | None = None) -> Columns:
    """Read a CSV file of that header, or of the `other`, into columns, some rows at a time."""
    lines = read_text(path, largest_bytes=_LARGEST_FILE).splitlines()
    if other is not None and lines[0] == ",".join(other):
        header = other
    if lines[0] != ",".join(header):
        raise RequestError(
            str(path), f"its header is {lines[0][:100]!r} instead of {','.join(header)!r}; {_WRITE_AGAIN}"
        )
    starts = range(1, max(len(lines), 2), _ROWS_OF_A_CHUNK)
    parts = [_parse_rows(path, header, lines[low : low + _ROWS_OF_A_CHUNK], low + 1) for low in starts]
    return {name: _concatenate([part[name] for part in parts]) for name in header}


def _parse_rows(path: Path, header: tuple[str, ...], lines: list[str], first: int) -> Columns:
    """Return some rows of a file as columns; `first` is the number of the first line."""
    width = len(header)
    for number, line in enumerate(lines, start=first):
        if (cells := line.count(",") + 1) != width:
            raise RequestError(str(path), f"line {number} has {cells} cells instead of {width}; {_WRITE_AGAIN}")
    row_cells = ",".join(lines).split(",") if lines else []
    columns = {}
    for c, name in enumerate(header):
        column = row_cells[c::width]
        values = {cell: _parse_cell(name, cell) for cell in set(column)}  # most cells are there many times
        if None in values.values():
            wrong = next(k for k, cell in enumerate(column) if values[cell] is None)
            raise RequestError(str(path), f"line {first + wrong}: {name} is {column[wrong][:40]!r}; {_WRITE_AGAIN}")
        kind = object if any(isinstance(value, str) for value in values.values()) else None if column else np.int64
        columns[name] = np.array([values[cell] for cell in column], dtype=kind)
        if name in _WORDS:
            columns[name] = _WORDS[name][columns[name]]
    return columns


def _parse_cell(name: str, cell: str) -> int | float | str | None:
    """Return the value of a cell, of a word its number; None if it cannot belong into that column."""
    if name in _WORDS:
        return _NUMBER_OF_WORD[name].get(cell)
    if _INTEGER.fullmatch(cell) and (name not in _FLAGS or cell in ("0", "1")):
        return int(cell)
    if (name in _OPTIONAL and not cell) or (name == "step" and cell == "-1"):
        return -1
    if name in _TIMES and _DECIMAL.fullmatch(cell) and isfinite(float(cell)):
        return float(cell)
    return cell if name == "dst" and _MEMBERS.fullmatch(cell) else None


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    """Return one column of its parts; destinations are all text if some are."""
    if any(part.dtype == object for part in parts):
        parts = [np.array([str(cell) for cell in part.tolist()], dtype=object) for part in parts]
    return np.concatenate(parts)

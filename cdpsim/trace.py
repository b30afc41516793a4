"""The columns of a run, and the files that they are saved in and loaded from."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import cached_property
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from cdpsim.collectives import Algorithm
from cdpsim.columns import Ints
from cdpsim.costs import Times
from cdpsim.errors import RequestError
from cdpsim.files import read_text, write_folder
from cdpsim.metrics import communication, memory, staleness, utilisation
from cdpsim.program import Category, Content, Kind, Op
from cdpsim.progress import progress
from cdpsim.runs import Run
from cdpsim.units import said
from cdpsim.version import __version__

Columns = Mapping[str, np.ndarray]

TASKS = ("kind", "stage", "micro_batch", "step", "device", "start", "end", "version", "stale")
MESSAGES = (
    *("op", "content", "stage", "micro_batch", "step"),
    *("src", "dst", "size", "start", "end", "rounds"),
)
MEMORY = ("device", "category", "time", "size")
TABLES = {"tasks": TASKS, "messages": MESSAGES, "memory": MEMORY}
SEAL = "summary.json"  # is written last, so that the other files of its folder are whole
FILES = (*(f"{name}.csv" for name in TABLES), SEAL)
RUNS, RUNS_HEADER = "runs.csv", "run,makespan,period\n"  # beside them, where there were many runs
_WHOLE = re.compile("[0-9]{1,18}")
_TIME = re.compile(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")
_MEMBERS = re.compile(r"[0-9]+(\|[0-9]+)*")
_REMEDY = "write the trace again"
_LARGEST_BYTES = 2**34
_MAY_BE_NONE = {"micro_batch", "stage", "src"}  # -1 in these columns, nothing in their files
_ROWS_AT_ONCE = 50_000
_TIMES = ("start", "end", "time")
_MOST_MISSING = 100_000  # pictures and exports give a row to each number, whether it is there or not


def _names(kinds: type[IntEnum]) -> np.ndarray:
    return np.array([member.name if kinds is Kind else member.name.lower() for member in kinds])


_WORDS = {"kind": Kind, "op": Op, "content": Content, "category": Category}
_NUMBERS = {name: {word: k for k, word in enumerate(_names(kinds).tolist())} for name, kinds in _WORDS.items()}


class Trace:
    """What a run shows, under the names of the files' columns; `run` is None for a trace that was loaded."""

    def __init__(self, run: Run | None) -> None:
        self.run = run

    @cached_property
    def tasks(self) -> Columns:
        """One row per task, sorted by start, device, kind (U, F, B, W), step, micro_batch, stage."""
        program, start, end = self._run.program, self._run.start, self._run.end
        tasks, count, order = program.tasks, len(program.tasks), self.task_nodes
        stale = staleness.stale(program, start, end)
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
        messages, start, end = program.messages, *(column[program.message_nodes] for column in self._times)
        single, order = messages.op == Op.P2P, self.message_nodes - first
        columns = {name: getattr(messages, name)[order] for name in MESSAGES[2:8]}
        columns["stage"] = np.maximum(columns["stage"], -1)
        columns["op"] = _names(Op)[messages.op[order]]
        columns["content"] = _names(Content)[messages.content[order]]
        if not single.all():
            groups = ["|".join(map(str, members.tolist())) for members in program.groups]
            pairs = zip(single[order].tolist(), columns["dst"].tolist(), strict=True)
            columns["dst"] = np.array([str(to) if one else groups[to] for one, to in pairs], dtype=object)
        columns["start"], columns["end"] = start[order], end[order]
        columns["rounds"] = self._run.costs.rounds[order]
        return {name: columns[name] for name in MESSAGES}

    @property
    def _times(self) -> tuple[Times, Times]:
        return self._run.start, self._run.end

    @cached_property
    def task_nodes(self) -> Ints:
        """The program's node behind each row of `tasks`."""
        tasks, start = self._run.program.tasks, self._run.start[: len(self._run.program.tasks)]
        return np.lexsort((tasks.stage, tasks.micro_batch, tasks.step, tasks.kind, tasks.device, start))

    @cached_property
    def message_nodes(self) -> Ints:
        """The program's node behind each row of `messages`."""
        program, first = self._run.program, len(self._run.program.tasks)
        messages, start, end = program.messages, *(column[program.message_nodes] for column in self._times)
        dst, together = messages.dst.copy(), messages.op != Op.P2P
        dst[together] = _places(program.groups)[dst[together]]
        stage = np.maximum(messages.stage, -1)
        by = (messages.op, messages.content, stage, messages.micro_batch, messages.step, messages.src, dst)
        return first + np.lexsort((self._run.costs.rounds, end, messages.size, *by[::-1], start))

    @property
    def algorithms(self) -> list[Algorithm | None] | None:
        """What each row of `messages` runs by, where the trace has its run; None of a row point to point."""
        if self.run is None or not len(self.run.costs.runs_by):
            return None
        known: list[Algorithm | None] = [*self.run.costs.algorithms, None]
        rows = self.message_nodes - len(self.run.program.tasks)
        return [known[number] for number in self.run.costs.runs_by[rows].tolist()]

    @property
    def request(self) -> Mapping[str, Any]:
        """What was asked for; of a loaded trace anything that its file says, or nothing."""
        asked = self._summary.get("request") if self.run is None else self.run.request
        return asked if isinstance(asked, Mapping) else {}

    @property
    def in_slots(self) -> bool:
        """Whether times are slots and sizes stages' worth; else they are seconds and bytes."""
        start = self.tasks["start"] if self.run is None else self.run.start
        return bool(start.dtype.kind == "i")

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
        names = [*(category.name.lower() for category in Category), "total"]
        sent = [said(size) if self.in_slots else float(size) for size in communication.bytes_sent(program, run.costs)]
        hosts = [] if run.on_hosts is None else run.on_hosts.tolist()
        offloaded = {"host_memory": [{"device": device, "bytes": size} for device, size in enumerate(hosts)]}
        apart: dict[str, Any] = {"mismatched": staleness.mismatched(program)} if program.versions_differ else {}
        apart |= {"untied": [list(stages) for stages in program.untied]} if program.untied else {}
        return {
            "cdpsim": __version__,
            "request": dict(run.request),
            "devices": program.devices,
            "tasks": len(program.tasks),
            "messages": len(program.messages),
            "makespan": utilisation.makespan(program, run.end),
            "period": said(run.at_rest.period),
            "period_is": run.at_rest.period_is,
            "bubble": run.at_rest.bubble,
            "idle_of_run": utilisation.idle_share(program, run.start, run.end, run.costs.calendar),
            "mean_staleness": run.at_rest.staleness,
            **apart,
            "peak_memory": [
                {"device": device} | dict(zip(names, row, strict=True)) for device, row in enumerate(run.peaks.tolist())
            ],
            "bytes_sent": [{"device": device, "bytes": size} for device, size in enumerate(sent)],
        } | (offloaded if hosts else {})

    @property
    def _run(self) -> Run:
        assert self.run is not None, "a loaded trace has its columns from its files"
        return self.run

    def save(
        self,
        directory: str | Path,
        *,
        force: bool = False,
        more: Mapping[str, Iterable[str]] = MappingProxyType({}),
    ) -> None:
        """Write tasks.csv, messages.csv, memory.csv, summary.json, and `more`, into a folder, whole or not at all.

        summary.json comes last, and `load` refuses a folder without it. The runs.csv of an earlier trace is removed.
        """
        files: dict[str, Iterable[str | bytes]] = {f"{name}.csv": _lines(getattr(self, name)) for name in TABLES}
        files |= more
        obsolete = [RUNS] if RUNS not in more and _is_of_runs(Path(directory) / RUNS) else []
        write_folder(directory, files | {SEAL: self._summary_text()}, force=force, obsolete=obsolete)

    def _summary_text(self) -> Iterator[str]:
        yield msgspec.json.format(msgspec.json.encode(self.summary()), indent=1).decode() + "\n"


def load(directory: str | Path) -> Trace:
    """Load what `Trace.save` wrote."""
    trace = Trace(None)
    path = Path(directory) / SEAL
    if not path.exists() and any((Path(directory) / name).exists() for name in FILES):
        raise RequestError(str(path), f"is missing, so the trace was not written to its end; {_REMEDY} (--force)")
    tables = {name: _read(Path(directory) / f"{name}.csv", header) for name, header in TABLES.items()}
    rows = sum(len(table[header[0]]) for table, header in zip(tables.values(), TABLES.values(), strict=True))
    for name, table in tables.items():
        _check(Path(directory) / f"{name}.csv", table, rows)
    trace.__dict__.update(_by_one_clock(tables))
    try:
        summary = msgspec.json.decode(read_text(path, largest_bytes=_LARGEST_BYTES), type=dict)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(str(path), f"not a summary: {error}; {_REMEDY}") from None
    trace.__dict__["_summary"] = summary
    return trace


def _is_of_runs(path: Path) -> bool:
    """Tell a runs.csv of ours from a user's file of that name."""
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as opened:
        return opened.readline(len(RUNS_HEADER)) == RUNS_HEADER
    return False


def _check(path: Path, table: Columns, rows: int) -> None:
    """Refuse what no run has: an end before its start, and numbers so large that most of those below are not there."""
    for name in ("stage", "micro_batch", "step", "device", "src"):
        most = int(table[name].max(initial=0)) if name in table else 0
        if most > rows + _MOST_MISSING:
            raise RequestError(str(path), f"{name} {most} is far beyond its {rows} rows; number them from 0 on")
    if "start" in table and (table["end"] < table["start"]).any():
        row = int((table["end"] < table["start"]).argmax())
        raise RequestError(str(path), f"line {row + 2} ends before it starts; {_REMEDY}")


def _by_one_clock(tables: Mapping[str, Columns]) -> dict[str, Columns]:
    """Times as seconds in all columns if they are so in one; else they are slots."""
    clocks = [table[name].dtype for table in tables.values() for name in _TIMES if name in table]
    one = np.result_type(*clocks)
    return {
        key: {name: column.astype(one, copy=False) if name in _TIMES else column for name, column in table.items()}
        for key, table in tables.items()
    }


def _places(groups: Sequence[Ints]) -> Ints:
    """Where each group stands when they are sorted by their members."""
    ranked = sorted(range(len(groups)), key=lambda group: groups[group].tolist())
    places = np.empty(len(groups), dtype=np.int64)
    places[ranked] = np.arange(len(groups))
    return places


def _lines(columns: Columns) -> Iterator[bytes]:
    """The text of a CSV file, some rows at a time.

    Encoding rows as JSON and taking its punctuation away is twice as fast as writing cell by cell; no text in
    these columns has punctuation of its own.
    """
    yield (",".join(columns) + "\n").encode()
    encode = msgspec.json.Encoder().encode
    for low in progress(range(0, len(next(iter(columns.values()))), _ROWS_AT_ONCE), "write"):
        part = [_cells(name, column[low : low + _ROWS_AT_ONCE]) for name, column in columns.items()]
        rows = encode(list(zip(*part, strict=True)))
        yield rows[2:-2].replace(b"],[", b"\n").replace(b'"', b"").replace(b"null", b"") + b"\n"


def _cells(name: str, column: np.ndarray) -> list[object]:
    cells: list[object] = column.tolist()
    if name in _MAY_BE_NONE and (column < 0).any():
        return [None if cell == -1 else cell for cell in cells]
    return cells


def _read(path: Path, header: tuple[str, ...]) -> Columns:
    lines = read_text(path, largest_bytes=_LARGEST_BYTES).splitlines()
    if lines[0] != ",".join(header):
        raise RequestError(str(path), f"its header is {lines[0][:100]!r} instead of {','.join(header)!r}; {_REMEDY}")
    starts = range(1, max(len(lines), 2), _ROWS_AT_ONCE)
    parts = [_parse_rows(path, header, lines[low : low + _ROWS_AT_ONCE], low + 1) for low in starts]
    return {name: _join([part[name] for part in parts]) for name in header}


def _parse_rows(path: Path, header: tuple[str, ...], lines: list[str], first: int) -> Columns:
    """Some rows of a file as columns; `first` is the number of the first line."""
    width = len(header)
    for number, line in enumerate(lines, start=first):
        if line.count(",") != width - 1:
            found = line.count(",") + 1
            raise RequestError(str(path), f"line {number} has {found} cells instead of {width}; {_REMEDY}")
    cells = ",".join(lines).split(",") if lines else []
    columns = {}
    for c, name in enumerate(header):
        column = cells[c::width]
        values = {cell: _value(name, cell) for cell in set(column)}  # most cells are there many times
        if None in values.values():
            wrong = next(k for k, cell in enumerate(column) if values[cell] is None)
            raise RequestError(str(path), f"line {first + wrong}: {name} is {column[wrong][:40]!r}; {_REMEDY}")
        kind = object if any(isinstance(value, str) for value in values.values()) else None if column else np.int64
        columns[name] = np.array(list(map(values.__getitem__, column)), dtype=kind)
        if name in _WORDS:
            columns[name] = _names(_WORDS[name])[columns[name]]
    return columns


def _value(name: str, cell: str) -> int | float | str | None:
    """What a cell says, a word as its number; None if it cannot belong into that column."""
    if name in _WORDS:
        return _NUMBERS[name].get(cell)
    if _WHOLE.fullmatch(cell) and (name != "stale" or cell in ("0", "1")):
        return int(cell)
    if (name in _MAY_BE_NONE and not cell) or (name == "step" and cell == "-1"):
        return -1
    if name in _TIMES and _TIME.fullmatch(cell) and isfinite(float(cell)):
        return float(cell)
    return cell if name == "dst" and _MEMBERS.fullmatch(cell) else None


def _join(parts: list[np.ndarray]) -> np.ndarray:
    """One column of its parts; destinations are all text if some are."""
    if any(part.dtype == object for part in parts):
        parts = [np.array(list(map(str, part.tolist())), dtype=object) for part in parts]
    return np.concatenate(parts)

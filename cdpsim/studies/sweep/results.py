"""The results of a sweep: how far it is, and a row for each point that is done, as columns and as files."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from cdpsim.errors import RequestError, one_line
from cdpsim.files.tables import as_csv
from cdpsim.files.writing import check_writable, write_file
from cdpsim.studies.sweep.points import Sweep, SweepPart, value_key
from cdpsim.studies.sweep.questions import find_question
from cdpsim.studies.sweep.store import DONE, FAILED, REFUSED, RETRY, RowFile, Store, opened_study, row_of

_ROWS_AT_ONCE = 10_000
_FIRST_FAILURES = 3
_RECENT_SECONDS = 120  # a file that is older is of a process that ended


@dataclass
class StudyStatus:
    """How far a sweep is: its points, how they ended, failures by reason, the first ones, and the rate at present."""

    points: int = 0
    done: int = 0
    refused: int = 0
    failed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)
    rate: float = 0.0
    damaged: list[str] = field(default_factory=list)

    @property
    def to_do(self) -> int:
        """The number of points that are to do."""
        return self.points - self.done - self.refused - self.failed


def study_status(folder: Path, part: SweepPart = (1, 1)) -> StudyStatus:
    """Return how far the sweep in a folder is, or a part of it."""
    sweep, store = opened_study(folder)
    status = StudyStatus(damaged=store.damaged)
    reasons: Counter[str] = Counter()
    for index in sweep.of_part(part):
        status.points += 1
        name = sweep.name(index)
        if name in store:
            kind, why = store.outcome(name)
            status.done += kind == DONE
            status.refused += kind == REFUSED
            status.failed += kind == FAILED
            if kind == FAILED:
                reasons[one_line(why)] += 1
                if len(status.first) < _FIRST_FAILURES:
                    status.first.append(f"{sweep.words(index)}: {why}")
    status.reasons = dict(sorted(reasons.items()))
    status.rate = _present_rate(store) if status.to_do else 0.0
    return status


def _present_rate(store: Store) -> float:
    """Return how many points per second the processes do that write into a folder, by the times of their files."""
    rate, now = 0.0, time.time()
    for path, rows in store.rows_of.items():
        begun, written = path.stem.rpartition("-")[2], path.stat().st_mtime
        if begun.isdecimal() and now - written < _RECENT_SECONDS:
            rate += rows / max(written - int(begun) / 1e9, 1.0)
    return rate


def retry_failures(folder: Path) -> int:
    """Forget the failures of a sweep, so that the next run tries these points again; return their number."""
    failures = opened_study(folder)[1].failures()
    if failures:
        with RowFile(folder) as rows:
            for name, count in failures:
                rows.append(row_of(name, RETRY, count))
    return len(failures)


def table_of(folder: Path) -> dict[str, list[Any]]:
    """Return the results of a sweep as columns."""
    return _result_columns(*_table(*opened_study(folder)))


def _result_columns(names: list[str], rows: Iterable[list[Any]]) -> dict[str, list[Any]]:
    every = list(rows)
    return {name: [row[k] for row in every] for k, name in enumerate(names)}


def _table(sweep: Sweep, store: Store) -> tuple[list[str], Iterator[list[Any]]]:
    """Return columns, the axes, the results that are no axes, why a point has none; and the rows of points in order."""
    axes = {word for axis in sweep.axes for word in (axis.of, axis.name)}
    columns = find_question(sweep.what).columns
    kept = [k for k, name in enumerate(columns) if name not in axes]

    def rows() -> Iterator[list[Any]]:
        for index in sweep.in_file_order():
            name = sweep.name(index)
            if name in store:
                kind, value = store.outcome(name)
                values = [value_key(each) if isinstance(each, list | dict) else each for each in sweep.values(index)]
                cells = [value[k] if kind == DONE else None for k in kept]
                yield [*values, *cells, *(value if kind == each else None for each in (REFUSED, FAILED))]

    return [*(axis.name for axis in sweep.axes), *(columns[k] for k in kept), REFUSED, FAILED], rows()


def write_table(folder: Path, path: str | Path, *, force: bool = False) -> tuple[int, int]:
    """Write the results of a sweep into a .csv, .jsonl or .parquet file; return the numbers of rows and of points."""
    ending = Path(path).suffix.lower()
    if ending not in TABLE_FORMS:
        raise RequestError(str(path), f"its form is unknown; end its name in {', '.join(TABLE_FORMS)}")
    check_writable(path, force=force)
    sweep, store = opened_study(folder)
    write_file(path, TABLE_FORMS[ending](*_table(sweep, store)), force=force)
    return sum(sweep.name(index) in store for index in sweep.in_file_order()), sweep.count


def _csv_chunks(columns: list[str], rows: Iterator[list[Any]]) -> Iterator[str]:
    yield as_csv(columns, [])
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        yield as_csv(columns, chunk).partition("\n")[2]


def _json_lines(columns: list[str], rows: Iterator[list[Any]]) -> Iterator[bytes]:
    return (msgspec.json.encode(dict(zip(columns, row, strict=True))) + b"\n" for row in rows)


def _parquet_chunks(columns: list[str], rows: Iterator[list[Any]]) -> Iterator[bytes]:
    """Yield the bytes of a Parquet file, whose rows are in memory as columns."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        problem = "is not installed, and writes .parquet; pip install 'cdpsim[parquet]', or write .csv"
        raise RequestError("pyarrow", problem) from None
    file = pyarrow.BufferOutputStream()
    arrays = {name: pyarrow.array(_of_one_type(cells)) for name, cells in _result_columns(columns, rows).items()}
    parquet.write_table(pyarrow.table(arrays), file)
    yield file.getvalue().to_pybytes()


def _of_one_type(values: list[Any]) -> list[Any]:
    """Return the cells of a column as values of one type: floats for numbers, and texts for numbers beside texts."""
    kinds = {type(value) for value in values} - {type(None)}
    if len(kinds) < 2:
        return values
    convert = float if kinds == {int, float} else str
    return [None if value is None else convert(value) for value in values]


TABLE_FORMS: dict[str, Callable[[list[str], Iterator[list[Any]]], Iterable[str | bytes]]] = {
    ".csv": _csv_chunks,
    ".jsonl": _json_lines,
    ".parquet": _parquet_chunks,
}

"""The results of a sweep: a row for each point that is done, in the order of points, as columns and as files."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from cdpsim.errors import RequestError
from cdpsim.files.tables import as_csv
from cdpsim.files.writing import check_writable, write_file
from cdpsim.studies.sweep.points import Points, SweepPart, SweepPlan, value_key
from cdpsim.studies.sweep.questions import completed, find_question
from cdpsim.studies.sweep.store import DONE, FAILED, PARTS, REFUSED, RETRY, Segment, Store, head_of, load_study, row_of

TABLE_ENDINGS = (".csv", ".jsonl", ".parquet")
_TableForm = Callable[[list[str], Iterator[list[Any]]], Iterable[str | bytes]]
_ROWS_AT_ONCE = 10_000
_RECENT_SECONDS = 120  # a segment whose log is older than that is of a process that ended


@dataclass
class StudyStatus:
    """How far a sweep is: its points, how they ended, the failures by reason, and the rate of running processes."""

    points: int
    done: int = 0
    refused: int = 0
    failed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    rate: float = 0.0
    damaged: list[str] = field(default_factory=list)

    @property
    def to_do(self) -> int:
        """The number of points that are to do."""
        return self.points - self.done - self.refused - self.failed


def study_status(folder: Path, part: SweepPart | None = None) -> StudyStatus:
    """Return how far the sweep in a folder is, or a part of it."""
    store, points = Store(folder), Points(load_study(folder))
    status = StudyStatus(0, rate=rate_of(folder), damaged=store.damaged)
    reasons: Counter[str] = Counter()
    for index in points.of_part(part or SweepPart()):
        status.points += 1
        name = points.name(index)
        if name in store:
            kind, value = store.outcome(name)
            status.done += kind == DONE
            status.refused += kind == REFUSED
            status.failed += kind == FAILED
            if kind == FAILED:
                reasons[value] += 1
    status.reasons = dict(sorted(reasons.items()))
    return status


def failed_points(folder: Path, part: SweepPart, most: int) -> list[str]:
    """Return the first points of a part that failed, each in words with the reason."""
    store, points = Store(folder), Points(load_study(folder))
    failed = {name for name, _ in store.failures()}
    indices = islice((index for index in points.of_part(part) if points.name(index) in failed), most)
    return [f"{points.words(index)}: {store.outcome(points.name(index))[1]}" for index in indices]


def rate_of(folder: Path) -> float:
    """Return how many points per second the processes do that write into a folder, by the times in their logs."""
    rate, now = 0.0, time.time()
    for path in (folder / PARTS).glob("*.log"):
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()[-7:] if line.endswith("}")]
        if lines and lines[-1]["is"] != "ends" and now - lines[-1]["time"] < _RECENT_SECONDS:
            seconds = lines[-1]["time"] - lines[0]["time"]
            rate += (lines[-1]["rows"] - lines[0]["rows"]) / seconds if seconds > 0 else 0.0
    return rate


def retry_failures(folder: Path) -> int:
    """Forget the failures of a sweep, so that the next run tries these points again; return their number."""
    plan = load_study(folder)
    failures = Store(folder).failures()
    with Segment(folder, head_of(plan)) as segment:
        for name, count in failures:
            segment.append(row_of(name, [], RETRY, count))
    return len(failures)


def table_columns(plan: SweepPlan) -> list[str]:
    """Return the columns of a table: the axes, the results that are no axes, and why a point has none."""
    axes = [axis.name for axis in plan.axes]
    options = {axis.of for axis in plan.axes} | {axis.name for axis in plan.axes}
    results = [name for name in find_question(plan.what).columns if name not in options]
    return [*axes, *results, REFUSED, FAILED]


def table_rows(folder: Path) -> Iterator[list[Any]]:
    """Iterate over the rows of all points that are done, in the order of points."""
    plan = load_study(folder)
    store, points, question = Store(folder), Points(plan), find_question(plan.what)
    options = {axis.of for axis in plan.axes} | {axis.name for axis in plan.axes}
    kept = [k for k, name in enumerate(question.columns) if name not in options]
    for index in points.in_file_order():
        name = points.name(index)
        if name not in store:
            continue
        kind, value = store.outcome(name)
        cells = completed(question, value) if kind == DONE else [None] * len(question.columns)
        ends = [value if kind == REFUSED else None, value if kind == FAILED else None]
        axes = (value_key(each) if isinstance(each, list | dict) else each for each in points.values(index))
        yield [*axes, *(cells[k] for k in kept), *ends]


def table_of(folder: Path) -> dict[str, list[Any]]:
    """Return the results of a sweep as columns."""
    columns = table_columns(load_study(folder))
    rows = list(table_rows(folder))
    return {name: [row[k] for row in rows] for k, name in enumerate(columns)}


def check_table(path: str | Path, *, force: bool = False) -> None:
    """Refuse a table that cannot be written, before it is made."""
    ending = Path(path).suffix.lower()
    if ending not in TABLE_ENDINGS:
        raise RequestError(str(path), f"its form is unknown; end its name in {', '.join(TABLE_ENDINGS)}")
    if ending == ".parquet":
        _pyarrow()
    check_writable(path, force=force)


def write_table(folder: Path, path: str | Path, *, force: bool = False) -> tuple[int, int]:
    """Write the results of a sweep into a .csv, .jsonl or .parquet file; return the numbers of rows and of points."""
    check_table(path, force=force)
    ending = Path(path).suffix.lower()
    plan = load_study(folder)
    columns, rows = table_columns(plan), _Counted(table_rows(folder))
    forms: dict[str, _TableForm] = {".csv": _csv_chunks, ".jsonl": _json_chunks, ".parquet": _parquet_chunks}
    write_file(path, forms[ending](columns, rows), force=force)
    return rows.count, Points(plan).count


class _Counted(Iterator[list[Any]]):
    """Rows, of which it is known afterwards how many they were."""

    def __init__(self, rows: Iterator[list[Any]]) -> None:
        self._rows, self.count = rows, 0

    def __next__(self) -> list[Any]:
        row = next(self._rows)
        self.count += 1
        return row


def _csv_chunks(columns: list[str], rows: Iterator[list[Any]]) -> Iterator[str]:
    yield as_csv(columns, [])
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        yield as_csv(columns, chunk).partition("\n")[2]


def _json_chunks(columns: list[str], rows: Iterator[list[Any]]) -> Iterator[bytes]:
    encode = msgspec.json.Encoder().encode
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        yield b"".join(encode(dict(zip(columns, row, strict=True))) + b"\n" for row in chunk)


def _parquet_chunks(columns: list[str], rows: Iterator[list[Any]]) -> Iterator[bytes]:
    """Yield the bytes of a Parquet file, whose rows are in memory as columns."""
    pyarrow = _pyarrow()
    from io import BytesIO

    from pyarrow import parquet

    every = list(rows)
    arrays = {name: _arrow_column(pyarrow, [row[k] for row in every]) for k, name in enumerate(columns)}
    file = BytesIO()
    parquet.write_table(pyarrow.table(arrays), file)
    yield file.getvalue()


def _arrow_column(pyarrow: Any, values: list[Any]) -> Any:
    """Return a column of one type: whole numbers beside others are floats, and numbers beside texts are texts."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= {int, float} and float in kinds:
        return pyarrow.array([None if value is None else float(value) for value in values], pyarrow.float64())
    if len(kinds) > 1:
        return pyarrow.array([None if value is None else str(value) for value in values], pyarrow.string())
    return pyarrow.array(values)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        problem = "is not installed, and writes .parquet; pip install 'cdpsim[parquet]', or write .csv"
        raise RequestError("pyarrow", problem) from None
    return pyarrow

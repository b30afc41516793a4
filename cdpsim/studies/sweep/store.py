"""The folder of a sweep: what is asked, and the rows of the points that are done.

    DIR/sweep.toml      the file as it was read
    DIR/study.json      the sweep with the content of all files that it names
    DIR/rows/*.jsonl    files of rows, each appended to by one process alone

A row is `{"id": ..., "result": [...], "crc": "..."}`, with `refused` or `failed` and a line in the place of the result.
A line that was cut or changed fails its crc and is no row. A row says nothing of when, where or by whom, so a point has
the same bytes everywhere.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from glob import escape
from hashlib import sha256
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import Annotated, Any, Self
from zlib import crc32

import msgspec
from msgspec import Meta

from cdpsim.errors import RequestError
from cdpsim.files.writing import check_writable, read_bytes, write_file
from cdpsim.limits import free_bytes
from cdpsim.studies.sweep.points import NAME_BYTES, Sweep, sweep_of
from cdpsim.studies.sweep.questions import find_question
from cdpsim.version import RESULTS

ROWS, STUDY = "rows", "study.json"
DONE, REFUSED, FAILED, RETRY = "result", "refused", "failed", "retry"
SYNC_ROWS, SYNC_SECONDS = 1000, 1.0
_FOLDER_FORM = 2
_STARTED = time.time_ns()
_CRC_LENGTH = len(',"crc":"00000000"}')


class SavedSweep(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The content of study.json."""

    form: int
    results: int
    sweep: Any
    contents: dict[str, dict[str, Any]]
    crc: str | None = None


_VALUES = {DONE: list[str | int | float | bool | None], REFUSED: str, FAILED: str, RETRY: Annotated[int, Meta(gt=0)]}
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def row_of(name: bytes, kind: str, outcome: Any) -> bytes:
    """Return the line of a row."""
    return _with_crc(msgspec.json.encode({"id": name.hex(), kind: outcome}))


def _with_crc(content: bytes) -> bytes:
    """Return a line: a JSON object with the crc of all before it."""
    return b'%s,"crc":"%08x"}\n' % (content[:-1], crc32(content[:-1]))


def _whole(line: bytes) -> bytes:
    """Return a line, without its end, that was neither cut nor changed; refuse any other."""
    if not line.endswith(b',"crc":"%08x"}' % crc32(line[:-_CRC_LENGTH])):
        raise ValueError("its crc is of another content")
    return line


class RowFile:
    """The file that a thread of this process appends to, open: each row at once, synced every second or 1,000 rows.

    A row that finds no space is taken back, and refused in one line.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / ROWS / f"{gethostname()}-{os.getpid()}-{threading.get_native_id()}-{_STARTED}.jsonl"
        self._unsynced, self._synced = 0, time.monotonic()

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise self._refusal(error) from None
        if end := self._file.tell():
            self._file.seek(end - 1)
            if self._file.read() != b"\n":  # cut since this process wrote it
                self._file.write(b"\n")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            if kind is not RequestError:
                self._sync()

    def append(self, line: bytes) -> None:
        """Append a row."""
        end = self._file.tell()
        try:
            while line:  # a full disk takes a part of it first
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(end)
            raise self._refusal(error) from None
        self._unsynced += 1
        if self._unsynced >= SYNC_ROWS or time.monotonic() - self._synced >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._refusal(error) from None
        self._unsynced, self._synced = 0, time.monotonic()

    def _refusal(self, error: OSError) -> RequestError:
        reason = (error.strerror or str(error)).lower()
        problem = f"{reason}; all rows before are kept: free some space or mend the folder, and give the command again"
        return RequestError(str(self._folder), problem)


def files_of(folder: Path, pid: int) -> list[Path]:
    """Return the files that a process of this machine appends to."""
    return [*(folder / ROWS).glob(f"{escape(gethostname())}-{pid}-*.jsonl")]


def rows_in(path: Path, columns: int, damaged: list[str]) -> Iterator[tuple[bytes, str, bytes]]:
    """Iterate over the rows of a file: the name of the point, how it ended, the line; add damaged lines to a list."""
    start = 0
    for line in read_bytes(path, largest_bytes=free_bytes()).split(b"\n")[:-1]:  # without a line that was cut
        try:
            row = _decode(_whole(line))
            name, kind = bytes.fromhex(row["id"]), [*row][1]
            value = msgspec.convert(row[kind], _VALUES[kind])
            if len(row) != 3 or len(name) != NAME_BYTES or (kind == DONE and len(value) != columns):
                raise ValueError
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            damaged.append(f"{path}, byte {start:,}")
        else:
            yield name, kind, line
        start += len(line) + 1


def outcome_of(line: bytes) -> tuple[str, Any]:
    """Return how the point of a row ended, and its cells or the line that says why it has none."""
    _, outcome, _ = _decode(line).items()
    return outcome


class Store:
    """All rows of a folder: the row of each point, how often points failed, and which lines are damaged.

    A point is done where any row has its result or a refusal. A point that failed is done as long as it was not asked
    to be tried again as often as it failed.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.damaged: list[str] = []
        self.rows_of: Counter[Path] = Counter()  # how many rows a file has
        self._failures: Counter[bytes] = Counter()
        self._done: dict[bytes, tuple[bytes, Path]] = {}
        self._failed: dict[bytes, bytes] = {}
        columns = len(find_question(what).columns)
        for path in sorted((folder / ROWS).glob("*.jsonl")):
            for name, kind, line in rows_in(path, columns, self.damaged):
                self.rows_of[path] += 1
                if kind == RETRY:
                    self._failures[name] -= outcome_of(line)[1]
                elif kind == FAILED:
                    self._failures[name] += 1
                    self._failed.setdefault(name, line)
                else:
                    before, other = self._done.setdefault(name, (line, path))
                    if before != line and outcome_of(before) != outcome_of(line):
                        problem = f"has another result of the point {name.hex()} than {other.name}"
                        raise RequestError(str(path), f"{problem}; simulate it, and delete the file that is wrong")

    def __contains__(self, name: bytes) -> bool:
        return name in self._done or self._failures[name] > 0

    def outcome(self, name: bytes) -> tuple[str, Any]:
        """Return how a point ended, and its cells or the line that says why it has none."""
        return outcome_of(self._done[name][0] if name in self._done else self._failed[name])

    def failures(self) -> list[tuple[bytes, int]]:
        """Return the points that failed, and how often since they were last to be tried again."""
        return [(name, count) for name, count in self._failures.items() if count > 0 and name not in self._done]


def save_study(folder: Path, sweep: Sweep, name: str, text: str) -> None:
    """Write what a sweep is into its folder; go on with one that has more axes or values, refuse another one."""
    if (folder / STUDY).exists():
        _refuse_another(folder, load_study(folder), sweep)
    check_writable(folder, (), force=True).mkdir(exist_ok=True)
    study = _with_crc(msgspec.json.encode(SavedSweep(_FOLDER_FORM, RESULTS, sweep.given, sweep.contents)))
    for file, data in ((folder / name, text.encode()), (folder / STUDY, study)):
        if not file.exists() or file.read_bytes() != data:
            write_file(file, [data], force=True)


def _refuse_another(folder: Path, before: Sweep, now: Sweep) -> None:
    problem = ""
    if before.what != now.what:
        problem = f"what; it asks {before.what}, and this one {now.what}"
    elif differ := [of for of in sorted({*before.fixed, *now.fixed}) if before.fixed.get(of) != now.fixed.get(of)]:
        problem = f"fixed; they differ in {', '.join(differ)}"
    elif differ := [of for of in before.fixed if before.contents.get(of) != now.contents.get(of)]:
        problem = f"content of {', '.join(differ)}"
    if problem:
        raise RequestError(str(folder), f"has a sweep with another {problem}; give another folder")


def load_study(folder: Path, stamp: str | None = None) -> Sweep:
    """Return the sweep of a folder; refuse another one than that with the stamp, where one is given."""
    path = folder / STUDY
    if not path.exists():
        raise RequestError(str(folder), "has no sweep; give the folder that `cdpsim sweep FILE -o DIR` wrote")
    if (folder / ROWS).exists() and not (folder / ROWS).is_dir():
        raise RequestError(str(folder / ROWS), "is no folder of rows; delete it, and all points are to do")
    content = read_bytes(path, largest_bytes=free_bytes(), rewritten=True)
    if stamp is not None and stamp != sha256(content).hexdigest():
        raise RequestError(str(folder), "got another sweep meanwhile; all rows are kept: give the command again")
    try:
        study = msgspec.json.decode(_whole(content.rstrip()), type=SavedSweep)
        if (study.form, study.results) == (_FOLDER_FORM, RESULTS):
            sweep = sweep_of(study.sweep, "sweep", contents=study.contents)
            sweep.stamp = sha256(content).hexdigest()
            return sweep
    except (ValueError, RecursionError) as error:  # RequestError is one
        problem = f"was changed, or is of another version of cdpsim ({error})"
        raise RequestError(str(path), f"{problem}; give the sweep's file again, with another folder") from None
    raise RequestError(str(path), "is of another version of cdpsim, with other results or files; give another folder")


def opened_study(folder: Path) -> tuple[Sweep, Store]:
    """Return the sweep of a folder and its rows."""
    sweep = load_study(folder)
    return sweep, Store(folder, sweep.what)

"""The store of a sweep: segments of lines, each written by one process alone, and what they say together.

    DIR/sweep.toml      the file as it was read
    DIR/study.json      the sweep with the content of all that it names
    DIR/parts/*.jsonl   segments: a head, then a row a line; a cut or changed line fails its crc, and is no row
    DIR/parts/*.log     when a segment had how many rows

A row is `{"id": ..., "point": [...], "result": [...], "crc": "..."}`, with `refused` or `failed` and a line in the
place of the result. It says nothing of when, where or by whom, so a point has the same bytes everywhere.
"""

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import msgspec

from cdpsim.errors import RequestError
from cdpsim.files.writing import write_file
from cdpsim.studies.sweep.points import SweepPlan

PARTS, STUDY = "parts", "study.json"
DONE, REFUSED, FAILED, RETRY = "result", "refused", "failed", "retry"
SYNC_ROWS, SYNC_SECONDS, LOG_SECONDS = 1000, 1.0, 10.0
_CRC = b',"crc":"'
_ID = b'{"id":"'
_CRC_LENGTH = len(_CRC) + 8 + 2
_SEGMENT = 1 << 44  # a place is a segment times this, and the byte at which a row begins
_POINT = b',"point":'


def line_of(content: bytes) -> bytes:
    """Return a line of a segment: a JSON object with the crc of all before it."""
    body = content[:-1]
    return b'%s%s%08x"}\n' % (body, _CRC, crc32(body))


def is_whole(line: bytes) -> bool:
    """Return whether a line, without its end, was neither cut nor changed."""
    body = line[:-_CRC_LENGTH]
    return line[len(body) :] == b'%s%08x"}' % (_CRC, crc32(body))


def row_of(name: bytes, point: Sequence[Any], kind: str, outcome: Any) -> bytes:
    """Return the line of a row."""
    encode = msgspec.json.encode
    text = name.hex().encode()
    return line_of(b'%s%s"%s%s,"%s":%s}' % (_ID, text, _POINT, encode(point), kind.encode(), encode(outcome)))


class Segment:
    """A segment that this process appends to: each row at once, synced every second or 1,000 rows.

    The file is made with the first row. A row that finds no space is taken back, and refused in one line.
    """

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        from socket import gethostname

        started = time.time_ns()
        name = f"{gethostname()}-{os.getpid()}-{threading.get_native_id()}-{started}"
        self.path = folder / PARTS / f"{name}.jsonl"
        self.rows = 0
        self._head, self._file, self._end, self._synced_rows = head, -1, 0, 0
        self._logged = 0.0
        self._closed = threading.Event()
        self._lock = threading.RLock()  # a signal may come while this thread appends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def append(self, line: bytes) -> None:
        """Append a row."""
        with self._lock:
            if self._file < 0:
                self._open()
            self._write(line)
            self.rows += 1
        if self.rows - self._synced_rows >= SYNC_ROWS:
            self.sync()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self._write(line_of(msgspec.json.encode(self._head)))
        self._log("begins")
        threading.Thread(target=self._sync_by_the_clock, daemon=True).start()

    def _write(self, line: bytes) -> None:
        written = 0
        try:
            while written < len(line):  # a full disk takes a part of it first
                written += write_bytes(self._file, line[written:])
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise no_space(self.path.parent.parent, error) from None
        self._end += len(line)

    def sync(self) -> None:
        """Write what was appended to the disk."""
        with self._lock:
            if self._file >= 0 and self._synced_rows < self.rows:
                rows = self.rows
                try:
                    os.fsync(self._file)
                except OSError as error:
                    raise no_space(self.path.parent.parent, error) from None
                self._synced_rows = rows

    def _sync_by_the_clock(self) -> None:
        while not self._closed.wait(SYNC_SECONDS):
            try:
                self.sync()
                if time.time() - self._logged >= LOG_SECONDS:
                    self._log("has")
            except RequestError:  # the next row finds that, too
                return

    def _log(self, what: str) -> None:
        self._logged = time.time()
        record = {"time": round(self._logged, 3), "rows": self.rows, "is": what}
        try:
            with self.path.with_suffix(".log").open("a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")
        except OSError:  # a log that is not written loses no row
            return

    def close(self) -> None:
        """Write all to the disk, and end the segment."""
        self._closed.set()
        if self._file < 0:
            return
        try:
            self.sync()
        finally:
            self._log("ends")
            os.close(self._file)
            self._file = -1


write_bytes: Callable[[int, bytes], int] = os.write


def no_space(folder: Path, error: OSError) -> RequestError:
    """Return the refusal of a row that the disk did not take."""
    reason = (error.strerror or str(error)).lower()
    return RequestError(str(folder), f"{reason}; all rows before are kept: free some space, and give the command again")


_NOTHING = msgspec.Raw()


class _Row(msgspec.Struct):
    """A row of a segment, its parts as they are written."""

    id: str
    point: msgspec.Raw
    result: msgspec.Raw = _NOTHING
    refused: msgspec.Raw = _NOTHING
    failed: msgspec.Raw = _NOTHING
    retry: int = 0


_decode_row = msgspec.json.Decoder(_Row).decode


class Store:
    """All rows of a folder: where the row of each point is, how often points failed, and which lines are damaged.

    A point is done where any row has its result or a refusal. A point that failed is done as long as it was not asked
    to be tried again as often as it failed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.segments = sorted((folder / PARTS).glob("*.jsonl"))
        self.damaged: list[str] = []
        self._done: dict[bytes, int] = {}
        self._failed: dict[bytes, int] = {}
        self._failures: dict[bytes, int] = {}
        self._contents: list[mmap.mmap | bytes] = []
        for number, path in enumerate(self.segments):
            self._read(number, path)

    def _read(self, number: int, path: Path) -> None:
        with path.open("rb") as opened:
            is_empty = os.fstat(opened.fileno()).st_size == 0
            content = b"" if is_empty else mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._contents.append(content)
        start, stop = 0, content.find(b"\n")
        while stop >= 0:
            line = content[start:stop]
            if not is_whole(line):
                self.damaged.append(f"{path}, byte {start:,}")
            elif start:  # the first line is the head
                self._take(line, number * _SEGMENT + start)
            start, stop = stop + 1, content.find(b"\n", stop + 1)

    def _take(self, line: bytes, place: int) -> None:
        row = _decode_row(line)
        name = bytes.fromhex(row.id)
        if row.retry:
            self._failures[name] = self._failures.get(name, 0) - row.retry
        elif bytes(row.failed):
            self._failures[name] = self._failures.get(name, 0) + 1
            self._failed.setdefault(name, place)
        elif self._done.setdefault(name, place) != place:
            self._refuse_conflict(row, self._done[name], place)

    def _refuse_conflict(self, row: _Row, first: int, second: int) -> None:
        """Refuse two rows of a point that differ: results depend on nothing but the request."""
        before = self._row(first)
        if (bytes(before.result), bytes(before.refused)) != (bytes(row.result), bytes(row.refused)):
            paths = self.segments[first // _SEGMENT], self.segments[second // _SEGMENT]
            problem = f"has another result of the point {row.id} than {paths[0].name}"
            raise RequestError(str(paths[1]), f"{problem}; simulate it, and delete the segment that is wrong")

    def _row(self, place: int) -> _Row:
        content, start = self._contents[place // _SEGMENT], place % _SEGMENT
        return _decode_row(content[start : content.find(b"\n", start)])

    def __len__(self) -> int:
        return len(self._done)

    def __contains__(self, name: bytes) -> bool:
        return name in self._done or self._failures.get(name, 0) > 0

    def outcome(self, name: bytes) -> tuple[str, Any]:
        """Return how a point ended, and its cells or the line that says why it has none."""
        row = self._row(self._done[name] if name in self._done else self._failed[name])
        for kind in (DONE, REFUSED, FAILED):
            if value := bytes(getattr(row, kind)):
                return kind, msgspec.json.decode(value)
        raise AssertionError(row)

    def failures(self) -> list[tuple[bytes, int]]:
        """Return the points that failed, and how often since they were last to be tried again."""
        return [(name, count) for name, count in self._failures.items() if count > 0 and name not in self._done]


def names_in(path: Path) -> dict[bytes, str]:
    """Return the names of the points in a segment, each with how it ended."""
    try:
        lines = path.read_bytes().split(b"\n")[1:-1]  # without its head, and a line that was cut
    except FileNotFoundError:
        return {}
    rows = [_decode_row(line) for line in lines if is_whole(line)]
    return {
        bytes.fromhex(row.id): DONE if bytes(row.result) else REFUSED if bytes(row.refused) else FAILED for row in rows
    }


def head_of(plan: SweepPlan) -> dict[str, Any]:
    """Return the head of a segment: what its rows have."""
    return {"what": plan.what, "results": plan.results, "axes": [axis.of for axis in plan.axes]}


def save_study(folder: Path, plan: SweepPlan, name: str, text: str) -> None:
    """Write what a sweep is into its folder; go on with one that has more axes or values, refuse another one."""
    path = folder / STUDY
    content = encoded_plan(plan)
    before = None
    if path.exists():
        before = load_study(folder)
        for fact in ("what", "fixed", "results"):
            if getattr(before, fact) != getattr(plan, fact):
                raise RequestError(str(folder), f"has a sweep with another {fact}; {_remedy(before, plan, fact)}")
        if _fixed_contents(before) != _fixed_contents(plan):
            problem = "has a sweep of another model, cluster or file of that name"
            raise RequestError(str(folder), f"{problem}; give another folder, or the file as it was")
    if folder.exists() and not folder.is_dir():
        raise RequestError(str(folder), "is a file, and rows go into a folder; give another name")
    if not folder.parent.is_dir():
        raise RequestError(str(folder), f"there is no folder {str(folder.parent)!r}; create it first")
    for file, data in ((folder / name, text.encode()), (path, content)):
        if not file.exists() or file.read_bytes() != data:
            folder.mkdir(exist_ok=True)
            write_file(file, [data], force=True)


def _remedy(before: SweepPlan, plan: SweepPlan, name: str) -> str:
    if name == "results":
        return "this version of cdpsim gives other results; give another folder"
    if name == "what":
        return f"it asks {before.what}, and this one {plan.what}; give another folder"
    differ = sorted(
        option
        for option in before.fixed.keys() | plan.fixed.keys()
        if before.fixed.get(option, ...) != plan.fixed.get(option, ...)
    )
    return f"they differ in {', '.join(differ)}; give another folder"


def _fixed_contents(plan: SweepPlan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for of, value in plan.fixed.items():
        key = value if isinstance(value, str) else None
        if key is not None:
            found[of] = (plan.contents.get(of, {}).get(key), plan.files.get(of, {}).get(key, [""])[-1])
    return found


def load_study(folder: Path, stamp: str | None = None) -> SweepPlan:
    """Return the sweep of a folder; refuse another one than that with the stamp, where one is given."""
    path = folder / STUDY
    try:
        content = path.read_bytes()
    except OSError:
        raise RequestError(str(folder), "has no sweep; give the folder that `cdpsim sweep FILE -o DIR` wrote") from None
    if stamp is not None and stamp_of(content) != stamp:
        raise RequestError(str(folder), "got another sweep meanwhile; all rows are kept: give the command again")
    try:
        return msgspec.json.decode(content, type=SweepPlan)
    except msgspec.DecodeError as error:
        problem = f"was changed ({error}); give the sweep's file again, with another folder"
        raise RequestError(str(path), problem) from None


def stamp_of(content: bytes) -> str:
    """Return what tells a saved sweep from others."""
    return sha256(content).hexdigest()


def encoded_plan(plan: SweepPlan) -> bytes:
    """Return a plan as it is saved."""
    return msgspec.json.encode(plan, order="sorted") + b"\n"

"""The store of sweeps: no cut or changed byte is taken for a row, failures can be tried again, conflicts are found."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import cdpsim
from cdpsim import RequestError
from cdpsim.studies.sweep.results import retry_failures, study_status, table_of
from cdpsim.studies.sweep.running import run_part
from cdpsim.studies.sweep.store import RowFile, Store, load_study, row_of
from cdpsim.version import RESULTS
from tests.conftest import Command
from tests.helpers.sweeps import MICRO_BATCHES, STAGES, saved


class Here(Executor):
    """An executor that calls at once, in this process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def done(tmp_path: Path) -> Path:
    """A folder with a sweep of eighteen points that is done, in one file."""
    saved(tmp_path / "sweep")
    run_part(tmp_path / "sweep", executor=Here())
    return tmp_path / "sweep"


def file_of(folder: Path) -> Path:
    (path,) = (folder / "rows").glob("*.jsonl")
    return path


def store_of(folder: Path) -> Store:
    return Store(folder, "compare")


def names_of(folder: Path) -> list[bytes]:
    """The names of the rows of a file, in their order."""
    return [bytes.fromhex(json.loads(line)["id"]) for line in file_of(folder).read_bytes().splitlines()]


def test_a_row_is_json_and_says_nothing_of_where_or_when(done: Path) -> None:
    lines = file_of(done).read_bytes().splitlines()
    assert [*json.loads(lines[0])] == ["id", "result", "crc"]
    assert len(lines) == 18
    assert max(map(len, lines)) <= 400


@pytest.mark.parametrize("seed", range(2))
def test_a_cut_file_loses_at_most_what_follows_the_cut(done: Path, seed: int) -> None:
    """A hundred bytes at which it is cut, drawn."""
    names, path = names_of(done), file_of(done)
    content = path.read_bytes()
    ends = [k + 1 for k, byte in enumerate(content) if byte == ord("\n")]
    draw = random.Random(seed)
    for cut in [0, 1, len(content) - 1, len(content), *draw.sample(range(len(content)), 96)]:
        path.write_bytes(content[:cut])
        store = store_of(done)
        assert [name in store for name in names] == [end <= cut for end in ends]
        assert not store.damaged


@pytest.mark.parametrize("seed", range(2))
def test_a_changed_byte_is_found_and_costs_its_row_alone(done: Path, seed: int) -> None:
    """Or the row behind it, too, where the end of a line is changed."""
    names, path = names_of(done), file_of(done)
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    draw = random.Random(seed)
    for place in draw.sample(range(len(content) - 1), 50):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        store = store_of(done)
        line = next(k for k in range(len(lines)) if place < sum(map(len, lines[: k + 1])))
        missing = [k for k, name in enumerate(names) if name not in store]
        is_end = content[place] == ord("\n")
        assert missing == [k for k in (line, line + 1) if k == line or is_end]
        assert store.damaged
        assert str(path) in store.damaged[0]


def test_what_a_cut_has_lost_is_done_again_to_the_same_table(done: Path) -> None:
    table, path = table_of(done), file_of(done)
    path.write_bytes(path.read_bytes()[:3000])
    before = study_status(done).done
    assert run_part(done, executor=Here())["result"] == 18 - before > 0
    assert table_of(done) == table


def test_damaged_lines_are_said(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(done)
    path.write_bytes(path.read_bytes().replace(b"1f1b", b"2f2b", 1))
    assert run_part(done, executor=Here()) == {"result": 1}
    assert "1 damaged line is no row: " in capsys.readouterr().err


def test_two_rows_of_a_point_that_differ_are_an_error_that_names_both_files(done: Path) -> None:
    first = file_of(done)
    second = first.with_name("other.jsonl")
    line = first.read_bytes().splitlines(keepends=True)[0]
    row = json.loads(line)
    assert row_of(bytes.fromhex(row["id"]), "result", row["result"]) == line
    second.write_bytes(line)
    assert study_status(done).done == 18
    row["result"][3] += 1
    second.write_bytes(row_of(bytes.fromhex(row["id"]), "result", row["result"]))
    with pytest.raises(RequestError, match="has another result of the point") as refused:
        store_of(done)
    assert first.name in str(refused.value)
    assert second.name in str(refused.value)


def test_a_failure_is_forgotten_as_often_as_it_is_to_be_tried_again(tmp_path: Path) -> None:
    name = saved(tmp_path).name((0, 0, 0))
    for reason in ("killed by signal 9", "MemoryError: "):
        with RowFile(tmp_path) as rows:
            rows.append(row_of(name, "failed", reason))
    assert study_status(tmp_path).failed == 1
    assert name in store_of(tmp_path)
    assert retry_failures(tmp_path) == 1
    assert name not in store_of(tmp_path)
    assert retry_failures(tmp_path) == 0
    with RowFile(tmp_path) as rows:
        rows.append(row_of(name, "failed", "again"))
    assert name in store_of(tmp_path)
    assert run_part(tmp_path, executor=Here()) == {"result": 17}
    retry_failures(tmp_path)
    assert run_part(tmp_path, executor=Here()) == {"result": 1}
    assert study_status(tmp_path).done == 18


class FullDisk:
    """A file on a disk that takes some bytes, and then nothing."""

    def __init__(self, file: Any, space: int) -> None:
        self.file, self.space = file, space

    def write(self, data: bytes) -> int:
        if not self.space:
            raise OSError(errno.ENOSPC, "No space left on device")
        written: int = self.file.write(data[: self.space])
        self.space -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> None:
        self.file.__enter__()

    def __exit__(self, *_: object) -> None:
        self.file.__exit__()


def test_a_row_that_finds_no_space_is_taken_back_in_one_line(tmp_path: Path) -> None:
    """The disk takes a part of it."""
    row = row_of(bytes(16), "refused", "no")
    with pytest.raises(RequestError) as refused, RowFile(tmp_path) as rows:
        rows.append(row)
        rows._file = FullDisk(rows._file, 10)  # type: ignore[assignment]
        rows.append(row)
    assert str(refused.value).startswith(f"{tmp_path}: no space left on device; all rows before are kept: free some")
    assert file_of(tmp_path).read_bytes() == row


def test_a_disk_that_cannot_sync_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RequestError, match="input/output error; all rows before are kept"):
        run_part(tmp_path, executor=Here())


def test_rows_are_synced_after_a_thousand_and_after_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    now, k = 0.0, 0
    monkeypatch.setattr("cdpsim.studies.sweep.store.time.monotonic", lambda: now)
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(k))
    with RowFile(tmp_path) as rows:
        for k in range(1, 2501):
            now = 2.0 if k > 2100 else 0.0
            rows.append(row_of(bytes(16), "refused", "no"))
    assert synced == [1000, 2000, 2101, 2500]


def test_a_folder_takes_more_values_and_axes_and_keeps_its_points(done: Path) -> None:
    axes = {"schedule": ["1f1b", "dualpipe-v"], "m": MICRO_BATCHES, "n": [8, *STAGES]}
    assert saved(done, {"axes": axes}).count == 16
    assert run_part(done, executor=Here()).total() == 16 - 6
    status = study_status(done)
    assert (status.done + status.refused, status.to_do) == (16, 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"fixed": {"steps": 5}}, "has a sweep with another fixed; they differ in steps; give another folder"),
        ({"what": "pyramid"}, "has a sweep with another what; it asks compare, and this one pyramid"),
    ],
)
def test_another_sweep_in_a_folder_is_refused(done: Path, content: dict[str, Any], words: str) -> None:
    axes = {"schedule": ["1f1b"], "n": [4]}
    with pytest.raises(RequestError, match=words):
        saved(done, {"axes": axes, **content})


def test_another_file_of_the_same_name_is_refused(toy: Path) -> None:
    content = {"fixed": {"model": str(toy / "toy.toml"), "schedule": "1f1b"}, "axes": {"m": [3]}}
    saved(toy / "sweep", content)
    (toy / "toy.toml").write_text((toy / "toy.toml").read_text() + "samples = 3\n")
    with pytest.raises(RequestError, match="has a sweep with another content of model; give another folder"):
        saved(toy / "sweep", content)


@pytest.mark.parametrize("change", [(f'"results":{RESULTS}', '"results":0'), ('"form":2', '"form":1')])
def test_a_folder_of_another_version_is_refused(done: Path, change: tuple[str, str]) -> None:
    study = done / "study.json"
    study.write_bytes(line_of(study.read_text().replace(*change).rpartition(',"crc"')[0].encode()))
    with pytest.raises(RequestError, match="is of another version of cdpsim"):
        saved(done)


def test_inputs_are_those_of_the_beginning(tmp_path: Path) -> None:
    """Files of an order, a rule, a model and a cluster are another one, or gone, when their points are asked."""
    texts = {"s.csv": "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "r.csv": "0,0\n0,0\n"}
    texts["m.toml"] = '[[stages]]\nrepeat = 2\nforward = "1 s"\nbackward = "2 s"\nboundary = "1 GB"\n'
    texts["c.toml"] = '[link]\nbandwidth = "1 GB/s"\n'
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    names = {name: str(tmp_path / name) for name in texts}
    fixed = {"n": 2, "model": names["m.toml"], "cluster": names["c.toml"]}
    together = [{"schedule": [names["s.csv"], "multi-cdp"], "rule": ["dp", names["r.csv"]]}]
    for folder in ("first", "second"):
        saved(tmp_path / folder, {"fixed": fixed, "together": together})
    run_part(tmp_path / "first", executor=Here())
    for name in texts:
        (tmp_path / name).write_text("another")
    (tmp_path / "s.csv").unlink()
    run_part(tmp_path / "second", executor=Here())
    table = table_of(tmp_path / "first")
    assert table == table_of(tmp_path / "second")
    assert table["refused"] == [None] * 2
    assert table["step"][0] == 2 * 1 + 2 * 2 + 1 + 2 + 2  # two micro-batches, the other stage, two messages


@pytest.mark.parametrize(("text", "words"), [(None, "has no sweep"), ('{"what":', "was changed")])
def test_a_folder_without_a_sweep_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "study.json").write_text(text)
    with pytest.raises(RequestError, match=words):
        load_study(tmp_path)


def test_rows_that_are_no_folder_are_refused(tmp_path: Path) -> None:
    cdpsim.study({"n": [2, 4]}, {"schedule": "1f1b"}, tmp_path / "sweep", workers=1)
    rows = tmp_path / "sweep" / "rows"
    shutil.rmtree(rows)
    rows.write_text("")
    with pytest.raises(RequestError, match=r"rows: is no folder of rows"):
        study_status(tmp_path / "sweep")


def line_of(body: bytes) -> bytes:
    """A line with the right crc, whatever is before it."""
    return b'%s,"crc":"%08x"}\n' % (body, crc32(body))


def odd_rows(name: bytes) -> list[bytes]:
    """Rows that no sweep writes, of a point, each with its right crc."""
    hexed = name.hex().encode()
    bodies = [
        b"",
        b"{",
        b"[1",
        b'"',
        b'{"id":3',
        b'{"id":"xyz","refused":"no"',
        b'{"id":"00","refused":"no"',
        b"\xff\xfe",
    ]
    ends = [
        b"",
        b',"result":[1]',
        b',"result":{}',
        b',"failed":{"a":1}',
        b',"failed":[]',
        b',"refused":3',
        b',"retry":-1',
    ]
    ends += [
        b',"retry":1e999',
        b',"retry":0',
        b',"result":[' + b"[" * 9999,
        b',"refused":"a","failed":"b"',
        b',"other":1',
    ]
    ends += [
        b',"result":null',
        b',"refused":"\xff"',
        b',"result":[' + b"1e999," * 36 + b"1]",
        b',"result":"' + b"9" * 400,
    ]
    return [line_of(body) for body in (*bodies, *(b'{"id":"' + hexed + b'"' + end for end in ends))]


def change_rows(folder: Path, draw: random.Random) -> None:
    """Cut the file of rows, flip or replace bytes of it, or add odd rows."""
    path = file_of(folder)
    content = bytearray(path.read_bytes())
    name = bytes.fromhex(json.loads(content.splitlines()[0])["id"])
    kind = draw.randrange(5)
    place = draw.randrange(len(content))
    if kind == 0:
        del content[place:]
    elif kind == 1:
        content[place] ^= 1 << draw.randrange(8)
    elif kind == 2:
        content[place : place + 9] = draw.randbytes(draw.randrange(20))
    elif kind == 3:
        content += draw.choice(odd_rows(name))
    else:  # an odd row alone, or rows of points that the sweep does not have
        foreign = row_of(draw.randbytes(16), draw.choice(["refused", "failed"]), "\x1b[31m\n")
        content[:] = draw.choice([*odd_rows(name), foreign])
    path.write_bytes(content)


def change_study(folder: Path, draw: random.Random) -> None:
    """Cut study.json, flip or replace bytes of it, or give one of its tables another value."""
    path = folder / "study.json"
    content = bytearray(path.read_bytes())
    kind, place = draw.randrange(4), draw.randrange(len(content))
    if kind == 0:
        del content[place:]
    elif kind == 1:
        content[place] ^= 1 << draw.randrange(8)
    elif kind == 2:
        content[place : place + 3] = draw.randbytes(3)
    else:
        record = json.loads(content)
        thousand = {"from": 1, "to": 1000, "step": 1}
        many = dict.fromkeys(("n", "m", "chunks", "replicas", "shard", "seed", "steps", "prefetch"), thousand)
        odd: Any = draw.choice([None, 3, [], {}, "x", [[]], {"a": {"b": 1}}, 10**400, {"values": []}, [{}], [{"n": 7}]])
        table = draw.choice([record, record["sweep"], record["sweep"].get("axes", {})])
        if draw.random() < 0.1:
            record["sweep"] = {"fixed": {"schedule": "1f1b"}, "axes": many}  # 10^24 points
        else:
            table[draw.choice([*table])] = odd
        del record["crc"]
        content[:] = line_of(json.dumps(record).encode()[:-1])
    path.write_bytes(content)


def change_folder(folder: Path, draw: random.Random) -> None:
    """Put what is no file of rows in its place, or beside it, or in the place of study.json."""
    path = draw.choice([file_of(folder), folder / "rows" / "other.jsonl", folder / "study.json", folder / "rows"])
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    makers: list[Callable[[Path], object]] = [os.mkfifo, Path.mkdir, Path.touch, lambda p: p.symlink_to("/dev/zero")]
    draw.choice(makers)(path)


@pytest.mark.skipif(os.name != "posix", reason="makes pipes")
@pytest.mark.parametrize("change", [change_rows, change_study, change_folder])
@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_folder_ends_in_a_line_that_names_the_file_or_has_points_to_do(
    done: Path, tmp_path: Path, command: Command, change: Callable[[Path, random.Random], None], seed: int
) -> None:
    """Ten times; by every action, and by a run."""
    table, study = table_of(done), (done / "study.json").read_bytes()
    draw = random.Random(seed)
    for number in range(10):
        folder = tmp_path / f"damaged{number}"
        shutil.copytree(done, folder)
        change(folder, draw)
        for action in ("status", "table", "retry"):
            output = ["-o", str(tmp_path / "t.csv"), "--force"] if action == "table" else []
            said = command("sweep", action, folder, *output)
            assert said.code in (0, 1, 2)
            if said.code == 2:
                assert said.err.count("\n") == 1, said.err
                assert str(folder) in said.err
        try:
            run_part(folder, executor=Here())
        except RequestError as error:
            assert str(folder) in str(error)
        else:
            assert len(table_of(folder)["step"]) == load_study(folder).count
            if (folder / "study.json").read_bytes() == study:
                assert table_of(folder) == table


def test_every_bit_of_a_study_is_checked(done: Path) -> None:
    """A hundred of them, drawn."""
    path, draw = done / "study.json", random.Random(1)
    content = path.read_bytes()
    for place in draw.sample(range(len(content) - 1), 100):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(RequestError, match=r"study\.json: was changed"):
            load_study(done)


def test_a_copy_of_the_folder_is_the_same_sweep(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done, tmp_path / "copy")
    assert table_of(tmp_path / "copy") == table_of(done)


def test_threads_of_one_pool_serve_a_sweep(tmp_path: Path, done: Path) -> None:
    saved(tmp_path / "threads")
    with ThreadPoolExecutor(2) as pool:
        assert run_part(tmp_path / "threads", executor=pool) == {"result": 18}
    assert table_of(tmp_path / "threads") == table_of(done)


def test_a_file_is_no_folder_of_rows(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("mine")
    with pytest.raises(RequestError, match="rows: is a file; give a folder"):
        cdpsim.study({"n": [2]}, {"schedule": "1f1b"}, tmp_path / "rows")
    assert (tmp_path / "rows").read_text() == "mine"

"""The store of sweeps: no cut or changed byte is taken for a row, failures can be tried again, conflicts are found."""

import errno
import json
import os
import random
import shutil
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import cdpsim
from cdpsim import RequestError
from cdpsim.studies.sweep import store as store_module
from cdpsim.studies.sweep.results import retry_failures, study_status, table_of
from cdpsim.studies.sweep.running import run_part
from cdpsim.studies.sweep.store import RETRY, Segment, Store, head_of, load_study, names_in, row_of
from cdpsim.version import RESULTS
from tests.helpers.sweeps import MICRO_BATCHES, SCHEDULES, STAGES, saved


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
    """A folder with a sweep of eighteen points that is done, in one segment."""
    saved(tmp_path / "sweep")
    run_part(tmp_path / "sweep", executor=Here())
    return tmp_path / "sweep"


def segment_of(folder: Path) -> Path:
    (path,) = (folder / "parts").glob("*.jsonl")
    return path


def names_of(folder: Path) -> list[bytes]:
    """The names of the rows of a segment, in their order."""
    lines = segment_of(folder).read_bytes().splitlines()[1:]
    return [bytes.fromhex(json.loads(line)["id"]) for line in lines]


def test_a_row_is_json_and_says_nothing_of_where_or_when(done: Path) -> None:
    lines = segment_of(done).read_bytes().splitlines()
    head, first = json.loads(lines[0]), json.loads(lines[1])
    assert head == {"what": "compare", "results": RESULTS, "axes": ["schedule", "n", "m"], "crc": head["crc"]}
    assert [*first] == ["id", "point", "result", "crc"]
    assert first["point"] in [[*point] for point in product(SCHEDULES, STAGES, MICRO_BATCHES)]
    assert len(lines) == 1 + 18
    assert max(map(len, lines)) <= 400


@pytest.mark.parametrize("seed", range(2))
def test_a_cut_segment_loses_at_most_what_follows_the_cut(done: Path, seed: int) -> None:
    """A hundred bytes at which it is cut, drawn."""
    names, path = names_of(done), segment_of(done)
    content = path.read_bytes()
    ends = [k + 1 for k, byte in enumerate(content) if byte == ord("\n")][1:]
    draw = random.Random(seed)
    for cut in [0, 1, len(content) - 1, len(content), *draw.sample(range(len(content)), 96)]:
        path.write_bytes(content[:cut])
        store = Store(done)
        assert [name in store for name in names] == [end <= cut for end in ends]
        assert not store.damaged


@pytest.mark.parametrize("seed", range(2))
def test_a_changed_byte_is_found_and_costs_its_row_alone(done: Path, seed: int) -> None:
    """Or the row behind it, too, where the end of a line is changed."""
    names, path = names_of(done), segment_of(done)
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    draw = random.Random(seed)
    for place in draw.sample(range(len(content) - 1), 50):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        store = Store(done)
        line = next(k for k in range(len(lines)) if place < sum(map(len, lines[: k + 1])))
        missing = [k + 1 for k, name in enumerate(names) if name not in store]
        is_end = content[place] == ord("\n")
        assert missing == [k for k in (line, line + 1) if k and (k == line or is_end)]
        assert store.damaged
        assert str(path) in store.damaged[0]


def test_what_a_cut_has_lost_is_done_again_to_the_same_table(done: Path) -> None:
    table, path = table_of(done), segment_of(done)
    path.write_bytes(path.read_bytes()[:3000])
    before = len(Store(done))
    counts = run_part(done, executor=Here())
    assert counts.result == 18 - before > 0
    assert table_of(done) == table


def test_damaged_lines_are_said(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = segment_of(done)
    path.write_bytes(path.read_bytes().replace(b"1f1b", b"2f2b", 1))
    assert run_part(done, executor=Here()).result == 1
    assert "1 damaged line is no row: " in capsys.readouterr().err


def test_two_rows_of_a_point_that_differ_are_an_error_that_names_both_files(done: Path) -> None:
    first = segment_of(done)
    second = first.with_name("other.jsonl")
    lines = first.read_bytes().splitlines(keepends=True)
    row = json.loads(lines[1])
    again = row_of(bytes.fromhex(row["id"]), row["point"], "result", row["result"])
    assert again == lines[1]
    second.write_bytes(lines[0] + again)
    assert len(Store(done)) == 18
    row["result"][3] += 1
    second.write_bytes(lines[0] + row_of(bytes.fromhex(row["id"]), row["point"], "result", row["result"]))
    with pytest.raises(RequestError, match="has another result of the point") as refused:
        Store(done)
    assert first.name in str(refused.value)
    assert second.name in str(refused.value)


def test_a_failure_is_forgotten_as_often_as_it_is_to_be_tried_again(tmp_path: Path) -> None:
    points = saved(tmp_path)
    name, plan = points.name((0, 0, 0)), load_study(tmp_path)
    for reason in ("killed by signal 9", "MemoryError: "):
        with Segment(tmp_path, head_of(plan)) as segment:
            segment.append(row_of(name, ["gpipe", 2, 4], "failed", reason))
    assert study_status(tmp_path).failed == 1
    assert name in Store(tmp_path)
    assert retry_failures(tmp_path) == 1
    assert name not in Store(tmp_path)
    assert retry_failures(tmp_path) == 0
    with Segment(tmp_path, head_of(plan)) as segment:
        segment.append(row_of(name, ["gpipe", 2, 4], "failed", "again"))
    assert name in Store(tmp_path)
    assert run_part(tmp_path, executor=Here()).result == 17
    retry_failures(tmp_path)
    assert run_part(tmp_path, executor=Here()).result == 1
    assert study_status(tmp_path).done == 18
    assert b'"retry":2' in b"".join(path.read_bytes() for path in (tmp_path / "parts").glob("*.jsonl"))
    assert RETRY == "retry"


def test_no_space_ends_in_one_line_and_nothing_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes a part of a row, and then nothing."""
    saved(tmp_path)
    space = 3000

    def write(file: int, data: bytes) -> int:
        nonlocal space
        if not space:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.write(file, data[:space])
        space -= written
        return written

    monkeypatch.setattr(store_module, "write_bytes", write)
    with pytest.raises(RequestError) as refused:
        run_part(tmp_path, executor=Here())
    assert str(refused.value).startswith(f"{tmp_path}: no space left on device; all rows before are kept: free some")
    content = segment_of(tmp_path).read_bytes()
    assert content.endswith(b"\n")
    assert content.count(b"\n") == 1 + len(Store(tmp_path)) > 3
    monkeypatch.undo()
    run_part(tmp_path, executor=Here())
    assert study_status(tmp_path).done == 18


def test_a_disk_that_cannot_sync_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RequestError, match="input/output error; all rows before are kept"):
        run_part(tmp_path, executor=Here())


def test_rows_are_synced_after_a_thousand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(store_module, "SYNC_SECONDS", 3600.0)
    points = saved(tmp_path)
    with Segment(tmp_path, head_of(load_study(tmp_path))) as segment:
        monkeypatch.setattr(os, "fsync", lambda _: synced.append(segment.rows))
        for k in range(2500):
            segment.append(row_of(points.name((0, 0, 0)), [k], "refused", "no"))
    assert synced == [1000, 2000, 2500]


def test_a_segment_without_rows_is_no_file(tmp_path: Path) -> None:
    saved(tmp_path)
    with Segment(tmp_path, head_of(load_study(tmp_path))):
        pass
    assert not list(tmp_path.glob("parts/*"))


def test_rows_of_a_worker_that_died_are_told_by_how_they_ended(tmp_path: Path) -> None:
    """The folder is made with the first row; a row that was cut when the worker died is none."""
    outcomes = {b"one": ("result", [1]), b"two": ("refused", "no"), b"three": ("failed", "killed")}
    rows = [row_of(name, [], kind, outcome) for name, (kind, outcome) in outcomes.items()]
    with Segment(tmp_path / "sweep", {}) as segment:
        assert names_in(segment.path) == {}
        for row in [*rows, row_of(b"four", [], "result", [4])[:-9]]:
            segment.append(row)
    assert names_in(segment.path) == {b"one": "result", b"two": "refused", b"three": "failed"}


def test_a_folder_takes_more_values_and_axes_and_keeps_its_points(done: Path) -> None:
    axes = {"schedule": ["1f1b", "dualpipe-v"], "m": MICRO_BATCHES, "n": [8, *STAGES]}
    points = saved(done, {"axes": axes})
    assert points.count == 16
    assert run_part(done, executor=Here()).all == 16 - 6
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
    with pytest.raises(RequestError, match="of another model, cluster or file of that name"):
        saved(toy / "sweep", content)


def test_results_of_another_version_are_refused(done: Path) -> None:
    study = done / "study.json"
    study.write_text(study.read_text().replace(f'"results":{RESULTS}', '"results":0'))
    with pytest.raises(RequestError, match="this version of cdpsim gives other results"):
        saved(done)


@pytest.mark.parametrize(("text", "words"), [(None, "has no sweep"), ('{"what":', "was changed")])
def test_a_folder_without_a_sweep_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "study.json").write_text(text)
    with pytest.raises(RequestError, match=words):
        load_study(tmp_path)


def test_a_copy_of_the_folder_is_the_same_sweep(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done, tmp_path / "copy")
    assert table_of(tmp_path / "copy") == table_of(done)


def test_threads_of_one_pool_serve_a_sweep(tmp_path: Path, done: Path) -> None:
    saved(tmp_path / "threads")
    with ThreadPoolExecutor(2) as pool:
        assert run_part(tmp_path / "threads", executor=pool).result == 18
    assert table_of(tmp_path / "threads") == table_of(done)


def test_a_file_is_no_folder_of_rows(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("mine")
    with pytest.raises(RequestError, match="is a file, and rows go into a folder"):
        cdpsim.study({"n": [2]}, {"schedule": "1f1b"}, tmp_path / "rows")
    assert (tmp_path / "rows").read_text() == "mine"

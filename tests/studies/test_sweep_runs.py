"""Runs of sweeps: the same table as a plain loop, by any workers, in any parts, through any deaths."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cdpsim
from cdpsim import RequestError, Study
from cdpsim.studies.sweep import questions, running
from cdpsim.studies.sweep.results import study_status, write_table
from cdpsim.studies.sweep.running import Outcomes, run_part
from cdpsim.studies.sweep.store import Store, load_study
from tests.helpers.sweeps import (
    FILE,
    InThisProcess,
    begin_and_end,
    begin_poisoned,
    begin_with_little_room,
    saved,
    serial_rows,
    shown,
)

NEEDS_PROCESSES = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their ids")


def csv_of(folder: Path) -> str:
    """The CSV table of a sweep."""
    write_table(folder, folder / "table.csv", force=True)
    return (folder / "table.csv").read_text()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The table of the helpers' sweep, by one worker."""
    folder = tmp_path_factory.mktemp("one")
    saved(folder)
    run_part(folder, workers=1)
    return csv_of(folder)


@pytest.mark.slow
def test_a_table_has_the_metrics_of_a_loop_over_evaluate(table: str) -> None:
    assert shown(table) == serial_rows()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(7, marks=pytest.mark.long)])
def test_more_workers_make_the_same_bytes(table: str, tmp_path: Path, count: int) -> None:
    saved(tmp_path)
    assert run_part(tmp_path, workers=count) == {"result": 18}
    assert csv_of(tmp_path) == table


def test_parts_in_any_order_make_the_same_bytes(table: str, tmp_path: Path) -> None:
    saved(tmp_path)
    order = list(range(1, 14))
    random.Random(5).shuffle(order)
    done = [run_part(tmp_path, (k, 13), executor=InThisProcess()).total() for k in order]
    assert sum(done) == 18
    assert csv_of(tmp_path) == table
    assert run_part(tmp_path, executor=InThisProcess()) == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.long) for seed in ("0", "1")), "random"])
def test_the_seed_of_hashes_changes_no_byte(table: str, tmp_path: Path, seed: str) -> None:
    saved(tmp_path)
    program = "import sys; from cdpsim.studies.sweep.running import run_part; run_part(sys.argv[1], workers=1)"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=True, capture_output=True)
    assert csv_of(tmp_path) == table


def test_so_many_points_at_most_are_done_and_the_next_run_goes_on(table: str, tmp_path: Path) -> None:
    saved(tmp_path)
    for done in (5, 10, 15, 18):
        run_part(tmp_path, limit=5, executor=InThisProcess())
        assert study_status(tmp_path).done == done
    assert csv_of(tmp_path) == table


@pytest.mark.slow
@NEEDS_PROCESSES
def test_a_point_that_ends_every_worker_fails_and_the_others_do_not(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "begin_worker", partial(begin_poisoned, 4, "zb-h1", 8))
    saved(tmp_path)
    assert run_part(tmp_path, workers=2) == {"result": 17, "failed": 1}
    status = study_status(tmp_path)
    assert (status.done, status.failed, status.reasons) == (17, 1, {"killed by signal 9": 1})
    assert status.first == ["schedule=zb-h1, n=4, m=8: killed by signal 9"]
    *others, last = csv_of(tmp_path).splitlines()
    assert others == table.splitlines()[:-1]
    assert last.startswith("zb-h1,4,8,,")
    assert last.endswith(",killed by signal 9")
    assert run_part(tmp_path, workers=1) == {}


@pytest.mark.slow
@NEEDS_PROCESSES
def test_a_worker_that_dies_once_costs_nothing(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "died"
    monkeypatch.setattr(running, "begin_worker", partial(begin_poisoned, 3, once=str(marker)))
    saved(tmp_path)
    assert run_part(tmp_path, workers=2) == {"result": 18}
    assert marker.exists()
    assert csv_of(tmp_path) == table


@pytest.mark.slow
def test_workers_that_cannot_begin_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "begin_worker", begin_and_end)
    saved(tmp_path)
    with pytest.raises(RequestError, match=r"workers: end before they begin \(exit code 3\)"):
        run_part(tmp_path, workers=2)


@pytest.mark.slow
@NEEDS_PROCESSES
def test_a_worker_that_dies_between_blocks_is_replaced(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    receive = running._Crew._receive

    def receive_and_kill(crew: Any, future: Any) -> int:
        slot = receive(crew, future)
        if not killed:
            (process,) = crew._executors[slot]._processes.values()
            process.kill()
            process.join()
            time.sleep(0.5)  # until its pool knows
            killed.append(slot)
        return slot

    monkeypatch.setattr(running._Crew, "_receive", receive_and_kill)
    saved(tmp_path)
    assert run_part(tmp_path, workers=1) == {"result": 18}
    assert csv_of(tmp_path) == table


def test_workers_that_cannot_start_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor.submit", fail)
    saved(tmp_path)
    with pytest.raises(
        RequestError, match=r"workers: cannot be started \(Resource temporarily unavailable\); give fewer"
    ):
        run_part(tmp_path, workers=2)


def test_a_worker_of_another_sweep_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(RequestError, match="got another sweep meanwhile"):
        running.answer_block(str(tmp_path), "another", [], 1)


@pytest.mark.slow
@NEEDS_PROCESSES
def test_a_worker_without_space_ends_the_sweep_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows before are kept, and none is torn."""
    monkeypatch.setattr(running, "begin_worker", begin_with_little_room)
    saved(tmp_path)
    with pytest.raises(RequestError, match="file too large; all rows before are kept: free some space"):
        run_part(tmp_path, workers=1)
    status = study_status(tmp_path)
    assert 0 < status.done < 18
    assert not status.damaged
    (path,) = tmp_path.glob("rows/*")
    assert path.read_bytes().count(b"\n") == status.done


@pytest.mark.slow
def test_a_script_that_does_not_expect_it_can_run_workers(tmp_path: Path) -> None:
    """A process of multiprocessing would run such a script again, where it has no `if __name__ == "__main__"`."""
    script = tmp_path / "script.py"
    script.write_text(
        "import cdpsim\n"
        f"found = cdpsim.study({{'n': [2, 4]}}, {{'schedule': '1f1b'}}, {str(tmp_path / 'out')!r}, workers=2)\n"
        "print(found.status().done)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, str(script)], env=environment, check=True, capture_output=True, text=True)
    assert said.stdout == "2\n"


def test_workers_share_the_memory_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A point for which there is too little here may be tried again: elsewhere, or by fewer workers."""
    monkeypatch.setattr("cdpsim.limits._physical_bytes", lambda: 100 * 10**6)
    saved(tmp_path, {"what": "pyramid", "fixed": {"schedule": "multi-cdp"}, "axes": {"n": [100]}})
    stamp = load_study(tmp_path).stamp
    few, _ = running.answer_block(str(tmp_path), stamp, [(0,)], 1)
    many, _ = running.answer_block(str(tmp_path), stamp, [(0,)], 4)
    assert (few, many) == ({"result": 1}, {"failed": 1})
    assert "but 25 MB is free here" in "".join(path.read_text() for path in tmp_path.glob("rows/*"))


def test_a_fault_is_a_failure_of_its_point_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = cdpsim.evaluate

    def faulty(schedule: str, n: int, **options: Any) -> Any:
        if n == 4:
            raise ZeroDivisionError("of\na test")
        return evaluate(schedule, n, **options)

    monkeypatch.setattr(questions, "evaluate", faulty)
    saved(tmp_path)
    assert run_part(tmp_path, executor=InThisProcess()) == {"result": 12, "failed": 6}
    assert study_status(tmp_path).reasons == {r"ZeroDivisionError: of\na test": 6}
    assert study_status(tmp_path).first == [
        rf"schedule={schedule}, n=4, m={m}: ZeroDivisionError: of\na test"
        for schedule, m in (("gpipe", 4), ("gpipe", 8), ("1f1b", 4))
    ]


def test_what_cannot_be_asked_is_a_row_with_its_line(tmp_path: Path) -> None:
    study = cdpsim.study({"n": [3, 4]}, {"schedule": "1f1b", "chunks": 2}, tmp_path, executor=InThisProcess())
    with pytest.raises(RequestError) as refused:
        cdpsim.evaluate("1f1b", 3, chunks=2)
    assert study.table()["refused"][0] == str(refused.value)
    assert study.status().refused == 2


def test_a_study_has_its_table_as_columns_and_as_a_frame(tmp_path: Path) -> None:
    study = cdpsim.study(
        {"schedule": ["1f1b"], "n": np.array([2, 4]).tolist()}, {"m": 4}, tmp_path, executor=InThisProcess()
    )
    assert (len(study), repr(study)) == (2, f"Study({str(tmp_path)!r}, 2 points)")
    assert study.table()["bubble"] == [cdpsim.evaluate("1f1b", n, m=4).bubble for n in (2, 4)]
    pytest.importorskip("pandas")
    assert study.to_pandas()["n"].tolist() == [2, 4]
    study.write(tmp_path / "t.jsonl")
    assert json.loads((tmp_path / "t.jsonl").read_text().splitlines()[1])["n"] == 4
    assert Study(tmp_path).table() == study.table()


def test_models_and_clusters_of_python_are_taken_by_their_content(tmp_path: Path) -> None:
    model, cluster = cdpsim.Model.load("gpt2"), cdpsim.Cluster.load("a100-nodes")
    fixed = {"model": model, "cluster": cluster, "schedule": "1f1b"}
    study = cdpsim.study({"n": [2]}, fixed, tmp_path, executor=InThisProcess())
    assert study.table()["step"] == [cdpsim.evaluate("1f1b", 2, model=model, cluster=cluster).step]


def test_a_path_sets_a_value_of_a_cluster_s_file(tmp_path: Path) -> None:
    axes = {"bandwidth": {"of": "cluster.topology.network.bandwidth", "values": ["1 GB/s", "20 GB/s"]}}
    fixed = {"model": "gpt2", "cluster": "a100-nodes", "schedule": "1f1b", "n": 14, "m": 4}
    steps = cdpsim.study(axes, fixed, tmp_path, executor=InThisProcess()).table()["step"]
    content: Any = cdpsim.Cluster.load("a100-nodes").to_builtins()
    expected = []
    for bandwidth in axes["bandwidth"]["values"]:
        content["topology"]["network"]["bandwidth"] = bandwidth
        cluster = cdpsim.Cluster.from_builtins(content, "cluster")
        expected.append(cdpsim.evaluate("1f1b", 14, m=4, model="gpt2", cluster=cluster).step)
    assert steps == expected
    assert steps[0] > steps[1]


def test_a_path_sets_a_value_of_a_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"forward": "1 s", "backward": "2 s"}, {"forward": "1 s", "backward": "2 s"}]
    times = {"of": "model.stages.1.forward", "values": ["1 s", "5 s"]}
    fixed = {"schedule": "gpipe", "n": 2, "m": 3, "model": {"stages": rows}}
    steps = cdpsim.study({"times": times}, fixed, tmp_path, executor=InThisProcess()).table()["step"]
    assert steps == [3 + 1 + 3 * 2 + 2, 1 + 3 * 5 + 3 * 2 + 2]  # of two stages that wait for each other


def test_devices_and_a_batch_are_those_of_compare(tmp_path: Path) -> None:
    axes = {"schedule": ["1f1b", "multi-dp", "dp-zero1"], "devices": [8, 16]}
    fixed: dict[str, Any] = {"batch": 256, "model": "gpt2", "cluster": "a100-nodes"}
    study = cdpsim.study(axes, fixed, tmp_path, executor=InThisProcess())
    table = study.table()
    for k, (schedule, devices) in enumerate(zip(table["schedule"], table["devices"], strict=True)):
        if table["refused"][k] is None:
            (row,) = cdpsim.compare(schedule, devices=devices, sort="given", **fixed)
            assert (row.step, row.memory, row.batch) == (table["step"][k], table["memory"][k], table["batch"][k])
    assert table["refused"].count(None) >= 3


@pytest.mark.parametrize(
    ("what", "fixed", "axes", "column", "expected"),
    [
        ("pyramid", {"schedule": "mp-cdp"}, {"n": [3, 4]}, "devices", [6, 10]),
        ("pyramid", {"schedule": "mp-cdp"}, {"n": [4]}, "devices_of_stages", ["4 3 2 1"]),
        ("superpose", {"model": "resnet50"}, {"n": [32]}, "reduction", None),
        ("breakeven", {"cluster": "a100-nodes", "model": "gpt2", "n": 2}, {"schedule": ["1f1b"]}, "step", None),
    ],
)
def test_other_questions_have_the_answers_of_their_commands(
    tmp_path: Path, what: str, fixed: Any, axes: Any, column: str, expected: Any
) -> None:
    table = cdpsim.study(axes, fixed, tmp_path, what=what, executor=InThisProcess()).table()
    assert table["refused"][0] is None
    if what == "superpose":
        from cdpsim.studies.superpose import superpose

        expected = [superpose("resnet50", 32).row()["reduction"]]
    elif what == "breakeven":
        from cdpsim.studies.breakeven import step_time

        options: dict[str, Any] = {"model": "gpt2", "cluster": "a100-nodes"}
        expected = [step_time(cdpsim.simulate("1f1b", 2, ignore_memory=True, **options))]
        assert table["break_even"][0] is not None or table["latency"][0] > 0
    assert table[column] == expected


def test_a_plan_has_the_best_candidate_of_each_point(tmp_path: Path) -> None:
    axes: dict[str, list[Any]] = {"memory": [6, 8], "objective": ["samples", "memory"]}
    fixed: dict[str, Any] = {"devices": 4, "batch": 8, "schedules": ["gpipe", "1f1b"]}
    table = cdpsim.study(axes, fixed, tmp_path, what="plan", executor=InThisProcess()).table()
    for k, (memory, objective) in enumerate(product(*axes.values())):
        found = cdpsim.plan(memory=memory, objective=objective, **fixed)
        row = found.rows[0].to_builtins()
        names = ("schedule", "n", "m")
        assert [table[f"best_{name}"][k] for name in names] == [row["request"][name] for name in names]
        assert (table["best_step"][k], table["best_memory"][k]) == (row["step"], row["memory"])
        assert table["fits"][k]
        assert table["status"][k] == found.status
        assert table["candidates"][k] == found.searched["candidates"]


def test_a_plan_without_room_has_the_candidate_of_least_memory(tmp_path: Path) -> None:
    fixed: dict[str, Any] = {"devices": 4, "batch": 8, "schedules": ["gpipe", "1f1b"]}
    table = cdpsim.study({"memory": [1]}, fixed, tmp_path, what="plan", executor=InThisProcess()).table()
    smallest = cdpsim.plan(memory=1, **fixed).smallest
    assert smallest is not None
    assert (table["fits"], table["best_memory"]) == ([False], [smallest["memory"]])


def test_a_pool_that_breaks_is_refused_in_one_line(tmp_path: Path) -> None:
    from concurrent.futures import Future
    from concurrent.futures.process import BrokenProcessPool

    class Broken:
        def submit(self, *_: Any) -> Any:
            future: Future[Any] = Future()
            future.set_exception(BrokenProcessPool("a process died"))
            return future

    with pytest.raises(RequestError, match="executor: BrokenProcessPool: a process died; all rows before are kept"):
        cdpsim.study({"n": [2]}, {"schedule": "1f1b"}, tmp_path, executor=Broken())


def test_workers_and_an_executor_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="workers: are those of this machine, and an executor has its own"):
        cdpsim.study({"n": [2]}, {"schedule": "1f1b"}, tmp_path, executor=InThisProcess(), workers=2)


def test_progress_is_a_line_with_the_rate_and_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 20.0, 25.0, 51.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    crew = running._Crew(tmp_path, saved(tmp_path), [(0, 0, 0)] * 1000, 1, None)
    for outcomes, said in (
        (Outcomes(result=99), ""),
        (Outcomes(result=98, failed=2), "cdpsim: 100 of 1,000 points, 2 failed, 4 /s, 0:03:45 left\n"),
        (Outcomes(result=508, failed=2), ""),
    ):
        crew.outcomes = outcomes
        crew._show()
        assert capsys.readouterr().err == said
    assert running.progress_line(0, 0, 7, 0.0) == "0 of 7 points, 0 failed, 0 /s, unknown time left"


def test_the_rate_is_that_of_files_that_are_written(tmp_path: Path) -> None:
    saved(tmp_path)
    run_part(tmp_path, limit=6, executor=InThisProcess())
    (path,) = tmp_path.glob("rows/*")
    written = path.stat().st_mtime
    path = path.rename(path.with_name(f"here-1-1-{int((written - 12) * 1e9)}.jsonl"))
    assert study_status(tmp_path).rate == pytest.approx(0.5, rel=1e-3)
    os.utime(path, (written - 1000, written - 1000))
    assert study_status(tmp_path).rate == 0
    path.rename(path.with_name("other.jsonl")).touch()
    assert study_status(tmp_path).rate == 0


def children_of(pid: int) -> list[int]:
    """The ids of the processes that a process has started."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def sweep_process(folder: Path, file: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "cdpsim", "sweep", str(file), "-o", str(folder), "--workers", "2", "-q"]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def ended(process: "subprocess.Popen[bytes]") -> int:
    """The exit code of a process that ends by itself."""
    said = process.communicate()[1].decode()
    assert process.returncode == 0, said
    return process.returncode


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@NEEDS_PROCESSES
def test_a_killed_parent_takes_its_workers_with_it_and_the_next_run_goes_on(table: str, tmp_path: Path) -> None:
    """It is killed when the first rows are written."""
    file = tmp_path / "sweep.toml"
    file.write_text(FILE)
    process = sweep_process(tmp_path / "sweep", file)
    while not list(tmp_path.glob("sweep/rows/*.jsonl")) and process.poll() is None:
        pass
    workers_of = children_of(process.pid)
    process.kill()
    process.communicate()
    while any(map(is_alive, workers_of)):
        pass
    run_part(tmp_path / "sweep", executor=InThisProcess())
    assert csv_of(tmp_path / "sweep") == table


@pytest.mark.slow
@NEEDS_PROCESSES
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_an_interrupted_sweep_keeps_its_rows(table: str, tmp_path: Path, number: int, code: int) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(FILE.replace("to = 4", "to = 60"))
    process = sweep_process(tmp_path / "sweep", file)
    while not list(tmp_path.glob("sweep/rows/*.jsonl")) and process.poll() is None:
        pass
    process.send_signal(number)
    said = process.communicate()[1].decode()
    assert (process.returncode, said.count("\n")) == (code, 1), said
    assert not Store(tmp_path / "sweep", "compare").damaged
    saved(tmp_path / "sweep")
    run_part(tmp_path / "sweep", executor=InThisProcess())
    assert csv_of(tmp_path / "sweep") == table


@pytest.mark.slow
@NEEDS_PROCESSES
def test_two_sweeps_at_once_in_one_folder_make_the_same_table(table: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(FILE)
    both = [sweep_process(tmp_path / "sweep", file) for _ in range(2)]
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert csv_of(tmp_path / "sweep") == table


def writes_rows(pid: int) -> bool:
    """Return whether a process has a file of rows open."""
    try:
        return any(file.readlink().suffix == ".jsonl" for file in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return False


def kill_now_and_then(process: "subprocess.Popen[bytes]", draw: random.Random) -> Iterator[int]:
    """Kill a random worker of a sweep every 0.3 seconds, of those that write rows, and yield its id."""
    while True:
        try:
            process.wait(0.3)
        except subprocess.TimeoutExpired:
            if found := [*filter(writes_rows, children_of(process.pid))]:
                os.kill(worker := draw.choice(found), signal.SIGKILL)
                yield worker
        else:
            return


@NEEDS_PROCESSES
@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_kills_of_workers_and_of_the_parent_change_no_byte(tmp_path: Path, seed: int) -> None:
    """A thousand points; a worker dies every 0.3 seconds; after twelve deaths their parent does."""
    file = tmp_path / "sweep.toml"
    axes = 'schedule = ["1f1b", "gpipe"]\nn = { from = 2, to = 26, step = 1 }\nm = { from = 4, to = 23, step = 1 }\n'
    file.write_text(f"[axes]\n{axes}")
    quiet = tmp_path / "quiet"
    assert ended(sweep_process(quiet, file)) == 0
    draw, folder = random.Random(seed), tmp_path / "killed"
    process = sweep_process(folder, file)
    for deaths, _ in enumerate(kill_now_and_then(process, draw)):
        if deaths == 11:
            process.kill()
    process.communicate()
    assert process.returncode in (0, -signal.SIGKILL)
    rows = sum(path.read_bytes().count(b"\n") for path in folder.glob("rows/*.jsonl"))
    done = study_status(folder).done
    process = sweep_process(folder, file)
    kills = sum(1 for _ in kill_now_and_then(process, draw))
    assert ended(process) == 0
    assert kills
    assert csv_of(folder) == csv_of(quiet)
    assert rows - done <= 2, "points that were done twice"

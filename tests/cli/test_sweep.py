"""`cdpsim sweep`: its file, its actions, its exit codes and what it says."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import cdpsim
from cdpsim.studies.sweep import questions, running
from cdpsim.studies.sweep.running import run_part
from cdpsim.studies.sweep.store import RowFile, row_of
from tests.conftest import Command
from tests.helpers.every_row import every_row
from tests.helpers.sweeps import FILE, InThisProcess, saved, serial_rows, shown


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep's file in the current folder, run by one worker where no number is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "usual_workers", lambda: 1)
    (tmp_path / "sweep.toml").write_text(FILE)
    return tmp_path / "sweep.toml"


@pytest.mark.slow
def test_a_sweep_is_run_its_state_printed_and_its_table_written(file: Path, command: Command) -> None:
    done = command("sweep", file, "-o", "out")
    assert (done.code, done.out) == (0, "")
    assert "out: 18 points, 18 here, 0 done before" in done.err
    assert done.err.endswith("cdpsim: 18 done, 0 refused, 0 failed, 0 to do\n")
    assert (Path("out/sweep.toml")).read_text() == FILE
    status = command("sweep", "status", "out", "--format", "json")
    expected = {"points": 18, "done": 18, "refused": 0, "failed": 0, "to_do": 0, "reasons": {}, "damaged": []}
    record = json.loads(status.out)
    assert {name: record[name] for name in expected} == expected
    assert (record["rate"], record["seconds_left"]) == (0, None)
    assert command("sweep", "table", "out", "-o", "t.csv").code == 0
    assert shown(Path("t.csv").read_text()) == serial_rows()
    assert command("sweep", "table", "out", "-o", "t.jsonl").code == 0
    rows = [json.loads(line) for line in Path("t.jsonl").read_text().splitlines()]
    (header, *lines) = csv.reader(Path("t.csv").read_text().splitlines())
    assert [[*row] for row in rows] == [header] * 18
    assert [row["step"] for row in rows] == [int(line[header.index("step")]) for line in lines]
    again = command("sweep", file, "-o", "out")
    assert "18 here, 18 done before" in again.err


def test_a_dry_run_prints_the_number_and_the_first_points(file: Path, command: Command) -> None:
    done = command("sweep", file, "--dry-run")
    lines = done.out.splitlines()
    assert lines[0].split() == ["schedule", "n", "m"]
    assert lines[2].split() == ["gpipe", "2", "4"]
    assert len(lines) == 2 + 10
    assert done.err == "cdpsim: 18 points, 0 of them done, the first above\n"
    assert not Path("out").exists()
    record = json.loads(command("sweep", file, "--dry-run", "--format", "json").out)
    assert (record["points"], record["done"], record["first"][0]) == (18, 0, {"schedule": "gpipe", "n": 2, "m": 4})


@pytest.mark.slow
def test_parts_and_limits_do_what_they_say(file: Path, command: Command) -> None:
    assert "2 done, 0 refused, 0 failed, 16 to do" in command("sweep", file, "-o", "out", "--limit", "2").err
    done = command("sweep", file, "-o", "out", "--part", "2/9")
    assert done.err.endswith("2 done, 0 refused, 0 failed, 0 to do in part 2/9\n")
    assert "3 of them done" in command("sweep", file, "-o", "out", "--dry-run").err
    table = command("sweep", "table", "out", "-o", "t.csv")
    assert table.err == "cdpsim: 3 of 18 points; the others are to do\n"


@pytest.mark.slow
def test_failures_are_exit_code_1_with_the_first_three_until_they_are_tried_again(file: Path, command: Command) -> None:
    sweep = saved(Path("out"))
    with RowFile(Path("out")) as rows:
        for index in [*sweep.in_file_order()][:4]:
            rows.append(row_of(sweep.name(index), "failed", "killed by signal 9"))
    done = command("sweep", file, "-o", "out")
    assert done.code == 1
    assert done.err.splitlines()[-5:] == [
        "cdpsim: 14 done, 0 refused, 4 failed, 0 to do",
        "cdpsim: schedule=gpipe, n=2, m=4: killed by signal 9",
        "cdpsim: schedule=gpipe, n=2, m=8: killed by signal 9",
        "cdpsim: schedule=gpipe, n=3, m=4: killed by signal 9",
        "cdpsim: 4 points failed; `cdpsim sweep retry out` lets the next run try them again",
    ]
    status = command("sweep", "status", "out")
    assert status.code == 1
    assert status.out.splitlines()[-1].split() == ["failed:", "killed", "by", "signal", "9", "4"]
    assert command("sweep", "retry", "out").err == (
        "cdpsim: 4 failures forgotten; the next run tries these points again\n"
    )
    assert command("sweep", file, "-o", "out").code == 0


@pytest.mark.slow
def test_a_sweep_in_json_is_kept_as_json(file: Path, command: Command) -> None:
    Path("sweep.json").write_text('{"axes": {"n": [2], "schedule": ["1f1b"]}}')
    assert command("sweep", "sweep.json", "-o", "out").code == 0
    assert Path("out/sweep.json").exists()


@pytest.mark.slow
def test_a_sweep_s_own_copy_of_the_file_goes_on(file: Path, command: Command) -> None:
    assert command("sweep", file, "-o", "out", "--limit", "1").code == 0
    Path("out/sweep.toml").write_text(FILE.replace("to = 4", "to = 5"))
    assert "24 points" in command("sweep", "out/sweep.toml", "-o", "out", "--limit", "1").err


@every_row(
    ("words", "problem"),
    [
        ("sweep.toml", "-o: is missing; name the folder of the rows"),
        ("statsu out", "action: unknown action 'statsu'; did you mean 'status'?"),
        ("sweep.toml -o no/such/out", "no/such/out: there is no folder 'no/such'; create it first"),
        ("missing.toml -o out", "missing.toml: no such file or directory; check its spelling"),
        ("sweep.toml out", "'out': is one argument too many; give the folder with -o"),
        ("status", "DIR: is missing; name the folder of the sweep: cdpsim sweep status DIR"),
        ("status .", ".: has no sweep; give the folder that `cdpsim sweep FILE -o DIR` wrote"),
        ("status out -o x", "-o: is of a table; leave it out"),
        ("retry out -o x", "-o: is of a table; leave it out"),
        ("retry out --workers 2", "--workers: is of a run, and not of retry; leave it out"),
        ("status out --dry-run", "--dry-run: is of a run, and not of status; leave it out"),
        ("table out", "-o: is missing; name the table: .csv, .jsonl, .parquet"),
        ("table out -o t.xlsx", "t.xlsx: its form is unknown; end its name in .csv, .jsonl, .parquet"),
        ("sweep.toml -o out --on moon", "on: unknown on 'moon'; known are local, slurm, dask://ADDRESS"),
        ("sweep.toml -o out --on=", "on: unknown on ''; known are local, slurm, dask://ADDRESS"),
        ("sweep.toml -o out --on slurm --slurm=", "--slurm: '' is no NAME=VALUE"),
        ("zero.toml --dry-run", "/dev/zero: is not a regular file; copy its content into one"),
        ("sweep.toml -o out --slurm time=60", "--slurm: goes with --on slurm, and this is --on local; leave it out"),
        ("sweep.toml -o out --detach", "--detach: goes with --on slurm, and this is --on local; leave it out"),
        (
            "sweep.toml -o out --on slurm --part 1/2",
            "--part: goes with --on local, and this is --on slurm; leave it out",
        ),
        ("sweep.toml -o out --part 3/2", "part: '3/2' is no part; give for example 3/8, the third of eight"),
        ("sweep.toml -o out --workers 0", "workers: workers=0 must be at least 1"),
        ("sweep.toml -o out --limit x", "limit: limit=x must be a whole number of at least 1"),
        ("huge.toml -o out", "points: are 1,000,000,000, and a sweep has at most 10,000,000"),
    ],
)
def test_what_cannot_be_asked_is_one_line_and_exit_code_2(
    file: Path, command: Command, words: str, problem: str
) -> None:
    thousand = "{ from = 1, to = 1000, step = 1 }"
    axes = "".join(f"{name} = {thousand}\n" for name in ("n", "m", "chunks"))
    Path("huge.toml").write_text(f'[fixed]\nschedule = "1f1b"\n[axes]\n{axes}')
    Path("zero.toml").write_text('[axes]\nn = [2]\nschedule = ["/dev/zero"]\n')
    done = command("sweep", *words.split())
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"cdpsim: error: {problem}")
    assert done.err.count("\n") == 1
    assert not Path("out").exists() and not Path("no").exists()


def test_a_table_is_not_overwritten_without_force(file: Path, command: Command) -> None:
    saved(Path("out"))
    Path("t.csv").write_text("mine\n")
    assert "t.csv: already exists; --force overwrites" in command("sweep", "table", "out", "-o", "t.csv").err
    assert command("sweep", "table", "out", "-o", "t.csv", "--force").code == 0
    assert Path("t.csv").read_text().startswith("schedule,n,m,rule,")


@pytest.mark.slow
def test_a_damaged_line_is_shown_by_status(file: Path, command: Command) -> None:
    command("sweep", file, "-o", "out", "--limit", "3", "--workers", "1")
    (path,) = Path("out/rows").glob("*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"gpipe"', b'"gpipE"', 1))
    status = command("sweep", "status", "out")
    assert " 2\n" in status.out
    assert f"1 damaged line is no row: {path}, byte " in status.err


def test_parquet_has_the_same_rows(file: Path, command: Command) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    saved(Path("out"))
    command("sweep", "table", "out", "-o", "t.jsonl")
    assert command("sweep", "table", "out", "-o", "t.parquet").code == 0
    rows = [json.loads(line) for line in Path("t.jsonl").read_text().splitlines()]
    assert parquet.read_table("t.parquet").to_pylist() == rows


def test_parquet_without_pyarrow_is_refused(file: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    saved(Path("out"))
    done = command("sweep", "table", "out", "-o", "t.parquet")
    assert done.code == 2
    assert "pyarrow: is not installed, and writes .parquet; pip install 'cdpsim[parquet]'" in done.err


def test_status_counts_what_failed_a_table_has_the_others_and_retry_forgets(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(schedule: str, n: int, **options: Any) -> Any:
        if n == 4:
            raise ZeroDivisionError("of a test")
        return cdpsim.evaluate(schedule, n, **options)

    monkeypatch.setattr(questions, "evaluate", faulty)
    saved(tmp_path)
    run_part(tmp_path, executor=InThisProcess())
    status = command("sweep", "status", tmp_path)
    assert (status.code, status.out.split()[-6:]) == (1, [*["failed:", "ZeroDivisionError:", "of", "a", "test"], "6"])
    assert command("sweep", "retry", tmp_path).err.startswith("cdpsim: 6 failures forgotten")
    table = command("sweep", "table", tmp_path, "-o", tmp_path / "t.csv")
    assert (table.code, table.err) == (0, "cdpsim: 12 of 18 points; the others are to do\n")
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 1 + 12
    status = command("sweep", "status", tmp_path, "--format", "json")
    assert (status.code, json.loads(status.out)["to_do"], json.loads(status.out)["failed"]) == (0, 6, 0)

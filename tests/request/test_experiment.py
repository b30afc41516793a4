"""Requests as files: experiments that users write, and the requests that summaries record."""

import json
from pathlib import Path
from typing import Any

import pytest

from cdpsim import Model, Request, RequestError, Stage, load, simulate
from cdpsim.schedules.actions import write_actions
from tests.conftest import Command
from tests.helpers.every_row import every_row

EXPERIMENT = """
model = "small.toml"
cluster = "a100-nodes"

[run]
schedule = "multi-cdp"
prefetch = 1
link-jitter = "uniform:0.1"
slow = ["1:2"]
"""
SMALL = Model(stages=(Stage(forward=1.0, backward=2.0, boundary=10, parameters=40),) * 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An experiment with its model beside it."""
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    SMALL.save(tmp_path / "small.toml")
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    """Return the names and bytes of a folder's files."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_an_experiment_is_the_request_that_it_says(folder: Path) -> None:
    """Its model lies beside it, wherever it is asked for."""
    words: dict[str, Any] = {"prefetch": 1, "link_jitter": "uniform:0.1", "slow": ["1:2"]}
    expected = Request("multi-cdp", model=SMALL, cluster="a100-nodes", **words)
    assert Request.load(folder / "experiment.toml") == expected


@pytest.mark.parametrize("name", ["experiment.toml", "inline.json", "flat.toml"])
def test_the_command_line_runs_it_and_its_options_win(name: str, folder: Path, command: Command) -> None:
    """With tables in place of names, without [run], and with another number of steps."""
    table = {"model": SMALL.to_builtins(), "cluster": {"link": {"latency": "1 ms", "bandwidth": "1 kB/s"}}}
    (folder / "inline.json").write_text(
        json.dumps(table | {"run": {"schedule": "pp-cdp", "slot_order": "forward-first"}})
    )
    (folder / "flat.toml").write_text('schedule = "1f1b"\nn = 3\nm = 6\n')
    assert command("simulate", folder / name, "-o", folder / "a").code == 0
    first = load(folder / "a").request
    assert command("simulate", folder / name, "--steps", "7", "-o", folder / "b").code == 0
    assert load(folder / "b").request == {**first, "steps": 7}
    assert first["schedule"] == {"experiment.toml": "multi-cdp", "inline.json": "pp-cdp", "flat.toml": "1f1b"}[name]


def test_a_summary_asks_for_the_same_bytes(folder: Path, command: Command) -> None:
    """Also where its model and its cluster are names, and how the model is trained was asked for."""
    asked = [
        "simulate",
        "1f1b",
        "-n",
        "4",
        "-m",
        "8",
        "--model",
        "gpt2",
        "--cluster",
        "a100-nodes",
        "--recompute",
        "sqrt",
        "--no-mixed-precision",
    ]
    assert command(*asked, "-o", folder / "a").code == 0
    record = load(folder / "a").request
    assert (record["model"], record["cluster"], record["recompute"], record["mixed_precision"]) == (
        "gpt2",
        "a100-nodes",
        "sqrt",
        False,
    )
    assert command("simulate", "--from", folder / "a/summary.json", "-o", folder / "b").code == 0
    assert files(folder / "a") == files(folder / "b")
    assert command("simulate", "gpipe", "--from", folder / "a/summary.json", "-o", folder / "c").code == 0
    assert load(folder / "c").request == {**record, "schedule": "gpipe"}


def test_a_record_is_an_experiment_file(folder: Path, command: Command) -> None:
    """For all options: also for the number of a run, whose name is that of a table in the file."""
    run = simulate("multi-cdp", model=SMALL, jitter="uniform:0.2", run=3, seed=5)
    (folder / "record.json").write_text(json.dumps(run.request.to_builtins()))
    again = simulate(Request.load(folder / "record.json"))
    assert again.end.tolist() == run.end.tolist() and again.request == run.request


def test_other_commands_take_experiments_as_names(folder: Path, command: Command) -> None:
    """Beside schedules, of which each has its own."""
    (folder / "slots.toml").write_text('[run]\nschedule = "1f1b"\nn = 4\nm = 8\n')
    outcome = command("compare", folder / "slots.toml", "multi-cdp", "-n", "4", "--sort", "given", "--format", "json")
    assert [row["schedule"] for row in json.loads(outcome.out)] == ["1f1b", "multi-cdp"]
    assert [row["devices"] for row in json.loads(outcome.out)] == [4, 4]
    assert command("timeline", folder / "slots.toml", "-o", folder / "a.svg").code == 0
    assert command("plot", "memory", folder / "slots.toml", "-o", folder / "b.svg").code == 0
    assert command("snapshot", folder / "slots.toml", "--slot", "3", "-o", folder / "c.svg").code == 0
    assert command("pyramid", folder / "slots.toml", "--format", "json").code == 0


def test_an_order_may_lie_beside_it(folder: Path) -> None:
    """As torch writes it."""
    request = Request("1f1b", 2, m=2)
    write_actions(request.schedule.actions(request.shape), folder / "order.csv")
    (folder / "own.toml").write_text('[run]\nschedule = "order.csv"\n')
    assert simulate(Request.load(folder / "own.toml")).end.tolist() == simulate("1f1b", 2, m=2).end.tolist()


@every_row(
    ("text", "problem"),
    [
        ('[run]\nschedule = "multi-cdp"\nstepz = 3\n', "unknown option 'stepz'; did you mean 'steps'"),
        ('steps = 3\n[run]\nschedule = "multi-cdp"\nsteps = 4\n', "says steps twice; say it once"),
        ('[run]\nschedule = "multi-cdp"\nlink-jitter = "uniform:0.1"\nlink_jitter = "uniform:0.2"\n', "twice"),
        ("[run]\nn = 4\n", "names no schedule; write schedule = "),
        ("[run]\nschedule = 3\nn = 4\n", "schedule"),
        ('model = "none.toml"\n[run]\nschedule = "multi-cdp"\n', "none.toml"),
        ('[run]\nschedule = "multi-cdp"\nn = "four"\n', "n=four must be a whole number"),
        ("[run\n", "not TOML"),
    ],
)
def test_what_an_experiment_cannot_say_is_one_line(text: str, problem: str, folder: Path, command: Command) -> None:
    """Exit 2; nothing is written."""
    (folder / "bad.toml").write_text(text)
    outcome = command("simulate", folder / "bad.toml", "-o", folder / "out")
    assert outcome.code == 2 and problem in outcome.err and outcome.err.count("\n") == 1
    assert not (folder / "out").exists()
    with pytest.raises(RequestError):
        Request.load(folder / "bad.toml")


def test_what_is_no_experiment_is_refused(folder: Path, command: Command) -> None:
    """A list, a file that is not there, none at all, and one beside a folder."""
    (folder / "list.json").write_text("[1]")
    for words, problem in (
        ((folder / "list.json",), "[1] is no table"),
        ((folder / "missing.toml",), "no such file"),
        ((), "NAME: is missing"),
        (("--from", ""), "--from: names no file"),
        (("--from", folder / "missing.json"), "no such file"),
    ):
        outcome = command("simulate", *words, "-o", folder / "out")
        assert outcome.code == 2 and problem in outcome.err


def test_files_and_options_do_not_contradict_each_other(folder: Path, command: Command) -> None:
    """One file asks for one run, also with a `run` table; null means unset; a name may end in capitals."""
    (folder / "own.TOML").write_text('[run]\nschedule = "multi-cdp"\nn = 4\n')
    (folder / "third.toml").write_text(
        'model = "small.toml"\n[run]\nschedule = "pp-cdp"\njitter = "uniform:0.1"\nrun = 3\n'
    )
    (folder / "null.json").write_text(
        '{"schedule": "multi-cdp", "n": 4, "slow": null, "seed": null, "contention": null}'
    )
    outcome = command("simulate", folder / "own.TOML", "--from", folder / "third.toml", "-o", folder / "a")
    assert outcome.code == 2 and "--from: asks for one run" in outcome.err
    outcome = command("simulate", folder / "third.toml", "--runs", "5", "-o", folder / "a")
    assert outcome.code == 2 and "--run asks for one of them" in outcome.err
    for name in ("own.TOML", "null.json"):
        assert command("simulate", folder / name, "-o", folder / name.lower().partition(".")[0]).code == 0
    assert files(folder / "own") == files(folder / "null")


def test_comparisons_keep_to_one_clock(folder: Path, command: Command) -> None:
    """Of slots and seconds none is made; of files, the clock is theirs, and so are their steps."""
    (folder / "slots.toml").write_text('[run]\nschedule = "1f1b"\nn = 4\nm = 8\n')
    (folder / "uneven.toml").write_text('[run]\nschedule = "gpipe"\nn = 2\nm = 4\ncounts = [[4], [1]]\n')
    outcome = command("compare", folder / "slots.toml", folder / "experiment.toml")
    assert outcome.code == 2 and "some are in slots, and some in seconds" in outcome.err
    assert command("compare", folder / "experiment.toml", "--within", "80 GB").code == 0
    assert command("compare", folder / "uneven.toml", "--columns", "step").code == 0
    both = command("compare", folder / "slots.toml", "zb-h1", "-n", "4")
    assert both.code == 0 and "a backward takes two slots" in both.out

"""Every request, in every form, is served or refused in one line before it takes much time or memory."""

import argparse
import csv
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, cli, load, simulate, table1
from cdpsim.draw import canvas
from cdpsim.program import EdgeKind
from cdpsim.schedules import pipeline
from cdpsim.schedules.rule import Rule
from tests.conftest import Command
from tests.helpers.command_line import assert_refused
from tests.helpers.every_row import every_row

FOLDER = "run"  # a run of 1f1b with three stages, in the folder of a test

# A request that each command serves, and with it the commands.
SERVED = {
    "schedules": "",
    "table1": "-n 2",
    "published": "--only sc21-table-2",
    "simulate": "mp-cdp -n 2 -o out",
    "mesh": "-n 2 --replicas 2",
    "pyramid": "-n 2",
    "rounds": "acco -n 1 --replicas 2",
    "compare": "multi-dp 1f1b -n 2",
    "plan": "--devices 2 --batch 2 --schedules 1f1b,gpipe",
    "sweep": "sweep.toml -o swept --workers 1 --limit 1",
    "import-schedule": "order.csv",
    "breakeven": "multi-dp -n 2 --model toy.toml --cluster box.toml",
    "timeline": "1f1b -n 2 -o a.json",
    "figure": "1 -o f.svg",
    "snapshot": "mp-cdp -n 2 --slot 2 -o s.svg",
    "plot": "memory 1f1b -n 2 -o p.svg",
    "superpose": "vit-b16 -n 4",
    "models": "",
    "clusters": "",
    "completion": "bash",
}
TEXTS = [
    "--",
    "",
    "1" * 5000,
    "3000000000",
    "9" * 17,
    "nan",
    "x" * 10**5,
    "\x1b[2J\n",
    "\ud800",
    "\0",
    "/dev/null",
    "long.csv",
]


def options_of(name: str) -> list[str]:
    """The options of a command that take a value, as help shows them."""
    parser = argparse.ArgumentParser()
    for add in next(command for command in cli.COMMANDS if command.name == name).arguments:
        add(parser)
    actions = [action for action in parser._actions if action.dest != "help"]
    return [action.option_strings[-1] for action in actions if action.option_strings and action.nargs != 0]


@pytest.fixture
def here(toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy folder as the current one, with an order, a run, and a table with a cell that is too long."""
    monkeypatch.chdir(toy)
    (toy / "sweep.toml").write_text('[fixed]\nschedule = "1f1b"\n[axes]\nn = [1, 2]\n')
    (toy / "order.csv").write_text("0F0,0F1,0B0,0B1\n")
    (toy / "long.csv").write_text("1" * (csv.field_size_limit() + 1) + "\n")
    simulate("1f1b", 3).save(toy / FOLDER)
    return toy


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are built, but not rendered: that takes longest, and no option is read there."""
    monkeypatch.setattr(canvas, "rendered", lambda figure, path, look: b"a picture")


def test_every_command_is_tried() -> None:
    assert set(SERVED) == {command.name for command in cli.COMMANDS}


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", SERVED)
def test_no_value_of_any_option_is_answered_by_a_traceback(name: str, command: Command, here: Path) -> None:
    """It is served, the answer is no, or it is refused in one line that begins with what is at fault.

    What a request reads is tried with all texts by two commands, and with one text by each of the others.
    """
    shared = set() if name in ("simulate", "compare") else {*options_of("simulate")} - {"-o"}
    for k, option in enumerate(options_of(name)):
        for text in [TEXTS[k % len(TEXTS)]] if option in shared else TEXTS:
            word = f"{option}={text}" if option.startswith("--") else f"{option}{text}"
            outcome = command(name, *SERVED[name].split(), word)
            assert outcome.code in (0, 1, 2), (option, text[:40])
            if outcome.code == 2:
                assert_refused(outcome)


@every_row(
    ("line", "problem"),
    [
        ("compare -n 2 --format=--", "format: unknown format '--'; known are text"),
        ("compare -n 2 --columns=--", "columns: unknown columns '--'"),
        ("compare -n 2 --sort=--", "sort: unknown sort '--'"),
        ("compare -n 2 --sort=", "sort: unknown sort ''"),
        ("compare -n 2 --steps=", "steps= must be a whole number"),
        ("simulate mp-cdp -n 2 -o out --jitter=--", "unknown distribution '--'; known are uniform"),
        ("simulate mp-cdp -n 2 -o out --slow=--", "slow: '--' is not DEVICE:FACTOR"),
        ("simulate mp-cdp -n 2 -o out --optimizer=", "optimizer: unknown optimizer ''; known are sgd"),
        ("simulate mp-cdp -n 2 -o out --rule long.csv", "long.csv: is no CSV file (field larger than"),
        ("import-schedule long.csv", "long.csv: is no CSV file (field larger than"),
        ("figure 1 -o f.svg -n=--", "n=-- must be a whole number"),
        ("simulate mp-cdp -n 2 -o -", "-: is standard output elsewhere, and a folder is needed; give its name"),
        ("import-schedule order.csv -o -", "and a folder is needed"),
        ("timeline 1f1b -n 2 -o -", "-: its form is unknown; end its name in .png"),
        ("table1 -n 1000000", "or take --exact, which runs nothing"),
        ("table1 -n 3 --exact --steps 4", "steps: is of runs, and exact values need none"),
        ("table1 -n 3 --exact --engine simpy", "engine: is of runs"),
        ("table1 -n 3 --exact --max-memory 1GB", "max-memory: is of runs"),
        ("simulate pipedream -n 999999 -o out", "tasks are the most"),
    ],
)
def test_what_is_wrong_is_named(line: str, problem: str, command: Command, here: Path) -> None:
    assert_refused(command(*line.split(" ")), problem)
    assert not (here / "out").exists()
    assert not (here / "-").exists()


class Unwritable:
    """A value whose `repr` fails."""

    def __repr__(self) -> str:
        raise RuntimeError


HALVES = Rule("mine", lambda i, j, shape: 0.5 * i)  # type: ignore[arg-type, return-value]
VALUES: list[Any] = [
    *(1.5, 1j, 10**5000, -(10**5000), b"x", "", "x" * 10**6, "\ud800", "\0", [], [1], {}, {"a": 1}, set(), ..., int),
    *(np.array([1, 2]), np.array(["unit", "x"]), np.float64(2), Fraction(1, 2), Path("/nowhere/x.toml"), Unwritable()),
    *(Cluster.unit(), SCHEDULES["1f1b"], HALVES, Rule("x", lambda i, j, shape: i - 9)),
]
KEYWORDS = [name for name in signature(simulate).parameters if name != "n"]


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_no_value_of_any_keyword_raises_anything_else(keyword: str) -> None:
    """It is taken, or refused in one line; in slots, and with a model and a cluster."""
    for request in ({"schedule": "multi-cdp", "n": 2}, {"schedule": "1f1b", "model": "gpt2", "cluster": "a100-nodes"}):
        for value in VALUES:
            try:
                simulate(**{"n": 2, **request, keyword: value})
            except RequestError as error:
                assert str(error).isprintable(), (value, str(error))


@every_row(
    ("keyword", "value", "problem"),
    [
        ("jitter", 1.5, r"^jitter: 1\.5 is no text; write for example 'lognormal:0\.1'"),
        ("model", 1.5, r"^model: 1\.5 is no model; give a name"),
        ("cluster", 1.5, r"^cluster: 1\.5 is no cluster; give a name"),
        ("model", "x" * 10**6, r"^model: unknown model 'xxx"),
        ("rule", "x" * 10**6, r"^rule: unknown rule 'xxx"),
        ("rule", HALVES, r"^rule: 'mine' gives lags of type float64"),
        ("rule", Rule("mine", lambda i, j, shape: None), r"^rule: 'mine' gives lags of shape"),  # type: ignore[arg-type, return-value]
        ("optimizer", "", r"^optimizer: unknown optimizer ''"),
        ("schedule", pipeline("mine", "an own one", lambda d, m, c: None), r"^actions: .*gives None"),  # type: ignore[arg-type, return-value]
    ],
)
def test_a_wrong_type_is_named(keyword: str, value: object, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        simulate(**{"schedule": "multi-cdp", "n": 2, keyword: value})  # type: ignore[arg-type]


FLAGS = [name for name, word in signature(simulate).parameters.items() if word.annotation in (bool, bool | None)]


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["no", "yes", 0, 1, 1.0, "", [], np.array([1, 2])])
def test_a_flag_is_true_or_false(name: str, value: object) -> None:
    """Not what Python counts as true, such as the text "no"."""
    with pytest.raises(RequestError, match=f"^{name}: {name}=.* is neither True nor False"):
        simulate("multi-cdp", 2, **{name: value})  # type: ignore[arg-type]


def test_all_flags_are_known() -> None:
    """Or the test above would show less."""
    assert len(FLAGS) == 8


@pytest.mark.parametrize("name", ["exact", "shared_parameters"])
def test_a_flag_of_table_1_is_true_or_false(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name}: {name}='no' is neither"):
        table1(2, **{name: "no"})  # type: ignore[arg-type]


def test_texts_of_numpy_s_are_texts(tmp_path: Path) -> None:
    """As sweeps over arrays give them; they are recorded as any others."""
    asked = {"collective": "ring", "rule": "dp", "contention": "none"}
    simulate("multi-dp", 2, **{name: np.str_(text) for name, text in asked.items()}).save(tmp_path / "a")  # type: ignore[arg-type]
    simulate("multi-dp", 2, **asked).save(tmp_path / "b")  # type: ignore[arg-type]
    assert (tmp_path / "a" / "summary.json").read_bytes() == (tmp_path / "b" / "summary.json").read_bytes()


def test_names_of_numpy_s_are_names(tmp_path: Path) -> None:
    """Names of schedules, models and clusters that the user defines."""
    for kind in (str, np.str_):
        schedule = replace(SCHEDULES["multi-dp"], name=kind("mine"))
        model = Model(stages=(Stage(forward=1, backward=1),) * 2, name=kind("two"))
        simulate(schedule, model=model, cluster=Cluster(name=kind("free"))).save(tmp_path / kind.__name__)
    assert (tmp_path / "str_" / "summary.json").read_bytes() == (tmp_path / "str" / "summary.json").read_bytes()


@pytest.mark.parametrize("text", ["\ud800", "\udcff"])
def test_texts_that_are_no_unicode_are_refused_wherever_they_stand(text: str) -> None:
    """In place of numbers and tables, as names of what is made, and in files."""
    made: list[tuple[Any, dict[str, Any]]] = [
        (Model, {"stages": text}),
        (Model, {"stages": (Stage(forward=1, backward=1),), "name": text}),
        (Model, {"stages": (Stage(forward=1, backward=1),), "samples": text}),
        (Stage, {"forward": text, "backward": 1}),
        (Cluster, {"link": text}),
        (Cluster, {"name": text}),
        (pipeline, {"name": text, "about": "", "actions": print}),
        (Model.from_builtins, {"content": {"stages": [{"forward": text, "backward": 1}]}, "subject": "x"}),
        (Model.from_builtins, {"content": {text: 1}, "subject": "x"}),
        (Cluster.from_builtins, {"content": {"devices": {"count": text}}, "subject": "x"}),
    ]
    for make, content in made:
        with pytest.raises(RequestError) as refused:
            make(**content)
        assert str(refused.value).isprintable()


PREFETCHING = [name for name, schedule in SCHEDULES.items() if schedule.fetches]


@pytest.mark.every_case
@pytest.mark.parametrize("name", PREFETCHING)
@pytest.mark.parametrize("beyond", [2**31 - 1, 3_000_000_000, 10**17])
def test_parameters_may_arrive_before_all_tasks(name: str, beyond: int) -> None:
    """Then no message waits for room at its receiver, however far beyond all tasks that is."""
    trace, run = simulate(name, 3, prefetch=beyond), simulate(name, 3, prefetch=1000)
    assert trace is not None and run is not None
    edges, tasks = trace.program.edges, len(trace.program.tasks)
    assert not ((edges.kind == EdgeKind.ROOM) & (edges.before < tasks) & (edges.after >= tasks)).any()
    assert np.array_equal(trace.start, run.start)


@pytest.mark.parametrize("what", ["memory", "traffic", "steps"])
def test_a_folder_without_a_request_is_drawn(what: str, command: Command, here: Path) -> None:
    """Its columns say enough."""
    summary = here / FOLDER / "summary.json"
    content = json.loads(summary.read_text())
    del content["request"]
    summary.write_text(json.dumps(content))
    assert command("plot", what, FOLDER, "-o", "a.svg").code == 0
    assert (here / "a.svg").exists()


def test_a_folder_without_a_request_has_no_order(command: Command, here: Path) -> None:
    (here / FOLDER / "summary.json").write_text("{}")
    assert_refused(command("timeline", FOLDER, "-o", "a.csv"), "timeline: the request in its summary cannot be served")


def changed(folder: Path, table: str, column: str, value: str, row: int = 5) -> None:
    """Write something else into a cell."""
    path = folder / f"{table}.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()]
    rows[row][rows[0].index(column)] = value
    path.write_text("\n".join(map(",".join, rows)) + "\n")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("table", "column", "value", "problem"),
    [
        ("memory", "device", "100000000", "device 100000000 is far beyond its"),
        ("tasks", "device", "100000000", "device 100000000 is far beyond its"),
        ("tasks", "step", "100000000", "step 100000000 is far beyond its"),
        ("tasks", "stage", "1000000", "stage 1000000 is far beyond its"),
        ("messages", "src", "1000000", "src 1000000 is far beyond its"),
        ("tasks", "stale", "2", "line 6: stale is '2'"),
        ("tasks", "start", "1000", "line 6 ends before it starts"),
    ],
)
def test_what_no_run_has_is_refused_when_it_is_loaded(
    table: str, column: str, value: str, problem: str, command: Command, here: Path
) -> None:
    changed(here / FOLDER, table, column, value)
    assert_refused(command("timeline", FOLDER, "-o", "a.json"), f"{table}.csv: {problem}")


@pytest.mark.parametrize(("table", "column"), [("tasks", "end"), ("messages", "end"), ("memory", "time")])
def test_times_that_no_export_can_write_are_refused(table: str, column: str, command: Command, here: Path) -> None:
    """Whichever table has them."""
    changed(here / FOLDER, table, column, "1e300")
    assert_refused(command("timeline", FOLDER, "-o", "a.json"), "trace: is longer than 146 years")


def test_times_are_of_one_kind(command: Command, here: Path) -> None:
    """Seconds in one cell are seconds in all: an export of mixed ones had no common unit."""
    changed(here / FOLDER, "tasks", "end", "1e-3", row=1)
    changed(here / FOLDER, "tasks", "start", "0", row=1)
    trace = load(here / FOLDER)
    assert not trace.in_slots
    assert {table["start"].dtype for table in (trace.tasks, trace.messages)} == {np.dtype(float)}
    for ending in ("json", "html", "svg"):
        assert command("timeline", FOLDER, "-o", f"a.{ending}").code == 0


def test_exact_values_need_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the whole table, and nothing is simulated for them."""
    whole = table1(4, collective="ring")
    monkeypatch.setattr(importlib.import_module("cdpsim.studies.table1"), "simulate", None)
    for row, simulated in zip(table1(4, collective="ring", exact=True), whole.rows, strict=True):
        assert "agree" not in row
        for name, cell in row.items():
            expected = simulated[name]
            if isinstance(expected, dict):
                expected = {key: value for key, value in expected.items() if key != "simulated"}
            assert cell == expected


def test_exact_values_are_printed_for_any_n(command: Command) -> None:
    """By every form: a pyramid of a million stages has N(N+1)/2 devices."""
    n, pyramid = 10**6, str(10**6 * (10**6 + 1) // 2)
    for form in ("text", "csv", "json", "latex"):
        printed = command("table1", "-n", n, "--exact", "--format", form)
        assert printed.code == 0
        assert pyramid in printed.out
        assert not re.search("simulated|agree|versions", printed.out)
    rows = json.loads(command("table1", "-n", n, "--exact", "--format", "json").out)
    assert list(rows) == ["n", "collective", "rows"]
    assert rows["rows"][5]["gpus"] == {"paper": "N(N+1)/2", "exact": pyramid}
    assert "agree" not in rows["rows"][5]


def python(program: str, **environment: str) -> str:
    """The output of a program in a process of its own, in the current folder."""
    project = str(Path(cli.__file__).parents[2])
    every = os.environ | {"PYTHONPATH": project} | environment
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=every, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("backend", ["x", "module://nowhere", "agg", ""])
def test_pictures_need_no_backend(backend: str, here: Path) -> None:
    """An environment for other programs is no obstacle, and is left as it is."""
    program = """
import os, cdpsim
from cdpsim.export import pictures
pictures.write_timeline(cdpsim.simulate("1f1b", 2), "a.svg")
print(os.environ["MPLBACKEND"])
"""
    assert python(program, MPLBACKEND=backend) == f"{backend}\n"
    assert (here / "a.svg").exists()


@pytest.mark.slow
def test_a_damaged_cache_of_numba_is_no_obstacle(tmp_path: Path, compiled: Any) -> None:
    """Loops are compiled again, give the same, and are kept again.

    A file that is empty, as a full disk leaves it, is an end of the file; other damage is what pickle has an error for.
    """
    program = """
import numpy as np
from cdpsim.numeric.paths import compiled_loops
moments, starts, ends = np.array([-1, 0, 1], dtype=np.int32), np.array([2, 3]), np.array([5, 8])
print(compiled_loops().times_of_moments(moments, starts, ends).tolist())
"""

    def kept() -> list[Path]:
        assert python(program, NUMBA_CACHE_DIR=str(tmp_path)) == "[0, 2, 5]\n"
        return [path for path in tmp_path.rglob("*.nb?") if path.is_file()]

    for path in kept():
        path.write_bytes(b"")
    kept()  # finds the damage, and empties the cache
    assert all(path.read_bytes() for path in kept())

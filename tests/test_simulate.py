"""`simulate` from Python: the arguments it takes, and those it refuses."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Devices
from cdpsim.runs import Run
from cdpsim.schedules.rule import matrix_rule
from tests.helpers.every_row import every_row
from tests.helpers.strategies import requests

TWO = Model(stages=(Stage(forward=1.0, backward=2.0),) * 2)


@every_row(
    ("options", "message"),
    [
        ({"n": 10**5000}, "n: n=9.* is astronomically large"),
        ({"n": True}, "n=True must be a whole number"),
        ({"n": 3.0}, "n=3.0 must be a whole number"),
        ({"n": None}, "n: is missing; give the number of stages"),
        ({"chunks": True}, "chunks=True must be a whole number"),
        ({"chunks": 2}, "chunks: multi-cdp does not take this option"),
        ({"m": 4}, "m: multi-cdp needs a multiple of its n=3 workers; m=4"),
        ({"engine": None}, "unknown engine None"),
        ({"engine": "fas"}, "did you mean 'fast'"),
        ({"collective": 3}, "unknown collective 3"),
        ({"slot_order": 1}, "unknown slot-order 1"),
        ({"rule": 7}, "7 is no rule; give a name"),
        ({"rule": matrix_rule(np.ones((2, 2), dtype=bool))}, "has 2 rows of 2"),
        ({"rule": matrix_rule(np.ones(3, dtype=bool))}, "the rule has 3 rows of 0, but 3 micro-batches"),
        ({"model": "unti"}, "unknown model 'unti'; did you mean 'unit'"),
        ({"cluster": "box"}, "unknown cluster 'box'"),
        ({"steps": 10**9}, r"n=3 with steps=1000000000 is 18,000,000,000 tasks and about .* steps=\d+ would fit"),
        ({"n": 10**6}, r"n=\d+ would fit"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    """By name, with what would."""
    request: dict[str, Any] = {"schedule": "multi-cdp", "n": 3} | options
    with pytest.raises(RequestError, match=message):
        simulate(**request)


@pytest.mark.parametrize("schedule", [None, 3, "cdp"])
def test_an_unknown_schedule_is_refused(schedule: Any) -> None:
    """A name of every type and length."""
    with pytest.raises(RequestError, match="unknown schedule"):
        simulate(schedule, 3)


def test_numbers_may_be_numpy_s_or_digits() -> None:
    """As they come out of arrays and command lines."""
    assert simulate("multi-cdp", np.int64(3)).summary() == simulate("multi-cdp", "3").summary()  # type: ignore[arg-type]


def test_the_model_says_how_many_stages_there_are() -> None:
    """n and m may repeat it, nothing else."""
    summary = simulate("multi-cdp", model=TWO).summary()
    assert simulate("multi-cdp", 2, m=2, model=TWO).summary() == summary
    assert simulate("multi-cdp", m="2", model=TWO).summary() == summary  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="n=3, but the model has 2 stages"):
        simulate("multi-cdp", 3, model=TWO)


def test_a_model_without_times_needs_a_speed(tmp_path: Path) -> None:
    """Work is no time before a device says how fast it is."""
    file = tmp_path / "work.toml"
    file.write_text('[[stages]]\nforward = "1 GFLOP"\nbackward = "2 GFLOP"\n', encoding="utf-8")
    with pytest.raises(RequestError, match="speed"):
        simulate("multi-cdp", model=file)
    cluster = Cluster(devices=(Devices(speed=1e9),))
    assert simulate("multi-cdp", model=file, cluster=cluster).summary()["makespan"] == 9


def test_a_cluster_with_too_few_devices_is_refused() -> None:
    """By how many."""
    with pytest.raises(RequestError, match="has 2 devices, but multi-cdp needs 3"):
        simulate("multi-cdp", 3, cluster=Cluster(devices=(Devices(count=2),)))


def test_a_schedule_may_be_given_itself() -> None:
    """The registry is a convenience."""
    assert simulate(SCHEDULES["pp-cdp"], 3).summary() == simulate("pp-cdp", 3).summary()


def test_a_huge_prefetch_is_as_good_as_the_whole_run() -> None:
    """Everything may arrive at once."""
    assert simulate("zero-cdp", 3, prefetch=10**17).summary()["makespan"] == 22


@given(requests(most=3))
@settings(max_examples=40)
def test_a_saved_trace_is_reopened_with_its_run(request: dict[str, Any]) -> None:
    """For every request: the recorded one, served again, gives the same columns."""
    trace = simulate(**request)
    with TemporaryDirectory() as folder:
        trace.save(Path(folder) / "trace")
        again = reopen(Path(folder) / "trace")
    assert again.summary() == trace.summary()


def test_a_changed_trace_stands_for_itself(tmp_path: Path) -> None:
    """As does one that was measured: no run is behind it."""
    simulate("pp-cdp", 2).save(tmp_path / "trace")
    tasks = tmp_path / "trace" / "tasks.csv"
    tasks.write_text(tasks.read_text().replace("F,0,0,0,0,0,1,0,0", "F,0,0,0,0,0,2,0,0"))
    trace = reopen(tmp_path / "trace")
    assert not isinstance(trace, Run)
    assert trace.tasks["end"][0] == 2


@pytest.mark.every_case
@pytest.mark.parametrize(
    "change",
    [
        {"request": None},
        {"request": {}},
        {"request": []},
        {"schedule": ["multi-cdp"]},
        {"schedule": "lost"},
        {"n": "three"},
        {"rule": "/etc/hostname"},
        {"rule": [[1, 2], [3]]},
        {"rule": {}},
        {"model": {"stages": 7}},
        {"cluster": 3},
        {"steps": 10**12},
        {"steps": 1},
        {"slot_order": "upwards"},
    ],
)
def test_a_request_that_cannot_be_served_again_leaves_the_columns(tmp_path: Path, change: dict[str, Any]) -> None:
    """The recorded request may be anything: another program may have written it."""
    trace = simulate("multi-cdp", 2, steps=2)
    trace.save(tmp_path / "trace")
    path = tmp_path / "trace" / "summary.json"
    summary = json.loads(path.read_text())
    if "request" in change:
        summary["request"] = change["request"]
    else:
        summary["request"] |= change
    path.write_text(json.dumps(summary))
    again = reopen(tmp_path / "trace")
    assert not isinstance(again, Run)
    assert again.tasks["start"].tolist() == trace.tasks["start"].tolist()

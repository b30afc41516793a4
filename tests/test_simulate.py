"""The front door in Python: what it takes, what it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, simulate
from cdpsim.cluster import Devices
from cdpsim.schedules.rule import matrix_rule

TWO = Model(stages=(Stage(forward=1.0, backward=2.0),) * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 10**5000}, "n: n=9.* is astronomically large"),
        ({"n": True}, "n=True must be a whole number"),
        ({"n": 3.0}, "n=3.0 must be a whole number"),
        ({"n": None}, "n=None must be a whole number"),
        ({"chunks": True}, "chunks=True must be a whole number"),
        ({"chunks": 2}, "chunks: multi-cdp does not take this option"),
        ({"m": 4}, "m: multi-cdp does not take this option"),
        ({"engine": None}, "unknown engine None"),
        ({"engine": "fas"}, "did you mean 'fast'"),
        ({"collective": 3}, "unknown collective 3"),
        ({"slot_order": 1}, "unknown slot-order 1"),
        ({"rule": 7}, "unknown rule '7'"),
        ({"rule": matrix_rule(np.ones((2, 2), dtype=bool))}, "has 2 rows of 2"),
        ({"model": "unti"}, "unknown model 'unti'; known is unit"),
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
    """Whatever it is."""
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
    with pytest.raises(RequestError, match="has 2 devices, but the schedule needs 3"):
        simulate("multi-cdp", 3, cluster=Cluster(devices=(Devices(count=2),)))


def test_a_schedule_may_be_given_itself() -> None:
    """The registry is a convenience."""
    assert simulate(SCHEDULES["pp-cdp"], 3).summary() == simulate("pp-cdp", 3).summary()


def test_a_huge_prefetch_is_as_good_as_the_whole_run() -> None:
    """Everything may arrive at once."""
    assert simulate("zero-cdp", 3, prefetch=10**17).summary()["makespan"] == 22

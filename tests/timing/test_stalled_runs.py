"""Runs that do not end: the cycle of waits, by hand and on drawn programs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, Stage, simulate
from cdpsim.cluster.disorder import Disorder, Stop
from cdpsim.errors import Stalled
from cdpsim.numeric.disturbances import FOREVER
from cdpsim.runs import Run
from cdpsim.timing.costs import disturbed_costs, node_costs
from cdpsim.timing.engine import ENGINES, Wait, refuse_stalled, waits
from tests.conftest import Command
from tests.helpers.command_line import content
from tests.helpers.strategies import fitting

TWO = Model(stages=(Stage(forward=1.0, backward=2.0),) * 2)


def stopped(name: str, n: int, stops: dict[int, int]) -> tuple[Run, dict[str, tuple[Any, Any]]]:
    """A run in slots without stops, and what each engine makes of it if devices stop for good."""
    run = simulate(**fitting(name, n), steps=2)
    disorder = Disorder(stop=tuple(Stop(device=d, at=at) for d, at in stops.items()))
    model = Model.unit(run.program.n, split=run.program.splits)
    costs = node_costs(run.program, model, Cluster.unit(), "ring")
    costs = disturbed_costs(run.program, costs, disorder, 0, 0)
    times = {engine: play(run.program, costs) for engine, play in ENGINES.items()}
    return replace(run, costs=costs), times


def test_a_pipeline_waits_for_its_second_device() -> None:
    """pp-cdp of three: device 1 stops in slot 3, in which it would begin F(t=0,i=1,j=1).

    Micro-batch 0 is at stage 2 by then: device 2 does F and B of it (slots 2 and 3), and waits for the activation of
    micro-batch 1. Device 0 has sent F(0,i=1) in slot 2; it does F(0,i=2) in slot 4, then waits for the gradient of
    micro-batch 0, which device 1 would make in slot 4.
    """
    with pytest.raises(Stalled) as found:
        simulate("pp-cdp", 3, stop=["1:3"])
    assert str(found.value) == (
        "the run of pp-cdp does not end: device 1 stopped in slot 3: F(t=0,i=1,j=1) does not begin; 2 devices wait; "
        "device 0's B(t=0,i=0,j=0) waits for p2p activation_gradient(t=0,i=0,j=1) 1->0, held up by device 1; "
        "device 2's F(t=0,i=1,j=2) waits for p2p activation(t=0,i=1,j=1) 1->2, held up by device 1"
    )


def test_a_task_under_way_is_not_done() -> None:
    """DP with seconds: device 0's first backward, from 2 to 4 s, stands still at 2.5 s; device 1 waits with step 1."""
    with pytest.raises(Stalled) as found:
        simulate("multi-dp", model=TWO, stop=["0:2.5 s"])
    assert str(found.value) == (
        "the run of multi-dp does not end: device 0 stopped at 2.5 s: B(t=0,i=0,j=1) is not done; 1 device waits; "
        "device 1's F(t=1,i=1,j=0) waits for all_reduce gradient(t=0,j=0), held up by device 0"
    )


def test_an_update_may_be_what_a_device_does_not_do() -> None:
    """DP of two stages: the last backward of step 0 ends at 4, when device 1 stops and its update is due."""
    with pytest.raises(Stalled, match=r"device 1 stopped in slot 4: U\(t=0,j=0\) on device 1 does not begin"):
        simulate("multi-dp", 2, steps=2, stop=["1:4"])
    with pytest.raises(Stalled, match=r"device 1 stopped in slot 8: U\(t=1,j=0\) on device 1 does not begin$"):
        simulate("multi-dp", 2, steps=2, stop=["1:8"])


def test_a_device_that_has_done_all_may_stop() -> None:
    trace = simulate("multi-dp", 2, steps=2, stop=["1:9"])
    assert trace.summary()["makespan"] == 8


@settings(max_examples=150)
@given(
    st.sampled_from([name for name in SCHEDULES if not name.startswith("single")]),
    st.integers(2, 4),
    st.dictionaries(st.integers(0, 1), st.integers(0, 12), min_size=1),
)
def test_whoever_does_not_end_is_told_with_a_chain_to_who_stopped(name: str, n: int, stops: dict[int, int]) -> None:
    """Both engines stop at the same; each waiting device is named with something that does not end, whose blocker is
    named, too; and from blocker to blocker one comes to a device that has stopped, in no more steps than devices.
    """
    run, times = stopped(name, n, stops)
    program = run.program
    (start, end), (other_start, other_end) = times.values()
    assert (start == other_start).all()
    assert (end == other_end).all()
    found = {wait.device: wait for wait in waits(program, end)}
    never = {int(program.tasks.device[task]) for task in program.lane_tasks if end[task] >= FOREVER}
    assert never <= set(found)
    roots = {device for device, wait in found.items() if wait.task == wait.for_node}
    assert roots <= set(stops)
    for device, wait in found.items():
        assert end[wait.task] >= FOREVER
        assert end[wait.for_node] >= FOREVER
        assert program.tasks.device[wait.task] == device
        for _ in range(program.devices):
            device = found[device].blocker
        assert device in roots
    assert bool(found) == bool((end >= FOREVER).any())


def test_a_run_that_ends_is_not_refused() -> None:
    run, times = stopped("multi-cdp", 3, {0: 10**6})
    refuse_stalled(run.program, run.costs, *times["fast"])
    assert waits(run.program, times["fast"][1]) == []


def test_many_waiting_devices_are_counted() -> None:
    """Of the 64 of mp-dp, 63 wait; sixteen are named, and the line stays one that can be read."""
    with pytest.raises(Stalled) as found:
        simulate("mp-dp", 8, stop=["0:3"])
    assert "63 devices wait" in str(found.value)
    assert str(found.value).endswith("; and 47 more")
    assert str(found.value).count("held up by") == 16


@pytest.mark.parametrize(
    "line", ["simulate {} -o out", "timeline {} -o out.svg", "compare {}", "plot steps {} -o o.svg"]
)
def test_the_answer_is_no_in_one_line_and_nothing_is_written(line: str, command: Command, here: Path) -> None:
    before = content(here)
    code, out, err = command(*line.format("pp-cdp -n 3 --stop 1:3").split())
    assert (code, out) == (1, "")
    assert err.startswith("cdpsim: the run of pp-cdp does not end: device 1 stopped in slot 3")
    assert err.count("\n") == 1
    assert content(here) == before


def test_waits_are_plain() -> None:
    """The fields of a wait have names for programs to read."""
    run, times = stopped("pp-cdp", 3, {1: 3})
    first = waits(run.program, times["fast"][1])[0]
    assert first == Wait(device=0, task=5, for_node=first.for_node, blocker=1)
    assert run.program.describe(first.task) == "B(t=0,i=0,j=0)"

"""Stages with different numbers of devices: PipeDream's 1F1B round robin (SOSP 2019, section 3.2), with a flush.

The independent player below knows no lists of the schedule. It is a worker's loop as the authors' runtime has it, which
begins with (devices from its stage on - 1) // devices of its stage forwards, does a forward and a backward in turn, and
ends with backwards. Workers block until the input of their next pass is there.
"""

from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Model, Request, Stage, compare, simulate
from cdpsim.cluster import Cluster, Devices, Link
from cdpsim.errors import RequestError
from cdpsim.invariants import violations
from cdpsim.runs import Run
from cdpsim.schedules.actions import check_actions
from cdpsim.schedules.pipelines import one_f_one_b, one_f_one_b_round_robin
from cdpsim.schedules.placement import Shape
from tests.conftest import Command
from tests.helpers.command_line import refuse

Passes = dict[tuple[str, int, int], tuple[int, float]]  # kind, stage and micro-batch: device and start
widths = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple).filter(lambda drawn: set(drawn) != {1})


def model_of(*times: tuple[float, float]) -> Model:
    """A model of stages that take so long forward and backward."""
    return Model(stages=tuple(Stage(forward=forward, backward=backward) for forward, backward in times))


def played(replicas: tuple[int, ...], m: int, times: tuple[tuple[float, float], ...]) -> Passes:
    """Play the workers' loops: each does its next pass when that pass's input has come and it is free."""
    n, workers = len(replicas), []
    for stage, count in enumerate(replicas):
        for rank in range(count):
            own = list(range(rank, m, count))
            warmup = min((sum(replicas[stage:]) - 1) // count, len(own))
            loop = [("F", i) for i in own[:warmup]]
            for k, i in enumerate(own[warmup:]):
                loop += [("F", i), ("B", own[k])]
            loop += [("B", i) for i in own[len(own) - warmup :]]
            workers.append((stage, loop))
    found: Passes = {}
    end: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(workers), [0] * len(workers)
    while any(at[w] < len(loop) for w, (_, loop) in enumerate(workers)):
        before = sum(at)
        for w, (stage, loop) in enumerate(workers):
            while at[w] < len(loop):
                kind, i = loop[at[w]]
                needs = (
                    ("F", stage - 1, i) if kind == "F" else ("B", stage + 1, i) if stage < n - 1 else ("F", stage, i)
                )
                if needs not in end and needs[1] >= 0:
                    break
                start = max(free[w], end.get(needs, 0.0))
                free[w] = end[kind, stage, i] = start + times[stage][kind == "B"]
                found[kind, stage, i], at[w] = (w, start), at[w] + 1
        assert sum(at) > before, "the workers wait for each other"
    return found


def simulated(run: Run) -> Passes:
    """The same facts of a run's first step."""
    return {
        (task.kind, task.stage, task.micro_batch): (task.device, task.start)
        for task in run.tasks
        if task.kind != "U" and task.step == 0
    }


def test_figure_8_of_the_paper() -> None:
    """A 2-1 configuration; passes take two units in the first stage and one in the second.

    By hand, from the paper's rules: NOAM is ceil(3 / 2) = 2, even micro-batches go to the first worker and odd ones to
    the second. The third worker is busy from its first micro-batch on, and then the first stage keeps up with it.
    """
    run = simulate("1f1b", m=8, steps=1, model=model_of((2, 2), (1, 1)), stage_replicas=(2, 1))
    by_hand = {
        0: "F0:0 F2:2 B0:4 F4:6 B2:8 F6:10 B4:12 B6:16",
        1: "F1:0 F3:2 B1:6 F5:8 B3:10 F7:12 B5:14 B7:18",
        2: " ".join(f"F{i}:{2 + 2 * i} B{i}:{3 + 2 * i}" for i in range(8)),
    }
    for device, expected in by_hand.items():
        tasks = sorted((t for t in run.tasks if t.device == device and t.kind != "U"), key=lambda task: task.start)
        assert " ".join(f"{task.kind}{task.micro_batch}:{task.start:g}" for task in tasks) == expected
    assert run.end.max() == 2 * 8 + 4


@given(widths, st.integers(0, 9), st.data())
def test_devices_do_what_the_workers_of_the_authors_runtime_do(
    replicas: tuple[int, ...], more: int, data: st.DataObject
) -> None:
    """In the same order at the same times, whatever stages take; no worker waits for ever."""
    m = max(replicas) + more
    whole = st.integers(1, 9).map(float)
    times = tuple(data.draw(st.tuples(whole, whole)) for _ in replicas)
    check_actions(one_f_one_b_round_robin(replicas, m))
    run = simulate("1f1b", m=m, steps=1, model=model_of(*times), stage_replicas=replicas)
    assert simulated(run) == played(replicas, m, times)
    assert run.program.devices == sum(replicas)


@given(st.integers(1, 6), st.integers(1, 12))
def test_one_device_for_each_stage_is_1f1b(n: int, m: int) -> None:
    one, other = one_f_one_b(n, m), one_f_one_b_round_robin((1,) * n, m)
    for column in ("first", "kind", "stage", "micro_batch"):
        assert np.array_equal(getattr(one, column), getattr(other, column))


@given(widths, st.integers(0, 6), st.integers(1, 2), st.data())
def test_laws(replicas: tuple[int, ...], more: int, copies: int, data: st.DataObject) -> None:
    """All invariants hold, both engines agree, and the request asked again is the same run."""
    asked: dict[str, Any] = {"m": max(replicas) + more, "stage_replicas": replicas, "replicas": copies}
    if data.draw(st.booleans()):
        stages = tuple(Stage(forward=1.0 + j, backward=2.0, boundary=8, parameters=64) for j in range(len(replicas)))
        overlap = data.draw(st.sampled_from(["full", "none"]))
        cluster = Cluster(devices=(Devices(overlap=overlap),), link=Link(latency=0.25, bandwidth=64.0))
        asked |= {"model": Model(stages=stages), "cluster": cluster}
    run = simulate("1f1b", len(replicas), **asked)
    assert violations(run) == {}
    assert simulate("1f1b", len(replicas), engine="simpy", **asked).tasks == run.tasks
    assert simulate(Request.from_builtins(run.request.to_builtins())).messages == run.messages


def test_gradients_are_summed_over_the_devices_of_a_stage() -> None:
    """One all-reduce a step of each stage with several; also where these have unlike numbers of micro-batches."""
    run = simulate("1f1b", 4, m=7, steps=2, stage_replicas=[3, 1, 2, 1])
    sums = [m for m in run.messages if m.content == "gradient"]
    assert [(m.op, m.stage, m.step, m.dst) for m in sums] == [
        ("all_reduce", stage, step, group) for step in (0, 1) for stage, group in ((2, "4|5"), (0, "0|1|2"))
    ]
    both = simulate("1f1b", 4, m=7, steps=1, stage_replicas=[3, 1, 2, 1], replicas=2)
    groups = {m.stage: m.dst for m in both.messages if m.content == "gradient"}
    assert groups == {0: "0|1|2|7|8|9", 1: "3|10", 2: "4|5|11|12", 3: "6|13"}


@pytest.mark.parametrize("replicas", [(2, 1), (2, 1, 1, 1), (3, 2, 1), (1, 2, 4), (4, 1, 2)])
def test_micro_batches_in_flight_are_the_papers(replicas: tuple[int, ...]) -> None:
    """NOAM of the first stage, and of each later one the same of what is left of the pipeline."""
    run = simulate("1f1b", len(replicas), m=24, steps=1, stage_replicas=replicas)
    expected = [ceil(sum(replicas[j:]) / r) for j, r in enumerate(replicas) for _ in range(r)]
    assert [device["activations"] for device in run.peak_memory] == expected


def test_stages_balanced_by_devices_leave_a_bubble_of_fill_alone() -> None:
    """Stages of 6, 3 and 3 units each way on 2, 1 and 1 devices: every 6 units a micro-batch, when all is full."""
    ends = [
        simulate("1f1b", m=m, steps=1, model=model_of((6, 6), (3, 3), (3, 3)), stage_replicas=(2, 1, 1)).end.max()
        for m in (16, 32, 64)
    ]
    assert np.diff(ends).tolist() == [6 * 16, 6 * 32]
    (row,) = compare(["1f1b"], m=64, model=model_of((6, 6), (3, 3), (3, 3)), stage_replicas=(2, 1, 1)).measured
    assert (row.devices, row.imbalance) == (4, 0)


def test_equal_devices_are_whole_pipelines() -> None:
    (row,) = compare(["1f1b"], devices=9, batch=12, stage_replicas="2,1").measured
    assert (row.n, row.m, row.replicas, row.devices) == (2, 4, 3, 9)
    with pytest.raises(RequestError, match="8 are no multiple of the 3 of a pipeline"):
        compare(["1f1b"], devices=8, stage_replicas=[2, 1])


def test_actions_of_a_shape() -> None:
    assert SCHEDULES["1f1b"].actions(Shape(2, 4, widths=(2, 1))).devices == 3


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("1f1b -n 4 --stage-replicas 2,1,1", "stage-replicas: has 3 numbers for n=4 stages; give one for each"),
        ("1f1b -n 2 --stage-replicas 2,0", "stage-replicas: stage-replicas=0 must be at least 1"),
        ("1f1b -n 2 --stage-replicas 2,x", "stage-replicas: stage-replicas=x must be a whole number of at least 1"),
        ("1f1b -n 2 --stage-replicas 3,1", "m: 1f1b needs a micro-batch for each of the 3 devices of a stage; m=2"),
    ],
)
def test_what_does_not_fit_is_refused(asked: str, problem: str, command: Command, here: Path) -> None:
    refuse(command, here, f"simulate {asked}", problem)


def test_other_schedules_name_the_one_that_can(command: Command) -> None:
    """PipeDream itself updates a stage after each micro-batch, where its devices have no sum."""
    done = command("simulate", "pipedream", "-n", 4, "--stage-replicas", "2,1,1,1")
    assert done.code == 2
    assert done.err.startswith("cdpsim: error: stage-replicas: pipedream does not take this option (it takes ")
    assert done.err.endswith("); 1f1b does\n")


@pytest.mark.parametrize("other", [{"zero": 1, "replicas": 2}, {"buckets": "1 MiB,25 MiB"}, {"clip": True}])
def test_sums_in_other_pieces_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"stage-replicas: .* and --{next(iter(other))} asks for more; leave either"):
        simulate("1f1b", 2, m=4, stage_replicas=(2, 1), model="gpt2", **other)


def test_a_number_is_no_list() -> None:
    with pytest.raises(RequestError, match="stage-replicas: 2 is no list; write a number for each stage: 2,1,1"):
        Request("1f1b", 2, stage_replicas=2)  # type: ignore[arg-type]

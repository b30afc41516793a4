"""Updates that take time: their starts, the tasks that wait for them, the memory meanwhile; by hand and recomputed."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import Cluster, Model, RequestError, Stage, Trace, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Devices, Link
from cdpsim.files.units import Work
from cdpsim.invariants import violations
from cdpsim.program.check import check_columns
from cdpsim.request.options import EngineName
from cdpsim.runs import Run
from cdpsim.schedules import TABLE_1
from cdpsim.trace import load
from cdpsim.trace.metrics.waiting import IdleReason, idle_spans, waits_for
from tests.helpers.times import are_close

ROWS = [(name, rule) for name in TABLE_1 for rule in (("dp",) if name.endswith("-dp") else ("cdp-v1", "cdp-v2"))]


def model(n: int = 3, update: Any = 0.5, **more: Any) -> Model:
    stage = {"forward": 1.0, "backward": 2.0, "parameters": 10, "optimizer": 20, "activation": 5, "boundary": 1} | more
    return Model(stages=(Stage(**stage, update=update),) * n)


def updates(trace: Trace) -> list[tuple[int, int, int, float, float]]:
    """Step, stage, device, start and end of each update."""
    tasks = trace.tasks
    rows = np.flatnonzero(tasks["kind"] == "U")
    columns = (tasks[name][rows].tolist() for name in ("step", "stage", "device", "start", "end"))
    return sorted(zip(*columns, strict=True))


def held(trace: Run, device: int, category: str) -> list[tuple[float, int]]:
    """Return the times and bytes of a category on a device."""
    memory = trace.memory
    rows = np.flatnonzero((memory["device"] == device) & (memory["category"] == category))
    return list(zip(memory["time"][rows].tolist(), memory["size"][rows].tolist(), strict=True))


def test_a_pipeline_by_hand() -> None:
    """Two stages, CDP-v2, free messages: a pass takes 6 s, so micro-batch 1 is released at 3.

    Device 0: F0 0-1, F1 3-4, B0 4-6 (B0 of stage 1 is done at 4), B1 7-9 (that of stage 1 at 7), U 9-9.5.
    Device 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7, U 7-7.5.
    Step 1 reads, of micro-batch 0, theta_0 of stage 0: device 0 does F0 at 6-7, before B1 by the slots' order.
    On device 1 it reads theta_1: F0 at 7.5, when that is made.
    """
    trace = simulate("pp-cdp", 2, steps=2, model=model(2))
    assert updates(trace)[:2] == [(0, 0, 0, 9.0, 9.5), (0, 1, 1, 7.0, 7.5)]
    tasks = trace.tasks
    second = (tasks["step"] == 1) & (tasks["kind"] == "F") & (tasks["micro_batch"] == 0)
    assert sorted(zip(tasks["stage"][second], tasks["start"][second], strict=True)) == [(0, 6.0), (1, 7.5)]
    # Micro-batch 0 of step 1 still owes its backward with theta_0 when theta_1 of stage 0 is written: both are there.
    assert held(trace, 0, "parameters")[:2] == [(0.0, 10), (9.0, 20)]
    # On the last stage no task needs the old version: the new one is written where it is.
    assert held(trace, 1, "parameters")[0] == (0.0, 10)
    assert len(held(trace, 1, "parameters")) == 2
    # Gradients are there until the update has ended.
    assert held(trace, 1, "gradients")[:2] == [(2.0, 10), (7.5, 0)]


def test_a_replica_writes_a_version_beside_one_that_is_still_read() -> None:
    """Two replicas of two stages, free messages.

    Device 1: F0 1-2, B0 2-4, U0 4-4.5, F1 4.5-5.5, B1 5.5-7.5.
    Device 0: F0 0-1, F1 1-2, B0 4-6, U0 6-6.5, F2 6.5-7.5, B1 7.5-9.5, U1 9.5-10; B2 11-13, U2 13-13.5.
    PipeDream's B1 reads theta_0 as F1 did: U0 writes theta_1 beside it from 6 on, and U1 theta_2 beside theta_1, which
    B2 reads until 13. U2 writes in place. PipeMare's backwards read the newest, so that all of its updates do.
    """
    trace = simulate("pipedream", 2, replicas=2, steps=3, model=model(2))
    assert [(t, start) for t, _, device, start, _ in updates(trace) if device == 0] == [(0, 6), (1, 9.5), (2, 13)]
    assert held(trace, 0, "parameters") == [(0, 10), (6, 20), (13, 10), (13.5, 0)]
    newest = simulate("pipemare", 2, m=2, replicas=2, steps=3, model=model(2))
    assert [size for _, size in held(newest, 0, "parameters")] == [10, 0]


def test_a_device_does_nothing_else_while_it_updates() -> None:
    """Each of 2 devices has 2 updates a step beside 6 s of work: 7 s a step, all of them busy."""
    trace = simulate("multi-dp", 2, steps=4, model=model(2))
    summary = trace.summary()
    assert (summary["makespan"], summary["period"], summary["bubble"]) == (28.0, 7.0, 0.0)
    assert updates(trace)[:4] == [(0, 0, 0, 6.0, 6.5), (0, 0, 1, 6.0, 6.5), (0, 1, 0, 6.5, 7.0), (0, 1, 1, 6.5, 7.0)]


def test_work_takes_what_the_device_needs_for_it() -> None:
    """1 FLOP on devices of 2 and 4 FLOP/s."""
    cluster = Cluster(devices=(Devices(count=1, speed=2.0), Devices(count=1, speed=4.0)))
    trace = simulate("multi-dp", 1, steps=1, model=model(1, Work(1)), cluster=cluster)
    assert updates(trace) == [(0, 0, 0, 3.0, 3.5)]
    trace = simulate("pp-cdp", 2, steps=1, model=model(2, Work(1)), cluster=cluster)
    assert [end - start for _, _, _, start, end in updates(trace)] == [0.5, 0.25]
    with pytest.raises(RequestError, match="stage 0: update is work; give --cluster with a speed, or times"):
        simulate("pp-cdp", 2, model=model(2, Work(1)))


def test_an_update_waits_for_the_partial_sum_that_comes_late() -> None:
    """Algorithm 1: a worker adds what it receives, updates, and goes on with the next backward.

    Two workers, gradients of 10 bytes at 2 bytes/s: worker 1 gets that of stage 1 at 5 + 5 = 9, when its own backward
    (released at 3: F 3-4, 4-5, B 5-7) has been ready since 7. It updates at 9 and does B of stage 0 afterwards.
    """
    trace = simulate("multi-cdp", 2, steps=1, model=model(2), cluster=Cluster(link=Link(bandwidth=2.0)))
    tasks = trace.tasks
    row = {(k, d, j): (s, e) for k, d, j, s, e in zip(*(tasks[c].tolist() for c in COLUMNS), strict=True)}
    assert row["B", 0, 1] == (2.0, 4.0)
    assert row["B", 1, 1] == (5.0, 7.0)
    assert row["U", 1, 1] == (9.0, 9.5)
    assert row["B", 1, 0] == (9.5, 11.5)
    assert row["U", 1, 0] == (11.5, 12.0)  # the gradient of stage 0 came at 6 + 5


COLUMNS = ("kind", "device", "stage", "start", "end")


@pytest.mark.parametrize(("schedule", "rule"), ROWS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_no_time_is_no_difference(schedule: str, rule: str, n: int) -> None:
    """Columns are the same without updates' times; with them the same tasks, never earlier, both engines agreeing."""
    cluster = Cluster(link=Link(latency=0.125, bandwidth=64.0))
    options: dict[str, Any] = {"n": n, "rule": rule, "cluster": cluster}
    at_once = simulate(schedule, model=model(n, None), **options)
    assert len(at_once.program.lane_tasks) == at_once.program.compute
    timed = simulate(schedule, model=model(n), **options)
    tasks = slice(len(timed.program.tasks))
    assert (timed.start[tasks] >= at_once.start[tasks]).all()
    assert len(timed.program.lane_tasks) == len(timed.program.tasks)
    again = simulate(schedule, model=model(n), engine="simpy", **options)
    assert np.array_equal(timed.start, again.start)
    assert np.array_equal(timed.end, again.end)
    assert not violations(timed)


times = st.integers(1, 12).map(float)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Model, int, str, float]:
    """Stages updated by their devices or hosts, steps, a rule, and the latency of a link."""
    n, host = draw(st.integers(1, 4)), draw(st.booleans())
    stages = []
    for _ in range(n):
        cost = draw(times)
        update: dict[str, Any] = {"host_optimizer": 1, "host_update": cost} if host else {"update": cost}
        stages.append(Stage(forward=draw(times), backward=draw(times), boundary=1, **update))
    latency = draw(st.sampled_from([0.0, 1.0, 3.0]))
    return Model(stages=tuple(stages)), draw(st.integers(1, 4)), draw(st.sampled_from(["cdp-v1", "cdp-v2"])), latency


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_a_pipeline_is_what_a_walk_through_its_slots_says(drawn: tuple[Model, int, str, float]) -> None:
    """`walked` evaluates pp-cdp from the specification, task after task."""
    model, steps, rule, latency = drawn
    trace = simulate("pp-cdp", model=model, steps=steps, rule=rule, cluster=Cluster(link=Link(latency=latency)))
    names = ("kind", "stage", "micro_batch", "step", "start", "end")
    found = {tuple(row[:4]): tuple(row[4:]) for row in zip(*(trace.tasks[c].tolist() for c in names), strict=True)}
    expected = walked(model, steps, rule == "cdp-v1", latency)
    assert found.keys() == expected.keys()
    assert are_close(np.array([found[task] for task in found]), [expected[task] for task in found])


def walked(model: Model, steps: int, barrier: bool, latency: float) -> dict[tuple[Any, ...], tuple[float, float]]:
    """Tasks in the order of their slots: all that each one waits for has its times by then.

    A device does what it has in the order of slots, an update after the last backward, or the barrier's slot.
    """
    n = model.n
    order: list[tuple[int, int, str, int, int, int]] = []
    for t in range(steps):
        last = 2 * n * t + 2 * (n - 1) + 2 * n - 1
        for j in range(n):
            for i in range(n):
                begin = 2 * n * t + 2 * i
                order += [(begin + j, 0, "F", j, i, t), (begin + 2 * n - 1 - j, 0, "B", j, i, t)]
            order.append((last if barrier else last - j, 1, "U", j, -1, t))
    free: dict[int, float] = defaultdict(float)  # when each device is
    host: dict[int, float] = defaultdict(float)
    found: dict[tuple[Any, ...], tuple[float, float]] = {}
    whole = sum(float(stage.forward + stage.backward) for stage in model.stages)

    def end(*task: Any) -> float:
        return found[task][1]

    for _, _, kind, j, i, t in sorted(order):
        stage = model.stages[j]
        if kind == "U":
            ready = max(end("B", j, k, t) for k in range(n))
            ready = max(ready, end("B", 0, n - 1, t)) if barrier else ready
            own = host if stage.updated_on_host else free
            start = max(ready, own[j])
            took = stage.host_update if stage.updated_on_host else float(stage.update or 0)
            own[j] = start + took
        else:
            version = t if not barrier and i + j >= n - 1 else max(t - 1, 0)
            needs = [free[j]]
            if kind == "F":
                needs += [end("U", j, -1, version - 1)] if version else []
                needs += [end("F", j - 1, i, t) + latency] if j else [whole * i / n] if t == 0 else []
            else:
                needs += [end("B", j + 1, i, t) + latency] if j < n - 1 else [end("F", j, i, t)]
            start, took = max(needs), float(stage.forward if kind == "F" else stage.backward)
            free[j] = start + took
        found[kind, j, i, t] = (start, start + took)
    return found


def test_an_idle_device_waits_for_its_hosts_update() -> None:
    """Of one device: 3 s of work, then the host's 2 s, in which the device can do nothing: 2 of 5."""
    trace = simulate("single-dp", 1, steps=2, model=model(1, None, optimizer=0, host_optimizer=20, host_update=2.0))
    run = trace
    found = idle_spans(run.program, run.start, run.end)
    assert list(zip(found["begin"], found["end"], found["reason"], strict=True)) == [
        (3.0, 5.0, IdleReason.DEPENDENCY),
        (8.0, 10.0, IdleReason.NOTHING),
    ]
    second = run.program.phases
    assert run.program.describe(int(waits_for(run.program, run.start, run.end)[second])) == "U(t=0,j=0) on device 0"
    assert trace.summary()["bubble"] == 0.4


def test_staleness_counts_an_update_from_its_end() -> None:
    """Of a pipeline of two stages: theta_1 of stage 0 is made from 9 to 9.5. B0 of step 1 begins at 10.5: stale."""
    tasks = simulate("pp-cdp", 2, steps=2, model=model(2)).tasks
    late = (tasks["step"] == 1) & (tasks["micro_batch"] == 0) & (tasks["stage"] == 0)
    kind, start, stale = (tasks[name][late].tolist() for name in ("kind", "start", "stale"))
    assert list(zip(kind, start, stale, strict=True)) == [("F", 6.0, 0), ("B", 10.5, 1)]


def test_updates_stand_in_all_lanes_or_in_none() -> None:
    program = simulate("pp-cdp", 2, steps=1, model=model(2)).program
    check_columns(program)
    fewer = replace(program, lane_tasks=program.lane_tasks[:-1], lane_start=program.lane_start - np.array([0, 0, 1]))
    with pytest.raises(RequestError, match=r"U\(t=0,j=1\) on device 1 has 0 places in lanes; it needs one"):
        check_columns(fewer)


def test_a_model_is_updated_in_one_place() -> None:
    device = Stage(forward=1, backward=1, update=1)
    host = Stage(forward=1, backward=1, host_optimizer=1, host_update=1)
    with pytest.raises(RequestError, match="some are updated on their device and some on its host"):
        Model(stages=(device, host))
    with pytest.raises(RequestError, match="update: is on the device, but host_optimizer says"):
        Stage(forward=1, backward=1, host_optimizer=1, update=1)
    with pytest.raises(RequestError, match="optimizer: is on the device, but host_optimizer says"):
        Stage(forward=1, backward=1, host_optimizer=1, optimizer=1)


def test_files_bring_updates_back(tmp_path: Path) -> None:
    trace = simulate("multi-cdp", 2, model=model(2))
    trace.save(tmp_path / "run")
    assert updates(load(tmp_path / "run")) == updates(trace)
    assert isinstance(reopen(tmp_path / "run"), Run)


@pytest.mark.parametrize("where", [{"update": 2.0}, {"optimizer": 0, "host_optimizer": 1, "host_update": 2.0}])
@pytest.mark.parametrize("engine", ["fast", "simpy"])
def test_a_device_that_stands_still_makes_no_update(where: dict[str, Any], engine: EngineName) -> None:
    """Three seconds of work, then an update from 3 on, of 2 s; the device stops from 4 to 5, its host with it."""
    single = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=1, **where),))
    trace = simulate("single-dp", model=single, steps=1, engine=engine, stop=["0:4 s:1 s"])
    assert updates(trace) == [(0, 0, 0, 3.0, 6.0)]
    slow = simulate("single-dp", model=single, steps=1, engine=engine, slow=["0:2"])
    assert updates(slow) == [(0, 0, 0, 6.0, 10.0)]

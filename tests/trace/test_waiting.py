"""Why lanes are idle: small runs by hand, and laws for all."""

from dataclasses import replace
from inspect import unwrap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, Stage, simulate
from cdpsim.cluster import Devices, Link, PairLink
from cdpsim.files.units import Work
from cdpsim.program import EdgeKind, Program
from cdpsim.runs import Run
from cdpsim.schedules.state import Placed
from cdpsim.studies.compare import measure
from cdpsim.timing import engine
from cdpsim.trace.metrics import waiting
from cdpsim.trace.metrics.waiting import IdleReason
from tests.helpers.strategies import requests, streamed_requests

MESSAGE, STREAM, DEPENDENCY, NOTHING = IdleReason
TWO = Model(stages=(Stage(forward=1.0, backward=2.0, boundary=1, parameters=3, activation=1),) * 2)


def idle(run: Run) -> dict[str, np.ndarray]:
    """The idle parts of a run."""
    return waiting.idle_spans(run.program, run.start, run.end)


def rows(trace: Run) -> list[tuple[float, ...]]:
    """The idle parts as (lane, device, begin, end, reason)."""
    return list(zip(*(column.tolist() for column in idle(trace).values()), strict=True))


def named(trace: Run) -> dict[str, str]:
    """Which task waited for what, both by their names."""
    program, start, end = trace.program, trace.start, trace.end
    last = waiting.waits_for(program, start, end)
    return {program.describe(int(task)): program.describe(int(last[task])) for task in np.flatnonzero(last >= 0)}


def test_a_pipeline_of_two_stages_by_hand() -> None:
    """A boundary takes 1.5 s; micro-batch 1 is released after half of a pass of 6 s.

    Device 0 waits for the first gradient while device 1 makes it (until 5.5) and while it comes, and for the second
    while that comes, as device 1 has made it before (at 8.5).
    """
    trace = simulate("pp-cdp", 2, steps=1, model=TWO, cluster=Cluster(link=Link(latency=0.5, bandwidth=1.0)))
    assert rows(trace) == [
        (0, 0, 1.0, 3.0, NOTHING),
        (0, 0, 4.0, 5.5, DEPENDENCY),
        (0, 0, 5.5, 7.0, MESSAGE),
        (0, 0, 9.0, 10.0, MESSAGE),
        (1, 1, 0.0, 1.0, DEPENDENCY),
        (1, 1, 1.0, 2.5, MESSAGE),
        (1, 1, 8.5, 12.0, NOTHING),
    ]
    assert named(trace) == {
        "F(t=0,i=0,j=1)": "p2p activation(t=0,i=0,j=0) 0->1",
        "B(t=0,i=0,j=0)": "p2p activation_gradient(t=0,i=0,j=1) 1->0",
        "B(t=0,i=1,j=0)": "p2p activation_gradient(t=0,i=1,j=1) 1->0",
    }


def test_an_all_reduce_by_hand() -> None:
    """Both devices work for 6 s, then 3 bytes at 2 bytes/s after 0.5 s; each updates its own replica, in no time."""
    trace = simulate("multi-dp", 2, steps=2, model=TWO, cluster=Cluster(link=Link(latency=0.5, bandwidth=2.0)))
    assert rows(trace) == [
        (device, device, begin, begin + 2.0, reason)
        for device in range(2)
        for begin, reason in ((6.0, MESSAGE), (14.0, NOTHING))
    ]
    assert set(named(trace).values()) == {"all_reduce gradient(t=0,j=0)"}


def test_streams_by_hand() -> None:
    """Two all-reduces, 2 s each, go one after another: from 6 to 8 s and to 10 s.

    A device that can compute meanwhile goes on at 8 with stage 0, and at 9 waits for stage 1 while that is on its way.
    One that cannot has all that it needs at 8, but its stream not before 10. At the end both reductions are done at
    once and no task waits: there is nothing to do any more.
    """
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=1),) * 2)
    for overlap, parts in (
        ("stream", [(6.0, 8.0, MESSAGE), (9.0, 10.0, MESSAGE), (15.0, 19.0, NOTHING)]),
        ("none", [(6.0, 8.0, MESSAGE), (8.0, 10.0, STREAM), (16.0, 20.0, NOTHING)]),
    ):
        cluster = Cluster(devices=(Devices(overlap=overlap),), link=Link(latency=2.0))
        trace = simulate("multi-dp", 2, steps=2, model=model, cluster=cluster)
        assert rows(trace) == [(device, device, *part) for device in range(2) for part in parts]


def test_a_slow_member_of_an_all_reduce_by_hand() -> None:
    """Device 1 is half as fast: device 0 waits 6 s for it, then both for the message."""
    model = Model(stages=(Stage(forward=Work(1e12), backward=Work(2e12), parameters=3),) * 2)
    devices = (Devices(count=1, speed=1e12), Devices(count=1, speed=0.5e12))
    trace = simulate("multi-dp", 2, steps=2, model=model, cluster=Cluster(devices=devices, link=Link(latency=2.0)))
    assert rows(trace) == [
        (0, 0, 6.0, 12.0, DEPENDENCY),
        (0, 0, 12.0, 14.0, MESSAGE),
        (0, 0, 20.0, 28.0, NOTHING),
        (1, 1, 12.0, 14.0, MESSAGE),
        (1, 1, 26.0, 28.0, NOTHING),
    ]


def test_updates_by_hand() -> None:
    """A pass takes 6 s, a message 5 s: what an update waits for is told apart by whether it is the device's own.

    Device 1 has its own gradients after 3 + 6 = 9 s, and updates when device 0's are there: stage 1 at 4 + 5 = 9 s,
    stage 0 at 6 + 5 = 11 s. Device 0 needs the new stage 1 from 7 s on: it is made until 9 s, on its way until 14 s.
    Device 1 needs the new stage 0 from 9 s on: what is on its way then is a gradient.
    """
    trace = simulate("multi-cdp", 2, steps=2, model=TWO, cluster=Cluster(link=Link(latency=5.0)))
    assert rows(trace) == [
        (0, 0, 7.0, 9.0, DEPENDENCY),
        (0, 0, 9.0, 14.0, MESSAGE),
        (0, 0, 19.0, 24.0, NOTHING),
        (1, 1, 0.0, 3.0, NOTHING),
        (1, 1, 9.0, 11.0, MESSAGE),
        (1, 1, 17.0, 24.0, NOTHING),
    ]
    assert named(trace) == {
        "F(t=1,i=0,j=1)": "p2p parameters(t=0,j=1) 1->0",
        "F(t=1,i=1,j=0)": "p2p gradient(t=0,j=0) 0->1",
    }


def test_a_message_that_takes_no_time_is_what_is_waited_for() -> None:
    """Device 1 is four times as fast, and waits for device 0's gradient of stage 0, made at 4 s, to update it."""
    model = Model(stages=(Stage(forward=Work(1.0), backward=Work(1.0), parameters=1),) * 2)
    devices = tuple(Devices(count=1, speed=speed) for speed in (1.0, 4.0))
    trace = simulate("multi-cdp", 2, steps=2, model=model, cluster=Cluster(devices=devices))
    assert named(trace) == {"F(t=1,i=1,j=0)": "p2p gradient(t=0,j=0) 0->1"}


def test_cyclic_runs_on_the_slot_model_are_idle_at_their_ends_alone() -> None:
    """Worker i of N begins 2i slots late and ends as much before the last one."""
    n = 4
    first = [(i, i, 0, 2 * i, NOTHING) for i in range(1, n)]
    last = [(i, i, 2 * n * 3 + 2 * i, 2 * n * 3 + 2 * (n - 1), NOTHING) for i in range(n - 1)]
    assert rows(simulate("multi-cdp", n)) == sorted(first + last)


def test_what_ends_a_run_of_rounds_may_be_brought_later() -> None:
    """Two workers forward and backward through two stages in 6 s, twice; the last sums take 3 s more, and no lane."""
    stages = (Stage(forward=1.0, backward=2.0, activation=1, parameters=2**20),) * 2
    cluster = Cluster(devices=(Devices(),), link=Link(latency=2.0, bandwidth=2.0**20))
    run = simulate("wp", 2, m=1, steps=1, replicas=2, model=Model(stages=stages), cluster=cluster)
    assert run.makespan == 12
    assert run.end.max() > 12
    assert rows(run) == []


@settings(max_examples=100)
@given(requests() | streamed_requests())
def test_idle_parts_are_all_of_a_lane_in_which_no_task_runs(request: dict[str, Any]) -> None:
    """Parts and tasks of a lane, in order, lie end to end from the start of the run to its end."""
    run = simulate(**request)
    program, parts = run.program, idle(run)
    whole = waiting.makespan(program, run.end)
    for lane, (low, high) in enumerate(zip(program.lane_start, program.lane_start[1:], strict=False)):
        tasks, own = program.lane_tasks[low:high], parts["lane"] == lane
        begin = np.append(parts["begin"][own], run.start[tasks])
        end = np.append(parts["end"][own], run.end[tasks])
        order = np.lexsort((end, begin))
        assert np.array_equal(np.append(0, end[order]), np.append(begin[order], whole))
        assert (parts["device"][own] == program.tasks.device[tasks[0]]).all()
    assert (parts["begin"] < parts["end"]).all()
    assert np.array_equal(np.lexsort((parts["begin"], parts["lane"])), np.arange(len(parts["lane"])))
    share = (parts["end"] - parts["begin"]).sum() / ((len(program.lane_start) - 1) * whole)
    assert share == pytest.approx(waiting.idle_share(program, run.start, run.end), abs=1e-9)


@settings(max_examples=100)
@given(requests() | streamed_requests())
def test_reasons_are_what_can_be_seen_at_that_time(request: dict[str, Any]) -> None:
    """Walk back from each task, one node at a time: a task waited for the node that ended last."""
    run = simulate(**request)
    program, last = run.program, waiting.waits_for(run.program, run.start, run.end)
    parts = idle(run)
    of_lane = {lane: np.flatnonzero(parts["lane"] == lane) for lane in set(parts["lane"].tolist())}
    for lane, (low, high) in enumerate(zip(program.lane_start, program.lane_start[1:], strict=False)):
        for place in range(low, high):
            task = int(program.lane_tasks[place])
            since = run.end[program.lane_tasks[place - 1]] if place > low else 0
            mine = [
                k for k in of_lane.get(lane, ()) if since <= parts["begin"][k] and parts["end"][k] <= run.start[task]
            ]
            told = [(parts["begin"][k], parts["end"][k], parts["reason"][k]) for k in mine]
            expected, node = walk(run, task, since)
            assert told == expected
            assert last[task] == node


def walk(run: Run, task: int, since: float) -> tuple[list[tuple[float, float, int]], int]:
    """The parts of the gap before a task, and what it waited for last: an own implementation, node by node."""
    program, tasks, count = run.program, run.program.tasks, len(run.program.tasks)
    if run.start[task] <= since:
        return [], -1

    def before(node: int, kinds: set[EdgeKind]) -> int:
        mine = (program.edges.after == node) & np.isin(program.edges.kind, list(kinds))
        return max(program.edges.before[mine], key=lambda b: (run.end[b], b), default=-1)

    def ended(node: int) -> float:
        return float(run.end[node]) if node >= 0 else 0.0

    def is_own_update(node: int) -> bool:
        return is_update_for(program, node, task)

    everything, needs = set(EdgeKind), {EdgeKind.DATA, EdgeKind.ROOM, EdgeKind.BARRIER}
    last = before(task, everything)
    while is_own_update(last) and run.start[last] == run.end[last]:
        last = before(last, everything)
    node, until = before(task, needs), float(run.start[task])
    free = max(ended(before(task, {EdgeKind.STREAM})), ended(node))
    bounds = [(NOTHING, until, free), (STREAM, free, ended(node))]
    message = -1
    while node >= count or is_own_update(node):
        earlier = before(node, needs)
        message = node if node >= count else message
        under_way, due = (DEPENDENCY, DEPENDENCY) if is_own_update(node) else (MESSAGE, STREAM)
        bounds += [(under_way, ended(node), run.start[node]), (due, run.start[node], ended(earlier))]
        node = earlier
    parts: list[tuple[float, float, int]] = []
    late = ended(node)
    takes = (program.edges.after == message) & np.isin(program.edges.kind, [EdgeKind.DATA, EdgeKind.BARRIER])
    producers = [task for task in program.edges.before[takes].tolist() if task < program.compute]
    if message >= 0 and 0 <= node < program.compute and tasks.device[task] in tasks.device[producers]:
        here, there = (released(run, of) for of in (lane_before(run, task), node))
        late -= max(there - here, 0) if here else 0
    bounds.append((MESSAGE, ended(node), late))
    for reason, high, low in [*bounds, (DEPENDENCY, late, 0.0)]:
        low, high = max(low, since), min(high, until)
        if low < high and parts and parts[0][2] == reason:
            parts[0] = (low, parts[0][1], reason)
        elif low < high:
            parts.insert(0, (low, high, int(reason)))
    messages = {count + len(program.messages) + part: count + row for part, row in _rows_of_parts(program)}
    return parts, messages.get(int(last), int(last)) if ended(last) > since else -1


def _rows_of_parts(program: Program) -> list[tuple[int, int]]:
    """Each device's part in a message, with the first of its messages."""
    pairs = zip(program.parts.part.tolist(), program.parts.message.tolist(), strict=True)
    return sorted(pairs, reverse=True)


def lane_before(run: Run, task: int) -> int:
    """The task before one in its lane, -1 for a lane's first."""
    before, after = run.program.lane_edges
    return int(next(iter(before[after == task]), -1))


def is_update_for(program: Program, node: int, task: int) -> bool:
    """Whether a node is an update on a task's device, or of any share where ranks have shares of what they update."""
    shares = program.state.optimizer is Placed.SPLIT
    return program.compute <= node < len(program.tasks) and (
        shares or bool(program.tasks.device[node] == program.tasks.device[task])
    )


def released(run: Run, task: int) -> float:
    """When a lane stopped waiting for a message, from when on it has been at work until a task; else 0."""
    program, count = run.program, len(run.program.tasks)
    while task >= 0:
        previous = lane_before(run, task)
        since = run.end[previous] if previous >= 0 else 0
        if run.start[task] > since:
            node = task
            for _ in range(2):  # of what an update of the device itself has made, what that waited for
                mine = program.edges.before[program.edges.after == node]
                node = max(mine, key=lambda b: (run.end[b], b), default=-1)
                if not is_update_for(program, node, task):
                    break
            came = node >= count and run.end[node] > max(run.start[node], since)
            return float(run.start[task]) if came else 0.0
        task = previous
    return 0.0


def test_a_ring_waits_for_messages_in_one_piece_and_as_its_messages() -> None:
    """Four devices in a ring, of which two links are slow: two members end a round of the fast links earlier.

    They come earlier to the next collective, too, where they wait for the others; that is the messages' doing.
    """
    slow = tuple(PairLink(between=pair, bandwidth=1.0) for pair in ((1, 2), (3, 0)))
    cluster = Cluster(link=Link(bandwidth=4.0), links=slow)
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=8),))
    found = [
        measure(
            simulate("multi-dp", 1, m=4, model=model, cluster=cluster, collective="ring", expand_collectives=expand)
        )
        for expand in (False, True)
    ]
    for one in found:
        assert one.step == pytest.approx(3 + 6 * 2)  # six rounds of a quarter of 8 bytes over the slow links
        assert one.exposed == pytest.approx(12 / 15)
        assert one.exposed == pytest.approx(one.bubble)


@settings(max_examples=50)
@given(requests())
def test_nobody_waits_for_messages_that_are_free(request: dict[str, Any]) -> None:
    """A message that takes no time is never on its way."""
    cluster = request.get("cluster", Cluster.unit())
    request["cluster"] = Cluster(devices=cluster.devices)
    assert not (idle(simulate(**request))["reason"] == MESSAGE).any()


@pytest.mark.parametrize("name", ["single-dp", "single-cdp"])
def test_one_device_waits_for_no_message(name: str) -> None:
    """Its lanes wait for each other."""
    assert SCHEDULES[name].placement.lanes
    model = Model(stages=(Stage(forward=1.0, backward=1.0), Stage(forward=2.0, backward=2.0)))
    reasons = idle(simulate(name, model=model, cluster=Cluster(devices=(Devices(lanes=2),))))["reason"]
    assert MESSAGE not in reasons


@settings(max_examples=50)
@given(requests(), st.sampled_from([2, 4, 0.5]))
def test_parts_grow_as_costs_do(request: dict[str, Any], factor: float) -> None:
    """Powers of two are exact in floating point, too."""
    run = simulate(**request)
    costs = replace(run.costs, duration=run.costs.duration * factor, release=run.costs.release * factor)
    start, end = engine.run_by_longest_paths(run.program, costs)
    grown, parts = waiting.idle_spans(run.program, start, end), idle(run)
    for name in ("lane", "device", "reason"):
        assert np.array_equal(grown[name], parts[name])
    assert np.array_equal(grown["begin"], parts["begin"] * factor)
    assert np.array_equal(grown["end"], parts["end"] * factor)


@pytest.mark.every_case
@pytest.mark.parametrize("as_python", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b", "m": 6, "replicas": 2},
        {"schedule": "zbv", "n": 8, "m": 8},
        {"schedule": "multi-cdp"},
        {"schedule": "dp", "shard": 2, "zero": 3, "replicas": 2},
        {"schedule": "1f1b", "m": 4, "contention": "fair"},
        {"schedule": "mp-cdp"},
    ],
    ids=lambda options: options["schedule"],
)
def test_compiled_loops_find_the_same_waits(
    options: dict[str, Any], as_python: bool, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: once as compiled code, once as the Python that it is compiled from."""
    if as_python:
        for name in ("find_last_waits", "trace_waits"):
            monkeypatch.setattr(compiled, name, unwrap(getattr(compiled, name)))
    asked: dict[str, Any] = {"n": 4, "steps": 3, "model": "gpt2", "cluster": "a100-nodes", "ignore_memory": True}
    run = simulate(**asked | options)
    for starts_again in (False, True):
        for low, high in ((0.0, 1.0), (0.2, 0.7)):
            found = []
            for loops in (None, compiled):
                monkeypatch.setattr(waiting, "compiled_loops_for", lambda _, loops=loops: loops)
                idle = waiting._IdleLanes(run.program, run.start, run.end, starts_again)
                found.append([column.tolist() for column in idle.waits(low * run.makespan, high * run.makespan)])
            assert found[0] == found[1]
            assert sum(found[0][1]) > 0

"""Metrics by hand on runs small enough to count."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.program import Category, Content
from cdpsim.request.options import CollectiveName
from cdpsim.trace.metrics import communication, memory
from tests.helpers.strategies import fitting, requests


def test_bubble_is_the_idle_share() -> None:
    """A pipeline of 3 stages and one step: 18 tasks on 3 lanes in 2*3 + 2*2 slots."""
    summary = simulate("pp-cdp", 3, steps=1).summary()
    assert (summary["bubble"], summary["idle_of_run"]) == (0, pytest.approx(1 - 18 / 30))
    summary = simulate("multi-dp", 3).summary()
    assert (summary["bubble"], summary["idle_of_run"]) == (0, 0)


@pytest.mark.parametrize("steps", [2, 3, 6, 9])
def test_the_period_of_a_device_that_never_rests_is_its_work(steps: int) -> None:
    """Also at the end of a run, where a cyclic schedule runs dry and steps end sooner after one another."""
    stages = tuple(Stage(forward=f, backward=b) for f, b in ((1.0, 3.0), (5.0, 2.0), (0.5, 4.5)))
    cluster = Cluster(devices=(Devices(lanes=1),))
    summary = simulate("single-cdp", model=Model(stages=stages), cluster=cluster, steps=steps).summary()
    assert summary["period"] == pytest.approx(3 * 16)


def test_a_run_may_be_shorter_than_a_second() -> None:
    """One stage and one micro-batch: a forward and a backward."""
    model = Model(stages=(Stage(forward=0.25, backward=0.5),))
    assert simulate("multi-dp", model=model, cluster=Cluster(), steps=1).summary()["makespan"] == 0.75


def test_the_period_is_a_training_step() -> None:
    """2N slots in steady state, and (N-1)/2N steps of staleness, for every number of steps asked for."""
    for steps in (1, 2, 3, 7):
        summary = simulate("mp-cdp", 5, steps=steps).summary()
        assert (summary["period"], summary["period_is"], summary["mean_staleness"]) == (10, "certified", 0.4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Sums of three stages in two steps: 0 -> 1 -> 2. Versions made by device 2 in step 0 and read in step 1:
        # of stage 1 by device 1; of stage 2 by device 0, which hands it to device 1.
        ("multi-cdp", [6 + 1, 6, 2]),
        # Three all-reduces in two steps; on a ring of three a member sends 2 * 2 thirds.
        ("multi-dp", [8, 8, 8]),
        ("pp-cdp", [6, 6 + 6, 6]),
    ],
)
def test_bytes_sent_by_hand(name: str, expected: list[int]) -> None:
    """Two steps, three stages, unit sizes."""
    collective: CollectiveName = "ring" if name == "multi-dp" else "recursive-doubling"
    sent = simulate(name, 3, steps=2, collective=collective).summary()["bytes_sent"]
    assert [row["bytes"] for row in sent] == expected


def test_a_memory_curve_holds_between_its_rows() -> None:
    """Two stages, one micro-batch: activations 3 and 5 bytes, by hand."""
    model = Model(
        stages=(
            Stage(forward=1.0, backward=1.0, activation=3, parameters=10),
            Stage(forward=1.0, backward=1.0, activation=5, parameters=20),
        )
    )
    trace = simulate("multi-dp", 2, steps=1, model=model)
    rows = (trace.memory["device"] == 0) & (trace.memory["category"] == "activations")
    assert trace.memory["time"][rows].tolist() == [0, 1, 3, 4]
    assert trace.memory["size"][rows].tolist() == [3, 8, 3, 0]
    # At the most: during the backward of stage 0, both gradients, both stages' parameters, 3 bytes of activations.
    assert trace.summary()["peak_memory"][0] == {
        "device": 0,
        "activations": 8,
        "communication": 0,
        "gradients": 30,
        "optimizer": 0,
        "parameters": 30,
        "total": 63,
    }


def test_a_message_is_held_at_both_ends() -> None:
    """A boundary of 7 bytes: at the sender until it has left, at the receiver until it is used."""
    stage = Stage(forward=1.0, backward=1.0, boundary=7)
    trace = simulate("pp-cdp", 2, steps=1, model=Model(stages=(stage, stage)), cluster=Cluster(link=Link(latency=1.0)))
    rows = (trace.memory["category"] == "communication") & (trace.memory["device"] == 1) & (trace.memory["time"] < 4)
    assert trace.memory["time"][rows].tolist() == [1, 2, 3]
    assert trace.memory["size"][rows].tolist() == [7, 0, 7]


@pytest.mark.every_case
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_output_of_the_last_stage_goes_nowhere(name: str) -> None:
    """So no device holds it, however many bytes it would have."""
    asked = fitting(name, 4)
    stage = Stage(forward=1.0, backward=2.0, weight_backward=1.0, activation=4, boundary=3, parameters=1)
    cluster = Cluster(link=Link(latency=0.25))
    inner = (stage,) * (asked.pop("n") - 1)
    light, heavy = (
        simulate(**asked, model=Model(stages=(*inner, msgspec.structs.replace(stage, boundary=size))), cluster=cluster)
        for size in (0, 9)
    )
    assert all(np.array_equal(column, heavy.memory[name]) for name, column in light.memory.items())


def test_what_is_broadcast_is_held_while_it_arrives() -> None:
    """Stages of 100 and 300 bytes, each on its own device: the other one receives it before each use, one at a time."""
    stages = tuple(Stage(forward=1.0, backward=1.0, parameters=size, gradients=0) for size in (100, 300))
    cluster = Cluster(link=Link(bandwidth=100.0))
    trace = simulate("zero-dp", 2, steps=1, model=Model(stages=stages), cluster=cluster)
    peaks = trace.summary()["peak_memory"]
    assert [device["communication"] for device in peaks] == [300, 100]
    # The first stage's broadcast takes a second, then both have it for a second's forward.
    rows = (trace.memory["category"] == "communication") & (trace.memory["device"] == 1)
    assert trace.memory["time"][rows][:2].tolist() == [0, 1]


def test_an_optimizer_state_is_at_its_sender_until_it_has_left() -> None:
    """Of a pyramid of three: stage 1 has two devices, and the last micro-batch of a step is on either in turn.

    Micro-batch 2 comes 4 s late, and its backward of stage 1 ends 5 s later: at 9 s, and at 15 s in the next step.
    Then the state is sent, in a second, from device 3, where it has been, to device 4.
    """
    model = Model(stages=(Stage(forward=1.0, backward=1.0, optimizer=100),) * 3)
    trace = simulate("mp-cdp", 3, steps=2, model=model, cluster=Cluster(link=Link(bandwidth=100.0)))
    rows = trace.memory["category"] == "optimizer"
    curves = list(zip(*(trace.memory[name][rows].tolist() for name in ("device", "time", "size")), strict=True))
    assert [row for row in curves if row[0] == 3] == [(3, 0, 100), (3, 16, 0)]


def on_one_device(name: str, n: int, **fields: Any) -> int:
    """The peak of one device that does one task at a time, forwards first; each stage adds 1000 bytes to a pass."""
    transients: dict[str, Any] = {"forward_transient": 3, "backward_transient": 3}
    stage = Stage(forward=1.0, backward=1.0, activation=1000, boundary=10, **transients, **fields)
    shared = fields.get("kept_output", 0)
    stages = [msgspec.structs.replace(stage, activation=1000 + shared * (j > 0)) for j in range(n)]
    stages[-1] = msgspec.structs.replace(stages[-1], boundary=0, kept_output=0)
    trace = simulate(name, n, model=Model(stages=tuple(stages)), cluster=Cluster())
    peak: int = trace.summary()["peak_memory"][0]["activations"]
    return peak


@pytest.mark.parametrize("n", [2, 4, 6, 8])
def test_one_device_holds_what_the_specification_says(n: int) -> None:
    """Section 7: DP shows N psi + tau, CDP (N+1)/2 psi + floor(N/2) b + tau'; psi is a whole micro-batch's."""
    assert on_one_device("single-dp", n, kept_output=10) == n * n * 1000 + 3
    assert on_one_device("single-cdp", n, kept_output=10) == n * (n + 1) // 2 * 1000 + n // 2 * 10 + 3
    # Where stages do not keep their outputs, those of the slot's other forwards wait for the next slot.
    assert on_one_device("single-dp", n) == n * n * 1000 + 3
    assert on_one_device("single-cdp", n) == n * (n + 1) // 2 * 1000 + (n // 2 + n // 2 - 1) * 10 + 3


def test_an_output_that_two_stages_keep_counts_once_on_one_device() -> None:
    """Two stages of 100 that share 20; on two devices each has its own."""
    stages = (
        Stage(forward=1.0, backward=1.0, activation=100, kept_output=20, boundary=20),
        Stage(forward=1.0, backward=1.0, activation=100),
    )
    one = simulate("multi-dp", 2, model=Model(stages=stages), cluster=Cluster()).summary()["peak_memory"][0]
    two = simulate("pp-cdp", 2, steps=1, model=Model(stages=stages), cluster=Cluster()).summary()["peak_memory"]
    assert one["activations"] == 180
    assert [device["activations"] for device in two] == [220, 100]  # two passes and a gradient; one pass


def test_a_boundary_is_held_from_task_to_task_by_hand() -> None:
    """One micro-batch, two stages of 100 and 50 on one device, transients of 1 and 2, a boundary of 7."""
    stages = (
        Stage(forward=1.0, backward=1.0, activation=100, forward_transient=1, backward_transient=2, boundary=7),
        Stage(forward=1.0, backward=1.0, activation=50, forward_transient=1, backward_transient=2),
    )
    trace = simulate("single-dp", 2, steps=1, model=Model(stages=stages), cluster=Cluster())
    rows = trace.memory["category"] == "activations"
    curve = dict(zip(trace.memory["time"][rows].tolist(), trace.memory["size"][rows].tolist(), strict=True))
    # F(0,0) F(1,0) F(0,1) F(1,1) B(0,1) B(1,1) B(0,0) B(1,0): the output of F(0,0) waits while F(1,0) runs.
    assert curve == {0: 101, 1: 208, 2: 258, 3: 301, 4: 302, 5: 259, 6: 216, 7: 109, 8: 0}


def test_a_device_that_needs_more_than_it_has_is_refused() -> None:
    """By how much, on which device, from when; unless the limit is to be ignored."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, activation=60, parameters=50),) * 2)
    small = Cluster(devices=(Devices(memory=200),))
    with pytest.raises(
        RequestError, match=r"memory: device 0 has 200 bytes, needs more from 1 s on and 270 at its peak"
    ):
        simulate("multi-dp", 2, model=model, cluster=small)
    assert simulate("multi-dp", 2, model=model, cluster=small, ignore_memory=True).summary()["devices"] == 2


def test_sizes_beyond_counting_are_refused() -> None:
    """Sums stay exact integers or are not given."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, activation=10**15),) * 9)
    with pytest.raises(RequestError, match="sizes add up to more than"):
        simulate("multi-cdp", 9, steps=80, model=model).memory  # noqa: B018


@pytest.mark.parametrize("steps", [1, 2])
def test_a_short_run_has_no_full_version(steps: int) -> None:
    """Under CDP-v2 the first version that every micro-batch reads takes three steps."""
    assert communication.full_version(simulate("multi-cdp", 3, steps=steps).program) == 0
    assert communication.full_version(simulate("multi-cdp", 3, steps=3).program) == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_versions_alive_follow_from_the_trace(replicas: int) -> None:
    """Spec section 2: PP with v2 keeps two on every stage but the last; so does each of several replicas."""
    run = simulate("pp-cdp", 4, steps=5, replicas=replicas).whole
    live = memory.live_versions(run.program, run.start, run.end)
    most = [int(live["versions"][live["device"] == device].max()) for device in range(4 * replicas)]
    assert most == [2, 2, 2, 1] * replicas


def test_rounds_count_every_chain() -> None:
    """With a message that has to wait for two others between two slots, three rounds fall there."""
    run = simulate("multi-cdp", 4)
    program = run.program
    assert communication.rounds_between_slots(program, run.costs.rounds, run.start, run.end) == 1
    assert communication.rounds_between_slots(program, 3 * run.costs.rounds, run.start, run.end) == 3


@pytest.mark.parametrize("stage", [0, 1])
def test_rounds_count_through_updates(stage: int) -> None:
    """All is made at 0, and one task needs a new version at 0: its stage's gradient comes, then its parameters go."""
    run = simulate("multi-cdp", 2, steps=3)
    program, messages = run.program, run.program.messages
    first = (messages.content == Content.PARAMETERS) & (messages.stage == stage) & (messages.step == 0)
    needs = program.edges.after[program.edges.before == len(program.tasks) + np.flatnonzero(first)[0]]
    start, end = np.full_like(run.start, 1000), np.zeros_like(run.end)
    assert communication.rounds_between_slots(program, run.costs.rounds, start, end) == 1
    start[needs[needs < program.compute]] = 0
    assert communication.rounds_between_slots(program, run.costs.rounds, start, end) == 2


rising = st.lists(st.integers(0, 12), unique=True, min_size=1, max_size=5).map(sorted)


@given(st.lists(rising, min_size=1, max_size=3), st.data())
def test_the_peak_within_a_window_is_the_most_at_any_moment_of_it(times: list[list[int]], data: st.DataObject) -> None:
    """Asked at every half of a unit; the function is 0 from the last row of its key on, as all is freed there."""
    low = data.draw(st.integers(0, 12))
    high = data.draw(st.integers(low + 1, 14))
    rows = []
    for key, begins in enumerate(times):
        held = [*(data.draw(st.integers(0, 9)) for _ in begins[1:]), 0]
        rows += [(key, *row) for row in zip(begins, held, strict=True)]
    moments, sizes = (np.array([row[k] for row in rows], dtype=np.int64) for k in (1, 2))

    def at(key: int, moment: float) -> int:
        return next((row[2] for row in reversed(rows) if row[0] == key and row[1] <= moment), 0)

    expected = max(at(key, low + half / 2) for key in range(len(times)) for half in range(2 * (high - low)))
    assert memory.peak_within(moments, sizes, low, high) == expected


def test_the_steady_window_by_hand() -> None:
    """Two stages in slots, three steps of four: micro-batch 1 begins two slots late, micro-batch 0 ends at 12."""
    run = simulate("multi-cdp", 2, steps=3)
    assert memory.steady_window(run.program, run.start, run.end) == (2, 12)


@given(requests(most=4), st.sampled_from([1, 20, 10**9]))
def test_peaks_are_the_highest_of_the_curves(request: dict[str, Any], at_once: int) -> None:
    """Of each category alone and of all together, however many devices at once, in integers and in other times."""
    trace = simulate(**request)
    program, start, end = trace.program, trace.start, trace.end
    wanted = np.zeros((program.devices, len(Category) + 1), dtype=np.int64)
    curve, total = memory.memory_by_category(program, start, end), memory.device_memory(program, start, end)
    for device, category, size in zip(curve["device"], curve["category"], curve["size"], strict=True):
        wanted[device, category] = max(wanted[device, category], size)
    for device, _, size in zip(*total, strict=True):
        wanted[device, -1] = max(wanted[device, -1], size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cdpsim.program._BUFFERS_AT_ONCE", at_once)
        anew = replace(program, buffers=replace(program.buffers))
        assert memory.peak_memory(anew, start, end).tolist() == wanted.tolist()

"""Training steps in which replicas have unlike numbers of micro-batches."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Run, Stage, simulate
from cdpsim.api import reopen
from cdpsim.cluster import Link
from cdpsim.cluster.disorder import Disorder
from cdpsim.cluster.topology import Devices
from cdpsim.export.pictures import write_timeline
from cdpsim.invariants import violations
from cdpsim.program import Kind, Op, Program
from cdpsim.program.assembly import derive
from cdpsim.program.check import check_program
from cdpsim.program.collectives import DEFAULT
from cdpsim.request.sharing import accepts
from cdpsim.schedules.placement import Shape
from cdpsim.studies.compare import measure
from cdpsim.timing.costs import Costs, jittered_durations, node_costs
from cdpsim.timing.engine import ENGINES

COUNTS = [[3, 2], [1, 3]]  # of two replicas in two steps


def pipeline(counts: Any = COUNTS, name: str = "1f1b") -> Program:
    """Two stages, at most three micro-batches, two replicas, two steps."""
    return derive(SCHEDULES[name], Model.unit(2, split=True), 2, shape=Shape(2, 3, 1, 2), counts=counts)


def row(program: Program, name: str) -> int:
    """The node of that name."""
    return [program.describe(node) for node in range(program.nodes)].index(name)


def test_passes_are_read_from_their_tasks() -> None:
    """Five passes of the first step, then four; a step numbers those of its replicas one after another."""
    program = pipeline()
    check_program(program)
    assert (program.m, program.steps, program.passes, program.phases) == (None, 2, 9, 4)
    assert program.counts.tolist() == [5, 4]
    assert program.first_pass.tolist() == [0, 5, 9]
    assert program.pass_step.tolist() == [0] * 5 + [1] * 4
    assert program.pass_micro_batch.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert program.tasks.device[: program.compute : program.phases].tolist() == [0, 0, 0, 2, 2, 0, 2, 2, 2]
    assert program.tasks_of_kind(Kind.F).tolist() == [[4 * k, 4 * k + 1] for k in range(9)]
    assert pipeline([[3, 3], [3, 3]]).m == 6


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_a_list_leaves_out_the_micro_batches_that_are_not_there(name: str) -> None:
    """Each device does what its list says, without the micro-batches from its replica's number on."""
    program = pipeline(name=name)
    shape = Shape(2, 3)
    actions = SCHEDULES[name].actions(shape)
    kinds = {1: "F", 2: "BW" if actions.splits else "B", 3: "B", 4: "W"}
    for device in range(4):
        replica, own = divmod(device, 2)
        rows = np.flatnonzero(actions.device == own)
        expected = []
        for step in range(2):
            before = sum(COUNTS[step][:replica])
            for action in rows.tolist():
                if actions.micro_batch[action] < COUNTS[step][replica]:
                    i = int(actions.micro_batch[action]) + before
                    expected += [(kind, step, i, int(actions.stage[action])) for kind in kinds[actions.kind[action]]]
        lane = program.lane_tasks[program.lane_start[device] : program.lane_start[device + 1]]
        tasks = program.tasks
        found = zip(
            *(column[lane].tolist() for column in (tasks.kind, tasks.step, tasks.micro_batch, tasks.stage)), strict=True
        )
        assert [(Kind(kind).name, *place) for kind, *place in found] == expected


def test_engines_agree_and_all_gradients_are_summed() -> None:
    """An all-reduce for each step and stage waits for all of the step's backwards there."""
    program = pipeline()
    costs = node_costs(program, Model.unit(2), Cluster.unit(), DEFAULT)
    times = [engine(program, costs) for engine in ENGINES.values()]
    assert all(np.array_equal(*both) for both in zip(*times, strict=True))
    sums = len(program.tasks) + np.flatnonzero(program.messages.op == Op.ALL_REDUCE)
    for message in sums.tolist():
        before = program.edges.before[program.edges.after == message]
        step, stage = (
            int(column[message - len(program.tasks)]) for column in (program.messages.step, program.messages.stage)
        )
        producers = [f"B(t={step},i={i},j={stage})" for i in range(sum(COUNTS[step]))]
        assert {row(program, name) for name in producers} <= set(before.tolist())
    assert len(sums) == 4


def test_gradients_in_turn_end_with_the_last_micro_batch_that_is_there() -> None:
    """multi-cdp: device i has micro-batch i, so the second step's last one, i = 1, makes the update."""
    program = derive(SCHEDULES["multi-cdp"], Model.unit(3), 3, counts=np.array([[3], [2], [3]]))
    check_program(program)
    tasks = program.tasks
    updates = slice(program.compute, None)
    made = {(t, d) for t, d in zip(tasks.step[updates].tolist(), tasks.device[updates].tolist(), strict=True)}
    assert made == {(0, 2), (1, 1), (2, 2)}
    costs = node_costs(program, Model.unit(3), Cluster.unit(), DEFAULT)
    assert all(np.array_equal(*both) for both in zip(*(run(program, costs) for run in ENGINES.values()), strict=True))


@pytest.mark.parametrize(
    ("name", "column", "value", "problem"),
    [
        ("F(t=1,i=2,j=0)", "micro_batch", 3, r"F\(t=1,i=3,j=0\) stands where a task of micro_batch 2 belongs"),
        ("F(t=0,i=4,j=0)", "step", 1, r"F\(t=1,i=4,j=0\) stands where a task of step 0 belongs"),
        ("B(t=1,i=0,j=1)", "stage", 0, r"B\(t=1,i=0,j=0\) stands where a task of stage 1 belongs"),
    ],
)
def test_a_misplaced_task_is_named(name: str, column: str, value: int, problem: str) -> None:
    """Steps of unlike length hide nothing."""
    program = pipeline()
    changed = getattr(program.tasks, column).copy()
    changed[row(program, name)] = value
    with pytest.raises(RequestError, match=problem):
        check_program(replace(program, tasks=replace(program.tasks, **{column: changed})))


def test_a_missing_pass_is_named() -> None:
    """The columns have nine passes, where ten are said to be."""
    with pytest.raises(RequestError, match="36 compute tasks do not go into 2 steps of 5 micro-batches"):
        check_program(replace(pipeline(), counts=np.array([5, 5], dtype=np.int32)))
    with pytest.raises(RequestError, match=r"F\(t=0,i=4,j=0\) stands where a task of step 1 belongs"):
        check_program(replace(pipeline(), counts=np.array([4, 5], dtype=np.int32)))


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ([[3, 3]], r"shape \(1, 2\) instead of \(2, 2\)"),
        ([[3, 0], [1, 1]], "go from 0 to 3; give each replica from 1 to m=3"),
        ([[3, 4], [1, 1]], "go from 1 to 4"),
        ([[3.0, 2.0], [1.0, 1.0]], "float64"),
        ([[3, 3], [1]], r"shape \(\) instead of \(2, 2\)"),
    ],
)
def test_numbers_that_are_none_are_refused(counts: Any, problem: str) -> None:
    """In one line that says what to give."""
    with pytest.raises(RequestError, match=problem):
        pipeline(counts)


@pytest.mark.parametrize("name", ["multi-dp", "zero-dp"])
def test_a_device_without_a_micro_batch_cannot_sum(name: str) -> None:
    """Of devices with a micro-batch each, one would have none."""
    with pytest.raises(RequestError, match="counts: leave a device without a micro-batch"):
        derive(SCHEDULES[name], Model.unit(3), 2, counts=np.array([[3], [2]]))


def test_a_shorter_step_does_not_change_the_factors_of_others() -> None:
    """Jitter of step 1 is that of a run in which step 0 has all its micro-batches."""
    disorder = Disorder(jitter="lognormal:0.5")

    def factors(counts: list[list[int]]) -> dict[str, float]:
        program = derive(SCHEDULES["pp-cdp"], Model.unit(3), 2, counts=np.array(counts))
        none = np.zeros(0, dtype=np.int64)
        drawn = jittered_durations(program, Costs(np.ones(program.nodes), none, none), disorder, 7, range(1))[0]
        return {program.describe(node): drawn[node] for node in range(len(program.tasks))}

    whole, short = factors([[3], [3]]), factors([[2], [3]])
    assert set(short) < set(whole)
    assert all(whole[name] == factor for name, factor in short.items())


EACH = ["1f1b", "gpipe", "zb-h1", "mp-cdp", "multi-cdp", "zero-cdp", "pp-cdp", "pipedream-2bw"]


@pytest.mark.every_case
@pytest.mark.parametrize("name", EACH)
def test_a_request_may_say_how_many_passes_each_replica_has(name: str, tmp_path: Path) -> None:
    """It records them; engines agree, laws hold, and files bring the run back."""
    replicas = 2 if accepts(SCHEDULES[name], "replicas") else 1
    counts = [row[:replicas] for row in ([3, 2], [1, 3], [2, 2])]
    words: dict[str, Any] = {"counts": counts} | ({"replicas": 2} if replicas == 2 else {})
    words |= {"m": 3} if accepts(SCHEDULES[name], "m") else {}
    fast, discrete = (simulate(name, 3, engine=engine, **words) for engine in ("fast", "simpy"))
    assert np.array_equal(fast.end, discrete.end)
    assert violations(fast) == {}
    assert fast.program.counts.tolist() == [sum(row) for row in counts]
    assert fast.request["counts"] == counts and fast.request.steps == 3
    fast.save(tmp_path / "run")
    again = reopen(tmp_path / "run")
    assert isinstance(again, Run) and np.array_equal(again.end, fast.end)
    steps = fast.steady_state.steps
    done = sum(sum(counts[step]) for step in steps)
    assert measure(fast).micro_batch_rate == pytest.approx(done / (len(steps) * float(fast.steady_state.period)))


def test_counts_of_m_are_no_counts() -> None:
    """All of them: nothing is recorded, and the run is in steady state as ever."""
    run = simulate("1f1b", 2, m=3, counts=[[3], [3], [3], [3]])
    assert "counts" not in run.request and run.steady_state.certified
    with pytest.raises(RequestError, match=r"^counts: have shape \(2, 1\) instead of \(3, 1\), steps by replicas"):
        simulate("1f1b", 2, m=3, steps=3, counts=[[3], [2]])
    with pytest.raises(RequestError, match=r"^counts: leave a device without a micro-batch"):
        simulate("multi-dp", 3, counts=[[3], [2], [3]])


def test_counts_of_m_change_no_stream() -> None:
    """Replicas sum one after another, as their record's run does; those whose steps differ do not, in any array."""
    stage = Stage(forward=1.0, backward=2.0, parameters=10**9)
    asked: dict[str, Any] = {"model": Model(stages=(stage,) * 4), "cluster": Cluster(link=Link(bandwidth=1e9))}
    asked |= {"m": 4, "chunks": 2, "replicas": 2, "steps": 2}
    plain = simulate("interleaved-1f1b", 4, **asked)
    uneven: Any = np.array([[4, 3], [4, 4]])
    every: tuple[Any, ...] = [[4, 4]] * 2, np.full((2, 2), 4)
    for counts in every:
        same = simulate("interleaved-1f1b", 4, counts=counts, **asked)
        assert same.request.to_builtins() == plain.request.to_builtins()
        assert np.array_equal(same.end, plain.end)
    other = simulate("interleaved-1f1b", 4, counts=uneven, **asked)
    assert other.request["counts"] == uneven.tolist() and not other.program.state.streams


def test_rates_of_uneven_steps_are_those_of_the_steps_looked_at() -> None:
    """Three steps of four micro-batches, then three of one: in the last half, one each in a step of its own length."""
    run = simulate("gpipe", 2, m=4, counts=[[4]] * 3 + [[1]] * 3)
    assert run.steady_state.steps == range(3, 6)
    assert (run.steady_state.period, measure(run).micro_batch_rate) == (
        4,
        1 / 4,
    )  # one micro-batch passes two stages there and back


@pytest.mark.parametrize(
    ("name", "n", "slow", "counts"), [("multi-cdp", 4, "1:3", [[3], [1]]), ("mp-cdp", 2, "1:5", [[1], [2], [1]])]
)
def test_steps_that_end_together_have_a_period(name: str, n: int, slow: str, counts: list[list[int]]) -> None:
    """Then it is the mean of all of them."""
    run = simulate(name, n, slow=[slow], counts=counts)
    summary = run.summary()
    assert float(Fraction(summary["period"])) == run.end.max() / len(counts) and 0 <= summary["bubble"] < 1


def test_hosts_keep_their_order_where_devices_have_several_lanes() -> None:
    """Updates follow the order of the schedule, which places in lanes do not tell."""
    stage = Stage(forward=1.0, backward=2.0, parameters=1, host_optimizer=1, host_update=2.2)
    cluster = Cluster(devices=(Devices(lanes=2),))
    assert (
        violations(simulate("single-cdp", model=Model(stages=(stage,) * 2), cluster=cluster, counts=[[2], [1]])) == {}
    )


def test_an_order_of_uneven_steps_is_not_that_of_one(tmp_path: Path) -> None:
    """torch's CSV has one step."""
    with pytest.raises(RequestError, match="steps have unlike numbers of micro-batches"):
        write_timeline(simulate("1f1b", 2, m=3, counts=[[3], [1]]), tmp_path / "order.csv")

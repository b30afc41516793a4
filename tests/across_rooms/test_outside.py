"""Capabilities that need no line of the package: a state policy, a rule and an order, each declared in ten lines."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cdpsim import SCHEDULES, RequestError, simulate
from cdpsim.invariants import violations
from cdpsim.program import Category, Content, Kind, Op
from cdpsim.runs import Run
from cdpsim.schedules import Schedule, pipeline, schedule_from_csv
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.order import CYCLIC, SIMULTANEOUS, STREAMED, newest_rule
from cdpsim.schedules.placement import BY_MICRO_BATCH, BY_STAGE, Shape
from cdpsim.schedules.rule import CDP_V2, DP, NEWEST, Rule
from cdpsim.schedules.state import Placed, State, When
from cdpsim.timing.engine import ENGINES

# A state policy: torch's ZeroRedundancyOptimizer.
ZERO_REDUNDANCY = State(parameters=Placed.COPIED, gradients=Placed.COPIED, optimizer=Placed.OWNED, reduce=When.LAST)
redundant = Schedule("redundant", "ZeRO by torch", SIMULTANEOUS, BY_MICRO_BATCH, DP, ZERO_REDUNDANCY)

# A rule: every task reads what is three steps old.
late = Schedule("late", "three steps late", STREAMED, BY_STAGE, Rule("late", lambda i, j, shape: 0 * i + 3))


# An order: what each device of 1F1B repeats once the pipeline is full, without a flush.
def steady(devices: int, m: int, chunks: int) -> Actions:
    """A forward, then the backward of the micro-batch that has come back, of the step before at first."""
    ahead = range(devices - 1, -1, -1)
    return Actions.of(
        [[(k, d, (i - b) % m) for i in range(m) for k, b in (("F", 0), ("B", a))] for d, a in enumerate(ahead)]
    )


streaming = pipeline("streaming", "1f1b without flush, as a list", steady, together=False)


def sound(run: Run) -> Run:
    """Check all invariants, and that both engines agree."""
    assert violations(run) == {}
    times = [engine(run.program, run.costs) for engine in ENGINES.values()]
    assert all(np.array_equal(*both) for both in zip(*times, strict=True))
    return run


def test_the_state_policy() -> None:
    """Of 4 stages, 4 reductions a step and 4 broadcasts, but for the last; the device that ends the fewest bytes."""
    run = sound(simulate(redundant, 4, steps=5))
    sent = run.program.messages
    assert [int((sent.op == op).sum()) for op in (Op.REDUCE, Op.BROADCAST)] == [4 * 5, 4 * 4]
    assert (sent.content[sent.op == Op.BROADCAST] == Content.PARAMETERS).all()
    assert len(run.program.tasks) - run.program.compute == 4 * 5  # one update for each stage and step, on its owner
    assert float(run.steady_state.period) == 8  # four forwards and four backwards


def test_the_rule() -> None:
    """A task of step t reads theta_(t - 3), theta_0 until step 3; so four versions are alive when the fifth is made."""
    run = sound(simulate(late, 3, m=4, steps=8))
    tasks, compute = run.program.tasks, slice(run.program.compute)
    assert np.array_equal(tasks.version[compute], np.maximum(tasks.step[compute] - 3, 0))
    assert run.program.fill == 3
    assert run.steady_state.staleness == 3
    assert run.request.to_builtins()["rule"] == [[3] * 3] * 4
    # The last stage makes theta_4 of its gradients at theta_0, after which theta_1 to theta_4 are there.
    assert run.peaks[2, Category.PARAMETERS] == 4


def test_the_order() -> None:
    """Four stages, eight micro-batches: a period of 16, where a flush makes it 22; the versions of PipeDream-2BW."""
    run = sound(simulate(streaming, 4, m=8, steps=6))
    assert float(run.steady_state.period) == 16
    assert run.steady_state.certified
    assert float(sound(simulate("1f1b", 4, m=8, steps=3)).steady_state.period) == 22
    assert run.program.tasks.version[run.program.tasks_of_kind(Kind.F)].max() >= 4
    assert len(run.program.messages) == 6 * 8 * 3 * 2  # boundaries alone: nothing is summed over devices


@pytest.mark.every_case
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 3), (2, 2), (2, 5), (3, 4), (4, 8), (5, 5)])
def test_the_list_is_the_streamed_order(n: int, m: int) -> None:
    """Each lane of STREAMED from its first task to its last, though the list says it in one period."""
    rule = replace(NEWEST, name="the newest")
    written, derived = (
        sound(simulate(schedule, n, m=m, steps=5))
        for schedule in (replace(streaming, rule=rule), Schedule("derived", "streamed", STREAMED, BY_STAGE, rule))
    )
    for name in ("lane_tasks", "lane_start"):
        assert np.array_equal(getattr(written.program, name), getattr(derived.program, name))
    for name in ("version", "device", "kind", "step"):
        assert np.array_equal(getattr(written.program.tasks, name), getattr(derived.program.tasks, name))
    assert written.steady_state.period == derived.steady_state.period == 2 * m


@pytest.mark.parametrize("shape", [Shape(2, 2), Shape(3, 3), Shape(5, 5)])
def test_the_newest_that_exist_in_an_order_are_the_paper_s(shape: Shape) -> None:
    """The rule gives CDP-v2 where micro-batches are spread over a step, and PipeDream's versions elsewhere."""
    assert np.array_equal(newest_rule(CYCLIC).lags(shape), CDP_V2.lags(shape))
    assert np.array_equal(newest_rule(STREAMED).lags(shape), NEWEST.lags(shape))
    assert not newest_rule(SIMULTANEOUS).lags(shape).any()
    assert np.array_equal(newest_rule(streaming.order).lags(shape), NEWEST.lags(shape))


@pytest.mark.parametrize("fresher", [False, True])
def test_a_fresher_rule_is_refused(fresher: bool) -> None:
    """One step newer anywhere is before the update: named by micro-batch and stage."""
    lags = newest_rule(streaming.order).lags(Shape(3, 4))
    assert lags.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    lags = lags - fresher * (np.arange(12).reshape(4, 3) == 3)  # micro-batch 1 at stage 0

    def lag(i: np.ndarray, j: np.ndarray, shape: Shape) -> np.ndarray:
        return np.asarray(lags[i, j])

    rule = Rule("fresh", lag)
    if fresher:
        with pytest.raises(RequestError, match=r"\(i=1, j=0\) would read theta_t before it exists"):
            simulate(streaming, 3, m=4, rule=rule)
    else:
        sound(simulate(streaming, 3, m=4, rule=rule, steps=5))


def test_a_file_is_repeated_without_a_flush(tmp_path: Path) -> None:
    """Two devices; a backward that stands before its forward is of the step before."""
    path = tmp_path / "steady.csv"
    path.write_text("0F0,0B1,0F1,0B0\n1F0,1B0,1F1,1B1\n")
    run = sound(simulate(schedule_from_csv(path, together=False), 2, steps=5))
    assert float(run.steady_state.period) == 4
    lane = run.program.lane_tasks[: run.program.lane_start[1]]
    assert [run.program.describe(node) for node in lane[:5].tolist()] == [
        "F(t=0,i=0,j=0)",
        "F(t=0,i=1,j=0)",
        "B(t=0,i=0,j=0)",
        "F(t=1,i=0,j=0)",
        "B(t=0,i=1,j=0)",
    ]
    with pytest.raises(RequestError, match="schedule deadlocks: "):
        schedule_from_csv(path)


def test_a_list_that_never_goes_on_is_refused(tmp_path: Path) -> None:
    """Each device waits for the other in every repetition, for all steps of the awaited pass."""
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1B0,1F0,1B1,1F1\n")
    with pytest.raises(RequestError, match="schedule deadlocks"):
        schedule_from_csv(path, together=False)


@pytest.mark.parametrize("declared", [redundant, late, streaming], ids=lambda schedule: schedule.name)
def test_none_of_them_is_in_the_package(declared: Schedule) -> None:
    """They are declared here."""
    assert declared.name not in SCHEDULES
    assert isinstance(declared.about, str)
    assert isinstance(declared.order.position, Callable)  # type: ignore[arg-type]

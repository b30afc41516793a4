"""State policies: which placements can be assembled, and torch's ZeroRedundancyOptimizer as one of them."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cdpsim import SCHEDULES, Model, RequestError, Stage, simulate
from cdpsim.invariants import violations
from cdpsim.program import Category, Content, Op
from cdpsim.runs import Run
from cdpsim.schedules import Schedule
from cdpsim.schedules.buckets import Buckets
from cdpsim.schedules.order import SIMULTANEOUS
from cdpsim.schedules.placement import BY_MICRO_BATCH
from cdpsim.schedules.rule import DP, lag_rule
from cdpsim.schedules.state import ALONG, OWNER, TRAVELLING, Owner, Placed, State, When
from cdpsim.timing.engine import ENGINES
from cdpsim.trace.metrics import memory
from tests.helpers.every_row import every_row
from tests.helpers.times import are_close

C, S, O = Placed.COPIED, Placed.SPLIT, Placed.OWNED  # noqa: E741 - as tables of placements write it

# torch.distributed.optim.ZeroRedundancyOptimizer: every device has parameters and gradients, the states of each stage
# are on one, which updates it and broadcasts the new parameters.
ZERO_REDUNDANCY = State(C, C, O, reduce=When.LAST)
redundant = Schedule("redundant", "ZeRO by torch", SIMULTANEOUS, BY_MICRO_BATCH, DP, ZERO_REDUNDANCY)


def weighed(n: int, update: float | None = None) -> Model:
    """Stages of a second forth and a second back, of 100 bytes; stage j has 7 (j + 1) of optimizer state."""
    stage = partial(Stage, forward=1.0, backward=1.0, activation=1, boundary=1, parameters=100, gradients=10)
    return Model(stages=tuple(stage(update=update, optimizer=7 * (j + 1)) for j in range(n)))


def sound(run: Run) -> Run:
    """Check all invariants of a run of all replicas, and that both engines agree."""
    run = run.whole
    assert violations(run) == {}
    times = [engine(run.program, run.costs) for engine in ENGINES.values()]
    assert all(np.array_equal(*both) for both in zip(*times, strict=True))
    return run


def count(run: Run, op: Op, content: Content) -> int:
    """How many messages there are of a kind."""
    return int(((run.program.messages.op == op) & (run.program.messages.content == content)).sum())


def test_zero_redundancy_reduces_and_broadcasts() -> None:
    """In each of 4 steps one reduction for each of 3 stages; one broadcast for each version that is read, 3 of 4."""
    run = sound(simulate(redundant, model=weighed(3), steps=4))
    assert count(run, Op.REDUCE, Content.GRADIENT) == 12
    assert count(run, Op.BROADCAST, Content.PARAMETERS) == 9
    assert len(run.program.messages) == 21
    tasks = run.program.tasks
    updates = slice(run.program.compute, None)
    assert tasks.device[updates].tolist() == [0, 1, 2] * 4  # stage j is updated on the j-th device that holds it
    assert tasks.stage[updates].tolist() == [0, 1, 2] * 4


def test_zero_redundancy_holds_each_optimizer_state_once() -> None:
    """Device j has the 7 (j + 1) bytes of stage j, all parameters, and a version that comes is written over the old."""
    run = sound(simulate(redundant, model=weighed(3), steps=4))
    peaks = run.peaks
    assert peaks[:, Category.OPTIMIZER].tolist() == [7, 14, 21]
    assert peaks[:, Category.PARAMETERS].tolist() == [300] * 3


@pytest.mark.parametrize(("gradients", "most"), [(C, [30, 30, 30]), (O, [10, 20, 20])])
def test_copied_gradients_stay_until_the_update_and_owned_ones_leave_before(gradients: Placed, most: list[int]) -> None:
    """Updates take time after the step: until then copied gradients of all three stages are there, 10 bytes each.

    Owned ones leave all but the owner with the reduction, as soon as the stage's backwards are done, which come in the
    order of stages 2, 1, 0. So devices 1 and 2, which own those stages, have one more beside their own; device 0 has
    one at a time.
    """
    state = State(C, gradients, O, reduce=When.LAST)
    run = sound(simulate(replace(redundant, name="kept", state=state), model=weighed(3, update=1.0), steps=2))
    assert run.peaks[:, Category.GRADIENTS].tolist() == most
    late = replace(redundant, name="late", state=replace(state, reduce=When.END))
    run = sound(simulate(late, model=weighed(3, update=1.0), steps=2))
    assert run.peaks[:, Category.GRADIENTS].tolist() == [30] * 3


@pytest.mark.every_case
@pytest.mark.parametrize(
    "asked",
    [
        {"schedule": "1f1b", "n": 4, "m": 8, "replicas": 3},
        {"schedule": "interleaved-1f1b", "n": 4, "m": 8, "chunks": 2, "replicas": 2, "reduce": "last"},
        {"schedule": "chimera", "n": 4, "m": 4, "replicas": 2, "reduce": "last"},
        {"schedule": "zbv", "n": 4, "m": 8, "replicas": 2},
        {"schedule": "gpipe", "n": 2, "m": 3, "replicas": 2, "model": "gpt2", "cluster": "a100-nodes"},
        {"schedule": "pipedream-2bw", "n": 3, "m": 4, "replicas": 2},
        {"schedule": "pipemare", "n": 3, "m": 4, "replicas": 2},
        {"schedule": "multi-dp", "n": 4, "model": "gpt2", "cluster": "a100-nodes", "expand_collectives": True},
    ],
    ids=lambda asked: str(asked["schedule"]),
)
def test_free_links_give_all_states_the_same_times(asked: dict[str, Any]) -> None:
    """Law: whether one copy updates or all do, tasks run when they run with copies, where messages take no time."""
    asked = dict(asked)
    name, when = asked.pop("schedule"), asked.pop("reduce", None)
    owned = replace(SCHEDULES[name], name="owned", state=State(C, C, O, reduce=When(when or "end")))
    one, other = (sound(simulate(owned, steps=4, **asked)), sound(simulate(name, steps=4, reduce=when, **asked)))
    if "cluster" not in asked:
        compute = slice(one.program.compute)
        assert are_close(one.end[compute], other.end[compute])
    assert count(one, Op.ALL_REDUCE, Content.GRADIENT) == 0
    ends = simulate(owned, steps=4, **asked).whole.program.tasks
    assert len(ends) <= len(other.program.tasks)


@every_row(
    ("schedule", "state", "problem"),
    [
        ("multi-dp", State(C, C, S), "go in streams; add streams"),
        ("multi-dp", State(reduce=When.EACH), "go in streams; add streams"),
        ("multi-dp", State(buckets=Buckets((1,))), "go in streams; add streams"),
        (
            "multi-dp",
            State(S, C, S, streams=True),
            "split optimizer states alone, or gradients with them, or all three",
        ),
        ("multi-dp", State(C, C, S, reduce=When.EACH, streams=True), "reduces them once; let them be SPLIT"),
        ("multi-dp", replace(OWNER, streams=True), "owners send alone; leave streams out"),
        ("multi-cdp", State(C, C, S, streams=True), "here they come one after another; leave streams out"),
        ("multi-dp", State(C, O, C), "every copy makes the update"),
        ("multi-dp", State(O, C, C), "every copy makes the update"),
        ("multi-dp", State(owner=Owner.LAST), "nothing is owned; leave the owner out"),
        ("multi-dp", ALONG, "none of them is the last or the next; take a FIXED owner"),
        ("multi-dp", TRAVELLING, "take a FIXED owner"),
        ("multi-dp", State(O, C, O), "let them be OWNED"),
        ("multi-cdp", State(), r"take State\(COPIED, OWNED, OWNED, owner=LAST\)"),
        ("multi-cdp", OWNER, "no message brings it to them so"),
        ("multi-cdp", State(C, C, O, owner=Owner.LAST), "no message brings it to them so"),
        ("multi-cdp", replace(ALONG, reduce=When.LAST), "leave reduce out"),
        ("pp-cdp", State(reduce=When.LAST), "leave reduce out"),
        ("gpipe", OWNER, "devices have several; let them be COPIED"),
    ],
)
def test_what_cannot_be_assembled_is_refused(schedule: str, state: State, problem: str) -> None:
    """Policies without an effect or a meaning are refused in one line."""
    asked = replace(SCHEDULES[schedule], name="asked", state=state)
    with pytest.raises(RequestError, match=problem) as refused:
        simulate(asked, 4)
    assert "\n" not in str(refused.value)


def test_owned_parameters_are_handed_out_in_their_newest_version() -> None:
    """A rule with lags needs copies."""
    late = replace(SCHEDULES["zero-dp"], name="late", rule=lag_rule([[1] * 3] * 3))
    with pytest.raises(RequestError, match="the rule reads older ones"):
        simulate(late, 3)


def test_travelling_states_need_no_message_to_stay() -> None:
    """With the placements of zero-cdp, one device alone carries nothing."""
    alone = replace(SCHEDULES["zero-cdp"], name="alone")
    assert not len(sound(simulate(alone, 1, steps=3)).program.messages)


def test_memory_is_freed() -> None:
    """At the end of a run of any policy devices hold the last versions and states, and nothing else."""
    run = sound(simulate(redundant, model=weighed(3), steps=4))
    begin, end = memory.buffer_spans(run.program.buffers, run.start, run.end)
    assert (begin <= end).all()

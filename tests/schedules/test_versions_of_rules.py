"""Versions that start from older ones and take several steps' gradients: ACCO's, counted by hand; refusals."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cdpsim import SCHEDULES, Model, RequestError, Stage, simulate
from cdpsim.invariants import violations
from cdpsim.program import Category
from cdpsim.request.sharing import accepts
from cdpsim.runs import Run
from cdpsim.schedules import Schedule
from cdpsim.schedules.order import SIMULTANEOUS
from cdpsim.schedules.placement import BY_MICRO_BATCH, Shape
from cdpsim.schedules.rule import Rule, Versions, find_rule
from cdpsim.timing.engine import ENGINES
from cdpsim.trace.metrics import memory
from cdpsim.trace.metrics.memory import version_ages


def one_late(i: Any, j: Any, shape: Shape) -> Any:
    """Every task reads the version before the newest."""
    return 0 * i + 1


ACCO = Versions(base=lambda v: v - 1 - (v - 1) % 2, sums=lambda v: 1 + (v - 1) % 2)
acco, dpu = Rule("halves", one_late, versions=ACCO), Rule("late", one_late)


def run_of(rule: Rule, name: str = "multi-dp", n: int = 2, **asked: Any) -> Run:
    """Run a schedule by a rule, soundly, by both engines alike."""
    run = simulate(replace(SCHEDULES[name], name="ruled", rule=rule), n, **asked)
    assert violations(run) == {}
    times = [engine(run.program, run.costs) for engine in ENGINES.values()]
    assert all(np.array_equal(*both) for both in zip(*times, strict=True))
    return run


def test_acco_counted_by_hand() -> None:
    """Versions 1, 3, 5 are estimates of one step; 2, 4, 6 start from the even one before and take two steps."""
    program = run_of(acco, steps=6).program
    updates = slice(program.compute, None)
    of_one = (program.tasks.device[updates] == 0) & (program.tasks.stage[updates] == 0)
    assert program.tasks.version[updates][of_one].tolist() == [1, 2, 3, 4, 5, 6]
    assert program.base[of_one].tolist() == [0, 0, 2, 2, 4, 4]
    assert program.first_step[of_one].tolist() == [0, 0, 2, 2, 4, 4]
    assert program.is_estimate(np.arange(7)).tolist() == [False, True, False, True, False, True, False]
    assert version_ages(program).tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert program.describe(program.compute) == "estimate(t=0,j=0) on device 0"
    assert program.describe(program.compute + 4) == "U(t=1,j=0) on device 0"


@pytest.mark.parametrize(("rule", "stale"), [(acco, 0.0), (dpu, 1.0)])
def test_staleness_is_as_published(rule: Rule, stale: float) -> None:
    """ACCO has none; a delayed update applies gradients one version late."""
    assert run_of(rule, steps=6).steady_state.staleness == stale


@pytest.mark.parametrize("name", ["multi-dp", "single-dp", "mp-dp", "gpipe", "zbv", "pipedream-2bw"])
def test_versions_run_under_every_order_that_updates_together(name: str) -> None:
    """Under every order, tasks run at the times that they have under the same rule with one line of versions."""
    asked: dict[str, Any] = {"n": 4, "steps": 6} | ({"m": 8} if accepts(SCHEDULES[name], "m") else {})
    if name == "pipedream-2bw":
        asked["replicas"] = 2
    one, other = (run_of(rule, name, **asked) for rule in (acco, dpu))
    compute = slice(one.program.compute)
    assert np.array_equal(one.end[compute], other.end[compute])


def test_gradients_and_bases_are_held_as_long_as_they_are_taken() -> None:
    """One stage on one device, updates of a second: seconds by hand, steps of 3 s with their updates.

    Step t runs from 3 t to 3 t + 2, its update to 3 t + 3. theta_0 is there until theta_2 has been made of it, at 6;
    theta_1 from the start of its update, at 2, as theta_0 goes on, to the end of its reader, step 2, at 8. theta_2 is
    written over theta_0, which nothing needs any more, and the gradient of step 0 is taken until 6.
    """
    stage = Stage(forward=1.0, backward=1.0, update=1.0, parameters=100, gradients=10)
    run = run_of(acco, "gpipe", model=Model(stages=(stage,)), n=1, m=1, steps=4)
    buffers, held = run.program.buffers, {}
    start, until = memory.buffer_spans(buffers, run.start, run.end)
    for category in (Category.PARAMETERS, Category.GRADIENTS):
        rows = np.flatnonzero(buffers.category == category)
        held[category] = {int(buffers.version[row]): (start[row], until[row]) for row in rows.tolist()}
    assert held[Category.PARAMETERS] == {0: (0, 6), 1: (2, 8), 2: (6, 12), 3: (8, 9)}
    assert held[Category.GRADIENTS] == {0: (1, 6), 1: (4, 6), 2: (7, 12), 3: (10, 12)}


@pytest.mark.parametrize("rule", [acco, dpu])
def test_a_record_asks_for_the_schedule_s_own_rule(rule: Rule) -> None:
    """Where steps end a schedule takes no other, and its record has lags and no name."""
    own = Schedule(rule.name, "late", SIMULTANEOUS, BY_MICRO_BATCH, rule)
    run = simulate(own, 2, steps=6)
    again = simulate(**json.loads(json.dumps(dict(run.request))) | {"schedule": own})
    assert np.array_equal(again.end, run.end) and again.request == run.request
    assert np.array_equal(again.program.base, run.program.base)


def test_versions_are_recorded_by_what_repeats() -> None:
    """And read again they are the same."""
    said = acco.record(Shape(2, 2))
    assert said == {"lags": [[1, 1], [1, 1]], "back": [1, 2], "sums": [1, 2]}
    line, again = (versions.sources(7) for versions in (ACCO, find_rule(said).versions))
    assert line is not None and again is not None
    assert np.array_equal(line.base, again.base) and np.array_equal(line.first, again.first)
    assert Versions().record() == {}
    assert Versions().sources(5) is None


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        (Versions(base=lambda v: v), "starts from one that was made before it"),
        (Versions(base=lambda v: v - 2), "starts from one that was made before it"),
        (Versions(sums=lambda v: 0 * v), "takes the gradients of one step or more"),
        (Versions(sums=lambda v: v + 1), "takes the gradients of one step or more, up to its own"),
        (Versions(sums=lambda v: np.minimum(v, 2)), "version 2 is kept and takes the gradients of 2 steps; .* take 1"),
        (replace(ACCO, sums=lambda v: 0 * v + 1), "version 2 is kept and takes the gradients of 1 steps; .* take 2"),
    ],
)
def test_versions_that_lose_or_repeat_gradients_are_refused(versions: Versions, problem: str) -> None:
    """One kept version must take every gradient; rules that cannot be assembled yet are refused as such."""
    with pytest.raises(RequestError, match=problem) as refused:
        simulate(replace(SCHEDULES["multi-dp"], name="ruled", rule=replace(dpu, versions=versions)), 2)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["multi-cdp", "pp-cdp", "zero-cdp"])
def test_versions_need_copies_that_update_together(name: str) -> None:
    """One after another they pass on one line of versions."""
    with pytest.raises(RequestError, match="versions: start from one another in a line"):
        simulate(replace(SCHEDULES[name], name="ruled", rule=acco), 3)


def test_versions_that_never_repeat_are_not_recorded() -> None:
    """Each kept version is as many steps after the one before as its number's bits."""

    def base(version: Any) -> Any:
        return 2 ** np.floor(np.log2(np.maximum(version - 1, 1))).astype(np.int64) * (version > 1)

    with pytest.raises(RequestError, match="do not repeat within 64"):
        replace(acco, versions=Versions(base=base, sums=lambda v: v - base(v))).record(Shape(1, 1))


@pytest.mark.parametrize("said", [{"lags": [[1]], "back": [1]}, {"lags": [[1]], "back": [2], "sums": [1, 1]}])
def test_a_record_of_versions_is_read_with_care(said: dict[str, Any]) -> None:
    """Two rows of whole numbers, equally long."""
    with pytest.raises(RequestError, match="rule: has no rows of lags that are equally long"):
        find_rule(said)

"""Rules: how old what is read is, as it is recorded, asked again and checked."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, RequestError, Trace, simulate
from cdpsim.invariants import violations
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import ALL_RULES, Rule, find_rule
from cdpsim.studies.compare import measure
from cdpsim.trace import TABLES
from tests.conftest import Command
from tests.helpers.command_line import content
from tests.helpers.every_row import every_row

OLD = Rule("two", lambda i, j, shape: 0 * i + 2)
PULLED = ("multi-cdp", "mp-cdp", "pp-cdp", "zero-cdp", "single-cdp", "pipemare")  # which go with any older rule


def again(trace: Trace) -> Trace:
    """The request of a trace, asked again as a file has it."""
    return simulate(**json.loads(json.dumps(dict(trace.request))))


def alike(one: Trace, other: Trace) -> bool:
    """Whether two traces say the same."""
    same = all(
        np.array_equal(getattr(one, table)[name], getattr(other, table)[name])
        for table, names in TABLES.items()
        for name in names
    )
    return same and one.summary() == other.summary()


@pytest.mark.parametrize("name", PULLED)
def test_a_rule_of_lag_two_is_recorded_and_asked_again(name: str) -> None:
    """Step t reads what is min(t, 2) steps old, when it is asked again as well."""
    trace = simulate(name, 3, rule=OLD, steps=6)
    assert trace.request["rule"] == [[2] * 3] * 3
    for one in (trace, again(trace)):
        passes = one.tasks["kind"] != "U"
        step, version = one.tasks["step"][passes], one.tasks["version"][passes]
        assert np.array_equal(step - version, np.minimum(step, 2))
    assert alike(trace, again(trace))
    assert violations(trace) == {}
    assert measure(trace).rule == "custom"


@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(ALL_RULES))
def test_a_rule_has_its_name_only_where_it_is_the_one_of_that_name(name: str) -> None:
    """Also where a user gives another rule this name, with a barrier or own backwards."""
    shape, rule = Shape(3, 3), ALL_RULES[name]
    assert rule.record(shape) == name
    assert find_rule(name) == rule
    borrowed = Rule(name, lambda i, j, shape: i + j)
    assert borrowed.record(shape) == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert replace(borrowed, barrier=True).record(shape) == {
        "lags": [[0, 1, 2], [1, 2, 3], [2, 3, 4]],
        "barrier": True,
    }
    assert replace(rule, backward=lambda i, j, shape: 0 * i + 1).record(shape) != name


def test_rules_are_found_by_their_names() -> None:
    """The versions that the paper's three rules read at three stages; files and options name the rules."""
    lags = {"dp": [[0] * 3] * 3, "cdp-v1": [[1] * 3] * 3, "cdp-v2": [[1, 1, 0], [1, 0, 0], [0, 0, 0]]}
    assert {name: find_rule(name).lags(Shape(3, 3)).tolist() for name in lags} == lags
    assert [name for name in lags if find_rule(name).barrier] == ["cdp-v1"]


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """Lags of three stages and micro-batches, that any cyclic schedule goes with; a barrier, backwards of their own."""
    rows = st.lists(st.lists(st.integers(1, 4), min_size=3, max_size=3), min_size=3, max_size=3)
    more = {"backward": draw(rows)} if draw(st.booleans()) else {}
    return {"lags": draw(rows)} | more | ({"barrier": True} if draw(st.booleans()) else {})


@settings(max_examples=60)
@given(tables(), st.sampled_from(PULLED))
def test_a_table_of_lags_is_the_same_run_again(said: dict[str, Any], name: str) -> None:
    """Every task reads theta_(t-lag), or theta_0; and so says what is recorded, and every invariant."""
    trace = simulate(name, 3, rule=said, steps=6)
    assert trace.request["rule"] == (said if len(said) > 1 else said["lags"])
    assert alike(trace, again(trace))
    assert violations(trace) == {}
    tasks = trace.tasks
    for kind, lags in (("F", said["lags"]), ("B", said.get("backward", said["lags"]))):
        rows = tasks["kind"] == kind
        lag = np.array(lags)[tasks["micro_batch"][rows], tasks["stage"][rows]]
        assert np.array_equal(tasks["version"][rows], np.maximum(tasks["step"][rows] - lag, 0))


@pytest.mark.parametrize("older", [0, 1, 2])
def test_a_version_that_is_not_the_rule_s_is_a_violation(older: int) -> None:
    """Too old and too fresh: the run itself is of lag 2."""
    run = simulate("multi-cdp", 3, rule=OLD, steps=6)
    told = replace(run, request=run.request._changed(rule=find_rule([[older] * 3] * 3)))
    assert set(violations(told)) == ({"readings_are_as_old_as_the_rule_says"} if older != 2 else set())


def test_the_command_line_checks_a_file_s_rule(command: Command, here: Any) -> None:
    """1 is fresh in a file, and lag 0 in the record."""
    (here / "v2.csv").write_text("0,0,1\n0,1,1\n1,1,1\n")
    assert command("simulate", "multi-cdp", "-n", 3, "--rule", "v2.csv", "--check", "-o", "a").code == 0
    said = json.loads(content(here / "a")["summary.json"] or b"")["request"]["rule"]
    assert said == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert np.array_equal(find_rule(said).lags(Shape(3, 3)), find_rule("v2.csv").lags(Shape(3, 3)))


BAD_LAGS: dict[str, tuple[Callable[..., Any], str]] = {
    "negative": (lambda i, j, shape: 0 * i - 1, "'mine' gives lags from -1 to -1; a lag is a whole number of steps"),
    "astronomical": (lambda i, j, shape: 0 * i.astype(np.int64) + 10**12, "gives lags from 1000000000000"),
    "fractions": (lambda i, j, shape: 0.5 * i, "gives lags of type float64, which are no whole numbers"),
    "truths": (lambda i, j, shape: i < j, "gives lags of type bool"),
    "one for all": (lambda i, j, shape: 1, r"gives lags of shape \(\) instead of \(3, 3\), micro-batches by stages"),
    "a row": (lambda i, j, shape: i[:1], r"gives lags of shape \(1, 3\)"),
    "nothing": (lambda i, j, shape: None, r"gives lags of shape \(\)"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("fault", BAD_LAGS)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_what_is_no_lag_is_refused(fault: str, way: str) -> None:
    lag, problem = BAD_LAGS[fault]
    rule = Rule("mine", lag) if way == "forward" else replace(OLD, name="mine", backward=lag)
    with pytest.raises(RequestError, match=f"^rule: .*{problem}"):
        simulate("multi-cdp", 3, rule=rule)


@every_row(
    ("said", "problem"),
    [
        ([], "has no rows of lags that are equally long; write rows of lags"),
        ([[]], "has no rows of lags"),
        ([[1, 1], [1]], "has no rows of lags that are equally long"),
        ([1, 1], "has no rows of lags"),
        ([[1, "1"], [1, 1]], "has the lag '1'; write whole numbers from 0"),
        ([[1, -1], [1, 1]], "has the lag '-1'"),
        ([[1, True], [1, 1]], "has the lag 'True'"),
        ([[1, 1.0], [1, 1]], "has the lag '1.0'"),
        ([[1, 1], [1, 1]], "the rule has 2 rows of 2, but 3 micro-batches and 3 stages need 3 rows of 3"),
        ({}, "has no rows of lags"),
        ({"lags": [[1] * 3] * 3, "backwards": []}, "unknown field 'backwards'; write rows of lags"),
        ({"lags": [[1] * 3] * 3, "barrier": "no"}, "its barrier is 'no'; write true or false"),
        ({"lags": [[1] * 3] * 3, "backward": 3}, "has no rows of lags"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(said: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=f"^rule: {problem}"):
        simulate("multi-cdp", 3, rule=said)


def test_backwards_are_causal_too() -> None:
    """With a barrier theta_t is there when the last pass is over: too late for the first backwards of step t."""
    fresh = Rule("mine", OLD.lag, barrier=True, backward=lambda i, j, shape: 0 * i)
    with pytest.raises(RequestError, match=r"'mine' is not causal with cyclic timing: \(i=0, j=2\) would read theta_t"):
        simulate("multi-cdp", 4, rule=fresh)
    older = replace(SCHEDULES["multi-dp"].rule, name="mine", backward=OLD.lag)
    with pytest.raises(RequestError, match="'mine' does not go with the simultaneous timing of multi-dp"):
        simulate("multi-dp", 3, rule=older)


@pytest.mark.parametrize("old", ["lags", "backward"])
def test_where_all_is_flushed_no_task_reads_what_is_older(old: str) -> None:
    """Not a single forward, and not a single backward."""
    said = {"lags": [[0] * 3] * 3, "backward": [[0] * 3] * 3} | {old: [[0, 0, 0], [0, 1, 0], [0, 0, 0]]}
    with pytest.raises(RequestError, match="'custom' does not go with the simultaneous timing of multi-dp"):
        simulate("multi-dp", 3, rule=said)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_state_carries_what_forwards_and_backwards_read(n: int) -> None:
    """Each of them another version, which ends with its own last reader: a device has what its tasks read."""
    for forward, backward in ((2, 1), (1, 0), (1, 3)):
        rule = {"lags": [[forward] * n] * n, "backward": [[backward] * n] * n}
        run = simulate("zero-cdp", n, rule=rule, steps=6)
        assert violations(run) == {}

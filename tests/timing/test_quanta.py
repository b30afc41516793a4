"""Seconds add up exactly: what takes the same tasks and messages takes the same time, in whatever order."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from cdpsim import Cluster, Model, Request, assemble, price, run, simulate, sweep
from cdpsim.cluster import Devices, Link
from cdpsim.invariants import violations
from cdpsim.program import Category
from cdpsim.runs.playing import run_all
from cdpsim.timing.engine import are_exact, find_quantum, in_quanta
from tests.helpers import strategies


def even(n: int, forward: float = 0.1, update: float = 0.0) -> Model:
    """Stages whose times no float is exactly."""
    stage = {"forward": forward, "backward": 3 * forward, "activation": 10**6, "boundary": 10**3, "parameters": 10**6}
    return Model.from_builtins({"stages": [stage | {"repeat": n} | ({"update": update} if update else {})]}, "even")


ALONE = Cluster(devices=(Devices(),))


def test_a_quantum_is_a_power_of_two_of_which_floats_count_the_whole_run() -> None:
    for longest in (1e-9, 0.3, 1.0, 7.0, 3e5):
        quantum = find_quantum(longest)
        assert np.log2(quantum) % 1 == 0
        assert 2**51 <= longest / quantum <= 2**53
        most = float(2**53)
        assert (most - 1) * quantum + quantum == most * quantum != (most - 1) * quantum


def test_floats_alone_would_not_add_up() -> None:
    """Else the tests below would hold without quanta."""
    assert sum([0.1] * 10) != 1.0
    assert sum([0.1, 0.3] * 30) != sum([0.1] * 30) + sum([0.3] * 30)


@pytest.mark.parametrize("engine", ["fast", "simpy"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_even_stages_hold_in_seconds_what_they_hold_in_slots(name: str, engine: str) -> None:
    """All stages take the same, so that ends and beginnings coincide as they do in slots, and count in that order."""
    options: dict[str, Any] = {"n": 8, "m": 24, "steps": 3, "engine": engine}
    options |= {"chunks": 2} if name == "interleaved-1f1b" else {}
    seconds, slots = simulate(name, model=even(8), cluster=ALONE, **options), simulate(name, **options)
    assert seconds.costs.quantum
    held = seconds.peaks[:, Category.ACTIVATIONS] // 10**6  # boundaries add less than one
    assert held.tolist() == slots.peaks[:, Category.ACTIVATIONS].tolist()
    if name == "gpipe":
        assert held.tolist() == [24] * 8


def test_the_step_of_even_stages_is_the_closed_form_in_quanta() -> None:
    """(m + n - 1) (f + b), for whatever m and n, of the times that tasks last."""
    for n, m in ((4, 8), (8, 57), (3, 200)):
        made = simulate("1f1b", n, m=m, model=even(n), cluster=ALONE, steps=1)
        forward, backward = (Fraction(time) for time in sorted(set(made.costs.duration[: made.program.compute])))
        assert Fraction(made.makespan) == (m + n - 1) * (forward + backward)
        assert abs(forward - Fraction(1, 10)) <= Fraction(made.costs.quantum) / 2


@settings(max_examples=40)
@given(strategies.requests(where=strategies.without_rounds, timed=True))
def test_times_are_exact_sums_and_both_engines_find_them(options: dict[str, Any]) -> None:
    """In fractions of seconds, by a longest path that was written without a look at the engines."""
    made = simulate(**options | {"engine": "fast", "ignore_memory": True})
    made = getattr(made, "one", made)
    quantum = made.costs.quantum
    assert quantum
    assert are_exact(made.costs, made.end)
    for column in (made.costs.duration, made.start, made.end):
        assert (column / quantum == np.rint(column / quantum)).all()
    expected = {
        int(task): Fraction(time) for (task, _), time in zip(made.program.releases, made.costs.release, strict=True)
    }
    after: dict[int, list[int]] = {}
    for one, other in zip(*(column.tolist() for column in made.program.waits()), strict=True):
        after.setdefault(other, []).append(one)
    for node in np.lexsort((made.end, made.start)).tolist():
        waits = [Fraction(made.end[before]) for before in after.get(node, [])]
        assert max([*waits, expected.get(node, Fraction(0))]) == Fraction(made.start[node])
        assert Fraction(made.start[node]) + Fraction(made.costs.duration[node]) == Fraction(made.end[node])
    other = simulate(**options | {"engine": "simpy", "ignore_memory": True})
    other = getattr(other, "one", other)
    assert other.start.tolist() == made.start.tolist()
    assert other.end.tolist() == made.end.tolist()


def test_a_run_much_longer_than_its_busiest_lane_has_larger_quanta() -> None:
    """One micro-batch passes 64 stages, one after another."""
    request = Request(schedule="1f1b", n=64, m=1, model=even(64, update=0.007), cluster=ALONE, steps=1)
    program = assemble(request)
    costs = price(program, even(64, update=0.007), ALONE)
    made = run(program, costs)
    assert made.costs.quantum > in_quanta(program, costs).quantum
    assert are_exact(made.costs, made.end)
    assert violations(made) == {}
    assert abs(made.makespan - (64 * 0.4 + 0.007)) <= 1e-12 * made.makespan
    (swept,) = sweep(program, [costs, costs])[:1]
    assert swept.tolist() == made.end[: len(swept)].tolist()
    both = list(run_all(program, [costs, costs]))
    assert [each.end.tolist() for each in both] == [made.end.tolist()] * 2


def test_a_quantum_that_is_asked_for_is_kept_where_the_run_is_not_too_long() -> None:
    program = assemble(Request(schedule="gpipe", n=4, m=4, model=even(4), cluster=ALONE, steps=1))
    costs = price(program, even(4), ALONE)
    own = run(program, costs).costs.quantum
    assert run(program, replace(costs, quantum=8 * own)).costs.quantum == 8 * own
    assert run(program, replace(costs, quantum=own / 64)).costs.quantum in (
        2 * own,
        4 * own,
    )  # with room for longer runs


def test_what_takes_time_takes_a_quantum_at_least() -> None:
    """A message of a picosecond in a step of hours is there, and ends after it has begun."""
    short = Cluster(devices=(Devices(),), link=Link(latency=1e-16, bandwidth=1e18))
    made = simulate("1f1b", 2, m=2, model=even(2, forward=1e4), cluster=short, steps=1)
    sent = made.messages["end"] - made.messages["start"]
    assert (sent >= made.costs.quantum).all()


def test_slots_and_rounds_stay_as_they_are() -> None:
    assert simulate("1f1b", 4, m=8).costs.quantum == 0
    assert simulate("acco", 2, steps=3, model=even(2), cluster=ALONE).costs.quantum == 0


def test_who_meets_nobody_has_the_times_of_a_run_without_contention() -> None:
    """To the last bit, in a run so long that its quanta are larger than its lanes let expect."""
    options: dict[str, Any] = {"m": 1, "steps": 1, "model": even(32), "cluster": Cluster(link=Link(latency=3.0))}
    alone, fair = (simulate("gpipe", 32, **options, contention=word) for word in ("none", "fair"))
    assert (
        alone.costs.quantum == fair.costs.quantum > in_quanta(alone.program, replace(alone.costs, quantum=0.0)).quantum
    )
    assert alone.end.tolist() == fair.end.tolist()


def test_stops_leave_the_size_of_quanta() -> None:
    """An outage of a year does not make quanta of microseconds."""
    options: dict[str, Any] = {"m": 4, "steps": 1, "model": even(4), "cluster": ALONE}
    stopped = simulate("gpipe", 4, **options, stop=["1:0.5 s:3e7 s"])
    assert stopped.costs.quantum == simulate("gpipe", 4, **options).costs.quantum
    assert stopped.makespan > 3e7


def test_replicas_run_in_the_quanta_of_the_one_that_stands_for_them() -> None:
    run = simulate("1f1b", 4, m=8, replicas=3, model=even(4), cluster=Cluster(devices=(Devices(),), link=Link()))
    assert run.program.fold == 3
    assert run.costs.quantum == run.whole.costs.quantum

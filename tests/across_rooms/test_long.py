"""The long run (`make long`): a hundred thousand programs, ten thousand shuffles, ten thousand mutations.

Each test counts what it did and says so at its end: hypothesis stops early when it thinks that it has seen everything.
`--share` is the share of all that which is done, and `--draw` the word that decides what is drawn; `make sample` gives
the first.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil
from random import Random
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, RequestError, simulate
from cdpsim.invariants import violations
from cdpsim.program import Edges, Program
from cdpsim.program.check import check_program
from cdpsim.runs import Run
from cdpsim.timing.engine import ENGINES, discrete
from tests.helpers.strategies import requests
from tests.selection import long_run

PARTS = 8
PROGRAMS, SHUFFLED, MUTATED = (ceil(long_run["share"] * count / PARTS) for count in (100_000, 1_000, 10_000))
SHUFFLES = 10
ENOUGH = 1000  # draws, after which each of a few dozens of things has been drawn
in_parts = pytest.mark.parametrize("part", range(PARTS))
pytestmark = pytest.mark.long


def thoroughly(examples: int, part: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Settings for a part of a long run: as many examples, from a seed of its own."""
    given_that = settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=False
    )

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        return given_that(seed(f"{long_run['draw']} {part}")(test))

    return decorate


def run_of(request: dict[str, Any]) -> Run:
    """Simulate with the fast engine."""
    return simulate(**request)


@in_parts
def test_engines_agree_and_every_invariant_holds(part: int) -> None:
    """Schedules, sizes, unequal costs, links, rules: the same times to the last bit, and nothing out of order."""
    done: Counter[str] = Counter()

    @thoroughly(PROGRAMS, part)
    @given(requests(most=6))
    def each(request: dict[str, Any]) -> None:
        run = run_of(request)
        start, end = ENGINES["simpy"](run.program, run.costs)
        assert np.array_equal(run.start, start) and np.array_equal(run.end, end)
        assert violations(run) == {}
        done[request["schedule"].name] += 1

    each()
    assert done.total() >= PROGRAMS, done
    assert set(done) == set(SCHEDULES) or PROGRAMS < ENOUGH


class Shuffled(simpy.Environment):
    """Takes simultaneous events in any order instead of the order in which they were scheduled."""

    order = Random(0)

    def __init__(self, initial_time: float = 0) -> None:
        super().__init__(initial_time)

        def serials() -> Iterator[int]:
            while True:
                yield self.order.getrandbits(60)

        self._eid = serials()  # type: ignore[assignment]


@in_parts
def test_the_order_of_simultaneous_events_changes_nothing(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten shuffles of every program give its times."""
    done = 0
    monkeypatch.setattr(simpy, "Environment", Shuffled)

    @thoroughly(SHUFFLED, part)
    @given(requests(most=6))
    def each(request: dict[str, Any]) -> None:
        nonlocal done
        run = run_of(request)
        for shuffle in range(SHUFFLES):
            Shuffled.order = Random(f"{part} {shuffle}")
            start, end = discrete.run_by_events(run.program, run.costs)
            assert np.array_equal(run.start, start) and np.array_equal(run.end, end)
            done += 1

    each()
    assert done >= SHUFFLED * SHUFFLES


def test_a_shuffle_does_change_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would show nothing."""
    finished: list[int] = []
    finisher = discrete._Playback._finisher

    def recording(run: discrete._Playback) -> Callable[[int], None]:
        finish = finisher(run)

        def record(node: int) -> None:
            finished.append(node)
            finish(node)

        return record

    monkeypatch.setattr(simpy, "Environment", Shuffled)
    monkeypatch.setattr(discrete._Playback, "_finisher", recording)
    run = run_of({"schedule": "multi-dp", "n": 4})
    orders = set()
    for shuffle in range(SHUFFLES):
        finished.clear()
        Shuffled.order = Random(shuffle)
        discrete.run_by_events(run.program, run.costs)
        orders.add(tuple(finished))
    assert len(orders) > 1


def mutated(program: Program, how: str, row: int, other: int) -> Program:
    """Drop, double or turn round a dependency, let two exchange their ends, or close a cycle."""
    before, after, kind = (getattr(program.edges, name).copy() for name in ("before", "after", "kind"))
    if how == "dropped":
        return replace(program, edges=Edges(*(np.delete(ends, row) for ends in (before, after, kind))))
    if how == "turned":
        before[row], after[row] = after[row], before[row]
    elif how == "swapped":
        after[[row, other]] = after[[other, row]]
    else:
        new = (before[row], after[row]) if how == "doubled" else (after[row], before[row])
        before, after, kind = np.append(before, new[0]), np.append(after, new[1]), np.append(kind, kind[row])
    return replace(program, edges=Edges(before, after, kind))


def outcome(run: Run, program: Program) -> str:
    """Say how a mutated program ends: refused, caught by an invariant, or sound; engines must agree on all that run."""
    try:
        check_program(program)
    except RequestError as error:
        assert any(mark in str(error) for mark in ("(t=", "dependency")), error
        return "refused"
    (start, end), other = (engine(program, run.costs) for engine in ENGINES.values())
    assert np.array_equal(start, other[0]) and np.array_equal(end, other[1])
    found = violations(Run(run.request, program, run.costs, start, end))
    assert all("(t=" in problem or "stage" in problem or "device" in problem for problem in found.values()), found
    return "caught" if found else "sound"


@in_parts
def test_a_mutated_program_is_sound_or_refused_by_name(part: int) -> None:
    """Never silent: no exception but a refusal, no run that breaks an invariant unnoticed, no hang."""
    ways = ("dropped", "doubled", "turned", "swapped", "closed")
    done: Counter[tuple[str, str]] = Counter()

    @thoroughly(MUTATED, part)
    @given(requests(), st.sampled_from(ways), st.data())
    def each(request: dict[str, Any], how: str, data: st.DataObject) -> None:
        run = run_of(request)
        row, other = (data.draw(st.integers(0, len(run.program.edges) - 1)) for _ in range(2))
        found = outcome(run, mutated(run.program, how, row, other))
        assert found == "refused" or how != "closed", "a cycle must be refused"
        done[how, found] += 1

    each()
    assert done.total() >= MUTATED, done
    all_found = {how for how, _ in done} == set(ways) and {"refused", "caught", "sound"} == {found for _, found in done}
    assert all_found or MUTATED < ENOUGH, done

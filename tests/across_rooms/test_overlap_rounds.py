"""Runs of DPU, WP and ACCO against the oracle, which plays them event by event: every count, time and version."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim import Cluster, Model, Stage, simulate
from cdpsim.cluster import Link
from cdpsim.runs import Run
from tests.helpers.rounds import METHODS, Case, Played, play

BANDWIDTH = 8


class Wanted(NamedTuple):
    """A case, and of what it is made: the times of an undisturbed worker, and what its workers' are multiplied by."""

    case: Case[int]
    passes: int
    update: int
    factors: list[int]


@st.composite
def requests(draw: st.DrawFn) -> Wanted:
    """Workers, alike or not, that take whole times."""
    method, workers, updates = draw(st.sampled_from(METHODS)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    factors = draw(st.lists(st.integers(1, 5), min_size=workers, max_size=workers) | st.just([1] * workers))
    passes, update, exchange = draw(st.integers(2, 6)), draw(st.integers(0, 3)), draw(st.integers(0, 4)) * (workers - 1)
    case = Case(
        method=method,
        times=[passes * factor for factor in factors],
        reduce_scatter=exchange,
        update=[update * factor for factor in factors],
        gather=exchange,
        block=draw(st.integers(1, 3)),
        updates=updates,
        warm_up=draw(st.integers(0, updates - 1)) if method == "dpu" else 0,
    )
    return Wanted(case, passes, update, factors)


def simulated(wanted: Wanted, **options: Any) -> Run:
    """The run of a case: a ring sends (N - 1) / N of all bytes in its time, and a worker has an N-th of the update."""
    case, n = wanted.case, wanted.case.workers
    size = n * case.gather * BANDWIDTH // max(n - 1, 1)
    update = {"update": n * wanted.update} if wanted.update else {}
    slow = {worker: factor for worker, factor in enumerate(wanted.factors) if factor > 1}
    stage = Stage(forward=1, backward=wanted.passes - 1, parameters=size, **update)  # type: ignore[arg-type]
    options |= {"warm_up": case.warm_up} if case.warm_up else {}
    options |= {"slow": slow} if slow else {}
    options |= {"collective": "ring"} if n > 1 else {}
    return simulate(
        case.method,
        replicas=n,
        m=case.block,
        steps=case.updates,
        model=Model(stages=(stage,)),
        cluster=Cluster(link=Link(bandwidth=float(BANDWIDTH))),
        **options,
    )


def check(run: Run, played: Played[int]) -> None:
    """Compare rounds, tasks and updates."""
    rows, case = run.rounds, played.case
    assert rows is not None
    assert rows.micro_batches.tolist() == [count for each in played.rounds for count in each.counts]
    assert rows.posted.tolist() == [at for each in played.rounds for at in each.posted]
    for name, at in (("begun", 0), ("ended", 1)):
        times = [*(span[at] for span in played.spans), -1]
        assert getattr(rows, name).tolist() == [time for time in times for _ in range(case.workers)]
    assert run.makespan == played.end
    tasks = run.tasks
    estimates = tasks.estimate if case.method != "dpu" else np.zeros(len(tasks), dtype=int)
    names = zip(tasks.kind, tasks.device, tasks.step, tasks.version, estimates, tasks.start, strict=True)
    forwards = sorted(
        (device, start, step, version, estimate)
        for kind, device, step, version, estimate, start in names
        if kind == "F"
    )
    assert forwards == sorted(
        (worker, start, each.enters, *read(played, r))
        for r, each in enumerate(played.rounds)
        for worker, starts in enumerate(each.starts)
        for start in starts
    )
    check_updates(run, played)
    assert run.summary()["mean_staleness"] == (case.method == "dpu")  # in steady state


def read(played: Played[int], r: int) -> tuple[int, bool]:
    """The version that a round reads.

    The oracle says of WP's first interval that it reads an estimate of theta(1). The run says theta(0), which it is.
    """
    reads = played.rounds[r].reads
    return (0, False) if played.case.method == "wp" and r == 1 else reads


def check_updates(run: Run, played: Played[int]) -> None:
    """Compare what updates make and start from, in the order in which each worker makes them."""
    tasks, case = run.tasks, played.case
    made = [update for each in played.rounds for update in each.updates]
    for worker in range(case.workers):
        mine = tasks[(tasks.kind == "U") & (tasks.device == worker)]
        assert mine.version.tolist() == [update.makes.number for update in made]
        if case.method != "dpu":
            assert mine.estimate.tolist() == [update.makes.estimate for update in made]
            assert mine.base.tolist() == [update.base.number for update in made]


@pytest.mark.slow
@given(requests())
@settings(max_examples=3000, deadline=None)
def test_a_run_is_what_the_oracle_plays(wanted: Wanted) -> None:
    """By the recurrence, and the fast engine."""
    check(simulated(wanted), play(wanted.case))


@given(requests())
@settings(max_examples=60, deadline=None)
def test_so_is_one_of_events(wanted: Wanted) -> None:
    """By SimPy."""
    check(simulated(wanted, engine="simpy"), play(wanted.case))

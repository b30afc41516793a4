"""Replicas that are alike are run once, and no metric differs from that of a run of all, in any bit."""

from typing import Any

import pytest
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st

from cdpsim import SCHEDULES, Cluster, Model, RequestError, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.request.sharing import accepts
from cdpsim.studies.compare import measure
from tests.selection import Examples

PARTS = 8
PIPELINES = [name for name, schedule in SCHEDULES.items() if accepts(schedule, "shard")]
TIMES = st.floats(0.01, 3.0)
FLAT = {
    overlap: Cluster(devices=(Devices(speed=1e12, overlap=overlap),), link=Link(latency=0.1, bandwidth=20.0))
    for overlap in ("full", "stream", "none")
}


@st.composite
def replicated(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a request of several replicas, as a schedule takes it or not."""
    schedule = SCHEDULES[draw(st.sampled_from(PIPELINES))]
    chunks = 2 if schedule.order.any_chunks else schedule.order.chunks
    n = chunks * draw(st.integers(1, 4))
    stages = tuple(
        Stage(
            forward=draw(TIMES),
            backward=1 + draw(TIMES),
            weight_backward=draw(st.floats(0.01, 1.0)),
            activation=draw(st.integers(1, 9)),
            boundary=draw(st.integers(0, 5)),
            parameters=draw(st.integers(0, 40)),
            optimizer=draw(st.integers(0, 90)),
            update=draw(st.none() | TIMES) if schedule.order.together else None,
        )
        for _ in range(n)
    )
    flushes = schedule.order.together
    zero = draw(st.integers(0, 3 if flushes else 1))
    shard = draw(st.integers(1, 3)) if zero else 1
    asked: dict[str, Any] = {"schedule": schedule.name, "n": n, "model": Model(stages=stages), "zero": zero}
    asked |= {"cluster": draw(st.sampled_from([*FLAT.values(), "a100-nodes"]))}
    asked |= {"replicas": draw(st.integers(1 + (shard == 1), 3)), "shard": shard if zero else None}
    asked |= {"steps": draw(st.integers(1, 4)), "ignore_memory": True}
    asked |= {"chunks": chunks} if schedule.order.any_chunks else {}
    asked |= {"m": draw(st.integers(1, 3)) * n // chunks} if accepts(schedule, "m") else {}
    asked |= {"reduce": draw(st.sampled_from([None, "end", "last", *["each"] * (zero != 1)]))} if flushes else {}
    if zero == 3:
        asked |= {"reshard": draw(st.sampled_from([None, "yes", "no", "root", "step"]))}
        asked |= {"prefetch": draw(st.sampled_from([None, 0, 2]))}
    return asked


@pytest.mark.parametrize("part", range(PARTS))
def test_folded_runs_have_the_metrics_of_all_replicas_to_the_last_bit(part: int, examples: Examples) -> None:
    """A thousand runs, in parts for several workers."""

    @settings(max_examples=examples(1000 // PARTS))
    @given(replicated())
    def law(asked: dict[str, Any]) -> None:
        try:
            run = simulate(**asked)
        except RequestError:  # the schedule does not take it so
            assume(False)
        assume(run.program.fold > 1)
        metrics, makespan, peaks = run.summary(), run.makespan, run.peaks.tolist()
        assert (metrics, makespan, peaks) == (run.whole.summary(), run.whole.makespan, run.whole.peaks.tolist())
        assert measure(run) == measure(run.whole)
        assert run.tasks == run.whole.tasks
        assert len(run.whole.tasks["start"]) == metrics["tasks"]

    (seed(part)(law) if settings().derandomize else law)()


def test_replicas_take_no_tasks_of_their_own() -> None:
    """Nine replicas are as many tasks as one; their collectives have all ranks."""
    run = simulate("1f1b", 4, m=8, replicas=9, model=Model(stages=Model.unit(4).stages), cluster=FLAT["full"])
    assert run.program.fold == 9
    one = simulate("1f1b", 4, m=8, model=Model(stages=Model.unit(4).stages), cluster=FLAT["full"])
    assert len(run.program.tasks) == len(one.program.tasks)
    assert run.program.ranks_of(0).tolist() == [*range(0, 36, 4)]
    assert (run.devices, run.summary()["tasks"]) == (36, 9 * len(one.program.tasks))


UNLIKE = Cluster(devices=(Devices(count=4, speed=1e12), Devices(count=4, speed=2e12)), link=Link(bandwidth=20.0))


@pytest.mark.every_case
@pytest.mark.parametrize(
    "apart",
    [
        {"slow": ["1:2"]},
        {"stop": ["1:500 ms:1 s"]},
        {"jitter": "uniform:0.1"},
        {"link_jitter": "uniform:0.1"},
        {"contention": "fair"},
        {"expand_collectives": True},
        {"counts": [[2, 1], [2, 2]]},
        {"cluster": UNLIKE},
    ],
    ids=lambda apart: next(iter(apart)),
)
def test_what_tells_replicas_apart_unfolds_them(apart: dict[str, Any]) -> None:
    """Each replica is run where one may differ from another."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=8, boundary=2),) * 4)
    asked: dict[str, Any] = {"m": 2, "steps": 2, "replicas": 2, "model": model, "cluster": FLAT["full"]}
    assert simulate("gpipe", 4, **asked).program.fold == 2
    assert simulate("gpipe", 4, **(asked | apart)).program.fold == 1


def test_replicas_on_other_links_are_unfolded() -> None:
    """Three stages a replica on nodes of eight: the third replica's messages leave its node, those of others do not."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, parameters=8, boundary=2 * 10**9),) * 3)
    asked: dict[str, Any] = {"m": 2, "model": model, "cluster": "a100-nodes", "ignore_memory": True}
    assert simulate("1f1b", 3, replicas=2, **asked).program.fold == 2
    assert simulate("1f1b", 3, replicas=3, **asked).program.fold == 1

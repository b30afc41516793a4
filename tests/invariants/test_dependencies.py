"""Dependencies as invariants recount them: a missing edge is found, and so is one too many."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from msgspec.structs import replace as replace_struct

from cdpsim import SCHEDULES, Cluster, Model, Stage, simulate
from cdpsim.cluster import Cable, Devices, Link, PairLink, Topology
from cdpsim.errors import RequestError
from cdpsim.invariants import resources, violations
from cdpsim.invariants.recount import Recount
from cdpsim.program import Edges, Kind, Program
from cdpsim.runs import Run
from cdpsim.timing.engine import ENGINES, find_engine
from tests.helpers.strategies import requests


def model(n: int, **more: Any) -> Model:
    """Stages that are all unlike, with an optimizer state that moves."""
    size: dict[str, Any] = {"activation": 10**8, "boundary": 2 * 10**7, "optimizer": 7 * 10**7} | more
    stages = (
        Stage(
            forward=1 + 0.37 * j, backward=1.9 - 0.11 * j, weight_backward=0.7, parameters=(5 + 3 * j) * 10**7, **size
        )
        for j in range(n)
    )
    return Model(stages=tuple(stages))


def by_hosts(n: int) -> dict[str, Any]:
    """Keywords for uneven updates, made by hosts, some of them at once."""
    stages = model(n, optimizer=0, host_optimizer=5).stages
    times = [0.0, 1.3, 2.9, 0.7]
    own = [replace_struct(stage, host_update=time) for stage, time in zip(stages, times, strict=False)]
    return {"model": Model(stages=tuple(own)), "cluster": cluster(host=Link())}


def cluster(bandwidth: float = 1.3e8, overlap: str = "full", latency: float = 0.013, **more: Any) -> Cluster:
    """Links on which messages take about as long as tasks, one of them slower than the others."""
    own = (PairLink(between=(0, 1), latency=0.21),)
    return Cluster(
        devices=(Devices(overlap=overlap),), link=Link(latency=latency, bandwidth=bandwidth), links=own, **more
    )


def nodes() -> Cluster:
    """Nodes of two devices with one card, round a switch."""
    inside, host = Cable(latency=0.01, bandwidth=4e8), Cable(latency=0.02, bandwidth=2e8)
    network = Cable(latency=0.03, bandwidth=1e8)
    topology = Topology(kind="nodes", per_node=2, nics=1, link=inside, host=host, network=network)
    return Cluster(devices=(Devices(count=4),), topology=topology)


def real(schedule: str, n: int, **more: Any) -> dict[str, Any]:
    """Keywords for `simulate` with uneven stages on uneven links."""
    return {"schedule": schedule, "n": n, "steps": 2, "model": model(n), "cluster": cluster()} | more


MET: dict[str, Any] = {"rendezvous": "megatron", "cluster": cluster(overlap="none")}
RUNS: dict[str, dict[str, Any]] = {
    # In slots: messages take no time.
    "single-cdp": {"schedule": "single-cdp", "n": 3},
    "multi-dp": {"schedule": "multi-dp", "n": 3},
    "multi-cdp": {"schedule": "multi-cdp", "n": 3},
    "multi-cdp, v1": {"schedule": "multi-cdp", "n": 3, "rule": "cdp-v1"},
    "mp-dp": {"schedule": "mp-dp", "n": 2},
    "mp-cdp": {"schedule": "mp-cdp", "n": 3},
    "pp-cdp, slow": {"schedule": "pp-cdp", "n": 3, "slow": ["1:2"]},
    "zero-dp": {"schedule": "zero-dp", "n": 3},
    "zero-cdp": {"schedule": "zero-cdp", "n": 3},
    "zero-cdp, v1": {"schedule": "zero-cdp", "n": 3, "rule": "cdp-v1", "prefetch": 1},
    "zbv": {"schedule": "zbv", "n": 4, "m": 4},
    "pipedream, stop": {"schedule": "pipedream", "n": 3, "steps": 5, "stop": ["1:4:3"]},
    "lanes": {"schedule": "single-cdp", "n": 3, "cluster": Cluster(devices=(Devices(lanes=2),)), "slow": ["0:2"]},
    # Point to point, in seconds.
    "multi-cdp, seconds": real("multi-cdp", 4),
    "multi-cdp, prefetch": real("multi-cdp", 3, prefetch=1),
    "multi-cdp, prefetch much": real("multi-cdp", 3, prefetch=4, rule="cdp-v1", steps=3),
    "multi-cdp, v1, seconds": real("multi-cdp", 3, rule="cdp-v1", steps=3),
    "multi-cdp, v1, updates in lanes": real(
        "multi-cdp", 3, rule="cdp-v1", steps=3, model=model(3, update=0.4), prefetch=1
    ),
    "multi-cdp, updates in lanes": real("multi-cdp", 3, model=model(3, update=0.4)),
    "multi-cdp, by hosts": real("multi-cdp", 3, **by_hosts(3)),
    "multi-cdp, v1, by hosts": real("multi-cdp", 3, **by_hosts(3), rule="cdp-v1", steps=3),
    "multi-cdp, jitter": real("multi-cdp", 3, jitter="lognormal:0.5", link_jitter="lognormal:0.5", steps=4),
    "mp-cdp, seconds": real("mp-cdp", 3, steps=3),
    "mp-cdp, v1, prefetch": real("mp-cdp", 3, steps=3, rule="cdp-v1", prefetch=2),
    "mp-cdp, deferred": real("mp-cdp", 3, **MET, jitter="exponential:1"),
    "mp-cdp, by hosts": real("mp-cdp", 3, **by_hosts(3)),
    "pp-cdp, seconds": real("pp-cdp", 4),
    "pp-cdp, v1": real("pp-cdp", 3, rule="cdp-v1", steps=3),
    "pp-cdp, deferred": real("pp-cdp", 3, **MET, jitter="lognormal:0.5"),
    "single-cdp, by host": real("single-cdp", 3, **by_hosts(3)),
    "pipedream": real("pipedream", 4, steps=7),
    "pipedream, vertical": real("pipedream", 3, steps=6, rule="vertical-sync"),
    "pipedream-2bw": real("pipedream-2bw", 3, m=4, model=model(3, update=0.3)),
    "pipemare": real("pipemare", 3, m=3, **by_hosts(3)),
    # States in one place.
    "zero-dp, seconds": real("zero-dp", 3),
    "zero-dp, prefetch": real("zero-dp", 3, prefetch=2, jitter="lognormal:0.5"),
    "zero-dp, by hosts": real("zero-dp", 3, **by_hosts(3)),
    "zero-dp, in pieces": real("zero-dp", 4, expand_collectives=True, prefetch=1),
    "zero-dp, trees": real("zero-dp", 3, expand_collectives=True, link_jitter="lognormal:0.5"),
    "zero-cdp, seconds": real("zero-cdp", 4),
    "zero-cdp, v1, by hosts": real("zero-cdp", 3, rule="cdp-v1", steps=3, **by_hosts(3)),
    "zero-cdp, prefetch": real("zero-cdp", 3, prefetch=2, model=model(3, update=0.4)),
    # Replicas and all-reduces.
    "multi-dp, seconds": real("multi-dp", 3, jitter="lognormal:0.3"),
    "multi-dp, at once": real("multi-dp", 3, reduce="last", model=model(3, update=0.2)),
    "multi-dp, ring": real("multi-dp", 3, expand_collectives=True, collective="ring", link_jitter="lognormal:0.5"),
    "multi-dp, doubling": real(
        "multi-dp", 5, m=5, expand_collectives=True, steps=1, reduce="last", jitter="lognormal:0.3"
    ),
    "1f1b, replicas": real("1f1b", 3, m=4, replicas=2, jitter="lognormal:0.3"),
    "pipedream, replicas": real("pipedream", 2, replicas=2, steps=6, rule="vertical-sync", link_jitter="lognormal:0.5"),
    "pipedream-2bw, replicas": real("pipedream-2bw", 2, m=2, replicas=2, steps=5, link_jitter="lognormal:0.9"),
    "pp-cdp, v1, replicas": real(
        "pp-cdp", 2, rule="cdp-v1", steps=3, replicas=3, **by_hosts(2), jitter="lognormal:0.5"
    ),
    "chimera, tree": real("chimera", 4, m=4, expand_collectives=True, collective="tree"),
    # States in shares, and streams of data ranks.
    "dp, buckets": real("dp", 3, m=2, replicas=3, buckets="100 MB", link_jitter="lognormal:0.5"),
    "dp, zero-1": real("dp", 3, m=2, shard=2, zero=1, replicas=2, buckets="60 MB,90 MB", gather="step"),
    "dp, zero-2": real("dp", 3, m=2, shard=3, zero=2, clip=True, jitter="lognormal:0.3"),
    "dp, zero-3": real("dp", 3, m=2, shard=4, zero=3, reshard=2, prefetch=2),
    "dp, zero-3, kept": real("dp", 3, m=3, shard=2, zero=3, reshard="root", prefetch=2),
    "dp, zero-3, in pieces": real(
        "dp", 2, m=1, shard=2, replicas=2, expand_collectives=True, collective="tree", steps=1
    ),
    "dp, updates in streams": real("dp", 3, m=2, shard=2, zero=1, update_in="stream", model=model(3, update=0.4)),
    "dp, zero-2, alone": real("dp", 3, m=2, shard=2, zero=2, cluster=cluster(overlap="none")),
    "1f1b, zero-2": real("1f1b", 2, m=2, shard=2, zero=2, replicas=2, reduce="each", model=model(4), steps=1),
    "1f1b, zero-3, stream": real("1f1b", 2, m=2, shard=2, zero=3, cluster=cluster(overlap="stream")),
    "chimera, zero-3": real("chimera", 2, m=2, shard=2, zero=3, reshard="yes", model=model(4)),
    "pipedream-2bw, zero-1": real("pipedream-2bw", 2, m=3, shard=2, zero=1, steps=4),
    # Split backwards.
    "zb-h1": real("zb-h1", 3, m=4),
    "zbv, by hosts": real("zbv", 4, m=4, **by_hosts(4)),
    "dualpipe": real("dualpipe", 4, m=8, steps=1, reduce="last"),
    # Streams, and messages that share links.
    "multi-cdp, stream": real("multi-cdp", 3, cluster=cluster(overlap="stream"), rule="cdp-v1", steps=3, prefetch=9),
    "multi-cdp, alone": real("multi-cdp", 3, cluster=cluster(overlap="none"), prefetch=1, model=model(3, update=0.4)),
    "zero-dp, stream, in pieces": real("zero-dp", 3, cluster=cluster(overlap="stream"), expand_collectives=True),
    "zbv, alone": real("zbv", 4, m=4, cluster=cluster(overlap="none"), rendezvous="torch"),
    "1f1b, alone, replicas": real("1f1b", 2, m=3, replicas=2, cluster=cluster(overlap="none"), expand_collectives=True),
    "multi-dp, contention": real("multi-dp", 4, cluster=nodes(), contention="fair", collective="hierarchical", steps=1),
    "pp-cdp, contention": real("pp-cdp", 3, cluster=nodes(), contention="queue", prefetch=0),
}


def binding(run: Run) -> list[int]:
    """The edges that alone decide when a node starts: no other dependency, no lane and no release ends as late."""
    program, edges = run.program, run.program.edges
    causes = np.bincount(edges.after[run.end[edges.before] == run.start[edges.after]], minlength=program.nodes)
    before, after = program.lane_edges
    causes += np.bincount(after[run.end[before] == run.start[after]], minlength=program.nodes)
    causes[run.start == 0] += 1
    for (task, _), release in zip(program.releases, run.costs.release, strict=True):
        causes[task] += run.start[task] == release
    tight = (run.end[edges.before] == run.start[edges.after]) & (causes[edges.after] == 1)
    return np.flatnonzero(tight).tolist()


def without(run: Run, row: int) -> Run:
    """Run again without one edge."""
    edges = run.program.edges
    fewer = Edges(*(np.delete(column, row) for column in (edges.before, edges.after, edges.kind)))
    program: Program = replace(run.program, edges=fewer)
    contention = "none" if run.costs.wires is None else run.costs.wires.contention
    start, end = find_engine("auto", contention)(program, run.costs)
    return replace(run, program=program, start=start, end=end)


@pytest.mark.parametrize("name", RUNS)
def test_no_edge_that_matters_can_be_missing(name: str) -> None:
    """Each edge that decides when a node starts is taken away; an invariant says so, which cannot have read it."""
    run = simulate(**RUNS[name]).whole
    assert violations(run) == {}
    edges, rows = run.program.edges, binding(run)
    assert rows
    for row in rows:
        missing = f"{run.program.describe(edges.before[row])} -> {run.program.describe(edges.after[row])}"
        changed = without(run, row)
        assert not np.array_equal(changed.start, run.start), missing
        assert violations(changed), missing


@pytest.mark.parametrize("name", RUNS)
def test_a_dependency_that_leads_elsewhere_is_found(name: str) -> None:
    """It lets a node start too early, or too late, where another node is what it waits for.

    In a stream a node may wait for all that its devices do, and in a collective for other messages: a few go unnoticed.
    """
    run, rng = simulate(**RUNS[name]).whole, np.random.default_rng(len(name))
    edges, unnoticed, changes = run.program.edges, [], 0
    contention = "none" if run.costs.wires is None else run.costs.wires.contention
    for row in rng.integers(len(edges.before), size=400).tolist():
        before = edges.before.copy()
        before[row] = rng.integers(run.program.nodes)
        program = replace(run.program, edges=Edges(before, edges.after, edges.kind))
        with suppress(RequestError):  # as nodes wait for each other in a cycle
            start, end = find_engine("auto", contention)(program, run.costs)
            changed = replace(run, program=program, start=start, end=end)
            if not np.array_equal(start, run.start):
                changes += 1
                unnoticed += [] if violations(changed) else [(program.describe(before[row]), edges.after[row])]
        if changes == 12:
            break
    assert changes == 12
    alone = (np.array(run.request.cluster.overlaps(run.program.devices)) == "full").all() and not run.request.expands
    assert len(unnoticed) <= (0 if alone else 8), unnoticed


@given(requests())
def test_what_is_recounted_times_the_run(request: dict[str, Any]) -> None:
    """The needs of the laws alone, without the program's edges, give every node the start that it has."""
    run = simulate(**request)
    found, program = resources.all_needs(Recount(run)), run.program
    edges = Edges(found.before, found.after, np.zeros_like(found.before))
    start, end = ENGINES["fast"](replace(program, edges=edges), run.costs)
    assert np.array_equal(start, run.start) and np.array_equal(end, run.end)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "asked",
    [
        {"schedule": "pipedream", "rule": "vertical-sync", "steps": 6},
        {"schedule": "pipedream-2bw", "m": 2, "steps": 6},
        {"schedule": "pp-cdp", "rule": "cdp-v1", "steps": 6},
    ],
    ids=lambda asked: str(asked["schedule"]),
)
def test_replicas_update_a_stage_in_the_order_of_steps(asked: dict[str, Any], seed: int) -> None:
    """Links that jitter may end an all-reduce before that of the step before; its update waits all the same."""
    one = Stage(forward=1.0, backward=2.0, activation=10**9, boundary=10**7, parameters=4 * 10**9)
    links = Cluster(link=Link(latency=5e-6, bandwidth=1e9))
    more: dict[str, Any] = {"model": Model(stages=(one, one)), "cluster": links, "link_jitter": "lognormal:2"}
    run = simulate(n=2, replicas=2, seed=seed, **asked, **more)
    tasks = run.program.tasks
    rows = np.flatnonzero(tasks.kind == Kind.U)
    in_order = rows[np.lexsort((tasks.step[rows], tasks.stage[rows], tasks.device[rows]))].reshape(4, 6)
    assert (np.diff(tasks.step[in_order]) == 1).all()
    assert (run.end[in_order[:, :-1]] <= run.start[in_order[:, 1:]]).all()
    assert violations(run) == {}


@pytest.mark.parametrize("name", ["zero-cdp, v1", "zero-cdp, seconds", "mp-cdp, v1, prefetch", "zero-dp, seconds"])
def test_a_schedule_that_has_no_name_here_is_recounted_by_times(name: str) -> None:
    """Its order is not known; the states that travel are followed as they went."""
    asked = dict(RUNS[name])
    own = replace(SCHEDULES[asked.pop("schedule")], name="mine")
    run = simulate(own, **asked)
    assert run is not None and violations(run) == {}
    rows = binding(run)
    seen = [row for row in rows if violations(without(run, row))]
    assert len(seen) >= 0.9 * len(rows)

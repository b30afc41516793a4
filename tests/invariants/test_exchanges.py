"""Every invariant holds for every policy of the data axis, under every order that flushes, in pieces or not."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from cdpsim import Cluster, Model, RequestError, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.invariants import resources, violations
from cdpsim.invariants.recount import Recount
from cdpsim.program import Edges
from cdpsim.timing.engine import ENGINES
from tests.helpers.data_axis import FLUSHING

LAYERS = 8
MODEL = Model(
    stages=tuple(
        Stage(
            forward=1.0 + j % 3,
            backward=2.0 + j % 5,
            weight_backward=1.0,
            activation=10,
            boundary=3,
            parameters=16 + 5 * j,
            gradients=11 + 7 * (3 * j % 4),
            optimizer=20 + j,
        )
        for j in range(LAYERS)
    )
)
SCHEDULES: dict[str, dict[str, Any]] = {**FLUSHING, "zbv": {"n": 8, "m": 4}, "dualpipe": {"n": 8, "m": 16}}
RANKS = (1, 1), (2, 1), (1, 2), (2, 2), (1, 3)  # replicas, and ranks that share
CASES = tuple(product((0, 1, 2, 3), RANKS, ("full", "stream", "none"), (False, True), (None, "end", "last", "each")))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_law_holds_for_every_policy(name: str) -> None:
    """A stride through all combinations, another one for each schedule; what is refused is refused in a line."""
    ran = 0
    for zero, (replicas, shard), overlap, pieces, reduce in CASES[list(SCHEDULES).index(name) :: 41]:
        cluster = Cluster(devices=(Devices(overlap=overlap),), link=Link(latency=0.1, bandwidth=20.0))
        ranks: dict[str, Any] = {"zero": zero, "replicas": replicas, "shard": shard if zero else None}
        asked: dict[str, Any] = {
            "model": MODEL,
            "cluster": cluster,
            "steps": 2,
            "reduce": reduce,
            "expand_collectives": pieces,
        }
        try:
            run = simulate(name, **SCHEDULES[name], **asked, **ranks)
        except RequestError:
            continue
        each = (run.whole, replace(run, unfold=None))  # all replicas, and the one that stands for all
        assert not any(map(violations, each)), (zero, replicas, shard, overlap, pieces, reduce)
        ran += 1
    assert ran >= 5


@pytest.mark.every_case
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("offload", ["parameters", "nvme"])
def test_what_is_fetched_is_recounted(offload: str, ranks: int, prefetch: int) -> None:
    """The laws' needs alone, without the program's edges, time what comes from hosts and disks before uses."""
    links: dict[str, Any] = {"host": Link(bandwidth=10.0), "nvme": Link(bandwidth=6.0)}
    cluster = Cluster(devices=(Devices(speed=1e12),), link=Link(bandwidth=20.0), **links)
    asked: dict[str, Any] = {"offload": offload, "optimizer": "adam", "mixed_precision": True, "prefetch": prefetch}
    model = Model(precision="bf16", stages=(Stage(forward=1.0, backward=2.0, activation=9, parameters=40),) * 4)
    run = simulate("dp", 4, m=2, steps=2, zero=3, shard=ranks, model=model, cluster=cluster, **asked)
    assert violations(run) == {}
    found, program = resources.all_needs(Recount(run)), run.program
    edges = Edges(found.before, found.after, np.zeros_like(found.before))
    start, end = ENGINES["fast"](replace(program, edges=edges), run.costs)
    assert np.array_equal(start, run.start) and np.array_equal(end, run.end)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["zb-h1", "zbv"])
def test_both_parts_of_backwards_have_parameters_from_hosts(name: str, ranks: int) -> None:
    """On one rank as on two."""
    cluster = Cluster(link=Link(bandwidth=20.0), host=Link(bandwidth=10.0))
    stage = Stage(forward=1.0, backward=2.0, weight_backward=1.0, activation=9, parameters=40)
    model = Model(precision="bf16", stages=(stage,) * SCHEDULES[name]["n"])
    asked: dict[str, Any] = {"offload": "parameters", "optimizer": "adam", "shard": ranks}
    assert violations(simulate(name, **SCHEDULES[name], model=model, cluster=cluster, **asked)) == {}

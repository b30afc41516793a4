"""Time of a thousand disturbed runs of 512 tasks: all at once, one after another, and event by event."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cdpsim import Cluster, Model, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.cluster.disorder import Disorder
from cdpsim.numeric.paths import sort_into_levels
from cdpsim.runs import Run
from cdpsim.studies.montecarlo import sample_runs
from cdpsim.timing.costs import jittered_durations
from cdpsim.timing.engine import ENGINES

RUNS = 1000
MODEL = Model(stages=(Stage(forward=0.01, backward=0.02, boundary=10**6, parameters=10**7),) * 8)
BOX = Cluster(devices=(Devices(),), link=Link(latency=1e-5, bandwidth=1e11))
NAMES = ["multi-dp", "multi-cdp", "mp-cdp", "pp-cdp"]


def run_of(name: str, jitter: str = "lognormal:0.1") -> Run:
    """Simulate eight stages, eight micro-batches and four steps: 512 tasks, and messages."""
    run = simulate(name, model=MODEL, cluster=BOX, steps=4, jitter=jitter)
    assert len(run.program.lane_tasks) == 512
    return run


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("jitter", ["uniform:0.1", "lognormal:0.1"])
def test_spread(name: str, jitter: str, benchmark: Any) -> None:
    """Sample a thousand runs: costs, levels, random numbers, the sweep, makespans and ends of steps."""
    trace = simulate(name, model=MODEL, cluster=BOX, steps=4, jitter=jitter)
    benchmark.pedantic(sample_runs, (trace, RUNS), rounds=9, warmup_rounds=2)


@pytest.mark.parametrize("name", NAMES)
def test_sweep_alone(name: str, benchmark: Any) -> None:
    """Find the longest paths of all runs, whose durations are given."""
    run = run_of(name)
    graph = sort_into_levels(*run.program.waits(), run.program.nodes)
    duration = np.random.default_rng(0).random((run.program.nodes, RUNS))
    earliest = np.zeros((run.program.nodes, 1))
    benchmark.pedantic(graph.sweep, (duration, earliest), rounds=9, warmup_rounds=2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_one_after_another(name: str, engine: str, benchmark: Any) -> None:
    """Run a twentieth of them, with durations drawn before; `extra_info` has the time of a thousand."""
    run = run_of(name)
    drawn = jittered_durations(run.program, run.costs.duration, Disorder(jitter="lognormal:0.1"), 0, range(RUNS // 20))
    several = [replace(run.costs, duration=row) for row in drawn]

    def loop() -> None:
        for costs in several:
            ENGINES[engine](run.program, costs)

    benchmark.pedantic(loop, rounds=3, warmup_rounds=1)
    benchmark.extra_info["thousand"] = 20 * benchmark.stats.stats.median

"""Tasks per second of the engines, from a request to a finished trace, memory curves included."""

import resource
import subprocess
import sys
from typing import Any

import pytest
import simpy

from cdpsim import Cluster, Model, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.schedules import TABLE_1
from cdpsim.trace import Trace
from cdpsim.trace.metrics import memory

LARGE = [("multi-cdp", 256, 8), ("multi-cdp", 8, 8192)]


def traced(name: str, n: int, steps: int, engine: str = "fast", **options: Any) -> Trace:
    """Simulate and compute the memory curves."""
    trace = simulate(name, n, steps=steps, engine=engine, **options)
    memory.memory_by_category(trace.program, trace.start, trace.end)
    return trace


def rate(benchmark: Any, trace: Trace, messages: bool = False) -> float:
    """Return tasks, with `messages` also messages, per second at the median, and note them beside the times."""
    count = trace.program.nodes if messages else len(trace.program.tasks)
    result = count / benchmark.stats.stats.median
    benchmark.extra_info["per_second"] = round(result)
    return float(result)


@pytest.mark.parametrize(("name", "n", "steps"), [*LARGE, *((name, 256, 8) for name in TABLE_1 if name != "multi-cdp")])
def test_fast(name: str, n: int, steps: int, benchmark: Any) -> None:
    """The fast engine runs a million tasks, warm."""
    trace = benchmark.pedantic(traced, (name, n, steps), rounds=7, warmup_rounds=2)
    rate(benchmark, trace)


def bare_timeouts(count: int) -> None:
    """Run one process that only waits: the most that SimPy can do."""
    environment = simpy.Environment()

    def process() -> Any:
        for _ in range(count):
            yield environment.timeout(1)

    environment.process(process())
    environment.run()


def test_simpy_bare(benchmark: Any) -> None:
    """Time bare SimPy in the same process: the yardstick of the SimPy engine."""
    benchmark.pedantic(bare_timeouts, (200_000,), rounds=7, warmup_rounds=1)
    benchmark.extra_info["per_second"] = round(200_000 / benchmark.stats.stats.median)


SECONDS = Model(stages=(Stage(forward=0.01, backward=0.02, boundary=10**6, parameters=10**7),) * 32)
BOX = Cluster(devices=(Devices(),), link=Link(latency=1e-5, bandwidth=1e11))


@pytest.mark.parametrize("name", [*TABLE_1, "1f1b", "interleaved-1f1b", "gems", "pipedream"])
@pytest.mark.parametrize("costs", ["unit", "real"])
def test_simpy(name: str, costs: str, benchmark: Any) -> None:
    """The SimPy engine runs tasks and messages, all columns of the trace included."""
    options: dict[str, Any] = {} if costs == "unit" else {"model": SECONDS, "cluster": BOX}

    def run() -> Trace:
        trace = simulate(name, 32, steps=16, engine="simpy", **options)
        assert len(trace.tasks) and len(trace.messages) and len(trace.memory)
        return trace

    rate(benchmark, benchmark.pedantic(run, rounds=7, warmup_rounds=1), messages=True)


def test_files(benchmark: Any, tmp_path: Any) -> None:
    """A command writes all files of a million tasks."""
    command = [sys.executable, "-m", "cdpsim", "simulate", "multi-cdp", "-n", "256", "--steps", "8", "--force", "-o"]
    run = {"check": True}
    benchmark.pedantic(subprocess.run, ([*command, str(tmp_path / "traces")],), run, rounds=3, warmup_rounds=1)


def test_table1_500(benchmark: Any) -> None:
    """A command prints Table 1 for five hundred stages; its peak memory is noted, too."""
    command = [sys.executable, "-m", "cdpsim", "table1", "-n", "500"]
    run = {"check": True, "capture_output": True}
    benchmark.pedantic(subprocess.run, (command,), run, rounds=3, warmup_rounds=1)
    benchmark.extra_info["peak_bytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


FRESH = """
import time; began = time.perf_counter()
import cdpsim
from cdpsim.trace.metrics import memory
from cdpsim.schedules import TABLE_1
run = cdpsim.simulate("multi-cdp", 256, steps=8)
memory.memory_by_category(run.program, run.start, run.end)
print(time.perf_counter() - began)
"""


def test_first_call(benchmark: Any) -> None:
    """A fresh process runs a million tasks, imports included."""
    run = {"check": True, "capture_output": True}
    benchmark.pedantic(subprocess.run, ([sys.executable, "-c", FRESH],), run, rounds=5, warmup_rounds=1)

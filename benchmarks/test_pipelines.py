"""Time of pipelines, small ones and of about a million tasks, beside torch's own generator and simulator of orders."""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time
from timeit import repeat
from typing import Any

import pytest

from benchmarks.test_engines import rate, traced
from cdpsim import simulate
from cdpsim.numeric import paths
from cdpsim.schedules import KNOWN_ACTIONS, SCHEDULES
from cdpsim.schedules.actions import Actions, check_actions
from cdpsim.schedules.placement import Shape
from cdpsim.studies.compare import measure
from cdpsim.timing import engine

LARGE: list[tuple[str, int, dict[str, int]]] = [
    ("1f1b", 512, {"m": 1024}),
    ("gpipe", 512, {"m": 1024}),
    ("interleaved-1f1b", 256, {"m": 512, "chunks": 2}),
    ("zb-h1", 512, {"m": 1024}),
    ("interleaved-zero-bubble", 256, {"m": 512, "chunks": 2}),
    ("zbv", 256, {"m": 1024}),
    ("dualpipe", 256, {"m": 1024}),
    ("dualpipev", 256, {"m": 1024}),
    ("chimera", 512, {"m": 1024}),
    ("gems", 512, {"m": 1024}),
    ("1f1b", 128, {"m": 1024, "replicas": 4}),
]

EVEN = {"forward": "1 ms", "backward": "2 ms", "activation": "1 GB", "boundary": "16 MB", "parameters": "400 MB"}
REAL = {"cluster": "a100-nodes", "ignore_memory": True}


def even(n: int) -> dict[str, Any]:
    """Return options that ask for a model of equal stages, with real costs."""
    return REAL | {"model": {"name": "even", "stages": [EVEN | {"repeat": n}]}}


MEASURED: dict[str, tuple[tuple[Any, ...], dict[str, Any], int]] = {
    "8 x 16": (("1f1b", 8), {"m": 16}, 200),
    "8 x 16, gpt2": (("1f1b", 8), {"m": 16, "model": "gpt2", "cluster": "a100-nodes"}, 200),
    "64 x 256, 12 steps": (("1f1b", 64), {"m": 256, "steps": 12}, 15),
    "64 x 256, 12 steps, real": (("1f1b", 64), {"m": 256, "steps": 12} | even(64), 15),
    "512 x 1024, 1 step alone": (("1f1b", 512), {"m": 1024, "steps": 1, "max_memory": "2 GB"}, 5),
    "512 x 1024, 1 step": (("1f1b", 512), {"m": 1024, "steps": 1}, 3),
    "512 x 1024, 1 step, real": (("1f1b", 512), {"m": 1024, "steps": 1} | even(512), 3),
}


def order(name: str, n: int, m: int, chunks: int = 1) -> Actions:
    """Write out an order anew."""
    listing = SCHEDULES[name].order.lists
    assert listing is not None
    return listing.write_out(Shape(n, m, chunks))


def test_peer(benchmark: Any) -> None:
    """Time the one of Table 1's schedules that pipelines are measured by."""
    rate(benchmark, benchmark.pedantic(traced, ("multi-cdp", 256, 8), rounds=7, warmup_rounds=2))


@pytest.mark.benchmark(timer=process_time)
@pytest.mark.parametrize("case", MEASURED)
def test_measured(case: str, benchmark: Any) -> None:
    """Time from the request to the metrics that `compare` shows, warm, in processor seconds: the least counts."""
    arguments, options, rounds = MEASURED[case]
    assert paths.compiled_loops() is not None
    benchmark.pedantic(lambda: measure(simulate(*arguments, **options)), rounds=rounds, warmup_rounds=1)


@pytest.mark.benchmark(timer=process_time)
def test_warm(benchmark: Any) -> None:
    """Time a run of medium size where numba is loaded already."""
    assert paths.compiled_loops() is not None
    benchmark.pedantic(lambda: simulate("1f1b", 64, m=256, steps=2), rounds=30, warmup_rounds=2)


@pytest.mark.parametrize(("name", "n", "options"), LARGE)
def test_fast(name: str, n: int, options: dict[str, int], benchmark: Any) -> None:
    """Time from the request to memory curves, warm; the order is written out anew each time."""

    def with_empty_cache() -> tuple[tuple[str, int, int], dict[str, int]]:
        KNOWN_ACTIONS.forget()
        return (name, n, 1), options

    rate(benchmark, benchmark.pedantic(traced, setup=with_empty_cache, rounds=9))


@pytest.mark.parametrize(("name", "n", "options"), [case for case in LARGE if "replicas" not in case[2]])
def test_orders(name: str, n: int, options: dict[str, int], benchmark: Any) -> None:
    """Write an order out; note actions per second."""
    chunks = SCHEDULES[name].order.chunks
    actions = benchmark.pedantic(order, (name, n), {"chunks": chunks} | options, rounds=7, warmup_rounds=1)
    per_second(benchmark, len(actions))


@pytest.mark.parametrize(("name", "n", "m"), [("1f1b", 512, 1024), ("zb-h1", 340, 1024)])
def test_checks_of_orders(name: str, n: int, m: int, benchmark: Any) -> None:
    """Check a million actions as if a user had written them."""

    def fresh() -> tuple[tuple[Actions], dict[str, Any]]:
        return (order(name, n, m),), {}

    benchmark.pedantic(check_actions, setup=fresh, rounds=7, warmup_rounds=1)
    per_second(benchmark, len(order(name, n, m)))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gems"])
def test_without_compiled_code(name: str, benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find longest paths without numba: a level has hundreds of nodes in 1f1b, one or two in GEMS."""
    run = simulate(name, 512, m=1024, steps=1)
    monkeypatch.setattr(paths, "compiled_loops", lambda: None)
    benchmark.pedantic(engine, (run.program, run.costs), rounds=3, warmup_rounds=1)
    per_second(benchmark, run.program.nodes)


SMALL = {"n": 64, "m": 128}  # for torch, whose time grows faster than its tables


@pytest.mark.parametrize(("name", "torchs"), [("1f1b", "1F1B"), ("gpipe", "GPipe")])
def test_orders_beside_torch(name: str, torchs: str, benchmark: Any) -> None:
    """Write orders of one size out, and let torch do so; note actions per second."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    beside(benchmark, partial(order, name, **SMALL), partial(visualizer.get_schedule_ops, torchs, *SMALL.values()))


def test_runs_beside_torch(benchmark: Any) -> None:
    """Time from an order's name to the start of each action; torch simulates steps with sends and receives.

    Torch's 1F1B is left out: no send matches the last rank's micro-batches, which it counts from 1.
    """
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    n, m = SMALL.values()

    def torchs() -> Any:
        table = enumerate(visualizer.get_schedule_ops("GPipe", n, m))
        computes = {rank: [a for a in row if a and a.computation_type.name != "REDUCE_GRAD"] for rank, row in table}
        sends = schedules._add_send_recv(computes, int, n)
        return schedules._simulate_comms_compute(sends, int, n)

    def ours() -> Any:
        return simulate("gpipe", n, m=m, steps=1)

    beside(benchmark, ours, torchs)


def beside(benchmark: Any, ours: Callable[[], Any], torchs: Callable[[], Any]) -> None:
    """Time our function in rounds, and torch's three times, in the same process."""
    benchmark.pedantic(ours, rounds=7, warmup_rounds=1)
    per_second(benchmark, 2 * SMALL["n"] * SMALL["m"])
    seconds = median(repeat(torchs, number=1, repeat=3))
    benchmark.extra_info["torch_per_second"] = round(2 * SMALL["n"] * SMALL["m"] / seconds)
    benchmark.extra_info["times_faster"] = round(seconds / benchmark.stats.stats.median)


def per_second(benchmark: Any, count: int) -> None:
    """Note beside the times how many of `count` things that is per second, at the median."""
    benchmark.extra_info["per_second"] = round(count / benchmark.stats.stats.median)

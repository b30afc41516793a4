"""Evaluations of requests: `evaluations` has how many one core makes in a second."""

from collections.abc import Iterator
from functools import partial
from itertools import count, cycle
from typing import Any

import numpy as np
import pytest

from cdpsim import Cluster, evaluate, presets
from cdpsim.model import Model
from cdpsim.numeric.paths import expect_many_runs
from cdpsim.runs.assembling import KNOWN_PROGRAMS
from cdpsim.runs.micro_batches import KNOWN_GROWTHS

NODES = "a100-nodes"


def even_stages(n: int) -> dict[str, Any]:
    stage = {"repeat": n, "forward": 0.01, "backward": 0.02, "weight_backward": 0.01}
    return {"name": "even", "stages": [stage | {"activation": 10**9, "boundary": 10**7, "parameters": 10**8}]}


def uneven_stages(n: int) -> dict[str, Any]:
    stages = even_stages(1)["stages"] * n
    times = ({"forward": 0.01 + k % 13 * 0.001, "backward": 0.02 + k % 13 * 0.002} for k in range(0, 7 * n, 7))
    return {
        "name": "uneven",
        "stages": [stage | {"repeat": 1} | each for stage, each in zip(stages, times, strict=True)],
    }


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    with expect_many_runs():
        yield


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize(("devices", "m"), [(8, 16), (8, 64), (64, 256)])
@pytest.mark.parametrize("known", [True, False], ids=["another of 16 networks", "another program"])
def test_evaluations(benchmark: Any, devices: int, m: int, known: bool, replicas: int) -> None:
    """Of `1f1b` with real costs, on one cluster after another: its program is kept, and routes are found anew."""
    content = presets.find_cluster(NODES).to_builtins()
    assert isinstance(content, dict)
    clusters = []
    for k in range(16):
        network = {"latency": "7 us", "bandwidth": 1.25e10 + k * 1e9}
        made = content | {"topology": content["topology"] | {"network": network}}
        clusters.append(Cluster.from_builtins(made, NODES))
    model = "llama3-8b" if devices <= 34 else Model.from_builtins(even_stages(devices), "even")
    asked = cycle(clusters)

    def one() -> None:
        if not known:
            KNOWN_PROGRAMS.forget()
        evaluate("1f1b", devices, m=m, replicas=replicas, model=model, cluster=next(asked), steps=12)

    benchmark(one)
    benchmark.extra_info["evaluations"] = f"{1 / benchmark.stats.stats.min:,.0f}/s"


@pytest.mark.parametrize("known", [True, False], ids=["programs kept", "programs anew"])
@pytest.mark.parametrize("m", [1024, 65536])
def test_micro_batches(benchmark: Any, m: int, known: bool) -> None:
    """Many micro-batches take the time of few, and so do many replicas."""

    def one() -> None:
        if not known:
            KNOWN_PROGRAMS.forget()
            KNOWN_GROWTHS.forget()
        evaluate("1f1b", 8, m=m, replicas=4, model="llama3-8b", cluster=NODES)

    benchmark(one)
    benchmark.extra_info["evaluations"] = f"{1 / benchmark.stats.stats.min:,.0f}/s"


@pytest.mark.parametrize("replicas", [1, 4])
def test_any_micro_batches(benchmark: Any, replicas: int) -> None:
    """Other numbers of micro-batches and steps than before, from 900 to a million, of which none comes again."""
    asked = cycle(range(900, 10**6, 1013))
    benchmark(lambda: evaluate("1f1b", 8, m=next(asked), replicas=replicas, model="llama3-8b", cluster=NODES))
    benchmark.extra_info["evaluations"] = f"{1 / benchmark.stats.stats.median:,.0f}/s"


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("m", [32, 48])
def test_too_few_to_fold(benchmark: Any, m: int, replicas: int) -> None:
    """Micro-batches all of which are run, as looking for what fewer show takes longer."""
    benchmark(lambda: evaluate("1f1b", 8, m=m, replicas=replicas, model="llama3-8b", cluster=NODES, steps=12))
    benchmark.extra_info["evaluations"] = f"{1 / benchmark.stats.stats.min:,.0f}/s"


@pytest.mark.parametrize("replicas", [[1], [1, 2, 4]], ids=["one replica", "1, 2 or 4"])
@pytest.mark.parametrize(("least", "most"), [(16, 64), (64, 900), (450, 5000)])
def test_drawn_requests(benchmark: Any, least: int, most: int, replicas: list[int]) -> None:
    """150 drawn requests of one model on one cluster, of which nothing is known when they begin."""
    random = np.random.default_rng(1)
    drawn = [
        {"m": int(random.integers(least, most)), "replicas": int(random.choice(replicas)), "steps": int(steps)}
        for steps in random.choice([2, 12, 50], 150)
    ]

    def all_of_them() -> None:
        KNOWN_PROGRAMS.forget()
        KNOWN_GROWTHS.forget()
        for asked in drawn:
            evaluate("1f1b", 8, model="llama3-8b", cluster=NODES, **asked)

    benchmark.pedantic(all_of_them, rounds=3)
    benchmark.extra_info["evaluations"] = f"{150 / benchmark.stats.stats.min:,.0f}/s"


@pytest.mark.parametrize("devices", [8, 64])
def test_micro_batches_at_other_costs(benchmark: Any, devices: int) -> None:
    """As if costs were others each time: programs are kept, and one run is made."""
    model = "llama3-8b" if devices == 8 else Model.from_builtins(uneven_stages(devices), "uneven")

    def one() -> None:
        KNOWN_GROWTHS.forget()
        evaluate("1f1b", devices, m=1024, model=model, cluster=NODES)

    benchmark(one)
    benchmark.extra_info["evaluations"] = f"{1 / benchmark.stats.stats.min:,.0f}/s"


def bring(number: int) -> Cluster:
    """The cluster with another bandwidth between nodes."""
    table = presets.find_cluster(NODES).to_builtins()
    assert isinstance(table, dict)
    network = {"latency": "7 us", "bandwidth": 1e10 + 1e6 * number}
    return Cluster.from_builtins(table | {"topology": table["topology"] | {"network": network}}, NODES)


CLUSTERS = map(bring, count())  # none comes twice


def measure_anew(benchmark: Any, **asked: Any) -> None:
    """Measure evaluations on a cluster that is new each time: programs are kept."""
    one = partial(evaluate, **asked, steps=12)
    benchmark.pedantic(one, setup=lambda: ((), {"cluster": next(CLUSTERS)}), rounds=200, warmup_rounds=3)
    benchmark.extra_info["evaluations"] = f"{1 / benchmark.stats.stats.median:,.0f}/s"


@pytest.mark.parametrize(
    ("model", "n", "m", "replicas"),
    [("llama3-8b", 8, m, 1) for m in (16, 48, 176, 2000)]
    + [("llama3-8b", 4, 16, 2), ("llama3-8b", 4, 2000, 2), ("llama3-8b", 8, 16, 4), ("llama3-8b", 8, 2000, 8)]
    + [("even", 64, 256, 1), ("even", 64, 2000, 1), ("uneven", 64, 176, 1), ("uneven", 64, 410, 1)],
)
def test_a_cluster_that_is_new_each_time(benchmark: Any, model: str, n: int, m: int, replicas: int) -> None:
    stages = {"even": even_stages, "uneven": uneven_stages}
    made = Model.from_builtins(stages[model](n), model) if model in stages else model
    measure_anew(benchmark, schedule="1f1b", n=n, m=m, model=made, replicas=replicas)


@pytest.mark.parametrize(
    ("schedule", "n", "m"),
    [
        ("zb-h1", 8, 170),
        ("zb-h1", 8, 2000),
        ("gpipe", 8, 170),
        ("gpipe", 8, 2000),
        ("interleaved-1f1b", 16, 160),
        ("interleaved-1f1b", 16, 1600),
        ("1f1b", 7, 1001),
    ],
)
def test_other_schedules_on_a_new_cluster(benchmark: Any, schedule: str, n: int, m: int) -> None:
    more = {"chunks": 2} if schedule == "interleaved-1f1b" else {}
    measure_anew(benchmark, schedule=schedule, n=n, m=m, model="llama3-8b", **more)

"""Time of a request, its program, its costs and its run; and of one program under many costs."""

from time import process_time
from typing import Any

import numpy as np
import pytest

from cdpsim import Request, assemble, presets, price, run, sweep
from cdpsim.numeric import paths

MANY = 20_000
SMALL: dict[str, dict[str, Any]] = {"1f1b": {"m": 4}, "multi-cdp": {}}
pytestmark = pytest.mark.benchmark(timer=process_time)


def request(**words: Any) -> Request:
    """Ask for 8 stages and 16 micro-batches, in slots or in seconds."""
    return Request("1f1b", 8, m=16, **words)


@pytest.mark.parametrize("words", [{}, {"model": "gpt2", "cluster": "a100-nodes"}], ids=["slots", "gpt2"])
def test_from_a_request_to_its_run(words: dict[str, Any], benchmark: Any) -> None:
    """Read, assemble, price and run a request, warm; the least time counts."""
    assert paths.compiled_loops() is not None

    def from_the_request() -> None:
        wanted = request(**words)
        program = assemble(wanted)
        run(program, price(program, wanted.model, wanted.cluster))

    benchmark.pedantic(from_the_request, rounds=200, warmup_rounds=5)


def test_priced_and_run_again(benchmark: Any) -> None:
    """Price and run one program on one cluster after another."""
    assert paths.compiled_loops() is not None
    wanted = request(model="gpt2", cluster="a100-nodes")
    program, others = assemble(wanted), [presets.cluster(name) for name in ("h100-nodes", "h200-node")]

    def again() -> None:
        for cluster in others:
            run(program, price(program, wanted.model, cluster))

    benchmark.pedantic(again, rounds=200, warmup_rounds=5)
    benchmark.extra_info["runs per second"] = len(others) / benchmark.stats.stats.min


@pytest.mark.parametrize("name", SMALL)
def test_swept(name: str, benchmark: Any) -> None:
    """Sweep one program of four stages and one step under many costs."""
    wanted = Request(name, 4, model="gpt2", cluster="a100-nodes", steps=1, **SMALL[name])
    program = assemble(wanted)
    each = [price(program, wanted.model, cluster) for cluster in ("a100-nodes", "h100-nodes")] * (MANY // 2)
    assert len(np.unique(sweep(program, each[:4]), axis=0)) == 2
    benchmark.pedantic(sweep, (program, each), rounds=5, warmup_rounds=1)
    benchmark.extra_info["configurations per second"] = MANY / benchmark.stats.stats.min

"""Time of models of layers on tensor groups: a published run of 530 billion parameters, and what a mesh adds."""

from time import process_time
from typing import Any

import pytest

from cdpsim import simulate

LARGE: dict[str, Any] = {"chunks": 3, "m": 280, "replicas": 9, "tensor": 8, "sequence": True}
SMALL: dict[str, Any] = {"m": 16, "recompute": "selective"}
SHAPE: dict[str, Any] = {"cluster": "selene", "ignore_memory": True, "steps": 1}


@pytest.mark.benchmark(timer=process_time)
def test_many_ranks(benchmark: Any) -> None:
    """2,520 ranks: 105 layers on 35 places, 280 micro-batches, groups of 8, 9 replicas; its program is new."""
    asked = SHAPE | LARGE | {"model": "megatron-530b", "recompute": "selective"}
    run = benchmark.pedantic(lambda: simulate("interleaved-1f1b", 105, **asked), rounds=1)
    assert run.peak_memory


@pytest.mark.benchmark(timer=process_time)
@pytest.mark.parametrize("mesh", [{}, {"tensor": 8, "sequence": True}], ids=["single", "group"])
def test_small(mesh: dict[str, Any], benchmark: Any) -> None:
    """8 stages and 16 micro-batches of 175 billion parameters, warm: a group takes at most 1.1 of the time without."""
    asked = SHAPE | SMALL | {"model": "gpt3-175b"} | mesh
    benchmark.pedantic(lambda: simulate("1f1b", 8, **asked).peak_memory, rounds=50, warmup_rounds=3)

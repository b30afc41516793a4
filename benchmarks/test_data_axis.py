"""Time of data ranks that split their states: a step of a large model, simulated for each rank or for one of them."""

from typing import Any

import pytest

from cdpsim import Request, assemble, simulate

LAYER = {"forward": "10 ms", "backward": "20 ms", "parameters": "400 MB", "repeat": 80}
OPTIONS: dict[str, Any] = {"model": {"name": "even", "precision": "bf16", "stages": [LAYER]}, "cluster": "h100-nodes"}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_step_of_ranks(zero: int, benchmark: Any) -> None:
    """80 layers, 64 ranks, 8 micro-batches each, one step."""
    ranks = {"replicas": 64} if zero == 0 else {"shard": 64}
    options = OPTIONS | ranks
    benchmark.pedantic(lambda: simulate("dp", zero=zero, m=8, steps=1, ignore_memory=True, **options), rounds=3)


def test_assembly_of_ranks(benchmark: Any) -> None:
    """The program of stage 3 alone."""
    request = Request("dp", zero=3, shard=64, m=8, steps=1, ignore_memory=True, **OPTIONS)
    benchmark.pedantic(assemble, (request,), rounds=3)

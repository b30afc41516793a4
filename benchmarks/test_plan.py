"""The plan of a large model on many devices; it fails where it takes too long, simulates too much, or is not proved."""

from typing import Any

import pytest

from cdpsim import Plan, plan

MOST_SIMULATED, PIPELINES = 0.2, {"devices": 64, "batch": 1024, "memory": "80 GB", "tensor": 1}


@pytest.mark.parametrize(
    ("model", "cluster", "question", "least_candidates", "most"),
    [
        ("llama3-8b", "a100-nodes", PIPELINES, 3500, 30),
        ("llama3-70b", "h100-nodes", {"devices": 64, "batch": 64}, 10_000, 60),
    ],
)
def test_the_plan_of_llama_on_64_devices(
    benchmark: Any, model: str, cluster: str, question: dict[str, Any], least_candidates: int, most: float
) -> None:
    """With its imports done: of one rank for each task, and over tensor groups."""
    plan("gpt2", "a100-nodes", devices=2, batch=16, tensor=1)
    found: Plan = benchmark.pedantic(plan, (model, cluster), question, rounds=1)
    searched = found.searched
    assert found.proved
    assert searched["candidates"] >= least_candidates
    assert searched["simulated"] <= MOST_SIMULATED * searched["candidates"]
    assert benchmark.stats.stats.min < most

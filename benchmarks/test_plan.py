"""The plan of a large model on many devices; it fails where it takes too long, simulates too much, or is not proved."""

from typing import Any

from cdpsim import Plan, plan

MOST, MOST_SIMULATED, LEAST_CANDIDATES = 30, 0.2, 3500


def test_the_plan_of_llama_on_64_devices(benchmark: Any) -> None:
    """As `cdpsim plan` has it in its help, with its imports done."""
    plan("gpt2", "a100-nodes", devices=2, batch=16)
    question: dict[str, Any] = {"devices": 64, "batch": 1024, "memory": "80 GB"}
    found: Plan = benchmark.pedantic(plan, ("llama3-8b", "a100-nodes"), question, rounds=1)
    searched = found.searched
    assert found.proved
    assert searched["candidates"] >= LEAST_CANDIDATES
    assert searched["simulated"] <= MOST_SIMULATED * searched["candidates"]
    assert benchmark.stats.stats.min < MOST

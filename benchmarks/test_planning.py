"""Bounds of candidates by probes without data ranks; they fail above 80 ms of processor time a probe."""

from time import process_time
from typing import Any

from cdpsim.studies.plan.bounds import Bounds, case_of

MOST_SECONDS = 0.08  # for a probe, and the bounds of its twelve candidates
NAMES = ("1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved-1f1b", "chimera")


def test_bounds_of_candidates(benchmark: Any) -> None:
    """Six schedules of llama3-8b on eight devices, with four numbers of micro-batches, on twelve data axes each."""
    ranks: list[dict[str, int]] = [{"replicas": r} for r in (2, 4, 8)]
    ranks += [{"shard": s, "zero": zero} for s in (2, 4, 8) for zero in (1, 2, 3)]
    real: dict[str, Any] = {"model": "llama3-8b", "cluster": "a100-nodes"}
    asked = [
        {"schedule": name, "n": 16 if name == "interleaved-1f1b" else 8, "m": m} | real
        for name in NAMES
        for m in (16, 32, 64, 128)
    ]
    cases = [case_of(each) for each in asked]

    def bound_all() -> float:
        begun, bounds = process_time(), Bounds(cases)
        found = [bounds.of(case, options | each) for case, options in enumerate(asked) for each in ranks]
        assert all(each.step > 0 and each.memory > 0 for each in found)
        return (process_time() - begun) / len(cases)

    assert benchmark.pedantic(bound_all, rounds=2) < MOST_SECONDS

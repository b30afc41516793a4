"""Bounds of candidates, by probes of few ranks and of their own; they fail above 40 ms of processor time a probe."""

from time import process_time
from typing import Any

from cdpsim import SCHEDULES, Request
from cdpsim.request.sharing import accepts
from cdpsim.studies.plan.bounds import Bounds
from cdpsim.studies.plan.space import Candidate

MOST_SECONDS = 0.04  # for a probe and its bounds
NAMES = ("1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved-1f1b", "chimera")


def test_bounds_of_candidates(benchmark: Any) -> None:
    """Six schedules of llama3-8b on eight devices, on all numbers of data ranks, with and without shares."""
    real: dict[str, Any] = {"model": "llama3-8b", "cluster": "a100-nodes"}
    cases, candidates = [], []
    for number, name in enumerate(NAMES):
        own = {"schedule": name, "n": 8} | ({"chunks": 1} if accepts(SCHEDULES[name], "chunks") else {})
        cases.append(Request(**own, m=8, **real, ignore_memory=True))
        ranks = [{"replicas": r} for r in (2, 4, 8)]
        ranks += [{"shard": s, "zero": zero} for s in (2, 4, 8) for zero in (1, 2, 3)]
        candidates += [Candidate(own | real | each | {"m": m}, 8, number) for m in (16, 32, 64, 128) for each in ranks]

    def bound_all() -> float:
        begun, bounds = process_time(), Bounds(cases)
        first = [bounds.of_few_ranks(each) for each in candidates]
        own = [found for each in candidates[::4] if (found := bounds.of_own_ranks(each))]
        assert all(each.step > 0 and each.memory > 0 for each in (*first, *own))
        return (process_time() - begun) / (len(own) + len(cases))

    assert benchmark.pedantic(bound_all, rounds=2) < MOST_SECONDS

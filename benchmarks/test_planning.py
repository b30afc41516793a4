"""Bounds of candidates in columns, once the cases' loads are there; they fail below 100,000 candidates a second."""

from typing import Any

import numpy as np

from cdpsim import SCHEDULES, Request
from cdpsim.request.taken import accepts
from cdpsim.studies.plan.bounds import Sizes, bound_candidates, loads_of

LEAST = 100_000  # candidates a second
NAMES = ("1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved-1f1b", "chimera")
MANY = 200_000


def test_bounds_of_candidates(benchmark: Any) -> None:
    """Six schedules of llama3-8b on eight devices, on all numbers of data ranks, with and without shares."""
    loads = []
    for name in NAMES:
        chunks = {"chunks": 1} if accepts(SCHEDULES[name], "chunks") else {}
        request = Request(name, 8, m=8, model="llama3-8b", cluster="a100-nodes", ignore_memory=True, **chunks)
        loads.append(loads_of(request))
    ranks = [(r, 1, 0) for r in (1, 2, 4, 8)] + [(1, s, zero) for s in (2, 4, 8) for zero in (1, 2, 3)]
    rows = [(case, m, *each) for case in range(len(loads)) for m in (16, 32, 64, 128) for each in ranks]
    sizes = Sizes(*np.tile(np.array(rows).T, MANY // len(rows)))
    bounds = benchmark.pedantic(bound_candidates, (loads, sizes), rounds=5, warmup_rounds=1)
    assert (bounds.step > 0).all()
    assert len(sizes.case) / benchmark.stats.stats.min > LEAST

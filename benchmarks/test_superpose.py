"""Fig. 4's extrapolation to any number of workers up to a million; it fails where that takes a second."""

from typing import Any

import pytest

from cdpsim import Model, Stage
from cdpsim.files.units import Work
from cdpsim.studies.superpose import superpose

# Deeper than any shipped model, with times that have no common unit.
DEEP = Model(
    stages=tuple(
        Stage(forward=Work(10**9 + 7 * k), backward=Work(2 * 10**9 + k), activation=10**6 + k) for k in range(1000)
    )
)


@pytest.mark.parametrize("axis", ["flops", "roofline:a100"])
@pytest.mark.parametrize("n", [32, 10**6])
@pytest.mark.parametrize("model", ["resnet50", "vit-b16", DEEP], ids=["resnet50", "vit-b16", "1000 stages"])
def test_any_number_of_workers(model: str | Model, n: int, axis: str, benchmark: Any) -> None:
    """Find the peaks of DP and CDP, and the reduction, from a name."""
    found = benchmark.pedantic(superpose, (model, n), {"axis": axis}, rounds=5, warmup_rounds=1)
    assert found.cdp <= found.dp
    assert benchmark.stats.stats.max < 1

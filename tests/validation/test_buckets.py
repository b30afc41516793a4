"""Buckets are those of torch's own reducer."""

import random

import pytest

from cdpsim.schedules.buckets import assign_buckets

torch = pytest.importorskip("torch")


def test_buckets_are_those_of_torch() -> None:
    """500 lists of tensors of up to 40 bytes, a byte a number, with one to three limits."""
    from torch.distributed import _compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    draw = random.Random(0)
    for _ in range(500):
        sizes = [draw.randint(1, 40) for _ in range(draw.randint(1, 30))]
        limits = [draw.randint(1, 120) for _ in range(draw.randint(1, 3))]
        tensors = [torch.empty(size, dtype=torch.int8) for size in sizes]
        expected, used = _compute_bucket_assignment_by_size(tensors, limits)
        assert assign_buckets(sizes, limits) == expected
        assert used == [limits[min(k, len(limits) - 1)] for k in range(len(expected))]

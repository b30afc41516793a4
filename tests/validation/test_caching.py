"""CUDA's caching allocator, on sequences whose blocks and segments follow by hand from torch's rules."""

import pytest

torch = pytest.importorskip("torch")

from validation.profile.caching import MIB, CachingAllocator
from validation.profile.tracker import Tracker


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([512, 513], 512 + 1024, 2 * MIB),
        ([MIB - 511, MIB], 2 * MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([1, 2 * MIB], 512 + 2 * MIB, 22 * MIB),  # small and large ones share no segment
        ([10 * MIB - 512, 10 * MIB - 512], 20 * MIB, 20 * MIB),  # with the 1,024 B behind the second
        ([8 * MIB, 11 * MIB], 20 * MIB, 20 * MIB),  # a rest of 1 MiB is no block
        ([8 * MIB, 11 * MIB - 512], 19 * MIB - 512, 20 * MIB),  # one of 512 B more is
        ([10 * MIB, 10 * MIB], 20 * MIB, 20 * MIB),  # two segments
        ([11 * MIB], 12 * MIB, 12 * MIB),
        ([10 * MIB + 1], 10 * MIB + 512, 12 * MIB),
    ],
)
def test_blocks_and_segments(sizes: list[int], allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    for nbytes in sizes:
        allocator.allocate(nbytes)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_the_smallest_free_block_that_is_large_enough_is_given() -> None:
    """Of 40, 30 and 30 MiB, 25 MiB go into the first of 30; then 35 MiB into that of 40, and 30 into the last."""
    allocator = CachingAllocator()
    large, first, last = (allocator.allocate(size * MIB) for size in (40, 30, 30))
    for block in (last, large, first):
        allocator.free(block)
    assert allocator.allocate(25 * MIB).address == first.address
    assert allocator.allocate(35 * MIB).address == large.address
    assert allocator.allocate(30 * MIB).address == last.address
    assert (allocator.allocated, allocator.reserved) == (90 * MIB, 100 * MIB)


def test_free_neighbours_become_one_block() -> None:
    """In any order: three of 6 MiB, and 2 MiB behind them, are a segment of 20 MiB, which then holds 20 MiB."""
    for order in ((0, 1, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0)):
        allocator = CachingAllocator()
        blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
        for k in order:
            allocator.free(blocks[k])
        assert allocator.allocate(20 * MIB).address == blocks[0].address
        assert (allocator.allocated, allocator.most_allocated, allocator.reserved) == (20 * MIB, 20 * MIB, 20 * MIB)


def test_segments_do_not_become_one() -> None:
    """Two free ones of 16 MiB have no room for 32 MiB; what is between given blocks has none for more than itself."""
    allocator = CachingAllocator()
    for block in [allocator.allocate(16 * MIB) for _ in range(2)]:
        allocator.free(block)
    allocator.allocate(32 * MIB)
    assert allocator.reserved == 64 * MIB
    split = CachingAllocator()
    first, _, last = (split.allocate(6 * MIB) for _ in range(3))
    split.free(first)
    split.free(last)
    split.allocate(9 * MIB)
    assert split.reserved == 40 * MIB


def test_a_tracker_gives_blocks_to_storages() -> None:
    """One to each storage while it lives, whatever its views; one that is ignored has none."""
    allocator = CachingAllocator()
    tracker = Tracker(allocator=allocator)
    with tracker:
        a = torch.zeros(1000)
        b = a.view(10, 100) + 1
    assert allocator.allocated == 2 * 4096
    del a
    assert allocator.allocated == 4096
    tracker.ignore([b])
    assert (allocator.allocated, allocator.reserved) == (0, 2 * MIB)

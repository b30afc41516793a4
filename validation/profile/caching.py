"""CUDA's caching allocator in torch, with its default settings: what it takes of a GPU for blocks of a program.

It takes segments of the GPU, keeps them, and gives blocks of them. A size is rounded up to 512 B. Blocks of up to 1 MiB
are in small segments, of 2 MiB; larger ones in segments of 20 MiB, or from 10 MiB on in one of their own, of whole
2 MiB. A block is the front of the smallest free one that is large enough, and of equal ones of the first. What is left
behind it is free if it has 512 B at least in a small segment, more than 1 MiB in a large one. Free neighbours become
one.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

UNIT, MIB = 512, 2**20
SMALL, SMALL_SEGMENT = MIB, 2 * MIB  # up to that size, in segments of that
OWN, LARGE_SEGMENT, WHOLE = 10 * MIB, 20 * MIB, 2 * MIB  # from that on in segments of their own


class CachedBlock(NamedTuple):
    """Bytes of a segment, given or free."""

    size: int
    address: int
    is_small: bool


class CachingAllocator:
    """The blocks of one stream, and the segments that were taken for them; another stream has segments of its own.

    Nothing goes back to the GPU: torch gives free segments back where it finds no memory, or is told to.
    """

    def __init__(self) -> None:
        self.reserved = 0  # bytes of segments
        self.allocated = self.most_allocated = 0  # bytes of given blocks
        self._free = list[CachedBlock](), list[CachedBlock]()  # in large and in small segments, the smallest first
        self._at: dict[int, CachedBlock] = {}  # free blocks, by their addresses
        self._before: dict[int, CachedBlock] = {}  # free blocks, by their ends
        self._top = 0

    def allocate(self, nbytes: int) -> CachedBlock:
        """Give a block of at least so many bytes."""
        size = UNIT * max(1, -(-nbytes // UNIT))
        is_small = size <= SMALL
        free = self._free[is_small]
        k = bisect_left(free, CachedBlock(size, 0, False))
        found = free[k] if k < len(free) else self._take(size, is_small)
        self._remove(found)
        rest = found.size - size
        if rest >= UNIT if is_small else rest > SMALL:
            self._insert(CachedBlock(rest, found.address + size, is_small))
            found = found._replace(size=size)
        self.allocated += found.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return found

    def free(self, block: CachedBlock) -> None:
        """Take a block back."""
        size, address, is_small = block
        self.allocated -= size
        for neighbour in (self._before.get(address), self._at.get(address + size)):
            if neighbour is not None:
                self._remove(neighbour)
                address, size = min(address, neighbour.address), size + neighbour.size
        self._insert(CachedBlock(size, address, is_small))

    def _take(self, size: int, is_small: bool) -> CachedBlock:
        """Return a new segment; no two of them touch each other."""
        large = LARGE_SEGMENT if size < OWN else WHOLE * -(-size // WHOLE)
        segment = CachedBlock(SMALL_SEGMENT if is_small else large, self._top, is_small)
        self.reserved += segment.size
        self._top += segment.size + UNIT
        self._insert(segment)
        return segment

    def _insert(self, block: CachedBlock) -> None:
        insort(self._free[block.is_small], block)
        self._at[block.address] = self._before[block.address + block.size] = block

    def _remove(self, block: CachedBlock) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, block)], self._at[block.address], self._before[block.address + block.size]

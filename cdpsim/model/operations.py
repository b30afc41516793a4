"""Operations: work as rows, each of a kind that a device does at its own pace, and exchanges within a group of ranks.

A row's FLOP are counted as the literature counts them, with the core of attention whole; a causal core computes half of
them. An exchange may run beside one product, and what that does not hide takes the time of its task.
"""

from collections.abc import Iterable
from typing import NamedTuple, Self

from cdpsim.files.units import Work

PRODUCT, PASS, CORE = "product", "pass", "core"
TENSOR = "tensor"  # the axis of ranks that share products
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"


class Kernel(NamedTuple):
    """One operation of a rank: a product, a pass over memory, or a fused core of attention."""

    kind: str
    flop: float = 0.0
    moved: float = 0.0  # bytes that it reads and writes
    done: float = 1.0  # the share of its FLOP that is computed


class Exchange(NamedTuple):
    """A collective of the ranks of an axis; `size` are the bytes of the whole tensor over the axis."""

    axis: str
    op: str
    size: int
    beside: Kernel | None = None  # the product that may hide it


class Operations(Work):
    """Work that has rows: its value is their FLOP. Equal rows are one, with the number of times that each is done."""

    rows: tuple[tuple[Kernel, float], ...]
    exchanges: tuple[tuple[Exchange, float], ...]

    def __new__(cls, counted: Iterable[tuple[Kernel | Exchange, float]]) -> Self:
        """Add up equal rows, and equal exchanges."""
        counts: dict[Kernel | Exchange, float] = {}
        for each, times in counted:
            counts[each] = counts.get(each, 0) + times
        rows = [(row, times) for row, times in counts.items() if isinstance(row, Kernel)]
        made = super().__new__(cls, sum(row.flop * times for row, times in rows))
        made.rows = tuple(rows)
        made.exchanges = tuple((each, times) for each, times in counts.items() if isinstance(each, Exchange))
        return made

    @property
    def counted(self) -> tuple[tuple[Kernel | Exchange, float], ...]:
        """All rows and exchanges, with the number of times that each is done."""
        return (*self.rows, *self.exchanges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operations) and (self.rows, self.exchanges) == (other.rows, other.exchanges)

    def __hash__(self) -> int:
        return hash((self.rows, self.exchanges))

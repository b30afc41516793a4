"""When: the position of each task in the order in which devices work, and when a micro-batch may first start.

Positions order tasks; they are not times. Under unit costs they coincide with the paper's slots, because start
times, which come out of dependencies, device order and costs, then fall there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from cdpsim.columns import Ints

Position = Callable[[Ints, Ints, Ints, int, int], Ints]  # step, micro-batch, phase, stages, micro-batches


@dataclass(frozen=True)
class Order:
    """How micro-batches follow each other.

    `flush`: a training step ends for all micro-batches before the next begins, so that every task reads the newest
    parameters, all replicas update at once and what they exchange is a collective. Without it steps overlap and
    what is exchanged goes point to point.
    """

    name: str
    flush: bool
    position: Position
    release: Callable[[int, int], Fraction]  # micro-batch, micro-batches -> share of its own pass


def _simultaneous(t: Ints, i: Ints, phase: Ints, n: int, m: int) -> Ints:
    return 2 * n * t + phase + 0 * i


def _cyclic(t: Ints, i: Ints, phase: Ints, n: int, m: int) -> Ints:
    return 2 * n * t + 2 * i + phase


SIMULTANEOUS = Order("simultaneous", True, _simultaneous, lambda i, m: Fraction(0))
CYCLIC = Order("cyclic", False, _cyclic, lambda i, m: Fraction(i, m))

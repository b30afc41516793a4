"""When: the position of each task in the order in which devices work, and when a micro-batch may first start.

Positions order tasks; they are not times. Under unit costs they coincide with the paper's slots, because start
times, which come out of dependencies, device order and costs, then fall there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from cdpsim.columns import Ints
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.shape import Shape

Listing = Callable[[int, int, int], Actions]  # devices, micro-batches, chunks
Position = Callable[[Ints, Ints, Ints, Shape], Ints]  # step, micro-batch, phase


def _at_once(i: int, shape: Shape) -> Fraction:
    return Fraction(0)


@dataclass(frozen=True)
class Order:
    """How micro-batches follow each other.

    `together`: a training step ends for all micro-batches before the next begins, so that all that hold a stage come to
    its update at one moment and what they exchange is a collective. Else steps overlap, devices take turns, and what is
    exchanged goes point to point.

    An order is a position for each task, or, with `actions`, what each device does in a step, written out.
    """

    name: str
    together: bool
    position: Position | None
    release: Callable[[int, Shape], Fraction] = _at_once  # of micro-batch i: a share of its own pass
    actions: Listing | None = None
    any_m: bool = False  # whether a step may have another number of micro-batches than the model has stages
    chunks: int = 1  # stages per device, where nothing else is asked for
    any_chunks: bool = False  # whether something else may be


def listed(name: str, actions: Listing, *, chunks: int = 1, any_chunks: bool = False) -> Order:
    """An order by what each of so many devices does in a step of m micro-batches; then the step ends for all."""
    return Order(name, True, None, actions=actions, any_m=True, chunks=chunks, any_chunks=any_chunks)


def _simultaneous(t: Ints, i: Ints, phase: Ints, shape: Shape) -> Ints:
    return 2 * shape.n * t + phase + 0 * i


def _cyclic(t: Ints, i: Ints, phase: Ints, shape: Shape) -> Ints:
    return 2 * shape.n * t + 2 * shape.n * i // shape.m + phase


def _streamed(t: Ints, i: Ints, phase: Ints, shape: Shape) -> Ints:
    return 2 * (shape.m * t + i) + phase


def _evenly(i: int, shape: Shape) -> Fraction:
    return Fraction(i, shape.m)


def _stage_by_stage(i: int, shape: Shape) -> Fraction:
    return Fraction(i, shape.n)


SIMULTANEOUS = Order("simultaneous", True, _simultaneous)
CYCLIC = Order("cyclic", False, _cyclic, _evenly)
STREAMED = Order("streamed", False, _streamed, _stage_by_stage, any_m=True)

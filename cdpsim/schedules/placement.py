"""Where: the device, and the lane on it, of stage j of micro-batch i in step t."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np

from cdpsim.numeric.columns import Ints
from cdpsim.schedules.shape import Shape, Widths

DeviceOf = Callable[[Ints, Ints, Ints, Shape], Ints]  # i, j, t


def pyramid_widths(m: int, passes: list[Fraction]) -> Widths:
    """Devices per stage when a device keeps a micro-batch from its forward to its backward there.

    `passes` is each stage's forward and backward time together. Stage j is occupied by a micro-batch while that
    passes stages j and beyond, and m micro-batches must fit into one pass (spec section 5).

    >>> pyramid_widths(3, [Fraction(2)] * 3)
    (3, 2, 1)
    >>> pyramid_widths(2, [Fraction(5 + 3), Fraction(5 + 6)])
    (2, 2)
    """
    total = sum(passes)
    beyond = total
    widths = []
    for stage in passes:
        widths.append(ceil(m * beyond / total))
        beyond -= stage
    return tuple(widths)


@dataclass(frozen=True)
class Placement:
    """Where each task of a replica runs.

    `replicas`: several devices hold the same stage. `lanes`: micro-batches stand side by side on a device that can do
    several things at once. `exclusive`: a device finishes the backward of one micro-batch before it begins the
    forward of another.
    """

    name: str
    device: DeviceOf
    devices: Callable[[Shape], int]  # of one replica
    replicas: bool = True
    lanes: bool = False
    exclusive: bool = False


def _pyramid(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    first = np.concatenate([[0], np.cumsum(shape.widths)[:-1]])
    device: Ints = first[j] + (t * shape.m + i) % np.asarray(shape.widths)[j]
    return device


def _single(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    return 0 * (i + j + t)


def _by_micro_batch(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    return i + 0 * (j + t)


def _by_both(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    return i * shape.n + j + 0 * t


def _by_stage(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    return j + 0 * (i + t)


def _not_here(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    raise AssertionError("whose list a task is in says where it runs")


def _one(shape: Shape) -> int:
    return 1


def _each_micro_batch(shape: Shape) -> int:
    return shape.m


def _each_micro_batch_and_stage(shape: Shape) -> int:
    return shape.n * shape.m


def _all_widths(shape: Shape) -> int:
    return sum(shape.widths)


def _each_stage(shape: Shape) -> int:
    return shape.n


def _each_group_of_chunks(shape: Shape) -> int:
    return shape.n // shape.chunks


SINGLE = Placement("single", _single, _one, replicas=False, lanes=True)
BY_MICRO_BATCH = Placement("by micro-batch", _by_micro_batch, _each_micro_batch)
BY_MICRO_BATCH_AND_STAGE = Placement("by micro-batch and stage", _by_both, _each_micro_batch_and_stage)
PYRAMID = Placement("pyramid", _pyramid, _all_widths, exclusive=True)
BY_STAGE = Placement("by stage", _by_stage, _each_stage, replicas=False)
LISTED = Placement("as listed", _not_here, _each_group_of_chunks, replicas=False)

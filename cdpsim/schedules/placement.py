"""Placements: the device of stage j of micro-batch i in step t.

A `Shape` has the numbers of stages, micro-batches and devices, of which orders, placements and rules are functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

import numpy as np

from cdpsim.errors import RequestError, short_repr, whole_number
from cdpsim.numeric.columns import Ints

Widths = tuple[int, ...]  # devices per stage


@dataclass(frozen=True)
class Shape:
    """Stages and micro-batches of one replica; all replicas do the same."""

    n: int  # stages
    m: int  # micro-batches of a training step
    chunks: int = 1  # stages per device, in pipelines
    replicas: int = 1  # of the whole schedule, one for each data rank
    widths: Widths = ()  # for placements that need them, and for lists that take others than one
    workers: int = 0  # of cyclic orders, where worker i takes micro-batches i, i + workers, ...; 0: one for each
    shard: int = 1  # consecutive replicas in a sharding group
    copies: int = 1  # ranks of a device, where it stands for several that have the same weights
    expert_copies: int = 1  # of these, those that have the same experts
    layers: tuple[int, ...] = ()  # where stages are layers: the first one of each stage as the schedule has them
    warm_up: int = 0  # steps before the rounds of a schedule whose workers do not wait for each other in each step
    local_steps: int = 0  # of each worker alone in a round, where the schedule has such

    @property
    def side_by_side(self) -> int:
        """The number of micro-batches that workers have at a time: all of a step, if each has a worker."""
        return self.workers or self.m

    folded: bool = False  # whether the first replica stands for all, which are alike

    @property
    def sharers(self) -> int:
        """The number of ranks in a sharding group."""
        return self.shard * self.copies

    @property
    def simulated(self) -> int:
        """The number of replicas whose tasks are there."""
        return 1 if self.folded else self.replicas

    @property
    def parts(self) -> int:
        """The number of stages as the schedule has them, each of which may be several layers."""
        return len(self.layers) or self.n

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of all replicas in a training step."""
        return self.m * self.replicas


def read_widths(given: object, option: str = "stage-replicas") -> Widths:
    """Return the number of each stage that a list says, or a text with commas: by default of its devices."""
    numbers = given.split(",") if isinstance(given, str) else given
    if not isinstance(numbers, Sequence | np.ndarray):
        raise RequestError(option, f"{short_repr(given)} is no list; write a number for each stage: 2,1,1")
    return tuple(whole_number(option, number, at_least=1) for number in numbers)


DeviceOf = Callable[[Ints, Ints, Ints, Shape], Ints]  # i, j, t


def pyramid_widths(m: int, passes: list[Fraction]) -> Widths:
    """Return the devices of each stage, where a device keeps a micro-batch from its forward to its backward there.

    `passes` is each stage's forward and backward time together. A micro-batch occupies stage j while it passes the
    stages from j on, and m micro-batches must fit into one pass (spec section 5).

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
    """The device of each task of a replica.

    `replicas`: several devices hold the same stage. `lanes`: a device runs several micro-batches at once, in lanes.
    `exclusive`: a device finishes the backward of one micro-batch before it begins the forward of another.
    """

    name: str
    device: DeviceOf = field(repr=False)  # an array that broadcasts with i, j and t
    devices: Callable[[Shape], int] = field(repr=False)  # of one replica
    replicas: bool = True
    lanes: bool = False
    exclusive: bool = False


def _pyramid(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    first = np.concatenate([[0], np.cumsum(shape.widths)[:-1]])
    device: Ints = first[j] + (t * shape.m + i) % np.asarray(shape.widths)[j]
    return device


def _single(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    return 0 * i


def _by_micro_batch(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    return i % np.int32(shape.side_by_side)


def _by_both(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    return i % np.int32(shape.side_by_side) * shape.n + j


def _by_stage(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    return j


def _as_listed(i: Ints, j: Ints, t: Ints, shape: Shape) -> Ints:
    raise AssertionError("the lists of the order say where a task runs")


def _one_device(shape: Shape) -> int:
    return 1


def _each_worker(shape: Shape) -> int:
    return shape.side_by_side


def _each_worker_and_stage(shape: Shape) -> int:
    return shape.n * shape.side_by_side


def _all_widths(shape: Shape) -> int:
    return sum(shape.widths)


def _each_stage(shape: Shape) -> int:
    return shape.n


def _each_group_of_chunks(shape: Shape) -> int:
    return shape.parts // shape.chunks


SINGLE = Placement("single", _single, _one_device, replicas=False, lanes=True)
BY_MICRO_BATCH = Placement("by micro-batch", _by_micro_batch, _each_worker)
BY_MICRO_BATCH_AND_STAGE = Placement("by micro-batch and stage", _by_both, _each_worker_and_stage)
PYRAMID = Placement("pyramid", _pyramid, _all_widths, exclusive=True)
BY_STAGE = Placement("by stage", _by_stage, _each_stage, replicas=False)
LISTED = Placement("as listed", _as_listed, _each_group_of_chunks, replicas=False)

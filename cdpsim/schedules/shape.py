"""The numbers of stages, micro-batches and devices, of which orders, placements and rules are functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdpsim.errors import RequestError, short_repr, whole_number

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
    shard: int = 1  # so many replicas, one after another, share what is split
    layers: tuple[int, ...] = ()  # where stages are layers: the first one of each stage as the schedule has them
    warm_up: int = 0  # steps before the rounds of a schedule whose workers do not wait for each other in each step
    local_steps: int = 0  # of each worker alone in a round, where the schedule has such

    @property
    def side_by_side(self) -> int:
        """The number of micro-batches that workers have at a time: all of a step, if each has a worker."""
        return self.workers or self.m

    folded: bool = False  # whether the first replica stands for all, which are alike

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


def read_widths(given: object) -> Widths:
    """Return the devices of each stage that a list says, or a text with commas."""
    numbers = given.split(",") if isinstance(given, str) else given
    if not isinstance(numbers, Sequence | np.ndarray):
        raise RequestError("stage-replicas", f"{short_repr(given)} is no list; write a number for each stage: 2,1,1")
    return tuple(whole_number("stage-replicas", number, at_least=1) for number in numbers)

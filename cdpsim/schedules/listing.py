"""Orders that are written out: the device of each task, and its position in the device's list."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cdpsim.numeric.columns import Ints
from cdpsim.schedules.actions import Action, Actions
from cdpsim.schedules.shape import Shape

# The third of the phases to which actions of each kind belong: forwards, backwards, weights' parts.
_THIRD = np.array([0, 0, 1, 1, 2], dtype=np.int32)
assert [*Action] == [Action.F, Action.B, Action.I, Action.W]


@dataclass(frozen=True, eq=False)
class Listing:
    """The tasks of the devices of one replica in a step.

    Where some backwards are split, one that is not split is its input part directly followed by its weights part;
    `undivided` marks it, because it sends its gradient on only when both are done.
    """

    shape: Shape
    devices: int
    splits: bool
    phase: Ints  # of each task, device after device, as are the next column and `delay`
    micro_batch: Ints
    first: Ints  # the row with which each device begins
    undivided: NDArray[np.bool_]  # by micro-batch and stage
    delay: Ints | None = None  # how many repetitions of the list after its step's own a task comes

    @classmethod
    def of(cls, actions: Actions, shape: Shape) -> "Listing":
        """Return the tasks of some actions."""
        kind, stage, micro_batch, first = actions.kind, actions.stage, actions.micro_batch, actions.first
        delay = actions.delay
        undivided = np.zeros((shape.m, shape.n), dtype=bool)
        if actions.splits:
            both_parts = kind == Action.B
            undivided[micro_batch[both_parts], stage[both_parts]] = True
            tasks = 1 + both_parts
            kind, stage, micro_batch = (np.repeat(column, tasks) for column in (kind, stage, micro_batch))
            delay = None if delay is None else np.repeat(delay, tasks)
            ends = np.cumsum(tasks)
            kind[ends[both_parts] - 1] = Action.W
            first = np.append(0, ends)[first].astype(np.int32)
        third = _THIRD[kind]
        phase = np.where(third == 0, stage, (third + 1) * shape.n - 1 - stage)
        return cls(shape, actions.devices, actions.splits, phase, micro_batch, first, undivided, delay)

    @property
    def phases(self) -> int:
        """The number of tasks of a micro-batch."""
        return (3 if self.splits else 2) * self.shape.n

    @property
    def longest(self) -> int:
        """The number of tasks of the device that has most."""
        return int(np.diff(self.first).max())

    @cached_property
    def tasks(self) -> Ints:
        """The tasks of one replica and step by their numbers, device after device, each in its order."""
        return self.micro_batch * np.int32(self.phases) + self.phase

    @cached_property
    def position(self) -> Ints:
        """The position of each (micro-batch, phase) in its device's list, or in a later repetition of that."""
        position = np.arange(len(self.tasks), dtype=np.int32) - np.repeat(self.first[:-1], self.counts)
        return self._by_task(position if self.delay is None else position + self.delay * np.int32(self.longest))

    @cached_property
    def device(self) -> Ints:
        """The device of each (micro-batch, stage)."""
        device = self._by_task(np.repeat(np.arange(self.devices, dtype=np.int32), self.counts))
        return device[:, : self.shape.n]

    def _by_task(self, column: Ints) -> Ints:
        result = np.empty(len(self.tasks), dtype=np.int32)
        result[self.tasks] = column
        return result.reshape(self.shape.m, self.phases)

    @property
    def counts(self) -> Ints:
        """The number of tasks of each device in a step."""
        return np.diff(self.first)

    def lane_tasks(self, steps: int) -> Ints:
        """Return the tasks of all replicas' devices, one after another, each in its order, step after step."""
        if steps == 1 and self.shape.replicas == 1:
            return self.tasks
        replicas = np.arange(steps * self.shape.replicas, dtype=np.int32).reshape(steps, -1) * np.int32(
            self.shape.m * self.phases
        )
        lanes = np.split(self.tasks, self.first[1:-1])
        return np.concatenate([(lane + first[:, None]).ravel() for first in replicas.T for lane in lanes])

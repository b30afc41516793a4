"""Orders that are written out: the place of each task in its device's list, and the device."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cdpsim.numeric.columns import Ints
from cdpsim.schedules.actions import Action, Actions
from cdpsim.schedules.shape import Shape

# Of each action, which third of the phases it belongs to: forwards, backwards, weights' parts.
_THIRD = np.array([0, 0, 1, 1, 2], dtype=np.int32)
assert [*Action] == [Action.F, Action.B, Action.I, Action.W]


@dataclass(frozen=True, eq=False)
class Listing:
    """What the devices of one replica do in a step.

    Where some backwards are split, one that is not is a backward for the input and one for the weights with nothing
    in between; `whole` says which, because it hands on its gradient only when all of it is done.
    """

    shape: Shape
    devices: int
    splits: bool
    phase: Ints  # of each task, device after device
    micro_batch: Ints
    first: Ints  # where each device begins there
    whole: NDArray[np.bool_]  # of micro-batch and stage
    back: Ints | None = None  # of each task, how many repetitions of the list after its step's own it stands

    @classmethod
    def of(cls, actions: Actions, shape: Shape) -> "Listing":
        """Number the tasks of some actions."""
        kind, stage, micro_batch, first = actions.kind, actions.stage, actions.micro_batch, actions.first
        back = actions.back
        whole = np.zeros((shape.m, shape.n), dtype=bool)
        if actions.splits:
            undivided = kind == Action.B
            whole[micro_batch[undivided], stage[undivided]] = True
            twice = 1 + undivided
            kind, stage, micro_batch = (np.repeat(column, twice) for column in (kind, stage, micro_batch))
            back = None if back is None else np.repeat(back, twice)
            ends = np.cumsum(twice)
            kind[ends[undivided] - 1] = Action.W
            first = np.append(0, ends)[first].astype(np.int32)
        third = _THIRD[kind]
        phase = np.where(third == 0, stage, (third + 1) * shape.n - 1 - stage)
        return cls(shape, actions.devices, actions.splits, phase, micro_batch, first, whole, back)

    @property
    def phases(self) -> int:
        """How many tasks a micro-batch has."""
        return (3 if self.splits else 2) * self.shape.n

    @property
    def longest(self) -> int:
        """How many tasks a device has at most."""
        return int(np.diff(self.first).max())

    @cached_property
    def tasks(self) -> Ints:
        """The tasks of one replica and step by their numbers, device after device, each in its order."""
        return self.micro_batch * np.int32(self.phases) + self.phase

    @cached_property
    def place(self) -> Ints:
        """The place of each (micro-batch, phase) in its device's list, or in a later repetition of that."""
        place = np.arange(len(self.tasks), dtype=np.int32) - np.repeat(self.first[:-1], self.counts)
        return self._by_task(place if self.back is None else place + self.back * np.int32(self.longest))

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
        """How many tasks each device has in a step."""
        return np.diff(self.first)

    def lane_tasks(self, steps: int) -> Ints:
        """The tasks of all replicas' devices, one after another, each in its order, step after step."""
        if steps == 1 and self.shape.replicas == 1:
            return self.tasks
        of_replica = self.shape.m * self.phases
        first = np.arange(steps, dtype=np.int32)[:, None] * np.int32(self.shape.replicas * of_replica)
        replicas = [first + np.int32(replica * of_replica) for replica in range(self.shape.replicas)]
        lanes = np.split(self.tasks, self.first[1:-1])
        return np.concatenate([(lane + start).ravel() for start in replicas for lane in lanes])

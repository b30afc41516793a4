"""The compute tasks of a schedule as index arrays: numbers, positions, devices, lanes and what they read."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from cdpsim.columns import Ints, heads, runs, sort_by
from cdpsim.program import Kind
from cdpsim.schedules import Schedule
from cdpsim.schedules.rule import Rule


@dataclass(frozen=True, eq=False)
class Grid:
    """Compute tasks over (step t, micro-batch i, phase) and what every part of the assembly asks of them.

    Arrays over (t, i, j) have that shape; phase p < n is the forward of stage p, else the backward of 2n-1-p.
    """

    schedule: Schedule
    rule: Rule
    n: int
    m: int
    steps: int
    widths: tuple[int, ...]  # devices per stage, for placements that ask
    lanes: int  # how many tasks a device with lanes does side by side
    forward_first: bool = True

    @property
    def devices(self) -> int:
        """How many devices the placement uses."""
        return self.schedule.placement.devices(self.n, self.m, self.widths)

    @cached_property
    def tij(self) -> tuple[Ints, Ints, Ints]:
        """Index arrays t, i, j that broadcast against each other."""
        t, i, j = (index.astype(np.int32) for index in np.ogrid[: self.steps, : self.m, : self.n])
        return t, i, j

    @cached_property
    def forward(self) -> Ints:
        """The task F(i, j, t)."""
        t, i, j = self.tij
        return (t * self.m + i) * (2 * self.n) + j

    @cached_property
    def backward(self) -> Ints:
        """The task B(i, j, t)."""
        t, i, j = self.tij
        return (t * self.m + i) * (2 * self.n) + 2 * self.n - 1 - j

    @cached_property
    def device(self) -> Ints:
        """The device of stage j of micro-batch i in step t."""
        t, i, j = self.tij
        return np.ascontiguousarray(self.schedule.placement.device(i, j, t, self.n, self.m, self.widths))

    @cached_property
    def version(self) -> Ints:
        """The version that (t, i, j) reads: theta_t or the one before, theta_0 if there is none."""
        t = self.tij[0]
        return np.maximum(t - ~self.rule.matrix(self.n, self.m), 0)

    def by_task(self, values: Ints) -> Ints:
        """Turn values over (t, i, j) into values over compute tasks: of the forwards, then back for the backwards."""
        full = np.broadcast_to(values, (self.steps, self.m, self.n))
        return np.concatenate([full, full[:, :, ::-1]], axis=2).ravel()

    @cached_property
    def position(self) -> Ints:
        """Each compute task's position in the schedule's order."""
        ranges = np.ogrid[: self.steps, : self.m, : 2 * self.n]
        t, i, phase = (index.astype(np.int32) for index in ranges)
        full = (self.steps, self.m, 2 * self.n)
        return np.broadcast_to(self.schedule.order.position(t, i, phase, self.n, self.m), full).ravel()

    @cached_property
    def kind(self) -> Ints:
        """Each compute task's kind."""
        one = np.repeat(np.array([Kind.F, Kind.B], dtype=np.int8), self.n)
        return np.tile(one, self.steps * self.m)

    @cached_property
    def task_device(self) -> Ints:
        """Each compute task's device."""
        return self.by_task(self.device)

    @cached_property
    def lane(self) -> Ints:
        """Each compute task's lane on its device."""
        return self.by_task(self.tij[1] % self.lanes if self.schedule.placement.lanes else 0 * self.tij[1])

    @cached_property
    def lane_tasks(self) -> Ints:
        """Compute tasks, lane after lane, each in its order."""
        count = 2 * self.n * self.steps * self.m
        micro_batch = self.by_task(self.tij[1])
        order = np.arange(count, dtype=np.int32) if self.schedule.placement.exclusive else self.position
        first = Kind.F if self.forward_first else Kind.B
        return sort_by(self.task_device, self.lane, order, self.kind != first, micro_batch)

    @cached_property
    def lane_heads(self) -> Ints:
        """Where each lane begins in `lane_tasks`."""
        return heads(self.task_device[self.lane_tasks], self.lane[self.lane_tasks])

    @cached_property
    def rank(self) -> Ints:
        """Each compute task's place in `lane_tasks`."""
        rank = np.empty(len(self.lane_tasks), dtype=np.int32)
        rank[self.lane_tasks] = np.arange(len(rank), dtype=np.int32)
        return rank

    def before(self, place: Ints, distance: Ints | int) -> tuple[Ints, Ints]:
        """For tasks by place in `lane_tasks`: which have one `distance` ahead of them in their lane, and that one."""
        lane = np.searchsorted(self.lane_heads, place, side="right") - 1
        earlier = place - np.minimum(distance, len(self.lane_tasks)).astype(np.int64)
        some = np.flatnonzero(earlier >= self.lane_heads[lane])
        return some, self.lane_tasks[earlier[some]]

    def last_until(self, place: Ints, position: Ints) -> Ints:
        """The places of the last tasks in the same lanes as these, at or before a position in the schedule's order."""
        span = int(self.position.max()) + 1
        lane = runs(self.lane_heads, len(self.lane_tasks)).astype(np.int64)
        key = np.maximum.accumulate(lane * span + self.position[self.lane_tasks])
        return np.searchsorted(key, lane[place] * span + position, side="right") - 1

    def last_in_step(self, device: Ints, step: Ints) -> Ints:
        """The last tasks that devices do in steps; of a device with several lanes, that of its last one."""
        tasks = self.lane_tasks
        steps = tasks // (2 * self.n * self.m)
        last = np.append(heads(self.task_device[tasks], self.lane[tasks], steps)[1:], len(tasks)) - 1
        key = self.task_device[tasks[last]].astype(np.int64) * self.steps + steps[last]
        task: Ints = tasks[last[np.searchsorted(key, device.astype(np.int64) * self.steps + step, side="right") - 1]]
        return task

    @cached_property
    def holders(self) -> "Holders":
        """Which devices hold a stage in a step, and the micro-batches that they process."""
        return Holders(self)


class Holders:
    """A row for each (step, stage, device): the device runs that stage in that step.

    `last` is its last micro-batch there, `first_task` its first backward; `row` is the row of each (t, i, j).
    """

    def __init__(self, grid: Grid) -> None:
        t, i, j = (np.broadcast_to(index, grid.device.shape).ravel() for index in grid.tij)
        device = grid.device.ravel()
        sorted_ = sort_by(t, j, device, i)
        first = heads(t[sorted_], j[sorted_], device[sorted_])
        last = np.append(first[1:], len(sorted_)) - 1
        self.step, self.stage, self.device = (c[sorted_[first]] for c in (t, j, device))
        self.last = i[sorted_[last]]
        self.first_task = grid.backward.ravel()[sorted_[first]]
        row = np.empty(len(sorted_), dtype=np.int32)
        row[sorted_] = runs(first, len(sorted_))
        self.row = row.reshape(grid.device.shape)

    def __len__(self) -> int:
        return len(self.step)


def releases(grid: Grid) -> Iterable[tuple[int, Fraction]]:
    """The first tasks of step 0 that may not start at once."""
    for i in range(grid.m):
        share = grid.schedule.order.release(i, grid.m)
        if share:
            yield int(grid.forward[0, i, 0]), share

"""The compute tasks of a schedule as index arrays: numbers, positions, devices, lanes and what they read."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from cdpsim.assembly.listing import Listing
from cdpsim.columns import Ints, heads, runs, sort_by
from cdpsim.program import Kind
from cdpsim.schedules import Schedule
from cdpsim.schedules.rule import Rule
from cdpsim.schedules.shape import Shape


@dataclass(frozen=True, eq=False)
class Grid:
    """Compute tasks over (step t, micro-batch i, phase) and what every part of the assembly asks of them.

    Arrays over (t, i, j) have that shape; phase p < n is the forward of stage p, p < 2n the backward of 2n-1-p. Where
    backwards are split, p < 3n is the weights' part of that of 3n-1-p. Micro-batches count through all replicas.
    """

    schedule: Schedule
    rule: Rule
    shape: Shape
    steps: int
    lanes: int  # how many tasks a device with lanes does side by side
    forward_first: bool = True

    @property
    def n(self) -> int:
        """The number of stages."""
        return self.shape.n

    @property
    def m(self) -> int:
        """The number of micro-batches."""
        return self.shape.micro_batches

    @property
    def together(self) -> bool:
        """Whether all that hold a stage give their gradients at one moment, so that these are all-reduced."""
        return self.schedule.order.flush or self.shape.replicas > 1

    @cached_property
    def listing(self) -> Listing | None:
        """What devices do, where the order says that instead of positions."""
        return Listing.of(self.schedule.actions(self.shape), self.shape) if self.schedule.order.actions else None

    @property
    def splits(self) -> bool:
        """Whether backwards have a part of their own for the weights."""
        return self.listing is not None and self.listing.splits

    @property
    def phases(self) -> int:
        """How many tasks a micro-batch has in a step."""
        return (3 if self.splits else 2) * self.n

    @property
    def devices(self) -> int:
        """How many devices there are, of all replicas."""
        return self._own_devices * self.shape.replicas

    @property
    def _own_devices(self) -> int:
        return self.listing.devices if self.listing else self.schedule.placement.devices(self.shape)

    @cached_property
    def tij(self) -> tuple[Ints, Ints, Ints]:
        """Index arrays t, i, j that broadcast against each other."""
        t, i, j = (index.astype(np.int32) for index in np.ogrid[: self.steps, : self.m, : self.n])
        return t, i, j

    @cached_property
    def forward(self) -> Ints:
        """The task F(i, j, t)."""
        return self._task(self.tij[2])

    @cached_property
    def backward(self) -> Ints:
        """The task B(i, j, t)."""
        return self._task(2 * self.n - 1 - self.tij[2])

    @cached_property
    def last(self) -> Ints:
        """The task that ends micro-batch i's way through stage j and gives its gradient: B, or W where split."""
        return self._task(self.phases - 1 - self.tij[2])

    def _task(self, phase: Ints) -> Ints:
        t, i, _ = self.tij
        task: Ints = (t * self.m + i) * self.phases + phase
        return task

    @cached_property
    def device(self) -> Ints:
        """The device of stage j of micro-batch i in step t."""
        t, i, j = self.tij
        replica, i = np.divmod(i, self.shape.m)
        if self.listing:
            own = np.broadcast_to(self.listing.device[i, j], (self.steps, self.m, self.n))
        else:
            own = self.schedule.placement.device(i, j, t, self.shape)
        return np.ascontiguousarray(own + replica * self._own_devices)

    @cached_property
    def version(self) -> Ints:
        """The version that the forward of (t, i, j) reads."""
        return self._version(self.rule.lags(self.shape))

    @cached_property
    def backward_version(self) -> Ints:
        """The version that the backward of (t, i, j) reads."""
        return self.version if self.rule.backward is None else self._version(self.rule.backward_lags(self.shape))

    def _version(self, lags: Ints) -> Ints:
        return np.maximum(self.tij[0] - np.tile(lags, (self.shape.replicas, 1)), 0)

    def by_task(self, forward: Ints, backward: Ints | None = None) -> Ints:
        """Turn values over (t, i, j) into values over compute tasks: of the forwards, then back for the backwards."""
        there = np.broadcast_to(forward, (self.steps, self.m, self.n))
        back = there if backward is None else np.broadcast_to(backward, there.shape)
        return np.concatenate([there, *[back[:, :, ::-1]] * (self.phases // self.n - 1)], axis=2).ravel()

    @cached_property
    def position(self) -> Ints:
        """Each compute task's position in the schedule's order."""
        ranges = np.ogrid[: self.steps, : self.m, : self.phases]
        t, i, phase = (index.astype(np.int32) for index in ranges)
        i = i % self.shape.m
        if self.listing:
            position = t * self.listing.longest + self.listing.place[i, phase]
        else:
            assert self.schedule.order.position is not None
            position = self.schedule.order.position(t, i, phase, self.shape)
        return np.broadcast_to(position, (self.steps, self.m, self.phases)).ravel()

    @cached_property
    def kind(self) -> Ints:
        """Each compute task's kind."""
        one = np.repeat(np.array([Kind.F, Kind.B, Kind.W], dtype=np.int8), self.n)[: self.phases]
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
        if self.listing:
            return self.listing.lane_tasks(self.steps)
        micro_batch = self.by_task(self.tij[1])
        order = np.arange(len(self.kind), dtype=np.int32) if self.schedule.placement.exclusive else self.position
        first = Kind.F if self.forward_first else Kind.B
        return sort_by(self.task_device, self.lane, order, self.kind != first, micro_batch)

    @cached_property
    def step_heads(self) -> Ints:
        """Where each lane begins each step in `lane_tasks`."""
        if self.listing:
            count = np.repeat(np.tile(self.listing.counts, self.shape.replicas), self.steps)
            return np.cumsum(count, dtype=np.int32) - count
        tasks = self.lane_tasks
        return heads(self.task_device[tasks], self.lane[tasks], tasks // (self.phases * self.m))

    @cached_property
    def lane_heads(self) -> Ints:
        """Where each lane begins in `lane_tasks`."""
        first = self.lane_tasks[self.step_heads]
        return self.step_heads[heads(self.task_device[first], self.lane[first])]

    @cached_property
    def lane_number(self) -> Ints:
        """The number, through all devices, of the lane of each row of `lane_tasks`."""
        return runs(self.lane_heads, len(self.lane_tasks))

    @cached_property
    def rank(self) -> Ints:
        """Each compute task's place in `lane_tasks`."""
        rank = np.empty(len(self.lane_tasks), dtype=np.int32)
        rank[self.lane_tasks] = np.arange(len(rank), dtype=np.int32)
        return rank

    def before(self, place: Ints, distance: Ints | int) -> tuple[Ints, Ints]:
        """For tasks by place in `lane_tasks`: which have one `distance` ahead of them in their lane, and that one."""
        earlier = place - distance
        some = np.flatnonzero(earlier >= self.lane_heads[self.lane_number[place]])
        return some, self.lane_tasks[earlier[some]]

    def last_until(self, place: Ints, position: Ints) -> Ints:
        """The places of the last tasks in the same lanes as these, at or before a position in the schedule's order."""
        span = int(self.position.max()) + 1
        lane = self.lane_number.astype(np.int64)
        key = np.maximum.accumulate(lane * span + self.position[self.lane_tasks])
        return np.searchsorted(key, lane[place] * span + position, side="right") - 1

    def last_in_step(self, device: Ints, step: Ints) -> Ints:
        """The last tasks that devices do in steps; of a device with several lanes, that of its last one."""
        tasks = self.lane_tasks[np.append(self.step_heads[1:], len(self.lane_tasks)) - 1]
        key = self.task_device[tasks].astype(np.int64) * self.steps + tasks // (self.phases * self.m)
        task: Ints = tasks[np.searchsorted(key, device.astype(np.int64) * self.steps + step, side="right") - 1]
        return task

    @cached_property
    def holders(self) -> "Holders":
        """Which devices hold a stage in a step, and the micro-batches that they process."""
        return Holders(self)


class Holders:
    """A row for each (step, stage, device): the device runs that stage in that step.

    `first_task` and `last_task` are the first and the last there that give a gradient, `last` the micro-batch of the
    last one; `row` is the row of each (t, i, j).
    """

    def __init__(self, grid: Grid) -> None:
        gives = grid.lane_tasks[grid.lane_tasks % grid.phases >= grid.phases - grid.n]
        passed, phase = np.divmod(gives, grid.phases)
        t, i = np.divmod(passed, grid.m)
        j, device = grid.phases - 1 - phase, grid.task_device[gives]
        # Where a device has one lane, its tasks are in the order of positions already.
        in_order = not (grid.schedule.placement.lanes or grid.schedule.placement.exclusive)
        sorted_ = sort_by(t, j, device) if in_order else sort_by(t, j, device, grid.position[gives], i)
        first = heads(t[sorted_], j[sorted_], device[sorted_])
        last = np.append(first[1:], len(sorted_)) - 1
        self.step, self.stage, self.device = (c[sorted_[first]] for c in (t, j, device))
        self.last = i[sorted_[last]]
        self.first_task, self.last_task = gives[sorted_[first]], gives[sorted_[last]]
        self.row = np.empty(grid.device.shape, dtype=np.int32)
        self.row.ravel()[passed[sorted_] * grid.n + j[sorted_]] = runs(first, len(sorted_))

    def __len__(self) -> int:
        return len(self.step)


def releases(grid: Grid) -> Iterable[tuple[int, Fraction]]:
    """The first tasks of step 0 that may not start at once."""
    for i in range(grid.m):
        share = grid.schedule.order.release(i % grid.shape.m, grid.shape)
        if share:
            yield int(grid.forward[0, i, 0]), share

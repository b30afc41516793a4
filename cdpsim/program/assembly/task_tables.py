"""The compute tasks of a schedule as three tables: passes through the stages, lanes of devices, copies of stages."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, group_numbers, group_starts, slice_rows, sort_and_group, sort_by
from cdpsim.program import Kind
from cdpsim.program.assembly.build import Location, fold_group
from cdpsim.schedules import Schedule
from cdpsim.schedules.order import Listing, OverlappedRounds
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import MadeVersions, Rule, UpdateSources, Versions


@dataclass(frozen=True, eq=False)
class Passes:
    """A row for each pass: one micro-batch's way through all stages in one step.

    Passes stand step after step, in a step replica after replica. `counts` says how many each replica has in each step,
    from micro-batch 0 on. Every pass has the same `phases` tasks, numbered pass after pass: phase
    p < n is the forward of stage p, p < 2n the backward of 2n-1-p. Where backwards are split, p < 3n is the weights'
    part of that of 3n-1-p. Arrays over passes and stages have a row for each pass and a column for each stage.
    """

    schedule: Schedule
    rule: Rule
    shape: Shape
    counts: Ints

    def __len__(self) -> int:
        return len(self.step)

    @property
    def n(self) -> int:
        """The number of stages."""
        return self.shape.n

    @property
    def steps(self) -> int:
        """The number of training steps."""
        return len(self.counts)

    @cached_property
    def versions(self) -> Versions:
        """The versions that updates make."""
        local = self.schedule.order.local
        return local.versions(self.shape) if local else self.rule.versions

    @cached_property
    def sources(self) -> UpdateSources | None:
        """The version that updates start from and the steps they sum; None: the version before and their own step."""
        return self.versions.sources(self.steps)

    @property
    def updated(self) -> int:
        """The number of steps with updates: all, but for the last round that a run throws away."""
        return self.steps - (self.schedule.order.rounds is not None)

    @cached_property
    def made(self) -> MadeVersions:
        """The versions that the run makes of each stage."""
        return self.versions.made(self.updated)

    @property
    def base(self) -> Ints:
        """The version that the updates of each step start from."""
        return self.sources.base if self.sources else np.arange(self.steps)

    @property
    def first_step(self) -> Ints:
        """The first step whose gradients the updates of each step take; the last is their own."""
        return self.sources.first if self.sources else np.arange(self.steps)

    @cached_property
    def even(self) -> bool:
        """Whether every replica has all of the schedule's micro-batches in every step."""
        return bool((self.counts == self.shape.m).all())

    @property
    def regular(self) -> bool:
        """Whether devices do all of their lists, step after step."""
        return self.listing is not None and self.even and self.listing.delay is None

    @cached_property
    def first(self) -> Ints:
        """The first pass of each step, and the number of passes behind them."""
        return np.append(0, np.cumsum(self.counts.sum(axis=1))).astype(np.int32)

    @cached_property
    def step(self) -> Ints:
        """The step of each pass."""
        return group_numbers(self.first[:-1], int(self.first[-1]))

    @cached_property
    def micro_batch(self) -> Ints:
        """The number of each pass in its step, through all replicas."""
        return np.arange(len(self), dtype=np.int32) - self.first[self.step]

    @cached_property
    def replica(self) -> Ints:
        """The replica of each pass."""
        number = np.arange(self.counts.size, dtype=np.int32) % np.int32(self.shape.simulated)
        return np.repeat(number, self.counts.ravel())

    @cached_property
    def local(self) -> Ints:
        """The micro-batch of each pass in the order of its replica: its number in its step and replica."""
        count = self.counts.ravel()
        return slice_rows(np.zeros_like(count), count).astype(np.int32)

    @cached_property
    def tij(self) -> tuple[Ints, Ints, Ints]:
        """Step, micro-batch in its replica, and stage, which broadcast against each other."""
        return self.step[:, None], self.local[:, None], np.arange(self.n, dtype=np.int32)[None]

    @property
    def stage(self) -> Ints:
        """The stage of each pass and stage, in one row."""
        return np.tile(np.arange(self.n, dtype=np.int32), len(self))

    @cached_property
    def listing(self) -> Listing | None:
        """The lists of tasks that devices do, where the order has these instead of positions."""
        return Listing.of(self.schedule.actions(self.shape), self.shape) if self.schedule.order.lists else None

    @property
    def splits(self) -> bool:
        """Whether backwards have a part of their own for the weights."""
        return self.listing is not None and self.listing.splits

    @property
    def phases(self) -> int:
        """The number of tasks of a pass."""
        return (3 if self.splits else 2) * self.n

    @property
    def tasks(self) -> int:
        """The number of compute tasks."""
        return len(self) * self.phases

    @property
    def devices(self) -> int:
        """The number of devices of all replicas."""
        return self.replica_devices * self.shape.simulated

    @property
    def replica_devices(self) -> int:
        """The number of devices of a replica."""
        return self.listing.devices if self.listing else self.schedule.placement.devices(self.shape)

    @property
    def fold(self) -> int:
        """The number of replicas for which each one that is there stands."""
        return self.shape.replicas // self.shape.simulated

    @property
    def copies(self) -> int:
        """The number of ranks of each device that take part in exchanges of data ranks."""
        return self.shape.copies if self.schedule.state.streams else 1

    def alike_ranks(self, members: Ints, run: int = 0, apart: int = 1) -> Ints | None:
        """Return the ranks of all groups like one of the first replica (`fold_group`); None if nothing is folded."""
        if not self.shape.folded:
            return None
        return fold_group(members, self.replica_devices, self.shape.replicas, run, apart)

    @property
    def together(self) -> bool:
        """Whether all that hold a stage come to its update at one moment, so that they exchange by collectives."""
        order = self.schedule.order
        return order.together or self.shape.replicas > 1 or not order.waits

    @cached_property
    def lagging(self) -> bool:
        """Whether a version may be read, or started from, when the next one is there."""
        return self.rule.fill(self.shape) > 0 or self.sources is not None

    @cached_property
    def forward(self) -> Ints:
        """The forward of each pass and stage, as the number of its task."""
        return self._tasks_of(self.tij[2])

    @cached_property
    def backward(self) -> Ints:
        """The backward of each pass and stage."""
        return self._tasks_of(2 * self.n - 1 - self.tij[2])

    @cached_property
    def last(self) -> Ints:
        """The task that ends a pass's way through a stage and gives its gradient: a backward, or its weights' part."""
        return self._tasks_of(self.phases - 1 - self.tij[2])

    def _tasks_of(self, phase: Ints) -> Ints:
        task: Ints = np.arange(len(self), dtype=np.int32)[:, None] * np.int32(self.phases) + phase
        return task

    def stage_of(self, task: Ints) -> Ints:
        """Return the stage of tasks, or of phases."""
        third, stage = np.divmod(task % self.phases, self.n)
        return np.where(third == 0, stage, self.n - 1 - stage)

    def step_of(self, row: Ints) -> Ints:
        """Return the step of passes; where all are alike, a division takes less time than looking it up."""
        return row // self.first[1] if self.even else self.step[row]

    def of_micro_batch(self, table: NDArray[Any]) -> NDArray[Any]:
        """Return, for each pass, the row of its micro-batch in a table of the schedule's."""
        return np.tile(table, (self.counts.size, 1)) if self.even else table[self.local]

    @cached_property
    def device(self) -> Ints:
        """The device of each pass and stage."""
        t, i, j = self.tij
        if self.listing:
            device = self.of_micro_batch(self.listing.device)
        else:
            device = self.schedule.placement.device(i, j, t, self.shape)
        if self.shape.simulated > 1:
            device = device + (self.replica * np.int32(self.replica_devices))[:, None]
        return np.ascontiguousarray(np.broadcast_to(device, (len(self), self.n)))

    @property
    def stay(self) -> bool:
        """Whether each pass has all stages on one device."""
        return bool((self.device == self.device[:, :1]).all())

    @cached_property
    def version(self) -> Ints:
        """The version that each forward reads."""
        return self._version(self.rule.lags(self.shape))

    @cached_property
    def backward_version(self) -> Ints:
        """The version that each backward reads."""
        return self.version if self.rule.backward is None else self._version(self.rule.backward_lags(self.shape))

    def _version(self, lags: Ints) -> Ints:
        newest = self.step
        if not self.versions.is_line:
            newest = np.searchsorted(self.made.step, self.step).astype(np.int32)
        lag = self.of_micro_batch(lags) * (self.step > self.shape.warm_up)[:, None]
        version: Ints = np.maximum(newest[:, None] - lag, 0)
        return version

    def by_task(self, forward: Ints, backward: Ints | None = None) -> Ints:
        """Return values of tasks, given those of passes and stages: of the forwards, then back for the backwards."""
        forth = np.broadcast_to(forward, (len(self), self.n))
        back = forth if backward is None else np.broadcast_to(backward, forth.shape)
        return np.concatenate([forth, *[back[:, ::-1]] * (self.phases // self.n - 1)], axis=1).ravel()

    @cached_property
    def position(self) -> Ints:
        """The position of each task in the schedule's order."""
        t, i, _ = self.tij
        if self.listing:
            position = t * np.int32(self.listing.longest) + self.of_micro_batch(self.listing.position)
        else:
            position = self.schedule.order.position(t, i, np.arange(self.phases, dtype=np.int32)[None], self.shape)
        return np.broadcast_to(position, (len(self), self.phases)).ravel()

    @cached_property
    def kind(self) -> Ints:
        """The kind of each task."""
        of_pass = np.repeat(np.array([Kind.F, Kind.B, Kind.W], dtype=np.int8), self.n)[: self.phases]
        return np.tile(of_pass, len(self))

    @cached_property
    def task_device(self) -> Ints:
        """The device of each task."""
        return self.by_task(self.device)


@dataclass(frozen=True, eq=False)
class DeviceLanes:
    """The tasks of passes in the lanes of devices."""

    passes: Passes
    width: int = 1  # how many tasks a device with lanes does side by side
    forward_first: bool = True

    @cached_property
    def lane(self) -> Ints:
        """The lane of each task on its device."""
        passes = self.passes
        if not passes.schedule.placement.lanes:
            return np.zeros(passes.tasks, dtype=np.int32)
        return np.repeat(passes.micro_batch % np.int32(self.width), passes.phases)

    @cached_property
    def tasks(self) -> Ints:
        """Tasks, lane after lane, each in its order."""
        passes = self.passes
        if passes.listing and passes.regular:
            return passes.listing.lane_tasks(passes.steps)
        if passes.listing:
            return sort_by(passes.task_device, passes.position)
        exclusive = passes.schedule.placement.exclusive
        order = np.arange(passes.tasks, dtype=np.int32) if exclusive else passes.position
        first = Kind.F if self.forward_first else Kind.B
        micro_batch = np.repeat(passes.micro_batch, passes.phases)
        return sort_by(passes.task_device, self.lane, order, passes.kind != first, micro_batch)

    def _step(self, task: Ints) -> Ints:
        return self.passes.step_of(task // self.passes.phases)

    @cached_property
    def step_heads(self) -> Ints:
        """The rows of `tasks` at which lanes begin steps."""
        passes, tasks = self.passes, self.tasks
        if passes.listing and passes.regular:
            count = np.repeat(np.tile(passes.listing.counts, passes.shape.simulated), passes.steps)
            return np.cumsum(count, dtype=np.int32) - count
        return group_starts(passes.task_device[tasks], self.lane[tasks], self._step(tasks))

    @cached_property
    def heads(self) -> Ints:
        """The rows of `tasks` at which lanes begin."""
        first = self.tasks[self.step_heads]
        return self.step_heads[group_starts(self.passes.task_device[first], self.lane[first])]

    @cached_property
    def number(self) -> Ints:
        """The number, through all devices, of the lane of each row of `tasks`."""
        return group_numbers(self.heads, len(self.tasks))

    @cached_property
    def rank(self) -> Ints:
        """The place of each task in `tasks`."""
        rank = np.empty(len(self.tasks), dtype=np.int32)
        rank[self.tasks] = np.arange(len(rank), dtype=np.int32)
        return rank

    def before(self, place: Ints, distance: Ints | int) -> tuple[Ints, Ints]:
        """Return the tasks that stand `distance` before these places of `tasks` in their lanes.

        The result is which of the places have such a task, and the task of each of those.
        """
        earlier = place - distance
        rows = np.flatnonzero(earlier >= self.heads[self.number[place]])
        return rows, self.tasks[earlier[rows]]

    def last_until(self, place: Ints, position: Ints) -> Ints:
        """Return the places of the last tasks in the same lanes, at or before a position in the schedule's order."""
        span = int(self.passes.position.max()) + 1
        lane = self.number.astype(np.int64)
        key = np.maximum.accumulate(lane * span + self.passes.position[self.tasks])
        return np.searchsorted(key, lane[place] * span + position, side="right") - 1

    @cached_property
    def step_begins(self) -> Ints:
        """The first task of each step and device; -1 where there is none."""
        head = self.tasks[self.step_heads]
        begins = np.full((self.passes.steps, self.passes.devices), -1, dtype=np.int32)
        begins[self._step(head), self.passes.task_device[head]] = head
        return begins

    @cached_property
    def step_ends(self) -> Ints:
        """The last task of each step and device; of a device with several lanes, that of its last one."""
        tasks = self.tasks[np.append(self.step_heads[1:], len(self.tasks)) - 1]
        ends = np.full((self.passes.steps, self.passes.devices), -1, dtype=np.int32)
        ends[self._step(tasks), self.passes.task_device[tasks]] = tasks  # of several lanes the last one stays
        return ends


class Copies:
    """A row for each (step, stage, device): the device runs that stage in that step.

    `first_task` and `last_task` are the first and the last there that give a gradient, `last` the micro-batch of the
    last one; `row` is the row of each pass and stage.
    """

    def __init__(self, lanes: DeviceLanes) -> None:
        passes = lanes.passes
        gives = lanes.tasks[lanes.tasks % passes.phases >= passes.phases - passes.n]
        passed, phase = np.divmod(gives, passes.phases)
        t, j, device = passes.step_of(passed), passes.phases - 1 - phase, passes.task_device[gives]
        # Where a device has one lane, its tasks are in the order of positions already.
        if passes.schedule.placement.lanes or passes.schedule.placement.exclusive:
            order = sort_by(t, j, device, passes.position[gives], passes.micro_batch[passed])
            first = group_starts(t[order], j[order], device[order])
        else:
            order, first = sort_and_group(t, j, device)
        head, last = order[first], order[np.append(first[1:], len(order)) - 1]
        self.steps = passes.steps
        self.step: Ints = t[head]
        self.stage: Ints = j[head]
        self.device: Ints = device[head]
        self.last = passes.micro_batch[passed[last]]
        self.first_task, self.last_task = gives[head], gives[last]
        self.row = np.empty(passes.device.shape, dtype=np.int32)
        self.row.ravel()[passed[order] * passes.n + j[order]] = group_numbers(first, len(order))

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def stay(self) -> bool:
        """Whether every stage is on the same devices in all steps."""
        each = np.bincount(self.step, minlength=self.steps)
        columns = (self.stage, self.device) if (each == each[0]).all() else ()
        return bool(columns) and all((c.reshape(self.steps, -1) == c[: each[0]]).all() for c in columns)

    @property
    def where(self) -> Location:
        """The device, stage and step of each row."""
        return Location(self.device, self.stage, self.step)

    @cached_property
    def first(self) -> Ints:
        """The first row of each step and stage."""
        return group_starts(self.step, self.stage)

    @cached_property
    def count(self) -> Ints:
        """The number of devices that hold each stage in each step."""
        return np.diff(np.append(self.first, len(self)))

    @cached_property
    def of(self) -> Ints:
        """The number of its step and stage, for each row."""
        return group_numbers(self.first, len(self))

    @cached_property
    def owners(self) -> Ints:
        """The row of the owner of each step and stage: of stage j the j-th of its copies."""
        owners: Ints = self.first + self.stage[self.first] % self.count
        return owners

    @property
    def in_step(self) -> int:
        """The number of rows of each step, where stages stay on their devices."""
        return len(self) // self.steps


@dataclass(frozen=True, eq=False)
class Tables:
    """The three tables."""

    passes: Passes
    lanes: DeviceLanes

    @cached_property
    def copies(self) -> Copies:
        """The devices that hold a stage in a step, and the micro-batches that they process."""
        return Copies(self.lanes)


def check_counts(counts: object, shape: Shape, steps: int) -> Ints:
    """Return the number of passes of each step and replica, m by default; refuse a table that has no such numbers."""
    if counts is None:
        return np.full((steps, shape.simulated), shape.m, dtype=np.int32)
    remedy = f"give each replica from 1 to m={shape.m} passes in each step"
    table = _table_of(counts, (steps, shape.simulated), remedy)
    if ((table < 1) | (table > shape.m)).any():
        raise RequestError("counts", f"go from {table.min()} to {table.max()}; {remedy}")
    return table.astype(np.int32)


def count_rounds(counts: object, rounds: OverlappedRounds, shape: Shape, updates: int) -> Ints:
    """Return the number of passes of each round and replica, by default the fewest; refuse parts of a block."""
    least = rounds.least(updates, shape)[:, None]
    if counts is None:
        return np.broadcast_to(least, (len(least), shape.simulated))
    remedy = f"give each replica blocks of m={shape.m} in each round, and {least[0, 0]} in the first"
    table = _table_of(counts, (len(least), shape.simulated), remedy)
    most = np.iinfo(np.int32).max // len(table)
    wrong = (table[0] != least[0]).any() or ((table[1:] < 1) | (table[1:] > most) | (table[1:] % shape.m > 0)).any()
    if wrong:
        raise RequestError("counts", f"are no rounds of {updates} updates; {remedy}")
    return table.astype(np.int32)


def _table_of(counts: object, shape: tuple[int, int], remedy: str) -> Ints:
    """Return numbers as a table of that shape; refuse another shape."""
    try:
        table = np.asarray(counts)
    except ValueError:  # numpy has no table whose rows are of unlike lengths
        table = np.array(None)
    if table.shape != shape:
        raise RequestError("counts", f"have shape {table.shape} instead of {shape}, steps by replicas; {remedy}")
    if table.dtype.kind not in "iu":
        raise RequestError("counts", f"are of type {table.dtype}, which are no whole numbers; {remedy}")
    return table


def releases(passes: Passes) -> Iterable[tuple[int, Fraction]]:
    """Yield the first tasks of step 0 that may not start at once, each with its release."""
    for row in range(passes.first[1]):
        share = passes.schedule.order.release(int(passes.local[row]), passes.shape)
        if share:
            yield int(passes.forward[row, 0]), share

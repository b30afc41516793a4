"""Where the optimizer is applied: which device makes theta_{t+1} of a stage, after which of its tasks."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cdpsim.assembly.build import Builder
from cdpsim.assembly.grid import Grid
from cdpsim.columns import Ints, heads, runs, sort_by
from cdpsim.program import Edge
from cdpsim.schedules import State


@dataclass(frozen=True, eq=False)
class Updates:
    """A row for each update, in the order of their nodes.

    Where gradients are all-reduced, one for every device that makes the new version, else exactly one for each (step,
    stage), in that order. Where nothing flushes, it follows the compute task `anchor` on its device and, where the rule
    has a barrier, the task `barrier` anywhere.
    """

    first_node: int
    step: Ints
    stage: Ints
    device: Ints
    anchor: Ints | None = None
    barrier: Ints | None = None
    in_lanes: bool = False  # they take their devices' time

    def __len__(self) -> int:
        return len(self.step)

    def place(self, grid: Grid) -> Ints:
        """The place in its lane of what each update comes after.

        That is its anchor, or the last task until the barrier; where steps flush, its device's last task of the step.
        """
        if self.anchor is None:
            return grid.rank[grid.last_in_step(self.device, self.step)]
        place = grid.rank[self.anchor]
        return place if self.barrier is None else grid.last_until(place, grid.position[self.barrier])

    def lane(self, grid: Grid) -> Ints:
        """The lane of each update on its device, -1 where it takes none."""
        if not self.in_lanes:
            return np.full(len(self), -1)
        return grid.lane[grid.lane_tasks[self.place(grid)]]

    def position(self, grid: Grid) -> Ints:
        """The position in the schedule's order of what each update comes after."""
        if self.anchor is None:
            return self.step
        return grid.position[self.anchor if self.barrier is None else self.barrier]

    @cached_property
    def node(self) -> Ints:
        """The node of each update."""
        return np.arange(self.first_node, self.first_node + len(self), dtype=np.int32)


def place_updates(grid: Grid, *, in_lanes: bool = False) -> Updates:
    """Whoever holds all of a stage's gradients applies them."""
    first = len(grid.kind)
    t, j = (index.ravel() for index in np.indices((grid.steps, grid.n), dtype=np.int32))
    sharded, holders = grid.schedule.state is State.SHARDED, grid.holders
    if grid.schedule.order.flush:
        if sharded:
            return Updates(first, t, j, owner(grid, j), in_lanes=in_lanes)
        return Updates(first, holders.step, holders.stage, holders.device, in_lanes=in_lanes)
    if grid.together:
        step, stage, device, anchor = holders.step, holders.stage, holders.device, holders.last_task
    else:
        anchor = grid.last[:, -1].ravel()
        step, stage, device = t, j, grid.task_device[anchor]
    barrier = None
    if grid.rule.barrier:
        replica = device // (grid.devices // grid.shape.replicas)
        barrier = grid.last[step, (replica + 1) * grid.shape.m - 1, 0]
        if sharded:  # by the time of the barrier the state has travelled on; the optimizer is applied where it is then
            anchor = _last_use(grid, j, grid.position[barrier])
            device = grid.task_device[anchor]
    return Updates(first, step, stage, device, anchor, barrier, in_lanes)


def lanes_with(grid: Grid, updates: Updates) -> tuple[Ints, Ints]:
    """All lanes' tasks and where each lane begins, with the updates that take their devices' time in their places.

    As Algorithm 1 of the CDP paper has it: a worker updates a stage between that stage's backward and its next task,
    and waits for the partial sum that it adds to if that is late. Several at one place come in their stages' order.
    """
    tasks, first = grid.lane_tasks, np.append(grid.lane_heads, len(grid.lane_tasks))
    if not updates.in_lanes:
        return tasks, first
    place = updates.place(grid)
    order = np.argsort(place, kind="stable")
    return np.insert(tasks, place[order] + 1, updates.node[order]), first + np.searchsorted(place[order], first)


def take_turns(grid: Grid, updates: Updates, build: Builder) -> None:
    """Let the host of each device make its updates one after another, in the order of what they follow."""
    order = sort_by(updates.device, updates.position(grid), updates.stage)
    before, after = order[:-1], order[1:]
    same = updates.device[before] == updates.device[after]
    build.link(updates.node[before[same]], updates.node[after[same]], Edge.ROOM)


def beside_old(grid: Grid, updates: Updates) -> Ints:
    """Whether each update's device still has backwards to do, after it, with the version that it replaces.

    Otherwise the new version is written where the old one is.
    """
    follows = updates.position(grid)
    result = np.zeros(len(updates), dtype=np.int64)
    if grid.together:  # every device updates for itself, as many in each step
        replaced_by = grid.holders.row[0] + grid.backward_version * (len(updates) // grid.steps)
    else:
        replaced_by = grid.backward_version * grid.n + grid.tij[2]
    here = grid.device == updates.device[replaced_by]
    result[replaced_by[here & (grid.position[grid.backward] > follows[replaced_by])]] = 1
    return result


def owner(grid: Grid, stage: Ints) -> Ints:
    """The device where the sharded state of a stage starts."""
    return stage % grid.devices


def uses(grid: Grid) -> tuple[Ints, Ints]:
    """All compute tasks by stage, in the schedule's order, and where each stage begins among them."""
    stage = grid.by_task(grid.tij[2])
    order = sort_by(stage, grid.position)
    return order, heads(stage[order])


def _last_use(grid: Grid, stage: Ints, position: Ints) -> Ints:
    """The last task of each stage at or before a position."""
    order, first = uses(grid)
    span = int(grid.position.max()) + 1
    key = runs(first, len(order)).astype(np.int64) * span + grid.position[order]
    return order[np.searchsorted(key, stage.astype(np.int64) * span + position, side="right") - 1]

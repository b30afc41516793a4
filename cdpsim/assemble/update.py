"""Where the optimizer is applied: which device makes theta_{t+1} of a stage, after which of its tasks."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cdpsim.assemble.grid import Grid
from cdpsim.columns import Ints, heads, runs, sort_by
from cdpsim.schedules import State


@dataclass(frozen=True, eq=False)
class Updates:
    """A row for each update, in the order of their nodes.

    Where steps flush, one for every device that makes the new version; else exactly one for each (step, stage), in
    that order, which follows the compute task `anchor` on its device and, where the rule has a barrier, the task
    `barrier` anywhere.
    """

    first_node: int
    step: Ints
    stage: Ints
    device: Ints
    anchor: Ints | None = None
    barrier: Ints | None = None

    def __len__(self) -> int:
        return len(self.step)

    def place(self, grid: Grid) -> Ints:
        """The place in its lane of what each update comes after: its anchor, or the last task until the barrier."""
        assert self.anchor is not None
        place = grid.rank[self.anchor]
        return place if self.barrier is None else grid.last_until(place, grid.position[self.barrier])

    @cached_property
    def node(self) -> Ints:
        """The node of each update."""
        return np.arange(self.first_node, self.first_node + len(self), dtype=np.int32)


def place_updates(grid: Grid) -> Updates:
    """Whoever holds all of a stage's gradients applies them."""
    first = len(grid.kind)
    t, j = (index.ravel() for index in np.indices((grid.steps, grid.n), dtype=np.int32))
    if grid.schedule.order.flush:
        if grid.schedule.state is State.SHARDED:
            return Updates(first, t, j, owner(grid, j))
        return Updates(first, grid.holders.step, grid.holders.stage, grid.holders.device)
    anchor = grid.backward[:, -1].ravel()
    barrier = np.repeat(grid.backward[:, -1, 0], grid.n) if grid.rule.barrier else None
    if barrier is not None and grid.schedule.state is State.SHARDED:
        # By the time of the barrier the state has travelled on; the optimizer is applied where it is then.
        anchor = _last_use(grid, j, grid.position[barrier])
    return Updates(first, t, j, grid.task_device[anchor], anchor, barrier)


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

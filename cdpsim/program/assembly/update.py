"""Where the optimizer is applied: which device makes theta_{t+1} of a stage, after which of its tasks."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cdpsim.numeric.columns import Ints, group_numbers, group_starts, sort_by
from cdpsim.program import EdgeKind
from cdpsim.program.assembly.build import Builder
from cdpsim.program.assembly.tables import Lanes, Passes, Tables
from cdpsim.schedules.state import Home


@dataclass(frozen=True, eq=False)
class Updates:
    """A row for each update, in the order of their nodes.

    Where holders are together and have optimizer states of their own, there is one for every device that makes the new
    version, else one for each (step, stage), in that order. It follows the compute task `anchor` on its device: the
    last that gives it a gradient, or the last of its device's step where steps end for all devices. Where the rule has
    a barrier, it follows the task `barrier` anywhere, too.
    """

    first_node: int
    step: Ints
    stage: Ints
    device: Ints
    anchor: Ints
    in_step: int  # how many there are in each step
    barrier: Ints | None = None
    in_lanes: bool = False  # they take their devices' time

    def __len__(self) -> int:
        return len(self.step)

    def place(self, tables: Tables) -> Ints:
        """The place in its lane of what each update comes after: its anchor, or the last task until the barrier."""
        lanes = tables.lanes
        place = lanes.rank[self.anchor]
        if self.barrier is None:
            return place
        return np.maximum(place, lanes.last_until(place, tables.passes.position[self.barrier]))

    def lane(self, tables: Tables) -> Ints:
        """The lane of each update on its device, -1 where it takes none."""
        if not self.in_lanes:
            return np.full(len(self), -1)
        return tables.lanes.lane[tables.lanes.tasks[self.place(tables)]]

    def position(self, tables: Tables) -> Ints:
        """The position in the schedule's order of what each update comes after."""
        return tables.passes.position[self.anchor if self.barrier is None else self.barrier]

    @cached_property
    def node(self) -> Ints:
        """The node of each update."""
        return np.arange(self.first_node, self.first_node + len(self), dtype=np.int32)


def place_updates(tables: Tables, *, in_lanes: bool = False) -> Updates:
    """Let those that have optimizer states make updates, when they have all of a stage's gradients."""
    passes, state = tables.passes, tables.passes.schedule.state
    if passes.together:
        holders = tables.holders
        rows = holders.owners if state.optimizer is Home.OWNED else slice(None)
        step, stage, device, anchor = (
            column[rows] for column in (holders.step, holders.stage, holders.device, holders.last_task)
        )
        if passes.schedule.order.together:
            anchor = tables.lanes.last_in_step(device, step)
    else:
        step, stage = (index.ravel() for index in np.indices((passes.steps, passes.n), dtype=np.int32))
        anchor = passes.last[passes.first[1:] - 1].ravel()
        if passes.listing:  # which may end a step with another micro-batch than its last
            anchor = tables.holders.last_task[tables.holders.owners]
        device = passes.task_device[anchor]
    barrier = None
    if passes.rule.barrier:
        barrier = passes.last[passes.last_of(step, device // passes.own_devices), 0]
        if state.travels:  # by the time of the barrier the state is with another user, who applies the optimizer
            anchor = _last_use(passes, stage, passes.position[barrier])
            device = passes.task_device[anchor]
    in_step = len(step) // passes.steps
    return Updates(passes.tasks, step, stage, device, anchor, in_step, barrier, in_lanes)


def pull(lanes: Lanes, build: Builder, message: Ints, place: Ints, ahead: Ints | int) -> None:
    """Let messages wait for the tasks that come so far ahead of a place in the lane, where there are any."""
    some, task = lanes.before(place, ahead)
    build.link(task, message[some], EdgeKind.ROOM)


def lanes_with(tables: Tables, updates: Updates) -> tuple[Ints, Ints]:
    """All lanes' tasks and where each lane begins, with the updates that take their devices' time in their places.

    As Algorithm 1 of the CDP paper has it: a worker updates a stage between that stage's backward and its next task,
    and waits for the partial sum that it adds to if that is late. Several at one place come in their stages' order.
    """
    tasks, first = tables.lanes.tasks, np.append(tables.lanes.heads, len(tables.lanes.tasks))
    if not updates.in_lanes:
        return tasks, first
    place = updates.place(tables)
    order = np.argsort(place, kind="stable")
    return np.insert(tasks, place[order] + 1, updates.node[order]), first + np.searchsorted(place[order], first)


def take_turns(tables: Tables, updates: Updates, build: Builder) -> None:
    """Let the host of each device make its updates one after another, in the order of what they follow."""
    order = sort_by(updates.device, updates.position(tables), updates.stage)
    before, after = order[:-1], order[1:]
    same = updates.device[before] == updates.device[after]
    build.link(updates.node[before[same]], updates.node[after[same]], EdgeKind.ROOM)


def beside_old(tables: Tables, updates: Updates) -> Ints:
    """Whether what each update starts from is still needed on its device: by a backward after it, or a later update.

    Otherwise the new version is written where the old one is.
    """
    passes, follows, steps = tables.passes, updates.position(tables), tables.passes.steps
    result = np.zeros(len(updates), dtype=np.int64)
    base = passes.line.base if passes.line else np.arange(steps)
    for step in range(steps) if passes.line else ():
        result[step * updates.in_step : (step + 1) * updates.in_step] = (base[step + 1 :] == base[step]).any()
    replaces = np.full(steps + 1, -1)  # of each version, the last step whose update starts from it
    np.maximum.at(replaces, base, np.arange(steps))
    replacing = replaces[passes.backward_version]
    each = passes.together and passes.schedule.state.optimizer is Home.COPIED  # holder updates for itself
    row = tables.holders.row % updates.in_step if each else passes.tij[2]
    replaced_by = replacing * updates.in_step + row
    late = (replacing >= 0) & (passes.device == updates.device[replaced_by])
    late &= passes.position[passes.last] > follows[replaced_by]
    result[replaced_by[late]] = 1
    return result


def uses(passes: Passes) -> tuple[Ints, Ints]:
    """All compute tasks by stage, in the schedule's order, and where each stage begins among them."""
    stage = passes.by_task(passes.tij[2])
    order = sort_by(stage, passes.position)
    return order, group_starts(stage[order])


def _last_use(passes: Passes, stage: Ints, position: Ints) -> Ints:
    """The last task of each stage at or before a position."""
    order, first = uses(passes)
    span = int(passes.position.max()) + 1
    key = group_numbers(first, len(order)).astype(np.int64) * span + passes.position[order]
    return order[np.searchsorted(key, stage.astype(np.int64) * span + position, side="right") - 1]

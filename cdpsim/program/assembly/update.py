"""Updates: which device makes theta_{t+1} of a stage, and after which of its tasks."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cdpsim.numeric.columns import Ints, group_numbers, group_starts, sort_by
from cdpsim.program import EdgeKind
from cdpsim.program.assembly.build import Builder
from cdpsim.program.assembly.task_tables import DeviceLanes, Passes, Tables
from cdpsim.schedules.state import Placed, When


@dataclass(frozen=True, eq=False)
class Updates:
    """A row for each update, in the order of their nodes.

    Where copies are together and have optimizer states of their own, there is one for every device that makes the new
    version, else one for each (step, stage), in that order. It follows the compute task `after` on its device: the
    last that gives it a gradient, or the last of its device's step where steps end for all devices. Where the rule has
    a barrier, it follows the task `barrier` anywhere, too.
    """

    tables: Tables
    step: Ints
    stage: Ints
    device: Ints
    after: Ints
    barrier: Ints | None = None
    in_lanes: bool = False  # they take their devices' time
    made: Ints | None = None  # the version that each makes; None: the one after its step's number

    def __len__(self) -> int:
        return len(self.step)

    @property
    def version(self) -> Ints:
        """The version that each makes."""
        return self.step + 1 if self.made is None else self.made

    @property
    def in_step(self) -> int:
        """The number of updates that make a version."""
        return len(self) // (self.tables.passes.steps if self.made is None else int(self.made[-1]))

    @cached_property
    def node(self) -> Ints:
        """The node of each update."""
        first = self.tables.passes.tasks
        return np.arange(first, first + len(self), dtype=np.int32)

    @property
    def lane_place(self) -> Ints:
        """The place in the lanes of the task that each update comes behind: `after`, or the last until the barrier."""
        lanes = self.tables.lanes
        place = lanes.rank[self.after]
        if self.barrier is None:
            return place
        return np.maximum(place, lanes.last_until(place, self.order_position))

    @property
    def lane(self) -> Ints:
        """The lane of each update on its device, -1 where it takes none."""
        lanes = self.tables.lanes
        return lanes.lane[lanes.tasks[self.lane_place]] if self.in_lanes else np.full(len(self), -1)

    @property
    def order_position(self) -> Ints:
        """The position, in the schedule's order, of the task that each update comes behind."""
        return self.tables.passes.position[self.after if self.barrier is None else self.barrier]


def place_updates(tables: Tables, *, in_lanes: bool = False) -> Updates:
    """Let those that have optimizer states make updates, when they have all of a stage's gradients."""
    passes, state = tables.passes, tables.passes.schedule.state
    if not passes.schedule.order.waits:
        return _place_version_by_version(tables, in_lanes=in_lanes)
    if passes.together:
        copies = tables.copies
        rows = copies.owners if state.optimizer is Placed.OWNED else slice(None)
        step, stage, device, after = (c[rows] for c in (copies.step, copies.stage, copies.device, copies.last_task))
        if passes.schedule.order.together:
            after = tables.lanes.step_ends[step, device]
    else:
        step, stage = (index.ravel() for index in np.indices((passes.steps, passes.n), dtype=np.int32))
        after = passes.last[passes.first[1:] - 1].ravel()
        if passes.listing:  # which may end a step with another micro-batch than its last
            after = tables.copies.last_task[tables.copies.owners]
        device = passes.task_device[after]
    barrier = None
    if passes.rule.barrier:
        in_replicas = np.cumsum(passes.counts, axis=1)[step, device // passes.replica_devices]
        barrier = passes.last[passes.first[step] + in_replicas - 1, 0]  # the end of the last pass of the step there
        if state.travels:  # by the time of the barrier the state is with another user, who applies the optimizer
            after = _last_use_until(passes, stage, passes.position[barrier])
            device = passes.task_device[after]
    return Updates(tables, step, stage, device, after, barrier, in_lanes)


def _place_version_by_version(tables: Tables, *, in_lanes: bool) -> Updates:
    """Let all copies make each version of a run in its step; those of local steps at the end of it."""
    copies, step = tables.copies, tables.passes.made.step
    row = (step[:, None] * copies.in_step + np.arange(copies.in_step)).ravel()
    made = np.repeat(np.arange(1, len(step) + 1, dtype=np.int32), copies.in_step)
    step, stage, device, after = (c[row] for c in (copies.step, copies.stage, copies.device, copies.last_task))
    if tables.passes.schedule.order.local:
        after = tables.lanes.step_ends[step, device]
    return Updates(tables, step, stage, device, after, in_lanes=in_lanes, made=made)


def pull(lanes: DeviceLanes, build: Builder, message: Ints, place: Ints, ahead: Ints | int) -> None:
    """Let messages wait for the tasks that come so far ahead of a place in the lane, where there are any."""
    rows, task = lanes.before(place, ahead)
    build.link(task, message[rows], EdgeKind.ROOM)


def lanes_with(updates: Updates) -> tuple[Ints, Ints]:
    """Return all lanes' tasks, among them the updates that take their devices' time, and where each lane begins.

    As Algorithm 1 of the CDP paper has it: a worker updates a stage between that stage's backward and its next task,
    and waits for the partial sum that it adds to if that is late. Several at one place come in their stages' order.
    """
    lanes = updates.tables.lanes
    first = np.append(lanes.heads, len(lanes.tasks))
    if not updates.in_lanes:
        return lanes.tasks, first
    place = updates.lane_place
    order = np.argsort(place, kind="stable")
    return np.insert(lanes.tasks, place[order] + 1, updates.node[order]), first + np.searchsorted(place[order], first)


def take_turns(updates: Updates, build: Builder, shared: Iterable[tuple[Ints, Ints]]) -> None:
    """Let the host of each device make its updates one after another, in the order of what they follow.

    Where sums do not wait for the end of a step, that is the last task that gives each a gradient. Of `shared` tensors
    some updates (the first rows of each pair) come after those that make them (the second rows).
    """
    passes, copies, turn = updates.tables.passes, updates.tables.copies, updates.order_position
    at_once = passes.schedule.order.local or passes.schedule.state.reduce is When.END
    if passes.together and not at_once and len(copies) == len(updates):
        turn = passes.position[copies.last_task]
        for again, counted in shared:
            turn[again] = np.maximum(turn[again], turn[counted])
    order = sort_by(updates.device, turn, updates.version, updates.stage)
    same = updates.device[order[:-1]] == updates.device[order[1:]]
    build.link(updates.node[order[:-1][same]], updates.node[order[1:][same]], EdgeKind.ROOM)


def base_is_still_needed(updates: Updates) -> Ints:
    """Return 1 for each update whose old version is still needed on its device, else 0.

    A backward after it may need what it starts from, or a later update. Otherwise the new version is written where the
    old one is.
    """
    tables, passes, steps = updates.tables, updates.tables.passes, updates.tables.passes.steps
    replaces = np.full(steps + 1, -1)  # of each version, the last step whose update starts from it
    np.maximum.at(replaces, passes.base, np.arange(steps))
    result = np.repeat((replaces[passes.base] > np.arange(steps)).astype(np.int64), updates.in_step)
    replacing = replaces[passes.backward_version]
    each = passes.together and passes.schedule.state.optimizer is Placed.COPIED  # copy updates for itself
    row = tables.copies.row % updates.in_step if each else passes.tij[2]
    replaced_by = replacing * updates.in_step + row
    late = (replacing >= 0) & (passes.device == updates.device[replaced_by])
    late &= passes.position[passes.last] > updates.order_position[replaced_by]
    result[replaced_by[late]] = 1
    return result


def uses(passes: Passes) -> tuple[Ints, Ints]:
    """Return all compute tasks by stage, in the schedule's order, and where each stage begins among them."""
    stage = passes.by_task(passes.tij[2])
    order = sort_by(stage, passes.position)
    return order, group_starts(stage[order])


def _last_use_until(passes: Passes, stage: Ints, position: Ints) -> Ints:
    """Return the last task of each stage at or before a position."""
    order, first = uses(passes)
    span = int(passes.position.max()) + 1
    key = group_numbers(first, len(order)).astype(np.int64) * span + passes.position[order]
    return order[np.searchsorted(key, stage.astype(np.int64) * span + position, side="right") - 1]

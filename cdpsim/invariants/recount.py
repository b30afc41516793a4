"""Recount of a run: facts that several laws derive from it, each derived once, without the program's edges.

A law is a list of needs. They follow from tasks, messages and the request, and their nodes are those of the run in
which every collective is one node (`collapsed.py`).
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cdpsim.invariants.collapsed import Collapsed, collapse
from cdpsim.invariants.needs import Needs
from cdpsim.model import Tie
from cdpsim.numeric.columns import Flags, Ints, expand_ranges, find_rows, group_numbers, group_starts, sort_by
from cdpsim.program import Content, Kind, Op
from cdpsim.runs import Run
from cdpsim.schedules.state import Home


class LaneOrder(NamedTuple):
    """The compute tasks, lane after lane, each in its order."""

    order: Ints
    place: Ints  # of each compute task in `order`
    head: Ints  # of each place, the place at which its lane begins


class Recount:
    """A run, and the facts that laws derive from it."""

    def __init__(self, run: Run) -> None:
        program, state = run.program, run.program.state
        self.program, self.costs, self.request = program, run.costs, run.request
        self.start, self.end = run.start, run.end
        self.replicas = run.request.shape.replicas
        self.together = program.together or self.replicas > 1  # collectives sum gradients and hand parameters out
        self.travels = state.travels  # the state of a stage goes from user to user
        self.owned = state.parameters is Home.OWNED  # parameters are in one place between their uses
        self.handed_out = self.owned and not self.travels  # their owners send them for each use
        self.givers = program.gradient_tasks.ravel()  # the tasks that give gradients
        self.updates = np.arange(program.compute, len(program.tasks))

    def report(self, nodes: Ints, problem: str) -> Iterator[str]:
        """Yield a problem of each of these nodes."""
        for node in nodes.tolist():
            yield f"{self.program.describe(node)} {problem}"

    def report_unmet(self, needs: Needs, problem: str, lack: str = "") -> Iterator[str]:
        """Yield the problem of each need whose second node starts too early, and `lack` where there is no first one."""
        run = self.collapsed
        for row in np.flatnonzero((needs.before < 0) | (run.start[needs.after] < run.until(needs))).tolist():
            before, after = (int(ends[row]) for ends in needs)
            early = f"starts before {run.program.describe(before)} {problem}"
            yield f"{run.program.describe(after)} {lack if before < 0 else early}"

    def starts_early(self, key: Ints, turn: Ints, node: Ints, blocks: Flags) -> Flags:
        """Flag rows whose node starts before one that blocks, of the same key and a lower turn, has ended."""
        order = sort_by(key, turn)
        key, turn, row = key[order], turn[order], node[order]
        times, rank = np.unique(self.end[row], return_inverse=True)
        floor = group_numbers(group_starts(key), len(row)).astype(np.int64) * (len(times) + 1)
        latest = np.append(-1, np.maximum.accumulate(floor + np.where(blocks[order], rank + 1, 0)))
        batch = group_starts(key, turn)
        until = latest[batch[group_numbers(batch, len(row))]] - floor  # from 1 on: the latest end of lower turns
        early = np.zeros(len(row), dtype=np.bool_)
        early[order] = (until > 0) & (self.start[row] < times[np.maximum(until, 1) - 1])
        return early

    @cached_property
    def collapsed(self) -> Collapsed:
        """The run in which every collective is one node."""
        program, messages = self.program, self.program.messages
        if self.together and self.request.expands:
            of_collectives = np.isin(messages.content, (Content.GRADIENT, Content.PARAMETERS))
            pieces = np.flatnonzero((messages.op == Op.P2P) & of_collectives)
            if len(pieces):
                return collapse(program, pieces, self.start, self.end)
        return Collapsed(program, np.arange(program.message_nodes.stop), self.start, self.end, self.end[:0, None])

    @cached_property
    def counts(self) -> Ints:
        """The number of micro-batches of each replica (columns) in each step (rows)."""
        shape = self.request.shape
        given = self.request.counts or [[shape.m] * shape.replicas] * self.program.steps
        return np.array(given, dtype=np.int64)

    @cached_property
    def number_in_replica(self) -> Ints:
        """The number of each pass among those of its replica in its step."""
        counts = self.counts.ravel()
        return expand_ranges(np.zeros_like(counts), counts)[1]

    @cached_property
    def shared(self) -> list[Tie]:
        """The tied tensors that several devices have for different stages; sharded states' owners always have."""
        program, copies = self.program, self.owned or self.program.state.optimizer is Home.COPIED
        ties = self.request.model.tied if program.together and copies else ()
        device = program.tasks.device[program.tasks_of_kind(Kind.F)]
        return [t for t in ties if self.owned or (device[:, t.stages] != device[:, t.stages[:1]]).any()]

    @cached_property
    def lanes(self) -> LaneOrder:
        """The lanes without the updates that have a place in them."""
        program = self.program
        compute = program.lane_tasks < program.compute
        order = program.lane_tasks[compute]
        lane = group_numbers(program.lane_start[:-1], len(program.lane_tasks))[compute]
        place = np.empty(program.compute, dtype=np.int64)
        place[order] = np.arange(len(order))
        return LaneOrder(order, place, np.searchsorted(lane, lane))

    @cached_property
    def position(self) -> Ints | None:
        """The position of each compute task in the order that its schedule declares; None if it declares lists."""
        schedule, program = self.request.schedule, self.program
        if schedule.order.lists:
            return None
        t, i, phase = program.pass_step[:, None], self.number_in_replica[:, None], np.arange(program.phases)
        position = schedule.order.position(t, i, phase, self.request.shape)
        return np.broadcast_to(position, (program.passes, program.phases)).ravel()

    @cached_property
    def barriers(self) -> Ints:
        """For each update, the task with which the last micro-batch's pass ends in its step and replica."""
        program, updates = self.program, self.updates
        replica = program.tasks.device[updates] // (program.devices // self.replicas)
        until, step = np.cumsum(self.counts, axis=1), program.tasks.step[updates]
        last = until[step, np.minimum(replica, self.replicas - 1)] - 1
        task: Ints = program.gradient_tasks[program.find_pass(step, last), 0]
        return task

    @cached_property
    def anchors(self) -> Ints:
        """For each update, the last task that gives a gradient to it; where all update together, on its device."""
        program, tasks, updates, giver = self.program, self.program.tasks, self.updates, self.givers
        if not self.together:
            last = program.gradient_tasks[program.first_pass[1:] - 1]
            task: Ints = last[tasks.step[updates], tasks.stage[updates]]
            return task
        giver = giver[np.argsort(-self.lanes.place[giver], kind="stable")]
        rows, wanted = ((tasks.step[nodes], tasks.stage[nodes], tasks.device[nodes]) for nodes in (giver, updates))
        return giver[find_rows(rows, wanted)]

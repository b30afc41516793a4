"""A run, and what several laws recount of it, each once; nothing here reads the program's edges.

A law is a list of needs. They follow from tasks, messages and the request, and their nodes are those of the run with
every collective in one piece (`pieces.py`).
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdpsim.cluster import Cluster
from cdpsim.invariants.needs import Needs
from cdpsim.invariants.pieces import Whole, put_together
from cdpsim.model import Tie
from cdpsim.numeric.columns import Ints, find_rows, group_numbers, group_starts, sort_by
from cdpsim.program import Content, Kind, Op
from cdpsim.runs import Run
from cdpsim.schedules.state import Home


class Lanes(NamedTuple):
    """The compute tasks, lane after lane, each in its order."""

    order: Ints
    rank: Ints  # of each compute task, its place there
    head: Ints  # of each place, the place at which its lane begins


class Recount:
    """A run, with what is recounted of it for several laws."""

    def __init__(self, run: Run) -> None:
        self.program, self.costs, self.request = run.program, run.costs, run.request
        self.start, self.end = run.start, run.end

    def names(self, nodes: Ints, problem: str) -> Iterator[str]:
        """Say it of each of some nodes."""
        for node in nodes.tolist():
            yield f"{self.program.describe(node)} {problem}"

    def unmet(self, needs: Needs, problem: str) -> Iterator[str]:
        """Say of each need that is not met what the node before has not done."""
        whole = self.whole
        early = np.flatnonzero(whole.start[needs.after] < whole.until(needs))
        for row in early.tolist():
            before, after = (whole.program.describe(int(ends[row])) for ends in needs)
            yield f"{after} starts before {before} {problem}"

    def early(self, key: Ints, turn: Ints, node: Ints, blocks: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows are of nodes that start before one that blocks, of the same key and a lower turn, has ended."""
        order = sort_by(key, turn)
        key, turn, row = key[order], turn[order], node[order]
        times, rank = np.unique(self.end[row], return_inverse=True)
        floor = group_numbers(group_starts(key), len(row)).astype(np.int64) * (len(times) + 1)
        latest = np.append(-1, np.maximum.accumulate(floor + np.where(blocks[order], rank + 1, 0)))
        batch = group_starts(key, turn)
        until = latest[batch[group_numbers(batch, len(row))]] - floor  # from 1 on: the latest end of lower turns
        some = np.flatnonzero(until > 0)
        result = np.zeros(len(row), dtype=np.bool_)
        result[order[some]] = self.start[row[some]] < times[until[some] - 1]
        return result

    @cached_property
    def whole(self) -> Whole:
        """The run with collectives in one piece."""
        program, messages = self.program, self.program.messages
        if self.together and self.request.expands:
            pieces = np.flatnonzero(
                (messages.op == Op.P2P) & np.isin(messages.content, (Content.GRADIENT, Content.PARAMETERS))
            )
            if len(pieces):
                return put_together(program, pieces, self.start, self.end)
        return Whole(program, np.arange(program.message_nodes.stop), self.start, self.end, self.end[:0, None])

    @cached_property
    def replicas(self) -> int:
        """How many replicas of a pipeline there are."""
        return self.request.shape.replicas

    @cached_property
    def counts(self) -> Ints:
        """How many micro-batches each replica has in each step."""
        shape = self.request.shape
        given = self.request.counts or [[shape.m] * shape.replicas] * self.program.steps
        return np.array(given, dtype=np.int64)

    @cached_property
    def own(self) -> Ints:
        """The number of each pass among those of its replica in its step."""
        counts = self.counts.ravel()
        return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)

    @cached_property
    def together(self) -> bool:
        """Whether gradients are summed, and sharded parameters handed out, by collectives."""
        return self.program.together or self.replicas > 1

    @cached_property
    def travels(self) -> bool:
        """Whether the state of a stage goes from user to user."""
        return self.program.state.travels

    @cached_property
    def handed_out(self) -> bool:
        """Whether owners hand parameters out for each use."""
        return self.owned and not self.travels

    @cached_property
    def owned(self) -> bool:
        """Whether parameters are in one place between their uses."""
        return self.program.state.parameters is Home.OWNED

    @cached_property
    def cluster(self) -> Cluster:
        """What it ran on."""
        return self.request.cluster

    @cached_property
    def shared(self) -> list[Tie]:
        """The tied tensors that several devices have for different stages; sharded states' owners always have."""
        program, copies = self.program, self.owned or self.program.state.optimizer is Home.COPIED
        ties = self.request.model.tied if program.together and copies else ()
        device = program.tasks.device[program.tasks_of_kind(Kind.F)]
        return [t for t in ties if self.owned or (device[:, t.stages] != device[:, t.stages[:1]]).any()]

    @cached_property
    def givers(self) -> Ints:
        """The tasks that give gradients."""
        return self.program.gradient_tasks.ravel()

    @cached_property
    def updates(self) -> Ints:
        """The nodes of updates."""
        return np.arange(self.program.compute, len(self.program.tasks))

    @cached_property
    def lanes(self) -> Lanes:
        """The lanes without the updates that have a place in them."""
        program = self.program
        compute = program.lane_tasks < program.compute
        order, lane = (
            program.lane_tasks[compute],
            group_numbers(program.lane_start[:-1], len(program.lane_tasks))[compute],
        )
        rank = np.empty(program.compute, dtype=np.int64)
        rank[order] = np.arange(len(order))
        return Lanes(order, rank, np.searchsorted(lane, lane))

    @cached_property
    def position(self) -> Ints | None:
        """Each compute task's position in the order that its schedule declares; None of one that has lists."""
        schedule, program = self.request.schedule, self.program
        if schedule.order.lists:
            return None
        t, i, phase = program.pass_step[:, None], self.own[:, None], np.arange(program.phases)
        position = schedule.order.position(t, i, phase, self.request.shape)
        return np.broadcast_to(position, (program.passes, program.phases)).ravel()

    @cached_property
    def barriers(self) -> Ints:
        """Of each update, the task with which the last micro-batch's pass ends in its step and replica."""
        program, updates = self.program, self.updates
        replica = program.tasks.device[updates] // (program.devices // self.replicas)
        until, step = np.cumsum(self.counts, axis=1), program.tasks.step[updates]
        last = until[step, np.minimum(replica, self.replicas - 1)] - 1
        task: Ints = program.gradient_tasks[program.find_pass(step, last), 0]
        return task

    @cached_property
    def anchors(self) -> Ints:
        """Of each update, the last task that gives a gradient to it; where all update together, on its device."""
        program, tasks, updates, giver = self.program, self.program.tasks, self.updates, self.givers
        if not self.together:
            last = program.gradient_tasks[program.first_pass[1:] - 1]
            task: Ints = last[tasks.step[updates], tasks.stage[updates]]
            return task
        giver = giver[np.argsort(-self.lanes.rank[giver], kind="stable")]
        rows, wanted = ((tasks.step[nodes], tasks.stage[nodes], tasks.device[nodes]) for nodes in (giver, updates))
        return giver[find_rows(rows, wanted)]

"""Buffers of parameters that are handed out for each use, and of gradients on their way to their owners."""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Flags, Ints, sort_by
from cdpsim.program import Category, Kind
from cdpsim.program.assembly.build import Location, end, start
from cdpsim.program.assembly.runtime import Keeping, gradients_at_first
from cdpsim.schedules.state import Home, When


class Uses(NamedTuple):
    """Tasks that use parameters which messages bring them: columns with a row for each use."""

    message: Ints
    task: Ints
    last: Ints  # with whose end they go
    where: Location
    size: Ints


class Sharded:
    """The time for which a runtime holds what it gathers, and what it gives to sums."""

    def __init__(self, keeping: Keeping) -> None:
        tables = keeping.tables
        self.passes, self.lanes, self.holders = tables.passes, tables.lanes, tables.holders
        self.keeping, self.model, self.habits, self.build = keeping, keeping.model, keeping.habits, keeping.build
        self._dropped = np.zeros(self.passes.tasks, dtype=np.int64)  # gathered parameters that go with each task
        self._ahead = np.zeros(self.passes.tasks, dtype=np.int64)  # what is there when it begins, beyond what it makes

    @cached_property
    def before(self) -> Ints:
        """The task before each one in its lane, or -1."""
        before = np.full(self.passes.tasks, -1, dtype=np.int32)
        task, earlier = self.lanes.before(self.lanes.rank, 1)
        before[task] = earlier
        return before

    def hold_gathered(self, uses: Uses, *, early: bool) -> None:
        """Hold gathered parameters from their arrival to the end of their use, and what a runtime holds beside them.

        Messages that --prefetch brings `early` say themselves from when on they need room.
        """
        message, task, last, where, size = uses
        np.add.at(self._dropped, last, size)
        if self.habits.gathers == "copied":
            self.build.hold(Category.PARAMETERS, where, size, start(task), end(last))
            self.build.land(message, where, size, self._copied_until(task))
            if self.passes.schedule.state.parameters is Home.SPLIT:  # an owner has no share to copy
                self._hold_while_copied(uses)
        else:
            self.build.hold(Category.PARAMETERS, where, size, end(message), end(last))
            self.build.land(message, where, size)
        if self.habits.collective_copies:
            self.build.land(message, where, size)
        if self.habits.backward_prefetch and not early:
            self._hold_ahead(uses)

    def _copied_until(self, task: Ints) -> Ints:
        """Return when the buffers go from which the parameters of tasks are copied.

        A backward's goes at once, a forward's when the next forward begins, or with the end of the last one.
        """
        forth, after = self.passes.kind == Kind.F, self.forward_behind[task]
        return np.where(after >= 0, start(after), np.where(forth[task], end(task), start(task)))

    @cached_property
    def forward_behind(self) -> Ints:
        """The forward behind each forward in its lane, or -1."""
        forth = self.passes.kind == Kind.F
        follows = np.flatnonzero(forth & forth[self.before])
        after = np.full(self.passes.tasks, -1, dtype=np.int32)
        after[self.before[follows]] = follows
        return after

    def _hold_while_copied(self, uses: Uses) -> None:
        """Hold a forward's buffer while the next forward's parameters are copied from their own.

        That forward has made nothing then. So the buffer counts as far as it is more than what the forward makes.
        """
        rows = np.flatnonzero(np.isin(self.forward_behind[uses.task], uses.task))
        after, where = self.forward_behind[uses.task[rows]], uses.where.take(rows)
        transient = (self.model.size("forward_transient") + self.keeping.unused_inputs)[self.passes.stage_of(after)]
        more = np.maximum(uses.size[rows] - self._stash(after) - transient, 0)
        self.build.hold(Category.COMMUNICATION, where, more, start(after), end(after))

    def _stash(self, task: Ints) -> Ints:
        """Return what the passes of tasks keep from their forwards."""
        return self.keeping.stash_sizes()[task // self.passes.phases, self.passes.stage_of(task)]

    def _hold_ahead(self, uses: Uses) -> None:
        """Hold the parameters of a backward from the start of the one before it on.

        They are gathered before that one has made anything. So a copy that the collective makes meanwhile counts there
        as far as it is more than what the backward makes.
        """
        backward = self.passes.kind != Kind.F
        rows = np.flatnonzero(backward[uses.task] & backward[self.before[uses.task]])
        before, where, size = self.before[uses.task[rows]], uses.where.take(rows), uses.size[rows]
        self.build.hold(Category.COMMUNICATION, where, size, start(before), start(uses.message[rows]))
        if self.habits.collective_copies:
            more = np.maximum(size - self._made(before), 0)
            self.build.hold(Category.COMMUNICATION, where, more, start(before), end(before))
            self._ahead[before] = more

    def _made(self, task: Ints) -> Ints:
        """Return what backwards make that is there with their highest moments, and not when they begin."""
        passes, stage = self.passes, self.passes.stage_of(task)
        transient = "input_transient" if passes.splits else "backward_transient"
        of_weights = passes.kind[task] == Kind.W
        made = np.where(of_weights, self.model.size("weight_transient")[stage], self.model.size(transient)[stage])
        if self.habits.gradients != "kept":
            first = gradients_at_first(self.model, self.habits, passes)[stage]
            made = made + np.where(self._begins_sum(task), first, 0)
        return made

    def _begins_sum(self, task: Ints) -> Flags:
        """Return whether tasks are the first that give gradients to a sum."""
        passes = self.passes
        gives: Flags = (passes.kind[task] == Kind.W) | np.array(not passes.splits)
        first = passes.schedule.state.reduce is When.EACH or np.isin(task, self.holders.first_task)
        return gives & first

    def hold_reduced(self, sums: Ints, size: Ints, taker: Ints, rows: Ints, at_owner: Flags) -> None:
        """Hold what a runtime holds of gradients that holders give to sums: `taker` has the message of each.

        `rows` are the holders that do; `sums` are the buffers of their own gradients, and at owners of the sums.
        """
        where, size = self.holders.where.take(rows), size[rows]
        if self.habits.collective_copies:
            self.build.hold(Category.COMMUNICATION, where, size, start(taker[rows]), end(taker[rows]))
        if self.habits.reductions == "until-next":
            given, owns, last = sums[rows], np.flatnonzero(at_owner[rows]), self.holders.last_task[rows]
            begin, until = end(last[owns]), end(taker[rows[owns]])
            given[owns] = self.build.hold(Category.GRADIENTS, where.take(owns), size[owns], begin, until)
            earlier, later = self._next_of_pass(last, where.device)
            self.build.keep(given[earlier], end(last[later]))

    def hold_given(self, sums: Ints, task: Ints, message: Ints, where: Location, size: Ints, share: Ints) -> None:
        """Hold what a runtime holds of whole gradients that `task` gives to sums, of which ranks get a `share` each.

        `sums` are the buffers of the gradients.
        """
        next_too = self.habits.reductions == "until-next"
        earlier, later = self._next_of_pass(task, where.device)
        if self.habits.collective_copies:
            self.build.land(message, where, size)
        if next_too:
            self.build.keep(sums[earlier], end(task[later]))
        if (next_too or self.habits.collective_copies) and not self.passes.splits:
            kept = np.zeros_like(size)
            kept[later] = size[earlier] * next_too
            self._hold_both(task, where, size, share, kept)

    def _hold_both(self, task: Ints, where: Location, size: Ints, share: Ints, kept: Ints) -> None:
        """Hold gradients and their copy, of which a sum is made, when a task has ended.

        The copy is the sum's buffer or, beside a share of the sum, a collective's own. The task has let go of all else
        then, and the sum before is done, of which it has `kept` a buffer. So both count as far as they are more than
        what was there.
        """
        stage, boundary = self.passes.stage_of(task), self.keeping.boundary
        above, below = np.append(boundary[:-1], 0)[stage], np.append(0, boundary[:-1])[stage]
        fresh = self._begins_sum(task) & (self.habits.gradients == "fresh")
        given = np.where(fresh, gradients_at_first(self.model, self.habits, self.passes)[stage], size)
        there = given + kept + self._stash(task) + self.model.size("backward_transient")[stage] + above
        there += self._dropped[task] + self._ahead[task]
        more = np.maximum(2 * size + self.habits.collective_copies * share + below - there, 0)
        self.build.hold(Category.COMMUNICATION, where, more, start(task), end(task))

    def _next_of_pass(self, task: Ints, device: Ints) -> tuple[Ints, Ints]:
        """Return the rows of tasks behind which another one of the same device and micro-batch comes, and its row."""
        row = task // self.passes.phases
        order = sort_by(device, row, self.lanes.rank[task])
        device, row = device[order], row[order]
        follows = np.flatnonzero((row[1:] == row[:-1]) & (device[1:] == device[:-1]))
        return order[follows], order[follows + 1]

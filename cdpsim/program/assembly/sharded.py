"""Buffers of parameters that are handed out for each use, and of gradients on their way to their owners."""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from cdpsim.model import Model
from cdpsim.model.runtime import Habits
from cdpsim.numeric.columns import Flags, Ints, sort_by
from cdpsim.program import Category, Kind
from cdpsim.program.assembly.build import Builder, Location, end, start
from cdpsim.program.assembly.runtime import gradients_at_first
from cdpsim.program.assembly.tables import Tables


class Uses(NamedTuple):
    """Tasks that use parameters which messages bring them: columns with a row for each use."""

    message: Ints
    task: Ints
    last: Ints  # with whose end they go
    where: Location
    size: Ints


class Sharded:
    """The time for which a runtime holds what it gathers, and what it gives to sums."""

    def __init__(self, tables: Tables, model: Model, habits: Habits, build: Builder) -> None:
        self.passes, self.lanes, self.holders = tables.passes, tables.lanes, tables.holders
        self.model, self.habits, self.build = model, habits, build

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
        if self.habits.gathers == "copied":
            self.build.hold(Category.PARAMETERS, where, size, start(task), end(last))
            self.build.land(message, where, size, self._copied_until(task))
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
        forth = self.passes.kind == Kind.F
        follows = np.flatnonzero(forth & forth[self.before])
        after = np.full(self.passes.tasks, -1, dtype=np.int32)
        after[self.before[follows]] = follows
        after = after[task]
        return np.where(after >= 0, start(after), np.where(forth[task], end(task), start(task)))

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

    def _made(self, task: Ints) -> Ints:
        """Return what backwards make that is there with their highest moments, and not when they begin."""
        passes, stage = self.passes, self.passes.stage_of(task)
        first = "input_transient" if passes.splits else "backward_transient"
        of_weights = passes.kind[task] == Kind.W
        made = np.where(of_weights, self.model.size("weight_transient")[stage], self.model.size(first)[stage])
        if self.habits.gradients != "kept":
            gives = of_weights | (not passes.splits)
            made = made + np.where(gives, gradients_at_first(self.model, self.habits, passes)[stage], 0)
        return made

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
            self._keep_until_next(given, where, last)

    def _keep_until_next(self, number: Ints, where: Location, task: Ints) -> None:
        """Keep what tasks leave to the ends of the next such tasks of the same device and step."""
        order = sort_by(where.version, where.device, self.lanes.rank[task])
        step, device = where.version[order], where.device[order]
        follows = np.flatnonzero((step[1:] == step[:-1]) & (device[1:] == device[:-1]))
        self.build.keep(number[order[follows]], end(task[order[follows + 1]]))

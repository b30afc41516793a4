"""Exchanges and buffers of workers that go on with a round while the gradients of the last one are summed and applied.

A communication is a reduce-scatter, updates of shares and an all-gather, one after another in each device's stream. It
takes what a worker has handed over, from a buffer of its own that is there always. New parameters come into the same
buffer; when the worker goes on with them, they go where the old ones were. A worker adds up gradients until it has
handed over all that an update which is kept takes: those for an estimate stay where they are.
"""

from functools import cached_property

import numpy as np

from cdpsim.numeric.columns import Ints, group_starts
from cdpsim.program import Category, EdgeKind
from cdpsim.program.assembly.build import Location, end, start
from cdpsim.program.assembly.runtime import gradients_at_first, hold_gradients
from cdpsim.program.assembly.versions import VersionsAxis


class RoundsAxis(VersionsAxis):
    """The holders of all stages, on devices whose communications go beside their tasks."""

    def derive(self) -> None:
        """Derive all messages, dependencies and buffers of what data ranks exchange and hold."""
        self.sum_gradients(np.arange(self.passes.updated))
        provider = self.bring_versions()
        self.start_from_bases()
        self.hold_sums()
        self.hold_communication(provider[self._final[0]])
        self.hold_versions()
        self.hold_states()
        self.hold_bases()
        self.hold_beside_states()

    def bring_versions(self) -> Ints:
        """Bring the versions that tasks read, and those of the last communication, to all holders, and so to readers.

        Return what brings each version to each holder.

        Of several of these, the worker goes on with the last one made, which comes first. It goes on with all stages at
        once; alone, when the last of them is updated.
        """
        passes, step, build = self.passes, self.passes.made.step, self.build
        plan, provider = self.plan_parameters(), self.maker.copy()
        final = self._final
        version = np.union1d(passes.version[passes.version > 0], final)
        if self.state.splits and len(plan.unit):
            each, number = (index.ravel() for index in np.indices((len(version), len(plan.unit))))
            message = self._gather(plan, step[version[each] - 1], number).reshape(len(version), -1)
            build.link(self.maker[version][:, plan.row].ravel(), message[:, plan.inside].ravel())
            provider[version[:, None], plan.row] = message[:, plan.inside]
            for earlier in final[:-1].tolist():
                first, last = (message[np.searchsorted(version, v)] for v in (earlier, final[-1]))
                build.link(last, first, EdgeKind.STREAM)
        reader, row = passes.forward.ravel(), self.holders.row.ravel() % self.holders.in_step
        brought = provider[passes.version.ravel(), row]
        build.link(brought[brought >= 0], reader[brought >= 0])
        alone = np.setdiff1d(np.arange(self.holders.in_step), plan.row)
        read = passes.version[passes.first[:-1], 0]
        taken = self.maker[read][:, alone]
        into = np.broadcast_to(self._first_tasks[:, self.device[alone]], taken.shape)
        build.link(taken[taken >= 0], into[taken >= 0])
        return provider

    @property
    def _final(self) -> Ints:
        """The versions that the last communication makes."""
        made = self.passes.made
        return np.flatnonzero(made.step == self.passes.updated - 1) + 1

    # Memory

    @cached_property
    def _first_tasks(self) -> Ints:
        """The first task of each step and device."""
        lanes, passes = self.tables.lanes, self.passes
        head = lanes.tasks[lanes.step_heads]
        first = np.empty((passes.steps, passes.devices), dtype=np.int32)
        first[passes.step_of(head // passes.phases), passes.task_device[head]] = head
        return first

    def hold_sums(self) -> None:
        """Hold gradients from the first one of what a kept update takes until the last of it is handed over."""
        made, holders, in_step = self.passes.made, self.holders, self.holders.in_step
        kept = ~made.estimate
        first, last = (
            np.append(made.first[kept], self.passes.updated),
            np.append(made.step[kept], self.passes.steps - 1),
        )
        rows = (first[:, None] * in_step + np.arange(in_step)).ravel()
        until = end(self.tables.lanes.step_ends[last][:, self.device].ravel())
        first_size = gradients_at_first(self.model, self.habits, self.passes)[holders.stage[rows]]
        where, size = holders.where.take(rows), self.whole.gradients[rows]
        hold_gradients(self.build, where, size, first_size, holders.first_task[rows], until)

    def hold_communication(self, last: Ints) -> None:
        """Hold a buffer always for what is on its way: what was handed over, then the parameters that come.

        A worker alone needs it, too: its tasks add to the sums while an update takes what was handed over. It is there
        until the last message has ended: that is the node `last` of each holder, which may end after all tasks.
        """
        in_step = self.holders.in_step
        size = np.maximum(self.whole.gradients, self.whole.parameters)[:in_step]
        where = self.holders.where.take(np.arange(in_step))
        buffers = self.build.hold(Category.COMMUNICATION, where, size, np.full(in_step, -1), end(last))
        self.build.keep(buffers, self.at_the_end)

    def hold_versions(self) -> None:
        """Hold the parameters with which a worker goes on, until it goes on with others."""
        passes, in_step, stage = self.passes, self.holders.in_step, self.stage
        read = passes.version[passes.first[:-1], 0]
        change = group_starts(read)
        begin = start(self._first_tasks[change][:, self.device])
        begin[0] = -1
        until = np.append(begin[1:], self.at_the_end[None], axis=0)
        of = np.tile(self.device, len(change)), np.tile(stage, len(change)), np.repeat(read[change], in_step)
        size = np.tile(self.sizes.parameters[:in_step], len(change))
        self.build.hold(Category.PARAMETERS, Location(*of), size, begin.ravel(), until.ravel())

    @cached_property
    def _base_sizes(self) -> Ints:
        """The bytes of parameters that updates start from; 0 where the optimizer's state has a master copy."""
        restored, optimizer = map(self.model.size, ("restored", "optimizer"))
        size: Ints = np.maximum(restored - optimizer, 0)
        return size

    def hold_bases(self) -> None:
        """Hold a share of the parameters from which an estimate starts until the next update has started from it.

        Meanwhile the worker goes on with the estimate, in their place.
        """
        made, size = self.passes.made, self.share(self._base_sizes)[self.stage]
        estimate, kept = np.flatnonzero(made.estimate), np.flatnonzero(~made.estimate)
        after = np.searchsorted(made.base[kept], made.base[estimate])  # the kept version of the same base
        ends = np.append(end(self.maker[1 + kept]), self.at_the_end[None], axis=0)[after]
        device, stage, size = (np.tile(column, len(estimate)) for column in (self.device, self.stage, size))
        where = Location(device, stage, np.repeat(made.base[estimate], self.holders.in_step))
        self.build.hold(Category.PARAMETERS, where, size, start(self.maker[1 + estimate].ravel()), ends.ravel())

    def hold_beside_states(self) -> None:
        """Hold what implementations cannot do without: gradients of shares in fp32, and what estimates change."""
        made, in_step, last = self.passes.made, self.holders.in_step, self.passes.updated - 1
        stage, always = self.stage, np.full(in_step, -1)
        wide, restored, optimizer = map(self.model.size, ("wide_gradients", "restored", "optimizer"))
        if self.habits.wide_shares:
            where = Location(self.device, stage, np.full(in_step, self.passes.steps))
            self.build.hold(Category.GRADIENTS, where, self.share(wide)[stage], always, self.at_the_end)
        if self.habits.saved_states:
            version = 1 + np.flatnonzero(made.estimate)
            size = self.share(np.where(restored > 0, restored - self._base_sizes, optimizer))[stage]
            device, stage, size = (np.tile(column, len(version)) for column in (self.device, stage, size))
            begin, until = (self.maker[version][:, row].ravel() for row in self._ends_of_devices)
            where = Location(device, stage, np.repeat(version, in_step) + last)  # the state itself has `last`
            self.build.hold(Category.OPTIMIZER, where, size, start(begin), end(until))

    @cached_property
    def _ends_of_devices(self) -> tuple[Ints, Ints]:
        """The first and the last holder, by its row in a step, on the device of each."""
        row = np.arange(self.holders.in_step)
        first, last = (np.zeros(self.passes.devices, dtype=np.int64) for _ in range(2))
        first[self.device[::-1]], last[self.device] = row[::-1], row
        return first[self.device], last[self.device]

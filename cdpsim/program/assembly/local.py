"""Workers that update by their own gradients, and by the mean of all workers' parameters after several such steps."""

import numpy as np

from cdpsim.numeric.columns import Ints, group_starts
from cdpsim.program import Category, Content
from cdpsim.program.assembly.build import Location, end
from cdpsim.program.assembly.runtime import gradients_at_first, hold_gradients
from cdpsim.program.assembly.versions import VersionsAxis


class LocalAxis(VersionsAxis):
    """The holders of all stages, on devices that make local steps."""

    def derive(self) -> None:
        """Derive all messages, dependencies and buffers of what data ranks exchange and hold."""
        made = self.passes.made
        is_own = made.own[group_starts(made.step)] > 0
        self.sum_gradients(np.flatnonzero(~is_own))
        self.take_alone(np.flatnonzero(is_own), np.arange(self.holders.in_step))
        self.take_means()
        self.read_newest()
        self.start_from_bases()
        self.hold_sums()
        self.hold_versions()
        self.hold_states()

    def take_means(self) -> None:
        """Take the mean of the parameters that all workers have at the end of each round, in place."""
        made, plan = self.passes.made, self.plan_parameters()
        outer = np.flatnonzero(made.averaged >= 0)
        averaged = made.averaged[outer]
        if not (len(plan.unit) and len(outer)):
            return
        message = self._send_inside(plan, made.step[averaged - 1], Content.PARAMETERS)[:, 0, plan.inside]
        self.build.link(self.maker[averaged][:, plan.row].ravel(), message.ravel())
        self.build.link(message.ravel(), self.maker[1 + outer][:, plan.row].ravel())

    def read_newest(self) -> None:
        """Let forwards wait for the version of their own worker that they read."""
        passes = self.passes
        made = self.maker[passes.version.ravel(), self.holders.row.ravel() % self.holders.in_step]
        self.build.link(made[made >= 0], passes.forward.ravel()[made >= 0])

    # Memory

    def hold_sums(self) -> None:
        """Hold the gradients of each step until its first update."""
        holders, first_size = self.holders, gradients_at_first(self.model, self.habits, self.passes)
        size, first = self.whole.gradients, first_size[holders.stage]
        hold_gradients(self.build, holders.where, size, first, holders.first_task, end(self.node))

    def hold_versions(self) -> None:
        """Hold each version until the next one is written in its place."""
        in_step, many = self.holders.in_step, len(self.maker) - 1
        of = np.tile(self.device, many), np.tile(self.stage, many), np.repeat(np.arange(many), in_step)
        size = np.tile(self.sizes.parameters[:in_step], many)
        begin, until = (end(maker.ravel()) for maker in (self.maker[:-1], self.maker[1:]))
        self.build.hold(Category.PARAMETERS, Location(*of), size, begin, until)

    @property
    def states(self) -> Ints:
        """The bytes of states: the optimizer's, and copies for outer updates, such as the last common parameters."""
        local = self.passes.schedule.order.local
        assert local is not None
        return super().states + local.outer_copies * self.sizes.parameters[: self.holders.in_step]

"""VersionsAxis: workers that make the versions of a run one after another, each in a step of its own or with others."""

from functools import cached_property

import numpy as np

from cdpsim.model import Model
from cdpsim.model.runtime import Habits
from cdpsim.model.stage import Tie
from cdpsim.numeric.columns import Ints, group_starts
from cdpsim.program import Category
from cdpsim.program.assembly.build import Builder, Location, end
from cdpsim.program.assembly.shares import SharedAxis, Sums
from cdpsim.program.assembly.tied import unshared_gradients
from cdpsim.program.assembly.update import Updates


class VersionsAxis(SharedAxis):
    """The holders of all stages, each of which makes every version of its stages, or a share of it."""

    def __init__(self, updates: Updates, model: Model, habits: Habits, build: Builder, once: tuple[Tie, ...]) -> None:
        super().__init__(updates, model, habits, build, once)
        in_step, passes = self.holders.in_step, self.passes
        # The update of each version, from theta_0 on, on each holder; nothing makes theta_0.
        self.maker = np.append(np.full(in_step, -1), updates.node).reshape(-1, in_step)
        # The first version of a step takes its gradients; nothing takes those of steps that are thrown away.
        taker = np.full((passes.steps, in_step), -1)
        taker[: passes.updated] = self.maker[1 + group_starts(passes.made.step)]
        self.node = taker.ravel()

    def sum_gradients(self, steps: Ints) -> None:
        """Sum what workers have at the end of each of some steps before the step's updates."""
        plan = self._plan(self._units(unshared_gradients(self.tables, self.model), self.state.buckets))
        if len(plan.row) and len(steps):
            self._sum(plan, steps)
        self.take_alone(steps, np.setdiff1d(np.arange(self.holders.in_step), plan.row))

    def take_alone(self, steps: Ints, rows: Ints) -> None:
        """Let some holders in a step update by their own gradients, at the end of each of some steps."""
        ends = self.tables.lanes.step_ends[steps][:, self.device[rows]]
        self.build.link(ends.ravel(), self.node.reshape(self.passes.steps, -1)[steps][:, rows].ravel())

    def start_from_bases(self) -> None:
        """Let each update wait for the one that makes the version from which it starts."""
        base = self.passes.made.base
        later = np.flatnonzero(base > 0)
        self.build.link(self.maker[base[later]].ravel(), self.maker[1 + later].ravel())

    def plan_parameters(self) -> Sums:
        """Plan the messages in which the parameters of all stages go."""
        size = np.zeros(self.passes.n, dtype=np.int64)
        np.maximum.at(size, self.holders.stage, self.whole.parameters)  # a device has a tied tensor once
        return self._plan(self._units(size, self.state.buckets))

    @property
    def device(self) -> Ints:
        """The device of each holder in a step."""
        return self.holders.device[: self.holders.in_step]

    @cached_property
    def stage(self) -> Ints:
        """The stage of each holder in a step."""
        return self.holders.stage[: self.holders.in_step]

    @property
    def at_the_end(self) -> Ints:
        """The moment at which the device of each holder in a step has done all its tasks."""
        return end(self.tables.lanes.step_ends[-1, self.device])

    @property
    def states(self) -> Ints:
        """The bytes of each holder's states in a step."""
        return self.sizes.optimizer[: self.holders.in_step]

    def hold_states(self) -> None:
        """Hold states always."""
        in_step = self.holders.in_step
        where = Location(self.device, self.stage, np.full(in_step, self.passes.updated - 1))
        states = self.build.hold(Category.OPTIMIZER, where, self.states, np.full(in_step, -1), end(self.maker[-1]))
        self.build.keep(states, self.at_the_end)

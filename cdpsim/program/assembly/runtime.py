"""Buffers that a runtime holds beyond what a schedule needs, by the habits that `cdpsim.model.runtime` declares.

Habits of a step are those of a flushed pipeline, whose devices do one task after another. A tensor that several
habits hold counts once.
"""

from functools import cached_property

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.model import Model
from cdpsim.model.runtime import HELD, HELD_HABITS, PAPER, PAPER_HABITS, Habits, Runtime, torch_habits
from cdpsim.numeric.columns import Flags, Ints, expand_ranges, group_numbers, group_starts, sort_by
from cdpsim.program import Category, Kind
from cdpsim.program.assembly.build import Builder, Location, end, start
from cdpsim.program.assembly.tables import Passes
from cdpsim.program.assembly.update import Updates
from cdpsim.schedules import Schedule
from cdpsim.schedules.state import Home

NONE = np.empty(0, dtype=np.int32)


def usual_habits(runtime: str, schedule: Schedule) -> Habits:
    """Return the habits of a runtime, by its name, with a schedule: torch's pipelines are flushed lists."""
    if runtime == PAPER.like:
        return PAPER_HABITS
    if not schedule.order.waits or runtime == HELD:
        return HELD_HABITS
    order, state = schedule.order, schedule.state
    is_pipeline = order.together and order.lists is not None and not order.one_place
    sharded = state.parameters is not Home.COPIED
    habits = torch_habits(schedule.torch_sends if is_pipeline else None, sharded=sharded)
    return habits._replace(gradient_buckets="none") if state.gradients is Home.SPLIT else habits


def habits_of(runtime: Runtime, schedule: Schedule) -> Habits:
    """Return the habits of a runtime with a schedule; where steps overlap, none of those of a step is there."""
    habits = usual_habits(runtime.like, schedule)._replace(**runtime.given)
    if schedule.order.together:
        return habits
    if habits.gradients == "kept":
        problem = f"'kept' needs steps that do not overlap, unlike those of {schedule.name}; take 'zeroed' or 'fresh'"
        raise RequestError("gradients", problem)
    return Habits(gradients=habits.gradients, wide_shares=habits.wide_shares, saved_states=habits.saved_states)


class Keeping:
    """The time for which a runtime keeps what passes make and bring."""

    def __init__(self, updates: Updates, model: Model, habits: Habits, build: Builder) -> None:
        self.updates, self.tables, self.passes = updates, updates.tables, updates.tables.passes
        self.model, self.habits, self.build = model, habits, build
        self.boundary, self.kept = model.boundary_in_memory, model.size("kept_output")

    @property
    def retains(self) -> bool:
        """Whether the first parts of split backwards let go of nothing."""
        return self.passes.splits and self.habits.split_backward == "retained"

    @cached_property
    def freed(self) -> Ints:
        """The task with which each pass lets go of what its forward keeps: a backward, or the weights' part of one."""
        passes = self.passes
        return np.where(self.model.frees_early, passes.backward, passes.last) if passes.splits else passes.last

    @cached_property
    def are_whole(self) -> Flags:
        """Whether each pass goes back through a stage as a whole, in the first of two tasks; where parts retain all."""
        listing, shape = self.passes.listing, self.passes.device.shape
        if not self.retains or listing is None:
            return np.zeros(shape, dtype=bool)
        retains = np.array([stage.retained_gradients is not None for stage in self.model.stages])
        whole: Flags = self.passes.of_micro_batch(listing.undivided) & retains
        return whole

    @cached_property
    def is_near(self) -> Flags:
        """Whether each pass and stage has the stage before on its device."""
        device = self.passes.device
        near = np.zeros(device.shape, dtype=bool)
        near[:, 1:] = device[:, 1:] == device[:, :-1]
        return near

    @cached_property
    def unused_inputs(self) -> Ints:
        """The bytes of each stage's input that go with its forward: of layers inside a stage of the schedule's.

        No backward reads them, and the layer before keeps nothing of them.
        """
        shape = self.passes.shape
        inside = np.ones(shape.n, dtype=bool)
        inside[list(shape.layers) or (0 if self.passes.schedule.order.one_place else slice(None))] = False
        inside[1:] &= self.kept[:-1] == 0
        return self.model.size("unused_input") * inside

    def stash_sizes(self) -> Ints:
        """Return what each forward keeps for its backward, but for what is counted elsewhere.

        That is an input that the stage before keeps as well; and what static buffers or a whole batch have.
        """
        size = np.tile(self.model.size("activation") - self.unused_inputs, (len(self.passes), 1))
        if self.habits.static_receives:
            size[:, 1:] -= self.boundary[:-1]
            size[:, :-1] -= self.is_near[:, 1:] * self.kept[:-1]
        else:
            size[:, 1:] -= self.is_near[:, 1:] * self.kept[:-1]
        if self.habits.whole_batch:
            size -= self.model.size("data")
        return np.maximum(size, 0)

    def stash_of(self, task: Ints) -> Ints:
        """Return what the passes of tasks keep from their forwards."""
        return self.stash_sizes()[task // self.passes.phases, self.passes.stage_of(task)]

    def weight_stash_sizes(self) -> tuple[Ints, Ints]:
        """Return what each first part of a split backward leaves: what is its own, and what the stage before has, too.

        Static buffers have the input and the gradient of the output always.
        """
        left, given = self.model.size("weight_activation"), self.model.size("weight_input")
        shared = self.inputs_left()[1]
        if self.habits.static_receives:
            own = left - np.minimum(given, np.append(0, self.boundary[:-1]))
            own -= np.minimum(self.model.size("weight_output"), np.append(self.boundary[:-1], 0))
            return np.broadcast_to(own, shared.shape), np.zeros_like(shared)
        return left - shared, shared

    def inputs_left(self) -> tuple[Ints, Ints]:
        """Return what each first part of a split backward leaves of its input: what it alone keeps, and what is shared.

        The stage before keeps the shared part as well, on the same device.
        """
        given = self.model.size("weight_input") * self.passes.splits
        shared = np.where(self.is_near, np.minimum(np.append(0, self.kept[:-1]), given), 0)
        return given - shared, shared

    def part_transients(self) -> tuple[Ints, Ints]:
        """Return what the two parts of split backwards need only while they run; a whole backward runs as the first."""
        first, second = self.model.size("input_transient"), self.model.size("weight_transient")
        if not self.retains:
            return first, second
        once = self.model.size("backward_transient")
        return np.where(self.are_whole, once, first), np.where(self.are_whole, 0, second)

    # Outputs

    def hold_output(self, of: Location, row: Ints, message: Ints) -> None:
        """Hold outputs of stages that are sent, until they have been or longer; `row` has the passes."""
        build, passes, waiting = self.build, self.passes, (self.boundary - self.kept)[of.stage]
        forward = passes.forward[row, of.stage]
        if self.habits.kept_outputs:
            until = end(passes.backward[row, of.stage])
            number = build.hold(Category.ACTIVATIONS, of, waiting, end(forward), until)
            build.keep(number, end(message))
        else:
            number = build.hold(Category.COMMUNICATION, of, waiting, end(forward), end(message))
        self.hold_while_freed(of, row, self._keep_sent_outputs(number, of, row))

    def _keep_sent_outputs(self, number: Ints, of: Location, row: Ints) -> Ints:
        """Hold outputs that have been sent as long as a runtime refers to them.

        Return the rows of those that are there beyond the tasks that let go of them in their stages.
        """
        if not self.keeps_sent:
            return NONE
        position, freed = self.passes.position, self.freed[row, of.stage]
        until = self.kept_until[self.passes.forward[row, of.stage]]
        longer = np.flatnonzero(until >= 0)
        beyond = position[until[longer]] >= position[freed[longer]]
        self.build.keep(number[longer], end(np.where(beyond, freed[longer], until[longer])))
        rows = longer[beyond]
        size = self.boundary[of.stage[rows]]
        self.build.hold(Category.COMMUNICATION, of.take(rows), size, end(freed[rows]), end(until[rows]))
        return rows

    def hold_while_freed(self, of: Location, row: Ints, beyond: Ints) -> None:
        """Hold outputs of passes during the tasks that let go of them in their stages, where something else has them.

        That is where they are held `beyond` these tasks, or to the end of each backward.
        """
        if not (len(beyond) or self.habits.kept_outputs):
            return
        whole, stage = self.are_whole[row, of.stage], of.stage
        freed, backward = self.freed[row, stage], self.passes.backward[row, stage]
        is_held = (freed == backward) & self.habits.kept_outputs
        is_held[beyond] = True
        if self.passes.splits:
            # The first part of a split backward lets go of the output with its end, the second after it.
            is_held &= whole | np.array([stage.retained_gradients is None for stage in self.model.stages])[stage]
        rows = np.flatnonzero(is_held)
        task, size = np.where(whole, backward, freed)[rows], self.model.size("freed_output")[stage[rows]]
        self.build.hold(Category.ACTIVATIONS, of.take(rows), size, start(task), end(task))

    def hold_own_input(self, of: Location, row: Ints) -> None:
        """Hold outputs that the next stage on the same device has read, until the backwards of their own stages."""
        if not self.habits.kept_outputs:
            return
        stage, passes = of.stage, self.passes
        left, size = self.inputs_left()[0][row, stage + 1], (self.boundary - self.kept)[stage]
        freed, last, until = self.freed[row, stage + 1], passes.last[row, stage + 1], passes.backward[row, stage]
        for part, after in ((size - left, freed), (left, last)):
            rows = np.flatnonzero(passes.position[after] < passes.position[until])
            self.build.hold(Category.ACTIVATIONS, of.take(rows), part[rows], end(after[rows]), end(until[rows]))
        self.hold_while_freed(of, row, np.arange(0))

    def hold_returned(self) -> None:
        """Hold the last stage's outputs until their backwards, or until the next step begins on their device."""
        returned, passes = self.habits.returned_outputs, self.passes
        if not (returned or self.habits.kept_outputs):
            return
        row = np.arange(len(passes), dtype=np.int32)
        of = Location(passes.device[:, -1], np.full(len(row), passes.n - 1), passes.step)
        begin, until = end(passes.forward[:, -1]), end(passes.backward[:, -1])
        waiting = self.build.hold(Category.ACTIVATIONS, of, (self.boundary - self.kept)[of.stage], begin, until)
        self.hold_while_freed(of, row, row if returned else NONE)
        if returned:
            freed = self.freed[:, -1]
            self.build.keep(waiting, end(freed))
            until = self.next_begin(passes.step, of.device)
            number = self.build.hold(Category.ACTIVATIONS, of, self.boundary[of.stage], end(freed), until)
            final = np.flatnonzero(of.version == passes.steps - 1)
            self.keep_for_good(number[final], of.device[final])

    # Sends

    @property
    def keeps_sent(self) -> bool:
        """Whether the runtime holds what has been sent."""
        return self.habits.sends != "until-sent"

    def keep_sent_gradients(self, number: Ints, sender: Ints) -> None:
        """Hold gradients that have been sent as long as a runtime refers to them."""
        if self.keeps_sent:
            until = self.kept_until[sender]
            longer = np.flatnonzero(until >= 0)
            self.build.keep(number[longer], end(until[longer]))

    @cached_property
    def kept_until(self) -> Ints:
        """The task to whose end the runtime holds what each compute task has sent; -1: until it has been sent."""
        passes, lanes = self.passes, self.tables.lanes
        if self.habits.sends == "until-step-end":
            return lanes.step_ends[np.repeat(passes.step, passes.phases), passes.task_device]
        return self._kept_until_next()

    def _kept_until_next(self) -> Ints:
        """Keep what a runtime refers to that has a variable for its last send: an output and a gradient at a time.

        Between forwards and backwards that take turns, outputs are sent together with what is received. So the output
        of the last warm-up forward but one is referred to until gradients are sent by themselves, behind the first
        backward after all forwards; a gradient until the next backward has run.
        """
        passes, task = self.passes, self.tables.lanes.tasks
        until = np.full(passes.tasks, -1, dtype=np.int32)
        device, step = passes.task_device[task], passes.step_of(task // passes.phases)
        first = group_starts(device, step)
        of = group_numbers(first, len(task))
        place = np.arange(len(task))
        forward = passes.kind[task] == Kind.F
        last_forward, first_backward = np.zeros(len(first), np.int64), np.full(len(first), len(task))
        np.maximum.at(last_forward, of[forward], place[forward])
        np.minimum.at(first_backward, of[~forward], place[~forward])
        warm = np.flatnonzero(first_backward - first >= 2)
        until[task[first_backward[warm] - 2]] = task[last_forward[warm] + 1]
        backward = np.flatnonzero(passes.kind[task] == Kind.B)
        follows = of[backward[:-1]] == of[backward[1:]]
        until[task[backward[:-1][follows]]] = task[backward[1:][follows]]
        return until

    # Buffers that are there from the start on

    def hold_always(self) -> None:
        """Hold static receive buffers, the whole batch, and the last stage's inputs that losses refer to."""
        if self.habits.static_receives:
            given = self.boundary[:-1]
            self._hold_for_all(Category.COMMUNICATION, np.append(0, given), -1)
            self._hold_for_all(Category.COMMUNICATION, np.append(given, 0), 1)
            self._hold_while_made()
        elif self.habits.kept_losses and self.passes.n > 1:
            self._hold_inputs_of_losses()
        if self.habits.whole_batch:
            self._hold_for_all(Category.ACTIVATIONS, self.model.size("data"), 0)

    def _hold_for_all(self, category: Category, size: Ints, sender: int) -> None:
        """Hold so much of each stage for each micro-batch that a device has in a step, for good.

        `sender` leads from the stage to the one whose messages come into the buffer.
        """
        passes = self.passes
        step, stage = (
            np.broadcast_to(passes.step[:, None], passes.device.shape),
            np.tile(np.arange(passes.n), (len(passes), 1)),
        )
        order = sort_by(passes.device.ravel(), stage.ravel(), step.ravel())
        device, stage, step = (column.ravel()[order] for column in (passes.device, stage, step))
        first = group_starts(device, stage, step)
        count = np.diff(np.append(first, len(order)))
        head = group_starts(device[first], stage[first])
        most = np.maximum.reduceat(count, head)
        device, stage = device[first][head], stage[first][head]
        where = Location(device, np.clip(stage + sender, 0, passes.n - 1), np.zeros_like(device))
        until = self.last_update(device)
        number = self.build.hold(category, where, most * size[stage], np.full(len(device), -1), until)
        self.keep_for_good(number, device)

    def _hold_while_made(self) -> None:
        """Hold outputs while they are made whose place is then a static buffer of the next stage's.

        Their stage keeps them, too.
        """
        row, stage = np.nonzero(self.is_near[:, 1:])
        forward = self.passes.forward[row, stage]
        of = Location(self.passes.device[row, stage], stage, self.passes.step[row])
        self.build.hold(Category.ACTIVATIONS, of, self.kept[stage], start(forward), end(forward))

    def _hold_inputs_of_losses(self) -> None:
        """Hold the received inputs of the last stage until the step ends on its device.

        Each part begins where the stages let go of it: of what the stage before keeps, of the rest, and of what the
        weights' part of a split backward needs of both.
        """
        passes, near = self.passes, self.is_near[:, -1]
        device, freed, last = passes.device[:, -1], self.freed[:, -1], passes.last[:, -1]
        of = Location(device, np.full(len(device), passes.n - 1), passes.step)
        until = end(self.tables.lanes.step_ends[passes.step, device])
        kept, (left, shared) = np.where(near, self.kept[-2], 0), (column[:, -1] for column in self.inputs_left())
        own = np.where(near & self.habits.kept_outputs, passes.backward[:, -2], freed)
        before = np.where(near, self.freed[:, -2], freed)
        parts = (
            (kept - shared, before),
            (shared, self._later(before, last)),
            (self.boundary[-2] - kept - left, self._later(own, freed)),
            (left, self._later(own, last)),
        )
        for size, after in parts:
            self.build.hold(Category.ACTIVATIONS, of, size, end(after), until)

    def _later(self, one: Ints, other: Ints) -> Ints:
        """Return the later ones of two tasks each on one device."""
        position = self.passes.position
        return np.where(position[one] > position[other], one, other)

    # Moments

    def next_begin(self, step: Ints, device: Ints) -> Ints:
        """Return when the step after begins on devices; of the last step, when that ends."""
        lanes = self.tables.lanes
        head = lanes.tasks[lanes.step_heads[::-1]]  # of several lanes, the first one's
        begins = np.full((self.passes.steps, self.passes.devices), -1, dtype=np.int32)
        begins[self.passes.step_of(head // self.passes.phases), self.passes.task_device[head]] = head
        after = np.minimum(step + 1, self.passes.steps - 1)
        return np.where(after > step, start(begins[after, device]), self.last_update(device))

    def last_update(self, device: Ints) -> Ints:
        """Return when an update of the last step ends on devices, where others may end later."""
        node = self.tables.lanes.step_ends[-1].copy()
        node[self.updates.device[-self.updates.in_step :]] = self.updates.node[-self.updates.in_step :]
        return end(node[device])

    def keep_for_good(self, number: Ints, device: Ints) -> None:
        """Hold buffers on devices until the last step's updates there have ended."""
        updates = self.updates
        final = np.flatnonzero(updates.step == self.passes.steps - 1)
        final = final[sort_by(updates.device[final])]
        low, high = (np.searchsorted(updates.device[final], device, side=side) for side in ("left", "right"))
        of, update = expand_ranges(low, high)
        self.build.keep(number[of], end(updates.node[final[update]]))


def hold_gradients(
    build: Builder, where: Location, size: Ints, first_size: Ints, first_task: Ints, until: Ints
) -> Ints:
    """Hold sums of gradients, and return their buffers.

    While the first task that gives one runs, autograd makes the gradient, and there is only `first_size` of it.
    """
    first_size = np.minimum(first_size, size)
    if (first_size == size).all():
        return build.hold(Category.GRADIENTS, where, size, start(first_task), until)
    build.hold(Category.GRADIENTS, where, first_size, start(first_task), end(first_task))
    return build.hold(Category.GRADIENTS, where, size, end(first_task), until)


def gradients_at_first(model: Model, habits: Habits, passes: Passes) -> Ints:
    """Return what of each stage's gradients there is while the first backward of a step makes them.

    Where .grad is kept all of them are, and where backwards are split: but in torch's own pipelines, whose first stages
    go back as a whole.
    """
    if habits.gradients != "fresh" or (passes.splits and habits.split_backward == "freed"):
        return model.size("gradients")
    first = model.size("first_gradients")
    if not passes.splits:
        return first
    silent = np.array([stage.retained_gradients is None for stage in model.stages])
    return np.where(silent & ~silent.all(), first, model.size("gradients"))

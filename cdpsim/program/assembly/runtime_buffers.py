"""Buffers that a runtime holds beyond a schedule's needs, as rows: content, begin, end, behaviour.

`cdpsim.model.runtime` declares the behaviours. Those of a step are of a flushed pipeline, whose devices do one task
after another. A tensor that several behaviours hold counts once.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.model import Model
from cdpsim.model.runtime import HELD, HELD_BEHAVIOURS, LIKE, PAPER, Behaviours, Runtime, torch_behaviours
from cdpsim.numeric.columns import Flags, Ints, expand_ranges, group_numbers, group_starts, sort_by
from cdpsim.program import Category, Kind
from cdpsim.program.assembly.build import Builder, Location, end, start
from cdpsim.program.assembly.task_tables import Passes
from cdpsim.program.assembly.updates import Updates
from cdpsim.schedules import Schedule
from cdpsim.schedules.state import Placed


def usual_behaviours(runtime: str, schedule: Schedule) -> Behaviours:
    """Return the behaviours of a runtime, by its name, with a schedule: torch's pipelines are flushed lists."""
    if runtime == PAPER.like:
        return Behaviours()
    if not schedule.order.waits or runtime == HELD:
        return HELD_BEHAVIOURS
    order, state = schedule.order, schedule.state
    is_pipeline = order.together and order.lists is not None and not order.one_place
    sharded = state.parameters is not Placed.COPIED
    behaviours = torch_behaviours(schedule.torch_sends if is_pipeline else None, sharded=sharded)
    return behaviours._replace(gradient_buckets="none") if state.gradients is Placed.SPLIT else behaviours


def behaviours_of(runtime: Runtime, schedule: Schedule) -> Behaviours:
    """Return the behaviours of a runtime with a schedule; where steps overlap, none of those of a step is there."""
    behaviours = usual_behaviours(LIKE[runtime.like], schedule)._replace(**runtime.given)
    if schedule.order.together:
        return behaviours
    if behaviours.gradients == "kept":
        problem = f"'kept' needs steps that do not overlap, unlike those of {schedule.name}; take 'zeroed' or 'fresh'"
        raise RequestError("gradients", problem)
    return Behaviours(
        gradients=behaviours.gradients, wide_shares=behaviours.wide_shares, saved_states=behaviours.saved_states
    )


@dataclass(frozen=True, eq=False)
class Keeping:
    """The bytes that passes make and bring, and the tasks that let go of them, by pass and stage or by stage."""

    updates: Updates
    model: Model
    behaviours: Behaviours
    build: Builder
    passes: Passes

    @cached_property
    def boundary(self) -> Ints:
        """The bytes of each stage's output."""
        return self.model.boundary_in_memory

    @cached_property
    def kept(self) -> Ints:
        """The bytes of each stage's output that it keeps for its backward."""
        return self.model.size("kept_output")

    @property
    def is_plain(self) -> bool:
        """Whether outputs are held as long as a schedule needs them."""
        behaviours = self.behaviours
        return behaviours.sends == "until-sent" and not (behaviours.static_receives or behaviours.kept_outputs)

    @property
    def retains(self) -> bool:
        """Whether the first parts of split backwards let go of nothing."""
        return self.passes.splits and self.behaviours.split_backward == "retained"

    @cached_property
    def freed(self) -> Ints:
        """The task that frees the stash of each pass: a backward, or the weights' part of one."""
        passes = self.passes
        return np.where(self.model.frees_early, passes.backward, passes.last) if passes.splits else passes.last

    @cached_property
    def silent(self) -> Flags:
        """Whether the model's file does not say what the first part of each stage's backward retains."""
        return np.array([stage.retained_gradients is None for stage in self.model.stages])

    @cached_property
    def are_whole(self) -> Flags:
        """Whether each pass goes back through a stage as a whole, in the first of two tasks; where parts retain all."""
        listing = self.passes.listing
        if not self.retains or listing is None:
            return np.zeros(self.passes.device.shape, dtype=bool)
        whole: Flags = self.passes.of_micro_batch(listing.undivided) & ~self.silent
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
        """Return the stash of each forward for its backward, but for parts that are counted elsewhere.

        That is an input that the stage before keeps as well; and what static buffers or a whole batch have.
        """
        size = np.tile(self.model.size("activation") - self.unused_inputs, (len(self.passes), 1))
        if self.behaviours.static_receives:
            size[:, 1:] -= self.boundary[:-1]
            size[:, :-1] -= self.is_near[:, 1:] * self.kept[:-1]
        else:
            size[:, 1:] -= self.is_near[:, 1:] * self.kept[:-1]
        if self.behaviours.whole_batch:
            size -= self.model.size("data")
        return np.maximum(size, 0)

    def stash_of(self, task: Ints) -> Ints:
        """Return what the passes of tasks keep from their forwards."""
        return self.stash_sizes()[task // self.passes.phases, self.passes.stage_of(task)]

    def weight_stash_sizes(self) -> tuple[Ints, Ints]:
        """Return the bytes that each first part of a split backward leaves: its own, and shared with the stage before.

        Static buffers have the input and the gradient of the output always.
        """
        left, given = self.model.size("weight_activation"), self.model.size("weight_input")
        shared = self.inputs_left[1]
        if self.behaviours.static_receives:
            own = left - np.minimum(given, np.append(0, self.boundary[:-1]))
            own -= np.minimum(self.model.size("weight_output"), np.append(self.boundary[:-1], 0))
            return np.broadcast_to(own, shared.shape), np.zeros_like(shared)
        return left - shared, shared

    @cached_property
    def inputs_left(self) -> tuple[Ints, Ints]:
        """The bytes of its input that each first part of a split backward leaves: its own, and the shared ones.

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
        return np.where(self.are_whole, self.model.size("backward_transient"), first), np.where(
            self.are_whole, 0, second
        )

    @cached_property
    def sent_until(self) -> Ints:
        """The task to whose end the runtime holds what each compute task has sent; -1: until it has been sent."""
        passes, lanes = self.passes, self.updates.tables.lanes
        if self.behaviours.sends == "until-sent":
            return np.full(passes.tasks, -1)
        if self.behaviours.sends == "until-step-end":
            return lanes.step_ends[np.repeat(passes.step, passes.phases), passes.task_device]
        return _sent_until_next(passes, lanes.tasks)

    def next_begin(self, step: Ints, device: Ints) -> Ints:
        """Return when the step after begins on devices; of the last step, when that ends."""
        after = np.minimum(step + 1, self.passes.steps - 1)
        begins = start(self.updates.tables.lanes.step_begins[after, device])
        return np.where(after > step, begins, self.last_update(device))

    def last_update(self, device: Ints) -> Ints:
        """Return when an update of the last step ends on devices, where others may end later."""
        node, last = self.updates.tables.lanes.step_ends[-1].copy(), slice(-self.updates.in_step, None)
        node[self.updates.device[last]] = self.updates.node[last]
        return end(node[device])

    def keep_for_good(self, number: Ints, device: Ints) -> None:
        """Hold buffers on devices until the last step's updates there have ended."""
        updates = self.updates
        final = np.flatnonzero(updates.step == self.passes.steps - 1)
        final = final[sort_by(updates.device[final])]
        low, high = (np.searchsorted(updates.device[final], device, side=side) for side in ("left", "right"))
        of, update = expand_ranges(low, high)
        self.build.keep(number[of], end(updates.node[final[update]]))


def _sent_until_next(passes: Passes, task: Ints) -> Ints:
    """Return how long a runtime refers to what is sent that has a variable for its last send: an output, a gradient.

    Between forwards and backwards that take turns, outputs are sent together with what is received. So the output
    of the last warm-up forward but one is referred to until gradients are sent by themselves, behind the first
    backward after all forwards; a gradient until the next backward has run.
    """
    until = np.full(passes.tasks, -1, dtype=np.int32)
    first = group_starts(passes.task_device[task], passes.step_of(task // passes.phases))
    of, place, forward = group_numbers(first, len(task)), np.arange(len(task)), passes.kind[task] == Kind.F
    last_forward, first_backward = np.zeros(len(first), np.int64), np.full(len(first), len(task))
    np.maximum.at(last_forward, of[forward], place[forward])
    np.minimum.at(first_backward, of[~forward], place[~forward])
    warm = np.flatnonzero(first_backward - first >= 2)
    until[task[first_backward[warm] - 2]] = task[last_forward[warm] + 1]
    backward = np.flatnonzero(passes.kind[task] == Kind.B)
    follows = of[backward[:-1]] == of[backward[1:]]
    until[task[backward[:-1][follows]]] = task[backward[1:][follows]]
    return until


class BehaviourRow(NamedTuple):
    """A buffer of a runtime: its bytes, the moments that it begins and ends at, its condition, and later ends."""

    category: Category
    size: Ints
    begin: Ints
    until: Ints
    when: Flags | bool = True
    longer: tuple[tuple[Ints, Flags | bool], ...] = ()


def hold_rows(build: Builder, of: Location, rows: list[BehaviourRow]) -> None:
    """Hold what rows say, in their order."""
    for row in rows:
        chosen = np.flatnonzero(np.broadcast_to(row.when, row.size.shape))
        if not len(chosen):
            continue
        columns = (column[chosen] for column in (row.size, row.begin, row.until))
        number = np.full(len(row.size), -1)
        number[chosen] = build.hold(row.category, of.take(chosen), *columns)
        for moment, when in row.longer:
            also = np.flatnonzero(np.broadcast_to(when, number.shape))
            build.keep(number[also], moment[also])


def hold_output(keeping: Keeping, of: Location, row: Ints, message: Ints) -> None:
    """Hold outputs that are sent; `row` has the passes."""
    passes, stage = keeping.passes, of.stage
    forward, waiting, sent = passes.forward[row, stage], (keeping.boundary - keeping.kept)[stage], end(message)
    if keeping.is_plain:
        keeping.build.hold(_COMMUNICATION, of, waiting, end(forward), sent)
        return
    is_kept, referred = keeping.behaviours.kept_outputs, keeping.sent_until[forward]
    backward, freed = passes.backward[row, stage], keeping.freed[row, stage]
    outlives = (referred >= 0) & (passes.position[referred] >= passes.position[freed])
    longer = (end(np.where(outlives, freed, referred)), referred >= 0)
    rows = [
        BehaviourRow(_ACTIVATIONS, waiting, end(forward), end(backward), is_kept, ((sent, True), longer)),
        BehaviourRow(_COMMUNICATION, waiting, end(forward), sent, not is_kept, (longer,)),
        BehaviourRow(_COMMUNICATION, keeping.boundary[stage], end(freed), end(referred), outlives),
        _while_freed(keeping, row, stage, outlives),
    ]
    hold_rows(keeping.build, of, rows)


def hold_output_handed_on(keeping: Keeping, of: Location, row: Ints) -> None:
    """Hold outputs that the next stage on the same device reads."""
    passes, stage, position = keeping.passes, of.stage, keeping.passes.position
    forward, waiting = passes.forward[row, stage], (keeping.boundary - keeping.kept)[stage]
    if keeping.is_plain:
        keeping.build.hold(_ACTIVATIONS, of, waiting, end(forward), start(forward + 1))
        return
    backward, left = passes.backward[row, stage], keeping.inputs_left[0][row, stage + 1]
    freed, last = keeping.freed[row, stage + 1], passes.last[row, stage + 1]
    static = keeping.behaviours.static_receives  # which are buffers always
    is_kept = keeping.behaviours.kept_outputs and not static
    rows = [
        BehaviourRow(_ACTIVATIONS, waiting, end(forward), start(forward + 1), not static),
        BehaviourRow(
            _ACTIVATIONS, waiting - left, end(freed), end(backward), is_kept & (position[freed] < position[backward])
        ),
        BehaviourRow(_ACTIVATIONS, left, end(last), end(backward), is_kept & (position[last] < position[backward])),
        _while_freed(keeping, row, stage, static),
    ]
    hold_rows(keeping.build, of, rows)


def hold_gradient_sent(keeping: Keeping, of: Location, sender: Ints, message: Ints) -> None:
    """Hold gradients of inputs that are sent, until they have been, or as long as a runtime refers to them."""
    number = keeping.build.hold(_COMMUNICATION, of, keeping.boundary[of.stage - 1], end(sender), end(message))
    if keeping.behaviours.sends != "until-sent":
        until = keeping.sent_until[sender]
        keeping.build.keep(number[until >= 0], end(until[until >= 0]))


def _while_freed(keeping: Keeping, row: Ints, stage: Ints, beyond: Flags | bool) -> BehaviourRow:
    """Hold outputs during the tasks that let go of them in their stages, where something else has them.

    That is where they are held `beyond` these tasks, or to the end of each backward. The first part of a split backward
    lets go of the output with its end, the second after it.
    """
    whole = keeping.are_whole[row, stage]
    freed, backward = keeping.freed[row, stage], keeping.passes.backward[row, stage]
    is_held = (freed == backward) & keeping.behaviours.kept_outputs | beyond
    if keeping.passes.splits:
        is_held &= whole | keeping.silent[stage]
    task = np.where(whole, backward, freed)
    return BehaviourRow(_ACTIVATIONS, keeping.model.size("freed_output")[stage], start(task), end(task), is_held)


_ACTIVATIONS, _COMMUNICATION = Category.ACTIVATIONS, Category.COMMUNICATION


def hold_returned(keeping: Keeping) -> None:
    """Hold the last stage's outputs until their backwards, or until the next step begins on their device."""
    returned, passes = keeping.behaviours.returned_outputs, keeping.passes
    if not (returned or keeping.behaviours.kept_outputs):
        return
    row = np.arange(len(passes), dtype=np.int32)
    of = Location(passes.device[:, -1], np.full(len(row), passes.n - 1), passes.step)
    forward, backward, freed = (end(table[:, -1]) for table in (passes.forward, passes.backward, keeping.freed))
    waiting = (keeping.boundary - keeping.kept)[of.stage]
    rows = [
        BehaviourRow(_ACTIVATIONS, waiting, forward, backward, longer=((freed, returned),)),
        _while_freed(keeping, row, of.stage, returned),
    ]
    hold_rows(keeping.build, of, rows)
    if returned:
        until = keeping.next_begin(passes.step, of.device)
        number = keeping.build.hold(_ACTIVATIONS, of, keeping.boundary[of.stage], freed, until)
        final = np.flatnonzero(of.version == passes.steps - 1)
        keeping.keep_for_good(number[final], of.device[final])
        _hold_merged(keeping)


def _hold_merged(keeping: Keeping) -> None:
    """Hold all outputs of a step once more, in one tensor, before their device's updates."""
    passes, updates, last = keeping.passes, keeping.updates, keeping.passes.n - 1
    row = np.flatnonzero(updates.stage == last)
    of = Location(updates.device[row], updates.stage[row], updates.step[row])
    outputs = np.zeros((passes.steps, passes.devices), dtype=np.int64)
    np.add.at(outputs, (passes.step, passes.device[:, -1]), keeping.boundary[last])
    group, first, behind = updates.of_devices
    at = start(updates.node[(first if updates.in_lanes else behind)[group[row]]])
    keeping.build.hold(_ACTIVATIONS, of, outputs[of.version, of.device], at, at)


def hold_always(keeping: Keeping) -> None:
    """Hold static receive buffers, the whole batch, and the last stage's inputs that losses refer to."""
    passes = keeping.passes
    if keeping.behaviours.static_receives:
        given = keeping.boundary[:-1]
        _hold_for_all(keeping, _COMMUNICATION, np.append(0, given), -1)
        _hold_for_all(keeping, _COMMUNICATION, np.append(given, 0), 1)
        # While outputs are made, their stage keeps them, too; their place is then a static buffer of the next stage's.
        row, stage = np.nonzero(keeping.is_near[:, 1:])
        forward = passes.forward[row, stage]
        of = Location(passes.device[row, stage], stage, passes.step[row])
        keeping.build.hold(_ACTIVATIONS, of, keeping.kept[stage], start(forward), end(forward))
    elif keeping.behaviours.kept_losses and passes.n > 1:
        _hold_inputs_of_losses(keeping)
    if keeping.behaviours.whole_batch:
        _hold_for_all(keeping, _ACTIVATIONS, keeping.model.size("data"), 0)


def _hold_for_all(keeping: Keeping, category: Category, size: Ints, sender: int) -> None:
    """Hold this size of each stage, for each micro-batch that a device has in a step, until the end.

    `sender` leads from the stage to the one whose messages come into the buffer.
    """
    passes = keeping.passes
    device, stage, step = passes.device.ravel(), passes.stage, np.repeat(passes.step, passes.n)
    order = sort_by(device, stage, step)
    device, stage, step = (column[order] for column in (device, stage, step))
    first = group_starts(device, stage, step)
    count = np.diff(np.append(first, len(order)))
    head = group_starts(device[first], stage[first])
    most = np.maximum.reduceat(count, head)
    device, stage = device[first][head], stage[first][head]
    where = Location(device, np.clip(stage + sender, 0, passes.n - 1), np.zeros_like(device))
    number = keeping.build.hold(category, where, most * size[stage], -1, keeping.last_update(device))
    keeping.keep_for_good(number, device)


def _hold_inputs_of_losses(keeping: Keeping) -> None:
    """Hold the received inputs of the last stage until the step ends on its device.

    Each part begins where the stages let go of it: of what the stage before keeps, of the rest, and of what the
    weights' part of a split backward needs of both.
    """
    passes, near, position = keeping.passes, keeping.is_near[:, -1], keeping.passes.position
    device, freed, last = passes.device[:, -1], keeping.freed[:, -1], passes.last[:, -1]
    of = Location(device, np.full(len(device), passes.n - 1), passes.step)
    until = end(keeping.updates.tables.lanes.step_ends[passes.step, device])
    kept, (left, shared) = np.where(near, keeping.kept[-2], 0), (column[:, -1] for column in keeping.inputs_left)
    own = np.where(near & keeping.behaviours.kept_outputs, passes.backward[:, -2], freed)
    before = np.where(near, keeping.freed[:, -2], freed)
    parts = (
        (kept - shared, before, before),
        (shared, before, last),
        (keeping.boundary[-2] - kept - left, own, freed),
        (left, own, last),
    )
    later = (np.where(position[one] > position[other], one, other) for _, one, other in parts)
    rows = [BehaviourRow(_ACTIVATIONS, size, end(task), until) for (size, _, _), task in zip(parts, later, strict=True)]
    hold_rows(keeping.build, of, rows)


# Gradients


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


def gradients_at_first(model: Model, behaviours: Behaviours, passes: Passes) -> Ints:
    """Return what of each stage's gradients there is while the first backward of a step makes them.

    Where .grad is kept all of them are, and where backwards are split: but in torch's own pipelines, whose first stages
    go back as a whole.
    """
    if behaviours.gradients != "fresh" or (passes.splits and behaviours.split_backward == "freed"):
        return model.size("gradients")
    first = model.size("first_gradients")
    if not passes.splits:
        return first
    silent = np.array([stage.retained_gradients is None for stage in model.stages])
    return np.where(silent & ~silent.all(), first, model.size("gradients"))

"""Exchanges of whole values between holders that come to a stage together: collectives of sums and of new versions."""

from functools import cached_property

import numpy as np

from cdpsim.model import Model
from cdpsim.model.runtime import Habits
from cdpsim.numeric.columns import Flags, Ints
from cdpsim.program import Category, Content, EdgeKind, Op
from cdpsim.program.assembly.build import Builder, Location, end, fold_group, start
from cdpsim.program.assembly.runtime import Keeping, gradients_at_first, hold_gradients
from cdpsim.program.assembly.sharded import Sharded, Uses
from cdpsim.program.assembly.tied import give_shared, holder_sizes, sum_shared, unshared_gradients
from cdpsim.program.assembly.update import Updates, base_is_still_needed, pull
from cdpsim.schedules.state import Home, When


class Axis:
    """The holders of all stages, and their groups; `row` counts holders, `group` steps and stages.

    `node` is the update that takes each holder's gradients: its own, or where optimizer states are owned the owner's.
    """

    def __init__(self, updates: Updates, model: Model, habits: Habits, build: Builder) -> None:
        self.tables, self.updates, self.model, self.build = updates.tables, updates, model, build
        self.habits = habits
        self.passes, self.holders = self.tables.passes, self.tables.holders
        self.state = self.passes.schedule.state
        self.owned = self.state.optimizer is Home.OWNED
        self.node = self.by_holder(updates.node)
        self.sizes = holder_sizes(self.tables, model)

    @property
    def is_hosted(self) -> bool:
        """Whether hosts have parameters between their uses."""
        return any(stage.host_parameters for stage in self.model.stages)

    @property
    def fold(self) -> int:
        """The number of replicas for which each one that is there stands."""
        return self.passes.shape.replicas // self.passes.shape.simulated

    def ranks_of_run(self, members: Ints, run: int = 0, apart: int = 1) -> Ints | None:
        """Return the ranks of all groups like one of devices of the first replica; None where all replicas are there.

        A group has a `run` of replicas, by default all, and of them those that are so far `apart`.
        """
        shape = self.passes.shape
        return fold_group(members, self.passes.replica_devices, shape.replicas, run, apart) if shape.folded else None

    def by_holder(self, of_updates: Ints) -> Ints:
        """Return, for each holder, the value of the update that takes its gradients."""
        return of_updates[self.holders.of] if self.owned else of_updates

    @cached_property
    def several(self) -> Flags:
        """Whether each group has several members."""
        return self.holders.count * self.fold > 1

    @cached_property
    def group(self) -> Ints:
        """The number of each group among those that exchange something."""
        holders, in_step = self.holders, self.passes.n
        numbers = np.full(in_step, -1, dtype=np.int32)
        for j in np.flatnonzero(self.several[:in_step]).tolist():
            first = holders.first[j]
            members = holders.device[first : first + holders.count[j]]
            numbers[j] = self.build.group(members, self.ranks_of_run(members))
        return np.tile(numbers, self.passes.steps)

    @cached_property
    def root(self) -> Ints:
        """The device of each group that makes the update; -1 where all do."""
        return self.updates.device if self.owned else np.full(len(self.holders.first), -1)

    @cached_property
    def at_owner(self) -> Flags:
        """Whether each holder makes the update that takes its gradients."""
        if not self.owned:
            return np.ones(len(self.holders), dtype=bool)
        at_owner: Flags = self.holders.device == self.root[self.holders.of]
        return at_owner

    @cached_property
    def sharded(self) -> Sharded:
        """The buffers of parameters that are handed out, and of gradients on their way to their owners."""
        return Sharded(Keeping(self.updates, self.model, self.habits, self.build))

    def exchange(self, op: Op, content: Content, groups: Flags, size: Ints, versions: int) -> tuple[Ints, Ints, Ints]:
        """Send a message in each of these groups, of a size that each stage has.

        Return the numbers of the groups, the rows of their members, and for each holder its message, or its update
        where it has none.
        """
        holders = self.holders
        at, rows = np.flatnonzero(groups), np.flatnonzero(groups[holders.of])
        _, stage, step = holders.where.take(holders.first[at])
        src, dst = self.root[at], self.group[at]
        message = self.build.send(
            op, content, stage=stage, step=step, src=src, dst=dst, size=size[stage], versions=versions
        )
        carrier = self.node.copy()
        carrier[rows] = np.repeat(message, holders.count[at])
        return at, rows, carrier

    def reduce(self) -> Ints:
        """Sum gradients over each group, and return what takes those of each holder: a message or its update."""
        holders, build, node = self.holders, self.build, self.node
        size = self.model.size("gradients") if self.owned else unshared_gradients(self.tables, self.model)
        op = Op.REDUCE if self.owned else Op.ALL_REDUCE
        at, rows, taker = self.exchange(op, Content.GRADIENT, self.several, size, 0)
        if self.waits_for_end:
            ends = self.tables.lanes.step_ends[holders.step[rows], holders.device[rows]]
            build.link(ends, taker[rows], EdgeKind.BARRIER)
        makers = holders.owners[at] if self.owned else rows
        build.link(taker[makers], node[makers])
        build.link(self.passes.last.ravel(), taker[holders.row.ravel()])
        for given, into in self.earlier_sums():
            build.link(*self.given_to(given, into, taker))
        if not self.owned:
            sum_shared(self.updates, self.model, build, wait=self.waits_for_end)
        return taker

    def earlier_sums(self) -> list[tuple[int, int]]:
        """Return the earlier steps whose gradients an update takes, too, in pairs: that step, and the update's."""
        return [(given, into) for into, low in enumerate(self.passes.first_step.tolist()) for given in range(low, into)]

    def given_to(self, given: int, into: int, taker: Ints) -> tuple[Ints, Ints]:
        """Link updates of a step to what they wait for to take an earlier one's gradients: messages, or tasks."""
        in_step = self.holders.in_step
        row_taker = taker[given * in_step : (given + 1) * in_step]
        summed = np.flatnonzero(row_taker != self.node[given * in_step : (given + 1) * in_step])
        passes = slice(*self.passes.first[given : given + 2].tolist())
        row, task = self.holders.row[passes].ravel() % in_step, self.passes.last[passes].ravel()
        alone = ~np.isin(row, summed)
        before = np.concatenate([row_taker[summed], task[alone]])
        return before, self.node[into * in_step + np.concatenate([summed, row[alone]])]

    @property
    def waits_for_end(self) -> bool:
        """Whether sums wait for the end of the step on each device."""
        return self.passes.schedule.order.together and self.state.reduce is When.END

    def spread(self) -> Ints:
        """Bring new versions from owners to all holders, and return what the readers of each holder wait for.

        One that only its maker reads is not sent. The maker takes part until all have it, too.
        """
        holders, read = self.holders, np.zeros(len(self.holders.first), dtype=bool)
        for _, _, row in self.readers():
            made = row[row >= holders.in_step] - holders.in_step
            read[holders.of[made[~self.at_owner[made]]]] = True
        size = self.model.size("parameters")
        at, rows, provider = self.exchange(Op.BROADCAST, Content.PARAMETERS, read, size, 1)
        self.build.link(self.updates.node[at], provider[holders.first[at]])
        rows = rows[~self.at_owner[rows]]
        where = Location(holders.device[rows], holders.stage[rows], holders.step[rows] + 1)
        self.build.land(provider[rows], where, size[where.stage])
        return provider

    def hand_out(self, prefetch: int) -> None:
        """Broadcast owned parameters before each use, which all micro-batches of a step share; drop them after it."""
        passes, lanes, build, n = self.passes, self.tables.lanes, self.build, self.passes.n
        step, phase = (index.ravel() for index in np.indices((passes.steps, passes.phases), dtype=np.int32))
        stage = passes.stage_of(phase)
        group, size = step * n + stage, self.model.size("parameters")[stage]
        root, dst = self.root[group], self.group[group]
        message = build.send(
            Op.BROADCAST, Content.PARAMETERS, stage=stage, step=step - 1, src=root, dst=dst, size=size, versions=1
        )
        later = step > 0
        build.link(self.updates.node[group[later] - n], message[later])
        reader = passes.by_columns(np.arange(passes.tasks, dtype=np.int32).reshape(-1, passes.phases))
        each = np.repeat(np.arange(len(message)), np.repeat(np.diff(passes.first), passes.phases))
        build.link(message[each], reader)
        pull(lanes, build, message[each], lanes.rank[reader], 1 + prefetch)
        if self.habits.gathers == "missing":  # what the owner has needs no copy
            missing = np.flatnonzero(passes.task_device[reader] != root[each])
            each, reader = each[missing], reader[missing]
        where = Location(passes.task_device[reader], stage[each], step[each])
        self.sharded.hold_gathered(Uses(message[each], reader, reader, where, size[each]), early=prefetch > 0)

    def follow(self, provider: Ints, *, stays: bool) -> None:
        """Let updates wait for barriers and for what they replace, and readers for what their device has."""
        updates, build, in_step = self.updates, self.build, self.updates.in_step
        if self.passes.lagging:  # without lags a version's readers see to it that it is there before the next
            node, base = updates.node.reshape(-1, in_step), self.passes.base
            step = np.flatnonzero(base > 0)
            build.link(node[base[step] - 1].ravel(), node[step].ravel())
        if updates.barrier is not None:
            build.link(updates.barrier, updates.node, EdgeKind.BARRIER)
        for reader, _, row in self.readers() if stays else ():
            made = row >= self.holders.in_step
            build.link(provider[row[made] - self.holders.in_step], reader[made])

    def readers(self) -> list[tuple[Ints, Ints, Ints]]:
        """Return tasks that read a version, the last that use it, and the rows of the holders that replace it."""
        passes, in_step = self.passes, self.holders.in_step
        forward, backward, last = (tasks.ravel() for tasks in (passes.forward, passes.backward, passes.last))
        in_its_step = self.holders.row % in_step
        row = (in_its_step + passes.version * in_step).ravel()
        if passes.rule.backward is None:
            return [(forward, last, row)]
        return [(forward, forward, row), (backward, last, (in_its_step + passes.backward_version * in_step).ravel())]

    def hold_gradients(self, taker: Ints, provider: Ints) -> None:
        """Hold each sum until it is applied; elsewhere, if copied, until the update comes, else until it has left."""
        holders, tables, model, in_step = self.holders, self.tables, self.model, self.holders.in_step
        until = end(self.node)
        if self.owned:
            comes = (provider != self.node) & (self.state.gradients is Home.COPIED)
            until = np.where(self.at_owner, until, end(np.where(comes, provider, taker)))
        shares = self.state.parameters is Home.OWNED
        size = unshared_gradients(tables, model)[holders.stage] if shares else self.sizes.gradients
        first_size = gradients_at_first(model, self.habits, self.passes)[holders.stage]
        viewed = self.has_buckets and self.habits.gradient_buckets == "views" and self.several[holders.of]
        apart = viewed & self.add_up_apart
        until = np.where(apart, end(holders.last_task), until)
        size = np.where(viewed & ~apart, 0, size)
        if self.habits.gradients == "kept" and holders.stay:  # a step's begin where those of the step before end
            begin = np.append(np.full(in_step, -1), until[:-in_step])
            sums = self.build.hold(Category.GRADIENTS, holders.where, size, begin, until)
        else:
            sums = hold_gradients(self.build, holders.where, size, first_size, holders.first_task, until)
        sums = np.where(viewed, -1, sums)  # what waits for updates is in buckets
        if self.has_buckets:
            self.hold_buckets()
        if self.habits.joint_updates:
            last_tasks = tables.lanes.step_ends[holders.step, holders.device]
            longer = np.flatnonzero((self.at_owner if self.owned else True) & (last_tasks != holders.last_task))
            self.build.keep(sums[longer], end(last_tasks[longer]))
        for given, into in self.earlier_sums():
            rows = np.arange(in_step)
            self.build.keep(sums[given * in_step + rows], end(self.node[into * in_step + rows]))
        if shares:
            if self.habits.reductions == "until-next" or self.habits.collective_copies:
                self.sharded.hold_reduced(sums, size, taker, np.flatnonzero(taker != self.node), self.at_owner)
            give_shared(tables, model, taker[holders.first], until, self.build)

    @property
    def has_buckets(self) -> bool:
        """Whether a runtime has gradients in buckets: copies that several devices sum."""
        return self.habits.gradient_buckets != "none" and self.state.parameters is Home.COPIED and not self.owned

    @property
    def add_up_apart(self) -> Flags:
        """Whether each holder adds up gradients outside of buckets, into which they come with its last pass."""
        if self.habits.gradients == "kept" or self.state.reduce is When.EACH:
            return np.zeros(len(self.holders), dtype=bool)
        several_passes: Flags = self.holders.first_task != self.holders.last_task
        return several_passes

    def hold_buckets(self) -> None:
        """Hold buckets always: the gradients themselves, or copies of them."""
        holders, in_step = self.holders, self.holders.in_step
        rows = np.flatnonzero(self.several[holders.of[:in_step]])
        views = self.habits.gradient_buckets == "views"
        category = Category.GRADIENTS if views else Category.COMMUNICATION
        until = end(self.node[rows + (holders.steps - 1) * in_step])
        self.build.hold(category, holders.where.take(rows), self.sizes.gradients[rows], np.full(len(rows), -1), until)

    def hold_parameters(self, taker: Ints, provider: Ints) -> Ints:
        """Hold versions where they live, from when they are made or have come until the next is. Return the buffers."""
        holders, in_step, steps = self.holders, self.holders.in_step, self.holders.steps
        old, size = slice(-in_step), self.sizes.parameters
        made, until = np.full(len(holders), -1), end(self.node)
        made[in_step:] = end(self.node[old])
        if self.model.updates_take_time:
            made[in_step:] -= self.by_holder(base_is_still_needed(self.updates))[old]
        if self.passes.sources:  # to the last update that starts from it; where none does, it is there to be read
            last = np.arange(-1, steps - 1)
            np.maximum.at(last, self.passes.base, np.arange(steps))
            until = end(np.where(last[:, None] < 0, -1, self.node.reshape(steps, -1)[last]).ravel())
        if self.owned:  # others write what comes in its place; a version that none of them reads does not come
            comes = provider != self.node
            made[in_step:] = np.where(self.at_owner[old], made[in_step:], end(provider[old]))
            until = np.where(self.at_owner, until, np.where(comes, start(provider), end(taker)))
            arrives = np.append(np.ones(in_step, dtype=bool), comes[old])
            size = np.where(self.at_owner | (arrives & (self.state.parameters is Home.COPIED)), size, 0)
        return self.build.hold(Category.PARAMETERS, holders.where, size, made, until)

    def hold_until_read(self, copies: Ints) -> None:
        """Hold versions until they have been read, which may be after the next one is there."""
        for _, last_use, row in self.readers():
            self.build.keep(copies[row], end(last_use))

    def hold_optimizers(self) -> None:
        """Hold optimizer states where updates are made, always."""
        updates, last = self.updates, slice(-self.updates.in_step, None)
        size = self.model.size("optimizer")[updates.stage] if self.owned else self.sizes.optimizer
        where = Location(updates.device[last], updates.stage[last], updates.step[last])
        always = np.full(updates.in_step, -1)
        self.build.hold(Category.OPTIMIZER, where, size[last], always, end(updates.node[last]))

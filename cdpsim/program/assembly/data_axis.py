"""What the holders of a stage exchange where all of them come to an update at one moment: collectives.

A home says where a value is between its uses. Gradients are summed in the optimizer's home, where updates are made; new
versions go from there to the parameters' home, and to every use where they are not copied.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cdpsim.model import Model
from cdpsim.numeric.columns import Ints
from cdpsim.program import Category, Content, EdgeKind, Op
from cdpsim.program.assembly.build import Builder, end, start
from cdpsim.program.assembly.tables import Tables
from cdpsim.program.assembly.tied import Sizes, give_shared, own_gradients, sizes_of, sum_shared
from cdpsim.program.assembly.update import Updates, beside_old, pull
from cdpsim.schedules.state import Home, When


def data_axis(tables: Tables, updates: Updates, model: Model, build: Builder, prefetch: int) -> None:
    """Sum gradients where updates are made, and bring new versions to their readers."""
    axis = _Axis(tables, updates, model, build)
    stays = axis.state.parameters is Home.COPIED or not axis.several.any()
    if not stays:
        axis.hand_out(prefetch)
    taker = axis.reduce()
    provider = axis.spread() if axis.state.parameters is Home.COPIED else axis.node
    axis.follow(provider, stays=stays)
    axis.hold_gradients(taker, provider)
    copies = axis.hold_parameters(taker, provider)
    if stays and axis.passes.lagging:
        axis.hold_until_read(copies)
    axis.hold_optimizers()


class _Axis:
    """The holders of all stages, and their groups; `row` counts holders, `group` steps and stages.

    `node` is the update that takes each holder's gradients: its own, or where optimizer states are owned the owner's.
    """

    def __init__(self, tables: Tables, updates: Updates, model: Model, build: Builder) -> None:
        self.tables, self.updates, self.model, self.build = tables, updates, model, build
        self.passes, self.holders = tables.passes, tables.holders
        self.state = self.passes.schedule.state
        self.owned = self.state.optimizer is Home.OWNED
        self.node = updates.node[self.holders.of] if self.owned else updates.node

    @cached_property
    def several(self) -> NDArray[np.bool_]:
        """Whether each group has several members."""
        return self.holders.count > 1

    @cached_property
    def group(self) -> Ints:
        """The number of each group among those that exchange something."""
        holders, in_step = self.holders, self.passes.n
        found = np.full(in_step, -1, dtype=np.int32)
        for j in np.flatnonzero(self.several[:in_step]).tolist():
            first = holders.first[j]
            found[j] = self.build.group(holders.device[first : first + holders.count[j]])
        return np.tile(found, self.passes.steps)

    @cached_property
    def root(self) -> Ints:
        """The device of each group that makes the update; -1 where all do."""
        return self.updates.device if self.owned else np.full(len(self.holders.first), -1)

    @cached_property
    def sizes(self) -> Sizes:
        """What each holder has; of owned values each owner has its own, of copied ones a device has a tensor once."""
        if self.state.parameters is Home.COPIED:
            return sizes_of(self.tables, self.model)
        stage = self.holders.stage
        return Sizes(*(self.model.size(kind)[stage] for kind in ("parameters", "gradients", "optimizer")))

    @property
    def bases(self) -> Ints:
        """The version that the updates of each step start from."""
        return self.passes.line.base if self.passes.line else np.arange(self.passes.steps)

    @cached_property
    def at_owner(self) -> NDArray[np.bool_]:
        """Whether each holder makes the update that takes its gradients."""
        return (
            self.holders.device == self.root[self.holders.of] if self.owned else np.ones(len(self.holders), dtype=bool)
        )

    def reduce(self) -> Ints:
        """Sum gradients over each group, and give what takes those of each holder: a message, or its update itself."""
        holders, build, node = self.holders, self.build, self.node
        at, rows = np.flatnonzero(self.several), np.flatnonzero(self.several[holders.of])
        step, stage = holders.step[holders.first[at]], holders.stage[holders.first[at]]
        size = own_gradients(self.tables, self.model) if not self.owned else self.model.size("gradients")
        message = build.send(
            Op.REDUCE if self.owned else Op.ALL_REDUCE,
            Content.GRADIENT,
            stage=stage,
            step=step,
            src=self.root[at],
            dst=self.group[at],
            size=size[stage],
        )
        taker = node.copy()
        taker[rows] = np.repeat(message, holders.count[at])
        if self.waits_for_end:
            ends = self.tables.lanes.last_in_step(holders.device[rows], holders.step[rows])
            build.link(ends, taker[rows], EdgeKind.BARRIER)
        makers = holders.owners[at] if self.owned else rows
        build.link(taker[makers], node[makers])
        build.link(self.passes.last.ravel(), taker[holders.row.ravel()])
        for given, into in self.more_sums():
            build.link(*self.given_to(given, into, taker))
        if not self.owned:
            sum_shared(self.tables, self.updates, self.model, build, wait=self.waits_for_end)
        return taker

    def more_sums(self) -> list[tuple[int, int]]:
        """Earlier steps whose gradients an update takes, too: (that step, the update's)."""
        first = self.passes.line.first.tolist() if self.passes.line else ()
        return [(given, into) for into, low in enumerate(first) for given in range(low, into)]

    def given_to(self, given: int, into: int, taker: Ints) -> tuple[Ints, Ints]:
        """What updates of a step wait for to take an earlier one's gradients: messages, or the tasks that gave."""
        in_step = self.holders.in_step
        own, apart = np.arange(in_step), taker != self.node
        summed = own[apart[given * in_step : (given + 1) * in_step]]
        passes = slice(*self.passes.first[given : given + 2].tolist())
        row, task = self.holders.row[passes].ravel() % in_step, self.passes.last[passes].ravel()
        alone = ~np.isin(row, summed)
        before = np.concatenate([taker[given * in_step + summed], task[alone]])
        return before, self.node[into * in_step + np.concatenate([summed, row[alone]])]

    @property
    def waits_for_end(self) -> bool:
        """Whether sums wait for the end of the step on each device."""
        return self.passes.schedule.order.together and self.state.reduce is When.END

    def spread(self) -> Ints:
        """Bring new versions to all holders, and give what the readers of each holder wait for.

        One that only its maker reads is not sent. The maker takes part until all have it, too.
        """
        holders, provider = self.holders, self.node.copy()
        if not self.owned:
            return provider
        read = np.zeros(len(holders.first), dtype=bool)
        for version in {id(v): v for v in (self.passes.version, self.passes.backward_version)}.values():
            made = version.ravel() > 0
            row = (holders.row % holders.in_step + (version - 1) * holders.in_step).ravel()[made]
            read[holders.of[row[~self.at_owner[row]]]] = True
        at, rows = np.flatnonzero(read), np.flatnonzero(read[holders.of])
        step, stage = holders.step[holders.first[at]], holders.stage[holders.first[at]]
        size = self.model.size("parameters")
        message = self.build.send(
            Op.BROADCAST,
            Content.PARAMETERS,
            stage=stage,
            step=step,
            src=self.root[at],
            dst=self.group[at],
            size=size[stage],
            versions=1,
        )
        self.build.link(self.updates.node[at], message)
        provider[rows] = np.repeat(message, holders.count[at])
        rows = rows[~self.at_owner[rows]]
        of = {"device": holders.device[rows], "stage": holders.stage[rows], "version": holders.step[rows] + 1}
        self.build.land(provider[rows], size=size[of["stage"]], **of)
        return provider

    def hand_out(self, prefetch: int) -> None:
        """Broadcast owned parameters before each use, which all micro-batches of a step share; drop them after it."""
        passes, lanes, n = self.passes, self.tables.lanes, self.passes.n
        step, phase = (index.ravel() for index in np.indices((passes.steps, passes.phases), dtype=np.int32))
        third, stage = np.divmod(phase, n)
        stage = np.where(third == 0, stage, n - 1 - stage)
        group = step * n + stage
        columns = {"stage": stage, "size": self.model.size("parameters")[stage]}
        message = self.build.send(
            Op.BROADCAST,
            Content.PARAMETERS,
            step=step - 1,
            src=self.root[group],
            dst=self.group[group],
            versions=1,
            **columns,
        )
        later = step > 0
        self.build.link(self.updates.node[group[later] - n], message[later])
        reader = passes.by_columns(np.arange(passes.tasks, dtype=np.int32).reshape(-1, passes.phases))
        each = np.repeat(np.arange(len(message)), np.repeat(np.diff(passes.first), passes.phases))
        self.build.link(message[each], reader)
        pull(lanes, self.build, message[each], lanes.rank[reader], 1 + prefetch)
        # Every device but the owner holds a copy from its arrival to the end of its use.
        copies = np.flatnonzero(passes.task_device[reader] != self.root[group][each])
        each, reader = each[copies], reader[copies]
        of = {"device": passes.task_device[reader], "version": step[each]} | {k: c[each] for k, c in columns.items()}
        self.build.hold(Category.PARAMETERS, begin=end(message[each]), end=end(reader), **of)
        self.build.land(message[each], **of)

    def follow(self, provider: Ints, *, stays: bool) -> None:
        """Let updates wait for barriers and for what they replace, and readers for what their device has."""
        updates, build, in_step = self.updates, self.build, self.updates.in_step
        if self.passes.lagging:  # without lags a version's readers see to it that it is there before the next
            step = np.flatnonzero(self.bases > 0)
            rows = [column[:, None] * in_step + np.arange(in_step) for column in (self.bases[step] - 1, step)]
            build.link(*(updates.node[row.ravel()] for row in rows))
        if updates.barrier is not None:
            build.link(updates.barrier, updates.node, EdgeKind.BARRIER)
        for reader, _, row in self._readers() if stays else ():
            made = row >= self.holders.in_step
            build.link(provider[row[made] - self.holders.in_step], reader[made])

    def _readers(self) -> list[tuple[Ints, Ints, Ints]]:
        """Tasks that read a version, the last that use it, and of each the row of the holder that replaces it."""
        passes, in_step = self.passes, self.holders.in_step
        own, forward, backward = self.holders.row % in_step, passes.forward.ravel(), passes.backward.ravel()
        last = passes.last.ravel()
        rows = [(own + version * in_step).ravel() for version in (passes.version, passes.backward_version)]
        if passes.rule.backward is None:
            return [(forward, last, rows[0])]
        return [(forward, forward, rows[0]), (backward, last, rows[1])]

    def hold_gradients(self, taker: Ints, provider: Ints) -> None:
        """Hold each sum until it is applied; elsewhere, if copied, until the update comes, else until it has left."""
        holders, tables, model = self.holders, self.tables, self.model
        until = end(self.node)
        if self.owned:
            comes = (provider != self.node) & (self.state.gradients is Home.COPIED)
            until = np.where(self.at_owner, until, end(np.where(comes, provider, taker)))
        shares = self.state.parameters is Home.OWNED
        size = own_gradients(tables, model)[holders.stage] if shares else self.sizes.gradients
        of = {"device": holders.device, "stage": holders.stage, "version": holders.step}
        sums = self.build.hold(Category.GRADIENTS, size=size, begin=start(holders.first_task), end=until, **of)
        for given, into in self.more_sums():
            rows = np.arange(holders.in_step)
            self.build.keep(sums[given * len(rows) + rows], end(self.node[into * len(rows) + rows]))
        if shares:
            give_shared(tables, model, taker[holders.first], until, self.build)

    def hold_parameters(self, taker: Ints, provider: Ints) -> Ints:
        """Hold versions where they live, from when they are made or have come until the next is; give their numbers."""
        holders, in_step, steps = self.holders, self.holders.in_step, self.holders.steps
        old = slice(-in_step)
        made, until = np.full(len(holders), -1), end(self.node)
        made[in_step:] = end(self.node[old])
        if self.model.updates_take_time:
            beside = beside_old(self.tables, self.updates)
            made[in_step:] -= (beside[holders.of] if self.owned else beside)[old]
        if self.passes.line:  # to the last update that starts from it; where none does, it is there to be read
            last = np.arange(-1, steps - 1)
            np.maximum.at(last, self.bases, np.arange(steps))
            until = end(np.where(last < 0, -1, self.node.reshape(steps, -1).T[:, last]).T.ravel())
        there: slice | Ints = slice(None)
        if self.owned:  # what comes to others is written in its place; what nobody reads there does not come
            comes = provider != self.node
            made[in_step:] = np.where(self.at_owner[old], made[in_step:], end(provider[old]))
            until = np.where(self.at_owner, until, np.where(comes, start(provider), end(taker)))
            has = self.at_owner.copy()
            if self.state.parameters is Home.COPIED:
                has |= np.append(np.ones(in_step, dtype=bool), comes[old])
            there = np.flatnonzero(has)
        device, stage, version = (column[there] for column in (holders.device, holders.stage, holders.step))
        copies = np.full(len(holders), -1, dtype=np.int32)
        copies[there] = self.build.hold(
            Category.PARAMETERS,
            device=device,
            stage=stage,
            version=version,
            size=self.sizes.parameters[there],
            begin=made[there],
            end=until[there],
        )
        return copies

    def hold_until_read(self, copies: Ints) -> None:
        """Hold versions until they have been read, which may be after the next one is there."""
        for _, last_use, row in self._readers():
            self.build.keep(copies[row], end(last_use))

    def hold_optimizers(self) -> None:
        """Hold optimizer states where updates are made, always."""
        updates, last = self.updates, slice(-self.updates.in_step, None)
        size = self.model.size("optimizer")[updates.stage] if self.owned else self.sizes.optimizer
        of = {"device": updates.device[last], "stage": updates.stage[last], "version": updates.step[last]}
        always = np.full(updates.in_step, -1)
        self.build.hold(Category.OPTIMIZER, size=size[last], begin=always, end=end(updates.node[last]), **of)

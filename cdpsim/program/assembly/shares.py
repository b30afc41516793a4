"""Exchanges between data ranks that go one after another in streams: of buckets, and of values split among ranks.

A *sharding group* is the ranks that share what is split: of each stage, `shard` data ranks that follow each other. Sums
of gradients go to shares by a reduce-scatter in each group, and on by an all-reduce of equal shares across the groups.
New parameters, or those that a task uses, come from shares by an all-gather in each group. Where nothing is split, all
holders of a stage are one group, and an all-reduce sums for all.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.model import Model
from cdpsim.model.runtime import Habits
from cdpsim.model.stage import Tie
from cdpsim.numeric.columns import Flags, Ints, expand_ranges, group_numbers, group_starts, matching_pairs, sort_by
from cdpsim.program import Category, Content, EdgeKind, Op, Stream
from cdpsim.program.assembly.axis import Axis
from cdpsim.program.assembly.build import Builder, Location, end, start
from cdpsim.program.assembly.runtime import gradients_at_first, hold_gradients
from cdpsim.program.assembly.sharded import Uses
from cdpsim.program.assembly.tied import sum_shared, unshared_gradients
from cdpsim.program.assembly.update import Updates, pull
from cdpsim.schedules.buckets import Buckets, Units
from cdpsim.schedules.state import Home, When

_NORM_BYTES = 4  # a number in fp32


class Groups(NamedTuple):
    """Groups of the holders in one step: a number for each holder, and a row for each group.

    `place` counts the groups of a stage; stages on the same devices have theirs in the same order.
    """

    of: Ints
    members: Ints  # how many it has
    number: Ints  # among the program's groups; -1 where it has one member
    place: Ints
    first: Ints  # of each stage, its first group
    many: Ints  # of each stage, how many groups it has


class Sums(NamedTuple):
    """The messages that sum a step's gradients, as numbers in it: a row for each holder and each of its units."""

    row: Ints
    inside: Ints
    across: Ints  # -1 where a group is alone
    units: Units
    unit: Ints  # of each message inside


class Use(NamedTuple):
    """Uses of gathered parameters: a row for each holder and use."""

    task: Ints  # that reads them first
    last: Ints  # with which they go
    holder: Ints
    number: Ints  # of the pass, among those of its holder
    back: Ints  # 0 in the forward, 1 in the backward, 2 in the second part of a split one


class SharedAxis(Axis):
    """The holders of all stages, whose exchanges go in streams."""

    def __init__(self, updates: Updates, model: Model, habits: Habits, build: Builder, once: tuple[Tie, ...]) -> None:
        state, shape = updates.tables.passes.schedule.state, updates.tables.passes.shape
        self.shard = shape.shard if state.splits else 1
        padded = model.padded(self.shard, state.padding) if state.padding and self.shard > 1 else model
        super().__init__(updates, padded, habits, build)
        self.whole = self.sizes
        self._lenders = [tie.stages[0] for tie in once]  # stages with tensors of others
        self._summed: list[tuple[Ints, Ints, Ints]] = []  # sums of gradients, with their steps and devices
        if self.is_hosted:
            self.whole = self.whole._replace(parameters=np.zeros_like(self.whole.parameters))
        kept = {"parameters": self.state.parameters, "optimizer": self.state.optimizer}
        self.sizes = self.whole._replace(
            **{name: self.share(getattr(self.whole, name)) for name, home in kept.items() if home is Home.SPLIT}
        )

    def share(self, size: Ints) -> Ints:
        """Return the bytes of a share; the last one may be padded."""
        return -(-size // self.shard)

    def gathered(self, size: Ints, ranks: Ints | int) -> Ints:
        """Return the bytes of as many equal shares as ranks have of a size."""
        return ranks * -(-size // ranks)

    # Groups

    @cached_property
    def _rank(self) -> tuple[Ints, Ints]:
        """The data rank of each holder in a step, and its device's number among those of the rank."""
        return np.divmod(self.holders.device[: self.holders.in_step], self.passes.replica_devices)

    @cached_property
    def inside(self) -> Groups:
        """The groups that share what is split."""
        rank, own = self._rank
        return self._groups(own, rank // self.shard, run=self.shard) if self.state.splits else self._groups()

    @cached_property
    def across(self) -> Groups:
        """The holders of equal shares, one of each group."""
        rank, _ = self._rank
        return self._groups(rank % self.shard, apart=self.shard)

    def _groups(self, *columns: Ints, run: int = 0, apart: int = 1) -> Groups:
        """Group the holders of each stage that are equal in these columns.

        That is a `run` of replicas, by default all, of which each group has those that are so far `apart`.
        """
        in_step = self.holders.in_step
        stage, device = self.holders.stage[:in_step], self.holders.device[:in_step]
        order = sort_by(stage, *columns, device)
        head = group_starts(stage[order], *(column[order] for column in columns))
        members = np.diff(np.append(head, in_step))
        of = np.empty(in_step, dtype=np.int32)
        of[order] = np.repeat(np.arange(len(head), dtype=np.int32), members)
        number = np.full(len(head), -1, dtype=np.int32)
        whole = members * ((run or self.fold) // apart) if self.passes.shape.folded else members
        for k in np.flatnonzero(whole > 1).tolist():
            here = device[order[head[k] : head[k] + members[k]]]
            number[k] = self.build.group(here, self.ranks_of_run(here, run, apart))
        members = whole
        many = np.bincount(stage[order[head]], minlength=self.passes.n)
        first = np.cumsum(many) - many
        return Groups(of, members, number, np.arange(len(head)) - first[stage[order[head]]], first, many)

    @cached_property
    def several(self) -> Flags:
        """Whether each group of a step and stage exchanges something inside."""
        return np.tile(self.inside.members[self.inside.first] > 1, self.passes.steps)

    # Units

    @cached_property
    def _runs(self) -> list[int]:
        """The stages behind which another one has other devices."""
        holders, in_step = self.holders, self.holders.in_step
        first = np.append(holders.first[: self.passes.n], in_step).tolist()
        devices = [holders.device[low:high].tobytes() for low, high in pairwise(first)]
        return [j + 1 for j in range(self.passes.n) if devices[j : j + 1] != devices[j + 1 : j + 2]]

    def _units(self, sizes: Ints, buckets: Buckets | None, tensors: list[list[int]] | None = None) -> Units:
        """Return what goes in one message: a stage, or a bucket of tensors; of None, each stage has one."""
        if buckets is None:
            return Units.of_stages(sizes)
        return Units.of_buckets(tensors or [[size] for size in sizes.tolist()], self._runs, buckets)

    def _eras(self) -> Iterator[tuple[range, Buckets | None]]:
        """Yield steps with their buckets: in the first step torch may have one for all."""
        buckets, steps = self.state.buckets, self.passes.steps
        begin = 0
        if buckets is not None and buckets.whole_first_step:
            yield range(1), Buckets((2**62,))
            begin = 1
        yield range(begin, steps), buckets

    # Reductions

    @property
    def rounds(self) -> int:
        """How often a step sums the gradients of a stage: after each of its passes, or once."""
        return len(self.gives[0]) if self.state.reduce is When.EACH else 1

    @cached_property
    def gives(self) -> Ints:
        """The tasks that give gradients: step by pass of the holder by holder."""
        holders, passes = self.holders, self.passes
        row, task = holders.row.ravel(), passes.last.ravel()
        order = sort_by(row, self.tables.lanes.rank[task])
        count = np.bincount(row)
        if (count != count[0]).any():
            problem = "sums after each pass, and some devices have more passes of a stage than others"
            raise RequestError("reduce", f"{problem}; take end or last")
        return task[order].reshape(passes.steps, holders.in_step, -1).transpose(0, 2, 1)

    def reduce(self) -> Ints:
        """Sum gradients to where updates are made, and return the last message, or the update, that takes each sum."""
        sizes = unshared_gradients(self.tables, self.model)
        for steps, buckets in self._eras():
            sums = self._plan(self._units(sizes, buckets, _tensors_of(self.model, sizes)))
            if len(steps) and len(sums.row):
                self._sum(sums, np.arange(steps.start, steps.stop))
        shared = sum_shared(self.updates, self.model, self.build, wait=self.waits_for_end, stream=Stream.REDUCE)
        for message, devices in shared:
            rows = np.flatnonzero(np.isin(self.holders.device, devices))
            if self.state.one_step:
                self.build.link(message[self.holders.step[rows]], self.node[rows])
            step = np.repeat(np.arange(self.passes.steps), len(devices))
            self._summed.append((message[step], step, np.tile(devices, self.passes.steps)))
        taker = self.taken[:, -1].ravel()
        alone = np.flatnonzero(taker == self.node)
        self.build.link(self.holders.last_task[alone], self.node[alone])
        return taker

    @cached_property
    def taken(self) -> Ints:
        """The last message inside its group that takes each holder's gradients: by step, round and holder.

        Where a group is alone it is the update.
        """
        steps, in_step = self.passes.steps, self.holders.in_step
        return np.repeat(self.node.reshape(steps, 1, in_step), self.rounds, axis=1)

    def sum_norms(self) -> None:
        """Sum the norm of all gradients over the devices that have some of them, before any of these updates."""
        holders, build, places = self.holders, self.build, self.passes.replica_devices
        rank = np.arange(self.passes.devices, dtype=np.int32) // places // self.shard
        groups = np.split(np.arange(len(rank), dtype=np.int32), np.flatnonzero(np.diff(rank)) + 1)
        alone = np.flatnonzero(self.taken[:, -1].ravel() == self.node)
        ends = [*self._summed, (holders.last_task[alone], holders.step[alone], holders.device[alone])]
        node, step, device = (np.concatenate(column) for column in zip(*ends, strict=True))
        for members in groups if places * self.shard > 1 else ():
            steps = np.arange(self.passes.steps, dtype=np.int32)
            group = build.group(members, self.ranks_of_run(members, self.shard))
            message = build.send(
                Op.ALL_REDUCE,
                Content.NORM,
                stage=np.full(len(steps), -1),
                step=steps,
                src=-1,
                dst=group,
                size=_NORM_BYTES,
                stream=Stream.REDUCE,
            )
            mine = np.isin(device, members)
            pairs = np.unique(np.stack([node[mine], message[step[mine]]]), axis=1)
            build.link(pairs[0], pairs[1])
            rows = np.flatnonzero(np.isin(holders.device, members))
            build.link(message[holders.step[rows]], self.node[rows])

    def _plan(self, units: Units) -> Sums:
        """Number the messages of a step that sum these units."""
        inside, stage = self.inside, self.holders.stage[: self.holders.in_step]
        units = Units(*(column[inside.members[inside.first[units.first]] > 1] for column in units))
        many, first = inside.many[units.first], units.first
        low = np.cumsum(many) - many
        of, covered = expand_ranges(units.first, units.last + 1)
        pair, row = matching_pairs((covered,), (stage,))
        unit = of[pair]
        number = low[unit] + inside.place[inside.of[row]]
        across = np.full(len(row), -1)
        if self.state.splits:
            group = self.across.of[row]
            far = np.cumsum(self.across.many[first]) - self.across.many[first]
            number_across = np.cumsum(self._across_groups(units)[2]) - 1
            across = np.where(self.across.members[group] > 1, number_across[far[unit] + self.across.place[group]], -1)
        return Sums(row, number, across, units, np.repeat(np.arange(len(many)), many))

    def _sum(self, sums: Sums, t: Ints) -> None:
        """Send the sums of steps t."""
        build, holders, in_step = self.build, self.holders, self.holders.in_step
        inside = self._send_inside(sums, t)
        mine = final = inside[:, :, sums.inside]
        if (sums.across >= 0).any():
            across = self._send_across(sums, t)
            pairs = np.unique(np.stack([sums.inside, sums.across])[:, sums.across >= 0], axis=1)
            build.link(inside[:, :, pairs[0]].ravel(), across[:, :, pairs[1]].ravel())
            final = np.where(sums.across >= 0, across[:, :, sums.across], mine)
        gives = self.gives if self.state.reduce is When.EACH else holders.last_task.reshape(-1, 1, in_step)
        given = gives[t][:, :, sums.row]
        build.link(given.ravel(), mine.ravel())
        if self.waits_for_end:
            ends = self.tables.lanes.step_ends[t][:, None, holders.device[sums.row]]
            build.link(ends.ravel(), mine.ravel(), EdgeKind.BARRIER)
        self._summed.append(
            (final[:, -1].ravel(), np.repeat(t, len(sums.row)), np.tile(holders.device[sums.row], len(t)))
        )
        node = self.node.reshape(-1, 1, in_step)[t][:, :, sums.row]
        build.link(final.ravel(), np.broadcast_to(node, final.shape).ravel())
        self._pace(sums, given, mine, final)
        if self.state.one_step:
            self._join_updates(sums, final[:, -1], t)
        backwards = slice(None, None, -1)  # so that of several units of a stage the lowest, which ends last, stays
        self.taken[t[:, None, None], np.arange(self.rounds)[:, None], sums.row[backwards]] = mine[:, :, backwards]

    def _send_inside(self, sums: Sums, t: Ints, content: Content = Content.GRADIENT) -> Ints:
        """Send sums in each group, and return the messages: by step, by round, in the order of their numbers."""
        units, unit = sums.units, sums.unit
        place = np.arange(len(unit)) - (np.cumsum(self.inside.many[units.first]) - self.inside.many[units.first])[unit]
        group = self.inside.number[self.inside.first[units.first][unit] + place]
        op, size = (Op.REDUCE_SCATTER, self.share(units.size)) if self.state.splits else (Op.ALL_REDUCE, units.size)
        return self._send_sums(op, t, unit, units, group, size[unit], Stream.REDUCE, content)

    def _send_across(self, sums: Sums, t: Ints) -> Ints:
        """Send the sums of shares across groups."""
        units = sums.units
        unit, group, several = self._across_groups(units)
        unit, number = unit[several], self.across.number[group[several]]
        return self._send_sums(Op.ALL_REDUCE, t, unit, units, number, self.share(units.size)[unit], Stream.ACROSS)

    def _across_groups(self, units: Units) -> tuple[Ints, Ints, Flags]:
        """Return the unit of each share, the group across which it is summed, and whether that has several members."""
        many = self.across.many[units.first]
        unit = np.repeat(np.arange(len(many)), many)
        group = self.across.first[units.first][unit] + np.arange(len(unit)) - (np.cumsum(many) - many)[unit]
        return unit, group, self.across.members[group] > 1

    def _send_sums(
        self,
        op: Op,
        t: Ints,
        unit: Ints,
        units: Units,
        group: Ints,
        size: Ints,
        stream: Stream,
        content: Content = Content.GRADIENT,
    ) -> Ints:
        shape = len(t), self.rounds, len(unit)
        step, _, k = (index.ravel() for index in np.indices(shape, dtype=np.int32))
        message = self.build.send(
            op,
            content,
            stage=units.first[unit][k],
            step=t[step].astype(np.int32),
            src=-1,
            dst=group[k],
            size=size[k],
            stages=(units.last - units.first + 1)[unit][k],
            stream=stream,
        )
        return message.reshape(shape)

    def _pace(self, sums: Sums, given: Ints, inside: Ints, final: Ints) -> None:
        """Let tasks wait for sums.

        After each pass, the next pass waits for its sums. A rank that splits gradients has one buffer for sums: when a
        task has given its gradients, the next one waits for the sums of the tasks before.
        """
        holders, build, rank = self.holders, self.build, self.tables.lanes.rank
        all_columns = (holders.device[sums.row], given, inside, final)
        columns = [np.broadcast_to(column, given.shape).ravel() for column in all_columns]
        order = sort_by(columns[0], columns[2], rank[columns[1]])
        last = np.append(group_starts(columns[0][order], columns[2][order])[1:], len(order)) - 1  # gradient of each sum
        order = order[last]
        order = order[sort_by(columns[0][order], rank[columns[1][order]], columns[2][order])]
        device, given, inside, final = (column[order] for column in columns)
        after, has_next = self._next_in_lane(given)
        if self.state.gradients is Home.SPLIT and not self.waits_for_end:
            first = group_starts(device, given)
            later = np.append(first[1:], 0)[group_numbers(first, len(device))]  # a sum of the task that gives next
            rows = np.flatnonzero((device[later] == device) & (later > 0) & has_next[later])
            build.link(inside[rows], after[later[rows]], EdgeKind.ROOM)
        if self.state.reduce is When.EACH:
            first = group_starts(device, given // self.passes.phases)
            ends = np.append(first[1:], len(device)) - 1
            rows = ends[group_numbers(first, len(device))]
            waits = np.flatnonzero(has_next[rows])
            build.link(final[waits], after[rows[waits]], EdgeKind.ROOM)

    def _join_updates(self, sums: Sums, final: Ints, t: Ints) -> None:
        """Let all updates of a device wait for all its sums of the last round, whose passes wait for those before."""
        device = self.holders.device[: self.holders.in_step]
        columns = device[sums.row], sums.across, sums.inside
        order = sort_by(*columns)
        once = order[group_starts(*(column[order] for column in columns))]
        summed, row = matching_pairs((device[sums.row[once]],), (device,))
        node = self.node.reshape(self.passes.steps, -1)[t][:, row]
        self.build.link(final[:, once[summed]].ravel(), node.ravel())

    def _next_in_lane(self, task: Ints) -> tuple[Ints, Flags]:
        """Return the task behind each one in its lane, and whether there is one."""
        lanes = self.tables.lanes
        place = np.minimum(lanes.rank[task] + 1, len(lanes.tasks) - 1)
        return lanes.tasks[place], (lanes.number[place] == lanes.number[lanes.rank[task]]) & (place != lanes.rank[task])

    # Parameters

    def spread(self) -> Ints:
        """Bring new versions that tasks read from shares to all holders; return what the readers of each wait for."""
        holders, build, in_step, steps = self.holders, self.build, self.holders.in_step, self.passes.steps
        size = np.zeros(self.passes.n, dtype=np.int64)
        np.maximum.at(size, holders.stage, self.whole.parameters)  # a device has a tied tensor once
        provider, plan = self.node.copy(), self._plan(self._units(size, self.state.buckets))
        read = np.zeros((steps + 1) * in_step, dtype=bool)
        for _, _, row in self.readers():
            read[row] = True
        wanted = np.zeros((len(plan.unit), steps), dtype=bool)
        np.logical_or.at(wanted, plan.inside, read.reshape(-1, in_step)[1:, plan.row].T)
        t, number = np.nonzero(wanted.T)
        message = np.full((steps, len(plan.unit)), -1)
        message[t, number] = self._gather(plan, t, number)
        t, member = np.nonzero(wanted[plan.inside].T)
        if not len(t):
            return provider
        brought, row = message[t, plan.inside[member]], plan.row[member]
        provider[t * in_step + row] = brought
        where = Location(holders.device[row], holders.stage[row], (t + 1).astype(np.int32))
        build.land(brought, where, size[where.stage])
        if self.state.gather == "early":
            build.link(self.node[t * in_step + row], brought)
        else:
            self._wait_for_updates(brought, t, where.device)
        if self.state.gather == "step":
            self._wait_for_all(brought, t, where.device)
        return provider

    def _gather(self, plan: Sums, t: Ints, number: Ints) -> Ints:
        """Gather the parameters that updates of steps t have made, those of a number in the plan for each."""
        units, unit = plan.units, plan.unit[number]
        groups = self.inside.first[units.first]
        place = number - (np.cumsum(self.inside.many[units.first]) - self.inside.many[units.first])[unit]
        return self.build.send(
            Op.ALL_GATHER,
            Content.PARAMETERS,
            stage=units.first[unit],
            step=t.astype(np.int32),
            src=-1,
            dst=self.inside.number[groups[unit] + place],
            size=self.gathered(units.size, self.shard)[unit],
            versions=1,
            stages=(units.last - units.first + 1)[unit],
            stream=Stream.GATHER,
        )

    def _wait_for_updates(self, brought: Ints, t: Ints, device: Ints) -> None:
        """Let no gather begin before its devices have made all their updates of the step."""
        message, t, device = np.unique(np.stack([brought, t, device]), axis=1)
        row, each = matching_pairs((self.holders.step, self.holders.device), (t, device))
        self.build.link(self.node[row], message[each])

    def _wait_for_all(self, brought: Ints, t: Ints, device: Ints) -> None:
        """Let no forward of a device begin before all new parameters are there."""
        lanes = self.tables.lanes
        head = lanes.tasks[lanes.step_heads]
        steps, devices = self.passes.step_of(head // self.passes.phases), self.passes.task_device[head]
        first = np.full((self.passes.steps + 1, self.passes.devices), -1, dtype=np.int32)
        first[steps, devices] = head
        reader = first[t + 1, device]
        self.build.link(brought[reader >= 0], reader[reader >= 0])

    def hand_out(self, prefetch: int) -> None:
        """Gather parameters from shares before their uses, and drop them after these."""
        build, lanes, holders = self.build, self.tables.lanes, self.holders
        use, backward = self._uses(), self._backward_groups
        row, step, stage = use.holder % holders.in_step, holders.step[use.holder], holders.stage[use.holder]
        group = np.where(use.back, backward.of[row], self.inside.of[row])
        first = group_starts(step, use.number, use.back, group)
        both = np.concatenate([self.inside.number, backward.number])
        number = both[group + (use.back > 0) * len(self.inside.number)]
        size = self.model.size("parameters")[stage]
        ranks = np.where(use.back, self._backward_ranks, self.shard)
        ahead, where = self._ahead(use, prefetch), holders.where.take(use.holder)
        each = fetched = None
        if self.is_hosted:
            each = fetched = self._fetch(use, where, -(-size // ranks), ahead)
        if self.shard > 1:
            message = build.send(
                Op.ALL_GATHER,
                Content.PARAMETERS,
                stage=stage[first],
                step=step[first] - 1,
                src=-1,
                dst=number[first],
                size=self.gathered(size, ranks)[first],
                versions=1,
                stream=Stream.GATHER,
            )
            each = np.repeat(message, np.diff(np.append(first, len(group))))
            pull(lanes, build, each, lanes.rank[use.task], ahead)
        assert each is not None, "parameters are elsewhere between their uses"
        if fetched is None:
            self._wait_for_shares(use, each)
        elif self.shard > 1:
            build.link(fetched, each)
            build.land(fetched, where, -(-size // ranks), end(each))
        build.link(each, use.task)
        self.sharded.hold_gathered(Uses(each, use.task, use.last, where, size), early=prefetch > 0)
        if isinstance(self.state.reshard, int):
            self._hold_between(use, where, -(-size // self.state.reshard))

    def _wait_for_shares(self, use: Use, message: Ints) -> None:
        """Let messages of uses wait for the updates of the shares that their devices give."""
        later = use.holder >= self.holders.in_step
        self.build.link(self.node[use.holder[later] - self.holders.in_step], message[later])

    def _fetch(self, use: Use, where: Location, size: Ints, ahead: Ints) -> Ints:
        """Fetch shares from hosts, and before from their disks, a task earlier than they are gathered.

        They come in the order of their uses, whichever update is made first.
        """
        build, lanes, on_disks = self.build, self.tables.lanes, any(stage.nvme for stage in self.model.stages)
        messages = [
            build.send(
                Op.P2P,
                Content.FETCHED,
                stage=where.stage,
                step=where.version - 1,
                src=where.device,
                dst=where.device,
                size=size,
                stream=stream,
            )
            for stream in (*[Stream.NVME] * on_disks, Stream.HOST)
        ]
        self._wait_for_shares(use, messages[0])
        order = sort_by(where.device, lanes.rank[use.task])
        again = np.flatnonzero(where.device[order[1:]] == where.device[order[:-1]])
        build.link(messages[0][order[again]], messages[0][order[again + 1]], EdgeKind.STREAM)
        for before, after in pairwise(messages):
            build.link(before, after)
        for k, message in enumerate(reversed(messages), start=1):
            pull(lanes, build, message, lanes.rank[use.task], ahead + k)
        return messages[-1]

    def _ahead(self, use: Use, prefetch: int) -> Ints:
        """Return how many tasks before each use is the one after which its gather may begin.

        A gather is as many tasks early as prefetched, one more before a forward, where FSDP2 has two buffers. It does
        not begin before its device has dropped the same parameters, and gathers come in the order of their uses.
        """
        rank = self.tables.lanes.rank
        at = rank[use.task].astype(np.int64)
        forth: Ints = (use.back == 0).astype(np.int64)
        place = at - 1 - prefetch - (prefetch > 0) * forth
        order = sort_by(use.holder, at)
        again = np.flatnonzero(use.holder[order[1:]] == use.holder[order[:-1]])
        held, later = order[again], order[again + 1]
        place[later] = np.maximum(place[later], rank[use.last[held]])
        order = sort_by(at)
        place[order] = np.maximum.accumulate(place[order])
        return at - place

    @property
    def _backward_ranks(self) -> int:
        """How many ranks gather parameters for backwards: fewer where parameters stay in shares of these."""
        return self.state.reshard if isinstance(self.state.reshard, int) else self.shard

    @cached_property
    def _backward_groups(self) -> Groups:
        """The groups that gather parameters for backwards."""
        if self._backward_ranks == self.shard:
            return self.inside
        rank, own = self._rank
        return self._groups(own, rank // self._backward_ranks, run=self._backward_ranks)

    def _uses(self) -> Use:
        """Return the uses of parameters in the order of their messages: each of a task, or of several where they stay.

        The second part of a split backward is one, too: torch's runtime asserts that parameters are there.
        """
        passes, holders, rank = self.passes, self.holders, self.tables.lanes.rank
        kinds = [passes.forward, passes.backward, *[passes.last] * passes.splits]
        task = np.concatenate([kind.ravel() for kind in kinds])
        holder = np.tile(holders.row.ravel(), len(kinds))
        number = np.tile(_occurrences(holders.row.ravel()), len(kinds))
        back = np.repeat(np.arange(len(kinds)), passes.stage.size)
        stays = np.isin(np.tile(passes.stage, len(kinds)), self._staying)
        back[stays] = 0
        if self.state.reshard == "step" or not passes.schedule.order.one_place:
            number[stays] = 0
        order = sort_by(holder, number, back, rank[task])
        order = order[self.model.size("parameters")[holders.stage[holder[order]]] > 0]
        first = group_starts(holder[order], number[order], back[order])
        last = order[np.append(first[1:], len(order))[: len(first)] - 1]
        first = order[first]
        use = Use(task[first], task[last], holder[first], number[first], back[first])
        row = use.holder % holders.in_step
        group = np.where(use.back, self._backward_groups.of[row], self.inside.of[row])
        order = sort_by(holders.step[use.holder], use.number, use.back, group)
        return Use(*(column[order] for column in use))

    @property
    def _staying(self) -> Sequence[int]:
        """The stages whose parameters stay after a forward, among them those with tensors that later stages use."""
        n = self.passes.n
        asked = {"no": range(n), "step": range(n), "root": (0, n - 1)}.get(str(self.state.reshard), ())
        return [*asked, *self._lenders]

    def _hold_between(self, use: Use, where: Location, size: Ints) -> None:
        """Hold shares of a smaller group from a forward to its backward, and between the parts of that."""
        order = sort_by(use.holder, use.number, use.back)
        again = np.flatnonzero(use.back[order[1:]] > 0)
        before, after = order[again], order[again + 1]
        begin, until = end(use.last[before]), start(use.task[after])
        self.build.hold(Category.PARAMETERS, where.take(before), size[before], begin, until)

    # Memory

    def hold_gradients(self, taker: Ints, provider: Ints) -> None:
        """Hold sums until they have gone to shares, and shares until they are applied; copied sums stay whole."""
        if self.state.gradients is Home.COPIED or not self.inside.members.max() > 1:
            super().hold_gradients(taker, provider)
            return
        holders, build, rounds = self.holders, self.build, self.rounds
        size, share = self.whole.gradients, self.share(self.whole.gradients)
        first_size = gradients_at_first(self.model, self.habits, self.passes)[holders.stage]
        until = self.taken.transpose(1, 0, 2).reshape(rounds, -1)
        if self.state.reduce is When.EACH:
            tasks = self.gives.transpose(1, 0, 2).reshape(rounds, -1)
        else:
            tasks = holders.first_task[None]
        sums = [
            hold_gradients(build, holders.where, size, first_size, first, end(message))
            for first, message in zip(tasks, until, strict=True)
        ]
        self._hold_given(np.stack(sums), until)
        begin = end(until[0])
        if self.habits.gradients == "kept":
            begin = np.append(np.full(holders.in_step, -1), end(self.node[: -holders.in_step]))
        build.hold(Category.GRADIENTS, holders.where, share, begin, end(self.node))

    def _hold_given(self, sums: Ints, until: Ints) -> None:
        """Hold what a runtime holds of whole gradients that have gone to sums: rows of both are rounds."""
        holders, rounds = self.holders, len(until)
        given = self.gives if self.state.reduce is When.EACH else holders.last_task.reshape(-1, 1, holders.in_step)
        task = given.transpose(1, 0, 2).ravel()
        rows = np.flatnonzero(until.ravel() != np.tile(self.node, rounds))
        holder = rows % len(holders)
        where, whole = holders.where.take(holder), self.whole.gradients[holder]
        self.sharded.hold_given(sums.ravel()[rows], task[rows], until.ravel()[rows], where, whole, self.share(whole))

    def hold_parameters(self, taker: Ints, provider: Ints) -> Ints:
        """Hold versions from when they are there until the next is; what is gathered in place is then on its way."""
        if self.state.optimizer is Home.COPIED:
            return super().hold_parameters(taker, provider)
        holders, in_step = self.holders, self.holders.in_step
        made = np.append(np.full(in_step, -1), end(provider[:-in_step]))
        until = np.where(provider == self.node, end(self.node), start(provider))
        return self.build.hold(Category.PARAMETERS, holders.where, self.sizes.parameters, made, until)


def _tensors_of(model: Model, sizes: Ints) -> list[list[int]]:
    """Return the bytes of each stage's gradients; in one, where it shares some with other stages."""
    return [
        [*each] if sum(each) == size else [size]
        for each, size in zip(model.gradient_tensors(), sizes.tolist(), strict=True)
    ]


def _occurrences(key: Ints) -> Ints:
    """Return how many equal numbers stand before each one.

    >>> _occurrences(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = sort_by(key, np.arange(len(key), dtype=np.int32))
    first = group_starts(key[order])
    number = np.empty(len(key), dtype=np.int32)
    number[order] = np.arange(len(key)) - np.repeat(first, np.diff(np.append(first, len(key))))
    return number

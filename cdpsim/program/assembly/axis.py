"""`DataAxis`: the copies of stages on data ranks, the bytes of each, and the groups of ranks that exchange them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cdpsim.model import Model
from cdpsim.model.runtime import Behaviours
from cdpsim.numeric.columns import Flags, Ints, expand_ranges, group_starts, sort_by
from cdpsim.program import EdgeKind
from cdpsim.program.assembly.build import Builder, end
from cdpsim.program.assembly.runtime_buffers import Keeping
from cdpsim.program.assembly.task_tables import Copies, Passes, Tables
from cdpsim.program.assembly.updates import CopySizes, Updates, copy_sizes
from cdpsim.schedules.buckets import Units
from cdpsim.schedules.state import Placed, State, When


class Groups(NamedTuple):
    """Groups of the copies in a step: the group of each copy, then columns with a row for each group or stage.

    Stages on the same devices have their groups in the same order.
    """

    of: Ints
    members: Ints  # of each group
    number: Ints  # of each group among the program's; -1 where it has one member
    place: Ints  # of each group among those of its stage
    first: Ints  # of each stage, its first group
    many: Ints  # of each stage, how many it has

    def messages_of(self, units: Units) -> tuple[Ints, Ints, Ints]:
        """Return the unit and the group of each message, if each unit has one in each group; and each unit's first."""
        many, first = self.many[units.first], self.first[units.first]
        return *expand_ranges(first, first + many), np.cumsum(many) - many


@dataclass(frozen=True, eq=False)
class DataAxis:
    """The inputs of exchanges, with columns that have a row for each copy: of a stage, on a device, in a step."""

    updates: Updates
    model: Model
    behaviours: Behaviours
    build: Builder
    tables: Tables
    passes: Passes
    copies: Copies
    state: State
    stage: Ints  # of the copies in one step
    device: Ints
    update: Ints  # that takes the copy's gradients: its own, or its owner's; -1: none does
    whole: CopySizes  # in tasks and messages
    stored: CopySizes  # between uses: of split values a share
    shard: int  # how many ranks share split values
    run: int  # how many data ranks do, where others are ranks of the same device
    groups: Groups  # of ranks that share split values; where nothing is split, of all copies of a stage
    several: Flags  # whether copies of each step and stage exchange something
    owned: bool  # whether one copy of each stage makes the update
    at_owner: Flags  # whether each copy makes the update that takes its gradients
    is_hosted: bool  # whether hosts have parameters between their uses
    stays: bool  # whether devices have parameters between their uses
    waits_for_end: bool  # whether sums wait for the end of the step on each device
    part: CopySizes  # of each stage, what its messages carry: all, or all but what experts have
    experts: "DataAxis | None" = None  # the exchanges of what experts have, among other ranks
    of_experts: bool | None = None  # whether these are of what experts have, or of all else; None: of all

    @cached_property
    def keeping(self) -> Keeping:
        """The time for which passes keep what they make."""
        return Keeping(self.updates, self.model, self.behaviours, self.build, self.passes)

    @property
    def updates_together(self) -> bool:
        """Whether each device updates all of its copies in one step of an optimizer."""
        return self.behaviours.joint_updates and not self.owned

    def keep_for_updates(self, number: Ints, rows: slice = slice(None)) -> None:
        """Hold buffers of copies, all or some rows, until all updates of their device's step have ended, if one."""
        if self.updates_together:
            group, _, last = self.updates.of_devices
            self.build.keep(number, end(self.updates.node[last[group[rows]]]))

    @property
    def parts(self) -> "tuple[DataAxis, ...]":
        """The exchanges of what experts have, if any, and of all else, in the order in which they go."""
        return (self,) if self.experts is None else (self.experts, self)

    def share(self, size: Ints) -> Ints:
        """Return the bytes of a share; the last one may be padded."""
        return -(-size // self.shard)

    def shares_of(self, kind: str, size: Ints, stage: Ints) -> Ints:
        """Return the bytes of shares of one of stages' sizes, of which experts' are among other ranks."""
        if self.experts is None:
            return self.share(size)
        of_experts = np.array([each.of_experts(kind) for each in self.model.stages])[stage]
        return self.share(size - of_experts) + self.experts.share(of_experts)

    def group_copies(self, key: str, run: int, copies: int = 1) -> Groups:
        """Group the data ranks `run` by `run`, or those at equal places of such runs."""
        return _group(self.tables, self.build, key, run, copies)


class Ends(NamedTuple):
    """Nodes after which gradients are summed on a device: the last message, or without one the last backward."""

    node: Ints
    step: Ints
    device: Ints


class Sums(NamedTuple):
    """Sums of gradients: columns with a row for each round and a column for each copy.

    There is a round after each pass, or one in a step.
    """

    given: Ints  # the task that gives the gradients
    taken: Ints  # the last message inside the copy's group that takes them; where it is alone, its update
    ends: list[Ends]

    @property
    def consumer(self) -> Ints:
        """The message or update that takes the gradients of each copy after the last round."""
        consumer: Ints = self.taken[-1]
        return consumer


class Brought(NamedTuple):
    """Arrivals of new versions at their copies."""

    producer: Ints  # of the next version of each copy: a message, or the update that makes it there
    of_experts: Ints | None = None  # the same of what experts have, where that comes by itself


def find_axis(updates: Updates, model: Model, behaviours: Behaviours, build: Builder) -> DataAxis:
    """Find the copies that exchange something, their bytes, and their groups."""
    tables, passes, copies = updates.tables, updates.tables.passes, updates.tables.copies
    state, order = passes.schedule.state, passes.schedule.order
    run, shard = (passes.shape.shard, passes.shape.sharers) if state.splits else (1, 1)
    if state.padding and shard > 1:
        model = model.padded(shard, state.padding)
    whole, is_hosted = copy_sizes(tables, model), any(stage.host_parameters for stage in model.stages)
    if is_hosted:
        whole = whole._replace(parameters=np.zeros_like(whole.parameters))
    placements = {"parameters": state.parameters, "optimizer": state.optimizer}
    groups = _group(tables, build, "run" if state.splits else "all", run, passes.copies)
    several, owned = np.tile(groups.members[groups.first] > 1, passes.steps), state.optimizer is Placed.OWNED
    axis = DataAxis(
        *(updates, model, behaviours, build, tables, passes, copies, state),
        stage=copies.stage[: copies.in_step],
        device=copies.device[: copies.in_step],
        update=_consumers(updates),
        whole=whole,
        stored=whole,
        shard=shard,
        run=run,
        groups=groups,
        several=several,
        owned=owned,
        at_owner=copies.device == updates.device[copies.of] if owned else np.ones(len(copies), dtype=bool),
        is_hosted=is_hosted,
        stays=state.parameters is Placed.COPIED or not (several.any() or is_hosted),
        waits_for_end=order.together and state.reduce is When.END,
        part=CopySizes(*(model.size(kind) for kind in CopySizes._fields)),
    )
    axis = _with_experts(axis)
    split = [name for name, placement in placements.items() if placement is Placed.SPLIT]
    shares = {name: axis.shares_of(name, getattr(whole, name), copies.stage) for name in split}
    return replace(axis, stored=whole._replace(**shares))


def _with_experts(axis: DataAxis) -> DataAxis:
    """Return the axis with the exchanges of what experts have, whose copies other ranks have than of all else."""
    mesh, has = axis.model.mesh, any(stage.expert_parameters for stage in axis.model.stages)
    if not has or not axis.state.streams or mesh.expert == mesh.tensor:  # then the same ranks have copies
        return axis
    part = CopySizes(*(np.array([stage.of_experts(kind) for stage in axis.model.stages]) for kind in CopySizes._fields))
    rest = CopySizes(*(size - less for size, less in zip(axis.part, part, strict=True)))
    apart, copies = max(1, mesh.expert // mesh.team), max(1, mesh.team // mesh.expert)
    shard, state = axis.run * copies // apart if axis.state.splits else 1, axis.state
    if state.splits and shard == 1:  # no rank of a sharding group has a copy, and those of other groups sum
        state = replace(state, parameters=Placed.COPIED, gradients=Placed.COPIED, optimizer=Placed.COPIED)
        groups = axis.group_copies("place", axis.run)
    else:
        ranks = axis.run if state.splits else axis.passes.shape.replicas
        groups = _group(axis.tables, axis.build, "some", ranks, copies, apart)
    experts = replace(axis, part=part, groups=groups, shard=shard, state=state, of_experts=True)
    return replace(axis, part=rest, experts=experts, of_experts=False)


def _consumers(updates: Updates) -> Ints:
    """Return the update that takes each copy's gradients."""
    passes, copies = updates.tables.passes, updates.tables.copies
    if passes.schedule.order.waits:
        return updates.node[copies.of] if passes.schedule.state.optimizer is Placed.OWNED else updates.node
    # The first version of a step takes its gradients; nothing takes those of steps that are thrown away.
    update = np.full((passes.steps, copies.in_step), -1)
    update[: passes.updated] = updates.node.reshape(-1, copies.in_step)[group_starts(passes.made.step)]
    return update.ravel()


def _group(tables: Tables, build: Builder, key: str, run: int, each: int, apart: int = 1) -> Groups:
    """Group the copies of each stage: all, those in one "run" of ranks, or those at one "place" of such runs.

    Of a run, "some" are those `apart` from each other. Of `each` device so many ranks are members.
    """
    passes, copies = tables.passes, tables.copies
    stage, device = copies.stage[: copies.in_step], copies.device[: copies.in_step]
    rank, own = np.divmod(device, passes.replica_devices)
    some = (*[own] * bool(tables.passes.schedule.state.splits), rank // run, rank % apart)
    columns = {"all": (), "run": (own, rank // run), "place": (rank % run,), "some": some}[key]
    run, apart = {"all": (0, 1), "run": (run, 1), "place": (0, run), "some": (run, apart)}[key]
    order = sort_by(stage, *columns, device)
    head = group_starts(stage[order], *(column[order] for column in columns))
    members = np.diff(np.append(head, len(order)))
    of = np.empty(len(order), dtype=np.int32)
    of[order] = np.repeat(np.arange(len(head), dtype=np.int32), members)
    number = np.full(len(head), -1, dtype=np.int32)
    whole = each * members * (((run or passes.fold) // apart) if passes.shape.folded else 1)
    for k in np.flatnonzero(whole > 1).tolist():
        here = device[order[head[k] : head[k] + members[k]]]
        number[k] = build.group(here, passes.alike_ranks(here, run, apart), each)
    many = np.bincount(stage[order[head]], minlength=passes.n)
    first = np.cumsum(many) - many
    return Groups(of, whole, number, np.arange(len(head)) - first[stage[order[head]]], first, many)


def readers(axis: DataAxis) -> list[tuple[Ints, Ints, Ints]]:
    """Return tasks that read a version, the last that use it, and the rows of the copies that replace it."""
    passes, in_step = axis.passes, axis.copies.in_step
    forward, backward, last = (tasks.ravel() for tasks in (passes.forward, passes.backward, passes.last))
    in_its_step = axis.copies.row % in_step
    row = (in_its_step + passes.version * in_step).ravel()
    if passes.rule.backward is None:
        return [(forward, last, row)]
    return [(forward, forward, row), (backward, last, (in_its_step + passes.backward_version * in_step).ravel())]


def order_updates(axis: DataAxis, brought: Brought) -> None:
    """Let updates wait for barriers and for what they replace, and readers for what their device has."""
    updates, build, in_step = axis.updates, axis.build, axis.updates.in_step
    if axis.passes.lagging:  # without lags a version's readers see to it that it is there before the next
        node, base = updates.node.reshape(-1, in_step), axis.passes.base
        step = np.flatnonzero(base > 0)
        build.link(node[base[step] - 1], node[step])
    if updates.barrier is not None:
        build.link(updates.barrier, updates.node, EdgeKind.BARRIER)
    for reader, _, row in readers(axis) if axis.stays else ():
        made = row >= axis.copies.in_step
        for producer in (brought.producer, brought.of_experts):
            if producer is not None:
                build.link(producer[row[made] - axis.copies.in_step], reader[made])


def earlier_sums(axis: DataAxis) -> list[tuple[int, int]]:
    """Return the earlier steps whose gradients an update takes, too, in pairs: that step, and the update's."""
    return [(given, into) for into, low in enumerate(axis.passes.first_step.tolist()) for given in range(low, into)]

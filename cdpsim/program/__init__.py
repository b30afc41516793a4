"""The intermediate form that engines and replay interpret: columns of tasks, messages, buffers and dependencies.

A program has no times. Everything that can happen is a *node*: first the compute tasks, numbered densely by
(step, micro-batch, phase), then the optimizer updates, then the messages, then the parts of devices in messages. An
*edge* says that one node starts no earlier than another ends. The tasks of a lane (one of the things that a device can
do side by side) run one after another in the order of `lane_tasks`. Either all updates take their device's time and
have a place in a lane, as tasks have, or none does: then an update happens as soon as everything it needs is there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from fractions import Fraction
from functools import cached_property, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from cdpsim.files.units import counted
from cdpsim.model.runtime import PAPER_BEHAVIOURS, Behaviours
from cdpsim.numeric.columns import Flags, Ints, group_numbers, group_starts, sort_and_group, sort_by
from cdpsim.numeric.paths import Levels, lane_edges, sort_into_levels
from cdpsim.schedules.state import REPLICATED, State


# The order of the members is the order in which rows of equal start are written: as the contract says for kinds,
# alphabetical for the rest.
class Kind(IntEnum):
    """Kind of a task: update, forward, backward, or the weight part of a backward that is split."""

    U = 0
    F = 1
    B = 2
    W = 3


class Op(IntEnum):
    """Operation by which a message travels."""

    ALL_GATHER = 0
    ALL_REDUCE = 1
    ALL_TO_ALL = 2  # of exchanges inside tasks alone
    BROADCAST = 3
    P2P = 4
    REDUCE = 5
    REDUCE_SCATTER = 6


class Stream(IntEnum):
    """Stream of a device beside its tasks, in which messages go one after another.

    Gathers and reductions take turns on one link; sums across groups of ranks have another one, and so have what comes
    from a device's host, and what comes there from disks. Such a message goes from its device to itself.
    """

    GATHER = 0
    REDUCE = 1
    ACROSS = 2
    HOST = 3
    NVME = 4


class Content(IntEnum):
    """Content of a message."""

    ACTIVATION = 0
    ACTIVATION_GRADIENT = 1
    FETCHED = 2
    GRADIENT = 3
    NORM = 4
    PARAMETERS = 5
    STATE = 6


class Category(IntEnum):
    """Category of memory that a buffer belongs to."""

    ACTIVATIONS = 0
    COMMUNICATION = 1
    GRADIENTS = 2
    OPTIMIZER = 3
    PARAMETERS = 4


class EdgeKind(IntEnum):
    """Reason why a node waits for another: data, room at the receiver or host, the end of a step, or its turn."""

    DATA = 0
    ROOM = 1
    BARRIER = 2
    STREAM = 3  # of a device, which has the other one before it


_BUFFERS_AT_ONCE = 2**12  # whose columns stay in a processor's cache


class _EqualColumns:
    """Columns of equal length."""

    def __repr__(self) -> str:
        names = ", ".join(field.name for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({len(self)} rows of {names})"

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))


@dataclass(frozen=True, eq=False, repr=False)
class Tasks(_EqualColumns):
    """Compute tasks, dense by (step, micro-batch, phase), then updates: micro-batch -1, lane -1 if they take none."""

    kind: Ints
    stage: Ints
    micro_batch: Ints
    step: Ints
    device: Ints
    lane: Ints
    version: Ints  # theta_version is read; an update makes it


class Ways(NamedTuple):
    """Ordered pairs of devices between which there are messages, each once, and the pair of each message."""

    src: Ints
    dst: Ints
    message: Ints  # messages that take a way, in their order
    number: Ints  # the way of each of these


@dataclass(frozen=True, eq=False, repr=False)
class Messages(_EqualColumns):
    """Point-to-point messages and collectives; -1 where a message belongs to no single stage or micro-batch.

    The stage of a gradient of the k-th shared tensor is -1 - k.
    """

    op: Ints
    content: Ints
    stage: Ints
    micro_batch: Ints
    step: Ints  # the step that made the content; -1 for what was there at the start
    src: Ints  # the root of a collective, -1 if it has none
    dst: Ints  # the receiver; of a collective, the number of its group
    size: Ints  # the payload that each member ends with
    versions: Ints  # parameter versions on board
    stages: Ints  # how many stages, from `stage` on, it carries something of
    stream: Ints  # which stream of its devices it takes; -1: as the devices' overlap says

    @cached_property
    def ways(self) -> Ways:
        """The ways of point-to-point messages from one device to another."""
        message = np.flatnonzero((self.op == Op.P2P) & (self.stream < Stream.HOST)).astype(np.int32)
        src, dst = self.src[message], self.dst[message]
        order, first = sort_and_group(src, dst)
        number = np.empty_like(order)
        number[order] = group_numbers(first, len(order))
        return Ways(src[order[first]], dst[order[first]], message, number)


@dataclass(frozen=True, eq=False, repr=False)
class Parts(_EqualColumns):
    """Devices' parts in messages: each takes its device's lane, or its stream, for the time of some messages.

    These are one message, or those of a collective that runs as its messages, whose channels go side by side. Rows of
    `part`, `message` and `channel` belong together.
    """

    device: Ints
    step: Ints  # of the task that it stands before or behind
    sends: Flags  # whether its device gives something to the message; else it receives
    part: Ints
    message: Ints
    channel: Ints

    def times(self, carry: NDArray[Any]) -> NDArray[Any]:
        """Return the time of each part, given that of each message: of one run, or in a column for each of several."""
        channels = int(self.channel.max(initial=0)) + 1
        taken = np.zeros((len(self), channels, *carry.shape[1:]), dtype=carry.dtype)
        np.add.at(taken, (self.part, self.channel), carry[self.message])
        longest: NDArray[Any] = taken.max(axis=1)
        return longest


_NONE = np.empty(0, dtype=np.int32)
NO_PARTS = Parts(_NONE, _NONE, _NONE.astype(np.bool_), _NONE, _NONE, _NONE)  # where all messages overlap with tasks


@dataclass(frozen=True, eq=False, repr=False)
class Edges(_EqualColumns):
    """Node `after` starts no earlier than node `before` ends."""

    before: Ints
    after: Ints
    kind: Ints


@dataclass(frozen=True, eq=False, repr=False)
class Buffers(_EqualColumns):
    """Memory of devices. A *moment* is 2 * node for its start, 2 * node + 1 for its end, -1 for the start of the run.

    A buffer is held from its `begin` moment to its `end` moment, and to each moment that `kept_until` has for it.
    """

    category: Ints
    device: Ints
    stage: Ints
    version: Ints  # of parameters, the version; else the step
    size: Ints
    begin: Ints
    end: Ints
    kept: Ints  # buffers with further uses, in any order, as often as they have some
    kept_until: Ints

    @cached_property
    def of_devices(self) -> list[Ints]:
        """The rows by device, in pieces of several devices that have few buffers together."""
        last = np.cumsum(np.bincount(self.device))
        return np.split(sort_by(self.device), last[group_starts(last // _BUFFERS_AT_ONCE)[1:] - 1])

    @cached_property
    def of_parameters(self) -> "Buffers":
        """The buffers of parameters."""
        rows = np.flatnonzero(self.category == Category.PARAMETERS)
        number = np.full(len(self), -1, dtype=np.int32)
        number[rows] = np.arange(len(rows))
        kept = number[self.kept]
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        columns = {name: column[kept >= 0 if name.startswith("kept") else rows] for name, column in columns.items()}
        return Buffers(**columns | {"kept": kept[kept >= 0]})


@dataclass(frozen=True, eq=False)
class Program:
    """A schedule assembled for a model: tasks, their order, and their dependencies."""

    n: int
    counts: Ints  # how many passes each training step has
    phases: int  # how many compute tasks a pass has
    devices: int
    tasks: Tasks
    messages: Messages
    groups: tuple[Ints, ...]  # the members of collectives, as devices of the program
    edges: Edges
    buffers: Buffers
    lane_tasks: Ints  # tasks, lane after lane, each lane in its order: the compute tasks, perhaps updates
    lane_start: Ints  # lane k runs lane_tasks[lane_start[k]:lane_start[k + 1]]
    releases: tuple[tuple[int, Fraction], ...]  # task, share of its micro-batch's own pass that it waits at the start
    base: Ints  # of each update, the version whose parameters and optimizer state it starts from
    first_step: Ints  # of each update, the first step whose gradients it takes; the last is its own
    estimates: Flags | None = None  # of each version from theta_0 on, whether it is read only; None: none is
    own: Flags | None = None  # of each version, whether each worker makes its own of its own gradients; None: none is
    averaged: Ints | None = None  # of each version, that of which it is the mean over workers, or -1; None: none is
    thrown_away: int = 0  # the number of steps at its end whose gradients no update takes
    versions_differ: bool = False  # whether backwards may read other versions than their forwards
    fill: int = 0  # the first step that reads versions as old as all later steps do
    together: bool = False  # whether a training step ends for all micro-batches before the next one begins
    state: State = REPLICATED  # where parameters, gradients and optimizer states live
    shard: int = 1  # the number of ranks in a sharding group, and of the updates of shares
    barrier: bool = False  # whether updates wait for the end of the last micro-batch's pass
    behaviours: Behaviours = PAPER_BEHAVIOURS  # what devices hold beyond what the schedule needs
    untied: tuple[tuple[int, ...], ...] = ()  # stages that the model ties, and of which each has a tensor of its own
    undivided: Flags | None = None  # of passes and stages: its gradient leaves after its weights' part
    parts: Parts = NO_PARTS
    # The machine's ranks in each group: a row for it, and for each group of other replicas that it stands for.
    ranks: tuple[Ints, ...] | None = None  # None: its members
    copies: tuple[int, ...] = ()  # of each group, how many ranks of each device are members; (): one
    fold: int = 1  # the number of replicas, all alike, for which its devices stand
    request: Mapping[str, Any] | None = None  # what it was assembled for
    unexpanded: "Program | None" = None  # the program whose collectives are in one piece, where here they are messages
    made_for: Callable[[], Mapping[str, Any]] = dict  # returns its key

    def __repr__(self) -> str:
        counts = {"task": len(self.tasks), "message": len(self.messages), "device": self.devices}
        facts = ", ".join(counted(many, noun) for noun, many in counts.items())
        return f"Program({facts} of {self.request!r})" if self.request else f"Program({facts})"

    @cached_property
    def key(self) -> Mapping[str, Any]:
        """The facts of a model and a cluster that it depends on: where one differs, another program is assembled."""
        return self.made_for()

    @cached_property
    def known(self) -> dict[str, tuple[Any, ...]]:
        """The last arguments of functions that are called once a program, by their names, and what they returned."""
        return {}

    @cached_property
    def levels(self) -> Levels:
        """Its nodes, laid out for sweeping many runs at once."""
        return sort_into_levels(*self.waits(), self.nodes)

    @cached_property
    def lengthened(self) -> "dict[int, Program]":
        """The programs of its request with other numbers of steps that have been assembled so far, by that number."""
        return {}

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.tasks) + len(self.messages) + len(self.parts)

    @property
    def message_nodes(self) -> slice:
        """The nodes of messages."""
        return slice(len(self.tasks), len(self.tasks) + len(self.messages))

    @property
    def first_messages(self) -> Ints:
        """The node of the first message of each part."""
        message = np.full(len(self.parts), self.nodes, dtype=np.int64)
        np.minimum.at(message, self.parts.part, len(self.tasks) + self.parts.message)
        return message

    @cached_property
    def compute(self) -> int:
        """The number of compute tasks, which are the first nodes."""
        return int(np.count_nonzero(self.tasks.micro_batch >= 0))

    @property
    def steps(self) -> int:
        """The number of training steps."""
        return len(self.counts)

    @property
    def updated(self) -> int:
        """The number of steps whose gradients updates take."""
        return self.steps - self.thrown_away

    @cached_property
    def update_of_step(self) -> Ints:
        """The update of theta that takes each step's gradients, by its number; of those thrown away, one more.

        An update by a mean takes those of all local steps since the mean before.
        """
        if self.averaged is not None and self.own is not None:
            made = np.empty(self.versions, dtype=np.int64)
            made[self.tasks.version[self.compute :]] = self.tasks.step[self.compute :]
            common = np.flatnonzero(~self.own)[1:]
            ends = made[np.where(self.averaged[common] >= 0, self.averaged[common], common)]
            return np.searchsorted(ends, np.arange(self.steps)).astype(np.int32)
        if self.estimates is None:
            return np.arange(self.steps, dtype=np.int32)
        kept = ~self.is_estimate(self.tasks.version[self.compute :])
        ends = np.unique(self.tasks.step[self.compute :][kept])
        return np.searchsorted(ends, np.arange(self.steps)).astype(np.int32)

    @cached_property
    def m(self) -> int | None:
        """The number of passes of each training step; None where steps differ in it."""
        m = int(self.counts[0])
        return m if (self.counts == m).all() else None

    @property
    def passes(self) -> int:
        """The number of passes: ways of a micro-batch through all stages in one step."""
        return int(self.first_pass[-1])

    @cached_property
    def first_pass(self) -> Ints:
        """The first pass of each step, and the number of passes behind them."""
        return np.append(0, np.cumsum(self.counts)).astype(np.int32)

    @property
    def pass_step(self) -> Ints:
        """The step of each pass."""
        return self.tasks.step[: self.compute : self.phases]

    @property
    def pass_micro_batch(self) -> Ints:
        """The micro-batch of each pass."""
        return self.tasks.micro_batch[: self.compute : self.phases]

    @cached_property
    def versions(self) -> int:
        """The number of versions of a stage, theta_0 among them."""
        return int(self.tasks.version[self.compute :].max(initial=0)) + 1

    def is_estimate(self, version: Ints) -> Flags:
        """Return whether versions are read only: their optimizer state is dropped, and no update starts from them."""
        flags: Flags = np.zeros(np.shape(version), dtype=bool) if self.estimates is None else self.estimates[version]
        return flags

    def is_own(self, version: Ints) -> Flags:
        """Return whether each worker makes its own of these versions, of its own gradients alone."""
        flags: Flags = np.zeros(np.shape(version), dtype=bool) if self.own is None else self.own[version]
        return flags

    def average_of(self, version: Ints) -> Ints:
        """Return the versions of which these are the means over all workers; -1 of versions made from gradients."""
        return np.full(np.shape(version), -1) if self.averaged is None else self.averaged[version]

    @cached_property
    def sizes_of_groups(self) -> Ints:
        """The number of ranks of each group."""
        return np.array([len(self.ranks_of(group)) for group in range(len(self.groups))], dtype=np.int64)

    def copies_of(self, group: int) -> int:
        """Return how many ranks of each of its devices are members of a group."""
        return self.copies[group] if self.copies else 1

    def members_of(self, group: int) -> Ints:
        """Return the devices of a group, each as often as it has ranks there."""
        return np.repeat(self.groups[group], self.copies_of(group))

    def ranks_of(self, group: int) -> Ints:
        """Return the ranks of the machine that take part in a group's collectives, for costs and bytes."""
        return self.groups[group] if self.ranks is None else self.ranks[group][0]

    def alike_groups(self, group: int) -> Ints:
        """Return the ranks of a group, and of those of other replicas that it stands for: a row for each."""
        return self.groups[group][None] if self.ranks is None else self.ranks[group]

    @property
    def all_devices(self) -> int:
        """The number of devices, with those of replicas for which others stand."""
        return self.devices * self.fold

    def find_pass(self, step: Ints, micro_batch: Ints) -> Ints:
        """Return the passes of these micro-batches in these steps."""
        numbers: Ints = self.first_pass[step] + micro_batch
        return numbers

    @property
    def splits(self) -> bool:
        """Whether backwards have a part of their own for the weights."""
        return self.phases > 2 * self.n

    def tasks_of_kind(self, kind: Kind) -> Ints:
        """Return the tasks of a kind: a row for each pass, a column for each stage."""
        first = (kind - Kind.F) * self.n
        phase = np.arange(first, first + self.n, dtype=np.int32)
        task: Ints = np.arange(self.passes, dtype=np.int32)[:, None] * self.phases + phase
        return task if kind == Kind.F else task[:, ::-1]

    @property
    def gradient_tasks(self) -> Ints:
        """The tasks that complete gradients, in rows as of `tasks_of_kind`: backwards, or their weights' parts."""
        return self.tasks_of_kind(Kind.W if self.splits else Kind.B)

    @property
    def stash_ends(self) -> Ints:
        """The tasks with whose ends stashes go, in rows as of `tasks_of_kind`: the input's part where it frees them."""
        if not self.splits:
            return self.gradient_tasks
        frees = np.isin(np.arange(self.n), self.buffers.stage[self.weight_stashes])
        ends: Ints = np.where(frees, self.tasks_of_kind(Kind.B), self.gradient_tasks)
        return ends

    @cached_property
    def lane_numbers(self) -> Ints:
        """The number, through all devices, of the lane of each row of `lane_tasks`."""
        return group_numbers(self.lane_start[:-1], len(self.lane_tasks))

    @cached_property
    def beginnings(self) -> Ints:
        """The nodes that wait for nothing."""
        free = np.ones(self.nodes, dtype=np.bool_)
        for after in (self.edges.after, self.lane_edges[1]):
            free[after] = False
        return np.flatnonzero(free)

    @property
    def lane_edges(self) -> tuple[Ints, Ints]:
        """The edges that lanes are, from each task to the next one: (before, after)."""
        return lane_edges(self.lane_tasks, self.lane_start)

    @property
    def stashes(self) -> Ints:
        """The stashes of forwards for their backwards: one buffer of each pass through a stage."""
        buffers = self.buffers
        begins = buffers.begin >> 1
        longer = (buffers.category == Category.ACTIVATIONS) & (buffers.begin & 1 == 0) & (buffers.end >> 1 != begins)
        return np.flatnonzero(longer & (self.tasks.kind[np.minimum(begins, len(self.tasks) - 1)] == Kind.F))

    @cached_property
    def update_buffers(self) -> Ints:
        """The buffers that begin with updates: what these make while they run."""
        begin = self.buffers.begin
        return np.flatnonzero((begin & 1 == 0) & self.is_end_of_update(begin | 1))

    def is_end_of_update(self, moment: Ints) -> Flags:
        """Flag moments at which updates end."""
        flags: Flags = (moment & 1 == 1) & (moment >> 1 >= self.compute) & (moment >> 1 < len(self.tasks))
        return flags

    @property
    def weight_stashes(self) -> Ints:
        """The buffers that the input's parts of split backwards leave for the weights' parts: the first of each."""
        buffers, tasks = self.buffers, self.tasks
        rows = np.flatnonzero((buffers.category == Category.ACTIVATIONS) & (buffers.begin & 1 == 1))
        begin, end = (np.minimum(moment[rows] >> 1, len(tasks) - 1) for moment in (buffers.begin, buffers.end))
        parts = (tasks.kind[begin] == Kind.B) & (tasks.kind[end] == Kind.W)
        own = (tasks.stage[begin] == tasks.stage[end]) & (buffers.stage[rows] == tasks.stage[begin])
        stashes: Ints = rows[parts & own]
        _, first = np.unique(buffers.begin[stashes], return_index=True)
        return stashes[np.sort(first)]

    def waits(self) -> tuple[Ints, Ints]:
        """Return all pairs of nodes of which one waits for the other, by edges and lane orders: (before, after)."""
        lane_before, lane_after = self.lane_edges
        before = np.concatenate([self.edges.before, lane_before])
        return before, np.concatenate([self.edges.after, lane_after])

    def with_edges(self, before: Ints, after: Ints, kind: EdgeKind) -> "Program":
        """Return the program with more edges."""
        old, new = self.edges, (before, after, np.full(len(before), kind))
        columns = zip((old.before, old.after, old.kind), new, strict=True)
        return replace(self, edges=Edges(*(np.concatenate(pair).astype(pair[0].dtype) for pair in columns)))

    def describe(self, node: int) -> str:
        """Return a node's name: `F(t=0,i=1,j=2)`, `U(t=0,j=2) on device 3`, `p2p gradient(t=0,j=1) 0->1`."""
        tasks, messages, row = self.tasks, self.messages, node - len(self.tasks)
        if row >= len(messages):
            part = row - len(messages)
            return f"device {self.parts.device[part]}'s part in {self.describe(int(self.first_messages[part]))}"
        of, row = (tasks, node) if row < 0 else (messages, row)
        place = f"t={of.step[row]}"
        for letter, column in (("i", of.micro_batch), ("j", of.stage)):
            place += f",{letter}={column[row]}" if column[row] >= 0 else ""
        if of is tasks:
            kind = Kind(int(tasks.kind[node]))
            if tasks.micro_batch[node] >= 0:
                return f"{kind.name}({place})"
            name = "estimate" if self.is_estimate(tasks.version[node]) else kind.name
            name = "outer" if self.average_of(tasks.version[node]) >= 0 else name
            return f"{name}({place}) on device {tasks.device[node]}"
        op, content = Op(int(messages.op[row])), Content(int(messages.content[row]))
        ends = f" {messages.src[row]}->{messages.dst[row]}" if op == Op.P2P else ""
        return f"{op.name.lower()} {content.name.lower()}({place}){ends}"


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def once_a_program(
    function: Callable[Concatenate[Program, Arguments], Result],
) -> Callable[Concatenate[Program, Arguments], Result]:
    """Cache what a function returns with its program, for the arguments of its last call."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def known(program: Program, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        kept = program.known.get(name)
        if kept is None or kept[:2] != (args, kwargs):
            kept = program.known[name] = args, kwargs, function(program, *args, **kwargs)
        result: Result = kept[2]
        return result

    return known

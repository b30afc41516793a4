"""The intermediate form that engines and replay interpret: columns of tasks, messages, buffers and dependencies.

A program has no times. Everything that can happen is a *node*: first the compute tasks, numbered densely by
(step, micro-batch, phase), then the optimizer updates, then the messages, then the parts of devices in messages. An
*edge* says that one node starts no earlier than another ends. The tasks of a lane (one of the things that a device can
do side by side) run one after another in the order of `lane_tasks`. Updates that take their device's time have a place
in a lane, all of them, as tasks have; others take no lane: such an update happens as soon as everything it needs is
there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdpsim.numeric.columns import Ints
from cdpsim.numeric.paths import Levels, lane_edges, sort_into_levels
from cdpsim.schedules.state import REPLICATED, State


# The order of the members is the order in which rows of equal start are written: as the contract says for kinds,
# alphabetical for the rest.
class Kind(IntEnum):
    """What a task does: update, forward, backward, and the weight part of a backward that is split."""

    U = 0
    F = 1
    B = 2
    W = 3


class Op(IntEnum):
    """How a message travels."""

    ALL_GATHER = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    P2P = 3
    REDUCE = 4
    REDUCE_SCATTER = 5


class Content(IntEnum):
    """What a message carries."""

    ACTIVATION = 0
    ACTIVATION_GRADIENT = 1
    GRADIENT = 2
    PARAMETERS = 3
    STATE = 4


class Category(IntEnum):
    """What a buffer holds."""

    ACTIVATIONS = 0
    COMMUNICATION = 1
    GRADIENTS = 2
    OPTIMIZER = 3
    PARAMETERS = 4


class EdgeKind(IntEnum):
    """Why one node waits for another: for data, for room at the receiver or host, the end of a step, or its turn."""

    DATA = 0
    ROOM = 1
    BARRIER = 2
    STREAM = 3  # of a device, which has the other one before it


@dataclass(frozen=True, eq=False)
class Tasks:
    """Compute tasks, dense by (step, micro-batch, phase), then updates: micro-batch -1, lane -1 if they take none."""

    kind: Ints
    stage: Ints
    micro_batch: Ints
    step: Ints
    device: Ints
    lane: Ints
    version: Ints  # theta_version is read; an update makes it

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, eq=False)
class Messages:
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

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, eq=False)
class Parts:
    """Devices' parts in messages: each takes its device's lane, or its stream, for the time of some messages.

    These are one message, or those of a collective that runs as its messages, whose channels go side by side. Rows of
    `part`, `message` and `channel` belong together.
    """

    device: Ints
    step: Ints  # of the task that it stands before or behind
    sends: NDArray[np.bool_]  # whether its device gives something to the message; else it receives
    part: Ints
    message: Ints
    channel: Ints

    def __len__(self) -> int:
        return len(self.device)

    def times(self, carry: NDArray[Any]) -> NDArray[Any]:
        """Give the time of each part where messages take so long: of one run, or a column for each of several."""
        channels = int(self.channel.max(initial=0)) + 1
        taken = np.zeros((len(self), channels, *carry.shape[1:]), dtype=carry.dtype)
        np.add.at(taken, (self.part, self.channel), carry[self.message])
        longest: NDArray[Any] = taken.max(axis=1)
        return longest


_NONE = np.empty(0, dtype=np.int32)
NO_PARTS = Parts(_NONE, _NONE, _NONE.astype(np.bool_), _NONE, _NONE, _NONE)  # where all messages overlap with tasks


@dataclass(frozen=True, eq=False)
class Edges:
    """Node `after` starts no earlier than node `before` ends."""

    before: Ints
    after: Ints
    kind: Ints

    def __len__(self) -> int:
        return len(self.before)


@dataclass(frozen=True, eq=False)
class Buffers:
    """What devices hold. A *moment* is 2 * node for its start, 2 * node + 1 for its end, -1 for the start of the run.

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

    def __len__(self) -> int:
        return len(self.category)


@dataclass(frozen=True, eq=False)
class Bases:
    """The version that each update starts from, and the gradients that it takes: a row for each, in node order."""

    base: Ints  # the version whose parameters and optimizer state it starts from
    first_step: Ints  # it takes gradients of this step and all later ones up to its own

    def __len__(self) -> int:
        return len(self.base)


@dataclass(frozen=True, eq=False)
class Program:
    """A schedule assembled for a model: who does what, in which order, and who waits for whom."""

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
    versions_differ: bool = False  # whether backwards may read other versions than their forwards
    fill: int = 0  # the first step that reads versions as old as all later steps do
    together: bool = False  # whether a training step ends for all micro-batches before the next one begins
    state: State = REPLICATED  # where parameters, gradients and optimizer states live
    barrier: bool = False  # whether updates wait for the end of the last micro-batch's pass
    untied: tuple[tuple[int, ...], ...] = ()  # stages that the model ties, and of which each has a tensor of its own
    undivided: NDArray[np.bool_] | None = None  # of passes and stages: its gradient leaves after its weights' part
    parts: Parts = NO_PARTS
    ranks: tuple[Ints, ...] | None = None  # the machine's ranks in each group; None: its members
    bases: Bases | None = None  # None: each update starts from the version before, and takes its own step's gradients
    request: Mapping[str, Any] | None = None  # what it was assembled for
    unexpanded: "Program | None" = None  # the program whose collectives are in one piece, where here they are messages
    made_for: Callable[[], Mapping[str, Any]] = dict  # gives its key

    @cached_property
    def key(self) -> Mapping[str, Any]:
        """The facts of a model and a cluster that it depends on: where one differs, another program is assembled."""
        return self.made_for()

    @cached_property
    def levels(self) -> Levels:
        """Its nodes laid out for sweeping many runs at once."""
        return sort_into_levels(*self.waits(), self.nodes)

    @cached_property
    def lengthened(self) -> "dict[int, Program]":
        """The programs of its request with other numbers of steps, as far as they have been asked for."""
        return {}

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
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
        """How many compute tasks there are: these are the first nodes."""
        return int(np.count_nonzero(self.tasks.micro_batch >= 0))

    @property
    def steps(self) -> int:
        """How many training steps there are."""
        return len(self.counts)

    @cached_property
    def m(self) -> int | None:
        """How many passes each training step has; None where steps differ in that."""
        m = int(self.counts[0])
        return m if (self.counts == m).all() else None

    @property
    def passes(self) -> int:
        """How many passes there are: ways of a micro-batch through all stages in one step."""
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

    @property
    def pass_device(self) -> Ints:
        """The device on which each pass begins."""
        return self.tasks.device[: self.compute : self.phases]

    @cached_property
    def versions(self) -> int:
        """How many versions of a stage there are, theta_0 among them."""
        return int(self.tasks.version[self.compute :].max(initial=0)) + 1

    @property
    def base(self) -> Ints:
        """The version that each update starts from."""
        return self.tasks.version[self.compute :] - 1 if self.bases is None else self.bases.base

    @property
    def first_step(self) -> Ints:
        """The first step whose gradients each update takes; the last is its own."""
        return self.tasks.step[self.compute :] if self.bases is None else self.bases.first_step

    @cached_property
    def estimates(self) -> NDArray[np.bool_]:
        """Whether each version is read only: no update starts from it, though there are later ones."""
        estimate = np.ones(self.versions, dtype=bool)
        estimate[np.clip(self.base, 0, self.versions - 1)] = False
        estimate[-1] = False
        return estimate

    def ranks_of(self, group: int) -> Ints:
        """Say which ranks of the machine take part in a group's collectives: what these cost, and what they send."""
        return self.groups[group] if self.ranks is None else self.ranks[group]

    def find_pass(self, step: Ints, micro_batch: Ints) -> Ints:
        """The passes of some micro-batches in some steps."""
        found: Ints = self.first_pass[step] + micro_batch
        return found

    @property
    def splits(self) -> bool:
        """Whether backwards have a part of their own for the weights."""
        return self.phases > 2 * self.n

    def tasks_of_kind(self, kind: Kind) -> Ints:
        """The tasks of a kind, in columns by stage and rows by pass."""
        third = (Kind.F, Kind.B, Kind.W).index(kind)
        phase = np.arange(third * self.n, (third + 1) * self.n, dtype=np.int32)
        task: Ints = np.arange(self.passes, dtype=np.int32)[:, None] * self.phases + phase
        return task if kind == Kind.F else task[:, ::-1]

    @property
    def gradient_tasks(self) -> Ints:
        """The tasks that end micro-batches' ways through stages, in the form of `tasks_of_kind`."""
        return self.tasks_of_kind(Kind.W if self.splits else Kind.B)

    @property
    def lane_edges(self) -> tuple[Ints, Ints]:
        """Each task of a lane waits for the one before it: (before, after)."""
        return lane_edges(self.lane_tasks, self.lane_start)

    @property
    def stashes(self) -> Ints:
        """The buffers of what forwards keep for their backwards: one of each pass through a stage."""
        buffers = self.buffers
        begins = buffers.begin >> 1
        longer = (buffers.category == Category.ACTIVATIONS) & (buffers.begin & 1 == 0) & (buffers.end >> 1 != begins)
        return np.flatnonzero(longer & (self.tasks.kind[np.minimum(begins, len(self.tasks) - 1)] == Kind.F))

    def waits(self) -> tuple[Ints, Ints]:
        """All that one node waits for another for, dependencies and lane orders: (before, after)."""
        lane_before, lane_after = self.lane_edges
        before = np.concatenate([self.edges.before, lane_before])
        return before, np.concatenate([self.edges.after, lane_after])

    def with_edges(self, before: Ints, after: Ints, kind: EdgeKind) -> "Program":
        """Let some nodes wait for others, too."""
        edges = self.edges
        more = before, after, np.full(len(before), kind)
        old = edges.before, edges.after, edges.kind
        columns = [np.concatenate(pair).astype(pair[0].dtype) for pair in zip(old, more, strict=True)]
        return replace(self, edges=Edges(*columns))

    def describe(self, node: int) -> str:
        """Name a node as a person would: `F(t=0,i=1,j=2)`, `U(t=0,j=2) on device 3`, `p2p gradient(t=0,j=1) 0->1`."""
        count, part = len(self.tasks), node - self.message_nodes.stop
        if part >= 0:
            return f"device {self.parts.device[part]}'s part in {self.describe(int(self.first_messages[part]))}"
        if node < count:
            tasks = self.tasks
            kind = Kind(int(tasks.kind[node])).name
            where = f"t={tasks.step[node]}"
            if tasks.micro_batch[node] >= 0:
                return f"{kind}({where},i={tasks.micro_batch[node]},j={tasks.stage[node]})"
            estimate = self.bases is not None and self.estimates[tasks.version[node]]
            name = "estimate" if estimate else kind
            return f"{name}({where},j={tasks.stage[node]}) on device {tasks.device[node]}"
        k, messages = node - count, self.messages
        op, content = Op(int(messages.op[k])).name.lower(), Content(int(messages.content[k])).name.lower()
        place = f"t={messages.step[k]}"
        place += f",i={messages.micro_batch[k]}" if messages.micro_batch[k] >= 0 else ""
        place += f",j={messages.stage[k]}" if messages.stage[k] >= 0 else ""
        if messages.op[k] == Op.P2P:
            return f"{op} {content}({place}) {messages.src[k]}->{messages.dst[k]}"
        return f"{op} {content}({place})"

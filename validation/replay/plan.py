"""A program as a replay walks it: one order of all nodes, and each device's part of what is held and waited for."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.model import Model
from cdpsim.numeric.columns import Ints
from cdpsim.numeric.paths import successors
from cdpsim.program import Category, Content, EdgeKind, Kind, Messages, Op, Program
from cdpsim.timing.costs import node_costs
from cdpsim.timing.engine import fast

Kinds = Literal["out of memory", "killed", "timeout", "error"]  # from what explains most to what explains least
BEGINNING = -1  # stands for a node: what is held from the start of the run
Calls = Counter[tuple[str, tuple[int, ...], int]]  # what was called, with whom, how many bytes: how often
Passing = tuple[Content, int, int, int]  # content, step, micro-batch, stage: what goes from one task to the next


class ReplayError(RuntimeError):
    """A replay that cannot go on; `kind` is a word for why."""

    def __init__(self, problem: str, kind: Kinds = "error") -> None:
        super().__init__(problem)
        self.kind: Kinds = kind


class Holding(NamedTuple):
    """What a buffer is for: parameters of a version, gradients of a step, an optimizer state, a pass's activations."""

    category: Category
    stage: int
    version: int  # of gradients and activations the step; of an optimizer state, which is one that changes, 0
    micro_batch: int  # of activations, else -1


class Message(NamedTuple):
    """One message, for whoever goes message by message."""

    node: int
    op: Op
    content: Content
    stage: int
    micro_batch: int
    step: int
    src: int
    members: tuple[int, ...]  # sender and receiver, or a collective's group
    size: int

    @property
    def key(self) -> Passing:
        """What it takes along, if that is in no buffer."""
        return self.content, self.step, self.micro_batch, self.stage

    @property
    def senders(self) -> tuple[int, ...]:
        """The devices that give something to it."""
        return self.members if self.op in (Op.ALL_REDUCE, Op.REDUCE) else (self.src,)

    def __str__(self) -> str:
        between = ", ".join(map(str, self.members))
        return f"{self.op.name.lower()} {text_of(self.key)} between devices {between}"


@dataclass(frozen=True)
class Part:
    """What one device does: its nodes in order, and at each of them what begins and ceases to be held.

    `ends` are numbers of buffers; a buffer is let go when it has ended as often as `uses` says. `due` are the messages
    that a node finds completed.
    """

    device: int
    nodes: list[int]
    begins: dict[int, list[Holding]]
    ends: dict[int, list[int]]
    uses: dict[int, int]
    held: dict[int, Holding]
    due: dict[int, list[int]]


class Plan:
    """A program in one order that keeps every dependency, the same on every device."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._first = len(program.tasks)

    @cached_property
    def slots(self) -> tuple[Ints, Ints]:
        """In which slots all nodes start and end, where every task takes one slot and every message no time."""
        program = self.program
        return fast.run_by_longest_paths(
            program, node_costs(program, Model.unit(program.n, split=program.splits), Cluster.unit(), "ring")
        )

    @cached_property
    def order(self) -> list[int]:
        """All nodes, each after what it waits for: by their slots, messages and updates first.

        Slots choose among the many orders that dependencies allow, so that one process holds over time what devices
        that run at once hold together.
        """
        program = self.program
        compute = np.arange(program.nodes) < program.compute
        keys = list(zip(self.slots[0].tolist(), compute.tolist(), range(program.nodes), strict=True))
        waits_for, first, reach = (column.tolist() for column in successors(*program.waits(), program.nodes))
        ready = [keys[node] for node in range(program.nodes) if not waits_for[node]]
        heapify(ready)
        order = []
        while ready:
            node = heappop(ready)[-1]
            order.append(node)
            for follower in reach[first[node] : first[node + 1]]:
                waits_for[follower] -= 1
                if not waits_for[follower]:
                    heappush(ready, keys[follower])
        return order

    @cached_property
    def messages(self) -> list[Message]:
        """All messages with readable fields."""
        columns: Messages = self.program.messages
        names = ("op", "content", "stage", "micro_batch", "step", "src", "dst", "size")
        rows = zip(*(getattr(columns, name).tolist() for name in names), strict=True)
        groups = [tuple(group.tolist()) for group in self.program.groups]
        made = []
        for node, (op, content, stage, micro_batch, step, src, dst, size) in enumerate(rows, start=self._first):
            members = (src, dst) if op == Op.P2P else groups[dst]
            made.append(Message(node, Op(op), Content(content), stage, micro_batch, step, src, members, size))
        return made

    @cached_property
    def sent(self) -> frozenset[Passing]:
        """All that messages take along."""
        return frozenset(message.key for message in self.messages)

    def lack(self, device: int, key: Passing) -> ReplayError:
        """Say what a device lacks, and which message should have brought it."""
        brings = next((each for each in self.messages if each.key == key and device in each.members), None)
        why = "which it has not made" if brings is None else f"for it waits for {brings}, which has not brought it"
        return ReplayError(f"device {device} does not have {text_of(key)}, {why}")

    def is_message(self, node: int) -> bool:
        """Tell messages from tasks."""
        return node >= self._first

    def message(self, node: int) -> Message:
        """Give the message that a node is."""
        return self.messages[node - self._first]

    def devices_of(self, node: int) -> tuple[int, ...]:
        """Who takes part in a node, senders first."""
        if not self.is_message(node):
            return (int(self.program.tasks.device[node]),)
        message = self.message(node)
        return tuple(sorted(message.members, key=lambda member: member != message.src))

    def cargo(self, node: int) -> list[Holding]:
        """Say what a message of parameters or states brings: what its receivers hold from its end on."""
        return self._cargo.get(node, [])

    @cached_property
    def _holdings(self) -> list[tuple[int, int, Holding, int, list[int]]]:
        """Number, device, holding, begin and ends of each buffer that outlives the message or task it belongs to.

        What is only passing (communication, and activations but for what a forward keeps for its backward) is taken
        out by whoever needs it, and needs no book.
        """
        buffers, tasks = self.program.buffers, self.program.tasks
        ends: dict[int, list[int]] = defaultdict(list)
        for number, moment in zip(buffers.kept.tolist(), buffers.kept_until.tolist(), strict=True):
            ends[number].append(moment >> 1)
        names = ("category", "device", "stage", "version", "begin", "end")
        rows = zip(*(getattr(buffers, name).tolist() for name in names), strict=True)
        lasting = ~np.isin(buffers.category, (Category.COMMUNICATION, Category.ACTIVATIONS))
        lasting[self.program.stashes] = True
        found = []
        for number, (category, device, stage, version, begin, end) in enumerate(rows):
            if not lasting[number]:
                continue
            node = begin >> 1  # -1 stays -1: the beginning
            micro_batch = int(tasks.micro_batch[node]) if category == Category.ACTIVATIONS else -1
            version = 0 if category == Category.OPTIMIZER else version
            holding = Holding(Category(category), stage, version, micro_batch)
            found.append((number, device, holding, node, [end >> 1, *ends[number]]))
        return found

    @cached_property
    def _cargo(self) -> dict[int, list[Holding]]:
        brought: dict[int, set[Holding]] = defaultdict(set)
        for _, _, holding, node, _ in self._holdings:
            if self.is_message(node):
                brought[node].add(holding)
        return {node: sorted(holdings) for node, holdings in brought.items()}

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """Of each message, the nodes that need what it brings."""
        edges = self.program.edges
        data = (edges.kind == EdgeKind.DATA) & (edges.before >= self._first)
        readers: dict[int, list[int]] = defaultdict(list)
        for before, after in zip(edges.before[data].tolist(), edges.after[data].tolist(), strict=True):
            readers[before].append(after)
        return readers

    def parts(self, *, by_slot: bool = False) -> list[Part]:
        """Every device's part; `by_slot` says to complete each message before the next task, as if slots were real."""
        nodes: list[list[int]] = [[] for _ in range(self.program.devices)]
        for node in self.order:
            for device in self.devices_of(node):
                nodes[device].append(node)
        parts = [
            Part(device, own, defaultdict(list), defaultdict(list), {}, {}, self._due(device, own, by_slot))
            for device, own in enumerate(nodes)
        ]
        own_nodes = [{BEGINNING, *own} for own in nodes]
        for number, device, holding, begin, ends in self._holdings:
            part = parts[device]
            if not {begin, *ends} <= own_nodes[device]:
                raise ReplayError(f"device {device} takes no part in what begins or ends its {name_of(holding)}")
            part.begins[begin].append(holding)
            part.uses[number], part.held[number] = len(ends), holding
            for end in ends:
                part.ends[end].append(number)
        return parts

    def _due(self, device: int, own: list[int], by_slot: bool) -> dict[int, list[int]]:
        """Which messages each node of a device finds completed.

        A message is completed before its first reader on the device; where it has none there (it was sent, or reduced
        to another device), before the first node that comes after a reader elsewhere. Waiting so cannot deadlock: all
        devices go by one order, so of those that wait, the one that has come least far waits for a message that
        everybody who takes part in it has begun. By slot, a message is through before the device's next task and before
        the next slot: what a device holds is then what it would hold if all devices' slots began and ended together.
        """
        place, slot = self._place, self.slots[0]
        due: dict[int, list[int]] = defaultdict(list)
        waiting: dict[int, int] = {}  # message -> the place before which it must be through
        for node in own:
            task = node < self.program.compute
            for message, until in list(waiting.items()):
                if until <= place[node] or (by_slot and (task or slot[message] < slot[node])):
                    due[node].append(message)
                    del waiting[message]
            if self.is_message(node):
                readers = self._readers[node]
                if not readers:
                    raise ReplayError(f"no task needs what {self.message(node)} brings")
                here = [reader for reader in readers if device in self.devices_of(reader)]
                waiting[node] = min(place[reader] for reader in here or readers)
        return due

    @cached_property
    def _place(self) -> dict[int, int]:
        return {node: place for place, node in enumerate(self.order)}

    def calls(self, device: int) -> Calls:
        """Count what a device must call for its messages, by call, partners and bytes."""
        counted: Calls = Counter()
        for message in self.messages:
            if device not in message.members:
                continue
            if message.op == Op.P2P:
                to, call = (message.members[1], "send") if device == message.src else (message.src, "receive")
                counted[call, (to,), message.size] += 1
            else:
                counted[message.op.name.lower(), message.members, message.size] += 1
        return counted


def text_of(passing: Passing) -> str:
    """Name what goes from one task to the next as a program names it: `activation(t=0,i=1,j=2)`."""
    content, step, micro_batch, stage = passing
    places = zip("tij", (step, micro_batch, stage), strict=True)
    return f"{content.name.lower()}({','.join(f'{letter}={place}' for letter, place in places if place >= 0)})"


def name_of(holding: Holding) -> str:
    """Name what is held as a person would."""
    place = f"stage {holding.stage}, version {holding.version}"
    place += f", micro-batch {holding.micro_batch}" if holding.micro_batch >= 0 else ""
    return f"{holding.category.name.lower()} of {place}"


def kind_of(program: Program, task: int) -> Kind:
    """Say what a task does."""
    return Kind(int(program.tasks.kind[task]))

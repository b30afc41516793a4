"""A program prepared for a replay: one order of all nodes, and each device's nodes, buffers and messages."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.cluster.disorder import Disorder
from cdpsim.model import Model
from cdpsim.numeric.columns import Ints
from cdpsim.numeric.paths import successors
from cdpsim.program import Content, EdgeKind, Messages, Op, Program
from cdpsim.timing import engine
from cdpsim.timing.costs import node_costs, steady_costs

from .contents import BEGINNING, Calls, Holding, Message, Passing, ReplayError, text_of
from .policy import Policy
from .round_lives import RoundsPolicy


@dataclass(frozen=True)
class Part:
    """One device's nodes in order, at each of them the contents whose lives begin and end there by the policy.

    `due` are the messages that are complete before a node. What `leaves` at a node is gone with its start: its content
    is the message's, or the task has it in another form.
    """

    device: int
    nodes: list[int]
    begins: dict[int, list[Holding]]
    ends: dict[int, list[Holding]]
    leaves: dict[int, list[Holding]]
    due: dict[int, list[int]]


class Plan:
    """A program in one order that keeps every dependency, the same on every device."""

    def __init__(self, program: Program, disorder: Disorder = Disorder()) -> None:  # noqa: B008 - it is frozen
        self.program = program
        self._disorder = disorder
        self._first = len(program.tasks)

    @cached_property
    def slots(self) -> tuple[Ints, Ints]:
        """The slots in which all nodes start and end, where every task takes one slot and every message no time.

        Tasks of slow devices take more.
        """
        program = self.program
        costs = node_costs(program, Model.unit(program.n, split=program.splits), Cluster.unit(), "ring")
        return engine.run_by_longest_paths(program, steady_costs(program, costs, self._disorder))

    @cached_property
    def order(self) -> list[int]:
        """All nodes, each after its dependencies: by their slots, messages and updates first.

        Among the many orders that dependencies allow, slots choose one in which a single process holds over time as
        much as devices that run at once hold together.
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
        names = ("op", "content", "stage", "micro_batch", "step", "src", "dst", "size", "stages")
        rows = zip(*(getattr(columns, name).tolist() for name in names), strict=True)
        groups = [tuple(group.tolist()) for group in self.program.groups]
        made = []
        for node, (op, content, stage, micro_batch, step, src, dst, size, stages) in enumerate(rows, start=self._first):
            members = (src, dst) if op == Op.P2P else groups[dst]
            made.append(Message(node, Op(op), Content(content), stage, micro_batch, step, src, members, size, stages))
        return made

    @cached_property
    def sent(self) -> frozenset[Passing]:
        """All values that messages carry outside of buffers."""
        return frozenset(message.key for message in self.messages)

    def lack(self, device: int, key: Passing) -> ReplayError:
        """Return the error of a device that lacks a value, which names the message that should have brought it."""
        brings = next((each for each in self.messages if each.key == key and device in each.members), None)
        why = "which it has not made" if brings is None else f"for it waits for {brings}, which has not brought it"
        return ReplayError(f"device {device} does not have {text_of(key)}, {why}")

    def is_message(self, node: int) -> bool:
        """Return whether a node is a message."""
        return node >= self._first

    def message(self, node: int) -> Message:
        """Return the message of a node."""
        return self.messages[node - self._first]

    def devices_of(self, node: int) -> tuple[int, ...]:
        """Return the devices that take part in a node, senders first."""
        if not self.is_message(node):
            return (int(self.program.tasks.device[node]),)
        message = self.message(node)
        return tuple(sorted(message.members, key=lambda member: member != message.src))

    @cached_property
    def policy(self) -> Policy | RoundsPolicy:
        """Contents of every device, and for how long it keeps them, by the replay's own policy of freeing."""
        if self.program.thrown_away:
            return RoundsPolicy(self.program, self.order)
        return Policy(self.program, self.order, self.messages)

    def is_mean(self, version: int) -> bool:
        """Return whether a version is made by a mean over all workers."""
        return self.program.averaged is not None and bool(self.program.averaged[version] >= 0)

    def cargo(self, node: int) -> list[Holding]:
        """Return the contents of a message of parameters or states, which its receivers have from its end on."""
        return self.policy.cargo.get(node, [])

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        edges = self.program.edges
        data = (edges.kind == EdgeKind.DATA) & (edges.before >= self._first)
        readers: dict[int, list[int]] = defaultdict(list)
        for before, after in zip(edges.before[data].tolist(), edges.after[data].tolist(), strict=True):
            readers[before].append(after)
        return readers

    @cached_property
    def _followers(self) -> dict[int, list[int]]:
        """Return what comes after each message for another reason than its content: tasks, and the next sums."""
        edges, compute = self.program.edges, self.program.compute
        rows = (edges.kind != EdgeKind.DATA) & (edges.before >= self._first) & (edges.after < compute)
        followers: dict[int, list[int]] = defaultdict(list)
        for before, after in zip(edges.before[rows].tolist(), edges.after[rows].tolist(), strict=True):
            followers[before].append(after)
        last: dict[tuple[int, int, int], int] = {}  # by step, stage and device
        for each in self._sums:
            for key in [(each.step, stage, member) for stage in each.covers for member in each.members]:
                if key in last:
                    followers[last[key]].append(each.node)
                last[key] = each.node
        return followers

    @cached_property
    def is_again(self) -> frozenset[int]:
        """The messages behind which others sum what tasks add later to the gradients of the same stages and step."""
        last = {(each.op, each.stage, each.step, each.members): each.node for each in self._sums}
        return frozenset(each.node for each in self._sums if each.node not in last.values())

    @cached_property
    def goes_on(self) -> bool:
        """Whether sums of shares go on from group to group."""
        return any(each.op == Op.ALL_REDUCE for each in self._sums) and self.program.shard > 1

    @cached_property
    def _sums(self) -> list[Message]:
        sums = [each for each in self.messages if each.content == Content.GRADIENT and each.op != Op.P2P]
        return sorted(sums, key=lambda each: self.place[each.node])

    def parts(self, *, by_slot: bool = False) -> list[Part]:
        """Return every device's part; `by_slot` completes each message before the next task, as if slots were real."""
        nodes: list[list[int]] = [[] for _ in range(self.program.devices)]
        for node in self.order:
            for device in self.devices_of(node):
                nodes[device].append(node)
        parts = [
            Part(device, own, defaultdict(list), defaultdict(list), defaultdict(list), self._due(device, own, by_slot))
            for device, own in enumerate(nodes)
        ]
        for device, holding, begin, end in self.policy.lives:
            parts[device].begins[begin].append(holding)
            (parts[device].leaves if self.policy.leaves(holding, end) else parts[device].ends)[end].append(holding)
        return parts

    def _due(self, device: int, own: list[int], by_slot: bool) -> dict[int, list[int]]:
        """Return the messages that are complete before each node of a device.

        A message is completed before its first reader on the device; where it has none there (it was sent, or reduced
        to another device), before the first node that comes after a reader elsewhere; and before what comes after it on
        the device for another reason. Waiting so cannot deadlock: all
        devices go by one order, so of the devices that wait, the one that is least far in it waits for a message
        that all its members have begun. By slot, a message is through before the device's next task and before
        the next slot: what a device holds is then what it would hold if all devices' slots began and ended together.
        """
        place, slot = self.place, self.slots[0]
        due: dict[int, list[int]] = defaultdict(list)
        waiting: dict[int, int] = {}  # message -> the place before which it must be complete
        for node in own:
            task = node < self.program.compute
            for message, until in list(waiting.items()):
                if until <= place[node] or (by_slot and (task or slot[message] < slot[node])):
                    due[node].append(message)
                    del waiting[message]
            if self.is_message(node):
                readers = self._readers[node]
                if not readers and not self.program.thrown_away:
                    raise ReplayError(f"no task needs what {self.message(node)} brings")
                here = [reader for reader in readers if device in self.devices_of(reader)]
                behind = [after for after in self._followers[node] if device in self.devices_of(after)]
                waiting[node] = min((place[after] for after in [*(here or readers), *behind]), default=len(place))
        return due

    @cached_property
    def place(self) -> dict[int, int]:
        """The place of each node in the order."""
        return {node: place for place, node in enumerate(self.order)}

    def place_of(self, node: int) -> int:
        """Return the place of a node in the order; the beginning comes first."""
        return -1 if node == BEGINNING else self.place[node]

    def name_of(self, node: int) -> str:
        """Return the name of a node, or of the beginning."""
        return "the beginning" if node == BEGINNING else self.program.describe(node)

    def describe(self, node: int, device: int) -> str:
        """Return the name of a node and of a device that takes part in it; an update's name has its device."""
        name = self.name_of(node)
        return name if name.endswith(f" on device {device}") else f"{name} on device {device}"

    def calls(self, device: int) -> Calls:
        """Count the calls that a device's messages need, by name, partners and bytes."""
        own = (message for message in self.messages if device in message.members)
        return Counter((*message.call(device), message.size) for message in own)

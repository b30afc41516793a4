"""A slow and plain reference of the slot model for the nine schedules, written from the specification alone.

Costs are units, and communication is free. Everything is a closed form of section 1 or a walk over dicts and lists. It
uses nothing of the package, so that tests can compare the package with it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

Matrix: TypeAlias = tuple[tuple[bool, ...], ...]

SCHEDULES = ("single-dp", "single-cdp", "multi-dp", "multi-cdp", "mp-dp", "mp-cdp", "pp-cdp", "zero-dp", "zero-cdp")
CYCLIC = tuple(name for name in SCHEDULES if name.endswith("-cdp"))
NONE = -1


class Task(NamedTuple):
    """A row of tasks.csv."""

    kind: str
    stage: int
    micro_batch: int
    step: int
    device: int
    start: int
    end: int
    version: int
    stale: int


class Message(NamedTuple):
    """A row of messages.csv."""

    op: str
    content: str
    stage: int
    micro_batch: int
    step: int
    src: int
    dst: str
    size: int
    start: int
    end: int
    rounds: int


class Held(NamedTuple):
    """One unit of a category that a device holds from `start` to `end`."""

    device: int
    category: str
    start: int
    end: int


class Stay(NamedTuple):
    """A state's stay on one device; `step` is of the task that used it last there."""

    device: int
    start: int
    end: int
    step: int


class Row(NamedTuple):
    """A row of memory.csv."""

    device: int
    category: str
    time: int
    size: int


def largest(n: int) -> Matrix:
    """Return the matrix of CDP-v2: theta_t where i + j >= N-1."""
    return tuple(tuple(i + j >= n - 1 for j in range(n)) for i in range(n))


def constant(n: int, fresh: bool) -> Matrix:
    """Return the matrix by which every micro-batch reads theta_t (DP), or theta_{t-1} (CDP-v1)."""
    return ((fresh,) * n,) * n


def recursive_doubling(members: int) -> int:
    """Count the rounds of an all-reduce: log2 N for powers of two and ⌊log2 N⌋ + 2 otherwise."""
    log = members.bit_length() - 1
    return log if members == 2**log else log + 2


def binomial_tree(members: int) -> int:
    """Count the rounds of a broadcast or a reduction: ⌈log2 N⌉."""
    return (members - 1).bit_length()


@dataclass(frozen=True)
class Reference:
    """One run: a schedule, N, the number of training steps, and a rule by its name or as its matrix."""

    schedule: str
    n: int
    steps: int
    rule: str | Matrix

    # Section 1: when

    @property
    def cyclic(self) -> bool:
        return self.schedule.endswith("-cdp")

    @property
    def family(self) -> str:
        return self.schedule.partition("-")[0]

    def begin(self, i: int, t: int) -> int:
        return 2 * self.n * t + (2 * i if self.cyclic else 0)

    def forward(self, i: int, j: int, t: int) -> int:
        return self.begin(i, t) + j

    def backward(self, i: int, j: int, t: int) -> int:
        return self.begin(i, t) + 2 * self.n - 1 - j

    # Section 3: where

    def device(self, i: int, j: int, t: int) -> int:
        """Return the device of a micro-batch's forward and backward of a stage."""
        n = self.n
        if self.family == "single":
            return 0
        if self.family == "pp":
            return j
        if self.schedule == "mp-dp":
            return i * n + j
        if self.schedule == "mp-cdp":
            return sum(n - k for k in range(j)) + (t * n + i) % (n - j)
        return i

    # Section 2: which version

    @cached_property
    def fresh(self) -> Matrix:
        """The matrix u of the rule."""
        if isinstance(self.rule, str):
            named = {"dp": constant(self.n, True), "cdp-v1": constant(self.n, False), "cdp-v2": largest(self.n)}
            return named[self.rule]
        return self.rule

    def version(self, i: int, j: int, t: int) -> int:
        return t if self.fresh[i][j] else max(t - 1, 0)

    def updated(self, j: int, t: int) -> int:
        """Return when the update of a stage in a step happens; theta_{t+1} exists from then on."""
        last = self.n - 1
        if self.cyclic:
            return self.backward(last, 0 if self.rule == "cdp-v1" else j, t) + 1
        own_last = 0 if self.schedule == "multi-dp" else j  # what the all-reduce waits for, or the stage's backwards
        return self.backward(last, own_last, t) + 1

    def made(self, j: int, version: int) -> int:
        return self.updated(j, version - 1) if version else 0

    def stale(self, j: int, version: int, start: int) -> int:
        """Return 1 if a newer version existed at `start`, else 0."""
        return int(version < self.steps and self.made(j, version + 1) <= start)

    # Tasks

    @cached_property
    def computations(self) -> list[Task]:
        """Every forward and every backward."""
        return [
            task
            for t in range(self.steps)
            for i in range(self.n)
            for j in range(self.n)
            for task in (self._task("F", i, j, t), self._task("B", i, j, t))
        ]

    def _task(self, kind: str, i: int, j: int, t: int) -> Task:
        start = self.forward(i, j, t) if kind == "F" else self.backward(i, j, t)
        version = self.version(i, j, t)
        return Task(kind, j, i, t, self.device(i, j, t), start, start + 1, version, self.stale(j, version, start))

    def updaters(self, j: int, t: int) -> list[int]:
        """Return the devices that apply the update of a stage in a step."""
        last = self.n - 1
        if self.schedule in ("multi-dp", "mp-dp"):
            return [self.device(i, j, t) for i in range(self.n)]
        if self.schedule == "zero-dp":
            return [j]
        if self.schedule == "zero-cdp":  # where the state is then
            done = [task for task in self.uses[j] if task.end <= self.updated(j, t)]
            return [done[-1].device]
        return [self.device(last, j, t)]

    @cached_property
    def updates(self) -> list[Task]:
        """Every optimizer update, on every device that applies it."""
        return [
            Task("U", j, NONE, t, device, self.updated(j, t), self.updated(j, t), t + 1, 0)
            for t in range(self.steps)
            for j in range(self.n)
            for device in self.updaters(j, t)
        ]

    @cached_property
    def tasks(self) -> list[Task]:
        return self.computations + self.updates

    @cached_property
    def uses(self) -> dict[int, list[Task]]:
        """The forwards and backwards of each stage, in the order of time."""
        return {
            j: sorted((task for task in self.computations if task.stage == j), key=lambda task: task.start)
            for j in range(self.n)
        }

    @cached_property
    def readers(self) -> dict[tuple[int, int], list[Task]]:
        """The tasks that read each (stage, version), in the order of time; an update reads what it replaces."""
        found = defaultdict(list)
        for task in self.tasks:
            found[task.stage, task.step if task.kind == "U" else task.version].append(task)
        return {key: sorted(tasks, key=lambda task: (task.start, task.end)) for key, tasks in found.items()}

    def free_before(self, reader: Task) -> int:
        """Return when the task before a reader ends on its device; from then on the reader's inputs are pulled."""
        ends = (task.end for task in self.computations if task.device == reader.device and task.end <= reader.start)
        return max(ends, default=0)

    # Messages

    @cached_property
    def messages(self) -> list[Message]:
        """Every message, in no particular order."""
        found = [*self._boundaries()]
        if self.n == 1:
            return found
        if self.schedule == "zero-dp":
            return [*found, *self._gathers(), *self._reductions()]
        if self.schedule == "zero-cdp":
            return [*found, *self._state_moves()]
        if self.cyclic:
            return [*found, *self._partial_sums(), *self._optimizer_moves(), *self.hand_overs]
        return [*found, *self._all_reduces()]

    def _boundaries(self) -> Iterator[Message]:
        """Yield activations forward and their gradients back between neighbouring stages on different devices."""
        for task in self.computations:
            to = task.stage + (1 if task.kind == "F" else -1)
            if not 0 <= to < self.n:
                continue
            dst = self.device(task.micro_batch, to, task.step)
            if dst != task.device:
                content = "activation" if task.kind == "F" else "activation_gradient"
                place = (task.stage, task.micro_batch, task.step)
                yield Message("p2p", content, *place, task.device, str(dst), 1, task.end, task.end, 1)

    def replicas(self, j: int, t: int) -> list[int]:
        """Return the devices that hold a stage in a step, in the order of their own last micro-batches."""
        last = {self.device(i, j, t): i for i in range(self.n)}
        return sorted(last, key=lambda device: last[device])

    def _all_reduces(self) -> Iterator[Message]:
        for t in range(self.steps):
            for j in range(self.n):
                members, time = self.replicas(j, t), self.updated(j, t)
                if len(members) > 1:
                    rounds = recursive_doubling(len(members))
                    yield Message("all_reduce", "gradient", j, NONE, t, NONE, joined(members), 1, time, time, rounds)

    def _reductions(self) -> Iterator[Message]:
        for t in range(self.steps):
            for j in range(self.n):
                time, everyone = self.updated(j, t), joined(range(self.n))
                yield Message("reduce", "gradient", j, NONE, t, j, everyone, 1, time, time, binomial_tree(self.n))

    def _gathers(self) -> Iterator[Message]:
        """Yield a broadcast of a stage's parameters before each forward and backward, timed by micro-batch 0."""
        for task in self.computations:
            if task.micro_batch == 0:
                time, everyone = task.start, joined(range(self.n))
                place = (task.stage, NONE, task.version - 1, task.stage)
                yield Message("broadcast", "parameters", *place, everyone, 1, time, time, binomial_tree(self.n))

    def _partial_sums(self) -> Iterator[Message]:
        """Yield partial sums: a device adds its own to what it received, for the next device in micro-batch order."""
        for t in range(self.steps):
            for j in range(self.n):
                for src, dst in pairwise(self.replicas(j, t)):
                    own = max(i for i in range(self.n) if self.device(i, j, t) == src)
                    yield p2p("gradient", j, t, src, dst, self.backward(own, j, t) + 1)

    def _optimizer_moves(self) -> Iterator[Message]:
        """Yield moves of optimizer states, which follow their stage's updates from device to device."""
        updates = {(update.stage, update.step): update for update in self.updates}
        for (j, t), update in updates.items():
            before = updates.get((j, t - 1))
            if before and before.device != update.device:
                time = max(self.free_before(update), before.end)
                yield p2p("state", j, t - 1, before.device, update.device, time)

    @cached_property
    def hand_overs(self) -> list[Message]:
        """The messages of versions from the updater to the first reader, and from reader to reader."""
        return [
            message
            for j in range(self.n)
            for version in range(1, self.steps)
            for message in self._hand_over(j, version)
        ]

    def _hand_over(self, j: int, version: int) -> Iterator[Message]:
        (maker,) = self.updaters(j, version - 1)
        first = self._first_reads(j, version, maker)
        chain = sorted(first, key=lambda device: first[device].start)
        sender, arrived = maker, {maker: self.made(j, version)}
        for device in chain:
            if device != maker:  # no device receives a version that it has
                arrived[device] = max(self.free_before(first[device]), arrived[sender])
                yield p2p("parameters", j, version - 1, sender, device, arrived[device])
            sender = device

    def _first_reads(self, j: int, version: int, maker: int) -> dict[int, Task]:
        """Return each device's first reader of a version; the maker's place in the chain is its own micro-batch's."""
        first: dict[int, Task] = {}
        for reader in self.readers.get((j, version), []):
            if reader.kind == "F" or (reader.kind == "U" and reader.device != maker):
                first.setdefault(reader.device, reader)
        return first

    @cached_property
    def stays(self) -> dict[int, list[Stay]]:
        """The stays of each stage's state on devices, in zero-cdp."""
        return {j: list(self._stays(j)) for j in range(self.n)}

    def _stays(self, j: int) -> Iterator[Stay]:
        place, since, free, step = j, 0, 0, NONE
        for task in self.uses[j]:
            if task.device != place:
                moved = max(self.free_before(task), free)
                yield Stay(place, since, moved, step)
                place, since = task.device, moved
            free, step = task.end, task.step
        yield Stay(place, since, max(free, self.updated(j, self.steps - 1)), step)

    def _state_moves(self) -> Iterator[Message]:
        for j, stays in self.stays.items():
            for left, entered in pairwise(stays):
                yield p2p("state", j, left.step, left.device, entered.device, left.end)

    # Memory

    @cached_property
    def memory(self) -> list[Row]:
        """The step functions of activations, parameters and gradients."""
        return step_functions([*self.activations(), *self.gradients(), *self.parameters()])

    def activations(self) -> Iterator[Held]:
        for task in self.computations:
            if task.kind == "F":
                end = self.backward(task.micro_batch, task.stage, task.step) + 1
                yield Held(task.device, "activations", task.start, end)

    def gradients(self) -> Iterator[Held]:
        """Yield a sum for each device, stage and step, from its first backward until it is used or has been sent."""
        first: dict[tuple[int, int, int], Task] = {}
        for task in self.computations:
            if task.kind == "B":
                first.setdefault((task.device, task.stage, task.step), task)
        if self.schedule == "zero-cdp":
            yield from self._sums_inside_the_state()
            return
        for task in first.values():
            yield Held(task.device, "gradients", task.start, self._gradient_ends(task))

    def _sums_inside_the_state(self) -> Iterator[Held]:
        """Yield partial sums that travel inside the state: they are where the state is."""
        for t in range(self.steps):
            for j in range(self.n):
                begun, used = self.backward(0, j, t), self.updated(j, t)
                for stay in self.stays[j]:
                    yield Held(stay.device, "gradients", max(stay.start, begun), min(stay.end, used))

    def _gradient_ends(self, task: Task) -> int:
        if task.device in self.updaters(task.stage, task.step):
            return self.updated(task.stage, task.step)
        carriers = [
            message.end
            for message in self.messages
            if message.content == "gradient"
            and (message.stage, message.step) == (task.stage, task.step)
            and (str(task.device) in message.dst.split("|") if "|" in message.dst else message.src == task.device)
        ]
        return max(carriers)

    def parameters(self) -> Iterator[Held]:
        """Yield every live version of every stage on every device."""
        for (j, version), readers in self.readers.items():
            if self.schedule == "zero-dp":
                yield from self._owned_and_gathered(j, version, readers)
            elif self.schedule == "zero-cdp":
                yield from self._inside_the_state(j, version, readers)
            else:
                yield from self._replicated(j, version, readers)

    def _owned_and_gathered(self, j: int, version: int, readers: list[Task]) -> Iterator[Held]:
        yield Held(j, "parameters", self.made(j, version), max(task.end for task in readers))
        for task in readers:
            if task.device != j:
                yield Held(task.device, "parameters", task.start, task.end)

    def _inside_the_state(self, j: int, version: int, readers: list[Task]) -> Iterator[Held]:
        made, last = self.made(j, version), max(task.end for task in readers)
        for stay in self.stays[j]:
            yield Held(stay.device, "parameters", max(stay.start, made), min(stay.end, last))

    def _replicated(self, j: int, version: int, readers: list[Task]) -> Iterator[Held]:
        sent = [m for m in self.hand_overs if (m.stage, m.step) == (j, version - 1)] if self._hands_over else []
        arrived = {int(message.dst): message.end for message in sent}
        ends: dict[int, int] = defaultdict(int)
        for device, end in [(task.device, task.end) for task in readers] + [(m.src, m.end) for m in sent]:
            ends[device] = max(ends[device], end)
        for device, end in ends.items():
            yield Held(device, "parameters", arrived.get(device, self.made(j, version)), end)

    @property
    def _hands_over(self) -> bool:
        return self.cyclic and self.family != "zero"


def p2p(content: str, stage: int, step: int, src: int, dst: int, time: int) -> Message:
    """Return a free message between two devices that belongs to no single micro-batch."""
    return Message("p2p", content, stage, NONE, step, src, str(dst), 1, time, time, 1)


def joined(members: Iterable[int]) -> str:
    """Return the members of a collective as messages.csv writes them."""
    return "|".join(map(str, sorted(members)))


def step_functions(held: Iterable[Held]) -> list[Row]:
    """Return one net row per change, sorted by device, category and time."""
    changes: dict[tuple[int, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for one in held:
        if one.start < one.end:
            changes[one.device, one.category][one.start] += 1
            changes[one.device, one.category][one.end] -= 1
    rows = []
    for (device, category), curve in sorted(changes.items()):
        size = 0
        for time, change in sorted(curve.items()):
            size += change
            if change:
                rows.append(Row(device, category, time, size))
    return rows

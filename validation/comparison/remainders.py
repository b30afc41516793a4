"""The events of a process, and what it allocates by the simulation from one to another, with a name for each part.

What updates and messages need beside the program's buffers are remainders: the new version beside the old one and the
temporaries of the optimizer, tensors packed into one message and unpacked from it, workspaces of kernels, numbers that
graphs keep, and in a single process what a sum keeps until its last member has it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cdpsim.program import Category, Kind, Op
from cdpsim.schedules.order import Outer

from ..profile.tracker import Tracker
from ..profile.workspaces import Workspaces
from ..replay.case import Prepared
from ..replay.contents import BEGINNING, Message
from ..replay.local import OuterState, update_by_mean
from ..replay.policy import split_of
from ..replay.shares import Shares
from ..replay.watch import Event
from ..training.forms import Form, zeros
from ..training.optimizer import Optimizer

_Pass = tuple[int, int, int, int]  # device, step, micro-batch, stage


class Span(NamedTuple):
    """Bytes that are allocated from one point to another; point 2k is during event k, and 2k + 1 behind it."""

    name: str  # empty: a buffer of the program
    size: int
    begin: int
    end: int


class EventSequence:
    """The events of a process, and the points at which the program's moments are in them."""

    def __init__(self, prepared: Prepared, events: list[Event]) -> None:
        self._prepared, self._plan, self._events = prepared, prepared.plan, events
        self._shares = Shares(self._plan.program, self._plan.messages, prepared.training)
        self._found: dict[tuple[tuple[Form, ...], bool], int] = {}  # by forms, and whether by a mean
        self.devices = {event.device for event in events if event.device >= 0}
        self._starts = {(event.device, event.node): k for k, event in enumerate(events) if not event.ends}
        self._ends = self._starts | {(event.device, event.node): k for k, event in enumerate(events) if event.ends}
        self._messages = [message for message in self._plan.messages if self.devices & set(message.members)]

    def level(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """Return the bytes at all points."""
        change = np.zeros(2 * len(self._events) + 1, dtype=np.int64)
        for span in spans:
            change[span.begin] += span.size
            change[span.end] -= span.size
        return np.cumsum(change)[:-1]

    def describe(self, event: Event) -> str:
        """Return what a device did."""
        return f"{'the end of ' if event.ends else ''}{self._plan.describe(event.node, event.device)}"

    def buffers(self) -> Iterator[Span]:
        """Yield the program's buffers on the devices of the process."""
        buffers = self._plan.program.buffers
        ends: dict[int, list[int]] = defaultdict(list)
        for number, moment in zip(buffers.kept.tolist(), buffers.kept_until.tolist(), strict=True):
            ends[number].append(moment)
        columns = (buffers.device, buffers.size, buffers.begin, buffers.end)
        for number, (device, size, begin, end) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            if device in self.devices:
                until = max(self._point(device, moment) for moment in (end, *ends[number]))
                yield Span("", size, self._point(device, begin), self._buffer_end(number, until))

    def _buffer_end(self, number: int, until: int) -> int:
        return until

    def _point(self, device: int, moment: int) -> int:
        """Return the point of a moment on a device; a node of which it has no part is at that of another device."""
        node, at_end = moment >> 1, moment & 1
        if node == BEGINNING:
            return 1
        known = self._ends if at_end else self._starts
        k = known.get((device, node), max((known[d, node] for d in self.devices if (d, node) in known), default=0))
        return 2 * k + at_end

    def remainders(self) -> Iterator[Span]:
        """Yield what updates and messages need beside the program's buffers."""
        tasks = self._plan.program.tasks
        for k, event in enumerate(self._events):
            if 0 <= event.node < len(tasks) and tasks.kind[event.node] == Kind.U:
                yield from self._of_update(k, event.node, event.device)
            elif 0 <= event.node < len(tasks) and tasks.kind[event.node] == Kind.F:
                yield from self._of_kept_share(k, event)
        for message in self._messages:
            yield from self._of_message(message)

    def _of_message(self, message: Message) -> Iterator[Span]:
        if message.op in (Op.P2P, Op.BROADCAST, Op.REDUCE):
            yield from self._of_cargo(message)
        else:
            yield from self._of_ranks(message)
        if message.op == Op.REDUCE and len(self.devices) > 1:
            yield from self._of_sum(message)

    def workspaces(self, found: list[Workspaces]) -> Iterator[Span]:
        """Yield what kernels allocate for themselves in forwards and backwards, and what graphs keep between them."""
        tasks, behind = self._plan.program.tasks, dict[_Pass, tuple[int, int]]()
        for k, event in enumerate(self._events):
            if not 0 <= event.node < self._plan.program.compute:
                continue
            t, i, j = (int(column[event.node]) for column in (tasks.step, tasks.micro_batch, tasks.stage))
            key = (event.device, t, i, j)
            own = found[j][Kind(int(tasks.kind[event.node]))]
            if key in behind:
                size, begin = behind.pop(key)
                yield Span("numbers in graphs", size, begin, 2 * k)
            yield Span("workspaces of kernels", own.during, 2 * k, 2 * k + 1)
            behind[key] = own.behind, 2 * k + 1

    def _of_update(self, k: int, node: int, device: int) -> Iterator[Span]:
        """Yield the new version while the old one is there, and the optimizer's temporaries."""
        program, stage = self._plan.program, int(self._plan.program.tasks.stage[node])
        split = split_of(program, Category.OPTIMIZER)
        parts, size = tuple(self._shares.parts(stage, split)), self._shares.form(stage, split).nbytes
        if split > split_of(program, Category.PARAMETERS) and self._is_short(device, stage, split):
            many = 1 + (split > split_of(program, Category.GRADIENTS))
            yield Span("padded shares", many * size, 2 * k, 2 * k + 1)
        needed = self._update_bytes(parts, by_mean=self._plan.is_mean(int(program.tasks.version[node])))
        yield Span("new parameters beside the old", size, 2 * k, 2 * k + 1)
        yield Span("temporaries of the optimizer", needed - size, 2 * k, 2 * k + 1)

    def _update_bytes(self, parts: tuple[Form, ...], *, by_mean: bool = False) -> int:
        """Return the bytes that an update of these parts makes at the most, found once."""
        if (parts, by_mean) not in self._found:
            device, local = self._prepared.training.device, self._prepared.request.schedule.order.local
            if by_mean:
                self._found[parts, by_mean] = mean_update_bytes(local.outer if local else None, parts, device)
            else:
                self._found[parts, by_mean] = update_bytes(self._prepared.case.optimizer, parts, device)
        return self._found[parts, by_mean]

    def _points(self, message: Message, device: int) -> tuple[int, int]:
        """Return the points at which a device's part in a message begins, and ends."""
        return 2 * self._starts[device, message.node], 2 * self._ends[device, message.node]

    def _bytes(self, message: Message) -> tuple[int, int]:
        """Return the bytes of all that a message among ranks is of, and of a share of that."""
        split, stages = self._shares.splits(message), message.covers
        whole, share = (sum(self._shares.form(stage, of).nbytes for stage in stages) for of in (1, split))
        return whole, share

    def _of_kept_share(self, k: int, event: Event) -> Iterator[Span]:
        """Yield a share for the backward beside the parameters of which it is one, when the forward's own has gone."""
        stage = int(self._plan.program.tasks.stage[event.node])
        split = self._plan.policy.between.get(stage, 1)
        if split > 1:
            buffers = self._plan.program.buffers
            own = (buffers.device == event.device) & (buffers.category != Category.PARAMETERS)
            moment = 2 * event.node + 1
            gone = int(buffers.size[own & (buffers.end == moment)].sum())
            gone -= int(buffers.size[own & (buffers.begin == moment)].sum())  # what stays has another buffer from here
            size = max(0, self._shares.form(stage, split).nbytes - gone)
            yield Span("shares beside what they are of", size, 2 * k, 2 * k + 1)

    def _is_short(self, device: int, stage: int, split: int) -> bool:
        """Return whether a device's share is shorter than others, so that what is in whole vectors has to be padded."""
        place = self._shares.place(stage, split, self._shares.rank(device, split))
        return place.stop - place.start < self._shares.form(stage, split).numel

    def _of_ranks(self, message: Message) -> Iterator[Span]:
        """Yield what ranks exchange beside what they hold: packed tensors, shares on their way, unpacked tensors."""
        program, shares = self._plan.program, self._shares
        members = sorted(self.devices & set(message.members))
        split, (whole, share) = shares.splits(message), self._bytes(message)
        parameters, sums = (split_of(program, each) for each in (Category.PARAMETERS, Category.GRADIENTS))
        for device in members:
            (begin, end), given = self._points(message, device), self._given(message, device)
            if message.op == Op.ALL_GATHER:
                packed = share if parameters == 1 else 0
                yield Span("tensors packed to be sent", packed, begin, given)
                padded = self._padded(message, device) if parameters == 1 else 0
                yield Span("padded shares", padded, begin, begin + 1)
                yield Span("padding of gathered shares", split * share - whole, begin, end + 1)
                yield Span("tensors unpacked on arrival", whole if shares.is_packed(message) else 0, end, end + 1)
            elif message.op == Op.REDUCE_SCATTER:
                packed = split * share if shares.is_packed(message) else 0
                alone = len(self.devices) == 1
                unpacked = share if message.stages > 1 and not alone else 0  # after the packed ones have gone
                yield Span("tensors packed to be sent", packed, begin, end + 1 if alone else given)
                yield Span("shares before they are sums", share, begin, end + 1)
                yield Span("tensors unpacked on arrival", unpacked, end, end + 1)
            else:
                short = sums < split and message.stages == 1 and self._is_short(device, message.stage, split)
                packed = share if message.stages > 1 or short else 0
                yield Span("tensors packed to be sent", packed, begin, end + 1)
                yield Span("padded shares", self._padded(message, device) if sums < split else 0, begin, begin + 1)
                if (come := self._coming(message, device)) is not None:
                    yield Span("shares on their way across groups", share, 2 * come + 1, end + 1)

    def _given(self, message: Message, device: int) -> int:
        """Return the point at which a message has taken what a device gives: in one process, from the last one."""
        members = [device] if len(self.devices) == 1 else sorted(self.devices & set(message.members))
        return 2 * max(self._starts[member, message.node] for member in members) + 1

    def _padded(self, message: Message, device: int) -> int:
        split = self._shares.splits(message)
        if message.stages == 1:
            return 0
        short = [stage for stage in message.covers if self._is_short(device, stage, split)]
        return sum(self._shares.form(stage, split).nbytes for stage in short)

    def _coming(self, message: Message, device: int) -> int | None:
        """Return the event with which a share came that goes on beside those of earlier passes; None if none are there.

        Sums in the place of the gradients themselves come once.
        """
        place = self._plan.place
        alike = [each for each in self._messages if (each.covers, each.step) == (message.covers, message.step)]
        alike = [each for each in alike if each.op == Op.REDUCE_SCATTER and device in each.members]
        sums = [each.node for each in alike if place[each.node] < place[message.node]]
        return self._ends[device, max(sums, key=place.__getitem__)] if len(sums) > 1 else None

    def _of_cargo(self, message: Message) -> Iterator[Span]:
        """Yield several tensors in one piece at their sender, and in pieces beside that at their receiver."""
        states = len(self._prepared.case.optimizer.forms(self._prepared.training.parts(message.stage)))
        cargo = self._plan.cargo(message.node)
        if sum(states if holding.category == Category.OPTIMIZER else 1 for holding in cargo) < 2:
            return
        for device in self.devices & set(message.members):
            begin, end = self._points(message, device)
            if device == message.src:
                yield Span("tensors packed to be sent", message.size, begin, end + 1)
            else:
                yield Span("tensors unpacked on arrival", message.size, end, end + 1)

    def _of_sum(self, message: Message) -> Iterator[Span]:
        """Yield gradients that a single process keeps until the last member has their sum."""
        last = max(self._ends[device, message.node] for device in message.members)
        root = self._ends.get((message.src, message.node), last)
        size = self._prepared.training.parameters(message.stage).nbytes
        for life in self._plan.policy.lives:
            if life.holding[:3] == (Category.GRADIENTS, message.stage, message.step):
                end = self._point(life.device, 2 * life.end + 1)
                yield Span("gradients until their sum is everywhere", size, end, max(end, 2 * root + 1))


def update_bytes(optimizer: Optimizer, parts: Sequence[Form], device: torch.device) -> int:
    """Return the most that an update of a vector of these parts makes at a time, the new parameters among it."""
    vector = Form((sum(part.numel for part in parts),), parts[0].dtype)
    if optimizer.on_host and device.type != "cpu":
        return vector.nbytes  # all else is made on the host
    theta, gradient = zeros(vector, device), zeros(vector, device)
    state, tracker = optimizer.state(theta, parts), Tracker(device.type)
    tracker.ignore([theta, gradient, *state.values()])
    with tracker:
        optimizer.update(theta, gradient, state, parts)
    return tracker.peak


def mean_update_bytes(outer: Outer | None, parts: Sequence[Form], device: torch.device) -> int:
    """Return the most that an update by a mean makes at a time, the new parameters among it."""
    vector = Form((sum(part.numel for part in parts),), parts[0].dtype)
    total, tracker = zeros(vector, device), Tracker(device.type)
    state = None if outer is None else OuterState(outer, total)
    tracker.ignore([total, *(state.vectors if state else ())])
    with tracker:
        update_by_mean(total, 2, state)
    return tracker.peak

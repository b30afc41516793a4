"""What devices of rounds need beside the program's buffers: for updates beside their tasks, and for what these send.

The buffer for communication is the program's. What is summed arrives beside it, as do the parameters that are gathered;
an update divides its sum, and an estimate's is made with a copy of the optimizer state.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from cdpsim.program import Category, Kind, Op

from ..replay.contents import Message
from ..replay.policy import split_of
from ..replay.round_lives import WorkerSteps
from ..replay.rounds import versions_brought
from .remainders import EventSequence, Span


class RoundsSequence(EventSequence):
    """The events of a process whose devices go on while their gradients are on their way."""

    def _buffer_end(self, number: int, until: int) -> int:
        """Return a later point for what is there for a communication that is through as the device's task ends.

        The order in which a process goes through what happens at one moment is its own.
        """
        category = self._plan.program.buffers.category[number]
        if category == Category.GRADIENTS:
            return self._handed_over.get(until, until)
        return self._lasts.get(until, until) if category in (Category.COMMUNICATION, Category.PARAMETERS) else until

    @cached_property
    def _lasts(self) -> dict[int, int]:
        """The point at which each device's last communication is through, by that of its last task."""
        found = {}
        for device in self.devices:
            own = [message.node for message in self._messages if device in message.members]
            node = WorkerSteps(self._plan.program, device).last
            ends = [2 * self._ends[device, each] + 1 for each in (node, *own)]
            found[ends[0]] = max(ends)
        return found

    @cached_property
    def _handed_over(self) -> dict[int, int]:
        """The point at which each device hands gradients over, by that of a step's last task, where that is later.

        The buffer for them then has what the communication before brings.
        """
        found = {}
        for device in self.devices:
            steps = WorkerSteps(self._plan.program, device).tasks
            for step in range(1, self._plan.program.updated):
                own = [each for each in self._messages if device in each.members]
                came = [self._ends[device, each.node] for each in own if each.step == step - 1]
                last = self._ends[device, steps[step][-1]]
                if came and max(came) > last:
                    sums = [each.node for each in own if (each.step, each.op) == (step, Op.REDUCE_SCATTER)]
                    after = min(self._starts[device, node] for node in (steps[step + 1][0], *sums))
                    found[2 * last + 1] = 2 * after
        return found

    def _of_message(self, message: Message) -> Iterator[Span]:
        for device in sorted(self.devices & set(message.members)):
            yield from (self._of_gathered if message.op == Op.ALL_GATHER else self._of_sums)(message, device)

    def _of_update(self, k: int, node: int, device: int) -> Iterator[Span]:
        """Yield the mean of what was handed over, a copy of the state, the optimizer's temporaries and its result."""
        optimizer, brings = self._prepared.case.optimizer, versions_brought(self._plan)
        program, stage = self._plan.program, int(self._plan.program.tasks.stage[node])
        version, split = int(program.tasks.version[node]), split_of(self._plan.program, Category.OPTIMIZER)
        parts, form = tuple(self._shares.parts(stage, split)), self._shares.form(stage, split)
        size, estimate = form.nbytes, bool(program.is_estimate(np.array(version)))
        yield Span("means of gradients", size, 2 * k, 2 * k + 1)
        yield Span("temporaries of updates", self._update_bytes(parts), 2 * k, 2 * k + 1)
        if split > 1 and self._is_short(device, stage, split):
            yield Span("padded shares", size, 2 * k, 2 * k + 1)
        if estimate:
            copies = sum(own.nbytes for own in optimizer.forms(parts).values())
            yield Span("states beside their copies", copies, 2 * k, 2 * k + 1)
        own = (each for each in self._messages if device in each.members)
        gather = next((each for each in own if brings.get(each.node) == version), None)
        if split > 1 and gather is not None:
            apart = estimate or not optimizer.has_master or optimizer.mixed_precision
            begin = k if apart else self._state_goes(stage, device)
            # Packed with others, or taken by all.
            sent = 2 * self._starts[device, gather.node] if gather.stages > 1 else self._given(gather, device)
            yield Span("shares until they are gathered", size, min(2 * begin + 1, sent), sent)

    def _state_goes(self, stage: int, device: int) -> int:
        """Return the event with which a device lets go of an optimizer state, in which the newest version is."""
        tasks = self._plan.program.tasks
        own = (tasks.kind == Kind.U) & (tasks.stage == stage) & (tasks.device == device)
        ends = [self._ends[device, node] for node in np.flatnonzero(own).tolist()]
        return max(*ends, self._ends[device, WorkerSteps(self._plan.program, device).last])

    def _of_sums(self, message: Message, device: int) -> Iterator[Span]:
        """Yield what a device gives to a sum, packed, and its share, which is there for all updates of the step."""
        tasks, (_, share), (begin, end) = self._plan.program.tasks, self._bytes(message), self._points(message, device)
        packed = self._shares.splits(message) * share if self._shares.is_packed(message) else 0
        until = end + 1 if len(self.devices) == 1 else self._given(message, device)
        yield Span("tensors packed to be sent", packed, begin, until)
        updates = range(self._plan.program.compute, len(tasks))
        own = (node for node in updates if tasks.step[node] == message.step and tasks.device[node] == device)
        yield Span("shares of sums", share, begin, max(2 * self._starts[device, node] + 1 for node in own))

    def _of_gathered(self, message: Message, device: int) -> Iterator[Span]:
        """Yield a device's shares, packed, and all that it gathers, until that is in the buffer for communication."""
        split, (whole, share) = self._shares.splits(message), self._bytes(message)
        (begin, end), given = self._points(message, device), self._given(message, device)
        yield Span("tensors packed to be sent", share if message.stages > 1 else 0, begin, given)
        yield Span("parameters as they are gathered", split * share, begin, end + 1)
        yield Span("tensors unpacked on arrival", whole if self._shares.is_packed(message) else 0, end, end + 1)

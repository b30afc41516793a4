"""How tensors travel between devices: within one process, or by torch.distributed between processes.

Both count what they are asked to carry where they carry it: what was called, with whom, how many bytes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from validation.forms import Form
from validation.plan import Calls, Message, ReplayError


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> Tensor:
        """Wait until it is through, and give what it brought; of a message that was sent, what was sent."""


class Transport(Protocol):
    """One device's way to the others; `calls` is what was counted."""

    calls: Calls

    def send(self, message: Message, tensor: Tensor) -> Pending:
        """Begin to send a tensor, which must not change until that is through."""

    def receive(self, message: Message, form: Form) -> Pending:
        """Make room and let the message come."""

    def all_reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Sum over a group; the tensor itself may become the sum."""

    def reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Sum over a group at its root; elsewhere the tensor is of no use afterwards."""

    def broadcast(self, message: Message, form: Form, tensor: Tensor | None) -> Pending:
        """Send the root's tensor to all of a group; others have none."""


@dataclass(frozen=True)
class _Later:
    """Something to be had when it is asked for."""

    wait: Callable[[], Tensor]


class Mailroom:
    """What devices in one process have put down for each other, by message."""

    def __init__(self) -> None:
        self._posts: dict[int, list[Tensor]] = {}
        self._looks: Counter[int] = Counter()

    def put(self, message: Message, tensor: Tensor) -> None:
        """Leave a tensor for a message."""
        self._posts.setdefault(message.node, []).append(tensor)

    def take(self, message: Message, readers: int = 1) -> list[Tensor]:
        """Give what was left for a message; the last of so many readers takes it away."""
        self._looks[message.node] += 1
        if self._looks[message.node] < readers:
            return self._posts[message.node]
        return self._posts.pop(message.node)


class InProcess:
    """A device's transport where all devices are played in one process, in the program's order."""

    def __init__(self, device: int, room: Mailroom) -> None:
        self.calls: Calls = Counter()
        self._device, self._room = device, room

    def send(self, message: Message, tensor: Tensor) -> Pending:
        """Hand the tensor itself over."""
        self.calls["send", (message.members[1],), tensor.nbytes] += 1
        self._room.put(message, tensor)
        return _Later(lambda: tensor)

    def receive(self, message: Message, form: Form) -> Pending:
        """Take the tensor when it is needed."""
        self.calls["receive", (message.src,), form.nbytes] += 1
        return _Later(lambda: self._room.take(message)[0])

    def all_reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Sum in the order in which members come."""
        self.calls["all_reduce", message.members, tensor.nbytes] += 1
        self._room.put(message, tensor)
        return _Later(lambda: torch.stack(self._room.take(message, len(message.members))).sum(0))

    def reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Sum in the order in which members come."""
        self.calls["reduce", message.members, tensor.nbytes] += 1
        self._room.put(message, tensor)
        if self._device != message.src:
            return _Later(lambda: tensor)
        return _Later(lambda: torch.stack(self._room.take(message)).sum(0))

    def broadcast(self, message: Message, form: Form, tensor: Tensor | None) -> Pending:
        """Give every member the root's values."""
        self.calls["broadcast", message.members, form.nbytes] += 1
        if tensor is not None:
            self._room.put(message, tensor)
            return _Later(lambda: tensor)
        return _Later(lambda: self._room.take(message, len(message.members) - 1)[0].clone())


@dataclass(frozen=True)
class _Work:
    """A torch call that goes on by itself."""

    work: dist.Work
    tensor: Tensor
    timeout: timedelta

    def wait(self) -> Tensor:
        try:
            self.work.wait(self.timeout)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ReplayError(f"not through within {self.timeout.total_seconds():g} s ({reason})") from error
        return self.tensor


class Distributed:
    """A rank's transport: torch.distributed, where device and rank are the same number.

    `timeout` is how long a message may be waited for. Point-to-point messages have their node as tag, so that two
    ranks agree which is which in whatever order they come.
    """

    def __init__(self) -> None:
        self.calls: Calls = Counter()
        self.timeout = timedelta(seconds=60)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make process groups: called by all ranks with the same groups in the same order, members or not."""
        for members in groups:
            if members not in self._groups:
                self._groups[members] = dist.new_group(list(members), timeout=self.timeout)

    def send(self, message: Message, tensor: Tensor) -> Pending:
        """Begin to send."""
        to = message.members[1]
        self.calls["send", (to,), tensor.nbytes] += 1
        return self._begun(dist.isend(tensor, to, tag=message.node), tensor)

    def receive(self, message: Message, form: Form) -> Pending:
        """Post the receive."""
        tensor = torch.empty(form.shape, dtype=form.dtype)
        self.calls["receive", (message.src,), tensor.nbytes] += 1
        return self._begun(dist.irecv(tensor, message.src, tag=message.node), tensor)

    def all_reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Begin to sum over the group."""
        self.calls["all_reduce", message.members, tensor.nbytes] += 1
        return self._begun(dist.all_reduce(tensor, group=self._group(message), async_op=True), tensor)

    def reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Begin to sum at the root."""
        self.calls["reduce", message.members, tensor.nbytes] += 1
        return self._begun(dist.reduce(tensor, message.src, group=self._group(message), async_op=True), tensor)

    def broadcast(self, message: Message, form: Form, tensor: Tensor | None) -> Pending:
        """Begin to send the root's tensor to all."""
        tensor = torch.empty(form.shape, dtype=form.dtype) if tensor is None else tensor
        self.calls["broadcast", message.members, tensor.nbytes] += 1
        return self._begun(dist.broadcast(tensor, message.src, group=self._group(message), async_op=True), tensor)

    def _group(self, message: Message) -> dist.ProcessGroup:
        return self._groups[message.members]

    def _begun(self, work: dist.Work | None, tensor: Tensor) -> Pending:
        assert work is not None, "torch gives no work to those outside a group"
        return _Work(work, tensor, self.timeout)

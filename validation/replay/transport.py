"""Transport of tensors between devices: within one process, or by torch.distributed between processes.

Both count each call where they make it: its name, its partners and its bytes.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.utils._python_dispatch import _disable_current_modes

from ..training.forms import Form
from .contents import Calls, Message, ReplayError


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> Tensor:
        """Wait until it is complete, and return the tensor that it brought, or that was sent."""


class Transport(Protocol):
    """One device's transport to the others; `calls` are the calls that it counted."""

    calls: Calls

    def send(self, message: Message, tensor: Tensor) -> Pending:
        """Begin to send a tensor, which must not change until the message is complete."""

    def receive(self, message: Message, form: Form) -> Pending:
        """Make room for a message and begin to receive it."""

    def all_reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Sum over a group; the tensor itself may become the sum."""

    def reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Sum over a group at its root; on other devices the tensor is undefined afterwards."""

    def broadcast(self, message: Message, form: Form, tensor: Tensor | None) -> Pending:
        """Send the root's tensor to all of a group; only the root has one."""

    def reduce_scatter(self, message: Message, tensor: Tensor, form: Form) -> Pending:
        """Sum over a group, of which each member ends with its share: the tensor has one for each, one after another.

        The tensor is undefined afterwards.
        """

    def all_gather(self, message: Message, tensor: Tensor, form: Form) -> Pending:
        """Bring each member's tensor to all of a group, one after another."""


@dataclass(frozen=True)
class _Later:
    """A message whose tensor is computed when it is waited for."""

    wait: Callable[[], Tensor]


class Mailboxes:
    """Tensors that the devices of one process leave for each other, by message."""

    def __init__(self) -> None:
        self._posts: dict[int, dict[int, Tensor]] = {}  # node of a message -> device -> tensor
        self._results: dict[int, list[Tensor]] = {}  # of members, in their order
        self._looks: Counter[int] = Counter()
        self._closed: set[int] = set()  # collectives to which all members have given

    def put(self, message: Message, device: int, tensor: Tensor) -> None:
        """Leave a device's tensor for a message."""
        self._posts.setdefault(message.node, {})[device] = tensor

    def take(self, message: Message, device: int, readers: int = 1) -> list[Tensor]:
        """Return the tensor left for a message; the last of so many readers removes it."""
        posts = self._posts.get(message.node, {})
        self._check(message, posts)
        self._looks[message.node] += 1
        if self._looks[message.node] == readers:
            del self._posts[message.node]
        return [posts[sender] for sender in sorted(posts)]

    def posts(self, message: Message) -> list[Tensor]:
        """Return what has been left for a message so far, in the order of its members."""
        posts = self._posts[message.node]
        return [posts[member] for member in message.members if member in posts]

    def put_result(self, message: Message, tensor: Tensor) -> None:
        """Leave the tensor into which a member's result goes."""
        self._results.setdefault(message.node, []).append(tensor)

    def results(self, message: Message) -> list[Tensor]:
        """Return the tensors of all results."""
        return self._results.pop(message.node)

    def close(self, message: Message) -> None:
        """Let go of what was left for a message that is complete."""
        self._posts.pop(message.node, None)
        self._closed.add(message.node)

    def check_closed(self, message: Message) -> None:
        """Refuse a message to which a member has given nothing."""
        if message.node not in self._closed:
            self._check(message, self._posts.get(message.node, {}))

    @staticmethod
    def _check(message: Message, posts: dict[int, Tensor]) -> None:
        if late := [sender for sender in message.senders if sender not in posts]:
            whom = f"device{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
            raise ReplayError(f"nothing came from {whom}")

    def sum(self, message: Message, device: int, readers: int = 1) -> Tensor:
        """Add the tensors of a message, device by device and into the first; then do as `take`."""
        first = self._looks[message.node] == 0
        posts = self.take(message, device, readers)
        if first:
            for tensor in posts[1:]:
                posts[0].add_(tensor)
        return posts[0]


class InProcess:
    """A device's transport where all devices are played in one process, in the program's order, senders first.

    A received tensor has a storage of its own, as between processes.
    """

    def __init__(self, device: int, room: Mailboxes) -> None:
        self.calls: Calls = Counter()
        self._device, self._room = device, room

    def send(self, message: Message, tensor: Tensor) -> Pending:
        """Leave the tensor for the receiver."""
        self.calls["send", (message.members[1],), tensor.nbytes] += 1
        self._room.put(message, self._device, tensor)
        return _Later(lambda: tensor)

    def receive(self, message: Message, form: Form) -> Pending:
        """Copy the tensor."""
        self.calls["receive", (message.src,), form.nbytes] += 1
        copy = self._room.take(message, self._device)[0].clone()
        return _Later(lambda: copy)

    def all_reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Sum device by device; every member's tensor becomes the sum."""
        self.calls["all_reduce", message.members, tensor.nbytes] += 1

        def sum_up(posts: list[Tensor]) -> None:
            total = self._room.sum(message, self._device)
            for other in posts:
                if other is not total:
                    other.copy_(total)

        return self._exchange(message, tensor, tensor, sum_up)

    def _exchange(
        self, message: Message, given: Tensor, result: Tensor, combine: Callable[[list[Tensor]], None]
    ) -> Pending:
        """Leave a tensor for a collective; the last member combines all, so that nothing stays behind."""
        self._room.put(message, self._device, given)
        posts = self._room.posts(message)
        if len(posts) == len(message.members):
            with _disable_current_modes():  # no watch of the last member sees what is the others'
                combine(posts)
            self._room.close(message)

        def wait() -> Tensor:
            self._room.check_closed(message)
            return result

        return _Later(wait)

    def reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Sum device by device; the root's tensor becomes the sum."""
        self.calls["reduce", message.members, tensor.nbytes] += 1
        self._room.put(message, self._device, tensor)
        if self._device != message.src:
            return _Later(lambda: tensor)

        def wait() -> Tensor:
            total = self._room.sum(message, self._device)
            return tensor if total is tensor else tensor.copy_(total)

        return _Later(wait)

    def broadcast(self, message: Message, form: Form, tensor: Tensor | None) -> Pending:
        """Give every member the root's values."""
        self.calls["broadcast", message.members, form.nbytes] += 1
        if tensor is not None:
            self._room.put(message, self._device, tensor)
            return _Later(lambda: tensor)
        copy = self._room.take(message, self._device, len(message.members) - 1)[0].clone()
        return _Later(lambda: copy)

    def reduce_scatter(self, message: Message, tensor: Tensor, form: Form) -> Pending:
        """Sum the device's share, device by device."""
        self.calls["reduce_scatter", message.members, form.nbytes] += 1
        share = tensor.new_empty(form.shape)
        self._room.put_result(message, share)

        def sum_up(posts: list[Tensor]) -> None:
            for rank, result in enumerate(self._room.results(message)):
                result.copy_(posts[0][_place_of(rank, form)])
                for other in posts[1:]:
                    result.add_(other[_place_of(rank, form)])

        return self._exchange(message, tensor, share, sum_up)

    def all_gather(self, message: Message, tensor: Tensor, form: Form) -> Pending:
        """Copy each member's tensor."""
        self.calls["all_gather", message.members, form.nbytes] += 1
        whole = tensor.new_empty(form.shape)
        self._room.put_result(message, whole)

        def join(posts: list[Tensor]) -> None:
            for result in self._room.results(message):
                torch.cat(posts, out=result)

        return self._exchange(message, tensor, whole, join)


def _place_of(rank: int, form: Form) -> slice:
    """Return the place of a rank's share."""
    return slice(rank * form.numel, (rank + 1) * form.numel)


def missing_keys(store: Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Wait for keys of a store, and return those that are not there in time."""
    deadline = time.monotonic() + seconds
    # The store's own `wait` does not say which key is missing, and warns on stderr.
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(0.01)
    return []


def meet_ranks(store: Store, place: str, rank: int, others: Iterable[int], seconds: float) -> None:
    """Wait until the other ranks are at a place too; an error names those that do not come in time."""
    store.set(f"{place}/{rank}", "here")
    here = {f"{place}/{other}": str(other) for other in others}
    if late := [here[key] for key in missing_keys(store, list(here), seconds)]:
        raise ReplayError(
            f"waited {round(seconds, 1):g} s at '{place}' for rank{'s' * (len(late) > 1)} {', '.join(late)}"
        )


@dataclass(frozen=True)
class _Work:
    """A torch call that runs by itself, with its tensor and its receiver."""

    work: dist.Work
    carried: Tensor
    tensor: Tensor  # in the same storage, unless it is staged
    brings: bool
    until: float

    def wait(self) -> Tensor:
        # A timeout of zero would mean none.
        left = timedelta(seconds=max(0.001, self.until - time.monotonic()))
        try:
            self.work.wait(left)
        except RuntimeError as error:
            raise ReplayError(first_line(error)) from error
        if self.brings and not self.carried.is_set_to(self.tensor):
            self.tensor.copy_(self.carried)
        # A thread of gloo may keep a sent tensor for a while; its storage is to be freed with the tensor.
        self.carried.data = self.carried.new_empty(0)
        return self.tensor


@dataclass(frozen=True)
class _Works:
    """Torch calls of one collective, and what its result is made by when they are through."""

    works: Sequence[_Work]
    result: Callable[[], Tensor]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.result()


def first_line(error: BaseException) -> str:
    """Return the first line of a torch error, without the place in torch's sources and without guesses."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^(\[[^]]*:\d+\] *)+|\. This is typically caused by .*", "", lines[0])


class Distributed:
    """A rank's transport: torch.distributed, where device and rank are the same number.

    gloo knows a point-to-point message by its tag, which is its node, so two ranks agree on it in any order of arrival.
    NCCL ignores tags: there the order counts in which two ranks post what is between them, and it is the same on both
    sides because both go by one order of all nodes. Nor can NCCL's queues block each other. Of all messages that are
    not complete, take the first in that order: both of its sides have posted it or will, because all that they wait for
    comes before it, and nothing before it is left in any queue. So one queue for both directions is enough.

    gloo sends and receives no CUDA tensors, and two ranks on one GPU can use only gloo: `staged` messages go
    through a buffer on the host, collectives too, so that there is only one way.
    """

    def __init__(
        self, store: Store, rank: int, count: int, *, device: torch.device | None = None, staged: bool = False
    ) -> None:
        self.calls: Calls = Counter()
        self._store, self._rank, self._count = store, rank, count
        self._device, self._staged = device or torch.device("cpu"), staged
        self._groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, float]] = {}
        self._meetings = 0
        self.allow(60.0)

    def allow(self, seconds: float) -> None:
        """Set the time that all waits from now on have together."""
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make process groups: called by all ranks with the same groups in the same order, members or not."""
        # A group gives up after the timeout with which it was made.
        new = [members for members in groups if self._groups.get(members, (None, 0.0))[1] < self._seconds]
        if not new:
            return
        # If a member does not come, making a group says only that a key is missing.
        self._meetings += 1
        left = max(0.0, self._until - time.monotonic())
        meet_ranks(self._store, f"groups {self._meetings}", self._rank, range(self._count), left)
        for members in new:
            timeout = timedelta(seconds=self._seconds)
            self._groups[members] = dist.new_group(list(members), timeout=timeout), self._seconds

    def send(self, message: Message, tensor: Tensor) -> Pending:
        """Begin to send."""
        to = message.members[1]
        self.calls["send", (to,), tensor.nbytes] += 1
        carried = self._outward(tensor)
        work = self._begin(lambda: dist.isend(carried, to, tag=message.node))
        return _Work(work, carried, tensor, False, self._until)

    def receive(self, message: Message, form: Form) -> Pending:
        """Post the receive."""
        tensor = self._empty(form)
        self.calls["receive", (message.src,), tensor.nbytes] += 1
        carried = self._inward(tensor)
        work = self._begin(lambda: dist.irecv(carried, message.src, tag=message.node))
        return _Work(work, carried, tensor, True, self._until)

    def all_reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Begin to sum over the group."""
        self.calls["all_reduce", message.members, tensor.nbytes] += 1
        carried, group = self._outward(tensor), self._group(message)
        work = self._begin(lambda: dist.all_reduce(carried, group=group, async_op=True))
        return _Work(work, carried, tensor, True, self._until)

    def reduce(self, message: Message, tensor: Tensor) -> Pending:
        """Begin to sum at the root."""
        self.calls["reduce", message.members, tensor.nbytes] += 1
        carried, group = self._outward(tensor), self._group(message)
        work = self._begin(lambda: dist.reduce(carried, message.src, group=group, async_op=True))
        return _Work(work, carried, tensor, self._rank == message.src, self._until)

    def broadcast(self, message: Message, form: Form, tensor: Tensor | None) -> Pending:
        """Begin to send the root's tensor to all."""
        brings = tensor is None
        tensor = self._empty(form) if tensor is None else tensor
        self.calls["broadcast", message.members, tensor.nbytes] += 1
        carried, group = self._inward(tensor) if brings else self._outward(tensor), self._group(message)
        work = self._begin(lambda: dist.broadcast(carried, message.src, group=group, async_op=True))
        return _Work(work, carried, tensor, brings, self._until)

    def reduce_scatter(self, message: Message, tensor: Tensor, form: Form) -> Pending:
        """Begin to sum each share at its member, where torch's own call would not do."""
        self.calls["reduce_scatter", message.members, form.nbytes] += 1
        share, group = self._empty(form), self._group(message)
        if self._is_native:
            return self._natively(dist.reduce_scatter_tensor, share, tensor, group)
        own, works = tensor[_place_of(message.members.index(self._rank), form)], []
        for member, part in zip(message.members, torch.split(tensor, form.numel), strict=True):
            carried = self._outward(part)
            work = self._begin(partial(dist.reduce, carried, member, group=group, async_op=True))
            works.append(_Work(work, carried, part, member == self._rank, self._until))
        return _Works(works, lambda: share.copy_(own))

    def all_gather(self, message: Message, tensor: Tensor, form: Form) -> Pending:
        """Begin to send each member's tensor to all, where torch's own call would not do."""
        self.calls["all_gather", message.members, form.nbytes] += 1
        whole, group = self._empty(form), self._group(message)
        if self._is_native:
            return self._natively(dist.all_gather_into_tensor, whole, tensor, group)
        works = []
        for member, part in zip(message.members, torch.split(whole, tensor.numel()), strict=True):
            if member == self._rank:
                part.copy_(tensor)
            carried = self._outward(part)
            work = self._begin(partial(dist.broadcast, carried, member, group=group, async_op=True))
            works.append(_Work(work, carried, part, member != self._rank, self._until))
        return _Works(works, lambda: whole)

    @property
    def _is_native(self) -> bool:
        """Whether torch's own collective does: gloo's copies what it carries in threads of its own, unseen."""
        return self._device.type == "cuda" and not self._staged

    def _natively(self, collective: Callable[..., Any], result: Tensor, tensor: Tensor, group: Any) -> _Work:
        """Begin one of torch's collectives, which writes its result into a tensor."""
        carried = result.detach()
        work = self._begin(partial(collective, carried, tensor.detach(), group=group, async_op=True))
        return _Work(work, carried, result, True, self._until)

    def _empty(self, form: Form) -> Tensor:
        return torch.empty(form.shape, dtype=form.dtype, device=self._device)

    def _outward(self, tensor: Tensor) -> Tensor:
        """Return the tensor that torch sends: the given one or, staged, its values on the host."""
        return host_buffer(tensor).copy_(tensor) if self._staged else tensor.detach()

    def _inward(self, tensor: Tensor) -> Tensor:
        """Return the tensor into which torch receives: the given one or, staged, one on the host."""
        return host_buffer(tensor) if self._staged else tensor.detach()

    def _group(self, message: Message) -> dist.ProcessGroup:
        return self._groups[message.members][0]

    def _begin(self, call: Callable[[], dist.Work | None]) -> dist.Work:
        """Call torch, which refuses at once where it knows already that a rank is gone."""
        try:
            work = call()
        except RuntimeError as error:
            raise ReplayError(first_line(error)) from error
        assert work is not None, "torch gives no work to those outside a group"
        return work


def host_buffer(tensor: Tensor) -> Tensor:
    """Return room on the host for a tensor's values; pinned for a GPU's tensor, whose copies are then faster."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")

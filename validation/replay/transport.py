"""Transport of tensors between devices: within one process, or by torch.distributed between processes.

Both count each call where they make it: its name, its partners and its bytes.
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.utils._python_dispatch import _disable_current_modes

from cdpsim.program import Op

from ..training.forms import Form
from .contents import Calls, Message, ReplayError


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> Tensor:
        """Wait until it is complete, and return the tensor that it brought, or that was sent."""


class Transport(Protocol):
    """One device's transport to the others; `calls` are the calls that it counted."""

    calls: Calls

    def begin(self, message: Message, tensor: Tensor | None = None, form: Form | None = None) -> Pending:
        """Begin this device's part in a message, by what it gives, and the form of what it ends with where it differs.

        A receiver, and a broadcast's member but the root, gives nothing. What is sent must not change until the message
        is complete. What is summed may become the sum, and is undefined afterwards where the sum is elsewhere. Of a
        reduce-scatter each member gives a share for each, one after another; a gather brings them so.
        """


@dataclass(frozen=True)
class _Later:
    """A message whose tensor is computed when it is waited for."""

    wait: Callable[[], Tensor]


class Mailboxes:
    """Tensors that the devices of one process leave for each other, by message."""

    def __init__(self) -> None:
        self._posts: dict[int, dict[int, Tensor]] = defaultdict(dict)  # node of a message -> device -> tensor
        self._results: dict[int, dict[int, Tensor]] = defaultdict(dict)
        self._looks: Counter[int] = Counter()
        self.closed: set[int] = set()  # collectives to which all members have given

    def put(self, message: Message, device: int, tensor: Tensor) -> None:
        """Leave a device's tensor for a message."""
        self._posts[message.node][device] = tensor

    def given(self, message: Message) -> list[Tensor]:
        """Return what all senders have left for a message, device by device; refuse one for which something lacks."""
        posts = self._posts[message.node]
        if late := [sender for sender in message.senders if sender not in posts]:
            whom = f"device{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
            raise ReplayError(f"nothing came from {whom}")
        return [posts[sender] for sender in sorted(posts)]

    def take(self, message: Message) -> Tensor:
        """Return the tensor left for a message; the last of its receivers removes it."""
        (tensor,) = self.given(message)
        self._looks[message.node] += 1
        if self._looks[message.node] == len(message.members) - 1:
            del self._posts[message.node]
        return tensor

    def reduce(self, message: Message) -> Tensor:
        """Return the sum of what was left for a message, and remove that."""
        given = self.given(message)
        del self._posts[message.node]
        return self.sum(given)

    def sum(self, tensors: list[Tensor]) -> Tensor:
        """Add tensors one by one into the first."""
        for tensor in tensors[1:]:
            tensors[0].add_(tensor)
        return tensors[0]

    def exchange(self, message: Message, device: int, tensor: Tensor, result: Tensor) -> Tensor:
        """Leave a tensor for a collective, and where its result goes; the last member combines all.

        So nothing stays behind.
        """
        self.put(message, device, tensor)
        self._results[message.node][device] = result
        if len(self._posts[message.node]) == len(message.members):
            given = (of.pop(message.node) for of in (self._posts, self._results))
            with _disable_current_modes():  # no watch of the last member sees what is the others'
                self._combine(message.op, *([own[member] for member in message.members] for own in given))
            self.closed.add(message.node)
        return result

    def _combine(self, op: Op, posts: list[Tensor], results: list[Tensor]) -> None:
        for rank, result in enumerate(results):
            if op == Op.REDUCE_SCATTER:
                shares = [post[rank * len(result) : (rank + 1) * len(result)] for post in posts]
                result.copy_(shares[0])
                self.sum([result, *shares[1:]])
            elif op == Op.ALL_GATHER:
                torch.cat(posts, out=result)
            elif rank:
                result.copy_(results[0])
            else:
                self.sum(results)


class InProcess:
    """A device's transport where all devices are played in one process, in the program's order, senders first.

    A received tensor has a storage of its own, as between processes.
    """

    def __init__(self, device: int, room: Mailboxes) -> None:
        self.calls: Calls = Counter()
        self._device, self._room = device, room

    def begin(self, message: Message, tensor: Tensor | None = None, form: Form | None = None) -> Pending:
        """Leave a tensor for the others, or copy theirs; the last member of a collective combines all."""
        if tensor is None:
            assert form is not None, "who gives nothing ends with something"
            return self._receive(message, form)
        if message.op in (Op.P2P, Op.BROADCAST):
            return self._send(message, tensor)
        shared = message.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER) and form is not None
        result = tensor.new_empty(form.shape) if shared and form else tensor
        self.calls[(*message.call(self._device), result.nbytes)] += 1
        if message.op == Op.REDUCE:
            self._room.put(message, self._device, tensor)
            return _Later(lambda: self._reduced(message, tensor))
        return self._exchange(message, tensor, result)

    def _send(self, message: Message, tensor: Tensor) -> Pending:
        self.calls[(*message.call(self._device), tensor.nbytes)] += 1
        self._room.put(message, self._device, tensor)
        return _Later(lambda: tensor)

    def _receive(self, message: Message, form: Form) -> Pending:
        self.calls[(*message.call(self._device), form.nbytes)] += 1
        copy = self._room.take(message).clone()
        return _Later(lambda: copy)

    def _reduced(self, message: Message, tensor: Tensor) -> Tensor:
        """Return the sum at the root; elsewhere what the device has given."""
        if self._device != message.src or (total := self._room.reduce(message)) is tensor:
            return tensor
        return tensor.copy_(total)

    def _exchange(self, message: Message, tensor: Tensor, result: Tensor) -> Pending:
        self._room.exchange(message, self._device, tensor, result)

        def wait() -> Tensor:
            if message.node not in self._room.closed:
                self._room.given(message)  # refuses what a member has not given
            return result

        return _Later(wait)


def missing_keys(store: Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Wait for keys of a store, and return the ones that are missing in the end."""
    deadline = time.monotonic() + seconds
    # The store's own `wait` does not say which key is missing, and warns on stderr.
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(0.01)
    return []


def meet_ranks(store: Store, place: str, rank: int, others: Iterable[int], seconds: float) -> None:
    """Wait until the other ranks are at a place too; an error names the ones that do not come in time."""
    store.set(f"{place}/{rank}", "here")
    here = {f"{place}/{other}": str(other) for other in others}
    if late := [here[key] for key in missing_keys(store, list(here), seconds)]:
        whom = f"rank{'s' * (len(late) > 1)} {', '.join(late)}"
        raise ReplayError(f"waited {round(seconds, 1):g} s at '{place}' for {whom}")


@dataclass(frozen=True)
class _Work:
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


def first_line(error: BaseException) -> str:
    """Return the first line of a torch error, without the place in torch's sources and without guesses."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^(\[[^]]*:\d+\] *)+|\. This is typically caused by .*", "", lines[0])


_COLLECTIVES: dict[Op, Callable[..., dist.Work | None]] = {
    Op.ALL_REDUCE: dist.all_reduce,
    Op.REDUCE: dist.reduce,
    Op.BROADCAST: dist.broadcast,
}


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

    def begin(self, message: Message, tensor: Tensor | None = None, form: Form | None = None) -> Pending:
        """Begin a call of torch, or several where its own would not do."""
        if message.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER):
            assert tensor is not None and form is not None, "all members give shares"
            return self._exchange_shares(message, tensor, form)
        own = self._empty(form) if tensor is None and form else tensor
        assert own is not None, "who gives nothing ends with something"
        self.calls[(*message.call(self._rank), own.nbytes)] += 1
        carried = self._outward(own) if tensor is not None else host_buffer(own) if self._staged else own.detach()
        if message.op == Op.P2P:
            other = message.members[1] if message.src == self._rank else message.src
            call = partial(dist.irecv if tensor is None else dist.isend, carried, other, tag=message.node)
        else:
            root = () if message.op == Op.ALL_REDUCE else (message.src,)
            call = partial(_COLLECTIVES[message.op], carried, *root, group=self._group(message), async_op=True)
        is_root = message.op == Op.REDUCE and self._rank == message.src
        brings = tensor is None or message.op == Op.ALL_REDUCE or is_root
        return _Work(self._begin(call), carried, own, brings, self._until)

    def _exchange_shares(self, message: Message, tensor: Tensor, form: Form) -> Pending:
        """Begin to sum each share at its member, or to send each member's to all."""
        self.calls[(*message.call(self._rank), form.nbytes)] += 1
        result, group, scatters = self._empty(form), self._group(message), message.op == Op.REDUCE_SCATTER
        # Only torch's own collective on a GPU: gloo's copies what it carries in threads of its own, unseen.
        if self._device.type == "cuda" and not self._staged:
            collective = dist.reduce_scatter_tensor if scatters else dist.all_gather_into_tensor
            carried = result.detach()
            work = self._begin(partial(collective, carried, tensor.detach(), group=group, async_op=True))
            return _Work(work, carried, result, True, self._until)
        shares = torch.split(tensor, form.numel) if scatters else torch.split(result, tensor.numel())
        own, works = shares[message.members.index(self._rank)], []
        if not scatters:
            own.copy_(tensor)
        for member, share in zip(message.members, shares, strict=True):
            carried = self._outward(share)
            call = partial(dist.reduce if scatters else dist.broadcast, carried, member, group=group, async_op=True)
            works.append(_Work(self._begin(call), carried, share, (member == self._rank) == scatters, self._until))

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return result.copy_(own) if scatters else result

        return _Later(wait)

    def _empty(self, form: Form) -> Tensor:
        return torch.empty(form.shape, dtype=form.dtype, device=self._device)

    def _outward(self, tensor: Tensor) -> Tensor:
        """Return the tensor that torch sends: the given one or, staged, its values on the host."""
        return host_buffer(tensor).copy_(tensor) if self._staged else tensor.detach()

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

"""Which storages are alive, followed by weak reference: on a CPU, on a GPU and where tensors are fake alike.

A storage counts once, whatever views there are of it, from the operation that made it to the moment that nothing refers
to it any more. That is what an allocator counts, without the workspaces that kernels allocate for themselves.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdpsim.program import Category

Reference = Callable[[], torch.UntypedStorage | None]  # gives a storage as long as it is alive


def storage_of(tensor: Tensor) -> Reference:
    """Refer to a tensor's storage without keeping it alive."""
    return ref(tensor.untyped_storage())


def is_alive(storage: Reference) -> bool:
    """Say whether anything, a tensor or a graph of autograd, still holds a storage."""
    return storage() is not None


def granularity(device: str) -> int:
    """Say what a device's allocator rounds up to: CUDA's caching one to 512 bytes."""
    return 512 if torch.device(device).type == "cuda" else 1


class _Entry:
    """A storage that was seen."""

    __slots__ = ("category", "counts", "nbytes", "reference", "size")

    def __init__(self, reference: Reference) -> None:
        self.reference = reference  # whose end calls the tracker back
        self.category = Category.ACTIVATIONS
        self.counts = True
        self.nbytes = -1  # none that a storage can have: it is weighed when it is first seen
        self.size = 0  # as it counts


class Tracker(TorchDispatchMode):
    """While it is entered, sees every storage that an operation's result lies in; follows it to its end ever after.

    Each storage counts a multiple of `granularity` bytes; CUDA's allocator deals in 512. What was there before counts
    from the first operation that gives a view of it, unless it is told to be ignored. Where a `device` type is given,
    only its storages are seen: not what the host holds for a GPU.
    """

    def __init__(self, granularity: int = 1, device: str | None = None) -> None:
        super().__init__()
        self._granularity, self._device = granularity, device
        self._entries: dict[int, _Entry] = {}  # by address, which another storage can have once this one has ended
        self._level = self._peak = 0
        self._levels = [0] * len(Category)
        self._peaks = [0] * len(Category)

    @property
    def level(self) -> int:
        """How many bytes are alive."""
        return self._level

    @property
    def peak(self) -> int:
        """The highest level since `reset_peak`."""
        return self._peak

    def levels(self) -> dict[Category, int]:
        """Give the level of each category."""
        return dict(zip(Category, self._levels, strict=True))

    def peaks(self) -> dict[Category, int]:
        """Give the highest level of each category by itself; they need not have been at one time."""
        return dict(zip(Category, self._peaks, strict=True))

    def reset_peak(self) -> None:
        """Let peaks begin anew at the levels of now."""
        self._peak, self._peaks = self._level, self._levels.copy()

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors count from now on that no operation made: received, or from numpy."""
        for tensor in tensors:
            self._find(tensor)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Count these storages no more, nor any view of them."""
        for tensor in tensors:
            entry = self._find(tensor, count=False)
            entry.counts = False
            self._weigh(entry, 0)

    def label(self, tensor: Tensor, category: Category) -> None:
        """Count a storage under a category from now on; what has none is activations."""
        entry = self._find(tensor)
        size = entry.size
        self._levels[entry.category] -= size
        self._levels[category] += size
        self._peaks[category] = max(self._peaks[category], self._levels[category])
        entry.category = category

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Do an operation and look at what it gives."""
        result = func(*args, **(kwargs or {}))
        self._look(result)
        return result

    def _look(self, result: object) -> None:
        if isinstance(result, Tensor):
            if self._device in (None, result.device.type):
                self._find(result)
        elif isinstance(result, tuple | list):
            for part in result:
                self._look(part)

    def _find(self, tensor: Tensor, count: bool = True) -> _Entry:
        """Give the entry of a tensor's storage, which counts as large as it now is."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        entry = self._entries.get(address)
        if entry is None:
            entry = self._entries[address] = _Entry(ref(storage, partial(self._forget, address)))
        nbytes = storage.nbytes()
        if count and entry.counts and nbytes != entry.nbytes:
            entry.nbytes = nbytes
            self._weigh(entry, -(-nbytes // self._granularity) * self._granularity)
        return entry

    def _weigh(self, entry: _Entry, size: int) -> None:
        """Count another size; where a storage is resized, the old one is given back after the new one has been made."""
        category = entry.category
        self._level += size
        self._levels[category] += size
        self._peak = max(self._peak, self._level)
        self._peaks[category] = max(self._peaks[category], self._levels[category])
        self._level -= entry.size
        self._levels[category] -= entry.size
        entry.size = size

    def _forget(self, address: int, reference: Reference) -> None:
        entry = self._entries.pop(address)
        self._level -= entry.size
        self._levels[entry.category] -= entry.size

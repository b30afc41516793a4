"""The storages that are alive, tracked by weak reference: on a CPU, on a GPU and for fake tensors alike.

A storage counts once, however many views it has, from the operation that made it until the last reference to it is
gone. An allocator counts the same, and the workspaces of kernels beside it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from threading import RLock
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdpsim.program import Category

from .caching import CachedBlock, CachingAllocator

Reference = Callable[[], torch.UntypedStorage | None]  # returns a storage as long as it is alive


def storage_of(tensor: Tensor) -> Reference:
    """Return a reference to a tensor's storage that does not keep it alive."""
    return ref(tensor.untyped_storage())


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which another one can have once this one is freed."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(values: object) -> list[Tensor]:
    """Return the tensors in a value: itself, or those of its lists, tuples and tables."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def is_alive(storage: Reference) -> bool:
    """Return whether a tensor or a graph of autograd still refers to a storage."""
    return storage() is not None


class _Entry:
    """A storage that is tracked."""

    __slots__ = ("block", "category", "counts", "reference", "size")

    def __init__(self, reference: Reference) -> None:
        self.reference = reference  # whose end calls the tracker
        self.category = Category.ACTIVATIONS
        self.counts = True
        self.size = 0  # as counted
        self.block: CachedBlock | None = None  # of the allocator, if there is one


class Tracker(TorchDispatchMode):
    """A tracker that finds the storages of operations' results while it is entered, and counts them until they end.

    An older storage counts from the first operation that returns a view of it, unless it is ignored. Where a `device`
    type is given, only its storages count: not those on the host for a GPU. A storage may end in any thread: gloo's let
    go of what they have sent. An `allocator` gives a block for each storage that counts.
    """

    def __init__(self, device: str | None = None, allocator: CachingAllocator | None = None) -> None:
        super().__init__()
        self._device, self._allocator = device, allocator
        self._entries: dict[int, _Entry] = {}  # by address, which another storage can have once this one is freed
        self._lock = RLock()  # of the levels; a storage may end while its thread counts another
        self._level = self._peak = 0
        self._levels = [0] * len(Category)
        self._peaks = [0] * len(Category)

    @property
    def level(self) -> int:
        """The bytes of storages that are alive."""
        return self._level

    @property
    def peak(self) -> int:
        """The highest level since `reset_peak`."""
        return self._peak

    def levels(self) -> dict[Category, int]:
        """The level of each category."""
        return dict(zip(Category, self._levels, strict=True))

    def peaks(self) -> dict[Category, int]:
        """The highest level of each category by itself; not necessarily at one time."""
        return dict(zip(Category, self._peaks, strict=True))

    def reset_peak(self) -> int:
        """Start new peaks at the present levels, and return that of all."""
        self._peak, self._peaks = self._level, self._levels.copy()
        return self._peak

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors from now on that no operation made: received ones, or those from numpy."""
        for tensor in tensors:
            self._find(tensor)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting the storages of these tensors."""
        for tensor in tensors:
            entry = self._find(tensor, count=False)
            entry.counts = False
            self._weigh(entry, 0)

    def label(self, tensor: Tensor, category: Category) -> None:
        """Count a storage under a category from now on; storages without one are activations."""
        entry = self._find(tensor)
        with self._lock:
            self._levels[entry.category] -= entry.size
            self._levels[category] += entry.size
            self._peaks[category] = max(self._peaks[category], self._levels[category])
            entry.category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation and track its results."""
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
        """Return the entry of a tensor's storage, updated to its present size."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        entry = self._entries.get(address)
        if entry is None:
            entry = self._entries[address] = _Entry(ref(storage, partial(self._forget, address)))
        nbytes = storage.nbytes()
        if count and entry.counts and nbytes != entry.size:
            self._weigh(entry, nbytes)
        return entry

    def _weigh(self, entry: _Entry, size: int) -> None:
        """Count another size of a storage; a resized storage is freed after the new one has been made."""
        category = entry.category
        with self._lock:
            self._level += size
            self._levels[category] += size
            self._peak = max(self._peak, self._level)
            self._peaks[category] = max(self._peaks[category], self._levels[category])
            self._level -= entry.size
            self._levels[category] -= entry.size
            entry.size = size
            if self._allocator is not None:
                given, entry.block = entry.block, self._allocator.allocate(size) if size else None
                if given is not None:
                    self._allocator.free(given)

    def _forget(self, address: int, reference: Reference) -> None:
        self._weigh(self._entries.pop(address), 0)

"""Measurements of a device while it plays: none, the storages that it holds, or the time that its tasks take."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Self
from uuid import uuid4

import torch
from torch import Tensor

from cdpsim.numeric.columns import Ints
from cdpsim.program import Category

from ..profile.allocations import allocation_windows, without_collections
from ..profile.tracker import Tracker
from .contents import BEGINNING


class Watch:
    """An observer of a device, which calls these methods; this one measures nothing."""

    def playing(self) -> AbstractContextManager[object]:
        """Observe that the device does something inside this context."""
        return nullcontext()

    def turn(self, slot: int) -> None:
        """Observe that the device comes to a slot; all its work of earlier slots is done."""

    def task(self, node: int) -> AbstractContextManager[object]:
        """Observe that the device does a forward or a backward inside this context."""
        return nullcontext()

    def holds(self, tensor: Tensor, category: Category) -> None:
        """Observe that a tensor belongs to a category from now on; tensors without one are activations."""

    def event(self, node: int, *, ends: bool = False) -> None:
        """Observe that the device begins with a task, with its part in a message, or with the end of that part."""


class Reading(NamedTuple):
    """The peak memory of a device by `Category`, each by itself, from one slot until another."""

    begin: int
    end: int
    held: list[int]


class TaskInterval(NamedTuple):
    """The begin and end of a task, in seconds on a clock that all processes of a machine share."""

    node: int
    begin: float
    end: float


class Meter(Watch):
    """An observer of a device's storages, slot by slot; the device must play as if slots were real."""

    def __init__(self, device: torch.device, ends: Ints | None = None) -> None:
        self.readings: list[Reading] = []
        self._ends = ends  # the slots in which tasks end; None: each takes one
        self._tracker = Tracker(device.type)
        self._slot = 0

    def playing(self) -> AbstractContextManager[object]:
        """Track the storages that are made inside."""
        return self._tracker

    def turn(self, slot: int) -> None:
        """Read the memory since the last task."""
        if slot > self._slot:
            self._read(slot, self._tracker.levels())

    @contextmanager
    def task(self, node: int) -> Iterator[None]:
        """Read the peak of the task."""
        self._tracker.reset_peak()
        yield
        self._read(self._slot + 1 if self._ends is None else int(self._ends[node]), self._tracker.peaks())

    def holds(self, tensor: Tensor, category: Category) -> None:
        """Count the tensor under the category."""
        self._tracker.label(tensor, category)

    def _read(self, until: int, seen: dict[Category, int]) -> None:
        self.readings.append(Reading(self._slot, until, [seen[category] for category in Category]))
        self._slot = until


class Event(NamedTuple):
    """The act of a device at a time, and the peak of the allocator from then until the next event of its process."""

    ledger: str  # of the process
    number: int  # of all events in the ledger
    device: int
    node: int
    ends: bool  # whether it is the end of the device's part in a message
    peak: int


class Ledger:
    """A record of what the devices of a process do, and of what its allocator gives them meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._windows, self._open = allocation_windows(device), ExitStack()
        self._events: list[tuple[int, int, bool]] = []
        self._name = uuid4().hex

    def __enter__(self) -> Self:
        self._open.enter_context(without_collections())  # and what only a collection frees is held
        self._open.enter_context(self._windows)
        self.add(-1, BEGINNING)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._open.__exit__(kind, error, trace)

    def add(self, device: int, node: int, *, ends: bool = False) -> None:
        """Add an event that begins now."""
        self._events.append((device, node, ends))
        self._windows.mark()

    def events(self, device: int) -> list[Event]:
        """Return the events of a device, once the record is closed."""
        pairs = zip(self._events, self._windows.peaks, strict=True)
        return [Event(self._name, k, *event, peak) for k, (event, peak) in enumerate(pairs) if event[0] in (device, -1)]


class Accountant(Watch):
    """An observer that tells a ledger what its device does."""

    def __init__(self, device: int, ledger: Ledger) -> None:
        self._device, self._ledger = device, ledger

    def event(self, node: int, *, ends: bool = False) -> None:
        """Add the event to the ledger."""
        self._ledger.add(self._device, node, ends=ends)


class Stopwatch(Watch):
    """An observer of the times of tasks."""

    def __init__(self, device: torch.device) -> None:
        self.spans: list[TaskInterval] = []
        self._device = device

    @contextmanager
    def task(self, node: int) -> Iterator[None]:
        """Time the task, on a GPU until it is done there."""
        begin = settled_clock(self._device)
        yield
        self.spans.append(TaskInterval(node, begin, settled_clock(self._device)))


def settled_clock(device: torch.device) -> float:
    """Return a time of the wall at which all work of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

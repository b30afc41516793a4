"""What is seen of a device while it plays: nothing, the storages that it holds, or the time that its tasks take."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cdpsim.program import Category
from validation.profile.tracker import Tracker, granularity


class Watch(Protocol):
    """Is told what a device does."""

    def playing(self) -> AbstractContextManager[object]:
        """The device does something from here to there."""

    def turn(self, slot: int) -> None:
        """The device comes to a slot; what was to be done before is done."""

    def task(self, node: int) -> AbstractContextManager[object]:
        """It does a forward or a backward from here to there."""

    def holds(self, tensor: Tensor, category: Category) -> None:
        """From now on a tensor belongs to a category; what has none is activations."""


class NoWatch:
    """Sees nothing."""

    def playing(self) -> AbstractContextManager[object]:
        """Look away."""
        return nullcontext()

    def turn(self, slot: int) -> None:
        """Look away."""

    def task(self, node: int) -> AbstractContextManager[object]:
        """Look away."""
        return nullcontext()

    def holds(self, tensor: Tensor, category: Category) -> None:
        """Forget it."""


class Reading(NamedTuple):
    """What a device held, by `Category`, from a slot on until another: at the most, each category by itself."""

    begin: int
    end: int
    held: list[int]


class TaskInterval(NamedTuple):
    """From when until when a task took, in seconds on a clock that all processes of a machine share."""

    node: int
    begin: float
    end: float


class Allocator:
    """What CUDA's own allocator says of this process, beyond what was there before.

    Its kernels' workspaces count, and blocks as large as they really are; whose they are it does not know.
    """

    def __init__(self, device: torch.device) -> None:
        self.trackers: list[Tracker] = []  # of all devices that are played in this process
        self._device, self._base = device, torch.cuda.memory_allocated(device)

    def reset_peak(self) -> None:
        """Let the peak begin anew at the level of now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def level(self) -> int:
        """How many bytes are allocated."""
        return torch.cuda.memory_allocated(self._device) - self._base

    def peak(self) -> int:
        """The highest level since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device) - self._base


class Meter(NoWatch):
    """Follows the storages that a device makes, slot by slot: it must play as if slots were real.

    With an allocator, activations are what that has, less what is known to belong to other categories and devices.
    """

    def __init__(self, device: torch.device, allocator: Allocator | None = None) -> None:
        self.readings: list[Reading] = []
        self._tracker = Tracker(granularity(device.type), device.type)
        self._slot = 0
        self._allocator = allocator
        if allocator:
            allocator.trackers.append(self._tracker)

    def playing(self) -> AbstractContextManager[object]:
        """See what is made meanwhile."""
        return self._tracker

    def turn(self, slot: int) -> None:
        """Read what was held since the last task."""
        if slot > self._slot:
            allocated = self._allocator.level() if self._allocator else None
            self._read(slot, self._tracker.levels(), allocated)

    @contextmanager
    def task(self, node: int) -> Iterator[None]:
        """Read what it comes to at the most."""
        self._tracker.reset_peak()
        if self._allocator:
            self._allocator.reset_peak()
        yield
        self._read(self._slot + 1, self._tracker.peaks(), self._allocator.peak() if self._allocator else None)

    def holds(self, tensor: Tensor, category: Category) -> None:
        """Book it."""
        self._tracker.label(tensor, category)

    def _read(self, until: int, seen: dict[Category, int], allocated: int | None) -> None:
        held = [seen[category] for category in Category]
        if self._allocator and allocated is not None:
            elsewhere = sum(tracker.level for tracker in self._allocator.trackers if tracker is not self._tracker)
            others = sum(held) - held[Category.ACTIVATIONS]
            held[Category.ACTIVATIONS] = allocated - elsewhere - others
        self.readings.append(Reading(self._slot, until, held))
        self._slot = until


class Stopwatch(NoWatch):
    """Takes the time of tasks."""

    def __init__(self, device: torch.device) -> None:
        self.spans: list[TaskInterval] = []
        self._device = device

    @contextmanager
    def task(self, node: int) -> Iterator[None]:
        """Take the time, on a GPU until it has done the task."""
        begin = self._now()
        yield
        self.spans.append(TaskInterval(node, begin, self._now()))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

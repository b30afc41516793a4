"""What is seen of a device while it plays: nothing, the storages that it holds, or the time that its tasks take."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cdpsim.program import Category
from validation.tracker import Tracker, granularity


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


class Nobody:
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


class Span(NamedTuple):
    """From when until when a task took, in seconds on a clock that all processes of a machine share."""

    node: int
    begin: float
    end: float


class Meter(Nobody):
    """Follows the storages that a device makes, slot by slot: it must play as if slots were real.

    Where `allocator` says so, a task's peak of activations is what CUDA's own allocator had at the most beyond `base`,
    less what the other categories hold: its kernels' workspaces count, and blocks as large as they really are. That
    needs a process for each device.
    """

    def __init__(self, device: torch.device, *, allocator: bool = False) -> None:
        self.readings: list[Reading] = []
        self._tracker = Tracker(granularity(device.type), device.type)
        self._slot = 0
        self._device, self._allocator = device, allocator
        self._base = torch.cuda.memory_allocated(device) if allocator else 0

    def playing(self) -> AbstractContextManager[object]:
        """See what is made meanwhile."""
        return self._tracker

    def turn(self, slot: int) -> None:
        """Read what was held since the last task."""
        if slot > self._slot:
            self.readings.append(Reading(self._slot, slot, self._levels()))
            self._slot = slot

    @contextmanager
    def task(self, node: int) -> Iterator[None]:
        """Read what it comes to at the most."""
        self._tracker.reset_peak()
        if self._allocator:
            torch.cuda.reset_peak_memory_stats(self._device)
        yield
        during = [self._tracker.peaks()[category] for category in Category]
        if self._allocator:
            others = sum(during) - during[Category.ACTIVATIONS]
            during[Category.ACTIVATIONS] = torch.cuda.max_memory_allocated(self._device) - self._base - others
        self.readings.append(Reading(self._slot, self._slot + 1, during))
        self._slot += 1

    def holds(self, tensor: Tensor, category: Category) -> None:
        """Book it."""
        self._tracker.label(tensor, category)

    def _levels(self) -> list[int]:
        levels = [self._tracker.levels()[category] for category in Category]
        if self._allocator:
            others = sum(levels) - levels[Category.ACTIVATIONS]
            levels[Category.ACTIVATIONS] = torch.cuda.memory_allocated(self._device) - self._base - others
        return levels


class Stopwatch(Nobody):
    """Takes the time of tasks."""

    def __init__(self, device: torch.device) -> None:
        self.spans: list[Span] = []
        self._device = device

    @contextmanager
    def task(self, node: int) -> Iterator[None]:
        """Take the time, on a GPU until it has done the task."""
        begin = self._now()
        yield
        self.spans.append(Span(node, begin, self._now()))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

"""The memory that torch's allocator gives and takes back: by the events of torch's profiler, or by a GPU's counts.

It knows no tensors and no storages, so it is independent of a `Tracker`: it also counts what kernels allocate for
themselves. Of a CPU only the events of the thread that entered it are seen; a block that another thread frees, as
gloo's may, stays counted.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from tempfile import TemporaryFile
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cdpsim.numeric.columns import Ints

_MARK = "mark of an account"
_NOTICE = b"USDT:"  # with which the profiler begins lines on the standard error that tell of no error


class Windows(AbstractContextManager[object], Protocol):
    """A record of the peak between one mark and the next."""

    @property
    def peaks(self) -> list[int]:
        """The highest level from each mark until the next, and from the last until the end."""

    def mark(self) -> None:
        """Begin a window."""


class Allocations:
    """A record of every block that is allocated and freed while it is entered.

    `moment` is the time of each event in nanoseconds, as `now` gives it; `level` is how many bytes more are allocated
    from then on than when the record began.
    """

    moment: Ints
    level: Ints

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._marks: list[int] = []

    def __enter__(self) -> Self:
        with _without_notices():
            self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        with _without_notices():
            self._profile.__exit__(None, None, None)
        recorded: Any = self._profile.profiler  # torch's stubs lack what its events have
        events, self._marks = [], []
        for event in recorded.kineto_results.events():
            if event.name() == "[memory]":
                events.append((event.start_ns(), event.nbytes()))
            elif event.name() == _MARK:
                self._marks.append(event.start_ns())
        self._marks.sort()
        table = np.array(sorted(events, key=lambda event: event[0]), dtype=np.int64).reshape(-1, 2)
        self.moment, self.level = table[:, 0], np.cumsum(table[:, 1])

    @staticmethod
    def now() -> int:
        """Return the present moment, on the clock of the events."""
        return time.time_ns()

    def mark(self) -> None:
        """Begin a window, by an event on the profiler's own clock."""
        with record_function(_MARK):
            pass

    @property
    def peaks(self) -> list[int]:
        """The highest level from each mark until the next, and from the last until the end."""
        ends = [*self._marks[1:], self._marks[-1] + 2**62] if self._marks else []
        return [self.peak(begin, end) for begin, end in zip(self._marks, ends, strict=True)]

    def at(self, moment: int) -> int:
        """Return the level at a moment."""
        return int(np.append(0, self.level)[np.searchsorted(self.moment, moment, side="right")])

    def peak(self, begin: int, end: int) -> int:
        """Return the highest level from one moment to another."""
        first, last = np.searchsorted(self.moment, [begin, end], side="right")
        return max([self.at(begin), *self.level[first:last].tolist()])


class CudaAllocations(Allocations):
    """A record of every block of CUDA's allocator, by the history that it keeps; blocks count with their real size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self._device)
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=2**22)
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize(self._device)
        history: Any = torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index or 0]
        torch.cuda.memory._record_memory_history(enabled=None)
        signs = {"alloc": 1, "free_completed": -1}
        events = [(e["time_us"] * 1000, signs[e["action"]] * e["size"]) for e in history if e["action"] in signs]
        table = np.array(events, dtype=np.int64).reshape(-1, 2)
        self.moment, self.level = table[:, 0], np.cumsum(table[:, 1])

    @staticmethod
    def now() -> int:
        """Return the present moment, on the clock of the history, whose unit is a microsecond."""
        return time.time_ns() // 1000 * 1000


def record_allocations(device: torch.device) -> Allocations:
    """Return a record of a device's allocator."""
    return CudaAllocations(device) if device.type == "cuda" else Allocations()


class DeviceAllocations:
    """A record of the bytes that this process asks of CUDA's allocator, beyond those from before, by its own counts.

    What it gives is more, by up to 1 MiB a block: it rounds up, and it does not divide a free block for a small rest.
    """

    def __init__(self, device: torch.device) -> None:
        self.peaks: list[int] = []
        self._device, self._base, self._open = device, 0, False

    def __enter__(self) -> Self:
        self._base = allocator_count(self._device, "requested_bytes", "current")
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def mark(self) -> None:
        """Begin a window."""
        self._close()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._open = True

    def _close(self) -> None:
        if self._open:
            self.peaks.append(allocator_count(self._device, "requested_bytes", "peak") - self._base)
        self._open = False


def allocator_count(device: torch.device, kind: str, when: str) -> int:
    """Return a kind of bytes of CUDA's allocator now ("current"), or their "peak" since the last reset."""
    stats: Any = torch.cuda.memory_stats_as_nested_dict(device)  # without types of its own
    return int(stats[kind]["all"][when])


def allocation_windows(device: torch.device) -> Windows:
    """Return a record of this process's allocations on a kind of device."""
    return DeviceAllocations(device) if device.type == "cuda" else Allocations()


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage: memory from before that is freed in a record would be missing there."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _without_notices() -> Iterator[None]:
    """Keep the profiler's notices off the standard error, to which it writes by itself; let all other lines pass."""
    sys.stderr.flush()
    with TemporaryFile() as caught:
        error = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(error, 2)
            os.close(error)
            caught.seek(0)
            for line in caught:
                if not line.startswith(_NOTICE):
                    os.write(2, line)

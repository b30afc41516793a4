"""The memory that torch's allocator gives a rank and takes back, on a CPU or on a GPU, event by event."""

import time
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from ..profile.allocations import Allocations


class CudaAllocations(Allocations):
    """The same of CUDA's allocator, which keeps a history of its own; blocks count with their real size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self._device)
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=2**22)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

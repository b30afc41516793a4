"""Groups of ranks of which this process is the first, and the collectives that torch calls in them."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

Collectives = Counter[tuple[str, int]]


def made_groups() -> Iterator[Callable[[int], DeviceMesh]]:
    """Yield a function that makes a group of ranks of which this process is the first, and the others do nothing."""

    def make(ranks: int) -> DeviceMesh:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        return init_device_mesh("cpu", (ranks,))

    yield make
    dist.destroy_process_group()


class Seen(TorchDispatchMode):
    """The collectives that run, with the bytes of the whole tensor of each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Collectives = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # which asks again with local tensors
        result = function(*args, **kwargs or {})
        name = str(function).removeprefix("_c10d_functional.").split(".")[0]
        op = {"all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter"}.get(name)
        op = "all-reduce" if name.startswith("all_reduce") else op
        if op:
            self.found[op, max(each.numel() * each.element_size() for each in (args[0], result))] += 1
        return result

    def taken(self) -> Collectives:
        """Return what has been found since the last time."""
        found, self.found = self.found, Counter()
        return found

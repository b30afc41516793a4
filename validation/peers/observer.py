"""The storages that a runtime keeps alive, by what they are, and the calls by which it communicates.

Both are seen where torch dispatches operations, below the runtime: that is all that it does, by its Python and
by its C++ alike, and nothing is replaced.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..profile.tracker import Reference, Tracker
from ..report.schema import Call

# By the function of torch or of a session, the innermost of those that run: what it makes.
MAKERS = {
    "deepcopy": "parameters",
    "_setup_forward_recv_info": "receive buffers of activations",
    "_create_grad_recv_info": "receive buffers of gradients",
    "_forward_metadata_inference": "metadata",
    "_backward_metadata_inference": "metadata",
    "forward_one_chunk": "activations",
    "_maybe_compute_loss": "activations",
    "stage_backward_input": "made by backwards of inputs",
    "stage_backward_weight": "made by backwards of weights",
    "backward_one_chunk": "made by backwards",
    "draw": "data",
    "wrap": "buckets",
    "DistributedDataParallel._pre_forward": "buckets",
    "FSDPState._pre_forward": "gathered parameters",
    "unshard": "gathered parameters",
    "_pre_backward": "gathered parameters",
    "post_backward": "sums of gradients",
    "update": "optimizer",
    "optimize": "optimizer",
    "_engine_run_backward": "made by backwards",
    "passes": "activations",
}
SENDS = {"send": "send", "recv_": "receive"}
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_": "reduce",
}


class Observer(Tracker):
    """A tracker that says what each storage is, and records each call of `torch.distributed`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type)
        self.at_peak: dict[str, int] = {}  # bytes by what they are, when the level was the highest
        self.calls: list[Call] = []
        self.labels: dict[int, str] = {}  # storage's address -> the task whose result will be sent
        self._kinds: dict[int, str] = {}  # storage's address -> what it is

    def start(self) -> None:
        """Forget peaks and calls so far."""
        self.reset_peak()
        self.at_peak = self.kinds()
        self.calls.clear()

    def kinds(self) -> dict[str, int]:
        """Return the bytes that are alive now, by what they are."""
        sums: Counter[str] = Counter()
        for address, entry in self._entries.copy().items():
            sums[self._kinds.get(address, "activations")] += entry.size
        return {kind: size for kind, size in sorted(sums.items()) if size}

    def name(self, tensor: Tensor, kind: str) -> None:
        """Say what a storage is from now on."""
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        self._find(tensor)
        self._kinds[tensor.untyped_storage()._cdata] = kind

    def watch(self, module: nn.Module) -> None:
        """Name a module's parameters, their gradients when these are there, and its outputs."""
        for parameter in module.parameters():
            self.name(parameter.data, "parameters")
            parameter.register_post_accumulate_grad_hook(self._name_gradient)
        module.register_forward_hook(self._name_output)

    def _name_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.name(parameter.grad, "gradients")

    def _name_output(self, module: nn.Module, arguments: object, output: Tensor) -> None:
        self.name(output, "outputs")

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run an operation, track its results, and record it where it communicates."""
        space, _, name = getattr(func, "_schema").name.partition("::")  # noqa: B009 - every operation has one
        if space == "c10d":
            self._record(name, args)
        highest = self.peak
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._weigh_again()
        if self.peak > highest:
            self.at_peak = self.kinds()
        return result

    def _weigh_again(self) -> None:
        """Count storages that have been resized by no operation: FSDP2 frees and fills its buffers so."""
        for entry in self._entries.copy().values():
            storage = entry.reference()
            if storage is not None and entry.counts and storage.nbytes() != entry.size:
                self._weigh(entry, storage.nbytes())

    def _record(self, name: str, args: tuple[Any, ...]) -> None:
        tensors = list(_tensors(args[0]))
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if name in SENDS:
            for tensor in tensors if name == "send" else []:
                if self._kinds.get(tensor.untyped_storage()._cdata) != "outputs":
                    self.name(tensor, "sent gradients")
            label = self.labels.get(tensors[0].untyped_storage()._cdata, "") if name == "send" else ""
            self.calls.append(Call(SENDS[name], int(args[2]), nbytes, label))
        elif name in COLLECTIVES:
            self.calls.append(Call(COLLECTIVES[name], -1, nbytes))

    def _look(self, result: object) -> None:
        """Track the results of an operation; a distributed tensor has no memory but its local one's."""
        super()._look(result._local_tensor if isinstance(result, DTensor) else result)

    def _find(self, tensor: Tensor, count: bool = True) -> Any:
        address = tensor.untyped_storage()._cdata
        if address not in self._entries:
            self._kinds[address] = _maker(sys._getframe(1))
        return super()._find(tensor, count)

    def _forget(self, address: int, reference: Reference) -> None:
        super()._forget(address, reference)
        self._kinds.pop(address, None)
        self.labels.pop(address, None)


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from _tensors(each)


def _maker(frame: FrameType | None) -> str:
    """Return what the innermost known function makes."""
    while frame is not None:
        if kind := MAKERS.get(frame.f_code.co_name) or MAKERS.get(frame.f_code.co_qualname):
            return kind
        frame = frame.f_back
    return "activations"

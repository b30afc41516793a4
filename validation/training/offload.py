"""The host's part in training: tensors that are there for a while, and updates by optimizers whose states are there."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .forms import Form, storage_key
from .optimizer import Optimizer, OptimizerState


class _View(NamedTuple):
    """The place of a tensor in its storage, of which an address is the name."""

    storage: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class OnHost:
    """Copies of tensors on the host, each storage once; what comes back are views as the tensors were.

    The host of a GPU has them in pinned memory. A CPU is its own host: its copies are in memory of numpy's, which
    torch's allocator does not know.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device = tensors[0].device
        self._views = [
            _View(storage_key(each), each.dtype, each.shape, each.stride(), int(each.storage_offset()))
            for each in tensors
        ]
        empty = partial(torch.empty, 0, dtype=torch.uint8, device=self._device)
        contents = {storage_key(each): empty().set_(each.untyped_storage()) for each in tensors}
        self._copies = {key: _to_host(content) for key, content in contents.items()}

    def come_back(self) -> list[Tensor]:
        """Return all tensors, on the device again."""
        empty = partial(torch.empty, device=self._device)
        copies = {key: empty(copy.shape, dtype=torch.uint8).copy_(copy) for key, copy in self._copies.items()}
        return [
            empty(0, dtype=dtype).set_(copies[key].untyped_storage(), offset, shape, stride)
            for key, dtype, shape, stride, offset in self._views
        ]


class HostUpdates:
    """Updates on hosts, which all reach the same states."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states: dict[object, OptimizerState] = {}

    def update(self, key: object, theta: Tensor, gradient: Tensor, parts: Sequence[Form], *, keep: bool) -> Tensor:
        """Take parameters and gradients to the host, update there, and return new parameters on their device.

        The first update with a key makes its state; without `keep`, the state stays as it was.
        """
        with _disable_current_modes():  # no watch of the device sees the host
            values, change = _on_host(theta), _on_host(gradient)
            if key not in self._states:
                self._states[key] = self._optimizer.state(values, parts, _zeros_on_host)
            state = self._states[key]
            state = state if keep else {name: tensor.clone() for name, tensor in state.items()}
            found = _on_host(self._optimizer.update(values, change, state, parts))
        return torch.empty_like(theta).copy_(found)


def _on_host(tensor: Tensor) -> Tensor:
    return _to_host(tensor.reshape(-1).view(torch.uint8)).view(tensor.dtype).reshape(tensor.shape)


def _zeros_on_host(form: Form, _device: torch.device) -> Tensor:
    return torch.from_numpy(np.zeros(form.nbytes, np.uint8)).view(form.dtype).reshape(form.shape)


def _to_host(content: Tensor) -> Tensor:
    with _disable_current_modes():  # no watch of the device sees the host
        if content.device.type == "cpu":
            return torch.from_numpy(content.numpy().copy())
        return torch.empty(content.shape, dtype=content.dtype, pin_memory=True).copy_(content)

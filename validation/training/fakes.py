"""Fake tensors: they have shapes, types and storages, and no values."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_BATCH_NORM = torch.ops.aten.native_batch_norm.default


class Fakes(FakeTensorMode):
    """The mode of torch in which tensors are fake, with all results in the types that kernels give them.

    Under autocast a BatchNorm has an input of two bytes a number and a weight of four. Its kernel keeps statistics in
    the type of the weight; torch fakes them in that of the input.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the results of an operation."""
        result: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func is not _BATCH_NORM or args[1] is None:
            return result
        with self:
            return (result[0], *(statistics.to(args[1].dtype) for statistics in result[1:]))

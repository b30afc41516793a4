"""Shapes of tensors that are yet to come, vectors of many tensors, and several tensors in one message."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Form(NamedTuple):
    """The shape and the type of a tensor that is yet to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """How many bytes such a tensor has."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def zeros(form: Form, device: torch.device) -> Tensor:
    """Make a tensor of some form."""
    return torch.zeros(form.shape, dtype=form.dtype, device=device)


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Join tensors to one new vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def pack(tensors: list[Tensor]) -> Tensor:
    """Make one tensor of several, or leave the one that there is."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def packed(forms: list[Form]) -> Form:
    """Say what such tensors are as one."""
    return forms[0] if len(forms) == 1 else Form((sum(form.nbytes for form in forms),), torch.uint8)


def unpack(tensor: Tensor, forms: list[Form]) -> list[Tensor]:
    """Take apart what `pack` made; each tensor has its own storage, to be let go by itself."""
    if len(forms) == 1:
        return [tensor]
    pieces = torch.split(tensor, [form.nbytes for form in forms])
    return [piece.clone().view(form.dtype).reshape(form.shape) for piece, form in zip(pieces, forms, strict=True)]

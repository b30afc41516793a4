"""Forms of future tensors, vectors of many tensors, and several tensors in one message."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Form(NamedTuple):
    """The shape and the type of a future tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """The bytes of such a tensor."""
        return self.numel * self.dtype.itemsize


def form_of(tensor: Tensor) -> Form:
    """Return the form of a tensor."""
    return Form(tuple(tensor.shape), tensor.dtype)


def storage_key(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def zeros(form: Form, device: torch.device) -> Tensor:
    """Return a tensor of zeros of a form."""
    return torch.zeros(form.shape, dtype=form.dtype, device=device)


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Return a new vector of the values of tensors."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def view_parts(vector: Tensor, parts: Sequence[Form]) -> list[Tensor]:
    """Return views of a vector in the shapes of its parts."""
    split = torch.split(vector, [part.numel for part in parts])
    return [piece.view(part.shape) for piece, part in zip(split, parts, strict=True)]


def pack(tensors: list[Tensor]) -> Tensor:
    """Return several tensors as one, or the only one as it is."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def packed(forms: list[Form]) -> Form:
    """Return the form of packed tensors of these forms."""
    return forms[0] if len(forms) == 1 else Form((sum(form.nbytes for form in forms),), torch.uint8)


def unpack(tensor: Tensor, forms: list[Form]) -> list[Tensor]:
    """Return the tensors in a packed one; each has a storage of its own, which can be freed by itself."""
    if len(forms) == 1:
        return [tensor]
    pieces = torch.split(tensor, [form.nbytes for form in forms])
    return [piece.clone().view(form.dtype).reshape(form.shape) for piece, form in zip(pieces, forms, strict=True)]

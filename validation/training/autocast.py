"""CUDA's autocast, on tensors of a CPU: fake ones of CUDA need a GPU, and the CPU's autocast has other lists.

Operators cast what they take where torch casts it, before autograd and within operators that have no list, by kernels
for a dispatch key that has no others. torch says which operators; how each casts is said here.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

_LISTS = {  # all other operators take float32
    "type of autocast": "addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot linalg_vecdot linear"
    " matmul mm mv prelu scaled_dot_product_attention _scaled_dot_product_flash_attention _convolution convolution"
    " conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution"
    " cudnn_convolution_transpose gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell _thnn_fused_gru_cell"
    " _thnn_fused_lstm_cell",
    "widest": "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot",
    "told float32": "cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax norm prod softmax sum",
    "refused": "binary_cross_entropy",
}
_LIST_OF = {name: which for which, names in _LISTS.items() for name in names.split()}
_TYPED_NORMS = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}
_KEY, _NAME = torch._C._dispatch_key_parse("AutocastHPU"), "AutocastHPU"
_running: list["_Casts"] = []


def autocast_as_cuda(device: str, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return a context in which operators cast as CUDA's do under autocast, on whatever device."""
    return torch.autocast(device, dtype) if device == "cuda" else _casting(dtype)


@contextmanager
def _casting(dtype: torch.dtype) -> Iterator[None]:
    _install()
    _running.append(_Casts(dtype))
    try:
        with torch._C._SetExcludeDispatchKeyGuard(_KEY, False), torch._C._IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        _running.pop()


@cache
def _install() -> list[object]:
    """Give each operator that CUDA's autocast knows a kernel that casts, as long as what is returned lives."""
    others = torch._C._dispatch_library("IMPL", "_", _NAME)
    others.fallback_fallthrough()
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(operator, partial(_run_cast, packet, operator), _NAME)
    return [others, library]


def _run_cast(name: str, operator: Any, *given: Any, **named: Any) -> Any:
    with torch._C._SetExcludeDispatchKeyGuard(_KEY, True):  # parts of an operator with a list cast no more
        return _running[-1].run(name, operator, given, named)


class _Casts:
    """The casts of one context: of each weight one, which stays until the context ends."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._of_weights: dict[Tensor, Tensor] = {}

    def run(self, name: str, operator: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run an operator on what it takes under autocast."""
        which = _LIST_OF.get(name)
        if which == "refused":
            raise RuntimeError(f"CUDA's autocast refuses {name}; take {name}_with_logits")
        if which == "told float32":
            return _tell_float32(name, operator, given, named) if _is_cast(given[0]) else operator(*given, **named)
        is_lower = which == "type of autocast"
        if which == "widest":
            is_lower = all(leaf.dtype != torch.float32 for leaf in tree_leaves((given, named)) if _is_cast(leaf))
        cast = partial(self._cast, self._dtype if is_lower else torch.float32)
        return operator(*tree_map(cast, given), **tree_map(cast, named))

    def _cast(self, dtype: torch.dtype, value: Any) -> Any:
        if not _is_cast(value) or value.dtype == dtype:
            return value
        is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if dtype != self._dtype or not is_weight:
            return value.to(dtype)
        if value not in self._of_weights:
            self._of_weights[value] = value.to(dtype)
        return self._of_weights[value]


def _is_cast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _tell_float32(name: str, operator: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Run an operator that takes the type of its result, and is told float32 if it is not told another."""
    known = operator._schema.arguments
    told = {each.name: each.default_value for each in known if each.has_default_value()}
    told |= dict(zip((each.name for each in known), given, strict=False)) | named
    is_half = given[0].dtype == torch.float16 and isinstance(given[0], FakeTensor)
    if is_half and name.endswith("softmax") and told["dtype"] is None:  # a kernel of CUDA's, with no cast before it
        return getattr(torch.ops.aten, f"_{name}")(given[0], told["dim"], True)
    if name == "norm":
        operator = getattr(torch.ops.aten.norm, _TYPED_NORMS[operator._overloadname])
    return operator(**told | {"dtype": told.get("dtype") or torch.float32})

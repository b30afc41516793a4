"""Counting the floating point operations of matrix products, convolutions and attention: two for each multiply-add."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .tracker import Reference, address_of, storage_of, tensors_in

_CORE = "eager_attention_forward"  # of queries, keys and values: a function of a family's module


def _attention_forward(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> int:
    """Return the FLOP of two products: of queries and keys, and of their scores and values."""
    return _score_flops(query, key) // query.shape[-1] * (query.shape[-1] + value.shape[-1])


def _score_flops(query: Tensor, key: Tensor) -> int:
    """Return the FLOP of the product of queries and keys, which backwards of fused attention compute again."""
    return 2 * query.numel() * key.shape[-2]


def _attention_backward(
    above: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
) -> int:
    """Return the FLOP of five products: scores again, then gradients of scores, values, queries and keys."""
    return _score_flops(query, key) // query.shape[-1] * (3 * query.shape[-1] + 2 * value.shape[-1])


# Fused attention, each of which gives its output, and then what its backward reads beside that.
_ATTENTION = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{device}")
    for kernel, device in (("flash", "_for_cpu"), ("flash", ""), ("efficient", ""), ("cudnn", ""))
)

# Missing in torch's own table: its kernel for attention on a CPU.
_OWN: dict[object, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> int:
    """Return the operations of one call, by torch's own formulas."""
    packet = func._overloadpacket
    if packet in _OWN:
        return _OWN[packet](*args, **kwargs)
    return int(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0


class Flops(TorchDispatchMode):
    """A counter of operations by torch's own formulas while it is entered; on fake tensors as on real ones.

    The forward of the core of attention is counted by itself, too, and storages that it makes beside its output are
    noted: of fused kernels, and of functions that are `noting`. Of fused kernels so are the scores.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.attention = self.fused_scores = 0
        self.kept_by_cores: list[Reference] = []
        self.given_to_cores: list[tuple[Reference, int]] = []  # and bytes of what a second forward would start from
        self._made: dict[int, Reference] | None = None  # storages by address, of the function of a core that runs

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = count_flops(func, args, kwargs, result)
        self.count += count
        if self._made is not None:
            self.attention += count
            self._made |= {address_of(tensor): storage_of(tensor) for tensor in tensors_in(result)}
        elif func._overloadpacket in _ATTENTION:
            self.attention += count
            self.fused_scores += _score_flops(*args[:2])
            self.kept_by_cores += [storage_of(tensor) for tensor in result[1:] if isinstance(tensor, Tensor)]
        return result

    def noting(self, core: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of a module, queries, keys and values; all its operations are the core of attention."""

        def noted(module: object, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._made = {}
            try:
                output, *others = core(module, query, key, value, *args, **kwargs)
                given = {address_of(tensor): tensor for tensor in (query, key, value)}
                known = {*given, address_of(output)}
                self.given_to_cores += [(storage_of(each), each.untyped_storage().nbytes()) for each in given.values()]
                self.kept_by_cores += [made for address, made in self._made.items() if address not in known]
            finally:
                self._made = None
            return output, *others

        return noted


@contextmanager
def noting_cores(stage: nn.Module, flops: Flops) -> Iterator[None]:
    """Let a counter know, while this is entered, which operations of a stage are the core of its attention."""
    families = {sys.modules[type(part).__module__] for part in stage.modules()}
    cores = {family: getattr(family, _CORE) for family in families if hasattr(family, _CORE)}
    for family, core in cores.items():
        setattr(family, _CORE, flops.noting(core))
    try:
        yield
    finally:
        for family, core in cores.items():
            setattr(family, _CORE, core)

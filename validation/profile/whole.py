"""A training step of a whole model on one GPU, run with fake tensors: its activations, and what its allocator takes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cdpsim.presets import find_cluster
from cdpsim.program import Category

from ..training.fakes import Fakes
from ..training.forms import zeros
from ..training.optimizer import Optimizer
from ..training.recomputation import CheckpointedLayer
from ..training.stages import Architecture, Autocast, Loss
from .caching import MIB, CachingAllocator
from .tracker import Tracker

KEPT = find_cluster("h100-node").devices[0].workspace.kept  # before the first step here, each part a block of its own


class WholeStep(NamedTuple):
    """The peak activations of a step, and the most that its allocator gives and takes of the GPU."""

    peak_activations: int
    allocated: int
    reserved: int


def whole_step(architecture: Architecture, optimizer: Optimizer, device: str = "cpu") -> WholeStep:
    """Train a model in one piece on fake tensors, as a program on one GPU does with torch's optimizer."""
    again, peaks, allocator = architecture.checkpointed, list[int](), CachingAllocator()
    layers = [CheckpointedLayer(layer) if k in again else layer for k, layer in enumerate(architecture.layers)]
    net = nn.Sequential(*layers)
    tracker = Tracker(allocator=allocator)
    for begin in range(0, KEPT, 32 * MIB):  # cuBLAS' for each thread that multiplies matrices, and what is left
        allocator.allocate(min(32 * MIB, KEPT - begin))
    with Fakes():
        imitate_module(net, device, architecture.tied)
        update = _updating(net, optimizer, tracker)
        for _ in range(2):  # the first makes the optimizer's state, where the second would have had activations
            x, target = (zeros(draw.form, torch.device(device)) for draw in (architecture.inputs, architecture.targets))
            peaks.append(peak_activations(net, architecture.loss, x, target, architecture.autocast, tracker))
            update()
            del x, target
    return WholeStep(peaks[0], allocator.most_allocated, allocator.reserved)


def imitate_module(net: nn.Module, device: str = "cpu", tied: Sequence[Sequence[nn.Parameter]] = ()) -> None:
    """Replace a module's parameters and buffers by fake ones, of the fake mode in which this is called.

    A group of `tied` parameters becomes one.
    """
    first = {id(parameter): id(group[0]) for group in tied for parameter in group}
    fakes: dict[int, nn.Parameter] = {}
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fake = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device))
            setattr(module, name, fakes.setdefault(first.get(id(parameter), id(parameter)), fake))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def peak_activations(
    net: nn.Module,
    loss: Loss,
    x: Tensor,
    target: Tensor,
    autocast: Autocast | None = None,
    tracker: Tracker | None = None,
) -> int:
    """Run forward and backward once and return the peak bytes of activations.

    These are the results of operations: activations, temporaries, gradients of activations. Parameters, buffers, input
    and target do not count, nor gradients of parameters once they are complete. It is the peak of torch's MemTracker
    for `Activation` and `Temp` together.
    """
    tracker = tracker or Tracker()
    for tensor in (*net.parameters(), *net.buffers(), x, target):
        tracker.label(tensor, Category.PARAMETERS)
    tracker.reset_peak()
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: tracker.label(gradient, Category.GRADIENTS))
        parameter.register_post_accumulate_grad_hook(lambda p: tracker.label(p.grad, Category.GRADIENTS))
    with tracker:
        with autocast(x.device.type) if autocast else nullcontext():
            result = loss(net(x), target)
        torch.autograd.backward(result)
    return tracker.peaks()[Category.ACTIVATIONS]


def _updating(net: nn.Module, optimizer: Optimizer, tracker: Tracker) -> Callable[[], None]:
    """Return a function that updates parameters as torch does on a GPU, all at once (`foreach`), and frees gradients.

    In mixed precision it updates copies in float32 by gradients in float32, and copies the result.
    """
    updated = parameters = list(net.parameters())
    if optimizer.has_master:
        updated = [nn.Parameter(own.detach().to(optimizer.dtype(own.dtype))) for own in parameters]
    for tensor in (*parameters, *updated):
        tracker.label(tensor, Category.PARAMETERS)
    torchs = optimizer.over(updated)
    for group in torchs.param_groups:
        group["foreach"] = True

    def update() -> None:
        with _Numbers(), tracker, torch.no_grad():
            for master, own in zip(updated, parameters, strict=True):
                if master is not own and own.grad is not None:
                    master.grad, own.grad = own.grad.to(master.dtype), None
            torchs.step()
            torchs.zero_grad()
            for master, own in zip(updated, parameters, strict=True):
                own.copy_(master)
        tracker.ignore(state["step"] for state in torchs.state.values() if "step" in state)  # which is on the host

    return update


class _Numbers(TorchDispatchMode):
    """Some number where a program reads one of a fake tensor, which has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))

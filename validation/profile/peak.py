"""The peak activations of a whole model in one piece, as torch's MemTracker counts them."""

import torch
from torch import Tensor, nn

from cdpsim.program import Category

from ..training.fakes import Fakes
from ..training.forms import zeros
from ..training.stages import Architecture, Loss
from .tracker import Tracker


def whole_peak(architecture: Architecture, device: str = "cpu") -> int:
    """Return the peak activations of a model's forward and backward in one piece, on fake tensors."""
    net = nn.Sequential(*architecture.layers)
    with Fakes():
        imitate_module(net, device)
        x, target = (zeros(draw.form, torch.device(device)) for draw in (architecture.inputs, architecture.targets))
        with torch.autocast(device, architecture.autocast, enabled=architecture.autocast is not None):
            return peak_activations(net, architecture.loss, x, target)


def imitate_module(net: nn.Module, device: str = "cpu") -> None:
    """Replace a module's parameters and buffers by fake ones, of the fake mode in which this is called."""
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fake = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(fake))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def peak_activations(net: nn.Module, loss: Loss, x: Tensor, target: Tensor) -> int:
    """Run forward and backward once and return the peak bytes of activations.

    These are the results of operations: activations, temporaries, gradients of activations. Parameters, buffers, input
    and target do not count, nor gradients of parameters once they are complete. It is the peak of torch's MemTracker
    for `Activation` and `Temp` together.
    """
    tracker = Tracker()
    tracker.ignore([x, target, *net.parameters(), *net.buffers()])
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: tracker.label(gradient, Category.GRADIENTS))
        parameter.register_post_accumulate_grad_hook(lambda p: tracker.label(p.grad, Category.GRADIENTS))
    with tracker:
        torch.autograd.backward(loss(net(x), target))
    return tracker.peaks()[Category.ACTIVATIONS]

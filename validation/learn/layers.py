"""Layers whose backwards may read another weight, and convolutional networks of such layers.

The networks are a small one, and the residual ones of He et al. (2016), with group norm or batch norm.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import accumulate
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

BACK = "back"  # the name of a weight as backwards read it
GROUPS = 32  # of channels that are normalized together, at most
DIGIT = (1, 8, 8)  # the image that a vector of 64 is
LARGE = 64  # the least side of an image for which a residual network begins with large strides

Statistics = Sequence[tuple[Tensor, Tensor]]  # mean and variance of each channel, for each batch norm
Normalize = Callable[[int], nn.Module]  # of a number of channels
_collected: ContextVar[list[tuple[Tensor, Tensor]] | None] = ContextVar("collected", default=None)
_used: ContextVar[Iterator[tuple[Tensor, Tensor]] | None] = ContextVar("used", default=None)


class Doubled(nn.Module):
    """A layer that may have its weight twice: as forwards read it, and as backwards do."""

    weight: Any
    bias: Any
    back: Tensor

    def twice(self) -> None:
        """Have the weight of backwards, too."""
        self.register_buffer(BACK, self.weight.detach().clone())

    @property
    def is_double(self) -> bool:
        """Whether it has it."""
        return BACK in self._buffers

    def mapped(self, x: Tensor, apply: Callable[..., Tensor]) -> Tensor:
        """Apply a map that is linear in its input, its weight and its bias.

        With two weights W and V, the value is x W. The gradient of the weight is that of x W with x held fixed, and the
        gradient of the input is that of x V.
        """
        if not self.is_double:
            return apply(x, self.weight, self.bias)
        fixed = x.detach()
        return apply(fixed, self.weight, self.bias) + apply(x - fixed, self.back, None)


class Linear(Doubled, nn.Linear):
    """A linear layer whose backward may go through another weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Map the last dimension."""
        return self.mapped(input, nn.functional.linear)


class Norm(Doubled, nn.LayerNorm):
    """A layer norm whose backward may go through another weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimension."""
        if not self.is_double:
            return nn.LayerNorm.forward(self, input)
        return self.mapped(nn.functional.layer_norm(input, self.normalized_shape, eps=self.eps), _scaled)


class Convolution(Doubled, nn.Conv2d):
    """A convolution without bias whose backward may go through another weight."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, padding=size // 2, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight as He et al. (2015) do."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, input: Tensor) -> Tensor:
        """Map (batch, channel, row, column) to other channels, of fewer places where it has a stride."""
        return self.mapped(input, self._conv_forward)


class GroupNorm(Doubled, nn.GroupNorm):
    """A group norm whose backward may go through another weight."""

    def __init__(self, channels: int) -> None:
        super().__init__(gcd(channels, min(GROUPS, max(channels // 2, 1))), channels)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize groups of two channels or more, of each sample by itself."""
        if not self.is_double:
            return nn.GroupNorm.forward(self, input)
        return self.mapped(nn.functional.group_norm(input, self.num_groups, eps=self.eps), _scaled_channels)


class BatchNorm(Doubled):
    """A batch norm without running statistics: it takes those of its batch, or given ones (`using`)."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel of all samples."""
        found, given = _collected.get(), _used.get()
        if found is not None:
            found.append((input.mean((0, 2, 3)), input.var((0, 2, 3))))
        mean, variance = (None, None) if given is None else next(given)
        weight, bias = (None, None) if self.is_double else (self.weight, self.bias)
        y = nn.functional.batch_norm(input, mean, variance, weight, bias, training=given is None, eps=self.eps)
        return self.mapped(y, _scaled_channels) if self.is_double else y


def _scaled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x * weight if bias is None else x * weight + bias


def _scaled_channels(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _scaled(x, weight[:, None, None], None if bias is None else bias[:, None, None])


@contextmanager
def _setting(variable: ContextVar[Any], value: Any) -> Iterator[Any]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def collecting() -> AbstractContextManager[list[tuple[Tensor, Tensor]]]:
    """Collect the mean and the unbiased variance of each batch norm's input, in the order of the calls."""
    return _setting(_collected, [])


def using(statistics: Statistics) -> AbstractContextManager[object]:
    """Let batch norms take given means and variances instead of their batch's, in the order of their calls."""
    return _setting(_used, iter(statistics))


def has_statistics(stages: Sequence[nn.Module]) -> bool:
    """Return whether samples of a batch depend on each other, by a batch norm."""
    return any(isinstance(module, BatchNorm) for stage in stages for module in stage.modules())


class Beside(nn.Module):
    """Modules beside which their input goes on, as it is or through a bypass."""

    def __init__(self, *body: nn.Module, bypass: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.bypass = nn.Sequential(*body), bypass or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add both ways."""
        y: Tensor = self.bypass(x) + self.body(x)
        return y


class Pooled(Linear):
    """A linear layer of the means of all channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Map images to scores."""
        return super().forward(input.mean((-2, -1)))


def small_network(
    channels: int, width: int, layers: int, classes: int, normalize: Normalize = GroupNorm
) -> list[nn.Module]:
    """Return the layers of a network of like layers, whose second and last thirds are of half as many rows each."""
    inner = max(layers - 2, 1)
    thirds = [3 * k // inner for k in range(layers - 2)]
    blocks = [
        Beside(
            *(normalize(width), nn.ReLU(), Convolution(width, width, 3, 1 + (third > before))),
            bypass=nn.MaxPool2d(1, 2) if third > before else None,
        )
        for before, third in zip([0, *thirds], thirds, strict=False)
    ]
    head = nn.Sequential(normalize(width), nn.ReLU(), Pooled(width, classes))
    return [Convolution(channels, width, 3), *blocks, head]


def _normed(inputs: int, outputs: int, size: int, stride: int, normalize: Normalize) -> list[nn.Module]:
    return [Convolution(inputs, outputs, size, stride), normalize(outputs)]


def _block(inputs: int, width: int, stride: int, normalize: Normalize, *, bottleneck: bool) -> nn.Module:
    """Return a block of two convolutions, or of three, the second of which has fewer channels and the stride."""
    outputs = 4 * width if bottleneck else width
    sides = [(inputs, width, 3, stride), (width, width, 3, 1)]
    if bottleneck:
        sides = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
    body = [module for side in sides for module in (*_normed(*side, normalize), nn.ReLU())]
    alike = stride == 1 and inputs == outputs
    bypass = None if alike else nn.Sequential(*_normed(inputs, outputs, 1, stride, normalize))
    return nn.Sequential(Beside(*body[:-1], bypass=bypass), nn.ReLU())


def residual_network(
    depth: int, channels: int, side: int, classes: int, normalize: Normalize = GroupNorm
) -> list[nn.Module]:
    """Return the stem, the blocks and the head of a residual network of 18 or 50 layers; of small images as is usual.

    Normalization is after convolutions. Strides of blocks are where torchvision has them.
    """
    bottleneck, counts = depth == 50, {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth]
    widths = [64 * 2**part for part, count in enumerate(counts) for _ in range(count)]
    firsts = set(accumulate(counts))
    inputs = [64, *((4 if bottleneck else 1) * width for width in widths)]
    blocks = [
        _block(inputs[k], width, 1 + (k in firsts), normalize, bottleneck=bottleneck) for k, width in enumerate(widths)
    ]
    stem = (
        [*_normed(channels, 64, 7, 2, normalize), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        if side >= LARGE
        else [*_normed(channels, 64, 3, 1, normalize), nn.ReLU()]
    )
    return [nn.Sequential(*stem), *blocks, Pooled(inputs[-1], classes)]

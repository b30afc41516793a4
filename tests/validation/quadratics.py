"""Quadratics to learn: losses of curvature 1, whose limits of the rate are known.

Layers have one parameter each. Inputs are zero, and each layer adds its part to its input; so scores are losses.
"""

import torch
from torch import Tensor, nn

from validation.learn.data import Data, Tensors
from validation.learn.networks import Sizes


class Bowl(nn.Module):
    """A layer whose parameter has a loss of its own: half its square."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.theta**2 / 2


class Summand(Bowl):
    """A layer whose parameter is added to those of the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.theta


class Trough(Summand):
    """The last summand: the loss of the sum is half its square over the number of layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 2 / (2 * self.layers)


def quadratic_layers(data: Data, sizes: Sizes) -> list[nn.Module]:
    """Layers each with a curvature of its own, or all of them with one direction, as the name of the data says."""
    if data.name.endswith("own"):
        return [Bowl() for _ in range(sizes.layers)]
    return [*(Summand() for _ in range(sizes.layers - 1)), Trough(sizes.layers)]


def quadratic(name: str) -> Data:
    """Samples without content, of which only the number counts."""
    train, test = (Tensors(torch.zeros(k, 1), torch.zeros(k, dtype=torch.int64)) for k in (1024, 16))
    return Data(name, train, test, classes=1, loss=lambda scores, target: scores.mean())

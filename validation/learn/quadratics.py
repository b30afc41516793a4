"""Quadratics to learn: losses of curvature 1, whose limits of the rate are known.

Layers have one parameter each. Inputs are zero, and each layer adds its part to what it is given; so scores are losses.
"""

import torch
from torch import Tensor, nn


class Bowl(nn.Module):
    """A layer whose parameter has a loss of its own: half its square."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the loss."""
        return x + self.theta**2 / 2


class Summand(nn.Module):
    """A layer whose parameter is added to those of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the parameter."""
        return x + self.theta


class Trough(Summand):
    """The last layer of those that add up: the loss of the sum is half its square over the number of layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """Add the parameter, and return the loss."""
        return (x + self.theta) ** 2 / (2 * self.layers)


def quadratic_layers(count: int, *, shared: bool) -> list[nn.Module]:
    """Return layers each with a curvature of its own, or all of them with one direction."""
    if shared:
        return [*(Summand() for _ in range(count - 1)), Trough(count)]
    return [Bowl() for _ in range(count)]

"""Quadratics to learn: losses of curvature 1, whose limits of the rate are known.

Layers have one parameter each. Inputs are zero, and each layer adds its part to what it is given; so scores are losses.
"""

from typing import Final

import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError

from .data import Data, Tensors
from .networks import Sizes

QUADRATICS: Final = ("quadratic:own", "quadratic:shared")
_SAMPLES, _TESTED = 1024, 16


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


def quadratic(name: str) -> Data:
    """Return samples without content, and the mean of their scores as the loss."""
    train, test = (Tensors(torch.zeros(k, 1), torch.zeros(k, dtype=torch.int64)) for k in (_SAMPLES, _TESTED))
    return Data(name, train, test, classes=1, loss=mean_score)


def mean_score(scores: Tensor, target: Tensor) -> Tensor:
    """Return the loss of layers whose scores are losses."""
    return scores.mean()


def quadratic_layers(data: Data, sizes: Sizes) -> list[nn.Module]:
    """Return layers each with a curvature of its own, or all of them with one direction, as the data are."""
    if data.name not in QUADRATICS:
        raise RequestError("network", f"quadratic takes {' or '.join(QUADRATICS)}, not {data.name}; leave it out")
    if data.name == "quadratic:own":
        return [Bowl() for _ in range(sizes.layers)]
    return [*(Summand() for _ in range(sizes.layers - 1)), Trough(sizes.layers)]

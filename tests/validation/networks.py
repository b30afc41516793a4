"""Small networks of torch: with shapes that all differ, with tied weights."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from validation.training.forms import Form, flatten, zeros
from validation.training.stages import Architecture, Draw, Training, cross_entropy, cut, mean_square

VECTOR = Draw(Form((2, 4), torch.float64))


def of_layers(*layers: nn.Module) -> Training:
    """A stage for each layer, from four numbers to as many."""
    return cut(Architecture([layer.double() for layer in layers], VECTOR, VECTOR, mean_square), range(1, len(layers)))


def vectors(training: Training, stage: int) -> tuple[Tensor, Tensor]:
    """A stage's parameters, and zeros for its gradient."""
    return flatten(training.stages[stage].parameters()), zeros(training.parameters(stage), torch.device("cpu"))


class Scaled(nn.Module):
    """A layer with a buffer, and another shape after it than before it."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, to)
        self.scale: Tensor
        self.register_buffer("scale", torch.arange(1, to + 1) / to, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * self.scale


def tokens(n: int, *, batch: int, dtype: torch.dtype) -> Architecture:
    """A model of n layers with tokens in, tokens out, and boundaries that all differ."""
    widths = range(8, 8 + n)
    layers = [nn.Embedding(11, 8), *(Scaled(a, b) for a, b in pairwise(widths))]
    layers[-1] = nn.Sequential(layers[-1], nn.Linear(widths[-1], 11))
    data = Draw(Form((batch, 5), torch.int64), 11)
    return Architecture(layers, data, data, cross_entropy)


def images(n: int, *, batch: int, dtype: torch.dtype) -> Architecture:
    """A model of n layers with images in, labels out, and norms over the batch."""
    blocks = [
        nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3, track_running_stats=False), nn.ReLU())
        for _ in range(n)
    ]
    blocks[-1] = nn.Sequential(blocks[-1], nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    labels = Draw(Form((batch,), torch.int64), 10)
    return Architecture(blocks, Draw(Form((batch, 3, 8, 8), dtype)), labels, cross_entropy)


class Product(nn.Module):
    """An output layer whose weights may be another layer's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(6), weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x) @ self.weight.T
        return y


def with_head(batch: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """A user's model: an embedding, a layer and a head, whose loss makes the peak where a batch has many tokens."""
    labels = torch.full((batch, 8), 498)
    return [nn.Embedding(499, 16), nn.Linear(16, 16), nn.Linear(16, 499, bias=False)], labels, labels


def with_tied_head(batch: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """The same with one tensor for embedding and head."""
    layers, x, labels = with_head(batch)
    layers[-1].weight = layers[0].weight
    return layers, x, labels

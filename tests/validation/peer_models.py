"""Models by which torch's runtimes are judged: unlike those of the harness in layers, widths and boundaries."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Given = dict[str, object]


class RootMeanSquare(nn.Module):
    """A norm without a mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class Decoder(nn.Module):
    """A layer of a Llama without positions: queries in groups share keys and values, and the MLP is gated."""

    def __init__(self, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.heads, self.shared = heads, shared
        self.before, self.between = RootMeanSquare(width), RootMeanSquare(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, width // heads * shared, bias=False) for _ in range(2))
        self.mixed = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        query, key, value = (
            layer(y).unflatten(-1, (count, -1)).transpose(1, 2)
            for layer, count in ((self.query, self.heads), (self.key, self.shared), (self.value, self.shared))
        )
        key, value = (each.repeat_interleave(self.heads // self.shared, dim=1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        grown: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + grown


class ManyNorms(nn.Module):
    """Five layer norms with a product after each, of 77 and 31 numbers in turn."""

    def __init__(self, width: int = 77, narrow: int = 31) -> None:
        super().__init__()
        widths = [width, narrow, width, narrow, width, width]
        self.norms = nn.ModuleList(map(nn.LayerNorm, widths[:5]))
        self.products = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, product in zip(self.norms, self.products, strict=True):
            y = torch.tanh(product(norm(y)))
        return x + y


class Convolution(nn.Module):
    """Two convolutions with group norms, beside a residual where the size stays."""

    def __init__(self, given: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        return F.relu(x + y if y.shape == x.shape else y)


class Pooled(nn.Module):
    """A classifier of the mean over places."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.classes = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classes(x.mean((2, 3)))
        return y


def llama(batch: int) -> Given:
    """Return seven decoder layers, 96 wide, with 6 heads over 2, a vocabulary of 1,013 and 44 tokens."""
    width, vocabulary = 96, 1013
    head = nn.Sequential(RootMeanSquare(width), nn.Linear(width, vocabulary, bias=False))
    tokens = torch.arange(vocabulary).repeat(batch)[: 44 * batch].view(batch, 44)
    tokens[0, 0] = vocabulary - 1
    layers = [nn.Embedding(vocabulary, width), *(Decoder(width, 6, 2, 256) for _ in range(7)), head]
    return {"layers": layers, "input": tokens, "target": tokens}


def tied_llama(batch: int) -> Given:
    """Return the same with one tensor for the embedding and the output layer."""
    given = llama(batch)
    layers = given["layers"]
    assert isinstance(layers, list), "it is a list"
    layers[-1][1].weight = layers[0].weight
    return given


def checkpointed_llama(batch: int) -> Given:
    """Return the same with its decoder layers checkpointed, as torchtitan does in all."""
    return llama(batch) | {"checkpointed": range(1, 8)}


def norms(batch: int) -> Given:
    """Return six layers of five layer norms each."""
    x = torch.ones(batch, 20, 77)
    return {"layers": [ManyNorms() for _ in range(6)], "input": x, "target": x}


def convolutions(batch: int) -> Given:
    """Return convolutions with group norms, and a classifier."""
    layers = [
        Convolution(3, 16),
        Convolution(16, 16),
        Convolution(16, 32, 2),
        Convolution(32, 32),
        Convolution(32, 32),
        Pooled(32, 10),
    ]
    return {"layers": layers, "input": torch.ones(batch, 3, 24, 24), "target": torch.arange(batch).remainder(10)}

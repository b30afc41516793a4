"""Networks to learn with: layers for labels of vectors and for the next token at each place of a sequence.

Where backwards read other parameters than their forwards, a weight is there twice: y = x W_f with the input held fixed,
and (x - x) W_b with W_b held fixed. So the gradient of the weight is the forward's, and that of the input goes through
the backward's.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError, choose

from ..training.models import even_cuts
from .data import Data

BACK = "back"  # the name of a weight as backwards read it


class Doubled(nn.Module):
    """A layer that may have its weight twice: as forwards read it, and as backwards do."""

    weight: Any
    back: Tensor

    def twice(self) -> None:
        """Have the weight of backwards, too."""
        self.register_buffer(BACK, self.weight.detach().clone())

    @property
    def is_double(self) -> bool:
        """Whether it has it."""
        return BACK in self._buffers


class Linear(Doubled, nn.Linear):
    """A linear layer whose backward may go through another weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Map the last dimension."""
        if not self.is_double:
            return nn.Linear.forward(self, input)
        fixed = input.detach()
        return nn.functional.linear(fixed, self.weight, self.bias) + nn.functional.linear(input - fixed, self.back)


class Norm(Doubled, nn.LayerNorm):
    """A layer norm whose backward may go through another weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimension."""
        if not self.is_double:
            return nn.LayerNorm.forward(self, input)
        bare = nn.functional.layer_norm(input, self.normalized_shape, eps=self.eps)
        fixed = bare.detach()
        return fixed * self.weight + self.bias + (bare - fixed) * self.back


class First(nn.Module):
    """The first layer of an MLP."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map vectors to the width of the network."""
        return torch.tanh(self.linear(x))


class Residual(nn.Module):
    """A layer of an MLP beside which its input goes on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map vectors to the same width."""
        return x + torch.tanh(self.linear(x))


class Embedding(nn.Module):
    """Tokens and places as vectors."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.place = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length) tokens to vectors."""
        return self.token[x] + self.place


class CausalLayer(nn.Module):
    """Attention to earlier places and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = Norm(width), Norm(width)
        self.attention_in, self.attention_out = Linear(width, 3 * width, bias=False), Linear(width, width)
        self.inner, self.outer = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self._attend(self.attention_norm(x))
        y: Tensor = self.outer(nn.functional.gelu(self.inner(self.norm(x))))
        return x + y

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            own.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for own in self.attention_in(x).chunk(3, -1)
        )
        later = torch.full((x.shape[-2], x.shape[-2]), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        weights = (query / query.shape[-1] ** 0.5 @ key.transpose(-1, -2) + later).softmax(-1)
        attended: Tensor = self.attention_out((weights @ value).transpose(-2, -3).flatten(-2))
        return attended


class Head(nn.Module):
    """The last layer of a transformer."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norm, self.linear = Norm(width), Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Map vectors to scores of tokens."""
        scores: Tensor = self.linear(self.norm(x))
        return scores


class Sizes(NamedTuple):
    """The sizes of a network."""

    layers: int
    width: int
    heads: int = 4


Layers = Callable[[Data, Sizes], list[nn.Module]]


def residual_perceptron(data: Data, sizes: Sizes) -> list[nn.Module]:
    """Return the layers of an MLP from vectors to labels."""
    inputs, width = data.shape[-1], sizes.width
    hidden = [Residual(width) for _ in range(sizes.layers - 2)]
    return [First(inputs, width), *hidden, Linear(width, data.classes)]


def causal_transformer(data: Data, sizes: Sizes) -> list[nn.Module]:
    """Return the layers of a transformer from tokens to tokens."""
    if sizes.width % sizes.heads:
        raise RequestError(f"heads={sizes.heads}", f"must divide the width, which is {sizes.width}")
    blocks = [CausalLayer(sizes.width, sizes.heads) for _ in range(sizes.layers - 2)]
    return [Embedding(data.tokens, data.shape[-1], sizes.width), *blocks, Head(sizes.width, data.classes)]


NETWORKS: dict[str, Layers] = {"mlp": residual_perceptron, "transformer": causal_transformer}


def make_stages(
    network: str, data: Data, sizes: Sizes, n: int, seed: int, dtype: torch.dtype, *, twice: bool = False
) -> list[nn.Sequential]:
    """Return n stages of a network with its first parameters, always the same of a seed.

    With `twice` they have the weights of backwards, too.
    """
    build = NETWORKS[choose("network", network, NETWORKS)]
    if (network == "transformer") != bool(data.tokens):
        takes = "tokens" if network == "transformer" else "vectors"
        raise RequestError("network", f"{network} takes {takes}, which {data.name} has not; leave it out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = build(data, sizes)
    if twice:
        for module in (own for layer in layers for own in layer.modules()):
            if isinstance(module, Doubled):
                module.twice()
    ends = [0, *even_cuts(len(layers), n), len(layers)]
    return [nn.Sequential(*own).to(dtype) for own in _stage_layers(layers, ends)]


def _stage_layers(layers: Sequence[nn.Module], ends: Sequence[int]) -> list[Sequence[nn.Module]]:
    return [layers[first:end] for first, end in pairwise(ends)]


def right(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many labels have the highest score, and how many there are."""
    counts = target >= 0
    return ((scores.argmax(-1) == target) & counts).sum(), counts.sum()

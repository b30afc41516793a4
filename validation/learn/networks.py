"""Networks to learn with: layers for labels of vectors and images, and for the next token at each place of a text."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError, choose
from cdpsim.model import Cuts, balanced, check_stages

from ..profile.flops import Flops
from .data import Data
from .layers import (
    DIGIT,
    BatchNorm,
    Beside,
    Doubled,
    GroupNorm,
    Linear,
    Norm,
    Normalize,
    residual_network,
    small_network,
)

BATCH = 2  # samples with which the FLOP of layers are counted


class Embedding(nn.Module):
    """Tokens and places as vectors."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.place = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length) tokens to vectors."""
        return self.token[x] + self.place


class CausalAttention(nn.Module):
    """Attention to earlier places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward, self.outward = Linear(width, 3 * width, bias=False), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        query, key, value = (
            own.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for own in self.inward(x).chunk(3, -1)
        )
        later = torch.full((x.shape[-2], x.shape[-2]), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        weights = (query / query.shape[-1] ** 0.5 @ key.transpose(-1, -2) + later).softmax(-1)
        attended: Tensor = self.outward((weights @ value).transpose(-2, -3).flatten(-2))
        return attended


class Sizes(NamedTuple):
    """The sizes of a network."""

    layers: int
    width: int
    heads: int = 4


Layers = Callable[..., list[nn.Module]]  # of data and sizes; those of images may take a norm


def residual_perceptron(data: Data, sizes: Sizes) -> list[nn.Module]:
    """Return the layers of an MLP from vectors to labels."""
    hidden = [Beside(Linear(sizes.width, sizes.width), nn.Tanh()) for _ in range(sizes.layers - 2)]
    first = nn.Sequential(Linear(data.shape[-1], sizes.width), nn.Tanh())
    return [first, *hidden, Linear(sizes.width, data.classes)]


def causal_transformer(data: Data, sizes: Sizes) -> list[nn.Module]:
    """Return the layers of a transformer from tokens to tokens."""
    width, heads = sizes.width, sizes.heads
    if width % heads:
        raise RequestError("width", f"width={width} must be a multiple of {heads}; give {-(-width // heads) * heads}")
    blocks = [
        nn.Sequential(
            Beside(Norm(width), CausalAttention(width, heads)),
            Beside(Norm(width), Linear(width, 4 * width), nn.GELU(), Linear(4 * width, width)),
        )
        for _ in range(sizes.layers - 2)
    ]
    first = Embedding(data.tokens, data.shape[-1], width)
    return [first, *blocks, nn.Sequential(Norm(width), Linear(width, data.classes))]


def convolutional(data: Data, sizes: Sizes, normalize: Normalize = GroupNorm) -> list[nn.Module]:
    """Return the layers of a small convolutional network from images, or from vectors that are digits, to labels."""
    of_vectors = len(data.shape) < 3
    channels = (DIGIT if of_vectors else data.shape)[0]
    first, *others = small_network(channels, sizes.width, sizes.layers, data.classes, normalize)
    return [nn.Sequential(nn.Unflatten(-1, DIGIT), first) if of_vectors else first, *others]


def _resnet(depth: int, data: Data, sizes: Sizes, normalize: Normalize = GroupNorm) -> list[nn.Module]:
    channels, *sides = data.shape
    return residual_network(depth, channels, min(sides), data.classes, normalize)


NETWORKS: dict[str, Layers] = {
    "mlp": residual_perceptron,
    "transformer": causal_transformer,
    "conv": convolutional,
    "resnet18": partial(_resnet, 18),
    "resnet50": partial(_resnet, 50),
}
FIXED = frozenset({"resnet18", "resnet50"})  # which have sizes of their own
CUTS = ("layers", "flops")  # how layers become stages: equally many layers, or like FLOP, in each
_TAKES = {"mlp": "vectors", "transformer": "tokens"}  # all others: images
_found_cuts: dict[object, Cuts] = {}  # by all that they depend on


def usual_network(data: Data) -> str:
    """Return the network that data are learnt by, unless another one is asked for."""
    return {"vectors": "mlp", "tokens": "transformer", "images": "conv"}[_kind(data)]


def _kind(data: Data) -> str:
    return "tokens" if data.tokens else "images" if len(data.shape) == 3 else "vectors"


def make_stages(
    network: str,
    data: Data,
    sizes: Sizes,
    n: int,
    seed: int,
    dtype: torch.dtype,
    *,
    twice: bool = False,
    cut: str = "layers",
    batch_norm: bool = False,
) -> list[nn.Sequential]:
    """Return n stages of a network with its first parameters, always the same of a seed.

    With `twice` they have the weights of backwards, too; with `batch_norm`, networks of images have batch norms.
    """
    _check_network(network, data, batch_norm=batch_norm)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = NETWORKS[network](data, sizes, **({"normalize": BatchNorm} if batch_norm else {}))
    key = (network, batch_norm, data.name, data.shape, data.classes, sizes, n, choose("cut", cut, CUTS))
    if key not in _found_cuts:
        check_stages(n, len(layers))
        even = tuple(len(layers) * j // n for j in range(1, n))
        _found_cuts[key] = even if cut == "layers" else balanced(_flops(layers, data), n)
    if twice:
        for module in (own for layer in layers for own in layer.modules()):
            if isinstance(module, Doubled):
                module.twice()
    return [nn.Sequential(*layers[first:end]).to(dtype) for first, end in pairwise((0, *_found_cuts[key], len(layers)))]


def _check_network(network: str, data: Data, *, batch_norm: bool) -> None:
    """Refuse an unknown network, one that does not take the data, and batch norms that it has not."""
    takes = _TAKES.get(choose("network", network, NETWORKS), "images")
    kind = _kind(data)
    digits = network == "conv" and kind == "vectors" and data.shape == (prod(DIGIT),)
    if takes != kind and not digits:
        raise RequestError("network", f"{network} takes {takes}, which {data.name} has not; leave it out")
    if batch_norm and takes != "images":
        problem = f"{network} has layer norms or none; leave it out, or take a network of images"
        raise RequestError("batch-norm", problem)


def _flops(layers: Sequence[nn.Module], data: Data) -> list[int]:
    """Count the FLOP of each layer's forward and backward, on tensors without values."""
    x, y = (own.to("meta") for own in data.test.take(torch.zeros(BATCH, dtype=torch.int64)))
    x = x if data.tokens else x.float()
    counts: list[int] = []
    for layer in (deepcopy(layer).to("meta") for layer in layers):
        x = x.detach().requires_grad_(bool(counts))
        with Flops() as flops:
            x = layer(x)
            torch.autograd.backward(x.sum() if len(counts) < len(layers) - 1 else data.loss(x, y))
        counts.append(max(1, flops.count))
    return counts


def right(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many labels have the highest score, and how many there are."""
    counts = target >= 0
    return ((scores.argmax(-1) == target) & counts).sum(), counts.sum()

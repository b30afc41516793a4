"""The rule against torch.distributed.tensor: the collectives of a layer that it splits, and their bytes."""

from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor as TorchTensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from cdpsim.model.layers import PRODUCT, Exchange, Layers, Operation, Tensor, embedding, head, layer
from cdpsim.model.splitting import Mesh, RankShare, sizes_on, split

from .distributed_tensors import Collectives, Seen, made_groups

WIDTH, SAMPLES = 4, 2  # bytes of a number; sequences
SHAPE = Layers(layers=1, width=128, heads=8, length=32, vocabulary=2048, positions=False)


@pytest.fixture
def group() -> Iterator[Callable[[int], DeviceMesh]]:
    yield from made_groups()


class Attention(nn.Module):
    """Attention by one product of queries, keys and values, or by three."""

    def __init__(self, products: int) -> None:
        super().__init__()
        width = SHAPE.width
        self.products = nn.ModuleList(nn.Linear(width, 3 * width // products) for _ in range(products))
        self.out = nn.Linear(width, width)

    def forward(self, given: TorchTensor) -> TorchTensor:
        parts = [product(given) for product in self.products]
        parts = list(parts[0].chunk(3, -1)) if len(parts) == 1 else parts
        q, k, v = (part.unflatten(-1, (-1, SHAPE.width // SHAPE.heads)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: TorchTensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Layer(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, products: int) -> None:
        super().__init__()
        width = SHAPE.width
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(products)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, given: TorchTensor) -> TorchTensor:
        added = given + self.attention(self.norm(given))
        found: TorchTensor = added + self.mlp(self.norm2(added))
        return found


def parallelized(module: Layer, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """Split a layer as torch's tutorial on tensor parallelism does."""
    lies = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {f"attention.products.{k}": ColwiseParallel() for k in range(len(module.attention.products))}
    plan |= {"mlp.0": ColwiseParallel()}
    plan |= {name: RowwiseParallel(output_layouts=lies) for name in ("attention.out", "mlp.2")}
    if sequence:
        whole: dict[str, Any] = {"input_layouts": (lies,), "desired_input_layouts": (Replicate(),)}
        plan |= {name: PrepareModuleInput(**whole) for name in ("attention", "mlp")}
        plan |= {name: SequenceParallel() for name in ("norm", "norm2")}
    return parallelize_module(module, mesh, plan)


def in_three(operations: Iterator[Operation]) -> Iterator[Operation]:
    """Yield operations with three products for queries, keys and values in place of one."""
    for each in operations:
        if each.kind == PRODUCT and each.output.name == "qkv":
            for name in ("queries", "keys", "values"):
                given, output = each.inputs[0], Tensor(name, "bsa", WIDTH)
                yield each._replace(output=output, weights=("ah", "a"), flop=((given.dims + "a", 2),))
        else:
            yield each


def by_rule(operations: Iterator[Operation], tensor: int, sequence: bool) -> tuple[Collectives, Collectives, RankShare]:
    """Return the collectives of a forward and of its backward, and a rank's share, by the rule."""
    mesh = Mesh(tensor, sequence, keeps_gathered=True, sums_apart=True)
    share = split(operations, sizes_on(SHAPE, SAMPLES, mesh), mesh)
    ways: list[Collectives] = []
    for counted in (share.forward, share.for_input + share.for_weights):
        found: Collectives = Counter()
        for each, times in counted:
            if isinstance(each, Exchange):
                found[each.op, each.size] += int(times)
        ways.append(found)
    return ways[0], ways[1], share


def local_numbers(module: nn.Module) -> int:
    """Return the numbers of parameters that this rank has."""
    local = (each.to_local() if isinstance(each, DTensor) else each for each in module.parameters())
    return sum(each.numel() for each in local)


@pytest.mark.parametrize("products", [1, 3])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_layer_exchanges_what_torch_does(
    group: Callable[[int], DeviceMesh], tensor: int, sequence: bool, products: int
) -> None:
    """Forward and backward; the counts are those that parallel.md has for three products, and for one."""
    module = parallelized(Layer(products), group(tensor), sequence)
    length = SHAPE.length // tensor if sequence else SHAPE.length
    given = torch.randn(SAMPLES, length, SHAPE.width, requires_grad=True)
    with Seen() as seen:
        output = module(given)
        forward = seen.taken()
        output.backward(torch.ones_like(output))
        backward = seen.taken()
    operations = layer(SHAPE, WIDTH) if products == 1 else in_three(layer(SHAPE, WIDTH))
    *ruled, share = by_rule(operations, tensor, sequence)
    assert [forward, backward] == ruled
    assert local_numbers(module) == sum(map(prod, share.weights))
    size = SAMPLES * SHAPE.length * SHAPE.width * WIDTH
    twice = {("all-gather", size): 2, ("reduce-scatter", size): 2}
    assert forward == (twice if sequence else {("all-reduce", size): 2})
    assert backward == (twice if sequence else {("all-reduce", size): 2 if products == 1 else 4})


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_an_embedding_exchanges_what_torch_does(
    group: Callable[[int], DeviceMesh], tensor: int, sequence: bool
) -> None:
    lies = Shard(1) if sequence else Replicate()
    found = RowwiseParallel(input_layouts=Replicate(), output_layouts=lies)
    module = parallelize_module(nn.Embedding(SHAPE.vocabulary, SHAPE.width), group(tensor), found)
    with Seen() as seen:
        output = module(torch.randint(SHAPE.vocabulary, (SAMPLES, SHAPE.length)))
        forward = seen.taken()
        output.backward(torch.ones_like(output))
        backward = seen.taken()
    *ruled, share = by_rule(embedding(SHAPE, WIDTH), tensor, sequence)
    assert [forward, backward] == ruled and forward.total() == 1
    assert local_numbers(module) == sum(map(prod, share.weights))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_head_exchanges_what_torch_does(group: Callable[[int], DeviceMesh], tensor: int, sequence: bool) -> None:
    """The loss over a split vocabulary sums three times, a number for each token."""
    module: nn.Module = nn.Sequential(nn.LayerNorm(SHAPE.width), nn.Linear(SHAPE.width, SHAPE.vocabulary, bias=False))
    lies = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {"1": ColwiseParallel(input_layouts=lies, output_layouts=Shard(-1), use_local_output=False)}
    module = parallelize_module(module, group(tensor), plan | ({"0": SequenceParallel()} if sequence else {}))
    length = SHAPE.length // tensor if sequence else SHAPE.length
    given = torch.randn(SAMPLES, length, SHAPE.width, requires_grad=True)
    targets = torch.randint(SHAPE.vocabulary, (SAMPLES * SHAPE.length,))
    with Seen() as seen, loss_parallel():
        loss = nn.functional.cross_entropy(module(given).flatten(0, 1), targets)
        forward = seen.taken()
        loss.backward()
        backward = seen.taken()
    *ruled, share = by_rule(head(SHAPE, WIDTH), tensor, sequence)
    assert [forward, backward] == ruled and backward.total() == 1
    assert forward["all-reduce", SAMPLES * SHAPE.length * 4] == 3
    assert local_numbers(module) == sum(map(prod, share.weights))

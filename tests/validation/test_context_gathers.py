"""The rule against torch.distributed.tensor: keys and values gathered over positions, and their gradients scattered."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cdpsim import Model, simulate
from cdpsim.model.layers import Layers, layer
from cdpsim.model.splitting import Mesh, sizes_on, split

from .distributed_tensors import Collectives, Seen, made_groups

SAMPLES, NUMBER = 2, 4  # sequences; bytes of a number
SIZES: dict[str, Any] = {"layers": 1, "width": 128, "heads": 8, "length": 32, "vocabulary": 2048}
IN_ATTENTION = ("y1", "qkv", "all k", "all v", "sums", "o")


@pytest.fixture
def group() -> Iterator[Callable[[int], DeviceMesh]]:
    yield from made_groups()


class GatheredKeys(nn.Module):
    """Attention of one rank's positions to the keys and values of all, which torch's tensors gather."""

    def __init__(self, shape: Layers, mesh: DeviceMesh) -> None:
        super().__init__()
        self.shape, self.mesh = shape, mesh
        self.qkv = nn.Linear(shape.width, shape.sizes["q"])
        self.out = nn.Linear(shape.sizes["a"], shape.width)

    def forward(self, given: Tensor) -> Tensor:
        q, *keys = self.qkv(given).split([self.shape.sizes[dim] for dim in "acc"], -1)
        found: Tensor = self.out(self.attend(q, *(self.gathered(each) for each in keys)))
        return found

    def gathered(self, own: Tensor) -> Tensor:
        """Return all positions; the gradient of them that a rank has is a part of a sum."""
        whole: Tensor = DTensor.from_local(own, self.mesh, [Shard(1)]).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]

    def attend(self, *values: Tensor) -> Tensor:
        """Return the outputs of all heads."""
        q, k, v = (each.unflatten(-1, (-1, self.shape.sizes["d"])).transpose(1, 2) for each in values)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


def simulated(shape: Layers, context: int) -> dict[str, Collectives]:
    """Return the exchanges of a simulated step over context, forward and backward."""
    model = Model.of_layers(shape, samples=SAMPLES, precision="fp32")
    run = simulate("dp", 1, m=1, steps=1, model=model, cluster="selene", context=context, runtime="torch")
    found: dict[str, Collectives] = {"F": Counter(), "B": Counter()}
    for row in run.exchanges or ():
        found[row.kind][row.op, int(row.size)] += int(row.times)
    return found


@pytest.mark.parametrize("key_value_heads", [8, 2])
@pytest.mark.parametrize("context", [2, 4])
def test_attention_gathers_keys_and_values_as_torch_does(
    group: Callable[[int], DeviceMesh], context: int, key_value_heads: int
) -> None:
    """Both are gathered in the forward and kept, so that the backward scatters two gradients and gathers nothing."""
    shape = Layers(**SIZES, key_value_heads=key_value_heads, causal=False)
    module, kept = GatheredKeys(shape, group(context)), dict[int, Tensor]()
    weights = {each.untyped_storage().data_ptr() for each in module.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    given = torch.randn(SAMPLES, shape.length // context, shape.width, requires_grad=True)
    with Seen() as seen:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = module(given)
        forward = seen.taken()
        output.backward(torch.ones_like(output))
        backward = seen.taken()
    size = SAMPLES * shape.length * key_value_heads * 16 * NUMBER
    assert forward == {("all-gather", size): 2}
    assert backward == {("reduce-scatter", size): 2}
    assert simulated(shape, context) == {"F": forward, "B": backward}
    mesh = Mesh(context=context, keeps_gathered=True)
    ruled = split(layer(shape, NUMBER), sizes_on(shape, SAMPLES, mesh), mesh).kept
    found = sorted(each.untyped_storage().nbytes() for address, each in kept.items() if address not in weights)
    assert found == sorted(ruled[name] for name in IN_ATTENTION)

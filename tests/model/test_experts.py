"""Shapes with experts and with latent attention: numbers, FLOP and rows by closed forms that are written here."""

from math import ceil
from typing import Any

import pytest
from msgspec.structs import replace

from cdpsim import Model
from cdpsim.errors import RequestError
from cdpsim.model.layers import CORE, GROUPED, PRODUCT, Layers
from cdpsim.presets import model

pytestmark = pytest.mark.filterwarnings("error")

H, F, TOKENS = 64, 96, 2 * 32
DENSE = Layers(
    layers=6,
    width=H,
    heads=4,
    length=32,
    vocabulary=100,
    ffn=F,
    gated=True,
    biases=False,
    norm="rms",
    tied=False,
    positions=False,
)
MIXED = replace(DENSE, experts=8, top_k=2, expert_ffn=24)


def flop_of(shape: Layers, *kinds: str, j: int = 1) -> float:
    """Sum the FLOP of a layer's forward in rows of these kinds, of two samples."""
    cost: Any = Model.of_layers(shape, samples=2).stages[j].forward
    return float(sum(times * row.flop for row, times in cost.rows if row.kind in kinds))


def test_one_expert_is_the_dense_layer_and_a_router() -> None:
    """Of as many numbers and FLOP as the MLP, which are then products of experts; the router has h of each."""
    one = replace(DENSE, experts=1)
    assert one.numbers == one.active_numbers == DENSE.numbers + 6 * H
    mlp = 2 * TOKENS * 3 * H * F
    assert flop_of(one, GROUPED) == mlp
    assert flop_of(one, PRODUCT) == flop_of(DENSE, PRODUCT) - mlp + 2 * TOKENS * H
    assert flop_of(one, CORE) == flop_of(DENSE, CORE)


@pytest.mark.parametrize("gated", [True, False])
def test_a_token_computes_top_k_experts_of_any_number(gated: bool) -> None:
    """Fedus et al. 2022 (Switch Transformers): FLOP stay where experts are added, but for the router's."""
    for experts in (2, 8, 512):
        for top_k in (1, 2):
            shape = replace(MIXED, experts=experts, top_k=top_k, gated=gated)
            assert flop_of(shape, GROUPED) == top_k * 2 * TOKENS * (3 if gated else 2) * H * 24
            assert flop_of(shape, PRODUCT) == 2 * TOKENS * (4 * H * H + experts * H)


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.25])
@pytest.mark.parametrize("experts", [3, 8, 60])
def test_capacity_pads_the_rows_of_each_expert(experts: int, capacity: float) -> None:
    """Fedus et al. 2022, equation 3: of T k rows, each expert has ceil(T k capacity / experts)."""
    shape = replace(MIXED, experts=experts, capacity=capacity)
    rows = experts * ceil(TOKENS * 2 * capacity / experts)
    assert flop_of(shape, GROUPED) == 2 * rows * 3 * H * 24


def test_shared_experts_are_an_mlp_of_all_tokens() -> None:
    shared = replace(MIXED, shared_ffn=40)
    assert flop_of(shared, PRODUCT) - flop_of(MIXED, PRODUCT) == 2 * TOKENS * 3 * H * 40
    assert shared.numbers - MIXED.numbers == shared.active_numbers - MIXED.active_numbers == 6 * 3 * H * 40


def test_bytes_kept_of_experts() -> None:
    """In place of 3 f numbers of the MLP: 4 bytes of a router's choice, and of k rows h, 3 i and h numbers."""
    kept, dense = (Model.of_layers(shape, samples=2).stages[1].activation for shape in (MIXED, DENSE))
    assert kept - dense == TOKENS * (4 * 8 + 2 * 2 * (2 * H + 3 * 24) - 2 * 3 * F)


@pytest.mark.parametrize(
    ("first", "every", "which"),
    [(0, 1, [1] * 6), (0, 2, [0, 1] * 3), (3, 2, [0, 0, 0, 1, 0, 1]), (5, 1, [0] * 5 + [1])],
)
def test_some_layers_have_experts(first: int, every: int, which: list[int]) -> None:
    """As DeepSeek's first_k_dense_replace and Qwen's decoder_sparse_step say, and every other layer in GShard."""
    shape = replace(MIXED, dense_layers=first, frequency=every)
    assert shape.has_experts == [bool(each) for each in which]
    assert [flop_of(shape, GROUPED, j=j) > 0 for j in range(1, 7)] == shape.has_experts
    mixed, mlp = sum(which), 3 * H * F
    assert shape.numbers == DENSE.numbers + mixed * (8 * 3 * H * 24 + 8 * H - mlp)
    assert shape.active_numbers == DENSE.numbers + mixed * (2 * 3 * H * 24 + 8 * H - mlp)


def test_latent_attention_has_the_weights_of_its_paper() -> None:
    """DeepSeek-V2, appendix C: W^DQ, W^UQ and W^QR, W^DKV and W^KR, W^UK and W^UV, W^O; and norms of both latents."""
    d, heads, head, turns, queries, latent = 5120, 128, 128, 64, 1536, 512
    down = d * queries + d * latent + d * turns
    up = heads * (head * queries + turns * queries + 2 * head * latent)
    layer = down + up + d * heads * head + queries + latent
    shape = model("deepseek-v2").layers
    assert shape is not None
    dense = replace(shape, **dict.fromkeys(("query_rank", "key_value_rank", "rope_width", "value_width")))
    assert dense.numbers - shape.numbers == 60 * (4 * d * heads * head - layer)
    assert (
        shape.numbers
        == 60 * (layer + 2 * d) + 59 * (3 * d * (160 * 1536 + 3072) + 160 * d) + 3 * d * 12_288 + (2 * 102_400 + 1) * d
    )


def test_flop_of_latent_attention() -> None:
    """2 for each weight and token; of the core 2 for each pair of tokens, head and number of a key, and of a value."""
    ranks = {"query_rank": 12, "key_value_rank": 8, "rope_width": 6, "value_width": 10}
    latent = replace(DENSE, **ranks)
    weights = H * 12 + 12 * 4 * (16 + 6) + H * (8 + 6) + 8 * 4 * (16 + 10) + 4 * 10 * H
    assert flop_of(latent, PRODUCT) == 2 * TOKENS * (weights + 3 * H * F)
    assert flop_of(latent, CORE) == 2 * TOKENS * 32 * 4 * (16 + 6 + 10)
    without = replace(latent, query_rank=None)
    assert flop_of(latent, PRODUCT) - flop_of(without, PRODUCT) == 2 * TOKENS * (H * 12 + (12 - H) * 4 * 22)


WRONG = [
    ({"top_k": 2}, "top_k: is of a mixture of experts; give experts, too"),
    ({"capacity": 1.0}, "capacity: is of a mixture of experts; give experts, too"),
    ({"experts": 4, "top_k": 5}, "top_k: 5 are more than the 4 experts; give fewer"),
    (
        {"experts": 4, "parallel": True},
        "experts: are behind the attention, and parallel has the MLP beside it; leave it out",
    ),
    (
        {"experts": 4, "dense_layers": 6},
        "dense_layers: 6 layers have no experts behind 6 dense ones with frequency 1; lower either",
    ),
    (
        {"experts": 4, "dense_layers": 5, "frequency": 5},
        "dense_layers: 6 layers have no experts behind 5 dense ones with frequency 5; lower either",
    ),
    ({"rope_width": 8}, "rope_width: is of latent attention; give key_value_rank, too"),
    (
        {"key_value_rank": 8, "biases": True},
        "key_value_rank: is of heads with keys of their own, without biases and norms of heads; leave key_value_heads "
        "and head_norms out, biases false",
    ),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_contradictions_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        replace(DENSE, **change)
    assert str(caught.value) == words

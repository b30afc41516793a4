"""Shapes of transformers: their numbers, FLOP and bytes kept, by closed forms that are written here."""

from typing import Any

import pytest
from msgspec.structs import replace

from cdpsim import Model
from cdpsim.errors import RequestError
from cdpsim.model.layers import PASS, Layers

pytestmark = pytest.mark.filterwarnings("error")

GPT2 = Layers(layers=12, width=768, heads=12, length=1024, vocabulary=50_257)
LLAMA = Layers(
    layers=32,
    width=4096,
    heads=32,
    length=4096,
    vocabulary=32_000,
    ffn=11_008,
    gated=True,
    biases=False,
    norm="rms",
    tied=False,
    positions=False,
)


def stage_of(shape: Layers, samples: int, j: int = 1) -> Any:
    return Model.of_layers(shape, samples=samples).stages[j]


def test_numbers_of_gpt2_are_those_of_its_paper() -> None:
    """Embeddings (V + s) h, 12 h² + 13 h of each layer, and the last norm: 124 M of the smallest GPT-2."""
    assert GPT2.numbers == (50_257 + 1024) * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768 == 124_439_808


def test_numbers_of_llama_are_those_of_its_paper() -> None:
    """A head of its own, a gate, no biases: 6.7 B (Touvron et al. 2023, table 1); with 8 of 64 heads shared, 69 B."""
    assert LLAMA.numbers == 6_738_415_616
    larger = replace(LLAMA, layers=80, width=8192, heads=64, key_value_heads=8, ffn=28_672)
    assert larger.numbers == 68_976_648_192


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_parameters_of_a_model_are_the_numbers_of_its_shape(shape: Layers) -> None:
    assert Model.of_layers(shape).parameter_bytes == 2 * shape.numbers


@pytest.mark.every_case
@pytest.mark.parametrize(("shape", "samples", "flop"), [(LLAMA, 2, 3_865_470_566_400), (GPT2, 8, 141_733_920_768)])
def test_flop_of_a_layer(shape: Layers, samples: int, flop: int) -> None:
    """2 for each weight and token, and 4 b s² h of the core; a backward has twice as many, flash half the core more."""
    stage, core = stage_of(shape, samples), 4 * samples * shape.length**2 * shape.width
    assert float(stage.forward) == stage_flop(shape, samples) == flop
    assert float(stage.backward) == 2 * flop + core / 2 and float(stage.recomputed) == core / 2


def stage_flop(shape: Layers, samples: int) -> int:
    """Four products of attention, and two or three of the MLP."""
    h, f = shape.width, shape.ffn or 4 * shape.width
    products = 4 * h * h + (3 if shape.gated else 2) * h * f
    return 2 * samples * shape.length * products + 4 * samples * shape.length**2 * h


def test_bytes_kept_of_a_llama_layer() -> None:
    """Of each token 2 bytes of x, y1, qkv, o, x2, y2 and of 2 f and f numbers, and 4 of each head."""
    tokens, h, f = 2 * 4096, 4096, 11_008
    kept = tokens * (2 * (5 * h + 3 * h + 3 * f) + 4 * 32)
    assert stage_of(LLAMA, 2).activation == kept == 1_078_984_704


def test_bytes_kept_of_an_unfused_layer() -> None:
    """34 s b h and 5 a s² b (Korthikanti et al. 2022, equation 2)."""
    stage = stage_of(replace(GPT2, attention="eager", dropout=True), 8)
    core = 5 * 12 * 1024**2 * 8
    assert stage.activation == 34 * 1024 * 8 * 768 + core and stage.attention_activation == core


def test_a_head_keeps_its_input_twice_and_wide_probabilities() -> None:
    """The input and output of the norm, 4 bytes of each word's probability, and 8 of each target."""
    tokens = 8 * 1024
    assert stage_of(GPT2, 8, -1).activation == tokens * (4 * 768 + 4 * 50_257 + 8)


def moved(cost: Any) -> float:
    """Return the bytes that passes move."""
    return float(sum(times * row.moved for row, times in cost.rows if row.kind == PASS))


def test_bytes_that_passes_of_embedding_and_head_move() -> None:
    """Of a number of the stream 4 to find it, 4 to add positions, 1 of its mask; 4 of the norm, 8 of a logit.

    Backward the norm moves twice as many, and the loss half.
    """
    tokens, h, words = 8 * 1024, 768, 50_257
    first, last = (stage_of(replace(GPT2, dropout=True), 8, j) for j in (0, -1))
    assert (moved(first.forward), moved(first.backward)) == (tokens * 9 * h, 2 * tokens * 9 * h)
    assert moved(last.forward) == tokens * (4 * h + 8 * words)
    assert moved(last.backward) == tokens * (8 * h + 4 * words)


WRONG = [
    ({"heads": 7}, "heads: 7 do not divide the width 768; give head_width, or other heads"),
    ({"gated": True}, "ffn: is missing; give the width of the gated MLP, which no rule says"),
    (
        {"key_value_heads": 5},
        "key_value_heads: 5 do not divide the 12 heads, of which several share one; give a divisor of 12",
    ),
    (
        {"positions": 512},
        "positions: 512 rows are fewer than the 1024 tokens of a sequence; lower length, or raise positions",
    ),
    ({"norms": 1}, "norms: 1 serves attention and MLP together; set parallel = true, or give 2 or 4"),
    (
        {"norms": 4, "parallel": True},
        "norms: 4 are before and behind each of two parts in turn; leave out parallel",
    ),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_contradictions_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        replace(GPT2, **change)
    assert str(caught.value) == words


def test_layers_and_stages_together_are_refused() -> None:
    shape = {"layers": 1, "width": 8, "heads": 1, "length": 4, "vocabulary": 9}
    with pytest.raises(RequestError, match=r"x: \$\.stages: and \[layers\] both say what its layers are; keep one"):
        Model.from_builtins({"layers": shape, "stages": [{"forward": 1, "backward": 1}]}, "x")
    with pytest.raises(RequestError, match=r"x: \$\.stages: are missing; give \[\[stages\]\], or the shape of"):
        Model.from_builtins({"name": "empty"}, "x")


def test_a_saved_model_is_its_shape() -> None:
    """Stages and ties are made of it again, to the bit."""
    model = Model.of_layers(LLAMA, samples=2, name="llama")
    assert "stages" not in model.table()
    assert Model.from_builtins(model.table(), "x") == model

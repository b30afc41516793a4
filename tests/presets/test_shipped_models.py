"""Profiles are what the commands in their first comments make; shipped shapes agree with them; what is known of both.

The profiles of gpt2, llama2-7b and llama3-8b, which are shapes now, are data of tests.
"""

import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace

from cdpsim import presets
from cdpsim.files.units import Work
from cdpsim.model import PRECISIONS, Model, Recipe
from cdpsim.model.recipe import apply_recipe
from tests.helpers.profiles import profiled

pytestmark = pytest.mark.filterwarnings("error")

NAMES = ("gpt2", "llama2-7b", "llama3-8b", "resnet50", "vit-b16")
SHAPES = ("gpt2", "llama2-7b", "llama3-8b")
FILES = Path(presets.__file__).parent / "models"


def file_of(name: str) -> Path:
    """The profile of a model."""
    return Path(profiled(name)) if name in SHAPES else FILES / f"{name}.toml"


# As their papers say: layers; an output layer of a language model has weights of its own here.
KNOWN = {
    # torchvision 0.20's table of models: 25,557,032; a stem, 16 bottlenecks, a head.
    "resnet50": (18, 25_557_032),
    # torchvision 0.20's table of models: 86,567,656; 12 blocks.
    "vit-b16": (14, 86_567_656),
    # Radford et al. 2019, table 2: 12 layers, width 768; 50,257 tokens, 1,024 places. Twelve blocks of 12 d^2 + 13 d.
    "gpt2": (14, (2 * 50_257 + 1024) * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768),
    # Touvron et al. 2023 (Llama 2), section 2.2: Llama 1's sizes (Touvron et al. 2023a, table 2: 32 layers, 4,096 wide,
    # 32 heads) and 32,000 tokens; 11,008 inside is two thirds of 4 * 4,096, up to a multiple of 256.
    "llama2-7b": (34, 2 * 32_000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096) + 4096),
    # Grattafiori et al. 2024, table 3: 32 layers, width 4,096, 8 of 32 heads for keys, 14,336 inside; 128,256 tokens.
    "llama3-8b": (
        34,
        2 * 128_256 * 4096 + 32 * ((2 + 2 / 4) * 4096**2 + 3 * 4096 * 14_336 + 2 * 4096) + 4096,
    ),
}


def command(name: str) -> list[str]:
    first, *_ = file_of(name).read_text().splitlines()
    assert first.startswith(f"# made by: python -m validation profile {name} ")
    return shlex.split(first.removeprefix("# made by: python -m validation "))


def test_these_ship() -> None:
    """Other profiles than those of language models."""
    plain = [name for name in presets.preset_names("models") if presets.model(name).layers is None]
    assert plain == sorted(set(NAMES) - set(SHAPES))


# Parameters in 10⁹, all and those that a token goes through, as papers print them. Llama: Grattafiori et al. 2024,
# table 1; Mixtral: Jiang et al. 2024, section 1; DeepSeek-V2 and V3: DeepSeek-AI 2024, abstracts; Qwen3-30B-A3B: its
# model card.
PRINTED = {
    "llama3-70b": (70, 70),
    "llama3-405b": (405, 405),
    "mixtral-8x7b": (47, 13),
    "deepseek-v2": (236, 21),
    "deepseek-v3": (671, 37),
    "qwen3-30b-a3b": (30.5, 3.3),
}
# To the last one, as transformers counts them in the published weights.
COUNTED = {"llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800, "mixtral-8x7b": 46_702_792_704}


@pytest.mark.parametrize("name", PRINTED)
def test_large_shapes_have_the_parameters_of_their_papers(name: str) -> None:
    shape = presets.model(name).layers
    assert shape is not None
    total, active = PRINTED[name]
    assert shape.numbers == COUNTED.get(name, shape.numbers)
    assert shape.numbers / 1e9 == pytest.approx(total, rel=5e-4 if name == "deepseek-v3" else 0.01)
    assert shape.active_numbers / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_what_its_numbers_are_in(name: str) -> None:
    model = Model.load(file_of(name))
    words = command(name)
    dtype = words[words.index("--dtype") + 1] if "--dtype" in words else "float32"
    assert model.precision == {"bfloat16": "bf16", "float32": "fp32"}[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_how_many_samples_a_micro_batch_has(name: str) -> None:
    words = command(name)
    assert Model.load(file_of(name)).samples == int(words[words.index("--batch") + 1])


@pytest.mark.parametrize("name", NAMES)
def test_a_language_model_says_how_many_tokens_a_sample_has(name: str) -> None:
    lengths = [int(word.removeprefix("length=")) for word in command(name) if word.startswith("length=")]
    assert Model.load(file_of(name)).tokens == (lengths[0] if lengths else None)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_as_many_layers_and_parameters_as_are_known(name: str) -> None:
    model = Model.load(file_of(name))
    layers, parameters = KNOWN[name]
    assert model.n == layers
    assert model.size("parameters").sum() == parameters * PRECISIONS[model.precision]


# Sequences of a micro-batch, heads, tokens (of ViT 14 x 14 patches and a class), width.
ATTENTION = {
    "gpt2": (8, 12, 1024, 768),
    "llama2-7b": (2, 32, 4096, 4096),
    "llama3-8b": (1, 32, 8192, 4096),
    "vit-b16": (32, 12, 14 * 14 + 1, 768),
}


@pytest.mark.parametrize("name", NAMES)
def test_blocks_say_what_fused_attention_keeps_and_costs(name: str) -> None:
    """A logarithm in fp32 for each head and token (Dao et al. 2022, algorithm 1); two products of pairs of tokens.

    Backwards compute the first of them again (algorithm 4).
    """
    for stage in Model.load(file_of(name)).stages:
        if stage.name != "block" or name not in ATTENTION:
            assert (stage.attention_activation, stage.attention_forward, stage.recomputed) == (0, None, None)
        else:
            b, a, s, h = ATTENTION[name]
            assert (stage.attention_activation, stage.attention_forward) == (4 * b * a * s, Work(4 * b * s * s * h))
            assert stage.recomputed == Work(2 * b * s * s * h)


@pytest.mark.parametrize(("name", "each_token"), [("llama3-8b", 57.91), ("llama2-7b", 46.08), ("gpt2", 0.8544)])
def test_the_flop_of_a_token_are_those_of_the_palm_paper(name: str, each_token: float) -> None:
    """Chowdhery et al. 2022, appendix B, in GFLOP: 6 for each weight of a product, and 12 L h s for attention."""
    model, (b, _, s, h) = Model.load(file_of(name)), ATTENTION[name]
    products = model.size("parameters").sum() / PRECISIONS["bf16"] - model.stages[0].numbers  # all but the embedding
    assert model.flop is not None
    assert model.flop / (b * s) == pytest.approx(6 * products + 12 * (model.n - 2) * h * s, rel=2e-3)
    assert model.flop / (b * s) / 1e9 == pytest.approx(each_token, rel=1e-3)


@pytest.mark.every_case
@pytest.mark.parametrize("how", ["layer", "layers:2", "selective", "reversible"])
@pytest.mark.parametrize("name", ATTENTION)
def test_transformers_compute_again_in_all_ways(name: str, how: str) -> None:
    """In whole backwards and in split ones, in several groups of layers."""
    for n in (1, 3, 14):
        trained = apply_recipe(Model.load(file_of(name)).without_curves(), Recipe(recompute=how), n)
        plain = Model.load(file_of(name)).grouped(n)
        assert trained.size("activation").sum() < plain.size("activation").sum()
        for own, other in zip(trained.stages, plain.stages, strict=True):
            assert own.weight_activation == other.weight_activation  # what the weights' part needs is left
        assert (trained.computed_flop or 0) > (trained.flop or 0) == plain.flop


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_agrees_with_its_profile(name: str) -> None:
    """To the number and the FLOP; its bytes are those of fused operations, and of a loss in fp32.

    What a split backward leaves for its weights' part is the same but for the gradients of norms, which a profile has
    there, and so is what its input's part needs where nothing but attention is fused in the profile, either.
    """
    shape, profile = presets.model(name), Model.load(profiled(name))
    assert (shape.n, shape.samples, shape.tokens) == (profile.n, profile.samples, profile.tokens)
    assert shape.size("parameters").tolist() == profile.size("parameters").tolist()
    if name == "gpt2":  # the others have queries, keys, values, gate and up in one matrix each
        assert shape.size("factored").tolist() == profile.size("factored").tolist()
    assert [tie.parameters for tie in shape.tied] == [tie.parameters for tie in profile.tied]
    assert shape.layers is not None
    plain = Model.of_layers(replace(shape.layers, dropout=False), samples=shape.samples)
    for own, other in zip(plain.stages[1:], profile.stages[1:], strict=True):
        for part in ("forward", "backward", "weight_backward"):
            assert float(getattr(own, part)) == float(getattr(other, part))
        assert own.attention_activation == other.attention_activation
        norms = (2 if own.name == "layer" else 1) * (2 if shape.layers.norm == "layer" else 1)  # vectors in 16 bits
        assert (other.weight_activation or 0) - (own.weight_activation or 0) == norms * 2 * shape.layers.width
        assert (own.weight_output, own.retained_gradients) == (other.weight_output, other.retained_gradients)
        if own.name == "layer":
            assert own.activation + own.size("input_transient") < other.activation + other.size("input_transient")
    if not shape.layers.tied:
        assert plain.stages[1].input_transient == profile.stages[1].input_transient


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_what_its_command_makes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from validation.profile.command import profile_command
    from validation.program import serve_harness

    words = command(name)
    assert words[-2:] == ["-o", f"{name}.toml"]
    made = tmp_path / f"{name}.toml"
    assert serve_harness([profile_command], [*words[:-1], str(made)]) == 0
    assert Model.load(made) == Model.load(file_of(name))
    shipped = file_of(name).read_text()
    assert made.read_text() == "".join(line for line in shipped.splitlines(True) if not line.startswith("#"))

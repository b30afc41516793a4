"""Models of configurations that transformers saved, against transformers' own models of them."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError
from cdpsim.model import Stage
from validation.profile import footprints as stages
from validation.profile.command import profile
from validation.replay.case import Case, expected_parameters, largest_difference, play_in_process, prepare
from validation.training.models import make_architecture
from validation.training.stages import Architecture

KINDS = {
    "resnet": ("ResNetConfig", "ResNetForImageClassification"),
    "vit": ("ViTConfig", "ViTForImageClassification"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 3}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}
GPT2 = {
    "vocab_size": 11,
    "n_positions": 7,
    "n_embd": 8,
    "n_layer": 3,
    "n_head": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 12,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 6}
BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {  # what `ZOO` says of them, in the words of transformers
    "resnet50": ("resnet", {"num_labels": 1000}),
    "vit-b16": ("vit", {"num_labels": 1000}),
    "gpt2": ("gpt2", {}),
    "llama-mini": (
        "llama",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
    ),
}


def saved(folder: Path, kind: str, **fields: Any) -> str:
    getattr(transformers, KINDS[kind][0])(**fields).save_pretrained(folder)
    return str(folder)


def written(folder: Path, content: object) -> str:
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "fields", "more"),
    [
        ("resnet", RESNET, {}),
        ("resnet", {**RESNET, "layer_type": "basic", "num_channels": 1, "downsample_in_first_stage": True}, {}),
        ("vit", VIT, {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}),
        ("gpt2", {**GPT2, "tie_word_embeddings": False}, {"resid_pdrop": 0.5}),
        ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True, "n_inner": 12}, {"tie_word_embeddings": True}),
        ("gpt2", {**GPT2, "reorder_and_upcast_attn": True}, {}),
        ("llama", LLAMA, {"attention_dropout": 0.5, "tie_word_embeddings": True, "dtype": "bfloat16"}),
        ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 8, "pad_token_id": 3}, {}),
        ("llama", {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, {}),
        ("llama", {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, {}),
        ("llama", {**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, {}),
        ("mistral", LLAMA, {}),
        ("mistral", {**LLAMA, "sliding_window": 5}, {}),
        ("qwen2", LLAMA, {}),
        ("qwen2", {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, {}),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_compute_what_the_model_of_transformers_does(
    kind: str, fields: dict[str, Any], more: dict[str, Any], attention: str, tmp_path: Path
) -> None:
    """Outputs agree bit by bit, for all ties, dropouts and types in the file; gradients agree but for rounding.

    In float32, to which several models round whatever they are in. A window makes transformers take another kernel,
    even where it hides nothing.
    """
    path = saved(tmp_path, kind, **fields, **more)
    sizes = {"image": 16} if kind == "resnet" else {"attention": attention}
    architecture = make_architecture(path, 1, batch=2, dtype=torch.float32, **sizes)
    model = reference(kind, fields, "eager" if kind == "resnet" else attention)
    layers, x = nn.Sequential(*architecture.layers), architecture.inputs(0)
    assert {parameter.dtype for parameter in layers.parameters()} == {torch.float32}
    found, output = layers(x), model(x, **({"use_cache": False} if x.dtype == torch.int64 else {})).logits
    assert torch.equal(found, output)
    ours, theirs = gradients(layers, architecture, found), gradients(model, architecture, output)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def reference(kind: str, fields: dict[str, Any], attention: str) -> nn.Module:
    """The model as transformers builds it, with the weights that `make_architecture` draws."""
    config, model = (getattr(transformers, name) for name in KINDS[kind])
    off = {"gpt2": ("embd_pdrop", "attn_pdrop", "resid_pdrop")}.get(kind, ())
    untied = {} if kind in ("resnet", "vit") else {"tie_word_embeddings": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built: nn.Module = model(
            config(**{**fields, **untied, **dict.fromkeys(off, 0.0)}, attn_implementation=attention)
        )
    return built


def gradients(module: nn.Module, architecture: Architecture, output: Tensor) -> tuple[Tensor, ...]:
    """Those of every parameter, which are in the same order here and there."""
    return torch.autograd.grad(architecture.loss(output, architecture.targets(1)), list(module.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_saved_configuration_is_profiled_as_the_built_in_model(name: str, tmp_path: Path) -> None:
    kind, fields = BUILT_IN[name]
    found = profile(saved(tmp_path, kind, **fields), 4, partition="3,6,9", batch=2)
    own = profile(name, 4, partition="3,6,9", batch=2)
    assert found.model.stages == own.model.stages
    assert (found.layers, found.run_whole()) == (own.layers, own.run_whole())


@pytest.mark.parametrize("name", ["vit-b16", "gpt2", "gpt2-mini", "llama-mini"])
def test_equal_blocks_are_measured_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last layer, and one block."""
    measure, measured = stages.measure_stage, []

    def counted(*given: Any) -> Stage:
        measured.append(given[1])
        return measure(*given)

    monkeypatch.setattr(stages, "measure_stage", counted)
    count = profile(name, batch=1).layers
    assert measured == [0, 1, count - 1]


def test_a_replay_of_a_configuration_is_the_equation(tmp_path: Path) -> None:
    prepared = prepare(Case("multi-cdp", 2, steps=2, model=saved(tmp_path, "qwen2", **LLAMA), sizes=(("length", 4),)))
    assert largest_difference(play_in_process(prepared), expected_parameters(prepared)) == 0


@pytest.mark.parametrize(
    ("kind", "fields", "shape"),
    [
        ("resnet", {**RESNET, "num_channels": 1}, (2, 1, 224, 224)),
        ("vit", VIT, (2, 3, 8, 8)),
        ("gpt2", GPT2, (2, 7)),
        ("llama", LLAMA, (2, 12)),
        ("llama", {**LLAMA, "max_position_embeddings": 131072}, (2, 8192)),
        ("mistral", {**LLAMA, "sliding_window": 5}, (2, 5)),
        ("qwen2", {**LLAMA, "sliding_window": 5}, (2, 12)),  # which it does not use
    ],
)
def test_sizes_are_the_configurations_unless_given(
    kind: str, fields: dict[str, Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    path = saved(tmp_path, kind, **fields)
    assert make_architecture(path, 1, batch=2, dtype=torch.float32).inputs.form.shape == shape
    size, given = ("image", (2, shape[1], 4, 4)) if len(shape) == 4 else ("length", (2, 4))
    assert (
        make_architecture(path, 1, batch=2, dtype=torch.float32, autocast=None, **{size: 4}).inputs.form.shape == given
    )


def test_a_folder_is_its_configuration_and_a_built_in_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "vit-mini"):
        saved(tmp_path / folder, "gpt2", **GPT2)
    names = ["mine", "mine/config.json", "./mine", "./vit-mini"]
    shapes = [make_architecture(name, 1, batch=2, dtype=torch.float32).inputs.form.shape for name in names]
    assert shapes == [(2, 7)] * 4
    assert make_architecture("vit-mini", 1, batch=2, dtype=torch.float32).inputs.form.shape == (2, 3, 32, 32)


def test_code_beside_a_configuration_does_not_run(tmp_path: Path) -> None:
    fields = json.loads((Path(saved(tmp_path, "llama", **LLAMA)) / "config.json").read_text())
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    hostile = {"auto_map": names, "_attn_implementation": "somebody/kernel", "attn_implementation": "somebody/kernel"}
    path = written(tmp_path, {**fields, **hostile})
    assert len(make_architecture(path, 1, batch=2, dtype=torch.float32).layers) == 4
    assert not (tmp_path / "ran").exists()


UNKNOWN_FAMILIES = (
    "mixtral",
    "qwen3",
    "deepseek_v2",
    "gemma",
    "phi3",
)  # of language models, as transformers names them


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "config.json: is empty"),
        ("{", "config.json: not JSON"),
        ([1], "config.json: has no model_type"),
        ({"vocab_size": 3}, "config.json: has no model_type; give a configuration as save_pretrained writes it"),
        ({"model_type": "bert"}, "unknown model_type 'bert'; known are resnet, vit, gpt2, llama, mistral, qwen2"),
        ({"model_type": ["vit"]}, r"unknown model_type \['vit'\]; known are"),
        *(({"model_type": family}, "; of any other give its layers as module:function") for family in UNKNOWN_FAMILIES),
        ({"model_type": "llama", "vocab_size": "x"}, "makes no model .*vocab_size.*; mend the configuration"),
        ({"model_type": "llama", "hidden_act": "no"}, "makes no model .*no.*; mend the configuration"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "of type 'dynamic'"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "set add_cross_attention to false"),
        ({"model_type": "vit", "image_size": [8, 4]}, "image_size must be one number; say --size image=K"),
        ({"model_type": "resnet", **RESNET, "num_labels": 0}, "has no labels to tell apart"),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_line(content: object, problem: str, tmp_path: Path) -> None:
    with torch.device("meta"), pytest.raises(RequestError, match=problem) as refusal:
        make_architecture(written(tmp_path, content), 1, batch=2, dtype=torch.float32)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.json", "missing.json: .*check its spelling"),
        ("./missing", "there is no such folder; give one that has a config.json, or a .json file"),
        ("./", "is a folder without a config.json; give the one that save_pretrained wrote"),
        ("missing", "unknown model 'missing'; known are mlp, .*resnet50"),
        ("mixtral", r"unknown model 'mixtral'; .* \(or give a config.json, or layers of yours as module:function\)"),
    ],
)
def test_a_missing_configuration_is_refused(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=problem):
        make_architecture(name, 1, batch=2, dtype=torch.float32)


def test_samples_longer_than_a_sliding_window_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "mistral", **{**LLAMA, "sliding_window": 5})
    with pytest.raises(RequestError, match="length 6 is more than its sliding window, 5; lower the length"):
        make_architecture(path, 1, batch=2, dtype=torch.float32, length=6)

"""Shapes of Hugging Face configurations: parameters as transformers counts them, and refused files."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim.errors import RequestError
from cdpsim.model import Model
from cdpsim.model.configurations import shape_fields
from cdpsim.model.layers import Layers

FAMILIES = [
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "granite"),
    *("gpt_neox", "falcon", "starcoder2", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
]
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}
needs_transformers = pytest.mark.skipif(
    not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")),
    reason="torch or transformers is missing",
)


def parameters(fields: dict[str, Any]) -> int:
    """Count the parameters of a shape by a closed form: matrices, biases and norms."""
    h, heads = fields["width"], fields["heads"]
    kv, d = fields.get("key_value_heads", heads), fields.get("head_width", h // heads)
    ffn, up = fields.get("ffn", 4 * h), 2 if fields.get("gated") else 1
    qkv, biases = (heads + 2 * kv) * d, fields["biases"]
    norm = 1 if fields.get("norm") == "rms" else 2
    attention = h * qkv + heads * d * h
    if latent := fields.get("key_value_rank"):
        query, turns, value = fields.get("query_rank"), fields["rope_width"], fields["value_width"]
        attention = query * (h + 1 + heads * (d + turns)) if query else h * heads * (d + turns)
        attention += h * (latent + turns) + latent + latent * heads * (d + value) + heads * value * h
    layer = attention + fields["norms"] * norm * h
    layer += qkv * bool(biases) + (2 * h + up * ffn) * (biases is True) + 2 * norm * d * fields.get("head_norms", False)
    first, every = fields.get("dense_layers", 0), fields.get("frequency", 1)
    mixed = sum(k >= first and (k + 1) % every == 0 for k in range(fields["layers"]) if "experts" in fields)
    experts = fields.get("experts", 0) * (1 + 3 * fields.get("expert_ffn", ffn)) + 3 * fields.get("shared_ffn", 0)
    tables = (1 if fields["tied"] else 2) * fields["vocabulary"] + fields["positions"]
    mlps = (fields["layers"] - mixed) * (up + 1) * ffn + mixed * experts
    return int(fields["layers"] * layer + (tables + norm + mlps) * h)


def counted(config: Any) -> int:
    """Count the parameters of a model of transformers, without their memory.

    A router's `e_score_correction_bias` is a buffer there, not a parameter.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@needs_transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_default_configurations_have_the_parameters_of_transformers(family: str) -> None:
    """Read from all fields, from those that differ from a bare configuration, and from the name alone."""
    from transformers import CONFIG_MAPPING

    more = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}  # without which it cannot compute
    config = CONFIG_MAPPING[family](**more)
    expected = counted(config)
    for content in (config.to_dict(), config.to_diff_dict(), {"model_type": family} | more):
        fields: dict[str, Any] = shape_fields(content, "config.json")
        assert Layers(**fields).numbers == parameters(fields) == expected


@needs_transformers
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_other_configurations_have_the_parameters_of_transformers(family: str, data: st.DataObject) -> None:
    """Of drawn sizes, heads, biases and ties, given alone or with all other fields."""
    from transformers import CONFIG_MAPPING

    heads, head = data.draw(st.sampled_from([2, 4, 6])), data.draw(st.sampled_from([8, 16]))
    content: dict[str, Any] = {
        "hidden_size": heads * head,
        "num_hidden_layers": data.draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "vocab_size": data.draw(st.integers(60_000, 60_100)),  # more than any number of a special token
        "max_position_embeddings": data.draw(st.integers(8, 64)),
        "tie_word_embeddings": data.draw(st.booleans()),
    }
    flag, ffn, kv = data.draw(st.booleans()), data.draw(st.integers(1, 200)), data.draw(st.sampled_from([1, 2, heads]))
    extra: dict[str, Any] = {"intermediate_size": ffn}
    if family == "gpt2":
        extra = {"n_inner": data.draw(st.sampled_from([None, ffn])), "attn_pdrop": 0}
    elif family == "falcon":
        extra = {"bias": flag, "ffn_hidden_size": ffn, "num_kv_heads": kv, "alibi": data.draw(st.booleans())}
        extra |= {"new_decoder_architecture": data.draw(st.booleans()), "multi_query": data.draw(st.booleans())}
        extra |= {"parallel_attn": extra["new_decoder_architecture"] or data.draw(st.booleans())}
        extra |= {"num_ln_in_parallel_attn": data.draw(st.sampled_from([None, 1, 2]))}
        if not extra["new_decoder_architecture"]:
            del extra["num_ln_in_parallel_attn"]  # read by the new decoder alone
    elif family == "gpt_neox":
        extra |= {"use_parallel_residual": flag}
    elif family.startswith("deepseek"):
        extra |= {name: data.draw(st.integers(1, 9)) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")}
        extra |= {"q_lora_rank": data.draw(st.sampled_from([None, 12])), "qk_rope_head_dim": 2}
        extra |= {"n_shared_experts": data.draw(st.integers(1, 2)), "n_routed_experts": data.draw(st.integers(2, 9))}
        extra |= {"first_k_dense_replace": data.draw(st.integers(0, content["num_hidden_layers"] - 1))}
    else:
        extra |= {"num_key_value_heads": kv, "head_dim": data.draw(st.sampled_from([8, 32]))}
        if family in ("llama", "granite"):
            extra |= {"attention_bias": flag, "mlp_bias": flag}
        if family == "starcoder2":
            extra |= {"use_bias": flag}
    if family == "mixtral":
        extra |= {"num_local_experts": data.draw(st.integers(2, 9))}
    elif family == "qwen3_moe":
        extra |= {"num_experts": data.draw(st.integers(8, 9))}
        extra |= {"decoder_sparse_step": data.draw(st.integers(1, content["num_hidden_layers"]))}
    if family.startswith("deepseek") or family == "qwen3_moe":
        extra |= {"moe_intermediate_size": data.draw(st.integers(1, 50)), "num_experts_per_tok": 2}
    content |= extra
    config = CONFIG_MAPPING[family](**content)
    expected = counted(config)
    for given_content in ({"model_type": family} | content, config.to_dict()):
        fields: dict[str, Any] = shape_fields(given_content, "config.json")
        assert Layers(**fields).numbers == parameters(fields) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model_type": "gpt2"}, {"dropout": True, "positions": 1024, "length": 1024, "biases": True}),
        ({"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0.0}, {"dropout": False}),
        ({"model_type": "gpt2", "hidden_size": 96}, {"width": 96}),
        ({"model_type": "mistral", "num_key_value_heads": None}, {"positions": 0, "norm": "rms", "gated": True}),
        ({"model_type": "qwen2"}, {"biases": "qkv"}),
        ({"model_type": "phi3", "embd_pdrop": 0.5}, {"dropout": False}),  # its code does not use it
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, {"causal": False, "norms": 4}),
        ({"model_type": "gpt_neox"}, {"parallel": True, "norms": 2}),
        ({"model_type": "falcon"}, {"parallel": True, "norms": 1, "key_value_heads": 1}),
        ({"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 1}, {"parallel": True, "norms": 2}),
        ({"model_type": "falcon", "parallel_attn": False, "alibi": True}, {"parallel": False, "norms": 2}),
        ({"model_type": "mixtral"}, {"experts": 8, "top_k": 2, "ffn": 14336}),
        ({"model_type": "qwen3_moe", "num_experts": 64}, {"experts": 64, "frequency": 1}),  # as in published files
        ({"model_type": "qwen3_moe", "num_local_experts": 64, "mlp_only_layers": []}, {"experts": 64}),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 1}, {"dense_layers": 3, "shared_ffn": 2048, "rope_width": 64}),
        ({"model_type": "deepseek_v3", "head_dim": 64}, {"head_width": 128}),  # there of what turns
        ({"model_type": "deepseek_v3", "n_shared_experts": 0}, {"shared_ffn": 0}),
    ],
)
def test_families_have_their_own_names_and_rules(content: dict[str, object], expected: dict[str, object]) -> None:
    assert shape_fields(content, "config.json").items() >= expected.items()


def test_null_heads_are_as_many_as_queries() -> None:
    """Although the default of the family is 8."""
    assert "key_value_heads" not in shape_fields({"model_type": "mistral", "num_key_value_heads": None}, "c")


@pytest.mark.parametrize(
    ("more", "words", "expected"),
    [
        ({"model_type": "new", "rms_norm_eps": 1e-6, "hidden_act": "silu"}, "rms-norms, gated-mlp", {"positions": 0}),
        ({"rms_norm_eps": 1e-6, "hidden_act": "relu2"}, "with rms-norms;", {"gated": False, "biases": False}),
        ({"hidden_act": "gelu"}, "biases, learned-positions", {"positions": 32, "norm": "layer"}),
        ({"attention_bias": False, "rope_theta": 1e4}, "plain layers", {"biases": False, "positions": 0}),
        ({"model_type": ["llama"], "head_dim": 32}, "['llama'] is unknown", {"head_width": 32}),
    ],
)
def test_an_unknown_family_is_read_with_a_note(
    more: dict[str, object], words: str, expected: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"gated": False, "norm": "layer"} | shape_fields(COMMON | more, "config.json")
    assert fields.items() >= expected.items()
    note = capsys.readouterr().err
    assert note.startswith("cdpsim: config.json: model_type ") and words in note and note.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, "model_type None is unknown, and fields are missing: hidden_size, num_hidden_layers"),
        ({"model_type": "t5", "hidden_size": 8}, "python -m validation profile module:function"),
        ({"model_type": "dbrx", "num_local_experts": 8}, "num_local_experts: a mixture of experts of a family without"),
        ({"model_type": "llama", "n_routed_experts": 256}, "n_routed_experts: a mixture of experts"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers: single layers without experts"),
        ({"model_type": "qwen3_moe", "num_experts": 0}, "num_experts: expected `int` >= 1"),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq: experts in every so many-th layer"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": None}, "kv_lora_rank: expected `int`, got `null`"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok: expected `int`, got `null`"),
        (
            {"model_type": "qwen2_moe", "num_experts": 60, "shared_expert_intermediate_size": 5632},
            "shared_expert_intermediate_size: a gate of the shared expert",
        ),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 8}}, "give the content of text_config"),
        ({"model_type": "x", "vision_config": {"hidden_size": 8}}, "vision_config: a model of images"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "a decoder that reads an encoder"),
        ({"model_type": "minicpm3", "kv_lora_rank": 256}, "kv_lora_rank: latent attention"),
        ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size: expected `int`, got `str`, not '4096'"),
        ({"model_type": "llama", "hidden_size": None}, "hidden_size: expected `int`, got `null`"),
        ({"model_type": "llama", "hidden_size": True}, "hidden_size: expected `int`, got `bool`"),
        ({"model_type": "llama", "vocab_size": 1.5}, "vocab_size: expected `int`, got `float`"),
        ({"model_type": "llama", "num_hidden_layers": -1}, "num_hidden_layers: expected `int` >= 1"),
        ({"model_type": "llama", "num_hidden_layers": 10**30}, "num_hidden_layers: "),
        ({"model_type": "llama", "num_key_value_heads": [8]}, "num_key_value_heads: expected `int | null`"),
        ({"model_type": "llama", "tie_word_embeddings": "no"}, "tie_word_embeddings: expected `bool | null`"),
        ({"model_type": "llama", "attention_dropout": -0.5}, "attention_dropout: expected `float` >= 0"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias: attention and MLP differ in having biases"),
        ({"model_type": "gpt_neox", "attention_bias": False}, "attention_bias: attention and MLP differ"),
        ({"model_type": "gpt2", "n_embd": {}}, "n_embd: expected `int`, got `object`"),
        ({"model_type": "falcon", "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn: "),
        (COMMON | {"head_dim": "\n"}, "head_dim: expected `int | null`, got `str`"),
    ],
)
def test_bad_files_are_refused_in_one_line(content: dict[str, object], problem: str) -> None:
    with pytest.raises(RequestError) as refused:
        shape_fields(content, "folder/config.json")
    line = str(refused.value)
    assert line.startswith("folder/config.json") and problem in line and "\n" not in line and "; " in line


def test_a_model_has_the_name_of_its_file_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path / "small")
    for file in ("config.json", "big.json"):
        Path(file).write_text('{"model_type": "gpt2"}')
    names = [Model.load(path).name for path in ("config.json", ".", tmp_path / "small", "big.json")]
    assert names == ["small", "small", "small", "big"]

"""Shapes of models from the `config.json` of Hugging Face transformers: a table of families and their defaults.

Not modelled: sliding windows (mistral, mixtral, qwen2, qwen3, gemma2, gemma3_text, phi3, starcoder2: every layer
attends to the whole sequence), caps and scales of scores and logits (gemma2, gemma3_text, granite), rotary positions
and ALiBi, the biases and groups of a router, and layers that predict further tokens (deepseek_v3).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from cdpsim.errors import RequestError, short_repr
from cdpsim.files.notes import say
from cdpsim.model.layers import PositionRows, Size

_NEEDED = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
_NEEDED |= {"vocab_size": "vocabulary", "max_position_embeddings": "length"}
_NULLABLE = {"intermediate_size": "ffn", "num_key_value_heads": "key_value_heads", "head_dim": "head_width"}
_MIXED = {"num_experts": "experts", "num_experts_per_tok": "top_k", "moe_intermediate_size": "expert_ffn"}
_MIXED |= {"first_k_dense_replace": "dense_layers", "n_shared_experts": "shared_ffn"}
_MIXED |= {"decoder_sparse_step": "frequency", "q_lora_rank": "query_rank", "kv_lora_rank": "key_value_rank"}
_MIXED |= {"qk_rope_head_dim": "rope_width", "v_head_dim": "value_width"}
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")  # names of one field, which families share
_DROPOUTS = "resid_pdrop embd_pdrop attn_pdrop attention_dropout residual_dropout embedding_dropout hidden_dropout"
_SWITCHES = (
    "attention_bias mlp_bias tie_word_embeddings use_bidirectional_attention use_parallel_residual parallel_attn"
)
_OF_SHAPE = _NEEDED | _NULLABLE | _MIXED
_TYPES: dict[str, Any] = {  # null is false, or the default of the shape
    **dict.fromkeys(_NEEDED, Size),
    **dict.fromkeys(_NULLABLE, Size | None),
    **dict.fromkeys(_DROPOUTS.split(), Annotated[float, msgspec.Meta(ge=0, le=1)] | None),
    **dict.fromkeys((*_SWITCHES.split(), "multi_query", "new_decoder_architecture"), bool | None),
    "num_ln_in_parallel_attn": Literal[1, 2] | None,
    **dict.fromkeys(_MIXED, Size),
    "first_k_dense_replace": PositionRows,
    "n_shared_experts": PositionRows | None,
    "q_lora_rank": Size | None,
}

_TRAITS: dict[str, dict[str, object]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qkv-biases": {"biases": "qkv"},
    "dropout": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "rms-norms": {"norm": "rms"},
    "head-norms": {"head_norms": True},
    "four-norms": {"norms": 4},
    "gated-mlp": {"gated": True},
    "tied-head": {"tie_word_embeddings": True},
    "parallel-residual": {"use_parallel_residual": True},
    "falcon": {"multi_query": True, "parallel_attn": True},
    "latent": {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "8-experts": dict(zip(_MIXED, (8, 2), strict=False)),
    "64-experts": dict(zip(_MIXED, (64, None, 1407, 0, 2), strict=False)),
    "128-experts": {**dict(zip(_MIXED, (128, 8, 768), strict=False)), "decoder_sparse_step": 1},
    "256-experts": dict(zip(_MIXED, (256, 8, 2048, 3, 1), strict=False)),
}
# Defaults in the order of _NEEDED and _NULLABLE, traits, and "!" before a field that the family's code does not read.
_FAMILIES = """
gpt2         768 12 12  50257   1024     -  -   - biases dropout tied-head learned-positions !num_key_value_heads
             !head_dim !attention_bias !mlp_bias
llama       4096 32 32  32000   2048 11008  -   - rms-norms gated-mlp
granite     4096 32 32  32000   2048 11008  -   - rms-norms gated-mlp
mistral     4096 32 32  32000 131072 14336  8   - rms-norms gated-mlp !attention_bias !mlp_bias
mixtral     4096 32 32  32000 131072 14336  8   - rms-norms gated-mlp 8-experts !attention_bias !mlp_bias
qwen2       4096 32 32 151936  32768 22016 32   - rms-norms gated-mlp qkv-biases !attention_bias !mlp_bias
qwen3       4096 32 32 151936  32768 22016 32 128 rms-norms gated-mlp head-norms !mlp_bias
qwen3_moe   2048 24 32 151936  32768  6144  4   - rms-norms gated-mlp head-norms 128-experts !mlp_bias
deepseek_v2 4096 32 32 102400   2048 11008  - 128 rms-norms gated-mlp 64-experts latent !num_key_value_heads
deepseek_v3 7168 61 128 129280  4096 18432  - 128 rms-norms gated-mlp 256-experts latent !num_key_value_heads
             !mlp_bias
phi3        3072 32 32  32064   4096  8192  -   - rms-norms gated-mlp !attention_bias !mlp_bias !embd_pdrop
gemma       3072 28 16 256000   8192 24576 16 256 rms-norms gated-mlp tied-head !mlp_bias
gemma2      2304 26  8 256000   8192  9216  4 256 rms-norms gated-mlp tied-head four-norms !mlp_bias
gemma3_text 2304 26  8 262208 131072  9216  4 256 rms-norms gated-mlp tied-head four-norms head-norms !mlp_bias
gpt_neox    6144 44 64  50432   2048 24576  -   - biases parallel-residual !mlp_bias !num_key_value_heads !head_dim
falcon      4544 32 71  65024   2048     -  -   - tied-head falcon !head_dim
starcoder2  3072 30 24  49152   4096 12288  2   - biases tied-head
""".replace("\n   ", " ")
_ROWS = {row.split()[0]: row.split()[1:] for row in _FAMILIES.strip().splitlines()}
_OWN_NAMES: dict[object, dict[str, str]] = {  # the names of fields in families that have their own
    "gpt2": {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    | {"max_position_embeddings": "n_positions", "intermediate_size": "n_inner"},
    "falcon": {"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"}
    | {"attention_bias": "bias", "mlp_bias": "bias"},
    "starcoder2": {"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    "deepseek_v2": {"head_dim": "qk_nope_head_dim"},
    "deepseek_v3": {"head_dim": "qk_nope_head_dim"},
}
_REMEDY = "profile the model instead: python -m validation profile module:function"
_OTHERS = {
    "text_config": "several models in one; give the content of text_config as a file of its own",
    "vision_config": f"a model of images; {_REMEDY}",
    "is_encoder_decoder": f"an encoder and a decoder; {_REMEDY}",
    "add_cross_attention": f"a decoder that reads an encoder; {_REMEDY}",
    "mlp_only_layers": f"single layers without experts, which a shape cannot say; {_REMEDY}",
    "shared_expert_intermediate_size": f"a gate of the shared expert, which a shape cannot say; {_REMEDY}",
    "moe_layer_freq": f"experts in every so many-th layer, which this family counts from 0; {_REMEDY}",
    "kv_lora_rank": f"latent attention of a family without a shape; {_REMEDY}",
}


def shape_fields(content: Mapping[str, object], subject: str) -> dict[str, object]:
    """Return the fields of the shape that the content of a `config.json` describes."""
    kind = content.get("model_type")
    row = _ROWS[kind] if isinstance(kind, str) and kind in _ROWS else None
    _refuse_others(content, row or [], subject)
    row = row or _guess(content, subject)
    given = _read(content, row, _OWN_NAMES.get(kind, {}) if isinstance(kind, str) else {}, subject)
    if bool(given["attention_bias"]) != bool(given["mlp_bias"]):
        problem = "attention and MLP differ in having biases, which a shape cannot say"
        raise RequestError(f"{subject}: attention_bias", f"{problem}; {_REMEDY}")
    new, norms = given["new_decoder_architecture"], given["num_ln_in_parallel_attn"]
    if "falcon" in row and not new:
        given["num_key_value_heads"] = 1 if given["multi_query"] else None
    if given.get("n_shared_experts"):
        given["n_shared_experts"] *= given["moe_intermediate_size"]
    parallel = given["parallel_attn"] or new
    names = ("activation_function", "hidden_act", "hidden_activation")
    function = next((content[name] for name in names if content.get(name)), "gelu_new" if kind == "gpt2" else None)
    fields = {
        **{field: given[name] for name, field in _OF_SHAPE.items() if given.get(name) is not None},
        "dropout": any(given[name] for name in _DROPOUTS.split()),
        "biases": bool(given["attention_bias"]),
        "tied": bool(given["tie_word_embeddings"]),
        "causal": not given["use_bidirectional_attention"],
        "activation": "gelu_new" if function == "gelu_new" else None,
        "parallel": bool(parallel or given["use_parallel_residual"]),
        "norms": (norms or (2 if new else 1)) if parallel else 2,
        **{name: given[name] for name in given.keys() - _TYPES.keys()},  # of the traits
    }
    return fields | {"positions": given["max_position_embeddings"] if "learned-positions" in row else 0}


def _refuse_others(content: Mapping[str, object], row: list[str], subject: str) -> None:
    """Refuse models that a shape cannot say; families with experts have fields of experts and of latent attention."""
    has_experts = any(trait.endswith("-experts") for trait in row)
    for name in sorted(content, key=lambda name: name not in _OTHERS):
        is_read = has_experts and (name == "kv_lora_rank" or name not in _OTHERS)
        is_plain = not content[name] or (name, content[name]) == ("moe_layer_freq", 1)
        if not is_plain and not is_read and ("experts" in name or name in _OTHERS):
            problem = _OTHERS.get(name, f"a mixture of experts of a family without a shape; {_REMEDY}")
            raise RequestError(f"{subject}: {name}", problem)


def _read(content: Mapping[str, object], row: list[str], names: Mapping[str, str], subject: str) -> dict[str, Any]:
    sizes = (None if word == "-" else int(word) for word in row[:8])
    values: dict[str, object] = dict(zip((*_NEEDED, *_NULLABLE), sizes, strict=True))
    for trait in row[8:]:
        values |= _TRAITS.get(trait, {})
    for name, form in _TYPES.items():
        if name in _MIXED and name not in values:
            continue
        own = names.get(name, name)
        if own not in content and name in _NEEDED:
            own = name  # transformers reads both names of these
        elif name == "num_experts":
            own = next((other for other in _EXPERTS if other in content), own)
        if f"!{name}" not in row:
            values[name] = content.get(own, values.get(name))
        try:
            values[name] = msgspec.convert(values.get(name), form)
        except msgspec.ValidationError as error:
            problem = f"{str(error)[0].lower()}{str(error)[1:]}, not {short_repr(content.get(own))}"
            raise RequestError(f"{subject}: {own}", f"{problem}; mend it there") from None
    return values


def _guess(content: Mapping[str, object], subject: str) -> list[str]:
    """Return the row of a family that is not in the table."""
    kind = f"model_type {short_repr(content.get('model_type'))} is unknown"
    if missing := [name for name in _NEEDED if content.get(name) is None]:
        raise RequestError(subject, f"{kind}, and fields are missing: {', '.join(missing)}; {_REMEDY}")
    rms = "rms_norm_eps" in content
    activation = str(content.get("hidden_act"))
    rotary = rms or any(name.startswith(("rope", "rotary", "partial_rotary", "alibi")) for name in content)
    traits = {
        "rms-norms": rms,
        "gated-mlp": activation in ("silu", "swish") or (rms and "relu" not in activation),
        "biases": not rms and not content.keys() & {"attention_bias", "mlp_bias"},
        "learned-positions": not rotary,
    }
    row = [trait for trait, has in traits.items() if has]
    say(f"{subject}: {kind}; read as a decoder with {', '.join(row) or 'plain layers'}; compare its parameters")
    return ["-"] * 8 + row

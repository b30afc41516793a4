"""Models of `transformers` by name, and of a configuration that transformers wrote; see `families.py`."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cdpsim.errors import RequestError
from cdpsim.files import config

from .families import FAMILIES, Description
from .stages import Build

CONFIG = "config.json"

# The small ones ("mini") have ten layers, for eight stages on a CPU. A bias of keys would have no influence in ViT's:
# its gradient is rounding alone, which Adam divides by itself. (GPT-2's is part of one larger bias.)
_FIELDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "resnet50": {"model_type": "resnet", "num_labels": 1000},
        "vit-b16": {"model_type": "vit", "num_labels": 1000},
        "gpt2": {"model_type": "gpt2"},
        "llama2-7b": {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        "llama3-8b": {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "resnet-mini": {
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [16, 16, 32, 32],
            "depths": [2, 2, 2, 2],
            "num_labels": 10,
        },
        "vit-mini": {
            "model_type": "vit",
            "image_size": 32,
            "patch_size": 8,
            "hidden_size": 32,
            "num_hidden_layers": 8,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "qkv_bias": False,
            "num_labels": 10,
        },
        "gpt2-mini": {
            "model_type": "gpt2",
            "vocab_size": 64,
            "n_positions": 16,
            "n_embd": 32,
            "n_head": 2,
            "n_layer": 8,
        },
        "llama-mini": {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16,
        },
    }
)
_SIZES = {"resnet-mini": {"image": 64}}  # sizes that a configuration does not have


def _built_in(name: str) -> Build:
    fields = _FIELDS[name]
    return FAMILIES[fields["model_type"]](Description(name, fields), **_SIZES.get(name, {}))


ZOO: Mapping[str, Build] = MappingProxyType({name: _built_in(name) for name in _FIELDS})


def is_config(name: str) -> bool:
    """Return whether a model's name is the path of a configuration, or of a folder that has one."""
    return name.endswith(".json") or ("/" in name and ":" not in name) or (Path(name) / CONFIG).is_file()


def configured_model(path: str) -> Build:
    """Return how to build the model of a configuration of transformers: a `config.json`, or a folder that has one.

    The file is read as data: nothing is downloaded, and no code beside it is run. A size that is not given is the
    configuration's: `image` its image_size (224 for a ResNet, whose has none), `length` its n_positions, or its
    max_position_embeddings up to `families.LONGEST` and up to its sliding window.
    """
    file = Path(path)
    if file.is_dir():
        file /= CONFIG
        if not file.exists():
            raise RequestError(path, f"is a folder without a {CONFIG}; give the one that save_pretrained wrote")
    elif file.suffix != ".json":
        raise RequestError(path, "there is no such folder; give one that has a config.json, or a .json file")
    fields = config.read_config(file)
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise RequestError(str(file), "has no model_type; give a configuration as save_pretrained writes it")
    kind = fields["model_type"]
    if kind not in list(FAMILIES):  # in a list, since it may be anything
        problem = f"unknown model_type {kind!r}; known are {', '.join(FAMILIES)}"
        raise RequestError(str(file), f"{problem}; of any other give its layers as module:function")
    return FAMILIES[kind](Description(str(file), fields))

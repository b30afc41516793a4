"""What layers of torch and of transformers keep for their backward, beside what the shape of their model says."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cdpsim.model import Model, Stage
from cdpsim.model.configurations import shape_fields
from cdpsim.model.layers import Layers
from cdpsim.model.runtime import layer_habits, read_runtime
from cdpsim.model.splitting import Mesh
from tests.helpers.every_row import every_row

LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 176, "vocab_size": 60}
GPT2 = {"n_embd": 64, "n_head": 4, "vocab_size": 60} | dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
SAMPLES, LENGTH = 2, 16


def kept_storages(module: nn.Module, run: Callable[[], Any]) -> int:
    """Return the bytes of the storages that autograd keeps of a forward, but for parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for storage, tensor in kept.items() if storage not in own)


def layer_of_transformers(family: str, fields: dict[str, Any], dtype: Any) -> tuple[nn.Module, Callable[[], Any]]:
    """Return the first layer that transformers builds, and its forward of samples without a mask."""
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": LENGTH, "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**fields | sizes)).to(dtype).train()
    x = torch.randn(SAMPLES, LENGTH, 64, dtype=dtype, requires_grad=True)
    if family == "gpt2":
        (block,) = model.transformer.h
        return block, lambda: block(x)
    (block,) = model.model.layers
    angles = model.model.rotary_emb(x, torch.arange(LENGTH)[None])
    return block, lambda: block(x, position_embeddings=angles, attention_mask=None)


def layer_stage(shape: Layers, runtime: str, precision: str, samples: int = SAMPLES) -> Stage:
    """Return the stage of the first layer, as a runtime has it."""
    habits = layer_habits(read_runtime(runtime))
    return Model.of_layers(shape, Mesh(**habits), samples=samples, precision=precision).stages[1]


@every_row(
    ("family", "fields", "precision"),
    [
        ("llama", LLAMA, "bf16"),
        ("llama", LLAMA, "fp32"),
        ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}, "bf16"),
        ("llama", LLAMA | {"hidden_act": "gelu_new"}, "bf16"),
        ("mistral", LLAMA | {"num_key_value_heads": 1, "head_dim": 24}, "bf16"),
        ("qwen3", LLAMA | {"num_key_value_heads": 2, "head_dim": 24}, "bf16"),
        ("qwen3", LLAMA | {"num_key_value_heads": 2, "head_dim": 32}, "fp32"),
        ("gpt2", GPT2, "fp32"),
        ("gpt2", GPT2 | {"activation_function": "gelu", "n_inner": 100}, "fp32"),
    ],
)
def test_a_layer_of_transformers_keeps_what_its_shape_says(family: str, fields: dict[str, Any], precision: str) -> None:
    """To the byte, and nothing of its input where that is kept in float32; layer norms on CPUs, in float32 alone."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    module, run = layer_of_transformers(family, fields, dtype)
    content = {"model_type": family, "num_hidden_layers": 1, "max_position_embeddings": LENGTH} | fields
    shape: dict[str, Any] = shape_fields(content, "x")
    stage = layer_stage(Layers(**shape), "transformers", precision)
    assert stage.activation - stage.unused_input == kept_storages(module, run)
    assert stage.unused_input == (stage.boundary if precision == "bf16" else 0)


def test_gelu_new_keeps_five_tensors_and_a_gelu_one() -> None:
    """Of each the input; of gelu_new also its half, tanh, 1 + tanh, and the output, if it is read by a product."""
    x = torch.randn(8, 8, requires_grad=True)
    weight = nn.Linear(8, 8, bias=False)
    for name, tensors in (("gelu_new", 5), ("gelu", 2)):
        function = transformers.activations.ACT2FN[name]
        assert kept_storages(weight, lambda function=function: weight(function(x))) == tensors * 4 * 64  # type: ignore[misc]

"""What layers of torch and of transformers keep for their backward, beside what the shape of their model says."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cdpsim import simulate
from cdpsim.model import Model, Recipe, Stage
from cdpsim.model.configurations import shape_fields
from cdpsim.model.layers import Layers
from cdpsim.model.recipe import apply_recipe
from cdpsim.model.runtime import layer_habits, read_runtime
from cdpsim.model.splitting import Mesh
from tests.helpers.every_row import every_row
from tests.validation.measured_tables import RESULTS
from validation.profile.hugging_face import load_steps

LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 176, "vocab_size": 60}
GPT2 = {"n_embd": 64, "n_head": 4, "vocab_size": 60} | dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
SAMPLES, LENGTH = 2, 16
CORE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


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
    habits: dict[str, Any] = {**layer_habits(read_runtime(runtime))}
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
    """To the byte, and nothing of its input where that is kept in float32; layer norms on CPUs, in float32 alone.

    Seconds, for the modules of four families.
    """
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


@pytest.mark.parametrize(
    ("name", "dtype", "least", "most"), [("llama", "bfloat16", 0, 0.02), ("gpt2", "float32", -0.09, 0)]
)
def test_a_step_on_an_h100_takes_what_a_shape_says(name: str, dtype: str, least: float, most: float) -> None:
    """Beyond parameters and moments; GPT-2 lacks its logits, which transformers returns: 1.65 of 13.45 GB."""
    steps = load_steps(str(RESULTS / "hugging-face-cuda-2026-11-26.json")).steps
    step = next(step for step in steps if step.name.startswith(name) and (step.dtype, step.autocast) == (dtype, False))
    content = {**shape_fields(step.config, "x"), "length": step.length, "dropout": False}
    facts = {"precision": {"bfloat16": "bf16", "float32": "fp32"}[dtype], "samples": step.batch}
    model = Model.from_builtins(
        {"layers": {key: value for key, value in content.items() if value is not None}} | facts, "x"
    )
    run = simulate("dp", 1, m=1, model=model, cluster="h100-node", optimizer="adam", runtime="transformers")
    found = int(run.peaks[0, -1]) - 3 * model.parameter_bytes
    assert least <= found / step.activations - 1 <= most


class Block(nn.Module):
    """A layer of Llama as torchtitan has it, of separate products."""

    def __init__(self, h: int, heads: int, kv: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.kv, d = heads, kv, h // heads
        outputs = {"wq": h, "wk": kv * d, "wv": kv * d, "wo": h, "w1": ffn, "w3": ffn}
        self.products = nn.ModuleDict({name: nn.Linear(h, size, bias=False) for name, size in outputs.items()})
        self.products["w2"] = nn.Linear(ffn, h, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(h) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return the layer's output."""
        of, y = self.products, self.norms[0](x)
        q, k, v = (of[name](y).unflatten(-1, (-1, 16)).transpose(1, 2) for name in ("wq", "wk", "wv"))
        q, k = q * angles, k * angles
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + of["wo"](o.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + of["w2"](nn.functional.silu(of["w1"](y)) * of["w3"](y))


def policy_of(operators: str) -> Callable[[], Any]:
    """Return what makes the contexts of a checkpoint with torchtitan's policy: a list, and every second product."""

    def contexts() -> Any:
        counts = {True: 0, False: 0}

        def policy(context: Any, function: Any, *_args: Any, **_more: Any) -> CheckpointPolicy:
            keeps = function == CORE and "core" in operators
            if function == torch.ops.aten.mm.default:
                counts[context.is_recompute] += 1
                second = "products/2" in operators and counts[context.is_recompute] % 2 == 0
                keeps = "products" in operators and not second
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


class Storages(TorchDispatchMode):
    """All storages that operations have made, which this does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the operation makes."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def there(self, *but: Tensor) -> int:
        """Return the bytes of those that are there, but for the storages of some tensors."""
        others = {tensor.untyped_storage()._cdata for tensor in but}
        kept = self.made.items()
        return sum(size for key, (storage, size) in kept if key not in others and not storage.expired())


@pytest.mark.parametrize("operators", ["products/2+core", "products+core", "products/2", "core", "products"])
def test_operators_keep_what_they_keep_under_a_policy_of_torchtitan(operators: str) -> None:
    """Kept bytes, and FLOP of what the backward computes again, of a small layer in one checkpoint."""
    h, heads, kv, ffn = 64, 4, 2, 176
    block, x = Block(h, heads, kv, ffn), torch.randn(SAMPLES, LENGTH, h, requires_grad=True)
    angles = torch.randn(LENGTH, h // heads)
    counts: Any = {"display": False, "custom_mapping": {CORE.overloadpacket: lambda q, *_, **__: 4 * prod(q) * q[2]}}
    with FlopCounterMode(**counts) as counted:
        with Storages() as storages:
            output = checkpoint(
                block, x, angles, use_reentrant=False, context_fn=policy_of(operators), early_stop=False
            )
        found = storages.there(output, *block.parameters())
        output.sum().backward()
    with FlopCounterMode(**counts) as plain:
        block(x, angles).sum().backward()
    flop = counted.get_total_flops() - plain.get_total_flops()
    shape = Layers(
        layers=1,
        width=h,
        heads=heads,
        key_value_heads=kv,
        length=LENGTH,
        vocabulary=60,
        ffn=ffn,
        gated=True,
        norm="rms",
        biases=False,
        tied=False,
        positions=False,
    )
    model = Model.of_layers(shape, samples=SAMPLES, precision="fp32")
    stage = apply_recipe(model, Recipe(recompute=f"selective:{operators}")).stages[1]
    assert stage.activation == found
    assert stage.recomputed is not None and model.stages[1].recomputed is not None
    assert float(stage.recomputed) == flop + float(model.stages[1].recomputed)  # of the core's own backward

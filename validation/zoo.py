"""Models of `transformers` as layers: modules from one tensor to one tensor, which a partition cuts into stages.

Each is built from a configuration with random weights; nothing is downloaded. Composed, its layers compute what the
model of transformers computes with the same weights, with these exceptions, all of which stages ask for:

* GPT-2's output layer has weights of its own (163,037,184 parameters instead of 124,439,808): stages on different
  devices cannot share a tensor.
* BatchNorm keeps no running statistics: a forward that changes the module would not be the same one twice.
* Every Llama block computes its rotary embedding, and with attention "eager" every block of GPT-2 and Llama holds the
  causal mask: what goes from layer to layer is one tensor.
* Llama's norms compute in float64 where the model does (transformers: in float32, whatever the model does).
* Dropout is off.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError, choose
from validation.forms import Form
from validation.training import Architecture, Build, Draw, cross_entropy

ATTENTIONS = ("sdpa", "eager")


class RootMeanSquareNorm(nn.Module):
    """Llama's norm, in float32 or better."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Divide each vector by the root of its mean square."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class FirstToken(nn.Module):
    """Takes the class token of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to (batch, width)."""
        return x[:, 0, :]


class TokensAndPositions(nn.Module):
    """GPT-2's first layer: an embedding of tokens and one of positions."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length) to (batch, length, width)."""
        y: Tensor = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)[None])
        return y


class Rotary(nn.Module):
    """Llama's rotary embedding, in float32; that of transformers writes into itself when it runs."""

    frequencies: Tensor

    def __init__(self, frequencies: Tensor, scaling: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.scaling = scaling

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Give cosine and sine for each position of (batch, length, width)."""
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = (positions[:, None] * self.frequencies.float()).repeat(1, 2)[None]
        return (angles.cos() * self.scaling).to(x.dtype), (angles.sin() * self.scaling).to(x.dtype)


class CausalBlock(nn.Module):
    """A block of GPT-2 or Llama with the mask that its attention needs, if any, and Llama's rotary embedding."""

    def __init__(self, block: nn.Module, mask: Tensor | None, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        more = {} if self.rotary is None else {"position_embeddings": self.rotary(x)}
        y: Tensor = self.block(x, attention_mask=self.mask, **more)
        return y


def causal_mask(length: int, attention: str) -> Tensor | None:
    """Give what eager attention adds to its scores; the fused kernels know what causal means."""
    if attention == "sdpa":
        return None
    return torch.full((1, 1, length, length), -torch.inf).triu(1)


def resnet(image: int, **options: Any) -> Build:
    """Say how to build a ResNet: its stem, its bottlenecks and its head."""

    def build(n: int, *, batch: int, dtype: torch.dtype, image: int = image) -> Architecture:
        config = _transformers().ResNetConfig(**options)
        model = _transformers().ResNetForImageClassification(config)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
        blocks = [block for stage in model.resnet.encoder.stages for block in stage.layers]
        head = nn.Sequential(model.resnet.pooler, model.classifier)
        layers = [model.resnet.embedder, *blocks, head]
        return _classifier(layers, Form((batch, 3, image, image), dtype), config.num_labels)

    return build


def vit(image: int, **options: Any) -> Build:
    """Say how to build a vision transformer: its embedding, its blocks and its head."""

    def build(n: int, *, batch: int, dtype: torch.dtype, image: int = image, attention: str = "sdpa") -> Architecture:
        kernel = choose("attention", attention, ATTENTIONS)
        config = _transformers().ViTConfig(image_size=image, attn_implementation=kernel, **options)
        model = _transformers().ViTForImageClassification(config)
        head = nn.Sequential(model.vit.layernorm, FirstToken(), model.classifier)
        layers = [model.vit.embeddings, *model.vit.layers, head]
        return _classifier(layers, Form((batch, 3, image, image), dtype), config.num_labels)

    return build


def gpt2(length: int, **options: Any) -> Build:
    """Say how to build a GPT-2: its embedding, its blocks and its head."""

    def build(n: int, *, batch: int, dtype: torch.dtype, length: int = length, attention: str = "sdpa") -> Architecture:
        kernel = choose("attention", attention, ATTENTIONS)
        config = _transformers().GPT2Config(n_positions=length, attn_implementation=kernel, **_GPT2, **options)
        model = _transformers().GPT2LMHeadModel(config)
        mask = causal_mask(length, attention)
        blocks = [CausalBlock(block, mask) for block in model.transformer.h]
        first = TokensAndPositions(model.transformer.wte, model.transformer.wpe)
        head = nn.Sequential(model.transformer.ln_f, model.lm_head)
        return _language_model([first, *blocks, head], batch, length, config.vocab_size)

    return build


def llama(length: int, **options: Any) -> Build:
    """Say how to build a Llama: its embedding, its blocks and its head."""

    def build(n: int, *, batch: int, dtype: torch.dtype, length: int = length, attention: str = "sdpa") -> Architecture:
        kernel = choose("attention", attention, ATTENTIONS)
        config = _transformers().LlamaConfig(max_position_embeddings=length, attn_implementation=kernel, **options)
        model = _transformers().LlamaForCausalLM(config)
        mask = causal_mask(length, attention)
        for block in model.model.layers:
            block.input_layernorm = _wide(block.input_layernorm)
            block.post_attention_layernorm = _wide(block.post_attention_layernorm)
        own = model.model.rotary_emb
        blocks = [CausalBlock(block, mask, Rotary(own.inv_freq, own.attention_scaling)) for block in model.model.layers]
        head = nn.Sequential(_wide(model.model.norm), model.lm_head)
        return _language_model([model.model.embed_tokens, *blocks, head], batch, length, config.vocab_size)

    return build


def _wide(norm: Any) -> RootMeanSquareNorm:
    return RootMeanSquareNorm(norm.weight, norm.variance_epsilon)


def _classifier(layers: list[nn.Module], images: Form, classes: int) -> Architecture:
    labels = Form((images.shape[0],), torch.int64)
    return Architecture(layers, Draw(images), Draw(labels, classes), cross_entropy)


def _language_model(layers: list[nn.Module], batch: int, length: int, vocabulary: int) -> Architecture:
    """Whose targets, the next tokens, are drawn like its input."""
    tokens = Draw(Form((batch, length), torch.int64), vocabulary)
    return Architecture(layers, tokens, tokens, cross_entropy)


# transformers warns of these tokens where a vocabulary is smaller than their usual numbers.
_NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_GPT2 = {"tie_word_embeddings": False, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}

# The small ones ("mini") have ten layers, for eight stages on a CPU. A bias of keys would have no influence in ViT's:
# its gradient is rounding alone, which Adam divides by itself. (GPT-2's is part of one larger bias.)
ZOO: Mapping[str, Build] = MappingProxyType(
    {
        "resnet50": resnet(224, num_labels=1000),
        "vit-b16": vit(224, num_labels=1000),
        "gpt2": gpt2(1024),
        "llama3-8b": llama(
            8192,
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        ),
        "resnet-mini": resnet(64, embedding_size=8, hidden_sizes=[16, 16, 32, 32], depths=[2, 2, 2, 2], num_labels=10),
        "vit-mini": vit(
            32,
            patch_size=8,
            hidden_size=32,
            num_hidden_layers=8,
            num_attention_heads=2,
            intermediate_size=64,
            qkv_bias=False,
            num_labels=10,
        ),
        "gpt2-mini": gpt2(16, vocab_size=64, n_embd=32, n_head=2, n_layer=8, **_NO_TOKENS),
        "llama-mini": llama(
            16,
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            **_NO_TOKENS,
        ),
    }
)


def _transformers() -> Any:
    """Import transformers when it is needed: it is slow, and an extra."""
    try:
        return import_module("transformers")
    except ImportError:
        raise RequestError("transformers", "is not installed; run `pip install 'cdpsim[models]'`") from None

"""Families of models in `transformers`, taken apart into layers: modules from one tensor to one tensor.

Each is built from a configuration with random weights; nothing is downloaded. Composed, its layers compute the same as
the model of transformers with the same weights, with these exceptions, all of which stages need:

* A language model's output layer has weights of its own, also where the model ties them to its embedding's: stages on
  different devices cannot share a tensor. `Architecture.tied` says so, and a profile counts them once (GPT-2's
  124,439,808 parameters); a replay trains both (163,037,184).
* BatchNorm keeps no running statistics: a forward that changes the module would differ the second time.
* Every Llama block computes its rotary embedding, and with attention "eager" every block of GPT-2 and Llama holds the
  causal mask: layers pass only one tensor to each other.
* Llama's norms compute in float64 where the model does (transformers: always in float32).
* Dropout is off, and no activation is computed twice.

The statements about Llama hold for Mistral and Qwen2, too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError, choose

from .forms import Form
from .modules import Unfit, describe_unfit, installed, require
from .stages import Architecture, Draw, cross_entropy

ATTENTIONS = ("sdpa", "eager")
ROTARIES = ("default", "linear", "llama3", "yarn")  # the others change their frequencies as they run
MOST_TOKENS = 8192  # tokens of a sample, where a configuration allows more and no length is given


class Description(NamedTuple):
    """A configuration as its file has it, and its name in errors."""

    name: str
    fields: Mapping[str, Any]


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
    """The class token of a sequence, as a layer."""

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
    """Llama's rotary embedding, in float32; that of transformers changes itself when it runs."""

    frequencies: Tensor

    def __init__(self, frequencies: Tensor, scaling: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.scaling = scaling

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for each position of (batch, length, width)."""
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = (positions[:, None] * self.frequencies.float()).repeat(1, 2)[None]
        return (angles.cos() * self.scaling).to(x.dtype), (angles.sin() * self.scaling).to(x.dtype)


class CausalBlock(nn.Module):
    """A block of GPT-2 or Llama with the mask that its attention needs, if any, and Llama's rotary embedding."""

    def __init__(self, block: nn.Module, mask: Tensor | None, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary
        for part in block.modules():
            if hasattr(part, "layer_idx"):  # its place in an unused cache; without it, equal blocks compare equal
                vars(part)["layer_idx"] = None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        more = {} if self.rotary is None else {"position_embeddings": self.rotary(x)}
        y: Tensor = self.block(x, attention_mask=self.mask, **more)
        return y


@contextmanager
def _taking_apart() -> Iterator[None]:
    """Refuse, in one line, a model of transformers without the parts that its family should have."""
    try:
        yield
    except AttributeError as error:
        problem = f"{installed('transformers')} builds this model of other parts ({error})"
        raise Unfit("transformers", f"{problem}; take the version that constraints.txt has") from error


def causal_mask(length: int, attention: str) -> Tensor | None:
    """Return the mask that eager attention adds to its scores; fused kernels need none."""
    if attention == "sdpa":
        return None
    return torch.full((1, 1, length, length), -torch.inf).triu(1)


@_taking_apart()
def resnet(given: Description, n: int, *, batch: int, dtype: torch.dtype, image: int = 224) -> Architecture:
    """Build a ResNet: its stem, its blocks and its head, by the names of its paper (table 1)."""
    config = _config(given, "ResNetConfig")
    model = _made(given, _transformers("ResNetForImageClassification"), config)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    parts = {f"conv{k}_x": stage.layers for k, stage in enumerate(model.resnet.encoder.stages, 2)}
    head = nn.Sequential(model.resnet.pooler, model.classifier)
    blocks = [block for part in parts.values() for block in part]
    names = ["conv1", *(name for name, part in parts.items() for _ in part), "head"]
    return _classifier([model.resnet.embedder, *blocks, head], batch, dtype, image, config)._replace(names=names)


@_taking_apart()
def vit(
    given: Description, n: int, *, batch: int, dtype: torch.dtype, image: int | None = None, attention: str = "sdpa"
) -> Architecture:
    """Build a vision transformer: its embedding, its blocks and its head."""
    config = _config(given, "ViTConfig", attention, **({} if image is None else {"image_size": image}))
    if not isinstance(config.image_size, int):
        raise RequestError(given.name, "its image_size must be one number; say --size image=K")
    model = _made(given, _transformers("ViTForImageClassification"), config)
    head = nn.Sequential(model.vit.layernorm, FirstToken(), model.classifier)
    return _classifier([model.vit.embeddings, *model.vit.layers, head], batch, dtype, config.image_size, config)


@_taking_apart()
def gpt2(
    given: Description, n: int, *, batch: int, dtype: torch.dtype, length: int | None = None, attention: str = "sdpa"
) -> Architecture:
    """Build a GPT-2: its embedding, its blocks and its head."""
    config = _config(given, "GPT2Config", attention, **({} if length is None else {"n_positions": length}))
    if config.add_cross_attention:
        raise RequestError(given.name, "attends to another model; set add_cross_attention to false")
    model = _made(given, _transformers("GPT2LMHeadModel"), config)
    mask = causal_mask(config.n_positions, attention)
    blocks = [CausalBlock(block, mask) for block in model.transformer.h]
    first = TokensAndPositions(model.transformer.wte, model.transformer.wpe)
    head = nn.Sequential(model.transformer.ln_f, model.lm_head)
    tied = _tied(given, "GPT2Config", first.tokens, model.lm_head)
    return _language_model([first, *blocks, head], batch, config.n_positions, config.vocab_size, tied)


@_taking_apart()
def llama(
    given: Description, n: int, *, batch: int, dtype: torch.dtype, length: int | None = None, attention: str = "sdpa"
) -> Architecture:
    """Build a Llama, or a model of its kind: its embedding, its blocks and its head."""
    family = given.fields["model_type"].capitalize()
    config = _config(given, f"{family}Config", attention)
    longest = _check_llama(given.name, config, length)
    if length is None:
        length = longest
    model = _made(given, _transformers(f"{family}ForCausalLM"), config)
    mask = causal_mask(length, attention)
    for block in model.model.layers:
        block.input_layernorm = _wide(block.input_layernorm)
        block.post_attention_layernorm = _wide(block.post_attention_layernorm)
    own = model.model.rotary_emb
    blocks = [CausalBlock(block, mask, Rotary(own.inv_freq, own.attention_scaling)) for block in model.model.layers]
    head = nn.Sequential(_wide(model.model.norm), model.lm_head)
    first = model.model.embed_tokens
    tied = _tied(given, f"{family}Config", first, model.lm_head)
    return _language_model([first, *blocks, head], batch, length, config.vocab_size, tied)


# By the `model_type` of a configuration: functions of its description, which then are as those in `MODELS`.
FAMILIES: Mapping[str, Callable[..., Architecture]] = MappingProxyType(
    {
        "resnet": resnet,
        "vit": vit,
        "gpt2": gpt2,
        "llama": llama,
        "mistral": llama,  # whose attention may look back over a window only
        "qwen2": llama,  # with biases of queries, keys and values
    }
)


def _check_llama(name: str, config: Any, length: int | None) -> int:
    """Refuse a model that `Rotary` and a causal mask cannot compute; return the length of its samples."""
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind not in ROTARIES:
        raise RequestError(name, f"its rotary embedding is of type {kind!r}; known are {', '.join(ROTARIES)}")
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    window = getattr(config, "sliding_window", None) if slides else None
    if window and length and length > window:
        raise RequestError(name, f"length {length} is more than its sliding window, {window}; lower the length")
    return min(MOST_TOKENS, config.max_position_embeddings, window or MOST_TOKENS)


# Fields of a file that are ignored: how its weights were stored, tied and trained. transformers warns of these tokens
# where a vocabulary is smaller than their usual numbers.
_ALWAYS: Mapping[str, Any] = MappingProxyType(
    {
        "dtype": None,
        "tie_word_embeddings": False,
        "gradient_checkpointing": False,
        "bos_token_id": None,
        "eos_token_id": None,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"), 0.0),
    }
)


def _config(described: Description, kind: str, attention: str = "eager", **sizes: int) -> Any:
    """Return a configuration of transformers with the fields of a file that stages can have, and a size."""
    kernel = choose("attention", attention, ATTENTIONS)
    # A name with an underscore is internal to transformers, and could name code to be loaded.
    given = {name: value for name, value in described.fields.items() if not name.startswith("_")}
    fields = {**given, **_ALWAYS, **sizes, "attn_implementation": kernel}
    config = _made(described, _transformers(kind).from_dict, fields)
    if config.num_labels < 1:
        raise RequestError(described.name, "has no labels to tell apart; mend its num_labels or id2label")
    return config


def _made(described: Description, make: Callable[[Any], Any], given: Any) -> Any:
    """Turn the errors of transformers about a configuration into refusals in one line."""
    try:
        return make(given)
    except Exception as error:  # transformers checks little, and fails in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(described.name, f"makes no model ({reason}); mend the configuration") from error


def _wide(norm: Any) -> RootMeanSquareNorm:
    return RootMeanSquareNorm(norm.weight, norm.variance_epsilon)


def _classifier(layers: list[nn.Module], batch: int, dtype: torch.dtype, image: int, config: Any) -> Architecture:
    images, labels = Form((batch, config.num_channels, image, image), dtype), Form((batch,), torch.int64)
    names = _block_names(layers)
    return Architecture(layers, Draw(images), Draw(labels, config.num_labels), cross_entropy, names=names)


Tied = list[tuple[nn.Parameter, ...]]


def _tied(described: Description, kind: str, tokens: Any, head: Any) -> Tied:
    """Return the weights of embedding and output layer, if the configuration, or by default its kind, ties them."""
    usual = _transformers(kind)().tie_word_embeddings
    return [(tokens.weight, head.weight)] if described.fields.get("tie_word_embeddings", usual) else []


def _language_model(layers: list[nn.Module], batch: int, length: int, vocabulary: int, tied: Tied) -> Architecture:
    tokens = Draw(Form((batch, length), torch.int64), vocabulary)
    return Architecture(layers, tokens, tokens, cross_entropy, tied, names=_block_names(layers))


def _block_names(layers: Sequence[nn.Module]) -> list[str]:
    return ["embedding", *["block"] * (len(layers) - 2), "head"]


def _transformers(kind: str) -> Any:
    """Return a class of transformers, imported when it is needed: the import is slow, and of an extra.

    transformers imports its parts only now, and with them a torchvision that may not fit torch.
    """
    module = require("transformers")
    try:
        return getattr(module, kind)
    except Exception as error:
        raise describe_unfit("transformers", error) from error

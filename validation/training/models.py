"""The models that can be trained by name, and their stages.

A model is a function in `MODELS`, called as `build(n, batch=..., dtype=..., **sizes)`, that gives an `Architecture`.
`n` is the number of stages, for models that have any number of layers; `sizes` are parameters of the model, with
defaults. Parameters are made in torch's default type, which is `dtype` then, and from torch's seed.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError, UnknownName, choose, short_repr, suggestion
from cdpsim.files import config

from .families import FAMILIES, Description
from .forms import Form
from .optimizer import Optimizer
from .passes import set_meanwhile
from .stages import Architecture, Build, Draw, Training, cut, mean_square, separate_layers
from .user_models import user_model


class Perceptron(nn.Module):
    """One layer of an MLP: a hidden layer twice as wide as its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to the same shape."""
        return torch.tanh(self.outer(torch.tanh(self.inner(x))))


class Block(nn.Module):
    """One layer of a transformer: attention and a perceptron, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        # A bias of keys would have no influence: its gradient is rounding alone, which Adam divides by itself.
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self._attend(self.attention_norm(x))
        y: Tensor = self.outer(nn.functional.gelu(self.inner(self.norm(x))))
        return x + y

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = self.attention_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        attended: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return attended


def perceptrons(n: int, *, batch: int, dtype: torch.dtype, width: int = 16, layers: int = 1) -> Architecture:
    """Return an MLP with this number of layers in each of n stages."""
    data = Draw(Form((batch, width), dtype))
    return Architecture([Perceptron(width) for _ in range(n * layers)], data, data, mean_square)


def transformer(
    n: int, *, batch: int, dtype: torch.dtype, width: int = 16, length: int = 6, heads: int = 2, layers: int = 1
) -> Architecture:
    """Return a transformer from vectors to vectors with this number of layers in each of n stages."""
    if width % heads:
        raise RequestError(f"heads={heads}", f"must divide the width, which is {width}")
    data = Draw(Form((batch, length, width), dtype))
    return Architecture([Block(width, heads) for _ in range(n * layers)], data, data, mean_square)


AUTOCAST = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})
MODELS: dict[str, Build] = {"mlp": perceptrons, "transformer": transformer}
_CONFIG = "config.json"


_TRANSFORMERS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ZOO: Mapping[str, Build] = MappingProxyType(
    {
        name: partial(FAMILIES[fields["model_type"]], Description(name, fields), **fields.pop("sizes", {}))
        for name, fields in _TRANSFORMERS.items()
    }
)


def make_training(
    model: str,
    n: int,
    *,
    batch: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: torch.device | str = "cpu",
    cuts: Sequence[int] | None = None,
    recompute: str = "none",
    autocast: str | None = None,
    **sizes: Any,
) -> Training:
    """Return n stages of a model, the same ones in every process; `sizes` are parameters of the model."""
    made = make_architecture(model, n, batch=batch, dtype=dtype, seed=seed, autocast=autocast, **sizes)
    architecture = separate_layers(made)
    if cuts is None:
        cuts = even_cuts(len(architecture.layers), n)
    return cut(architecture, cuts, seed=seed, device=device, recompute=recompute)


_NOT_OF_TRAINING = ("optimizer", "sizes", "dtype", "offloads")  # of the fields of stages


@dataclass(frozen=True)
class Stages:
    """Stages to train; plain values, so that they can be sent to ranks."""

    model: str
    n: int
    batch: int
    dtype: str
    optimizer: Optimizer = field(default_factory=Optimizer)
    sizes: Mapping[str, int] = field(default_factory=dict)
    cuts: tuple[int, ...] | None = None  # with which layer each stage but the first begins; None: evenly
    seed: int = 0
    autocast: str | None = None  # one of AUTOCAST
    offloads: bool = False
    recompute: str = "none"  # what backwards compute again, as in `cdpsim.model.Recipe`

    def training(self, device: torch.device | str) -> Training:
        """Return their training."""
        given: dict[str, Any] = {name: value for name, value in vars(self).items() if name not in _NOT_OF_TRAINING}
        training = make_training(**given | dict(self.sizes), dtype=getattr(torch, self.dtype), device=device)
        return replace(training, offloads=self.offloads)


def make_architecture(
    model: str, n: int, *, batch: int, dtype: torch.dtype, seed: int = 0, autocast: str | None = None, **sizes: Any
) -> Architecture:
    """Return the layers of a model, always the same ones."""
    casts_to = None if autocast is None else AUTOCAST[choose("autocast", autocast, AUTOCAST)]
    if casts_to and dtype != torch.float32:
        problem = f"casts from float32, and the model is in {str(dtype).removeprefix('torch.')}"
        raise RequestError("autocast", f"{problem}; take --dtype float32")
    build = find_model(model)
    known = [name for name in signature(build).parameters if name not in ("n", "batch", "dtype")]
    for name, size in sizes.items():
        choose(f"size of {model}", name, known)
        if isinstance(size, int) and size < 1:
            raise RequestError(f"{name}={size}", "must be at least 1")
    made_in_type = set_meanwhile(torch.get_default_dtype, torch.set_default_dtype, dtype)  # so that nothing is rounded
    with torch.random.fork_rng(devices=[]), made_in_type:
        torch.manual_seed(seed)
        built = build(n, batch=batch, dtype=dtype, **sizes)
    return built._replace(autocast=partial(torch.autocast, dtype=casts_to)) if casts_to else built


def find_model(name: str) -> Build:
    """Return how to build a model: one of `MODELS`, one of transformers, or a user's.

    A model of transformers has a name of `ZOO` or is the path of a configuration; a user's is `module:function`.
    """
    known = {**MODELS, **ZOO}
    if name not in known and is_config(name):
        return configured_model(name)
    if ":" in name:
        return user_model(name)
    if name not in known:
        hint = f"{suggestion(name, known)} (or give a config.json, or layers of yours as module:function)"
        raise UnknownName("model", f"unknown model {short_repr(name)}; {hint}")
    return known[name]


def even_cuts(layers: int, n: int) -> list[int]:
    """Return the layer with which each stage but the first begins, for stages of as equal size as possible."""
    if layers < n:
        raise RequestError(f"n={n}", f"the model has {layers} layers, fewer than stages; lower n")
    return [layers * j // n for j in range(1, n)]


def is_config(name: str) -> bool:
    """Return whether a model's name is the path of a configuration, or of a folder that has one."""
    return name.endswith(".json") or ("/" in name and ":" not in name) or (Path(name) / _CONFIG).is_file()


def configured_model(path: str) -> Build:
    """Return how to build the model of a configuration of transformers: a `config.json`, or a folder that has one.

    The file is read as data: nothing is downloaded, and no code beside it is run. A size that is not given is the
    configuration's: `image` its image_size (224 for a ResNet, whose has none), `length` its n_positions, or its
    max_position_embeddings up to `MOST_TOKENS` and up to its sliding window.
    """
    file = Path(path)
    if file.is_dir():
        file /= _CONFIG
        if not file.exists():
            raise RequestError(path, f"is a folder without a {_CONFIG}; give the one that save_pretrained wrote")
    elif file.suffix != ".json":
        raise RequestError(path, "there is no such folder; give one that has a config.json, or a .json file")
    fields = config.read_config(file)
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise RequestError(str(file), "has no model_type; give a configuration as save_pretrained writes it")
    kind = fields["model_type"]
    if kind not in list(FAMILIES):  # in a list, since it may be anything
        problem = f"unknown model_type {kind!r}; known are {', '.join(FAMILIES)}"
        raise RequestError(str(file), f"{problem}; of any other give its layers as module:function")
    return partial(FAMILIES[kind], Description(str(file), fields))

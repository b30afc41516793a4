"""What a replay trains: stages cut from a model's layers, the data that micro-batches bring, and a loss.

A model is a function in `MODELS`, called as `build(n, batch=..., dtype=..., **sizes)`, that gives an `Architecture`: its
layers, each from one tensor to one tensor, and what goes in, what the output is held against, and by which loss.
`n` is how many stages they will be cut into, for models that have any number of layers; `sizes` are its own, with
defaults. Its parameters are made in torch's default type, which is `dtype` then, from torch's seed, and none may be
part of two layers. A layer's buffers must not change, so no running statistics.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from cdpsim.errors import RequestError, choose
from validation.forms import Form

Loss = Callable[[Tensor, Tensor], Tensor]  # of output and target, a mean over the samples


class Draw(NamedTuple):
    """How data are drawn: normal numbers, or whole ones below `classes` where that is given."""

    form: Form
    classes: int = 0

    def __call__(self, *seeds: int) -> Tensor:
        """Draw, the same numbers for the same seeds, on a CPU wherever they will be used."""
        state = np.random.SeedSequence(seeds).generate_state(1, np.uint32)
        generator = torch.Generator().manual_seed(int(state[0]))
        shape, dtype = self.form
        if self.classes:
            return torch.randint(self.classes, shape, generator=generator, dtype=dtype)
        return torch.randn(shape, generator=generator, dtype=dtype)


class Architecture(NamedTuple):
    """A model before it is cut into stages."""

    layers: Sequence[nn.Module]
    inputs: Draw
    targets: Draw
    loss: Loss


@dataclass(frozen=True, eq=False)
class Training:
    """Stages with their first parameters, on a CPU, and the data that each micro-batch brings."""

    stages: tuple[nn.Module, ...]
    buffers: tuple[Mapping[str, Tensor], ...]  # of each stage, on the device
    boundaries: tuple[Form, ...]  # what each stage but the last sends on
    inputs: Draw
    targets: Draw
    criterion: Loss
    seed: int
    device: torch.device

    @property
    def n(self) -> int:
        """The number of stages."""
        return len(self.stages)

    def parameters(self, stage: int) -> Form:
        """Say what all parameters of a stage are as one vector."""
        own = list(self.stages[stage].parameters())
        return Form((sum(parameter.numel() for parameter in own),), own[0].dtype)

    def boundary(self, stage: int) -> Form:
        """Say what the output of a stage is that is not the last."""
        return self.boundaries[stage]

    def input(self, step: int, micro_batch: int) -> Tensor:
        """Draw what a micro-batch brings to the first stage, always the same."""
        return self.inputs(self.seed, step, micro_batch, 0).to(self.device)

    def target(self, step: int, micro_batch: int) -> Tensor:
        """Draw what a micro-batch's output is held against at the last stage, always the same."""
        return self.targets(self.seed, step, micro_batch, 1).to(self.device)

    def data(self, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Draw both."""
        return self.input(step, micro_batch), self.target(step, micro_batch)

    def loss(self, output: Tensor, target: Tensor, micro_batches: int) -> Tensor:
        """Give a micro-batch's share in the loss of a step: what sums up to the mean."""
        return self.criterion(output, target) / micro_batches

    def apply(self, stage: int, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Run a stage with other parameters than its first."""
        y: Tensor = functional_call(self.stages[stage], {**self.buffers[stage], **parameters}, (x,))
        return y


def make_training(
    model: str,
    n: int,
    *,
    batch: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: torch.device | str = "cpu",
    cuts: Sequence[int] | None = None,
    **sizes: int,
) -> Training:
    """Build n stages of a model, the same ones wherever it is built; `sizes` are those that the model has."""
    build = MODELS[choose("model", model, MODELS)]
    known = [name for name in signature(build).parameters if name not in ("n", "batch", "dtype")]
    for name, size in sizes.items():
        choose(f"size of {model}", name, known)
        if size < 1:
            raise RequestError(f"{name}={size}", "must be at least 1")
    with torch.random.fork_rng(devices=[]), _default_type(dtype):
        torch.manual_seed(seed)
        architecture = build(n, batch=batch, dtype=dtype, **sizes)
    if cuts is None:
        cuts = even_cuts(len(architecture.layers), n)
    return cut(architecture, cuts, seed=seed, device=device)


def even_cuts(layers: int, n: int) -> list[int]:
    """Say with which layer each stage but the first begins, for stages of as many layers as can be."""
    if layers < n:
        raise RequestError(f"n={n}", f"the model has {layers} layers, fewer than stages; lower n")
    return [layers * j // n for j in range(1, n)]


def cut(
    architecture: Architecture, cuts: Sequence[int], *, seed: int = 0, device: torch.device | str = "cpu"
) -> Training:
    """Make stages of consecutive layers; a cut is the number of the layer with which a stage begins."""
    layers, inputs, targets, loss = architecture
    ends = [0, *cuts, len(layers)]
    if any(first >= end for first, end in pairwise(ends)):
        raise RequestError(f"cuts {list(cuts)}", f"must rise from 1 to at most {len(layers) - 1}")
    stages = tuple(nn.Sequential(*layers[first:end]) for first, end in pairwise(ends))
    _check_parameters(stages)
    device = torch.device(device)
    buffers = tuple({name: buffer.to(device) for name, buffer in stage.named_buffers()} for stage in stages)
    training = Training(stages, buffers, (), inputs, targets, loss, seed, device)
    return replace(training, boundaries=_boundaries(training))


def _check_parameters(stages: Sequence[nn.Module]) -> None:
    """Refuse what cannot be one vector for each stage."""
    seen: set[int] = set()
    for j, stage in enumerate(stages):
        own = {id(parameter): parameter for parameter in stage.parameters()}
        if not own:
            raise RequestError(f"stage {j}", "has no parameters; cut the model so that it has")
        if len({parameter.dtype for parameter in own.values()}) > 1:
            raise RequestError(f"stage {j}", "has parameters of several types; give them one")
        if seen & own.keys():
            raise RequestError(f"stage {j}", "shares a parameter with an earlier stage; give it one of its own")
        seen |= own.keys()


def _boundaries(training: Training) -> tuple[Form, ...]:
    """Find what each stage but the last gives, without computing anything."""
    forms = []
    with FakeTensorMode(), torch.no_grad():
        imitation = imitate(training)
        x = torch.empty(training.inputs.form.shape, dtype=training.inputs.form.dtype, device=training.device)
        for j in range(training.n):
            versions = {name: buffer._version for name, buffer in imitation.buffers[j].items()}
            x = imitation.apply(j, leaves(training.stages[j], empty(training.parameters(j), training.device)), x)
            changed = [name for name, buffer in imitation.buffers[j].items() if buffer._version != versions[name]]
            if changed:
                problem = f"changes its buffer {changed[0]} in a forward; switch running statistics off"
                raise RequestError(f"stage {j}", problem)
            if not (isinstance(x, Tensor) and x.is_floating_point()):
                raise RequestError(f"stage {j}", "does not give a tensor of real numbers; cut the model elsewhere")
            forms.append(Form(tuple(x.shape), x.dtype))
    return tuple(forms[:-1])


def imitate(training: Training) -> Training:
    """Make a training that runs under a `FakeTensorMode`, in which this is called, with fake parameters and data."""
    buffers = tuple(
        {name: empty(Form(tuple(buffer.shape), buffer.dtype), training.device) for name, buffer in own.items()}
        for own in training.buffers
    )
    return replace(training, buffers=buffers)


def empty(form: Form, device: torch.device) -> Tensor:
    """Make a tensor of some form with whatever is in it."""
    return torch.empty(form.shape, dtype=form.dtype, device=device)


def leaves(stage: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """Cut a vector of parameters into those of a stage: views of it, each a leaf for autograd."""
    return {name: piece.requires_grad_() for name, piece in pieces(stage, vector.detach()).items()}


def pieces(stage: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """Cut a vector as long as a stage's parameters into views of their shapes."""
    named = dict(stage.named_parameters())
    split = torch.split(vector, [parameter.numel() for parameter in named.values()])
    return {name: piece.view(parameter.shape) for (name, parameter), piece in zip(named.items(), split, strict=True)}


@contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    """Let modules be made in a type, so that no parameter is a rounded one of another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Losses


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Give the mean square of the differences."""
    return nn.functional.mse_loss(output, target)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Give the mean cross entropy of labels, or of a token at each place of a sequence; classes come last."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


# Models with any number of equal layers


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
    """Build an MLP with so many layers in each of n stages."""
    data = Draw(Form((batch, width), dtype))
    return Architecture([Perceptron(width) for _ in range(n * layers)], data, data, mean_square)


def transformer(
    n: int, *, batch: int, dtype: torch.dtype, width: int = 16, length: int = 6, heads: int = 2, layers: int = 1
) -> Architecture:
    """Build a transformer from vectors to vectors with so many layers in each of n stages."""
    if width % heads:
        raise RequestError(f"heads={heads}", f"must divide the width, which is {width}")
    data = Draw(Form((batch, length, width), dtype))
    return Architecture([Block(width, heads) for _ in range(n * layers)], data, data, mean_square)


MODELS: dict[str, Callable[..., Architecture]] = {"mlp": perceptrons, "transformer": transformer}

"""What a replay trains: equal stages of an MLP or a small transformer, synthetic data, and their bytes for cdpsim."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from cdpsim.errors import choose
from cdpsim.model import Model, Stage
from validation.forms import Form
from validation.optimizer import Optimizer

WIDTH = 16
LENGTH = 6  # of a transformer's sequences
HEADS = 2


class Perceptron(nn.Module):
    """One stage of an MLP: a hidden layer twice as wide as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to the same shape."""
        return torch.tanh(self.outer(torch.tanh(self.inner(x))))


class Block(nn.Module):
    """One stage of a transformer: attention and a perceptron, each after a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        # A bias of keys would have no influence: its gradient is rounding alone, which Adam divides by itself.
        self.attention_in = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self._attend(self.attention_norm(x))
        y: Tensor = self.outer(nn.functional.gelu(self.inner(self.norm(x))))
        return x + y

    def _attend(self, x: Tensor) -> Tensor:
        split = self.attention_in(x).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        attended: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return attended


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Perceptron, (WIDTH,)),
    "transformer": (Block, (LENGTH, WIDTH)),
}


@dataclass(frozen=True, eq=False)
class Training:
    """Stages with their first parameters, and the data that each micro-batch brings."""

    stages: tuple[nn.Module, ...]
    boundary: Form  # of inputs, of targets, and of what goes from stage to stage
    seed: int

    @property
    def n(self) -> int:
        """The number of stages."""
        return len(self.stages)

    def parameters(self, stage: int) -> Form:
        """Say what all parameters of a stage are as one vector."""
        return Form((sum(p.numel() for p in self.stages[stage].parameters()),), self.boundary.dtype)

    def data(self, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Draw input and target of a micro-batch, always the same ones."""
        state = np.random.SeedSequence([self.seed, step, micro_batch]).generate_state(1, np.uint32)
        generator = torch.Generator().manual_seed(int(state[0]))
        shape, dtype = self.boundary
        return torch.randn(shape, generator=generator, dtype=dtype), torch.randn(
            shape, generator=generator, dtype=dtype
        )

    def loss(self, output: Tensor, target: Tensor, micro_batches: int) -> Tensor:
        """Give a micro-batch's share in the loss of a step: what sums up to the mean."""
        return nn.functional.mse_loss(output, target) / micro_batches

    def apply(self, stage: int, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Run a stage with other parameters than its first."""
        y: Tensor = functional_call(self.stages[stage], dict(parameters), (x,))
        return y


def make_training(model: str, n: int, *, batch: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0) -> Training:
    """Build n stages of a model, the same ones wherever it is built."""
    stage, shape = MODELS[choose("model", model, MODELS)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # In float64 from the start: parameters that were float32 once would hide what differs beyond it.
        stages = tuple(stage().to(dtype) for _ in range(n))
    return Training(stages, Form((batch, *shape), dtype), seed)


def leaves(stage: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """Cut a vector of parameters into those of a stage: views of it, each a leaf for autograd."""
    named = dict(stage.named_parameters())
    pieces = torch.split(vector.detach(), [parameter.numel() for parameter in named.values()])
    return {
        name: piece.view_as(parameter).requires_grad_()
        for (name, parameter), piece in zip(named.items(), pieces, strict=True)
    }


def describe(training: Training, optimizer: Optimizer) -> Model:
    """Tell cdpsim what the stages weigh in bytes; every task counts as one second."""
    last = training.n - 1
    return Model(
        stages=tuple(
            Stage(
                forward=1.0,
                backward=1.0,
                activation=saved_bytes(training, j),
                boundary=training.boundary.nbytes if j < last else 0,
                parameters=training.parameters(j).nbytes,
                optimizer=optimizer.nbytes(*training.parameters(j)),
            )
            for j in range(training.n)
        )
    )


def saved_bytes(training: Training, stage: int) -> int:
    """Count what a stage's forward keeps for its backward: unique storages that are not parameters."""
    x, target = training.data(0, 0)
    named = dict(training.stages[stage].named_parameters())
    storages: dict[int, int] = {}
    kept = []  # while it is alive, nobody else's storage has its address

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = training.apply(stage, named, x.requires_grad_())
        kept.append(training.loss(y, target, 1) if stage == training.n - 1 else y)
    for parameter in named.values():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storages.values())

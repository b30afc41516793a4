"""Training: stages cut from a model's layers, the data that micro-batches bring, and a loss.

Only draws of data and the loss compute here; `passes.py` runs stages.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from cdpsim.errors import RequestError
from cdpsim.model.recomputation import segment_bounds
from cdpsim.model.stage import span_name

from .fakes import Fakes
from .forms import Form, zeros
from .parts import Parts

Loss = Callable[[Tensor, Tensor], Tensor]  # of output and target, a mean over the samples
Autocast = Callable[[str], AbstractContextManager[object]]  # on a kind of device


class Draw(NamedTuple):
    """A way to draw data: normal numbers, or whole ones below `classes` where that is given."""

    form: Form
    classes: int = 0

    def __call__(self, *seeds: int) -> Tensor:
        """Draw data, the same for the same seeds, on a CPU whatever device uses them."""
        state = np.random.SeedSequence(seeds).generate_state(1, np.uint32)
        generator = torch.Generator().manual_seed(int(state[0]))
        shape, dtype = self.form
        if self.classes:
            return torch.randint(self.classes, shape, generator=generator, dtype=dtype)
        return torch.randn(shape, generator=generator, dtype=dtype)


class Architecture(NamedTuple):
    """A model before it is cut into stages.

    Each layer is from one tensor to one tensor, and has its parameters to itself. Its buffers must not change in a
    forward, so it keeps no running statistics; nor may it draw random numbers, so it has no dropout.

    `tied` are groups of parameters, each of which is one tensor in the original model. A profile counts that once; a
    replay trains each parameter by itself.

    With `autocast`, forwards and the loss run in its context, which keeps each cast of a weight until a stage's forward
    has ended; the graph keeps the casts that its backward needs.
    """

    layers: Sequence[nn.Module]
    inputs: Draw
    targets: Draw
    loss: Loss
    tied: Sequence[Sequence[nn.Parameter]] = ()
    autocast: Autocast | None = None
    names: Sequence[str] = ()  # of the layers; without any, those of their classes
    checkpointed: Sequence[int] = ()  # the numbers of the layers that are computed again, unless nothing is

    def name_of(self, first: int, end: int) -> str:
        """Return the name of consecutive layers."""
        names = self.names or [type(layer).__name__ for layer in self.layers]
        return span_name(names[first:end])


Build = Callable[..., Architecture]  # of n, batch=..., dtype=... and the sizes that a model has


class Segments(NamedTuple):
    """The parts of stages that are computed again before their backwards, as stages of a training of their own."""

    training: "Training"
    ends: tuple[int, ...]  # 0, and for each stage the number of segments up to its end

    def of_stage(self, stage: int) -> range:
        """Return the numbers of a stage's segments."""
        return range(self.ends[stage], self.ends[stage + 1])

    def split(self, stage: int, vector: Tensor) -> list[Tensor]:
        """Return the part of each of its segments in a stage's vector."""
        return list(torch.split(vector, [self.training.parameters(part).numel for part in self.of_stage(stage)]))


Place = tuple[int, int]  # a stage, and the number of a layer or a parameter in it


@dataclass(frozen=True, eq=False)
class Training:
    """Stages with their first parameters, on a CPU, and the data that each micro-batch brings."""

    stages: tuple[nn.Module, ...]
    buffers: tuple[Mapping[str, Tensor], ...]  # of each stage, on the device
    boundaries: tuple[Form, ...]  # the output of each stage but the last
    inputs: Draw
    targets: Draw
    criterion: Loss
    seed: int
    device: torch.device
    autocast: Autocast | None = None
    offloads: bool = False  # whether stashes are on the host between forward and backward
    segments: Segments | None = None  # of stages that keep only their segments' inputs from forward to backward
    divided: Mapping[int, Parts] = field(default_factory=dict)  # of stages whose split backwards go through them once
    tied: Sequence[Sequence[Place]] = ()  # parameters of which each group is one tensor in the original model
    checkpointed: Sequence[Place] = ()  # layers that the original model computes again

    @property
    def n(self) -> int:
        """The number of stages."""
        return len(self.stages)

    def parameters(self, stage: int) -> Form:
        """Return the form of a stage's parameters as one vector."""
        own = list(self.stages[stage].parameters())
        return Form((sum(parameter.numel() for parameter in own),), own[0].dtype)

    def parts(self, stage: int) -> list[Form]:
        """Return the forms of a stage's parameters, in their order in the vector."""
        return [Form(tuple(own.shape), own.dtype) for own in self.stages[stage].parameters()]

    def boundary(self, stage: int) -> Form:
        """Return the form of the output of a stage that is not the last."""
        return self.boundaries[stage]

    def input(self, step: int, micro_batch: int) -> Tensor:
        """Draw the input of a micro-batch, always the same."""
        return self.inputs(self.seed, step, self.number(step, micro_batch), 0).to(self.device)

    def target(self, step: int, micro_batch: int) -> Tensor:
        """Draw the target of a micro-batch, always the same."""
        return self.targets(self.seed, step, self.number(step, micro_batch), 1).to(self.device)

    def number(self, step: int, micro_batch: int) -> int:
        """Return the number of a micro-batch's data in a step."""
        return micro_batch

    def data(self, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Draw input and target of a micro-batch."""
        return self.input(step, micro_batch), self.target(step, micro_batch)

    def loss(self, output: Tensor, target: Tensor, micro_batches: int) -> Tensor:
        """Return a micro-batch's share in the loss of a step; shares add up to the mean."""
        with self._casts():
            return self.criterion(output, target) / micro_batches

    def apply(self, stage: int, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Run a stage with other parameters than its first."""
        with self._casts():
            y: Tensor = functional_call(self.stages[stage], {**self.buffers[stage], **parameters}, (x,))
        return y

    def _casts(self) -> AbstractContextManager[object]:
        return self.autocast(self.device.type) if self.autocast else nullcontext()


def separate_layers(architecture: Architecture) -> Architecture:
    """Return layers with parameters of their own, and which of these are one tensor in the model."""
    seen: dict[int, list[nn.Parameter]] = {}
    layers = []
    for layer in architecture.layers:
        given = list(layer.parameters())
        own = deepcopy(layer) if any(id(parameter) in seen for parameter in given) else layer
        for parameter, copy in zip(given, own.parameters(), strict=True):
            seen.setdefault(id(parameter), []).append(copy)
        layers.append(own)
    told = [dict.fromkeys(map(id, group)) for group in architecture.tied]
    known = {key for group in told for key in group}
    groups = [*told, *([key] for key in seen if key not in known)]
    tied = [[own for key in group for own in seen[key]] for group in groups]
    return architecture._replace(layers=layers, tied=[group for group in tied if len(group) > 1])


def cut(
    architecture: Architecture,
    cuts: Sequence[int],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    recompute: str = "none",
) -> Training:
    """Return stages of consecutive layers; a cut is the number of the layer with which a stage begins."""
    training = _cut(architecture, cuts, seed, device)
    if recompute == "none":
        return training
    ends = [0, *cuts, len(architecture.layers)]
    bounds = [[begin + k for k in segment_bounds(end - begin, recompute)] for begin, end in pairwise(ends)]
    finer = _cut(architecture, [begin for own in bounds for begin in own[:-1]][1:], seed, device)
    segments = Segments(finer, (0, *accumulate(len(own) - 1 for own in bounds)))
    return replace(training, segments=segments)


def _cut(architecture: Architecture, cuts: Sequence[int], seed: int, device: torch.device | str) -> Training:
    layers, inputs, targets, loss, tied, autocast, _, checkpointed = architecture
    ends = [0, *cuts, len(layers)]
    if any(first >= end for first, end in pairwise(ends)):
        raise RequestError(f"cuts {list(cuts)}", f"must rise from 1 to at most {len(layers) - 1}")
    stages = tuple(nn.Sequential(*layers[first:end]) for first, end in pairwise(ends))
    _check_parameters(stages)
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():  # where fake tensors would end the process
        raise RequestError(f"device {device}", "torch finds no GPU here; use cpu")
    # A model on the meta device has no numbers to move; it can be profiled.
    buffers = tuple(
        {name: buffer if buffer.is_meta else buffer.to(device) for name, buffer in stage.named_buffers()}
        for stage in stages
    )
    training = Training(stages, buffers, (), inputs, targets, loss, seed, device, autocast)
    places = {id(own): (j, k) for j, stage in enumerate(stages) for k, own in enumerate(stage.parameters())}
    again = [(j, k - begin) for j, (begin, end) in enumerate(pairwise(ends)) for k in checkpointed if begin <= k < end]
    training = replace(training, tied=[[places[id(own)] for own in group] for group in tied], checkpointed=again)
    return replace(training, boundaries=_boundaries(training))


def _check_parameters(stages: Sequence[nn.Module]) -> None:
    """Refuse parameters that cannot be one vector for each stage."""
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


class _Draws(TorchDispatchMode):
    """A search for an operation that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # Attention is marked as random, for its own dropout.
        if torch.Tag.nondeterministic_seeded in func.tags and not {"attention", "sdp"} & set(func.name().split("_")):
            self.found = func.name()
        return func(*args, **(kwargs or {}))


def _boundaries(training: Training) -> tuple[Form, ...]:
    """Return the form of each stage's output but the last one's, found with fake tensors."""
    forms = []
    with Fakes(), torch.no_grad(), _Draws() as draws:
        imitation = imitate(training)
        x = zeros(training.inputs.form, training.device)
        for j in range(training.n):
            versions = {name: buffer._version for name, buffer in imitation.buffers[j].items()}
            x = imitation.apply(j, leaves(training.stages[j], zeros(training.parameters(j), training.device)), x)
            changed = [name for name, buffer in imitation.buffers[j].items() if buffer._version != versions[name]]
            if changed:
                problem = f"changes its buffer {changed[0]} in a forward; switch running statistics off"
                raise RequestError(f"stage {j}", problem)
            if draws.found:
                problem = f"draws random numbers ({draws.found}), so that no two runs agree; switch dropout off"
                raise RequestError(f"stage {j}", problem)
            if not (isinstance(x, Tensor) and x.is_floating_point()):
                raise RequestError(f"stage {j}", "does not give a tensor of real numbers; cut the model elsewhere")
            forms.append(Form(tuple(x.shape), x.dtype))
    return tuple(forms[:-1])


def imitate(training: Training) -> Training:
    """Return a training with fake parameters and data, for the `Fakes` in which this is called."""
    buffers = tuple(
        {name: zeros(Form(tuple(buffer.shape), buffer.dtype), training.device) for name, buffer in own.items()}
        for own in training.buffers
    )
    return replace(training, buffers=buffers)


def leaves(stage: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """Return the parameters of a stage in a vector, each a leaf for autograd with the values of a view.

    A leaf that is a view itself would keep the whole vector alive.
    """
    cut = {name: vector.new_empty(0) for name, _ in stage.named_parameters()}
    for piece, leaf in zip(pieces(stage, vector.detach()).values(), cut.values(), strict=True):
        leaf.data = piece
        leaf.requires_grad_()
    return cut


def pieces(stage: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """Return views of a vector in the shapes of a stage's parameters."""
    named = dict(stage.named_parameters())
    split = torch.split(vector, [parameter.numel() for parameter in named.values()])
    return {name: piece.view(parameter.shape) for (name, parameter), piece in zip(named.items(), split, strict=True)}


# Losses


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean square of the differences."""
    # torch's single operation returns one number in a storage as large as the output.
    return nn.functional.mse_loss(output, target, reduction="none").mean()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of labels, or of a token at each place of a sequence; classes come last."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

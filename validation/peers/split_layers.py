"""Layers that are split among ranks by hand, as Megatron-LM does, beside one process and beside the rule of `cdpsim`.

    python -m validation.peers.split_layers    # two ranks, by gloo; a few seconds

Ranks train two layers of numbers in float64 by SGD. What is compared: the parameters, put together, with those of one
process; the collectives that torch's dispatcher shows, and the storages that autograd keeps, with the rule of
`cdpsim.model.splitting`. Attention is not fused. A layer norm of torch keeps mean and reciprocal deviation of each
token, which the rule leaves out: they are named.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cdpsim import RequestError
from cdpsim.cli.console import exit_code_of, write_stdout
from cdpsim.files.tables import as_text
from cdpsim.model.layers import ALL_REDUCE, REDUCE_SCATTER, Exchange, Layers, layer
from cdpsim.model.splitting import NO_MESH, Mesh, RankShare, sizes_on, split

from ..ranks.launcher import Ranks
from ..ranks.member import Member
from ..replay.contents import ReplayError
from .measure import Observer

RANKS, STEPS, RATE, SAMPLES, NUMBER = 2, 3, 0.1, 3, 8
SHAPE = Layers(layers=2, width=32, heads=4, length=10, vocabulary=128, ffn=80, attention="eager")
MESHES = {
    "tensor": Mesh(RANKS),
    "sequence": Mesh(RANKS, sequence=True),
    "sequence, gathered kept": Mesh(RANKS, sequence=True, keeps_gathered=True),
}
CLOSE = 1e-12  # of a parameter's largest number
# The dimension by which a parameter is split.
SPLIT = {"qkv": 1, "qkv bias": 1, "attention": 1, "up": 0, "up bias": 0, "down": 1}
COPIED = ("norm 1", "norm 1 bias", "attention bias", "norm 2", "norm 2 bias", "down bias")

# Newer versions of torch have other names for them.
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
Weights = dict[str, Tensor]
Collectives = Counter[tuple[str, int]]  # collectives, with the bytes of the whole tensor


class SplitTrained(NamedTuple):
    """The parameters of a rank after its training, and the measurements of its last step."""

    parameters: dict[str, Any]  # arrays
    calls: dict[str, Collectives]  # by phase
    kept: list[int]  # bytes of each storage that autograd keeps
    statistics: int  # bytes of what norms keep beside their inputs


def all_reduced(partial: Tensor) -> Tensor:
    """Return the sum of all ranks."""
    whole = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole)
    return whole


def gathered(share: Tensor) -> Tensor:
    """Return the positions of all ranks."""
    whole = share.new_empty(share.shape[0] * dist.get_world_size(), *share.shape[1:])
    GATHER(whole, share.contiguous())
    return whole


def scattered(partial: Tensor) -> Tensor:
    """Return this rank's positions of the sum of all ranks."""
    share = partial.new_empty(partial.shape[0] // dist.get_world_size(), *partial.shape[1:])
    SCATTER(share, partial.contiguous())
    return share


def pair(there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of autograd that does one in the forward, and the other in the backward."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Tensor) -> Tensor:
            return there(value)

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            return back(gradient)

    return Pair.apply


# Megatron-LM's f and its conjugate, and g and its conjugate.
enter, leave = pair(Tensor.detach, all_reduced), pair(all_reduced, Tensor.detach)
enter_sequence, leave_sequence = pair(gathered, scattered), pair(scattered, gathered)


class GatheredAgain(torch.autograd.Function):
    """A product that keeps its share of the input, and gathers it for the weight's gradient, too."""

    @staticmethod
    def forward(context: Any, share: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Gather the input, and multiply."""
        context.save_for_backward(share, weight)
        return F.linear(gathered(share), weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of share, weight and bias."""
        share, weight = context.saved_tensors
        rows = gradient.flatten(0, 1)
        return scattered(gradient @ weight), rows.T @ gathered(share).flatten(0, 1), rows.sum(0)


def product_by_columns(value: Tensor, weight: Tensor, bias: Tensor, mesh: Mesh) -> Tensor:
    """Multiply a whole input with this rank's outputs of a weight."""
    if mesh.sequence and not mesh.keeps_gathered:
        return GatheredAgain.apply(value, weight, bias)
    if mesh.tensor > 1:
        value = (enter_sequence if mesh.sequence else enter)(value)
    return F.linear(value, weight, bias)


def product_by_rows(value: Tensor, weight: Tensor, bias: Tensor, mesh: Mesh) -> Tensor:
    """Multiply this rank's inputs with a weight, and sum over ranks."""
    partial = F.linear(value, weight)
    if mesh.tensor > 1:
        partial = (leave_sequence if mesh.sequence else leave)(partial)
    return partial + bias


def layer_forward(x: Tensor, of: Weights, shape: Layers, mesh: Mesh) -> Tensor:
    """Return what a layer makes of x (positions, samples, width)."""
    width, heads = shape.width // shape.heads, shape.heads // mesh.tensor
    y = F.layer_norm(x, (shape.width,), of["norm 1"], of["norm 1 bias"])
    qkv = product_by_columns(y, of["qkv"].flatten(0, 1), of["qkv bias"].flatten(), mesh)
    positions, samples, _ = qkv.shape
    q, k, v = qkv.view(positions, samples, 3, heads, width).permute(2, 1, 3, 0, 4).reshape(3, -1, positions, width)
    future = torch.full((positions, positions), -torch.inf, dtype=x.dtype).triu(1)
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=width**-0.5)
    o = torch.bmm(scores.softmax(-1), v).view(samples, heads, positions, width).permute(2, 0, 1, 3)
    x2 = x + product_by_rows(o.reshape(positions, samples, -1), of["attention"], of["attention bias"], mesh)
    y2 = F.layer_norm(x2, (shape.width,), of["norm 2"], of["norm 2 bias"])
    u = product_by_columns(y2, of["up"], of["up bias"], mesh)
    return x2 + product_by_rows(F.gelu(u), of["down"], of["down bias"], mesh)


def drawn_parameters(shape: Layers, random: torch.Generator) -> Weights:
    """Return the whole parameters of a layer."""
    h, f = shape.width, shape.sizes["f"]
    sizes: dict[str, tuple[int, ...]] = {"qkv": (3, h, h), "attention": (h, h), "up": (f, h), "down": (h, f)}
    sizes |= {"qkv bias": (3, h), "up bias": (f,)} | dict.fromkeys(COPIED, (h,))
    drawn = {name: torch.randn(size, generator=random, dtype=torch.float64) / h**0.5 for name, size in sizes.items()}
    return drawn | {name: 1 + drawn[name] for name in ("norm 1", "norm 2")}


def train_split(member: Member | None, shape: Layers, mesh: Mesh) -> SplitTrained:
    """Train all layers, or this rank's share of them."""
    rank = 0 if member is None else member.rank
    random = torch.Generator().manual_seed(48)
    parameters = Weights()
    for i in range(shape.layers):
        for name, drawn in drawn_parameters(shape, random).items():
            own = drawn.chunk(mesh.tensor, SPLIT[name])[rank].clone() if name in SPLIT else drawn
            parameters[f"{i} {name}"] = own.requires_grad_()
    every = [*parameters.values()]
    copied = [i for i, name in enumerate(parameters) if name.partition(" ")[2] not in SPLIT]
    weights = {parameter.untyped_storage().data_ptr() for parameter in every}
    size = (2, shape.length, SAMPLES, shape.width)
    for _ in range(STEPS):
        kept: dict[int, Tensor] = {}  # by the storage's address

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
            return tensor.detach()

        given = torch.randn(size, generator=random, dtype=torch.float64)
        if mesh.sequence:
            given = given.chunk(mesh.tensor, 1)[rank]
        x, target = given[0].clone(), given[1]
        seen = {phase: Observer(torch.device("cpu")) for phase in ("forward", "backward", "step")}
        with seen["forward"], saved_tensors_hooks(keep, Tensor.detach):
            for i in range(shape.layers):
                x = layer_forward(x, {name: parameters[f"{i} {name}"] for name in (*SPLIT, *COPIED)}, shape, mesh)
        with seen["backward"]:
            gradients = [*torch.autograd.grad((x - target).square().sum() / prod(size[1:]), every)]
        with seen["step"], torch.no_grad():
            if mesh.sequence:
                sums = all_reduced(torch.cat([gradients[i] for i in copied])).split(shape.width)
                for i, whole in zip(copied, sums, strict=True):
                    gradients[i] = whole
            for parameter, gradient in zip(every, gradients, strict=True):
                parameter -= RATE * gradient
    storages = [each for address, each in kept.items() if address not in weights]
    bytes_kept = [each.untyped_storage().nbytes() for each in storages if each.shape[-1] > 1]
    statistics = sum(each.untyped_storage().nbytes() for each in storages if each.shape[-1] == 1)
    ended = {name: each.detach().numpy() for name, each in parameters.items()}
    shares = {REDUCE_SCATTER: mesh.tensor}  # the dispatcher shows the share that it returns
    calls = {name: Counter((o.call, o.nbytes * shares.get(o.call, 1)) for o in one.calls) for name, one in seen.items()}
    return SplitTrained(ended, calls, bytes_kept, statistics)


def calls_by_rule(share: RankShare, layers: int) -> dict[str, Collectives]:
    """Return the collectives of layers that the rule says."""
    calls: dict[str, Collectives] = {phase: Counter() for phase in ("forward", "backward", "step")}
    for phase, counted in (("forward", share.forward), ("backward", share.for_input + share.for_weights)):
        for each, times in counted:
            if isinstance(each, Exchange):
                calls[phase][each.op, each.size] += int(layers * times)
    if share.partial:
        calls["step"][ALL_REDUCE, layers * NUMBER * share.partial] = 1
    return calls


def apart(ranks: Sequence[SplitTrained], alone: SplitTrained) -> float:
    """Return how far parameters are apart, as a share of each one's largest number."""
    worst = 0.0
    for name, whole in alone.parameters.items():
        dim, parts = SPLIT.get(name.partition(" ")[2]), [one.parameters[name] for one in ranks]
        found = np.stack(parts) if dim is None else np.concatenate(parts, dim)
        worst = float(np.maximum(worst, np.abs(found - whole).max() / np.abs(whole).max()))  # nan where one is
    return worst


def split_differences(ranks: Sequence[SplitTrained], alone: SplitTrained, shape: Layers, mesh: Mesh) -> list[str]:
    """Return what differs from one process and from the rule, in words."""
    share = split(layer(shape, NUMBER), sizes_on(shape, SAMPLES, mesh.tensor), mesh)
    calls, kept = calls_by_rule(share, shape.layers), sorted([*share.kept.values()] * shape.layers)
    distance = apart(ranks, alone)
    said = [f"parameters are {distance:.2g} apart"] if not distance <= CLOSE else []
    for rank, one in enumerate(ranks):
        wrong = (phase for phase in calls if one.calls[phase] != calls[phase])
        said += [f"rank {rank} calls {one.calls[phase]} in its {phase}, not {calls[phase]}" for phase in wrong]
        said += [f"rank {rank} keeps {sorted(one.kept)} B, not {kept}"] * (sorted(one.kept) != kept)
        numbers = sum(each.size for each in one.parameters.values())
        said += [f"rank {rank} has {numbers} numbers"] * (numbers != shape.layers * sum(map(prod, share.weights)))
    return said


def compare_splits(arguments: list[str]) -> int:
    """Train on ranks and in one process, print what was found, and return the exit code."""
    if arguments:
        raise RequestError(arguments[0], "is not known; the check of split layers takes no options")
    alone, lines, said = train_split(None, SHAPE, NO_MESH), list[list[str]](), list[str]()
    try:
        with Ranks(RANKS) as ranks:
            runs = {name: ranks.call(train_split, SHAPE, mesh) for name, mesh in MESHES.items()}
    except ReplayError as error:
        raise RequestError("ranks", str(error)) from error
    for name, trained in runs.items():
        said += split_differences(trained, alone, SHAPE, MESHES[name])
        first, found = trained[0], f"{apart(trained, alone):.1e}"
        words = (", ".join(f"{n} {op} of {size:,}" for (op, size), n in c.items()) for c in first.calls.values())
        lines.append([name, found, *words, f"{sum(first.kept):,}", f"{first.statistics:,}"])
    header = ["split", "parameters", "forward, B", "backward, B", "step, B", "kept, B", "of norms, B"]
    write_stdout("\n".join([as_text(header, lines).rstrip("\n"), *(said or ["all as the rule says"]), ""]))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(exit_code_of(compare_splits))

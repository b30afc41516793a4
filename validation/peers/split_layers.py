"""Transformers that ranks split by hand, as Megatron-LM does, beside one process and beside the rule of `cdpsim`.

    python -m validation.peers.split_layers    # two ranks, by gloo; a few seconds

Ranks train whole models in float64 by SGD: embedding, layers, head and loss. Their parameters are compared with those
of one process. Then they take one step in float32, whose collectives, as torch's dispatcher shows them, are compared
with the rule of `cdpsim.model.splitting` and with the exchanges of a simulated run. The storages that autograd keeps
are compared with the rule; what torch keeps beside them is listed by `kept_beside`. Dropout is left out.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cdpsim import Model, RequestError, simulate
from cdpsim.cli.console import exit_code_of, write_stdout
from cdpsim.files.tables import as_text
from cdpsim.model.layers import (
    ALL_REDUCE,
    ALL_TO_ALL,
    PADDED,
    REDUCE_SCATTER,
    RING,
    Exchange,
    Layers,
    Operation,
    embedding,
    head,
    layer,
)
from cdpsim.model.layers import Tensor as Value
from cdpsim.model.splitting import NO_MESH, Mesh, sizes_on, split

from ..ranks.launcher import Ranks
from ..ranks.member import Member
from ..replay.contents import ReplayError
from ..training.passes import one_thread
from .context_operators import attended_in_context, own_positions
from .expert_operators import Uneven, mixture
from .measure import Observer
from .split_operators import Weights, all_reduced, attended, embedded, loss_of, products_by_columns, summed

RANKS, STEPS, RATE, SAMPLES, PRECISION, NUMBER = 2, 3, 0.5, 3, "fp32", 4
SIZES: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "length": 10, "vocabulary": 250, "ffn": 80}
LLAMA_LIKE: dict[str, Any] = {"gated": True, "norm": "rms", "biases": False, "positions": False, "tied": False}
SHAPES = {
    "gpt": Layers(**SIZES, attention="eager"),
    "gpt, fused attention": Layers(**SIZES),
    "llama": Layers(**SIZES, **LLAMA_LIKE, key_value_heads=2, attention="eager"),
    "llama, fused attention": Layers(**SIZES, **LLAMA_LIKE, key_value_heads=2),
    "one key/value head": Layers(**SIZES, key_value_heads=1, biases="qkv", attention="eager"),
    "parallel, one norm": Layers(**SIZES, parallel=True, positions=12, attention="eager"),
}
MESHES = {
    "tensor": Mesh(RANKS),
    "sequence": Mesh(RANKS, sequence=True),
    "sequence, gathered kept": Mesh(RANKS, sequence=True, keeps_gathered=True),
}
CLOSE = 1e-12  # of a parameter's largest number
# The dimension by which a parameter is split. Of others, each rank has a copy.
SPLIT = {"embedding": 0, "head": 0, "qkv": 0, "qkv bias": 0, "attention": 1, "up": 0, "up bias": 0, "down": 1}
Collectives = Counter[tuple[str, int]]  # collectives with the bytes of the whole tensor, messages with their own
Check = tuple[Mapping[str, Layers], Mapping[str, Mesh], Mesh]  # shapes, how ranks split them, and one process' mesh
Runs = dict[str, dict[str, list["SplitTrained"]]]  # of each shape, and split


class SplitTrained(NamedTuple):
    """The parameters of a rank after its training, and the measurements of one step."""

    parameters: dict[str, Any]  # arrays
    calls: dict[str, Collectives]  # by phase
    kept: list[int]  # bytes of each storage that autograd keeps


def drawn_parameters(shape: Layers) -> Weights:
    """Return the whole parameters of a model."""
    random, sizes = torch.Generator().manual_seed(48), shape.sizes
    h, q, a, f, rows = (sizes[dim] for dim in ("h", "q", "a", "f", "p"))
    up = sizes["g"] if shape.gated else f
    norms = ["norm 1"] if shape.parallel else ["norm 1", "norm 2"]
    of_layer: dict[str, tuple[int, ...]] = {"qkv": (q, h), "attention": (h, a), "up": (up, h), "down": (h, f)}
    of_layer |= {"qkv bias": (q,)} if shape.biases else {}
    of_layer |= {"attention bias": (h,), "up bias": (up,), "down bias": (h,)} if shape.biases is True else {}
    e, i, u = shape.experts or 0, sizes["i"], sizes["u"]
    gates = 1 + shape.gated
    of_experts: dict[str, tuple[int, ...]] = {"router": (e, h)}
    of_experts |= {"expert up": (e, gates * i, h), "expert down": (e, h, i)}
    of_experts |= {"shared up": (gates * u, h), "shared down": (h, u)} if u else {}
    of_model: dict[str, tuple[int, ...]] = {"embedding": (shape.vocabulary, h)}
    of_model |= {"positions": (rows, h)} if rows else {}
    of_model |= {} if shape.tied else {"head": (shape.vocabulary, h)}
    for k, has in enumerate(shape.has_experts):
        names = [name for name in of_layer if not (has and name in ("up", "down"))]
        of_model |= {f"{k}/{name}": of_layer[name] for name in names}
        of_model |= {f"{k}/{name}": size for name, size in of_experts.items() if has}
    every = ["last norm", *(f"{i}/{name}" for i in range(shape.layers) for name in norms)]
    of_model |= {name: (h,) for norm in every for name in ([norm, f"{norm} bias"] if shape.norm == "layer" else [norm])}
    drawn = {name: torch.randn(size, generator=random, dtype=torch.float64) for name, size in of_model.items()}
    return {name: each / h**0.5 + (name in every) for name, each in drawn.items()}


def own_share(name: str, whole: Tensor, shape: Layers, mesh: Mesh, rank: int) -> Tensor:
    """Return a rank's share of a parameter: of each of its parts, or of its heads, which several ranks may have."""
    kind, sizes, tensor = name.rpartition("/")[2], shape.sizes, mesh.tensor
    if kind.startswith("expert "):
        return whole.chunk(mesh.expert)[rank % mesh.expert]
    parts = [(whole, tensor)]
    if kind not in SPLIT or tensor == 1:
        return whole
    if kind in ("embedding", "head"):
        parts = [(F.pad(whole, (0, 0, 0, -len(whole) % (PADDED * tensor))), tensor)]
    elif kind.startswith("qkv"):
        cut = whole.split((sizes["a"], sizes["c"], sizes["c"]))
        parts = [(each, min(tensor, heads)) for each, heads in zip(cut, (shape.heads, shape.kv, shape.kv), strict=True)]
    elif kind.startswith("up"):
        parts = [(each, tensor) for each in whole.split(sizes["f"])]
    dim = SPLIT[kind]
    return torch.cat([part.chunk(many, dim)[rank * many // tensor] for part, many in parts], dim)


def normed(x: Tensor, of: Weights, name: str, shape: Layers) -> Tensor:
    """Return a value after one of the norms."""
    if shape.norm == "rms":
        return F.rms_norm(x, (shape.width,), of[name], 1e-5)
    return F.layer_norm(x, (shape.width,), of[name], of[f"{name} bias"])


def activated(u: Tensor, shape: Layers) -> Tensor:
    """Return what the MLP makes of its first product, of which half is the gate."""
    if not shape.gated:
        return F.gelu(u)
    gate, up = u.chunk(2, -1)
    return F.silu(gate) * up


def layer_forward(x: Tensor, of: Weights, shape: Layers, mesh: Mesh) -> Tensor:
    """Return what a layer makes of x."""
    qkv, up = ((of[name], of.get(f"{name} bias")) for name in ("qkv", "router" if "router" in of else "up"))
    biases = [of[name] for name in ("attention bias", "down bias") if name in of]
    y = normed(x, of, "norm 1", shape)
    attend = attended_in_context if mesh.context > 1 else attended
    if shape.parallel:  # one sum of both
        found, u = products_by_columns(y, [qkv, up], mesh)
        both = F.linear(attend(found, shape, mesh), of["attention"]) + F.linear(activated(u, shape), of["down"])
        return sum((summed(both, mesh), *biases), x)
    (found,) = products_by_columns(y, [qkv], mesh)
    attention = summed(F.linear(attend(found, shape, mesh), of["attention"]), mesh)
    x = sum((attention, *biases[:1]), x)
    if "router" in of:
        of_teams = normed(x, of, "norm 2", shape).split(SAMPLES)  # each fills experts of its own
        return x + torch.cat([mixture(y, of, shape, mesh, activated) for y in of_teams])
    (u,) = products_by_columns(normed(x, of, "norm 2", shape), [up], mesh)
    return sum((summed(F.linear(activated(u, shape), of["down"]), mesh), *biases[1:]), x)


def model_forward(tokens: Tensor, targets: Tensor, of: Weights, shape: Layers, mesh: Mesh, rank: int) -> Tensor:
    """Return the loss of a model."""
    x = embedded(tokens, of["embedding"], mesh)
    if "positions" in of:
        own = x.shape[1]  # with sequence or context, a share of all
        first = rank * own if mesh.sequence else 0
        rows = of["positions"][: shape.length] if mesh.context > 1 else of["positions"][first : first + own]
        x = x + own_positions(rows, 0, mesh, rank)
    for i in range(shape.layers):
        x = layer_forward(x, {name[2:]: of[name] for name in of if name.startswith(f"{i}/")}, shape, mesh)
    y = normed(x, of, "last norm", shape)
    (logits,) = products_by_columns(y, [(of.get("head", of["embedding"]), None)], mesh)
    return loss_of(logits, targets, shape.vocabulary, mesh)


def sum_copies(gradients: Weights, shape: Layers, mesh: Mesh) -> None:
    """Sum the gradients of what other ranks have, too, once a step: of copies with `sequence`, and of shared heads.

    Over context and experts it is the data axis that sums them; there each rank's loss is a mean of its own tokens.
    """
    copies = mesh.context * mesh.expert
    parts = [each for name, each in gradients.items() if mesh.sequence and name.rpartition("/")[2] not in SPLIT]
    if shape.kv < mesh.tensor:  # one key/value head, of which all ranks have a copy
        of_queries = shape.sizes["a"] // mesh.tensor
        parts += [each[of_queries:] for name, each in gradients.items() if "qkv" in name]
    parts += [each for name, each in gradients.items() if copies > 1 and "/expert " not in name]
    if parts:
        sums = all_reduced(torch.cat([part.flatten() for part in parts]))
        for part, whole in zip(parts, sums.split([part.numel() for part in parts]), strict=True):
            part.copy_(whole.view_as(part))
    for each in gradients.values():
        each /= copies


def take_step(
    of: Weights, tokens: Tensor, shape: Layers, mesh: Mesh, rank: int
) -> tuple[dict[str, Observer], list[int]]:
    """Train parameters by a step; return what was seen in each phase, and the bytes of each storage that was kept."""
    weights = {each.untyped_storage().data_ptr() for each in of.values()}
    kept: dict[int, Tensor] = {}  # by the storage's address

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()

    own = own_positions(tokens.chunk(mesh.expert, 1)[rank % mesh.expert], 2, mesh, rank)
    given, targets = (each.clone() for each in own)
    seen = {phase: Observer(torch.device("cpu")) for phase in ("forward", "backward", "step")}
    with seen["forward"], saved_tensors_hooks(keep, Tensor.detach):
        loss = model_forward(given, targets, of, shape, mesh, rank)
    with seen["backward"]:
        found = dict(zip(of, torch.autograd.grad(loss, [*of.values()]), strict=True))
    with seen["step"], torch.no_grad():
        sum_copies(found, shape, mesh)
        for name, gradient in found.items():
            of[name] -= RATE * gradient
    return seen, [each.untyped_storage().nbytes() for address, each in kept.items() if address not in weights]


def train_split(member: Member | None, shape: Layers, mesh: Mesh, teams: int = 1) -> SplitTrained:
    """Train a model, or this rank's share of it; teams have samples of their own, and share experts."""
    rank = 0 if member is None else member.rank
    whole, random = drawn_parameters(shape), torch.Generator().manual_seed(49)
    of = {name: own_share(name, each, shape, mesh, rank).clone() for name, each in whole.items()}
    steps = torch.randint(shape.vocabulary, (STEPS, 2, teams * SAMPLES, shape.length), generator=random)
    for each in of.values():
        each.requires_grad_()
    for tokens in steps:
        take_step(of, tokens, shape, mesh, rank)
    short = {name: each.detach().float().requires_grad_() for name, each in of.items()}
    seen, kept = take_step(short, steps[0], shape, mesh, rank)
    shares = {REDUCE_SCATTER: mesh.team, ALL_TO_ALL: mesh.context * mesh.expert}  # the dispatcher shows a rank's
    calls = {name: Counter((o.call, o.nbytes * shares.get(o.call, 1)) for o in one.calls) for name, one in seen.items()}
    return SplitTrained({name: each.detach().numpy() for name, each in of.items()}, calls, kept)


class Ruled(NamedTuple):
    """The collectives of one rank, the values that it keeps, and its parameters, by the rule."""

    calls: dict[str, Collectives]
    kept: list[int]  # bytes of each value
    numbers: int  # of its parameters


def calls_of(op: str, size: int, times: int, phase: str, mesh: Mesh) -> Collectives:
    """Return an exchange's calls: a ring sends keys and values in a message, in the backward their gradients, too."""
    if op != RING:
        return Counter({(op, size): times})
    kinds = 1 if phase == "forward" else 2
    messages = kinds * (mesh.context - 1) * times
    share = size // kinds // mesh.context
    return Counter({("send", share): messages, ("receive", share): messages})


def storages(kept: Mapping[str, int], shape: Layers, mesh: Mesh) -> list[int]:
    """Return the bytes of the storages of kept values; by heads, queries, keys and values have one each."""
    found = dict(kept)
    if mesh.context > 1 and mesh.attention_exchange == ALL_TO_ALL and "qkv" in found:
        size = found.pop("qkv")
        found |= {part: size * shape.sizes[dim] // shape.sizes["q"] for part, dim in zip("qkv", "acc", strict=True)}
    return [*found.values()]


def ruled_split(shape: Layers, mesh: Mesh) -> Ruled:
    """Return what the rule says of a model."""
    calls: dict[str, Collectives] = {phase: Counter() for phase in ("forward", "backward", "step")}
    sizes, kept, numbers, copies = sizes_on(shape, SAMPLES, mesh), list[int](), 0, 0
    mixed, experts = sum(shape.has_experts), 0
    in_experts = [(partial(layer, experts=True), mixed)] if mixed else []
    parts: list[tuple[Callable[..., Iterator[Operation]], int]]
    parts = [(embedding, 1), (layer, shape.layers - mixed), *in_experts, (head, 1)]
    for part, layers in parts:
        share = split(part(shape, NUMBER), sizes, mesh)
        for phase, counted in (("forward", share.forward), ("backward", share.for_input + share.for_weights)):
            for each, times in counted:
                if isinstance(each, Exchange):
                    calls[phase].update(calls_of(each.op, each.size, int(layers * times), phase, mesh))
        kept += storages(share.kept, shape, mesh) * layers
        numbers += layers * sum(map(prod, share.weights))
        experts += layers * sum(map(prod, share.experts))
        copies += layers * share.partial
    numbers -= shape.tied * prod(sizes.shape("vh", mesh.lies(Value("head", "vh", NUMBER))))
    copies += (numbers - experts) * (mesh.context * mesh.expert > 1)  # by the data axis
    if copies:
        calls["step"][ALL_REDUCE, NUMBER * copies] = 1
    return Ruled(calls, kept, numbers)


class KeptBeside(NamedTuple):
    """A value that torch keeps beside those of the rule, and why."""

    value: Value
    times: int
    why: str


def kept_beside(shape: Layers, mesh: Mesh) -> list[KeptBeside]:
    """Return what torch keeps beside the values of the rule."""
    norms, layers = (1 if shape.parallel else 2) * shape.layers + 1, shape.layers
    found = [KeptBeside(Value("deviation", "bs", 4), norms, "a norm's reciprocal deviation of each token")]
    if shape.norm == "layer":
        found.append(KeptBeside(Value("mean", "bs", 4), norms, "a layer norm's mean of each token"))
    else:
        why = "an RMS norm that is not fused: x / deviation"
        found.append(KeptBeside(Value("normalized", "bsh", NUMBER), norms, why))
    mixed = sum(shape.has_experts)
    gates = {"bsf": layers - mixed, "ri": mixed, "bsu": mixed * bool(shape.shared_ffn)}
    why = "a gate that is not fused: silu(gate)"
    found += [KeptBeside(Value("silu", dims, NUMBER), n, why) for dims, n in gates.items() if shape.gated and n]
    if mixed:
        found.append(KeptBeside(Value("weights of rows", "r", NUMBER), mixed, "a weight of each expert's row"))
        found.append(KeptBeside(Value("places of rows", "r", 8), 2 * mixed, "the token and the choice of each row"))
    if mesh.tensor > 1:
        found.append(KeptBeside(Value("others", "bk", 1), 2, "which tokens and targets are of other ranks"))
    else:
        found.append(KeptBeside(Value("total weight", "", NUMBER), 1, "a number of torch's cross-entropy"))
    return found


def bytes_beside(shape: Layers, mesh: Mesh) -> list[tuple[KeptBeside, int]]:
    """Return what torch keeps beside the values of the rule, each with its bytes on a rank."""
    sizes = sizes_on(shape, SAMPLES, mesh)
    return [(each, sizes.size(each.value, mesh.lies(each.value))) for each in kept_beside(shape, mesh)]


def simulated_exchanges(shape: Layers, mesh: Mesh) -> tuple[Collectives, int]:
    """Return the exchanges of a simulated step, and the bytes that a rank sends in it."""
    model = Model.of_layers(shape, samples=SAMPLES, precision=PRECISION)
    runtime = f"paper:keeps_gathered={'yes' if mesh.keeps_gathered else 'no'}"
    options: dict[str, Any] = {"tensor": mesh.tensor, "sequence": mesh.sequence, "runtime": runtime}
    options |= {"context": mesh.context, "attention_exchange": mesh.attention_exchange} if mesh.context > 1 else {}
    options |= {"expert": mesh.expert, "replicas": mesh.expert} if mesh.expert > 1 else {}
    run = simulate("dp", 1, m=1, steps=1, model=model, cluster="selene", optimizer="sgd", **options)
    found, sent = Counter[tuple[str, int]](), 0.0
    for row in run.exchanges or ():
        phase = "forward" if row.kind == "F" else "backward"
        times = row.times / mesh.expert  # of one of the teams
        found.update(calls_of(row.op, int(row.size), int(times), phase, mesh))
        sent += row.sent * times
    return found, int(sent if mesh.context * mesh.expert > 1 else run.summary()["bytes_sent"][0]["bytes"])


def bytes_by_ring(calls: Collectives, ranks: int) -> int:
    """Return the bytes that a rank sends by rings: an all-reduce sends twice what a gather or a scatter does.

    All to all, a rank sends a share of its own share; messages are sent as they are.
    """
    shares = {ALL_REDUCE: 2 * (ranks - 1) / ranks, ALL_TO_ALL: (ranks - 1) / ranks**2, "send": 1.0, "receive": 0.0}
    return sum(int(n * size * shares.get(op, (ranks - 1) / ranks)) for (op, size), n in calls.items())


def apart(ranks: Sequence[SplitTrained], alone: SplitTrained, shape: Layers, mesh: Mesh) -> float:
    """Return how far parameters are from a rank's share of one process', as a share of each one's largest number."""
    worst = [0.0]
    for name, array in alone.parameters.items():
        whole = torch.from_numpy(array)
        for rank, one in enumerate(ranks):
            wrong = own_share(name, whole, shape, mesh, rank) - torch.from_numpy(one.parameters[name])
            worst.append(float(wrong.abs().max() / whole.abs().max()))
    return float(torch.tensor(worst, dtype=torch.float64).max())  # nan where one is


def split_differences(ranks: Sequence[SplitTrained], alone: SplitTrained, shape: Layers, mesh: Mesh) -> list[str]:
    """Return what differs from one process, from the rule, and from a simulated run, in words."""
    ruled, distance = ruled_split(shape, mesh), apart(ranks, alone, shape, mesh)
    kept = sorted([*ruled.kept, *(size for each, size in bytes_beside(shape, mesh) for _ in range(each.times))])
    simulated = simulated_exchanges(shape, mesh)
    said = [f"parameters are {distance:.2g} apart"] if not distance <= CLOSE else []
    if isinstance(mesh, Uneven) and shape.capacity is None:
        return said  # how many rows a rank has, its tokens say
    for rank, one in enumerate(ranks):
        wrong = (phase for phase, calls in ruled.calls.items() if one.calls[phase] != calls)
        said += [f"rank {rank} calls {one.calls[phase]} in its {phase}, not {ruled.calls[phase]}" for phase in wrong]
        phases = ("forward", "backward") if mesh.tensor == 1 else one.calls  # else the data axis has the third
        step = sum((one.calls[phase] for phase in phases), Counter[tuple[str, int]]())
        sent = step, bytes_by_ring(step, mesh.team * mesh.expert)
        said += [f"rank {rank} exchanges {sent} in its step, not {simulated} as simulated"] * (sent != simulated)
        said += [f"rank {rank} keeps {sorted(one.kept)} B, not {kept}"] * (sorted(one.kept) != kept)
        numbers = sum(each.size for each in one.parameters.values())
        said += [f"rank {rank} has {numbers} numbers, not {ruled.numbers}"] * (numbers != ruled.numbers)
    return said


def table_of_splits(
    runs: Runs, alone: dict[str, SplitTrained], shapes: Mapping[str, Layers], meshes: Mapping[str, Mesh]
) -> str:
    """Return a row for each shape and split."""
    lines: list[list[str]] = []
    for name, of_shape in runs.items():
        for mesh, trained in of_shape.items():
            first, distance = trained[0], apart(trained, alone[name], shapes[name], meshes[mesh])
            words = (", ".join(f"{n} {op} of {size:,}" for (op, size), n in c.items()) for c in first.calls.values())
            ruled = sum(ruled_split(shapes[name], meshes[mesh]).kept)
            step = sum(first.calls.values(), Counter[tuple[str, int]]())
            kept = [f"{bytes_by_ring(step, RANKS):,}", f"{ruled:,}", f"{sum(first.kept) - ruled:,}"]
            lines.append([f"{name}; {mesh}", f"{distance:.1e}", *words, *kept])
    in_bytes = (f"{name}, B" for name in ("forward", "backward", "step", "sent", "kept", "beside"))
    return as_text(["shape and split", "parameters", *in_bytes], lines)


def table_beside() -> str:
    """Return a row for each value that a rank keeps beside those of the rule."""
    lines: dict[str, list[str]] = {}
    for shape in SHAPES.values():
        both = zip(*(bytes_beside(shape, MESHES[name]) for name in ("tensor", "sequence")), strict=True)
        for (each, size), (_, with_sequence) in both:
            lines[each.value.name] = [each.value.name, f"{size:,}", f"{with_sequence:,}", each.why]
    return as_text(["kept beside the rule", "tensor, B", "sequence, B", "what"], [*lines.values()])


def compare_on_ranks(shapes: Mapping[str, Layers], meshes: Mapping[str, Mesh], whole: Mesh) -> list[str]:
    """Train on ranks and in one process; return a table of what was found, and what differs."""
    teams = max(mesh.expert for mesh in meshes.values())
    try:
        with one_thread(), Ranks(RANKS) as ranks:
            alone = {name: train_split(None, shape, whole, teams) for name, shape in shapes.items()}
            runs = {
                name: {split_by: ranks.call(train_split, shape, mesh, teams) for split_by, mesh in meshes.items()}
                for name, shape in shapes.items()
            }
    except ReplayError as error:
        raise RequestError("ranks", str(error)) from error
    said = [
        f"{name}; {mesh}: {line}"
        for name, of_shape in runs.items()
        for mesh, trained in of_shape.items()
        for line in split_differences(trained, alone[name], shapes[name], meshes[mesh])
    ]
    return [table_of_splits(runs, alone, shapes, meshes), *said]


def print_comparison(arguments: list[str], of: str, checks: Sequence[Check], *beside: str) -> int:
    """Train on ranks and in one process, print what was found, and return the exit code."""
    if arguments:
        raise RequestError(arguments[0], f"is not known; the check of split {of} takes no options")
    found = [compare_on_ranks(*check) for check in checks]
    tables, said = [table for table, *_ in found], [line for _, *lines in found for line in lines]
    write_stdout("\n".join([*tables, *beside, *(said or ["all as the rule says"]), ""]))
    return 1 if said else 0


def compare_splits(arguments: list[str]) -> int:
    """Compare tensor parallelism, with and without sequence parallelism."""
    return print_comparison(arguments, "layers", [(SHAPES, MESHES, NO_MESH)], table_beside())


if __name__ == "__main__":
    sys.exit(exit_code_of(compare_splits))

"""The one rule by which operations are split among ranks, and from which every exchange between them follows.

An axis of ranks lists the dimensions that it may split, in order. A value lies *split* by the first of these that it
has, else *copied*. An operation's work is split by the first dimensions that any of its values or weights has. Beside
such a split,

    an input without them is needed whole: gathered if it lies split; its gradient is partial: scattered to where it
    lies split, else summed
    an output without them is partial: scattered to where it lies split, and its gradient gathered; else summed
    a value that has them, and lies split by others, goes from these to those, and back, all to all
    a weight without them is copied, and its gradient partial: summed over the axis once a step

A gather for the backward may run beside the product of the input's gradient, and what a partial gradient needs beside
that of the weights. Everything else waits.

The axis of tensors splits what heads and MLPs have, then the sequence; that of context splits the sequence. The core of
attention alone needs all positions of keys and values: they are gathered, or go around a ring beside its blocks, or it
is split by heads. The axis of experts splits experts; else each rank has samples of its own, and rows of these go to
the experts and back all to all. What is copied over context, or over experts, is summed by the data axis.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from math import ceil, prod
from typing import Any, Literal, NamedTuple

from cdpsim.model.layers import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    CONTEXT,
    CORE,
    EXPERT,
    GROUPED,
    PADDED,
    PRODUCT,
    REDUCE_SCATTER,
    RING,
    TENSOR,
    Exchange,
    Kernel,
    Layers,
    Operation,
    Operations,
    Tensor,
    embedding,
    head,
    layer,
)
from cdpsim.model.stage import PRECISIONS, Stage, Tie

AttentionExchange = Literal["gather", "ring", "all-to-all"]
Dims = frozenset[str]
Split = Mapping[str, Dims]  # of each axis, the dimensions that are split over it
OF_WEIGHTS, SEQUENCE, POSITIONS, OF_EXPERTS = map(frozenset, ("qmcanfgvuol", "sr", "str", "eij"))
HEADS, NONE = frozenset("qmcan"), frozenset[str]()
Counted = list[tuple[Kernel | Exchange, float]]
Operators = Collection[str]


class Axis(NamedTuple):
    """An axis of ranks: the dimensions that it may split, in order, and those of the core of attention."""

    name: str
    splits: tuple[Dims, ...]
    core: Dims = NONE  # where these are others

    def split_by(self, *dims: str) -> Dims:
        """Return the first dimensions that it may split, and that any of these tensors has."""
        return next((level for level in self.splits if not level.isdisjoint("".join(dims))), NONE)

    def lies(self, value: Tensor) -> Dims:
        """Return the dimensions by which a value lies split."""
        return self.core if self.core and "n" in value.dims else self.split_by(value.dims)

    def split_of(self, operation: Operation) -> Dims:
        """Return the dimensions by which the work of an operation is split."""
        if self.core and operation.in_core:
            return self.core
        values = (*operation.inputs, operation.output)
        return self.split_by(*(value.dims for value in values), *operation.weights)

    def moved(self, operation: Operation) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs that go to the operation all to all, and the outputs that come back so."""
        by, output = self.split_of(operation), operation.output
        inputs = operation.inputs if by == OF_EXPERTS else (*operation.queries, *operation.keys)
        if by not in (OF_EXPERTS, self.core):
            return [], []
        return [value for value in inputs if self.lies(value) != by], [output] * (self.lies(output) != by)


@dataclass(frozen=True)
class Mesh:
    """The ranks that do one task together, and how they split it; and those among which experts are split."""

    tensor: int = 1
    sequence: bool = False
    context: int = 1
    attention_exchange: AttentionExchange = "gather"
    expert: int = 1
    imbalance: float = 1.0  # the load of the busiest of the ranks that share experts, of even ones
    between: Fraction = Fraction(1)  # the share of experts' rows that go from node to node
    whole_boundaries: bool = False
    split_checkpoints: bool = False
    keeps_gathered: bool = False  # of the runtime: gathered inputs are kept for the backward
    sums_apart: bool = False  # of the runtime: each product sums its own part of a sum, and of its input's gradient
    weight_copies: bool = False  # of the runtime: a backward makes a tensor as large as the weight
    fused_norms: bool = True  # of the runtime, as the next two: one kernel, which keeps its input alone
    fused_mlp: bool = True
    fused_rotary: bool = True

    @property
    def team(self) -> int:
        """The number of ranks that do each task together."""
        return self.tensor * self.context

    @property
    def gathers_boundaries(self) -> bool:
        """Whether each rank sends its share of a boundary that all have, and the ranks that get it gather the rest."""
        return self.tensor > 1 and not (self.sequence or self.whole_boundaries)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of several ranks."""
        to_heads = HEADS if self.attention_exchange == ALL_TO_ALL else NONE
        axes = (
            (self.tensor, Axis(TENSOR, (OF_WEIGHTS, SEQUENCE)[: 1 + self.sequence])),
            (self.context, Axis(CONTEXT, (POSITIONS,), to_heads)),
            (self.expert, Axis(EXPERT, (OF_EXPERTS,))),
        )
        return tuple(axis for ranks, axis in axes if ranks > 1)

    def ranks(self, axis: str) -> int:
        """Return the number of ranks of an axis."""
        ranks: int = getattr(self, axis)
        return ranks

    def lies(self, value: Tensor, *but: str) -> Split:
        """Return the dimensions by which a value lies split over each axis; `but` are axes over which it is whole."""
        return {axis.name: axis.lies(value) for axis in self.axes if axis.name not in but}

    def split_of(self, operation: Operation) -> Split:
        """Return the dimensions by which the work of an operation is split over each axis."""
        return {axis.name: axis.split_of(operation) for axis in self.axes}


NO_MESH = Mesh()


class Sizes(NamedTuple):
    """The sizes of all dimensions, whole and split over the tensor axis, and the mesh."""

    whole: Mapping[str, int]
    share: Mapping[str, int]
    mesh: Mesh

    def shape(self, dims: str, split: Split | None = None) -> tuple[int, ...]:
        """Return the sizes of a tensor's dimensions, of which some are split."""
        split = split or {}
        of_tensor, of_context = split.get(TENSOR, NONE), split.get(CONTEXT, NONE)
        experts = "e" if split.get(EXPERT) else ""  # each rank has rows of its own, or as many of its experts
        sizes = ((dim, (self.share if dim in of_tensor else self.whole)[dim]) for dim in dims)
        context, expert = self.mesh.context, self.mesh.expert
        return tuple(
            size // ((context if dim in of_context else 1) * (expert if dim in experts else 1)) for dim, size in sizes
        )

    def size(self, value: Tensor, split: Split | None = None) -> int:
        """Return the bytes of a value."""
        return round(prod(self.shape(value.dims, split)) * value.width)

    def over(self, axis: Axis, value: Tensor) -> int:
        """Return the bytes of a value over all ranks of an axis; each of those that share experts has its own."""
        return self.size(value, self.mesh.lies(value, axis.name)) * (self.mesh.expert if axis.name == EXPERT else 1)

    def summed(self, weight: str, split: Split) -> int:
        """Return the numbers of a rank's weight that others have, too: of a copied one, and of shared heads."""
        if "e" in weight or not split.get(TENSOR):  # what experts have is summed by the data axis
            return 0
        if split[TENSOR].isdisjoint(weight):
            return prod(self.shape(weight, split))
        shared = "q" in weight and self.share["c"] * self.whole["a"] > self.whole["c"] * self.share["a"]
        return 2 * prod(self.shape(weight.replace("q", "c"), split)) * shared  # of keys and values


@dataclass
class RankShare:
    """One rank's share of some operations: its work, the bytes that it keeps, its weights."""

    forward: Counted = field(default_factory=list)
    for_input: Counted = field(default_factory=list)  # the input's part of the backward
    for_weights: Counted = field(default_factory=list)
    again: Counted = field(default_factory=list)  # the part of these that a fused core computes again
    core: Counted = field(default_factory=list)  # the part of the forward that is the core of attention
    kept: dict[str, int] = field(default_factory=dict)  # bytes for the backward, by the value's name
    core_kept: int = 0  # of these
    unused_input: int = 0  # bytes of the input, where nothing keeps it
    data: int = 0  # of these
    weights: list[tuple[int, ...]] = field(default_factory=list)
    experts: list[tuple[int, ...]] = field(default_factory=list)  # of these
    partial: int = 0  # numbers of weights whose gradients are summed over the tensor axis once a step
    forward_peak: int = 0  # bytes
    backward_transient: int = 0
    for_weights_left: int = 0  # bytes that the weights' part of a split backward needs of what was there before
    input_peak: int = 0  # the most that its input's part has
    weight_transient: int = 0
    output_gradient: int = 0  # the part of `for_weights_left` that is the gradient of the last operation's output
    retained: int = 0  # bytes of the gradients that torch keeps where it splits a backward, that one included
    retained_peak: int = 0  # the most that there are with those that it works with


def split(operations: Iterable[Operation], sizes: Sizes, mesh: Mesh, operators: Operators = ()) -> RankShare:
    """Return one rank's share: work, exchanges, bytes kept, weights; what `operators` make may be all that it keeps."""
    share, needed = RankShare(), set[tuple[str, str]]()
    operations = [each if getattr(mesh, each.fused, True) else each._replace(kept=each.unfused) for each in operations]
    for each in operations:
        by = mesh.split_of(each)
        row = _row(each, sizes, by)
        learns = bool(each.weights) and each.kind in (PRODUCT, GROUPED)
        backward = share.for_weights if all(v.given for v in each.inputs) else share.for_input
        share.forward.append((row, 1))
        backward.append((row, 1 if learns else each.again))
        share.for_weights += [(row, 1)] * learns
        share.again += [(row, each.again - 2)] * (each.kind == CORE)
        share.core += [(row, 1)] * each.in_core
        for axis in mesh.axes:
            _add_exchanges(share, each, sizes, mesh, axis, row, needed)
        share.weights += [sizes.shape(weight, by) for weight in each.weights]
        share.experts += [sizes.shape(weight, by) for weight in each.weights if "e" in weight]
        share.partial += sum(sizes.summed(weight, by) for weight in each.weights)
        _count_memory(share, each, sizes, mesh)
    given = operations[0].inputs[0]
    share.unused_input = 0 if given.name in share.kept else sizes.size(given, mesh.lies(given))
    _count_parts(share, operations, sizes, mesh)
    if operators:
        _keep(share, operations, sizes, mesh, operators)
    return share


def _keep(share: RankShare, operations: Sequence[Operation], sizes: Sizes, mesh: Mesh, operators: Operators) -> None:
    """Let the input and the outputs of operators be what is kept, and all else of the forward what is computed again.

    Of every second product, the first is kept. A product's output is partial where ranks sum it; of a sum that they
    scatter, each has its part.
    """
    given, kept, products, halved = operations[0].inputs[0], Counter[str](), 0, "products/2" in operators
    kept[given.name] = sizes.size(given, mesh.lies(given))
    share.core = []
    for row, times in share.forward:
        if isinstance(row, Exchange) and row.op == REDUCE_SCATTER and "scatters" in operators:
            kept["scattered"] += int(times) * row.size // mesh.ranks(row.axis)
        elif isinstance(row, Exchange):
            share.core.append((row, times))
    for each in operations:
        by, name = mesh.split_of(each), each.operator
        for part in each.apart if halved and each.parts else (each,):
            products += name == "products"
            if name in operators or (halved and name == "products" and products % 2):
                more = [value for value in each.kept if name == "core" and value not in each.inputs]
                kept.update({value.name: sizes.size(value, by) for value in (part.output, *more)})
            else:
                share.core.append((_row(part, sizes, by), 1))
    beside = sum(max(0, size - share.kept.get(name, 0)) for name, size in kept.items())  # while it computes again
    share.kept["outputs of operators"] = beside
    share.forward_peak += beside
    share.input_peak += beside
    share.core_kept, share.unused_input = sum(share.kept.values()) - sum(kept.values()), 0
    share.core *= share.core_kept > 0  # else nothing is left to be computed again


def _add_exchanges(
    share: RankShare, each: Operation, sizes: Sizes, mesh: Mesh, axis: Axis, row: Kernel, needed: set[tuple[str, str]]
) -> None:
    """Add the exchanges that an operation needs over an axis, where it is split."""
    by, (there, back) = axis.split_of(each), axis.moved(each)
    learns = bool(each.weights) and each.kind == PRODUCT
    backward = share.for_weights if all(v.given for v in each.inputs) else share.for_input
    for value in (*there, *back):
        exchange = Exchange(axis.name, ALL_TO_ALL, sizes.over(axis, value))
        share.forward.append((exchange, 1))
        backward.append((exchange, 1))
    if axis.name == CONTEXT and each.keys and not there:
        _bring_keys(share, each, sizes, mesh, axis, row)
    for value in _whole_inputs(axis, each):
        size, lies, known = sizes.over(axis, value), axis.lies(value), (axis.name, value.name) in needed
        needed.add((axis.name, value.name))
        if not (lies or value.given) and (mesh.sums_apart or not known):
            backward.append((Exchange(axis.name, ALL_REDUCE, size, row if learns else None), 1))
        if lies and not known:
            share.forward.append((Exchange(axis.name, ALL_GATHER, size), 1))
            backward.append((Exchange(axis.name, REDUCE_SCATTER, size, row if learns else None), 1))
            if value in each.kept and not mesh.keeps_gathered:
                share.for_weights.append((Exchange(axis.name, ALL_GATHER, size, row), 1))
    if by and by.isdisjoint(each.output.dims) and not back:
        lies, size = axis.lies(each.output), sizes.over(axis, each.output)
        times = len(each.inputs) if learns and mesh.sums_apart else 1
        share.forward.append((Exchange(axis.name, REDUCE_SCATTER if lies else ALL_REDUCE, size), times * each.sums))
        backward += [(Exchange(axis.name, ALL_GATHER, size), times)] * bool(lies)


def _whole_inputs(axis: Axis, each: Operation) -> list[Tensor]:
    """Return the inputs of an operation that it needs whole over an axis."""
    by = axis.split_of(each)
    return [v for v in each.inputs if by and by.isdisjoint(v.dims) and axis.name != EXPERT]


def _bring_keys(share: RankShare, each: Operation, sizes: Sizes, mesh: Mesh, axis: Axis, row: Kernel) -> None:
    """Bring the keys and values of all positions: gathered, and again for the backward, or around a ring."""
    size = [sizes.over(axis, value) for value in each.keys]
    if mesh.attention_exchange == RING:
        block = row._replace(flop=row.flop * each.again, moved=row.moved * each.again)
        share.forward.append((Exchange(axis.name, RING, sum(size), row), 1))
        share.for_input.append((Exchange(axis.name, RING, 2 * sum(size), block), 1))  # with their gradients
        return
    for whole in size:
        gather = Exchange(axis.name, ALL_GATHER, whole)
        share.forward.append((gather, 1))
        share.for_input += [(gather, 1)] * (not mesh.keeps_gathered)
        share.for_input.append((Exchange(axis.name, REDUCE_SCATTER, whole), 1))


def _row(each: Operation, sizes: Sizes, by: Split) -> Kernel:
    """Return what one rank computes of an operation, or moves; a product moves its operands."""
    flop = float(sum(times * prod(sizes.shape(dims, by)) for dims, times in each.flop))
    moved = sum(width * prod(sizes.shape(dims, by)) for dims, width in each.moved)
    if each.kind in (PRODUCT, GROUPED):
        moved = sum(sizes.size(value, by) for value in (*each.inputs, each.output))
        moved += sum(each.output.width * prod(sizes.shape(weight, by)) for weight in each.weights)
    return Kernel(each.kind, flop, float(moved), each.done)


def _count_memory(share: RankShare, each: Operation, sizes: Sizes, mesh: Mesh) -> None:
    """Count what an operation keeps, and its working memory."""
    whole = [v for axis in mesh.axes for v in _whole_inputs(axis, each)]
    for value in each.kept:
        gathered = TENSOR if value in whole and mesh.keeps_gathered else ""
        size = sizes.size(value, mesh.lies(value, gathered))
        if value.name not in share.kept:
            share.core_kept += size * each.in_core
            share.data += size * value.given
        share.kept[value.name] = size
    by = mesh.split_of(each)
    keys = _keys_there(each, sizes, mesh)
    gradients = sum(keys.values()) * (2 if mesh.attention_exchange == RING else 1)  # of a block, and of the part
    share.backward_transient = max(share.backward_transient, gradients + sum(keys.values()) * (not mesh.keeps_gathered))
    if mesh.keeps_gathered and mesh.attention_exchange != RING:
        share.kept |= keys
        keys = {}
    if each.kind == CORE and any(axis.name == CONTEXT and axis.moved(each)[1] for axis in mesh.axes):
        of_heads = sizes.size(each.output, by)  # beside that of positions
        share.kept[f"{each.output.name} of heads"] = of_heads
        share.core_kept += of_heads
    loose = {v for v in (*each.inputs, each.output) if v.name not in share.kept}
    loose |= {v for v in whole if share.kept.get(v.name, 0) < sizes.size(v, by)}
    working = sum(sizes.size(v, by) for v in loose) + sum(keys.values())
    share.forward_peak = max(share.forward_peak, sum(share.kept.values()) + working)
    if each.kind in (PRODUCT, GROUPED) and each.weights:
        for given, weight in zip(each.inputs, each.weights, strict=False):  # biases are behind the weights
            again = sizes.size(given, by) if given in loose else 0
            copied = each.output.width * prod(sizes.shape(weight, by)) if mesh.weight_copies else 0
            used = again + sizes.size(given, by) + sizes.size(each.output, by) + int(copied)
            share.backward_transient = max(share.backward_transient, used)


def _keys_there(each: Operation, sizes: Sizes, mesh: Mesh) -> dict[str, int]:
    """Return the bytes of keys and values that are there for a core beside its own: all, or one part of a ring."""
    if mesh.context == 1 or mesh.attention_exchange == ALL_TO_ALL:
        return {}
    parts = mesh.context if mesh.attention_exchange == RING else 1
    return {f"all {v.name}": sizes.size(v, mesh.lies(v, CONTEXT)) // parts for v in each.keys}


def _count_parts(share: RankShare, operations: Sequence[Operation], sizes: Sizes, mesh: Mesh) -> None:
    """Count the memory of a split backward: inputs of products stay for the weights' part, and outputs' gradients."""
    products = [each for each in operations if each.kind in (PRODUCT, GROUPED) and each.weights]
    stay = {value.name for each in products for value in each.inputs}
    users, live = Counter(value.name for each in operations for value in each.kept), dict(share.kept)
    gradients = 0
    for each in reversed(operations):
        by = mesh.split_of(each)
        own, given = sizes.size(each.output, by), sum(sizes.size(v, by) for v in each.inputs if not v.given)
        share.input_peak = max(share.input_peak, sum(live.values()) + gradients + own + given)
        share.retained_peak = max(share.retained_peak, share.retained + own + given)
        if each.weights and (each.fused or {*each.kept} == {*each.inputs}):  # a norm or a product
            share.retained += own
        if each in products:
            gradients += own
            share.output_gradient += own * (each.output in operations[-1].inputs and not operations[-1].kept)
            again = (sizes.size(v, by) for v in each.inputs if share.kept[v.name] < sizes.size(v, by))
            share.weight_transient = max(share.weight_transient, sum(again))
        users.subtract(value.name for value in each.kept)
        live = {name: size for name, size in live.items() if users[name] or name in stay}
    share.for_weights_left = gradients + sum(live.values())


def sizes_on(shape: Layers, samples: int, mesh: Mesh) -> Sizes:
    """Return the sizes of a shape's dimensions, whole and over the tensor axis; the vocabulary is padded."""
    tensor, whole = mesh.tensor, {"b": samples} | shape.sizes
    if tensor > 1:
        whole["v"] = -(-whole["v"] // (PADDED * tensor)) * PADDED * tensor
    parts = mesh.context * (tensor if mesh.sequence else 1)  # of the sequence
    rows = samples * shape.length // parts * shape.top_k
    if shape.capacity is not None:  # of every expert, from each rank
        rows = whole["e"] * ceil(rows * shape.capacity / whole["e"])
    whole["r"] = rows * parts
    share = {dim: size // tensor for dim, size in whole.items()}
    if shape.key_value_rank is None:  # keys are copied where there are fewer heads of them than ranks
        share["c"] = max(1, shape.kv // tensor) * whole["d"]
        share["q"] = share["a"] + 2 * share["c"]
    return Sizes(whole, share, mesh)


@lru_cache(maxsize=256)
def shaped_stages(
    shape: Layers, mesh: Mesh, samples: int, precision: str, operators: Operators = ()
) -> tuple[tuple[Stage, ...], tuple[Tie, ...]]:
    """Return the stages of a shape, one for each layer between embedding and head, and the weights that two share.

    Of `operators` layers keep the outputs; all else is what they have as the core of attention, to be computed again.
    """
    width, sizes = PRECISIONS[precision], sizes_on(shape, samples, mesh)
    boundary, logits = (
        sizes.size(value, mesh.lies(value)) for value in (Tensor("x", "bsh", width), Tensor("logits", "bsv", width))
    )
    parts = {"embedding": embedding, "layer": layer, "head": head}
    parts |= {"experts": partial(layer, experts=True)} if shape.experts else {}
    stage = {}
    for name, part in parts.items():
        share = split(part(shape, width), sizes, mesh, () if name in ("embedding", "head") else operators)
        stage[name] = _stage(name, share, width, logits if name == "head" else boundary, mesh)
    names = ("embedding", *("experts" if has else "layer" for has in shape.has_experts), "head")
    rows, columns = sizes.shape("vh", mesh.lies(Tensor("embedding", "vh", width)))
    tie = Tie(stages=(0, shape.layers + 1), parameters=width * rows * columns, factored=width * (rows + columns))
    return tuple(stage[name] for name in names), (tie,) * shape.tied


def _stage(name: str, share: RankShare, width: int, boundary: int, mesh: Mesh) -> Stage:
    """Return a stage of one rank's share."""
    kept = sum(share.kept.values())
    weights, backward = Operations(share.for_weights), Operations(share.for_input + share.for_weights)
    output = boundary * (share.output_gradient == boundary)  # else it is another tensor
    parts: dict[str, Any] = {
        "weight_activation": share.for_weights_left,
        "weight_output": output,
        "retained_gradients": share.retained - output,
        "retained_input_transient": max(share.backward_transient, share.retained_peak),
        "input_transient": max(share.backward_transient, share.input_peak - kept - boundary),
        "weight_transient": share.weight_transient,
    }
    return Stage(
        name=name,
        forward=Operations(share.forward),
        backward=backward,
        weight_backward=weights if share.for_input else backward,
        recomputed=Operations(share.again) if share.again else None,
        recomputes=bool(share.core),
        attention_activation=share.core_kept,
        attention_forward=Operations(share.core) if share.core else None,
        activation=kept + share.unused_input,
        unused_input=share.unused_input,
        data=share.data,
        forward_transient=share.forward_peak - kept,
        backward_transient=share.backward_transient,
        boundary=boundary,
        sent=-(-boundary // mesh.tensor) if mesh.gathers_boundaries else None,
        parameters=width * sum(map(prod, share.weights)),
        partial=width * share.partial,
        factored=width * sum(sum(shape) for shape in share.weights),
        tensors=tuple(share.weights),
        expert_parameters=width * sum(map(prod, share.experts)),
        expert_tensors=tuple(share.experts),
        **(parts if weights < backward else {}),
    )

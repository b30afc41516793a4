"""The one rule by which operations are split among ranks, and from which every exchange between them follows.

An axis of ranks lists the dimensions that it may split, in order. A value lies *split* by the first of these that it
has, else *copied*. An operation's work is split by the first dimensions that any of its values or weights has. Beside
such a split,

    an input without them is needed whole: gathered if it lies split; its gradient is partial: scattered to where it
    lies split, else summed
    an output without them is partial: scattered to where it lies split, and its gradient gathered; else summed
    a weight without them is copied, and its gradient partial: summed over the axis once a step

A gather for the backward may run beside the product of the input's gradient, and what a partial gradient needs beside
that of the weights. Everything else waits.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from cdpsim.model.layers import (
    ALL_GATHER,
    ALL_REDUCE,
    CORE,
    PADDED,
    PRODUCT,
    REDUCE_SCATTER,
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

OF_WEIGHTS, SEQUENCE = frozenset("qcanfgv"), frozenset("s")
Counted = list[tuple[Kernel | Exchange, float]]


class Mesh(NamedTuple):
    """The ranks that do one task together, and how they split it."""

    tensor: int = 1
    sequence: bool = False
    whole_boundaries: bool = False
    split_checkpoints: bool = False
    keeps_gathered: bool = False  # of the runtime: gathered inputs are kept for the backward
    sums_apart: bool = False  # of the runtime: each product sums its own part of a sum, and of its input's gradient
    weight_copies: bool = False  # of the runtime: a backward makes a tensor as large as the weight

    @property
    def gathers_boundaries(self) -> bool:
        """Whether each rank sends its share of a boundary that all have, and the ranks that get it gather the rest."""
        return self.tensor > 1 and not (self.sequence or self.whole_boundaries)

    def split_by(self, *dims: str) -> frozenset[str]:
        """Return the first dimensions that the tensor axis may split, and that any of these tensors has."""
        levels = (OF_WEIGHTS, SEQUENCE)[: (1 + self.sequence) * (self.tensor > 1)]
        return next((level for level in levels if not level.isdisjoint("".join(dims))), frozenset())

    def split_of(self, operation: Operation) -> frozenset[str]:
        """Return the dimensions by which the work of an operation is split."""
        values = (*operation.inputs, operation.output)
        return self.split_by(*(value.dims for value in values), *operation.weights)


NO_MESH = Mesh()


class Sizes(NamedTuple):
    """The sizes of all dimensions, whole and on one rank."""

    whole: Mapping[str, int]
    share: Mapping[str, int]

    def shape(self, dims: str, split_by: frozenset[str] = frozenset()) -> tuple[int, ...]:
        """Return the sizes of a tensor's dimensions, of which some are split."""
        return tuple((self.share if dim in split_by else self.whole)[dim] for dim in dims)

    def size(self, value: Tensor, split_by: frozenset[str] = frozenset()) -> int:
        """Return the bytes of a value."""
        return int(prod(self.shape(value.dims, split_by)) * value.width)

    def summed(self, weight: str, split_by: frozenset[str]) -> int:
        """Return the numbers of a rank's weight that others have, too: of a copied one, and of shared heads."""
        if split_by.isdisjoint(weight):
            return prod(self.shape(weight))
        shared = "q" in weight and self.share["c"] * self.whole["a"] > self.whole["c"] * self.share["a"]
        return 2 * prod(self.shape(weight.replace("q", "c"), split_by)) * shared  # of keys and values


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
    data: int = 0  # of these
    weights: list[tuple[int, ...]] = field(default_factory=list)
    partial: int = 0  # numbers of weights whose gradients are summed over the axis once a step
    forward_peak: int = 0  # bytes
    backward_transient: int = 0
    for_weights_left: int = 0  # bytes that the weights' part of a split backward needs of what was there before
    input_peak: int = 0  # the most that its input's part has
    weight_transient: int = 0
    output_gradient: int = 0  # the part of `for_weights_left` that is the gradient of the last operation's output
    retained: int = 0  # bytes of the gradients that torch keeps where it splits a backward, that one included
    retained_peak: int = 0  # the most that there are with those that it works with


def split(operations: Iterable[Operation], sizes: Sizes, mesh: Mesh) -> RankShare:
    """Return one rank's share: work, exchanges, bytes kept, weights."""
    share, needed, operations = RankShare(), set[str](), list(operations)
    for each in operations:
        by = mesh.split_of(each)
        whole = [v for v in each.inputs if by and by.isdisjoint(v.dims)]
        row = _row(each, sizes, by)
        learns = each.kind == PRODUCT and bool(each.weights)
        backward = share.for_weights if all(v.given for v in each.inputs) else share.for_input
        share.forward.append((row, 1))
        backward.append((row, 1 if learns else each.again))
        share.for_weights += [(row, 1)] * learns
        share.again += [(row, each.again - 2)] * (each.kind == CORE)
        share.core += [(row, 1)] * each.in_core
        for value in whole:
            size, lies, known = sizes.size(value), mesh.split_by(value.dims), value.name in needed
            needed.add(value.name)
            if not (lies or value.given) and (mesh.sums_apart or not known):
                backward.append((Exchange(TENSOR, ALL_REDUCE, size, row if learns else None), 1))
            if lies and not known:
                share.forward.append((Exchange(TENSOR, ALL_GATHER, size), 1))
                backward.append((Exchange(TENSOR, REDUCE_SCATTER, size, row if learns else None), 1))
                if value in each.kept and not mesh.keeps_gathered:
                    share.for_weights.append((Exchange(TENSOR, ALL_GATHER, size, row), 1))
        if by and by.isdisjoint(each.output.dims):
            lies = mesh.split_by(each.output.dims)
            size = sizes.size(each.output)
            times = len(each.inputs) if learns and mesh.sums_apart else 1
            share.forward.append((Exchange(TENSOR, REDUCE_SCATTER if lies else ALL_REDUCE, size), times * each.sums))
            backward += [(Exchange(TENSOR, ALL_GATHER, size), times)] * bool(lies)
        share.weights += [sizes.shape(weight, by) for weight in each.weights]
        share.partial += sum(sizes.summed(weight, by) for weight in each.weights if by)
        _count_memory(share, each, sizes, mesh, whole)
    _count_parts(share, operations, sizes, mesh)
    return share


def _row(each: Operation, sizes: Sizes, by: frozenset[str]) -> Kernel:
    """Return what one rank computes of an operation, or moves; a product moves its operands."""
    flop = float(sum(times * prod(sizes.shape(dims, by)) for dims, times in each.flop))
    moved = sum(width * prod(sizes.shape(dims, by)) for dims, width in each.moved)
    if each.kind == PRODUCT:
        moved = sum(sizes.size(value, by) for value in (*each.inputs, each.output))
        moved += sum(each.output.width * prod(sizes.shape(weight, by)) for weight in each.weights)
    return Kernel(each.kind, flop, float(moved), each.done)


def _count_memory(share: RankShare, each: Operation, sizes: Sizes, mesh: Mesh, whole: list[Tensor]) -> None:
    """Count what an operation keeps, and its working memory."""
    for value in each.kept:
        by = frozenset[str]() if value in whole and mesh.keeps_gathered else mesh.split_by(value.dims)
        size = sizes.size(value, by)
        if value.name not in share.kept:
            share.core_kept += size * each.in_core
            share.data += size * value.given
        share.kept[value.name] = size
    by = mesh.split_of(each)
    loose = {v for v in (*each.inputs, each.output) if v.name not in share.kept}
    loose |= {v for v in whole if share.kept.get(v.name, 0) < sizes.size(v)}
    share.forward_peak = max(share.forward_peak, sum(share.kept.values()) + sum(sizes.size(v, by) for v in loose))
    if each.kind == PRODUCT and each.weights:
        for given, weight in zip(each.inputs, each.weights, strict=False):  # biases are behind the weights
            again = sizes.size(given, by) if given in loose else 0
            copied = each.output.width * prod(sizes.shape(weight, by)) if mesh.weight_copies else 0
            used = again + sizes.size(given, by) + sizes.size(each.output, by) + int(copied)
            share.backward_transient = max(share.backward_transient, used)


def _count_parts(share: RankShare, operations: Sequence[Operation], sizes: Sizes, mesh: Mesh) -> None:
    """Count the memory of a split backward: inputs of products stay for the weights' part, and outputs' gradients."""
    products = [each for each in operations if each.kind == PRODUCT and each.weights]
    stay = {value.name for each in products for value in each.inputs}
    users, live = Counter(value.name for each in operations for value in each.kept), dict(share.kept)
    gradients = 0
    for each in reversed(operations):
        by = mesh.split_of(each)
        own, given = sizes.size(each.output, by), sum(sizes.size(v, by) for v in each.inputs if not v.given)
        share.input_peak = max(share.input_peak, sum(live.values()) + gradients + own + given)
        share.retained_peak = max(share.retained_peak, share.retained + own + given)
        if each.weights and {*each.kept} == {*each.inputs}:  # a norm or a product
            share.retained += own
        if each in products:
            gradients += own
            share.output_gradient += own * (each.output in operations[-1].inputs and not operations[-1].kept)
            again = (sizes.size(v, by) for v in each.inputs if share.kept[v.name] < sizes.size(v, by))
            share.weight_transient = max(share.weight_transient, sum(again))
        users.subtract(value.name for value in each.kept)
        live = {name: size for name, size in live.items() if users[name] or name in stay}
    share.for_weights_left = gradients + sum(live.values())


def sizes_on(shape: Layers, samples: int, tensor: int) -> Sizes:
    """Return the sizes of a shape's dimensions, whole and on one of `tensor` ranks; the vocabulary is padded."""
    whole = {"b": samples} | shape.sizes
    if tensor > 1:
        whole["v"] = -(-whole["v"] // (PADDED * tensor)) * PADDED * tensor
    keys = max(1, shape.kv // tensor) * whole["d"]  # copied where there are fewer heads than ranks
    share = {dim: size // tensor for dim, size in whole.items()}
    return Sizes(whole, share | {"c": keys, "q": share["a"] + 2 * keys})


@lru_cache(maxsize=64)
def shaped_stages(shape: Layers, mesh: Mesh, samples: int, precision: str) -> tuple[tuple[Stage, ...], tuple[Tie, ...]]:
    """Return the stages of a shape, one for each layer between embedding and head, and the weights that two share."""
    width, sizes = PRECISIONS[precision], sizes_on(shape, samples, mesh.tensor)
    boundary = sizes.size(Tensor("x", "bsh", width), mesh.split_by("s"))
    logits = sizes.size(Tensor("logits", "bsv", width), mesh.split_by("v"))
    first, middle, last = (
        _stage(name, split(part(shape, width), sizes, mesh), width, output, mesh)
        for name, part, output in (
            ("embedding", embedding, boundary),
            ("layer", layer, boundary),
            ("head", head, logits),
        )
    )
    rows, columns = sizes.shape("vh", mesh.split_by("v"))
    tie = Tie(stages=(0, shape.layers + 1), parameters=width * rows * columns, factored=width * (rows + columns))
    return (first, *(middle,) * shape.layers, last), (tie,) * shape.tied


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
        activation=kept,
        data=share.data,
        forward_transient=share.forward_peak - kept,
        backward_transient=share.backward_transient,
        boundary=boundary,
        sent=-(-boundary // mesh.tensor) if mesh.gathers_boundaries else None,
        parameters=width * sum(map(prod, share.weights)),
        partial=width * share.partial,
        factored=width * sum(sum(shape) for shape in share.weights),
        tensors=tuple(share.weights),
        **(parts if weights < backward else {}),
    )

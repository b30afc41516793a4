"""Recomputation: what a stage keeps from its forward to its backward, and what its backward computes again.

A segment of consecutive layers keeps only its input and computes its forward again before its backward (Chen et al.
2016). Layers are those of the model's file.

    full       the stage is one segment
    sqrt       the l layers of a stage make the least number of segments that is at least their square root (section
               4.3 there), as even in layers as can be
    layer      each layer that `recomputes` is a segment, as Megatron-LM's and torchtitan's "full" have it: embedding
               and head, with the loss, are none
    layer+head each layer is a segment; the last one computes the loss again, too
    layers:K   each of the first K layers of a stage that recompute is one: Megatron-LM's method "block" with
               `recompute-num-layers` K, which counts the layers of each (virtual) stage, too. Where stages are parts
               of it, as single layers are, these count together

The second forward adds its work to the backward, and so does the loss of a last stage in a segment.

`selective` (Korthikanti et al. 2022, section 5) computes the core of attention again: products of queries and keys,
softmax, its dropout, and the product with values. Stages say what the core keeps and costs (`attention_activation`,
`attention_forward`). A layer's core is there while its layer computes, beside all else that the layer has: this is
never too little. `selective:LIST` keeps the inputs of layers and the outputs of a list of operators (OPERATORS), as
torchtitan does, and computes all else of a layer again.

`reversible` (Gomez et al. 2017, section 3.2): a layer whose output is as large as its input computes its input from its
output. Of such layers in a row only the last output is kept; the backward goes through each layer once more, beside its
output, and has its activations then. Layers that change the size, and a model's first one, keep what they kept.

Of ranks that share each layer, `split_checkpoints` (ZeRO-R, Rajbhandari et al. 2020, section 6.1) lets each keep a
share of a segment's input, beside the whole while the segment computes. The backward gathers the whole first.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import isqrt

from msgspec.structs import replace

from cdpsim.errors import RequestError
from cdpsim.files.config import Cost
from cdpsim.model import OF_OPERATORS, SINGLE_LAYERS, Model
from cdpsim.model.layers import ALL_GATHER, TENSOR, Exchange, Operations
from cdpsim.model.splitting import shaped_stages
from cdpsim.model.stage import NO_CORE, Stage, add_costs, first_gradients, merge_stages

SEGMENTED = ("none", "layer+head", "full", "sqrt")  # ways in which all of a stage is computed again, or nothing


def refuse_ineffective(model: Model, recompute: str) -> None:
    """Refuse a way to recompute that none of the model's layers can take."""
    if recompute == "selective" and not any(stage.attention_activation for stage in model.stages):
        problem = "no stage says what the core of its attention keeps (`attention_activation`, `attention_forward`)"
        raise RequestError("recompute", f"selective, but {problem}; give them, or take --recompute layer")
    given = (0, *(stage.boundary for stage in model.stages))
    if recompute == "reversible" and not any(map(_is_reversible, model.stages, given)):
        problem = "no layer gives as many bytes as it gets (`boundary`), as reversible ones do"
        raise RequestError("recompute", f"reversible, but {problem}; take --recompute layer")


def with_operators(model: Model, recompute: str) -> Model:
    """Return a model of layers with all that `selective:LIST` computes again as what `selective` does."""
    if model.layers is None or model.samples is None:
        raise RequestError("recompute", f"{recompute} is of operators, which [layers] has; take --recompute layer")
    operators = (*recompute.removeprefix(OF_OPERATORS).split("+"),)
    stages, _ = shaped_stages(model.layers, model.mesh, model.samples, model.precision, operators)
    return replace(model, stages=stages)


def core_share(model: Model) -> float:
    """Return the share of a model's activations that the core of attention keeps, and `selective` computes again."""
    kept = sum(stage.activation for stage in model.stages)
    return sum(stage.attention_activation for stage in model.stages) / kept if kept else 0.0


def ways_of_stages(recompute: str, first: Sequence[int], places: Sequence[int], layers: Sequence[Stage]) -> list[str]:
    """Return how each stage is computed again: stages that begin with these layers, in places that do with those.

    >>> layer = Stage(forward=1.0, backward=2.0)
    >>> ways_of_stages("layers:3", (0, 2, 4, 6), (0, 4), [layer] * 8)
    ['layers:3', 'layers:1', 'layers:3', 'layers:1']
    >>> [ways_of_stages("layers:1", (0, 1, 2), places, [layer] * 3) for places in ((), (0,))]
    [['layers:1', 'layers:1', 'layers:1'], ['layers:1', 'none', 'none']]
    """
    if not recompute.startswith(SINGLE_LAYERS) or not places:
        return [recompute] * len(first)
    count = int(recompute.removeprefix(SINGLE_LAYERS))
    before = [0, *accumulate(layer.recomputes for layer in layers)]
    left = (count - before[layer] + before[places[bisect_right(places, layer) - 1]] for layer in first)
    return [f"{SINGLE_LAYERS}{layers}" if layers > 0 else "none" for layers in left]


def make_stage(layers: Sequence[Stage], given: int, recompute: str, j: int, ranks: int = 1) -> Stage:
    """Return stage j, made of these layers, with what it computes again; the stage before sends it `given` bytes.

    Each of `ranks` ranks keeps a share of what segments keep.
    """
    if recompute.startswith("selective"):
        return merge_stages([_without_core(layer) for layer in layers], given)
    if recompute == "reversible":
        return merge_stages(list(_reversed_layers(layers, given, j)), given)
    if recompute.startswith(SINGLE_LAYERS):
        return merge_stages(_single_layers(layers, given, int(recompute.removeprefix(SINGLE_LAYERS)), j, ranks), given)
    if recompute == "layer" and not all(layer.recomputes for layer in layers):
        return merge_stages(_single_layers(layers, given, len(layers), j, ranks), given)
    stage = merge_stages(layers, given)
    if recompute == "none":
        return stage
    bounds = segment_bounds(len(layers), recompute)
    inputs = [given, *(layers[begin - 1].boundary for begin in bounds[1:-1])]
    segments = [
        merge_stages(layers[begin:end], size) for (begin, end), size in zip(pairwise(bounds), inputs, strict=True)
    ]
    return recompute_stage(stage, segments, given, j, ranks)


def _single_layers(layers: Sequence[Stage], given: int, first: int, j: int, ranks: int) -> list[Stage]:
    """Return the layers of stage j, of which the first ones that recompute do so, one by one."""
    inputs, left, single = [given, *(layer.boundary for layer in layers)], first, []
    for layer, size in zip(layers, inputs, strict=False):
        again = layer.recomputes and left > 0
        single.append(recompute_stage(layer, [layer], size, j, ranks) if again else layer)
        left -= again
    return single


def segment_bounds(layers: int, recompute: str) -> list[int]:
    """Return the layers with which the segments of a stage begin, and the end of the last one.

    >>> segment_bounds(5, "sqrt"), segment_bounds(5, "full"), segment_bounds(3, "layer")
    ([0, 1, 3, 5], [0, 5], [0, 1, 2, 3])
    """
    count = {"full": 1, "sqrt": isqrt(layers - 1) + 1}.get(recompute, layers)  # the square root, rounded up
    return [k * layers // count for k in range(count + 1)]


def recompute_stage(stage: Stage, segments: Sequence[Stage], given: int, j: int, ranks: int = 1) -> Stage:
    """Return stage j, which computes these segments again; the stage before sends it `given` bytes."""
    inputs = [given, *(segment.boundary for segment in segments[:-1])]
    for segment, size in zip(segments, inputs, strict=True):
        _refuse_small(segment, size, j)
    if ranks == 1:
        return _recomputed(stage, segments, inputs)
    gathers = Operations((Exchange(TENSOR, ALL_GATHER, size), 1) for size in inputs if size)
    shares = [-(-size // ranks) for size in inputs]
    beside = [replace(each, activation=each.activation + size) for each, size in zip(segments, shares, strict=True)]
    kept = _recomputed(stage, beside, shares)
    return replace(kept, backward=add_costs([kept.backward, gathers]))


def _refuse_small(segment: Stage, given: int, j: int) -> None:
    """Refuse a part of stage j that holds less than its input."""
    if segment.activation < given + segment.data:
        problem = "its activation is less than its input, which is a part of it; mend the model to recompute it"
        raise RequestError(f"stage {j}", problem)


def _recomputed(stage: Stage, segments: Sequence[Stage], inputs: Sequence[int], output: int = 0) -> Stage:
    """Return a stage that keeps its segments' inputs and its data; its transients are peak memory less that.

    A forward goes through a segment with the inputs of all so far. A backward, of the last segment first, computes a
    segment again beside the inputs of those before it, and beside the gradient of the segment's output, which is taken
    to be there until the segment is done; that of the stage's own output is held in any case. So does the input's part
    of a split backward, which leaves of each segment what the weights' part needs, as if nothing were computed again.

    A reversible stage keeps its `output` instead of its input, and computes again beside that.
    """
    kept = sum(inputs) + stage.data + output
    forward = for_input = kept
    peaks = []
    before = stage.data
    left = [0, *accumulate(segment.weight_activation or 0 for segment in reversed(segments))]
    for k, (segment, size) in enumerate(zip(segments, inputs, strict=True)):
        others = before - segment.data
        gradient = segment.boundary if k < len(segments) - 1 else 0
        behind = others + gradient + segment.activation
        again = segment.forward_transient + output
        forward = max(forward, others + segment.inference_bytes)
        peaks.append(behind + max(again, segment.backward_transient))
        more = max(again, segment.size("input_transient"))
        later = left[len(segments) - 1 - k] - (segments[-1].weight_output if gradient else 0)
        for_input = max(for_input, behind + more + later)
        before += size
    whole = stage.weight_activation is None
    return _with_second_forward(
        stage,
        stage.forward,
        activation=kept,
        kept_output=output,
        unused_input=0,  # which the second forward reads
        forward_transient=forward - kept,
        backward_transient=max(kept, *peaks) - kept,
        first_gradients=first_gradients(segments, peaks),
        freed_output=None,
        input_transient=None if whole else for_input - kept,
        weight_transient=None if whole else stage.weight_transient,
    )


def _with_second_forward(stage: Stage, again: Cost, **sizes: int | None) -> Stage:
    """Return a stage of other sizes whose backward computes a forward of that cost again, and retains nothing."""
    return replace(
        stage,
        backward=add_costs([stage.backward, again]),
        recomputed=add_costs([again] if stage.recomputed is None else [stage.recomputed, again]),
        retained_gradients=None,
        retained_input_transient=None,
        retained_weight_transient=None,
        loss_forward=0,  # what is computed again needs parameters beside the loss
        loss_gradient=0,
        loss_activation=0,
        freed_gradient=0,
        **NO_CORE,
        **sizes,
    )


def _without_core(layer: Stage) -> Stage:
    """Return a layer that computes the core of its attention again, if it has one."""
    core, again = layer.attention_activation, layer.attention_forward
    if again is None:
        return layer
    whole = layer.weight_activation is None
    return _with_second_forward(
        layer,
        again,
        activation=layer.activation - core,
        forward_transient=layer.forward_transient + core,
        backward_transient=max(layer.forward_transient, layer.backward_transient) + core,
        input_transient=None if whole else max(layer.forward_transient, layer.size("input_transient")) + core,
        weight_transient=None if whole else layer.size("weight_transient"),
    )


def _is_reversible(layer: Stage, given: int) -> bool:
    """Return whether a layer's output is as large as its input."""
    return layer.boundary == given > 0


def _reversed_layers(layers: Sequence[Stage], given: int, j: int) -> Iterator[Stage]:
    """Yield the layers of stage j, the reversible ones with their outputs alone.

    Of several in a row, a stage then has one output: each is the input of the next, which does not keep it again.
    """
    for layer, size in zip(layers, [given, *(layer.boundary for layer in layers)], strict=False):
        if _is_reversible(layer, size):
            _refuse_small(layer, size, j)
            yield _recomputed(layer, [layer], [0], layer.boundary)
        else:
            yield layer

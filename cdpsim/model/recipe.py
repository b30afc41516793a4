"""What a way of training costs: optimizer state, mixed precision, recomputation, offload; bytes exactly.

Optimizer state, in multiples of a stage's parameters P, in their type:

    sgd 0 · momentum P, the velocity · adam 2 P, two moments (Kingma & Ba 2015, algorithm 1)
    adafactor  for each matrix its row and column sums, for a vector all of it (Shazeer & Stern 2018, algorithm 4;
               without its optional momentum), which only a profile can tell: `Stage.factored`. Of a tensor of more
               dimensions, the last two are rows and columns of many matrices, as in torch.optim.Adafactor.

torch keeps 4 bytes for each tensor besides, a count of steps, for adam and adafactor; they are left out here.

Mixed precision: weights, gradients and activations in two bytes a number; for the update a master copy of the weights
and the optimizer's state in four (Micikevicius et al. 2018, section 3.1; Rajbhandari et al. 2020, section 3.1: with
Adam 2 + 2 + 12 = 16 bytes a parameter). What is kept for the update counts as optimizer state and travels with it.

Recomputation (Chen et al. 2016): a segment keeps only its input and computes its forward again before its backward.
`full` makes each stage one segment, `sqrt` cuts its l layers into the least number of segments that is at least their
square root (section 4.3 there), as even in layers as can be. The second forward adds its work to the backward. Of the
last stage the loss is computed again, too.

Offload puts on the host what a device would hold: `optimizer` its state, with which the host updates (Ren et al. 2021,
ZeRO-Offload, section 4), `activations` what a stage keeps from its forward to its backward (Rhu et al. 2016, vDNN,
section III; of a stage that recomputes, its checkpoints: Rajbhandari et al. 2021, ZeRO-Infinity, section 5), `all`
both. While a forward or a backward runs, its stage's activations are all taken to be there. What crosses the link, and
what time that takes, is in `cdpsim.model.offload`.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import isqrt

from msgspec.structs import replace

from cdpsim.errors import RequestError
from cdpsim.model import PRECISIONS, Model, Recipe
from cdpsim.model.stage import Stage, Tie, add_costs, merge_stages

WIDE = 4  # bytes of a number of the master copy and of the state beside it


@lru_cache(maxsize=32)  # asked for every request of one model
def apply_recipe(model: Model, recipe: Recipe | None = None, n: int | None = None) -> Model:
    """Train a model so, or as it itself says, in n stages: a model whose stages have those costs, and no recipe.

    Its name says the recipe. Cuts are the model's own, whatever the recipe.
    """
    recipe = model.training if recipe is None else recipe
    n = model.n if n is None else n
    if recipe == Recipe():
        grouped = model.grouped(n)
        return grouped if grouped.training == recipe else replace(grouped, training=recipe)
    if model.is_unit:
        raise RequestError("training", "the slot model has no bytes and no layers; give a model")
    if recipe.optimizer:
        scale = _widening(model) if recipe.mixed_precision else 1
        weighed = tuple(
            replace(stage, optimizer=state_bytes(stage, recipe, scale, f"stage {j}"))
            for j, stage in enumerate(model.stages)
        )
        tied = tuple(
            replace(tie, optimizer=state_bytes(tie, recipe, scale, f"tied[{k}]")) for k, tie in enumerate(model.tied)
        )
        model = replace(model, stages=weighed, tied=tied, training=Recipe())
    stages = tuple(_stage(layers, given, recipe.recompute, j) for j, (given, layers) in enumerate(model.groups(n)))
    tied = model.tied_groups(n)
    if recipe.offload in ("optimizer", "all"):
        tied = tuple(map(_optimizer_of_tie_on_host, tied))
    name = ", ".join(filter(None, [model.name, *recipe.words]))
    return replace(model, name=name, stages=_offloaded(stages, recipe.offload), tied=tied, training=Recipe())


def state_bytes(stage: Stage | Tie, recipe: Recipe, scale: int, name: str) -> int:
    """Say what an optimizer keeps of a stage or of a tied tensor.

    Each number is `scale` times as large as one of the parameters.
    """
    assert recipe.optimizer is not None, "without one, stages say it themselves"
    parameters = stage.parameters
    if recipe.optimizer == "adafactor" and parameters and not stage.factored:
        problem = "does not say what the rows and columns of its parameters sum to (`factored`); profile the model"
        raise RequestError(name, f"{problem}, or take another optimizer")
    state = {"sgd": 0, "momentum": parameters, "adam": 2 * parameters, "adafactor": stage.factored}[recipe.optimizer]
    return scale * (parameters + state) if recipe.mixed_precision else state


def _offloaded(stages: tuple[Stage, ...], what: str) -> tuple[Stage, ...]:
    """Put on the host what is offloaded of each stage."""
    if what in ("optimizer", "all"):
        if not any(stage.optimizer for stage in stages):
            problem = "no stage has optimizer state to put on its host; leave optimizer out"
            raise RequestError("offload", f"{problem}, or name an --optimizer that keeps some")
        stages = tuple(map(_optimizer_on_host, stages))
    return tuple(map(_activations_on_host, stages)) if what in ("activations", "all") else stages


def _optimizer_on_host(stage: Stage) -> Stage:
    """A stage that is updated by its host, if the optimizer keeps anything of it."""
    if not stage.optimizer:
        return stage
    return replace(stage, host_optimizer=stage.host_optimizer + stage.optimizer, optimizer=0, update=None)


def _optimizer_of_tie_on_host(tie: Tie) -> Tie:
    """A tied tensor whose stages are updated by their hosts."""
    return replace(tie, host_optimizer=tie.host_optimizer + tie.optimizer, optimizer=0)


def _activations_on_host(stage: Stage) -> Stage:
    """A stage that holds activations only while it computes.

    Its output belongs to nobody then and is held until the next stage begins, or until it has been sent.
    """
    return replace(
        stage,
        offloaded=stage.offloaded + stage.activation,
        activation=0,
        kept_output=0,
        data=0,
        unused_input=0,
        **{
            kind: stage.activation + own
            for kind in ("forward_transient", "backward_transient", "input_transient", "weight_transient")
            if (own := getattr(stage, kind)) is not None
        },
    )


def _widening(model: Model) -> int:
    """How many times as large as a parameter its master copy is; refuses what is not half as large."""
    if not model.precision or PRECISIONS[model.precision] != WIDE // 2:
        shown = f"the model's bytes are in {model.precision}"
        problem = shown if model.precision else "the model does not say what its bytes are in"
        raise RequestError("mixed_precision", f"{problem}; give one in bf16 or fp16 (profile with --dtype bfloat16)")
    return WIDE // PRECISIONS[model.precision]


def _stage(layers: Sequence[Stage], given: int, how: str, j: int) -> Stage:
    """One stage of these layers, and what it computes again."""
    whole = merge_stages(layers, given)
    if how == "none":
        return whole
    count = 1 if how == "full" else _root(len(layers))
    ends = [k * len(layers) // count for k in range(count + 1)]
    inputs = [given, *(layers[begin - 1].boundary for begin in ends[1:-1])]
    segments = [merge_stages(layers[begin:end], own) for (begin, end), own in zip(pairwise(ends), inputs, strict=True)]
    for segment, own in zip(segments, inputs, strict=True):
        if segment.activation < own + segment.data:
            problem = "its activation is less than its input, which is a part of it; mend the model to recompute it"
            raise RequestError(f"stage {j}", problem)
    return _recomputed(whole, segments, inputs)


def _root(layers: int) -> int:
    """The square root, rounded up."""
    return isqrt(layers - 1) + 1


def _recomputed(whole: Stage, segments: Sequence[Stage], inputs: Sequence[int]) -> Stage:
    """A stage that keeps its segments' inputs and its data; transients are highest moments less that.

    A forward passes through a segment with the inputs of all so far. A backward, of the last segment first, computes a
    segment again beside the inputs of those before it, and beside the gradient of the segment's output, which is taken
    to be there until the segment is done; that of the stage's own output is held in any case.
    """
    kept = sum(inputs) + whole.data
    forward = backward = kept
    before = whole.data
    for k, (segment, own) in enumerate(zip(segments, inputs, strict=True)):
        other = before - segment.data
        gradient = segment.boundary if k < len(segments) - 1 else 0
        again = segment.activation + max(segment.forward_transient, segment.backward_transient)
        forward = max(forward, other + segment.passing)
        backward = max(backward, other + gradient + again)
        before += own
    return replace(
        whole,
        backward=add_costs([whole.backward, whole.forward]),
        activation=kept,
        kept_output=0,
        forward_transient=forward - kept,
        backward_transient=backward - kept,
        input_transient=None,
        weight_transient=None,
    )

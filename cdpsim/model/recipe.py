"""The costs of a training recipe: optimizers, mixed precision and offload; bytes exactly.

Recomputation has a module of its own, `cdpsim.model.recomputation`.

Mixed precision: weights, gradients and activations in two bytes a number; for the update a master copy of the weights
and the optimizer's state in four (Micikevicius et al. 2018, section 3.1; Rajbhandari et al. 2020, section 3.1: with
Adam 2 + 2 + 12 = 16 bytes a parameter). Tensors kept for the update count as optimizer state and travel with it.

Gradients are added up and sent in the type of the parameters, or in the one that `gradients` names. If that has two
bytes in mixed precision, a copy of them in four is kept for the update, as in Megatron-LM: 2 + 2 + 16 = 20 bytes a
parameter with Adam, where gradients in fp32 make 2 + 4 + 12 = 18 (its docs, "Distributed Optimizer"). Sums in another
type than autograd's own are buffers that are there before a backward.

Offload puts on the host what a device would hold: `optimizer` its state, with which the host updates (Ren et al. 2021,
ZeRO-Offload, section 4), `activations` what a stage keeps from its forward to its backward (Rhu et al. 2016, vDNN,
section III; of a stage that recomputes, its checkpoints: Rajbhandari et al. 2021, ZeRO-Infinity, section 5), `all`
both. `parameters` puts optimizer state and parameters there, which are fetched for each use (Rajbhandari et al. 2021,
ZeRO-Infinity, section 5), `nvme` both on the disks behind the host. While a forward or a backward runs, its stage's
activations are all taken to be on the device. The transfers and their times are in `cdpsim.timing.costs`.

Optimizers: the bytes of their states, and the bytes that an update reads and writes.

States, in multiples of the weights P that the optimizer updates, in their type:

    sgd 0 · momentum P, the velocity · adam 2 P, two moments (Kingma & Ba 2015, algorithm 1)
    adamw 2 P, the same: its weight decay needs none (Loshchilov & Hutter 2019, algorithm 2)
    lamb 2 P, Adam's moments (You et al. 2020, algorithm 2) · lars P, the velocity (You et al. 2017, algorithm 1)
    lion P, the momentum (Chen et al. 2023, algorithm 2)
    adafactor  for each matrix its row and column sums, for a vector all of it (Shazeer & Stern 2018, algorithm 4;
               without its optional momentum), which only a profile can tell: `Stage.factored`. Of a tensor of more
               dimensions, the last two are rows and columns of many matrices, as in torch.optim.Adafactor.
    sm3        for each dimension of a tensor a vector of its length, for a vector all of it (Anil et al. 2019,
               section 4; without momentum)
    adam-8bit  two moments of 8 bits a number, whatever the type of the weights, and for each block of 256 numbers the
               largest of either in fp32 (Dettmers et al. 2022, section 2; blocks as in bitsandbytes, which keeps
               tensors below 4,096 numbers in fp32)

A stage that says the shapes of its `tensors` has all of these exactly. Otherwise SM3 is taken to keep `Stage.factored`,
which is as much for matrices and vectors and more for the kernels of convolutions; and adam-8bit to have one tensor.

torch keeps 4 bytes for each tensor besides, a count of steps, for adam, adamw and adafactor; they are left out here.

What torch's updates make and drop, in the type of their state (torch.optim of 2.13, measured): in a loop, adam and
adamw two tensors as large as each, while one of the tensor before is still there; adafactor one, its sums, and one of
the tensor before. With `foreach` each of them one of all tensors. sgd, momentum and one fused kernel make nothing.

Bytes that an update reads and writes: each tensor once for each pass over it, where a pass ends if a number is needed
that only all of its inputs give. All optimizers read gradients and state, and write state and weights; then

    lars       a pass before for the norms of weights and gradients
    lamb       a pass for the moments and the change's norm, and one for the change, which is made of the moments again
    adafactor  a pass for sums of rows and columns and the weights' norm, one for the change's norm, one for the change

In mixed precision, weights are the master copy, which is read once more and written in the model's type. Gradients that
are copied to fp32 for that are read and written once more; loss scaling (of fp16) reads and writes them (unscale, and
check), clipping reads them for their norm, and reads and writes them. With Adam: 28 + 6 bytes a parameter for fp32
gradients of bf16 weights, 60 for fp16 gradients that are copied, unscaled and clipped.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil, prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from msgspec.structs import replace

from cdpsim.errors import RequestError
from cdpsim.model import OF_OPERATORS, PRECISIONS, Model, Recipe
from cdpsim.model.recomputation import make_stage, refuse_ineffective, ways_of_stages, with_operators
from cdpsim.model.stage import NO_CORE, Stage, Tie

Dimensions: TypeAlias = tuple[int, ...]
WIDE = 4  # bytes of a number of the master copy and of the state beside it
_BLOCK = 256  # numbers of adam-8bit that share a largest one in fp32
_LEAST_NARROW = 4096  # numbers of a tensor whose state has 8 bits


class UpdateFacts(NamedTuple):
    """The state that an optimizer keeps, and how many times an update reads or writes its tensors."""

    moments: int = 0  # tensors of its state that have a number for each weight
    sums: Callable[[Dimensions], int] | None = None  # the numbers that it keeps of a tensor in their place
    is_8bit: bool = False
    gradients: int = 1
    state: int = 2
    weights: int = 2
    made: int = 0  # tensors of a number for each weight that torch's update makes at once (foreach)
    made_in_turn: tuple[int, int] = (0, 0)  # of each tensor, and of the one before it, in a loop over them

    def state_bytes(self, weights: int, factored: int, width: int, tensors: Sequence[Dimensions]) -> int:
        """Return the bytes of the state of weights, whose numbers have `width` bytes, in tensors of these shapes.

        Without shapes, all are one tensor, and sums take `factored` bytes.
        """
        if self.is_8bit:
            numbers = [prod(shape) for shape in tensors]
            return self.moments * (sum(map(_in_8_bits, numbers)) if numbers else _blocks(-(-weights // width)))
        if self.sums:
            return width * sum(map(self.sums, tensors)) if tensors else factored
        return self.moments * weights

    @property
    def is_elementwise(self) -> bool:
        """Whether each weight's update follows from its own numbers alone: of no sum, or norm, of a whole tensor."""
        return self.sums is None and self.weights < 3

    def largest_made(self, tensors: Sequence[int], sums: Sequence[int]) -> int:
        """Return the most that a loop over tensors of these bytes, and their sums, makes at once."""
        own, before = self.made_in_turn
        turns = zip(tensors, (0, *tensors), sums, strict=False)
        return max(own * (size + kept) + before * last for size, last, kept in turns)

    def moved(self, weights: int, gradients: int, state: int) -> int:
        """Return the bytes that an update reads and writes, from the bytes of its tensors."""
        return self.weights * weights + self.gradients * gradients + self.state * state


def _blocks(numbers: int) -> int:
    return numbers + WIDE * -(-numbers // _BLOCK)


def _in_8_bits(numbers: int) -> int:
    """Return the bytes of a moment of one tensor; small ones are wide."""
    return WIDE * numbers if numbers < _LEAST_NARROW else _blocks(numbers)


def rows_and_columns(shape: Dimensions) -> int:
    """Return the number of rows and columns of a tensor, whose last two dimensions make matrices; of a vector all.

    >>> rows_and_columns((3, 30, 50)), rows_and_columns((50,))
    (240, 50)
    """
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1] if len(shape) > 1 else prod(shape)


UPDATE_FACTS = MappingProxyType(
    {
        "sgd": UpdateFacts(),
        "momentum": UpdateFacts(1),
        "adam": UpdateFacts(2, made=1, made_in_turn=(2, 1)),
        "adamw": UpdateFacts(2, made=1, made_in_turn=(2, 1)),
        "adafactor": UpdateFacts(sums=rows_and_columns, gradients=3, state=4, weights=3, made=1, made_in_turn=(1, 1)),
        "lion": UpdateFacts(1),
        "sm3": UpdateFacts(sums=sum),
        "adam-8bit": UpdateFacts(2, is_8bit=True),
        "lamb": UpdateFacts(2, state=3, weights=3),
        "lars": UpdateFacts(1, gradients=2, weights=3),
    }
)


Part = TypeVar("Part", Stage, Tie)


@lru_cache(maxsize=1024)  # every request of one model applies the same recipe, or one of a few
def apply_recipe(
    model: Model, recipe: Recipe | None = None, n: int | None = None, places: tuple[int, ...] = ()
) -> Model:
    """Return a model in n stages with the costs of a recipe, by default its own; the result has no recipe.

    `places` are the layers with which devices' parts begin, where several stages are one part; () where each is one.
    Its name ends in the recipe. Cuts do not depend on the recipe. Curves are left out: no run reads them.
    """
    model = model.without_curves()
    recipe = model.training if recipe is None else recipe
    n = model.n if n is None else n
    if recipe == Recipe():
        grouped = model.grouped(n)
        return grouped if grouped.training == recipe else replace(grouped, training=recipe)
    if model.is_unit:
        raise RequestError("training", "the slot model has no bytes and no layers; give a model")
    if recipe.recompute.startswith(OF_OPERATORS):
        model = with_operators(model, recipe.recompute)
    if recipe.optimizer or recipe.gradients:
        model = with_update(model, replace(recipe, recompute="none"))
    refuse_ineffective(model, recipe.recompute)
    ways = ways_of_stages(recipe.recompute, (0, *model.cuts(n)), places, model.stages)
    groups = enumerate(zip(model.groups(n), ways, strict=True))
    ranks = model.mesh.tensor if model.mesh.split_checkpoints else 1
    stages = [make_stage(layers, given, how, j, ranks) for j, ((given, layers), how) in groups]
    tied = list(model.tied_groups(n))
    if recipe.offload not in ("none", "activations"):
        if recipe.offload in ("optimizer", "all") and not any(stage.optimizer for stage in stages):
            problem = "no stage has optimizer state to put on its host; leave optimizer out"
            raise RequestError("offload", f"{problem}, or name an --optimizer that keeps some")
        stages = list(map(with_optimizer_on_host, stages))
        tied = [_with_optimizer_on_host(tie) for tie in tied]
    if recipe.offload in ("activations", "all"):
        stages = list(map(with_activations_on_host, stages))
    if recipe.offload in ("parameters", "nvme"):
        on_disks = recipe.offload == "nvme"
        stages = [replace(stage, host_parameters=stage.parameters, nvme=on_disks) for stage in stages]
    name = ", ".join(filter(None, [model.name, *recipe.description]))
    return replace(model, name=name, stages=tuple(stages), tied=tuple(tied), training=Recipe())


@lru_cache(maxsize=16)  # for all recomputations and numbers of stages
def with_update(model: Model, recipe: Recipe) -> Model:
    """Return the model with the bytes of gradients, of optimizer state, and of an update's reads and writes."""
    scale = _widening(model) if recipe.mixed_precision else 1
    ratio = _gradient_ratio(model, recipe)
    _check_update_time(model, recipe)
    stages = tuple(
        _with_sizes(stage, recipe, model, scale, ratio, f"stage {j}") for j, stage in enumerate(model.stages)
    )
    tied = tuple(_with_sizes(tie, recipe, model, scale, ratio, f"tied[{k}]") for k, tie in enumerate(model.tied))
    return replace(model, stages=stages, tied=tied, training=Recipe())


def _with_sizes(part: Part, recipe: Recipe, model: Model, scale: int, ratio: Fraction, name: str) -> Part:
    """Return a stage or a tied tensor with the bytes of its update; see `with_update`."""
    made = part.gradient_bytes
    changed: dict[str, Any] = {}
    if ratio != 1:
        changed["gradients"] = ceil(made * ratio)
        if isinstance(part, Stage):
            changed["first_gradients"] = None
    if recipe.optimizer is None:
        return replace(part, **changed)
    # Narrow gradients are kept in fp32 as well, for an update in fp32.
    copy = scale * made if recipe.mixed_precision and recipe.gradients in ("bf16", "fp16") else 0
    state = state_bytes(part, recipe, model, scale, name)
    changed["optimizer"] = copy + state
    changed |= _made_bytes(part, UPDATE_FACTS[recipe.optimizer], scale)
    changed["restored"] = state if recipe.mixed_precision else state + part.parameters
    if recipe.mixed_precision and recipe.gradients is None:
        changed["wide_gradients"] = scale * made
    if recipe.update_time != "stated":
        changed["update_bytes"] = _moved_bytes(part, recipe, model, scale, changed.get("gradients", made), copy)
    return replace(part, **changed)


def state_bytes(part: Stage | Tie, recipe: Recipe, model: Model, scale: int, name: str) -> int:
    """Return the bytes that an optimizer keeps for a stage or a tied tensor, the master copy of weights included.

    Each number is `scale` times as large as one of the parameters.
    """
    assert recipe.optimizer is not None, "without one, stages give the bytes themselves"
    facts, parameters = UPDATE_FACTS[recipe.optimizer], part.parameters
    tensors: Sequence[Dimensions] = ()
    width = PRECISIONS.get(model.precision, 1)
    if isinstance(part, Stage) and part.tensors:
        tensors, width = part.tensors, parameters // part.numbers
    if facts.sums and parameters and not (part.factored or tensors):
        problem = (
            "does not say what the rows and columns of its parameters sum to (`factored`, `tensors`); profile the model"
        )
        raise RequestError(name, f"{problem}, or take another optimizer")
    if facts.is_8bit and not (model.precision or tensors):
        problem = f"{recipe.optimizer} keeps bytes for each number, and the model does not say how large one is"
        raise RequestError("optimizer", f"{problem}; add `precision` to its file")
    kept = facts.state_bytes(scale * parameters, scale * part.factored, scale * width, tensors)
    return kept + (scale * parameters if recipe.mixed_precision else 0)


def _made_bytes(part: Part, facts: UpdateFacts, scale: int) -> dict[str, int]:
    """Return the bytes that torch's update of a stage or a tied tensor makes while it runs; without shapes, of one."""
    weights = scale * part.parameters
    if isinstance(part, Tie):
        return {"update_foreach": facts.made * weights}
    width = weights // part.numbers if part.tensors else 0
    tensors = [width * prod(shape) for shape in part.tensors] or [weights]
    sums = [width * facts.sums(shape) if facts.sums else 0 for shape in part.tensors] or [0]
    return {"update_foreach": facts.made * weights, "update_loop": facts.largest_made(tensors, sums)}


def _moved_bytes(part: Part, recipe: Recipe, model: Model, scale: int, gradients: int, copy: int) -> int:
    """Return the bytes that an update of a stage or a tied tensor reads and writes, with what is done before and after.

    `gradients` are the bytes of sums, `copy` of their copy for the update, if there is one.
    """
    assert recipe.optimizer is not None, "without one, stages say what an update takes"
    weights = scale * part.parameters
    state = state_bytes(part, recipe, model, scale, "") - (weights if recipe.mixed_precision else 0)
    used = copy or gradients
    moved = UPDATE_FACTS[recipe.optimizer].moved(weights, used, state)
    moved += gradients + copy if copy else 0
    moved += weights + part.parameters if recipe.mixed_precision else 0
    moved += 2 * used if "fp16" in (model.precision, recipe.gradients) else 0  # unscaled, and checked
    return moved + (3 * used if recipe.update_time == "clipped" else 0)


def _gradient_ratio(model: Model, recipe: Recipe) -> Fraction:
    """Return how many times as large as a parameter a gradient is."""
    if recipe.gradients is None:
        return Fraction(1)
    if not model.precision:
        problem = f"{recipe.gradients} asks for another type, and the model does not say what its bytes are in"
        raise RequestError("gradients", f"{problem}; add `precision` to its file, or leave this out")
    return Fraction(PRECISIONS[recipe.gradients], PRECISIONS[model.precision])


def _check_update_time(model: Model, recipe: Recipe) -> None:
    """Refuse a time from bytes moved where the update has another one."""
    if recipe.update_time == "stated":
        return
    if any(stage.update or stage.update_bytes for stage in model.stages):
        problem = "stages say themselves what an update takes (`update`, `update_bytes`)"
        raise RequestError("update_time", f"{problem}; leave these out, or update_time")
    if recipe.offload not in ("none", "activations") or any(stage.updated_on_host for stage in model.stages):
        problem = (
            "hosts update, and memory_bandwidth is of devices; leave it out, and give host_update in the model's file"
        )
        raise RequestError("update_time", problem)


def _widening(model: Model) -> int:
    """Return how many times as large as a parameter its master copy is; refuse parameters that are not half of it."""
    if not model.precision or PRECISIONS[model.precision] != WIDE // 2:
        stated = f"the model's bytes are in {model.precision}"
        problem = stated if model.precision else "the model does not say what its bytes are in"
        raise RequestError("mixed_precision", f"{problem}; give one in bf16 or fp16 (profile with --dtype bfloat16)")
    return WIDE // PRECISIONS[model.precision]


def with_optimizer_on_host(stage: Stage) -> Stage:
    """Return a stage whose updates, if its optimizer has a state, are made by its device's host."""
    return _with_optimizer_on_host(stage, update=None, update_loop=0) if stage.optimizer else stage


def _with_optimizer_on_host(part: Part, **changed: int | None) -> Part:
    """Return a stage, or a tied tensor, whose updates are made by its device's host."""
    gone = dict.fromkeys(("optimizer", "wide_gradients", "restored", "update_foreach"), 0)
    return replace(part, host_optimizer=part.host_optimizer + part.optimizer, **gone, **changed)


def with_activations_on_host(stage: Stage) -> Stage:
    """Return a stage that holds activations only while it computes.

    Its output is then no part of them, and is held until the next stage begins, or until it has been sent. What the
    input's part of a split backward leaves for the weights' part stays on the device.
    """
    kinds = ["forward_transient", "backward_transient", "input_transient"]
    kinds += ["weight_transient"] * (stage.weight_activation is None)  # else nothing comes back for the weights' part
    transients = {kind: size for kind in kinds if (size := getattr(stage, kind)) is not None}
    return replace(
        stage,
        offloaded=stage.offloaded + stage.activation,
        **dict.fromkeys(("activation", "kept_output", "data", "unused_input"), 0),
        **NO_CORE,
        freed_output=None,
        **{kind: stage.activation + size for kind, size in transients.items()},
        retained_gradients=None,
        retained_input_transient=None,
        retained_weight_transient=None,
    )

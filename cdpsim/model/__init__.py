"""A model: the time and the bytes of one micro-batch in each of its stages.

Stages are consecutive layers. A cut is the layer with which a stage begins; the first stage has none.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise, repeat
from math import fsum, lcm, prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from cdpsim.errors import RequestError, choose, one_line, short_repr
from cdpsim.files import config
from cdpsim.files.config import Name, read_preset
from cdpsim.files.tables import as_html
from cdpsim.files.units import Work, counted, short_text
from cdpsim.model.configurations import shape_fields
from cdpsim.model.curve import MemoryCurve, OperatorSteps
from cdpsim.model.layers import OPERATORS, Layers
from cdpsim.model.runtime import Runtime
from cdpsim.model.splitting import NO_MESH, Mesh, shaped_stages
from cdpsim.model.stage import PRECISIONS, STAGE_SIZES, Stage, Tie, count_once, merge_stages, pad_stage, without_tied

Cuts = tuple[int, ...]


def balanced(costs: Sequence[int], n: int, closing: Sequence[int] | None = None) -> Cuts:
    """Cut layers so that the largest stage costs as little as it can, by dynamic programming over all cuts.

    A stage costs what its layers do, and `closing` of its last layer on top. Of several such cuts those are taken whose
    stages' costs have the smallest sum of squares, and of these the ones that come first in order.

    >>> balanced([1] * 12, 5)
    (2, 4, 6, 9)
    """
    check_stages(n, len(costs))
    sums = [0, *accumulate(costs)]

    def cost(begin: int, end: int) -> int:
        return sums[end] - sums[begin] + (closing[end - 1] if closing else 0)

    return _first_of_the_best(len(costs), n, cost, _least(len(costs), n, cost))


def check_stages(n: int, layers: int) -> None:
    """Refuse more stages than layers."""
    if not 1 <= n <= layers:
        raise RequestError(f"n={n}", f"must be at least 1 and at most {layers}, the number of the model's layers")


def _least(layers: int, n: int, cost: Callable[[int, int], int]) -> int:
    """Find what the largest of n stages costs at least."""
    best = {end: cost(0, end) for end in range(1, layers + 1)}
    for stage in range(1, n):
        best = {end: _least_with_one_more(best, stage, end, cost) for end in range(stage + 1, layers + 1)}
    return best[layers]


def _least_with_one_more(best: dict[int, int], stage: int, end: int, cost: Callable[[int, int], int]) -> int:
    """Add a stage that ends there; the earlier it begins, the more it costs, so that not all cuts need be tried."""
    least = max(best[end - 1], cost(end - 1, end))
    for cut in range(end - 2, stage - 1, -1):
        own = cost(cut, end)
        if own >= least:
            break
        least = min(least, max(best[cut], own))
    return least


def _first_of_the_best(layers: int, n: int, cost: Callable[[int, int], int], bound: int) -> Cuts:
    """Find the cuts with the smallest sum of squares, no stage above the bound; the first of them in order."""
    best: dict[int, tuple[int, Cuts]] = {
        end: (cost(0, end) ** 2, ()) for end in range(1, layers + 1) if cost(0, end) <= bound
    }
    for stage in range(1, n):
        more: dict[int, tuple[int, Cuts]] = {}
        for end in range(stage + 1, layers + 1):
            for cut in range(end - 1, stage - 1, -1):
                own = cost(cut, end)
                if own > bound:
                    break
                if cut in best and (end not in more or best[cut][0] + own**2 <= more[end][0]):
                    found = (best[cut][0] + own**2, (*best[cut][1], cut))
                    more[end] = min(found, more.get(end, found))
        best = more
    return best[layers][1]


__all__ = [
    "GRADIENT_TYPES",
    "OFFLOAD",
    "OPTIMIZERS",
    "PRECISIONS",
    "RECOMPUTE",
    "STAGE_SIZES",
    "UPDATE_TIMES",
    "Model",
    "Recipe",
    "Runtime",
    "Stage",
    "Tie",
]

UNIT_MODELS = ("unit", "unit-split")  # the slot model, and the one whose backwards are split and take two slots
MOST_STAGES = 1_000_000
MOST_LAYERS = 2_000  # that can be grouped: the time for exact cuts grows as their square
MOST_BYTES_IN_ALL = 2**53  # up to here a sum over all stages is exact in float64, too

Optimizer = Literal["sgd", "momentum", "adam", "adamw", "adafactor", "lion", "sm3", "adam-8bit", "lamb", "lars"]
GradientType = Literal["fp32", "bf16", "fp16"]
UpdateTime = Literal["stated", "memory", "clipped"]
Recomputation = Literal["none", "layer", "layer+head", "selective", "full", "sqrt", "reversible"]
Offload = Literal["none", "optimizer", "activations", "all", "parameters", "nvme"]
OPTIMIZERS, RECOMPUTE, OFFLOAD = get_args(Optimizer), get_args(Recomputation), get_args(Offload)
SINGLE_LAYERS = "layers:"  # another way to recompute begins so, and ends in a number
OF_OPERATORS = "selective:"  # and another, which ends in OPERATORS with + between them
GRADIENT_TYPES, UPDATE_TIMES = get_args(GradientType), get_args(UpdateTime)

_SHOWN = ("repeat", "name", "forward", "backward", "activation", "boundary", "parameters")  # of stages, in a notebook

Samples: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class Recipe(config.ConfigTable, frozen=True, kw_only=True):
    """The settings of a training that cost memory and time; `cdpsim.model.recipe` derives these costs."""

    optimizer: str | None = None  # one of OPTIMIZERS; None: the stages give its bytes themselves
    mixed_precision: bool = False  # a master copy of the weights, and the optimizer's state, in fp32
    gradients: str | None = None  # the type in which they are added up and sent; None: that of the parameters
    update_time: str = UPDATE_TIMES[
        0
    ]  # as stages say, or of what the optimizer moves in memory, clipping included or not
    recompute: str = "none"  # which activations are computed again in the backward
    offload: str = "none"  # what the devices' hosts hold for them

    def _check(self) -> None:
        if self.optimizer is not None:
            choose("optimizer", self.optimizer, OPTIMIZERS)
        _check_recompute(self.recompute)
        choose("offload", self.offload, OFFLOAD)
        if self.gradients is not None:
            choose("gradients", self.gradients, GRADIENT_TYPES)
        choose("update_time", self.update_time, UPDATE_TIMES)
        if self.mixed_precision and not self.optimizer:
            raise RequestError("mixed_precision", "what is kept in fp32 depends on the optimizer; name one")
        if self.update_time != UPDATE_TIMES[0] and not self.optimizer:
            raise RequestError("update_time", "what an update reads and writes depends on the optimizer; name one")

    @property
    def description(self) -> list[str]:
        """The recipe in words, without defaults."""
        parts = [self.optimizer or "", "mixed precision" * self.mixed_precision]
        ways = {"gradients": self.gradients, "update time": self.update_time}
        ways |= {"recompute": self.recompute, "offload": self.offload}
        usual = (None, "none", UPDATE_TIMES[0])
        return [part for part in parts if part] + [f"{name} {how}" for name, how in ways.items() if how not in usual]


def _check_recompute(recompute: str) -> None:
    """Refuse an unknown way to recompute."""
    if isinstance(recompute, str) and recompute.startswith(OF_OPERATORS):
        if unknown := {*recompute.removeprefix(OF_OPERATORS).split("+")} - {*OPERATORS}:
            problem = f"{short_repr(min(unknown))} is no operator whose output can be kept"
            raise RequestError("recompute", f"{problem}; known are {', '.join(OPERATORS)}, with + between them")
        return
    if not (isinstance(recompute, str) and recompute.startswith(SINGLE_LAYERS)):
        choose("recompute", recompute, RECOMPUTE)
        return
    count = recompute.removeprefix(SINGLE_LAYERS)
    if not (count.isascii() and count.isdecimal() and 1 <= int(count) <= MOST_STAGES):
        problem = f"{short_repr(recompute)} does not end in a number of layers from 1 to {MOST_STAGES}"
        raise RequestError("recompute", f"{problem}; write for example layers:4, or layer for all of them")


class _ModelFacts(config.ConfigTable, frozen=True, kw_only=True):
    """The facts of a model that its file has at the top level."""

    name: Name = ""
    precision: str = ""  # one of PRECISIONS: the type of its numbers, for bytes and FLOP
    samples: Samples | None = None  # in a micro-batch, such as images or sequences
    tokens: Samples | None = None  # of a sample, which is a text
    source: Name = ""  # the model that a calibration trained, and its sizes, as `replay` takes them
    training: Recipe = Recipe()  # `cdpsim.model.recipe.apply_recipe` adds its costs to the stages
    runtime: Runtime = Runtime()  # what its runs hold beyond what a schedule needs
    tied: tuple[Tie, ...] = ()  # tensors that several stages share; each of these has it among its parameters
    layers: Layers | None = None  # its shape, from which its stages and ties are made


def _facts(model: _ModelFacts) -> dict[str, Any]:
    return {name: getattr(model, name) for name in _ModelFacts.__struct_fields__}


class _RepeatedStage(Stage, frozen=True, kw_only=True):
    repeat: Annotated[int, msgspec.Meta(ge=1, le=MOST_STAGES)] = 1

    def stage(self) -> Stage:
        return Stage(**{name: getattr(self, name) for name in Stage.__struct_fields__})


class _ModelFile(_ModelFacts, frozen=True, kw_only=True):
    stages: tuple[_RepeatedStage, ...] = ()


class Model(_ModelFacts, frozen=True, kw_only=True):
    """Stages in the order of a forward."""

    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=MOST_STAGES)]
    is_unit: bool = False  # the slot model: times are slots, and sizes stage-activations
    mesh: Mesh = NO_MESH  # the ranks that share each task of a model of layers
    parts: Cuts = ()  # the layers of each stage, where they are given

    def __repr__(self) -> str:
        words = [short_repr(self.name)] * bool(self.name) + [counted(self.n, "stage")]
        words += [self.precision] * bool(self.precision) + self.training.description
        sizes = {"parameters": self.parameter_bytes, "activations": int(self.size("activation").sum())}
        words += [] if self.is_unit else [f"{name} {short_text(size, 'B')}" for name, size in sizes.items()]
        return one_line(f"Model({', '.join(words)})")

    def _repr_html_(self) -> str:
        stages: Any = [] if self.is_unit else self._stage_tables()
        names = [name for name in _SHOWN if any(name in stage for stage in stages)]
        rows = [[str(stage.get(name, "")) for name in names] for stage in stages]
        return as_html(names, rows, repr(self))

    def _check(self) -> None:
        if self.precision:
            choose("precision", self.precision, PRECISIONS)
        if self.tokens is not None and self.samples is None:
            raise RequestError("tokens", "are those of a sample, and there is no number of samples; add `samples`")
        if any(s.updated_on_host for s in self.stages) and any(s.update or s.update_bytes for s in self.stages):
            raise RequestError("stages", "some are updated on their device and some on its host; give all in one way")
        if self.training.optimizer and self.size("optimizer").any():
            raise RequestError("training", "stages say what their optimizer weighs; leave that out, or the optimizer")
        _check_ties(self.tied, self.stages)
        for kind in STAGE_SIZES:
            if sum(self._sizes(kind)) > MOST_BYTES_IN_ALL:
                raise RequestError("stages", f"{kind} sums to more than 9 PB; check the units and `repeat`")
        if (small := self.size("activation")[1:] < self.size("kept_output")[:-1]).any():
            j = int(small.argmax())
            problem = f"stage {j + 1} has the kept_output of stage {j} as its input; its activation must not be less"
            raise RequestError("stages", problem)
        if (large := self.size("weight_input")[1:] > self.size("boundary")[:-1]).any():
            j = int(large.argmax())
            problem = f"stage {j + 1} has the boundary of stage {j} as its input; its weight_input must not be more"
            raise RequestError("stages", problem)
        self._check_curves()

    @classmethod
    @lru_cache(maxsize=64)
    def unit(cls, n: int, *, split: bool = False) -> Self:
        """Return the paper's slot model of n stages: every pass takes one slot, everything held or sent counts as one.

        Each of the two parts of a `split` backward takes one slot.
        """
        if not 1 <= n <= MOST_STAGES:
            raise RequestError(f"n={n}", f"must be at least 1 and at most {MOST_STAGES}")
        weights: dict[str, Any] = {"weight_backward": 1} if split else {}
        stage = Stage(forward=1, backward=1 + split, activation=1, boundary=1, parameters=1, **weights)
        return cls(name=UNIT_MODELS[split], stages=(stage,) * n, is_unit=True)

    def split(self, schedule: str) -> Self:
        """Return the model for a schedule that splits backwards; refuse one whose stages do not give their parts."""
        missing = next((j for j, stage in enumerate(self.stages) if stage.weight_backward is None), None)
        if missing is None:
            return self
        if self.is_unit:
            return self.unit(self.n, split=True)
        problem = f"stage {missing} has none, and {schedule} splits backwards; say which part of them is the weights'"
        raise RequestError("weight_backward", problem)

    @property
    def n(self) -> int:
        """The number of stages."""
        return len(self.stages)

    @property
    def is_of_layers(self) -> bool:
        """Whether its stages are those of its shape, neither grouped nor trained."""
        if self.layers is None or self.samples is None:
            return False
        return self.stages == shaped_stages(self.layers, self.mesh, self.samples, self.precision)[0]

    @property
    def flop(self) -> float | None:
        """The FLOP of a micro-batch's forward and backward, recomputation left out; None where a stage has times."""
        known = [stage.flop for stage in self.stages if stage.flop is not None]
        return fsum(known) if len(known) == self.n else None

    @property
    def computed_flop(self) -> float | None:
        """The FLOP that devices compute for a micro-batch, recomputation included; None where a stage has times."""
        flop = self.flop
        return None if flop is None else fsum([flop, *(stage.recomputed or 0.0 for stage in self.stages)])

    def cuts(self, n: int) -> Cuts:
        """Return the stages with which n groups begin: the largest group has as few FLOP, or seconds, as can be."""
        if n > self.n:
            problem = f"the model has {self.n} stages, which can be grouped and not split; lower n, or leave it out"
            raise RequestError("n", f"n={n}, but {problem}")
        check_stages(n, self.n)
        if n == self.n:
            return tuple(range(1, n))
        if self.parts:
            return self._given_cuts(n)
        if self.layers is not None and self.layers.layers % n == 0 and self.n == self.layers.layers + 2:
            *_, layer, head = self.stages
            if head.forward < layer.forward or self.n > MOST_LAYERS:  # then no cuts are better
                return tuple(1 + k * self.layers.layers // n for k in range(1, n))  # the embedding is with the first
        if self.is_unit or self.n > MOST_LAYERS:
            which = "the slot model's are" if self.is_unit else f"more than {MOST_LAYERS} are"
            raise RequestError(f"n={n}", f"the model has {self.n} stages, and {which} not grouped; give n={self.n}")
        if len({isinstance(cost, Work) for stage in self.stages for cost in (stage.forward, stage.backward)}) > 1:
            problem = f"the {self.n} stages cost work and time, and cannot be grouped; give all in one"
            raise RequestError(f"n={n}", problem)
        costs = [Fraction(stage.forward) + Fraction(stage.backward) for stage in self.stages]
        unit = lcm(*(cost.denominator for cost in costs))  # in which all are whole
        return _balanced_cuts(tuple(int(cost * unit) for cost in costs), n)

    def _given_cuts(self, n: int) -> Cuts:
        """Return the cuts of given numbers of layers; the embedding is with the first, and the head with the last."""
        layers = self.n if self.layers is None else self.layers.layers
        if len(self.parts) != n or sum(self.parts) != layers:
            problem = f"are {len(self.parts)} stages of {sum(self.parts)} layers in all, for n={n} of {layers} layers"
            raise RequestError("cuts", f"{problem}; give {n} numbers whose sum is {layers}")
        return tuple(int(self.layers is not None) + cut for cut in accumulate(self.parts[:-1]))

    def _bounds(self, n: int) -> list[tuple[int, int]]:
        """Return the stages with which each of n groups begins and ends."""
        return [*pairwise((0, *self.cuts(n), self.n))]

    def groups(self, n: int) -> list[tuple[int, tuple[Stage, ...]]]:
        """Return the stages of each of n groups, and the bytes that the stage before sends it."""
        stages = self.with_ties_counted_once(self.tied, self._group_of(n)).stages if self.tied else self.stages
        return [(stages[begin - 1].boundary if begin else 0, stages[begin:end]) for begin, end in self._bounds(n)]

    def grouped(self, n: int) -> Self:
        """Return n consecutive stages made of the model's own, as one device would run each."""
        return self if n == self.n else _grouped_model(self, n)

    def tied_groups(self, n: int) -> tuple[Tie, ...]:
        """Return the ties of n groups of stages; a tensor of stages of one group ties it to no other."""
        group = self._group_of(n)
        ties = ((tie, tuple(sorted({group[j] for j in tie.stages}))) for tie in self.tied)
        return tuple(msgspec.structs.replace(tie, stages=groups) for tie, groups in ties if len(groups) > 1)

    def with_ties_counted_once(
        self, ties: Sequence[Tie], places: Sequence[int] | None = None, *, joined: bool = True
    ) -> Self:
        """Return a model that counts tied tensors once at each place, in the first of their stages there.

        `places` has the place of each stage; by default all are at one. `joined` says whether one backward goes through
        all stages of a place.
        """
        stages = list(self.stages)
        places = places or [0] * self.n
        for tie in ties:
            for place in {places[j] for j in tie.stages}:
                count_once(stages, tie, [j for j in tie.stages if places[j] == place], joined=joined)
        others = tuple(tie for tie in self.tied if tie not in ties)
        return msgspec.structs.replace(self, stages=tuple(stages), tied=others)

    def without_ties(self, ties: Sequence[Tie]) -> list[Stage]:
        """Return the stages without tied tensors."""
        stages = list(self.stages)
        for tie in ties:
            for j in tie.stages:
                stages[j] = without_tied(stages[j], tie)
        return stages

    def _group_of(self, n: int) -> list[int]:
        """Return the number of each stage's group, of n."""
        return [k for k, (begin, end) in enumerate(self._bounds(n)) for _ in range(begin, end)]

    @property
    def outer_updates_take_time(self) -> bool:
        """Whether any update by a mean of parameters takes time."""
        return any(stage.outer_update for stage in self.stages)

    @property
    def updates_in_lanes(self) -> bool:
        """Whether updates take their devices' time."""
        return any(stage.update or stage.update_bytes or stage.group_sum for stage in self.stages)

    @property
    def moves_bytes(self) -> bool:
        """Whether any update's time depends on the bandwidth of its device's memory."""
        return any(stage.update_bytes for stage in self.stages)

    @property
    def updates_take_time(self) -> bool:
        """Whether any update takes time, on a device or on a host."""
        return self.updates_in_lanes or any(stage.updated_on_host and stage.host_update for stage in self.stages)

    def size(self, kind: str) -> npt.NDArray[np.int64]:
        """Return one of `STAGE_SIZES` for each stage, in bytes or stage-activations."""
        return np.array(self._sizes(kind), np.int64)

    def padded(self, ranks: int, padding: str) -> Self:
        """Return the model with parameters padded to whole shares of `ranks` ranks.

        By `rows`, all ranks have the same number of rows of each tensor (FSDP2). By `megatron`, each tensor begins with
        a multiple of 64 numbers, and a stage ends with one of 128 (Megatron-LM, `param_layout`). Experts go by
        themselves where other ranks share them.
        """
        of_experts = max(1, ranks * self.mesh.tensor // self.mesh.expert)
        stages = (pad_stage(stage, ranks, of_experts, padding) for stage in self.stages)
        return msgspec.structs.replace(self, stages=tuple(stages))

    def _sizes(self, kind: str) -> list[int]:
        return [stage.size(kind) for stage in self.stages]

    def _check_curves(self) -> None:
        """Refuse a curve that is not its stage's."""
        for j, stage in enumerate(self.stages):
            if stage.curve is None:
                continue
            given, gradient = self.fresh_input(j), self.output_gradient(j)
            peaks = stage.forward_transient, gradient + stage.backward_transient
            try:
                for name, peak in zip(("forward", "backward"), peaks, strict=True):
                    cost = getattr(stage, name)
                    whole = float(cost) if isinstance(cost, Work) else round(cost * 1e9)
                    stage.curve.check_pass(name, whole, stage.activation + peak)
                stage.curve.check_gradients(stage.activation + peaks[1] + stage.size("first_gradients"))
                stage.curve.check_ends(stage.activation, given, gradient)
            except RequestError as error:
                raise RequestError(f"stages[{j}].{error.subject}", error.problem) from None

    def fresh_input(self, j: int) -> int:
        """Return the bytes of a stage's input that the stage before does not keep."""
        return self.stages[j - 1].boundary - self.stages[j - 1].kept_output if j else 0

    def output_gradient(self, j: int) -> int:
        """Return the bytes of the gradient of a stage's output, which its backward gets; the last gets none."""
        return self.stages[j].boundary if j < self.n - 1 else 0

    def without_curves(self) -> Self:
        """Return the model without its stages' curves, which no run reads."""
        if not any(stage.curve for stage in self.stages):
            return self
        stages = tuple(msgspec.structs.replace(stage, curve=None) for stage in self.stages)
        return msgspec.structs.replace(self, stages=stages)

    @property
    def frees_early(self) -> npt.NDArray[np.bool_]:
        """Whether the input's part of each stage's split backward frees what the weights' part does not need."""
        return np.array([stage.weight_activation is not None for stage in self.stages], np.bool_)

    @property
    def all_sizes(self) -> tuple[tuple[int | None, ...], ...]:
        """All sizes of its stages, on devices and on hosts."""
        kinds = (
            *STAGE_SIZES,
            "retained_gradients",
            "retained_input_transient",
            "retained_weight_transient",
            "loss_activation",
            "freed_gradient",
            "wide_gradients",
            "restored",
            "offloaded",
            "host_optimizer",
            "host_parameters",
            "nvme",
            "expert_parameters",
        )
        return tuple(tuple(getattr(stage, kind) for kind in kinds) for stage in self.stages)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters, each tied tensor counted once."""
        return int(self.size("parameters").sum()) - sum((len(tie.stages) - 1) * tie.parameters for tie in self.tied)

    @property
    def boundary_in_memory(self) -> npt.NDArray[np.int64]:
        """The size of each boundary in memory: 0 in the slot model, though 1 as a message."""
        return np.zeros(self.n, np.int64) if self.is_unit else self.size("boundary")

    @property
    def optimizer_as_message(self) -> npt.NDArray[np.int64]:
        """The size of each stage's optimizer state as a message: 1 in the slot model, though 0 in memory."""
        return np.ones(self.n, np.int64) if self.is_unit else self.size("optimizer")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the model of a file, .toml or .json, or of a name in the package.

        >>> Model.load("gpt2")
        Model('gpt2', 14 stages, bf16, adam, mixed precision, parameters 248.9 MB, activations 4.25 GB)
        """
        return cls.from_builtins(*read_preset("model", path))

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write a model file; read again, a unit model is one of seconds and bytes."""
        if self.layers is not None and not self.is_of_layers:
            problem = "is grouped or trained, and its file has the shape of its layers alone"
            raise RequestError("model", f"{problem}; save the model that was given")
        config.write_config(path, self.table(), force=force)

    def to_builtins(self) -> str | dict[str, object]:
        """Return the content of a file of this model, or the name of a unit model."""
        return self.name if self.is_unit else self.table()

    @classmethod
    def from_builtins(cls, content: object, subject: str) -> Self:
        """Return the model of a file's content; errors begin with `subject`."""
        if isinstance(content, Mapping) and "model_type" in content:
            file = Path(subject)
            name = file.resolve().parent.name if file.name == "config.json" else file.stem if file.suffix else ""
            content = {"name": name, "layers": shape_fields(content, subject)}
        form = config.decode(
            content, _ModelFile, subject, (_RepeatedStage, _ModelFile, Layers, Tie, MemoryCurve, OperatorSteps)
        )
        if bool(form.stages) == (form.layers is not None):
            problem = "and [layers] both say what its layers are; keep one" if form.stages else "are missing"
            raise RequestError(
                f"{subject}: $.stages", problem + "; give [[stages]], or the shape of [layers]" * (not form.stages)
            )
        if form.layers is not None:
            for name in ("tied", "tokens"):
                if getattr(form, name):
                    problem = "follow from [layers] (`tied`, `length`), and the file says them again; leave them out"
                    raise RequestError(f"{subject}: $.{name}", problem)
            return cls.of_layers(form.layers, **_facts(form))
        if sum(stage.repeat for stage in form.stages) > MOST_STAGES:
            raise RequestError(f"{subject}: $.stages", f"more than {MOST_STAGES} in all; lower `repeat`")
        stages = chain.from_iterable(repeat(stage.stage(), stage.repeat) for stage in form.stages)
        try:
            return cls(stages=tuple(stages), **_facts(form))
        except RequestError as error:
            raise RequestError(subject, f"$.{error}") from None

    @classmethod
    def of_layers(cls, shape: Layers, mesh: Mesh = NO_MESH, **facts: Any) -> Self:
        """Return the model of a shape, as one rank of a mesh has it."""
        facts |= {"samples": facts.get("samples") or 1, "precision": facts.get("precision") or "bf16"}
        facts = {name: value for name, value in facts.items() if name not in ("layers", "tied", "tokens")}
        stages, tied = shaped_stages(shape, mesh, facts["samples"], facts["precision"])
        return cls(**facts | {"stages": stages, "tied": tied, "tokens": shape.length, "layers": shape, "mesh": mesh})

    def on(self, mesh: Mesh, layers: Layers, samples: int, parts: Cuts = ()) -> Self:
        """Return the model of other layers, as one rank of a mesh has it, with the samples of a micro-batch."""
        made: Self = _model_on(self, mesh, layers, samples, parts)
        return made

    def table(self) -> dict[str, object]:
        """Return the content of a file of this model."""
        if self.layers is not None:
            return config.encode(_ModelFacts(**_facts(self) | {"tied": (), "tokens": None}))
        return config.encode(_ModelFacts(**_facts(self))) | {"stages": self._stage_tables()}

    def _stage_tables(self) -> list[dict[str, object]]:
        runs = [(stage, sum(1 for _ in equal)) for stage, equal in groupby(self.stages)]
        return [({"repeat": count} if count > 1 else {}) | config.encode(stage) for stage, count in runs]


def _check_ties(ties: Sequence[Tie], stages: Sequence[Stage]) -> None:
    """Refuse ties of stages that do not exist, or that have less than the tied tensors."""
    left = dict(enumerate(stages))
    for k, tie in enumerate(ties):
        if len(tie.stages) < 2 or list(tie.stages) != sorted(set(tie.stages)):
            problem = f"{list(tie.stages)} must be at least two stages, each once and in order"
            raise RequestError(f"tied[{k}].stages", f"{problem}; leave the tie out, or mend it")
        for j in tie.stages:
            if j not in left:
                problem = f"stage {j} does not exist; the model's stages are 0 to {len(stages) - 1}"
                raise RequestError(f"tied[{k}].stages", problem)
            try:
                left[j] = without_tied(left[j], tie)
            except RequestError as error:
                kind = "gradient_bytes" if error.subject == "gradients" else error.subject
                has, needs = (getattr(part, kind) for part in (left[j], tie))
                sizes = f"stage {j} has {has:,} bytes of the {needs:,} that are tied"
                problem = f"stages {list(tie.stages)} differ in size: {sizes}; give what all of them have"
                raise RequestError(f"tied[{k}].{error.subject}", problem) from None


@lru_cache(maxsize=256)  # every request of one model and mesh asks for it
def _model_on(model: Model, mesh: Mesh, layers: Layers, samples: int, parts: Cuts) -> Any:
    made = model.of_layers(layers, mesh, **_facts(model) | {"samples": samples})
    return msgspec.structs.replace(made, parts=parts)


@lru_cache(maxsize=256)  # every request of one model and mesh groups it again
def _grouped_model(model: Model, n: int) -> Any:
    stages = tuple(merge_stages(layers, given) for given, layers in model.groups(n))
    return msgspec.structs.replace(model, stages=stages, tied=model.tied_groups(n))


@lru_cache(maxsize=64)  # every program of one model asks for them
def gradient_tensors(model: Model, of_experts: bool | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the bytes of each stage's gradients, in the order of the forward; in one, if shapes are unknown.

    They are those of what experts have, of all else, or of all.
    """
    return tuple(_gradients_of(stage, of_experts) for stage in model.stages)


def _gradients_of(stage: Stage, of_experts: bool | None) -> tuple[int, ...]:
    own = stage.of_experts("gradients")
    whole = {None: stage.gradient_bytes, True: own, False: stage.gradient_bytes - own}[of_experts]
    shapes = stage.expert_tensors if of_experts else stage.tensors
    if of_experts is False:
        shapes = tuple(shape for shape in stage.tensors if shape not in stage.expert_tensors)
    sizes = tuple(stage.gradient_bytes * prod(shape) // stage.numbers for shape in shapes)
    return sizes if sum(sizes) == whole and (sizes or of_experts) else (whole,)


_balanced_cuts = lru_cache(maxsize=256)(balanced)  # every schedule of a comparison cuts the same model

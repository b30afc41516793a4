"""What is trained: the time and the bytes of one micro-batch through each stage."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain, groupby, pairwise, repeat
from math import lcm
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from cdpsim.errors import RequestError, choose
from cdpsim.files import config
from cdpsim.files.config import Name
from cdpsim.files.units import MOST_SECONDS, Work
from cdpsim.model.partition import Cuts, balanced, check_stages
from cdpsim.model.stage import STAGE_SIZES, Stage, Tie, merge_stages, without_tied

__all__ = ["OFFLOAD", "OPTIMIZERS", "PRECISIONS", "RECOMPUTE", "STAGE_SIZES", "Model", "Recipe", "Stage", "Tie"]

UNIT_MODELS = ("unit", "unit-split")  # the slot model, and the one in which backwards are split and take two slots
MOST_STAGES = 1_000_000
MOST_LAYERS = 2_000  # that are grouped: exact cuts take time as their square
MOST_BYTES_IN_ALL = 2**53  # up to here a sum over all stages is exact, also in float64

# What a number weighs; a TF32 product takes numbers in FP32 (NVIDIA A100 Tensor Core GPU Architecture, 2020).
PRECISIONS = MappingProxyType({"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1})
Optimizer = Literal["sgd", "momentum", "adam", "adafactor"]
Recomputation = Literal["none", "full", "sqrt"]
Offload = Literal["none", "optimizer", "activations", "all"]
OPTIMIZERS, RECOMPUTE, OFFLOAD = get_args(Optimizer), get_args(Recomputation), get_args(Offload)


Samples: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class Recipe(config.ConfigTable, frozen=True, kw_only=True):
    """How a model is trained, as far as that costs bytes and time; `cdpsim.model.recipe` says what it costs."""

    optimizer: str | None = None  # one of OPTIMIZERS; None: what the stages themselves say
    mixed_precision: bool = False  # a master copy of the weights, and the optimizer's state, in fp32
    recompute: str = "none"  # which activations are computed again in the backward
    offload: str = "none"  # what the devices' hosts hold for them

    def __post_init__(self) -> None:
        config.ConfigTable.__post_init__(self)
        if self.optimizer is not None:
            choose("optimizer", self.optimizer, OPTIMIZERS)
        choose("recompute", self.recompute, RECOMPUTE)
        choose("offload", self.offload, OFFLOAD)
        if self.mixed_precision and not self.optimizer:
            raise RequestError("mixed_precision", "what is kept in fp32 depends on the optimizer; name one")

    @property
    def words(self) -> list[str]:
        """Say it in words, from what is not by default."""
        ways = {"recompute": self.recompute, "offload": self.offload}
        parts = [self.optimizer or "", "mixed precision" * self.mixed_precision]
        return [part for part in parts if part] + [f"{name} {how}" for name, how in ways.items() if how != "none"]


class _RepeatedStage(Stage, frozen=True, kw_only=True):
    repeat: Annotated[int, msgspec.Meta(ge=1, le=MOST_STAGES)] = 1

    def stage(self) -> Stage:
        return Stage(**{name: getattr(self, name) for name in Stage.__struct_fields__})


class _ModelFile(config.ConfigTable, frozen=True, kw_only=True):
    name: Name = ""
    precision: str = ""
    samples: Samples | None = None
    training: Recipe = Recipe()
    tied: tuple[Tie, ...] = ()
    stages: Annotated[tuple[_RepeatedStage, ...], msgspec.Meta(min_length=1)]


class Model(config.ConfigTable, frozen=True, kw_only=True):
    """Stages in the order in which a micro-batch goes forward."""

    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=MOST_STAGES)]
    name: Name = ""
    is_unit: bool = False  # its times are slots and its sizes stages' worth
    precision: str = ""  # one of PRECISIONS: what its bytes and its FLOP are in
    samples: Samples | None = None  # of a micro-batch, such as images or sequences; None: nobody says
    training: Recipe = Recipe()  # what `cdpsim.model.recipe.apply` adds to its stages
    tied: tuple[Tie, ...] = ()  # tensors that several stages share; each of these has it among its parameters

    def __post_init__(self) -> None:
        config.ConfigTable.__post_init__(self)
        if self.precision:
            choose("precision", self.precision, PRECISIONS)
        if any(stage.on_host for stage in self.stages) and any(stage.update for stage in self.stages):
            raise RequestError("stages", "some are updated on their device and some on its host; give all in one way")
        if self.training.optimizer and self.size("optimizer").any():
            raise RequestError("training", "stages say what their optimizer weighs; leave that out, or the optimizer")
        _check_ties(self.tied, self.stages)
        for kind in STAGE_SIZES:
            if self._column(kind, np.float64).sum() > MOST_BYTES_IN_ALL:
                raise RequestError("stages", f"{kind} sums to more than 9 PB; check the units and `repeat`")
        if (small := self.size("activation")[1:] < self.size("kept_output")[:-1]).any():
            j = int(small.argmax())
            raise RequestError(
                "stages",
                f"stage {j + 1} has the kept_output of stage {j} as its input; its activation must not be less",
            )

    @classmethod
    @lru_cache(maxsize=64)
    def unit(cls, n: int, *, split: bool = False) -> Self:
        """Make the paper's slot model: every pass takes one slot, everything held or sent counts as one.

        Where backwards are split, each of their two parts takes one.
        """
        if not 1 <= n <= MOST_STAGES:
            raise RequestError(f"n={n}", f"must be at least 1 and at most {MOST_STAGES}")
        weights = {"weight_backward": 1} if split else {}
        stage = Stage(forward=1, backward=1 + split, activation=1, boundary=1, parameters=1, **weights)
        return cls(name=UNIT_MODELS[split], stages=(stage,) * n, is_unit=True)

    def split(self, schedule: str) -> Self:
        """Give the model for a schedule that does the weights' parts of backwards later: it must say what they take."""
        without = next((j for j, stage in enumerate(self.stages) if stage.weight_backward is None), None)
        if without is None:
            return self
        if self.is_unit:
            return self.unit(self.n, split=True)
        problem = f"stage {without} has none, and {schedule} splits backwards; say which part of them is the weights'"
        raise RequestError("weight_backward", problem)

    @property
    def n(self) -> int:
        """The number of stages."""
        return len(self.stages)

    def cuts(self, n: int) -> Cuts:
        """Say with which stages groups begin: of n groups, the largest has as few FLOP, or seconds, as can be."""
        if n > self.n:
            problem = f"the model has {self.n} stages, which can be grouped and not split; lower n, or leave it out"
            raise RequestError("n", f"n={n}, but {problem}")
        check_stages(n, self.n)
        if n == self.n:
            return tuple(range(1, n))
        if self.is_unit or self.n > MOST_LAYERS:
            which = "the slot model's are" if self.is_unit else f"more than {MOST_LAYERS} are"
            raise RequestError(f"n={n}", f"the model has {self.n} stages, and {which} not grouped; give as many")
        if len({isinstance(cost, Work) for stage in self.stages for cost in (stage.forward, stage.backward)}) > 1:
            raise RequestError(
                f"n={n}", f"the {self.n} stages cost work and time, and cannot be grouped; give all in one"
            )
        costs = [Fraction(stage.forward) + Fraction(stage.backward) for stage in self.stages]
        unit = lcm(*(cost.denominator for cost in costs))  # in which all are whole
        return _balanced(tuple(int(cost * unit) for cost in costs), n)

    def groups(self, n: int) -> list[tuple[int, tuple[Stage, ...]]]:
        """Give the stages of each group, and what the stage before sends it."""
        stages = self.once(self.tied, self._group_of(n)).stages if self.tied else self.stages
        ends = pairwise((0, *self.cuts(n), self.n))
        return [(stages[begin - 1].boundary if begin else 0, stages[begin:end]) for begin, end in ends]

    def grouped(self, n: int) -> Self:
        """Make n consecutive stages of the model's own, as one device would run each."""
        return self if n == self.n else _grouped(self, n)

    def tied_groups(self, n: int) -> tuple[Tie, ...]:
        """Give what ties n groups of stages; a tensor of stages of one group ties it to no other."""
        group = self._group_of(n)
        ties = ((tie, tuple(sorted({group[j] for j in tie.stages}))) for tie in self.tied)
        return tuple(msgspec.structs.replace(tie, stages=groups) for tie, groups in ties if len(groups) > 1)

    def once(self, ties: Sequence[Tie], places: Sequence[int] | None = None) -> Self:
        """Count tied tensors in the first of their stages at each place alone, where all are at one unless said."""
        stages = list(self.stages)
        for tie in ties:
            seen: set[int] = set()
            for j in tie.stages:
                place = 0 if places is None else places[j]
                stages[j] = without_tied(stages[j], tie) if place in seen else stages[j]
                seen.add(place)
        others = tuple(tie for tie in self.tied if tie not in ties)
        return msgspec.structs.replace(self, stages=tuple(stages), tied=others)

    def _group_of(self, n: int) -> list[int]:
        """Give the group of each stage, of n."""
        return [k for k, (begin, end) in enumerate(pairwise((0, *self.cuts(n), self.n))) for _ in range(begin, end)]

    def forward_time(self, speed: float | None) -> npt.NDArray[Any]:
        """Say what each stage's forward takes on a device of that speed: seconds, or int64 slots.

        What crosses to the host meanwhile has to be through as well.
        """
        return self._beside_transfer(self._times("forward", speed))

    def backward_time(self, speed: float | None) -> npt.NDArray[Any]:
        """Say what each stage's whole backward takes, as `forward_time` does."""
        return self._beside_transfer(self._times("backward", speed))

    def weight_backward_time(self, speed: float | None) -> npt.NDArray[Any]:
        """Say which part of the backward can wait if a schedule splits it; 0 where not given."""
        return self._times("weight_backward", speed)

    def update_time(self, speed: float | None) -> npt.NDArray[Any]:
        """Say what each stage's update takes, on its device or on the host; nothing where that is not given."""
        times = self._times("update", speed)
        hosts = [stage.host_update if stage.on_host else 0.0 for stage in self.stages]
        return times + hosts if any(hosts) else times

    @property
    def updates_in_lanes(self) -> bool:
        """Whether updates take their devices' time."""
        return any(stage.update for stage in self.stages)

    @property
    def updates_take_time(self) -> bool:
        """Whether any update does, wherever it is computed."""
        return any(stage.update or (stage.on_host and stage.host_update) for stage in self.stages)

    def size(self, kind: str) -> npt.NDArray[np.int64]:
        """Give one of `SIZES` for each stage."""
        return self._column(kind, np.int64)

    @property
    def weights(self) -> tuple[tuple[int | None, ...], ...]:
        """All that its stages weigh, on devices and on hosts."""
        return tuple(
            tuple(getattr(stage, kind) for kind in (*STAGE_SIZES, "offloaded", "host_optimizer"))
            for stage in self.stages
        )

    @property
    def bytes_of_parameters(self) -> int:
        """Say what all parameters weigh, each tied tensor counted once."""
        return int(self.size("parameters").sum()) - sum((len(tie.stages) - 1) * tie.parameters for tie in self.tied)

    @property
    def boundary_held(self) -> npt.NDArray[np.int64]:
        """What each boundary weighs in memory: 0 in the slot model, though 1 as a message."""
        return np.zeros(self.n, np.int64) if self.is_unit else self.size("boundary")

    @property
    def moved_optimizer(self) -> npt.NDArray[np.int64]:
        """What each stage's optimizer state weighs as a message: 1 in the slot model, though 0 in memory."""
        return np.ones(self.n, np.int64) if self.is_unit else self.size("optimizer")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a model file, .toml or .json."""
        return cls.from_builtins(config.read_config(path), str(path))

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write a model file; a unit model becomes, for good, one of seconds and bytes."""
        config.write_config(path, self.table(), force=force)

    def to_builtins(self) -> str | dict[str, object]:
        """Give what a file says of this model, or the name of one of slots."""
        return self.name if self.is_unit else self.table()

    @classmethod
    def from_builtins(cls, content: object, subject: str) -> Self:
        """Make a model of a file's content; errors begin with `subject`."""
        form = config.decode(content, _ModelFile, subject, (_RepeatedStage, _ModelFile, Tie))
        if sum(run.repeat for run in form.stages) > MOST_STAGES:
            raise RequestError(f"{subject}: $.stages", f"more than {MOST_STAGES} in all; lower `repeat`")
        stages = chain.from_iterable(repeat(run.stage(), run.repeat) for run in form.stages)
        try:
            top = {name: getattr(form, name) for name in ("name", "precision", "samples", "training", "tied")}
            return cls(stages=tuple(stages), **top)
        except RequestError as error:
            raise RequestError(subject, f"$.{error}") from None

    def table(self) -> dict[str, object]:
        """Give what a file says of this model."""
        said: dict[str, object] = {"name": self.name, "precision": self.precision, "samples": self.samples}
        said["training"] = config.encode(self.training)
        said["tied"] = [config.encode(tie) for tie in self.tied]
        top = {key: value for key, value in said.items() if value}
        runs = [(stage, sum(1 for _ in same)) for stage, same in groupby(self.stages)]
        return top | {"stages": [_repeat(count) | config.encode(stage) for stage, count in runs]}

    def _column(self, kind: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        def weigh(stage: Stage) -> int:
            own: int | None = getattr(stage, kind)
            if own is None:
                own = stage.parameters if kind == "gradients" else stage.backward_transient
            return own

        return np.fromiter(map(weigh, self.stages), dtype, self.n)

    def _beside_transfer(self, times: npt.NDArray[Any]) -> npt.NDArray[Any]:
        transfers = [stage.transfer for stage in self.stages]
        return np.maximum(times, transfers) if any(transfers) else times

    def _times(self, field: str, speed: float | None) -> npt.NDArray[Any]:
        costs = [getattr(stage, field) or 0 for stage in self.stages]
        if self.is_unit:
            return np.array(costs, np.int64)
        times = np.array(costs, np.float64)
        work = np.fromiter((isinstance(cost, Work) for cost in costs), np.bool_, self.n)
        if speed is None and work.any():
            problem = f"{field} is work; give --cluster with a speed, or times"
            raise RequestError(f"stage {work.argmax()}", problem)
        if speed is not None:
            times[work] /= speed
        if (slow := times > MOST_SECONDS).any():
            problem = f"{field} takes more than {MOST_SECONDS:g} s at {speed:g} FLOP/s; check both"
            raise RequestError(f"stage {slow.argmax()}", problem)
        return times


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
                kind = "summed" if error.subject == "gradients" else error.subject
                has, wants = (getattr(one, kind) for one in (left[j], tie))
                sizes = f"stage {j} has {has:,} bytes of the {wants:,} that are tied"
                problem = f"stages {list(tie.stages)} differ in size: {sizes}; give what all of them have"
                raise RequestError(f"tied[{k}].{error.subject}", problem) from None


@lru_cache(maxsize=32)  # asked for every request of one model
def _grouped(model: Model, n: int) -> Any:
    stages = tuple(merge_stages(layers, given) for given, layers in model.groups(n))
    return msgspec.structs.replace(model, stages=stages, tied=model.tied_groups(n))


@lru_cache(maxsize=32)  # asked for every schedule that is compared
def _balanced(costs: tuple[int, ...], n: int) -> Cuts:
    return balanced(costs, n)


def _repeat(count: int) -> dict[str, object]:
    return {"repeat": count} if count > 1 else {}

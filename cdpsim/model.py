"""What is trained: the time and the bytes of one micro-batch through each stage."""

from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from cdpsim import fileform
from cdpsim.errors import RequestError
from cdpsim.fileform import Cost, Name, Size
from cdpsim.units import MOST_SECONDS, Work

MOST_STAGES = 1_000_000
MOST_BYTES_IN_ALL = 2**53  # up to here a sum over all stages is exact, also in float64

SIZES = (
    "activation",
    "kept_output",
    "forward_transient",
    "backward_transient",
    "boundary",
    "parameters",
    "gradients",
    "optimizer",
)


class Stage(fileform.Table, frozen=True, kw_only=True):
    """One micro-batch through one stage: seconds or `Work`, and bytes."""

    forward: Cost
    backward: Cost
    weight_backward: Cost | None = None
    activation: Size = 0  # held from forward to backward, the stage's input included
    kept_output: Size = 0  # the part of it that is the stage's output, which the next stage has as its input
    forward_transient: Size = 0  # what a forward needs beyond that while it runs
    backward_transient: Size = 0  # what a backward needs beyond that and its output's gradient
    boundary: Size = 0
    parameters: Size = 0
    gradients: Size | None = None  # None: as parameters
    optimizer: Size = 0

    def __post_init__(self) -> None:
        fileform.Table.__post_init__(self)
        if self.kept_output > min(self.activation, self.boundary):
            raise RequestError("kept_output", "must be at most activation and boundary, of both of which it is a part")
        part, whole = self.weight_backward, self.backward
        if part is None:
            return
        if isinstance(part, Work) != isinstance(whole, Work):
            raise RequestError("weight_backward", "must be a time where backward is one, and work where it is work")
        if not part < whole:
            raise RequestError("weight_backward", "must be less than backward, of which it is a part")


class _Run(Stage, frozen=True, kw_only=True):
    repeat: Annotated[int, msgspec.Meta(ge=1, le=MOST_STAGES)] = 1

    def stage(self) -> Stage:
        return Stage(**{name: getattr(self, name) for name in Stage.__struct_fields__})


class _ModelFile(fileform.Table, frozen=True, kw_only=True):
    name: Name = ""
    stages: Annotated[tuple[_Run, ...], msgspec.Meta(min_length=1)]


class Model(fileform.Table, frozen=True, kw_only=True):
    """Stages in the order in which a micro-batch goes forward."""

    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=MOST_STAGES)]
    name: Name = ""
    is_unit: bool = False  # its times are slots and its sizes stages' worth

    def __post_init__(self) -> None:
        fileform.Table.__post_init__(self)
        for kind in SIZES:
            if self._column(kind, np.float64).sum() > MOST_BYTES_IN_ALL:
                raise RequestError("stages", f"{kind} sums to more than 9 PB; check the units and `repeat`")
        if (small := self.size("activation")[1:] < self.size("kept_output")[:-1]).any():
            j = int(small.argmax())
            raise RequestError(
                "stages",
                f"stage {j + 1} has the kept_output of stage {j} as its input; its activation must not be less",
            )

    @classmethod
    def unit(cls, n: int) -> Self:
        """Make the paper's slot model: every pass takes one slot, everything held or sent counts as one."""
        if not 1 <= n <= MOST_STAGES:
            raise RequestError(f"n={n}", f"must be at least 1 and at most {MOST_STAGES}")
        stage = Stage(forward=1, backward=1, activation=1, boundary=1, parameters=1)
        return cls(name="unit", stages=(stage,) * n, is_unit=True)

    @property
    def n(self) -> int:
        """The number of stages."""
        return len(self.stages)

    def forward_time(self, speed: float | None) -> npt.NDArray[Any]:
        """Say what each stage's forward takes on a device of that speed: seconds, or int64 slots."""
        return self._times("forward", speed)

    def backward_time(self, speed: float | None) -> npt.NDArray[Any]:
        """Say what each stage's whole backward takes, as `forward_time` does."""
        return self._times("backward", speed)

    def weight_backward_time(self, speed: float | None) -> npt.NDArray[Any]:
        """Say which part of the backward can wait if a schedule splits it; 0 where not given."""
        return self._times("weight_backward", speed)

    def size(self, kind: str) -> npt.NDArray[np.int64]:
        """Give one of `SIZES` for each stage."""
        return self._column(kind, np.int64)

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
        return cls.from_builtins(fileform.load(path), str(path))

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write a model file; a unit model becomes, for good, one of seconds and bytes."""
        fileform.save(path, self.table(), force=force)

    def to_builtins(self) -> str | dict[str, object]:
        """Give what a file says of this model, or "unit"."""
        return "unit" if self.is_unit else self.table()

    @classmethod
    def from_builtins(cls, content: object, subject: str) -> Self:
        """Make a model of a file's content; errors begin with `subject`."""
        form = fileform.decode(content, _ModelFile, subject, (_Run, _ModelFile))
        if sum(run.repeat for run in form.stages) > MOST_STAGES:
            raise RequestError(f"{subject}: $.stages", f"more than {MOST_STAGES} in all; lower `repeat`")
        stages = chain.from_iterable(repeat(run.stage(), run.repeat) for run in form.stages)
        try:
            return cls(name=form.name, stages=tuple(stages))
        except RequestError as error:
            raise RequestError(subject, f"$.{error}") from None

    def table(self) -> dict[str, object]:
        """Give what a file says of this model."""
        name: dict[str, object] = {"name": self.name} if self.name else {}
        runs = [(stage, sum(1 for _ in same)) for stage, same in groupby(self.stages)]
        return name | {"stages": [_repeat(count) | fileform.encode(stage) for stage, count in runs]}

    def _column(self, kind: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        def weigh(stage: Stage) -> int:
            own: int | None = getattr(stage, kind)
            return stage.parameters if own is None else own

        return np.fromiter(map(weigh, self.stages), dtype, self.n)

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


def _repeat(count: int) -> dict[str, object]:
    return {"repeat": count} if count > 1 else {}

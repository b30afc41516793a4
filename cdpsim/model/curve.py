"""The memory of a stage over its own work: what it holds during each operator of its forward and of its backward.

Only `cdpsim superpose` and Fig. 4 read curves; a run counts a stage with its highest moment from begin to end.
"""

from operator import add
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import numpy as np

from cdpsim.errors import RequestError
from cdpsim.files import config
from cdpsim.numeric.columns import Ints

OptionalNumbers: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=0, le=2**60)], ...]
StepNumbers: TypeAlias = Annotated[OptionalNumbers, msgspec.Meta(min_length=1)]
StepCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class OperatorSteps(config.ConfigTable, frozen=True, kw_only=True):
    """The operators of a pass, one after another."""

    cost: StepNumbers  # FLOP; nanoseconds where the costs of the stage are times
    moved: StepNumbers  # bytes that it reads and writes
    held: StepNumbers  # bytes while it runs: stash, temporaries, and in a backward the gradient of the output
    gradients: OptionalNumbers = ()  # of parameters, in a backward: the bytes complete as a step begins
    input_steps: StepCount = 0  # the steps up to the last that reads the stage's input
    gradient_steps: StepCount = 0  # of a backward: those up to the last that reads the gradient of the output

    def _check(self) -> None:
        steps = len(self.held)
        if not steps == len(self.cost) == len(self.moved):
            problem = f"have {len(self.cost)}, {len(self.moved)} and {steps} steps; give one of each for every step"
            raise RequestError("cost, moved and held", problem)
        if self.gradients and len(self.gradients) != steps:
            problem = f"have {len(self.gradients)} steps, but there are {steps}; give one for every step, or none"
            raise RequestError("gradients", problem)
        if list(self.gradients) != sorted(self.gradients):
            raise RequestError("gradients", "must not fall, as none ends within a backward; profile the model again")
        for name in ("input_steps", "gradient_steps"):
            if getattr(self, name) > steps:
                raise RequestError(name, f"is {getattr(self, name)}, but there are {steps} steps; give at most that")

    def needed(self, given: int, gradient: int = 0) -> Ints:
        """Return the bytes held, without those of the stage's input and of its output's gradient after their last use.

        `given` is 0 where something else keeps the input.
        """
        step = np.arange(len(self.held))
        left: Ints = np.array(self.held) - given * (step >= self.input_steps) - gradient * (step >= self.gradient_steps)
        return left


class MemoryCurve(config.ConfigTable, frozen=True, kw_only=True):
    """The steps of a stage's forward, and those of its backward."""

    forward: OperatorSteps
    backward: OperatorSteps

    def unread_input(self, given: int) -> int:
        """Return the bytes of an input that the backward does not read, and that are free when the forward has."""
        return 0 if self.backward.input_steps else given

    def check_pass(self, name: str, cost: float, peak: int) -> None:
        """Refuse steps that are not those of a forward or backward of that cost and that highest moment."""
        steps: OperatorSteps = getattr(self, name)
        if float(total := sum(steps.cost)) != cost:
            raise _not_of_stage(f"{name}.cost", f"sums to {total}, but the {name} of the stage costs {cost:.17g}")
        if (most := max(steps.held)) != peak:
            raise _not_of_stage(f"{name}.held", f"is {most} bytes at most, but the {name} of the stage needs {peak}")

    def check_gradients(self, peak: int) -> None:
        """Refuse gradients of parameters that are not those of a backward with that highest moment, theirs included."""
        steps = self.backward
        if steps.gradients and (most := max(map(add, steps.held, steps.gradients))) != peak:
            problem = f"and held are {most} bytes at most, but the first backward of a step needs {peak}"
            raise _not_of_stage("backward.gradients", problem)

    def check_ends(self, activation: int, given: int, gradient: int) -> None:
        """Refuse a forward that ends with less than the stash, and steps that let more go than they hold."""
        if (last := self.forward.held[-1]) < activation:
            raise _not_of_stage("forward.held", f"ends with {last} bytes, but {activation} are kept for the backward")
        for name, left in (
            ("forward", self.forward.needed(self.unread_input(given))),
            ("backward", self.backward.needed(given, gradient)),
        ):
            if left.min() < 0:
                problem = f"has less in step {left.argmin()} than the input and the gradient that are no longer read"
                raise _not_of_stage(f"{name}.held", problem)


# The type of a stage's field; mypy takes `Stage(**sizes)` with a dict of sizes only if no other field is narrower.
if TYPE_CHECKING:
    OptionalCurve: TypeAlias = Any
else:
    OptionalCurve = MemoryCurve | None


def _not_of_stage(field: str, problem: str) -> RequestError:
    return RequestError(f"curve.{field}", f"{problem}; profile the model again")

"""LocalSteps: rounds in which every worker makes steps alone; then all take the mean of their parameters.

A program of such a schedule has a step for each local step, and one for each step of a warm-up. A worker's local steps
make versions of its own. The last step of a round makes one more: of the mean over all workers, by an outer update.

    warm-up      steps 0 to W - 1, whose gradients all workers sum
    round r      steps W + r H to W + r H + H - 1 of each worker alone; then an outer update by the mean of round r

Where means are late, the mean of round r is on its way during round r + 1, whose last step makes the outer update. So
the first round makes none, and there is one round more, of which no mean is taken.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from cdpsim.errors import RequestError, short_repr
from cdpsim.numeric.columns import Flags, Ints
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import Versions


class Outer(NamedTuple):
    """An optimizer of the last common parameters, whose gradient is what a round has changed on the mean."""

    kind: str  # sgd or nesterov
    rate: float
    momentum: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}:{self.rate:g}:{self.momentum:g}"


OUTER_KINDS = ("sgd", "nesterov")


def read_outer(text: object) -> Outer:
    """Return the outer optimizer of a text: `sgd:1`, `sgd:1:0.5`, `nesterov:0.7:0.9`.

    >>> read_outer("nesterov:0.7:0.9")
    Outer(kind='nesterov', rate=0.7, momentum=0.9)
    """
    kind, *numbers = text.split(":") if isinstance(text, str) else ("",)
    try:
        rate, *rest = map(float, numbers)
        momentum = rest[0] if rest else 0.0
        right = kind in OUTER_KINDS and len(rest) < 2 and 0 < rate < float("inf") and 0 <= momentum < 1
        right &= kind != "nesterov" or momentum > 0
    except ValueError:
        right = False
    if not right:
        remedy = "write sgd:RATE, sgd:RATE:MOMENTUM or nesterov:RATE:MOMENTUM, as nesterov:0.7:0.9"
        raise RequestError("outer", f"{short_repr(text)} is no optimizer, whose momentum is below 1; {remedy}")
    return Outer(kind, rate, momentum)


@dataclass(frozen=True)
class LocalSteps:
    """LocalSteps, by the number H that a shape has."""

    outer: Outer | None = None  # that takes the mean; None: it stands in the place of parameters
    late: bool = False  # whether workers make a round's steps while the mean of the round before is on its way
    usual_warm_up: int = 0  # steps before them whose gradients are summed; 0: the schedule has none

    @property
    def outer_copies(self) -> int:
        """The copies of parameters that outer updates need: the last common ones, a momentum, and what is late.

        That is what a mean on its way is of, and the common parameters from which its round began.
        """
        return 0 if self.outer is None else 1 + (self.outer.momentum > 0) + 2 * self.late

    def steps(self, updates: int, shape: Shape) -> int:
        """Return the steps of a program with so many updates by sums or means."""
        local = updates - shape.warm_up + self.late
        return local * shape.local_steps + shape.warm_up if local > 0 else updates

    def versions(self, shape: Shape) -> Versions:
        """Return the versions that a worker has.

        >>> versions = LocalSteps().versions(Shape(1, 1, local_steps=2))
        >>> made = versions.made(4)
        >>> made.step.tolist(), made.own.tolist(), made.averaged.tolist()
        ([0, 1, 1, 2, 3, 3], [1, 1, 0, 1, 1, 0], [-1, -1, 2, -1, -1, 5])
        """
        of = (self._steps, self._sums, self._own, self._averaged)
        step, sums, own, averaged = (partial(each, shape) for each in of)
        return Versions(step=step, sums=sums, own=own, averaged=averaged)

    def _places(self, shape: Shape, version: Ints) -> tuple[Ints, Ints]:
        """Return the round of each version and its number there; of a warm-up's versions, a round below 0."""
        number = version - 1 - shape.warm_up
        if self.late:
            number = number + (number >= shape.local_steps)  # as if the first round had an outer update
        return np.divmod(number, shape.local_steps + 1)

    def _is_outer(self, shape: Shape, version: Ints) -> Flags:
        outer: Flags = (version > shape.warm_up) & (self._places(shape, version)[1] == shape.local_steps)
        return outer

    def _steps(self, shape: Shape, version: Ints) -> Ints:
        turn, number = self._places(shape, version)
        local = shape.warm_up + turn * shape.local_steps + np.minimum(number, shape.local_steps - 1)
        return np.where(version > shape.warm_up, local, version - 1)

    def _sums(self, shape: Shape, version: Ints) -> Ints:
        return 1 - self._is_outer(shape, version)

    def _own(self, shape: Shape, version: Ints) -> Ints:
        own: Ints = ((version > shape.warm_up) & ~self._is_outer(shape, version)).astype(np.int64)
        return own

    def _averaged(self, shape: Shape, version: Ints) -> Ints:
        last = version - 1
        if self.late:  # the last one of the round before
            turn, _ = self._places(shape, version)
            number = turn * (shape.local_steps + 1) - 2
            last = shape.warm_up + 1 + number - (number >= shape.local_steps)
        return np.where(self._is_outer(shape, version), last, -1)

"""Orders: the position of each task in the order in which devices work, and when a micro-batch may first start.

Positions order tasks; they are not times. Under unit costs they coincide with the paper's slots, because start times
follow from dependencies, device order and costs.

`OverlappedRounds`: how workers go on that do not wait for each update, and the versions that they make and read.

A program of such a schedule has a step for each round. In a round every worker computes blocks of micro-batches until
what the round before has sent is through; then it hands its gradients over, and goes on with what has come:

    step 0       the seed: one micro-batch of each worker at theta_0; after W steps of warm-up, a block
    step r + 1   interval r: from the moment at which a worker hands over what communication r takes, until the end of
                 the first block by which communication r is through
    last step    the interval during the last communication, which is thrown away

Communication r makes a version (weight prediction: two), which interval r + 1 reads.

`LocalSteps`: rounds in which every worker makes steps alone; then all take the mean of their parameters.

A program of such a schedule has a step for each local step, and one for each step of a warm-up. A worker's local steps
make versions of its own. The last step of a round makes one more: of the mean over all workers, by an outer update.

    warm-up      steps 0 to W - 1, whose gradients all workers sum
    round r      steps W + r H to W + r H + H - 1 of each worker alone; then an outer update by the mean of round r

Where means are late, the mean of round r is on its way during round r + 1, whose last step makes the outer update. So
the first round makes none, and there is one round more, of which no mean is taken.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdpsim.errors import RequestError, short_repr
from cdpsim.numeric.columns import Flags, Ints
from cdpsim.schedules.actions import Action, Actions
from cdpsim.schedules.placement import Shape, Widths
from cdpsim.schedules.rule import Rule, Versions


@dataclass(frozen=True)
class OverlappedRounds:
    """Rounds whose lengths are found in their run."""

    per_update: int = 1  # how many of them make an update of theta
    warms_up: bool = False  # whether steps may go before them whose updates workers wait for

    def steps(self, updates: int) -> int:
        """Return the steps of a program that makes these updates of theta: the seed, and an interval for each."""
        return self.per_update * updates + 1

    def least(self, updates: int, shape: Shape) -> Ints:
        """Return the fewest micro-batches of a worker in each step: the seed has one, and all others a block."""
        counts = np.full(self.steps(updates), shape.m, dtype=np.int32)
        counts[0] = shape.m if shape.warm_up else 1
        return counts


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
    """Steps that each worker takes alone in a round: the number H that a shape has."""

    outer: Outer | None = None  # that takes the mean; None: it stands in the place of parameters
    late: bool = False  # whether workers make a round's steps while the mean of the round before is on its way
    usual_warm_up: int = 0  # steps before them whose gradients are summed; 0: the schedule has none

    @property
    def outer_copies(self) -> int:
        """The copies of parameters that outer updates need: the last common ones, a momentum, and late means.

        That is what a mean on its way is of, and the common parameters from which its round began.
        """
        return 0 if self.outer is None else 1 + (self.outer.momentum > 0) + 2 * self.late

    def steps(self, updates: int, shape: Shape) -> int:
        """Return the steps of a program with these updates by sums or means."""
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


ActionsOf = Callable[[int, int, int], Actions]  # of devices, micro-batches, chunks
Position = Callable[[Ints, Ints, Ints, Shape], Ints]  # step, micro-batch, phase

# The third of the phases to which actions of each kind belong: forwards, backwards, weights' parts.
_THIRD = np.array([0, 0, 1, 1, 2], dtype=np.int32)
assert [*Action] == [Action.F, Action.B, Action.I, Action.W]


def _at_once(i: int, shape: Shape) -> Fraction:
    return Fraction(0)


@dataclass(frozen=True)
class Order:
    """The way in which micro-batches follow each other.

    `together`: a training step ends for all micro-batches before the next begins, so that all that hold a stage come to
    its update at one moment and what they exchange is a collective. Else steps overlap, devices take turns, and what is
    exchanged goes point to point.

    An order gives a position to each task; a position in a list counts the repetitions of the list before it, too.
    """

    name: str
    together: bool
    position: Position = field(repr=False)
    # Of micro-batch i: a share of its own pass.
    release: Callable[[int, Shape], Fraction] = field(default=_at_once, repr=False)
    any_m: bool = False  # whether a step may have another number of micro-batches than the model has stages
    accumulates: bool = False  # whether a step may have several micro-batches for each worker, one after another
    chunks: int = 1  # stages per device, by default
    any_chunks: bool = False  # whether a request may give another number of them
    one_place: bool = False  # whether one device has all stages
    rounds: OverlappedRounds | None = None  # of workers that do not wait for updates; m is their block
    local: LocalSteps | None = None  # of workers that update alone, and take the mean after several steps

    @property
    def lists(self) -> "Lists | None":
        """The lists of actions of each device in a step; None of an order without lists."""
        return self.position if isinstance(self.position, Lists) else None

    @property
    def waits(self) -> bool:
        """Whether all workers make the update of every step together, and wait for it."""
        return self.rounds is None and self.local is None

    def steps(self, updates: int, shape: Shape) -> int:
        """Return the number of a program's steps that make these updates of theta."""
        if self.rounds:
            return self.rounds.steps(updates)
        return self.local.steps(updates, shape) if self.local else updates


@dataclass(frozen=True)
class Lists:
    """Positions by a list for each device, which it repeats in every step.

    Devices that are not `together` repeat it without a pause; an action that comes there before one that it needs is
    then of the step before.
    """

    actions: ActionsOf
    together: bool = True
    replicated: Callable[[Widths, int], Actions] | None = None  # of stages with several devices each, where they may

    def write_out(self, shape: Shape) -> Actions:
        """Return the lists of the devices of one replica for a step."""
        if self.replicated and shape.widths:
            actions = self.replicated(shape.widths, shape.m)
        else:
            actions = self.actions(shape.parts // shape.chunks, shape.m, shape.chunks)
        return actions if self.together or not isinstance(actions, Actions) else actions.repeated()

    def __call__(self, t: Ints, i: Ints, phase: Ints, shape: Shape) -> Ints:
        """Return the position of tasks: that of their step's repetition, and that in the list."""
        listing = _listing(self, shape)
        position: Ints = t * listing.longest + listing.position[i, phase]
        return position


@dataclass(frozen=True, eq=False)
class Listing:
    """The tasks of the devices of one replica in a step.

    Where some backwards are split, one that is not split is its input part directly followed by its weights part;
    `undivided` marks it, because it sends its gradient on only when both are done.
    """

    shape: Shape
    devices: int
    splits: bool
    phase: Ints  # of each task, device after device, as are the next column and `delay`
    micro_batch: Ints
    first: Ints  # the row with which each device begins
    undivided: NDArray[np.bool_]  # by micro-batch and stage
    delay: Ints | None = None  # how many repetitions of the list after its step's own a task comes

    @classmethod
    def of(cls, actions: Actions, shape: Shape) -> "Listing":
        """Return the tasks of some actions."""
        kind, stage, micro_batch, first = actions.kind, actions.stage, actions.micro_batch, actions.first
        delay = actions.delay
        undivided = np.zeros((shape.m, shape.n), dtype=bool)
        if actions.splits:
            both_parts = kind == Action.B
            undivided[micro_batch[both_parts], stage[both_parts]] = True
            tasks = 1 + both_parts
            kind, stage, micro_batch = (np.repeat(column, tasks) for column in (kind, stage, micro_batch))
            delay = None if delay is None else np.repeat(delay, tasks)
            ends = np.cumsum(tasks)
            kind[ends[both_parts] - 1] = Action.W
            first = np.append(0, ends)[first].astype(np.int32)
        third = _THIRD[kind]
        phase = np.where(third == 0, stage, (third + 1) * shape.n - 1 - stage)
        return cls(shape, actions.devices, actions.splits, phase, micro_batch, first, undivided, delay)

    @property
    def phases(self) -> int:
        """The number of tasks of a micro-batch."""
        return (3 if self.splits else 2) * self.shape.n

    @property
    def longest(self) -> int:
        """The number of tasks of the device that has most."""
        return int(np.diff(self.first).max())

    @cached_property
    def tasks(self) -> Ints:
        """The tasks of one replica and step by their numbers, device after device, each in its order."""
        return self.micro_batch * np.int32(self.phases) + self.phase

    @cached_property
    def position(self) -> Ints:
        """The position of each (micro-batch, phase) in its device's list, or in a later repetition of that."""
        position = np.arange(len(self.tasks), dtype=np.int32) - np.repeat(self.first[:-1], self.counts)
        return self._by_task(position if self.delay is None else position + self.delay * np.int32(self.longest))

    @cached_property
    def device(self) -> Ints:
        """The device of each (micro-batch, stage)."""
        device = self._by_task(np.repeat(np.arange(self.devices, dtype=np.int32), self.counts))
        return device[:, : self.shape.n]

    def _by_task(self, column: Ints) -> Ints:
        result = np.empty(len(self.tasks), dtype=np.int32)
        result[self.tasks] = column
        return result.reshape(self.shape.m, self.phases)

    @property
    def counts(self) -> Ints:
        """The number of tasks of each device in a step."""
        return np.diff(self.first)

    def lane_tasks(self, steps: int) -> Ints:
        """Return the tasks of all replicas' devices, one after another, each in its order, step after step."""
        if steps == 1 and self.shape.simulated == 1:
            return self.tasks
        replicas = np.arange(steps * self.shape.simulated, dtype=np.int32).reshape(steps, -1)
        replicas *= self.shape.m * self.phases
        lanes = np.split(self.tasks, self.first[1:-1])
        return np.concatenate([(lane + first[:, None]).ravel() for first in replicas.T for lane in lanes])


@lru_cache(maxsize=4)
def _listing(lists: Lists, shape: Shape) -> Listing:
    actions = lists.write_out(shape)
    return Listing.of(actions.refined(shape.layers, shape.n) if shape.layers else actions, shape)


def newest_rule(order: Order) -> Rule:
    """Return the rule by which every task reads the newest version that exists in an order: the largest causal rule.

    For `CYCLIC` it is the CDP paper's:

    >>> newest_rule(CYCLIC).lags(Shape(3, 3)).tolist()
    [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    """
    return Rule("newest-in-order", partial(_lag, order))


def _lag(order: Order, i: Ints, j: Ints, shape: Shape) -> Ints:
    """Return how many steps older than the newest the version is that exists when (i, j) reads it."""
    first, all_i = np.zeros(1, dtype=np.int32), np.arange(shape.m, dtype=np.int32)[:, None]
    last = last_phase(order, shape) - np.arange(shape.n, dtype=np.int32)
    made = np.broadcast_to(order.position(first, all_i, last, shape), (shape.m, shape.n)).max(axis=0) + 1
    read, later = (order.position(first + step, i, j, shape) for step in (0, 1))
    lag: Ints = np.maximum(-((read - made[j]) // (later - read)) - 1, 0)
    return lag


def last_phase(order: Order, shape: Shape) -> int:
    """Return the phase that ends a pass: the backward of stage 0, or its weights' part."""
    return (_listing(order.lists, shape).phases if order.lists else 2 * shape.n) - 1


def _simultaneous(t: Ints, i: Ints, phase: Ints, shape: Shape) -> Ints:
    return 2 * shape.n * t + phase + 0 * i


def _cyclic(t: Ints, i: Ints, phase: Ints, shape: Shape) -> Ints:
    return 2 * shape.n * (shape.m * t + i) // shape.side_by_side + phase


def _streamed(t: Ints, i: Ints, phase: Ints, shape: Shape) -> Ints:
    return 2 * (shape.m * t + i) + phase


def _evenly(i: int, shape: Shape) -> Fraction:
    return Fraction(i, shape.side_by_side) if i < shape.side_by_side else Fraction(0)


def _stage_by_stage(i: int, shape: Shape) -> Fraction:
    return Fraction(i, shape.n)


SIMULTANEOUS = Order("simultaneous", True, _simultaneous)
CYCLIC = Order("cyclic", False, _cyclic, _evenly, accumulates=True)
STREAMED = Order("streamed", False, _streamed, _stage_by_stage, any_m=True)

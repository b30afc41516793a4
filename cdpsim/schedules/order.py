"""Orders: the position of each task in the order in which devices work, and when a micro-batch may first start.

Positions order tasks; they are not times. Under unit costs they coincide with the paper's slots, because start times
follow from dependencies, device order and costs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from cdpsim.numeric.columns import Ints
from cdpsim.schedules.actions import Action, Actions
from cdpsim.schedules.order import LocalSteps, OverlappedRounds
from cdpsim.schedules.placement import Shape, Widths
from cdpsim.schedules.rule import Rule

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
        """The lists of what each device does in a step; None of an order without lists."""
        return self.position if isinstance(self.position, Lists) else None

    @property
    def waits(self) -> bool:
        """Whether all workers make the update of every step together, and wait for it."""
        return self.rounds is None and self.local is None

    def steps(self, updates: int, shape: Shape) -> int:
        """Return the number of a program's steps in which so many updates of theta are made."""
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
        replicas = np.arange(steps * self.shape.simulated, dtype=np.int32).reshape(steps, -1) * np.int32(
            self.shape.m * self.phases
        )
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

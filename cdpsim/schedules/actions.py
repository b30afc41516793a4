"""What each device does in a step, one action after another: how pipelines declare their orders.

Where a task runs follows from whose list it is in.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, group_numbers, group_starts, sort_by
from cdpsim.numeric.paths import lane_edges, longest_paths


class Action(IntEnum):
    """A forward, a whole backward, or the two parts of one: for the input of its stage, and for the weights."""

    F = 1
    B = 2
    I = 3  # noqa: E741 - as torch and the zero-bubble papers write it
    W = 4


@dataclass(frozen=True, eq=False)
class Actions:
    """A row for each action, device after device, each device's in its order."""

    first: Ints  # device d does rows first[d] to first[d + 1]
    kind: Ints
    stage: Ints
    micro_batch: Ints
    beside: NDArray[np.bool_] | None = None  # whether it is meant to overlap with the row before it (DualPipe's pairs)
    # Of lists that devices repeat without a pause: how many repetitions after its step's own an action stands; None: 0.
    back: Ints | None = None

    @classmethod
    def of(cls, devices: Sequence[Sequence[tuple[str, int, int]]]) -> "Actions":
        """Actions written out: of each device, a list of (kind, stage, micro-batch).

        >>> both = Actions.of([[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]])
        >>> both.device.tolist(), both.stage.tolist()
        ([0, 0, 1, 1], [0, 0, 1, 1])
        """
        rows = [(Action[kind], stage, micro_batch) for actions in devices for kind, stage, micro_batch in actions]
        kind, stage, micro_batch = np.array(rows, dtype=np.int32).reshape(-1, 3).T
        return cls(np.cumsum([0, *map(len, devices)], dtype=np.int32), kind, stage, micro_batch)

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.first) - 1

    @cached_property
    def device(self) -> Ints:
        """The device of each action."""
        return group_numbers(self.first[:-1], len(self))

    @cached_property
    def place(self) -> Ints:
        """The place of each action in its device's order."""
        return np.arange(len(self), dtype=np.int32) - self.first[self.device]

    def repeated(self) -> "Actions":
        """Give the same lists, repeated without a pause: what stands before what it needs is of the step before.

        One period of 1F1B on two devices: device 0 goes back with a micro-batch of the step before at first.

        >>> lists = [[("F", 0, 0), ("B", 0, 1), ("F", 0, 1), ("B", 0, 0)], [(k, 1, i) for i in (0, 1) for k in "FB"]]
        >>> Actions.of(lists).repeated().back.tolist()
        [0, 1, 0, 0, 0, 0, 0, 0]
        """
        order = sort_by(self.micro_batch, self.stage, self.kind)
        place, first = self.place[order], group_starts(self.micro_batch[order], self.stage[order])
        late = np.append(False, place[1:] < place[:-1])
        late[first] = False
        after = np.cumsum(late)
        back = np.empty(len(self), dtype=np.int32)
        back[order] = after - after[first][group_numbers(first, len(order))]
        return replace(self, back=back)

    def unrolled(self, steps: int) -> tuple["Actions", Ints]:
        """Write out the lists of some steps, one after another, and say which row there each step's actions are."""
        assert self.back is not None
        row, step = np.tile(np.arange(len(self)), steps), np.repeat(np.arange(steps), len(self))
        order = sort_by(self.device[row], step + self.back[row], self.place[row])
        at = np.empty(len(order), dtype=np.int32)
        at[order] = np.arange(len(order))
        kind, stage, micro_batch = (column[row[order]] for column in (self.kind, self.stage, self.micro_batch))
        return Actions(self.first * np.int32(steps), kind, stage, micro_batch), at.reshape(steps, -1)

    @cached_property
    def splits(self) -> bool:
        """Whether any backward is done in two parts."""
        return bool((self.kind == Action.I).any())

    def named(self, row: int) -> str:
        """An action as torch writes it: `0F1` is the forward of micro-batch 1 in stage 0."""
        return f"{self.stage[row]}{Action(int(self.kind[row])).name}{self.micro_batch[row]}"

    def at(self, row: int) -> str:
        """Where an action stands."""
        return f"device {self.device[row]}, action {self.place[row]}"


def check_actions(actions: Actions, subject: str = "actions", at: Callable[[int], str] | None = None) -> None:
    """Refuse what is no training step, naming the action at fault, where it stands (`at` of its row), and the remedy.

    In a step every micro-batch has a forward and a backward, whole or in two parts, of every stage, all of them on one
    device; and it comes to an end.
    """
    for problem in _problems(actions, at or actions.at):
        raise RequestError(subject, problem)


def _problems(actions: Actions, at: Callable[[int], str]) -> Iterator[str]:
    if not len(actions):
        yield "there are no actions; begin with 0F0"
        return
    yield from _numbers(actions, at)
    order = sort_by(actions.micro_batch, actions.stage, actions.kind)
    passes = (actions.micro_batch[order], actions.stage[order])
    yield from _twice(actions, order, group_starts(*passes, actions.kind[order]), at)
    first = group_starts(*passes)
    yield from _every_pass(actions, order[first])
    yield from _whole(actions, order, first, at)
    yield from _together(actions, order, first, at)
    before, after = _waits(actions, order, first)
    if actions.back is not None:
        actions, row = actions.unrolled(int(actions.back.max()) + 2)
        before, after = row[:, before].ravel(), row[:, after].ravel()
    yield from _deadlock(actions, before, after)


def _numbers(actions: Actions, at: Callable[[int], str]) -> Iterator[str]:
    """Kinds are known; stages and micro-batches are numbered from 0 on without a gap; no device is idle throughout."""
    for row in np.flatnonzero((actions.kind < Action.F) | (actions.kind > Action.W)).tolist():
        yield f"{at(row)}: {actions.kind[row]} is no kind of action; known are {', '.join(Action.__members__)}"
    for column, name in ((actions.stage, "stage"), (actions.micro_batch, "micro-batch")):
        lowest, highest = int(column.argmin()), int(column.argmax())
        if column[lowest] < 0:
            yield f"{at(lowest)}: there is no {name} {column[lowest]}; number them from 0 on"
        count = np.bincount(np.minimum(column, len(column)))  # of a higher number there is a gap below that anyway
        for gap in np.flatnonzero(count == 0).tolist():
            yield f"{at(highest)}: there is a {name} {column[highest]} but no {name} {gap}; number them without a gap"
    for device in np.flatnonzero(np.diff(actions.first) == 0).tolist():
        yield f"device {device} has nothing to do; leave it out"


def _twice(actions: Actions, order: Ints, first: Ints, at: Callable[[int], str]) -> Iterator[str]:
    """No action is there twice."""
    for again in np.setdiff1d(np.arange(len(order)), first, assume_unique=True).tolist():
        one, other = sorted(order[again - 1 : again + 1].tolist())
        yield f"{at(other)}: {actions.named(other)} is there already ({at(one)}); leave one out"


def _every_pass(actions: Actions, rows: Ints) -> Iterator[str]:
    """Every micro-batch passes every stage; `rows` have one action of each pass, in order."""
    stages = int(actions.stage.max()) + 1
    number = actions.micro_batch[rows].astype(np.int64) * stages + actions.stage[rows]
    for k in np.flatnonzero(number != np.arange(len(number))).tolist():
        i, stage = divmod(k, stages)
        yield f"micro-batch {i} does not pass stage {stage}; add {stage}F{i} and {stage}B{i}"
    i, stage = divmod(len(number), stages)
    if stage:
        yield f"micro-batch {i} does not pass stage {stage}; add {stage}F{i} and {stage}B{i}"


def _whole(actions: Actions, order: Ints, first: Ints, at: Callable[[int], str]) -> Iterator[str]:
    """A pass is a forward and a backward, or a forward and the two parts of one."""
    done = np.bitwise_or.reduceat(1 << actions.kind[order], first)
    whole, parts = (sum(1 << Action[kind] for kind in kinds) for kinds in ("FB", "FIW"))
    for k in np.flatnonzero((done != whole) & (done != parts)).tolist():
        row = int(order[first[k]])
        stage, i = actions.stage[row], actions.micro_batch[row]
        kinds = [kind.name for kind in Action if done[k] >> kind & 1]
        split = [kind for kind in kinds if kind in "IW"]
        if split and "B" in kinds:
            part = int(order[first[k] + kinds.index(split[0])])
            yield f"{at(part)}: {actions.named(part)} is a part of {stage}B{i}, which is there too; leave one out"
        else:
            lacks = [f"{stage}{kind}{i}" for kind in ("FIW" if split else "FB") if kind not in kinds]
            yield f"{at(row)}: {actions.named(row)} lacks {' and '.join(lacks)}; add what is missing"


def _together(actions: Actions, order: Ints, first: Ints, at: Callable[[int], str]) -> Iterator[str]:
    """A pass is all on one device."""
    forward = np.repeat(order[first], np.diff(first, append=len(order)))
    for k in np.flatnonzero(actions.device[order] != actions.device[forward]).tolist():
        row, other = int(order[k]), int(forward[k])
        named = f"{actions.named(row)} is on another device than {actions.named(other)}"
        yield f"{at(row)}: {named} ({at(other)}); move one of them"


def _waits(actions: Actions, order: Ints, first: Ints) -> tuple[Ints, Ints]:
    """What waits for what, beside the order of devices: rows (before, after)."""
    stages = int(actions.stage.max()) + 1
    forward, backward = (order[first + k].reshape(-1, stages) for k in (0, 1))
    weights = np.flatnonzero(actions.kind[order] == Action.W)
    pairs = (
        (forward[:, :-1], forward[:, 1:]),
        (forward, backward),
        (backward[:, 1:], backward[:, :-1]),
        (order[weights - 1], order[weights]),
    )
    before, after = (np.concatenate([column.ravel() for column in columns]) for columns in zip(*pairs, strict=True))
    return before, after


def _deadlock(actions: Actions, before: Ints, after: Ints) -> Iterator[str]:
    """All devices come to the end of their orders."""
    lasting = np.ones(len(actions), dtype=np.int64)
    lanes = lane_edges(np.arange(len(actions), dtype=np.int32), actions.first)
    before, after = (np.concatenate(ends) for ends in zip((before, after), lanes, strict=True))
    *_, reached = longest_paths(before, after, lasting, np.zeros_like(lasting))
    if reached < len(actions):
        names = [actions.named(row) for row in _cycle(actions, before, after)]
        more = [f"... {len(names) - 8} more"] if len(names) > 8 else []
        cycle = " -> ".join([*names[:8], *more, names[0]])
        yield f"schedule deadlocks: {cycle}, each waiting for the one before it; put one of them elsewhere"


def _cycle(actions: Actions, before: Ints, after: Ints) -> list[int]:
    """Actions in a circle, each waiting for what the one before it makes, or for its device to be done with that."""
    now, lacks = _stuck(actions, before, after)
    device = actions.device
    # What a stuck device lacks is on a stuck device: going from one to the other enters a circle.
    path = [min(lacks)]
    while path[-1] not in path[:-1]:
        path.append(int(device[lacks[path[-1]]]))
    circle = path[path.index(path[-1]) + 1 :]
    rows = list(dict.fromkeys(row for d in circle for row in (now[d], lacks[d])))[::-1]
    lowest = rows.index(min(rows))
    return rows[lowest:] + rows[:lowest]


def _stuck(actions: Actions, before: Ints, after: Ints) -> tuple[list[int], dict[int, int]]:
    """How far each device comes, and what the next action of each that is stuck then lacks."""
    inputs = defaultdict[int, list[int]](list)
    for needed, row in zip(before.tolist(), after.tolist(), strict=True):
        inputs[row].append(needed)
    now, end, done = actions.first[:-1].tolist(), actions.first[1:].tolist(), set[int]()
    lacks, waiting = dict[int, int](), defaultdict[int, list[int]](list)
    ready = list(range(actions.devices))
    while ready:
        device = ready.pop()
        lacks.pop(device, None)
        while now[device] < end[device]:
            row = now[device]
            lacking = next((needed for needed in inputs[row] if needed not in done), None)
            if lacking is not None:
                lacks[device] = lacking
                waiting[lacking].append(device)
                break
            done.add(row)
            ready += waiting.pop(row, [])
            now[device] += 1
    return now, lacks

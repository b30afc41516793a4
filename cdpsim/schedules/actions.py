"""The actions of each device in a step, one after another: how pipelines declare their orders.

An action runs on the device in whose list it is. Files of orders are in torch's format: a CSV file with a row for each
device and a cell for each action.
"""

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdpsim.errors import RequestError
from cdpsim.files.writing import read_csv, write_file
from cdpsim.numeric.columns import Ints, group_numbers, group_starts, sort_by
from cdpsim.numeric.paths import cycle_text, find_cycle, lane_edges, longest_paths


class Action(IntEnum):
    """A forward, a whole backward, or the two parts of a backward: for its stage's input, and for its weights."""

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
    # Of lists that devices repeat without a pause: how many repetitions after its step's own an action comes; None: 0.
    delay: Ints | None = None

    @classmethod
    def of(cls, devices: Sequence[Sequence[tuple[str, int, int]]]) -> "Actions":
        """Return actions that are written out: for each device, a list of (kind, stage, micro-batch).

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
        """The number of devices."""
        return len(self.first) - 1

    @cached_property
    def device(self) -> Ints:
        """The device of each action."""
        return group_numbers(self.first[:-1], len(self))

    @cached_property
    def places(self) -> int:
        """The number of pairs of a device and a stage that it has."""
        return len(np.unique(self.device * np.int64(self.stage.max(initial=0) + 1) + self.stage))

    @cached_property
    def index(self) -> Ints:
        """The index of each action in its device's list."""
        return np.arange(len(self), dtype=np.int32) - self.first[self.device]

    def repeated(self) -> "Actions":
        """Return the same lists, repeated without a pause: an action before one that it needs is of the step before.

        One period of 1F1B on two devices: device 0 begins with a backward of the step before.

        >>> lists = [[("F", 0, 0), ("B", 0, 1), ("F", 0, 1), ("B", 0, 0)], [(k, 1, i) for i in (0, 1) for k in "FB"]]
        >>> Actions.of(lists).repeated().delay.tolist()
        [0, 1, 0, 0, 0, 0, 0, 0]
        """
        order, first = self._by_pass
        index = self.index[order]
        late = np.append(False, index[1:] < index[:-1])
        late[first] = False
        repetitions = np.cumsum(late)
        delay = np.empty(len(self), dtype=np.int32)
        delay[order] = repetitions - repetitions[first][group_numbers(first, len(order))]
        return replace(self, delay=delay)

    def unrolled(self, steps: int) -> tuple["Actions", Ints]:
        """Return the lists of some steps written out, one after another, and the rows there of each step's actions."""
        assert self.delay is not None
        row, step = np.tile(np.arange(len(self)), steps), np.repeat(np.arange(steps), len(self))
        order = sort_by(self.device[row], step + self.delay[row], self.index[row])
        at = np.empty(len(order), dtype=np.int32)
        at[order] = np.arange(len(order))
        kind, stage, micro_batch = (column[row[order]] for column in (self.kind, self.stage, self.micro_batch))
        return Actions(self.first * np.int32(steps), kind, stage, micro_batch), at.reshape(steps, -1)

    def refined(self, first: Sequence[int], layers: int) -> "Actions":
        """Return the actions of layers, of which stage j has those from `first[j]` on: one after another, and back.

        >>> Actions.of([[("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0)]]).refined([0, 2], 3).timetable()
        '0F0 1F0 2F0 2B0 1B0 0B0'
        """
        low, count = np.asarray(first, np.int32), np.diff(np.append(first, layers)).astype(np.int32)
        many = count[self.stage]
        row = np.repeat(np.arange(len(self), dtype=np.int32), many)
        inside = np.arange(len(row), dtype=np.int32) - (np.cumsum(many) - many)[row].astype(np.int32)
        kind, stage = self.kind[row], self.stage[row]
        stage = low[stage] + np.where(kind == Action.F, inside, count[stage] - 1 - inside)
        beside = None if self.beside is None else self.beside[row] & (inside == 0)
        delay = None if self.delay is None else self.delay[row]
        ends = np.append(0, np.cumsum(many)).astype(np.int32)
        return Actions(ends[self.first], kind, stage, self.micro_batch[row], beside, delay)

    @cached_property
    def splits(self) -> bool:
        """Whether any backward is done in two parts."""
        return bool((self.kind == Action.I).any())

    @cached_property
    def _by_pass(self) -> tuple[Ints, Ints]:
        """The rows sorted by micro-batch, stage and kind, and where each pass through a stage begins among them."""
        order = sort_by(self.micro_batch, self.stage, self.kind)
        return order, group_starts(self.micro_batch[order], self.stage[order])

    def dependencies(self) -> tuple[Ints, Ints]:
        """Return which rows wait for which: (before, after), by the devices' order and by data."""
        order, first = self._by_pass
        stages = int(self.stage.max()) + 1
        forward, backward = (order[first + k].reshape(-1, stages) for k in (0, 1))
        weights = np.flatnonzero(self.kind[order] == Action.W)
        pairs = (
            (forward[:, :-1], forward[:, 1:]),
            (forward, backward),
            (backward[:, 1:], backward[:, :-1]),
            (order[weights - 1], order[weights]),
        )
        before, after = (np.concatenate([column.ravel() for column in columns]) for columns in zip(*pairs, strict=True))
        unrolled = self
        if self.delay is not None:
            unrolled, row = self.unrolled(int(self.delay.max()) + 2)
            before, after = row[:, before].ravel(), row[:, after].ravel()
        lanes = lane_edges(np.arange(len(unrolled), dtype=np.int32), unrolled.first)
        return np.append(lanes[0], before), np.append(lanes[1], after)

    def timetable(self) -> str:
        """Return a timetable as text: a row for each device, a column for each slot, and `.` where a device is idle.

        Every action takes one slot; a whole backward takes two if others are split.

        >>> print(Actions.of([[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]]).timetable())
        0F0 .   .   0B0
        .   1F0 1B0 .
        """
        slots = np.where(self.kind == Action.B, 1 + self.splits, 1)
        start, end, _ = longest_paths(*self.dependencies(), slots, np.zeros_like(slots))
        table = [["."] * int(end.max()) for _ in range(self.devices)]
        for row, (device, begin, until) in enumerate(zip(self.device, start, end, strict=True)):
            table[device][begin:until] = [self.label(row)] * int(until - begin)
        width = max(len(cell) for cells in table for cell in cells)
        return "\n".join(" ".join(cell.ljust(width) for cell in cells).rstrip() for cells in table)

    def label(self, row: int) -> str:
        """Return an action as torch writes it: `0F1` is the forward of micro-batch 1 in stage 0."""
        return f"{self.stage[row]}{Action(int(self.kind[row])).name}{self.micro_batch[row]}"

    def location(self, row: int) -> str:
        """Return the device of an action and its index there, in words."""
        return f"device {self.device[row]}, action {self.index[row]}"


def check_actions(actions: Actions, subject: str = "actions", at: Callable[[int], str] | None = None) -> None:
    """Refuse actions that make no training step; name an action at fault, its location (`at` its row), and the remedy.

    In a step every micro-batch has a forward and a backward, whole or in two parts, of every stage, all of them on one
    device; and it comes to an end.
    """
    for problem in _action_problems(actions, at or actions.location):
        raise RequestError(subject, problem)


def _action_problems(actions: Actions, at: Callable[[int], str]) -> Iterator[str]:
    if not len(actions):
        yield "there are no actions; begin with 0F0"
        return
    yield from _bad_numbers(actions, at)
    order, first = actions._by_pass
    yield from _duplicates(actions, order, at)
    yield from _missing_passes(actions, order[first])
    yield from _incomplete_passes(actions, order, first, at)
    yield from _scattered_passes(actions, order, first, at)
    yield from _deadlock(actions)


def _bad_numbers(actions: Actions, at: Callable[[int], str]) -> Iterator[str]:
    """Yield unknown kinds, gaps in the numbers of stages and micro-batches, and devices with nothing to do."""
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


def _duplicates(actions: Actions, order: Ints, at: Callable[[int], str]) -> Iterator[str]:
    columns = (column[order] for column in (actions.micro_batch, actions.stage, actions.kind))
    for again in np.setdiff1d(np.arange(len(order)), group_starts(*columns), assume_unique=True).tolist():
        earlier, later = sorted(order[again - 1 : again + 1].tolist())
        yield f"{at(later)}: {actions.label(later)} is there already ({at(earlier)}); leave one out"


def _missing_passes(actions: Actions, rows: Ints) -> Iterator[str]:
    """Yield passes of a micro-batch through a stage that are missing; `rows` have one action of each pass, in order."""
    stages = int(actions.stage.max()) + 1
    number = actions.micro_batch[rows].astype(np.int64) * stages + actions.stage[rows]
    missing = np.flatnonzero(number != np.arange(len(number))).tolist() + [len(number)] * bool(len(number) % stages)
    for i, stage in (divmod(k, stages) for k in missing):
        yield f"micro-batch {i} does not pass stage {stage}; add {stage}F{i} and {stage}B{i}"


def _incomplete_passes(actions: Actions, order: Ints, first: Ints, at: Callable[[int], str]) -> Iterator[str]:
    """Yield passes that are neither a forward and a backward, nor a forward and the two parts of a backward."""
    done = np.bitwise_or.reduceat(1 << actions.kind[order], first)
    whole, parts = (sum(1 << Action[kind] for kind in kinds) for kinds in ("FB", "FIW"))
    for k in np.flatnonzero((done != whole) & (done != parts)).tolist():
        row = int(order[first[k]])
        stage, i = actions.stage[row], actions.micro_batch[row]
        kinds = [kind.name for kind in Action if done[k] >> kind & 1]
        split = [kind for kind in kinds if kind in "IW"]
        if split and "B" in kinds:
            part = int(order[first[k] + kinds.index(split[0])])
            yield f"{at(part)}: {actions.label(part)} is a part of {stage}B{i}, which is there too; leave one out"
        else:
            lacks = [f"{stage}{kind}{i}" for kind in ("FIW" if split else "FB") if kind not in kinds]
            yield f"{at(row)}: {actions.label(row)} lacks {' and '.join(lacks)}; add what is missing"


def _scattered_passes(actions: Actions, order: Ints, first: Ints, at: Callable[[int], str]) -> Iterator[str]:
    """Yield passes whose actions are on several devices."""
    forward = np.repeat(order[first], np.diff(first, append=len(order)))
    for k in np.flatnonzero(actions.device[order] != actions.device[forward]).tolist():
        row, other = int(order[k]), int(forward[k])
        problem = f"{actions.label(row)} is on another device than {actions.label(other)}"
        yield f"{at(row)}: {problem} ({at(other)}); move one of them"


def _deadlock(actions: Actions) -> Iterator[str]:
    """Yield a cycle of actions that wait for each other, if there is one."""
    before, after = actions.dependencies()
    if actions.delay is not None:
        actions, _ = actions.unrolled(int(actions.delay.max()) + 2)
    slots = np.ones(len(actions), dtype=np.int64)
    *_, reached = longest_paths(before, after, slots, np.zeros_like(slots))
    if reached < len(actions):
        rows = find_cycle(before, after, len(actions))
        # An action that only stands between two others in its device's list is left out.
        around = zip(rows[-1:] + rows[:-1], rows, rows[1:] + rows[:1], strict=True)
        between = {b for a, b, c in around if c - b == b - a == 1 and actions.device[a] == actions.device[c]}
        cycle = cycle_text([actions.label(row) for row in rows if row not in between])
        yield f"schedule deadlocks: {cycle}, each waiting for the one before it; put one of them elsewhere"


LARGEST_TABLE = 64 * 2**20  # about seven million actions
KINDS = [kind.name for kind in Action]
_KIND_OF_NAME = {kind.name: int(kind) for kind in Action}
_NAME_OF_KIND = {int(kind): kind.name for kind in Action}
_SINGLE = "[0-9]{1,9}[FBIW][0-9]{1,9}"  # stage, kind, micro-batch
_SEVERAL = f"{_SINGLE}(?:;{_SINGLE})+"
# Communication, which is derived here.
_DERIVED = "[0-9]+(?:UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*"
_CELL_PATTERN = re.compile(rf"(?:{_SINGLE}|\({_SEVERAL}\)OVERLAP_F_B|{_DERIVED})?")
_BETWEEN = "\0"  # no text file has it in a cell
_ROW = re.compile(f"{_CELL_PATTERN.pattern}(?:{_BETWEEN}{_CELL_PATTERN.pattern})*")
_ACTION = re.compile("(;?)([0-9]+)([FBIW])([0-9]+)")  # not the end of 0SEND_F1


def read_actions(path: str | Path, *, together: bool = True) -> Actions:
    """Return the actions of a CSV file, written by torch's `_dump_csv` or by hand, with or without communication.

    Row d is device d's; a cell is an action such as `0F1` (stage 0, forward, micro-batch 1), with B for a whole
    backward, I and W for its two parts, or several that overlap, `(0F1;1B0)OVERLAP_F_B`; empty cells mean nothing.
    Devices that are not `together` repeat their rows on their own; these may have a backward before its forward, of the
    step before.
    """
    rows = [[cell.strip() for cell in row] for row in read_csv(path, largest_bytes=LARGEST_TABLE)]
    while rows and not any(rows[-1]):
        rows.pop()
    return parse_actions(rows, str(path), together=together)


def parse_actions(rows: Sequence[Sequence[str]], subject: str, *, together: bool = True) -> Actions:
    """Return the actions of the cells of each device, as `read_actions` reads them; errors begin with `subject`."""
    found, first = array("i"), array("i", [0])
    for d, row in enumerate(rows):
        line = _BETWEEN.join(row)
        if not _ROW.fullmatch(line):
            c = next(c for c, cell in enumerate(row) if not _CELL_PATTERN.fullmatch(cell))
            problem = f"{row[c][:40]!r} is no action; write such as 0F1, 1B0 or (0F1;1B0)OVERLAP_F_B, or nothing"
            raise RequestError(subject, f"row {d}, cell {c}: {problem}")
        for joins, stage, kind, i in _ACTION.findall(line):
            found.extend((int(stage), _KIND_OF_NAME[kind], int(i), joins == ";"))
        first.append(len(found) // 4)
    stage, kind, micro_batch, beside = np.array(found, dtype=np.int32).reshape(-1, 4).T.copy()
    actions = Actions(np.array(first), kind, stage, micro_batch, beside > 0 if beside.any() else None)
    checked = actions if together or not len(actions) else actions.repeated()
    check_actions(
        checked, subject, lambda row: _cell_of_action(rows, int(actions.device[row]), int(actions.index[row]))
    )
    return actions


def _cell_of_action(rows: Sequence[Sequence[str]], device: int, action: int) -> str:
    cells = [c for c, cell in enumerate(rows[device]) for _ in _ACTION.findall(cell)]
    return f"row {device}, cell {cells[action]}"


def write_actions(actions: Actions, path: str | Path, force: bool = False) -> None:
    """Write a CSV file that `read_actions` reads, and torch's `_load_csv` if no stage is on several devices."""
    write_file(path, _csv_rows(actions), force=force)


def _csv_rows(actions: Actions) -> Iterator[str]:
    beside = np.zeros(len(actions), dtype=bool) if actions.beside is None else actions.beside
    columns = (beside, actions.stage, actions.kind, actions.micro_batch)
    for low, high in zip(actions.first[:-1].tolist(), actions.first[1:].tolist(), strict=True):
        rows = zip(*(column[low:high].tolist() for column in columns), strict=True)
        line = "".join([f"{';' if joins else ','}{stage}{_NAME_OF_KIND[kind]}{i}" for joins, stage, kind, i in rows])
        yield re.sub(_SEVERAL, r"(\g<0>)OVERLAP_F_B", line[1:]) + "\n"

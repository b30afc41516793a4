"""The fewest slots that any order of a training step takes, proven by OR-Tools CP-SAT; tests compare orders with it.

An order's placement of tasks is given, and how many activations each device may hold, each from the start of a forward
to the end of its backward (of its W). All else is open: when a task is done, and whether a device waits. Tasks take a
slot each, messages none; where an order splits some of its backwards, all may be split, and a W be done any time after
its I. Slots are counted from the first start of all to the last end, the makespan, or on each device from its own first
start to its own last end, the longest stay, by which the zero-bubble papers count.

Two restrictions lose nothing:

* Micro-batches with the same devices pass each stage in the order of their numbers, forwards, Is and Ws. Take any
  starts, and deal out those of each such set of tasks anew, in that order. Devices do and hold as much as before at any
  time; and where two sets can be paired such that one of each pair is before the other, the k-th is before the k-th.
* All ends within two of the longest stays. Every micro-batch passes all devices: of any two, one does its forward and
  later its backward, and between these the other does both. So any two stays overlap.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from cdpsim.schedules.actions import Actions
from tests.helpers.action_player import Named, in_flight, order_of, play

cp_model: Any = pytest.importorskip("ortools.sat.python.cp_model", reason="OR-Tools is a test extra")

Starts = dict[Named, int]


class Step(NamedTuple):
    """The tasks of a training step, their devices, and the memory of each device."""

    kinds: (
        str  # a pass's tasks: its forward, its backward (or that's first part), and the task that frees the activation
    )
    stages: int
    alike: dict[tuple[int, ...], list[int]]  # micro-batches, by the devices of their stages
    memory: Sequence[int]  # activations at most on each device

    def streams(self, device: int) -> list[tuple[int, list[int]]]:
        """Return each stage that a device has, and the micro-batches that pass it there."""
        return [(j, same) for where, same in self.alike.items() for j in range(self.stages) if where[j] == device]


def step_of(actions: Actions, memory: Sequence[int] | None = None) -> Step:
    """Return the training step of an order, with the order's own memory unless another is given."""
    order, alike = order_of(actions), defaultdict[tuple[int, ...], list[int]](list)
    device = {(i, j): d for d, row in enumerate(order) for _, j, i in row}
    m, stages = (1 + max(numbers) for numbers in zip(*device, strict=True))
    for i in range(m):
        alike[tuple(device[i, j] for j in range(stages))].append(i)
    assert all(set(where) == set(range(len(order))) for where in alike)
    return Step("FIW" if actions.splits else "FB", stages, alike, memory or [in_flight(row) for row in order])


def optimum(actions: Actions, memory: Sequence[int] | None = None, stay: bool = False) -> int:
    """Return the fewest slots if no device holds more activations than in that order, or than `memory`."""
    step, known = step_of(actions, memory), play(actions, {"F": 1, "B": 1 + actions.splits, "I": 1, "W": 1})
    slots = known.longest_stay if stay else known.whole
    while starts_within(slots - 1, step, stay):
        slots -= 1
    return slots


def starts_within(slots: int, step: Step, stay: bool = False) -> Starts | None:
    """Return starts of tasks that take no more than that many slots; None if there are none."""
    streams = [step.streams(device) for device in range(len(step.memory))]
    own = [[(kind, j, i) for kind in step.kinds for j, same in mine for i in same] for mine in streams]
    if slots < max(map(len, own)):
        return None
    model, horizon = cp_model.CpModel(), slots * (1 + stay)
    start = {task: model.new_int_var(0, horizon - 1, "") for tasks in own for task in tasks}
    for row in _rows(step):
        for before, after in pairwise(row):
            model.add(start[before] < start[after])
    for device, tasks in enumerate(own):
        model.add_all_different([start[task] for task in tasks])
        _hold(model, start, step, device, horizon)
        first = model.new_int_var(0, horizon, "")
        for task in tasks:
            model.add_linear_constraint(start[task] - first, 0, slots - 1)
    if stay:
        model.add_min_equality(0, [start["F", 0, same[0]] for same in step.alike.values()])
    solver = cp_model.CpSolver()
    # One worker is the same each time; the other two take time that such small models do not give back.
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = solver.parameters.cp_model_probing_level = 0
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    return {task: solver.value(when) for task, when in start.items()} if status == cp_model.OPTIMAL else None


def _rows(step: Step) -> list[list[Named]]:
    """Return rows of successive tasks: of a micro-batch, of a pass, and of micro-batches on the same devices."""
    rows: list[list[Named]] = []
    stages, back = range(step.stages), step.kinds[1]
    for same in step.alike.values():
        rows += [[("F", j, i) for j in stages] + [(back, j, i) for j in reversed(stages)] for i in same]
        rows += [[(kind, j, i) for kind in step.kinds] for j in stages for i in same]
        rows += [[(kind, j, i) for i in same] for kind in step.kinds for j in stages]
    return rows


def _hold(model: Any, start: dict[Named, Any], step: Step, device: int, most: int) -> None:
    """Limit what a device holds; with a single stream that says which task has to end before which starts."""
    streams, room, last = step.streams(device), step.memory[device], step.kinds[-1]
    for j, same in streams:
        for before, after in zip(same, same[room:], strict=False):
            model.add(start[last, j, before] < start["F", j, after])
    if len(streams) > 1:
        spans = [(start["F", j, i], start[last, j, i] + 1) for j, same in streams for i in same]
        held = [model.new_interval_var(begin, model.new_int_var(1, most, ""), end, "") for begin, end in spans]
        model.add_cumulative(held, [1] * len(held), room)

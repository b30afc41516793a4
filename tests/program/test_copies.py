"""Tasks as index arrays, held against walks over the tasks one by one."""

from collections import defaultdict

import pytest
from cdpsim.program.assembly.task_tables import DeviceLanes, Passes, Tables, check_counts

from cdpsim import SCHEDULES
from cdpsim.program import Kind
from cdpsim.schedules.placement import Shape
from tests.helpers.strategies import shapes


def tables(name: str) -> list[Tables]:
    """Two steps of all small shapes that a schedule allows, its devices doing a task at a time, or two or all."""
    schedule = SCHEDULES[name]
    found = []
    for shape in shapes(schedule, 4):
        widths = tuple(range(shape.n, 0, -1)) if schedule.placement.exclusive else ()
        sized = Shape(shape.n, shape.m, shape.chunks, shape.replicas, widths)
        passes = Passes(schedule, schedule.rule, sized, check_counts(None, sized, 2))
        found += [Tables(passes, DeviceLanes(passes, lanes)) for lanes in {1, 2, shape.m}]
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_copies_are_the_devices_that_run_a_stage(name: str) -> None:
    """Each with its first and its last task that gives a gradient, in the schedule's order, then by micro-batch."""
    for both in tables(name):
        passes = both.passes
        gives = defaultdict(list)
        kind = Kind.W if passes.splits else Kind.B
        for (t, i, j), task in zip(
            ((t, i, j) for t in range(2) for i in range(passes.shape.micro_batches) for j in range(passes.n)),
            passes.last.ravel(),
            strict=True,
        ):
            assert passes.kind[task] == kind
            gives[t, j, int(passes.device[t * passes.shape.micro_batches + i, j])].append(
                (int(passes.position[task]), i, int(task))
            )
        copies = both.copies
        assert [*zip(copies.step, copies.stage, copies.device, strict=True)] == sorted(gives)
        for row, held in enumerate(sorted(gives)):
            first, last = min(gives[held]), max(gives[held])
            assert (copies.first_task[row], copies.last_task[row], copies.last[row]) == (first[2], last[2], last[1])
            assert (copies.row == row).sum() == len(gives[held])

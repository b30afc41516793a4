"""Tasks as index arrays, held against walks over the tasks one by one."""

from collections import defaultdict

import pytest

from cdpsim import SCHEDULES
from cdpsim.assembly.grid import Grid
from cdpsim.program import Kind
from cdpsim.schedules.shape import Shape
from tests.strategies import shapes


def grids(name: str) -> list[Grid]:
    """Two steps of all small shapes that a schedule allows, its devices doing a task at a time, or two or all."""
    schedule = SCHEDULES[name]
    found = []
    for shape in shapes(schedule, 4):
        widths = tuple(range(shape.n, 0, -1)) if schedule.placement.exclusive else ()
        sized = Shape(shape.n, shape.m, shape.chunks, shape.replicas, widths)
        found += [Grid(schedule, schedule.rule, sized, 2, lanes) for lanes in {1, 2, shape.m}]
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_holders_are_the_devices_that_run_a_stage(name: str) -> None:
    """Each with its first and its last task that gives a gradient, in the schedule's order, then by micro-batch."""
    for grid in grids(name):
        gives = defaultdict(list)
        kind = Kind.W if grid.splits else Kind.B
        for (t, i, j), task in zip(
            ((t, i, j) for t in range(2) for i in range(grid.m) for j in range(grid.n)), grid.last.ravel(), strict=True
        ):
            assert grid.kind[task] == kind
            gives[t, j, int(grid.device[t, i, j])].append((int(grid.position[task]), i, int(task)))
        holders = grid.holders
        assert [*zip(holders.step, holders.stage, holders.device, strict=True)] == sorted(gives)
        for row, held in enumerate(sorted(gives)):
            first, last = min(gives[held]), max(gives[held])
            assert (holders.first_task[row], holders.last_task[row], holders.last[row]) == (first[2], last[2], last[1])
            assert (holders.row[held[0]].ravel() == row).sum() == len(gives[held])

"""Traps: tamper with one dependency, one cost or one placement, and times and Table 1 must show it.

A simulator that read slot numbers or closed forms anywhere would reproduce its own tables from any program.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cdpsim import simulate, table1
from cdpsim.cli import main
from cdpsim.numeric.columns import Ints
from cdpsim.program import Edges, Program
from cdpsim.runs import assembling
from cdpsim.schedules import SCHEDULES, Schedule
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.state import ALONG
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine import find_engine

Tamper = Callable[[pytest.MonkeyPatch], None]


def node_named(program: Program, name: str) -> int:
    """The node that describes itself so."""
    return next(node for node in range(program.nodes) if program.describe(node) == name)


def without_dependency(schedule: str, before: str, after: str) -> Tamper:
    """Assemble that schedule with one dependency missing."""

    def tamper(patch: pytest.MonkeyPatch) -> None:
        derive = vars(assembling)["derive"]

        def tampered(chosen: Schedule, *args: Any, **options: Any) -> Program:
            program: Program = derive(chosen, *args, **options)
            if chosen.name != schedule:
                return program
            edges = program.edges
            is_it = (edges.before == node_named(program, before)) & (edges.after == node_named(program, after))
            assert is_it.sum() == 1
            return replace(program, edges=Edges(edges.before[~is_it], edges.after[~is_it], edges.kind[~is_it]))

        patch.setattr(assembling, "derive", tampered)

    return tamper


def with_delay(schedule: str, task: str) -> Tamper:
    """Let one task of that schedule take one slot longer."""

    def tamper(patch: pytest.MonkeyPatch) -> None:
        node_costs = vars(assembling)["node_costs"]

        def tampered(program: Program, *args: Any) -> Costs:
            costs: Costs = node_costs(program, *args)
            if program.devices == devices_of(schedule):
                costs.duration[node_named(program, task)] += 1
            return costs

        patch.setattr(assembling, "node_costs", tampered)

    return tamper


def devices_of(schedule: str) -> int:
    """How many devices the untampered schedule has for four stages."""
    return SCHEDULES[schedule].placement.devices(Shape(4, 4, widths=(4, 3, 2, 1)))


def with_task_moved(schedule: str, i: int, j: int, t: int, to: int) -> Tamper:
    """Place one stage of one micro-batch of one step on another device, to which its state goes along."""

    def tamper(patch: pytest.MonkeyPatch) -> None:
        original = SCHEDULES[schedule]
        place = original.placement.device

        def moved(i_: Ints, j_: Ints, t_: Ints, shape: Shape) -> Ints:
            device = place(i_, j_, t_, shape)
            return np.where((i_ == i) & (j_ == j) & (t_ == t), to, device)

        tampered = replace(original, placement=replace(original.placement, device=moved), state=ALONG)
        patch.setitem(SCHEDULES, schedule, tampered)

    return tamper


TRAPS = [
    # A dependency that keeps an update, and with it the state's next move, from happening at once.
    ("zero-cdp", without_dependency("zero-cdp", "B(t=1,i=3,j=0)", "U(t=1,j=0) on device 3"), {"parameters"}),
    ("single-cdp", with_delay("single-cdp", "B(t=1,i=0,j=3)"), {"activations", "parameters"}),
    ("mp-cdp", with_task_moved("mp-cdp", i=1, j=1, t=1, to=0), {"activations", "parameters"}),
    ("multi-cdp", with_task_moved("multi-cdp", i=2, j=0, t=0, to=1), {"gradient_volume", "boundary_volume"}),
    ("pp-cdp", with_task_moved("pp-cdp", i=0, j=2, t=1, to=3), {"parameters"}),
]


@pytest.mark.parametrize(("schedule", "tamper", "expected"), TRAPS)
def test_tampering_shows_in_times_and_in_the_table(
    schedule: str, tamper: Tamper, expected: set[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Times change, the named cells change, and the command says no."""
    honest = simulate(schedule, 4)
    cells = {row["schedule"]: row for row in table1(4)}[schedule]
    assert cells["agree"]
    tamper(monkeypatch)
    tampered = simulate(schedule, 4)
    assert not np.array_equal(honest.tasks["start"], tampered.tasks["start"])
    row = {row["schedule"]: row for row in table1(4)}[schedule]
    changed = {q for q in row if isinstance(row[q], dict) and row[q]["simulated"] != cells[q]["simulated"]}
    assert expected & changed
    assert not row["agree"]
    assert main(["table1", "-n", "4"]) == 1
    assert schedule in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["multi-cdp", "mp-cdp", "pp-cdp", "zero-cdp", "single-cdp"])
def test_without_its_releases_a_cyclic_schedule_is_another(schedule: str) -> None:
    """The one time that a schedule states is what staggers it."""
    run = simulate(schedule, 4)
    at_once = replace(run.costs, release=0 * run.costs.release)
    start, _ = find_engine("fast")(run.program, at_once)
    assert not np.array_equal(start, run.start)

"""A replay against its equation and its program, of any case."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cdpsim.program import Op, Program
from tests.validation.known import known
from validation.comparison import memory
from validation.comparison.lifetimes import compare_lives
from validation.comparison.needs import compare_needs
from validation.replay.case import Case, Outcome, expected_parameters, largest_difference, play_in_process, prepare


def rounding_of(program: Program) -> float:
    """Point to point additions have an order; torch chooses its own inside collectives."""
    return 1e-12 if (program.messages.op != Op.P2P).any() else 0


def check_replay(
    case: Case, run: Callable[[Case], list[Outcome]] = lambda case: play_in_process(prepare(case))
) -> None:
    """Parameters as the equation has them, the program's calls, and every device, slot and category to the byte."""
    case = replace(known(case), watch="storages")
    prepared, outcomes = prepare(case), run(case)
    plan = prepared.plan
    assert largest_difference(outcomes, expected_parameters(prepared)) <= rounding_of(plan.program), case
    assert [outcome.calls for outcome in outcomes] == [plan.calls(d) for d in range(plan.program.devices)]
    held = memory.measured_memory(plan, [outcome.readings for outcome in outcomes])
    assert np.array_equal(memory.simulated_memory(plan), held), case


def check_to_the_bit(case: Case) -> None:
    """The equation's very parameters in one process, and memory; lifetimes and messages as tasks need them."""
    prepared = prepare(case)
    assert largest_difference(play_in_process(prepared), expected_parameters(prepared)) == 0
    assert not compare_lives(prepared.plan)
    assert not compare_needs(prepared.plan, prepared.training, case.optimizer)
    check_replay(case)

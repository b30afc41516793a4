"""Seconds in whole quanta: their sums are exact, so that times which are equal come out as equal.

Sums of floats depend on their order: of two messages that end together one would end first, and a device would hold
more or less. A quantum is a power of two, about what the floats at the end of a run cannot tell apart; all times of the
run are whole numbers of quanta, which floats add up exactly.
"""

from dataclasses import replace
from math import frexp, ldexp

import numpy as np

from cdpsim.numeric.columns import Times
from cdpsim.program import Program
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine import EngineFunction, run_by_longest_paths

_FLOAT_DIGITS = 53  # of a float
_OF_LANE, _OF_RUN = 1.1, 1.01  # a run may take so many times as long as its busiest lane, beside filling; or as it took
_OF_LANE_TO_COMPARE, _OF_RUN_TO_COMPARE = 3, 2  # and runs that are compared, of unlike lengths


def in_quanta(program: Program, costs: Costs) -> Costs:
    """Return costs in whole quanta: of the size that they ask for, or for a run as long as its lanes let expect.

    Slots are whole numbers already. What shares a link, or is stopped, ends at times of its own making.
    """
    if costs.duration.dtype.kind == "i":
        return costs
    # Stages begin one after another, which takes at most as long again; one replica stands for as many as it folds.
    filling = min(2.0, 1 + (program.n - 1) / (int(program.counts.max()) * program.fold))
    quantum = costs.quantum or find_quantum(_OF_LANE * filling * _busiest(program, costs))
    duration, parts = _round(costs.duration, quantum), program.message_nodes.stop
    if parts < program.nodes:
        duration[parts:] = program.parts.times(duration[program.message_nodes])
    return replace(costs, duration=duration, release=_round(costs.release, quantum), quantum=quantum)


def play_exactly(play: EngineFunction, program: Program, costs: Costs) -> tuple[Costs, Times, Times]:
    """Return costs in whole quanta, and the times by them of all nodes; in larger quanta if the run is a long one.

    With contention quanta are those of the same run without. Where a device stops, times are not sums of costs alone.
    """
    made = in_quanta(program, costs)
    if costs.calendar is not None:
        return made, *play(program, made)
    first = play if costs.wires is None else run_by_longest_paths
    start, end = first(program, made)
    if not are_exact(made, end):
        margin = _OF_RUN_TO_COMPARE if costs.quantum else _OF_RUN
        made = in_quanta(program, replace(costs, quantum=find_quantum(margin * float(end.max()))))
        start, end = first(program, made)
    return made, *((start, end) if first is play else play(program, made))


def find_quantum(longest: float) -> float:
    """Return the least quantum of which sums up to so many seconds are exact.

    >>> find_quantum(1.0) == 2.0**-52
    True
    """
    return ldexp(1.0, max(frexp(longest)[1] - _FLOAT_DIGITS, -1022))


def quantum_to_compare(program: Program, costs: Costs, steps: int) -> float:
    """Return a quantum for a run, of so many steps, and for others that take about as long as it; 0 for slots."""
    longer = _OF_LANE_TO_COMPARE * steps / program.steps
    return 0.0 if costs.duration.dtype.kind == "i" else find_quantum(longer * _busiest(program, costs))


def are_exact(costs: Costs, end: Times) -> bool:
    """Return whether all times of a run in quanta are sums without rounding; so are slots."""
    return not costs.quantum or float(end.max(initial=0)) <= ldexp(costs.quantum, _FLOAT_DIGITS)


def _busiest(program: Program, costs: Costs) -> float:
    """Return the time of all tasks of the lane that has most to do."""
    return float(np.bincount(program.lane_numbers, costs.duration[program.lane_tasks]).max(initial=0))


def _round(seconds: Times, quantum: float) -> Times:
    """Return times in whole quanta: what takes time takes one at least."""
    quanta = seconds / quantum
    np.rint(quanta, out=quanta)
    np.maximum(quanta, seconds > 0, out=quanta)
    quanta *= quantum
    return quanta

"""How long a run takes, how often it repeats, and how idle its devices are."""

import numpy as np

from cdpsim.costs import Times
from cdpsim.program import Kind, Program
from cdpsim.stops import Calendar


def makespan(program: Program, end: Times) -> float:
    """When the last task ends; messages that nobody waits for do not exist."""
    value: float = end.max(initial=0).item()
    return value


def period(program: Program, end: Times) -> float | None:
    """How long a training step takes once all is under way; None for a single step.

    From one end of the first micro-batch's pass to the next, on average over the last half of the run: when it ends,
    the others of its step are still under way, so that no device has run dry yet as it does at the end of the run.
    """
    if program.steps < 2:
        return None
    ends = end[: program.compute].reshape(program.steps, program.m, -1)[:, 0].max(axis=1)
    steps = program.steps // 2
    whole: float = (ends[-1] - ends[-1 - steps]).item()
    return whole // steps if isinstance(whole, int) and whole % steps == 0 else whole / steps


def at_rest(program: Program, start: Times, end: Times) -> tuple[float, float]:
    """Some whole training steps, half of all, until the last one begins, when all devices are still at work."""
    if program.steps < 2:
        return 0, makespan(program, end)
    begins = start[program.of_kind(Kind.F)[:: program.m, 0]]
    return begins[-1 - program.steps // 2].item(), begins[-1].item()


def bubble(program: Program, start: Times, end: Times, calendar: Calendar | None = None) -> float:
    """The share of the lanes' time, from the start of the run to its end, in which they do nothing.

    By a `calendar`, devices do nothing in the midst of tasks, too.
    """
    in_lanes = len(program.lane_tasks)  # compute tasks, and updates if they take lanes
    busy: float = (end[:in_lanes] - start[:in_lanes]).sum().item()
    if calendar is not None:
        begin, until = calendar.pauses(np.arange(in_lanes), start[:in_lanes], end[:in_lanes])
        busy -= (until - begin).sum().item()
    lanes = len(program.lane_start) - 1
    return 1 - busy / (lanes * makespan(program, end))

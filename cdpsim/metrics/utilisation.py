"""How long a run takes, how often it repeats, and how idle its devices are."""

from cdpsim.costs import Times
from cdpsim.program import Program


def makespan(program: Program, end: Times) -> float:
    """When the last task ends; messages that nobody waits for do not exist."""
    value: float = end.max(initial=0).item()
    return value


def period(program: Program, end: Times) -> float | None:
    """The time from the end of the last but one training step to the end of the last; None for a single step."""
    if program.steps < 2:
        return None
    ends = end[: len(program.lane_tasks)].reshape(program.steps, -1).max(axis=1)
    value: float = (ends[-1] - ends[-2]).item()
    return value


def bubble(program: Program, start: Times, end: Times) -> float:
    """The share of the lanes' time, from the start of the run to its end, in which they do nothing."""
    compute = len(program.lane_tasks)
    busy: float = (end[:compute] - start[:compute]).sum().item()
    lanes = len(program.lane_start) - 1
    return 1 - busy / (lanes * makespan(program, end))

"""How long a run takes, and how idle its devices are."""

from typing import Any

import numpy as np

from cdpsim.numeric.columns import Times
from cdpsim.numeric.stops import Calendar
from cdpsim.program import Program


def makespan(program: Program, end: Times) -> float:
    """When the last task ends; messages that nobody waits for do not exist."""
    value: float = end.max(initial=0).item()
    return value


def idle_share(
    program: Program, start: Times, end: Times, calendar: Calendar | None = None, low: Any = 0, high: Any = None
) -> float:
    """The share of the lanes' time, from `low` to `high` or all of the run, in which they do nothing.

    By a `calendar`, devices do nothing in the midst of tasks, too.
    """
    high = makespan(program, end) if high is None else high
    in_lanes = len(program.lane_tasks)  # compute tasks, and updates if they take lanes
    begin, until = start[:in_lanes], end[:in_lanes]
    busy = _within(begin, until, low, high)
    if calendar is not None:
        busy -= _within(*calendar.pauses(np.arange(in_lanes), begin, until), low, high)
    lanes = len(program.lane_start) - 1
    share: float = 1 - busy / (lanes * (high - low))
    return max(share, 0.0)  # which a rounding may miss


def _within(begin: Times, until: Times, low: Any, high: Any) -> Any:
    """How much of some times lies between two moments."""
    return np.maximum(np.minimum(until, high) - np.maximum(begin, low), 0).sum().item()

"""The length of a run, and the share of it in which lanes are idle."""

from typing import Any

import numpy as np

from cdpsim.numeric.calendars import Calendar
from cdpsim.numeric.columns import Times
from cdpsim.program import Program


def makespan(program: Program, end: Times) -> float:
    """Return the time at which the last node ends; some task waits for each message, so a task or an update is last."""
    value: float = end.max(initial=0).item()
    return value


def idle_share(
    program: Program, start: Times, end: Times, calendar: Calendar | None = None, low: Any = 0, high: Any = None
) -> float:
    """Return the share of the lanes' time, from `low` to `high` or all of the run, in which they do nothing.

    The stops of a `calendar` are idle time too, also in the middle of a task.
    """
    high = makespan(program, end) if high is None else high
    in_lanes = len(program.lane_tasks)  # compute tasks, and updates if they take lanes
    begin, until = start[:in_lanes], end[:in_lanes]
    busy = _overlap(begin, until, low, high)
    if calendar is not None:
        busy -= _overlap(*calendar.pauses(np.arange(in_lanes), begin, until), low, high)
    lanes = len(program.lane_start) - 1
    share: float = 1 - busy / (lanes * (high - low))
    return max(share, 0.0)  # rounding may make it negative


def _overlap(begin: Times, until: Times, low: Any, high: Any) -> Any:
    """Return the total length of those parts of some intervals that lie between two times."""
    return np.maximum(np.minimum(until, high) - np.maximum(begin, low), 0).sum().item()

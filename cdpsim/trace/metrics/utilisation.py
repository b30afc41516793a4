"""The length of a run, and the share of it in which lanes are idle."""

from itertools import pairwise
from typing import Any

import numpy as np

from cdpsim.numeric.columns import Ints, Times, group_starts
from cdpsim.numeric.disturbances import Calendar
from cdpsim.program import Program


def makespan(program: Program, end: Times) -> float:
    """Return the time at which the last task or update ends; only what ends a run of rounds may be brought later."""
    value: float = end[: len(program.tasks)].max(initial=0).item()
    return value


def idle_share(
    program: Program, start: Times, end: Times, calendar: Calendar | None = None, low: Any = 0, high: Any = None
) -> float:
    """Return the share of the lanes' time, from `low` to `high` or all of the run, in which they do nothing.

    The stops of a `calendar` are idle time too, also in the middle of a task.
    """
    high = makespan(program, end) if high is None else high
    busy = busy_time(program, start, end, calendar, low, high)
    lanes = (len(program.lane_start) - 1) * program.fold
    share: float = 1 - busy / (lanes * (high - low))
    return max(share, 0.0)  # rounding may make it negative


def busy_time(program: Program, start: Times, end: Times, calendar: Calendar | None, low: Any, high: Any) -> Any:
    """Return for how long the lanes of all replicas are busy between two times, all together."""
    in_lanes = len(program.lane_tasks)  # compute tasks, and updates if they take lanes
    begin, until = start[:in_lanes], end[:in_lanes]
    busy = _overlap(begin, until, low, high)
    if program.fold > 1:
        busy = busy[_rows_of_all(program, in_lanes)]
    busy = busy.sum().item()
    if calendar is not None:
        busy -= _overlap(*calendar.pauses(np.arange(in_lanes), begin, until), low, high).sum().item()
    return busy


def _overlap(begin: Times, until: Times, low: Any, high: Any) -> Any:
    """Return the lengths of those parts of some intervals that lie between two times."""
    return np.maximum(np.minimum(until, high) - np.maximum(begin, low), 0)


def _rows_of_all(program: Program, in_lanes: int) -> Ints:
    """Return the task that stands for each one of all replicas, in the order in which a program of all has them.

    So a sum over all is the same, to the last bit.
    """
    tasks, first = program.tasks, program.first_pass * program.phases
    update = np.arange(program.compute, in_lanes)
    groups = program.compute + group_starts(tasks.step[update], tasks.stage[update])
    ends = [*first.tolist(), *groups[1:].tolist(), *[in_lanes] * bool(len(groups))]
    return np.concatenate([np.tile(np.arange(low, high), program.fold) for low, high in pairwise(ends)])

"""Why lanes stand idle: a message is on its way, something elsewhere still has to end, or there is nothing to do."""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from cdpsim.columns import Ints
from cdpsim.costs import Times
from cdpsim.program import Kind, Program

Flags = npt.NDArray[np.bool_]


class Reason(IntEnum):
    """What an idle lane waits for: what it needs is on its way, is not yet made, or is there and not yet due."""

    MESSAGE = 0
    DEPENDENCY = 1
    NOTHING = 2


def idle(program: Program, start: Times, end: Times) -> dict[str, np.ndarray]:
    """When each lane does nothing, and why: lane, device, begin, end, reason, sorted by lane and time.

    Looking back from the task that a gap comes before: from its release back to the end of what it waited for last
    there is nothing to do; while that was on its way, in one message or in several that passed it on, the lane waits
    for a message; before, for the task or update that it comes from. After its last task a lane has nothing to do.
    An update on the waiting device takes no time, so what counts is what the update itself waited for.
    """
    task, lane, begin = _gaps(program, start, end)
    made, there = _path(program, end, task)
    lanes = len(program.lane_start) - 1
    ends = end[program.lane_tasks[program.lane_start[1:] - 1]]
    lane, begin = np.append(lane, np.arange(lanes)), np.append(begin, ends)
    until = np.append(start[task], np.full(lanes, end.max(initial=0), dtype=end.dtype))
    bounds = np.stack([begin, np.append(made, ends), np.append(there, ends), until], axis=1)
    bounds = np.clip(bounds, begin[:, None], until[:, None])[np.lexsort((begin, lane))]
    low, high = bounds[:, :-1].ravel(), bounds[:, 1:].ravel()
    some = np.flatnonzero(low < high)
    lane = np.sort(lane)[some // 3]
    return {
        "lane": lane,
        "device": program.tasks.device[program.lane_tasks[program.lane_start[lane]]],
        "begin": low[some],
        "end": high[some],
        "reason": np.array([Reason.DEPENDENCY, Reason.MESSAGE, Reason.NOTHING], dtype=np.int8)[some % 3],
    }


def waits_for(program: Program, start: Times, end: Times) -> Ints:
    """For each compute task, the task, message or update elsewhere that it waited for last while its lane was idle.

    -1 where its lane was not idle before it, or not for lack of anything.
    """
    critical = _critical(program, end)
    task, _, begin = _gaps(program, start, end)
    node = critical[task]
    own = np.flatnonzero(_own_update(program, node, task))
    while len(own):
        node[own] = critical[node[own]]
        own = own[_own_update(program, node[own], task[own])]
    result = np.full(len(program.lane_tasks), -1, dtype=np.int64)
    result[task] = np.where(end[node] > begin, node, -1)
    return result


def _gaps(program: Program, start: Times, end: Times) -> tuple[Ints, Ints, Times]:
    """The tasks with a gap before them, their lanes, and since when those were idle."""
    task, first = program.lane_tasks, program.lane_start
    begin = np.roll(end[task], 1)
    begin[first[:-1]] = 0
    some = np.flatnonzero(begin < start[task])
    return task[some], np.searchsorted(first, some, side="right") - 1, begin[some]


def _critical(program: Program, end: Times) -> Ints:
    """Of what each node depends on, what ended last; of several a message rather than a task. -1: on nothing."""
    before, after = program.edges.before, program.edges.after
    latest = np.zeros(program.nodes, dtype=end.dtype)
    ended = end[before]
    np.maximum.at(latest, after, ended)
    last = np.flatnonzero(ended == latest[after])
    critical = np.full(program.nodes, -1, dtype=before.dtype)
    np.maximum.at(critical, after[last], before[last])
    return critical


def _path(program: Program, end: Times, task: Ints) -> tuple[Times, Times]:
    """When what each task waited for last had been made, and when it was there."""
    critical = _critical(program, end)
    node = critical[task]
    there = np.where(node >= 0, end[node], 0)
    passing = np.arange(len(task))
    while len(passing := passing[_passes(program, node[passing], task[passing])]):
        node[passing] = critical[node[passing]]
    return np.where(node >= 0, end[node], 0).astype(end.dtype), there.astype(end.dtype)


def _passes(program: Program, node: Ints, task: Ints) -> Flags:
    """Whether what was waited for only passes on what something else made: a message, or the device's own update."""
    passes: Flags = (node >= len(program.tasks)) | _own_update(program, node, task)
    return passes


def _own_update(program: Program, node: Ints, task: Ints) -> Flags:
    """Whether a node is an update on the device of a task."""
    tasks = program.tasks
    place = np.minimum(node, len(tasks) - 1)
    own: Flags = (node >= 0) & (node < len(tasks)) & (tasks.kind[place] == Kind.U)
    own &= tasks.device[place] == tasks.device[task]
    return own

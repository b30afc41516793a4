"""Reasons for idle lanes: a message is on its way or held up, something else has to end, or there is nothing to do."""

from collections.abc import Collection, Iterator
from enum import IntEnum
from math import fsum

import numpy as np

from cdpsim.numeric.columns import Flags, Ints, Times, dense_ranks, group_starts, sort_by
from cdpsim.program import EdgeKind, Program
from cdpsim.trace.metrics.utilisation import makespan


class IdleReason(IntEnum):
    """A reason for idle time: an input is on its way, stands in a stream, is not yet made, or is not yet due."""

    MESSAGE = 0
    STREAM = 1
    DEPENDENCY = 2
    NOTHING = 3


def idle_spans(program: Program, start: Times, end: Times) -> dict[str, np.ndarray]:
    """Return when each lane is idle, and why: columns lane, device, begin, end, reason, sorted by lane and time.

    Consider the task after a gap, and look back from it. From its release back to the end of what it waited for last
    there is nothing to do. While that was on its way, in one message or in several that passed it on, the lane waits
    for a message; before, for the task or update that it comes from. Where one of these messages could have gone
    earlier, or the task could have begun, but for others that its device's stream had before it, the lane waits for a
    stream. After its last task a lane has nothing to do. An update on the waiting device, or of a share of parameters,
    is a dependency for as long as it takes; the time before counts by what the update itself waited for. A wait for the
    other members of a collective is for messages as far as messages have let these members go on later than this device
    before.
    """
    lane, gap, low, high, reason = _parts_of_gaps(program, start, end)
    order = sort_by(lane[gap], dense_ranks(low))
    gap, low, high, reason = (column[order] for column in (gap, low, high, reason))
    first = group_starts(gap, reason)  # several messages, one after another, count as one
    return {
        "lane": lane[gap[first]],
        "device": program.tasks.device[program.lane_tasks[program.lane_start[lane[gap[first]]]]],
        "begin": low[first],
        "end": high[np.append(first[1:], len(gap)) - 1] if len(gap) else high,
        "reason": reason[first],
    }


def waiting_time(program: Program, start: Times, end: Times, low: float, high: float) -> float:
    """Return how long all lanes together wait for messages and streams between two times, rounded once."""
    _, _, begin, until, _ = _parts_of_gaps(program, start, end, (IdleReason.MESSAGE, IdleReason.STREAM))
    length = np.minimum(until, high) - np.maximum(begin, low)
    return fsum(length[length > 0].tolist() * program.fold)


def _parts_of_gaps(
    program: Program, start: Times, end: Times, reasons: Collection[IdleReason] = tuple(IdleReason)
) -> tuple[Ints, Ints, Times, Times, Ints]:
    """Return the lane of each gap; and the parts of gaps for some reasons, in any order: gap, begin, end, reason."""
    task, lane, begin = _gaps_before_tasks(program, start, end)
    lanes = np.arange(len(program.lane_start) - 1)
    ends = end[program.lane_tasks[program.lane_start[1:] - 1]]
    lane, begin = np.append(lane, lanes), np.append(begin, ends)
    until = np.append(start[task], np.full(len(lanes), makespan(program, end), dtype=end.dtype))
    behind = len(task) + lanes  # the gaps behind lanes' last tasks
    spans = []
    for gap, low, high, reason in (
        *_trace_back(program, start, end, task),
        (behind, ends, until[behind], IdleReason.NOTHING),
    ):
        if reason in reasons:
            low, high = np.maximum(low, begin[gap]), np.minimum(high, until[gap])
            rows = np.flatnonzero(low < high)
            spans.append((gap[rows], low[rows], high[rows], np.full(len(rows), reason, dtype=np.int8)))
    gap, low, high, reasons_of = (np.concatenate(column) for column in zip(*spans, strict=True))
    return lane, gap, low, high, reasons_of


def waits_for(program: Program, start: Times, end: Times) -> Ints:
    """Return the task, message or update elsewhere that each compute task waited for last while its lane was idle.

    It is -1 where its lane was not idle before it, or not for lack of anything.
    """
    critical, lasts = _critical(program, end), end > start
    task, _, begin = _gaps_before_tasks(program, start, end)
    node = critical[task]
    rows = np.arange(len(node))
    while len(rows := rows[_is_local_update(program, node[rows], task[rows]) & ~lasts[node[rows]]]):
        node[rows] = critical[node[rows]]
    result = np.full(len(program.lane_tasks), -1, dtype=np.int64)
    # A message stands in place of a device's part in it.
    named = np.concatenate([np.arange(program.message_nodes.stop), program.first_messages, [-1]])
    result[task] = np.where(end[node] > begin, named[node], -1)
    return result


def critical_path(program: Program, end: Times) -> Ints:
    """Return the nodes on the way to the last end, in their order: before each, what it waited for that ended last."""
    latest = last_waits(program, end)
    path = [int(end.argmax())]
    while (before := int(latest[path[-1]])) >= 0:
        path.append(before)
    return np.array(path[::-1])


def last_waits(program: Program, end: Times) -> Ints:
    """Return, for each node, the node that ended last of all that it waited for, -1 if it waited for none."""
    return _latest(*program.waits(), program.nodes, end)


def _gaps_before_tasks(program: Program, start: Times, end: Times) -> tuple[Ints, Ints, Times]:
    """Return the tasks with a gap before them, their lanes, and since when those were idle."""
    task, first = program.lane_tasks, program.lane_start
    begin = np.roll(end[task], 1)
    begin[first[:-1]] = 0
    place = np.flatnonzero(begin < start[task])
    return task[place], np.searchsorted(first, place, side="right") - 1, begin[place]


def _critical(program: Program, end: Times, among: Flags | None = None) -> Ints:
    """Return, for each node, the node that it depends on which ended last; of several a message rather than a task.

    It is -1 where the node depends on nothing. `among` flags the dependencies that count, if not all.
    """
    rows = slice(None) if among is None or among.all() else np.flatnonzero(among)
    return _latest(program.edges.before[rows], program.edges.after[rows], program.nodes, end)


def _latest(before: Ints, after: Ints, nodes: int, end: Times) -> Ints:
    """Return, for each node, the one before it that ended last, the highest of several; -1 where there is none."""
    found = np.full(nodes, -1, dtype=before.dtype)
    latest = np.zeros(nodes, dtype=end.dtype)
    ended = end[before]
    np.maximum.at(latest, after, ended)
    last = np.flatnonzero(ended == latest[after])
    np.maximum.at(found, after[last], before[last])
    return found


def _trace_back(
    program: Program, start: Times, end: Times, task: Ints
) -> Iterator[tuple[Ints, Times, Times, IdleReason]]:
    """Follow what tasks waited for, back from their starts; yield rows of `task`, since when, until when, and why."""

    def ended(node: Ints) -> Times:
        times: Times = np.where(node >= 0, end[node], 0).astype(end.dtype)
        return times

    in_stream = program.edges.kind == EdgeKind.STREAM
    critical = _critical(program, end, ~in_stream)
    node, rows = critical[task], np.arange(len(task))
    message = np.full(len(task), -1, dtype=node.dtype)  # the first of those that one after another led to the task
    there = ended(node)
    free = ended(_critical(program, end, in_stream)[task]) if in_stream.any() else there
    yield rows, np.maximum(there, free), start[task], IdleReason.NOTHING
    yield rows, there, free, IdleReason.STREAM
    count = len(program.tasks)
    while len(rows := rows[(node[rows] >= count) | _is_local_update(program, node[rows], task[rows])]):
        through, before = node[rows], critical[node[rows]]
        update = through < count
        for chosen, running, due in (
            (~update, IdleReason.MESSAGE, IdleReason.STREAM),
            (update, IdleReason.DEPENDENCY, IdleReason.DEPENDENCY),
        ):
            yield rows[chosen], start[through[chosen]], end[through[chosen]], running
            yield rows[chosen], ended(before[chosen]), start[through[chosen]], due
        node[rows] = before
        message[rows[~update]] = through[~update]
    made = ended(node)
    late = made - _messages_delay(program, start, end, task, message, node)
    yield np.arange(len(task)), np.zeros_like(made), late, IdleReason.DEPENDENCY
    rows = np.flatnonzero(late < made)
    yield rows, late[rows], made[rows], IdleReason.MESSAGE


def _messages_delay(program: Program, start: Times, end: Times, task: Ints, message: Ints, node: Ints) -> Times:
    """Return how much later messages have let the other members of a collective go on than the lane of each task.

    `message` begins the collective, which waits for a task of the lane's device, too; of all that it waits for, `node`
    ends last.
    """
    delay = np.zeros(len(task), dtype=end.dtype)
    rows = np.flatnonzero((message >= 0) & (node >= 0) & (node < program.compute))
    rows = rows[_waits_for_device(program, message[rows], program.tasks.device[task[rows]])]
    if len(rows):
        released = np.append(_released_by_message(program, start, end), 0)  # of no task
        previous = np.full(len(program.tasks), -1)
        before, after = program.lane_edges
        previous[after] = before
        here = released[previous[task[rows]]]
        delay[rows] = np.where(here > 0, np.maximum(released[node[rows]] - here, 0), 0)
    return delay


def _waits_for_device(program: Program, message: Ints, device: Ints) -> Flags:
    """Return whether each message waits for a task of its device: a collective waits for one of each member."""
    edges, chosen = program.edges, np.zeros(program.nodes, dtype=bool)
    chosen[message] = True
    rows = np.flatnonzero(chosen[edges.after] & (edges.before < program.compute))
    rows = rows[(edges.kind[rows] == EdgeKind.DATA) | (edges.kind[rows] == EdgeKind.BARRIER)]
    after, members = edges.after[rows], program.tasks.device[edges.before[rows]]
    one = np.full(program.nodes, -1, dtype=members.dtype)
    one[after] = members
    waits: Flags = one[message] == device
    several = np.flatnonzero(np.bincount(after, minlength=program.nodes)[message] > 1)
    if len(several):
        known = after.astype(np.int64) * program.devices + members
        waits[several] = np.isin(message[several].astype(np.int64) * program.devices + device[several], known)
    return waits


def _released_by_message(program: Program, start: Times, end: Times) -> Times:
    """Return when the lane of each task last went on because a message came; 0 if it has waited otherwise since."""
    critical = _critical(program, end)
    tasks, first = program.lane_tasks, program.lane_start[:-1]
    gap, _, begin = _gaps_before_tasks(program, start, end)
    node = critical[gap]
    local = np.flatnonzero(_is_local_update(program, node, gap))
    node[local] = critical[node[local]]
    time = np.zeros(len(program.tasks), dtype=end.dtype)
    came = (node >= len(program.tasks)) & (end[node] > np.maximum(start[node], begin))
    time[gap[came]] = start[gap[came]]
    breaks = np.zeros(len(program.tasks), dtype=bool)
    breaks[gap], breaks[tasks[first]] = True, True
    last = np.maximum.accumulate(np.where(breaks[tasks], np.arange(len(tasks)), 0))
    released = np.empty_like(time)
    released[tasks] = time[tasks[last]]
    return released


def _is_local_update(program: Program, node: Ints, task: Ints) -> Flags:
    """Return whether each node is an update on the device of its task, or of other shares of what that has a share."""
    tasks, update = program.tasks, (node >= program.compute) & (node < len(program.tasks))
    if program.state.splits:
        return update
    local: Flags = update & (tasks.device[np.where(update, node, 0)] == tasks.device[task])
    return local

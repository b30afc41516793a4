"""Why lanes stand idle: a message is on its way or held up, something else has to end, or there is nothing to do."""

from collections.abc import Iterator
from enum import IntEnum

import numpy as np

from cdpsim.numeric.columns import Flags, Ints, Times, dense_ranks, group_starts, sort_by
from cdpsim.program import EdgeKind, Kind, Program


class Reason(IntEnum):
    """What an idle lane waits for: what it needs is on its way, stands in a stream, is not yet made, or not yet due."""

    MESSAGE = 0
    STREAM = 1
    DEPENDENCY = 2
    NOTHING = 3


def idle(program: Program, start: Times, end: Times) -> dict[str, np.ndarray]:
    """When each lane does nothing, and why: lane, device, begin, end, reason, sorted by lane and time.

    Looking back from the task that a gap comes before: from its release back to the end of what it waited for last
    there is nothing to do; while that was on its way, in one message or in several that passed it on, the lane waits
    for a message; before, for the task or update that it comes from. Where one of these messages could have gone
    earlier, or the task could have begun, but for others that its device's stream had before it, the lane waits for a
    stream. After its last task a lane has nothing to do. An update on the waiting device is a dependency for as long
    as it takes; before, what counts is what the update itself waited for. Of a wait for the other members of a
    collective, as much is for messages as messages have let these members go on later than this device before.
    """
    lane, gap, low, high, reason = _parts(program, start, end)
    order = sort_by(lane[gap], dense_ranks(low))
    gap, low, high, reason = (column[order] for column in (gap, low, high, reason))
    first = group_starts(gap, reason)  # what one message after another brings is waited for as if it were one
    return {
        "lane": lane[gap[first]],
        "device": program.tasks.device[program.lane_tasks[program.lane_start[lane[gap[first]]]]],
        "begin": low[first],
        "end": high[np.append(first[1:], len(gap)) - 1] if len(gap) else high,
        "reason": reason[first],
    }


def waited(program: Program, start: Times, end: Times, low: float, high: float) -> float:
    """How long all lanes together wait for messages and streams between two times."""
    _, _, begin, until, reason = _parts(program, start, end)
    length = np.minimum(until, high) - np.maximum(begin, low)
    total: float = np.maximum(length[reason <= Reason.STREAM], 0).sum().item()
    return total


def _parts(program: Program, start: Times, end: Times) -> tuple[Ints, Ints, Times, Times, Ints]:
    """The lane of each gap; and the parts of gaps in any order: gap, begin, end, reason."""
    task, lane, begin = _gaps(program, start, end)
    lanes = len(program.lane_start) - 1
    ends = end[program.lane_tasks[program.lane_start[1:] - 1]]
    last = len(task) + np.arange(lanes)  # numbers of the gaps behind lanes' last tasks
    lane, begin = np.append(lane, np.arange(lanes)), np.append(begin, ends)
    until = np.append(start[task], np.full(lanes, end.max(initial=0), dtype=end.dtype))
    parts = [*_path(program, start, end, task), (last, ends, until[last], Reason.NOTHING)]
    gap, low, high = (np.concatenate(column) for column in list(zip(*parts, strict=True))[:3])
    reason = np.repeat(np.array([part[3] for part in parts], dtype=np.int8), [len(part[0]) for part in parts])
    low, high = np.maximum(low, begin[gap]), np.minimum(high, until[gap])
    some = np.flatnonzero(low < high)
    return lane, gap[some], low[some], high[some], reason[some]


def waits_for(program: Program, start: Times, end: Times) -> Ints:
    """For each compute task, the task, message or update elsewhere that it waited for last while its lane was idle.

    -1 where its lane was not idle before it, or not for lack of anything.
    """
    critical, lasts = _critical(program, end), end > start
    task, _, begin = _gaps(program, start, end)
    node = critical[task]
    own = np.flatnonzero(_own_update(program, node, task) & ~lasts[node])
    while len(own):
        node[own] = critical[node[own]]
        own = own[_own_update(program, node[own], task[own]) & ~lasts[node[own]]]
    result = np.full(len(program.lane_tasks), -1, dtype=np.int64)
    result[task] = np.where(end[node] > begin, _behind(program)[node], -1)
    return result


def _behind(program: Program) -> Ints:
    """The node that is shown in place of each, a message in place of a device's part in it; and -1 for none."""
    return np.concatenate([np.arange(program.message_nodes.stop), program.first_messages, [-1]])


def _gaps(program: Program, start: Times, end: Times) -> tuple[Ints, Ints, Times]:
    """The tasks with a gap before them, their lanes, and since when those were idle."""
    task, first = program.lane_tasks, program.lane_start
    begin = np.roll(end[task], 1)
    begin[first[:-1]] = 0
    some = np.flatnonzero(begin < start[task])
    return task[some], np.searchsorted(first, some, side="right") - 1, begin[some]


def _critical(program: Program, end: Times, among: Flags | None = None) -> Ints:
    """Of what each node depends on, what ended last; of several a message rather than a task. -1: on nothing.

    `among` says which dependencies count, if not all.
    """
    rows = slice(None) if among is None or among.all() else np.flatnonzero(among)
    before, after = program.edges.before[rows], program.edges.after[rows]
    critical = np.full(program.nodes, -1, dtype=before.dtype)
    if not len(before):
        return critical
    latest = np.zeros(program.nodes, dtype=end.dtype)
    ended = end[before]
    np.maximum.at(latest, after, ended)
    last = np.flatnonzero(ended == latest[after])
    np.maximum.at(critical, after[last], before[last])
    return critical


def _path(program: Program, start: Times, end: Times, task: Ints) -> Iterator[tuple[Ints, Times, Times, Reason]]:
    """What tasks waited for, back from their starts: the numbers of tasks, and since when and until when for what."""

    def ended(node: Ints) -> Times:
        times: Times = np.where(node >= 0, end[node], 0).astype(end.dtype)
        return times

    in_stream = program.edges.kind == EdgeKind.STREAM
    critical = _critical(program, end, ~in_stream)
    node, passing = critical[task], np.arange(len(task))
    message = np.full(len(task), -1, dtype=node.dtype)  # the first of those that one after another led to the task
    there, free = ended(node), ended(_critical(program, end, in_stream)[task])
    yield passing, np.maximum(there, free), start[task], Reason.NOTHING
    yield passing, there, free, Reason.STREAM
    while len(passing := passing[_passes(program, node[passing], task[passing])]):
        through, before = node[passing], critical[node[passing]]
        update = through < len(program.tasks)
        for own, running, due in (
            (~update, Reason.MESSAGE, Reason.STREAM),
            (update, Reason.DEPENDENCY, Reason.DEPENDENCY),
        ):
            yield passing[own], start[through[own]], end[through[own]], running
            yield passing[own], ended(before[own]), start[through[own]], due
        node[passing] = before
        message[passing[~update]] = through[~update]
    made = ended(node)
    late = made - _later(program, start, end, task, message, node)
    yield np.arange(len(task)), np.zeros_like(made), late, Reason.DEPENDENCY
    yield np.arange(len(task)), late, made, Reason.MESSAGE


def _later(program: Program, start: Times, end: Times, task: Ints, message: Ints, node: Ints) -> Times:
    """How much later than the lane of each task messages have let those go on for which it waits in a collective.

    `message` begins the collective, which waits for a task of the lane's device, too; `node` comes last of all that it
    waits for.
    """
    later = np.zeros(len(task), dtype=end.dtype)
    rows = np.flatnonzero((message >= 0) & (node >= 0) & (node < program.compute))
    rows = rows[_takes(program, message[rows], program.tasks.device[task[rows]])]
    if len(rows):
        released = np.append(_released(program, start, end), 0)  # of no task
        previous = np.full(len(program.tasks), -1)
        before, after = program.lane_edges
        previous[after] = before
        own = released[previous[task[rows]]]
        later[rows] = np.where(own > 0, np.maximum(released[node[rows]] - own, 0), 0)
    return later


def _takes(program: Program, message: Ints, device: Ints) -> Flags:
    """Whether messages wait for tasks of these devices: of the members of a collective, for each one's."""
    edges, devices = program.edges, program.devices
    asked = np.zeros(program.nodes, dtype=bool)
    asked[message] = True
    rows = np.flatnonzero(asked[edges.after] & (edges.before < program.compute))
    rows = rows[(edges.kind[rows] == EdgeKind.DATA) | (edges.kind[rows] == EdgeKind.BARRIER)]
    after, source = edges.after[rows], program.tasks.device[edges.before[rows]]
    only = np.full(program.nodes, -1, dtype=source.dtype)
    only[after] = source
    takes: Flags = only[message] == device
    waits = np.bincount(after, minlength=program.nodes)
    some, more = np.flatnonzero(waits[message] > 1), np.flatnonzero(waits[after] > 1)
    pairs = after[more].astype(np.int64) * devices + source[more]
    takes[some] = np.isin(message[some].astype(np.int64) * devices + device[some], pairs)
    return takes


def _released(program: Program, start: Times, end: Times) -> Times:
    """When the lane of each task last went on as a message had come; 0 if it has waited for another reason since."""
    critical = _critical(program, end)
    tasks, first = program.lane_tasks, program.lane_start[:-1]
    gap, _, begin = _gaps(program, start, end)
    node = critical[gap]
    own = np.flatnonzero(_own_update(program, node, gap))
    node[own] = critical[node[own]]
    known = np.zeros(len(program.tasks), dtype=end.dtype)
    came = (node >= len(program.tasks)) & (end[node] > np.maximum(start[node], begin))
    known[gap[came]] = start[gap[came]]
    breaks = np.zeros(len(program.tasks), dtype=bool)
    breaks[gap], breaks[tasks[first]] = True, True
    last = np.maximum.accumulate(np.where(breaks[tasks], np.arange(len(tasks)), 0))
    released = np.zeros(len(program.tasks), dtype=end.dtype)
    released[tasks] = known[tasks[last]]
    return released


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

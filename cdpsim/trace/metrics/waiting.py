"""Reasons for idle lanes: a message is on its way or held up, something else has to end, or there is nothing to do."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import fsum
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Flags, Floats, Ints, Times, dense_ranks, group_starts, sort_by
from cdpsim.numeric.paths import compiled_loops_for
from cdpsim.program import EdgeKind, Program, once_a_program
from cdpsim.trace.metrics.steady import lanes_that_begin
from cdpsim.trace.metrics.waiting import makespan


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
    lane, gap, low, high, reason = _IdleLanes(program, start, end).parts()
    order = sort_by(lane[gap], dense_ranks(low))
    gap, low, high, reason = (column[order] for column in (gap, low, high, reason))
    first = group_starts(gap, reason)  # several messages, one after another, count as one
    return {
        "lane": lane[gap[first]],
        "device": _devices_of_lanes(program)[lane[gap[first]]],
        "begin": low[first],
        "end": high[np.append(first[1:], len(gap)) - 1] if len(gap) else high,
        "reason": reason[first],
    }


class Waits(NamedTuple):
    """How long lanes wait for messages and streams, in each gap before a task or before the run starts again."""

    until: Times  # when the gap ends
    time: Times
    since: Times  # until then nothing happens on which that time depends; -inf where this is not known

    def total(self, fold: int) -> float:
        """Return the time of the gaps of so many replicas together, rounded once."""
        return fsum(self.time[self.time > 0].tolist() * fold)


def waits_between(
    program: Program, start: Times, end: Times, low: float, high: float, *, starts_again: bool = False
) -> Waits:
    """Return how long lanes wait for messages and streams between two times.

    A run may start again at its end, with what waits there for updates alone.
    """
    return _IdleLanes(program, start, end, starts_again).waits(low, high)


class _Gaps(NamedTuple):
    """Times in which lanes are idle before a task."""

    task: Ints  # -1: the first one of its lane, as the run starts again
    lane: Ints
    before: Ints  # the task before; -1 if there is none
    begin: Times
    until: Times
    node: Ints  # what the task waited for last, but for streams; -1 if it was due later


@dataclass(frozen=True, eq=False)
class _IdleLanes:
    """The gaps between the tasks of a run's lanes, and those before what starts the run again, if it does so."""

    program: Program
    start: Times
    end: Times
    starts_again: bool = False

    @cached_property
    def gaps(self) -> "_Gaps":
        """The gaps with a task behind them."""
        program, end = self.program, self.end
        task, lane, begin = _gaps_before_tasks(program, self.start, end)
        node = self._last_waits[task]
        found = _Gaps(task, lane, _tasks_before(program)[task], begin, self.start[task], node)
        if not self.starts_again:
            return found
        lanes, updates = lanes_that_begin(program, program.steps - 1)
        lane, node = lanes[updates >= 0], updates[updates >= 0]
        before = program.lane_tasks[program.lane_start[lane + 1] - 1]
        again = _Gaps(np.full_like(lane, -1), lane, before, end[before], end[node], node)
        rows = np.flatnonzero(again.begin < again.until)
        if not len(rows):
            return found
        return _Gaps(*(np.append(one, more[rows]) for one, more in zip(found, again, strict=True)))

    def parts(self) -> tuple[Ints, Ints, Times, Times, Ints]:
        """Return the lane of each gap; and the parts of gaps, in any order: gap, begin, end, reason.

        The gaps behind lanes' last tasks are the last ones.
        """
        program, gaps = self.program, self.gaps
        lanes = np.arange(len(program.lane_start) - 1)
        ends = self.end[program.lane_tasks[program.lane_start[1:] - 1]]
        lane, begin = np.append(gaps.lane, lanes), np.append(gaps.begin, ends)
        until = np.append(gaps.until, np.full(len(lanes), makespan(program, self.end), dtype=ends.dtype))
        behind = len(gaps.lane) + lanes
        spans = []
        for gap, low, high, reason in (*self._all_spans(), (behind, ends, until[behind], IdleReason.NOTHING)):
            low, high = np.maximum(low, begin[gap]), np.minimum(high, until[gap])
            rows = np.flatnonzero(low < high)
            spans.append((gap[rows], low[rows], high[rows], np.full(len(rows), reason, dtype=np.int8)))
        gap, low, high, reasons_of = (np.concatenate(column) for column in zip(*spans, strict=True))
        return lane, gap, low, high, reasons_of

    def waits(self, low: float, high: float) -> Waits:
        """Return how long each gap is for messages and streams, between two times."""
        gaps, node, message = self.gaps, *self._chains()
        begin, until = np.maximum(gaps.begin, low), np.minimum(gaps.until, high)
        waits, loops = np.zeros_like(begin), compiled_loops_for(self.program.nodes)
        if loops:
            nodes = self._last_waits, _kinds_of_waits(self.program), self.program.tasks.device
            spans = self.start, self.end, node, self._free, self._devices, begin, until
            loops.trace_waits(*nodes, *spans, message, waits)
        else:
            for gap, since, there, reason in self._trace_back(node, message):
                if reason in (IdleReason.MESSAGE, IdleReason.STREAM):
                    waits[gap] += _lengths_within(since, there, begin[gap], until[gap])
        made, delay, delayed = self._ended(node), *self._messages_delay(message, node)
        waits += _lengths_within(made - delay, made, begin, until)
        since = np.maximum(gaps.begin, made).astype(np.float64)
        since[delayed] = -np.inf
        return Waits(gaps.until, waits, since)

    def _chains(self) -> tuple[Ints, Ints]:
        """Return what each gap's task waited for last, and -1: to be followed back."""
        return self.gaps.node.astype(np.int32), np.full(len(self.gaps.node), -1, dtype=np.int32)

    @cached_property
    def _devices(self) -> Ints:
        """The device of each gap."""
        return _devices_of_lanes(self.program)[self.gaps.lane]

    @cached_property
    def _free(self) -> Times:
        """When the streams that the task behind each gap waited for have let it go; where there are none, its wait."""
        streams = _edges_by_stream(self.program)[1]
        if not len(streams[0]):
            return self._ended(self.gaps.node)
        return self._ended(np.append(_critical(self.program, self.end, streams), -1)[self.gaps.task])

    @cached_property
    def _last_waits(self) -> Ints:
        """The node that each node waited for last, but for streams; -1 if it waited for none. One more row has -1."""
        return np.append(_critical(self.program, self.end, _edges_by_stream(self.program)[0]), -1)

    def _ended(self, node: Ints) -> Times:
        times: Times = np.where(node >= 0, self.end[node], 0).astype(self.end.dtype)
        return times

    def _trace_back(self, node: Ints, message: Ints) -> Iterator[tuple[Ints, Times, Times, IdleReason]]:
        """Follow what the tasks behind gaps waited for; yield rows of gaps, since when, until when, and why.

        Fill in the node at the end of each chain, and the first of the messages that one after another led to the task.
        """
        program, start, gaps, ended = self.program, self.start, self.gaps, self._ended
        critical, device, free = self._last_waits, self._devices, self._free
        rows, there, count = np.arange(len(node)), ended(node), len(program.tasks)
        yield rows, np.maximum(there, free), gaps.until, IdleReason.NOTHING
        yield rows, there, free, IdleReason.STREAM
        while len(rows := rows[(node[rows] >= count) | _is_local_update(program, node[rows], device[rows])]):
            through, before = node[rows], critical[node[rows]]
            update = through < count
            for chosen, running, due in (
                (~update, IdleReason.MESSAGE, IdleReason.STREAM),
                (update, IdleReason.DEPENDENCY, IdleReason.DEPENDENCY),
            ):
                yield rows[chosen], start[through[chosen]], self.end[through[chosen]], running
                yield rows[chosen], ended(before[chosen]), start[through[chosen]], due
            node[rows] = before
            message[rows[~update]] = through[~update]

    def _all_spans(self) -> Iterator[tuple[Ints, Times, Times, IdleReason]]:
        """Yield what `_trace_back` yields, and behind it what the nodes at the end of chains took to be made."""
        node, message = self._chains()
        yield from self._trace_back(node, message)
        made = self._ended(node)
        late = made - self._messages_delay(message, node)[0]
        yield np.arange(len(made)), np.zeros_like(made), late, IdleReason.DEPENDENCY
        rows = np.flatnonzero(late < made)
        yield rows, late[rows], made[rows], IdleReason.MESSAGE

    def _messages_delay(self, message: Ints, node: Ints) -> tuple[Times, Ints]:
        """Return how much later messages have let the other members of a collective go on than the lane of each gap.

        `message` begins the collective, which waits for a task of the lane's device, too; of all that it waits for,
        `node` ends last. Return also the gaps that wait for such a collective.
        """
        program, device = self.program, self._devices
        delay = np.zeros(len(node), dtype=self.end.dtype)
        rows = np.flatnonzero((message >= 0) & (node >= 0) & (node < program.compute) & (node != self.gaps.before))
        # One point to point waits for no task of the device that it goes to.
        rows = rows[_waits_for_device(program, message[rows], device[rows])] if program.groups else rows[:0]
        if len(rows):
            released = np.append(self._released_by_message(), -np.inf)  # of no task
            here = released[self.gaps.before[rows]]
            known = here > -np.inf
            delay[rows[known]] = np.maximum(released[node[rows[known]]] - here[known], 0)
        return delay, rows

    def _released_by_message(self) -> Floats:
        """Return when each task's lane last went on because a message came; -inf if it has waited otherwise since."""
        program, gaps, tasks = self.program, self.gaps, self.program.lane_tasks
        in_streams = len(_edges_by_stream(program)[1][0])
        critical = np.append(_critical(program, self.end), -1) if in_streams else self._last_waits
        node = np.where(gaps.task < 0, gaps.node, critical[gaps.task])
        local = np.flatnonzero(_is_local_update(program, node, _devices_of_lanes(program)[gaps.lane]))
        node[local] = critical[node[local]]
        came = (node >= len(program.tasks)) & (self.end[node] > np.maximum(self.start[node], gaps.begin))
        first = tasks[program.lane_start[:-1]]
        behind = np.where(gaps.task < 0, first[gaps.lane], gaps.task)
        time = np.full(len(program.tasks), -np.inf)
        time[behind[came]] = np.where(gaps.task < 0, 0, gaps.until)[came]
        breaks = np.zeros(len(program.tasks), dtype=bool)
        breaks[behind] = True
        fresh = np.flatnonzero(~breaks[first])
        breaks[first] = True
        last = np.maximum.accumulate(np.where(breaks[tasks], np.arange(len(tasks)), 0))
        if self.starts_again:  # what came before the end came so long before the start
            time[first[fresh]] = time[tasks[last[program.lane_start[1:] - 1]]][fresh] - self.end.max()
        released = np.empty_like(time)
        released[tasks] = time[tasks[last]]
        return released


def waits_for(program: Program, start: Times, end: Times) -> Ints:
    """Return the task, message or update elsewhere that each compute task waited for last while its lane was idle.

    It is -1 where its lane was not idle before it, or not for lack of anything.
    """
    critical, lasts = _critical(program, end), end > start
    task, _, begin = _gaps_before_tasks(program, start, end)
    node = critical[task]
    rows = np.arange(len(node))
    while len(
        rows := rows[_is_local_update(program, node[rows], program.tasks.device[task[rows]]) & ~lasts[node[rows]]]
    ):
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
    begin = np.append(0, end[task[:-1]]).astype(end.dtype)
    begin[first[:-1]] = 0
    place = np.flatnonzero(begin < start[task])
    return task[place], program.lane_numbers[place], begin[place]


def _critical(program: Program, end: Times, among: tuple[Ints, Ints] | None = None) -> Ints:
    """Return, for each node, the node that it depends on which ended last; of several a message rather than a task.

    It is -1 where the node depends on nothing. `among` are the dependencies that count, if not all.
    """
    before, after = among or (program.edges.before, program.edges.after)
    return _latest(before, after, program.nodes, end)


@once_a_program
def _tasks_before(program: Program) -> Ints:
    """Return the task before each one in its lane, -1 if there is none."""
    last = np.full(len(program.tasks), -1, dtype=np.int64)
    before, after = program.lane_edges
    last[after] = before
    return last


def _devices_of_lanes(program: Program) -> Ints:
    """Return the device of each lane."""
    devices: Ints = program.tasks.device[program.lane_tasks[program.lane_start[:-1]]]
    return devices


@once_a_program
def _edges_by_stream(program: Program) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Return the edges but for those of streams, and those: (before, after) of each."""
    edges, in_stream = program.edges, program.edges.kind == EdgeKind.STREAM
    others, streams = ((edges.before[rows], edges.after[rows]) for rows in map(np.flatnonzero, (~in_stream, in_stream)))
    return others, streams


def _latest(before: Ints, after: Ints, nodes: int, end: Times) -> Ints:
    """Return, for each node, the one before it that ended last, the highest of several; -1 where there is none."""
    found = np.full(nodes, -1, dtype=before.dtype)
    if loops := compiled_loops_for(len(before)):
        loops.find_last_waits(before, after, end, found)
        return found
    latest = np.zeros(nodes, dtype=end.dtype)
    ended = end[before]
    np.maximum.at(latest, after, ended)
    last = np.flatnonzero(ended == latest[after])
    np.maximum.at(found, after[last], before[last])
    return found


def _lengths_within(begin: Times, end: Times, low: Times, high: Times) -> Times:
    """Return how long spans are in others."""
    length: Times = np.maximum(np.minimum(end, high) - np.maximum(begin, low), 0)
    return length


@once_a_program
def _kinds_of_waits(program: Program) -> Ints:
    """Return what passes on what it waits for: 1 for a message, 2 for an update, 3 for one on its device alone."""
    kind = np.zeros(program.nodes, dtype=np.int8)
    kind[program.compute : len(program.tasks)] = 2 if program.state.splits else 3
    kind[len(program.tasks) :] = 1
    return kind


def _waits_for_device(program: Program, message: Ints, device: Ints) -> Flags:
    """Return whether each message waits for a task of its device: a collective waits for one of each member."""
    one, members = _awaited_devices(program)
    waits: Flags = one[message] == device
    several = np.flatnonzero(one[message] == _OF_SEVERAL)
    wanted = message[several].astype(np.int64) * program.devices + device[several]
    waits[several] = members[np.searchsorted(members, wanted)] == wanted
    return waits


_OF_SEVERAL = -2


@once_a_program
def _awaited_devices(program: Program) -> tuple[Ints, Ints]:
    """Return the device for whose tasks each message waits, -1 for none, and those of messages that wait for several.

    These are nodes and devices, as one number, in their order, and one number more.
    """
    edges, first = program.edges, len(program.tasks)
    rows = np.flatnonzero((edges.after >= first) & (edges.before < program.compute))
    rows = rows[(edges.kind[rows] == EdgeKind.DATA) | (edges.kind[rows] == EdgeKind.BARRIER)]
    members = np.unique(edges.after[rows].astype(np.int64) * program.devices + program.tasks.device[edges.before[rows]])
    node, device = np.divmod(members, program.devices)
    one = np.full(program.nodes, -1, dtype=np.int64)
    one[node] = device
    several = np.bincount(node, minlength=program.nodes) > 1
    one[several] = _OF_SEVERAL
    return one, np.append(members[several[node]], program.nodes * program.devices)


def _is_local_update(program: Program, node: Ints, device: Ints) -> Flags:
    """Return whether each node is an update on a device, or of other shares of what that has a share."""
    tasks, update = program.tasks, (node >= program.compute) & (node < len(program.tasks))
    if program.state.splits:
        return update
    local: Flags = update & (tasks.device[np.where(update, node, 0)] == device)
    return local

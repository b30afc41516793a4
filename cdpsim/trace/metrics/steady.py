"""When training steps repeat each other: the certificate of a period, and the mean where there is none.

The end of a node is the longest path to it, so it moves with the ends of all that it waits for. Let no dependency reach
back further than w steps. If w consecutive steps end, node by node, as the steps c before them and L later, every later
step does so, too: L / c is the period, exactly. What the certificate relies on is that later steps have the
dependencies of the steps c before them; they do from the step on in which no task reads the versions of the start.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdpsim.numeric.columns import Ints, Times, group_numbers, sort_by
from cdpsim.program import Content, EdgeKind, Kind, Op, Program

PRECISION = 1e-12  # of the later of two times that count as equal; whole times are equal or are not


@dataclass(frozen=True)
class Certificate:
    """From step `first` to `last`, and ever after, each step is the one `every` steps before, `later` than that."""

    first: int
    last: int
    every: int
    later: Any  # slots or seconds


def step_ends(program: Program, end: Times) -> Times:
    """When all tasks and updates of each step have ended."""
    ends = np.zeros(program.steps, dtype=end.dtype)
    ends[:] = np.maximum.reduceat(end[: program.compute], program.first_pass[:-1] * program.phases)
    updates = slice(program.compute, len(program.tasks))
    np.maximum.at(ends, program.tasks.step[updates], end[updates])
    return ends


def needed_in(program: Program) -> Ints:
    """The step of each node: of a message, that of the first task or update which waits for it, if any does.

    A device's part in a message is of the message's step, or of that of the task which it stands before or behind if
    that is later: so of the steps of a run, all parts are there.
    """
    edges, first = program.edges, len(program.tasks)
    step = np.concatenate([program.tasks.step, np.full(len(program.messages), program.steps, dtype=np.int32)])
    rows = np.flatnonzero((edges.before >= first) & (edges.after < first) & (edges.kind == EdgeKind.DATA))
    np.minimum.at(step, edges.before[rows], program.tasks.step[edges.after[rows]])
    passed_on = first + np.flatnonzero(step[first:] == program.steps)
    step[passed_on] = np.maximum(program.messages.step[passed_on - first], 0)
    return np.concatenate([step, np.maximum(step[program.first_messages], program.parts.step)])


def back(program: Program, step: Ints) -> tuple[int, int]:
    """How many steps dependencies reach back, and forward, at most."""
    edges = program.edges
    reach = [step[after] - step[before] for before, after in ((edges.before, edges.after), program.lane_edges)]
    return max(int(steps.max(initial=1)) for steps in reach), -min(int(steps.min(initial=0)) for steps in reach)


def last_followed(program: Program, step: Ints) -> int:
    """The last step behind which devices have something to do, as far as dependencies alone tell."""
    return max(0, program.steps - 1 - back(program, step)[1])


def last_complete(program: Program, step: Ints, start: Times, forward: int) -> int:
    """The last step whose nodes end as in a run that goes on.

    Where a node waits for one of a later step, such as a backward for a forward before it in its lane, the last steps
    lack what they would wait for. All that a node waits for starts no later than the node does.
    """
    if not forward:
        return program.steps - 1
    order = np.argsort(start, kind="stable")
    highest = np.maximum.accumulate(step[order])
    seen = np.searchsorted(start[order], start, side="right") - 1
    return program.steps - 1 - int((highest[seen] - step).max())


def certify(program: Program, step: Ints, start: Times, end: Times) -> Certificate | None:
    """Find the least number of steps after which the steps of a run repeat; None where they do not yet.

    Where steps have unlike numbers of micro-batches, later ones need not repeat them.
    """
    if program.m is None:
        return None
    reach, forward = back(program, step)
    last = last_complete(program, step, start, forward)
    ends = step_ends(program, end)
    rows = _Rows(program, step, end)
    for every in range(1, min(last + 1 - reach, last - program.fill) + 1):
        later = (ends[last] - ends[last - every]).item()
        window = slice(last + 1 - reach, last + 1)
        shifted = slice(window.start - every, window.stop - every)
        if not _equal(ends[window] - ends[shifted], later, ends[window]):
            continue
        first = rows.repeat_from(last, every, later)
        if last + 1 - first >= reach:
            return Certificate(first, last, every, later)
    return None


def _equal(difference: Times, later: Any, ends: Times) -> bool:
    """Whether times differ by as much as is said, up to rounding where they are no integers."""
    room = 0 if difference.dtype.kind == "i" else PRECISION * np.abs(ends)
    return bool((np.abs(difference - later) <= room).all())


class _Rows:
    """The nodes of each step, by what they are: kind, stage, micro-batch; devices are not asked for."""

    def __init__(self, program: Program, step: Ints, end: Times) -> None:
        order = sort_by(step)
        self._name, self._end, self._fill = _names(program, step)[order], end[order], program.fill
        self._first = np.append(0, np.cumsum(np.bincount(step, minlength=program.steps)))

    def _of(self, step: int) -> tuple[Ints, Times]:
        rows = slice(self._first[step], self._first[step + 1])
        return self._name[rows], self._end[rows]

    def repeat_from(self, last: int, every: int, later: Any) -> int:
        """The first of the steps up to the last that all are the one `every` steps before, `later`."""
        first = last + 1
        while first - 1 >= every and self._repeats(first - 1, every, later):
            first -= 1
        return first

    def _repeats(self, step: int, every: int, later: Any) -> bool:
        (name, end), (before, ended) = self._of(step), self._of(step - every)
        if not np.array_equal(name, before):
            (name, end), (before, ended) = _by_name(name, end), _by_name(before, ended)
            if step - every <= self._fill:  # whose tasks read versions that no message brings
                some = np.isin(name, before)
                name, end = name[some], end[some]
        return np.array_equal(name, before) and _equal(end - ended, later, end)


def _by_name(name: Ints, end: Times) -> tuple[Ints, Times]:
    order = np.argsort(name, kind="stable")
    return name[order], end[order]


def _names(program: Program, step: Ints) -> Ints:
    """A number for what each node is, whatever its step and its device; of a message also how old its content is."""
    tasks, messages, whole = program.tasks, program.messages, slice(program.message_nodes.stop)
    stage = np.concatenate([tasks.stage, messages.stage])
    columns = (
        np.repeat([0, 1], [len(tasks), len(messages)]),
        np.concatenate([tasks.kind, messages.op]),
        np.concatenate([np.zeros_like(tasks.kind), messages.content]),
        stage - stage.min(initial=0),
        np.concatenate([tasks.micro_batch, messages.micro_batch]) + 1,
        step[whole] - np.concatenate([tasks.step, messages.step]),
    )
    name = np.zeros(whole.stop, dtype=np.int64)
    for column in columns:
        name *= int(column.max(initial=0)) + 1
        name += column
    parts = 3 * name[program.first_messages] + 1 + program.parts.sends
    return np.concatenate([3 * name, parts])


def undisturbed(program: Program, step: Ints, found: Certificate, start: Times, end: Times) -> tuple[Any, Any] | None:
    """A time in which a run is at rest, one repetition long; None where the run is too short to have one whole.

    It begins when the steps before the first that repeats have ended, and those that read versions of the start: until
    then fewer versions are held than later. Until it ends, no step begins that lacks anything, and no update is made
    after which a step beyond the run would begin.
    """
    low = end[step < max(found.first, program.fill + 1)].max(initial=0).item()
    high = low + found.later
    nodes = program.message_nodes.stop  # a device's part begins when there is room for it, and holds nothing
    begins = start[:nodes][step[:nodes] > found.last].min(initial=high)
    tasks = program.tasks
    made = (tasks.kind == Kind.U) & (tasks.step == program.steps - 1 - program.fill)
    if begins < high or not made.any() or end[: len(tasks)][made].min() < high:
        return None
    return low, high


def apart(program: Program, start: Times, end: Times) -> Any | None:
    """The period of a run whose steps follow each other without touching, as its first step shows; None of others.

    Let every device do the same list in each step, and send nothing but activations and their gradients. Then a step
    waits for the one before only on its own devices. Let L be the end of the first step. If a device that begins the
    step, and waits for nothing, is in its lane until L, the next step begins no earlier than L. If moreover each device
    ends the first step at most L after it begins it, the next step can be the first one, L later; so it is. Devices
    update last, or else what a run of one step holds after an update would be less than at rest.
    """
    messages, count = program.messages, len(program.tasks)
    strange = (messages.op != Op.P2P) | (messages.content > Content.ACTIVATION_GRADIENT)
    if (
        program.m is None
        or not program.together
        or program.fill
        or len(program.parts)
        or len(program.releases)
        or strange.any()
    ):
        return None
    task, sent = np.flatnonzero(program.tasks.step == 0), np.flatnonzero(messages.step == 0)
    node = np.concatenate([task, count + sent, count + sent])
    device = np.concatenate([program.tasks.device[task], messages.src[sent], messages.dst[sent]])
    later = end[node].max()
    begins, until = np.full(program.devices, later), np.zeros(program.devices, dtype=end.dtype)
    np.minimum.at(begins, device, start[node])
    np.maximum.at(until, device, end[node])
    free = np.ones(program.nodes, dtype=np.bool_)
    for after in (program.edges.after, program.lane_edges[1]):
        free[after] = False
    first = program.tasks.step[program.lane_tasks] == 0
    lane = group_numbers(program.lane_start[:-1], len(program.lane_tasks))
    over = np.zeros(len(program.lane_start) - 1, dtype=end.dtype)
    np.maximum.at(over, lane[first], end[program.lane_tasks[first]])
    begin = free[program.lane_tasks]
    if begin.sum() < free.sum() or (over[lane[begin]] < later).any() or (begins + later < until).any():
        return None
    worked, made = task[task < program.compute], task[task >= program.compute]
    done = np.zeros_like(until)
    np.maximum.at(done, program.tasks.device[worked], end[worked])
    return None if (start[made] < done[program.tasks.device[made]]).any() else later.item()


def last_read(program: Program) -> int:
    """The last step whose messages have all their readers: what it makes is read up to `fill` steps after the next."""
    return program.steps - 2 - program.fill


def turns(program: Program) -> bool:
    """Whether a micro-batch meets other devices in one step than in another."""
    device = program.tasks.device[program.tasks_of_kind(Kind.F)]
    same = program.find_pass(np.zeros_like(program.pass_step), program.pass_micro_batch)
    return bool((device != device[np.minimum(same, len(device) - 1)]).any())


def half(last: int) -> range:
    """The last half of the steps up to one, of which the first only begins to fill the devices."""
    return range(last + 1 - max(1, (last + 1) // 2), last + 1)


def lengths(least: int, most: int) -> Iterator[int]:
    """Numbers of steps to try: each twice the one before, the last of them the most."""
    while least < most:
        yield least
        least *= 2
    yield most

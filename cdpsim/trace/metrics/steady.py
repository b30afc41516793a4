"""The steady state of a run: the certificate that training steps repeat each other, and the period that follows.

The end of a node is the longest path to it, so it moves with the ends of all that it waits for. Let no dependency reach
back further than w steps. If w consecutive steps end, node by node, as the steps c before them and L later, every later
step does so, too: L / c is the period, exactly. The certificate relies on this: later steps have the dependencies of
the steps c before them. They do from the step on in which no task reads the versions of the start.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdpsim.numeric.columns import Ints, Times, find_rows, row_numbers, sort_by
from cdpsim.program import Content, EdgeKind, Kind, Op, Program, once_a_program
from cdpsim.schedules.state import Placed

PRECISION = 1e-12  # of the later of two times that count as equal; whole times are equal or are not


@dataclass(frozen=True)
class Certificate:
    """Proof that, from step `first` on, each step repeats the one `every` steps before, `later` by that time.

    The steps up to `last` show it; those after them follow.
    """

    first: int
    last: int
    every: int
    later: Any  # slots or seconds


def ends_of_steps(program: Program, end: Times) -> Times:
    """Return the time at which all tasks and updates of each step have ended."""
    ends = np.zeros(program.steps, dtype=end.dtype)
    ends[:] = np.maximum.reduceat(end[: program.compute], program.first_pass[:-1] * program.phases)
    updates = slice(program.compute, len(program.tasks))
    np.maximum.at(ends, program.tasks.step[updates], end[updates])
    return ends


@once_a_program
def steps_of_nodes(program: Program) -> Ints:
    """Return the step of each node; a message has that of the first task or update which waits for it, if any does.

    A device's part in a message has the message's step, or the step of the task that it stands before or behind if that
    is later: so of the steps of a run, all parts are there.
    """
    edges, first = program.edges, len(program.tasks)
    step = np.concatenate([program.tasks.step, np.full(len(program.messages), program.steps, dtype=np.int32)])
    rows = np.flatnonzero((edges.before >= first) & (edges.after < first) & (edges.kind == EdgeKind.DATA))
    np.minimum.at(step, edges.before[rows], program.tasks.step[edges.after[rows]])
    passed_on = first + np.flatnonzero(step[first:] == program.steps)
    step[passed_on] = np.maximum(program.messages.step[passed_on - first], 0)
    return np.concatenate([step, np.maximum(step[program.first_messages], program.parts.step)])


@once_a_program
def dependency_reach(program: Program) -> tuple[int, int]:
    """Return how many steps dependencies reach back at most (at least 1), and how many forward."""
    step, (before, after) = steps_of_nodes(program), program.waits()
    steps = step[after] - step[before]
    return int(steps.max(initial=1)), -int(steps.min(initial=0))


def last_followed_step(program: Program) -> int:
    """Return the last step that is followed by other work of its devices, by dependencies alone."""
    return max(0, program.steps - 1 - dependency_reach(program)[1])


def busy_span(program: Program, start: Times, end: Times) -> tuple[Any, Any]:
    """Return the time from which on all lanes have begun, and the one at which the first of them has no task left."""
    first, after = program.lane_start[:-1], program.lane_start[1:]
    lanes = first < after
    tasks = program.lane_tasks
    return start[tasks[first[lanes]]].max().item(), end[tasks[after[lanes] - 1]].min().item()


def last_complete_step(program: Program, start: Times) -> int:
    """Return the last step whose nodes end as in a run that goes on.

    Where a node waits for one of a later step, such as a backward for a forward before it in its lane, the last steps
    lack what they would wait for. All that a node waits for starts no later than the node does.
    """
    if not dependency_reach(program)[1]:
        return program.steps - 1
    step = steps_of_nodes(program)
    order = np.argsort(start, kind="stable")
    highest = np.maximum.accumulate(step[order])
    seen = np.searchsorted(start[order], start, side="right") - 1
    return program.steps - 1 - int((highest[seen] - step).max())


def certify(program: Program, start: Times, end: Times) -> Certificate | None:
    """Find the least number of steps after which the steps of a run repeat; return None where they do not yet.

    Where steps have unlike numbers of micro-batches, later ones need not repeat them.
    """
    if program.m is None:
        return None
    back, last = dependency_reach(program)[0], last_complete_step(program, start)
    ends, nodes = ends_of_steps(program, end), [(identity, end[node]) for node, identity in _nodes_of_steps(program)]
    for every in range(1, min(last + 1 - back, last - program.fill) + 1):
        later = (ends[last] - ends[last - every]).item()
        window = slice(last + 1 - back, last + 1)
        shifted = slice(window.start - every, window.stop - every)
        if not _all_later(ends[shifted], ends[window], later):
            continue
        first = last + 1
        # Tasks of the steps up to `fill` read versions that no message brings.
        while first > every and _repeats(
            nodes[first - 1 - every], nodes[first - 1], later, first - 1 - every <= program.fill
        ):
            first -= 1
        if last + 1 - first >= back:
            return Certificate(first, last, every, later)
    return None


def _all_later(ends: Times, repeated: Times, later: Any) -> bool:
    """Return whether all times are later than others by one amount; floats up to rounding."""
    room = 0 if ends.dtype.kind == "i" else PRECISION * np.abs(repeated)
    return bool((np.abs(repeated - ends - later) <= room).all())


@once_a_program
def _nodes_of_steps(program: Program) -> list[tuple[Ints, Ints]]:
    """Return the nodes of each step, and their identities."""
    step, identity = steps_of_nodes(program), _identities(program)
    order, cuts = sort_by(step), np.cumsum(np.bincount(step, minlength=program.steps))[:-1]
    return [(node, identity[node]) for node in np.split(order, cuts)]


def _repeats(before: tuple[Ints, Times], after: tuple[Ints, Times], later: Any, may_lack: bool) -> bool:
    """Return whether a step repeats an earlier one, later by `later`; the earlier one may lack nodes."""
    if not np.array_equal(before[0], after[0]):
        before, after = _by_identity(*before), _by_identity(*after)
        if may_lack:
            there = np.isin(after[0], before[0])
            after = after[0][there], after[1][there]
    return np.array_equal(before[0], after[0]) and _all_later(before[1], after[1], later)


def _by_identity(identity: Ints, end: Times) -> tuple[Ints, Times]:
    """Sort the nodes of a step by their identities."""
    order = np.argsort(identity, kind="stable")
    return identity[order], end[order]


def _identities(program: Program) -> Ints:
    """Number nodes alike that differ only in step and device; messages differ by the age of their content, too."""
    tasks, messages, count = program.tasks, program.messages, program.message_nodes.stop
    step = steps_of_nodes(program)
    columns = (
        np.repeat([0, 1], [len(tasks), len(messages)]),
        np.concatenate([tasks.kind, messages.op]),
        np.concatenate([np.zeros_like(tasks.kind), messages.content]),
        np.concatenate([tasks.stage, messages.stage]),
        np.concatenate([tasks.micro_batch, messages.micro_batch]),
        step[:count] - np.concatenate([tasks.step, messages.step]),
    )
    identity = row_numbers(columns)
    parts = 3 * identity[program.first_messages] + 1 + program.parts.sends
    return np.concatenate([3 * identity, parts])


def find_steady_time(program: Program, certificate: Certificate, start: Times, end: Times) -> tuple[Any, Any] | None:
    """Return one repetition of a run in steady state: (low, high); None where the run is too short.

    It begins when the steps before the first that repeats have ended, and the steps that read versions of the start:
    until then fewer versions are in memory than later. Until it ends, no step begins that lacks anything, and no update
    is made after which a step beyond the run would begin.
    """
    step = steps_of_nodes(program)
    low = end[step < max(certificate.first, program.fill + 1)].max(initial=0).item()
    high = low + certificate.later
    nodes = program.message_nodes.stop  # a device's part begins when there is room for it, and has no memory
    begins = start[:nodes][step[:nodes] > certificate.last].min(initial=high)
    tasks = program.tasks
    made = (tasks.kind == Kind.U) & (tasks.step == program.steps - 1 - program.fill)
    if begins < high or not made.any() or end[: len(tasks)][made].min() < high:
        return None
    return low, high


def period_of_separate_steps(program: Program, end: Times) -> Any | None:
    """Return the period of a run whose steps follow each other without touching, as its first step shows; else None.

    Let every device do the same list in each step, and send nothing but activations, their gradients, and before its
    update what this sums. Then a step waits for the one before only on its own devices: for their lanes, and for the
    updates of their stages. Let L be the end of the first step. If a device that begins the step, and waits for nothing
    in it, is in its lane until L, or updates its stage then, the next step begins no earlier than L, when all devices
    are free; so it is the first one, L later.
    """
    count = len(program.tasks)
    if not sends_within_steps(program):
        return None
    task, sent = np.flatnonzero(program.tasks.step == 0), np.flatnonzero(program.messages.step == 0)
    period = max(end[task].max(initial=0), end[count + sent].max(initial=0))
    return period.item() if _begin_at(program, end, period) else None


def updates_last(program: Program, start: Times, end: Times) -> bool:
    """Return whether devices update last in the first step; else a run of it alone holds less than later steps."""
    tasks, device = program.tasks, program.tasks.device
    first = np.flatnonzero(tasks.step == 0)
    computes, updates = first[first < program.compute], first[first >= program.compute]
    computed = np.zeros(program.devices, dtype=end.dtype)
    np.maximum.at(computed, device[computes], end[computes])
    return bool((start[updates] >= computed[device[updates]]).all())


@once_a_program
def sends_within_steps(program: Program) -> bool:
    """Return whether alike steps end together, and no message goes from one to the next.

    Sums of gradients are there before the updates of their step, unless devices' streams have them wait for messages of
    the next. New versions on one device are sent on to others for the next step.
    """
    messages = program.messages
    within = (messages.op == Op.P2P) & (messages.content <= Content.ACTIVATION_GRADIENT)
    if set(program.state.placements) == {Placed.COPIED} and not _mixes_streams(program):
        within |= (messages.op != Op.P2P) & np.isin(messages.content, (Content.GRADIENT, Content.NORM))
    delayed = program.fill or len(program.parts) or len(program.releases)
    return bool(program.m is not None and program.together and not delayed and within.all())


def _mixes_streams(program: Program) -> bool:
    """Return whether anything but collectives goes one after another in a stream."""
    rows, together = np.flatnonzero(program.edges.kind == EdgeKind.STREAM), np.zeros(program.nodes, dtype=np.bool_)
    together[program.message_nodes] = program.messages.op != Op.P2P
    return not (together[program.edges.before[rows]] & together[program.edges.after[rows]]).all()


def _begin_at(program: Program, end: Times, period: Any) -> bool:
    """Return whether no node that waits for nothing in its step can begin the next one before that ends.

    All are tasks whose lanes the first step fills until then, or whose stages are updated then.
    """
    if program.beginnings[-1] >= program.compute:
        return False
    until = np.zeros(len(program.lane_start) - 1, dtype=end.dtype)
    first = program.tasks.step[program.lane_tasks] == 0
    np.maximum.at(until, program.lane_numbers[first], end[program.lane_tasks[first]])
    lanes, update = lanes_that_begin(program, 0)
    free = np.maximum(until[lanes], np.where(update >= 0, end[update], 0))
    return bool((free >= period).all())


@once_a_program
def lanes_that_begin(program: Program, step: int) -> tuple[Ints, Ints]:
    """Return the lanes whose first task waits for nothing, and the update of its stage in a step; -1 for no update."""
    tasks, first = program.tasks, program.lane_tasks[program.lane_start[:-1]]
    lanes = np.flatnonzero(np.isin(first, program.beginnings))
    updates = program.compute + np.flatnonzero(tasks.step[program.compute :] == step)[::-1]  # the last one is found
    made, begun = ((tasks.device[nodes], tasks.stage[nodes]) for nodes in (updates, first[lanes]))
    return lanes, np.append(updates, -1)[find_rows(made, begun)]


def last_read_step(program: Program) -> int:
    """Return the last step whose messages have all their readers: these read it up to `fill` steps after the next."""
    return program.steps - 2 - program.fill


@once_a_program
def changes_devices(program: Program) -> bool:
    """Return whether a micro-batch meets other devices in one step than in another."""
    device = program.tasks.device[program.tasks_of_kind(Kind.F)]
    same = program.find_pass(np.zeros_like(program.pass_step), program.pass_micro_batch)
    return bool((device != device[np.minimum(same, len(device) - 1)]).any())


def last_half(last: int) -> range:
    """Return the last half of the steps up to one; the first of them only begins to fill the devices."""
    return range(last + 1 - max(1, (last + 1) // 2), last + 1)


def step_counts(least: int, most: int) -> Iterator[int]:
    """Yield numbers of steps to try: each twice the one before, the last of them the most."""
    while least < most:
        yield least
        least *= 2
    yield most

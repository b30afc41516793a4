"""Laws of buffers: devices have in memory what their tasks read, what they send, what arrives, and what passes need."""

from collections.abc import Iterator

import numpy as np

from cdpsim.invariants.recount import Recount, receivers
from cdpsim.numeric.columns import Flags, Ints, Times
from cdpsim.program import Category, Content, Kind, Op
from cdpsim.trace.metrics import memory


def _buffers_of(run: Recount, *categories: Category) -> tuple[Ints, Times, Times]:
    """Return the buffers of some categories, when they are allocated, and when they are freed."""
    begin, end = memory.buffer_spans(run.program.buffers, run.start, run.end)
    rows = np.flatnonzero(np.isin(run.program.buffers.category, categories))
    return rows, begin[rows], end[rows]


def _in_memory(
    run: Recount, device: Ints, stage: Ints, version: Ints, start: Times, end: Times, *arriving: Category
) -> Flags:
    """Flag versions of stages that a device has from a start to an end, and all of a stage that weighs nothing."""
    program, buffers = run.program, run.program.buffers
    rows, begin, finish = _buffers_of(run, Category.PARAMETERS, *arriving)
    if not len(rows):
        return np.ones(len(stage), dtype=np.bool_)
    devices = int(max(buffers.device.max(), device.max(initial=0))) + 1
    shape = (devices, program.n, program.versions)
    weighs = np.isin(np.arange(program.n), buffers.stage[rows])
    key = np.ravel_multi_index((buffers.device[rows], buffers.stage[rows], buffers.version[rows]), shape)
    order = np.lexsort((begin, key))
    key, begin, finish = key[order], begin[order], finish[order]
    # Buffers of a key that touch or overlap count as one span, which lasts until the latest end so far.
    times, rank = np.unique(finish, return_inverse=True)
    until = times[np.maximum.accumulate(key * len(times) + rank) % len(times)]
    head = np.flatnonzero(np.append(True, (key[1:] != key[:-1]) | (begin[1:] > until[:-1])))
    key, begin, until = key[head], begin[head], until[np.append(head[1:], len(key)) - 1]
    # The last span of a key that begins no later than the start is the one to look at.
    wanted = np.ravel_multi_index((device, stage, version), shape)
    times, rank = np.unique(np.concatenate([begin, start]), return_inverse=True)
    spans, needed = np.split(np.concatenate([key, wanted]) * len(times) + rank, [len(key)])
    place = np.searchsorted(spans, needed, side="right") - 1
    there = place >= 0
    there[there] = (key[place[there]] == wanted[there]) & (until[place[there]] >= end[there])
    return there | ~weighs[stage]


def readers_hold_what_they_read(run: Recount) -> Iterator[str]:
    """While a task runs, its device has the version that it reads."""
    tasks, compute = run.program.tasks, slice(run.program.compute)
    read = tasks.device[compute], tasks.stage[compute], tasks.version[compute]
    there = _in_memory(run, *read, run.start[compute], run.end[compute])
    yield from run.report(np.flatnonzero(~there), "reads a version that its device does not hold")


def senders_hold_what_they_send(run: Recount) -> Iterator[str]:
    """While parameters are on their way, the device that they come from has them.

    Of a collective in several messages it may still be receiving other parts of them.
    """
    messages, first = run.program.messages, len(run.program.tasks)
    rows = np.flatnonzero(messages.content == Content.PARAMETERS)
    start, end = run.start[first + rows], run.end[first + rows]
    arriving = (Category.COMMUNICATION,) if len(run.collapsed.arrived) else ()
    there = _in_memory(run, messages.src[rows], messages.stage[rows], messages.step[rows] + 1, start, end, *arriving)
    yield from run.report(first + rows[~there], "sends a version that its device does not hold")


def receivers_hold_what_arrives(run: Recount) -> Iterator[str]:
    """While messages are on their way, their receivers have room for all of them together.

    Collectives add what arrives to gradients that are there. Messages that take no time, as in the slot model, take no
    room.
    """
    program, messages, first = run.program, run.program.messages, len(run.program.tasks)
    lands = ~((messages.content == Content.GRADIENT) & run.together)
    rows, device = receivers(program, np.flatnonzero(lands))
    collapsed, of = run.collapsed.program.messages, run.collapsed.part_of[first + rows] - first
    new = (collapsed.op[of] == Op.P2P) | (collapsed.src[of] != device)  # a root has what it hands out
    rows, device = rows[new], device[new]
    version = np.where(messages.content == Content.PARAMETERS, messages.step + 1, np.maximum(messages.step, 0))[rows]
    if program.habits.static_receives:  # a buffer for all steps
        passed = np.isin(messages.content[rows], (Content.ACTIVATION, Content.ACTIVATION_GRADIENT))
        version = np.where(passed, 0, version)
    buffers, (arriving, begin, end) = program.buffers, _buffers_of(run, Category.COMMUNICATION)
    columns = tuple(
        np.concatenate([getattr(buffers, name)[arriving], column])
        for name, column in (("device", device), ("stage", messages.stage[rows]), ("version", version))
    )
    shape = tuple(int(column.max(initial=0)) + 1 for column in columns)
    key, _, room = memory.step_function(
        np.ravel_multi_index(columns, shape),
        np.concatenate([begin, run.start[first + rows]]),
        np.concatenate([end, run.end[first + rows]]),
        np.concatenate([buffers.size[arriving], -messages.size[rows]]),
    )
    for short in key[room < 0].tolist():
        where, stage, _ = np.unravel_index(short, shape)
        yield f"device {where} has no room for what is on its way to it, of stage {stage}"


def activations_are_held_from_forward_to_backward(run: Recount) -> Iterator[str]:
    """The activations that devices have are those that their tasks need, recounted from the tasks.

    Of a stage whose input's part of a backward frees what only it needs, they are there until then; what it leaves is
    there until the weights' part.
    """
    program = run.program
    forward, last, left = program.tasks_of_kind(Kind.F), program.gradient_tasks, program.weight_stashes
    if _are_held_otherwise(run, program.stashes, forward, run.start[forward], run.end[program.stash_ends]):
        yield "activations are not held exactly from their forwards to their backwards"
    frees = np.isin(np.arange(program.n), program.buffers.stage[left])
    between = program.tasks_of_kind(Kind.B)[:, frees]
    if _are_held_otherwise(run, left, between, run.end[between], run.end[last[:, frees]]):
        yield "what the first parts of backwards leave is not held exactly until the second parts"


def _are_held_otherwise(run: Recount, rows: Ints, task: Ints, start: Times, end: Times) -> bool:
    """Return whether buffers are held otherwise than from the starts to the ends for tasks, each of which has one."""
    program, device = run.program, run.program.tasks.device
    size = program.buffers.size[rows]
    begin, finish = (times[rows] for times in memory.buffer_spans(program.buffers, run.start, run.end))
    stashed = memory.step_function(program.buffers.device[rows], begin, finish, size)
    # A stage's stashes weigh the same, but for those whose input the stage before has on the same device.
    forward = program.tasks_of_kind(Kind.F)
    near = np.zeros(forward.shape, dtype=np.int64)
    near[:, 1:] = device[forward[:, 1:]] == device[forward[:, :-1]]
    kind_of = np.zeros(len(program.tasks), dtype=np.int64)
    for tasks in (forward, program.tasks_of_kind(Kind.B)):
        kind_of[tasks] = near * program.n + program.tasks.stage[tasks]
    weight = np.zeros(2 * program.n, dtype=np.int64)
    weight[kind_of[program.buffers.begin[rows] >> 1]] = size
    needed = memory.step_function(*(column.ravel() for column in (device[task], start, end, weight[kind_of[task]])))
    return any(not np.array_equal(a, b) for a, b in zip(stashed, needed, strict=True))


def buffers_end_after_they_begin(run: Recount) -> Iterator[str]:
    """No buffer is freed before it is allocated, so no device ever has less than nothing."""
    begin, end = memory.buffer_spans(run.program.buffers, run.start, run.end)
    for row in np.flatnonzero(end < begin).tolist():
        category = Category(int(run.program.buffers.category[row])).name.lower()
        device = run.program.buffers.device[row]
        yield f"{category} on device {device} are freed at {end[row]}, but held from {begin[row]}"

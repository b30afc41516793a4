"""What devices hold: what their tasks read, what they send, what arrives, what passes need; and all is freed."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cdpsim.invariants.pieces import members
from cdpsim.invariants.recount import Recount
from cdpsim.numeric.columns import Ints, Times, group_starts
from cdpsim.program import Category, Content, Kind, Op
from cdpsim.trace.metrics import memory


def _spans(run: Recount, *categories: Category) -> tuple[Ints, Times, Times]:
    """The buffers of some categories, and from when until when they are held."""
    begin, end = memory.buffer_spans(run.program.buffers, run.start, run.end)
    rows = np.flatnonzero(np.isin(run.program.buffers.category, categories))
    return rows, begin[rows], end[rows]


def _holds(
    run: Recount, device: Ints, stage: Ints, version: Ints, start: Times, end: Times, *arriving: Category
) -> NDArray[np.bool_]:
    """Whether devices hold versions of stages all the time from a start to an end; yes where a stage weighs nothing."""
    program, (rows, begin, finish) = run.program, _spans(run, Category.PARAMETERS, *arriving)
    buffers = program.buffers
    devices = int(max(buffers.device.max(initial=0), device.max(initial=0))) + 1
    shape = (devices, program.n, program.versions)
    weighs = np.zeros(program.n, dtype=bool)
    weighs[buffers.stage[rows]] = True
    key = np.ravel_multi_index((buffers.device[rows], buffers.stage[rows], buffers.version[rows]), shape)
    # What is held on from one buffer to the next of the same key counts as one.
    order = np.lexsort((begin, key))
    key, begin, finish = key[order], begin[order], finish[order]
    latest = np.lexsort((finish, key))
    rank = np.empty_like(latest)
    rank[latest] = np.arange(len(latest))
    reached = finish[latest[np.maximum.accumulate(rank)]]  # by any so far of the same key
    joins = (key[1:] == key[:-1]) & (begin[1:] <= reached[:-1])
    piece = np.cumsum(np.append(True, ~joins)) - 1 if len(key) else np.empty(0, dtype=np.int64)
    head = group_starts(piece)
    until = np.maximum.reduceat(finish, head) if len(head) else finish
    wanted = np.ravel_multi_index((device, stage, version), shape)
    place = _last_at_or_before(key[head], begin[head], wanted, start)
    found = place >= 0
    found[found] = (key[head][place[found]] == wanted[found]) & (until[place[found]] >= end[found])
    return found | ~weighs[stage]


def _last_at_or_before(key: Ints, begin: Times, wanted: Ints, start: Times) -> Ints:
    """The last of the rows sorted by (key, begin) that does not come after (wanted, start); -1 if none does."""
    keys, times = np.concatenate([key, wanted]), np.concatenate([begin, start])
    asks = np.repeat([0, 1], [len(key), len(wanted)])
    order = np.lexsort((asks, times, keys))
    seen = np.cumsum(asks[order] == 0) - 1
    place = np.empty(len(keys), dtype=np.int64)
    place[order] = seen
    return place[len(key) :]


def readers_hold_what_they_read(run: Recount) -> Iterator[str]:
    """While a task runs, its device holds the version that it reads."""
    tasks, compute = run.program.tasks, slice(run.program.compute)
    holds = _holds(
        run, tasks.device[compute], tasks.stage[compute], tasks.version[compute], run.start[compute], run.end[compute]
    )
    yield from run.names(np.flatnonzero(~holds), "reads a version that its device does not hold")


def senders_hold_what_they_send(run: Recount) -> Iterator[str]:
    """While parameters are on their way, the device that they come from holds them.

    Of a collective in several messages it may still be receiving other parts of them.
    """
    messages, first = run.program.messages, len(run.program.tasks)
    rows = np.flatnonzero(messages.content == Content.PARAMETERS)
    start, end = run.start[first + rows], run.end[first + rows]
    arriving = (Category.COMMUNICATION,) if len(run.whole.arrived) else ()
    holds = _holds(run, messages.src[rows], messages.stage[rows], messages.step[rows] + 1, start, end, *arriving)
    yield from run.names(first + rows[~holds], "sends a version that its device does not hold")


def receivers_hold_what_arrives(run: Recount) -> Iterator[str]:
    """While messages are on their way, their receivers have room for all of them together.

    Collectives add what arrives to gradients that are there. What takes no time, as in the slot model, takes no room.
    """
    program, messages, first = run.program, run.program.messages, len(run.program.tasks)
    lands = ~((messages.content == Content.GRADIENT) & run.together)
    single = np.flatnonzero(lands & (messages.op == Op.P2P))
    rows, device = members(program, np.flatnonzero(lands & (messages.op != Op.P2P)))
    rows = np.concatenate([single, rows])
    device = np.concatenate([messages.dst[single], device]).astype(np.int64)
    whole = run.whole.program.messages
    of = run.whole.part_of[first + rows] - first
    reached = (whole.op[of] == Op.P2P) | (whole.src[of] != device)  # a root has what it hands out
    rows, device = rows[reached], device[reached]
    version = np.where(messages.content == Content.PARAMETERS, messages.step + 1, np.maximum(messages.step, 0))[rows]
    buffers, (held, begin, end) = program.buffers, _spans(run, Category.COMMUNICATION)
    columns = tuple(
        np.concatenate([getattr(buffers, name)[held], column])
        for name, column in (("device", device), ("stage", messages.stage[rows]), ("version", version))
    )
    spans = tuple(int(column.max(initial=0)) + 1 for column in columns)
    key, _, room = memory.step_function(
        np.ravel_multi_index(columns, spans),
        np.concatenate([begin, run.start[first + rows]]),
        np.concatenate([end, run.end[first + rows]]),
        np.concatenate([buffers.size[held], -messages.size[rows]]),
    )
    for short in key[room < 0].tolist():
        where, stage, _ = np.unravel_index(short, spans)
        yield f"device {where} has no room for what is on its way to it, of stage {stage}"


def activations_are_held_from_forward_to_backward(run: Recount) -> Iterator[str]:
    """What devices hold of passes is what their tasks need, recounted from the tasks."""
    program = run.program
    rows, device = program.stashes, program.tasks.device
    size = program.buffers.size[rows]
    begin, finish = (times[rows] for times in memory.buffer_spans(program.buffers, run.start, run.end))
    held = memory.step_function(program.buffers.device[rows], begin, finish, size)
    # A stage's passes weigh the same, but for those whose input the stage before has on the same device.
    forward = program.tasks_of_kind(Kind.F)
    near = np.zeros(forward.shape, dtype=np.int64)
    near[:, 1:] = device[forward[:, 1:]] == device[forward[:, :-1]]
    kind = near * program.n + program.tasks.stage[forward]
    weight, kind_of = np.zeros(2 * program.n, dtype=np.int64), np.zeros(len(program.tasks), dtype=np.int64)
    kind_of[forward] = kind
    weight[kind_of[program.buffers.begin[rows] >> 1]] = size
    needed = memory.step_function(
        device[forward].ravel(),
        run.start[forward].ravel(),
        run.end[program.gradient_tasks].ravel(),
        weight[kind].ravel(),
    )
    if any(not np.array_equal(a, b) for a, b in zip(held, needed, strict=True)):
        yield "activations are not held exactly from their forwards to their backwards"


def what_is_held_is_freed(run: Recount) -> Iterator[str]:
    """No device holds less than nothing, and none holds anything in the end."""
    begin, end = memory.buffer_spans(run.program.buffers, run.start, run.end)
    for row in np.flatnonzero(end < begin).tolist():
        category = Category(int(run.program.buffers.category[row])).name.lower()
        device = run.program.buffers.device[row]
        yield f"{category} on device {device} are freed at {end[row]}, but held from {begin[row]}"

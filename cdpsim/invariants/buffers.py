"""Laws of buffers: devices hold all values that their tasks read, that they send or receive, and that passes need."""

from collections.abc import Iterator

import numpy as np

from cdpsim.invariants.recount import Recount, receivers
from cdpsim.numeric.columns import Flags, Ints, Times, group_starts
from cdpsim.program import Category, Content, Kind, Op, Stream
from cdpsim.schedules.state import Placed
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
    if run.gathers:  # a share of a stage is not all of it; what torch gathers may come when a loss is through
        late = np.maximum(*map(run.model.size, ("loss_forward", "loss_gradient")))
        least = run.model.size("parameters") - late * (program.behaviours.gathers == "copied")
        whole = buffers.size[rows] >= least[buffers.stage[rows]]
        rows, begin, finish = rows[whole], begin[whole], finish[whole]
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
    """While a task runs, its device has the version that it reads: of its stage, and of tensors shared with another."""
    program, tasks = run.program, run.program.tasks
    task = np.arange(program.compute)
    stage = [tasks.stage[task]]
    for tie in run.once:
        shares = task[np.isin(tasks.stage[: program.compute], tie.stages[1:])]
        stage.append(np.full(len(shares), tie.stages[0]))
        task = np.append(task, shares)
    of = np.concatenate(stage)
    forward = task // program.phases * program.phases + of  # with the version of all tasks of its pass and stage
    read = tasks.device[task], of, np.where(of == tasks.stage[task], tasks.version[task], tasks.version[forward])
    there = _in_memory(run, *read, run.start[task], run.end[task])
    yield from run.report(task[~there], "reads a version that its device does not hold")


def senders_hold_what_they_send(run: Recount) -> Iterator[str]:
    """While parameters are on their way, the device that they come from has them.

    Of a collective in several messages it may still be receiving other parts of them.
    """
    messages, first = run.program.messages, len(run.program.tasks)
    handed = (messages.content == Content.PARAMETERS) & (messages.src >= 0)
    collective = run.collapsed.program.messages.op[run.collapsed.part_of[first + np.arange(len(messages))] - first]
    handed &= (collective != Op.ALL_REDUCE) & (run.shard == 1)  # which makes new ones in their place
    rows = np.flatnonzero(handed)
    start, end = run.start[first + rows], run.end[first + rows]
    arriving = (Category.COMMUNICATION,) if len(run.collapsed.arrived) else ()
    there = _in_memory(run, messages.src[rows], messages.stage[rows], messages.step[rows] + 1, start, end, *arriving)
    yield from run.report(first + rows[~there], "sends a version that its device does not hold")


def receivers_hold_what_arrives(run: Recount) -> Iterator[str]:
    """While messages are on their way, their receivers have room for all of them together.

    Collectives add what arrives to gradients, or to parameters, that are there. Messages that take no time, as in the
    slot model, take no room.
    """
    program, messages, first = run.program, run.program.messages, len(run.program.tasks)
    lands = ~(np.isin(messages.content, (Content.GRADIENT, Content.NORM)) & run.together)
    lands &= messages.stream != Stream.NVME  # which brings it to the host
    rows, device = receivers(program, np.flatnonzero(lands))
    collapsed, of = run.collapsed.program.messages, run.collapsed.part_of[first + rows] - first
    new = (collapsed.op[of] == Op.P2P) | (collapsed.src[of] != device)  # a root has what it hands out
    new &= collapsed.op[of] != Op.ALL_REDUCE
    rows, device = rows[new], device[new]
    stage = np.zeros_like(messages.stage) if program.state.streams else messages.stage  # a message may have several
    of_version = np.isin(messages.content, (Content.PARAMETERS, Content.FETCHED))
    version = np.where(of_version, messages.step + 1, np.maximum(messages.step, 0))[rows]
    if program.thrown_away:  # there is one buffer for all rounds
        version = np.zeros_like(version)
    if program.behaviours.static_receives:  # a buffer for all steps
        passed = np.isin(messages.content[rows], (Content.ACTIVATION, Content.ACTIVATION_GRADIENT))
        version = np.where(passed, 0, version)
    buffers, (arriving, begin, end) = program.buffers, _buffers_of(run, Category.COMMUNICATION)
    columns = tuple(
        np.concatenate([getattr(buffers, name)[arriving], column])
        for name, column in (("device", device), ("stage", stage[rows]), ("version", version))
    )
    if program.state.streams:
        columns = columns[0], np.zeros_like(columns[1]), columns[2]
    shape = tuple(int(column.max(initial=0)) + 1 for column in columns)
    key, _, room = memory.step_function(
        np.ravel_multi_index(columns, shape),
        np.concatenate([begin, run.start[first + rows]]),
        np.concatenate([end, run.end[first + rows]]),
        np.concatenate([buffers.size[arriving], -messages.size[rows]]),
    )
    padding = sum(part.ranks - 1 for part in run.parts) * program.n  # which falls away where it arrives
    for short in key[room < -padding].tolist():
        where, stage, _ = np.unravel_index(short, shape)
        yield f"device {where} has no room for what is on its way to it, of stage {stage}"


def activations_are_held_from_forward_to_backward(run: Recount) -> Iterator[str]:
    """Devices have the activations that their tasks need, recounted from the tasks.

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


def _lasting_buffers(run: Recount, category: Category) -> Ints:
    """Return the buffers of a category in which values live: from the start of the run, or from an update's end on.

    From its start on there are copies of what it changes.
    """
    buffers, made = run.program.buffers, run.program.buffers.begin >> 1
    updated = (made >= run.program.compute) & (made < len(run.program.tasks)) & (run.program.buffers.begin % 2 == 1)
    return np.flatnonzero((buffers.category == category) & ((buffers.begin < 0) | updated))


def _group_of(run: Recount, device: Ints) -> Ints:
    """Return the number of each device's sharding group: its place in a data rank."""
    places = run.program.devices // run.replicas
    return device // places // run.run * places + device % places


def _ranks_of_device(run: Recount) -> int:
    """Return for how many ranks of a sharding group each device stands."""
    return run.shard if run.program.fold > 1 else run.shard // run.run


def shares_make_up_the_whole(run: Recount) -> Iterator[str]:
    """At every moment the shares of a sharding group are the whole and its padding, which is less than a byte a rank.

    They are there from the start to the last update; a share of gradients is there for the update that takes it.
    """
    if run.shard == 1:
        return
    program, buffers, n = run.program, run.program.buffers, run.program.n
    tasks, update = program.tasks, run.updates
    until = np.full((program.devices, n), -1, dtype=run.end.dtype)
    np.maximum.at(until, (tasks.device[update], tasks.stage[update]), run.end[update])
    device, stage = np.nonzero(until >= 0)
    key = _group_of(run, device) * n + stage
    last = np.full(int(key.max()) + 1, run.end.max())
    np.minimum.at(last, key, until[device, stage])
    begin, end = memory.buffer_spans(buffers, run.start, run.end)
    hosted = (program.messages.content == Content.FETCHED).any()  # hosts have their parameters
    lasting = [Category.PARAMETERS] if run.gathers and not hosted else []
    for category in (Category.OPTIMIZER, *lasting):
        whole = np.zeros(len(last), dtype=np.int64)
        kind = category.name.lower()
        whole[key] = run.shares_in_group(kind, run.sizes_on(kind, device, stage), stage)
        rows = _lasting_buffers(run, category)
        of = _group_of(run, buffers.device[rows]) * n + buffers.stage[rows]
        size = buffers.size[rows] * _ranks_of_device(run)
        group, time, held = memory.step_function(of, begin[rows], end[rows], size)
        odd = (time < last[group]) & ((held < whole[group]) | (held >= whole[group] + run.shard * len(run.parts)))
        absent = np.setdiff1d(key[whole[key] > 0], group)
        for each in (*group[odd].tolist(), *absent.tolist()):
            yield f"{kind} of stage {each % n} have not {whole[each]} B in all shares"
    if run.program.state.gradients is Placed.SPLIT:
        yield from _shares_of_gradients(run)


def _shares_of_gradients(run: Recount) -> Iterator[str]:
    """Report updates for which the shares of gradients do not make up the whole."""
    buffers, tasks = run.program.buffers, run.program.tasks
    ends = np.isin(buffers.end, 2 * run.updates + 1)
    rows = np.flatnonzero((buffers.category == Category.GRADIENTS) & ends)
    update = buffers.end[rows] >> 1
    own = tasks.stage[update] == buffers.stage[rows]
    size = np.zeros(len(tasks), dtype=np.int64)
    np.add.at(size, update[own], buffers.size[rows[own]] * _ranks_of_device(run))
    step, stage, device = run.key_of(run.updates)
    whole = run.shares_in_group("gradients", run.sizes_on("gradients", device, stage), stage)
    key = step, stage, _group_of(run, device)
    order = np.lexsort(key[::-1])
    first = group_starts(*(column[order] for column in key))
    held = np.add.reduceat(size[run.updates[order]], first)
    odd = (held < whole[order[first]]) | (held >= whole[order[first]] + run.shard * len(run.parts))
    yield from run.report(run.updates[order[first[odd]]], "does not have all shares of its gradients in its group")


def runs_end_as_they_began(run: Recount) -> Iterator[str]:
    """A device has as much of a stage for its last update as it had at the start, if tasks read the newest version."""
    state, program, buffers, tasks = run.program.state, run.program, run.program.buffers, run.program.tasks
    if not run.together or state.optimizer is Placed.OWNED or program.fill or program.versions_differ:
        return
    last = run.updates[tasks.version[run.updates] == program.versions - 1]
    moment = np.zeros(2 * program.nodes + 2, dtype=np.bool_)
    moment[2 * last + 1] = True
    ends = moment[buffers.end]
    ends[buffers.kept[moment[buffers.kept_until]]] = True
    ends[program.update_buffers] = False  # which go with the update that made them
    for category in (Category.PARAMETERS, Category.OPTIMIZER):
        rows = np.flatnonzero(buffers.category == category)
        key = buffers.device[rows] * np.int64(program.n) + buffers.stage[rows]
        key, place = np.unique(key, return_inverse=True)
        had, has = (np.zeros(len(key), dtype=np.int64) for _ in range(2))
        for table, held in ((had, buffers.begin[rows] < 0), (has, ends[rows])):
            np.add.at(table, place[held], buffers.size[rows[held]])
        for row in np.flatnonzero(had != has).tolist():
            device, stage = divmod(int(key[row]), program.n)
            what = f"{category.name.lower()} of stage {stage}"
            yield f"device {device} ends with {has[row]} B of {what}, not {had[row]} B"

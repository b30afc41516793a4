"""What must hold in every run, whatever produced it: read off its program, costs and times, one law at a time.

`check.py` asks whether a program is well formed, before it runs; this asks whether a run makes sense, after. No
invariant relies on how the assembly derives things: each recounts from tasks, messages and times.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from cdpsim.columns import Ints, heads
from cdpsim.costs import Times
from cdpsim.metrics import memory
from cdpsim.paths import longest
from cdpsim.program import Category, Content, Edge, Kind, Op, Program
from cdpsim.schedules.rule import NAMED, RULES
from cdpsim.schedules.shape import Shape
from cdpsim.trace import Run

Invariant = Callable[[Run], Iterator[str]]


def violations(run: Run) -> dict[str, str]:
    """The first violation of each invariant that does not hold, by its name."""
    found = {name: next(invariant(run), None) for name, invariant in INVARIANTS.items()}
    return {name: problem for name, problem in found.items() if problem is not None}


def _names(run: Run, nodes: Ints, problem: str) -> Iterator[str]:
    """Say it of the first of some nodes."""
    for node in nodes[:1].tolist():
        yield f"{run.program.describe(node)} {problem}"


def times_are_finite(run: Run) -> Iterator[str]:
    """Nothing starts before 0, ends before it starts, or never ends."""
    fine = np.isfinite(run.start) & np.isfinite(run.end) & (run.start >= 0)
    yield from _names(run, np.flatnonzero(~fine), "has no time")


def nodes_last_their_cost(run: Run) -> Iterator[str]:
    """Whatever starts ends after its own duration, and the time in which its device stands still.

    Messages on links that they share end no earlier than that.
    """
    end = run.start + run.costs.duration
    if run.costs.calendar is not None:
        start, end = run.costs.calendar.worked(np.arange(run.program.nodes), run.start, run.costs.duration)
        yield from _names(run, np.flatnonzero(run.start != start), "starts while its device stands still")
    wrong = run.end != end
    if run.costs.wires is not None:
        shares = np.flatnonzero(np.diff(run.costs.wires.first)) + len(run.program.tasks)
        wrong[shares] = run.end[shares] < end[shares]
    yield from _names(run, np.flatnonzero(wrong), "does not last what it costs")


def links_carry_no_more_than_they_can(run: Run) -> Iterator[str]:
    """From when a message's bytes flow until a link has nothing more to do: not more than its bandwidth, by then."""
    wires, tasks = run.costs.wires, len(run.program.tasks)
    if wires is None or not len(wires.edge):
        return
    row = np.repeat(np.arange(len(run.program.messages)), np.diff(wires.first))
    begin = run.start[tasks + row] + wires.latency[row]
    order = np.lexsort((begin, wires.edge))
    row, begin, edge = row[order], begin[order], wires.edge[order]
    end, first = run.end[tasks + row], heads(edge)
    for low, high in zip(first.tolist(), [*first[1:].tolist(), len(edge)], strict=True):
        busy = slice(low, high)
        until, limit = np.maximum.accumulate(end[busy]), wires.bandwidth[edge[low]]
        idle = np.append(np.flatnonzero(begin[busy][1:] >= until[:-1]), high - low - 1)  # the last of each busy time
        last = idle[np.searchsorted(idle, np.arange(high - low))]
        sent = np.cumsum(wires.size[row[busy]])
        carried = sent[last] - sent + wires.size[row[busy]]
        room = limit * (until[last] - begin[busy])
        over = carried > room * (1 + 1e-9) + limit * 1e-12 * until[-1]
        yield from _names(run, tasks + row[busy][over], "and those after it are more than their link can carry by then")


def _waits(run: Run, kind: Edge, problem: str) -> Iterator[str]:
    edges = run.program.edges
    rows = np.flatnonzero(edges.kind == kind)
    early = rows[run.start[edges.after[rows]] < run.end[edges.before[rows]]]
    for row in early[:1].tolist():
        after, before = (run.program.describe(int(ends[row])) for ends in (edges.after, edges.before))
        yield f"{after} starts before {before} {problem}"


def data_is_there(run: Run) -> Iterator[str]:
    """Nothing starts before what it needs has been made or has arrived."""
    yield from _waits(run, Edge.DATA, "has ended, whose result it needs")


def pulled_messages_find_room(run: Run) -> Iterator[str]:
    """Nothing is pulled before the task after which there is room for it."""
    yield from _waits(run, Edge.ROOM, "has made room for it")


def barriers_hold(run: Run) -> Iterator[str]:
    """No update passes its barrier early."""
    yield from _waits(run, Edge.BARRIER, "has reached the barrier")


def streams_keep_their_order(run: Run) -> Iterator[str]:
    """Nothing starts before what its device's stream has before it."""
    yield from _waits(run, Edge.STREAM, "has left the stream of their device")


def lanes_do_one_task_at_a_time(run: Run) -> Iterator[str]:
    """In the order of the program."""
    before, after = run.program.lane_edges
    yield from _names(run, after[run.start[after] < run.end[before]], "starts while its lane is busy")


def releases_are_kept(run: Run) -> Iterator[str]:
    """No micro-batch starts before it may."""
    for (task, _), release in zip(run.program.releases, run.costs.release, strict=True):
        if run.start[task] < release:
            yield f"{run.program.describe(task)} starts at {run.start[task]}, before its release at {release}"


def nothing_waits_without_cause(run: Run) -> Iterator[str]:
    """Everything starts the moment that the last thing it waits for has ended."""
    program = run.program
    cause = np.zeros_like(run.start)
    for (task, _), release in zip(program.releases, run.costs.release, strict=True):
        cause[task] = release
    for before, after in ((program.edges.before, program.edges.after), program.lane_edges):
        np.maximum.at(cause, after, run.end[before])
    if run.costs.calendar is not None:
        cause, _ = run.costs.calendar.worked(np.arange(program.nodes), cause, run.costs.duration)
    yield from _names(run, np.flatnonzero(run.start > cause), "waits for nothing")


def passes_go_from_stage_to_stage(run: Run) -> Iterator[str]:
    """A micro-batch goes forward through all stages, then back: one after another, whatever the dependencies say."""
    program = run.program
    there, back = program.of_kind(Kind.F), program.of_kind(Kind.B)
    way = np.concatenate([there, back[:, ::-1]], axis=1)
    early = way[:, 1:][run.start[way[:, 1:]] < run.end[way[:, :-1]]]
    yield from _names(run, early, "starts before the stage before it has ended")
    if program.splits:
        weights = program.of_kind(Kind.W)
        early = weights[run.start[weights] < run.end[back]]
        yield from _names(run, early, "starts before the rest of its backward has ended")


def boundaries_cross_by_one_message(run: Run) -> Iterator[str]:
    """From one device to another exactly one message, after the task that made it and before the one that reads it."""
    program = run.program
    node = np.concatenate([program.of_kind(Kind.F), program.of_kind(Kind.B)[:, ::-1]], axis=1)
    device = program.tasks.device[node]
    crossing = node[:, 1:][device[:, 1:] != device[:, :-1]]
    messages, first = program.messages, len(program.tasks)
    rows = np.flatnonzero(messages.content <= Content.ACTIVATION_GRADIENT)
    stage = messages.stage[rows]
    phase = np.where(messages.content[rows] == Content.ACTIVATION, stage + 1, 2 * program.n - stage)
    reader = (messages.step[rows] * program.m + messages.micro_batch[rows]) * program.phases + phase
    if not np.array_equal(np.sort(reader), crossing):
        odd = np.setxor1d(reader, crossing)
        yield from _names(
            run, odd[:1] if len(odd) else reader[:1], "has not exactly one message that brings its boundary"
        )
        return
    where = (messages.src[rows] == program.tasks.device[reader - 1]) & (
        messages.dst[rows] == program.tasks.device[reader]
    )
    when = (run.end[reader - 1] <= run.start[first + rows]) & (run.end[first + rows] <= run.start[reader])
    yield from _names(run, first + rows[~(where & when)], "does not go from its maker to its reader in time")


def messages_leave_their_device(run: Run) -> Iterator[str]:
    """Point to point means two devices; a collective has several members, each once, its root among them."""
    messages, first = run.program.messages, len(run.program.tasks)
    to_itself = (messages.op == Op.P2P) & (messages.src == messages.dst)
    yield from _names(run, first + np.flatnonzero(to_itself), "goes from a device to itself")
    for row in np.flatnonzero(messages.op != Op.P2P).tolist():
        members = run.program.groups[messages.dst[row]]
        root = messages.src[row]
        if len(np.unique(members)) != len(members) or len(members) < 2 or (root >= 0 and root not in members):
            yield f"{run.program.describe(first + row)} has the members {members.tolist()} and the root {root}"


def devices_exist(run: Run) -> Iterator[str]:
    """Tasks and messages stay on the devices that the schedule has."""
    program = run.program
    outside = (program.tasks.device < 0) | (program.tasks.device >= program.devices)
    yield from _names(run, np.flatnonzero(outside), f"is on none of the {program.devices} devices")
    single = program.messages.op == Op.P2P
    ends = np.maximum(program.messages.src, np.where(single, program.messages.dst, -1))
    outside = (ends >= program.devices) | (single & (np.minimum(program.messages.src, program.messages.dst) < 0))
    yield from _names(run, len(program.tasks) + np.flatnonzero(outside), "names a device that there is not")


def _made(program: Program, end: Times) -> Times:
    """When each version of each stage first exists anywhere; theta_0 from the start."""
    update = np.flatnonzero(program.tasks.kind == Kind.U)
    made = np.full((program.n, program.steps + 1), np.inf)
    made[:, 0] = 0
    np.minimum.at(made, (program.tasks.stage[update], program.tasks.version[update]), end[update])
    return made


def versions_are_made_in_order(run: Run) -> Iterator[str]:
    """Every version of a stage is made, and none before the one that it replaces."""
    made = _made(run.program, run.end)
    for stage, version in np.argwhere(~np.isfinite(made) | (np.diff(made, prepend=0, axis=1) < 0))[:1].tolist():
        yield f"version {version} of stage {stage} is made before the one it replaces, or not at all"


def versions_exist_before_they_are_read(run: Run) -> Iterator[str]:
    """A forward starts no earlier than somebody has made what it reads."""
    tasks, made = run.program.tasks, _made(run.program, run.end)
    forward = np.flatnonzero(tasks.kind == Kind.F)
    early = run.start[forward] < made[tasks.stage[forward], tasks.version[forward]]
    yield from _names(run, forward[early], "reads a version before it exists")


def readings_are_at_most_one_step_old(run: Run) -> Iterator[str]:
    """theta_t or theta_{t-1}; where a schedule has a rule of its own, what that says."""
    tasks, compute = run.program.tasks, run.program.compute
    age = tasks.step[:compute] - tasks.version[:compute]
    own = run.request.get("rule")
    rule = NAMED.get(own) if isinstance(own, str) else None
    most = 1
    if rule is not None and rule.name not in RULES:
        most = int(rule.lags(Shape(run.program.n, run.program.m // run.request.get("replicas", 1))).max())
    wrong = np.flatnonzero((age < 0) | (age > most))
    yield from _names(run, wrong, "reads " + ("neither theta_t nor theta_{t-1}" if most == 1 else "what is too old"))


def backwards_read_what_their_forward_read(run: Run) -> Iterator[str]:
    """On the same device, and, but where the rule says otherwise, the same version."""
    program, tasks = run.program, run.program.tasks
    forward = program.of_kind(Kind.F)
    for kind in (Kind.B, Kind.W)[: 1 + program.splits]:
        backward = program.of_kind(kind)
        same = (tasks.version[forward] == tasks.version[backward]) | program.versions_differ
        same &= tasks.device[forward] == tasks.device[backward]
        yield from _names(run, backward[~same], "differs from its forward in device or version")


def updates_come_after_all_their_gradients(run: Run) -> Iterator[str]:
    """An update starts when every micro-batch has done its backward of that stage in that step."""
    program, tasks = run.program, run.program.tasks
    ready = np.zeros((program.steps, program.n), dtype=run.end.dtype)
    backward, update = program.lasts.ravel(), np.flatnonzero(tasks.kind == Kind.U)
    np.maximum.at(ready, (tasks.step[backward], tasks.stage[backward]), run.end[backward])
    early = run.start[update] < ready[tasks.step[update], tasks.stage[update]]
    yield from _names(run, update[early], "comes before a gradient that belongs into it")


def gradients_are_summed_once(run: Run) -> Iterator[str]:
    """Where gradients travel by message or wait for an update, every micro-batch counts there exactly once."""
    program, tasks, messages, first = run.program, run.program.tasks, run.program.messages, len(run.program.tasks)
    if ((messages.content == Content.STATE) & (messages.versions > 0)).any():
        return  # inside a state that travels gradients are summed where it is: there is nothing to follow
    if run.request.get("expand_collectives"):
        return  # a message of an expanded collective carries some parts of a sum, and does not say which
    gradient = messages.content == Content.GRADIENT
    giver = tasks.kind == (Kind.W if program.splits else Kind.B)
    gives = np.concatenate([giver, gradient])
    takes = np.concatenate([tasks.kind == Kind.U, gradient])
    step, stage = (np.concatenate([getattr(tasks, c), getattr(messages, c)]) for c in ("step", "stage"))
    before, after = program.edges.before, program.edges.after
    flows = gives[before] & takes[after] & (program.edges.kind == Edge.DATA)
    flows &= (step[before] == step[after]) & (stage[before] == stage[after])
    before, after = before[flows], after[flows]
    depth, _, _ = longest(
        before, after, np.ones(program.nodes, dtype=np.int64), np.zeros(program.nodes, dtype=np.int64)
    )
    sums = np.concatenate([giver, np.zeros(len(messages), dtype=bool)]).astype(np.int64)
    order = np.argsort(depth[before], kind="stable")
    for rows in np.split(order, heads(depth[before][order])[1:]):
        np.add.at(sums, after[rows], sums[before[rows]])
    update = np.unique(after[after < first])
    yield from _names(run, update[sums[update] != program.m], "does not sum every micro-batch exactly once")


def _spans(run: Run, category: Category) -> tuple[Ints, Times, Times]:
    """The buffers of a category, and from when until when they are held."""
    begin, end = memory.held(run.program.buffers, run.start, run.end)
    rows = np.flatnonzero(run.program.buffers.category == category)
    return rows, begin[rows], end[rows]


def _holds(run: Run, device: Ints, stage: Ints, version: Ints, start: Times, end: Times) -> NDArray[np.bool_]:
    """Whether devices hold versions of stages all the time from a start to an end; yes where a stage weighs nothing."""
    program, (rows, begin, finish) = run.program, _spans(run, Category.PARAMETERS)
    buffers = program.buffers
    devices = int(max(buffers.device.max(initial=0), device.max(initial=0))) + 1
    shape = (devices, program.n, program.steps + 1)
    weighs = np.zeros(program.n, dtype=bool)
    weighs[buffers.stage[rows]] = True
    key = np.ravel_multi_index((buffers.device[rows], buffers.stage[rows], buffers.version[rows]), shape)
    # What is held on from one buffer to the next of the same key counts as one.
    order = np.lexsort((begin, key))
    key, begin, finish = key[order], begin[order], finish[order]
    joins = (key[1:] == key[:-1]) & (begin[1:] <= finish[:-1])
    piece = np.cumsum(np.append(True, ~joins)) - 1 if len(key) else np.empty(0, dtype=np.int64)
    head = heads(piece)
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


def readers_hold_what_they_read(run: Run) -> Iterator[str]:
    """While a task runs, its device holds the version that it reads."""
    tasks, compute = run.program.tasks, slice(run.program.compute)
    holds = _holds(
        run, tasks.device[compute], tasks.stage[compute], tasks.version[compute], run.start[compute], run.end[compute]
    )
    yield from _names(run, np.flatnonzero(~holds), "reads a version that its device does not hold")


def senders_hold_what_they_send(run: Run) -> Iterator[str]:
    """While parameters are on their way, the device that they come from holds them."""
    messages, first = run.program.messages, len(run.program.tasks)
    rows = np.flatnonzero(messages.content == Content.PARAMETERS)
    if run.request.get("expand_collectives"):
        return  # who hands parts on may not have all of them yet
    start, end = run.start[first + rows], run.end[first + rows]
    holds = _holds(run, messages.src[rows], messages.stage[rows], messages.step[rows] + 1, start, end)
    yield from _names(run, first + rows[~holds], "sends a version that its device does not hold")


def activations_are_held_from_forward_to_backward(run: Run) -> Iterator[str]:
    """What devices hold of passes is what their tasks need, recounted from the tasks."""
    program = run.program
    rows, device = program.passes_held, program.tasks.device
    size = program.buffers.size[rows]
    begin, finish = (times[rows] for times in memory.held(program.buffers, run.start, run.end))
    held = memory.step_function(program.buffers.device[rows], begin, finish, size)
    # A stage's passes weigh the same, but for those whose input the stage before has on the same device.
    forward = program.of_kind(Kind.F)
    near = np.zeros(forward.shape, dtype=np.int64)
    near[:, 1:] = device[forward[:, 1:]] == device[forward[:, :-1]]
    kind = near * program.n + program.tasks.stage[forward]
    weight, kind_of = np.zeros(2 * program.n, dtype=np.int64), np.zeros(len(program.tasks), dtype=np.int64)
    kind_of[forward] = kind
    weight[kind_of[program.buffers.begin[rows] >> 1]] = size
    needed = memory.step_function(
        device[forward].ravel(),
        run.start[forward].ravel(),
        run.end[program.lasts].ravel(),
        weight[kind].ravel(),
    )
    if any(not np.array_equal(a, b) for a, b in zip(held, needed, strict=True)):
        yield "activations are not held exactly from their forwards to their backwards"


def what_is_held_is_freed(run: Run) -> Iterator[str]:
    """No device holds less than nothing, and none holds anything in the end."""
    begin, end = memory.held(run.program.buffers, run.start, run.end)
    for row in np.flatnonzero(end < begin)[:1].tolist():
        category = Category(int(run.program.buffers.category[row])).name.lower()
        device = run.program.buffers.device[row]
        yield f"{category} on device {device} are freed at {end[row]}, but held from {begin[row]}"


INVARIANTS: dict[str, Invariant] = {
    function.__name__: function
    for function in (
        times_are_finite,
        nodes_last_their_cost,
        links_carry_no_more_than_they_can,
        data_is_there,
        pulled_messages_find_room,
        barriers_hold,
        streams_keep_their_order,
        lanes_do_one_task_at_a_time,
        releases_are_kept,
        nothing_waits_without_cause,
        passes_go_from_stage_to_stage,
        boundaries_cross_by_one_message,
        messages_leave_their_device,
        devices_exist,
        versions_are_made_in_order,
        versions_exist_before_they_are_read,
        readings_are_at_most_one_step_old,
        backwards_read_what_their_forward_read,
        updates_come_after_all_their_gradients,
        gradients_are_summed_once,
        readers_hold_what_they_read,
        senders_hold_what_they_send,
        activations_are_held_from_forward_to_backward,
        what_is_held_is_freed,
    )
}

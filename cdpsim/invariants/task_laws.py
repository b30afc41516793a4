"""Laws of tasks: their times, the way of a micro-batch through them, and the versions and states that they use.

Times are finite, as long as their cost, and no earlier than edges, lanes and releases allow.

A micro-batch goes through the stages and back, and one message crosses each boundary. Messages are between devices that
exist, and collectives go round by round.

Versions are made in order, on their device before they are read or sent, and as old as the rule says. States travel:
all of a stage's from user to user, or its optimizer's from update to update.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cdpsim.invariants import exchanges
from cdpsim.invariants.recount import NO_NEEDS, Key, Needs, Recount, combine, members, receivers, stages_of
from cdpsim.numeric.columns import Ints, find_rows, group_numbers, group_starts, matching_pairs, sort_by
from cdpsim.program import Content, Kind, Op, Program
from cdpsim.schedules.state import Placed


def times_are_finite(run: Recount) -> Iterator[str]:
    """Every node starts at 0 or later, and both its times are finite."""
    fine = np.isfinite(run.start) & np.isfinite(run.end) & (run.start >= 0)
    yield from run.report(np.flatnonzero(~fine), "has no time")


def nodes_last_their_cost(run: Recount) -> Iterator[str]:
    """A node ends when its own duration is over, and the time in which its device stands still.

    Messages on links that they share end no earlier than that.
    """
    end = run.start + run.costs.duration
    if run.costs.calendar is not None:
        start, end = run.costs.calendar.worked(np.arange(run.program.nodes), run.start, run.costs.duration)
        yield from run.report(np.flatnonzero(run.start != start), "starts while its device stands still")
    wrong = run.end != end
    if run.costs.wires is not None:
        shares = np.flatnonzero(np.diff(run.costs.wires.first)) + len(run.program.tasks)
        wrong[shares] = run.end[shares] < end[shares]
    yield from run.report(np.flatnonzero(wrong), "does not last what it costs")


def links_carry_no_more_than_they_can(run: Recount) -> Iterator[str]:
    """From when a message's bytes flow until its link is idle, the link carries no more than its bandwidth allows."""
    wires, tasks = run.costs.wires, len(run.program.tasks)
    if wires is None or not len(wires.edge):
        return
    row = np.repeat(np.arange(len(run.program.messages)), np.diff(wires.first))
    begin = run.start[tasks + row] + wires.latency[row]
    order = np.lexsort((begin, wires.edge))
    row, begin, edge = row[order], begin[order], wires.edge[order]
    end, first = run.end[tasks + row], group_starts(edge)
    for low, high in zip(first.tolist(), [*first[1:].tolist(), len(edge)], strict=True):
        on_link, since, limit = row[low:high], begin[low:high], wires.bandwidth[edge[low]]
        until, size = np.maximum.accumulate(end[low:high]), wires.size[on_link]
        last_busy = np.append(np.flatnonzero(since[1:] >= until[:-1]), high - low - 1)  # the last of each busy time
        last = last_busy[np.searchsorted(last_busy, np.arange(high - low))]
        sent = np.cumsum(size)
        over = sent[last] - sent + size > limit * (until[last] - since) * (1 + 1e-9) + limit * 1e-12 * until[-1]
        problem = "and those after it are more than their link can carry by then"
        yield from run.report(tasks + on_link[over], problem)


def dependencies_are_kept(run: Recount) -> Iterator[str]:
    """No node starts before the nodes that the program makes it wait for have ended."""
    edges = run.program.edges
    early = np.flatnonzero(run.start[edges.after] < run.end[edges.before])
    for row in early.tolist():
        after, before = (run.program.describe(int(ends[row])) for ends in (edges.after, edges.before))
        yield f"{after} starts before {before} has ended, for which the program makes it wait"


def lanes_do_one_task_at_a_time(run: Recount) -> Iterator[str]:
    """A lane starts a task when the one before it, in the order of the program, has ended."""
    before, after = run.program.lane_edges
    yield from run.report(after[run.start[after] < run.end[before]], "starts while its lane is busy")


def releases_are_kept(run: Recount) -> Iterator[str]:
    """No micro-batch starts before its release."""
    for (task, _), release in zip(run.program.releases, run.costs.release, strict=True):
        if run.start[task] < release:
            yield f"{run.program.describe(task)} starts at {run.start[task]}, before its release at {release}"


def _successive_tasks(program: Program) -> tuple[Ints, Ints, Ints]:
    """Return pairs of successive tasks of a pass, forward through all stages and back: (task, next task, result).

    The result is the task whose end hands on what the next task needs.
    """
    way = np.concatenate([program.tasks_of_kind(Kind.F), program.tasks_of_kind(Kind.B)[:, ::-1]], axis=1)
    before, after = way[:, :-1], way[:, 1:]
    return before, after, _results(program)[before]


def _results(program: Program) -> Ints:
    """Return the task whose end hands on each compute task's result: of an undivided backward its second part."""
    result = np.arange(program.compute)
    if program.undivided is not None:
        rows = program.undivided
        result[program.tasks_of_kind(Kind.B)[rows]] = program.tasks_of_kind(Kind.W)[rows]
    return result


def boundary_readers(program: Program) -> tuple[Ints, Ints]:
    """Return the messages of boundaries, and the task that reads each."""
    messages = program.messages
    rows = np.flatnonzero(messages.content <= Content.ACTIVATION_GRADIENT)
    stage = messages.stage[rows]
    phase = np.where(messages.content[rows] == Content.ACTIVATION, stage + 1, 2 * program.n - stage)
    reader = program.find_pass(messages.step[rows], messages.micro_batch[rows]) * program.phases + phase
    return len(program.tasks) + rows, reader


def pass_needs(run: Recount) -> Needs:
    """Return the needs from task to task on one device, and from a task by a message to the next one on another."""
    program = run.collapsed.program
    before, after, made = _successive_tasks(program)
    near = program.tasks.device[after] == program.tasks.device[before]
    message, reader = boundary_readers(program)
    sent, read = Needs(_results(program)[reader - 1], message), Needs(message, reader)
    needs = [Needs(made[near], after[near]), sent, read]
    if program.splits:
        needs.append(Needs(program.tasks_of_kind(Kind.B).ravel(), program.tasks_of_kind(Kind.W).ravel()))
    return combine(*needs)


def passes_go_from_stage_to_stage(run: Recount) -> Iterator[str]:
    """A micro-batch goes forward through all stages, then back, one after another, also without any dependency."""
    program = run.program
    _, after, made = _successive_tasks(program)
    yield from run.report(after[run.start[after] < run.end[made]], "starts before the stage before it has ended")
    if program.splits:
        back, weights = program.tasks_of_kind(Kind.B), program.tasks_of_kind(Kind.W)
        early = weights[run.start[weights] < run.end[back]]
        yield from run.report(early, "starts before the rest of its backward has ended")


def boundaries_cross_by_one_message(run: Recount) -> Iterator[str]:
    """From one device to another exactly one message, after the task that made it and before the one that reads it."""
    program, device = run.program, run.program.tasks.device
    before, after, _ = _successive_tasks(program)
    crossing = after[device[after] != device[before]]
    message, reader = boundary_readers(program)
    if not np.array_equal(np.sort(reader), crossing):
        odd = np.setxor1d(reader, crossing)
        yield from run.report(odd if len(odd) else reader, "has not exactly one message that brings its boundary")
        return
    rows, made = message - len(program.tasks), _results(program)[reader - 1]
    where = (program.messages.src[rows] == device[reader - 1]) & (program.messages.dst[rows] == device[reader])
    when = (run.end[made] <= run.start[message]) & (run.end[message] <= run.start[reader])
    yield from run.report(message[~(where & when)], "does not go from its maker to its reader in time")


def backwards_read_what_their_forward_read(run: Recount) -> Iterator[str]:
    """A backward reads on its forward's device, and, but where the rule says otherwise, the same version."""
    program, tasks = run.program, run.program.tasks
    forward = program.tasks_of_kind(Kind.F)
    for kind in (Kind.B, Kind.W)[: 1 + program.splits]:
        backward = program.tasks_of_kind(kind)
        same = (tasks.version[forward] == tasks.version[backward]) | program.versions_differ
        same &= tasks.device[forward] == tasks.device[backward]
        yield from run.report(backward[~same], "differs from its forward in device or version")


def messages_leave_their_device(run: Recount) -> Iterator[str]:
    """Point to point means two devices; a collective has several members, each once, its root among them."""
    messages, first = run.program.messages, len(run.program.tasks)
    fetched = messages.content == Content.FETCHED  # from the device's host
    to_itself = (messages.op == Op.P2P) & (messages.src == messages.dst) & ~fetched
    yield from run.report(first + np.flatnonzero(to_itself), "goes from a device to itself")
    for row in np.flatnonzero(messages.op != Op.P2P).tolist():
        members, root = run.program.ranks_of(messages.dst[row]), messages.src[row]
        if len(np.unique(members)) != len(members) or len(members) < 2 or (root >= 0 and root not in members):
            yield f"{run.program.describe(first + row)} has the members {members.tolist()} and the root {root}"


def devices_exist(run: Recount) -> Iterator[str]:
    """Tasks and messages stay on the devices that the schedule has."""
    program, messages = run.program, run.program.messages
    outside = (program.tasks.device < 0) | (program.tasks.device >= program.devices)
    yield from run.report(np.flatnonzero(outside), f"is on none of the {program.devices} devices")
    single = messages.op == Op.P2P
    ends = np.maximum(messages.src, np.where(single, messages.dst, -1))
    outside = (ends >= program.devices) | (single & (np.minimum(messages.src, messages.dst) < 0))
    yield from run.report(len(program.tasks) + np.flatnonzero(outside), "names a device that there is not")


def collectives_go_round_by_round(run: Recount) -> Iterator[str]:
    """A collective sends what an algorithm sends; both ends of a message are done with its channel's rounds before."""
    collapsed, messages, first = run.collapsed, run.program.messages, len(run.program.tasks)
    piece = np.flatnonzero(collapsed.number[collapsed.part_of] >= 0)
    node, rows = collapsed.part_of[piece], piece - first
    turn, channel = collapsed.turn[rows], collapsed.channel[rows]
    if (turn < 0).any():
        yield f"{collapsed.program.describe(int(node[turn < 0][0]))} goes by no algorithm that it may"
        return
    ends = (node * (channel.max(initial=0) + 1) + channel) * run.program.devices
    end = np.concatenate([ends + messages.src[rows], ends + messages.dst[rows]])
    both = np.tile(piece, 2)
    early = run.starts_early(end, np.tile(turn, 2), both, np.ones(len(both), dtype=np.bool_))
    yield from run.report(both[early], "starts before one of its ends has done the rounds before")


def _carriers(run: Recount, *ops: Op) -> Ints:
    """Return the rows of messages that carry parameters by the given operations."""
    messages = run.collapsed.program.messages
    return np.flatnonzero((messages.content == Content.PARAMETERS) & np.isin(messages.op, ops))


def _brought(run: Recount) -> tuple[Ints, Ints]:
    """Return messages that bring a version to stay, each with its receivers."""
    stays = run.program.state.parameters is Placed.COPIED
    together = (Op.BROADCAST, Op.ALL_GATHER) if stays else ()
    return receivers(run.collapsed.program, _carriers(run, Op.P2P, *together))


def _needs_of_versions(run: Recount, node: Ints, key: Key, *, share: bool = False) -> Needs:
    """Return the needs of nodes that need a (stage, version, device); -1 where their device never gets it.

    A version is made there or brought there, and the earlier of both counts. Of a state that travels, it may be made
    anywhere. Of a split one a device makes its `share`, and all of it is brought there by all messages that carry some.
    """
    tasks, collapsed, update = run.program.tasks, run.collapsed, run.updates
    messages, (came, receiver) = collapsed.program.messages, _brought(run)
    place, stage = stages_of(messages, came)
    came, receiver = came[place], receiver[place]
    made = np.flatnonzero(key[1] > 0)  # theta_0 is there from the start
    if run.shard > 1 and not share:
        wanted = tuple(column[made] for column in key)
        brings, of = matching_pairs((stage, run.versions_of(messages.step[came]), receiver), wanted)
        lacks = np.setdiff1d(np.arange(len(made)), of)
        lack = Needs(np.full(len(lacks), -1), node[made[lacks]])
        return combine(Needs(len(tasks) + came[brings], node[made[of]]), lack)
    source = np.concatenate([update, len(tasks) + came])
    order = np.argsort(collapsed.end[source], kind="stable")
    if share:
        order = order[order < len(update)]
    there = (
        np.concatenate([tasks.stage[update], stage])[order],
        np.concatenate([tasks.version[update], run.versions_of(messages.step[came])])[order],
        np.concatenate([tasks.device[update], receiver])[order],
    )
    needed = 2 if run.travels else 3
    row = find_rows(there[:needed], tuple(column[made] for column in key[:needed]))
    return Needs(np.append(source[order], -1)[row], node[made])


def broadcast_needs(run: Recount) -> Needs:
    """Return the needs of readers for broadcasts: of a version the first is for forwards, the second for backwards."""
    program, start = run.collapsed.program, run.collapsed.start
    messages, tasks, first, rows = program.messages, program.tasks, len(program.tasks), _carriers(run, Op.BROADCAST)
    rows = rows[np.argsort(start[first + rows], kind="stable")]
    rows = rows[sort_by(messages.stage[rows], messages.step[rows] + 1)]
    begin = group_starts(messages.stage[rows], messages.step[rows])
    turn = np.arange(len(rows)) - begin[group_numbers(begin, len(rows))]
    task = np.arange(program.compute)
    wanted = tasks.stage[task], tasks.version[task] - 1, (tasks.kind[task] != Kind.F).astype(np.int64)
    row, reader = matching_pairs((messages.stage[rows], messages.step[rows], turn), wanted)
    return Needs(first + rows[row], task[reader])


def reader_needs(run: Recount) -> Needs:
    """Return the needs of tasks that read a version: forwards, and backwards where they read another one."""
    tasks, task = run.program.tasks, np.arange(run.program.compute)
    if run.handed_out and len(_carriers(run, Op.BROADCAST)):
        needs = broadcast_needs(run)
        without = np.setdiff1d(task, needs.after)
        return combine(needs, Needs(np.full(len(without), -1), without))
    if run.gathers:
        return combine(exchanges.gather_needs(run), exchanges.fetch_needs(run))
    if not run.program.versions_differ:
        task = run.program.tasks_of_kind(Kind.F).ravel()
    needs = _needs_of_versions(run, task, (tasks.stage[task], tasks.version[task], tasks.device[task]))
    if run.program.thrown_away and run.shard == 1:  # a worker alone takes all stages over at once, as a gather's does
        update = run.updates
        made = tasks.version[update], tasks.device[update]
        into, of = matching_pairs(made, (tasks.version[task], tasks.device[task]))
        needs = combine(needs, Needs(update[into], task[of]))
    if run.program.state.parameters is Placed.COPIED:  # a sender takes part in the message before it reads the version
        messages, out = run.collapsed.program.messages, _carriers(run, Op.BROADCAST)
        handed_out = messages.stage[out], run.versions_of(messages.step[out]), messages.src[out]
        row, of = matching_pairs(handed_out, (tasks.stage[task], tasks.version[task], tasks.device[task]))
        needs = combine(needs, Needs(len(tasks) + out[row], task[of]))
    return combine(needs, exchanges.gathered_step_needs(run), exchanges.fetch_needs(run))


def base_needs(run: Recount) -> Needs:
    """Return the needs of updates for the version that they start from."""
    tasks, update = run.program.tasks, run.updates
    key = tasks.stage[update], run.program.base, tasks.device[update]
    return _needs_of_versions(run, update, key, share=run.shard > 1)


def sender_needs(run: Recount) -> Needs:
    """Return the needs of messages that carry a version away, or the shares of all their members."""
    program, messages, first = run.collapsed.program, run.collapsed.program.messages, len(run.program.tasks)
    rows = _carriers(run, Op.P2P, Op.BROADCAST)
    sent = _needs_of_versions(
        run, first + rows, (messages.stage[rows], run.versions_of(messages.step[rows]), messages.src[rows])
    )
    row, device = members(program, _carriers(run, Op.ALL_GATHER))
    place, stage = stages_of(messages, row)
    key = stage, run.versions_of(messages.step[row[place]]), device[place]
    return combine(sent, _needs_of_versions(run, first + row[place], key, share=True))


def versions_are_made_in_order(run: Recount) -> Iterator[str]:
    """Every version of a stage is made, and none before its device has the one that it replaces."""
    tasks, made = run.program.tasks, np.zeros((run.program.n, run.program.versions), dtype=np.bool_)
    ended = run.updates[np.isfinite(run.end[run.updates])]
    made[:, 0] = True
    made[tasks.stage[ended], tasks.version[ended]] = True
    for stage, version in np.argwhere(~made).tolist():
        yield f"version {version} of stage {stage} is never made"
    lack = "replaces a version that its device never gets"
    yield from run.report_unmet(base_needs(run), "has ended, whose version it replaces", lack)


def versions_exist_before_they_are_read(run: Recount) -> Iterator[str]:
    """A task starts when the version that it reads has been made on its device, or has arrived there."""
    lack = "reads a version that its device never gets"
    yield from run.report_unmet(reader_needs(run), "has ended, from which it has the version that it reads", lack)


def versions_come_once(run: Recount) -> Iterator[str]:
    """A version that stays on a device comes there by one message."""
    program, messages = run.collapsed.program, run.collapsed.program.messages
    rows = _carriers(run, Op.P2P)
    if program.state.parameters is Placed.COPIED:
        keys = np.stack([messages.stage[rows], messages.step[rows], messages.dst[rows]])
        again = np.setdiff1d(np.arange(len(rows)), np.unique(keys, axis=1, return_index=True)[1])
        problem = "brings what another message brings, too"
        yield from (f"{program.describe(int(node))} {problem}" for node in len(program.tasks) + rows[again])


def versions_are_sent_after_they_are_made(run: Recount) -> Iterator[str]:
    """Parameters leave a device when they have been made there, or have arrived there."""
    lack = "carries a version that its sender never gets"
    yield from run.report_unmet(sender_needs(run), "has ended, from which it has the version that it carries", lack)


def readings_are_as_old_as_the_rule_says(run: Recount) -> Iterator[str]:
    """A task reads theta_{t - lag}, or theta_0, with the lag that the request's rule has for forwards or backwards."""
    program, compute = run.program, slice(run.program.compute)
    tasks, shape, rule = program.tasks, run.request.shape, run.request.rule
    if program.thrown_away:
        yield from _read_what_the_round_before_brought(run)
        return
    lags = np.stack([rule.lags(shape), rule.backward_lags(shape)])
    back = (tasks.kind[compute] != Kind.F).astype(np.int64)
    lag = lags[back, np.repeat(run.number_in_replica, program.phases), tasks.stage[compute]]
    newest = tasks.step[compute]
    if program.averaged is not None:  # then a step makes several
        newest = np.maximum.accumulate(np.append(0, run.last_versions))[newest]
    wrong = np.flatnonzero(tasks.version[compute] != np.maximum(newest - lag, 0))
    yield from run.report(wrong, "reads another version than its rule says")


def _read_what_the_round_before_brought(run: Recount) -> Iterator[str]:
    """Report tasks that read another version than the last of two steps before, or in warm-up of the step before."""
    tasks, compute = run.program.tasks, run.program.compute
    last = np.zeros(run.program.steps + 2, dtype=np.int64)  # the last version made in each step, from two before 0 on
    np.maximum.at(last, tasks.step[compute:] + 2, tasks.version[compute:])
    step = tasks.step[:compute]
    brought = last[step + (step <= run.request.shape.warm_up)]
    wrong = np.flatnonzero(tasks.version[:compute] != brought)
    yield from run.report(wrong, "reads another version than its round begins with")


class StatePath(NamedTuple):
    """The uses of all stages, stage after stage, in order, and the messages that move a stage's state between them."""

    use: Ints
    stage: Ints
    message: Ints  # that brings the state for each use, -1 where it is there
    after: Ints  # of each update, the place of the use that it follows
    astray: Ints  # messages and updates that are not where the state is

    def needs(self, updates: Ints) -> Needs:
        """Return the needs from use to use, by message where their devices differ; updates come between two of them."""
        brought = np.flatnonzero(self.message >= 0)
        goes_on = np.append(self.stage[1:] == self.stage[:-1], False)
        consumer = np.append(np.where(self.message[1:] >= 0, self.message[1:], self.use[1:]), -1)
        inner, onward = np.flatnonzero(goes_on), np.flatnonzero(goes_on[self.after])
        return combine(
            Needs(self.message[brought], self.use[brought]),
            Needs(self.use[inner], consumer[inner]),
            Needs(self.use[self.after], updates),
            Needs(updates[onward], consumer[self.after[onward]]),
        )


def state_path(run: Recount) -> StatePath:
    """Find the path of each state: by the order that the schedule declares, or else by times."""
    tasks, updates = run.program.tasks, run.updates
    use = np.arange(run.program.compute)
    if run.position is not None:
        when, until = run.position, run.position[run.barriers]
    else:
        when, until = run.start[use], run.start[updates]
    rank = np.unique(np.concatenate([when, until]), return_inverse=True)[1]
    use = np.lexsort((use, rank[: len(use)], tasks.stage[use]))
    stage, device = tasks.stage[use], tasks.device[use]
    if run.program.barrier:
        span = np.int64(len(rank) + 1)
        last = tasks.stage[updates] * span + rank[len(use) :]
        after = np.searchsorted(stage * span + rank[use], last, "left" if run.position is None else "right") - 1
    else:
        after = np.argsort(use)[run.anchors]
    message, astray = _moves(run, use)
    lost = updates[device[after] != tasks.device[updates]]
    return StatePath(use, stage, message, after, np.concatenate([astray, lost]))


def _moves(run: Recount, use: Ints) -> tuple[Ints, Ints]:
    """Return the message that brings the state for each use, and messages from or to a device that does not use it."""
    messages, tasks, first = run.program.messages, run.program.tasks, len(run.program.tasks)
    rows = np.flatnonzero((messages.content == Content.STATE) & (messages.versions > 0))
    rows = rows[np.argsort(messages.stage[rows], kind="stable")]
    stage, device = tasks.stage[use], tasks.device[use]
    begin = group_starts(stage)
    moves = np.append(True, device[1:] != device[:-1])
    moves[begin] = np.isin(stage[begin], messages.stage[rows[messages.step[rows] < 0]])
    at = np.flatnonzero(moves)
    brings = np.full(len(use), -1)
    if not np.array_equal(stage[at], messages.stage[rows]):
        return brings, first + rows if len(rows) else use[at]
    brings[at] = first + rows
    comes_from = np.where(np.isin(at, begin), messages.src[rows], device[at - 1])
    return brings, first + rows[(messages.dst[rows] != device[at]) | (messages.src[rows] != comes_from)]


def optimizer_needs(run: Recount) -> tuple[Needs, Ints]:
    """Return the needs of optimizer states that move from update to update; and messages that move one elsewhere."""
    messages, tasks, first = run.collapsed.program.messages, run.program.tasks, len(run.program.tasks)
    rows = np.flatnonzero((messages.content == Content.STATE) & (messages.versions == 0))
    update = run.updates
    key = tasks.stage[update], tasks.step[update], tasks.device[update]
    left = find_rows(key, (messages.stage[rows], messages.step[rows], messages.src[rows]))
    next_one = find_rows(key, (messages.stage[rows], messages.step[rows] + 1, messages.dst[rows]))
    both = (left >= 0) & (next_one >= 0)
    node, before, after = first + rows[both], update[left[both]], update[next_one[both]]
    return combine(Needs(before, node), Needs(node, after)), first + rows[~both]


def state_needs(run: Recount) -> Needs:
    """Return the needs of nodes for a state, and of states for nodes."""
    return combine(optimizer_needs(run)[0], state_path(run).needs(run.updates) if run.travels else NO_NEEDS)


def states_go_from_user_to_user(run: Recount) -> Iterator[str]:
    """A state that travels is with one user at a time, and its updates are where it is."""
    if run.travels:
        path = state_path(run)
        yield from run.report(path.astray, "is not where the state of its stage is")
        yield from run.report_unmet(path.needs(run.updates), "is done with the state of its stage")


def optimizer_states_follow_updates(run: Recount) -> Iterator[str]:
    """An optimizer state leaves an update's device after that update, and reaches the next one's device before it."""
    needs, astray = optimizer_needs(run)
    for node in astray.tolist():
        yield f"{run.collapsed.program.describe(node)} does not go from an update to the next"
    yield from run.report_unmet(needs, "has ended, between which and it the optimizer state moves")

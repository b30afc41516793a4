"""Laws of passes and messages.

A micro-batch goes through the stages and back, and one message crosses each boundary. Messages are between devices that
exist, and collectives go round by round.
"""

from collections.abc import Iterator

import numpy as np

from cdpsim.invariants.recount import Needs, Recount, combine
from cdpsim.numeric.columns import Ints
from cdpsim.program import Content, Kind, Op, Program


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

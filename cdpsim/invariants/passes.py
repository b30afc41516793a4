"""Laws of passes: a micro-batch's way through the stages and back, and the messages of its boundaries."""

from collections.abc import Iterator

import numpy as np

from cdpsim.invariants.recount import Needs, Recount, combine
from cdpsim.numeric.columns import Ints
from cdpsim.program import Content, Kind, Program


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

"""A micro-batch's way through the stages and back, and the messages of its boundaries."""

from collections.abc import Iterator

import numpy as np

from cdpsim.invariants.needs import Needs, combine
from cdpsim.invariants.recount import Recount
from cdpsim.numeric.columns import Ints
from cdpsim.program import Content, Kind, Program


def way(program: Program) -> Ints:
    """A row for each pass: forward through all stages, then back."""
    return np.concatenate([program.tasks_of_kind(Kind.F), program.tasks_of_kind(Kind.B)[:, ::-1]], axis=1)


def handing_on(program: Program) -> Ints:
    """The task whose end hands on each compute task's result: of an undivided backward in two parts the second."""
    result = np.arange(program.compute)
    if program.undivided is not None:
        some = program.undivided
        result[program.tasks_of_kind(Kind.B)[some]] = program.tasks_of_kind(Kind.W)[some]
    return result


def boundaries(program: Program) -> tuple[Ints, Ints]:
    """The messages of boundaries, and the task that reads each."""
    messages = program.messages
    rows = np.flatnonzero(messages.content <= Content.ACTIVATION_GRADIENT)
    stage = messages.stage[rows]
    phase = np.where(messages.content[rows] == Content.ACTIVATION, stage + 1, 2 * program.n - stage)
    reader = program.find_pass(messages.step[rows], messages.micro_batch[rows]) * program.phases + phase
    return len(program.tasks) + rows, reader


def needs(run: Recount) -> Needs:
    """From task to task on one device, from a task by a message to the next one on another."""
    program = run.whole.program
    node, made = way(program), handing_on(program)
    near = program.tasks.device[node[:, 1:]] == program.tasks.device[node[:, :-1]]
    message, reader = boundaries(program)
    both = [Needs(made[node[:, :-1][near]], node[:, 1:][near]), Needs(made[reader - 1], message)]
    both.append(Needs(message, reader))
    if program.splits:
        both.append(Needs(program.tasks_of_kind(Kind.B).ravel(), program.tasks_of_kind(Kind.W).ravel()))
    return combine(*both)


def passes_go_from_stage_to_stage(run: Recount) -> Iterator[str]:
    """A micro-batch goes forward through all stages, then back: one after another, whatever the dependencies say."""
    program = run.program
    node, made = way(program), handing_on(program)
    early = node[:, 1:][run.start[node[:, 1:]] < run.end[made[node[:, :-1]]]]
    yield from run.names(early, "starts before the stage before it has ended")
    if program.splits:
        back, weights = program.tasks_of_kind(Kind.B), program.tasks_of_kind(Kind.W)
        early = weights[run.start[weights] < run.end[back]]
        yield from run.names(early, "starts before the rest of its backward has ended")


def boundaries_cross_by_one_message(run: Recount) -> Iterator[str]:
    """From one device to another exactly one message, after the task that made it and before the one that reads it."""
    program = run.program
    node, made, device = way(program), handing_on(program), program.tasks.device
    crossing = node[:, 1:][device[node[:, 1:]] != device[node[:, :-1]]]
    message, reader = boundaries(program)
    if not np.array_equal(np.sort(reader), crossing):
        odd = np.setxor1d(reader, crossing)
        yield from run.names(odd if len(odd) else reader, "has not exactly one message that brings its boundary")
        return
    rows = message - len(program.tasks)
    where = (program.messages.src[rows] == device[reader - 1]) & (program.messages.dst[rows] == device[reader])
    when = (run.end[made[reader - 1]] <= run.start[message]) & (run.end[message] <= run.start[reader])
    yield from run.names(message[~(where & when)], "does not go from its maker to its reader in time")


def backwards_read_what_their_forward_read(run: Recount) -> Iterator[str]:
    """On the same device, and, but where the rule says otherwise, the same version."""
    program, tasks = run.program, run.program.tasks
    forward = program.tasks_of_kind(Kind.F)
    for kind in (Kind.B, Kind.W)[: 1 + program.splits]:
        backward = program.tasks_of_kind(kind)
        same = (tasks.version[forward] == tasks.version[backward]) | program.versions_differ
        same &= tasks.device[forward] == tasks.device[backward]
        yield from run.names(backward[~same], "differs from its forward in device or version")

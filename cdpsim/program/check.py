"""The rules that every program keeps, checked in one place, with errors that name the task."""

from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Flags, Ints, group_numbers, group_starts, sort_by
from cdpsim.numeric.paths import cycle_text, find_cycle
from cdpsim.program import Category, Content, EdgeKind, Kind, Program


def check_program(program: Program) -> None:
    """Refuse a program that breaks a rule, naming the first task that does; a deadlock is shown as its cycle."""
    check_columns(program)
    if find_cycle(*program.waits(), program.nodes):
        refuse_deadlock(program)


def check_columns(program: Program) -> None:
    """Check all rules but that there is no deadlock, which the engines notice by themselves."""
    for problem in _broken_rules(program):
        raise RequestError("program", problem)


# The rules yield a line for every row that breaks them. The first line is the error, and the code behind it may assume
# nothing: each rule relies on those before it.
def _broken_rules(program: Program) -> Iterator[str]:
    for rule in (
        _check_layout,
        _check_updates,
        _check_edges,
        _check_lanes,
        _check_passes,
        _check_versions,
        _check_gradients,
        _check_messages,
        _check_buffers,
    ):
        yield from rule(program)


def _broken_rows(wrong: Flags | Ints) -> list[int]:
    return np.flatnonzero(wrong).tolist()


def _check_layout(program: Program) -> Iterator[str]:
    """Require each task once, in its place: by step, micro-batch and phase, the same phases for all micro-batches."""
    tasks, compute, phases = program.tasks, program.compute, program.phases
    first = program.first_pass
    if compute != program.passes * phases:
        many = ", ".join(map(str, program.counts.tolist())) if program.m is None else program.m
        yield f"{compute} compute tasks do not go into {program.steps} steps of {many} micro-batches"
    step = group_numbers(first[:-1], program.passes)
    for name, expected in (
        ("step", np.repeat(step, phases)),
        ("micro_batch", np.repeat(np.arange(program.passes, dtype=np.int32) - first[step], phases)),
        ("kind", np.tile(tasks.kind[:phases], program.passes)),
        ("stage", np.tile(tasks.stage[:phases], program.passes)),
    ):
        for task in _broken_rows(getattr(tasks, name)[:compute] != expected):
            yield f"{program.describe(task)} stands where a task of {name} {expected[task]} belongs"
    for kind in (Kind.F, Kind.B, Kind.W)[: phases // max(program.n, 1)]:
        count = np.bincount(tasks.stage[:phases][tasks.kind[:phases] == kind], minlength=program.n)
        for stage in _broken_rows(count != 1):
            yield f"a micro-batch has {count[stage]} tasks {kind.name} of stage {stage}; it needs one"


def _check_updates(program: Program) -> Iterator[str]:
    """Require that a device makes a version of a stage once."""
    tasks, compute = program.tasks, program.compute
    for row in _broken_rows(tasks.kind[compute:] != Kind.U):
        yield f"{program.describe(compute + row)} stands among the updates but has no place in a lane"
    columns = (tasks.version[compute:], tasks.stage[compute:], tasks.device[compute:])
    order = sort_by(*columns)
    for again in np.delete(order, group_starts(*(column[order] for column in columns))).tolist():
        yield f"{program.describe(compute + again)} stands there twice; a device makes a version of a stage once"


def _check_edges(program: Program) -> Iterator[str]:
    """Require that both ends of an edge exist; and of data, that they are tasks or messages."""
    for name in ("before", "after"):
        ends = getattr(program.edges, name)
        for row in _broken_rows((ends < 0) | (ends >= program.nodes)):
            yield f"dependency {row} names node {ends[row]} as its {name!r}, but there are {program.nodes} nodes"
        for row in _broken_rows((program.edges.kind == EdgeKind.DATA) & (ends >= program.message_nodes.stop)):
            problem = f"names {program.describe(int(ends[row]))} as its {name!r}, which is no task and no message"
            yield f"dependency {row} is of data and {problem}"


def _check_lanes(program: Program) -> Iterator[str]:
    """Require one place for every compute task, in a lane of its device, and for all updates or for none."""
    tasks, lane_tasks = program.tasks, program.lane_tasks
    needs = (tasks.kind != Kind.U) | (len(lane_tasks) > program.compute)
    count = np.bincount(lane_tasks, minlength=len(tasks))
    for task in _broken_rows(count != needs):
        places = f"{count[task]} places in lanes; it needs {'one' if needs[task] else 'none'}"
        yield f"{program.describe(task)} has {places}"
    moves = group_starts(tasks.device[lane_tasks], tasks.lane[lane_tasks])
    for task in lane_tasks[np.setdiff1d(moves, program.lane_start)].tolist():
        yield f"{program.describe(task)} is on device {tasks.device[task]} but in another device's lane"


def _check_passes(program: Program) -> Iterator[str]:
    """Require that a backward runs on its forward's device and, unless the rule differs, reads the same version."""
    n = program.n
    for third, kind in enumerate((Kind.B, Kind.W)[: 1 + program.splits], start=1):
        for name in ("device", "version")[: 2 - program.versions_differ]:
            column = getattr(program.tasks, name)
            of_pass = column[: program.compute].reshape(-1, program.phases)
            apart = of_pass[:, :n] != of_pass[:, third * n : (third + 1) * n][:, ::-1]
            for row, stage in np.argwhere(apart).tolist():
                f, b = (int(program.tasks_of_kind(each)[row, stage]) for each in (Kind.F, kind))
                problem = f"differ in {name}: {column[f]} and {column[b]}"
                yield f"{program.describe(f)} and {program.describe(b)} {problem}"


def _check_versions(program: Program) -> Iterator[str]:
    """Require that an update makes every version that is read or started from, in an earlier step."""
    tasks, span = program.tasks, program.n
    compute, update = slice(program.compute), slice(program.compute, None)
    made = np.full(program.versions * span, program.steps, dtype=tasks.step.dtype)  # the step that makes each version
    made[:span] = -1
    np.minimum.at(made, tasks.version[update] * span + tasks.stage[update], tasks.step[update])

    def missing(version: Ints, nodes: slice, before: Ints) -> list[int]:
        made_in = made[np.clip(version, 0, program.versions - 1) * span + tasks.stage[nodes]]
        return _broken_rows((version < 0) | (version >= program.versions) | (made_in >= before))

    for task in missing(tasks.version[compute], compute, tasks.step[compute]):
        yield f"{program.describe(task)} reads version {tasks.version[task]}, which does not exist for it"
    in_its_step = program.base < tasks.version[update]  # versions of one step are made one after another
    for row in missing(program.base, update, tasks.step[update] + in_its_step):
        name = program.describe(program.compute + row)
        yield f"{name} starts from version {program.base[row]}, which does not exist for it"
    means = program.average_of(tasks.version[update]) >= 0  # which take no gradients
    for row in _broken_rows((program.first_step < 0) | (program.first_step > tasks.step[update] + means)):
        name = program.describe(program.compute + row)
        yield f"{name} takes gradients from step {program.first_step[row]} on, after its own step"


def _check_gradients(program: Program) -> Iterator[str]:
    """Require an update of each stage in each step, but for those at the end that are thrown away."""
    tasks = program.tasks
    updated = np.zeros((program.steps, program.n), dtype=bool)
    updated[program.updated :] = True
    updated[tasks.step[program.compute :], tasks.stage[program.compute :]] = True
    for step, stage in np.argwhere(~updated).tolist():
        of_it = (tasks.kind == Kind.B) & (tasks.step == step) & (tasks.stage == stage)
        yield f"the gradient of {program.describe(int(np.flatnonzero(of_it)[0]))} never reaches an update"


def _check_messages(program: Program) -> Iterator[str]:
    """Require that every message carries something that exists, and that a node waits for it.

    Where a last round is thrown away, no node comes behind what the last communication brings.
    """
    messages, edges, first = program.messages, program.edges, len(program.tasks)
    unread, unsent = (np.ones(len(messages), dtype=bool) for _ in range(2))
    data = edges.kind == EdgeKind.DATA
    last = (messages.step == program.updated - 1) & (messages.content == Content.PARAMETERS) & (program.thrown_away > 0)
    for missing, ends in ((unread, edges.before), (unsent, edges.after)):
        missing[ends[data & (ends >= first)] - first] = False
    for wrong, problem in (
        (
            (messages.stages < 1) | (messages.stage + messages.stages > program.n),
            "carries something of stages that are not there",
        ),
        (unread & ~last, "has no reader: no node waits for it"),
        (unsent & (messages.step >= 0), "has nothing to send: no task makes its content"),
    ):
        for row in _broken_rows(wrong):
            yield f"{program.describe(first + row)} {problem}"


def _check_buffers(program: Program) -> Iterator[str]:
    """Require that every buffer is freed."""
    buffers = program.buffers
    for row in _broken_rows(buffers.end < 0):
        category = Category(int(buffers.category[row])).name.lower()
        yield f"{category} of stage {buffers.stage[row]} on device {buffers.device[row]} are never freed"


def refuse_deadlock(program: Program) -> NoReturn:
    """Raise the error that shows the cycle."""
    cycle = find_cycle(*program.waits(), program.nodes)
    raise RequestError("schedule deadlocks", cycle_text([program.describe(node) for node in cycle]))

"""The rules that every program keeps, checked in one place, with errors that name the task."""

from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, group_numbers, group_starts, sort_by
from cdpsim.numeric.paths import successors
from cdpsim.program import Category, EdgeKind, Kind, Program


def check_program(program: Program) -> None:
    """Refuse a program that breaks a rule, naming the first task that does; a deadlock is shown as its cycle."""
    check_columns(program)
    if find_cycle(program):
        refuse_deadlock(program)


def check_columns(program: Program) -> None:
    """Check all rules but that there is no deadlock, which the engines notice by themselves."""
    for problem in _problems(program):
        raise RequestError("program", problem)


def _problems(program: Program) -> Iterator[str]:
    yield from _layout(program)
    yield from _updates(program)
    yield from _edges(program)
    yield from _lanes(program)
    yield from _passes(program)
    yield from _versions(program)
    yield from _gradients(program)
    yield from _messages(program)
    yield from _buffers(program)


def _layout(program: Program) -> Iterator[str]:
    """Each task stands once, in its place: by step, micro-batch and phase, the same phases for all micro-batches."""
    tasks, compute, phases = program.tasks, program.compute, program.phases
    first = program.first_pass
    if compute != program.passes * phases:
        many = ", ".join(map(str, program.counts.tolist())) if program.m is None else program.m
        yield f"{compute} compute tasks do not go into {program.steps} steps of {many} micro-batches"
        return
    step = group_numbers(first[:-1], program.passes)
    for what, expected in (
        ("step", np.repeat(step, phases)),
        ("micro_batch", np.repeat(np.arange(program.passes, dtype=np.int32) - first[step], phases)),
        ("kind", np.tile(tasks.kind[:phases], program.passes)),
        ("stage", np.tile(tasks.stage[:phases], program.passes)),
    ):
        column = getattr(tasks, what)
        wrong = np.flatnonzero(column[:compute] != expected)
        if len(wrong):
            task = int(wrong[0])
            yield f"{program.describe(task)} stands where a task of {what} {expected[task]} belongs"
            return
    for kind in (Kind.F, Kind.B, Kind.W)[: phases // max(program.n, 1)]:
        count = np.bincount(tasks.stage[:phases][tasks.kind[:phases] == kind], minlength=program.n)
        for stage in np.flatnonzero(count != 1).tolist():
            yield f"a micro-batch has {count[stage]} tasks {kind.name} of stage {stage}; it needs one"


def _updates(program: Program) -> Iterator[str]:
    """A device makes a version of a stage once."""
    tasks, compute = program.tasks, program.compute
    strange = compute + np.flatnonzero(tasks.kind[compute:] != Kind.U)
    if len(strange):
        yield f"{program.describe(int(strange[0]))} stands among the updates but has no place in a lane"
    columns = (tasks.version[compute:], tasks.stage[compute:], tasks.device[compute:])
    order = sort_by(*columns)
    first = group_starts(*(column[order] for column in columns))
    if len(first) < len(order):
        again = int(order[np.setdiff1d(np.arange(len(order)), first)[0]])
        yield f"{program.describe(compute + again)} stands there twice; a device makes a version of a stage once"


def _edges(program: Program) -> Iterator[str]:
    """Both ends of a dependency exist."""
    edges = program.edges
    for ends, name in ((edges.before, "before"), (edges.after, "after")):
        outside = np.flatnonzero((ends < 0) | (ends >= program.nodes))
        if len(outside):
            k = int(outside[0])
            yield f"dependency {k} names node {ends[k]} as its {name!r}, but there are {program.nodes} nodes"


def _lanes(program: Program) -> Iterator[str]:
    """Every compute task has one place, in a lane of its own device; so have all updates, or none."""
    tasks, lane_tasks = program.tasks, program.lane_tasks
    needs = (tasks.kind != Kind.U) | (len(lane_tasks) > program.compute)
    there = np.zeros(len(tasks), dtype=bool)
    there[lane_tasks] = True
    if len(lane_tasks) != np.count_nonzero(needs) or (there != needs).any():
        count = np.bincount(lane_tasks, minlength=len(tasks))
        task = int(np.flatnonzero(count != needs)[0])
        places = f"{count[task]} places in lanes; it needs {'one' if needs[task] else 'none'}"
        yield f"{program.describe(task)} has {places}"
        return
    moves = group_starts(tasks.device[lane_tasks], tasks.lane[lane_tasks])
    stray = np.setdiff1d(moves, program.lane_start)
    if len(stray):
        task = int(lane_tasks[stray[0]])
        yield f"{program.describe(task)} is on device {tasks.device[task]} but in another device's lane"


def _passes(program: Program) -> Iterator[str]:
    """A backward runs on the device of its forward and reads the same version, but where the rule says otherwise."""
    tasks, n = program.tasks, program.n
    for third, kind in enumerate((Kind.B, Kind.W)[: 1 + program.splits], start=1):
        for what in ("device", "version")[: 2 - program.versions_differ]:
            column = getattr(tasks, what)
            passes = column[: program.compute].reshape(-1, program.phases)
            apart = np.argwhere(passes[:, :n] != passes[:, third * n : (third + 1) * n][:, ::-1])
            if len(apart):
                f, b = (int(program.tasks_of_kind(of)[tuple(apart[0])]) for of in (Kind.F, kind))
                problem = f"differ in {what}: {column[f]} and {column[b]}"
                yield f"{program.describe(f)} and {program.describe(b)} {problem}"
                return


def _versions(program: Program) -> Iterator[str]:
    """Some update makes every version that is read or started from, in an earlier step."""
    tasks, span = program.tasks, program.n
    compute, update = slice(program.compute), slice(program.compute, None)
    never = program.steps
    made = np.full(program.versions * span, never, dtype=tasks.step.dtype)  # the step that makes each version
    made[:span] = -1
    np.minimum.at(made, tasks.version[update] * span + tasks.stage[update], tasks.step[update])

    def missing(version: Ints, nodes: slice) -> Ints:
        there = made[np.clip(version, 0, program.versions - 1) * span + tasks.stage[nodes]]
        return np.flatnonzero((version < 0) | (version >= program.versions) | (there >= tasks.step[nodes]))

    for task in missing(tasks.version[compute], compute)[:1].tolist():
        yield f"{program.describe(task)} reads version {tasks.version[task]}, which does not exist for it"
    for row in missing(program.base, update)[:1].tolist():
        node = program.compute + row
        yield f"{program.describe(node)} starts from version {program.base[row]}, which does not exist for it"
    for row in np.flatnonzero((program.first_step < 0) | (program.first_step > tasks.step[update]))[:1].tolist():
        node = program.compute + row
        yield f"{program.describe(node)} takes gradients from step {program.first_step[row]} on, after its own step"


def _gradients(program: Program) -> Iterator[str]:
    """Every backward's gradient is waited for by what sums it, and the stage is updated in that step."""
    tasks = program.tasks
    compute = program.compute
    updated = np.zeros((program.steps, program.n), dtype=bool)
    updated[tasks.step[compute:], tasks.stage[compute:]] = True
    for step, stage in np.argwhere(~updated).tolist():
        of_it = (tasks.kind == Kind.B) & (tasks.step == step) & (tasks.stage == stage)
        yield f"the gradient of {program.describe(int(np.flatnonzero(of_it)[0]))} never reaches an update"


def _messages(program: Program) -> Iterator[str]:
    """Every message carries something that exists and is waited for by somebody."""
    first, data = len(program.tasks), program.edges.kind == EdgeKind.DATA
    read, sent = (np.zeros(len(program.messages), dtype=bool) for _ in range(2))
    for seen, ends in ((read, program.edges.before), (sent, program.edges.after)):
        seen[ends[data & (ends >= first)] - first] = True
    several = np.flatnonzero((program.messages.stages != 1) | (program.messages.stream != -1))
    for row in several[:1].tolist():
        problem = "carries several stages or has a stream of its own, which nothing runs so far"
        yield f"{program.describe(first + row)} {problem}"
    unread = np.flatnonzero(~read)
    if len(unread):
        yield f"nobody waits for {program.describe(first + int(unread[0]))}"
    unsent = np.flatnonzero(~sent & (program.messages.step >= 0))
    if len(unsent):
        yield f"{program.describe(first + int(unsent[0]))} has nothing to send: no task makes its content"


def _buffers(program: Program) -> Iterator[str]:
    """Every buffer is used, and so freed, at least once."""
    buffers = program.buffers
    unused = np.flatnonzero(buffers.end < 0)
    if len(unused):
        k = int(unused[0])
        category = Category(int(buffers.category[k])).name.lower()
        yield f"{category} of stage {buffers.stage[k]} on device {buffers.device[k]} are never freed"


def find_cycle(program: Program) -> list[int]:
    """A cycle of dependencies and lane orders, each node waiting for the one before it; empty if there is none."""
    waits_for, first, after = successors(*program.waits(), program.nodes)
    ready = np.flatnonzero(waits_for == 0).tolist()
    waits, starts, reach = waits_for.tolist(), first.tolist(), after.tolist()
    while ready:
        node = ready.pop()
        for follower in reach[starts[node] : starts[node + 1]]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    stuck = {node for node, count in enumerate(waits) if count > 0}
    if not stuck:
        return []
    # A stuck node waits for a stuck node: walking back long enough enters a cycle.
    waited_for = {follower: node for node in stuck for follower in reach[starts[node] : starts[node + 1]]}
    path = [min(stuck)]
    while path[-1] not in path[:-1]:
        path.append(waited_for[path[-1]])
    cycle = path[path.index(path[-1]) + 1 :][::-1]
    lowest = cycle.index(min(cycle))
    return cycle[lowest:] + cycle[:lowest]


def refuse_deadlock(program: Program) -> NoReturn:
    """Raise the error that shows the cycle."""
    cycle = find_cycle(program)
    names = [program.describe(node) for node in cycle[:8]]
    more = [f"... {len(cycle) - 8} more"] if len(cycle) > 8 else []
    raise RequestError("schedule deadlocks", " -> ".join([*names, *more, names[0]]))

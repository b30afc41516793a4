"""The rules that every program keeps, checked in one place, with errors that name the task."""

from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from cdpsim.columns import Ints, heads, sort_by
from cdpsim.errors import RequestError
from cdpsim.program import Category, Content, Edge, Kind, Program


def check(program: Program) -> None:
    """Refuse a program that breaks a rule, naming the first task that does; a deadlock is shown as its cycle."""
    check_columns(program)
    if find_cycle(program):
        refuse_deadlock(program)


def check_columns(program: Program) -> None:
    """Check all rules but that there is no deadlock, which the engines notice by themselves."""
    for problem in _problems(program):
        raise RequestError("program", problem)


def _problems(program: Program) -> Iterator[str]:
    yield from _keys(program)
    yield from _edges(program)
    yield from _lanes(program)
    yield from _passes(program)
    yield from _versions(program)
    yield from _gradients(program)
    yield from _messages(program)
    yield from _buffers(program)


def _keys(program: Program) -> Iterator[str]:
    """Each task stands there once; several devices may update their replicas."""
    tasks = program.tasks
    for kind in np.unique(tasks.kind).tolist():
        rows = np.flatnonzero(tasks.kind == kind)
        device = tasks.device[rows] if kind == Kind.U else np.zeros(len(rows), dtype=np.int64)
        columns = [c[rows] for c in (tasks.step, tasks.micro_batch + 1, tasks.stage)] + [device]
        order = sort_by(*columns)
        first = heads(*(column[order] for column in columns))
        if len(first) < len(rows):
            again = np.setdiff1d(np.arange(len(rows)), first)[0]
            yield f"{program.describe(int(rows[order[again]]))} stands there twice; each task has one key"


def _edges(program: Program) -> Iterator[str]:
    """Both ends of a dependency exist."""
    edges = program.edges
    for ends, name in ((edges.before, "before"), (edges.after, "after")):
        outside = np.flatnonzero((ends < 0) | (ends >= program.nodes))
        if len(outside):
            k = int(outside[0])
            yield f"dependency {k} names node {ends[k]} as its {name!r}, but there are {program.nodes} nodes"


def _lanes(program: Program) -> Iterator[str]:
    """Every compute task has one place, in a lane of its own device."""
    tasks, lane_tasks = program.tasks, program.lane_tasks
    count = np.bincount(lane_tasks, minlength=len(tasks))
    wrong = np.flatnonzero(count != (tasks.kind != Kind.U))
    if len(wrong):
        yield f"{program.describe(int(wrong[0]))} has {count[wrong[0]]} places in lanes; it needs one"
        return
    where = tasks.device[lane_tasks].astype(np.int64) * (int(tasks.lane.max()) + 1) + tasks.lane[lane_tasks]
    home = np.repeat(where[program.lane_start[:-1]], np.diff(program.lane_start))
    stray = np.flatnonzero(where != home)
    if len(stray):
        task = int(lane_tasks[stray[0]])
        yield f"{program.describe(task)} is on device {tasks.device[task]} but in another device's lane"


def _passes(program: Program) -> Iterator[str]:
    """Every forward has its backward, on the same device, reading the same version."""
    tasks = program.tasks
    forward, backward = (_by_key(program, kind) for kind in (Kind.F, Kind.B))
    if len(forward) != len(backward):
        yield f"{len(forward)} forwards but {len(backward)} backwards; every forward has its backward"
        return
    for what in ("step", "micro_batch", "stage", "device", "version"):
        column = getattr(tasks, what)
        apart = np.flatnonzero(column[forward] != column[backward])
        if len(apart):
            f, b = int(forward[apart[0]]), int(backward[apart[0]])
            yield f"{program.describe(f)} and {program.describe(b)} differ in {what}: {column[f]} and {column[b]}"
            return


def _by_key(program: Program, kind: Kind) -> Ints:
    tasks = program.tasks
    rows = np.flatnonzero(tasks.kind == kind)
    return rows[sort_by(tasks.step[rows], tasks.micro_batch[rows], tasks.stage[rows])]


def _versions(program: Program) -> Iterator[str]:
    """Some update makes every version that is read, in an earlier step."""
    tasks = program.tasks
    compute = np.flatnonzero(tasks.kind != Kind.U)
    update = np.flatnonzero(tasks.kind == Kind.U)
    span = program.n
    made = np.zeros((program.steps + 1) * span, dtype=bool)
    made[:span] = True
    made[tasks.version[update] * span + tasks.stage[update]] = True
    early = (tasks.version[compute] > tasks.step[compute]) | (tasks.version[compute] < 0)
    nowhere = ~made[np.clip(tasks.version[compute], 0, program.steps) * span + tasks.stage[compute]]
    wrong = compute[np.flatnonzero(early | nowhere)]
    if len(wrong):
        task = int(wrong[0])
        yield f"{program.describe(task)} reads version {tasks.version[task]}, which does not exist for it"


def _gradients(program: Program) -> Iterator[str]:
    """Every backward's gradient is waited for by what sums it, and the stage is updated in that step."""
    tasks = program.tasks
    backward = np.flatnonzero(tasks.kind == Kind.B)
    update = np.flatnonzero(tasks.kind == Kind.U)
    updated = np.zeros(program.steps * program.n, dtype=bool)
    updated[tasks.step[update] * program.n + tasks.stage[update]] = True
    missing = backward[~updated[tasks.step[backward] * program.n + tasks.stage[backward]]]
    if len(missing):
        yield f"the gradient of {program.describe(int(missing[0]))} never reaches an update"


def _messages(program: Program) -> Iterator[str]:
    """Every message carries something that exists and is waited for by somebody."""
    first = len(program.tasks)
    edges = program.edges
    data = edges.kind == Edge.DATA
    read = np.bincount(edges.before[data], minlength=program.nodes)[first:]
    sent = np.bincount(edges.after[data], minlength=program.nodes)[first:]
    unread = np.flatnonzero(read == 0)
    if len(unread):
        yield f"nobody waits for {program.describe(first + int(unread[0]))}"
    unsent = np.flatnonzero((sent == 0) & (program.messages.step >= 0))
    if len(unsent):
        yield f"{program.describe(first + int(unsent[0]))} has nothing to send: no task makes its content"
    nowhere = np.flatnonzero((program.messages.content != Content.STATE) & (program.messages.size < 0))
    if len(nowhere):
        yield f"{program.describe(first + int(nowhere[0]))} has a negative size"


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
    waits_for, first, after = program.successors()
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

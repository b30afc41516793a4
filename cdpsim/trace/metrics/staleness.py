"""How old the parameters are that tasks read."""

import numpy as np

from cdpsim.numeric.columns import Ints, Times
from cdpsim.program import Kind, Program


def stale(program: Program, start: Times, end: Times) -> Ints:
    """1 for each task that starts when a newer version of its stage exists anywhere than the one it reads, else 0."""
    tasks = program.tasks
    update = np.flatnonzero(tasks.kind == Kind.U)
    # When each version of each stage first exists: theta_0 from the start.
    exists = np.full((program.n, program.versions), np.inf)
    exists[:, 0] = -np.inf
    np.minimum.at(exists, (tasks.stage[update], tasks.version[update]), end[update])
    result = np.zeros(len(tasks), dtype=np.int8)
    compute = np.flatnonzero(tasks.kind != Kind.U)
    newer = tasks.version[compute] + 1
    has = newer < program.versions
    result[compute[has]] = exists[tasks.stage[compute[has]], newer[has]] <= start[compute[has]]
    return result


def mismatched(program: Program) -> int:
    """How many backwards read another version than their forward."""
    version = program.tasks.version
    return int((version[program.tasks_of_kind(Kind.F)] != version[program.tasks_of_kind(Kind.B)]).sum())


def mean_staleness(program: Program, step: int) -> float:
    """How many updates older than what its gradient is applied to a forward of a step reads, on average."""
    tasks = program.tasks
    forward = np.flatnonzero((tasks.kind == Kind.F) & (tasks.step == step))
    age = ages(program)
    takes = (program.first_step <= step) & (step <= tasks.step[program.compute :])
    takes &= ~program.estimates[tasks.version[program.compute :]]
    applied_to = age[program.base[takes].min(initial=program.versions - 1)]
    return float((applied_to - age[tasks.version[forward]]).mean())


def ages(program: Program) -> Ints:
    """How many updates each version is away from theta_0; an estimate is as old as what is kept in its stead."""
    base = np.zeros(program.versions, dtype=np.int64)
    base[program.tasks.version[program.compute :]] = program.base
    age = np.zeros(program.versions, dtype=np.int64)
    for version in range(1, program.versions):
        age[version] = age[base[version]] + 1
    return age

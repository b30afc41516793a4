"""The age of the parameters that tasks read."""

import numpy as np

from cdpsim.numeric.columns import Ints, Times
from cdpsim.program import Kind, Program


def stale_flags(program: Program, start: Times, end: Times) -> Ints:
    """Return 1 for each task that starts when a newer version of its stage than it reads exists anywhere, else 0."""
    tasks, update = program.tasks, slice(program.compute, len(program.tasks))
    # When each version of each stage first exists: theta_0 from the start.
    exists = np.full((program.n, program.versions + 1), np.inf)
    exists[:, 0] = -np.inf
    np.minimum.at(exists, (tasks.stage[update], tasks.version[update]), end[update])
    compute, result = slice(program.compute), np.zeros(len(tasks), dtype=np.int8)
    result[compute] = exists[tasks.stage[compute], tasks.version[compute] + 1] <= start[compute]
    return result


def mismatched(program: Program) -> int:
    """Return the number of backwards that read another version than their forward."""
    version = program.tasks.version
    return int((version[program.tasks_of_kind(Kind.F)] != version[program.tasks_of_kind(Kind.B)]).sum())


def mean_staleness(program: Program, step: int) -> float:
    """Return the mean number of updates between the version that a step's forwards read and the one that it updates."""
    tasks = program.tasks
    forward = np.flatnonzero((tasks.kind == Kind.F) & (tasks.step == step))
    age = version_ages(program)
    takes = (program.first_step <= step) & (step <= tasks.step[program.compute :])
    takes &= ~program.estimates[tasks.version[program.compute :]]
    applied_to = age[program.base[takes].min(initial=program.versions - 1)]
    return float((applied_to - age[tasks.version[forward]]).mean())


def version_ages(program: Program) -> Ints:
    """Return the number of updates from theta_0 to each version; an estimate counts like the version kept instead."""
    base = np.zeros(program.versions, dtype=np.int64)
    base[program.tasks.version[program.compute :]] = program.base
    age = np.zeros(program.versions, dtype=np.int64)
    for version in range(1, program.versions):
        age[version] = age[base[version]] + 1
    return age

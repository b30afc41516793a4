"""The age of the parameters that tasks read."""

from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints, Times
from cdpsim.program import Kind, Program, once_a_program


def stale_flags(program: Program, start: Times, end: Times) -> Ints:
    """Return 1 for each task that starts when a newer version of its stage than it reads exists anywhere, else 0."""
    tasks, update = program.tasks, slice(program.compute, len(program.tasks))
    # When each version of each stage first exists: theta_0 from the start. Of their own versions, workers have others.
    where = tasks.device if program.own is not None else np.zeros_like(tasks.device)
    exists = np.full((int(where.max(initial=0)) + 1, program.n, program.versions + 1), np.inf)
    exists[:, :, 0] = -np.inf
    np.minimum.at(exists, (where[update], tasks.stage[update], tasks.version[update]), end[update])
    compute, result = slice(program.compute), np.zeros(len(tasks), dtype=np.int8)
    next_exists = exists[where[compute], tasks.stage[compute], tasks.version[compute] + 1]
    result[compute] = next_exists <= start[compute]
    return result


class Lags(NamedTuple):
    """How many versions older than the newest the parameters are that tasks of a step read: (micro-batch, stage)."""

    forward: Ints
    backward: Ints


def lags_of_step(program: Program, step: int) -> Lags:
    """Return the lags of a step's forwards and backwards; the newest version is the last that the steps before make.

    >>> from cdpsim import simulate
    >>> lags_of_step(simulate("multi-cdp", 2).program, 2).forward.tolist()
    [[1, 0], [0, 0]]
    """
    tasks, passes = program.tasks, slice(*program.first_pass[step : step + 2].tolist())
    made = tasks.version[program.compute :][tasks.step[program.compute :] < step]
    newest = int(made.max(initial=0))
    forward, backward = (newest - tasks.version[program.tasks_of_kind(kind)[passes]] for kind in (Kind.F, Kind.B))
    return Lags(forward, backward)


def mismatched(program: Program) -> int:
    """Return the number of backwards that read another version than their forward."""
    version = program.tasks.version
    return int((version[program.tasks_of_kind(Kind.F)] != version[program.tasks_of_kind(Kind.B)]).sum())


@once_a_program
def mean_staleness(program: Program, steps: range) -> float:
    """Return the mean lag of what forwards of some steps read: how many updates before the base of their own."""
    tasks, age = program.tasks, version_ages(program)
    kept = np.flatnonzero(~program.is_estimate(tasks.version[program.compute :]))
    bases = np.full(program.steps, program.versions - 1)
    np.minimum.at(bases, tasks.step[program.compute :][kept], program.base[kept])
    ends = np.unique(tasks.step[program.compute :][kept])
    base = bases[ends[np.searchsorted(ends, np.arange(steps.start, steps.stop))]]
    forward = np.flatnonzero((tasks.kind == Kind.F) & (tasks.step >= steps.start) & (tasks.step < steps.stop))
    lag = age[base[tasks.step[forward] - steps.start]] - age[tasks.version[forward]]
    return float(lag.mean())


def version_ages(program: Program) -> Ints:
    """Return the number of updates from theta_0 to each version; an estimate counts like the version kept instead."""
    base = np.zeros(program.versions, dtype=np.int64)
    base[program.tasks.version[program.compute :]] = program.base
    age = np.zeros(program.versions, dtype=np.int64)
    for version in range(1, program.versions):
        age[version] = age[base[version]] + 1
    return age

"""How old the parameters are that tasks read."""

import numpy as np

from cdpsim.columns import Ints
from cdpsim.costs import Times
from cdpsim.program import Kind, Program


def stale(program: Program, start: Times, end: Times) -> Ints:
    """1 for each task that starts when a newer version of its stage exists anywhere than the one it reads, else 0."""
    tasks = program.tasks
    update = np.flatnonzero(tasks.kind == Kind.U)
    # When each version of each stage first exists: theta_0 from the start.
    exists = np.full((program.n, program.steps + 1), np.inf)
    exists[:, 0] = -np.inf
    np.minimum.at(exists, (tasks.stage[update], tasks.version[update]), end[update])
    result = np.zeros(len(tasks), dtype=np.int8)
    compute = np.flatnonzero(tasks.kind != Kind.U)
    newer = tasks.version[compute] + 1
    has = newer <= program.steps
    result[compute[has]] = exists[tasks.stage[compute[has]], newer[has]] <= start[compute[has]]
    return result


def mismatched(program: Program) -> int:
    """How many backwards read another version than their forward."""
    version = program.tasks.version
    return int((version[program.of_kind(Kind.F)] != version[program.of_kind(Kind.B)]).sum())


def mean_staleness(program: Program, step: int) -> float:
    """How many training steps old what a forward of a step reads is, on average."""
    tasks = program.tasks
    forward = np.flatnonzero((tasks.kind == Kind.F) & (tasks.step == step))
    return float((step - tasks.version[forward]).mean())

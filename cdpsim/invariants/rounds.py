"""Laws of rounds: workers never wait, hand over as soon as they can, and each gradient enters one update of theta."""

from collections.abc import Iterator

import numpy as np

from cdpsim.cluster.topology import NONE
from cdpsim.invariants.recount import Recount
from cdpsim.numeric.columns import Flags
from cdpsim.timing.round_times import block_ends, rounds_of


def workers_of_rounds_never_wait(run: Recount) -> Iterator[str]:
    """The tasks of a worker follow each other without a gap, behind its warm-up.

    Where messages take the time of devices, or devices stand still, tasks wait for that.
    """
    program, lanes = run.program, run.lanes
    busy = (np.array(run.request.cluster.overlaps(program.devices)) == NONE).any()
    if not program.thrown_away or busy or run.request.disorder.stop:
        return
    follows = np.flatnonzero(lanes.head < np.arange(len(lanes.order)))
    task, before = lanes.order[follows], lanes.order[follows - 1]
    waits = (run.start[task] > run.end[before]) & (program.tasks.step[task] > run.request.shape.warm_up)
    yield from run.report(task[waits], "waits, though its worker has something to compute")


def rounds_end_with_the_first_block_that_can(run: Recount) -> Iterator[str]:
    """A worker hands over at the end of a block; of its first one if the last communication is through by then.

    Else it does so at the end of the first block at which the communication is through. The seed is one micro-batch.
    """
    program, shape = run.program, run.request.shape
    if not program.thrown_away:
        return
    found, block = rounds_of(program, run.start, run.end), shape.m
    least = np.full(len(found.counts), block)
    least[0] = block if shape.warm_up else 1
    fixed = np.arange(len(found.counts)) <= shape.warm_up
    wrong = (found.counts % least[:, None] != 0) | (fixed[:, None] & (found.counts != least[:, None]))
    step, device, end = block_ends(program, run.end, block)
    # When what its round waits for is through.
    brought = np.append(np.zeros_like(found.posted[:1]), found.ended, axis=0)[step, device]
    first = np.append(True, (np.diff(step) != 0) | (np.diff(device) != 0))
    last = np.append(first[1:], True)
    wrong_block = np.where(last, end < brought, end >= brought) & ~fixed[step]
    wrong_block &= ~(first & last & (end >= brought))
    np.logical_or.at(wrong, (step[wrong_block], device[wrong_block]), True)
    for r, worker in np.argwhere(wrong).tolist():
        yield f"device {worker} does not hand over in round {r} at the end of the first block at which it may"


def gradients_enter_one_update_of_theta(run: Recount) -> Iterator[str]:
    """The gradients of each step, but for the one that is thrown away, enter one update that is kept."""
    program = run.program
    if not program.thrown_away:
        return
    kept = _kept(run)
    step, stage, device = run.key_of(run.updates[kept])
    taken = np.zeros((program.steps + 1, program.n, program.devices), dtype=np.int64)
    np.add.at(taken, (program.first_step[kept], stage, device), 1)
    np.add.at(taken, (step + 1, stage, device), -1)
    entered = np.cumsum(taken, axis=0)[:-1]
    due = (np.arange(program.steps) < program.updated).astype(np.int64)[:, None, None]
    holds = np.zeros((program.n, program.devices), dtype=bool)
    holds[stage, device] = True
    for t, j, worker in np.argwhere((entered != due) & holds).tolist():
        yield f"gradients of step {t}, stage {j} on device {worker} enter {entered[t, j, worker]} updates of theta"


def updates_start_from_theta(run: Recount) -> Iterator[str]:
    """An update starts from the version before it that is no estimate; so does one that makes an estimate."""
    program = run.program
    if not program.thrown_away:
        return
    version = program.tasks.version[run.updates]
    theta = np.append(0, np.unique(version[_kept(run)]))
    wrong = program.base != theta[np.searchsorted(theta, version) - 1]
    yield from run.report(run.updates[wrong], "starts from another version than the last theta")


def _kept(run: Recount) -> Flags:
    """Return whether each update makes a version of theta, and no estimate."""
    return ~run.program.is_estimate(run.program.tasks.version[run.updates])

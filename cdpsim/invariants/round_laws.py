"""Laws of rounds: workers never wait, hand over as soon as they can, and each gradient enters one update of theta.

Laws of local steps: a mean is over what all workers have at the end of a round, and outer updates come behind it.
"""

from collections.abc import Iterator

import numpy as np

from cdpsim.cluster.topology import NONE
from cdpsim.invariants.recount import NO_NEEDS, Key, Needs, Recount, combine, members, stages_of
from cdpsim.numeric.columns import Flags, Ints, find_rows, matching_pairs
from cdpsim.program import Content, Op
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
    found, block = rounds_of(program, run.end), shape.m
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


def _means(run: Recount) -> tuple[Ints, Key]:
    """Return the messages of means with each of their stages and devices: (row, (step, stage, device))."""
    program, messages = run.collapsed.program, run.collapsed.program.messages
    rows = np.flatnonzero((messages.content == Content.PARAMETERS) & (messages.op == Op.ALL_REDUCE))
    row, device = members(program, rows)
    place, stage = stages_of(messages, row)
    return row[place], (messages.step[row[place]], stage, device[place])


def _averaged(run: Recount) -> tuple[Ints, Ints]:
    """Return the updates by means, and for each the update that makes what its device gives to its mean."""
    tasks, update = run.program.tasks, run.updates
    averaged = run.program.average_of(tasks.version[update])
    outer, averaged = update[averaged >= 0], averaged[averaged >= 0]
    made = tasks.version[update], tasks.stage[update], tasks.device[update]
    return outer, update[find_rows(made, (averaged, tasks.stage[outer], tasks.device[outer]))]


def average_needs(run: Recount) -> Needs:
    """Return the needs of means for what they are of, and of outer updates for their means."""
    row, key = _means(run)
    if not len(row):
        return NO_NEEDS
    outer, made = _averaged(run)
    taken, of = matching_pairs(run.key_of(made), key)
    node = len(run.program.tasks) + row[of]
    return combine(Needs(made[taken], node), Needs(node, outer[taken]))


def means_come_between_local_steps_and_outer_updates(run: Recount) -> Iterator[str]:
    """A mean begins when all workers have made what it is of, and ends before any of them updates by it."""
    yield from run.report_unmet(average_needs(run), "has ended, which comes before a mean, or is one")


def means_are_over_all_workers(run: Recount) -> Iterator[str]:
    """An outer update takes one mean of its stage, over all workers and all parameters, or is alone; none is spare."""
    if run.program.averaged is None:
        return
    program, messages, (row, key) = run.collapsed.program, run.collapsed.program.messages, _means(run)
    outer, made = _averaged(run)
    wanted = run.key_of(made)
    weighs = run.sizes_on("parameters", wanted[2], wanted[1]) > 0
    due = (weighs & (run.request.shape.replicas > 1)).astype(np.int64)
    _, which = matching_pairs(key, wanted)
    many = np.bincount(which, minlength=len(outer))
    yield from run.report(outer[(many < due) | (many > 1)], "does not take one mean")
    spare = find_rows(wanted, key) < 0
    yield from run.report(len(run.program.tasks) + np.unique(row[spare]), "is a mean that nothing takes")
    for each in np.unique(row).tolist():
        group, mine = program.ranks_of(messages.dst[each]), row == each
        sent = run.sizes_on("parameters", np.full(mine.sum(), key[2][mine][0]), key[1][mine])
        whole = int(sent[key[2][mine] == key[2][mine][0]].sum())
        name = program.describe(len(run.program.tasks) + each)
        if len(group) != run.request.shape.replicas:
            yield f"{name} is over {len(group)} of {run.request.shape.replicas} workers"
        elif messages.size[each] != whole:
            yield f"{name} has {messages.size[each]} B of {whole} B"

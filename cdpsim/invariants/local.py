"""Laws of local steps: a mean is over what all workers have at the end of a round, and outer updates come behind it."""

from collections.abc import Iterator

import numpy as np

from cdpsim.invariants.recount import NO_NEEDS, Key, Needs, Recount, combine, members, stages_of
from cdpsim.numeric.columns import Ints, find_rows, matching_pairs
from cdpsim.program import Content, Op


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

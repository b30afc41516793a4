"""Laws of versions: made in order, on their device before they are read or sent, and as old as the rule says."""

from collections.abc import Iterator

import numpy as np

from cdpsim.invariants.recount import Key, Needs, Recount, combine, receivers
from cdpsim.numeric.columns import Ints, find_rows, group_numbers, group_starts, matching_pairs, sort_by
from cdpsim.program import Content, Kind, Op
from cdpsim.schedules.state import Home


def _carriers(run: Recount, *ops: Op) -> Ints:
    """Return the rows of messages that carry parameters by the given operations."""
    messages = run.collapsed.program.messages
    return np.flatnonzero((messages.content == Content.PARAMETERS) & np.isin(messages.op, ops))


def _brought(run: Recount) -> tuple[Ints, Ints]:
    """Return messages that bring a version to stay, each with its receivers."""
    stays = run.program.state.parameters is Home.COPIED
    return receivers(run.collapsed.program, _carriers(run, Op.P2P, *([Op.BROADCAST] if stays else [])))


def _needs_of_versions(run: Recount, node: Ints, key: Key) -> Needs:
    """Return the needs of nodes that need a (stage, version, device); -1 where their device never gets it.

    A version is made there or brought there, and the earlier of both counts. Of a state that travels, it may be made
    anywhere.
    """
    tasks, collapsed, update = run.program.tasks, run.collapsed, run.updates
    messages, (came, receiver) = collapsed.program.messages, _brought(run)
    source = np.concatenate([update, len(tasks) + came])
    order = np.argsort(collapsed.end[source], kind="stable")
    there = (
        np.concatenate([tasks.stage[update], messages.stage[came]])[order],
        np.concatenate([tasks.version[update], messages.step[came] + 1])[order],
        np.concatenate([tasks.device[update], receiver])[order],
    )
    made = np.flatnonzero(key[1] > 0)  # theta_0 is there from the start
    needed = 2 if run.travels else 3
    row = find_rows(there[:needed], tuple(column[made] for column in key[:needed]))
    return Needs(np.append(source[order], -1)[row], node[made])


def broadcast_needs(run: Recount) -> Needs:
    """Return the needs of readers for broadcasts: of a version the first is for forwards, the second for backwards."""
    program, start = run.collapsed.program, run.collapsed.start
    messages, tasks, first, rows = program.messages, program.tasks, len(program.tasks), _carriers(run, Op.BROADCAST)
    rows = rows[np.argsort(start[first + rows], kind="stable")]
    rows = rows[sort_by(messages.stage[rows], messages.step[rows] + 1)]
    begin = group_starts(messages.stage[rows], messages.step[rows])
    turn = np.arange(len(rows)) - begin[group_numbers(begin, len(rows))]
    task = np.arange(program.compute)
    wanted = tasks.stage[task], tasks.version[task] - 1, (tasks.kind[task] != Kind.F).astype(np.int64)
    row, reader = matching_pairs((messages.stage[rows], messages.step[rows], turn), wanted)
    return Needs(first + rows[row], task[reader])


def reader_needs(run: Recount) -> Needs:
    """Return the needs of tasks that read a version: forwards, and backwards where they read another one."""
    tasks, task = run.program.tasks, np.arange(run.program.compute)
    if run.handed_out and len(_carriers(run, Op.BROADCAST)):
        needs = broadcast_needs(run)
        without = np.setdiff1d(task, needs.after)
        return combine(needs, Needs(np.full(len(without), -1), without))
    if not run.program.versions_differ:
        task = run.program.tasks_of_kind(Kind.F).ravel()
    return _needs_of_versions(run, task, (tasks.stage[task], tasks.version[task], tasks.device[task]))


def base_needs(run: Recount) -> Needs:
    """Return the needs of updates for the version that they start from."""
    tasks, update = run.program.tasks, run.updates
    return _needs_of_versions(run, update, (tasks.stage[update], run.program.base, tasks.device[update]))


def sender_needs(run: Recount) -> Needs:
    """Return the needs of messages that carry a version away."""
    messages, first = run.collapsed.program.messages, len(run.program.tasks)
    rows = _carriers(run, Op.P2P, Op.BROADCAST)
    return _needs_of_versions(run, first + rows, (messages.stage[rows], messages.step[rows] + 1, messages.src[rows]))


def versions_are_made_in_order(run: Recount) -> Iterator[str]:
    """Every version of a stage is made, and none before its device has the one that it replaces."""
    tasks, made = run.program.tasks, np.zeros((run.program.n, run.program.versions), dtype=np.bool_)
    ended = run.updates[np.isfinite(run.end[run.updates])]
    made[:, 0] = True
    made[tasks.stage[ended], tasks.version[ended]] = True
    for stage, version in np.argwhere(~made).tolist():
        yield f"version {version} of stage {stage} is never made"
    lack = "replaces a version that its device never gets"
    yield from run.report_unmet(base_needs(run), "has ended, whose version it replaces", lack)


def versions_exist_before_they_are_read(run: Recount) -> Iterator[str]:
    """A task starts when the version that it reads has been made on its device, or has arrived there."""
    lack = "reads a version that its device never gets"
    yield from run.report_unmet(reader_needs(run), "has ended, from which it has the version that it reads", lack)


def versions_are_sent_after_they_are_made(run: Recount) -> Iterator[str]:
    """Parameters leave a device when they have been made there, or have arrived there."""
    lack = "carries a version that its sender never gets"
    yield from run.report_unmet(sender_needs(run), "has ended, from which it has the version that it carries", lack)


def readings_are_as_old_as_the_rule_says(run: Recount) -> Iterator[str]:
    """A task reads theta_{t - lag}, or theta_0, with the lag that the request's rule has for forwards or backwards."""
    program, compute = run.program, slice(run.program.compute)
    tasks, shape, rule = program.tasks, run.request.shape, run.request.rule
    lags = np.stack([rule.lags(shape), rule.backward_lags(shape)])
    back = (tasks.kind[compute] != Kind.F).astype(np.int64)
    lag = lags[back, np.repeat(run.number_in_replica, program.phases), tasks.stage[compute]]
    wrong = np.flatnonzero(tasks.version[compute] != np.maximum(tasks.step[compute] - lag, 0))
    yield from run.report(wrong, "reads another version than its rule says")

"""Versions: made in order, on their device before they are read or sent, and as old as the rule says."""

from collections.abc import Iterator

import numpy as np

from cdpsim.invariants.needs import Key, Needs, combine
from cdpsim.invariants.pieces import members
from cdpsim.invariants.recount import Recount
from cdpsim.numeric.columns import Ints, Times, find_rows, group_numbers, group_starts, matching_pairs, sort_by
from cdpsim.program import Content, Kind, Op, Program
from cdpsim.schedules.state import Home


def _made(program: Program, end: Times) -> Times:
    """When each version of each stage first exists anywhere; theta_0 from the start."""
    update = np.flatnonzero(program.tasks.kind == Kind.U)
    made = np.full((program.n, program.versions), np.inf)
    made[:, 0] = 0
    np.minimum.at(made, (program.tasks.stage[update], program.tasks.version[update]), end[update])
    return made


def _sent(run: Recount, op: Op) -> Ints:
    """The rows of messages that carry parameters in a way."""
    messages = run.whole.program.messages
    return np.flatnonzero((messages.content == Content.PARAMETERS) & (messages.op == op))


def _brought(run: Recount) -> tuple[Ints, Ints]:
    """Messages that bring a version to stay, each with its receiver: of a broadcast all members but its root."""
    program, single = run.whole.program, _sent(run, Op.P2P)
    spread = _sent(run, Op.BROADCAST)[: None if run.program.state.parameters is Home.COPIED else 0]
    rows, device = members(program, spread)
    apart = device != program.messages.src[rows]
    receivers = np.concatenate([program.messages.dst[single], device[apart]])
    return np.concatenate([single, rows[apart]]), receivers


def _provided(run: Recount, node: Ints, key: Key) -> tuple[Needs, Ints]:
    """What nodes wait for that need a (stage, version, device), and those whose device never gets it.

    It is made there or brought there, whatever comes first; inside a state that travels, it is made anywhere.
    """
    tasks, whole, update = run.program.tasks, run.whole, run.updates
    messages, (came, receiver) = whole.program.messages, _brought(run)
    source = np.concatenate([update, len(tasks) + came])
    has = (
        np.concatenate([tasks.stage[update], messages.stage[came]]),
        np.concatenate([tasks.version[update], messages.step[came] + 1]),
        np.concatenate([tasks.device[update], receiver]),
    )
    needed = 2 if run.travels else 3
    order = np.argsort(whole.end[source], kind="stable")
    some = np.flatnonzero(key[1] > 0)
    row = find_rows(tuple(column[order] for column in has[:needed]), tuple(column[some] for column in key[:needed]))
    there = row >= 0
    return Needs(source[order[row[there]]], node[some[there]]), node[some[~there]]


def broadcasts(run: Recount) -> Needs:
    """Broadcasts and their readers: of a version the first is for forwards, the second for backwards."""
    program, start = run.whole.program, run.whole.start
    messages, tasks, first, rows = program.messages, program.tasks, len(program.tasks), _sent(run, Op.BROADCAST)
    rows = rows[np.argsort(start[first + rows], kind="stable")]
    rows = rows[sort_by(messages.stage[rows], messages.step[rows] + 1)]
    begin = group_starts(messages.stage[rows], messages.step[rows])
    turn = np.arange(len(rows)) - begin[group_numbers(begin, len(rows))]
    task = np.arange(program.compute)
    wanted = tasks.stage[task], tasks.version[task] - 1, (tasks.kind[task] != Kind.F).astype(np.int64)
    row, reader = matching_pairs((messages.stage[rows], messages.step[rows], turn), wanted)
    return Needs(first + rows[row], task[reader])


def _handed_out(run: Recount) -> bool:
    return run.handed_out and bool((run.whole.program.messages.op == Op.BROADCAST).any())


def _readers(run: Recount) -> tuple[Needs, Ints]:
    """What tasks wait for that read a version: forwards, and backwards where they read another one."""
    tasks, task = run.program.tasks, np.arange(run.program.compute)
    if _handed_out(run):
        needs = broadcasts(run)
        return needs, np.setdiff1d(task, needs.after)
    if not run.program.versions_differ:
        task = run.program.tasks_of_kind(Kind.F).ravel()
    return _provided(run, task, (tasks.stage[task], tasks.version[task], tasks.device[task]))


def _updates(run: Recount) -> tuple[Needs, Ints]:
    """Give what each update must wait for: the version that it starts from."""
    tasks, update = run.program.tasks, run.updates
    return _provided(run, update, (tasks.stage[update], run.program.base, tasks.device[update]))


def _messages(run: Recount) -> tuple[Needs, Ints]:
    """What messages wait for that carry a version away."""
    messages, first = run.whole.program.messages, len(run.program.tasks)
    rows = np.concatenate([_sent(run, Op.P2P), _sent(run, Op.BROADCAST)])
    return _provided(run, first + rows, (messages.stage[rows], messages.step[rows] + 1, messages.src[rows]))


def needs(run: Recount) -> Needs:
    """All that wait for a version."""
    return combine(*(found for found, _ in (_readers(run), _updates(run), _messages(run))))


def versions_are_made_in_order(run: Recount) -> Iterator[str]:
    """Every version of a stage is made, and none before its device has the one that it replaces."""
    made = _made(run.program, run.end)
    for stage, version in np.argwhere(~np.isfinite(made)).tolist():
        yield f"version {version} of stage {stage} is never made"
    found, missing = _updates(run)
    yield from run.unmet(found, "has ended, whose version it replaces")
    yield from run.names(missing, "replaces a version that its device never gets")


def versions_exist_before_they_are_read(run: Recount) -> Iterator[str]:
    """A task starts when what it reads has been made on its device, or has arrived there."""
    found, missing = _readers(run)
    yield from run.unmet(found, "has ended, from which it has the version that it reads")
    yield from run.names(missing, "reads a version that its device never gets")


def versions_are_sent_after_they_are_made(run: Recount) -> Iterator[str]:
    """Parameters leave a device when they have been made there, or have arrived there."""
    found, missing = _messages(run)
    yield from run.unmet(found, "has ended, from which it has the version that it carries")
    for node in missing.tolist():
        yield f"{run.whole.program.describe(node)} carries a version that its sender never gets"


def readings_are_as_old_as_the_rule_says(run: Recount) -> Iterator[str]:
    """A task reads theta_{t - lag}, or theta_0, with the lag that the request's rule has for forwards or backwards."""
    program, compute = run.program, slice(run.program.compute)
    tasks, shape, rule = program.tasks, run.request.shape, run.request.rule
    lags = np.stack([rule.lags(shape), rule.backward_lags(shape)])
    back = (tasks.kind[compute] != Kind.F).astype(np.int64)
    lag = lags[back, np.repeat(run.own, program.phases), tasks.stage[compute]]
    wrong = np.flatnonzero(tasks.version[compute] != np.maximum(tasks.step[compute] - lag, 0))
    yield from run.names(wrong, "reads another version than its rule says")

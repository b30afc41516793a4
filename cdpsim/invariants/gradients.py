"""Gradients: summed once each, sent with all that belongs into the sum, and there when a stage is updated."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cdpsim.columns import Ints
from cdpsim.invariants.needs import Columns, Needs, find, joined, matches
from cdpsim.invariants.pieces import members
from cdpsim.invariants.recount import Recount
from cdpsim.program import Content, Op


class _Ends(NamedTuple):
    """Messages of gradients, each with one of its devices: (step, stage, device)."""

    node: Ints
    key: Columns


def _ends(run: Recount, op: tuple[Op, ...], end: str) -> _Ends:
    """Messages of gradients that travel in one of some ways, each with its source, its destination or all members."""
    messages, first = run.whole.program.messages, len(run.program.tasks)
    rows = np.flatnonzero((messages.content == Content.GRADIENT) & np.isin(messages.op, op))
    if end == "members":
        rows, device = members(run.whole.program, rows)
    else:
        device = getattr(messages, end)[rows]
    return _Ends(first + rows, (messages.step[rows], messages.stage[rows], device))


def _join(*ends: _Ends) -> _Ends:
    nodes, keys = zip(*ends, strict=True)
    return _Ends(np.concatenate(nodes), tuple(map(np.concatenate, zip(*keys, strict=True))))


_SUMS = (Op.ALL_REDUCE, Op.REDUCE)


def _of_tasks(run: Recount, nodes: Ints) -> Columns:
    tasks = run.program.tasks
    return tasks.step[nodes], tasks.stage[nodes], tasks.device[nodes]


def _sent(run: Recount) -> _Ends:
    """Messages of gradients with each device that gives something to them."""
    return _join(_ends(run, (Op.P2P,), "src"), _ends(run, _SUMS, "members"))


def sums(run: Recount) -> Needs:
    """A sum leaves after all gradients of its sender, and what has been sent to that; a collective's of all members."""
    giver, sent, came = run.givers, _sent(run), _ends(run, (Op.P2P,), "dst")
    own, to = matches(_of_tasks(run, giver), sent.key)
    part, on = matches(came.key, sent.key)
    other = came.node[part] != sent.node[on]
    return joined(Needs(giver[own], sent.node[to]), Needs(came.node[part[other]], sent.node[on[other]]))


def updates(run: Recount) -> Needs:
    """An update comes after the gradients of its own device and all messages that bring some to that."""
    giver, update = run.givers, run.updates
    came = _join(_ends(run, (Op.P2P,), "dst"), _ends(run, (Op.REDUCE,), "src"), _ends(run, (Op.ALL_REDUCE,), "members"))
    own, to = matches(_of_tasks(run, giver), _of_tasks(run, update))
    part, into = matches(came.key, _of_tasks(run, update))
    return joined(Needs(giver[own], update[to]), Needs(came.node[part], update[into]))


def steps_end(run: Recount) -> Needs:
    """An update waits for its rule's barrier; an all-reduce for its members' last tasks of a step that is flushed."""
    tasks, found = run.program.tasks, Needs(run.updates[:0], run.updates[:0])
    if run.program.barrier:
        found = Needs(run.barriers, run.updates)
    if run.program.flushes and not run.request.get("overlap_all_reduce"):
        summed = _ends(run, (Op.ALL_REDUCE,), "members")
        step, _, device = summed.key
        order = run.lanes.order[::-1]
        last = find((tasks.step[order], tasks.device[order]), (step, device))
        found = joined(found, Needs(order[last], summed.node))
    return found


def gradients_are_sent_after_they_are_made(run: Recount) -> Iterator[str]:
    """No message takes a sum away before all that belongs into it is there."""
    yield from run.unmet(sums(run), "has ended, whose gradient it takes along")


def updates_come_after_all_their_gradients(run: Recount) -> Iterator[str]:
    """An update starts when every micro-batch has done its backward, and what brings gradients to it has arrived."""
    program, tasks = run.program, run.program.tasks
    ready = np.zeros((program.steps, program.n), dtype=run.end.dtype)
    backward, update = run.givers, run.updates
    np.maximum.at(ready, (tasks.step[backward], tasks.stage[backward]), run.end[backward])
    early = run.start[update] < ready[tasks.step[update], tasks.stage[update]]
    yield from run.names(update[early], "comes before a gradient that belongs into it")
    yield from run.unmet(updates(run), "has brought a gradient that belongs into it")


def barriers_hold(run: Recount) -> Iterator[str]:
    """No update passes its rule's barrier early, and no all-reduce the end of its step."""
    yield from run.unmet(steps_end(run), "has reached the barrier")


def gradients_are_summed_once(run: Recount) -> Iterator[str]:
    """Each device that has gradients of a stage gives their sum away exactly once, or makes the update itself.

    So every micro-batch counts exactly once. Inside a state that travels gradients are summed where it is: there is
    nothing to follow.
    """
    if run.travels:
        return
    update, sent, summed = _of_tasks(run, run.updates), _sent(run), _ends(run, _SUMS, "members")
    step, stage, device = np.unique(np.stack(_of_tasks(run, run.givers), axis=1), axis=0).T
    giver = find((step, stage, device), sent.key)
    for node in sent.node[giver < 0].tolist():
        yield f"{run.whole.program.describe(node)} takes gradients from a device that has none"
    given = np.bincount(giver[giver >= 0], minlength=len(step))
    once = (find(summed.key[:2], (step, stage)) >= 0) | (find(update, (step, stage, device)) < 0)
    wrong = np.flatnonzero(given != once)
    odd = find(update[:2], (step[wrong], stage[wrong]))
    yield from run.names(run.updates[odd], "does not sum every micro-batch exactly once")

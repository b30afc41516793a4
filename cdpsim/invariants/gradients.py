"""Gradients: summed once each, sent with all that belongs into the sum, and there when a stage is updated."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cdpsim.invariants.needs import Key, Needs, combine
from cdpsim.invariants.pieces import members
from cdpsim.invariants.recount import Recount
from cdpsim.model.stage import Tie
from cdpsim.numeric.columns import Ints, find_rows, group_numbers, group_starts, matching_pairs, sort_by
from cdpsim.program import Content, Op
from cdpsim.schedules.state import When


class _Ends(NamedTuple):
    """Messages of gradients, each with one of its devices: (step, stage, device)."""

    node: Ints
    key: Key


def _ends(run: Recount, op: tuple[Op, ...], end: str) -> _Ends:
    """Messages of gradients that travel in one of some ways, each with its source, its destination or all members."""
    messages = run.whole.program.messages
    rows = np.flatnonzero((messages.content == Content.GRADIENT) & np.isin(messages.op, op))
    return _with_devices(run, rows, end)


def _with_devices(run: Recount, rows: Ints, end: str) -> _Ends:
    """These messages, each with its source, its destination or all members."""
    messages, first = run.whole.program.messages, len(run.program.tasks)
    if end == "members":
        rows, device = members(run.whole.program, rows)
    else:
        device = getattr(messages, end)[rows]
    return _Ends(first + rows, (messages.step[rows], messages.stage[rows], device))


def _join(*ends: _Ends) -> _Ends:
    nodes, keys = zip(*ends, strict=True)
    return _Ends(np.concatenate(nodes), tuple(map(np.concatenate, zip(*keys, strict=True))))


_SUMS = (Op.ALL_REDUCE, Op.REDUCE)


def _of_tasks(run: Recount, nodes: Ints) -> Key:
    tasks = run.program.tasks
    return tasks.step[nodes], tasks.stage[nodes], tasks.device[nodes]


def _sent(run: Recount) -> _Ends:
    """Messages of gradients with each device that gives something to them."""
    return _join(_ends(run, (Op.P2P,), "src"), _ends(run, _SUMS, "members"))


def sums(run: Recount) -> Needs:
    """A sum leaves after all gradients of its sender, and what has been sent to that; a collective's of all members.

    That of a tied tensor leaves after those of all its stages.
    """
    giver, sent, came = run.givers, _sent(run), _ends(run, (Op.P2P,), "dst")
    own, to = matching_pairs(_of_tasks(run, giver), sent.key)
    part, on = matching_pairs(came.key, sent.key)
    other = came.node[part] != sent.node[on]
    apart = Needs(giver[own], sent.node[to]), Needs(came.node[part[other]], sent.node[on[other]])
    return combine(*apart, *(Needs(*_pairs(run, giver, tie, nodes)) for tie, nodes in _of_ties(run)))


def _of_ties(run: Recount) -> list[tuple[Tie, Ints]]:
    """Each shared tensor with the messages that sum its gradient, one for each step, and more where states are sharded.

    Of sharded states these are the messages of the tied stages.
    """
    messages, first = run.whole.program.messages, len(run.program.tasks)
    gradients = np.flatnonzero((messages.content == Content.GRADIENT) & (messages.op != Op.P2P))
    ties = [(tie, tie.stages if run.owned else (-1 - k,)) for k, tie in enumerate(run.shared)]
    found = ((tie, gradients[messages.stage[gradients] == stage]) for tie, stages in ties for stage in stages)
    return [
        (tie, first + rows[np.argsort(messages.step[rows])]) for tie, rows in found if len(rows) == run.program.steps
    ]


def _pairs(run: Recount, nodes: Ints, tie: Tie, messages: Ints) -> tuple[Ints, Ints]:
    """Pair tasks of a tied tensor's stages with its message of their step."""
    nodes = nodes[np.isin(run.program.tasks.stage[nodes], tie.stages)]
    return nodes, messages[run.program.tasks.step[nodes]]


def updates(run: Recount) -> Needs:
    """An update comes after the gradients of its own device and all messages that bring some to that.

    Of stages that share a tensor on a device, the first one's update makes it for the others'.
    """
    giver, update = run.givers, run.updates
    came = _join(_ends(run, (Op.P2P,), "dst"), _ends(run, (Op.REDUCE,), "src"), _ends(run, (Op.ALL_REDUCE,), "members"))
    row, taken = _taken(run)
    own, to = matching_pairs(_of_tasks(run, giver), taken)
    part, into = matching_pairs(came.key, taken)
    found = [Needs(giver[own], update[row[to]]), Needs(came.node[part], update[row[into]])]
    for tie, nodes in [] if run.owned else _of_ties(run):
        found += Needs(*reversed(_pairs(run, update, tie, nodes))), _makers(run, tie)
    return combine(*found)


def _taken(run: Recount) -> tuple[Ints, Key]:
    """Each update once for every step whose gradients it takes: its row, and (step, stage, device)."""
    program, tasks, update = run.program, run.program.tasks, run.updates
    count = tasks.step[update] - program.first_step + 1
    row = np.repeat(np.arange(len(update)), count)
    step = tasks.step[update][row] - (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count))
    return row, (step, tasks.stage[update][row], tasks.device[update][row])


def _makers(run: Recount, tie: Tie) -> Needs:
    """The updates of other tied stages on a device, after that of the first."""
    tasks = run.program.tasks
    update = run.updates[np.isin(tasks.stage[run.updates], tie.stages)]
    update = update[sort_by(tasks.step[update], tasks.device[update], tasks.stage[update])]
    first = group_starts(tasks.step[update], tasks.device[update])
    maker = update[first][group_numbers(first, len(update))]
    return Needs(maker[maker != update], update[maker != update])


def steps_end(run: Recount) -> Needs:
    """An update waits for its rule's barrier; sums that wait for the end of steps for their members' last tasks."""
    tasks, found = run.program.tasks, Needs(run.updates[:0], run.updates[:0])
    if run.program.barrier:
        found = Needs(run.barriers, run.updates)
    if run.program.together and run.program.state.reduce is When.END:
        summed = _ends(run, _SUMS, "members")
        step, _, device = summed.key
        order = run.lanes.order[::-1]
        last = find_rows((tasks.step[order], tasks.device[order]), (step, device))
        found = combine(found, Needs(order[last], summed.node))
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
    row, (step, stage, _) = _taken(run)
    early = run.start[update[row]] < ready[step, stage]
    yield from run.names(update[row[early]], "comes before a gradient that belongs into it")
    yield from run.unmet(updates(run), "has brought a gradient that belongs into it")


def barriers_hold(run: Recount) -> Iterator[str]:
    """No update passes its rule's barrier early, and no all-reduce the end of its step."""
    yield from run.unmet(steps_end(run), "has reached the barrier")


def _of_stages(ends: _Ends) -> _Ends:
    """Leave out messages of no stage, which sum tied tensors."""
    some = ends.key[1] >= 0
    return _Ends(ends.node[some], tuple(column[some] for column in ends.key))


def tied_gradients_are_summed_once(run: Recount) -> Iterator[str]:
    """Each step sums the gradient of each shared tensor once, over all devices that have one of its stages."""
    program, tasks, giver = run.whole.program, run.program.tasks, run.givers
    count = np.count_nonzero(program.messages.stage < 0)
    expected = 0 if run.owned else len(run.shared) * program.steps
    if count != expected:
        yield f"{count} messages sum gradients of tied tensors, where {expected} are needed"
    for tie, nodes in _of_ties(run):
        holds = np.unique(tasks.device[giver[np.isin(tasks.stage[giver], tie.stages)]])
        for node in nodes.tolist():
            row, member = members(program, np.array([node - len(tasks)]))
            if not np.array_equal(np.sort(member), holds):
                yield f"{program.describe(node)} leaves out a device that has a tied stage"
            elif not len(run.whole.arrived) and program.messages.size[row[0]] < tie.gradient_bytes:
                yield f"{program.describe(node)} does not carry the tied tensor's gradient"


def gradients_are_summed_once(run: Recount) -> Iterator[str]:
    """Each device that has gradients of a stage gives their sum away exactly once, or makes the update itself.

    So every micro-batch counts exactly once. Inside a state that travels gradients are summed where it is: there is
    nothing to follow.
    """
    if run.travels:
        return
    update, summed = _of_tasks(run, run.updates), _ends(run, _SUMS, "members")
    sent = _of_stages(_sent(run))
    step, stage, device = np.unique(np.stack(_of_tasks(run, run.givers), axis=1), axis=0).T
    giver = find_rows((step, stage, device), sent.key)
    for node in sent.node[giver < 0].tolist():
        yield f"{run.whole.program.describe(node)} takes gradients from a device that has none"
    given = np.bincount(giver[giver >= 0], minlength=len(step))
    once = (find_rows(summed.key[:2], (step, stage)) >= 0) | (find_rows(update, (step, stage, device)) < 0)
    wrong = np.flatnonzero(given != once)
    odd = find_rows(update[:2], (step[wrong], stage[wrong]))
    yield from run.names(run.updates[odd], "does not sum every micro-batch exactly once")

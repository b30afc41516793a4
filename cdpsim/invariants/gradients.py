"""Laws of gradients: each is summed once, sent with all that belongs into its sum, and there before an update."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cdpsim.invariants import exchanges
from cdpsim.invariants.recount import NO_NEEDS, Key, Needs, Recount, combine, members, stages_of
from cdpsim.model.stage import Tie
from cdpsim.numeric.columns import Ints, find_rows, group_numbers, group_starts, matching_pairs, sort_by
from cdpsim.program import Content, Op, Stream
from cdpsim.schedules.state import When

_SUMS = (Op.ALL_GATHER, Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)  # of compressed gradients all numbers come


class _Endpoints(NamedTuple):
    """Messages of gradients, each with one of its devices: (step, stage, device)."""

    node: Ints
    key: Key


def _gradient_messages(run: Recount, **devices: tuple[Op, ...]) -> _Endpoints:
    """Return messages of gradients with their `src`, their `dst` or all their `members`, each for some operations.

    There is a row for each stage that they carry something of.
    """
    program, messages, ends = run.collapsed.program, run.collapsed.program.messages, []
    for end, ops in devices.items():
        rows = np.flatnonzero((messages.content == Content.GRADIENT) & np.isin(messages.op, ops))
        ends.append(members(program, rows) if end == "members" else (rows, getattr(messages, end)[rows]))
    row, device = map(np.concatenate, zip(*ends, strict=True))
    place, stage = stages_of(messages, row)
    row, device = row[place], device[place]
    return _Endpoints(len(program.tasks) + row, (messages.step[row], stage, device))


def _sent(run: Recount) -> _Endpoints:
    """Return messages of gradients with each device that gives something to them."""
    return _gradient_messages(run, src=(Op.P2P,), members=_SUMS)


def sum_needs(run: Recount) -> Needs:
    """Return the needs of sums: a sum leaves after all gradients of its sender, and all that has been sent to it.

    A collective's sum leaves after those of all members, and that of a tied tensor after those of all its stages.
    """
    tied = (_pair_by_step(run, run.producers, tie, messages) for tie, messages in _sums_of_ties(run))
    shared = combine(*(Needs(task, message) for task, message in tied))
    if run.program.state.streams:
        return combine(exchanges.needs_of_streamed_sums(run), shared)
    producer, sent, came = run.producers, _sent(run), _gradient_messages(run, dst=(Op.P2P,))
    made, to = matching_pairs(run.key_of(producer), sent.key)
    part, on = matching_pairs(came.key, sent.key)
    other = came.node[part] != sent.node[on]
    return combine(Needs(producer[made], sent.node[to]), Needs(came.node[part[other]], sent.node[on[other]]), shared)


def _sums_of_ties(run: Recount) -> list[tuple[Tie, Ints]]:
    """Return each shared tensor with the messages that sum its gradient, one for each step.

    Of sharded states these are the messages of each tied stage.
    """
    messages, first = run.collapsed.program.messages, len(run.program.tasks)
    gradients = np.flatnonzero((messages.content == Content.GRADIENT) & (messages.op != Op.P2P))
    ties = [(tie, stage) for k, tie in enumerate(run.shared) for stage in (tie.stages if run.owned else (-1 - k,))]
    sums = ((tie, gradients[messages.stage[gradients] == stage]) for tie, stage in ties)
    return [
        (tie, first + rows[np.argsort(messages.step[rows])]) for tie, rows in sums if len(rows) == run.program.steps
    ]


def _pair_by_step(run: Recount, nodes: Ints, tie: Tie, messages: Ints) -> tuple[Ints, Ints]:
    """Pair tasks of a tied tensor's stages with its message of their step."""
    nodes = nodes[np.isin(run.program.tasks.stage[nodes], tie.stages)]
    return nodes, messages[run.program.tasks.step[nodes]]


def update_needs(run: Recount) -> Needs:
    """Return the needs of updates: the gradients of their device, and all messages that bring gradients to it.

    Of stages that share a tensor on a device, the first one's update makes it for the others'.
    """
    producer, update = run.producers, run.updates
    came = _gradient_messages(run, dst=(Op.P2P,), src=(Op.REDUCE,), members=(Op.ALL_GATHER, Op.ALL_REDUCE))
    row, taken = run.gradients_of_updates
    made, to = matching_pairs(run.key_of(producer), taken)
    part, into = matching_pairs(came.key, taken)
    needs = [Needs(producer[made], update[row[to]]), Needs(came.node[part], update[row[into]])]
    if run.program.state.streams:
        needs = [exchanges.needs_of_exchanged_updates(run)]
    for tie, messages in [] if run.owned else _sums_of_ties(run):
        after, before = _pair_by_step(run, update, tie, messages)
        needs += Needs(before, after), _shared_updates(run, tie)
    return combine(*needs)


def _shared_updates(run: Recount, tie: Tie) -> Needs:
    """Return the needs of other tied stages' updates on a device for that of the first."""
    tasks = run.program.tasks
    update = run.updates[np.isin(tasks.stage[run.updates], tie.stages)]
    update = update[sort_by(tasks.step[update], tasks.device[update], tasks.stage[update])]
    first = group_starts(tasks.step[update], tasks.device[update])
    maker = update[first][group_numbers(first, len(update))]
    return Needs(maker[maker != update], update[maker != update])


def barrier_needs(run: Recount) -> Needs:
    """Return the needs of updates for their barrier, and of sums at the end of a step for their members' last tasks."""
    program, tasks = run.program, run.program.tasks
    needs = Needs(run.barriers, run.updates) if program.barrier else NO_NEEDS
    if not run.request.schedule.order.waits:  # an update takes what its worker has at the end of a step
        step, _, device = run.key_of(run.updates)
        return Needs(_last_tasks(run, step, device), run.updates)
    if not program.together or program.state.reduce is not When.END:
        return needs
    summed = _gradient_messages(run, members=_SUMS)
    messages, first = run.collapsed.program.messages, len(tasks)
    own = messages.stream[summed.node - first] != Stream.ACROSS  # those follow sums that wait
    summed = _Endpoints(summed.node[own], (summed.key[0][own], summed.key[1][own], summed.key[2][own]))
    step, _, device = summed.key
    return combine(needs, Needs(_last_tasks(run, step, device), summed.node))


def _last_tasks(run: Recount, step: Ints, device: Ints) -> Ints:
    """Return the last task of each of some steps and devices."""
    order, tasks = run.lanes.order[::-1], run.program.tasks
    last: Ints = order[find_rows((tasks.step[order], tasks.device[order]), (step, device))]
    return last


def gradients_are_sent_after_they_are_made(run: Recount) -> Iterator[str]:
    """A message sends a sum only after all gradients of that sum have been added."""
    yield from run.report_unmet(sum_needs(run), "has ended, whose gradient it takes along")


def updates_come_after_all_their_gradients(run: Recount) -> Iterator[str]:
    """An update starts when every micro-batch has done its backward, and every message of its gradients has arrived."""
    program, tasks = run.program, run.program.tasks
    ready = np.zeros((program.steps, program.n), dtype=run.end.dtype)
    np.maximum.at(ready, (tasks.step[run.producers], tasks.stage[run.producers]), run.end[run.producers])
    row, (step, stage, _) = run.gradients_of_updates
    common = ~program.is_own(tasks.version[run.updates[row]])
    update, step, stage = run.updates[row[common]], step[common], stage[common]
    yield from run.report(
        update[run.start[update] < ready[step, stage]], "comes before a gradient that belongs into it"
    )
    yield from run.report_unmet(update_needs(run), "has brought a gradient that belongs into it")


def barriers_hold(run: Recount) -> Iterator[str]:
    """No update passes its rule's barrier early, and no all-reduce the end of its step."""
    yield from run.report_unmet(barrier_needs(run), "has reached the barrier")


def tied_gradients_are_summed_once(run: Recount) -> Iterator[str]:
    """Each step sums the gradient of each shared tensor once, over all devices that have one of its stages."""
    program, tasks, producer = run.collapsed.program, run.program.tasks, run.producers
    count = np.count_nonzero((program.messages.stage < 0) & (program.messages.content == Content.GRADIENT))
    expected = 0 if run.owned else len(run.shared) * program.steps
    if count != expected:
        yield f"{count} messages sum gradients of tied tensors, where {expected} are needed"
    for tie, nodes in _sums_of_ties(run):
        copies = np.unique(tasks.device[producer[np.isin(tasks.stage[producer], tie.stages)]])
        for node in nodes.tolist():
            row = node - len(tasks)
            if not np.array_equal(np.sort(program.groups[program.messages.dst[row]]), copies):
                yield f"{program.describe(node)} leaves out a device that has a tied stage"


def gradients_are_summed_once(run: Recount) -> Iterator[str]:
    """Each device that has gradients of a stage gives their sum away exactly once, or makes the update itself.

    So every micro-batch counts exactly once. The gradients of a state that travels are summed where it is, so there is
    nothing to follow.
    """
    if run.travels or run.program.state.streams:
        return
    update, summed, sent = run.key_of(run.updates), _gradient_messages(run, members=_SUMS), _sent(run)
    of_stage = sent.key[1] >= 0  # others sum tied tensors
    step, stage, device = np.unique(np.stack(run.key_of(run.producers), axis=1), axis=0).T
    producer = find_rows((step, stage, device), sent.key)[of_stage]
    for node in sent.node[of_stage][producer < 0].tolist():
        yield f"{run.collapsed.program.describe(node)} takes gradients from a device that has none"
    given = np.bincount(producer[producer >= 0], minlength=len(step))
    once = (find_rows(summed.key[:2], (step, stage)) >= 0) | (find_rows(update, (step, stage, device)) < 0)
    wrong = np.flatnonzero(given != once)
    odd = find_rows(update[:2], (step[wrong], stage[wrong]))
    yield from run.report(run.updates[odd], "does not sum every micro-batch exactly once")

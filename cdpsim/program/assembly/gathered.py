"""Parameters that come for each use and go after it; and what a runtime holds beside them and beside sums."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cdpsim.model.stage import Tie
from cdpsim.numeric.columns import Flags, Ints, group_starts, sort_by
from cdpsim.program import Category, Content, EdgeKind, Kind, Op, Stream
from cdpsim.program.assembly.axis import DataAxis, Groups, Sums
from cdpsim.program.assembly.build import Location, end, start, without_root
from cdpsim.program.assembly.runtime_buffers import gradients_at_first
from cdpsim.program.assembly.updates import pull
from cdpsim.schedules.state import Placed, When


class Uses(NamedTuple):
    """Tasks that use parameters which messages bring them: columns with a row for each use."""

    message: Ints
    task: Ints
    last: Ints  # with whose end they go
    where: Location
    size: Ints


class Gathered(NamedTuple):
    """The bytes, of each task, that gathers put beside what it makes."""

    dropped: Ints  # gathered parameters that go with its end
    ahead: Ints  # what is there when it begins


class _Use(NamedTuple):
    """Uses of gathered parameters: a row for each copy and use."""

    task: Ints  # that reads them first
    last: Ints  # with which they go
    copy: Ints
    number: Ints  # of the pass, among those of its copy
    back: Ints  # 0 in the forward, 1 in the backward, 2 in the second part of a split one
    group: Ints  # that gathers them, among those for forwards or for backwards


def gather_for_uses(axis: DataAxis, prefetch: int, once: Sequence[Tie]) -> Gathered:
    """Gather parameters from shares before their uses: what experts have, and all else."""
    each = [_gather_part(part, prefetch, once) for part in axis.parts if part is axis or part.shard > 1]
    return Gathered(*(np.sum(column, axis=0) for column in zip(*each, strict=True)))


def _gather_part(axis: DataAxis, prefetch: int, once: Sequence[Tie]) -> Gathered:
    """Gather parameters from shares, or fetch them from hosts, before their uses; drop them after these.

    `once` are tied tensors that the model counts in their first stages alone: these stay for later stages.
    """
    build, lanes, copies = axis.build, axis.tables.lanes, axis.copies
    ranks, one = axis.state.reshard if isinstance(axis.state.reshard, int) else axis.shard, axis.passes.copies
    back_groups = axis.groups if ranks == axis.shard else axis.group_copies("run", ranks // one, one)  # for backwards
    use = _list_uses(axis, back_groups, [tie.stages[0] for tie in once])
    step, stage, where = copies.step[use.copy], copies.stage[use.copy], copies.where.take(use.copy)
    size, members = axis.part.parameters[stage], np.where(use.back, ranks, axis.shard)
    share, ahead = -(-size // members), _ahead(axis, use, prefetch)
    each = fetched = _fetch(axis, use, where, share, ahead) if axis.is_hosted else None
    if axis.shard > 1:
        first = group_starts(step, use.number, use.back, use.group)
        number = np.concatenate([axis.groups.number, back_groups.number])
        group = use.group + (use.back > 0) * len(axis.groups.number)
        of, size_of_all = without_root(stage[first], step[first] - 1), (members * share)[first]
        options = {"versions": 1, "stream": Stream.GATHER}
        message = build.send(Op.ALL_GATHER, Content.PARAMETERS, of, number[group[first]], size_of_all, **options)
        each = np.repeat(message, np.diff(np.append(first, len(group))))
        pull(lanes, build, each, lanes.rank[use.task], ahead)
    assert each is not None, "parameters are elsewhere between their uses"
    if fetched is None:
        _wait_for_shares(axis, use, each)
    elif axis.shard > 1:
        build.link(fetched, each)
        build.land(fetched, where, share, end(each))
    build.link(each, use.task)
    gathered = hold_gathered(axis, Uses(each, use.task, use.last, where, size), early=prefetch > 0)
    _hold_between(axis, use, where, size)
    return gathered


def _wait_for_shares(axis: DataAxis, use: _Use, message: Ints) -> None:
    """Let messages of uses wait for the updates of the shares that their devices give."""
    later = use.copy >= axis.copies.in_step
    axis.build.link(axis.update[use.copy[later] - axis.copies.in_step], message[later])


def _fetch(axis: DataAxis, use: _Use, where: Location, size: Ints, ahead: Ints) -> Ints:
    """Fetch shares from hosts, and before from their disks, a task earlier than they are gathered.

    They come in the order of their uses, whichever update is made first.
    """
    build, lanes, on_disks = axis.build, axis.tables.lanes, any(stage.nvme for stage in axis.model.stages)
    of = where._replace(version=where.version - 1)
    messages = [
        build.send(Op.P2P, Content.FETCHED, of, where.device, size, stream=stream)
        for stream in (*[Stream.NVME] * on_disks, Stream.HOST)
    ]
    _wait_for_shares(axis, use, messages[0])
    order = sort_by(where.device, lanes.rank[use.task])
    again = np.flatnonzero(where.device[order[1:]] == where.device[order[:-1]])
    build.link(messages[0][order[again]], messages[0][order[again + 1]], EdgeKind.STREAM)
    for before, after in pairwise(messages):
        build.link(before, after)
    for k, message in enumerate(reversed(messages), start=1):
        pull(lanes, build, message, lanes.rank[use.task], ahead + k)
    return messages[-1]


def _ahead(axis: DataAxis, use: _Use, prefetch: int) -> Ints:
    """Return how many tasks before each use its gather may begin: `prefetch`, and one more before a forward.

    (FSDP2 has two buffers there.) No gather begins before its device has dropped the same parameters, and gathers come
    in the order of their uses.
    """
    rank = axis.tables.lanes.rank
    at = rank[use.task].astype(np.int64)
    forth: Ints = (use.back == 0).astype(np.int64)
    place = at - 1 - prefetch - (prefetch > 0) * forth
    order = sort_by(use.copy, at)
    again = np.flatnonzero(use.copy[order[1:]] == use.copy[order[:-1]])
    held, later = order[again], order[again + 1]
    place[later] = np.maximum(place[later], rank[use.last[held]])
    order = sort_by(at)
    place[order] = np.maximum.accumulate(place[order])
    return at - place


def _list_uses(axis: DataAxis, backward: Groups, producers: Sequence[int]) -> _Use:
    """Return the uses of parameters in the order of their messages: each of a task, or of several where they stay.

    The second part of a split backward is one, too: torch's runtime asserts that parameters are there.
    """
    passes, copies, rank, reshard = axis.passes, axis.copies, axis.tables.lanes.rank, axis.state.reshard
    kinds = [passes.forward, passes.backward, *[passes.last] * passes.splits]
    task = np.concatenate([kind.ravel() for kind in kinds])
    copy = np.tile(copies.row.ravel(), len(kinds))
    number = np.tile(_occurrences(copies.row.ravel()), len(kinds))
    back = np.repeat(np.arange(len(kinds)), passes.stage.size)
    asked = {"no": range(passes.n), "step": range(passes.n), "root": (0, passes.n - 1)}.get(str(reshard), ())
    stays = np.isin(np.tile(passes.stage, len(kinds)), [*asked, *producers])  # after a forward
    back[stays] = 0
    if reshard == "step" or not passes.schedule.order.one_place:
        number[stays] = 0
    order = sort_by(copy, number, back, rank[task])
    order = order[axis.part.parameters[copies.stage[copy[order]]] > 0]
    first = group_starts(copy[order], number[order], back[order])
    last = order[np.append(first[1:], len(order))[: len(first)] - 1]
    first = order[first]
    row, back = copy[first] % copies.in_step, back[first]
    group = np.where(back, backward.of[row], axis.groups.of[row])
    use = _Use(task[first], task[last], copy[first], number[first], back, group)
    order = sort_by(copies.step[use.copy], use.number, use.back, use.group)
    return _Use(*(column[order] for column in use))


def _occurrences(key: Ints) -> Ints:
    """Return how many equal numbers stand before each one.

    >>> _occurrences(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = sort_by(key, np.arange(len(key), dtype=np.int32))
    first = group_starts(key[order])
    number = np.empty(len(key), dtype=np.int32)
    number[order] = np.arange(len(key)) - np.repeat(first, np.diff(np.append(first, len(key))))
    return number


def _hold_between(axis: DataAxis, use: _Use, where: Location, size: Ints) -> None:
    """Hold shares of a smaller group, if there is one, from a forward to its backward, and between its parts."""
    if not isinstance(axis.state.reshard, int):
        return
    size = -(-size // axis.state.reshard)
    order = sort_by(use.copy, use.number, use.back)
    again = np.flatnonzero(use.back[order[1:]] > 0)
    before, after = order[again], order[again + 1]
    begin, until = end(use.last[before]), start(use.task[after])
    axis.build.hold(Category.PARAMETERS, where.take(before), size[before], begin, until)


# Further copies that a runtime holds: of gathered parameters, and of gradients before they are summed


def hold_gathered(axis: DataAxis, uses: Uses, *, early: bool) -> Gathered:
    """Hold gathered parameters from their arrival to the end of their use, and what a runtime holds beside them.

    Messages that --prefetch brings `early` say themselves from when on they need room.
    """
    message, task, last, where, size = uses
    build, behaviours = axis.build, axis.behaviours
    dropped, ahead = np.zeros((2, axis.passes.tasks), dtype=np.int64)
    np.add.at(dropped, last, size)
    forth, before = axis.passes.kind[task] == Kind.F, _find_previous_tasks(axis)[task]
    own, late = _find_late(axis, uses, before, early)
    np.subtract.at(ahead, task, own)
    np.subtract.at(ahead, before, late * ~forth)
    if behaviours.gathers == "copied":
        build.hold(Category.PARAMETERS, where, size - own, start(task), end(last), even_empty=bool(own.any()))
        _hold_copied_from(axis, uses, late * (forth | early))
        begin, until = np.where(forth, start(message), end(before)), np.where(forth | early, task, message)
        build.hold(Category.COMMUNICATION, where, late, begin, start(until))
    else:
        build.hold(Category.PARAMETERS, where, size, end(message), end(last))
        build.land(message, where, size)
    if behaviours.collective_copies:
        build.land(message, where, size)
    if behaviours.backward_prefetch and not early:
        _hold_ahead(axis, uses, ahead, late)
    return Gathered(dropped, ahead)


def _find_late(axis: DataAxis, uses: Uses, before: Ints, early: bool) -> tuple[Ints, Ints]:
    """Return how much of parameters, and of buffers for them, is not there beside the peak of a loss.

    FSDP2 frees what it has gathered before the loss is made. It gathers again when the gradient has reached the output
    of the stage, for that and for the next backward: the buffer is of these, where a use is a backward.
    """
    passes, task, size, forth = axis.passes, uses.task, uses.size, axis.passes.kind == Kind.F
    excesses = (axis.model.size(kind)[passes.tij[2]] for kind in ("loss_forward", "loss_gradient"))
    gathers = axis.behaviours.gathers == "copied" and not (passes.splits or axis.of_experts)
    excess = passes.by_task(*excesses) * gathers
    own = np.minimum(size, excess[task]) * (task == uses.last)
    np.subtract.at(excess, task, own)
    prefetched = (before >= 0) & ~forth[before] & (early or axis.behaviours.backward_prefetch)
    beside = np.where(forth[task], task, before)
    return own, np.where(forth[task] | prefetched, np.minimum(size, excess[beside]), 0)


def _find_previous_tasks(axis: DataAxis) -> Ints:
    """Return the task before each one in its lane, or -1."""
    before = np.full(axis.passes.tasks, -1, dtype=np.int32)
    later, earlier = axis.tables.lanes.before(axis.tables.lanes.rank, 1)
    before[later] = earlier
    return before


def _hold_copied_from(axis: DataAxis, uses: Uses, late: Ints) -> None:
    """Hold the buffers from which the parameters of tasks are copied.

    A backward's goes at once, a forward's when the next forward begins, or with the end of the last one. While that
    next forward's parameters are copied from its own, it has made nothing. So the buffer counts as far as it is more
    than what that forward makes. (An owner has no share to copy.)
    """
    passes, build, task, before = axis.passes, axis.build, uses.task, _find_previous_tasks(axis)
    forth = passes.kind == Kind.F
    follows = np.flatnonzero(forth & forth[before])
    behind = np.full(passes.tasks, -1, dtype=np.int32)  # the forward behind each forward in its lane
    behind[before[follows]] = follows
    after = behind[task]
    until = np.where(after >= 0, start(after), np.where(forth[task], end(task), start(task)))
    build.land(uses.message, uses.where, uses.size - late, until)
    if axis.state.parameters is Placed.SPLIT:
        keeping = axis.keeping
        rows = np.flatnonzero(np.isin(after, task))
        after = after[rows]
        transient = (axis.model.size("forward_transient") + keeping.unused_inputs)[passes.stage_of(after)]
        more = np.maximum(uses.size[rows] - keeping.stash_of(after) - transient, 0)
        build.hold(Category.COMMUNICATION, uses.where.take(rows), more, start(after), end(after))


def _hold_ahead(axis: DataAxis, uses: Uses, ahead: Ints, late: Ints) -> None:
    """Hold the parameters of a backward from the start of the one before it on, and write what is there beside those.

    They are gathered before that one has made anything. So a copy that the collective makes meanwhile counts there
    as far as it is more than what the backward makes.
    """
    backward, before = axis.passes.kind != Kind.F, _find_previous_tasks(axis)
    rows = np.flatnonzero(backward[uses.task] & backward[before[uses.task]])
    task, where, size, late = before[uses.task[rows]], uses.where.take(rows), uses.size[rows], late[rows]
    axis.build.hold(Category.COMMUNICATION, where, size - late, start(task), start(uses.message[rows]))
    if axis.behaviours.collective_copies:
        more = np.maximum(size - _made(axis, task) - ahead[task], 0)
        axis.build.hold(Category.COMMUNICATION, where, more, start(task), end(task))
        ahead[task] += more


def _made(axis: DataAxis, task: Ints) -> Ints:
    """Return what backwards make that is there with their highest moments, and not when they begin."""
    passes, size, stage = axis.passes, axis.model.size, axis.passes.stage_of(task)
    transient = "input_transient" if passes.splits else "backward_transient"
    made = np.where(passes.kind[task] == Kind.W, size("weight_transient")[stage], size(transient)[stage])
    if axis.behaviours.gradients != "kept":
        made += np.where(_begins_sum(axis, task), gradients_at_first(axis.model, axis.behaviours, passes)[stage], 0)
    return made


def _begins_sum(axis: DataAxis, task: Ints) -> Flags:
    """Return whether tasks are the first that give gradients to a sum."""
    passes = axis.passes
    gives: Flags = (passes.kind[task] == Kind.W) | np.array(not passes.splits)
    return gives & (axis.state.reduce is When.EACH or np.isin(task, axis.copies.first_task))


def hold_reduced(axis: DataAxis, held: Ints, size: Ints, consumer: Ints) -> None:
    """Hold what a runtime holds of gradients that copies give to owners' sums.

    `held` are the buffers of their own gradients, and at owners of the sums.
    """
    build, copies, rows = axis.build, axis.copies, np.flatnonzero(consumer != axis.update)
    where, size, message = copies.where.take(rows), size[rows], consumer[rows]
    if axis.behaviours.collective_copies:
        build.hold(Category.COMMUNICATION, where, size, start(message), end(message))
    if axis.behaviours.reductions == "until-next":
        given, owns, last = held[rows], np.flatnonzero(axis.at_owner[rows]), copies.last_task[rows]
        given[owns] = build.hold(Category.GRADIENTS, where.take(owns), size[owns], end(last[owns]), end(message[owns]))
        earlier, later = _next_of_pass(axis, last, where.device)
        build.keep(given[earlier], end(last[later]))


def hold_given(axis: DataAxis, gathered: Gathered | None, sums: Sums, held: Ints) -> None:
    """Hold what a runtime holds of whole gradients that go to shares: `held` has their buffers, a row for each round.

    When a task has ended, its gradients and their copy count, of which a sum is made. The copy is the sum's buffer or,
    beside a share of the sum, a collective's own. The task has let go of all else then but the gradients of its input
    and output, and the sum before is done, whose buffer may be there. So all count as far as they are more than what
    was there.
    """
    copies, behaviours, build = axis.copies, axis.behaviours, axis.build
    rows = np.flatnonzero(sums.taken.ravel() != np.tile(axis.update, len(sums.taken)))
    copy, task, message = rows % len(copies), sums.given.ravel()[rows], sums.taken.ravel()[rows]
    where, size, next_too = copies.where.take(copy), axis.whole.gradients[copy], behaviours.reductions == "until-next"
    earlier, later = _next_of_pass(axis, task, where.device)
    if behaviours.collective_copies:
        build.land(message, where, size)
    if next_too:
        build.keep(held.ravel()[rows[earlier]], end(task[later]))
    if axis.passes.splits or not (next_too or behaviours.collective_copies):
        return
    there = np.zeros_like(size)
    there[later] = size[earlier] * next_too
    keeping, stage = axis.keeping, axis.passes.stage_of(task)
    fresh = _begins_sum(axis, task) & (behaviours.gradients == "fresh")
    there += np.where(fresh, gradients_at_first(axis.model, behaviours, axis.passes)[stage], size)
    there += keeping.stash_of(task) + axis.model.size("backward_transient")[stage]
    there += np.append(keeping.boundary[:-1], 0)[stage]
    if gathered is not None:
        there += gathered.dropped[task] + gathered.ahead[task]
    below, share = (
        np.append(0, keeping.boundary[:-1])[stage],
        behaviours.collective_copies * axis.shares_of("gradients", size, where.stage),
    )
    above = np.where(stage == axis.passes.n - 1, keeping.boundary[-1], 0)  # of other stages it has a buffer
    more = np.maximum(2 * size + share + below + above - there, 0)
    build.hold(Category.COMMUNICATION, where, more, start(task), end(task))


def _next_of_pass(axis: DataAxis, task: Ints, device: Ints) -> tuple[Ints, Ints]:
    """Return the rows of tasks behind which another one of the same device and micro-batch comes, and its row."""
    row = task // axis.passes.phases
    order = sort_by(device, row, axis.tables.lanes.rank[task])
    device, row = device[order], row[order]
    follows = np.flatnonzero((row[1:] == row[:-1]) & (device[1:] == device[:-1]))
    return order[follows], order[follows + 1]

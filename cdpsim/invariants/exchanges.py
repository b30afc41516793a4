"""Laws of exchanges of data ranks in streams: sums of gradients, norms, and parameters from shares.

A *sharding group* is consecutive data ranks that share what is split, each with the device that
has the same place in it. Sums go to shares inside each group, and on across the groups, among those with equal shares.
"""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from cdpsim.invariants.recount import NO_NEEDS, Needs, Recount, StagePart, combine, members, stages_of
from cdpsim.numeric.columns import Flags, Ints, expand_ranges, find_rows, group_numbers, group_starts, matching_pairs
from cdpsim.program import Content, Kind, Op, Stream
from cdpsim.schedules.state import Placed, When


class StreamedSums(NamedTuple):
    """Sums of gradients in streams: a row for each message, member and stage that it carries something of.

    Of a member's sums of the same stages, each step has one after each of its passes, or one: `turn` says which pass.
    """

    node: Ints
    step: Ints
    stage: Ints
    device: Ints
    turn: Ints
    across: Ints  # whether it sums what others have summed inside their groups
    first: Ints  # the first stage of its message
    stages: Ints  # how many stages that has
    number: Ints  # of its message among the member's of the same step, level and stages
    part: Ints  # of the stages that it carries

    def take(self, rows: Ints | Flags) -> "StreamedSums":
        """Return some rows."""
        return StreamedSums(*(column[rows] for column in self))

    @property
    def key(self) -> tuple[Ints, ...]:
        """The columns that say which gradients it takes."""
        return self.step, self.stage, self.device, self.turn

    @property
    def same(self) -> tuple[Ints, ...]:
        """The columns that a sum inside a group has in common with the one across groups that takes it on."""
        return self.step, self.device, self.first, self.stages, self.number, self.part


def find_sums(run: Recount) -> StreamedSums:
    """Return the sums that go in streams, but for those of tensors that stages share."""
    program, messages = run.collapsed.program, run.collapsed.program.messages
    own = (messages.content == Content.GRADIENT) & (messages.stream >= 0) & (messages.stage >= 0)
    row, device = members(program, np.flatnonzero(own))
    across = (messages.stream[row] == Stream.ACROSS).astype(np.int64)
    same = messages.step[row], device, across, messages.stage[row], messages.stages[row]
    order = np.lexsort((row, run.collapsed.start[len(program.tasks) + row], *same[::-1]))
    step, device, across, first, stages = (column[order] for column in same)
    row, part = row[order], _parts_of_sums(run, row[order], (step, device, first, stages), across)
    order = np.lexsort((part, stages, first, across, device, step))
    row, step, device, across, first, stages, part = (
        column[order] for column in (row, step, device, across, first, stages, part)
    )
    head = group_starts(step, device, across, first, stages, part)
    of = group_numbers(head, len(row))
    number, turn = np.arange(len(row)) - head[of], np.zeros(len(row), dtype=np.int64)
    if run.program.state.reduce is When.EACH:
        passes = np.maximum(_count(run.key_of(run.producers), (step, first, device)), 1)
        turn = number // np.maximum(np.bincount(of)[of] // passes, 1)
    place, stage = stages_of(messages, row)
    columns = (device, turn, across, first, stages, number, part)
    return StreamedSums(len(program.tasks) + row[place], step[place], stage, *(column[place] for column in columns))


def _parts_of_sums(run: Recount, row: Ints, same: tuple[Ints, ...], across: Ints) -> Ints:
    """Return the part of stages that sums carry; one across groups goes on with those inside, in their order."""
    part, inside = run.part_of(row), across == 0
    if len(run.parts) == 1 or run.parts[1].ranks == 1 or inside.all():
        inner: Ints = part * inside
        return inner
    order = np.lexsort((np.arange(len(row)), across, *same[::-1]))
    head = group_starts(*(column[order] for column in (*same, across)))
    number = np.empty(len(row), dtype=np.int64)
    number[order] = np.arange(len(row)) - head[group_numbers(head, len(row))]
    found = find_rows(tuple(column[inside] for column in (*same, number)), (*same, number))
    of_sums: Ints = np.where(inside | (found < 0), part, part[inside][found])
    return of_sums


def _count(rows: tuple[Ints, ...], wanted: tuple[Ints, ...]) -> Ints:
    """Return how many rows have the columns of each wanted row."""
    _, which = matching_pairs(rows, wanted)
    return np.bincount(which, minlength=len(wanted[0]))


def _pass_numbers(run: Recount) -> Ints:
    """Return, of each task that gives gradients, the turn in which they are summed: its pass if each has one, or 0."""
    turn = np.zeros(len(run.producers), dtype=np.int64)
    if run.program.state.reduce is When.EACH:
        step, stage, device = run.key_of(run.producers)
        order = np.lexsort((run.lanes.place[run.producers], device, stage, step))
        first = group_starts(step[order], stage[order], device[order])
        turn[order] = np.arange(len(order)) - first[group_numbers(first, len(order))]
    return turn


def _producers_of(run: Recount, sums: StreamedSums) -> tuple[Ints, Ints]:
    """Return the tasks whose gradients sums take from their members themselves: (task, row of the sum)."""
    inside = sums.take(sums.across == 0)
    first = (sums.across == 0) | (find_rows(inside.same, sums.same) < 0)
    rows = np.flatnonzero(first)
    made, to = matching_pairs((*run.key_of(run.producers), _pass_numbers(run)), sums.take(rows).key)
    return run.producers[made], rows[to]


def needs_of_streamed_sums(run: Recount) -> Needs:
    """Return the needs of sums inside groups for gradients, and of those across groups for the sums inside.

    Of factors each sum needs the one before it, of the same stages.
    """
    sums = find_sums(run)
    task, row = _producers_of(run, sums)
    inside, across = sums.take(sums.across == 0), sums.take(sums.across == 1)
    summed, on = matching_pairs(inside.same, across.same)
    later = sums._replace(number=sums.number - 1)
    then, before = matching_pairs((*sums.same, sums.stage, sums.turn), (*later.same, later.stage, later.turn))
    chain = Needs(sums.node[then], sums.node[before]) if run.in_factors else NO_NEEDS
    return combine(Needs(task, sums.node[row]), Needs(inside.node[summed], across.node[on]), chain)


def pace_needs(run: Recount) -> Needs:
    """Return the needs of tasks for sums that have to be over before them.

    Where gradients are split a device has room for those of one task. So after a task that gives some, it goes on when
    the sums of those before are over. Where each pass is summed, it goes on after a pass when all its sums are over.
    """
    state, lanes = run.program.state, run.lanes
    one_at_a_time = state.gradients is Placed.SPLIT and run.shard > 1 and state.reduce is not When.END
    if not one_at_a_time and state.reduce is not When.EACH:
        return NO_NEEDS
    sums = find_sums(run)
    task, row = _producers_of(run, sums)
    place = np.full(len(sums.node), -1)
    np.maximum.at(place, row, lanes.place[task])
    rows = np.flatnonzero(place >= 0)
    order = rows[np.lexsort((-place[rows], sums.node[rows], sums.device[rows]))]
    order = order[group_starts(sums.device[order], sums.node[order])]  # the last place of each message and member
    order = order[np.lexsort((sums.node[order], place[order], sums.device[order]))]
    device, at = sums.device[order], place[order]
    needs = []
    if one_at_a_time:
        first = group_starts(device, at)
        later = np.append(first[1:], 0)[group_numbers(first, len(at))]
        same = (device[later] == device) & (later > 0)
        needs.append(_behind(run, sums.node[order[same]], at[later[same]]))
    if state.reduce is When.EACH:
        first = group_starts(device, lanes.order[at] // run.program.phases)
        of = group_numbers(first, len(order))
        last = np.append(first[1:], len(order))[of] - 1
        inside, across = sums.take(order), sums.take(sums.across == 1)
        on, which = matching_pairs(across.same, inside.same)
        needs += _behind(run, inside.node, at[last]), _behind(run, across.node[on], at[last[which]])
    return combine(*needs)


def _behind(run: Recount, node: Ints, place: Ints) -> Needs:
    """Return the needs for nodes of the tasks behind these places in their lanes."""
    lanes = run.lanes
    after = np.minimum(place + 1, len(lanes.order) - 1)
    rows = np.flatnonzero((after > place) & (lanes.head[after] == lanes.head[place]))
    return Needs(node[rows], lanes.order[after[rows]])


def needs_of_exchanged_updates(run: Recount) -> Needs:
    """Return the needs of updates for sums, or for gradients that nothing sums, and for the norm of all gradients.

    Where devices make all updates of a step at once, each needs all sums of its device. A norm is summed over the
    devices of a sharding group, after all their gradients have been.
    """
    program, state, tasks, update = run.collapsed.program, run.program.state, run.program.tasks, run.updates
    sums = find_sums(run)
    sums = sums.take((sums.across == 1) | (find_rows(sums.take(sums.across == 1).same, sums.same) < 0))  # the last ones
    given, made = (sums.step, sums.stage, sums.device), run.key_of(run.producers)
    alone = find_rows(given, made) < 0
    makers, task = tuple(column[alone] for column in made), run.producers[alone]
    row, taken = run.gradients_of_updates
    own, to = matching_pairs(makers, taken)
    needs = [Needs(task[own], update[row[to]])]
    shared = (program.messages.content == Content.GRADIENT) & (program.messages.stage < 0)
    tied, member = members(program, np.flatnonzero(shared))
    node = np.concatenate([sums.node, len(tasks) + tied])
    step, device = np.append(sums.step, program.messages.step[tied]), np.append(sums.device, member)
    if state.one_step:
        summed, of = matching_pairs((step, device), (tasks.step[update], tasks.device[update]))
        needs.append(Needs(node[summed], update[of]))
    else:
        summed, of = matching_pairs(given, taken)
        needs.append(Needs(sums.node[summed], update[row[of]]))
    if state.clips:
        norm, member = members(program, np.flatnonzero(program.messages.content == Content.NORM))
        at = program.messages.step[norm], member
        for nodes, ends in ((node, (step, device)), (task, (makers[0], makers[2]))):
            summed, into = matching_pairs(ends, at)
            needs.append(Needs(nodes[summed], len(tasks) + norm[into]))
        normed, of = matching_pairs(at, (tasks.step[update], tasks.device[update]))
        needs.append(Needs(len(tasks) + norm[normed], update[of]))
    return combine(*needs)


class GathersForUse(NamedTuple):
    """Gathers of parameters, and the first and last task in each use of them: -1 where one of these is missing."""

    node: Ints
    device: Ints
    task: Ints
    last: Ints


def _all_gathers(run: Recount) -> list[GathersForUse]:
    """Return the gathers of parameters of each part of stages."""
    return [find_gathers(run, part=number) for number, part in enumerate(run.parts) if part.ranks > 1 or not number]


def find_gathers(
    run: Recount, content: Content = Content.PARAMETERS, stream: Stream = Stream.GATHER, part: int = 0
) -> GathersForUse:
    """Pair gathers before uses with these: of a device, version and stage, both in their order; so with other messages.

    A use is a task, or where parameters stay a micro-batch's forward and backward, or all of a step. Where they stay in
    shares of fewer ranks, these gather them for backwards.
    """
    program, tasks, lanes = run.program, run.program.tasks, run.lanes
    messages, first, reshard = run.collapsed.program.messages, len(tasks), run.program.state.reshard
    row, device, few = _find_arriving(run, content, stream, part)
    came = messages.stage[row], messages.step[row] + 1, device, few
    stage, held = tasks.stage[: run.program.compute], run.model.size("parameters")
    task = np.flatnonzero(run.part_size("parameters", run.parts[part], held[stage], stage) > 0)
    whole = range(program.n)
    stay = {"no": whole, "step": whole, "root": (0, program.n - 1)}.get(str(reshard), ())
    stay = [*stay, *(tie.stages[0] for tie in run.once)]  # those with tensors that others use
    stays = np.isin(tasks.stage[task], stay)
    by_few = (tasks.kind[task] != Kind.F) & ~stays & isinstance(reshard, int) & (content == Content.PARAMETERS)
    used = tasks.stage[task], tasks.version[task], tasks.device[task], by_few.astype(np.int64)
    number = _numbers(came, run.collapsed.start[first + row], row)
    use = _numbers(used, lanes.place[task], task)
    step = reshard == "step" or not run.request.schedule.order.one_place
    every = np.where(stays, len(tasks) if step else 2, 1)
    once = use % every == 0
    final = find_rows((*used, use), (*(column[once] for column in used), (use + every - 1)[once]))
    last = task[np.where(final >= 0, final, np.flatnonzero(once))]
    task, use, used = task[once], (use // every)[once], tuple(column[once] for column in used)
    found = find_rows((*came, number), (*used, use))
    spare = np.setdiff1d(np.arange(len(row)), found)
    return GathersForUse(
        np.concatenate([np.where(found >= 0, first + row[found], -1), first + row[spare]]),
        np.concatenate([tasks.device[task], device[spare]]),
        np.concatenate([task, np.full(len(spare), -1)]),
        np.concatenate([last, np.full(len(spare), -1)]),
    )


def _find_arriving(run: Recount, content: Content, stream: Stream, part: int) -> tuple[Ints, Ints, Ints]:
    """Return messages of a part of stages, each with its receivers, and whether fewer ranks take part than have it."""
    collapsed, messages = run.collapsed.program, run.collapsed.program.messages
    row = np.flatnonzero((messages.content == content) & (messages.stream == stream))
    if content != Content.PARAMETERS:
        return row, messages.dst[row], np.zeros(len(row), dtype=np.int64)
    row, device = members(collapsed, row[run.part_of(row) == part])
    few = collapsed.sizes_of_groups[messages.dst[row]] < run.parts[part].ranks
    return row, device, few.astype(np.int64)


def _numbers(key: tuple[Ints, ...], *order: Ints) -> Ints:
    """Return the number of each row among those of equal columns, in an order."""
    rows = np.lexsort((*order[::-1], *key[::-1]))
    first = group_starts(*(column[rows] for column in key))
    number = np.empty(len(rows), dtype=np.int64)
    number[rows] = np.arange(len(rows)) - first[group_numbers(first, len(rows))]
    return number


def gather_needs(run: Recount) -> Needs:
    """Return the needs of uses for the gathers before them."""
    every = [Needs(gathers.node, gathers.task) for gathers in _all_gathers(run)]
    return combine(*(Needs(each.before[each.after >= 0], each.after[each.after >= 0]) for each in every))


def needs_of_early_gathers(run: Recount) -> Needs:
    """Return the needs of gathers for room at their devices.

    They start `prefetch` tasks ahead (plus one before forwards where there are two buffers), in the
    order of their uses; and no earlier than the same parameters have been dropped.
    """
    return combine(*(_needs_of_room(run, gathers, 0) for gathers in _all_gathers(run)))


def _needs_of_room(run: Recount, gathers: GathersForUse, earlier: int) -> Needs:
    """Return the needs of gathers or fetches that start a number of tasks ahead."""
    lanes, tasks = run.lanes, run.program.tasks
    order = np.flatnonzero((gathers.task >= 0) & (gathers.node >= 0))
    order = order[np.argsort(lanes.place[gathers.task[order]], kind="stable")]
    node, task = gathers.node[order], gathers.task[order]
    place, until = lanes.place[task], lanes.place[gathers.last[order]]
    prefetch = min(run.request.prefetch, run.program.compute)
    after = place - 1 - prefetch - (prefetch > 0) * (tasks.kind[task] == Kind.F)
    use = np.lexsort((place, *run.key_of(task)[::-1]))
    same = np.flatnonzero(np.append(False, (np.diff(np.stack(run.key_of(task[use]))) == 0).all(axis=0)))
    after[use[same]] = np.maximum(after[use[same]], until[use[same - 1]])
    after = np.maximum.accumulate(after) - earlier
    room = after >= lanes.head[place]
    return Needs(lanes.order[after[room]], node[room])


def fetch_needs(run: Recount) -> Needs:
    """Return the needs of transfers from hosts in the order of their uses, and needs for them.

    A transfer waits for updates, for disks before hosts, and for room.
    """
    messages = run.collapsed.program.messages
    fetched = messages.content == Content.FETCHED
    if not fetched.any():
        return NO_NEEDS
    streams = [stream for stream in (Stream.NVME, Stream.HOST) if (messages.stream[fetched] == stream).any()]
    chain = [find_gathers(run, Content.FETCHED, stream) for stream in streams]
    needs = [_needs_of_room(run, each, len(chain) - k) for k, each in enumerate(chain)]
    for before, after in pairwise([*chain, *([find_gathers(run)] if run.gathers else [])]):
        first, then = matching_pairs((before.task, before.device), (after.task, after.device))
        needs.append(Needs(before.node[first], after.node[then]))
    ordered = np.lexsort((run.lanes.place[chain[0].task], chain[0].device))
    same = np.flatnonzero(np.diff(chain[0].device[ordered]) == 0)
    needs.append(Needs(chain[0].node[ordered[same]], chain[0].node[ordered[same + 1]]))
    step, stage, device = run.key_of(chain[0].task)
    made, of = matching_pairs(run.key_of(run.updates), (step - 1, stage, device))
    needs.append(Needs(run.updates[made], chain[0].node[of]))
    return combine(*needs, *([] if run.gathers else [Needs(chain[-1].node, chain[-1].task)]))


def needs_of_new_gathers(run: Recount) -> Needs:
    """Return the needs of new parameters' gathers for all updates of their members, made in a step that has an end."""
    state = run.request.state
    if run.gathers or not run.request.schedule.order.together or (state.streams and state.gather == "early"):
        return NO_NEEDS
    program, tasks = run.collapsed.program, run.program.tasks
    row, device = members(program, np.flatnonzero(_gathers(run)))
    made, of = matching_pairs(
        (tasks.step[run.updates], tasks.device[run.updates]), (program.messages.step[row], device)
    )
    return Needs(run.updates[made], len(tasks) + row[of])


def _gathers(run: Recount) -> Flags:
    messages = run.collapsed.program.messages
    gathers: Flags = (messages.op == Op.ALL_GATHER) & (messages.content == Content.PARAMETERS)
    return gathers


def gathered_step_needs(run: Recount) -> Needs:
    """Return the needs of each device's first task in a step for all new parameters that it gathers before."""
    if run.request.state.gather != "step":
        return NO_NEEDS
    program, tasks, order = run.collapsed.program, run.program.tasks, run.lanes.order
    row, device = members(program, np.flatnonzero(program.messages.content == Content.PARAMETERS))
    task = find_rows((tasks.step[order], tasks.device[order]), (program.messages.step[row] + 1, device))
    there = task >= 0
    return Needs(len(tasks) + row[there], order[task[there]])


def _labels(run: Recount, device: Ints, ranks: int, part: StagePart, *, across: bool = False) -> Ints:
    """Return a label of each device's group of so many data ranks, or of the devices with equal shares."""
    places = run.program.devices // run.replicas
    rank, place = np.divmod(device, places)
    together = rank // ranks * places + place if part.ranks > 1 else 0 * device
    return np.where(across, rank % run.run, together * part.apart + rank % part.apart)


def _strange_members(sums: StreamedSums, label: Ints, copies: tuple[Ints, ...]) -> Flags:
    """Flag sums that are not over all copies, which are (step, stage, label, device), of their stage and label."""
    of_message = np.full(int(sums.node.max(initial=0)) + 1, -1)
    of_message[sums.node] = label
    there = find_rows(copies, (sums.step, sums.stage, label, sums.device)) >= 0
    mine, all_of_them = (sums.node, sums.stage), (sums.step, sums.stage, label)
    some = _count(mine, mine) != _count(copies[:3], all_of_them)
    strange: Flags = ~there | some | (of_message[sums.node] != label)
    return strange


def gradients_enter_one_sum(run: Recount) -> Iterator[str]:
    """Each pass's gradient enters one sum in its group, over all copies there, and its share one across the groups.

    Gradients of a local step enter none.

    Of a stage in several buckets these carry all of it together, and no bucket has anything that another one has.
    """
    if not run.program.state.streams:
        return
    sums, program, most = find_sums(run), run.collapsed.program, 3 if run.in_factors else 1
    step, stage, device = np.unique(np.stack(run.key_of(run.producers)), axis=1)
    own = np.zeros(run.program.steps, dtype=bool)
    own[run.program.tasks.step[run.updates[run.program.is_own(run.program.tasks.version[run.updates])]]] = True
    every = step, stage, device
    for (number, part), level in product(enumerate(run.parts), (0, 1) if run.shard > 1 else (0,)):
        if level and part.ranks == 1:
            continue
        has = run.part_size("gradients", part, np.ones_like(stage), every[1]) > 0 if part.experts else slice(None)
        step, stage, device = (column[has] for column in every)
        mine = sums.take((sums.across == level) & (sums.part == number))
        together = step, stage, _labels(run, device, run.run, part, across=level == 1)
        label = _labels(run, mine.device, run.run, part, across=level == 1)
        odd = _strange_members(mine, label, (*together, device))
        for node in mine.node[odd].tolist():
            yield f"{program.describe(node)} is not over all devices whose gradients it takes"
        ranks, copies = (run.request.shape.replicas // run.run, 1) if level else (part.sums, part.copies)
        alone = own[step] | (_count(together, together) * (ranks if run.program.fold > 1 else copies) == 1)
        turns = np.zeros(len(step), dtype=np.int64)
        if run.program.state.reduce is When.EACH:
            turns = _count(run.key_of(run.producers), (step, stage, device)) - 1
        of, turn = expand_ranges(0 * turns, turns + 1)
        wanted = step[of], stage[of], device[of], turn
        inner = (mine.first < mine.stage) & (mine.stage < mine.first + mine.stages - 1)
        many, within = _count(mine.key, wanted), _count(mine.take(inner).key, wanted)
        for row in np.flatnonzero(np.where(alone[of], many > 0, (many < 1) | ((many > most) & (within > 0)))).tolist():
            where = f"(t={wanted[0][row]},j={wanted[1][row]}) of device {wanted[2][row]}"
            yield f"{many[row]} sums take the gradients {where}"
        for node in mine.node[find_rows(wanted, mine.key) < 0].tolist():
            yield f"{program.describe(node)} comes after all gradients have been summed"


def parameters_are_gathered_for_uses(run: Recount) -> Iterator[str]:
    """Shares are gathered where tasks use them, whole, and by all ranks of a group together; nothing else is."""
    program, messages, first = run.collapsed.program, run.collapsed.program.messages, len(run.program.tasks)
    if run.shard == 1:
        return
    if run.gathers:
        spare = np.concatenate([gathers.node[gathers.task < 0] for gathers in _all_gathers(run)])
    else:
        row, device = members(program, np.flatnonzero(_gathers(run)))
        place, stage = stages_of(messages, row)
        tasks, task = run.program.tasks, np.arange(run.program.compute)
        read = tasks.stage[task], tasks.version[task], tasks.device[task]
        brought = run.versions_of(messages.step[row[place]])
        some = find_rows(read, (stage, brought, device[place])) >= 0
        ends = row[messages.step[row] == run.program.updated - 1] if run.program.thrown_away else row[:0]
        spare = first + np.setdiff1d(row, np.append(row[place[some]], ends))
    for node in spare.tolist():
        yield f"{program.describe(node)} brings a device what it does not use"
    for each in np.flatnonzero(_gathers(run)).tolist():
        _, stages = stages_of(messages, np.array([each]))
        part, copies = run.parts[run.part_of(np.array([each]))[0]], program.copies_of(messages.dst[each])
        group, many = program.ranks_of(messages.dst[each]) // copies, len(program.ranks_of(messages.dst[each]))
        label = _labels(run, group, many * part.apart // copies, part)
        size = run.model.size("parameters")[stages]
        if not run.gathers:
            size = run.sizes_on("parameters", np.full(len(stages), group[0] % run.program.devices), stages)
        whole = run.part_size("parameters", part, size, stages).sum()
        if part.ranks % many or copies != part.copies or (label != label[0]).any():
            yield f"{program.describe(first + each)} is not among ranks that share"
        elif not whole <= messages.size[each] < whole + many:
            yield f"{program.describe(first + each)} has {messages.size[each]} B of {whole} B"


def new_parameters_are_gathered_after_updates(run: Recount) -> Iterator[str]:
    """Where steps have an end, devices gather new parameters behind all their updates, but for early gathers."""
    yield from run.report_unmet(needs_of_new_gathers(run), "has ended, which a device of it makes before")


def streams_carry_one_message_at_a_time(run: Recount) -> Iterator[str]:
    """A device has one message at a time in each stream, at any overlap.

    Gathers and sums in groups are one stream, sums across groups another. Transfers of hosts and disks have streams,
    too. All members have them in one order.
    """
    if not run.program.state.streams:
        return
    collapsed, messages, first = run.collapsed, run.collapsed.program.messages, len(run.program.tasks)
    single = (messages.op == Op.P2P) & (messages.stream >= 0)  # fetched from the device's host
    row, device = members(collapsed.program, np.flatnonzero((messages.stream >= 0) & ~single))
    row, device = np.append(row, np.flatnonzero(single)), np.append(device, messages.dst[single])
    stream, node = np.where(messages.stream[row] == Stream.REDUCE, Stream.GATHER, messages.stream[row]), first + row
    if run.program.state.updates_in_stream:
        node, device = np.append(node, run.updates), np.append(device, run.program.tasks.device[run.updates])
        stream = np.append(stream, np.full(len(run.updates), Stream.GATHER))
    order = np.lexsort((node, collapsed.end[node], collapsed.start[node], stream, device))
    node, device, stream = node[order], device[order], stream[order]
    until, number = collapsed.end[node], collapsed.number[node]
    parts = number >= 0
    until[parts] = collapsed.arrived[number[parts], device[parts]]
    same = (device[1:] == device[:-1]) & (stream[1:] == stream[:-1])
    for place in np.flatnonzero(same & (collapsed.start[node[1:]] < until[:-1])).tolist():
        before, after = (collapsed.program.describe(int(node[k])) for k in (place, place + 1))
        yield f"{after} starts while {before} is in the same stream of device {device[place]}"

"""Laws of gradients: each is summed once, sent with all that belongs into its sum, and there before an update.

Of compressed sums, the bytes that messages carry and that ranks hold are counted in fractions, from the request's text.
"""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from cdpsim.invariants import exchanges
from cdpsim.invariants.recount import NO_NEEDS, Key, Needs, Recount, combine, members, stages_of
from cdpsim.model import PRECISIONS
from cdpsim.model.stage import Tie
from cdpsim.numeric.columns import Ints, Times, find_rows, group_numbers, group_starts, matching_pairs, sort_by
from cdpsim.program import Category, Content, Op, Stream
from cdpsim.schedules.state import When
from cdpsim.trace.metrics import memory

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


_SCALE = _INDEX = 4  # bytes
_WIDTHS = {"bf16": Fraction(2), "fp16": Fraction(2), "int8": Fraction(1), "int4": Fraction(1, 2)}


class _Rate(NamedTuple):
    """A rate of a request: bytes of a number on its way and in memory, numbers with a scale, the share or the rank."""

    sent: Fraction
    own: int
    block: int | None = None
    share: Fraction | None = None
    rank: int = 0  # of matrices' factors

    def bytes_of(self, size: int) -> int:
        """Return the bytes in which gradients of a size are sent."""
        numbers = -(-size // self.own)
        if self.share is not None:
            return ceil(self.share * numbers) * (self.own + _INDEX)
        scales = ceil(Fraction(numbers, self.block)) if self.block else 0
        return min(size, ceil(numbers * self.sent) + _SCALE * scales)

    @property
    def least(self) -> Fraction:
        """The least bytes a number."""
        if self.share is not None:
            return self.share * (self.own + _INDEX)
        return min(Fraction(self.own), self.sent + (Fraction(_SCALE, self.block) if self.block else 0))


def _rate_of(run: Recount) -> _Rate | None:
    """Return what gradients are compressed to; None where they are not."""
    given, model = run.request.given["compress"], run.request.model
    if given is None:
        return None
    weights, sums = (int(model.size(kind).sum()) for kind in ("parameters", "gradients"))
    width = PRECISIONS.get(model.precision, 4)
    own = max(1, width * sums // weights) if weights else width
    name, _, number = given.partition(":")
    if name == "powersgd":
        return _Rate(Fraction(own), own, rank=int(number))
    if name == "topk":
        return _Rate(Fraction(0), own, share=Fraction(number))
    return _Rate(_WIDTHS[name], own, block=int(number or 512) if name in ("int8", "int4") else None)


def _own_gradients(run: Recount) -> Ints:
    """Return the bytes of gradients that each stage has for itself; owners of states have whole ones."""
    own = run.model.size("gradients")
    for tie in run.shared:
        own[list(tie.stages)] -= 0 if run.owned else tie.gradient_bytes
    return own


def _bytes_in_turn(run: Recount, rate: _Rate, stage: int) -> list[int]:
    """Return the bytes that a stage sends unfactored, then of all left factors, then of all right ones."""
    held, shapes = run.model.stages[stage], [*run.model.stages[stage].tensors]
    numbers = sum(map(prod, shapes))
    for tie in run.shared:
        tied = [
            each for each in shapes if stage in tie.stages and prod(each) * held.parameters == tie.parameters * numbers
        ]
        shapes.remove(tied[0]) if tied else None
    sent = [0, 0, 0]
    for high, *others in shapes:
        wide, rank = prod(others), rate.rank
        small = high * wide > 2 * rank * (high + wide)
        of_shape = (0, rank * high, rank * wide) if small else (high * wide, 0, 0)
        sent = [before + each for before, each in zip(sent, of_shape, strict=True)]
    if not shapes:
        return [int(_own_gradients(run)[stage]), 0, 0]
    return [each * held.gradient_bytes // numbers for each in sent]


def _wrong_factors(run: Recount, rate: _Rate) -> Iterator[str]:
    """Report whole stages that do not send unfactored tensors first, then left factors, then right ones."""
    sums, first = exchanges.find_sums(run), len(run.program.tasks)
    begin = run.collapsed.start[sums.node]  # of messages that take no time the last one has the first row
    order = np.lexsort((-sums.node, begin, sums.turn, sums.device, sums.stage, sums.step))
    key = [column[order] for column in sums.key]
    for rows in np.split(order, group_starts(*key)[1:]) if len(order) else ():
        row, wanted = sums.node[rows] - first, _bytes_in_turn(run, rate, int(sums.stage[rows[0]]))
        sent = run.collapsed.program.messages.size[row].tolist()
        if sent != ([each for each in wanted if each] or [0]):
            yield f"{_name(run, int(row[0]))}, and those after it, carry {sent} B, not {wanted} B"


def gradients_take_their_bytes_along(run: Recount) -> Iterator[str]:
    """Messages of gradients carry all of their sums, in the bytes that these are compressed to; shares may be padded.

    Of the largest numbers each member has those of all others in the end: an all-gather brings them.
    """
    messages, rate, own = run.collapsed.program.messages, _rate_of(run), _own_gradients(run)
    sums = np.flatnonzero(messages.content == Content.GRADIENT)
    sparse = rate is not None and rate.share is not None
    for row in sums[(messages.op[sums] == Op.ALL_GATHER) != sparse].tolist():
        if messages.stage[row] >= 0 or _is_of_several_ranks(run, row):
            yield f"{_name(run, row)} goes by another operation than its numbers are summed"
    streamed = run.program.state.streams
    for row in sums[(messages.stage[sums] < 0) | (not streamed)].tolist():
        stage = int(messages.stage[row])
        size = run.shared[-1 - stage].gradient_bytes if stage < 0 else int(own[stage])
        compressed = rate is not None and (stage >= 0 or _is_of_several_ranks(run, row))
        wanted = size
        if rate is not None and compressed and not rate.rank:
            wanted = rate.bytes_of(size) * (_members(run, row) if sparse else 1)
        if messages.size[row] != wanted:
            yield f"{_name(run, row)} carries {messages.size[row]} B of gradients, not {wanted} B"
    if streamed:
        yield from _wrong_bytes_in_streams(run, own, rate)
    if rate is not None and rate.rank and run.program.state.buckets is None:
        yield from _wrong_factors(run, rate)


def _name(run: Recount, row: int) -> str:
    return run.collapsed.program.describe(len(run.program.tasks) + row)


def _members(run: Recount, row: int) -> int:
    program = run.collapsed.program
    return len(program.ranks_of(program.messages.dst[row]))


def _is_of_several_ranks(run: Recount, row: int) -> bool:
    """Return whether some stage of a shared tensor is on several ranks."""
    tasks, tie = run.program.tasks, run.shared[-1 - int(run.collapsed.program.messages.stage[row])]
    copies = [np.unique(tasks.device[run.producers[tasks.stage[run.producers] == stage]]) for stage in tie.stages]
    return max(map(len, copies)) * run.program.fold > 1


def _wrong_bytes_in_streams(run: Recount, own: Ints, rate: _Rate | None) -> Iterator[str]:
    """Report members whose sums do not carry all gradients of their stages: each message may be rounded up."""
    first, messages, sums = len(run.program.tasks), run.collapsed.program.messages, exchanges.find_sums(run)
    key = sums.step, sums.device, sums.turn, sums.across, sums.part
    order = np.lexsort(key[::-1])
    for rows in np.split(order, group_starts(*(column[order] for column in key))[1:]) if len(order) else ():
        node, part, stage = np.unique(sums.node[rows]), run.parts[sums.part[rows[0]]], np.unique(sums.stage[rows])
        row, shard = node - first, part.ranks
        gathered = messages.op[row] == Op.ALL_GATHER
        whole_sums = rate is not None and rate.rank  # of factors, which no rank has a share of
        parts = np.where(gathered, 1 / _members(run, int(row[0])), 1 if whole_sums else shard)
        sent = round(float((messages.size[row] * parts).sum()))
        whole = int(run.part_size("gradients", part, own[stage], stage).sum())
        least, spare = Fraction(whole), Fraction(shard - 1)
        if rate is not None and rate.rank:
            least = Fraction(sum(sum(_bytes_in_turn(run, rate, j)) for j in stage.tolist()))
        elif rate is not None:
            least = Fraction(whole, rate.own) * rate.least
            once = 1 if gathered.all() else shard
            spare = once * (1 + _SCALE + rate.least) + (rate.own + _INDEX if gathered.all() else 0) + shard
        if not least <= sent <= least + len(node) * spare:
            yield f"{_name(run, int(row[0]))}, and those beside it, carry {sent} B for {whole} B of gradients"


def ranks_have_room_for_what_they_encode(run: Recount) -> Iterator[str]:
    """From the last gradient of a sum until it has ended, its members have what they have encoded; residuals always.

    Messages of few numbers are not compressed. Residuals are as large as the gradients that ranks sum.
    """
    rate = _rate_of(run)
    if rate is None or not run.together:
        return
    buffers = run.program.buffers
    spans = [_find_encoded(run, rate)] + ([_find_residuals(run, rate)] if rate.share is not None or rate.rank else [])
    there = np.flatnonzero(buffers.category == Category.COMMUNICATION)
    begins, ends = memory.buffer_spans(buffers, run.start, run.end)
    held = _Held(buffers.device[there], begins[there], ends[there], -buffers.size[there])
    device, begin, end, size = (np.concatenate(column) for column in zip(held, *spans, strict=True))
    key, _, lack = memory.step_function(device, begin, end, size)
    for short in np.unique(key[lack > 0]).tolist():
        yield f"device {short} has no room for what it has encoded of its gradients"


class _Held(NamedTuple):
    """Bytes on devices: a row for each device and span of time."""

    device: Ints
    begin: Times
    end: Times
    size: Ints


def _find_residuals(run: Recount, rate: _Rate) -> _Held:
    """Return what devices hold, until their last tasks, of the gradients that they sum with others, and of factors."""
    tasks, compute = run.program.tasks, run.program.compute
    until = np.zeros(run.program.devices, dtype=run.end.dtype)
    np.maximum.at(until, tasks.device[:compute], run.end[:compute])
    size = np.array([_residual(run, rate, device) for device in range(len(until))])
    return _Held(np.arange(len(until)), np.full_like(until, run.start.min()), until, size)


def _residual(run: Recount, rate: _Rate, device: int) -> int:
    """Return the bytes of gradients that a device sums with others, and of their factors."""
    messages, tasks = run.collapsed.program.messages, run.program.tasks
    mine = np.unique(tasks.stage[run.producers[tasks.device[run.producers] == device]])
    sums = np.flatnonzero((messages.content == Content.GRADIENT) & (messages.stage >= 0))
    low, high = messages.stage[sums], messages.stage[sums] + messages.stages[sums]
    shared = [stage for stage in mine.tolist() if ((low <= stage) & (stage < high)).any()]
    factors = sum(sum(_bytes_in_turn(run, rate, stage)[1:]) for stage in shared if rate.rank)
    return factors + int(
        run.sizes_on("gradients", np.full(len(shared), device), np.array(shared, dtype=np.int64)).sum()
    )


def _find_encoded(run: Recount, rate: _Rate) -> _Held:
    """Return what members have encoded for each sum; of whole stages that go as factors, a copy until the last sum."""
    program, messages, first = run.program, run.collapsed.program.messages, len(run.program.tasks)
    needs = sum_needs(run)
    row = needs.after - first
    given = (needs.before >= 0) & (needs.before < first) & (messages.op[row] != Op.P2P)
    whole = [each for each in np.unique(row[messages.stage[row] < 0]) if not _is_of_several_ranks(run, each)]
    given &= ~np.isin(row, whole)
    task, row = needs.before[given], row[given]
    if rate.rank:
        order = np.lexsort((run.collapsed.end[first + row], task))
        order = order[np.append(group_starts(task[order])[1:], len(order)) - 1 if len(order) else []]
        order = order[(messages.stage[row[order]] >= 0) & (run.program.state.buckets is None)]
        task, row = task[order], row[order]
    elif rate.share is None:  # what is larger than this is really smaller than it was
        fewest = 5 * rate.own / (rate.own - rate.least) if rate.own > rate.least else np.inf
        few = messages.size[row] <= float(fewest)
        task, row = task[~few], row[~few]
    order = np.lexsort((run.end[task], row, program.tasks.device[task]))
    task, row = task[order], row[order]
    head = group_starts(program.tasks.device[task], row)
    last = np.append(head[1:], len(row))[: len(head)] - 1
    task, row = task[last], row[last]
    device, end, number = program.tasks.device[task], run.collapsed.end[first + row], run.collapsed.number[first + row]
    pieces = number >= 0
    end[pieces] = run.collapsed.arrived[number[pieces], device[pieces]]
    ranks = np.array([part.ranks for part in run.parts])[run.part_of(row)]
    many = np.where(messages.op[row] == Op.REDUCE_SCATTER, ranks, 1)
    size = _own_gradients(run)[messages.stage[row]] if rate.rank else messages.size[row] * many
    return _Held(device, run.end[task], end, size)

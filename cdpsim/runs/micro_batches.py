"""Folding of micro-batches: the metrics of a step with many of them, from one run of a step with few.

In the middle of a step micro-batches repeat each other: each task or message there is a time later than the one before
it of its kind, and that time is the same for all. The run is cut before and behind a unit of micro-batches.
If the part behind the cuts depends on the unit between them alone, a longer run has more of these units, and nothing
else. Times are compared as they are: slots, or whole quanta. Results are kept for other numbers.

Suppose every boundary node x, before the first cut and with a dependent behind it, has end(x + unit) = end(x) + d with
one d. Then the part behind the second cut is the part behind the first, d later, and so for each further unit. One run
shows this, if programs of one unit more have the same before the second cut and behind the first. A program of several
steps is cut in the middle of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.model.runtime import PAPER
from cdpsim.numeric.columns import Flags, Ints, Kept, Times, dense_ranks, group_starts, row_numbers, sort_by
from cdpsim.numeric.paths import longest_paths
from cdpsim.program import Program, once_a_program
from cdpsim.request import Request
from cdpsim.request.sharing import accepts
from cdpsim.runs import Run
from cdpsim.runs.assembling import structure_of
from cdpsim.runs.ranks import exchanged_bytes
from cdpsim.runs.steady_metrics import FewSteps, Metrics, metrics_of_steps, steady_steps
from cdpsim.runs.steady_state import SteadyState
from cdpsim.trace.metrics import communication
from cdpsim.trace.metrics.steady import steps_of_nodes
from cdpsim.trace.metrics.waiting import Waits

UnitPairs = tuple[Ints, Ints]  # nodes, and the same ones of a unit later


class ByClass(NamedTuple):
    """Nodes in classes that differ in micro-batch alone, each in the order of these."""

    classes: Ints  # what distinguishes each class, a column for it
    order: Ints
    first: Ints  # where each class begins in the order, and the end
    number: Ints  # the class of each node


@once_a_program
def nodes_by_class(program: Program) -> ByClass:
    """Sort the nodes of a program, those of one step, operation and content together."""
    tasks, messages, parts = program.tasks, program.messages, program.parts
    of_part = program.first_messages - len(tasks)
    rows = (
        np.split(steps_of_nodes(program), [len(tasks), program.message_nodes.stop]),
        (tasks.step, messages.step, parts.step),
        (0 * tasks.kind, 1 + messages.op, 9 + parts.sends),
        (tasks.kind, messages.content, messages.content[of_part]),
        (tasks.stage, messages.stage, messages.stage[of_part]),
        (tasks.device, messages.src, parts.device),
        (tasks.lane, messages.dst, messages.dst[of_part]),
        (0 * tasks.kind, messages.stream, messages.stream[of_part]),
    )
    columns: Ints = np.array([np.concatenate(row, dtype=np.int64) for row in rows])
    micro_batch = np.concatenate([tasks.micro_batch, messages.micro_batch, messages.micro_batch[of_part]])
    _, first, number = np.unique(row_numbers([*columns]), return_index=True, return_inverse=True)
    number = number.astype(np.int32)
    order = sort_by(number, micro_batch.astype(np.int64) + 1)
    return ByClass(columns[:, first], order, np.append(group_starts(number[order]), len(order)), number)


class Cut(NamedTuple):
    """A cut of a program, and the unit of micro-batches behind it."""

    ends: UnitPairs  # those before it for which others behind it wait
    before: UnitPairs  # all before it that grow in number
    behind: UnitPairs  # all behind it that have one of a unit later
    first: Ints  # nodes of the first unit
    last: Ints  # and of the last one
    fixed: tuple[Ints, Ints]  # nodes before the cut, and behind it, that do not grow in number
    unit: Ints  # its nodes
    early: UnitPairs  # nodes that wait for others from before the cut before, which are to end sooner than that decides


class Repetition(NamedTuple):
    """A part of a run between two times in which all starts and ends come again, later by one amount."""

    later: Any
    since: Any
    until: Any


def find_repetition(cut: Cut, start: Times, end: Times) -> Repetition | None:
    """Return what a run repeats around a cut; None where it has not settled there.

    A run of a unit more is the same as this one for `later` beyond `until`; then it does what this one does from
    `until` on. For that, each node that is not repeated is on one side: before the cut it has ended by `since`; behind
    it, it does not start before `until`, and the same node of the next unit not before `later` beyond that.
    """
    one, again = cut.ends
    if (end[cut.early[0]] >= start[cut.early[1]]).any():
        return None
    growth = end[again] - end[one]
    later = growth[0].item()
    if later <= 0 or (growth != later).any():
        return None
    (earlier, again), (back, once_more) = (_unrepeated(pairs, start, later) for pairs in (cut.before, cut.behind))
    (early, late), first, last = cut.fixed, cut.first, cut.last
    since = np.concatenate([end[earlier], end[again] - later, end[first] - later, end[early]]).max().item()
    until = np.concatenate([start[back], start[once_more] - later, start[last], start[late] - later]).min().item()
    return Repetition(later, since, until) if since < until else None


def _unrepeated(pairs: UnitPairs, start: Times, later: Any) -> UnitPairs:
    """Return the pairs (x, x + unit) with start(x + unit) != start(x) + later."""
    one, again = pairs
    rows = np.flatnonzero(start[again] - start[one] != later)
    return one[rows], again[rows]


@once_a_program
def find_cuts(program: Program, longer: Program) -> list[Cut]:
    """Return cuts in the middle of each step; none where a program of a unit more is not the same between them.

    Buffers are the same on both sides, too, and end on the side where they begin: devices hold the same before and
    behind the unit.
    """
    has_several_ends = len(program.buffers.kept) or len(longer.buffers.kept)
    if has_several_ends or len(program.releases) or len(program.parts) or program.fill:
        return []
    nodes, others = nodes_by_class(program), nodes_by_class(longer)
    if not np.array_equal(nodes.classes, others.classes):
        return []
    early, size, more = _is_early(program), np.diff(nodes.first), np.diff(others.first) - np.diff(nodes.first)
    count = np.bincount(nodes.number[early], minlength=len(size))
    if not more.any() or (more < 0).any() or (count + more > size).any() or not _are_alike(program, nodes, more > 0):
        return []
    here = _Sides.of(program, nodes.first, count, more, np.zeros_like(more))
    there = _Sides.of(longer, nodes.first, count, more, more)
    if (early == here.is_tail[:-1]).any() or not here.move_alike(program):
        return []
    sides = zip(here.facts(program), there.facts(longer), strict=True)
    if not all(_are_same(one, other) for one, other in sides):
        return []
    return [_cut_of(program, more, here, step) for step in range(program.steps)]


@once_a_program
def _waits(program: Program) -> tuple[Ints, Ints]:
    """Return dependencies, without those that follow from the order of a class's tasks in a lane.

    A node that waits for many of them, as an update for all micro-batches, waits for the last one; of many that wait
    for one node, as for the update of the step before, the first one does.
    """
    (before, after), nodes, place = program.waits(), nodes_by_class(program), np.empty(program.nodes, dtype=np.int64)
    place[nodes.order] = np.arange(program.nodes)
    made = place[program.lane_tasks]
    number = nodes.number[program.lane_tasks]
    by_class = sort_by(number)
    late = number[by_class][1:][(np.diff(made[by_class]) < 0) & (np.diff(number[by_class]) == 0)]
    ordered = np.zeros(len(nodes.first), dtype=bool)
    ordered[np.setdiff1d(number, late)] = True
    ordered, single = ordered[nodes.number], (np.diff(nodes.first) == 1)[nodes.number]
    kept = np.ones(len(before), dtype=bool)
    for many, one, least in ((before, after, 1), (after, before, 0)):
        rows = np.flatnonzero(ordered[many] & single[one])
        rows = rows[sort_by(nodes.number[many[rows]], one[rows], place[many[rows]])]
        first = group_starts(nodes.number[many[rows]], one[rows])
        others = np.setdiff1d(np.arange(len(rows)), first)
        kept[rows[others - least]] = False  # each has one in its group behind it, or else before it
    return before[kept], after[kept]


def _are_alike(program: Program, nodes: ByClass, grows: Flags) -> bool:
    """Return whether messages of classes that grow in number are of one size in each class, and take one time."""
    size = np.zeros(program.nodes, dtype=np.int64)
    size[program.message_nodes] = program.messages.size
    size, number = size[nodes.order], nodes.number[nodes.order]
    changes = np.flatnonzero((size[1:] != size[:-1]) & (number[1:] == number[:-1]))
    return not grows[number[changes]].any()


def _is_early(program: Program) -> Flags:
    """Return whether each node starts in the first half of its step in a run in which each task takes one slot."""
    duration = np.zeros(program.nodes, dtype=np.int64)
    duration[: program.compute] = 1
    start, end, _ = longest_paths(*program.waits(), duration, np.zeros_like(duration))
    step = steps_of_nodes(program)
    begun, ended = np.full(program.steps, end.max(initial=0)), np.zeros(program.steps, dtype=np.int64)
    np.minimum.at(begun, step[: program.compute], start[: program.compute])
    np.maximum.at(ended, step[: program.compute], end[: program.compute])
    early: Flags = 2 * start < (begun + ended)[step]
    return early


class _Sides(NamedTuple):
    """Nodes by their step and side of its cuts, and their places in the shorter program.

    The last of each column is for the start of the run.
    """

    step: Ints
    is_head: Flags  # up to the second cut of its step
    is_tail: Flags  # from the first cut on
    head: Ints  # places of the head; -1 elsewhere
    tail: Ints  # places of the tail, and of nodes before it; -1 for nodes that do not move with it
    unmoved: Ints  # places of the head, and of classes that do not grow

    @classmethod
    def of(cls, program: Program, first: Ints, count: Ints, more: Ints, moved: Ints) -> "_Sides":
        """Return the sides of a program whose tails are moved: of each class `count` nodes are before the cut."""
        nodes = nodes_by_class(program)
        number, place = nodes.number, np.empty(len(nodes.order), dtype=np.int64)
        place[nodes.order] = np.arange(len(place))
        index = place - nodes.first[number]
        back = index - moved[number]
        is_head, is_tail = index < (count + more)[number], back >= count[number]
        head = np.where(is_head, first[number] + index, -1)
        tail = np.where((back >= 0) & (is_tail | (more[number] > 0)), first[number] + back, -1)
        unmoved = np.where(is_head | (more[number] == 0), first[number] + index, -1)
        columns = (steps_of_nodes(program), is_head, is_tail, head, tail, unmoved)
        of_start = (0, True, False, first[-1], -1, first[-1])
        return cls(*(np.append(*pair) for pair in zip(columns, of_start, strict=True)))

    def parts(self) -> Iterator[tuple[Flags, Ints]]:
        """Yield which nodes are between the cuts of a step and those of the next, with both units; and their places."""
        for step in range(int(self.step.max()) + 2):
            there = ((self.step == step) & self.is_head) | ((self.step == step - 1) & self.is_tail)
            yield there, np.where(self.step >= step, self.head, np.where(self.step == step - 1, self.tail, -1))

    def waits(self, program: Program) -> tuple[Ints, Ints, Flags]:
        """Return dependencies, and whether each is on a node that does not move with it, as before other cuts."""
        before, after = _waits(program)
        is_early = np.zeros(len(before), dtype=np.bool_)
        for there, place in self.parts():
            is_early |= there[after] & (place[before] < 0)
        return before, after, is_early

    def move_alike(self, program: Program) -> bool:
        """Return whether all behind a cut waits for what moves with it, and else for what stays where it is."""
        before, after, is_early = self.waits(program)
        alone = np.bincount(after[~is_early], minlength=program.nodes) == 0
        alone &= (self.is_tail | (self.step > 0))[:-1]
        return bool((self.unmoved[before[is_early]] >= 0).all()) and not alone.any()

    def facts(self, program: Program) -> Iterator[list[Ints]]:
        """Yield the columns that are to be equal in both programs: dependencies, messages and buffers.

        Last of all come the ends of lanes, which are in the last tail.
        """
        (before, after, is_early), buffers, messages = self.waits(program), program.buffers, program.message_nodes
        held = buffers.device, buffers.category, buffers.stage, buffers.size
        for there, place in self.parts():
            for source, kind in ((place, ~is_early), (self.unmoved, is_early)):
                rows = np.flatnonzero(there[after] & kind)
                yield [source[before[rows]], place[after[rows]]]
            rows = np.flatnonzero(there[messages])
            yield [place[messages][rows], program.messages.size[rows]]
            for moment in (buffers.begin, buffers.end):
                rows = np.flatnonzero(there[moment >> 1])
                yield [place[moment[rows] >> 1], moment[rows] & 1, *(column[rows] for column in held)]
        yield [self.tail[program.lane_tasks[program.lane_start[1:] - 1]]]


def _cut_of(program: Program, more: Ints, sides: _Sides, step: int) -> Cut:
    nodes = nodes_by_class(program)
    place, number = np.arange(program.nodes), nodes.number[nodes.order]
    own, is_tail, grows = sides.step[:-1] == step, sides.is_tail[:-1], more[nodes.number] > 0
    is_behind = (sides.step[:-1] > step) | (own & is_tail)
    index, left = place - nodes.first[number], nodes.first[number + 1] - place
    again, first, last = (np.empty(program.nodes, dtype=np.int64) for _ in range(3))
    again[nodes.order] = nodes.order[np.where(left > more[number], place + more[number], place)]
    first[nodes.order], last[nodes.order] = index < more[number], left <= more[number]
    waited, waiting, is_early = sides.waits(program)
    early = waited[is_early], waiting[is_early]
    waited, waiting = waited[~is_early], waiting[~is_early]
    ends = np.unique(waited[~is_behind[waited] & is_behind[waiting]])
    before, behind = (np.flatnonzero(own & grows & side) for side in (~is_tail, is_tail & (last == 0)))
    fixed = ~(own & grows)
    return Cut(
        (ends, again[ends]),
        (before, again[before]),
        (behind, again[behind]),
        np.flatnonzero(own & (first == 1)),
        np.flatnonzero(own & (last == 1) & grows),
        (np.flatnonzero(fixed & ~is_behind), np.flatnonzero(fixed & is_behind)),
        np.flatnonzero(own & sides.is_head[:-1] & is_tail),
        early,
    )


def _are_same(one: Sequence[Ints], other: Sequence[Ints]) -> bool:
    """Return whether two tables have the same rows, in any order."""
    if all(map(np.array_equal, one, other)):
        return True
    columns = (np.append(*pair) for pair in zip(one, other, strict=True))
    number = row_numbers([dense_ranks(column) if column.max(initial=0) >= 2**20 else column for column in columns])
    return np.array_equal(np.sort(number[: len(one[0])]), np.sort(number[len(one[0]) :]))


_FIXED_TASKS = 500  # tasks in whose time a run does all but its own tasks
_LOOKING = 1.5  # time of a run with all that is looked for in it, over its own


class Folded(NamedTuple):
    """A run of fewer micro-batches than asked for, and the metrics of all."""

    run: Run
    metrics: Metrics


@dataclass(frozen=True, eq=False)
class Growth:
    """A run of few micro-batches, its metrics, and how much these grow with each unit more; peaks stay."""

    run: Run
    metrics: Metrics
    slopes: dict[str, Any]

    @property
    def m(self) -> int:
        """The micro-batches of the run."""
        return self.run.request.shape.m

    def after(self, units: int) -> Metrics:
        """Return the metrics of a run of more units."""
        further = {name: getattr(self.metrics, name) + units * slope for name, slope in self.slopes.items()}
        return replace(self.metrics, **further)


def fold_micro_batches(request: Request) -> Folded | None:
    """Return the metrics of a request from a run of few micro-batches; None where none shows them, or takes longer.

    The schedule must take any number of them, and a rule that is given as lags goes with no other number.
    """
    shape, schedule = request.shape, request.schedule
    if not accepts(schedule, "m") or schedule.shape is not None or not isinstance(request.rule.record(shape), str):
        return None
    budget: float = _cost(shape.m * shape.n)  # where few show nothing, at most as long again is lost
    for few, unit in _counts_to_try(request) if schedule.order.lists and request.runtime == PAPER else ():
        needed = _LOOKING * _cost(few * shape.n)
        if needed > budget:
            continue
        try:
            growth = _find_growth(request, few, few + unit)
        except RequestError:  # as some schedules take multiples only
            continue
        budget -= needed
        if growth:
            return Folded(growth.run, growth.after((shape.m - growth.m) // unit))
    return None


def _cost(tasks: int) -> float:
    return tasks + _FIXED_TASKS


def _counts_to_try(request: Request) -> Iterator[tuple[int, int]]:
    """Yield numbers of micro-batches from which that of a request is a number of units away, with these units.

    A unit is one or two where a single stage, or messages between two stages, is the bottleneck; and the number of
    devices where each of them does that many of a chunk, or in one direction, before others.
    """
    m, order = request.shape.m, request.schedule.order
    devices = 1 if order.one_place else request.shape.parts // request.shape.chunks
    unit = devices if order.any_chunks else min(2, devices)
    # A pipeline of p devices is full after p micro-batches; most runs have settled after 1.5 p, or 4 p.
    for least, units in (
        (devices + max(devices // 2, 4), [unit]),
        (4 * devices, [unit, devices]),
        (12 * devices, [unit]),
    ):
        for each in dict.fromkeys(units):
            few = least + (m - least) % each
            if few + each < m:
                yield few, each


# Growths that were found last: at the same costs, all numbers of micro-batches whole units away follow from one.
KNOWN_GROWTHS: Kept[Growth | None] = Kept(most=2**17)
_OF_COSTS = ("model", "cluster", "collective", "contention", "engine", "steps")  # fields on which times depend


def _find_growth(request: Request, few: int, more: int) -> Growth | None:
    """Return the growth of a run with few micro-batches; None if it does not show those of more."""
    first, second = request.with_micro_batches(few), request.with_micro_batches(more)
    key = (structure_of(first), more, *(getattr(request, name) for name in _OF_COSTS))
    if key not in KNOWN_GROWTHS:
        one, longer = steady_steps(first), steady_steps(second)
        growth = growth_of_unit(one, longer, request.steps)
        KNOWN_GROWTHS.keep(key, growth, longer.program.nodes)
    return KNOWN_GROWTHS[key]


def growth_of_unit(few: FewSteps, more: FewSteps, steps: int) -> Growth | None:
    """Find a unit in a run that repeats itself in each step; None where the run shows none.

    A program of a unit more is to agree with that of the run. Where the first step does not show the others, the run
    has the steps that it takes; buffers held longer than a step may need more of them than times do.
    """
    if not find_cuts(few.program, more.program):
        return None
    run, longer = few.run(None), more.program
    steady = run.steady_state
    one = run if steady.starts_again else steady.run
    if not steady.certified or len(steady.steps) > 1 or steady.run.costs.quantum != run.costs.quantum:
        return None
    if one.program.steps != longer.steps:
        longer = more.of_steps(one.program.steps).program
    cuts = find_cuts(one.program, longer)
    found = [find_repetition(cut, one.start, one.end) for cut in cuts]
    repetitions = [each for each in found if each is not None and each.later == (found[0] and found[0].later)]
    if steady.starts_again:
        repetition = repetitions[0] if repetitions else None
    else:  # the one in the steady time
        within = (each for each in repetitions if steady.low <= each.since and each.until + each.later <= steady.high)
        repetition = next(within, None)
    if repetition is None or len(repetitions) < len(cuts):
        return None
    if (waiting := _waiting_in(steady.waits, repetition, one.program.fold)) is None:
        return None
    slopes = _slopes(one, cuts[steady.steps.start], steady) | {
        "period": repetition.later,
        "makespan": steps * repetition.later,
        "span": repetition.later,
        "waiting": waiting,
        "passes": Fraction(int((longer.counts - one.program.counts)[0]) * longer.fold, steady.updates),
    }
    return Growth(run, metrics_of_steps(run, steps), slopes)


def _slopes(run: Run, cut: Cut, steady: SteadyState) -> dict[str, Any]:
    """Return by how much sums over nodes of a step grow with a unit."""
    program, costs = run.program, run.costs
    sent = cut.unit[cut.unit >= len(program.tasks)] - len(program.tasks)
    in_lanes = cut.unit[cut.unit < len(program.lane_tasks)]
    tasks = cut.unit[cut.unit < len(program.tasks)]
    exchanged = int(exchanged_bytes(program, run.request)[tasks].sum()) * program.fold
    return {
        "busy": costs.duration[in_lanes].sum().item() * program.fold,
        "messages": steady.per_step(int(communication.times_there(program)[sent].sum())),
        "sent": steady.per_step(communication.all_bytes_sent(program, costs, sent) + exchanged),
    }


def _waiting_in(waits: Waits | None, repetition: Repetition, fold: int) -> float | None:
    """Return how long lanes wait in a unit; None where what follows it waits for what came before all repeats."""
    if waits is None:
        return 0.0
    behind = waits.until >= repetition.until
    if (waits.since[behind] <= repetition.since).any():
        return None
    rows = behind & (waits.until < repetition.until + repetition.later)
    return Waits(*(column[rows] for column in waits)).total(fold)

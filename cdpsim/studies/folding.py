"""Folding of micro-batches: the figures of a step with many of them, from steps with few.

In the middle of a step micro-batches repeat each other. Each task or message there is a time later than the one before
it of its kind, and that time is the same for all: then it stays so, because the end of a node is the longest path to
it. So runs of m, m + u and m + 2u micro-batches are compared, node by node: the first half of the nodes of a kind by
their numbers from the front, the second half by their numbers from the back. If from the second run to the third all
nodes are as much later as from the first to the second, and those of one half equally much, the same happens with each
further u. What devices hold whenever they begin to hold something more is compared likewise.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Flags, Ints, Times, dense_ranks, group_starts, row_numbers, sort_by
from cdpsim.program import Buffers, Category, Program
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.studies.figures import Figures
from cdpsim.trace.metrics import memory
from cdpsim.trace.metrics.steady import PRECISION

_FIXED_TASKS = 500  # a run takes the time of so many tasks beside that of its own

RunAtRest = Callable[[Request], tuple[Run, Figures]]


class Folded(NamedTuple):
    """A run of fewer micro-batches than asked for, and the figures of all."""

    run: Run
    figures: Figures


def fold_micro_batches(request: Request, run_at_rest: RunAtRest) -> Folded | None:
    """Return the figures of a request from runs of few micro-batches; None where these do not show it, or take longer.

    The schedule must take any number of them, and a rule that is given as lags goes with no other number.
    """
    shape, schedule = request.shape, request.schedule
    if "m" not in schedule.options or schedule.shape is not None or not isinstance(request.rule.record(shape), str):
        return None
    budget = _cost(shape.m * shape.n) // 4  # so that little is lost where few show nothing
    for counts in _counts_to_try(shape.m, 1 if schedule.order.one_place else shape.parts // shape.chunks):
        needed = sum(_cost(m * shape.n) for m in counts)
        if needed > budget or _devices(request, counts[0]) != _devices(request, shape.m):
            continue
        try:
            runs = [run_at_rest(request.with_micro_batches(m)) for m in counts]
        except RequestError:  # as some schedules take multiples only
            continue
        budget -= needed
        unit = counts[1] - counts[0]
        if figures := _extrapolate(runs, (shape.m - counts[2]) // unit):
            return Folded(runs[2][0], figures)
    return None


def _cost(tasks: int) -> int:
    return tasks + _FIXED_TASKS


def _devices(request: Request, m: int) -> int:
    """Return on how many devices a replica would run with so many micro-batches."""
    schedule = request.schedule
    return 0 if schedule.order.lists else schedule.placement.devices(replace(request.shape, m=m))


def _counts_to_try(m: int, devices: int) -> Iterator[tuple[int, int, int]]:
    """Yield numbers of micro-batches, a unit apart, from which m is a number of units away."""
    least = 2 * devices
    while least < m:
        for unit in dict.fromkeys((1, 2, devices)):
            first = least + (m - least) % unit
            if first + 2 * unit < m:
                yield first, first + unit, first + 2 * unit
        least *= 4


def _extrapolate(runs: Sequence[tuple[Run, Figures]], units: int) -> Figures | None:
    """Return the figures so many units after the last of three runs; None where the three do not show them."""
    at_rest = [run.steady_state for run, _ in runs]
    programs = [state.run.program for state in at_rest]
    if not all(state.certified and len(state.steps) == 1 for state in at_rest) or len({p.steps for p in programs}) > 1:
        return None
    figures = [each for _, each in runs]
    sums = _further_sums(figures, units)
    if sums is None:
        return None
    of_rest = [state.run for state in at_rest]
    nodes = [_NodesByClass.of(run) for run in of_rest]
    times = _further_times(nodes, of_rest, units)
    peaks = None if times is None else _further_peaks(nodes, of_rest, times, units)
    return None if peaks is None else replace(figures[2], peaks=peaks, **sums)


# Figures that must not change, and those that grow by as much with each unit; staleness is a mean over micro-batches.
_CONSTANT = ("period_is", "lanes", "versions", "rounds")
_GROWING = ("period", "makespan", "span", "busy", "waiting", "passes", "messages", "sent")


def _further_sums(figures: Sequence[Figures], units: int) -> dict[str, Any] | None:
    """Return the figures that grow, so many units later; None if they have not grown alike, or others have changed."""
    assert {field.name for field in fields(Figures)} == {*_CONSTANT, *_GROWING, "staleness", "peaks"}
    if any(len({getattr(each, name) for each in figures}) > 1 for name in _CONSTANT):
        return None
    further: dict[str, Any] = {}
    columns = {name: [getattr(each, name) for each in figures] for name in _GROWING}
    columns["staleness"] = [each.staleness * float(each.passes) for each in figures]
    for name, (first, second, third) in columns.items():
        if abs((third - second) - (second - first)) > (PRECISION * abs(third) if isinstance(third, float) else 0):
            return None
        slope = (third - first) / 2 if isinstance(third, float) else third - second
        further[name] = third + units * slope
    further["staleness"] /= float(further["passes"])
    return further


@dataclass(frozen=True, eq=False)
class _NodesByClass:
    """The nodes of a program, in classes that differ in micro-batch alone, each in the order of their starts."""

    classes: Ints  # what distinguishes each class, a row for it
    number: Ints  # the class of each node
    order: Ints  # the nodes, class after class
    first: Ints  # where each class begins, and the end

    @classmethod
    def of(cls, run: Run) -> "_NodesByClass":
        """Return the nodes of a run's program."""
        program = run.program
        classes, number = _classify(_class_columns(program))
        order = sort_by(number, dense_ranks(run.start))
        return cls(classes, number, order, np.append(group_starts(number[order]), len(order)))


def _classify(columns: Ints) -> tuple[Ints, Ints]:
    """Return what distinguishes each class of rows with equal columns, and the class of each row."""
    _, first, number = np.unique(row_numbers([*columns]), return_index=True, return_inverse=True)
    return columns[:, first], number


def _class_columns(program: Program) -> Ints:
    """Return what distinguishes nodes beside their micro-batch: a column for each node, its step first."""
    tasks, messages, parts = program.tasks, program.messages, program.parts
    none = np.zeros(len(parts), dtype=np.int64)
    rows = (
        (tasks.step, messages.step, parts.step),
        (0 * tasks.kind, 1 + messages.op, 9 + parts.sends),
        (tasks.kind, messages.content, none),
        (tasks.stage, messages.stage, none),
        (tasks.device, messages.src, parts.device),
        (tasks.lane, messages.dst, none),
        (0 * tasks.kind, messages.stream, none),
    )
    return np.array([np.concatenate(row, dtype=np.int64) for row in rows])


class _Matches(NamedTuple):
    """Rows of three runs that match, by their places in the order of classes."""

    rows: list[Ints]  # of each run
    group: Ints  # the class of each match
    part: Ints  # _ALL of a class that does not grow, else which half of it
    grows: Flags

    @classmethod
    def of(cls, first: Sequence[Ints]) -> "_Matches | None":
        """Return the matches of classes that begin at `first`; None if they do not grow by as many each time."""
        counts = [np.diff(each) for each in first]
        if len({len(each) for each in counts}) > 1 or ((counts[1] - counts[0]) != (counts[2] - counts[1])).any():
            return None
        least = counts[0]
        if (counts[1] < least).any():
            return None
        group = np.repeat(np.arange(len(least)), least)
        place = np.arange(least.sum()) - np.repeat(np.cumsum(least) - least, least)
        grows = (counts[1] > least)[group]
        late = grows & (2 * place >= least[group])
        rows = [
            each[:-1][group] + place + late * (count - least)[group] for each, count in zip(first, counts, strict=True)
        ]
        return cls(rows, group, np.where(grows, np.where(late, _BACK, _FRONT), _ALL), grows)


_MIDDLE, _ALL, _FRONT, _BACK = range(4)


class _FurtherTimes(NamedTuple):
    """When the nodes of a run would start and end with more units; NaN of those in the middle."""

    start: Times
    end: Times
    part: Ints  # of each node


def _further_times(nodes: Sequence[_NodesByClass], runs: Sequence[Run], units: int) -> _FurtherTimes | None:
    """Return when each node of the last of three runs would start and end with so many units more.

    Return None where the runs do not differ in their middle alone, by units that repeat each other, or where a node
    would then start before one that it waits for has ended.
    """
    if any(not np.array_equal(nodes[0].classes, each.classes) for each in nodes[1:]):
        return None
    matches = _Matches.of([each.first for each in nodes])
    if matches is None:
        return None
    program, node = runs[2].program, nodes[2].order[matches.rows[2]]
    kinds = row_numbers([*nodes[0].classes[:3, matches.group], matches.part])  # step, operation, content; and half
    room = 0.0 if runs[0].in_slots else PRECISION * float(runs[2].end.max(initial=0))
    further: list[Times] = []
    for columns in ([run.start for run in runs], [run.end for run in runs]):
        times = [column[each.order[row]] for column, each, row in zip(columns, nodes, matches.rows, strict=True)]
        later, again = times[1] - times[0], times[2] - times[1]
        grown = again[matches.grows]
        if (np.abs(again - later) > room).any() or not _all_equal(kinds[matches.grows], grown, room):
            return None
        further.append(np.full(program.nodes, np.nan))
        further[-1][node] = times[2] + units * again
    part = np.full(program.nodes, _MIDDLE)
    part[node] = matches.part
    found = _FurtherTimes(further[0], further[1], part)
    return found if _keeps_waits(program, found, room * (1 + units)) else None


def _keeps_waits(program: Program, times: _FurtherTimes, room: float) -> bool:
    """Return whether nodes start when those for which they wait have ended; waits from half to half are left out."""
    start, end, part = times
    before, after = program.waits()
    known = (part[before] != _MIDDLE) & (part[after] != _MIDDLE)
    known &= (part[before] == part[after]) | (part[before] == _ALL) | (part[after] == _ALL)
    return bool((start[after[known]] >= end[before[known]] - room).all())


def _all_equal(group: Ints, value: Times, room: float) -> bool:
    """Return whether all values of a group are equal."""
    if not len(group):
        return True
    order = sort_by(group)
    first = group_starts(group[order])
    highest, lowest = (each.reduceat(value[order], first) for each in (np.maximum, np.minimum))
    return bool((highest - lowest <= 2 * room).all())


def _further_peaks(
    nodes: Sequence[_NodesByClass], runs: Sequence[Run], times: "_FurtherTimes", units: int
) -> Ints | None:
    """Return the peak memory of devices so many units after the last of three runs; None if they do not show it.

    A device holds most right after it has begun to hold something. What it holds then grows by as much with each unit,
    so that another moment may be the peak later than now. Moments of a device must not change their order.
    """
    if not _keeps_moments(runs[2], times):
        return None
    late = 0.0 if runs[2].in_slots else PRECISION * float(runs[2].end.max(initial=0))
    buffers = [_BuffersByClass.of(run, each, late) for run, each in zip(runs, nodes, strict=True)]
    if any(not np.array_equal(buffers[0].classes, each.classes) for each in buffers[1:]):
        return None
    matches = _Matches.of([each.first for each in buffers])
    if matches is None:
        return None
    found: list[Ints] = []
    for levels in zip(*(each.levels for each in buffers), strict=True):
        peaks = _peaks_beyond(runs[2], [each.order for each in buffers], matches, levels, units)
        if peaks is None or (found and not np.array_equal(peaks, found[0])):
            return None
        found.append(peaks)
    return found[0]


def _peaks_beyond(
    run: Run, order: Sequence[Ints], matches: _Matches, levels: Sequence[Ints], units: int
) -> Ints | None:
    """Return the peaks, so many units after a run, if devices hold these levels when buffers begin; None if less."""
    at = [each[:, rows[row]] for each, rows, row in zip(levels, order, matches.rows, strict=True)]
    grown = at[2] - at[1]
    if (grown != at[1] - at[0]).any() or (grown < 0).any():
        return None
    held, rows, peaks = run.program.buffers, order[2][matches.rows[2]], np.zeros_like(run.peaks)
    further = at[2] + units * grown
    for of, level in ((slice(None), levels[2]), (rows, further)):
        np.maximum.at(peaks, (held.device[of], held.category[of]), level[0])
        np.maximum.at(peaks[:, -1], held.device[of], level[1])
    return peaks


def _keeps_moments(run: Run, times: "_FurtherTimes") -> bool:
    """Return whether each device begins and ends to hold things in the same order at other times of its nodes.

    Moments that are equal stay equal. The two halves of a class are looked at one after the other.
    """
    buffers = run.program.buffers
    part = np.concatenate([times.part[buffers.begin >> 1], times.part[buffers.end >> 1]])
    part[: len(buffers)][buffers.begin < 0] = _ALL
    np.maximum.at(part[len(buffers) :], buffers.kept, times.part[buffers.kept_until >> 1])
    now = np.concatenate(memory.buffer_spans(buffers, run.start, run.end))
    with np.errstate(invalid="ignore"):
        then = np.concatenate(memory.buffer_spans(buffers, times.start, times.end))
    known = ~np.isnan(then) & (np.tile(buffers.size, 2) > 0)
    device, begins = np.tile(buffers.device, 2), np.arange(len(now)) < len(buffers)
    room = 0.0 if run.in_slots else PRECISION * float(np.max(then[known], initial=0))
    halves = [np.flatnonzero(known & ((part == half) | (part == _ALL))) for half in (_FRONT, _BACK)]
    of_devices = [rows[device[rows] == d] for d in range(run.program.devices) for rows in halves]
    return all(_keep_order(begins[rows], now[rows], then[rows], room) for rows in of_devices)


def _keep_order(begins: Flags, now: Times, then: Times, room: float) -> bool:
    """Return whether what begins and what ends is in the same order now and then, and at one time if it is now."""
    if not len(now):
        return True
    order = np.argsort(now, kind="stable")
    begins, now, then = begins[order], now[order], then[order]
    group = np.flatnonzero(np.append(True, np.diff(now) > room))  # at one time
    first = np.repeat(group, np.diff(np.append(group, len(now))))
    for kind in (True, False):
        latest = np.append(-np.inf, np.maximum.accumulate(np.where(begins == kind, then, -np.inf)))
        if (then - latest[first] <= room)[begins != kind].any():
            return False
    mixed = np.logical_or.reduceat(begins, group) & ~np.logical_and.reduceat(begins, group)
    spread = np.maximum.reduceat(then, group) - np.minimum.reduceat(then, group)
    return bool((spread[mixed] <= room).all())


@dataclass(frozen=True, eq=False)
class _BuffersByClass:
    """The buffers of a program in classes, each in the order of their beginnings.

    The levels are what its device holds when each begins: of its category, and in all. A buffer may begin when another
    one ends, up to rounding, and so come before or behind it: there are levels for either.
    """

    classes: Ints
    order: Ints
    first: Ints
    levels: list[Ints]  # by category, and in all

    @classmethod
    def of(cls, run: Run, nodes: _NodesByClass, late: float) -> "_BuffersByClass":
        """Return the buffers of a run, which begin so much earlier or later; those of a class begin with its nodes."""
        buffers = run.program.buffers
        begins = np.where(buffers.begin < 0, -1, 2 * nodes.number[buffers.begin >> 1] + (buffers.begin & 1))
        columns = (buffers.category, buffers.device, buffers.stage, buffers.version, buffers.size, begins)
        classes, number = _classify(np.array(columns, dtype=np.int64))
        begin, finish = memory.buffer_spans(buffers, run.start, run.end)
        ranks = dense_ranks(np.concatenate([begin, finish]))
        order, at = sort_by(number, ranks[: len(begin)]), ranks * run.program.devices + np.tile(buffers.device, 2)
        together = np.isin(at[: len(begin)], at[len(begin) :])
        levels = []
        for shift in (-late, late) if late else (0,):
            if late:
                ranks = dense_ranks(np.concatenate([np.where(together, begin, begin + shift), finish]))
            levels.append(_levels_held(buffers, ranks))
        return cls(classes, order, np.append(group_starts(number[order]), len(order)), levels)


def _levels_held(buffers: Buffers, ranks: Ints) -> Ints:
    """Return what its device holds, of its category and in all, when each buffer begins.

    The ranks are those of beginnings, and then of ends. In all devices before, as much ends as begins.
    """
    device, span = buffers.device.astype(np.int64), int(ranks.max(initial=0)) + 1
    found = []
    for key in (device * len(Category) + buffers.category, device):
        begins, ends = (key * span + each for each in np.split(ranks, 2))
        by_begin, by_end = np.argsort(begins), np.argsort(ends)
        wanted, held = begins[by_begin], np.empty(len(key), dtype=np.int64)
        begun, ended = (
            np.append(0, np.cumsum(buffers.size[order]))[np.searchsorted(each, wanted, side="right")]
            for order, each in ((by_begin, wanted), (by_end, ends[by_end]))
        )
        held[by_begin] = begun - ended
        found.append(held)
    return np.array(found)

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
from cdpsim.program import Category, Program
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.studies.figures import Figures
from cdpsim.trace.metrics import memory
from cdpsim.trace.metrics.steady import PRECISION

_FIXED_TASKS = 1500  # a run takes the time of so many tasks beside that of its own

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
    budget = _cost(shape.m * shape.n) // 2
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
    nodes = [_NodesByClass.of(state.run) for state in at_rest]
    if sums is None or not _repeat(nodes, [state.run for state in at_rest]):
        return None
    peaks = _further_peaks(nodes, [state.run for state in at_rest], units)
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


def _matched(first: Sequence[Ints]) -> tuple[list[Ints], Ints, Flags] | None:
    """Return rows of three runs that match, the class of each match, and whether it is in the second half of its class.

    Classes begin at `first`; they must grow by as many from the first run to the second as from there to the third.
    """
    counts = [np.diff(each) for each in first]
    if len({len(each) for each in counts}) > 1 or ((counts[1] - counts[0]) != (counts[2] - counts[1])).any():
        return None
    if (counts[1] < counts[0]).any():
        return None
    least = counts[0]
    group = np.repeat(np.arange(len(least)), least)
    place = np.arange(least.sum()) - np.repeat(np.cumsum(least) - least, least)
    late = (2 * place >= least[group]) & (counts[1] > counts[0])[group]
    rows = [each[:-1][group] + place + late * (count - least)[group] for each, count in zip(first, counts, strict=True)]
    return rows, group, late


def _repeat(nodes: Sequence[_NodesByClass], runs: Sequence[Run]) -> bool:
    """Return whether three runs differ in their middle alone, by units that repeat each other."""
    if any(not np.array_equal(nodes[0].classes, each.classes) for each in nodes[1:]):
        return False
    matched = _matched([each.first for each in nodes])
    if matched is None:
        return False
    rows, group, late = matched
    grows = (np.diff(nodes[1].first) > np.diff(nodes[0].first))[group]
    kinds = row_numbers([*nodes[0].classes[:3, group], late.astype(np.int64)])  # step, operation, content; and half
    for ends in (False, True):
        columns = [run.end if ends else run.start for run in runs]
        times = [column[each.order[row]] for column, each, row in zip(columns, nodes, rows, strict=True)]
        room = 0 if times[0].dtype.kind == "i" else PRECISION * float(runs[2].end.max(initial=0))
        later, again = times[1] - times[0], times[2] - times[1]
        if (np.abs(again - later) > room).any() or not _all_equal(kinds[grows], again[grows], room):
            return False
    return True


def _all_equal(group: Ints, value: Times, room: float) -> bool:
    """Return whether all values of a group are equal."""
    if not len(group):
        return True
    order = sort_by(group)
    first = group_starts(group[order])
    highest, lowest = (each.reduceat(value[order], first) for each in (np.maximum, np.minimum))
    return bool((highest - lowest <= 2 * room).all())


def _further_peaks(nodes: Sequence[_NodesByClass], runs: Sequence[Run], units: int) -> Ints | None:
    """Return the peak memory of devices so many units after the last of three runs; None if they do not show it.

    A device holds most right after it has begun to hold something. What it holds then grows by as much with each unit,
    so that another moment may be the peak later than now.
    """
    buffers = [_BuffersByClass.of(run, each) for run, each in zip(runs, nodes, strict=True)]
    if any(not np.array_equal(buffers[0].classes, each.classes) for each in buffers[1:]):
        return None
    matched = _matched([each.first for each in buffers])
    if matched is None:
        return None
    levels = [each.levels[:, each.order[row]] for each, row in zip(buffers, matched[0], strict=True)]
    grown = levels[2] - levels[1]
    if (grown != levels[1] - levels[0]).any() or (grown < 0).any():
        return None
    program, rows = runs[2].program, buffers[2].order[matched[0][2]]
    peaks = runs[2].peaks.copy()
    device, category = program.buffers.device[rows], program.buffers.category[rows]
    further = levels[2] + units * grown
    np.maximum.at(peaks, (device, category), further[0])
    np.maximum.at(peaks, (device, np.full_like(category, len(Category))), further[1])
    return peaks


@dataclass(frozen=True, eq=False)
class _BuffersByClass:
    """The buffers of a program in classes, each in the order of their beginnings."""

    classes: Ints
    order: Ints
    first: Ints
    levels: Ints  # what its device holds when each begins: of its category, and in all

    @classmethod
    def of(cls, run: Run, nodes: _NodesByClass) -> "_BuffersByClass":
        """Return the buffers of a run; those of a class begin with nodes of a class."""
        buffers = run.program.buffers
        begins = np.where(buffers.begin < 0, -1, 2 * nodes.number[buffers.begin >> 1] + (buffers.begin & 1))
        columns = (buffers.category, buffers.device, buffers.stage, buffers.version, buffers.size, begins)
        classes, number = _classify(np.array(columns, dtype=np.int64))
        begin, finish = memory.buffer_spans(buffers, run.start, run.end)
        order = sort_by(number, dense_ranks(begin))
        device = buffers.device.astype(np.int64)
        keys = device * len(Category) + buffers.category, device
        levels = np.array([_levels_at(key, begin, finish, buffers.size) for key in keys])
        return cls(classes, order, np.append(group_starts(number[order]), len(order)), levels)


def _levels_at(key: Ints, begin: Times, finish: Times, size: Ints) -> Ints:
    """Return the sum of the sizes of all spans of its key that are there when each span begins."""
    keys, times, sums = memory.step_function(key, begin, finish, size)
    ranks = dense_ranks(np.concatenate([times, begin]))
    span = int(ranks.max(initial=0)) + 1
    row = np.searchsorted(keys * span + ranks[: len(times)], key * span + ranks[len(times) :], side="right") - 1
    found = (row >= 0) & (keys[row] == key)
    return np.where(found, sums[row], 0)

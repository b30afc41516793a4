"""Folding of micro-batches: the figures of a step with many of them, from steps with few.

In the middle of a step micro-batches repeat each other. Each task or message there is a time later than the one before
it of its kind, and that time is the same for all: then it stays so, because the end of a node is the longest path to
it. So runs of m, m + u and m + 2u micro-batches are compared, node by node: the first half of the nodes of a kind by
their numbers from the front, the second half by their numbers from the back. If from the second run to the third all
nodes are as much later as from the first to the second, and those of one half equally much, the same happens with each
further u. What devices hold whenever they begin to hold something more is compared likewise. What three runs have shown
is kept, for other numbers of micro-batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.studies.figures import Figures, figures_of_steps
from cdpsim.studies.folding.levels import HeldLevels, growing_levels
from cdpsim.studies.folding.moments import keeps_moments, least_gap
from cdpsim.studies.folding.nodes import GrowingTimes, growing_times, may_grow, most_units
from cdpsim.studies.programs import Kept, structure_of
from cdpsim.trace.metrics.steady import PRECISION

_FIXED_TASKS = 500  # a run takes the time of so many tasks beside that of its own

RunAtRest = Callable[[Request], Run]  # of few steps


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
    budget = _cost(shape.m * shape.n)  # where few show nothing, at most as long again is lost
    for counts in _counts_to_try(shape.m, 1 if schedule.order.one_place else shape.parts // shape.chunks):
        needed = sum(_cost(m * shape.n) for m in counts)
        if needed > budget or _devices(request, counts[0]) != _devices(request, shape.m):
            continue
        try:
            growth = _find_growth(request, counts, run_at_rest)
        except RequestError:  # as some schedules take multiples only
            continue
        budget -= needed
        if growth and (figures := growth.after((shape.m - counts[2]) // (counts[1] - counts[0]))):
            return Folded(growth.run, figures)
    return None


def _cost(tasks: int) -> int:
    return tasks + _FIXED_TASKS


def _devices(request: Request, m: int) -> int:
    """Return on how many devices a replica would run with so many micro-batches."""
    schedule = request.schedule
    return 0 if schedule.order.lists else schedule.placement.devices(replace(request.shape, m=m))


def _counts_to_try(m: int, devices: int) -> Iterator[tuple[int, int, int]]:
    """Yield numbers of micro-batches, a unit apart, from which m is a number of units away.

    A unit is one where a single stage holds all others up, and as many as there are devices where a cycle through all
    of them does; some orders take even numbers only.
    """
    least = 2 * devices
    while least < m:
        for unit in dict.fromkeys((1, devices) if devices % 2 == 0 else (1, 2, devices)):
            first = least + (m - least) % unit
            if first + 2 * unit < m:
                yield first, first + unit, first + 2 * unit
        least *= 4


@dataclass(frozen=True, eq=False)
class Growth:
    """The last of three runs, a unit apart, and all that grows in them by as much with each unit."""

    run: Run  # the last one
    rest: Run  # the same at rest
    figures: Figures
    sums: dict[str, tuple[Any, Any]]  # figures, and how much they grow with each unit
    times: GrowingTimes
    levels: list[HeldLevels]

    @cached_property
    def most(self) -> float:
        """The units up to which no node begins before one that it waits for has ended."""
        return most_units(self.rest.program, self.times)

    @cached_property
    def gap(self) -> float:
        """The least time between what begins and what ends on a device; 0 if their order may change with the units."""
        return least_gap(self.rest, self.times)

    def after(self, units: int) -> Figures | None:
        """Return the figures so many units later; None where the runs do not show them."""
        if units > self.most:
            return None
        if self.gap <= 2 * (1 + units) * self.times.room and not keeps_moments(self.rest, self.times.after(units)):
            return None
        peaks = [level.peaks(self.rest, units) for level in self.levels]
        if not all(np.array_equal(peaks[0], each) for each in peaks):
            return None
        further = {name: third + units * slope for name, (third, slope) in self.sums.items()}
        further["staleness"] /= float(further["passes"])
        return replace(self.figures, peaks=peaks[0], **further)


# Growths that were found last: at the same costs, all numbers of micro-batches so many units away follow from one.
KNOWN_GROWTHS: Kept[Growth | None] = Kept(most_nodes=2**17)
_OF_COSTS = ("model", "cluster", "collective", "contention", "engine", "steps")  # fields on which times depend


def _find_growth(request: Request, counts: Sequence[int], run_at_rest: RunAtRest) -> Growth | None:
    """Return the growth of runs with so many micro-batches; None if they do not show others."""
    first = request.with_micro_batches(counts[0])
    key = (structure_of(first), *counts, *(getattr(request, name) for name in _OF_COSTS))
    if key not in KNOWN_GROWTHS:
        second = run_at_rest(request.with_micro_batches(counts[1]))  # before the first: of two it is the one refused
        runs = [run_at_rest(first), second]
        if growth := _may_repeat(runs) and may_grow([run.steady_state.run for run in runs]):
            runs.append(run_at_rest(request.with_micro_batches(counts[2])))
        KNOWN_GROWTHS.keep(key, _growth_of(runs, request.steps) if growth else None, runs[-1].program.nodes)
    return KNOWN_GROWTHS[key]


def _may_repeat(runs: Sequence[Run]) -> bool:
    """Return whether each step of some runs repeats the one before, and as many steps show it."""
    at_rest = [run.steady_state for run in runs]
    certified = all(state.certified and len(state.steps) == 1 for state in at_rest)
    return certified and len({state.run.program.steps for state in at_rest}) == 1


def _growth_of(runs: Sequence[Run], steps: int) -> Growth | None:
    """Compare three runs, a unit apart, for as many steps; return None where they do not show others."""
    if not _may_repeat(runs):
        return None
    at_rest = [run.steady_state.run for run in runs]
    times = growing_times(at_rest)
    levels = None if times is None else growing_levels(at_rest)
    if times is None or levels is None:
        return None
    figures = [figures_of_steps(run, steps) for run in runs]
    sums = _growing_sums(figures)
    return Growth(runs[2], at_rest[2], figures[2], sums, times, levels) if sums else None


# Figures that must not change, and those that grow by as much with each unit; staleness is a mean over micro-batches.
_CONSTANT = ("period_is", "lanes", "versions", "rounds")
_GROWING = ("period", "makespan", "span", "busy", "waiting", "passes", "messages", "sent")


def _growing_sums(figures: Sequence[Figures]) -> dict[str, tuple[Any, Any]] | None:
    """Return the figures that grow, and how much; None if they have not grown alike, or others have changed."""
    assert {field.name for field in fields(Figures)} == {*_CONSTANT, *_GROWING, "staleness", "peaks"}
    if any(len({getattr(each, name) for each in figures}) > 1 for name in _CONSTANT):
        return None
    found: dict[str, tuple[Any, Any]] = {}
    columns = {name: [getattr(each, name) for each in figures] for name in _GROWING}
    columns["staleness"] = [each.staleness * float(each.passes) for each in figures]
    for name, (first, second, third) in columns.items():
        if abs((third - second) - (second - first)) > (PRECISION * abs(third) if isinstance(third, float) else 0):
            return None
        found[name] = third, (third - first) / 2 if isinstance(third, float) else third - second
    return found

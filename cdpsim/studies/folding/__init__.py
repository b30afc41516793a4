"""Folding of micro-batches: the figures of a step with many of them, from steps with few.

In the middle of a step micro-batches repeat each other. Each task or message there is a time later than the one before
it of its kind, and that time is the same for all: then it stays so, because the end of a node is the longest path to
it. So runs of m, m + u and m + 2u micro-batches are compared, node by node: the first half of the nodes of a
kind by their numbers from the front, the second half by their numbers from the back. If from the second run to the
third all nodes are as much later as from the first to the second, and those of one half equally much, and if the unit
between the halves is in the third run twice, as a part of the front and of the back, the same happens with each further
u. What devices hold whenever they begin to hold something more is compared likewise. Times are compared as they are:
they are slots, or whole ticks, of which all three runs have the same. What three runs have shown is kept, for other
numbers of micro-batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cdpsim.errors import RequestError
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.studies.figures import Figures, RestTimes, figures_of_steps, times_of_steps
from cdpsim.studies.folding.levels import HeldLevels, growing_levels
from cdpsim.studies.folding.nodes import growing_times, keeps_moments, may_grow, most_units
from cdpsim.studies.programs import Kept, structure_of
from cdpsim.trace.metrics.steady import PRECISION

_FIXED_TASKS = 500  # a run takes the time of so many tasks beside that of its own

RunAtRest = Callable[[Request, float | None], Run]  # of few steps, in a given tick, or in one to compare it by


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
    figures: Figures
    sums: dict[str, tuple[Any, Any]]  # figures, and how much they grow with each unit
    levels: HeldLevels
    most: float  # the units up to which no node begins before one that it waits for has ended

    def after(self, units: int) -> Figures | None:
        """Return the figures so many units later; None where the runs do not show them."""
        if units > self.most:
            return None
        further = {name: third + units * slope for name, (third, slope) in self.sums.items()}
        further["staleness"] /= float(further["passes"])
        return replace(self.figures, peaks=self.levels.after(units), **further)


# Growths that were found last: at the same costs, all numbers of micro-batches so many units away follow from one.
KNOWN_GROWTHS: Kept[Growth | None] = Kept(most_nodes=2**17)
_OF_COSTS = ("model", "cluster", "collective", "contention", "engine", "steps")  # fields on which times depend


def _find_growth(request: Request, counts: Sequence[int], run_at_rest: RunAtRest) -> Growth | None:
    """Return the growth of runs with so many micro-batches; None if they do not show others."""
    first = request.with_micro_batches(counts[0])
    key = (structure_of(first), *counts, *(getattr(request, name) for name in _OF_COSTS))
    if key not in KNOWN_GROWTHS:
        second = run_at_rest(request.with_micro_batches(counts[1]), None)  # of two it is the one that is refused
        tick = second.costs.tick
        runs = [run_at_rest(first, tick), second]
        if growth := _may_repeat(runs) and may_grow([run.steady_state.run for run in runs]):
            runs.append(run_at_rest(request.with_micro_batches(counts[2]), tick))
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
    if times is None or not keeps_moments(at_rest, times) or (levels := growing_levels(at_rest)) is None:
        return None
    first, figures = times_of_steps(runs[0], steps), [figures_of_steps(run, steps) for run in runs[1:]]
    sums = _growing_sums(first, *figures)
    return Growth(runs[2], figures[1], sums, levels, most_units(at_rest, times)) if sums else None


# Figures that must not change. Others are sums over tasks and messages, which grow by as many with each unit; or times.
_CONSTANT = ("period_is", "lanes", "versions", "rounds")
_COUNTED = ("passes", "messages", "sent")


def _growing_sums(first: RestTimes, second: Figures, third: Figures) -> dict[str, tuple[Any, Any]] | None:
    """Return the figures that grow, and how much; None if times have not grown alike, or others have changed."""
    if any(getattr(second, name) != getattr(third, name) for name in _CONSTANT):
        return None
    found: dict[str, tuple[Any, Any]] = {}
    for name in vars(first):
        one, two, three = (getattr(each, name) for each in (first, second, third))
        if abs((three - two) - (two - one)) > (PRECISION * abs(three) if isinstance(three, float) else 0):
            return None
        found[name] = three, (three - one) / 2 if isinstance(three, float) else three - two
    for name in _COUNTED:
        two, three = (getattr(each, name) for each in (second, third))
        found[name] = three, three - two
    two, three = (each.staleness * float(each.passes) for each in (second, third))  # a mean over micro-batches
    return found | {"staleness": (three, three - two)}

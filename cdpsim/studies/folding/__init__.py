"""Folding of micro-batches: the figures of a step with many of them, from steps with few.

In the middle of a step micro-batches repeat each other. Each task or message there is a time later than the one before
it of its kind, and that time is the same for all: then it stays so, because the end of a node is the longest path to
it. So runs of m + u and m + 2u micro-batches are compared, node by node: half of the nodes of a kind in m micro-batches
by their numbers from the front, the other half by their numbers from the back. If all nodes of one half are equally
much later in the second run than in the first, and if the unit between the halves is in the second run twice, once as a
part of the front and once of the back, the same happens with each further u. What devices hold whenever they begin to
hold something more is compared likewise. Times are compared as they are: they are slots, or whole ticks, of which both
runs have the same. What two runs have shown is kept, for other numbers of micro-batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from cdpsim.errors import RequestError
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.studies.figures import Figures, figures_of_steps
from cdpsim.studies.folding.levels import HeldLevels, growing_levels
from cdpsim.studies.folding.nodes import growing_times, keeps_moments, most_units
from cdpsim.studies.programs import Kept, structure_of

_FIXED_TASKS = 500  # a run takes the time of so many tasks beside that of its own
_COMPARISON = 1.5  # two runs and their comparison take so many times as long as the runs

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
    budget: float = _cost(shape.m * shape.n)  # where few show nothing, at most as long again is lost
    for few, more in _counts_to_try(shape.m, 1 if schedule.order.one_place else shape.parts // shape.chunks):
        needed = _COMPARISON * (_cost(few * shape.n) + _cost(more * shape.n))
        if needed > budget or _devices(request, few) != _devices(request, shape.m):
            continue
        try:
            growth = _find_growth(request, few, more, run_at_rest)
        except RequestError:  # as some schedules take multiples only
            continue
        budget -= needed
        if growth and (figures := growth.after((shape.m - more) // (more - few))):
            return Folded(growth.run, figures)
    return None


def _cost(tasks: int) -> float:
    return tasks + _FIXED_TASKS


def _devices(request: Request, m: int) -> int:
    """Return on how many devices a replica would run with so many micro-batches."""
    schedule = request.schedule
    return 0 if schedule.order.lists else schedule.placement.devices(replace(request.shape, m=m))


def _counts_to_try(m: int, devices: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of micro-batches, a unit apart, from which m is a number of units away.

    A unit is one where a single stage holds all others up, and as many as there are devices where a cycle through all
    of them does; some orders take even numbers only.
    """
    least = 2 * devices
    while least < m:
        for unit in dict.fromkeys((1, devices) if devices % 2 == 0 else (1, 2, devices)):
            first = least + (m - least) % unit
            if first + 2 * unit < m:
                yield first + unit, first + 2 * unit
        least *= 4


@dataclass(frozen=True, eq=False)
class Growth:
    """The second of two runs, a unit apart, and all that grows from the first by as much with each unit."""

    run: Run  # the second one
    figures: Figures
    sums: dict[str, tuple[Any, Any]]  # figures, and how much they grow with each unit
    levels: HeldLevels
    most: float  # the units up to which no node begins before one that it waits for has ended

    def after(self, units: int) -> Figures | None:
        """Return the figures so many units later; None where the runs do not show them."""
        if units > self.most:
            return None
        further = {name: now + units * slope for name, (now, slope) in self.sums.items()}
        further["staleness"] /= float(further["passes"])
        return replace(self.figures, peaks=self.levels.after(units), **further)


# Growths that were found last: at the same costs, all numbers of micro-batches so many units away follow from one.
KNOWN_GROWTHS: Kept[Growth | None] = Kept(most_nodes=2**17)
_OF_COSTS = ("model", "cluster", "collective", "contention", "engine", "steps")  # fields on which times depend


def _find_growth(request: Request, few: int, more: int, run_at_rest: RunAtRest) -> Growth | None:
    """Return the growth from a run with few micro-batches to one with more; None if they do not show others."""
    first = request.with_micro_batches(few)
    key = (structure_of(first), more, *(getattr(request, name) for name in _OF_COSTS))
    if key not in KNOWN_GROWTHS:
        one = run_at_rest(first, None)
        two = run_at_rest(request.with_micro_batches(more), one.costs.tick)
        KNOWN_GROWTHS.keep(key, _growth_of(one, two, request.steps), two.program.nodes)
    return KNOWN_GROWTHS[key]


def _growth_of(one: Run, two: Run, steps: int) -> Growth | None:
    """Compare two runs, a unit apart, for as many steps; return None where they do not show others."""
    states = one.steady_state, two.steady_state
    if not all(state.certified and len(state.steps) == 1 for state in states):
        return None
    before, now = (state.run for state in states)
    if before.program.steps != now.program.steps or (times := growing_times(before, now)) is None:
        return None
    if not keeps_moments(before, now, times) or (levels := growing_levels(before, now)) is None:
        return None
    sums = _growing_sums(figures_of_steps(one, steps), figures := figures_of_steps(two, steps))
    return Growth(two, figures, sums, levels, most_units(before, now, times)) if sums else None


# Figures that must not change, and those that grow by as much with each unit; staleness is a mean over micro-batches.
_CONSTANT = ("period_is", "lanes", "versions", "rounds")
_GROWING = ("period", "makespan", "span", "busy", "waiting", "passes", "messages", "sent")


def _growing_sums(before: Figures, now: Figures) -> dict[str, tuple[Any, Any]] | None:
    """Return the figures that grow, and how much; None if others have changed."""
    assert {field.name for field in fields(Figures)} == {*_CONSTANT, *_GROWING, "staleness", "peaks"}
    if any(getattr(before, name) != getattr(now, name) for name in _CONSTANT):
        return None
    grown = {name: (getattr(now, name), getattr(now, name) - getattr(before, name)) for name in _GROWING}
    stale, later = (each.staleness * float(each.passes) for each in (before, now))
    return grown | {"staleness": (later, later - stale)}

"""Folding of micro-batches: the figures of a step with many of them, from steps with few.

In the middle of a step micro-batches repeat each other. Each task or message there is a time later than the one before
it of its kind, and that time is the same for all: then it stays so, because the end of a node is the longest path to
it. Often one run shows this, if it is cut before and behind a unit of micro-batches (`cuts`).

Else runs of m + u and m + 2u micro-batches are compared, node by node: half of the nodes of a kind in m micro-batches
by their numbers from the front, the other half by their numbers from the back (`matches`). If all nodes of one half are
equally much later in the second run than in the first, and if the unit between the halves is in the second run twice,
once as a part of the front and once of the back, the same happens with each further u (`nodes`). What devices hold
whenever they begin to hold something more is compared likewise (`levels`). Times are compared as they are: they are
slots, or whole ticks, of which both runs have the same. What runs have shown is kept, for other numbers.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from cdpsim.errors import RequestError
from cdpsim.numeric.kept import Kept
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.studies.at_rest import FewSteps, may_be_separate, steps_at_rest
from cdpsim.studies.figures import Figures
from cdpsim.studies.folding.cuts import find_cut
from cdpsim.studies.folding.growth import Growth, growth_of_runs, growth_of_unit
from cdpsim.studies.programs import structure_of

_FIXED_TASKS = 500  # a run takes the time of so many tasks beside that of its own
_LOOKING = 1.5  # a run takes so many times as long with all that is looked for in it


class Folded(NamedTuple):
    """A run of fewer micro-batches than asked for, and the figures of all."""

    run: Run
    figures: Figures


def fold_micro_batches(request: Request) -> Folded | None:
    """Return the figures of a request from runs of few micro-batches; None where these do not show it, or take longer.

    The schedule must take any number of them, and a rule that is given as lags goes with no other number.
    """
    shape, schedule = request.shape, request.schedule
    if "m" not in schedule.options or schedule.shape is not None or not isinstance(request.rule.record(shape), str):
        return None
    budget: float = _cost(shape.m * shape.n)  # where few show nothing, at most as long again is lost
    for few, more, alone in _counts_to_try(request):
        needed = _LOOKING * sum(_cost(m * shape.n) for m in ((few,) if alone else (few, more)))
        if needed > budget or _devices(request, few) != _devices(request, shape.m):
            continue
        try:
            growth = _find_growth(request, few, more, alone=alone)
        except RequestError:  # as some schedules take multiples only
            continue
        budget -= needed
        if growth and (figures := growth.after((shape.m - growth.m) // (more - few))):
            return Folded(growth.run, figures)
    return None


def _cost(tasks: int) -> float:
    return tasks + _FIXED_TASKS


def _devices(request: Request, m: int) -> int:
    """Return on how many devices a replica would run with so many micro-batches."""
    schedule = request.schedule
    return 0 if schedule.order.lists else schedule.placement.devices(replace(request.shape, m=m))


def _counts_to_try(request: Request) -> Iterator[tuple[int, int, bool]]:
    """Yield numbers of micro-batches, a unit apart, from which that of a request is a number of units away.

    Yield also whether the first one is run alone. A unit is one or two where a single stage, or messages between two of
    them, hold all others up; and as many as there are devices where a cycle through all of them does, or where each
    device does so many of a chunk before another one.
    """
    m, order = request.shape.m, request.schedule.order
    devices = 1 if order.one_place else request.shape.parts // request.shape.chunks
    units = [devices] if order.any_chunks else [*dict.fromkeys((2, devices) if devices > 1 else (1, 2))]
    if may_be_separate(request):
        # Devices are full with as many as they are; most runs have settled half as many later, or three times as many.
        for least in (devices + max(devices // 2, 4), 4 * devices):
            few = least + (m - least) % units[0]
            if few + units[0] < m:
                yield few, few + units[0], True
    least = 2 * devices
    while least < m:
        for unit in units:
            first = least + (m - least) % unit
            if first + 2 * unit < m:
                yield first + unit, first + 2 * unit, False
        least *= 4


# Growths that were found last: at the same costs, all numbers of micro-batches so many units away follow from one.
KNOWN_GROWTHS: Kept[Growth | None] = Kept(most=2**17)
_OF_COSTS = ("model", "cluster", "collective", "contention", "engine", "steps")  # fields on which times depend


def _find_growth(request: Request, few: int, more: int, *, alone: bool) -> Growth | None:
    """Return the growth from a run with few micro-batches, alone or with one with more; None if they show no others."""
    first, second = request.with_micro_batches(few), request.with_micro_batches(more)
    key = (structure_of(first), more, alone, *(getattr(request, name) for name in _OF_COSTS))
    if key not in KNOWN_GROWTHS:
        one, two = steps_at_rest(first), steps_at_rest(second)
        growth = _growth_of(one, two, request.steps, alone=alone)
        KNOWN_GROWTHS.keep(key, growth, two.program.nodes)
    return KNOWN_GROWTHS[key]


def _growth_of(one: FewSteps, two: FewSteps, steps: int, *, alone: bool) -> Growth | None:
    """Return the growth from one to the other, by a run of one alone if that shows it."""
    if alone and not find_cut(one.program, two.program):
        return None
    few = one.run(None)
    growth = growth_of_unit(few, two.program, steps)
    return growth if growth or alone else growth_of_runs(few, two.run(few.costs.tick), steps)

"""Folding of micro-batches: the metrics of a step with many of them, from one run of a step with few.

In the middle of a step micro-batches repeat each other: each task or message there is a time later than the one before
it of its kind, and that time is the same for all. The run is cut before and behind a unit of micro-batches (`cuts`).
If what follows the cuts depends on the unit between them alone, a longer run has more of these units, and nothing else.
Times are compared as they are: slots, or whole quanta. What a run has shown is kept, for other numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from cdpsim.errors import RequestError
from cdpsim.model.runtime import PAPER
from cdpsim.numeric.columns import Kept
from cdpsim.program import Program
from cdpsim.request import Request
from cdpsim.request.sharing import accepts
from cdpsim.runs import Run
from cdpsim.runs.assembling import structure_of
from cdpsim.runs.micro_batches import Cut, Repetition, find_cuts, find_repetition
from cdpsim.runs.steady_metrics import FewSteps, Metrics, metrics_of_steps, steady_steps
from cdpsim.runs.steady_state import SteadyState
from cdpsim.timing.costs import Costs
from cdpsim.trace.metrics import communication
from cdpsim.trace.metrics.waiting import Waits

_FIXED_TASKS = 500  # a run takes the time of so many tasks beside that of its own
_LOOKING = 1.5  # a run takes so many times as long with all that is looked for in it


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

    A unit is one or two where a single stage, or messages between two of them, hold all others up; and as many as there
    are devices where each of them does so many of a chunk, or in one direction, before others.
    """
    m, order = request.shape.m, request.schedule.order
    devices = 1 if order.one_place else request.shape.parts // request.shape.chunks
    unit = devices if order.any_chunks else min(2, devices)
    # Devices are full with as many as they are; most runs have settled half as many later, or three times as many.
    for least, units in (
        (devices + max(devices // 2, 4), [unit]),
        (4 * devices, [unit, devices]),
        (12 * devices, [unit]),
    ):
        for each in dict.fromkeys(units):
            few = least + (m - least) % each
            if few + each < m:
                yield few, each


# Growths that were found last: at the same costs, all numbers of micro-batches so many units away follow from one.
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
    """Find a unit in a run that repeats itself, for as many steps; None where the run shows none.

    A program of a unit more is to agree with that of the run. Where the first step does not show the others, the run
    has as many as it takes; what is held longer than a step may be known from more of them than times are.
    """
    if not find_cuts(few.program, more.program):
        return None
    run, longer = few.run(None), more.program
    rest = run.steady_state
    one = run if rest.starts_again else rest.run
    if not rest.certified or len(rest.steps) > 1 or rest.run.costs.quantum != run.costs.quantum:
        return None
    if one.program.steps != longer.steps:
        longer = more.of_steps(one.program.steps).program
    cuts = find_cuts(one.program, longer)
    found = [find_repetition(cut, one.start, one.end) for cut in cuts]
    repetitions = [each for each in found if each is not None and each.later == (found[0] and found[0].later)]
    if rest.starts_again:
        repetition = repetitions[0] if repetitions else None
    else:  # the one in the steady time
        within = (each for each in repetitions if rest.low <= each.since and each.until + each.later <= rest.high)
        repetition = next(within, None)
    if repetition is None or len(repetitions) < len(cuts):
        return None
    if (waiting := _waiting_in(rest.waits, repetition, one.program.fold)) is None:
        return None
    slopes = _slopes(one.program, one.costs, cuts[rest.steps.start], rest) | {
        "period": repetition.later,
        "makespan": steps * repetition.later,
        "span": repetition.later,
        "waiting": waiting,
        "passes": Fraction(int((longer.counts - one.program.counts)[0]) * longer.fold, rest.updates),
    }
    return Growth(run, metrics_of_steps(run, steps), slopes)


def _slopes(program: Program, costs: Costs, cut: Cut, rest: SteadyState) -> dict[str, Any]:
    """Return by how much sums over nodes of a step grow with a unit."""
    sent = cut.unit[cut.unit >= len(program.tasks)] - len(program.tasks)
    in_lanes = cut.unit[cut.unit < len(program.lane_tasks)]
    return {
        "busy": costs.duration[in_lanes].sum().item() * program.fold,
        "messages": rest.per_step(int(communication.times_there(program)[sent].sum())),
        "sent": rest.per_step(communication.all_bytes_sent(program, costs, sent)),
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

"""All that grows with each unit of micro-batches: as one run of few shows it, or two of them, a unit apart."""

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from math import inf
from typing import Any

from cdpsim.program import Program
from cdpsim.runs import Run
from cdpsim.studies.figures import Figures, figures_of_steps
from cdpsim.studies.folding.cuts import Repetition, find_cut, find_repetition
from cdpsim.studies.folding.levels import HeldLevels, growing_levels
from cdpsim.studies.folding.nodes import growing_times, keeps_moments, most_units
from cdpsim.trace.metrics import communication
from cdpsim.trace.metrics.waiting import Waits


@dataclass(frozen=True, eq=False)
class Growth:
    """A run of few micro-batches, its figures, and how much these grow with each unit more."""

    run: Run
    figures: Figures
    sums: dict[str, tuple[Any, Any]]  # figures, and how much they grow with each unit
    levels: HeldLevels | None  # None: peaks do not grow
    most: float  # the units up to which no node begins before one that it waits for has ended

    @property
    def m(self) -> int:
        """The micro-batches of the run."""
        return self.run.request.shape.m

    def after(self, units: int) -> Figures | None:
        """Return the figures so many units later; None where the runs do not show them."""
        if units > self.most:
            return None
        further = {name: now + units * slope for name, (now, slope) in self.sums.items()}
        further["staleness"] /= float(further["passes"])
        return replace(self.figures, peaks=self.levels.after(units) if self.levels else self.figures.peaks, **further)


def growth_of_unit(one: Run, longer: Program, steps: int) -> Growth | None:
    """Find a unit in a run of one step that repeats itself, for as many steps; None where the run shows none.

    A program of a unit more is to agree with that of the run.
    """
    program, cut = one.program, find_cut(one.program, longer)
    if cut is None or one.separate_period is None:
        return None
    repetition, rest = find_repetition(cut, one.start, one.end), one.steady_state
    if repetition is None or rest.run is not one:
        return None
    if (waiting := _waiting_in(rest.waits, repetition, program.fold)) is None:
        return None
    figures = figures_of_steps(one, steps)
    later, passes = repetition.later, int(longer.counts.sum() - program.counts.sum())
    sent = cut.unit[cut.unit >= len(program.tasks)] - len(program.tasks)
    in_lanes = cut.unit[cut.unit < len(program.lane_tasks)]
    slopes = {
        "period": later,
        "makespan": steps * later,
        "span": later,
        "busy": one.costs.duration[in_lanes].sum().item() * program.fold,
        "waiting": waiting,
        "passes": Fraction(passes * program.fold, rest.updates),
        "messages": rest.per_step(int(communication.times_there(program)[sent].sum())),
        "sent": rest.per_step(communication.all_bytes_sent(program, one.costs, sent)),
    }
    sums = {name: (getattr(figures, name), slope) for name, slope in slopes.items()}
    stale = figures.staleness * float(figures.passes), figures.staleness * float(slopes["passes"])
    return Growth(one, figures, sums | {"staleness": stale}, None, inf)


def _waiting_in(waits: Waits | None, repetition: Repetition, fold: int) -> float | None:
    """Return how long lanes wait in a unit; None where what follows it waits for what came before all repeats."""
    if waits is None:
        return 0.0
    behind = waits.until >= repetition.until
    if (waits.since[behind] <= repetition.since).any():
        return None
    rows = behind & (waits.until < repetition.until + repetition.later)
    return Waits(*(column[rows] for column in waits)).total(fold)


def growth_of_runs(one: Run, two: Run, steps: int) -> Growth | None:
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

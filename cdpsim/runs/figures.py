"""Sums over a run in steady state, from which the metrics of a comparison follow."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from cdpsim.files.units import Number
from cdpsim.numeric.columns import Ints
from cdpsim.runs import Run
from cdpsim.trace.metrics import communication, memory, waiting


@dataclass(frozen=True)
class Metrics:
    """Times, memory and messages of a run in steady state: in slots and stage-activations, else in seconds and bytes.

    `span` is a steady time, in which the run's lanes are `busy`, and `waiting` for messages, for so long in all.
    `messages` and `sent` are of a training step, and so are its `passes`: the micro-batches of all replicas. `peaks`
    has a row for each device, a column for each category of memory, and one for their sum.
    """

    period: Number
    period_is: str
    makespan: Any
    span: Any
    busy: Any
    waiting: float
    lanes: int
    passes: Fraction
    peaks: Ints
    versions: int
    staleness: float
    messages: Number
    sent: Number
    rounds: int | None

    @property
    def bubble(self) -> float:
        """The share of the lanes' time in which they are idle; rounding may not make it negative."""
        share: float = 1 - self.busy / (self.lanes * self.span)
        return max(share, 0.0)

    @property
    def exposed(self) -> float:
        """The part of the bubble in which lanes wait for messages, which rounding does not make more than all of it."""
        share: float = self.waiting / (self.lanes * self.span)
        return min(share, self.bubble)


def metrics_of(run: Run, makespan: Any = None) -> Metrics:
    """Return the metrics of a run in steady state; the makespan may be that of a run of more steps."""
    rest = run.steady_state
    one, low, high = rest.run, rest.low, rest.high
    program, start, end = one.program, one.start, one.end
    return Metrics(
        period=rest.period,
        period_is=rest.period_is,
        makespan=run.makespan if makespan is None else makespan,
        span=high - low,
        busy=waiting.busy_time(program, start, end, one.costs.calendar, low, high),
        waiting=rest.waits.total(program.fold) if rest.waits else 0.0,
        lanes=(len(program.lane_start) - 1) * program.fold,
        passes=Fraction(int(program.counts[rest.steps].sum()) * program.fold, rest.updates),
        peaks=one.peaks,
        versions=memory.versions_at_once(program, start, end),
        staleness=rest.staleness,
        messages=rest.per_step(int(communication.times_there(program)[rest.messages].sum())),
        sent=rest.per_step(communication.all_bytes_sent(program, one.costs, rest.messages)),
        rounds=communication.rounds_between_slots(program, one.costs.rounds, start, end) if one.in_slots else None,
    )


def metrics_of_steps(run: Run, steps: int) -> Metrics:
    """Return the metrics of so many steps of a run of few."""
    return metrics_of(run, _makespan(run, steps))


def _makespan(run: Run, steps: int) -> Any:
    """Return when a run of so many steps ends; where steps repeat each other, by a run of fewer."""
    rest = run.steady_state
    known, every = rest.run.program.steps, len(rest.steps)
    if not rest.certified or steps < known:
        return run.of_steps(steps).makespan
    run_on = known + (steps - known) % every
    return run.of_steps(run_on).makespan + (steps - run_on) * rest.period

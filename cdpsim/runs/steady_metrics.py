"""Sums over a run in steady state, from which the metrics of a comparison follow.

Requests of the few steps that show all others, with their programs.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from cdpsim.files.units import Number
from cdpsim.numeric.columns import Ints
from cdpsim.program import Program
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.runs.assembling import KNOWN_PROGRAMS, price_request
from cdpsim.runs.playing import run
from cdpsim.runs.ranks import exchanged_bytes
from cdpsim.runs.steady_state import few_steps, may_be_separate
from cdpsim.timing.engine import quantum_to_compare
from cdpsim.trace.metrics import communication, memory, waiting


class FewSteps(NamedTuple):
    """The request of few steps that show all others, and its program."""

    request: Request
    program: Program

    def run(self, quantum: float | None = 0.0) -> Run:
        """Return their run; in a quantum, or if None in one to compare it by.

        If a single step turns out not to show the others, more of them can be run in that quantum, too.
        """
        program, request = self.program, self.request
        costs = price_request(program, request)
        quantum = quantum_to_compare(program, costs, few_steps(request)) if quantum is None else quantum
        return run(program, replace(costs, quantum=quantum), request.engine)

    def of_steps(self, steps: int) -> "FewSteps":
        """Return the same request with another number of steps, and its program."""
        return _with_steps(self.request, steps)


def steady_steps(request: Request) -> FewSteps:
    """Return the few steps of a request that show all others."""
    return _with_steps(request, 1 if may_be_separate(request) else few_steps(request))


def _with_steps(request: Request, steps: int) -> FewSteps:
    few = request.with_steps(steps, ignore_memory=True)
    return FewSteps(few, KNOWN_PROGRAMS.find(few))


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
    steady = run.steady_state
    one, low, high = steady.run, steady.low, steady.high
    program, start, end = one.program, one.start, one.end
    step = steady.step[: len(program.tasks)]
    within = (step >= steady.steps.start) & (step < steady.steps.stop)
    exchanged = int(exchanged_bytes(program, one.request)[within].sum()) * program.fold
    return Metrics(
        period=steady.period,
        period_is=steady.period_is,
        makespan=run.makespan if makespan is None else makespan,
        span=high - low,
        busy=waiting.busy_time(program, start, end, one.costs.calendar, low, high),
        waiting=steady.waits.total(program.fold) if steady.waits else 0.0,
        lanes=(len(program.lane_start) - 1) * program.fold,
        passes=steady.passes,
        peaks=one.peaks,
        versions=memory.versions_at_once(program, start, end),
        staleness=steady.staleness,
        messages=steady.per_step(int(communication.times_there(program)[steady.messages].sum())),
        sent=steady.per_step(communication.all_bytes_sent(program, one.costs, steady.messages) + exchanged),
        rounds=communication.rounds_between_slots(program, one.costs.rounds, start, end) if one.in_slots else None,
    )


def metrics_of_steps(run: Run, steps: int) -> Metrics:
    """Return the metrics of `steps` steps from a run of few."""
    return metrics_of(run, _makespan(run, steps))


def _makespan(run: Run, steps: int) -> Any:
    """Return the end of a run of `steps` steps; where steps repeat each other, from a run of fewer."""
    steady = run.steady_state
    known, every = steady.run.program.steps, len(steady.steps)
    if not steady.certified or steps < known:
        return run.of_steps(steps).makespan
    run_on = known + (steps - known) % every
    return run.of_steps(run_on).makespan + (steps - run_on) * steady.period

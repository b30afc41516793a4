"""Monte-Carlo: many runs of one request that differ by chance alone, swept at once, a column for each run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum
from typing import Any

import numpy as np

from cdpsim.api import run as run_again
from cdpsim.api import simulate
from cdpsim.errors import RequestError, Stalled
from cdpsim.files.notes import ticker
from cdpsim.limits import free_bytes
from cdpsim.numeric.columns import Floats, group_starts
from cdpsim.program import Program
from cdpsim.runs import Run
from cdpsim.runs.steady_state import last_steps
from cdpsim.timing.costs import jittered_durations, steady_costs
from cdpsim.timing.engine import sweep_together
from cdpsim.trace import RUNS_HEADER, Trace
from cdpsim.trace.metrics.steady import last_followed_step

QUANTILE_SHARES = {"5%": 0.05, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95}
DURATIONS_AT_ONCE = 2**20  # fewer are swept no faster


@dataclass(frozen=True, eq=False)
class SampledRuns:
    """The makespan of each run, and the time at which all tasks and updates of each of its steps have ended."""

    makespan: Floats
    ends: Floats  # a row for each run, a column for each step
    steady: Floats  # the ends of steps if nothing were random
    steady_period: float  # the time of a step in the steady state if nothing were random
    steps: range  # the steps over which the time of a step is averaged
    in_rounds: Floats | None = None  # the mean time of an update in each run, where runs have rounds

    @cached_property
    def period(self) -> Floats:
        """The mean time of a step in each run, as a single run that chance disturbs is measured."""
        if self.in_rounds is not None:
            return self.in_rounds
        high = self.ends[:, self.steps.stop - 1]
        low = self.ends[:, self.steps.start - 1] if self.steps.start else np.zeros_like(high)
        return np.where(high > low, (high - low) / len(self.steps), high / self.steps.stop)  # as `_mean_steps` does

    def summary(self) -> dict[str, Any]:
        """Return the number of runs, and the quantiles of their makespans and periods."""
        return {"count": len(self.makespan), "makespan": quantiles(self.makespan), "period": quantiles(self.period)}

    def lines(self) -> Iterator[str]:
        """Return the text of runs.csv, which has a row for each run."""
        yield RUNS_HEADER
        for run, (makespan, period) in enumerate(zip(self.makespan.tolist(), self.period.tolist(), strict=True)):
            yield f"{run},{makespan!r},{period!r}\n"


def quantiles(values: Floats) -> dict[str, float]:
    """Return the least, some quantiles, the most and the mean; between two runs a quantile is interpolated."""
    least, *between, most = np.quantile(values, [0, *QUANTILE_SHARES.values(), 1]).tolist()
    mean = fsum(values.tolist()) / len(values)
    return {"min": least, **dict(zip(QUANTILE_SHARES, between, strict=True)), "max": most, "mean": mean}


def sample_runs(trace: Trace, runs: int) -> SampledRuns:
    """Repeat a run with the random numbers of the runs 0 to `runs` - 1, and return the times of all of them."""
    run = _random_run(trace)
    program, request = run.program, run.request
    _refuse_too_many(runs, program.steps)
    if program.thrown_away:
        return _sample_rounds(run, runs)
    steady = steady_costs(program, run.costs.undisturbed or run.costs, request.disorder)
    rows = np.argsort(program.tasks.step, kind="stable")
    first = group_starts(program.tasks.step[rows])

    def sweep(durations: Floats) -> tuple[Floats, Floats]:
        """Return the makespan of each run, a row of durations, and the ends of its steps."""
        end = sweep_together(program, [steady], durations)
        return end.max(axis=0), np.maximum.reduceat(end[rows], first, axis=0).T

    makespan, ends = np.empty(runs), np.empty((runs, program.steps))
    chunk, done = max(8, DURATIONS_AT_ONCE // program.nodes), ticker(runs, "runs")
    for low in range(0, runs, chunk):
        numbers = range(low, min(low + chunk, runs))
        drawn = jittered_durations(program, steady, request.disorder, request.seed, numbers)
        makespan[low : numbers.stop], ends[low : numbers.stop] = sweep(drawn)
        done(len(numbers))
    done(0)
    _refuse_endless(makespan)
    _, steady_ends = sweep(steady.duration[None])
    rested = run_again(program, replace(steady, request=request.without_chance()))
    followed = last_steps(run, last_followed_step(program))
    ends, steps = _by_update(program, np.append(ends, steady_ends, axis=0), followed)
    return SampledRuns(makespan, ends[:-1], ends[-1], float(rested.steady_state.period), steps)


def _by_update(program: Program, ends: Floats, steps: range) -> tuple[Floats, range]:
    """Return the ends of updates in place of those of steps, of which local ones enter a mean together; and a range."""
    if program.averaged is None:
        return ends, steps
    update = program.update_of_step
    of_updates: Floats = np.maximum.reduceat(ends, group_starts(update), axis=1)
    return of_updates, range(int(update[steps.start]), int(update[steps.stop - 1]) + 1)


def _sample_rounds(run: Run, runs: int) -> SampledRuns:
    """Repeat a run with rounds, whose micro-batches follow from the times of each run."""
    update, steps = run.program.update_of_step, run.steady_state.steps
    done, found = ticker(runs, "runs"), []
    for number in range(runs):
        each = simulate(run.request.with_run(number))
        found.append((each.makespan, _ends_of_updates(each), float(each.steady_state.period)))
        done(1)
    done(0)
    rested = simulate(run.request.with_run(0).without_chance())
    makespan, ends, periods = (np.array(column) for column in zip(*found, strict=True))
    of_updates = range(int(update[steps.start]), int(update[steps.stop - 1]) + 1)
    steady = _ends_of_updates(rested), float(rested.steady_state.period)
    return SampledRuns(makespan, ends, *steady, of_updates, periods)


def _ends_of_updates(run: Run) -> Floats:
    """Return when all that enters each update of a run with rounds has ended."""
    tasks, update = run.program.tasks, run.program.update_of_step
    ends = np.zeros(int(update[-1]) + 1)
    np.maximum.at(ends, update[tasks.step], run.end[: len(tasks)])
    return ends[:-1]


def _random_run(trace: Trace) -> Run:
    """Return the trace as a run; refuse a trace from files, a run without randomness, and one with contention."""
    if not isinstance(trace, Run):
        raise RequestError("runs", "a trace from files has no run behind it; simulate it again")
    if not trace.request.disorder.is_random:
        raise RequestError("runs", "nothing is random, so that all runs are alike; give --jitter, or leave --runs out")
    if trace.costs.wires is not None:
        remedy = "leave --contention out, or look at single ones (--run 7)"
        raise RequestError("runs", f"many runs at once do not know who shares links with whom; {remedy}")
    return trace


def _refuse_too_many(runs: int, steps: int) -> None:
    """Refuse more runs than fit into free memory, with their times and the sums over these."""
    each = 8 * 4 * (steps + 1)
    most = free_bytes() // 2 // each
    if runs > most:
        raise RequestError("runs", f"{runs:,} runs keep {each} bytes each, more than is free here; {most:,} would fit")


def _refuse_endless(makespan: Floats) -> None:
    """Refuse runs that do not end, and name the first of them."""
    endless = np.flatnonzero(np.isinf(makespan))
    if len(endless):
        first = int(endless[0])
        these = f"{len(endless)} of {len(makespan)} runs"
        raise Stalled(f"{these} do not end, the first of them run {first} (--run {first})")

"""Many runs of one request, which chance alone tells apart: all of them swept at once, a column for each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum
from typing import Any

import numpy as np

from cdpsim.errors import RequestError, Stalled
from cdpsim.files.progress import ticker
from cdpsim.front import run as run_again
from cdpsim.limits import free_bytes
from cdpsim.numeric.columns import Floats, Ints, group_starts
from cdpsim.program import Program
from cdpsim.runs import Run
from cdpsim.timing.disturbed_costs import jittered, steadily
from cdpsim.trace import RUNS_HEADER, Trace

SHARES = {"5%": 0.05, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95}
AT_ONCE = 2**20  # durations: fewer are swept no faster


@dataclass(frozen=True, eq=False)
class Spread:
    """What runs come to: when each ended, and when each of its training steps did, with all its tasks and updates."""

    makespan: Floats
    ends: Floats  # a row for each run, a column for each step
    steady: Floats  # of each step, if nothing were random
    steady_period: float  # how long a step at rest would take if nothing were random
    steps: range  # those over which the time of a step is averaged

    @cached_property
    def period(self) -> Floats:
        """How long a step takes in each run, on average, as a single run that chance disturbs is measured."""
        low = self.ends[:, self.steps.start - 1] if self.steps.start else 0
        period: Floats = (self.ends[:, self.steps.stop - 1] - low) / len(self.steps)
        return period

    def summary(self) -> dict[str, Any]:
        """Give how many runs there are, and quantiles of what they take."""
        return {"count": len(self.makespan), "makespan": quantiles(self.makespan), "period": quantiles(self.period)}

    def lines(self) -> Iterator[str]:
        """Give the text of runs.csv: a row for each run."""
        yield RUNS_HEADER
        for run, (makespan, period) in enumerate(zip(self.makespan.tolist(), self.period.tolist(), strict=True)):
            yield f"{run},{makespan!r},{period!r}\n"


def quantiles(values: Floats) -> dict[str, float]:
    """Give the least, some quantiles, the most and the mean; between two runs a quantile is interpolated."""
    found = dict(zip(SHARES, np.quantile(values, list(SHARES.values())).tolist(), strict=True))
    ends = {"min": values.min().item()} | found | {"max": values.max().item()}
    return ends | {"mean": fsum(values.tolist()) / len(values)}


def spread(run: Trace, runs: int) -> Spread:
    """Serve a run's request so many times, as the runs from number 0 on."""
    if not isinstance(run, Run):
        raise RequestError("runs", "a trace from files has no run behind it; simulate it again")
    disorder = run.request.disorder
    if not disorder.is_random:
        raise RequestError("runs", "nothing is random, so that all runs are alike; give --jitter, or leave --runs out")
    if run.costs.wires is not None:
        remedy = "leave --contention out, or look at single ones (--run 7)"
        raise RequestError("runs", f"many runs at once do not know who shares links with whom; {remedy}")
    program, seed = run.program, run.request.seed
    _refuse_too_many(runs, run)
    steady = steadily(program, run.costs.undisturbed or run.costs, disorder)
    graph = program.levels
    earliest = np.zeros((program.nodes, 1))
    earliest[[task for task, _ in program.releases], 0] = steady.release
    place = np.argsort(graph.order)
    steps = _steps(program, place)
    makespan, ends = np.empty(runs), np.empty((runs, program.steps))
    chunk, done = max(8, AT_ONCE // program.nodes), ticker(runs, "runs")
    for low in range(0, runs, chunk):
        some = range(low, min(low + chunk, runs))
        drawn = jittered(program, steady.duration, disorder, seed, some)
        end = graph.sweep(np.ascontiguousarray(drawn.T[graph.order]), earliest[graph.order], steady.calendar)
        makespan[low : some.stop] = end.max(axis=0)
        ends[low : some.stop] = steps(end).T
        done(len(some))
    done(0)
    _refuse_endless(makespan)
    end = graph.sweep(steady.duration[graph.order, None], earliest[graph.order], steady.calendar)
    rested = run_again(program, replace(steady, request=run.request.without_chance()))
    return Spread(makespan, ends, steps(end)[:, 0], float(rested.at_rest.period), run.at_rest.steps)


def _steps(program: Program, place: Ints) -> Callable[[Floats], Floats]:
    """What finds when each step ends, of when nodes end that stand in these places: a column for each run."""
    order = np.argsort(program.tasks.step, kind="stable")
    first = group_starts(program.tasks.step[order])

    def ends(end: Floats) -> Floats:
        last: Floats = np.maximum.reduceat(end[place[order]], first, axis=0)
        return last

    return ends


def _refuse_too_many(runs: int, run: Run) -> None:
    """Refuse what would not fit: of each run its times are kept, and what is computed from them."""
    each = 8 * 4 * (run.program.steps + 1)
    most = free_bytes() // 2 // each
    if runs > most:
        raise RequestError("runs", f"{runs:,} runs keep {each} bytes each, more than is free here; {most:,} would fit")


def _refuse_endless(makespan: Floats) -> None:
    """Say which run does not end."""
    endless = np.flatnonzero(np.isinf(makespan))
    if len(endless):
        first = int(endless[0])
        raise Stalled(
            f"{len(endless)} of {len(makespan)} runs do not end, the first of them run {first} (--run {first})"
        )

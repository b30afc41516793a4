"""Many runs of one request, which chance alone tells apart: all of them swept at once, a column for each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Any

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.costs import Costs, price
from cdpsim.disorder import Disorder
from cdpsim.disturb import jittered, steadily
from cdpsim.errors import RequestError, Stalled
from cdpsim.limits import free_bytes
from cdpsim.model import UNIT_MODELS, Model
from cdpsim.offload import timed
from cdpsim.paths import levels
from cdpsim.progress import ticker
from cdpsim.trace import Run, Trace
from cdpsim.variates import Floats

SHARES = {"5%": 0.05, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95}
HEADER = "run,makespan,period\n"
AT_ONCE = 2**20  # durations: fewer are swept no faster


@dataclass(frozen=True, eq=False)
class Spread:
    """What runs come to: when each ended, and when each of its training steps did.

    A step ends with the first micro-batch's pass, as it does for a run's period.
    """

    makespan: Floats
    ends: Floats  # a row for each run, a column for each step
    steady: Floats  # of each step, if nothing were random

    @cached_property
    def period(self) -> Floats | None:
        """How long a step takes in each run, on average over its last half; None for a single step."""
        return _period(self.ends)

    @property
    def steady_period(self) -> float | None:
        """How long a step would take if nothing were random."""
        period = _period(self.steady[None])
        return None if period is None else period.item()

    def summary(self) -> dict[str, Any]:
        """Give how many runs there are, and quantiles of what they take."""
        period = None if self.period is None else quantiles(self.period)
        return {"count": len(self.makespan), "makespan": quantiles(self.makespan), "period": period}

    def lines(self) -> Iterator[str]:
        """Give the text of runs.csv: a row for each run, its period empty where there is none."""
        yield HEADER
        period = [""] * len(self.makespan) if self.period is None else map(repr, self.period.tolist())
        for run, (makespan, one) in enumerate(zip(self.makespan.tolist(), period, strict=True)):
            yield f"{run},{makespan!r},{one}\n"


def _period(ends: Floats) -> Floats | None:
    """From one end to the next, on average over the last half, as `utilisation.period` has it."""
    steps = ends.shape[1] // 2
    if not steps:
        return None
    period: Floats = (ends[:, -1] - ends[:, -1 - steps]) / steps
    return period


def quantiles(values: Floats) -> dict[str, float]:
    """Give the least, some quantiles, the most and the mean; between two runs a quantile is interpolated."""
    found = dict(zip(SHARES, np.quantile(values, list(SHARES.values())).tolist(), strict=True))
    ends = {"min": values.min().item()} | found | {"max": values.max().item()}
    return ends | {"mean": fsum(values.tolist()) / len(values)}


def spread(trace: Trace, runs: int) -> Spread:
    """Serve a trace's request so many times, as the runs from number 0 on."""
    run = trace.run
    if run is None:
        raise RequestError("runs", "a trace from files has no run behind it; simulate it again")
    disorder = _disorder(run.request)
    if not disorder.is_random:
        raise RequestError("runs", "nothing is random, so that all runs are alike; give --jitter, or leave --runs out")
    if run.costs.wires is not None:
        remedy = "leave --contention out, or look at single ones (--run 7)"
        raise RequestError("runs", f"many runs at once do not know who shares links with whom; {remedy}")
    program, seed = run.program, int(run.request["seed"])
    _refuse_too_many(runs, run)
    steady = steadily(program, _undisturbed(run), disorder)
    graph = levels(*program.waits(), program.nodes)
    earliest = np.zeros(program.nodes)
    earliest[[task for task, _ in program.releases]] = steady.release
    place = np.argsort(graph.order)
    firsts = np.arange(program.compute).reshape(program.steps, program.m, -1)[:, 0]
    makespan, ends = np.empty(runs), np.empty((runs, program.steps))
    chunk, done = max(8, AT_ONCE // program.nodes), ticker(runs, "runs")
    for low in range(0, runs, chunk):
        some = range(low, min(low + chunk, runs))
        drawn = jittered(program, steady.duration, disorder, seed, some)
        end = graph.sweep(np.ascontiguousarray(drawn.T[graph.order]), earliest[graph.order], steady.calendar)
        makespan[low : some.stop] = end.max(axis=0)
        ends[low : some.stop] = end[place[firsts]].max(axis=1).T
        done(len(some))
    done(0)
    _refuse_endless(makespan)
    end = graph.sweep(steady.duration[graph.order, None], earliest[graph.order], steady.calendar)
    return Spread(makespan, ends, end[place[firsts], 0].max(axis=1))


def _undisturbed(run: Run) -> Costs:
    """What a run would cost if nothing disturbed it: its own costs have chance in them."""
    asked, n = run.request, run.program.n
    model, slots = asked["model"], asked["model"] in UNIT_MODELS
    model = Model.unit(n, split=model != "unit") if slots else Model.from_builtins(model, "model")
    cluster = Cluster.from_builtins(asked["cluster"], "cluster")
    return price(run.program, timed(model, cluster.host), cluster, run.collective)


def _disorder(request: Mapping[str, Any]) -> Disorder:
    return Disorder.from_builtins(request.get("disorder", {}), "disorder")


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

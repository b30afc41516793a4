"""The lags of a schedule's trace: how many training steps older than the newest the parameters are that tasks read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cdpsim.api import assemble
from cdpsim.errors import RequestError
from cdpsim.request import Request
from cdpsim.request.reading import schedule_of
from cdpsim.request.sharing import taken_options
from cdpsim.schedules.order import Outer
from cdpsim.schedules.rule import Versions
from cdpsim.trace.metrics.memory import Lags, lags_of_step, mean_staleness

MOST_STEPS = 96  # until two steps have the same lags


class Learner(NamedTuple):
    """A schedule that is learnt with: its name as it was given, its lags, and the versions that its steps make."""

    name: str
    lags: Lags
    versions: Versions = Versions()
    waits: int = 0  # the first steps, besides step 0, that read the newest version
    workers: int = 1  # that may have versions of their own; each has its part of a step's micro-batches
    outer: Outer | None = None  # the optimizer that takes the means of their parameters
    mean: float = 0.0  # the mean lag of forwards in updates, where an estimate counts like the version kept instead

    @property
    def micro_batches(self) -> int:
        """The micro-batches of its training step."""
        return len(self.lags.forward)

    @property
    def goes_back_otherwise(self) -> bool:
        """Whether backwards read other versions than their forwards."""
        return not np.array_equal(*self.lags)

    @property
    def steps_per_update(self) -> int:
        """The steps whose gradients a version takes that is kept."""
        made = self.versions.made(MOST_STEPS)
        return int(MOST_STEPS // len(np.unique(made.step[~made.estimate])))


def read_learner(name: str, n: int, options: Mapping[str, Any]) -> Learner:
    """Return a schedule by its name and, behind a colon, its rule: `multi-cdp`, `multi-cdp:cdp-v1`, a CSV file.

    It has those of the options that it takes.
    """
    given = options_of_learner(name, n, options)
    return learner_of(name, Request.from_builtins(taken_options(schedule_of(given), given, needed=("rule",))))


def options_of_learner(name: str, n: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the request of a schedule by its name and, behind a colon, its rule."""
    schedule, _, rule = name.partition(":")
    return {"schedule": schedule, "n": n, **options, **({"rule": rule} if rule else {})}


def learner_of(name: str, request: Request) -> Learner:
    """Return the learner of a request, under a name."""
    shape, local = request.shape, request.schedule.order.local
    lags, mean = settled_lags(request)
    if local is None:
        return Learner(name, lags, request.rule.versions, shape.warm_up, mean=mean)
    return Learner(name, lags, local.versions(shape), shape.warm_up, shape.replicas, local.outer, mean)


def settled_lags(request: Request) -> tuple[Lags, float]:
    """Return the lags of the first step that has those of the step before, and their mean in updates.

    Refuse a schedule without one.
    """
    steps, first = min(request.steps, MOST_STEPS), 1 + request.shape.warm_up
    while True:
        program = assemble(request.with_steps(request.shape.warm_up + steps))
        for step in range(first, program.updated):
            before, now = lags_of_step(program, step - 1), lags_of_step(program, step)
            if step - first >= int(max(before.forward.max(), before.backward.max())) and all(
                map(np.array_equal, before, now)
            ):
                return now, mean_staleness(program, range(step - 1, step + 1))
        if steps == MOST_STEPS:
            problem = f"reads other versions in each of {MOST_STEPS} steps, so that it has no lags"
            raise RequestError(request.schedule.name, f"{problem}; take a rule that settles")
        steps = min(2 * steps, MOST_STEPS)

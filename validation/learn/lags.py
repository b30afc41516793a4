"""The lags of a schedule's trace: how many training steps older than the newest the parameters are that tasks read."""

from typing import Any, NamedTuple

from cdpsim.errors import RequestError
from cdpsim.front import assemble
from cdpsim.numeric.columns import Ints
from cdpsim.request import Request
from cdpsim.trace.metrics.staleness import Lags, lags_of_step

MOST_STEPS = 96  # until two steps have the same lags


class Learner(NamedTuple):
    """A schedule that is learnt with: its name as it was given, and its lags."""

    name: str
    lags: Lags

    @property
    def micro_batches(self) -> int:
        """The micro-batches of its training step."""
        return len(self.lags.forward)

    @property
    def mean(self) -> float:
        """The mean lag of forwards."""
        return float(self.lags.forward.mean())


def read_learner(name: str, n: int, options: dict[str, Any]) -> Learner:
    """Return a schedule by its name and, behind a colon, its rule: `multi-cdp`, `multi-cdp:cdp-v1`, a CSV file."""
    schedule, _, rule = name.partition(":")
    given = options | ({"rule": rule} if rule else {})
    request = Request(schedule, n, **given)
    order, rule_of = request.schedule.order, request.rule
    if not order.waits or not rule_of.versions.is_line:
        why = "whose versions do not follow one another, an update after each step"
        raise RequestError(name, f"has rounds, local steps or estimates, {why}; take another schedule or rule")
    return Learner(name, settled_lags(request))


def settled_lags(request: Request) -> Lags:
    """Return the lags of the first step that has those of the step before; refuse a schedule without one."""
    steps = min(request.steps, MOST_STEPS)
    while True:
        program = assemble(request.with_steps(steps))
        for step in range(1, steps):
            before, now = lags_of_step(program, step - 1), lags_of_step(program, step)
            if step - 1 >= int(max(before.forward.max(), before.backward.max())) and _equal(before, now):
                return now
        if steps == MOST_STEPS:
            problem = f"reads other versions in each of {MOST_STEPS} steps, so that it has no lags"
            raise RequestError(request.schedule.name, f"{problem}; take a rule that settles")
        steps = min(2 * steps, MOST_STEPS)


def _equal(one: Lags, other: Lags) -> bool:
    pairs: list[tuple[Ints, Ints]] = [(one.forward, other.forward), (one.backward, other.backward)]
    return all(mine.shape == theirs.shape and bool((mine == theirs).all()) for mine, theirs in pairs)

"""Comparison of rounds whose counts are found while ranks run: their parameters, with the equation for these counts."""

from collections import Counter
from collections.abc import Sequence

from cdpsim.errors import RequestError
from cdpsim.schedules import SCHEDULES, Schedule

from ..ranks.launcher import Ranks
from ..ranks.member import play_live
from ..ranks.torchrun import TorchrunRanks
from ..replay.case import Case, Outcome, prepare
from ..replay.live import LiveOutcome, with_counts_found
from ..report.environment import environment
from ..report.schema import LiveReport, LiveRound
from .parameters import are_within, compare_parameters
from .replays import request_of

MOST_ROUNDS = 8  # in a summary; the report has all


def check_live(schedule: Schedule, offload: str, *, alone: bool) -> None:
    """Refuse a schedule whose counts are known before it runs, a run without ranks, and updates elsewhere."""
    if schedule.order.rounds is None:
        with_rounds = ", ".join(name for name, each in SCHEDULES.items() if each.order.rounds)
        problem = f"{schedule.name} has no rounds whose lengths are found in its run"
        raise RequestError("live", f"{problem}; leave it out, or take one that has: {with_rounds}")
    if alone:
        problem = "is for ranks, each of which looks for itself whether a communication is through"
        raise RequestError("live", f"{problem}; leave --single-process out")
    if offload in ("optimizer", "all"):
        problem = "makes updates beside the tasks of a device, and --offload has them on a host"
        raise RequestError("live", f"{problem}; leave either out")


def compare_live(case: Case, ranks: Ranks | TorchrunRanks, *, timeout: float = 120.0) -> LiveReport | None:
    """Run a case without counts, and compare its parameters with the equation for the counts that came out."""
    found = ranks.call(play_live, case, timeout=timeout)
    if found is None:
        return None
    outcomes = [outcome for outcome in found if outcome is not None]
    counts = counts_found(outcomes)
    ends = [Outcome(own.parameters, own.places, Counter(), [], [], []) for own in outcomes]
    parameters = compare_parameters(with_counts_found(prepare(case), counts), ends)
    return LiveReport(
        request=request_of(case, alone=False) | {"live": True},
        environment=environment(case.device),
        rounds=[LiveRound(micro_batches=own) for own in counts],
        parameters=parameters,
        ok=are_within(parameters),
    )


def counts_found(outcomes: Sequence[LiveOutcome]) -> list[list[int]]:
    """Return the micro-batches of each round, of all ranks."""
    return [list(own) for own in zip(*(outcome.counts for outcome in outcomes), strict=True)]


def live_summary(report: LiveReport) -> str:
    """Return a summary of a report in a few lines."""
    parameters = report.parameters
    apart = f"differ by {parameters.max_abs_difference} (at most {parameters.tolerance})"
    lines = [f"parameters  {'bit-equal' if parameters.bit_equal else apart}, for the rounds that came out"]
    for number, own in enumerate(report.rounds[:MOST_ROUNDS]):
        lines.append(f"{'' if number else 'rounds':12}{number}: {' '.join(map(str, own.micro_batches))} micro-batches")
    if len(report.rounds) > MOST_ROUNDS:
        lines.append(f"{'':12}and {len(report.rounds) - MOST_ROUNDS} more")
    return "\n".join([*lines, "ok" if report.ok else "not within tolerance", ""])

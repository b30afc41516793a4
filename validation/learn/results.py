"""Results of learning: every run's curves, and for each schedule and rate the answer of all seeds."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from . import statistics

TENTH = (0.05, 0.15)  # of all steps: around a tenth of a training


class LearningCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a number for each epoch, the last step's first; accuracies are shares of the test."""

    schedule: str
    rate: float
    seed: int
    loss: list[float | None]  # the mean over an epoch's steps, at the versions that are read; null where not finite
    test_loss: list[float | None]
    accuracy: list[float]
    loss_at_a_tenth: float | None
    diverged: bool  # whether parameters or losses are not finite at the end


class RateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule at a rate, over all seeds: means and half the width of their intervals of 95 %."""

    schedule: str
    lag: float
    rate: float
    accuracy: tuple[float, float | None]
    difference: tuple[float, float | None] | None  # from the first schedule at the same rate, seed by seed
    loss_at_a_tenth: tuple[float, float | None] | None  # of runs in which it is finite
    diverged: int  # runs
    p_different: float | None
    p_apart: float | None  # of a difference beyond the margin
    verdict: str | None


class ScheduleLags(msgspec.Struct, frozen=True):
    """How many training steps old the parameters are that each micro-batch (row) reads of each stage (column)."""

    forward: list[list[int]]
    backward: list[list[int]]


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """All that `learn` has found."""

    request: dict[str, object]
    environment: dict[str, object]
    data: str
    lags: dict[str, ScheduleLags]
    curves: list[LearningCurve]
    answers: list[RateAnswer]


def answers_of(
    curves: Sequence[LearningCurve], lags: dict[str, float], margin: float, best_of: int = 1
) -> list[RateAnswer]:
    """Return what may be said of each schedule and rate, beside the first schedule; the margin is in points.

    A run's accuracy is the best of the last epochs, by default of the last one.
    """
    first, groups = next(iter(lags)), defaultdict[tuple[str, float], list[LearningCurve]](list)
    for curve in curves:
        groups[curve.schedule, curve.rate].append(curve)
    accuracies = {key: [max(curve.accuracy[-best_of:]) for curve in own] for key, own in groups.items()}
    others = [key for key in groups if key[0] != first]
    compared = [statistics.compare(accuracies[key], accuracies[first, key[1]], margin / 100) for key in others]
    said = statistics.verdicts(compared, margin / 100)
    found = dict(zip(others, zip(compared, said, strict=True), strict=True))
    answers = []
    for key, own in groups.items():
        other, verdict = found.get(key, (None, None))
        tenth = [curve.loss_at_a_tenth for curve in own if curve.loss_at_a_tenth is not None]
        answer = RateAnswer(
            schedule=key[0],
            lag=lags[key[0]],
            rate=key[1],
            accuracy=statistics.interval(accuracies[key]),
            difference=other.difference if other else None,
            loss_at_a_tenth=statistics.interval(tenth) if tenth else None,
            diverged=sum(curve.diverged for curve in own),
            p_different=other.p_different if other else None,
            p_apart=other.p_apart if other else None,
            verdict=verdict,
        )
        answers.append(answer)
    return answers


CURVES_HEADER = ("schedule", "rate", "seed", "epoch", "loss", "test_loss", "accuracy")


def curve_rows(curves: Sequence[LearningCurve]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each epoch of each run."""
    for curve in curves:
        for epoch, values in enumerate(zip(curve.loss, curve.test_loss, curve.accuracy, strict=True), start=1):
            yield curve.schedule, curve.rate, curve.seed, epoch, *values


ANSWERS_HEADER = ("schedule", "lag", "rate", "test accuracy", "difference", "loss, a tenth in", "diverged", "verdict")


def answer_row(answer: RateAnswer, margin: float) -> tuple[str | None, ...]:
    """Return the cells of an answer, for people: accuracies in per cent, differences in points."""
    verdict = f"equivalent ({margin:g})" if answer.verdict == statistics.EQUIVALENT else answer.verdict
    return (
        answer.schedule,
        f"{answer.lag:.4g}",
        f"{answer.rate:g}",
        _with_half(answer.accuracy, 100, "{:.2f}") + " %",
        _with_half(answer.difference, 100, "{:+.2f}") if answer.difference else None,
        _with_half(answer.loss_at_a_tenth, 1, "{:.3g}") if answer.loss_at_a_tenth else None,
        str(answer.diverged) if answer.diverged else None,
        verdict,
    )


def _with_half(pair: tuple[float, float | None], scale: float, form: str) -> str:
    mean, half = pair
    return form.format(scale * mean) + ("" if half is None else f" ± {form.replace('+', '').format(scale * half)}")

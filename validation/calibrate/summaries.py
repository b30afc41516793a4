"""Measured times as results of a calibration: medians, the costs fitted to them, and the errors of these."""

from collections.abc import Mapping, Sequence
from math import isfinite

import msgspec
import numpy as np

from cdpsim.model import Model
from cdpsim.model.stage import NO_CORE
from cdpsim.program import Op

from ..profile.fits import Sample, algorithms, errors_of, fit_collective, fit_line, fit_speed
from ..report.schema import Collective, Compute, Errors, Point, Task, Transfers
from .timings import Passed, RankInterval, Spans, StageTimes, Times


def summarize_transfers(times: Times) -> Transfers:
    """Return the results of messages from one rank to another."""
    points = [_point(2, size, series) for size, series in times.items()]
    return Transfers(points, _fit_errors(*fit_line([p.size for p in points], [p.seconds for p in points])))


def summarize_collective(op: Op, spans: Mapping[int, Sequence[Spans]], link: Errors) -> Collective:
    """Return the results of one collective, from the intervals of each rank, by number of ranks and size."""
    points = [
        _point(ranks, size, group_seconds([own[size] for own in members]))
        for ranks, members in spans.items()
        for size in members[0]
    ]
    samples = [Sample(point.ranks, point.size, point.seconds) for point in points]
    fits = {name: _fit_errors(*fit_collective(op, name, samples)) for name in algorithms(op)}
    costs = link.latency_seconds, link.bandwidth
    on_link = {name: _fit_errors(*costs, errors_of(*costs, op, name, samples)) for name in fits}
    # For a single size of group, every algorithm is a latency and a bandwidth.
    told = len(spans) > 1 or len(fits) == 1
    name = op.name.lower().replace("_", "-")
    return Collective(name, points, fits, on_link, _nearest(fits) if told else None, _nearest(on_link))


def group_seconds(members: Sequence[list[list[RankInterval]]]) -> list[list[float]]:
    """Return the time of each repetition of each series: from the last member's start until all have ended."""
    return [
        [max(span.end for span in spans) - max(span.start for span in spans) for spans in zip(*series, strict=True)]
        for series in zip(*members, strict=True)
    ]


def summarize_compute(
    busy: list[StageTimes], alone: list[StageTimes], work: list[tuple[float, float]], is_alone: bool
) -> Compute:
    """Return the results of stages' tasks, of so much work each: in one rank alone, or in all at once."""
    found = summarize_tasks(alone if is_alone else busy, work)
    passes = [(task.flop, task.seconds) for task in found if task.flop is not None]
    speed = fit_speed(*zip(*passes, strict=True))
    errors = [flop / speed / seconds - 1 for flop, seconds in passes]
    return Compute(found, speed, errors, _median_size(errors), _passing(busy) / _passing(alone), is_alone)


def summarize_tasks(times: list[StageTimes], work: list[tuple[float, float]] | None = None) -> list[Task]:
    """Return the times of each stage's tasks."""
    flops = [(None, None)] * len(times) if work is None else work
    return [
        _task(stage, kind, passed, flop)
        for stage, (own, (ahead, back)) in enumerate(zip(times, flops, strict=True))
        for kind, passed, flop in zip(StageTimes._fields, own, (ahead, back, None, None, None), strict=True)
    ]


def timed_model(model: Model, timed: Sequence[Task], name: str, *, split: bool = False) -> Model:
    """Return a model with measured seconds in place of its work.

    The part of a backward that is not for the input is for the weights. The times of `split` backwards are those of
    both parts as they were run, of which the second may go through the stage once more.
    """
    seconds = {(task.stage, task.kind): task.seconds for task in timed}
    stages = []
    for j, stage in enumerate(model.stages):
        whole, for_input = seconds[j, "backward"], seconds[j, "input_backward"]
        for_weights = max(whole - for_input, whole / 100) if stage.has_input_part else whole
        if split:
            for_weights = seconds[j, "weight_backward"]
            whole = for_input + for_weights
        parts = {"backward": round_measured(whole), "weight_backward": round_measured(for_weights), "recomputed": None}
        stages.append(msgspec.structs.replace(stage, forward=round_measured(seconds[j, "forward"]), **NO_CORE, **parts))
    return Model(name=f"{name}, measured", stages=tuple(stages))


def round_measured(amount: float) -> float:
    """Return a number rounded to the digits that a measurement has."""
    return float(f"{amount:.4g}")


def pool_ranks(ranks: list[list[StageTimes]]) -> list[StageTimes]:
    """Return the times of the same stages, of all ranks together."""
    return [
        StageTimes(*([passed for own in kinds for passed in own] for kinds in zip(*stages, strict=True)))
        for stages in zip(*ranks, strict=True)
    ]


def _point(ranks: int, size: int, series: list[list[float]]) -> Point:
    # Where other programs use the machine, the slower series measure them.
    best = min(series, key=np.median)
    return Point(ranks, size, *_spread(best), min(map(min, series)), len(best))


def _task(stage: int, kind: str, passed: list[Passed], flop: float | None) -> Task:
    seconds, thread = zip(*passed, strict=True)
    median, faster, slower = _spread(seconds)
    speed = None if flop is None else flop / median
    return Task(stage, kind, median, faster, slower, float(np.median(thread)), len(passed), flop, speed)


def _spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of times, and the quartiles around it."""
    median, faster, slower = np.quantile(seconds, (0.5, 0.25, 0.75)).tolist()
    return median, faster, slower


def _passing(stages: list[StageTimes]) -> float:
    """Return the seconds of one micro-batch through all stages and back."""
    return sum(
        float(np.median([p.seconds for p in own])) for stage in stages for own in (stage.forward, stage.backward)
    )


def _fit_errors(latency: float, bandwidth: float, errors: Sequence[float]) -> Errors:
    limited = bandwidth if isfinite(bandwidth) else None
    return Errors(latency, limited, _median_size(errors), float(np.abs(errors).max()), list(errors))


def _median_size(errors: Sequence[float]) -> float:
    return float(np.median(np.abs(errors)))


def _nearest(fits: Mapping[str, Errors]) -> str:
    """Return the name with the least errors, where half is as wrong as twice."""
    return min(fits, key=lambda name: float(np.median(np.abs(np.log1p(fits[name].relative_errors)))))

"""The results of a calibration, as its file has them: measured times, fitted costs, and the errors of these."""

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import Any

import msgspec
import numpy as np

from cdpsim.model import Model
from cdpsim.model.stage import NO_CORE
from cdpsim.program import Op

from ..profile.fits import Sample, algorithms, errors_of, fit_collective, fit_line, fit_speed
from .timings import Passed, RankInterval, Spans, StageTimes, Times

NAMES = {Op.ALL_REDUCE: "all-reduce", Op.BROADCAST: "broadcast", Op.REDUCE: "reduce"}


class Point(msgspec.Struct, frozen=True):
    """The median time of one size, and the quartiles around it, in the series in which the median was lowest.

    `fastest` is of all series: where it is much less, other programs were using the machine.
    """

    ranks: int
    size: int
    seconds: float
    faster: float
    slower: float
    fastest: float
    repetitions: int


def disturbance(points: Sequence[Point]) -> float:
    """Return the median ratio of a message's time to that of the fastest message of its size."""
    return float(np.median([point.seconds / point.fastest for point in points]))


class Errors(msgspec.Struct, frozen=True):
    """The errors of times by latency and bandwidth, at each point as a share of the measured time."""

    latency_seconds: float
    bandwidth_bytes_per_second: float | None  # None: infinite, for which JSON has no number
    median_relative_error: float
    max_relative_error: float
    relative_errors: list[float]

    @property
    def bandwidth(self) -> float:
        """The bandwidth as a number, which may be infinite."""
        return inf if self.bandwidth_bytes_per_second is None else self.bandwidth_bytes_per_second

    def seconds(self, size: int) -> float:
        """Return how long a message of a size takes."""
        return self.latency_seconds + size / self.bandwidth


class Transfers(msgspec.Struct, frozen=True):
    """Messages from one rank to another, and the line through their times."""

    points: list[Point]
    fit: Errors


class Collective(msgspec.Struct, frozen=True):
    """One collective: for each textbook algorithm, the links that explain its times best, and its times on the link.

    `best_fit` is the algorithm whose fit is nearest, None where a single size of group cannot tell them apart; `best`
    is the one whose times on the point-to-point link are nearest: the one for a simulation.
    """

    name: str
    points: list[Point]
    fits: dict[str, Errors]
    on_link: dict[str, Errors]
    best_fit: str | None
    best: str


class Task(msgspec.Struct, frozen=True):
    """One stage's forward, backward, update, or part of a backward; of the latter operations are not counted."""

    stage: int
    kind: str
    seconds: float
    faster: float
    slower: float
    thread_seconds: float
    repetitions: int
    flop: float | None = None
    flop_per_second: float | None = None


class Compute(msgspec.Struct, frozen=True):
    """The stages' tasks, and the speed that explains passes best; other ranks make passes `slowdown` times as long."""

    tasks: list[Task]
    speed_flop_per_second: float
    relative_errors: list[float]  # of times at that speed, for each pass in the order of tasks
    median_relative_error: float
    slowdown: float
    alone: bool


class Calibration(msgspec.Struct, frozen=True):
    """All results of a calibration, with its request and environment."""

    request: dict[str, Any]
    environment: dict[str, object]
    one_way: Transfers
    both_ways: Transfers
    collectives: list[Collective]
    compute: Compute


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
    return Collective(NAMES[op], points, fits, on_link, _nearest(fits) if told else None, _nearest(on_link))


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
    faster, median, slower = np.quantile(best, (0.25, 0.5, 0.75)).tolist()
    return Point(ranks, size, median, faster, slower, min(map(min, series)), len(best))


def _task(stage: int, kind: str, passed: list[Passed], flop: float | None) -> Task:
    faster, median, slower = np.quantile([p.seconds for p in passed], (0.25, 0.5, 0.75)).tolist()
    thread = float(np.median([p.thread_seconds for p in passed]))
    speed = None if flop is None else flop / median
    return Task(stage, kind, median, faster, slower, thread, len(passed), flop, speed)


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

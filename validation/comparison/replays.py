"""Comparison of a replay with its simulation: memory and time are predicted, then the replay is run and measured."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256

from cdpsim.files import config
from cdpsim.model import Model
from cdpsim.schedules import find_schedule

from ..ranks.launcher import Ranks
from ..ranks.torchrun import TorchrunRanks
from ..replay.case import Case, Outcome, play_in_process, prepare, profiled
from ..replay.contents import Calls, ReplayError
from ..replay.options import describe_options, recorded_options, replayable
from ..replay.plan import Plan
from ..report.environment import environment
from ..report.schema import DeviceTime, MessageCount, MessageDifference, Report, Scalar, Time, compared
from . import forecast as forecasts
from . import memory
from .account import compare_accounts, is_accounted
from .forecast import Durations, Forecast, predict_durations
from .lifetimes import compare_lives
from .needs import compare_needs
from .parameters import are_within, compare_parameters

TIMED_RUNS = 3  # after a run that warms up; the median counts
# As a share of a peak: a GPU's kernels may give storages of other sizes than fake tensors have.
GPU_MEMORY_TOLERANCE = 0.02


class SingleProcess:
    """All devices in this process, which waits for no other."""

    def run(self, case: Case, *, timeout: float = 0.0) -> list[Outcome]:
        """Replay a case and return the outcome of each device."""
        return play_in_process(prepare(case))


def compare_replay(
    case: Case,
    players: SingleProcess | Ranks | TorchrunRanks,
    forecast: Forecast | None = None,
    *,
    timeout: float = 120.0,
    repeats: int = TIMED_RUNS,
    done: Callable[[int], object] = lambda runs: None,
) -> Report | None:
    """Replay a case, for its memory and then for its time, and return the comparison of both with the predictions.

    Without a forecast of time the machine is measured now. Of `repeats` timed runs the median counts; with none, time
    is not compared. `done` is called after each of the `count_runs(repeats)` runs.
    """
    turns = isinstance(players, SingleProcess)
    case = profiled(replayable(case, alone=turns))
    prepared = prepare(case)
    needs = compare_needs(prepared.plan, prepared.training, case.optimizer)
    if broken := [str(each) for each in needs if each.kind == "law"]:
        more = f"; and {len(broken) - 1} more" if broken[1:] else ""
        raise ReplayError(f"the program's messages are not what its tasks need: {broken[0]}{more}")
    if repeats and forecast is None:
        if isinstance(players, SingleProcess):
            forecast = forecasts.forecast_alone(case)
        else:
            forecast = forecasts.forecast_by_ranks(case, players, prepared.plan.program.devices, timeout=timeout)
    said = predict_durations(prepared.plan, forecast, turns=turns) if repeats and forecast else None
    outcomes = players.run(replace(case, watch="storages"), timeout=timeout)
    done(1)
    # By now a GPU's libraries have the workspaces that they allocate for good at their first use.
    accounts = players.run(replace(case, watch="account"), timeout=timeout)
    done(1)
    timed = []
    for _ in range(count_runs(repeats) - 2):
        timed.append(players.run(replace(case, watch="time"), timeout=timeout))
        done(1)
    done(0)
    if outcomes is None or accounts is None:
        return None
    plan = prepared.plan
    tolerance = 0.0 if case.device == "cpu" else GPU_MEMORY_TOLERANCE
    held = memory.compare_memory(plan, [outcome.readings for outcome in outcomes], tolerance=tolerance)
    parameters = compare_parameters(prepared, outcomes, alone=turns)
    messages = _compare_messages(plan, outcomes, needs)
    lives, allocator = compare_lives(plan), compare_accounts(prepared, accounts)
    within = are_within(parameters), memory.is_within(held), messages.agree, is_accounted(allocator)
    took = [_run_durations(runs, turns) for runs in timed[1:] if runs is not None]
    return Report(
        request=request_of(case, turns) | {"model_sha256": model_hash(case.profile)},
        environment=environment(case.device),
        parameters=parameters,
        memory=held,
        messages=messages,
        time=_compare_times(said, took, forecast.source) if forecast and said else None,
        ok=all(within) and not (lives or needs),
        lives=lives,
        allocator=allocator,
        options=describe_options(case),
    )


def count_runs(repeats: int) -> int:
    """Return the number of runs of a trial: two for its memory, and one that warms up before the timed ones."""
    return 2 + (repeats and repeats + 1)


def request_of(case: Case, alone: bool) -> dict[str, Scalar]:
    """Return the request of a replay in one process or by ranks."""
    shape, given = case.shape, case.asked
    if find_schedule(case.schedule).order.rounds:  # whose replicas share as they always do
        shape = replace(shape, shard=1)
    asked: dict[str, Scalar] = {"schedule": case.schedule, "n": shape.parts, "m": shape.m, "chunks": shape.chunks}
    asked |= {"replicas": shape.replicas // shape.shard, "steps": case.steps, "slot_order": given["slot_order"]}
    asked |= {"rule": given["rule"] if given["rule"] is None else str(given["rule"])}
    rare = {"warm_up": shape.warm_up, "local_steps": shape.local_steps, "outer": given["outer"]}
    rare["stage_replicas"] = ",".join(map(str, shape.widths))
    asked |= {name: value for name, value in ({"slow": " ".join(given["slow"])} | rare).items() if value}
    asked |= recorded_options(case) | {"split": case.split if find_schedule(case.schedule).splits(shape) else None}
    asked |= {"shard": shape.shard if shape.shard > 1 else given["shard"]}
    asked |= {"model": case.model, "batch": case.batch, "dtype": case.dtype, "seed": case.seed}
    asked |= {"sizes": " ".join(f"{name}={size}" for name, size in case.sizes)}
    asked |= {"cuts": None if case.cuts is None else ",".join(map(str, case.cuts))}
    asked |= {"layers": ",".join(map(str, case.layers)) or None}
    asked |= {"optimizer": case.optimizer.kind} | {f"optimizer_{k}": v for k, v in case.optimizer.options.items()}
    return asked | {"device": case.device, "backend": None if alone else case.backend, "single_process": alone}


def model_hash(model: Model) -> str:
    """Return the hash of a model's file."""
    return sha256(config.toml_text(model.table()).encode()).hexdigest()


# Messages


def _compare_messages(plan: Plan, outcomes: list[Outcome], needs: list[MessageDifference]) -> MessageCount:
    ours = [plan.calls(device) for device in range(plan.program.devices)]
    theirs = [outcome.calls for outcome in outcomes]
    counts, sizes = ([_total(calls, weigh) for calls in (ours, theirs)] for weigh in (False, True))
    return MessageCount(
        simulated=counts[0],
        measured=counts[1],
        bytes_simulated=sizes[0],
        bytes_measured=sizes[1],
        agree=ours == theirs,
        differences=needs,
    )


def _total(calls: Sequence[Calls], weigh: bool) -> int:
    """Return the number of messages, or of their bytes: of each send, and of each collective at its first member."""
    return sum(
        count * (size if weigh else 1)
        for device, own in enumerate(calls)
        for (call, peers, size), count in own.items()
        if (call == "send" or (call != "receive" and device == min(peers)))
    )


# Time


def _run_durations(outcomes: list[Outcome], turns: bool) -> Durations:
    spans = [span for outcome in outcomes for span in outcome.spans]
    busy = [sum(span.end - span.begin for span in outcome.spans) for outcome in outcomes]
    return Durations(sum(busy) if turns else max(s.end for s in spans) - min(s.begin for s in spans), busy)


def _compare_times(said: Durations, took: list[Durations], source: str) -> Time:
    makespan = statistics.median(run.makespan for run in took)
    busy = [statistics.median(run.busy[device] for run in took) for device in range(len(said.busy))]
    return Time(
        **compared(said.makespan, makespan, "seconds"),
        devices=[
            DeviceTime(device=device, **compared(*both, "busy_seconds"))
            for device, both in enumerate(zip(said.busy, busy, strict=True))
        ],
        calibration=source,
    )

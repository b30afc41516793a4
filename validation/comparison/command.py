"""The command `replay`: its arguments and its report."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import TypeVar, cast

from cdpsim.cli.arguments import add_options, option_arguments
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument, argument_group
from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, choose, whole_number
from cdpsim.files import writing as files
from cdpsim.files.notes import ticker
from cdpsim.files.units import seconds
from cdpsim.model.recomputation import SEGMENTED
from cdpsim.program.collectives import ALL_REDUCE
from cdpsim.request.options import DEFAULTS, read_value
from cdpsim.request.reading import shape_of
from cdpsim.request.sharing import accepts, goes_by_layer, named_zero, read_ranks, refuse_untaken
from cdpsim.schedules import Schedule, find_schedule
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import NAMED_RULES, find_rule

from ..profile.command import (
    MIXED_PRECISION,
    PARTITION,
    SIZE,
    SPLIT_BACKWARDS,
    TYPES,
    check_mixed,
    read_sizes,
    refuse_unfit_layers,
    without_weights,
)
from ..profile.cuts import find_cuts
from ..program import harness_command
from ..ranks.member import BACKENDS, DEVICES, check_device
from ..ranks.torchrun import find_ranks
from ..replay.case import DTYPES, Case, prepare, profiled
from ..replay.options import DATA_RANKS, OF_SCHEDULES, ON_HOSTS, replayable
from ..report import schema as reportform
from ..report.command import percent
from ..report.schema import Account, LiveReport, Report
from ..training.optimizer import OPTIMIZERS, Optimizer
from ..training.passes import SPLITS, Split
from .calibrated import read_stages, take_from_files
from .forecast import Forecast
from .live import check_live, compare_live, live_summary
from .replays import SingleProcess, compare_replay, count_runs

AnyReport = TypeVar("AnyReport", Report, LiveReport)
MOST_LINES = 5  # of one kind in a summary; the report has all

_TRAINING = argument_group(
    "what is trained",
    argument("--model", metavar="MODEL", help="as for `profile`: transformer, … (default mlp, or as --stages says)"),
    SIZE,
    PARTITION,
    argument("--batch", metavar="B", help="samples of a micro-batch (default 4, or as --stages or --cluster says)"),
    argument("--dtype", metavar="TYPE", help=f"{', '.join(DTYPES)} (default float64, or likewise)"),
    argument("--optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default momentum, or likewise)"),
    MIXED_PRECISION,
    argument("--autocast", metavar="TYPE", help="bf16 or fp16: forwards under torch.autocast (for float32)"),
    argument("--recompute", default="none", metavar="HOW", help=f"{', '.join(SEGMENTED)}: as for `cdpsim simulate`"),
    argument("--offload", default="none", metavar="WHAT", help=f"{', '.join(ON_HOSTS)}: as for `cdpsim simulate`"),
    argument("--seed", default="0", metavar="S", help="of parameters and data (default 0)"),
)

_ROUNDS = argument_group(
    "workers whose rounds have lengths that follow from times",
    argument("--live", action="store_true", help="ranks find their lengths: the equation takes what came out"),
    lambda group: add_options(group, ["slow"]),
)

_MACHINE = argument_group(
    "where it runs, and what is predicted",
    argument("--device", default="cpu", metavar="DEVICE", help="cpu (default) or cuda"),
    argument("--backend", default="gloo", metavar="NAME", help="gloo (default), or nccl: a GPU for each rank"),
    argument("--single-process", action="store_true", help="play all devices' programs in slot order in one process"),
    argument(
        "--cluster", metavar="FILE", help="a cluster file, from which times are predicted (default: measured now)"
    ),
    argument(
        "--repeats", default="3", metavar="K", help="timed runs, of which the median counts (default 3; 0 for none)"
    ),
    argument("--stages", metavar="FILE", help="a model file of these stages (default: profiled now, before the run)"),
    argument(
        "--collective",
        default="ring",
        metavar="NAME",
        help=f"how all-reduces are predicted: {', '.join(ALL_REDUCE)} (default ring)",
    ),
)


@harness_command(
    "replay",
    argument("schedule", metavar="NAME", help="a schedule; `cdpsim schedules` lists them (or a CSV file of an order)"),
    argument("-n", required=True, metavar="N", help="stages, and micro-batches"),
    argument("-o", "--output", required=True, metavar="FILE.json", help="the report to write"),
    argument("--force", action="store_true", help="overwrite a report that exists"),
    argument("--steps", default="3", metavar="T", help="training steps (default 3)"),
    argument("--timeout", metavar="SECONDS", help="how long ranks may take for a run (default 120)"),
    SPLIT_BACKWARDS,
    option_arguments(OF_SCHEDULES, "the schedule, as for `cdpsim simulate`"),
    option_arguments(DATA_RANKS, "what data ranks share and exchange, as for `cdpsim simulate`"),
    _ROUNDS,
    _TRAINING,
    _MACHINE,
)
def replay_command(options: argparse.Namespace) -> int:
    """Run a schedule for real and compare it with the simulation."""
    take_from_files(options)
    if options.live:
        check_live(find_schedule(options.schedule), options.offload, alone=options.single_process)
    with refuse_unfit_layers(options.model):
        case = case_of(options)
    forecast = _forecast(options, case)
    timeout = 120.0 if options.timeout is None else _seconds(options.timeout)
    repeats = whole_number("repeats", options.repeats, at_least=0)
    if options.single_process:
        _refuse_ranks(options, case)
    files.check_writable(options.output, force=options.force)
    done = ticker(count_runs(repeats), "replay")
    if options.single_process:
        report = compare_replay(case, SingleProcess(), forecast, timeout=timeout, repeats=repeats, done=done)
        return _write_report(options, report, report_summary)
    with find_ranks(prepare(case).plan.program.devices, device=case.device, backend=case.backend) as ranks:
        if options.live:
            return _write_report(options, compare_live(case, ranks, timeout=timeout), live_summary)
        report = compare_replay(case, ranks, forecast, timeout=timeout, repeats=repeats, done=done)
        return _write_report(options, report, report_summary)


def _write_report(options: argparse.Namespace, report: AnyReport | None, summary: Callable[[AnyReport], str]) -> int:
    """Write a report and its summary, unless another rank reports, and return the exit code."""
    if report is None:
        return 0
    reportform.write_report(options.output, report, force=options.force)
    write_stdout(summary(report))
    return 0 if report.ok else 1


def case_of(options: argparse.Namespace) -> Case:
    """Return the case of a command line, with its stages profiled."""
    n, batch = whole_number("n", options.n, at_least=1), whole_number("batch", options.batch, at_least=1)
    sizes = read_sizes(options.size)
    dtype = choose("dtype", options.dtype, DTYPES)
    optimizer = _optimizer(options, dtype)
    layers = without_weights(options.model, n, batch=batch, dtype=TYPES[dtype], autocast=options.autocast, **sizes)
    given = DEFAULTS | {name: value for name, value in vars(options).items() if value is not None}
    given |= named_zero(given)
    schedule = find_schedule(str(given["schedule"]))
    given |= {name: read_value(name, given[name]) for name in ("prefetch", "zero", "shard")}
    shape = shape_of(schedule, n, given)
    refuse_untaken(schedule, given, shape.parts)
    zero, _, _ = read_ranks(schedule, shape.replicas, given)
    if schedule.order.rounds:  # whose replicas share as they always do
        shape, zero = replace(shape, shard=1), 0
    cuts = tuple(find_cuts(layers, n, options.partition, optimizer))
    wanted = options.by_layer if options.by_layer is not None else goes_by_layer(zero, options.buckets)
    by_layer = wanted and accepts(schedule, "by_layer") and len(layers.layers) > n
    given |= {name: getattr(shape, name) or None for name in ("m", "chunks", "warm_up", "local_steps")}
    given |= {"replicas": shape.replicas // shape.shard, "zero": zero or None, "shard": shape.shard if zero else None}
    given |= {"rule": _rule(options.rule, shape), "by_layer": (0, *cuts) if by_layer else None}
    case = Case(
        schedule.name,
        n,
        whole_number("steps", options.steps, at_least=1),
        **{name: given[name] for name in (*OF_SCHEDULES, *DATA_RANKS, "slow")},
        model=options.model,
        optimizer=optimizer,
        batch=batch,
        dtype=dtype,
        seed=whole_number("seed", options.seed, at_least=0),
        sizes=tuple(sizes.items()),
        cuts=tuple(range(1, len(layers.layers))) if by_layer else cuts,
        autocast=options.autocast,
        recompute=choose("recompute", options.recompute, SEGMENTED),
        offload=choose("offload", options.offload, ON_HOSTS),
        split=_split(options.split, schedule, shape),
        device=choose("device", options.device, DEVICES),
        backend=choose("backend", options.backend, BACKENDS),
    )
    case = replayable(case, alone=options.single_process)
    return profiled(case) if options.stages is None else replace(case, stages=read_stages(options.stages, case))


def _optimizer(options: argparse.Namespace, dtype: str) -> Optimizer:
    """Return the optimizer of a command line; refuse one that cannot compute in the type."""
    optimizer = OPTIMIZERS[choose("optimizer", options.optimizer, OPTIMIZERS)]
    if options.mixed_precision:
        check_mixed(dtype)
        return replace(optimizer, mixed_precision=True)
    if options.offload in ("optimizer", "all") and optimizer.kind == "sgd" and not optimizer.options.get("momentum"):
        raise RequestError("offload", "the optimizer has no state to put on a host; name one that keeps some")
    if optimizer.kind in ("adam", "adamw") and dtype == "float16":
        problem = "adds 1e-8 before it divides, which is 0 in float16"
        raise RequestError("optimizer", f"{optimizer.kind} {problem}; take --mixed-precision, or --dtype bfloat16")
    return optimizer


def _split(given: str | None, schedule: Schedule, shape: Shape) -> Split:
    if given is not None and not schedule.splits(shape):
        raise RequestError("split", f"{schedule.name} splits no backwards; leave it out")
    return cast(Split, choose("split", given or "once", SPLITS))


def _rule(given: str | None, shape: Shape) -> str | tuple[tuple[int, ...], ...] | None:
    """Return the name of a rule, or its lags for each micro-batch and stage."""
    if given is None or given in NAMED_RULES:
        return given
    return tuple(map(tuple, find_rule(given).lags(shape).tolist()))


def _forecast(options: argparse.Namespace, case: Case) -> Forecast | None:
    choose("collective", options.collective, ALL_REDUCE)
    if options.cluster is None:
        return None
    if whole_number("repeats", options.repeats, at_least=0) == 0:
        raise RequestError("--cluster", "is for times, which --repeats 0 does not take; leave out one of them")
    cluster = Cluster.load(options.cluster)
    source = options.cluster if options.stages is None else f"{options.cluster}, {options.stages}"
    return Forecast(case.profile, cluster, options.collective, source)


def _refuse_ranks(options: argparse.Namespace, case: Case) -> None:
    if options.timeout is not None:
        raise RequestError("--timeout", "is for ranks; --single-process waits for no rank")
    if case.backend != "gloo":
        raise RequestError("--backend", "is for ranks; --single-process sends nothing")
    check_device(case.device, case.backend, 1)


def _seconds(given: str) -> float:
    """Return a time above 0; on a command line seconds need no unit."""
    with suppress(ValueError):
        given = f"{float(given)} s"
    if not (found := seconds(given)):
        raise RequestError("--timeout", "is no time at all; give seconds, such as 60")
    return found


def report_summary(report: Report) -> str:
    """Return a summary of a report in a few lines."""
    parameters, held, messages, time = report.parameters, report.memory, report.messages, report.time
    apart, options = parameters.max_abs_difference, report.options or {}
    where = "" if parameters.stage is None else f" in stage {parameters.stage}"
    where += "" if parameters.other_rule is None else f", as those of {parameters.other_rule}"
    differ, near = f"differ by {apart}{where} (at most {parameters.tolerance})", parameters.nearest
    nearest = near and f"nearest other rule: {near.rule}, {near.distance:.1e} away"
    lines = [
        f"parameters  {'bit-equal' if parameters.bit_equal else differ}",
        *([f"{'':12}{nearest}; within {parameters.tolerance:.1e} is ok"] if nearest else []),
        f"memory      {_pair(held.total.simulated_bytes, held.total.measured_bytes, 'B')} of activations at the most, "
        f"devices off by at most {percent(held.max_relative_error)} %",
        f"messages    {_pair(messages.simulated, messages.measured, '')}",
    ]
    for device in held.devices:
        if part := device.parts_at:
            lines.append(
                f"            device {device.device} parts in slot {part.slot}, {part.task}, in {part.category}: "
                f"{_pair(part.simulated_bytes, part.measured_bytes, 'B')}"
            )
    accounts = report.allocator.processes if report.allocator else []
    lines += _lines("allocator", [_account_line(each) for each in accounts], "not compared")
    lines += _lines("needs", messages.differences or [], "every message is needed, and none is missing")
    lines += _lines("lifetimes", report.lives or [], "as tasks and messages need them")
    if time is None:
        lines.append("time        not compared")
    else:
        worst = max((abs(device.relative_error) for device in time.devices), default=0.0)
        lines.append(
            f"time        {_pair(time.simulated_seconds, time.measured_seconds, 's')}, off by "
            f"{percent(time.relative_error)} %, devices' busy time by at most {percent(worst)} %; not judged"
        )
    texts = [f"{name}: {how}" for name, how in options.items()]
    lines += _lines("options", texts, "") if texts else []
    return "\n".join([*lines, "ok" if report.ok else "not within tolerance", ""])


def _account_line(account: Account) -> str:
    text = "" if account.device is None else f"device {account.device}: "
    text += f"{account.simulated_bytes:,} simulated"
    text += "".join(f" + {each.size:,} {each.name}" for each in account.remainders)
    text += f", {account.measured_bytes:,} measured B at {account.peak_at}"
    if account.differs_at is None:
        return text
    return f"{text}; {account.differs_by:+,} B in {account.differs_at}"


def _lines(subject: str, differences: Sequence[object], without: str) -> list[str]:
    """Return a line for each of the first differences, or a line for none."""
    texts = [str(each) for each in differences] or [without]
    rest = [f"and {len(texts) - MOST_LINES} more"] if len(texts) > MOST_LINES else []
    return [f"{word:12}{text}" for word, text in zip_longest([subject], texts[:MOST_LINES] + rest, fillvalue="")]


def _pair(simulated: float, measured: float, unit: str) -> str:
    form = ",.4g" if isinstance(measured, float) else ","
    return f"{simulated:{form}} simulated, {measured:{form}} measured {unit}".rstrip()

"""The command `replay`: what it takes, and the report that it writes."""

import argparse
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cdpsim.cli import console
from cdpsim.cluster import Cluster
from cdpsim.errors import RequestError, choose, whole_number
from cdpsim.files import writing as files
from cdpsim.files.progress import ticker
from cdpsim.files.units import seconds
from cdpsim.model import Model
from cdpsim.program.collectives import ALL_REDUCE
from cdpsim.request.reading import refuse_inapplicable, shape_of
from cdpsim.schedules import find_schedule
from cdpsim.schedules.rule import RULES, find_rule
from cdpsim.schedules.shape import Shape
from validation.ranks.member import BACKENDS, DEVICES, check_device
from validation.ranks.torchrun import find_ranks
from validation.replay.case import DTYPES, Case, prepare, profiled
from validation.report import form as reportform
from validation.report.command import percent
from validation.report.form import Report
from validation.training.optimizer import OPTIMIZERS
from validation.trial.forecast import Forecast
from validation.trial.hold import Alone, hold, runs_of

ABOUT = "run a schedule for real and hold it against the simulation"
MORE = """The schedule's program, the one that `cdpsim simulate` runs, is played by one process for
each device with real tensors, and four things are compared with what the simulation
said before:

  parameters  those after T steps, with the update equation evaluated in one process,
              in the same type (--dtype: float64 unless you say otherwise)
  memory      each device's activations slot by slot: unique storages on a CPU, the
              allocator's own figures on a GPU
  messages    calls, peers and bytes, counted at the calls
  time        makespan and each device's busy time: predicted with --cluster from
              `python -m validation calibrate`, and --stages that has the stages' own
              times; or from times taken here just before

Exits with 0 if everything is within tolerance, 1 if not, 2 if it could not be run; a
rank that is dead or hangs is named. Started by torchrun it uses the ranks that it finds.

examples:
  python -m validation replay multi-cdp -n 4 -o report.json
  python -m validation replay pp-cdp -n 4 --model vit-mini --steps 2 -o report.json
  python -m validation replay mp-cdp -n 4 --single-process -o report.json
  python -m validation replay interleaved-1f1b -n 4 --chunks 2 -m 6 -o report.json
  torchrun --nproc-per-node=4 -m validation replay zero-cdp -n 4 -o report.json
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command `replay` to a command line."""
    parser = console.add_command(commands, "replay", serve, ABOUT, MORE)
    parser.add_argument(
        "schedule", metavar="NAME", help="a schedule; `cdpsim schedules` lists them (or a CSV file of an order)"
    )
    parser.add_argument("-n", required=True, metavar="N", help="stages, and micro-batches")
    parser.add_argument("-m", metavar="M", help="micro-batches, where there are to be more or fewer than stages")
    parser.add_argument("--chunks", metavar="V", help="stages per device, as for `cdpsim simulate`")
    parser.add_argument("--replicas", default="1", metavar="R", help="how often all of it is there (default once)")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.json", help="the report to write")
    parser.add_argument("--force", action="store_true", help="overwrite a report that is there")
    parser.add_argument("--steps", default="3", metavar="T", help="training steps (default 3)")
    parser.add_argument("--rule", metavar="RULE", help="dp, cdp-v1, cdp-v2 or a CSV file (default: the schedule's own)")
    parser.add_argument("--timeout", metavar="SECONDS", help="how long ranks may take for a run (default 120)")
    parser.add_argument(
        "--slot-order", metavar="ORDER", help="as for `cdpsim simulate`: forward-first (default) or backward-first"
    )
    _add_training(parser)
    _add_machine(parser)
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is trained")
    group.add_argument(
        "--model", default="mlp", metavar="MODEL", help="as for `profile`: mlp (default), transformer, …"
    )
    group.add_argument(
        "--size", action="append", default=[], metavar="NAME=K", help="a size of the model, such as width=512"
    )
    group.add_argument(
        "--partition", default="flops", metavar="PARTITION", help="how layers are cut into stages, as for `profile`"
    )
    group.add_argument("--batch", default="4", metavar="B", help="samples of a micro-batch (default 4)")
    group.add_argument("--dtype", default="float64", metavar="TYPE", help=f"{' or '.join(DTYPES)} (default float64)")
    group.add_argument(
        "--optimizer", default="momentum", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default momentum)"
    )
    group.add_argument("--seed", default="0", metavar="S", help="of parameters and data (default 0)")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what it runs on, and what is said of that")
    group.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu (default) or cuda")
    group.add_argument("--backend", default="gloo", metavar="NAME", help="gloo (default), or nccl: a GPU for each rank")
    group.add_argument(
        "--single-process", action="store_true", help="play all devices' programs in slot order in one process"
    )
    group.add_argument(
        "--cluster", metavar="FILE", help="a cluster file, from which times are predicted (default: measured now)"
    )
    group.add_argument(
        "--repeats", default="3", metavar="K", help="timed runs, of which the median counts (default 3; 0 for none)"
    )
    group.add_argument(
        "--stages", metavar="FILE", help="a model file of these stages (default: profiled now, before the run)"
    )
    group.add_argument(
        "--collective",
        default="ring",
        metavar="NAME",
        help=f"how all-reduces are predicted: {', '.join(ALL_REDUCE)} (default ring)",
    )


def serve(options: argparse.Namespace) -> int:
    """Do what the command line asks for."""
    from validation.profile.command import refusing

    with refusing(options.model):
        case = case_of(options)
    forecast = _forecast(options, case)
    waits = _waits(options)
    if options.single_process:
        _refuse_ranks(options, case)
    files.check_writable(options.output, force=options.force)
    report = _played(options, case, forecast, *waits)
    if report is None:  # another rank reports
        return 0
    reportform.write(options.output, report, force=options.force)
    console.write(told(report))
    return 0 if report.ok else 1


def case_of(options: argparse.Namespace) -> Case:
    """Read what to replay, and find out what its stages hold: before anything runs."""
    from validation.profile.command import TYPES, read_sizes, without_weights
    from validation.profile.cuts import find_cuts

    n, batch = whole_number("n", options.n, at_least=1), whole_number("batch", options.batch, at_least=1)
    sizes = read_sizes(options.size)
    dtype = choose("dtype", options.dtype, DTYPES)
    optimizer = OPTIMIZERS[choose("optimizer", options.optimizer, OPTIMIZERS)]
    layers = without_weights(options.model, n, batch=batch, dtype=TYPES[dtype], **sizes)
    schedule = find_schedule(options.schedule)
    shape = shape_of(schedule, n, vars(options))
    refuse_inapplicable(schedule, shape, vars(options))
    case = Case(
        schedule=schedule.name,
        n=n,
        m=shape.m,
        chunks=shape.chunks,
        replicas=shape.replicas,
        steps=whole_number("steps", options.steps, at_least=1),
        rule=_rule(options.rule, shape),
        slot_order=options.slot_order,
        model=options.model,
        optimizer=optimizer,
        batch=batch,
        dtype=dtype,
        seed=whole_number("seed", options.seed, at_least=0),
        sizes=tuple(sizes.items()),
        cuts=tuple(find_cuts(layers, n, options.partition, optimizer)),
        device=choose("device", options.device, DEVICES),
        backend=choose("backend", options.backend, BACKENDS),
    )
    return profiled(case) if options.stages is None else replace(case, stages=_stages(options.stages, n))


def _rule(given: str | None, shape: Shape) -> str | tuple[tuple[bool, ...], ...] | None:
    if given is None or given in RULES:
        return given
    return tuple(map(tuple, find_rule(given).matrix(shape.n, shape.m).tolist()))


def _stages(path: str, n: int) -> Model:
    model = Model.load(path)
    if model.n != n:
        raise RequestError(path, f"has {model.n} stages, not n={n}; profile the model with -n {n}")
    if model.tied:
        problem = f"ties stages {list(model.tied[0].stages)}, and a replay trains each by itself; leave [[tied]] out"
        raise RequestError(path, problem)
    return model


def _forecast(options: argparse.Namespace, case: Case) -> Forecast | None:
    choose("collective", options.collective, ALL_REDUCE)
    if options.cluster is None:
        return None
    if whole_number("repeats", options.repeats, at_least=0) == 0:
        raise RequestError("--cluster", "is for times, which --repeats 0 does not take; leave out one of them")
    assert case.stages is not None, "a case on the command line is profiled"
    cluster = Cluster.load(options.cluster)
    source = options.cluster if options.stages is None else f"{options.cluster}, {options.stages}"
    return Forecast(case.stages, cluster, options.collective, source)


def _waits(options: argparse.Namespace) -> tuple[float, int]:
    """Read how long ranks may take, and how often they are timed."""
    timeout = 120.0 if options.timeout is None else _seconds(options.timeout)
    return timeout, whole_number("repeats", options.repeats, at_least=0)


def _refuse_ranks(options: argparse.Namespace, case: Case) -> None:
    """Refuse options of ranks where there are none."""
    if options.timeout is not None:
        raise RequestError("--timeout", "is for ranks; --single-process waits for nobody")
    if case.backend != "gloo":
        raise RequestError("--backend", "is for ranks; --single-process sends nothing")
    check_device(case.device, case.backend, 1)


def _played(
    options: argparse.Namespace, case: Case, forecast: Forecast | None, timeout: float, repeats: int
) -> Report | None:
    done = ticker(runs_of(repeats), "replay")
    if options.single_process:
        return hold(case, Alone(), forecast, timeout=timeout, repeats=repeats, done=done)
    devices = prepare(case).plan.program.devices
    with find_ranks(devices, device=case.device, backend=case.backend) as ranks:
        return hold(case, ranks, forecast, timeout=timeout, repeats=repeats, done=done)


def _seconds(given: str) -> float:
    """Read a time of which there is some; on a command line seconds need no unit."""
    with suppress(ValueError):
        given = f"{float(given)} s"
    if not (found := seconds(given)):
        raise RequestError("--timeout", "is no time at all; give seconds, such as 60")
    return found


def told(report: Report) -> str:
    """Say in a few lines what came of it."""
    parameters, held, messages, time = report.parameters, report.memory, report.messages, report.time
    apart = parameters.max_abs_difference
    lines = [
        "parameters  bit-equal"
        if parameters.bit_equal
        else f"parameters  differ by {apart} (at most {parameters.tolerance})",
        f"memory      {_pair(held.total.simulated_bytes, held.total.measured_bytes, 'B')} of activations at the most, "
        f"devices off by at most {percent(held.max_relative_error)} %",
        f"messages    {_pair(messages.simulated, messages.measured, '')}",
    ]
    for device in held.devices:
        if part := device.parts_at:
            lines.append(
                f"            device {device.device} parts in slot {part.slot}, {part.task}: "
                f"{_pair(part.simulated_bytes, part.measured_bytes, 'B')}"
            )
    if time is None:
        lines.append("time        not compared")
    else:
        worst = max((abs(device.relative_error) for device in time.devices), default=0.0)
        lines.append(
            f"time        {_pair(time.simulated_seconds, time.measured_seconds, 's')}, off by "
            f"{percent(time.relative_error)} %, devices' busy time by at most {percent(worst)} %"
        )
    return "\n".join([*lines, "ok" if report.ok else "not within tolerance", ""])


def _pair(simulated: float, measured: float, unit: str) -> str:
    form = ",.4g" if isinstance(measured, float) else ","
    return f"{simulated:{form}} simulated, {measured:{form}} measured {unit}".rstrip()

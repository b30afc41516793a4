"""The command `calibrate`: a cluster file of this machine for `--cluster`, all measurements, and a picture of them."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from msgspec import structs

from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument
from cdpsim.cluster import Cluster, Link, MeasuredWith, Workspace
from cdpsim.draw import canvas
from cdpsim.errors import RequestError, choose, whole_number
from cdpsim.files import writing as files
from cdpsim.files.notes import ticker
from cdpsim.files.units import quantity_text
from cdpsim.model import Model, Recipe
from cdpsim.model.layers import Layers
from cdpsim.program import Op

from ..profile.command import PARTITION, PRECISIONS, SIZE, TYPES, read_sizes, without_weights
from ..profile.cuts import find_cuts
from ..profile.footprints import profile_stages
from ..program import harness_command
from ..ranks.launcher import Ranks, Result
from ..ranks.member import check_device
from ..replay.case import DTYPES
from ..report.environment import environment
from ..report.figure import draw_calibration
from ..report.schema import Calibration, Errors, KernelFit
from ..training.models import Stages
from ..training.optimizer import OPTIMIZERS
from . import kernels, summaries, timings
from .summaries import round_measured, timed_model

MESSAGE_SIZES = (*(8 * 4**k for k in range(12)), 2**26)
OPS = (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE)
USUAL = Stages("transformer", 4, 8, "float32", sizes={"width": 256, "length": 64, "heads": 4})
_QUIET = 2.0  # how many times the fastest message a median one may take on a quiet machine
_TIMEOUT = 300.0  # seconds for one series of messages


@dataclass(frozen=True)
class CalibrationRequest:
    """The measurements of a calibration."""

    stages: Stages = USUAL
    device: str = "cpu"
    backend: str = "gloo"
    ranks: int = 2
    sizes: tuple[int, ...] = MESSAGE_SIZES
    rounds: int = 30
    alone: bool = False  # time stages and operations in one rank while the others wait
    layer: Layers | None = None  # the one that is timed whole; None: the usual one of the device


def calibrate_machine(
    output: str | Path, request: CalibrationRequest, *, stages_output: str | Path | None = None, force: bool = False
) -> Calibration:
    """Measure this machine, write the files, and return the calibration."""
    outputs = _outputs(output, stages_output)
    if request.ranks < 2:
        raise RequestError("ranks", f"{request.ranks} is too few to send messages; give at least 2")
    check_device(request.device, request.backend, request.ranks)
    model = profile_of(request)
    for path in outputs:
        files.check_writable(path, force=force)
    with Ranks(request.ranks, device=request.device, backend=request.backend) as group:
        found = measure_machine(group, request, model)
    cluster_of(found, request).save(outputs[0], force=force)
    files.write_file(outputs[1], [msgspec.json.format(msgspec.json.encode(found), indent=1), "\n"], force=force)
    if stages_output is not None:
        stages_with_times(found, request, model).save(stages_output, force=force)
    # The picture last: where it cannot be drawn, the measurements are written.
    files.write_file(outputs[2], [canvas.rendered(draw_calibration(found), outputs[2])], force=force)
    return found


def _outputs(output: str | Path, stages_output: str | Path | None) -> list[Path]:
    """Return the paths of all files to write; refuse equal ones."""
    for path in (output, stages_output):
        if path is not None and Path(path).suffix.lower() != ".toml":
            raise RequestError(str(path), "is to be a TOML file; end its name in .toml")
    beside = [Path(output), *(Path(output).with_suffix(ending) for ending in (".json", ".png"))]
    if stages_output is None:
        return beside
    if Path(stages_output) == Path(output):
        raise RequestError("--stages", f"{stages_output} is to be the cluster file; choose another name")
    return [*beside, Path(stages_output)]


def profile_of(request: CalibrationRequest) -> Model:
    """Return the profile of the stages that are timed."""
    stages = request.stages
    return profile_stages(stages.training(request.device), stages.optimizer)


def measure_machine(group: Ranks, request: CalibrationRequest, model: Model) -> Calibration:
    """Return all times of a request, measured by the first of a group's ranks."""
    stages, ranks, sizes, rounds = request.stages, request.ranks, list(request.sizes), request.rounds
    done = ticker(7 + len(OPS) * (ranks - 1), "calibrate")

    def call(function: Callable[..., Result], *arguments: object) -> list[Result]:
        answers = group.call(function, *arguments, timeout=_TIMEOUT)
        done(1)
        return answers

    one_way, both_ways = call(timings.ping_pong, sizes)[0], call(timings.both_ways, sizes)[0]
    link = summaries.summarize_transfers(one_way)
    collectives = []
    for op in OPS:
        spans = {k: call(timings.time_collective, op, k, sizes)[:k] for k in range(2, ranks + 1)}
        collectives.append(summaries.summarize_collective(op, spans, link.fit))
    workspace = call(timings.measure_workspace, stages)[0]  # before its libraries have been used
    alone = call(timings.time_passes, stages, rounds, 1)[0]
    busy = summaries.pool_ranks(call(timings.time_passes, stages, rounds, ranks)[:ranks])
    shape = request.layer or kernels.LAYERS[request.device]
    operated = call(kernels.time_kernels, shape, stages.dtype, 1 if request.alone else ranks)
    size = kernels.size_beside(operated[0], collectives[0])
    overlaps = call(kernels.time_overlap, shape, stages.dtype, ranks, size)
    done(0)
    work = [(float(stage.forward), float(stage.backward)) for stage in model.stages]
    compute = summaries.summarize_compute(busy, alone, work, request.alone)
    speed = compute.speed_flop_per_second
    meeting = kernels.meeting_time(collectives[0])
    fit = kernels.fit_kernels([own for own in operated if own], speed, meeting, overlaps)
    return Calibration(
        request=msgspec.json.decode(msgspec.json.encode(request)),
        environment=environment(request.device),
        one_way=link,
        both_ways=summaries.summarize_transfers(both_ways),
        collectives=collectives,
        compute=compute,
        kernels=kernels.held_against(fit, kernels.devices_of(speed, fit), shape, stages.dtype),
        workspace=workspace,
    )


def cluster_of(found: Calibration, request: CalibrationRequest) -> Cluster:
    """Return the cluster that explains the measurements best."""
    link = found.one_way.fit
    devices = kernels.devices_of(found.compute.speed_flop_per_second, found.kernels)
    return Cluster(
        name=f"{request.device} with {request.backend}, as {request.ranks} ranks measured it",
        devices=(structs.replace(devices, workspace=Workspace(**found.workspace)),),
        link=Link(latency=round_measured(link.latency_seconds), bandwidth=round_measured(link.bandwidth)),
        measured_with=MeasuredWith(
            samples=request.stages.batch,
            precision=PRECISIONS[request.stages.dtype],
            optimizer=request.stages.optimizer.name,
        ),
    )


def stages_with_times(found: Calibration, request: CalibrationRequest, model: Model) -> Model:
    """Return the model of the stages' own times, with all that a replay of them has to have in common."""
    stages = request.stages
    timed = timed_model(model, found.compute.tasks, stages.model)
    return structs.replace(
        timed,
        precision=PRECISIONS[stages.dtype],
        samples=stages.batch,
        source=" ".join([stages.model, *(f"{name}={size}" for name, size in stages.sizes.items())]),
        training=Recipe(optimizer=stages.optimizer.name),
        stages=tuple(structs.replace(stage, optimizer=0) for stage in timed.stages),
    )


def calibration_summary(found: Calibration) -> str:
    """Return a summary of a calibration in a few lines."""
    link, both, compute = found.one_way.fit, found.both_ways.fit, found.compute
    speed = quantity_text(round_measured(compute.speed_flop_per_second), "FLOPS")
    lines = [_fit_text("link", link), _fit_text("both directions at once", both)]
    for each in found.collectives:
        off = each.on_link[each.best].median_relative_error
        lines.append(f"{each.name}: {each.best} on that link is off by {off:.0%}")
    lines.append(f"speed: {speed}, off by {compute.median_relative_error:.0%}")
    if found.kernels is not None:
        lines.append(_kernels_text(found.kernels))
    lines.append(f"other ranks at work: {compute.slowdown:.2f} times as long")
    if (times := median(point.seconds / point.fastest for point in found.one_way.points)) > _QUIET:
        slow = f"messages took {times:.1f} times as long as the fastest"
        lines.append(f"{slow}: measure again when no other program computes")
    return "".join(f"{line}\n" for line in lines)


def _kernels_text(fit: KernelFit) -> str:
    costs = (fit.speed, "FLOPS"), (fit.memory_bandwidth, "B/s"), (fit.launch, "s"), (fit.meet, "s")
    speed, memory, launch, meet = (quantity_text(round_measured(amount), unit) for amount, unit in costs)
    shares = f"products {fit.products:.0%} of {speed}, core {fit.core:.0%}, passes {fit.passes:.0%} of {memory}"
    off = abs(fit.layer_relative_error or 0.0)
    return f"kernels: {shares}, launch {launch}, meet {meet}, beside {fit.beside:.0%}; a layer is off by {off:.0%}"


def _fit_text(name: str, fit: Errors) -> str:
    given = (fit.latency_seconds, "s"), (fit.bandwidth, "B/s")
    costs = ", ".join(quantity_text(round_measured(amount), unit) for amount, unit in given)
    return f"{name}: {costs}, off by {fit.median_relative_error:.0%}"


@harness_command(
    "calibrate",
    argument("-o", "--output", required=True, metavar="FILE.toml", help="the cluster file to write"),
    argument("--stages", metavar="FILE.toml", help="also write a model file of the stages' own times"),
    argument("--device", default="cpu", metavar="DEVICE", help="cpu (default) or cuda"),
    argument("--backend", default="gloo", metavar="NAME", help="gloo (default) or nccl: a GPU for each rank"),
    argument("--ranks", default="2", metavar="K", help="processes to start (default 2)"),
    argument("--model", metavar="NAME", help="whose stages to time (default a transformer of width 256)"),
    argument("-n", default=str(USUAL.n), metavar="N", help=f"stages (default {USUAL.n})"),
    argument("--batch", default=str(USUAL.batch), metavar="B", help=f"samples (default {USUAL.batch})"),
    argument("--dtype", default=USUAL.dtype, metavar="TYPE", help=f"{' or '.join(DTYPES)} (default float32)"),
    SIZE,
    PARTITION,
    argument("--optimizer", default="momentum", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default momentum)"),
    argument("--alone", action="store_true", help="time stages in one rank while the others wait"),
    argument("--force", action="store_true", help="overwrite files that exist"),
)
def calibrate_command(options: argparse.Namespace) -> int:
    """Measure this machine: write a cluster file for --cluster."""
    request = CalibrationRequest(
        stages=_stages_to_time(options),
        device=options.device,
        backend=options.backend,
        ranks=whole_number("ranks", options.ranks, at_least=2),
        alone=options.alone,
    )
    found = calibrate_machine(options.output, request, stages_output=options.stages, force=options.force)
    write_stdout(calibration_summary(found))
    return 0


def _stages_to_time(options: argparse.Namespace) -> Stages:
    own = options.model is None
    model, sizes = (USUAL.model, dict(USUAL.sizes)) if own else (options.model, {})
    sizes |= read_sizes(options.size)
    n, batch = whole_number("n", options.n, at_least=1), whole_number("batch", options.batch, at_least=1)
    dtype = choose("dtype", options.dtype, DTYPES)
    optimizer = OPTIMIZERS[choose("optimizer", options.optimizer, OPTIMIZERS)]
    layers = without_weights(model, n, batch=batch, dtype=TYPES[dtype], autocast=None, **sizes)
    cuts = tuple(find_cuts(layers, n, options.partition, optimizer))
    return Stages(model, n, batch, dtype, optimizer, sizes, cuts)

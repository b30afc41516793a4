"""All that one machine can show: many replays by ranks that stay alive, and one file of what came of it.

On a GPU large models run too, in one process and by ranks that share it; on a CPU they run where that is bearable.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from cdpsim import console, files
from cdpsim.errors import choose
from cdpsim.progress import progress
from cdpsim.schedules import TABLE_1
from validation.calibrate import command as calibrate
from validation.ranks.launcher import Ranks
from validation.ranks.member import DEVICES, check_device
from validation.replay.case import Case, prepare, profiled
from validation.report import form as reportform
from validation.report.environment import environment
from validation.report.form import Battery
from validation.training.optimizer import OPTIMIZERS
from validation.trial.hold import Alone, hold, model_hash

ABOUT = "everything that this machine can show, as one file of reports"
MORE = """Replays the nine schedules of Table 1 and four pipelines: with a small transformer in one
process at N = 2, 4 and 8; with an MLP by ranks at N = 4; with a larger transformer in one
process and by two ranks, its times predicted from some that are taken just before; and
ViT-B/16 and ResNet-50, which on a CPU one device alone plays. Then it calibrates the machine.

FILE.json has every report, the model file that each simulation read, and where and when
it was measured. `python -m validation report` shows it.

example:
  python -m validation battery -o validation/results/battery-cpu.json
"""
TIMEOUT = 300.0
PIPELINES = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1}  # and the stages on each device


class Trial(NamedTuple):
    """A case, whether one process plays it or ranks do, and how often it is timed."""

    case: Case
    alone: bool
    repeats: int = 0


def trials(device: str) -> Iterator[Trial]:
    """Say what to replay on a kind of device."""
    small = Case("", 4, steps=3, model="transformer", optimizer=OPTIMIZERS["momentum"], device=device)
    for n in (2, 4, 8):
        yield from (Trial(case, alone=True) for case in _each(replace(small, n=n)))
    yield Trial(replace(small, schedule="single-cdp", slot_order="backward-first"), alone=True)
    yield from (Trial(case, alone=False) for case in _each(replace(small, model="mlp")))
    # Where tasks take milliseconds their times say something.
    middle = replace(small, dtype="float32", batch=8, sizes=(("width", 256), ("length", 64), ("heads", 4)))
    yield from (Trial(case, alone=True, repeats=3) for case in _each(middle))
    for schedule in ("multi-dp", "multi-cdp", "pp-cdp", "zero-dp", "zero-cdp", "1f1b", "zb-h1"):
        yield Trial(replace(middle, schedule=schedule, n=2), alone=False, repeats=3)
    yield from (_large_on_gpu if device == "cuda" else _large_on_cpu)(replace(small, dtype="float32"))


def _each(case: Case) -> Iterator[Case]:
    """Give the same case with one schedule after another."""
    yield from (replace(case, schedule=schedule) for schedule in TABLE_1)
    yield from (replace(case, schedule=schedule, chunks=chunks) for schedule, chunks in PIPELINES.items())


def _large_on_cpu(small: Case) -> Iterator[Trial]:
    for model in ("vit-b16", "resnet50"):
        large = replace(small, model=model, steps=2, batch=2, optimizer=OPTIMIZERS["sgd"])
        yield from (Trial(replace(large, schedule=schedule), alone=True) for schedule in ("single-dp", "single-cdp"))


def _large_on_gpu(small: Case) -> Iterator[Trial]:
    sizes = {"transformer": (("width", 1024), ("length", 512), ("heads", 16)), "vit-b16": (), "resnet50": ()}
    for model, own in sizes.items():
        large = replace(small, model=model, batch=16, sizes=own, optimizer=OPTIMIZERS["sgd"])
        yield from (Trial(case, alone=True, repeats=3) for case in _each(large))
        for schedule in ("single-cdp", "multi-dp", "multi-cdp", "pp-cdp", "mp-cdp", "zero-cdp"):
            yield Trial(replace(large, schedule=schedule), alone=False, repeats=3)


def run(output: str | Path, device: str, *, force: bool = False) -> Battery:
    """Run all of it and write one file."""
    files.check_writable(output, force=force)
    check_device(choose("device", device, DEVICES), "gloo", 1)
    begun = time.monotonic()
    todo = list(trials(device))
    most = max(prepare(trial.case).plan.program.devices for trial in todo if not trial.alone)
    models: dict[str, dict[str, Any]] = {}
    reports = []
    with Ranks(most, device=device) as ranks:
        for case, alone, repeats in progress(todo, "battery"):
            case = profiled(case)
            assert case.stages is not None, "it has been profiled"
            models[model_hash(case.stages)] = case.stages.table()
            report = hold(case, Alone() if alone else ranks, timeout=TIMEOUT, repeats=repeats)
            assert report is not None, "this process reports"
            reports.append(report)
        request = calibrate.Request(device=device)
        calibration = msgspec.to_builtins(calibrate.measure(ranks, request, calibrate.profile_of(request)))
    seconds = round(time.monotonic() - begun, 1)
    found = Battery(
        environment=environment(device), seconds=seconds, calibration=calibration, models=models, reports=reports
    )
    reportform.write(output, found, force=force)
    return found


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command `battery` to a command line."""
    parser = console.add_command(commands, "battery", serve, ABOUT, MORE)
    parser.add_argument("-o", "--output", required=True, metavar="FILE.json", help="the file to write")
    parser.add_argument("--device", metavar="DEVICE", help="cpu or cuda (default: cuda where there is a GPU)")
    parser.add_argument("--force", action="store_true", help="overwrite a file that is there")
    return parser


def serve(options: argparse.Namespace) -> int:
    """Do what the command line asks for."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = run(options.output, device, force=options.force)
    bad = [each for each in found.reports if not each.ok]
    for each in bad:
        console.say(f"not within tolerance: {each.asked.schedule} -n {each.asked.n} with {each.asked.model}")
    console.write(f"{len(found.reports)} replays in {found.seconds:g} s, {len(bad)} not within tolerance\n")
    return 1 if bad else 0

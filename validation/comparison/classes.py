"""How far off answers have been, by their class: the table of errors that cdpsim shows below its own answers.

    python -m validation.comparison.classes validation/results    # writes classes.toml there, of the reports there

A run's error in memory is that of its worst rank. Whole steps of transformers' models are predicted by their shapes,
and their memory by shapes and by profiles.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import tomli_w

from cdpsim import RequestError, presets, simulate
from cdpsim.cli.console import exit_code_of
from cdpsim.files import writing as files
from cdpsim.model.configurations import shape_fields
from cdpsim.studies.compare import measure

from ..profile.command import PRECISIONS
from ..profile.hugging_face import HuggingFaceStep, load_steps, predict_step
from ..report.schema import Battery, Calibration, load_report, read_peers, relative_error

CLUSTER = "h100-node"  # of which transformers' steps are predicted to reach a share
# What is predicted, and by what, in the words of the table: those of `cdpsim.request.accuracy`, which knows the names.
CLASSES = {
    "stage times": ("steps", "by stage times"),
    "flop": ("steps", f"by FLOP at {100 * (presets.cluster(CLUSTER).devices[0].achieved or 1):.0f} % of peak"),
    "kernels": ("steps", "by shapes and kernels"),
    "torch": ("memory", "of torch's runtimes"),
    "paper": ("memory", "of torch's runtimes by runtime paper"),
    "passes": ("memory", "by profiles"),
    "shape": ("memory", "by shapes"),
    "eager": ("memory", "by shapes with runtime transformers"),
    "other": ("memory", "of other runtimes"),
    "nccl": ("messages", "on NCCL"),
}
_HEAD = "# Made of the reports below, whose digests are SHA-256, by: python -m validation.comparison.classes DIR\n"
Found = Iterator[tuple[str, dict[str, Any], float]]  # the class of a prediction, the environment, the relative error


def table_of_errors(folder: Path) -> str:
    """Return the content of the table: the digests of all reports in a folder, and a row for each class and device."""
    digests, found = {}, defaultdict[tuple[str, str], list[tuple[str, float]]](list)
    for path in sorted(path for pattern in _READERS for path in folder.glob(pattern)):
        digests[path.name] = sha256(path.read_bytes()).hexdigest()
        for name, machine, error in next(read for like, read in _READERS.items() if path.match(like))(str(path)):
            gpu = str(machine["cuda"]["name"]) if "cuda" in machine else ""
            device = gpu.removeprefix("NVIDIA ").partition(" ")[0] or "CPU"
            found[name, device].append((gpu or machine["cpu"]["model"], error))
    if not digests:
        raise RequestError(str(folder), f"has no {' or '.join(_READERS)}; give a folder of reports")
    rows: list[dict[str, Any]] = []
    for name, (of, by) in CLASSES.items():
        measured = [{"on": device} | _figures(own) for (known, device), own in sorted(found.items()) if known == name]
        rows += [{"class": name, "of": of, "by": by} | figures for figures in measured or [{"runs": 0}]]
    return _HEAD + tomli_w.dumps({"reports": digests, "errors": rows})


def _figures(runs: list[tuple[str, float]]) -> dict[str, Any]:
    machines, errors = sorted({machine for machine, _ in runs}), [error for _, error in runs]
    figures = {"mean": fmean(map(abs, errors)), "lowest": min(errors), "largest": max(errors)}
    return {"machines": machines, "runs": len(runs)} | {name: float(f"{own:.4g}") for name, own in figures.items()}


def _of_battery(path: str) -> Found:
    """Yield the errors of times, of tasks that were timed just before, and what a calibration has not fitted."""
    battery = load_report(path)
    assert isinstance(battery, Battery)
    yield from (("stage times", own.environment, own.time.relative_error) for own in battery.reports if own.time)
    if battery.calibration is not None:
        yield from errors_of_calibration(msgspec.convert(battery.calibration, Calibration))


def errors_of_calibration(found: Calibration) -> Found:
    """Yield the error of a whole layer by its kernels, and of NCCL's collectives by the times of its messages."""
    if found.kernels is not None and found.kernels.layer_relative_error is not None:
        yield "kernels", found.environment, found.kernels.layer_relative_error
    for each in found.collectives if found.request["backend"] == "nccl" else ():
        yield from (("nccl", found.environment, error) for error in each.on_link[each.best].relative_errors)


def _of_peers(path: str) -> Found:
    """Yield the errors of torch's runtimes: of the worst rank by each runtime of ours, and of times."""
    report = read_peers(path)
    for peer in report.peers:
        for runtime in ("torch", "paper"):
            errors = (device.simulated[runtime].relative_error for device in peer.devices)
            yield runtime, report.environment, max(errors, key=abs)
        if peer.time is not None:
            yield "stage times", report.environment, peer.time.relative_error


def _of_hugging_face(path: str) -> Found:
    """Yield the errors of steps by their shapes, and of what they hold beyond all that is there before an update."""
    report = load_steps(path)
    for step in report.steps:
        held = {"passes": predict_step(step).peak_activations}
        for name, runtime in (("shape", "paper"), ("eager", "transformers:updates=fused")):
            row = measure(simulate("dp", 1, m=1, runtime=runtime, **_options_of_step(step)))
            held[name] = row.memory - row.parameters - row.optimizer - row.workspace
        yield "flop", report.environment, relative_error(float(row.step), step.seconds)
        yield from ((name, report.environment, relative_error(own, step.activations)) for name, own in held.items())


def _options_of_step(step: HuggingFaceStep) -> dict[str, Any]:
    """Return the options of a step by its shape; autocast is two-byte numbers with copies of weights in float32."""
    precision = "bf16" if step.autocast else PRECISIONS[step.dtype]
    model = {"name": step.name, "precision": precision, "layers": shape_fields(step.config, step.name)}
    sizes = {"micro_batch": step.batch, "length": step.length, "cluster": CLUSTER, "optimizer": "adamw"}
    return {"model": model, **sizes, "mixed_precision": step.autocast}


_READERS = {"battery*.json": _of_battery, "hugging-face*.json": _of_hugging_face, "peers*.json": _of_peers}


def write_table_of_errors(arguments: list[str]) -> int:
    """Write the table into the folder of its reports, and return the exit code."""
    if len(arguments) != 1:
        raise RequestError("DIR", "give one folder of reports")
    folder = Path(arguments[0])
    files.write_file(folder / "classes.toml", [table_of_errors(folder)], force=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(write_table_of_errors))

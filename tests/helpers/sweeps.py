"""Small sweeps, their results by a plain loop, and workers of sweeps that do harm."""

import csv
import os
import signal
from concurrent.futures import Future
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import cdpsim
from cdpsim.studies.sweep import questions
from cdpsim.studies.sweep.points import Sweep, sweep_of
from cdpsim.studies.sweep.running import begin_worker
from cdpsim.studies.sweep.store import load_study, save_study

SCHEDULES = ["gpipe", "1f1b", "zb-h1"]
STAGES = [2, 3, 4]
MICRO_BATCHES = [4, 8]
FILE = f"""
[axes]
schedule = {SCHEDULES}
n = {{ from = 2, to = 4, step = 1 }}
m = {MICRO_BATCHES}
"""
METRICS = (
    "rule",
    "devices",
    "step",
    "bubble",
    "exposed",
    "memory",
    "fits",
    "versions",
    "micro_batch_rate",
    "per_device",
)


def sweep(content: dict[str, Any], folder: Path | None = None) -> Sweep:
    """The sweep that is written as a dict."""
    return sweep_of(content, "sweep", folder)


def saved(folder: Path, content: dict[str, Any] | None = None) -> Sweep:
    """A sweep that is saved in a folder, ready to run."""
    axes = {"schedule": SCHEDULES, "n": STAGES, "m": MICRO_BATCHES}
    save_study(folder, sweep(content or {"axes": axes}), "sweep.toml", "# of a test")
    return load_study(folder)


def serial_rows() -> list[dict[str, str]]:
    """The rows of FILE's table by a loop over `evaluate`, each figure as CSV has it."""
    rows = []
    for schedule, n, m in product(SCHEDULES, STAGES, MICRO_BATCHES):
        metrics = cdpsim.evaluate(schedule, n, m=m)
        row = {"schedule": schedule, "n": str(n), "m": str(m)}
        rows.append(row | {name: _text(getattr(metrics, name)) for name in METRICS})
    return rows


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(table: str) -> list[dict[str, str]]:
    """The rows of a CSV table, with the columns that `serial_rows` has."""
    names = ("schedule", "n", "m", *METRICS)
    return [{name: row[name] for name in names} for row in csv.DictReader(StringIO(table))]


def begin_poisoned(n: int, schedule: str = "", m: int = 0, once: str = "") -> None:
    """Begin a worker that a point of n stages kills: of any schedule and m, or these; the first one makes `once`."""
    begin_worker()
    evaluate = cdpsim.evaluate

    def poisoned(name: str, stages: int, **options: Any) -> Any:
        if stages == n and schedule in ("", name) and m in (0, options["m"]) and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(name, stages, **options)

    vars(questions)["evaluate"] = lambda schedule, n, **options: poisoned(schedule, n, **options)


def begin_and_end() -> None:
    """Begin a worker that ends itself."""
    os._exit(3)


def begin_with_little_room() -> None:
    """Begin a worker whose files have room for a few rows."""
    import resource

    begin_worker()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


class InThisProcess:
    """An executor that has `submit` and nothing else."""

    def submit(self, function: Any, *arguments: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

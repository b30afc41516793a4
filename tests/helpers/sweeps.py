"""Small sweeps, their results by a plain loop, and workers of sweeps that do harm."""

import csv
from concurrent.futures import Future
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import cdpsim
from cdpsim.studies.sweep.axes import sweep_of
from cdpsim.studies.sweep.contents import sweep_plan_of
from cdpsim.studies.sweep.points import Points, SweepPlan
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


def plan(content: dict[str, Any], folder: Path | None = None) -> SweepPlan:
    """The plan of a sweep that is written as a dict."""
    return sweep_plan_of(sweep_of(content, "sweep"), folder or Path())


def points(content: dict[str, Any]) -> Points:
    """The points of a sweep that is written as a dict."""
    return Points(plan(content))


def saved(folder: Path, content: dict[str, Any] | None = None) -> Points:
    """The points of a sweep that is saved in a folder, ready to run."""
    axes = {"schedule": SCHEDULES, "n": STAGES, "m": MICRO_BATCHES}
    save_study(folder, plan(content or {"axes": axes}), "sweep.toml", "# of a test")
    return Points(load_study(folder))


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


# Instead of the program of a worker: with this before it, a point of four stages kills its process.
POISON = """
import os, signal
from cdpsim.studies.sweep import questions, worker
evaluate = questions.evaluate
def poisoned(schedule, n, **options):
    if n == {n} and {condition}:
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(schedule, n, **options)
questions.evaluate = poisoned
"""


def poisoned_program(program: str, n: int, condition: str = "True") -> str:
    """The program of a worker that a point of n stages kills, where a condition is true."""
    first, rest = program.split("; from cdpsim", 1)
    harm = POISON.format(n=n, condition=condition).replace("{", "{{").replace("}", "}}")
    return f"{first}\n{harm}\nfrom cdpsim{rest}"


class InThisProcess:
    """An executor that has `submit` and nothing else."""

    def submit(self, function: Any, *arguments: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

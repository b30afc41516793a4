"""The command that runs many requests: a sweep's file, its state, its table, and its failures once more."""

import argparse
import signal
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from cdpsim.cli.commands.options import FORCE, format_argument, format_of
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument, command
from cdpsim.errors import RequestError, choose, whole_number
from cdpsim.files.notes import explain, say
from cdpsim.files.tables import format_table
from cdpsim.files.units import counted
from cdpsim.files.writing import checked_path, read_text
from cdpsim.studies.sweep import running
from cdpsim.studies.sweep.points import Sweep, SweepPart, read_part, read_sweep_file, value_key
from cdpsim.studies.sweep.results import TABLE_FORMS, retry_failures, study_status, write_table
from cdpsim.studies.sweep.store import STUDY, Store, save_study

ACTIONS = ("status", "table", "retry")
_LOCAL, _SLURM = "local", "slurm"
_SHOWN_POINTS = 10
_OF_RUNS = ("workers", "on", "part", "limit", "dry_run", "slurm", "detach")  # options of no other action


@command(
    "sweep",
    argument("what", metavar="FILE|ACTION", choices=ACTIONS, help="a sweep's .toml file; or status, table or retry"),
    argument("directory", nargs="?", metavar="DIR", help="of an action: the folder of the sweep"),
    argument("-o", dest="output", metavar="DIR|FILE", help="the folder of the rows; of table a .csv, .jsonl, .parquet"),
    argument("--workers", metavar="N", help="processes here (default: one for each processor); of slurm jobs"),
    argument("--on", metavar="WHERE", choices=(_LOCAL, _SLURM), help="local (default), slurm, or dask://ADDRESS"),
    argument("--part", metavar="K/N", help="of N parts the K-th alone, from 1 on: for any scheduler"),
    argument("--limit", metavar="POINTS", help="so many points at most"),
    argument("--dry-run", action="store_true", help="print how many points there are, and the first; run nothing"),
    argument("--slurm", metavar="K=V,...", help="what jobs ask for: partition=short,time=60,cpus_per_task=8"),
    argument("--detach", action="store_true", help="leave when the jobs of slurm are submitted"),
    format_argument(("text", "json")),
    FORCE,
)
def sweep_command(args: argparse.Namespace) -> int:
    """Run every combination of options, resumable, anywhere."""
    form = format_of(args)
    if args.what not in ACTIONS:
        if "." not in args.what and "/" not in args.what:
            choose("action", args.what, ACTIONS)
        return _run_sweep(args, form)
    if args.directory is None:
        raise RequestError("DIR", f"is missing; name the folder of the sweep: cdpsim sweep {args.what} DIR")
    for option in _OF_RUNS:
        if getattr(args, option):
            raise RequestError(f"--{option.replace('_', '-')}", f"is of a run, and not of {args.what}; leave it out")
    if args.output is not None and args.what != "table":
        raise RequestError("-o", "is of a table; leave it out")
    if args.what == "status":
        return _print_status(Path(args.directory), form)
    return _write_results(args) if args.what == "table" else _retry(Path(args.directory))


def _run_sweep(args: argparse.Namespace, form: str) -> int:
    if args.directory is not None:
        raise RequestError(repr(args.directory), "is one argument too many; give the folder with -o")
    where, part, limit, workers = _settings(args)
    parameters = _slurm_parameters(args.slurm)
    path = Path(args.what)
    sweep = read_sweep_file(path)
    if args.dry_run:
        return _print_points(sweep, args.output, form)
    if args.output is None:
        raise RequestError("-o", "is missing; name the folder of the rows, which may be there")
    folder = checked_path(args.output)
    save_study(folder, sweep, f"sweep{path.suffix.lower()}", read_text(path, rewritten=True))
    if where == _SLURM:
        running.run_on_slurm(folder, workers or running.usual_workers(), parameters, detach=args.detach)
        if args.detach:
            return 0
    elif where.startswith(running.DASK):
        running.run_on_dask(folder, where, workers)
    else:
        if hasattr(signal, "SIGUSR2"):  # by which Slurm says that the time is nearly up; rows are kept anyway
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        running.run_part(folder, part, workers, limit)
    return _report_failures(folder, part)


def _settings(args: argparse.Namespace) -> tuple[str, SweepPart, int | None, int | None]:
    """Return where to run, which part, how many points at most and how many workers."""
    where = _LOCAL if args.on is None else args.on
    if not where.startswith(running.DASK):
        choose("on", where, (_LOCAL, _SLURM, f"{running.DASK}ADDRESS"))
    for option, is_given, of in (
        ("slurm", args.slurm is not None, _SLURM),
        ("detach", args.detach, _SLURM),
        ("part", args.part is not None, _LOCAL),
        ("limit", args.limit is not None, _LOCAL),
    ):
        if is_given and where != of:
            raise RequestError(f"--{option}", f"goes with --on {of}, and this is --on {where}; leave it out")
    limit, workers = (
        None if given is None else whole_number(name, given, at_least=1)
        for name, given in (("limit", args.limit), ("workers", args.workers))
    )
    return where, (1, 1) if args.part is None else read_part(args.part), limit, workers


def _slurm_parameters(text: str | None) -> dict[str, Any]:
    """Return what --slurm asks for: a number where it is one."""
    parameters: dict[str, Any] = {}
    for word in [] if text is None else text.split(","):
        name, equals, value = word.strip().partition("=")
        if not (name and equals and value):
            raise RequestError("--slurm", f"{word[:40]!r} is no NAME=VALUE; write partition=short,time=60")
        parameters[name.replace("-", "_")] = int(value) if value.isdecimal() else value
    return parameters


def _print_points(sweep: Sweep, output: str | None, form: str) -> int:
    """Print the number of points, how many are done, and the first ones."""
    done = 0
    if output is not None and Path(output, STUDY).exists():
        store = Store(Path(output), sweep.what)
        done = sum(sweep.name(index) in store for index in sweep.in_file_order())
    names = [axis.name for axis in sweep.axes]
    rows = [sweep.values(index) for index in islice(sweep.in_file_order(), _SHOWN_POINTS)]
    record = {"points": sweep.count, "done": done, "first": [dict(zip(names, row, strict=True)) for row in rows]}
    cells = [[value_key(value) if isinstance(value, list | dict) else value for value in row] for row in rows]
    write_stdout(format_table(form, record, names, cells))
    say(f"{counted(sweep.count, 'point')}, {done:,} of them done" + (", the first above" if form == "text" else ""))
    return 0


def _report_failures(folder: Path, part: SweepPart) -> int:
    """Say how many points failed, and the first three; return the exit code."""
    status = study_status(folder, part)
    here = f" in part {part[0]}/{part[1]}" if part[1] > 1 else ""
    say(f"{status.done:,} done, {status.refused:,} refused, {status.failed:,} failed, {status.to_do:,} to do{here}")
    if not status.failed:
        return 0
    for words in status.first:
        explain(words)
    explain(f"{counted(status.failed, 'point')} failed; `cdpsim sweep retry {folder}` lets the next run try them again")
    return 1


def _print_status(folder: Path, form: str) -> int:
    status = study_status(folder)
    left = status.to_do / status.rate if status.rate else None
    reasons = [[f"failed: {reason}", count] for reason, count in status.reasons.items()]
    rate = (
        [["points/s", f"{status.rate:.3g}"], ["time left", str(timedelta(seconds=round(left)))]]
        if left is not None
        else []
    )
    counts = {name: getattr(status, name) for name in ("points", "done", "refused", "failed", "to_do")}
    record = counts | {"reasons": status.reasons, "rate": status.rate, "seconds_left": left, "damaged": status.damaged}
    rows = [[name.replace("_", " "), count] for name, count in counts.items()]
    write_stdout(format_table(form, record, ["what", "number"], [*rows, *reasons, *rate]))
    running.report_damage(status.damaged)
    return 1 if status.failed else 0


def _write_results(args: argparse.Namespace) -> int:
    if args.output is None:
        raise RequestError("-o", f"is missing; name the table: {', '.join(TABLE_FORMS)}")
    rows, points = write_table(Path(args.directory), args.output, force=args.force)
    if rows < points:
        say(f"{rows:,} of {counted(points, 'point')}; the others are to do")
    return 0


def _retry(folder: Path) -> int:
    count = retry_failures(folder)
    say(f"{counted(count, 'failure')} forgotten; the next run tries these points again")
    return 0

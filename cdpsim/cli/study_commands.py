"""Commands that run many requests: compare, plan, sweep and breakeven."""

import argparse
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from cdpsim.cli.arguments import (
    FORCE,
    FORMAT,
    FORMAT_OF_PAPERS,
    RUN_OPTIONS,
    check_output,
    format_argument,
    format_of,
    given_options,
    listed_option,
    look_arguments,
    look_of,
    number_of_runs,
    option_arguments,
    options_of,
    output_arguments,
    report_recomputation,
    report_untaken,
    request_arguments,
    run_of,
    runs_argument,
)
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument, argument_group, command
from cdpsim.errors import RequestError, choose, in_known_case, whole_number
from cdpsim.export import pictures
from cdpsim.files.notes import explain, say
from cdpsim.files.tables import Column, PrintedTable, format_table, value_words
from cdpsim.files.units import counted
from cdpsim.files.writing import checked_path, read_text
from cdpsim.limits import bytes_allowed
from cdpsim.presets import find_cluster, find_model
from cdpsim.request import Request
from cdpsim.request.accuracy import error_notes, error_tables, times_errors
from cdpsim.request.options import OPTIONS
from cdpsim.request.reading import schedule_of
from cdpsim.request.sharing import taken_options
from cdpsim.schedules import NAMES, SCHEDULES, TABLE_1
from cdpsim.studies.breakeven import (
    MOST_SHARE,
    StepCurve,
    bandwidth_factors,
    find_break_even,
    runner_on_clusters,
    step_times_at,
)
from cdpsim.studies.comparison import SPLIT_NOTE, column_names, compare, known_columns
from cdpsim.studies.equal_shapes import in_slots
from cdpsim.studies.plan import plan
from cdpsim.studies.plan.plan_table import lacking_text, plan_table
from cdpsim.studies.plan.wanted import OBJECTIVES, RUN_ALONE
from cdpsim.studies.sweep import running
from cdpsim.studies.sweep.points import Sweep, SweepPart, read_part, read_sweep_file, value_key
from cdpsim.studies.sweep.results import TABLE_FORMS, retry_failures, study_status, write_table
from cdpsim.studies.sweep.store import STUDY, Store, save_study

_ORDERS = ("throughput", "given")  # of rows, beside those by a column
_COLUMNS = known_columns(quantiles=True)


@command(
    "compare",
    argument(
        "schedules",
        nargs="*",
        metavar="NAME|FILE",
        choices=NAMES,
        help="schedules (default: all), experiment files, or torch's orders (.csv)",
    ),
    argument("--devices", metavar="D", help="devices of each schedule (with --batch by default the cluster's)"),
    argument("--batch", metavar="B", help="samples in a training step of each schedule; m follows"),
    argument("-n", metavar="N", help="stages (default: those of the model, or --devices times --chunks)"),
    argument(
        "--sort",
        default="throughput",
        metavar="COLUMN",
        choices=(*_ORDERS, *_COLUMNS),
        help="best first: throughput of a device (default), a column, or given (as named)",
    ),
    argument("--within", metavar="SIZE", help="the most that a device may hold: '80 GB', in slots 6"),
    argument(
        "--columns",
        metavar="NAME,...",
        choices=("all", *_COLUMNS),
        help="columns of the table, or all (default: those that fit a line)",
    ),
    *output_arguments("draw them, too: .svg, .png, .pdf or .pgf", required=False),
    argument(
        "--style",
        default="bars",
        metavar="STYLE",
        choices=pictures.COMPARISONS,
        help="bars (default), or points: bubble over memory",
    ),
    look_arguments,
    option_arguments(RUN_OPTIONS, steps="3, or 3 N where a step has one micro-batch"),
    runs_argument("add quantiles of the step"),
    request_arguments(must_fit=False),
    FORMAT_OF_PAPERS,
)
def compare_command(args: argparse.Namespace) -> int:
    """Compare schedules side by side: time, bubble, memory."""
    form = format_of(args)
    runs = number_of_runs(args)
    columns = known_columns(quantiles=runs is not None)
    sort = choose("sort", args.sort, (*_ORDERS, *columns)).replace("-", "_")
    if args.columns not in (None, "all"):
        column_names(args.columns, columns)
    choose("style", args.style, pictures.COMPARISONS)
    options = {name: listed_option(name, value) for name, value in given_options(args).items()}
    settings = {"devices": args.devices, "batch": args.batch, "runs": runs, "sort": sort, **options}
    items = [options_of(args, name) for name in args.schedules]
    most = None if args.within is None else _memory_limit(args, options)
    look = look_of(args)
    check = partial(pictures.check_picture, args.output, look=look, force=args.force)
    check_output(args.output, check, [partial(compare, items, **settings)])
    comparison = compare(items, **settings)
    for line in [SPLIT_NOTE] * (comparison.split and form in ("json", "csv")) + comparison.remarks:
        say(line)
    report_recomputation([item | options for item in items] or [options])
    rows = [row for row in comparison.measured if most is None or row.memory <= most]
    if not rows:
        explain(f"no schedule holds at most {args.within} on a device")
        return 1
    comparison = replace(comparison, measured=rows)
    if args.output is not None:
        pictures.write_picture(args.style, comparison, path=args.output, look=look, force=args.force)
    write_stdout(comparison.printed(form, args.columns))
    return 0


def _memory_limit(args: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Return what --within says: stage-activations in the slot model, else bytes."""
    if all(in_slots(options_of(args, name)) for name in args.schedules) and in_slots(options):
        return whole_number("within", args.within, at_least=0)
    return bytes_allowed(args.within, "within")


_OWN_OPTIONS = (
    *("devices", "batch", "memory", "schedules", "staleness"),
    *("top", "objective", "seconds", "max_memory", "fewer"),
)


@command(
    "plan",
    argument("--devices", metavar="D", help="devices of a run (default: all of the cluster)"),
    argument("--batch", metavar="B", help="samples of a training step; of a model without, micro-batches"),
    argument("--memory", metavar="SIZE", help="what a device may hold: '80 GB', in slots 6 (default: what it has)"),
    argument("--schedules", metavar="NAME,...", choices=NAMES, help="only these (default: all)"),
    argument("--staleness", metavar="S", help="the largest staleness, in steps; 0: synchronous training"),
    argument("--seconds", metavar="S", help="the longest search; then say how good other candidates could be"),
    argument("--max-memory", metavar="SIZE", help="the largest memory of this machine for the search: '8 GB'"),
    *output_arguments("draw it: .svg, .png, .pdf, .pgf; or all candidates, .csv or .json", required=False),
    argument_group(
        "how it searches",
        argument("--fewer", action="store_true", help="runs may have any number of devices that divides --devices"),
        argument(
            "--objective",
            metavar="WHAT",
            choices=OBJECTIVES,
            default="samples",
            help="the best first: samples (default), memory, devices or staleness",
        ),
        argument("--top", metavar="K", default="10", help="rows (default 10)"),
        argument("-n", metavar="N,...", help="only these numbers of stages; in slots one (default: --devices)"),
    ),
    look_arguments,
    option_arguments(("engine", "collective")),
    request_arguments(
        must_fit=False,
        without=RUN_ALONE,
        m="batch / (data ranks x samples of a micro-batch)",
        tensor="all divisors of a node that fit",
        expert="all that fit",
    ),
    FORMAT,
)
def plan_command(args: argparse.Namespace) -> int:
    """Find the best schedule for a model on a cluster."""
    form, look = format_of(args), look_of(args)
    given = given_options(args)
    given.pop("ignore_memory", None)
    for name, value in given.items():  # of a switch both ways are tried
        given[name] = [False, True] if name in OPTIONS and OPTIONS[name].is_switch else listed_option(name, value)
    settings = {name: getattr(args, name) for name in _OWN_OPTIONS} | given
    if args.output is not None:
        check = partial(pictures.check_plan, args.output, look=look, force=args.force)
        check_output(args.output, check, [partial(plan, **settings)])
    found = plan(**settings)
    report_recomputation([settings])
    if args.output is not None and found.interrupted:
        say(f"{args.output}: is not written, as the search was interrupted")
    elif args.output is not None and not (found.fitting or args.output.lower().endswith(pictures.PLAN_TABLES)):
        say(f"{args.output}: is not drawn, as no candidate that fits has been simulated")
    elif args.output is not None:
        pictures.write_plan(found, args.output, look=look, force=args.force)
    write_stdout(plan_table(found, form))
    if found.interrupted:
        explain("interrupted")
        return 130
    if not found.rows:
        explain(lacking_text(found))
        return 1
    return 0


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
    argument("--part", metavar="K/N", help="run part K of N, from 1 on: for any scheduler"),
    argument("--limit", metavar="POINTS", help="the largest number of points to run"),
    argument("--dry-run", action="store_true", help="print how many points there are, and the first; run nothing"),
    argument("--slurm", metavar="K=V,...", help="the resources of a job: partition=short,time=60,cpus_per_task=8"),
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
    folder = Path(args.directory)
    if args.what == "status":
        return _print_status(folder, form)
    if args.what == "retry":
        say(f"{counted(retry_failures(folder), 'failure')} forgotten; the next run tries these points again")
        return 0
    if args.output is None:
        raise RequestError("-o", f"is missing; name the table: {', '.join(TABLE_FORMS)}")
    rows, points = write_table(folder, args.output, force=args.force)
    if rows < points:
        say(f"{rows:,} of {counted(points, 'point')}; the others are to do")
    return 0


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
    client = running.dask_client(where) if where.startswith(running.DASK) else None
    if where == _SLURM:
        running.check_slurm()
    save_study(folder, sweep, f"sweep{path.suffix.lower()}", read_text(path, rewritten=True))
    if where == _SLURM:
        running.run_on_slurm(folder, workers or running.usual_workers(), parameters, detach=args.detach)
        if args.detach:
            return 0
    elif client is not None:
        running.run_on_dask(folder, client, workers)
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
    for option, of in {"slurm": _SLURM, "detach": _SLURM, "part": _LOCAL, "limit": _LOCAL}.items():
        if getattr(args, option) not in (None, False) and where != of:
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
    rate = [["points/s", f"{status.rate:.3g}"], ["time left", str(timedelta(seconds=round(left)))]] if left else []
    counts = {name: getattr(status, name) for name in ("points", "done", "refused", "failed", "to_do")}
    record = counts | {"reasons": status.reasons, "rate": status.rate, "seconds_left": left, "damaged": status.damaged}
    rows = [[name.replace("_", " "), count] for name, count in counts.items()]
    write_stdout(format_table(form, record, ["what", "number"], [*rows, *reasons, *rate]))
    running.report_damage(status.damaged)
    return 1 if status.failed else 0


_OVER = ("n", "bandwidth")
_PREFETCH = "1"  # a parameter that arrives just in time is never hidden
_UNITS = {
    "free": "s",
    "step": "s",
    "bandwidth": "B/s",
    "break_even": "B/s",
    "exposed": "%",
    "latency": "%",
    "factor": "x",
}


@command(
    "breakeven",
    argument("schedules", nargs="*", metavar="NAME", choices=NAMES, help="schedules (default: all that send anything)"),
    argument("-n", nargs="+", metavar="N", help="stages, one number or several (default: the model's)"),
    argument(
        "--share",
        default="0.01",
        metavar="S",
        help="the share by which a step may be longer than without messages (default 0.01)",
    ),
    argument(
        "--over",
        default="n",
        metavar="WHAT",
        choices=_OVER,
        help="rows of the table: n (default), or bandwidth, points of the curve",
    ),
    *output_arguments("draw the curves: .svg, .png, .pdf or .pgf", required=False),
    look_arguments,
    option_arguments(RUN_OPTIONS),
    request_arguments(must_fit=False, prefetch=_PREFETCH),
    FORMAT,
)
def breakeven_command(args: argparse.Namespace) -> int:
    """Find the bandwidth from which on messages are hidden."""
    form = format_of(args)
    over_bandwidth = choose("over", args.over, _OVER) == "bandwidth"
    for name in args.schedules:
        choose("schedule", in_known_case(name, NAMES), NAMES)
    options = given_options(args)
    if options.get("cluster", "unit") == "unit":
        raise RequestError("--cluster", "is missing; its bandwidths are what is varied (`cdpsim clusters` lists some)")
    cluster = find_cluster(options["cluster"])
    share = _read_share(args.share)
    every = _options_of_requests(args, options)
    taken = [taken_options(schedule_of(own), own) for own in every]
    look = look_of(args)
    check = partial(pictures.check_picture, args.output, look=look, force=args.force)
    check_output(args.output, check, [partial(run_of, own) for own in taken])
    requests = [Request.from_builtins(own) for own in taken]
    runs = [runner_on_clusters(request) for request in requests]
    found = [find_break_even(run, cluster, share) for run in runs]
    results = [replace(result, schedule=own["schedule"]) for result, own in zip(found, every, strict=True)]
    report_untaken(own if "prefetch" in options else own | {"prefetch": None} for own in every)
    factors, last = bandwidth_factors(results), results[-1].n
    curves: list[StepCurve] = [
        (result, step_times_at(run, cluster, factors))
        for result, run in zip(results, runs, strict=True)
        if over_bandwidth or (args.output is not None and result.n == last)
    ]
    if args.output is not None:
        drawn = [(result, steps) for result, steps in curves if result.n == last]
        pictures.write_picture(
            "breakeven", results, factors, drawn, path=args.output, look=look, force=args.force, share=share
        )
    rows = _points(curves, factors) if over_bandwidth else [result.to_builtins() for result in results]
    columns = [Column(name.replace("_", "-"), itemgetter(name), words=partial(_result_words, name)) for name in rows[0]]
    errors = [times_errors(request, result.devices) for request, result in zip(requests, results, strict=True)]
    record = [row | {"errors": error_tables(own)} for row, own in zip(rows, errors, strict=False)]
    notes = error_notes(dict.fromkeys(chain.from_iterable(errors)))
    write_stdout(PrintedTable(columns, rows, rows if over_bandwidth else record, notes=notes).printed(form))
    return 0


def _result_words(name: str, row: Mapping[str, Any]) -> str | None:
    value = row[name]
    if name in ("break_even", "factor") and not value:
        return "never" if value is None else "any"
    return value_words(value, _UNITS.get(name, ""))


def _read_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0
    if not 1e-6 <= share <= MOST_SHARE:
        problem = f"{text[:40]!r} is not a number between 0.000001 and {MOST_SHARE}; give for example 0.01"
        raise RequestError("--share", problem)
    return share


def _options_of_requests(args: argparse.Namespace, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each schedule's request with each number of stages; a model's file is read once."""
    names = args.schedules or [name for name in TABLE_1 if not SCHEDULES[name].placement.lanes]
    common = {"prefetch": _PREFETCH} | {option: value for option, value in options.items() if option != "n"}
    if not in_slots(options):
        common["model"] = find_model(options["model"])
    numbers = sorted(whole_number("n", n, at_least=1) for n in args.n or ())
    if len(set(numbers)) < len(numbers):
        raise RequestError("n", "has one number twice; give each once")
    stages = [{"n": n} for n in numbers] or [{}]
    return [common | {"schedule": name} | n for n in stages for name in names]


def _points(curves: Sequence[StepCurve], factors: Sequence[float]) -> list[dict[str, Any]]:
    """Return a row for each point of each curve."""
    return [
        {
            **{name: getattr(result, name) for name in ("schedule", "rule", "n", "m", "devices")},
            "factor": factor,
            "bandwidth": None if result.bandwidth is None else factor * result.bandwidth,
            "step": step,
            "exposed": max(0.0, 1 - result.free / step),
        }
        for result, steps in curves
        for factor, step in zip(factors, steps, strict=True)
    ]

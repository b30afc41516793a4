"""The command that finds from which bandwidth on schedules hide their messages."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from cdpsim.cli.commands.options import (
    FORMAT,
    RUN_OPTIONS,
    format_of,
    look_arguments,
    look_of,
    option_arguments,
    output_arguments,
    request_arguments,
)
from cdpsim.cli.commands.requests import check_output, given_options, report_untaken, run_of
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument, command
from cdpsim.errors import RequestError, choose, in_known_case, whole_number
from cdpsim.export import pictures
from cdpsim.files.tables import Column, PrintedTable, value_words
from cdpsim.presets import find_cluster, find_model
from cdpsim.request import Request
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
from cdpsim.studies.equal_shapes import in_slots

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
    runs = [runner_on_clusters(Request.from_builtins(own)) for own in taken]
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
        pictures.write_breakeven(results, factors, drawn, args.output, share=share, look=look, force=args.force)
    rows = _points(curves, factors) if over_bandwidth else [result.to_builtins() for result in results]
    columns = [Column(name.replace("_", "-"), itemgetter(name), words=partial(_result_words, name)) for name in rows[0]]
    write_stdout(PrintedTable(columns, rows, rows).printed(form))
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

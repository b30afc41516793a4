"""The command that compares schedules side by side."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cdpsim.cli.commands.options import (
    FORMAT_OF_PAPERS,
    RUN_OPTIONS,
    format_of,
    look_arguments,
    look_of,
    number_of_runs,
    option_arguments,
    output_arguments,
    request_arguments,
    runs_argument,
)
from cdpsim.cli.commands.requests import (
    check_output,
    given_options,
    listed_option,
    options_of,
    report_recomputation,
)
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument, command
from cdpsim.errors import RequestError, choose, whole_number
from cdpsim.export import pictures
from cdpsim.files.notes import explain, say
from cdpsim.files.units import size_bytes
from cdpsim.schedules import NAMES
from cdpsim.studies.comparison import compare
from cdpsim.studies.comparison_columns import (
    SPLIT_NOTE,
    column_names,
    known_columns,
)
from cdpsim.studies.equal_shapes import in_slots

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
    argument(
        "--devices",
        metavar="D",
        help="devices of each schedule; n and replicas follow (default with --batch: the cluster's)",
    ),
    argument("--batch", metavar="B", help="samples in a training step of each schedule; m follows"),
    argument("-n", metavar="N", help="stages (default: those of the model, or --devices times --chunks)"),
    argument(
        "--sort",
        default="throughput",
        metavar="COLUMN",
        choices=(*_ORDERS, *_COLUMNS),
        help="the best first: throughput (of a device, default) or a column; or given, as named",
    ),
    argument("--within", metavar="SIZE", help="leave out schedules that need more on a device: '80 GB', in slots 6"),
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
        pictures.write_comparison(comparison, args.output, style=args.style, look=look, force=args.force)
    write_stdout(comparison.printed(form, args.columns))
    return 0


def _memory_limit(args: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Return what --within says: stage-activations in the slot model, else bytes."""
    if all(in_slots(options_of(args, name)) for name in args.schedules) and in_slots(options):
        return whole_number("within", args.within, at_least=0)
    try:
        return size_bytes(args.within)
    except RequestError as error:
        raise RequestError("within", str(error)) from None

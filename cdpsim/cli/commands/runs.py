"""Commands that write the traces of a run."""

import argparse
from collections.abc import Iterable
from functools import partial

from cdpsim.cli.commands.compare import MEASURED_COLUMNS, measured_cell
from cdpsim.cli.commands.options import (
    FORMAT,
    RUN_OPTIONS,
    STAGES,
    format_of,
    number_of_runs,
    option_arguments,
    output_arguments,
    request_arguments,
    runs_argument,
)
from cdpsim.cli.commands.requests import check_output, options_of, run_of
from cdpsim.cli.console import say, write_stdout
from cdpsim.cli.parser import argument, command
from cdpsim.files.tables import format_table, with_notes
from cdpsim.files.writing import check_writable
from cdpsim.invariants import INVARIANTS, violations
from cdpsim.request.description import describe_untied
from cdpsim.schedules import schedule_from_csv
from cdpsim.studies.compare import measure, table_notes
from cdpsim.studies.montecarlo import sample_runs
from cdpsim.trace import FILES, RUNS


@command(
    "simulate",
    argument(
        "schedule",
        nargs="?",
        metavar="NAME|FILE",
        help="a schedule (`cdpsim schedules` lists them), or an experiment file, .toml or .json",
    ),
    STAGES,
    *output_arguments("the folder to write into", "DIR"),
    option_arguments(RUN_OPTIONS),
    runs_argument("write runs.csv, too: run, makespan, period; quantiles into summary.json"),
    argument(
        "--check", action="store_true", help="check every invariant of the run before writing; exit 1 if one fails"
    ),
    argument(
        "--from",
        metavar="FILE",
        dest="base",
        help="ask for what a summary.json records, or an experiment file says; options that are given win",
    ),
    request_arguments(),
)
def simulate_command(args: argparse.Namespace) -> int:
    """Run one schedule and write its traces."""
    options = options_of(args, args.schedule)
    runs = number_of_runs(args, options.get("run"))
    names = (*FILES, *[RUNS] * (runs is not None))
    check_output(args.output, partial(check_writable, args.output, names, args.force), [partial(run_of, options)])
    run = run_of(options)
    if args.check:
        problems = violations(run)
        for name, problem in problems.items():
            say(f"{name.replace('_', ' ')}: {problem}")
        if problems:
            return 1
        say(f"{len(INVARIANTS)} invariants hold")
    for stages in run.program.untied:
        say(describe_untied(stages, [run.request.schedule.name]))
    more: dict[str, Iterable[str]] = {}
    if runs is not None:
        several = sample_runs(run, runs)
        run.summary()["runs"] = several.summary()
        more[RUNS] = several.lines()
    run.save(args.output, force=args.force, more=more)
    return 0


@command(
    "import-schedule",
    argument("schedule", metavar="FILE.csv", help="a row for each device, a cell for each action"),
    argument("-n", metavar="N", help="its stages (default: as many as it has)"),
    *output_arguments("a folder for its traces, as `cdpsim simulate` has them", "DIR", required=False),
    option_arguments(RUN_OPTIONS),
    request_arguments(),
    FORMAT,
)
def import_command(args: argparse.Namespace) -> int:
    """Run an order from a CSV file of torch.distributed.pipelining."""
    form = format_of(args)
    options = options_of(args, schedule_from_csv(args.schedule))
    check = partial(check_writable, args.output, FILES, args.force)
    check_output(args.output, check, [partial(run_of, options)])
    run = run_of(options)
    measured = measure(run)
    if args.output is not None:
        run.save(args.output, force=args.force)
    cells = [(column.heading, measured_cell(measured, column, form, slots=run.in_slots)) for column in MEASURED_COLUMNS]
    rows = [row for row in cells if row[1] is not None]
    table = format_table(form, measured.to_builtins(), (args.schedule, ""), rows)
    write_stdout(with_notes(table, form, table_notes([measured])))
    return 0

"""Commands that write the traces of a run."""

import argparse
import textwrap
from collections.abc import Iterable
from functools import partial
from operator import itemgetter

from cdpsim.cli.arguments import (
    FORMAT,
    RUN_OPTIONS,
    SCHEDULE,
    STAGES,
    check_output,
    format_argument,
    format_of,
    number_of_runs,
    option_arguments,
    options_of,
    output_arguments,
    report_recomputation,
    request_arguments,
    run_of,
    runs_argument,
)
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument, command
from cdpsim.errors import RequestError
from cdpsim.files.notes import explain, say
from cdpsim.files.tables import Column, PrintedTable
from cdpsim.files.writing import check_writable
from cdpsim.invariants import INVARIANTS, violations
from cdpsim.request import describe_untied
from cdpsim.request.accuracy import error_notes, error_words
from cdpsim.schedules import schedule_from_csv
from cdpsim.studies.compare import measure, overview, table_notes
from cdpsim.studies.comparison import known_columns
from cdpsim.studies.montecarlo import sample_runs
from cdpsim.trace import FILES, RUNS, summary_text


@command(
    "simulate",
    SCHEDULE(nargs="?", help="a schedule (`cdpsim schedules` lists them), or an experiment file"),
    STAGES,
    *output_arguments("the folder for traces (default: print a summary)", "DIR", required=False),
    option_arguments(RUN_OPTIONS),
    runs_argument("add quantiles to the summary; with -o write runs.csv, too"),
    argument(
        "--check", action="store_true", help="check every invariant of the run before writing; exit 1 if one fails"
    ),
    argument(
        "--from",
        metavar="FILE",
        dest="base",
        help="take the request of a summary.json or an experiment file; options given here win",
    ),
    request_arguments(),
    format_argument(("text", "json")),
)
def simulate_command(args: argparse.Namespace) -> int:
    """Run one schedule: its summary, or with -o its traces."""
    form = format_of(args)
    options = options_of(args, args.schedule)
    runs = number_of_runs(args, options.get("run"))
    if args.output is not None and form != "text":
        raise RequestError("format", "is of the summary that is printed without -o; leave either out")
    names = (*FILES, *[RUNS] * (runs is not None))
    check_output(args.output, partial(check_writable, args.output, names, args.force), [partial(run_of, options)])
    run = run_of(options)
    report_recomputation([options])
    if args.check:
        problems = violations(run)
        for name, problem in problems.items():
            explain(f"{name.replace('_', ' ')}: {problem}")
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
    if args.output is not None:
        run.save(args.output, force=args.force, more=more)
    elif form == "json":
        write_stdout(summary_text(run.summary()))
    else:
        short = {name: textwrap.shorten(text, 87, placeholder=" …") for name, text in overview(run, runs).items()}
        lines = [line for each in run.errors for line in error_words([each])]
        errors = zip(("mean error", *[""] * len(lines)), lines, strict=False)
        write_stdout("".join(f"{name:11}  {text}\n" for name, text in [*short.items(), *errors]))
    return 0


@command(
    "import-schedule",
    argument("schedule", metavar="FILE.csv", help="a row for each device, a cell for each action"),
    argument("-n", metavar="N", help="its stages (default: those that it names)"),
    *output_arguments("a folder for its traces, as `cdpsim simulate` has them", "DIR", required=False),
    option_arguments(RUN_OPTIONS),
    request_arguments(),
    FORMAT,
)
def import_command(args: argparse.Namespace) -> int:
    """Run an order from a CSV file of torch's pipelining."""
    form = format_of(args)
    options = options_of(args, schedule_from_csv(args.schedule))
    check = partial(check_writable, args.output, FILES, args.force)
    check_output(args.output, check, [partial(run_of, options)])
    run = run_of(options)
    measured = measure(run)
    if args.output is not None:
        run.save(args.output, force=args.force)
    metrics = known_columns(quantiles=False, slots=run.in_slots).values()
    rows = [(each.name, each.value_of(measured), each.words_of(measured)) for each in metrics]
    columns = Column(args.schedule, itemgetter(0)), Column("value", itemgetter(1), words=itemgetter(2))
    known = [row for row in rows if row[1] is not None]
    notes = [*table_notes([measured]), *error_notes(measured.errors)]
    table = PrintedTable(columns, known, measured.to_builtins(), notes=notes)
    write_stdout(table.printed(form))
    return 0

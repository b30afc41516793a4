"""Commands that write the traces of a run."""

import argparse
from collections.abc import Iterable
from functools import partial

from cdpsim.cli.commands.compare import MEASURED_COLUMNS, cell
from cdpsim.cli.commands.options import (
    FORMAT,
    RUN_WORDS,
    STAGES,
    format_of,
    number_of_runs,
    output,
    request_options,
    runs_option,
    word_options,
)
from cdpsim.cli.commands.requests import check_output, run_of, words_of
from cdpsim.cli.console import say, write_stdout
from cdpsim.cli.parser import argument, command
from cdpsim.files.tables import format_table, noted
from cdpsim.files.writing import check_writable
from cdpsim.invariants import INVARIANTS, violations
from cdpsim.request.description import describe_untied
from cdpsim.schedules import imported
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
    *output("the folder to write into", "DIR"),
    word_options(RUN_WORDS),
    runs_option("write runs.csv, too: run, makespan, period; quantiles into summary.json"),
    argument(
        "--check", action="store_true", help="check every invariant of the run before writing; exit 1 if one fails"
    ),
    argument(
        "--from",
        metavar="FILE",
        dest="base",
        help="ask for what a summary.json records, or an experiment file says; options that are given win",
    ),
    request_options(),
)
def simulate_command(options: argparse.Namespace) -> int:
    """Run one schedule and write its traces."""
    words = words_of(options, options.schedule)
    runs = number_of_runs(options, words.get("run"))
    names = (*FILES, *[RUNS] * (runs is not None))
    check_output(
        options.output, partial(check_writable, options.output, names, options.force), [partial(run_of, words)]
    )
    run = run_of(words)
    if options.check:
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
    run.save(options.output, force=options.force, more=more)
    return 0


@command(
    "import-schedule",
    argument("schedule", metavar="FILE.csv", help="a row for each device, a cell for each action"),
    argument("-n", metavar="N", help="its stages (default: as many as it has)"),
    *output("a folder for its traces, as `cdpsim simulate` has them", "DIR", required=False),
    word_options(RUN_WORDS),
    request_options(),
    FORMAT,
)
def import_command(options: argparse.Namespace) -> int:
    """Run an order from a CSV file of torch.distributed.pipelining."""
    form = format_of(options)
    words = words_of(options, imported(options.schedule))
    check = partial(check_writable, options.output, FILES, options.force)
    check_output(options.output, check, [partial(run_of, words)])
    run = run_of(words)
    measured = measure(run)
    if options.output is not None:
        run.save(options.output, force=options.force)
    cells = [(column.heading, cell(measured, column, form, slots=run.in_slots)) for column in MEASURED_COLUMNS]
    rows = [row for row in cells if row[1] is not None]
    table = format_table(form, measured.to_builtins(), (options.schedule, ""), rows)
    write_stdout(noted(table, form, table_notes([measured])))
    return 0

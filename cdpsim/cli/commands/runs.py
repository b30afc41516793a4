"""What is written: the traces of a run."""

import argparse
from collections.abc import Iterable
from functools import partial
from typing import Any

from cdpsim.cli import help
from cdpsim.cli.commands.compare import COLUMNS, cell_of
from cdpsim.cli.commands.options import (
    add_format,
    add_request,
    add_run,
    add_runs,
    refuse_output,
    runs_of,
    simulated,
    words_of,
)
from cdpsim.cli.console import add_command, say, write


def add_simulate(commands: Any) -> None:
    """Add the command that runs one schedule."""
    about = "run one schedule and write its traces"
    parser = add_command(commands, "simulate", _serve_simulate, about, help.SIMULATE)
    parser.add_argument(
        "schedule",
        nargs="?",
        metavar="NAME|FILE",
        help="a schedule (`cdpsim schedules` lists them), or an experiment file, .toml or .json",
    )
    parser.add_argument("-n", metavar="N", help="stages (default: as many as the model has)")
    parser.add_argument("-o", required=True, metavar="DIR", dest="output", help="the folder to write into")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    add_run(parser)
    add_runs(parser, "write runs.csv, too: run, makespan, period; quantiles into summary.json")
    parser.add_argument(
        "--check", action="store_true", help="check every invariant of the run before writing; exit 1 if one fails"
    )
    add_request(parser, experiments=True)


def _serve_simulate(options: argparse.Namespace) -> int:
    from cdpsim.files import writing as files
    from cdpsim.invariants import INVARIANTS, violations
    from cdpsim.request.description import describe_untied
    from cdpsim.trace import FILES, RUNS

    words = words_of(options, options.schedule)
    runs = runs_of(options, words)
    names = (*FILES, *[RUNS] * (runs is not None))
    run = partial(simulated, words)
    refuse_output(options.output, partial(files.check_writable, options.output, names, options.force), [run])
    done = run()
    if options.check:
        found = violations(done)
        for name, problem in found.items():
            say(f"{name.replace('_', ' ')}: {problem}")
        if found:
            return 1
        say(f"{len(INVARIANTS)} invariants hold")
    for stages in done.program.untied:
        say(describe_untied(stages, [done.request.schedule.name]))
    more: dict[str, Iterable[str]] = {}
    if runs is not None:
        from cdpsim.studies.montecarlo import sample_runs

        several = sample_runs(done, runs)
        done.summary()["runs"] = several.summary()
        more[RUNS] = several.lines()
    done.save(options.output, force=options.force, more=more)
    return 0


def add_import(commands: Any) -> None:
    """Add the command that runs an order from a file."""
    about = "run an order that somebody else made: torch's CSV of a pipeline"
    parser = add_command(commands, "import-schedule", _serve_import, about, help.IMPORT)
    parser.add_argument("schedule", metavar="FILE.csv", help="a row for each device, a cell for each action")
    parser.add_argument("-n", metavar="N", help="its stages (default: as many as it has)")
    parser.add_argument(
        "-o", metavar="DIR", dest="output", help="a folder for its traces, as `cdpsim simulate` has them"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    add_run(parser)
    add_request(parser)
    add_format(parser)


def _serve_import(options: argparse.Namespace) -> int:
    from cdpsim.files import tables
    from cdpsim.files import writing as files
    from cdpsim.schedules import schedule_from_csv
    from cdpsim.studies.compare import measure, table_notes
    from cdpsim.trace import FILES

    form = tables.check_format(options.format, tables.DATA_FORMATS)
    run = partial(simulated, words_of(options, schedule_from_csv(options.schedule)))
    if options.output is not None:
        refuse_output(options.output, partial(files.check_writable, options.output, FILES, options.force), [run])
    trace = run()
    measured = measure(trace)
    if options.output is not None:
        trace.save(options.output, force=options.force)
    if form == "json":
        write(tables.as_json(measured.to_builtins()))
        return 0
    cell = cell_of(form, in_slots=trace.in_slots)
    rows = [(heading, cell(measured, field, unit)) for field, unit, heading in COLUMNS]
    table = tables.FORMATS[form]((options.schedule, ""), [row for row in rows if row[1] not in ("-", None)])
    write(tables.noted(table, form, table_notes([measured])))
    return 0

"""The command that compares schedules side by side."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from cdpsim.cli.commands.options import (
    FORMAT_OF_PAPERS,
    RUN_OPTIONS,
    format_of,
    number_of_runs,
    option_arguments,
    output_arguments,
    request_arguments,
    runs_argument,
)
from cdpsim.cli.commands.requests import SPLIT_NOTE, PartialRequests, check_output, given_options, in_slots, options_of
from cdpsim.cli.console import say, write_stdout
from cdpsim.cli.parser import argument, command
from cdpsim.errors import RequestError, choose, whole_number
from cdpsim.export import pictures
from cdpsim.files.tables import format_table, with_notes
from cdpsim.files.units import short_text, size_bytes
from cdpsim.front import simulate
from cdpsim.model import UNIT_MODELS
from cdpsim.presets import find_model
from cdpsim.request.reading import LEAST_STEPS
from cdpsim.schedules import SCHEDULES, Schedule, find_schedule
from cdpsim.studies.compare import Measured, measure, rate_column, table_notes
from cdpsim.studies.montecarlo import sample_runs

_LEAST_VALUES = {"m": 1, "chunks": 1, "replicas": 1, "prefetch": 0}


class Column(NamedTuple):
    """A column of the table: its name, its unit with real costs, and its heading."""

    name: str
    unit: str
    heading: str


MEASURED_COLUMNS = (
    Column("devices", "", "devices"),
    Column("makespan", "s", "makespan"),
    Column("step", "s", "step"),
    Column("rate", "/s", "micro-batches"),
    Column("samples", "/s", "samples"),
    Column("bubble", "%", "bubble"),
    Column("exposed", "%", "exposed"),
    Column("memory", "B", "memory"),
    Column("fits", "", "fits"),
    Column("activations", "B", "activations"),
    Column("parameters", "B", "parameters"),
    Column("gradients", "B", "gradients"),
    Column("optimizer", "B", "optimizer"),
    Column("communication", "B", "communication"),
    Column("versions", "", "versions"),
    Column("staleness", "", "staleness"),
    Column("messages", "", "messages"),
    Column("rounds", "", "rounds"),
    Column("sent", "B", "sent"),
)
# With --runs, beside the step.
QUANTILE_COLUMNS = tuple(Column(quantile, "s", f"step {quantile}") for quantile in ("5%", "50%", "95%"))


@command(
    "compare",
    argument(
        "schedules",
        nargs="*",
        metavar="NAME|FILE",
        help="schedules (default: all), experiment files (.toml, .json), or orders as torch writes them (.csv)",
    ),
    argument("-n", metavar="N", help="stages (default: as many as the model has)"),
    argument("--sort", metavar="COLUMN", help="the least first (default: as named; of all, by bubble)"),
    argument("--within", metavar="SIZE", help="only those that hold at most so much on a device: '80 GB', in slots 6"),
    argument("--columns", metavar="NAME,...", help="these columns of the table (default: all)"),
    *output_arguments("draw them, too: .svg, .png or .pdf", required=False),
    argument("--style", default="bars", metavar="STYLE", help="bars (default), or points: bubble over memory"),
    option_arguments(RUN_OPTIONS, steps="3, or 3 N where a step has one micro-batch"),
    runs_argument("add quantiles of the step; all else is of run 0"),
    request_arguments(must_fit=False),
    FORMAT_OF_PAPERS,
)
def compare_command(args: argparse.Namespace) -> int:
    """Compare schedules side by side: time, bubble, memory, bytes, devices."""
    form = format_of(args)
    runs = number_of_runs(args)
    columns: Sequence[Column] = MEASURED_COLUMNS
    if runs is not None:
        columns = (*columns[:3], *QUANTILE_COLUMNS, *columns[3:])
    known = {column.name: column for column in columns}
    order = None if args.schedules else "bubble"
    if args.sort is not None:
        order = choose("sort", args.sort, known)
    if args.columns is not None:
        columns = [known[choose("columns", name.strip(), known)] for name in args.columns.split(",")]
    choose("style", args.style, pictures.COMPARISONS)
    options, names = given_options(args), args.schedules
    most = None if args.within is None else _memory_limit(args, options)
    check = partial(pictures.check_picture, args.output, force=args.force)
    each = [partial(_compare, args, [name] if name else [], options, runs) for name in names or [None]]
    check_output(args.output, check, each)
    comparison = _compare(args, names, options, runs)
    comparison.report()
    measured = [row for row in comparison.measured if most is None or row.memory <= most]
    if not measured:
        say(f"no schedule holds at most {args.within} on a device")
        return 1
    if order:
        measured.sort(key=lambda row: (row.value(order) is None, row.value(order)))
    if args.output is not None:
        settings = {"in_slots": comparison.slots, "style": args.style, "force": args.force}
        pictures.write_comparison(measured, args.output, **settings)
    if args.columns is None:
        columns = [column for column in columns if column.name not in {"rate", "samples"} - {rate_column(measured)}]
    write_stdout(_table_text(measured, columns, form, slots=comparison.slots))
    return 0


def _table_text(measured: Sequence[Measured], columns: Sequence[Column], form: str, *, slots: bool) -> str:
    header = ("schedule", "rule", *(column.heading for column in columns))
    rows = [
        (row.schedule, row.rule, *(measured_cell(row, column, form, slots=slots) for column in columns))
        for row in measured
    ]
    table = format_table(form, [row.to_builtins() for row in measured], header, rows)
    return with_notes(table, form, table_notes(measured))


def measured_cell(measured: Measured, column: Column, form: str, *, slots: bool) -> Any:
    """Return the cell of a column in a table of that format: the number itself in CSV, else a text."""
    value = measured.value(column.name)
    if form == "csv" or value is None:
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    number = float(value)
    if column.unit and not (slots and column.unit != "%"):
        return short_text(number, column.unit)
    return f"{number:.10g}" if number.is_integer() else f"{number:.4g}"


def _memory_limit(args: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Return what --within says: stage-activations in the slot model, else bytes."""
    if all(in_slots(options_of(args, name)) for name in args.schedules) and in_slots(options):
        return whole_number("within", args.within, at_least=0)
    try:
        return size_bytes(args.within)
    except RequestError as error:
        raise RequestError("within", str(error)) from None


@dataclass
class _Comparison:
    """The measured schedules, those that were left out, the unit of time, and the notes to print."""

    notes: tuple[str, ...]
    requests: PartialRequests = field(default_factory=PartialRequests)
    measured: list[Measured] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)  # schedules by the subject of their refusal
    slots: bool = True

    def report(self) -> None:
        """Print which schedules ran without which option, and which did not run; refuse an option that none takes."""
        self.requests.report(*self.notes)
        for subject, names in self.left_out.items():
            say(f"left out because of {subject}: {', '.join(names)} (by its name each says why)")


def _compare(
    args: argparse.Namespace, names: Sequence[str], options: Mapping[str, Any], runs: int | None, *remarks: str
) -> _Comparison:
    """Measure schedules and experiments, one run after another; without names, all schedules that take the options."""
    for option, least in _LEAST_VALUES.items():  # also for schedules that do not take it
        if option in options:
            whole_number(option, options[option], at_least=least)
    every = [{**options_of(args, name), **options} for name in names or SCHEDULES]
    schedules = [find_schedule(own["schedule"]) for own in every]
    if len({in_slots(own) for own in every}) > 1:
        raise RequestError("model", "some are in slots, and some in seconds; give all of them a model, or none")
    comparison = _Comparison(remarks)
    for own, schedule in zip(every, schedules, strict=True):
        # These options say how much is to be done: a schedule that is not named is compared only if it takes them.
        needed = () if names else ("replicas",) if schedule.m is not None else ("m", "replicas")
        try:
            steps = {} if own.keys() & {"steps", "counts"} else {"steps": _default_steps(own, schedule)}
            run = comparison.requests.serve({**own, "schedule": schedule, **steps}, simulate, needed=needed)
        except RequestError as error:
            comparison.left_out.setdefault(error.subject, []).append(schedule.name)
            if names or sum(map(len, comparison.left_out.values())) == len(schedules):
                raise
            continue
        one_clock = own.get("model", UNIT_MODELS[0]) == UNIT_MODELS[0] and len(schedules) > 1
        if one_clock and run.request.model.name == UNIT_MODELS[1]:
            return _compare(args, names, {**options, "model": UNIT_MODELS[1]}, runs, SPLIT_NOTE)
        comparison.measured.append(measure(run, runs if run.request.disorder.is_random else None))
        comparison.slots = run.in_slots
    if runs is not None and not any(row.steps for row in comparison.measured):
        sample_runs(run, runs)  # which refuses a run in which nothing is random
    return comparison


def _default_steps(options: Mapping[str, Any], schedule: Schedule) -> int:
    """Return the number of steps without --steps, with which all schedules run equally many micro-batches."""
    if schedule.m != 1:
        return LEAST_STEPS
    n = options.get("n") if "n" in options or in_slots(options) else find_model(options["model"]).n
    return LEAST_STEPS * (1 if n is None else whole_number("n", n, at_least=1))

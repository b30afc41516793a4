"""Schedules side by side."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from cdpsim.cli import help
from cdpsim.cli.commands.options import (
    SPLIT,
    InPart,
    add_format,
    add_request,
    add_run,
    add_runs,
    asked,
    in_slots,
    refuse_output,
    runs_of,
    words_of,
)
from cdpsim.cli.console import add_command, say, write

if TYPE_CHECKING:
    from cdpsim.schedules import Schedule
    from cdpsim.studies.compare import Measured

STEPS = 3
_NUMBERS = {"m": 1, "chunks": 1, "replicas": 1, "prefetch": 0}
# Of each column: the field, its unit with real costs, and its heading.
COLUMNS = (
    ("devices", "", "devices"),
    ("makespan", "s", "makespan"),
    ("step", "s", "step"),
    ("rate", "/s", "micro-batches"),
    ("samples", "/s", "samples"),
    ("bubble", "%", "bubble"),
    ("exposed", "%", "exposed"),
    ("memory", "B", "memory"),
    ("fits", "", "fits"),
    ("activations", "B", "activations"),
    ("parameters", "B", "parameters"),
    ("gradients", "B", "gradients"),
    ("optimizer", "B", "optimizer"),
    ("communication", "B", "communication"),
    ("versions", "", "versions"),
    ("staleness", "", "staleness"),
    ("messages", "", "messages"),
    ("rounds", "", "rounds"),
    ("sent", "B", "sent"),
)
# With --runs, beside the step.
QUANTILES = (("5%", "s", "step 5%"), ("50%", "s", "step 50%"), ("95%", "s", "step 95%"))


def add_compare(commands: Any) -> None:
    """Add the command that puts schedules side by side."""
    about = "schedules side by side: time, bubble, memory, bytes, devices"
    parser = add_command(commands, "compare", _serve_compare, about, help.COMPARE)
    parser.add_argument(
        "schedules",
        nargs="*",
        metavar="NAME|FILE",
        help="schedules (default: all), experiment files (.toml, .json), or orders as torch writes them (.csv)",
    )
    parser.add_argument("-n", metavar="N", help="stages (default: as many as the model has)")
    parser.add_argument("--sort", metavar="COLUMN", help="the least first (default: as named; of all, by bubble)")
    parser.add_argument(
        "--within", metavar="SIZE", help="only those that hold at most so much on a device: '80 GB', in slots 6"
    )
    parser.add_argument("--columns", metavar="NAME,...", help="these columns of the table (default: all)")
    parser.add_argument("-o", metavar="FILE", dest="output", help="draw them, too: .svg, .png or .pdf")
    parser.add_argument(
        "--style", default="bars", metavar="STYLE", help="bars (default), or points: bubble over memory"
    )
    parser.add_argument("--force", action="store_true", help="overwrite a file that exists")
    add_run(parser, "3, or 3 N where a step has one micro-batch")
    add_runs(parser, "add quantiles of the step; all else is of run 0")
    add_request(parser, must_fit=False)
    add_format(parser, papers=True)


def _serve_compare(options: argparse.Namespace) -> int:
    from cdpsim.errors import choose
    from cdpsim.export import pictures
    from cdpsim.files import tables
    from cdpsim.studies.compare import rate_column

    form = tables.check_format(options.format)
    runs = runs_of(options)
    columns: Sequence[tuple[str, str, str]]
    columns = COLUMNS if runs is None else (*COLUMNS[:3], *QUANTILES, *COLUMNS[3:])
    known = {column[0]: column for column in columns}
    order = None if options.schedules else "bubble"
    if options.sort is not None:
        order = choose("sort", options.sort, known)
    if options.columns is not None:
        columns = [known[choose("columns", name.strip(), known)] for name in options.columns.split(",")]
    choose("style", options.style, pictures.COMPARISONS)
    words, names = asked(options), options.schedules
    slots = all(in_slots(words_of(options, name)) for name in names) if names else in_slots(words)
    most = None if options.within is None else _size(options.within, slots=slots)
    if options.output is not None:
        each = [[name] for name in names] or [[]]
        check = partial(pictures.check_picture, options.output, force=options.force)
        refuse_output(options.output, check, [partial(_measured, options, some, words, runs) for some in each])
    found = _measured(options, names, words, runs)
    found.tell()
    measured = [one for one in found.measured if most is None or one.memory <= most]
    if not measured:
        say(f"no schedule holds at most {options.within} on a device")
        return 1
    if order:
        measured.sort(key=lambda one: (one.value(order) is None, one.value(order)))
    if options.output is not None:
        drawn = {"in_slots": found.in_slots, "style": options.style, "force": options.force}
        pictures.write_comparison(measured, options.output, **drawn)
    if options.columns is None:
        columns = [column for column in columns if column[0] not in {"rate", "samples"} - {rate_column(measured)}]
    as_json = form == "json"
    write(
        tables.as_json([one.to_builtins() for one in measured])
        if as_json
        else _table(measured, columns, form, found.in_slots)
    )
    return 0


def _table(measured: Sequence["Measured"], columns: Sequence[tuple[str, str, str]], form: str, in_slots: bool) -> str:
    from cdpsim.files import tables
    from cdpsim.studies.compare import table_notes

    header = ("schedule", "rule", *(heading for _, _, heading in columns))
    cell = cell_of(form, in_slots=in_slots)
    rows = [(one.schedule, one.rule, *(cell(one, field, unit) for field, unit, _ in columns)) for one in measured]
    return tables.noted(tables.FORMATS[form](header, rows), form, table_notes(measured))


def cell_of(form: str, *, in_slots: bool) -> Callable[["Measured", str, str], Any]:
    """Return how a table in that form has a field of a unit: as its number in CSV, else in words."""
    if form == "csv":
        return lambda one, field, unit: one.value(field)
    return partial(said, in_slots=in_slots)


def _size(given: str, *, slots: bool) -> int:
    """What --within says: stages' worth in the slot model, else bytes."""
    from cdpsim.errors import RequestError, whole_number
    from cdpsim.files.units import size_bytes

    if slots:
        return whole_number("within", given, at_least=0)
    try:
        return size_bytes(given)
    except RequestError as error:
        raise RequestError("within", str(error)) from None


@dataclass
class _Found:
    """The measured schedules, those left out, the clock, and the notes to print."""

    served: InPart
    measured: list["Measured"] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)  # schedules by what they were left out for
    in_slots: bool = True
    notes: tuple[str, ...] = ()

    def tell(self) -> None:
        """Say who ran without which option, and who did not run; refuse an option that no schedule took."""
        self.served.tell(*self.notes)
        for subject, names in self.left_out.items():
            say(f"left out because of {subject}: {', '.join(names)} (by its name each says why)")


def _measured(
    options: argparse.Namespace, names: Sequence[str], words: Mapping[str, Any], runs: int | None, *notes: str
) -> _Found:
    """Measure schedules and experiments, one run after another; without names all schedules that can be asked so."""
    from cdpsim.errors import RequestError, whole_number
    from cdpsim.front import simulate
    from cdpsim.model import UNIT_MODELS
    from cdpsim.schedules import SCHEDULES, find_schedule
    from cdpsim.studies.compare import measure
    from cdpsim.studies.montecarlo import sample_runs

    for word, least in _NUMBERS.items():  # also for those that do not take it
        if word in words:
            whole_number(word, words[word], at_least=least)
    every = [{**words_of(options, name), **words} for name in names or SCHEDULES]
    schedules = [find_schedule(own["schedule"]) for own in every]
    clocks = {in_slots(own) for own in every}
    if len(clocks) > 1:
        raise RequestError("model", "some are in slots, and some in seconds; give all of them a model, or none")
    found, is_random = _Found(InPart(), notes=notes), False
    for own, schedule in zip(every, schedules, strict=True):
        try:
            steps = {} if own.keys() & {"steps", "counts"} else {"steps": _steps(own, schedule)}
            asking = {**own, "schedule": schedule, **steps}
            run = found.served.served(asking, simulate, () if names else _needed(schedule))
        except RequestError as error:
            found.left_out.setdefault(error.subject, []).append(schedule.name)
            if names or sum(map(len, found.left_out.values())) == len(schedules):
                raise
            continue
        one_clock = own.get("model", UNIT_MODELS[0]) == UNIT_MODELS[0] and len(schedules) > 1
        if one_clock and run.request.model.name == UNIT_MODELS[1]:
            return _measured(options, names, {**words, "model": UNIT_MODELS[1]}, runs, SPLIT)
        draws = runs if run.request.disorder.is_random else None
        is_random |= draws is not None
        found.measured.append(measure(run, draws))
        found.in_slots = run.in_slots
    if runs is not None and not is_random:
        sample_runs(run, runs)  # which says so
    return found


def _needed(schedule: "Schedule") -> tuple[str, ...]:
    """Give the options without which a schedule that nobody named is not compared: they say how much is to be done."""
    return ("replicas",) if schedule.m is not None else ("m", "replicas")


def _steps(words: Mapping[str, Any], schedule: "Schedule") -> int:
    """So many that all run as many micro-batches."""
    from cdpsim.errors import whole_number
    from cdpsim.presets import find_model

    if schedule.m != 1:
        return STEPS
    n = words.get("n") if "n" in words or in_slots(words) else find_model(words["model"]).n
    return STEPS * (1 if n is None else whole_number("n", n, at_least=1))


def said(one: "Measured", field: str, unit: str, *, in_slots: bool) -> str:
    """A number for people: whole where slots and stages' worth are, else with four digits and a unit."""
    value = one.value(field)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    value = float(value)
    if unit == "%":
        return f"{100 * value:.1f} %"
    if in_slots or not unit:
        return f"{value:.10g}" if value == int(value) else f"{value:.4g}"
    if unit == "/s":
        return f"{value:.4g} /s"  # a thousandth of it looks like metres
    from quantiphy import Quantity

    return str(Quantity(value, unit).render(prec=3))

"""Schedules side by side."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cdpsim import help
from cdpsim.commands.options import add_format, add_request, add_run, add_runs, runs_of, simulated
from cdpsim.console import add_command, write

if TYPE_CHECKING:
    from cdpsim.compare import Measured

# Of each column: the field, its unit with real costs, and its heading.
COLUMNS = (
    ("devices", "", "devices"),
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
    ("sent", "B", "sent"),
)
# With --runs, beside the step.
QUANTILES = (("5%", "s", "step 5%"), ("50%", "s", "step 50%"), ("95%", "s", "step 95%"))


def add_compare(commands: Any) -> None:
    """Add the command that puts schedules side by side."""
    about = "schedules side by side: time, bubble, memory, bytes, devices"
    parser = add_command(commands, "compare", _serve_compare, about, help.COMPARE)
    parser.add_argument("schedules", nargs="*", metavar="NAME", help="schedules (default: all)")
    parser.add_argument("-n", metavar="N", help="stages (default: as many as the model has)")
    parser.add_argument("--sort", metavar="COLUMN", help="the least first (default: as they are named)")
    parser.add_argument("-o", metavar="FILE", dest="output", help="draw them, too: .svg, .png or .pdf")
    parser.add_argument("--force", action="store_true", help="overwrite a file that exists")
    add_run(parser, steps="12")  # so that what drifts apart at first has come to rest
    add_runs(parser, "add quantiles of the step; all else is of run 0")
    add_request(parser, must_fit=False)
    add_format(parser)


def _serve_compare(options: argparse.Namespace) -> int:
    from cdpsim import pictures, tables
    from cdpsim.compare import measure
    from cdpsim.errors import choose
    from cdpsim.schedules import SCHEDULES

    form = tables.check_format(options.format)
    runs = runs_of(options)
    columns: tuple[tuple[str, str, str], ...]
    columns = COLUMNS if runs is None else (*COLUMNS[:2], *QUANTILES, *COLUMNS[2:])
    fields = [field for field, _, _ in columns]
    order = None if options.sort is None else choose("sort", options.sort, fields)
    if options.output is not None:
        pictures.check_picture(options.output, force=options.force)
    names = options.schedules or list(SCHEDULES)
    for name in names:
        choose("schedule", name, SCHEDULES)
    traces = [simulated(options, name) for name in names]
    measured = [measure(trace, runs) for trace in traces]
    if order:
        measured.sort(key=lambda one: (_value(one, order) is None, _value(one, order)))
    if options.output is not None:
        pictures.compare(measured, options.output, in_slots=traces[0].in_slots, force=options.force)
    if form == "json":
        write(tables.as_json([one.to_builtins() for one in measured]))
        return 0
    columns = tuple(column for column in columns if column[0] != _other_rate(measured))
    header = ("schedule", "rule", *(heading for _, _, heading in columns))
    cell = partial(_cell, in_slots=traces[0].in_slots)
    rows = [(one.schedule, one.rule, *(cell(one, field, unit) for field, unit, _ in columns)) for one in measured]
    write(tables.FORMATS[form](header, rows))
    return 0


def _value(one: "Measured", field: str) -> Any:
    if field.endswith("%"):
        return None if one.steps is None else one.steps[field]
    return getattr(one, field)


def _other_rate(measured: Sequence["Measured"]) -> str:
    """Which rate a table does without: that of micro-batches where that of samples is known."""
    return "rate" if any(one.samples for one in measured) else "samples"


def _cell(one: "Measured", field: str, unit: str, *, in_slots: bool) -> str:
    """A number for people: whole where slots and stages' worth are, else with four digits and a unit."""
    value = _value(one, field)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit == "%":
        return f"{100 * value:.1f} %"
    if in_slots or not unit:
        return f"{value:.10g}"
    if unit == "/s":
        return f"{value:.4g} /s"  # a thousandth of it looks like metres
    from quantiphy import Quantity

    return str(Quantity(value, unit).render(prec=3))

"""Commands that print tables: the schedules, Table 1, the pyramid, rounds."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cdpsim.api import rounds
from cdpsim.cli.commands.options import (
    FORMAT,
    FORMAT_OF_PAPERS,
    RUN_OPTIONS,
    STAGES,
    format_of,
    option_arguments,
    output_arguments,
    request_arguments,
)
from cdpsim.cli.commands.requests import check_output, given_options, options_of, run_of
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument, command
from cdpsim.errors import RequestError, choose
from cdpsim.files.notes import explain
from cdpsim.files.tables import format_table
from cdpsim.files.units import short_text
from cdpsim.files.writing import check_writable, write_file
from cdpsim.request import Request
from cdpsim.request.sharing import option_words, options_beyond_usual
from cdpsim.schedules import NAMES, SCHEDULES
from cdpsim.studies import table1_forms
from cdpsim.studies.acco_table import ACCO_PAPER, CDP_PAPER, METHOD_HEADER, TABLED_PAPERS, acco_table1
from cdpsim.studies.pyramid import pyramid
from cdpsim.studies.rounds import HEADER, in_short
from cdpsim.studies.table1 import compute_table1
from cdpsim.trace import table_text
from cdpsim.trace.table import RoundRow, Table

_NAMES_TEXT = """\
names of dp with --zero: ddp 0, zero-1 1, zero-2 2, zero-3 and fsdp 3
data-axis: --shard --zero --buckets and the other options of the data axis; zero-1: those of --zero 1
"""


@command("schedules", FORMAT)
def schedules_command(args: argparse.Namespace) -> int:
    """List every schedule by name, one line each."""
    form = format_of(args)
    header = ("schedule", "order", "placement", "rule", "state", "options", "about")
    rows = [
        (s.name, s.order.name, s.placement.name, s.rule.name, s.state.label, options_beyond_usual(s), s.about)
        for s in SCHEDULES.values()
    ]
    records = [dict(zip(header, row, strict=True)) for row in rows]
    words = option_words if form == "text" else options_beyond_usual
    cells = [(*row[:5], " ".join(words(s)), row[6]) for row, s in zip(rows, SCHEDULES.values(), strict=True)]
    write_stdout(format_table(form, records, header, cells))
    if form == "text":
        write_stdout(f"\n{_NAMES_TEXT}")
    return 0


@command(
    "table1",
    argument(
        "--paper",
        default=CDP_PAPER,
        choices=TABLED_PAPERS,
        help="cdp (default); acco: memory of DDP, ZeRO-1, SlowMo, CO2 and ACCO",
    ),
    argument("-n", metavar="N", help="stages, and micro-batches; of acco: workers (default 64, as in the paper)"),
    argument("--parameters", metavar="P", help="of acco: of the model (default 7.5 billion, as in the paper)"),
    option_arguments(RUN_OPTIONS, steps="3"),
    argument(
        "--shared-parameters",
        action="store_true",
        help="single-*: all micro-batches use one copy of the parameters (default: a copy each, from a stage's "
        "forward to its backward)",
    ),
    argument("--exact", action="store_true", help="run nothing: paper | exact, for an N that no run has room for"),
    FORMAT_OF_PAPERS,
)
def table1_command(args: argparse.Namespace) -> int:
    """Print the paper's Table 1: paper | exact | simulated."""
    form, options = format_of(args), given_options(args)
    if choose("paper", args.paper, TABLED_PAPERS) == ACCO_PAPER:
        return _print_acco_table(args, form, options)
    for option, problem, is_wrong in (
        ("-n", "is missing; see cdpsim table1 --help", args.n is None),
        ("parameters", "are those of --paper acco; leave them out", args.parameters is not None),
    ):
        if is_wrong:
            raise RequestError(option, problem)
    table = compute_table1(**options, shared_parameters=args.shared_parameters, formulas_alone=args.exact)
    write_stdout(table1_forms.TABLE1_FORMS[form](table))
    disagreeing = [row["schedule"] for row in table.rows if table.is_simulated and not row["agree"]]
    if disagreeing:
        explain(f"exact and simulated disagree: {', '.join(disagreeing)}")
    return 1 if disagreeing else 0


def _print_acco_table(args: argparse.Namespace, form: str, options: Mapping[str, Any]) -> int:
    """Print Table 1 of the ACCO paper: printed | formula | simulated."""
    given = [name for name in options if name != "n"]
    given += [name for name in ("shared_parameters", "exact") if getattr(args, name)]
    if given:
        name = given[0].replace("_", "-")
        raise RequestError(name, "is of the CDP paper's table; leave it out, or --paper acco")
    size = {"workers": args.n, "parameters": args.parameters}
    rows = acco_table1(**{name: value for name, value in size.items() if value is not None})
    records = [dict(zip(METHOD_HEADER, row.data, strict=True)) | {"agree": row.agrees} for row in rows]
    cells = [row.data if form == "csv" else row.words for row in rows]
    write_stdout(format_table(form, records, METHOD_HEADER, cells))
    disagreeing = [row.method.name for row in rows if not row.agrees]
    if disagreeing:
        explain(f"printed, by formula and simulated disagree: {', '.join(disagreeing)}")
    return 1 if disagreeing else 0


@command(
    "pyramid",
    argument(
        "schedule",
        nargs="?",
        default="mp-cdp",
        metavar="NAME|FILE",
        choices=NAMES,
        help="whose timing (default mp-cdp: the paper's)",
    ),
    STAGES,
    option_arguments(RUN_OPTIONS),
    request_arguments(),
    FORMAT,
)
def pyramid_command(args: argparse.Namespace) -> int:
    """Count the devices that each stage needs, with a proof."""
    form = format_of(args)
    result = pyramid(run_of(options_of(args, args.schedule)))
    keys = ("stage", "devices", "bound", "overlap", "path_cover")
    rows = [[stage[key] for key in keys] for stage in result["stages"]]
    sums = [None if None in column else sum(column) for column in list(zip(*rows, strict=True))[1:]]
    header = [key.replace("_", " ") for key in keys]
    write_stdout(format_table(form, result, header, [*rows, ["all", *sums]]))
    return 0


@command(
    "rounds",
    argument("schedule", metavar="NAME|FILE", choices=NAMES, help="a schedule whose workers go on: dpu, wp or acco"),
    STAGES,
    *output_arguments("write each round and worker into a CSV file", required=False),
    option_arguments(RUN_OPTIONS),
    request_arguments(),
    FORMAT,
)
def rounds_command(args: argparse.Namespace) -> int:
    """Count the micro-batches that workers compute while they communicate."""
    form, options = format_of(args), options_of(args, args.schedule)
    if args.output is not None and Path(args.output).suffix.lower() != ".csv":
        raise RequestError(args.output, "rounds are rows of CSV, and no picture; end its name in .csv")
    check = partial(check_writable, args.output, force=args.force)
    check_output(args.output, check, [partial(_rounds_of, options)])
    found = _rounds_of(options)
    if args.output is not None:
        write_file(args.output, table_text(found), force=args.force)
    unit = "s" if found.posted.dtype.kind == "f" else ""
    rows = in_short(found)
    cells = [(*row[:4], *(each if each is None else short_text(each, unit) for each in row[4:])) for row in rows]
    records = [dict(zip(HEADER, row, strict=True)) for row in rows]
    write_stdout(
        format_table(form, records, [name.replace("_", " ") for name in HEADER], cells if form == "text" else rows)
    )
    return 0


def _rounds_of(options: Mapping[str, Any]) -> Table[RoundRow]:
    """Return the rounds of the request of these options."""
    return rounds(Request.from_builtins(options))

"""What is printed: the schedules, Table 1, the pyramid."""

import argparse
from typing import Any

from cdpsim.cli import help
from cdpsim.cli.commands.options import add_format, add_request, add_run, asked, simulated, words_of
from cdpsim.cli.console import add_command, say, write


def add_schedules(commands: Any) -> None:
    """Add the command that lists what there is."""
    about = "every schedule by name, one line each"
    parser = add_command(commands, "schedules", _serve_schedules, about, help.SCHEDULES)
    add_format(parser)


def _serve_schedules(options: argparse.Namespace) -> int:
    from cdpsim.files import tables
    from cdpsim.schedules import SCHEDULES

    form = tables.check_format(options.format, tables.DATA_FORMATS)
    header = ("schedule", "order", "placement", "rule", "state", "options", "about")
    rows = [
        (s.name, s.order.name, s.placement.name, s.rule.name, s.state.label, s.options, s.about)
        for s in SCHEDULES.values()
    ]
    if form == "json":
        write(tables.as_json([dict(zip(header, row, strict=True)) for row in rows]))
    else:
        write(tables.FORMATS[form](header, [(*row[:5], " ".join(row[5]), row[6]) for row in rows]))
    return 0


def add_table1(commands: Any) -> None:
    """Add the command that makes the paper's Table 1."""
    about = "the paper's Table 1 for any N: paper | exact | simulated"
    parser = add_command(commands, "table1", _serve_table1, about, help.TABLE1)
    parser.add_argument("-n", required=True, metavar="N", help="stages, and micro-batches")
    add_run(parser, "3")
    parser.add_argument(
        "--shared-parameters",
        action="store_true",
        help="single-*: all micro-batches use one copy of the parameters (default: a copy each, from a stage's "
        "forward to its backward)",
    )
    parser.add_argument(
        "--exact", action="store_true", help="run nothing: paper | exact, for an N that no run has room for"
    )
    add_format(parser, papers=True)


def _serve_table1(options: argparse.Namespace) -> int:
    from cdpsim.files import tables
    from cdpsim.studies import table1_forms
    from cdpsim.studies.table1 import compute_table1

    form = tables.check_format(options.format)
    how = {"shared_parameters": options.shared_parameters, "formulas_alone": options.exact}
    table = compute_table1(**asked(options), **how)
    write(table1_forms.TABLE1_FORMS[form](table))
    disagreeing = [row["schedule"] for row in table.rows if table.is_simulated and not row["agree"]]
    if disagreeing:
        say(f"exact and simulated disagree: {', '.join(disagreeing)}")
    return 1 if disagreeing else 0


def add_pyramid(commands: Any) -> None:
    """Add the command that counts devices."""
    about = "how many devices each stage needs: count, bound, certificate"
    parser = add_command(commands, "pyramid", _serve_pyramid, about, help.PYRAMID)
    parser.add_argument(
        "schedule", nargs="?", default="mp-cdp", metavar="NAME", help="whose timing (default mp-cdp: the paper's)"
    )
    parser.add_argument("-n", metavar="N", help="stages (default: as many as the model has)")
    add_run(parser)
    add_request(parser)
    add_format(parser)


def _serve_pyramid(options: argparse.Namespace) -> int:
    from cdpsim.files import tables
    from cdpsim.studies.pyramid import pyramid

    form = tables.check_format(options.format, tables.DATA_FORMATS)
    result = pyramid(simulated(words_of(options, options.schedule)))
    if form == "json":
        write(tables.as_json(result))
        return 0
    header = ("stage", "devices", "bound", "overlap", "path cover")
    keys = ("stage", "devices", "bound", "overlap", "path_cover")
    rows = [[stage[key] for key in keys] for stage in result["stages"]]
    sums = [sum(column) if None not in column else None for column in list(zip(*rows, strict=True))[1:]]
    rows = [*rows, ["all", *sums]]
    if form != "csv":
        rows = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    write(tables.FORMATS[form](header, rows))
    return 0

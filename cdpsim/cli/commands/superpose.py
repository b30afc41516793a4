"""Fig. 4 in numbers: the memory per worker of N workers, simultaneous and cyclic."""

import argparse
from typing import TYPE_CHECKING, Any

from cdpsim.cli import help
from cdpsim.cli.commands.options import add_format
from cdpsim.cli.console import add_command, write

if TYPE_CHECKING:
    from cdpsim.studies.superpose import Superposition


def add_superpose(commands: Any) -> None:
    """Add the command that extrapolates one worker's memory to N."""
    about = "Fig. 4's extrapolation: memory per worker of N workers, DP and CDP"
    parser = add_command(commands, "superpose", _serve_superpose, about, help.SUPERPOSE)
    parser.add_argument("model", metavar="MODEL", help="a model that ships with cdpsim, or a .toml or .json file")
    parser.add_argument("-n", required=True, metavar="N", help="workers")
    add_curve(parser)
    add_format(parser)


def add_curve(parser: argparse.ArgumentParser, of: str = "") -> None:
    """Add what one worker's memory curve consists of, and over what; with `of` something only by wish."""
    axis, contents = (None, None) if of else ("flops", "activations")
    parser.add_argument(
        "--axis",
        default=axis,
        metavar="AXIS",
        help=f"{of}what a layer's share of a pass goes by: flops (default), roofline:DEVICE or measured",
    )
    parser.add_argument(
        "--contents",
        default=contents,
        metavar="WHAT",
        help=f"{of}activations (default; temporaries and gradients of activations, too), gradients (inputs and "
        "gradients of parameters as well), or constants (the size of the parameters once more)",
    )


def _serve_superpose(options: argparse.Namespace) -> int:
    from cdpsim.files import tables
    from cdpsim.studies.superpose import PAPER_CLAIMS, superpose

    form = tables.check_format(options.format, tables.DATA_FORMATS)
    found = superpose(options.model, options.n, axis=options.axis, contents=options.contents)
    if form == "json":
        write(tables.as_json(found.row()))
    elif form == "csv":
        write(tables.as_csv([*found.row()], [[*found.row().values()]]))
    else:
        write(tables.FORMATS[form](*_table(found)))
    if form == "text" and options.model in PAPER_CLAIMS:
        write(f"\nthe paper: {PAPER_CLAIMS[options.model]} (Fig. 4)\n")
    return 0


def _table(found: "Superposition") -> tuple[list[str], list[list[str]]]:
    """The header and the only row, for people."""
    from cdpsim.studies.superpose import bytes_text, percent_text

    header = ["model", "n", "axis", "contents", "DP per worker", "CDP per worker", "reduction"]
    sizes = [bytes_text(found.dp), bytes_text(found.cdp), percent_text(found.reduction)]
    return header, [[found.model, str(found.n), found.axis, found.contents, *sizes]]

"""The command that gives Fig. 4 in numbers: the memory per worker of N workers, simultaneous and cyclic."""

import argparse

from cdpsim import presets
from cdpsim.cli.commands.options import FORMAT, format_of
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import Argument, argument, command
from cdpsim.files.tables import format_table
from cdpsim.files.units import short_text
from cdpsim.studies.superpose import AXES, CURVE_CONTENTS, PAPER_CLAIMS, bytes_text, superpose


def curve_arguments(of: str = "", axis: str | None = "flops", contents: str | None = "activations") -> list[Argument]:
    """Return the options of one worker's memory curve, with the defaults of its axis and its content."""
    about_contents = (
        "activations (default; temporaries and gradients of activations, too), gradients (inputs and gradients of "
        "parameters as well), or constants (the size of the parameters once more)"
    )
    about_axis = "what a layer's share of a pass goes by: flops (default), roofline:DEVICE or measured"
    return [
        argument("--axis", default=axis, metavar="AXIS", choices=AXES, help=f"{of}{about_axis}"),
        argument("--contents", default=contents, metavar="WHAT", choices=CURVE_CONTENTS, help=f"{of}{about_contents}"),
        argument(
            "--by-layer",
            action="store_true",
            help=f"{of}count a layer with its highest moment throughout, where the model has the curves of layers",
        ),
    ]


@command(
    "superpose",
    argument(
        "model",
        metavar="NAME|FILE",
        choices=presets.models(),
        help="a model that ships with cdpsim, or a .toml or .json file",
    ),
    argument("-n", required=True, metavar="N", help="workers"),
    *curve_arguments(),
    FORMAT,
)
def superpose_command(args: argparse.Namespace) -> int:
    """Extrapolate one worker's memory to N workers (Fig. 4)."""
    form = format_of(args)
    result = superpose(args.model, args.n, axis=args.axis, contents=args.contents, by_layer=args.by_layer)
    record = result.row()
    header, row = [*record], [*record.values()]
    if form == "text":
        header = ["model", "n", "axis", "contents", "by", "DP per worker", "CDP per worker", "reduction"]
        sizes = [bytes_text(result.dp), bytes_text(result.cdp)]
        row[4:] = [result.resolution, *sizes, short_text(float(result.reduction), "%")]
    write_stdout(format_table(form, record, header, [row]))
    if form == "text" and args.model in PAPER_CLAIMS:
        write_stdout(f"\nthe paper: {PAPER_CLAIMS[args.model]} (Fig. 4)\n")
    return 0

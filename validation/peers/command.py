"""The command `peers`: its arguments."""

import argparse

from cdpsim.cli.parser import argument

from ..profile.command import SIZE
from ..program import harness_command


@harness_command(
    "peers",
    argument("--only", nargs="+", metavar="NAME", help="run these runtimes alone (see --list)"),
    argument("-n", nargs="+", metavar="N", help="ranks, of one run or of several (default 4; with --from all)"),
    argument("-m", default="8", metavar="M", help="micro-batches of a pipeline's step (default 8)"),
    argument("-o", "--output", metavar="FILE.json", help="the report to write (default: none, only the table)"),
    argument("--device", default="cpu", metavar="DEVICE", help="cpu (default), or cuda: a GPU for each rank, by nccl"),
    argument("--model", nargs="+", metavar="MODEL", help="transformer (default), mlp, or others of `profile`"),
    argument("--dtype", default="float32", metavar="TYPE", help="of the model, for memory (default float32)"),
    SIZE,
    argument("--batch", default="8", metavar="B", help="samples of a micro-batch (default 8)"),
    argument("--repeats", default="3", metavar="K", help="timed steps, of which the median counts (0 for none)"),
    argument("--timeout", default="300", metavar="SECONDS", help="how long ranks may take for a run (default 300)"),
    argument("--list", action="store_true", help="show the runtimes, and run none"),
    argument("--from", dest="earlier", metavar="FILE.json", help="simulate anew what a report measured; run nothing"),
    argument("--format", default="text", metavar="FORM", help="of the table: text (default), json or csv"),
    argument("--force", action="store_true", help="overwrite a report that exists"),
)
def peers_command(options: argparse.Namespace) -> int:
    """Run torch's own runtimes on the stages of a replay, and compare them with their simulations."""
    from .requests import run_peers  # whose imports take seconds

    return run_peers(options)

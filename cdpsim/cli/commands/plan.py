"""The command that plans: the best schedule for a model, a cluster, a memory and a batch."""

import argparse
from functools import partial

from cdpsim.cli.commands.options import (
    FORMAT,
    format_of,
    look_arguments,
    look_of,
    option_arguments,
    output_arguments,
    request_arguments,
)
from cdpsim.cli.commands.requests import check_output, given_options, listed_option, report_recomputation
from cdpsim.cli.console import write_stdout
from cdpsim.cli.parser import argument, argument_group, command
from cdpsim.export import pictures
from cdpsim.files.notes import explain, say
from cdpsim.request.options import OPTIONS
from cdpsim.schedules import NAMES
from cdpsim.studies.plan import plan
from cdpsim.studies.plan.plan_table import lacking_text, plan_table
from cdpsim.studies.plan.wanted import OBJECTIVES, RUN_ALONE

_OWN_OPTIONS = (
    *("devices", "batch", "memory", "schedules", "staleness"),
    *("top", "objective", "seconds", "max_memory", "fewer"),
)


@command(
    "plan",
    argument("--devices", metavar="D", help="devices of a run (default: all of the cluster)"),
    argument("--batch", metavar="B", help="samples of a training step; of a model without, micro-batches"),
    argument("--memory", metavar="SIZE", help="what a device may hold: '80 GB', in slots 6 (default: what it has)"),
    argument("--schedules", metavar="NAME,...", choices=NAMES, help="only these (default: all)"),
    argument("--staleness", metavar="S", help="at most so much, in steps; 0: synchronous training"),
    argument("--seconds", metavar="S", help="end the search after so long, and say how good others could be"),
    argument("--max-memory", metavar="SIZE", help="what the search may take of this machine's memory: '8 GB'"),
    *output_arguments("draw it: .svg, .png, .pdf, .pgf; or all candidates, .csv or .json", required=False),
    argument_group(
        "how it searches",
        argument("--fewer", action="store_true", help="runs may have any number of devices that divides --devices"),
        argument(
            "--objective",
            metavar="WHAT",
            choices=OBJECTIVES,
            default="samples",
            help="the best first: samples (default), memory, devices or staleness",
        ),
        argument("--top", metavar="K", default="10", help="rows (default 10)"),
        argument("-n", metavar="N,...", help="only these numbers of stages; in slots one (default: --devices)"),
    ),
    look_arguments,
    option_arguments(("engine", "collective")),
    request_arguments(must_fit=False, without=RUN_ALONE, m="batch / (data ranks x samples of a micro-batch)"),
    FORMAT,
)
def plan_command(args: argparse.Namespace) -> int:
    """Find the best schedule for a model on a cluster."""
    form, look = format_of(args), look_of(args)
    given = given_options(args)
    given.pop("ignore_memory", None)
    for name, value in given.items():  # of a switch both ways are tried
        given[name] = [False, True] if name in OPTIONS and OPTIONS[name].is_switch else listed_option(name, value)
    settings = {name: getattr(args, name) for name in _OWN_OPTIONS} | given
    if args.output is not None:
        check = partial(pictures.check_plan, args.output, look=look, force=args.force)
        check_output(args.output, check, [partial(plan, **settings)])
    found = plan(**settings)
    report_recomputation([settings])
    if args.output is not None and found.interrupted:
        say(f"{args.output}: is not written, as the search was interrupted")
    elif args.output is not None and not (found.fitting or args.output.lower().endswith(pictures.PLAN_TABLES)):
        say(f"{args.output}: is not drawn, as no candidate that fits has been simulated")
    elif args.output is not None:
        pictures.write_plan(found, args.output, look=look, force=args.force)
    write_stdout(plan_table(found, form))
    if found.interrupted:
        explain("interrupted")
        return 130
    if not found.rows:
        explain(lacking_text(found))
        return 1
    return 0

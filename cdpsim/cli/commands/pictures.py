"""Commands that draw: timelines, the paper's figures, devices at one slot, memory, traffic and steps over time."""

import argparse
from functools import partial
from pathlib import Path

from cdpsim.cli.commands.options import (
    RUN_OPTIONS,
    STAGES,
    number_of_runs,
    option_arguments,
    output_arguments,
    request_arguments,
    runs_argument,
)
from cdpsim.cli.commands.requests import check_output, in_slots, options_of, trace_of, traces_of
from cdpsim.cli.commands.superpose import curve_arguments
from cdpsim.cli.parser import argument, command
from cdpsim.errors import choose, whole_number
from cdpsim.export import pictures
from cdpsim.files.units import seconds

_FILE = output_arguments("the picture to write: .svg, .png or .pdf")
_RUN = (option_arguments(RUN_OPTIONS), request_arguments())
_TRACE = partial(
    argument,
    "schedule",
    metavar="NAME",
    help="a schedule (`cdpsim schedules` lists them), an experiment file, or a folder that `cdpsim simulate` wrote",
)


@command(
    "timeline",
    *(_TRACE(), STAGES),
    *output_arguments(
        "the file to write: a picture .svg .png .pdf, a page to explore .html, a Perfetto trace .json, "
        "torch's order .csv"
    ),
    argument(
        "--style",
        metavar="STYLE",
        help="of a picture: paper, as the paper's Fig. 1 (default in slots), or gantt, a lane per device and link "
        "(default with a model or cluster)",
    ),
    argument("--dependencies", action="store_true", help="show in a gantt who waits for whom"),
    *_RUN,
)
def timeline_command(args: argparse.Namespace) -> int:
    """Draw when every task runs, or write it for a browser or Perfetto."""
    settings = {"style": args.style, "dependencies": args.dependencies, "force": args.force}
    trace = partial(trace_of, args, args.schedule)
    check_output(args.output, partial(pictures.check_timeline, args.output, **settings), [trace])
    pictures.write_timeline(trace(), args.output, **settings)
    return 0


@command(
    "figure",
    argument(
        "number", metavar="K", help="1: timelines of DP, CDP-v1, CDP-v2; 2: devices at one slot; 4: memory per worker"
    ),
    *_FILE,
    argument(
        "-n",
        nargs="+",
        metavar="N",
        help="stages, and micro-batches (default 3, the paper's); of figure 4 workers, one number or several "
        "(default 4 8 32, the paper's)",
    ),
    argument("--steps", metavar="T", help="training steps shown in figure 1 (default: as in the paper)"),
    argument("--slot", metavar="S", help="the slot of figure 2 (default: one in which most is held)"),
    *curve_arguments("of figure 4: ", axis=None, contents=None),
)
def figure_command(args: argparse.Namespace) -> int:
    """Draw the paper's figure K for any N."""
    pictures.write_figure(
        args.number,
        args.output,
        n=None if args.n is None else [whole_number("n", n, at_least=1) for n in args.n],
        steps=None if args.steps is None else whole_number("steps", args.steps, at_least=1),
        slot=None if args.slot is None else whole_number("slot", args.slot, at_least=0),
        axis=args.axis,
        contents=args.contents,
        force=args.force,
    )
    return 0


@command(
    "snapshot",
    *(_TRACE(), STAGES),
    *_FILE,
    argument(
        "--slot", required=True, metavar="S", help="the slot, from 0; with a model or cluster a moment, such as '12 ms'"
    ),
    *_RUN,
)
def snapshot_command(args: argparse.Namespace) -> int:
    """Draw the devices at one slot: what they do, hold and exchange."""
    if not Path(args.schedule).is_dir():  # in a folder, times may be slots or seconds
        options = options_of(args, args.schedule)
        _read_moment(args.slot, slots=in_slots(options) and options.get("cluster", "unit") == "unit")
    run = partial(trace_of, args, args.schedule)
    check_output(args.output, partial(pictures.check_picture, args.output, force=args.force), [run])
    trace = run()
    pictures.write_snapshot(trace, _read_moment(args.slot, slots=trace.in_slots), args.output, force=args.force)
    return 0


def _read_moment(text: str, *, slots: bool) -> float:
    """Return the slot, or the seconds, that a text says."""
    return whole_number("slot", text, at_least=0) if slots else seconds(text)


@command(
    "plot",
    argument("what", metavar="WHAT", help="memory, traffic, versions or steps"),
    *(_TRACE(nargs="+"), STAGES),
    runs_argument("draw steps between their quantiles"),
    *_FILE,
    *_RUN,
)
def plot_command(args: argparse.Namespace) -> int:
    """Draw memory, traffic, versions or steps over time, of one schedule or of several."""
    choose("plot", args.what, pictures.PLOTS)
    runs = number_of_runs(args)
    check = partial(pictures.check_plot, args.what, args.output, runs=runs, force=args.force)
    check_output(args.output, check, [partial(trace_of, args, name) for name in args.schedule])
    traces = traces_of(args, args.schedule)
    pictures.write_plot(args.what, traces, args.output, runs=runs, force=args.force)
    return 0

"""Commands that draw: timelines, the paper's figures, devices at one slot, memory, traffic and steps over time."""

import argparse
from functools import partial
from pathlib import Path

from cdpsim.cli.arguments import (
    RUN_OPTIONS,
    SCHEDULE,
    STAGES,
    check_output,
    look_arguments,
    look_of,
    number_of_runs,
    option_arguments,
    options_of,
    output_arguments,
    request_arguments,
    runs_argument,
    trace_of,
    traces_of,
)
from cdpsim.cli.parser import argument, command
from cdpsim.cli.table_commands import curve_arguments
from cdpsim.draw.canvas import PICTURE_ENDINGS
from cdpsim.draw.palette import COLOURINGS
from cdpsim.draw.plots import FIGURES
from cdpsim.errors import choose, whole_number
from cdpsim.export import pictures
from cdpsim.files.units import seconds
from cdpsim.studies.equal_shapes import in_slots

_FILE = output_arguments(f"the picture to write: {PICTURE_ENDINGS}")
_RUN = (look_arguments, option_arguments(RUN_OPTIONS), request_arguments())
_TRACE = partial(
    SCHEDULE,
    help="a schedule (`cdpsim schedules` lists them), an experiment file, or a folder that `cdpsim simulate` wrote",
)


@command(
    "timeline",
    *(_TRACE(nargs="+"), STAGES),
    *output_arguments(
        "the file to write: a picture .svg .png .pdf .pgf, a page to explore .html, a Perfetto trace .json, "
        "torch's order .csv"
    ),
    argument(
        "--style",
        metavar="STYLE",
        choices=pictures.STYLES,
        help="of a picture: paper, as in the paper's Fig. 1 (default for its nine schedules in slots), or gantt, "
        "a lane for each device (default for all others)",
    ),
    argument(
        "--colour", metavar="WHAT", choices=COLOURINGS, help="of a gantt's blocks: kind (default), micro-batch or stage"
    ),
    argument("--links", action="store_true", help="show in a gantt the messages of every link"),
    argument("--dependencies", action="store_true", help="show in a gantt which task waits for which"),
    *_RUN,
)
def timeline_command(args: argparse.Namespace) -> int:
    """Draw when every task runs: a picture, of several schedules too, a page, a trace."""
    settings = {option: getattr(args, option) for option in ("style", "colour", "links", "dependencies", "force")}
    settings["look"] = look_of(args)
    check = partial(pictures.check_timeline, args.output, len(args.schedule), **settings)
    check_output(args.output, check, [partial(trace_of, args, name) for name in args.schedule])
    one = len(args.schedule) == 1
    traces = [trace_of(args, args.schedule[0])] if one else traces_of(args, args.schedule)
    steps = None if args.steps is None else whole_number("steps", args.steps, at_least=1)
    pictures.write_timeline(traces, args.output, steps=steps, **settings)
    return 0


@command(
    "figure",
    argument(
        "number",
        metavar="K",
        choices=FIGURES,
        help="1: timelines of DP, CDP-v1, CDP-v2; 2: devices at one slot; 4: memory per worker",
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
    look_arguments,
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
        by_layer=args.by_layer or None,
        look=look_of(args),
        force=args.force,
    )
    return 0


@command(
    "snapshot",
    *(_TRACE(), STAGES),
    *_FILE,
    argument(
        "--slot",
        metavar="S",
        help="the slot, from 0; with a model or cluster a moment, such as '12 ms' (default: the one at which most is "
        "held)",
    ),
    *_RUN,
)
def snapshot_command(args: argparse.Namespace) -> int:
    """Draw what devices do, hold and send at one slot."""
    if args.slot is not None and not Path(args.schedule).is_dir():  # in a folder, times may be slots or seconds
        options = options_of(args, args.schedule)
        _read_moment(args.slot, slots=in_slots(options) and options.get("cluster", "unit") == "unit")
    run = partial(trace_of, args, args.schedule)
    settings = {"look": look_of(args), "force": args.force}
    check_output(args.output, partial(pictures.check_picture, args.output, **settings), [run])
    trace = run()
    slot = None if args.slot is None else _read_moment(args.slot, slots=trace.in_slots)
    pictures.write_snapshot(trace, slot, args.output, **settings)
    return 0


def _read_moment(text: str, *, slots: bool) -> float:
    """Return the slot, or the seconds, that a text says."""
    return whole_number("slot", text, at_least=0) if slots else seconds(text)


@command(
    "plot",
    argument("what", metavar="WHAT", choices=pictures.PLOTS, help="memory, traffic, versions or steps"),
    *(_TRACE(nargs="+"), STAGES),
    runs_argument("draw steps between their quantiles"),
    argument("--sum", action="store_true", help="memory of several: all devices together (default: the fullest one)"),
    *_FILE,
    *_RUN,
)
def plot_command(args: argparse.Namespace) -> int:
    """Draw memory, traffic, versions or steps over time."""
    choose("plot", args.what, pictures.PLOTS)
    settings = {"runs": number_of_runs(args), "sums": args.sum, "look": look_of(args), "force": args.force}
    check = partial(pictures.check_plot, args.what, args.output, **settings)
    check_output(args.output, check, [partial(trace_of, args, name) for name in args.schedule])
    traces = traces_of(args, args.schedule)
    pictures.write_plot(args.what, traces, args.output, **settings)
    return 0

"""Commands that draw: timelines, the paper's figures, devices at one slot, memory, traffic and steps over time."""

import argparse
from functools import partial
from pathlib import Path

from cdpsim.cli.commands.options import (
    RUN_WORDS,
    STAGES,
    number_of_runs,
    output,
    request_options,
    runs_option,
    word_options,
)
from cdpsim.cli.commands.requests import check_output, in_slots, trace_of, traces_of, words_of
from cdpsim.cli.commands.superpose import curve_options
from cdpsim.cli.parser import argument, command
from cdpsim.errors import choose, whole_number
from cdpsim.export import pictures
from cdpsim.files.units import seconds

_FILE = output("the picture to write: .svg, .png or .pdf")
_RUN = (word_options(RUN_WORDS), request_options())
_TRACE = partial(
    argument,
    "schedule",
    metavar="NAME",
    help="a schedule (`cdpsim schedules` lists them), an experiment file, or a folder that `cdpsim simulate` wrote",
)


@command(
    "timeline",
    *(_TRACE(), STAGES),
    *output(
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
def timeline_command(options: argparse.Namespace) -> int:
    """Draw when every task runs, or write it for a browser or Perfetto."""
    settings = {"style": options.style, "dependencies": options.dependencies, "force": options.force}
    trace = partial(trace_of, options, options.schedule)
    check_output(options.output, partial(pictures.check_timeline, options.output, **settings), [trace])
    pictures.write_timeline(trace(), options.output, **settings)
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
    *curve_options("of figure 4: ", axis=None, contents=None),
)
def figure_command(options: argparse.Namespace) -> int:
    """Draw the paper's figure K for any N."""
    pictures.write_figure(
        options.number,
        options.output,
        n=None if options.n is None else [whole_number("n", n, at_least=1) for n in options.n],
        steps=None if options.steps is None else whole_number("steps", options.steps, at_least=1),
        slot=None if options.slot is None else whole_number("slot", options.slot, at_least=0),
        axis=options.axis,
        contents=options.contents,
        force=options.force,
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
def snapshot_command(options: argparse.Namespace) -> int:
    """Draw the devices at one slot: what they do, hold and exchange."""
    if not Path(options.schedule).is_dir():  # in a folder, times may be slots or seconds
        words = words_of(options, options.schedule)
        _read_moment(options.slot, slots=in_slots(words) and words.get("cluster", "unit") == "unit")
    run = partial(trace_of, options, options.schedule)
    check_output(options.output, partial(pictures.check_picture, options.output, force=options.force), [run])
    trace = run()
    pictures.write_snapshot(
        trace, _read_moment(options.slot, slots=trace.in_slots), options.output, force=options.force
    )
    return 0


def _read_moment(text: str, *, slots: bool) -> float:
    """Return the slot, or the seconds, that a text says."""
    return whole_number("slot", text, at_least=0) if slots else seconds(text)


@command(
    "plot",
    argument("what", metavar="WHAT", help="memory, traffic, versions or steps"),
    *(_TRACE(nargs="+"), STAGES),
    runs_option("draw steps between their quantiles"),
    *_FILE,
    *_RUN,
)
def plot_command(options: argparse.Namespace) -> int:
    """Draw memory, traffic, versions or steps over time, of one schedule or of several."""
    choose("plot", options.what, pictures.PLOTS)
    runs = number_of_runs(options)
    check = partial(pictures.check_plot, options.what, options.output, runs=runs, force=options.force)
    check_output(options.output, check, [partial(trace_of, options, name) for name in options.schedule])
    traces = traces_of(options, options.schedule)
    pictures.write_plot(options.what, traces, options.output, runs=runs, force=options.force)
    return 0

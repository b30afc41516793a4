"""What is drawn: timelines, the paper's figures, devices at one slot, memory, traffic and steps over time."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from cdpsim.cli import help
from cdpsim.cli.commands.options import (
    add_output,
    add_request,
    add_run,
    add_runs,
    all_traced,
    in_slots,
    refuse_output,
    runs_of,
    traced,
    words_of,
)
from cdpsim.cli.commands.superpose import add_curve
from cdpsim.cli.console import add_command

PICTURES = ".svg, .png or .pdf"


def add_timeline(commands: Any) -> None:
    """Add the command that draws one run over time."""
    about = "draw when everything runs, or write it for a browser or Perfetto"
    parser = add_command(commands, "timeline", _serve_timeline, about, help.TIMELINE)
    _add_names(parser, None)
    forms = "a picture .svg .png .pdf, a page to explore .html, a Perfetto trace .json, torch's order .csv"
    add_output(parser, forms)
    parser.add_argument(
        "--style",
        metavar="STYLE",
        help="of a picture: paper, as the paper's Fig. 1 (default in slots), or gantt, a lane per device and link "
        "(default with a model or cluster)",
    )
    parser.add_argument("--dependencies", action="store_true", help="show in a gantt who waits for whom")
    _add_asked(parser)


def _serve_timeline(options: argparse.Namespace) -> int:
    from cdpsim.export import pictures

    drawn = {"style": options.style, "dependencies": options.dependencies, "force": options.force}
    trace = partial(traced, options, options.schedule)
    refuse_output(options.output, partial(pictures.check_timeline, options.output, **drawn), [trace])
    pictures.write_timeline(trace(), options.output, **drawn)
    return 0


def add_figure(commands: Any) -> None:
    """Add the command that draws the paper's figures."""
    about = "the paper's figure K for any N"
    parser = add_command(commands, "figure", _serve_figure, about, help.FIGURE)
    parser.add_argument(
        "number", metavar="K", help="1: timelines of DP, CDP-v1, CDP-v2; 2: devices at one slot; 4: memory per worker"
    )
    add_output(parser, PICTURES)
    parser.add_argument(
        "-n",
        nargs="+",
        metavar="N",
        help="stages, and micro-batches (default 3, the paper's); of figure 4 workers, one number or several "
        "(default 4 8 32, the paper's)",
    )
    parser.add_argument("--steps", metavar="T", help="training steps shown in figure 1 (default: as in the paper)")
    parser.add_argument("--slot", metavar="S", help="the slot of figure 2 (default: one in which most is held)")
    add_curve(parser, "of figure 4: ")


def _serve_figure(options: argparse.Namespace) -> int:
    from cdpsim.errors import whole_number
    from cdpsim.export import pictures

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


def add_snapshot(commands: Any) -> None:
    """Add the command that draws the devices at one slot."""
    about = "draw the devices at one slot: what they do, hold and exchange"
    parser = add_command(commands, "snapshot", _serve_snapshot, about, help.SNAPSHOT)
    _add_names(parser, None)
    add_output(parser, PICTURES)
    parser.add_argument(
        "--slot", required=True, metavar="S", help="the slot, from 0; with a model or cluster a moment, such as '12 ms'"
    )
    _add_asked(parser)


def _serve_snapshot(options: argparse.Namespace) -> int:
    from cdpsim.export import pictures

    if not Path(options.schedule).is_dir():  # whose times may be either
        words = words_of(options, options.schedule)
        _moment(options.slot, in_slots=in_slots(words) and words.get("cluster", "unit") == "unit")
    run = partial(traced, options, options.schedule)
    refuse_output(options.output, partial(pictures.check_picture, options.output, force=options.force), [run])
    trace = run()
    pictures.write_snapshot(trace, _moment(options.slot, in_slots=trace.in_slots), options.output, force=options.force)
    return 0


def _moment(given: str, *, in_slots: bool) -> float:
    """Read a slot, or a time."""
    from cdpsim.errors import whole_number
    from cdpsim.files import units

    return whole_number("slot", given, at_least=0) if in_slots else units.seconds(given)


def add_plot(commands: Any) -> None:
    """Add the command that draws memory, traffic and versions over time."""
    about = "draw memory, traffic, versions or steps over time, of one schedule or of several"
    parser = add_command(commands, "plot", _serve_plot, about, help.PLOT)
    parser.add_argument("what", metavar="WHAT", help="memory, traffic, versions or steps")
    _add_names(parser, "+")
    add_runs(parser, "draw steps between their quantiles")
    add_output(parser, PICTURES)
    _add_asked(parser)


def _serve_plot(options: argparse.Namespace) -> int:
    from cdpsim.errors import choose
    from cdpsim.export import pictures

    choose("plot", options.what, pictures.PLOTS)
    runs = runs_of(options)
    check = partial(pictures.check_plot, options.what, options.output, runs=runs, force=options.force)
    refuse_output(options.output, check, [partial(traced, options, name) for name in options.schedule])
    traces = all_traced(options, options.schedule)
    pictures.write_plot(options.what, traces, options.output, runs=runs, force=options.force)
    return 0


def _add_names(parser: argparse.ArgumentParser, how_many: str | None) -> None:
    """Of what to draw; what is asked of runs stands behind it."""
    parser.add_argument(
        "schedule",
        nargs=how_many,
        metavar="NAME",
        help="a schedule (`cdpsim schedules` lists them), an experiment file, or a folder that `cdpsim simulate` wrote",
    )
    parser.add_argument("-n", metavar="N", help="stages (default: as many as the model has)")


def _add_asked(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_request(parser)

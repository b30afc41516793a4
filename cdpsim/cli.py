"""The command line of cdpsim."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cdpsim import help
from cdpsim.console import add_command, dispatch, parser_of, run, say, write
from cdpsim.errors import RequestError

if TYPE_CHECKING:
    from cdpsim.trace import Trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return its exit code."""
    return run(_serve, arguments)


def _serve(arguments: list[str]) -> int:
    parser, commands = parser_of("cdpsim", help.ABOUT, help.EXAMPLES)
    for add in (_add_schedules, _add_table1, _add_simulate, _add_pyramid):
        add(commands)
    return dispatch(parser, commands, arguments)


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="text", metavar="FORM", help="text (default), json, csv, markdown or latex")


def _add_run(parser: argparse._ActionsContainer, steps: str | None = "3") -> None:
    """Options that every command that runs schedules takes."""
    default = steps or "until they repeat"
    parser.add_argument("--steps", default=steps, metavar="T", help=f"training steps to simulate (default {default})")
    parser.add_argument(
        "--engine", default="auto", metavar="ENGINE", help="auto (default), fast or simpy; both give the same times"
    )
    parser.add_argument(
        "--collective",
        default="recursive-doubling",
        metavar="NAME",
        help="how all-reduces run: recursive-doubling (default), ring or tree",
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="refuse to start what would take more memory on this machine, such as '8 GB' (default: what is free)",
    )


def _add_schedules(commands: Any) -> None:
    about = "every schedule by name, one line each"
    parser = add_command(commands, "schedules", _serve_schedules, about, help.SCHEDULES)
    _add_format(parser)


def _serve_schedules(options: argparse.Namespace) -> int:
    from cdpsim import tables
    from cdpsim.schedules import SCHEDULES

    form = tables.check_format(options.format)
    header = ("schedule", "order", "placement", "rule", "state", "options", "about")
    rows = [
        (s.name, s.order.name, s.placement.name, s.rule.name, s.state.value, s.options, s.about)
        for s in SCHEDULES.values()
    ]
    if form == "json":
        write(tables.as_json([dict(zip(header, row, strict=True)) for row in rows]))
    else:
        write(tables.FORMATS[form](header, [(*row[:5], " ".join(row[5]), row[6]) for row in rows]))
    return 0


def _add_table1(commands: Any) -> None:
    about = "the paper's Table 1 for any N: paper | exact | simulated"
    parser = add_command(commands, "table1", _serve_table1, about, help.TABLE1)
    parser.add_argument("-n", required=True, metavar="N", help="stages, and micro-batches")
    _add_run(parser)
    parser.add_argument(
        "--shared-parameters",
        action="store_true",
        help="single-*: all micro-batches use one copy of the parameters (default: a copy each, from a stage's "
        "forward to its backward)",
    )
    _add_format(parser)


def _serve_table1(options: argparse.Namespace) -> int:
    from cdpsim import table1_forms, tables
    from cdpsim.table1 import compute

    form = tables.check_format(options.format)
    table = compute(
        options.n,
        steps=options.steps,
        collective=options.collective,
        shared_parameters=options.shared_parameters,
        engine=options.engine,
        max_memory=options.max_memory,
    )
    write(table1_forms.FORMS[form](table))
    disagreeing = [row["schedule"] for row in table.rows if not row["agree"]]
    if disagreeing:
        say(f"exact and simulated disagree: {', '.join(disagreeing)}")
    return 1 if disagreeing else 0


def _add_simulate(commands: Any) -> None:
    about = "run one schedule and write its traces"
    parser = add_command(commands, "simulate", _serve_simulate, about, help.SIMULATE)
    parser.add_argument("schedule", metavar="NAME", help="a schedule; `cdpsim schedules` lists them")
    parser.add_argument("-n", metavar="N", help="stages (default: as many as the model has)")
    parser.add_argument("-o", required=True, metavar="DIR", dest="output", help="the folder to write into")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    _add_run(parser)
    parser.add_argument("--seed", default="0", metavar="S", help="recorded with the run (default 0); nothing is random")
    parser.add_argument(
        "--check", action="store_true", help="check every invariant of the run before writing; exit 1 if one fails"
    )
    _add_schedule(parser)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    """What runs where: the model, the cluster, and options that change a schedule if it takes them."""
    parser.add_argument("--model", default="unit", metavar="NAME|FILE", help="unit (default), or a .toml or .json file")
    parser.add_argument(
        "--cluster", default="unit", metavar="NAME|FILE", help="unit (default), or a .toml or .json file"
    )
    parser.add_argument(
        "--ignore-memory", action="store_true", help="run although a device would need more than it has"
    )
    group = parser.add_argument_group(
        "options that change the schedule (`cdpsim schedules` says which one takes which)"
    )
    group.add_argument(
        "--rule",
        metavar="RULE",
        help="which parameters are read: dp, cdp-v1, cdp-v2, or a CSV file of 0 and 1 where 1 in row i, column j lets "
        "micro-batch i read the newest parameters of stage j (default: the schedule's own)",
    )
    group.add_argument("-m", metavar="M", help="micro-batches (default N)")
    group.add_argument("--chunks", default="1", metavar="V", help="stages per device (default 1)")
    group.add_argument(
        "--prefetch", default="0", metavar="K", help="let parameters arrive K tasks before their reader (default 0)"
    )
    group.add_argument(
        "--slot-order",
        metavar="ORDER",
        help="what a device does first if a slot has several tasks for it: forward-first (default) or backward-first",
    )


def _simulated(options: argparse.Namespace, steps: str | int, seed: str = "0") -> "Trace":
    """Run what the options of `_add_run` and `_add_schedule` ask for."""
    from cdpsim.simulate import simulate, whole

    if options.n is None and options.model == "unit":
        raise RequestError("-n", "is missing; give the number of stages, or a --model file that says it")
    return simulate(
        options.schedule,
        None if options.n is None else whole("n", options.n, at_least=1),
        m=None if options.m is None else whole("m", options.m, at_least=1),
        chunks=whole("chunks", options.chunks, at_least=1),
        steps=whole("steps", steps, at_least=1),
        rule=options.rule,
        engine=options.engine,
        prefetch=whole("prefetch", options.prefetch, at_least=0),
        slot_order=options.slot_order,
        model=options.model,
        cluster=options.cluster,
        collective=options.collective,
        seed=whole("seed", seed, at_least=0),
        ignore_memory=options.ignore_memory,
        max_memory=options.max_memory,
    )


def _serve_simulate(options: argparse.Namespace) -> int:
    from cdpsim import files
    from cdpsim.invariants import INVARIANTS, violations
    from cdpsim.trace import FILES

    files.check_writable(options.output, FILES, options.force)
    trace = _simulated(options, options.steps, options.seed)
    if options.check and trace.run is not None:
        found = violations(trace.run)
        for name, problem in found.items():
            say(f"{name.replace('_', ' ')}: {problem}")
        if found:
            return 1
        say(f"{len(INVARIANTS)} invariants hold")
    trace.save(options.output, force=options.force)
    return 0


def _add_pyramid(commands: Any) -> None:
    about = "how many devices each stage needs: count, bound, certificate"
    parser = add_command(commands, "pyramid", _serve_pyramid, about, help.PYRAMID)
    parser.add_argument(
        "schedule", nargs="?", default="mp-cdp", metavar="NAME", help="whose timing (default mp-cdp: the paper's)"
    )
    parser.add_argument("-n", metavar="N", help="stages (default: as many as the model has)")
    _add_run(parser, steps=None)
    _add_schedule(parser)
    _add_format(parser)


def _serve_pyramid(options: argparse.Namespace) -> int:
    from cdpsim import tables
    from cdpsim.pyramid import pyramid, settled

    form = tables.check_format(options.format)
    if options.steps is None:
        result = pyramid(settled(lambda steps: _simulated(options, steps)))
    else:
        result = pyramid(_simulated(options, options.steps))
    if form == "json":
        write(tables.as_json(result))
        return 0
    header = ("stage", "devices", "bound", "overlap", "path cover")
    keys = ("stage", "devices", "bound", "overlap", "path_cover")
    rows = [[stage[key] for key in keys] for stage in result["stages"]]
    sums = [sum(column) if None not in column else None for column in list(zip(*rows, strict=True))[1:]]
    rows = [["-" if cell is None else str(cell) for cell in row] for row in [*rows, ["all", *sums]]]
    write(tables.FORMATS[form](header, rows))
    return 0

"""From which bandwidth on schedules hide their messages."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cdpsim.cli import help
from cdpsim.cli.commands.options import InPart, add_format, add_request, add_run, asked, in_slots, refuse_output
from cdpsim.cli.console import add_command, write

if TYPE_CHECKING:
    from cdpsim.studies.breakeven import StepCurve

OVER = ("n", "bandwidth")
PREFETCH = "1"  # what arrives just in time is never hidden
UNITS = {
    "free": "s",
    "step": "s",
    "bandwidth": "B/s",
    "break_even": "B/s",
    "exposed": "%",
    "latency": "%",
    "factor": "x",
}


def add_breakeven(commands: Any) -> None:
    """Add the command that says from which bandwidth on communication is hidden."""
    about = "bandwidth from which on communication is hidden, by schedule"
    parser = add_command(commands, "breakeven", _serve_breakeven, about, help.BREAKEVEN)
    parser.add_argument("schedules", nargs="*", metavar="NAME", help="schedules (default: all that send anything)")
    parser.add_argument("-n", nargs="+", metavar="N", help="stages, one number or several (default: the model's)")
    parser.add_argument("--share", default="0.01", metavar="S", help="of a step that may stay exposed (default 0.01)")
    parser.add_argument(
        "--over", default="n", metavar="WHAT", help="rows of the table: n (default), or bandwidth, points of the curve"
    )
    parser.add_argument("-o", metavar="FILE", dest="output", help="draw the curves: .svg, .png or .pdf")
    parser.add_argument("--force", action="store_true", help="overwrite a file that exists")
    add_run(parser)
    add_request(parser, must_fit=False, prefetch=PREFETCH)
    add_format(parser)


def _serve_breakeven(options: argparse.Namespace) -> int:
    from cdpsim import presets
    from cdpsim.errors import RequestError, choose
    from cdpsim.export import pictures
    from cdpsim.files import tables
    from cdpsim.front import runner_on_clusters, simulate
    from cdpsim.schedules import SCHEDULES
    from cdpsim.studies.breakeven import bandwidth_factors, find_break_even, step_times_at

    form = tables.check_format(options.format, tables.DATA_FORMATS)
    choose("over", options.over, OVER)
    for name in options.schedules:
        choose("schedule", name, SCHEDULES)
    words = asked(options)
    if words.get("cluster", "unit") == "unit":
        raise RequestError("--cluster", "is missing; its bandwidths are what is varied (`cdpsim clusters` lists some)")
    cluster = presets.find_cluster(words["cluster"])
    share = _share(options.share)
    served = InPart()
    requests = _requests(options, words)
    if options.output is not None:
        check = partial(pictures.check_picture, options.output, force=options.force)
        refuse_output(options.output, check, [partial(served.served, one, simulate) for one in requests])
    unasked = () if "prefetch" in words else ("prefetch",)
    runs = [served.served(one, runner_on_clusters, unasked=unasked) for one in requests]
    each = [(find_break_even(run, cluster, share), run) for run in runs]
    served.tell()
    found = [one for one, _ in each]
    factors, last = bandwidth_factors(found), found[-1].n
    curves: list[StepCurve] = []
    if options.over == "bandwidth" or options.output is not None:
        wanted = [(one, run) for one, run in each if one.n == last or options.over == "bandwidth"]
        curves = [(one, step_times_at(run, cluster, factors)) for one, run in wanted]
    if options.output is not None:
        shown = [(one, steps) for one, steps in curves if one.n == last]
        pictures.write_breakeven(found, factors, shown, options.output, share=share, force=options.force)
    rows = [one.to_builtins() for one in found] if options.over == "n" else _points(curves, factors)
    cell = _number if form == "csv" else _cell
    write(tables.as_json(rows) if form == "json" else tables.FORMATS[form](*_table(rows, cell)))
    return 0


def _share(text: str) -> float:
    from cdpsim.errors import RequestError
    from cdpsim.studies.breakeven import MOST_SHARE

    try:
        share = float(text)
    except ValueError:
        share = 0
    if not 1e-6 <= share <= MOST_SHARE:
        problem = f"{text[:40]!r} is not a number between 0.000001 and {MOST_SHARE}; give for example 0.01"
        raise RequestError("--share", problem)
    return share


def _numbers(options: argparse.Namespace) -> list[int | None]:
    from cdpsim.errors import RequestError, whole_number

    numbers = [whole_number("n", n, at_least=1) for n in options.n or ()]
    if len(set(numbers)) < len(numbers):
        raise RequestError("n", "has one number twice; give each once")
    return [*sorted(numbers)] or [None]


def _requests(options: argparse.Namespace, words: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The words of each schedule's request with each number of stages; files are read once, however many these are."""
    from cdpsim.presets import find_model
    from cdpsim.schedules import SCHEDULES, TABLE_1

    names = options.schedules or [name for name in TABLE_1 if not SCHEDULES[name].placement.lanes]
    model = {} if in_slots(words) else {"model": find_model(words["model"])}
    numbers = [{} if n is None else {"n": n} for n in _numbers(options)]
    plain = {"prefetch": PREFETCH} | {word: value for word, value in words.items() if word != "n"} | model
    return [plain | {"schedule": name} | n for n in numbers for name in names]


def _points(curves: Sequence["StepCurve"], factors: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each point of each curve."""
    return [
        {
            **{name: getattr(one, name) for name in ("schedule", "rule", "n", "m", "devices")},
            "factor": factor,
            "bandwidth": None if one.bandwidth is None else factor * one.bandwidth,
            "step": step,
            "exposed": max(0.0, 1 - one.free / step),
        }
        for one, steps in curves
        for factor, step in zip(factors, steps, strict=True)
    ]


def _table(rows: Sequence[dict[str, Any]], cell: Callable[[str, Any], Any]) -> tuple[list[str], list[list[Any]]]:
    """Return the header, and the rows with their values as `cell` has them."""
    header = [name.replace("_", "-") for name in rows[0]]
    return header, [[cell(name, value) for name, value in row.items()] for row in rows]


def _number(_: str, value: Any) -> Any:
    """Return a value as programs read it."""
    return value


def _cell(name: str, value: Any) -> str:
    """Write a value for people."""
    from quantiphy import Quantity

    unit = UNITS.get(name)
    if value is None:
        return "-" if name == "bandwidth" else "never"
    if unit is None:
        return str(value)
    if name in ("break_even", "factor") and value == 0:
        return "any"
    if unit == "%":
        return f"{100 * value:.1f} %"
    return f"{value:.4g}" if unit == "x" else str(Quantity(value, unit).render(prec=3))

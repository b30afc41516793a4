"""Pictures and exports as files: traces and a file's name in, the file out; the name's ending picks its form."""

from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from cdpsim.draw import canvas, plots
from cdpsim.draw.canvas import AS_DRAWN, Look
from cdpsim.draw.palette import COLOURINGS
from cdpsim.errors import RequestError, choose
from cdpsim.files.notes import ticker
from cdpsim.files.tables import as_json
from cdpsim.files.writing import check_writable, write_file
from cdpsim.request import Request
from cdpsim.schedules import find_schedule
from cdpsim.schedules.actions import Actions, write_actions
from cdpsim.studies.plan import Plan
from cdpsim.trace import Trace

STYLES = ("paper", "gantt")
EXPORTS = {".html": "page", ".json": "chrome"}  # the module of each, and its function
ORDER = ".csv"  # of a pipeline, as torch reads it
TIMELINES = (*canvas.PICTURE_FORMS, *EXPORTS)
COMPARISONS = ("bars", "points")
PLAN_TABLES = (".csv", ".json")
PLOTS = ("memory", "traffic", "versions", "steps")
FIGURE_OPTIONS = {"steps": "1", "slot": "2", "axis": "4", "contents": "4", "by_layer": "4"}  # and the figure of each


def check_picture(
    path: str | Path, *, look: Look = AS_DRAWN, force: bool = False, known: Iterable[str] = canvas.PICTURE_FORMS
) -> None:
    """Refuse early a file of no known form, that does not take its look, or that cannot be written."""
    ending = canvas.check_form(path, known)
    if look.given and ending not in canvas.PICTURE_FORMS:
        raise RequestError(look.given[0], f"is of {canvas.PICTURE_ENDINGS}, not of {ending}; leave it out")
    if look.dpi is not None and ending != ".png":
        raise RequestError("dpi", f"is of .png; {ending} has no dots; leave it out")
    check_writable(path, force=force)


check_plan = partial(check_picture, known=(*canvas.PICTURE_FORMS, *PLAN_TABLES))


def write_timeline(
    traces: Trace | Sequence[Trace],
    path: str | Path,
    *,
    style: str | None = None,
    colour: str | None = None,
    links: bool = False,
    dependencies: bool = False,
    steps: int | None = None,
    look: Look = AS_DRAWN,
    force: bool = False,
) -> None:
    """Draw the timeline of a run, or of several below each other with one clock.

    `style` (of a picture) is "paper", the default of the paper's nine schedules in the slot model, or "gantt", that of
    all others. A gantt is coloured by "kind", "micro-batch" or "stage" (`colour`), with `links` it has the rows of
    messages, with `dependencies` lines to each task from its dependencies. It shows the first `steps` training steps,
    by default one where steps are flushed. .html is a page to explore, of one run or of two; .json opens in Perfetto,
    and .csv is a pipeline's order as torch reads it: each is of one run.
    """
    several = [traces] if isinstance(traces, Trace) else list(traces)
    options: dict[str, Any] = {"colour": colour, "links": links, "dependencies": dependencies}
    check_timeline(path, len(several), style=style, look=look, force=force, **options)
    ending = Path(path).suffix.lower()
    if ending == ORDER:
        write_actions(_order(several[0]), path, force=force)
    elif ending in EXPORTS:
        export = import_module(f"cdpsim.export.{EXPORTS[ending]}")
        write_file(path, getattr(export, EXPORTS[ending])(*several), force=force)
    else:
        style = style or plots.timeline_style(several, gantt=any(options.values()))
        asked = options | {"links": links or None, "style": style, "steps": steps if style == "gantt" else None}
        write_picture("timeline", several, path=path, look=look, force=force, **asked)


def check_timeline(
    path: str | Path,
    schedules: int = 1,
    *,
    style: str | None = None,
    look: Look = AS_DRAWN,
    force: bool = False,
    **options: Any,
) -> None:
    """Refuse early all that `write_timeline` would refuse for any traces."""
    if Path(path).suffix.lower() == ".pftrace":
        raise RequestError(str(path), "its form is not written; end its name in .json, which opens in Perfetto")
    known = (*TIMELINES, ORDER)
    ending = canvas.check_form(path, known)
    if style is not None:
        choose("style", style, STYLES)
    if options.get("colour") is not None:
        choose("colour", options["colour"], COLOURINGS)
    if ending not in canvas.PICTURE_FORMS:
        if style is not None:
            raise RequestError("style", f"is of {canvas.PICTURE_ENDINGS}, not of {ending}; leave it out")
        if schedules > (2 if ending == ".html" else 1):
            most = "two at most" if ending == ".html" else "one"
            raise RequestError("schedules", f"are {schedules}, of which a {ending} has {most}; name fewer")
    for option in (option for option, value in options.items() if value):
        if style == "paper" or ending not in canvas.PICTURE_FORMS:
            raise RequestError(option, f"is of --style gantt in {canvas.PICTURE_ENDINGS}; leave it out")
    check_picture(path, look=look, force=force, known=known)


def write_figure(
    number: str | int,
    path: str | Path,
    *,
    n: int | Sequence[int] | None = None,
    look: Look = AS_DRAWN,
    force: bool = False,
    **options: Any,
) -> None:
    """Draw the paper's Fig. 1 (timelines of DP, CDP-v1, CDP-v2), 2 (devices at one slot) or 4 (memory per worker).

    `n` is 3 by default; for figure 4, several: 4, 8 and 32. `FIGURE_OPTIONS` lists the other options.
    """
    number = choose("figure", str(number), plots.FIGURES)
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if number != FIGURE_OPTIONS.get(option):
            raise RequestError(option, f"figure {number} does not take this option; leave it out")
    numbers = [n] if isinstance(n, int) else list(n or ())
    if number != "4" and len(numbers) > 1:
        raise RequestError("n", f"figure {number} is of one n, not of {len(numbers)}; give one")
    own = [numbers] if numbers and number == "4" else numbers
    check_picture(path, look=look, force=True)
    try:
        check_writable(path, force=force)
    except RequestError:
        plots.draw_picture(f"figure {number}", *own, look=look, **given)  # a wrong n or slot is reported first
        raise
    write_picture(f"figure {number}", *own, path=path, look=look, force=force, **given)


def write_snapshot(
    trace: Trace, slot: float | None, path: str | Path, *, look: Look = AS_DRAWN, force: bool = False
) -> None:
    """Draw the devices at one slot, or at one moment in seconds: what they do, hold and exchange.

    Without a slot it is the one at which most activations are held.
    """
    write_picture("snapshot", [trace], path=path, look=look, force=force, slot=slot)


def write_plot(
    what: str,
    traces: Sequence[Trace],
    path: str | Path,
    *,
    runs: int | None = None,
    sums: bool = False,
    look: Look = AS_DRAWN,
    force: bool = False,
) -> None:
    """Draw memory, traffic or versions over time, of one run in detail or of several on the same axes; or steps.

    Memory of several is that of the fullest device of each, or with `sums` of all devices together.

    Steps are how long each training step takes, in each trace or in `runs` runs of its request.
    """
    check_plot(what, path, runs=runs, sums=sums, look=look, force=force)
    if sums and len(traces) == 1:
        raise RequestError("sum", "is of several runs; the picture of one has the sum and each device; leave it out")
    settings: dict[str, Any] = {"sums": sums} if what == "memory" else {"runs": runs} if what == "steps" else {}
    write_picture(what, traces, path=path, look=look, force=force, **settings)


def check_plot(
    what: str,
    path: str | Path,
    *,
    runs: int | None = None,
    sums: bool = False,
    look: Look = AS_DRAWN,
    force: bool = False,
) -> None:
    """Refuse early all that `write_plot` would refuse for any traces."""
    if choose("plot", what, PLOTS) != "steps" and runs is not None:
        raise RequestError("runs", f"are drawn by `plot steps`, not by `plot {what}`; leave them out")
    if what != "memory" and sums:
        raise RequestError("sum", f"is of `plot memory`, not of `plot {what}`; leave it out")
    check_picture(path, look=look, force=force)


def write_plan(plan: Plan, path: str | Path, *, look: Look = AS_DRAWN, force: bool = False) -> None:
    """Draw a plan; or write it as .json, or all of its candidates as .csv, each with its fate."""
    check_plan(path, look=look, force=force)
    ending = Path(path).suffix.lower()
    if ending == ".csv":
        write_file(path, [plan.candidates.printed("csv")], force=force)
    elif ending == ".json":
        write_file(path, [as_json(plan.to_builtins(candidates=True))], force=force)
    else:
        write_picture("plan", plan, path=path, look=look, force=force)


def write_picture(what: str, *given: Any, path: str | Path, look: Look, force: bool, **settings: Any) -> None:
    """Write the picture of that name: "bars" or "points" of a comparison, "breakeven" of its results and curves."""
    check_picture(path, look=look, force=force)
    done: Any = ticker(2, "draw")
    figure = plots.draw_picture(what, *given, look=look, **settings)
    done(1)
    write_file(path, [canvas.rendered(figure, path, look)], force=force)
    done(0)


def _order(trace: Trace) -> Actions:
    """Return the order of a trace; the request of a loaded one may be anything."""
    try:
        return step_actions(trace)
    except RequestError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError):
        problem = "the request in its summary cannot be served; simulate the schedule again"
        raise RequestError("timeline", problem) from None


def step_actions(trace: Trace) -> Actions:
    """Return the actions of each device of a replica in a training step; refuse a schedule without such lists."""
    request = trace.request
    schedule = find_schedule(request["schedule"])
    if request.get("counts"):
        raise RequestError("timeline", "its steps have unlike numbers of micro-batches; a .csv is of one step alone")
    if schedule.order.lists is None or not schedule.order.together:
        problem = f"{schedule.name} has no order of a step alone; a .csv is of a pipeline that flushes"
        raise RequestError("timeline", problem)
    return schedule.actions(request.shape if isinstance(request, Request) else Request.from_builtins(request).shape)

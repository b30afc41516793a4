"""Pictures and exports as files: traces and a file's name in, the file out; the name's ending picks its form."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdpsim.draw import canvas
from cdpsim.errors import RequestError, choose
from cdpsim.files.progress import ticker
from cdpsim.files.writing import check_writable, write_file
from cdpsim.front import step_actions
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.table import write_actions
from cdpsim.studies.breakeven import BreakEven, StepCurve
from cdpsim.studies.compare import Measured
from cdpsim.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = ("paper", "gantt")
EXPORTS = (".html", ".json")
ORDER = ".csv"  # of a pipeline, as torch reads it
TIMELINES = (*canvas.PICTURE_FORMS, *EXPORTS)
COMPARISONS = ("bars", "points")
PLOTS = ("memory", "traffic", "versions", "steps")
FIGURES = ("1", "2", "4")
FIGURE_OPTIONS = {"steps": "1", "slot": "2", "axis": "4", "contents": "4"}  # and the one figure that takes each


def write_timeline(
    trace: Trace, path: str | Path, *, style: str | None = None, dependencies: bool = False, force: bool = False
) -> None:
    """Draw what a run does over time.

    `style` (for .svg, .png and .pdf) is "paper", the default in the slot model, or "gantt", the default with real
    costs; `dependencies` adds to a gantt what each task waits for. .html is a page to explore, .json opens in
    Perfetto, and .csv is a pipeline's order as torch reads it.
    """

    def draw() -> "Figure":
        from cdpsim.draw.gantt import gantt
        from cdpsim.draw.paper import paper

        is_gantt = style == "gantt" or dependencies or not (style or trace.in_slots)
        return gantt(trace, dependencies) if is_gantt else paper([trace])

    check_timeline(path, style=style, dependencies=dependencies, force=force)
    ending = Path(path).suffix.lower()
    if ending == ORDER:
        write_actions(_order(trace), path, force=force)
    elif ending in EXPORTS:
        write_file(path, _exported(trace, ending), force=force)
    else:
        _write(draw, path, force)


def check_timeline(
    path: str | Path, *, style: str | None = None, dependencies: bool = False, force: bool = False
) -> None:
    """Refuse early what `write_timeline` would refuse of any trace."""
    if Path(path).suffix.lower() == ".pftrace":
        raise RequestError(str(path), "its form is not written; end its name in .json, which opens in Perfetto")
    ending = canvas.check_form(path, (*TIMELINES, ORDER))
    if style is not None:
        choose("style", style, STYLES)
    if style is not None and ending not in canvas.PICTURE_FORMS:
        raise RequestError("style", f"is of .svg, .png and .pdf, not of {ending}; leave it out")
    if dependencies and (style == "paper" or ending not in canvas.PICTURE_FORMS):
        raise RequestError("dependencies", "are drawn by --style gantt in .svg, .png and .pdf; leave them out")
    check_writable(path, force=force)


def check_picture(path: str | Path, *, force: bool = False) -> None:
    """Refuse early a file that is no picture or cannot be written."""
    canvas.check_form(path)
    check_writable(path, force=force)


def write_figure(
    number: str | int,
    path: str | Path,
    *,
    n: int | Sequence[int] | None = None,
    steps: int | None = None,
    slot: int | None = None,
    axis: str | None = None,
    contents: str | None = None,
    force: bool = False,
) -> None:
    """Draw the paper's Fig. 1 (timelines of DP, CDP-v1, CDP-v2), 2 (devices at one slot) or 4 (memory per worker).

    `n` is 3 by default; for figure 4, several: 4, 8 and 32.
    """
    number = choose("figure", str(number), FIGURES)
    options = {"steps": steps, "slot": slot, "axis": axis, "contents": contents}
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if number != FIGURE_OPTIONS[option]:
            raise RequestError(option, f"figure {number} does not take this option; leave it out")
    numbers = [n] if isinstance(n, int) else list(n or ())
    if number != "4" and len(numbers) > 1:
        raise RequestError("n", f"figure {number} is of one n, not of {len(numbers)}; give one")
    draw = partial(_figure, number, *([numbers] if numbers and number == "4" else numbers), **given)
    canvas.check_form(path)
    try:
        check_writable(path, force=force)
    except RequestError:
        with canvas.defaults():
            draw()  # a wrong n or slot is reported first, and takes no long run
        raise
    _write(draw, path, force)


def _figure(number: str, *n: Any, **options: Any) -> "Figure":
    """Draw a figure of the paper."""
    from cdpsim.draw.figure_4 import figure_4
    from cdpsim.draw.paper import figure_1
    from cdpsim.draw.snapshot import figure_2

    figures: dict[str, Callable[..., Figure]] = {"1": figure_1, "2": figure_2, "4": figure_4}
    return figures[number](*n, **options)


def write_snapshot(trace: Trace, slot: float, path: str | Path, *, force: bool = False) -> None:
    """Draw the devices at one slot, or at one moment in seconds: what they do, hold and exchange."""

    def draw() -> "Figure":
        from cdpsim.draw.snapshot import snapshot

        return snapshot(trace, slot)

    check_picture(path, force=force)
    _write(draw, path, force)


def write_plot(
    what: str, traces: Sequence[Trace], path: str | Path, *, runs: int | None = None, force: bool = False
) -> None:
    """Draw memory, traffic or versions over time, of one run in detail or of several on the same axes; or steps.

    Steps are how long each training step takes, in each trace or in so many `runs` of its request.
    """

    def draw() -> "Figure":
        from cdpsim.draw import curves

        plots: dict[str, Callable[[Sequence[Trace]], Figure]] = {
            "memory": curves.memory_over_time,
            "traffic": curves.traffic_over_time,
            "versions": curves.versions_over_time,
            "steps": partial(curves.step_durations, runs=runs),
        }
        return plots[what](traces)

    check_plot(what, path, runs=runs, force=force)
    _write(draw, path, force)


def check_plot(what: str, path: str | Path, *, runs: int | None = None, force: bool = False) -> None:
    """Refuse early what `write_plot` would refuse of any traces."""
    if choose("plot", what, PLOTS) != "steps" and runs is not None:
        raise RequestError("runs", f"are drawn by `plot steps`, not by `plot {what}`; leave them out")
    check_picture(path, force=force)


def write_comparison(
    measured: Sequence[Measured], path: str | Path, *, in_slots: bool, style: str = "bars", force: bool = False
) -> None:
    """Draw schedules side by side, as bars; or as points, bubble over memory."""

    def draw() -> "Figure":
        from cdpsim.draw.comparison import bubble_over_memory, comparison_bars

        picture = bubble_over_memory if style == "points" else comparison_bars
        return picture(measured, in_slots=in_slots)

    choose("style", style, COMPARISONS)
    check_picture(path, force=force)
    _write(draw, path, force)


def write_breakeven(
    results: Sequence[BreakEven],
    factors: Sequence[float],
    curves: Sequence[StepCurve],
    path: str | Path,
    *,
    share: float,
    force: bool = False,
) -> None:
    """Draw the exposed communication over bandwidth, and over N the bandwidth from which messages are hidden."""

    def draw() -> "Figure":
        from cdpsim.draw.break_even_curves import break_even_curves

        return break_even_curves(results, factors, curves, share=share)

    check_picture(path, force=force)
    _write(draw, path, force)


def _order(trace: Trace) -> Actions:
    """Return the order of a trace; the request of a loaded one may be anything."""
    try:
        return step_actions(trace)
    except RequestError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError):
        problem = "the request in its summary cannot be served; simulate the schedule again"
        raise RequestError("timeline", problem) from None


def _exported(trace: Trace, ending: str) -> Iterable[bytes]:
    from cdpsim.export.chrome import chrome
    from cdpsim.export.page import page

    return page(trace) if ending == ".html" else chrome(trace)


def _write(draw: "Callable[[], Figure]", path: str | Path, force: bool) -> None:
    """Write what `draw` draws; it imports all that imports matplotlib, whose own settings do not count inside."""
    done: Any = ticker(2, "draw")
    with canvas.defaults():
        drawn = draw()
        done(1)
        content = canvas.rendered(drawn, path)
    write_file(path, [content], force=force)
    done(0)

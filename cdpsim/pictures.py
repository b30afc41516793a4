"""The front door of pictures: traces and a file's name in, the file out; the name's ending picks its form."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cdpsim.draw import canvas
from cdpsim.errors import RequestError, choose
from cdpsim.files.progress import ticker
from cdpsim.files.writing import check_writable, write_file
from cdpsim.front import step_actions
from cdpsim.schedules.actions import Actions
from cdpsim.schedules.table import write_actions
from cdpsim.studies.breakeven import BreakEven
from cdpsim.studies.compare import Measured
from cdpsim.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = ("paper", "gantt")
EXPORTS = (".html", ".json", ".pftrace")
ORDER = ".csv"  # of a pipeline, as torch reads it
TIMELINES = (*canvas.FORMS, *EXPORTS)
COMPARISONS = ("bars", "points")
PLOTS = ("memory", "traffic", "versions", "steps")
FIGURES = ("1", "2", "4")


def timeline(
    trace: Trace, path: str | Path, *, style: str | None = None, dependencies: bool = False, force: bool = False
) -> None:
    """Draw what a run does over time.

    `style` (for .svg, .png and .pdf) is "paper", the default in the slot model, or "gantt", the default with real
    costs; `dependencies` adds who waits for whom to a gantt. .html is a page to explore, .json and .pftrace open in
    Perfetto, and .csv is a pipeline's order as torch reads it.
    """
    check_timeline(path, style=style, dependencies=dependencies, force=force)
    ending = Path(path).suffix.lower()
    if ending == ORDER:
        write_actions(_order(trace), path, force=force)
        return
    if ending in EXPORTS:
        write_file(path, _exporter(ending)(trace), force=force)
        return
    if style == "gantt" or dependencies or not (style or trace.in_slots):
        from cdpsim.draw.gantt import gantt

        _write(lambda: gantt(trace, dependencies=dependencies), path, force)
    else:
        from cdpsim.draw.paper import paper

        _write(lambda: paper([trace]), path, force)


def check_timeline(
    path: str | Path, *, style: str | None = None, dependencies: bool = False, force: bool = False
) -> None:
    """Refuse early what `timeline` would refuse whatever the trace."""
    ending = canvas.check_form(path, (*TIMELINES, ORDER))
    if style is not None:
        choose("style", style, STYLES)
    if style is not None and ending not in canvas.FORMS:
        raise RequestError("style", f"is of .svg, .png and .pdf, not of {ending}; leave it out")
    if dependencies and (style == "paper" or ending not in canvas.FORMS):
        raise RequestError("dependencies", "are drawn by --style gantt in .svg, .png and .pdf; leave them out")
    if ending == ".pftrace":
        from cdpsim.export import protobuf

        protobuf.messages()
    check_writable(path, force=force)


def check_picture(path: str | Path, *, force: bool = False) -> None:
    """Refuse early what `figure`, `snapshot` and `plot` would refuse whatever is asked."""
    canvas.check_form(path)
    check_writable(path, force=force)


def figure(
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
    for option, value, takes in (
        ("steps", steps, "1"),
        ("slot", slot, "2"),
        ("axis", axis, "4"),
        ("contents", contents, "4"),
    ):
        if value is not None and number != takes:
            raise RequestError(option, f"figure {number} does not take this option; leave it out")
    numbers = [n] if isinstance(n, int) else list(n or ())
    if number != "4" and len(numbers) > 1:
        raise RequestError("n", f"figure {number} is of one n, not of {len(numbers)}; give one")
    draw = _figure(number, numbers, steps, slot, axis, contents)
    canvas.check_form(path)
    try:
        check_writable(path, force=force)
    except RequestError:
        with canvas.defaults():
            draw()  # which may refuse what is asked for, and takes no long run
        raise
    _write(draw, path, force)


def _figure(
    number: str, numbers: Sequence[int], steps: int | None, slot: int | None, axis: str | None, contents: str | None
) -> Callable[[], "Figure"]:
    """Return how to draw a figure of the paper."""
    if number == "4":
        return partial(_figure_4, numbers, axis, contents)
    first = numbers[0] if numbers else 3
    if number == "1":
        from cdpsim.draw.paper import figure_1

        return partial(figure_1, first) if steps is None else partial(figure_1, first, steps=steps)
    from cdpsim.draw.snapshot import figure_2

    return partial(figure_2, first, slot=slot)


def _figure_4(numbers: Sequence[int], axis: str | None, contents: str | None) -> "Figure":
    from cdpsim.draw.superposed import PAPER_N, figure_4

    axis, contents = "flops" if axis is None else axis, "activations" if contents is None else contents
    return figure_4(numbers or PAPER_N, axis=axis, contents=contents)


def snapshot(trace: Trace, slot: float, path: str | Path, *, force: bool = False) -> None:
    """Draw the devices at one slot, or at one moment in seconds: what they do, hold and exchange."""
    from cdpsim.draw import snapshot as drawing

    check_picture(path, force=force)
    _write(lambda: drawing.snapshot(trace, slot), path, force)


def plot(what: str, traces: Sequence[Trace], path: str | Path, *, runs: int | None = None, force: bool = False) -> None:
    """Draw memory, traffic or versions over time, of one run in detail or of several on the same axes; or steps.

    Steps are how long each training step takes, in each trace or in so many `runs` of its request.
    """
    from cdpsim.draw import curves

    check_plot(what, path, runs=runs, force=force)
    draw: dict[str, Callable[[Sequence[Trace]], Figure]]
    draw = {"memory": curves.memory, "traffic": curves.traffic, "versions": curves.versions}
    chosen = draw.get(what, partial(curves.step_times, runs=runs))
    _write(lambda: chosen(traces), path, force)


def check_plot(what: str, path: str | Path, *, runs: int | None = None, force: bool = False) -> None:
    """Refuse early what `plot` would refuse whatever the traces."""
    if choose("plot", what, PLOTS) != "steps" and runs is not None:
        raise RequestError("runs", f"are drawn by `plot steps`, not by `plot {what}`; leave them out")
    check_picture(path, force=force)


def compare(
    measured: Sequence[Measured], path: str | Path, *, in_slots: bool, style: str = "bars", force: bool = False
) -> None:
    """Draw schedules side by side, as bars; or as points, bubble over memory."""
    from cdpsim.draw.compared import compared
    from cdpsim.draw.traded import traded

    draw = traded if choose("style", style, COMPARISONS) == "points" else compared
    check_picture(path, force=force)
    _write(lambda: draw(measured, in_slots=in_slots), path, force)


def breakeven(
    found: Sequence[BreakEven],
    factors: Sequence[float],
    curves: Sequence[tuple[BreakEven, Sequence[float]]],
    path: str | Path,
    *,
    share: float,
    force: bool = False,
) -> None:
    """Draw what stays exposed over bandwidth, and from which one on messages are hidden, over N."""
    from cdpsim.draw.hidden import hidden

    check_picture(path, force=force)
    _write(lambda: hidden(found, factors, curves, share=share), path, force)


def _order(trace: Trace) -> Actions:
    """The order of a trace; the request of a loaded one may be anything."""
    try:
        return step_actions(trace)
    except RequestError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError):
        problem = "the request in its summary cannot be served; simulate the schedule again"
        raise RequestError("timeline", problem) from None


def _exporter(ending: str) -> Callable[[Trace], Iterable[bytes]]:
    if ending == ".html":
        from cdpsim.export.page import page

        return page
    if ending == ".json":
        from cdpsim.export.chrome import chrome

        return chrome
    from cdpsim.export.protobuf import protobuf

    return protobuf


def _write(draw: Callable[[], "Figure"], path: str | Path, force: bool) -> None:
    done = ticker(2, "draw")
    with canvas.defaults():
        drawn = draw()
        done(1)
        content = canvas.rendered(drawn, path)
    write_file(path, [content], force=force)
    done(0)

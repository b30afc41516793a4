"""Pictures of runs as figures of matplotlib: of their own, or in the axes of another figure."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from cdpsim.api import simulate
from cdpsim.draw import canvas
from cdpsim.draw.canvas import Look
from cdpsim.draw.views import Views
from cdpsim.errors import RequestError, choose, refuse_unknown, short_repr, suggestion
from cdpsim.model import UNIT_MODELS
from cdpsim.request import Request
from cdpsim.request.options import OPTION_NAMES, RENAMED
from cdpsim.schedules import TABLE_1, Schedule
from cdpsim.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Plotted = str | Schedule | Request | Trace


def plot(what: str, schedules: Plotted | Sequence[Plotted], ax: "Axes | None" = None, **options: Any) -> "Figure":
    """Return a picture of one schedule or run, or of several: timeline, memory, traffic, versions, steps or snapshot.

    Options are those of a request, of the picture (as of `Trace.plot`), and of its look (`draw.canvas.Look`).

    >>> plot("memory", ["multi-dp", "multi-cdp"], n=8, width="12 cm").axes[-1].get_xlabel()
    'time, slots'
    """
    items = [schedules] if isinstance(schedules, str | Schedule | Request | Trace) else list(schedules)
    asked = {name: options.pop(name) for name in (*OPTION_NAMES, *RENAMED) if name in options}

    def run(item: Plotted, **more: Any) -> Trace:
        return item if isinstance(item, Trace) else simulate(item, **asked | more)

    traces = list(map(run, items))
    if {str(trace.request.get("model")) for trace in traces}.issuperset(UNIT_MODELS):
        traces = [run(item, model=UNIT_MODELS[1]) for item in items]  # all backwards as long as split ones
    return draw_traces(what, traces, ax, **options)


def draw_traces(what: str, traces: Sequence[Trace], axes: "Axes | None" = None, **settings: Any) -> "Figure":
    """Return a picture of traces; in the axes of another figure, return that figure."""
    if what not in PICTURES:
        hint = suggestion(what, PICTURES) if isinstance(what, str) else "give a name"
        every = f"; there are {', '.join(PICTURES)}" * (not hint.startswith("known"))
        raise RequestError("plot", f"unknown plot {short_repr(what)}; {hint}{every}")
    if axes is not None:
        if not hasattr(axes, "get_figure"):
            raise RequestError("ax", f"{short_repr(axes)} is no Axes; take one of matplotlib's, such as plt.gca()")
        return _plot_into(axes, what, traces, settings)
    return _with_look(what, (traces,), settings, "plot")


def figure(number: int | str, n: int | Sequence[int] | None = None, **options: Any) -> "Figure":
    """Return the paper's figure 1, 2 or 4, for any n; options are those of `cdpsim figure`, and of its look.

    >>> len(figure(2, n=4).axes)
    1
    """
    number = choose("figure", str(number), FIGURES)
    numbers = [] if n is None else [list(n) if isinstance(n, Sequence) else [n]] if number == "4" else [n]
    return _with_look(f"figure {number}", numbers, options, "figure")


def draw_picture(what: str, *given: Any, look: Look, **settings: Any) -> "Figure":
    """Return a picture by its name, under matplotlib's own defaults, with a dark ground where that is asked for."""
    with canvas.defaults():
        figure = _painter(what)(*given, look=look, **settings)
        if look.dark:
            from cdpsim.draw.sheet import darken

            darken(figure)
    return figure


def _with_look(what: str, given: Sequence[Any], settings: dict[str, Any], function: str) -> "Figure":
    """Return a picture or figure with settings, of which some are of its look and the others its own."""
    names = {field.name for field in fields(Look)}
    look = Look(**{name: value for name, value in settings.items() if name in names})
    own = {name: value for name, value in settings.items() if name not in names}
    with canvas.defaults():  # which imports matplotlib
        parameters = signature(_painter(what)).parameters
    taken = [name for name in [*parameters][1:] if name not in ("look", "axes")]
    refuse_unknown(function, own, [*taken, *names])
    figure = draw_picture(what, *given, look=look, **own)
    # Notebooks show a figure that pyplot does not know, too.
    vars(figure)["_repr_png_"] = partial(canvas.rendered, figure, "figure.png", Look(dpi=96))
    return figure


def _plot_into(axes: "Axes", what: str, traces: Sequence[Trace], settings: dict[str, Any]) -> "Figure":
    """Draw traces into axes of another figure, under that figure's own settings; return that figure."""
    from cdpsim.draw import curves, step_times, version_strips
    from cdpsim.draw.gantt import gantt
    from cdpsim.draw.snapshot import snapshot

    draw: dict[str, Callable[..., Any]] = {
        "timeline": lambda trace, axes, **settings: gantt(trace, axes=axes, **settings),
        "memory": curves.memory_line,
        "traffic": curves.traffic_line,
        "versions": version_strips.draw_strips,
        "steps": step_times.steps_line,
        "snapshot": lambda trace, axes, slot=None: snapshot(trace, slot, axes=axes),
    }
    for trace in traces:
        draw[what](trace, axes, **settings)
    return canvas.figure_with(axes)


def timeline_style(traces: Sequence[Trace], *, gantt: bool) -> str:
    """Return the style of a timeline: the paper's for its nine schedules in slots, if nothing of a `gantt` is asked."""
    of_the_paper = all(trace.request.get("schedule") in TABLE_1 and Views(trace).in_cells for trace in traces)
    return "paper" if of_the_paper and not gantt else "gantt"


def _draw_timelines(
    traces: Sequence[Trace],
    *,
    style: str | None = None,
    colour: str | None = None,
    links: bool | None = None,
    dependencies: bool = False,
    steps: int | None = None,
    look: Look,
) -> "Figure":
    from cdpsim.draw.gantt import gantt
    from cdpsim.draw.paper import paper

    if (style or timeline_style(traces, gantt=bool(colour or links or dependencies or steps))) == "paper":
        return paper(traces, look=look)
    return gantt(traces, colour=colour or "kind", links=links, dependencies=dependencies, steps=steps, look=look)


def _draw_snapshot(traces: Sequence[Trace], *, slot: float | str | None = None, look: Look) -> "Figure":
    from cdpsim.draw.snapshot import snapshot

    if len(traces) != 1:
        raise RequestError("snapshot", f"is of one run, not of {len(traces)}; draw each")
    return snapshot(traces[0], slot, look=look)


# The functions that draw, imported late, as they import matplotlib: modules of `draw` and names in them.
_LATE = {
    "memory": ("curves", "memory_over_time"),
    "traffic": ("curves", "traffic_over_time"),
    "versions": ("version_strips", "versions_over_time"),
    "steps": ("step_times", "step_durations"),
    "figure 1": ("paper", "figure_1"),
    "figure 2": ("snapshot", "figure_2"),
    "figure 4": ("figure_4", "figure_4"),
    "bars": ("study_pictures", "comparison_bars"),
    "points": ("study_pictures", "bubble_over_memory"),
    "plan": ("study_pictures", "plan_picture"),
    "breakeven": ("study_pictures", "break_even_curves"),
    "mesh": ("study_pictures", "mesh_picture"),
}
PICTURES = ("timeline", "memory", "traffic", "versions", "steps", "snapshot")
FIGURES = ("1", "2", "4")


def _painter(what: str) -> Callable[..., "Figure"]:
    """Return the function that draws a picture."""
    if what in _LATE:
        module, name = _LATE[what]
        painter: Callable[..., Figure] = getattr(import_module(f"cdpsim.draw.{module}"), name)
        return painter
    return _draw_timelines if what == "timeline" else _draw_snapshot

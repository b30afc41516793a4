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
        figure: Figure = _imported(*_LATE[what])(*given, look=look, **settings)
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
        parameters = signature(_imported(*_LATE[what])).parameters
    taken = [name for name in [*parameters][1:] if name not in ("look", "axes")]
    refuse_unknown(function, own, [*taken, *names])
    figure = draw_picture(what, *given, look=look, **own)
    # Notebooks show a figure that pyplot does not know, too.
    vars(figure)["_repr_png_"] = partial(canvas.rendered, figure, "figure.png", Look(dpi=96))
    return figure


def _plot_into(axes: "Axes", what: str, traces: Sequence[Trace], settings: dict[str, Any]) -> "Figure":
    """Draw traces into axes of another figure, under that figure's own settings; return that figure."""
    draw = _imported(*_INTO_AXES[what])
    for trace in traces:
        draw(trace, axes=axes, **settings)
    return canvas.figure_with(axes)


def timeline_style(traces: Sequence[Trace], *, gantt: bool) -> str:
    """Return the style of a timeline: the paper's for its nine schedules in slots, if nothing of a `gantt` is asked."""
    of_the_paper = all(trace.request.get("schedule") in TABLE_1 and Views(trace).in_cells for trace in traces)
    return "paper" if of_the_paper and not gantt else "gantt"


# The functions that draw, imported late, as they import matplotlib: modules of `draw` and names in them.
_LATE = {
    "timeline": ("paper", "timelines"),
    "memory": ("curves", "memory_over_time"),
    "traffic": ("curves", "traffic_over_time"),
    "versions": ("version_strips", "versions_over_time"),
    "steps": ("step_times", "step_durations"),
    "snapshot": ("snapshot", "only_snapshot"),
    "figure 1": ("paper", "figure_1"),
    "figure 2": ("snapshot", "figure_2"),
    "figure 4": ("figure_4", "figure_4"),
    "bars": ("study_pictures", "comparison_bars"),
    "points": ("study_pictures", "bubble_over_memory"),
    "plan": ("study_pictures", "plan_picture"),
    "breakeven": ("study_pictures", "break_even_curves"),
    "mesh": ("study_pictures", "mesh_picture"),
}
_INTO_AXES = {
    "timeline": ("gantt", "gantt"),
    "memory": ("curves", "memory_line"),
    "traffic": ("curves", "traffic_line"),
    "versions": ("version_strips", "draw_strips"),
    "steps": ("step_times", "steps_line"),
    "snapshot": ("snapshot", "snapshot"),
}
PICTURES = tuple(_INTO_AXES)
FIGURES = ("1", "2", "4")


def _imported(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(f"cdpsim.draw.{module}"), name)
    return found

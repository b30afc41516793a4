"""Pictures of runs as figures of matplotlib: of their own, or in the axes of another figure."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from cdpsim.api import simulate
from cdpsim.draw import canvas
from cdpsim.draw.look import Look
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

    Options are those of a request, of the picture (as of `Trace.plot`), and of its look (`draw.look.Look`).

    >>> plot("memory", ["multi-dp", "multi-cdp"], n=8, width="12 cm").axes[0].get_xlabel()
    'time, slots'
    """
    items = [schedules] if isinstance(schedules, str | Schedule | Request | Trace) else list(schedules)
    asked = {name: options.pop(name) for name in (*OPTION_NAMES, *RENAMED) if name in options}
    return draw_traces(what, _on_one_clock(items, asked), ax, **options)


def _on_one_clock(items: Sequence[Plotted], options: dict[str, Any]) -> list[Trace]:
    """Return the traces of several items; in slots, all backwards take as long as split ones."""

    def run(item: Plotted, options: dict[str, Any]) -> Trace:
        return item if isinstance(item, Trace) else simulate(item, **options)

    traces = [run(item, options) for item in items]
    models = {str(trace.request.get("model")) for trace in traces}
    if not models.issuperset(UNIT_MODELS):
        return traces
    return [run(item, options | {"model": UNIT_MODELS[1]}) for item in items]


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
    return _with_look(partial(draw_picture, what, traces), settings, _DRAW[what], "plot")


def figure(number: int | str, n: int | Sequence[int] | None = None, **options: Any) -> "Figure":
    """Return the paper's figure 1, 2 or 4, for any n; options are those of `cdpsim figure`, and of its look.

    >>> len(figure(2, n=4).axes)
    1
    """
    number = choose("figure", str(number), _DRAW_FIGURE)
    numbers = [] if n is None else [list(n) if isinstance(n, Sequence) else [n]] if number == "4" else [n]
    return _with_look(partial(draw_figure, number, *numbers), options, _DRAW_FIGURE[number], "figure")


def draw_picture(what: str, traces: Sequence[Trace], *, look: Look, **settings: Any) -> "Figure":
    """Return a picture of traces, one of `PICTURES`, with a look; the settings are those that it has."""
    return drawn(partial(_DRAW[what], traces, look=look, **settings), look)


def draw_figure(number: str, *n: int | Sequence[int], look: Look, **settings: Any) -> "Figure":
    """Return a figure of the paper with a look; the settings are those that it has."""
    return drawn(partial(_DRAW_FIGURE[number], *n, look=look, **settings), look)


def drawn(draw: Callable[[], "Figure"], look: Look) -> "Figure":
    """Return what `draw` draws under matplotlib's own defaults, with a dark ground where that is asked for.

    `draw` itself imports all that imports matplotlib.
    """
    with canvas.defaults():
        figure = draw()
        if look.dark:
            from cdpsim.draw.dark import darken

            darken(figure)
    return figure


def _with_look(
    draw: Callable[..., "Figure"], settings: dict[str, Any], known: Callable[..., "Figure"], what: str
) -> "Figure":
    """Return what `draw` returns for settings, of which some are of the look and the others `known` to a picture."""
    names = {field.name for field in fields(Look)}
    look = Look(**{name: value for name, value in settings.items() if name in names})
    own = {name: value for name, value in settings.items() if name not in names}
    taken = [name for name, each in signature(known).parameters.items() if each.kind is Parameter.KEYWORD_ONLY]
    refuse_unknown(what, own, [*taken, *names])
    figure = draw(look=look, **own)
    vars(figure)["_repr_png_"] = partial(_png, figure)  # notebooks show a figure that pyplot does not know, too
    return figure


def _png(figure: "Figure") -> bytes:
    return canvas.rendered(figure, "figure.png", Look(dpi=96))


def _plot_into(axes: "Axes", what: str, traces: Sequence[Trace], settings: dict[str, Any]) -> "Figure":
    """Draw traces into axes of another figure, under that figure's own settings; return that figure."""
    from cdpsim.draw.curves import lines
    from cdpsim.draw.gantt import gantt
    from cdpsim.draw.snapshot import snapshot

    draw: dict[str, Callable[..., Any]] = {
        "timeline": lambda trace, axes, **settings: gantt(trace, axes=axes, **settings),
        "memory": lines.memory_line,
        "traffic": lines.traffic_line,
        "versions": lines.versions_strips,
        "steps": lines.steps_line,
        "snapshot": lambda trace, axes, slot=None: snapshot(trace, _moment_of(trace, slot), axes=axes),
    }
    for trace in traces:
        draw[what](trace, axes, **settings)
    return canvas.figure_with(axes)


def timeline_style(traces: Sequence[Trace], *, gantt: bool) -> str:
    """Return the style of a timeline: the paper's for its nine schedules in slots, if nothing of a `gantt` is asked."""
    of_the_paper = all(trace.request.get("schedule") in TABLE_1 and Views(trace).in_cells for trace in traces)
    return "paper" if of_the_paper and not gantt else "gantt"


def _plot_timeline(
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


def _plot_memory(traces: Sequence[Trace], *, sums: bool = False, look: Look) -> "Figure":
    from cdpsim.draw.curves import memory_over_time
    from cdpsim.draw.fit import fit_figure

    return fit_figure(memory_over_time(traces, sums=sums), look)


def _plot_traffic(traces: Sequence[Trace], *, look: Look) -> "Figure":
    from cdpsim.draw.curves import traffic_over_time
    from cdpsim.draw.fit import fit_figure

    return fit_figure(traffic_over_time(traces), look)


def _plot_versions(traces: Sequence[Trace], *, look: Look) -> "Figure":
    from cdpsim.draw.curves import versions_over_time
    from cdpsim.draw.fit import fit_figure

    return fit_figure(versions_over_time(traces), look)


def _plot_steps(traces: Sequence[Trace], *, runs: int | None = None, look: Look) -> "Figure":
    from cdpsim.draw.curves import step_durations
    from cdpsim.draw.fit import fit_figure

    return fit_figure(step_durations(traces, runs=runs), look)


def _plot_snapshot(traces: Sequence[Trace], *, slot: float | str | None = None, look: Look) -> "Figure":
    from cdpsim.draw.snapshot import snapshot

    if len(traces) != 1:
        raise RequestError("snapshot", f"is of one run, not of {len(traces)}; draw each")
    return snapshot(traces[0], _moment_of(traces[0], slot), look=look)


def _moment_of(trace: Trace, slot: float | str | None) -> float | str:
    """Return the moment of a snapshot: by default the one at which most activations are held."""
    from cdpsim.draw.moment import busiest_moment

    return busiest_moment(Views(trace)) if slot is None else slot


def _figure_1(n: int = 3, *, steps: int = 2, look: Look) -> "Figure":
    from cdpsim.draw.paper import figure_1

    return figure_1(n, steps, look=look)


def _figure_2(n: int = 3, *, slot: int | None = None, look: Look) -> "Figure":
    from cdpsim.draw.snapshot import figure_2

    return figure_2(n, slot, look=look)


def _figure_4(
    n: Sequence[int] | None = None,
    *,
    axis: str | None = None,
    contents: str | None = None,
    by_layer: bool | None = None,
    look: Look,
) -> "Figure":
    from cdpsim.draw.figure_4 import figure_4
    from cdpsim.draw.fit import fit_figure

    options: dict[str, Any] = {"n": n, "axis": axis, "contents": contents, "by_layer": by_layer}
    given = {name: value for name, value in options.items() if value is not None}
    return fit_figure(figure_4(width=look.inches_wide, **given), look)


_DRAW: dict[str, Callable[..., "Figure"]] = {
    "timeline": _plot_timeline,
    "memory": _plot_memory,
    "traffic": _plot_traffic,
    "versions": _plot_versions,
    "steps": _plot_steps,
    "snapshot": _plot_snapshot,
}
PICTURES = tuple(_DRAW)
_DRAW_FIGURE: dict[str, Callable[..., "Figure"]] = {"1": _figure_1, "2": _figure_2, "4": _figure_4}
FIGURES = tuple(_DRAW_FIGURE)

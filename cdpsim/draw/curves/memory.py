"""Memory over time: of one trace by category and device, of several on the same axes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdpsim.draw.curves import panels
from cdpsim.draw.curves.panels import Scale
from cdpsim.draw.curves.step_functions import Series, end_of_run, ends_of_devices, memory_of_devices, total_memory
from cdpsim.draw.palette import CATEGORY_COLOURS
from cdpsim.draw.views import held_in_steady_state
from cdpsim.program import Category
from cdpsim.request import MEMORY_LEAVES_OUT
from cdpsim.schedules import TABLE_1
from cdpsim.trace import Trace

# The paper counts activations: they are the lowest layer, so that its lines can be compared with them.
_MEMORY_LAYERS = panels.layers_of(
    (Category.ACTIVATIONS, Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.COMMUNICATION),
    CATEGORY_COLOURS,
)


def memory_over_time(traces: Sequence[Trace], *, sums: bool = False) -> Figure:
    """Draw the memory of devices over time.

    Of one trace the total by category, and each device; of several the activations of the fullest device of each, and
    all that the fullest device holds, or with `sums` all devices together.
    """
    panels.refuse_undrawable(traces)
    return _memory_of_one(traces[0]) if len(traces) == 1 else _memory_of_several(traces, sums=sums)


def _memory_of_one(trace: Trace) -> Figure:
    """Draw the total by category with the paper's levels, and each device."""
    scale, total, each = panels.scale_of([trace]), total_memory(trace), memory_of_devices(trace)
    ends = ends_of_devices(each, scale.end)
    title = "; ".join([panels.titles([trace])[0], *_held_later(trace, scale)])
    figure, (axes,) = panels.stacked_figure(title, scale, total, each, _MEMORY_LAYERS, "held", "", ends)
    heading = "Held by all devices together" if len(each) > 1 else "Held"
    _memory_panel(axes, _with_omissions(heading, scale), scale, [total], paper_levels([trace]))
    panels.mark_peak(axes, panels.peak(total), scale.peak(total), "peak")
    panels.fade(axes, min(ends.values(), default=scale.end), scale, "pale", "pale: devices have ended")
    return figure


def _held_later(trace: Trace, scale: Scale) -> list[str]:
    """Return words for what the fullest device holds in steady state, if the steps of a trace do not get there."""
    most = held_in_steady_state(trace)
    return [] if most is None else [f"in steady state a device holds {scale.amount(most)}"]


class Holder(NamedTuple):
    """The memory of a device over time, or of all devices together, and its name in a legend."""

    series: Series
    end: float
    name: str


def _memory_of_several(traces: Sequence[Trace], *, sums: bool) -> Figure:
    """Draw a curve for each trace, of activations in one panel and of everything in another."""
    title, names = panels.titles(traces)
    scale = panels.scale_of(traces)
    later = [_held_later(trace, scale) for trace in traces]
    figure, parts = panels.figure_of(title, [5.0 + 0.18 * (len(traces) + sum(map(len, later)))])
    above, below = parts[0].subplots(2, 1, sharex=True)
    whose, hold = ("all devices together", "hold") if sums else ("the fullest device", "holds")
    drawn = []
    for axes, gid, heading, rows, levels in (
        (above, "activations", f"Activations of {whose}", [Category.ACTIVATIONS], paper_levels(traces) if sums else {}),
        (below, "everything", _with_omissions(f"Everything that {whose} {hold}", scale), None, {}),
    ):
        holders = [holder_of(trace, rows, sums=sums) for trace in traces]
        _memory_panel(axes, heading, scale, [one.series for one in holders], levels)
        panels.draw_curves(axes, [one.series for one in holders], scale, gid, [one.end for one in holders])
        drawn.append([f"{gid} {scale.peak(one.series)}{one.name}" for one in holders])
    above.xaxis.label.set_visible(False)
    labels = [f"{name}: {'; '.join(words)}" for name, *words in zip(names, *drawn, strict=True)]
    panels.curve_legend(figure, scale, [";\n".join([one, *more]) for one, more in zip(labels, later, strict=True)])
    return figure


def holder_of(trace: Trace, rows: Sequence[int] | None = None, *, sums: bool = False) -> Holder:
    """Return the fullest device of a trace, by these categories or by all, or all of its devices together."""
    chosen = slice(None) if rows is None else list(rows)
    if sums:
        total = total_memory(trace)
        return Holder(total._replace(value=total.value[chosen]), end_of_run(trace), "")
    ends = ends_of_devices(memory_of_devices(trace), end_of_run(trace))
    each = {device: held._replace(value=held.value[chosen]) for device, held in memory_of_devices(trace).items()}
    fullest = max(each, key=lambda device: panels.peak(each[device])[1])
    return Holder(each[fullest], ends[fullest], f" on device {fullest}" if len(each) > 1 else "")


def _memory_panel(axes: Axes, heading: str, scale: Scale, totals: Sequence[Series], levels: Mapping[str, int]) -> None:
    """Set up the axes of totals, with named lines at levels."""
    most = max(*(panels.peak(total)[1] for total in totals), *levels.values(), 0)
    panels.panel(axes, heading, scale, most, "stages' worth" if scale.in_slots else "memory")
    for text, value in levels.items():
        panels.level(axes, value, text, f"level-{value}")


def _with_omissions(heading: str, scale: Scale) -> str:
    """Return a heading that says, of bytes, which memory is left out."""
    return heading if scale.in_slots else f"{heading}, {MEMORY_LEAVES_OUT}"


def paper_levels(traces: Sequence[Trace]) -> dict[str, int]:
    """Return the activations that all workers hold according to the paper, by their names: DP at its peak, CDP always.

    They are in stage-activations, of which BΨA is N. There are none where the paper says nothing of the requests.
    """
    requests = [trace.request for trace in traces]
    n = requests[0].get("n")
    alike = all(request.get("n") == n == request.get("m", n) for request in requests)
    alike &= all(request.get("schedule") in TABLE_1 for request in requests)
    if not (traces[0].in_slots and alike and isinstance(n, int) and 0 < n < 10**6):
        return {}
    dp, cdp = n * n, n * (n + 1) // 2
    return {f"N·BΨA = {dp:,}": dp, f"(N+1)/2·BΨA = {cdp:,}": cdp} if n > 1 else {"BΨA = 1": 1}

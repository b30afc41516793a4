"""Memory over time: of one trace by category and device, of several on the same axes."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdpsim.draw.curves import panels
from cdpsim.draw.curves.panels import Scale
from cdpsim.draw.curves.step_functions import Series, memory_of_devices, total_memory
from cdpsim.draw.palette import CATEGORY_COLOURS
from cdpsim.program import Category
from cdpsim.request.description import MEMORY_LEAVES_OUT
from cdpsim.schedules import TABLE_1
from cdpsim.trace import Trace

# The paper counts activations: they are the lowest layer, so that its lines can be compared with them.
_MEMORY_LAYERS = panels.layers_of(
    (Category.ACTIVATIONS, Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.COMMUNICATION),
    CATEGORY_COLOURS,
)


def memory_over_time(traces: Sequence[Trace]) -> Figure:
    """Draw the memory of devices over time.

    Of one trace the total by category, and each device; of several the totals of activations, and of everything.
    """
    panels.refuse_undrawable(traces)
    return _memory_of_one(traces[0]) if len(traces) == 1 else _memory_of_several(traces)


def _memory_of_one(trace: Trace) -> Figure:
    """Draw the total by category with the paper's levels, and each device."""
    scale, total, each = panels.scale_of([trace]), total_memory(trace), memory_of_devices(trace)
    figure, axes = panels.stacked_figure(panels.titles([trace])[0], scale, total, each, _MEMORY_LAYERS, "held", "")
    heading = "Held by all devices together" if len(each) > 1 else "Held"
    _memory_panel(axes, _with_omissions(heading, scale), scale, [total], paper_levels([trace]))
    panels.mark_peak(axes, panels.peak(total), scale.peak(total), "peak")
    return figure


def _memory_of_several(traces: Sequence[Trace]) -> Figure:
    """Draw a curve for each trace, of activations in one panel and of everything in another."""
    title, names = panels.titles(traces)
    scale, everything = panels.scale_of(traces), list(map(total_memory, traces))
    activations = [Series(total.time, total.value[[Category.ACTIVATIONS]]) for total in everything]
    figure, parts = panels.figure_of(title, [5.0 + 0.18 * len(traces)])
    above, below = parts[0].subplots(2, 1, sharex=True)
    _memory_panel(above, "Activations of all devices together", scale, activations, paper_levels(traces))
    panels.draw_curves(above, activations, scale, "activations")
    heading = _with_omissions("Everything that all devices hold together", scale)
    _memory_panel(below, heading, scale, everything, {})
    panels.draw_curves(below, everything, scale, "everything")
    above.set_xlabel("")
    texts = [
        f"{name}: activations {scale.peak(part)}; everything {scale.peak(total)}"
        for name, part, total in zip(names, activations, everything, strict=True)
    ]
    panels.curve_legend(figure, scale, texts)
    return figure


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

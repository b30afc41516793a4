"""Over time: memory of one trace by category and device, of several on the same axes; traffic, versions; steps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdpsim.draw.curves.flows import traffic
from cdpsim.draw.curves.panels import (
    Frame,
    check,
    figure_of,
    frame,
    legend,
    level,
    mark,
    names,
    panel,
    peak,
)
from cdpsim.draw.curves.piles import Look, by_device, curve, curve_entry, entries, height_of, pile
from cdpsim.draw.curves.series import Series, changes, devices, held, held_by
from cdpsim.draw.curves.step_times import step_times
from cdpsim.draw.curves.versions import versions
from cdpsim.draw.palette import CATEGORY_COLOURS
from cdpsim.program import Category
from cdpsim.request.description import MEMORY_LEAVES_OUT
from cdpsim.schedules import TABLE_1
from cdpsim.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["memory", "step_times", "traffic", "versions"]

# From below; what the paper counts comes first, so that its lines can be held against it.
_HATCHES = {
    Category.ACTIVATIONS: "",
    Category.PARAMETERS: "///",
    Category.GRADIENTS: "....",
    Category.OPTIMIZER: "xxx",
    Category.COMMUNICATION: "\\\\\\",
}
LOOKS = {int(part): Look(part.name.lower(), CATEGORY_COLOURS[part], hatch) for part, hatch in _HATCHES.items()}


def memory(traces: Sequence[Trace]) -> "Figure":
    """Draw what devices hold over time.

    Of one trace the total by category, and each device; of several the totals of activations, and of everything.
    """
    check(traces)
    return _one(traces[0]) if len(traces) == 1 else _several(traces)


def _one(trace: Trace) -> "Figure":
    shared, total, numbers = frame([trace]), held(trace), devices(trace).tolist()
    many = len(numbers) > 1
    figure, parts = figure_of(names([trace])[0], [2.7, *[height_of(len(numbers))] * many])
    axes, lines = parts[0].subplots(), levels([trace])
    panel(
        axes,
        _all("Held by all devices together" if many else "Held", shared),
        shared,
        max(peak(total)[1], *lines.values(), 0),
    )
    axes.set_ylabel(_what(shared))
    pile(axes, total, LOOKS, shared, "held")
    for text, value in lines.items():
        level(axes, value, text, f"level-{value}")
    mark(axes, peak(total), shared.peak(total), "peak")
    if many:
        found = changes(trace)
        by_device(parts[1], {device: held_by(found, device) for device in numbers}, LOOKS, shared, "held")
    legend(figure, entries(LOOKS, total))
    return figure


def _what(shared: Frame) -> str:
    return "stages' worth" if shared.in_slots else "memory"


def _all(words: str, shared: Frame) -> str:
    """Say what real memory that is not."""
    return words if shared.in_slots else f"{words}, {MEMORY_LEAVES_OUT}"


def levels(traces: Sequence[Trace]) -> dict[str, int]:
    """What the paper says that all workers hold of activations, DP at its peak and CDP always; where it says so.

    In stages' worth, of which BΨA is N.
    """
    requests = [trace.request for trace in traces]
    n = requests[0].get("n")
    alike = all(request.get("n") == n == request.get("m", n) for request in requests)
    alike &= all(request.get("schedule") in TABLE_1 for request in requests)
    if not (traces[0].in_slots and alike and isinstance(n, int) and 0 < n < 10**6):
        return {}
    dp, cdp = n * n, n * (n + 1) // 2
    return {f"N·BΨA = {dp:,}": dp, f"(N+1)/2·BΨA = {cdp:,}": cdp} if n > 1 else {"BΨA = 1": 1}


def _several(traces: Sequence[Trace]) -> "Figure":
    heading, own = names(traces)
    everything = [held(trace) for trace in traces]
    activations = [Series(each.time, each.value[[Category.ACTIVATIONS]]) for each in everything]
    figure, parts = figure_of(heading, [5.0 + 0.18 * len(traces)])
    above, below = parts[0].subplots(2, 1, sharex=True)
    shared, lines = frame(traces), levels(traces)
    _compared(above, "Activations of all devices together", shared, activations, lines)
    _compared(below, _all("Everything that all devices hold together", shared), shared, everything, {})
    above.set_xlabel("")
    words = [
        f"{name}: activations {shared.peak(some)}; everything {shared.peak(everyone)}"
        for name, some, everyone in zip(own, activations, everything, strict=True)
    ]
    legend(figure, [curve_entry(shared, k, text) for k, text in enumerate(words)], 1)
    return figure


def _compared(axes: "Axes", heading: str, shared: Frame, totals: Sequence[Series], lines: dict[str, int]) -> None:
    """A line for each trace, its peak marked."""
    panel(axes, heading, shared, max(*(peak(each)[1] for each in totals), *lines.values()))
    axes.set_ylabel(_what(shared))
    for text, value in lines.items():
        level(axes, value, text, f"level-{value}")
    for k, series in enumerate(totals):
        curve(axes, series, shared, k, len(totals), f"{heading.split()[0].lower()}-{k}")

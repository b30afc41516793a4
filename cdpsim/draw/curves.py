"""Memory over time: of one trace by category and device, of several traces on one pair of axes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdpsim.draw.palette import CATEGORIES
from cdpsim.draw.panels import Frame, check, figure_of, frame, legend, level, mark, names, panel, peak
from cdpsim.draw.piles import Look, by_device, curve, curve_entry, entries, height_of, pile
from cdpsim.draw.series import Series, changes, devices, held, held_by
from cdpsim.program import Category
from cdpsim.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

# From below; what the paper counts comes first, so that its lines can be held against it.
_HATCHES = {
    Category.ACTIVATIONS: "",
    Category.PARAMETERS: "//////",
    Category.GRADIENTS: "......",
    Category.OPTIMIZER: "xxxxx",
    Category.COMMUNICATION: "\\\\\\\\\\\\",
}
LOOKS = {int(part): Look(part.name.lower(), CATEGORIES[part], hatch) for part, hatch in _HATCHES.items()}


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
    panel(axes, "Held by all devices together" if many else "Held", shared, max(peak(total)[1], *lines.values(), 0))
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


def levels(traces: Sequence[Trace]) -> dict[str, int]:
    """What the paper says that all workers hold of activations: DP at its peak, CDP always; nothing where it says nothing."""
    requests = [trace.summary().get("request", {}) for trace in traces]
    n = requests[0].get("n")
    sizes = {(request.get("n"), request.get("m", n)) for request in requests}
    if not (traces[0].in_slots and isinstance(n, int) and 0 < n < 10**6 and sizes == {(n, n)}):
        return {}
    found = {f"N·N = {n * n:,}": n * n, f"N(N+1)/2 = {n * (n + 1) // 2:,}": n * (n + 1) // 2}
    return found if n > 1 else {"N·N = N(N+1)/2 = 1": 1}


def _several(traces: Sequence[Trace]) -> "Figure":
    heading, own = names(traces)
    everything = [held(trace) for trace in traces]
    activations = [Series(each.time, each.value[[Category.ACTIVATIONS]]) for each in everything]
    rows = -(-len(traces) // 2)
    figure, parts = figure_of(heading, [2.5 + 0.18 * rows] * 2)
    shared, lines = frame(traces), levels(traces)
    _compared(parts[0], "Activations of all devices together", shared, activations, own, lines)
    _compared(parts[1], "Everything that all devices hold together", shared, everything, own, {})
    return figure


def _compared(
    part: "SubFigure",
    heading: str,
    shared: Frame,
    totals: Sequence[Series],
    own: Sequence[str],
    lines: dict[str, int],
) -> None:
    """A line for each trace, its peak marked and given in the legend."""
    axes = part.subplots()
    panel(axes, heading, shared, max(*(peak(each)[1] for each in totals), *lines.values()), room=1.2)
    axes.set_ylabel(_what(shared))
    for text, value in lines.items():
        level(axes, value, text, f"level-{value}")
    gid = heading.split()[0].lower()
    for k, series in enumerate(totals):
        curve(axes, series, shared, k, len(totals), f"{gid}-{k}")
        mark(axes, peak(series), "", f"{gid}-peak-{k}")
    legend(part, [curve_entry(shared, k, f"{name}: {shared.peak(totals[k])}") for k, name in enumerate(own)], 2)

"""The paper's Fig. 2: the devices at one time step, what they compute, hold and send; of any run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cdpsim.draw import scene
from cdpsim.draw.canvas import GREY
from cdpsim.draw.sheet import SMALL, fitted, rows_of, sheet, width_of, write, write_key
from cdpsim.draw.snapshot.devices import Arrangement, Form, arrange, draw_devices
from cdpsim.draw.snapshot.key import device_entry, entries, stage_entry
from cdpsim.draw.snapshot.moment import Moment, busiest, look, served, time_of
from cdpsim.errors import RequestError, whole_number
from cdpsim.front import simulate
from cdpsim.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The groups of the paper's Fig. 2, each without and with CDP.
FIGURE_2 = (
    ("Single-GPU", "single-dp", "single-cdp"),
    ("Multi-GPU", "multi-dp", "multi-cdp"),
    ("DP with MP", "mp-dp", "mp-cdp"),
    ("PP", None, "pp-cdp"),
    ("ZeRO-DP", "zero-dp", "zero-cdp"),
)
_ROWS = ("with CDP", "without CDP")  # from below
_STEPS = 3  # of which the one in the middle is steady
_MOST_N = 8
_MOST_COLUMNS = _MOST_ROWS = 24

# All in points.
_THICKEST = 4.0
_LEAST_WIDTH = 241.0
_MARGIN = 5.0
_STAGES = 24.0  # for the numbers of stages, left of the devices
_GAP = 15.0
_HEAD = 15.0
_KEY_LINE = 13.0
_REMEDY = "use a smaller n, or an .html file of timeline"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


class _Panel(NamedTuple):
    """One run at its moment."""

    name: str
    moment: Moment
    arrangement: Arrangement


def snapshot(trace: Trace, slot: float | str) -> "Figure":
    """Draw the devices at one slot, or at one moment in seconds: what they compute, hold and send.

    Micro-batches, stages and devices are counted from 0, as in the files of a trace.
    """
    scene.refuse_empty(trace)
    now = time_of(trace, slot)
    arrangement = _arranged(trace)
    moment = look(trace, now)
    stacked = len(set(arrangement.column.values())) < len(arrangement.column)
    form = Form(46.0, 54.0 if stacked else 36.0, 9.5, _ring([moment]), first=0, strip=9.0)
    found = entries([moment], form, in_slots=trace.in_slots)
    found += [device_entry(trace.in_slots)] + ([] if arrangement.by_stage else [stage_entry()])
    room = arrangement.columns * form.pitch + _STAGES
    width = max(_LEAST_WIDTH, room + 2 * _MARGIN)
    keys = rows_of(found, width - 2 * _MARGIN)
    high = arrangement.rows * form.rise + form.strip + 3
    height = _HEAD + high + len(keys) * _KEY_LINE + 3 * _MARGIN
    figure, axes = sheet(width, height)
    said = f", time step {now}" if trace.in_slots else f", {_short(now, 's')}"
    words = fitted(scene.title(trace), width - 2 * _MARGIN - width_of(said, SMALL + 1), SMALL + 1) + said
    write(axes, _MARGIN, height - _HEAD / 2 - 1, words, SMALL + 1)
    bottom = height - _HEAD - high
    unit = "" if trace.in_slots else "B"
    feet = {device: f"{device}: {_short(moment.held.get(device, 0), unit)}" for device in moment.served}
    if arrangement.by_stage:
        _write_stages(axes, arrangement.rows, form, _MARGIN, bottom)
    draw_devices(axes, moment, arrangement, form, (width - room) / 2 + _STAGES, bottom, feet=feet)
    write_key(axes, _MARGIN, bottom - _MARGIN, keys, _KEY_LINE)
    return figure


def figure_2(n: int = 3, slot: int | None = None) -> "Figure":
    """Draw the paper's Fig. 2 for any n: implementations side by side, without CDP above and with it below.

    Each is shown at the same slot of its second training step, by default at one at which most activations are held.
    Stages and micro-batches are counted from 1, as in the paper.
    """
    n = whole_number("n", n, at_least=1)
    if n > _MOST_N:
        raise RequestError(
            "n", f"n={n}, but figure 2 has room for {_MOST_N} at most; use `cdpsim snapshot NAME` for one"
        )
    groups = [(title, _panel(with_cdp, n, slot), _panel(without, n, slot)) for title, without, with_cdp in FIGURE_2]
    panels = [panel for _, *pair in groups for panel in pair if panel is not None]
    moments = [panel.moment for panel in panels]
    form = Form(34.0, 34.0, 7.5, _ring(moments), first=1)
    letters = [f"({chr(ord('a') + k)}) {title}" for k, (title, _, _) in enumerate(groups)]
    widths = [
        max(width_of(letter), *(panel.arrangement.columns * form.pitch for panel in pair if panel))
        for letter, (_, *pair) in zip(letters, groups, strict=True)
    ]
    left, high = 2 * _MARGIN + _STAGES, n * form.rise
    width = left + sum(widths) + _GAP * (len(groups) - 1) + _MARGIN
    keys = rows_of(entries(moments, form, in_slots=True), width - 2 * _MARGIN)
    bottom = len(keys) * _KEY_LINE + 2 * _MARGIN
    height = bottom + 2 * high + _GAP + _HEAD + _MARGIN
    figure, axes = sheet(width, height)
    for k, words in enumerate(_ROWS):
        y = bottom + k * (high + _GAP)
        write(axes, _MARGIN + 3, y + high / 2, words, SMALL + 1, ha="center", va="center", rotation=90)
        _write_stages(axes, n, form, 2 * _MARGIN + 3, y)
    for letter, room, (_, *pair) in zip(letters, widths, groups, strict=True):
        write(axes, left + room / 2, height - _MARGIN - _HEAD / 2, letter, SMALL + 1, ha="center")
        for k, panel in enumerate(pair):
            if panel is not None:
                at = left + (room - panel.arrangement.columns * form.pitch) / 2, bottom + k * (high + _GAP)
                draw_devices(axes, panel.moment, panel.arrangement, form, *at, prefix=f"{panel.name}-")
        left += room + _GAP
    write_key(axes, _MARGIN, bottom - _MARGIN, keys, _KEY_LINE)
    return figure


def _panel(name: str | None, n: int, slot: int | None) -> _Panel | None:
    if name is None:
        return None
    trace = simulate(name, n, steps=_STEPS)
    now = busiest(trace) if slot is None else time_of(trace, slot)
    return _Panel(name, look(trace, now), arrange(served(trace)))


def _arranged(trace: Trace) -> Arrangement:
    """Find every device a place; refuse more than can be drawn."""
    found = served(trace)
    if len(found) > _MOST_COLUMNS * _MOST_ROWS:
        most = _MOST_COLUMNS * _MOST_ROWS
        raise RequestError("snapshot", f"has {len(found)} devices, of which {most} can be drawn; {_REMEDY}")
    arrangement = arrange(found)
    if arrangement.columns > _MOST_COLUMNS or arrangement.rows > _MOST_ROWS:
        raise RequestError(
            "snapshot",
            f"has {arrangement.columns} devices side by side and {arrangement.rows} rows of stages, of which "
            f"{_MOST_COLUMNS} and {_MOST_ROWS} can be drawn; {_REMEDY}",
        )
    return arrangement


def _ring(moments: Sequence[Moment]) -> float:
    """How thick a ring is for each activation, so that the thickest has room."""
    most = max((count for moment in moments for count in moment.activations.values()), default=1)
    return min(_THICKEST / 3, _THICKEST / most)


def _write_stages(axes: "Axes", rows: int, form: Form, left: float, bottom: float) -> None:
    """Number the rows where they are stages."""
    for row in range(rows):
        y = bottom + form.strip + (row + 0.5) * form.rise
        write(axes, left + _STAGES - 8, y, str(row + form.first), ha="right", color=GREY)
    y = bottom + form.strip + rows * form.rise / 2
    write(axes, left + 5, y, "stage", ha="center", va="center", rotation=90, color=GREY)


def _short(amount: float, unit: str) -> str:
    """An amount in three digits: 12.5 ms, 1.5 GB; without a unit as it is."""
    if not unit or not amount:
        return f"{amount} {unit}".strip()
    scale, prefix = next((pair for pair in _PREFIXES if amount >= pair[0]), _PREFIXES[-1])
    return f"{amount / scale:.3g} {prefix}{unit}"

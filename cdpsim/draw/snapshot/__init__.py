"""The paper's Fig. 2: the devices at one time step, what they compute, hold and send; of any run."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cdpsim.api import simulate
from cdpsim.draw.canvas import GREY, TITLE, amount_text, label
from cdpsim.draw.look import AS_DRAWN, Look
from cdpsim.draw.sheet import (
    SMALL,
    draw_key,
    fitted,
    key_rows,
    new_sheet,
    scale_in,
    scale_sheet,
    sheet_in,
    width_of,
    write_words,
)
from cdpsim.draw.snapshot.devices import (
    Arrangement,
    Board,
    Form,
    arrange,
    draw_devices,
    in_a_row,
    moment_entries,
    words_entries,
)
from cdpsim.draw.snapshot.moment import Moment, busiest_moment, moment_at, read_moment
from cdpsim.draw.views import Views, title
from cdpsim.errors import RequestError, whole_number
from cdpsim.trace import Trace

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
_THICKEST_RING = 4.0
_LEAST_WIDTH = 241.0
_MARGIN = 5.0
_STAGES = 24.0  # for the numbers of stages, left of the devices
_GROUP_GAP = 15.0
_HEAD = 15.0
_KEY_PITCH = 13.0
_SMALLER = "use a smaller n, or an .html file of timeline"


class _Part(NamedTuple):
    """One run at its moment, a part of figure 2."""

    name: str
    moment: Moment
    arrangement: Arrangement


def snapshot(trace: Trace, slot: float | str, *, look: Look = AS_DRAWN, axes: Axes | None = None) -> Figure:
    """Draw the devices at one slot, or at one moment in seconds: what they compute, hold and send.

    Micro-batches, stages and devices are counted from 0, as in the files of a trace.
    """
    views = Views(trace)
    now = read_moment(views, slot)
    moment = moment_at(views, now)
    arrangement = _arranged(moment)
    stacked = len(set(arrangement.column.values())) < len(arrangement.column)
    form = Form(46.0, 54.0 if stacked else 36.0, 9.5, _ring([moment]), first=0, strip=9.0)
    entries = moment_entries([moment], form, in_slots=trace.in_slots)
    entries += words_entries(in_slots=trace.in_slots, by_stage=arrangement.by_stage)
    room = arrangement.columns * form.pitch + _STAGES
    width = max(_LEAST_WIDTH, room + 2 * _MARGIN)
    rows = key_rows(entries if look.legend else [], width - 2 * _MARGIN)
    high = arrangement.rows * form.rise + form.strip + 3
    height = _HEAD + high + len(rows) * _KEY_PITCH + 3 * _MARGIN
    figure, sheet = new_sheet(width, height) if axes is None else sheet_in(axes, width, height)
    when = f", time step {now}" if trace.in_slots else f", {amount_text(now, 's')}"
    own = title(trace) if look.title is None else label(look.title, 300)
    words = fitted(own, width - 2 * _MARGIN - width_of(when, SMALL + 1), SMALL + 1) + when
    write_words(sheet, _MARGIN, height - _HEAD / 2 - 1, words.removeprefix(", "), SMALL + 1, gid=TITLE)
    bottom = height - _HEAD - high
    stashes = {device: moment.stash.get(device, 0) for device in moment.stages}
    feet = {d: f"{d}: {stash if trace.in_slots else amount_text(stash, 'B')}" for d, stash in stashes.items()}
    if arrangement.by_stage:
        _write_stages(sheet, arrangement.rows, form, _MARGIN, bottom)
    draw_devices(Board(sheet, moment, arrangement, form, (width - room) / 2 + _STAGES, bottom), feet)
    draw_key(sheet, _MARGIN, bottom - _MARGIN, rows, _KEY_PITCH)
    return scale_sheet(figure, look) if axes is None else scale_in(axes)


def figure_2(n: int = 3, slot: int | None = None, *, look: Look = AS_DRAWN) -> Figure:
    """Draw the paper's Fig. 2 for any n: implementations side by side, without CDP above and with it below.

    Each is shown at the same slot of its second training step, by default at one at which most activations are held.
    Stages and micro-batches are counted from 1, as in the paper.
    """
    n = whole_number("n", n, at_least=1)
    if n > _MOST_N:
        problem = f"n={n}, but figure 2 has room for {_MOST_N} at most; use `cdpsim snapshot NAME` for one"
        raise RequestError("n", problem)
    groups = [[name and _part(name, n, slot) for name in names[::-1]] for _, *names in FIGURE_2]
    moments = [part.moment for parts in groups for part in parts if part]
    form = Form(34.0, 34.0, 7.5, _ring(moments), first=1)
    letters = [f"({chr(ord('a') + k)}) {words}" for k, (words, *_) in enumerate(FIGURE_2)]
    widths = [
        max(width_of(letter), *(part.arrangement.columns * form.pitch for part in parts if part))
        for letter, parts in zip(letters, groups, strict=True)
    ]
    left, high = 2 * _MARGIN + _STAGES, n * form.rise
    width = left + sum(widths) + _GROUP_GAP * (len(groups) - 1) + _MARGIN
    rows = key_rows(moment_entries(moments, form, in_slots=True) * look.legend, width - 2 * _MARGIN)
    heading = fitted(label(look.title or "", 300), width - 2 * _MARGIN, SMALL + 2)
    bottom = len(rows) * _KEY_PITCH + 2 * _MARGIN
    height = bottom + 2 * high + _GROUP_GAP + _HEAD + _MARGIN
    figure, axes = new_sheet(width, height + _HEAD * bool(heading))
    if heading:
        write_words(axes, _MARGIN, height + _HEAD / 2 - 1, heading, SMALL + 2, gid=TITLE)
    feet = [bottom, bottom + high + _GROUP_GAP]  # of the rows
    for words, foot in zip(_ROWS, feet, strict=True):
        write_words(axes, _MARGIN + 3, foot + high / 2, words, SMALL + 1, ha="center", va="center", rotation=90)
        _write_stages(axes, n, form, 2 * _MARGIN + 3, foot)
    for letter, room, parts in zip(letters, widths, groups, strict=True):
        write_words(axes, left + room / 2, height - _MARGIN - _HEAD / 2, letter, SMALL + 1, ha="center")
        for part, foot in zip(parts, feet, strict=True):
            if part:
                x = left + (room - part.arrangement.columns * form.pitch) / 2
                draw_devices(Board(axes, part.moment, part.arrangement, form, x, foot, f"{part.name}-"))
        left += room + _GROUP_GAP
    draw_key(axes, _MARGIN, bottom - _MARGIN, rows, _KEY_PITCH)
    return scale_sheet(figure, look)


def _part(name: str, n: int, slot: int | None) -> _Part:
    views = Views(simulate(name, n, steps=_STEPS))
    moment = moment_at(views, busiest_moment(views) if slot is None else read_moment(views, slot))
    return _Part(name, moment, arrange(moment.stages))


def _arranged(moment: Moment) -> Arrangement:
    """Return a place for every device; refuse more than can be drawn."""
    if len(moment.stages) > _MOST_COLUMNS * _MOST_ROWS:
        most = _MOST_COLUMNS * _MOST_ROWS
        raise RequestError("snapshot", f"has {len(moment.stages)} devices, of which {most} can be drawn; {_SMALLER}")
    arrangement = in_a_row(arrange(moment.stages))
    if arrangement.columns > _MOST_COLUMNS or arrangement.rows > _MOST_ROWS:
        raise RequestError(
            "snapshot",
            f"has {arrangement.columns} devices side by side and {arrangement.rows} rows of stages, of which "
            f"{_MOST_COLUMNS} and {_MOST_ROWS} can be drawn; {_SMALLER}",
        )
    return arrangement


def _ring(moments: Sequence[Moment]) -> float:
    """Return the thickness of a ring for each activation, so that the thickest has room."""
    most = max((count for moment in moments for count in moment.activations.values()), default=1)
    return min(_THICKEST_RING / 3, _THICKEST_RING / most)


def _write_stages(axes: Axes, rows: int, form: Form, left: float, bottom: float) -> None:
    """Number the rows where they are stages."""
    for row in range(rows):
        y = bottom + form.strip + (row + 0.5) * form.rise
        write_words(axes, left + _STAGES - 8, y, str(row + form.first), ha="right", color=GREY)
    y = bottom + form.strip + rows * form.rise / 2
    write_words(axes, left + 5, y, "stage", ha="center", va="center", rotation=90, color=GREY)

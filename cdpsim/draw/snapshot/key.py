"""The key to pictures of devices: what disks, rings and arrows mean, of those that are there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdpsim.draw import palette
from cdpsim.draw.canvas import GREY, INK, PALE
from cdpsim.draw.sheet import Entry, put, write
from cdpsim.draw.snapshot.devices import Form, arrow
from cdpsim.draw.snapshot.moment import Moment

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DISK = 4.0
_MOST_COLOURS = 8


def entries(moments: Sequence[Moment], form: Form, *, in_slots: bool) -> list[Entry]:
    """What the marks mean that are drawn of these moments."""
    numbers = sorted({i for moment in moments for several in moment.running.values() for i in several})
    counts = [count for moment in moments for count in moment.activations.values()]
    idle = any(moment.states - set(moment.running) for moment in moments if moment.states is not None)
    when = "time step" if in_slots else "moment"
    found = [_disks(numbers, form)] if numbers else []
    found += [_circles([(0.0, PALE)], "parameters, not in use")] if idle else []
    if counts:
        widths = [(count * form.ring, "white") for count in sorted({1, max(counts)})]
        found.append(_circles(widths, "activations held: of 1" + (f", of {max(counts)}" if max(counts) > 1 else "")))
    if any(_is_somewhere_empty(moment) for moment in moments):
        found.append(Entry(_empty_place, 2 * _DISK, "nothing held"))
    if any(moment.inner for moment in moments):
        found.append(_arrow("inside a device"))
    if any(moment.sent for moment in moments):
        found.append(_arrow("between devices", thick=True))
    if any(group.now for moment in moments for group in moment.collectives):
        found.append(_arrow("collective", thick=True, both=True))
    if any(not group.now for moment in moments for group in moment.collectives):
        meaning = f"collective of this training step at another {when}"
        found.append(_arrow(meaning, thick=True, both=True, dotted=True))
    return found


def _is_somewhere_empty(moment: Moment) -> bool:
    """Whether a device holds nothing of a stage that it serves, as far as that is known."""
    places = {(device, stage) for device, stages in moment.served.items() for stage in stages}
    return moment.states is not None and bool(places - moment.states - set(moment.activations) - set(moment.running))


def _empty_place(axes: "Axes", x: float, y: float) -> None:
    from matplotlib.patches import Circle

    put(axes, Circle((x, y), _DISK - 0.5, facecolor="none", edgecolor=GREY, linewidth=0.5, linestyle=(0, (1, 2))))


def device_entry(in_slots: bool) -> Entry:
    """Say what stands at the foot of a device."""
    words = "0: 1" if in_slots else "0: 1 GB"

    def draw(axes: "Axes", x: float, y: float) -> None:
        write(axes, x, y, words, 6, ha="center", color=GREY)

    return Entry(draw, 3.6 * len(words), "device, and the activations that it holds")


def stage_entry() -> Entry:
    """Say what stands beside a disk where rows are no stages."""

    def draw(axes: "Axes", x: float, y: float) -> None:
        write(axes, x, y, "0", 6, ha="center", color=GREY)

    return Entry(draw, 4, "stage, beside its disk")


def _disks(numbers: list[int], form: Form) -> Entry:
    shown, pitch = numbers[:_MOST_COLOURS], 2 * _DISK + 1.5

    def draw(axes: "Axes", x: float, y: float) -> None:
        from matplotlib.patches import Circle

        for k, i in enumerate(shown):
            at = x + (k - (len(shown) - 1) / 2) * pitch
            fill = palette.colour(i)
            put(axes, Circle((at, y), _DISK, facecolor=fill, edgecolor="none"))
            write(axes, at, y, str(i + form.first), 6, ha="center", color=palette.ink_on(fill))

    more = ", …" if len(numbers) > _MOST_COLOURS else ""
    return Entry(draw, pitch * len(shown), f"micro-batch computed{more}")


def _circles(circles: list[tuple[float, str]], meaning: str) -> Entry:
    """Disks with rings: how thick each ring is, and what is in it."""
    pitch = 2 * (_DISK - 0.5) + 2 * max(ring for ring, _ in circles) + 2

    def draw(axes: "Axes", x: float, y: float) -> None:
        from matplotlib.patches import Circle

        for k, (ring, fill) in enumerate(circles):
            at, radius = x + (k - (len(circles) - 1) / 2) * pitch, _DISK - 0.5
            put(axes, Circle((at, y), radius + ring, facecolor=INK, edgecolor="none"))
            put(axes, Circle((at, y), radius, facecolor=fill, edgecolor="none" if ring else GREY, linewidth=0.5))

    return Entry(draw, pitch * len(circles), meaning)


def _arrow(meaning: str, *, thick: bool = False, both: bool = False, dotted: bool = False) -> Entry:
    half = 9 if thick else 7

    def draw(axes: "Axes", x: float, y: float) -> None:
        arrow(axes, (x - half, y), (x + half, y), 0, 0, thick=thick, both=both, dotted=dotted)

    return Entry(draw, 2 * half, meaning)

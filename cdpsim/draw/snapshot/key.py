"""The key to pictures of devices: the meaning of disks, rings and arrows, of those that are there."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Circle

from cdpsim.draw import palette
from cdpsim.draw.canvas import GREY, INK, PALE
from cdpsim.draw.sheet import KeyEntry, put_patch, write_words
from cdpsim.draw.snapshot.devices import Form, arrow
from cdpsim.draw.snapshot.moment import Moment

_DISK = 4.0
_MOST_COLOURS = 8


def moment_entries(moments: Sequence[Moment], form: Form, *, in_slots: bool) -> list[KeyEntry]:
    """Return the entries of the marks in these moments."""
    numbers = sorted({i for moment in moments for several in moment.running.values() for i in several})
    counts = [count for moment in moments for count in moment.activations.values()]
    idle = any(moment.states - set(moment.running) for moment in moments if moment.states is not None)
    result = [_disks(numbers, form)] if numbers else []
    result += [_circles([(0.0, PALE)], "parameters, not in use")] if idle else []
    if counts:
        rings = [(count * form.ring, "white") for count in sorted({1, max(counts)})]
        result.append(_circles(rings, "activations held: of 1" + (f", of {max(counts)}" if max(counts) > 1 else "")))
    if any(_has_empty_place(moment) for moment in moments):
        result.append(KeyEntry(_empty_place, 2 * _DISK, "nothing held"))
    is_now = [group.now for moment in moments for group in moment.collectives]
    another = f"collective of this training step at another {'time step' if in_slots else 'moment'}"
    arrows = (
        ("inner", any(moment.inside for moment in moments), "inside a device"),
        ("message", any(moment.messages for moment in moments), "between devices"),
        ("collective", any(is_now), "collective"),
        ("another-collective", not all(is_now), another),
    )
    return result + [_arrow(kind, meaning) for kind, there, meaning in arrows if there]


def _has_empty_place(moment: Moment) -> bool:
    """Return whether a device holds nothing of a stage that it serves, as far as that is known."""
    places = {(device, stage) for device, stages in moment.stages.items() for stage in stages}
    return moment.states is not None and bool(places - moment.states - set(moment.activations) - set(moment.running))


def _empty_place(axes: Axes, x: float, y: float) -> None:
    style = {"facecolor": "none", "edgecolor": GREY, "linestyle": (0, (1, 2))}
    put_patch(axes, Circle((x, y), _DISK - 0.5, linewidth=0.5, **style))


def device_entry(in_slots: bool) -> KeyEntry:
    """Return the entry of the words at the foot of a device."""
    words = "0: 1" if in_slots else "0: 1 GB"
    return _words_entry(words, 3.6 * len(words), "device, and the activations that it holds")


def stage_entry() -> KeyEntry:
    """Return the entry of the number beside a disk where rows are no stages."""
    return _words_entry("0", 4, "stage, beside its disk")


def _words_entry(words: str, width: float, meaning: str) -> KeyEntry:
    def draw(axes: Axes, x: float, y: float) -> None:
        write_words(axes, x, y, words, 6, ha="center", color=GREY)

    return KeyEntry(draw, width, meaning)


def _disks(numbers: list[int], form: Form) -> KeyEntry:
    few, pitch = numbers[:_MOST_COLOURS], 2 * _DISK + 1.5

    def draw(axes: Axes, x: float, y: float) -> None:
        for k, i in enumerate(few):
            at = x + (k - (len(few) - 1) / 2) * pitch
            fill = palette.colour(i)
            put_patch(axes, Circle((at, y), _DISK, facecolor=fill, edgecolor="none"))
            write_words(axes, at, y, str(i + form.first), 6, ha="center", color=palette.ink_on(fill))

    more = ", …" if len(numbers) > _MOST_COLOURS else ""
    return KeyEntry(draw, pitch * len(few), f"micro-batch computed{more}")


def _circles(circles: list[tuple[float, str]], meaning: str) -> KeyEntry:
    """Return an entry of disks with rings: the thickness of each ring, and the fill inside it."""
    pitch = 2 * (_DISK - 0.5) + 2 * max(ring for ring, _ in circles) + 2

    def draw(axes: Axes, x: float, y: float) -> None:
        for k, (ring, fill) in enumerate(circles):
            at, radius = x + (k - (len(circles) - 1) / 2) * pitch, _DISK - 0.5
            put_patch(axes, Circle((at, y), radius + ring, facecolor=INK, edgecolor="none"))
            edge = "none" if ring else GREY
            put_patch(axes, Circle((at, y), radius, facecolor=fill, edgecolor=edge, linewidth=0.5))

    return KeyEntry(draw, pitch * len(circles), meaning)


def _arrow(kind: str, meaning: str) -> KeyEntry:
    half = 7 if kind == "inner" else 9

    def draw(axes: Axes, x: float, y: float) -> None:
        arrow(axes, kind, (x - half, y), (x + half, y))

    return KeyEntry(draw, 2 * half, meaning)

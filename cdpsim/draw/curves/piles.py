"""Parts on each other, curves beside each other, and what each of few or many devices has of them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cdpsim.draw.canvas import GREY, INK
from cdpsim.draw.curves.panels import Frame, mark, note, panel, peak, steps
from cdpsim.draw.curves.series import COLUMNS, Series, band, thinned
from cdpsim.draw.palette import colour

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.collections import Collection
    from matplotlib.figure import SubFigure
    from matplotlib.patches import Patch

PANELS = 12  # devices with a panel each
ACROSS = 4
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
_BAND = "#bdbdbd"
STEMS = 200  # moments whose heads can be told apart


class Look(NamedTuple):
    """How one of several parts that lie on each other is drawn; its hatch tells it without colour."""

    name: str
    shade: str
    hatch: str


def pile(
    axes: "Axes", series: Series, looks: Mapping[int, Look], shared: Frame, gid: str, columns: int = COLUMNS
) -> None:
    """Functions on each other, from below in the order of their looks; what is thinner than a line is a line."""
    few = thinned(series, shared.end, columns)
    below = np.zeros(len(few.time), dtype=few.value.dtype)
    for row, look in looks.items():
        above, some = below + few.value[row], few.value[row] > 0
        if some.any():
            part = (_bars if shared.at_once else _area)(axes, few.time, below, above, some, shared)
            part.set(gid=f"{gid}-{look.name.replace(' ', '-')}", hatch=look.hatch, hatchcolor="white", zorder=2)
            part.set(facecolor=look.shade, edgecolor=look.shade, linewidth=0.5)
            part.set_hatch_linewidth(0.5)
        below = above
    if shared.unit == "B" and not shared.at_once:
        total = steps(axes, below, np.append(few.time, shared.end), f"{gid}-total")
        total.set(edgecolor=INK, linewidth=0.8 if len(few.time) < columns // 4 else 0.3, zorder=3)


def _area(
    axes: "Axes", time: np.ndarray, below: np.ndarray, above: np.ndarray, some: np.ndarray, shared: Frame
) -> "Patch | Collection":
    edges = np.append(time, shared.end)
    return steps(axes, np.where(some, above, np.nan), edges, "", below)


def _bars(
    axes: "Axes", time: np.ndarray, below: np.ndarray, above: np.ndarray, some: np.ndarray, shared: Frame
) -> "Patch | Collection":
    from matplotlib.collections import PolyCollection

    half = _width(shared) / 2
    left, right, low, high = (time - half)[some], (time + half)[some], below[some], above[some]
    corners = [np.stack(corner, axis=-1) for corner in ((left, low), (left, high), (right, high), (right, low))]
    part = PolyCollection(list(np.stack(corners, axis=1)), clip_on=False)
    axes.add_collection(part, autolim=False)
    return part


def _width(shared: Frame) -> float:
    """How wide a bar is: narrower than a slot, and never narrower than can be seen."""
    return max(0.6, shared.end / 300) if shared.in_slots else shared.end / 300


def curve(axes: "Axes", series: Series, shared: Frame, number: int, among: int, gid: str) -> None:
    """One function among several, its peak marked: a line, or a stem for each moment.

    Dashes or heads tell it from others, too; under dashes goes a thin line, which no short peak can slip through. Later
    curves are thinner, so that of those which coincide all can be seen.
    """
    few = thinned(series, shared.end)
    (at, most), height = peak(series), 3 + 0.01 * number
    if shared.at_once:
        shift = (number - (among - 1) / 2) * _width(shared) / among
        stems = axes.vlines(few.time + shift, 0, few.total, color=colour(number), linewidth=1.2, clip_on=False)
        stems.set(gid=gid, zorder=height)
        if len(few.time) <= STEMS:
            (heads,) = axes.plot(few.time + shift, few.total, _marker(number), color=colour(number), markersize=3)
            heads.set(gid=f"{gid}-heads", clip_on=False, zorder=4)
        mark(axes, (at + shift, most), "", f"{gid}-peak")
        return
    edges = np.append(few.time, shared.end)
    wide = 1.3 + min(0.45, 2.4 / among) * (among - 1 - number)
    for name, width, style in ((f"{gid}-under", 0.6, "-"), (gid, wide, _dashes(number))):
        line = steps(axes, few.total, edges, name)
        line.set(edgecolor=colour(number), linewidth=width, linestyle=style, zorder=height)
    mark(axes, (at, most), "", f"{gid}-peak")


def curve_entry(shared: Frame, number: int, text: str) -> "Artist":
    """The legend entry of a curve."""
    from matplotlib.lines import Line2D

    style, marker = ("-", _marker(number)) if shared.at_once else (_dashes(number), "")
    entry = Line2D([], [], color=colour(number), marker=marker, markersize=4, label=text)
    entry.set(linestyle=style)
    return entry


def _dashes(number: int) -> str:
    """Dashes such that colour and dashes together repeat after thirty-two curves."""
    return DASHES[(number + number // 8) % len(DASHES)]


def _marker(number: int) -> str:
    return MARKERS[(number + number // 8) % len(MARKERS)]


def entries(looks: Mapping[int, Look], series: Series) -> list["Artist"]:
    """Legend entries of the parts that are there, the lowest first."""
    from matplotlib.patches import Patch

    seen = [look for row, look in looks.items() if series.value[row].any()]
    patches = [Patch(facecolor=look.shade, hatch=look.hatch, hatchcolor="white", label=look.name) for look in seen]
    for patch in patches:
        patch.set(linewidth=0)
        patch.set_hatch_linewidth(0.5)
    return list(patches)


def height_of(devices: int) -> float:
    """How many inches the panels of devices need."""
    return 2.1 if devices > PANELS else 0.45 + 1.1 * -(-devices // ACROSS)


def by_device(
    part: "SubFigure", found: Mapping[int, Series], looks: Mapping[int, Look], shared: Frame, verb: str, how: str = ""
) -> None:
    """A small panel for each of some devices, or the least, the median and the most of many."""
    if len(found) > PANELS:
        _band(part.subplots(), found, shared, f"{verb.capitalize()} by one of {len(found)} devices{how}")
        return
    note(part, f"{verb.capitalize()} by each device{how}")
    down, across = -(-len(found) // ACROSS), min(ACROSS, len(found))
    grid = part.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    most = max(peak(series)[1] for series in found.values())
    for k, axes in enumerate(grid.flat):
        axes.set_visible(k < len(found))
    for k, ((device, series), axes) in enumerate(zip(found.items(), grid.flat, strict=False)):
        heading = f"device {device}: peak {shared.amount(peak(series)[1])}"
        panel(axes, heading, shared, most, room=1.12)
        pile(axes, series, looks, shared, f"device-{device}", COLUMNS // ACROSS)
        if peak(series)[1]:
            mark(axes, peak(series), "", f"peak-{device}")
        axes.tick_params(labelbottom=k + across >= len(found))


def _band(axes: "Axes", found: Mapping[int, Series], shared: Frame, heading: str) -> None:
    top = max(found, key=lambda device: peak(found[device])[1])
    how = "median marked" if shared.at_once else "median dashed"
    panel(axes, f"{heading}\nfrom the least to the most, {how}", shared, peak(found[top])[1], room=1.25)
    seen = band(list(found.values()), shared.end, at_once=shared.at_once)
    if shared.at_once:
        axes.vlines(seen.time, seen.least, seen.most, color=_BAND, linewidth=2, gid="band")
        (median,) = axes.plot(seen.time, seen.median, "_", color=INK, markersize=4)
        median.set(gid="median", clip_on=False, zorder=4)
    else:
        edges = np.append(seen.time, shared.end)
        area = steps(axes, seen.most, edges, "band", seen.least)
        area.set(facecolor=_BAND, linewidth=0, zorder=2)
        for name, value, shade in (
            ("least", seen.least, GREY),
            ("most", seen.most, GREY),
            ("median", seen.median, INK),
        ):
            line = steps(axes, value, edges, name)
            line.set(edgecolor=shade, linewidth=0.6 if shade == GREY else 1.0, zorder=3)
        line.set(linestyle="--")
    mark(axes, peak(found[top]), f"{shared.peak(found[top])}, device {top}", "peak-of-devices")

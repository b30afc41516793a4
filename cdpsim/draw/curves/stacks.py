"""Layers on each other, curves beside each other, and the layers of each of few or many devices."""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cdpsim.draw.canvas import GREY, INK
from cdpsim.draw.curves.panels import Scale, draw_boxes, figure_of, legend, mark_peak, panel, peak, steps
from cdpsim.draw.curves.step_functions import PIXEL_COLUMNS, Series, band_of, thinned
from cdpsim.draw.palette import COLOURS, colour
from cdpsim.draw.views import word_of

MOST_DEVICE_PANELS = 12  # more devices are a band
_ACROSS = 4
_DASHES = ("-", "--", "-.", ":")
_HEADS = "osD^vPX*"
_HATCHES = dict(zip(COLOURS, ("///", "", "....", "xxx", "\\\\\\", "", "", "\\\\\\"), strict=True))
_BAND = "#bdbdbd"
MOST_HEADS = 200  # stems whose heads can be told apart


Member = TypeVar("Member", bound=IntEnum)


class Layer(NamedTuple):
    """The name and look of one of several layers that lie on each other; its hatch tells it apart without colour."""

    name: str
    shade: str
    hatch: str


def layers_of(order: Iterable[Member], colours: Mapping[Member, str]) -> dict[int, Layer]:
    """Return the layers of members of an enumeration, the lowest first."""
    return {int(member): Layer(word_of(member), colours[member], _HATCHES[colours[member]]) for member in order}


def stacked_figure(
    title: str,
    scale: Scale,
    total: Series,
    each: Mapping[int, Series],
    layers: Mapping[int, Layer],
    verb: str,
    how: str,
) -> tuple[Figure, Axes]:
    """Draw the layers of all devices together, of each device, and their legend; return the former's axes to set up."""
    several = len(each) > 1
    figure, parts = figure_of(title, [2.7, *[_height_of(len(each))] * several])
    axes = parts[0].subplots()
    _stack(axes, total, layers, scale, verb, PIXEL_COLUMNS)
    if len(each) > MOST_DEVICE_PANELS:
        _band(parts[1].subplots(), each, scale, f"{verb.capitalize()} by one of {len(each)} devices{how}")
    elif several:
        parts[1].suptitle(f"{verb.capitalize()} by each device{how}", x=0.012, ha="left", fontsize=9.5, color=INK)
        _panels_of_devices(parts[1], each, layers, scale)
    legend(figure, _layer_entries(layers, total))
    return figure, axes


def _height_of(devices: int) -> float:
    """Return the inches that the panels of devices need."""
    return 2.1 if devices > MOST_DEVICE_PANELS else 0.45 + 1.1 * -(-devices // _ACROSS)


def _stack(axes: Axes, series: Series, layers: Mapping[int, Layer], scale: Scale, gid: str, columns: int) -> None:
    """Draw functions on each other; where a layer is thinner than a line, it is a line."""
    few = thinned(series, scale.end, columns)
    below = np.zeros(len(few.time), dtype=few.value.dtype)
    for row, layer in layers.items():
        above, seen = below + few.value[row], few.value[row] > 0
        if seen.any():
            name = f"{gid}-{layer.name.replace(' ', '-')}"
            if scale.at_once:
                half, time = _bar_width(scale) / 2, few.time[seen]
                bounds = time - half, time + half, below[seen], above[seen]
                part: Patch | PolyCollection = draw_boxes(axes, *bounds, clip_on=False)
            else:
                part = steps(axes, few.time, np.where(seen, above, np.nan), scale.end, name, below)
            part.set(gid=name, hatch=layer.hatch, hatchcolor="white", zorder=2)
            part.set(facecolor=layer.shade, edgecolor=layer.shade, linewidth=0.5)
            part.set_hatch_linewidth(0.5)
        below = above
    if scale.unit == "B" and not scale.at_once:
        width = 0.8 if len(few.time) < columns // 4 else 0.3
        steps(axes, few.time, below, scale.end, f"{gid}-total", edgecolor=INK, linewidth=width, zorder=3)


def _bar_width(scale: Scale) -> float:
    """Return the width of a bar: narrower than a slot, and never narrower than can be seen."""
    return max(0.6, scale.end / 300) if scale.in_slots else scale.end / 300


def _layer_entries(layers: Mapping[int, Layer], series: Series) -> list[Artist]:
    """Return legend entries of the layers that are not empty, the lowest first."""
    drawn = [layer for row, layer in layers.items() if series.value[row].any()]
    patches: list[Artist] = []
    for name, shade, hatch in drawn:
        patch = Patch(facecolor=shade, hatch=hatch, hatchcolor="white", label=name, linewidth=0)
        patch.set_hatch_linewidth(0.5)
        patches.append(patch)
    return patches


def _panels_of_devices(part: SubFigure, each: Mapping[int, Series], layers: Mapping[int, Layer], scale: Scale) -> None:
    """Draw a small panel for each device."""
    down, across = -(-len(each) // _ACROSS), min(_ACROSS, len(each))
    grid = list(part.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat)
    most = max(peak(series)[1] for series in each.values())
    for axes in grid[len(each) :]:
        axes.set_visible(False)
    for k, (axes, (device, series)) in enumerate(zip(grid, each.items(), strict=False)):
        panel(axes, f"device {device}: peak {scale.amount(peak(series)[1])}", scale, most, room=1.12)
        _stack(axes, series, layers, scale, f"device-{device}", PIXEL_COLUMNS // _ACROSS)
        if peak(series)[1]:
            mark_peak(axes, peak(series), "", f"peak-{device}")
        axes.tick_params(labelbottom=k + across >= len(each))


def _band(axes: Axes, each: Mapping[int, Series], scale: Scale, heading: str) -> None:
    """Draw the band of the totals of many devices, and mark the highest peak."""
    highest = max(each, key=lambda device: peak(each[device])[1])
    how = "median marked" if scale.at_once else "median dashed"
    heading = f"{heading}\nfrom the least to the most, {how}"
    panel(axes, heading, scale, peak(each[highest])[1], room=1.25)
    time, least, median, most = band_of(list(each.values()), scale.end, at_once=scale.at_once)
    if scale.at_once:
        axes.vlines(time, least, most, color=_BAND, linewidth=2, gid="band")
        axes.plot(time, median, "_", color=INK, markersize=4, gid="median", clip_on=False, zorder=4)
    else:
        steps(axes, time, most, scale.end, "band", least, facecolor=_BAND, linewidth=0, zorder=2)
        for name, value in (("least", least), ("most", most)):
            steps(axes, time, value, scale.end, name, edgecolor=GREY, linewidth=0.6, zorder=3)
        steps(axes, time, median, scale.end, "median", edgecolor=INK, linewidth=1.0, zorder=3, linestyle="--")
    mark_peak(axes, peak(each[highest]), f"{scale.peak(each[highest])}, device {highest}", "peak-of-devices")


def draw_curves(axes: Axes, totals: Sequence[Series], scale: Scale, gid: str) -> None:
    """Draw the totals of several series that are not empty, each with its peak marked: as lines, or as stems."""
    draw = _stems if scale.at_once else _line
    for k, series in enumerate(totals):
        if len(series.time):
            shift = draw(axes, thinned(series, scale.end), scale, k, len(totals), f"{gid}-{k}")
            time, most = peak(series)
            mark_peak(axes, (time + shift, most), "", f"{gid}-{k}-peak")


def _line(axes: Axes, few: Series, scale: Scale, number: int, among: int, gid: str) -> float:
    """Draw a curve as a dashed line over a thin line, which no short peak can slip through; return its shift, 0.

    Later curves are thinner, so that of those which coincide all can be seen.
    """
    wide = 1.3 + min(0.45, 2.4 / among) * (among - 1 - number)
    for name, width, dashes in ((f"{gid}-under", 0.6, "-"), (gid, wide, _distinct(_DASHES, number))):
        style = {"edgecolor": colour(number), "linewidth": width, "linestyle": dashes, "zorder": 3 + 0.01 * number}
        steps(axes, few.time, few.total, scale.end, name, **style)
    return 0


def _stems(axes: Axes, few: Series, scale: Scale, number: int, among: int, gid: str) -> float:
    """Draw a curve as a stem for each moment, with a head if there is room; return its shift beside the time."""
    shift = (number - (among - 1) / 2) * _bar_width(scale) / among
    stems = axes.vlines(few.time + shift, 0, few.total, color=colour(number), linewidth=1.2, clip_on=False)
    stems.set(gid=gid, zorder=3 + 0.01 * number)
    if len(few.time) <= MOST_HEADS:
        head = _distinct(_HEADS, number)
        (heads,) = axes.plot(few.time + shift, few.total, head, color=colour(number), markersize=3)
        heads.set(gid=f"{gid}-heads", clip_on=False, zorder=4)
    return shift


def curve_legend(figure: Figure, scale: Scale, texts: Sequence[str]) -> None:
    """Add a legend with a text for each curve."""
    entries = []
    for number, text in enumerate(texts):
        dashes, marker = ("-", _distinct(_HEADS, number)) if scale.at_once else (_distinct(_DASHES, number), "")
        look: dict[str, Any] = {"color": colour(number), "linestyle": dashes, "marker": marker, "markersize": 4}
        entries.append(Line2D([], [], label=text, **look))
    legend(figure, entries, 1)


def _distinct(styles: Sequence[str], number: int) -> str:
    """Return the style of a curve, such that colour and style together repeat after 32 curves or more."""
    return styles[(number + number // 8) % len(styles)]

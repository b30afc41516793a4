"""The panels of curves over time: axes with units, layers on each other, curves beside each other, each device."""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from textwrap import wrap
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.markers import CARETDOWN
from matplotlib.patches import Patch, StepPatch
from matplotlib.ticker import MaxNLocator

from cdpsim.draw import views
from cdpsim.draw.canvas import GREY, INK, TITLE, amount_text, label, one_unit, plain
from cdpsim.draw.curves.step_functions import PIXEL_COLUMNS, Series, band_of, end_of_run, thinned
from cdpsim.draw.palette import COLOURS, colour
from cdpsim.draw.views import word_of
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import CLOSE_TIMES
from cdpsim.trace import Trace

PAGE_WIDTH = 7.2  # inches: a page's text
MOST_CURVES = 16  # on one pair of axes
_TITLE, _NAME = 80, 40  # letters for which there is room; a title may have two lines
MOST_DEVICE_PANELS = 12  # more devices are a band
_ACROSS = 4
_DASHES = ("-", "--", "-.", ":")
_HEADS = "osD^vPX*"
_HATCHES = dict(zip(COLOURS, ("///", "", "++", "xxx", "\\\\\\", "", "", "\\\\\\"), strict=True))
_BAND = "#bdbdbd"
MOST_HEADS = 200  # stems whose heads can be told apart


class Scale(NamedTuple):
    """The scale that all panels of a figure share: its end, its units, and whether values are of single moments."""

    end: float
    in_slots: bool
    unit: str = "B"
    at_once: bool = False

    def amount(self, value: float, unit: str = "") -> str:
        """Write a number with its unit, by default that of the scale: `36`, or `1.5 GB`."""
        return amount_text(value, "" if self.in_slots else unit or self.unit)

    def moment(self, time: float) -> str:
        """Write a time: `slot 7`, or `12.5 ms`."""
        return f"slot {time:,}" if self.in_slots else amount_text(time, "s")

    def peak(self, series: Series) -> str:
        """Write a peak and its time."""
        time, value = peak(series)
        return f"peak {self.amount(value)} at {self.moment(time)}"


def scale_of(traces: Sequence[Trace], unit: str = "B", *, at_once: bool = False) -> Scale:
    """Return the scale of one figure of several traces."""
    return Scale(max(map(end_of_run, traces)), traces[0].in_slots, unit, at_once)


def refuse_undrawable(traces: Sequence[Trace]) -> None:
    """Refuse traces that cannot stand in one figure."""
    if not traces:
        raise RequestError("traces", "there are none; give at least one")
    for trace in traces:
        views.refuse_empty(trace)
    if len({trace.in_slots for trace in traces}) > 1:
        raise RequestError("traces", "some are in slots and some in seconds; give all the same model and cluster")
    if len(traces) > MOST_CURVES:
        raise RequestError("traces", f"{len(traces)} curves cannot be told apart; give at most {MOST_CURVES}")


def titles(traces: Sequence[Trace]) -> tuple[str, list[str]]:
    """Return a title that all traces have in common, and a name for each of them, shortened to the room."""
    words = list(map(views.title_words, traces))
    common = [word for word in words[0] if all(word in others for others in words)]
    names = [", ".join(word for word in each if word not in common) or each[0] for each in words]
    return label(", ".join(common), 2 * _TITLE), [label(text, _NAME) for text in names]


def peak(series: Series) -> tuple[float, float]:
    """Return (time, value) of the first largest total; totals that differ by rounding alone are equal."""
    if not len(series.time):
        return 0, 0
    total = series.total
    most = total.max()
    at = int((total >= most - (CLOSE_TIMES * most if total.dtype.kind == "f" else 0)).argmax())
    return series.time[at].item(), most.item()


def panel(axes: Axes, heading: str, scale: Scale, most: float, ylabel: str = "", room: float = 1.2) -> None:
    """Set up axes from 0 to the end of the run, and to `room` times the most, so that a peak's label has room."""
    small = room < 1.2
    plain(axes, heading, 8 if small else 9.5)
    axes.tick_params(labelsize=6.5 if small else 7.5)
    top = room * most if most else 1
    axes.set(xlim=(0, scale.end), ylim=(0, top), xlabel="time, slots", ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(4 if small else 9, integer=scale.in_slots))
    axes.yaxis.set_major_locator(MaxNLocator(3 if small else 5, integer=scale.in_slots))
    if not scale.in_slots:
        axes.set_xlabel(f"time, {one_unit(axes.xaxis, 's', scale.end)}")
        unit = one_unit(axes.yaxis, scale.unit, top)
        axes.set_ylabel(f"{ylabel}, {unit}" if ylabel else unit)
    if small:
        axes.set_xlabel("")
        axes.yaxis.label.set_fontsize(7)


def steps(
    axes: Axes, time: np.ndarray, value: np.ndarray, end: float, gid: str, baseline: Any = None, **style: Any
) -> StepPatch:
    """Draw a step function until `end`, as a line, or as an area from its baseline; the limits of the axes stay."""
    patch = StepPatch(value, np.append(time, end), baseline=baseline, fill=baseline is not None, gid=gid, **style)
    axes.add_artist(patch)
    return patch


def draw_boxes(axes: Axes, left: Any, right: Any, low: Any, high: Any, **style: Any) -> PolyCollection:
    """Draw boxes as one collection; the limits of the axes stay."""
    corners = [np.stack(corner, axis=-1) for corner in ((left, low), (left, high), (right, high), (right, low))]
    collection = PolyCollection(list(np.stack(corners, axis=1)), **style)
    axes.add_collection(collection, autolim=False)
    return collection


def mark_peak(axes: Axes, at: tuple[float, float], text: str, gid: str) -> None:
    """Mark a peak, with its label on the side where there is room."""
    low, high = axes.get_xlim()
    share = (at[0] - low) / (high - low)
    side, shift = ("left", -3) if share < 0.33 else ("right", 3) if share > 0.67 else ("center", 0)
    (spot,) = axes.plot([at[0]], [at[1]], marker=CARETDOWN, markersize=5, color=INK, markeredgecolor="white")
    spot.set(gid=gid, zorder=5, markeredgewidth=0.5, clip_on=False)
    if text:
        words = axes.annotate(text, at, (shift, 6), textcoords="offset points", ha=side, fontsize=8, color=INK)
        words.set_zorder(6)
        words.set_bbox({"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.8})


def level(axes: Axes, value: float, text: str, gid: str) -> None:
    """Draw a line across the panel at a value, named at the right edge."""
    axes.axhline(value, color=INK, linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=2.5, gid=gid)
    write_beside(axes, value, text, 4)


def write_beside(axes: Axes, value: float, text: str, shift: float) -> None:
    """Write a text right of the axes at the height of a value."""
    frame: Any = ("axes fraction", "data")
    axes.annotate(text, (1, value), (shift, 0), frame, "offset points", va="center", fontsize=7.5)


def figure_of(heading: str, heights: Sequence[float]) -> tuple[Figure, list[SubFigure]]:
    """Return a figure of a page's width with a title, and its parts below each other."""
    lines = wrap(heading, _TITLE)
    figure = Figure(figsize=(PAGE_WIDTH, sum(heights) + 0.4 + 0.2 * len(lines)), layout="constrained")
    figure.suptitle("\n".join(lines), x=0.012, ha="left", fontsize=10.5, fontweight="bold", color=INK, gid=TITLE)
    return figure, list(figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat)


def legend(figure: Figure, handles: Sequence[Artist], columns: int = 5) -> None:
    """Add a legend below the panels, if there is anything to name."""
    if handles:
        columns = min(columns, len(handles))
        figure.legend(handles=list(handles), loc="outside lower left", ncols=columns, fontsize=8, frameon=False)


Member = TypeVar("Member", bound=IntEnum)


class Layer(NamedTuple):
    """The name and look of one of several layers that lie on each other; its hatch tells it apart without colour."""

    name: str
    shade: str
    hatch: str


def layers_of(order: Iterable[Member], colours: Mapping[Member, str]) -> dict[int, Layer]:
    """Return the layers of members of an enumeration, the lowest first."""
    return {int(member): Layer(word_of(member), colours[member], _HATCHES[colours[member]]) for member in order}


def fade(axes: Axes, begin: float, scale: Scale, gid: str, text: str = "") -> None:
    """Make a panel pale from a time on, and say why where there is room."""
    if begin >= scale.end:
        return
    axes.axvspan(begin, scale.end, color="white", alpha=0.65, linewidth=0, zorder=4, gid=gid)
    if text:
        style: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 7, "color": GREY, "zorder": 6}
        axes.annotate(text, (1, 1), (-2, -2), "axes fraction", "offset points", **style)


def stacked_figure(
    title: str,
    scale: Scale,
    total: Series,
    each: Mapping[int, Series],
    layers: Mapping[int, Layer],
    verb: str,
    how: str,
    ends: Mapping[int, float] = MappingProxyType({}),
    more: Sequence[float] = (),
) -> tuple[Figure, list[Axes]]:
    """Draw the layers of all devices together, of each device, and their legend; return the former's axes to set up.

    A device is pale from its end on, if `ends` has one. Between both are empty axes of the heights in `more`.
    """
    several = len(each) > 1
    heights = [2.7, *more]
    figure, parts = figure_of(title, [sum(heights), *[_height_of(len(each))] * several])
    axes, *others = parts[0].subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights).flat
    _stack(axes, total, layers, scale, verb, PIXEL_COLUMNS)
    if len(each) > MOST_DEVICE_PANELS:
        _band(parts[1].subplots(), each, scale, f"{verb.capitalize()} by one of {len(each)} devices{how}")
    elif several:
        parts[1].suptitle(f"{verb.capitalize()} by each device{how}", x=0.012, ha="left", fontsize=9.5, color=INK)
        _panels_of_devices(parts[1], each, layers, scale, ends)
    legend(figure, _layer_entries(layers, total))
    return figure, [axes, *others]


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
            part.set(gid=name, facecolor=layer.shade, edgecolor=layer.shade, linewidth=0.5, zorder=2)
            _hatch(part, layer.hatch)
        below = above
    if scale.unit == "B" and not scale.at_once:
        width = 0.8 if len(few.time) < columns // 4 else 0.3
        steps(axes, few.time, below, scale.end, f"{gid}-total", edgecolor=INK, linewidth=width, zorder=3)


def _hatch(part: Artist, hatch: str) -> None:
    """Hatch a shape in white; matplotlib has colours of hatches since 3.11, before that they are those of edges."""
    if hasattr(part, "set_hatchcolor"):
        part.set(hatch=hatch, hatchcolor="white", hatch_linewidth=0.5)
    else:
        part.set(hatch=hatch, edgecolor="white", linewidth=0)


def _bar_width(scale: Scale) -> float:
    """Return the width of a bar: narrower than a slot, and never narrower than can be seen."""
    return max(0.6, scale.end / 300) if scale.in_slots else scale.end / 300


def _layer_entries(layers: Mapping[int, Layer], series: Series) -> list[Artist]:
    """Return legend entries of the layers that are not empty, the lowest first."""
    drawn = [layer for row, layer in layers.items() if series.value[row].any()]
    patches: list[Artist] = []
    for name, shade, hatch in drawn:
        patches.append(Patch(facecolor=shade, label=name, linewidth=0))
        _hatch(patches[-1], hatch)
    return patches


def _panels_of_devices(
    part: SubFigure, each: Mapping[int, Series], layers: Mapping[int, Layer], scale: Scale, ends: Mapping[int, float]
) -> None:
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
        fade(axes, ends.get(device, scale.end), scale, f"pale-{device}")
        axes.tick_params(labelbottom=k + across >= len(each))
        if k % across:
            axes.set_ylabel("")


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


def draw_curves(axes: Axes, totals: Sequence[Series], scale: Scale, gid: str, ends: Sequence[float]) -> None:
    """Draw the totals of several series that are not empty, each until its own end, with its peak marked."""
    draw = _stems if scale.at_once else _line
    for k, (series, end) in enumerate(zip(totals, ends, strict=True)):
        before = series.time <= end if scale.at_once else series.time < end
        if before.any():
            few = thinned(Series(series.time[before], series.value[:, before]), scale.end)
            shift = draw(axes, few, scale._replace(end=end), k, len(totals), f"{gid}-{k}")
            time, most = peak(series)
            mark_peak(axes, (time + shift, most), "", f"{gid}-{k}-peak")


def _line(axes: Axes, few: Series, scale: Scale, number: int, among: int, gid: str) -> float:
    """Draw a curve as a dashed line over a thin line, which no short peak can slip through; return its shift, 0.

    Later curves are thinner, so that of those which coincide all can be seen.
    """
    look = look_of_curve(number, among)
    ink, order = look.pop("color"), look.pop("zorder")
    for name, style in ((f"{gid}-under", {"linewidth": 0.6}), (gid, look)):
        steps(axes, few.time, few.total, scale.end, name, edgecolor=ink, zorder=order, **style)
    return 0


def look_of_curve(number: int, among: int) -> dict[str, Any]:
    """Return the look of one of several lines; later ones are thinner."""
    wide = 1.3 + min(0.45, 2.4 / among) * (among - 1 - number)
    dashes = _distinct(_DASHES, number)
    return {"color": colour(number), "linewidth": wide, "linestyle": dashes, "zorder": 3 + 0.01 * number}


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

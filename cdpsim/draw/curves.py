"""Memory and traffic over time: of one trace by part and by device, of several on the same axes."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import CARETDOWN
from matplotlib.patches import Patch, StepPatch
from matplotlib.ticker import MaxNLocator

from cdpsim.draw import views
from cdpsim.draw.canvas import AS_DRAWN, GREY, INK, Look, amount_text, label, one_unit, plain
from cdpsim.draw.palette import CATEGORY_COLOURS, COLOURS, CONTENT_COLOURS, colour
from cdpsim.draw.sheet import DASHES, PAGE_WIDTH, clock, distinct, finish, new_page, titles
from cdpsim.draw.views import Views
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import CLOSE_TIMES, Ints, Times, group_starts, merge_close_times
from cdpsim.program import Category, Content
from cdpsim.request import MEMORY_LEAVES_OUT
from cdpsim.runs import Run
from cdpsim.schedules import TABLE_1
from cdpsim.trace import Trace
from cdpsim.trace.metrics.communication import copied_bytes, sent_shares

PIXEL_COLUMNS = 1_000  # about as many pixels as a figure is wide


class Series(NamedTuple):
    """Step functions: `value[k, c]` holds from `time[c]` until `time[c + 1]`, the last until the end of the run."""

    time: Times
    value: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The sum of all functions."""
        total: np.ndarray = self.value.sum(axis=0)
        return total

    def peak(self) -> tuple[float, float]:
        """Return (time, value) of the first largest total; totals that differ by rounding alone are equal."""
        if not len(self.time):
            return 0, 0
        total = self.total
        most = total.max()
        at = int((total >= most - (CLOSE_TIMES * most if total.dtype.kind == "f" else 0)).argmax())
        return self.time[at].item(), most.item()


def end_of_run(trace: Trace) -> float:
    """Return the latest time of a trace, or 1 if nothing takes time."""
    ends = (trace.tasks["end"], trace.messages["end"], trace.memory["time"])
    latest = max((column.max().item() for column in ends if len(column)), default=0)
    return latest or 1


def used_devices(trace: Trace) -> Ints:
    """Return the devices that have tasks or memory."""
    return np.unique(np.concatenate([trace.tasks["device"], trace.memory["device"]]).astype(np.int64))


def sum_at_times(key: Ints, time: Times, size: np.ndarray, keys: int) -> Series:
    """Return the sums of sizes for each key from 0 to `keys` and each time; the result is no step function."""
    distinct, column = np.unique(time, return_inverse=True)
    value = np.zeros((keys, len(distinct)), dtype=size.dtype)
    np.add.at(value, (key, column), size)
    return Series(distinct, value)


def sum_changes(key: Ints, time: Times, change: np.ndarray, keys: int) -> Series:
    """Return the step functions with these changes for each key from 0 to `keys`, beginning with 0 at time 0."""
    sums = sum_at_times(np.append(key, 0), np.append(time, 0), np.append(change, 0), keys)
    return sums._replace(value=sums.value.cumsum(axis=1))


def sum_spans(key: Ints, begin: Times, end: Times, size: np.ndarray, keys: int, run: float) -> Series:
    """Return the sum of the sizes of all spans at each time of a run until `run`, for each key from 0 to `keys`."""
    time = merge_close_times(np.concatenate([begin, end]), run)
    return sum_changes(np.tile(key, 2), time, np.concatenate([size, -size]), keys)


def total_memory(trace: Trace) -> Series:
    """Return the memory of all devices together, a function for each category in the order of its members."""
    views, time = Views(trace), trace.memory["time"]
    if len(used_devices(trace)) > 1:
        time = merge_close_times(time, end_of_run(trace))
    return sum_changes(views.category, time, views.memory_change, len(Category))


def ends_of_devices(each: Mapping[int, Series], end: float) -> dict[int, float]:
    """Return when each device, by its memory, lets go of its parameters for good; the end of the run if it keeps some.

    Training would go on there: in a longer run they stay, or others come.
    """
    ends = {}
    for device, (time, value) in each.items():
        held = np.flatnonzero(value[Category.PARAMETERS])
        after = held[-1] + 1 if len(held) else len(time)
        ends[device] = time[after].item() if after < len(time) else end
    return ends


def memory_of_devices(trace: Trace) -> dict[int, Series]:
    """Return the memory of each device, a function for each category in the order of its members."""
    views, time, each = Views(trace), trace.memory["time"], {}
    for device in used_devices(trace).tolist():
        rows = slice(*np.searchsorted(trace.memory["device"], [device, device + 1]))
        each[device] = sum_changes(views.category[rows], time[rows], views.memory_change[rows], len(Category))
    return each


def rates(key: Ints, begin: Times, end: Times, size: np.ndarray, keys: int, run: float) -> Series:
    """Return size over duration while a message travels, summed for each key from 0 to `keys`."""
    series = sum_spans(key, begin, end, size / (end - begin), keys, run)
    smallest = CLOSE_TIMES * np.abs(series.value).max(initial=0)  # the rounding that is left where nothing travels
    return series._replace(value=np.where(series.value > smallest, series.value, 0.0))


def thinned(series: Series, end: float, columns: int = PIXEL_COLUMNS) -> Series:
    """Keep the times that a page can show: those of the first, last, least and largest total of each pixel column."""
    if len(series.time) <= 4 * columns:
        return series
    column = np.minimum((series.time / end * columns).astype(np.int64), columns - 1)
    first = group_starts(column)
    by_size = np.lexsort((series.total, column))
    last = np.append(first[1:], len(column)) - 1
    rows = np.unique(np.concatenate([first, last, by_size[first], by_size[last]]))
    return Series(series.time[rows], series.value[:, rows])


MOST_CURVES = 16  # on one pair of axes
MOST_DEVICE_PANELS = 12  # of devices
_SUM_HEIGHT = 1.6  # inches
_HATCHES = dict(zip(COLOURS, ("///", "", "++", "xxx", "\\\\\\", "", "", "\\\\\\"), strict=True))


class Scale(NamedTuple):
    """The scale that all panels of a figure share: its end, its units, and whether values are of single moments."""

    end: float
    in_slots: bool
    unit: str = "B"
    at_once: bool = False

    def amount(self, value: float, unit: str = "") -> str:
        """Write a number with its unit, by default that of the scale: `36`, or `1.5 GB`."""
        return amount_text(value, "" if self.in_slots else unit or self.unit)

    def peak(self, series: Series) -> str:
        """Write a peak and its time."""
        time, value = series.peak()
        moment = f"slot {time:,}" if self.in_slots else amount_text(time, "s")
        return f"peak {self.amount(value)} at {moment}"


def scale_of(traces: Sequence[Trace], unit: str = "B", *, at_once: bool = False) -> Scale:
    """Return the scale of one figure of several traces; refuse traces that cannot stand in one figure."""
    if not traces:
        raise RequestError("traces", "there are none; give at least one")
    for trace in traces:
        views.refuse_empty(trace)
    if len({trace.in_slots for trace in traces}) > 1:
        raise RequestError("traces", "some are in slots and some in seconds; give all the same model and cluster")
    if len(traces) > MOST_CURVES:
        raise RequestError("traces", f"{len(traces)} curves cannot be told apart; give at most {MOST_CURVES}")
    return Scale(max(map(end_of_run, traces)), traces[0].in_slots, unit, at_once)


def panel(axes: Axes, heading: str, scale: Scale, most: float, ylabel: str = "", *, small: bool = False) -> None:
    """Set up axes from 0 to the end of the run, and to more than the most, so that a peak's label has room."""
    plain(axes, heading, 8 if small else 9.5)
    axes.tick_params(labelsize=6.5 if small else 7.5)
    clock(axes, scale.end, in_slots=scale.in_slots)
    top = (1.12 if small else 1.2) * most or 1
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MaxNLocator(3 if small else 5, integer=scale.in_slots))
    if not scale.in_slots:
        ylabel = ", ".join([ylabel] * bool(ylabel) + [one_unit(axes.yaxis, scale.unit, top)])
    axes.set_ylabel(ylabel, fontsize=7 if small else 9)


def steps(
    axes: Axes, time: np.ndarray, value: np.ndarray, end: float, gid: str, baseline: Any = None, **style: Any
) -> StepPatch:
    """Draw a step function until `end`, as a line, or as an area from its baseline."""
    edges = np.append(time, max(end, *time[-1:]))
    patch = StepPatch(value, edges, baseline=baseline, fill=baseline is not None, gid=gid, **style)
    axes.add_patch(patch)
    return patch


def level(axes: Axes, value: float, text: str, gid: str) -> None:
    """Draw a line across the panel at a value, named at the right edge."""
    axes.axhline(value, color=INK, linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=2.5, gid=gid)
    write_beside(axes, value, text)


def write_beside(axes: Axes, value: float, text: str) -> None:
    """Write a text right of the axes at the height of a value."""
    frame: Any = ("axes fraction", "data")
    axes.annotate(text, (1, value), (4, 0), frame, "offset points", va="center", fontsize=7.5)


def memory_over_time(traces: Sequence[Trace], *, sums: bool = False, look: Look = AS_DRAWN) -> Figure:
    """Draw the memory of devices over time.

    Of one trace the total by category, and each device; of several the activations of the fullest device of each, and
    all that the fullest device holds, or with `sums` all devices together.
    """
    scale, (title, names) = scale_of(traces), titles(traces)
    rest = [views.held_in_steady_state(trace) for trace in traces]
    later = [f"; in steady state a device holds {scale.amount(most)}" if most is not None else "" for most in rest]
    if len(traces) == 1:
        return _memory_of_one(traces[0], title + later[0], scale, look)
    figure = new_page(title, 5.5, look)
    above, below = figure.subplots(2, 1, sharex=True)
    whose, hold = ("all devices together", "hold") if sums else ("the fullest device", "holds")
    for axes, gid, heading, rows in (
        (above, "activations", f"Activations of {whose}", [Category.ACTIVATIONS]),
        (below, "everything", f"Everything that {whose} {hold}", list(Category)),
    ):
        held, ends, devices = zip(*(_memory_of(trace, rows, sums=sums) for trace in traces), strict=True)
        _memory_panel(axes, heading, scale, held, traces if sums and axes is above else ())
        _draw_curves(axes, held, scale, gid, ends)
        said = [f" {gid} {scale.peak(series)}{device}" for series, device in zip(held, devices, strict=True)]
        names = list(map((":" if axes is above else ";").join, zip(names, said, strict=True)))
    above.set_xlabel("")
    entries = _curve_entries(map("".join, zip(names, later, strict=True)))
    return finish(figure, look, {figure: entries}, columns=1)


def _memory_of_one(trace: Trace, title: str, scale: Scale, look: Look) -> Figure:
    total, each = total_memory(trace), memory_of_devices(trace)
    ends = ends_of_devices(each, scale.end)
    figure, (axes,), panels = _page_of_one(title, each, "Held by {}", scale, look)
    _stack(axes, total, CATEGORY_COLOURS, scale, "held", PIXEL_COLUMNS)
    _memory_panel(axes, "Held by all devices together" if len(each) > 1 else "Held", scale, [total], [trace])
    _mark_peak(axes, total.peak(), scale.peak(total), "peak")
    _fade(axes, min(ends.values(), default=scale.end), scale, "pale", "pale: devices have ended")
    _draw_devices(panels, each, scale, CATEGORY_COLOURS, ends)
    return finish(figure, look, {figure: _part_entries(CATEGORY_COLOURS, total)})


def _memory_of(trace: Trace, rows: Sequence[int], *, sums: bool) -> tuple[Series, float, str]:
    """Return the memory of the fullest device by these categories, or of all together; its end; its name in a key."""
    if sums:
        total = total_memory(trace)
        return total._replace(value=total.value[rows]), end_of_run(trace), ""
    whole = memory_of_devices(trace)
    each = {device: held._replace(value=held.value[rows]) for device, held in whole.items()}
    fullest = max(each, key=lambda device: each[device].peak()[1])
    end = ends_of_devices(whole, end_of_run(trace))[fullest]
    return each[fullest], end, f" on device {fullest}" if len(each) > 1 else ""


def _memory_panel(axes: Axes, heading: str, scale: Scale, totals: Sequence[Series], of: Sequence[Trace]) -> None:
    """Set up the axes of totals, with the paper's levels of some traces."""
    levels = paper_levels(of) if of else {}
    most = max(*(total.peak()[1] for total in totals), *levels.values(), 0)
    heading = heading if scale.in_slots else f"{heading}, {MEMORY_LEAVES_OUT}"
    panel(axes, heading, scale, most, "stage-activations" if scale.in_slots else "memory")
    for text, value in levels.items():
        level(axes, value, text, f"level-{value}")


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


def traffic_over_time(traces: Sequence[Trace], *, look: Look = AS_DRAWN) -> Figure:
    """Draw the bytes sent over time: at single moments if no message takes time, else the rate at which they travel.

    Of one trace the total by content, and the bytes that each device sends; of several the totals, and of which traces
    nothing is sent.
    """
    scale_of(traces)
    at_once = not any(_take_time(trace).any() for trace in traces)
    scale = scale_of(traces, "B" if at_once else "B/s", at_once=at_once)
    title, names = titles(traces)
    totals = [traffic_by_content(trace, scale) for trace in traces]
    said = [_sent_in_words(trace, total, scale) for trace, total in zip(traces, totals, strict=True)]
    if len(traces) == 1:
        each = traffic_by_sender(traces[0], scale) if len(totals[0].time) else {}
        heading = "Sent by {}" + _algorithm_note(traces[0])
        figure, (axes, *below), panels = _page_of_one(title, each, heading, scale, look, [_SUM_HEIGHT] * bool(each))
        _stack(axes, totals[0], CONTENT_COLOURS, scale, "sent", PIXEL_COLUMNS)
        _draw_devices(panels, each, scale, CONTENT_COLOURS, {})
        entries = _part_entries(CONTENT_COLOURS, totals[0])
    else:
        figure = new_page(title, 3.3 + _SUM_HEIGHT, look)
        axes, *below = figure.subplots(2, 1, sharex=True, height_ratios=[2.9, _SUM_HEIGHT])
        peaks = [f": {scale.peak(total)}, " if len(total.time) else ": " for total in totals]
        entries = _curve_entries(map("".join, zip(names, peaks, said, strict=True)))
    _traffic_panel(axes, traces, totals, scale)
    if len(traces) > 1:
        _draw_curves(axes, totals, scale, "sent", list(map(end_of_run, traces)))
    elif each:
        _mark_peak(axes, totals[0].peak(), scale.peak(totals[0]), "peak")
    for sums in below:
        axes.set_xlabel("")
        _draw_sums(sums, traces, totals, scale, f"Sent so far: {said[0]}" if len(traces) == 1 else "Sent so far")
    return finish(figure, look, {figure: entries}, columns=5 if len(traces) == 1 else 1)


def _take_time(trace: Trace) -> np.ndarray:
    takes_time: np.ndarray = trace.messages["end"] - trace.messages["start"] > CLOSE_TIMES * end_of_run(trace)
    return takes_time


def _sizes_over_time(trace: Trace, message: Ints, size: np.ndarray, scale: Scale) -> Series:
    """Return sizes, each of a row of messages, over time and by content."""
    messages = trace.messages
    drawn = (size > 0) & (scale.at_once | _take_time(trace)[message])
    message, size = message[drawn], size[drawn]
    content = views.codes(messages["content"][message], Content)
    start, end = messages["start"][message], messages["end"][message]
    if scale.at_once:
        return sum_at_times(content, merge_close_times(start, scale.end), size, len(Content))
    return rates(content, start, end, size, len(Content), scale.end)


def traffic_by_content(trace: Trace, scale: Scale) -> Series:
    """Return the bytes that must leave devices over time by content; they do not depend on algorithms."""
    every = np.arange(len(trace.messages["size"]))
    return _sizes_over_time(trace, every, copied_bytes(trace.messages), scale)


def traffic_by_sender(trace: Trace, scale: Scale) -> dict[int, Series]:
    """Return the bytes that each device sends over time by content; collectives run by their algorithms."""
    algorithms = trace.algorithms if isinstance(trace, Run) else None
    message, device, size = sent_shares(trace.messages, str(trace.request.get("collective")), algorithms)
    rows = {number: np.flatnonzero(device == number) for number in np.union1d(used_devices(trace), device).tolist()}
    return {number: _sizes_over_time(trace, message[own], size[own], scale) for number, own in rows.items()}


def _sent_in_words(trace: Trace, total: Series, scale: Scale) -> str:
    if not len(total.time):
        return "nothing is sent"
    size = int(copied_bytes(trace.messages).sum())
    mean = scale.amount(size / end_of_run(trace), "B/s")
    return f"{scale.amount(size, 'B')} in all, mean {mean}{' per slot' if scale.in_slots else ''}"


def _algorithm_note(trace: Trace) -> str:
    """Return by which algorithms collectives run, if there are any; but for all-reduces, binomial trees by default."""
    name, ops = label(str(trace.request.get("collective"))), set(trace.messages["op"].tolist())
    if "all_reduce" in ops:
        return f", all-reduces by {name}"
    trees = name if name in ("halving-doubling", "best") else "binomial trees"
    return f", collectives by {trees}" if ops - {"p2p"} else ""


def _traffic_panel(axes: Axes, traces: Sequence[Trace], totals: Sequence[Series], scale: Scale) -> None:
    """Set up the axes of the traffic of all devices together, with notes on how it is counted."""
    heading = "Sent by all devices together"
    if any((trace.messages["op"] != "p2p").any() for trace in traces):
        heading += "; a collective of k counts k − 1 copies, an all-reduce 2(k − 1)"
    unit = "stage-activations at a moment" if scale.in_slots else "at a moment" if scale.at_once else "rate"
    panel(axes, heading, scale, max(total.peak()[1] for total in totals), unit)
    if not any(len(total.time) for total in totals):
        axes.text(0.5, 0.5, "nothing is sent", transform=axes.transAxes, ha="center", color=GREY, fontsize=9)
    instant = 0 if scale.at_once else sum(int(copied_bytes(each.messages)[~_take_time(each)].sum()) for each in traces)
    if instant:
        _write_in_corner(axes, f"without {scale.amount(instant, 'B')} that take no time")


def _write_in_corner(axes: Axes, text: str) -> None:
    """Write a note into the upper right corner."""
    style: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 7, "color": GREY, "zorder": 6}
    axes.annotate(text, (1, 1), (-2, -2), "axes fraction", "offset points", **style)


def sent_so_far(total: Series, scale: Scale) -> tuple[Times, np.ndarray]:
    """Return the sum of all that is sent until each time: it jumps if messages take no time, else it grows evenly."""
    time = np.concatenate([[0], total.time, [scale.end]])
    values = np.concatenate([[0], total.total])
    if scale.at_once:
        return time, np.append(values.cumsum(), values.sum())
    return time, np.concatenate([[0], (values * np.diff(time)).cumsum()])


def _draw_sums(axes: Axes, traces: Sequence[Trace], totals: Sequence[Series], scale: Scale, heading: str) -> None:
    """Draw the sum of bytes sent until each time, a line for each trace: level while nothing is sent."""
    lines = [sent_so_far(one, scale._replace(end=end_of_run(of))) for one, of in zip(totals, traces, strict=True)]
    unit = "stage-activations" if scale.in_slots else "sent"
    panel(axes, heading, scale._replace(unit="B"), max(line[1][-1] for line in lines), unit)
    for k, (time, value) in enumerate(lines):
        look = _look_of_curve(k, len(lines)) if len(lines) > 1 else {"color": INK, "linewidth": 1.2}
        drawstyle = "steps-post" if scale.at_once else "default"
        axes.plot(time, value, drawstyle=drawstyle, gid=f"sum-{k}", solid_joinstyle="miter", **look)


def _page_of_one(
    title: str, each: Mapping[int, Series], heading: str, scale: Scale, look: Look, more: Sequence[float] = ()
) -> tuple[Figure, list[Axes], dict[int, Axes]]:
    """Return the figure of one trace, its axes (of the total, and of panels of `more` inches), and those of devices."""
    fullest = sorted(each, key=lambda device: -each[device].peak()[1])[:MOST_DEVICE_PANELS]
    shown = sorted(fullest) if len(each) > 1 else []
    across = max(1, min(4, len(shown), round((look.inches_wide or PAGE_WIDTH) / 1.7)))
    down, heights = -(-len(shown) // across), [2.7, *more]
    parts = [sum(heights), *[0.45 + 1.1 * down] * bool(down)]
    figure = new_page(title, sum(parts) + 0.4, look)
    above, *below = figure.subfigures(len(parts), 1, squeeze=False, height_ratios=parts).flat
    axes = list(above.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights).flat)
    grid: list[Axes] = []
    for part in below:
        words = heading.format("each device")
        if others := [each[device].peak()[1] for device in each.keys() - set(shown)]:
            peaks = " to ".join(dict.fromkeys(map(scale.amount, (min(others), max(others)))))
            words = heading.format(f"the {len(shown)} fullest of {len(each)} devices") + f"; others' peaks: {peaks}"
        part.suptitle(words, x=0.012, ha="left", fontsize=9.5, color=INK, wrap=True)
        grid = list(part.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat)
    for unused in grid[len(shown) :]:
        unused.set_visible(False)
    return figure, axes, dict(zip(shown, grid, strict=False))


def _draw_devices(
    panels: Mapping[int, Axes],
    each: Mapping[int, Series],
    scale: Scale,
    colours: Mapping[Any, str],
    ends: Mapping[int, float],
) -> None:
    """Draw a small panel for each device, with its peak."""
    most = max((each[device].peak()[1] for device in panels), default=0)
    for number, (device, axes) in enumerate(panels.items()):
        peak, place = each[device].peak(), axes.get_subplotspec()
        across = place.get_gridspec().ncols if place else 1
        panel(axes, f"device {device}: peak {scale.amount(peak[1])}", scale, most, small=True)
        _stack(axes, each[device], colours, scale, f"device-{device}", PIXEL_COLUMNS // 4)
        if peak[1]:
            _mark_peak(axes, peak, "", f"peak-{device}")
        _fade(axes, ends.get(device, scale.end), scale, f"pale-{device}")
        axes.set(xlabel="", **({"ylabel": ""} if number % across else {}))
        axes.tick_params(labelbottom=number + across >= len(panels))


def _part_entries(colours: Mapping[Any, str], total: Series) -> list[Artist]:
    """Return a key's entries: the parts that are not empty, the lowest first."""
    drawn = [(shade, views.word_of(member)) for member, shade in colours.items() if total.value[member].any()]
    return [_hatched(Patch(facecolor=shade, label=name, linewidth=0), shade) for shade, name in drawn]


def _stack(axes: Axes, series: Series, colours: Mapping[Any, str], scale: Scale, gid: str, columns: int) -> None:
    """Draw functions on each other; where a part is thinner than a line, it is a line."""
    few = _shown(series, scale, columns)
    below = np.zeros(len(few.time), dtype=few.value.dtype)
    for member, shade in colours.items():
        above, seen = below + few.value[member], few.value[member] > 0
        if seen.any():
            name = f"{gid}-{views.word_of(member).replace(' ', '-')}"
            part = steps(axes, few.time, np.where(seen, above, np.nan), scale.end, name, below)
            part.set(facecolor=shade, edgecolor=shade, linewidth=0.5, zorder=2)
            _hatched(part, shade)
        below = above
    if scale.unit == "B" and not scale.at_once:
        width = 0.8 if len(few.time) < columns // 4 else 0.3
        steps(axes, few.time, below, scale.end, f"{gid}-total", edgecolor=INK, linewidth=width, zorder=3)


def _hatched(part: Any, shade: str) -> Any:
    """Return a shape hatched in white; matplotlib has colours of hatches since 3.11, before that they are of edges."""
    is_new = hasattr(part, "set_hatchcolor")
    white = {"hatchcolor": "white", "hatch_linewidth": 0.5} if is_new else {"edgecolor": "white", "linewidth": 0}
    part.set(hatch=_HATCHES[shade], **white)
    return part


def _shown(series: Series, scale: Scale, columns: int = PIXEL_COLUMNS, slots: float = 0.4) -> Series:
    """Return the times that a page can show; values of single moments are as wide as can be seen."""
    few = thinned(series, scale.end, columns)
    if not scale.at_once:
        return few
    wide = max(slots if scale.in_slots else 0.0, scale.end / 300)
    begin = few.time - wide / 2
    stop = np.minimum(begin + wide, np.append(begin[1:], np.inf))
    value = np.zeros((len(few.value), 1 + 2 * len(begin)), dtype=few.value.dtype)
    value[:, 1::2] = few.value
    return Series(np.append(begin.min(initial=0.0), np.column_stack([begin, stop])), value)


def _mark_peak(axes: Axes, at: tuple[float, float], text: str, gid: str) -> None:
    """Mark a peak, with its label on the side where there is room."""
    share = at[0] / axes.get_xlim()[1]
    side, shift = ("left", -3) if share < 0.33 else ("right", 3) if share > 0.67 else ("center", 0)
    (spot,) = axes.plot([at[0]], [at[1]], marker=CARETDOWN, markersize=5, color=INK, markeredgecolor="white")
    spot.set(gid=gid, zorder=5, markeredgewidth=0.5, clip_on=False)
    box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.8}
    if text:
        style: dict[str, Any] = {"fontsize": 8, "color": INK, "zorder": 6, "bbox": box}
        axes.annotate(text, at, (shift, 6), textcoords="offset points", ha=side, **style)


def _fade(axes: Axes, begin: float, scale: Scale, gid: str, text: str = "") -> None:
    """Make a panel pale from a time on, and say why where there is room."""
    if begin < scale.end:
        axes.axvspan(begin, scale.end, color="white", alpha=0.65, linewidth=0, zorder=4, gid=gid)
        _write_in_corner(axes, text)


def _draw_curves(axes: Axes, totals: Sequence[Series], scale: Scale, gid: str, ends: Sequence[float]) -> None:
    """Draw the totals of several series that are not empty, each until its own end, with its peak marked.

    Each is a dashed line over a thin line, which no short peak can slip through.
    """
    for k, (series, end) in enumerate(zip(totals, ends, strict=True)):
        before = series.time <= end if scale.at_once else series.time < end
        if before.any():
            few = _shown(Series(series.time[before], series.value[:, before]), scale, slots=0.1)
            look = _look_of_curve(k, len(totals))
            ink, order = look.pop("color"), look.pop("zorder")
            for name, style in ((f"{gid}-{k}-under", {"linewidth": 0.6}), (f"{gid}-{k}", look)):
                steps(axes, few.time, few.total, end, name, edgecolor=ink, zorder=order, **style)
            _mark_peak(axes, series.peak(), "", f"{gid}-{k}-peak")


def _look_of_curve(number: int, among: int) -> dict[str, Any]:
    """Return the look of one of several lines; later ones are thinner, so that coinciding lines are all seen."""
    wide = 1.3 + min(0.45, 2.4 / among) * (among - 1 - number)
    dashes = distinct(DASHES, number)
    return {"color": colour(number), "linewidth": wide, "linestyle": dashes, "zorder": 3 + 0.01 * number}


def _curve_entries(texts: Iterable[str]) -> list[Artist]:
    looks: Any = ({"color": colour(number), "linestyle": distinct(DASHES, number)} for number in count())
    return [Line2D([], [], label=text, **look) for text, look in zip(texts, looks, strict=False)]


def memory_line(trace: Trace, axes: Axes, *, sums: bool = False, **style: Any) -> None:
    """Draw the memory of the fullest device, or with `sums` of all devices together, into axes of another figure."""
    series, end, _ = _memory_of(trace, list(Category), sums=sums)
    time, total = np.append(series.time, end), np.append(series.total, series.total[-1:])
    axes.plot(time, total, drawstyle="steps-post", **{"label": views.plain_title(trace)} | style)
    _name_axes(axes, trace, "memory")


def traffic_line(trace: Trace, axes: Axes, **style: Any) -> None:
    """Draw the sum of bytes that all devices have sent until each time, into axes of another figure."""
    at_once = not _take_time(trace).any()
    scale = scale_of([trace], at_once=at_once)
    drawstyle, label = "steps-post" if at_once else "default", views.plain_title(trace)
    axes.plot(*sent_so_far(traffic_by_content(trace, scale), scale), drawstyle=drawstyle, **{"label": label} | style)
    _name_axes(axes, trace, "sent so far")


def _name_axes(axes: Axes, trace: Trace, what: str) -> None:
    """Name both axes, with the unit of the largest number on each."""
    if trace.in_slots:
        axes.set(xlabel="time, slots", ylabel=f"{what}, stage-activations")
        return
    axes.set_xlabel(f"time, {one_unit(axes.xaxis, 's', axes.get_xlim()[1])}")
    axes.set_ylabel(f"{what}, {one_unit(axes.yaxis, 'B', axes.get_ylim()[1])}")

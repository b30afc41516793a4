"""Pictures of studies: compared schedules as bars or points, plans as points, break-even as curves, ranks in grids."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, PercentFormatter

from cdpsim.draw import sheet
from cdpsim.draw.canvas import AS_DRAWN, GREY, INK, TITLE, Look, label, one_unit, plain
from cdpsim.draw.palette import COLOURS, colour, ink_on
from cdpsim.draw.sheet import MARKERS, ORDINARY, distinct, finish, new_page, wrapped
from cdpsim.errors import RequestError
from cdpsim.files.units import counted, short_text
from cdpsim.studies.breakeven import BreakEven, StepCurve
from cdpsim.studies.compare import Measured, rate_column
from cdpsim.studies.comparison import SPLIT_NOTE, Comparison
from cdpsim.studies.mesh import RankMesh
from cdpsim.studies.plan import Plan

_RATES = {"tokens": "tokens per second", "samples": "samples per second", "rate": "micro-batches per second"}
_NAMES, _PANEL = 1.6, 1.1  # inches: the width of the names of bars, and the least width of a panel


def comparison_bars(comparison: Comparison, look: Look = AS_DRAWN) -> Figure:
    """Draw the figures of runs as bars; of the idle time, the part that waits for messages is darker.

    Of many runs there are bars of the median step, with a line from the 5 % quantile to that of 95 %. Where panels have
    no room side by side, they are in several rows.
    """
    measured, slots = comparison.measured, comparison.slots
    measures = _measures(measured, slots=slots)
    wide = look.inches_wide or _NAMES + 1.6 * len(measures)
    room = wide / look.enlargement(ORDINARY) - _NAMES  # inches, in letters of an ordinary size
    across = min(len(measures), max(1, int(room / _PANEL)))
    down = -(-len(measures) // across)
    figure = new_page(heading_of(comparison), 0.4 + down * (0.28 * len(measured) + 0.5), look, wide)
    panels = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes, (column, heading, unit) in zip(panels.flat, measures, strict=False):
        plain(axes, wrapped(heading, 72 * room / across, 9), size=9)
        _draw_column(axes, measured, column, "" if slots and unit != "%" else unit)
    for axes in panels.flat[len(measures) :]:
        axes.axis("off")
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(measured)), _row_labels(comparison), fontsize=8.5)
    panels[0, 0].set_ylim(len(measured) - 0.4, -0.6)
    notes = ["dark: waiting for a message"] * any(one.exposed for one in measured)
    if any(one.steps for one in measured):
        notes.append("bars: the median of the runs; lines: from their 5 % to their 95 % quantile")
    notes += ["!: more than a device has"] * (not all(one.fits for one in measured))
    return finish(figure, look, {figure: []}, title=notes_of(comparison, notes))


def heading_of(comparison: Comparison) -> str:
    """Return the title of a picture of a comparison."""
    measured, heads = comparison.measured, [head for head in comparison.heads if head != SPLIT_NOTE]
    if not heads:
        alike = [name for name in ("n", "m") if len({getattr(one, name) for one in measured}) == 1]
        heads = [", ".join(f"{name} = {getattr(measured[0], name)}" for name in alike)] * bool(alike)
    return label("; ".join(["Schedules side by side", *heads]), 300)


def notes_of(comparison: Comparison, notes: Sequence[str]) -> str:
    """Return the lines that belong below a picture of a comparison."""
    return "\n".join(label(text, 1000) for text in (*[SPLIT_NOTE] * comparison.split, *notes, *comparison.notes))


def _measures(measured: Sequence[Measured], *, slots: bool) -> list[tuple[str, str, str]]:
    """Return the columns with their headings and units; times of a step only where all steps are alike."""
    rate = rate_column(measured)
    heading = "micro-batches per slot" if slots else _RATES[rate]
    found = [(rate, heading, "number")]
    alike = len({(one.micro_batches, one.batch) for one in measured}) == 1
    if alike or any(one.steps for one in measured):
        found.append(("step", "training step", "s"))
    if any(one.mfu for one in measured):
        found.append(("mfu", "MFU", "%"))
    found += [("bubble", "bubble", "%"), ("memory", "memory, fullest device", "B")]
    found += [("sent", "sent for a step", "B")] * alike
    if len({one.ranks for one in measured}) > 1:
        what = "ranks" if any(one.ranks > one.devices for one in measured) else "devices"
        found.append((what, what, ""))
    return found


def _draw_column(axes: Axes, measured: Sequence[Measured], column: str, unit: str) -> None:
    """Draw the bars of a column, with their numbers; a line from the 5 % to the 95 % quantile of many runs."""
    for row, one in enumerate(measured):
        quantiles = one.steps if column == "step" else None
        value = one.value("50%" if quantiles else column)
        look: dict[str, Any] = {"height": 0.62, "color": COLOURS[4] if column == "bubble" else COLOURS[0]}
        if quantiles:
            low, median, high = (quantiles[name] for name in ("5%", "50%", "95%"))
            look |= {"xerr": [[median - low], [high - median]], "ecolor": INK, "capsize": 2.5}
        bars = axes.barh(row, value or 0, **look)
        bars[0].set_gid(f"{column}-{row}")
        for part in bars.errorbar.lines[2] if bars.errorbar else ():
            part.set_gid(f"step-{row}-from-5-to-95")
        if column == "bubble":
            axes.barh(row, one.exposed, height=0.62, color=COLOURS[0], gid=f"exposed-{row}")
        excess = column == "memory" and not one.fits
        ink = COLOURS[5] if excess else INK
        axes.bar_label(bars, [_bar_text(value, unit) + " !" * excess], padding=3, fontsize=7.5, color=ink)
    axes.set_xlim(0, axes.dataLim.x1 or 1)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False)


def _row_labels(comparison: Comparison) -> list[str]:
    """Return the schedule of each row with its mark; with its rule and options where another row has the same."""
    measured, labels = comparison.measured, []
    for one in measured:
        rules = {other.rule for other in measured if other.schedule == one.schedule}
        words = [one.schedule + comparison.mark(one), *(f"{name} {value}" for name, value in one.asked.items())]
        labels.append(label(", ".join(words + [one.rule] * (len(rules) > 1))))
    return labels


def _bar_text(value: float | None, unit: str) -> str:
    """Return the number at the end of a bar; `-` for None."""
    if value is None:
        return "-"
    if unit in ("", "number"):
        return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"
    return short_text(value, unit, 4 if unit == "%" else 3)


_WIDE, _HIGH = 8.0, 4.9  # inches
_BEYOND = 1.3  # times the largest memory that fits, and the slowest or the largest of a front: more is not drawn there
_SIZE, _LARGE, _RING = 3.5, 6.5, 3.0  # points, of which a ring adds some
_EDGE = 0.04  # of the axes, around their points
_RING_LOOK: dict[str, Any] = {
    "marker": "o",
    "markersize": _LARGE + _RING,
    "markerfacecolor": "none",
    "markeredgecolor": INK,
    "markeredgewidth": 0.7,
    "linestyle": "none",
    "clip_on": False,
}
_JOINED: dict[str, Any] = {"color": GREY, "linewidth": 0.9}


def bubble_over_memory(comparison: Comparison, look: Look = AS_DRAWN) -> Figure:
    """Draw bubble over memory: a point for all runs that have the same; a line joins the best on equally many devices.

    What has more than a device is hollow, and with far more it stands at the edge.
    """
    measured, at = comparison.measured, defaultdict[tuple[int, float], list[Measured]](list)
    for one in sorted(measured, key=lambda one: (one.memory, one.bubble)):
        at[one.memory, one.bubble].append(one)
    largest = max(one.memory for one in measured)
    end = min(largest, _BEYOND * max((one.memory for one in measured if one.fits), default=largest)) or 1
    figure = new_page(heading_of(comparison), _HIGH, look, _WIDE)
    axes = figure.subplots()
    plain(axes, "")
    counts = sorted({one.ranks for one in measured})
    counts_differ = len(counts) > 1
    for devices in counts:
        _join(axes, [(one.memory, one.bubble) for one in measured if one.ranks == devices], f"best-of-{devices}")
    entries: list[Artist] = []
    for number, ((memory, bubble), runs) in enumerate(at.items()):
        style = _mark_of(number, hollow=not all(one.fits for one in runs))
        style |= {"marker": ">"} if memory > end else {}
        axes.plot([min(memory, end)], [bubble], gid=f"point-{number}", **style)
        names = dict.fromkeys(f"{one.schedule} ({one.ranks})" if counts_differ else one.schedule for one in runs)
        far = f": {short_text(memory, 'B', 3)}" if memory > end else ""
        words = "\n".join(wrap(label(", ".join(names), 300) + far, 40))
        entries.append(Line2D([], [], label=words, **style))
    axes.set(xlim=(0, (1 + _EDGE) * end), ylim=(-0.02, 1.12 * max(one.bubble for one in measured) or 1))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    unit = "stage-activations" if comparison.slots else one_unit(axes.xaxis, "B", end)
    axes.set(xlabel=f"memory of the fullest device, {unit}", ylabel="bubble: share of the time that is idle")
    notes = ["in brackets: devices; a line joins the best of those on equally many"] * counts_differ
    notes += ["hollow: more than a device has"] * (not all(one.fits for one in measured))
    return finish(figure, look, {figure: entries}, columns=4, title=notes_of(comparison, notes))


def plan_picture(plan: Plan, look: Look = AS_DRAWN) -> Figure:
    """Draw all candidates that were simulated and fit: a point for each, whose colour and shape are its schedule's.

    Those of the plan's front are larger; a line joins the least times over memory, and a ring has staleness.
    Candidates that are much slower or larger than all of the front are counted instead.
    """
    front, batch = [row.measured for row in plan.front], plan.wanted.batch
    slowest, largest = (max((float(getattr(one, name)) for one in front), default=0.0) for name in ("step", "memory"))
    shown = [one for one in plan.fitting if one.step <= _BEYOND * slowest and one.memory <= _BEYOND * largest]
    if not shown:
        raise RequestError("output", "has nothing to show: no candidate that fits has been simulated; leave it out")
    best = set(map(id, front))
    shown.sort(key=lambda one: (id(one) in best, one.memory, one.step))
    names = list(dict.fromkeys(one.schedule for one in sorted(shown, key=lambda one: one.step)))
    figure = new_page(_title(plan), _HIGH, look, _WIDE)
    axes = figure.add_subplot()
    plain(axes, "")
    _join(axes, [(float(one.memory), float(one.step) / batch) for one in shown], "front")
    for number, one in enumerate(shown):
        place, style = ([float(one.memory)], [float(one.step) / batch]), _mark_of(names.index(one.schedule))
        style |= {} if id(one) in best else {"markersize": _SIZE, "zorder": 2, "alpha": 0.55}
        axes.plot(*place, gid=f"candidate-{number}", **style)
        if one.staleness:
            axes.plot(*place, gid=f"ring-{number}", **_RING_LOOK | {"markersize": style["markersize"] + _RING})
    _name_axes_of_plan(axes, plan)
    entries = [Line2D([], [], label=label(name, 30), **_mark_of(k)) for k, name in enumerate(names)]
    if any(one.staleness for one in shown):
        entries.append(Line2D([], [], label="ring: stale parameters", **_RING_LOOK))
    entries.append(Line2D([], [], label="least time over memory", **_JOINED))
    outside = len(plan.fitting) - len(shown)
    words = f"{outside:,} slower or larger ones are outside" if outside else ""
    return finish(figure, look, {figure: entries}, columns=4, title=words)


def _title(plan: Plan) -> str:
    """Return the devices, the batch and the proof of a plan in words."""
    wanted, options = plan.wanted, plan.wanted.variants[0].options
    names = [str(getattr(options[name], "name", options[name])) for name in ("model", "cluster") if name in options]
    of = "" if plan.in_slots else f"{' on '.join(names)}, "
    return label(f"{of}{wanted.devices} devices, batch {wanted.batch}: {plan.status.partition(':')[0]}", 200)


def _name_axes_of_plan(axes: Axes, plan: Plan) -> None:
    """Name the axes of drawn points, with a line at the memory that a device may hold."""
    if plan.wanted.memory is not None:
        axes.axvline(plan.wanted.memory, color=GREY, linewidth=1, linestyle=(0, (4, 3)), gid="limit")
    axes.margins(_EDGE)
    unit = "stage-activations" if plan.in_slots else one_unit(axes.xaxis, "B", axes.get_xlim()[1])
    time = "" if plan.in_slots else f"step for each sample, {one_unit(axes.yaxis, 's', axes.get_ylim()[1])}"
    axes.set(xlabel=f"memory of the fullest device, {unit}", ylabel=time or "slots for each micro-batch")


def _join(axes: Axes, points: Iterable[tuple[float, float]], gid: str) -> None:
    """Join the points that have no other one below and to the left."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    axes.plot(*zip(*best, strict=True), gid=gid, drawstyle="steps-post", zorder=1, **_JOINED)


def _mark_of(number: int, *, hollow: bool = False) -> dict[str, Any]:
    """Return the mark of a point by the number of its colour and shape."""
    style: dict[str, Any] = {"color": colour(number), "marker": distinct(MARKERS, number), "linestyle": "none"}
    style |= {"markerfacecolor": "white"} if hollow else {"markeredgecolor": INK, "markeredgewidth": 0.4}
    return style | {"markersize": _LARGE, "zorder": 3, "clip_on": False}


_HEIGHT, _WIDTH = 3.6, 6.4  # inches, of a panel
_LEAST_OF_TWO = 8.0  # inches: less has no room for two panels side by side
_OWN: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": (0, (4, 3))}
_NAME: dict[str, Any] = {"textcoords": "offset points", "color": GREY, "fontsize": 8}


def break_even_curves(
    found: Sequence[BreakEven],
    factors: Sequence[float],
    curves: Sequence[StepCurve],
    *,
    share: float,
    look: Look = AS_DRAWN,
) -> Figure:
    """Draw the step times of each schedule over bandwidth, and a panel of break-evens over N if there are several N.

    `factors` are the bandwidths of the curves' points as multiples of the cluster's own.
    """
    names = list(dict.fromkeys(_curve_name(one, found) for one in found))
    if len(names) > len(COLOURS):
        raise RequestError("schedules", f"{len(names)} curves cannot be told apart; name at most {len(COLOURS)}")
    panels = 1 + (len({one.n for one in found}) > 1)
    down = panels if look.inches_wide and look.inches_wide < _LEAST_OF_TWO else 1
    figure = new_page("", _HEIGHT * down, look, _WIDTH if down == panels else 1.9 * _WIDTH)
    axes, *over_n = figure.subplots(down, panels // down, squeeze=False).flat
    numbers = [names.index(_curve_name(one, found)) for one, _ in curves]
    _over_bandwidth(axes, factors, curves, numbers, share)
    for each in over_n:
        _over_n(each, found, names)
    entries = [_entry(one, names[k], k) for (one, _), k in zip(curves, numbers, strict=True)]
    words = f"hidden at N = {curves[0][0].n}, but for {100 * share:g} % of the step, from"
    return finish(figure, look, {figure: entries}, columns=panels, title=words)


def _style(number: int) -> dict[str, Any]:
    return {"color": colour(number), "marker": MARKERS[number], "linewidth": 1.6, "markersize": 5}


def _over_bandwidth(
    axes: Axes, factors: Sequence[float], curves: Sequence[StepCurve], numbers: Sequence[int], share: float
) -> None:
    """Draw the exposed share of steps over bandwidth, with the break-evens marked."""
    scale = _common_bandwidth([one for one, _ in curves])
    bandwidths = [factor * scale for factor in factors]
    plain(axes, f"share of a training step that waits, N = {curves[0][0].n}")
    for (one, steps), k in zip(curves, numbers, strict=True):
        exposed = [max(0.0, 1 - one.free / step) for step in steps]
        axes.plot(bandwidths, exposed, color=colour(k), linewidth=1.6, gid=f"exposed-{k}")
        if one.factor:
            level = share / (1 + share)  # of a step that is longer by that share
            look: dict[str, Any] = {"color": colour(k), "markersize": 6, "markeredgecolor": "white", "zorder": 3}
            axes.plot([one.factor * scale], [level], MARKERS[k], **look, clip_on=False, gid=f"break-even-{k}")
    axes.set(xscale="log", xlim=(bandwidths[0], bandwidths[-1]), ylabel="exposed")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.axvline(scale, gid="own", **_OWN)
    axes.annotate("this cluster", (scale, 0.985), (4, 0), ("data", "axes fraction"), va="top", **_NAME)
    _name_bandwidths(axes.xaxis, scale)


def _over_n(axes: Axes, found: Sequence[BreakEven], names: Sequence[str]) -> None:
    scale = _common_bandwidth(found)
    plain(axes, "bandwidth from which on messages are hidden")
    for k, name in enumerate(names):
        points = [(one.n, one.factor * scale) for one in found if _curve_name(one, found) == name and one.factor]
        n, bandwidth = zip(*points, strict=True) if points else ((), ())
        axes.plot(n, bandwidth, **_style(k), gid=f"over-n-{k}")
    numbers = sorted({one.n for one in found})
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axhline(scale, gid="own-over-n", **_OWN)
    axes.margins(0.1)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("N")
    axes.annotate("this cluster", (1, scale), (4, 0), ("axes fraction", "data"), va="center", **_NAME)
    _name_bandwidths(axes.yaxis, scale)


def _common_bandwidth(found: Sequence[BreakEven]) -> float:
    """Return the bandwidth that all have in common; 1 if they differ, as then only multiples can be compared."""
    bandwidths = {one.bandwidth for one in found if one.bandwidth is not None}
    return bandwidths.pop() if len(bandwidths) == 1 else 1.0


def _name_bandwidths(axis: Any, scale: float) -> None:
    """Label an axis with bandwidths in the unit of the cluster's, or with multiples of it."""
    axis.set_minor_formatter(NullFormatter())
    if scale == 1.0:
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_label_text("bandwidths, as multiples of this cluster's")
    else:
        axis.set_label_text(f"narrowest bandwidth between two devices, {one_unit(axis, 'B/s', scale)}")


def _curve_name(one: BreakEven, found: Sequence[BreakEven]) -> str:
    """Return the schedule of a curve, with its rule if another curve of the schedule has another."""
    rules = {other.rule for other in found if other.schedule == one.schedule}
    return one.schedule if len(rules) == 1 else f"{one.schedule}, {one.rule}"


def _entry(one: BreakEven, name: str, number: int) -> Line2D:
    words = "any bandwidth"
    if one.break_even is None:
        words = f"never; latency alone costs {100 * one.latency:.2g} %"
    elif one.break_even:
        bandwidth = short_text(one.break_even, "B/s", 3)
        words = f"{bandwidth}, {one.factor:.3g} times this cluster's"
    return Line2D([], [], label=f"{label(name, 40)}: {words}", **_style(number))


_MOST_CELLS, _MOST_ACROSS = 1024, 32  # ranks of a picture, and of a row
_CELL, _GAP = 13.0, 16.0  # points


def mesh_picture(found: RankMesh, look: Look = AS_DRAWN) -> Figure:
    """Draw which share of weights and of tokens each rank has, as in the Switch Transformer's Fig. 14.

    A row of a grid is a node, or a part of one.
    """
    topology, ranks = found.request.machine.topology, found.axes[0].groups.size
    if ranks > _MOST_CELLS:
        raise RequestError("ranks", f"are {ranks:,}, of which {_MOST_CELLS:,} can be drawn; ask for fewer")
    node = min(ranks, (topology and topology.per_node) or 8)
    across = next(k for k in range(min(node, _MOST_ACROSS), 0, -1) if node % k == 0)
    many = {what: int(shares.max()) + 1 for what, shares in found.shares.items()}
    titles = [f"{what}: {counted(k, 'share')}, {counted(ranks // k, 'rank')} each" for what, k in many.items()]
    wide = max(across * _CELL, *(sheet.width_of(words, 7.5) for words in titles)) + 2 * _GAP
    high, down = -(-ranks // across) * _CELL + 1.5 * _GAP, len(titles) // 2
    degrees = ", ".join(f"{each.axis} {each.degree}" for each in found.axes if each.degree > 1)
    own = f"{found.request.model.name.partition(',')[0]}: {found.heading}; {degrees}"
    heading = sheet.wrapped(label(own if look.title is None else look.title, 300), 2 * wide - _GAP, 8.5)
    foot = down * high + _GAP * look.legend
    height = foot + _GAP * bool(heading) + sheet.height_below_first(heading, 8.5)
    figure, page = sheet.new_sheet(2 * wide, height)
    sheet.write_words(page, _GAP / 2, height - _GAP / 2, heading, 8.5, gid=TITLE)
    for number, (words, what) in enumerate(zip(titles, many, strict=True)):
        left, top = number % 2 * wide + 1.5 * _GAP, foot - number // 2 * high
        sheet.write_words(page, left, top - _GAP / 2, words, 7.5)
        _draw_shares(page, left, top - _GAP, across, what, found.shares[what].tolist())
    if look.legend:
        words = "colour and number: the share that a rank has; at the left, a row's first rank"
        sheet.write_words(page, _GAP / 2, _GAP / 2, words, 6, color=GREY)
    return sheet.scale_sheet(figure, look)


def _draw_shares(page: Axes, left: float, top: float, across: int, what: str, shares: Sequence[int]) -> None:
    """Draw a cell for each rank, in rows of so many."""
    for rank, share in enumerate(shares):
        x, y, fill = left + rank % across * _CELL, top - (rank // across + 1) * _CELL, colour(share)
        style: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.8, "name": f"{what.replace(' ', '-')}-{rank}"}
        sheet.fill_polygon(page, sheet.corners_of((x, x + _CELL, y, y + _CELL)), fill, **style)
        size = 6 if share < 100 else 5
        sheet.write_words(page, x + _CELL / 2, y + _CELL / 2, str(share), size, color=ink_on(fill), ha="center")
        if rank % across == 0:
            sheet.write_words(page, left - 3, y + _CELL / 2, str(rank), 6, ha="right", color=GREY)

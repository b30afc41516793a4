"""Runs in real time: the tasks of every device, the bubbles between them, and the messages of links."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from cdpsim.draw import sheet
from cdpsim.draw.canvas import INK, PALE, TITLE, figure_with, label, one_unit, plain
from cdpsim.draw.gantt.bars import BUBBLE, Drawing, draw_bars, draw_messages, fitted_names, idle_boxes
from cdpsim.draw.gantt.blocks import Blocks, Panel, read_blocks
from cdpsim.draw.gantt.key import key_entries
from cdpsim.draw.gantt.rows import COMMUNICATION, LINK, arrange_rows, idle_times, link_names, shows_streams
from cdpsim.draw.gantt.waits import draw_waits
from cdpsim.draw.look import AS_DRAWN, Look
from cdpsim.draw.palette import COLOURS, KIND_COLOURS
from cdpsim.draw.views import KIND_WORDS, STREAM_NAMES, Views, title
from cdpsim.errors import RequestError
from cdpsim.program import Kind, Stream
from cdpsim.trace import Trace
from cdpsim.trace.metrics.waiting import IdleReason

MOST_BARS = 20_000
MOST_SCHEDULES = 12
NARROW, WIDE, TASK, MARK = 6.0, 18.0, 0.32, 0.09  # inches: all time at least and at most, a short task, a mark
THIN = 1.0  # points: narrower bars cannot be seen
LEAST_ROW = 0.4  # of a row's own height
LETTERS = 7.5  # points: of ordinary words
_TITLE_ROW, _NAME_ROW, _AXIS_ROW, _RIGHT = 0.3, 0.2, 0.42, 0.2  # inches
_KEY_ROW = 12.0  # points


class Clock(NamedTuple):
    """The time that all panels show, the inches of it, and those left of it."""

    span: float
    width: float
    left: float
    in_slots: bool

    @property
    def scale(self) -> float:
        """The points of a unit of time."""
        return self.width * 72 / self.span


def gantt(
    traces: Trace | Sequence[Trace],
    *,
    colour: str = "kind",
    links: bool | None = None,
    dependencies: bool = False,
    steps: int | None = None,
    look: Look = AS_DRAWN,
    axes: Axes | None = None,
) -> Figure:
    """Draw a row for each lane of a device; several runs one below the other, with one clock.

    A run is drawn for as many training `steps` as are asked for, else for one if every task reads what the step before
    it made, else for all. Blocks have the `colour` of their kind, micro-batch or stage. `links` adds rows for messages;
    if None, where these take time and the links are few. `dependencies` adds them, and lines from what was waited for.
    With `axes`, one run is drawn into them.
    """
    several = [traces] if isinstance(traces, Trace) else list(traces)
    _refuse_apart(several, dependencies=dependencies, axes=axes)
    every = [Views(trace) for trace in several]
    blocks = [read_blocks(views, colour, steps) for views in every]
    shown = True if dependencies else links
    names = [link_names(views, each.until, shown) for views, each in zip(every, blocks, strict=True)]
    streams = [shows_streams(views, each.until, shown) for views, each in zip(every, blocks, strict=True)]
    if links and not any(names) and not any(streams):
        raise RequestError("links", "have no rows, as nothing is sent; leave them out")
    clock = _clock_of(every, blocks, names, look, axes)
    mark = clock.span * MARK * _fineness(every, blocks, names, clock) / clock.width
    panels = []
    for views, each, own, below in zip(every, blocks, names, streams, strict=True):
        rows = arrange_rows(views, mark, own, streams=below)
        panels.append(Panel(views, rows, each, idle_times(views, rows, each.until), ""))
    if axes is not None:
        return _draw_into(axes, panels[0], clock)
    if len(panels) > 1:
        panels = [panel._replace(name=name) for panel, name in zip(panels, sheet.titles(several)[1], strict=True)]
    return _new_figure(
        panels, sheet.titles(several)[0] if len(panels) > 1 else title(several[0]), clock, look, dependencies
    )


def _refuse_apart(traces: Sequence[Trace], *, dependencies: bool, axes: Axes | None) -> None:
    if not 0 < len(traces) <= MOST_SCHEDULES:
        raise RequestError("gantt", f"has {len(traces)} schedules; a picture shows 1 to {MOST_SCHEDULES}")
    if axes is not None and len(traces) > 1:
        raise RequestError("axes", f"have room for one schedule, not for {len(traces)}; draw each into its own")
    if len({trace.in_slots for trace in traces}) > 1:
        raise RequestError("traces", "need one unit of time, slots or seconds; draw them apart")
    if dependencies and any(Views(trace).run is None for trace in traces):
        raise RequestError("dependencies", "are not in a trace's files; draw the run itself")


def _clock_of(
    every: Sequence[Views], blocks: Sequence[Blocks], links: Sequence[Sequence[str]], look: Look, axes: Axes | None
) -> Clock:
    """Return the clock of a picture that is as wide as asked, or as its short tasks need."""
    span, short = max(each.until for each in blocks), min(each.short for each in blocks)
    names = [f"device {views.devices}" for views in every] + [name for own in links for name in own]
    for views in every:
        streams = [STREAM_NAMES[Stream(k)] for k in np.unique(views.stream).tolist() if k >= 0]
        names += [COMMUNICATION] * bool(streams) if views.has_rounds else streams
    left = 0.15 + 0.062 * max(map(len, names))
    width = min(max(span / short * TASK, NARROW), WIDE)
    if axes is not None:
        box = axes.get_position()
        width = box.width * figure_with(axes).get_figwidth()
    elif look.inches_wide:
        width = max(1.0, look.inches_wide / _enlargement(look) - left - _RIGHT)
    return Clock(span, width, left, every[0].in_slots)


def _enlargement(look: Look) -> float:
    """Return by how much the finished picture is enlarged, so that its letters are as large as asked."""
    return (look.letters or LETTERS) / LETTERS


def _fineness(every: Sequence[Views], blocks: Sequence[Blocks], links: Sequence[Sequence[str]], clock: Clock) -> float:
    """Return the fineness of lines, up to 1; refuse what is too much, or would be too narrow."""
    count = sum(len(each.chosen) for each in blocks)
    count += sum(len(views.op) for views, own in zip(every, links, strict=True) if own)
    if count > MOST_BARS:
        problem = f"has {count:,} tasks and messages; a picture shows at most {MOST_BARS:,}, an .html file any number"
        raise RequestError("gantt", f"{problem}; or take fewer --steps")
    if min(each.half for each in blocks) * clock.scale < THIN:
        problem = f"would show most tasks less than {THIN:g} point wide; take fewer --steps, or an .html file"
        raise RequestError("gantt", problem)
    return min(max(min(each.short for each in blocks) * clock.scale / 8, 0.35), 1.0)


def _new_figure(panels: Sequence[Panel], words: str, clock: Clock, look: Look, dependencies: bool) -> Figure:
    """Draw panels below each other, and the key below all."""
    words = words if look.title is None else label(look.title, 300)
    factor, several = _enlargement(look), len(panels) > 1
    wide = clock.left + clock.width + _RIGHT
    entries = _key_of(panels, clock, look, dependencies) if look.legend else []
    key = sheet.key_rows(entries, (wide - 0.2) * 72, LETTERS)
    foot = _AXIS_ROW + len(key) * _KEY_ROW / 72 + 0.05
    fixed = _TITLE_ROW * bool(words) + foot + len(panels) * (_NAME_ROW if several else 0.02)
    rows = sum(panel.rows.height for panel in panels)
    stretch = _stretch(look.high((fixed + rows) * factor) / factor - fixed, rows)
    high = fixed + rows * stretch
    figure, page = sheet.new_sheet(wide * 72, high * 72)
    page.set_zorder(-1)
    top = high
    if words:
        top -= _TITLE_ROW
        fitting = sheet.fitted(words, (wide - 0.45) * 72, LETTERS + 1.5)
        sheet.write_words(page, 6, (top + 0.12) * 72, fitting, LETTERS + 1.5, gid=TITLE)
    for number, panel in enumerate(panels):
        if several:
            top -= _NAME_ROW
            sheet.write_words(page, clock.left * 72, (top + 0.06) * 72, panel.name, LETTERS + 0.5, gid=f"name-{number}")
        else:
            top -= 0.02
        top -= panel.rows.height * stretch
        place = clock.left / wide, top / high, clock.width / wide, panel.rows.height * stretch / high
        least = max(5.5, look.least_letters / factor)
        drawing = Drawing(
            figure.add_axes(place), clock.scale, _panel_fineness(panel, clock), f"{chr(97 + number)}-" * several, least
        )
        _draw_panel(drawing, panel, clock, is_last=number == len(panels) - 1)
        if dependencies and panel.views.run:
            draw_waits(drawing.axes, panel.views, panel.views.run, panel.rows, panel.blocks.until, drawing.prefix)
    sheet.draw_key(page, 0.1 * 72, (top - _AXIS_ROW) * 72, key, _KEY_ROW, LETTERS)
    return sheet.enlarge(figure, factor)


def _key_of(panels: Sequence[Panel], clock: Clock, look: Look, dependencies: bool) -> list[sheet.KeyEntry]:
    reasons = {int(reason) for panel in panels for reason in np.unique(panel.idle.reason)}
    least = max(5.5, look.least_letters / _enlargement(look))
    names = [name for each in panels for name in fitted_names(each.blocks, each.blocks.room(clock.scale), least)[0]]
    example = "1F3" if any(not name.isdigit() for name in names if name) else "3" if any(names) else ""
    return key_entries(panels, reasons, example, dependencies=dependencies)


def _stretch(room: float, rows: float) -> float:
    """Return by how much rows are higher than they would be; refuse a height without room for them."""
    if room < LEAST_ROW * rows:
        raise RequestError(
            "height", f"leaves no room for the rows; give at least {LEAST_ROW * rows - room:.1f} inches more"
        )
    return room / rows


def _panel_fineness(panel: Panel, clock: Clock) -> float:
    return min(max(panel.blocks.short * clock.scale / 8, 0.35), 1.0)


def _draw_panel(drawing: Drawing, panel: Panel, clock: Clock, *, is_last: bool) -> None:
    axes, rows, blocks = drawing.axes, panel.rows, panel.blocks
    _prepare_axes(axes, panel, clock, is_last=is_last)
    for reason in IdleReason:
        chosen = panel.idle.reason == reason
        idle_boxes(
            drawing, reason, rows.lane_top[panel.idle.lane[chosen]], panel.idle.begin[chosen], panel.idle.end[chosen]
        )
    draw_bars(drawing, panel.views, rows, blocks)
    if len(rows.message):
        draw_messages(drawing, panel.views, rows, blocks.until)
    axes.patch.set_gid(f"{drawing.prefix}frame")


def _prepare_axes(axes: Axes, panel: Panel, clock: Clock, *, is_last: bool) -> None:
    rows = panel.rows
    plain(axes, "")
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_visible(is_last)
    if len(rows.message):
        lines = np.unique(rows.message_top) + LINK / 2
        axes.hlines(lines, 0, panel.blocks.until, color=PALE, linewidth=0.5, zorder=0.5)
    axes.set(xlim=(0, clock.span), ylim=(rows.height, 0))
    axes.set_yticks([middle for middle, _ in rows.names], [name for _, name in rows.names])
    axes.tick_params(axis="y", length=0, labelsize=LETTERS)
    axes.tick_params(axis="x", labelsize=LETTERS, labelbottom=is_last, bottom=is_last, length=3, pad=2)
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=max(2, int(clock.width / 0.5)), steps=[1, 2, 4, 5, 10], integer=clock.in_slots)
    )
    unit = "slots" if clock.in_slots else one_unit(axes.xaxis, "s", clock.span)
    if is_last:
        axes.set_xlabel(f"time ({unit})", fontsize=LETTERS, labelpad=1)


def _draw_into(axes: Axes, panel: Panel, clock: Clock) -> Figure:
    """Draw a run into axes of another figure, with a legend below them."""
    _draw_panel(Drawing(axes, clock.scale, _panel_fineness(panel, clock)), panel, clock, is_last=True)
    if panel.blocks.colour == "kind":
        kinds = [kind for kind in KIND_WORDS if kind in panel.blocks.tasks["kind"]]
        fills = [INK if kind == "U" else KIND_COLOURS[Kind[kind]] for kind in kinds]
        handles = [Patch(color=fill, label=KIND_WORDS[kind]) for kind, fill in zip(kinds, fills, strict=True)]
    else:
        column = panel.blocks.number if panel.blocks.colour == "micro-batch" else panel.blocks.tasks["stage"]
        most = min(int(column.max()) + 1, len(COLOURS))
        handles = [Patch(color=COLOURS[k], label=f"{panel.blocks.colour} {k}") for k in range(most)]
    handles.append(Patch(color=BUBBLE, label="bubble"))
    style: dict[str, Any] = {"frameon": False, "fontsize": LETTERS, "borderaxespad": 0}
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=5, **style)
    return figure_with(axes)

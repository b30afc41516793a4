"""Runs without matplotlib: a timetable in plain text; in HTML, a table of figures and a small timeline."""

from html import escape

import numpy as np

from cdpsim.draw.canvas import amount_text
from cdpsim.draw.palette import KIND_COLOURS
from cdpsim.draw.views import KIND_WORDS, Views, held_in_steady_state, plain_title
from cdpsim.files.tables import as_html
from cdpsim.files.units import counted
from cdpsim.program import Kind
from cdpsim.trace import Trace

MOST_SMALL_BARS = 1500  # of a timeline beside text
_WIDTH, _HEIGHT, _ROW, _LEFT = 640, 240, 14, 26  # pixels: at most, the last two of a row and of its number


def timetable(trace: Trace) -> str:
    """Draw a row per device and a column per slot; `F1.0` is the forward of micro-batch 1 on stage 0.

    For runs under unit costs. Tasks of a device in one slot are joined by `+`; a task that reads an older version
    than the newest is marked with `/`, as in the paper's Fig. 1.
    """
    cells: dict[tuple[int, int], list[str]] = {}
    names = ("kind", "micro_batch", "stage", "stale", "device", "start")
    for kind, i, j, stale, device, start in zip(*(trace.tasks[name].tolist() for name in names), strict=True):
        if kind != "U":
            cells.setdefault((device, start), []).append(f"{kind}{i}.{j}{'/' if stale else ''}")
    slots = 1 + max(slot for _, slot in cells)
    devices = 1 + max(device for device, _ in cells)
    header = ["slot", *map(str, range(slots))]
    rows = [[str(device), *("+".join(cells.get((device, s), [])) for s in range(slots))] for device in range(devices)]
    widths = [max(len(row[c]) for row in [header, *rows]) for c in range(slots + 1)]
    return "\n".join(" ".join(map(str.ljust, row, widths)).rstrip() for row in [header, *rows])


def run_html(trace: Trace) -> str:
    """Return a run as HTML: a table of its figures, and its first tasks as bars."""
    table = as_html(("", plain_title(trace)), list(_figures(trace).items()))
    return f"<div>{table}{_bars(Views(trace)) if len(trace.tasks) else ''}</div>"


def _figures(trace: Trace) -> dict[str, str]:
    """Return the figures of a trace in words, as far as its summary has them."""
    known, slots = trace.summary(), trace.in_slots
    facts = {"devices": f"{known['devices']:,}"} if "devices" in known else {}
    if "makespan" in known:
        facts["makespan"] = counted(known["makespan"], "slot") if slots else amount_text(known["makespan"], "s")
    if "bubble" in known:
        facts["bubble"] = f"{100 * known['bubble']:.1f} %"
    if known.get("peak_memory"):
        fullest = max(known["peak_memory"], key=lambda row: row["total"])
        words = [
            counted(size, "stage-activation") if slots else amount_text(size, "B")
            for size in (fullest["total"], held_in_steady_state(trace))
            if size is not None
        ]
        facts["peak memory"] = "; in steady state ".join([f"{words[0]} on device {fullest['device']}", *words[1:]])
    counts = {"task": len(trace.tasks), "message": len(trace.messages)}
    return facts | {"rows": ", ".join(counted(count, noun) for noun, count in counts.items())}


def _bars(views: Views) -> str:
    """Return the first tasks as bars of an SVG, a row for each device, and their colours as a line below it."""
    rows = views.bars[np.argsort(views.start[views.bars], kind="stable")]
    rows, rest = rows[:MOST_SMALL_BARS], rows[MOST_SMALL_BARS:]
    end = float(views.start[rest[0]] if len(rest) else views.end[rows].max()) or 1.0
    high, scale = min(_ROW, _HEIGHT / views.devices), (_WIDTH - _LEFT) / end
    edge = 'stroke="#fff" stroke-width=".5"' if high > 4 else 'stroke="none"'
    parts, key = [], []
    for kind, word in KIND_WORDS.items():
        chosen, colour = rows[views.kind[rows] == Kind[kind]], KIND_COLOURS[Kind[kind]]
        device = views.tasks["device"][chosen]
        left, right = (_LEFT + scale * np.minimum(moment[chosen], end) for moment in (views.start, views.end))
        boxes = [
            f"M{x:.1f} {high * row:.1f}h{until - x:.1f}v{0.86 * high:.1f}H{x:.1f}z"
            for row, x, until in zip(device.tolist(), left.tolist(), right.tolist(), strict=True)
        ]
        if boxes:
            parts.append(f'<path fill="{colour}" {edge} d="{"".join(boxes)}"><title>{word}</title></path>')
            key.append(f'<span style="color:{colour}">&#9632;</span> {word}')
    for row in range(0, views.devices, max(1, -(-views.devices * 10 // _HEIGHT))):
        place = f'x="{_LEFT - 6}" y="{high * (row + 0.75):.1f}" font-size="{min(10.0, high):.1f}"'
        parts.append(f'<text {place} text-anchor="end" fill="currentColor">{row}</text>')
    words = [f"Timeline of {plain_title(views.trace)}: a row for each device"]
    if len(rest):
        key.append(f"up to {f'slot {end:,.0f}' if views.in_slots else amount_text(end, 's')}")
        words.append(key[-1])
    size = f'width="{_WIDTH}" height="{high * views.devices + 2:.0f}" xmlns="http://www.w3.org/2000/svg"'
    picture = f"<title>{escape(', '.join(words))}</title>{''.join(parts)}"
    return f'<svg role="img" {size}>{picture}</svg><div>{" &nbsp; ".join(key)}</div>'

"""A run as a notebook shows it: its metrics as a table, and a small timeline, in HTML without any library."""

from html import escape

import numpy as np

from cdpsim.draw.canvas import amount_text
from cdpsim.draw.palette import KIND_COLOURS
from cdpsim.draw.views import KIND_WORDS, Views, held_in_steady_state, plain_title
from cdpsim.files.tables import as_html
from cdpsim.files.units import counted
from cdpsim.numeric.columns import Ints
from cdpsim.program import Kind
from cdpsim.trace import Trace

MOST_SMALL_BARS = 1500  # of a timeline beside text
_WIDTH, _HEIGHT, _ROW, _LEFT = 640, 240, 14, 26  # pixels: at most, the last two of a row and of its number


def run_html(trace: Trace) -> str:
    """Return a run as HTML: a table of its metrics, and its first tasks as bars."""
    table = as_html(("", plain_title(trace)), list(_facts_of_run(trace).items()))
    return f"<div>{table}{_bars(Views(trace)) if len(trace.tasks) else ''}</div>"


def _facts_of_run(trace: Trace) -> dict[str, str]:
    """Return the metrics of a trace in words, as far as its summary has them."""
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
    """Return the first tasks as bars of an SVG: a row for each device, the first at the top."""
    rows = views.bars[np.argsort(views.start[views.bars], kind="stable")]
    rows, rest = rows[:MOST_SMALL_BARS], rows[MOST_SMALL_BARS:]
    end = float(views.start[rest[0]] if len(rest) else views.end[rows].max()) or 1.0
    high = min(_ROW, _HEIGHT / views.devices)
    edge = 'stroke="#fff" stroke-width=".5"' if high > 4 else 'stroke="none"'
    scale = (_WIDTH - _LEFT) / end
    paths = []
    for kind, word in KIND_WORDS.items():
        chosen = rows[views.kind[rows] == Kind[kind]]
        columns = views.tasks["device"][chosen], views.start[chosen], views.end[chosen]
        boxes = [
            f"M{_LEFT + scale * start:.1f} {high * device:.1f}h{scale * (min(stop, end) - start):.1f}v{0.86 * high:.1f}"
            f"H{_LEFT + scale * start:.1f}z"
            for device, start, stop in zip(*(column.tolist() for column in columns), strict=True)
        ]
        if boxes:
            colour = KIND_COLOURS[Kind[kind]]
            name, marks = f"<title>{word}</title>", "".join(boxes)
            paths.append(f'<path fill="{colour}" {edge} d="{marks}">{name}</path>')
    labels = [
        f'<text x="{_LEFT - 6}" y="{high * (device + 0.75):.1f}" font-size="{min(10.0, high):.1f}" text-anchor="end"'
        f' fill="currentColor">{device}</text>'
        for device in range(0, views.devices, max(1, -(-views.devices * 10 // _HEIGHT)))
    ]
    words = f"Timeline of {plain_title(views.trace)}: a row for each device"
    note = f"up to {_moment(views, end)}" if len(rest) else ""
    size = f'width="{_WIDTH}" height="{high * views.devices + 2:.0f}"'
    parts = f"<title>{escape(', '.join([words, *[note] * bool(note)]))}</title>{''.join(labels + paths)}"
    return f'<svg role="img" {size} xmlns="http://www.w3.org/2000/svg">{parts}</svg>{_colours(views.kind[rows], note)}'


def _moment(views: Views, time: float) -> str:
    return f"slot {time:,.0f}" if views.in_slots else amount_text(time, "s")


def _colours(kinds: Ints, note: str) -> str:
    """Return the colours of the kinds of tasks, and a note, as a line."""
    marks = [
        f'<span style="color:{KIND_COLOURS[Kind[kind]]}">&#9632;</span> {word}'
        for kind, word in KIND_WORDS.items()
        if (kinds == Kind[kind]).any()
    ]
    return f"<div>{' &nbsp; '.join([*marks, *[note] * bool(note)])}</div>"

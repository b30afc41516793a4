"""The rows of a gantt picture: the lanes of devices, then those of links, and when lanes are idle."""

from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cdpsim.draw import scene
from cdpsim.draw.canvas import label
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Columns, Floats, Ints, Times, group_numbers, group_starts
from cdpsim.runs import Run
from cdpsim.trace import Trace
from cdpsim.trace.metrics import waiting
from cdpsim.trace.metrics.waiting import IdleReason

LANE, LINK, GAP = 0.26, 0.16, 0.1  # inches: a lane of a device, one of a link, and what is between them
MOST = 160


class Rows(NamedTuple):
    """Where everything stands: the tops of rows, in inches downwards."""

    names: list[tuple[float, str]]  # of devices and links, with their middles
    bars: Ints  # the rows of trace.tasks that are bars: all but updates that take no time
    lane: Ints  # of each of them, counted through all devices
    lane_top: Floats
    device_lane: Ints  # the first lane of each device, and one more
    message_top: Floats
    height: float


def arrange(trace: Trace, mark: float) -> Rows:
    """Give everything its row; what takes no time is as wide as `mark`, which is a time."""
    tasks, messages = trace.tasks, trace.messages
    devices = _devices(trace)
    link, link_names = _links(messages)
    refuse_rows(devices + len(link_names))
    bars = np.flatnonzero((tasks["kind"] != "U") | (tasks["end"] > tasks["start"]))
    own = _own_lane(trace, bars)
    lanes = np.ones(devices, dtype=np.int64)
    np.maximum.at(lanes, tasks["device"][bars], own + 1)
    device_lane = np.append(0, np.cumsum(lanes))
    beside = scene.lanes(link, messages["start"], np.maximum(messages["end"], messages["start"] + mark))
    links = np.ones(len(link_names), dtype=np.int64)
    np.maximum.at(links, link, beside + 1)
    refuse_rows(int(lanes.sum() + links.sum()))
    device_top = GAP + np.append(0, np.cumsum(lanes * LANE + GAP))
    below = device_top[-1] + 0.5 * GAP
    link_top = below + np.append(0, np.cumsum(links * LINK + 0.5 * GAP))
    middles = [*(device_top[:-1] + lanes * LANE / 2).tolist(), *(link_top[:-1] + links * LINK / 2).tolist()]
    names = [*(f"device {device}" for device in range(devices)), *link_names]
    return Rows(
        names=list(zip(middles, names, strict=True)),
        bars=bars,
        lane=device_lane[tasks["device"][bars]] + own,
        lane_top=np.repeat(device_top[:-1] - device_lane[:-1] * LANE, lanes) + np.arange(lanes.sum()) * LANE,
        device_lane=device_lane,
        message_top=link_top[link] + beside * LINK,
        height=float(link_top[-1]) if link_names else float(device_top[-1]),
    )


def refuse_rows(count: int) -> None:
    """Refuse more rows than a picture can show."""
    if count > MOST:
        problem = f"needs {count} rows for devices and links; a picture shows at most {MOST}, an .html file any number"
        raise RequestError("gantt", problem)


def _devices(trace: Trace) -> int:
    """How many devices there are, some of them perhaps without tasks."""
    shown = int(trace.tasks["device"].max()) + 1
    if isinstance(trace, Run):
        return max(shown, trace.program.devices)
    told = trace.summary().get("devices")
    return max(shown, told) if isinstance(told, int) else shown


def _own_lane(trace: Trace, bars: Ints) -> Ints:
    """Each bar's lane on its device: the program's, or one that was free; below those, of updates that take none."""
    names = ("device", "start", "end", "micro_batch")
    if not isinstance(trace, Run):
        return scene.lanes(*(trace.tasks[name][bars] for name in names))
    program, node = trace.program, trace.task_nodes[bars]
    lane = np.empty(len(program.lane_tasks), dtype=np.int64)
    lane[program.lane_tasks] = group_numbers(program.lane_start[:-1], len(program.lane_tasks))
    device = program.tasks.device[program.lane_tasks[program.lane_start[:-1]]]
    number = np.arange(len(device)) - np.searchsorted(device, device)
    own = np.empty(len(bars), dtype=np.int64)
    inside = _in_lane(trace, bars)
    own[inside] = number[lane[node[inside]]]
    below = [trace.tasks[name][bars[~inside]] for name in names]
    own[~inside] = np.bincount(device)[below[0]] + scene.lanes(*below)
    return own


def _in_lane(trace: Trace, bars: Ints) -> npt.NDArray[np.bool_]:
    """Which bars are in lanes of the program, and not updates beside them; of a trace from files, all are."""
    if not isinstance(trace, Run):
        return np.ones(len(bars), dtype=bool)
    return trace.task_nodes[bars] < len(trace.program.lane_tasks)


def _links(messages: Columns) -> tuple[Ints, list[str]]:
    """Each message's link, and what links are called: pairs of devices, then groups that share a collective."""
    columns = (messages[name].tolist() for name in ("op", "src", "dst"))
    keys = [
        ("", (src, int(dst))) if op == "p2p" else (op, tuple(map(int, str(dst).split("|"))))
        for op, src, dst in zip(*columns, strict=True)
    ]
    place = {key: k for k, key in enumerate(sorted(set(keys)))}
    names = [f"{op.replace('_', '-')} {_ranges(who)}" if op else f"{who[0]} → {who[1]}" for op, who in place]
    return np.array([place[key] for key in keys], dtype=np.int64), [label(name, 28) for name in names]


def _ranges(members: tuple[int, ...]) -> str:
    """Name the members of a group, neighbours as a range.

    >>> _ranges((0, 1, 2, 5))
    '0–2, 5'
    """
    parts = [[member for _, member in part] for _, part in groupby(enumerate(members), lambda at: at[1] - at[0])]
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def idle(trace: Trace, rows: Rows, span: float) -> tuple[Ints, Times, Times, Ints]:
    """When each row of a device is idle: (lane, begin, end, reason); a trace without its program tells no reasons."""
    lanes = len(rows.lane_top)
    nobody = np.setdiff1d(np.arange(lanes), rows.lane)
    if isinstance(trace, Run):
        parts = waiting.idle_spans(trace.program, trace.start, trace.end)
        lanes_run = np.unique(rows.lane[_in_lane(trace, rows.bars)])  # all have tasks, in the program's order
        lane = lanes_run[parts["lane"]]
        begin, end, reason = (parts[name] for name in ("begin", "end", "reason"))
    else:
        own = rows.lane, trace.tasks["start"][rows.bars], trace.tasks["end"][rows.bars]
        lane, begin, end = _gaps(*own, span)
        reason = np.full(len(lane), IdleReason.NOTHING)
    more = np.zeros(len(nobody)), np.full(len(nobody), span), np.full(len(nobody), IdleReason.NOTHING)
    return np.append(lane, nobody), np.append(begin, more[0]), np.append(end, more[1]), np.append(reason, more[2])


def _gaps(lane: Ints, start: Times, end: Times, span: float) -> tuple[Ints, Times, Times]:
    """When nothing runs in each lane that something runs in: (lane, begin, end)."""
    order = np.lexsort((end, start, lane))
    lane, start, end = lane[order], start[order], end[order]
    first = group_starts(lane)
    begin = np.roll(end, 1)
    begin[first] = 0
    last = np.append(first, len(lane))[1:] - 1
    lane, begin, until = (
        np.append(lane, lane[last]),
        np.append(begin, end[last]),
        np.append(start, np.full(len(last), span)),
    )
    some = np.flatnonzero(begin < until)
    return lane[some], begin[some], until[some]

"""The rows of a gantt picture: the lanes of devices, then those of links, and the idle times of lanes."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from cdpsim.draw.canvas import label
from cdpsim.draw.views import STREAM_NAMES, Channel, Views, lane_counts, lanes
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Floats, Ints, Times, group_numbers
from cdpsim.program import Op, Stream
from cdpsim.runs import Run
from cdpsim.trace.metrics import waiting
from cdpsim.trace.metrics.waiting import IdleReason

COMMUNICATION = "communication"  # the one stream of rounds
LANE, LINK, GAP = 0.26, 0.16, 0.06  # inches: a lane of a device, one of a link, and the space between them
MOST_ROWS = 160
FEW_LINKS, FEW_DEVICES = 4, 8  # links, and devices with streams, that are shown without being asked for


class Rows(NamedTuple):
    """The tops of all rows, in inches downwards."""

    names: list[tuple[float, str]]  # of devices and links, with their middles
    lane: Ints  # of each bar of the views, counted through all devices
    lane_top: Floats
    device_lane: Ints  # the first lane of each device, and the number of lanes
    message: Ints  # of each bar of a message, its row of the trace; those in streams have one on each device
    message_top: Floats
    height: float


class IdleTimes(NamedTuple):
    """The times in which lanes of devices run nothing, and the `IdleReason` of each."""

    lane: Ints
    begin: Times
    end: Times
    reason: Ints


def link_names(views: Views, until: float, links: bool | None) -> list[str]:
    """Return the names of the links that get rows before a time; if None, all if they take time and are few.

    Messages in streams have rows below their devices, and are on no link.
    """
    keys, link = views.links(_link_key)
    outside = views.stream < 0
    sent = (views.messages["start"] < until) & outside
    takes_time = (views.messages["end"] > views.messages["start"])[sent].any()
    few = takes_time and len(np.unique(link[sent])) <= FEW_LINKS
    shown = np.unique(link[outside]).tolist() if sent.any() and (few if links is None else links) else []
    return [label(_link_name(*keys[k]), 28) for k in shown]


def shows_streams(views: Views, until: float, links: bool | None) -> bool:
    """Return whether streams get rows before a time; if None, where they take time and devices are few."""
    sent = (views.messages["start"] < until) & (views.stream >= 0)
    takes_time = (views.messages["end"] > views.messages["start"])[sent].any()
    few = takes_time and _device_count(views) <= FEW_DEVICES
    return bool(sent.any() and (few if links is None else links))


def arrange_rows(views: Views, mark: float, links: Sequence[str], *, streams: bool = False) -> Rows:
    """Return the place of everything; a message that takes no time is as wide as `mark`, which is a time.

    Without names of `links`, messages on these have no rows, and without `streams` none in these.
    """
    devices = _device_count(views)
    device, lane = views.tasks["device"][views.bars], _lane_on_device(views)
    below = _stream_rows(views) if streams else _NO_STREAMS
    refuse_rows(devices + len(links) + len(below.device))
    message, link, link_lane = _link_bars(views, mark) if links else (_NO_ROWS, _NO_ROWS, _NO_ROWS)
    counts, link_counts = lane_counts(device, lane, devices, least=1), lane_counts(link, link_lane, max(len(links), 1))
    # Updates that take time have a lane, which is that of their stream, too, where a device has one.
    shared = views.has_rounds and int(counts.min()) > 1
    under = np.bincount(below.device, minlength=devices) * (not shared)
    refuse_rows(int(counts.sum() + under.sum() + link_counts.sum() * bool(links)))
    device_lane = np.append(0, np.cumsum(counts))
    device_top = GAP + np.append(0, np.cumsum(counts * LANE + under * LINK + GAP))
    link_top = device_top[-1] + 0.5 * GAP + np.append(0, np.cumsum(link_counts * LINK + 0.5 * GAP))
    place = np.arange(len(below.device)) - (np.cumsum(under) - under)[below.device]
    stream_top = (device_top[:-1] + counts * LANE)[below.device] + place * LINK
    middle = device_top[:-1] + counts * LANE / 2
    beside, beside_names = stream_top + LINK / 2, below.names
    if shared:
        stream_top = device_top[below.device] + LANE + (LANE - LINK) / 2
        middle, beside = (device_top[:-1] + (k + 0.5) * LANE for k in (0, 1))
        beside_names = [COMMUNICATION] * devices
    middles = (middle, beside, link_top[:-1] + link_counts * LINK / 2)
    names = [f"device {number}" for number in range(devices)], beside_names, links
    return Rows(
        names=[
            row for each in zip(middles, names, strict=True) for row in zip(each[0].tolist(), each[1], strict=False)
        ],
        lane=device_lane[device] + lane,
        lane_top=np.repeat(device_top[:-1] - device_lane[:-1] * LANE, counts) + np.arange(counts.sum()) * LANE,
        device_lane=device_lane,
        message=np.append(message, below.message),
        message_top=np.append(link_top[link] + link_lane * LINK, stream_top[below.row]),
        height=float(link_top[-1]) if links else float(device_top[-1]),
    )


class StreamRows(NamedTuple):
    """The rows of streams, by devices, and what stands in them."""

    device: Ints
    names: Sequence[str]
    message: Ints  # of each bar
    row: Ints  # of each bar


_NO_ROWS = np.zeros(0, dtype=np.int64)
_NO_STREAMS = StreamRows(_NO_ROWS, (), _NO_ROWS, _NO_ROWS)


def _stream_rows(views: Views) -> StreamRows:
    """Return a row for each stream of each device, and a bar there for each message of it."""
    groups, group = views.links(lambda channel: (channel.members,))
    rows = np.flatnonzero(views.stream >= 0)
    many = np.array([len(members) for (members,) in groups], dtype=np.int64)[group[rows]]
    message = np.repeat(rows, many)
    device = np.array([member for k in group[rows].tolist() for member in groups[k][0]], dtype=np.int64)
    if views.has_rounds:
        own, row = np.unique(device, return_inverse=True)
        return StreamRows(own, [COMMUNICATION] * len(own), message, row)
    key, row = np.unique(device * len(Stream) + views.stream[message], return_inverse=True)
    return StreamRows(key // len(Stream), [STREAM_NAMES[Stream(k)] for k in (key % len(Stream)).tolist()], message, row)


def _link_bars(views: Views, mark: float) -> tuple[Ints, Ints, Ints]:
    """Return the messages outside streams, the link of each among those that have some, and its lane there."""
    message = np.flatnonzero(views.stream < 0)
    start, end = (views.messages[name][message] for name in ("start", "end"))
    _, link = np.unique(views.links(_link_key)[1][message], return_inverse=True)
    return message, link, lanes(link, start, np.maximum(end, start + mark))


def refuse_rows(count: int) -> None:
    """Refuse more rows than a picture can show."""
    if count > MOST_ROWS:
        problem = f"needs {count} rows for devices and links; a picture shows at most {MOST_ROWS}"
        raise RequestError("gantt", f"{problem}, an .html file any number")


def _device_count(views: Views) -> int:
    """Return the number of devices, some of them perhaps without tasks."""
    recorded = views.run.program.devices if views.run else views.trace.summary().get("devices")
    with_tasks = int(views.tasks["device"].max()) + 1
    return max(with_tasks, recorded) if isinstance(recorded, int) else with_tasks


def _lane_on_device(views: Views) -> Ints:
    """Return each bar's lane on its device: the program's, and below those the lanes of updates that take none.

    Without a program it is the first lane that is free.
    """
    bars, columns = views.bars, ("device", "start", "end", "micro_batch")
    if views.run is None:
        return lanes(*(views.tasks[name][bars] for name in columns))
    program, node = views.run.program, views.run.task_nodes[bars]
    lane = np.empty(len(program.lane_tasks), dtype=np.int64)
    lane[program.lane_tasks] = group_numbers(program.lane_start[:-1], len(program.lane_tasks))
    device = program.tasks.device[program.lane_tasks[program.lane_start[:-1]]]
    number = np.arange(len(device)) - np.searchsorted(device, device)
    inside = node < len(program.lane_tasks)
    result = np.empty(len(bars), dtype=np.int64)
    result[inside] = number[lane[node[inside]]]
    below = [views.tasks[name][bars[~inside]] for name in columns]
    result[~inside] = np.bincount(device)[below[0]] + lanes(*below)
    return result


def _link_key(channel: Channel) -> tuple[str, tuple[int, ...]]:
    """Return the operation of a collective and its members; of a pair of devices "" and both."""
    return ("", (channel.src, *channel.members)) if channel.is_pair else (Op(channel.op).name, channel.members)


def _link_name(op: str, members: tuple[int, ...]) -> str:
    """Return the name of a link, neighbours in a group as a range.

    >>> _link_name("", (3, 4)), _link_name("ALL_REDUCE", (0, 1, 2, 5))
    ('3 → 4', 'all-reduce 0–2, 5')
    """
    if not op:
        return f"{members[0]} → {members[1]}"
    runs = [[member for _, member in run] for _, run in groupby(enumerate(members), lambda at: at[1] - at[0])]
    ranges = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{op.lower().replace('_', '-')} {ranges}"


def idle_times(views: Views, rows: Rows, until: float) -> IdleTimes:
    """Return when each lane of a device is idle before a time, and why; without its program a trace has no reasons."""
    span = float(views.end.max()) or 1.0
    unused = np.setdiff1d(np.arange(len(rows.lane_top)), rows.lane)
    if views.run is None:
        gaps = _gaps(rows.lane, views.tasks["start"][views.bars], views.tasks["end"][views.bars], span)
    else:
        gaps = _program_gaps(views.run, views.bars, rows)
    unused_spans = unused, np.zeros(len(unused)), np.full(len(unused), span), np.full(len(unused), IdleReason.NOTHING)
    idle = IdleTimes(*map(np.append, gaps, unused_spans))
    shown = idle.begin < until
    return IdleTimes(idle.lane[shown], idle.begin[shown], np.minimum(idle.end[shown], until), idle.reason[shown])


def _program_gaps(run: Run, bars: Ints, rows: Rows) -> IdleTimes:
    gaps = waiting.idle_spans(run.program, run.start, run.end)
    in_lanes = run.task_nodes[bars] < len(run.program.lane_tasks)
    lane = np.unique(rows.lane[in_lanes])  # each has tasks; they come in the program's order
    return IdleTimes(lane[gaps["lane"]], gaps["begin"], gaps["end"], gaps["reason"])


def _gaps(lane: Ints, start: Times, end: Times, span: float) -> IdleTimes:
    """Return the times in which nothing runs in each lane that has bars, from 0 to `span`."""
    used = np.unique(lane)
    lane = np.concatenate([lane, used, used])  # with bars of no length at 0 and at the end
    start = np.concatenate([start, np.zeros(len(used)), np.full(len(used), span)])
    end = np.concatenate([end, np.zeros(len(used)), np.full(len(used), span)])
    order = np.lexsort((end, start, lane))
    lane, start, end = lane[order], start[order], end[order]
    rows = np.flatnonzero((lane[1:] == lane[:-1]) & (end[:-1] < start[1:]))
    rows = rows[np.argsort(start[rows + 1] == span, kind="stable")]  # those behind the last bars come last
    return IdleTimes(lane[rows], end[rows], start[rows + 1], np.full(len(rows), IdleReason.NOTHING))

"""Tracks of a trace viewer: slices on threads of processes, arrows between them, and counters, as columns.

A *slice* is a task or a message, numbered as the rows of `trace.tasks` and then those of `trace.messages`. A process
is a device, the last one all links; a thread is a lane of a device, its updates, a link, or a group of collectives.
"""

from typing import NamedTuple

import numpy as np

from cdpsim.draw.views import Channel, Views, lane_counts, lanes
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, Times, group_numbers, group_starts, sort_by
from cdpsim.numeric.paths import longest_paths
from cdpsim.program import EdgeKind, Kind

SLOT = 1000  # nanoseconds that stand for a slot
_EXACT = 2**43 * SLOT  # viewers read microseconds as floats, which have no thousandths beyond
_LONGEST_RUN = 2**62
_LONGEST_NAME = 60
_FEW_HOPS = 8  # chains of arrows at one time are hardly ever longer


class Thread(NamedTuple):
    """A row of slices, one after another."""

    process: int
    name: str


class Tracks(NamedTuple):
    """Slices in nanoseconds, and arrows between them."""

    processes: list[str]
    threads: list[Thread]
    dst: list[int | str]  # of each link: a device, or a group
    thread: Ints  # of each slice
    link: Ints  # of each message
    start: Ints
    end: Ints
    order: Ints  # slices by start; the source of an arrow stands before its target
    source: Ints  # arrows, each from one slice ...
    target: Ints  # ... to another


class Counters(NamedTuple):
    """What devices hold: from each time on a size, one row per change."""

    device: Ints  # of each curve
    category: list[str]
    curve: Ints  # of each row
    time: Ints
    size: Ints


def lay_out_tracks(views: Views) -> Tracks:
    """Lay out all tasks and messages of a trace."""
    start, end = nanoseconds(views, views.start), nanoseconds(views, views.end)
    count, devices = len(views.kind), views.devices
    threads, of_task = _task_threads(views, start[:count], end[:count])
    links, link = views.links(_track_key)
    names = [_track_name(*key) for key in links]
    lane = _message_lanes(link, start[count:], end[count:], len(links))
    on_links, of_message = _number_threads(devices, names, link, lane)
    thread = np.concatenate([of_task, of_message + len(threads)])
    source, target = _arrows(views, start)
    processes = [*(f"device {device}" for device in range(devices)), *(["links"] if on_links else [])]
    dst = [name if is_group else members[0] for (is_group, _, members), name in zip(links, names, strict=True)]
    order = _sort_slices(start, source, target)
    return Tracks(processes, threads + on_links, dst, thread, link, start, end, order, source, target)


def memory_counters(views: Views) -> Counters:
    """Return the memory curves of a trace, one per device and category; of changes at one time the last."""
    columns = views.memory
    first = group_starts(columns["device"], views.category)
    curve, time = group_numbers(first, len(columns["time"])), nanoseconds(views, columns["time"])
    last = np.ones(len(time), dtype=bool)
    last[:-1] = (curve[1:] != curve[:-1]) | (time[1:] != time[:-1])
    names = columns["category"][first].tolist()
    return Counters(columns["device"][first], names, curve[last], time[last], columns["size"][last])


def nanoseconds(views: Views, times: Times) -> Ints:
    """Convert times to whole nanoseconds, a slot to a microsecond; those of over 101 days to whole microseconds.

    Starts and ends are rounded each by itself, so that slices that touch still do, and none overlap.
    """
    latest = max(column.max(initial=0).item() for column in (views.end, views.memory["time"]))  # whose product fits
    length = latest * (SLOT if views.in_slots else 1e9)
    if length >= _LONGEST_RUN:
        raise RequestError("trace", "is longer than 146 years, which no nanoseconds hold; give fewer --steps")
    if views.in_slots:
        return times * np.int64(SLOT)
    if length >= _EXACT:
        return np.rint(times * 1e6).astype(np.int64) * 1000
    return np.rint(times * 1e9).astype(np.int64)


def _arrows(views: Views, start: Ints) -> tuple[Ints, Ints]:
    """Return the arrows from tasks to messages and from messages to tasks.

    Viewers draw every arrow from the slice that starts first. A sum may come after the backward whose gradient is added
    to it has begun, and parameters may be passed on before the task that they came for begins; there the arrow goes
    from message to message.
    """
    made, used = views.message_tasks
    count = len(views.kind)
    source = np.concatenate([made.task, used.message + count])
    target = np.concatenate([made.message + count, used.task])
    late = start[source] > start[target]
    if late.any() and views.run:  # only a run has arrows
        edges = views.run.program.edges
        between = (edges.kind == EdgeKind.DATA) & (edges.before >= count) & (edges.after >= count)
        first, second = views.row[edges.before[between]], views.row[edges.after[between]]
        instead = np.isin(first, source[late]) | np.isin(second, target[late])
        source = np.concatenate([source[~late], first[instead]])
        target = np.concatenate([target[~late], second[instead]])
    return source, target


def _task_threads(views: Views, start: Ints, end: Ints) -> tuple[list[Thread], Ints]:
    """Return a thread for each lane of each device, and those of its updates; and the thread of each task.

    Updates have one, or several where they overlap in time.
    """
    device, update = views.tasks["device"].astype(np.int64), views.kind == Kind.U
    until = _apart(start, end)
    lane = np.empty(len(device), dtype=np.int64)
    rows = np.flatnonzero(~update)
    lane[rows] = lanes(device[rows], start[rows], until[rows], views.tasks["micro_batch"][rows])
    counts = lane_counts(device[rows], lane[rows], views.devices)
    rows = np.flatnonzero(update)
    beside = lanes(device[rows], start[rows], (until if (end > start)[rows].any() else end)[rows])
    updates = lane_counts(device[rows], beside, views.devices)
    lane[rows] = counts[device[rows]] + beside
    threads = []
    for number, (many, more) in enumerate(zip(counts.tolist(), updates.tolist(), strict=True)):
        threads += [Thread(number, f"lane {k}" if many > 1 else "tasks") for k in range(many)]
        threads += [Thread(number, f"updates ({k + 1})" if more > 1 else "updates") for k in range(more)]
    return threads, np.append(0, np.cumsum(counts + updates))[device] + lane


def _number_threads(process: int, names: list[str], link: Ints, lane: Ints) -> tuple[list[Thread], Ints]:
    """Return a thread for each lane of each link; and the thread of each message."""
    counts = lane_counts(link, lane, len(names))
    threads = [
        Thread(process, name if many == 1 else f"{name} ({k + 1})")
        for name, many in zip(names, counts.tolist(), strict=True)
        for k in range(many)
    ]
    return threads, np.append(0, np.cumsum(counts))[link] + lane


def _message_lanes(link: Ints, start: Ints, end: Ints, links: int) -> Ints:
    """Return the lane of each message on its link. Where none takes time, those of one moment stand side by side."""
    lane = np.zeros(len(link), dtype=np.int64)
    takes_time = np.bincount(link, weights=end > start, minlength=links) > 0
    rows = np.flatnonzero(takes_time[link])
    lane[rows] = lanes(link[rows], start[rows], _apart(start, end)[rows])
    rows = np.flatnonzero(~takes_time[link])
    rows = rows[sort_by(link[rows], rows)]
    first = group_starts(link[rows], start[rows])
    lane[rows] = np.arange(len(rows)) - first[group_numbers(first, len(rows))]
    return lane


def _track_key(channel: Channel) -> tuple[bool, int, tuple[int, ...]]:
    """Return whether a channel is a group's, its source and members: pairs of devices come first."""
    return not channel.is_pair, channel.src if channel.is_pair else -1, channel.members


def _track_name(is_group: bool, src: int, members: tuple[int, ...]) -> str:
    """Return the name of a link, short for a large group.

    >>> _track_name(False, 3, (4,)), _track_name(True, -1, (0, 1, 2, 3)), _track_name(True, -1, (0, 4, 8))
    ('3 → 4', 'devices 0–3', 'devices 0, 4, 8')
    """
    if not is_group:
        return f"{src} → {members[0]}"
    if len(members) > 2 and members == tuple(range(members[0], members[-1] + 1)):
        return f"devices {members[0]}–{members[-1]}"
    name = f"devices {', '.join(map(str, members))}"
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 12]}… ({len(members)})"


def _apart(start: Ints, end: Ints) -> Ints:
    """Return ends at least a nanosecond after starts: a slice without length is hidden by one that begins with it."""
    return np.maximum(end, start + 1)


def _sort_slices(start: Ints, source: Ints, target: Ints) -> Ints:
    """Return all slices by their start; of those that start together, sources of arrows before their targets."""
    together = start[source] == start[target]
    rank = _ranks(source[together], target[together], len(start))
    return sort_by(start, rank)


def _ranks(source: Ints, target: Ints, count: int) -> Ints:
    """Return the length of the longest chain of arrows that leads to each slice."""
    rank = np.zeros(count, dtype=np.int64)
    for _ in range(_FEW_HOPS):
        behind = rank[source] >= rank[target]
        if not behind.any():
            return rank
        np.maximum.at(rank, target[behind], rank[source[behind]] + 1)
    return longest_paths(source, target, np.ones_like(rank), np.zeros_like(rank))[0]

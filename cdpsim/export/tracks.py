"""What a trace viewer is shown of a run: slices on threads of processes, arrows between them, and counters, as columns.

A *slice* is a task or a message, numbered as the rows of `trace.tasks` and then those of `trace.messages`. A process
is a device, the last one all links; a thread is a lane of a device, its updates, a link, or a group of collectives.
"""

from typing import NamedTuple

import numpy as np

from cdpsim.draw import scene
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, Times, group_numbers, group_starts, sort_by
from cdpsim.numeric.paths import longest_paths
from cdpsim.program import EdgeKind
from cdpsim.runs import Run
from cdpsim.trace import Trace

SLOT = 1000  # nanoseconds that stand for a slot
_EXACT = 2**43 * SLOT  # readers hold microseconds as floats, which have no thousandths beyond
_LONGEST = 2**62
_NAME = 60
_FEW = 8  # of arrows one after another at one time, there are hardly ever more


class Thread(NamedTuple):
    """Where slices stand, one after another."""

    process: int
    name: str


class Link(NamedTuple):
    """What messages go over: from one device to another, or between all of a group."""

    name: str
    dst: int | str


class Tracks(NamedTuple):
    """Slices in nanoseconds, and arrows between them."""

    devices: int
    processes: list[str]
    threads: list[Thread]
    links: list[Link]
    thread: Ints  # of each slice
    link: Ints  # of each message
    start: Ints
    end: Ints
    order: Ints  # slices by start; what an arrow comes from stands before what it goes to
    source: Ints  # arrows, each from one slice ...
    target: Ints  # ... to another


class Counters(NamedTuple):
    """What devices hold: from each time on a size, one row per change."""

    device: Ints  # of each curve
    category: list[str]
    curve: Ints  # of each row
    time: Ints
    size: Ints


def tracks(trace: Trace) -> Tracks:
    """Lay out all tasks and messages of a trace."""
    scene.refuse_empty(trace)
    tasks, messages = trace.tasks, trace.messages
    start, end = (nanoseconds(trace, np.concatenate([tasks[name], messages[name]])) for name in ("start", "end"))
    count, devices = len(tasks["start"]), device_count(trace)
    threads, of_task = _task_threads(trace, start[:count], end[:count], devices)
    links, link = _links(trace)
    on_links, of_message = _message_threads(links, link, start[count:], end[count:], devices)
    thread = np.concatenate([of_task, of_message + len(threads)])
    source, target = _arrows(trace, start)
    processes = [*(f"device {device}" for device in range(devices)), *(["links"] if on_links else [])]
    order = _in_time(start, source, target)
    return Tracks(devices, processes, threads + on_links, links, thread, link, start, end, order, source, target)


def counters(trace: Trace) -> Counters:
    """The memory curves of a trace, one per device and category; of changes at one time the last."""
    columns = trace.memory
    first = group_starts(columns["device"], columns["category"])
    curve, time = group_numbers(first, len(columns["time"])), nanoseconds(trace, columns["time"])
    last = np.ones(len(time), dtype=bool)
    last[:-1] = (curve[1:] != curve[:-1]) | (time[1:] != time[:-1])
    names = columns["category"][first].tolist()
    return Counters(columns["device"][first], names, curve[last], time[last], columns["size"][last])


def device_count(trace: Trace) -> int:
    """How many devices there are: those that do something, and those that hold something."""
    return 1 + int(max(trace.tasks["device"].max(initial=0), trace.memory["device"].max(initial=0)))


def nanoseconds(trace: Trace, times: Times) -> Ints:
    """Times as whole nanoseconds, a slot as a microsecond; of more than 104 days, as whole microseconds.

    Starts and ends are rounded each by itself, so that what touches does so afterwards, and nothing overlaps.
    """
    columns = trace.tasks["end"], trace.messages["end"], trace.memory["time"]
    latest = max(column.max(initial=0).item() for column in columns)  # Python's: a product of numpy's may overflow
    length = latest * (SLOT if trace.in_slots else 1e9)
    if length >= _LONGEST:
        raise RequestError("trace", "is longer than 146 years, which no nanoseconds hold; give fewer --steps")
    if trace.in_slots:
        return times * np.int64(SLOT)
    if length >= _EXACT:
        return np.rint(times * 1e6).astype(np.int64) * 1000
    return np.rint(times * 1e9).astype(np.int64)


def _arrows(trace: Trace, start: Ints) -> tuple[Ints, Ints]:
    """From tasks to messages and from messages to tasks.

    Viewers draw every arrow from what starts first. A sum may come after the backward whose gradient is added to it has
    begun, and parameters may be passed on before the task that they came for begins; there the arrow goes from message
    to message.
    """
    made, used = scene.message_ends(trace)
    count = len(trace.tasks["start"])
    source = np.concatenate([made.task, used.message + count])
    target = np.concatenate([made.message + count, used.task])
    late = start[source] > start[target]
    if late.any() and isinstance(trace, Run):  # only a run has arrows
        first, second = (rows + count for rows in _passed_on(trace))
        instead = np.isin(first, source[late]) | np.isin(second, target[late])
        source = np.concatenate([source[~late], first[instead]])
        target = np.concatenate([target[~late], second[instead]])
    return source, target


def _passed_on(trace: Run) -> tuple[Ints, Ints]:
    """Which message carries on what another one brought, as rows of messages."""
    edges, count = trace.program.edges, len(trace.task_nodes)
    between = np.flatnonzero((edges.kind == EdgeKind.DATA) & (edges.before >= count) & (edges.after >= count))
    row = np.empty(len(trace.message_nodes), dtype=np.int64)
    row[trace.message_nodes - count] = np.arange(len(row))
    return row[edges.before[between] - count], row[edges.after[between] - count]


def _task_threads(trace: Trace, start: Ints, end: Ints, devices: int) -> tuple[list[Thread], Ints]:
    """A thread for each lane of each device, and those of its updates; and the thread of each task.

    Updates have one, or several where they overlap in time.
    """
    columns = trace.tasks
    update = columns["kind"] == "U"
    rows = np.flatnonzero(~update)
    device = columns["device"].astype(np.int64)
    lane = np.full(len(device), -1)
    lane[rows] = scene.lanes(device[rows], start[rows], _apart(start, end)[rows], columns["micro_batch"][rows])
    lanes = np.zeros(devices, dtype=np.int64)
    np.maximum.at(lanes, device, lane + 1)
    until = _apart(start, end) if (end > start)[update].any() else end
    beside = scene.lanes(device[update], start[update], until[update])
    updates = np.zeros(devices, dtype=np.int64)
    np.maximum.at(updates, device[update], beside + 1)
    lane[update] = lanes[device[update]] + beside
    first = np.append(0, np.cumsum(lanes + updates))
    threads = []
    for here, (many, some) in enumerate(zip(lanes.tolist(), updates.tolist(), strict=True)):
        threads += [Thread(here, f"lane {k}" if many > 1 else "tasks") for k in range(many)]
        threads += [Thread(here, f"updates ({k + 1})" if some > 1 else "updates") for k in range(some)]
    return threads, first[device] + lane


def _message_threads(links: list[Link], link: Ints, start: Ints, end: Ints, process: int) -> tuple[list[Thread], Ints]:
    """A thread for each link, or several where its messages overlap; and the thread of each message."""
    lane = _message_lanes(link, start, end, len(links))
    lanes = np.zeros(len(links), dtype=np.int64)
    np.maximum.at(lanes, link, lane + 1)
    first = np.append(0, np.cumsum(lanes))
    threads = [
        Thread(process, name if many == 1 else f"{name} ({k + 1})")
        for (name, _), many in zip(links, lanes.tolist(), strict=True)
        for k in range(many)
    ]
    return threads, first[link] + lane


def _message_lanes(link: Ints, start: Ints, end: Ints, links: int) -> Ints:
    """The lane of each message on its link. Where none takes time, those of one moment stand side by side."""
    lane = np.zeros(len(link), dtype=np.int64)
    takes_time = np.bincount(link, weights=end > start, minlength=links) > 0
    rows = np.flatnonzero(takes_time[link])
    lane[rows] = scene.lanes(link[rows], start[rows], _apart(start, end)[rows])
    rows = np.flatnonzero(~takes_time[link])
    rows = rows[sort_by(link[rows], rows)]
    first = group_starts(link[rows], start[rows])
    lane[rows] = np.arange(len(rows)) - first[group_numbers(first, len(rows))]
    return lane


def _links(trace: Trace) -> tuple[list[Link], Ints]:
    """All links by their ends, then groups by their members; and which one each message goes over."""
    columns = trace.messages
    texts = {to: k for k, to in enumerate(dict.fromkeys(columns["dst"].tolist()))}
    dst = np.fromiter(map(texts.__getitem__, columns["dst"].tolist()), np.int64, len(columns["dst"]))
    single = columns["op"] == "p2p"
    code = np.where(single, columns["src"] + 1, 0) * len(texts) + dst
    codes, key = np.unique(code, return_inverse=True)
    to = [tuple(map(int, str(text).split("|"))) for text in texts]
    ends = [(at // len(texts) - 1, to[at % len(texts)]) for at in codes.tolist()]
    ranked = sorted(range(len(ends)), key=lambda k: (ends[k][0] < 0, ends[k]))
    place = np.empty(len(ends), dtype=np.int64)
    place[ranked] = np.arange(len(ends))
    links = [
        Link(f"{src} → {members[0]}", members[0]) if src >= 0 else Link(_group(members), _group(members))
        for src, members in map(ends.__getitem__, ranked)
    ]
    return links, place[key]


def _group(members: tuple[int, ...]) -> str:
    """The members of a collective's group, shortly.

    >>> _group((0, 1, 2, 3)), _group((0, 4, 8))
    ('devices 0–3', 'devices 0, 4, 8')
    """
    if len(members) > 2 and members == tuple(range(members[0], members[-1] + 1)):
        return f"devices {members[0]}–{members[-1]}"
    name = f"devices {', '.join(map(str, members))}"
    return name if len(name) <= _NAME else f"{name[: _NAME - 12]}… ({len(members)})"


def _apart(start: Ints, end: Ints) -> Ints:
    """Ends that keep slices without a length out of the way of what begins with them, where they would not be seen."""
    return np.maximum(end, start + 1)


def _in_time(start: Ints, source: Ints, target: Ints) -> Ints:
    """All slices by their start; of those that start together, what arrows come from before what they go to."""
    together = start[source] == start[target]
    rank = _ranks(source[together], target[together], len(start))
    most = int(rank.max(initial=0)) + 1
    if int(start.max(initial=0)) >= 2**61 // most:
        return np.lexsort((rank, start))
    return in_order(start * most + rank)[0]


def _ranks(source: Ints, target: Ints, count: int) -> Ints:
    """How many arrows lead one after another to each slice, at most."""
    rank = np.zeros(count, dtype=np.int64)
    for _ in range(_FEW):
        behind = rank[source] >= rank[target]
        if not behind.any():
            return rank
        np.maximum.at(rank, target[behind], rank[source[behind]] + 1)
    return longest_paths(source, target, np.ones_like(rank), np.zeros_like(rank))[0]


def in_order(key: Ints) -> tuple[Ints, Ints]:
    """The rows sorted by a key, equal ones as they come, and their keys.

    Where a key and its row fit into one number, sorting numbers is four times as fast as sorting rows.
    """
    count = max(len(key), 1)
    if int(key.max(initial=0)) >= 2**62 // count:
        order = np.argsort(key, kind="stable")
        return order, key[order]
    packed = key * count + np.arange(len(key))
    packed.sort()
    key, order = np.divmod(packed, count)
    return order, key

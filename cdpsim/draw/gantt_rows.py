"""A gantt picture as data: the rows of devices and links, and the boxes of tasks, messages and idle time in them."""

from typing import NamedTuple

import numpy as np

from cdpsim.draw.canvas import INK, label
from cdpsim.draw.palette import COLOURINGS, KIND_COLOURS, colour, tint
from cdpsim.draw.views import STREAM_NAMES, Views, lane_counts, lanes, previous_in_run
from cdpsim.errors import RequestError, choose, whole_number
from cdpsim.numeric.columns import Flags, Floats, Ints, Times, group_numbers, group_starts
from cdpsim.program import Kind, Stream
from cdpsim.trace.metrics import waiting
from cdpsim.trace.metrics.waiting import IdleReason

LANE, LINK, GAP = 0.26, 0.16, 0.06  # inches: a lane of a device, one of a link, and the space between rows
MOST_ROWS = 160
FEW_LINKS, FEW_DEVICES = 4, 8  # links, and devices with streams, that are shown without being asked for
PALEST, LATER = 0.6, "33"  # white in the colour of a device's last stage; the opacity of a later step, in hexadecimal
_MARK = 0.8  # of a short task: the time of the mark of a message that takes none
_OF_DEVICE = 1 + len(Stream)  # rows that a device may have: of its tasks, and of its streams


class Rows(NamedTuple):
    """The places of rows, and of their lanes, which are counted through all rows; in inches downwards."""

    devices: int
    owner: Ints  # a device and the number of its row; or a link, beyond all devices
    begin: Floats
    end: Floats
    lane_top: Floats
    lane_high: Floats
    lane_owner: Ints
    lane: Ints  # of each bar

    @property
    def height(self) -> float:
        """The height of all rows."""
        return float(self.end[-1]) + GAP

    def device_spans(self, *, streams: bool) -> tuple[Floats, Floats]:
        """Return where the lanes of each device begin and end; with `streams`, the rows of these included."""
        own = np.arange(self.devices) * _OF_DEVICE
        first, last = np.searchsorted(self.owner, own), np.searchsorted(self.owner, own + _OF_DEVICE) - 1
        return self.begin[first], self.end[last if streams else first]


class Panel:
    """One run as it will be drawn: until when, the look of each task, and the lane of each task and message."""

    def __init__(self, views: Views, colouring: str, steps: int | None, links: bool | None) -> None:
        self.views, self.colouring = views, choose("colour", colouring, COLOURINGS)
        self.until, shown = _end_of_picture(views, steps)
        chosen = np.flatnonzero(views.tasks["start"][views.bars] < self.until)
        bars = views.bars[chosen]
        self.tasks = {name: column[bars] for name, column in views.tasks.items()}
        self.kind, self.estimate = views.kind[bars], views.estimate[bars]
        self.took = self.tasks["end"] - self.tasks["start"]
        took = self.took[self.took > 0]
        # The time of a short task, and of a middling one.
        self.short, self.half = (float(np.quantile(took, q)) if len(took) else self.until for q in (0.25, 0.5))
        self.later = self.tasks["step"] >= shown  # of a step that is not shown, though it begins before the end
        # Micro-batches are counted through the steps where a device has begun one before it ends another.
        self.counted = shown > 1 and _steps_overlap(self.tasks)
        self.number = _count_through(views, self.tasks) if self.counted else self.tasks["micro_batch"]
        rank, most = _stage_ranks(views, self.tasks)
        self.tints = colouring == "kind" and most > 0
        self.full = colouring != "kind" or most > 0  # whether a number alone would not say enough
        self.colours = self._colours(rank / max(most, 1))
        devices, mark = _device_count(views), _MARK * self.short
        self.message, self.link_names, *places = _message_places(views, devices, self.until, mark, links)
        self.rows = _arrange(views, devices, places)
        self.task_lane, self.message_lane = np.split(self.rows.lane, [len(views.bars)])
        self.top = self.rows.lane_top[self.task_lane[chosen]]

    def _colours(self, paleness: Floats) -> np.ndarray:
        """Return the colour of each task, of its kind or number: paler for later stages, faint for later steps."""
        by_kind, shades = self.colouring == "kind", []
        number = self.number if self.colouring == "micro-batch" else self.tasks["stage"]
        columns = (column.tolist() for column in (self.kind, number, PALEST * paleness * by_kind, self.later))
        for kind, k, pale, later in zip(*columns, strict=True):
            shade = INK if kind == Kind.U else tint(KIND_COLOURS[Kind(kind)], pale) if by_kind else colour(k)
            shades.append(shade + LATER * later)
        return np.array(shades)

    @property
    def names(self) -> dict[float, str]:
        """The middle of each row, and its name."""
        rows, names = self.rows, {}
        for owner, begin, end in zip(rows.owner.tolist(), rows.begin.tolist(), rows.end.tolist(), strict=True):
            device, stream = divmod(owner, _OF_DEVICE)
            own = f"device {device}" if not stream else STREAM_NAMES[Stream(stream - 1)]
            own = "communication" if stream and self.views.has_rounds else own
            link = owner - rows.devices * _OF_DEVICE
            names[(begin + end) / 2] = own if link < 0 else self.link_names[link]
        return names

    def idle(self) -> dict[str, np.ndarray]:
        """Return when each lane of a device is idle, and why; a trace from files has no reasons."""
        views, span = self.views, float(self.views.end.max()) or 1.0
        without = np.setdiff1d(np.arange(self.rows.devices), views.tasks["device"][views.bars])
        lane = np.flatnonzero(np.isin(self.rows.lane_owner, without * _OF_DEVICE))
        whole = {"lane": lane, "begin": np.zeros(len(lane)), "end": np.full(len(lane), span)}
        if views.run is None:
            gaps = _gaps(self.task_lane, views.start[views.bars], views.end[views.bars], span)
            gaps["reason"] = np.full(len(gaps["lane"]), IdleReason.NOTHING)
        else:
            gaps = waiting.idle_spans(views.run.program, views.run.start, views.run.end)
            in_lanes = views.run.task_nodes[views.bars] < len(views.run.program.lane_tasks)
            gaps["lane"] = np.unique(self.task_lane[in_lanes])[gaps["lane"]]  # they come in the program's order
        whole["reason"] = np.full(len(lane), IdleReason.NOTHING)
        idle = {name: np.append(gaps[name], column) for name, column in whole.items()}
        idle["end"] = np.minimum(idle["end"], self.until)
        return {name: column[idle["begin"] < self.until] for name, column in idle.items()}


def _end_of_picture(views: Views, steps: int | None) -> tuple[float, int]:
    """Return the end of the picture and the number of its steps: by default one where all are alike, else all."""
    tasks, reads = views.tasks, views.kind != Kind.U
    every = int(tasks["step"].max()) + (not views.has_rounds)  # discarded tasks belong to no step
    flushes = not views.has_rounds and bool((tasks["version"] == tasks["step"])[reads].all())
    wanted = (1 if flushes else every) if steps is None else whole_number("steps", steps, at_least=1)
    if wanted > every:
        raise RequestError("steps", f"are {wanted}, but the run has {every}; simulate more, or draw fewer")
    tables = (tasks, views.messages)
    ends = [table["end"][(table["step"] < wanted) | (wanted == every)].max(initial=0) for table in tables]
    return float(max(ends)) or 1.0, wanted


def _steps_overlap(tasks: dict[str, np.ndarray]) -> bool:
    """Return whether a device begins a step before it has ended another; updates do not count."""
    reads = np.flatnonzero(tasks["kind"] != "U")
    rows = reads[np.lexsort((tasks["start"][reads], tasks["device"][reads]))]
    device, step = tasks["device"][rows], tasks["step"][rows]
    return bool(((step[1:] < step[:-1]) & (device[1:] == device[:-1])).any())


def _count_through(views: Views, tasks: dict[str, np.ndarray]) -> Ints:
    """Return the numbers of micro-batches, counted on from step to step."""
    most = np.zeros(int(views.tasks["step"].max()) + 1, dtype=np.int64)
    np.maximum.at(most, views.tasks["step"], views.tasks["micro_batch"].astype(np.int64) + 1)
    micro_batch = tasks["micro_batch"].astype(np.int64)
    return np.asarray(micro_batch + np.where(micro_batch >= 0, (np.cumsum(most) - most)[tasks["step"]], 0))


def _stage_ranks(views: Views, tasks: dict[str, np.ndarray]) -> tuple[Ints, int]:
    """Return each task's stage's place among the stages of its device, and the last place of any."""
    stages = int(views.tasks["stage"].max()) + 1
    every, own = (table["device"].astype(np.int64) * stages + table["stage"] for table in (views.tasks, tasks))
    pairs = np.unique(every)
    first = group_starts(pairs // stages)
    rank = np.arange(len(pairs)) - first[group_numbers(first, len(pairs))]
    return rank[np.searchsorted(pairs, own)], int(rank.max())


def _arrange(views: Views, devices: int, messages: list[Ints]) -> Rows:
    """Place the rows of all devices, and the rows of messages, whose owners and lanes are given."""
    owner, lane = views.tasks["device"][views.bars].astype(np.int64) * _OF_DEVICE, _task_lanes(views)
    if views.has_rounds:  # updates have the row of their stream
        update = views.kind[views.bars] == Kind.U
        owner[update], lane[update] = owner[update] + 1, 0
    every, lane = np.append(owner, messages[0]), np.append(lane, messages[1])
    own = np.union1d(np.arange(devices) * _OF_DEVICE, every)
    row = np.searchsorted(own, every)
    counts = lane_counts(row, lane, len(own), least=1)
    _refuse_rows(int(counts.sum()))
    link, device = own >= devices * _OF_DEVICE, own % _OF_DEVICE == 0
    high = np.where(~link & (device | np.isin(own, owner)), LANE, LINK)
    end: Floats = np.cumsum(np.where(link, 0.5 * GAP, GAP * device) + counts * high)
    begin, first, row_of_lane = end - counts * high, np.cumsum(counts) - counts, np.repeat(np.arange(len(own)), counts)
    lane_top = begin[row_of_lane] + (np.arange(counts.sum()) - first[row_of_lane]) * high[row_of_lane]
    return Rows(devices, own, begin, end, lane_top, high[row_of_lane], own[row_of_lane], first[row] + lane)


def _device_count(views: Views) -> int:
    """Return the number of devices, some of them perhaps without tasks."""
    recorded = views.run.program.devices if views.run else views.trace.summary().get("devices")
    with_tasks = int(views.tasks["device"].max()) + 1
    devices = max(with_tasks, recorded) if isinstance(recorded, int) else with_tasks
    _refuse_rows(devices)
    return devices


def _refuse_rows(count: int) -> None:
    if count > MOST_ROWS:
        problem = f"needs {count} rows for devices and links; a picture shows at most {MOST_ROWS}"
        raise RequestError("gantt", f"{problem}, an .html file any number")


def _task_lanes(views: Views) -> Ints:
    """Return each bar's lane on its device: the program's, and below those the lanes of updates that take none.

    Without a program it is the first lane that is free.
    """
    device, *columns = (views.tasks[name][views.bars] for name in ("device", "start", "end", "micro_batch"))
    if views.run is None:
        return lanes(device, *columns)
    program = views.run.program
    of_lanes = program.tasks.device[program.lane_tasks[program.lane_start[:-1]]]
    number = np.arange(len(of_lanes)) - np.searchsorted(of_lanes, of_lanes)
    lane = np.full(program.nodes, -1)
    lane[program.lane_tasks] = number[group_numbers(program.lane_start[:-1], len(program.lane_tasks))]
    result = lane[views.run.task_nodes[views.bars]]
    out = result < 0
    result[out] = np.bincount(of_lanes)[device[out]] + lanes(device[out], *(column[out] for column in columns))
    return result


def _message_places(
    views: Views, devices: int, until: float, mark: float, links: bool | None
) -> tuple[Ints, list[str], Ints, Ints]:
    """Return the bars of messages, each a row of the trace; the names of links; the owner and the lane of each bar.

    Messages in streams have a row below each of their devices, where streams are shown. Other messages are on links.
    """
    tracks, _, link = views.tracks
    streams, others = views.stream >= 0, views.stream < 0
    few = len(np.unique(link[others & (views.messages["start"] < until)])) <= FEW_LINKS
    message, owner = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if _are_shown(views, streams, until, few=devices <= FEW_DEVICES, asked=links):
        rows = np.flatnonzero(streams)
        members = [views.channel_of(k).members for k in rows.tolist()]
        message = np.repeat(rows, list(map(len, members)))
        row = 1 + (0 if views.has_rounds else views.stream[message])
        owner = np.array([device for each in members for device in each], dtype=np.int64) * _OF_DEVICE + row
    lane, names = np.zeros_like(owner), []
    if _are_shown(views, others, until, few=few, asked=links):
        rows = np.flatnonzero(others)
        shown, number = np.unique(link[rows], return_inverse=True)
        _refuse_rows(devices + len(shown))
        names = [label(tracks[k], 28) for k in shown.tolist()]
        start, end = (views.messages[name][rows] for name in ("start", "end"))
        message, owner = np.append(message, rows), np.append(owner, devices * _OF_DEVICE + number)
        lane = np.append(lane, lanes(number, start, np.maximum(end, start + mark)))
    return message, names, owner, lane


def _are_shown(views: Views, among: Flags, until: float, *, few: bool, asked: bool | None) -> bool:
    """Return whether messages have rows before a time: if asked, or by default where they take time on few rows."""
    sent = among & (views.messages["start"] < until)
    takes_time = bool((views.messages["end"] > views.messages["start"])[sent].any())
    return bool(sent.any()) and (takes_time and few if asked is None else asked)


def _gaps(lane: Ints, start: Times, end: Times, span: float) -> dict[str, np.ndarray]:
    """Return the times, from 0 to `span`, in which nothing runs in each lane that has bars."""
    order = np.lexsort((end, start, lane))
    lane, start, end = lane[order], start[order], end[order]
    first = group_starts(lane)
    last = np.append(first[1:], len(lane))[: len(first)] - 1
    begin, until = np.append(previous_in_run(end, first), end[last]), np.append(start, np.full(len(last), span))
    gaps = {"lane": np.append(lane, lane[last]), "begin": begin, "end": until}
    return {name: column[begin < until] for name, column in gaps.items()}

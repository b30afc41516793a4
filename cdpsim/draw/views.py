"""Views of a trace that pictures and exports share: devices, lanes, links, codes, spans, its title."""

from collections import Counter
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from cdpsim.draw.canvas import label
from cdpsim.draw.palette import COLOURS, colour
from cdpsim.errors import RequestError, one_line, whole_number
from cdpsim.files.units import quantity_text, seconds
from cdpsim.numeric.columns import (
    Flags,
    Ints,
    Times,
    group_numbers,
    group_starts,
    matching_pairs,
    sort_and_group,
    sort_by,
)
from cdpsim.program import Category, Content, EdgeKind, Kind, Op, Stream
from cdpsim.request import describe_disorder, describe_request
from cdpsim.runs import Run
from cdpsim.trace import Trace, names_of
from cdpsim.trace.metrics import memory

STREAM_NAMES = dict(zip(Stream, ("gathers", "reductions", "across", "from host", "from disks"), strict=True))
KIND_WORDS = {"F": "forward", "B": "backward", "W": "backward of weights", "U": "update"}  # in the order of keys
LONGEST_TITLE_WORD = 60
_LONGEST_GROUP = 60
_Key = TypeVar("_Key", bound=tuple[Any, ...])


class MessageTasks(NamedTuple):
    """Pairs of a row of `trace.messages` and a row of `trace.tasks`, sorted by both."""

    message: Ints
    task: Ints


class Channel(NamedTuple):
    """A pair of devices, or a group that shares a collective operation; `src` is its root, or -1."""

    op: Op
    src: int
    members: tuple[int, ...]  # of a pair, the receiver
    stream: int = -1  # the `Stream` in which its messages go; -1: none

    @property
    def is_pair(self) -> bool:
        """Whether messages go from one device to another."""
        return self.op == Op.P2P


class Views:
    """Columns that several pictures and exports derive from one trace, each computed once, when it is first read.

    `run` is the run of all replicas, if the trace knows its program, else None: a trace from files has no dependencies.
    """

    def __init__(self, trace: Trace) -> None:
        refuse_empty(trace)
        self.trace, self.tasks, self.messages, self.memory = trace, trace.tasks, trace.messages, trace.memory
        self.run = trace.whole if isinstance(trace, Run) else None
        self.in_slots = trace.in_slots

    @cached_property
    def devices(self) -> int:
        """The number of devices that tasks or memory name."""
        return 1 + max(int(table["device"].max(initial=0)) for table in (self.tasks, self.memory))

    @cached_property
    def has_rounds(self) -> bool:
        """Whether updates and messages go one after another in one stream of each device, beside its tasks."""
        return self.trace.rounds is not None

    @cached_property
    def in_cells(self) -> bool:
        """Whether every task takes one slot, so that it has a cell of a stage and a slot."""
        took = (self.tasks["end"] - self.tasks["start"])[self.kind != Kind.U]
        return self.in_slots and bool((took == 1).all()) and len(took) > 0

    @cached_property
    def estimate(self) -> np.ndarray:
        """Whether each task reads an estimate, or makes one."""
        known = self.tasks["estimate"] if "estimate" in self.tasks else np.zeros(len(self.kind))
        return np.asarray(known > 0)

    @cached_property
    def kind(self) -> Ints:
        """The `Kind` of each task."""
        return codes(self.tasks["kind"], Kind)

    @cached_property
    def op(self) -> Ints:
        """The `Op` of each message."""
        return codes(self.messages["op"], Op)

    @cached_property
    def stream(self) -> Ints:
        """The `Stream` of each message, -1 where it goes in none."""
        number = np.full(len(self.messages), -1, dtype=np.int64)
        for stream in Stream if "stream" in self.messages else ():
            number[self.messages["stream"] == stream.name.lower()] = stream
        return number

    @cached_property
    def content(self) -> Ints:
        """The `Content` of each message."""
        return codes(self.messages["content"], Content)

    @cached_property
    def category(self) -> Ints:
        """The `Category` of each change of memory."""
        return codes(self.memory["category"], Category)

    @cached_property
    def memory_change(self) -> np.ndarray:
        """The change of a device's memory of a category with each row."""
        size = self.memory["size"].astype(np.int64)
        return size - previous_in_run(size, group_starts(self.memory["device"], self.category))

    @cached_property
    def start(self) -> Times:
        """The starts of all tasks, then of all messages."""
        return np.concatenate([self.tasks["start"], self.messages["start"]])

    @cached_property
    def end(self) -> Times:
        """The ends of all tasks, then of all messages."""
        return np.concatenate([self.tasks["end"], self.messages["end"]])

    @cached_property
    def bars(self) -> Ints:
        """The tasks that take a lane: all but updates that take no time."""
        return np.flatnonzero((self.kind != Kind.U) | (self.tasks["end"] > self.tasks["start"]))

    @cached_property
    def row(self) -> Ints:
        """The row of each task and message of the run's program, among all tasks and then all messages."""
        assert self.run is not None, "only a run has nodes"
        nodes = np.concatenate([self.run.task_nodes, self.run.message_nodes])
        row = np.empty(len(nodes), dtype=np.int64)
        row[nodes] = np.arange(len(nodes))
        return row

    @cached_property
    def _channels(self) -> tuple[list[Channel], Ints]:
        """The channels by their first message, and the number of each message's own."""
        texts = self.messages["dst"].tolist()
        number = {text: k for k, text in enumerate(dict.fromkeys(texts))}
        members = [tuple(map(int, str(text).split("|"))) for text in number]
        dst = np.fromiter(map(number.__getitem__, texts), np.int64, len(texts))
        columns = self.op, self.messages["src"].astype(np.int64) + 1, dst, self.stream + 1
        order, first = sort_and_group(*columns)
        appeared = np.argsort(order[first])
        place = np.empty(len(first), dtype=np.int64)
        place[appeared] = np.arange(len(first))
        channel = np.empty(len(order), dtype=np.int64)
        channel[order] = place[group_numbers(first, len(order))]
        different = zip(*(column[order[first[appeared]]].tolist() for column in columns), strict=True)
        return [Channel(Op(op), src - 1, members[k], stream - 1) for op, src, k, stream in different], channel

    @property
    def channels(self) -> list[Channel]:
        """The channels that messages take, in the order in which they are first used."""
        return self._channels[0]

    def channel_of(self, message: int) -> Channel:
        """Return the channel that a message takes, by its row."""
        channels, channel = self._channels
        return channels[int(channel[message])]

    def links(self, key: Callable[[Channel], _Key]) -> tuple[list[_Key], Ints]:
        """Return the different keys of channels in their order, and the number of each message's own.

        Channels of one key are one link of a picture.
        """
        channels, channel = self._channels
        keys = list(map(key, channels))
        number = {each: k for k, each in enumerate(sorted(set(keys)))}
        return list(number), np.array([number[each] for each in keys], dtype=np.int64)[channel]

    @cached_property
    def tracks(self) -> tuple[list[str], list[int | str], Ints]:
        """The names of links, streams and groups of devices, the receivers on each, and each message's number."""
        keys, track = self.links(_track_key)
        receivers = [_devices_name(members) if is_group else members[0] for is_group, _, members, _ in keys]
        return [_track_name(*key) for key in keys], receivers, track

    @cached_property
    def message_tasks(self) -> tuple[MessageTasks, MessageTasks]:
        """The producers and the consumers of each message's content, as tasks; none without a program.

        Parameters that a device passes on as they came, from reader to reader, are from the task that they came for;
        a partial sum is for the task whose gradient is added to it. A message that others make or need, and no task,
        has the tasks of these: a sum across groups is from the backwards of all sums inside them.
        """
        if self.run is None:
            nothing = np.zeros(0, dtype=np.int64)
            return MessageTasks(nothing, nothing), MessageTasks(nothing, nothing)
        start, edges = self.run.start, self.run.program.edges
        is_message = [node >= len(self.tasks["start"]) for node in (edges.before, edges.after)]
        data = edges.kind == EdgeKind.DATA

        def pairs(from_message: bool, to_message: bool) -> tuple[Ints, Ints]:
            rows = np.flatnonzero(data & (is_message[0] == from_message) & (is_message[1] == to_message))
            return edges.before[rows], edges.after[rows]

        made, used = pairs(False, True)[::-1], pairs(True, False)
        first, second = pairs(True, True)
        passed = _tasks_of_other(second, first, *used, unless=made[0])
        added_to = _tasks_of_other(first, second, *made, unless=used[0])
        message, task = _tasks_through(second, first, (np.append(made[0], passed[0]), np.append(made[1], passed[1])))
        seen = start[task] <= start[message]  # a later reader is not what the parameters came for
        needed = _tasks_through(first, second, (np.append(used[0], added_to[0]), np.append(used[1], added_to[1])))
        return self._rows(message[seen], task[seen]), self._rows(*needed)

    def _rows(self, message: Ints, task: Ints) -> MessageTasks:
        """Convert pairs of nodes to pairs of rows, each once."""
        message, task = self.row[message], self.row[task]
        message -= len(self.tasks["start"])
        order, first = sort_and_group(message, task)
        order = order[first]
        return MessageTasks(message[order], task[order])


def _track_key(channel: Channel) -> tuple[bool, int, tuple[int, ...], int]:
    """Return whether a channel is a group's, its source, members and stream: pairs of devices come first."""
    return not channel.is_pair, channel.src if channel.is_pair else -1, channel.members, channel.stream


def _track_name(is_group: bool, src: int, members: tuple[int, ...], stream: int) -> str:
    """Return the name of a link, or of a stream.

    >>> _track_name(False, 3, (4,), -1), _track_name(True, -1, (0, 1, 2, 3), Stream.GATHER)
    ('3 → 4', 'gathers, devices 0–3')
    """
    if not is_group and stream < 0:
        return f"{src} → {members[0]}"
    name = _devices_name(members) if is_group else f"device {src}"
    return f"{STREAM_NAMES[Stream(stream)]}, {name}" if stream >= 0 else name


def _devices_name(members: tuple[int, ...]) -> str:
    """Return the name of a group, short for a large one.

    >>> _devices_name((0, 1, 2, 3)), _devices_name((0, 4, 8))
    ('devices 0–3', 'devices 0, 4, 8')
    """
    if len(members) > 2 and members == tuple(range(members[0], members[-1] + 1)):
        return f"devices {members[0]}–{members[-1]}"
    name = f"devices {', '.join(map(str, members))}"
    return name if len(name) <= _LONGEST_GROUP else f"{name[: _LONGEST_GROUP - 12]}… ({len(members)})"


def refuse_empty(trace: Trace) -> None:
    """Refuse a trace without tasks."""
    if not len(trace.tasks["start"]):
        raise RequestError("trace", "has no tasks; give one of a run that did something")


def codes(words: np.ndarray, kinds: type[IntEnum]) -> Ints:
    """Return the number of each word of a column of a trace."""
    number = np.zeros(len(words), dtype=np.int64)
    for code, word in enumerate(names_of(kinds).tolist()):
        number[words == word] = code
    return number


def previous_in_run(values: Ints, first: Ints) -> Ints:
    """Return the value before each one in its run, 0 for the first of each run."""
    before = np.append(0, values)[:-1]
    before[first[first < len(values)]] = 0
    return before


def word_of(member: IntEnum) -> str:
    """Return the name of an operation, content or category as a person writes it: "activation gradient"."""
    return member.name.lower().replace("_", " ")


def _tasks_of_other(message: Ints, other: Ints, of: Ints, task: Ints, unless: Ints) -> tuple[Ints, Ints]:
    """Return each message with the tasks of its other message, unless it has tasks of its own."""
    without = ~np.isin(message, unless)
    row, wanted = matching_pairs([of], [other[without]])
    return message[without][wanted], task[row]


def _tasks_through(message: Ints, other: Ints, pairs: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Return pairs of messages and tasks; a message without a task has the tasks of its other messages."""
    while len((more := _tasks_of_other(message, other, *pairs, unless=pairs[0]))[0]):
        pairs = np.append(pairs[0], more[0]), np.append(pairs[1], more[1])
    return pairs


def title(trace: Trace) -> str:
    """Return the title of a trace's picture, in which nothing is set as a formula."""
    return ", ".join(map(label, title_words(trace)))


def plain_title(trace: Trace) -> str:
    """Return the title of a trace for a text."""
    return ", ".join(one_line(word, LONGEST_TITLE_WORD) for word in title_words(trace))


def title_words(trace: Trace) -> list[str]:
    """Return the words that identify a run: its schedule, size and rule, model, training, cluster, disturbances."""
    request = trace.request
    words = [str(request.get("schedule", "trace"))]
    words += [f"n = {request['n']}"] if "n" in request else []
    words += [f"m = {request['m']}"] if request.get("m", request.get("n")) != request.get("n") else []
    words += [f"{name} = {request[name]}" for name in ("chunks", "replicas", "shard", "zero") if name in request]
    if "stage_replicas" in request:
        words.append(f"stage-replicas = {','.join(map(str, request['stage_replicas']))}")
    words += [str(request["rule"])] if isinstance(request.get("rule"), str) else []
    return words + describe_request(request) + describe_disorder(request)


def colour_meanings(numbers: Iterable[int], noun: str, first: int = 0) -> list[tuple[str, str]]:
    """Return each colour that sorted numbers have, and words for the first two of these; `first` is the name of 0.

    >>> colour_meanings([0, 1, 8], "stage")
    [('#0d48f2', 'stage 0, 8'), ('#f7990d', '1')]
    """
    sharing: dict[str, list[str]] = {}
    for number in sorted(numbers, key=lambda number: number % len(COLOURS)):
        sharing.setdefault(colour(number), []).append(str(number + first))
    words = [", ".join(each[:2]) + ", …" * (len(each) > 2) for each in sharing.values()]
    words[:1] = [f"{noun} {each}" for each in words[:1]]
    return list(zip(sharing, words, strict=True))


def held_in_steady_state(trace: Trace) -> int | None:
    """Return the peak of the steady state, if it is not that of the trace's own steps; else None."""
    peaks = []
    for rows in map(trace.summary().get, ("peak_memory", "steady_peak_memory")):
        totals = [row.get("total") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        peaks.append(max((total for total in totals if isinstance(total, int)), default=None))
    own, later = peaks
    return None if later == own else later


def lanes(key: Ints, start: Times, end: Times, owner: Ints | None = None) -> Ints:
    """Return the lane of each row among the lanes of its key, such that no two rows of one lane overlap.

    Rows come sorted by start. A row takes the lane that its owner (a micro-batch) had before if that is free, else the
    first free one. Where several start together, owners with a lane come first.
    """
    lane = np.zeros(len(key), dtype=np.int64)
    order = sort_by(key, np.arange(len(key)))
    for rows in np.split(order, group_starts(key[order])[1:]):
        until = np.maximum.accumulate(end[rows])
        if (start[rows][1:] < until[:-1]).any():
            owners = np.full(len(rows), -1) if owner is None else owner[rows]
            new = np.zeros(len(rows), dtype=bool)
            new[np.unique(owners, return_index=True)[1]] = True
            rows = rows[np.lexsort((new & (owners >= 0), start[rows]))]
            owners = owners if owner is None else owner[rows]
            lane[rows] = _packed(start[rows].tolist(), end[rows].tolist(), owners.tolist())
    return lane


def lane_counts(key: Ints, lane: Ints, keys: int, least: int = 0) -> Ints:
    """Return the number of lanes of each key, at least `least`."""
    counts = np.full(keys, least, dtype=np.int64)
    np.maximum.at(counts, key, lane + 1)
    return counts


def _packed(start: list[float], end: list[float], owners: list[int]) -> list[int]:
    free_from: list[float] = []
    of_owner: dict[int, int] = {}
    result = []
    for begin, until, owner in zip(start, end, owners, strict=True):
        lane = of_owner.get(owner, -1)
        if lane < 0 or free_from[lane] > begin:
            lane = next((k for k, free in enumerate(free_from) if free <= begin), len(free_from))
        if lane == len(free_from):
            free_from.append(until)
        free_from[lane] = max(free_from[lane], until)
        if owner >= 0:
            of_owner[owner] = lane
        result.append(lane)
    return result


Place: TypeAlias = tuple[int, int]  # a device, and a stage that it serves
_STAGES_ON = {Content.ACTIVATION: 1, Content.ACTIVATION_GRADIENT: -1}  # from the sender's stage to the receiver's


class StepCollective(NamedTuple):
    """A collective of this moment, or of another one in the same training step."""

    stage: int  # -1 if of no single one
    members: tuple[int, ...]
    now: bool


class Moment(NamedTuple):
    """The content of a picture; fields that need a program are empty for a trace without one."""

    stages: dict[int, list[int]]  # of each device, at any time
    running: dict[Place, list[int]]  # the micro-batches that are computed
    labels: dict[Place, list[str]]  # the tasks that compute them, such as 1F3
    states: frozenset[Place] | None  # where parameters are alive; None if not known
    activations: dict[Place, int]  # the number of micro-batches whose activations of that stage are held
    stash: dict[int, float]  # activations of each device, in stage-activations or bytes
    inside: list[tuple[Place, Place]]  # data that running tasks will pass on inside their device
    messages: list[tuple[Place, Place]]  # messages on their way from device to device
    collectives: list[StepCollective]


def stages_served(views: Views) -> dict[int, list[int]]:
    """Return the stages that each device ever computes, or whose parameters or gradients it holds or exchanges."""
    messages = views.messages
    carried = (views.op == Op.P2P) & ~np.isin(views.content, list(_STAGES_ON))
    pairs = [(views.tasks["device"], views.tasks["stage"])]
    pairs += [(messages[end][carried].astype(np.int64), messages["stage"][carried]) for end in ("src", "dst")]
    if views.run:
        buffers, rows = views.run.program.buffers, _parameters(views.run)
        pairs.append((buffers.device[rows], buffers.stage[rows]))
    device, stage = (np.concatenate(column) for column in zip(*pairs, strict=True))
    result: dict[int, list[int]] = {number: [] for number in np.union1d(device, views.memory["device"]).tolist()}
    order, first = sort_and_group(device, stage)
    different = order[first]
    for number, served in zip(device[different].tolist(), stage[different].tolist(), strict=True):
        result[number].append(served)
    return result


def read_moment(views: Views, slot: object) -> float:
    """Read a slot, or a moment in seconds, by default the busiest; refuse one that the run does not have."""
    if slot is None:
        return busiest_moment(views)
    end = views.tasks["end"].max().item()
    if views.in_slots:
        number = whole_number("slot", slot, at_least=0)
        if number >= end:
            raise RequestError("slot", f"slot={number} is not one of this run's {end} time steps; take 0 to {end - 1}")
        return number
    moment = seconds(slot)
    if moment >= end:
        asked, taken = quantity_text(moment, "s"), quantity_text(end, "s")
        raise RequestError("slot", f"{asked} is not in this run, which takes {taken}")
    return moment


def busiest_moment(views: Views) -> float:
    """Return the slot, or the moment, of the middle training step at which most activations are held in all devices.

    Of several it is the last, after which activations begin to be used; the middle of the step if all are equal.
    """
    step, start = views.tasks["step"], views.tasks["start"]
    steps = np.unique(step)
    middle = len(steps) // 2
    low = start[step == steps[middle]].min()
    high = start[step == steps[middle + 1]].min() if middle + 1 < len(steps) else views.tasks["end"].max()
    moments = np.arange(low, high) if views.in_slots else np.unique(start[(start >= low) & (start < high)])
    stash = views.category == Category.ACTIVATIONS
    time, change = views.memory["time"][stash], views.memory_change[stash]
    order = np.argsort(time, kind="stable")
    then = np.append(0, np.cumsum(change[order]))[np.searchsorted(time[order], moments, side="right")]
    most = np.flatnonzero(then == then.max())
    best: float = moments[most[-1] if len(most) < len(moments) else len(moments) // 2].item()
    return best


def moment_at(views: Views, now: float) -> Moment:
    """Return the content of a moment. In slots, messages sent after a slot's tasks belong to that slot."""
    tasks, messages = views.tasks, views.messages
    rows = np.flatnonzero((views.kind != Kind.U) & (tasks["start"] <= now) & (now < tasks["end"]))
    leaving = now + 1 if views.in_slots else now
    under_way = (messages["start"] <= leaving) & (leaving < messages["end"])
    under_way |= views.in_slots & (messages["start"] == leaving)
    running: dict[Place, list[int]] = {}
    labels: dict[Place, list[str]] = {}
    columns = (tasks[name][rows].tolist() for name in ("device", "stage", "micro_batch", "kind"))
    for device, stage, i, kind in zip(*columns, strict=True):
        running.setdefault((device, stage), []).append(i)
        labels.setdefault((device, stage), []).append(f"{stage}{kind}{i}")
    pairs = under_way & (views.op == Op.P2P)
    columns = (column[pairs].tolist() for column in (views.content, *(messages[n] for n in ("stage", "src", "dst"))))
    sent = {((src, j), (int(dst), j + _STAGES_ON.get(what, 0))) for what, j, src, dst in zip(*columns, strict=True)}
    # Rows are sorted by device and time: the last one of a device counts.
    stash = (views.category == Category.ACTIVATIONS) & (views.memory["time"] <= now)
    return Moment(
        stages_served(views),
        {place: sorted(several) for place, several in running.items()},
        labels,
        frozenset(_alive(views.run, _parameters(views.run), now)) if views.run else None,
        dict(Counter(_alive(views.run, views.run.program.stashes, now))) if views.run else {},
        dict(zip(views.memory["device"][stash].tolist(), views.memory["size"][stash].tolist(), strict=True)),
        _inside(views.run, rows) if views.run else [],
        sorted(sent),
        _collectives_of_step(views, rows, under_way),
    )


def _parameters(run: Run) -> Ints:
    return np.flatnonzero(run.program.buffers.category == Category.PARAMETERS)


def _alive(run: Run, among: Ints, now: float) -> list[Place]:
    """Return the places of the buffers that are held now, each place once."""
    buffers = run.program.buffers
    begin, end = (times[among] for times in memory.buffer_spans(buffers, run.start, run.end))
    rows = among[(begin <= now) & (now < end)]
    return sorted(zip(buffers.device[rows].tolist(), buffers.stage[rows].tolist(), strict=True))


def _inside(run: Run, rows: Ints) -> list[tuple[Place, Place]]:
    edges, tasks = run.program.edges, run.program.tasks
    data = (edges.kind == EdgeKind.DATA) & (edges.after < run.program.compute)
    data &= np.isin(edges.before, run.task_nodes[rows])
    before, after = edges.before[data], edges.after[data]
    inside = (tasks.device[before] == tasks.device[after]) & (tasks.stage[before] != tasks.stage[after])
    columns = tasks.device[before], tasks.stage[before], tasks.stage[after]
    triples = zip(*(column[inside].tolist() for column in columns), strict=True)
    return sorted({((device, j), (device, k)) for device, j, k in triples})


def _collectives_of_step(views: Views, running: Ints, under_way: Flags) -> list[StepCollective]:
    """Return the collectives under way, and those at other moments of the training steps that run."""
    tasks, messages = views.tasks, views.messages
    in_step = np.zeros(len(under_way), dtype=bool)
    if len(running):
        of_steps = (views.kind != Kind.U) & np.isin(tasks["step"], tasks["step"][running])
        low, high = tasks["start"][of_steps].min(), tasks["end"][of_steps].max()
        in_step = (messages["start"] > low) & (messages["start"] <= high)
    result = {}
    for rows, now in ((in_step & ~under_way, False), (under_way, True)):
        for row in np.flatnonzero((views.op != Op.P2P) & rows).tolist():
            stage, members = messages["stage"][row].item(), views.channel_of(row).members
            result[stage, members] = StepCollective(stage, members, now)
    return [result[key] for key in sorted(result)]

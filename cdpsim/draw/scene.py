"""What all pictures of a trace need to know of it: lanes, which task a message is from and for, and what to call it."""

from typing import NamedTuple

import numpy as np

from cdpsim.draw.canvas import label, line
from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints, Times, group_starts, sort_by
from cdpsim.program import EdgeKind
from cdpsim.request.description import describe_disorder, describe_request
from cdpsim.runs import Run
from cdpsim.trace import Trace


class Ends(NamedTuple):
    """Pairs of a row of `trace.messages` and a row of `trace.tasks`, sorted by both."""

    message: Ints
    task: Ints


def refuse_empty(trace: Trace) -> None:
    """Refuse a trace in which nothing happens."""
    if not len(trace.tasks["start"]):
        raise RequestError("trace", "has no tasks; give one of a run that did something")


def title(trace: Trace) -> str:
    """Say in a figure what a trace is of."""
    return ", ".join(map(label, names(trace)))


def plain_title(trace: Trace) -> str:
    """Say where no formulas are set what a trace is of."""
    return ", ".join(map(line, names(trace)))


def names(trace: Trace) -> list[str]:
    """What a trace is of: its schedule, size and rule, its model, how that is trained, and its cluster."""
    request = trace.request
    words = [str(request.get("schedule", "trace"))]
    words += [f"{name} = {request[name]}" for name in ("n",) if name in request]
    words += [f"m = {request['m']}"] if request.get("m", request.get("n")) != request.get("n") else []
    words += [f"{name} = {request[name]}" for name in ("chunks", "replicas") if name in request]
    words += [str(request["rule"])] if isinstance(request.get("rule"), str) else []
    return words + describe_request(request) + describe_disorder(request)


def lanes(key: Ints, start: Times, end: Times, owner: Ints | None = None) -> Ints:
    """The lane of each row among those of its key, such that no two rows of one lane overlap.

    Rows come sorted by start. A row takes the lane that its owner (a micro-batch) had before if that is free, else the
    first that is; of those that start together, owners with a lane come first.
    """
    lane = np.zeros(len(key), dtype=np.int64)
    order = sort_by(key, np.arange(len(key)))
    for rows in np.split(order, group_starts(key[order])[1:]):
        until = np.maximum.accumulate(end[rows])
        if (start[rows][1:] < until[:-1]).any():
            owners = np.full(len(rows), -1) if owner is None else owner[rows]
            new = owners >= 0
            new[new] = ~_seen(owners[new])
            turn = np.lexsort((new, start[rows]))
            rows, owners = rows[turn], owners[turn]
            lane[rows] = _packed(start[rows].tolist(), end[rows].tolist(), owners.tolist())
    return lane


def _seen(owners: Ints) -> np.ndarray:
    """Whether each owner has been there before."""
    seen = np.ones(len(owners), dtype=bool)
    seen[np.unique(owners, return_index=True)[1]] = False
    return seen


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


def message_ends(trace: Trace) -> tuple[Ends, Ends]:
    """Which tasks made what each message carries, and which ones need it; nothing for a trace without its program.

    What a device passes on as it came (parameters, from reader to reader) is from the task that it came for, and a
    partial sum is for the task whose gradient is added to it.
    """
    nothing = np.zeros(0, dtype=np.int64)
    if not isinstance(trace, Run):
        return Ends(nothing, nothing), Ends(nothing, nothing)
    program = trace.program
    count, edges = len(program.tasks), program.edges
    data = edges.kind == EdgeKind.DATA
    before, after = edges.before[data], edges.after[data]
    from_message, to_message = before >= count, after >= count
    made = after[~from_message & to_message], before[~from_message & to_message]
    used = before[from_message & ~to_message], after[from_message & ~to_message]
    first, second = before[from_message & to_message], after[from_message & to_message]
    passed, reader = _joined(second, first, *used, unless=made[0])
    seen = trace.start[reader] <= trace.start[passed]  # a later one did not come first
    came_for = passed[seen], reader[seen]
    added_to = _joined(first, second, *made, unless=used[0])
    return _rows(trace, made, came_for), _rows(trace, used, added_to)


def _joined(message: Ints, other: Ints, of: Ints, task: Ints, unless: Ints) -> tuple[Ints, Ints]:
    """Each message with the tasks `of` its other one, unless it has tasks of its own."""
    some = ~np.isin(message, unless)
    message, other = message[some], other[some]
    order = sort_by(of)
    of, task = of[order], task[order]
    first = np.searchsorted(of, other)
    many = np.searchsorted(of, other, side="right") - first
    within = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
    return np.repeat(message, many), task[np.repeat(first, many) + within]


def _rows(trace: Run, *pairs: tuple[Ints, Ints]) -> Ends:
    """Pairs of nodes as rows of the trace's columns."""
    message, task = (np.concatenate(side) for side in zip(*pairs, strict=True))
    row = np.empty(len(trace.task_nodes) + len(trace.message_nodes), dtype=np.int64)
    row[trace.task_nodes] = np.arange(len(trace.task_nodes))
    row[trace.message_nodes] = np.arange(len(trace.message_nodes))
    order = sort_by(row[message], row[task])
    return Ends(row[message][order], row[task][order])

"""The content of a picture like the paper's Fig. 1: places of tasks, receivers of messages, synchronised steps."""

from typing import NamedTuple

import numpy as np

from cdpsim.draw.views import MessageTasks, Views, lanes
from cdpsim.numeric.columns import Floats, Ints, group_numbers, group_starts, sort_by
from cdpsim.program import Content, Kind, Op
from cdpsim.trace import Trace

_MOST_SIDE_BY_SIDE = 4  # marks of one cell, before a second line begins
_PASSED_ON = (Content.GRADIENT, Content.PARAMETERS, Content.STATE)


class Spots(NamedTuple):
    """The rows of a trace's tasks that are drawn, and each one's place: in time, and in its stage's band."""

    row: Ints
    begin: Floats
    until: Floats
    column: Ints  # its place among the marks of one cell that stand side by side
    line: Ints  # from the top of the band
    columns: int
    lines: int


def in_cells(views: Views) -> bool:
    """Return whether every task takes one slot, so that it has a cell of a stage and a slot."""
    took = (views.tasks["end"] - views.tasks["start"])[views.kind != Kind.U]
    return views.in_slots and bool((took == 1).all())


def side_by_side(marks: int) -> int:
    """Return how many of the marks of one cell stand side by side, in lines as even as can be."""
    lines = -(-marks // _MOST_SIDE_BY_SIDE)
    return -(-marks // lines)


def spots(views: Views, cells: bool) -> Spots:
    """Return the place of every task but updates.

    Those of one cell stand side by side in the order of their micro-batches, four at most, then in further lines.
    Without cells, tasks of one stage that overlap in time stand in lines of their own.
    """
    row = np.flatnonzero(views.kind != Kind.U)
    stage, start, end, micro_batch = (views.tasks[name][row] for name in ("stage", "start", "end", "micro_batch"))
    place = np.zeros(len(row), dtype=np.int64)
    if cells:
        order = sort_by(stage, start, micro_batch, np.arange(len(row)))
        first = group_starts(stage[order], start[order])
        place[order] = np.arange(len(row)) - first[group_numbers(first, len(row))]
        columns = side_by_side(int(place.max()) + 1)
    else:
        place, columns = lanes(stage, start, end, micro_batch), 1
    lines = int(place.max()) // columns + 1
    return Spots(row, start.astype(float), end.astype(float), place % columns, place // columns, columns, lines)


def synchronisations(trace: Trace) -> dict[int, float]:
    """Return the time of the last update of each training step that is synchronised, by its step.

    A step is synchronised if no task that reads a part of the version that it makes starts before all updates that
    make it have happened, and these happen at one time, or between its tasks and those of the next step. A version that
    no task reads follows the one before it; without one, its updates must all happen at one time.
    """
    tasks = trace.tasks
    update = tasks["kind"] == "U"
    made, happened = tasks["version"][update], tasks["end"][update]
    read, begun, ended, step = (tasks[name][~update] for name in ("version", "start", "end", "step"))
    result, synchronised = {}, None
    for version in np.unique(made).tolist():
        times, readers = happened[made == version], begun[read == version]
        at_once = bool(times.min() == times.max())
        if len(readers):
            apart = begun[step >= version].min() >= times.max() >= ended[step < version].max()
            synchronised = bool(readers.min() >= times.max() and (at_once or apart))
        elif synchronised is None:
            synchronised = at_once
        if synchronised:
            result[version - 1] = times.max().item()
    return result


def passed_on(views: Views, synchronised: dict[int, float]) -> list[tuple[int, int, int]]:
    """Return messages of gradients, parameters and states between steps: (message, from task, for task).

    Those are point to point, of steps that are not synchronised. An update is shown by the task that it follows.
    """
    wanted = (views.op == Op.P2P) & np.isin(views.content, _PASSED_ON)
    wanted &= ~np.isin(views.messages["step"], list(synchronised))
    made, used = views.message_tasks
    maker, user = _first(made, -views.tasks["end"]), _first(used, views.tasks["start"])
    before = _tasks_before_updates(views.trace)
    ends = [(k, maker[k], user[k]) for k in np.flatnonzero(wanted).tolist() if k in maker and k in user]
    drawn = [(k, before.get(a, a), before.get(b, b)) for k, a, b in ends]
    return [(k, a, b) for k, a, b in drawn if -1 not in (a, b) and a != b]


def _first(pairs: MessageTasks, by: np.ndarray) -> dict[int, int]:
    """Return the one of each message's tasks that comes first."""
    order = np.lexsort((by[pairs.task], pairs.message))
    message, task = pairs.message[order], pairs.task[order]
    first = group_starts(message)
    return dict(zip(message[first].tolist(), task[first].tolist(), strict=True))


def _tasks_before_updates(trace: Trace) -> dict[int, int]:
    """Return for each update the last task of its stage on its device that had ended by then; -1 for none."""
    names = ("kind", "stage", "device", "start", "end")
    last: dict[tuple[int, int], list[tuple[float, int]]] = {}
    result = {}
    columns = zip(*(trace.tasks[name].tolist() for name in names), strict=True)
    for row, (kind, stage, device, start, end) in enumerate(columns):
        ended = last.setdefault((stage, device), [])
        if kind == "U":
            result[row] = max(((until, task) for until, task in ended if until <= start), default=(0.0, -1))[1]
        else:
            ended.append((end, row))
    return result

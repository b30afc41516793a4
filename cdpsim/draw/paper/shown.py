"""What the paper's Fig. 1 shows of a run: where each task stands, who gets a message, when steps are synchronised."""

from typing import NamedTuple

import numpy as np

from cdpsim.draw import scene
from cdpsim.numeric.columns import Floats, Ints, group_numbers, group_starts, sort_by
from cdpsim.trace import Trace

_MOST_SIDE_BY_SIDE = 4  # so many marks of one cell, before a second row begins


class Spots(NamedTuple):
    """The rows of a trace's tasks that are drawn, and each one's place: in time, and in its stage's band."""

    row: Ints
    begin: Floats
    until: Floats
    column: Ints  # its place among the marks of one cell that stand side by side
    line: Ints  # from the top of the band
    columns: int
    lines: int


def in_cells(trace: Trace) -> bool:
    """Whether every task takes one slot, so that there are cells of a stage and a slot to stand in."""
    tasks = trace.tasks
    some = tasks["kind"] != "U"
    return trace.in_slots and bool((tasks["end"][some] == tasks["start"][some] + 1).all())


def side_by_side(marks: int) -> int:
    """How many of the marks of one cell stand side by side, in lines as even as can be."""
    lines = -(-marks // _MOST_SIDE_BY_SIDE)
    return -(-marks // lines)


def spots(trace: Trace, cells: bool) -> Spots:
    """Give every task but updates its place.

    Those of one cell stand side by side in the order of their micro-batches, four at most, then in further lines.
    Without cells, tasks of one stage that overlap in time stand in lines of their own.
    """
    tasks = trace.tasks
    row = np.flatnonzero(tasks["kind"] != "U")
    stage, start, end = (tasks[name][row] for name in ("stage", "start", "end"))
    place = np.zeros(len(row), dtype=np.int64)
    if cells:
        order = sort_by(stage, start, tasks["micro_batch"][row], np.arange(len(row)))
        first = group_starts(stage[order], start[order])
        place[order] = np.arange(len(row)) - first[group_numbers(first, len(row))]
        columns = side_by_side(int(place.max()) + 1)
    else:
        place, columns = scene.lanes(stage, start, end, tasks["micro_batch"][row]), 1
    lines = int(place.max()) // columns + 1
    return Spots(row, start.astype(float), end.astype(float), place % columns, place // columns, columns, lines)


def synchronisations(trace: Trace) -> dict[int, float]:
    """When each training step is synchronised, for those that are: by step, the time of the last update.

    A step is synchronised if no task that reads a part of the version that it makes starts before all updates that
    make it have happened, and these happen at one time, or between its tasks and those of the next step. A version that
    nobody reads follows the one before it; without one, its updates must all happen at one time.
    """
    tasks = trace.tasks
    update = tasks["kind"] == "U"
    made, happened = tasks["version"][update], tasks["end"][update]
    read, begun, ended, step = (tasks[name][~update] for name in ("version", "start", "end", "step"))
    result, whole = {}, None
    for version in np.unique(made).tolist():
        times, readers = happened[made == version], begun[read == version]
        at_once = bool(times.min() == times.max())
        if len(readers):
            apart = begun[step >= version].min() >= times.max() >= ended[step < version].max()
            whole = bool(readers.min() >= times.max() and (at_once or apart))
        elif whole is None:
            whole = at_once
        if whole:
            result[version - 1] = times.max().item()
    return result


def passed_on(trace: Trace, synchronised: dict[int, float]) -> list[tuple[int, int, int]]:
    """Messages of gradients, parameters and states where steps are not synchronised: (message, from task, for task).

    Those that go point to point. An update is shown by the task that it follows.
    """
    tasks, messages = trace.tasks, trace.messages
    made, used = scene.message_ends(trace)
    single = (messages["op"] == "p2p") & ~np.isin(messages["step"], list(synchronised))
    wanted = single & np.isin(messages["content"], ("gradient", "parameters", "state"))
    first = _first(made, -tasks["end"]), _first(used, tasks["start"])
    ends = [(message, first[0].get(message), first[1].get(message)) for message in np.flatnonzero(wanted).tolist()]
    before = _tasks_before_updates(trace)
    shown = [(k, before.get(a, a), before.get(b, b)) for k, a, b in ends if a is not None and b is not None]
    return [(k, a, b) for k, a, b in shown if -1 not in (a, b) and a != b]


def _first(ends: scene.Ends, by: np.ndarray) -> dict[int, int]:
    """Of each message the one of its tasks that comes first."""
    order = np.lexsort((by[ends.task], ends.message))
    message, task = ends.message[order], ends.task[order]
    first = group_starts(message)
    return dict(zip(message[first].tolist(), task[first].tolist(), strict=True))


def _tasks_before_updates(trace: Trace) -> dict[int, int]:
    """Of each update, the last task of its stage on its device that had ended by then; -1 if there is none."""
    names = ("kind", "stage", "device", "start", "end")
    last: dict[tuple[int, int], list[tuple[float, int]]] = {}
    result = {}
    for row, (kind, stage, device, start, end) in enumerate(
        zip(*(trace.tasks[name].tolist() for name in names), strict=True)
    ):
        ended = last.setdefault((stage, device), [])
        if kind == "U":
            result[row] = max(((until, task) for until, task in ended if until <= start), default=(0.0, -1))[1]
        else:
            ended.append((end, row))
    return result

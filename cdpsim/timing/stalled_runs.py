"""Who waits for whom in a run that does not end, because a device has stopped for good."""

from typing import NamedTuple, NoReturn

import numpy as np

from cdpsim.errors import Stalled
from cdpsim.numeric.calendars import never
from cdpsim.numeric.columns import Ints, Times
from cdpsim.program import Program
from cdpsim.timing.costs import Costs

SHOWN = 16  # devices that are named


class Wait(NamedTuple):
    """A device that waits: the first task that it cannot begin, what that waits for, and the device that has it.

    A device that has itself stopped waits for its own task.
    """

    device: int
    task: int
    for_node: int
    holder: int


def waits(program: Program, start: Times, end: Times) -> list[Wait]:
    """Find what each device that has stopped does not do, and what each other one waits for in vain."""
    ends = end < never(end.dtype)
    before, after = program.waits()
    stuck = np.flatnonzero(~ends[before])
    waited = np.full(program.nodes, program.nodes, dtype=np.int64)  # of each node, the first that it waits for in vain
    np.minimum.at(waited, after[stuck], before[stuck])
    device = program.tasks.device
    found: dict[int, Wait] = {}
    for task in np.flatnonzero(~ends & (waited == program.nodes)).tolist():  # it is its device that stands still
        number = int(device[task])
        found.setdefault(number, Wait(number, task, task, number))
    for task in _first_in_lanes(program, ends).tolist():
        number, node = int(device[task]), int(waited[task])
        if number not in found:
            while _is_update(program, node, number) and waited[node] < program.nodes:
                node = int(waited[node])  # not its own update: what that waits for
            found[number] = Wait(number, task, node, _holder(program, waited, node))
    return [found[number] for number in sorted(found)]


def _first_in_lanes(program: Program, ends: np.ndarray) -> Ints:
    """The first task of each lane that does not end."""
    lane = np.repeat(np.arange(len(program.lane_start) - 1), np.diff(program.lane_start))
    stuck = np.flatnonzero(~ends[program.lane_tasks])
    _, first = np.unique(lane[stuck], return_index=True)
    return program.lane_tasks[stuck[first]]


def _is_update(program: Program, node: int, device: int) -> bool:
    """Whether a node is an update on that device."""
    tasks = program.tasks
    return len(program.lane_tasks) <= node < len(tasks) and bool(tasks.device[node] == device)


def _holder(program: Program, waited: Ints, node: int) -> int:
    """The device that something which does not end would come from: that of the task behind messages and updates."""
    while node >= len(program.lane_tasks) and waited[node] < program.nodes:
        node = int(waited[node])
    return int(program.tasks.device[node])


def refuse_stalled(program: Program, costs: Costs, start: Times, end: Times, which: str = "the run") -> None:
    """Raise what says who waits for whom, if a run does not end."""
    if costs.calendar is not None and (found := waits(program, start, end)):
        _refuse(program, costs, start, found, which)


def _refuse(program: Program, costs: Costs, start: Times, found: list[Wait], which: str) -> NoReturn:
    own = [wait for wait in found if wait.task == wait.for_node]
    others = [wait for wait in found if wait.task != wait.for_node]
    in_slots = start.dtype.kind == "i"
    sentences = []
    for wait in own:
        at, task = _stopped(costs, wait.task, start), program.describe(wait.task)
        when = f"in slot {at}" if in_slots else f"at {at:g} s"
        how = "is not done" if start[wait.task] < never(start.dtype) else "does not begin"
        sentences.append(f"device {wait.device} stopped {when}: {task} {how}")
    if others:
        verb = "device waits" if len(others) == 1 else "devices wait"
        sentences.append(f"{len(others)} {verb}")
    sentences += [_said(program, wait) for wait in others[:SHOWN]]
    if len(others) > SHOWN:
        sentences.append(f"and {len(others) - SHOWN} more")
    raise Stalled(f"{which} does not end: {'; '.join(sentences)}")


def _said(program: Program, wait: Wait) -> str:
    """Device 4's F(t=1,i=0,j=2) waits for p2p activation(t=1,i=0,j=1) 3->4, held up by device 3."""
    task, node = program.describe(wait.task), program.describe(wait.for_node)
    return f"device {wait.device}'s {task} waits for {node}, held up by device {wait.holder}"


def _stopped(costs: Costs, task: int, start: Times) -> float:
    """Since when a task's device does nothing for good."""
    calendar = costs.calendar
    assert calendar is not None, "nothing else lets a run not end"
    row = calendar.row[task]
    last = calendar.until[row] == calendar.never
    at: float = calendar.at[row][last].min().item()
    return at

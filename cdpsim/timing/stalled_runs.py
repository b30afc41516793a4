"""Runs that do not end because a device has stopped for good: which device waits for which."""

from typing import NamedTuple, NoReturn

import numpy as np

from cdpsim.errors import Stalled
from cdpsim.numeric.columns import Flags, Ints, Times, group_numbers
from cdpsim.numeric.disturbances import never
from cdpsim.program import Program
from cdpsim.timing.costs import Costs

MOST_NAMED = 16  # devices


class Wait(NamedTuple):
    """A device that waits: the first task that it cannot begin, the node that the task waits for, and its device.

    A device that has itself stopped waits for its own task.
    """

    device: int
    task: int
    for_node: int
    blocker: int


def waits(program: Program, start: Times, end: Times) -> list[Wait]:
    """Return the task that each stopped device does not do, and the node that each other device waits for in vain."""
    ends = end < never(end.dtype)
    before, after = program.waits()
    stuck = np.flatnonzero(~ends[before])
    waited = np.full(program.nodes, program.nodes, dtype=np.int64)  # of each node, the first that it waits for in vain
    np.minimum.at(waited, after[stuck], before[stuck])
    device, lanes = program.tasks.device, len(program.lane_tasks)
    found: dict[int, Wait] = {}
    for task in np.flatnonzero(~ends & (waited == program.nodes)).tolist():  # its device stands still
        number = int(device[task])
        found.setdefault(number, Wait(number, task, task, number))
    for task in _first_in_lanes(program, ends).tolist():
        number, node = int(device[task]), int(waited[task])
        if number not in found:
            while lanes <= node < len(device) and device[node] == number and waited[node] < program.nodes:
                node = int(waited[node])  # not its own update, but the node that this waits for
            found[number] = Wait(number, task, node, _blocker(program, waited, node))
    return [found[number] for number in sorted(found)]


def _first_in_lanes(program: Program, ends: Flags) -> Ints:
    """Return the first task of each lane that does not end."""
    lane = group_numbers(program.lane_start[:-1], len(program.lane_tasks))
    stuck = np.flatnonzero(~ends[program.lane_tasks])
    _, first = np.unique(lane[stuck], return_index=True)
    return program.lane_tasks[stuck[first]]


def _blocker(program: Program, waited: Ints, node: int) -> int:
    """Return the device that holds up a node: that of the task from which its messages and updates come."""
    while node >= len(program.lane_tasks) and waited[node] < program.nodes:
        node = int(waited[node])
    return int(program.tasks.device[node])


def refuse_stalled(program: Program, costs: Costs, start: Times, end: Times, run_name: str = "the run") -> None:
    """Raise an error that names the devices that wait, and for which, if a run does not end."""
    if costs.calendar is not None and (found := waits(program, start, end)):
        _refuse(program, costs, start, found, run_name)


def _refuse(program: Program, costs: Costs, start: Times, found: list[Wait], run_name: str) -> NoReturn:
    sentences = [_describe_stop(program, costs, start, wait) for wait in found if wait.task == wait.for_node]
    others = [wait for wait in found if wait.task != wait.for_node]
    if others:
        sentences.append(f"{len(others)} {'device waits' if len(others) == 1 else 'devices wait'}")
    sentences += [_describe_wait(program, wait) for wait in others[:MOST_NAMED]]
    if len(others) > MOST_NAMED:
        sentences.append(f"and {len(others) - MOST_NAMED} more")
    raise Stalled(f"{run_name} does not end: {'; '.join(sentences)}")


def _describe_stop(program: Program, costs: Costs, start: Times, wait: Wait) -> str:
    """Return a line such as "device 3 stopped in slot 2: F(t=0,i=1,j=0) is not done"."""
    assert costs.calendar is not None, "nothing else lets a run not end"
    row, task = costs.calendar.row[wait.task], program.describe(wait.task)
    at = costs.calendar.at[row][costs.calendar.until[row] == costs.calendar.never].min().item()
    when = f"in slot {at}" if start.dtype.kind == "i" else f"at {at:g} s"
    how = "is not done" if start[wait.task] < never(start.dtype) else "does not begin"
    return f"device {wait.device} stopped {when}: {task} {how}"


def _describe_wait(program: Program, wait: Wait) -> str:
    """Return a line such as "device 4's F(t=1,i=0,j=2) waits for p2p activation(t=1,i=0,j=1) 3->4, held up by ..."."""
    task, node = program.describe(wait.task), program.describe(wait.for_node)
    return f"device {wait.device}'s {task} waits for {node}, held up by device {wait.blocker}"

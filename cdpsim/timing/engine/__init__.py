"""Two interpreters of a program: the same times from both.

The exact engine computes start times as longest paths through the program. Of a run that does not end, because a device
has stopped for good, it is found which device waits for which.

Seconds are whole quanta, so that their sums are exact, and equal times come out equal. Sums of floats depend on their
order: of two messages that end together one would end first, and a device would hold more or less. A quantum is a power
of two, about what the floats at the end of a run cannot tell apart; all times of the run are whole numbers of quanta,
which floats add up exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import frexp, ldexp
from typing import NamedTuple, NoReturn

import numpy as np

from cdpsim.errors import RequestError, Stalled, choose
from cdpsim.numeric.columns import Flags, Ints, Times, group_numbers
from cdpsim.numeric.disturbances import never
from cdpsim.numeric.paths import longest_paths
from cdpsim.program import Program
from cdpsim.program.check import refuse_deadlock
from cdpsim.timing.costs import Costs


def run_by_longest_paths(program: Program, costs: Costs) -> tuple[Times, Times]:
    """Start every node when it is released and the last one it waits for has ended; return starts and ends."""
    earliest = np.zeros_like(costs.duration)
    for (task, _), release in zip(program.releases, costs.release, strict=True):
        earliest[task] = release
    start, end, reached = longest_paths(*program.waits(), costs.duration, earliest, costs.calendar)
    if reached < program.nodes:
        refuse_deadlock(program)
    return start, end


def sweep_together(program: Program, costs: Sequence[Costs], durations: Times | None = None) -> Times:
    """Return the ends of all nodes under each of some costs, a column for each.

    Or under one, with other durations of all nodes: a row for each of many runs.
    """
    graph, duration = program.levels, np.array([each.duration for each in costs]) if durations is None else durations
    earliest = np.zeros((program.nodes, len(costs)), dtype=duration.dtype)
    earliest[[task for task, _ in program.releases]] = np.array([each.release for each in costs]).T
    swept = graph.sweep(np.ascontiguousarray(duration.T[graph.order]), earliest[graph.order], costs[0].calendar)
    ends = np.empty_like(swept)
    ends[graph.order] = swept
    return ends


MOST_NAMED = 16  # devices


class Wait(NamedTuple):
    """A device that waits: the first task that it cannot begin, the node that the task waits for, and its device.

    A device that has itself stopped waits for its own task.
    """

    device: int
    task: int
    for_node: int
    blocker: int


def waits(program: Program, end: Times) -> list[Wait]:
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
    if costs.calendar is not None and (found := waits(program, end)):
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


EngineFunction = Callable[[Program, Costs], tuple[Times, Times]]  # returns the start and the end of every node


def _run_by_simpy(program: Program, costs: Costs) -> tuple[Times, Times]:
    from cdpsim.timing.engine import discrete  # simpy costs 40 ms to import

    return discrete.run_by_events(program, costs)


ENGINES: dict[str, EngineFunction] = {"fast": run_by_longest_paths, "simpy": _run_by_simpy}


def find_engine(name: str, contention: str = "none") -> EngineFunction:
    """Return the engine of that name; `auto` is the fast one for fixed costs without contention, else SimPy."""
    engine = choose("engine", name, ["auto", *ENGINES])
    if contention == "none":
        return ENGINES["fast" if engine == "auto" else engine]
    if engine == "fast":
        raise RequestError("engine", f"fast cannot let messages share links ({contention}); take simpy, or auto")
    return ENGINES["simpy"]


_FLOAT_DIGITS = 53  # of a float
_OF_LANE, _OF_RUN = 1.1, 1.01  # longest run over its busiest lane, beside filling; or over its last time
_OF_LANE_TO_COMPARE, _OF_RUN_TO_COMPARE = 3, 2  # and runs that are compared, of unlike lengths


def in_quanta(program: Program, costs: Costs) -> Costs:
    """Return costs in whole quanta: of the size that they ask for, or for a run as long as its lanes let expect.

    Slots are whole numbers already. Messages that share a link, and stopped tasks, end at times of their own.
    """
    if costs.duration.dtype.kind == "i":
        return costs
    # Stages begin one after another, which takes at most as long again; a folded replica stands for `fold` of them.
    filling = min(2.0, 1 + (program.n - 1) / (int(program.counts.max()) * program.fold))
    quantum = costs.quantum or find_quantum(_OF_LANE * filling * _busiest(program, costs))
    duration, parts = _round(costs.duration, quantum), program.message_nodes.stop
    if parts < program.nodes:
        duration[parts:] = program.parts.times(duration[program.message_nodes])
    return replace(costs, duration=duration, release=_round(costs.release, quantum), quantum=quantum)


def play_exactly(play: EngineFunction, program: Program, costs: Costs) -> tuple[Costs, Times, Times]:
    """Return costs in whole quanta, and the times by them of all nodes; in larger quanta if the run is a long one.

    With contention quanta are those of the same run without. Where a device stops, times are not sums of costs alone.
    """
    made = in_quanta(program, costs)
    if costs.calendar is not None:
        return made, *play(program, made)
    first = play if costs.wires is None else run_by_longest_paths
    start, end = first(program, made)
    if not are_exact(made, end):
        margin = _OF_RUN_TO_COMPARE if costs.quantum else _OF_RUN
        made = in_quanta(program, replace(costs, quantum=find_quantum(margin * float(end.max()))))
        start, end = first(program, made)
    return made, *((start, end) if first is play else play(program, made))


def find_quantum(longest: float) -> float:
    """Return the least quantum of which sums up to `longest` seconds are exact.

    >>> find_quantum(1.0) == 2.0**-52
    True
    """
    return ldexp(1.0, max(frexp(longest)[1] - _FLOAT_DIGITS, -1022))


def quantum_to_compare(program: Program, costs: Costs, steps: int) -> float:
    """Return a quantum for a run of `steps` steps and for runs that take about as long; 0 for slots."""
    longer = _OF_LANE_TO_COMPARE * steps / program.steps
    return 0.0 if costs.duration.dtype.kind == "i" else find_quantum(longer * _busiest(program, costs))


def are_exact(costs: Costs, end: Times) -> bool:
    """Return whether all times of a run in quanta are sums without rounding; so are slots."""
    return not costs.quantum or float(end.max(initial=0)) <= ldexp(costs.quantum, _FLOAT_DIGITS)


def _busiest(program: Program, costs: Costs) -> float:
    """Return the time of all tasks of the lane that has most to do."""
    return float(np.bincount(program.lane_numbers, costs.duration[program.lane_tasks]).max(initial=0))


def _round(seconds: Times, quantum: float) -> Times:
    """Return times in whole quanta: a positive time is at least one."""
    quanta = seconds / quantum
    np.rint(quanta, out=quanta)
    np.maximum(quanta, seconds > 0, out=quanta)
    quanta *= quantum
    return quanta

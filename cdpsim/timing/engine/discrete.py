"""The event-driven engine: SimPy with one process for each lane of a device.

A lane does its tasks in the program's order, each as soon as everything it waits for has ended. A message leaves as
soon as it is ready and arrives after its time; a message without a time has arrived as it is sent. With contention
messages are flows on the edges of their routes (`sharing.py`), which share these. A device stops by its calendar: the
times at which it goes on are events of the run.
"""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import simpy

from cdpsim.files.notes import ticker
from cdpsim.numeric.columns import Times
from cdpsim.numeric.disturbances import Calendar
from cdpsim.numeric.paths import find_cycle, successors
from cdpsim.program import Program
from cdpsim.program.check import refuse_deadlock
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine.discrete import Carrier, DeferredTimeout

Process = Generator[simpy.Event, object, None]
_Pause = tuple[float, float, simpy.Event | None]  # from when until when, and the event that ends it
_NODES_PER_TICK = 1 << 14


class _Playback:
    """One run's clock, the number of nodes that each node still waits for, and the times so far."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.compute, self.tasks, self.left = len(program.lane_tasks), len(program.tasks), program.nodes
        self.parts = program.message_nodes.stop
        self.env = simpy.Environment(initial_time=costs.duration.dtype.type(0).item())
        self.duration: list[float] = costs.duration.tolist()
        # The order of a lane is in its process: here are the dependencies alone.
        columns = successors(program.edges.before, program.edges.after, program.nodes)
        self.waits_for, self.first, self.reach = (column.tolist() for column in columns)
        self.start: list[float] = [0] * program.nodes
        self.end: list[float] = [0] * program.nodes
        self.asleep: dict[int, DeferredTimeout] = {}  # lanes, by the task that they wait for
        self.ticked, self.tick = self.left, ticker(self.left, "events")
        self.pauses: dict[int, list[_Pause]] = {}  # of tasks whose device stops ...
        self.work: dict[int, float] = {}  # ... and what they take: to begin takes no time
        if costs.calendar is not None:
            self._plan(costs.calendar)
        self.finish = self._finisher()
        wires = costs.wires
        self.carrier = Carrier(self.env, self.tasks, self.duration, self.finish, wires) if wires is not None else None

    def _plan(self, calendar: Calendar) -> None:
        """Lay out the stops of each device, with the event that ends each of them, if anything does."""
        rows = []
        for at, until in zip(calendar.at.tolist(), calendar.until.tolist(), strict=True):
            pairs = [pair for pair in zip(at, until, strict=True) if pair[0] < calendar.never]
            rows.append([(*pair, self.env.timeout(pair[1]) if pair[1] < calendar.never else None) for pair in pairs])
        self.pauses = {node: rows[row] for node, row in enumerate(calendar.row.tolist()) if rows[row]}
        self.start, self.end = ([calendar.never] * len(self.end) for _ in range(2))
        for task in self.pauses:
            self.work[task], self.duration[task] = self.duration[task], 0

    def carry(self, node: int) -> None:
        """Let a node take its time: a message, a device's part in one, or an update without a lane."""
        if self.carrier is not None and self.tasks <= node < self.parts:
            self.carrier.take(node)
        else:
            self.env.timeout(self.duration[node]).callbacks.append(lambda _: self.finish(node))

    def _finisher(self) -> Callable[[int], None]:
        """Return the function that ends a node: looking names up in a run would cost more than all the rest."""
        env, start, end, duration, waits_for = self.env, self.start, self.end, self.duration, self.waits_for
        first, reach, asleep, compute, pauses = self.first, self.reach, self.asleep, self.compute, self.pauses

        def finish(node: int) -> None:
            now = env.now
            pending = [node]
            for node in pending:
                end[node] = now
                for after in reach[first[node] : first[node + 1]]:
                    left = waits_for[after] - 1
                    waits_for[after] = left
                    if left:
                        continue
                    if after < compute:
                        if after in asleep:
                            start[after] = now
                            asleep.pop(after).begin(duration[after])
                        continue
                    start[after] = now
                    if duration[after]:
                        self.carry(after)
                    elif after in pauses:  # an update, of a host or of a device that may stand still
                        env.process(self.work_on(after))
                    else:  # an update, or a message without a time
                        pending.append(after)
            self.count(len(pending))

        return finish

    def count(self, nodes: int) -> None:
        """Report progress: so many nodes more have ended."""
        self.left -= nodes
        if self.ticked - self.left >= _NODES_PER_TICK:
            self.tick(self.ticked - self.left)
            self.ticked = self.left

    def lane(self, tasks: list[int]) -> Process:
        """Do the tasks of a lane one after another."""
        env, duration, waits_for, start, finish = self.env, self.duration, self.waits_for, self.start, self.finish
        pauses = self.pauses
        for task in tasks:
            if waits_for[task]:
                self.asleep[task] = wait = DeferredTimeout(env)
                yield wait
            else:
                start[task] = env.now
                yield env.timeout(duration[task])
            if task in pauses:
                yield from self.work_on(task)
            else:
                finish(task)

    def work_on(self, task: int) -> Process:
        """Do a task that is ready, except while its device stands still."""
        env, left = self.env, self.work[task]
        for at, until, awake in self.pauses[task]:
            if at <= env.now < until:
                self.start[task] = until
            elif env.now < at < env.now + left:
                left = max(left - (at - env.now), 0)
            else:
                continue
            yield env.event() if awake is None else awake
        yield env.timeout(left)
        self.finish(task)

    def release(self, task: int, time: float) -> None:
        """Let a task wait for a time, too."""

        def now(_: simpy.Event) -> None:
            self.waits_for[task] -= 1
            if not self.waits_for[task] and task in self.asleep:
                self.start[task] = self.env.now
                self.asleep.pop(task).begin(self.duration[task])

        self.waits_for[task] += 1
        self.env.timeout(time).callbacks.append(now)


def run_by_events(program: Program, costs: Costs) -> tuple[Times, Times]:
    """Play the program until nothing more can happen; return the start and the end of every node."""
    with _no_collection():
        playback = _Playback(program, costs)
        ready = [node for node in range(playback.compute, program.nodes) if not playback.waits_for[node]]
        for (task, _), time in zip(program.releases, costs.release.tolist(), strict=True):
            playback.release(task, time)
        tasks = program.lane_tasks.tolist()
        for low, high in pairwise(program.lane_start.tolist()):
            playback.env.process(playback.lane(tasks[low:high]))
        for node in ready:  # messages of what was there at the start
            playback.start[node] = playback.env.now
            if playback.duration[node]:
                playback.carry(node)
            else:
                playback.finish(node)
        playback.env.run()
        playback.tick(0)
    if playback.left and (costs.calendar is None or find_cycle(*program.waits(), program.nodes)):
        refuse_deadlock(program)
    return np.array(playback.start, costs.duration.dtype), np.array(playback.end, costs.duration.dtype)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Spare a run the search for cycles of garbage: it makes none, and it has millions of objects to look through."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

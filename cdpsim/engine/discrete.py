"""The event-driven engine: SimPy with one process for each lane of a device and one for each link.

A lane does its tasks in the program's order, each as soon as everything it waits for has ended. A link takes messages
as they become ready and delivers each after its own time; what takes no time has arrived as it is sent.
"""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import numpy as np
import simpy

from cdpsim.check import refuse_deadlock
from cdpsim.costs import Costs, Times
from cdpsim.paths import successors
from cdpsim.program import Op, Program
from cdpsim.progress import ticker

Process = Generator[simpy.Event, object, None]
_TICK = 1 << 14


class _Wait(simpy.Event):
    """A timeout that begins when somebody says so: what a process sleeps on until its task has been done."""

    def begin(self, delay: float) -> None:
        """Let it happen after a delay; as `simpy.Timeout` does it, but later than when it was made."""
        self._ok = True
        self._value = None
        self.env.schedule(self, delay=delay)


class _Link:
    """Carries messages; without contention those that overlap do not slow each other down."""

    def __init__(self, run: "_Run") -> None:
        self.run = run
        self.carried = -1  # the message that the process waits for; others that overlap it have timeouts of their own
        self.wait = _Wait(run.env)
        run.env.process(self.process())

    def take(self, message: int) -> None:
        """A message is ready to go."""
        run, delay = self.run, self.run.duration[message]
        if self.carried < 0:
            self.carried = message
            self.wait.begin(delay)
        else:
            run.env.timeout(delay, message).callbacks.append(run.arrived)

    def process(self) -> Process:
        """Sleep until a message has been carried."""
        while True:
            yield self.wait
            message, self.carried = self.carried, -1
            self.wait = _Wait(self.run.env)
            self.run.finish(message)


class _Run:
    """One run's clock, how much each node still waits for, and the times so far."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.compute, self.tasks, self.left = len(program.lane_tasks), len(program.tasks), program.nodes
        self.env = simpy.Environment(initial_time=costs.duration.dtype.type(0).item())
        self.duration: list[float] = costs.duration.tolist()
        # The order of a lane is in its process: here are the dependencies alone.
        columns = successors(program.edges.before, program.edges.after, program.nodes)
        self.waits_for, self.first, self.reach = (column.tolist() for column in columns)
        self.start: list[float] = [0] * program.nodes
        self.end: list[float] = [0] * program.nodes
        self.asleep: dict[int, _Wait] = {}  # lanes, by the task that they wait for
        self.said, self.tick = self.left, ticker(self.left, "events")
        # A link for each pair of devices and each group, made when it is first used.
        messages, single = program.messages, program.messages.op == Op.P2P
        self.pairs = list(zip(np.where(single, messages.src, -1).tolist(), messages.dst.tolist(), strict=True))
        self.links: dict[tuple[int, int], _Link] = {}
        self.finish = self._finisher()

    def carry(self, message: int) -> None:
        """Hand a message to its link."""
        pair = self.pairs[message - self.tasks]
        if pair not in self.links:
            self.links[pair] = _Link(self)
        self.links[pair].take(message)

    def close(self) -> None:
        """Let go of links, which sleep for ever: they and the run know each other, and would wait for the collector."""
        for link in self.links.values():
            link.wait.callbacks.clear()
        self.links.clear()
        self.tick(0)

    def _finisher(self) -> Callable[[int], None]:
        """Make what is called when a node has ended: looking names up in a run would cost more than all the rest."""
        env, start, end, duration, waits_for = self.env, self.start, self.end, self.duration, self.waits_for
        first, reach, asleep, compute = self.first, self.reach, self.asleep, self.compute

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
                    else:  # an update, or a message that takes no time
                        pending.append(after)
            self.count(len(pending))

        return finish

    def count(self, nodes: int) -> None:
        """Nodes have ended."""
        self.left -= nodes
        if self.said - self.left >= _TICK:
            self.tick(self.said - self.left)
            self.said = self.left

    def arrived(self, delivery: simpy.Event) -> None:
        """A message has been delivered."""
        self.finish(int(delivery.value or 0))

    def let_go(self, task: int) -> None:
        """A task waits for nothing more; if its lane waits for it, it begins."""
        if task in self.asleep:
            self.start[task] = self.env.now
            self.asleep.pop(task).begin(self.duration[task])

    def lane(self, tasks: list[int]) -> Process:
        """Do tasks one after another."""
        env, duration, waits_for, start, finish = self.env, self.duration, self.waits_for, self.start, self.finish
        for task in tasks:
            if waits_for[task]:
                self.asleep[task] = wait = _Wait(env)
                yield wait
            else:
                start[task] = env.now
                yield env.timeout(duration[task])
            finish(task)

    def release(self, task: int, time: float) -> None:
        """Let a task wait for a time, too."""

        def now(_: simpy.Event) -> None:
            self.waits_for[task] -= 1
            if not self.waits_for[task]:
                self.let_go(task)

        self.waits_for[task] += 1
        self.env.timeout(time).callbacks.append(now)


def run(program: Program, costs: Costs) -> tuple[Times, Times]:
    """Play the program until nothing more can happen."""
    with _no_collection():
        state = _Run(program, costs)
        ready = [node for node in range(state.compute, program.nodes) if not state.waits_for[node]]
        for (task, _), time in zip(program.releases, costs.release.tolist(), strict=True):
            state.release(task, time)
        tasks = program.lane_tasks.tolist()
        for low, high in zip(program.lane_start[:-1].tolist(), program.lane_start[1:].tolist(), strict=True):
            state.env.process(state.lane(tasks[low:high]))
        for node in ready:  # messages of what was there at the start
            if state.duration[node]:
                state.carry(node)
            else:
                state.finish(node)
        state.env.run()
        state.close()
    if state.left:
        refuse_deadlock(program)
    kind = costs.duration.dtype
    return np.array(state.start, dtype=kind), np.array(state.end, dtype=kind)


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

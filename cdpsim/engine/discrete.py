"""The event-driven engine: SimPy with one process for each lane of a device and one for each link.

A lane does its tasks in the program's order, each as soon as everything it waits for has ended. A link takes
messages as they become ready and delivers each after its own time.
"""

from collections import deque
from collections.abc import Generator

import numpy as np
import simpy

from cdpsim.check import refuse_deadlock
from cdpsim.costs import Costs, Times
from cdpsim.paths import successors
from cdpsim.program import Op, Program

Process = Generator[simpy.Event, object, None]


class _Run:
    """One run's clock, what still waits for how much, and the times so far."""

    def __init__(self, program: Program, costs: Costs) -> None:
        waits_for, first, after = successors(*program.waits(), program.nodes)
        self.env = simpy.Environment(initial_time=costs.duration.dtype.type(0).item())
        self.duration = costs.duration.tolist()
        self.waits_for = waits_for.tolist()
        self.first, self.after = first.tolist(), after.tolist()
        self.start: list[float] = [0] * program.nodes
        self.end: list[float] = [0] * program.nodes
        self.left = program.nodes
        self.compute, self.tasks = len(program.lane_tasks), len(program.tasks)
        self.gates: dict[int, simpy.Event] = {}
        self.links: dict[object, _Link] = {}
        messages = program.messages
        pair = zip((messages.op == Op.P2P).tolist(), messages.src.tolist(), messages.dst.tolist(), strict=True)
        self.link_of = [(src, dst) if single else dst for single, src, dst in pair]

    def finish(self, node: int) -> None:
        """A node has ended: whoever waited only for it may go."""
        pending = [node]
        while pending:
            node = pending.pop()
            self.end[node] = self.env.now
            self.left -= 1
            for after in self.after[self.first[node] : self.first[node + 1]]:
                self.waits_for[after] -= 1
                if not self.waits_for[after] and self.is_update(after):
                    self.start[after] = self.env.now
                    pending.append(after)
                elif not self.waits_for[after]:
                    self.let_go(after)

    def is_update(self, node: int) -> bool:
        """Updates happen at once where their gradients are; they take no lane and no time."""
        return self.compute <= node < self.tasks

    def let_go(self, node: int) -> None:
        """A node waits for nothing more: wake its lane, or hand the message to its link."""
        if node >= self.tasks:
            self.link(node).take(node)
        elif node in self.gates:
            self.gates.pop(node).succeed()

    def link(self, message: int) -> "_Link":
        """The link that a message travels on: of a pair of devices, or of a group."""
        key = self.link_of[message - self.tasks]
        if key not in self.links:
            self.links[key] = _Link(self)
        return self.links[key]

    def release(self, task: int) -> None:
        """The time of a task's release has come."""
        self.waits_for[task] -= 1
        if not self.waits_for[task]:
            self.let_go(task)

    def lane(self, tasks: list[int]) -> Process:
        """Do tasks one after another."""
        for task in tasks:
            if self.waits_for[task]:
                self.gates[task] = self.env.event()
                yield self.gates[task]
            self.start[task] = self.env.now
            yield self.env.timeout(self.duration[task])
            self.finish(task)


class _Link:
    """Carries messages; without contention they do not slow each other down."""

    def __init__(self, run: _Run) -> None:
        self.run, self.ready = run, deque[int]()
        self.wake = run.env.event()
        run.env.process(self.process())

    def take(self, message: int) -> None:
        """A message is ready to go."""
        self.ready.append(message)
        if not self.wake.triggered:
            self.wake.succeed()

    def process(self) -> Process:
        """Send what is ready, then sleep until there is more."""
        run = self.run
        while True:
            yield self.wake
            self.wake = run.env.event()
            while self.ready:
                message = self.ready.popleft()
                run.start[message] = run.env.now
                delivery = run.env.timeout(run.duration[message], message)
                delivery.callbacks.append(lambda event: run.finish(event.value))


def run(program: Program, costs: Costs) -> tuple[Times, Times]:
    """Play the program until nothing more can happen."""
    state = _Run(program, costs)
    for (task, _), release in zip(program.releases, costs.release.tolist(), strict=True):
        state.waits_for[task] += 1
        timer = state.env.timeout(release, task)
        timer.callbacks.append(lambda event: state.release(event.value))
    ready = [node for node, count in enumerate(state.waits_for) if not count]
    bounds = zip(program.lane_start[:-1].tolist(), program.lane_start[1:].tolist(), strict=True)
    lane_tasks = program.lane_tasks.tolist()
    for low, high in bounds:
        state.env.process(state.lane(lane_tasks[low:high]))
    for node in ready:
        if state.is_update(node):
            state.finish(node)
        else:
            state.let_go(node)
    state.env.run()
    if state.left:
        refuse_deadlock(program)
    kind = costs.duration.dtype
    return np.array(state.start, dtype=kind), np.array(state.end, dtype=kind)

"""The event-driven engine: SimPy with one process for each lane of a device and one for each link.

A lane does its tasks in the program's order, each as soon as everything it waits for has ended. A link takes messages
as they become ready and delivers each after its own time; what takes no time has arrived as it is sent. With contention
there are no such links: messages are flows on the edges of their routes (`sharing.py`), which share these. A device
that stops does so by its calendar: the times at which it goes on are events of the run.
"""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import numpy as np
import simpy

from cdpsim.files.progress import ticker
from cdpsim.numeric.calendars import Calendar
from cdpsim.numeric.columns import Times
from cdpsim.numeric.paths import successors
from cdpsim.program import Op, Program
from cdpsim.program.check import find_cycle, refuse_deadlock
from cdpsim.timing.costs import Costs
from cdpsim.timing.engine.carrier import Carrier, Wait

Process = Generator[simpy.Event, object, None]
_Pause = tuple[float, float, simpy.Event | None]  # from when until when, and the event that ends it
_TICK = 1 << 14


class _Link:
    """Carries messages; without contention those that overlap do not slow each other down."""

    def __init__(self, run: "_Run") -> None:
        self.run = run
        self.carried = -1  # the message that the process waits for; others that overlap it have timeouts of their own
        self.wait = Wait(run.env)
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
            self.wait = Wait(self.run.env)
            self.run.finish(message)


class _Run:
    """One run's clock, how much each node still waits for, and the times so far."""

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
        self.asleep: dict[int, Wait] = {}  # lanes, by the task that they wait for
        self.said, self.tick = self.left, ticker(self.left, "events")
        # A link for each pair of devices and each group, made when it is first used.
        messages, single = program.messages, program.messages.op == Op.P2P
        self.pairs = list(zip(np.where(single, messages.src, -1).tolist(), messages.dst.tolist(), strict=True))
        self.links: dict[tuple[int, int], _Link] = {}
        self.stops: dict[int, list[_Pause]] = {}  # of tasks whose device stops ...
        self.work: dict[int, float] = {}  # ... and what they take: to begin takes no time
        if costs.calendar is not None:
            self._plan(costs.calendar)
        self.take = self._link if costs.wires is None else Carrier(self, costs.wires).take
        self.finish = self._finisher()

    def _plan(self, calendar: Calendar) -> None:
        """Lay out the stops of each device, with the event that ends each of them, if anything does."""
        rows = []
        for at, until in zip(calendar.at.tolist(), calendar.until.tolist(), strict=True):
            pairs = [pair for pair in zip(at, until, strict=True) if pair[0] < calendar.never]
            rows.append([(*pair, self.env.timeout(pair[1]) if pair[1] < calendar.never else None) for pair in pairs])
        self.stops = {node: rows[row] for node, row in enumerate(calendar.row.tolist()) if rows[row]}
        self.start, self.end = ([calendar.never] * len(self.end) for _ in range(2))
        for task in self.stops:
            self.work[task], self.duration[task] = self.duration[task], 0

    def carry(self, node: int) -> None:
        """Hand a message to what carries it; a device's part in one, or an update without a lane, only takes time."""
        if not self.tasks <= node < self.parts:
            self.env.timeout(self.duration[node], node).callbacks.append(self.arrived)
        else:
            self.take(node)

    def _link(self, message: int) -> None:
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
        first, reach, asleep, compute, stops = self.first, self.reach, self.asleep, self.compute, self.stops

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
                    elif after not in stops or not self.put_off(after):  # an update, or a message that takes no time
                        pending.append(after)
            self.count(len(pending))

        return finish

    def put_off(self, update: int) -> bool:
        """Let an update whose device stands still wait until it goes on, or a host make it; say whether it has to."""
        if self.work[update]:
            self.env.process(self.beside(update))
            return True
        for at, until, awake in self.stops[update]:
            if at <= self.env.now < until:

                def later(_: simpy.Event) -> None:
                    self.start[update] = self.env.now
                    self.finish(update)

                if awake is None:
                    self.start[update] = until
                else:
                    awake.callbacks.append(later)
                return True
        return False

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
        stops = self.stops
        for task in tasks:
            if waits_for[task]:
                self.asleep[task] = wait = Wait(env)
                yield wait
            else:
                start[task] = env.now
                yield env.timeout(duration[task])
            if task in stops:
                yield from self.do(task)
            finish(task)

    def beside(self, update: int) -> Process:
        """Make an update that takes time and no lane."""
        yield from self.do(update)
        self.finish(update)

    def do(self, task: int) -> Process:
        """Do a task that is ready, but for the times in which its device does nothing."""
        env, left = self.env, self.work[task]
        for at, until, awake in self.stops[task]:
            if at <= env.now < until:
                self.start[task] = until
            elif env.now < at < env.now + left:
                left = max(left - (at - env.now), 0)
            else:
                continue
            yield env.event() if awake is None else awake
        yield env.timeout(left)

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
            state.start[node] = state.env.now
            if state.duration[node]:
                state.carry(node)
            else:
                state.finish(node)
        state.env.run()
        state.close()
    if state.left and (costs.calendar is None or find_cycle(program)):
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

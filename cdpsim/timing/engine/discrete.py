"""The event-driven engine: SimPy with one process for each lane of a device.

A lane does its tasks in the program's order, each as soon as everything it waits for has ended. A message leaves as
soon as it is ready and arrives after its time; a message without a time has arrived as it is sent. With contention
messages are flows on the edges of their routes (`Carrier`), which share these. A device stops by its calendar: the
times at which it goes on are events of the run.

Links are shared fairly, or by one message after another. Both ways have the same methods. A flow joins when its bytes
begin to move. `settle` shares edges among all flows, once everything that happens at a time has happened. A flow that
meets no other is alone: it ends when its engine said that it would, to the last bit, and leaves. The other flows end
when `settle` and `over` say.
"""

import gc
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import pairwise
from math import inf, nextafter

import numpy as np
import simpy
from simpy.events import NORMAL, EventPriority

from cdpsim.files.notes import ticker
from cdpsim.numeric.columns import Times
from cdpsim.numeric.disturbances import Calendar
from cdpsim.numeric.fair_shares import FairRates
from cdpsim.numeric.paths import compiled_loops, find_cycle, successors
from cdpsim.program import Program
from cdpsim.program.check import refuse_deadlock
from cdpsim.timing.costs import Costs, Wires

COMPILED_FROM_MESSAGES = 5_000  # messages: below, importing numba takes longer than it saves
_RECOUNT_FROM = 1e6  # a count of bytes larger than the rest of a flow by this factor begins anew


class FairFlows:
    """Flows share their edges max-min fairly (`fair_shares.py`).

    Flows of the same route form a *bundle*: they have the same rate, and count the bytes that each of them has been
    served from the same moment on.
    """

    def __init__(self, wires: Wires) -> None:
        routes = wires.routes()
        numbers: dict[tuple[int, ...], int] = {}
        self.bundle = [numbers.setdefault(route, len(numbers)) for route in routes]
        self.size, limit = wires.size.tolist(), wires.bandwidth.tolist()
        self.most = [min((limit[edge] for edge in path), default=inf) for path in numbers]
        loops = compiled_loops() if len(routes) >= COMPILED_FROM_MESSAGES else None
        self.rates = (loops.CompiledFairRates if loops else FairRates)(list(numbers), limit)
        # Of each bundle: its flows by the count at which each is through, the rate of each, the count, and as of when.
        self.flows: list[list[tuple[float, int]]] = [[] for _ in numbers]
        self.rate, self.served, self.since = ([0.0] * len(numbers) for _ in range(3))
        self.single = [False] * len(numbers)  # its only flow has been alone so far
        self.joined: dict[int, float] = {}
        self.alone: dict[int, float] = {}  # when each flow would have ended alone
        self.left: dict[int, None] = {}
        self.next_end: dict[int, float] = {}
        self.due: list[tuple[float, int]] = []  # ends of bundles' first flows, some of them outdated

    def join(self, flow: int, alone: float) -> None:
        """Let the bytes of a flow begin to move now; the last one arrives at the time `alone` if it meets no other."""
        self.joined[flow] = self.alone[flow] = alone

    def is_alone(self, flow: int) -> bool:
        """Whether a flow is under way, and has been at its route's full bandwidth ever since it joined."""
        bundle = self.bundle[flow]
        return flow in self.joined or (self.single[bundle] and self.flows[bundle][:1] == [(self.size[flow], flow)])

    def leave(self, flow: int) -> None:
        """End a flow that is alone."""
        del self.alone[flow]
        if flow in self.joined:
            del self.joined[flow]
            return
        bundle = self.bundle[flow]
        self.flows[bundle].clear()
        self.left[bundle] = None

    def settle(self, now: float) -> float:
        """Rate bundles anew where flows have changed; return when the next flow ends that is not alone."""
        changed, self.left = self.left, {}
        for flow in self.joined:
            self._add(flow, now)
            changed[self.bundle[flow]] = None
        self.joined.clear()
        if changed:
            self._rate(changed, now)
        while self.due and self.next_end.get(self.due[0][1]) != self.due[0][0]:
            heappop(self.due)
        return self.due[0][0] if self.due else inf

    def over(self, now: float) -> list[int]:
        """End the flows that are through by now, except flows that are alone; return them."""
        ended = []
        while self.due and self.due[0][0] <= now:
            time, bundle = heappop(self.due)
            if self.next_end.get(bundle) != time:
                continue
            del self.next_end[bundle]
            flows, through = self.flows[bundle], self.flows[bundle][0][0]
            while flows and flows[0][0] <= through:
                ended.append(heappop(flows)[1])
                del self.alone[ended[-1]]
            self.left[bundle] = None
        return ended

    def _add(self, flow: int, now: float) -> None:
        """Put a flow into its bundle, which may have had none."""
        bundle = self.bundle[flow]
        if self.flows[bundle]:
            self._serve(bundle, now)
        else:
            self.served[bundle], self.since[bundle], self.single[bundle] = 0.0, now, True
        heappush(self.flows[bundle], (self.served[bundle] + self.size[flow], flow))

    def _serve(self, bundle: int, now: float) -> None:
        """Count the bytes that have been served until now."""
        self.served[bundle] += self.rate[bundle] * (now - self.since[bundle])
        self.since[bundle] = now
        flows, served = self.flows[bundle], self.served[bundle]
        if served > _RECOUNT_FROM * (flows[0][0] - served):
            flows[:] = [(through - served, flow) for through, flow in flows]
            self.served[bundle] = 0.0

    def _rate(self, changed: dict[int, None], now: float) -> None:
        """Set new rates from now on, and note when the first flows of the bundles end."""
        rates = self.rates.share({bundle: len(self.flows[bundle]) for bundle in changed})
        for bundle in changed:
            self.next_end.pop(bundle, None)
        for bundle, new in rates.items():
            if new == self.rate[bundle] and bundle not in changed:
                continue
            self._serve(bundle, now)
            self.rate[bundle] = new
            if self.single[bundle] and new == self.most[bundle]:
                continue
            self.single[bundle] = False
            through, flow = self.flows[bundle][0]
            end = max(now + (through - self.served[bundle]) / new, self.alone[flow])
            self.next_end[bundle] = end
            heappush(self.due, (end, bundle))


class QueuedFlows:
    """A flow has all edges of its route for itself, at the route's bandwidth; others that need one of them wait.

    First come, first served, on every edge: by the time at which their bytes were there to move, then by number. A flow
    takes its places at all its edges at once, so no two flows wait for each other.
    """

    def __init__(self, wires: Wires) -> None:
        self.route = wires.routes()
        bandwidth = wires.bandwidth.tolist()
        self.seconds = [
            size / min((bandwidth[edge] for edge in route), default=inf)
            for size, route in zip(wires.size.tolist(), self.route, strict=True)
        ]
        self.line: list[deque[int]] = [deque() for _ in bandwidth]  # of each edge: the flow that has it, then others
        self.lacks: dict[int, int] = {}  # edges that a flow waits for
        self.joined: dict[int, float] = {}
        self.alone: dict[int, float] = {}  # ends of flows that have met no other so far
        self.earliest: dict[int, float] = {}  # when the others would have ended
        self.turned: list[int] = []
        self.due: list[tuple[float, int]] = []

    def join(self, flow: int, alone: float) -> None:
        """Begin to move, or to wait."""
        self.joined[flow] = alone

    def is_alone(self, flow: int) -> bool:
        """Whether it has waited for no other flow."""
        return flow in self.joined or flow in self.alone

    def leave(self, flow: int) -> None:
        """End without having waited."""
        if self.joined.pop(flow, None) is None:
            del self.alone[flow]
            self._pass_on(flow)

    def settle(self, now: float) -> float:
        """Start the flows whose turn it is; newcomers are last."""
        for flow in self.turned:
            heappush(self.due, (max(now + self.seconds[flow], self.earliest.pop(flow)), flow))
        self.turned.clear()
        for flow, alone in sorted(self.joined.items()):
            lines = [self.line[edge] for edge in self.route[flow]]
            self.lacks[flow] = sum(bool(line) for line in lines)
            for line in lines:
                line.append(flow)
            (self.earliest if self.lacks[flow] else self.alone)[flow] = alone
        self.joined.clear()
        return self.due[0][0] if self.due else inf

    def over(self, now: float) -> list[int]:
        """End the flows that are through."""
        ended = []
        while self.due and self.due[0][0] <= now:
            ended.append(heappop(self.due)[1])
            self._pass_on(ended[-1])
        return ended

    def _pass_on(self, flow: int) -> None:
        """Leave every edge of the route to the flow that comes next."""
        del self.lacks[flow]
        for edge in self.route[flow]:
            line = self.line[edge]
            line.popleft()
            if line:
                self.lacks[line[0]] -= 1
                if not self.lacks[line[0]]:
                    self.turned.append(line[0])


def flows_on(wires: Wires) -> FairFlows | QueuedFlows:
    """Return the flows of a program's messages on their wires, which share edges as the wires say."""
    return FairFlows(wires) if wires.contention == "fair" else QueuedFlows(wires)


_LAST = EventPriority(NORMAL + 1)  # after everything else that happens at a time


class DeferredTimeout(simpy.Event):
    """A timeout that begins later than it is made: a process sleeps on it until its task has been done."""

    def begin(self, delay: float, priority: EventPriority = NORMAL) -> None:
        """Let the timeout end after a delay, as `simpy.Timeout` does."""
        self._ok = True
        self._value = None
        self.env.schedule(self, priority, delay)


class Carrier:
    """Carries messages that share edges: each waits out its latency, then it is a flow until its bytes are there.

    Everything that begins and ends at one time is settled together, when nothing else is left to happen at that time.
    Messages are numbered after the tasks. A message that shares nothing takes its duration.
    """

    def __init__(
        self,
        env: simpy.Environment,
        tasks: int,
        duration: list[float],
        finish: Callable[[int], None],
        wires: Wires,
    ) -> None:
        """Serve a run of `tasks` tasks; `finish` is called when a message has arrived."""
        self.env, self.tasks, self.duration, self.finish = env, tasks, duration, finish
        self.flows = flows_on(wires)
        self.latency: list[float] = wires.latency.tolist()
        self.moves: list[bool] = (np.diff(wires.first) > 0).tolist()
        self.will_settle = False
        self.next_wake = inf

    def take(self, message: int) -> None:
        """Let a message go that is ready."""
        env, row, duration = self.env, message - self.tasks, self.duration[message]
        if not self.moves[row]:
            env.timeout(duration).callbacks.append(lambda _: self.finish(message))
            return
        alone = env.now + duration
        if self.latency[row]:
            env.timeout(self.latency[row]).callbacks.append(lambda _: self._join(row, alone))
        else:
            self._join(row, alone)
        # From here, and not from when it joins: then it ends at the exact time of a run without contention.
        env.timeout(duration).callbacks.append(lambda _: self._leave(row))

    def _join(self, row: int, alone: float) -> None:
        self.flows.join(row, alone)
        self._settle_soon()

    def _leave(self, row: int) -> None:
        if self.flows.is_alone(row):
            self.flows.leave(row)
            self._settle_soon()
            self.finish(self.tasks + row)

    def _settle_soon(self) -> None:
        if not self.will_settle:
            self.will_settle = True
            self._call(0, self._settle, _LAST)

    def _settle(self, _: simpy.Event) -> None:
        self.will_settle = False
        now = self.env.now
        time = self.flows.settle(now)
        if time < self.next_wake:
            self.next_wake = time
            delay = max(time - now, 0)
            if now + delay < time:  # wake no earlier than that: a flow has its time at least
                delay = nextafter(delay, inf)
            self._call(delay, lambda _: self._wake(time))

    def _wake(self, time: float) -> None:
        """End the flows that are through; an event for a flow that has been slowed down since comes to nothing."""
        if time == self.next_wake:
            self.next_wake = inf
        ended = self.flows.over(self.env.now)
        self._settle_soon()
        for row in ended:
            self.finish(self.tasks + row)

    def _call(self, delay: float, call: Callable[[simpy.Event], None], priority: EventPriority = NORMAL) -> None:
        event = DeferredTimeout(self.env)
        event.callbacks.append(call)
        event.begin(delay, priority)


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
        """Report the nodes that have ended since the last report."""
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
        for node in ready:  # messages of values that are there at the start
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

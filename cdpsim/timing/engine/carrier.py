"""Carries messages over links that they share, as events of SimPy; `sharing.py` decides how much each of them gets."""

from collections.abc import Callable
from math import inf, nextafter

import numpy as np
import simpy
from simpy.events import NORMAL, EventPriority

from cdpsim.timing.costs import Wires
from cdpsim.timing.engine.discrete import flows_on

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
        """Serve a run that has so many tasks, and that `finish` tells that a message has arrived."""
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
        # From here, and not from when it joins: so it ends at the very time that it would have without contention.
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

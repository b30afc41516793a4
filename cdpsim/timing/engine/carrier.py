"""Carries messages over links that they share, as events of SimPy; who gets how much of them is in `sharing.py`."""

from collections.abc import Callable
from math import inf, nextafter
from typing import Protocol

import numpy as np
import simpy
from simpy.events import NORMAL, EventPriority

from cdpsim.timing.costs import Wires
from cdpsim.timing.engine.sharing import flows_of

_LAST = EventPriority(NORMAL + 1)  # after everything else that happens at a time


class Wait(simpy.Event):
    """A timeout that begins when somebody says so: what a process sleeps on until its task has been done."""

    def begin(self, delay: float, priority: EventPriority = NORMAL) -> None:
        """Let it happen after a delay; as `simpy.Timeout` does it, but later than when it was made."""
        self._ok = True
        self._value = None
        self.env.schedule(self, priority, delay)


class Run(Protocol):
    """What a carrier knows of the run that it serves; messages are numbered after the tasks."""

    env: simpy.Environment
    tasks: int
    duration: list[float]
    finish: Callable[[int], None]

    def arrived(self, delivery: simpy.Event) -> None:
        """Deliver a message that meets nobody."""


class Carrier:
    """Carries messages that share edges: each waits out its latency, then it is a flow until its bytes are there.

    What begins and ends at one time is settled together, when nothing else is left to happen at that time.
    """

    def __init__(self, run: Run, wires: Wires) -> None:
        self.run, self.flows = run, flows_of(wires)
        self.latency: list[float] = wires.latency.tolist()
        self.moves: list[bool] = (np.diff(wires.first) > 0).tolist()
        self.will_settle = False
        self.next_wake = inf

    def take(self, message: int) -> None:
        """A message is ready to go."""
        run, row = self.run, message - self.run.tasks
        env, duration = run.env, run.duration[message]
        if not self.moves[row]:
            env.timeout(duration, message).callbacks.append(run.arrived)
            return
        alone = env.now + duration
        if self.latency[row]:
            env.timeout(self.latency[row]).callbacks.append(lambda _: self._join(row, alone))
        else:
            self._join(row, alone)
        # From here, and not from when it joins: so it ends at the very time that it would have without contention.
        env.timeout(duration, row).callbacks.append(self._leave)

    def _join(self, row: int, alone: float) -> None:
        self.flows.join(row, alone)
        self._settle_soon()

    def _leave(self, event: simpy.Event) -> None:
        row = int(event.value or 0)
        if self.flows.is_alone(row):
            self.flows.leave(row)
            self._settle_soon()
            self.run.finish(self.run.tasks + row)

    def _settle_soon(self) -> None:
        if not self.will_settle:
            self.will_settle = True
            self._at(0, self._settle, _LAST)

    def _settle(self, _: simpy.Event) -> None:
        self.will_settle = False
        now = self.run.env.now
        time = self.flows.settle(now)
        if time < self.next_wake:
            self._wake_at(time, now)

    def _wake_at(self, time: float, now: float) -> None:
        """Wake no earlier than that: a flow has its time at least."""
        self.next_wake = time
        delay = max(time - now, 0)
        if now + delay < time:
            delay = nextafter(delay, inf)
        self._at(delay, lambda _: self._wake(time))

    def _wake(self, time: float) -> None:
        """End who is through; an event for a flow that has been slowed down since comes to nothing."""
        if time == self.next_wake:
            self.next_wake = inf
        ended = self.flows.over(self.run.env.now)
        self._settle_soon()
        for row in ended:
            self.run.finish(self.run.tasks + row)

    def _at(self, delay: float, call: Callable[[simpy.Event], None], priority: EventPriority = NORMAL) -> None:
        event = Wait(self.run.env)
        event.callbacks.append(call)
        event.begin(delay, priority)

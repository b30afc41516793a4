"""Messages that share the edges of a graph: fairly, or one after another. It knows no clock; an engine tells the time.

Both ways have the same face. A flow `join`s when its bytes begin to move, and `settle`s with all others once everything
that happens at that time has been told. One that meets nobody `is_alone`: it ends when its engine said that it would,
to the last bit, and `leave`s. The others end when `settle` and `over` say.
"""

from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from cdpsim.numeric.fair_shares import FairRates
from cdpsim.numeric.paths import compiled_loops
from cdpsim.timing.costs import Wires

COMPILED_FROM_MESSAGES = 5_000  # messages: below, importing numba takes longer than it saves
_WORN = 1e6  # a count of bytes that is so much larger than what is left of a flow begins anew


class Flows(Protocol):
    """What an engine asks for."""

    def join(self, flow: int, alone: float) -> None:
        """The bytes of a flow begin to move now; if it meets no other, the last one arrives at the time `alone`."""

    def leave(self, flow: int) -> None:
        """A flow that is alone has ended."""

    def is_alone(self, flow: int) -> bool:
        """Whether a flow is under way, and has been at its route's full bandwidth ever since it joined."""

    def settle(self, now: float) -> float:
        """Share edges among those who are there now; say when the next flow ends that is not alone."""

    def over(self, now: float) -> list[int]:
        """Give the flows that end by now, but for those that are alone; they have left."""


def flows_of(wires: Wires) -> Flows:
    """What a program's messages are on their wires."""
    return Fair(wires) if wires.contention == "fair" else Queue(wires)


class Fair:
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
        """Begin to move."""
        self.joined[flow] = self.alone[flow] = alone

    def is_alone(self, flow: int) -> bool:
        """Whether nobody has met it."""
        bundle = self.bundle[flow]
        return flow in self.joined or (self.single[bundle] and self.flows[bundle][:1] == [(self.size[flow], flow)])

    def leave(self, flow: int) -> None:
        """End alone."""
        del self.alone[flow]
        if flow in self.joined:
            del self.joined[flow]
            return
        bundle = self.bundle[flow]
        self.flows[bundle].clear()
        self.left[bundle] = None

    def settle(self, now: float) -> float:
        """Rate those anew for whom something has changed."""
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
        """End what is through; of several flows of a bundle those that have had as much."""
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
        """Put a flow into its bundle, which may be a new one."""
        bundle = self.bundle[flow]
        if self.flows[bundle]:
            self._serve(bundle, now)
        else:
            self.served[bundle], self.since[bundle], self.single[bundle] = 0.0, now, True
        heappush(self.flows[bundle], (self.served[bundle] + self.size[flow], flow))

    def _serve(self, bundle: int, now: float) -> None:
        """Count what has been served until now."""
        self.served[bundle] += self.rate[bundle] * (now - self.since[bundle])
        self.since[bundle] = now
        flows, served = self.flows[bundle], self.served[bundle]
        if served > _WORN * (flows[0][0] - served):
            flows[:] = [(through - served, flow) for through, flow in flows]
            self.served[bundle] = 0.0

    def _rate(self, changed: dict[int, None], now: float) -> None:
        """Let new rates hold from now on, and see when the bundles' first flows end."""
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


class Queue:
    """A flow has all edges of its route for itself, at the route's bandwidth; others who need one of them wait.

    First come, first served, on every edge: by the time at which their bytes were there to move, then by number. All
    take their places at all edges at once, so nobody can wait for one who waits for him.
    """

    def __init__(self, wires: Wires) -> None:
        self.route = wires.routes()
        bandwidth = wires.bandwidth.tolist()
        self.seconds = [
            size / min((bandwidth[edge] for edge in route), default=inf)
            for size, route in zip(wires.size.tolist(), self.route, strict=True)
        ]
        self.line: list[deque[int]] = [deque() for _ in bandwidth]  # who has an edge, then who waits for it
        self.lacks: dict[int, int] = {}  # edges that a flow waits for
        self.joined: dict[int, float] = {}
        self.alone: dict[int, float] = {}  # when those would end alone who have waited for nothing so far
        self.earliest: dict[int, float] = {}  # when the others would have
        self.turned: list[int] = []
        self.due: list[tuple[float, int]] = []

    def join(self, flow: int, alone: float) -> None:
        """Begin to move, or to wait."""
        self.joined[flow] = alone

    def is_alone(self, flow: int) -> bool:
        """Whether it has waited for nobody."""
        return flow in self.joined or flow in self.alone

    def leave(self, flow: int) -> None:
        """End without having waited."""
        if self.joined.pop(flow, None) is None:
            del self.alone[flow]
            self._pass_on(flow)

    def settle(self, now: float) -> float:
        """Give way to those whose turn it is; newcomers are last."""
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
        """End what is through."""
        ended = []
        while self.due and self.due[0][0] <= now:
            ended.append(heappop(self.due)[1])
            self._pass_on(ended[-1])
        return ended

    def _pass_on(self, flow: int) -> None:
        """Leave every edge to who comes next."""
        del self.lacks[flow]
        for edge in self.route[flow]:
            line = self.line[edge]
            line.popleft()
            if line:
                self.lacks[line[0]] -= 1
                if not self.lacks[line[0]]:
                    self.turned.append(line[0])

"""Max-min fair rates of flows on the links of a network, by progressive filling.

All rates grow alike until a link is full. The flows that cross it keep their rates, and the others grow on (Bertsekas
and Gallager, Data Networks, 2nd ed. 1992, section 6.5.2). Rates are max-min fair if and only if each flow has a
*bottleneck*: a full link that it crosses, on which no other flow is faster.

Flows of one route have one rate. So routes are rated, each with its number of flows.

When flows join or leave, most rates stay. So only a *region* is rated anew: some routes whose rates grow from zero on
what all other routes leave of the links. The region begins with the routes whose flows changed, and with those that had
a bottleneck on a link of theirs. Then it takes in each route outside that its new rates deprive of its bottleneck, or
that is faster than a route of the region on the bottleneck of that route, and is rated again, until there is no such
route. So every route has a bottleneck in the end.

`filling_arrays.py` does the same for large programs, bit for bit, in a form that numba compiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

SAME = 1e-12  # rates that differ by less, relatively, are equal


@dataclass(slots=True, eq=False)
class Link:
    """A link, and what is left of it while the rates of a region grow."""

    number: int
    capacity: float
    routes: dict["Route", None] = field(default_factory=dict)  # those with flows, the newest last
    growing: int = 0  # flows of the region whose rates still grow; 0 at rest
    room: float = field(init=False)  # capacity that they may take


@dataclass(slots=True, eq=False)
class Route:
    """Some links in a row, the number of flows that cross them, and the rate of each of these flows."""

    number: int
    links: list[Link]
    capacity: float  # of its narrowest link
    flows: int = 0
    rate: float = 0.0
    bottleneck: Link | None = None  # None: a link that it has for itself


Region = dict[Route, None]  # an ordered set
Rated = dict[Route, tuple[float, Link | None]]  # rates and bottlenecks
Outside = dict[Link, list[Route]]  # the routes on a link that are outside a region


class FairRates:
    """The fair rates of flows that join and leave.

    >>> rates = FairRates([(0, 1), (1,), (2,)], [10.0, 100.0, 50.0])
    >>> rates.share({0: 1, 1: 2, 2: 1})
    {0: 10.0, 1: 45.0, 2: 50.0}
    >>> rates.share({0: 0})
    {1: 50.0}
    """

    def __init__(self, routes: Sequence[Sequence[int]], capacity: Sequence[float]) -> None:
        """Begin with routes without flows: the numbers of their links, and the capacity of each link."""
        links = [Link(number, each) for number, each in enumerate(capacity)]
        self.routes = [
            Route(number, [links[link] for link in route], min((capacity[link] for link in route), default=inf))
            for number, route in enumerate(routes)
        ]

    def share(self, flows: Mapping[int, int]) -> dict[int, float]:
        """Let some routes have so many flows from now on; return the rates of all routes of the region."""
        region = self._changed(flows)
        rated: Rated = {}
        while len(rated) < len(region):
            outside = _restart(region)
            rated = _fill(region, outside)
            _extend(region, outside, rated)
        for route, (rate, bottleneck) in rated.items():
            route.bottleneck = bottleneck
            if abs(rate - route.rate) > SAME * rate:  # else it keeps its last bit, too
                route.rate = rate
        return {route.number: route.rate for route in region}

    def _changed(self, flows: Mapping[int, int]) -> Region:
        """Let routes have so many flows; return them, and those that had a bottleneck on their links."""
        changed = [self.routes[number] for number in flows]
        for route in changed:
            route.flows = flows[route.number]
            for link in route.links:
                if route.flows:
                    link.routes[route] = None
                else:
                    link.routes.pop(route, None)
            if not route.flows:
                route.rate = 0.0
        region = {route: None for route in changed if route.flows}
        for route in changed:
            for link in route.links:
                region |= {other: None for other in reversed(link.routes) if other.bottleneck is link}
        return region


def _restart(region: Region) -> Outside:
    """Let all rates of a region grow from zero; return its links that several routes cross."""
    outside: Outside = {}
    for route in region:
        for link in route.links:
            if len(link.routes) > 1:
                link.growing += route.flows
                outside[link] = []
    for link, others in outside.items():
        others += [route for route in reversed(link.routes) if route not in region]
        link.room = link.capacity
        for route in others:
            link.room -= route.rate * route.flows
    return outside


def _fill(region: Region, outside: Outside) -> Rated:
    """Raise the rates of a region together; each stops at its own bottleneck."""
    # Links by the rate at which each is full: those that a route has for itself (None), and shared ones.
    full: list[tuple[float, int, Link | None, Region]]
    full = [(route.capacity / route.flows, -k, None, {route: None}) for k, route in enumerate(region, 1)]
    full += [(link.room / link.growing, link.number, link, link.routes) for link in outside]
    heapify(full)
    rated: Rated = {}
    while len(rated) < len(region):
        rate, order, bottleneck, routes = heappop(full)
        if bottleneck:
            if not bottleneck.growing:
                continue
            later = bottleneck.room / bottleneck.growing
            if later > rate:  # since then, some of its flows have stopped at other links
                heappush(full, (later, order, bottleneck, routes))
                continue
        rate = max(rate, 0.0)  # below 0: routes outside take more than there is, and will be taken in
        stopped = [route for route in reversed(routes) if route in region and route not in rated]
        rated |= dict.fromkeys(stopped, (rate, bottleneck))
        for route in stopped:
            for link in route.links:
                if link in outside:
                    link.growing -= route.flows
                    link.room -= rate * route.flows
    return rated


def _extend(region: Region, outside: Outside, rated: Rated) -> None:
    """Take in routes that have lost their bottleneck, or are faster than a route of the region on its bottleneck."""
    bottlenecks = {bottleneck for _, bottleneck in rated.values()}
    for link, others in outside.items():
        if not others:
            continue
        top = max(rated[route][0] for route in link.routes if route in rated)
        is_full = link.room <= SAME * link.capacity
        for route in others:
            lost = route.bottleneck is link and not (is_full and top <= route.rate * (1 + SAME))
            if lost or (link in bottlenecks and route.rate > top * (1 + SAME)):
                region[route] = None

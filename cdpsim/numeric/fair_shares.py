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

The functions of `LOOPS` run as they stand, on lists, or compiled by numba (`compiled.py`), on arrays: to the same bits.
"""

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np

EQUAL_RATES = 1e-12  # rates that differ by less, relatively, are equal
Numbers = MutableSequence[int]  # a list, or an array for numba; likewise
Rates = MutableSequence[float]


class Network(NamedTuple):
    """Routes over links, the flows on them, and room to work in: columns by hop, by link, by route and by rank.

    A hop is a link of a route. Route r has the hops first[r]:first[r + 1]. Hops whose routes have flows are on the list
    of their link, the newest first: head[link], then next[hop] of each until -1. As previous[hop] is known, too, a hop
    joins and leaves at once.

    The region is a list of routes, which later ones are appended to; the place of a route on it is its rank.
    """

    # By hop.
    link: Numbers
    route: Numbers
    next: Numbers  # the hop after it on the link's list; -1: none
    previous: Numbers  # the hop before it; -1: none; -2: the hop is on no list
    # By link.
    head: Numbers  # the first hop on its list; -1: none
    capacity: Rates
    growing: Numbers  # flows of the region whose rates still grow; 0 between calls
    room: Rates  # capacity that they may take
    top: Rates  # the highest rate of the region's routes
    # By route.
    first: Numbers  # one row more than routes
    narrowest: Rates  # the capacity of its narrowest link
    flows: Numbers
    rate: Rates  # of each flow
    bottleneck: Numbers  # a link; -1: one that no other route shares
    inside: Numbers  # its rank plus 1; 0: it is outside the region
    # By rank; one row for each route.
    region: Numbers  # routes
    new_rate: Rates  # -1: it still grows
    new_bottleneck: Numbers
    # As many rows as links.
    shared: Numbers  # the links that the region shares, first the links that it shares with routes outside


def _network(routes: Sequence[Sequence[int]], capacity: Sequence[float]) -> dict[str, Any]:
    """Lay out routes without flows; return the arrays of a `Network` by their names."""
    length = [len(route) for route in routes]
    k, hops, links = len(routes), sum(length), len(capacity)
    zeros = dict.fromkeys(("flows", "bottleneck", "inside", "region", "new_bottleneck"), k)
    zeros |= {"next": hops, "growing": links, "shared": links}
    return {
        **{name: np.zeros(rows, np.int64) for name, rows in zeros.items()},
        **{name: np.zeros(links) for name in ("room", "top")},
        **{name: np.zeros(k) for name in ("rate", "new_rate")},
        "link": np.array([link for route in routes for link in route], np.int64),
        "route": np.repeat(np.arange(k), length),
        "previous": np.full(hops, -2),
        "head": np.full(links, -1),
        "capacity": np.array(capacity, np.float64),
        "first": np.append(0, np.cumsum(length)),
        "narrowest": np.array([min((capacity[link] for link in route), default=np.inf) for route in routes]),
    }


def share(c: Network, changed: Numbers, flows: Numbers) -> int:
    """Set the number of flows of some routes; return the size of the region, whose rates are in `new_rate`."""
    size = _change(c, changed, flows)
    rated = 0
    while rated < size:
        rated = size
        shared, mixed = _restart(c, size)
        _fill(c, size, shared)
        size = _extend(c, size, mixed)
    for rank in range(size):
        route, rate = c.region[rank], c.new_rate[rank]
        c.inside[route] = 0
        c.bottleneck[route] = c.new_bottleneck[rank]
        if abs(rate - c.rate[route]) > EQUAL_RATES * rate:  # else it keeps its last bit, too
            c.rate[route] = rate
        c.new_rate[rank] = c.rate[route]
    return size


def _change(c: Network, changed: Numbers, flows: Numbers) -> int:
    """Set the number of flows of routes; begin the region with them and the routes with a bottleneck on their links."""
    size = 0
    for row in range(len(changed)):
        route = changed[row]
        c.flows[route] = flows[row]
        for hop in range(c.first[route], c.first[route + 1]):
            if flows[row] > 0:
                _enlist(c, hop)
            else:
                _delist(c, hop)
        if flows[row] > 0:
            size = _take_in(c, size, route)
        else:
            c.rate[route] = 0.0
    for row in range(len(changed)):
        route = changed[row]
        for crossed in range(c.first[route], c.first[route + 1]):
            link = c.link[crossed]
            hop = c.head[link]
            while hop >= 0:
                other = c.route[hop]
                if c.bottleneck[other] == link and not c.inside[other]:
                    size = _take_in(c, size, other)
                hop = c.next[hop]
    return size


def _take_in(c: Network, size: int, route: int) -> int:
    """Append a route to the region; return how many they are now."""
    c.region[size] = route
    c.inside[route] = size + 1
    return size + 1


def _enlist(c: Network, hop: int) -> None:
    """Put a hop on the list of its link, if it is not there."""
    if c.previous[hop] != -2:
        return
    link = c.link[hop]
    after = c.head[link]
    c.head[link], c.previous[hop], c.next[hop] = hop, -1, after
    if after >= 0:
        c.previous[after] = hop


def _delist(c: Network, hop: int) -> None:
    """Take a hop off the list of its link, if it is there."""
    before, after = c.previous[hop], c.next[hop]
    if before == -2:
        return
    if before >= 0:
        c.next[before] = after
    else:
        c.head[c.link[hop]] = after
    if after >= 0:
        c.previous[after] = before
    c.previous[hop] = -2


def _restart(c: Network, size: int) -> tuple[int, int]:
    """Let all rates of the region grow from zero; count the links that it shares, and those shared with outside."""
    shared = 0
    for rank in range(size):
        route = c.region[rank]
        c.new_rate[rank] = -1.0
        for hop in range(c.first[route], c.first[route + 1]):
            link = c.link[hop]
            if c.next[c.head[link]] < 0:
                continue
            if not c.growing[link]:
                c.shared[shared] = link
                shared += 1
            c.growing[link] += c.flows[route]
    mixed = 0
    for k in range(shared):
        link = c.shared[k]
        room, is_mixed = c.capacity[link], False
        hop = c.head[link]
        while hop >= 0:
            other = c.route[hop]
            if not c.inside[other]:
                is_mixed = True
                room -= c.rate[other] * c.flows[other]
            hop = c.next[hop]
        c.room[link] = room
        if is_mixed:
            c.shared[k], c.shared[mixed] = c.shared[mixed], link
            mixed += 1
    return shared, mixed


def _fill(c: Network, size: int, shared: int) -> None:
    """Raise the rates of the region together; each stops at its own bottleneck."""
    # The rates at which links are full: links of one route (below 0: its rank), and shared ones.
    full = [(c.narrowest[c.region[rank]] / c.flows[c.region[rank]], -1 - rank) for rank in range(size)]
    for k in range(shared):
        link = c.shared[k]
        full.append((c.room[link] / c.growing[link], link))
    heapify(full)
    left = size
    while left:
        level, link = heappop(full)
        if link < 0:
            left -= _stop(c, -1 - link, level, -1)
        elif c.growing[link]:
            later = c.room[link] / c.growing[link]
            if later > level:  # since then, some of its flows have stopped at other links
                heappush(full, (later, link))
                continue
            hop = c.head[link]
            while hop >= 0:
                rank = c.inside[c.route[hop]] - 1
                if rank >= 0:
                    left -= _stop(c, rank, level, link)
                hop = c.next[hop]


def _stop(c: Network, rank: int, level: float, bottleneck: int) -> int:
    """Let the rate of a route grow no more, if it still does; return how many that are: 1 or 0."""
    if c.new_rate[rank] >= 0:
        return 0
    level = max(level, 0.0)  # below 0: routes outside take more than there is, and will be taken in
    c.new_rate[rank], c.new_bottleneck[rank] = level, bottleneck
    route = c.region[rank]
    for hop in range(c.first[route], c.first[route + 1]):
        link = c.link[hop]
        if c.next[c.head[link]] >= 0:
            c.growing[link] -= c.flows[route]
            c.room[link] -= level * c.flows[route]
            c.top[link] = level
    return 1


def _extend(c: Network, size: int, mixed: int) -> int:
    """Take in routes that have lost their bottleneck, or are faster than a route of the region on its bottleneck."""
    rated = size
    for k in range(mixed):
        link = c.shared[k]
        is_bottleneck = False
        hop = c.head[link]
        while hop >= 0 and not is_bottleneck:
            rank = c.inside[c.route[hop]] - 1
            is_bottleneck = 0 <= rank < rated and c.new_bottleneck[rank] == link
            hop = c.next[hop]
        top = c.top[link]
        is_full = c.room[link] <= EQUAL_RATES * c.capacity[link]
        hop = c.head[link]
        while hop >= 0:
            route = c.route[hop]
            hop = c.next[hop]
            if c.inside[route]:
                continue
            lost = c.bottleneck[route] == link and not (is_full and top <= c.rate[route] * (1 + EQUAL_RATES))
            if lost or (is_bottleneck and c.rate[route] > top * (1 + EQUAL_RATES)):
                size = _take_in(c, size, route)
    return size


LOOPS: tuple[Callable[..., Any], ...] = (_change, _take_in, _enlist, _delist, _restart, _fill, _stop, _extend)


class FairRates:
    """The fair rates of flows that join and leave.

    >>> rates = FairRates([(0, 1), (1,), (2,)], [10.0, 100.0, 50.0])
    >>> rates.share({0: 1, 1: 2, 2: 1})
    {0: 10.0, 1: 45.0, 2: 50.0}
    >>> rates.share({0: 0})
    {1: 50.0}
    """

    def __init__(
        self, routes: Sequence[Sequence[int]], capacity: Sequence[float], compiled: Callable[..., int] | None = None
    ) -> None:
        """Begin with routes without flows: the numbers of their links, and the capacity of each link.

        `compiled` is the compiled form of `share`, if it is there.
        """
        arrays = _network(routes, capacity)
        self._network = Network(**(arrays if compiled else {name: column.tolist() for name, column in arrays.items()}))
        self._compiled = compiled

    def share(self, flows: Mapping[int, int]) -> dict[int, float]:
        """Set the number of flows of some routes; return the rates of all routes of the region."""
        c = self._network
        if not self._compiled:
            size = share(c, list(flows), list(flows.values()))
            return dict(zip(c.region[:size], c.new_rate[:size], strict=True))
        size = self._compiled(c, np.array(list(flows), np.int64), np.array(list(flows.values()), np.int64))
        return dict(zip(c.region[:size].tolist(), c.new_rate[:size].tolist(), strict=True))  # type: ignore[attr-defined]

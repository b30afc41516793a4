"""Max-min fair rates, as in `filling.py`, in loops over arrays that numba compiles (`compiled.py`).

Both give the same bits, so both go through routes and links in the same order. They share no code. Read that one first.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from cdpsim.numeric.columns import Floats, Ints

SAME = 1e-12  # as there; numba would not see it change in another file


class Columns(NamedTuple):
    """The memory: columns by route, by link, by hop, and by rank.

    A hop is a link of a route. Route r has the hops first[r]:first[r + 1]. Hops whose routes have flows are on the list
    of their link, the newest first: head[link], then next[hop] of each until -1. As previous[hop] is known, too, a hop
    joins and leaves at once.

    The region is a list of routes, which later ones are appended to; the place of a route on it is its rank.
    """

    # By hop.
    link: Ints
    route: Ints
    next: Ints  # the hop after it on the link's list; -1: none
    previous: Ints  # the hop before it; -1: none; -2: the hop is on no list
    # By link.
    head: Ints  # the first hop on its list; -1: none
    capacity: Floats
    growing: Ints  # flows of the region whose rates still grow; 0 at rest
    room: Floats  # capacity that they may take
    top: Floats  # the highest rate of the region's routes
    # By route.
    first: Ints  # one row more than routes
    narrowest: Floats  # the capacity of its narrowest link
    flows: Ints
    rate: Floats  # of each flow
    bottleneck: Ints  # a link; -1: one that no other route shares
    inside: Ints  # its rank plus 1; 0: it is outside the region
    # By rank; as many rows as routes.
    region: Ints  # routes
    new_rate: Floats  # -1: it still grows
    new_bottleneck: Ints
    # As many rows as links.
    shared: Ints  # the links that the region shares, first those that it shares with routes outside


def columns(routes: Sequence[Sequence[int]], capacity: Sequence[float]) -> Columns:
    """Begin with routes without flows."""
    length = [len(route) for route in routes]
    k, hops, links = len(routes), sum(length), len(capacity)
    return Columns(
        link=np.array([link for route in routes for link in route], np.int64),
        route=np.repeat(np.arange(k), length),
        next=np.zeros(hops, np.int64),
        previous=np.full(hops, -2),
        head=np.full(links, -1),
        capacity=np.array(capacity, np.float64),
        growing=np.zeros(links, np.int64),
        room=np.zeros(links),
        top=np.zeros(links),
        first=np.append(0, np.cumsum(length)),
        narrowest=np.array([min((capacity[link] for link in route), default=np.inf) for route in routes]),
        flows=np.zeros(k, np.int64),
        rate=np.zeros(k),
        bottleneck=np.zeros(k, np.int64),
        inside=np.zeros(k, np.int64),
        region=np.zeros(k, np.int64),
        new_rate=np.zeros(k),
        new_bottleneck=np.zeros(k, np.int64),
        shared=np.zeros(links, np.int64),
    )


def share(c: Columns, changed: Ints, flows: Ints) -> int:
    """Let some routes have so many flows from now on; return the size of the region, whose rates are in `new_rate`."""
    size = change(c, changed, flows)
    rated = 0
    while rated < size:
        rated = size
        shared, mixed = restart(c, size)
        fill(c, size, shared)
        size = extend(c, size, mixed)
    for rank in range(size):
        route, rate = c.region[rank], c.new_rate[rank]
        c.inside[route] = 0
        c.bottleneck[route] = c.new_bottleneck[rank]
        if abs(rate - c.rate[route]) > SAME * rate:
            c.rate[route] = rate
        c.new_rate[rank] = c.rate[route]
    return size


def change(c: Columns, changed: Ints, flows: Ints) -> int:
    """Let routes have so many flows; begin the region with them, and those that had a bottleneck on their links."""
    size = 0
    for row in range(len(changed)):
        route = changed[row]
        c.flows[route] = flows[row]
        for hop in range(c.first[route], c.first[route + 1]):
            if flows[row] > 0:
                enlist(c, hop)
            else:
                delist(c, hop)
        if flows[row] > 0:
            size = take_in(c, size, route)
        else:
            c.rate[route] = 0.0
    for row in range(len(changed)):
        route = changed[row]
        for own in range(c.first[route], c.first[route + 1]):
            link = c.link[own]
            hop = c.head[link]
            while hop >= 0:
                other = c.route[hop]
                if c.bottleneck[other] == link and not c.inside[other]:
                    size = take_in(c, size, other)
                hop = c.next[hop]
    return size


def take_in(c: Columns, size: int, route: int) -> int:
    """Append a route to the region; return how many they are now."""
    c.region[size] = route
    c.inside[route] = size + 1
    return size + 1


def enlist(c: Columns, hop: int) -> None:
    """Put a hop on the list of its link, if it is not there."""
    if c.previous[hop] != -2:
        return
    link = c.link[hop]
    after = c.head[link]
    c.head[link], c.previous[hop], c.next[hop] = hop, -1, after
    if after >= 0:
        c.previous[after] = hop


def delist(c: Columns, hop: int) -> None:
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


def restart(c: Columns, size: int) -> tuple[int, int]:
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


def fill(c: Columns, size: int, shared: int) -> None:
    """Raise the rates of the region together; each stops at its own bottleneck."""
    full = [(c.narrowest[c.region[rank]] / c.flows[c.region[rank]], -1 - rank) for rank in range(size)]
    for k in range(shared):
        link = c.shared[k]
        full.append((c.room[link] / c.growing[link], link))
    heapify(full)
    left = size
    while left:
        level, link = heappop(full)
        if link < 0:
            left -= stop(c, -1 - link, level, -1)
        elif c.growing[link]:
            later = c.room[link] / c.growing[link]
            if later > level:
                heappush(full, (later, link))
                continue
            hop = c.head[link]
            while hop >= 0:
                rank = c.inside[c.route[hop]] - 1
                if rank >= 0:
                    left -= stop(c, rank, level, link)
                hop = c.next[hop]


def stop(c: Columns, rank: int, level: float, bottleneck: int) -> int:
    """Let the rate of a route grow no more, if it still does; return how many that are: 1 or 0."""
    if c.new_rate[rank] >= 0:
        return 0
    level = max(level, 0.0)
    c.new_rate[rank], c.new_bottleneck[rank] = level, bottleneck
    route = c.region[rank]
    for hop in range(c.first[route], c.first[route + 1]):
        link = c.link[hop]
        if c.next[c.head[link]] >= 0:
            c.growing[link] -= c.flows[route]
            c.room[link] -= level * c.flows[route]
            c.top[link] = level
    return 1


def extend(c: Columns, size: int, mixed: int) -> int:
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
        is_full = c.room[link] <= SAME * c.capacity[link]
        hop = c.head[link]
        while hop >= 0:
            route = c.route[hop]
            hop = c.next[hop]
            if c.inside[route]:
                continue
            lost = c.bottleneck[route] == link and not (is_full and top <= c.rate[route] * (1 + SAME))
            if lost or (is_bottleneck and c.rate[route] > top * (1 + SAME)):
                size = take_in(c, size, route)
    return size


PARTS: tuple[Callable[..., Any], ...] = (change, take_in, enlist, delist, restart, fill, stop, extend)


class FairRates:
    """The rates of `filling.FairRates`, from columns; `share` is the function above, or its compiled form."""

    def __init__(
        self, routes: Sequence[Sequence[int]], capacity: Sequence[float], share: Callable[..., int] = share
    ) -> None:
        self.columns = columns(routes, capacity)
        self.loop = share

    def share(self, flows: Mapping[int, int]) -> dict[int, float]:
        """Let some routes have so many flows from now on; return the rates of all routes of the region."""
        c = self.columns
        size = self.loop(c, np.array(list(flows), np.int64), np.array(list(flows.values()), np.int64))
        return dict(zip(c.region[:size].tolist(), c.new_rate[:size].tolist(), strict=True))

"""Progressive filling: how fast flows are that share the edges of a graph max-min fairly.

No flow can have more but from one that has no more than it. All rates grow alike until an edge is full; its flows keep
theirs, and the others go on (Bertsekas and Gallager, Data Networks, 2nd ed. 1992, section 6.5.2). Rates are fair if and
only if each flow crosses a full edge, its bottleneck, on which no other has more. So after a change only a *region* is
rated anew: who has changed and who had a bottleneck in common with them; then those who have too much beside them, or
whose bottleneck they have changed; and so on, until nobody has.

Flows of one route have one rate: they are a *bundle*. What follows works on lists and on arrays alike. numba compiles
these very functions for large programs (`compiled.py`), and both give the same bits.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

SAME = 1e-12  # rates that differ by less, relatively, are one


class Bundles(NamedTuple):
    """Who crosses which edges, how fast; and room to work in.

    Bundle b crosses edges[first[b]:first[b + 1]]. Each of these places knows its bundle, and the places before and
    after it on its edge, of which the edge knows the first; -1 where there is none, -2 before one that nobody takes.
    """

    first: Any
    edges: Any
    owner: Any
    before: Any
    following: Any
    head: Any
    limit: Any  # of each edge, its bandwidth
    most: Any  # the rate of a flow that is alone
    flows: Any  # of each bundle
    rate: Any  # of each of its flows
    neck: Any  # its bottleneck; -1: an edge that it has for itself
    region: Any  # numbers of bundles ...
    inside: Any  # ... the place in there of each bundle, from 1 on; 0: it is none of them
    new: Any  # by place: the rate ...
    held: Any  # ... and the bottleneck
    touched: Any  # edges that the region shares with others ...
    count: Any  # ... by edge: the region's flows on it that are not rated yet, 0 at rest
    room: Any  # ... what is left for them
    top: Any  # ... the highest rate of those that are


def bundles(paths: Sequence[Sequence[int]], limit: Sequence[float], most: Sequence[float], arrays: bool) -> Bundles:
    """Begin with no flows at all."""
    first, edges = [0, *accumulate(map(len, paths))], [edge for path in paths for edge in path]
    owner = [bundle for bundle, path in enumerate(paths) for _ in path]
    k, places, points = len(paths), len(edges), len(limit)
    columns: list[list[int] | list[float]] = [
        *(first, edges, owner, [-2] * places, [-1] * places, [-1] * points, list(limit), list(most)),
        *([0] * k, [0.0] * k, [-1] * k, [0] * k, [0] * k, [0.0] * k, [-1] * k),
        *([0] * points, [0] * points, [0.0] * points, [0.0] * points),
    ]
    if not arrays:
        return Bundles(*columns)
    real = {Bundles._fields.index(name) for name in ("limit", "most", "rate", "new", "room", "top")}
    return Bundles(*(np.array(column, float if k in real else np.int64) for k, column in enumerate(columns)))


def share(own: Bundles, changed: Any, flows: Any) -> int:
    """Give some bundles other numbers of flows; say how many have been rated anew: the first of `region`, by `new`."""
    size = begin(own, changed, flows)
    known = 0
    while known < size:
        known = size
        reached, mixed = reach(own, size)
        fill(own, size, reached)
        size = spread(own, size, mixed)
    for at in range(size):
        bundle, new = own.region[at], own.new[at]
        own.inside[bundle] = 0
        own.neck[bundle] = own.held[at]
        if abs(new - own.rate[bundle]) > SAME * new:
            own.rate[bundle] = new
        own.new[at] = own.rate[bundle]
    return size


def begin(own: Bundles, changed: Any, flows: Any) -> int:
    """Link who comes and unlink who goes; the region is who has changed, and who had a bottleneck there."""
    size = 0
    for row in range(len(changed)):
        bundle = changed[row]
        own.flows[bundle] = flows[row]
        for place in range(own.first[bundle], own.first[bundle + 1]):
            link(own, place, flows[row] > 0)
        if flows[row] > 0:
            own.region[size] = bundle
            size += 1
            own.inside[bundle] = size
        else:
            own.rate[bundle] = 0.0
    for row in range(len(changed)):
        bundle = changed[row]
        for k in range(own.first[bundle], own.first[bundle + 1]):
            edge = own.edges[k]
            place = own.head[edge]
            while place >= 0:
                other = own.owner[place]
                if own.neck[other] == edge and not own.inside[other]:
                    own.region[size] = other
                    size += 1
                    own.inside[other] = size
                place = own.following[place]
    return size


def link(own: Bundles, place: int, there: bool) -> None:
    """Put a place on its edge, or take it away, if it is not so already."""
    edge = own.edges[place]
    if there and own.before[place] == -2:
        after = own.head[edge]
        own.head[edge], own.before[place], own.following[place] = place, -1, after
        if after >= 0:
            own.before[after] = place
    elif not there and own.before[place] != -2:
        earlier, after = own.before[place], own.following[place]
        if earlier >= 0:
            own.following[earlier] = after
        else:
            own.head[edge] = after
        if after >= 0:
            own.before[after] = earlier
        own.before[place] = -2


def reach(own: Bundles, size: int) -> tuple[int, int]:
    """Find the edges that the region shares with anybody, and what is left there by others.

    Says how many they are, and how many of them, the first ones, are shared with bundles outside the region.
    """
    first, edges, head, following, owner = own.first, own.edges, own.head, own.following, own.owner
    count, touched, inside = own.count, own.touched, own.inside
    reached = 0
    for at in range(size):
        bundle = own.region[at]
        own.new[at] = -1.0
        for k in range(first[bundle], first[bundle + 1]):
            edge = edges[k]
            if following[head[edge]] < 0:
                continue
            if not count[edge]:
                touched[reached] = edge
                reached += 1
            count[edge] += own.flows[bundle]
    mixed = 0
    for k in range(reached):
        edge = touched[k]
        room, others = own.limit[edge], False
        place = head[edge]
        while place >= 0:
            other = owner[place]
            if not inside[other]:
                others = True
                room -= own.rate[other] * own.flows[other]
            place = following[place]
        own.room[edge] = room
        if others:
            touched[k], touched[mixed] = touched[mixed], edge
            mixed += 1
    return reached, mixed


def fill(own: Bundles, size: int, reached: int) -> None:
    """Rate the region's bundles: who is held up first, by an edge of its own or by a shared one, is so at that rate."""
    shares = [(own.most[own.region[at]] / own.flows[own.region[at]], -1 - at) for at in range(size)]
    for k in range(reached):
        edge = own.touched[k]
        shares.append((own.room[edge] / own.count[edge], edge))
    heapify(shares)
    left = size
    while left:
        level, edge = heappop(shares)
        if edge < 0:
            left -= hold(own, -1 - edge, level, -1)
        elif own.count[edge]:
            rest = own.room[edge] / own.count[edge]
            if rest > level:  # others on it have been held up since then, and have taken less
                heappush(shares, (rest, edge))
                continue
            place = own.head[edge]
            while place >= 0:
                at = own.inside[own.owner[place]] - 1
                if at >= 0:
                    left -= hold(own, at, level, edge)
                place = own.following[place]


def hold(own: Bundles, at: int, level: float, neck: int) -> int:
    """Let a bundle have that rate, unless it has one; say how many that are."""
    if own.new[at] >= 0:
        return 0
    level = max(level, 0.0)  # less: others, who will be rated as well, have left nothing
    own.new[at], own.held[at] = level, neck
    bundle = own.region[at]
    edges, head, following, count, room, top = own.edges, own.head, own.following, own.count, own.room, own.top
    flows = own.flows[bundle]
    for k in range(own.first[bundle], own.first[bundle + 1]):
        edge = edges[k]
        if following[head[edge]] >= 0:
            count[edge] -= flows
            room[edge] -= level * flows
            top[edge] = level
    return 1


def spread(own: Bundles, size: int, mixed: int) -> int:
    """Add who has more than somebody held up beside him, or has lost his bottleneck; say how many all are."""
    head, following, owner, inside, rate = own.head, own.following, own.owner, own.inside, own.rate
    known = size
    for k in range(mixed):
        edge = own.touched[k]
        holds = False
        place = head[edge]
        while place >= 0 and not holds:
            at = inside[owner[place]] - 1
            holds = 0 <= at < known and own.held[at] == edge
            place = following[place]
        top = own.top[edge]
        full = own.room[edge] <= SAME * own.limit[edge]
        place = head[edge]
        while place >= 0:
            other = owner[place]
            place = following[place]
            if inside[other]:
                continue
            lost = own.neck[other] == edge and not (full and top <= rate[other] * (1 + SAME))
            if lost or (holds and rate[other] > top * (1 + SAME)):
                own.region[size] = other
                size += 1
                inside[other] = size
    return size

"""Traffic alone: programs of messages, each sent at a time of its own."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from cdpsim.cluster import Cluster
from cdpsim.program import Buffers, Content, EdgeKind, Edges, Kind, Messages, Op, Program, Tasks
from cdpsim.timing.costs import Costs, lay_out
from cdpsim.timing.engine import find_engine


class Sent(NamedTuple):
    """A message of that many bytes from one device to another, ready to go at a time."""

    time: float
    src: int
    dst: int
    size: int


def program_of(traffic: Sequence[Sent]) -> Program:
    """Return a program with a task for each message, on a lane of its own: the message is ready when it has ended."""
    k = len(traffic)
    none, number = np.zeros(0, dtype=np.int32), np.arange(k, dtype=np.int32)
    zero, src, dst = np.zeros(k, dtype=np.int32), *(np.array(end, dtype=np.int32) for end in _ends(traffic))
    tasks = Tasks(np.full(k, Kind.F), stage=zero, micro_batch=number, step=zero, device=src, lane=number, version=zero)
    size = np.array([message.size for message in traffic], dtype=np.int64)
    op, content = np.full(k, Op.P2P), np.full(k, Content.ACTIVATION)
    return Program(
        n=1,
        counts=np.array([k], dtype=np.int32),
        phases=1,
        devices=int(max(src.max(), dst.max())) + 1,
        tasks=tasks,
        messages=Messages(op, content, zero, number, zero, src, dst, size, zero, zero + 1, zero - 1),
        groups=(),
        edges=Edges(number, k + number, np.full(k, EdgeKind.DATA)),
        buffers=Buffers(*([none] * 9)),
        lane_tasks=number,
        lane_start=np.arange(k + 1),
        releases=(),
        base=none,
        first_step=none,
    )


def _ends(traffic: Sequence[Sent]) -> tuple[list[int], list[int]]:
    return [message.src for message in traffic], [message.dst for message in traffic]


def costs_of(traffic: Sequence[Sent], cluster: Cluster, contention: str) -> Costs:
    """Return the costs of `program_of`: of a task the time until its message is sent, of a message its time alone."""
    program = program_of(traffic)
    cluster = cluster.sized(program.devices)
    latency, bandwidth = cluster.link_costs(program.messages.src, program.messages.dst)
    duration = np.concatenate([[message.time for message in traffic], latency + program.messages.size / bandwidth])
    wires = None if contention == "none" else lay_out(program, cluster, contention)
    return Costs(duration, np.ones(len(traffic), dtype=np.int32), np.zeros(0), wires=wires)


def arrivals(traffic: Sequence[Sent], cluster: Cluster, contention: str = "fair") -> np.ndarray:
    """Return when each message arrives."""
    _, end = find_engine("simpy", contention)(program_of(traffic), costs_of(traffic, cluster, contention))
    return end[len(traffic) :]


def as_json(traffic: Sequence[Sent], cluster: Cluster) -> dict[str, object]:
    """Return the input of `simgrid_arrivals.py`: bandwidths of edges, routes and latencies of messages."""
    cluster = cluster.sized(max(max(ends) for ends in _ends(traffic)) + 1)
    used: dict[tuple[int, int], float] = {}
    messages = []
    for message in traffic:
        edges, latency = _route(message, cluster)
        used |= {ends: limit for ends, limit in edges.items() if np.isfinite(limit)}
        numbers = [list(used).index(ends) for ends in edges if ends in used]
        messages.append(message._asdict() | {"route": numbers, "latency": latency})
    return {"bandwidth": list(used.values()), "messages": messages}


def _route(message: Sent, cluster: Cluster) -> tuple[dict[tuple[int, int], float], float]:
    """Return the edges of a message with their bandwidths, and its latency; without a topology, pairs have edges."""
    if not cluster.is_joined:
        latency, bandwidth = cluster.link_costs(np.array([message.src]), np.array([message.dst]))
        return {(message.src, message.dst): float(bandwidth[0])}, float(latency[0])
    graph, route = cluster.graph, list(cluster.route(message.src, message.dst))
    ends = zip(graph.tail[route].tolist(), graph.head[route].tolist(), strict=True)
    return dict(zip(ends, graph.bandwidth[route].tolist(), strict=True)), float(graph.latency[route].sum())


def filled(traffic: Sequence[Sent], cluster: Cluster) -> list[float]:
    """Return when each message arrives by the textbook, exactly and slowly: rates grow alike until an edge is full."""
    pattern = as_json(traffic, cluster)
    bandwidth = [Fraction(limit) for limit in pattern["bandwidth"]]  # type: ignore[attr-defined]
    messages: list[dict[str, Any]] = pattern["messages"]  # type: ignore[assignment]
    begins = [Fraction(message["time"]) + Fraction(message["latency"]) for message in messages]
    routes = [message["route"] for message in messages]
    left = [Fraction(message["size"]) for message in messages]
    arrived: dict[int, Fraction] = {k: begins[k] for k in range(len(messages)) if not routes[k] or not left[k]}
    now = Fraction(0)
    while len(arrived) < len(messages):
        moving = [k for k in range(len(messages)) if k not in arrived and begins[k] <= now]
        rate = _rates([routes[k] for k in moving], bandwidth)
        ends = [now + left[k] / rate[at] for at, k in enumerate(moving)]
        following = min([time for time in begins if time > now] + ends)
        for at, k in enumerate(moving):
            left[k] -= rate[at] * (following - now)
            if not left[k]:
                arrived[k] = following
        now = following
    return [float(arrived[k]) for k in range(len(messages))]


def _rates(routes: list[list[int]], bandwidth: list[Fraction]) -> list[Fraction]:
    """Raise all rates together, and return them; a message that crosses a full edge keeps its rate."""
    rate, growing = [Fraction(0)] * len(routes), set(range(len(routes)))
    while growing:
        free = {edge: bandwidth[edge] for route in routes for edge in route}
        for k, route in enumerate(routes):
            for edge in route:
                free[edge] -= rate[k]
        crowd = {edge: sum(edge in routes[k] for k in growing) for edge in free}
        step = min(free[edge] / crowd[edge] for edge in free if crowd[edge])
        full = {edge for edge in free if crowd[edge] and free[edge] == step * crowd[edge]}
        for k in growing:
            rate[k] += step
        growing = {k for k in growing if full.isdisjoint(routes[k])}
    return rate

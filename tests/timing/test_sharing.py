"""Sharing of links: against SimGrid, against progressive filling in fractions, by hand, and by what must be true."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim.cluster import Cable, Cluster, Devices, Edge, Link
from cdpsim.timing.engine.discrete import FairFlows, QueuedFlows, flows_on
from tests.conditions import need
from tests.helpers.simgrid_answers import COMMITTED, answer, digest, with_simgrid
from tests.helpers.traffic import Sent, arrivals, as_json, costs_of, filled
from tests.helpers.traffic_patterns import CLUSTERS, joined, many, patterns

PATTERNS = patterns()
SAVED: dict[str, Any] = json.loads(COMMITTED.read_text())
SWITCH = joined("switch", 4, link=Cable(bandwidth=100.0))


def hold(number: int, theirs: list[float]) -> None:
    """Every message of a pattern takes what it takes there; 1 % was asked for, and this is a hundredth of that."""
    _, cluster, traffic = PATTERNS[number]
    sent = np.array([message.time for message in traffic])
    assert np.allclose(arrivals(traffic, cluster) - sent, np.array(theirs) - sent, rtol=1e-4, atol=0)


@pytest.mark.every_case
@pytest.mark.parametrize("number", range(len(PATTERNS)), ids=[name for name, _, _ in PATTERNS])
def test_messages_take_what_they_take_in_simgrid(number: int) -> None:
    """As committed, with the version that said so."""
    hold(number, SAVED["arrivals"][number])


def test_the_committed_answers_are_those_to_these_patterns() -> None:
    """At least fifty were asked for; they differ, and in most of them messages do slow each other down."""
    assert len(PATTERNS) == len(SAVED["arrivals"]) >= 50
    assert SAVED["patterns"] == digest()
    slowed = [(arrivals(t, c) > arrivals(t, c, "none") * (1 + 1e-6)).any() for _, c, t in PATTERNS]
    assert sum(slowed) >= 50


def test_simgrid_still_says_so() -> None:
    """Live, where it is installed (Debian: python3-simgrid)."""
    python = with_simgrid()
    need(python, "python3-simgrid")
    for number, theirs in enumerate(answer(str(python))["arrivals"]):
        hold(number, theirs)


@st.composite
def traffics(draw: st.DrawFn, most: int = 12) -> tuple[Cluster, list[Sent]]:
    """A cluster, and messages that may begin together, be empty, and be of any size."""
    name = draw(st.sampled_from(sorted(CLUSTERS)))
    devices = st.integers(0, many(name) - 1)
    pair = st.tuples(devices, devices).filter(lambda ends: ends[0] != ends[1])
    times = st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0, 2)
    sizes = st.sampled_from([0, 10**6, 10**8]) | st.integers(1, 10**9)
    sent = st.builds(lambda time, ends, size: Sent(time, ends[0], ends[1], size), times, pair, sizes)
    return CLUSTERS[name], draw(st.lists(sent, min_size=1, max_size=most))


@given(traffics())
@settings(max_examples=300, deadline=None)
def test_fair_shares_are_those_of_progressive_filling(drawn: tuple[Cluster, list[Sent]]) -> None:
    """In fractions, from the definition."""
    cluster, traffic = drawn
    assert np.allclose(arrivals(traffic, cluster), filled(traffic, cluster), rtol=1e-9, atol=0)


def queued(traffic: list[Sent], cluster: Cluster) -> list[float]:
    """First come, first served, message after message: each begins when all before it have left its edges."""
    pattern: dict[str, Any] = as_json(traffic, cluster)
    messages, bandwidth = pattern["messages"], pattern["bandwidth"]
    free = [0.0] * len(bandwidth)
    arrived = [0.0] * len(messages)
    for k in sorted(range(len(messages)), key=lambda k: (messages[k]["time"] + messages[k]["latency"], k)):
        message, route = messages[k], messages[k]["route"]
        begin = message["time"] + message["latency"]
        arrived[k] = begin
        if route and message["size"]:
            begin = max(begin, *(free[edge] for edge in route))
            arrived[k] = begin + message["size"] / min(bandwidth[edge] for edge in route)
            for edge in route:
                free[edge] = arrived[k]
    return arrived


@given(traffics(30))
@settings(max_examples=300, deadline=None)
def test_a_queue_serves_who_comes_first(drawn: tuple[Cluster, list[Sent]]) -> None:
    """On every edge of the route at once."""
    cluster, traffic = drawn
    assert np.allclose(arrivals(traffic, cluster, "queue"), queued(traffic, cluster), rtol=1e-9, atol=0)


def test_shares_by_hand() -> None:
    """Three messages of 100 B/s each way: the first two leave half to the third, then everything."""
    traffic = [Sent(0.0, 0, 1, 100), Sent(0.0, 2, 1, 100), Sent(0.0, 0, 3, 300)]
    assert arrivals(traffic, SWITCH).tolist() == [2.0, 2.0, 4.0]
    assert arrivals(traffic, SWITCH, "queue").tolist() == [1.0, 2.0, 4.0]
    assert arrivals(traffic, SWITCH, "none").tolist() == [1.0, 1.0, 3.0]


def test_what_is_fair_is_not_an_equal_share() -> None:
    """A flow that is slowed elsewhere leaves the rest of its share to the others: 10, then 90 of 100, not 50 and 50."""
    edges = [Edge(between=(0, "a"), bandwidth=10.0), Edge(between=(1, "a"), bandwidth=1000.0)]
    edges += [Edge(between=("a", "b"), bandwidth=100.0), Edge(between=("b", 2), bandwidth=1000.0)]
    cluster = Cluster(devices=(Devices(count=3),), edges=tuple(edges))
    traffic = [Sent(0.0, 0, 2, 100), Sent(0.0, 1, 2, 900)]
    assert arrivals(traffic, cluster).tolist() == [10.0, 10.0]


def test_a_queue_holds_all_edges_of_a_route() -> None:
    """Of 0 to 1, 2 to 1 and 2 to 3 the last waits for the second, which waits for the first; another one passes."""
    traffic = [Sent(0.0, 0, 1, 100), Sent(0.0, 2, 1, 100), Sent(0.0, 2, 3, 100), Sent(0.0, 1, 0, 100)]
    assert arrivals(traffic, SWITCH, "queue").tolist() == [1.0, 2.0, 3.0, 1.0]


def test_latency_is_waited_out_before_bytes_flow() -> None:
    """It holds nothing up: the second message has the link for itself until the first one's bytes come."""
    cluster = Cluster(devices=(Devices(count=2),), link=Link(latency=1.0, bandwidth=100.0))
    traffic = [Sent(1.0, 0, 1, 100), Sent(0.5, 0, 1, 100)]
    assert arrivals(traffic, cluster).tolist() == [3.5, 3.0]  # 50 bytes alone, 50 at half the rate, then 50 alone
    assert arrivals(traffic, cluster, "queue").tolist() == [3.5, 2.5]
    both_ways = [Sent(0.0, 0, 1, 100), Sent(0.0, 1, 0, 100)]
    assert arrivals(both_ways, cluster).tolist() == [2.0, 2.0]


@given(traffics(), st.sampled_from(["fair", "queue"]))
def test_nobody_is_faster_than_alone(drawn: tuple[Cluster, list[Sent]], contention: str) -> None:
    """A flow that meets no other has the same time to the last bit."""
    cluster, traffic = drawn
    alone = arrivals(traffic, cluster, "none")
    assert (arrivals(traffic, cluster, contention) >= alone).all()
    far = [message._replace(time=message.time + 1000.0 * k) for k, message in enumerate(traffic)]
    assert np.array_equal(arrivals(far, cluster, contention), arrivals(far, cluster, "none"))


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-3, 10.0)), min_size=2, max_size=20))
def test_one_after_another_is_as_alone(steps: list[tuple[int, float]]) -> None:
    """Each message is sent the moment that the one before has arrived, over the same link."""
    cluster = Cluster(devices=(Devices(count=2),), link=Link(latency=0.1, bandwidth=1e4))
    traffic: list[Sent] = []
    time = 0.0
    for size, _ in steps:
        traffic.append(Sent(time, 0, 1, size))
        time = float(arrivals(traffic, cluster, "none")[-1])
    for contention in ("fair", "queue"):
        assert np.array_equal(arrivals(traffic, cluster, contention), arrivals(traffic, cluster, "none"))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 10**6)), min_size=1, max_size=12))
def test_half_the_bandwidth_takes_twice_as_long(drawn: list[tuple[int, int, int]]) -> None:
    """Without latency, sent together: every time doubles, to the last bit."""
    traffic = [Sent(0.0, src, (src + by) % 4, size) for src, by, size in drawn]
    half = joined("switch", 4, link=Cable(bandwidth=50.0))
    for contention in ("fair", "queue"):
        assert np.array_equal(arrivals(traffic, half, contention), 2 * arrivals(traffic, SWITCH, contention))


@given(traffics(), st.sampled_from(["fair", "queue"]))
def test_no_edge_carries_more_than_it_can(drawn: tuple[Cluster, list[Sent]], contention: str) -> None:
    """Between any beginning and any end, of what both begins and ends there."""
    cluster, traffic = drawn
    pattern: dict[str, Any] = as_json(traffic, cluster)
    begin = [message["time"] + message["latency"] for message in pattern["messages"]]
    end = arrivals(traffic, cluster, contention)
    for edge, limit in enumerate(pattern["bandwidth"]):
        rows = [k for k, message in enumerate(pattern["messages"]) if edge in message["route"] and message["size"]]
        for low in rows:
            for high in rows:
                inside = [k for k in rows if begin[k] >= begin[low] and end[k] <= end[high]]
                size = sum(traffic[k].size for k in inside)
                assert not inside or size <= limit * (end[high] - begin[low]) * (1 + 1e-9) + limit * 1e-14


def test_the_same_on_every_call() -> None:
    """The answer does not depend on the calls before."""
    for name, cluster, traffic in PATTERNS[:12]:
        for contention in ("fair", "queue"):
            first = arrivals(traffic, cluster, contention)
            assert np.array_equal(first, arrivals(traffic, cluster, contention)), name


def test_a_bundle_that_is_never_empty_stays_exact() -> None:
    """A link that is busy with large messages all the time does not wear out the time of a small one."""
    cluster = Cluster(devices=(Devices(count=2),), link=Link(bandwidth=1e9))
    large = [Sent(0.9 * k, 0, 1, 10**9) for k in range(40)]
    traffic = [*large, Sent(20.0, 0, 1, 3), Sent(30.0, 0, 1, 10**4)]
    theirs = filled(traffic, cluster)
    sent = np.array([message.time for message in traffic])
    assert np.allclose(arrivals(traffic, cluster) - sent, np.array(theirs) - sent, rtol=1e-6, atol=0)


def test_flows_are_what_was_asked_for() -> None:
    """Free and empty messages are none."""
    traffic = [Sent(0.0, 0, 1, 0), Sent(0.0, 0, 1, 8)]
    for contention, kind in (("fair", FairFlows), ("queue", QueuedFlows)):
        wires = costs_of(traffic, SWITCH, contention).wires
        assert wires is not None
        assert isinstance(flows_on(wires), kind)
        assert [len(route) for route in wires.routes()] == [0, 2]
    endless = joined("switch", 4, link=Cable(latency=0.5))
    assert arrivals(traffic, endless).tolist() == [1.0, 1.0]

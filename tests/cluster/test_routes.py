"""Routes are as short and as fast as any, and the same each time."""

from collections import Counter
from itertools import pairwise, product
from math import inf

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpsim.cluster import Cable, Cluster, Devices, Edge, Topology
from cdpsim.cluster.routes import Graph, Routes, draw_graph
from cdpsim.errors import RequestError

latencies = st.integers(0, 3).map(float)
bandwidths = st.sampled_from([1.0, 2.0, 8.0, inf])
cables = st.builds(Cable, latency=latencies, bandwidth=bandwidths, latency_back=latencies)


@st.composite
def joined(draw: st.DrawFn) -> Cluster:
    """A few devices and switches with some edges, in one direction or both, which may leave devices apart."""
    count = draw(st.integers(2, 5))
    points: list[int | str] = [*range(count), *"abc"]
    ends = [(a, b) for k, a in enumerate(points) for b in points[:k]]
    pairs = [*ends, *((b, a) for a, b in ends)]
    edges = tuple(
        Edge(
            between=pair,
            latency=draw(latencies),
            bandwidth=draw(bandwidths),
            one_way=draw(st.booleans()),
        )
        for pair in draw(st.lists(st.sampled_from(pairs), unique_by=frozenset, min_size=1, max_size=14))
    )
    return Cluster(devices=(Devices(count=count),), edges=edges)


@st.composite
def shaped(draw: st.DrawFn) -> Cluster:
    """A topology of every kind, of up to twenty devices."""
    link, count = draw(cables), draw(st.integers(1, 20))
    kind = draw(st.sampled_from(["ring", "mesh", "switch", "fat-tree", "nodes"]))
    if kind != "nodes":
        return Cluster(devices=(Devices(count=count),), topology=Topology(kind=kind, link=link))
    size = draw(st.integers(1, 4))
    topology = Topology(
        kind=kind,
        per_node=size,
        inside=draw(st.sampled_from(["switch", "mesh"])),
        nics=draw(st.integers(1, size)),
        across=draw(st.sampled_from(["switch", "fat-tree"])),
        link=link,
        host=draw(cables),
        network=draw(cables),
    )
    return Cluster(devices=(Devices(count=count),), topology=topology)


def oracle(graph: Graph) -> nx.DiGraph:
    """The same graph for networkx; where devices pass nothing on, it has each of them twice."""
    known = nx.DiGraph()
    known.add_nodes_from(range(graph.devices))
    for k, (tail, head) in enumerate(zip(graph.tail.tolist(), graph.head.tolist(), strict=True)):
        into = ("into", head) if head < graph.devices and not graph.forwards else head
        known.add_edge(tail, into, number=k, latency=float(graph.latency[k]), bandwidth=float(graph.bandwidth[k]))
    return known


@given(joined() | shaped())
@settings(max_examples=120, deadline=None)
def test_a_route_has_the_fewest_edges_and_of_these_the_least_latency(cluster: Cluster) -> None:
    """Held against networkx: all shortest ways, and the fastest of them."""
    graph = cluster.graph
    known = oracle(graph)
    for src, dst in product(range(graph.devices), repeat=2):
        if src == dst:
            assert cluster.route(src, dst) == ()
            continue
        end = dst if graph.forwards else ("into", dst)
        if end not in known or not nx.has_path(known, src, end):
            with pytest.raises(RequestError, match=f"^topology: no route from device {src} to device {dst}; add"):
                cluster.route(src, dst)
            with pytest.raises(RequestError, match=f"^topology: no route from device {src} to device {dst}; add"):
                cluster.link_costs(np.array([src]), np.array([dst]))
            continue
        ways = [[known.edges[pair] for pair in pairwise(way)] for way in nx.all_shortest_paths(known, src, end)]
        route = cluster.route(src, dst)
        assert len(route) == nx.shortest_path_length(known, src, end)
        assert list(route) in [[edge["number"] for edge in way] for way in ways]
        latency, bandwidth = cluster.link_costs(np.array([src]), np.array([dst]))
        assert latency[0] == min(sum(edge["latency"] for edge in way) for way in ways)
        assert latency[0] == graph.latency[list(route)].sum()
        assert bandwidth[0] == graph.bandwidth[list(route)].min()


def test_a_device_that_is_apart_is_named_among_those_that_are_not() -> None:
    """Devices 0 and 3 reach device 1 by a switch, and device 2 does not."""
    edges = tuple(Edge(between=ends, one_way=True) for ends in ((0, "a"), (3, "a"), ("a", 1)))
    cluster = Cluster(devices=(Devices(count=4),), edges=edges)
    assert cluster.link_costs(np.array([0, 3]), np.array([1, 1]))[0].tolist() == [0.0, 0.0]
    with pytest.raises(RequestError, match=r"^topology: no route from device 2 to device 1; add"):
        cluster.link_costs(np.array([0, 2, 3]), np.array([1, 1, 1]))


@given(shaped())
@settings(max_examples=50, deadline=None)
def test_costs_of_many_messages_are_those_of_each(cluster: Cluster) -> None:
    count = cluster.count or 0
    src, dst = np.indices((count, count), np.int32)
    latency, bandwidth = cluster.link_costs(src, dst)
    fresh = Routes(cluster.graph)
    for a, b in product(range(count), repeat=2):
        edges = fresh.edges(np.array([a]), np.array([b]))[0] if a != b else np.zeros(0, np.int64)
        route = edges[edges >= 0]
        assert latency[a, b] == cluster.graph.latency[route].sum()
        assert bandwidth[a, b] == cluster.graph.bandwidth[route].min(initial=inf)
    apart = ~np.eye(count, dtype=bool)
    expected = (latency[apart].max(initial=0.0), bandwidth[apart].min(initial=inf))
    assert cluster.group_link(np.arange(count)) == expected


def test_a_ring_goes_the_shorter_way() -> None:
    """Around a ring of five, one way 1 s at 10 B/s, the other 3 s at 20 B/s an edge."""
    link = Cable(latency=1.0, bandwidth=10.0, latency_back=3.0, bandwidth_back=20.0)
    ring = Cluster(devices=(Devices(count=5),), topology=Topology(kind="ring", link=link))
    latency, bandwidth = ring.link_costs(np.zeros(4, int), np.arange(1, 5))
    assert (latency.tolist(), bandwidth.tolist()) == ([1, 2, 6, 3], [10, 10, 20, 20])
    # Of four, both ways to the one opposite have two edges: the faster one.
    opposite = Cluster(devices=(Devices(count=4),), topology=Topology(kind="ring", link=link))
    assert [c.tolist() for c in opposite.link_costs(np.array([0, 3]), np.array([2, 1]))] == [[2, 2], [10, 10]]


def test_a_switch_costs_both_its_cables() -> None:
    link = Cable(latency=1.0, bandwidth=10.0, latency_back=0.25, bandwidth_back=4.0)
    switch = Cluster(devices=(Devices(count=3),), topology=Topology(kind="switch", link=link))
    assert [c.tolist() for c in switch.link_costs(np.array([0, 2]), np.array([1, 0]))] == [[1.25, 1.25], [4, 4]]
    assert switch.group_link(np.array([2, 0])) == (1.25, 4.0)
    assert switch.group_link(np.array([2, 2])) == (0.0, inf)


def test_nodes_keep_to_themselves_what_is_theirs() -> None:
    """Within a node by its switch, however fast the network; between nodes card to card."""
    topology = Topology(
        kind="nodes",
        per_node=2,
        link=Cable(latency=8.0, bandwidth=300.0),
        host=Cable(latency=0.5, bandwidth=64.0),
        network=Cable(latency=2.0, bandwidth=12.5),
    )
    nodes = Cluster(topology=topology).sized(5)
    latency, bandwidth = nodes.link_costs(np.array([0, 0, 4]), np.array([1, 2, 3]))
    assert (latency.tolist(), bandwidth.tolist()) == ([16, 5, 5], [300, 12.5, 12.5])
    names = [nodes.graph.name(int(nodes.graph.head[edge])) for edge in nodes.route(4, 3)]
    assert names == ["nic 2.0 out", "network", "nic 1.0 in", "3"]


def test_devices_of_nodes_pass_nothing_on() -> None:
    """Device 0's card leads up into the tree, though that of device 6 is on the same switch as device 8's."""
    topology = Topology(
        kind="nodes", per_node=8, nics=8, across="fat-tree", ports=6, network=Cable(latency=9.0, bandwidth=1.0)
    )
    nodes = Cluster(topology=topology).sized(16)
    for src, dst in product(range(16), repeat=2):
        heads = nodes.graph.head[list(nodes.route(src, dst))]
        assert all(head >= 16 for head in heads[:-1])
    assert nodes.link_costs(np.array([0]), np.array([8]))[0].tolist() == [4 * 9.0]


@pytest.mark.parametrize("k", [4, 8])
def test_a_fat_trees_destinations_take_turns_at_its_cores(k: int) -> None:
    """When every host sends to the one half a tree away, no cable carries more than one message."""
    count = k**3 // 4
    tree = Cluster(devices=(Devices(count=count),), topology=Topology(kind="fat-tree", ports=k))
    for shift in (k * k // 4, count // 2):
        used = Counter(edge for host in range(count) for edge in tree.route(host, (host + shift) % count))
        assert max(used.values()) == 1
        cores = Counter(
            tree.graph.name(int(tree.graph.head[edge]))
            for edge in used
            if "core" in tree.graph.name(int(tree.graph.head[edge]))
        )
        assert len(cores) == (k // 2) ** 2
        assert set(cores.values()) == {k}


def test_what_is_remembered_may_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = draw_graph(Topology(kind="fat-tree", link=Cable(latency=1.0, bandwidth=5.0)), (), 20)
    src, dst = np.indices((20, 20)).reshape(2, -1)
    plain = Routes(graph).costs(src, dst)
    monkeypatch.setattr("cdpsim.cluster.routes._MOST_KEPT", 3 * graph.points)
    monkeypatch.setattr("cdpsim.cluster.routes._SWEPT_AT_ONCE", 2 * graph.points)
    scarce = Routes(graph)
    again = scarce.costs(src, dst)
    assert all(np.array_equal(one, other) for one, other in zip(plain, again, strict=True))
    assert len(scarce.known) <= 3
    members = np.arange(20)
    away = tuple(Edge(between=(device, "switch"), one_way=True) for device in range(20))
    back = tuple(
        Edge(
            between=("switch", device), latency=4.0 * (device == 7), bandwidth=2.0 if device == 8 else 3.0, one_way=True
        )
        for device in range(20)
    )
    cluster = Cluster(devices=(Devices(count=20),), edges=away + back)
    monkeypatch.setattr("cdpsim.cluster._PAIRS_AT_ONCE", 50)
    assert cluster.group_link(members) == (4.0, 2.0)  # found neither first nor last


def test_a_cluster_of_any_number_of_devices_has_no_routes_yet() -> None:
    ring = Cluster(name="ring", topology=Topology(kind="ring"))
    with pytest.raises(RequestError, match=r"^cluster 'ring': leaves its number of devices open; say how many first"):
        ring.route(0, 1)
    assert ring.sized(3).route(0, 2) == (1,)


@given(shaped(), st.lists(st.integers(0, 19), min_size=2, max_size=8, unique=True))
@settings(max_examples=150, deadline=None)
def test_costs_between_alike_nodes_are_those_of_routes(cluster: Cluster, members: list[int]) -> None:
    """To the last bit what routes through the whole graph cost, for each pair and for groups."""
    routes, count = Routes(cluster.graph), cluster.count or 0
    src, dst = (ends.ravel() for ends in np.indices((count, count)))
    for found, wanted in zip(cluster.link_costs(src, dst), routes.costs(src, dst), strict=True):
        assert found.tolist() == wanted.tolist()
    group = [member for member in members if member < count]
    if len(group) > 1:
        pairs = np.array([(a, b) for a in group for b in group if a != b]).T
        latency, bandwidth = routes.costs(*pairs)
        assert cluster.group_link(np.array(group)) == (latency.max(), bandwidth.min())


@given(shaped(), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_shared_edges_are_those_of_routes_that_have_a_limit(cluster: Cluster, shift: int) -> None:
    """Rows with a common edge are the same, and so are their bandwidths, whichever numbers edges have."""
    count = cluster.count or 0
    src = np.arange(count)
    src, dst = (np.delete(ends, np.flatnonzero(src == (src + shift) % count)) for ends in (src, (src + shift) % count))
    edges, bandwidth = cluster.shared_edges(src, dst)
    limit = cluster.graph.bandwidth
    number: dict[int, int] = {}
    for row, ends in zip(edges.tolist(), zip(src.tolist(), dst.tolist(), strict=True), strict=True):
        route = [edge for edge in cluster.route(*ends) if limit[edge] < inf]
        found = [edge for edge in row if edge >= 0]
        assert row[: len(found)] == found
        assert [number.setdefault(edge, shared) for edge, shared in zip(route, found, strict=True)] == found
        assert bandwidth[found].tolist() == limit[route].tolist()
    assert sorted(number.values()) == list(range(len(bandwidth)))


@given(shaped())
@settings(max_examples=150, deadline=None)
def test_ways_that_are_alike_in_a_layout_cost_the_same(cluster: Cluster) -> None:
    """Replicas are alike if their ways in the layout are, whatever cables cost."""
    count = cluster.count or 0
    src, dst = (ends.ravel() for ends in np.indices((count, count)))
    costs: dict[tuple[float, float], set[tuple[float, float]]] = {}
    laid_out, real = (zip(*each.link_costs(src, dst), strict=True) for each in (cluster.laid_out, cluster))
    for way, cost in zip(laid_out, real, strict=True):
        costs.setdefault(way, set()).add(cost)
    assert all(len(found) == 1 for found in costs.values())
    assert cluster.laid_out.laid_out == cluster.laid_out


def test_latencies_alone_tell_ways_apart_in_a_layout() -> None:
    """Nothing has a limit; there and back are not alike, nor are nodes."""
    link, network = Cable(latency=1e-6, latency_back=2e-6), Cable(latency=5e-6)
    nodes = Topology(kind="nodes", per_node=2, inside="mesh", link=link, network=network)
    latency, _ = Cluster(topology=nodes).sized(4).laid_out.link_costs(np.array([0, 1, 0]), np.array([1, 0, 2]))
    assert len(set(latency.tolist())) == 3


def test_an_edge_beside_alike_nodes_is_searched() -> None:
    """Devices 0 and 3 of two nodes have a cable of their own."""
    topology = Topology(kind="nodes", per_node=2, network=Cable(latency=1.0))
    src, dst = np.array([0]), np.array([3])
    for edges, latency in (((), 2.0), ((Edge(between=(0, 3), latency=0.5),), 0.5)):
        cluster = Cluster(devices=(Devices(count=4),), topology=topology, edges=edges)
        assert cluster.link_costs(src, dst)[0].tolist() == [latency]

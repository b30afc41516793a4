"""Graphs have the points and edges that their topology is known for."""

from collections import Counter
from math import inf

import networkx as nx
import numpy as np
import pytest

from cdpsim.cluster import Cable, Cluster, Edge, Topology
from cdpsim.cluster.routes import Graph, check_topology, draw_graph, node_of
from cdpsim.errors import RequestError

CABLE = Cable(latency=2.0, bandwidth=30.0, latency_back=5.0, bandwidth_back=70.0)


def named(graph: Graph) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the latency and bandwidth of each directed edge, by the names of its ends."""
    columns = (graph.tail.tolist(), graph.head.tolist(), graph.latency.tolist(), graph.bandwidth.tolist())
    return {(graph.name(a), graph.name(b)): (late, wide) for a, b, late, wide in zip(*columns, strict=True)}


def test_a_ring_joins_each_device_to_the_next() -> None:
    there, back = (2.0, 30.0), (5.0, 70.0)
    assert named(draw_graph(Topology(kind="ring", link=CABLE), (), 3)) == {
        ("0", "1"): there,
        ("1", "2"): there,
        ("2", "0"): there,
        ("1", "0"): back,
        ("2", "1"): back,
        ("0", "2"): back,
    }


def test_a_ring_of_two_is_one_cable_and_of_one_none() -> None:
    assert named(draw_graph(Topology(kind="ring", link=CABLE), (), 2)) == {
        ("0", "1"): (2.0, 30.0),
        ("1", "0"): (5.0, 70.0),
    }
    assert named(draw_graph(Topology(kind="ring"), (), 1)) == {}


def test_a_mesh_joins_every_pair() -> None:
    edges = named(draw_graph(Topology(kind="mesh", link=CABLE), (), 4))
    assert len(edges) == 4 * 3
    assert all(cost == ((2.0, 30.0) if int(a) < int(b) else (5.0, 70.0)) for (a, b), cost in edges.items())


def test_a_switch_joins_all_devices_to_itself() -> None:
    edges = named(draw_graph(Topology(kind="switch", link=CABLE), (), 3))
    assert edges == {(str(d), "switch"): (2.0, 30.0) for d in range(3)} | {
        ("switch", str(d)): (5.0, 70.0) for d in range(3)
    }


def test_nodes_have_a_switch_and_cards_that_share_their_devices() -> None:
    topology = Topology(
        kind="nodes",
        per_node=4,
        nics=2,
        link=CABLE,
        host=Cable(latency=0.5, latency_back=0.75),
        network=Cable(bandwidth=12.5, bandwidth_back=25.0),
    )
    edges = named(draw_graph(topology, (), 6))
    inside = {(f"{d}", f"node {d // 4}") for d in range(6)}
    cards = {(f"{d}", f"nic {d // 4}.{d % 4 // 2} out") for d in range(6)}
    names = {name.removesuffix(" out") for _, name in cards}
    assert names == {"nic 0.0", "nic 0.1", "nic 1.0"}  # the last node is half full
    expected = dict.fromkeys(inside, (2.0, 30.0)) | {(b, a): (5.0, 70.0) for a, b in inside}
    for device, card in cards:
        expected |= {(device, card): (0.5, inf), (card.replace("out", "in"), device): (0.75, inf)}
    for name in names:
        expected |= {(f"{name} out", "network"): (0.0, 12.5), ("network", f"{name} in"): (0.0, 25.0)}
    assert edges == expected


def test_nodes_may_be_meshes() -> None:
    edges = named(draw_graph(Topology(kind="nodes", per_node=3, inside="mesh"), (), 6))
    assert {(a, b) for a, b in edges if a.isdigit() and b.isdigit()} == {
        (str(a), str(b)) for a in range(6) for b in range(6) if a != b and a // 3 == b // 3
    }


@pytest.mark.parametrize("k", [2, 4, 6, 8])
def test_a_full_fat_tree_is_the_textbooks(k: int) -> None:
    """Al-Fares et al. 2008, section 3: k³/4 hosts, 5k²/4 switches of k ports, any two hosts at most 6 hops apart."""
    count = k**3 // 4
    graph = draw_graph(Topology(kind="fat-tree", ports=k), (), count)
    assert len(graph.switches) == 5 * k * k // 4
    joined = nx.DiGraph(zip(graph.tail.tolist(), graph.head.tolist(), strict=True)).to_undirected(reciprocal=True)
    assert Counter(degree for _, degree in joined.degree()) == {1: count, k: len(graph.switches)}
    kinds = Counter(name.split()[0] for name in graph.switches)
    assert kinds == {"edge": k * k // 2, "aggregation": k * k // 2, "core": k * k // 4}
    assert nx.diameter(joined) == 6
    # Full bisection: halves of the pods, cut at the cores, exchange what their hosts send.
    flow = nx.maximum_flow_value(
        _capacity(graph, range(count // 2), range(count // 2, count)), "source", "sink", capacity="capacity"
    )
    assert flow == count // 2


def _capacity(graph: Graph, sources: range, sinks: range) -> nx.DiGraph:
    joined = nx.DiGraph()
    joined.add_edges_from(zip(graph.tail.tolist(), graph.head.tolist(), strict=True), capacity=1)
    joined.add_edges_from([("source", host) for host in sources], capacity=1)
    joined.add_edges_from([(host, "sink") for host in sinks], capacity=1)
    return joined


@pytest.mark.parametrize(("count", "ports"), [(1, 2), (2, 2), (3, 4), (16, 4), (17, 6), (1000, 16), (1025, 18)])
def test_a_fat_tree_has_as_few_ports_as_serve(count: int, ports: int) -> None:
    assert ports**3 // 4 >= count > (ports - 2) ** 3 // 4
    graph = draw_graph(Topology(kind="fat-tree"), (), count)
    assert sum(name.startswith("core") for name in graph.switches) == (ports // 2) ** 2


def test_edges_alone_and_beside_a_topology() -> None:
    edges = (Edge(between=(0, "a"), latency=1.0, bandwidth=2.0), Edge(between=("a", 2), latency=3.0, one_way=True))
    own = {("0", "a"): (1.0, 2.0), ("a", "0"): (1.0, 2.0), ("a", "2"): (3.0, inf)}
    assert named(draw_graph(None, edges, 3)) == own
    ring = Topology(kind="ring", link=CABLE)
    assert named(draw_graph(ring, edges, 3)) == own | named(draw_graph(ring, (), 3))
    beside = draw_graph(Topology(kind="switch"), (Edge(between=("switch", "spare")),), 2)
    assert beside.switches == ("switch", "spare")


@pytest.mark.parametrize("between", [(0, "switch"), ("switch", 0)])
def test_an_edge_that_the_topology_has_is_refused(between: tuple[int | str, int | str]) -> None:
    with pytest.raises(RequestError, match=r"^edges: between \['0', 'switch'\] twice; keep one"):
        draw_graph(Topology(kind="switch"), (Edge(between=between),), 2)


def test_edges_are_numbered_by_their_ends() -> None:
    graph = draw_graph(Topology(kind="nodes", per_node=4, nics=2, across="fat-tree"), (), 12)
    pairs = list(zip(graph.tail.tolist(), graph.head.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    tail, head = np.array([*graph.tail, 0, 3]), np.array([*graph.head, 1, 3])
    assert graph.edge(tail, head).tolist() == [*range(len(pairs)), -1, -1]
    assert draw_graph(None, (), 2).edge(np.array([0]), np.array([1])).tolist() == [-1]


@pytest.mark.parametrize(("count", "cards"), [(4, 2), (5, 3), (8, 4), (10, 5), (11, 6), (40, 20), (42, 21)])
def test_a_fat_tree_across_nodes_serves_their_cards(count: int, cards: int) -> None:
    """Of four devices the first two share a card, and the last two: that many cards are behind those of a last node."""
    for ports in (2, 4, 6):  # a fat tree of k ports serves k**3 / 4
        topology = Topology(kind="nodes", per_node=4, nics=2, across="fat-tree", ports=ports)
        if serves := ports**3 // 4 >= cards:
            check_topology(topology, count)
            drawn = draw_graph(topology, (), count)
            assert sum(name.startswith("nic") for name in drawn.switches) == 2 * cards  # one for each direction
        else:
            with pytest.raises(RequestError, match=f"{ports} ports serve {ports**3 // 4} hosts, not {cards}; take"):
                check_topology(topology, count)
    assert serves


@pytest.mark.parametrize(("kind", "most", "subject"), [("mesh", 2000, "mesh"), ("ring", 20_000, "topology")])
def test_so_many_devices_can_be_joined_and_no_more(kind: str, most: int, subject: str) -> None:
    check_topology(Topology(kind=kind), most)
    with pytest.raises(RequestError, match=f"^{subject}: {most + 1} devices are too many; at most {most}, or"):
        check_topology(Topology(kind=kind), most + 1)


def test_who_shares_a_node() -> None:
    members = np.array([0, 3, 4, 11], np.int32)
    assert node_of(Topology(kind="nodes", per_node=4), members).tolist() == [0, 0, 1, 2]
    assert node_of(Topology(kind="edges", per_node=2), members).tolist() == [0, 1, 2, 5]
    assert node_of(Topology(kind="ring"), members).tolist() == [0, 0, 0, 0]
    assert Cluster().nodes(members).tolist() == [0, 0, 0, 0]

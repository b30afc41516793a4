"""Topologies read from files and written to them; refusals of impossible ones."""

from math import inf
from pathlib import Path

import pytest

from cdpsim.cluster import Cable, Cluster, Devices, Edge, Link, PairLink, Topology
from cdpsim.errors import RequestError
from tests.helpers.every_row import every_row

NODES = """
name = "nodes"
[devices]
count = 12
[devices.speeds]
bf16 = "312 TFLOPS"
[topology]
kind = "nodes"
per_node = 4
inside = "mesh"
nics = 2
across = "fat-tree"
ports = 8
[topology.link]
latency = "1 us"
bandwidth = "300 GB/s"
bandwidth_back = "200 GB/s"
[topology.host]
bandwidth = "64 GB/s"
[topology.network]
latency = "2 us"
latency_back = "0 s"
bandwidth = "12.5 GB/s"
[[edges]]
between = ["0", "spare"]
latency = "5 us"
bandwidth = "1 GB/s"
[[edges]]
between = ["spare", 11]
one_way = true
"""


def test_a_file_says_how_devices_are_joined(tmp_path: Path) -> None:
    (tmp_path / "nodes.toml").write_text(NODES)
    cluster = Cluster.load(tmp_path / "nodes.toml")
    assert cluster.is_joined
    assert cluster.topology == Topology(
        kind="nodes",
        per_node=4,
        inside="mesh",
        nics=2,
        across="fat-tree",
        ports=8,
        link=Cable(latency=1e-6, bandwidth=300e9, bandwidth_back=200e9),
        host=Cable(bandwidth=64e9),
        network=Cable(latency=2e-6, latency_back=0.0, bandwidth=12.5e9),
    )
    assert cluster.edges == (
        Edge(between=(0, "spare"), latency=5e-6, bandwidth=1e9),
        Edge(between=("spare", 11), one_way=True),
    )


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_a_topology_survives_its_file(tmp_path: Path, ending: str) -> None:
    (tmp_path / "nodes.toml").write_text(NODES)
    cluster = Cluster.load(tmp_path / "nodes.toml")
    cluster.save(tmp_path / f"again.{ending}")
    assert Cluster.load(tmp_path / f"again.{ending}") == cluster
    assert Cluster.from_builtins(cluster.to_builtins(), "x") == cluster


@pytest.mark.parametrize(
    ("cable", "back"),
    [
        (Cable(latency=2.0, bandwidth=3.0), (2.0, 3.0)),
        (Cable(latency=2.0, bandwidth=3.0, latency_back=0.0), (0.0, 3.0)),
        (Cable(latency=2.0, bandwidth=3.0, bandwidth_back=inf), (2.0, inf)),
    ],
)
def test_the_way_back_is_as_the_way_there_unless_it_is_given(cable: Cable, back: tuple[float, float]) -> None:
    assert cable.back == back


@pytest.mark.parametrize(
    ("cluster", "free"),
    [
        (Cluster(topology=Topology(kind="ring")), True),
        (Cluster(topology=Topology(kind="ring", link=Cable(latency=1.0))), False),
        (Cluster(topology=Topology(kind="ring", link=Cable(bandwidth_back=1.0))), False),
        (Cluster(topology=Topology(kind="nodes", per_node=2, host=Cable(latency_back=1.0))), False),
        (Cluster(topology=Topology(kind="nodes", per_node=2, network=Cable(bandwidth=1.0))), False),
        (Cluster(devices=(Devices(count=2),), edges=(Edge(between=(0, 1)),)), True),
        (Cluster(devices=(Devices(count=2),), edges=(Edge(between=(0, 1), latency=1.0),)), False),
    ],
)
def test_communication_is_free_where_no_cable_costs_anything(cluster: Cluster, free: bool) -> None:
    assert cluster.is_free == free


@pytest.mark.parametrize(
    ("count", "topology", "sized"),
    [
        (5, Topology(kind="nodes", per_node=4), 8),
        (8, Topology(kind="nodes", per_node=4), 8),
        (5, Topology(kind="ring"), 5),
        (5, Topology(kind="fat-tree"), 5),
        (5, None, 5),
    ],
)
def test_nodes_come_whole(count: int, topology: Topology | None, sized: int) -> None:
    assert Cluster(topology=topology).sized(count).count == sized


def test_a_count_that_is_given_stays() -> None:
    cluster = Cluster(devices=(Devices(count=6),), topology=Topology(kind="nodes", per_node=4))
    assert cluster.sized(5) is cluster
    with pytest.raises(RequestError, match="has 6 devices, but the schedule needs 7"):
        cluster.sized(7)


@every_row(
    ("content", "problem"),
    [
        ({"topology": {"kind": "rign"}}, "$.topology: kind: unknown kind 'rign'; did you mean 'ring'?"),
        ({"topology": {}}, "$.topology: object missing required field `kind`"),
        ({"topology": {"kind": 3}}, "$.topology.kind: expected `str`, got `int`"),
        ({"topology": {"kind": "ring", "nic": 3}}, "$.topology: unknown field 'nic'; did you mean 'nics'?"),
        (
            {"topology": {"kind": "ring", "nics": 3}},
            "$.topology: nics: is nothing that 'ring' has (it has link); remove it",
        ),
        ({"topology": {"kind": "switch", "per_node": 8}}, "$.topology: per_node: is nothing that 'switch' has"),
        ({"topology": {"kind": "nodes"}}, "$.topology: per_node: is missing; say how many devices a node has"),
        ({"topology": {"kind": "nodes", "per_node": 2, "nics": 3}}, "$.topology: nics: 3 are more than the 2 devices"),
        (
            {"topology": {"kind": "nodes", "per_node": 2, "inside": "mseh"}},
            "$.topology: inside: unknown inside 'mseh'; did you mean 'mesh'?",
        ),
        (
            {"topology": {"kind": "nodes", "per_node": 2, "across": "fat"}},
            "$.topology: across: unknown across 'fat'; did you mean 'fat-tree'?",
        ),
        ({"topology": {"kind": "nodes", "per_node": 2, "ports": 4}}, "$.topology: ports: must be even, and are those"),
        ({"topology": {"kind": "fat-tree", "ports": 5}}, "$.topology: ports: must be even"),
        (
            {"devices": {"count": 17}, "topology": {"kind": "fat-tree", "ports": 4}},
            "$.ports: 4 ports serve 16 hosts, not 17; take more ports",
        ),
        ({"devices": {"count": 2001}, "topology": {"kind": "mesh"}}, "$.mesh: 2001 devices are too many; at most 2000"),
        (
            {"devices": {"count": 20001}, "topology": {"kind": "ring"}},
            "$.topology: 20001 devices are too many; at most 20000, or [link] for all pairs",
        ),
        (
            {"topology": {"kind": "ring", "link": {"bandwidth": 0}}},
            "$.topology.link.bandwidth: 0: not between 1e-09 and 1e+18 B/s; write for example '300 GB/s'",
        ),
        ({"topology": {"kind": "ring", "link": {"bandwidth": "-1 GB/s"}}}, "$.topology.link.bandwidth: '-1 GB/s': not"),
        (
            {"topology": {"kind": "ring", "link": {"bandwidth_back": "100 Gb/s"}}},
            "$.topology.link.bandwidth_back: '100",
        ),
        ({"topology": {"kind": "ring"}, "link": {"latency": 1}}, "$.topology: and link both say what a message pays"),
        ({"topology": {"kind": "ring"}, "links": [{"between": [0, 1]}]}, "$.topology: and link both say what a"),
        ({"edges": [{"between": [0, 1]}]}, "$.edges: need `count` in [devices], to tell how many there are; give it"),
        (
            {"devices": {"count": 2}, "edges": [{"between": [0, "2"]}]},
            "$.edges: between [0, 2], but the last device is 1",
        ),
        (
            {"devices": {"count": 2}, "edges": [{"between": [1, "01"]}]},
            "$.edges[0]: between: [1, 1] is one point; name",
        ),
        ({"devices": {"count": 2}, "edges": [{"between": ["a", "a"]}]}, "$.edges[0]: between: ['a', 'a'] is one point"),
        ({"devices": {"count": 2}, "edges": [{"between": [0, ""]}]}, "$.edges[0].between[1]: expected `str` of length"),
        ({"devices": {"count": 2}, "edges": [{"between": [0, -1]}]}, "$.edges[0].between[1]: expected `int` >= 0"),
        (
            {"devices": {"count": 2}, "edges": [{"between": [0, "9" * 50]}]},
            "$.edges[0]: between: device 99999999999999",
        ),
        (
            {"devices": {"count": 2}, "edges": [{"between": [0, "s"], "bandwidth": 0}]},
            "$.edges[0].bandwidth: 0: not between",
        ),
        (
            {"devices": {"count": 2}, "edges": [{"between": [0, "s"]}, {"between": ["s", "0"], "one_way": True}]},
            "$.edges: between ['s', 0] twice; keep one, or make both one_way",
        ),
    ],
)
def test_wrong_content_is_refused_with_the_path_of_the_field(content: object, problem: str) -> None:
    with pytest.raises(RequestError) as refusal:
        Cluster.from_builtins(content, "box.toml")
    assert str(refusal.value).startswith(f"box.toml: {problem}")
    assert str(refusal.value).isprintable()


def test_what_is_made_in_python_obeys_the_rules_of_a_file() -> None:
    assert Edge(between=("7", "switch")).between == (7, "switch")
    with pytest.raises(RequestError, match=r"^topology: and link both say"):
        Cluster(link=Link(latency=1.0), topology=Topology(kind="ring"))


def test_as_many_devices_as_links_name() -> None:
    """Though a schedule needs fewer: a file may describe more than one run takes."""
    cluster = Cluster(links=(PairLink(between=(0, 3), bandwidth=1e9),))
    assert cluster.sized(1).count == 4
    assert cluster.sized(6).count == 6

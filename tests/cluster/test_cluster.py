"""A cluster survives its file, and its links cost what their overrides say."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import Model, Stage, simulate
from cdpsim.cluster import Cable, Cluster, Devices, Edge, Link, PairLink, Topology
from cdpsim.errors import RequestError
from cdpsim.request.options import Contention
from cdpsim.studies.breakeven import scale_links
from cdpsim.timing.costs import with_transfer_times
from tests.helpers.every_row import every_row

pytestmark = pytest.mark.filterwarnings("error")

BOX = """
name = "box"
[devices]
count = 8
speed = "312 TFLOPS"
memory = "80 GB"
lanes = 2
[link]
latency = "5 us"
bandwidth = "300 GB/s"
"""
MIXED = """
[[devices]]
count = 2
speed = "312 TFLOPS"
[[devices]]
count = 1
memory = "16 GiB"
lanes = 3
[link]
bandwidth = "inf"
[[links]]
between = [0, 1]
latency = "1 ms"
[[links]]
between = [2, 0]
bandwidth = "1 GB/s"
one_way = true
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Cluster:
    (tmp_path / "mixed.toml").write_text(MIXED)
    return Cluster.load(tmp_path / "mixed.toml")


def test_a_file_says_what_every_device_is(tmp_path: Path) -> None:
    (tmp_path / "box.toml").write_text(BOX)
    box = Cluster.load(str(tmp_path / "box.toml"))
    assert (box.name, box.count, box.is_unit, box.is_free) == ("box", 8, False, False)
    assert box.speeds(3) == [312e12] * 3
    assert box.memory_bytes(8).tolist() == [80e9] * 8
    assert box.lanes(2).tolist() == [2, 2]
    latency, bandwidth = box.link_costs(np.array([0, 7]), np.array([1, 6]))
    assert (latency.tolist(), bandwidth.tolist()) == ([5e-6, 5e-6], [300e9, 300e9])
    assert box.group_link(np.arange(8)) == (5e-6, 300e9)


def test_groups_of_devices_are_numbered_in_order(mixed: Cluster) -> None:
    assert mixed.count == 3
    assert mixed.speeds(3) == [312e12, 312e12, None]
    assert mixed.memory_bytes(3).tolist() == [inf, inf, 2**34]
    assert mixed.memory_bytes(3).dtype == np.float64
    assert mixed.lanes(3).tolist() == [1, 1, 3]
    assert mixed.lanes(0).tolist() == []


def test_a_pair_of_devices_can_have_its_own_link(mixed: Cluster) -> None:
    src, dst = np.array([[0, 1, 0], [2, 1, 2]]), np.array([[1, 0, 2], [0, 2, 1]])
    latency, bandwidth = mixed.link_costs(src, dst)
    assert latency.tolist() == [[1e-3, 1e-3, 0], [0, 0, 0]]
    assert bandwidth.tolist() == [[inf, inf, inf], [1e9, inf, inf]]


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.uint32])
def test_small_integers_find_the_link_of_large_devices(kind: type[np.int32]) -> None:
    cluster = Cluster(links=(PairLink(between=(30_000, 29_999), latency=1.0),))
    src, dst = np.array([30_000, 29_999, 30_000], kind), np.array([29_999, 30_000, 1], kind)
    assert cluster.link_costs(src, dst)[0].tolist() == [1, 1, 0]
    assert cluster.group_link(src) == (1.0, inf)


def test_what_a_pair_does_not_say_is_as_for_every_pair() -> None:
    links = (PairLink(between=(0, 1), latency=2.0), PairLink(between=(5, 9), bandwidth=3.0))
    cluster = Cluster(link=Link(latency=1.0, bandwidth=7.0), links=links)
    latency, bandwidth = cluster.link_costs(np.array([1, 9, 0]), np.array([0, 5, 9]))
    assert (latency.tolist(), bandwidth.tolist()) == ([2, 1, 1], [7, 3, 7])


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([0, 1], (9.0, 4.0)),  # only the pair's own link: a common one of smaller bandwidth does not count
        ([1, 2], (1.0, 2.0)),
        ([0, 2], (1.0, 2.0)),  # one direction of its own
        ([0, 1, 2], (9.0, 2.0)),
        ([2, 0, 2], (1.0, 2.0)),
        ([5], (0.0, inf)),
        ([], (0.0, inf)),
    ],
)
def test_a_group_is_as_slow_as_its_slowest_pair(members: list[int], expected: tuple[float, float]) -> None:
    links = (
        PairLink(between=(0, 1), latency=9.0, bandwidth=4.0),
        PairLink(between=(0, 2), latency=0.5, bandwidth=50.0, one_way=True),
    )
    cluster = Cluster(link=Link(latency=1.0, bandwidth=2.0), links=links)
    assert cluster.group_link(np.array(members, np.int64)) == expected


def test_the_unit_cluster_has_room_for_everything() -> None:
    unit = Cluster.unit()
    assert (unit.is_unit, unit.is_free, unit.count, unit.to_builtins()) == (True, True, None, "unit")
    assert unit.speeds(2) == [None, None]
    assert unit.memory_bytes(2).tolist() == [inf, inf]
    assert unit.lanes(2).min() >= 10**9
    unit.require(10**6)
    assert Cluster.from_builtins("unit", "x") == unit
    assert not Cluster().is_unit


@pytest.mark.parametrize(
    ("cluster", "free"),
    [
        (Cluster(), True),
        (Cluster(link=Link(latency=1e-9)), False),
        (Cluster(link=Link(bandwidth=1e18)), False),
        (Cluster(links=(PairLink(between=(0, 1)),)), True),
        (Cluster(links=(PairLink(between=(0, 1), latency=0.0, bandwidth=inf),)), True),
        (Cluster(links=(PairLink(between=(0, 1), latency=1.0),)), False),
        (Cluster(links=(PairLink(between=(0, 1), bandwidth=1.0),)), False),
    ],
)
def test_communication_is_free_when_no_link_costs_anything(cluster: Cluster, free: bool) -> None:
    assert cluster.is_free == free


def test_too_few_devices_are_refused(mixed: Cluster) -> None:
    mixed.require(3)
    uses: list[Callable[[int], object]] = [mixed.require, mixed.speeds, mixed.memory_bytes, mixed.lanes]
    for use in uses:
        with pytest.raises(RequestError, match=r"^cluster: has 3 devices, but the schedule needs 4; raise `count`"):
            use(4)
    with pytest.raises(RequestError, match=r"^cluster 'box': has 1 devices"):
        Cluster(name="box", devices=(Devices(count=1),)).require(2)


@pytest.mark.parametrize("ending", ["toml", "json"])
@pytest.mark.parametrize("cluster", [Cluster(), Cluster.unit()])
def test_clusters_of_defaults_survive_their_file(cluster: Cluster, ending: str, tmp_path: Path) -> None:
    cluster.save(tmp_path / f"x.{ending}")
    assert Cluster.load(tmp_path / f"x.{ending}") == cluster


def test_a_saved_cluster_says_no_more_than_it_must(mixed: Cluster, tmp_path: Path) -> None:
    assert mixed.to_builtins() == {
        "devices": [
            {"count": 2, "speed": "312 TFLOPS"},
            {"count": 1, "memory": "17.179869184 GB", "lanes": 3},
        ],
        "links": [
            {"between": [0, 1], "latency": "1 ms"},
            {"between": [2, 0], "bandwidth": "1 GB/s", "one_way": True},
        ],
    }
    with pytest.raises(RequestError, match="already exists; --force overwrites"):
        mixed.save(tmp_path / "mixed.toml")
    mixed.save(tmp_path / "mixed.toml", force=True)
    assert Cluster.load(tmp_path / "mixed.toml") == mixed


LATENCIES = st.floats(0, 1e9)
BANDWIDTHS = st.floats(1e-9, 1e18) | st.just(inf)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    counts = draw(st.just([None]) | st.lists(st.integers(1, 10**5), min_size=1, max_size=4))
    devices = tuple(
        Devices(
            count=count,
            speed=draw(st.none() | st.floats(1e-9, 1e21)),
            memory=draw(st.none() | st.integers(0, 10**15)),
            lanes=draw(st.integers(1, 10**9)),
        )
        for count in counts
    )
    last = 50 if counts == [None] else sum(count or 0 for count in counts) - 1
    ends = st.tuples(st.integers(0, last), st.integers(0, last)).filter(lambda pair: pair[0] != pair[1])
    pairs = draw(st.lists(ends, unique_by=frozenset, max_size=4)) if last else []
    links = tuple(
        PairLink(
            between=pair,
            latency=draw(st.none() | LATENCIES),
            bandwidth=draw(st.none() | BANDWIDTHS),
            one_way=draw(st.booleans()),
        )
        for pair in pairs
    )
    link = Link(latency=draw(LATENCIES), bandwidth=draw(BANDWIDTHS))
    return Cluster(name=draw(st.sampled_from(["", "unit", "θ"])), devices=devices, link=link, links=links)


@given(clusters(), st.sampled_from(["toml", "json"]))
def test_load_undoes_save(cluster: Cluster, ending: str) -> None:
    with TemporaryDirectory() as folder:
        cluster.save(Path(folder, f"x.{ending}"))
        assert Cluster.load(Path(folder, f"x.{ending}")) == cluster
    assert Cluster.from_builtins(cluster.to_builtins(), "x") == cluster


@given(clusters(), st.lists(st.integers(0, 6), unique=True, min_size=2, max_size=5))
def test_a_group_agrees_with_its_pairs(cluster: Cluster, members: list[int]) -> None:
    src, dst = np.array([(a, b) for a in members for b in members if a != b]).T
    latency, bandwidth = cluster.link_costs(src, dst)
    assert cluster.group_link(np.array(members)) == (latency.max(), bandwidth.min())


@every_row(
    ("content", "problem"),
    [
        ([], "$: expected `object`, got `array`"),
        ("units", "$: expected `object`, got `str`"),
        ({"devcies": {}}, "$: unknown field 'devcies'; did you mean 'devices'?"),
        ({"devices": {"cuont": 1}}, "$.devices: unknown field 'cuont'; did you mean 'count'?"),
        ({"devices": {"count": 0}}, "$.devices.count: expected `int` >= 1"),
        ({"devices": {"count": True}}, "$.devices.count: expected `int | null`, got `bool`"),
        ({"devices": {"count": 10**8}}, "$.devices.count: expected `int` <= 10000000"),
        (
            {"devices": {"speed": "5 TFLOP"}},
            "$.devices.speed: '5 TFLOP': not a speed; write for example '312 TFLOPS'",
        ),
        ({"devices": {"speed": "inf"}}, "$.devices.speed: 'inf': not a speed"),
        ({"devices": {"speed": 0}}, "$.devices.speed: 0: not between 1e-09 and 1e+21 FLOPS"),
        ({"devices": {"memory": float("inf")}}, "$.devices.memory: inf: not between 0 and 1e+15 B"),
        ({"devices": {"lanes": 0}}, "$.devices.lanes: expected `int` >= 1"),
        ({"devices": 3}, "$.devices: expected `object | array`, got `int`"),
        ({"devices": []}, "$.devices: expected `array` of length >= 1"),
        ({"devices": [{"count": 1}, {}]}, "$.devices: every one of several groups needs its count"),
        ({"devices": [{"count": 10**7}] * 2}, "$.devices: 20000000 devices are too many; at most 10000000"),
        (
            {"link": {"latency": -1}},
            "$.link.latency: -1: not between 0 and 1e+09 s; write for example '5 us'",
        ),
        ({"link": {"latency": "inf"}}, "$.link.latency: 'inf': not a time"),
        (
            {"link": {"bandwidth": "100 Gb/s"}},
            "$.link.bandwidth: '100 Gb/s': bits, not bytes; write for example",
        ),
        ({"link": {"bandwidth": 0}}, "$.link.bandwidth: 0: not between"),
        ({"link": {"bandwidth": float("nan")}}, "$.link.bandwidth: nan: not between"),
        ({"link": {"bandwidth": 1, "achieved": 0}}, "$.link.achieved: expected `float` > 0.0"),
        ({"link": {"bandwidth": 1, "achieved": 1.5}}, "$.link.achieved: expected `float` <= 1.0"),
        ({"link": {"achieved": 0.5}}, "$.link: achieved: is a share of the bandwidth; give one"),
        ({"links": [{"between": [0, 1], "achieved": 2}]}, "$.links[0].achieved: expected `float` <= 1.0"),
        (
            {"topology": {"kind": "ring", "link": {"achieved": 0.5}}},
            "$.topology.link: achieved: is a share of the bandwidth; give one",
        ),
        (
            {"topology": {"kind": "ring", "link": {"bandwidth": 1, "achieved": 1.1}}},
            "$.topology.link.achieved: expected",
        ),
        (
            {"devices": {"count": 2}, "edges": [{"between": [0, 1], "achieved": 0.5}]},
            "$.edges[0]: achieved: is a share of the bandwidth; give one",
        ),
        ({"link": {"bandwith": 1}}, "$.link: unknown field 'bandwith'; did you mean 'bandwidth'?"),
        ({"links": [{}]}, "$.links[0]: object missing required field `between`"),
        ({"links": [{"between": [0]}]}, "$.links[0].between: expected `array` of length 2, got 1"),
        ({"links": [{"between": [0, -1]}]}, "$.links[0].between[1]: expected `int` >= 0"),
        ({"links": [{"between": [3, 3]}]}, "$.links[0]: between: [3, 3] is one device; name two"),
        ({"links": [{"between": [0, 1], "one_way": 1}]}, "$.links[0].one_way: expected `bool`, got `int`"),
        (
            {"devices": {"count": 2}, "links": [{"between": [0, 2]}]},
            "$.links: between [0, 2], but the last device is 1",
        ),
        (
            {"links": [{"between": [0, 1]}, {"between": [1, 0], "one_way": True}]},
            "$.links: between [1, 0] twice; keep one, or make both one_way",
        ),
        (
            {"links": [{"between": [0, 1], "one_way": True}] * 2},
            "$.links: between [0, 1] twice; keep one, or make both one_way",
        ),
    ],
)
def test_wrong_content_is_refused_with_the_path_of_the_field(content: object, problem: str) -> None:
    with pytest.raises(RequestError) as refusal:
        Cluster.from_builtins(content, "box.toml")
    assert str(refusal.value).startswith(f"box.toml: {problem}")
    assert str(refusal.value).isprintable()


def test_each_direction_of_a_pair_can_have_its_own_link() -> None:
    there = PairLink(between=(0, 1), latency=1.0, one_way=True)
    back = PairLink(between=(1, 0), latency=2.0, one_way=True)
    latency, _ = Cluster(links=(there, back)).link_costs(np.array([0, 1]), np.array([1, 0]))
    assert latency.tolist() == [1, 2]


def test_what_is_made_in_python_obeys_the_rules_of_a_file() -> None:
    assert Devices(memory="80 GB").memory == 80 * 10**9  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^lanes: expected `int` >= 1$"):
        Devices(lanes=0)
    with pytest.raises(RequestError, match=r"^bandwidth: -1: not between"):
        Link(bandwidth=-1)
    with pytest.raises(RequestError, match=r"^devices: expected `array` of length >= 1$"):
        Cluster(devices=())


def achieving(share: float) -> list[Cluster]:
    """Every kind of link, of 10 B/s at that share, and of as much less at all of it."""
    cable, full = Cable(bandwidth=10, achieved=share), Cable(bandwidth=10 * share)
    two = (Devices(count=4),)
    found = []
    for own in (cable, full):
        link = Link(bandwidth=own.bandwidth, achieved=own.achieved)
        found += [
            Cluster(devices=two, link=link),
            Cluster(devices=two, link=link, links=(PairLink(between=(0, 1), latency=1.0),)),
            Cluster(devices=two, topology=Topology(kind="switch", link=own)),
            Cluster(devices=two, topology=Topology(kind="nodes", per_node=2, link=own, host=own, network=own)),
            Cluster(
                devices=two,
                edges=tuple(
                    Edge(between=(k, "switch"), bandwidth=own.bandwidth, achieved=own.achieved) for k in range(4)
                ),
            ),
        ]
    return found


@pytest.mark.parametrize("contention", ["none", "fair", "queue"])
@pytest.mark.parametrize("schedule", ["multi-dp", "pp-cdp"])
def test_a_link_that_achieves_a_share_is_so_much_narrower(schedule: str, contention: Contention) -> None:
    """In messages and collectives, with contention and without, and for breakeven."""
    stages = (Stage(forward=1.0, backward=1.0, parameters=3 * 2**11, boundary=50),) * 4
    clusters = achieving(0.5)
    for some, less in zip(clusters[:5], clusters[5:], strict=True):
        one, other = (
            simulate(schedule, 4, model=Model(stages=stages), cluster=cluster, contention=contention, steps=2)
            for cluster in (some, less)
        )
        assert one.messages["end"].tolist() == other.messages["end"].tolist()
        assert some.group_link(np.arange(4)) == less.group_link(np.arange(4))
        assert Cluster.from_builtins(some.to_builtins(), "some") == some
        assert not scale_links(some, inf).group_link(np.arange(4))[1] < inf


def test_what_crosses_to_a_host_reaches_a_share_too() -> None:
    """By hand: 100 bytes at half of 10 B/s."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, activation=100, offloaded=100),))
    assert with_transfer_times(model, Link(bandwidth=10, achieved=0.5)).stages[0].transfer == 20


def test_a_pair_s_share_is_of_its_own_bandwidth_or_of_every_pair_s() -> None:
    pairs = (PairLink(between=(0, 1), achieved=0.5), PairLink(between=(0, 2), bandwidth=100))
    cluster = Cluster(link=Link(bandwidth=10, achieved=0.8), links=pairs)
    assert cluster.link_costs(np.zeros(3, int), np.array([1, 2, 3]))[1].tolist() == [5, 80, 8]

"""The cluster that one rank of each tensor group sees, beside the cluster of all ranks."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from cdpsim import Cluster, RequestError, simulate
from cdpsim.cluster import Cable, Devices, Topology
from cdpsim.cluster.disorder import Disorder, Slow

LAYERS = {"layers": 8, "width": 64, "heads": 8, "length": 32, "vocabulary": 512}


def nodes(cards: int, count: int | None = None, **network: object) -> Cluster:
    """Nodes of 8 devices of 1 TFLOPS."""
    cables = {"link": Cable(latency=1.0, bandwidth=64.0), "network": Cable(latency=5.0, bandwidth=8.0)}
    topology = Topology(kind="nodes", per_node=8, nics=cards, **cables | network)  # type: ignore[arg-type]
    return Cluster(devices=(Devices(speed=1e12, count=count),), topology=topology)


@pytest.mark.parametrize("ports", [None, 10, 16, 64])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("cards", [1, 2, 4, 8])
def test_a_team_is_as_far_from_others_as_its_first_rank(cards: int, ranks: int, ports: int | None) -> None:
    """In a fat tree, where cards of other ranks lie between its own."""
    machine = nodes(cards, 128, across="fat-tree", ports=ports)
    src, dst = np.array([*permutations(range(128 // ranks), 2)]).T
    far, bandwidth = machine.team(ranks).link_costs(src, dst)
    latency, whole = machine.link_costs(src * ranks, dst * ranks)
    sharing = np.where(machine.nodes(src * ranks) == machine.nodes(dst * ranks), 1, min(ranks, 8 // cards))
    assert far.tolist() == latency.tolist()
    assert bandwidth.tolist() == (whole / sharing).tolist()


def test_a_tree_has_room_for_all_groups_that_fill_it() -> None:
    """10 ports serve 250 cards: those of 31 nodes of 8."""
    assert nodes(8, 31 * 8, across="fat-tree", ports=10).team(8).count == 31
    Cluster.load("h100-nodes").team(8).sized(4096)  # 32,768 ranks; 64 ports serve 65,536


@pytest.mark.parametrize(("cards", "ranks"), [(3, 2), (3, 4), (5, 2), (6, 4)])
def test_groups_that_share_cards_unevenly_are_refused(cards: int, ranks: int) -> None:
    with pytest.raises(RequestError, match=rf"tensor: groups of {ranks} ranks do not share the {cards} cards of 8 dev"):
        nodes(cards).team(ranks)
    nodes(cards).team(8), nodes(cards).team(16)


def test_cards_apart_are_those_of_a_tree() -> None:
    with pytest.raises(RequestError, match="apart: is of the cards of a fat tree"):
        nodes(8, apart=2)


def test_a_team_is_fast_where_all_its_ranks_are() -> None:
    slow = tuple(Slow(device=k, factor=factor) for k, factor in enumerate([0.5, 0.25, 0.5, 1.0, 0.5, 3.0]))
    found = Disorder(slow=(*slow, Slow(device=6, factor=0.5))).of_teams(2)
    assert found.slow == (Slow(device=0, factor=0.5), Slow(device=2, factor=3.0))


def test_a_rank_that_is_not_there_is_named_as_it_was_given() -> None:
    asked: dict[str, Any] = {"n": 4, "m": 4, "model": {"layers": LAYERS}, "tensor": 2, "cluster": nodes(8)}
    with pytest.raises(RequestError, match="slow: there is no device 99 for 1f1b; take one from 0 to 7"):
        simulate("1f1b", **asked, slow={99: 4.0})
    assert simulate("1f1b", **asked, slow={7: 4.0}).request["slow"] == ["7:4"]


def test_a_cluster_that_is_too_small_is_counted_in_ranks() -> None:
    small = Cluster(devices=(Devices(speed=1e12, count=6),))
    with pytest.raises(RequestError, match="has 6 devices, but 1f1b needs 8"):
        simulate("1f1b", n=4, m=4, model={"layers": LAYERS}, tensor=2, cluster=small)

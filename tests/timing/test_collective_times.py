"""The time of a collective alone: against its messages carried by the engine, closed forms, and other algorithms."""

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import simpy

from cdpsim import Model, RequestError, Stage, simulate
from cdpsim.cluster import Cable, Cluster, Devices, Edge, Link, PairLink, Topology
from cdpsim.program import Op
from cdpsim.program.collectives import COLLECTIVES, PAIRWISE, Algorithm, ExchangeByNodes, candidates, ring_of_cards
from cdpsim.timing.collective_times import (
    alike_group,
    collective_on_links,
    fair_rates,
    fastest_algorithm,
    fastest_in_group,
)
from cdpsim.timing.costs import Wires
from cdpsim.timing.engine.discrete import Carrier
from cdpsim.timing.expand import unroll

US, GB = 1e-6, 1e9
SIZES = (1_000, 3_000_000, 800_000_000)


def cable(latency: float, bandwidth: float, **more: Any) -> Cable:
    return Cable(latency=latency * US, bandwidth=bandwidth * GB, **more)


def joined(count: int, **topology: Any) -> Cluster:
    return Cluster(devices=(Devices(count=count),), topology=Topology(**topology))


BOX = [Edge(between=(k, f"switch {k // 3}"), latency=US, bandwidth=(3 + k) * GB) for k in range(6)]
CLUSTERS = {
    "link": Cluster(devices=(Devices(count=12),), link=Link(latency=3 * US, bandwidth=10 * GB)),
    "links": Cluster(
        devices=(Devices(count=12),),
        link=Link(latency=3 * US, bandwidth=10 * GB, achieved=0.5),
        links=(PairLink(between=(1, 2), bandwidth=GB), PairLink(between=(3, 9), latency=50 * US, one_way=True)),
    ),
    "ring": joined(12, kind="ring", link=cable(2, 5)),
    "mesh": joined(12, kind="mesh", link=cable(2, 5, bandwidth_back=3 * GB)),
    "switch": joined(12, kind="switch", link=cable(2, 5, achieved=0.8)),
    "one card": joined(24, kind="nodes", per_node=8, link=cable(1.7, 300), network=cable(7, 12.5)),
    "meshes": joined(
        16, kind="nodes", per_node=4, inside="mesh", link=cable(2, 50, bandwidth_back=30 * GB), network=cable(7, 12.5)
    ),
    "two cards": joined(
        24, kind="nodes", per_node=8, nics=2, link=cable(1.7, 30), host=cable(1, 20), network=cable(7, 12.5)
    ),
    "all cards": joined(16, kind="nodes", per_node=4, nics=4, link=cable(1.7, 30), network=cable(7, 12.5)),
    "cards in a tree": joined(
        24, kind="nodes", per_node=4, nics=4, across="fat-tree", ports=6, link=cable(1.7, 90), network=cable(1, 50)
    ),
    "fat tree": joined(16, kind="fat-tree", ports=4, link=cable(1.7, 45)),
    "edges": Cluster(
        devices=(Devices(count=6),),
        edges=(*BOX, Edge(between=("switch 0", "switch 1"), latency=4 * US, bandwidth=6 * GB)),
    ),
}


@dataclass
class Played:
    """A collective's messages, and nothing else, carried by the engine that serves `--contention fair`."""

    duration: list[float]
    followers: dict[int, list[int]]
    waits: list[int]
    end: list[float]
    env: simpy.Environment = field(default_factory=simpy.Environment)
    carrier: Carrier | None = None

    def run(self, wires: Wires) -> np.ndarray:
        self.carrier = Carrier(self.env, 0, self.duration, self.finish, wires)
        for first in [message for message, waits in enumerate(self.waits) if not waits]:
            self.begin(first)
        self.env.run()
        return np.array(self.end)

    def begin(self, message: int) -> None:
        assert self.carrier is not None
        self.carrier.take(message)

    def finish(self, message: int) -> None:
        self.end[message] = self.env.now
        for after in self.followers[message]:
            self.waits[after] -= 1
            if not self.waits[after]:
                self.begin(after)


def played(how: Algorithm, cluster: Cluster, members: np.ndarray, size: int) -> np.ndarray:
    """When each message ends, with the dependencies that expansion gives them and the routes of the cluster."""
    layout = unroll(how, len(members))
    src, dst = members[layout.rounds.src], members[layout.rounds.dst]
    latency, alone = cluster.link_costs(src, dst)
    sizes = layout.rounds.parts / how.parts(len(members)) * size
    edges, limit = cluster.shared_edges(src, dst)
    first = np.append(0, np.cumsum((edges >= 0).sum(axis=1)))
    wires = Wires("fair", latency, sizes, first, edges[edges >= 0], limit)
    waits = [0] * len(src)
    followers: dict[int, list[int]] = defaultdict(list)
    for before, after in zip(*np.concatenate([layout.data, layout.room], axis=1).tolist(), strict=True):
        followers[before].append(after)
        waits[after] += 1
    return Played((latency + sizes / alone).tolist(), followers, waits, [0.0] * len(src)).run(wires)


def groups(count: int) -> list[np.ndarray]:
    """Neighbours, some across nodes, some uneven."""
    spread = np.arange(0, count, max(1, count // 6))
    return [np.arange(min(count, 8)), spread, np.array([0, 1, 2, 5, *range(7, count, 4)])]


def algorithms(op: Op, cluster: Cluster, members: np.ndarray) -> list[Algorithm]:
    cards, shares = cluster.cards(members), [Fraction(1), Fraction(1, 2)][: 1 + (op == Op.ALL_TO_ALL)]
    found = (
        how for name in COLLECTIVES for share in shares for how in candidates(op, name, len(members), cards, share)
    )
    return [how for how in dict.fromkeys(found) if how.parts(len(members)) <= 128]  # long trees add nothing new


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_price_is_when_the_last_message_arrives(name: str) -> None:
    """Every algorithm, group and size, to 1e-9; each message, too; and bounds are no more than that."""
    cluster = CLUSTERS[name]
    for members in groups(cluster.count or 0):
        for op in (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE, Op.ALL_TO_ALL):
            for how in algorithms(op, cluster, members):
                one = collective_on_links(how, cluster, alike_group(cluster, members))
                for size in SIZES:
                    end = played(how, cluster, members, size)
                    case = (members.tolist(), op, how, size)
                    assert one.seconds(size) == pytest.approx(end.max(), rel=1e-9), case
                    assert np.allclose(one.times(size)[1], end, rtol=0, atol=1e-9 * end.max()), case
                    fixed, by_byte = one.least
                    bounds = *(fixed + size * by_byte), one.unshared(size)
                    assert max(bounds) <= end.max() * (1 + 1e-9), case


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_best_is_never_slower_than_another(name: str) -> None:
    cluster = CLUSTERS[name]
    for members in groups(cluster.count or 0):
        for op in (Op.ALL_REDUCE, Op.BROADCAST, Op.ALL_TO_ALL):
            for size in SIZES:
                best = fastest_algorithm(op, "best", cluster, members, size)[1]
                others = [fastest_algorithm(op, other, cluster, members, size)[1] for other in COLLECTIVES]
                assert best == min(others), (members.tolist(), op, size)


def spans(trace: Any) -> float:
    """From the first message's start to the last one's end."""
    return float(trace.messages["end"].max() - trace.messages["start"].min())


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", ["links", "one card", "meshes", "two cards", "fat tree"])
def test_in_one_piece_and_in_messages_takes_as_long(name: str, collective: str) -> None:
    """Of a payload that all algorithms cut into whole bytes; with contention and without."""
    k = 12
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=2**11 * 9 * 100),))
    wanted: dict[str, Any] = {"model": model, "cluster": CLUSTERS[name], "collective": collective, "steps": 1, "m": k}
    whole = spans(simulate("multi-dp", 1, **wanted))
    assert spans(simulate("multi-dp", 1, **wanted, expand_collectives=True)) == pytest.approx(whole, rel=1e-9)
    assert spans(simulate("multi-dp", 1, **wanted, contention="fair")) == pytest.approx(whole, rel=1e-9)


def test_groups_whose_ways_are_alike_have_one_price() -> None:
    """Of the same nodes and cards, or edges, as they come; not of others, nor where each pair has links of its own."""
    cluster = CLUSTERS["two cards"]
    places = [cluster.ways_between(np.array(members)) for members in ([0, 1, 8], [9, 10, 16], [0, 7, 8], [8, 0, 1])]
    assert places[0] == places[1]
    assert len(set(places)) == 3
    for name in ("meshes", "fat tree"):
        cluster = CLUSTERS[name]
        inside, alike, across = (cluster.ways_between(np.array(members)) for members in ([0, 1], [4, 5], [0, 4]))
        assert inside == alike != across
        assert cluster.group_link(np.array([0, 1])) == cluster.group_link(np.array([4, 5]))
    cluster = CLUSTERS["links"]
    assert cluster.ways_between(np.array(cluster.links[0].between)) != cluster.ways_between(np.array([4, 5]))
    assert CLUSTERS["link"].ways_between(np.array([0, 1])) == CLUSTERS["link"].ways_between(np.array([4, 5]))


@pytest.mark.parametrize(("name", "cards", "nodes", "per_node"), [("two cards", 2, 3, 8), ("all cards", 4, 4, 4)])
def test_a_ring_s_channels_load_all_cards_alike(name: str, cards: int, nodes: int, per_node: int) -> None:
    """Each channel moves its share of the payload, and each member sends 2 (p-1)/p payloads in all (Patarasuk 2009)."""
    cluster, k, size = CLUSTERS[name], nodes * per_node, 10**9
    members = np.arange(k)
    how = ring_of_cards(Op.ALL_REDUCE, cluster.cards(members))
    assert (how.channels, how.rounds(k)) == (cards, 2 * (k - 1))
    assert np.allclose(how.sends(k) / how.parts(k), 2 * (k - 1) / k)
    crossing: dict[tuple[str, int], float] = defaultdict(float)
    by_channel: dict[int, float] = defaultdict(float)
    for one in how.schedule(k):
        columns = (column.tolist() for column in (one.src, one.dst, how.channel(k, one.first), one.parts))
        for src, dst, channel, parts in zip(*columns, strict=True):
            amount = parts / how.parts(k) * size
            by_channel[channel] += amount
            if src // per_node != dst // per_node:
                share = per_node // cards
                crossing["out", src // share] += amount
                crossing["in", dst // share] += amount
    assert np.allclose(list(by_channel.values()), 2 * (k - 1) * size / cards)
    assert len(by_channel) == cards
    assert np.allclose(list(crossing.values()), 2 * (k - 1) / k * size / cards)
    assert len(crossing) == 2 * nodes * cards


@pytest.mark.parametrize("nics", [1, 2, 4])
@pytest.mark.parametrize("nodes", [2, 3])
def test_rails_are_three_phases(nodes: int, nics: int) -> None:
    """By hand: g-1 rounds of a g-th in a node, 2 (n-1) of an n-th of that along rails that share cards, g-1 again."""
    g, size, link, network = 4, 10**9, cable(1, 100), cable(5, 10)
    cluster = joined(g * nodes, kind="nodes", per_node=g, nics=nics, link=link, network=network)
    seconds = fastest_algorithm(Op.ALL_REDUCE, "hierarchical-rails", cluster, np.arange(g * nodes), size)[1]
    inside = (g - 1) * (2 * US + size / g / (100 * GB))
    along = 2 * (nodes - 1) * (10 * US + size / g / nodes * (g / nics) / (10 * GB))
    assert seconds == pytest.approx(2 * inside + along, rel=1e-12)


@pytest.mark.parametrize("k", [2, 3, 8, 9])
def test_an_all_to_all_at_a_switch_takes_k_minus_1_rounds(k: int) -> None:
    """By hand: k-1 times the latency of two cables and the bytes of a k-th of a k-th."""
    cluster, size = joined(k, kind="switch", link=cable(1, 10)), 10**9
    how, seconds = fastest_algorithm(Op.ALL_TO_ALL, "best", cluster, np.arange(k), size)
    assert how == PAIRWISE
    assert seconds == pytest.approx((k - 1) * (2 * US + size / k**2 / (10 * GB)), rel=1e-12)


@pytest.mark.parametrize("nics", [1, 2, 4])
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_all_to_alls_over_slow_cards(nodes: int, nics: int) -> None:
    """By hand: in a node, and between nodes, where cards are shared; of two levels with all, or with a share, between.

    Pairs of powers of two have g-1 rounds in a node, and then all members of a node exchange with those of another one.
    """
    g, size, k, inside, across = 4, 10**9, 4 * nodes, 100 * GB, nics / 4 * 10 * GB
    cluster = joined(k, kind="nodes", per_node=g, nics=nics, link=cable(1, 100), network=cable(5, 10))
    part, group = size / k**2, alike_group(cluster, np.arange(k))
    pairs = fastest_in_group(Op.ALL_TO_ALL, "ring", cluster, group, size)[1]
    if nodes != 3:
        by_hand = (g - 1) * (2 * US + part / inside) + (k - g) * (10 * US + part / across)
        assert pairs == pytest.approx(by_hand, rel=1e-12)
    for between in (Fraction(1, 2), Fraction(3, 8), Fraction(1)):
        how, seconds = fastest_in_group(Op.ALL_TO_ALL, "best", cluster, group, size, between=between)
        along = (nodes - 1) * (10 * US + g * float(between) * part / across)
        by_hand = along + (g - 1) * (2 * US + nodes * part / inside)
        assert seconds == pytest.approx(by_hand if between < 1 else min(by_hand, pairs), rel=1e-12)
        assert between == 1 or how.layout == ExchangeByNodes(between)
        one_node = alike_group(cluster, np.arange(g))
        how, seconds = fastest_in_group(Op.ALL_TO_ALL, "best", cluster, one_node, size, between=between)
        assert how == PAIRWISE
        assert seconds == pytest.approx((g - 1) * (2 * US + size / g**2 / inside), rel=1e-12)


def test_recursive_doubling_shares_a_card() -> None:
    """By hand: on nodes of eight with one card three rounds stay inside, and then all eight exchange at an eighth."""
    cluster = joined(16, kind="nodes", per_node=8, link=cable(1, 100), network=cable(5, 10))
    seconds = fastest_algorithm(Op.ALL_REDUCE, "recursive-doubling", cluster, np.arange(16), 10**9)[1]
    assert seconds == pytest.approx(3 * (2 * US + 0.01) + 10 * US + 8 * 0.1, rel=1e-12)


def test_a_fat_tree_between_nodes_gives_every_card_its_own_way() -> None:
    """By hand: twelve cards at each of two edge switches exchange with their partners at full rate."""
    cluster = joined(24, kind="nodes", per_node=4, nics=4, across="fat-tree", ports=24, network=cable(1, 10))
    edges, _ = cluster.shared_edges(np.arange(12), np.arange(12, 24))
    limited = edges[edges >= 0]
    assert len(np.unique(limited)) == len(limited) == 12 * 4


def test_rates_are_fair_by_hand() -> None:
    """Bertsekas and Gallager's way: an edge of 3 for two flows, of which one shares another of 1 with a third."""
    edges = np.array([[0, -1], [0, 1], [1, -1]])
    assert fair_rates(edges, np.array([1, 1, 1]), np.array([3.0, 1.0])).tolist() == [2.5, 0.5, 0.5]
    assert fair_rates(edges, np.array([2, 1, 3]), np.array([3.0, 1.0])).tolist() == [1.375, 0.25, 0.25]


def test_a_ring_s_messages_are_counted_in_all_channels() -> None:
    """Before they are laid out: 2 (p-1) rounds of p members in each of four channels, in one step."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=10**6),))
    with pytest.raises(RequestError, match=f"makes {2 * 15 * 16 * 4:,} messages"):
        simulate(
            *("multi-dp", 1),
            m=16,
            steps=1,
            model=model,
            cluster=CLUSTERS["all cards"],
            collective="ring",
            expand_collectives=True,
            max_memory="200 kB",
        )

"""Patterns of traffic by which tests compare the sharing of links with SimGrid: messages, their times and clusters."""

from collections.abc import Iterator
from random import Random

from cdpsim import presets
from cdpsim.cluster import Cable, Cluster, Devices, Edge, Link, PairLink, Topology
from tests.helpers.traffic import Sent

Pattern = tuple[str, Cluster, list[Sent]]
CABLE = Cable(latency=2e-6, bandwidth=1e9)
UNEVEN = Cable(latency=1e-6, bandwidth=1e9, bandwidth_back=2.5e8)
SLOW = Cable(latency=5e-6, bandwidth=3e8)


def joined(kind: str, count: int, **words: object) -> Cluster:
    """Return a cluster of that many devices in a topology."""
    return Cluster(devices=(Devices(count=count),), topology=Topology(kind=kind, **words))  # type: ignore[arg-type]


CLUSTERS = {
    "switch": joined("switch", 8, link=CABLE),
    "uneven-switch": joined("switch", 8, link=UNEVEN),
    "ring": joined("ring", 7, link=CABLE),
    "uneven-ring": joined("ring", 6, link=UNEVEN),
    "mesh": joined("mesh", 6, link=CABLE),
    "nodes": joined("nodes", 12, per_node=4, link=CABLE, host=SLOW, network=SLOW),
    "two-cards": joined("nodes", 12, per_node=4, nics=2, inside="mesh", link=CABLE, network=SLOW),
    "nodes-on-a-tree": joined("nodes", 12, per_node=3, link=CABLE, network=SLOW, across="fat-tree"),
    "fat-tree": joined("fat-tree", 16, link=CABLE),
    "pairs": Cluster(
        devices=(Devices(count=6),),
        link=Link(latency=3e-6, bandwidth=1e9),
        links=(PairLink(between=(0, 1), bandwidth=1e8), PairLink(between=(2, 3), latency=1e-3, one_way=True)),
    ),
    # Three links in a row: a message along all of them has half of the first; the others have the rest of theirs.
    "chain": Cluster(
        devices=(Devices(count=6),),
        edges=(
            Edge(between=(0, "a"), bandwidth=8e8),
            Edge(between=("a", "b"), bandwidth=2e8),
            Edge(between=("b", "c"), bandwidth=6e8),
            Edge(between=("c", 5), bandwidth=9e8),
            *(Edge(between=(device, at), bandwidth=1e9) for device, at in ((1, "a"), (2, "b"), (3, "b"), (4, "c"))),
        ),
    ),
    "a100-nodes": presets.find_cluster("a100-nodes"),
    "pcie-box": presets.find_cluster("pcie-box"),
}


def many(name: str) -> int:
    """Return how many devices of a cluster take part."""
    return CLUSTERS[name].count or {"a100-nodes": 24}.get(name, 8)


def patterns() -> list[Pattern]:
    """Return all patterns, the same on every call."""
    return list(_patterns())


def _patterns() -> Iterator[Pattern]:
    for name, cluster in CLUSTERS.items():
        k = many(name)
        yield f"{name}: all to one", cluster, [Sent(0.0, src, 0, 10**8) for src in range(1, k)]
        some = range(min(k, 8))
        yield f"{name}: all to all", cluster, [Sent(0.0, a, b, 5 * 10**7) for a in some for b in some if a != b]
        yield f"{name}: around", cluster, [Sent(0.01 * i, i, (i + 1) % k, 10**8 + 10**7 * i) for i in range(k)]
        yield f"{name}: across", cluster, [Sent(0.0, i, (i + k // 2) % k, 10**7 * (i + 1)) for i in range(k)]
        for seed in range(2):
            yield f"{name}: at random, {seed}", cluster, _at_random(Random(f"{name} {seed}"), k, 24)
    yield (
        "chain: longest against each",
        CLUSTERS["chain"],
        [
            *(Sent(0.0, src, dst, 10**8) for src, dst in ((0, 5), (1, 2), (3, 4), (4, 5), (0, 1))),
            *(Sent(0.3, src, dst, 3 * 10**8) for src, dst in ((0, 5), (1, 3))),
        ],
    )


def _at_random(random: Random, devices: int, many: int) -> list[Sent]:
    """Draw messages, some at the same time, with sizes over five orders of magnitude."""
    sent = []
    for _ in range(many):
        src, dst = random.sample(range(devices), 2)
        time = random.choice([0.0, 0.125, random.uniform(0, 2)])
        sent.append(Sent(time, src, dst, int(10 ** random.uniform(4, 9))))
    return sent

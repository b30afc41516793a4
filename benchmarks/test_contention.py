"""Time of runs whose messages share links: schedules whose collectives are messages, and random traffic."""

from random import Random
from typing import Any

import pytest

from cdpsim import Cluster, Model, Stage, Trace, presets, simulate
from cdpsim.cluster import Cable, Devices, Topology
from tests.helpers.traffic import Sent, arrivals

CLUSTERS = {
    "a100-nodes": presets.find_cluster("a100-nodes"),
    "fat-tree": Cluster(topology=Topology(kind="fat-tree", link=Cable(latency=1e-6, bandwidth=12.5e9))),
}
MODEL = Model(
    stages=tuple(
        Stage(forward=0.01 + 0.001 * (j % 3), backward=0.02, boundary=10**7, parameters=10**8) for j in range(32)
    )
)
# At least 10^5 messages each: all-reduces of all stages at once; parameters and gradients from device to device.
RUNS = {"multi-dp": 3, "multi-cdp": 52}


@pytest.mark.parametrize("contention", ["none", "fair", "queue"])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", RUNS)
def test_schedules(name: str, cluster: str, contention: str, benchmark: Any) -> None:
    """From a request to a finished run, over four nodes or one tree of 32 devices."""
    options: dict[str, Any] = {"steps": RUNS[name], "model": MODEL, "cluster": CLUSTERS[cluster]}
    options |= {"collective": "ring", "expand_collectives": True} if name == "multi-dp" else {}

    def run() -> Trace:
        return simulate(name, 32, **options, engine="simpy", contention=contention, ignore_memory=True)

    trace = benchmark.pedantic(run, rounds=3, warmup_rounds=1)
    assert len(trace.program.messages) >= 100_000
    benchmark.extra_info["messages"] = len(trace.program.messages)


def at_random(devices: int, each: float, count: int = 100_000) -> list[Sent]:
    """Draw messages between any devices, at random times, of sizes around 100 MB: traffic without any order."""
    random, time, traffic = Random(0), 0.0, []
    for _ in range(count):
        time += random.expovariate(1 / each)
        src, dst = random.sample(range(devices), 2)
        traffic.append(Sent(time, src, dst, int(random.lognormvariate(18.4, 1))))
    return traffic


@pytest.mark.parametrize("contention", ["fair", "queue"])
@pytest.mark.parametrize(("cluster", "devices", "each"), [("a100-nodes", 32, 2.8e-3), ("fat-tree", 128, 2.5e-4)])
def test_traffic(cluster: str, devices: int, each: float, contention: str, benchmark: Any) -> None:
    """With fair shares 60 messages are under way at once on the nodes, 155 on the tree; in a queue ever more wait."""
    machine = Cluster(devices=(Devices(count=devices),), topology=CLUSTERS[cluster].topology)
    traffic = at_random(devices, each)
    arrived = benchmark.pedantic(arrivals, (traffic, machine, contention), rounds=1)
    under_way = sum(end - message.time for end, message in zip(arrived.tolist(), traffic, strict=True))
    benchmark.extra_info["at_once"] = round(under_way / max(arrived))

"""Parameters that hosts, or the disks behind them, have between their uses."""

from itertools import pairwise
from typing import Any

import pytest

from cdpsim import Cluster, Model, RequestError, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.timing.engine import ENGINES

LAYERS, PARAMETERS = 5, 40
HOST, NVME = 40.0, 30.0


def cluster(**links: Any) -> Cluster:
    """Return devices that overlap messages with tasks, on links without latency."""
    return Cluster(devices=(Devices(speed=1e12),), link=Link(bandwidth=100.0), **links)


def model(forward: float = 1.0, backward: float = 2.0) -> Model:
    """Return equal layers of bf16."""
    stage = Stage(forward=forward, backward=backward, activation=10, boundary=2, parameters=PARAMETERS)
    return Model(precision="bf16", stages=(stage,) * LAYERS)


def run(offload: str, shard: int, **asked: Any) -> Any:
    """Run data parallelism with Adam in mixed precision: 12 bytes of state for each parameter of 2 bytes."""
    links: dict[str, Link] = {"host": Link(bandwidth=HOST), "nvme": Link(bandwidth=NVME)}
    usual: dict[str, Any] = {"model": model(), "cluster": cluster(**links), "m": 1, "steps": 1, "offload": offload}
    return simulate("dp", zero=3, shard=shard, optimizer="adam", mixed_precision=True, **(usual | asked))


@pytest.mark.parametrize("offload", ["parameters", "nvme"])
@pytest.mark.parametrize("shard", [1, 2, 4])
def test_devices_have_parameters_only_around_their_uses(offload: str, shard: int) -> None:
    """Hosts have a share of parameters and of the optimizer's state; between steps devices have neither."""
    made = run(offload, shard, m=2, steps=2)
    peaks = made.summary()["peak_memory"][0]
    assert peaks["optimizer"] == 0
    assert peaks["parameters"] <= 3 * PARAMETERS  # the layer in use, and two that are prefetched
    if offload == "parameters":
        assert {row["bytes"] for row in made.summary()["host_memory"]} == {7 * LAYERS * PARAMETERS // shard}
    start, end = ENGINES["simpy"](made.program, made.costs)
    assert (start == made.start).all()
    assert (end == made.end).all()


@pytest.mark.parametrize("shard", [1, 2, 4])
def test_each_link_carries_its_share_once_for_each_use(shard: int) -> None:
    """A fetch is a share over the host's bandwidth; from disks it comes to the host first."""
    for offload, often in (("parameters", 1), ("nvme", 2)):
        rows = run(offload, shard).messages
        fetched = rows[rows["content"] == "fetched"]
        assert len(fetched["size"]) == often * shard * 2 * LAYERS  # forwards and backwards
        assert set(fetched["size"].tolist()) == {PARAMETERS // shard}
        took = {round(float(t), 9) for t in fetched["end"] - fetched["start"]}
        links = (HOST, NVME)[:often]
        assert took == {round(PARAMETERS / shard / bandwidth, 9) for bandwidth in links}


def test_a_slow_disk_sets_the_pace_of_a_forward() -> None:
    """Two links in line: layers begin as fast as the slower one brings them."""
    made = run("nvme", 1, model=model(forward=0.01))
    forwards = made.tasks[(made.tasks["kind"] == "F")]
    starts = sorted(forwards["start"].tolist())
    paces = [later - earlier for earlier, later in pairwise(starts)]
    assert starts[0] == pytest.approx(PARAMETERS / NVME + PARAMETERS / HOST)
    assert paces == pytest.approx([PARAMETERS / NVME] * (LAYERS - 1))


@pytest.mark.parametrize(("offload", "shard"), [("parameters", 1), ("parameters", 4), ("nvme", 2)])
def test_an_update_takes_what_its_share_takes_to_cross(offload: str, shard: int) -> None:
    """Gradients of bf16 go to the host; from disks the state is read, and it and the parameters are written."""
    rows = run(offload, shard).tasks
    updates = rows[rows["kind"] == "U"]
    disks = (2 * 6 * PARAMETERS + PARAMETERS) / NVME if offload == "nvme" else 0.0
    expected = (PARAMETERS / HOST + disks) / shard
    assert (updates["end"] - updates["start"]).tolist() == pytest.approx([expected] * (LAYERS * shard))


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"offload": "parameters"}, "only --zero 3 brings them for each; give --zero 3, or --offload optimizer"),
        ({"offload": "parameters", "zero": 3, "cluster": cluster()}, "parameters on its host, and nothing says how"),
        ({"offload": "nvme", "zero": 3, "cluster": cluster(host=Link(bandwidth=1.0))}, r"with an \[nvme\] link"),
    ],
)
def test_what_hosts_cannot_have_is_refused(asked: dict[str, Any], problem: str) -> None:
    """One line says what is missing."""
    usual: dict[str, Any] = {"model": model(), "optimizer": "adam", "mixed_precision": True}
    usual |= {"cluster": cluster(host=Link(bandwidth=1.0), nvme=Link(bandwidth=1.0))}
    with pytest.raises(RequestError, match=problem):
        simulate("dp", **(usual | asked))

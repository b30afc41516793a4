"""Updates beside the next step, one version back: their exchanges and they themselves are in a stream."""

from typing import Any

import pytest

from cdpsim import Cluster, Model, Stage, simulate
from cdpsim.cluster import Devices, Link

RANKS, STEPS = 4, 6
BANDWIDTH = 1000.0


def makespan(passes: float, exchange: float, update: float, **options: Any) -> float:
    """Return the time of six steps of a micro-batch, of data ranks whose all-reduce in a ring takes so long."""
    size = round(exchange * BANDWIDTH * RANKS / (2 * (RANKS - 1)))
    stage = Stage(forward=passes / 3, backward=2 * passes / 3, parameters=size, update=update or None)
    links = Cluster(devices=(Devices(speed=1e12, overlap="stream"),), link=Link(bandwidth=BANDWIDTH))
    asked: dict[str, Any] = {"model": Model(stages=(stage,)), "cluster": links, "collective": "ring", "steps": STEPS}
    return float(simulate("pipedream-2bw", m=1, replicas=RANKS, **asked, **options).makespan)


@pytest.mark.parametrize(
    ("passes", "exchange", "update"), [(9.0, 6.0, 0.0), (9.0, 12.0, 0.0), (12.0, 12.0, 0.0), (12.0, 9.0, 3.0)]
)
def test_a_step_takes_its_passes_or_its_exchange_whichever_is_longer(
    passes: float, exchange: float, update: float
) -> None:
    """C + 5 max(C, D) + D, where D is the exchange and the update: 60, 81 and 84 s without updates, 84 s with one."""
    options = {"update_in": "stream"} if update else {}
    beside = exchange + update
    expected = passes + (STEPS - 1) * max(passes, beside) + beside
    assert makespan(passes, exchange, update, **options) == pytest.approx(expected)


def test_updates_of_shares_take_a_part_of_the_time() -> None:
    """Passes hide all exchanges but the last: a reduce-scatter, and a rank's quarter of the update."""
    passes, exchange, update = 12.0, 9.0, 3.0
    found = makespan(passes, exchange, update, update_in="stream", zero=1)
    assert found == pytest.approx(passes * STEPS + exchange / 2 + update / RANKS)


def test_updates_in_the_lane_wait_for_their_exchange_there() -> None:
    """As the compute stream makes them in order: C + T + U a step, and nothing is beside anything."""
    assert makespan(12.0, 9.0, 3.0) == pytest.approx(STEPS * (12.0 + 9.0 + 3.0))

"""Which ranks are neighbours: every message is priced between the ranks that a formula says by hand, and no others."""

from random import Random
from typing import Any

import numpy as np
import pytest

from cdpsim import Cluster, Model, Request, evaluate, plan, simulate
from cdpsim.cluster import Cable, Devices, Link, PairLink, Topology
from cdpsim.invariants import violations
from cdpsim.program import Kind, Op
from cdpsim.runs import Run
from cdpsim.studies.plan.bounds import Bounds, case_of
from cdpsim.timing.collective_times import fastest_algorithm

LAYERS = {"name": "small", "layers": {"layers": 8, "width": 64, "heads": 8, "length": 32, "vocabulary": 512}}
UNTIED = {"layers": 8, "width": 64, "heads": 8, "length": 32, "vocabulary": 512, "tied": False}
INSIDE, ACROSS = Cable(latency=1e-6, bandwidth=4e10), Cable(latency=5e-6, bandwidth=2e9)
DATA, PLACES = "tp-cp-dp-pp", "tp-cp-pp-dp"


def nodes(size: int, cards: int = 1) -> Cluster:
    """Nodes of so many devices of 1 TFLOPS."""
    topology = Topology(kind="nodes", per_node=size, nics=cards, link=INSIDE, network=ACROSS)
    return Cluster(devices=(Devices(speed=1e12),), topology=topology)


def run_of(order: str | None, places: int, data: int, cluster: Cluster, tensor: int | None = 2, **more: Any) -> Run:
    """Run two steps of 1F1B on the cluster's nodes."""
    asked: dict[str, Any] = {"n": places, "m": 2 * places, "steps": 2, "replicas": data, "ranks": order}
    asked |= {"tensor": tensor, "collective": "ring", "model": LAYERS} | more
    return simulate(asked.pop("schedule", "1f1b"), cluster=cluster, **asked)


def team_of(order: str, device: int, places: int, data: int) -> int:
    """Return the group of ranks that a device is: of data rank r, place p."""
    r, p = divmod(device, places)
    return p * data + r if order == DATA else r * places + p


@pytest.mark.parametrize("order", [DATA, PLACES])
def test_messages_take_the_links_between_their_ranks(order: str) -> None:
    """Of drawn pipelines, data ranks, groups and nodes: the time of each message by the links of renumbered groups."""
    random = Random(49)
    for _ in range(12):
        places, data, tensor = random.choice([2, 3, 4]), random.choice([2, 3, 4, 8]), random.choice([1, 2, 4])
        size = random.choice([4, 8])
        cluster = nodes(size, random.choice([1, size // tensor]))
        whole = run_of(order, places, data, cluster, tensor).whole
        program, messages, teams = whole.program, whole.program.messages, cluster.team(tensor)
        assert program.devices == places * data
        for row, found in enumerate(whole.costs.duration[program.message_nodes].tolist()):
            bytes_, dst = int(messages.size[row]), int(messages.dst[row])
            if messages.op[row] == Op.P2P:
                ends = (np.array([team_of(order, each, places, data)]) for each in (int(messages.src[row]), dst))
                (latency,), (bandwidth,) = teams.link_costs(*ends)
                expected = latency + bytes_ / bandwidth
            else:
                group = [team_of(order, each, places, data) for each in program.groups[dst].tolist()]
                expected = fastest_algorithm(Op(messages.op[row]), "ring", teams, np.array(sorted(group)), bytes_)[1]
            assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "zbv"])
def test_one_data_rank_stands_for_all_where_these_are_alike(schedule: str) -> None:
    """Folded or not, a run ends at the same times; some are folded in either order, and some are not."""
    random, folded = Random(50), set[tuple[str, bool]]()
    for number in range(16):
        order, places, data = (DATA, PLACES)[number % 2], random.choice([2, 4]), random.choice([2, 3, 4])
        cluster = nodes(random.choice([2, 4, 6, 8]))
        run = run_of(order, places, data, cluster, random.choice([1, 2]), schedule=schedule)
        whole, one = run.whole, run.program
        folded.add((order, one.fold > 1))
        assert run.makespan == pytest.approx(whole.makespan, rel=1e-12)
        for device in range(one.devices):
            mine, its = (each.end[np.flatnonzero(each.program.tasks.device == device)] for each in (run, whole))
            assert sorted(mine) == pytest.approx(sorted(its), rel=1e-12)
        assert not violations(whole)
    assert folded >= {(DATA, True), (PLACES, True)} and len(folded) > 2


@pytest.mark.parametrize(("schedule", "places", "data"), [("dp", 1, 4), ("1f1b", 4, 1)])
def test_orders_are_equal_for_one_place_or_one_data_rank(schedule: str, places: int, data: int) -> None:
    runs = [run_of(order, places, data, nodes(4), schedule=schedule, slow={5: 2.0}) for order in (DATA, PLACES, None)]
    assert all(np.array_equal(runs[0].end, run.end) for run in runs)


@pytest.mark.parametrize(("order", "boundary", "summed"), [(DATA, ACROSS, INSIDE), (PLACES, INSIDE, ACROSS)])
def test_two_nodes_of_eight(order: str, boundary: Cable, summed: Cable) -> None:
    """Two places of four data ranks of two ranks: either a place is a node, or a pipeline is inside one.

    A message takes two cables; the two ranks of a group share a node's card. A ring of 4 groups takes 3 rounds of a
    quarter, twice.
    """

    def seconds(cable: Cable, size: float) -> float:
        return 2 * cable.latency + size * (2 if cable is ACROSS else 1) / cable.bandwidth

    run = run_of(order, 2, 4, nodes(8), model={"layers": UNTIED})
    times, messages = run.costs.duration[run.program.message_nodes], run.program.messages
    sent = 32 * 64 * 2 // 2  # a rank's share of a boundary
    assert times[messages.op == Op.P2P] == pytest.approx(seconds(boundary, sent), rel=1e-12)
    sums = np.flatnonzero(messages.op == Op.ALL_REDUCE)
    assert len(sums)
    for row in sums.tolist():
        assert times[row] == pytest.approx(6 * seconds(summed, int(messages.size[row]) / 4), rel=1e-12)


def test_data_ranks_are_neighbours_where_groups_of_ranks_share_tasks() -> None:
    """Megatron-LM's order where a model is split, and places as neighbours where it is not."""
    for tensor, usual, other in ((2, DATA, PLACES), (1, PLACES, DATA)):
        made, same, unlike = (run_of(order, 2, 4, nodes(8 // (3 - tensor)), tensor) for order in (None, usual, other))
        assert np.array_equal(made.end, same.end) and made.makespan != unlike.makespan
        assert "ranks" not in made.request and Request(**unlike.request)["ranks"] == other


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("order", [DATA, PLACES])
def test_a_slow_rank_is_one_of_the_machine(order: str, tensor: int) -> None:
    """It slows the device whose group it is of, and a record names it."""
    places, data = 3, 4
    plain = run_of(order, places, data, nodes(8), tensor).whole
    for rank in range(0, places * data * tensor, 5):
        run = run_of(order, places, data, nodes(8), tensor, slow={rank: 3.0})
        tasks, before = run.program.tasks, plain.costs.duration[: len(plain.program.tasks)]
        longer = run.costs.duration[: len(tasks)] > 1.001 * before
        (device,) = set(tasks.device[longer].tolist())
        assert team_of(order, device, places, data) == rank // tensor
        assert run.request["slow"] == [f"{rank}:3"]
        assert np.array_equal(simulate(**run.request).end, run.end)
        stopped = run_of(order, places, data, nodes(8), tensor, stop=[f"{rank}:0 s:1 s"])
        assert stopped.start[: len(tasks)][tasks.device == device].min() >= 1
        assert stopped.request["stop"] == [f"{rank}:0 s:1 s"]


def test_unlike_devices_and_links_of_pairs_are_those_of_the_ranks() -> None:
    """Two places of two data ranks: devices 0 and 1 are the first place's, as ranks 0 and 2 are without the order."""
    groups = tuple(Devices(speed=speed, memory=memory, count=1) for speed, memory in ((1e12, 10**9), (2e12, 10**8)) * 2)
    links = (PairLink(between=(0, 2), bandwidth=1e9), PairLink(between=(1, 3), bandwidth=2e9))
    cluster = Cluster(devices=groups, link=Link(bandwidth=1e10), links=links)
    stages = [{"forward": "1 GFLOP", "backward": "2 GFLOP", "boundary": 1000, "parameters": 1000}] * 2
    run = run_of(DATA, 2, 2, cluster, model={"stages": stages}, tensor=None, ignore_memory=True)
    tasks, messages, times = run.program.tasks, run.program.messages, run.costs.duration
    forwards, single = np.flatnonzero(tasks.kind == Kind.F), np.flatnonzero(messages.op == Op.P2P)
    assert times[forwards] == pytest.approx(np.array([1e-3, 1e-3, 5e-4, 5e-4])[tasks.device[forwards]], rel=1e-9)
    assert run.device_memory.tolist() == [1e9, 1e9, 1e8, 1e8]
    taken = np.array([1e-6, 5e-7])[messages.src[single] // 2]
    assert times[len(tasks) + single] == pytest.approx(taken, rel=1e-9)


def test_collectives_as_messages_are_those_of_their_ranks() -> None:
    """Tied embeddings are summed over two places, whose data ranks are not in a row: node by node, as a ring goes."""
    for order in (DATA, PLACES):
        run, expanded = (run_of(order, 2, 4, nodes(4), expand_collectives=given).whole for given in (False, True))
        assert not violations(expanded)
        assert not violations(run_of(order, 2, 4, nodes(4), contention="fair"))
        (group,) = [k for k, members in enumerate(run.program.groups) if len(members) == 8]
        members, messages = run.program.groups[group].tolist(), expanded.program.messages
        (row, *_) = np.flatnonzero((run.program.messages.op == Op.ALL_REDUCE) & (run.program.messages.dst == group))
        pieces = (messages.stage == run.program.messages.stage[row]) & (messages.step == 0)
        teams = [team_of(order, each, 2, 4) for each in range(8)]
        around = sorted(members, key=teams.__getitem__)
        ways = {*map(frozenset, zip(messages.src[pieces].tolist(), messages.dst[pieces].tolist(), strict=True))}
        assert ways == {*map(frozenset, zip(around, [*around[1:], around[0]], strict=True))}


def test_plans_ask_both_orders_and_bounds_hold() -> None:
    """Each of two candidates has the step of its request."""
    model = Model.from_builtins(LAYERS, "model")
    asked: dict[str, Any] = {"model": model, "cluster": nodes(4), "tensor": [2], "ranks": [DATA, PLACES]}
    found = plan(devices=16, batch=8, schedules=["1f1b"], n=[2], replicas=[4], recompute=["none"], **asked)
    step = {row.to_builtins()["request"].get("ranks"): float(row.measured["step"]) for row in found.rows}
    for order, seconds in step.items():
        request = {"schedule": "1f1b", "n": 2, "m": 2, "replicas": 4, "tensor": 2, "ranks": order}
        assert seconds == pytest.approx(float(evaluate(**request, model=LAYERS, cluster=nodes(4)).step), rel=1e-9)
    assert {*step} == {DATA, PLACES} and step[DATA] != step[PLACES]


@pytest.mark.parametrize("order", [DATA, PLACES, None])
def test_a_bound_is_of_the_devices_that_a_data_rank_has(order: str | None) -> None:
    """Where the links of nodes are slower inside, and where the first devices are slow, others than neighbours."""
    slow_inside = Topology(kind="nodes", per_node=8, link=ACROSS, network=INSIDE)
    groups = tuple(Devices(speed=speed, count=2) for speed in (1e11, 1e12))
    stages = [{"forward": "1 GFLOP", "backward": "2 GFLOP", "boundary": 10**6, "parameters": 1000}] * 2
    for cluster in (Cluster(devices=(Devices(speed=1e12),), topology=slow_inside), Cluster(devices=groups)):
        data = 8 if cluster.topology else 2
        asked: dict[str, Any] = {"schedule": "1f1b", "n": 2, "m": 2, "ranks": order, "cluster": cluster}
        asked |= {"model": {"stages": stages}}
        least = Bounds([case_of(asked, data)]).of(0, asked | {"replicas": data})
        assert least.step <= evaluate(**asked, replicas=data).step <= 1.01 * least.step

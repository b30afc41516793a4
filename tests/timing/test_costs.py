"""Costs by hand: times of tasks, of messages by latency and bandwidth, of collectives by rounds, of releases."""

from typing import Any, get_args

import numpy as np
import pytest

from cdpsim import Cluster, Model, Stage, Trace, simulate
from cdpsim.cluster import Devices, Link, PairLink
from cdpsim.cluster.topology import Cable, Topology
from cdpsim.files.units import Work
from cdpsim.program import Kind
from cdpsim.request.options import CollectiveName

SHORT = Link(latency=1e-5, bandwidth=1e9)
SLOW = Link(latency=0.5, bandwidth=100.0)
TWO = Model(
    stages=(
        Stage(forward=1.0, backward=2.0, boundary=50, parameters=200, gradients=100),
        Stage(forward=3.0, backward=4.0, parameters=400),
    )
)


def rows(trace: Trace, table: str, **where: object) -> dict[str, np.ndarray]:
    """The rows of a table that have these values."""
    columns = getattr(trace, table)
    wanted = np.logical_and.reduce([columns[name] == value for name, value in where.items()])
    return {name: column[wanted] for name, column in columns.items()}


def test_the_slot_model_counts_in_integers() -> None:
    """Unit costs give integer times and sizes."""
    trace = simulate("multi-cdp", 3)
    assert {trace.tasks["start"].dtype, trace.messages["end"].dtype, trace.memory["time"].dtype} == {np.dtype(np.int64)}


def test_a_pipeline_of_two_uneven_stages_by_hand() -> None:
    """F0 1 s, boundary 0.5 + 50/100 s, F1 3 s, B1 4 s, boundary 1 s, B0 2 s; micro-batch 1 half a pass later."""
    trace = simulate("pp-cdp", 2, steps=1, model=TWO, cluster=Cluster(link=SLOW))
    tasks = {
        (kind, i, j): (start, end)
        for kind, i, j, start, end in zip(
            *(trace.tasks[name].tolist() for name in ("kind", "micro_batch", "stage", "start", "end")), strict=True
        )
    }
    assert tasks["F", 0, 0] == (0, 1)
    assert tasks["F", 0, 1] == (2, 5)
    assert tasks["B", 0, 1] == (5, 9)
    assert tasks["B", 0, 0] == (10, 12)
    # Released at 10/2 = 5; device 1 is busy with micro-batch 0 until 9; device 0 does B(0) before B(1).
    assert tasks["F", 1, 0] == (5, 6)
    assert tasks["F", 1, 1] == (9, 12)
    assert tasks["B", 1, 1] == (12, 16)
    assert tasks["B", 1, 0] == (17, 19)
    sent = rows(trace, "messages", content="activation")
    assert sent["start"].tolist() == [1, 6]
    assert sent["end"].tolist() == [2, 7]


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        ("ring", 4 * (0.5 + 300 / 3 / 100)),  # 2(k-1) rounds of a third
        ("tree", 4 * (0.5 + 300 / 100)),  # 2 ceil(log2 3) rounds of all
        ("recursive-doubling", 3 * (0.5 + 300 / 100)),  # floor(log2 3) + 2
    ],
)
def test_an_all_reduce_takes_its_rounds(collective: CollectiveName, expected: float) -> None:
    """Three members and 300 bytes; a round is latency and its part of the payload over the bandwidth."""
    stage = Stage(forward=1.0, backward=1.0, parameters=300)
    model = Model(stages=(stage,) * 3)
    trace = simulate("multi-dp", 3, model=model, cluster=Cluster(link=SLOW), collective=collective)
    message = rows(trace, "messages", op="all_reduce")
    assert np.allclose(message["end"] - message["start"], expected)


def test_broadcasts_and_reductions_are_trees() -> None:
    """Among three members they take two rounds each, with every algorithm of all-reduces."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=300, gradients=100),) * 3)
    for name in ("ring", "tree", "double-tree", "hierarchical"):
        trace = simulate("zero-dp", 3, model=model, cluster=Cluster(link=SLOW), collective=name)
        for op, size in (("broadcast", 300), ("reduce", 100)):
            message = rows(trace, "messages", op=op)
            assert set(message["rounds"].tolist()) == {2}
            assert np.allclose(message["end"] - message["start"], 2 * (0.5 + size / 100))


def two_nodes_of_four() -> Cluster:
    """Eight devices: inside a node 1 us and 100 GB/s, between nodes 10 us and 1 GB/s."""
    wide, narrow = Cable(latency=5e-7, bandwidth=1e11), Cable(latency=5e-6, bandwidth=1e9)  # two hops by a switch
    topology = Topology(kind="nodes", per_node=4, link=wide, network=narrow, nics=4)
    return Cluster(devices=(Devices(count=8),), topology=topology)


def test_a_hierarchical_all_reduce_uses_the_links_inside_nodes() -> None:
    """Two rounds down and two up inside, all of it; a ring of two between, two halves."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=10**6),) * 8)
    trace = simulate("multi-dp", 8, model=model, cluster=two_nodes_of_four(), collective="hierarchical")
    expected = 4 * (1e-6 + 1e6 / 1e11) + 2 * (1e-5 + 0.5e6 / 1e9)
    assert np.allclose(trace.messages["end"] - trace.messages["start"], expected, rtol=1e-9)
    assert set(trace.messages["rounds"].tolist()) == {6}
    # Three of a node reach its first member, one of them by way of another; that one sends two halves, and back to two.
    sent = [row["bytes"] / (3 * 8 * 10**6) for row in trace.summary()["bytes_sent"]]
    assert sent == [3.0, 2.0, 1.0, 1.0] * 2


@pytest.mark.parametrize(
    ("size", "cluster", "like"),
    [
        (1_000, Cluster(link=SHORT), "recursive-doubling"),  # latency counts: log2 8 rounds
        (100_000_000, Cluster(link=SHORT), "halving-doubling"),  # bandwidth counts
        (1_000, two_nodes_of_four(), "recursive-doubling"),  # two rounds inside, one between
        (100_000_000, two_nodes_of_four(), "hierarchical-rails"),  # all four cards of a node
    ],
    ids=["small", "large", "small in nodes", "large in nodes"],
)
def test_the_best_collective_is_the_cheapest_for_its_size(size: int, cluster: Cluster, like: str) -> None:
    """No other name takes less time."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=size),) * 8)
    wanted: dict[str, Any] = {"model": model, "cluster": cluster, "steps": 1}
    traces = {name: simulate("multi-dp", 8, **wanted, collective=name) for name in get_args(CollectiveName)}
    taken = {name: float((t.messages["end"] - t.messages["start"]).max()) for name, t in traces.items()}
    assert taken["best"] == min(taken.values()) == taken[like]
    assert traces["best"].summary()["bytes_sent"] == traces[like].summary()["bytes_sent"]


def test_broadcasts_choose_too() -> None:
    """In parts if they are large: 2 rounds more, and 2 * 7/8 instead of 3 payloads."""
    for size, rounds in ((1_000, 3), (100_000_000, 6)):
        model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=size),) * 8)
        cluster = Cluster(link=SHORT)
        trace = simulate("zero-dp", 8, model=model, cluster=cluster, collective="best")
        assert set(trace.messages["rounds"].tolist()) == {rounds}


def test_a_pair_may_have_a_link_of_its_own() -> None:
    """One direction of one pair; a collective is as slow as its worst pair."""
    own = PairLink(between=(0, 1), latency=7.0, one_way=True)
    model = Model(stages=(Stage(forward=1.0, backward=1.0, boundary=100, parameters=100),) * 2)
    trace = simulate("pp-cdp", 2, model=model, cluster=Cluster(link=SLOW, links=(own,)))
    forth, back = (rows(trace, "messages", src=src) for src in (0, 1))
    assert np.allclose(forth["end"] - forth["start"], 8.0)
    assert np.allclose(back["end"] - back["start"], 1.5)
    trace = simulate("multi-dp", 2, model=model, cluster=Cluster(link=SLOW, links=(own,)))
    assert np.allclose(trace.messages["end"] - trace.messages["start"], 8.0)


def test_a_device_s_speed_turns_work_into_time() -> None:
    """Uneven devices, work in FLOP."""
    model = Model(stages=(Stage(forward=Work(6.0), backward=Work(12.0)),) * 2)
    cluster = Cluster(devices=(Devices(count=1, speed=2.0), Devices(count=1, speed=3.0)))
    trace = simulate("pp-cdp", 2, model=model, cluster=cluster)
    for device, speed in ((0, 2.0), (1, 3.0)):
        forward = rows(trace, "tasks", device=device, kind="F")
        assert set((forward["end"] - forward["start"]).tolist()) == {6.0 / speed}


def test_a_release_is_a_share_of_the_micro_batch_s_own_pass() -> None:
    """Micro-batch i waits i/N of the time that its own tasks take on its own devices."""
    model = Model(stages=(Stage(forward=Work(1.0), backward=Work(2.0)),) * 2)
    cluster = Cluster(devices=(Devices(count=1, speed=1.0), Devices(count=1, speed=0.5)))
    trace = simulate("multi-cdp", 2, model=model, cluster=cluster)
    assert rows(trace, "tasks", kind="F", step=0, stage=0)["start"].tolist() == [0.0, 12.0 / 2]


def test_an_update_takes_no_time() -> None:
    """Under every cost."""
    trace = simulate("multi-cdp", 2, model=TWO, cluster=Cluster(link=SLOW))
    updates = rows(trace, "tasks", kind=Kind.U.name)
    assert len(updates["start"]) == 3 * 2
    assert (updates["start"] == updates["end"]).all()


def test_the_pyramid_takes_as_many_devices_as_uneven_stages_need() -> None:
    """Spec section 5: f = 5, 5 and b = 3, 6 need 2 and 2, where N-j would be 2 and 1."""
    model = Model(stages=(Stage(forward=5.0, backward=3.0), Stage(forward=5.0, backward=6.0)))
    trace = simulate("mp-cdp", 2, model=model, steps=6, rule="cdp-v1")
    assert trace.summary()["devices"] == 4
    starts = rows(trace, "tasks", kind="F", stage=0)["start"]
    assert np.diff(starts).tolist() == [9.5] * 11  # no task waits: a pass of 19 s, two micro-batches


def test_fresher_parameters_may_have_to_be_waited_for() -> None:
    """Uneven costs make CDP-v2 wait: theta_1[1] is there 1.5 s after F(0,1,1) could start."""
    model = Model(stages=(Stage(forward=5.0, backward=3.0), Stage(forward=5.0, backward=6.0)))
    trace = simulate("mp-cdp", 2, model=model, steps=2)
    first = rows(trace, "tasks", kind="F", stage=1, step=1, micro_batch=0)
    made = rows(trace, "tasks", kind="U", stage=1, step=0)
    assert made["end"].tolist() == first["start"].tolist() == [9.5 + 5 + 5 + 6]


def test_a_state_that_moves_weighs_what_it_carries() -> None:
    """zero-cdp: one or two versions, a partial sum, and the optimizer state."""
    model = Model(stages=(Stage(forward=1.0, backward=1.0, parameters=100, gradients=10, optimizer=1),) * 3)
    trace = simulate("zero-cdp", 3, model=model)
    assert set(trace.messages["size"].tolist()) <= {101, 111, 201, 211}
    first = rows(trace, "messages", step=-1)
    assert set(first["size"].tolist()) == {101}


def test_the_pyramid_moves_the_optimizer_state_alone() -> None:
    """Its own message, of the optimizer's bytes; none where the optimizer keeps nothing."""
    stage = Stage(forward=1.0, backward=1.0, parameters=100, optimizer=7)
    moved = rows(simulate("mp-cdp", 3, model=Model(stages=(stage,) * 3)), "messages", content="state")
    assert set(moved["size"].tolist()) == {7}
    plain = Stage(forward=1.0, backward=1.0, parameters=100)
    still = rows(simulate("mp-cdp", 3, model=Model(stages=(plain,) * 3)), "messages", content="state")
    assert not len(still["size"])

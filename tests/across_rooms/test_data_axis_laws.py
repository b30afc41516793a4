"""Laws of the data axis that relate several runs: one rank, free links, bytes, bandwidth and algorithms."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpsim import Cluster, Model, Stage, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.invariants import violations
from cdpsim.program import Op
from cdpsim.program.collectives import ALL_REDUCE
from cdpsim.runs import Run
from tests.helpers.data_axis import FLUSHING

POLICIES = range(4)  # stages of ZeRO


@cache
def model(n: int, size: int = 12_000) -> Model:
    """Uneven layers whose bytes two, three and four ranks share evenly; updates take no time."""
    stages = (
        Stage(
            forward=1.0 + j,
            backward=2.5 - j / 4,
            weight_backward=1.0,
            activation=10,
            boundary=4,
            parameters=size * (j + 1),
            optimizer=6 * size,
        )
        for j in range(n)
    )
    return Model(stages=tuple(stages))


def run_of(name: str, zero: int, bandwidth: float = 1e4, **options: Any) -> Run:
    """Run a schedule on devices that are alike, whose links take a while; ranks are `shard` from ZeRO-1 on."""
    shape = FLUSHING[name]
    cluster = Cluster(devices=(Devices(),), link=Link(bandwidth=bandwidth))
    ranks = options.pop("ranks", 2)
    split: dict[str, Any] = {"shard": ranks} if zero else {"replicas": ranks}
    return simulate(name, **shape, model=model(shape["n"]), cluster=cluster, zero=zero, **split | options)


def sent(run: Run) -> int:
    """The bytes that all devices send to sum gradients and to gather parameters."""
    traffic = run.messages
    among = np.isin(traffic["content"], ["gradient", "parameters"])
    return int(traffic["size"][among].sum())


@pytest.mark.every_case
@pytest.mark.parametrize("zero", POLICIES[1:])
@pytest.mark.parametrize("name", ["dp", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1"])
def test_one_rank_does_the_same_under_every_policy(name: str, zero: int) -> None:
    """Nothing is summed or gathered, and times and memory are those of copied states."""
    run, copied = run_of(name, zero, ranks=1, reduce="last"), run_of(name, 0, ranks=1)
    assert (run.program.messages.op == Op.P2P).all()
    assert np.array_equal(run.start, copied.start) and np.array_equal(run.end, copied.end)
    assert run.summary()["peak_memory"] == copied.summary()["peak_memory"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_one_rank_sums_with_the_other_copies_of_its_stages(zero: int) -> None:
    """Where replicas share nothing, or a pipeline has two copies of a stage, these have the sums of copied states."""
    for name, replicas in (("dp", 3), ("chimera", 1)):
        asked: dict[str, Any] = {"ranks": 1, "replicas": replicas, "reduce": "last"}
        run = run_of(name, zero, **asked, buckets=None if zero == 3 else "none")
        copied = run_of(name, 0, **asked, buckets="none") if replicas > 1 else run_of(name, 1, **asked)
        assert np.count_nonzero(run.program.messages.op == Op.ALL_REDUCE) > 0
        assert np.array_equal(run.end, copied.end)


@pytest.mark.parametrize("name", FLUSHING)
def test_free_links_make_all_policies_end_together(name: str) -> None:
    """With messages and updates that take no time, it is only the tasks that do."""
    ends = {
        run_of(name, zero, float("inf"), ranks=ranks, reduce=when).makespan
        for zero in POLICIES
        for ranks in (1, 3)
        for when in (None, "end")
        if zero or ranks > 1 or when is None  # else there is nothing to sum
    }
    assert len(ends) == 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rings_send_as_much_for_zero_1_as_for_ddp_and_half_more_for_zero_3(ranks: int) -> None:
    """2 (k-1) Psi over all ranks a step, and 3 (k-1) Psi with one micro-batch; Rajbhandari et al. 2020, section 7.

    New parameters of the last step are not gathered, so two steps have one gather.
    """
    shared: dict[str, Any] = {"ranks": ranks, "collective": "ring", "expand_collectives": True, "m": 1}
    psi = (ranks - 1) * sum(stage.parameters for stage in model(3).stages)
    for steps in (1, 2, 3):
        volumes = [_sent_by_dp(zero, steps, shared) for zero in POLICIES]
        assert volumes == [2 * steps * psi, (2 * steps - 1) * psi, (2 * steps - 1) * psi, 3 * steps * psi]


def _sent_by_dp(zero: int, steps: int, shared: dict[str, Any]) -> int:
    options = dict(shared)
    ranks, asked = options.pop("ranks"), dict[str, Any](model=model(3), n=3, steps=steps)
    cluster = Cluster(devices=(Devices(),), link=Link(bandwidth=1e4))
    split: dict[str, Any] = {"shard": ranks} if zero else {"replicas": ranks}
    return sent(simulate("dp", **asked, cluster=cluster, zero=zero, **split, **options))


@pytest.mark.every_case
@pytest.mark.parametrize("zero", POLICIES)
@pytest.mark.parametrize("name", FLUSHING)
def test_more_bandwidth_never_ends_later(name: str, zero: int) -> None:
    """The order of messages in a stream does not depend on times."""
    ends = [run_of(name, zero, bandwidth).makespan for bandwidth in (3e3, 1e4, 4e4, 1e6, float("inf"))]
    assert ends == sorted(ends, reverse=True)


@given(st.sampled_from(sorted(FLUSHING)), st.integers(0, 3), st.sampled_from([0.5, 2.0, 4.0]))
def test_slower_devices_and_links_take_longer_by_as_much(name: str, zero: int, factor: float) -> None:
    """All times scale with those of tasks and links; by powers of two exactly."""
    shape, asked = FLUSHING[name], dict[str, Any]({"zero": zero, "shard" if zero else "replicas": 2})
    stages = [
        Stage(forward=f * factor, backward=2 * f * factor, weight_backward=f * factor, activation=10, parameters=12_000)
        for f in range(1, 1 + shape["n"])
    ]
    once = [
        Stage(forward=float(f), backward=2.0 * f, weight_backward=float(f), activation=10, parameters=12_000)
        for f in range(1, 1 + shape["n"])
    ]
    slow, fast = (
        simulate(name, **shape, **asked, model=Model(stages=tuple(each)), cluster=Cluster(link=Link(bandwidth=wide)))
        for each, wide in ((stages, 1e4 / factor), (once, 1e4))
    )
    assert np.array_equal(slow.start, fast.start * factor)


@pytest.mark.parametrize("collective", sorted(ALL_REDUCE))
def test_sums_in_groups_go_on_across_them_by_every_algorithm(collective: str) -> None:
    """A tree's root sends nothing before it has received, and has its own part of the sum all the same."""
    for zero, replicas, shard in ((1, 2, 3), (2, 3, 2), (3, 2, 2)):
        more: dict[str, Any] = {"replicas": replicas, "ranks": shard, "expand_collectives": True}
        run = run_of("dp", zero, collective=collective, clip=True, steps=1, **more)
        assert violations(run) == {}


def test_parameters_that_stay_in_smaller_groups_come_from_these() -> None:
    """Backwards gather from the ranks that have shares of what their forwards gathered, in every stage's groups."""
    for name in ("dp", "1f1b"):
        run = run_of(name, 3, ranks=4, reshard=2)
        assert run.program.fold > 1
        for each in (run.whole, replace(run, unfold=None)):
            gathers = each.program.messages.dst[each.program.messages.op == Op.ALL_GATHER]
            assert {len(each.program.ranks_of(group)) for group in gathers.tolist()} == {2, 4}
            assert violations(each) == {}


@pytest.mark.parametrize("overlap", ["full", "stream", "none"])
def test_no_update_comes_before_the_last_sum_of_its_device(overlap: str) -> None:
    """An optimizer's step is one, also where the largest sum is not the last one that is made."""
    stages = tuple(Stage(forward=1.0, backward=1.0, parameters=size) for size in (10, 10, 400_000, 10))
    cluster = Cluster(devices=(Devices(overlap=overlap),), link=Link(bandwidth=1e4))
    for when in ("end", "last"):
        asked: dict[str, Any] = {"zero": 1, "shard": 2, "reduce": when, "buckets": "1 B", "steps": 1, "m": 1}
        run = simulate("dp", 4, model=Model(stages=stages), cluster=cluster, **asked)
        program = run.program
        sums = program.message_nodes.start + np.flatnonzero(program.messages.op == Op.REDUCE_SCATTER)
        assert run.start[program.compute : program.message_nodes.start].min() == run.end[sums].max()


@pytest.mark.every_case
@pytest.mark.parametrize("zero", POLICIES[1:])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_a_stage_whose_directions_share_a_device_is_summed_by_its_ranks_alone(n: int, zero: int) -> None:
    """Of an odd number of devices the middle one has its stage in both directions, and no other device has it.

    By hand: two ranks of every other stage scatter their sums, and add up each share with one device elsewhere.
    """
    run = simulate("gems", n, m=4, steps=1, model=model(n), cluster=Cluster(link=Link()), shard=2, zero=zero)
    one = getattr(run, "one", run)
    assert violations(one) == {}
    summed = [message for message in run.messages if message.content == "gradient"]
    across = [message.stage for message in summed if message.op == "all_reduce"]
    assert sorted(across) == sorted(2 * [stage for stage in range(n) if stage != n // 2])
    inside = {message.stage for message in summed if message.op == "reduce_scatter"}
    assert inside == set(range(n))
    own = max(message.end for message in summed if message.stage == n // 2)
    updates = {task.start for task in run.tasks if task.kind == "U" and task.stage == n // 2}
    assert updates == {own}  # whatever other stages still exchange

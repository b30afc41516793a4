"""Memory and traffic of data ranks against published tables and formulas: ZeRO's Table 1, volumes."""

from collections import Counter
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from cdpsim import Cluster, Model, Request, Run, Stage, Tie, simulate
from cdpsim.api import assemble
from cdpsim.cluster import Devices, Link
from cdpsim.invariants import violations
from cdpsim.model import Recipe
from cdpsim.program import Op

LINKS = Cluster(devices=(Devices(speed=1e12),), link=Link(latency=0.0, bandwidth=1e12))

SMALLEST = 7_500_000_000  # parameters of the first model of ZeRO's table (Rajbhandari et al. 2020)
LAYERS = 20


def states_in_bytes(parameters: int, zero: int, k: int) -> Fraction:
    """2 bytes of weights, 2 of gradients, 12 of Adam in mixed precision; the last three, two, one of them are split."""
    split = {0: 0, 1: 12, 2: 14, 3: 16}[zero]
    return parameters * (16 - split + Fraction(split, k))


def layers_of(parameters: int) -> Model:
    """Equal layers that have nothing but parameters; their updates take time, so that there is a moment before them."""
    layer = Stage(forward=1.0, backward=2.0, parameters=2 * parameters // LAYERS, update=1.0)
    recipe = Recipe(optimizer="adam", mixed_precision=True)
    return Model(stages=(layer,) * LAYERS, precision="fp16", training=recipe)


def sharing(k: int, zero: int) -> dict[str, Any]:
    """Return the options by which k ranks share what a stage of ZeRO splits."""
    return {"zero": zero, "shard": k} if zero else {"zero": 0, "replicas": k}


def total_peak(run: Run) -> int:
    return max(int(row["total"]) for row in run.peak_memory)


@pytest.mark.every_case
@pytest.mark.parametrize("k", [1, 4, 16, 64])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_peaks_are_the_states_and_what_is_on_its_way(zero: int, k: int) -> None:
    """The states, and of layers whose gradients are not reduced yet: all of a gradient in place of a k-th.

    Stage 2, when the first layer's backward begins: its gradient, and that of the second one, which is on its way.
    Stage 3, in the second layer's backward: its parameters, those of the first one, and its gradient; the first layer's
    gradient is not there yet. With one rank nothing is on its way.
    """
    parameters = SMALLEST
    run = simulate("dp", m=1, model=layers_of(parameters), cluster=LINKS, ignore_memory=True, **sharing(k, zero))
    layer, share = 2 * parameters // LAYERS, 2 * parameters // LAYERS // k
    beyond = 0 if k == 1 else {0: 0, 1: 0, 2: 2 * layer - 2 * share, 3: 3 * layer - 2 * share}[zero]
    assert total_peak(run) == states_in_bytes(parameters, zero, k) + beyond


# Volumes (Rajbhandari et al. 2020, section 7): what a rank sends in a step.
ODD = ((101, 40), (13, 13), (64, 17), (1, 8))  # bytes of parameters and of gradients, layer by layer


def odd_layers() -> Model:
    stages = (Stage(forward=1.0, backward=2.0, parameters=w, gradients=q, optimizer=7) for w, q in ODD)
    return Model(stages=tuple(stages))


def sent_in_a_step(**options: Any) -> Fraction:
    """Return the bytes that the first rank sends in the second step of three."""
    sent = []
    for steps in (3, 2):
        alone = options.get("shard", 1) == options.get("replicas", 1) == 1
        ring: Any = None if alone else "ring"
        run = simulate("dp", model=odd_layers(), cluster=LINKS, steps=steps, collective=ring, **options)
        sent.append(Fraction(run.summary()["bytes_sent"][0]["bytes"]).limit_denominator(1000))
    return sent[0] - sent[1]


def padded(sizes: list[int], k: int) -> int:
    """Return what a rank sends of tensors in rings that share them: k - 1 of k chunks, each rounded up."""
    return sum((k - 1) * -(-size // k) for size in sizes)


W, Q = [w for w, _ in ODD], [q for _, q in ODD]


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("k", range(1, 10))
def test_a_rank_sends_the_volumes_of_its_policy(k: int, m: int) -> None:
    """2(k-1)/k q copied; (k-1)/k (q + w) of stage 1; (m' q + w) of stage 2; (m (1 + R) w + m' q) of stage 3."""
    assert sent_in_a_step(zero=0, replicas=k, m=m) == Fraction(2 * (k - 1) * sum(Q), k)
    for zero, buckets in product((1, 2), ("none", "1 B")):
        wanted = {"last": 1, "each": m} if zero == 2 else {"last": 1}
        for reduce, times in wanted.items():
            sent = sent_in_a_step(zero=zero, shard=k, m=m, reduce=reduce, buckets=buckets)
            assert sent == times * padded(Q, k) + padded(W, k), (zero, reduce, buckets)
    for reduce, times in {"last": 1, "each": m}.items():
        sent = sent_in_a_step(zero=3, shard=k, m=m, reduce=reduce)
        assert sent == 2 * m * padded(W, k) + times * padded(Q, k), reduce


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("k", range(1, 10))
def test_parameters_that_stay_are_gathered_once_a_micro_batch_or_once_a_step(k: int, m: int) -> None:
    """R = 0 where they stay after forwards, or those of the first and the last layer do; m = 1 if a step has them."""
    ends = padded([W[0], W[-1]], k)
    for reshard, gathered in {
        "no": m * padded(W, k),
        "root": 2 * m * padded(W, k) - m * ends,
        "step": padded(W, k),
    }.items():
        sent = sent_in_a_step(zero=3, shard=k, m=m, reshard=reshard)
        assert sent == gathered + m * padded(Q, k), reshard


@pytest.mark.parametrize(("reshard", "times"), [("yes", 2), ("no", 1), (2, 3)])
def test_a_layer_whose_tensor_a_later_one_uses_stays_gathered(reshard: str | int, times: int) -> None:
    """As in FSDP2's root: a head reads the embedding's weights. For backwards two pairs of the four ranks gather."""
    stages = tuple(Stage(forward=1.0, backward=2.0, parameters=size) for size in (400, 80, 400))
    model = Model(stages=stages, tied=(Tie(stages=(0, 2), parameters=400),))
    run = simulate("dp", model=model, cluster=LINKS, shard=4, m=3, steps=1, reshard=reshard)
    gathers = run.messages[run.messages.op == "all_gather"]
    assert Counter(gathers.stage.tolist()) == {0: 3, 1: 3 * times}
    first, last = (run.tasks[(run.tasks.stage == 0) & (run.tasks.kind == kind)] for kind in "FB")
    passes = [*zip(first.start.tolist(), last.end.tolist(), strict=True)]
    held = [row for row in run.memory if row.category == "parameters" and row.device == 0]
    within = [row.size for row in held for low, high in passes if low <= row.time < high]
    assert len(within) >= 3
    assert min(within) >= 400 + 100 + 20  # gathered, and shares of all
    assert violations(run) == {}


@pytest.mark.every_case
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize(("k", "few"), [(4, 2), (6, 2), (6, 3), (8, 4)])
def test_backwards_gather_among_few_ranks_what_these_keep(k: int, few: int, r: int) -> None:
    """Shares of a smaller group stay from a forward to its backward, for any number of groups (hpZ, MiCS)."""
    across = sum(Fraction(2 * (r - 1) * -(-q // k), r) for q in Q)
    sent = sent_in_a_step(zero=3, shard=k, replicas=r, m=2, reshard=few, reduce="last")
    assert sent == 2 * (padded(W, k) + padded(W, few)) + padded(Q, k) + across


@pytest.mark.parametrize("r", range(1, 5))
@pytest.mark.parametrize("k", range(1, 5))
def test_hybrid_ranks_sum_shares_across_their_groups(k: int, r: int) -> None:
    """Inside a group what k ranks send, and 2(r-1)/r of a share between the ranks that have the same one."""
    across = sum(Fraction(2 * (r - 1) * -(-q // k), r) for q in Q)
    for zero, gathers in {1: 1, 2: 1, 3: 2}.items():
        sent = sent_in_a_step(zero=zero, shard=k, replicas=r, m=1, **({"buckets": "1 B"} if zero < 3 else {}))
        assert sent == gathers * padded(W, k) + padded(Q, k) + across, zero


def test_backwards_gather_from_the_few_ranks_that_keep_shares() -> None:
    """Of four ranks, pairs have a stage's parameters from its forward on: one gather of all, then one in each pair."""
    program = assemble(Request("dp", 3, model=layers_of(600), shard=4, reshard=2, steps=1))
    gathers = program.messages.op == Op.ALL_GATHER
    members = [program.groups[group].tolist() for group in program.messages.dst[gathers].tolist()]
    assert sorted(members) == sorted(3 * [[0, 1, 2, 3], [0, 1], [2, 3]])

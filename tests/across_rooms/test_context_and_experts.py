"""Ranks that split a sequence, and ranks that split experts: what they exchange, hold and sum, by closed forms."""

from fractions import Fraction
from functools import cache
from itertools import product
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest

from cdpsim import Cluster, Request, Run, simulate
from cdpsim.cluster import Cable, Devices, Topology
from cdpsim.cluster.topology import Kernels
from cdpsim.errors import RequestError
from cdpsim.invariants import violations
from cdpsim.model.layers import Operations
from cdpsim.program import Category, Content, Kind, Op
from cdpsim.runs.ranks import sent_by_rank
from cdpsim.timing.costs import disturbed_costs
from cdpsim.trace.metrics.communication import all_bytes_sent, bytes_sent, sent_shares

PLAIN = {"layers": 4, "width": 64, "heads": 8, "length": 64, "vocabulary": 512, "tied": False}
MIXED = PLAIN | {"gated": True, "ffn": 96, "experts": 8, "top_k": 2, "biases": False}
TRAINED = {"optimizer": "adam", "mixed_precision": True}


def nodes(size: int = 4) -> Cluster:
    """Nodes of so many devices, each with a card of its own."""
    inside, across = Cable(latency=1e-6, bandwidth=4e10), Cable(latency=5e-6, bandwidth=2e9)
    topology = Topology(kind="nodes", per_node=size, nics=size, link=inside, network=across)
    kernels = Kernels(products=0.5, passes=0.7, grouped=0.4)
    return Cluster(devices=(Devices(speed=1e12, memory_bandwidth=1e11, kernels=kernels),), topology=topology)


def run_of(shape: dict[str, Any], schedule: str = "dp", **asked: Any) -> Run:
    """Run layers of a shape on nodes of 4."""
    n = {"n": asked.pop("n")} if "n" in asked else {}
    model = {"name": "drawn", "layers": shape, "training": TRAINED}
    return simulate(schedule, **n, model=model, cluster=asked.pop("cluster", nodes()), **{"m": 2, **asked})


def sent(run: Run, kind: str, *axes: str) -> int:
    """Return the bytes that a rank sends in a layer's forward or backward over some axes."""
    stage, mesh = run.request.model.stages[2], run.request.model.mesh
    work = stage.forward if kind == "F" else stage.backward
    assert isinstance(work, Operations)
    each = ((exchange, times) for exchange, times in work.exchanges if exchange.axis in axes)
    return sum(int(times) * sent_by_rank(exchange, mesh.ranks(exchange.axis)) for exchange, times in each)


@pytest.mark.parametrize(
    ("tensor", "context", "kv"), [(1, 2, 8), (1, 4, 8), (2, 2, 8), (2, 4, 8), (1, 2, 2), (2, 2, 4)]
)
@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_bytes_of_the_exchanges_of_attention(attention: str, tensor: int, context: int, kv: int) -> None:
    """Ring and gather send as much; all to all 2/c of it in a forward and 1/c in a backward, where kv = a."""
    shape = PLAIN | {"attention": attention, "key_value_heads": kv}
    asked: dict[str, Any] = {"n": 6, "tensor": tensor, "sequence": tensor > 1, "context": context}
    gather, ring, moved = (run_of(shape, attention_exchange=how, **asked) for how in ("gather", "ring", "all-to-all"))
    keys = 2 * 2 * 64 * 64 * kv // 8 // tensor * (context - 1) // context  # K and V of the others, in 2 bytes a number
    for run in (gather, ring):
        assert sent(run, "F", "context") == keys
        assert sent(run, "B", "context") == 2 * keys
    share = 2 * 64 * 64 // tensor * (context - 1) // context**2  # of a tensor as wide as all heads
    both = 2 * share + 2 * share * kv // 8
    assert sent(moved, "F", "context") == sent(moved, "B", "context") == both
    if kv == 8:
        assert Fraction(both, keys) == Fraction(2, context)
        assert Fraction(both, 2 * keys) == Fraction(1, context)
    assert {sent(run, kind, "tensor") for run in (gather, ring, moved) for kind in "F"} == {sent(gather, "F", "tensor")}


@pytest.mark.parametrize("how", ["gather", "ring", "all-to-all"])
@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_context_splits_all_work_and_all_that_is_kept(attention: str, how: str) -> None:
    """A rank computes and keeps 1/c; weights are copied."""
    alone = run_of(PLAIN | {"attention": attention}, n=6).request.model
    split = run_of(PLAIN | {"attention": attention}, n=6, context=4, attention_exchange=how).request.model
    for whole, share in zip(alone.stages, split.stages, strict=True):
        assert float(share.forward) * 4 == pytest.approx(float(whole.forward), rel=1e-12)
        assert float(share.backward) * 4 == pytest.approx(float(whole.backward), rel=1e-12)
        twice = how == "all-to-all" and attention == "flash" and whole.attention_activation  # outputs, of heads, too
        assert share.activation * 4 == whole.activation + 2 * 64 * 64 * bool(twice)
        assert share.boundary * 4 == whole.boundary
        assert share.parameters == whole.parameters


@pytest.mark.parametrize(("expert", "capacity"), [(2, None), (4, None), (8, None), (4, 1.0), (4, 1.25)])
def test_dispatched_bytes_of_a_rank(expert: int, capacity: float | None) -> None:
    """(E - 1) / E of the rows, there and back in a forward, and so in a backward; padded rows, with a capacity."""
    run = run_of(MIXED | {"capacity": capacity}, n=6, shard=8, zero=1, expert=expert)
    rows = 64 * 2 if capacity is None else 8 * -int(-(64 * 2 * capacity) // 8)
    for kind in "FB":
        assert sent(run, kind, "expert") == 2 * (expert - 1) * rows * 64 * 2 // expert
    assert {each.axis for each in run.exchanges or ()} == {"expert"}


def test_one_rank_of_experts_sends_nothing() -> None:
    assert run_of(MIXED, n=6, shard=8, zero=1).exchanges is None


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_a_rank_computes_as_many_rows_whatever_experts_it_has(tensor: int, context: int) -> None:
    """Experts that are split trade rows for others, and take a share of the weights."""
    found = []
    for expert in (1, 2, 4, 8):
        asked: dict[str, Any] = {"tensor": tensor, "sequence": tensor > 1, "context": context, "expert": expert}
        run = run_of(MIXED, n=6, shard=8, zero=1, **asked)
        stage = run.request.model.stages[2]
        assert isinstance(stage.forward, Operations)
        grouped = [(row.flop, times) for row, times in stage.forward.rows if row.kind == "grouped"]
        found.append((float(stage.forward), sorted(grouped), stage.expert_parameters * expert))
    assert found == found[:1] * 4
    flop = sum(flop * times for flop, times in found[0][1])
    assert flop == 2 * 2 * (64 // tensor // context) * 3 * 64 * 96  # top_k rows of a token through three matrices


# Ranks that sum gradients, and that share states


@cache
def shared(expert: int, **asked: Any) -> tuple[int, int]:
    """Return among how many ranks a layer's experts and all else are shared, by the optimizer's state."""
    run = run_of(MIXED, n=6, zero=1, expert=expert, steps=1, buckets="none", reduce="end", **asked)
    stage, buffers = run.request.model.stages[2], run.program.buffers
    rows = (buffers.stage == 2) & (buffers.device == 0) & (buffers.category == Category.OPTIMIZER)
    (held,) = buffers.size[rows].tolist()
    of_experts = stage.of_experts("optimizer")
    for many, rest in product((1, 2, 4, 8, 16), repeat=2):
        if held == -(-(stage.optimizer - of_experts) // rest) - (-of_experts // many):
            return many, rest
    raise AssertionError(held)


def test_torchtitan_shares_experts_among_fewer_ranks() -> None:
    """8 ranks, tp 2, cp 2, dp_shard 2: experts over 4 share among 2, over 8 among 1; all else among 4."""
    asked: dict[str, Any] = {"tensor": 2, "sequence": True, "context": 2, "shard": 2}
    assert shared(4, **asked) == (2, 4)
    assert shared(8, **asked) == (1, 4)
    assert shared(2, **asked) == (4, 4)


@pytest.mark.parametrize(("expert", "ranks"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_experts_are_summed_by_the_ranks_that_have_them(expert: int, ranks: int) -> None:
    """Each gradient goes once, to all ranks with a copy: d / E for experts, d for all else."""
    run = run_of(MIXED, n=6, replicas=8, expert=expert, buckets="none", steps=1).whole
    program, model = run.program, run.request.model
    messages = program.messages
    sums = np.flatnonzero((messages.content == Content.GRADIENT) & (messages.stage == 2))
    found = sorted((len(program.ranks_of(messages.dst[row])), int(messages.size[row])) for row in sums)
    own, rest = model.stages[2].of_experts("gradients"), model.stages[2].gradient_bytes
    expected = [(8, rest)] if expert == 1 else [(8, rest - own)] + [(ranks, own)] * expert * (ranks > 1)
    assert found == sorted(expected)
    assert {Op(int(op)) for op in messages.op[sums]} == {Op.ALL_REDUCE}


@pytest.mark.parametrize("collective", ["ring", "recursive-doubling"])
@pytest.mark.parametrize(("context", "expert"), [(1, 1), (2, 1), (2, 2), (4, 4), (1, 4)])
def test_bytes_of_all_devices_are_those_of_a_rank_of_each(context: int, expert: int, collective: str) -> None:
    """Around a ring, of k ranks, each sends 2 (k - 1) / k of the sums that it takes part in."""
    asked: dict[str, Any] = {"context": context, "expert": expert, "replicas": 4, "buckets": "none"}
    run = run_of(MIXED, n=6, steps=1, m=1, collective=collective, **asked)
    rows = np.arange(len(run.program.messages))
    each = bytes_sent(run.program, run.costs)
    assert sum(each) == all_bytes_sent(run.program, run.costs, rows)
    told = sent_shares(run.messages, collective)
    assert np.bincount(told.device, told.size) == pytest.approx([float(size) for size in each], rel=1e-12)
    if collective == "ring":
        stages, k, few = run.request.model.stages, 4 * context, 4 * context // expert
        own = sum(stage.of_experts("gradients") for stage in stages)
        rest = sum(stage.gradient_bytes for stage in stages) - own
        assert each[0] == Fraction(2 * (k - 1) * rest, k) + Fraction(2 * (few - 1) * own, few)


def test_shares_of_experts_are_padded_among_their_own_ranks() -> None:
    """FSDP2 splits a tensor on its first dimension: 4 of 8 experts over 2 ranks need no padding, and 3 heads' do."""
    asked: dict[str, Any] = {"n": 6, "shard": 4, "zero": 1, "expert": 2, "padding": "rows", "steps": 1}
    run = run_of(MIXED | {"width": 66, "heads": 3}, **asked)
    stage, buffers = run.request.model.stages[2], run.program.buffers
    rows = (buffers.stage == 2) & (buffers.device == 0) & (buffers.category == Category.OPTIMIZER)
    rest = [shape for shape in stage.tensors if shape not in stage.expert_tensors]
    padded = sum(-(-shape[0] // 4) * prod(shape[1:]) for shape in rest)  # of a rank, in numbers
    assert buffers.size[rows].sum() == 12 * (padded + sum(map(prod, stage.expert_tensors)) // 2)
    assert violations(run) == {}


LAWS: list[tuple[str, dict[str, Any]]] = [
    ("dp", {"context": 2}),
    ("dp", {"context": 2, "zero": 1}),
    ("dp", {"context": 2, "shard": 2, "zero": 2}),
    ("dp", {"context": 2, "shard": 4, "zero": 3, "reshard": 4}),
    ("1f1b", {"n": 2, "context": 2, "shard": 2, "replicas": 2, "zero": 1}),
    ("1f1b", {"n": 2, "context": 2, "shard": 2, "zero": 3}),
    ("multi-cdp", {"n": 3, "m": 3, "context": 2}),
    ("acco", {"context": 2}),
    ("post-local-sgd", {"context": 2}),
    ("dp", {"expert": 2, "shard": 4, "zero": 1}),
    ("dp", {"expert": 2, "shard": 4, "zero": 2, "buckets": "64kB,64kB"}),
    ("dp", {"expert": 2, "shard": 4, "zero": 3}),
    ("dp", {"expert": 2, "shard": 2, "replicas": 2, "zero": 3}),
    ("dp", {"expert": 2, "shard": 2, "replicas": 2, "zero": 1}),
    ("dp", {"expert": 4, "replicas": 4, "expand_collectives": True}),
    ("dp", {"tensor": 2, "sequence": True, "shard": 2, "replicas": 2, "zero": 2}),
    ("1f1b", {"n": 2, "m": 4, "expert": 4, "replicas": 4}),
    ("1f1b", {"n": 2, "m": 4, "expert": 4, "shard": 4, "zero": 1, "context": 2}),
    ("1f1b", {"n": 2, "m": 4, "expert": 4, "shard": 2, "replicas": 2, "zero": 2, "context": 2}),
    ("1f1b", {"n": 2, "expert": 2, "shard": 2, "zero": 1, "context": 2, "tensor": 2, "sequence": True, "clip": True}),
    ("zb-h1", {"n": 2, "m": 4, "expert": 2, "replicas": 2, "zero": 1, "context": 2, "tensor": 2, "sequence": True}),
    ("interleaved-1f1b", {"n": 4, "m": 4, "context": 2, "tensor": 2, "sequence": True, "expert": 2, "replicas": 2}),
]


@pytest.mark.parametrize(("schedule", "asked"), LAWS)
def test_runs_keep_all_laws(schedule: str, asked: dict[str, Any]) -> None:
    assert violations(run_of(MIXED, schedule, **asked)) == {}


# The load of the busiest rank


def test_the_busiest_rank_holds_up_all() -> None:
    """A load of 1.5 adds half of what experts' products take, and no more; FLOP stay."""
    even, busy = (run_of(MIXED, n=6, shard=4, zero=1, expert=4, imbalance=load) for load in (None, 1.5))
    pricing = even.request.pricing
    assert pricing is not None
    stage = even.request.model.stages[2]
    assert isinstance(stage.forward, Operations)
    products = sum(times * pricing.row_seconds(row) for row, times in stage.forward.rows if row.kind == "grouped")
    before, after = (float(run.request.timed_model.stages[2].forward) for run in (even, busy))
    assert after - before == pytest.approx(products / 2, rel=1e-9)
    assert busy.request.model.flop == even.request.model.flop
    assert Request(**busy.request)["imbalance"] == 1.5


def test_drawn_loads_are_the_largest_of_their_ranks() -> None:
    """The mean of many layers' loads is that of the largest of E draws; ranks that share experts have the same."""
    asked: dict[str, Any] = {"n": 6, "m": 40, "shard": 4, "replicas": 2, "zero": 1, "expert": 4, "reduce": "end"}
    even = run_of(MIXED, **asked).whole
    drawn = run_of(MIXED, **asked, imbalance="uniform:0.2", seed=3).whole
    tasks = drawn.program.tasks
    again, loads = (run.costs.duration[: drawn.program.compute] for run in (even, drawn))
    assert drawn.costs.loads is not None
    seconds = drawn.costs.loads.seconds[: drawn.program.compute]
    load = 1 + (loads - again)[seconds > 0] / seconds[seconds > 0]
    width = 0.2 * 12**0.5  # of the uniform numbers, whose largest of four has 3/10 of it above the mean
    assert load.min() > 1 - width / 2 and load.max() < 1 + width / 2
    assert load.mean() == pytest.approx(1 + 0.3 * width, abs=0.01)
    device = tasks.device[: drawn.program.compute][seconds > 0]
    assert np.array_equal(load[device == 0], load[device == 1])
    assert not np.array_equal(load[device == 0], load[device == 4])


def test_drawn_loads_are_those_of_a_run_and_its_number() -> None:
    """Costs of one run are the same each time, on slow devices, too; both directions of a pipeline have their own."""
    asked: dict[str, Any] = {"shard": 4, "zero": 1, "expert": 4, "imbalance": "uniform:0.2"}
    run = run_of(MIXED, **asked, slow={0: 3.0})
    undisturbed, disorder = run.costs.undisturbed, run.request.disorder
    assert undisturbed is not None
    for again in (disturbed_costs(run.program, undisturbed, disorder, 0, 0) for _ in range(2)):
        assert np.array_equal(again.duration, run.costs.duration)
    both = run_of(MIXED | {"layers": 6}, "chimera", **asked | {"shard": 4, "n": 2, "m": 4}).whole
    assert both.costs.loads is not None
    tasks, seconds = both.program.tasks, both.costs.loads.seconds
    own = (tasks.step == 0) & (tasks.kind == Kind.F) & (tasks.stage == 0) & (tasks.device < 2) & (seconds > 0)
    assert len({*both.costs.duration[: len(tasks)][own].tolist()}) == 4


def test_a_limit_of_nodes_takes_bytes_off_the_cards() -> None:
    """2 nodes of 4, two experts a token: with at most one node half of the rows go across, and all of them inside."""
    usual, limited = (run_of(MIXED, n=6, shard=8, zero=1, expert=8, node_limit=limit) for limit in (None, 1))
    assert sum(each.seconds for each in limited.exchanges or ()) < sum(each.seconds for each in usual.exchanges or ())
    size = 8 * 64 * 2 * 64 * 2  # of all ranks' rows
    across = 5e-6 * 2 + size / 8 / 2 / 2 / 2e9  # of a rank's rows the half, to the other node, and of these the half
    inside = 3 * (2e-6 + size / 8 / 4 / 4e10)
    for each in limited.exchanges or ():
        assert each.seconds == pytest.approx(across + inside, rel=1e-9)


# Refusals


@pytest.mark.parametrize(
    ("shape", "asked", "words"),
    [
        (PLAIN, {"context": 3}, "context: 6 parts do not divide the 64 tokens"),
        (
            PLAIN | {"heads": 4},
            {"context": 8, "attention_exchange": "all-to-all"},
            "8 x 1 ranks do not divide the 4 heads",
        ),
        (PLAIN, {"attention_exchange": "ring"}, "attention-exchange: is of the ranks of --context"),
        (PLAIN, {"context": 2, "attention_exchange": "both"}, "attention-exchange: unknown attention-exchange 'both'"),
        (PLAIN, {"expert": 2, "shard": 2}, "expert: is of a mixture of experts, and drawn has none"),
        (MIXED, {"expert": 3, "shard": 3}, "expert: 3 does not divide the 8 experts of drawn; 1 does"),
        (MIXED, {"expert": 8, "shard": 2}, "expert: 8 does not divide the 2 ranks that could share them"),
        (
            MIXED | {"experts": 12},
            {"expert": 6, "shard": 12},
            "expert: groups of 6 ranks do not fill the cluster's nodes",
        ),
        (MIXED, {"tensor": 2, "shard": 2}, "sequence: is missing"),
        (MIXED, {"imbalance": 1.2}, "imbalance: is of the ranks of --expert"),
        (MIXED, {"imbalance": 0.5, "expert": 2, "shard": 2}, "imbalance: 0.5 is not the load of the busiest"),
        (MIXED | {"capacity": 1.0}, {"imbalance": 1.5, "expert": 2, "shard": 2}, "imbalance: is of rows that come"),
        (MIXED, {"node_limit": 2}, "node-limit: is of the ranks of --expert"),
        (MIXED, {"context": 2, "contention": "fair"}, "contention: runs sums as messages between devices"),
    ],
)
def test_refusals_say_the_numbers(shape: dict[str, Any], asked: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        run_of(shape, **asked)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_cyclic_schedules_refuse_split_experts() -> None:
    with pytest.raises(RequestError, match="expert: has copies on other ranks"):
        run_of(MIXED, "multi-cdp", n=3, m=3, context=2, expert=2)


def test_shapes_of_presets_and_drawn_ones_have_the_same_numbers_on_all_ranks() -> None:
    """Of drawn meshes: the ranks of a place have together all weights, those copied as often as they are."""
    random = Random(7)
    for _ in range(40):
        tensor, context = random.choice([1, 2, 4]), random.choice([1, 2])
        expert = random.choice([e for e in (1, 2, 4, 8) if e <= tensor * context * 4])
        asked: dict[str, Any] = {"tensor": tensor, "sequence": tensor > 1, "context": context, "expert": expert}
        model = run_of(MIXED, n=6, shard=4, zero=1, **asked).request.model
        stage, whole = model.stages[2], run_of(MIXED, n=6).request.model.stages[2]
        assert stage.expert_parameters * expert == whole.expert_parameters
        own = stage.parameters - stage.expert_parameters - stage.partial
        rest = whole.parameters - whole.expert_parameters
        assert own * tensor + stage.partial == rest

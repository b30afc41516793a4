"""Bounds of a planned candidate's step and memory: never above its simulation, and often equal to it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, reject, seed, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cdpsim import SCHEDULES, Cluster, Measured, Model, Request, RequestError, Stage, evaluate, simulate
from cdpsim.cluster import Devices, Link
from cdpsim.errors import Stalled
from cdpsim.model import Recipe
from cdpsim.model.layers import Layers
from cdpsim.numeric.columns import Ints, Times
from cdpsim.program import Content, Op, Program
from cdpsim.program.assembly.build import Builder, Location
from cdpsim.request.sharing import accepts
from cdpsim.studies.compare import measure
from cdpsim.studies.plan.bounds import Bound, Bounds, case_of, certainly_held
from cdpsim.studies.plan.wanted import PLAN_OPTIONS
from cdpsim.timing import costs
from tests.helpers.profiles import A100, profiled
from tests.helpers.strategies import requests, streamed_requests
from tests.selection import Examples

RATIO = 1 + 1e-12  # of times that count as equal
PARTS = 4


def bound_of(asked: dict[str, Any]) -> Bound:
    """Return the bound of a candidate, by the request without its data ranks."""
    if asked.get("zero") and asked.get("shard") is None:
        asked = {**asked, "replicas": 1, "shard": asked.get("replicas", 1)}
    data = (asked.get("replicas") or 1) * (asked.get("shard") or 1)
    return Bounds([case_of(asked, data)]).of(0, {name: value for name, value in asked.items() if value is not None})


def try_law(
    part: int,
    many: int,
    step: float = 1.0,
    memory: float = 1.0,
    *,
    measured_by: Callable[[dict[str, Any]], Measured] = lambda asked: evaluate(**asked),
) -> None:
    """Hold the bounds of drawn requests, scaled by a factor, against simulations; the same each time.

    No candidate has a stage of ZeRO on one rank alone, which splits nothing, or stages on several devices.
    """

    @seed(part)
    @settings(max_examples=many, database=None, suppress_health_check=list(HealthCheck), print_blob=False)
    @given(requests() | streamed_requests())
    def law(asked: dict[str, Any]) -> None:
        schedule, shard = asked["schedule"], asked.get("shard") or (asked.get("zero") and asked.get("replicas"))
        no_candidate = not schedule.order.waits or (asked.get("zero") and shard == 1) or asked.get("stage_replicas")
        if no_candidate:
            reject()
        least, measured = bound_of(asked), measured_by(asked)
        assert step * least.step <= float(measured.step) * RATIO, asked
        assert memory * least.memory <= measured.memory, asked

    law()


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_bounds_are_at_most_what_a_simulation_gives(part: int, examples: Examples) -> None:
    """Any schedule, uneven stages, devices and links, messages beside or between tasks, replicas and shares."""
    try_law(part, examples(500))


# Values of all options that a plan takes, but for sizes, which are drawn with the schedule.
VALUES: dict[str, tuple[Any, ...]] = {
    "rule": ("cdp-v1", "cdp-v2", "vertical-sync"),
    "prefetch": (0, 1, 3),
    "slot_order": ("backward-first",),
    "ranks": ("tp-cp-dp-pp", "tp-cp-pp-dp"),
    "buckets": ("torch", "deepspeed", "20 MB", "none"),
    "whole_first_step": (True,),
    "reduce": ("end", "last", "each"),
    "reshard": ("yes", "no", "step", 2),
    "gather": ("units", "step", "early"),
    "padding": ("megatron",),
    "compress": ("bf16", "int8", "topk:0.05", "powersgd:4"),
    "clip": (True,),
    "update_in": ("stream",),
    "by_layer": (True, False),
    "tensor": (2, 4),
    "sequence": (True,),
    "context": (2,),
    "attention_exchange": ("gather", "ring", "all-to-all"),
    "expert": (2, 4),
    "node_limit": (1,),
    "imbalance": (1.25,),
    "whole_boundaries": (True,),
    "split_checkpoints": (True,),
    "micro_batch": (2,),
    "length": (1024,),
    "optimizer": ("sgd", "adafactor"),
    "mixed_precision": (False,),
    "gradients": ("fp32", "bf16"),
    "update_time": ("memory",),
    "recompute": ("layer", "selective", "sqrt", "full"),
    "offload": ("optimizer", "activations", "all"),
    "expand_collectives": (True,),
    "contention": ("fair", "queue"),
    "rendezvous": ("torch", "megatron"),
    "runtime": ("held", "torch"),
    "engine": ("simpy",),
    "collective": ("tree", "halving-doubling", "hierarchical", "best"),
}
SIZES = {"n", "m", "chunks", "replicas", "shard", "zero"}
OF_NO_CANDIDATE = {"warm_up", "local_steps", "outer", "cuts"}  # of schedules that no plan has; of one number of stages
OF_NO_FIGURE = {"ignore_memory"}


SLOW = Cluster(
    devices=(Devices(speed=100e12, memory_bandwidth=1e12),), link=Link(latency=1e-5, bandwidth=1e9), host=Link()
)


@st.composite
def candidates(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a candidate of a plan, of stages or of layers, with some of all further options that its schedule takes."""
    name = draw(st.sampled_from([name for name, each in SCHEDULES.items() if each.order.waits]))
    schedule = SCHEDULES[name]
    asked = options_of(name, draw(st.sampled_from([2, 3, 4]))) | {"m": draw(st.integers(1, 12))}
    if accepts(schedule, "replicas"):
        asked |= {"replicas": draw(st.sampled_from([1, 1, 2, 4]))}
    if accepts(schedule, "shard") and (zero := draw(st.sampled_from([0, 1, 2, 3]))):
        asked |= {"zero": zero, "shard": draw(st.sampled_from([2, 4]))}
    if not accepts(schedule, "m"):
        del asked["m"]
    taken = [option for option in VALUES if accepts(schedule, option)]
    given = draw(st.lists(st.sampled_from(taken), max_size=4, unique=True))
    asked |= {option: draw(st.sampled_from(VALUES[option])) for option in given}
    return asked | {
        "model": draw(st.sampled_from(["gpt2", "llama2-13b"])),
        "cluster": draw(st.sampled_from(["a100-nodes", SLOW])),
    }


def test_values_of_all_options_of_a_plan_are_drawn() -> None:
    assert VALUES.keys() | SIZES | OF_NO_CANDIDATE | OF_NO_FIGURE == {*PLAN_OPTIONS}


def check_below(asked: dict[str, Any]) -> None:
    """Compare the bound of a candidate with its run; leave one aside that cannot be asked."""
    try:
        measured = evaluate(**asked, ignore_memory=True)
    except (RequestError, Stalled):
        reject()
    least = bound_of(asked)
    assert least.step <= float(measured.step) * RATIO, asked
    assert least.memory <= measured.memory, asked


@pytest.mark.slow
def test_bounds_hold_with_all_options_of_a_plan(examples: Examples) -> None:
    """Candidates that cannot be asked are left aside."""

    @seed(11)
    @settings(max_examples=examples(120), database=None, suppress_health_check=list(HealthCheck), print_blob=False)
    @given(candidates())
    def law(asked: dict[str, Any]) -> None:
        check_below(asked)

    law()


SPLIT = Layers(layers=3, width=64, heads=8, ffn=96, length=32, vocabulary=64)
EXPERTS = replace(SPLIT, experts=8, top_k=2, expert_ffn=512)


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a candidate of a small model of layers, often of experts, that ranks of all three axes split."""
    name = draw(st.sampled_from(["dp", "1f1b", "interleaved-1f1b", "zb-h1", "gpipe", "pp-cdp", "multi-cdp"]))
    data = {"replicas": draw(st.sampled_from([1, 2, 4]))} if accepts(SCHEDULES[name], "replicas") else {}
    if data and (zero := draw(st.sampled_from([0, 0, 1, 2, 3]))):
        data |= {"zero": zero, "shard": draw(st.sampled_from([1, 2, 4]))}
    mesh = {axis: draw(st.sampled_from([1, 2])) for axis in ("tensor", "context")}
    layers, expert = draw(st.sampled_from([(SPLIT, 1), *((EXPERTS, ranks) for ranks in (1, 2, 4, 8))]))
    asked = options_of(name, 2) | data | mesh | {"expert": expert, "m": draw(st.sampled_from([2, 4, 6]))}
    if mesh["tensor"] > 1 and (layers is EXPERTS or draw(st.booleans())):
        asked["sequence"] = True
    if mesh["context"] > 1:
        asked["attention_exchange"] = draw(st.sampled_from(["gather", "ring", "all-to-all"]))
    asked |= {"recompute": draw(st.sampled_from(["none", "layer"])), "cluster": "a100-nodes"}
    facts: dict[str, Any] = {"samples": 1, "precision": "bf16", "training": Recipe(optimizer="adam")}
    return asked | {"model": Model.of_layers(layers, name="split", **facts)}


@pytest.mark.slow
def test_bounds_hold_for_meshes(examples: Examples) -> None:
    """The mesh of a case is that of its candidates, and its data ranks are the fewest that split experts."""

    @seed(12)
    @settings(max_examples=examples(80), database=None, suppress_health_check=list(HealthCheck), print_blob=False)
    @given(meshes())
    def law(asked: dict[str, Any]) -> None:
        check_below(asked)

    law()


@pytest.mark.parametrize("kind", ["step", "memory"])
def test_a_bound_that_is_a_hundredth_too_high_is_found_out(kind: str) -> None:
    with pytest.raises(AssertionError):
        try_law(1, 100, step=1.01 if kind == "step" else 1.0, memory=1.01 if kind == "memory" else 1.0)


PIPELINES = [name for name, each in SCHEDULES.items() if each.order.lists and each.order.together]


def options_of(name: str, devices: int) -> dict[str, Any]:
    """Return the options of a schedule on that many devices."""
    takes_chunks = accepts(SCHEDULES[name], "chunks")
    chunks = 2 if takes_chunks else SCHEDULES[name].order.chunks
    n = 2 if SCHEDULES[name].order.one_place else devices * chunks
    return {"schedule": name, "n": n} | ({"chunks": chunks} if takes_chunks else {})


REAL: dict[str, Any] = {"model": profiled("llama3-8b"), "cluster": A100}  # of stages that are grouped into few
OTHERS: tuple[dict[str, Any], ...] = (
    {"offload": "optimizer"},
    {"offload": "activations"},
    {"optimizer": "sgd"},
    {"recompute": "sqrt"},
    {"recompute": "selective"},
)


@pytest.mark.parametrize(
    "trained",
    [
        {},
        {"recompute": "full"},
        {"recompute": "layer"},
        *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", PIPELINES)
def test_bounds_hold_for_a_grouped_model_on_nodes(name: str, trained: dict[str, Any]) -> None:
    """Where parameters are split, its stages are run layer by layer."""
    for replicas, shard, zero in ((1, 1, 0), (3, 1, 0), (1, 2, 1), (2, 2, 2), (1, 4, 3), (2, 8, 3)):
        shared: dict[str, Any] = {"zero": zero, "shard": shard} if zero else {}
        asked = options_of(name, 4) | REAL | trained | {"m": 16, "replicas": replicas} | shared
        measured = evaluate(**asked)
        least = bound_of(asked)
        assert least.step <= measured.step
        assert least.memory <= measured.memory


# Shares of what a simulation gives, of the step and of the memory, that bounds have at least: so few candidates are
# simulated. A looser bound proves as much, and takes longer.
NEAR: tuple[tuple[dict[str, int], float, float], ...] = (
    ({}, 1 - 1e-8, 0.98),
    ({"replicas": 4}, 0.9, 0.98),
    ({"zero": 1, "shard": 8}, 0.9, 0.98),
    ({"zero": 2, "shard": 8}, 0.9, 0.75),  # which gradients are whole at once depends on the exchange
    ({"zero": 3, "shard": 8}, 0.9, 0.65),  # and which layers are gathered
)


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("name", PIPELINES)
def test_bounds_are_near(name: str, recompute: str) -> None:
    for data, step, memory in NEAR:
        asked = options_of(name, 4) | REAL | {"recompute": recompute, "m": 16} | data
        measured, least = evaluate(**asked), bound_of(asked)
        assert step <= least.step / float(measured.step) <= RATIO, data
        assert memory <= least.memory / measured.memory <= 1, data


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("n", "m"), [(1, 3), (4, 2), (4, 4), (4, 9), (5, 64), (16, 1024)])
def test_a_pipeline_with_free_messages_is_bound_by_its_closed_form(name: str, n: int, m: int) -> None:
    """The step is (m + n - 1)(f + b), by Huang et al. 2019 and Narayanan et al. 2019."""
    stages = tuple(Stage(forward=2.0, backward=3.0, activation=7, parameters=5, gradients=3) for _ in range(n))
    least = bound_of({"schedule": name, "n": n, "m": m, "model": Model(stages=stages)})
    assert least.step == pytest.approx(5 * (m + n - 1), rel=1e-8)
    held = m if name == "gpipe" else min(n, m)  # activations on the first device
    assert least.memory == 7 * held + 5 + 3


@pytest.mark.parametrize(("m", "step"), [(1, 9), (5, 45)])
@pytest.mark.parametrize("replicas", [1, 4])
def test_data_parallelism_is_bound_by_its_passes(replicas: int, m: int, step: int) -> None:
    stages = tuple(Stage(forward=f, backward=2 * f, activation=4, parameters=6) for f in (1.0, 2.0))
    asked: dict[str, Any] = {"schedule": "dp", "n": 2, "m": m, "replicas": replicas, "model": Model(stages=stages)}
    least = bound_of(asked)
    assert least.step == pytest.approx(step, rel=1e-8)
    last_backward, all_gradients = 2 * 4 + 12 + 6, 2 * 4 + 12 + 12  # of one micro-batch; of several
    assert least.memory == (last_backward if m == 1 else all_gradients)


def test_slots_are_bound_by_whole_numbers() -> None:
    asked: dict[str, Any] = {"schedule": "zb-h1", "n": 4, "m": 32}
    least = bound_of(asked)
    assert least.step == evaluate(**asked).step


@given(st.sampled_from(PIPELINES), st.integers(2, 4), st.integers(1, 40))
def test_bounds_hold_in_slots_for_any_number_of_micro_batches(name: str, devices: int, m: int) -> None:
    """How lists begin and end is compared with those of few micro-batches, whatever number these are."""
    asked = options_of(name, devices) | {"m": m}
    try:
        measured = evaluate(**asked)
    except RequestError:
        assume(False)
    least = bound_of(asked)
    assert least.step <= measured.step
    assert least.memory <= measured.memory


def test_a_probe_serves_all_that_differ_in_data_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory counts what a rank keeps whole: gradients up to ZeRO 1, parameters up to ZeRO 2."""
    made: list[object] = []
    held = certainly_held

    def counted(program: Program) -> Ints:
        made.append(program)
        return held(program)

    monkeypatch.setattr("cdpsim.studies.plan.bounds.certainly_held", counted)
    bounds, asked = Bounds([Request("1f1b", 4, m=16, **REAL, ignore_memory=True)]), {"schedule": "1f1b", "n": 4}
    ranks = [{}, {"replicas": 2}, *({"shard": 2, "zero": zero} for zero in (1, 2, 3))]
    found = [bounds.of(0, asked | each) for each in ranks]
    assert len(made) == 1
    assert len({least.step for least in found}) == 1
    memory = [least.memory for least in found]
    assert memory[1:] == sorted({*memory}, reverse=True)
    assert memory[0] == memory[1]


CYCLIC = {name: each for name, each in SCHEDULES.items() if each.order.accumulates}
COUNTS = [(name, m) for name, each in CYCLIC.items() for m in (2, 4, 24, 600) if m == 2 or accepts(each, "m")]


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "m"), COUNTS)
def test_bounds_hold_for_workers_with_several_micro_batches(name: str, m: int) -> None:
    """In a line of more micro-batches than stages, tasks read newer parameters by default, and fewer versions live."""
    asked: dict[str, Any] = {"schedule": name, "n": 2, "m": m} | REAL
    measured = evaluate(**asked)
    least = bound_of(asked)
    assert least.step <= measured.step
    assert least.memory <= measured.memory


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("reduce", ["end", "last", "each"])
def test_updates_on_hosts_come_in_another_order_with_data_ranks(reduce: str, m: int) -> None:
    """Where sums come with the last passes, a host updates a stage as soon as its sum is there."""
    stage = Stage(forward=1.0, backward=1.0, weight_backward=0.25, transfer=1.0, host_optimizer=1, host_update=1.0)
    longer = replace(stage, backward=5.0, weight_backward=1.25)
    model = Model(stages=(stage, longer, replace(stage, host_update=2.0), stage))
    asked: dict[str, Any] = {"schedule": "zbv", "n": 4, "m": m, "replicas": 2, "reduce": reduce, "model": model}
    assert bound_of(asked).step <= float(evaluate(**asked).step)


# Options that the package does not have, written into its assembly or its costs alone: bounds follow these, too.


def carry_a_share(patch: pytest.MonkeyPatch, share: float) -> None:
    """Let messages of gradients carry a share of their bytes."""
    send = Builder.send

    def send_less(self: Builder, op: Op, content: Content, of: Location, dst: Any, size: Any, **columns: Any) -> Ints:
        small = np.ceil(np.asarray(size) * share).astype(np.int64) if content is Content.GRADIENT else size
        return send(self, op, content, of, dst, small, **columns)

    patch.setattr(Builder, "send", send_less)


def scaled_by(times: Times, factor: float) -> Times:
    """Return times scaled by a factor; slots stay whole numbers."""
    return times if times.dtype.kind == "i" else times * factor


def scale_times(patch: pytest.MonkeyPatch, tasks: float, messages: float) -> None:
    """Scale the times of tasks and messages."""
    of_tasks, together, single = costs._task_times, costs._collective_times, costs._point_to_point_times
    patch.setattr(costs, "_task_times", lambda *given: scaled_by(of_tasks(*given), tasks))
    patch.setattr(costs, "_point_to_point_times", lambda *given: single(*given) * messages)

    def scaled(*given: Any) -> Any:
        times, *others = together(*given)
        return times * messages, *others

    patch.setattr(costs, "_collective_times", scaled)


PATCHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "few bytes": lambda patch: carry_a_share(patch, 0.05),
    "many bytes": lambda patch: carry_a_share(patch, 20),
    "fast tasks": lambda patch: scale_times(patch, 0.25, 1),
    "slow tasks": lambda patch: scale_times(patch, 4, 1),
    "fast messages": lambda patch: scale_times(patch, 1, 0.05),
    "slow messages": lambda patch: scale_times(patch, 1, 20),
}


def simulated(asked: dict[str, Any]) -> Measured:
    """Return the metrics of a whole run, which no earlier one is asked for."""
    return measure(simulate(Request(**asked, ignore_memory=True)))


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHES)
def test_bounds_are_at_most_what_a_simulation_gives_with_an_option_of_a_test(
    monkeypatch: pytest.MonkeyPatch, name: str, examples: Examples
) -> None:
    PATCHES[name](monkeypatch)
    try_law(7, examples(100), measured_by=simulated)


@pytest.mark.parametrize("name", PATCHES)
def test_bounds_see_an_option_of_a_test(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Messages between stages and tasks are priced as in a simulation; sums of data ranks only add to a step."""
    model = Model(stages=(Stage(forward=1.0, backward=2.0, activation=4, boundary=2**17, parameters=2**20),) * 4)
    cluster = Cluster(devices=(Devices(),), link=Link(latency=1e-3, bandwidth=2.0**18))
    asked: dict[str, Any] = {
        "schedule": SCHEDULES["1f1b"],
        "n": 4,
        "m": 32,
        "replicas": 4,
        "model": model,
        "cluster": cluster,
    }
    before = bound_of(asked).step
    PATCHES[name](monkeypatch)
    after = bound_of(asked).step
    assert after <= float(simulated(asked).step) * RATIO
    if "bytes" not in name:
        assert after < 0.99 * before if "fast" in name else after > 1.01 * before

"""Bounds of a planned candidate's step and memory: never above its simulation, and often equal to it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, reject, seed, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cdpsim import SCHEDULES, Model, Request, RequestError, Stage, evaluate
from cdpsim.request.taken import accepts
from cdpsim.studies.plan.bounds import Loads, Sizes, bound_candidates, loads_of
from tests.helpers.strategies import requests, streamed_requests
from tests.selection import Examples

RATIO = 1 + 1e-12  # of times that count as equal
PARTS = 4


def small(asked: dict[str, Any]) -> Loads | None:
    """Return what a case costs, by a request of the fewest micro-batches, without data ranks; None if it takes none."""
    options = {name: value for name, value in asked.items() if name not in ("replicas", "shard", "zero")}
    takes_m = accepts(options["schedule"], "m")
    for m in range(1, asked["m"] + 1) if takes_m and "m" in asked else [asked.get("m")]:
        try:
            return loads_of(Request(**{**options, "m": m, "ignore_memory": True}))
        except RequestError:
            continue
    return None


def sizes_of(asked: dict[str, Any]) -> Sizes:
    """Return the sizes of a request as a candidate of the first case."""
    m = asked.get("m") or asked["schedule"].micro_batches(asked["n"])
    replicas, shard, zero = asked.get("replicas", 1), asked.get("shard"), asked.get("zero") or 0
    if zero and shard is None:
        replicas, shard = 1, replicas
    return Sizes(*(np.array([value]) for value in (0, m, replicas, shard or 1, zero)))


def try_law(part: int, many: int, step: float = 1.0, memory: float = 1.0) -> None:
    """Hold the bounds of drawn requests, as so many times what they are, against simulations; the same each time.

    No candidate has a stage of ZeRO on one rank alone, which splits nothing, or stages on several devices.
    """

    @seed(part)
    @settings(max_examples=many, database=None, suppress_health_check=list(HealthCheck), print_blob=False)
    @given(requests() | streamed_requests())
    def law(asked: dict[str, Any]) -> None:
        sizes, loads = sizes_of(asked), small(asked)
        if (
            loads is None or (sizes.zero[0] and sizes.shard[0] == 1) or asked.get("stage_replicas")
        ):  # of which no plan is
            reject()
        measured, bounds = evaluate(**asked), bound_candidates([loads], sizes)
        assert step * bounds.step[0] <= float(measured.step) * RATIO, asked
        assert memory * bounds.memory[0] <= measured.memory, asked

    law()


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_bounds_are_at_most_what_a_simulation_gives(part: int, examples: Examples) -> None:
    """Any schedule, uneven stages, devices and links, messages beside or between tasks, replicas and shares."""
    try_law(part, examples(500))


@pytest.mark.parametrize("kind", ["step", "memory"])
def test_a_bound_that_is_a_hundredth_too_high_is_found_out(kind: str) -> None:
    with pytest.raises(AssertionError):
        try_law(1, 100, **{kind: 1.01})


PIPELINES = [name for name, each in SCHEDULES.items() if each.order.lists and each.order.together]


def options_of(name: str, devices: int) -> dict[str, Any]:
    """Return the options of a schedule on so many devices."""
    takes_chunks = accepts(SCHEDULES[name], "chunks")
    chunks = 2 if takes_chunks else SCHEDULES[name].order.chunks
    n = 2 if SCHEDULES[name].order.one_place else devices * chunks
    return {"schedule": name, "n": n} | ({"chunks": chunks} if takes_chunks else {})


REAL: dict[str, Any] = {"model": "llama3-8b", "cluster": "a100-nodes"}  # of stages that are grouped into few
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
    case = options_of(name, 4) | REAL | trained
    loads = next(filter(None, (case_of(case, m) for m in (1, 2, 4, 8))))
    rows = [(0, 16, *ranks) for ranks in ((1, 1, 0), (3, 1, 0), (1, 2, 1), (2, 2, 2), (1, 4, 3), (2, 8, 3))]
    bounds = bound_candidates([loads], Sizes(*np.array(rows).T))
    for (_, m, replicas, shard, zero), step, memory in zip(rows, *bounds, strict=True):
        shared: dict[str, Any] = {"zero": zero, "shard": shard} if zero else {}
        measured = evaluate(**case, m=m, replicas=replicas, **shared)
        assert step <= measured.step
        assert memory <= measured.memory


@pytest.mark.every_case
@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv"])
def test_memory_is_bound_closely_where_parameters_are_split(name: str, recompute: str) -> None:
    """The bound counts what is left for the weights' parts of backwards, and what a layer needs while it runs."""
    case = options_of(name, 4) | REAL | {"recompute": recompute}
    loads = next(filter(None, (case_of(case, m) for m in (1, 2, 4, 8))))
    bound = bound_candidates([loads], Sizes(*np.array([[0, 16, 1, 8, 3]]).T)).memory[0]
    assert 0.93 <= bound / evaluate(**case, m=16, zero=3, shard=8).memory <= 1


def case_of(case: dict[str, Any], m: int) -> Loads | None:
    """Return the loads of a case by a request of m micro-batches; None if it does not take them."""
    try:
        return loads_of(Request(**case, m=m, ignore_memory=True))
    except RequestError:
        return None


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("n", "m"), [(1, 3), (4, 2), (4, 4), (4, 9), (5, 64), (16, 1024)])
def test_a_pipeline_with_free_messages_is_bound_by_its_closed_form(name: str, n: int, m: int) -> None:
    """The step is (m + n - 1)(f + b), by Huang et al. 2019 and Narayanan et al. 2019."""
    stages = tuple(Stage(forward=2.0, backward=3.0, activation=7, parameters=5, gradients=3) for _ in range(n))
    loads = loads_of(Request(name, n, m=1, model=Model(stages=stages), ignore_memory=True))
    bounds = bound_candidates([loads], Sizes(*np.array([[0, m, 1, 1, 0]]).T))
    assert bounds.step[0] == pytest.approx(5 * (m + n - 1), rel=1e-8)
    held = m if name == "gpipe" else min(n, m)  # activations on the first device
    assert bounds.memory[0] == 7 * held + 5 + 3


def test_data_parallelism_is_bound_by_its_passes() -> None:
    stages = tuple(Stage(forward=f, backward=2 * f, activation=4, parameters=6) for f in (1.0, 2.0))
    loads = loads_of(Request("dp", 2, m=1, model=Model(stages=stages), ignore_memory=True))
    bounds = bound_candidates([loads], Sizes(*np.array([[0, m, r, 1, 0] for m in (1, 5) for r in (1, 4)]).T))
    assert bounds.step == pytest.approx([9, 9, 45, 45], rel=1e-8)
    last_backward, all_gradients = 2 * 4 + 12 + 6, 2 * 4 + 12 + 12  # of one micro-batch; of several
    assert bounds.memory.tolist() == [last_backward] * 2 + [all_gradients] * 2


def test_slots_are_bound_by_whole_numbers() -> None:
    loads = loads_of(Request("zb-h1", 4, m=4))
    bounds = bound_candidates([loads], Sizes(*np.array([[0, 32, 1, 1, 0]]).T))
    assert bounds.step[0] == evaluate("zb-h1", 4, m=32).step


@given(st.sampled_from(PIPELINES), st.integers(2, 4), st.integers(1, 40))
def test_bounds_hold_in_slots_for_any_number_of_micro_batches(name: str, devices: int, m: int) -> None:
    """How lists begin and end is compared with those of few micro-batches, whatever number these are."""
    case = options_of(name, devices)
    found = list(filter(None, (case_of(case, few) for few in range(1, 9))))
    try:
        measured = evaluate(**case, m=m)
    except RequestError:
        assume(False)
    for loads in found[:2]:
        bounds = bound_candidates([loads], Sizes(*np.array([[0, m, 1, 1, 0]]).T))
        assert bounds.step[0] <= measured.step
        assert bounds.memory[0] <= measured.memory


def test_columns_are_bound_as_rows_are() -> None:
    """In the order in which candidates come, whatever cases they are of."""
    loads = [loads_of(Request(name, 4, m=1, **REAL, ignore_memory=True)) for name in ("1f1b", "gpipe")]
    rows = [(case, m, r, s, z) for case in (1, 0) for m in (3, 8) for r in (1, 2) for s, z in ((1, 0), (2, 1), (2, 3))]
    together = bound_candidates(loads, Sizes(*np.array(rows).T))
    for row, step, memory in zip(rows, *together, strict=True):
        alone = bound_candidates(loads, Sizes(*np.array([row]).T))
        assert (alone.step[0], alone.memory[0]) == (step, memory)


CYCLIC = {name: each for name, each in SCHEDULES.items() if each.order.accumulates}
COUNTS = [(name, m) for name, each in CYCLIC.items() for m in (2, 4, 24, 600) if m == 2 or accepts(each, "m")]


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "m"), COUNTS)
def test_bounds_hold_for_workers_with_several_micro_batches(name: str, m: int) -> None:
    """In a line of more micro-batches than stages, tasks read newer parameters by default, and fewer versions live."""
    case: dict[str, Any] = {"schedule": name, "n": 2} | REAL
    measured = evaluate(**case, m=m)
    bounds = bound_candidates([loads_of(Request(**case, m=2))], Sizes(*np.array([[0, m, 1, 1, 0]]).T))
    assert bounds.step[0] <= measured.step
    assert bounds.memory[0] <= measured.memory


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("reduce", ["end", "last", "each"])
def test_updates_on_hosts_come_in_another_order_with_data_ranks(reduce: str, m: int) -> None:
    """Where sums come with the last passes, a host updates a stage as soon as its sum is there."""
    stage = Stage(forward=1.0, backward=1.0, weight_backward=0.25, transfer=1.0, host_optimizer=1, host_update=1.0)
    longer = replace(stage, backward=5.0, weight_backward=1.25)
    model = Model(stages=(stage, longer, replace(stage, host_update=2.0), stage))
    case: dict[str, Any] = {
        "schedule": SCHEDULES["zbv"],
        "n": 4,
        "m": m,
        "replicas": 2,
        "reduce": reduce,
        "model": model,
    }
    loads = small(case)
    assert loads is not None
    assert bound_candidates([loads], sizes_of(case)).step[0] <= float(evaluate(**case).step)

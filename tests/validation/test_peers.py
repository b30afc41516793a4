"""A replay ends where torch's own parallel training does, for what torch has."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import numpy as np

from tests.validation.cases import OPTIMIZERS
from tests.validation.peers import SCHEDULES, Ended, data_parallel, pipelined, sharded
from validation.ranks.launcher import Ranks
from validation.replay.case import Case, Outcome

MODELS = ("mlp", "transformer")
every_model = pytest.mark.parametrize("model", MODELS)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """As many as there are micro-batches and stages, alive over all tests."""
    with Ranks(request.param) as some:
        yield some


def case_of(schedule: str, ranks: Ranks, model: str, optimizer: str, rule: str | None = None) -> Case:
    return Case(schedule, len(ranks.pids), steps=4, rule=rule, model=model, optimizer=OPTIMIZERS[optimizer])


def apart(outcomes: list[Outcome], peers: list[Ended]) -> float:
    """The largest difference between what a replay's devices and torch's ranks ended with."""
    pairs = [
        (outcome.parameters[stage], ended[stage])
        for outcome in outcomes
        for ended in peers
        for stage in outcome.parameters.keys() & ended.keys()
    ]
    return float(np.max([np.abs(mine - theirs).max() for mine, theirs in pairs]))  # nan where one is


@pytest.mark.parametrize(("model", "optimizer"), [("mlp", "momentum"), ("transformer", "adam")])
@pytest.mark.parametrize(("schedule", "peer"), [("multi-dp", data_parallel), ("zero-dp", sharded)])
def test_replicas_end_where_torchs_do(
    ranks: Ranks, schedule: str, peer: Callable[..., Ended], model: str, optimizer: str
) -> None:
    """multi-dp where DistributedDataParallel does, zero-dp where FSDP2 does."""
    case = case_of(schedule, ranks, model, optimizer)
    assert apart(ranks.run(case), ranks.call(peer, case)) <= 1e-12


@pytest.mark.parametrize(("schedule", "model"), [*zip(SCHEDULES, MODELS * 2, strict=True)])
def test_a_pipeline_with_a_flush_ends_where_torchs_do(ranks: Ranks, schedule: str, model: str) -> None:
    """With the same stages on the same ranks, also where backwards are split."""
    case = case_of(schedule, ranks, model, "momentum")
    devices = case.n
    if schedule.startswith("interleaved"):
        case = replace(case, n=2 * devices, m=devices, chunks=2)
    ended = ranks.call(pipelined, case)
    assert [list(one) for one in ended] == [[*range(d, case.n, devices)] for d in range(devices)]
    assert apart(ranks.run(case), ended) <= 1e-12


@every_model
def test_the_wrong_rule_does_not_end_there(ranks: Ranks, model: str) -> None:
    """Delayed gradients are another training than DistributedDataParallel's."""
    ended = ranks.call(data_parallel, case_of("multi-dp", ranks, model, "momentum"))
    delayed = ranks.run(case_of("multi-cdp", ranks, model, "momentum", rule="cdp-v2"))
    assert apart(delayed, ended) > 1e-6

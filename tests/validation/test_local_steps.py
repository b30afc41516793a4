"""Local steps, replayed: they end where the papers' equations do, and hold what their programs say; identities."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.validation.cases import OPTIMIZERS, every_optimizer
from tests.validation.known import known
from tests.validation.learning import linear, near, played, prepared_of, with_same_data
from tests.validation.papers_local import LocalPapers
from tests.validation.replayed import check_replay, check_to_the_bit
from validation.comparison.command import report_summary
from validation.comparison.replays import SingleProcess, compare_replay
from validation.ranks.launcher import Ranks
from validation.replay.case import Case, expected_parameters, largest_difference, play_in_process, prepare
from validation.training.models import make_training
from validation.training.optimizer import Optimizer

LOCAL = ("local-sgd", "post-local-sgd", "slowmo", "diloco", "co2")
every_schedule = pytest.mark.parametrize("schedule", LOCAL)
SHAPES: dict[str, dict[str, Any]] = {
    "alone": {"m": 2},
    "two alike": {"replicas": 2, "m": 2},
    "three, one of them slow": {"replicas": 3, "m": 1, "slow": ("1:2",)},
    "one stage": {"n": 1, "replicas": 2, "m": 1},
    "a transformer": {"replicas": 2, "m": 1, "model": "transformer"},
    "mixed precision": {"replicas": 2, "m": 1, "dtype": "bfloat16", "mixed": True},
}


def case_of(schedule: str, optimizer: str = "momentum", *, mixed: bool = False, n: int = 2, **how: Any) -> Case:
    made = replace(OPTIMIZERS[optimizer], mixed_precision=mixed)
    return known(Case(schedule, n, 3, optimizer=made, local_steps=2, **how))


@every_schedule
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("how", SHAPES.values(), ids=SHAPES)
def test_local_steps_end_where_the_equation_does(how: dict[str, Any], optimizer: str, schedule: str) -> None:
    check_to_the_bit(case_of(schedule, optimizer, **how))


@every_schedule
@every_optimizer
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_replay_and_the_equation_are_the_papers(replicas: int, optimizer: Optimizer, schedule: str) -> None:
    training, warm_up = make_training("mlp", 2), int(schedule == "post-local-sgd")
    prepared = prepared_of(training, schedule, optimizer, updates=3, replicas=replicas, m=2, local_steps=3)
    end = LocalPapers(training, optimizer, replicas, 2).train(schedule, 3, 3 - warm_up, warm_up)
    assert torch.allclose(played(prepared), end, rtol=0, atol=1e-12)
    assert torch.allclose(torch.cat(expected_parameters(prepared)), end, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("outer", "other"), [("sgd:1:0.9", "sgd:1:0.5"), ("nesterov:0.5:0.9", "nesterov:0.7:0.9")])
def test_an_outer_optimizer_may_be_another_one(outer: str, other: str) -> None:
    one, two = (prepare(case_of("diloco", replicas=2, m=1, outer=given)) for given in (outer, other))
    assert largest_difference(play_in_process(one), expected_parameters(one)) == 0
    assert largest_difference(play_in_process(one), expected_parameters(two)) > 1e-6


@every_schedule
@pytest.mark.parametrize("how", [{"m": 2}, {"replicas": 3, "m": 1, "slow": ("1:2",)}], ids=str)
def test_a_report_of_local_steps_is_within_tolerance(how: dict[str, Any], schedule: str) -> None:
    """With the allocator's account in each event."""
    report = compare_replay(case_of(schedule, "adam", **how), SingleProcess(), repeats=0)
    assert report is not None
    assert report.ok, report_summary(report)
    assert report.parameters.bit_equal


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as three:
        yield three


@every_schedule
def test_so_do_ranks(schedule: str, ranks: Ranks) -> None:
    case = case_of(schedule, "adam", replicas=3, m=1)
    check_replay(case, ranks.run)
    report = compare_replay(case, ranks, repeats=0)
    assert report is not None
    assert report.ok, report_summary(report)


# Identities


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("schedule", ["local-sgd", "post-local-sgd"])
def test_a_linear_loss_makes_all_workers_go_one_way(schedule: str, optimizer: str) -> None:
    """As its gradient is the same everywhere, workers with the same data stay alike: one worker's training."""
    training, made = linear(), OPTIMIZERS[optimizer]
    local = prepared_of(training, schedule, made, updates=3, replicas=4, m=1, local_steps=2)
    alone = prepared_of(training, "dp", made, updates=local.plan.program.steps, replicas=4, m=1)
    assert near(played(local), played(alone), local.plan.program.steps)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_same_data_for_all_is_data_parallelism(optimizer: str) -> None:
    training, made = with_same_data(make_training("mlp", 2)), OPTIMIZERS[optimizer]
    local = prepared_of(training, "local-sgd", made, updates=2, replicas=2, m=1, local_steps=3)
    alone = prepared_of(training, "dp", made, updates=6, replicas=2, m=1)
    assert near(played(local), played(alone), 6)


@pytest.mark.parametrize("schedule", ["slowmo", "diloco"])
def test_an_outer_optimizer_that_takes_the_mean_is_local_sgd(schedule: str) -> None:
    """With rate 1 and no momentum."""
    training = make_training("mlp", 2)
    asked: dict[str, Any] = {"updates": 3, "replicas": 3, "m": 1, "local_steps": 2}
    outer = played(prepared_of(training, schedule, OPTIMIZERS["adam"], **asked, outer="sgd:1"))
    assert near(outer, played(prepared_of(training, "local-sgd", OPTIMIZERS["adam"], **asked)), 6)


def test_one_local_step_of_sgd_is_data_parallelism() -> None:
    """The mean of steps by each gradient is a step by the mean of gradients; not so of two steps, nor of adam."""
    training = make_training("mlp", 2)

    def apart(optimizer: str, local_steps: int) -> float:
        made = OPTIMIZERS[optimizer]
        local = prepared_of(training, "local-sgd", made, updates=4, replicas=3, m=1, local_steps=local_steps)
        alone = prepared_of(training, "dp", made, updates=4 * local_steps, replicas=3, m=1)
        return float((played(local) - played(alone)).abs().max())

    assert apart("sgd", 1) < 1e-14
    assert apart("sgd", 2) > 1e-6
    assert apart("adam", 1) > 1e-6

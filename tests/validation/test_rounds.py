"""Rounds of workers that do not wait, replayed: also where these have unlike numbers of micro-batches, and by ranks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cdpsim.program import Category
from tests.validation.cases import OPTIMIZERS
from tests.validation.known import known
from tests.validation.replayed import check_replay, check_to_the_bit
from validation.comparison import memory
from validation.comparison.command import report_summary
from validation.comparison.replays import SingleProcess, compare_replay
from validation.ranks.launcher import Ranks
from validation.replay.case import Case, prepare
from validation.training.optimizer import Optimizer

ROUNDS = ("dpu", "wp", "acco")
every_schedule = pytest.mark.parametrize("schedule", ROUNDS)
SLOW: dict[str, Any] = {"slow": ("1:4",)}
SHAPES: dict[str, dict[str, Any]] = {
    "alone": {"m": 2},
    "two alike": {"replicas": 2, "m": 2},
    "three, one of them slow, with padded shares": {"replicas": 3, "m": 1, **SLOW},
    "four, blocks of two, one of them slow": {"replicas": 4, "m": 2, **SLOW},
    "one stage": {"n": 1, "replicas": 2, "m": 1, "slow": ("0:3",)},
    "a transformer": {"replicas": 2, "m": 1, "model": "transformer", **SLOW},
    "mixed precision": {"replicas": 2, "m": 2, "dtype": "bfloat16", "mixed": True, **SLOW},
}


def case_of(schedule: str, optimizer: str = "momentum", *, mixed: bool = False, n: int = 2, **how: Any) -> Case:
    made = OPTIMIZERS[optimizer]
    made = Optimizer(made.kind, made.options, mixed_precision=mixed)
    return known(Case(schedule, n, 3, optimizer=made, **how))


@every_schedule
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("how", SHAPES.values(), ids=SHAPES)
def test_rounds_end_where_the_equation_does(how: dict[str, Any], optimizer: str, schedule: str) -> None:
    check_to_the_bit(case_of(schedule, optimizer, **how))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("slow", [(), ("0:3",)])
@pytest.mark.parametrize("warm_up", [1, 2])
def test_steps_may_wait_before_rounds(warm_up: int, slow: tuple[str, ...], replicas: int) -> None:
    case = case_of("dpu", m=2, replicas=replicas, slow=slow, warm_up=warm_up)
    assert prepare(case).plan.program.counts.tolist()[: warm_up + 1] == [2 * replicas] * (warm_up + 1)
    check_replay(case)


@every_schedule
@pytest.mark.parametrize("how", [*SHAPES.values(), {"m": 2, "replicas": 4, "slow": ("0:3", "2:5")}], ids=str)
def test_a_report_of_rounds_is_within_tolerance(how: dict[str, Any], schedule: str) -> None:
    """With the allocator's account in each event, and a rule that ends elsewhere."""
    report = compare_replay(case_of(schedule, "adam", **how), SingleProcess(), repeats=0)
    assert report is not None
    assert report.ok, report_summary(report)
    assert report.parameters.bit_equal
    assert report.parameters.nearest is not None
    assert report.parameters.nearest.distance > 1e-9


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as three:
        yield three


@every_schedule
def test_ranks_with_unlike_numbers_of_micro_batches_do_so(schedule: str, ranks: Ranks) -> None:
    case = case_of(schedule, "adam", replicas=3, m=1, **SLOW)
    counts = prepare(case).plan.program.counts
    assert len({*counts.tolist()}) > 1
    check_replay(case, ranks.run)
    report = compare_replay(case, ranks, repeats=0)
    assert report is not None
    assert report.ok, report_summary(report)
    if schedule == "dpu":
        check_replay(case_of(schedule, replicas=3, m=2, warm_up=1), ranks.run)


@every_schedule
def test_workers_weigh_as_much_as_they_compute(schedule: str) -> None:
    """The slow worker has a quarter of the others' micro-batches, once all have begun a round together."""
    program = prepare(case_of(schedule, replicas=3, m=1, **SLOW)).plan.program
    tasks = program.tasks
    rows = tasks.step[: program.compute : program.phases] == program.steps - 2
    of_devices = np.bincount(tasks.device[: program.compute : program.phases][rows]).tolist()
    assert of_devices == [4, 1, 4]


@every_schedule
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_what_a_worker_holds(optimizer: str, schedule: str) -> None:
    """All but the optimizer state is whole; that is of a share, and has the base where tasks read something else."""
    case = case_of(schedule, optimizer, replicas=2, m=1, n=1)
    prepared = prepare(case)
    numbers = prepared.training.parameters(0).numel
    held = memory.simulated_memory(prepared.plan).max(axis=1)[0]
    moments = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer] + (schedule != "dpu")
    assert held[Category.PARAMETERS] == held[Category.GRADIENTS] == held[Category.COMMUNICATION] == 8 * numbers
    assert held[Category.OPTIMIZER] == 8 * moments * -(-numbers // 2) + 4 * (optimizer == "adam")

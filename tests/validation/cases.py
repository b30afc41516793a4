"""Optimizers, models, schedules and rules that many tests of the harness walk through."""

import pytest

from cdpsim.model import Stage
from cdpsim.schedules import SCHEDULES, TABLE_1
from tests.validation.known import known
from validation.comparison.trials import Group, Trial
from validation.replay.case import Case
from validation.training import optimizer
from validation.training.models import MODELS

OPTIMIZERS = {name: own for name, own in optimizer.OPTIMIZERS.items() if name != "adafactor"}  # which is factored
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_model = pytest.mark.parametrize("model", MODELS)
every_schedule = pytest.mark.parametrize("schedule", TABLE_1)
cyclic = [name for name in TABLE_1 if not SCHEDULES[name].order.together]


def rules_of(schedule: str) -> list[str]:
    """The rules with a name that a schedule takes."""
    return ["cdp-v1", "cdp-v2"] if schedule in cyclic else ["dp"]


def tolerance(schedule: str) -> float:
    """Point to point additions have an order; torch chooses its own inside collectives."""
    return 0.0 if schedule in cyclic or schedule.startswith("single") else 1e-12


def stages_of(case: Case) -> tuple[Stage, ...]:
    """Return the profiled stages of a case."""
    model = known(case).stages
    assert model is not None
    return model.stages


def tiny(
    name: str,
    *,
    model: str = "mlp",
    schedule: str = "single-cdp",
    offload: str = "none",
    alone: bool = True,
    lasts: float = 1,
) -> Trial:
    """A trial that takes less than a second."""
    case = Case(schedule, 2, steps=1, model=model, optimizer=OPTIMIZERS["momentum"], batch=1, offload=offload)
    return Trial(Group(name, "that it runs", lasts), case, alone)

"""Versions with a base of their own: the equation against training written out, and the replay against the equation."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from cdpsim import SCHEDULES
from cdpsim.schedules.placement import Shape
from cdpsim.schedules.rule import Rule, Versions
from cdpsim.schedules.state import Placed, State
from tests.validation.cases import OPTIMIZERS
from validation.replay.case import Case, expected_parameters, largest_difference, play_in_process, prepare
from validation.replay.equation import evaluate
from validation.training.forms import flatten
from validation.training.models import make_training

# ACCO (Nabli et al. 2024): each step reads the version before the newest; the first of two steps makes an estimate of
# its own gradients, the second the next version of both steps' gradients, both from the same parameters.
ACCO = Rule(
    "halves",
    lambda i, j, shape: 0 * i + 1,
    versions=Versions(base=lambda v: v - 1 - (v - 1) % 2, sums=lambda v: 1 + (v - 1) % 2),
)


def test_the_equation_of_acco_is_its_recurrence() -> None:
    """Algorithm of the paper for one worker and one stage, with SGD, written out by steps of two halves.

    est = theta - lr g(first half), theta' = theta - lr (g(first) + g(second)) / 2; the first half of a round reads the
    estimate of the round before, the second its theta.
    """
    training = make_training("mlp", 1)
    stage = training.stages[0]
    parameters = list(stage.parameters())

    def gradient(theta: torch.Tensor, step: int) -> torch.Tensor:
        x, target = training.data(step, 0)
        torch.nn.utils.vector_to_parameters(theta, parameters)
        return flatten(torch.autograd.grad(training.loss(stage(x), target, 1), parameters))

    theta = estimate = flatten(parameters).detach().clone()
    before = theta
    for step in range(0, 6, 2):
        first, second = gradient(estimate if step else before, step), gradient(theta, step + 1)
        estimate, theta = theta - 0.1 * first, theta - 0.1 * (first + second) / 2
    torch.nn.utils.vector_to_parameters(before, parameters)
    (found,) = evaluate(training, OPTIMIZERS["sgd"], ACCO.lags(Shape(1, 1)), 6, versions=ACCO.versions)
    assert torch.allclose(found, theta, rtol=0, atol=1e-14)


@pytest.mark.parametrize("schedule", ["multi-dp", "single-dp", "gpipe"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_acco_is_replayed(schedule: str, optimizer, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """After six steps; and the same steps without estimates end elsewhere."""
    monkeypatch.setitem(SCHEDULES, "halves", replace(SCHEDULES[schedule], name="halves", rule=ACCO))
    prepared = prepare(Case("halves", 3, steps=6, optimizer=optimizer))
    outcomes = play_in_process(prepared)
    assert largest_difference(outcomes, expected_parameters(prepared)) <= 1e-12
    late = replace(ACCO, name="late", versions=Versions())
    monkeypatch.setitem(SCHEDULES, "late", replace(SCHEDULES[schedule], name="late", rule=late))
    assert (
        largest_difference(outcomes, expected_parameters(prepare(Case("late", 3, steps=6, optimizer=optimizer)))) > 1e-6
    )


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["multi-dp", "gpipe"])
def test_steps_that_end_can_lag(lag: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delayed parameter update (DPU) is lag 1 where all update together; versions are held as long as they are read."""
    rule = Rule("late", lambda i, j, shape: 0 * i + lag)
    monkeypatch.setitem(SCHEDULES, "late", replace(SCHEDULES[schedule], name="late", rule=rule))
    prepared = prepare(Case("late", 3, steps=6, optimizer=OPTIMIZERS["adam"]))
    assert largest_difference(play_in_process(prepared), expected_parameters(prepared)) <= 1e-12


@pytest.mark.parametrize("gradients", [Placed.COPIED, Placed.OWNED])
def test_an_owned_optimizer_trains_alike(gradients: Placed, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's ZeroRedundancyOptimizer ends where data parallelism does."""
    state = State(Placed.COPIED, gradients, Placed.OWNED)
    monkeypatch.setitem(SCHEDULES, "redundant", replace(SCHEDULES["multi-dp"], name="redundant", state=state))
    prepared = prepare(Case("redundant", 3, steps=5, optimizer=OPTIMIZERS["adam"]))
    outcomes = play_in_process(prepared)
    assert (
        largest_difference(
            outcomes, expected_parameters(prepare(Case("multi-dp", 3, steps=5, optimizer=OPTIMIZERS["adam"])))
        )
        <= 1e-12
    )
    assert [len(outcome.parameters) for outcome in outcomes] == [1, 1, 1]
    assert np.sum([outcome.calls.total() for outcome in outcomes]) == 3 * 3 * (5 + 4)

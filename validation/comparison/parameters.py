"""Comparison of parameters with the update equation, under a tolerance that no other rule's parameters come near."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from cdpsim.errors import RequestError
from cdpsim.program import Op
from cdpsim.program.assembly import check_causal
from cdpsim.schedules import find_schedule
from cdpsim.schedules.rule import RULES, Rule, lag_rule

from ..replay.case import Outcome, Prepared, differences, expected_parameters, largest_difference
from ..report.schema import NearestRule, ParameterComparison
from ..training.optimizer import Optimizer

# By type, where torch.distributed sums in an order of its own, and where kernels may differ.
COLLECTIVE_TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
CUDA_TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
# A tolerance is at most this share of the distance to the nearest other rule; below a half, no result fits both.
SHARE = 0.25
FORGETFUL = "updates without their states"  # no rule; parameters that differ may be theirs
SMALL = 1_000_000  # parameters of a model for which rules with one changed stage are evaluated, too


def compare_parameters(prepared: Prepared, outcomes: list[Outcome], *, alone: bool = False) -> ParameterComparison:
    """Compare the devices' final parameters with the equation's; `alone` says that one process has played them."""
    expected = expected_parameters(prepared)
    apart = largest_difference(outcomes, expected)
    others = {rule.name: expected_parameters(prepared, rule) for rule in other_rules(prepared)}
    if prepared.request.schedule.order.local:  # whose tasks all read the newest parameters of their worker
        others = {"dp": expected_parameters(prepared, RULES["dp"])}
    nearest, rounding = find_nearest(others, expected), _rounding(prepared, expected, alone)
    tolerance = rounding if nearest is None else min(rounding, SHARE * nearest.distance)
    if apart > tolerance:
        forgetful = _Forgetful(**vars(prepared.case.optimizer))
        others[FORGETFUL] = expected_parameters(replace(prepared, case=replace(prepared.case, optimizer=forgetful)))
    by_stage = {stage: float(own) for stage, own in differences(outcomes, expected).items()}
    same = [name for name, theirs in others.items() if largest_difference(outcomes, theirs) <= tolerance < apart]
    return ParameterComparison(
        max_abs_difference=apart if apart == apart else None,  # nan is not itself
        bit_equal=apart == 0,
        tolerance=tolerance,
        nearest=nearest,
        # That differs most, or whose are no numbers.
        stage=max(by_stage, key=lambda stage: (by_stage[stage] != by_stage[stage], by_stage[stage])) if apart else None,
        other_rule=same[0] if same else None,
    )


class _Forgetful(Optimizer):
    """An optimizer whose state no update changes."""

    def over(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's optimizer of parameters, each of whose updates is its first."""
        optimizer = super().over(parameters)
        optimizer.register_step_post_hook(lambda own, *_: own.state.clear())
        return optimizer


def are_within(parameters: ParameterComparison) -> bool:
    """Return whether parameters differ by no more than their tolerance."""
    return parameters.max_abs_difference is not None and parameters.max_abs_difference <= parameters.tolerance


def _rounding(prepared: Prepared, expected: list[Tensor], alone: bool) -> float:
    """Return the difference that another order of additions, or another kernel, may make.

    Messages between two devices add in the equation's order, and so do collectives within one process.
    """
    case = prepared.case
    if case.device == "cpu" and (alone or (prepared.plan.program.messages.op == Op.P2P).all()):
        return 0.0
    tolerances = COLLECTIVE_TOLERANCE if case.device == "cpu" else CUDA_TOLERANCE
    if case.dtype in tolerances:
        return tolerances[case.dtype]
    largest = max(float(theta.abs().max()) for theta in expected)
    return rounding_bound(expected[0].dtype, case.steps, case.shape.m, largest)


def rounding_bound(dtype: torch.dtype, steps: int, micro_batches: int, largest: float) -> float:
    """Return how far apart parameters are whose gradients are added in two orders, in a type of two bytes.

    A step rounds a sum of m gradients m - 1 times and the parameter once, each time by half of `eps` at most, times a
    value that is no larger than the largest parameter. Both orders do so.
    """
    return 2 * steps * micro_batches * torch.finfo(dtype).eps / 2 * largest


def find_nearest(others: dict[str, list[Tensor]], expected: list[Tensor]) -> NearestRule | None:
    """Return the rule whose parameters are nearest to the expected ones; None where a run is too short for another."""
    found = []
    for name, parameters in others.items():
        apart = torch.stack([(a - b).abs().max() for a, b in zip(parameters, expected, strict=True)]).max()
        found.append(NearestRule(rule=name, distance=float(apart)))
    return min(found, key=lambda each: each.distance, default=None)


def other_rules(prepared: Prepared) -> Iterator[Rule]:
    """Yield the causal rules that read other versions in this run: those with a name, and shifted or dropped lags."""
    case, own = prepared.case, prepared.request.rule
    shape, schedule = case.shape, find_schedule(case.schedule)
    seen = [_readings(prepared, own)]
    for rule in (*RULES.values(), *_shifted(prepared)):
        readings = _readings(prepared, rule)
        if any(np.array_equal(readings, each) for each in seen):
            continue
        try:
            if not schedule.order.together:  # where steps end for all, every older version is there
                check_causal(schedule, rule, shape)
        except RequestError:
            continue
        seen.append(readings)
        yield rule


def _readings(prepared: Prepared, rule: Rule) -> np.ndarray:
    """Return how old the versions are that a rule reads at the most in so few steps."""
    shape = prepared.case.shape
    lags = np.stack([rule.lags(shape), rule.backward_lags(shape)])
    return np.minimum(lags, prepared.case.steps - 1)


def _shifted(prepared: Prepared) -> Iterator[Rule]:
    """Yield the rule of a case with all lags a step older or newer, or those of one stage, or of backwards, changed."""
    own, shape = prepared.request.rule, prepared.case.shape
    lags = own.lags(shape)
    changed = {"one step older": lags + 1, "one step newer": np.maximum(lags - 1, 0)}
    if own.backward:
        changed["backwards as forwards"] = lags
    training = prepared.training
    if sum(training.parameters(j).shape[0] for j in range(training.n)) > SMALL:
        changed = {}
    for name, shifted in changed.items():
        yield replace(lag_rule(shifted.tolist()), name=name, versions=own.versions)
    for stage in range(shape.n if changed else 0):
        older = lags.copy()
        older[:, stage] += 1
        yield replace(lag_rule(older.tolist()), name=f"stage {stage} one step older", versions=own.versions)

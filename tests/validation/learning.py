"""Trainings whose data or losses are special, replays of trainings without a name, and what they end with."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cdpsim.api import assemble
from validation.profile.footprints import profile_stages
from validation.replay.case import Case, Prepared, play_in_process
from validation.replay.plan import Plan
from validation.replay.shares import in_whole_numbers
from validation.training.forms import Form
from validation.training.optimizer import Optimizer
from validation.training.stages import Architecture, Draw, Training, cut

R = 4  # updates of theta


class Same(Draw):
    """The same data for all micro-batches."""

    def __call__(self, *seeds: int) -> Tensor:
        return super().__call__(seeds[-1])


def with_same_data(training: Training) -> Training:
    return replace(training, inputs=Same(*training.inputs), targets=Same(*training.targets))


def linear() -> Training:
    """A loss that is linear in the parameters: a gradient that is the same everywhere."""
    draw = Same(Form((2, 4), torch.float64))
    layers = [nn.Linear(4, 4).double()]
    return cut(Architecture(layers, draw, draw, lambda output, target: (output * target).mean()), [])


def prepared_of(training: Training, schedule: str, optimizer: Optimizer, updates: int = R, **how: Any) -> Prepared:
    """A case of a training that has no name."""
    case = Case(schedule, training.n, updates, optimizer=optimizer, **how)
    case = replace(case, stages=profile_stages(training, case.optimizer, case.split))
    program = assemble(case.request)
    program = in_whole_numbers(program, training, case.optimizer) if program.shard > 1 else program
    return Prepared(case, case.request, Plan(program, case.request.disorder), training)


def played(prepared: Prepared) -> Tensor:
    """All parameters after a replay in one process, put together from their shares."""
    program, training = prepared.plan.program, prepared.training
    vectors = [torch.full(training.parameters(j).shape, torch.nan, dtype=torch.float64) for j in range(program.n)]
    for outcome in play_in_process(prepared):
        for stage, theta in outcome.parameters.items():
            vectors[stage][outcome.places[stage]] = torch.tensor(theta)
    return torch.cat(vectors)


def near(one: Tensor, other: Tensor, updates: int = R) -> bool:
    """Whether they differ by rounding alone: four units in the last place of each update, of the largest number."""
    return bool((one - other).abs().max() <= 4 * updates * torch.finfo(one.dtype).eps * other.abs().max().clamp(min=1))

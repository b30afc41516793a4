"""The paper's update equation, evaluated step by step in one process: theta_{t+1} = OPT(theta_t, mean of gradients).

Micro-batch i takes its gradient at theta_t of stage j where u[i, j] is true, at theta_{t-1} elsewhere. Nothing here
knows of devices, messages or buffers; only the order in which gradients are added is the caller's, because that
decides the last bits.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import reduce
from operator import add

import torch
from torch import Tensor

from cdpsim.program import Kind, Program
from cdpsim.schedules.rule import Fresh
from validation.training.forms import flatten
from validation.training.optimizer import Optimizer
from validation.training.stages import Training

Grouping = Callable[[int, int], list[list[int]]]  # step, stage -> micro-batches that are summed first, in groups
Version = list[dict[str, Tensor]]  # of each stage, its parameters by name


def evaluate(
    training: Training, optimizer: Optimizer, fresh: Fresh, steps: int, grouping: Grouping | None = None
) -> list[Tensor]:
    """Give each stage's parameters after some steps as one vector; by default gradients are added one by one."""
    m = len(fresh)
    grouping = grouping or (lambda step, stage: [[i] for i in range(m)])
    stages = deepcopy(training.stages)
    for stage in stages:
        stage.to(training.device)
    optimizers = [optimizer.over(list(stage.parameters())) for stage in stages]
    newest = older = _snapshot(stages)
    for t in range(steps):
        gradients = [_gradients(training, (older, newest), fresh[i], t, i, m) for i in range(m)]
        for j, stage in enumerate(stages):
            groups = grouping(t, j)
            for name, parameter in stage.named_parameters():
                own = [reduce(add, (gradients[i][j][name] for i in group)) for group in groups]
                parameter.grad = reduce(add, own)
            optimizers[j].step()
        newest, older = _snapshot(stages), newest
    return [flatten(version.values()) for version in newest]


def _snapshot(stages: tuple[torch.nn.Module, ...]) -> Version:
    return [
        {name: parameter.detach().clone().requires_grad_() for name, parameter in stage.named_parameters()}
        for stage in stages
    ]


def _gradients(
    training: Training, versions: tuple[Version, Version], fresh: Fresh, step: int, micro_batch: int, m: int
) -> Version:
    """One micro-batch's gradient through all stages at once, each at the version that it reads."""
    read = [versions[int(new)][j] for j, new in enumerate(fresh)]
    x, target = training.data(step, micro_batch)
    for j, parameters in enumerate(read):
        x = training.apply(j, parameters, x)
    loss = training.loss(x, target, m)
    inputs = [tensor for parameters in read for tensor in parameters.values()]
    flat = torch.autograd.grad(loss, inputs, materialize_grads=True)  # zeros of what has no part in it
    remaining = iter(flat)
    return [dict(zip(parameters, remaining, strict=False)) for parameters in read]


def grouping_of(program: Program) -> Grouping:
    """Add as a program does point to point: each device its own micro-batches, then devices one after another."""
    tasks = program.tasks
    backward = tasks.kind == Kind.B

    def grouping(step: int, stage: int) -> list[list[int]]:
        rows = (backward & (tasks.step == step) & (tasks.stage == stage)).nonzero()[0]
        pairs = sorted(zip(tasks.micro_batch[rows].tolist(), tasks.device[rows].tolist(), strict=True))
        groups: dict[int, list[int]] = {}
        for micro_batch, device in pairs:
            groups.setdefault(device, []).append(micro_batch)
        return sorted(groups.values(), key=lambda group: group[-1])

    return grouping

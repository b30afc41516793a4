"""The update equation, evaluated step by step in one process: theta_{t+1} = OPT(theta_t, mean of gradients).

Micro-batch i takes its gradient at theta_{t-lag} of stage j, with the lag of its rule: in the CDP paper 0 where u[i, j]
is true and 1 elsewhere. Nothing here knows devices, messages or buffers; only the order in which gradients are added
is the caller's, because that decides the last bits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cdpsim.numeric.columns import Ints
from cdpsim.program import Content, Op, Program
from cdpsim.schedules.rule import UpdateSources
from cdpsim.schedules.state import When

from ..training.forms import flatten
from ..training.optimizer import Optimizer
from ..training.stages import Training

Sums = Sequence["int | Sums"]  # micro-batches, and sums of some that are made first
Grouping = Callable[[int, int], Sums]  # of a step and a stage
StageParameters = list[dict[str, Tensor]]  # of each stage, by name


def evaluate(
    training: Training,
    optimizer: Optimizer,
    lags: Ints,
    steps: int,
    grouping: Grouping | None = None,
    backward_lags: Ints | None = None,
    line: UpdateSources | None = None,
) -> list[Tensor]:
    """Return each stage's parameters after some steps as one vector; by default gradients are added one by one.

    Lags have a row for each micro-batch and a column for each stage. Backwards may have other lags: a backward then
    uses other parameters than the forward whose graph it goes through. By a `line` of versions, each update starts from
    the parameters and the optimizer state of its base, and takes the mean of several steps' gradients.
    """
    m, back = len(lags), lags if backward_lags is None else backward_lags
    grouping = grouping or (lambda step, stage: [[i] for i in range(m)])
    stages, dtype = deepcopy(training.stages), training.parameters(0).dtype
    for stage in stages:
        stage.to(training.device, optimizer.dtype(dtype))
    optimizers = [optimizer.over(list(stage.parameters())) for stage in stages]
    versions = deque([_snapshot(stages, dtype)], maxlen=None if line else 1 + int(max(lags.max(), back.max())))
    states = [_states(stages, optimizers)]
    taken: dict[
        int, list[StageParameters]
    ] = {}  # the gradients of a step's micro-batches, while an update is to take them

    def read(step: int, lag: list[int]) -> StageParameters:
        return [versions[-1 - min(own, step)][j] for j, own in enumerate(lag)]

    for t in range(steps):
        read_by = [(read(t, there), read(t, again)) for there, again in zip(lags.tolist(), back.tolist(), strict=True)]
        taken[t] = [_gradients(training, *own, t, i, m) for i, own in enumerate(read_by)]
        first = t if line is None else int(line.first[t])
        for j, stage in enumerate(stages):
            if line is not None:
                _go_back(stage, optimizers[j], states[int(line.base[t])][j])
            for name, parameter in stage.named_parameters():
                sums = [_add_up(grouping(s, j), [own[j][name] for own in taken[s]]) for s in range(first, t + 1)]
                mean = sums[0] if len(sums) == 1 else reduce(add, sums) / len(sums)
                parameter.grad = mean.to(parameter.dtype)
            optimizers[j].step()
        versions.append(_snapshot(stages, dtype))
        if line is None:
            del taken[t]
        else:
            states.append(_states(stages, optimizers))
    return [flatten(version.values()) for version in versions[-1]]


def _add_up(sums: Sums, gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of micro-batches' gradients, added in the order of the sums."""
    return reduce(add, (gradients[each] if isinstance(each, int) else _add_up(each, gradients) for each in sums))


def _states(
    stages: tuple[torch.nn.Module, ...], optimizers: list[torch.optim.Optimizer]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return what each stage's next update starts from: parameters as they are updated, and the optimizer's state."""
    return [deepcopy((stage.state_dict(), own.state_dict())) for stage, own in zip(stages, optimizers, strict=True)]


def _go_back(
    stage: torch.nn.Module, optimizer: torch.optim.Optimizer, state: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Set a stage and its optimizer back to what they had."""
    parameters, of_optimizer = state
    stage.load_state_dict(parameters)
    optimizer.load_state_dict(deepcopy(of_optimizer))


def _snapshot(stages: tuple[torch.nn.Module, ...], dtype: torch.dtype) -> StageParameters:
    """Return each stage's parameters as passes read them, in their type."""
    return [
        {name: own.detach().to(dtype, copy=True).requires_grad_() for name, own in stage.named_parameters()}
        for stage in stages
    ]


def _gradients(
    training: Training, forward: StageParameters, backward: StageParameters, step: int, micro_batch: int, m: int
) -> StageParameters:
    """Return one micro-batch's gradient through all stages at once, each at the version that it reads."""
    x, target = training.data(step, micro_batch)
    inputs = [tensor for parameters in forward for tensor in parameters.values()]
    with _going_back_with(inputs, [tensor for parameters in backward for tensor in parameters.values()]):
        for j, parameters in enumerate(forward):
            x = training.apply(j, parameters, x)
        loss = training.loss(x, target, m)
    flat = torch.autograd.grad(loss, inputs, materialize_grads=True)  # zeros for a parameter without a part in it
    remaining = iter(flat)
    return [dict(zip(parameters, remaining, strict=False)) for parameters in forward]


def _going_back_with(forward: list[Tensor], backward: list[Tensor]) -> AbstractContextManager[object]:
    """Let a graph that is made with some parameters be differentiated with others."""
    if all(there is back for there, back in zip(forward, backward, strict=True)):
        return nullcontext()
    other = {there.data_ptr(): back.detach() for there, back in zip(forward, backward, strict=True)}

    def pack(tensor: Tensor) -> Tensor:
        back = other.get(tensor.untyped_storage().data_ptr())
        return tensor.detach() if back is None else back.as_strided(*_strided(tensor))

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def _strided(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def grouping_of(program: Program) -> Grouping:
    """Return the order of additions: each device its own micro-batches, then device by device.

    A collective goes by the devices' numbers, a sum from device to device by their last micro-batches.
    To a sum that travels with its stage's state each micro-batch adds in turn. What is summed after each pass is added
    to the sum so far: where ranks have shares, as the sum of all, else rank by rank. Ranks of a group come first.
    """
    gives, first = program.gradient_tasks, program.first_pass
    rank = np.empty(len(program.tasks), dtype=np.int64)
    rank[program.lane_tasks] = np.arange(len(program.lane_tasks))
    rounds = program.state.reduce is When.EACH
    inside, messages = _groups_of(program), program.messages
    in_turn = bool(((messages.content == Content.GRADIENT) & (messages.op == Op.P2P)).any())

    def grouping(step: int, stage: int) -> Sums:
        tasks = gives[first[step] : first[step + 1], stage]
        groups: dict[int, list[int]] = {}
        for micro_batch in np.argsort(rank[tasks]).tolist():
            group = micro_batch if program.state.travels else int(program.tasks.device[tasks[micro_batch]])
            groups.setdefault(group, []).append(micro_batch)
        if inside:
            return _among_groups(groups, inside, rounds=rounds)
        if rounds:
            return [own[k] for k in range(max(map(len, groups.values()))) for _, own in sorted(groups.items())]
        by_device = [groups[device] for device in sorted(groups)]
        return [*sorted(by_device, key=lambda own: own[-1])] if in_turn else [*by_device]

    return grouping


def _groups_of(program: Program) -> dict[int, int]:
    """Return the number of each device's sharding group; nothing where nothing is split."""
    messages = program.messages
    numbers = np.unique(messages.dst[messages.op == Op.REDUCE_SCATTER]).tolist()
    return {device: number for number in numbers for device in program.groups[number].tolist()}


def _among_groups(own: dict[int, list[int]], inside: dict[int, int], *, rounds: bool) -> Sums:
    """Return the sums of devices' micro-batches, first in each sharding group: of all at once, or pass by pass."""
    passes = range(max(map(len, own.values())))
    sums = []
    for taken in [slice(k, k + 1) for k in passes] if rounds else [slice(None)]:
        groups: dict[int, list[Sums]] = {}
        for device in sorted(own):
            groups.setdefault(inside[device], []).append(own[device][taken])
        sums.append(list(groups.values()))
    return sums

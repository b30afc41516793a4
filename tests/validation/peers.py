"""torch's own ways to train in parallel, on ranks that a test keeps alive; each gives what its rank ended with."""

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from validation.ranks.member import Member
from validation.replay.case import Case, prepare
from validation.training.forms import flatten
from validation.training.stages import Training

Ended = dict[int, NDArray[np.float64]]  # stage -> its parameters, as one vector
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
}


def data_parallel(member: Member, case: Case) -> Ended:
    """DistributedDataParallel: every rank has a micro-batch of every step, and the whole model."""
    training = prepare(case).training
    model = DistributedDataParallel(nn.Sequential(*training.stages))
    _train(member, case, training, model)
    return {j: flatten(stage.parameters()).numpy() for j, stage in enumerate(training.stages)}


def sharded(member: Member, case: Case) -> Ended:
    """FSDP2: the same, with every stage's parameters sharded over all ranks, gathered for use and dropped after it."""
    training = prepare(case).training
    mesh = init_device_mesh("cpu", (member.count,))
    for stage in training.stages:
        fully_shard(stage, mesh=mesh, reshard_after_forward=True)
    model = nn.Sequential(*training.stages)
    fully_shard(model, mesh=mesh)
    _train(member, case, training, model)
    return {j: flatten(map(_whole, stage.parameters())).numpy() for j, stage in enumerate(training.stages)}


def _whole(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor), "it is not sharded"
    return parameter.full_tensor()


def _train(member: Member, case: Case, training: Training, model: nn.Module) -> None:
    optimizer = case.optimizer.over(list(model.parameters()))
    for t in range(case.steps):
        optimizer.zero_grad()
        x, target = training.data(t, member.rank)
        torch.autograd.backward(training.criterion(model(x), target))
        optimizer.step()


def pipelined(member: Member, case: Case) -> Ended:
    """torch.distributed.pipelining: every rank has stages, and all micro-batches of every step pass through them."""
    shape, training = case.shape, prepare(case).training
    own = {j: deepcopy(training.stages[j]) for j in range(member.rank, case.n, case.n // shape.chunks)}
    optimizers = [case.optimizer.over(list(stage.parameters())) for stage in own.values()]
    stages = [PipelineStage(stage, j, case.n, torch.device("cpu")) for j, stage in own.items()]
    several = case.schedule.startswith("interleaved")
    pipe = SCHEDULES[case.schedule](
        stages if several else stages[0], n_microbatches=shape.m, loss_fn=training.criterion
    )
    for t in range(case.steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        data = zip(*(training.data(t, i) for i in range(shape.m)), strict=True)
        inputs, targets = (torch.cat(parts) for parts in data)
        pipe.step(*[inputs] * (0 in own), target=targets if case.n - 1 in own else None)
        for optimizer in optimizers:
            optimizer.step()
    return {j: flatten(stage.parameters()).numpy() for j, stage in own.items()}

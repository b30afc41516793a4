"""torch's own ways to train in parallel, on ranks that a test keeps alive; each gives what its rank ended with."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from validation.ranks.member import Member
from validation.replay.case import Case, prepare
from validation.training.forms import flatten
from validation.training.stages import Training

Ended = dict[int, NDArray[np.float64]]  # stage -> its parameters, as one vector
SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


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


def pipelined(member: Member, case: Case, schedule: str) -> Ended:
    """torch.distributed.pipelining: every rank has a stage, and all micro-batches of every step pass through it."""
    n, j, training = case.n, member.rank, prepare(case).training
    stage = training.stages[j]
    optimizer = case.optimizer.over(list(stage.parameters()))
    pipe = SCHEDULES[schedule](
        PipelineStage(stage, j, n, torch.device("cpu")), n_microbatches=n, loss_fn=training.criterion
    )
    for t in range(case.steps):
        optimizer.zero_grad()
        inputs, targets = (torch.cat(parts) for parts in zip(*(training.data(t, i) for i in range(n)), strict=True))
        pipe.step(*[inputs] * (j == 0), target=targets if j == n - 1 else None)
        optimizer.step()
    return {j: flatten(stage.parameters()).numpy()}

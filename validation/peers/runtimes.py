"""torch's own ways to train in parallel, each as a session on a rank: the same stages and data as a replay's.

A session is used as its users write it: nothing of torch is replaced. Its stages are copied when it begins, so a record
that has begun before sees all that it allocates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from warnings import catch_warnings, simplefilter

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cdpsim.errors import RequestError
from cdpsim.schedules import find_schedule
from cdpsim.schedules.placement import Shape

from ..ranks.member import Member
from ..replay.case import Case, build_training
from ..training.forms import flatten
from ..training.recomputation import CheckpointedLayer
from ..training.stages import Place, Training

Ended = dict[int, NDArray[np.floating[Any]]]  # stage -> its parameters, as one vector
Batch = tuple[Tensor | None, Tensor | None]  # input and target of a step, of the ranks that need them


PAPER = "paper"  # the simulation that every schedule has
WITHOUT_BUCKETS = "torch:gradient_buckets=none"


class Session(ABC):
    """A rank's part in a training by a runtime, step by step."""

    optimizers: Sequence[torch.optim.Optimizer]

    def __init__(self, member: Member, case: Case, stages: list[int]) -> None:
        self.member, self.case = member, case
        self.training: Training = build_training(case)
        self.own = copied_stages(self.training, stages, member.device)

    @abstractmethod
    def draw(self, step: int) -> Batch:
        """Return this rank's data of a step."""

    @abstractmethod
    def passes(self, batch: Batch) -> None:
        """Run all forwards and backwards of a step."""

    def clear(self) -> None:
        """Drop the gradients of the last step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def update(self) -> None:
        """Let optimizers update the parameters."""
        for optimizer in self.optimizers:
            optimizer.step()

    def ended(self) -> Ended:
        """Return the parameters of this rank's stages."""
        return parameters_of(self.own)


def parameters_of(stages: Mapping[int, nn.Module]) -> Ended:
    """Return the parameters of stages."""
    rows = ((j, all_parameters(stage)) for j, stage in stages.items())
    whole = ((j, [own.full_tensor() if isinstance(own, DTensor) else own for own in row]) for j, row in rows)
    return {j: flatten(row).cpu().numpy() for j, row in whole}


def all_parameters(stage: nn.Module) -> list[nn.Parameter]:
    """Return a stage's parameters in their order, also one that it has twice."""
    return [own for _, own in stage.named_parameters(remove_duplicate=False)]


def copied_stages(training: Training, stages: Iterable[int], device: torch.device) -> dict[int, nn.Module]:
    """Return copies of stages, with their tied parameters as one, and checkpoints around layers that have one."""
    copies: dict[int, nn.Module] = {j: deepcopy(training.stages[j]).to(device) for j in stages}
    for group in training.tied:
        here = [(copies[j], number) for j, number in group if j in copies]
        for stage, number in here[1:]:
            path, _, name = [*dict(stage.named_parameters(remove_duplicate=False))][number].rpartition(".")
            setattr(stage.get_submodule(path), name, all_parameters(here[0][0])[here[0][1]])
    for j, number in training.checkpointed:
        if j in copies:
            setattr(copies[j], str(number), CheckpointedLayer(copies[j].get_submodule(str(number))))
    return copies


class Pipelined(Session):
    """`torch.distributed.pipelining`: every rank has stages, and all micro-batches of a step pass through them."""

    def __init__(self, member: Member, case: Case, schedule: Any) -> None:
        super().__init__(member, case, own_stages(member.rank, case))
        own = dict.fromkeys(parameter for stage in self.own.values() for parameter in stage.parameters())
        self.optimizers = [case.optimizer.over(list(own))]
        self.stages = [PipelineStage(stage, j, case.n, member.device) for j, stage in self.own.items()]
        single = issubclass(schedule, schedules.PipelineScheduleSingle)
        whole, m = not self.training.tied, case.shape.m  # torch scales a parameter once for each stage that has it
        loss = self.training.criterion if whole else partial(self.training.loss, micro_batches=m)
        given = self.stages[0] if single else self.stages
        self.pipe = schedule(given, n_microbatches=m, loss_fn=loss, scale_grads=whole)
        self.shared = [pair for group in self.training.tied for pair in self._across(group)]

    def _across(self, group: Sequence[Place]) -> Iterator[tuple[nn.Parameter, Any]]:
        """Yield this rank's tensor of a tied group of several ranks, and these ranks' group, which all ranks make."""
        holders = {j: rank for rank in range(self.member.count) for j in own_stages(rank, self.case)}
        ranks = sorted({holders[j] for j, _ in group})
        made = dist.new_group(ranks) if len(ranks) > 1 else None
        here = [all_parameters(self.own[j])[number] for j, number in group if j in self.own]
        if made is not None and here:
            yield here[0], made

    def draw(self, step: int) -> Batch:
        """Return the whole batch where the first stage is, and all targets where the last is."""
        count = range(self.case.shape.m)
        inputs = torch.cat([self.training.input(step, i) for i in count]) if 0 in self.own else None
        last = self.case.n - 1 in self.own
        return inputs, torch.cat([self.training.target(step, i) for i in count]) if last else None

    def passes(self, batch: Batch) -> None:
        """Let the runtime run its schedule, and sum the gradients of tied tensors, which several ranks have."""
        inputs, targets = batch
        self.pipe.step(*[] if inputs is None else [inputs], target=targets)
        for parameter, group in self.shared:
            assert parameter.grad is not None, "every parameter has a part in the loss"
            dist.all_reduce(parameter.grad, group=group)


def own_stages(rank: int, case: Case) -> list[int]:
    """Return the stages of a rank: every P-th one, or in a V those with which the way down and the way up meet it."""
    ranks = case.n // case.shape.chunks
    if case.schedule in V_PLACED:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, case.n, ranks))


class DataParallel(Session):
    """Every rank has micro-batches of every step and the whole model, which a subclass wraps."""

    def __init__(self, member: Member, case: Case) -> None:
        super().__init__(member, case, list(range(case.n)))
        self.model = self.wrap(nn.Sequential(*self.own.values()))
        self.optimizers = [self.optimize()]
        own = case.shape.m if case.shape.replicas > 1 else 1  # else the case counts those of all ranks
        self.micro_batches = range(own * member.rank, own * (member.rank + 1))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model that is trained."""
        return model

    def optimize(self) -> torch.optim.Optimizer:
        """Return the optimizer of the model."""
        return self.case.optimizer.over(list(self.model.parameters()))

    def draw(self, step: int) -> Batch:
        """Return the micro-batches of this rank as one batch: those after the ones of lower ranks."""
        data = [self.training.data(step, i) for i in self.micro_batches]
        if len(data) == 1:
            return data[0]
        inputs, targets = zip(*data, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def passes(self, batch: Batch) -> None:
        """Run the model forwards and backwards with each micro-batch."""
        whole, all_targets = batch
        assert whole is not None and all_targets is not None, "every rank has data"
        count = len(self.micro_batches)
        for k, (inputs, targets) in enumerate(zip(whole.chunk(count), all_targets.chunk(count), strict=True)):
            with self.summing(last=k == count - 1):
                loss = self.training.criterion(self.model(inputs), targets)
                torch.autograd.backward(loss if count == 1 else loss / count)

    def summing(self, *, last: bool) -> AbstractContextManager[None]:
        """Say whether ranks sum the gradients that a pass gives."""
        return nullcontext()


class Replicated(DataParallel):
    """`DistributedDataParallel` with its options; gradients are summed after each pass, or after the last alone."""

    def __init__(self, member: Member, case: Case, *, each: bool = False, **options: Any) -> None:
        self.each, self.options = each, options
        super().__init__(member, case)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a model whose reducer sums gradients in buckets."""
        return DistributedDataParallel(model, **self.options)

    def summing(self, *, last: bool) -> AbstractContextManager[None]:
        """Keep the reducer from sums that are not due."""
        assert isinstance(self.model, DistributedDataParallel), "it has been wrapped"
        return nullcontext() if last or self.each else self.model.no_sync()


class OptimizerSharded(Replicated):
    """`ZeroRedundancyOptimizer`: each rank has the optimizer's state of some parameters, and updates these."""

    def optimize(self) -> torch.optim.Optimizer:
        """Return an optimizer of this rank's share."""
        with catch_warnings():  # torch's own module warns of a name that it uses itself
            simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer

        kind = type(self.case.optimizer.over([nn.Parameter(torch.zeros(1))]))
        options: dict[str, Any] = {**self.case.optimizer.options}
        return ZeroRedundancyOptimizer(self.model.parameters(), kind, **options)


class FullySharded(DataParallel):
    """FSDP2: every stage's parameters are sharded over all ranks, gathered for use and dropped after it.

    `reshard` says when they are dropped, in the words of `--reshard`: after each forward and backward (yes), each
    backward (no), or the step's last backward (step). `each` says whether gradients are summed after each pass.
    """

    def __init__(self, member: Member, case: Case, *, reshard: str = "yes", each: bool = True) -> None:
        self.reshard, self.each = reshard, each
        super().__init__(member, case)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a model whose stages are sharded."""
        mesh = init_device_mesh(self.member.device.type, (self.member.count,))
        tied = {j for group in self.training.tied for j, _ in group}  # which only one group can have: the model's own
        for stage in (stage for j, stage in self.own.items() if j not in tied):
            fully_shard(stage, mesh=mesh, reshard_after_forward=self.reshard == "yes")
        fully_shard(model, mesh=mesh)
        return model

    def summing(self, *, last: bool) -> AbstractContextManager[None]:
        """Tell the model what to do after the next backward."""
        assert isinstance(self.model, FSDPModule), "it has been wrapped"
        if len(self.micro_batches) > 1:
            self.model.set_requires_gradient_sync(last or self.each)
            self.model.set_reshard_after_backward(last or self.reshard != "step")
        return nullcontext()


class Checkpointed(DataParallel):
    """`torch.utils.checkpoint` around each stage, in a model whose gradients are averaged after the backward."""

    def __init__(self, member: Member, case: Case, *, reentrant: bool, kept: bool = False) -> None:
        self.reentrant, self.kept = reentrant, kept
        super().__init__(member, case)

    def clear(self) -> None:
        """Drop the gradients of the last step, or fill them with zeros."""
        self.optimizers[0].zero_grad(set_to_none=not self.kept)

    def passes(self, batch: Batch) -> None:
        """Run each stage under a checkpoint, go back, and average gradients one by one."""
        x, targets = batch
        assert x is not None and targets is not None, "every rank has data"
        if self.reentrant:  # such a checkpoint needs an input that has a gradient
            x.requires_grad_()
        for stage in self.own.values():
            x = checkpoint(stage, x, use_reentrant=self.reentrant)
        loss = self.training.criterion(x, targets)
        del x
        torch.autograd.backward(loss)
        for parameter in self.model.parameters():
            assert parameter.grad is not None, "every parameter has a part in the loss"
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.member.count)


class Peer(NamedTuple):
    """A runtime, the schedule of cdpsim that is held against it, and what its session needs."""

    name: str
    about: str
    schedule: str
    begin: Callable[[Member, Case], Session]
    kind: Literal["pipeline", "data parallel"] = "data parallel"
    chunks: int = 1
    optimizer: str = "sgd"
    recompute: str | None = None
    runtime: str = "torch"  # the behaviour that is simulated; paper: there is none for it
    remainder: Callable[[Case], dict[str, int]] = lambda case: {}  # bytes that it has, by name, and no simulation
    remainder_of_rank: Callable[[Case, int, int], dict[str, int]] = lambda case, rank, peak: {}  # with a simulated peak
    cut_alike: bool = False  # whether its collectives are the simulation's, one by one
    sharded: bool = False  # whether no rank has a stage's parameters between steps
    splits: bool = False  # whether its schedule splits backwards
    m: int = 1  # micro-batches of a rank in a step, of `dp`
    options: Mapping[str, Any] = MappingProxyType({})  # of its simulation

    def check_micro_batches(self, ranks: int, m: int) -> None:
        """Refuse fewer micro-batches than the runtime takes."""
        least = {"dualpipev": 2 * ranks, "1f1b": ranks}.get(self.name, 1)
        if self.kind == "pipeline" and m < least:
            problem = f"{self.name} needs at least {least} micro-batches on {ranks} ranks"
            raise RequestError(f"-m {m}", f"{problem}; give more, or name others with --only")


def held_again(case: Case) -> dict[str, int]:
    """Return the bytes that a reentrant checkpoint holds while its backward runs, by torch's source.

    `CheckpointFunction.backward` keeps the output that it computes again in a variable. Its states of random numbers
    live as long as the graph, which a reentrant backward is still in.
    """
    return {"output computed again": build_training(case).boundary(0).nbytes} | random_states(case)


def random_states(case: Case) -> dict[str, int]:
    """Return the bytes of random numbers' states, which checkpoints hold from their forwards to their backwards."""
    return {"states of random numbers": case.n * torch.get_rng_state().nbytes}


COUNTER = 4  # bytes of the number of updates, of which Adam has one for each tensor


def held_by_owners(case: Case, rank: int, peak: int) -> dict[str, int]:
    """Return what ZeroRedundancyOptimizer holds beyond a simulated peak in which each rank has an equal share.

    Each rank has the states of whole tensors. While Adam updates one of them, it makes two of its size beside the one
    that it made last for the tensor before, which its variable still has.
    """
    stages, own = case.stages, tensors_of_owner(case, rank)
    assert stages is not None, "it has been profiled"
    stages = stages.with_ties_counted_once(stages.tied)
    states = sum(2 * size + COUNTER for size in own)
    share = sum(-(-size // case.shape.replicas) for size in stages.size("optimizer").tolist())
    beside = 2 * int(stages.size("gradients").sum()) + int(stages.size("data").sum())  # gradients, and their buckets
    made = max(2 * size + before for before, size in pairwise([0, *own]))
    remainder = {"states of whole tensors": states - share}
    remainder["what an update makes, beyond the highest moment before"] = max(0, beside + share + made - peak)
    return {name: size for name, size in remainder.items() if size}


def tensors_of_owner(case: Case, rank: int) -> list[int]:
    """Return the bytes of the tensors that a rank updates: the largest first, each goes to the rank that has least."""
    training = build_training(case)
    own = copied_stages(training, range(training.n), torch.device("cpu")).values()
    sizes = (each.nbytes for each in dict.fromkeys(chain.from_iterable(map(all_parameters, own))))
    owners: list[list[int]] = [[] for _ in range(case.shape.replicas)]
    for size in sorted(sizes, reverse=True):
        min(owners, key=sum).append(size)
    return owners[rank]


def _pipeline(name: str, schedule: str, torchs: Any, chunks: int = 1) -> Peer:
    about = f"torch.distributed.pipelining.{torchs.__name__}"
    splits = find_schedule(schedule).splits(Shape(2 * chunks, 4 * chunks, chunks))
    return Peer(name, about, schedule, partial(Pipelined, schedule=torchs), "pipeline", chunks, splits=splits)


def _replicated(name: str, torchs: str, *, m: int = 1, each: bool = False, views: bool = False, cap: int = 0) -> Peer:
    """Return DistributedDataParallel with m micro-batches on a rank, and with options."""
    options: dict[str, Any] = {"zero": 0}
    given: dict[str, Any] = {"each": each}
    if each:
        options["reduce"] = "each"
    if views:
        given["gradient_as_bucket_view"] = True
    if cap:
        given["bucket_cap_mb"], options["buckets"] = cap, f"1MiB,{cap}MiB"
    runtime = "torch:gradient_buckets=views" if views else "torch"
    begin = partial(Replicated, **given)
    return Peer(name, torchs, "dp", begin, runtime=runtime, m=m, options=options, cut_alike=True)


def _sharded(name: str, torchs: str, *, m: int = 1, each: bool = True, reshard: str = "yes") -> Peer:
    """Return FSDP2 with m micro-batches on a rank, and with options; gloo gathers nothing ahead of a forward."""
    options = {"zero": 3, "prefetch": 0, "reshard": reshard, "padding": "rows"}
    options["reduce"] = "each" if each else "last"
    begin = partial(FullySharded, reshard=reshard, each=each)
    return Peer(name, torchs, "dp", begin, sharded=True, m=m, options=options, cut_alike=True)


def _checkpointed(name: str, how: str, *, reentrant: bool = False, kept: bool = False, **more: Any) -> Peer:
    """Return checkpoints of each stage, whose gradients may be kept between steps."""
    runtime = f"{WITHOUT_BUCKETS},gradients=kept" if kept else WITHOUT_BUCKETS
    begin, about = partial(Checkpointed, reentrant=reentrant, kept=kept), f"torch.utils.checkpoint, {how}"
    return Peer(name, about, "multi-dp", begin, recompute="full", runtime=runtime, **more)


_PASSES = 4  # micro-batches on a rank
_KEPT_GRADIENTS = "zero_grad(set_to_none=False)"
_NO_SYNC = "with no_sync in all but the last of 4 passes"
_EACH = "which sums after each of 4 passes"
_DDP, _VIEWS = "DistributedDataParallel", "DistributedDataParallel(gradient_as_bucket_view=True)"
_FSDP2, _KEPT = "fully_shard", "fully_shard(reshard_after_forward=False)"
_SYNC, _BACK = "set_requires_gradient_sync(False)", "set_reshard_after_backward(False)"
_DATA_PARALLEL = (
    _replicated("ddp", _DDP),
    _replicated("ddp-views", _VIEWS, views=True),
    _replicated("ddp-buckets", "DistributedDataParallel(bucket_cap_mb=1)", cap=1),
    _replicated("ddp-no-sync", f"{_DDP} {_NO_SYNC}", m=_PASSES),
    _replicated("ddp-no-sync-views", f"{_VIEWS} {_NO_SYNC}", m=_PASSES, views=True),
    _replicated("ddp-each", f"{_DDP}, {_EACH}", m=_PASSES, each=True),
    _replicated("ddp-each-views", f"{_VIEWS}, {_EACH}", m=_PASSES, each=True, views=True),
    Peer(
        "zero-redundancy",
        "ZeroRedundancyOptimizer over DistributedDataParallel, Adam",
        "dp",
        OptimizerSharded,
        optimizer="adam",
        options={"zero": 1},
        remainder_of_rank=held_by_owners,
    ),
    _sharded("fsdp2", "torch.distributed.fsdp.fully_shard"),
    _sharded("fsdp2-kept", _KEPT, reshard="no"),
    _sharded("fsdp2-each", f"{_FSDP2}, {_EACH}", m=_PASSES),
    _sharded("fsdp2-last", f"{_FSDP2}, {_SYNC} in all but the last of 4 passes", m=_PASSES, each=False),
    _sharded("fsdp2-each-backward", f"{_KEPT}, {_EACH}", m=_PASSES, reshard="no"),
    _sharded("fsdp2-each-kept", f"{_KEPT}, {_EACH}, {_BACK} in all but the last", m=_PASSES, reshard="step"),
    _sharded(
        "fsdp2-last-kept",
        f"{_KEPT}, {_SYNC} and {_BACK} in all but the last of 4 passes",
        m=_PASSES,
        each=False,
        reshard="step",
    ),
)


V_PLACED = ("zbv", "dualpipev")

_PEERS = (
    _pipeline("gpipe", "gpipe", schedules.ScheduleGPipe),
    _pipeline("1f1b", "1f1b", schedules.Schedule1F1B),
    _pipeline("interleaved-1f1b", "interleaved-1f1b", schedules.ScheduleInterleaved1F1B, 2),
    _pipeline("looped-bfs", "looped-bfs", schedules.ScheduleLoopedBFS, 2),
    _pipeline("interleaved-zero-bubble", "interleaved-zero-bubble", schedules.ScheduleInterleavedZeroBubble, 2),
    _pipeline("zbv", "zbv", schedules.ScheduleZBVZeroBubble, 2),
    _pipeline("dualpipev", "dualpipev", schedules.ScheduleDualPipeV, 2),
    *_DATA_PARALLEL,
    _checkpointed("checkpoint", "not reentrant"),
    _checkpointed("checkpoint-reentrant", "reentrant", reentrant=True, remainder=held_again),
    # With all gradients there, the peak is in the first backward, where all states of random numbers are.
    _checkpointed("checkpoint-kept", f"not reentrant, {_KEPT_GRADIENTS}", kept=True, remainder=random_states),
)

PEERS: Mapping[str, Peer] = MappingProxyType({peer.name: peer for peer in _PEERS})

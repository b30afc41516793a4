"""Measurements of a session on its rank: memory and its contents, messages, parameters, and time.

Contents and messages are seen where torch dispatches operations, below the runtime: nothing is replaced. Each is taken
in a run of its own, so that none disturbs another. The third step counts: torch allocates in the first
what it keeps, and `DistributedDataParallel` rebuilds its buckets in the second.
"""

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..profile.allocations import record_allocations
from ..profile.tracker import Reference, Tracker, address_of, tensors_in
from ..ranks.member import Member
from ..replay.case import Case, build_training
from ..replay.watch import settled_clock
from ..report.schema import Call
from ..training.stages import Training
from .runtimes import PEERS, Batch, Ended, Pipelined, Session

# The contents that functions of torch or of a session make; the innermost running one counts.
MAKERS = {
    "deepcopy": "parameters",
    "_setup_forward_recv_info": "receive buffers of activations",
    "_create_grad_recv_info": "receive buffers of gradients",
    "_forward_metadata_inference": "metadata",
    "_backward_metadata_inference": "metadata",
    "forward_one_chunk": "activations",
    "_maybe_compute_loss": "activations",
    "stage_backward_input": "made by backwards of inputs",
    "stage_backward_weight": "made by backwards of weights",
    "backward_one_chunk": "made by backwards",
    "draw": "data",
    "wrap": "buckets",
    "DistributedDataParallel._pre_forward": "buckets",
    "FSDPState._pre_forward": "gathered parameters",
    "unshard": "gathered parameters",
    "_pre_backward": "gathered parameters",
    "post_backward": "sums of gradients",
    "update": "optimizer",
    "optimize": "optimizer",
    "_engine_run_backward": "made by backwards",
    "passes": "activations",
}
SENDS = {"send": "send", "recv_": "receive"}
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_": "reduce",
    "alltoall_base_": "all-to-all",
}


class Observer(Tracker):
    """A tracker that names each storage, and records each call of `torch.distributed`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type)
        self.at_peak: dict[str, int] = {}  # bytes by kind, when the level was the highest
        self.calls: list[Call] = []
        self.labels: dict[int, str] = {}  # storage's address -> the task whose result will be sent
        self._kinds: dict[int, str] = {}  # storage's address -> what it is

    def start(self) -> None:
        """Forget peaks and calls so far."""
        self.reset_peak()
        self.at_peak = self.kinds()
        self.calls.clear()

    def kinds(self) -> dict[str, int]:
        """Return the bytes that are alive now, by kind."""
        sums: Counter[str] = Counter()
        for address, entry in self._entries.copy().items():
            sums[self._kinds.get(address, "activations")] += entry.size
        return {kind: size for kind, size in sorted(sums.items()) if size}

    def name(self, tensor: Tensor, kind: str) -> None:
        """Name a storage from now on."""
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        self._find(tensor)
        self._kinds[address_of(tensor)] = kind

    def watch(self, module: nn.Module) -> None:
        """Name a module's parameters, their gradients when these are there, and its outputs."""
        for parameter in module.parameters():
            self.name(parameter.data, "parameters")
            parameter.register_post_accumulate_grad_hook(self._name_gradient)
        module.register_forward_hook(lambda module, arguments, output: self.name(output, "outputs"))

    def _name_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.name(parameter.grad, "gradients")

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run an operation, track its results, and record it where it communicates."""
        space, _, name = getattr(func, "_schema").name.partition("::")  # noqa: B009 - every operation has one
        if space == "c10d":
            self._record(name, args)
        highest = self.peak
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._weigh_again()
        if self.peak > highest:
            self.at_peak = self.kinds()
        return result

    def _weigh_again(self) -> None:
        """Count storages that have been resized by no operation: FSDP2 frees and fills its buffers so."""
        for entry in self._entries.copy().values():
            storage = entry.reference()
            if storage is not None and entry.counts and storage.nbytes() != entry.size:
                self._weigh(entry, storage.nbytes())

    def _record(self, name: str, args: tuple[Any, ...]) -> None:
        tensors = tensors_in(args[0])
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if name in SENDS:
            for tensor in tensors if name == "send" else []:
                if self._kinds.get(address_of(tensor)) != "outputs":
                    self.name(tensor, "sent gradients")
            label = self.labels.get(address_of(tensors[0]), "") if name == "send" else ""
            self.calls.append(Call(SENDS[name], int(args[2]), nbytes, label))
        elif name in COLLECTIVES:
            self.calls.append(Call(COLLECTIVES[name], -1, nbytes))

    def _look(self, result: object) -> None:
        """Track the results of an operation; a distributed tensor has no memory but its local one's."""
        super()._look(result._local_tensor if isinstance(result, DTensor) else result)

    def _find(self, tensor: Tensor, count: bool = True) -> Any:
        address = address_of(tensor)
        if address not in self._entries:
            self._kinds[address] = _maker(sys._getframe(1))
        return super()._find(tensor, count)

    def _forget(self, address: int, reference: Reference) -> None:
        super()._forget(address, reference)
        self._kinds.pop(address, None)
        self.labels.pop(address, None)


def _maker(frame: FrameType | None) -> str:
    """Return what the innermost known function makes."""
    while frame is not None:
        if kind := MAKERS.get(frame.f_code.co_name) or MAKERS.get(frame.f_code.co_qualname):
            return kind
        frame = frame.f_back
    return "activations"


RELEASE_SECONDS = 0.001  # in which a thread of gloo's drops what it has sent, if it gets a processor
LOOKS = 2  # at threads that rest: in the first one, a thread may wait for Python's lock
LONGEST_WAIT = 1.0  # seconds; then a measurement goes on beside threads that work
WARM_STEPS = 2  # before the measured one


class MemoryOfRank(NamedTuple):
    """The allocator's bytes since before the stages were made: before the measured step, in it, and after it.

    `tasks` are the highest levels during tasks, by names such as `F 2,0` of stage 2 and micro-batch 0.
    """

    before: int
    peak: int
    after: int
    tasks: dict[str, int]


class ContentsOfRank(NamedTuple):
    """The live storages before a step, in it and after it, their kinds at the peak, and all messages of the step."""

    before: int
    peak: int
    after: int
    at_peak: dict[str, int]
    calls: list[Call]


class StepInterval(NamedTuple):
    """The begin and end of a rank's passes of a step, in seconds on a clock that all processes of a machine share."""

    begin: float
    end: float


class _Mark(NamedTuple):
    task: str
    begin: int
    end: int


def measure_memory(member: Member, name: str, case: Case) -> MemoryOfRank:
    """Train with a runtime and return its allocator's bytes."""
    _prepare(member, case)
    marks: list[_Mark] = []
    record = record_allocations(member.device)
    with record, _released_in_waits():
        session = PEERS[name].begin(member, case)
        _mark_tasks(session, marks, record.now)
        for step in range(WARM_STEPS + 1):
            marks.clear()
            batch = _begin_step(session, step)
            begin = record.now()
            session.passes(batch)
            session.update()
            end = record.now()
    tasks = {mark.task: record.peak(mark.begin, mark.end) for mark in marks}
    return MemoryOfRank(record.at(begin), record.peak(begin, end), record.at(end), tasks)


def observe(member: Member, name: str, case: Case) -> ContentsOfRank:
    """Train with a runtime and return its live storages, and its messages."""
    observer = Observer(member.device)
    observer.ignore(parameter for stage in _prepare(member, case).stages for parameter in stage.parameters())
    with observer, _released_in_waits():
        session = PEERS[name].begin(member, case)
        for stage in session.own.values():
            observer.watch(stage)
        if isinstance(session, Pipelined):
            _label_sends(session, observer)
        for step in range(WARM_STEPS + 1):
            batch = _begin_step(session, step)
            observer.start()
            before = observer.level
            session.passes(batch)
            session.update()
        return ContentsOfRank(before, observer.peak, observer.level, observer.at_peak, list(observer.calls))


def measure_time(member: Member, name: str, case: Case, repeats: int) -> list[StepInterval]:
    """Train with a runtime and return the intervals of its steps, without the warm-up's."""
    session = PEERS[name].begin(member, case)
    intervals = []
    for step in range(WARM_STEPS + repeats):
        session.clear()
        batch = session.draw(step)
        _open_connections(member)
        begin = settled_clock(member.device)
        session.passes(batch)
        intervals.append(StepInterval(begin, settled_clock(member.device)))
        session.update()
    return intervals[WARM_STEPS:]


def train(member: Member, name: str, case: Case) -> Ended:
    """Train with a runtime and return the parameters that this rank ends with."""
    session = PEERS[name].begin(member, case)
    for step in range(case.steps):
        session.clear()
        session.passes(session.draw(step))
        session.update()
    return session.ended()


def _begin_step(session: Session, step: int) -> Batch:
    """Drop the last step's gradients, draw the data, and give gloo's threads time to drop sent tensors."""
    session.clear()
    batch = session.draw(step)
    let_threads_rest()
    return batch


@contextmanager
def _released_in_waits() -> Iterator[None]:
    """Let gloo's threads come to rest after each wait for a message.

    A thread of gloo's has a reference to what it sent for some microseconds after the wait for it. If that is the last
    one, the block is freed later than by a slower rank, and by a thread that the profiler does not see.
    """
    inner = dist.Work.wait

    @wraps(inner)
    def wait(work: dist.Work, *arguments: Any) -> bool:
        done: bool = inner(work, *arguments)
        let_threads_rest()
        return done

    dist.Work.wait = wait  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = inner  # type: ignore[method-assign]


def let_threads_rest() -> None:
    """Sleep until all other threads of this process sleep too: on a busy machine one may wait for a processor."""
    deadline, looks, own = time.monotonic() + LONGEST_WAIT, 0, str(threading.get_native_id())
    while looks < LOOKS and time.monotonic() < deadline:
        time.sleep(RELEASE_SECONDS)
        looks = 0 if any(task.name != own and _runs(task) for task in Path("/proc/self/task").glob("*")) else looks + 1


def _runs(task: Path) -> bool:
    """Return whether Linux says that a thread can run; one that has ended cannot."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False


def _prepare(member: Member, case: Case) -> Training:
    """Build a case's training, of which sessions copy their stages, and open connections to all ranks.

    Earlier sessions are freed first: their blocks would otherwise be freed while the next is measured.
    """
    gc.collect()
    training = build_training(case)
    _open_connections(member)
    return training


def _open_connections(member: Member) -> None:
    dist.all_reduce(torch.zeros(1, device=member.device))


def _label_sends(session: Pipelined, observer: Observer) -> None:
    """Tell an observer the stage and micro-batch of all that a pipeline is about to send."""

    def label(stage: Any, method: str, content: str) -> None:
        inner = getattr(stage, method)

        @wraps(inner)
        def labelled(micro_batch: int) -> list[Any]:
            operations: list[Any] = inner(micro_batch)
            for operation in operations:
                address = address_of(operation.tensor)
                observer.labels[address] = f"{content} {stage.stage_index},{micro_batch}"
            return operations

        setattr(stage, method, labelled)

    for stage in session.stages:
        label(stage, "get_fwd_send_ops", "activation")
        label(stage, "get_bwd_send_ops", "activation gradient")


def _mark_tasks(session: Session, marks: list[_Mark], now: Callable[[], int]) -> None:
    """Mark the begin and end of each task of a pipeline; without one, of each stage's forwards."""
    if isinstance(session, Pipelined):
        for owner in session.stages:
            for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                _mark_method(owner, method, marks, now)
    else:
        for j, stage in session.own.items():
            _mark_forward(stage, f"F {j},{session.member.rank}", marks, now)


def _mark_forward(stage: nn.Module, task: str, marks: list[_Mark], now: Callable[[], int]) -> None:
    """Mark the first forward of a step; a checkpoint runs it again in the backward."""
    begun: list[int] = []
    stage.register_forward_pre_hook(lambda module, arguments: begun.append(now()))

    def end(module: nn.Module, arguments: object, output: object) -> None:
        begin = begun.pop()
        if all(mark.task != task for mark in marks):
            marks.append(_Mark(task, begin, now()))

    stage.register_forward_hook(end)


def _mark_method(stage: Any, method: str, marks: list[_Mark], now: Callable[[], int]) -> None:
    inner = getattr(stage, method)
    letter = {"forward_one_chunk": "F", "backward_weight_one_chunk": "W"}.get(method)

    @wraps(inner)
    def marked(micro_batch: int, *arguments: Any, **options: Any) -> Any:
        kind, begin = letter or ("B" if options.get("full_backward", True) else "I"), now()
        result = inner(micro_batch, *arguments, **options)
        marks.append(_Mark(f"{kind} {stage.stage_index},{micro_batch}", begin, now()))
        return result

    setattr(stage, method, marked)

"""Measurements of a session on its rank: memory, what is in it, messages, parameters, and time.

Each is taken in a run of its own, so that none disturbs another. The third step counts: torch allocates in the first
what it keeps, and `DistributedDataParallel` rebuilds its buckets in the second.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..profile.allocations import record_allocations
from ..ranks.member import Member
from ..replay.case import Case, build_training
from ..report.schema import Call
from ..training.stages import Training
from .observer import Observer
from .runtimes import PEERS, Batch, Ended, Pipelined, Session

RELEASE_SECONDS = 0.001  # in which a thread of gloo's drops what it has sent, if it gets a processor
LOOKS = 2  # at threads that rest: in the first one, a thread may wait for Python's lock
LONGEST_WAIT = 1.0  # seconds; then a measurement goes on beside threads that work
WARM_STEPS = 2  # before the measured one


class TaskMemory(NamedTuple):
    """A task of a rank, such as `F 2,0` of stage 2 and micro-batch 0, and the highest level during it."""

    task: str
    peak: int


class MemoryOfRank(NamedTuple):
    """The allocator's bytes since before the stages were made: before the measured step, in it, and after it."""

    before: int
    peak: int
    after: int
    tasks: list[TaskMemory]


class ContentsOfRank(NamedTuple):
    """The live storages before a step, in it and after it, what they are at the peak, and all messages of the step."""

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
    """Train with a runtime and return what its allocator gives."""
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
    tasks = [TaskMemory(mark.task, record.peak(mark.begin, mark.end)) for mark in marks]
    return MemoryOfRank(record.at(begin), record.peak(begin, end), record.at(end), tasks)


def observe(member: Member, name: str, case: Case) -> ContentsOfRank:
    """Train with a runtime and return what its live storages are, and its messages."""
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
    """Train with a runtime and return the intervals of its steps, without those that warm up."""
    session = PEERS[name].begin(member, case)
    intervals = []
    for step in range(WARM_STEPS + repeats):
        session.clear()
        batch = session.draw(step)
        _open_connections(member)
        begin = _now(member)
        session.passes(batch)
        intervals.append(StepInterval(begin, _now(member)))
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
    """Drop the last step's gradients, draw the data, and give gloo's threads time to drop what they have sent."""
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
    deadline, looks = time.monotonic() + LONGEST_WAIT, 0
    while looks < LOOKS and time.monotonic() < deadline:
        time.sleep(RELEASE_SECONDS)
        looks = 0 if _others_run() else looks + 1


def _others_run() -> bool:
    """Return whether another thread runs, or would if it had a processor."""
    own = str(threading.get_native_id())
    return any(task.name != own and _runs(task) for task in Path("/proc/self/task").glob("*"))


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


def _now(member: Member) -> float:
    if member.device.type == "cuda":
        torch.cuda.synchronize(member.device)
    return time.perf_counter()


def _label_sends(session: Pipelined, observer: Observer) -> None:
    """Tell an observer the stage and micro-batch of all that a pipeline is about to send."""
    for stage in session.stages:
        for method, content in (("get_fwd_send_ops", "activation"), ("get_bwd_send_ops", "activation gradient")):
            _after(stage, method, _labeller(observer, f"{content} {stage.stage_index}"))


def _labeller(observer: Observer, prefix: str) -> Callable[..., None]:
    def label(operations: list[Any], micro_batch: int) -> None:
        for operation in operations:
            observer.labels[operation.tensor.untyped_storage()._cdata] = f"{prefix},{micro_batch}"

    return label


def _after(stage: Any, method: str, look: Callable[[list[Any], int], None]) -> None:
    """Let a function look at what a method returns."""
    inner = getattr(stage, method)

    @wraps(inner)
    def looked_at(micro_batch: int) -> list[Any]:
        operations: list[Any] = inner(micro_batch)
        look(operations, micro_batch)
        return operations

    setattr(stage, method, looked_at)


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
        kind = letter or ("B" if options.get("full_backward", True) else "I")
        with _marking(f"{kind} {stage.stage_index},{micro_batch}", marks, now):
            return inner(micro_batch, *arguments, **options)

    setattr(stage, method, marked)


@contextmanager
def _marking(task: str, marks: list[_Mark], now: Callable[[], int]) -> Iterator[None]:
    begin = now()
    yield
    marks.append(_Mark(task, begin, now()))

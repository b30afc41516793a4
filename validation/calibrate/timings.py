"""Times on this machine: of messages between ranks, and of the passes of a model's stages.

Messages use the transport of a replay, and passes its code, whose overheads are part of the times. All ranks call
every function here at once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import thread_time
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cdpsim.program import Content, Op

from ..profile.allocations import allocator_count
from ..profile.division import divide
from ..profile.footprints import likeness_key
from ..profile.workspaces import workspaces_of_stages
from ..ranks.member import Member
from ..replay.contents import Message
from ..replay.transport import Pending
from ..replay.watch import settled_clock
from ..training.forms import flatten, form_of
from ..training.models import Stages
from ..training.optimizer import Optimizer, OptimizerState
from ..training.passes import Pass, Split, backward_for_input, backward_for_weights
from ..training.recomputation import Stash, run_backward, run_forward
from ..training.stages import Training

TimedValue = TypeVar("TimedValue")

WARM_UP = 2
SERIES = 6  # of all sizes, one after another: a disturbance of one series is often over by the next

Begin = Callable[[], Pending]
Times = dict[int, list[list[float]]]  # size -> for each series the seconds of each repetition
Spans = dict[int, list[list["RankInterval"]]]


class RankInterval(NamedTuple):
    """The start and end of one rank's part, on the clock that all processes of a machine share."""

    start: float
    end: float


class Passed(NamedTuple):
    """The time of one pass: by the clock, and of this thread's processor."""

    seconds: float
    thread_seconds: float


def repetitions(size: int) -> int:
    """Return how often to repeat a message of a size: small ones more often, as they vary more."""
    return max(3, min(16, 2**25 // size))


def ping_pong(member: Member, sizes: list[int]) -> Times:
    """Send each size to and fro between ranks 0 and 1; return, on rank 0, the time of one way."""

    def play(send: Begin, receive: Begin) -> None:
        for begin in (send, receive) if member.rank == 0 else (receive, send):
            begin().wait()

    times = _between_two(member, sizes, play)
    return {size: [[both / 2 for both in series] for series in own] for size, own in times.items()}


def both_ways(member: Member, sizes: list[int]) -> Times:
    """Let ranks 0 and 1 send each size to each other at once; return, on rank 0, the time of that."""

    def play(send: Begin, receive: Begin) -> None:
        for pending in (receive(), send()):
            pending.wait()

    return _between_two(member, sizes, play)


def _between_two(member: Member, sizes: list[int], play: Callable[[Begin, Begin], None]) -> Times:
    if member.rank > 1:
        return {}
    own, other = member.rank, 1 - member.rank
    # One number for each direction: messages between two ranks keep their order.
    out, back = _message(Op.P2P, (own, other), node=own), _message(Op.P2P, (other, own), node=other)
    times: Times = {size: [] for size in sizes}
    for size in sizes * SERIES:
        tensor = _zeros(member, size)
        send = partial(member.transport.begin, out, tensor)
        receive = partial(member.transport.begin, back, None, form_of(tensor))
        spans = _repeated(member, size, partial(play, send, receive))
        times[size].append([span.end - span.start for span in spans])
    return times if own == 0 else {}


def time_collective(member: Member, op: Op, ranks: int, sizes: list[int]) -> Spans:
    """Run a collective over the first ranks; return, on each of them, the intervals of its part."""
    members = tuple(range(ranks))
    member.transport.make_groups([members])
    if member.rank >= ranks:
        return {}
    message = _message(op, members)
    spans: Spans = {size: [] for size in sizes}
    for size in sizes * SERIES:
        action = partial(_run_collective, member, message, _zeros(member, size))
        spans[size].append(_repeated(member, size, action, partial(wait_for_all, member, members)))
    return spans


def _run_collective(member: Member, message: Message, tensor: Tensor) -> None:
    gives = message.op != Op.BROADCAST or member.rank == message.src
    member.transport.begin(message, tensor if gives else None, form_of(tensor)).wait()


def wait_for_all(member: Member, members: tuple[int, ...]) -> None:
    """Wait for all ranks, so that the next call begins everywhere at about the same time."""
    member.transport.begin(_message(Op.ALL_REDUCE, members), _zeros(member, 8)).wait()


def _repeated(
    member: Member, size: int, action: Callable[[], object], meet: Callable[[], object] = lambda: None
) -> list[RankInterval]:
    """Return the times of repeated calls, after some that warm up; all members meet before each."""
    spans = []
    for _ in range(WARM_UP + repetitions(size)):
        meet()
        start = settled_clock(member.device)
        action()
        spans.append(RankInterval(start, settled_clock(member.device)))
    return spans[WARM_UP:]


def _message(op: Op, members: tuple[int, ...], node: int = 0) -> Message:
    return Message(node, op, Content.ACTIVATION, 0, 0, 0, members[0], members, 0)


def _zeros(member: Member, size: int) -> Tensor:
    # Zeros: repeated sums do not grow.
    return torch.zeros(size // 4, dtype=torch.float32, device=member.device)


def begin_all_reduce(member: Member, members: tuple[int, ...], size: int) -> Begin:
    """Return a function that begins an all-reduce of a size."""
    tensor = _zeros(member, size)
    return partial(member.transport.begin, _message(Op.ALL_REDUCE, members), tensor, form_of(tensor))


class StageTimes(NamedTuple):
    """The times of one stage's tasks, one for each micro-batch."""

    forward: list[Passed]
    backward: list[Passed]
    update: list[Passed]
    input_backward: list[Passed]  # both parts of a split backward
    weight_backward: list[Passed]


def time_passes(member: Member, stages: Stages, rounds: int, busy: int, split: Split = "once") -> list[StageTimes]:
    """Time each stage's tasks in the first `busy` ranks at once, while the others wait.

    `split` says how often the parts of a split backward go through a stage.
    """
    members = tuple(range(busy))
    if busy > 1:
        member.transport.make_groups([members])
    if member.rank >= busy:
        return []
    training = _training(member, stages, split)
    if busy > 1:
        wait_for_all(member, members)
    return stage_times(training, stages.optimizer, rounds)


def measure_workspace(member: Member, stages: Stages) -> dict[str, Any]:
    """Return `[devices.workspace]` as the first rank finds it: of each stage's tasks, and what libraries keep."""
    found = {} if member.rank else workspaces_of_stages(_training(member, stages, "once"))
    kept = allocator_count(member.device, "requested_bytes", "current") if member.device.type == "cuda" else 0
    return found | ({"kept": kept} if kept else {})


def _training(member: Member, stages: Stages, split: Split) -> Training:
    training = stages.training(member.device)
    return replace(training, divided=divide(training, likeness_key)) if split == "once" else training


def stage_times(training: Training, optimizer: Optimizer, rounds: int) -> list[StageTimes]:
    """Time each stage's passes and update over a number of micro-batches."""
    track = []
    for j, module in enumerate(training.stages):
        theta = flatten(module.parameters()).to(training.device)
        track.append(_Held(theta, torch.zeros_like(theta), optimizer.state(theta, training.parts(j))))
    times = [StageTimes([], [], [], [], []) for _ in track]
    for k in range(WARM_UP + rounds):
        found = _micro_batch(training, optimizer, track, k)
        for stage, own in enumerate(found):
            for kept, passed in zip(times[stage], own, strict=True):
                kept.extend([passed] if k >= WARM_UP else [])
    return times


class _Held(NamedTuple):
    theta: Tensor
    gradient: Tensor
    state: OptimizerState


def _micro_batch(training: Training, optimizer: Optimizer, held: list[_Held], number: int) -> list[list[Passed]]:
    """Time a micro-batch through all stages and back, then each update; sums are part of their tasks, draws are not.

    Then time it once more, with backwards in two parts, of which none computes anything again.
    """
    device = training.device

    def whole(own: Stash, stage: _Held, above: Tensor | None) -> tuple[Tensor | None, list[Passed]]:
        below, passed = time_call(device, partial(run_backward, training, own, stage.theta, above, stage.gradient))
        return below, [passed]

    def in_parts(own: Stash, stage: _Held, above: Tensor | None) -> tuple[Tensor | None, list[Passed]]:
        assert isinstance(own, Pass), "it is made without segments"
        (below, left), first = time_call(
            device, partial(backward_for_input, own, stage.theta, above, training.divided.get(own.stage))
        )
        _, second = time_call(device, partial(backward_for_weights, training, left, stage.theta, stage.gradient))
        return below, [first, second]

    times = _there_and_back(training, held, number, whole)
    for j, (own, (theta, gradient, state)) in enumerate(zip(times, held, strict=True)):
        own.append(time_call(device, partial(optimizer.update, theta, gradient, state, training.parts(j)))[1])
    again = _there_and_back(replace(training, segments=None, offloads=False), held, number, in_parts)
    return [[*own, *parts] for own, (_, *parts) in zip(times, again, strict=True)]


def _there_and_back(
    training: Training,
    held: list[_Held],
    number: int,
    go_back: Callable[[Stash, _Held, Tensor | None], tuple[Tensor | None, list[Passed]]],
) -> list[list[Passed]]:
    n = training.n
    times: list[list[Passed]] = []
    kept: list[Stash] = []
    between: Tensor | None = None
    for stage in range(n):
        x = training.input(0, number) if between is None else between
        target = training.target(0, number) if stage == n - 1 else None
        forward = partial(run_forward, training, stage, held[stage].theta, x, target, n)
        (between, own), passed = time_call(training.device, forward)
        kept.append(own)
        times.append([passed])
    for stage in reversed(range(n)):
        between, passes = go_back(kept.pop(), held[stage], between)
        times[stage] += passes
    return times


def time_call(device: torch.device, action: Callable[[], TimedValue]) -> tuple[TimedValue, Passed]:
    """Return the result and the time of a call, to the end of its work on a GPU, which is idle before it."""
    clock, own = settled_clock(device), thread_time()
    result = action()
    return result, Passed(settled_clock(device) - clock, thread_time() - own)

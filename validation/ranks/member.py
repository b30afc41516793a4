"""A rank's own side: its device, meeting the other ranks, and serving calls."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from cdpsim.errors import RequestError, choose

from ..replay.case import Case, DeviceRun, Outcome, keeping_account, parts_of, prepare
from ..replay.contents import Kinds, ReplayError
from ..replay.live import LiveOutcome, LiveWorker
from ..replay.transport import Distributed, first_line, meet_ranks

BACKENDS = ("gloo", "nccl")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, eq=False)
class Member:
    """A rank's number, device and transport."""

    rank: int
    count: int
    device: torch.device
    store: Store
    transport: Distributed


class RankFailure(NamedTuple):
    """The report of a rank that cannot go on; `subject` is that of a request that cannot be served."""

    reason: str
    subject: str | None = None
    kind: Kinds = "error"


def check_device(device: str, backend: str, ranks: int) -> None:
    """Refuse a device or a backend that the ranks cannot have on this machine."""
    choose("device", device, DEVICES)
    choose("backend", backend, BACKENDS)
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < ranks:
        problem = f"nccl needs a GPU for each rank; there are {gpus} for {ranks} ranks; use --backend gloo"
        raise RequestError("backend", problem)
    if backend == "nccl" and device == "cpu":
        raise RequestError("backend", "nccl carries nothing but a GPU's tensors; use --device cuda or --backend gloo")
    if device == "cuda" and not gpus:
        raise RequestError("device", "cuda needs a GPU that torch can use, and there is none; use --device cpu")


def join_ranks(
    rank: int, count: int, store: Store, *, device: str, backend: str, local_rank: int, seconds: float
) -> Member:
    """Meet all other ranks at a store, and return this rank as a member of them."""
    own = torch.device("cpu")
    if device == "cuda":
        own = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(own)
    # Waiting for a message then ends with an error here, and does not end the process.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    meet_ranks(store, "start", rank, range(count), seconds)
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
    group_store = PrefixStore("group", store)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(backends, store=group_store, rank=rank, world_size=count, timeout=timeout)
    staged = device == "cuda" and backend == "gloo"
    return Member(rank, count, own, store, Distributed(store, rank, count, device=own, staged=staged))


def answer_call(
    member: Member, function: Callable[..., object], arguments: tuple[object, ...], timeout: float
) -> object:
    """Return the result of a call on a rank, or the failure, of which the other ranks must learn."""
    member.transport.allow(timeout)
    try:
        return function(member, *arguments)
    except RequestError as error:
        return RankFailure(str(error).removeprefix(f"{error.subject}: "), error.subject)
    except ReplayError as error:
        return RankFailure(first_line(error))
    except Exception as error:
        if is_out_of_memory(error):
            return RankFailure(f"out of memory: {first_line(error)}", kind="out of memory")
        return RankFailure(f"{type(error).__name__}: {first_line(error)}")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error is one of Python's, a GPU's or a CPU's allocator; the last has no type of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def describe_failures(failures: dict[int, RankFailure], missing: list[int]) -> Exception | None:
    """Return the error that names all failed ranks in one line, in the order of their failures."""
    for failure in failures.values():
        if failure.subject is not None:
            return RequestError(failure.subject, failure.reason)
    problems = [f"rank {rank}: {failure.reason}" for rank, failure in failures.items()]
    problems += [f"rank {rank} has not answered" for rank in missing]
    kinds: set[Kinds] = {failure.kind for failure in failures.values()}
    if missing:
        kinds.add("timeout")
    return ReplayError("; ".join(problems), min(kinds, key=get_args(Kinds).index)) if problems else None


def replay_part(member: Member, case: Case) -> Outcome | None:
    """Play one device of a case; a rank without a device only helps to make groups."""
    prepared = prepare(case)
    program = prepared.plan.program
    if program.devices > member.count:
        problem = f"{case.schedule} has {program.devices} devices at n={case.n}; start as many, not {member.count}"
        raise RequestError("ranks", problem)
    member.transport.make_groups([tuple(group.tolist()) for group in program.groups])
    member.transport.calls.clear()
    if member.rank >= program.devices:
        return None
    part = parts_of(prepared)[member.rank]
    with keeping_account(prepared) as ledger:
        seat = DeviceRun(prepared, part, member.transport, ledger)
        for node in part.nodes:
            seat.device.play(node)
        seat.device.finish()
    return seat.outcome()


def play_live(member: Member, case: Case) -> LiveOutcome | None:
    """Run the rounds of a case without counts; a rank without a device only helps to make groups."""
    prepared = prepare(case)
    program = prepared.plan.program
    member.transport.make_groups([tuple(group.tolist()) for group in program.groups])
    if member.rank >= program.devices:
        return None
    return LiveWorker(prepared, member.rank, member.transport).run()

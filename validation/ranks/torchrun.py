"""Ranks that torchrun has started: this process is one of them, and rank 0 gets all results."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self, get_origin, get_type_hints

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from cdpsim.errors import RequestError

from ..replay.case import Case, Outcome, profiled
from ..replay.contents import ReplayError
from ..replay.transport import first_line, meet_ranks, missing_keys
from .launcher import GRACE_SECONDS, START_SECONDS, Ranks, Result
from .member import RankFailure, answer_call, check_device, describe_failures, join_ranks, replay_part
from .parent import end_with_parent


def find_ranks(
    count: int, *, device: str = "cpu", backend: str = "gloo", start: float = START_SECONDS
) -> "Ranks | TorchrunRanks":
    """Return the ranks that torchrun has started, if this process is one of them, or start what is needed."""
    here = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return (TorchrunRanks if here else Ranks)(count, device=device, backend=backend, start=start)


class TorchrunRanks:
    """Ranks as in `Ranks`, one of which is this process: all make the same calls, and only rank 0 has the results."""

    def __init__(self, count: int, *, device: str = "cpu", backend: str = "gloo", start: float = START_SECONDS) -> None:
        end_with_parent()
        # In place of torchrun's handler, whose exception would not be raised inside a wait.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        rank, world = _number("RANK"), _number("WORLD_SIZE")
        if world < count:
            problem = f"{count} devices need one each, and {world} were started; use --nproc-per-node={count}"
            raise RequestError("ranks", problem)
        check_device(device, backend, _number("LOCAL_WORLD_SIZE", world))
        local_rank = _number("LOCAL_RANK", rank)
        self._member = join_ranks(
            rank, world, _store(start), device=device, backend=backend, local_rank=local_rank, seconds=start
        )
        self.reports = rank == 0
        self._calls = 0

    def run(self, case: Case, *, timeout: float = 60.0) -> list[Outcome] | None:
        """Replay a case; rank 0 gets the outcome of each device. `timeout` seconds are for all of it."""
        outcomes = self.call(replay_part, profiled(case), timeout=timeout)
        return None if outcomes is None else [outcome for outcome in outcomes if outcome is not None]

    def call(self, function: Callable[..., Result], *arguments: object, timeout: float = 60.0) -> list[Result] | None:
        """Call a function on every rank with its `Member` and these arguments; rank 0 gets all results."""
        said = answer_call(self._member, function, arguments, timeout)
        data = b"" if isinstance(said, RankFailure) else encode_result(said)
        self._calls += 1
        if problem := self._agree(said if isinstance(said, RankFailure) else None, len(data), timeout):
            raise problem
        if not self.reports:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
            return None
        found = [decode_result(data, kind := get_type_hints(function)["return"])]
        for rank in range(1, self._member.count):
            tensor = torch.empty(self._sizes[rank], dtype=torch.uint8)
            dist.recv(tensor, rank)
            found.append(decode_result(tensor.numpy().tobytes(), kind))
        return found

    def close(self) -> None:
        """Leave together: a rank that leaves while others still work makes them fail."""
        store, rank = self._member.store, self._member.rank
        dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()
        # Rank 0 may keep the store, so it leaves last.
        meet_ranks(store, "end", rank, range(self._member.count) if rank == 0 else (), START_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()

    def _agree(self, failure: RankFailure | None, size: int, timeout: float) -> Exception | None:
        """Exchange between ranks whether all went well; refuse if not."""
        member, place = self._member, f"call {self._calls}"
        member.store.set(f"{place}/{member.rank}", msgspec.json.encode((failure, size)).decode())
        if member.rank == 0:
            problem = describe_failures(*self._statuses(place, timeout))
            subject = problem.subject if isinstance(problem, RequestError) else None
            shared = RankFailure(str(problem), subject) if problem else None
            member.store.set(f"{place}/verdict", msgspec.json.encode(shared).decode())
            return problem
        if missing_keys(member.store, [f"{place}/verdict"], timeout + 2 * GRACE_SECONDS):
            return ReplayError(f"rank {member.rank} waited for what rank 0 makes of it, which has not answered")
        shared = msgspec.json.decode(member.store.get(f"{place}/verdict"), type=RankFailure | None)
        if shared is None:
            return None
        if shared.subject is None:
            return ReplayError(shared.reason)
        return RequestError(shared.subject, shared.reason.removeprefix(f"{shared.subject}: "))

    def _statuses(self, place: str, timeout: float) -> tuple[dict[int, RankFailure], list[int]]:
        """Return failed and silent ranks; when one has failed, the others have a little time left."""
        store = self._member.store
        deadline = time.monotonic() + timeout + GRACE_SECONDS
        failures, silent, self._sizes = {}, [], {}
        for rank in range(self._member.count):
            key = f"{place}/{rank}"
            if missing_keys(store, [key], deadline - time.monotonic()):
                silent.append(rank)
                continue
            failure, self._sizes[rank] = msgspec.json.decode(store.get(key), type=tuple[RankFailure | None, int])
            if failure:
                failures[rank] = failure
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return failures, silent


def _number(name: str, default: int | None = None) -> int:
    value = os.environ.get(name, default)
    try:
        return int(str(value))
    except ValueError:
        raise RequestError(name, f"{value!r} is not a number; start the ranks with torchrun") from None


def _store(seconds: float) -> Store:
    address = os.environ.get("MASTER_ADDR")
    if not address:
        raise RequestError("MASTER_ADDR", "is not set; start the ranks with torchrun")
    port, first = _number("MASTER_PORT"), _number("RANK") == 0
    # torchrun or rank 0 keeps the store; a second attempt must not find the keys of the first one.
    kept, attempt = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("USE_AGENT_STORE", "RESTART_COUNT"))
    try:
        store = TCPStore(
            address,
            port,
            is_master=first and kept != "True",
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,  # an error there would not name a rank
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise RequestError("MASTER_PORT", f"{port} is in use; choose another") from None
        raise ReplayError(f"no rank was met at {address}:{port} within {seconds:g} s ({first_line(error)})") from None
    return PrefixStore(f"cdpsim {attempt}", store)


def encode_result(value: object) -> bytes:
    """Return the bytes of a call's result, arrays included, of which reading runs no code."""
    return msgspec.msgpack.encode(value, enc_hook=_written)


def decode_result(data: bytes, kind: Any) -> Any:
    """Return the result in bytes of `encode_result`, as a value of its type."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_read)


def _written(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    raise NotImplementedError(f"a rank returned what cannot be written: {type(value).__name__}")


def _read(kind: Any, value: Any) -> object:
    kind = get_origin(kind) or kind
    if kind is Counter:
        return Counter(value)
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(bytearray(data), dtype).reshape(shape)
    if kind is slice:
        return slice(*value)
    raise NotImplementedError(f"what a rank returned cannot be read as {kind.__name__}")

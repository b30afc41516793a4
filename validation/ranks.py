"""One process a device: ranks that stay alive over many cases, and whoever starts them and waits for them."""

import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import multiprocessing

from validation.plan import ReplayError
from validation.replay import Case, Outcome, Prepared, Seat, parts_of, prepare
from validation.transport import Distributed

_START = 120.0  # seconds for a rank to import torch and to find the others, on a busy machine
_GRACE = 5.0  # seconds for ranks whose own waits have timed out to say so


@dataclass(frozen=True)
class _Failure:
    """What a rank says when it cannot go on."""

    reason: str


class Ranks:
    """Some ranks, each a process; a case uses as many of them as it has devices.

    One that dies, fails or says nothing ends them all, with an error that names it.
    """

    def __init__(self, count: int) -> None:
        self._folder = TemporaryDirectory(prefix="cdpsim-")
        # Ranks are forked off a process that has imported torch and done nothing else: that costs its imports once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["validation.ranks"])
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            meeting = str(Path(self._folder.name) / "store")
            process = context.Process(target=_serve, args=(rank, count, meeting, there), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        self._collect(_START)

    def run(self, case: Case, *, timeout: float = 60.0) -> list[Outcome]:
        """Replay a case and give what each of its devices came to; `timeout` seconds are for all of it."""
        for rank, end in enumerate(self._ends):
            try:
                end.send((case, timeout))
            except OSError:
                raise self._give_up(f"rank {rank} is dead {self._code(rank)}") from None
        outcomes = self._collect(timeout + _GRACE)
        return [outcome for outcome in outcomes if isinstance(outcome, Outcome)]

    @property
    def pids(self) -> list[int]:
        """The ranks' processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        """Let the ranks go; those that do not are ended."""
        for end in self._ends:
            end.close()  # a rank ends when nobody can tell it anything any more
        for process in self._processes:
            process.join(_GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, seconds: float) -> list[object]:
        """One answer of each rank; when one has failed, the others have a little time left to say what they saw."""
        deadline = time.monotonic() + seconds
        answers: dict[int, object] = {}
        missing = dict(enumerate(self._ends))
        while missing:
            ready = wait(list(missing.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, end in missing.items() if end in ready]:
                answers[rank] = self._answer(rank, missing.pop(rank))
                if isinstance(answers[rank], _Failure):
                    deadline = min(deadline, time.monotonic() + _GRACE)
        problems = [f"rank {rank}: {a.reason}" for rank, a in sorted(answers.items()) if isinstance(a, _Failure)]
        problems += [f"rank {rank} has not answered" for rank in missing]
        if problems:
            raise self._give_up("; ".join(problems))
        return [answers[rank] for rank in range(len(self._ends))]

    def _answer(self, rank: int, end: Connection) -> object:
        try:
            return end.recv()
        except (EOFError, OSError):
            raise self._give_up(f"rank {rank} died {self._code(rank)}") from None

    def _code(self, rank: int) -> str:
        self._processes[rank].join(_GRACE)
        return f"(exit code {self._processes[rank].exitcode})"

    def _give_up(self, reason: str) -> ReplayError:
        for process in self._processes:
            process.kill()
        self.close()
        return ReplayError(reason)


def _serve(rank: int, count: int, meeting: str, end: Connection) -> None:
    """Do what a rank is told until nobody tells it anything."""
    torch.set_num_threads(1)
    start = timedelta(seconds=_START)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=start)
    transport = Distributed()
    end.send(None)
    while True:
        try:
            case, timeout = end.recv()
        except (EOFError, OSError):
            break
        try:
            transport.timeout = timedelta(seconds=timeout)
            answer: object = _replay(rank, count, case, transport)
        except Exception as error:  # whatever it is, the launcher must learn of it
            answer = _Failure(f"{type(error).__name__}: {error}")
        end.send(answer)
    dist.destroy_process_group()


def _replay(rank: int, count: int, case: Case, transport: Distributed) -> Outcome | None:
    """Play one device of a case; a rank for which there is none only helps to make groups."""
    prepared = prepare(case)
    program = prepared.plan.program
    if program.devices > count:
        raise ReplayError(f"{case.schedule} has {program.devices} devices at n={case.n}, but there are {count} ranks")
    transport.make_groups([tuple(group.tolist()) for group in program.groups])
    transport.calls.clear()
    return _play(rank, prepared, transport) if rank < program.devices else None


def _play(rank: int, prepared: Prepared, transport: Distributed) -> Outcome:
    part = parts_of(prepared)[rank]
    seat = Seat(prepared, part, transport)
    for node in part.nodes:
        seat.device.play(node)
    return seat.outcome()

"""One process for each device: ranks that stay alive over many cases, and their launcher, which waits for them."""

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryFile, gettempdir
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch._C._distributed_c10d import FileStore

from cdpsim.errors import RequestError

from ..replay.case import Case, Outcome, profiled
from .member import RankFailure, answer_call, check_device, describe_failures, join_ranks, replay_part
from .parent import end_with_parent

Result = TypeVar("Result")

START_SECONDS = 120.0  # seconds for a rank to import torch and to find the others, on a busy machine
# Bytes of a folder's name that leave room for multiprocessing's socket, whose path has at most 107.
LONGEST_SOCKET_FOLDER = 74
GRACE_SECONDS = 3.0  # seconds for ranks to report that their own waits have timed out


def fork_context() -> Any:
    """Return a context that forks processes from one that has imported torch and done nothing else.

    So torch is imported once. Fake tensors and optimizers would make each process import `torch._dynamo` by itself.
    """
    if sys.platform != "linux":
        raise RequestError("ranks", "are started on Linux alone; take a machine that has it, or --single-process")
    if len(os.fsencode(gettempdir())) > LONGEST_SOCKET_FOLDER:
        raise RequestError("TMPDIR", f"leaves no room for a socket's name; {LONGEST_SOCKET_FOLDER} bytes are the most")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.fork_server", __name__, "torch._dynamo"])
    return context


class Ranks:
    """Several ranks, each a process on this machine; a case uses as many of them as it has devices.

    A rank that dies, fails or is silent ends them all, with an error that names it. They end with the thread that
    made the first of them, which is best the main thread.
    """

    reports = True  # whether this process has the results

    def __init__(self, count: int, *, device: str = "cpu", backend: str = "gloo", start: float = START_SECONDS) -> None:
        check_device(device, backend, count)
        self._start, self._joined = start, False
        context = fork_context()
        # Ranks meet in a file without a name, which needs no port and is never left behind.
        self._meeting = TemporaryFile()  # noqa: SIM115 - closed with the ranks
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            meeting = Connection(os.dup(self._meeting.fileno()))  # as which an open file gets into the process
            arguments = (rank, count, device, backend, meeting, there)
            process = context.Process(target=_serve_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def run(self, case: Case, *, timeout: float = 60.0) -> list[Outcome]:
        """Replay a case and return the outcome of each device; `timeout` seconds are for all of it."""
        return [outcome for outcome in self.call(replay_part, profiled(case), timeout=timeout) if outcome is not None]

    def call(self, function: Callable[..., Result], *arguments: object, timeout: float = 60.0) -> list[Result]:
        """Let every rank call a module's function with its `Member` and these arguments; return all results."""
        if not self._joined:
            self._tell(self._start)
            self._collect(self._start)
            self._joined = True
        self._tell((function, arguments, timeout))
        return cast(list[Result], self._collect(timeout))

    @property
    def pids(self) -> list[int]:
        """The ranks' processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        """End the ranks; one that does not end by itself is killed."""
        for end in self._ends:
            end.close()  # a rank ends when its connection is closed
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._meeting.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self._kill()

    def _tell(self, what: object) -> None:
        for end in self._ends:
            try:
                end.send(what)
            except OSError:
                continue  # it is dead, as `_collect` notices when it does not answer

    def _collect(self, seconds: float) -> list[object]:
        """Return one answer of each rank; when a rank has failed, the others have a little time left to report."""
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        answers: dict[int, object] = {}
        dead: dict[int, RankFailure] = {}
        missing = dict(enumerate(self._ends))
        while missing:
            ready = wait(list(missing.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, end in missing.items() if end in ready]:
                try:
                    answers[rank] = missing.pop(rank).recv()
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE_SECONDS)
                    how = describe_exit(self._processes[rank].exitcode)
                    dead[rank] = RankFailure(f"is gone ({how})", kind="killed")
                if rank in dead or isinstance(answers[rank], RankFailure):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        failures = dead | {rank: said for rank, said in answers.items() if isinstance(said, RankFailure)}
        if problem := describe_failures(failures, list(missing)):
            self._kill()
            raise problem
        return [answers[rank] for rank in range(len(self._ends))]


def describe_exit(code: int | None) -> str:
    """Return how a process ended, in words."""
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _serve_rank(rank: int, count: int, device: str, backend: str, meeting: Connection, end: Connection) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C comes to all processes; the launcher handles it
    torch.set_num_threads(1)
    try:
        seconds = end.recv()
        try:
            store = FileStore(f"/proc/self/fd/{meeting.fileno()}", count)
            member = join_ranks(rank, count, store, device=device, backend=backend, local_rank=rank, seconds=seconds)
        except Exception as error:
            end.send(RankFailure(str(error)))
            raise SystemExit(1) from None
        end.send(None)
        while True:
            function, arguments, timeout = end.recv()
            said = answer_call(member, function, arguments, timeout)
            end.send(said)
            if isinstance(said, RankFailure):
                # The end of this process is the message to all that wait for it.
                raise SystemExit(1)
    except (EOFError, OSError):
        pass  # the launcher is gone
    if dist.is_initialized():
        dist.destroy_process_group()

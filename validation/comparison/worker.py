"""A process for the trials of a battery: if it runs out of memory, hangs or is killed, only one trial is lost."""

import gc
import math
import signal
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import msgspec
import torch

from cdpsim.errors import RequestError

from ..calibrate import command as calibrate
from ..ranks.launcher import GRACE_SECONDS, START_SECONDS, Ranks, describe_exit, fork_context
from ..ranks.member import is_out_of_memory
from ..ranks.parent import end_with_parent
from ..replay.case import Case, prepare, profiled
from ..replay.contents import ReplayError
from ..replay.options import replayable
from ..report.schema import FailureKind, Report
from ..training.modules import Unfit, reason_of
from .replays import SingleProcess, compare_replay, model_hash
from .trials import Trial


class Failed(NamedTuple):
    """The reason for a missing result."""

    failure: FailureKind
    reason: str


class Replayed(NamedTuple):
    """A report, and the model file of its simulation, with its hash."""

    report: Report
    model_hash: str
    model: dict[str, Any]


class Calibrated(NamedTuple):
    """The results of a calibration, as plain values."""

    calibration: dict[str, Any]


Answer = Failed | Replayed | Calibrated


class Worker:
    """A process for trials, replaced by a new one after each trial that fails.

    Ranks have `timeout` seconds for a run, and a trial `spare` seconds more: for ranks to start, and for the process to
    name the ones that do not answer.
    """

    def __init__(self, device: str, timeout: float, spare: float = START_SECONDS) -> None:
        self._device, self._timeout, self._spare = device, timeout, spare
        self._process: Any = None
        self._end: Connection | None = None

    def make(self, trial: Trial, within: float = math.inf) -> Answer:
        """Make a trial within some seconds, and return its result, even if the process dies."""
        end = self._end or self._begin()
        try:
            answer = self._ask(end, trial, min(self._timeout + self._spare, within))
        except (EOFError, OSError):
            self._process.join(GRACE_SECONDS)
            answer = Failed("killed", f"its process is gone ({describe_exit(self._process.exitcode)})")
        if isinstance(answer, Failed):
            self.kill()
        return answer

    def _ask(self, end: Connection, trial: Trial, seconds: float) -> Answer:
        end.send((trial, self._timeout))
        if not end.poll(seconds):
            return Failed("timeout", f"has not ended within {seconds:.0f} s")
        answer: Answer = end.recv()
        return answer

    def _begin(self) -> Connection:
        context = fork_context()
        here, there = context.Pipe()
        self._process = context.Process(target=_serve_trials, args=(self._device, there))
        self._process.start()
        there.close()
        self._end = here
        here.recv()
        return here

    def kill(self) -> None:
        """End the process, and with it its ranks."""
        if self._end is None:
            return
        self._end.close()
        self._process.kill()
        self._process.join()
        self._end = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.kill()


def _serve_trials(device: str, end: Connection) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C comes to all processes; the battery handles it
    crew = RankPool(device)
    end.send(None)
    while True:
        try:
            trial, timeout = end.recv()
        except (EOFError, OSError):
            break
        end.send(_attempt(trial, crew, timeout))
    crew.leave()


class RankPool:
    """The ranks of a process, started when a trial needs them and kept for the next ones."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._ranks: Ranks | None = None
        self._count = 0

    def ranks(self, count: int) -> Ranks:
        """Return this number of ranks, or more."""
        if self._ranks is None or self._count < count:
            self.leave()
            self._ranks, self._count = Ranks(count, device=self.device), count
        return self._ranks

    def leave(self) -> None:
        """End the ranks, and free their memory."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _attempt(trial: Trial, crew: RankPool, timeout: float) -> Answer:
    try:
        if trial.case:
            return _replayed(trial, trial.case, crew, timeout)
        request = calibrate.CalibrationRequest(device=crew.device)
        found = calibrate.measure_machine(crew.ranks(request.ranks), request, calibrate.profile_of(request))
        return Calibrated(msgspec.to_builtins(found))
    except Exception as error:
        return failure_of(error)
    finally:
        gc.collect()
        if crew.device == "cuda":
            torch.cuda.empty_cache()  # for ranks on the same GPU


def _replayed(trial: Trial, case: Case, crew: RankPool, timeout: float) -> Replayed:
    case = profiled(replayable(case, alone=trial.alone))
    if trial.alone:
        crew.leave()
        players: SingleProcess | Ranks = SingleProcess()
    else:
        players = crew.ranks(prepare(case).plan.program.devices)
    report = compare_replay(case, players, timeout=timeout, repeats=trial.repeats)
    assert report is not None, "this process reports"
    return Replayed(report, model_hash(case.profile), case.profile.table())


def failure_of(error: Exception) -> Failed:
    """Return the reason for which a trial has failed, in a word and in one line."""
    reason = reason_of(error)
    if isinstance(error, RequestError):
        return Failed("import" if isinstance(error, Unfit) else "refused", reason)
    if isinstance(error, ReplayError):
        return Failed(error.kind, reason)
    if is_out_of_memory(error):
        return Failed("out of memory", reason)
    return Failed("error", f"{type(error).__name__}: {reason}")

"""A worker of a sweep: a process that takes blocks of points from its parent and appends their rows to its segment.

A line of its input is a list of points; a line of its output says how they ended. It ends with its parent.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec

from cdpsim.errors import RequestError
from cdpsim.numeric.paths import expect_many_runs
from cdpsim.schedules import SCHEDULES
from cdpsim.studies.evaluate import evaluate
from cdpsim.studies.sweep.evaluator import Evaluator
from cdpsim.studies.sweep.store import Segment, head_of, load_study

_PR_SET_PDEATHSIG = 1


class Reply(msgspec.Struct):
    """A line of a worker's output: its segment when it begins, counts of each block, or why it cannot go on."""

    segment: str = ""
    result: int = 0
    refused: int = 0
    failed: int = 0
    error: list[str] = []


def work(folder: str, stamp: str, parent: int) -> None:
    """Be a worker of the process `parent`, on the sweep in a folder, until the input ends."""
    _end_with(parent)
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing else may print into the replies
    try:
        plan = load_study(Path(folder), stamp)
    except RequestError as error:
        output.write(_encoded(Reply(error=[error.subject, error.problem])))
        return
    with Segment(Path(folder), head_of(plan)) as segment:
        _sync_on_signals(segment)
        serve_blocks(Evaluator(plan), segment, sys.stdin.buffer, output)


def serve_blocks(evaluator: Evaluator, segment: Segment, blocks: IO[bytes], replies: Any) -> None:
    """Answer the blocks of an input, and write a reply to each."""
    with expect_many_runs():
        _warm_up()
        replies.write(_encoded(Reply(segment=str(segment.path))))
        for line in blocks:
            try:
                counts = evaluator.answer_all(msgspec.json.decode(line), segment.append)
            except RequestError as error:  # of the segment
                replies.write(_encoded(Reply(error=[error.subject, error.problem])))
                return
            replies.write(_encoded(Reply(result=counts.result, refused=counts.refused, failed=counts.failed)))


def _encoded(reply: Reply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


def _warm_up() -> None:
    """Import what the first point would import, compiled loops too: a death meanwhile is no point's fault."""
    evaluate(next(iter(SCHEDULES)), 2)


def _end_with(parent: int) -> None:
    """Let Linux end this process with its parent; elsewhere the end of the input does, between blocks."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(0)


def _sync_on_signals(segment: Segment) -> None:
    """Write rows to the disk when a signal asks to end, or Slurm says that the time is nearly up."""

    def go_on(number: int, _: object) -> None:
        with contextlib.suppress(RequestError):
            segment.sync()

    def end(number: int, _: object) -> NoReturn:
        go_on(number, _)
        os._exit(128 + number)  # and not by an exception, which could come while the segment is closed

    for name, serve in (("SIGTERM", end), ("SIGINT", end), ("SIGUSR2", go_on)):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), serve)

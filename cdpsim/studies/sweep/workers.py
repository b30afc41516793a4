"""The parent of a sweep's workers: it hands out blocks of points, and starts another worker where one dies.

A block that a dead worker has not finished goes back to the others. The point that it had begun waits until the end; a
point that ended five workers is `failed`: fewer could be ended from outside, by chance during the same point.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cdpsim.errors import RequestError
from cdpsim.studies.sweep.evaluator import Evaluator, OutcomeCounts
from cdpsim.studies.sweep.store import Segment, encoded_plan, head_of, names_in, stamp_of
from cdpsim.studies.sweep.worker import Reply

if TYPE_CHECKING:
    from subprocess import Popen

MOST_DEATHS = 5  # of workers, by one point
BLOCK_SECONDS = 2.0
_END_SECONDS = 10.0  # that a worker has when there is nothing left for it
_FIRST_BLOCK, _LARGEST_BLOCK = 4, 4000
_MOST_FAILED_STARTS = 3  # one after another, of workers that end themselves before they begin
_MOST_KILLED_STARTS = 100  # likewise, of workers that are killed
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from cdpsim.studies.sweep.worker import work; "
    "work({folder!r}, {stamp!r}, {parent})"
)


class BlocksToDo:
    """Points that are to do, in memory: taken in blocks, given back by who cannot finish them."""

    def __init__(self, numbers: Sequence[int], workers: int) -> None:
        self._numbers = numbers
        self._next = 0
        self._workers = workers
        self._again: deque[int] = deque()
        self._suspects: deque[int] = deque()
        self._deaths: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> list[int]:
        """Return at most so many points, fewer where few are left; none if none are left but those in work."""
        with self._lock:
            left = len(self._numbers) - self._next + len(self._again)
            size = max(1, min(size, left // (2 * self._workers)))
            block = [self._again.popleft() for _ in range(min(size, len(self._again)))]
            if not block:
                block = list(self._numbers[self._next : self._next + size])
                self._next += len(block)
            return block or ([self._suspects.popleft()] if self._suspects else [])

    def give_back(self, block: Sequence[int], *, begun: bool) -> int | None:
        """Take back the points of a worker that died; return the first if it has ended too many workers.

        If the worker had `begun`, it died during the first.
        """
        with self._lock:
            suspect = block[0] if begun and block else None
            self._again.extend(block[1:] if suspect is not None else block)
            if suspect is None:
                return None
            self._deaths[suspect] = self._deaths.get(suspect, 0) + 1
            if self._deaths[suspect] >= MOST_DEATHS:
                return suspect
            self._suspects.append(suspect)
            return None


class Crew:
    """Workers, each a process that a thread of the parent starts, feeds and replaces."""

    def __init__(self, folder: Path, evaluator: Evaluator, numbers: Sequence[int], workers: int) -> None:
        self.counts = OutcomeCounts()
        self.error: RequestError | None = None
        self._folder, self._evaluator = folder, evaluator
        self._blocks = BlocksToDo(numbers, workers)
        self._workers = min(workers, len(numbers))
        self._stopped = False
        self._processes: dict[int, Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._segment = Segment(folder, head_of(evaluator.points.plan))  # of points that end their workers
        self._bad_starts = 0
        self._killed_starts = 0

    def run(self, tick: Callable[[OutcomeCounts], object]) -> OutcomeCounts:
        """Do all points, and call `tick` with the counts now and then; on an exception all that is done is kept."""
        threads = [threading.Thread(target=self._keep_worker, args=(k,), daemon=True) for k in range(self._workers)]
        with _passed_on(self._processes):
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():
                        thread.join(0.1)
                        tick(self.counts)
            finally:
                self._stop()
                for thread in threads:
                    thread.join()
                self._segment.close()
        if self.error is not None:
            raise self.error
        return self.counts

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._processes.values():
                process.terminate()

    def _fail(self, error: RequestError) -> None:
        self.error = self.error or error
        self._stop()

    def _keep_worker(self, number: int) -> None:
        """Feed a worker with blocks until none are left; start another when it dies."""
        size, segment = _FIRST_BLOCK, ""
        try:
            while not self._stopped and (block := self._blocks.take(size)):
                process = self._processes.get(number)
                if process is None:
                    process, segment = self._start(number)
                begun = time.monotonic()
                is_there = bool(segment) and process.poll() is None
                reply = _ask(process, block) if is_there else None
                if reply is None:
                    self._bury(number, block, segment, begun=is_there)
                    segment = ""
                elif reply.error:
                    self._fail(RequestError(*reply.error))
                else:
                    self._count(OutcomeCounts(reply.result, reply.refused, reply.failed))
                    size = _next_size(len(block), time.monotonic() - begun)
        except RequestError as error:
            self._fail(error)
        except OSError as error:
            self._fail(RequestError("workers", f"cannot be started ({error.strerror or error}); give fewer --workers"))
        finally:
            self._end(number)

    def _start(self, number: int) -> "tuple[Popen[bytes], str]":
        """Start a worker; return it and its segment, which is empty if it died before it began."""
        from subprocess import PIPE, Popen

        stamp = stamp_of(encoded_plan(self._evaluator.points.plan))
        program = _PROGRAM.format(path=sys.path, folder=str(self._folder), stamp=stamp, parent=os.getpid())
        own_group: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}  # Ctrl-C is its parent's
        with self._lock:
            if self._stopped:
                raise RequestError("workers", "are stopped")
            process = Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, **own_group)
            self._processes[number] = process
        reply = _read(process)
        if reply is None:
            return process, ""
        if reply.error:
            raise RequestError(*reply.error)
        self._bad_starts = self._killed_starts = 0
        return process, reply.segment

    def _count(self, counts: OutcomeCounts) -> None:
        with self._lock:
            self.counts.add(counts)

    def _bury(self, number: int, block: Sequence[int], segment: str, *, begun: bool) -> None:
        """Give back what a dead worker has not done of a block, and write down a point that ended too many.

        A worker that has not `begun` the block died before.
        """
        code = self._end(number)
        if self._stopped:
            return
        if not segment:
            self._refuse_bad_starts(code)
        done = names_in(Path(segment)) if segment else {}
        points = self._evaluator.points
        kinds = [done.get(points.name(points.index(one))) for one in block]
        left = [one for one, kind in zip(block, kinds, strict=True) if kind is None]
        self._count(OutcomeCounts(*(kinds.count(kind) for kind in msgspec.structs.asdict(self.counts))))
        poison = self._blocks.give_back(left, begun=begun)
        if poison is not None:
            why = f"killed by signal {-code}" if code < 0 else f"the process ended itself with exit code {code}"
            self._segment.append(self._evaluator.failed_row(poison, why))
            self._count(OutcomeCounts(failed=1))

    def _refuse_bad_starts(self, code: int) -> None:
        with self._lock:
            self._bad_starts += code >= 0
            self._killed_starts += code < 0
        if self._bad_starts >= _MOST_FAILED_STARTS or self._killed_starts >= _MOST_KILLED_STARTS:
            problem = f"end before they begin (exit code {code}); stderr above may say why"
            raise RequestError("workers", f"{problem}; give fewer --workers if memory is short")

    def _end(self, number: int) -> int:
        """Let a worker end, and return its exit code."""
        from subprocess import TimeoutExpired

        process = self._processes.get(number)
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        try:
            code = process.wait(_END_SECONDS)
        except TimeoutExpired:  # its rows are written
            process.kill()
            code = process.wait()
        with self._lock:
            self._processes.pop(number, None)
        return code


def _next_size(size: int, seconds: float) -> int:
    """Return the size of the next block: of about as much work as a block is to be, and at most four times the last."""
    return max(1, min(_LARGEST_BLOCK, 4 * size, round(size * BLOCK_SECONDS / max(seconds, 1e-6))))


def _ask(process: "Popen[bytes]", block: Sequence[int]) -> Reply | None:
    """Return the reply to a block; None if the worker died."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(list(block)).encode() + b"\n")
        process.stdin.flush()
    except OSError:
        return None
    return _read(process)


def _read(process: "Popen[bytes]") -> Reply | None:
    assert process.stdout is not None
    line = process.stdout.readline()
    return msgspec.json.decode(line, type=Reply) if line.endswith(b"\n") else None


@contextlib.contextmanager
def _passed_on(processes: "dict[int, Popen[bytes]]") -> Iterator[None]:
    """Pass SIGUSR2, by which Slurm says that the time is nearly up, on to the workers, inside."""
    number = getattr(signal, "SIGUSR2", None)
    here = threading.current_thread() is threading.main_thread()
    if number is None or not here or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return

    def pass_on(number: int, _: object) -> None:
        for process in list(processes.values()):
            process.send_signal(number)

    signal.signal(number, pass_on)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)

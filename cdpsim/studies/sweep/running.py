"""Running the points of a sweep that are to do: here, by an executor, or as parts on Slurm and Dask.

Blocks of points go to processes of concurrent.futures, each a pool of its own. A process appends a row as soon as a
point is done; where it dies, its file says at which point. That one is done last, and fails when it ended five
processes: fewer could be ended from outside, by chance during the same point.
"""

import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from datetime import timedelta
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from cdpsim.errors import RequestError, Stalled, TooLarge, one_line
from cdpsim.files.notes import progress_bar, say
from cdpsim.files.units import counted
from cdpsim.files.writing import COPIES
from cdpsim.limits import SHARES
from cdpsim.numeric.paths import expect_many_runs
from cdpsim.schedules import SCHEDULES
from cdpsim.studies.compare import evaluate
from cdpsim.studies.sweep.points import PointIndex, Sweep, SweepPart
from cdpsim.studies.sweep.questions import cell, find_question
from cdpsim.studies.sweep.results import study_status
from cdpsim.studies.sweep.store import (
    DONE,
    FAILED,
    REFUSED,
    RowFile,
    files_of,
    load_study,
    opened_study,
    row_of,
    rows_in,
)

DASK = "dask://"
MOST_DEATHS = 5  # of processes, by one point
MOST_JOBS = 1000  # of one array of Slurm
LINE_SECONDS = 30
_BLOCK_SECONDS, _FIRST_BLOCK, _LARGEST_BLOCK = 2.0, 4, 4000
_BLOCKS_IN_FLIGHT = 4  # for each process of an executor
_MOST_BAD_STARTS, _MOST_KILLED_STARTS = 3, 100  # of processes, one after another, that end before their first point
_LONGEST_LINE = 300  # characters of why a point has no result
_USUAL_ARRAY = 1001  # MaxArraySize where Slurm does not say it; indices are below it
_POLL_SECONDS = 10.0

Outcomes = Counter[str]  # how many points have a result, were refused, and failed


def usual_workers() -> int:
    """Return how many processors this process may use; in a job of Slurm's, those of its task."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isdigit():
        return max(1, int(given))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def answer(sweep: Sweep, index: PointIndex) -> tuple[str, Any]:
    """Return how a point ends, and its cells or the line that says why it has none."""
    try:
        return DONE, [cell(value) for value in find_question(sweep.what).ask(sweep.options(index))]
    except (RequestError, Stalled) as error:
        lacks_memory = isinstance(error, TooLarge) and "is free here" in str(error)  # elsewhere there may be more
        return FAILED if lacks_memory else REFUSED, one_line(str(error), _LONGEST_LINE)
    except Exception as error:  # a fault of ours, or too little memory, must not end the other points
        return FAILED, one_line(f"{type(error).__name__}: {error}", _LONGEST_LINE)


def answer_block(folder: str, stamp: str, block: list[PointIndex], processes: int) -> tuple[Outcomes, float]:
    """Append the rows of points of a sweep to this process's file; return how they end, and the seconds it took.

    All `processes` share the memory that is free.
    """
    return copy_context().run(_answer_all, Path(folder), _loaded(folder, stamp), block, processes)


def _answer_all(folder: Path, sweep: Sweep, block: list[PointIndex], processes: int) -> tuple[Outcomes, float]:
    _warm_up()
    COPIES.set(sweep.texts_of_files)
    SHARES.set(processes)
    begun, outcomes = time.monotonic(), Outcomes()
    with RowFile(folder) as rows, expect_many_runs():
        for index in block:
            kind, outcome = answer(sweep, index)
            rows.append(row_of(sweep.name(index), kind, outcome))
            outcomes[kind] += 1
    return outcomes, time.monotonic() - begun


@lru_cache(4)
def _loaded(folder: str, stamp: str) -> Sweep:
    return load_study(Path(folder), stamp)


@cache
def _warm_up() -> None:
    """Import what the first point would import, compiled loops too: a death meanwhile is no point's fault."""
    with expect_many_runs():
        evaluate(next(iter(SCHEDULES)), 2)


def begin_worker() -> None:
    """Let this process end with its parent, leave signals to that, and print nothing into its output."""

    def end_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    for name in ("SIGINT", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with suppress(OSError):  # without stderr
        os.dup2(2, 1)


def run_part(
    folder: str | Path,
    part: SweepPart = (1, 1),
    workers: int | None = None,
    limit: int | None = None,
    executor: Any = None,
) -> Outcomes:
    """Answer the points of a part of the sweep in a folder that are to do, at most `limit` of them."""
    folder = Path(folder)
    sweep, store = opened_study(folder)
    report_damage(store.damaged)
    here = list(sweep.of_part(part))
    to_do = [index for index in here if sweep.name(index) not in store]
    say(f"{folder}: {counted(sweep.count, 'point')}, {len(here):,} here, {len(here) - len(to_do):,} done before")
    del store, here
    return _Crew(folder, sweep, to_do[:limit], workers, executor).run() if to_do else Outcomes()


def report_damage(damaged: list[str]) -> None:
    """Say which lines of a folder are no rows, so that their points are to do again."""
    if damaged:
        are = "are no rows" if len(damaged) > 1 else "is no row"
        say(f"{counted(len(damaged), 'damaged line')} {are}: {'; '.join(damaged[:3])}")


class _Crew:
    """Executors that answer blocks of points, one at a time: processes of this machine, or one that was given."""

    def __init__(self, folder: Path, sweep: Sweep, to_do: list[PointIndex], workers: int | None, executor: Any) -> None:
        self._folder, self._sweep, self._given = folder, sweep, executor
        self._left = to_do[::-1]  # taken from the end; points that ended a process wait at the beginning
        own = min(workers or usual_workers(), len(to_do))
        self._processes: int = getattr(executor, "_max_workers", 1) if executor else own
        self._sizes = [_FIRST_BLOCK] * self._processes * (_BLOCKS_IN_FLIGHT if executor else 1)
        self._executors: dict[int, ProcessPoolExecutor] = {}  # each of one process
        self._in_work: dict[Future[tuple[Outcomes, float]], tuple[int, list[PointIndex]]] = {}
        self._deaths: Counter[PointIndex] = Counter()
        self._bad_starts = 0
        self.outcomes = Outcomes()
        self._total, self._bar = len(to_do), progress_bar("points", total=len(to_do), unit="")
        self._begun = self._said = time.monotonic()

    def run(self) -> Outcomes:
        """Do all points; on an exception all that is done is kept."""
        idle = [*range(len(self._sizes))]
        try:
            while True:
                while idle and self._left:
                    self._submit(idle.pop())
                if not self._in_work:
                    return self.outcomes
                done, _ = wait(self._in_work, LINE_SECONDS, FIRST_COMPLETED)
                idle += map(self._receive, done)
                self._show()
        finally:
            for slot in [*self._executors]:
                self._end(slot, kill=bool(self._in_work))
            if self._bar is not None:
                self._bar.close()

    def _show(self) -> None:
        """Show how many points are done: in a bar on a terminal, elsewhere in a line each 30 seconds."""
        done, failed, now = self.outcomes.total(), self.outcomes[FAILED], time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{failed} failed" if failed else "", refresh=False)
            self._bar.update(done - self._bar.n)
        elif now - self._said >= LINE_SECONDS or (done >= 100 and self._said == self._begun):
            self._said = now
            say(progress_line(done, failed, self._total, done / max(now - self._begun, 1e-9)))

    def _submit(self, slot: int) -> None:
        size = max(1, min(self._sizes[slot], len(self._left) // (2 * len(self._sizes))))
        block = self._left[: -size - 1 : -1]
        del self._left[-size:]
        future: Future[tuple[Outcomes, float]] = Future()
        try:
            with _without_main():
                if not self._given and slot not in self._executors:
                    spawn = multiprocessing.get_context("spawn")
                    self._executors[slot] = ProcessPoolExecutor(1, spawn, begin_worker)
                executor = self._given or self._executors[slot]
                future = executor.submit(answer_block, str(self._folder), self._sweep.stamp, block, self._processes)
        except BrokenExecutor as error:  # it died since its last block
            future.set_exception(error)
        except OSError as error:
            raise RequestError("workers", f"cannot be started ({error.strerror or error}); give fewer") from None
        self._in_work[future] = slot, block

    def _receive(self, future: "Future[tuple[Outcomes, float]]") -> int:
        """Count the points of a block that was done, or bury a process that died; return who has no block now."""
        slot, block = self._in_work.pop(future)
        try:
            outcomes, seconds = future.result()
        except RequestError:
            raise
        except Exception as error:
            if self._given or not isinstance(error, BrokenExecutor):
                problem = f"{type(error).__name__}: {error}; all rows before are kept: give the same call again"
                raise RequestError("executor", problem) from None
            self._bury(slot, block)
        else:
            self.outcomes += outcomes
            self._bad_starts = 0
            in_time = int(len(block) * _BLOCK_SECONDS / max(seconds, 1e-6))
            self._sizes[slot] = min(_LARGEST_BLOCK, 4 * len(block), in_time)
        return slot

    def _bury(self, slot: int, block: list[PointIndex]) -> None:
        """Take back what a dead process has not done of a block, and write down a point that ended too many."""
        process = self._end(slot, kill=False)
        files, columns = files_of(self._folder, process.pid), len(find_question(self._sweep.what).columns)
        done = {name: kind for path in files for name, kind, _ in rows_in(path, columns, [])}
        names = {index: self._sweep.name(index) for index in block}
        self.outcomes.update(done[name] for name in names.values() if name in done)
        left = [index for index in block if names[index] not in done]
        if not files:
            self._bad_starts += 1
            if self._bad_starts >= (_MOST_BAD_STARTS if process.exitcode >= 0 else _MOST_KILLED_STARTS):
                problem = f"end before they begin (exit code {process.exitcode}); stderr above may say why"
                raise RequestError("workers", f"{problem}; give fewer --workers if memory is short")
        elif left:
            suspect = left.pop(0)
            self._deaths[suspect] += 1
            if self._deaths[suspect] < MOST_DEATHS:
                self._left.insert(0, suspect)
            else:
                code = process.exitcode
                why = f"killed by signal {-code}" if code < 0 else f"the process ended itself with exit code {code}"
                with RowFile(self._folder) as rows:
                    rows.append(row_of(names[suspect], FAILED, why))
                self.outcomes[FAILED] += 1
        self._left.extend(left[::-1])

    def _end(self, slot: int, *, kill: bool) -> Any:
        """End a process, whose rows are written, and return it."""
        executor = self._executors.pop(slot)
        process: Any = next(iter(executor._processes.values()), None)  # none, if it could not be started
        if process is not None and kill:
            process.kill()
        executor.shutdown(cancel_futures=True)
        if process is not None:
            process.join()
            for path in files_of(self._folder, process.pid):
                with path.open("ab") as file:
                    os.fsync(file.fileno())
        return process


@contextmanager
def _without_main() -> Iterator[None]:
    """Let a process start without the script of its parent, which would run once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def progress_line(done: int, failed: int, total: int, rate: float) -> str:
    """Return a line about points that are done, at what rate, and how long the others will take."""
    left = timedelta(seconds=round((total - done) / rate)) if rate else "unknown time"
    return f"{done:,} of {total:,} points, {failed:,} failed, {rate:.3g} /s, {left} left"


class SweepJob:
    """A part of a sweep as a job: it goes on after Slurm has stopped it and queued it again."""

    def __call__(self, folder: str, part: SweepPart) -> None:
        """Answer the points of a part with all processors of the job."""
        run_part(folder, part)

    def checkpoint(self, folder: str, part: SweepPart) -> Any:
        """Return what submitit queues when the time of a job is up: the same part, of which rows are kept."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder, part)


def check_slurm() -> None:
    """Refuse to submit jobs where that cannot be done."""
    try:
        import submitit  # noqa: F401
    except ImportError:
        problem = "is not installed, and submits the jobs; pip install 'cdpsim[slurm]', or give --part to your own jobs"
        raise RequestError("submitit", problem) from None
    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise RequestError("slurm", f"there is no {program} here; run this where jobs are submitted, or use --part")


def run_on_slurm(folder: Path, workers: int, parameters: Mapping[str, Any], *, detach: bool) -> None:
    """Submit the points of a sweep as a job array; wait for its end unless the parent is to leave.

    A job that fails leaves its points to do, and no other job knows of it.
    """
    from subprocess import CalledProcessError

    import submitit

    parts = min(workers, load_study(folder).count, MOST_JOBS, largest_array())
    executor = submitit.SlurmExecutor(folder / "slurm")
    try:
        executor.update_parameters(array_parallelism=parts, job_name="cdpsim", **{"time": 60, **parameters})
        jobs = executor.map_array(SweepJob(), [str(folder)] * parts, [(k, parts) for k in range(1, parts + 1)])
    except (TypeError, ValueError, CalledProcessError, submitit.core.utils.FailedJobError) as error:
        raise RequestError("slurm", f"refused the jobs ({error}); change --slurm") from None
    submitted = f"{counted(parts, 'job')}, {jobs[0].job_id} and on"
    say(f"slurm: {submitted}; `cdpsim sweep status {folder}` says how far they are")
    if not detach:
        wait_for(folder, jobs)


def largest_array() -> int:
    """Return how many jobs an array may have here: Slurm bounds their largest index, which begins at 0."""
    from subprocess import CalledProcessError, run

    try:
        shown = run(["scontrol", "show", "config"], capture_output=True, text=True, check=True).stdout
    except (OSError, CalledProcessError):
        shown = ""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", shown, re.MULTILINE)
    return max(1, int(found[1]) if found else _USUAL_ARRAY)


def dask_client(address: str) -> Any:
    """Return a client of a running Dask cluster."""
    try:
        from distributed import Client
    except ImportError:
        problem = "is not installed, and finds the cluster's workers; pip install 'cdpsim[dask]', or use --part"
        raise RequestError("distributed", problem) from None
    where = address.removeprefix(DASK)
    try:
        return Client(where, timeout=10)
    except (OSError, ValueError) as error:
        raise RequestError("on", f"no Dask scheduler answers at {where} ({error}); check its address") from None


def run_on_dask(folder: Path, client: Any, workers: int | None) -> None:
    """Run a part of a sweep as a long task on each worker of a Dask cluster; results go by the folder."""
    with client:
        parts = workers or len(client.scheduler_info(n_workers=-1)["workers"])
        if not parts:
            raise RequestError("on", "the Dask cluster has no workers; start some, or give --workers")
        settings: dict[str, Any] = {"pure": False, "retries": 10**6}
        every = [(k, parts) for k in range(1, parts + 1)]
        tasks = [client.submit(run_dask_part, str(folder.resolve()), part, **settings) for part in every]
        wait_for(folder, tasks)
        for task in tasks:
            if task.status == "error":
                raise RequestError("dask", f"a task failed ({task.exception()}); all rows before are kept")


def run_dask_part(folder: str, part: SweepPart) -> int:
    """Answer the points of a part by a process beside the Dask worker, which a point cannot end."""
    multiprocessing.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]
    return run_part(folder, part, workers=1).total()


def wait_for(folder: Path, jobs: Sequence[Any]) -> None:
    """Wait until jobs are over, and say now and then how far they are."""
    begun = said = time.monotonic()
    seconds = 0.1
    while not all(job.done() for job in jobs):
        time.sleep(seconds)
        seconds = min(2 * seconds, _POLL_SECONDS)
        if time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            status = study_status(folder)
            done = status.points - status.to_do
            say(progress_line(done, status.failed, status.points, status.rate))
    say(f"{folder}: jobs are over after {timedelta(seconds=round(time.monotonic() - begun))}")

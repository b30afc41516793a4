"""Running the points of a sweep that are to do: by local workers, or by an executor; one part, or all."""

import os
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdpsim.errors import RequestError
from cdpsim.files.notes import progress_bar, say
from cdpsim.files.units import counted
from cdpsim.studies.sweep.evaluator import Evaluator, OutcomeCounts, answer_block
from cdpsim.studies.sweep.points import Points, SweepPart
from cdpsim.studies.sweep.store import Segment, Store, encoded_plan, head_of, load_study, stamp_of
from cdpsim.studies.sweep.workers import Crew

if TYPE_CHECKING:
    from concurrent.futures import Future

LINE_SECONDS = 30
_BLOCK_OF_EXECUTOR = 200
_BLOCKS_IN_FLIGHT = 4  # for each worker of an executor


def usual_workers() -> int:
    """Return how many processors this process may use; in a job of Slurm's, those of its task."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isdigit():
        return max(1, int(given))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def points_to_do(store: Store, points: Points, part: SweepPart) -> tuple["array[int]", int]:
    """Return the numbers of the points of a part that are to do, in working order, and how many are done."""
    numbers, done = array("q"), 0
    for index in points.of_part(part):
        if points.name(index) in store:
            done += 1
        else:
            numbers.append(points.number(index))
    return numbers, done


def run_part(
    folder: str | Path,
    part: SweepPart | None = None,
    workers: int | None = None,
    limit: int | None = None,
    executor: Any = None,
) -> OutcomeCounts:
    """Answer the points of a part of the sweep in a folder that are to do, at most `limit` of them."""
    folder = Path(folder)
    evaluator = Evaluator(load_study(folder))
    store = Store(folder)
    report_damage(store.damaged)
    numbers, done = points_to_do(store, evaluator.points, part or SweepPart())
    del store
    say(f"{folder}: {counted(evaluator.points.count, 'point')}, {len(numbers) + done:,} here, {done:,} done before")
    numbers = numbers[:limit]
    if not numbers:
        return OutcomeCounts()
    tick = _Progress(len(numbers))
    try:
        if executor is not None:
            return _run_by_executor(folder, evaluator, numbers, executor, tick)
        return Crew(folder, evaluator, numbers, workers or usual_workers()).run(tick)
    finally:
        tick.close()


def report_damage(damaged: Sequence[str]) -> None:
    """Say which lines of a store are no rows, so that their points are to do again."""
    if damaged:
        are = "are no rows" if len(damaged) > 1 else "is no row"
        say(f"{counted(len(damaged), 'damaged line')} {are}: {'; '.join(damaged[:3])}")


def _run_by_executor(
    folder: Path, evaluator: Evaluator, numbers: Sequence[int], executor: Any, tick: "_Progress"
) -> OutcomeCounts:
    """Answer points by anything that has `submit`; this process writes their rows."""
    from concurrent.futures import FIRST_COMPLETED, wait

    counts = OutcomeCounts()
    waiting: set[Future[tuple[OutcomeCounts, list[bytes]]]] = set()
    most = _BLOCKS_IN_FLIGHT * (getattr(executor, "_max_workers", None) or usual_workers())
    size = max(1, min(_BLOCK_OF_EXECUTOR, len(numbers) // (2 * most)))
    stamp = stamp_of(encoded_plan(evaluator.points.plan))
    starts = iter(range(0, len(numbers), size))
    with Segment(folder, head_of(evaluator.points.plan)) as segment:
        start = next(starts, None)
        while start is not None or waiting:
            while start is not None and len(waiting) < most:
                waiting.add(executor.submit(answer_block, str(folder), stamp, list(numbers[start : start + size])))
                start = next(starts, None)
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                counts.add(_append_all(segment, future))
                tick(counts)
    return counts


def _append_all(segment: Segment, future: "Future[tuple[OutcomeCounts, list[bytes]]]") -> OutcomeCounts:
    try:
        counts, rows = future.result()
    except RequestError:
        raise
    except Exception as error:  # such as a broken pool of processes
        problem = f"{type(error).__name__}: {error}; all rows before are kept: give the same call again"
        raise RequestError("executor", problem) from None
    for row in rows:
        segment.append(row)
    return counts


class _Progress:
    """Progress of a sweep on stderr: a bar on a terminal, elsewhere a line each 30 seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._shown = total, 0
        self._bar = progress_bar("points", total=total, unit="")
        self._begun = self._said = time.monotonic()
        self._is_estimated = False

    def __call__(self, counts: OutcomeCounts) -> None:
        """Show how many points are done."""
        now, done = time.monotonic(), counts.all
        if self._bar is not None:
            if done > self._shown:
                if counts.failed:
                    self._bar.set_postfix_str(f"{counts.failed} failed", refresh=False)
                self._bar.update(done - self._shown)
        elif now - self._said >= LINE_SECONDS or (done >= 100 and not self._is_estimated):
            self._said, self._is_estimated = now, True
            say(progress_line(counts, self._total, done / max(now - self._begun, 1e-9)))
        self._shown = done

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()


def progress_line(counts: OutcomeCounts, total: int, rate: float) -> str:
    """Return a line about points that are done, at what rate, and how long the others will take."""
    left = (total - counts.all) / rate if rate else float("inf")
    return f"{counts.all:,} of {total:,} points, {counts.failed:,} failed, {rate:.3g} /s, {duration_text(left)} left"


def duration_text(seconds: float) -> str:
    """Return a time for people.

    >>> duration_text(59), duration_text(3700)
    ('59 s', '1 h 1 min')
    """
    if seconds == float("inf"):
        return "unknown time"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"

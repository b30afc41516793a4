"""Parts of a sweep on other machines: as a job array of Slurm, by submitit, or on the workers of a Dask cluster."""

import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cdpsim.errors import RequestError
from cdpsim.files.notes import say
from cdpsim.files.units import counted
from cdpsim.studies.sweep.evaluator import OutcomeCounts
from cdpsim.studies.sweep.points import Points, SweepPart
from cdpsim.studies.sweep.running import duration_text, progress_line, run_part
from cdpsim.studies.sweep.store import Store, load_study

DASK = "dask://"
MOST_JOBS = 1000  # of one array
_USUAL_ARRAY = 1001  # MaxArraySize where Slurm does not say it; indices are below it
_POLL_SECONDS = 10.0
_JOB_FOLDER = "slurm"


class SweepJob:
    """A part of a sweep as a job: it goes on after Slurm has stopped it and queued it again."""

    def __call__(self, folder: str, part: SweepPart) -> None:
        """Answer the points of a part with all processors of the job."""
        run_part(folder, part)

    def checkpoint(self, folder: str, part: SweepPart) -> Any:
        """Return what submitit queues when the time of a job is up: the same part, of which rows are kept."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder, part)


def run_on_slurm(folder: Path, workers: int, parameters: Mapping[str, Any], *, detach: bool) -> None:
    """Submit the points of a sweep as a job array; wait for its end unless the parent is to leave.

    A job that fails leaves its points to do, and no other job knows of it.
    """
    from subprocess import CalledProcessError

    try:
        import submitit
    except ImportError:
        problem = (
            "is not installed, and submits the jobs; pip install 'cdpsim[slurm]', or give --part to jobs of your own"
        )
        raise RequestError("submitit", problem) from None
    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise RequestError("slurm", f"there is no {program} here; run this where jobs are submitted, or use --part")
    parts = min(workers, Points(load_study(folder)).count, MOST_JOBS, largest_array())
    executor = submitit.SlurmExecutor(folder / _JOB_FOLDER)
    try:
        executor.update_parameters(array_parallelism=parts, job_name="cdpsim", **{"time": 60, **parameters})
        every = [SweepPart(k, parts) for k in range(1, parts + 1)]
        jobs = executor.map_array(SweepJob(), [str(folder)] * parts, every)
    except (TypeError, ValueError, CalledProcessError, submitit.core.utils.FailedJobError) as error:
        raise RequestError("slurm", f"refused the jobs ({error}); change --slurm") from None
    say(
        f"slurm: {counted(parts, 'job')}, {jobs[0].job_id} and on; `cdpsim sweep status {folder}` says how far they are"
    )
    if not detach:
        wait_for(folder, lambda: all(job.done() for job in jobs))


def largest_array() -> int:
    """Return how many jobs an array may have here: Slurm bounds their largest index, which begins at 0."""
    from subprocess import CalledProcessError, run

    try:
        shown = run(["scontrol", "show", "config"], capture_output=True, text=True, check=True).stdout
    except (OSError, CalledProcessError):
        shown = ""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", shown, re.MULTILINE)
    return max(1, int(found[1]) if found else _USUAL_ARRAY)


def run_on_dask(folder: Path, address: str, workers: int | None) -> None:
    """Run a part of a sweep as a long task on each worker of a running Dask cluster; results go by the folder."""
    try:
        from distributed import Client
    except ImportError:
        problem = "is not installed, and finds the cluster's workers; pip install 'cdpsim[dask]', or use --part"
        raise RequestError("distributed", problem) from None
    where = address.removeprefix(DASK)
    try:
        client = Client(where, timeout=10)
    except (OSError, ValueError) as error:
        raise RequestError("on", f"no Dask scheduler answers at {where} ({error}); check its address") from None
    with client:
        parts = workers or len(client.scheduler_info(n_workers=-1)["workers"])
        if not parts:
            raise RequestError("on", f"the Dask cluster at {where} has no workers; start some, or give --workers")
        every = [SweepPart(k, parts) for k in range(1, parts + 1)]
        settings: dict[str, Any] = {"pure": False, "retries": 10**6}
        tasks = [client.submit(run_dask_part, str(folder.resolve()), part, **settings) for part in every]
        wait_for(folder, lambda: all(task.done() for task in tasks))
        for task in tasks:
            if task.status == "error":
                raise RequestError("dask", f"a task failed ({task.exception()}); all rows before are kept")


def run_dask_part(folder: str, part: SweepPart) -> int:
    """Answer the points of a part by a process beside the Dask worker, which a point cannot end."""
    return run_part(folder, part, workers=1).all


def wait_for(folder: Path, is_over: Callable[[], bool]) -> None:
    """Wait until jobs are over, and say now and then how far they are."""
    points = Points(load_study(folder)).count
    begun = said = time.monotonic()
    before = len(Store(folder))
    seconds = 0.1
    while not is_over():
        time.sleep(seconds)
        seconds = min(2 * seconds, _POLL_SECONDS)
        if time.monotonic() - said >= 30:
            said = time.monotonic()
            done = len(Store(folder))
            say(progress_line(OutcomeCounts(result=done), points, (done - before) / (said - begun)))
    say(f"{folder}: jobs are over after {duration_text(time.monotonic() - begun)}")
